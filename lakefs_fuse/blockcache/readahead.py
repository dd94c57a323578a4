"""Readahead: when to fetch ahead of a reader, and how far. One planner per open handle.

A handle that reads on where it stopped gets a window that doubles up to ``window_bytes_max``; one that jumps gets none
until it reads on from there. The kernel splits one read into several and sends them at once, so a read counts as
sequential within ``SLACK_BYTES`` beyond the front and `LATE_BYTES_MAX` behind it, and a late piece changes nothing.

What was read on from one place is a *run*. A reader of row groups, or of some tensors of a checkpoint, makes runs of
one length: plans end where a run as long as the longer of the two before would, and are made at once where those were
alike. A run that goes on beyond that is planned as one of unknown length: by a quarter of what it has come, unless it
began with the object, which then is likely to be read to its end. So a wrong guess costs a tenth at most of what is
read (0167).

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
"""A read on goes so far beyond the front at most …"""
LATE_BYTES_MAX = 4 << 20
"""… and comes from so far behind it: of what a page fault reads, the kernel sends the pieces in any order."""
UNKNOWN_RUN_SHARE = 4
WHOLE_BYTES_MAX = 4 * BLOCK_BYTES
"""An object up to this size is fetched whole by the first read of any part of it."""


class Readahead:
    """``plan`` is called with every read, before or after it is served, in any order within the slack."""

    __slots__ = (
        "_begin", "_front", "_goes_back", "_issued_to", "_run", "_runs", "_window", "_window_max", "local", "starved",
    )  # fmt: skip

    def __init__(self, window_bytes_max: int = WINDOW_BYTES_MAX) -> None:
        self._window_max = max(window_bytes_max, BLOCK_BYTES)
        self._window = BLOCK_BYTES
        self.local = False
        """Whether the last plan was on the cache disk already."""
        self.starved = False
        """Whether the last plan was dropped for want of room."""
        self._begin = self._front = 0
        self._issued_to = 0
        self._run = 0
        self._runs = (0, 0)
        """Bytes of the last two runs that ended; 0: there was none."""
        self._goes_back: bool | None = None
        """Whether this run begins before the last one; None: it is the first."""

    @property
    def window_bytes(self) -> int:
        """How far the next plan reaches beyond the front."""
        return min(self._window, LOCAL_WINDOW_BYTES_MAX) if self.local else self._window

    @property
    def reads_on(self) -> bool:
        """Whether the last reads followed one another."""
        return self._run >= 2

    @property
    def missed_weight(self) -> int:
        """What a block that it misses counts for as a sign that all of the object is read in random order: half of the
        jumps go back then. One that only goes forward reads the headers of an archive, and one that jumps after several
        blocks reads what it has chosen."""
        if self._goes_back is None:
            return 1
        return 2 if self._goes_back and min(self._runs) <= BLOCK_BYTES else 0

    def plan(self, offset: int, length: int, size: int) -> tuple[int, int] | None:
        """Bytes [start, stop) to fetch ahead now that [offset, offset + length) of ``size`` is read, if any.

        ``start`` and ``stop`` are multiples of BLOCK_BYTES (``stop``: or the size).
        """
        end = min(offset + length, size)
        if offset > self._front + SLACK_BYTES or offset < self._front - LATE_BYTES_MAX:
            if self._run:
                self._runs = self._front - self._begin, self._runs[0]
                self._goes_back = offset < self._begin
            self._begin, self._front, self._run = offset, end, 1
            self._window, self._issued_to, self.starved = BLOCK_BYTES, 0, False
            return None
        self._begin = min(self._begin, offset)
        if end <= self._front:
            return None
        self._front = end
        self._run += 1
        run_end = self._expected_end(end, size)
        window = self.window_bytes
        if self._begin >= BLOCK_BYTES:
            window = min(window, max(BLOCK_BYTES, (end - self._begin) // UNKNOWN_RUN_SHARE))
        if run_end < size and 2 * min(self._runs) > max(self._runs):
            window = max(window, min(run_end - end, self._window_max))
        if self._run < 2 or self._issued_to - end >= window // 2:
            return None
        start = max(self._issued_to, -(-end // BLOCK_BYTES) * BLOCK_BYTES)
        unit = PIECE_BYTES if window > PIECE_BYTES and run_end == size else BLOCK_BYTES
        stop = min(max((end + window) // unit * unit, start + BLOCK_BYTES), run_end)
        if start >= stop:
            return None
        self._issued_to = stop
        self.starved = False
        self._window = min(window * 2, self._window_max)
        return start, stop

    def _expected_end(self, end: int, size: int) -> int:
        """Where the run ends that has been read up to ``end``, if it is as long as the longer one of the two before, in
        whole blocks; ``size`` where it is longer by more than a block, or nothing is known."""
        expected_end = self._begin + max(self._runs)
        is_longer = end > expected_end + BLOCK_BYTES or not any(self._runs)
        return size if is_longer else min(-(-expected_end // BLOCK_BYTES) * BLOCK_BYTES, size)

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
