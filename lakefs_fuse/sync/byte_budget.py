"""A bound on bytes in memory that tasks share, first come, first served.

What always holds (*bounded bytes*): no more than ``bytes_max`` are given out at once. Trio thread only; nothing
survives a crash.
"""

from __future__ import annotations

from collections import deque

import trio


class ByteBudget:
    """A semaphore of ``bytes_max`` bytes; a request for more than that gets all of them, alone."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self._waiting: deque[tuple[int, trio.Event]] = deque()

    @property
    def tasks_waiting(self) -> int:
        """Number of tasks that wait in `acquire`."""
        return len(self._waiting)

    def acquire_nowait(self, count: int, *, leave_bytes: int = 0) -> bool:
        """Acquire without waiting. False where that would not leave ``leave_bytes`` free, or where tasks wait."""
        count = min(count, self.bytes_max)
        if self._waiting or self.bytes_used + count + leave_bytes > self.bytes_max:
            return False
        self.bytes_used += count
        return True

    async def acquire(self, count: int) -> None:
        """Wait until there is room. Not a checkpoint where there is room at once."""
        if self.acquire_nowait(count):
            return
        turn = trio.Event()
        entry = (min(count, self.bytes_max), turn)
        self._waiting.append(entry)
        try:
            await turn.wait()
        except trio.Cancelled:
            if turn.is_set():
                self.release(count)
            else:
                self._waiting.remove(entry)
                self._wake()
            raise

    def release(self, count: int) -> None:
        """Release as many bytes as `acquire` was called with."""
        self.bytes_used -= min(count, self.bytes_max)
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.bytes_used + self._waiting[0][0] <= self.bytes_max:
            count, turn = self._waiting.popleft()
            self.bytes_used += count
            turn.set()
