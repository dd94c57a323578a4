"""What readers that jump get of a cache which is too small for what they read."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random

import pytest
import trio
import trio.testing

from lakefs_fuse.blockcache import admission, async_cache
from lakefs_fuse.blockcache.admission import SAMPLED_MAX, SPARED_S_MAX, SPARED_S_MIN, AdmissionPolicy
from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.metrics import CacheMetrics, ReadMetrics
from tests.blockcache.reading import MIB, MemoryStore, cache_files, content, for_tasks, make_cache

PACKS, PACK_BYTES, FILE_BYTES = 6, 4 * MIB, 50_000
FILES = PACK_BYTES // FILE_BYTES
"""In each pack."""
DATA_SET_BYTES = PACKS * FILES * FILE_BYTES
CACHE_BYTES = PACKS * PACK_BYTES // 3
DATA = content("data set", PACK_BYTES)
NS = 1_000_000_000


class Store(MemoryStore):
    """Its ETags cost nothing."""

    def version(self, key: str) -> Version:
        return Version(key, f"etag of {key}", len(self.objects[key]))


class Lake:
    """Two data sets in packs and one of plain objects, each three times the cache."""

    def __init__(self, directory: Path, nursery: trio.Nursery) -> None:
        self.store, self.metrics, self.reads = Store(), CacheMetrics(), ReadMetrics()
        self.cache = make_cache(directory, self.metrics, CACHE_BYTES)
        self.disk, self.nursery = for_tasks(self.cache, nursery), nursery
        self.reader = BlockReader(self.store, self.disk, self.metrics, nursery, memory_blocks=2)
        for name in "ab":
            self.store.objects |= {f"{name}{number}": DATA for number in range(PACKS)}
        self.store.objects |= {f"p{number}": DATA[:FILE_BYTES] for number in range(PACKS * FILES)}

    async def epoch(self, name: str, seed: int) -> None:
        """Read all packed files of a data set once, in random order, each in two requests."""
        for key, at in self._shuffled(
            [(f"{name}{number}", at) for number in range(PACKS) for at in range(FILES)], seed
        ):
            begin, end = at * FILE_BYTES, (at + 1) * FILE_BYTES
            for first, stop in ((begin, begin + 32768), (begin + 32768, end)):
                data = await self.reader.read(
                    self.store.version(key), first, stop - first, within=(begin, end), reads=self.reads
                )
                assert bytes(data) == DATA[first:stop]
                while self.reader.statistics().blocks_pending:  # until they are written, or got no place
                    await trio.sleep(0.001)

    async def plain_epoch(self, seed: int) -> None:
        """Read all plain files once, in random order."""
        for key, _ in self._shuffled([(f"p{number}", 0) for number in range(PACKS * FILES)], seed):
            data = await self.reader.read(self.store.version(key), 0, FILE_BYTES, Readahead(), reads=self.reads)
            assert bytes(data) == DATA[:FILE_BYTES]
        await self.settled()

    @staticmethod
    def _shuffled(files: Sequence[tuple[str, int]], seed: int) -> list[tuple[str, int]]:
        return Random(seed).sample(files, len(files))

    async def settled(self) -> None:
        quiet = 0
        while quiet < 20:
            await trio.sleep(0.002)
            quiet = 0 if self.nursery.child_tasks else quiet + 1

    def fetched(self) -> float:
        """Bytes that were asked for of the store since the last call, as a share of a data set."""
        share = sum(end - start for _, start, end in self.store.gets) / DATA_SET_BYTES
        self.store.gets.clear()
        return share


@asynccontextmanager
async def lake_at(directory: Path) -> AsyncIterator[Lake]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            lake = Lake(directory, nursery)
            yield lake
            await lake.settled()
            nursery.cancel_scope.cancel()


async def test_random_epochs_over_packs_larger_than_the_cache_fetch_what_it_cannot_hold(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.epoch("a", 0)
        assert len(lake.store.gets) <= PACKS * FILES
        assert lake.fetched() <= 1.1, "it takes a block to find that the cache is full"
        for seed in range(1, 5):
            await lake.epoch("a", seed)
            assert len(lake.store.gets) <= 0.75 * PACKS * FILES
            assert lake.fetched() <= 0.75
        assert lake.metrics.evicted_bytes == 0
        assert lake.metrics.bypasses > PACKS * FILES


async def test_random_epochs_over_plain_objects_larger_than_the_cache_keep_a_share_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RETRY_S", 0.01)
    monkeypatch.setattr(async_cache, "GATHER_BYTES_MAX", 4 * FILE_BYTES)  # a write of half of this cache may be refused
    async with lake_at(tmp_path) as lake:
        await lake.plain_epoch(0)
        assert lake.fetched() == 1
        for seed in range(1, 4):
            await lake.plain_epoch(seed)
            assert lake.fetched() <= 0.75
        assert lake.metrics.evicted_bytes == 0


async def test_next_data_set_gets_in_when_the_one_before_is_not_used_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RETRY_S", 0.3)
    async with lake_at(tmp_path) as lake:
        await lake.epoch("a", 0)
        lake.fetched()
        await lake.epoch("b", 0)
        assert lake.fetched() >= 0.9
        assert lake.metrics.evicted_bytes == 0
        for path in cache_files(tmp_path):
            os.utime(path, ns=(0, path.stat().st_mtime_ns - int((SPARED_S_MIN + 60) * NS)))
        await trio.sleep(0.3)
        await lake.epoch("b", 1)
        assert lake.metrics.evicted_bytes >= CACHE_BYTES // 2
        lake.fetched()
        await lake.epoch("b", 2)
        assert lake.fetched() <= 0.95, "a third of it is there, and a few blocks were tried"


async def test_who_reads_on_gets_a_place_whatever_is_in_use(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.epoch("a", 0)
        readahead = Readahead()
        for at in range(0, PACK_BYTES, MIB // 4):
            await lake.reader.read(lake.store.version("b0"), at, MIB // 4, readahead)
        await lake.settled()
        assert lake.metrics.evicted_bytes > 0
        lake.store.gets.clear()
        assert await lake.reader.ensure(lake.store.version("b0"), MIB, PACK_BYTES)
        assert lake.store.gets == []


async def test_who_reads_on_from_the_middle_gets_readahead_in_a_full_cache(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.epoch("a", 0)
        lake.store.objects["large"] = large = content("large", 24 * MIB)
        lake.store.gets.clear()
        reader = BlockReader(lake.store, lake.disk, lake.metrics, lake.nursery)
        """It has the memory of a mount: the file is larger than the cache, which gives up what is not read yet."""
        readahead, step = Readahead(), MIB // 8
        for at in range(8 * MIB, 24 * MIB, step):
            data = await reader.read(lake.store.version("large"), at, step, readahead)
            assert bytes(data) == large[at : at + step]
        await lake.settled()
        assert len(lake.store.gets) <= 20, "a GET for each of 16 blocks, and the first reads, in place of 128 pieces"
        assert lake.fetched() * DATA_SET_BYTES <= 17 * MIB


async def test_large_file_of_a_pack_is_read_by_the_block_in_a_full_cache(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.epoch("a", 0)
        lake.store.gets.clear()
        begin, end = 1000, 1000 + 5 * MIB // 2
        for at in range(begin, end, MIB // 8):
            stop = min(at + MIB // 8, end)
            data = await lake.reader.read(lake.store.version("b0"), at, stop - at, within=(begin, end))
            assert bytes(data) == DATA[at:stop]
        assert len(lake.store.gets) == 3


async def test_file_in_a_full_cache_is_one_request_whatever_its_readers(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.epoch("a", 0)
        lake.store.gets.clear()
        lake.store.gate = trio.Event()

        async def read(offset: int) -> None:
            data = await lake.reader.read(
                lake.store.version("b0"), MIB + offset, 1000, within=(MIB, MIB + FILE_BYTES), reads=lake.reads
            )
            assert bytes(data) == DATA[MIB + offset : MIB + offset + 1000]

        async with trio.open_nursery() as nursery:
            for offset in range(0, 40_000, 10_000):
                nursery.start_soon(read, offset)
            await trio.testing.wait_all_tasks_blocked()
            lake.store.gate.set()
        assert len(lake.store.gets) == 1
        await read(45_000)
        assert len(lake.store.gets) == 1, "it is in memory"


async def test_length_of_an_epoch_is_learned_from_a_bounded_sample(autojump_clock: trio.testing.MockClock) -> None:
    policy, versions = AdmissionPolicy(), [Version(f"{number}", f"{number}", 1) for number in range(SAMPLED_MAX)]
    assert policy.spared_s == SPARED_S_MIN
    for seed in range(4):
        for version in Random(seed).sample(versions, len(versions)):
            for offset in (0, 50_000, 100_000):
                policy.read(version, offset)
            await trio.sleep(1)
        assert not seed or SAMPLED_MAX < policy.reuse_s <= 1.6 * SAMPLED_MAX, "at the end of an epoch"
    assert policy.spared_s == 3 * policy.reuse_s
    for _ in range(100):
        await trio.sleep(SPARED_S_MAX)
        for version in versions:
            policy.read(version, 0)
    assert policy.spared_s == SPARED_S_MAX
