"""What writers do: changes of names and attributes, things that belong together, and which of all comes next."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace

from scripts.crash.choosing import big_files, directories, files, length, new_name, pick
from scripts.crash.contending import contend
from scripts.crash.content import MIB
from scripts.crash.tree import Kind, Node, below, put, remove
from scripts.crash.writer import Checkpoint, HotWrite, Writer
from scripts.crash.writing import (
    BIG_FILES_MAX,
    MODES,
    append,
    change_middle,
    create,
    long_file,
    new_file,
    overwrite_all,
    rewrite,
    truncate,
)

FILES_MAX = 40
DIRECTORIES_MAX = 7
CHECKPOINTS_MAX = 3
HOT_NAMES = 3
CONTEND_WEIGHT = 20
DIRECTORY_MODES = (0o755, 0o700, 0o750)


def prepare(w: Writer) -> None:
    """The directories that everything else is in."""
    for path in (w.top, f"{w.top}/turns"):
        if path not in w.tree:
            with w.step(f"mkdir {path}", put(w.tree, path, Node(Kind.DIRECTORY, mode=0o755))):
                os.mkdir(w.path(path), 0o755)


def act(w: Writer) -> None:
    """One change, or several that belong together."""
    count = sum(node.kind is Kind.FILE for node in w.tree.values())
    weights = dict(WEIGHTS)
    if w.mounts > 1:
        weights |= {hot: 0, contend: CONTEND_WEIGHT if w.contends else 0}
    if count > FILES_MAX:
        weights[delete] *= 5
        weights[create] = 1
    choice: Callable[[Writer], None] = w.random.choices(list(weights), list(weights.values()))[0]
    choice(w)
    if w.random.random() < 0.1:
        time.sleep(w.random.random() * 0.01)


# -- names


def delete(w: Writer) -> None:
    links = [path for path, node in w.tree.items() if node.kind is Kind.LINK]
    held = [file.path for file in w.open if file.path]
    if path := pick(w, files(w) + held + links):
        unlink(w, path)


def unlink(w: Writer, path: str) -> None:
    with w.step(f"unlink {path}", remove(w.tree, path), [path]):
        os.unlink(w.path(path))
    for file in w.open:
        if file.path == path:
            file.path = ""


def rename_file(w: Writer) -> None:
    held = [file.path for file in w.open if file.path]
    if path := pick(w, files(w) + held):
        w.rename(path, new_name(w, "f"))


def rename_over(w: Writer) -> None:
    """A new file takes the name of another, or of a link."""
    links = [path for path, node in w.tree.items() if node.kind is Kind.LINK]
    target = pick(w, files(w) + links)
    if target:
        path = new_name(w, "t")
        new_file(w, path, length(w))
        w.rename(path, target)


def make_directory(w: Writer) -> None:
    if len(directories(w)) >= DIRECTORIES_MAX:
        return
    path, mode = new_name(w, "d"), w.random.choice(DIRECTORY_MODES)
    with w.step(f"mkdir {path}", put(w.tree, path, Node(Kind.DIRECTORY, mode=mode)), [path]):
        os.mkdir(w.path(path), mode)


def remove_directory(w: Writer) -> None:
    path = pick(w, [path for path in directories(w) if path != w.top and not below(w.tree, path)])
    if path:
        with w.step(f"rmdir {path}", remove(w.tree, path), [path]):
            os.rmdir(w.path(path))


def rename_directory(w: Writer) -> None:
    path = pick(w, [path for path in directories(w) if path != w.top])
    if not path:
        return
    empty = [other for other in directories(w) if other != w.top and not below(w.tree, other)]
    new = pick(w, empty) if w.random.random() < 0.2 else new_name(w, "d")
    if new and new != path and not new.startswith(path + "/") and not path.startswith(new + "/"):
        w.rename(path, new)


def link(w: Writer) -> None:
    path, target = new_name(w, "l"), f"to-{w.random.randrange(1 << 30)}"
    with w.step(f"symlink {path} to {target}", put(w.tree, path, Node(Kind.LINK, target=target)), [path]):
        os.symlink(target, w.path(path))


def set_mode(w: Writer) -> None:
    if w.random.random() < 0.2:
        path, mode = pick(w, directories(w)), w.random.choice(DIRECTORY_MODES)
    else:
        path, mode = pick(w, files(w)), w.random.choice(MODES)
    if path:
        with w.step(f"chmod {path} {mode:o}", put(w.tree, path, replace(w.tree[path], mode=mode))):
            os.chmod(w.path(path), mode)


def set_time(w: Writer) -> None:
    if path := pick(w, files(w)):
        chosen = w.random.randrange(10**18, 16 * 10**17)
        with w.step(f"utime {path} {chosen}", put(w.tree, path, replace(w.tree[path], mtime_ns=chosen))):
            os.utime(w.path(path), ns=(chosen, chosen))


def sync(w: Writer) -> None:
    """fsync of a file that nobody writes, or of a directory and all that was closed in it before. A file that was
    renamed before is in the store then, but not yet under its new name."""
    path = pick(w, files(w) if w.random.random() < 0.5 else directories(w))
    if not path:
        return
    with w.step(f"open-read {path}"):
        fd = os.open(w.path(path), os.O_RDONLY)
    try:
        with w.step(f"fsync {path}"):
            os.fsync(fd)
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
    w.claim_synced(path)


# -- what belongs together


def take_turns(w: Writer) -> None:
    """Two files of one directory are written by turns: whoever sees a turn of one must see that of the other before."""
    first, second = (w.turn(w.tree, name) for name in ("a", "b"))
    for name in ("a", "b") if first == second else ("b",):
        path = f"{w.top}/turns/{name}"
        w.turns[w.next_id] = first + 1 if first == second else first
        if path in w.tree:
            overwrite_all(w, path)
        else:
            new_file(w, path, length(w))


def checkpoint(w: Writer) -> None:
    """A directory of shards, published by a marker that is closed last or by a rename of the directory."""
    there = sorted({path for path in w.tree if path.startswith(f"{w.top}/ckpt-") and path.count("/") == 1})
    unfinished = [path for path in there if path not in w.checkpoints or not w.checkpoints[path].complete_ns]
    if unfinished or len(there) >= CHECKPOINTS_MAX:
        _remove_checkpoint(w, (unfinished or there)[0])
        return
    number = len(w.checkpoints)
    by_rename = w.random.random() < 0.5
    name = f"{w.top}/ckpt-{number}"
    place = f"{name}.part" if by_rename else name
    count = w.random.randint(1, 6)
    group = w.checkpoints[name] = Checkpoint(name, "" if by_rename else f"_SUCCESS.{count}")
    with w.step(f"mkdir {place}", put(w.tree, place, Node(Kind.DIRECTORY, mode=0o755)), [place]):
        os.mkdir(w.path(place), 0o755)
    for shard in range(count):
        big = w.random.random() < 0.03 and big_files(w) < BIG_FILES_MAX
        size = w.random.randint(17 * MIB, 24 * MIB) if big else length(w)
        group.files[f"shard-{shard}"] = new_file(w, f"{place}/shard-{shard}", size)
    if by_rename:
        w.rename(place, name)
    else:
        new_file(w, f"{name}/{group.marker}", 100)
    group.complete_ns = time.monotonic_ns()


def _remove_checkpoint(w: Writer, directory: str) -> None:
    group = w.checkpoints.get(directory)
    if group is not None and not group.removing_ns:
        group.removing_ns = time.monotonic_ns()
    for path in sorted(below(w.tree, directory), reverse=True):
        unlink(w, path)
    with w.step(f"rmdir {directory}", remove(w.tree, directory), [directory]):
        os.rmdir(w.path(directory))


def hot(w: Writer) -> None:
    """Rename a new file onto a name that all writers rename onto."""
    path = new_name(w, "h")
    content = new_file(w, path, length(w))
    name = f"shared/hot-{w.random.randrange(HOT_NAMES)}"
    after = remove(w.tree, path)
    write = HotWrite(name, content, time.monotonic_ns(), after=after)
    w.hot.append(write)
    with w.step(f"rename {path} {name} {list(content)}", after, [path]):
        os.rename(w.path(path), w.path(name))
    write.ended_ns, write.happened, write.step = time.monotonic_ns(), True, w.steps


WEIGHTS: dict[Callable[[Writer], None], int] = {
    create: 12,
    rewrite: 10,
    append: 6,
    change_middle: 6,
    truncate: 3,
    long_file: 12,
    delete: 8,
    rename_file: 5,
    rename_over: 6,
    make_directory: 4,
    remove_directory: 2,
    rename_directory: 3,
    link: 3,
    set_mode: 4,
    set_time: 3,
    sync: 3,
    take_turns: 5,
    checkpoint: 4,
    hot: 6,
}
