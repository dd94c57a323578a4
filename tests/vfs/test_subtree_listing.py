"""Subtrees listed by one LIST: what that costs, that nobody can tell, and when it is not done."""

from __future__ import annotations

import os
import random
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.errors import StoreError
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.vfs.namespace import outdated_names, subtree_listing
from lakefs_fuse.vfs.namespace.subtree_listing import LARGE_S_FIRST, FlatListing
from lakefs_fuse.vfs.namespace.tree_walk import list_everything
from tests.memory_store import Failures, MemoryStore
from tests.tiers import sized
from tests.vfs.lakes import NS, TTL_S, Clock, Lake, lake, two_lakes

ROOT_LISTS = 2
"""Before and behind the reserved keys."""
DIRECTORIES, TTLS = sized(80, 200), sized(8, 15)
"""So many are looked into at random, through so many TTLs."""


def listings_of(store: MemoryStore, since: int) -> list[str]:
    """Prefixes of the LISTs since so many requests, commit polls left out."""
    found = [request.key for request in store.requests[since:] if request.what == "list"]
    return [key for key in found if not key.startswith(RESERVED_PREFIX)]


def store_of(*keys: str) -> MemoryStore:
    store = MemoryStore()
    for key in keys:
        store.give(key, key.encode())
    return store


async def list_all(m: Lake, *paths: str) -> dict[str, list[str]]:
    return {path: await m.names(path) for path in paths}


@given(
    st.lists(st.text("ab/-.0", min_size=1, max_size=8), max_size=30),
    st.sampled_from(["", "a/", "b/", "a/b/", "a//", "/"]),
)
def test_a_page_of_a_flat_listing_is_what_a_list_with_a_delimiter_brings(keys: list[str], prefix: str) -> None:
    store = store_of(*keys)
    flat = FlatListing(0, set())
    flat.fill([meta for _, meta in store.objects.values()])
    expected = store.list_page(prefix, delimiter="/")
    page = flat.page(prefix)
    assert [meta.key for meta in page.objects] == [meta.key for meta in expected.objects]
    assert sorted(page.prefixes) == sorted(expected.prefixes)


@pytest.mark.parametrize("above", [pytest.param("", marks=pytest.mark.long), "data/"])
async def test_stat_at_random_over_packed_directories_costs_a_list_each_ttl(tmp_path: Path, above: str) -> None:
    store, clock, rng = store_of("other", "else/where"), Clock(), random.Random(0)
    async with lake(store, tmp_path, clock=clock) as m:
        if above:
            await m.mkdir(above[:-1])
        for number in range(DIRECTORIES):
            await m.mkdir(f"{above}{number}")
            await m.symlink(f"{above}{number}/file", "a name without an object")
        await m.sync()  # links that are committed a minute after they were made cost a LIST for each directory
        clock.advance(TTL_S + 1)
        before = len(store.requests)
        for _ in range(TTLS):
            for _ in range(DIRECTORIES // 2):
                assert await m.lookup(f"{above}{rng.randrange(DIRECTORIES)}/file") is not None
                assert await m.lookup(f"{above}{rng.randrange(DIRECTORIES)}/none") is None
            clock.advance(TTL_S + 1)
        assert len(listings_of(store, before)) <= TTLS * ROOT_LISTS + 2


async def test_what_others_put_replace_and_delete_is_seen_after_the_ttl(tmp_path: Path) -> None:
    store, clock = store_of("a/x", "b/x", "c/x", "c/stays", "d/e/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        for round_number in range(4):
            expected = {path: sorted(key[2:] for key in store.objects if key.startswith(f"{path}/")) for path in "abc"}
            before = len(store.requests)
            assert await list_all(m, "a", "b", "c") == expected
            assert await m.names("d/e") == ["x"]
            assert await m.read("b/x") == store.data("b/x")
            assert round_number < 1 or len(listings_of(store, before)) == ROOT_LISTS
            store.give(f"a/new{round_number}", b"new")
            store.give("b/x", b"replaced %d" % round_number)
            store.take("c/x") if round_number == 1 else store.give("c/x", b"again")
            clock.advance(TTL_S + 1)
        store.take("d/e/x")
        clock.advance(TTL_S + 1)
        await m.names("a")
        await m.names("b")
        assert await m.lookup("d/e/x") is None
        assert await m.lookup("d") is None


async def test_what_changed_here_since_the_list_stays(tmp_path: Path) -> None:
    """Each of these directories is asked about when the LIST that answers for all of them is older."""
    store, clock = store_of("a/x", "b/x", "c/x", "d/x", "e/f/x", "g/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        assert await list_all(m, "a", "b", "c", "d", "e/f", "g")
        clock.advance(TTL_S + 1)
        await m.names("a")
        before = len(store.requests)
        await m.names("b")
        assert not listings_of(store, before), "the LIST for a answers"
        clock.advance(TTL_S / 3)
        await m.write("c/y", b"written here")
        await m.rename("e", "h")
        await m.unlink("d/x")
        await m.rename("g", "i")
        await m.write("g", b"a file now")
        clock.advance(TTL_S / 3)
        assert await m.names("c") == ["x", "y"]
        assert await m.names("h/f") == ["x"]
        assert await m.names("i") == ["x"]
        assert await m.names("d") == []
        assert await m.read("g") == b"a file now"
        assert await m.names() == ["a", "b", "c", "d", "g", "h", "i"]


async def test_what_another_node_committed_since_the_list_stays(tmp_path: Path) -> None:
    store, clock = store_of("a/x", "b/x", "c/x", "d/x"), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await list_all(two, "a", "b", "c", "d")
        clock.advance(TTL_S + 1)
        await list_all(two, "a", "b")
        clock.advance(1)
        await one.rename("a/x", "c/y")
        await one.rename("d", "e")
        await one.sync()
        assert await two.poll()
        assert await two.names("c") == ["x", "y"]
        assert await two.names("e") == ["x"]
        assert await two.lookup("d") is None


async def test_a_name_that_was_asked_for_since_the_list_is_not_older_again(tmp_path: Path) -> None:
    store, clock = store_of("a/x", "b/x", "c/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await list_all(m, "a", "b", "c")
        clock.advance(TTL_S + 1)
        await list_all(m, "a", "b")
        clock.advance(1)
        store.give("c/x", b"newer")
        c, _ = await m.fs.lookup(1, b"c")
        assert c is not None
        await m.fs.namespace.lookup(c.inode, b"x", ask=True)
        assert await m.read("c/x") == b"newer"
        assert await m.names("c") == ["x"]
        assert await m.read("c/x") == b"newer"


async def test_directories_in_which_another_node_changes_names_share_a_list(tmp_path: Path) -> None:
    """In each a file gets another name between the LIST of one TTL and the next look at it."""
    directories = [f"{number:02}" for number in range(24)]
    store, clock = store_of(*(f"{each}/{name}" for each in directories for name in ("0", "x"))), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await list_all(one, *directories)
        assert await list_all(two, *directories) == {each: ["0", "x"] for each in directories}
        before, lists = len(store.requests), 0
        for turn in range(1, 5):
            for each in directories:
                store.give(f"{each}/put {turn}", b"by another program")
            clock.advance(TTL_S + 1)
            for each in directories:
                await two.lookup("00/x")  # begins a LIST if the last one is too old
                lists += len(listings_of(store, before))
                await one.rename(f"{each}/{turn - 1}", f"{each}/{turn}")
                await one.sync()
                assert await two.poll()
                clock.advance(TTL_S / 100)
                before = len(store.requests)
                assert await two.names(each) == [str(turn), *(f"put {number + 1}" for number in range(turn)), "x"]
            lists += len(listings_of(store, before))
            before = len(store.requests)
        assert lists <= 4 * (ROOT_LISTS + 1)


async def test_what_another_node_announced_since_the_list_is_asked_for(tmp_path: Path) -> None:
    store, clock = store_of("a/x", "b/x", "c/x", "d/x", "e/f/x"), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await list_all(two, "a", "b", "c", "d")
        clock.advance(TTL_S + 1)
        await list_all(two, "a", "b")
        clock.advance(1)
        await one.write("c/y", b"announced")
        await one.write("e/f/y", b"announced, where nothing was listed")
        await one.write("d/x", b"replaced")
        await one.parts.committer.flush_announcements()
        assert await two.poll()
        assert await two.names("c") == ["x", "y"]
        assert await two.names("e/f") == ["x", "y"]
        assert await two.read("d/x") == b"replaced"
        assert await two.read("c/y") == b"announced"


async def test_list_counts_for_no_name_of_a_directory_in_which_others_announced_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outdated_names, "NAMES_MAX", 2)
    store, clock = store_of("a/x", "b/x", "c/x"), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await list_all(two, "a", "b", "c")
        clock.advance(TTL_S + 1)
        await list_all(two, "a", "b")
        clock.advance(1)
        for number in range(4):
            await one.write(f"c/{number}", b"announced")
        await one.parts.committer.flush_announcements()
        assert await two.poll()
        assert await two.names("c") == ["0", "1", "2", "3", "x"]


async def test_directory_that_a_name_was_asked_for_in_is_merged_from_the_list(tmp_path: Path) -> None:
    store, clock = store_of("a/x", "b/x", "c/x", "c/y", "c/z"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await list_all(m, "a", "b", "c")
        clock.advance(TTL_S + 1)
        store.give("c/seen by the LIST", b"")
        await list_all(m, "a", "b")
        clock.advance(1)
        store.give("c/x", b"newer")
        store.take("c/y")
        store.give("c/new", b"new")
        c = (await m.found("c")).inode
        for name in (b"x", b"y", b"new"):
            await m.fs.namespace.lookup(c, name, ask=True)
        before = len(store.requests)
        assert await m.names("c") == ["new", "seen by the LIST", "x", "z"]
        assert await m.read("c/x") == b"newer"
        assert not listings_of(store, before)


async def test_file_that_was_closed_since_the_list_stays(tmp_path: Path) -> None:
    """The LIST lacks its object, or shows the one that it replaced."""
    store, clock = store_of("a/x", "b/x", "c/x"), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never") as m:
        await list_all(m, "a", "b", "c")
        handles = [await m.create("c/new"), await m.open("c/x", os.O_WRONLY | os.O_TRUNC)]
        for handle in handles:
            await m.fs.write(handle, 0, b"written here")
        clock.advance(TTL_S + 1)
        await list_all(m, "a", "b")
        clock.advance(1)
        for handle in handles:
            await m.close(handle)
        before = len(store.requests)
        assert await m.names("c") == ["new", "x"]
        assert not listings_of(store, before)
        assert await m.read("c/x") == b"written here"
        assert await m.read("c/new") == b"written here"


async def test_name_that_was_asked_for_in_vain_is_what_the_list_shows(tmp_path: Path) -> None:
    store, clock = store_of("a/x", "b/x", "c/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await list_all(m, "a", "b", "c")
        clock.advance(TTL_S + 1)
        store.give("c/x", b"newer")
        await list_all(m, "a", "b")
        store.hook = Failures(lambda request: request.what == "list", StoreError("broken"))
        c = (await m.found("c")).inode
        with pytest.raises(StoreError):
            await m.fs.namespace.lookup(c, b"x", ask=True)
        before = len(store.requests)
        assert await m.names("c") == ["x"]
        assert (await m.found("c/x")).size == len(b"newer")
        assert not listings_of(store, before)


async def test_what_others_put_since_the_list_goes_along_with_a_rename(tmp_path: Path) -> None:
    store, clock = store_of("a/x", "b/x", "c/d/x", "c/e/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await list_all(m, "a", "b", "c/d", "c/e")
        clock.advance(TTL_S + 1)
        await list_all(m, "a", "b")
        clock.advance(1)
        store.give("c/d/y", b"of another program")
        await m.rename("c", "f")
        assert await m.names("f/d") == ["x", "y"]
        clock.advance(TTL_S + 1)
        assert await m.lookup("c") is None


async def test_who_lists_everything_gets_no_older_list(tmp_path: Path) -> None:
    store, clock = store_of("a/x", "b/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        for number in range(3):
            await list_everything(m.fs.namespace, lambda _: None)
            assert await m.names("b") == sorted(["x", *map(str, range(number))])
            clock.advance(1)
            store.give(f"b/{number}", b"")


async def test_a_large_subtree_is_tried_rarely_and_the_next_one_down_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subtree_listing, "KEYS_MAX", 20)
    store, clock = store_of(*(f"large/{n}" for n in range(30)), *(f"small/{n}/x" for n in range(9))), Clock()
    small = [f"small/{n}" for n in range(9)]
    async with lake(store, tmp_path, clock=clock) as m:
        await list_all(m, *small)
        costs = []
        for _ in range(8):
            clock.advance(TTL_S + 1)
            before = len(store.requests)
            await list_all(m, "large", *small)
            costs.append(listings_of(store, before))
        assert all(cost.count("small/") == 1 for cost in costs)
        assert all(len(cost) <= 3 for cost in costs[1:]), costs
        clock.advance(LARGE_S_FIRST)
        before = len(store.requests)
        await list_all(m, "large", *small)
        assert len(listings_of(store, before)) <= 3 + ROOT_LISTS


async def test_the_lake_itself_lies_between_its_first_and_its_last_names(tmp_path: Path) -> None:
    reserved = [f"{RESERVED_PREFIX}objects/{number:08x}" for number in range(2000)]
    names = ["!", "-a", ".a", ".lakefs", ".lakefs!", ".lakefs-", ".lakefs0", ".m", "z"]
    store, clock = store_of(*(f"{name}/x" for name in names), *reserved), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        shown = [name for name in names if name != ".lakefs"]
        assert await m.names() == shown
        await list_all(m, *shown)
        for _ in range(2):
            clock.advance(TTL_S + 1)
            before = len(store.requests)
            assert await list_all(m, *shown) == {name: ["x"] for name in shown}
            assert await m.names() == shown
            assert len(listings_of(store, before)) == ROOT_LISTS


async def test_a_store_without_order_is_not_asked_for_the_root(tmp_path: Path) -> None:
    store, clock = MemoryStore(Capabilities(name="unsorted", sorted_listing=False)), Clock()
    for number in range(5):
        store.give(f"{number}/x", b"x")
    async with lake(store, tmp_path, clock=clock, foreign_s=TTL_S) as m:
        for _ in range(3):
            before = len(store.requests)
            assert await list_all(m, *"01234") == {name: ["x"] for name in "01234"}
            directories = [prefix for prefix in listings_of(store, before) if prefix.endswith("/")]
            assert sorted(directories) == [f"{number}/" for number in range(5)]
            clock.advance(TTL_S + 1)


async def test_a_directory_that_is_asked_for_alone_costs_one_list(tmp_path: Path) -> None:
    store, clock = store_of("a/x", "b/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await list_all(m, "a", "b")
        assert await m.names() == ["a", "b"]  # the root is listed in the background
        inode = (await m.found("a")).inode
        costs = []
        for _ in range(4):
            clock.advance(TTL_S + 1)
            before = len(store.requests)
            await m.fs.namespace.list_directory(inode)
            costs.append(listings_of(store, before))
        assert costs[1:] == [["a/"]] * 3, "the first still shared a LIST, as those before had"


async def test_a_flat_listing_below_which_much_changes_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subtree_listing, "CHANGES_MAX", 8)
    store, clock = store_of("a/x", "b/x", "c/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await list_all(m, "a", "b")
        clock.advance(TTL_S + 1)
        await list_all(m, "a", "b")
        for number in range(9):
            await m.write(f"a/{number}", b"")
        store.give("c/y", b"y")
        assert await m.names("c") == ["x", "y"]


async def test_an_error_of_the_list_is_that_of_the_directory(tmp_path: Path) -> None:
    store, clock = store_of("a/x", "b/x", "c/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await list_all(m, "a", "b")
        clock.advance(TTL_S + 1)
        store.hook = Failures(lambda request: request.what == "list", StoreError("broken"), count=3)
        with pytest.raises(StoreError):
            await m.fs.namespace.list_directory((await m.fs.lookup(1, b"a"))[0].inode)  # type: ignore[union-attr]
        store.hook = lambda _request, _when: None
        assert await list_all(m, "a", "b", "c") == {name: ["x"] for name in "abc"}


async def test_who_comes_meanwhile_waits_for_the_same_list(tmp_path: Path) -> None:
    store, clock = store_of(*(f"{number}/x" for number in range(20))), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await list_all(m, *map(str, range(20)))
        inodes = [(await m.found(str(number))).inode for number in range(20)]
        clock.advance(TTL_S + 1)
        before, since_ns = len(store.requests), clock.wall_ns()
        async with trio.open_nursery() as nursery:
            for inode in inodes:
                nursery.start_soon(partial(m.fs.namespace.list_directory, inode, since_ns=since_ns))
        assert len(listings_of(store, before)) == ROOT_LISTS
        assert store.now_ns - clock.now_ns < NS
