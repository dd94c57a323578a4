"""Begins and discards versions of files in use: chooses the draft of a write, and keeps its journal record.

What always holds (*one draft*): a file has at most one draft that is written to. A draft becomes its file's newest
version once the journal has its record (`begin`); if the journal refuses that, nothing changes. The caller commits a
new file's row and record together (`add_new`). A crash leaves the record, from which the next mount makes an orphan.
Trio thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.staging.staging_area import MEMORY_BYTES_MAX, StagedFile
from lakefs_fuse.upload.draft import Draft, DraftEnded
from lakefs_fuse.upload.draft_target import DraftTarget
from lakefs_fuse.upload.publish import may_be_stored
from lakefs_fuse.upload.uploader import Uploader
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue

COPY_STEP_BYTES = 4 << 20
"""Bytes of an acknowledged version that are in memory while it is copied."""
log = logging.getLogger(__name__)


class Drafts:
    """See the module's head."""

    def __init__(
        self, files: FileTable, services: Uploader, writeback: WriteBackQueue, new_id: Callable[[], str]
    ) -> None:
        self.files, self.services, self.new_id = files, services, new_id
        self._writeback = writeback

    def draft(self, file: OpenFile, *, is_emptied: bool = False) -> Draft:
        """Return the draft to change. A new one begins if the file has none, or if it was acknowledged and
        ``is_emptied``: nothing of the version before counts. Raises LakeError; then the file is unchanged."""
        if file.draft is not None and not (is_emptied and file.draft.sequence):
            return file.draft
        draft = self._new_draft(file, is_emptied=is_emptied)
        try:
            self.begin(file, draft)
        except BaseException:
            draft.close(unlink=True)
            raise
        if draft.base is None:
            self.notify_emptied(file)
        return draft

    def add_new(self, entry: Entry, key: str, *, if_absent: bool = False) -> OpenFile:
        """Add a file that was just created, with its first handle. The caller journals its record, and then calls
        `notify_emptied`. Raises LakeError."""
        file = OpenFile(entry, key, None, if_absent=if_absent)
        draft = self._new_draft(file, is_emptied=True)
        self._prepare(file, draft)
        file.begin(draft)
        self.files.add(file)
        return file

    def notify_emptied(self, file: OpenFile) -> None:
        """Notify listeners that, by the journal, nothing of an earlier version of the file counts."""
        for listener in self.files.events.file_emptied:
            listener(file.key)

    def _new_draft(self, file: OpenFile, *, is_emptied: bool) -> Draft:
        has_earlier = bool(file.behind or file.draft is not None)
        draft_id, if_absent = self.new_id(), file.if_absent and not has_earlier
        target = DraftTarget(file.key, file.describe, replaces=file.replaces, if_absent=if_absent)
        base = None if is_emptied or has_earlier else file.extent
        return Draft(self.services, draft_id, target, base=base, file=self._staged_in_memory(draft_id, file.key))

    async def begin_copy(self, file: OpenFile, acknowledged: Draft) -> None:
        """Begin the version after an acknowledged one as a copy of it. If that is published before it is copied, wait
        until the file has the published version, and begin none. Raises LakeError."""
        copy = self.new_copy(file, acknowledged.size)
        try:
            for at in range(0, acknowledged.size, COPY_STEP_BYTES):
                await copy.write(at, await acknowledged.read(at, COPY_STEP_BYTES))
            await copy.truncate(acknowledged.size)  # zeros at its end
        except DraftEnded:  # the copy is incomplete
            await self._drop_copy(copy)
            async with file.publishing:
                return
        except BaseException:
            await self._drop_copy(copy)
            raise
        if file.draft is not acknowledged:  # it was published in the meantime, or another writer began
            await self._drop_copy(copy)
            return
        # Meanwhile a version before may have been stored, or the file renamed.
        before = acknowledged.target
        copy.retarget(DraftTarget(file.key, file.describe, replaces=before.replaces, copied_from=before.copied_from))
        try:
            self.begin(file, copy)
        except BaseException:
            await self._drop_copy(copy)
            raise

    def new_copy(self, file: OpenFile, size: int) -> Draft:
        """Return a draft for a copy of ``size`` bytes of the file's acknowledged version, to be passed to `begin`.
        Raises StagingFull, CacheError and FileError(EMFILE)."""
        draft_id, target = self.new_id(), DraftTarget(file.key, file.describe)
        small = self._staged_in_memory(draft_id, file.key) if size <= MEMORY_BYTES_MAX else None
        draft = Draft(self.services, draft_id, target, file=small, deferred=True)
        draft.unlink()  # until it begins, because its file may have another key by then
        return draft

    async def _drop_copy(self, copy: Draft) -> None:
        """Discard a copy with the record that a refused write or an upload has made, which would become an orphan."""
        try:
            await self.drop(copy)
        except LakeError as error:  # of the journal: the next mount discards the copy
            log.warning("the record of a copy of %s stays: %s", copy.target.key, error)

    def _staged_in_memory(self, draft_id: str, key: str) -> StagedFile | None:
        """Return a file in memory if it may be acknowledged; None if it needs a staging file from the beginning."""
        staging = self.services.staging
        is_small = self._writeback.is_for(key) and staging.takes_file_in_memory
        return StagedFile(staging, draft_id, key) if is_small else None

    def begin(self, file: OpenFile, draft: Draft) -> None:
        """Journal the draft, and make it the file's newest version; an acknowledged one is left behind. Raises
        LakeError; then the file is unchanged, and the caller ends the draft."""
        self._prepare(file, draft)
        file.refused.move_to(draft.refused)
        try:
            draft.save()
        except BaseException:
            draft.refused.move_to(file.refused)
            raise
        if file.draft is not None:
            self._leave_behind(file)
        file.begin(draft)

    def _prepare(self, file: OpenFile, draft: Draft) -> None:
        self.files.aim(file.key, draft.id, draft.target)
        deferred, unlinked = self._writeback.is_for(file.key), self.files.is_nameless(file)
        draft.begin(self._writeback.sequence, deferred=deferred, unlinked=unlinked)

    def _leave_behind(self, file: OpenFile) -> None:
        """Leave the acknowledged version behind a new one. If it was unlinked in the meantime, discard it."""
        earlier = file.leave_behind()
        if file.unlinked and earlier.draft is not None:
            file.behind.remove(earlier)
            self._writeback.discard(earlier.draft)

    async def discard(self, file: OpenFile) -> None:
        """Discard the draft of a file that was removed; in the background if an attempt may have stored it.

        Raises CacheError if the journal cannot be written; the bytes are deleted nevertheless."""
        draft = file.draft
        if draft is None:
            return
        file.end_draft()
        if may_be_stored(draft):
            draft.unlink()
            try:
                draft.save(sync=True)
            finally:
                self._writeback.discard(draft)
            return
        await self.drop(draft)

    async def drop(self, draft: Draft) -> None:
        """Discard a draft that is not the version of a file, with its journal record. Raises CacheError."""
        await draft.discard()
        if draft.error is None:
            self.files.forget_record(draft.id)
        else:  # its upload could not be aborted: the next mount tries again
            log.warning("the upload of %s could not be ended: %s", draft.target.key, draft.error)
            draft.save(sync=True)

    def close(self) -> None:
        """Journal all staged bytes for the next mount, because this mount ends."""
        for file in [version for each in self.files.in_use() for version in each.versions]:
            if file.draft is not None:
                try:
                    file.draft.file.keep_on_disk()
                    file.draft.save(sync=True)
                except LakeError as error:
                    log.error("what is staged of %s could not be journaled: %s", file.key, error)
                file.draft.close(unlink=False, leave=True)
        self.services.staging.segments.close()
