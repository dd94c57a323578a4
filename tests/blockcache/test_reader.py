"""The reader over a counting store and real cache files: bytes, GET counts, sharing, errors, bounds."""

import errno
import functools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from lakefs_fuse.blockcache.cache import BlockCache, CacheState
from lakefs_fuse.blockcache.failed_reads import WAITED_S_MIN
from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.environment.clock import Clock, SystemClock
from lakefs_fuse.errors import AccessDenied, FileError, Unavailable
from lakefs_fuse.metrics import CacheMetrics, ReadMetrics
from lakefs_fuse.store.protocol import ObjectMeta
from tests.blockcache.reading import MIB, MemoryStore, cache_files, content, for_tasks, make_cache

KIB = 1024


@functools.cache
def reader_data() -> bytes:
    """Of an object. Made once, by the first test: each worker collects this module."""
    return content("reader", 20 * MIB + 123)


class Lake:
    """A store, a cache and a reader over them."""

    def __init__(self, directory: Path, nursery: trio.Nursery) -> None:
        self.directory = directory
        self.nursery = nursery
        self.clock: Clock = SystemClock()
        self.store = MemoryStore()
        self.version = self.store.put("file", reader_data())
        self.restart()

    def restart(self, *, scanned: bool = True, **options: int) -> None:
        """What a new daemon on the same cache directory has."""
        self.metrics, self.reads = CacheMetrics(), ReadMetrics()
        self.cache: BlockCache = make_cache(self.directory, self.metrics, scanned=scanned, clock=self.clock)
        self.store.gets.clear()
        self.learned: list[ObjectMeta] = []
        self.reader = BlockReader(
            self.store,
            for_tasks(self.cache, self.nursery),
            self.metrics,
            self.nursery,
            learned=self.learned.append,
            **options,  # type: ignore[arg-type]
        )

    async def read(
        self, offset: int, length: int, readahead: Readahead | None = None, *, jumps: bool = False, around: bool = False
    ) -> bytes:
        data = await self.reader.read(
            self.version, offset, length, readahead, jumps=jumps, around=around, reads=self.reads
        )
        return bytes(data)

    async def idle(self) -> None:
        """Until nothing is in flight any more."""
        with trio.fail_after(10):
            while self.reader.statistics().blocks_pending:
                await trio.sleep(0.002)


@asynccontextmanager
async def lake_at(directory: Path) -> AsyncIterator[Lake]:
    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            lake = Lake(directory, nursery)
            yield lake
            await lake.idle()
            nursery.cancel_scope.cancel()


async def test_ranges_are_cut_at_the_end_and_come_from_memory_the_second_time(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        assert await lake.read(5, 10) == reader_data()[5:15]
        assert await lake.read(MIB - 1, 2) == reader_data()[MIB - 1 : MIB + 1]
        assert await lake.read(20 * MIB + 100, 1000) == reader_data()[20 * MIB + 100 :]
        assert await lake.read(len(reader_data()), 1000) == b""
        assert await lake.read(len(reader_data()) + 5, 1000) == b""
        assert await lake.read(0, 0) == b""
        assert len(lake.store.gets) == 3
        assert await lake.read(0, 2 * MIB) == reader_data()[: 2 * MIB]
        assert len(lake.store.gets) == 3
        assert (lake.metrics.hits, lake.metrics.misses, lake.metrics.prefetched_blocks) == (3, 3, 0)
        assert isinstance(await lake.reader.read(lake.version, 0, 100), memoryview), "no copy"


async def test_reads_are_counted_by_where_the_bytes_were_and_what_they_waited_for(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.gate = trio.Event()

        async def open_gate() -> None:
            await trio.sleep(0.2)
            assert lake.store.gate is not None
            lake.store.gate.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(open_gate)
            await lake.read(100, MIB)
        reads = lake.reads
        assert (reads.bytes_of_store, reads.bytes_of_disk, reads.bytes_of_memory) == (MIB, 0, 0)
        assert 0.19 <= reads.waited_store_s < 5
        assert reads.waited_disk_s == 0
        waited_s = reads.waited_store_s
        await lake.read(MIB, 1000)
        assert (reads.bytes_of_store, reads.bytes_of_memory) == (MIB, 1000)
        await lake.idle()
        lake.cache.close()
        lake.restart()
        await lake.read(0, 1000)
        await lake.read(5, 100, Readahead(), jumps=True)
        assert (lake.reads.bytes_of_store, lake.reads.bytes_of_disk, lake.reads.bytes_of_memory) == (0, 1000, 100)
        assert lake.reads.waited_disk_s > 0
        assert lake.reads.waited_store_s == 0
        assert reads.waited_store_s == waited_s


async def test_read_that_fails_waited_for_the_store(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.fail_with = AccessDenied("no")
        with pytest.raises(FileError):
            await lake.read(0, 1000)
        assert lake.reads.waited_store_s > 0
        assert lake.reads.bytes_of_store == 0


async def test_small_objects_are_not_taken_for_local_before_the_files_are_counted(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        here, elsewhere = lake.store.put("here", b"x" * 1000), lake.store.put("elsewhere", b"y" * 1000)
        await lake.reader.read(here, 0, 1000)
        await lake.idle()
        lake.restart(scanned=False)
        for _ in range(2):
            assert await lake.reader.is_local(Extent(here, 0, 1000))
            assert not await lake.reader.is_local(Extent(elsewhere, 0, 1000))
            lake.cache.scan()


async def test_small_object_that_was_evicted_is_not_taken_for_local(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        version = lake.store.put("small", b"x" * 1000)
        await lake.reader.read(version, 0, 1000)
        await lake.idle()
        lake.restart()
        for is_here in (True, False):
            assert await lake.reader.is_local(Extent.whole(version)) == is_here
            assert await lake.reader.has_first_block(version) == is_here
            lake.cache.drop([(version, 1)])
        assert lake.cache.may_have(version)


async def test_adjacent_blocks_are_one_get_up_to_a_bound(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        assert await lake.read(0, len(reader_data())) == reader_data()
        assert sorted(lake.store.gets) == [
            ("file", 0, 8 * MIB),
            ("file", 8 * MIB, 16 * MIB),
            ("file", 16 * MIB, len(reader_data())),
        ]


async def test_a_restart_reads_from_disk_and_only_what_is_missing_from_the_store(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.read(3 * MIB, 2 * MIB)
        await lake.idle()
        lake.cache.close()
        lake.restart()
        assert await lake.read(2 * MIB, 4 * MIB) == reader_data()[2 * MIB : 6 * MIB]
        assert sorted(lake.store.gets) == [("file", 2 * MIB, 3 * MIB), ("file", 5 * MIB, 6 * MIB)]
        assert (lake.metrics.hits, lake.metrics.misses) == (2, 2)


async def test_a_damaged_block_is_fetched_again(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.read(0, 2 * MIB)
        await lake.idle()
        (path,) = cache_files(tmp_path)
        with path.open("r+b") as file:
            os.pwrite(file.fileno(), b"\xff\x00\xff", 100)
        lake.restart()
        assert await lake.read(0, 2 * MIB) == reader_data()[: 2 * MIB]
        assert lake.store.gets == [("file", 0, MIB)]
        assert lake.metrics.damaged == 1
        await lake.idle()
        lake.restart()
        assert await lake.read(0, 2 * MIB) == reader_data()[: 2 * MIB]
        assert lake.store.gets == []


async def test_readers_of_one_block_share_one_get(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        answers: list[bytes] = []

        async def read(offset: int) -> None:
            answers.append(await lake.read(offset, 128 * KIB))

        async with trio.open_nursery() as nursery:
            for piece in range(8):
                nursery.start_soon(read, piece * 128 * KIB)
        assert b"".join(sorted(answers, key=reader_data().find)) == reader_data()[:MIB]
        assert lake.store.gets == [("file", 0, MIB)]
        assert (lake.metrics.hits, lake.metrics.misses) == (7, 1)


async def test_one_who_is_cancelled_takes_nobody_along(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.gate = trio.Event()
        answers: list[bytes] = []
        first = trio.CancelScope()

        async def read_first() -> None:
            with first:
                await lake.read(0, 10)

        async def read_second() -> None:
            answers.append(await lake.read(5, 10))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_first)
            await lake.store.started.wait()
            nursery.start_soon(read_second)
            await trio.testing.wait_all_tasks_blocked()
            first.cancel()
            await trio.testing.wait_all_tasks_blocked()
            lake.store.gate.set()
        assert first.cancelled_caught
        assert answers == [reader_data()[5:15]]
        assert len(lake.store.gets) == 1


async def test_an_error_wakes_all_who_wait_and_is_not_remembered(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.gate = trio.Event()
        lake.store.fail_with = AccessDenied("the store refuses")
        codes: list[int] = []

        async def read() -> None:
            with pytest.raises(FileError, match="the store refuses") as caught:
                await lake.read(0, 10)
            codes.append(caught.value.errno)

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(read)
            await lake.store.started.wait()
            lake.store.gate.set()
        assert codes == [errno.EACCES] * 5
        assert len(lake.store.gets) == 1
        lake.store.fail_with = None
        assert await lake.read(0, 10) == reader_data()[:10]


@pytest.mark.parametrize("error", [Unavailable("down"), RuntimeError("a bug")])
async def test_any_other_error_is_eio_and_ends_no_nursery(tmp_path: Path, error: Exception) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.fail_with = error
        for _ in range(2):
            with pytest.raises(FileError) as caught:
                await lake.read(0, 10 * MIB)
            assert caught.value.errno == errno.EIO
        await lake.idle()
        assert lake.reader.statistics().bytes_inflight == 0


@pytest.mark.parametrize("within", [None, (MIB, 3 * MIB)], ids=["object", "file of a pack"])
async def test_page_of_a_read_that_failed_is_refused_without_a_get(
    tmp_path: Path, within: tuple[int, int] | None
) -> None:
    """The kernel asks for the first page of its readahead once more, and would wait for as long again."""
    async with lake_at(tmp_path) as lake:
        lake.store.fail_with, lake.store.gate = Unavailable("down"), trio.Event()

        async def read(length: int) -> None:
            with pytest.raises(FileError, match="down") as caught:
                await lake.reader.read(lake.version, MIB, length, Readahead(), within=within)
            assert caught.value.errno == errno.EIO

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read, 128 * KIB)
            await trio.sleep(1.1 * WAITED_S_MIN)
            lake.store.gate.set()
        gets = len(lake.store.gets)
        await read(4 * KIB)
        assert len(lake.store.gets) == gets
        lake.store.fail_with = None
        data = await lake.reader.read(lake.version, MIB, 4 * KIB, Readahead(), within=within)
        assert bytes(data) == reader_data()[MIB : MIB + 4 * KIB]


async def test_readers_wake_when_the_mount_ends(tmp_path: Path) -> None:
    codes: list[int] = []
    with trio.fail_after(10):
        async with trio.open_nursery() as outer:

            async def read(lake: Lake) -> None:
                with pytest.raises(FileError) as caught:
                    await lake.read(0, 10)
                codes.append(caught.value.errno)

            async with trio.open_nursery() as nursery:
                lake = Lake(tmp_path, nursery)
                lake.store.gate = trio.Event()
                outer.start_soon(read, lake)
                await lake.store.started.wait()
                nursery.cancel_scope.cancel()
    assert codes == [errno.EIO]
    assert lake.reader.statistics().bytes_inflight == 0


@pytest.mark.parametrize("ignores_etag", [False, True])
async def test_a_replaced_object_is_stale_never_mixed(tmp_path: Path, ignores_etag: bool) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.ignores_etag = ignores_etag
        assert await lake.read(0, 10) == reader_data()[:10]
        lake.store.put("file", content("newer", len(reader_data())))
        assert await lake.read(100, 10) == reader_data()[100:110], "what is here is the old version still"
        with pytest.raises(FileError) as caught:
            await lake.read(5 * MIB, 10)
        assert caught.value.errno == errno.ESTALE
        new = lake.store.version("file")
        assert bytes(await lake.reader.read(new, 0, 10)) == content("newer", len(reader_data()))[:10]
        del lake.store.objects["file"]
        with pytest.raises(FileError) as caught:
            await lake.read(7 * MIB, 10)
        assert caught.value.errno == errno.ESTALE


async def test_an_answer_of_the_wrong_length_is_an_error(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        longer = Version("file", lake.version.etag, len(reader_data()) + 10)
        with pytest.raises(FileError, match="answered"):
            await lake.reader.read(longer, len(reader_data()), 10)
        assert cache_files(tmp_path) == []


async def sequential(lake: Lake, step: int = 128 * KIB) -> bytes:
    readahead, pieces = Readahead(), []
    for offset in range(0, lake.version.size, step):
        pieces.append(await lake.read(offset, step, readahead))
        await trio.lowlevel.checkpoint()
    return b"".join(pieces)


async def test_a_sequential_reader_gets_few_gets_and_the_second_time_none(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        data = content("large", 64 * MIB)
        lake.version = lake.store.put("large", data)
        assert await sequential(lake) == data
        assert len(lake.store.gets) <= 64 // 8 + 6
        fetched = sorted((start, end) for _, start, end in lake.store.gets)
        assert sum(end - start for start, end in fetched) == len(data), "nothing twice, nothing beyond"
        assert lake.metrics.misses + lake.metrics.prefetched_blocks == 64
        assert lake.metrics.misses < 40
        await lake.idle()
        lake.restart()
        assert await sequential(lake) == data
        assert lake.store.gets == []
        assert lake.metrics.misses == 0


async def test_a_starved_sequential_reader_still_makes_large_gets(tmp_path: Path) -> None:
    """With no room to fetch ahead, readers wait for room, so each wait must bring much."""
    async with lake_at(tmp_path) as lake:
        data = content("large", 64 * MIB)
        lake.version = lake.store.put("large", data)
        lake.restart(inflight_bytes_max=8 * MIB)
        assert await sequential(lake) == data
        assert len(lake.store.gets) <= 24


async def test_a_small_file_is_fetched_whole_by_a_handle_and_by_block_without_one(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        lake.version = lake.store.put("small", reader_data()[: 3 * MIB])
        assert await lake.read(2 * MIB, 5, Readahead()) == reader_data()[2 * MIB : 2 * MIB + 5]
        assert lake.store.gets == [("small", 0, 3 * MIB)]
        assert (lake.metrics.misses, lake.metrics.prefetched_blocks) == (1, 2)
        lake.version = lake.store.put("other", reader_data()[1 : 3 * MIB])
        await lake.read(2 * MIB, 5)
        assert lake.store.gets[1:] == [("other", 2 * MIB, 3 * MIB - 1)]


async def test_memory_is_bounded_with_many_readers_ahead(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        versions = [lake.store.put(f"f{number}", reader_data()[number:]) for number in range(6)]
        lake.restart(memory_blocks=8, inflight_bytes_max=16 * MIB)
        peak = 0

        async def read(number: int) -> None:
            nonlocal peak
            readahead = Readahead()
            for offset in range(0, versions[number].size, 512 * KIB):
                got = await lake.reader.read(versions[number], offset, 512 * KIB, readahead)
                assert got == reader_data()[number + offset : number + offset + 512 * KIB]
                statistics = lake.reader.statistics()
                peak = max(peak, statistics.memory_bytes + statistics.bytes_inflight)

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(read, number)
        assert peak <= 24 * MIB
        assert lake.store.bytes_in_answer_max <= 8 * MIB


async def test_reading_goes_on_without_the_cache_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with lake_at(tmp_path) as lake:
        data = content("large", 40 * MIB)
        lake.version = lake.store.put("large", data)

        def full(*_: object) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            assert await sequential(lake) == data
            await lake.idle()
        assert lake.cache.state is CacheState.FULL
        fetched = sum(end - start for _, start, end in lake.store.gets)
        assert fetched == len(data), "what was fetched ahead was kept in memory until it was read"


async def test_nobody_looks_on_the_disk_for_what_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def watch(name: str) -> None:
        real = getattr(BlockCache, name)

        def look(*asked: object, **how: object) -> Any:
            looked.append(name)
            return real(*asked, **how)

        monkeypatch.setattr(BlockCache, name, look)

    watch("read_part")
    watch("read_blocks")
    watch("has_blocks")
    watch("has_blocks_now")
    async with lake_at(tmp_path) as lake:
        other = lake.store.put("other", reader_data())
        assert await lake.read(0, 10) == reader_data()[:10]
        assert await lake.reader.ensure(other, 0, MIB)
        assert looked == ["has_blocks_now"], "that it was kept"
        await lake.idle()
        lake.cache.close()
        lake.restart()
        assert await lake.read(0, 10) == reader_data()[:10]
        assert looked[1:] == ["read_blocks"]
        assert lake.store.gets == []


async def test_ensure_brings_a_range_to_disk(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.read(4 * MIB, 10)
        await lake.idle()
        lake.store.gets.clear()
        assert await lake.reader.ensure(lake.version, 2 * MIB + 5, len(reader_data()))
        assert lake.cache.has_blocks(lake.version, 0, 21) == [False] * 2 + [True] * 19
        assert sum(end - start for _, start, end in lake.store.gets) == len(reader_data()) - 3 * MIB
        count = len(lake.store.gets)
        assert await lake.reader.ensure(lake.version, 2 * MIB + 5, 1 << 40)
        assert await lake.reader.ensure(lake.version, 5, 5)
        assert len(lake.store.gets) == count


async def test_ensure_joins_what_is_in_flight_and_reports_errors(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        lake.store.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lake.read, 0, 10)
            await lake.store.started.wait()
            nursery.start_soon(lake.reader.ensure, lake.version, 0, MIB)
            await trio.sleep(0.05)
            lake.store.gate.set()
        assert lake.store.gets == [("file", 0, MIB)]
        lake.store.fail_with = Unavailable("down")
        with pytest.raises(FileError, match="down"):
            await lake.reader.ensure(lake.version, 0, 2 * MIB)


async def test_ensure_is_false_where_the_cache_keeps_nothing(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        lake.cache.close()
        assert not await lake.reader.ensure(lake.version, 0, MIB)


async def test_metadata_that_came_along_is_passed_on(tmp_path: Path) -> None:
    async with lake_at(tmp_path) as lake:
        await lake.read(0, 10)
        assert lake.learned == []
        lake.store.metadata = {"mode": "33188"}
        await lake.read(MIB, 10)
        assert [meta.metadata for meta in lake.learned] == [{"mode": "33188"}]
