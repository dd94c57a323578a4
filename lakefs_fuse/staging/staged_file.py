"""The bytes of one draft on this node: in memory while it is small, then a staging file, or a place in a segment.

What was never written reads as zeros. A draft that `begins_small` has no file of its own until it outgrows
`MEMORY_BYTES_MAX` or its descriptor is needed; once acknowledged its bytes are in a segment (see `segments`), where
they are read from. The descriptor stays open until the last `held` block has ended, for its number would be another
file's after. Outside of such blocks it is closed (parked) when other files need descriptors (`DescriptorPool`), and
opened again by its next use. Used from trio tasks; calls that may block long go to worker threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import trio

from lakefs_fuse.environment.local_disk import punch_hole, pwrite_all
from lakefs_fuse.staging.segments import Spot
from lakefs_fuse.staging.staging_area import Staging
from lakefs_fuse.store.protocol import Buffer

MEMORY_BYTES_MAX = 256 << 10
"""What is written to a file that is kept in memory until it is acknowledged; few are open at a time."""
THREAD_BYTES_MIN = 64 << 10
"""Reads and writes from this size on are worth a worker thread."""
READS_MAX = 4
"""At once of one file, in threads that writes, which a busy disk holds up, cannot use up."""
NO_FILE = -1
log = logging.getLogger(__name__)


class StagedFile:
    """See the module's head. Errors of the disk are StagingFull, CacheError, or FileError(EMFILE)."""

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
        """Of a staging file (``fd``, where it is open), or a place in a segment; in memory where neither is given."""
        self._fd = fd
        self._spot = spot
        self._memory = None if has_file or spot is not None else bytearray()
        self._staging = staging
        self._draft_id, self._key = draft_id, key
        self._has_file, self._parked = has_file, has_file and fd == NO_FILE
        self._holders = 0
        self._closing = False
        self._leave = self._removed = False
        self._reading_threads: trio.CapacityLimiter | None = None

    @classmethod
    def create(cls, staging: Staging, draft_id: str, key: str) -> StagedFile:
        """Of a new staging file. Raises StagingFull, CacheError, FileError(EMFILE)."""
        fd = staging.create(draft_id, key)
        file = cls(staging, draft_id, key, fd=fd, has_file=True)
        staging.descriptors.add(file)
        return file

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the descriptor open, if it is or will be. The file must not be closed yet."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if self._closing and not self._holders:
                self._close()

    @property
    def fd(self) -> int:
        """The descriptor of a staging file, made now where there was none; -1 once closed. Good until the next
        checkpoint, or to the end of a `held` block. Raises StagingFull, CacheError, FileError(EMFILE)."""
        if self._parked:
            self._fd, self._parked = self._staging.reopen(self._draft_id), False
        elif self._fd == NO_FILE and not self.is_closed:
            self._make_file()
        if self._fd != NO_FILE:
            self._staging.descriptors.add(self)
        return self._fd

    @property
    def in_use(self) -> bool:
        """See `staging_area.Holder`."""
        return self._holders > 0

    @property
    def is_closed(self) -> bool:
        return self._fd == NO_FILE and not self._parked and self._memory is None and self._spot is None

    @property
    def spot(self) -> Spot | None:
        """Its place in a segment, if that is where its bytes are."""
        return self._spot

    @property
    def is_in_memory(self) -> bool:
        return self._memory is not None

    def memory(self) -> bytes | None:
        """Everything that was written, where that is in memory only."""
        return None if self._memory is None else bytes(self._memory)

    def _make_file(self) -> None:
        """The bytes get a file of their own. A segment that has them goes on counting for the journal."""
        if self._spot is not None:  # a daemon that died may have begun one
            self._staging.path(self._draft_id).unlink(missing_ok=True)
        fd = self._staging.create(self._draft_id, self._key)
        try:
            if self._memory is not None:
                pwrite_all(fd, self._memory, 0)
            elif self._spot is not None:
                pwrite_all(fd, self._staging.segments.read(self._spot, 0, self._spot.length), 0)
        except OSError as error:
            os.close(fd)
            self._staging.path(self._draft_id).unlink(missing_ok=True)
            raise self._staging.translate(error) from error
        self._fd, self._memory, self._has_file = fd, None, True

    def keep_on_disk(self) -> None:
        """Bytes in memory get a staging file, which outlives this daemon. Raises StagingFull or
        CacheError."""
        if self._memory:
            self._make_file()

    def mark_ended(self) -> None:
        """The bytes are not needed from here: the caller deletes the journal record, then closes with ``unlink``."""
        if self._has_file:
            self._staging.mark_ended(self._draft_id)

    def keep_in(self, spot: Spot) -> None:
        """The bytes are safe in a segment now."""
        self._spot, self._memory = spot, None

    def park(self) -> None:
        """Close the descriptor for now, unless it is `held`."""
        if not self._holders and self._fd >= 0:
            os.close(self._fd)
            self._fd, self._parked = NO_FILE, True
            self._staging.descriptors.remove(self)

    def close(self, *, unlink: bool, leave: bool = False) -> None:
        """``unlink`` is false where the file became cache; ``leave`` leaves everything to the next mount."""
        self._closing, self._leave = True, leave
        if unlink and self._has_file and not leave:
            self._remove()
        self._parked = False
        if not self._holders:
            self._close()

    def _close(self) -> None:
        self._memory = None
        if self._spot is not None:
            if not self._leave:
                self._staging.segments.release(self._spot)
            self._spot = None
        if self._fd >= 0:
            self._staging.disk.close_removed(self._fd) if self._removed else os.close(self._fd)
            self._fd = NO_FILE
            self._staging.descriptors.remove(self)

    def _remove(self) -> None:
        """A parked file is opened once more: the last close of a removed one decides when the disk is busy."""
        path, self._removed = self._staging.path(self._draft_id), True
        if self._parked:
            with suppress(OSError):
                self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        path.unlink(missing_ok=True)

    async def sync(self) -> None:
        """The bytes survive a crash of the machine when this returns."""
        try:
            with self.held():
                await self._staging.threads.run(self._staging.disk.sync_data, self.fd)
        except OSError as error:
            raise self._staging.translate(error) from error

    async def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes, zeros beyond the file's end."""
        try:
            data = await self._read(offset, length)
        except OSError as error:
            raise self._staging.translate(error) from error
        return data if len(data) == length else data + bytes(length - len(data))

    async def _read(self, offset: int, length: int) -> bytes:
        if self._memory is not None:
            return bytes(self._memory[offset : offset + length])
        if self._spot is not None and self._fd == NO_FILE:
            return self._staging.segments.read(self._spot, offset, length)
        if length < THREAD_BYTES_MIN:
            return os.pread(self.fd, length, offset)
        if self._reading_threads is None:
            self._reading_threads = trio.CapacityLimiter(READS_MAX)
        with self.held():
            return await self._staging.threads.run(os.pread, self.fd, length, offset, limiter=self._reading_threads)

    def begin_with(self, data: bytes) -> None:
        """The first bytes, no more than `MEMORY_BYTES_MAX`."""
        if self._memory is not None:
            self._memory += data
            return
        try:
            pwrite_all(self.fd, data, 0)
        except OSError as error:
            raise self._staging.translate(error) from error

    async def write(self, offset: int, data: Buffer) -> None:
        """Where it fails, an unknown part of the range was written."""
        if self._memory is not None and offset + len(data) <= MEMORY_BYTES_MAX:
            self._write_memory(self._memory, offset, data)
            return
        try:
            if len(data) < THREAD_BYTES_MIN:
                pwrite_all(self.fd, data, offset)
            else:
                with self.held():
                    await self._staging.threads.run(pwrite_all, self.fd, data, offset)
        except OSError as error:
            raise self._staging.translate(error) from error

    @staticmethod
    def _write_memory(memory: bytearray, offset: int, data: Buffer) -> None:
        if offset > len(memory):
            memory += bytes(offset - len(memory))
        memory[offset : offset + len(data)] = data

    async def write_out(self, start: int, end: int) -> None:
        """Bytes [start, end) are on their way to the disk when this returns."""
        async with self._staging.write_outs:
            if self._fd >= 0:
                with self.held():
                    await self._staging.threads.run(self._staging.disk.begin_writeout, self._fd, start, end - start)

    async def cut(self, size: int) -> None:
        if self._memory is not None:
            del self._memory[size:]
            return
        try:
            with self.held():
                await self._staging.threads.run(os.ftruncate, self.fd, size)
        except OSError as error:
            raise self._staging.translate(error) from error

    def punch(self, start: int, end: int) -> bool:
        """Bytes [start, end) become zeros and give their room back; False where this filesystem cannot."""
        if self._memory is not None:
            end = min(end, len(self._memory))
            if start < end:
                self._memory[start:end] = bytes(end - start)
            return True
        try:
            return punch_hole(self.fd, start, end - start)
        except OSError as error:
            log.warning("staged bytes %d to %d cannot be let go: %s", start, end, error)
            return False
