"""Whole sets of blocks brought to the cache disk, in few large GETs.

Blocks that are here are not asked for, so a warm that was interrupted goes on where it ended. A pack of which most is
wanted is fetched whole. GETs go by object and offset; `GETS_AT_ONCE` are in flight, of three
quarters of the reader's budget in all, which leaves readers a part of it.

What always holds: no block is fetched twice; what is fetched goes to the disk only, not into memory; a caller that is
cancelled leaves no GET behind that only it wanted. What the cache disk refuses is an error (*nothing is warm that was
not kept*). Trio thread only; nothing survives a crash but the blocks.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence

import trio

from lakefs_fuse.blockcache.cache import CacheState
from lakefs_fuse.blockcache.cache_file import ALIGN_BYTES, Layout
from lakefs_fuse.blockcache.fetches import runs
from lakefs_fuse.blockcache.health import FULL_RETRY_S
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, BlockSet, Version, block_range
from lakefs_fuse.blockcache.readahead import PIECE_BYTES
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.errors import CacheError, FileError
from lakefs_fuse.sync.byte_budget import ByteBudget
from lakefs_fuse.sync.byte_rate import ByteRate
from lakefs_fuse.sync.nursery import for_each

GETS_AT_ONCE = 48
"""Enough for small objects at 15 ms of latency to come at 1,000 a second: each waits as long again until it is written
together with others. So readers have a part of the 32 requests that a client makes at a time by default, unless the
latency is above 50 ms or so: then a GET of theirs waits behind 16 others at most."""
MOST_OF_PACK = 0.75
"""Of the blocks of an object that is not here: if this many are wanted, the others come with them."""
PACES_S = 4
"""With a rate limit a GET asks for what may come in one part of a second of so many, or for one block."""
ROUNDS_MAX = 3
"""A write that the disk refused for a moment, or a block that was damaged, is fetched again."""

Wanted = Mapping[Version, BlockSet]


def blocks_at_once(rate: ByteRate) -> int:
    """Blocks of one GET."""
    most = PIECE_BYTES // BLOCK_BYTES
    return max(1, min(most, rate.bytes_s_max // PACES_S // BLOCK_BYTES)) if rate.bytes_s_max else most


def with_rest_of_packs(wanted: Wanted) -> dict[Version, BlockSet]:
    """All blocks of an object of which most are wanted."""
    return {
        version: block_range(0, version.blocks) if blocks.bit_count() >= MOST_OF_PACK * version.blocks else blocks
        for version, blocks in wanted.items()
    }


def disk_bytes(version: Version, blocks: BlockSet) -> int:
    """Disk space of these blocks in the cache, with the index of their file."""
    layout = Layout.for_size(version.size)
    absent = version.blocks - blocks.bit_count()
    return max(ALIGN_BYTES, layout.disk_bytes_max - absent * BLOCK_BYTES)


class Warmer:
    """See the module's head."""

    def __init__(self, reader: BlockReader) -> None:
        self._reader, self._disk, self._cache = reader, reader.disk, reader.disk.blocks
        self._budget = ByteBudget(reader.inflight_bytes_max * 3 // 4)

    async def missing(self, wanted: Wanted) -> dict[Version, BlockSet]:
        """Blocks of these that are not on the cache disk. The others count as used now."""
        found = await self._disk.inspect(list(wanted), is_use=True)
        left = zip(wanted.items(), found, strict=True)
        return {version: rest for (version, blocks), (here, _) in left if (rest := blocks & ~here)}

    async def fetch(self, missing: Wanted, rate: ByteRate, fetched: Callable[[Version, int], object]) -> list[Version]:
        """Bring these blocks, which are `missing`, to the cache disk; ``fetched`` is told of which version how many
        bytes came. Returns versions that are gone from the store. Raises LakeError: of the store, and CacheError where
        the disk did not keep them."""
        gone = dict[Version, None]()

        async def get(each: tuple[Version, int, int]) -> None:
            version, first, stop = each
            count = min(stop * BLOCK_BYTES, version.size) - first * BLOCK_BYTES
            await self._budget.acquire(count)
            try:
                await rate.wait(count)
                if version not in gone:
                    await self._fill(version, first, stop)
                    fetched(version, count)
            except FileError as error:
                if error.errno != errno.ESTALE:
                    raise
                gone[version] = None
            finally:
                self._budget.release(count)

        left = missing
        for _ in range(ROUNDS_MAX):
            await for_each(_gets(left, blocks_at_once(rate)), get, GETS_AT_ONCE)
            left = await self.missing({version: blocks for version, blocks in left.items() if version not in gone})
            if not left:
                return list(gone)
        raise self._not_kept()

    async def _fill(self, version: Version, first: int, stop: int) -> None:
        """Raises CacheError where the disk does not take the blocks now, nor a moment later."""
        for _ in range(2):
            await self._reader.fill(version, first, stop)
            if self._cache.state is CacheState.OK or all(await self._disk.has_blocks(version, first, stop)):
                return
            await trio.sleep(FULL_RETRY_S)
        raise self._not_kept()

    def _not_kept(self) -> CacheError:
        why = self._cache.statistics().last_error if self._cache.state is not CacheState.OK else None
        return CacheError(
            f"the cache disk did not keep what was fetched ({why or 'damaged, or evicted meanwhile'}): make room "
            "on the disk, or see the log, and run the same command again"
        )


def _gets(missing: Wanted, blocks_max: int) -> Iterator[tuple[Version, int, int]]:
    """Ranges to ask for, by object and offset."""
    for version in sorted(missing, key=lambda version: version.key):
        blocks = missing[version]
        wanted: Sequence[bool] = [digit == "1" for digit in reversed(f"{blocks:b}")]
        for first, stop in runs(0, wanted, blocks_max):
            yield version, first, stop
