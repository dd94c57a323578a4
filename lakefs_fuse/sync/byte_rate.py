"""A rate of bytes that tasks share, in the order in which they come.

What always holds (*bounded rate*): over any time, what was let through is no more than the rate allows for that time,
and one piece on top. Tasks of one trio loop; nothing survives a crash.
"""

from __future__ import annotations

import trio


class ByteRate:
    """``bytes_s_max`` a second; 0 is no limit."""

    def __init__(self, bytes_s_max: int = 0) -> None:
        self.bytes_s_max = bytes_s_max
        self._turn = trio.Lock()
        """Held by the task that is next, while it waits; others stand in line."""
        self._free_s = float("-inf")

    async def wait(self, count: int) -> float:
        """Wait until ``count`` more bytes may come; returns for how many seconds. A task that is cancelled meanwhile
        takes no bytes. Not a checkpoint where there is nothing to wait for."""
        if not self.bytes_s_max:
            return 0.0
        began_s = trio.current_time()
        if self._free_s <= began_s and not self._turn.locked():
            self._free_s = began_s + count / self.bytes_s_max
            return 0.0
        async with self._turn:
            due_s = max(self._free_s, trio.current_time())
            await trio.sleep_until(due_s)
            self._free_s = due_s + count / self.bytes_s_max
        return due_s - began_s
