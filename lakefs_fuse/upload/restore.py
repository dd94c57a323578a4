"""A draft brought back from what another daemon left: its journal record and its staged bytes."""

from __future__ import annotations

import os

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.errors import CacheError
from lakefs_fuse.staging.draft_record import DraftRecord
from lakefs_fuse.staging.segments import Spot
from lakefs_fuse.staging.staging_area import StagedFile
from lakefs_fuse.upload.draft import Describe, Draft, DraftTarget
from lakefs_fuse.upload.uploader import Uploader


def restore_draft(uploader: Uploader, record: DraftRecord, describe: Describe) -> Draft:
    """Raises StagingFull or CacheError where the staging file is gone or cannot be opened."""
    base = None
    if record.base is not None:
        there = record.base
        base = Extent(Version(there.key, there.etag, there.object_bytes), there.offset, there.size)
    target = DraftTarget(
        record.key, describe, replaces=record.replaces, copied_from=record.copied_from, path=record.path
    )
    staging, staged_bytes = uploader.staging, 0
    try:
        if record.segment:
            spot = Spot(record.segment, record.segment_offset, record.segment_bytes)
            staging.path(record.id).unlink(missing_ok=True)  # a copy, perhaps half of one
            staging.segments.restore(spot)
            file = StagedFile(staging, record.id, record.key, spot=spot)
        else:
            staged_bytes = os.stat(staging.path(record.id)).st_size
            file = StagedFile(staging, record.id, record.key, has_file=True)
    except FileNotFoundError as error:
        raise CacheError(f"the staged bytes of {record.key} are gone from this node: abort {record.id}") from error
    except OSError as error:
        raise staging.translate(error) from error
    draft = Draft(uploader, record.id, target, base=base, file=file)
    draft.load(record, staged_bytes)
    return draft
