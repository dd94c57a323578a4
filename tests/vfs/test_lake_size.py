"""What df(1) shows: how often names are counted, at what share of a core, and what is free."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from lakefs_fuse.environment.local_disk import free_bytes
from lakefs_fuse.errors import CacheError, Unavailable
from lakefs_fuse.meta.tree import Usage
from lakefs_fuse.staging.staging_area import IN_FLIGHT_BYTES
from lakefs_fuse.vfs.lake_size import COUNT_AGE_S_MIN, COUNT_SHARE, UNBOUNDED_BYTES, WAIT_S_MAX, LakeSize, NameCount
from tests.fakes import local_store
from tests.memory_store import MemoryStore
from tests.vfs.lakes import lake

STEP_S = 0.001


class Names:
    """A tree whose count takes so many steps of STEP_S of a trio clock each."""

    def __init__(self, clock: MockClock) -> None:
        self.clock, self.steps, self.counts, self.broken = clock, 1, 0, False

    def count(self) -> Iterator[Usage]:
        self.counts += 1
        for number in range(1, self.steps + 1):
            if self.broken:
                raise CacheError("the disk is broken")
            self.clock.jump(STEP_S)
            yield Usage(number, 10 * number)


async def test_names_are_counted_again_after_a_hundred_times_as_long(autojump_clock: MockClock) -> None:
    names = Names(autojump_clock)
    async with trio.open_nursery() as nursery:
        count = NameCount(names.count, nursery)
        names.steps = 20
        assert await count.usage() == Usage(20, 200)
        names.steps = 30
        assert await count.usage() == Usage(20, 200), "a moment ago"
        age_s = COUNT_SHARE * 20 * STEP_S
        assert age_s > COUNT_AGE_S_MIN
        await trio.sleep(age_s - 0.2)
        assert await count.usage() == Usage(20, 200)
        await trio.sleep(0.3)
        assert await count.usage() == Usage(30, 300)
        assert names.counts == 2


async def test_long_count_is_answered_so_far_and_pauses(autojump_clock: MockClock) -> None:
    names = Names(autojump_clock)
    names.steps = 1000
    async with trio.open_nursery() as nursery:
        count = NameCount(names.count, nursery)
        began_s = trio.current_time()
        first = await count.usage()
        assert 0 < first.names < 1000
        assert trio.current_time() - began_s == pytest.approx(WAIT_S_MAX, abs=0.1)
        while (await count.usage()).names < 1000:
            pass
        assert trio.current_time() - began_s > 5, "it leaves the loop to others for most of the time"
        await trio.sleep(COUNT_SHARE * 1000 * STEP_S + 1)
        names.steps = 2000
        assert await count.usage() == Usage(1000, 10_000), "what was known before, until it ends"
        assert names.counts == 2
        nursery.cancel_scope.cancel()


async def test_count_that_fails_leaves_what_was_known(autojump_clock: MockClock) -> None:
    names = Names(autojump_clock)
    async with trio.open_nursery() as nursery:
        count = NameCount(names.count, nursery)
        assert await count.usage() == Usage(1, 10)
        names.broken = True
        await trio.sleep(COUNT_AGE_S_MIN)
        assert await count.usage() == Usage(1, 10)
        names.broken = False
        names.steps = 2
        await trio.sleep(COUNT_AGE_S_MIN)
        assert await count.usage() == Usage(2, 20)


async def test_names_that_never_change_are_counted_once_until_they_are_others(autojump_clock: MockClock) -> None:
    names = Names(autojump_clock)
    async with trio.open_nursery() as nursery:
        count = NameCount(names.count, nursery, is_constant=True)
        names.steps = 1000
        await count.usage()
        names.steps = 3
        count.forget()  # while the first is counted
        assert await count.usage() == Usage(3, 30)
        await trio.sleep(80_000)
        assert await count.usage() == Usage(3, 30)
        assert names.counts == 2


async def test_bucket_is_unbounded_while_uploads_make_room(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, durability="writeback", staging_bytes_max=1 << 30) as m:
        await m.mkdir("d")
        await m.write("d/file", bytes(1000))
        await m.fs.make_durable()
        size = await m.fs.size()
        assert (size.names, size.bytes, size.free_bytes) == (2, 1000, UNBOUNDED_BYTES)
        m.parts.writeback.error = Unavailable("the store is away")
        assert (await m.fs.size()).free_bytes == (1 << 30) - m.parts.staging.bytes_used
        m.parts.writeback.error = None
        assert (await m.fs.size()).free_bytes == UNBOUNDED_BYTES


async def test_staging_that_is_full_leaves_nothing_while_the_store_is_away(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, durability="writeback", staging_bytes_max=1 << 20) as m:
        m.parts.writeback.error = Unavailable("the store is away")
        m.parts.staging.reserve_now(2 << 20)
        assert (await m.fs.size()).free_bytes == 0
        m.parts.staging.release(2 << 20)
        m.parts.writeback.error = None


async def test_full_disk_of_the_cache_leaves_nothing_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with lake(MemoryStore(), tmp_path) as m:
        staging = m.parts.staging
        monkeypatch.setattr(staging.disk, "free_bytes", lambda _: IN_FLIGHT_BYTES)
        assert (await m.fs.size()).free_bytes == 0
        staging.reserve_now(1)
        assert (await m.fs.size()).free_bytes == UNBOUNDED_BYTES, "an upload makes room"
        staging.release(1)
        assert staging.can_have_room(1), "what the block cache evicts makes room"


async def test_directory_has_the_room_of_its_disk(tmp_path: Path) -> None:
    (tmp_path / "lake").mkdir()
    async with lake(local_store(str(tmp_path / "lake")), tmp_path / "cache") as m:
        assert (await m.fs.size()).free_bytes == pytest.approx(free_bytes(tmp_path), abs=64 << 20)


async def test_read_only_mount_has_nothing_free(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("name", b"bytes")
    async with lake(store, tmp_path, read_only=True) as m:
        await m.names()
        assert await m.fs.size() == LakeSize(1, 5)
