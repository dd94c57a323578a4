"""The barrier before names that a large commit is being applied to: requests about them wait until it is whole.

What always holds (*whole commits*): while the barrier is up, no request of the kernel reads one of its names or lists a
directory that has one; all other requests go on between the steps. Every rename and every other commit waits: one
further up would change the paths that the commit names. One caller raises it at a time, when `wait_lowered` answered.
Trio thread only. A crash leaves nothing: a commit that was applied in part is not recorded as applied, and a mount
applies it again before it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import trio
import xxhash

from lakefs_fuse.meta.entry import Entry

NAMES_MAX = 2_000_000
"""Names that are kept, as hashes of some 60 bytes. Of a commit with more, all names of a directory count as changed."""


class About(Enum):
    """What a request depends on."""

    NAME = "the name in a directory"
    DIRECTORY = "all names in a directory"
    INODE = "the attributes of an inode"


class Barrier:
    """See the module's head. ``waits`` counts requests that were kept waiting."""

    def __init__(self, entry: Callable[[int], Entry | None], revoke: Callable[[int], object]) -> None:
        """``entry`` is that of an inode; ``revoke`` takes a directory back that was leased."""
        self._entry, self._revoke = entry, revoke
        self._directories: set[int] = set()
        self._names: set[int] = set()
        self._whole: set[int] = set()
        """Directories of which every name is about to change."""
        self._lowered = trio.Event()
        self.waits = 0

    @property
    def is_up(self) -> bool:
        return bool(self._directories)

    def _add_directory(self, directory: int) -> None:
        if not self._directories:
            self._lowered = trio.Event()
        if directory not in self._directories:
            self._directories.add(directory)
            self._revoke(directory)

    def add_all(self, directory: int) -> None:
        """As `add`, of every name in a directory."""
        self._add_directory(directory)
        self._whole.add(directory)

    def add(self, directory: int, name: bytes) -> None:
        """This name is about to change. What others were leased of the directory is revoked."""
        self._add_directory(directory)
        if len(self._names) < NAMES_MAX:
            self._names.add(_hash(directory, name))

    def has_all(self, directory: int) -> bool:
        """Every name in this directory is behind it."""
        return directory in self._whole

    def lower(self) -> None:
        """The commit is applied, or will be applied again."""
        self._directories, self._names, self._whole = set(), set(), set()
        self._lowered.set()

    async def wait_for(self, about: About, inode: int, name: bytes = b"") -> None:
        """Until nothing that a request depends on is being changed. ``inode`` is the directory's, or that asked for."""
        if self._is_behind(about, inode, name):
            self.waits += 1
            while self._is_behind(about, inode, name):
                await self._lowered.wait()

    async def wait_lowered(self) -> None:
        """Until no commit is being applied in steps."""
        while self.is_up:
            await self._lowered.wait()

    def _is_behind(self, about: About, inode: int, name: bytes) -> bool:
        if not self._directories:
            return False
        if about is About.DIRECTORY:
            return inode in self._directories
        if about is About.INODE:
            entry = self._entry(inode)
            if entry is None:
                return False
            inode, name = entry.parent, entry.name
        if inode in self._whole or len(self._names) >= NAMES_MAX:
            return inode in self._directories
        return _hash(inode, name) in self._names


def _hash(directory: int, name: bytes) -> int:
    """Of two names with the same one, a request about either waits."""
    return xxhash.xxh3_64_intdigest(name, directory)
