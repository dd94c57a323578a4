"""Files that are open or not yet durable: the only state of files that is kept in memory.

An `OpenFile` belongs to one inode. It reads from its draft where it has one, else from the version it is pinned to; it
stays in the table while a handle is open or its newest bytes are not in the store. Publishing is what `close()` and
`fsync()` wait for (see `newest`). Under write-back `close()` waits for the local disk only; who writes to the file
after that begins another draft. A file that is renamed keeps its inode, handles and draft; one whose bytes are moved
(into a pack, to its new key) is read on from where they are now. Trio thread only; code between two awaits is atomic.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.errors import CacheError, FileError, LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.journal import Journal
from lakefs_fuse.staging.draft_record import DraftRecord, DraftState, encode
from lakefs_fuse.staging.staged_file import StagedFile
from lakefs_fuse.store.protocol import Buffer, ObjectMeta
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_services import DraftEnded, DraftServices, DraftTarget
from lakefs_fuse.upload.publish import visible_token
from lakefs_fuse.vfs.files.handle_check import Currency
from lakefs_fuse.vfs.files.holes import Holes
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace import attributes
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.writeback.object_writer import Storing
from lakefs_fuse.vfs.writeback.queue import WriteBack

if TYPE_CHECKING:
    from lakefs_fuse.vfs.files.incomplete_files import IncompleteFiles
    from lakefs_fuse.vfs.files.open_leases import Lending
    from lakefs_fuse.vfs.pinning.pinner import Keeper
    from lakefs_fuse.vfs.writeback.publisher import Newest

KEPT_BYTES_MAX = 256 << 20
"""An open file that is deleted here is fetched whole first, if no larger than this, so that its readers can go on."""
log = logging.getLogger(__name__)


class FileTable:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        cache: BlockCache,
        reader: BlockReader,
        services: Callable[[Callable[[DraftRecord, bool], None]], DraftServices],
        storing: Storing,
        *,
        new_id: Callable[[], str],
        look_again: Callable[[], Awaitable[object]],
    ) -> None:
        self._db, self._ns, self._cache, self._reader = database, namespace, cache, reader
        self._journal = Journal(database)
        self.currency = Currency(namespace, cache, reader, look_again)
        self.new_id, self._storing, self.look_again = new_id, storing, look_again
        self.writeback: WriteBack
        self.newest: Newest
        self.keeper: Keeper
        self.incomplete: IncompleteFiles
        self.lending: Lending
        self.services = services(self._save)
        self.holes = Holes()
        self.by_inode = self._files = dict[int, OpenFile]()  # the first name is for readers
        self._renamed: set[int] = set()

    def _save(self, record: DraftRecord, sync: bool) -> None:
        batch = Batch()
        self._journal.put(batch, record.id, encode(record))
        self._db.commit(batch, sync=sync)

    # -- the table

    def get(self, inode: int) -> OpenFile | None:
        return self._files.get(inode)

    def is_dirty(self, entry: Entry) -> bool:
        """The entry is, or a directory holds, a file whose newest bytes are not in the store."""
        if not entry.is_dir:
            file = self._files.get(entry.inode)
            return file is not None and file.draft is not None and not file.unlinked
        return any(
            file.draft is not None and not file.unlinked and self._is_below(file.entry, entry.inode)
            for file in self._files.values()
        )

    def _is_below(self, entry: Entry, directory: int) -> bool:
        parent = entry.parent
        while parent != directory:
            above = self._ns.tree.entry(parent)
            if above is None:
                return False
            parent = above.parent
        return True

    def in_use(self) -> Iterable[OpenFile]:
        return self._files.values()

    def dirty(self) -> list[OpenFile]:
        return [file for file in self._files.values() if file.draft is not None]

    def being_written(self, bytes_max: int) -> int:
        """Files no larger than this that somebody writes and does not close yet."""
        return sum(
            file.writers > 0
            and not file.publishing.locked()
            and file.draft is not None
            and file.draft.size <= bytes_max
            for file in self._files.values()
        )

    def is_aimed_at(self, key: str) -> bool:
        """Something that is being written will be stored at this key, or belongs to the file whose key it is."""
        return any(
            each.draft is not None and key in (each.key, each.draft.target.key)
            for file in self._files.values()
            for each in file.versions
        )

    def __len__(self) -> int:
        return len(self._files)

    def acquire(self, entry: Entry, *, writer: bool) -> OpenFile:
        """One more handle on a file."""
        file = self._files.get(entry.inode)
        if file is None:
            extent = self._ns.extent(entry)
            file = self._files[entry.inode] = OpenFile(entry, self._ns.key(entry), extent)
            if extent is not None:
                self._cache.pin(extent.version)
        file.handles += 1
        file.writers += writer
        return file

    def adopt_new(self, entry: Entry, key: str, *, if_absent: bool = False) -> OpenFile:
        """A file that was just created, with its first handle. The journal does not hear of it here."""
        file = OpenFile(entry, key, None, if_absent=if_absent)
        self._begin(file, self._new_draft(file, anew=True))
        file.handles = file.writers = 1
        self._files[entry.inode] = file
        return file

    def restore(self, file: OpenFile) -> None:
        """A file that write-back accepted is back, without a handle."""
        if file.entry.inode not in self._files and file.extent is not None:
            self._cache.pin(file.extent.version)
        self._files[file.entry.inode] = file
        if file.draft is not None and file.draft.target.path:
            self._renamed.add(file.entry.inode)

    def renew_inode(self, batch: Batch, file: OpenFile, row: Entry) -> None:
        """A file without a handle gets another inode, so that the kernel forgets the pages that it has of it."""
        renewed = self._ns.tree.renew_inode(batch, row)
        if self._files.get(row.inode) is file:
            del self._files[row.inode]
            self._files[renewed.inode] = file
        if row.inode in self._renamed:
            self._renamed.add(renewed.inode)
        for each in file.versions:
            each.entry = msgspec.structs.replace(each.entry, inode=renewed.inode)

    def detach(self, file: OpenFile) -> None:
        """The file has nothing to do any more with the version that it was to replace."""
        if file.extent is not None:
            self._cache.unpin(file.extent.version)
        file.extent, file.if_absent = None, False

    async def release(self, file: OpenFile, *, writer: bool) -> None:
        """One handle less. The last one takes the file out of the table, unless it still has bytes to publish."""
        file.handles -= 1
        file.writers -= writer
        if not file.handles and file.draft is not None and file.unlinked:
            await self._discard(file)
        self._left(file)

    def _left(self, file: OpenFile) -> None:
        if not file.handles and file.is_incomplete:
            self.services.nursery.start_soon(self.incomplete.set_aside, file)
        elif not file.handles and file.draft is not None and file.draft.state is DraftState.WRITING:
            self.services.nursery.start_soon(self._close_late, file)
        else:
            self.forget_if_idle(file)

    def forget_if_idle(self, file: OpenFile) -> None:
        if file.handles or file.draft is not None or self._files.get(file.entry.inode) is not file:
            return
        del self._files[file.entry.inode]
        if file.extent is not None:
            self._cache.unpin(file.extent.version)
        row = self._ns.tree.entry(file.entry.inode) if file.is_redated else None
        if row is not None:
            try:
                self._ns.renew_inode(row)
            except CacheError as error:
                log.warning("%s goes on showing the mtime that it had: %s", file.key, error)

    async def _close_late(self, file: OpenFile) -> None:
        """Nobody waits for these bytes any more (a mapping outlived its file, a close was not the opener's)."""
        try:
            await self.close_file(file)
        except LakeError as error:
            log.error("%s is not durable: %s", file.key, error)
        except Exception:
            log.exception("%s is not durable", file.key)
        self.forget_if_idle(file)

    # -- reading and writing

    async def read(self, file: OpenFile, offset: int, length: int, readahead: Readahead) -> Buffer:
        while file.draft is not None:
            try:
                return await file.draft.read(offset, length)
            except DraftEnded:
                await self._wait_published(file)
        while True:
            extent = file.extent
            if extent is None or offset >= extent.size:
                return b""
            length = min(length, extent.size - offset)
            begin, ahead = extent.offset + offset, readahead if extent.is_whole else None
            try:
                return await self._reader.read(extent.version, begin, length, ahead, jumps=not extent.is_whole)
            except FileError as error:
                if error.errno != errno.ESTALE:
                    raise
                if file.extent == extent:
                    await self.look_again()
                if file.extent == extent:
                    await self.currency.renew(file.entry)  # for who opens it next
                    raise

    async def write(self, file: OpenFile, offset: int, data: Buffer) -> None:
        """Where it fails, the file is incomplete until the range was written again."""
        while True:
            try:
                draft = await self._draft_to_change(file)
            except Exception as error:
                end, draft_now = offset + len(data), file.draft
                if draft_now is None or draft_now.accepted:
                    file.refused.add(offset, end, error)
                else:
                    draft_now.refuse(offset, end, error)
                raise
            try:
                await draft.write(offset, data)
                return
            except DraftEnded:
                await self._wait_published(file)

    async def _draft_to_change(self, file: OpenFile) -> Draft:
        if file.draft is not None and file.draft.accepted:
            await self.newest.begin_anew(file, file.draft)
        return self.draft(file)

    async def truncate(self, file: OpenFile, size: int) -> None:
        while True:
            if file.draft is not None and file.draft.accepted:
                if size == 0:
                    self.leave_behind(file)
                else:
                    await self.newest.begin_anew(file, file.draft)
            try:
                await self.draft(file, anew=size == 0).truncate(size)
                return
            except DraftEnded:
                await self._wait_published(file)

    def leave_behind(self, file: OpenFile) -> None:
        """Another version than the accepted one may begin. What was deleted meanwhile is wanted by nobody then."""
        earlier = file.leave_behind()
        if file.unlinked and earlier.draft is not None:
            file.behind.remove(earlier)
            self.newest.discard_later(earlier.draft)

    @staticmethod
    async def _wait_published(file: OpenFile) -> None:
        """The draft has ended; whoever ended it is about to take it away, or it was accepted."""
        if file.draft is not None and file.draft.accepted:
            return
        async with file.publishing:
            pass

    def draft(self, file: OpenFile, *, anew: bool = False) -> Draft:
        """The file's draft, begun now where it has none; ``anew`` where nothing of the old version counts."""
        return file.draft or self.begin(file, self._new_draft(file, anew=anew))

    def _new_draft(self, file: OpenFile, *, anew: bool) -> Draft:
        draft_id, if_absent = self.new_id(), file.if_absent and not file.behind
        target = DraftTarget(file.key, file.describe, replaces=file.replaces, if_absent=if_absent)
        base = None if anew or file.behind else file.extent
        small = StagedFile(self.services.staging, draft_id, file.key) if self.writeback.is_for(file.key) else None
        if base is None:
            self.incomplete.supersede(file.key)
        return Draft(self.services, draft_id, target, base=base, file=small)

    def begin(self, file: OpenFile, draft: Draft) -> Draft:
        """The draft is the file's newest version, and the journal hears of it."""
        self._begin(file, draft)
        draft.save()
        return draft

    def _begin(self, file: OpenFile, draft: Draft) -> None:
        self.aim(file, draft.id, draft.target)
        draft.began, draft.deferred = self.writeback.sequence, self.writeback.is_for(file.key)
        draft.unlinked = file.unlinked and self._ns.tree.entry(file.entry.inode) is None  # else `unlink` says so
        file.draft = draft
        file.refused.move_to(draft.refused)

    def aim(self, file: OpenFile, draft_id: str, target: DraftTarget) -> None:
        """Choose the key of a draft whose upload has not begun: the file's own, unless other bytes are, or will be,
        there that belong to another name."""
        used = self._ns.tree.objects.used(file.key) is not None or self._storing.is_leaving(file.key)
        taken = used or file.key in self.strays()
        target.key, target.path = (OBJECTS + draft_id, file.key) if taken else (file.key, "")

    def strays(self) -> set[str]:
        """Keys where files are, or will be, stored that were renamed after their upload began."""
        self._renamed = {inode for inode in self._renamed if inode in self._files}
        renamed = [each for inode in self._renamed for each in self._files[inode].versions if not each.unlinked]
        return {each.draft.target.key for each in renamed if each.draft and each.draft.target.key != each.key}

    async def close_file(self, file: OpenFile) -> None:
        """See `Newest.close`."""
        await self.newest.close(file)

    async def publish(self, file: OpenFile) -> None:
        """See `Newest.publish`."""
        await self.newest.publish(file)

    # -- what commits change

    def updated(self, entry: Entry) -> None:
        """The row of a file has other attributes, or another name."""
        file = self._files.get(entry.inode)
        if file is None or file.unlinked:
            return
        if file.draft is None and not file.behind:
            file.entry = entry
            self._pin(file, self._ns.extent(entry))
            return
        for each in file.versions:
            flags = int((each.entry.flags & ~Flag.XATTRS) | (entry.flags & Flag.XATTRS))
            each.entry = msgspec.structs.replace(
                each.entry, parent=entry.parent, cookie=entry.cookie, name=entry.name, flags=flags
            )

    def relocated(self, entry: Entry) -> None:
        """The same bytes are elsewhere now."""
        file = self._files.get(entry.inode)
        if file is None:
            return
        extent, before = self._ns.extent(entry), file.extent
        for draft in (each.draft for each in file.versions):
            if draft is None or before is None or extent is None or extent == before:
                continue  # where a rename under way has noted its new name, that stays
            if draft.base == before:
                draft.base = extent
            if draft.target.replaces == before.version.etag:
                draft.target.replaces = extent.version.etag
            draft.save()
        self._pin(file, extent)
        place = {"place": entry.place, "offset": entry.offset, "etag": entry.etag, "stamp": entry.stamp}
        file.entry = msgspec.structs.replace(file.entry, **place)

    def _pin(self, file: OpenFile, extent: Extent | None) -> None:
        if extent == file.extent:
            return
        if extent is not None:
            self._cache.pin(extent.version)
        if file.extent is not None:
            self._cache.unpin(file.extent.version)
        file.extent = extent

    def moved(self) -> None:
        """Directories, or files, have other names: what is being written goes there too."""
        for file in list(self._files.values()):
            above = None if file.unlinked else self._ns.tree.path(file.entry.parent)
            if above is None:
                continue
            key = b"/".join([*above, file.entry.name]).decode("utf-8", "surrogatepass")
            if key == file.key:
                continue
            batch = Batch()
            self.move(batch, file, key)
            self._db.commit(batch, sync=file.is_promised)

    def move(self, batch: Batch, file: OpenFile, key: str) -> None:
        """A file, all its versions, has another name when the batch is committed, which also tells the journal."""
        for each in file.versions:
            each.key, draft = key, each.draft
            if draft is None:
                continue
            if draft.upload_intent_ns or draft.state is DraftState.PUBLISHING:
                draft.target.path = key
                self._renamed.add(each.entry.inode)
            else:
                self.aim(each, draft.id, draft.target)
            self._journal.put(batch, draft.id, encode(draft.noted()))

    def replaces(self, entry: Entry, copied_from: str) -> None:
        """A file not stored yet will replace the plain object with its row's ETag (empty: none), which may be a copy of
        that at another key, and the bytes elsewhere that its row names."""
        file = self._files.get(entry.inode)
        for each in file.versions if file is not None else ():
            each.entry = msgspec.structs.replace(each.entry, place=entry.place, offset=entry.offset)
            if each.draft is not None:
                each.draft.target.will_replace(entry.etag, copied_from)

    async def unlink(self, file: OpenFile, delete: Callable[[Entry], Awaitable[None]]) -> None:
        """``delete`` takes the name away; handles stay. No publishing runs meanwhile, so none can bring the name
        back. Where ``delete`` fails, the file is as it was."""
        try:
            async with file.publishing:
                file.unlinked = True  # not before: what is being published is visible with its name until then
                if file.draft is not None:  # what is being accepted is accepted first
                    async with file.draft.exclusive():
                        pass
                await self._keep_for_handles(file)
                late, newest = await self._with_late_object(file), self._storing.newest_change
                await delete(late)
        except BaseException:
            file.unlinked = False
            self._left(file)  # its close may have ended for a file that is not wanted
            raise
        await self._drop_accepted(file, newest)
        if file.draft is not None:
            file.draft.unlinked = True
            if file.handles:
                file.draft.save(sync=True)
            else:
                await self._discard(file)
        self.forget_if_idle(file)

    async def _keep_for_handles(self, file: OpenFile) -> None:
        """Who has the file open goes on reading what is about to go from the store."""
        extent = file.draft.base if file.draft is not None else file.extent
        wanted = min(extent.size, file.draft.base_limit if file.draft is not None else extent.size) if extent else 0
        if not file.handles or extent is None or not 0 < wanted <= KEPT_BYTES_MAX:
            return
        try:
            kept = await self._reader.ensure(extent.version, extent.offset, extent.offset + wanted)
            why = "the cache has no room"
        except LakeError as error:
            kept, why = False, str(error)
        if not kept:
            log.warning("%s is deleted while open, and could not be kept: %s", file.key, why)

    async def _with_late_object(self, file: OpenFile) -> Entry:
        """An attempt to publish failed without an answer, and the object may be there all the same."""
        draft = file.draft
        if draft is None or draft.accepted or not (draft.recheck or draft.state is DraftState.FAILED):
            return file.entry
        meta = (await visible_token(draft))[1]
        if meta is None:
            return file.entry
        if meta.key == file.key:
            return msgspec.structs.replace(file.entry, etag=meta.etag)
        self._storing.forsake(meta)
        return file.entry

    async def _drop_accepted(self, file: OpenFile, newest: int) -> None:
        """Versions that write-back accepted are wanted only by who has the file open. ``newest``: journaled before."""
        batch = Batch()
        gone = [each.draft for each in file.versions if each.draft is not None and each.draft.accepted]
        for draft in gone:
            self.writeback.forget(draft)
            draft.unlinked = True
            self._journal.put(batch, draft.id, encode(draft.record()))
        if not gone:
            return
        since = min(draft.accepted for draft in gone)
        self._storing.withhold(file.key, since, self.writeback.sequence, newest)
        self._db.commit(batch, sync=True)
        file.behind.clear()
        for draft in gone:
            if draft is not file.draft or not file.handles:
                self.newest.discard_later(draft)
        if file.draft in gone and not file.handles:
            file.draft = None

    async def _discard(self, file: OpenFile) -> None:
        draft, file.draft = file.draft, None
        if draft is not None:
            await draft.discard()
            if draft.error is None:
                self.forget_record(draft.id)
            else:  # its upload is left: the next mount tries again
                log.warning("the upload of %s could not be ended: %s", file.key, draft.error)
                draft.save(sync=True)

    def forget_record(self, draft_id: str) -> None:
        batch = Batch()
        self._journal.delete(batch, draft_id)
        self._db.commit(batch)

    def close(self) -> None:
        """The mount ends: what is staged is noted as it is, for the next one."""
        for file in [version for each in self._files.values() for version in each.versions]:
            if file.draft is not None:
                try:
                    file.draft.file.keep_on_disk()
                    file.draft.save(sync=True)
                except LakeError as error:
                    log.error("what is staged of %s could not be noted: %s", file.key, error)
                file.draft.close(unlink=False, leave=True)
        self.services.staging.segments.close()

    def learned(self, meta: ObjectMeta) -> None:
        """A GET told the metadata of an object: keep it where it belongs to a file in use."""
        if meta.metadata is None:
            return
        for file in self._files.values():
            wanted = file.entry.etag == meta.etag and not file.entry.flags & Flag.ATTRIBUTES_KNOWN
            if wanted and file.draft is None and file.extent is not None and file.extent.version.key == meta.key:
                self.learn(file.entry, meta)

    def learn(self, entry: Entry, meta: ObjectMeta) -> Entry:
        """Write an object's own attributes to its entry."""
        learnt = attributes.learn(entry, meta.metadata or {})
        batch = Batch()
        if self._ns.tree.entry(entry.inode) is not None:
            self._ns.tree.update(batch, learnt)
            self._db.commit(batch)
        file = self._files.get(entry.inode)
        if file is not None:
            file.entry = learnt
        return learnt
