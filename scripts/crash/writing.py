"""Changes of bytes: new files, rewriting, appending, changes in place, truncation, files that stay open.

Every system call is a step of the `Writer` that does it. A descriptor is closed whatever happens; one that was open
when the daemon died closes with an error that says nothing new.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from scripts.crash.choosing import big_files, files, length, new_name, pick
from scripts.crash.content import KIB, MIB, Ids
from scripts.crash.tree import Kind, Node, put, settled
from scripts.crash.writer import OpenFile, Writer

BIG_FILES_MAX = 2
OPEN_MAX = 2
MODES = (0o644, 0o600, 0o640, 0o755, *([0o444] if os.geteuid() == 0 else []))
"""Who is not root could not write to a file of the last one again."""


def _write(w: Writer, fd: int, path: str, data: bytes, at: int | None = None) -> None:
    """``at`` None appends."""
    chunk = w.random.choice([4 * KIB, 64 * KIB, MIB]) if len(data) < 4 * MIB else MIB
    with w.step(f"write {path}: {len(data)} bytes"):
        view = memoryview(data)
        for begin in range(0, len(data), chunk):
            piece = view[begin : begin + chunk]
            while piece:
                done = os.write(fd, piece) if at is None else os.pwrite(fd, piece, at + len(data) - len(view[begin:]))
                piece = piece[done:]
                if at is not None and piece:
                    raise OSError(0, "a short pwrite")


def _close(w: Writer, fd: int, path: str, content: Ids) -> None:
    touched = [] if w.claims.get(path) == content else [path]
    with w.step(f"close {path} {list(content)}", settled(w.tree, path, content), touched, syncs=True):
        os.close(fd)
    if not w.is_writeback:
        w.claim(path)


def _fsync(w: Writer, fd: int, path: str, content: Ids) -> None:
    with w.step(f"fsync {path} {list(content)}", settled(w.tree, path, content), [path]):
        os.fsync(fd)
    w.claim(path)


def _guarded(w: Writer, fd: int, path: str, content: Ids, writes: Callable[[], None]) -> None:
    """Write, perhaps sync, and close, whatever happens."""
    w.being_written = [path]
    try:
        writes()
        if w.random.random() < 0.04:
            _fsync(w, fd, path, content)
    except BaseException:
        try:
            os.close(fd)
        except OSError:
            pass
        raise
    _close(w, fd, path, content)
    w.being_written = []


def new_file(w: Writer, path: str, length: int, pieces: int = 1) -> Ids:
    """A file that was not there; answers what it holds."""
    mode = w.random.choice(MODES)
    made = [w.new_segment(length) for _ in range(pieces)]
    content = tuple(identity for identity, _ in made)
    with w.step(f"create {path}", put(w.tree, path, Node(Kind.FILE, mode=mode)), [path]):
        fd = os.open(w.path(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)

    def write() -> None:
        for _, data in made:
            _write(w, fd, path, data)

    _guarded(w, fd, path, content, write)
    return content


def create(w: Writer) -> None:
    path = new_name(w, "f")
    if w.random.random() < 0.05:
        new_file(w, path, 0, 0)
    elif w.random.random() < 0.015 and big_files(w) < BIG_FILES_MAX:
        new_file(w, path, w.random.randint(20 * MIB, 40 * MIB))
    else:
        new_file(w, path, length(w), w.random.choice([1, 1, 1, 3]))


def rewrite(w: Writer) -> None:
    if path := pick(w, files(w)):
        overwrite_all(w, path)


def overwrite_all(w: Writer, path: str) -> Ids:
    identity, data = w.new_segment(length(w))
    with w.step(f"open-truncate {path}"):
        fd = os.open(w.path(path), os.O_WRONLY | os.O_TRUNC)
    _guarded(w, fd, path, (identity,), lambda: _write(w, fd, path, data))
    return (identity,)


def append(w: Writer) -> None:
    path = pick(w, files(w))
    before = w.tree[path].content if path else None
    if before is None or len(before) > 12:
        return
    identity, data = w.new_segment(length(w))
    with w.step(f"open-append {path}"):
        fd = os.open(w.path(path), os.O_WRONLY | os.O_APPEND)
    _guarded(w, fd, path, (*before, identity), lambda: _write(w, fd, path, data))


def change_middle(w: Writer) -> None:
    """One segment of a file is written over in place by another of the same length."""
    path = pick(w, [path for path in files(w) if w.tree[path].content])
    before = w.tree[path].content if path else None
    if not before:
        return
    index = w.random.randrange(len(before))
    at = sum(w.lengths[each] for each in before[:index])
    identity, data = w.new_segment(w.lengths[before[index]])
    content = (*before[:index], identity, *before[index + 1 :])
    with w.step(f"open-update {path}"):
        fd = os.open(w.path(path), os.O_RDWR)
    _guarded(w, fd, path, content, lambda: _write(w, fd, path, data, at))


def truncate(w: Writer) -> None:
    path = pick(w, [path for path in files(w) if len(w.tree[path].content or ()) > 1])
    before = w.tree[path].content if path else None
    if not before:
        return
    content = before[: w.random.randrange(len(before))]
    size = sum(w.lengths[each] for each in content)
    with w.step(f"truncate {path} to {size} {list(content)}", settled(w.tree, path, content), [path], syncs=True):
        os.truncate(w.path(path), size)
    if not w.is_writeback:
        w.claim(path)


def long_file(w: Writer) -> None:
    """A file that stays open while other things happen: begun, written to, synced or closed."""
    if len(w.open) < OPEN_MAX and w.random.random() < 0.4:
        _begin_long(w)
        return
    file = w.random.choice(w.open) if w.open else None
    if file is None:
        return
    what = w.random.random()
    if what < 0.5:
        identity, data = w.new_segment(length(w))
        _write(w, file.fd, file.path, data, file.size)
        file.content.append(identity)
        file.size += len(data)
    elif what < 0.65 and file.path:
        _fsync(w, file.fd, file.path, tuple(file.content))
    else:
        close_long(w, file)


def _begin_long(w: Writer) -> None:
    path = "" if w.random.random() < 0.5 else pick(w, files(w))
    if path:
        with w.step(f"open-long-truncate {path}"):
            fd = os.open(w.path(path), os.O_RDWR | os.O_TRUNC)
    else:
        path = new_name(w, "f")
        with w.step(f"create-long {path}", put(w.tree, path, Node(Kind.FILE, mode=0o644)), [path]):
            fd = os.open(w.path(path), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    w.open.append(OpenFile(fd, path, [], 0))


def close_long(w: Writer, file: OpenFile) -> None:
    w.open.remove(file)
    if file.path:
        _close(w, file.fd, file.path, tuple(file.content))
    else:
        with w.step("close a deleted file"):
            os.close(file.fd)
