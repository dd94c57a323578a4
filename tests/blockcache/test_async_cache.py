"""What was read goes to the cache disk in few steps, and who waits for that hears of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from lakefs_fuse.blockcache import async_cache
from lakefs_fuse.blockcache.async_cache import SMALL_FILE_BYTES_MAX, SMALL_WRITE_BYTES_MAX, AsyncBlockCache
from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.cache_file import block_hash
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.threads import WorkerThreads
from tests.blockcache.reading import content, for_tasks, make_cache, read_block

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


class CountedThreads(WorkerThreads):
    """Counts the calls that threads were given."""

    def __init__(self) -> None:
        self.calls = 0

    async def run(self, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        self.calls += 1
        return await super().run(*arguments, **options)


async def adopt(behind: AsyncBlockCache, directory: Path, number: int, size: int = 5000) -> bool:
    version, data = small(number, size)
    staged = directory / "staged"
    staged.write_bytes(data)
    return await behind.adopt(staged, version, [block_hash(data)])


async def test_small_files_are_adopted_without_a_thread(tmp_path: Path) -> None:
    cache, threads = make_cache(tmp_path / "cache"), CountedThreads()
    async with trio.open_nursery() as nursery:
        behind = AsyncBlockCache(cache, nursery, threads, SystemClock())
        assert await adopt(behind, tmp_path, 0)
        assert threads.calls == 0
        assert await adopt(behind, tmp_path, 1, SMALL_FILE_BYTES_MAX + 1)
        assert threads.calls == 1
    for number, size in ((0, 5000), (1, SMALL_FILE_BYTES_MAX + 1)):
        version, data = small(number, size)
        assert read_block(cache, version, 0) == data


async def test_small_files_for_which_room_has_to_be_made_are_adopted_by_a_thread(tmp_path: Path) -> None:
    cache, threads = make_cache(tmp_path / "cache", bytes_max=4 * SMALL_FILE_BYTES_MAX), CountedThreads()
    async with trio.open_nursery() as nursery:
        behind = AsyncBlockCache(cache, nursery, threads, SystemClock())
        for number in range(6):
            assert await adopt(behind, tmp_path, number, SMALL_FILE_BYTES_MAX)
    assert 0 < threads.calls < 6
    version, data = small(5, SMALL_FILE_BYTES_MAX)
    assert read_block(cache, version, 0) == data
    assert cache.bytes_used <= 4 * SMALL_FILE_BYTES_MAX
