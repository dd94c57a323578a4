"""Serves handles that the C library opened under a lease, and says for how long a file may be leased.

Such a handle is the inode with two bits set, and has no `Handle` here. That is enough while the inode has a row: each
read looks the inode up, which is one version for as long as it exists. Before a row is removed or replaced, or a
decision depends on open handles, `FileTable.hold` revokes the leases, and counts their handles. Trio thread only;
nothing survives a crash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.metrics import ReadMetrics
from lakefs_fuse.store.protocol import Buffer
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import READING, OpenFile, OpenState
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.ops.io import FileIO

LEASED = 1 << 61
"""Bit of the handles that were opened under a lease. They also have READING; their other bits are the inode."""
READAHEADS_MAX = 1024
"""Files whose readahead is kept between two reads."""


class OpenLeases:
    """Serves handles opened under leases; see the module's head."""

    def __init__(
        self,
        files: FileTable,
        namespace: Namespace,
        io: FileIO,
        entry: Callable[[int], Entry],
        reads_of: Callable[[str], ReadMetrics],
    ) -> None:
        """``entry`` returns the entry of an inode, or raises FileError(ESTALE). ``reads_of``: see `Handles`."""
        self._files, self._ns, self._io, self._entry, self._reads_of = files, namespace, io, entry, reads_of
        self._read: OrderedDict[int, tuple[Readahead, ReadMetrics]] = OrderedDict()

    def allowed_s(self, file: OpenFile) -> float:
        """Return for how many seconds opens of a file for reading may be leased; 0 if they may not."""
        if file.state is not OpenState.CLEAN or file.entry.is_local or file.is_redated:
            return 0.0
        return self._ns.answer_fresh_s(file.entry.parent, file.entry.name)

    async def read(self, handle: int, offset: int, length: int) -> Buffer:
        """Read through a handle opened under a lease. Raises FileError(ESTALE) if the inode is no longer known."""
        inode = inode_of(handle)
        file = self._files.acquire(self._entry(inode), writer=False)
        try:
            return await self._io.read(file, offset, length, *self._reading(file))
        finally:
            await self._io.release(file, writer=False)

    def _reading(self, file: OpenFile) -> tuple[Readahead, ReadMetrics]:
        inode = file.entry.inode
        if inode not in self._read:
            self._read[inode] = Readahead(), self._reads_of(file.key)
        self._read.move_to_end(inode)
        if len(self._read) > READAHEADS_MAX:
            self._read.popitem(last=False)
        return self._read[inode]

    async def release(self, handle: int) -> None:
        """Release a handle whose lease was revoked."""
        file = self._files.get(inode_of(handle))
        if file is not None:
            await self._io.release(file, writer=False)


def inode_of(handle: int) -> int:
    """Return the inode of a handle that was opened under a lease; 0 for other handles."""
    return handle & ~(READING | LEASED) if handle & LEASED else 0
