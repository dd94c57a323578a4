import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakefs_fuse.environment import local_disk as disk
from tests.blockcache.reading import reads_now
from tests.temporary_files import directory_on_disk

KIB = 1024


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On a disk."""
    with directory_on_disk() as directory:
        yield directory


def test_a_hole_frees_space_reads_as_zeros_and_keeps_the_length(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 256 * KIB)
    with path.open("r+b") as file:
        before = disk.allocated_bytes(file.fileno())
        assert disk.punch_hole(file.fileno(), 64 * KIB, 128 * KIB)
        assert before - disk.allocated_bytes(path) == 128 * KIB
    assert path.read_bytes() == b"x" * 64 * KIB + bytes(128 * KIB) + b"x" * 64 * KIB


def test_what_is_in_memory_is_read_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads_now(tmp_path)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 256 * KIB)
    preadv = os.preadv

    def half(fd: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        assert flags == os.RWF_NOWAIT
        return preadv(fd, [memoryview(buffers[0])[: len(buffers[0]) // 2]], offset, flags)

    with path.open("rb") as file:
        assert disk.pread_now(file.fileno(), 5 * KIB, 100) == b"x" * 5 * KIB
        with pytest.raises(BlockingIOError):
            disk.pread_now(file.fileno(), 5 * KIB, 255 * KIB)
        monkeypatch.setattr(os, "preadv", half)
        with pytest.raises(BlockingIOError):
            disk.pread_now(file.fileno(), 5 * KIB, 100)


def test_where_nothing_can_be_read_now_that_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "preadv", refuse)
    with open(__file__, "rb") as file, pytest.raises(BlockingIOError):
        disk.pread_now(file.fileno(), 10, 0)


def test_a_hole_of_no_length_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x")
    with path.open("r+b") as file:
        assert disk.punch_hole(file.fileno(), 0, 0)
    assert path.read_bytes() == b"x"


def test_filesystems_without_holes_are_told_apart_from_errors() -> None:
    # A pipe has no extents: ESPIPE is an error, not "cannot".
    reading, writing = os.pipe()
    try:
        with pytest.raises(OSError, match="seek"):
            disk.punch_hole(writing, 0, 4096)
    finally:
        os.close(reading)
        os.close(writing)
    with pytest.raises(OSError, match="Bad file descriptor"):
        disk.punch_hole(writing, 0, 4096)


def test_punch_hole_where_the_kernel_says_unsupported_is_false() -> None:
    with open("/proc/self/comm", "r+b", buffering=0) as file:
        assert not disk.punch_hole(file.fileno(), 0, 4096)


def test_free_bytes_is_what_df_says(tmp_path: Path) -> None:
    stat = os.statvfs(tmp_path)
    assert abs(disk.free_bytes(str(tmp_path)) - stat.f_bavail * stat.f_frsize) < 1 << 30


def test_pwrite_all_goes_on_after_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:3], at))
    with (tmp_path / "file").open("w+b") as file:
        disk.pwrite_all(file.fileno(), b"0123456789", 2)
    assert (tmp_path / "file").read_bytes() == b"\0\0" + b"0123456789"


def test_pread_all_goes_on_after_short_reads_and_reports_the_error_behind_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pread = tmp_path / "data", os.pread
    path.write_bytes(b"0123456789")
    broken_at = 100

    def short(fd: int, length: int, offset: int) -> bytes:
        if offset >= broken_at:
            raise OSError(errno.EIO, "a bad sector")
        return pread(fd, min(length, 3, broken_at - offset), offset)

    monkeypatch.setattr(os, "pread", short)
    with open(path, "rb") as file:
        assert disk.pread_all(file.fileno(), 8, 1) == b"12345678"
        assert disk.pread_all(file.fileno(), 20, 6) == b"6789"  # the end of the file
        assert disk.pread_all(file.fileno(), 20, 50) == b""
        broken_at = 5
        with pytest.raises(OSError, match="bad sector"):
            disk.pread_all(file.fileno(), 8, 1)
