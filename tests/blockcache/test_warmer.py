"""Warming: each missing block is asked for once, in few GETs, and nothing counts as warm that was not kept."""

from __future__ import annotations

import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import Extent, Version, block_range, set_bytes
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.blockcache.warmer import Warmer, blocks_at_once, with_rest_of_packs
from lakefs_fuse.errors import CacheError, Unavailable
from lakefs_fuse.metrics import CacheMetrics
from lakefs_fuse.sync.byte_rate import ByteRate
from tests.blockcache.reading import MIB, MemoryStore, content, for_tasks, make_cache
from tests.fakes import FakeDisk

PACK_BLOCKS = 20


@dataclass
class Lake:
    store: MemoryStore
    cache: BlockCache
    reader: BlockReader
    warmer: Warmer
    came: list[tuple[Version, int]] = field(default_factory=list)

    def put(self, key: str, size: int) -> Version:
        return self.store.put(key, content(key, size))

    async def fetch(self, wanted: dict[Version, int], rate: ByteRate | None = None) -> list[Version]:
        return await self.warmer.fetch(
            wanted, rate or ByteRate(), lambda version, count: self.came.append((version, count))
        )


@asynccontextmanager
async def warming(directory: Path, bytes_max: int = 1 << 30, disk: FakeDisk | None = None) -> AsyncIterator[Lake]:
    store, cache = MemoryStore(), make_cache(directory, bytes_max=bytes_max, disk=disk)
    async with trio.open_nursery() as nursery:
        reader = BlockReader(store, for_tasks(cache, nursery), CacheMetrics(), nursery)
        yield Lake(store, cache, reader, Warmer(reader))
        nursery.cancel_scope.cancel()


def whole(version: Version) -> dict[Version, int]:
    return {version: block_range(0, version.blocks)}


def test_sets_of_blocks() -> None:
    version = Version("k", "e", 3 * MIB + 7)
    assert set_bytes(version, 0b1111) == version.size
    assert set_bytes(version, 0b0101) == 2 * MIB
    extent = Extent(version, MIB - 10, 20)
    assert extent.block_set == 0b11
    assert [extent.bytes_in(blocks) for blocks in (0, 0b01, 0b10, 0b1111)] == [0, 10, 10, 20]
    assert Extent(version, 5, 0).block_set == 0
    assert Extent(version, 0, 0).bytes_in(0) == Extent(version, 5, 0).bytes_in(1) == 0
    assert Extent.whole(version).bytes_in(0b0111) == 3 * MIB


def test_bytes_of_an_extent_in_any_blocks_are_those_that_a_walk_finds() -> None:
    rng = random.Random(1)
    for _ in range(2000):
        offset, size = rng.choice((0, MIB, rng.randrange(5 * MIB))), rng.choice((1, MIB, rng.randrange(4 * MIB)))
        extent, blocks = Extent(Version("k", "e", 10 * MIB), offset, size), rng.randrange(1 << 10)
        parts = [range(max(offset, at * MIB), min(offset + size, (at + 1) * MIB)) for at in range(10)]
        assert extent.bytes_in(blocks) == sum(len(part) for at, part in enumerate(parts) if blocks >> at & 1)


def test_bytes_of_the_largest_object_in_no_block_take_no_walk() -> None:
    extent = Extent.whole(Version("k", "e", 5 << 40))
    began_s = time.thread_time()
    assert extent.bytes_in(0) == 0
    assert time.thread_time() - began_s < 0.5


def test_most_of_a_pack_is_all_of_it() -> None:
    pack = Version("p", "e", PACK_BLOCKS * MIB)
    every = block_range(0, PACK_BLOCKS)
    assert with_rest_of_packs({pack: block_range(0, 15)}) == {pack: every}
    assert with_rest_of_packs({pack: block_range(0, 14)}) == {pack: block_range(0, 14)}


async def test_fetch_asks_for_what_is_missing_once_in_large_gets(tmp_path: Path) -> None:
    async with warming(tmp_path) as lake:
        pack, small = lake.put("pack", PACK_BLOCKS * MIB), lake.put("small", 1000)
        wanted = whole(pack) | whole(small)
        assert await lake.warmer.missing(wanted) == wanted
        assert await lake.fetch(wanted) == []
        assert sorted(lake.store.gets) == [
            ("pack", 0, 8 * MIB), ("pack", 8 * MIB, 16 * MIB), ("pack", 16 * MIB, 20 * MIB), ("small", 0, 1000),
        ]  # fmt: skip
        assert sum(count for _, count in lake.came) == pack.size + small.size
        assert await lake.warmer.missing(wanted) == {}
        assert await lake.fetch(wanted) == []
        assert len(lake.store.gets) == 4
        assert lake.reader.statistics().memory_blocks == 0, "what is warm is on the disk"
        assert lake.cache.evict(10 * MIB) > 0
        left = await lake.warmer.missing(wanted)
        await lake.fetch(wanted)
        again = sum(end - start for _, start, end in lake.store.gets[4:])
        assert again == sum(set_bytes(version, blocks) for version, blocks in left.items())


async def test_fetch_of_a_version_that_is_gone_goes_on_with_the_others(tmp_path: Path) -> None:
    async with warming(tmp_path) as lake:
        gone, there = lake.put("gone", 9 * MIB), lake.put("there", MIB)
        lake.put("gone", 100)
        assert await lake.fetch(whole(gone) | whole(there)) == [gone]
        assert await lake.warmer.missing(whole(there)) == {}


async def test_fetch_that_the_store_does_not_answer_raises_its_error(tmp_path: Path) -> None:
    async with warming(tmp_path) as lake:
        version = lake.put("k", 9 * MIB)
        lake.store.fail_with = Unavailable("the store is away")
        with pytest.raises(Exception, match="the store is away"):
            await lake.fetch(whole(version))
        lake.store.fail_with = None
        await lake.fetch(whole(version))
        assert await lake.warmer.missing(whole(version)) == {}


async def test_fetch_to_a_full_disk_is_an_error(tmp_path: Path) -> None:
    async with warming(tmp_path, disk=FakeDisk(room=MIB)) as lake:
        version = lake.put("k", 9 * MIB)
        with pytest.raises(CacheError, match=r"did not keep the fetched blocks \(nothing more to evict\): free space"):
            await lake.fetch(whole(version))
        assert len(lake.store.gets) <= 4, "it does not go on"


async def test_fetch_evicts_nothing_that_was_used_since_it_began(tmp_path: Path) -> None:
    async with warming(tmp_path, bytes_max=10 * MIB) as lake:
        old, kept, new = (lake.put(key, 4 * MIB) for key in ("old", "kept", "new"))
        await lake.fetch(whole(old))
        await lake.fetch(whole(kept))
        for made in tmp_path.glob("*/*"):
            os.utime(made, (1e9, 1e9))
        lake.cache.files.spare_since(1_000_000_001 * 10**9)
        assert await lake.warmer.missing(whole(kept)) == {}, "and counts as used"
        await lake.fetch(whole(new))
        assert await lake.warmer.missing(whole(kept) | whole(new)) == {}
        more = lake.put("more", 8 * MIB)
        with pytest.raises(CacheError, match="did not keep"):
            await lake.fetch(whole(more))
        lake.cache.files.spare_since(None)
        assert await lake.warmer.missing(whole(kept) | whole(new)) == {}


async def test_cancelled_fetch_leaves_no_get_that_nobody_else_waits_for(tmp_path: Path) -> None:
    async with warming(tmp_path) as lake:
        alone, shared = lake.put("alone", MIB), lake.put("shared", MIB)
        lake.store.gate = trio.Event()
        read = list[bytes]()

        async def reader() -> None:
            read.append(bytes(await lake.reader.read(shared, 0, MIB)))

        async with trio.open_nursery() as nursery:
            scope = trio.CancelScope()
            nursery.start_soon(_in, scope, lambda: lake.fetch(whole(alone) | whole(shared)))
            await _until(lambda: len(lake.store.gets) == 2)
            nursery.start_soon(reader)
            await wait_all_tasks_blocked()
            scope.cancel()
            await _until(lambda: lake.reader.statistics().blocks_pending == 1)
            lake.store.gate.set()
        assert read == [content("shared", MIB)]
        assert bytes(await lake.reader.read(alone, 0, MIB)) == content("alone", MIB)
        assert len(lake.store.gets) == 3


async def _in(scope: trio.CancelScope, call: Callable[[], Awaitable[object]]) -> None:
    with scope:
        await call()


async def _until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():
            await trio.sleep(0.005)


async def test_a_rate_makes_gets_smaller() -> None:
    rates = [ByteRate(bytes_s) for bytes_s in (8 * MIB, MIB, 1 << 40, 0)]
    assert [blocks_at_once(rate) for rate in rates] == [2, 1, 8, 8]
