"""The staging area: local disk space for bytes that are not in the store yet, and the files that hold them.

What always holds:

* (*bounded staging*) writers never stage more than ``bytes_max``, and the disk keeps ``free_bytes_min`` free; a writer
  without space waits for uploads and for ends of drafts to free some, and gets `StagingFull` only if none is in
  progress;
* (*bounded descriptors*) staging files hold at most as many descriptors as `DescriptorPool` allows;
* (*stable descriptors*) a descriptor stays open until the last `StagedFile.held` block ends, because afterwards its
  number may be another file's.

Files are in one directory under their draft's id; small acknowledged ones share segments. Extended attributes name the
key of the bytes, so that a file can be identified if the journal is lost. Ranges that were never written read as zeros.
Used from trio tasks; calls that may block long go to worker threads. A crash leaves the files, and loses bytes in
memory, which were not acknowledged.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import trio

from lakefs_fuse.environment.local_disk import is_out_of_room, pread_all, punch_hole, pwrite_all
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, FileError, LakeError, StagingFull
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.product import RESERVED_XATTR
from lakefs_fuse.staging.segments import Segments, Spot
from lakefs_fuse.store.protocol import Buffer

FREE_AGE_S = 0.05
IN_FLIGHT_BYTES = 16 << 20
KEY_XATTR = f"{RESERVED_XATTR}key"
UPLOAD_XATTR = f"{RESERVED_XATTR}upload"
ENDED_XATTR = f"{RESERVED_XATTR}ended"
"""Mark on a staging file that is no longer needed, set before its journal record is deleted: if the daemon dies before
the file is deleted too, it is not an orphan."""
STAGED_MODE = 0o600
INCOMPLETE_MODE = stat.S_ISVTX
WAIT_S_MAX = 1.0
WRITE_OUTS_MAX = 8
"""Maximum of concurrent reads and writes of all files: each holds a descriptor while it waits for a busy disk."""
MEMORY_BYTES_MAX = 256 << 10
"""Maximum size of a file that is kept in memory until it is acknowledged."""
FILES_IN_MEMORY_MAX = 512
"""Maximum of files in memory; others get a staging file immediately. Thousands of files may be open for writing, with a
few KiB in each."""
THREAD_BYTES_MIN = 64 << 10
"""Reads and writes of this size or more use a worker thread."""
READS_MAX = 4
"""Maximum of concurrent reads of one file; writes, which a busy disk delays, cannot use up their threads."""
NO_FILE = -1
log = logging.getLogger(__name__)


class StagingState(StrEnum):
    """The result of the last attempt to stage bytes, as `stats` shows it."""

    OK = "ok"
    FULL = "full"
    """No room: writers wait, or got ENOSPC."""
    FAILED = "failed"
    """The disk returns errors."""


class Stager(Protocol):
    """The interface of a file being written to staging."""

    @property
    def making_room(self) -> bool:
        """Whether an upload, or the end of a draft, is in progress that will release staged bytes."""

    def drop_uploaded(self, *, keep_recent: bool) -> int:
        """Release bytes that are already in the store, or those not written recently; returns how many."""

    async def spill(self) -> int:
        """Move bytes that cannot be uploaded yet elsewhere, and release them; returns how many."""


class DescriptorPool:
    """The open descriptors of staging files: at most ``open_max``. Beyond that the least recently used one is closed.
    If tasks or threads use all of them, opening another fails with EMFILE.
    """

    def __init__(self, open_max: int) -> None:
        self.open_max = open_max
        self._open: OrderedDict[StagedFile, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def make_room(self) -> None:
        """Make room for one more descriptor. Raises FileError(EMFILE)."""
        if len(self._open) < self.open_max:
            return
        idle = next((file for file in self._open if not file.in_use), None)
        if idle is None:
            raise FileError(
                errno.EMFILE,
                f"{self.open_max} staging files are being read or written now: raise the daemon's limit of open files "
                "(`ulimit -Hn`, LimitNOFILE=)",
            )
        idle.park()

    def add(self, file: StagedFile) -> None:
        """Record that the file's descriptor was opened or used."""
        self._open[file] = None
        self._open.move_to_end(file)

    def remove(self, file: StagedFile) -> None:
        """Record that the file's descriptor was closed."""
        self._open.pop(file, None)


class Staging:
    """Counts staged bytes. Trio thread only."""

    def __init__(
        self,
        segments: Segments,
        threads: Threads,
        *,
        bytes_max: int,
        free_bytes_min: int,
        metrics: UploadMetrics,
        evict: Callable[[int], object] = lambda _: None,
        wait_s_max: float = 3600.0,
    ) -> None:
        """Files are in the directory of the segments. ``evict(bytes)`` makes the block cache free space on the same
        disk; it is called in a worker thread."""
        self.segments, self.directory, self.disk, self.threads = segments, segments.directory, segments.disk, threads
        self.descriptors = DescriptorPool(self.disk.descriptors_max)
        self.files_in_memory = 0
        self.write_outs = trio.CapacityLimiter(WRITE_OUTS_MAX)
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self.wait_s_max = wait_s_max
        self.state = StagingState.OK
        self._free_bytes_min = free_bytes_min
        self.metrics = metrics
        self._evict = evict
        self._free_known, self._free_at = 0, -math.inf
        self._stagers: set[Stager] = set()
        self._room = trio.Event()
        self._spilling = trio.Lock()

    def path(self, draft_id: str) -> Path:
        return self.directory / draft_id

    def create(self, draft_id: str, key: str) -> int:
        """A new, empty staging file; returns its descriptor. Raises StagingFull, CacheError, FileError(EMFILE)."""
        self.descriptors.make_room()
        with self.translating():
            fd = os.open(self.path(draft_id), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, STAGED_MODE)
        with suppress(OSError):  # a filesystem without attributes: only the journal identifies the file
            os.setxattr(fd, KEY_XATTR, key.encode())
        return fd

    def mark_incomplete(self, draft_id: str, incomplete: bool) -> None:
        """Record on a staging file that refused writes to it could not be journaled, or that it is complete again: by a
        mode bit, which needs no disk space."""
        with suppress(OSError):
            os.chmod(self.path(draft_id), STAGED_MODE | (INCOMPLETE_MODE if incomplete else 0))

    def is_incomplete(self, draft_id: str) -> bool:
        """Whether `mark_incomplete` recorded it last."""
        try:
            return bool(os.stat(self.path(draft_id)).st_mode & INCOMPLETE_MODE)
        except OSError:
            return False

    def record_upload(self, fd: int, upload_id: str) -> None:
        """Name the file's multipart upload on the file too, so that it can be aborted even without the journal."""
        with suppress(OSError):
            os.setxattr(fd, UPLOAD_XATTR, upload_id.encode())

    @contextmanager
    def translating(self) -> Iterator[None]:
        """Raise errors of the staging disk as `translate` says."""
        try:
            yield
        except OSError as error:
            raise self.translate(error) from error

    def translate(self, error: OSError) -> LakeError:
        """The error that a writer gets for an error of the staging disk."""
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return FileError(error.errno, f"{os.strerror(error.errno)}: {self.directory}")
        if is_out_of_room(error):
            self.state = StagingState.FULL
            return StagingFull(f"the disk of {self.directory} is full: free some space or use another --cache-dir")
        self.state = StagingState.FAILED
        return CacheError(f"the staging disk fails ({os.strerror(error.errno or errno.EIO)}): {self.directory}")

    def count_in_memory(self, files: int) -> None:
        """Change the number of files in memory."""
        self.files_in_memory += files

    @property
    def takes_file_in_memory(self) -> bool:
        """Whether one more file may be kept in memory."""
        return self.files_in_memory < FILES_IN_MEMORY_MAX

    @property
    def is_half_full(self) -> bool:
        """Whether deferred uploads must begin."""
        return self.bytes_used > self.bytes_max // 2

    def register(self, stager: Stager) -> None:
        self._stagers.add(stager)

    def unregister(self, stager: Stager, staged_bytes: int = 0) -> None:
        """Remove a stager that has ended, with its ``staged_bytes``."""
        self._stagers.discard(stager)
        self.bytes_used -= staged_bytes
        self.notify()

    def notify(self) -> None:
        """Wake the writers that wait for space."""
        self._room.set()
        self._room = trio.Event()

    def count_staged(self, count: int) -> None:
        """Record ``count`` bytes that are staged already, whether there is space for them or not."""
        self.bytes_used += count

    def release(self, count: int) -> None:
        """Record that ``count`` staged bytes were released."""
        self.bytes_used -= count
        if count:
            self.notify()

    async def reserve(self, count: int) -> None:
        """Wait for space for ``count`` more bytes and reserve it. Raises StagingFull, immediately if nothing frees
        space (`Stager.making_room`), else after ``wait_s_max``; CacheError if the disk fails."""
        if self._fits(count) and self._has_free(count):
            self.bytes_used += count
            self.state = StagingState.OK
            return
        deadline_s = trio.current_time() + self.wait_s_max
        while not (self._fits(count) and await self._disk_fits(count) and self._fits(count)):
            if self._drop(keep_recent=True):
                continue
            self.state = StagingState.FULL
            if not self.disk.is_freeing and not any(stager.making_room for stager in self._stagers):
                if self._drop(keep_recent=False) or await self._spill(count):
                    continue
                raise StagingFull(self._why_full(count))
            if trio.current_time() >= deadline_s:
                raise StagingFull(
                    f"staging was full for {self.wait_s_max:g} s ({self.bytes_used} bytes wait for the store): "
                    "see `lakefs-fuse stats`, or raise --staging-size or --staging-timeout"
                )
            self.metrics.writer_waits += 1
            room = self._room
            with trio.move_on_after(WAIT_S_MAX):
                await room.wait()
        self.bytes_used += count
        self.state = StagingState.OK

    def _why_full(self, count: int) -> str:
        """The reason why there is no space for ``count`` more bytes, and no upload can free it, and the remedy. Raises
        LakeError."""
        if not self._fits(count):
            return (
                f"{self.bytes_used} bytes are staged and none of them can be uploaded yet: "
                "close files that are open for writing, decide about orphans, or raise --staging-size"
            )
        short = self._free_bytes_min + IN_FLIGHT_BYTES + count - self._free_bytes()
        return f"the disk of {self.directory} is full: free {max(1, short)} bytes there, or lower --free-space"

    def reserve_now(self, count: int) -> None:
        """Space for bytes that cannot wait, because the work that needs them frees space when it is done. Few tasks use
        it at a time, in small amounts, and may exceed the bound by these."""
        if not self._fits(count):
            self._drop(keep_recent=False)
        self.bytes_used += count

    async def _spill(self, count: int) -> bool:
        """Whether bytes of incomplete parts were moved to the store, or there is room by now. One at a time, because
        that needs space."""
        async with self._spilling:
            if self._fits(count) and self._has_free(count):
                return True  # another writer's did it
            for stager in list(self._stagers):
                if await stager.spill():
                    return True
            return self._fits(count) and self._has_free(count)  # files have ended

    def _drop(self, *, keep_recent: bool) -> int:
        return sum(stager.drop_uploaded(keep_recent=keep_recent) for stager in list(self._stagers))

    @property
    def fits(self) -> bool:
        """Whether the staged bytes are within the bound."""
        return self._fits(0)

    def _fits(self, count: int) -> bool:
        return self.bytes_used + count <= self.bytes_max

    def room_bytes(self, evictable_bytes: int) -> int:
        """How many more bytes fit without an upload, by the bound and by the disk, on which others would free this many
        bytes. Raises StagingFull or CacheError."""
        return max(0, min(self.bytes_max - self.bytes_used, self._room_on_disk(evictable_bytes)))

    def can_have_room(self, evictable_bytes: int) -> bool:
        """Whether uploads, and others that would give back that many bytes, make room on the disk. Raises StagingFull
        or CacheError."""
        return self._room_on_disk(self.bytes_used + evictable_bytes) > 0

    def _room_on_disk(self, freed_bytes: int) -> int:
        """May be negative."""
        return self._free_bytes() + freed_bytes - self._free_bytes_min - IN_FLIGHT_BYTES

    def disk_room(self) -> tuple[int, int]:
        """Free bytes of the disk, and how many of them writers need; 0 if the disk does not report them."""
        try:
            return self.disk.free_bytes(self.directory), self._free_bytes_min + IN_FLIGHT_BYTES
        except OSError:
            return 0, 0

    def _free_bytes(self) -> int:
        """Raises StagingFull or CacheError."""
        with self.translating():
            return self.disk.free_bytes(self.directory)

    def _has_free(self, count: int) -> bool:
        """Whether the disk has room for ``count`` bytes. It is asked at most once in `FREE_AGE_S`; bytes used since are
        subtracted. Raises StagingFull or CacheError."""
        now = trio.current_time()
        if now - self._free_at > FREE_AGE_S:
            self._free_known, self._free_at = self._free_bytes(), now
        if self._free_known <= self._free_bytes_min + IN_FLIGHT_BYTES + count:
            self._free_at = -math.inf
            return False
        self._free_known -= count
        return True

    async def _disk_fits(self, count: int) -> bool:
        """``IN_FLIGHT_BYTES`` are for bytes that were reserved and are not written yet."""
        wanted = self._free_bytes_min + IN_FLIGHT_BYTES + count
        short = wanted - self._free_bytes()
        if short > 0:
            await self.threads.run(self._evict, short)
            short = wanted - self._free_bytes()
        return short <= 0


class StagedFile:
    """The bytes of one draft on this node: in memory while it is small, then a staging file, or a place in a segment.

    A file without a descriptor or a spot stays in memory until it outgrows `MEMORY_BYTES_MAX` or its descriptor is
    needed; once acknowledged its bytes are read from a segment (see `segments`). Outside of `held` blocks the
    descriptor is closed (parked) when other files need one, and opened again by its next use. Errors of the disk are
    StagingFull, CacheError, or FileError(EMFILE).
    """

    def __init__(
        self,
        staging: Staging,
        draft_id: str,
        key: str,
        *,
        fd: int = NO_FILE,
        has_file: bool = False,
        spot: Spot | None = None,
    ) -> None:
        """``fd``: of an open staging file; or a place in a segment; without either the bytes are in memory."""
        self._fd = fd
        self.spot = spot
        """Its place in a segment, if its bytes are there."""
        self._staging = staging
        self._memory = None if has_file or spot is not None else bytearray()
        staging.count_in_memory(self._memory is not None)
        self._draft_id, self._key = draft_id, key
        self._has_file, self._parked = has_file, has_file and fd == NO_FILE
        self._holders = 0
        self._closing = False
        self._leave = self._removed = False
        self._reading_threads: trio.CapacityLimiter | None = None

    @classmethod
    def create(cls, staging: Staging, draft_id: str, key: str) -> StagedFile:
        """Create a staging file. Raises StagingFull, CacheError, FileError(EMFILE)."""
        fd = staging.create(draft_id, key)
        file = cls(staging, draft_id, key, fd=fd, has_file=True)
        staging.descriptors.add(file)
        return file

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the descriptor open for the block, if it is or will be. The file must not be closed yet."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if self._closing and not self._holders:
                self._close()

    @property
    def fd(self) -> int:
        """The descriptor of a staging file, which is created if there was none; -1 once closed. Valid until the next
        checkpoint, or to the end of a `held` block. Raises StagingFull, CacheError, FileError(EMFILE)."""
        if self._parked:
            self._staging.descriptors.make_room()
            with self._staging.translating():
                self._fd = os.open(self._staging.path(self._draft_id), os.O_RDWR | os.O_CLOEXEC)
            self._parked = False
        elif self._fd == NO_FILE and not self.is_closed:
            self._make_file()
        if self._fd != NO_FILE:
            self._staging.descriptors.add(self)
        return self._fd

    @property
    def in_use(self) -> bool:
        """Whether a thread or a task uses the descriptor."""
        return self._holders > 0

    @property
    def is_closed(self) -> bool:
        return self._fd == NO_FILE and not self._parked and self._memory is None and self.spot is None

    @property
    def is_in_memory(self) -> bool:
        return self._memory is not None

    def memory(self) -> bytes | None:
        """All written bytes, if they are in memory only."""
        return None if self._memory is None else bytes(self._memory)

    def _make_file(self) -> None:
        """Move the bytes to a separate file. A segment that has them stays referenced by the journal."""
        if self.spot is not None:  # a daemon that died may have created one
            self._staging.path(self._draft_id).unlink(missing_ok=True)
        fd = self._staging.create(self._draft_id, self._key)
        try:
            if self._memory is not None:
                pwrite_all(fd, self._memory, 0)
            elif self.spot is not None:
                pwrite_all(fd, self._staging.segments.read(self.spot, 0, self.spot.length), 0)
        except OSError as error:
            os.close(fd)
            self._staging.path(self._draft_id).unlink(missing_ok=True)
            raise self._staging.translate(error) from error
        self._leave_memory()
        self._fd, self._has_file = fd, True
        self._staging.descriptors.add(self)

    def keep_on_disk(self) -> None:
        """Move bytes in memory to a staging file, which outlives this daemon. Raises StagingFull or CacheError."""
        if self._memory:
            self._make_file()

    def mark_ended(self) -> None:
        """Record that the bytes are in the store, or superseded: the caller deletes the journal record, then closes
        with ``unlink``."""
        if self._has_file:
            with suppress(OSError):  # a crash now leaves an orphan, which is marked as one
                os.setxattr(self._staging.path(self._draft_id), ENDED_XATTR, b"1")

    def keep_in(self, spot: Spot) -> None:
        """Record that the bytes are safe in a segment."""
        self._leave_memory()
        self.spot = spot

    def _leave_memory(self) -> None:
        self._staging.count_in_memory(-(self._memory is not None))
        self._memory = None

    def park(self) -> None:
        """Close the descriptor for now, unless it is `held`."""
        if not self._holders and self._fd >= 0:
            os.close(self._fd)
            self._fd, self._parked = NO_FILE, True
            self._staging.descriptors.remove(self)

    def close(self, *, unlink: bool, leave: bool = False) -> None:
        """``unlink`` is false if the file became a cache file; ``leave`` leaves everything to the next mount."""
        self._closing, self._leave = True, leave
        if unlink and self._has_file and not leave:
            self._remove()
        self._parked = False
        if not self._holders:
            self._close()

    def _close(self) -> None:
        self._leave_memory()
        if self.spot is not None:
            if not self._leave:
                self._staging.segments.release(self.spot)
            self.spot = None
        if self._fd >= 0:
            self._staging.disk.close_removed(self._fd) if self._removed else os.close(self._fd)
            self._fd = NO_FILE
            self._staging.descriptors.remove(self)

    def _remove(self) -> None:
        """A parked file is opened once more, so that `close_removed` frees its blocks."""
        path, self._removed = self._staging.path(self._draft_id), True
        if self._parked:
            with suppress(OSError):
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        path.unlink(missing_ok=True)

    async def sync(self) -> None:
        """The bytes survive a crash of the machine when this returns."""
        with self._staging.translating(), self.held():
            await self._staging.threads.run(self._staging.disk.sync_data, self.fd)

    async def read(self, offset: int, length: int, *, in_file: bool = False) -> bytes:
        """``length`` bytes, zeros beyond the file's end. With ``in_file`` the bytes have a staging file afterwards."""
        with self._staging.translating():
            if in_file and self._fd == NO_FILE and not self._parked:
                self._make_file()
            data = await self._read(offset, length)
        return data if len(data) == length else data + bytes(length - len(data))

    async def _read(self, offset: int, length: int) -> bytes:
        if self._memory is not None:
            return bytes(self._memory[offset : offset + length])
        if self.spot is not None and not self._has_file:
            return self._staging.segments.read(self.spot, offset, length)
        if length < THREAD_BYTES_MIN:
            return pread_all(self.fd, length, offset)
        if self._reading_threads is None:
            self._reading_threads = trio.CapacityLimiter(READS_MAX)
        with self.held():
            return await self._staging.threads.run(pread_all, self.fd, length, offset, limiter=self._reading_threads)

    def begin_with(self, data: bytes) -> None:
        """The first bytes, no more than `MEMORY_BYTES_MAX`."""
        if self._memory is not None:
            self._memory += data
            return
        with self._staging.translating():
            pwrite_all(self.fd, data, 0)

    async def write(self, offset: int, data: Buffer) -> None:
        """If it fails, an unknown part of the range was written."""
        memory = self._memory
        if memory is not None and offset + len(data) <= MEMORY_BYTES_MAX:
            if offset > len(memory):
                memory += bytes(offset - len(memory))
            memory[offset : offset + len(data)] = data
            return
        with self._staging.translating():
            if len(data) < THREAD_BYTES_MIN:
                pwrite_all(self.fd, data, offset)
            else:
                with self.held():
                    await self._staging.threads.run(pwrite_all, self.fd, data, offset)

    async def write_out(self, start: int, end: int) -> None:
        """Begin to write bytes [start, end) out to the disk."""
        async with self._staging.write_outs:
            if self._fd >= 0:
                with self.held():
                    await self._staging.threads.run(self._staging.disk.begin_writeout, self._fd, start, end - start)

    async def cut(self, size: int) -> None:
        """Truncate to ``size`` bytes."""
        if self._memory is not None:
            del self._memory[size:]
            return
        with self._staging.translating(), self.held():
            await self._staging.threads.run(os.ftruncate, self.fd, size)

    def punch(self, start: int, end: int) -> bool:
        """Turn bytes [start, end) into a hole, which frees their space; False if that fails, or the file cannot be
        opened."""
        if self._memory is not None:
            end = min(end, len(self._memory))
            if start < end:
                self._memory[start:end] = bytes(end - start)
            return True
        try:
            return punch_hole(self.fd, start, end - start)
        except (OSError, LakeError) as error:
            log.warning("staged bytes %d to %d cannot be released: %s", start, end, error)
            return False
