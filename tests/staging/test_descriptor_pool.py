"""Staging files share a bounded number of descriptors."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path

import pytest

from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.errors import FileError
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.staging import segments as segments_module
from lakefs_fuse.staging.segments import Segments, Spot
from lakefs_fuse.staging.staging_area import StagedFile, Staging
from tests.fakes import FakeDisk


def staging_in(directory: Path, files_open_max: int) -> Staging:
    segments = Segments(directory, FakeDisk(descriptors_max=files_open_max))
    return Staging(segments, WorkerThreads(), bytes_max=1 << 30, free_bytes_min=0, metrics=UploadMetrics())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_pool_more_files_than_descriptors_reopens(tmp_path: Path) -> None:
    gc.collect()  # or it closes descriptors of other tests meanwhile
    before, staging = descriptors(), staging_in(tmp_path, 4)
    files = [StagedFile.create(staging, f"draft{index}", "key") for index in range(20)]
    for at in (0, 100_000):
        for index, file in enumerate(files):
            await file.write(at, bytes([index]) * 70_000)
            assert descriptors() <= before + 4
    for index, file in enumerate(files):
        assert await file.read(100_000, 70_000) == bytes([index]) * 70_000
    assert len(staging.descriptors) == 4
    for file in files:
        file.close(unlink=True)
    assert len(staging.descriptors) == 0
    assert descriptors() == before
    assert list(tmp_path.iterdir()) == []


async def test_pool_all_in_use_refuses_with_emfile(tmp_path: Path) -> None:
    staging = staging_in(tmp_path, 2)
    first, second = (StagedFile.create(staging, name, "key") for name in "ab")
    with first.held(), second.held():
        with pytest.raises(FileError) as refused:
            StagedFile.create(staging, "c", "key")
        assert refused.value.errno == errno.EMFILE
        assert staging.state == "ok"
        await first.write(0, b"those that are open go on")
    third = StagedFile.create(staging, "c", "key")
    assert await first.read(0, 5) == b"those"
    for file in (first, second, third):
        file.close(unlink=True)


async def test_pool_files_that_leave_memory_share_the_descriptors(tmp_path: Path) -> None:
    """As small files do whose `fsync` failed."""
    gc.collect()
    before, staging = descriptors(), staging_in(tmp_path, 4)
    files = [StagedFile(staging, f"draft{index}", "key") for index in range(20)]
    for index, file in enumerate(files):
        file.begin_with(bytes([index]) * 100)
        file.keep_on_disk()
        assert descriptors() <= before + 4
    assert len(staging.descriptors) == 4
    for index, file in enumerate(files):
        assert await file.read(0, 100) == bytes([index]) * 100
        file.close(unlink=True)
    assert len(staging.descriptors) == 0
    assert descriptors() == before


def kept(segments: Segments, data: bytes) -> Spot:
    group = segments.group()
    spot = group.spot(len(data))
    group.add(data, b"record")
    group.write()
    group.keep()
    return spot


async def test_segments_many_wanted_keep_few_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments_module, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segments_module, "OPEN_MAX", 3)
    before, segments = descriptors(), Segments(tmp_path, FakeDisk())
    spots = [kept(segments, bytes([index]) * 10) for index in range(9)]
    assert len({spot.segment for spot in spots}) == 9
    assert descriptors() == before + 3
    assert segments.unreferenced() == []
    assert [segments.read(spot, 0, 10) for spot in spots] == [bytes([index]) * 10 for index in range(9)]
    for spot in spots[:7]:
        segments.release(spot)
    assert {path.name for path in tmp_path.iterdir()} == {spot.segment for spot in spots[7:]}
    segments.close()
    assert descriptors() == before
    assert {path.name for path in tmp_path.iterdir()} == {spot.segment for spot in spots[7:]}


async def test_segments_read_of_a_segment_that_was_cut_raises(tmp_path: Path) -> None:
    """A damaged filesystem; zeros in place of the bytes would be stored."""
    segments = Segments(tmp_path, FakeDisk())
    spot = kept(segments, b"0123456789")
    os.truncate(tmp_path / spot.segment, spot.offset + 4)
    with pytest.raises(OSError, match="Input/output error"):
        segments.read(spot, 0, 10)
    assert segments.read(spot, 1, 3) == b"123"
    segments.close()


async def test_pool_file_copied_from_a_segment_and_changed_is_read_from_its_own_file_again(tmp_path: Path) -> None:
    staging = staging_in(tmp_path, 1)
    file = StagedFile(staging, "a", "key", spot=kept(staging.segments, b"segment"))
    await file.write(10, b"fetched")
    other = StagedFile.create(staging, "b", "key")  # which takes its descriptor
    assert len(staging.descriptors) == 1
    assert await file.read(0, 17) == b"segment\0\0\0fetched"
    assert await file.read(0, 17, in_file=True) == b"segment\0\0\0fetched"
    for each in (file, other):
        each.close(unlink=True)
    staging.segments.close()
