"""How a file in use loses its name, and what this node still knows of inodes that have none.

The kernel writes the times of an inode back after its name is gone, and asks for the attributes of a directory that a
process still works in. Both are answered from `UnlinkedInodes`, with a link count of 0; what is set is dropped with the
inode. Inodes that another node removed are not here: ESTALE makes the kernel look the name up again. Of more than
`INODES_MAX` the oldest is forgotten, and is ESTALE from then on.

What always holds: no version of a file becomes visible under a name while that is removed; readers of open handles go
on. A crash between the change of the name and the journal leaves records that say unlinked, because `journal_dropped`
writes them in the change's own batch. Trio thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec
import trio

from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.staging.draft_record import encode
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.ops.io import FileIO
from lakefs_fuse.vfs.writeback.queue import WriteBack

KEPT_BYTES_MAX = 256 << 20
"""An open file that is deleted here is fetched whole first, if no larger than this, so that its readers can go on."""
INODES_MAX = 16_384
"""About 8 MiB. The kernel holds an unlinked inode for milliseconds, or for as long as a process has it open."""
KEPT_STEP_BYTES = 16 << 20
AWAY_S_MAX = 5.0
"""Time for the store to send KEPT_STEP_BYTES of such a file before its name goes: it may be away."""
log = logging.getLogger(__name__)


class UnlinkedInodes(dict[int, Entry]):
    """Of inodes that this node took the last name from, and that the kernel may still hold, the last entry."""

    def put(self, entry: Entry) -> None:
        """The name of the entry is gone, or its attributes are these now."""
        self.pop(entry.inode, None)
        self[entry.inode] = entry
        if len(self) > INODES_MAX:
            del self[next(iter(self))]


class Unlinker:
    """Removes the names of files in use."""

    def __init__(
        self,
        database: Database,
        drafts: Drafts,
        io: FileIO,
        reader: BlockReader,
        committer: Committer,
        writeback: WriteBack,
        clock: Clock,
    ) -> None:
        self._db, self._files, self._drafts, self._io = database, drafts.files, drafts, io
        self._reader, self._committer, self._writeback = reader, committer, writeback
        self._journal = Journal(database)
        self.inodes, self._clock = UnlinkedInodes(), clock

    async def unlink(self, file: OpenFile, delete: Callable[[Entry, Sequence[ObjectMeta]], Awaitable[None]]) -> None:
        """``delete`` takes the name away; handles stay. It is given the file's entry, and the objects at its key that
        are not the version of its row. No publishing runs meanwhile, so none can bring the name back. Where ``delete``
        fails, the file is as it was."""
        try:
            async with file.publishing:
                file.unlink()  # not before: what is being published is visible with its name until then
                if file.draft is not None:  # what is being acknowledged is acknowledged first
                    async with file.draft.gate:
                        pass
                is_away = await self._keep_for_handles(file)
                late = [] if is_away else await self._late_objects(file)
                newest = self._committer.journal.newest
                await delete(file.entry, late)
        except BaseException:
            file.relink()
            self._io.unpin(file)  # its close may have ended while the file was unlinked
            raise
        await self._drop_acknowledged(file, newest)
        if file.draft is not None:
            file.draft.unlink()
            if file.handles:
                file.draft.save(sync=True)
            else:
                await self._drafts.discard(file)
        self._files.forget_if_idle(file)

    async def _keep_for_handles(self, file: OpenFile) -> bool:
        """Who has the file open goes on reading what is about to go from the store. Answers whether the store did not
        send it in time."""
        extent = file.draft.base if file.draft is not None else file.extent
        wanted = min(extent.size, file.draft.base_limit if file.draft is not None else extent.size) if extent else 0
        if not file.handles or extent is None or not 0 < wanted <= KEPT_BYTES_MAX:
            return False
        why, is_away, end = "", False, extent.offset + wanted
        try:
            for start in range(extent.offset, end, KEPT_STEP_BYTES):
                with trio.fail_after(AWAY_S_MAX):
                    if not await self._reader.ensure(extent.version, start, min(start + KEPT_STEP_BYTES, end)):
                        why = "the cache has no room"
                        break
        except trio.TooSlowError:
            why, is_away = "the store is away, or too slow", True
        except LakeError as error:
            why = str(error)
        if why:
            log.warning("%s is deleted while open, and could not be kept: %s", file.key, why)
        return is_away

    async def _late_objects(self, file: OpenFile) -> list[ObjectMeta]:
        """Attempts to publish failed without an answer, and the objects may be there all the same: then others have to
        be told that they are removed."""
        late = []
        for draft in [each.draft for each in file.versions if each.draft is not None]:
            meta = await self._writeback.find_late_object(draft)
            if meta is not None and meta.key == file.key:
                late.append(meta)
            elif meta is not None and not draft.sequence:
                self._writeback.delete_object(meta)
        return late

    async def _drop_acknowledged(self, file: OpenFile, newest: int) -> None:
        """Acknowledged versions stay for programs that have the file open only. ``newest``: journaled before."""
        batch = Batch()
        gone = [each.draft for each in file.versions if each.draft is not None and each.draft.sequence]
        for draft in gone:
            self._writeback.end(draft)
            draft.unlink()
            self._journal.put(batch, draft.id, encode(draft.record()))
        if not gone:
            return
        since = min(draft.sequence for draft in gone)
        self._committer.withhold(file.key, since, self._writeback.sequence, newest)
        self._db.commit(batch, sync=True)
        file.behind.clear()
        for draft in gone:
            if draft is not file.draft or not file.handles:
                self._writeback.discard(draft)
        if file.draft in gone and not file.handles:
            file.end_draft()

    def forget_name(self, entry: Entry) -> None:
        """The entry lost its last name, which is a change of the inode."""
        file, now = self._files.get(entry.inode), self._clock.wall_ns()
        if file is not None:
            file.entry = msgspec.structs.replace(file.entry, ctime_ns=now)
        last = entry if file is None else file.current
        self.inodes.put(msgspec.structs.replace(last, ctime_ns=now))

    def journal_moved(self, batch: Batch, file: OpenFile | None, path: str) -> None:
        """All versions of a file that are not in the store are at ``path`` once the batch is committed."""
        for draft in [each.draft for each in file.versions] if file is not None else []:
            if draft is not None:
                self._journal.put(batch, draft.id, encode(msgspec.structs.replace(draft.record(), path=path)))

    def journal_dropped(self, batch: Batch, file: OpenFile | None) -> None:
        """Accepted versions of a file are unlinked once the batch is committed: its name goes, or another has it."""
        for draft in [each.draft for each in file.versions] if file is not None else []:
            if draft is not None and draft.sequence:
                self._journal.put(batch, draft.id, encode(msgspec.structs.replace(draft.record(), unlinked=True)))
