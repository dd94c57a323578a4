"""The names of a mount that may change, for a selection of files."""

from __future__ import annotations

import errno
from array import array

import trio

from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.tree_walk import LISTINGS_AT_ONCE
from lakefs_fuse.vfs.residency.selection import Refused, pages, passing_over


class LakeNames:
    """See `selection.Names`. Directories are listed where their listing is older than the TTL; unless ``fresh``, only
    where they never were, and names that are known are not asked for."""

    def __init__(self, namespace: Namespace, files: FileTable, *, fresh: bool = True) -> None:
        self._ns, self._files, self._fresh = namespace, files, fresh
        self.mountpoint = namespace.mountpoint

    @property
    def tree(self) -> Tree:
        return self._ns.tree

    @property
    def root(self) -> Entry:
        return self._ns.root

    async def lookup(self, directory: Entry, name: bytes) -> Entry | None:
        entry = None if self._fresh else self.tree.child(directory.inode, name)
        return entry or (await self._ns.lookup(directory.inode, name))[0]

    def is_ready(self, directory: Entry) -> bool:
        for listener in self._ns.events.names_requested:
            listener()
        return self._is_listed(directory.inode)

    def _is_listed(self, inode: int) -> bool:
        if self._fresh:
            return self._ns.directory_fresh_s(inode) > 0
        return self.tree.listing(inode) is not None

    async def prepare(self, directory: Entry, refused: Refused | None = None) -> None:
        """One level of directories after another; memory holds the numbers of one level."""
        level = array("Q", [directory.inode])
        while level:
            below = array("Q")

            async def list_one(inode: int, below: array[int] = below) -> None:
                if not self._is_listed(inode):
                    try:
                        with passing_over(refused):
                            await self._ns.ensure_listed(inode, strictly=False)
                    except FileError as error:
                        if error.errno != errno.ESTALE:
                            raise  # else it was removed in the meantime
                for page in pages(lambda: self.tree, inode):
                    below.extend(child.inode for child in page if child.is_dir)
                    await trio.lowlevel.checkpoint()

            await for_each(level, list_one, min(LISTINGS_AT_ONCE, len(level)))
            level = below

    def size(self, entry: Entry) -> int:
        file = self._files.get(entry.inode)
        return entry.size if file is None else file.current.size

    def extent(self, entry: Entry) -> Extent | None:
        return None if self._files.is_dirty(entry) else self._ns.extent(entry)
