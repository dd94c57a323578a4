"""Drafts that another daemon left, on a mount that cuts new files into other parts: `--staging-size` was changed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.errors import CacheError, CacheFull, StagingFull
from lakefs_fuse.staging.draft_record import DraftRecord, DraftState, SpilledPart, decode, encode
from lakefs_fuse.staging.part_layout import STAGING_PARTS_MIN, PartLayout
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.restore import restore_draft
from tests.upload.drafting import PART, Bench, bench, noise

SPANS = ((PART, 4), (4 * PART, 9996))
LARGE, SMALL = PartLayout(SPANS), PartLayout(SPANS, staging_bytes_max=PART * STAGING_PARTS_MIN)
DATA = noise(1, 4 * PART + 3 * 4 * PART + 1000)
CUTS = pytest.mark.parametrize(("before", "after"), [(LARGE, SMALL), (SMALL, LARGE)], ids=["smaller", "larger"])
VERSIONS = pytest.mark.parametrize("version", ["this version", "the version before"])


def remount(b: Bench, draft: Draft, layout: PartLayout, version: str) -> Draft:
    """The draft as the next daemon restores it, whose staging has another size."""
    record = b.synced[draft.id]
    if version == "the version before":
        fields = msgspec.msgpack.decode(encode(record))
        del fields["part_bytes_max"]
        record = decode(msgspec.msgpack.encode(fields))
    draft.close(unlink=False, leave=True)
    b.uploader.layout = layout
    return restore_draft(b.uploader, record, b.describe)


async def acknowledge(draft: Draft) -> None:
    async with draft.gate:
        draft.acknowledge(1)
        draft.save(sync=True)


@CUTS
@VERSIONS
async def test_acknowledged_file_after_another_staging_size_is_stored_as_written(
    tmp_path: Path, before: PartLayout, after: PartLayout, version: str
) -> None:
    async with bench(tmp_path) as b:
        b.uploader.layout = before
        draft = b.draft()
        draft.deferred = True
        await draft.write(0, DATA)
        await acknowledge(draft)
        again = remount(b, draft, after, version)
        assert bytes(await again.read(0, len(DATA))) == DATA
        await b.publish(again)
        assert b.store.data("file") == DATA
        again.close(unlink=True)


@CUTS
@VERSIONS
async def test_upload_with_dropped_parts_goes_on_after_another_staging_size(
    tmp_path: Path, before: PartLayout, after: PartLayout, version: str
) -> None:
    """Parts that only the upload has are completed as they are."""
    async with bench(tmp_path) as b:
        b.uploader.layout = before
        draft = b.draft()
        await draft.write(0, DATA)
        await b.idle(draft)
        assert draft.drop_uploaded(keep_recent=False)
        await acknowledge(draft)
        sent = len(b.store.parts_sent())
        again = remount(b, draft, after, version)
        await b.publish(again)
        assert b.store.data("file") == DATA
        assert len(b.store.parts_sent()) - sent <= 2  # the first, which is never dropped, and the last
        again.close(unlink=True)


@CUTS
async def test_changed_pages_of_a_base_after_another_staging_size_keep_their_places(
    tmp_path: Path, before: PartLayout, after: PartLayout
) -> None:
    async with bench(tmp_path) as b:
        b.uploader.layout = before
        draft, model = b.draft(base=b.give("file", DATA)), bytearray(DATA)
        for at in (100, 5 * PART, 9 * PART + 7, len(DATA) - 500):
            piece = noise(at, 700)
            await draft.write(at, piece)
            model[at : at + len(piece)] = piece
        await b.idle(draft)
        draft.save(sync=True)
        again = remount(b, draft, after, "this version")
        assert bytes(await again.read(0, len(model))) == model
        await b.publish(again)
        assert b.store.data("file") == model
        again.close(unlink=True)


async def test_a_file_cut_in_a_way_that_is_not_known_is_refused(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, DATA)
        await acknowledge(draft)
        record = msgspec.structs.replace(b.synced[draft.id], part_bytes_max=3 * PART)
        with pytest.raises(CacheError, match="mount with the version that wrote it"):
            restore_draft(b.uploader, record, b.describe)
        draft.close(unlink=True)


async def test_record_that_makes_no_draft_lets_no_writer_wait_for_room(tmp_path: Path) -> None:
    """An acknowledged draft makes room once it is stored, which this never is."""
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, DATA)
        await acknowledge(draft)
        spill = SpilledPart(0, "a key without a number", "etag", 1)
        record = msgspec.structs.replace(b.synced[draft.id], spills=[spill])
        draft.close(unlink=False, leave=True)
        with pytest.raises(ValueError, match="invalid literal"):
            restore_draft(b.uploader, record, b.describe)
        assert not len(b.staging.descriptors)
        assert b.staging.path(draft.id).exists()
        with trio.fail_after(5), pytest.raises(StagingFull):
            await b.staging.reserve(b.staging.bytes_max + 1)


def test_a_record_without_the_size_of_parts_is_read() -> None:
    record = DraftRecord(id="a", key="b", state=DraftState.WRITING, created_ns=0, size=0)
    assert decode(encode(record)).part_bytes_max == 0


def as_after_a_crash(b: Bench, draft: Draft) -> Draft:
    draft.close(unlink=False, leave=True)
    return restore_draft(b.uploader, b.saved[draft.id], b.describe)


async def test_restore_after_truncate_of_a_changed_file_has_no_zeros_nobody_wrote(tmp_path: Path) -> None:
    """The record of the last uploaded part has pages that the truncation took."""
    old, new = noise("old", 10 * PART), noise("new", 4 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft(base=b.give("file", old))
        await draft.write(0, new)
        await b.idle(draft)
        await draft.truncate(PART // 2)
        again = as_after_a_crash(b, draft)
        again.count_staged()
        assert bytes(await again.read(0, 10 * PART)) == new[: PART // 2]
        await b.publish(again)
        assert b.store.data("file") == new[: PART // 2]
        again.close(unlink=True)


async def test_restore_after_truncate_through_dropped_parts_has_zeros_in_their_place(tmp_path: Path) -> None:
    data = noise("new", 8 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data)
        await b.idle(draft)
        assert draft.drop_uploaded(keep_recent=False)
        await draft.truncate(PART)
        await draft.write(3 * PART, b"end")
        again = as_after_a_crash(b, draft)
        again.count_staged()
        assert bytes(await again.read(0, 10 * PART)) == data[:PART] + bytes(2 * PART) + b"end"
        await b.publish(again)
        assert b.store.data("file") == data[:PART] + bytes(2 * PART) + b"end"
        again.close(unlink=True)


@pytest.mark.parametrize("has_base", [True, False])
async def test_truncate_that_cannot_be_journaled_changes_nothing(tmp_path: Path, has_base: bool) -> None:
    data = noise("new", 4 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft(base=b.give("file", noise("old", PART)) if has_base else None)
        await draft.write(0, data)
        await b.idle(draft)
        save = b.uploader.save

        def fail(draft_id: str, record: bytes, sync: bool) -> None:
            raise CacheFull("no room for the journal")

        b.uploader.save = fail
        with pytest.raises(CacheFull):
            await draft.truncate(PART + 10)
        b.uploader.save = save
        assert bytes(await draft.read(0, len(data))) == data
        await b.publish(draft)
        assert b.store.data("file") == data
        draft.close(unlink=True)


async def test_truncate_where_the_journal_names_no_bytes_costs_no_record(tmp_path: Path) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft(base=b.give("file", noise("old", PART)))
        draft.save()
        await draft.write(0, noise("new", PART))
        saves = draft.saves
        await draft.truncate(10)
        assert draft.saves == saves
        draft.close(unlink=True)


async def test_restore_after_parts_were_dropped_reads_and_hashes_no_hole_as_their_bytes(tmp_path: Path) -> None:
    """The record that drops the parts was saved before their staged pages became holes."""
    data = noise("new", 8 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data)
        await b.idle(draft)
        await acknowledge(draft)
        assert draft.drop_uploaded(keep_recent=False)
        again = as_after_a_crash(b, draft)
        again.count_staged()
        assert bytes(await again.read(0, PART)) == data[:PART]
        with pytest.raises(StagingFull):
            await again.read(PART, PART)
        published = await b.publish(again)
        assert b.store.data("file") == data
        assert published.hashes == [0]
        again.close(unlink=True)
