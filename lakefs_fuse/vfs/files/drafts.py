"""Begins, and throws away, versions of files in use: which draft a write goes to, and what the journal has of it.

What always holds: a file has at most one draft that is written to; a draft whose bytes may be acknowledged is in the
journal before its first byte is (`begin`), but that of a new file, whose row and record the caller commits together
(`add_new`). A crash leaves the record, from which the next mount makes an orphan. Trio thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.staging.staging_area import MEMORY_BYTES_MAX, StagedFile
from lakefs_fuse.upload.draft import Draft, DraftTarget
from lakefs_fuse.upload.uploader import Uploader
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.writeback.queue import WriteBack

log = logging.getLogger(__name__)


class Drafts:
    """See the module's head."""

    def __init__(self, files: FileTable, services: Uploader, writeback: WriteBack, new_id: Callable[[], str]) -> None:
        self.files, self.services, self.new_id = files, services, new_id
        self._writeback = writeback

    def draft(self, file: OpenFile, *, is_emptied: bool = False) -> Draft:
        """The file's draft, begun now where it has none; ``is_emptied`` where nothing of the old version counts."""
        return file.draft or self.begin(file, self._new_draft(file, is_emptied=is_emptied))

    def add_new(self, entry: Entry, key: str, *, if_absent: bool = False) -> OpenFile:
        """A file that was just created, with its first handle. Its record is the caller's to journal."""
        file = OpenFile(entry, key, None, if_absent=if_absent)
        self._begin(file, self._new_draft(file, is_emptied=True))
        self.files.add(file)
        return file

    def _new_draft(self, file: OpenFile, *, is_emptied: bool) -> Draft:
        draft_id, if_absent = self.new_id(), file.if_absent and not file.behind
        target = DraftTarget(file.key, file.describe, replaces=file.replaces, if_absent=if_absent)
        base = None if is_emptied or file.behind else file.extent
        if base is None:
            for listener in self.files.events.file_emptied:
                listener(file.key)
        return Draft(self.services, draft_id, target, base=base, file=self._staged_in_memory(draft_id, file.key))

    def new_copy(self, file: OpenFile, size: int) -> Draft:
        """A draft to which ``size`` bytes of the file's acknowledged version are to be copied; for `begin`. Raises
        StagingFull, CacheError and FileError(EMFILE)."""
        draft_id, target = self.new_id(), DraftTarget(file.key, file.describe)
        small = self._staged_in_memory(draft_id, file.key) if size <= MEMORY_BYTES_MAX else None
        return Draft(self.services, draft_id, target, file=small, deferred=True)

    def _staged_in_memory(self, draft_id: str, key: str) -> StagedFile | None:
        """For a file that may be acknowledged; None where it is to have a staging file from the beginning."""
        return StagedFile(self.services.staging, draft_id, key) if self._writeback.is_for(key) else None

    def begin(self, file: OpenFile, draft: Draft) -> Draft:
        """Make the draft the file's newest version, and journal it."""
        self._begin(file, draft)
        draft.save()
        return draft

    def _begin(self, file: OpenFile, draft: Draft) -> None:
        self.files.aim(file, draft.id, draft.target)
        deferred, unlinked = self._writeback.is_for(file.key), self.files.is_nameless(file)
        draft.begin(self._writeback.sequence, deferred=deferred, unlinked=unlinked)
        file.begin(draft)
        file.refused.move_to(draft.refused)

    async def discard(self, file: OpenFile) -> None:
        """Throw away what is being written to a file that was removed: behind the caller's back where an attempt to
        store it may have worked."""
        draft = file.draft
        if draft is None:
            return
        file.end_draft()
        if draft.recheck or draft.state is DraftState.FAILED:
            draft.unlink()
            draft.save(sync=True)
            self._writeback.discard(draft)
            return
        await draft.discard()
        if draft.error is None:
            self.files.forget_record(draft.id)
        else:  # its upload is left: the next mount tries again
            log.warning("the upload of %s could not be ended: %s", draft.target.key, draft.error)
            draft.save(sync=True)

    def close(self) -> None:
        """The mount ends: journal what is staged as it is, for the next mount."""
        for file in [version for each in self.files.in_use() for version in each.versions]:
            if file.draft is not None:
                try:
                    file.draft.file.keep_on_disk()
                    file.draft.save(sync=True)
                except LakeError as error:
                    log.error("what is staged of %s could not be journaled: %s", file.key, error)
                file.draft.close(unlink=False, leave=True)
        self.services.staging.segments.close()
