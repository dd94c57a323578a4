"""Decides which blocks missed by random readers are admitted to a full cache. A dataset that is larger than the cache
and is read in random order, epoch after epoch, evicts from an LRU cache the blocks that the next epoch needs. So a
block missed by such a reader only replaces blocks that were not used for a while: a fixed share of the dataset stays,
and is hit in every epoch. Bytes that are not admitted are read without caching, only as many as requested.

*For a while* is three times the time after which readers come back to the same bytes, and `SPARED_S_MIN` at least. That
time is half of an epoch at its begin and one and a half at its end, and no file waits for longer than two. It is
measured on a sample of the ranges that are read: on all of them, until there are too many, then on half, and so on.
What always holds: memory is bounded by `SAMPLED_MAX`; a cache in which everything is in use is tried again with one
block every `RETRY_S`, so the next dataset is admitted when the previous one is no longer used. Trio thread only; a
restart begins to measure again.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from enum import Enum

import trio

from lakefs_fuse.blockcache.object_version import Version

SPARED_S_MIN = 600.0
SPARED_S_MAX = 24 * 3600.0
RETRY_S = 5.0
SAMPLED_MAX = 4096
REUSED_AT_ONCE_S = 1.0
"""The kernel asks for the same range again, or several workers do: not a new epoch."""
WEIGHT = 1 / 16
"""Weight of the newest time in the mean."""
HASHES = 1 << 32


class Evicts(Enum):
    """Which blocks a write may evict to free space for its own."""

    ANY = "any"
    UNUSED = "unused"
    """None in use: the write is for a random reader."""
    NONE = "none"
    """The write is for a prefetch."""


class AdmissionPolicy:
    """See the module's head. The reader reports ranges with `read` and asks `admits`; the cache reports the result."""

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
        """Whether the last missed block was admitted."""
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
        """Whether to admit a missed block to the cache. If the cache was full before, one block is tried at intervals:
        True for that, too."""
        if self.is_open:
            return True
        now_s = trio.current_time()
        if now_s < self._closed_until_s:
            return False
        self._closed_until_s = now_s + RETRY_S
        return True

    def kept(self, *, has_place: bool) -> None:
        """Record that an admitted block was stored, or that everything in the cache is in use."""
        self._closed_until_s = 0.0 if has_place else trio.current_time() + RETRY_S
