"""How often a mount lists directories for what other programs put there, and what users get to see meanwhile."""

from __future__ import annotations

import errno
import itertools
from functools import partial
from pathlib import Path

import pytest
import trio

from lakefs_fuse.errors import FileError
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.vfs.namespace import look_intervals, subtree_listing
from lakefs_fuse.vfs.namespace.look_intervals import INTERVAL_S_MAX, LookIntervals
from tests.memory_store import MemoryStore, Pause
from tests.vfs.lakes import TTL_S, Clock, Lake, lake, two_lakes

NS = 1_000_000_000


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lakes of more than four plain objects are large."""
    monkeypatch.setattr(subtree_listing, "KEYS_MAX", 4)


def large_lake(directories: int = 3) -> MemoryStore:
    store = MemoryStore()
    for directory in range(directories):
        for number in range(5):
            store.give(f"{directory}/{number}", b"x")
    return store


async def lists_of(m: Lake, store: MemoryStore, paths: str = "012") -> list[str]:
    """Prefixes of the LISTs that it takes to show some directories."""
    before = len(store.requests)
    for path in paths:
        await m.names(path)
    return [each.key for each in store.requests[before:] if not each.key.startswith(RESERVED_PREFIX)]


async def test_directories_of_a_large_lake_are_listed_ever_more_rarely(tmp_path: Path) -> None:
    store, clock = large_lake(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await lists_of(m, store)
        listed_s: list[int] = []
        for minute in range(1, 5 * 60):
            clock.advance(TTL_S + 1 / 1000)
            if "1/" in await lists_of(m, store):
                listed_s.append(minute)
        gaps = [after - before for before, after in itertools.pairwise(listed_s)]
        assert listed_s[0] <= 2
        assert gaps[:4] == [2, 4, 8, 16]
        assert gaps[-1] * TTL_S <= INTERVAL_S_MAX + 2 * TTL_S
        assert len(listed_s) < 15


async def test_object_of_another_program_makes_looks_frequent_again(tmp_path: Path) -> None:
    store, clock = large_lake(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        for _ in range(60):
            clock.advance(TTL_S + 1)
            await lists_of(m, store)
        store.give("1/new", b"x")
        clock.advance(INTERVAL_S_MAX)
        assert "new" in await m.names("1")
        for _ in range(2):
            store.give("1/new", b"newer")
            store.take("1/0") if "1/0" in store.objects else store.give("1/0", b"back")
            clock.advance(TTL_S + 1)
            assert ("0" in await m.names("1")) == ("1/0" in store.objects)
            assert await m.read("1/new") == b"newer"


async def test_objects_of_mounts_do_not_make_looks_frequent(tmp_path: Path) -> None:
    store, clock = large_lake(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        for _ in range(60):
            clock.advance(TTL_S + 1)
            await lists_of(two, store)
        listed: list[str] = []
        for number in range(20):
            for each in range(3):
                await one.write(f"1/new{number}-{each}", b"x")
            await one.parts.committer.flush_announcements()
            await two.poll()
            clock.advance(TTL_S + 1)
            assert f"new{number}-0" in await two.names("1")
            listed += await lists_of(two, store, "02")
        assert len(listed) <= 6, "two directories, an hour at most"
        clock.advance(TTL_S + 1)
        assert await lists_of(two, store, "1") == []


async def test_small_lake_and_packed_directories_are_listed_each_ttl(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    for key in ("a/x", "b/x"):
        store.give(key, b"x")
    async with lake(store, tmp_path, clock=clock) as m:
        for number in range(12):
            await m.mkdir(f"packed{number}")
        await m.names()
        for number in range(20):
            clock.advance(TTL_S + 1)
            store.take(f"a/{number - 1}")
            store.give(f"a/{number}", b"x")
            assert await m.names("a") == sorted([f"{number}", "x"])
            assert await m.names("b") == ["x"]


async def test_directory_alone_in_a_small_lake_is_listed_each_ttl(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        assert await m.names() == []
        for number in range(10):
            for _ in range(3):
                clock.advance(TTL_S + 1)
                await m.names()
            store.give(f"{number}", b"x")
            clock.advance(TTL_S + 1)
            assert len(await m.names()) == number + 1


async def test_listing_that_answers_for_many_directories_is_used_at_once(tmp_path: Path) -> None:
    """A directory that backed off while it was the only one in use below another one, then is one of several."""
    store, clock = large_lake(), Clock()
    for key in ("few/a/x", "few/b/x", "few/c/x"):
        store.give(key, b"x")
    async with lake(store, tmp_path, clock=clock) as m:
        await lists_of(m, store)
        for _ in range(12):
            clock.advance(TTL_S + 1)
            await m.names("few/a")
        store.give("few/a/y", b"x")
        clock.advance(TTL_S + 1)
        assert await m.names("few/b") == await m.names("few/c") == ["x"]
        before = len(store.requests)
        assert await m.names("few/a") == ["x", "y"]
        assert len(store.requests) == before, "the LIST for the others answers"


@pytest.mark.parametrize("foreign_s", [0.0, 10.0, 600.0])
async def test_interval_that_is_given_counts_for_every_directory(tmp_path: Path, foreign_s: float) -> None:
    store, clock = large_lake(), Clock()
    async with lake(store, tmp_path, clock=clock, foreign_s=foreign_s) as m:
        for number in range(5):
            assert f"new{number - 1}" in await m.names("1") or not number
            assert m.fs.listing_fresh_s((await m.found("1")).inode) <= min(TTL_S, foreign_s)
            store.give(f"1/new{number}", b"x")
            clock.advance(max(0.0, foreign_s - 1))
            assert (f"new{number}" in await m.names("1")) == (not foreign_s)
            clock.advance(2)


async def test_ttl_of_zero_asks_always(tmp_path: Path) -> None:
    store, clock = large_lake(), Clock()
    async with lake(store, tmp_path, clock=clock, metadata_ttl_s=0.0) as m:
        for number in range(5):
            store.give(f"1/new{number}", b"x")
            assert f"new{number}" in await m.names("1")


async def test_kernel_keeps_no_answer_for_longer_than_the_ttl(tmp_path: Path) -> None:
    store, clock = large_lake(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        inode = (await m.found("1")).inode
        for _ in range(40):
            clock.advance(TTL_S + 1)
            await lists_of(m, store)
            assert 0 < m.fs.listing_fresh_s(inode) <= TTL_S
            assert 0 < (await m.fs.lookup(inode, b"0"))[1] <= TTL_S


async def test_change_of_names_believes_no_listing_beyond_the_ttl(tmp_path: Path) -> None:
    store, clock = large_lake(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.mkdir("1/empty")
        await m.sync()
        for _ in range(30):
            clock.advance(TTL_S + 1)
            await lists_of(m, store)
            await m.names("1/empty")
        while (inode := (await m.found("1/empty")).inode) and m.fs.namespace.directory_fresh_s(inode, within_ttl=True):
            clock.advance(TTL_S)
        assert m.fs.namespace.directory_fresh_s(inode) > 0
        store.give("1/empty/of another program", b"x")
        with pytest.raises(FileError) as refused:
            await m.rmdir("1/empty")
        assert refused.value.errno == errno.ENOTEMPTY


async def test_wait_for_an_object_of_another_program_asks_each_ttl(tmp_path: Path) -> None:
    store, clock = large_lake(), Clock()
    async with lake(store, tmp_path, clock=clock, refresh_s=0.05) as m:
        for _ in range(30):
            clock.advance(TTL_S + 1)
            await lists_of(m, store)
        assert await m.lookup("1/new") is None
        store.give("1/new", b"x")
        clock.advance(TTL_S + 1)
        assert await m.lookup("1/new") is None, "nobody looks yet"
        await m.fs.wait_path("1/new", "", 10.0)
        assert await m.lookup("1/new") is not None


def test_intervals_are_bounded_in_time_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(look_intervals, "DIRECTORIES_MAX", 3)
    looks = LookIntervals(60.0, None)
    for _ in range(20):
        looks.lengthen(1)
    assert looks.interval_ns(1) == INTERVAL_S_MAX * NS
    for directory in range(2, 5):
        looks.lengthen(directory)
    assert [looks.interval_ns(directory) // NS for directory in range(1, 5)] == [60, 120, 120, 120]
    looks.reset(3)
    assert looks.interval_ns(3) == 60 * NS
    for ttl_s, foreign_s in ((0.0, None), (7200.0, None), (60.0, 5.0), (60.0, 7200.0)):
        looks = LookIntervals(ttl_s, foreign_s)
        first_ns = looks.interval_ns(1)
        looks.lengthen(1)
        assert looks.interval_ns(1) == first_ns


async def test_refresh_shows_what_is_in_the_store_when_it_began(tmp_path: Path) -> None:
    store, clock = large_lake(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await lists_of(two, store)
        assert await two.lookup("1/new") is None
        store.give("1/new", b"x")
        store.give("new/below/x", b"x")
        store.give("2/0", b"replaced")
        await one.rename("0/1", "0/renamed")
        assert await two.fs.refresh("1") == {}
        assert "new" in await two.names("1")
        assert "renamed" in await two.names("0"), "commits are heard of, too"
        await two.fs.refresh("2/0")
        assert await two.read("2/0") == b"replaced"
        await two.fs.refresh("new/below/x")
        assert await two.names("new/below") == ["x"]
        store.take("1/new")
        await two.fs.refresh("1/new")
        assert await two.lookup("1/new") is None


async def test_refresh_of_all_below_lists_each_directory(tmp_path: Path) -> None:
    store, clock = large_lake(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await lists_of(m, store)
        for directory in range(3):
            store.give(f"{directory}/new", b"x")
            store.give(f"{directory}/below/new", b"x")
        await m.fs.refresh("", recursive=True)
        for directory in range(3):
            assert await m.lookup(f"{directory}/new") is not None
            assert await m.names(f"{directory}/below") == ["new"]


async def test_refresh_does_not_believe_a_list_that_began_before(tmp_path: Path) -> None:
    store, clock = large_lake(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await lists_of(m, store)
        clock.advance(TTL_S + 1)
        store.hook = pause = Pause(lambda each: each.what == "list" and each.key == "1/", when="after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.names, "1")
            await trio.to_thread.run_sync(pause.reached.wait)
            clock.advance(0.001)
            store.give("1/new", b"x")
            nursery.start_soon(partial(m.fs.refresh, "1"))
            await trio.sleep(0.2)
            pause.resume()
        assert await m.lookup("1/new") is not None
