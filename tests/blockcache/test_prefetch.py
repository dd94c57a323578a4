"""Objects that readers jump about in: when they are fetched to their end, and when they are left alone."""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs_fuse.blockcache import async_cache, failed_reads
from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.blockcache.prefetch import FETCHES_AT_ONCE
from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.errors import FileError, Unavailable
from lakefs_fuse.metrics import CacheMetrics
from tests.blockcache.reading import MIB, MemoryStore, block_of, content, for_tasks, make_cache, write_block

BLOCKS = 96
ENOUGH = 6
"""A sixteenth."""
FAR = [3, 90, 41, 60, 12, 77]
"""Blocks that do not follow one another."""


@functools.cache
def whole_data() -> bytes:
    """Of an object. Made once, by the first test: each worker collects this module."""
    return content("whole", BLOCKS * MIB - 17)


class Store(MemoryStore):
    """Its ETags cost nothing."""

    def version(self, key: str) -> Version:
        return Version(key, f"etag of {key}", len(self.objects[key]))


class Lake:
    """A store, a cache of ``bytes_max`` and a reader over them."""

    def __init__(self, directory: Path, nursery: trio.Nursery, bytes_max: int, scanned: bool) -> None:
        self.store, self.metrics, self.nursery = Store(), CacheMetrics(), nursery
        self.cache = make_cache(directory, self.metrics, bytes_max, scanned)
        self.reader = BlockReader(self.store, for_tasks(self.cache, nursery), self.metrics, nursery)
        self.version = self.store.put("file", whole_data())

    async def jump(self, blocks: list[int], version: Version | None = None) -> None:
        """Read a little of each, as somebody does who opened the file for it."""
        for index in blocks:
            at = index * MIB + 100
            data = await self.reader.read(version or self.version, at, 50_000, Readahead())
            assert bytes(data) == whole_data()[at : at + 50_000]

    async def settled(self) -> None:
        """Nothing is under way, and nothing begins."""
        quiet = 0
        while quiet < 20:
            await trio.sleep(0.002)
            quiet = 0 if self.nursery.child_tasks else quiet + 1

    @property
    def bytes_asked(self) -> int:
        return sum(end - start for _, start, end in self.store.gets)


@asynccontextmanager
async def lake_at(directory: Path, bytes_max: int = 1 << 30, *, scanned: bool = True) -> AsyncIterator[Lake]:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            lake = Lake(directory, nursery, bytes_max, scanned)
            yield lake
            await lake.settled()
            nursery.cancel_scope.cancel()


async def test_what_readers_jump_about_in_is_fetched_whole_in_a_few_gets(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.jump(FAR[: ENOUGH - 1])
        await lake.settled()
        assert (lake.metrics.fetched_whole, len(lake.store.gets)) == (0, ENOUGH - 1)
        await lake.jump(FAR)
        await lake.settled()
        assert lake.metrics.fetched_whole == 1
        assert lake.bytes_asked == len(whole_data()), "each block once"
        assert len(lake.store.gets) <= ENOUGH + BLOCKS // 8 + ENOUGH
        assert lake.metrics.misses == ENOUGH
        asked = len(lake.store.gets)
        await lake.jump(list(range(BLOCKS - 1)))
        assert len(lake.store.gets) == asked
        assert lake.metrics.misses == ENOUGH


async def test_object_that_was_evicted_is_fetched_whole_again(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        for count, blocks in ((1, FAR), (2, [block + 1 for block in FAR])):
            await lake.jump(blocks)
            await lake.settled()
            assert lake.metrics.fetched_whole == count
            lake.cache.evict(1 << 40)


async def test_it_stays_on_the_disk_and_what_was_read_in_memory(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.jump(FAR)
        await lake.settled()
        assert lake.reader.statistics().memory_blocks == ENOUGH
        assert lake.cache.files.bytes_used >= len(whole_data())


async def test_a_reader_that_comes_meanwhile_waits_for_what_is_on_its_way(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.jump(FAR)
        await lake.jump([0, 1, 20, 95 - 1, 50])
        await lake.settled()
        assert lake.bytes_asked == len(whole_data())


async def test_files_of_a_pack_that_is_coming_are_read_alone_up_to_a_share_of_it(tmp_path: Path) -> None:
    size, blocks = 256 << 10, range(50, 80)
    async with lake_at(tmp_path) as lake:
        await lake.jump(FAR[:-1])
        lake.store.gate = gate = trio.Event()

        async def read(index: int) -> None:
            at = index * MIB + 1000
            assert (
                await lake.reader.read(lake.version, at, size, within=(at, at + size)) == whole_data()[at : at + size]
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(lake.jump, FAR[-1:])
            while len(lake.store.gets) < ENOUGH + FETCHES_AT_ONCE:
                await trio.sleep(0.002)
            before = len(lake.store.gets)
            for index in set(blocks) - set(FAR):
                nursery.start_soon(read, index)
            await trio.testing.wait_all_tasks_blocked(0.01)
            alone = [end - start for _, start, end in lake.store.gets[before:] if end - start < MIB]
            gate.set()
        await lake.settled()
        assert len(alone) == len(whole_data()) // 16 // size < len(set(blocks) - set(FAR)), "the others by the block"
        assert lake.bytes_asked == len(whole_data()) + sum(alone)
        assert (lake.metrics.fetched_whole, lake.metrics.bypasses) == (1, 0)


async def test_a_small_memory_is_left_to_readers(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        disk = for_tasks(lake.cache, lake.nursery)
        lake.reader = BlockReader(lake.store, disk, lake.metrics, lake.nursery, inflight_bytes_max=32 * MIB)
        await lake.jump(FAR[:-1])
        await lake.settled()
        lake.store.gate = gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lake.jump, FAR[-1:])
            while len(lake.store.gets) < ENOUGH + 2:
                await trio.sleep(0.002)
            await trio.testing.wait_all_tasks_blocked(0.01)
            assert 8 * MIB < lake.reader.statistics().bytes_inflight <= 17 * MIB
            gate.set()
        await lake.settled()
        assert lake.metrics.fetched_whole == 1


async def test_who_reads_on_is_not_taken_for_one_that_jumps(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        readahead = Readahead()
        for at in range(0, 30 * MIB, MIB // 2):
            await lake.reader.read(lake.version, at, MIB // 2, readahead)
        await lake.settled()
        assert lake.metrics.fetched_whole == 0
        assert lake.bytes_asked < len(whole_data())


async def test_nothing_is_evicted_for_it(tmp_path: Path) -> None:
    async with lake_at(tmp_path, (BLOCKS + 40) * MIB) as lake:
        await lake.jump(FAR)
        await lake.settled()
        assert lake.metrics.fetched_whole == 1
        other = lake.store.put("other", whole_data())
        await lake.jump(FAR, other)
        await lake.settled()
        assert (lake.metrics.fetched_whole, lake.metrics.evicted_bytes) == (1, 0)
        assert lake.bytes_asked == len(whole_data()) + ENOUGH * MIB


async def test_prefetch_ends_when_readers_use_up_the_free_space(tmp_path: Path) -> None:
    async with lake_at(tmp_path, (BLOCKS + 8) * MIB) as lake:
        await lake.jump(FAR[:-1])
        lake.store.gate = gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lake.jump, FAR[-1:])
            while len(lake.store.gets) < ENOUGH + FETCHES_AT_ONCE:
                await trio.sleep(0.002)
            other = lake.store.put("other", whole_data())
            for index in range(BLOCKS - 1):
                write_block(lake.cache, other, index, block_of(whole_data(), index))
            gate.set()
        await lake.settled()
        assert lake.metrics.evicted_bytes == 0
        assert lake.cache.has_blocks(other, 0, BLOCKS - 1) == [True] * (BLOCKS - 1)
        assert lake.metrics.fetched_whole == 0
        assert len(lake.store.gets) <= ENOUGH + 2 * FETCHES_AT_ONCE, "it goes no further"


async def test_objects_have_their_turn_one_after_the_other(tmp_path: Path) -> None:
    async with lake_at(tmp_path, 3 * BLOCKS * MIB) as lake:
        versions = [lake.store.put(name, whole_data()) for name in ("one", "two", "three")]
        for version in versions:
            await lake.jump(FAR, version)
        await lake.settled()
        assert lake.metrics.fetched_whole == 2, "there is no room for the third"
        assert lake.metrics.evicted_bytes == 0


async def test_room_for_the_hashes_of_a_file_counts_before_any_block_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a third object, which fits by the bytes of its blocks alone, would evict the first."""
    async with lake_at(tmp_path, 3 * BLOCKS * MIB) as lake:
        write_runs, released = lake.cache.write_runs, threading.Event()

        def held_back(runs: Sequence[tuple[Version, int, Sequence[memoryview]]], *, spared_s: float) -> bool:
            assert released.wait(20)
            return write_runs(runs, spared_s=spared_s)

        monkeypatch.setattr(lake.cache, "write_runs", held_back)
        for version in [lake.store.put(name, whole_data()) for name in ("one", "two", "three")]:
            await lake.jump(FAR, version)
        released.set()
        await lake.settled()
        assert (lake.metrics.fetched_whole, lake.metrics.evicted_bytes) == (2, 0)


async def test_it_is_over_when_what_readers_brought_is_on_the_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or the next object would be fetched into room that these blocks take."""
    monkeypatch.setattr(async_cache, "WRITING_THREADS_MAX", async_cache.WRITING_THREADS_MAX + ENOUGH)
    async with lake_at(tmp_path) as lake:
        write_runs, released = lake.cache.write_runs, threading.Event()

        def held_back(runs: Sequence[tuple[Version, int, Sequence[memoryview]]], *, spared_s: float) -> bool:
            if any(first in FAR for _, first, _ in runs):
                assert released.wait(20)
            return write_runs(runs, spared_s=spared_s)

        monkeypatch.setattr(lake.cache, "write_runs", held_back)
        await lake.jump(FAR)
        while lake.reader.statistics().blocks_pending > ENOUGH:
            await trio.sleep(0.002)
        await trio.sleep(0.05)
        assert lake.metrics.fetched_whole == 0
        released.set()
        await lake.settled()
        assert lake.metrics.fetched_whole == 1


async def test_nothing_is_known_to_be_free_before_all_is_counted(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.jump([1])
    async with lake_at(tmp_path, scanned=False) as lake:
        assert not lake.cache.counted
        await lake.jump(FAR)
        await lake.settled()
        assert lake.metrics.fetched_whole == 0


async def test_a_store_that_is_away_ends_it_and_readers_ask_for_themselves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failed_reads, "WAITED_S_MIN", math.inf)  # on a busy machine a read that fails may take long
    async with lake_at(tmp_path) as lake:
        await lake.jump(FAR[:-1])
        lake.store.gate = gate = trio.Event()

        async def refused() -> None:
            with pytest.raises(FileError):
                await lake.jump(FAR[-1:])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused)
            while len(lake.store.gets) < ENOUGH + FETCHES_AT_ONCE:
                await trio.sleep(0.002)
            lake.store.fail_with = Unavailable("away")
            gate.set()
        await lake.settled()
        assert lake.metrics.fetched_whole == 0
        assert len(lake.store.gets) <= ENOUGH + 2 * FETCHES_AT_ONCE, "it goes no further"
        lake.store.fail_with = None
        await lake.jump(list(range(BLOCKS - 1)))
