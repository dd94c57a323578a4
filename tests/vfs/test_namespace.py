"""Which names there are, what asking for them costs, and what happens when they change meanwhile."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from lakefs_fuse.blockcache.readahead import WHOLE_BYTES_MAX
from lakefs_fuse.errors import FileError, NoSuchBucket
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.product import PLACEHOLDER
from lakefs_fuse.store.client import SILENT_S_MIN
from lakefs_fuse.store.protocol import Capabilities, ListPage
from lakefs_fuse.vfs.namespace import namespace as namespace_module
from lakefs_fuse.vfs.namespace import subtree_listing
from lakefs_fuse.vfs.namespace.namespace import BACKGROUND_LISTINGS_MAX
from tests.memory_store import Failures, MemoryStore, Pause, Request, When
from tests.tiers import sized
from tests.upload.drafting import reached
from tests.vfs.lakes import TTL_S, Clock, Lake, entries_of, held_fresh, lake, two_lakes

UNSORTED = Capabilities(name="unsorted", sorted_listing=False)
AT_MOUNT = ("list", "list", "time_ns", "list")
"""What a mount asks before anybody asks it: for the horizon, an index, the store's clock, and for commits."""
NO_MARKERS = Capabilities(name="no markers", lists_markers=False)


def store_of(*keys: str, capabilities: Capabilities | None = None, page_keys_max: int = 1000) -> MemoryStore:
    store = MemoryStore(capabilities, page_keys_max=page_keys_max)
    for key in keys:
        store.give(key, key.encode("utf-8", "surrogatepass"))
    return store


# -- keys that cannot be paths


async def test_keys_that_cannot_be_paths_are_counted_and_break_nothing(tmp_path: Path) -> None:
    store = store_of("fine", "/lead", "./dot", "../up", "d//twice", "d/./x", "d/ok", "n\0ul", "x" * 256)
    store.give("d/" + "é" * 128)
    async with lake(store, tmp_path) as m:
        assert await m.names() == ["d", "fine"]
        assert m.hidden() == {"component": 3, "nul": 1, "long": 1}
        assert await m.names("d") == ["ok"]
        assert m.hidden() == {"component": 5, "nul": 1, "long": 2}
        assert await m.read("fine") == b"fine"
        assert await m.read("d/ok") == b"d/ok"


async def test_hidden_keys_are_counted_as_last_seen(tmp_path: Path) -> None:
    store, clock = store_of("d/a", "d//x", "d//y", "d/../z"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names("d")
        assert m.hidden() == {"component": 2}
        with pytest.raises(FileError):
            await m.rmdir("d")  # forgets the listing
        await m.names("d")
        assert m.hidden() == {"component": 2}
        store.take("d/../z")
        clock.advance(TTL_S + 1)
        await m.names("d")
        assert m.hidden() == {"component": 1}
    async with lake(store, tmp_path, clock=clock) as m:
        assert m.hidden() == {"component": 1}
        for key in list(store.objects):
            store.take(key)
        clock.advance(TTL_S + 1)
        assert await m.names() == []
        assert m.hidden() == {}


@pytest.mark.parametrize("page_keys_max", [1, 2, 1000])
@pytest.mark.parametrize("capabilities", [Capabilities(name="sorted"), UNSORTED], ids=lambda found: found.name)
async def test_a_directory_hides_the_file_of_its_name(
    tmp_path: Path, page_keys_max: int, capabilities: Capabilities
) -> None:
    """Other keys lie between `a` and `a/`, and every page split occurs."""
    store = store_of("a", "a!", "a-", "a/b", "a/", "a0", page_keys_max=page_keys_max, capabilities=capabilities)
    clock = Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        assert await m.names() == ["a", "a!", "a-", "a0"]
        assert (await m.found("a")).is_dir
        assert m.hidden() == {"conflict": 1}
        added = m.metrics.namespace.entries_added
        clock.advance(TTL_S + 1)
        m.changes.clear()
        assert await m.names() == ["a", "a!", "a-", "a0"]
        assert (m.metrics.namespace.entries_added, m.changes) == (added, [])
        assert m.hidden() == {"conflict": 1}
        assert await m.names("a") == ["b"]


@pytest.mark.parametrize("capabilities", [Capabilities(name="sorted"), UNSORTED], ids=lambda found: found.name)
@pytest.mark.parametrize("between", [0, 300])
async def test_one_name_that_is_both(tmp_path: Path, capabilities: Capabilities, between: int) -> None:
    """Asked for by itself, with so many keys between the two that one page cannot hold them."""
    keys = ["a", "a/b", *(f"a!{number}" for number in range(between))]
    for order in itertools.islice(itertools.permutations(keys[:2]), 2):
        store = store_of(*order, *keys[2:], capabilities=capabilities)
        async with lake(store, tmp_path / order[0].replace("/", "_")) as m:
            entry = await m.found("a")
            assert entry.is_dir
            assert [found.name for found in m.fs.readdir(ROOT_INODE, 0)] == [b"a"]


async def test_the_reserved_directory_is_hidden_and_not_counted(tmp_path: Path) -> None:
    store = store_of(".lakefs/commits/1", ".lakefs", "d/.lakefs", "a")
    async with lake(store, tmp_path) as m:
        assert await m.names() == ["a", "d"]
        assert await m.names("d") == [".lakefs"]
        assert await m.lookup(".lakefs") is None
        assert m.hidden() == {}
        for refused in (m.create(".lakefs"), m.mkdir(".lakefs")):
            with pytest.raises(FileError) as caught:
                await refused
            assert caught.value.errno == errno.EPERM


@pytest.mark.parametrize("is_renamed", [False, True])
async def test_directory_that_took_the_place_of_a_file_hides_no_name(tmp_path: Path, is_renamed: bool) -> None:
    """The file's object is still at its key, and counts as removed: it does not keep the directory above."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never", delete_after_s=300.0) as m:
        await m.mkdir("above")
        await m.write("above/x", b"file")
        if is_renamed:
            await m.rename("above/x", "y")
        else:
            await m.unlink("above/x")
        await m.mkdir("above/x")
        await m.write("above/x/in", b"file")
        await m.fs.make_durable()
        clock.advance(2 * TTL_S)
        assert await m.names("above") == ["x"]
        assert "above/x" in store.objects
        assert m.hidden() == {}
        await m.unlink("above/x/in")
        await m.rmdir("above/x")
        await m.rmdir("above")
        assert "above" not in await m.names()


async def test_removal_of_a_directory_that_another_node_renames_meanwhile_removes_nothing(tmp_path: Path) -> None:
    store, clock = store_of("d/", *(f"d2/{number}" for number in range(200)), page_keys_max=10), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        assert await one.names() == await two.names() == ["d", "d2"]
        clock.advance(TTL_S + 1)
        store.hook = pause = Pause(lambda request: request.what == "list" and request.key.startswith("d/"))
        caught = list[int]()

        async def remove() -> None:
            with pytest.raises(FileError) as error:
                await two.rmdir("d")
            caught.append(error.value.errno)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(remove)
            await reached(pause.reached)
            store.hook = lambda _request, _when: None
            await one.rename("d", "renamed")
            await one.fs.sync_names()
            await two.poll()
            pause.resume()
        assert caught == [errno.ENOENT]
        await two.sync()
        clock.advance(TTL_S + 1)
        for m in (one, two):
            await m.poll()
            assert await m.names() == ["d2", "renamed"]


# -- markers


async def test_markers_are_directories(tmp_path: Path) -> None:
    store = store_of("empty/", "full/", "full/x", "a/b/c/")
    async with lake(store, tmp_path / "one") as m:
        assert await m.names() == ["a", "empty", "full"]
        assert await m.names("empty") == []
        assert await m.names("full") == ["x"]
        assert await m.names("a") == ["b"]
        await m.rmdir("empty")
        assert await m.names() == ["a", "full"]
        await m.sync()
        assert "empty/" not in store.objects
        await m.unlink("full/x")
        assert await m.names() == ["a", "full"]
    async with lake(store, tmp_path / "other") as m:
        assert await m.names() == ["a", "full"]


async def test_directory_that_another_program_makes_again_after_its_removal_stays(tmp_path: Path) -> None:
    store, clock = store_of("d/"), Clock()
    async with lake(store, tmp_path, clock=clock, delete_after_s=300.0) as m:
        await m.rmdir("d")
        await m.fs.sync_names()
        assert (entries_of(store), await m.names()) == (["d/"], [])
        clock.advance(60)
        store.give("d/", b"")
        clock.advance(300)
        assert await m.names() == ["d"]
        await m.sync()
        clock.advance(TTL_S + 1)
        assert (entries_of(store), await m.names()) == (["d/"], ["d"])


async def test_placeholders_where_markers_are_not_listed(tmp_path: Path) -> None:
    """They are read, and removed with their directory; new directories are in commits and need none."""
    store, clock = store_of("a/b/x", f"old/{PLACEHOLDER}", capabilities=NO_MARKERS), Clock()
    async with lake(store, tmp_path / "one", clock=clock) as m:
        assert await m.names() == ["a", "old"]
        assert await m.names("old") == []
        await m.mkdir("made")
        await m.unlink("a/b/x")
        await m.sync()
        assert entries_of(store) == [f"old/{PLACEHOLDER}"]
    clock.advance(TTL_S + 1)
    async with lake(store, tmp_path / "other", clock=clock) as m:
        assert await m.names() == ["a", "made", "old"]
        assert await m.names("made") == []
        assert await m.names("a/b") == []
        made = await m.found("made")
        heads = store.count("head")
        assert (await m.fs.getattr(made.inode)).mode == 0o755
        assert store.count("head") == heads
        await m.rmdir("a/b")
        await m.rmdir("made")
        await m.rmdir("old")
        assert await m.names() == ["a"]
        await m.sync()
        assert entries_of(store) == []
    async with lake(store, tmp_path / "third", clock=clock) as m:
        assert await m.names() == ["a"]


async def test_file_whose_name_ends_as_a_placeholder_stays_where_a_file_of_the_rest_was_removed(tmp_path: Path) -> None:
    name = f"notes{PLACEHOLDER}"
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.mkdir("d")
        await one.write("d/notes", b"packed")
        await one.sync()
        clock.advance(5)
        store.give(f"d/{name}", b"text")
        clock.advance(5)
        await one.unlink("d/notes")
        await one.rmdir("d")
        await one.sync()
        await two.poll()
        clock.advance(TTL_S + 1)
        for m in (one, two):
            assert await m.names() == ["d"]
            assert await m.read(f"d/{name}") == b"text"


async def test_attributes_of_a_directory_without_a_marker_are_asked_for_once(tmp_path: Path) -> None:
    store = store_of("d/x")
    async with lake(store, tmp_path) as m:
        inode = (await m.found("d")).inode
        await m.fs.getattr(inode)
        heads = store.count("head")
        await m.fs.getattr(inode)
        assert store.count("head") == heads <= 1


async def test_a_directory_outlives_its_last_name(tmp_path: Path) -> None:
    """What only its names made visible is committed before the last of them goes."""
    store, clock = store_of("a/b/only"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names("a/b")
        await m.unlink("a/b/only")
        clock.advance(TTL_S + 1)
        assert await m.names("a") == ["b"]
        assert await m.names("a/b") == []
        await m.rmdir("a/b")
        clock.advance(TTL_S + 1)
        assert await m.names() == ["a"]
        await m.rmdir("a")
        await m.sync()
        assert entries_of(store) == []
        assert await m.names() == []


async def test_a_directory_outlives_a_file_that_was_never_stored(tmp_path: Path) -> None:
    store, clock = store_of("d/only"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        handle = await m.create("d/local")
        await m.unlink("d/only")
        await m.unlink("d/local")
        await m.close(handle)
        clock.advance(TTL_S + 1)
        assert await m.names() == ["d"]


async def test_only_empty_directories_are_removed(tmp_path: Path) -> None:
    store = store_of("d/x", "deep/a/b/c", "odd//x", "file")
    async with lake(store, tmp_path) as m:
        for path in ("d", "deep", "odd"):
            with pytest.raises(FileError) as caught:
                await m.rmdir(path)
            assert caught.value.errno == errno.ENOTEMPTY
        for path, code in (("file", errno.ENOTDIR), ("absent", errno.ENOENT)):
            with pytest.raises(FileError) as caught:
                await m.rmdir(path)
            assert caught.value.errno == code
        with pytest.raises(FileError) as caught:
            await m.unlink("d")
        assert caught.value.errno == errno.EISDIR
        await m.mkdir("fresh")
        handle = await m.create("fresh/unsaved")
        with pytest.raises(FileError) as caught:
            await m.rmdir("fresh")
        assert caught.value.errno == errno.ENOTEMPTY
        await m.close(handle)
        with pytest.raises(FileError) as caught:
            await m.mkdir("fresh")
        assert caught.value.errno == errno.EEXIST
    assert entries_of(store) == ["d/x", "deep/a/b/c", "file", "fresh/unsaved", "odd//x"]


# -- what asking costs


async def test_within_the_ttl_nothing_is_asked(tmp_path: Path) -> None:
    store, clock = store_of("a", "b", "d/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        before = len(store.requests)
        clock.advance(TTL_S - 1)
        assert await m.names() == ["a", "b", "d"]
        assert await m.lookup("a") is not None
        assert await m.lookup("absent") is None
        entry, fresh_s = await m.fs.lookup(ROOT_INODE, b"absent")
        assert entry is None
        assert fresh_s == pytest.approx(1.0)
        assert len(store.requests) == before


async def test_after_the_ttl_one_list_answers_for_every_name(tmp_path: Path) -> None:
    store, clock = store_of(*(f"name{number}" for number in range(50))), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        clock.advance(TTL_S + 1)
        before = len(store.requests)
        async with trio.open_nursery() as nursery:
            for number in range(50):
                nursery.start_soon(m.lookup, f"name{number}")
                nursery.start_soon(m.lookup, f"absent{number}")
        assert len(store.requests) == before + 1


async def test_a_second_mount_asks_nothing(tmp_path: Path) -> None:
    store, clock = store_of(*(f"d{number % 7}/name{number}" for number in range(70))), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        first = {path: await m.names(path) for path in await m.names()}
        inodes = {path: (await m.found(path)).inode for path in first}
    before = len(store.requests)
    clock.advance(TTL_S / 2)
    async with lake(store, tmp_path, clock=clock) as m:
        assert {path: await m.names(path) for path in await m.names()} == first
        assert {path: (await m.found(path)).inode for path in first} == inodes
    assert [request.what for request in store.requests[before:]] == list(AT_MOUNT)
    before += len(AT_MOUNT)
    clock.advance(TTL_S)
    async with lake(store, tmp_path, clock=clock) as m:
        assert {path: await m.names(path) for path in await m.names()} == first
    assert len(store.requests) == before + len(AT_MOUNT) + 1 + 2, "the root by itself, then all below it"


async def test_a_clock_that_went_back_asks_again(tmp_path: Path) -> None:
    store, clock = store_of("a"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        clock.advance(-3600)
        before = len(store.requests)
        await m.names()
        assert len(store.requests) == before + 1
        await m.names()
        await m.lookup("a")
        assert len(store.requests) == before + 1


async def test_single_names_are_asked_for_and_remembered(tmp_path: Path) -> None:
    store, clock = store_of(*(f"name{number}" for number in range(5))), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        for asked in range(1, 10):
            for _ in range(2):
                assert await m.lookup("absent") is None
            assert m.metrics.namespace.point_lookups == asked
            assert store.count("list") == AT_MOUNT.count("list") + asked, "no listing for one name again and again"
            clock.advance(TTL_S + 1)
        store.give("absent")
        await m.found("absent")
        assert store.count("list") == AT_MOUNT.count("list") + 10 + 1, "commits as well, for it is new"


async def test_the_second_name_brings_the_others_of_its_page(tmp_path: Path) -> None:
    store, clock = store_of(*(f"d/name{number}" for number in range(100))), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        before = store.count("list")
        await m.found("d/name1")
        assert store.count("list") == before + 2, "one for each name on the way"
        await m.found("d/name2")
        with trio.fail_after(5):
            while not m.metrics.namespace.listings:
                await trio.sleep(0.001)
        assert store.count("list") == before + 4, "the name, and the page"
        assert [(await m.found(f"d/name{number}")).name for number in range(100)] == [b"name%d" % n for n in range(100)]
        assert await m.lookup("d/absent") is None
        assert len(await m.names("d")) == 100
        assert store.count("list") == before + 4


async def nothing_under_way(m: Lake) -> None:
    """No listing is, any more."""
    with trio.fail_after(5):
        while m.fs.namespace.statistics()["listings_under_way"]:
            await trio.sleep(0.001)


async def test_some_names_of_many_are_not_worth_a_listing(tmp_path: Path) -> None:
    store, clock = store_of(*(f"name{number}" for number in range(100)), page_keys_max=30), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        before = store.count("list")
        for number in (1, 2, 3, 4):
            await m.found(f"name{number}")
            await nothing_under_way(m)
        assert store.count("list") == before + 4 + 1, "the names and the page"
        assert m.metrics.namespace.listing_pages == m.metrics.namespace.listings == 0
        await m.found("name5")
        await nothing_under_way(m)
        assert m.metrics.namespace.listings == 1, "so many are"
        before = store.count("list")
        assert len(await m.names()) == 100
        assert store.count("list") == before


async def test_first_pages_do_not_keep_others_from_being_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(namespace_module, "FIRST_PAGES_MAX", 2)
    monkeypatch.setattr(subtree_listing, "KEYS_MAX", 1)
    directories = [f"d{number}" for number in range(6)]
    store = store_of(*(f"{directory}/name{number}" for directory in directories for number in range(5)))
    async with lake(store, tmp_path) as m:
        await m.names()
        pages = [f"{directory}/" for directory in directories]
        store.hook = pause = Pause(lambda request: request.what == "list" and request.key in pages)
        for directory in directories:
            for number in (1, 2):
                await m.found(f"{directory}/name{number}")
        assert m.fs.namespace.statistics()["listings_under_way"] == 2
        for directory in directories[2:]:
            m.fs.namespace.list_soon((await m.found(directory)).inode)
        assert m.fs.namespace.statistics()["listings_under_way"] == 2 + BACKGROUND_LISTINGS_MAX
        pause.resume()
        await nothing_under_way(m)
        assert m.metrics.namespace.listings == 1 + 2 + BACKGROUND_LISTINGS_MAX


@pytest.mark.parametrize("how", ["listing", "reading", "many questions"])
async def test_who_needs_all_names_gets_more_than_the_first_page(tmp_path: Path, how: str) -> None:
    store, clock = store_of(*(f"name{number}" for number in range(100)), page_keys_max=30), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.found("name1")
        store.hook = pause = Pause(lambda request: request.what == "list" and request.key == "")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.found, "name2")
            await reached(pause.reached)
            if how == "listing":
                nursery.start_soon(m.fs.namespace.list_directory, ROOT_INODE)
            elif how == "reading":
                nursery.start_soon(m.fs.namespace.begin_reading, ROOT_INODE)
            else:
                m.fs.namespace.list_soon(ROOT_INODE)
            await trio.testing.wait_all_tasks_blocked(0.01)
            pause.resume()
        with trio.fail_after(5):
            while not m.metrics.namespace.listings:
                await trio.sleep(0.001)
        assert m.metrics.namespace.listings == 1
        before = store.count("list")
        assert len(await m.names()) == 100
        assert store.count("list") == before


async def test_many_questions_list_the_directory_in_the_background(tmp_path: Path) -> None:
    store, clock = store_of(*(f"name{number}" for number in range(100)), page_keys_max=30), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        for number in range(40):
            await m.found(f"name{number}")
            with trio.fail_after(5):
                while m.fs.namespace.statistics()["listings_under_way"]:
                    await trio.sleep(0.001)
        before = len(requests_about_names(store))
        assert before <= 15
        assert m.metrics.namespace.listings == 1
        assert await m.lookup("absent") is None
        assert len(await m.names()) == 100
        assert len(requests_about_names(store)) == before


def requests_about_names(store: MemoryStore) -> list[Request]:
    """Without polls for commits, of which there are more on a slow machine."""
    return [request for request in store.requests if not request.key.startswith(".lakefs")]


async def test_a_large_directory_does_not_make_one_name_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace_module, "RELIST_ENTRIES_MAX", 10)
    store, clock = store_of(*(f"name{number:02}" for number in range(30)), page_keys_max=3), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        clock.advance(TTL_S + 1)
        before = len(store.requests)
        await m.found("name05")
        assert len(store.requests) - before <= 2
        assert m.metrics.namespace.listings == 1


async def test_a_failed_list_is_told_to_all_who_waited_and_tried_again(tmp_path: Path) -> None:
    store, clock = store_of("a", "b", "c", page_keys_max=1), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        clock.advance(TTL_S + 1)
        store.take("b")
        lists = 0

        def second_page_fails(request: Request, when: When) -> None:
            nonlocal lists
            lists += when == "before"
            if lists >= 2 and when == "before":
                raise NoSuchBucket("no")

        store.hook = second_page_fails
        refused = 0

        async def refuse() -> None:
            nonlocal refused
            with pytest.raises(NoSuchBucket):
                await m.names()
            refused += 1

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(refuse)
        assert refused == 3
        store.hook = lambda request, when: None
        assert [entry.name for entry in m.fs.readdir(ROOT_INODE, 0)] == [b"a", b"b", b"c"]
        assert await m.names() == ["a", "c"]


# -- what others change


async def test_an_unchanged_listing_touches_nothing(tmp_path: Path) -> None:
    store, clock = store_of(*(f"n{number}" for number in range(20)), "d/x", page_keys_max=3), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        before = list(m.fs.readdir(ROOT_INODE, 0))
        counts = m.metrics.namespace
        told = (counts.entries_added, counts.entries_changed, counts.entries_removed)
        clock.advance(TTL_S + 1)
        await m.names()
        assert list(m.fs.readdir(ROOT_INODE, 0)) == before
        assert (counts.entries_added, counts.entries_changed, counts.entries_removed) == told
        assert m.changes == []
        assert counts.listings == 2


@pytest.mark.parametrize("point", [False, True], ids=["listed", "asked for"])
async def test_another_version_is_another_inode(tmp_path: Path, point: bool) -> None:
    store, clock = store_of("d/a", "d/b"), Clock()
    store.give("d/a", bytes(WHOLE_BYTES_MAX + 1))  # opening it brings nothing yet
    async with lake(store, tmp_path, clock=clock) as m:
        if not point:
            await m.names("d")
        old, kept = await m.found("d/a"), await m.found("d/b")
        directory = await m.found("d")
        held = await m.open("d/a")
        store.give("d/a", b"theirs")
        clock.advance(TTL_S + 1)
        new = await m.found("d/a")
        assert new.inode != old.inode
        assert (new.cookie, new.size) == (old.cookie, 6)
        assert (directory.inode, b"a") in m.changes
        assert await m.found("d/b") == kept
        assert await m.read("d/a") == b"theirs"
        with pytest.raises(FileError) as caught:
            await m.fs.read(held, 0, 10)
        assert caught.value.errno == errno.ESTALE
        await m.close(held)
        with pytest.raises(FileError):
            m.fs.entry(old.inode)
        m.changes.clear()
        store.take("d/a")
        clock.advance(TTL_S + 1)
        assert await m.lookup("d/a") is None
        assert (directory.inode, b"a") in m.changes


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("page_keys_max", [1, 1000])
async def test_a_file_becomes_a_directory_and_back(tmp_path: Path, listed: bool, page_keys_max: int) -> None:
    store, clock = store_of("swap", "swap!", page_keys_max=page_keys_max), Clock()

    async with lake(store, tmp_path, clock=clock) as m:

        async def seen() -> bool:
            clock.advance(TTL_S + 1)
            if listed:
                assert await m.names() == ["swap", "swap!"]
            entry = await m.found("swap")
            assert [found.name for found in m.fs.readdir(ROOT_INODE, 0)].count(b"swap") == 1
            return entry.is_dir

        assert not await seen()
        for _ in range(2):
            store.take("swap")
            store.give("swap/inside", b"x")
            assert await seen()
            assert await m.read("swap/inside") == b"x"
            store.take("swap/inside")
            store.give("swap", b"file")
            m.changes.clear()
            assert not await seen()
            assert (ROOT_INODE, b"swap") in m.changes
            assert await m.read("swap") == b"file"


async def test_a_directory_that_went_takes_everything_below_it(tmp_path: Path) -> None:
    store, clock = store_of("d/e/f", "d/x", "kept"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        inner, file = await m.found("d/e"), await m.found("d/e/f")
        await m.names("d")
        await m.names("d/e")
        store.take("d/e/f")
        store.take("d/x")
        clock.advance(TTL_S + 1)
        assert await m.names() == ["kept"]
        for inode in (inner.inode, file.inode):
            with pytest.raises(FileError) as caught:
                m.fs.entry(inode)
            assert caught.value.errno == errno.ESTALE
        store.give("d/e/f")
        clock.advance(TTL_S + 1)
        assert await m.names("d/e") == ["f"]
        assert (await m.found("d/e")).inode != inner.inode


async def test_a_file_made_in_a_directory_that_is_looked_for_below_its_removed_names_stays(tmp_path: Path) -> None:
    """The directory is there for others' objects only, and the LIST that was sent before shows none any more."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=300.0) as (one, two):
        store.give("d/b")
        assert await two.names("d") == ["b"]
        await two.unlink("d/b")
        await two.rmdir("d")
        await two.fs.sync_names()
        await one.poll()
        store.give("d/c")
        clock.advance(TTL_S + 1)
        assert await one.names("d") == ["c"]
        store.take("d/c")
        clock.advance(TTL_S + 1)
        assert await one.names("d") == []
        inode = (await one.found("d")).inode
        clock.advance(TTL_S + 1)
        pause = store.hook = Pause(lambda request: request.what == "list" and request.key == "d/", "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(one.parts.filesystem.namespace.lookup, ROOT_INODE, b"d", ask=True))
            await reached(pause.reached)
            flags = os.O_RDWR | os.O_CREAT
            with held_fresh(one):
                handle = (await one.fs.create(inode, b"x", 0o644, flags, os.getuid(), os.getgid()))[0]
                await one.fs.write(handle, 0, b"new")
                await one.close(handle)
            made = one.fs.namespace.at("d/x")
            pause.resume()
        assert (await one.found("d")).inode == inode
        assert made is not None and (await one.found("d/x")).inode == made.inode
        assert await one.tree() == {"d": None, "d/x": b"new"}


async def test_a_file_made_in_place_of_a_directory_that_is_looked_for_below_its_removed_names_stays(
    tmp_path: Path,
) -> None:
    """The LIST that was sent before shows an object in the directory, which is gone by then."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=300.0) as (one, two):
        store.give("d/b")
        assert await two.names("d") == ["b"]
        await two.unlink("d/b")
        await two.rmdir("d")
        await two.fs.sync_names()
        await one.poll()
        store.give("d/c")
        clock.advance(TTL_S + 1)
        assert await one.names("d") == ["c"]
        store.take("d/c")
        clock.advance(TTL_S + 1)
        assert await one.names("d") == []
        store.give("d/late")
        pause = store.hook = Pause(lambda request: request.what == "list" and request.key == "d/", "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(one.parts.filesystem.namespace.lookup, ROOT_INODE, b"d", ask=True))
            await reached(pause.reached)
            store.take("d/late")
            with held_fresh(one):
                await one.rmdir("d")
                await one.write("d", b"a file")
            made = one.fs.namespace.at("d")
            pause.resume()
        assert made is not None and (await one.found("d")).inode == made.inode
        assert await one.read("d") == b"a file"


async def test_who_waits_for_a_list_whose_beginner_ends_begins_another(tmp_path: Path) -> None:
    store = store_of("d/a", "d/b")
    async with lake(store, tmp_path) as m:
        await m.found("d")
        pause = store.hook = Pause(lambda request: request.what == "list" and request.key == "d/")
        scope, seen = trio.CancelScope(), list[str]()

        async def refresh() -> None:
            with scope:
                await m.fs.refresh("d")

        async def list_names() -> None:
            seen.extend(await m.names("d"))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refresh)
            await reached(pause.reached)
            nursery.start_soon(list_names)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            pause.resume()
        assert (scope.cancelled_caught, seen) == (True, ["a", "b"])


async def test_metadata_with_numbers_of_any_length_disturb_nothing(tmp_path: Path) -> None:
    """Another program has put an object with such metadata in place of a packed file, and another beside it."""
    store, clock = MemoryStore(), Clock()
    odd = dict.fromkeys(("mode", "uid", "gid", "mtime"), "1" * 5000)
    async with lake(store, tmp_path, clock=clock, pack="always", attributes="objects") as m:
        await m.write("f", b"packed")
        await m.sync()
        clock.advance(TTL_S + 1)
        for key in "fg":
            store.give(key, b"other", odd)
        assert await m.names() == ["f", "g"]
        await m.sync()
        assert await m.tree() == {"f": b"other", "g": b"other"}


async def test_a_directory_removed_while_it_is_listed_is_stale(tmp_path: Path) -> None:
    store, clock = store_of("d/x", "d/y", page_keys_max=1), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        inode = (await m.found("d")).inode
        store.hook = pause = Pause(lambda request: request.key == "d/")
        refused = []

        async def list_it() -> None:
            with pytest.raises(FileError) as caught:
                await m.fs.opendir(inode)
            refused.append(caught.value.errno)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(list_it)
            await reached(pause.reached)
            store.take("d/x")
            store.take("d/y")
            clock.advance(TTL_S + 1)
            assert await m.names() == []
            pause.resume()
        assert refused == [errno.ESTALE]


# -- what this node changes while a LIST is under way


Change = Callable[[Lake], Awaitable[None]]


async def create(m: Lake) -> None:
    await m.write("new", b"new")


async def create_and_keep_open(m: Lake) -> None:
    await m.fs.write(await m.create("new"), 0, b"new")


async def overwrite(m: Lake) -> None:
    handle = await m.open("m", os.O_RDWR | os.O_TRUNC)
    await m.fs.write(handle, 0, b"changed")
    await m.close(handle)


async def unlink(m: Lake) -> None:
    await m.unlink("m")


async def create_and_unlink(m: Lake) -> None:
    await m.write("new", b"new")
    await m.unlink("new")


async def make_directory(m: Lake) -> None:
    await m.mkdir("new")


async def remove_directory(m: Lake) -> None:
    await m.rmdir("sub")


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (create, ["a", "m", "new", "sub", "z"]),
        (create_and_keep_open, ["a", "m", "new", "sub", "z"]),
        (overwrite, ["a", "m", "sub", "z"]),
        (unlink, ["a", "sub", "z"]),
        (create_and_unlink, ["a", "m", "sub", "z"]),
        (make_directory, ["a", "m", "new", "sub", "z"]),
        (remove_directory, ["a", "m", "z"]),
    ],
)
@pytest.mark.parametrize("page", [1, 2, 3, 4])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_list_under_way_undoes_nothing(
    tmp_path: Path, change: Change, names: list[str], page: int, when: When
) -> None:
    """The LIST waits before or after any of its pages while a name is changed here."""
    store, clock = store_of("a", "m", "sub/", "z", page_keys_max=1), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        for name in ("a", "m", "sub", "z"):
            await m.found(name)
        inode = (await m.found("m")).inode
        clock.advance(TTL_S + 1)
        pause = Pause(lambda request: request.what == "list" and request.key == "", when)
        calls = 0

        def hook(request: Request, at: When) -> None:
            nonlocal calls
            if request.what == "list" and request.key == "" and at == when:
                calls += 1
                if calls == page:
                    pause(request, at)

        store.hook = hook
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.opendir, ROOT_INODE)
            await reached(pause.reached)
            with held_fresh(m), trio.fail_after(SILENT_S_MIN / 2):  # It does not wait until the store counts as away.
                await change(m)
            pause.resume()
        assert await m.names() == names
        if change is overwrite:
            assert (await m.found("m")).inode == inode
            assert await m.read("m") == b"changed"
        if change is create:
            assert await m.read("new") == b"new"
        clock.advance(TTL_S + 1)
        store.hook = lambda request, when: None
        assert await m.names() == names


async def test_publishing_during_a_list_is_not_taken_for_others(tmp_path: Path) -> None:
    """The LIST began before the file was stored, its page comes after."""
    store, clock = store_of("a", "z", page_keys_max=1), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        handle = await m.create("m")
        await m.fs.write(handle, 0, b"mine")
        inode = (await m.found("m")).inode
        clock.advance(TTL_S + 1)
        store.hook = pause = Pause(lambda request: request.what == "list", "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.opendir, ROOT_INODE)
            await reached(pause.reached)
            await m.close(handle)
            pause.resume()
        assert await m.names() == ["a", "m", "z"]
        assert (await m.found("m")).inode == inode
        assert m.changes == []


@pytest.mark.parametrize("is_flat", [True, False])
@pytest.mark.parametrize("path", ["sub/new", "sub/below/new"])
async def test_list_of_a_directory_above_answered_before_a_put_keeps_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, is_flat: bool
) -> None:
    """One LIST of the root says that nothing is below ``sub``; its answer comes after the file was stored there."""
    if not is_flat:
        monkeypatch.setattr(subtree_listing, "KEYS_MAX", 1)
    store, clock = store_of("a", "sub/old", "sub/below/old"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        for directory in ("", "sub", "sub/below"):
            await m.names(directory)
        handle = await m.create(path)
        for key in ("sub/old", "sub/below/old"):
            store.objects.pop(key)
        clock.advance(TTL_S + 1)
        store.hook = pause = Pause(lambda request: request.what == "list" and request.key == "", "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.opendir, ROOT_INODE)
            await reached(pause.reached)
            await m.close(handle)
            made = m.fs.namespace.at(path)
            pause.resume()
        store.hook = lambda request, when: None
        assert made is not None and (await m.found(path)).inode == made.inode
        assert await m.read(path) == b""


# -- reading a directory in pieces


async def test_a_directory_read_in_pieces_neither_skips_nor_repeats(tmp_path: Path) -> None:
    store = store_of(*(f"n{number:03}" for number in range(100)))
    async with lake(store, tmp_path) as m:
        await m.fs.opendir(ROOT_INODE)
        seen, after = [], 0
        while True:
            piece = list(itertools.islice(m.fs.readdir(ROOT_INODE, after), 7))
            if not piece:
                break
            seen += [entry.name.decode() for entry in piece]
            after = piece[-1].cookie
            for entry in piece[::2]:
                await m.unlink(entry.name.decode())
        assert seen == [f"n{number:03}" for number in range(100)]
        assert len(await m.names()) == 100 - len([number for number in range(100) if number % 7 % 2 == 0])


async def test_what_is_created_while_reading_does_not_disturb(tmp_path: Path) -> None:
    store, clock = store_of(*(f"n{number:03}" for number in range(20))), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        first = list(itertools.islice(m.fs.readdir(ROOT_INODE, 0), 10))
        store.give("n000x")
        store.take("n015")
        clock.advance(TTL_S + 1)
        await m.fs.opendir(ROOT_INODE)
        rest = [entry.name for entry in m.fs.readdir(ROOT_INODE, first[-1].cookie)]
        expected = [f"n{number:03}".encode() for number in range(10, 20) if number != 15]
        assert [name for name in rest if name != b"n000x"] == expected


async def test_a_file_being_written_is_listed_with_its_size(tmp_path: Path) -> None:
    async with lake(store_of("a"), tmp_path) as m:
        handle = await m.create("new")
        await m.fs.write(handle, 100, b"x")
        assert await m.names() == ["a", "new"]
        assert {entry.name: entry.size for entry in m.fs.readdir(ROOT_INODE, 0)} == {b"a": 1, b"new": 101}
        await m.close(handle)


async def test_attribute_fresh_s_directory_with_dirty_file_after_the_ttl_is_that_of_lookup(tmp_path: Path) -> None:
    store, clock = store_of("d/a"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        await m.names("d")
        await m.fs.write(await m.create("d/new"), 0, b"new")
        clock.advance(TTL_S + 1)
        entry, fresh_s = await m.fs.lookup(ROOT_INODE, b"d")
        assert entry is not None
        assert m.fs.attribute_fresh_s(entry) == fresh_s == TTL_S, "else the kernel asks again for each path below"


async def test_a_lookup_while_its_directory_is_dirty_asks_nothing(tmp_path: Path) -> None:
    store, clock = store_of("d/x"), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        handle = await m.create("d/new")
        clock.advance(TTL_S + 1)
        before = len(store.requests)
        assert await m.lookup("d/new") is not None
        assert len(store.requests) == before
        await m.close(handle)


async def test_failures_hook_is_used_up(tmp_path: Path) -> None:
    """A name whose question failed is asked for again."""
    store = store_of("a")
    async with lake(store, tmp_path) as m:
        store.hook = Failures(lambda request: request.what == "list", NoSuchBucket("no"))
        with pytest.raises(NoSuchBucket):
            await m.lookup("a")
        assert await m.lookup("a") is not None


# -- the first listing of a directory, while it goes on


def hold_from(store: MemoryStore, page: int) -> Pause:
    """Every LIST but the first few waits."""
    lists = itertools.count(1)
    store.hook = pause = Pause(lambda request: request.what == "list" and next(lists) >= page)
    return pause


async def read_on(m: Lake, inode: int, after: int) -> list[Entry]:
    await m.fs.more_names(inode, after)
    return list(m.fs.readdir(inode, after))


async def test_a_directory_can_be_read_as_its_first_page_is_there(tmp_path: Path) -> None:
    names = [f"n{number:03}".encode() for number in range(60)]
    store = store_of(*(f"d/{name.decode()}" for name in names), page_keys_max=10)
    async with lake(store, tmp_path) as m:
        inode = (await m.found("d")).inode
        before = store.count("list")
        pause = hold_from(store, 2)
        await m.fs.opendir(inode)
        first = await read_on(m, inode, 0)
        assert [entry.name for entry in first] == names[:10]
        assert store.count("list") - before <= 3
        (told,) = m.fs.statistics()["namespace"]["listing"]  # type: ignore[index]
        assert (told["path"], told["names"], told["pages"]) == ("d", 10, 1)
        asked = store.count("list")
        for entry in first:
            found, fresh_s = await m.fs.lookup(inode, entry.name)
            assert (found, 0 < fresh_s <= TTL_S) == (entry, True)
        assert 0 < m.fs.listing_fresh_s(inode) <= TTL_S
        assert store.count("list") == asked, "names that were read are not asked for again"
        rest: list[list[Entry]] = []

        async def read_rest() -> None:
            after = first[-1].cookie
            while more := await read_on(m, inode, after):
                rest.append(more)
                after = more[-1].cookie

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_rest)
            await trio.sleep(0.05)
            assert rest == []
            pause.resume()
        assert sorted(entry.name for piece in rest for entry in piece) == names[10:]
        assert m.fs.statistics()["namespace"]["listing"] == []  # type: ignore[index]
        assert await m.names("d") == [name.decode() for name in names]


async def test_names_known_before_are_read_once_they_are_known_to_be_there(tmp_path: Path) -> None:
    """They come first: the first page must not let a reader pass one that is gone, or miss one that is there."""
    store, clock = store_of(*(f"d/n{number:03}" for number in range(60)), page_keys_max=10), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.found("d/n055")
        await m.found("d/n056")
        with trio.fail_after(5):
            while m.fs.statistics()["namespace"]["listing"]:  # type: ignore[index]
                await trio.sleep(0.001)  # until the first page, which the second name brings, was thrown away
        store.take("d/n056")
        clock.advance(TTL_S + 1)
        inode = (await m.found("d")).inode
        read: list[bytes] = []

        async def read_all() -> None:
            await m.fs.opendir(inode)
            after = 0
            while more := await read_on(m, inode, after):
                read.extend(entry.name for entry in more)
                after = more[-1].cookie

        pause = hold_from(store, 2)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all)
            await reached(pause.reached)
            await trio.sleep(0.02)
            assert read == []
            pause.resume()
        assert sorted(read) == [f"n{number:03}".encode() for number in range(60) if number != 56]


async def test_a_listing_that_fails_half_way_is_not_taken_for_a_short_one(tmp_path: Path) -> None:
    store = store_of(*(f"d/n{number:03}" for number in range(60)), page_keys_max=10)
    async with lake(store, tmp_path) as m:
        inode = (await m.found("d")).inode
        lists = itertools.count(1)
        fails = Failures(lambda request: request.what == "list" and next(lists) >= 2, NoSuchBucket("no"), count=1000)
        store.hook = fails
        await m.fs.opendir(inode)
        first = await read_on(m, inode, 0)
        with pytest.raises(NoSuchBucket):
            await read_on(m, inode, first[-1].cookie)
        fails.left = 0
        rest: list[Entry] = []
        while more := await read_on(m, inode, rest[-1].cookie if rest else first[-1].cookie):
            rest += more
        assert len({entry.name for entry in [*first, *rest]}) == len(first) + len(rest) == 60


async def test_names_asked_for_while_a_first_listing_goes_on_come_once(tmp_path: Path) -> None:
    """And so do those that another node commits meanwhile."""
    store = store_of(*(f"d/n{number:03}" for number in range(60)), page_keys_max=10)
    async with two_lakes(store, tmp_path) as (m, other):
        inode = (await m.found("d")).inode
        asks = itertools.count(1)
        store.hook = pause = Pause(lambda request: request.what == "list" and request.key == "d/" and next(asks) >= 2)
        await m.fs.opendir(inode)
        asked = await m.found("d/n055")
        await other.symlink("d/n057x", "n057")
        await other.sync()
        assert await m.poll() == 1
        pause.resume()
        assert await m.names("d") == sorted([*(f"n{number:03}" for number in range(60)), "n057x"])
        assert (await m.found("d/n055")).inode == asked.inode


@pytest.mark.parametrize("capabilities", [Capabilities(name="sorted"), UNSORTED], ids=lambda found: found.name)
async def test_a_large_listing_again_changes_nothing(tmp_path: Path, capabilities: Capabilities) -> None:
    """Pages side by side bring some names twice; hidden keys are counted once."""
    keys = [f"n{number:04}" for number in range(700)] + [f"n{number:04}/x" for number in range(0, 700, 50)]
    store = store_of(
        *keys, *(f"x{number:04}" + "y" * 260 for number in range(300)), capabilities=capabilities, page_keys_max=10
    )
    clock = Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        assert await m.names() == sorted(keys[:700])
        assert m.hidden() == {"conflict": 14, "long": 300}
        listing = m.parts.namespace.tree.listing(ROOT_INODE)
        assert listing is not None
        metrics = m.metrics.namespace
        before = (metrics.entries_added, metrics.entries_changed, metrics.entries_removed)
        clock.advance(TTL_S + 1)
        store.take("n0007")
        assert await m.names() == sorted(set(keys[:700]) - {"n0007"})
        assert m.hidden() == {"conflict": 14, "long": 300}
        assert (metrics.entries_added, metrics.entries_changed, metrics.entries_removed) == (*before[:2], before[2] + 1)
        again = m.parts.namespace.tree.listing(ROOT_INODE)
        assert again is not None
        assert again.entries == 699


# -- names that are not there


async def absent(m: Lake, directory: int, name: bytes) -> float:
    """For how long that is known, in seconds."""
    entry, fresh_s = await m.fs.lookup(directory, name)
    assert entry is None
    return fresh_s


async def test_an_absent_name_is_asked_for_once(tmp_path: Path) -> None:
    """Of a directory that was never listed: one LIST for each name, one for its first page, and none again within the
    TTL."""
    store, clock = store_of(*(f"d/x{number}" for number in range(10)), page_keys_max=5), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        inode = (await m.found("d")).inode
        before = store.count("list")
        for _ in range(20):
            for name in (b"a", b"b", b"c"):
                assert await absent(m, inode, name) == pytest.approx(TTL_S)
        await nothing_under_way(m)
        assert store.count("list") - before == 3 + 1
        clock.advance(TTL_S + 1)
        assert await absent(m, inode, b"a") == pytest.approx(TTL_S)
        assert store.count("list") - before == 3 + 1 + 1


async def test_names_that_cannot_be_are_not_asked_for(tmp_path: Path) -> None:
    store = store_of(".lakefs/x", "d/x")
    async with lake(store, tmp_path) as m:
        before = store.count("list")
        for name in (b".lakefs", b"\xff\xfe", PLACEHOLDER.encode()):
            assert await absent(m, ROOT_INODE, name) == TTL_S
        assert store.count("list") == before


async def test_a_complete_listing_knows_what_is_absent(tmp_path: Path) -> None:
    """Any number of absent names costs nothing within the TTL, and one listing for all of them after it."""
    store, clock = store_of(*(f"d/n{number:03}" for number in range(300)), page_keys_max=1000), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names("d")
        inode = (await m.found("d")).inode
        before = store.count("list")
        for number in range(500):
            assert await absent(m, inode, b"absent-%d" % number) == pytest.approx(TTL_S)
        assert store.count("list") == before
        clock.advance(TTL_S + 1)
        for number in range(500):
            assert await absent(m, inode, b"absent-%d" % number) > 0
        assert store.count("list") == before + 1
    async with lake(store, tmp_path, clock=clock) as m:
        before = store.count("list")
        assert await absent(m, inode, b"absent-1") > 0
        assert store.count("list") == before, "nor after a restart"


class Repeating(MemoryStore):
    """Each key and prefix comes twice in a page of a LIST, as of Ceph while a bucket is resharded."""

    def list_page(self, *given: Any, **options: Any) -> ListPage:
        page = super().list_page(*given, **options)
        objects = [meta for meta in page.objects for _ in range(2)]
        return ListPage(objects, [prefix for prefix in page.prefixes for _ in range(2)], page.next_token)


@pytest.mark.parametrize("is_known", [False, True])
async def test_keys_that_a_page_repeats_are_one_name(tmp_path: Path, is_known: bool) -> None:
    store, clock = Repeating(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        if is_known:
            assert await m.names() == []
            clock.advance(TTL_S + 1)
        for key in ("d/f", "d/g", "e"):
            store.give(key)
        for _ in range(2):
            assert (await m.names(), await m.names("d")) == (["d", "e"], ["f", "g"])
            clock.advance(TTL_S + 1)
        await m.unlink("d/f")
        assert await m.names("d") == ["g"]


@pytest.fixture
def low_recursion_limit() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(min(before, sized(400, 1000)))
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("low_recursion_limit")
async def test_deep_tree_that_another_program_removes_goes(tmp_path: Path) -> None:
    """Deeper than Python recurses, as local directories can be."""
    store, clock = MemoryStore(), Clock()
    depth = sys.getrecursionlimit() // 2
    store.give("a/" * depth + "f")
    store.give("keep")
    async with lake(store, tmp_path, clock=clock) as m:
        await m.fs.refresh("", recursive=True)
        store.take("a/" * depth + "f")
        clock.advance(TTL_S + 1)
        assert await m.names() == ["keep"]
