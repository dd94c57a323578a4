"""The blocks read last, in memory.

The kernel makes many small reads of one block: memory serves them.

What always holds (*bounded memory*): the buffers that entries refer to take at most ``bytes_max``. A GET of several
blocks is one buffer that lives until its last block is dropped, so buffers count, not blocks. Trio thread only;
nothing survives a crash.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from lakefs_fuse.blockcache.object_version import Version

ENTRY_BYTES = 1024
"""Cost of an entry beside its bytes, so that a million tiny objects are bounded too."""


class _Slab:
    """One buffer, and how many entries refer to it."""

    __slots__ = ("cost", "entries")

    def __init__(self, cost: int, entries: int) -> None:
        self.cost = cost
        self.entries = entries


class RecentBlocks:
    """An LRU of verified blocks."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes_used = 0
        self._entries: OrderedDict[tuple[Version, int], tuple[memoryview, _Slab]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: tuple[Version, int]) -> bool:
        return key in self._entries

    def get(self, version: Version, index: int) -> memoryview | None:
        """The block, now the most recent one; None where it is not here. ``~offset`` instead of an index is a range
        that was read without caching, from this offset."""
        key = (version, index)
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, version: Version, first: int, blocks: Sequence[memoryview]) -> None:
        """Keep adjacent blocks, slices that make up one buffer."""
        slab = _Slab(sum(map(len, blocks)) + ENTRY_BYTES * len(blocks), len(blocks))
        self.bytes_used += slab.cost
        for place, block in enumerate(blocks):
            key = (version, first + place)
            self._let_go(self._entries.pop(key, None))
            self._entries[key] = (block, slab)
        while self.bytes_used > self.bytes_max:
            self._let_go(self._entries.popitem(last=False)[1])

    def _let_go(self, entry: tuple[memoryview, _Slab] | None) -> None:
        if entry is not None:
            slab = entry[1]
            slab.entries -= 1
            if not slab.entries:
                self.bytes_used -= slab.cost
