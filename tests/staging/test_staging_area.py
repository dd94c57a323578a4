"""Room for staged bytes: bounded, waited for, and refused only where none can come."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.errors import CacheError, StagingFull
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.staging.segments import Segments
from lakefs_fuse.staging.staging_area import IN_FLIGHT_BYTES, KEY_XATTR, UPLOAD_XATTR, Staging
from tests.fakes import FakeDisk


class Stager:
    """Lets go of ``droppable`` bytes, of ``recent`` ones only when pressed; ``making_room`` as told."""

    def __init__(self, staging: Staging, droppable: int = 0, recent: int = 0, making_room: bool = False) -> None:
        self._staging = staging
        self.droppable, self.recent, self.making_room = droppable, recent, making_room

    def drop_uploaded(self, *, keep_recent: bool) -> int:
        dropped, self.droppable = self.droppable, 0
        if not keep_recent:
            dropped, self.recent = dropped + self.recent, 0
        self._staging.release(dropped)
        return dropped

    async def spill(self) -> int:
        return 0


def make(directory: Path, bytes_max: int = 1000, free: int = 1 << 40, **more: object) -> Staging:
    return Staging(
        Segments(directory, FakeDisk(room=free)), WorkerThreads(), bytes_max=bytes_max, free_bytes_min=100,
        metrics=UploadMetrics(), **more,  # type: ignore[arg-type]
    )  # fmt: skip


async def test_room_is_bounded(tmp_path: Path) -> None:
    staging = make(tmp_path)
    await staging.reserve(600)
    await staging.reserve(400)
    assert staging.bytes_used == 1000
    with pytest.raises(StagingFull) as caught:
        await staging.reserve(1)
    assert caught.value.errno == errno.ENOSPC
    assert staging.bytes_used == 1000
    staging.release(1)
    await staging.reserve(1)


async def test_uploaded_bytes_go_first(tmp_path: Path) -> None:
    staging = make(tmp_path)
    stager = Stager(staging, droppable=300, recent=300)
    staging.register(stager)
    await staging.reserve(1000)
    await staging.reserve(300)
    assert (stager.droppable, stager.recent) == (0, 300)
    await staging.reserve(200)
    assert stager.recent == 0
    assert staging.bytes_used == 900
    staging.unregister(stager)


async def test_a_writer_waits_while_uploads_make_room(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    staging = make(tmp_path)
    stager = Stager(staging, making_room=True, recent=1000)
    staging.register(stager)
    await staging.reserve(1000)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(staging.reserve, 500)
        await trio.sleep(60)
        assert staging.bytes_used == 1000
        stager.droppable = 500
        staging.notify()
        await trio.testing.wait_all_tasks_blocked()
    assert staging.bytes_used == 1000
    assert stager.recent == 1000


async def test_a_writer_that_waits_in_vain_is_told(tmp_path: Path, autojump_clock: trio.testing.MockClock) -> None:
    staging = make(tmp_path)
    stager = Stager(staging, making_room=True)
    staging.register(stager)
    await staging.reserve(1000)

    async def give_up() -> None:
        await trio.sleep(5)
        stager.making_room = False

    async with trio.open_nursery() as nursery:
        nursery.start_soon(give_up)
        with pytest.raises(StagingFull):
            await staging.reserve(500)
    assert staging.bytes_used == 1000


async def test_reserve_takes_room_that_a_file_leaves_while_spilling_it_fails(tmp_path: Path) -> None:
    class Ending(Stager):
        async def spill(self) -> int:
            staging.unregister(self, 1000)
            return 0

    staging = make(tmp_path)
    await staging.reserve(1000)
    staging.register(Ending(staging))
    await staging.reserve(500)
    assert staging.bytes_used == 500


async def test_many_at_once_stay_within_the_bound(tmp_path: Path) -> None:
    room = iter([0] * 5)

    class SlowlyFreedDisk(FakeDisk):
        def free_bytes(self, path: str | os.PathLike[str]) -> int:
            return next(room, 1 << 40)  # the first of them have to wait for the disk, in a thread

    staging = Staging(
        Segments(tmp_path, SlowlyFreedDisk()), WorkerThreads(), bytes_max=1000, free_bytes_min=100,
        metrics=UploadMetrics(), evict=lambda _: None,
    )  # fmt: skip
    refused = 0

    async def reserve() -> None:
        nonlocal refused
        try:
            await staging.reserve(400)
        except StagingFull:
            refused += 1
        assert staging.bytes_used <= staging.bytes_max

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(reserve)
    assert staging.bytes_used == 800
    assert refused == 3


async def test_the_cache_makes_room_on_the_disk(tmp_path: Path) -> None:
    disk = FakeDisk(room=50)
    asked: list[int] = []

    def evict(short: int) -> None:
        asked.append(short)
        disk.room = 50 + short

    staging = Staging(
        Segments(tmp_path, disk),
        WorkerThreads(),
        bytes_max=1 << 30,
        free_bytes_min=100,
        metrics=UploadMetrics(),
        evict=evict,
    )
    await staging.reserve(10)
    assert asked == [100 + IN_FLIGHT_BYTES + 10 - 50]
    assert staging.bytes_used == 10


async def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    staging = make(tmp_path, free=100)
    with pytest.raises(StagingFull):
        await staging.reserve(1)
    assert staging.bytes_used == 0


async def test_files_tell_what_they_are(tmp_path: Path) -> None:
    staging = make(tmp_path)
    fd = staging.create("id", "dir/é")
    staging.record_upload(fd, "upload-1")
    os.close(fd)
    assert os.getxattr(tmp_path / "id", KEY_XATTR).decode() == "dir/é"
    assert os.getxattr(tmp_path / "id", UPLOAD_XATTR) == b"upload-1"
    assert (tmp_path / "id").stat().st_mode & 0o777 == 0o600
    with pytest.raises(CacheError):
        staging.create("id", "dir/é")


async def test_full_disk_is_named_with_what_to_free(tmp_path: Path) -> None:
    """Raising --staging-size, which helps where the bound is reached, would not."""
    room = IN_FLIGHT_BYTES + 100 + 5
    staging = make(tmp_path, free=room)
    with pytest.raises(StagingFull, match=f"the disk of {tmp_path} is full: free 15 bytes there"):
        await staging.reserve(20)
    assert staging.disk_room() == (room, IN_FLIGHT_BYTES + 100)
    with pytest.raises(StagingFull, match="raise --staging-size"):
        await staging.reserve(2000)


async def test_what_it_says_of_itself(tmp_path: Path) -> None:
    """The state of the last attempt, whoever made it."""
    staging = make(tmp_path)
    assert staging.state.name == "OK"
    await staging.reserve(1000)
    with pytest.raises(StagingFull):
        await staging.reserve(1)
    assert staging.state.name == "FULL"
    staging.release(1)
    await staging.reserve(1)
    assert staging.state.name == "OK"
    staging.release(1000)
    staging.translate(OSError(errno.EIO, "broken"))
    assert staging.state.name == "FAILED"
    await staging.reserve(1)
    assert staging.state.name == "OK"


async def test_a_disk_that_cannot_even_be_asked(tmp_path: Path) -> None:
    staging = Staging(
        Segments(tmp_path / "gone", FakeDisk()),
        WorkerThreads(),
        bytes_max=1000,
        free_bytes_min=0,
        metrics=UploadMetrics(),
    )
    with pytest.raises(CacheError, match="the staging disk fails"):
        await staging.reserve(1)
    assert staging.state.name == "FAILED"
    assert staging.bytes_used == 0


def test_errors_of_the_disk(tmp_path: Path) -> None:
    staging = make(tmp_path)
    assert isinstance(staging.translate(OSError(errno.ENOSPC, "full")), StagingFull)
    assert isinstance(staging.translate(OSError(errno.EDQUOT, "quota")), StagingFull)
    assert isinstance(staging.translate(OSError(errno.EIO, "broken")), CacheError)
