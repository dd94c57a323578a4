"""The multipart upload of a draft: CreateMultipartUpload, the requests for its parts, and its end.

An upload is in one of four states, which two fields of the journal record tell apart:

========= =========== ====== =====================================================================
state     intent_ns   id     meaning
========= =========== ====== =====================================================================
none      0           empty  the store has no upload of the draft
intended  set         empty  it was requested, and may exist: the response is not there, or was lost
open      set         set    the store has it, and its parts
over      set         empty  it became the object, or was aborted as the version of another writer supersedes it
========= =========== ====== =====================================================================

What always holds:

* (*one upload*) at most one request to begin the upload is in progress, and none is sent while it is open;
* (*journaled intent*) the synced journal record names the intent before the request is sent;
* (*shared attempt*) tasks that wait while one of them begins the upload share its result, also the error that the store
  is unavailable: otherwise a `close()` would wait for a retry timeout after another, one for each part.

Trio tasks only; `Draft` and `publish` call it. After a crash the journal record, or an attribute of the staging file,
names the upload. One whose response was lost has no parts, and is left to `gc`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lakefs_fuse.errors import Unavailable
from lakefs_fuse.staging.draft_record import DraftRecord
from lakefs_fuse.staging.staging_area import StagedFile
from lakefs_fuse.store.protocol import FileSlice, PartRef
from lakefs_fuse.sync.shared_lock import SharedLock
from lakefs_fuse.upload.parts import Parts, PartState
from lakefs_fuse.upload.uploader import Uploader


class MultipartUpload:
    """See the module's head. ``parts`` are those of its draft."""

    def __init__(self, uploader: Uploader, file: StagedFile, parts: Parts) -> None:
        """``file`` has the bytes of the parts that are sent."""
        self._uploader, self._file, self._parts = uploader, file, parts
        self.id = self.key = ""
        self.intent_ns = 0
        self.metadata: dict[str, str] = {}
        """Metadata of the object that it becomes."""
        self.has_failed_part = False
        """Whether a request for a part failed, so that the store may have a part that is not known here."""
        self._beginning = SharedLock()
        self._failures, self._failure = 0, ""
        """Attempts to begin it that found the store unavailable, and the error of the last one."""

    async def begin(self, describe: Callable[[], tuple[str, dict[str, str]]], save: Callable[[], object]) -> str:
        """The id of the upload, which is begun if it is not open. ``describe`` returns the key and the metadata of the
        object that it becomes, and ``save`` journals the draft, synced. Raises LakeError."""
        failures = self._failures
        async with self._beginning:
            if self.id:
                return self.id
            if self._failures > failures:
                raise Unavailable(self._failure)
            self.intent_ns = self._uploader.clock.wall_ns()
            self.key, self.metadata = describe()
            save()
            try:
                self.id = await self._uploader.client.create_multipart(self.key, metadata=self.metadata)
            except Unavailable as error:
                self._failures, self._failure = self._failures + 1, str(error)
                raise
            self._uploader.staging.record_upload(self._file.fd, self.id)
            save()
            return self.id

    def load(self, record: DraftRecord) -> None:
        """Restore what another daemon journaled of it; its parts are loaded apart."""
        self.id, self.key, self.intent_ns = record.upload_id, record.key, record.upload_intent_ns
        self.metadata = record.upload_metadata

    # -- parts, by their index from 0

    @contextmanager
    def sending(self, index: int) -> Iterator[None]:
        """The block sends the part, which is UPLOADING; if it fails, DIRTY."""
        self._parts.transition(index, PartState.UPLOADING)
        try:
            yield
        except BaseException:
            self._parts.transition(index, PartState.DIRTY)
            self.has_failed_part = True
            raise

    async def send(self, index: int, start: int, length: int) -> PartRef:
        """Send staged bytes as a part of the open upload. Raises LakeError."""
        with self._file.held():
            body = FileSlice(self._file.fd, start, length)
            return await self._uploader.client.upload_part(self.key, self.id, index + 1, body)

    async def copy(self, index: int, source: tuple[str, int, str | None], length: int) -> PartRef:
        """Have the store copy a part of the open upload from an object: its key, the offset there, and its ETag; None
        for any version. Raises LakeError."""
        key, offset, etag = source
        return await self._uploader.client.upload_part_copy(
            self.key, self.id, index + 1, key, offset, offset + length, etag=etag
        )

    # -- its end

    async def abort(self) -> None:
        """Abort the upload in the store, if it is open. Raises LakeError."""
        if self.id:
            await self._uploader.client.abort_multipart(self.key, self.id)

    def forget(self, *, is_base: bool = False) -> None:
        """Record that the upload no longer exists in the store: staged parts can be sent again, reading dropped ones
        fails, unless the upload became the draft's base."""
        self.id, self.intent_ns, self.has_failed_part = "", 0, False
        self._parts.forget_upload(is_base=is_base)

    def end(self, *, in_one_piece: bool) -> None:
        """Record that the draft is published: by the upload, or (``in_one_piece``) by a PUT instead of it."""
        self.id = ""
        if in_one_piece:
            self.intent_ns = 0
            self._parts.load(())
