"""What a writer does to names that writers of other nodes change at the same time; see `contest`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from scripts.crash.choosing import length, new_name
from scripts.crash.contest import HOT, MOVED, Change
from scripts.crash.tree import Tree, remove
from scripts.crash.writer import Lost, Writer
from scripts.crash.writing import new_file

NAMES = 3
RACES = frozenset({errno.ENOENT, errno.ESTALE})
"""What a system call may answer whose name another node has replaced or removed."""


@contextmanager
def _attempt(w: Writer, what: str, *changes: Change, after: Tree | None = None, touched: Sequence[str] = ()
             ) -> Iterator[None]:  # fmt: skip
    """A system call that may also find that another node was there before."""
    w.changes += changes
    try:
        with w.step(what, after, touched, lost=RACES):
            yield
    except Lost:
        w.changes = [each for each in w.changes if each not in changes]
        return
    for change in changes:
        change.is_certain = True


def contend(w: Writer) -> None:
    """One change of a contested name."""
    name = f"{HOT}{w.random.randrange(NAMES)}"
    draw = w.random.random()
    if draw < 0.35:
        _write(w, name)
    elif draw < 0.65:
        _replace(w, name)
    elif draw < 0.85:
        target = name.replace(HOT, MOVED)
        with _attempt(w, f"rename {name} {target}", Change(w.number, name, None), Change(w.number, target, None, name)):
            os.rename(w.path(name), w.path(target))
    else:
        name = w.random.choice([name, name, name.replace(HOT, MOVED)])
        with _attempt(w, f"unlink {name}", Change(w.number, name, None)):
            os.unlink(w.path(name))


def _write(w: Writer, name: str) -> None:
    identity, data = w.new_segment(length(w))
    fd = -1
    with _attempt(w, f"open-truncate {name}"):
        fd = os.open(w.path(name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    if fd < 0:
        return
    w.being_written = [name]
    try:
        with w.step(f"write {name}: {len(data)} bytes"):
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
    except BaseException:
        with suppress(OSError):
            os.close(fd)
        raise
    with _attempt(w, f"close {name} {[identity]}", Change(w.number, name, (identity,))):
        os.close(fd)
    w.being_written = []


def _replace(w: Writer, name: str) -> None:
    path = new_name(w, "h")
    content = new_file(w, path, length(w))
    after = remove(w.tree, path)
    with _attempt(
        w, f"rename {path} {name} {list(content)}", Change(w.number, name, content), after=after, touched=[path]
    ):
        os.rename(w.path(path), w.path(name))
