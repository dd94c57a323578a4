"""Large local files that nobody needs any more: nobody waits for the kernel to give their room back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from lakefs_fuse.environment.disk import CLOSE_IN_THREAD_BYTES_MIN
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.staging import staging_area as staging_module
from lakefs_fuse.staging.segments import SEGMENT_BYTES, Segments
from lakefs_fuse.staging.staging_area import StagedFile, Staging
from tests.fakes import FakeDisk

WAIT_S_MAX = 20.0
LARGE = 2 * CLOSE_IN_THREAD_BYTES_MIN


class SlowDisk(FakeDisk):
    """Whose `close` of a large file lasts until it is told to ``go``, and says in which thread it was."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(room=1 << 40)
        self.go = threading.Event()
        self.threads: list[threading.Thread] = []
        self._os_close = os.close
        monkeypatch.setattr(os, "close", self.slow_close)

    def slow_close(self, fd: int) -> None:
        if os.fstat(fd).st_blocks * 512 >= CLOSE_IN_THREAD_BYTES_MIN:
            self.threads.append(threading.current_thread())
            if threading.current_thread() is not threading.main_thread():
                self.go.wait(WAIT_S_MAX)
        self._os_close(fd)

    def free_bytes(self, path: str | os.PathLike[str]) -> int:
        return 0 if self.is_freeing else super().free_bytes(path)

    def ends(self) -> None:
        """What is under way comes to its end, in other threads than this one."""
        began = self.is_freeing
        assert began
        self.go.set()
        give_up_at = time.monotonic() + WAIT_S_MAX
        while self.is_freeing and time.monotonic() < give_up_at:
            time.sleep(0.001)
        assert not self.is_freeing
        assert self.threads
        assert threading.main_thread() not in self.threads


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowDisk]:
    made = SlowDisk(monkeypatch)
    yield made
    made.go.set()


def staging_in(directory: Path, disk: SlowDisk) -> Staging:
    return Staging(
        Segments(directory, disk), WorkerThreads(), bytes_max=1 << 30, free_bytes_min=100, metrics=UploadMetrics()
    )


def staged(staging: Staging, size: int) -> StagedFile:
    file = StagedFile.create(staging, "draft", "key")
    os.posix_fallocate(file.fd, 0, size)
    return file


async def test_a_staged_file(tmp_path: Path, disk: SlowDisk) -> None:
    staged(staging_in(tmp_path, disk), LARGE).close(unlink=True)
    assert list(tmp_path.iterdir()) == []
    disk.ends()


async def test_a_staged_file_whose_descriptor_was_given_back(tmp_path: Path, disk: SlowDisk) -> None:
    file = staged(staging_in(tmp_path, disk), LARGE)
    disk.go.set()
    file.park()
    assert not disk.is_freeing
    disk.threads.clear()
    disk.go.clear()
    file.close(unlink=True)
    assert file.is_closed
    assert list(tmp_path.iterdir()) == []
    disk.ends()


async def test_a_staged_file_that_somebody_reads(tmp_path: Path, disk: SlowDisk) -> None:
    file = staged(staging_in(tmp_path, disk), LARGE)
    with file.held():
        file.close(unlink=True)
        assert list(tmp_path.iterdir()) == []
        assert not disk.is_freeing
        assert os.pread(file.fd, 3, 0) == b"\0\0\0"
    disk.ends()


async def test_a_staged_file_that_became_cache_is_just_closed(tmp_path: Path, disk: SlowDisk) -> None:
    staged(staging_in(tmp_path, disk), LARGE).close(unlink=False)
    assert disk.threads == [threading.main_thread()]
    assert not disk.is_freeing
    assert (tmp_path / "draft").exists()


async def test_a_small_file_is_closed_at_once(tmp_path: Path, disk: SlowDisk) -> None:
    file = staged(staging_in(tmp_path, disk), 4096)
    fd = file.fd
    file.close(unlink=True)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert not disk.is_freeing


async def test_a_segment(tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    segments = Segments(tmp_path, disk)
    group = segments.group()
    spot = group.spot(SEGMENT_BYTES)
    group.add(bytes(SEGMENT_BYTES), b"record")
    group.write()
    group.keep()
    segments.group()
    segments.release(spot)
    assert [path.name for path in tmp_path.iterdir()] != [spot.segment]
    disk.ends()
    segments.close()


async def test_who_needs_room_waits_for_what_is_about_to_come(
    tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told that the disk is full while a file's room is being given back."""
    monkeypatch.setattr(staging_module, "WAIT_S_MAX", 0.01)
    staging = staging_in(tmp_path, disk)
    staged(staging, LARGE).close(unlink=True)
    with trio.fail_after(WAIT_S_MAX):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(staging.reserve, 500)
            await trio.sleep(0.1)
            assert staging.bytes_used == 0
            disk.go.set()
    assert staging.bytes_used == 500


def test_where_no_thread_can_be_had(tmp_path: Path, disk: SlowDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(fd, 0, LARGE)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    disk.close_removed(fd)
    assert disk.threads == [threading.main_thread()]
    assert not disk.is_freeing
