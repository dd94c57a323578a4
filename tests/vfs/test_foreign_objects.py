"""Plain objects that a listing shows in place of bytes that a commit names: which of them are committed."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from lakefs_fuse.commits.archive import commit_key, locate, parse_commit_key, read_record
from lakefs_fuse.commits.record import COMMITS, OWN, Operation, Put, Remove
from lakefs_fuse.errors import CacheError, FileError, Unavailable
from lakefs_fuse.store.client import copy_metadata
from lakefs_fuse.vfs.namespace import foreign_objects
from tests.commits.archives import commit_of
from tests.commits.nodes import NS
from tests.commits.records import record_of
from tests.memory_store import Failures, MemoryStore, Pause, Request, When
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import TTL_S, Clock, held_fresh, lake, two_lakes, unheard_commits
from tests.vfs.writing_back import LARGE, rewrite, until


def commits(store: MemoryStore) -> list[str]:
    return sorted(key for key in store.objects if key.startswith(COMMITS))


def changes(store: MemoryStore) -> list[str]:
    """Paths that commits change, without what they announce, in the order of the commits."""
    found = list[str]()
    for key in commits(store):
        data, named = store.data(key), parse_commit_key(key)
        assert named is not None
        where = locate(data, len(data))
        record = read_record(memoryview(data)[where.offset :][: where.length], where, *named)
        found += [each.path for each in record.operations]
    return found


def head_before_commit(key: str) -> Callable[[Request], bool]:
    """Matches the HEAD of the object's version that is to be committed, after the HEAD of the listing."""
    asked = count(1)
    return lambda request: (request.what, request.key) == ("head", key) and next(asked) == 2


async def test_object_of_another_program_is_committed_and_its_removal_leaves_no_name(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="always") as m:
        await m.write("f", b"packed")
        await m.sync()
        clock.advance(5)
        store.give("f", b"foreign")
        clock.advance(TTL_S + 1)
        assert await m.names() == ["f"] and await m.read("f") == b"foreign"
        await until(lambda: m.commits()["written"] == 2)  # by its writer: else the clock moves on while it is sent
        assert len(commits(store)) == 2
        store.give("f", b"another, which is not committed again")
        clock.advance(TTL_S + 1)
        assert await m.read("f") == b"another, which is not committed again"
        await m.sync()
    assert len(commits(store)) == 2
    del store.objects["f"]
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.names() == []


@pytest.mark.parametrize("fails", ["head", "list", "put"])
async def test_object_that_cannot_be_committed_at_once_is_committed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    monkeypatch.setattr(foreign_objects, "PAUSE_S_FIRST", 0.01)
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="always", retry_timeout_s=0.0) as m:
        await m.write("f", b"packed")
        await m.sync()
        clock.advance(5)
        store.give("f", b"foreign")
        clock.advance(TTL_S + 1)
        heads = count(1)
        failures = {
            "head": Failures(lambda each: (each.what, each.key) == ("head", "f") and next(heads) > 1, Unavailable("")),
            "list": Failures(lambda each: each.what == "list" and each.key.startswith(COMMITS), Unavailable("")),
            "put": Failures(lambda each: each.what == "put", Unavailable("")),
        }
        failing = store.hook = failures[fails]
        assert await m.names() == ["f"] and await m.read("f") == b"foreign"
        await until(lambda: m.commits()["written"] == 2)
        assert not failing.left
    del store.objects["f"]
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.names() == []


async def test_commit_about_own_objects_that_meets_an_unreadable_database_leaves_the_mount_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_lakes(MemoryStore(), tmp_path, pack="always") as (one, two):
        await one.write("f", noise(1, LARGE))
        await one.sync()
        await one.parts.committer.flush_announcements()
        await two.poll()
        await rewrite(two, "f", b"packed")
        await two.sync()
        with monkeypatch.context() as patch:

            def fails(*_: object) -> str:
                raise CacheError("the disk cannot be read")

            patch.setattr(one.parts.deletions, "stored_etag", fails)
            await one.poll()
            await trio.testing.wait_all_tasks_blocked(0.05)
        assert await one.read("f") == b"packed"


async def test_object_that_a_pack_hides_while_it_is_asked_about_is_not_committed(tmp_path: Path) -> None:
    """The pack is later than the object, of which its writer has not heard, and earlier than the commit would be."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await two.write("f", b"packed")
        await two.sync()
        await one.poll()
        assert await one.names() == await two.names() == ["f"]
        clock.advance(5)
        store.give("f", b"foreign")
        clock.advance(TTL_S + 1)
        pause = store.hook = Pause(head_before_commit("f"), "after")
        assert await one.read("f") == b"foreign"
        await reached(pause.reached)
        with held_fresh(two):
            await two.write("f", b"written since")
            await two.sync()
        pause.resume()
        await trio.testing.wait_all_tasks_blocked(0.05)
        for node in (one, two):
            await node.poll()
            assert await node.read("f") == b"written since"
    assert len(commits(store)) == 2


async def test_object_asked_about_while_its_file_is_written_again_does_not_count(tmp_path: Path) -> None:
    """It is gone when the answer comes, and no older than what was written."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="always") as m:
        await m.write("f", b"packed")
        await m.sync()
        assert await m.names() == ["f"]
        clock.advance(TTL_S + 1)
        store.give("f", b"foreign")
        pause = store.hook = Pause(lambda request: (request.what, request.key) == ("head", "f"), "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.names)
            await reached(pause.reached)
            store.take("f")
            with held_fresh(m):
                await rewrite(m, "f", b"packed again")
            made = m.fs.namespace.at("f")
            pause.resume()
        assert made is not None and (await m.found("f")).inode == made.inode
        assert await m.read("f") == b"packed again"


@pytest.mark.parametrize("is_listed", (True, False))
async def test_copy_that_no_commit_names_does_not_count(tmp_path: Path, is_listed: bool) -> None:
    """Nor does one of another key, which other programs copy with its metadata, count as such."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="always") as m:
        await m.write("f", b"packed")
        await m.sync()
        clock.advance(5)
        store.give("f", b"copied", metadata=copy_metadata("f"))
        clock.advance(TTL_S + 1)
        assert (await m.names() == ["f"] if is_listed else True) and await m.read("f") == b"packed"
        await m.sync()
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert (await other.names() == ["f"] if is_listed else True) and await other.read("f") == b"packed"
        store.give("f", b"foreign", metadata=copy_metadata("g"))
        clock.advance(TTL_S + 1)
        assert await m.read("f") == b"foreign"


async def test_copy_that_was_listed_before_the_commit_of_its_file_does_not_count(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.write("f", b"packed")
        await one.sync()
        store.give("f", b"copied", metadata=copy_metadata("f"))
        assert await two.names() == ["f"]
        await two.poll()
        assert await two.read("f") == b"packed"


async def test_object_that_is_removed_while_it_is_asked_about_takes_the_packed_file_along(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always", delete_after_s=300.0) as (one, two):
        await two.write("f", b"packed")
        await two.sync()
        clock.advance(5)
        store.give("f", b"foreign")
        assert await one.names() == ["f"], "without having heard of the packed file"
        heads = count()
        store.hook = pause = Pause(lambda request: request.what == "head" and request.key == "f" and not next(heads))
        clock.advance(TTL_S + 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.names)
            await until(pause.reached.is_set)
            await one.unlink("f")
            await one.fs.sync_names()
            await two.poll()
            pause.resume()
        assert await two.names() == []
        async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
            assert await fresh.names() == []


async def test_bytes_that_were_deleted_and_are_stored_again_beside_a_packed_file_are_the_later_version(
    tmp_path: Path,
) -> None:
    """A commit told of these bytes, and the packed file, of which their writer has not heard, ended what it told."""
    store, clock, data = MemoryStore(), Clock(), noise(1, LARGE)
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, clock=clock, pack="always", delete_after_s=300.0) as (one, two):
        await one.write("f", b"packed")
        await rewrite(one, "f", data)
        await one.fs.sync_names()
        await two.poll()
        assert await two.names() == ["f"]
        del store.objects["f"]
        clock.advance(2 * TTL_S)
        assert await one.names() == await two.names() == []
        await two.write("f", b"packed again")
        clock.advance(1)
        await one.write("f", data)
        await one.fs.sync_names()
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
            assert await m.tree() == {"f": data}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": data}


async def test_object_that_is_deleted_before_it_is_committed_leaves_the_name_as_it_is_here(tmp_path: Path) -> None:
    """This node has forgotten the packed bytes, and went on without the name, which others showed."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="always") as m:
        await m.write("f", b"packed")
        await m.sync()
        clock.advance(5)
        store.give("f", b"foreign")
        clock.advance(TTL_S + 1)

        is_head = head_before_commit("f")

        def delete(request: Request, when: When) -> None:
            if when == "before" and is_head(request):
                store.objects.pop("f", None)

        store.hook = delete
        assert await m.names() == ["f"]
        await until(lambda: m.commits()["written"] == 2)
        clock.advance(TTL_S + 1)
        here = await m.names()
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.names() == here == []


@pytest.mark.parametrize("when", ["before", "after"])
async def test_object_that_a_listing_misses_while_the_store_is_asked_leaves_the_name_as_it_is_here(
    tmp_path: Path, when: When
) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="always") as m:
        await m.write("f", b"packed")
        await m.sync()
        clock.advance(5)
        store.give("f", b"foreign")
        clock.advance(TTL_S + 1)
        store.hook = pause = Pause(head_before_commit("f"), when=when)
        assert await m.names() == ["f"]
        await trio.to_thread.run_sync(pause.reached.wait)
        store.take("f")
        clock.advance(TTL_S + 1)
        assert await m.names() == []
        pause.resume()
        await until(lambda: m.commits()["written"] == 2)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.names() == []


async def test_object_of_another_node_is_not_committed_and_that_node_can_pack_it_again(tmp_path: Path) -> None:
    """Who committed it for the writer did so after the writer's next version, and its name had no bytes then."""
    store, clock = MemoryStore(), Clock()
    async with (
        lake(store, tmp_path / "writer", clock=clock, pack="always") as writer,
        lake(store, tmp_path / "plain", clock=clock, pack="never") as plain,
        lake(store, tmp_path / "reader", clock=clock, pack="never") as reader,
    ):
        await writer.write("f", b"packed")
        await writer.sync()
        for each in (plain, reader):
            await each.poll()
        clock.advance(TTL_S + 1)
        await rewrite(plain, "f", b"plain")
        await plain.setattr("f", mode=0o600)
        await plain.sync()
        there = len(commits(store))
        asked = len(store.requests)
        with unheard_commits(store):
            assert await reader.read("f") == b"plain"
            await until(lambda: any((each.what, each.key) == ("head", "f") for each in store.requests[asked:]))
        await reader.sync()
        assert len(commits(store)) == there
        await writer.poll()
        clock.advance(TTL_S + 1)
        await rewrite(writer, "f", b"packed again")
        await writer.sync()
        await reader.sync()
        await reader.poll()
        assert await reader.read("f") == b"packed again"
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.read("f") == b"packed again"


async def test_object_that_a_rename_had_not_seen_gets_the_new_name(tmp_path: Path) -> None:
    """As what another node writes in place: the rename counts as later, and hides the object at the old key. Who reads
    the file finds out."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never") as m:
        await m.write("old", b"first")
        clock.advance(5)
        assert await m.names() == ["old"]
        store.give("old", b"foreign")
        clock.advance(5)
        await m.rename("old", "new")
    clock.advance(200)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        with pytest.raises(FileError, match="replaced"):
            await other.read("new")
        assert await other.tree() == {"new": b"foreign"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"new": b"foreign"}


async def test_object_that_is_put_after_a_rename_keeps_the_old_name(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never") as m:
        await m.write("old", b"first")
        await m.rename("old", "new")
        clock.advance(5)
        store.give("old", b"foreign")
        clock.advance(200)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        with pytest.raises(FileError, match="replaced"):
            await other.read("new")
        assert await other.names() == ["new", "old"]
        assert await other.read("old") == b"foreign"


async def test_object_that_wins_over_a_commit_unannounced_is_announced_by_its_writer(tmp_path: Path) -> None:
    """When a program deletes it later, the name is gone for all."""
    store, clock = MemoryStore(), Clock()
    async with (
        lake(store, tmp_path / "packing", clock=clock, pack="always") as one,
        lake(store, tmp_path / "plain", clock=clock, pack="never") as two,
    ):
        assert await one.names() == await two.names() == []
        await one.write("f", b"packed")
        await one.sync()
        clock.advance(1)
        await two.write("f", b"plain")
        await two.sync()
        assert len(commits(store)) == 1
        await two.poll()
        await until(lambda: two.commits()["written"] == 1)
        assert await two.read("f") == b"plain"
        await one.poll()
        assert await one.read("f") == b"plain"
        store.take("f")
        for m in (one, two):
            clock.advance(TTL_S + 1)
            await m.poll()
            assert await m.names() == []
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.names() == []


@pytest.mark.parametrize("behind_s", [0.8, 30.8])
async def test_object_of_a_writer_whose_clock_is_behind_counts_by_the_stores_date_for_its_writer_too(
    tmp_path: Path, behind_s: float
) -> None:
    """It has not been listed since: only the writer's clock dates it there."""
    store, clock = MemoryStore(), Clock()
    behind = Clock(clock.now_ns - int(behind_s * 1e9))
    async with (
        lake(store, tmp_path / "plain", clock=behind, pack="never", metadata_ttl_s=3600) as two,
        lake(store, tmp_path / "packing", clock=clock, pack="always", metadata_ttl_s=3600) as one,
    ):
        assert await one.names() == await two.names() == []
        clock.advance(0.3)
        await two.write("f", b"plain")
        await one.write("f", b"packed")
        await one.sync()
        await two.poll()
        assert await two.read("f") == b"plain"
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.read("f") == b"plain"


async def test_object_of_a_renamed_file_does_not_count_over_a_packed_one_for_a_writer_whose_clock_is_behind(
    tmp_path: Path,
) -> None:
    """It is dated in the second of the packed file, and is what the other name means."""
    store, clock = MemoryStore(), Clock()
    behind = Clock(clock.now_ns - 800_000_000)
    expected = {"f": b"packed", "g": b"second"}
    async with (
        lake(store, tmp_path / "plain", clock=behind, pack="never", metadata_ttl_s=3600) as two,
        lake(store, tmp_path / "packing", clock=clock, pack="always", metadata_ttl_s=3600) as one,
    ):
        await two.write("f", b"first")
        await two.sync()
        await one.poll()
        assert await one.names() == await two.names() == ["f"]
        for each in (clock, behind):
            each.advance(5)
        await one.rename("f", "g")
        await rewrite(two, "f", b"second")
        clock.advance(0.3)
        await one.write("f", b"packed")
        await one.sync()
        await two.poll()
        await two.parts.renamed.wait_adopted()
        for m in (two, one, two):
            await m.poll()
            assert await m.tree() == expected
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_object_that_was_adopted_for_another_name_ends_no_file_of_which_its_writer_hears_later(
    tmp_path: Path,
) -> None:
    """The adoption hides it, dated after that file, which it would have replaced by its own date."""
    store, clock = MemoryStore(), Clock()
    ahead = Clock(clock.now_ns + 800_000_000)
    async with (
        lake(store, tmp_path / "plain", clock=ahead, pack="never", metadata_ttl_s=3600) as two,
        lake(store, tmp_path / "packing", clock=clock, pack="always", metadata_ttl_s=3600) as one,
    ):
        await two.write("f", b"first")
        await two.sync()
        await one.poll()
        assert await one.names() == await two.names() == ["f"]
        for each in (clock, ahead):
            each.advance(5)
        await one.rename("f", "g")
        await rewrite(two, "f", b"second")
        ahead.advance(0.3)
        await two.poll()
        await two.parts.renamed.wait_adopted()
        clock.advance(0.3)
        await one.write("f", b"packed")
        await one.sync()
        for m in (two, one, two):
            await m.poll()
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert await m.tree() == {"f": b"packed", "g": b"second"}


async def test_object_that_its_writer_removes_before_it_hears_of_a_packed_file_takes_that_along(tmp_path: Path) -> None:
    """As for a node that had listed the object over the packed file."""
    store, clock = MemoryStore(), Clock()
    async with (
        lake(store, tmp_path / "packing", clock=clock, pack="always") as one,
        lake(store, tmp_path / "plain", clock=clock, pack="never") as two,
        lake(store, tmp_path / "listing", clock=clock) as three,
    ):
        assert await one.names() == await two.names() == []
        await one.write("f", b"packed")
        await one.sync()
        clock.advance(1.3)
        await two.write("f", b"plain")
        await two.sync()
        await three.poll()
        assert await three.read("f") == b"plain"
        await two.unlink("f")
        await two.fs.sync_names()
        await two.poll()
        await until(lambda: len(commits(store)) == 3)
        for m in (one, two, three):
            await m.poll()
            clock.advance(TTL_S + 1)
            assert await m.names() == []
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.names() == []


@pytest.mark.parametrize("is_renamed", [True, False])
async def test_packed_file_that_an_object_had_replaced_ends_with_that_though_the_clock_of_the_removal_is_behind(
    tmp_path: Path, is_renamed: bool
) -> None:
    store, clock = MemoryStore(), Clock()
    behind = Clock(clock.now_ns)
    expected = {"g": noise(1, LARGE)} if is_renamed else {}
    async with (
        lake(store, tmp_path / "one", clock=clock, pack="always") as one,
        lake(store, tmp_path / "two", clock=behind, pack="always") as two,
    ):
        clock.advance(0.5)
        await one.write("f", b"packed")
        clock.advance(0.1)
        await rewrite(one, "f", noise(1, LARGE))
        await one.sync()
        with unheard_commits(store):
            assert await two.names() == ["f"]
        if is_renamed:
            await two.rename("f", "g")
        else:
            await two.unlink("f")
        await two.fs.sync_names()
        before = len(commits(store))
        await one.poll()
        await until(lambda: len(commits(store)) > before)
        for m in (one, two):
            await m.poll()
            clock.advance(TTL_S + 1)
            behind.advance(TTL_S + 1)
            assert await m.tree() == expected
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_object_that_was_replaced_in_place_ends_no_file_that_was_renamed_over_what_replaced_it(
    tmp_path: Path,
) -> None:
    """All within a second, so that the date of the object does not say that it is older than the rename."""
    store, clock = MemoryStore(), Clock()
    async with (
        two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two),
        lake(store, tmp_path / "three", clock=clock, pack="never") as three,
    ):
        for m in (one, two, three):
            assert await m.names() == []
        await three.write("f", b"first")
        await two.write("f", b"second")
        clock.advance(0.1)
        await one.write("f", b"third")
        clock.advance(0.1)
        await one.write("other", b"renamed")
        await one.rename("other", "f")
        await one.fs.sync_names()
        before = changes(store)
        for m in (two, one, three):
            await m.poll()
            await trio.testing.wait_all_tasks_blocked(0.1)
            assert await m.tree() == {"f": b"renamed"}
        assert changes(store) == before


@pytest.mark.parametrize("is_renamed", [False, True])
async def test_bytes_put_in_place_of_what_had_replaced_them_before_their_writer_heard_of_that_are_the_file(
    tmp_path: Path, is_renamed: bool
) -> None:
    """Within two seconds of the commit that names them, so that their date does not say that they are others. Where
    another node has renamed what they replace, they are the file of the new name alone."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with (
        two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two),
        lake(store, tmp_path / "three", clock=clock, pack="never") as three,
    ):
        assert await one.names() == await two.names() == []
        await two.write("f", b"bytes")
        clock.advance(0.1)
        await one.write("f", b"other")
        clock.advance(0.9)
        if is_renamed:
            await one.rename("f", "g")
            await one.fs.sync_names()
        with unheard_commits(store):
            await rewrite(three, "f", b"bytes")
        for m in (three, two, one, three):
            await m.poll()
            await m.parts.renamed.wait_adopted()
            await trio.testing.wait_all_tasks_blocked(0.1)
            clock.advance(TTL_S + 1)
        expected = {"g" if is_renamed else "f": b"bytes"}
        for m in (one, two, three):
            assert await m.tree() == expected
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_object_that_its_writer_sees_replaced_by_a_packed_file_is_not_said_to_be_removed(tmp_path: Path) -> None:
    """Also where a commit comes late that is older than the packed file."""
    store, clock = MemoryStore(), Clock()
    async with (
        lake(store, tmp_path / "packing", clock=clock, pack="always") as one,
        two_lakes(store, tmp_path, clock=clock, pack="never") as (two, three),
    ):
        await one.write("f", b"before")
        await one.sync()
        for m in (one, two, three):
            await m.poll()
        clock.advance(5.3)
        handle = await one.open("f", os.O_RDWR | os.O_TRUNC)
        await one.fs.write(handle, 0, b"packed")
        for m in (three, two):
            await rewrite(m, "f", b"second" if m is two else b"first")
        store.hook = pause = Pause(lambda request: three.parts.committer.writer in request.key)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(three.fs.sync_names)
            await reached(pause.reached)
            clock.advance(0.1)
            await two.fs.sync_names()
            clock.advance(0.1)
            await one.close(handle)
            await one.sync()
            await two.poll()
            pause.resume()
        await two.poll()
        await trio.sleep(0.2)  # it would ask the store, and commit
        for m in (one, two, three):
            await m.poll()
            clock.advance(TTL_S + 1)
            assert await m.tree() == {"f": b"packed"}


async def test_object_of_which_a_commit_told_with_its_date_is_told_of_with_it_again(tmp_path: Path) -> None:
    """Another node heard of what came in between first, and so knows it as replaced."""
    store, clock, writer = MemoryStore(), Clock(), "00000abc"
    store.equal_bytes_have_equal_etags = True
    store.clock, began_ns = clock, clock.now_ns
    etag = store.give("f", b"told").etag
    own = Put("f", OWN, 0, 4, 0o644, 0, 0, 0, hides=etag, dated_s=began_ns // NS)

    def give(time: int, *operations: Operation, files: dict[str, bytes] | None = None) -> None:
        record = replace(record_of(time=time), writer=writer)
        store.give(commit_key(time, writer), commit_of(files or {}, record=record, more=operations))

    async with (
        lake(store, tmp_path / "in order", clock=clock) as one,
        lake(store, tmp_path / "late", clock=clock) as two,
    ):
        clock.advance(0.4)
        give(began_ns + 3, files={"f": b"packed"})
        await two.poll()
        give(began_ns + 1, own)
        give(began_ns + 2, Remove("f"), replace(own, hides="another", dated_s=0))
        await two.poll()
        await one.poll()
        assert await one.names() == ["f"]
        await until(lambda: one.commits()["written"] == 1)
        for m in (one, two):
            clock.advance(TTL_S + 1)
            await m.poll()
            assert await m.tree() == {"f": b"told"}


async def test_object_at_the_key_of_one_that_a_commit_names_is_renamed_while_it_is_written(tmp_path: Path) -> None:
    """A commit has ended it without naming it, before that. Attributes that were set here do not change that."""
    store, clock, writer = MemoryStore(), Clock(), "00000abc"
    store.equal_bytes_have_equal_etags = True
    store.clock, began_ns = clock, clock.now_ns
    told = [Put("f", OWN, 0, 4, 0o644, 0, 0, 0, hides=etag) for etag in (store.give("f", b"here").etag, "another")]
    said: list[Operation] = [told[0], Remove("f", by_date=True), told[1]]
    for time, operation in enumerate(said, began_ns):
        record = replace(record_of(time=time), writer=writer)
        store.give(commit_key(time, writer), commit_of({}, record=record, more=[operation]))
    async with lake(store, tmp_path / "cache", clock=clock, pack="never") as m:
        assert await m.tree() == {"f": b"here"}
        await m.setattr("f", mode=0o600)
        await m.sync()
        clock.advance(TTL_S + 1)
        assert await m.tree() == {"f": b"here"}
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, 0, b"T")
        await m.rename("f", "g")
        await m.close(handle)
        await m.sync()
        clock.advance(TTL_S + 1)
        assert await m.tree() == {"g": b"Tere"}
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"g": b"Tere"}


@pytest.mark.parametrize("path", ["d/f", "d/e/f"])
async def test_object_at_the_key_of_one_that_a_commit_names_keeps_the_directories_above_it(
    tmp_path: Path, path: str
) -> None:
    """No commit made them, and the object was ended before that by a commit that did not know it."""
    store, clock, writer = MemoryStore(), Clock(), "00000abc"
    store.equal_bytes_have_equal_etags = True
    store.clock, began_ns = clock, clock.now_ns
    told = [Put(path, OWN, 0, 4, 0o644, 0, 0, 0, hides=etag) for etag in (store.give(path, b"here").etag, "another")]
    said: list[Operation] = [told[0], Remove(path, by_date=True), told[1]]
    for time, operation in enumerate(said, began_ns):
        record = replace(record_of(time=time), writer=writer)
        store.give(commit_key(time, writer), commit_of({}, record=record, more=[operation]))
    async with lake(store, tmp_path / "cache", clock=clock) as m:
        assert await m.names() == ["d"]
        assert await m.read(path) == b"here"


async def test_directory_that_goes_while_the_store_is_asked_about_an_object_in_it(tmp_path: Path) -> None:
    """The daemon goes on."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="always") as m:
        await m.mkdir("d")
        await m.write("d/f", b"packed")
        await m.sync()
        clock.advance(5)
        store.give("d/f", b"foreign")
        clock.advance(TTL_S + 1)
        store.hook = pause = Pause(head_before_commit("d/f"))
        assert await m.names("d") == ["f"]
        await trio.to_thread.run_sync(pause.reached.wait)
        await m.unlink("d/f")
        await m.rmdir("d")
        pause.resume()
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert await m.names() == []


async def test_removal_of_an_object_before_it_is_committed_ends_the_packed_file_too(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="always") as m:
        await m.write("f", b"packed")
        await m.sync()
        clock.advance(5)
        store.give("f", b"foreign")
        clock.advance(TTL_S + 1)
        store.hook = pause = Pause(head_before_commit("f"))
        assert await m.names() == ["f"]
        await trio.to_thread.run_sync(pause.reached.wait)
        await m.unlink("f")
        await m.sync()
        store.take("f")
        pause.resume()
        assert await m.names() == []
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.names() == []


async def test_removal_of_an_object_that_is_not_committed_leaves_what_another_node_stored(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.write("f", b"packed")
        await one.sync()
        await two.poll()
        clock.advance(5)
        store.give("f", b"foreign")
        clock.advance(TTL_S + 1)
        store.hook = pause = Pause(head_before_commit("f"))
        assert await one.names() == ["f"]
        await trio.to_thread.run_sync(pause.reached.wait)
        await one.unlink("f")
        await two.write("f", noise(1, LARGE))
        await two.sync()
        clock.advance(1)
        await one.sync()
        pause.resume()
        for node in (one, two):
            await node.poll()
            clock.advance(TTL_S + 1)
            assert await node.tree() == {"f": noise(1, LARGE)}


async def test_bytes_that_were_removed_before_and_come_again_end_the_packed_file(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with lake(store, tmp_path / "cache", clock=clock, pack="always") as m:
        for data in (b"foreign", b"another"):
            clock.advance(TTL_S + 1)
            store.give("f", data)
            assert await m.names() == ["f"]
            await m.unlink("f")
            await m.sync()
            store.take("f")
        await m.write("f", b"packed")
        await m.sync()
        clock.advance(10)
        store.give("f", b"foreign")
        clock.advance(TTL_S + 1)
        assert await m.names() == ["f"] and await m.read("f") == b"foreign"
        await until(lambda: store.count("head", "f") > 0)
        await trio.testing.wait_all_tasks_blocked(0.05)
        await m.sync()
        await m.unlink("f")
        await m.sync()
        store.take("f")
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.names() == []


async def test_bytes_that_a_packed_file_hides_and_that_replace_another_object_are_the_file_for_all(
    tmp_path: Path,
) -> None:
    """The object in between is replaced before a commit tells of it, so only the node that listed it knows that the
    bytes are there again."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, clock=clock, pack="always", delete_after_s=1000.0) as (one, two):
        store.give("f", b"foreign")
        assert await one.names() == await two.names() == ["f"]
        await rewrite(one, "f", b"packed")
        await one.fs.sync_names()
        await two.poll()
        clock.advance(TTL_S + 1)
        assert await two.tree() == {"f": b"packed"}
        store.give("f", b"another")
        store.hook = pause = Pause(head_before_commit("f"))
        clock.advance(TTL_S + 1)
        assert await two.names() == ["f"]
        await trio.to_thread.run_sync(pause.reached.wait)
        store.give("f", b"foreign")
        pause.resume()
        clock.advance(TTL_S + 1)
        assert await two.tree() == {"f": b"foreign"}
        await until(lambda: two.commits()["written"] == 1)
        await one.poll()
        clock.advance(TTL_S + 1)
        assert await one.tree() == {"f": b"foreign"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": b"foreign"}
