"""Whether the version that a fresh handle is about to be pinned to is still the one at its key.

A plain object can be replaced by another node, or by any S3 client, and this node knows of it when it lists the
directory again, or is told that the ETag does not match. The kernel cannot be given another version under an inode
that it has opened: with its write-back cache it keeps the size that it knows. It does look the name up again where
OPEN answers ESTALE. So the GET that the first READ would need is made by OPEN, where it is sure to be needed.

What always holds: an inode is one version; a directory in which nothing was replaced costs no request more, but where
somebody opens a small file and reads nothing of it. Trio thread only; nothing here survives a crash, or has to.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Awaitable, Callable

import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.blockcache.readahead import WHOLE_BYTES_MAX, Readahead
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.errors import FileError, LakeError
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.vfs.namespace.namespace import Namespace

REPLACED_MAX = 3
"""A name is followed over so many versions that come while it is opened."""
WAIT_S_MAX = 5.0
"""OPEN waits no longer for the GET, which goes on, and which READ then waits for: the store may be away."""
DIRECTORIES_MAX = 1024
log = logging.getLogger(__name__)


class Currency:
    """See the module's head. ``look_again`` applies what others committed."""

    def __init__(
        self, namespace: Namespace, cache: BlockCache, reader: BlockReader, look_again: Callable[[], Awaitable[object]]
    ) -> None:
        self._ns, self._cache, self._reader, self._look_again = namespace, cache, reader, look_again
        self._replaced_in: dict[int, None] = {}
        """Directories in which others replaced a file lately."""

    async def check(self, entry: Entry | None) -> None:
        """Begin to read a file of which nothing is here. Raises FileError(ESTALE) where its object was replaced; then
        the name has another inode, of the version that is there now, of which the first bytes are here."""
        first: Entry | None = entry
        for _ in range(REPLACED_MAX):
            if entry is None or await self._is_current(entry):
                break
            if await self._is_elsewhere(entry):
                return
            entry = await self.renew(entry)
        if entry is not first:
            raise FileError(errno.ESTALE)

    async def _is_elsewhere(self, entry: Entry) -> bool:
        """A commit that was not seen before says where the bytes of the inode are now; its handles were told."""
        try:
            await self._look_again()
        except LakeError as error:
            log.info("looking for commits that say where %s is failed: %s", os.fsdecode(entry.name), error)
        now = self._ns.tree.entry(entry.inode)
        return now is not None and (now.place, now.offset, now.etag) != (entry.place, entry.offset, entry.etag)

    async def _is_current(self, entry: Entry) -> bool:
        """False only where the store said so."""
        if self._is_worth_a_get(entry):
            try:
                with trio.move_on_after(WAIT_S_MAX):
                    await self._reader.read(self._version(entry), 0, 1, Readahead())
            except FileError as error:
                return error.errno != errno.ESTALE  # of anything else whoever reads is told
        return True

    async def renew(self, entry: Entry) -> Entry | None:
        """What the store has now under the name of a version that is gone; None where that is no other file, or the
        store does not tell."""
        if not entry.is_plain or self._ns.tree.entry(entry.inode) is None:
            return None
        try:
            now, _ = await self._ns.lookup(entry.parent, entry.name, ask=True)
        except LakeError as error:
            log.info("%s was replaced, and by what cannot be told: %s", os.fsdecode(entry.name), error)
            return None
        if now is None or now.is_dir or now.inode == entry.inode:
            return None
        self._replaced_in.pop(entry.parent, None)
        self._replaced_in[entry.parent] = None
        if len(self._replaced_in) > DIRECTORIES_MAX:
            del self._replaced_in[next(iter(self._replaced_in))]
        return now

    def _is_worth_a_get(self, entry: Entry) -> bool:
        """Any first read of the file takes the same GET, or that is likely and a replaced version is, too."""
        if not entry.is_plain or not entry.size:
            return False
        if entry.size > WHOLE_BYTES_MAX and entry.parent not in self._replaced_in:
            return False
        version = self._version(entry)
        return not self._cache.may_have(version) and not self._reader.has_in_memory(version)

    def _version(self, entry: Entry) -> Version:
        extent = self._ns.extent(entry)
        assert extent is not None, "a plain file is in the store"
        return extent.version
