"""What a draft is at this moment, as its journal record tells it. Trio thread only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lakefs_fuse.staging.draft_record import BaseExtent, DraftRecord, DraftState, UploadedPart
from lakefs_fuse.staging.segments import Spot
from lakefs_fuse.upload.part_state import PartState

if TYPE_CHECKING:
    from lakefs_fuse.upload.draft import Draft


def record_of(draft: Draft, *, accepted: int = 0, spot: Spot | None = None) -> DraftRecord:
    """What it is; with a number in ``accepted``, what it will be once it is accepted under that, with its bytes in a
    segment where ``spot`` says so."""
    target, spot = draft.target, spot or draft.file.spot
    return DraftRecord(
        id=draft.id,
        key=target.key,
        state=DraftState.ACCEPTED if accepted else draft.state,
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
        accepted=accepted or draft.accepted,
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
        spilled=draft.spills.used,
        spills=draft.spills.dump() if draft.spills.used else [],
        refused=list(draft.refused.ranges),
        refused_errno=draft.refused.errno,
        refused_why=draft.refused.why,
    )


def _base_extent(draft: Draft) -> BaseExtent | None:
    base = draft.base
    if base is None:
        return None
    return BaseExtent(base.version.key, base.version.etag, base.version.size, base.offset, base.size)
