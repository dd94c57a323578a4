"""Renamed plain objects stay at the keys of their earlier names: nodes that had not heard of it write there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.record import COMMITS, OWN, THIS, ObjectRef, Operation, Put, Record
from lakefs_fuse.errors import FileError, LakeError, Unavailable
from lakefs_fuse.meta.tombstones import NS
from lakefs_fuse.store.client import REPLACES_METADATA, TOKEN_METADATA, StoreClient
from lakefs_fuse.store.protocol import Capabilities, ObjectMeta
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder
from lakefs_fuse.vfs.namespace.renamed_objects import NAMES_PER_STEP
from tests.fakes import delete_all_due
from tests.memory_store import Failures, MemoryStore, Pause, Request, When, pause_of_commits
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import RENAME_EXCHANGE, TTL_S, Clock, Lake, held_fresh, lake, two_lakes, unheard_commits
from tests.vfs.writing_back import LARGE, die, rewrite, stored, until, writing_back

WINDOW_S = 300.0
SHOWN_S_MAX = 5.0
BLOCKED_S = 0.1


async def until_shown(m: Lake, path: str, data: bytes) -> None:
    """What a commit of another node caused here was committed, too."""
    with trio.fail_after(SHOWN_S_MAX):
        while (await m.found(path)).size != len(data) or await m.read(path) != data:
            await trio.sleep(0.01)
    await m.parts.renamed.wait_adopted()


async def written_and_seen(one: Lake, two: Lake, names: str) -> None:
    """One node stores a file of each letter, ``first`` and the letter; the other has heard of them."""
    for name in names:
        await one.write(name, b"first " + name.encode())
    await one.sync()
    await two.poll()
    assert await two.names() == list(names)


async def shown_by_both(one: Lake, two: Lake, clock: Clock, expected: Mapping[str, object]) -> None:
    """Both nodes show these files and directories, after a poll and beyond the TTL."""
    for m in (one, two):
        await m.poll()
        clock.advance(2 * TTL_S)
        assert await m.tree() == expected


async def renamed_and_rewritten(one: Lake, two: Lake) -> None:
    """One node renames ``f`` to ``g``; the other, which has not heard of that, replaces ``f`` in place."""
    await one.write("f", b"first")
    await one.sync()
    await two.poll()
    assert await two.names() == ["f"]
    await one.rename("f", "g")
    await one.sync()
    await rewrite(two, "f", b"second")


async def test_who_replaced_a_renamed_file_says_so_when_it_hears_of_the_rename(tmp_path: Path) -> None:
    """What it wrote came before the rename: the new name has its bytes, and nobody has to read them first."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await renamed_and_rewritten(one, two)
        await two.poll()
        await until_shown(two, "g", b"second")
        await one.poll()
        assert await one.tree() == await two.tree() == {"g": b"second"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"g": b"second"}


async def test_bytes_of_a_renamed_file_come_over_an_object_that_the_rename_replaced(tmp_path: Path) -> None:
    """That is of the same second as the rename, whose node had not heard of it: its date alone does not tell."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await written_and_seen(one, two, "fg")
        await rewrite(two, "f", b"second")
        await two.unlink("g")
        await two.write("g", b"newer")  # of which the commit of the removal tells
        await two.sync()
        clock.advance(0.01)
        await one.rename("f", "g")
        await one.sync()
        await two.poll()
        await until_shown(two, "g", b"second")
        await shown_by_both(one, two, clock, {"g": b"second"})


async def test_what_was_written_in_place_of_a_renamed_file_goes_along_with_its_directory(tmp_path: Path) -> None:
    """The writer hears of the rename in a rename of the directory, which does not wait for the store."""
    store, clock = MemoryStore(), Clock()
    config = {"pack": "never", "durability": "writeback", "writeback_delay_s": 0.0}
    async with two_lakes(store, tmp_path, clock=clock, **config) as (one, two):
        await one.mkdir("d")
        await one.write("f", b"first")
        await one.sync()
        await two.poll()
        assert await two.names() == ["d", "f"]
        await one.rename("f", "d/g")
        await one.sync()
        await rewrite(two, "f", b"second")
        await stored(two)
        looks = Counter[str]()  # of the poll, and of who gives the new bytes to the renamed file

        def is_second_look(request: Request) -> bool:
            looks[f"{request.what} {request.key}"] += 1
            return looks["head f"] == 2 and request.what == "head"

        store.hook = looking = Pause(is_second_look)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.rename, "d", "e")
            await reached(looking.reached)
            with trio.fail_after(SHOWN_S_MAX):
                while "e" not in await two.names():
                    await trio.sleep(0.01)
            looking.resume()
        await until_shown(two, "e/g", b"second")
        await two.sync()
        await shown_by_both(one, two, clock, {"e": None, "e/g": b"second"})


async def test_each_name_of_a_renamed_file_gets_what_was_written_in_its_place(tmp_path: Path) -> None:
    """Two nodes renamed it, unaware of each other, and the writer hears of both at once."""
    store, clock = MemoryStore(), Clock()
    async with (
        two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two),
        lake(store, tmp_path / "third", clock=clock, pack="never") as third,
    ):
        await one.write("f", b"first")
        await one.sync()
        for m in (two, third):
            await m.poll()
            assert await m.names() == ["f"]
        await one.rename("f", "g")
        await third.rename("f", "h")
        await rewrite(two, "f", b"second")
        await two.poll()
        for name in "gh":
            await until_shown(two, name, b"second")
        for m in (one, third):
            await m.poll()
            assert await m.tree() == {"g": b"second", "h": b"second"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"g": b"second", "h": b"second"}


async def test_who_hears_of_a_rename_while_it_replaces_the_file_says_so_when_it_has(tmp_path: Path) -> None:
    """The file stays under its name here, because another of the renamed directory was replaced before."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.mkdir("d")
        for path in ("d/a", "d/f"):
            await one.write(path, b"first")
        await one.sync()
        await two.poll()
        assert await two.names("d") == ["a", "f"]
        await one.rename("d", "e")
        await one.sync()
        await rewrite(two, "d/a", b"second")
        store.hook = pause = Pause(lambda request: request.what == "put" and request.key == "d/f")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rewrite, two, "d/f", b"second")
            await trio.to_thread.run_sync(pause.reached.wait)
            await two.poll()
            pause.resume()
        for path in ("e/a", "e/f"):
            await until_shown(two, path, b"second")


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_file_whose_commit_fails_after_its_object_is_stored_is_committed_later(
    tmp_path: Path, durability: str
) -> None:
    """It lies below `.lakefs/objects/`, so others find it by that commit alone: no sync succeeds before it."""
    store, clock, nothing = MemoryStore(), Clock(), lambda _request, _when: None
    async with lake(
        store, tmp_path / "cache", clock=clock, pack="never", durability=durability, retry_timeout_s=0.0
    ) as m:
        await m.write("f", b"first")
        await m.fs.make_durable()  # else it is stored under its new name
        await m.rename("f", "g")
        await m.sync()
        handle = await m.create("f")
        await m.fs.write(handle, 0, b"second")
        store.hook = Failures(
            lambda request: request.what == "put" and request.key.startswith(COMMITS), Unavailable("away"), count=1000
        )
        for _ in range(2):
            with pytest.raises(Unavailable):
                await m.fs.fsync(handle)
        await m.fs.write(handle, 6, b", and more")
        with pytest.raises(Unavailable):
            await m.fs.fsync(handle)
        store.hook = nothing
        await m.close(handle)
        await m.fs.make_durable()
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await other.tree() == {"f": b"second, and more", "g": b"first"}


async def test_close_that_waits_for_its_commit_when_the_daemon_dies_leaves_it_to_the_next_mount(tmp_path: Path) -> None:
    """The version is recorded and its location journaled, so it is no orphan, and others see it with the commit."""
    store, clock, dead = MemoryStore(), Clock(), tmp_path / "dead"

    def dying(request: Request, when: When) -> None:
        if when == "before" and request.what == "put" and request.key.startswith(COMMITS):
            if not dead.exists():
                die(tmp_path / "cache", dead)
            raise Unavailable("away")

    async with lake(store, tmp_path / "cache", clock=clock, pack="never", retry_timeout_s=0.0) as m:
        await m.write("f", b"first")
        await m.rename("f", "g")
        await m.sync()
        store.hook = dying
        with pytest.raises(Unavailable):
            await m.write("f", b"second")
    store.hook = lambda _request, _when: None
    async with lake(store, tmp_path / "before", clock=clock) as other:
        assert await other.tree() == {"g": b"first"}
    async with lake(store, dead, clock=clock, pack="never") as m:
        assert "orphan" not in [unfinished.state for unfinished in m.fs.unfinished()]
        assert await m.tree() == {"f": b"second", "g": b"first"}
        await m.fs.make_durable()
        await m.sync()
    assert list((dead / "staging").iterdir()) == []
    async with lake(store, tmp_path / "after", clock=clock) as other:
        assert await other.tree() == {"f": b"second", "g": b"first"}


async def test_version_stored_after_a_journaled_rename_is_not_older_than_that(tmp_path: Path) -> None:
    """Another node replaces it before the commit of the rename, which says that the name has other bytes."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", durability="writeback", writeback_delay_s=0.0) as (
        one,
        two,
    ):
        await one.write("d", b"first")
        await one.write("e", b"renamed")
        await one.rename("d", "f")
        await one.fs.make_durable()
        await two.poll()
        await one.rename("e", "f")
        await rewrite(one, "f", b"second")
        await until(lambda: "f" in store.objects)
        clock.advance(TTL_S + 5)
        with unheard_commits(store):
            assert await two.read("f") == b"second"
        await rewrite(two, "f", b"third")
        await two.fs.make_durable()
        await one.fs.make_durable()
        await one.poll()
        await two.poll()
        assert await one.tree() == await two.tree() == {"f": b"third"}


@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.parametrize("is_replaced", [False, True])
async def test_file_that_another_node_removed_before_its_writer_knew_it_was_stored_stays_away(
    tmp_path: Path, is_replaced: bool, is_new: bool
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=WINDOW_S) as (one, two):
        if not is_new:
            await one.write("before", b"first")
            await one.rename("before", "f")
        await one.write("other", b"other")
        await two.poll()
        lost = Failures(lambda request: request.what == "put" and request.key == "f", Unavailable("lost"), when="after")
        looking = Pause(lambda request: request.what == "head" and request.key == "f")

        def hook(request: Request, when: When) -> None:
            lost(request, when)
            if not lost.left and not looking.reached.is_set():  # only the writer's own look waits
                looking(request, when)

        store.hook = hook
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.write if is_new else partial(rewrite, two), "f", b"second")
            await trio.to_thread.run_sync(looking.reached.wait)
            clock.advance(TTL_S + 5)
            assert await one.read("f") == b"second"
            if is_replaced:
                await one.rename("other", "f")
            else:
                await one.unlink("f")
            await one.fs.sync_names()
            await two.poll()
            looking.resume()
        await two.fs.sync_names()
        await one.poll()
        assert await one.tree() == await two.tree() == ({"f": b"other"} if is_replaced else {"other": b"other"})


async def test_bytes_that_are_there_again_stay_where_the_clock_of_their_writer_is_behind(tmp_path: Path) -> None:
    """The answer to its PUT is dated before the removal, as a client may date it by its own clock."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=WINDOW_S) as (one, two):
        await one.write("f", b"bytes")
        clock.advance(TTL_S + 5)
        await two.unlink("f")
        await two.fs.sync_names()
        await one.poll()
        assert await one.names() == []
        clock.advance(5)
        store.clients_behind_ns = 60 * NS
        await one.write("f", b"bytes")
        await one.fs.sync_names()
        await two.poll()
        assert await one.tree() == await two.tree() == {"f": b"bytes"}


async def test_file_that_took_the_name_of_a_renamed_one_stays_where_who_has_not_heard_replaces_that(
    tmp_path: Path,
) -> None:
    """The object is a later version of the renamed file, and dated after both renames."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await written_and_seen(one, two, "ab")
        await one.rename("a", "c")
        await one.rename("b", "a")
        await one.sync()
        clock.advance(5)
        await rewrite(two, "a", b"second a")
        clock.advance(2 * TTL_S)
        assert await one.names() == ["a", "c"]
        assert await one.read("a") == b"first b"
        await one.unlink("a")
        await one.fs.sync_names()
        await two.poll()
        await two.parts.renamed.wait_adopted()
        await shown_by_both(one, two, clock, {"c": b"second a"})
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"c": b"second a"}


async def test_who_reads_a_renamed_file_finds_what_a_lost_node_wrote_in_its_place(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await renamed_and_rewritten(one, two)  # and the other node hears of nothing any more
    async with lake(store, tmp_path / "reader", clock=clock) as reader:
        with pytest.raises(FileError, match="replaced"):
            await reader.read("g")
        assert await reader.tree() == {"g": b"second"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"g": b"second"}


async def test_renamed_file_that_its_renamer_had_replaced_unaware_comes_back_to_its_key_as_that(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await renamed_and_rewritten(one, two)
        await two.poll()
        await two.rename("g", "f")
        await two.fs.sync_names()
        for m in (two, one):
            await m.poll()
            assert await m.tree() == {"f": b"second"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": b"second"}


async def test_renamed_file_that_its_renamer_wrote_since_stays_where_the_commit_of_that_is_late(tmp_path: Path) -> None:
    """Who replaced the object of its earlier name dates what it says of the file later than that commit."""
    store, clock = MemoryStore(), Clock()
    pause = Pause(lambda request: request.what == "put" and request.key.startswith(COMMITS))
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await renamed_and_rewritten(one, two)
        await two.sync()
        clock.advance(5)
        await rewrite(one, "g", b"newest")
        async with trio.open_nursery() as nursery:
            store.hook = pause
            nursery.start_soon(one.fs.sync_names)
            await reached(pause.reached)
            store.hook = lambda _request, _when: None
            clock.advance(1)
            await two.poll()
            await two.parts.renamed.wait_adopted()
            pause.resume()
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
            assert await m.read("g") == b"newest"
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.read("g") == b"newest"


@pytest.mark.parametrize("rewritten", ["a", "b", "ab", "ba"])
async def test_exchanged_files_have_what_was_written_in_their_place(tmp_path: Path, rewritten: str) -> None:
    store, clock = MemoryStore(), Clock()
    expected = {"a": b"first b", "b": b"first a"}
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await written_and_seen(one, two, "ab")
        clock.advance(5)
        await one.rename("a", "b", RENAME_EXCHANGE)
        for name in rewritten:
            expected["b" if name == "a" else "a"] = b"second " + name.encode()
            await rewrite(two, name, b"second " + name.encode())
        await two.fs.sync_names()
        clock.advance(5)
        await two.poll()
        await two.parts.renamed.wait_adopted()
        await shown_by_both(one, two, clock, expected)
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_exchanged_file_that_another_node_had_renamed_is_what_was_written_in_its_place(tmp_path: Path) -> None:
    """Who wrote both files in place says what the exchange made of them, while it gives the renamed one its bytes."""
    store, clock = MemoryStore(), Clock()
    expected = {"a": b"second b", "b": b"second a", "c": b"second a"}
    async with (
        two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two),
        lake(store, tmp_path / "three", clock=clock, pack="never") as three,
    ):
        await written_and_seen(one, two, "ab")
        assert await three.names() == ["a", "b"]
        clock.advance(5)
        for name in "ab":
            await rewrite(two, name, b"second " + name.encode())
        clock.advance(2)
        with unheard_commits(store), held_fresh(one), held_fresh(three):
            await three.rename("a", "c")
            clock.advance(0.1)
            await one.rename("a", "b", RENAME_EXCHANGE)
        looking, saying = Pause(lambda request: (request.what, request.key) == ("head", "c")), pause_of_commits()

        def pause(request: Request, when: When) -> None:
            looking(request, when)
            saying(request, when)

        store.hook = pause
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.poll)
            await reached(saying.reached)  # what the exchanged names are
            await trio.testing.wait_all_tasks_blocked(BLOCKED_S)  # "c" is looked for now, or once that is said
            looking.resume()
            await trio.testing.wait_all_tasks_blocked(BLOCKED_S)
            saying.resume()
        await two.parts.renamed.wait_adopted()
        await shown_by_both(one, two, clock, expected)
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_exchanged_files_stay_where_one_was_written_twice_in_the_place_of_the_other(tmp_path: Path) -> None:
    """Commits tell of both versions, later than the exchange, as the name had been removed before."""
    store, clock = MemoryStore(), Clock()
    expected = {"a": b"first b", "b": b"third a"}
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await written_and_seen(one, two, "a")
        await one.unlink("a")
        clock.advance(5)
        await written_and_seen(one, two, "ab")
        clock.advance(5)
        await one.rename("a", "b", RENAME_EXCHANGE)
        for content in (b"second a", b"third a"):
            clock.advance(1)
            await rewrite(two, "a", content)
            await two.fs.sync_names()
        clock.advance(5)
        await two.poll()
        await two.parts.renamed.wait_adopted()
        await shown_by_both(one, two, clock, expected)
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_exchanged_file_that_was_removed_or_replaced_goes_on_without_who_wrote_in_its_place(
    tmp_path: Path, is_replaced: bool
) -> None:
    """One that was removed has what was written there; one that was replaced has what replaced it."""
    store, clock = MemoryStore(), Clock()
    expected = {"a": b"third a" if is_replaced else b"second a", "b": b"second a", "d": None}
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await written_and_seen(one, two, "ab")
        clock.advance(5)
        await one.rename("a", "b", RENAME_EXCHANGE)
        clock.advance(1)
        if is_replaced:
            await rewrite(one, "a", b"third a")
        else:
            await one.unlink("a")
        await one.fs.sync_names()
        clock.advance(1)
        await rewrite(two, "a", b"second a")
        await two.fs.sync_names()
        store.hook = pause = Pause(lambda request: request.what == "put")
        async with trio.open_nursery() as nursery:
            await two.mkdir("d")
            nursery.start_soon(two.fs.sync_names)
            await reached(pause.reached)
            await two.poll()  # what came after the exchange is heard of before the next commit's turn
            pause.resume()
        await two.parts.renamed.wait_adopted()
        await shown_by_both(one, two, clock, expected)
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_exchanged_file_gets_what_was_written_in_its_place_where_another_came_to_the_other_name(
    tmp_path: Path,
) -> None:
    store, clock = MemoryStore(), Clock()
    expected = {"a": b"first c", "b": b"second a"}
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await written_and_seen(one, two, "abc")
        clock.advance(5)
        await one.rename("a", "b", RENAME_EXCHANGE)
        await rewrite(two, "a", b"second a")
        await two.fs.sync_names()
        clock.advance(5)
        await one.rename("c", "a")
        await two.poll()
        await two.parts.renamed.wait_adopted()
        await shown_by_both(one, two, clock, expected)
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_exchanged_file_whose_removal_is_not_heard_of_stays_removed_for_who_wrote_in_its_place(
    tmp_path: Path,
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await written_and_seen(one, two, "ab")
        clock.advance(5)
        await one.rename("a", "b", RENAME_EXCHANGE)
        await rewrite(two, "a", b"second a")
        clock.advance(2)
        store.hook = pause = Pause(lambda request: request.what == "head")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.poll)
            await reached(pause.reached)  # it has heard of the exchange, and asks for what it wrote
            await one.unlink("a")
            await one.fs.sync_names()
            clock.advance(1)
            pause.resume()
        await two.parts.renamed.wait_adopted()
        await shown_by_both(one, two, clock, {"b": b"second a"})
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"b": b"second a"}


async def test_exchanged_file_whose_name_is_removed_before_it_is_found_is_what_was_written_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The commit that removes the other name is in effect before the store has said what lies at its key."""
    store, clock, asked, resumed = MemoryStore(), Clock(), trio.Event(), trio.Event()
    find = StoreClient.find

    async def find_later(client: StoreClient, key: str) -> ObjectMeta | None:
        asked.set()
        await resumed.wait()
        return await find(client, key)

    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await written_and_seen(one, two, "ab")
        clock.advance(5)
        await one.rename("a", "b", RENAME_EXCHANGE)
        await rewrite(two, "a", b"second a")
        clock.advance(2)
        await one.unlink("a")
        await one.fs.sync_names()
        monkeypatch.setattr(StoreClient, "find", find_later)
        await two.poll()
        await asked.wait()
        assert await two.lookup("a") is None
        resumed.set()
        await two.parts.renamed.wait_adopted()
        await shown_by_both(one, two, clock, {"b": b"second a"})
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"b": b"second a"}


async def test_exchanged_file_that_is_stored_at_its_old_key_leaves_the_later_version_of_the_other(
    tmp_path: Path,
) -> None:
    """Of which its writer has not heard: that name must hide the object at its key, and no more."""
    store, clock = MemoryStore(), Clock()
    expected = {"a": b"third", "b": noise(1, LARGE)}
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await written_and_seen(one, two, "ab")
        clock.advance(5)
        handle = await two.open("a", os.O_RDWR | os.O_TRUNC)
        await two.fs.write(handle, 0, expected["b"])
        await until(lambda: store.count("create_multipart", "a") > 0)
        await one.rename("a", "b", RENAME_EXCHANGE)
        await two.poll()
        clock.advance(0.1)
        await rewrite(one, "a", b"third")
        await one.fs.sync_names()
        clock.advance(0.1)
        await two.close(handle)
        await shown_by_both(one, two, clock, expected)
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_file_that_was_renamed_and_replaced_in_one_commit_stays_removed_for_who_wrote_in_its_place(
    tmp_path: Path,
) -> None:
    """Its old name got another file in the commit of the rename, as when write-back had held two renames."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        for name in "fh":
            await one.write(name, b"first " + name.encode())
        await one.sync()
        await two.poll()
        assert await two.names() == ["f", "h"]
        clock.advance(5)
        builder = ChangeBuilder(one.fs.namespace.tree)
        f, h = await one.found("f"), await one.found("h")
        builder.put("g", f, key="f")
        builder.put("f", h, key="h", hides=f.etag)
        builder.remove("h", h)
        await one.parts.committer.commit(builder.change)
        await rewrite(two, "f", b"second")
        store.hook = pause = Pause(lambda request: request.what == "head")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.poll)
            await reached(pause.reached)  # it has heard of the commit, and asks for what it wrote
            await one.unlink("g")
            await one.fs.sync_names()
            clock.advance(1)
            pause.resume()
        await two.parts.renamed.wait_adopted()
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
            assert "g" not in await m.names()


@pytest.mark.parametrize("is_written_again", [False, True])
@pytest.mark.parametrize("size", [7, LARGE])
async def test_file_made_at_the_key_of_a_renamed_one_unaware_is_a_file_of_its_own(
    tmp_path: Path, size: int, is_written_again: bool
) -> None:
    """Its writer has removed the old one before it heard of the rename: those bytes are gone, and the renamed file has
    the new ones rather than none."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.write("f", b"first")
        await one.sync()
        await two.poll()
        assert await two.names() == ["f"]
        await one.rename("f", "g")
        await one.sync()
        clock.advance(1)
        await two.unlink("f")
        await two.write("f", noise(0, size) if is_written_again else noise(1, size))
        if is_written_again:
            await rewrite(two, "f", noise(1, size))
        await two.fs.sync_names()
        await two.poll()
        await two.parts.renamed.wait_adopted()
        for m in (two, one):
            await m.poll()
            assert await m.tree() == {"f": noise(1, size), "g": noise(1, size)}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": noise(1, size), "g": noise(1, size)}


@pytest.mark.parametrize("size", [7, LARGE])
async def test_new_file_leaves_the_bytes_of_a_renamed_one_of_which_its_writer_never_heard(
    tmp_path: Path, size: int
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        assert await two.names() == []
        await one.write("f", b"first")
        await one.rename("f", "g")
        await one.sync()
        await two.write("f", noise(1, size))
        await two.fs.sync_names()
        for m in (two, one):
            await m.poll()
            clock.advance(2 * TTL_S)
            assert await m.tree() == {"f": noise(1, size), "g": b"first"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": noise(1, size), "g": b"first"}


@pytest.mark.parametrize("size", [7, LARGE])
async def test_new_file_replaces_another_nodes_file_of_its_name(tmp_path: Path, size: int) -> None:
    """The one that is closed last wins, whether or not its writer had heard of the other."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        assert await two.names() == []
        await one.write("f", b"first")
        await two.write("f", noise(1, size))
        for m in (two, one):
            clock.advance(2 * TTL_S)
            assert await m.tree() == {"f": noise(1, size)}
        assert [key for key in store.objects if not key.startswith(COMMITS)] == ["f"]


async def test_new_file_that_others_store_again_and_again_is_refused_in_the_end(tmp_path: Path) -> None:
    """Its bytes stay staged, and another attempt stores them."""
    store, clock = MemoryStore(Capabilities(name="memory", put_if_match=True)), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never") as m:
        handle = await m.create("f")
        await m.fs.write(handle, 0, b"bytes")

        def other_program(request: Request, when: When) -> None:
            if (request.what, when) == ("put", "before"):
                store.give("f", str(len(store.requests)).encode())

        store.hook = other_program
        with pytest.raises(LakeError, match="no turn"):
            await m.fs.flush(handle)
        store.hook = lambda _request, _when: None
        await m.close(handle)
        assert store.data("f") == b"bytes"


@pytest.mark.parametrize("unaware", [False, True])
async def test_object_that_a_renamed_file_had_is_not_replaced_before_others_have_heard_of_its_end(
    tmp_path: Path, unaware: bool
) -> None:
    """One node renames the file further on. The other has removed it, or put another in its place, unaware of the first
    rename, and makes a new file under the first name."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always", delete_after_s=WINDOW_S) as (one, two):
        await one.write("f", noise(1, LARGE))
        await one.sync()
        await two.poll()
        assert await two.names() == ["f"]
        await one.rename("f", "g")
        clock.advance(1)
        if unaware:
            await two.write("g", b"other")
            await two.poll()
        else:
            await two.poll()
            await two.unlink("g")
            await two.fs.sync_names()
        await two.write("f", noise(2, LARGE))
        clock.advance(1)
        await one.rename("g", "h")
        for m in (one, two):
            await m.poll()
            assert await m.tree() == {"f": noise(2, LARGE), "h": noise(1, LARGE)}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": noise(2, LARGE), "h": noise(1, LARGE)}


async def test_key_of_a_renamed_file_that_was_removed_gets_new_bytes_when_nobody_can_name_the_old_ones(
    tmp_path: Path,
) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", delete_after_s=WINDOW_S) as m:
        await m.write("f", b"first")
        await m.rename("f", "g")
        await m.unlink("g")
        await m.write("f", b"second")
        await m.unlink("f")
        await m.fs.sync_names()
        assert store.data("f") == b"first"
        clock.advance(WINDOW_S + 1)
        await m.write("f", b"third")
        assert store.data("f") == b"third"
        assert await m.tree() == {"f": b"third"}


async def test_object_that_was_removed_before_a_rename_was_heard_of_stays(tmp_path: Path) -> None:
    """One node removes the file, another renames it meanwhile: the object is deleted only if no rename comes."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=WINDOW_S) as (one, two):
        await one.write("f", b"bytes")
        await one.sync()
        await two.poll()
        assert await two.names() == ["f"]
        await one.unlink("f")
        await one.fs.sync_names()
        await two.rename("f", "g")
        clock.advance(2 * WINDOW_S)
        await one.poll()
        await delete_all_due(one.parts.deletions)
        await two.poll()
        assert store.data("f") == b"bytes"
        assert await one.tree() == await two.tree() == {"g": b"bytes"}


async def test_removed_object_stays_until_others_had_time_to_hear_of_it(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", delete_after_s=WINDOW_S) as m:
        await m.write("f", b"bytes")
        await m.unlink("f")
        await m.fs.sync_names()
        clock.advance(WINDOW_S - 1)
        await delete_all_due(m.parts.deletions)
        assert store.data("f") == b"bytes"
        clock.advance(2)
        await delete_all_due(m.parts.deletions)
        assert "f" not in store.objects


async def test_key_that_another_name_still_has_its_bytes_at_is_freed_for_an_upload_that_began_before(
    tmp_path: Path,
) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never") as m:
        await m.write("old", b"bytes")
        await m.rename("old", "name")
        await m.parts.renamed.free("old")
        location = m.fs.xattr((await m.found("name")).inode, "user.lakefs.location")
        assert b"/.lakefs/objects/" in location
        store.take("old")
        assert await m.tree() == {"name": b"bytes"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"name": b"bytes"}


async def test_key_of_a_renamed_file_that_its_writer_replaced_unaware_before_it_died_is_freed(tmp_path: Path) -> None:
    """It does not remember that it did: what lies there is the renamed file, and is copied away as that."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await renamed_and_rewritten(one, two)
    async with lake(store, tmp_path / "again", clock=clock, pack="never") as m:
        await m.found("g")
        await m.parts.renamed.free("f")
        store.take("f")
        assert await m.tree() == {"g": b"second"}


async def assert_stays(store: MemoryStore, clock: Clock, root: Path, remover: Lake, other: Lake) -> None:
    """The file is there for both nodes and a fresh one, also when the removed object's time has come."""
    for _ in range(2):
        assert await remover.tree() == await other.tree() == {"f": b"bytes"}
        clock.advance(2 * WINDOW_S)
        await delete_all_due(remover.parts.deletions)
    async with lake(store, root / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": b"bytes"}


async def test_same_bytes_that_are_put_again_where_another_node_removed_them_stay(tmp_path: Path) -> None:
    """They have the same ETag. Who puts them knows of the removal, and says so; the other hears of it in time."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=WINDOW_S) as (one, two):
        await one.write("f", b"bytes")
        await one.unlink("f")
        await one.fs.sync_names()
        await two.poll()
        clock.advance(10)
        await two.write("f", b"bytes")
        await two.fs.sync_names()
        await one.poll()
        await assert_stays(store, clock, tmp_path, one, two)


async def test_same_bytes_that_are_put_again_stay_where_the_clock_of_their_removal_is_ahead_of_the_stores(
    tmp_path: Path,
) -> None:
    """The store dates them before the removal of which their writer knows."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=WINDOW_S) as (one, two):
        await one.write("f", b"bytes")
        await one.unlink("f")
        await one.fs.sync_names()
        behind_ns = 2_000_000_000
        store.clock = lambda: clock.now_ns - behind_ns
        await one.write("f", b"bytes")
        await one.fs.sync_names()
        await two.poll()
        await assert_stays(store, clock, tmp_path, one, two)


async def test_same_bytes_that_are_written_in_place_while_another_node_removes_them_stay(tmp_path: Path) -> None:
    """As other bytes would: who writes them says that the object is there again."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=WINDOW_S) as (one, two):
        await one.write("f", b"bytes")
        await one.sync()
        await two.poll()
        assert await two.names() == ["f"]
        await one.unlink("f")
        await one.fs.sync_names()
        clock.advance(1)
        await rewrite(two, "f", b"bytes")
        await two.fs.sync_names()
        await two.poll()
        await one.poll()
        await assert_stays(store, clock, tmp_path, one, two)


@pytest.mark.parametrize("rename", [False, True])
async def test_same_bytes_that_are_put_again_and_removed_before_their_writer_tells_of_them_stay_away(
    tmp_path: Path, rename: bool
) -> None:
    """Who removes them has seen them in a listing, and names the date that the store gives them."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=WINDOW_S) as (one, two):
        await one.write("f", b"bytes")
        await one.unlink("f")
        await one.fs.sync_names()
        await two.poll()
        clock.advance(TTL_S + 5)
        await two.write("f", b"bytes")
        assert await one.names() == ["f"]
        if rename:
            await one.rename("f", "g")
        else:
            await one.unlink("f")
            await one.fs.sync_names()
        clock.advance(1)
        await two.fs.sync_names()
        expected = {"g": b"bytes"} if rename else {}
        for m in (one, two, one):
            await m.poll()
            assert await m.tree() == expected
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


@pytest.mark.parametrize("is_renamed", [False, True])
async def test_same_bytes_that_are_put_again_and_got_attributes_before_they_were_told_of_are_removed(
    tmp_path: Path, is_renamed: bool
) -> None:
    """Who removes them has listed them. Its row has the time of the attributes in place of the store's date."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    expected = {"g": b"bytes"} if is_renamed else {}
    async with (
        writing_back(store, tmp_path / "one", clock=clock) as one,
        lake(store, tmp_path / "two", clock=clock, pack="never") as two,
    ):
        await two.write("f", b"bytes")
        await two.unlink("f")
        await two.sync()
        await one.poll()
        clock.advance(10)
        async with one.parts.committer.quiet():
            await one.write("f", b"bytes")
            await until(lambda: "f" in store.objects)
            clock.advance(2 * TTL_S)
            assert await two.names() == ["f"]
            await two.set_xattr("f", "user.x", b"1")
            await (two.rename("f", "g") if is_renamed else two.unlink("f"))
            await two.fs.sync_names()
        await one.sync()
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
            assert await m.tree() == expected
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_same_bytes_that_are_put_again_over_what_replaced_a_renamed_file_are_the_file(tmp_path: Path) -> None:
    """The rename hid them, a node that had not heard of it stored others in their place, and all that was in a
    second."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.write("f", b"first")
        await one.write("g", b"renamed")
        await two.poll()
        assert await one.names() == await two.names() == ["f", "g"]
        clock.advance(TTL_S - 0.5)
        await one.rename("g", "f")
        await rewrite(two, "f", b"OTHER")
        clock.advance(0.6)
        assert await one.read("f") == b"OTHER"
        await rewrite(one, "f", b"first")
        await one.fs.sync_names()
        await two.poll()
        clock.advance(2 * TTL_S)
        for m in (one, two):
            assert await m.tree() == {"f": b"first"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": b"first"}


async def test_same_bytes_that_are_put_again_while_another_node_removes_the_ones_before_stay(tmp_path: Path) -> None:
    """Both nodes remove the file, and have not heard of that when one of them makes it again."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=WINDOW_S) as (one, two):
        await one.write("f", b"bytes")
        await one.sync()
        await two.poll()
        assert await two.names() == ["f"]
        await one.unlink("f")
        await one.fs.sync_names()
        clock.advance(1)
        await two.unlink("f")
        await two.fs.sync_names()
        clock.advance(10)
        await one.write("f", b"bytes")
        await one.fs.sync_names()
        for m in (two, one):
            await m.poll()
        await assert_stays(store, clock, tmp_path, two, one)


@pytest.mark.parametrize("is_told", [True, False])
async def test_same_bytes_that_are_put_again_after_others_while_another_node_removes_the_ones_before_stay(
    tmp_path: Path, is_told: bool
) -> None:
    """No commit of which their writer knows removed them, and one told of them before or none."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=WINDOW_S) as (one, two):
        if is_told:
            await one.write("f", b"before")
            await one.unlink("f")
        await one.write("f", b"bytes")
        await one.fs.sync_names()
        await two.poll()
        assert await two.names() == ["f"]
        clock.advance(10)
        await rewrite(two, "f", b"OTHER")
        await two.fs.sync_names()
        clock.advance(1)
        await one.unlink("f")
        await one.fs.sync_names()
        clock.advance(1)
        await rewrite(two, "f", b"bytes")
        await two.fs.sync_names()
        for m in (one, two):
            await m.poll()
        await assert_stays(store, clock, tmp_path, one, two)


async def test_read_only_mount_leaves_a_renamed_file_that_was_replaced_as_it_is(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await renamed_and_rewritten(one, two)
    commits = [key for key in store.objects if key.startswith(".lakefs/commits/")]
    async with lake(store, tmp_path / "reader", clock=clock, read_only=True) as reader:
        for _ in range(2):
            with pytest.raises(FileError, match="replaced"):
                await reader.read("g")
    assert [key for key in store.objects if key.startswith(".lakefs/commits/")] == commits


@pytest.mark.parametrize("written_before_s", [0.0, 5.0])
async def test_file_that_is_stored_while_its_directory_is_renamed_goes_along(
    tmp_path: Path, written_before_s: float
) -> None:
    """The rename is on its way when the object is replaced, and names the one before. The new name has the new bytes
    when the rename is answered, whenever they were written, and all else keeps its inode. The file can be written on
    under its new name."""
    store, clock = MemoryStore(), Clock()
    renaming = pause_of_commits()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never") as one:
        await one.mkdir("d")
        for name in ("d/f", "d/g"):
            await one.write(name, b"first")
        await one.sync()
        inodes = [(await one.found(name)).inode for name in ("d", "d/f", "d/g")]
        before = store.objects["d/f"]
        handle = await one.open("d/f", os.O_RDWR)
        await one.fs.write(handle, 0, b"second")
        clock.advance(written_before_s)
        async with trio.open_nursery() as nursery:
            store.hook = renaming
            nursery.start_soon(one.rename, "d", "e")
            await trio.to_thread.run_sync(renaming.reached.wait)
            nursery.start_soon(one.fs.fsync, handle)
            await until(lambda: store.objects["d/f"] is not before)
            renaming.resume()
        assert await one.read("e/f") == b"second"
        assert [(await one.found(name)).inode for name in ("e", "e/f", "e/g")] == inodes
        await one.fs.write(handle, 0, b"third!")
        await one.close(handle)
        assert await one.tree() == {"e": None, "e/f": b"third!", "e/g": b"first"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"e": None, "e/f": b"third!", "e/g": b"first"}


@pytest.mark.parametrize("exchanged", [False, True])
async def test_new_file_that_is_stored_while_its_directory_is_renamed_goes_along(
    tmp_path: Path, exchanged: bool
) -> None:
    """The commit of the rename does not name it. It is recorded once that is applied, so the directory keeps its
    inode."""
    store, clock = MemoryStore(), Clock()
    renaming = pause_of_commits()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.mkdir("d")
        await one.write("d/old", b"old")
        if exchanged:
            await one.mkdir("e")
        await one.sync()
        inode = (await one.found("d")).inode
        handle = await one.create("d/new")
        await one.fs.write(handle, 0, b"new")
        async with trio.open_nursery() as nursery:
            store.hook = renaming
            nursery.start_soon(one.rename, "d", "e", RENAME_EXCHANGE if exchanged else 0)
            await reached(renaming.reached)
            nursery.start_soon(one.close, handle)
            await until(lambda: "d/new" in store.objects)
            renaming.resume()
        assert (await one.found("e")).inode == inode
        expected = {"e": None, "e/new": b"new", "e/old": b"old"} | ({"d": None} if exchanged else {})
        assert await one.tree() == expected
        await one.sync()
        clock.advance(2 * TTL_S)
        await two.poll()
        assert await two.tree() == expected


@pytest.mark.parametrize("is_whole", [True, False])
async def test_listing_of_a_directory_that_another_node_renames_meanwhile_is_of_its_old_path(
    tmp_path: Path, is_whole: bool
) -> None:
    """A third node, which has not heard of the rename, has written to the old path when the store answers."""
    store, clock = MemoryStore(), Clock()
    pause = Pause(lambda request: request.what == "list" and request.key.startswith("d/"))
    async with (
        two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two),
        lake(store, tmp_path / "three", clock=clock, pack="never") as three,
    ):
        await one.mkdir("d")
        await one.write("d/f", b"first")
        await one.setattr("d/f", mode=0o600)
        await one.sync()
        for node in (two, three):
            await node.poll()
            assert await node.names("d") == ["f"]
        directory = (await two.found("d")).inode
        clock.advance(TTL_S + 1)
        async with trio.open_nursery() as nursery:
            store.hook = pause
            if is_whole:
                nursery.start_soon(two.fs.namespace.ensure_listed, directory)
            else:
                nursery.start_soon(two.fs.namespace.lookup, directory, b"f")
            await reached(pause.reached)
            store.hook = lambda _request, _when: None
            await one.rename("d", "e")
            await one.sync()
            await rewrite(three, "d/f", b"second")
            await two.poll()
            pause.resume()
        await two.sync()
        await three.poll()
        await until_shown(three, "e/f", b"second")
        for node in (one, two):
            await node.poll()
            assert await node.tree() == {"e": None, "e/f": b"second"}


@pytest.mark.parametrize("is_again", [False, True])
async def test_new_file_that_replaces_one_of_which_its_node_has_not_told_stays(tmp_path: Path, is_again: bool) -> None:
    """Where a file of that name was removed before, and where none was."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        if is_again:
            await one.write("f", b"before")
            await one.sync()
            await one.unlink("f")
            await one.sync()
            await two.poll()
        clock.advance(5)
        assert await two.names() == []
        await one.write("f", b"first")
        await one.setattr("f", mode=0o600)
        await two.write("f", b"second")
        await two.write("g", b"third")
        await two.rename("g", "f")
        await two.sync()
        clock.advance(5)
        await one.sync()
        for node in (one, two):
            await node.poll()
            clock.advance(TTL_S + 1)
            assert await node.tree() == {"f": b"third"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": b"third"}


@pytest.mark.parametrize("is_packed", [False, True])
async def test_file_that_replaces_a_version_of_which_its_node_has_not_told_stays(
    tmp_path: Path, is_packed: bool
) -> None:
    """Who stores it tells at once which version it has replaced, so that a file which replaces it in turn stays when
    the node that had stored that version tells of it."""
    store, clock = MemoryStore(Capabilities(name="memory", put_if_match=True)), Clock()
    async with (
        two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two),
        lake(store, tmp_path / "packing", clock=clock, pack="always") as packing,
    ):
        await (packing if is_packed else one).write("f", b"before")
        for node in (one, two, packing):
            await node.sync()
            await node.poll()
            assert await node.names() == ["f"]
        clock.advance(5)
        for node, data in ((one, b"first"), (two, b"second"), (packing, b"third")):
            await rewrite(node, "f", data)
            clock.advance(0.1)
        for node in (two, one, packing):
            await node.fs.sync_names()
            clock.advance(0.1)
        for node in (one, two, packing):
            await node.poll()
            clock.advance(TTL_S + 1)
            assert await node.tree() == {"f": b"third"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": b"third"}


@pytest.mark.parametrize("until", ["journaled", "told", "deleted"])
async def test_new_file_where_one_was_removed_takes_one_request(tmp_path: Path, until: str) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", delete_after_s=WINDOW_S) as m:
        await m.write("f", b"first")
        await m.fs.sync_names()
        await m.unlink("f")
        if until != "journaled":
            await m.fs.sync_names()
        if until == "deleted":
            clock.advance(WINDOW_S + 1)
            await delete_all_due(m.parts.deletions)
            assert "f" not in store.objects
        before = len(store.requests)
        await m.write("f", b"second")
        asked = [request.what for request in store.requests[before:] if request.key == "f"]
        assert (asked.count("put"), asked.count("head")) == (1, 0)
        await m.fs.sync_names()
        assert await m.tree() == {"f": b"second"}


@pytest.mark.parametrize("size", [7, LARGE])
async def test_new_file_is_stored_where_others_have_deleted_the_object_of_one_that_was_removed(
    tmp_path: Path, size: int
) -> None:
    able = Capabilities(name="memory", put_if_match=True, complete_if_match=True)
    store, clock = MemoryStore(able), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", delete_after_s=WINDOW_S) as m:
        await m.write("f", noise(1, size))
        await m.fs.sync_names()
        await m.unlink("f")
        await m.fs.sync_names()
        store.take("f")
        await m.write("f", noise(2, size))
        await m.fs.sync_names()
        assert await m.tree() == {"f": noise(2, size)}


class Counted(list[Operation]):
    """Operations that count how many of them were read."""

    read = 0

    def __iter__(self) -> Iterator[Operation]:
        for each in super().__iter__():
            self.read += 1
            yield each


async def test_commit_applied_large_record_is_searched_in_steps(tmp_path: Path) -> None:
    """The loop serves requests between two steps, however many names a commit gives to other objects."""
    operations = Counted(Put(f"name {number}", THIS, 0, 1, 0o644, 0, 0, 0) for number in range(8 * NAMES_PER_STEP))
    counts = [0]
    async with lake(MemoryStore(), tmp_path, pack="never") as m:
        await m.write("f", b"second")
        record = Record(writer="0000000a", time=1, objects=[ObjectRef(), ObjectRef("f", "first", 1)])
        m.parts.renamed.commit_applied(replace(record, operations=operations))
        while m.parts.renamed.adopting:
            counts.append(operations.read)
            await trio.lowlevel.checkpoint()
    assert operations.read == len(operations)
    read = [after - before for before, after in pairwise([*counts, operations.read])]
    assert max(read) <= 2 * NAMES_PER_STEP  # the search may come first in one turn and last in the next


async def test_commit_applied_of_other_objects_reads_no_operation(tmp_path: Path) -> None:
    """A node that has not replaced any of a commit's objects need not search its operations, which may be a million."""
    operations = Counted([Put("name", 1, 0, 1, 0o644, 0, 0, 0)])
    async with lake(MemoryStore(), tmp_path, pack="never") as m:
        await m.write("f", b"second")
        record = Record(writer="0000000a", time=1, objects=[ObjectRef(), ObjectRef("other", "first", 1)])
        m.parts.renamed.commit_applied(replace(record, operations=operations))
        await m.parts.renamed.wait_adopted()
    assert not operations.read


async def test_file_written_over_a_renamed_one_stays_where_another_renamed_what_was_there_before(
    tmp_path: Path,
) -> None:
    """Its writer knew of the file that it replaced, as the object's metadata say, and not of the other rename. A node
    reads the file that was there before."""
    store, clock = MemoryStore(), Clock()
    async with (
        lake(store, tmp_path / "one", clock=clock, pack="never") as one,
        lake(store, tmp_path / "two", clock=clock, pack="never") as two,
        lake(store, tmp_path / "reader", clock=clock, pack="never") as reader,
    ):
        await two.write("f", b"first")
        await one.write("other", b"other")
        for m in (one, two):
            await m.sync()
        clock.advance(5)
        with unheard_commits(store), held_fresh(two):
            await one.rename("other", "f")
            clock.advance(1)
            await two.rename("f", "moved")
        clock.advance(5)
        of_writer = {TOKEN_METADATA: "0" * 32, REPLACES_METADATA: store.objects["other"][1].etag}
        written = store.give("f", b"new", of_writer)
        told = Put("f", OWN, 0, written.size, 0o644, 0, 0, clock.now_ns, written.etag)
        clock.advance(1)
        await reader.poll()
        with suppress(FileError):
            await reader.read("moved")
        await reader.parts.renamed.wait_adopted()
        await one.parts.committer.commit(lambda: Change(operations=[told]))
        for m in (reader, two, one):
            await m.poll()
            assert await m.read("f") == b"new"
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.read("f") == b"new"


@pytest.mark.parametrize("at_once", [True, False])
async def test_file_that_another_node_writes_after_its_rename_leaves_nothing_at_its_earlier_name(
    tmp_path: Path, at_once: bool
) -> None:
    """A node that had not heard of the rename has replaced the object there. It hears of the rename, and of the newer
    version under the new name, one after the other or at once."""
    store, clock = MemoryStore(), Clock()
    async with (
        two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two),
        lake(store, tmp_path / "third", clock=clock, pack="never") as third,
    ):
        await one.write("f", b"first")
        await one.sync()
        await two.poll()
        assert await two.names() == ["f"]
        await one.rename("f", "g")
        await one.sync()
        await third.poll()
        assert await third.names() == ["g"]
        await rewrite(two, "f", b"second")
        await rewrite(third, "g", b"third")
        if at_once:
            await third.sync()
        await two.poll()
        await two.parts.renamed.wait_adopted()
        await third.sync()
        await two.poll()
        for m in (one, two, third):
            await m.poll()
            clock.advance(2 * TTL_S)
            await m.tree()
        for m in (one, two, third):
            await shown_by_both(m, m, clock, {"g": b"third"})
        clock.advance(2 * WINDOW_S)
        for m in (one, two, third):
            await m.poll()
            await delete_all_due(m.parts.deletions)
        assert "f" not in store.objects
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"g": b"third"}
