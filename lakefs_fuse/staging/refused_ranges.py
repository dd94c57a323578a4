"""Byte ranges of a file whose writes were refused. A version with such ranges is never published. What always holds
(*refused writes unpublished*): a range stays until it is written again or truncated. There are `RANGES_MAX` of them at
most; beyond that the two nearest become one, which must then be written again as a whole. Values of the trio thread;
the journal record carries them over a crash.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

from lakefs_fuse.errors import FileError, LakeError

RANGES_MAX = 256
"""A journal record of this many ranges is about 4 KiB."""
RANGES_SHOWN_MAX = 4
KILLED = errno.EOWNERDEAD
"""The errno of a range that was never written, because the writer was killed before it closed the file. No program
waits for it."""
UNKNOWN = "the disk was too full to journal which bytes"


class RefusedRanges:
    """Sorted, disjoint ranges [start, end), the errno that the first write got, and its message."""

    __slots__ = ("errno", "is_waived", "ranges", "why")

    def __init__(self, ranges: Sequence[tuple[int, int]] = (), code: int = 0, why: str = "") -> None:
        self.ranges = list(ranges)
        self.errno, self.why = code, why
        self.is_waived = False
        """True if the user has asked to store the version without them."""

    def __bool__(self) -> bool:
        return bool(self.ranges)

    @property
    def bytes_missing(self) -> int:
        return sum(end - start for start, end in self.ranges)

    def add(self, start: int, end: int, error: BaseException) -> None:
        """A write of [start, end) failed with ``error``."""
        if not self.ranges:
            self.errno = error.errno if isinstance(error, LakeError) else errno.EIO
            self.why = str(error) or type(error).__name__
        self._merge(start, end)

    def _merge(self, start: int, end: int) -> None:
        apart = [each for each in self.ranges if each[1] < start or end < each[0]]
        touching = [each for each in self.ranges if not (each[1] < start or end < each[0])]
        whole = min([start, *(begin for begin, _ in touching)]), max([end, *(upto for _, upto in touching)])
        self.ranges = sorted([*apart, whole])
        if len(self.ranges) > RANGES_MAX:
            at = min(range(RANGES_MAX), key=lambda i: self.ranges[i + 1][0] - self.ranges[i][1])
            self.ranges[at : at + 2] = [(self.ranges[at][0], self.ranges[at + 1][1])]

    def remove(self, start: int, end: int) -> None:
        """Record that bytes [start, end) were written again."""
        left = []
        for begin, upto in self.ranges:
            left += [(a, b) for a, b in ((begin, min(upto, start)), (max(begin, end), upto)) if a < b]
        self.ranges = left

    def cut(self, size: int) -> None:
        """The file was truncated to ``size`` bytes."""
        self.ranges = [(start, min(end, size)) for start, end in self.ranges if start < size]

    def move_to(self, other: RefusedRanges) -> None:
        """Move these ranges to ``other``."""
        other._absorb(self)
        self.ranges = []

    def _absorb(self, other: RefusedRanges) -> None:
        if other.ranges and not self.ranges:
            self.errno, self.why = other.errno, other.why
        for start, end in other.ranges:
            self._merge(start, end)

    def waive(self) -> None:
        """Let the version be stored without these bytes. That is not journaled: after a crash it is asked for again."""
        self.is_waived = True

    def describe(self) -> str:
        """The missing ranges, in one line."""
        if self.errno == KILLED:
            return self.why
        shown = ", ".join(f"{start} to {end}" for start, end in self.ranges[:RANGES_SHOWN_MAX])
        more = len(self.ranges) - RANGES_SHOWN_MAX
        return f"bytes {shown}{f' and {more} more ranges' if more > 0 else ''} were refused ({self.why})"

    def check(self, path: str) -> None:
        """Raise FileError, with the errno of the first refused write, if there are any ranges; not if `waive`d."""
        if self.ranges and not self.is_waived:
            remedy = "save it" if self.errno == KILLED else "write them"
            raise FileError(
                self.errno or errno.EIO,
                f"{path} is not stored: {self.describe()}; {remedy} again, truncate or remove the file",
            )
