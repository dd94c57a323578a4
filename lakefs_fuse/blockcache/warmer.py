"""Fetches whole sets of blocks to the cache disk, in few large GETs. Cached blocks are not requested, so an interrupted
warm continues where it ended. A pack is fetched whole if most of it is requested. GETs are ordered by object and
offset; `GETS_AT_ONCE` are in flight, with three quarters of the reader's budget, so that readers keep the rest. What
always holds: no block is fetched twice; fetched blocks go only to the disk, not into memory; a cancelled caller leaves
no GET that only it needed. A block that the cache disk refuses is an error (*nothing is warm that was not kept*). Trio
thread only; only the blocks survive a crash.
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
"""Enough to fetch 1,000 small objects a second at 15 ms of latency: each waits as long again until it is written
together with others. So readers keep a part of the 32 requests that a client makes concurrently by default, unless the
latency is above 50 ms or so: then a GET of a reader waits behind 16 others at most."""
MOST_OF_PACK = 0.75
"""Share of the blocks of an object that is not cached: if this many are requested, the others are fetched with them."""
PACES_S = 4
"""With a rate limit a GET requests as much as is allowed in this fraction of a second, or one block."""
ROUNDS_MAX = 3
"""A write that the disk refused for a moment, or a block that was damaged, is fetched again."""

Wanted = Mapping[Version, BlockSet]


def blocks_at_once(rate: ByteRate) -> int:
    """Blocks of one GET."""
    most = PIECE_BYTES // BLOCK_BYTES
    return max(1, min(most, rate.bytes_s_max // PACES_S // BLOCK_BYTES)) if rate.bytes_s_max else most


def with_rest_of_packs(wanted: Wanted) -> dict[Version, BlockSet]:
    """All blocks of an object, if most of them are requested."""
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
        """Those of these blocks that are not on the cache disk. The others count as used now."""
        found = await self._disk.inspect(list(wanted), is_use=True)
        left = zip(wanted.items(), found, strict=True)
        return {version: rest for (version, blocks), (here, _) in left if (rest := blocks & ~here)}

    async def fetch(self, missing: Wanted, rate: ByteRate, fetched: Callable[[Version, int], object]) -> list[Version]:
        """Fetch these blocks, which are `missing`, to the cache disk; ``fetched`` is called with the version and number
        of bytes. Returns versions that no longer exist in the store. Raises LakeError: of the store, and CacheError
        where the disk did not keep them."""
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
        """Raises CacheError if the disk does not take the blocks now or a moment later."""
        for _ in range(2):
            await self._reader.fill(version, first, stop)
            if self._cache.state is CacheState.OK or all(await self._disk.has_blocks(version, first, stop)):
                return
            await trio.sleep(FULL_RETRY_S)
        raise self._not_kept()

    def _not_kept(self) -> CacheError:
        why = self._cache.statistics().last_error if self._cache.state is not CacheState.OK else None
        return CacheError(
            f"the cache disk did not keep the fetched blocks ({why or 'damaged, or evicted meanwhile'}): free space on "
            "the disk, or see the log, and run the same command again"
        )


def _gets(missing: Wanted, blocks_max: int) -> Iterator[tuple[Version, int, int]]:
    """Ranges to ask for, by object and offset."""
    for version in sorted(missing, key=lambda version: version.key):
        blocks = missing[version]
        wanted: Sequence[bool] = [digit == "1" for digit in reversed(f"{blocks:b}")]
        for first, stop in runs(0, wanted, blocks_max):
            yield version, first, stop
