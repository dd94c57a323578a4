"""Restores a draft of another daemon from its journal record and its staged bytes. What always holds (*same cut*): a
restored draft has the part layout by which its record is numbered, whatever the mount's layout of new files. With
another one, the pages and parts of the record would mean other bytes of the file.
"""

from __future__ import annotations

import os

import msgspec

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.errors import CacheError
from lakefs_fuse.staging.draft_record import DraftRecord, DraftState
from lakefs_fuse.staging.part_layout import PAGE_BYTES, PartLayout
from lakefs_fuse.staging.staging_area import StagedFile
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_target import Describe, DraftTarget
from lakefs_fuse.upload.uploader import Uploader


def restore_draft(uploader: Uploader, record: DraftRecord, describe: Describe) -> Draft:
    """Restore a draft. Raises StagingFull or CacheError if the staging file is missing or cannot be opened, and
    CacheError if bytes of an acknowledged file are missing at its end, or if this version does not know the record's
    part layout. A damaged record may raise any other exception. After each of them nothing has changed."""
    layout = _layout_of(record, uploader.layout.variants())
    base = None
    if record.base is not None:
        there = record.base
        base = Extent(Version(there.key, there.etag, there.object_bytes), there.offset, there.size)
    target = DraftTarget(
        record.key,
        describe,
        replaces=record.replaces,
        copied_from=record.copied_from,
        if_absent=record.if_absent,
        path=record.path,
    )
    staging, staged_bytes = uploader.staging, 0
    try:
        if (spot := record.spot) is not None:
            staging.segments.restore(spot)
            staging.path(record.id).unlink(missing_ok=True)  # a copy, perhaps half of one
            file = StagedFile(staging, record.id, record.key, spot=spot)
        else:
            staged_bytes = os.stat(staging.path(record.id)).st_size
            file = StagedFile(staging, record.id, record.key, has_file=True)
    except FileNotFoundError as error:
        raise CacheError(f"the staged bytes of {record.key} are missing on this node") from error
    except OSError as error:
        raise staging.translate(error) from error
    draft = Draft(uploader, record.id, target, base=base, file=file, layout=layout)
    if record.state is DraftState.PUBLISHED:  # which was not recorded: the next attempt asks the store
        record = msgspec.structs.replace(record, state=DraftState.PUBLISHING)
    try:
        draft.load(record, staged_bytes)
        if record.sequence and record.spot is None:
            _check_end(draft, staged_bytes)
    except Exception:
        draft.close(unlink=False, leave=True)
        raise
    return draft


def _check_end(draft: Draft, staged_bytes: int) -> None:
    """Check that the staging file of an acknowledged draft reaches its last staged page: one that was cut off later,
    by damage, would be read as zeros. Raises CacheError. The file may end inside that page, because a draft is extended
    without writing to it."""
    last = draft.pages.last()
    if last is not None and staged_bytes <= last:
        path = draft.uploader.staging.path(draft.id)
        raise CacheError(
            f"{path} is damaged: it ends after {staged_bytes} bytes, before byte {last} of {draft.target.key}"
        )


def _layout_of(record: DraftRecord, variants: list[PartLayout]) -> PartLayout:
    """The layout, of ``variants`` (the mount's first), that the record is numbered by. A record of an older version
    lacks it; then it is a layout in which all parts fit and, if possible, the last of them is the file's last."""
    if record.part_bytes_max:
        for layout in variants:
            if layout.part_bytes_max == record.part_bytes_max:
                return layout
        raise CacheError(
            f"{record.key} was written in parts of up to {record.part_bytes_max} bytes, which this version does not "
            "know: mount with the version that wrote it until it is stored"
        )
    lengths = [(part.index, part.length) for part in record.parts]
    lengths += [(part.index, part.length) for part in record.spills]
    lengths += [(index, len(pages) * 8 * PAGE_BYTES) for index, pages in record.pages.items()]
    last = max((index for index, _ in lengths), default=-1)
    fitting = [layout for layout in variants if _has_room(layout, lengths)] or variants
    ending = [layout for layout in fitting if last == layout.count(record.size) - 1]
    return (ending or fitting)[0]


def _has_room(layout: PartLayout, lengths: list[tuple[int, int]]) -> bool:
    """The layout's parts are at least as long as ``lengths`` say: index, bytes."""
    for index, length in lengths:
        start, end = layout.range(index)
        if length > end - start:
            return False
    return True
