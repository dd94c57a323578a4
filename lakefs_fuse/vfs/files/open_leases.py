"""What whoever is above answers without asking: that files are open for reading, and attributes of directories.

A handle that is lent is the inode with two bits, and nobody here knows of it. That is enough while the inode has a row:
each read looks up what the inode is now, which is the same version for as long as it exists. Before a row goes, is
replaced, or anything depends on who has the file open, the handles are taken back, and become ordinary ones of the
file's `OpenFile`. Trio thread only; nothing survives a crash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.store.protocol import Buffer
from lakefs_fuse.vfs.change_events import ChangeEvents
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import READING, OpenFile
from lakefs_fuse.vfs.namespace.namespace import Namespace

LENT = 1 << 61
"""In those that were lent; the rest of them is the inode."""


READAHEADS_MAX = 1024
"""Files of which it is remembered how far they were read."""


class Lending:
    """See the module's head."""

    def __init__(self, files: FileTable, namespace: Namespace, events: ChangeEvents) -> None:
        self._files, self._ns, self._events = files, namespace, events
        self.entry: Callable[[int], Entry]
        """What is known of an inode; raises FileError(ESTALE)."""
        self._readaheads: OrderedDict[int, Readahead] = OrderedDict()
        events.inode_dropped.append(self.held)

    def held(self, inode: int) -> OpenFile | None:
        """The file in use; who has it open by handles that were lent has ordinary ones from here on."""
        handles = sum(listener(inode) for listener in self._events.leases_revoked)
        entry = self._ns.tree.entry(inode) if handles else None
        if entry is not None:
            for _ in range(handles):
                self._files.acquire(entry, writer=False)
        return self._files.get(inode)

    def allowed_s(self, file: OpenFile) -> float:
        """For how many seconds a file that is open may be opened for reading without asking; 0 where it may not."""
        if file.draft is not None or file.unlinked or file.entry.is_local or file.is_redated:
            return 0.0
        return self._ns.answer_fresh_s(file.entry.parent, file.entry.name)

    async def read(self, handle: int, offset: int, length: int) -> Buffer:
        """Raises FileError(ESTALE) where nothing is known of the inode any more."""
        inode = inode_of(handle)
        file = self._files.acquire(self.entry(inode), writer=False)
        try:
            return await self._files.read(file, offset, length, self._readahead(inode))
        finally:
            await self._files.release(file, writer=False)

    async def fsync(self, handle: int) -> None:
        """What somebody else wrote to the file is durable when this returns. Raises LakeError."""
        file = self._files.acquire(self.entry(inode_of(handle)), writer=False)
        try:
            await self._files.publish(file)
        finally:
            await self._files.release(file, writer=False)

    def _readahead(self, inode: int) -> Readahead:
        readahead = self._readaheads.setdefault(inode, Readahead())
        self._readaheads.move_to_end(inode)
        if len(self._readaheads) > READAHEADS_MAX:
            self._readaheads.popitem(last=False)
        return readahead

    async def release(self, handle: int) -> None:
        """Of a handle that was taken back."""
        file = self._files.get(inode_of(handle))
        if file is not None:
            await self._files.release(file, writer=False)


def inode_of(handle: int) -> int:
    """Of a handle that was lent; 0 for others."""
    return handle & ~(READING | LENT) if handle & LENT else 0
