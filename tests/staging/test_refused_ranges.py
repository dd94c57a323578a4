"""Writes that were refused: which ranges are missing, and that nothing is published while some are."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from lakefs_fuse.environment.local_disk import pwrite_all
from lakefs_fuse.errors import CacheError, FileError, LakeError, StagingFull
from lakefs_fuse.staging import staging_area
from lakefs_fuse.staging.draft_record import DraftState, decode, encode
from lakefs_fuse.staging.refused_ranges import RANGES_MAX, RefusedRanges
from tests.upload.drafting import PART, bench, noise

PAGE = 4096


def fail_writes(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> Callable[[], None]:
    """Every write to a staging file fails, until what is returned is called."""

    def fails(fd: int, data: bytes, offset: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(staging_area, "pwrite_all", fails)
    return lambda: monkeypatch.setattr(staging_area, "pwrite_all", pwrite_all)


def test_refusals_random_changes_match_a_set_of_bytes() -> None:
    rng, refused, expected = random.Random(4), RefusedRanges(), set[int]()
    for _ in range(2000):
        start = rng.randrange(200)
        end = start + rng.randrange(1, 30)
        match rng.randrange(5):
            case 0 | 1:
                refused.add(start, end, StagingFull("full"))
                expected |= set(range(start, end))
            case 2 | 3:
                refused.remove(start, end)
                expected -= set(range(start, end))
            case _:
                refused.cut(start + 100)
                expected = {at for at in expected if at < start + 100}
        covered = [at for begin, upto in refused.ranges for at in range(begin, upto)]
        assert sorted(expected) == covered
        assert bool(refused) == bool(expected)
        assert refused.bytes_missing == len(expected)


def test_refusals_too_many_ranges_join_the_nearest() -> None:
    refused = RefusedRanges()
    for index in range(RANGES_MAX):
        refused.add(index * 100, index * 100 + 10, StagingFull("full"))
    refused.add(55, 60, StagingFull("full"))
    assert len(refused.ranges) == RANGES_MAX
    assert (0, 10) in refused.ranges
    assert (55, 60) not in refused.ranges
    assert any(start <= 55 and end >= 60 for start, end in refused.ranges)


def test_refusals_moved_keep_the_first_error() -> None:
    one, other = RefusedRanges(), RefusedRanges()
    one.add(0, 10, FileError(errno.EACCES, "no"))
    one.add(20, 30, StagingFull("full"))
    one.move_to(other)
    assert not one
    with pytest.raises(FileError, match="bytes 0 to 10, 20 to 30 were refused") as raised:
        other.check("f")
    assert raised.value.errno == errno.EACCES


@pytest.mark.parametrize("how", ["rewritten", "truncated"])
async def test_publish_after_a_refused_write_raises_until_its_range_is_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    data = noise(1, 3 * PART)
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, data[: 2 * PART])
        undo = fail_writes(monkeypatch, errno.EIO)
        with pytest.raises(CacheError):
            await draft.write(2 * PART, data[2 * PART :])
        undo()
        assert decode(encode(b.synced[draft.id])).refused == [(2 * PART, 3 * PART)]
        for _ in range(2):
            with pytest.raises(FileError) as raised:
                await b.publish(draft)
            assert raised.value.errno == errno.EIO
        assert draft.state is DraftState.WRITING
        assert b.store.objects == {}
        if how == "rewritten":
            await draft.write(2 * PART, data[2 * PART : 2 * PART + PAGE])
            with pytest.raises(FileError):
                await b.publish(draft)
            await draft.write(2 * PART + PAGE, data[2 * PART + PAGE :])
        else:
            await draft.truncate(PART)
            await draft.write(PART, data[PART : 2 * PART])
        assert b.synced[draft.id].refused == []
        await b.publish(draft)
        assert b.store.data("file") == (data if how == "rewritten" else data[: 2 * PART])
        draft.close(unlink=True)


async def test_refused_direct_write_is_not_forgiven_by_the_kernels_truncate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the size that the file has; a user's own, later, counts."""
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, noise(1, PART))
        undo = fail_writes(monkeypatch)
        with pytest.raises(StagingFull):
            await draft.write(PART, noise(2, PAGE))
        undo()
        await draft.truncate(PART)
        with pytest.raises(FileError):
            await b.publish(draft)
        await draft.truncate(PART)
        await b.publish(draft)
        draft.close(unlink=True)


async def test_refused_write_with_no_room_for_a_record_marks_the_staging_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, noise(1, PART))
        save, full = b.uploader.save, True

        def saves(draft_id: str, record: bytes, sync: bool) -> None:
            if full:
                raise CacheError("the disk is full")
            save(draft_id, record, sync)

        object.__setattr__(b.uploader, "save", saves)
        undo = fail_writes(monkeypatch)
        with pytest.raises(StagingFull):
            await draft.write(PART, noise(2, PAGE))
        undo()
        assert b.staging.is_incomplete(draft.id)
        await draft.write(PART, noise(2, PAGE))
        assert b.staging.is_incomplete(draft.id)  # the journal has not heard that it is complete again
        full = False
        with pytest.raises(LakeError):
            draft.refuse(0, PAGE, StagingFull("full"))
            draft.refused.check("file")
        await draft.write(0, noise(1, PAGE))
        assert not b.staging.is_incomplete(draft.id)
        await b.publish(draft)
        draft.close(unlink=True)


async def test_refused_write_after_a_failed_publish_gets_another_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What that attempt may have made visible is not what is staged now."""
    async with bench(tmp_path) as b:
        draft = b.draft()
        await draft.write(0, noise(1, PAGE))

        def fails(request: object, when: str) -> None:
            raise LakeError("no")

        b.store.hook = fails
        with pytest.raises(LakeError):
            await b.publish(draft)
        b.store.hook = lambda _request, _when: None
        before = draft.token
        undo = fail_writes(monkeypatch)
        with pytest.raises(StagingFull):
            await draft.write(PAGE, b"x" * PAGE)
        undo()
        assert draft.token != before
        assert b.synced[draft.id].token == draft.token
        draft.close(unlink=True)
