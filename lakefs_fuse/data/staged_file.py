"""The bytes of one draft on the local disk: an open staging file.

What was never written reads as zeros. The descriptor stays open until the last `held` block has ended, for its number
would be another file's after. Used from trio tasks; calls that may block long go to worker threads.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from lakefs_fuse.data.disk import punch_hole, pwrite_all
from lakefs_fuse.data.staging import Staging
from lakefs_fuse.store.protocol import Buffer

THREAD_BYTES_MIN = 64 << 10
"""Reads and writes from this size on are worth a worker thread."""
log = logging.getLogger(__name__)


class StagedFile:
    """See the module's head. Errors of the disk are StagingFull or CacheError."""

    def __init__(self, fd: int, staging: Staging) -> None:
        """Takes the descriptor over; it is -1 once closed."""
        self.fd = fd
        self._staging = staging
        self._holders = 0
        self._closing = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep the descriptor open. The file must not be closed yet."""
        self._holders += 1
        try:
            yield
        finally:
            self._holders -= 1
            if self._closing and not self._holders:
                self._close()

    def close(self) -> None:
        self._closing = True
        if not self._holders and self.fd >= 0:
            self._close()

    def _close(self) -> None:
        os.close(self.fd)
        self.fd = -1

    async def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes, zeros beyond the file's end."""
        if length < THREAD_BYTES_MIN:
            data = os.pread(self.fd, length, offset)
        else:
            data = await trio.to_thread.run_sync(os.pread, self.fd, length, offset)
        return data if len(data) == length else data + bytes(length - len(data))

    async def write(self, offset: int, data: Buffer) -> None:
        """Where it fails, an unknown part of the range was written."""
        try:
            if len(data) < THREAD_BYTES_MIN:
                pwrite_all(self.fd, data, offset)
            else:
                await trio.to_thread.run_sync(pwrite_all, self.fd, data, offset)
        except OSError as error:
            raise self._staging.translate(error) from error

    async def cut(self, size: int) -> None:
        try:
            await trio.to_thread.run_sync(os.ftruncate, self.fd, size)
        except OSError as error:
            raise self._staging.translate(error) from error

    def punch(self, start: int, end: int) -> bool:
        """Bytes [start, end) become zeros and give their room back; False where this filesystem cannot."""
        try:
            return punch_hole(self.fd, start, end - start)
        except OSError as error:
            log.warning("staged bytes %d to %d cannot be let go: %s", start, end, error)
            return False
