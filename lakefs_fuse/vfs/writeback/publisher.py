"""How the bytes of a file become its newest version: accepted on this node, published in the store, noted here.

`close` is what `close()` waits for, `publish` what `fsync()` does; write-back publishes what it accepted through
`publish_accepted` and `publish_together`. One version of a file is published at a time (``OpenFile.publishing``), and
not while its name is renamed or removed; writers go on meanwhile where the version was accepted. Ends with the new
version in the tree and the journal record gone, in one batch. A crash before that leaves the record, which the next
mount compares with what the store has. Trio thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack

import msgspec
import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.environment.failpoints import reached
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, LakeError, StagingFull, Unavailable
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.staging.draft_record import DraftState, encode
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_services import DraftEnded, DraftTarget
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace import attributes
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.writeback.acknowledged import Accepted
from lakefs_fuse.vfs.writeback.object_writer import Late, Stored, Storing
from lakefs_fuse.vfs.writeback.queue import WriteBack
from lakefs_fuse.vfs.writeback.replay import Replay

COPY_BYTES_MAX = 64 << 20
"""An accepted file up to this size is copied when it is changed before it is in the store; a larger one waits."""
WAIT_DURABLE_S = 1.0
DISCARD_S_FIRST, DISCARD_S_MAX = 1.0, 60.0
"""Between attempts to end the upload of a version that nobody wants."""
COPY_STEP_BYTES = 4 << 20
NOTED_TOGETHER = 32
"""Files of a pack that are noted between two turns of everybody else."""
STAGE_WHOLE_S_MAX = 2.0
"""So long `close()` waits for the store to give what a small file keeps of the version that it changes."""
log = logging.getLogger(__name__)


class Newest:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        cache: BlockCache,
        drafts: Drafts,
        storing: Storing,
        writeback: WriteBack,
        replay: Replay,
        threads: Threads,
    ) -> None:
        self._db, self._ns, self._cache, self._files = database, namespace, cache, drafts.files
        self._storing, self._writeback, self._replay = storing, writeback, replay
        self._drafts, self._services, self._threads = drafts, drafts.services, threads
        self._journal = Journal(database)

    async def close(self, file: OpenFile) -> None:
        """What `close()` waits for: the store, or under write-back the local disk. Raises LakeError."""
        draft = file.draft
        if not file.unlinked:
            file.check_complete()
        if draft is None or file.unlinked or draft.accepted:
            return
        if not self._writeback.is_for(file.key):
            await self.publish(file)
            return
        async with draft.exclusive():
            if file.draft is draft and draft.state in (DraftState.WRITING, DraftState.FAILED):
                await self._stage_whole(draft)
                file.check_complete()
                await self._writeback.accept(file, draft)

    @staticmethod
    async def _stage_whole(draft: Draft) -> None:
        """What a small file keeps of the version it changes is staged too, where the store answers in time: that
        version may be gone when these bytes are published."""
        if draft.base is None or draft.size > COPY_BYTES_MAX:
            return
        with trio.move_on_after(STAGE_WHOLE_S_MAX):
            try:
                await draft.fill(0, draft.size)
            except LakeError as error:
                log.info("%s is accepted as a change of what the store has: %s", draft.target.key, error)

    async def publish(self, file: OpenFile) -> None:
        """Return when the file's bytes, as they were when called, are in the store, and what write-back accepted
        before in its directory. Raises LakeError."""
        if not file.unlinked:
            file.check_complete()
        if len(self._writeback):
            await self._writeback.drain(self._writeback.before(file.key))
        if file.draft is not None:
            await self._publish(file, file.draft)

    async def settled(self, item: Accepted) -> bool:
        """See `accepted.Publisher`."""
        return await self._replay.settled(item)

    async def set_aside(self, item: Accepted) -> None:
        """See `accepted.Publisher`."""
        await self._replay.set_aside(item)

    async def publish_accepted(self, item: Accepted) -> None:
        """See `accepted.Publisher`."""
        await self._publish(item.file, item.draft, item)

    async def _publish(self, file: OpenFile, draft: Draft, item: Accepted | None = None) -> None:
        async with file.publishing:
            owner = file.owner_of(draft)
            if owner is None or file.unlinked:
                if draft.accepted:
                    self._writeback.forget(draft)
                return
            if item is not None:
                if item.superseded:
                    return
                item.busy = True
            async with draft.exclusive():
                draft.refused.check(owner.key)
                if not draft.upload_intent_ns:
                    self._files.aim(owner, draft.id, draft.target)
                reached("publish.begun")
                stored = await self._storing.store(owner, draft, alone=item is not None)
                reached("publish.sent")
                batch = Batch()
                older = self._pass(file, draft, batch)
                late = self._accept(file, draft, stored, batch)
                self._commit(batch, [late])
            reached("publish.noted")
            if draft.accepted:
                await self._threads.run(self._sync)
            for each in older:
                self._writeback.was_superseded(each)
            if stored.published is not None:
                await self._threads.run(self._to_cache, draft, stored)
            self._end(draft, stored)
            if not file.unlinked:
                self._announce_stored(owner.key, stored.extent)
        self._files.forget_if_idle(file)

    async def publish_together(self, items: list[Accepted]) -> list[Accepted]:
        """See `accepted.Publisher`."""
        taken: dict[int, tuple[Accepted, OpenFile]] = {}  # of several versions of a file the last
        passed: list[tuple[Accepted, OpenFile]] = []
        items = [item for item in items if not item.replayed or not await self._replay.settled(item)]
        with ExitStack() as held:
            for item in items:
                owner, file = item.file.owner_of(item.draft), id(item.file)
                if owner is not None and item.file.publishing.locked() and file not in taken:
                    break  # what comes after it in the order waits for the next pack
                if owner is None or item.file.unlinked:
                    self._writeback.forget(item.draft)
                    continue
                if item.superseded:
                    continue
                if file in taken:
                    passed.append(taken[file])
                else:
                    item.file.publishing.acquire_nowait()
                    held.callback(item.file.publishing.release)
                item.busy = True
                taken[file] = item, owner
            if not taken:
                return []
            await self._publish_taken(list(taken.values()), passed)
        for number, (item, _) in enumerate(taken.values(), 1):
            self._files.forget_if_idle(item.file)
            if not number % NOTED_TOGETHER:
                await trio.lowlevel.checkpoint()
        return [item for item, _ in taken.values()]

    async def _publish_taken(
        self, taken: list[tuple[Accepted, OpenFile]], passed: list[tuple[Accepted, OpenFile]]
    ) -> None:
        """In one pack, which has newer versions of what is ``passed``. Noted for a few at a time: readers wait."""
        files = [(owner, item.draft) for item, owner in taken]
        stored = await self._storing.store_together(files, [item.draft for item, _ in passed])
        published: list[tuple[Accepted, OpenFile, Stored]] = []
        older: list[Draft] = []
        for at in range(0, len(taken), NOTED_TOGETHER):
            now = [(item, owner, stored(owner, item.draft)) for item, owner in taken[at : at + NOTED_TOGETHER]]
            published += now
            older += self._note(now)
            await trio.lowlevel.checkpoint()
        await self._threads.run(self._sync)
        for at in range(0, len(taken), NOTED_TOGETHER):
            self._end_all(published[at : at + NOTED_TOGETHER])
            await trio.lowlevel.checkpoint()
        for each in older:
            self._writeback.was_superseded(each)

    def _sync(self) -> None:
        """Records that went are gone even after a power cut: the bytes that they name may go. In a worker thread."""
        try:
            self._db.sync()
        except CacheError as error:
            log.error("what was stored just now is in the store, but that could not be noted: %s", error)

    def _note(self, published: list[tuple[Accepted, OpenFile, Stored]]) -> list[Draft]:
        """Answers versions that nobody wants any more."""
        batch = Batch()
        older = [each for item, *_ in published for each in self._pass(item.file, item.draft, batch)]
        late = [self._accept(item.file, item.draft, stored, batch) for item, _, stored in published]
        self._commit(batch, late)
        return older

    def _end_all(self, published: list[tuple[Accepted, OpenFile, Stored]]) -> None:
        for item, owner, stored in published:
            self._end(item.draft, stored)
            if not item.file.unlinked:
                self._announce_stored(owner.key, stored.extent)

    def _announce_stored(self, path: str, extent: Extent) -> None:
        for listener in self._ns.events.version_stored:
            listener(path, extent)

    def _end(self, draft: Draft, stored: Stored) -> None:
        draft.close(unlink=stored.published is None)
        if draft.accepted:
            self._writeback.forget(draft)

    def _pass(self, file: OpenFile, draft: Draft, batch: Batch) -> list[Draft]:
        """Older versions that did not come before this one, because they failed or a pack passed them: nobody wants
        them, and neither a later attempt nor the next mount shall take them for newest."""
        older = [each for each in file.behind if each.draft is not None and each.draft.accepted < draft.accepted]
        file.behind = [each for each in file.behind if each not in older]
        passed = [each.draft for each in older if each.draft is not None]
        for each in passed:
            each.unlinked = True
            if each.is_unknown_to_store:
                each.file.ending()
                self._journal.delete(batch, each.id)
            else:
                self._journal.put(batch, each.id, encode(each.record()))
        return passed

    def _accept(self, file: OpenFile, draft: Draft, stored: Stored, batch: Batch) -> Late | None:
        """These bytes are the newest version in the store, whatever was written since; noted in ``batch``."""
        self._cache.pin(stored.extent.version)
        if file.extent is not None:
            self._cache.unpin(file.extent.version)
        owner = file.owner_of(draft) or file
        now = owner.entry
        file.extent, file.if_absent = stored.extent, False
        if owner is file:
            file.entry, file.draft = stored.entry, None
        else:
            file.behind.remove(owner)
            owner.entry = stored.entry
            self._follow(file, stored)
        xattrs, file.late_xattrs = file.late_xattrs, None
        self._record(batch, stored, draft)
        if file.unlinked or (xattrs is None and _is_told(now, stored.told)):
            return None
        return Late(owner, now, xattrs)

    def _commit(self, batch: Batch, attributes_set: list[Late | None]) -> None:
        """Where that fails the bytes are durable all the same; the next listing, or the next mount, finds out."""
        try:
            if late := [each for each in attributes_set if each is not None]:
                self._storing.set_attributes(late, batch)  # with the records, or a death between would lose them
            else:
                self._db.commit(batch)
        except CacheError as error:
            log.error("what was stored just now is in the store, but that could not be noted: %s", error)

    @staticmethod
    def _follow(file: OpenFile, stored: Stored) -> None:
        """Later versions of the file replace this one."""
        now = stored.entry
        for later in file.versions:
            flags = int(later.entry.flags & ~Flag.LOCAL)
            later.entry = msgspec.structs.replace(
                later.entry, flags=flags, etag=now.etag, stamp=now.stamp, place=now.place, offset=now.offset
            )
            later.extent, later.if_absent = stored.extent, False
            if later.draft is not None:
                later.draft.target.replaces, later.draft.target.if_absent = stored.extent.version.etag, False
                later.draft.save()

    def _record(self, batch: Batch, stored: Stored, draft: Draft) -> None:
        entry = stored.entry
        self._ns.changing(entry.parent, entry.name)
        row = self._ns.tree.entry(entry.inode)
        if row is not None and self._ns.is_removed(entry):
            # Another node saw these bytes, and removed or renamed them, before their writer heard that they are there.
            self._ns.tree.remove(batch, row)
            self._ns.announce_name(entry.parent, entry.name)
        elif row is not None and stored.published is not None:  # a pack's commit told the rows itself
            self._ns.tree.update(batch, entry)
        elif row is None:  # somebody else's version has the name on this node, and ours replaced it: look again
            self._ns.tree.forget_listing(batch, entry.parent)
        self._files.holes.note_stored(entry, draft)
        draft.file.ending()
        self._journal.delete(batch, draft.id)

    def _to_cache(self, draft: Draft, stored: Stored) -> None:
        """What was just written is read back from local disk. A cache that cannot take it loses nothing."""
        if stored.published is not None:
            path = self._services.staging.path(draft.id)
            self._cache.adopt(path, stored.extent.version, stored.published.hashes)

    # -- changing what was accepted

    async def begin_anew(self, file: OpenFile, accepted: Draft) -> None:
        """A file is changed that was accepted and is not in the store yet: the next version begins as a copy of it, or
        where it is large, after it was published. Of many writers at once the first does it. Raises LakeError."""
        file.beginning = file.beginning or trio.Lock()
        async with file.beginning:
            if file.draft is accepted:
                await self._begin_anew(file, accepted)

    async def _begin_anew(self, file: OpenFile, accepted: Draft) -> None:
        if accepted.size > COPY_BYTES_MAX and not file.unlinked:
            with trio.move_on_after(self._services.staging.wait_s_max):
                await self._wait_durable(file, accepted)
            if file.draft is accepted and not file.unlinked:
                raise StagingFull(f"{file.key} waits for the store, and cannot be changed before it is there")
            return
        copy = Draft(self._services, self._drafts.new_id(), DraftTarget(file.key, file.describe))
        copy.deferred = True
        try:
            for at in range(0, accepted.size, COPY_STEP_BYTES):
                await copy.write(at, await accepted.read(at, COPY_STEP_BYTES))
            copy.size = accepted.size
        except DraftEnded:
            pass
        except BaseException:
            await copy.discard()
            raise
        if file.draft is not accepted:  # it was published meanwhile, or somebody else began
            await copy.discard()
            return
        # Meanwhile a version before may have been stored, or the file renamed.
        before = accepted.target
        copy.target = DraftTarget(file.key, file.describe, replaces=before.replaces, copied_from=before.copied_from)
        self.leave_behind(file)
        self._drafts.begin(file, copy)

    def leave_behind(self, file: OpenFile) -> None:
        """Another version than the accepted one may begin. One that was unlinked meanwhile is discarded."""
        earlier = file.leave_behind()
        if file.unlinked and earlier.draft is not None:
            file.behind.remove(earlier)
            self.discard_later(earlier.draft)

    async def _wait_durable(self, file: OpenFile, accepted: Draft) -> None:
        while file.draft is accepted and not file.unlinked:
            try:
                await self._writeback.drain(self._writeback.before(file.key))
            except LakeError as error:
                log.info("%s is to be changed, and waits for the store: %s", file.key, error)
            if file.draft is accepted:
                await trio.sleep(WAIT_DURABLE_S)

    # -- what nobody wants any more

    def discard_later(self, draft: Draft) -> None:
        """See `accepted.Publisher`."""
        draft.unlinked = True
        self._services.nursery.start_soon(self._discard, draft)

    async def _discard(self, draft: Draft) -> None:
        """Until the store has nothing left of it either; where the mount ends before, the next one goes on."""
        reached("discard.begun")
        backoff = Backoff(DISCARD_S_FIRST, DISCARD_S_MAX)
        while True:
            try:
                await self._storing.forsake_late(draft)
                await draft.discard()
                if draft.error is None:
                    self._files.forget_record(draft.id)
                    return
                error: LakeError = draft.error
            except LakeError as failed:
                error = failed
                draft.close(unlink=True)
            log.warning("what the store has of a version of %s that is not wanted stays: %s", draft.target.key, error)
            try:
                draft.save(sync=True)
            except CacheError as unsaved:
                log.error("what is left of %s could not be noted: %s", draft.target.key, unsaved)
            if not isinstance(error, Unavailable):
                return
            await trio.sleep(backoff.next_s())


def _is_told(entry: Entry, told: Mapping[str, str]) -> bool:
    """An object's metadata says what the entry does; an mtime nobody chose is its LastModified."""
    wanted = attributes.describe(entry, with_mtime=bool(entry.flags & Flag.MTIME_KEPT))
    return all(told.get(name) == value for name, value in wanted.items())
