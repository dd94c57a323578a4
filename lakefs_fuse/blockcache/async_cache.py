"""The block cache for trio tasks: reads on the trio thread while the disk is prompt, else in worker threads; writes are
gathered.

Handing work to a thread and getting the answer back takes about a millisecond of CPU, because two threads must be woken
and acquire the interpreter. So small reads of a prompt disk stay on the trio thread (`disk_latency`), and small writes
are gathered, for `GATHER_S` at most, and made by one thread.

What always holds (*bounded threads*): at most `READING_THREADS_MAX` threads read and `WRITING_THREADS_MAX` write.
The caller bounds the bytes. Trio thread only; a crash loses the writes in progress, whose blocks are fetched again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import trio

from lakefs_fuse.blockcache.admission import AdmissionPolicy, Evicts
from lakefs_fuse.blockcache.cache import WRITES_AT_ONCE, BlockCache
from lakefs_fuse.blockcache.disk_latency import Promptness
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, BlockSet, Version
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.threads import Threads

T = TypeVar("T")
_log = logging.getLogger(__name__)

READING_THREADS_MAX = 8
"""A bound of their own, so that a reader never queues behind writes."""
WRITING_THREADS_MAX = WRITES_AT_ONCE
SMALL_READ_BYTES_MAX = 256 << 10
"""Larger reads always go to a thread."""
INSPECTED_AT_ONCE = 256
"""Files whose indexes one call of a thread reads: about 10 ms."""
GATHER_S = 0.02
GATHER_BYTES_MAX = 4 * BLOCK_BYTES
"""Written by one thread at a time, about."""
SMALL_WRITE_BYTES_MAX = BLOCK_BYTES // 2
"""A larger write has a thread of its own."""


@dataclass(slots=True)
class _Gathered:
    evicts: Evicts
    runs: list[tuple[Version, int, Sequence[memoryview]]] = field(default_factory=list)
    bytes_total: int = 0
    has_place: bool = True
    full: trio.Event = field(default_factory=trio.Event)
    done: trio.Event = field(default_factory=trio.Event)


class AsyncBlockCache:
    """See the module's head. ``blocks`` is the cache itself, for calls that need no disk."""

    def __init__(self, blocks: BlockCache, nursery: trio.Nursery, threads: Threads, clock: Clock) -> None:
        self.blocks = blocks
        self.latency = Promptness(clock)
        self._nursery, self._threads = nursery, threads
        self._reading = trio.CapacityLimiter(READING_THREADS_MAX)
        self._writing = trio.CapacityLimiter(WRITING_THREADS_MAX)
        self._gathering: dict[Evicts, _Gathered] = {}
        self.admission = AdmissionPolicy()

    async def read_part(self, version: Version, start: int, end: int) -> memoryview | None:
        """As `BlockCache.read_part`. No checkpoint if the disk answers immediately."""
        try:
            if end - start > SMALL_READ_BYTES_MAX:
                raise BlockingIOError
            if not self.latency.is_prompt:  # it does not wait, so its time does not measure the disk
                return self.blocks.read_part_now(version, start, end, prompt=False)
            with self.latency.timed():
                return self.blocks.read_part_now(version, start, end, prompt=True)
        except BlockingIOError:
            return await self._read(partial(self.blocks.read_part, version, start, end))

    async def read_blocks(
        self, version: Version, first: int, stop: int, *, parts_to_come: bool
    ) -> Sequence[bytes | None]:
        """As `BlockCache.read_blocks`, which must be all blocks of a small version."""
        try:
            if version.size > SMALL_READ_BYTES_MAX or not self.latency.is_prompt:
                raise BlockingIOError
            with self.latency.timed():
                return [self.blocks.read_all_now(version)]
        except BlockingIOError:
            return await self._read(partial(self.blocks.read_blocks, version, first, stop, parts_to_come=parts_to_come))

    async def has_blocks(self, version: Version, first: int, stop: int) -> list[bool]:
        """As `BlockCache.has_blocks`. No checkpoint if the disk answers immediately."""
        if not self.blocks.may_have(version):
            return [False] * (stop - first)
        try:
            if not self.latency.is_prompt:
                raise BlockingIOError
            with self.latency.timed():
                return self.blocks.has_blocks_now(version, first, stop)
        except BlockingIOError:
            return await self._read(partial(self.blocks.has_blocks, version, first, stop))

    async def inspect(self, versions: Sequence[Version], *, is_use: bool) -> list[tuple[BlockSet, int]]:
        """As `BlockCache.inspect`, a bounded number of files to a step."""
        answer = list[tuple[BlockSet, int]]()
        for at in range(0, len(versions), INSPECTED_AT_ONCE):
            some = versions[at : at + INSPECTED_AT_ONCE]
            if any(map(self.blocks.may_have, some)):
                answer += await self._read(partial(self.blocks.inspect, some, is_use=is_use))
            else:
                answer += [(0, 0)] * len(some)
                await trio.lowlevel.checkpoint()
        return answer

    async def drop(self, versions: Sequence[tuple[Version, BlockSet]]) -> list[int | None]:
        """As `BlockCache.drop`, a bounded number of files to a step."""
        answer = list[int | None]()
        for at in range(0, len(versions), INSPECTED_AT_ONCE):
            answer += await self._read(partial(self.blocks.drop, versions[at : at + INSPECTED_AT_ONCE]))
        return answer

    async def _read(self, call: Callable[[], T]) -> T:
        return await self._threads.run(call, limiter=self._reading)

    async def write(
        self, version: Version, first: int, blocks: Sequence[memoryview], *, evicts: Evicts = Evicts.ANY
    ) -> bool:
        """Write adjacent blocks; they are on the disk, or the disk refused them, when this returns. False if only the
        eviction of blocks that it may not evict could free space for them."""
        size = sum(map(len, blocks))
        if size > SMALL_WRITE_BYTES_MAX:
            return await self._write([(version, first, blocks)], evicts)
        gathered = self._gathering.get(evicts)
        if gathered is None:
            gathered = self._gathering[evicts] = _Gathered(evicts)
            self._nursery.start_soon(self._write_gathered, gathered)
        gathered.runs.append((version, first, blocks))
        gathered.bytes_total += size
        if gathered.bytes_total >= GATHER_BYTES_MAX:
            del self._gathering[evicts]
            gathered.full.set()
        await gathered.done.wait()
        return gathered.has_place

    async def _write_gathered(self, gathered: _Gathered) -> None:
        try:
            try:
                with trio.move_on_after(GATHER_S):
                    await gathered.full.wait()
            finally:
                if self._gathering.get(gathered.evicts) is gathered:
                    del self._gathering[gathered.evicts]
            gathered.has_place = await self._write(gathered.runs, gathered.evicts)
        except Exception:  # the blocks are fetched again; an error would end the nursery, which others share
            _log.exception("writing %d files to the cache", len(gathered.runs))
        finally:
            gathered.done.set()

    async def _write(self, runs: Sequence[tuple[Version, int, Sequence[memoryview]]], evicts: Evicts) -> bool:
        spared_s = {Evicts.ANY: 0.0, Evicts.UNUSED: self.admission.spared_s, Evicts.NONE: math.inf}[evicts]
        has_place = await self._threads.run(
            partial(self.blocks.write_runs, runs, spared_s=spared_s), limiter=self._writing
        )
        if evicts is Evicts.UNUSED:
            self.admission.kept(has_place=has_place)
        return has_place
