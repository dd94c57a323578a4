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
        self._free_s = float("-inf")

    async def wait(self, count: int) -> float:
        """Wait until ``count`` more bytes may come; answers for how many seconds. A task that is cancelled meanwhile
        gives its turn back. Not a checkpoint where there is nothing to wait for."""
        if not self.bytes_s_max:
            return 0.0
        now_s, takes_s = trio.current_time(), count / self.bytes_s_max
        due_s = max(self._free_s, now_s)
        self._free_s = due_s + takes_s
        if due_s > now_s:
            try:
                await trio.sleep_until(due_s)
            except trio.Cancelled:
                self._free_s -= takes_s
                raise
        return due_s - now_s
