"""Parts of a multipart upload: their states, and how much of them is in the store only."""

from __future__ import annotations

import pytest

from lakefs_fuse.staging.part_layout import PartLayout
from lakefs_fuse.store.protocol import PartRef
from lakefs_fuse.upload.parts import TRANSITIONS, Part, Parts, PartState
from tests.upload.drafting import PART, SPANS

REF = PartRef(2, "etag", PART)


def parts_in(state: PartState) -> Parts:
    parts = Parts(PartLayout(SPANS))
    parts[1] = Part(state)
    return parts


@pytest.mark.parametrize("state", PartState)
def test_transition_outside_of_the_table_is_refused(state: PartState) -> None:
    for to in PartState:
        parts = parts_in(state)
        if to in TRANSITIONS[state]:
            parts.transition(1, to)
            assert parts[1].state is to
        else:
            with pytest.raises(AssertionError, match="part 1"):
                parts.transition(1, to)


@pytest.mark.parametrize("change", [lambda parts: parts.touch(PART, PART + 1), lambda parts: parts.cut(PART)])
def test_part_changed_while_it_is_uploaded_ends_dirty(change: object) -> None:
    assert callable(change)
    parts = parts_in(PartState.UPLOADING)
    change(parts)
    assert parts[1].state is PartState.STALE
    parts.end_upload(1, REF, PART)
    assert (parts[1].state, parts[1].etag, parts[1].length) == (PartState.DIRTY, "etag", PART)


def test_part_queued_and_written_to_stays_queued() -> None:
    parts = parts_in(PartState.QUEUED)
    assert parts.touch(0, 2 * PART) == range(2)
    assert [parts[0].state, parts[1].state] == [PartState.DIRTY, PartState.QUEUED]
    parts.withdraw(1)
    assert parts[1].state is PartState.DIRTY


def test_bytes_dropped_follows_dropped_parts_over_the_journal() -> None:
    parts = parts_in(PartState.UPLOADING)
    parts.end_upload(1, REF, PART)
    parts.transition(1, PartState.DROPPED)
    again = Parts(PartLayout(SPANS))
    again.load(parts.records())
    assert parts.bytes_dropped == again.bytes_dropped == PART
    assert again.is_dropped(1)
    again.cut(PART)
    assert again.bytes_dropped == 0
    assert again[1].state is PartState.DIRTY


def test_upload_that_is_gone_leaves_dropped_parts_lost_and_others_dirty() -> None:
    parts = parts_in(PartState.DROPPED)
    parts[2] = Part(PartState.CLEAN, "etag", PART)
    parts.forget_upload()
    assert parts[1] == Part(PartState.DROPPED)
    assert parts[2] == Part(PartState.DIRTY, "", PART)
