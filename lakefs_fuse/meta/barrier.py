"""The barrier of the tree: requests about names that a large commit changes wait until all of it is applied.

What always holds (*whole commits*): while the barrier is up, no request of the kernel reads one of its names or lists a
directory that has one; all other requests run between the steps. Names that a copy is made of are frozen instead:
requests that read them run, too. Every rename and every other commit waits: one further up would change the paths that
the commit names. One caller raises it at a time, when `wait_lowered` answered. Trio thread only. A crash leaves
nothing: a commit that was applied in part is not recorded as applied, and a mount applies it again before it serves.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

import trio
import xxhash

from lakefs_fuse.meta.entry import Entry

NAMES_MAX = 2_000_000
"""Maximum of names in memory, as hashes of some 60 bytes. For a commit with more, all names of a directory count as
changed."""


class About(Enum):
    """What a request depends on."""

    NAME = "the name in a directory"
    DIRECTORY = "all names in a directory"
    INODE = "the attributes of an inode"


class Barrier:
    """See the module's head."""

    def __init__(self, entry: Callable[[int], Entry | None], revoke: Callable[[int], object]) -> None:
        """``entry`` returns that of an inode; ``revoke`` revokes the lease of a directory."""
        self._entry, self._revoke = entry, revoke
        self._directories: set[int] = set()
        self._names: set[int] = set()
        self._whole: set[int] = set()
        """Directories in which every name is about to change."""
        self._frozen_names: set[int] = set()
        self._frozen: set[int] = set()
        """Directories in which no name may change."""
        self._stops_readers = False
        self._lowered = trio.Event()

    @property
    def is_up(self) -> bool:
        return bool(self._directories)

    def _add_directory(self, directory: int) -> None:
        if not self._directories:
            self._lowered = trio.Event()
        if directory not in self._directories:
            self._directories.add(directory)
            self._revoke(directory)

    def add_all(self, directory: int, *, is_frozen: bool = False) -> None:
        """As `add`, for every name in a directory."""
        if is_frozen:
            self._frozen.add(directory)
            self._revoke(directory)
            return
        self._add_directory(directory)
        self._whole.add(directory)

    def add(self, directory: int, name: bytes, *, is_frozen: bool = False) -> None:
        """Add a name that is about to change, and revoke the leases of its directory. A *frozen* name stays as it is,
        while others change: requests that read it do not wait, until `stop_readers`."""
        if is_frozen:
            self._frozen_names.add(_hash(directory, name))
            return
        self._add_directory(directory)
        if len(self._names) < NAMES_MAX:
            self._names.add(_hash(directory, name))

    def stop_readers(self) -> None:
        """Have requests that read frozen names wait as well: what they find out about these changes their rows."""
        self._stops_readers = True

    def has_all(self, directory: int) -> bool:
        """Whether every name in this directory is behind the barrier, or frozen."""
        return directory in self._whole or directory in self._frozen

    def lower(self) -> None:
        """Lower the barrier: the commit is applied, or will be applied again."""
        self._directories, self._names, self._whole = set(), set(), set()
        self._frozen_names, self._frozen, self._stops_readers = set(), set(), False
        self._lowered.set()

    async def wait_for(self, about: About, inode: int, name: bytes = b"", *, reads: bool = False) -> None:
        """Wait until no name or inode of a request is being changed. ``inode`` is the directory's, or the requested
        one; ``reads``: the request changes neither."""
        while self.is_behind(about, inode, name, reads=reads):
            await self._lowered.wait()

    async def wait_lowered(self) -> None:
        """Wait until no commit is being applied in steps."""
        while self.is_up:
            await self._lowered.wait()

    def is_behind(self, about: About, inode: int, name: bytes = b"", *, reads: bool = False) -> bool:
        """Return whether a request would wait; the arguments are those of `wait_for`."""
        if not self._directories:
            return False
        passes_frozen = reads and not self._stops_readers
        if about is About.DIRECTORY:
            return inode in self._directories or (inode in self._frozen and not passes_frozen)
        if about is About.INODE:
            entry = self._entry(inode)
            if entry is None:
                return False
            inode, name = entry.parent, entry.name
        if not passes_frozen and (inode in self._frozen or _hash(inode, name) in self._frozen_names):
            return True
        if inode in self._whole or len(self._names) >= NAMES_MAX:
            return inode in self._directories
        return _hash(inode, name) in self._names


def _hash(directory: int, name: bytes) -> int:
    """If two names have the same hash, a request about either waits."""
    return xxhash.xxh3_64_intdigest(name, directory)
