"""What the journal keeps of a file being written: enough to finish or abort it after a crash."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class DraftState(StrEnum):
    """Life of a draft. Left to right, but `FAILED` goes back: to `PUBLISHING` with every retry, to
    `WRITING` with every change. A draft that was accepted has a sequence number and is never written to again: who
    writes to its file begins another.

    ========== =========================== ==================================================================
    state      leaves to                   a crash here leaves behind
    ========== =========================== ==================================================================
    writing    accepted, publishing,       staged bytes, perhaps an unfinished upload; the store shows nothing;
               discarded                   listed as orphan
    accepted   publishing, discarded       the same, synced and promised: the next mount goes on with it
    publishing published, failed           the same, or the published object (its metadata names the draft)
    failed     publishing, writing,        staged bytes whose writer was told that they are not durable, or (accepted)
               discarded                   which the next mount tries again
    published  –                           the object; the record goes with the row that names its version, then the
                                           staging file, marked before as one that nobody needs
    discarded  –                           at most a staging file and an unfinished upload, listed as orphan
    ========== =========================== ==================================================================
    """

    WRITING = "writing"
    ACCEPTED = "accepted"
    PUBLISHING = "publishing"
    FAILED = "failed"
    PUBLISHED = "published"
    DISCARDED = "discarded"


TRANSITIONS = {
    DraftState.WRITING: {DraftState.ACCEPTED, DraftState.PUBLISHING, DraftState.FAILED, DraftState.DISCARDED},
    DraftState.ACCEPTED: {DraftState.PUBLISHING, DraftState.FAILED, DraftState.DISCARDED},
    # To itself: the daemon died, and the next one goes on.
    DraftState.PUBLISHING: {*DraftState} - {DraftState.WRITING, DraftState.ACCEPTED},
    # To itself: what became of the attempt before could not be asked.
    DraftState.FAILED: {*DraftState} - {DraftState.PUBLISHED},
    DraftState.PUBLISHED: set[DraftState](),
    # To itself: the store could not be asked to abort its upload, and is asked again.
    DraftState.DISCARDED: {DraftState.DISCARDED},
}
"""Where each state leads. `Draft` asserts it."""


class UploadedPart(msgspec.Struct, frozen=True, array_like=True):
    """A part the store has: index from 0, ETag, length in bytes, and whether its bytes are still staged."""

    index: int
    etag: str
    length: int
    staged: bool


class SpilledPart(msgspec.Struct, frozen=True, array_like=True):
    """A hidden object with pages of a part: index from 0, key, ETag, length in bytes. Where any of its pages count
    still, ``pages`` says which, as `PageMap.dump`."""

    index: int
    key: str
    etag: str
    length: int
    any: bool = False
    pages: bytes = b""


class BaseExtent(msgspec.Struct, frozen=True, array_like=True):
    """What a draft was opened on: ``size`` bytes from ``offset`` of an object of ``object_bytes``."""

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
    """Bytes of the base that still count: it was truncated to so many."""
    replaces: str = ""
    """ETag the key had when the draft began; empty where it had no object."""
    copied_from: str = ""
    """Key of an object elsewhere that the name had its bytes in. A relocation may have copied it to ``key``."""
    upload_id: str = ""
    upload_intent_ns: int = 0
    """An upload was asked for at this time; it may exist even where ``upload_id`` was never learnt."""
    upload_metadata: dict[str, str] = {}
    """What the upload began with."""
    changes: int = 0
    token: str = ""
    """What the object's metadata says once the bytes, as they are now, were published."""
    unlinked: bool = False
    """The name was deleted while the file was open: nobody wants these bytes once it is closed."""
    metadata: dict[str, str] = {}
    metadata_multipart: dict[str, str] = {}
    """Attributes as of now, as a single request tells them and as an upload does."""
    accepted: int = 0
    """Its place in the order of what write-back accepted; 0 where nobody was told that it is safe."""
    began: int = 0
    """The newest number given out when it began: so much was accepted before it."""
    stands_for: int = 0
    """Its place among what others wait for: that of the oldest version that it superseded; 0 where that is its own."""
    commit: str = ""
    """Key of the newest commit that was to be sent with these bytes."""
    segment: str = ""
    segment_offset: int = 0
    segment_bytes: int = 0
    """Where an accepted file's staged bytes are, if not in a file of their own."""
    parts: list[UploadedPart] = []
    pages: dict[int, bytes] = {}
    error: str = ""
    refused: list[tuple[int, int]] = []
    """Ranges [start, end) whose writes failed: not to be published as long as there are any."""
    spilled: bool = False
    """Hidden objects of it may be in the store; those that are needed are ``spills``."""
    spills: list[SpilledPart] = []
    refused_errno: int = 0
    refused_why: str = ""


def encode(record: DraftRecord) -> bytes:
    return msgspec.msgpack.encode(record)


def decode(raw: bytes) -> DraftRecord:
    """Raises msgspec.ValidationError (a ValueError) for a record that is damaged."""
    return msgspec.msgpack.decode(raw, type=DraftRecord)
