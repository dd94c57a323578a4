"""The journal record of a file being written: enough to finish or abort it after a crash."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

import msgspec

from lakefs_fuse.staging.segments import Spot


class DraftState(StrEnum):
    """Life of a draft, with `TRANSITIONS` as its table. An acknowledged draft has a sequence number and is never
    written to again: a later write to its file begins another draft. ACKNOWLEDGED is spelled ``accepted`` on disk, in
    ``stats`` and in the failpoints ``accept.*``.

    ============ ==============================================================================================
    state        a crash here leaves
    ============ ==============================================================================================
    writing      staged bytes, perhaps an unfinished upload, nothing visible in the store; listed as an orphan
    acknowledged the same, synced and promised to the writer: the next mount goes on with it
    publishing   the same, or the published object, whose metadata names the draft
    failed       staged bytes, of which the writer knows that they are not durable, or (acknowledged) which the next
                 mount tries again
    published    the object; the record goes with the row that names its version, then the staging file, which was
                 marked as ended before. Where that could not be recorded, the next attempt records it; after a crash
                 or an unmount it is restored as publishing
    discarded    at most a staging file and an unfinished upload; listed as an orphan
    ============ ==============================================================================================
    """

    WRITING = "writing"
    ACKNOWLEDGED = "accepted"
    PUBLISHING = "publishing"
    FAILED = "failed"
    PUBLISHED = "published"
    DISCARDED = "discarded"

    @property
    def is_ending(self) -> bool:
        """Whether the draft is closed next, which releases its staged bytes."""
        return self in (DraftState.PUBLISHING, DraftState.PUBLISHED, DraftState.DISCARDED)

    @property
    def sends_early(self) -> bool:
        """Whether complete parts are sent in the background, before the draft is published."""
        return self in (DraftState.WRITING, DraftState.ACKNOWLEDGED)


TRANSITIONS = {
    DraftState.WRITING: {DraftState.ACKNOWLEDGED, DraftState.PUBLISHING, DraftState.FAILED, DraftState.DISCARDED},
    DraftState.ACKNOWLEDGED: {DraftState.PUBLISHING, DraftState.FAILED, DraftState.DISCARDED},
    # To itself: the daemon died, and the next one continues.
    DraftState.PUBLISHING: {*DraftState} - {DraftState.WRITING, DraftState.ACKNOWLEDGED},
    # To itself: the store could not be asked for the result of the previous attempt.
    DraftState.FAILED: {*DraftState} - {DraftState.PUBLISHED},
    # The daemon died before it deleted the record, and the next one deletes the rest on the node.
    DraftState.PUBLISHED: {DraftState.DISCARDED},
    # To itself: the store could not be asked to abort its upload, and is asked again.
    DraftState.DISCARDED: {DraftState.DISCARDED},
}
"""The allowed transitions from each state, asserted by `Draft`."""


class UploadedPart(msgspec.Struct, frozen=True, array_like=True):
    """A part in the store: index from 0, ETag, length in bytes, and whether its bytes are still staged."""

    index: int
    etag: str
    length: int
    staged: bool


class SpilledPart(msgspec.Struct, frozen=True, array_like=True):
    """A hidden object with pages of a part: index from 0, key, ETag, length in bytes. If some of its pages are still
    used, ``pages`` lists them, as `PageMap.dump`."""

    index: int
    key: str
    etag: str
    length: int
    any: bool = False
    pages: bytes = b""


class BaseExtent(msgspec.Struct, frozen=True, array_like=True):
    """The version that a draft was opened on: ``size`` bytes from ``offset`` of an object of ``object_bytes``."""

    key: str
    etag: str
    object_bytes: int
    offset: int
    size: int


class DraftRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One journal record. Sizes in bytes, times in ns since 1970."""

    id: str
    key: str
    state: DraftState
    created_ns: int
    size: int
    path: str = ""
    """Where the file is in the lake; empty where that is ``key``."""
    base: BaseExtent | None = None
    """The version that pages not staged come from."""
    base_limit: int = 0
    """Bytes of the base that are still used: the draft was truncated to that many."""
    replaces: str = ""
    """ETag the key had when the draft began; empty where it had no object."""
    copied_from: str = ""
    """Key of an object elsewhere that contained the bytes of the name. A relocation may have copied it to ``key``."""
    if_absent: bool = False
    """It was created with O_EXCL: it replaces no other client's file."""
    upload_id: str = ""
    upload_intent_ns: int = 0
    """Time when an upload was requested; it may exist even if the response with ``upload_id`` was lost."""
    upload_metadata: dict[str, str] = {}
    """What the upload began with."""
    changes: int = 0
    token: str = ""
    """The token in the object's metadata after the present bytes were published."""
    unlinked: bool = False
    """The name was deleted while the file was open: its bytes are discarded once it is closed."""
    metadata: dict[str, str] = {}
    metadata_multipart: dict[str, str] = {}
    """The present attributes, as a PUT and as a multipart upload send them."""
    xattrs: dict[str, bytes] = {}
    """Extended attributes of an acknowledged file whose row a read-only mount has removed."""
    sequence: int = msgspec.field(default=0, name="accepted")
    """Its sequence number in the order of acknowledgement; 0 if it was not acknowledged."""
    began: int = 0
    """The newest sequence number when it began: all up to it were acknowledged before."""
    stands_for: int = 0
    """The sequence number of the oldest version that it superseded, for which others wait; 0 if it superseded none."""
    commit: str = ""
    """Key of the newest commit whose PUT was attempted with these bytes."""
    segment: str = ""
    segment_offset: int = 0
    segment_bytes: int = 0
    """The segment of an acknowledged file's staged bytes, if they are not in a separate file."""
    part_bytes_max: int = 0
    """The largest parts of its layout, by which ``parts``, ``pages`` and ``spills`` are numbered; 0 in records of older
    versions, which lack it."""
    parts: list[UploadedPart] = []
    pages: dict[int, bytes] = {}
    error: str = ""
    refused: list[tuple[int, int]] = []
    """Ranges [start, end) whose writes failed: a draft with any is not published."""
    spilled: bool = False
    """Hidden objects of it may be in the store; those that are needed are ``spills``."""
    spills: list[SpilledPart] = []
    refused_errno: int = 0
    refused_why: str = ""

    @property
    def spot(self) -> Spot | None:
        """The place of its bytes, if they are in a segment."""
        return Spot(self.segment, self.segment_offset, self.segment_bytes) if self.segment else None


class RecordOutline(msgspec.Struct, frozen=True):
    """The fields that are read of a record that this version does not understand otherwise."""

    id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
    """It names files, so the value in a damaged record is not trusted."""
    key: str = ""
    path: str = ""
    sequence: int = msgspec.field(default=0, name="accepted")


encode: Callable[[DraftRecord], bytes] = msgspec.msgpack.Encoder().encode
decode: Callable[[bytes], DraftRecord] = msgspec.msgpack.Decoder(DraftRecord).decode
"""Raises msgspec.ValidationError (a ValueError) for a record that is damaged, or of a later version."""
decode_outline: Callable[[bytes], RecordOutline] = msgspec.msgpack.Decoder(RecordOutline).decode
"""Of any version. Raises ValueError for a record that is damaged."""
