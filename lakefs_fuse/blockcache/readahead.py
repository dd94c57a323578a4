"""Readahead: when to fetch ahead of a reader, and how far. One planner per open handle.

A handle that reads on where it stopped gets a window that doubles up to ``window_bytes_max``; one that jumps gets none
until it reads on from there. The kernel splits one read into several and sends them at once, so a read counts as
sequential anywhere within ``SLACK_BYTES`` of the front, and a late piece changes nothing.

Pure logic for the trio thread; the reader tells `dropped` where it did not follow the plan.
"""

from __future__ import annotations

from lakefs_fuse.blockcache.object_version import BLOCK_BYTES

PIECE_BYTES = 8 * BLOCK_BYTES
"""Largest range of one GET. Larger plans end at a multiple of it, so that they are whole pieces."""
WINDOW_BYTES_MAX = 32 << 20
LOCAL_WINDOW_BYTES_MAX = 4 << 20
"""Window where the cache disk has the next blocks: there is little latency to hide."""
SLACK_BYTES = 2 << 20
WHOLE_BYTES_MAX = 4 * BLOCK_BYTES
"""An object up to this size is fetched whole by the first read of any part of it."""


class Readahead:
    """``plan`` is called with every read, before or after it is served, in any order within the slack."""

    __slots__ = ("_front", "_issued_to", "_run", "_window", "_window_max", "local", "starved")

    def __init__(self, window_bytes_max: int = WINDOW_BYTES_MAX) -> None:
        self._window_max = max(window_bytes_max, BLOCK_BYTES)
        self._window = BLOCK_BYTES
        self.local = False
        """Whether the last plan was on the cache disk already."""
        self.starved = False
        """Whether the last plan was dropped for want of room."""
        self._front = 0
        self._issued_to = 0
        self._run = 0

    @property
    def window_bytes(self) -> int:
        """How far the next plan reaches beyond the front."""
        return min(self._window, LOCAL_WINDOW_BYTES_MAX) if self.local else self._window

    @property
    def reads_on(self) -> bool:
        """Whether the last reads followed one another."""
        return self._run >= 2

    def plan(self, offset: int, length: int, size: int) -> tuple[int, int] | None:
        """Bytes [start, stop) to fetch ahead now that [offset, offset + length) of ``size`` is read, if any.

        ``start`` and ``stop`` are multiples of BLOCK_BYTES (``stop``: or the size).
        """
        end = min(offset + length, size)
        if abs(offset - self._front) > SLACK_BYTES:
            self._front, self._run = end, 1
            self._window, self._issued_to, self.starved = BLOCK_BYTES, 0, False
            return None
        if end <= self._front:
            return None
        self._front = end
        self._run += 1
        window = self.window_bytes
        if self._run < 2 or self._issued_to - end >= window // 2:
            return None
        start = max(self._issued_to, -(-end // BLOCK_BYTES) * BLOCK_BYTES)
        unit = PIECE_BYTES if window > PIECE_BYTES else BLOCK_BYTES
        stop = min(max((end + window) // unit * unit, start + BLOCK_BYTES), size)
        if start >= stop:
            return None
        self._issued_to = stop
        self.starved = False
        self._window = min(window * 2, self._window_max)
        return start, stop

    def set_local(self, local: bool) -> None:
        """Record whether the cache disk had the last plan."""
        self.local = local

    def dropped(self, start: int) -> None:
        """The plan from ``start`` on was not carried out: plan it again."""
        self._issued_to = min(self._issued_to, start)
        self.starved = True

    def fetched(self, stop: int) -> None:
        """A reader fetches everything up to ``stop`` itself."""
        self._issued_to = max(self._issued_to, stop)
