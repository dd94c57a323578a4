"""What a draft is at this moment, as its journal record tells it. Trio thread only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from lakefs_fuse.data.draft_parts import PartState
from lakefs_fuse.data.record import BaseExtent, DraftRecord, DraftState, UploadedPart
from lakefs_fuse.data.segments import Spot

if TYPE_CHECKING:
    from lakefs_fuse.data.draft import Draft


def record_of(draft: Draft) -> DraftRecord:
    target, spot = draft.target, draft.file.spot
    return DraftRecord(
        id=draft.id,
        key=target.key,
        state=draft.state,
        created_ns=draft.created_ns,
        size=draft.size,
        base=_base_extent(draft),
        base_limit=draft.base_limit,
        replaces=target.replaces,
        copied_from=target.copied_from,
        path=target.path,
        upload_id=draft.upload_id,
        upload_intent_ns=draft.upload_intent_ns,
        upload_metadata=draft.upload_metadata,
        changes=draft.changes,
        token=draft.token,
        unlinked=draft.unlinked,
        metadata=dict(target.describe(False)),
        metadata_multipart=dict(target.describe(True)),
        accepted=draft.accepted,
        began=draft.began,
        stands_for=draft.stands_for,
        commit=draft.commit,
        segment=spot.segment if spot else "",
        segment_offset=spot.offset if spot else 0,
        segment_bytes=spot.length if spot else 0,
        parts=[
            UploadedPart(index, part.etag, part.length, part.state is PartState.CLEAN)
            for index, part in sorted(draft.parts.items())
            if part.state in (PartState.CLEAN, PartState.DROPPED)
        ],
        pages=draft.pages.dump(),
        error=str(draft.error) if draft.error else "",
    )


def accepted_record(draft: Draft, number: int, spot: Spot | None) -> DraftRecord:
    """What it will be once it is accepted under a number, with its bytes in a segment where ``spot`` says so."""
    record = msgspec.structs.replace(record_of(draft), state=DraftState.ACCEPTED, accepted=number)
    if spot is None:
        return record
    return msgspec.structs.replace(record, segment=spot.segment, segment_offset=spot.offset, segment_bytes=spot.length)


def _base_extent(draft: Draft) -> BaseExtent | None:
    base = draft.base
    if base is None:
        return None
    return BaseExtent(base.version.key, base.version.etag, base.version.size, base.offset, base.size)
