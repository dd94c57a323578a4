"""A draft brought back from what another daemon left: its journal record and its staging file.

A file that was still being written counts as long as its staging file is, if it had no base to mix with; its parts are
sent again where their bytes are staged, because they may have been written to since the record was saved.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.environment.local_disk import data_runs
from lakefs_fuse.errors import CacheError
from lakefs_fuse.staging.draft_record import DraftRecord, DraftState
from lakefs_fuse.staging.refused_ranges import Refusals
from lakefs_fuse.staging.segments import Spot
from lakefs_fuse.staging.staged_file import StagedFile
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_services import DraftServices, DraftTarget
from lakefs_fuse.upload.part_state import Part, PartState


def restored(services: DraftServices, record: DraftRecord, describe: Callable[[bool], Mapping[str, str]]) -> Draft:
    """Raises StagingFull or CacheError where the staging file is gone or cannot be opened."""
    base = None
    if record.base is not None:
        there = record.base
        base = Extent(Version(there.key, there.etag, there.object_bytes), there.offset, there.size)
    target = DraftTarget(record.key, describe, replaces=record.replaces, path=record.path)
    target.copied_from = record.copied_from
    spot = Spot(record.segment, record.segment_offset, record.segment_bytes) if record.segment else None
    staged_bytes = 0
    try:
        if spot is not None:
            services.staging.path(record.id).unlink(missing_ok=True)  # a copy, perhaps half of one
            services.staging.segments.restore(spot)
            file = StagedFile(services.staging, record.id, record.key, spot=spot)
        else:
            staged_bytes = os.stat(services.staging.path(record.id)).st_size
            file = StagedFile(services.staging, record.id, record.key, has_file=True)
    except FileNotFoundError as error:
        raise CacheError(f"the staged bytes of {record.key} are gone from this node: abort {record.id}") from error
    except OSError as error:
        raise services.staging.translate(error) from error
    draft = Draft(services, record.id, target, base=base, file=file)
    draft.state, draft.created_ns = record.state, record.created_ns
    draft.size, draft.base_limit = record.size, record.base_limit
    draft.upload_id, draft.upload_intent_ns = record.upload_id, record.upload_intent_ns
    draft.upload_metadata = record.upload_metadata
    draft.token, draft.changes, draft.recheck = record.token, record.changes, True
    draft.accepted, draft.began, draft.commit = record.accepted, record.began, record.commit
    draft.stands_for = record.stands_for
    draft.refused = Refusals(record.refused, record.refused_errno, record.refused_why)
    draft.pages.load(record.pages)
    draft.spills.load(record.spills, record.spilled)
    writing = record.state is DraftState.WRITING
    for part in record.parts:
        if not part.staged or not writing:
            state = PartState.CLEAN if part.staged else PartState.DROPPED
            draft.parts[part.index] = Part(state, etag=part.etag, length=part.length)
    if writing and base is None:
        draft.size = max(draft.size, staged_bytes)
        dropped = {index for index, part in draft.parts.items() if part.state is PartState.DROPPED}
        for index in range(services.layout.count(draft.size)):
            if index not in dropped:
                start, end = services.layout.range(index)
                spilled = index in draft.spills.objects
                for begin, upto in data_runs(draft.fd, start, min(end, draft.size)) if spilled else [(start, end)]:
                    draft.pages.mark(begin, min(upto, draft.size))
    return draft
