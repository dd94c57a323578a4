"""Makes the bytes of a file its newest version: acknowledges them here, stores them, and records what was stored.

`close()` waits for `close`, and `fsync()` for `publish`; the scheduler publishes acknowledged versions by
`publish_version` and `publish_pack`.

What always holds (*one at a time*): one version of a file is published at a time (``OpenFile.publishing``), and not
while its name is renamed or removed; writers continue during this if the version was acknowledged. The new version in
the tree and the end of its journal record are one batch. A crash before that leaves the record, which the next mount
compares with the store. If the disk refuses that batch, the draft stays PUBLISHED, and the next attempt continues
there without sending it again. `ObjectWriter` sends the bytes. Trio thread only.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.environment.failpoints import reached
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, LakeError, StagingFull
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.publish import Published
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.open_file import OpenFile, OpenState
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.writeback.group_commit import GroupCommit
from lakefs_fuse.vfs.writeback.object_writer import LateAttributes, ObjectWriter
from lakefs_fuse.vfs.writeback.queue import AcknowledgedVersion, VersionState, WriteBackQueue
from lakefs_fuse.vfs.writeback.stored_version import Publication, StoredVersion

COPY_BYTES_MAX = 64 << 20
"""An acknowledged file up to this size is copied if it is changed before it is stored; a larger one waits."""
WAIT_DURABLE_S = 1.0
RECORDED_AT_ONCE = 32
"""Files of a pack that are recorded before other tasks have a turn."""
STAGE_WHOLE_S_MAX = 2.0
"""Maximum time that `close()` waits to fetch the unchanged bytes of a small file from the version that it changes."""
UNRECORDED = "what was stored just now is in the store, but that could not be recorded: %s"
log = logging.getLogger(__name__)


class Publisher:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        cache: BlockCache,
        drafts: Drafts,
        writer: ObjectWriter,
        queue: WriteBackQueue,
        group_commit: GroupCommit,
        threads: Threads,
    ) -> None:
        self._db, self._ns, self._cache = database, namespace, cache
        self._files, self._drafts, self._services = drafts.files, drafts, drafts.services
        self._writer, self._queue, self._threads = writer, queue, threads
        self._group_commit = group_commit
        self._journal = Journal(database)

    async def close(self, file: OpenFile) -> None:
        """Store a file that is being closed, or acknowledge it under write-back. Raises LakeError."""
        if file.is_being_unlinked:
            async with file.publishing:  # the name stays if its removal fails
                pass
        draft = file.draft
        if file.state is not OpenState.UNLINKED:
            file.check_publishable()
        if draft is None or file.state is not OpenState.WRITING:
            return
        is_published = draft.state is DraftState.PUBLISHED
        # Acknowledged bytes do not depend on another file's.
        if not self._queue.is_for(file.key) or draft.copies or is_published:
            await self._publish_newest(file, is_synced=False)
            return
        async with draft.gate:
            if file.draft is draft and draft.state in (DraftState.WRITING, DraftState.FAILED):
                await self._stage_whole(draft)
                file.check_publishable()
                await self._group_commit.acknowledge(file, draft)

    @staticmethod
    async def _stage_whole(draft: Draft) -> None:
        """Stage the unchanged bytes of a small file as well, if the store answers in time: the version that it changes
        may no longer exist when it is published. Raises FileError(ESTALE) if that version no longer exists, so that the
        file could never be published."""
        if draft.base is None or draft.size > COPY_BYTES_MAX:
            return
        with trio.move_on_after(STAGE_WHOLE_S_MAX):
            try:
                await draft.fill(0, draft.size)
            except LakeError as error:
                if error.errno == errno.ESTALE:
                    draft.fail_publish(error, "staging")
                    draft.save(sync=True)
                    raise
                log.info("%s is acknowledged as a change of the version in the store: %s", draft.target.key, error)

    async def publish(self, file: OpenFile) -> None:
        """Store the present bytes of the file, and versions acknowledged before in its directory. Raises LakeError."""
        if not file.unlinked:
            file.check_publishable()
        await self._publish_newest(file, is_synced=True)

    async def record(self, file: OpenFile) -> None:
        """Record a version that the store has, which could not be recorded before. Raises LakeError."""
        await self._publish_newest(file, is_synced=False)

    async def _publish_newest(self, file: OpenFile, *, is_synced: bool) -> None:
        """Store the version that is the newest at the call, after those that were acknowledged before. A later one is
        not stored in its place, because versions that wait for the store may have been acknowledged between them."""
        draft = file.draft
        while self._queue.versions:
            await self._drain_before(file)
            if draft is None or draft is file.draft or draft.state is DraftState.PUBLISHED:
                break
            if self._queue.item_of(draft) is None:  # superseded by a version that was acknowledged since
                newer = file.behind[-1].draft if file.behind else file.draft
                if newer is draft:
                    break
                draft = newer
        if draft is not None and draft is file.draft:
            await self._publish(file, draft, is_synced=is_synced)
        else:
            await self._writer.commit_location(file.key)

    async def publish_version(self, item: AcknowledgedVersion) -> None:
        """Publish an acknowledged version alone. Raises LakeError."""
        await self._publish(item.file, item.draft, item)

    async def _publish(
        self, file: OpenFile, draft: Draft, item: AcknowledgedVersion | None = None, *, is_synced: bool = False
    ) -> None:
        async with file.publishing:
            owner = file.owner_of(draft)
            if owner is None or file.state is OpenState.UNLINKED:
                if draft.sequence:
                    self._queue.end(draft)
                return
            if item is not None:
                if item.state is VersionState.SUPERSEDED:
                    return
                item.begin_publishing()
            if file.behind and (later := file.stored_after(draft)) is not None:  # which ends this one
                draft, owner = later, file.owner_of(later) or owner
            async with draft.gate:
                if draft.refused.ranges:
                    draft.refused.check(owner.key)
                reached("publish.begun")
                stored = await self._writer.store(owner, draft, alone=item is not None, is_synced=is_synced)
                reached("publish.sent")
                published = [Publication(file, draft, stored)]
                older, untold = self._record(published)
            reached("publish.noted")
            try:
                await self._writer.commit_location(owner.key)
            except LakeError as error:
                log.warning("%s is stored, and a later commit says so: %s", owner.key, error)
                untold = error
            await self._finish(published, older)
        if not file.handles:
            self._files.forget_if_idle(file)
        if untold is not None and item is None:
            raise untold

    async def publish_pack(self, items: list[AcknowledgedVersion]) -> bool:
        """Publish acknowledged versions in one pack, up to the first whose name is contested or locked. Returns False
        if none could be. Raises LakeError; UnreadableDrafts if the others could be published. Then none is."""
        await self._find_contested(items)
        taken: dict[int, tuple[AcknowledgedVersion, OpenFile]] = {}  # the last of several versions of a file
        passed: list[Draft] = []
        with ExitStack() as held:
            for item in items:
                owner, file = item.file.owner_of(item.draft), id(item.file)
                is_locked = item.file.publishing.locked() and file not in taken
                if item.file.behind and not is_locked and item.file.stored_after(item.draft) is not None:
                    item.is_contested = True
                if owner is not None and (is_locked or item.is_contested):
                    break  # the versions after it wait for the next pack
                if owner is None or item.file.unlinked:
                    self._queue.end(item.draft)
                    continue
                if item.state is VersionState.SUPERSEDED:
                    continue
                if file in taken:
                    passed.append(taken[file][0].draft)
                else:
                    item.file.publishing.acquire_nowait()
                    held.callback(item.file.publishing.release)
                item.begin_publishing()
                taken[file] = item, owner
            if not taken:
                return False
            await self._publish_taken(list(taken.values()), passed)
        for number, (item, _) in enumerate(taken.values(), 1):
            self._files.forget_if_idle(item.file)
            if not number % RECORDED_AT_ONCE:
                await trio.lowlevel.checkpoint()
        return True

    async def _find_contested(self, items: list[AcknowledgedVersion]) -> None:
        owners = [(owner, item.draft) for item in items if (owner := item.file.owner_of(item.draft)) is not None]
        taken = await self._writer.find_taken(owners)
        for item in items if taken else ():
            item.is_contested = item.draft.target.if_absent and item.file.key in taken

    async def _publish_taken(self, taken: list[tuple[AcknowledgedVersion, OpenFile]], passed: list[Draft]) -> None:
        """Publish versions in one pack, which supersedes ``passed``. A few at a time are recorded: readers wait."""
        stored = await self._writer.store_pack([(owner, item.draft) for item, owner in taken], passed)
        published: list[Publication] = []
        older: list[Draft] = []
        for at in range(0, len(taken), RECORDED_AT_ONCE):
            now = [
                Publication(item.file, item.draft, stored(owner, item.draft))
                for item, owner in taken[at : at + RECORDED_AT_ONCE]
            ]
            published += now
            older += self._record(now)[0]
            await trio.lowlevel.checkpoint()
        await self._finish(published, older)

    # -- what is recorded

    def _record(self, published: Sequence[Publication]) -> tuple[list[Draft], LakeError | None]:
        """Record versions that the store has in one batch: rows, the ends of journal records, and attributes set since.
        While the disk is full, memory keeps it. Returns the drafts that they supersede, and the error of what could not
        be written: the bytes are durable all the same, and the next lookup or mount finds them."""
        batch, older, late = Batch(), list[Draft](), list[LateAttributes]()
        for each in published:
            if each.file.behind:
                older += self._end_older(batch, each.file, each.draft)
            if (attributes_set := self._install(each)) is not None:
                late.append(attributes_set)
            if each.file.draft is not None or each.file.behind:
                self._files.journal_drafts(batch, each.file)
            self._record_row(batch, each.stored)
            self._files.holes.note_stored(each.stored.entry, each.draft)
            each.draft.file.mark_ended()
            self._journal.delete(batch, each.draft.id, unannounced=each.stored.unannounced)
        return older, self._commit_record(batch, late)

    def _commit_record(self, batch: Batch, late: list[LateAttributes]) -> LakeError | None:
        """Commit the batch of `_record` together with ``late``, which a crash between would lose. If these cannot be
        journaled, the versions are recorded without them. Returns the error."""
        failed: LakeError | None = None
        if late:
            without = Batch(batch.rows.copy(), batch.shares.copy(), batch.ranges.copy(), batch.committed.copy())
            try:
                self._writer.set_attributes(late, batch)
                return None
            except CacheError as error:
                log.error("attributes that were set while a file was stored are lost: %s", error)
                batch, failed = without, error
        try:
            self._db.commit_volatile(batch)
        except CacheError as error:
            log.error(UNRECORDED, error)
            failed = error
        return failed

    def _end_older(self, batch: Batch, file: OpenFile, draft: Draft) -> list[Draft]:
        """End older versions that were refused, or that a pack passed, so that neither a later attempt nor the next
        mount takes one of them for the newest. Returns their drafts."""
        passed = [each.draft for each in file.behind if each.draft is not None and each.draft.sequence < draft.sequence]
        file.behind = [each for each in file.behind if each.draft not in passed]
        for each in passed:
            self._queue.journal_superseded(batch, each)
        return passed

    def _install(self, each: Publication) -> LateAttributes | None:
        file, stored = each.file, each.stored
        self._cache.pin(stored.extent.version)
        if file.extent is not None:
            self._cache.unpin(file.extent.version)
        late = file.install(each.draft, stored.entry, stored.extent, stored.described)
        return None if late is None else LateAttributes.of(file.key, stored.entry, *late)

    def _record_row(self, batch: Batch, stored: StoredVersion) -> None:
        entry, published = stored.entry, stored.published
        is_shown = stored.row is not None and not stored.is_removed
        is_stored = is_shown and published is not None and not published.is_superseded
        self._ns.changing(entry.parent, entry.name)
        if is_stored:
            batch.committed.append(partial(self._ns.changing, entry.parent, entry.name, is_stored=True))
        if stored.row is None or (published is not None and published.is_superseded):
            self._ns.tree.forget_listing(batch, entry.parent)  # it is to show which version the name has
        if stored.row is not None and stored.is_removed:
            self._ns.tree.remove(batch, stored.row)
            self._ns.invalidate_name(entry.parent, entry.name)
        elif stored.row is not None and published is not None:  # the commit of a pack changed the rows itself
            assert (entry.parent, entry.cookie) == (stored.row.parent, stored.row.cookie), "a file follows its row"
            self._ns.tree.update_files(batch, [(stored.row, entry)])  # read in this step

    async def _finish(self, published: Sequence[Publication], older: list[Draft]) -> None:
        """Release the staged bytes of recorded versions, and discard the ``older`` ones that they supersede."""
        if any(each.draft.sequence or each.stored.needs_sync for each in published):
            await self._threads.run(self._sync)
        for draft in older:
            self._queue.discard_superseded(draft)
        for number, each in enumerate(published, 1):
            file, draft, stored = each.file, each.draft, each.stored
            if stored.published is not None:
                await self._threads.run(self._to_cache, draft, stored.extent.version, stored.published)
            draft.close(unlink=stored.published is None)
            if draft.sequence:
                self._queue.end(draft)
            if file.state is not OpenState.UNLINKED:
                for listener in self._ns.events.version_stored:
                    listener(file.key, stored.extent)
            if not number % RECORDED_AT_ONCE:
                await trio.lowlevel.checkpoint()

    def _sync(self) -> None:
        """Sync the deletion of records before the bytes that they refer to are deleted, and the changes journaled for
        the names, without which an earlier journaled change would be the last. In a worker thread."""
        try:
            self._db.sync()
        except CacheError as error:
            log.error(UNRECORDED, error)

    def _to_cache(self, draft: Draft, version: Version, published: Published) -> None:
        """Rename the staging file into the block cache for later reads. If that fails, they ask the store."""
        self._cache.adopt(self._services.staging.path(draft.id), version, published.hashes)

    # -- changing what was acknowledged

    async def begin_next(self, file: OpenFile, acknowledged: Draft) -> None:
        """Begin the version after an acknowledged one that is not in the store yet, as a copy of it. If it is large, or
        the store has it before it is copied, wait until it is published; then the caller begins the next version. The
        first of several concurrent writers does this. Raises LakeError."""
        file.beginning = file.beginning or trio.Lock()
        async with file.beginning:
            if file.draft is acknowledged:
                await self._copy_acknowledged(file, acknowledged)

    async def _copy_acknowledged(self, file: OpenFile, acknowledged: Draft) -> None:
        if acknowledged.size > COPY_BYTES_MAX and not file.unlinked:
            with trio.move_on_after(self._services.staging.wait_s_max):
                await self._wait_durable(file, acknowledged)
            if file.draft is acknowledged and not file.unlinked:
                raise StagingFull(f"{file.key} waits for the store, and cannot be changed before it is there")
            return
        await self._drafts.begin_copy(file, acknowledged)

    async def _wait_durable(self, file: OpenFile, acknowledged: Draft) -> None:
        while file.draft is acknowledged and not file.unlinked:
            try:
                await self._drain_before(file)
            except LakeError as error:
                log.info("a change of %s waits for the store: %s", file.key, error)
            if file.draft is acknowledged:
                await trio.sleep(WAIT_DURABLE_S)

    async def _drain_before(self, file: OpenFile) -> None:
        """Wait until acknowledged versions of the file, and all in its directory and below, are durable. Raises
        LakeError."""
        await self._queue.drain(self._queue.below(file.key.rpartition("/")[0]))
