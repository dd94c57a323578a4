"""Readahead: when to fetch beyond a reader, and how far. One planner per open handle. A handle that reads sequentially
gets a window that doubles up to ``window_bytes_max``; after a jump it gets none until it reads sequentially again. The
kernel splits one read into several and sends them concurrently, so a read counts as sequential within ``SLACK_BYTES``
beyond the front and `LATE_BYTES_MAX` before it, and a late piece changes nothing. A sequence of such reads is a *run*.
A reader of row groups, or of some tensors of a checkpoint, makes runs of one length: a plan ends where a run as long as
the longer of the previous two would end, and is made immediately if those had equal lengths. A run beyond that is
planned as one of unknown length: by a quarter of its present length, unless it began with the object, which then is
likely to be read to its end. So a wrong guess costs at most a tenth of the bytes read (0167). Pure logic for the trio
thread; the reader calls `dropped` if it did not follow the plan.
"""

from __future__ import annotations

from typing import NamedTuple

from lakefs_fuse.blockcache.object_version import BLOCK_BYTES

PIECE_BYTES = 8 * BLOCK_BYTES
"""Largest range of one GET. Larger plans end at a multiple of it, so that they are whole pieces."""
WINDOW_BYTES_MAX = 32 << 20
LOCAL_WINDOW_BYTES_MAX = 4 << 20
"""Window if the cache disk has the next blocks: there is little latency to hide."""
SLACK_BYTES = 2 << 20
"""Maximum distance of a sequential read beyond the front …"""
LATE_BYTES_MAX = 4 << 20
"""… and before it: the kernel sends the pieces of a page fault in any order."""
UNKNOWN_RUN_SHARE = 4
WHOLE_BYTES_MAX = 4 * BLOCK_BYTES
"""An object up to this size is fetched whole by the first read of any part of it."""


class _Run:
    """This many ``reads`` that followed one another: bytes from ``begin`` up to ``front``."""

    __slots__ = ("begin", "front", "reads")

    def __init__(self, begin: int, front: int, reads: int) -> None:
        self.begin, self.front, self.reads = begin, front, reads

    def add(self, offset: int, end: int) -> bool:
        """Add a read; returns whether it goes beyond the front."""
        self.begin = min(self.begin, offset)
        if end <= self.front:
            return False
        self.front = end
        self.reads += 1
        return True


class _Earlier(NamedTuple):
    """The record of the runs before this one."""

    last_bytes: int = 0
    """Length of the last run that ended; 0: there was none."""
    before_bytes: int = 0
    """Of the one before that."""
    goes_back: bool | None = None
    """Whether this run begins before the last one; None: it is the first."""

    @property
    def shorter_bytes(self) -> int:
        return min(self.last_bytes, self.before_bytes)

    @property
    def longer_bytes(self) -> int:
        return max(self.last_bytes, self.before_bytes)


class Readahead:
    """``plan`` is called with every read, before or after it is served, in any order within the slack."""

    __slots__ = ("_earlier", "_issued_to", "_run", "_window", "local", "starved")

    def __init__(self) -> None:
        self._window = BLOCK_BYTES
        self.local = False
        """Whether the last plan was on the cache disk already."""
        self.starved = False
        """Whether the last plan was dropped for lack of memory."""
        self._issued_to = 0
        self._run, self._earlier = _Run(0, 0, 0), _Earlier()

    @property
    def window_bytes(self) -> int:
        """How far the next plan reaches beyond the front."""
        return min(self._window, LOCAL_WINDOW_BYTES_MAX) if self.local else self._window

    @property
    def reads_on(self) -> bool:
        """Whether the last reads followed one another."""
        return self._run.reads >= 2

    @property
    def missed_weight(self) -> int:
        """The weight of a missed block as a sign that the whole object is read in random order: then half of the jumps
        go back. A reader that only jumps forward reads the headers of an archive, and one that jumps after several
        blocks reads selected ranges."""
        if self._earlier.goes_back is None:
            return 1
        return 2 if self._earlier.goes_back and self._earlier.shorter_bytes <= BLOCK_BYTES else 0

    def plan(self, offset: int, length: int, size: int) -> tuple[int, int] | None:
        """Bytes [start, stop) to fetch ahead now that [offset, offset + length) of ``size`` is read, if any.

        ``start`` and ``stop`` are multiples of BLOCK_BYTES (``stop``: or the size).
        """
        end, run, earlier = min(offset + length, size), self._run, self._earlier
        if offset > run.front + SLACK_BYTES or offset < run.front - LATE_BYTES_MAX:
            if run.reads:
                self._earlier = _Earlier(run.front - run.begin, earlier.last_bytes, offset < run.begin)
            self._run = _Run(offset, end, 1)
            self._window, self._issued_to, self.starved = BLOCK_BYTES, 0, False
            return None
        if not run.add(offset, end):
            return None
        run_end = self._expected_end(end, size)
        window = self.window_bytes
        if run.begin >= BLOCK_BYTES:
            window = min(window, max(BLOCK_BYTES, (end - run.begin) // UNKNOWN_RUN_SHARE))
        if run_end < size and 2 * earlier.shorter_bytes > earlier.longer_bytes:
            window = max(window, min(run_end - end, WINDOW_BYTES_MAX))
        if run.reads < 2 or self._issued_to - end >= window // 2:
            return None
        start = max(self._issued_to, -(-end // BLOCK_BYTES) * BLOCK_BYTES)
        unit = PIECE_BYTES if window > PIECE_BYTES and run_end == size else BLOCK_BYTES
        stop = min(max((end + window) // unit * unit, start + BLOCK_BYTES), run_end)
        if start >= stop:
            return None
        self._issued_to = stop
        self.starved = False
        self._window = min(window * 2, WINDOW_BYTES_MAX)
        return start, stop

    def _expected_end(self, end: int, size: int) -> int:
        """The end of the run that has been read up to ``end``, in whole blocks, if it gets as long as the longer of the
        two before; ``size`` if it is longer by more than a block, or no run is known."""
        expected_end = self._run.begin + self._earlier.longer_bytes
        is_longer = end > expected_end + BLOCK_BYTES or not self._earlier.longer_bytes
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
