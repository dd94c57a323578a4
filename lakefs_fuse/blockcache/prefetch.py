"""Background prefetch of whole objects that are read at random, into free room of the cache.

A program that draws samples at random from a pack or a large file reads nearly all of it in the end. Block by block
each sample costs a round trip, while the rest of the object costs a few large GETs. So an object is fetched completely
when random readers have missed one block in `MISSED_SHARE`, one object at a time. Until a block has arrived, a small
file in it is read alone, without caching: a GET of a whole block would take longer, and split the large GETs.

What always holds: prefetch evicts nothing (an object that does not fit the free space is skipped, and a prefetch ends
where others have used that space meanwhile), fetches no block twice, leaves half of the reader's memory to readers, and
ends quietly on an error: readers fetch the blocks that they need themselves. Files that are read alone are at most one
byte in `ALONE_SHARE` of their object: only these bytes are fetched twice. Trio thread only; nothing needs to survive a
crash.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable

import trio

from lakefs_fuse.blockcache.cache import BlockCache, CacheState
from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.errors import CacheError, LakeError
from lakefs_fuse.metrics import CacheMetrics
from lakefs_fuse.sync.nursery import for_each

MISSED_SHARE = 16
"""One block of this many is enough to go by …"""
MISSED_MIN = 4
"""… and no fewer blocks than this."""
FETCHES_AT_ONCE = 4
"""If half of the reader's memory has room for them."""
ALONE_SHARE = 16
ALONE_BYTES_MAX = 256 << 10
"""A larger file costs about what its blocks cost."""
COUNTED_MAX = 4096
"""Objects whose missed blocks are counted; those that missed longest ago are forgotten."""
_log = logging.getLogger(__name__)


class ObjectPrefetch:
    """See the module's head. ``fill(version, first, stop)`` fetches the missing ones of blocks [first, stop) into free
    space of the cache; it returns False if there is none, and raises LakeError. It is called for ``blocks_max`` blocks,
    ``fetches_at_once`` times concurrently."""

    def __init__(
        self,
        cache: BlockCache,
        metrics: CacheMetrics,
        nursery: trio.Nursery,
        fill: Callable[[Version, int, int], Awaitable[bool]],
        blocks_max: int,
        fetches_at_once: int = FETCHES_AT_ONCE,
    ) -> None:
        self._cache, self._metrics, self._nursery = cache, metrics, nursery
        self._fill, self._blocks_max, self._fetches_at_once = fill, blocks_max, fetches_at_once
        self._missed: OrderedDict[Version, int] = OrderedDict()
        self._waiting: deque[Version] = deque()
        self._fetched: Version | None = None
        self._alone_bytes: dict[Version, int] = {}
        """Bytes that may still be read alone of objects that are being fetched, or wait for it."""

    def missed(self, version: Version, blocks: int) -> None:
        """Count ``blocks`` that a jumping reader had to wait for; may begin a prefetch."""
        if version.blocks <= MISSED_MIN:
            return
        count = self._missed.pop(version, 0) + blocks
        is_enough = count >= max(MISSED_MIN, version.blocks // MISSED_SHARE)
        self._missed[version] = 0 if is_enough else count  # counted again if it does not fit now, or is evicted later
        if len(self._missed) > COUNTED_MAX:
            self._missed.popitem(last=False)
        if is_enough and not self.is_coming(version) and self._fits(version):
            if self._fetched is None and not self._waiting:
                self._nursery.start_soon(self._run)
            self._waiting.append(version)
            self._alone_bytes[version] = version.size // ALONE_SHARE

    def is_coming(self, version: Version) -> bool:
        """Whether the object is being fetched, or waits for it."""
        return version in self._alone_bytes

    def take_alone(self, version: Version, size: int) -> bool:
        """Whether to read a file, or the rest of it, of ``size`` bytes that have not arrived yet alone; counts them."""
        left = self._alone_bytes.get(version, 0) - size
        if size > ALONE_BYTES_MAX or left < 0:
            return False
        self._alone_bytes[version] = left
        return True

    def _fits(self, version: Version) -> bool:
        wanted = [version, *self._waiting, *([self._fetched] if self._fetched is not None else [])]
        return self._cache.state is CacheState.OK and self._cache.writable and self._cache.has_room(wanted)

    async def _run(self) -> None:
        while self._waiting:
            self._fetched = version = self._waiting.popleft()
            try:
                await self._fetch(version)
                self._metrics.fetched_whole += 1
            except LakeError as error:
                _log.info("%s is not fetched whole: %s", version.key, error)
            except Exception:
                _log.exception("fetching %s whole", version.key)
            finally:
                self._fetched = None
                self._alone_bytes.pop(version, None)

    async def _fetch(self, version: Version) -> None:
        async def fill(first: int) -> None:
            if not await self._fill(version, first, min(first + self._blocks_max, version.blocks)):
                raise CacheError("the cache has no free space left")

        await for_each(range(0, version.blocks, self._blocks_max), fill, self._fetches_at_once)
