"""What was read goes to the cache disk in few steps, and who waits for that hears of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs_fuse.blockcache import async_cache
from lakefs_fuse.blockcache.async_cache import SMALL_WRITE_BYTES_MAX, AsyncBlockCache
from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.disk_latency import PAUSE_S_FIRST, SLOW_S, WEIGHT
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version
from lakefs_fuse.environment.threads import WorkerThreads
from tests.blockcache.reading import content, for_tasks, make_cache, read_block
from tests.fakes import FakeClock

FILES = 30


def small(number: int, size: int = 5000) -> tuple[Version, bytes]:
    return Version(f"k{number}", "e", size), content(number, size)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many writes each thread was given."""
    found: list[int] = []
    write = BlockCache.write_runs

    def counted(cache: BlockCache, runs: Sequence[tuple[Version, int, Sequence[bytes]]], *, spared_s: float) -> bool:
        found.append(len(runs))
        return write(cache, runs, spared_s=spared_s)

    monkeypatch.setattr(BlockCache, "write_runs", counted)
    return found


async def write(behind: AsyncBlockCache, number: int, size: int = 5000) -> None:
    version, data = small(number, size)
    await behind.write(version, 0, [memoryview(data)])


async def test_small_ones_share_a_thread(tmp_path: Path, steps: list[int]) -> None:
    cache = make_cache(tmp_path)
    async with trio.open_nursery() as nursery:
        behind = for_tasks(cache, nursery)
        for number in range(FILES):
            nursery.start_soon(write, behind, number)
    assert steps == [FILES]
    for number in range(FILES):
        version, data = small(number)
        assert read_block(cache, version, 0) == data


async def test_read_that_waits_for_nothing_does_not_shorten_the_pause_of_a_slow_disk(tmp_path: Path) -> None:
    cache, clock, version = make_cache(tmp_path), FakeClock(), Version("large", "e", 2 * BLOCK_BYTES)
    cache.write_runs([(version, 0, [content("large", BLOCK_BYTES)])])
    async with trio.open_nursery() as nursery:
        behind = AsyncBlockCache(cache, nursery, WorkerThreads(), clock)
        for pauses in (1, 2):
            with behind.latency.timed():
                clock.advance(2 * SLOW_S)
            for _ in range(2 * WEIGHT):
                assert await behind.read_part(version, 0, 100) is not None
            clock.advance(PAUSE_S_FIRST / 2)
            assert not behind.latency.is_prompt
            clock.advance(PAUSE_S_FIRST)
            assert behind.latency.is_prompt == (pauses == 1)


async def test_they_do_not_wait_for_more_than_is_worth_it(
    tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(async_cache, "GATHER_S", 60.0)
    monkeypatch.setattr(async_cache, "GATHER_BYTES_MAX", 10 * 5000)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            behind = for_tasks(make_cache(tmp_path), nursery)
            for number in range(FILES):
                nursery.start_soon(write, behind, number)
    assert steps == [10] * (FILES // 10)


async def test_a_large_one_waits_for_nobody(tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_cache, "GATHER_S", 60.0)
    cache = make_cache(tmp_path)
    async with trio.open_nursery() as nursery:
        behind = for_tasks(cache, nursery)
        nursery.start_soon(write, behind, 1)
        with trio.fail_after(20):
            for size in (SMALL_WRITE_BYTES_MAX + 1, BLOCK_BYTES):
                await write(behind, size, size)
                assert cache.has_blocks(small(size, size)[0], 0, 1) == [True]
        assert steps == [1, 1]
        nursery.cancel_scope.cancel()


async def test_who_waits_hears_of_it_when_the_mount_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_cache, "GATHER_S", 60.0)
    told = 0

    async def wait(behind: AsyncBlockCache) -> None:
        nonlocal told
        await write(behind, 1)
        told += 1

    with trio.fail_after(20):
        async with trio.open_nursery() as waiting:
            async with trio.open_nursery() as nursery:
                behind = for_tasks(make_cache(tmp_path), nursery)
                waiting.start_soon(wait, behind)
                await trio.testing.wait_all_tasks_blocked()
                nursery.cancel_scope.cancel()
    assert told == 1


async def test_an_error_is_told_to_nobody_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    cache = make_cache(tmp_path)
    async with trio.open_nursery() as nursery:
        behind = for_tasks(cache, nursery)
        with monkeypatch.context() as patch:
            patch.setattr(BlockCache, "write_runs", fail)
            with trio.fail_after(20):
                await write(behind, 1)
        assert "can't start new thread" in caplog.text
        await write(behind, 2)
    assert cache.has_blocks(small(2)[0], 0, 1) == [True]
