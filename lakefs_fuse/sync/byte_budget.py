"""A bound on bytes in memory that tasks share: first come, first served, and a way to ask without waiting.

Only for the trio thread; nothing survives a crash.
"""

from __future__ import annotations

from collections import deque

import trio


class ByteBudget:
    """``bytes_max`` bytes. One who asks for more than all of them gets all of them, alone."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self._waiting: deque[tuple[int, trio.Event]] = deque()

    @property
    def tasks_waiting(self) -> int:
        """How many tasks are in `acquire`."""
        return len(self._waiting)

    def acquire_nowait(self, wanted: int, *, leave_bytes: int = 0) -> bool:
        """False where that does not leave ``leave_bytes`` free, or someone waits."""
        wanted = min(wanted, self.bytes_max)
        if self._waiting or self.bytes_used + wanted + leave_bytes > self.bytes_max:
            return False
        self.bytes_used += wanted
        return True

    async def acquire(self, wanted: int) -> None:
        """Wait until there is room. Not a checkpoint where there is room at once."""
        if self.acquire_nowait(wanted):
            return
        turn = trio.Event()
        entry = (min(wanted, self.bytes_max), turn)
        self._waiting.append(entry)
        try:
            await turn.wait()
        except trio.Cancelled:
            if turn.is_set():
                self.release(wanted)
            else:
                self._waiting.remove(entry)
                self._wake()
            raise

    def release(self, wanted: int) -> None:
        """Give back what `acquire` was asked for."""
        self.bytes_used -= min(wanted, self.bytes_max)
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self.bytes_used + self._waiting[0][0] <= self.bytes_max:
            wanted, turn = self._waiting.popleft()
            self.bytes_used += wanted
            turn.set()
