"""Blocks that were fetched, on their way to the cache disk behind those who read them.

What always holds: who waits for a write knows when it has been tried, whatever became of it (that is the cache's
matter); small ones wait for each other, `GATHER_S` at most, and are written by one thread one after another, because
handing work to a thread and taking it back costs more than writing it. Bytes are bounded by who calls. Trio thread
only; a crash loses what is on its way, which is fetched again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version

_log = logging.getLogger(__name__)

WRITING_THREADS_MAX = 2
GATHER_S = 0.02
GATHER_BYTES_MAX = 4 * BLOCK_BYTES
"""Written by one thread at a time, about."""
SMALL_BYTES_MAX = BLOCK_BYTES // 2
"""What is larger is worth a thread of its own."""


@dataclass(slots=True)
class _Gathered:
    runs: list[tuple[Version, int, Sequence[memoryview]]] = field(default_factory=list)
    bytes_total: int = 0
    full: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)


class WriteBehind:
    """See the module's head."""

    def __init__(self, cache: BlockCache, nursery: trio.Nursery) -> None:
        self._cache, self._nursery = cache, nursery
        self._threads = trio.CapacityLimiter(WRITING_THREADS_MAX)
        self._gathering: _Gathered | None = None

    async def write(self, version: Version, first: int, blocks: Sequence[memoryview]) -> None:
        """Adjacent blocks are on the disk, or cannot be, when this returns. The cache's reader waits for it."""
        size = sum(map(len, blocks))
        if size > SMALL_BYTES_MAX:
            await self._write([(version, first, blocks)])
            return
        gathered = self._gathering
        if gathered is None:
            gathered = self._gathering = _Gathered()
            self._nursery.start_soon(self._write_gathered, gathered)
        gathered.runs.append((version, first, blocks))
        gathered.bytes_total += size
        if gathered.bytes_total >= GATHER_BYTES_MAX:
            self._gathering = None
            gathered.full.set()
        await gathered.done.wait()

    async def _write_gathered(self, gathered: _Gathered) -> None:
        try:
            try:
                with trio.move_on_after(GATHER_S):
                    await gathered.full.wait()
            finally:
                if self._gathering is gathered:
                    self._gathering = None
            await self._write(gathered.runs)
        except Exception:  # what cannot be kept is fetched again; the nursery is everybody's
            _log.exception("writing %d files to the cache", len(gathered.runs))
        finally:
            gathered.done.set()

    async def _write(self, runs: Sequence[tuple[Version, int, Sequence[memoryview]]]) -> None:
        await trio.to_thread.run_sync(partial(self._cache.write_runs, runs), limiter=self._threads)
