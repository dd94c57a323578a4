"""The reader and pieces of blocks on the cache disk: how much of it is read, and when a thread is needed for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.cache_directory import FILES_OPEN_MAX, TOUCH_S
from lakefs_fuse.blockcache.disk_latency import Promptness
from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.environment import local_disk as disk
from lakefs_fuse.environment.threads import WorkerThreads
from tests.blockcache.reading import MIB, cache_files, content, reads_now
from tests.blockcache.test_reader import KIB, Lake, lake_at, reader_data
from tests.fakes import FakeClock


@pytest.fixture
def disk_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each read of a cache file brought."""
    found: list[int] = []
    pread, preadv = os.pread, os.preadv

    def counting(fd: int, length: int, offset: int) -> bytes:
        data = pread(fd, length, offset)
        found.append(len(data))
        return data

    def counting_now(fd: int, buffers: list[bytearray], offset: int, flags: int) -> int:
        found.append(preadv(fd, buffers, offset, flags))
        return found[-1]

    monkeypatch.setattr(os, "pread", counting)
    monkeypatch.setattr(os, "preadv", counting_now)
    return found


async def on_disk(lake: Lake) -> None:
    """All of the file is in the cache of a daemon that was just started."""
    assert await lake.reader.ensure(lake.version, 0, len(reader_data()))
    await lake.idle()
    lake.cache.close()
    lake.restart()


async def test_who_jumps_about_reads_from_the_disk_about_what_he_asks_for(
    tmp_path: Path, disk_bytes: list[int]
) -> None:
    async with lake_at(tmp_path) as lake:
        await on_disk(lake)
        wanted = [(place * 700 * KIB % len(reader_data()), 50 * KIB) for place in range(1, 200, 7)]
        for how in ({"jumps": True}, {"readahead": Readahead()}):
            disk_bytes.clear()
            for offset, length in wanted:
                got = await lake.reader.read(lake.version, offset, length, **how)
                assert got == reader_data()[offset : offset + length]
            assert sum(disk_bytes) < len(wanted) * 120 * KIB
        assert lake.metrics.hits >= 2 * len(wanted)
        assert (lake.store.gets, lake.metrics.misses) == ([], 0)


async def test_what_is_in_memory_needs_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def would_block(*_: object) -> bytearray:
        raise BlockingIOError

    threads: list[object] = []
    run = WorkerThreads.run

    async def counting(call: Callable[..., object], *arguments: object, **how: Any) -> object:
        threads.append(call)
        return await run(call, *arguments, **how)

    reads_now(tmp_path)
    async with lake_at(tmp_path) as lake:
        lake.clock = clock = FakeClock(time.time_ns())
        await on_disk(lake)
        await lake.read(0, 10, jumps=True)  # opens the file
        monkeypatch.setattr(WorkerThreads, "run", staticmethod(counting))
        monkeypatch.setattr(Promptness, "is_prompt", False)

        async def threads_for(offset: int) -> int:
            threads.clear()
            assert await lake.read(offset, 50 * KIB, jumps=True) == reader_data()[offset : offset + 50 * KIB]
            return len(threads)

        assert await threads_for(2 * MIB) == 0
        with lake.cache.files._lock:  # noqa: SLF001  # its holders are too quick to be met
            for prompt in (True, False):
                with pytest.raises(BlockingIOError):
                    lake.cache.read_part_now(lake.version, 3 * MIB, 3 * MIB + 10, prompt=prompt)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "pread_now", would_block)
            assert await threads_for(4 * MIB) == 1
        assert await threads_for(4 * MIB + 10) == 0
        clock.advance(2 * TOUCH_S)
        assert await threads_for(4 * MIB + 20) == 1, "which notes that it is in use"


async def test_a_prompt_disk_is_read_without_a_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(call: object, *_: object, **__: object) -> None:
        raise AssertionError(f"{call} in a thread")

    async with lake_at(tmp_path) as lake:
        small = [lake.store.put(f"small{number}", content(number, 50 * KIB)) for number in range(300)]
        for version in small:
            assert await lake.reader.ensure(version, 0, 1)
        await on_disk(lake)
        monkeypatch.setattr(Promptness, "is_prompt", True)
        with monkeypatch.context() as patch:
            patch.setattr(WorkerThreads, "run", staticmethod(refuse))
            for number, version in enumerate(small):
                assert await lake.reader.read(version, 0, 1 << 20) == content(number, 50 * KIB)
            assert await lake.read(7 * MIB, 50 * KIB, jumps=True) == reader_data()[7 * MIB : 7 * MIB + 50 * KIB]
        assert lake.cache.statistics().files_open == FILES_OPEN_MAX
        with lake.cache.files._files_lock:  # noqa: SLF001  # as above
            with pytest.raises(BlockingIOError):  # somebody creates or removes files
                lake.cache.read_all_now(small[0])
            assert lake.cache.read_all_now(small[-1]) is not None, "which is nothing to files that are open"
        assert (lake.store.gets, lake.metrics.misses) == ([], 0)


async def test_parts_of_what_is_not_there_take_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack that comes block by block, and objects that have no pieces."""
    looked: list[str] = []
    real = BlockCache.read_part

    def look(cache: BlockCache, *asked: Any) -> memoryview | None:
        looked.append("read_part")
        return real(cache, *asked)

    monkeypatch.setattr(BlockCache, "read_part", look)
    async with lake_at(tmp_path) as lake:
        small = lake.store.put("small", content("small", MIB))
        assert await lake.reader.ensure(small, 0, 1)
        assert await lake.reader.ensure(lake.version, 0, MIB)
        await lake.idle()
        lake.cache.close()
        lake.restart()
        monkeypatch.setattr(Promptness, "is_prompt", True)
        assert await lake.read(3 * MIB, 10, jumps=True) == reader_data()[3 * MIB :][:10]
        assert await lake.reader.read(small, 5, 10, jumps=True) == content("small", MIB)[5:15]
        assert looked == []
        assert len(lake.store.gets) == 1


async def test_what_is_damaged_is_no_better_without_a_thread(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        small = lake.store.put("small", content("small", 50 * KIB))
        assert await lake.reader.ensure(small, 0, 1)
        await lake.idle()
        lake.cache.close()
        (path,) = cache_files(tmp_path)
        with path.open("r+b") as file:
            file.write(b"\xff\x00\xff")
        lake.restart()
        assert await lake.reader.read(small, 0, 100) == content("small", 50 * KIB)[:100]
        assert (len(lake.store.gets), lake.metrics.damaged) == (1, 1)


async def test_who_wants_what_is_around_gets_it_with_one_read(tmp_path: Path, disk_bytes: list[int]) -> None:
    async with lake_at(tmp_path) as lake:
        await on_disk(lake)
        await lake.read(5 * MIB + 10, 100, jumps=True, around=True)
        disk_bytes.clear()
        assert await lake.read(5 * MIB, MIB) == reader_data()[5 * MIB : 6 * MIB]
        assert disk_bytes == []


async def test_a_damaged_part_is_fetched_again(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await on_disk(lake)
        (path,) = cache_files(tmp_path)
        with path.open("r+b") as file:
            file.seek(3 * MIB + 5)
            file.write(b"\xff\x00\xff")
        assert await lake.read(3 * MIB, 100, jumps=True) == reader_data()[3 * MIB : 3 * MIB + 100]
        assert lake.store.gets == [("file", 3 * MIB, 4 * MIB)]
        assert lake.metrics.damaged == 1
        await lake.idle()
        lake.restart()
        assert await lake.read(3 * MIB, 100, jumps=True) == reader_data()[3 * MIB : 3 * MIB + 100]
        assert lake.store.gets == []
