"""Files by path and by shell glob, as the names of a mount have them now.

A glob follows the shell: ``*`` and ``?`` match within a component, and ``**`` as a whole component is any number of
directories. None of them matches a name that begins with a dot unless the pattern has the dot. A path, or a match of a
glob, that is a directory includes everything below it. Symbolic links have no bytes and are left out.

Memory holds one page of names for each level of the walk. Tasks of one trio loop; other requests run between pages.
"""

from __future__ import annotations

import enum
import errno
import os
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import islice
from typing import NamedTuple, Protocol

import trio

from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.errors import FileError, StoreError, Unavailable
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.path_rules import translate

PAGE_NAMES = 256
"""Names of one step, which takes 20 ms at most."""
MISSING_SHOWN_MAX = 10


class Selected(NamedTuple):
    """A path of the mount, without slashes at its ends; ``pattern`` is a glob below it, or empty."""

    path: str
    pattern: str = ""

    def __str__(self) -> str:
        return "/".join(filter(None, self))


Refused = Callable[[StoreError], object]
"""Called for each directory that the store refuses to list; not while it is away."""


@contextmanager
def passing_over(refused: Refused | None) -> Iterator[None]:
    """Give what the store refuses in the block to ``refused``, if there is one."""
    try:
        yield
    except StoreError as error:
        if refused is None or isinstance(error, Unavailable):
            raise
        refused(error)


class Names(Protocol):
    """The names of a mount."""

    mountpoint: str

    @property
    def tree(self) -> Tree: ...

    @property
    def root(self) -> Entry:
        """The directory at the mountpoint."""

    async def lookup(self, directory: Entry, name: bytes) -> Entry | None: ...

    def is_ready(self, directory: Entry) -> bool:
        """The names in the directory are in the tree."""

    async def prepare(self, directory: Entry, refused: Refused | None = None) -> None:
        """It and all directories below it are ready when this returns. Raises LakeError: also where the store refuses
        to list one, unless ``refused`` takes that."""

    def size(self, entry: Entry) -> int:
        """Of a file as it is now, also where it is being written."""

    def extent(self, entry: Entry) -> Extent | None:
        """Where the bytes of a file are in the store; None where its newest bytes are not there, or it has none.
        Raises FileError."""


def shown_path(names: Names, path: str) -> str:
    """A path of the mount as its users write it, for errors."""
    return os.path.join(names.mountpoint, path) if path else names.mountpoint


class Found(NamedTuple):
    """A name by its path in the mount."""

    path: str
    entry: Entry


async def without_repetitions(selection: Iterable[tuple[str, str]]) -> list[Selected]:
    """The selection without what is below another path of it."""
    unique = dict.fromkeys(map(Selected._make, selection))
    whole, left = {each.path for each in unique if not each.pattern}, list[Selected]()
    for number, each in enumerate(unique, 1):
        if not any(above in whole for above in _above(each)):
            left.append(each)
        if number % PAGE_NAMES == 0:
            await trio.lowlevel.checkpoint()
    return left


def _above(selected: Selected) -> Iterable[str]:
    """Paths of directories that hold it."""
    if selected.pattern:
        yield selected.path
    yield from paths_above(selected.path)


def paths_above(path: str) -> Iterator[str]:
    """The paths of all directories that hold a path."""
    while path:
        path = path.rpartition("/")[0]
        yield path


async def find(names: Names, path: str) -> Entry | None:
    """What is at a path; None where there is nothing."""
    entry: Entry | None = names.root
    for name in path.split("/") if path else ():
        entry = await _child(names, entry, name)
    return entry


async def _child(names: Names, directory: Entry | None, name: str) -> Entry | None:
    if directory is None or not directory.is_dir:
        return None
    return await names.lookup(directory, name.encode("utf-8", "surrogateescape"))


async def visit_matches(
    names: Names,
    selection: Iterable[tuple[str, str]],
    see: Callable[[Found], Awaitable[object]],
    *,
    strictly: bool = True,
) -> None:
    """Await ``see`` for what the selection names, each path once for each of its entries. Raises LakeError;
    ``strictly``, FileError(ENOENT) at the end, where some of it does not exist or matches nothing."""
    missing, above = list[str](), ""
    directory: Entry | None = names.root
    for number, selected in enumerate(map(Selected._make, selection), 1):
        parent, _, name = selected.path.rpartition("/")
        if parent != above:  # lists name the files of one directory after another
            above, directory = parent, await find(names, parent)
        entry, is_there = await _child(names, directory, name) if name else names.root, False
        if entry is not None and entry.is_symlink:
            link = shown_path(names, selected.path)
            raise FileError(errno.EINVAL, f"{link} is a symbolic link: name what it points to")
        if entry is not None and not selected.pattern:
            is_there = True
            await see(Found(selected.path, entry))
        elif entry is not None and entry.is_dir:
            found = _matches(names, Found(selected.path, entry), selected.pattern)
            is_there = await _visit(names, entry, found, see) > 0
        if not is_there:
            why = "matches nothing" if selected.pattern else "does not exist"
            missing.append(f"{shown_path(names, str(selected))} {why}")
        if number % PAGE_NAMES == 0:
            await trio.lowlevel.checkpoint()
    if missing and strictly:
        more = f", and {len(missing) - MISSING_SHOWN_MAX} more" if len(missing) > MISSING_SHOWN_MAX else ""
        raise FileError(errno.ENOENT, ", ".join(missing[:MISSING_SHOWN_MAX]) + more)


async def visit_files(
    names: Names, top: Found, see: Callable[[Found], Awaitable[object] | None], refused: Refused | None = None
) -> None:
    """Call ``see`` with each file at and below a name, and await what it answers. Raises LakeError; with ``refused``
    (see `Names.prepare`) the files of a directory that cannot be listed are those that are known."""
    await _visit(names, top.entry, _files(names, top), see, refused)


class _Pause(Enum):
    """What a walk asks for between two names."""

    TURN = enum.auto()
    """Let other tasks run."""
    PREPARE = enum.auto()
    """List what is below its top: a directory is not ready."""


_Walk = Iterator[Found | _Pause]


async def _visit(
    names: Names, top: Entry, walk: _Walk, see: Callable[[Found], Awaitable[object] | None],
    refused: Refused | None = None,
) -> int:  # fmt: skip
    """The number of names in the walk."""
    count, is_prepared = 0, False
    for found in walk:
        if isinstance(found, Found):
            count += 1
            try:
                waiting = see(found)
            except FileError:
                if names.tree.entry(found.entry.inode) == found.entry:
                    raise
                continue  # it was removed, or replaced, since its page was read
            if waiting is not None:
                await waiting
        elif found is _Pause.PREPARE and not is_prepared:
            is_prepared = True
            await names.prepare(top, refused)
        else:
            await trio.lowlevel.checkpoint()
    return count


def _files(names: Names, top: Found) -> _Walk:
    waiting = [top]
    while waiting:
        each = waiting.pop()
        if not each.entry.is_dir:
            if not each.entry.is_symlink:
                yield each
            continue
        for child in _children(names, each):
            if not isinstance(child, Found):
                yield child
            elif child.entry.is_dir:
                waiting.append(child)
            elif not child.entry.is_symlink:
                yield child


def _children(names: Names, directory: Found) -> _Walk:
    prefix = f"{directory.path}/" if directory.path else ""
    if not names.is_ready(directory.entry):
        yield _Pause.PREPARE
    for page in pages(lambda: names.tree, directory.entry.inode):
        for entry in page:
            if not entry.flags & Flag.SHADOWED:
                yield Found(prefix + entry.name.decode("utf-8", "surrogateescape"), entry)
        yield _Pause.TURN


def pages(tree: Callable[[], Tree], directory: int) -> Iterator[list[Entry]]:
    """The entries of a directory, some at a time. What comes or goes between two pages may be missed; the tree may be
    another one then."""
    after = 0
    while page := list(islice(tree().children(directory, after), PAGE_NAMES)):
        yield page
        after = page[-1].cookie


ANY_DEPTH = None
"""The component ``**``."""
_Component = re.Pattern[str] | None


def _compile(pattern: str) -> list[_Component]:
    """Raises ConfigError for a glob that is none."""
    translate(pattern)
    return [ANY_DEPTH if part == "**" else re.compile(_component(part), re.DOTALL) for part in pattern.split("/")]


def _component(glob: str) -> str:
    return translate(glob) if glob.startswith(".") else rf"(?!\.){translate(glob)}"


def _matches(names: Names, top: Found, pattern: str) -> _Walk:
    """Each name below ``top`` that the glob matches, once; nothing below one that matches. Raises ConfigError."""
    compiled, waiting = _compile(pattern), [(top, frozenset({0}))]
    while waiting:
        directory, states = waiting.pop()
        for child in _children(names, directory):
            if not isinstance(child, Found):
                yield child
                continue
            after = _step(compiled, states, child.path.rpartition("/")[2])
            if len(compiled) in after:
                yield child
            elif after and child.entry.is_dir:
                waiting.append((child, after))


def _step(pattern: Sequence[_Component], states: frozenset[int], name: str) -> frozenset[int]:
    """Places in the pattern that a path is at with one more component; the end is a match."""
    after = set[int]()
    for place in states:
        while place < len(pattern) and pattern[place] is ANY_DEPTH:
            if not name.startswith("."):
                after.add(place)
                if place == len(pattern) - 1:
                    after.add(len(pattern))
            place += 1
        part = pattern[place] if place < len(pattern) else None
        if part is not None and part.fullmatch(name):
            after.add(place + 1)
    return frozenset(after)
