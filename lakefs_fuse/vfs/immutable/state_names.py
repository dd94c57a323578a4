"""The names of an immutable mount, for a selection of files."""

from __future__ import annotations

import errno
from collections.abc import Callable

from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.vfs.immutable.states import State
from lakefs_fuse.vfs.namespace.key_mapping import NAME_BYTES_MAX, extent_of, is_reserved


class StateNames:
    """See `selection.Names`. A walk that a refresh overtakes goes on in the next state, in which inodes are the
    same."""

    def __init__(self, state: Callable[[], State]) -> None:
        """``state`` answers what the mount shows now."""
        self._state = state

    @property
    def tree(self) -> Tree:
        return self._state().tree

    @property
    def root(self) -> Entry:
        state = self._state()
        top = state.root if state.note.top == state.root.inode else state.tree.entry(state.note.top)
        if top is None:
            raise FileError(errno.ESTALE)
        return top

    async def lookup(self, directory: Entry, name: bytes) -> Entry | None:
        if len(name) > NAME_BYTES_MAX or is_reserved(directory.inode, name.decode("utf-8", "surrogateescape")):
            return None
        return self.tree.child(directory.inode, name)

    def is_ready(self, directory: Entry) -> bool:
        return True

    async def prepare(self, directory: Entry) -> None:
        """A state has all names."""

    def size(self, entry: Entry) -> int:
        return entry.size

    def extent(self, entry: Entry) -> Extent | None:
        return extent_of(self.tree, entry)
