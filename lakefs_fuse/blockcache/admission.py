"""Which blocks that jumping readers miss get a place in a full cache.

A data set that is larger than the cache and is read in random order, epoch after epoch, drives out of an LRU cache what
the next epoch needs. So what such a reader misses takes the place of what nobody has used for a while, and of nothing
else: a fixed share of the data set stays, and is found in every epoch. What gets no place is read past the cache, just
the bytes that are wanted.

*For a while* is three times the time after which readers come back to the same bytes, and `SPARED_S_MIN` at least. That
time is half of an epoch at its begin and one and a half at its end, and no file waits for longer than two. It is taken
of a sample of the ranges that are read: of all of them, until there are too many, then of half, and so on.

What always holds: memory is bounded by `SAMPLED_MAX`; a cache in which everything is in use is tried again with one
block each `RETRY_S`, so the next data set gets in when the one before is not used any more. Trio thread only; a restart
begins to measure anew.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict

import trio

from lakefs_fuse.blockcache.object_version import Version

SPARED_S_MIN = 600.0
SPARED_S_MAX = 24 * 3600.0
RETRY_S = 5.0
SAMPLED_MAX = 4096
REUSED_AT_ONCE_S = 1.0
"""The kernel asks for the same range again, or several workers do: not a new epoch."""
WEIGHT = 1 / 16
"""Of the newest time in their mean."""
HASHES = 1 << 32


class AdmissionPolicy:
    """See the module's head. The reader tells what it `read` and asks `admits`; the cache tells what became of that."""

    def __init__(self) -> None:
        self.reuse_s = 0.0
        """After which readers come back to the same bytes; 0: none has."""
        self._closed_until_s = 0.0
        self._sampled: OrderedDict[int, float] = OrderedDict()
        self._hash_max = HASHES

    @property
    def spared_s(self) -> float:
        """Nothing that was used within this time is evicted."""
        return min(max(SPARED_S_MIN, 3 * self.reuse_s), SPARED_S_MAX)

    @property
    def is_open(self) -> bool:
        """Whether the last block that was missed got a place."""
        return not self._closed_until_s

    def read(self, version: Version, offset: int) -> None:
        """A jumping reader asks for bytes from ``offset`` on."""
        key = zlib.crc32(b"%d" % offset, zlib.crc32(version.etag.encode()))
        if key >= self._hash_max:
            return
        now_s = trio.current_time()
        before_s = self._sampled.pop(key, None)
        self._sampled[key] = now_s
        if before_s is not None and now_s - before_s > REUSED_AT_ONCE_S:
            weight = WEIGHT if self.reuse_s else 1.0
            self.reuse_s += weight * (now_s - before_s - self.reuse_s)
        if len(self._sampled) > SAMPLED_MAX:
            self._hash_max //= 2
            self._sampled = OrderedDict(each for each in self._sampled.items() if each[0] < self._hash_max)

    def admits(self) -> bool:
        """Whether to bring a block that was missed into the cache. Where it was full before, one in a while is tried:
        True for that, too."""
        if self.is_open:
            return True
        now_s = trio.current_time()
        if now_s < self._closed_until_s:
            return False
        self._closed_until_s = now_s + RETRY_S
        return True

    def kept(self, *, has_place: bool) -> None:
        """A block that was admitted got a place, or all that lies there is in use."""
        self._closed_until_s = 0.0 if has_place else trio.current_time() + RETRY_S
