"""Room on the local disk for bytes that are not in the store yet.

What always holds (*bounded staging*): writers never stage more than ``bytes_max``, and the disk keeps
``free_bytes_min`` free; a writer that finds no room waits for uploads to make some, and gets `StagingFull` only where
nothing is under way that could. Files lie in one directory under their draft's id; small ones that were acknowledged
share segments. Extended attributes on a file name the key its bytes are meant for, so that it can be told what it is
even where the journal is lost.
"""

from __future__ import annotations

import errno
import math
import os
import stat
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import trio

from lakefs_fuse.environment.disk import Disk
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, FileError, LakeError, StagingFull
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.product import RESERVED_XATTR
from lakefs_fuse.staging.segments import Segments

FREE_AGE_S = 0.05
IN_FLIGHT_BYTES = 16 << 20
KEY_XATTR = f"{RESERVED_XATTR}key"
UPLOAD_XATTR = f"{RESERVED_XATTR}upload"
ENDED_XATTR = f"{RESERVED_XATTR}ended"
"""On a staging file that is not needed any more, set before its journal record is deleted: a daemon that dies before
the file is deleted too leaves no orphan."""
STAGED_MODE = 0o600
INCOMPLETE_MODE = stat.S_ISVTX
WAIT_S_MAX = 1.0
WRITE_OUTS_MAX = 8
"""At once, of parts of all files: each holds a descriptor while a busy disk holds it up."""


class StagingState(StrEnum):
    """How the last attempt to stage something went, as `stats` shows it."""

    OK = "ok"
    FULL = "full"
    """No room: writers wait, or got ENOSPC."""
    FAILED = "failed"
    """The disk answers with errors."""


class Stager(Protocol):
    """A file being written, as staging sees it."""

    @property
    def making_room(self) -> bool:
        """Uploads are under way that will let go of staged bytes when they end."""

    def drop_uploaded(self, *, keep_recent: bool) -> int:
        """Let go of bytes that are in the store already, or of those not written lately; answers how many."""

    async def spill(self) -> int:
        """Put bytes that cannot be uploaded yet somewhere else, and let go of them; answers how many."""


class Holder(Protocol):
    """A file with an open descriptor, which it can open again."""

    @property
    def in_use(self) -> bool:
        """A thread or a task is using the descriptor."""

    def park(self) -> None:
        """Close the descriptor for now, and call `DescriptorPool.remove`."""


class DescriptorPool:
    """The open descriptors of staging files: at most ``open_max``. One more closes the one used least recently.

    Where a task or thread uses every one of them, another is refused with EMFILE.
    """

    def __init__(self, open_max: int) -> None:
        self.open_max = open_max
        self._open: OrderedDict[Holder, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def make_room(self) -> None:
        """Of one more descriptor. Raises FileError(EMFILE)."""
        if len(self._open) < self.open_max:
            return
        idle = next((holder for holder in self._open if not holder.in_use), None)
        if idle is None:
            raise FileError(
                errno.EMFILE,
                f"{self.open_max} staging files are being read or written at this moment: "
                "raise the daemon's limit of open files (`ulimit -Hn`, LimitNOFILE=)",
            )
        idle.park()

    def add(self, holder: Holder) -> None:
        """Its descriptor was opened or used just now."""
        self._open[holder] = None
        self._open.move_to_end(holder)

    def remove(self, holder: Holder) -> None:
        """Its descriptor was closed."""
        self._open.pop(holder, None)


class Staging:
    """Counts staged bytes. Trio thread only."""

    def __init__(
        self,
        directory: Path,
        disk: Disk,
        threads: Threads,
        *,
        bytes_max: int,
        free_bytes_min: int,
        metrics: UploadMetrics,
        evict: Callable[[int], object] = lambda _: None,
        wait_s_max: float = 3600.0,
    ) -> None:
        """``evict(bytes)`` asks the block cache for room on the same disk; it is called in a worker thread."""
        self.directory = directory
        self.disk, self.threads = disk, threads
        self.segments = Segments(directory, disk)
        self.descriptors = DescriptorPool(disk.descriptors_max)
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
        """A new, empty staging file; answers its descriptor. Raises StagingFull, CacheError, FileError(EMFILE)."""
        self.descriptors.make_room()
        try:
            fd = os.open(self.path(draft_id), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, STAGED_MODE)
        except OSError as error:
            raise self.translate(error) from error
        try:
            os.setxattr(fd, KEY_XATTR, key.encode())
        except OSError:
            pass  # a filesystem without attributes: the journal alone tells what the file is
        return fd

    def reopen(self, draft_id: str) -> int:
        """The descriptor of a staging file that is there. Raises StagingFull, CacheError, FileError(EMFILE)."""
        self.descriptors.make_room()
        try:
            return os.open(self.path(draft_id), os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise self.translate(error) from error

    def mark_ended(self, draft_id: str) -> None:
        """The record of a staging file is about to go, because its bytes are in the store, or in a newer version."""
        try:
            os.setxattr(self.path(draft_id), ENDED_XATTR, b"1")
        except OSError:
            pass  # a crash now leaves an orphan, which says that it is one

    def mark_incomplete(self, draft_id: str, incomplete: bool) -> None:
        """Writes to a staging file were refused and could not be journaled, or are complete again: a mode bit, which
        needs no room on the disk."""
        with suppress(OSError):
            os.chmod(self.path(draft_id), STAGED_MODE | (INCOMPLETE_MODE if incomplete else 0))

    def is_incomplete(self, draft_id: str) -> bool:
        """`mark_incomplete` said so."""
        try:
            return bool(os.stat(self.path(draft_id)).st_mode & INCOMPLETE_MODE)
        except OSError:
            return False

    def record_upload(self, fd: int, upload_id: str) -> None:
        """Name the file's multipart upload on the file too, so that it can be aborted even without the journal."""
        try:
            os.setxattr(fd, UPLOAD_XATTR, upload_id.encode())
        except OSError:
            pass

    def translate(self, error: OSError) -> LakeError:
        """What an error of the staging disk means to the writer."""
        if error.errno in (errno.EMFILE, errno.ENFILE):
            return FileError(error.errno, f"{os.strerror(error.errno)}: {self.directory}")
        if error.errno in (28, 122):  # ENOSPC, EDQUOT
            self.state = StagingState.FULL
            return StagingFull(f"the disk of {self.directory} is full: free some space or use another --cache-dir")
        self.state = StagingState.FAILED
        return CacheError(f"the staging disk fails ({os.strerror(error.errno or 5)}): {self.directory}")

    @property
    def is_half_full(self) -> bool:
        """Deferred uploads are to begin."""
        return self.bytes_used > self.bytes_max // 2

    def register(self, stager: Stager) -> None:
        self._stagers.add(stager)

    def unregister(self, stager: Stager) -> None:
        self._stagers.discard(stager)
        self.notify()

    def notify(self) -> None:
        """Something changed that may have made room."""
        self._room.set()
        self._room = trio.Event()

    def release(self, count: int) -> None:
        """``count`` staged bytes are gone."""
        self.bytes_used -= count
        if count:
            self.notify()

    async def reserve(self, count: int) -> None:
        """Wait for room for ``count`` more bytes and take it. Raises StagingFull, at once where nothing is on its way
        that could make room, else after ``wait_s_max``; CacheError where the disk fails."""
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
                raise StagingFull(
                    f"{self.bytes_used} bytes are staged and none of them can be uploaded yet: "
                    "close files that are open for writing, decide about orphans, or raise --staging-size"
                )
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

    def reserve_now(self, count: int) -> None:
        """Room for bytes that cannot wait, because what they are needed for makes room when it is done. Little by
        little, by few tasks at once: the bound may be exceeded by what they hold."""
        if not self._fits(count):
            self._drop(keep_recent=False)
        self.bytes_used += count

    async def _spill(self, count: int) -> bool:
        """Whether something was moved to the store from parts that are not complete. One at a time: it needs room."""
        async with self._spilling:
            if self._fits(count) and self._has_free(count):
                return True  # another writer's did it
            for stager in list(self._stagers):
                if await stager.spill():
                    return True
            return False

    def _drop(self, *, keep_recent: bool) -> int:
        return sum(stager.drop_uploaded(keep_recent=keep_recent) for stager in list(self._stagers))

    @property
    def fits(self) -> bool:
        """What there is keeps within the bound."""
        return self._fits(0)

    def _fits(self, count: int) -> bool:
        return self.bytes_used + count <= self.bytes_max

    def _free_bytes(self) -> int:
        """Raises StagingFull or CacheError."""
        try:
            return self.disk.free_bytes(self.directory)
        except OSError as error:
            raise self.translate(error) from error

    def _has_free(self, count: int) -> bool:
        """Asked at most once in `FREE_AGE_S`; what is taken meanwhile is counted. Raises StagingFull or CacheError."""
        now = trio.current_time()
        if now - self._free_at > FREE_AGE_S:
            self._free_known, self._free_at = self._free_bytes(), now
        if self._free_known <= self._free_bytes_min + IN_FLIGHT_BYTES + count:
            self._free_at = -math.inf
            return False
        self._free_known -= count
        return True

    async def _disk_fits(self, count: int) -> bool:
        """``IN_FLIGHT_BYTES`` are for what was reserved and is not written yet."""
        wanted = self._free_bytes_min + IN_FLIGHT_BYTES + count
        short = wanted - self._free_bytes()
        if short > 0:
            await self.threads.run(self._evict, short)
            short = wanted - self._free_bytes()
        return short <= 0
