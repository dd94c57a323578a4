"""How a file is cut into the parts of a multipart upload: the same cut for every file, whatever its final size.

Sizes grow along the file, so that the first part is ready early and 10,000 parts still hold more than 5 TiB. All sizes
are multiples of the cache block, so that no block lies in two parts.
"""

from __future__ import annotations

from bisect import bisect_right

from lakefs_fuse.config import GIB, MIB
from lakefs_fuse.store.protocol import PARTS_MAX

SPANS = ((16 * MIB, 1000), (64 * MIB, 1000), (256 * MIB, 2000), (1 * GIB, 6000))
"""(part size in bytes, how many parts of it), in order along the file; 6.4 TiB in all."""

STAGING_PARTS_MIN = 8
"""So many parts of the largest size must fit in staging, or a writer could not go on while parts are uploaded."""


class PartLayout:
    """Part ``i`` (from 0) covers bytes ``range(i)``. ``file_bytes_max`` is what fits in 10,000 parts."""

    def __init__(self, spans: tuple[tuple[int, int], ...] = SPANS, *, staging_bytes_max: int | None = None) -> None:
        """``staging_bytes_max`` keeps parts small enough for a small staging area; large files then stop short of
        5 TiB, and `file_bytes_max` says where."""
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
        self.file_bytes_max = at
        self.single_bytes_max = self._sizes[0]

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
