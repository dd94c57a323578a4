"""The division of a file into the parts of a multipart upload and into pages, and which of its pages are staged. The
layout depends on the size of the staging area, not on that of the file. Parts grow along the file, so that the first is
ready early and 10,000 of them still hold more than 5 TiB; with staging below 8 GiB they stop growing earlier, and hold
less. All are multiples of the cache block, so that no block is in two parts. The new bytes of an appended file have
another layout (`upload.missing_parts.Append`).

A page map has one bit for each 4 KiB page, kept per part as an integer and as ``FULL`` once a part is whole, so that a
file written front to back costs a few bytes a part and the worst case (random pages of a huge file) 32 bytes a MiB.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping

from lakefs_fuse.config import GIB, MIB, TIB
from lakefs_fuse.store.protocol import PARTS_MAX

SPANS = ((16 * MIB, 1000), (64 * MIB, 1000), (256 * MIB, 2000), (1 * GIB, 6000))
"""(part size in bytes, number of parts), in order along the file; 6.4 TiB in total. Stored data depend on it: records
of drafts number their parts by it, and `admin.checkpoint_sums` computes ETags of stored objects by it. New spans must
keep the old ones there, and need a version in the record."""

OBJECT_BYTES_MAX = 5 * TIB
"""S3 holds no larger object."""
STAGING_PARTS_MIN = 8
"""This many parts of the largest size must fit in staging, or a writer could not continue while parts are uploaded."""
PAGE_BYTES = 4096
FULL = -1
"""All bits set: in Python's integers every bit of -1 is one, so it needs no case of its own when read."""


class PartLayout:
    """Part ``i`` (from 0) covers bytes ``range(i)``. ``file_bytes_max`` is the size that fits in 10,000 parts and an
    object, and ``part_bytes_max`` the size of the last parts, which distinguishes layouts of the same spans."""

    def __init__(self, spans: tuple[tuple[int, int], ...] = SPANS, *, staging_bytes_max: int | None = None) -> None:
        """``staging_bytes_max`` keeps parts small enough for a small staging area; the largest file, `file_bytes_max`,
        is then below 5 TiB."""
        self._spans = spans
        cap = max(spans[0][0], staging_bytes_max // STAGING_PARTS_MIN) if staging_bytes_max else spans[-1][0]
        self._sizes: list[int] = []
        self._first_parts: list[int] = []
        self._first_bytes: list[int] = []
        part, at = 0, 0
        usable = [(size, count) for size, count in spans if size <= cap]
        for index, (size, count) in enumerate(usable):
            if index == len(usable) - 1:
                count = PARTS_MAX - part
            self._sizes.append(size)
            self._first_parts.append(part)
            self._first_bytes.append(at)
            part += count
            at += size * count
        self.file_bytes_max = min(at, OBJECT_BYTES_MAX)
        self.single_bytes_max, self.part_bytes_max = self._sizes[0], self._sizes[-1]

    def variants(self) -> list[PartLayout]:
        """Every layout that these spans have with some size of staging; this one first."""
        others = (size for size, _ in self._spans if size != self.part_bytes_max)
        return [self, *(PartLayout(self._spans, staging_bytes_max=size * STAGING_PARTS_MIN) for size in others)]

    def index(self, offset: int) -> int:
        """The part that holds the byte at ``offset``."""
        span = bisect_right(self._first_bytes, offset) - 1
        return self._first_parts[span] + (offset - self._first_bytes[span]) // self._sizes[span]

    def range(self, part: int) -> tuple[int, int]:
        """Bytes [start, end) of a full part."""
        span = bisect_right(self._first_parts, part) - 1
        start = self._first_bytes[span] + (part - self._first_parts[span]) * self._sizes[span]
        return start, start + self._sizes[span]

    def count(self, size: int) -> int:
        """How many parts a file of ``size`` bytes has; an empty file has none."""
        return self.index(size - 1) + 1 if size else 0


class PageMap:
    """Pages that are local, by part. Byte ranges are widened to whole pages."""

    def __init__(self, layout: PartLayout) -> None:
        self._layout = layout
        self._bits: dict[int, int] = {}
        self.pages = 0

    def _slices(self, start: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """(part, first page in the part, pages, pages in a whole part) for every part that [start, end) touches."""
        start -= start % PAGE_BYTES
        while start < end:
            part = self._layout.index(start)
            begin, stop = self._layout.range(part)
            upto = min(end, stop)
            first = (start - begin) // PAGE_BYTES
            yield part, first, -(-(upto - begin) // PAGE_BYTES) - first, (stop - begin) // PAGE_BYTES
            start = stop

    def mark(self, start: int, end: int) -> int:
        """Mark the pages of [start, end) as local; returns how many were not before."""
        added = 0
        for part, first, count, whole in self._slices(start, end):
            bits = self._bits.get(part, 0)
            if bits == FULL:
                continue
            mask = ((1 << count) - 1) << first
            added += count - (bits & mask).bit_count()
            bits |= mask
            self._bits[part] = FULL if bits == (1 << whole) - 1 else bits
        self.pages += added
        return added

    def covers(self, start: int, end: int) -> bool:
        """Every page of [start, end) is local."""
        return all(
            (self._bits.get(part, 0) >> first) & ((1 << count) - 1) == (1 << count) - 1
            for part, first, count, _ in self._slices(start, end)
        )

    def count(self, start: int, end: int) -> int:
        """How many pages of [start, end) are local."""
        return sum(
            ((self._bits.get(part, 0) >> first) & ((1 << count) - 1)).bit_count()
            for part, first, count, _ in self._slices(start, end)
        )

    def first(self) -> int | None:
        """Where the first local page begins; None without any."""
        part = min((part for part, bits in self._bits.items() if bits), default=None)
        if part is None:
            return None
        bits = self._bits[part]
        return self._layout.range(part)[0] + ((bits & -bits).bit_length() - 1) * PAGE_BYTES

    def last(self) -> int | None:
        """Where the last local page begins; None without any."""
        part = max((part for part, bits in self._bits.items() if bits), default=None)
        if part is None:
            return None
        begin, stop = self._layout.range(part)
        bits = self._bits[part]
        return stop - PAGE_BYTES if bits == FULL else begin + (bits.bit_length() - 1) * PAGE_BYTES

    def runs(self, start: int, end: int) -> Iterator[tuple[int, int, bool]]:
        """[start, end) cut where it changes between local and not: (from, to, local), in order."""
        at, state = start, None
        for part, first, count, _ in self._slices(start, end):
            bits = self._bits.get(part, 0)
            begin = self._layout.range(part)[0]
            mask = (1 << count) - 1
            window = (bits >> first) & mask
            pieces = [(0, window != 0)] if window in (0, mask) else _pieces(window, count)
            for page, local in pieces:
                if state is not None and local != state:
                    edge = max(start, begin + (first + page) * PAGE_BYTES)
                    yield at, edge, state
                    at = edge
                state = local
        if at < end:
            yield at, end, bool(state)

    def truncate(self, size: int) -> int:
        """Forget pages that are completely beyond ``size``; returns how many."""
        before = self.pages
        last = self._layout.index(size) if size else 0
        for part in [part for part in self._bits if part > last]:
            self.forget(part)
        bits = self._bits.get(last)
        if bits is not None:
            begin, stop = self._layout.range(last)
            keep = -(-(size - begin) // PAGE_BYTES)
            whole = (stop - begin) // PAGE_BYTES
            if bits == FULL:
                bits = (1 << whole) - 1
            kept = bits & ((1 << keep) - 1)
            self.pages -= bits.bit_count() - kept.bit_count()
            self._bits[last] = FULL if kept == (1 << whole) - 1 else kept
        return before - self.pages

    def forget(self, part: int) -> int:
        """Mark no page of the part as local; returns how many were."""
        bits = self._bits.pop(part, 0)
        begin, stop = self._layout.range(part)
        gone = (stop - begin) // PAGE_BYTES if bits == FULL else bits.bit_count()
        self.pages -= gone
        return gone

    def dump(self) -> dict[int, bytes]:
        """For the journal: part → bits, little-endian; empty bytes stand for a whole part."""
        return {
            part: b"" if bits == FULL else bits.to_bytes((bits.bit_length() + 7) // 8 or 1, "little")
            for part, bits in self._bits.items()
        }

    def load(self, dumped: Mapping[int, bytes]) -> None:
        """Replace everything with what `dump` returned."""
        self._bits = {part: int.from_bytes(raw, "little") if raw else FULL for part, raw in dumped.items()}
        self.pages = 0
        for part, bits in self._bits.items():
            begin, stop = self._layout.range(part)
            self.pages += (stop - begin) // PAGE_BYTES if bits == FULL else bits.bit_count()


def _pieces(window: int, count: int) -> list[tuple[int, bool]]:
    """Where the lowest ``count`` bits change: the first page of each run, and whether it is local. A byte at a time, as
    each operation on a large integer copies it."""
    changes = (window ^ (window << 1)) & ((1 << count) - 1) & ~1
    local = bool(window & 1)
    pieces = [(0, local)]
    for number, byte in enumerate(changes.to_bytes((count + 7) // 8, "little")):
        rest = byte
        while rest:
            lowest = rest & -rest
            rest ^= lowest
            local = not local
            pieces.append((8 * number + lowest.bit_length() - 1, local))
    return pieces
