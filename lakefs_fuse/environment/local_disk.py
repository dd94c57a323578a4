"""What the standard library does not offer of the local filesystem: holes, free space, space really used.

Blocking, without state, callable from any thread. Lengths and offsets are bytes.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator

_KEEP_SIZE = 0x01
_PUNCH_HOLE = 0x02
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""

_SECTOR_BYTES = 512
"""Unit of ``st_blocks``, whatever the filesystem's own block size is (stat(2))."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_CANNOT = (errno.EOPNOTSUPP, errno.ENOSYS, errno.ENODEV)

_libc = ctypes.CDLL(None, use_errno=True)
_fallocate = getattr(_libc, "fallocate64", None) or _libc.fallocate
_fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
_fallocate.restype = ctypes.c_int
_WRITE = 0x02
"""SYNC_FILE_RANGE_WRITE of linux/fs.h."""
_sync_file_range = getattr(_libc, "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]


def punch_hole(fd: int, offset: int, length: int) -> bool:
    """Give the range back to the filesystem; it reads as zeros after, and the file keeps its length.

    False where this filesystem cannot. Raises OSError for everything else (EIO, EBADF, …).
    """
    if length <= 0:
        return True
    while _fallocate(fd, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in _CANNOT:
            return False
        raise OSError(code, os.strerror(code))
    return True


def data_runs(fd: int, start: int, end: int) -> Iterator[tuple[int, int]]:
    """What of [start, end) is no hole. Raises OSError."""
    while start < end:
        try:
            start = os.lseek(fd, start, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return
        if start < end:
            stop = min(end, os.lseek(fd, start, os.SEEK_HOLE))
            yield start, stop
            start = stop


def start_writeout(fd: int, offset: int, length: int) -> None:
    """The kernel begins to write the range to the disk, so that syncing the file later is short. Only a hint: where it
    does not work nothing is lost."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, length, _WRITE)


def is_out_of_room(error: BaseException) -> bool:
    """Whether a write failed because the disk is full, or a quota is; an error of RocksDB says so by its text alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _NO_ROOM
    return any(os.strerror(code) in str(error) for code in _NO_ROOM)


def free_bytes(path: str | int | os.PathLike[str]) -> int:
    """What an ordinary user may still write on the filesystem that holds ``path`` (a path or descriptor)."""
    stat = os.statvfs(path)
    return stat.f_bavail * stat.f_frsize


def allocated_bytes(path: str | int | os.PathLike[str]) -> int:
    """Disk space a file (a path or descriptor) takes up, holes not counted, whatever its length."""
    return os.stat(path).st_blocks * _SECTOR_BYTES


def stat_allocated_bytes(stat: os.stat_result) -> int:
    """`allocated_bytes` of a file that was asked already."""
    return stat.st_blocks * _SECTOR_BYTES


def pread_now(fd: int, length: int, offset: int) -> bytearray:
    """As `os.pread`, of what the kernel has in memory. Raises OSError: BlockingIOError where that is not all of it."""
    data = bytearray(length)
    try:
        found = os.preadv(fd, [data], offset, os.RWF_NOWAIT)
    except OSError as error:
        if error.errno in _CANNOT:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        raise
    if found < length:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return data


def pread_all(fd: int, length: int, offset: int) -> bytes:
    """pread until ``length`` bytes are read or the file ends: less is returned at its true end only. One pread also
    returns less where an error, which the next one reports, lies behind the bytes. Raises OSError."""
    data = os.pread(fd, length, offset)
    while 0 < len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            break
        data += more
    return data


def pwrite_all(fd: int, data: bytes | bytearray | memoryview, offset: int) -> None:
    """pwrite until everything is written. Raises OSError, then an unknown part of the range was written."""
    written = os.pwrite(fd, data, offset)
    if written == len(data):
        return
    rest = memoryview(data)
    while written < len(rest):
        more = os.pwrite(fd, rest[written:], offset + written)
        if more == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += more
