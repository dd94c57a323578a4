"""Removes the names of files in use, and remembers inodes that no longer have a name.

The kernel writes back the times of an inode after its name was removed, and asks for the attributes of a directory in
which a process still works. `UnlinkedInodes` answers both, with a link count of 0; attributes that are set are dropped
with the inode. It does not have inodes that another node removed: for them ESTALE makes the kernel look the name up
again. Beyond `INODES_MAX` the oldest inode is forgotten, and requests about it get ESTALE as well.

What always holds: no version of a file becomes visible under a name that is being removed; open handles can still be
read, if the cache could keep the bytes. A crash after the change of a name leaves records that say unlinked, because
`journal_dropped` writes them in the batch of the change. Trio thread only.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec
import trio

from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import CacheError, LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.staging.draft_record import encode
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.open_file import OpenFile, OpenState
from lakefs_fuse.vfs.ops.io import FileIO
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue

KEPT_BYTES_MAX = 256 << 20
"""An open file of up to this size is fetched whole before its deletion, so that its readers can continue."""
INODES_MAX = 16_384
"""About 8 MiB. The kernel holds an unlinked inode for milliseconds, or for as long as a process has it open."""
KEPT_STEP_BYTES = 16 << 20
AWAY_S_MAX = 5.0
"""Maximum time for the store to send KEPT_STEP_BYTES of such a file before its name is removed. It may be away."""
log = logging.getLogger(__name__)


class UnlinkedInodes(OrderedDict[int, Entry]):
    """The last entries of inodes whose last name this node removed, and which the kernel may still hold."""

    def put(self, entry: Entry) -> None:
        """Remember the entry of an inode whose name was removed, or its new attributes."""
        self[entry.inode] = entry
        self.move_to_end(entry.inode)
        if len(self) > INODES_MAX:
            self.popitem(last=False)


class Unlinker:
    """Removes the names of files in use."""

    def __init__(
        self,
        database: Database,
        drafts: Drafts,
        io: FileIO,
        reader: BlockReader,
        committer: Committer,
        writeback: WriteBackQueue,
        clock: Clock,
    ) -> None:
        self._db, self._files, self._drafts, self._io = database, drafts.files, drafts, io
        self._reader, self._committer, self._writeback = reader, committer, writeback
        self._journal = Journal(database)
        self.inodes, self._clock = UnlinkedInodes(), clock

    async def unlink(self, file: OpenFile, delete: Callable[[Entry, Sequence[ObjectMeta]], Awaitable[None]]) -> None:
        """Have ``delete`` remove the name of a file in use; its handles stay. ``delete`` gets the file's entry, and the
        objects at its key other than the version of its row. No version of the file is published meanwhile, so none
        can bring the name back. If ``delete`` fails, the file stays linked; nothing that fails later is raised."""
        try:
            async with file.publishing:
                file.unlink()  # not earlier: a version that is being published keeps its name until then
                if file.draft is not None:  # an acknowledgement in progress ends first
                    async with file.draft.gate:
                        pass
                is_away = await self._keep_for_handles(file)
                late = [] if is_away else await self._late_objects(file)
                newest = self._committer.journal.newest
                xattrs = self._files.xattrs(file)  # their row goes with the name
                await delete(file.entry, late)
                file.late_xattrs = xattrs if file.late_xattrs is None else file.late_xattrs
        except BaseException:
            file.relink()
            self._io.unpin(file)  # its close may have ended while the file was unlinked
            raise
        await self._drop_acknowledged(file, newest)
        if file.draft is not None:
            file.draft.unlink()
            with _in_effect(file.key):
                if file.handles:
                    file.draft.save()
                else:
                    await self._drafts.discard(file)
        self._files.forget_if_idle(file)

    async def _keep_for_handles(self, file: OpenFile) -> bool:
        """Fetch the bytes of an open file into the cache, before they are deleted from the store. Returns True if the
        store did not send them in time."""
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
        """Return the objects of attempts to publish that had no answer, if they are at the file's key. Other nodes must
        learn that they are removed. Delete such objects at other keys, except those of acknowledged versions."""
        late = []
        for draft in [each.draft for each in file.versions if each.draft is not None]:
            meta = await self._writeback.find_late_object(draft)
            if meta is not None and meta.key == file.key:
                late.append(meta)
            elif meta is not None and not draft.sequence:
                self._writeback.delete_object(meta)
        return late

    async def _drop_acknowledged(self, file: OpenFile, newest: int) -> None:
        """End the acknowledged versions of a file without a name: they stay only for programs that have it open.
        ``newest`` is the number of the last change that was journaled before the removal."""
        batch = Batch()
        gone = [each.draft for each in file.versions if each.draft is not None and each.draft.sequence]
        for draft in gone:
            self._writeback.end(draft)
            draft.unlink()
            self._journal.put(batch, draft.id, encode(draft.record()))
        if not gone:
            return
        since = min(draft.sequence for draft in gone)
        with _in_effect(file.key):
            self._committer.withhold(file.key, since, self._writeback.sequence, newest)
        with _in_effect(file.key):  # synced before a staging file is deleted; `Segments` does that for its own
            self._db.commit(batch, sync=any(draft.file.spot is None for draft in gone))
        file.behind.clear()
        for draft in gone:
            if draft is not file.draft or not file.handles:
                self._writeback.discard(draft)
        if file.draft in gone and not file.handles:
            file.end_draft()

    def forget_name(self, entry: Entry) -> None:
        """Remember an entry that lost its last name. Its ctime is now, because that changes the inode. If its file was
        opened only while the name was being removed, nothing is stored of it either, unless that has begun."""
        file, now = self._files.get(entry.inode), self._clock.wall_ns()
        if file is not None:
            if file.state is not OpenState.ACKNOWLEDGED and not file.publishing.locked():
                file.unlink()
            file.entry = msgspec.structs.replace(file.entry, ctime_ns=now)
        last = entry if file is None else file.current
        self.inodes.put(msgspec.structs.replace(last, ctime_ns=now))

    def journal_moved(self, batch: Batch, file: OpenFile | None, path: str) -> None:
        """Write to the batch that all versions of a file that are not in the store are at ``path``."""
        for draft in [each.draft for each in file.versions] if file is not None else []:
            if draft is not None:
                self._journal.put(batch, draft.id, encode(msgspec.structs.replace(draft.record(), path=path)))

    def journal_dropped(self, batch: Batch, file: OpenFile | None) -> None:
        """Write to the batch that no version of a file has a name: that is removed or replaced."""
        for draft in [each.draft for each in file.versions] if file is not None else []:
            if draft is not None:
                self._journal.put(batch, draft.id, encode(msgspec.structs.replace(draft.record(), unlinked=True)))


@contextmanager
def _in_effect(path: str) -> Iterator[None]:
    """The name is removed, and a write to the journal that fails does not change that: log it."""
    try:
        yield
    except CacheError as error:
        log.error("%s is removed, which the journal does not say of all its versions: %s", path, error)
