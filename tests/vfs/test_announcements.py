"""Plain objects that one node stores and another sees: what is announced, and how little that costs."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import trio
import trio.testing
from msgspec.structs import replace

from lakefs_fuse.commits.archive import commit_key, locate, parse_commit_key, read_record
from lakefs_fuse.commits.record import COMMITS, OWN, STORED_MAX, Mkdir, Operation, Put, Record, Remove
from lakefs_fuse.errors import CacheFull, FileError, Unavailable
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.vfs.change_events import ChangeEvents
from lakefs_fuse.vfs.namespace import absent_names, namespace, outdated_names
from tests.commits.archives import commit_of
from tests.commits.records import record_of
from tests.memory_store import Failures, MemoryStore, Pause
from tests.vfs.lakes import NEVER_S, RENAME_EXCHANGE, TTL_S, Clock, Lake, held_fresh, lake, two_lakes
from tests.vfs.writing_back import die, rewrite

SET_NS = 5_000_000_000
SECOND_NS = 1_000_000_000


def commits_of(store: MemoryStore) -> list[str]:
    return sorted(key for key in store.objects if key.startswith(COMMITS) and key.endswith(".zip"))


def stored_in(store: MemoryStore) -> list[list[str]]:
    """What each commit announces."""
    found = []
    for key in commits_of(store):
        data, named = store.data(key), parse_commit_key(key)
        assert named is not None
        where = locate(data, len(data))
        found.append(read_record(memoryview(data)[where.offset :][: where.length], where, *named).stored)
    return found


def asked_since(store: MemoryStore, since: int) -> list[str]:
    """Keys or prefixes of requests since so many, polls left out."""
    return [each.key for each in store.requests[since:] if not each.key.startswith(RESERVED_PREFIX)]


async def announce(one: Lake, *others: Lake) -> None:
    """What a node has stored reaches others with its next commit."""
    await one.parts.committer.flush_announcements()
    for other in others:
        await other.poll()


async def test_object_of_another_node_is_seen_after_a_poll_for_one_small_request(tmp_path: Path) -> None:
    store = MemoryStore()
    for number in range(5):
        store.give(f"d/{number}", b"x")
    async with two_lakes(store, tmp_path) as (one, two):
        assert await two.names("d") == ["0", "1", "2", "3", "4"]
        assert await two.lookup("d/new") is None
        await one.write("d/new", b"new")
        await announce(one, two)
        assert stored_in(store) == [["d/new"]]
        d = await two.found("d")
        assert (d.inode, b"new") in two.changes, "the kernel forgets that there was none"
        before = len(store.requests)
        assert await two.lookup("d/3") is not None
        assert asked_since(store, before) == []
        assert await two.lookup("d/new") is not None
        assert asked_since(store, before) == ["d/new"]
        assert await two.names("d") == ["0", "1", "2", "3", "4", "new"]
        assert asked_since(store, before) == ["d/new"], "nothing else is outdated"
        assert await two.read("d/new") == b"new"


async def test_name_in_a_large_directory_costs_no_listing(tmp_path: Path) -> None:
    store = MemoryStore()
    for number in range(2500):
        store.give(f"d/{number:04}", b"x")
    async with two_lakes(store, tmp_path) as (one, two):
        for node in (one, two):  # all pages, of which a lookup waits for some
            assert len(await node.names("d")) == 2500
        await one.write("d/1000x", b"new")
        await one.write("d/0007", b"replaced")
        await announce(one, two)
        before = len(store.requests)
        names = await two.names("d")
        assert len(names) == 2501
        assert sorted(asked_since(store, before)) == ["d/0007", "d/1000x"]
        assert await two.read("d/0007") == b"replaced"


async def test_many_objects_of_another_node_cost_one_listing(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never") as (one, two):
        await one.mkdir("d")
        await one.write("d/first", b"x")
        await one.sync()
        await announce(one, two)
        assert await two.names("d") == ["first"]
        before = len(commits_of(store))
        for number in range(20):
            await one.write(f"d/{number}", b"x")
        await announce(one, two)
        assert len(commits_of(store)) - before <= 2, "one, or two where a second passed meanwhile"
        since = len(store.requests)
        for number in range(20):
            assert await two.lookup(f"d/{number}") is not None
        assert len(asked_since(store, since)) == 1


async def test_file_replaced_by_another_node_is_read_anew(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        await one.write("f", b"before")
        assert await two.read("f") == b"before"
        before = await two.found("f")
        handle = await one.open("f", 2)
        await one.fs.write(handle, 0, b"after!")
        await one.close(handle)
        assert await two.read("f") == b"before", "its listing counts"
        await announce(one, two)
        assert await two.read("f") == b"after!"
        assert (await two.found("f")).inode != before.inode


async def test_object_below_directories_that_are_not_known_is_found(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("a/x", b"x")
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        assert await two.names("a") == ["x"]
        assert await two.lookup("a/b") is None
        store.give("a/b/c/y", b"y")  # so that the first node needs no commit to write there
        assert await one.lookup("a/b/c/y") is not None
        await one.write("a/b/c/z", b"z")
        await announce(one, two)
        assert await two.read("a/b/c/z") == b"z"


async def test_commit_with_operations_names_objects_stored_before(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        assert await two.names() == []
        await one.write("shard", b"bytes")
        await one.symlink("marker", "elsewhere")
        await one.fs.sync_names()
        assert stored_in(store) == [["shard"]]
        await two.poll()
        assert await two.names() == ["marker", "shard"], "who sees the marker sees what was stored before"


async def test_what_commits_name_is_not_announced(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, pack="always") as m:
        await m.write("packed", b"packed")
        await m.sync()
        await m.parts.committer.flush_announcements()
        assert stored_in(store) == [[]]
    async with lake(store, tmp_path) as m:
        await m.write("of its own", b"x")
        await m.unlink("of its own")
        await m.sync()
        await m.write("of its own", b"again")  # hidden but for a commit that names it
        await m.sync()
        named = sum(len(names) for names in stored_in(store))
        assert named <= 1, "the first version, at most"


async def test_idle_mount_writes_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        await m.write("f", b"x")
        with trio.fail_after(10):
            while stored_in(store) != [["f"]]:
                await trio.sleep(0.05)
        puts = store.count("put")
        assert await m.read("f") == b"x"
        await trio.sleep(1.5)
        assert store.count("put") == puts


async def test_announcement_that_fails_delays_nobody_and_is_repeated(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        assert await two.names() == []
        store.hook = Failures(lambda each: each.key.startswith(COMMITS), Unavailable("no"), count=999)
        await one.write("f", b"x")
        with suppress(Unavailable):
            await one.parts.committer.flush_announcements()
        await one.write("g", b"x")
        await one.fs.make_durable()
        assert (stored_in(store), await two.names()) == ([], [])
        store.hook = lambda _request, _when: None
        await one.symlink("link", "to")
        await one.fs.sync_names()
        assert stored_in(store) == [["f", "g"]]
        await two.poll()
        assert await two.names() == ["f", "g", "link"]


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_what_a_killed_daemon_did_not_announce_the_next_one_does(tmp_path: Path, durability: str) -> None:
    """Others would find it by a LIST, an hour later if no other program puts objects there."""
    store = MemoryStore()
    async with lake(store, tmp_path / "two") as two:
        assert await two.names() == []
        store.hook = Failures(
            lambda each: each.what == "put" and each.key.startswith(COMMITS), Unavailable("no"), count=999
        )
        async with lake(store, tmp_path / "one", durability=durability, pack="never") as one:
            await one.write("f", b"x")
            await one.fs.make_durable()
            dead = die(tmp_path / "one", tmp_path / "dead")
        store.hook = lambda _request, _when: None
        assert stored_in(store) == []
        for _ in range(2):  # and not once more
            async with lake(store, dead, durability=durability) as one:
                await announce(one, two)
                assert (stored_in(store), await two.names()) == ([["f"]], ["f"])


async def test_object_stored_while_another_node_lists_is_not_overlooked(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("d/x", b"x")
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        d = await two.found("d")
        assert await two.names("d") == ["x"]
        clock.advance(TTL_S + 1)
        assert await one.names("d") == ["x"]
        store.hook = pause = Pause(lambda each: each.what == "list" and each.key == "d/", when="after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.names, "d")
            await trio.to_thread.run_sync(pause.reached.wait)
            await one.write("d/y", b"y")
            await announce(one, two)
            pause.resume()
        assert two.fs.namespace.directory_fresh_s(d.inode) == 0
        assert await two.lookup("d/y") is not None
        assert await two.names("d") == ["x", "y"]


async def test_flat_listing_from_before_an_announcement_does_not_answer(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    for key in ("a/x", "b/x", "c/x"):
        store.give(key, b"x")
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        for path in "abc":
            assert await two.names(path) == ["x"]
        clock.advance(TTL_S + 1)
        assert await two.names("a") == await two.names("b") == ["x"]
        await one.write("c/y", b"y")
        await announce(one, two)
        assert await two.names("c") == ["x", "y"]


async def test_announcement_that_nobody_asked_about_outlives_a_restart(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "one") as one:
        async with lake(store, tmp_path / "two") as two:
            assert await two.names() == []
            await one.write("f", b"x")
            await announce(one, two)
        async with lake(store, tmp_path / "two") as two:
            assert await two.names() == ["f"]


async def test_announcements_that_the_disk_refuses_to_date_are_seen_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never", foreign_s=3600.0) as (one, two):
        assert await two.names() == []
        await one.write("first", b"x")
        with monkeypatch.context() as patch:
            refuse(patch, Tree, "date_listing")
            await announce(one, two)
        assert await two.lookup("first") is not None
        await one.write("second", b"x")
        await announce(one, two)
        assert await two.lookup("second") is not None
        assert await two.names() == ["first", "second"]


def refuse(patch: pytest.MonkeyPatch, cls: type, name: str) -> None:
    """The disk is full for the calls of a method."""

    def fails(*_: object) -> None:
        raise CacheFull("the disk is full")

    patch.setattr(cls, name, fails)


def test_commit_reaches_the_listeners_behind_one_that_fails() -> None:
    def fails(_: Record) -> None:
        raise CacheFull("the disk is full")

    events, told = ChangeEvents(), list[Record]()
    events.commit_applied += [fails, told.append]
    record = record_of()
    events.notify_commit_applied(record)
    assert told == [record]


async def test_more_names_than_are_kept_outdate_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outdated_names, "NAMES_MAX", 3)
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never") as (one, two):
        assert await two.names() == []
        for number in range(3):
            await one.write(f"{number}", b"x")
        await announce(one, two)
        assert two.fs.namespace.name_fresh_s(ROOT_INODE, b"other") > 0, "only what is announced is asked for"
        for number in range(3, 5):
            await one.write(f"{number}", b"x")
        await announce(one, two)
        assert two.fs.namespace.name_fresh_s(ROOT_INODE, b"other") == 0
        since = len(store.requests)
        assert [await two.lookup(f"{number}") is not None for number in range(5)] == [True] * 5
        assert asked_since(store, since) == [""], "one LIST of the directory answers for all"


async def test_more_directories_than_are_kept_outdate_the_one_announced_longest_ago(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outdated_names, "DIRECTORIES_MAX", 2)
    store = MemoryStore()
    for directory in "abc":
        store.give(f"{directory}/f", b"x")
    async with two_lakes(store, tmp_path, pack="never") as (one, two):
        inodes = []
        for directory in "abc":
            assert await two.names(directory) == ["f"]
            inodes.append((await two.found(directory)).inode)
        for directory in "abc":
            await one.write(f"{directory}/new", b"x")
            await announce(one, two)
        assert [two.fs.namespace.name_fresh_s(inode, b"other") > 0 for inode in inodes] == [False, True, True]
        for directory in "abc":
            assert await two.names(directory) == ["f", "new"]


async def test_more_objects_than_a_commit_names_take_several(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        for number in range(STORED_MAX + 1):
            m.parts.committer.announce_stored(str(number))
        await m.parts.committer.flush_announcements()
        assert [len(names) for names in stored_in(store)] == [STORED_MAX, 1]


async def test_wait_for_an_object_of_another_node_ends_with_a_poll(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        assert await two.names() == []
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.fs.wait_path, "f", "", 10.0)
            await trio.sleep(0.1)
            await one.write("f", b"x")
            await announce(one, two)
        assert await two.lookup("f") is not None


async def test_object_stored_where_another_node_renames_a_file_stays_without_a_listing(tmp_path: Path) -> None:
    """The rename moves no row over what was stored later by a node that had not heard of it."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.write("x", b"renamed")
        await one.rename("x", "a")
        await two.poll()
        assert await two.names() == ["a"]
        clock.advance(5)
        await one.rename("a", "b")
        clock.advance(5)
        await two.write("b", b"stored later")
        await two.poll()
        assert await two.read("b") == b"stored later"
        await announce(two, one)
        assert await one.read("b") == b"stored later"
        assert await one.names() == await two.names() == ["b"]


async def test_object_named_while_its_removal_is_pending_is_seen_without_a_listing(tmp_path: Path) -> None:
    """One node removes the version that it knows, unaware that another has replaced it and told of that."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, delete_after_s=1e6) as (one, two):
        await one.write("f", b"first")
        await one.fs.sync_names()
        await one.unlink("f")
        await one.fs.sync_names()
        await one.write("f", b"second")
        await one.fs.sync_names()
        await two.poll()
        assert await one.names() == await two.names() == ["f"]
        clock.advance(5)
        handle = await two.open("f", os.O_RDWR | os.O_TRUNC)
        await two.fs.write(handle, 0, b"by another node")
        await two.close(handle)
        await two.fs.sync_names()
        clock.advance(1)
        await one.unlink("f")
        await one.poll()
        await one.fs.sync_names()
        await two.poll()
        assert await two.read("f") == b"by another node"
        assert await one.read("f") == b"by another node"


async def test_object_stored_again_long_after_its_removal_stays_without_a_listing(tmp_path: Path) -> None:
    """No commit tells of it: so it is not what the version that another node removed had replaced."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, delete_after_s=1e6) as (one, two):
        await two.write("f", b"first")
        await announce(two, one)
        assert await one.names() == await two.names() == ["f"]
        await one.unlink("f")
        await one.fs.sync_names()
        clock.advance(3)
        await rewrite(two, "f", b"second")
        await two.poll()
        assert await two.read("f") == b"second"
        await announce(two, one)
        assert await one.read("f") == b"second"


async def test_object_stored_in_a_directory_that_another_node_renames_over_meanwhile_is_seen(tmp_path: Path) -> None:
    """The listing of the renamed directory says nothing of what was announced in the other. The node that renames has
    not heard of that: its commit is dated later, and sent earlier."""
    store, clock = MemoryStore(), Clock()
    ahead = Clock(clock.now_ns + SECOND_NS)
    async with (
        lake(store, tmp_path / "two", clock=ahead) as two,
        lake(store, tmp_path / "one", clock=clock, pack="never") as one,
        lake(store, tmp_path / "reader", clock=clock) as reader,
    ):
        for path in ("from", "to"):
            await one.mkdir(path)
        await one.sync()
        for m in (two, reader):
            await m.poll()
            assert [await m.names(path) for path in ("from", "to")] == [[], []]
        await two.rename("from", "to")
        await one.write("to/file", b"bytes")
        await announce(one, reader)
        assert await reader.names() == ["to"]
        assert await reader.names("to") == ["file"]


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("is_moved", [True, False])
async def test_object_stored_in_a_directory_that_another_node_takes_away_meanwhile_is_seen(
    tmp_path: Path, is_moved: bool, is_listed: bool
) -> None:
    """Its name was announced in the directory that is elsewhere by then, or gone."""
    store, clock = MemoryStore(), Clock()
    ahead = Clock(clock.now_ns + SECOND_NS)
    async with (
        lake(store, tmp_path / "two", clock=ahead) as two,
        lake(store, tmp_path / "one", clock=clock) as one,
        lake(store, tmp_path / "reader", clock=clock) as reader,
    ):
        await one.mkdir("a")
        await one.mkdir("a/b")
        await one.sync()
        for m in (two, reader):
            await m.poll()
            assert await m.names("a") == ["b"]
        if is_listed:
            assert await reader.names("a/b") == []
        if is_moved:
            await two.rename("a/b", "c")
        else:
            await two.rmdir("a/b")
        await two.fs.sync_names()
        await one.write("a/b/file", b"bytes")
        await announce(one, reader)
        assert await reader.names("a") == ["b"]
        assert await reader.names("a/b") == ["file"]


async def test_object_stored_in_a_directory_whose_only_known_name_another_node_takes_away_is_seen(
    tmp_path: Path,
) -> None:
    """Its name was announced in a directory that was never listed, and that went with that name."""
    store, clock = MemoryStore(), Clock()

    def give(number: int, *operations: Operation, stored: Sequence[str] = (), files: Sequence[str] = ()) -> None:
        record = replace(record_of(time=clock.now_ns + number), stored=list(stored))
        packed = dict.fromkeys(files, b"packed")
        store.give(commit_key(record.time, record.writer), commit_of(packed, record=record, more=operations))

    async with lake(store, tmp_path, clock=clock) as reader:
        assert await reader.names() == []
        give(1, files=["d/e/told", "f"])
        await reader.poll()
        store.give("d/e/file", b"bytes")
        give(2, stored=["d/e/file"])
        await reader.poll()
        give(3, Remove("d/e/told", by_date=True))
        await reader.poll()
        assert await reader.names() == ["d", "f"]
        assert await reader.names("d/e") == ["file"]


def give_commit(store: MemoryStore, time: int, *operations: Operation, stored: Sequence[str] = ()) -> None:
    record = replace(record_of(time=time), stored=list(stored))
    store.give(commit_key(time, record.writer), commit_of({}, record=record, more=operations))


async def test_object_is_asked_for_again_when_another_one_of_its_name_turns_out_to_be_removed(tmp_path: Path) -> None:
    """That one had replaced it, and belongs to another name; its commit is the earlier one."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, metadata_ttl_s=NEVER_S) as m:
        etag = store.give("f", b"here").etag
        assert await m.names() == ["f"]
        give_commit(store, clock.now_ns + 2, Put("f", OWN, 0, 4, 0o644, 0, 0, 0, hides=etag))
        await m.poll()
        give_commit(store, clock.now_ns + 1, Remove("f", hides=store.give("f", b"there").etag))
        await m.poll()
        assert await m.names() == []


async def test_directories_of_a_name_whose_object_was_replaced_and_removed_are_gone_with_it(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, metadata_ttl_s=NEVER_S) as m:
        assert await m.names() == []
        give_commit(store, clock.now_ns + 1, Remove("d/e/f", hides=store.give("d/e/f", b"there").etag))
        give_commit(store, clock.now_ns + 2, Put("d/e/f", OWN, 0, 4, 0o644, 0, 0, 0, hides="another"))
        await m.poll()
        entry = m.parts.namespace.tree.child(ROOT_INODE, b"d")
        assert entry is not None and await m.read_directory(entry.inode) == []
        assert await m.names() == []


@pytest.mark.parametrize("path", ["d", "d/e"])
async def test_directory_removed_with_the_object_that_replaced_one_of_this_node_is_gone(
    tmp_path: Path, path: str
) -> None:
    """This node commits its object later, and learns only from a LIST that another one had replaced it."""
    store, clock = MemoryStore(), Clock()
    store.clock, store.equal_bytes_have_equal_etags = clock, True
    async with lake(store, tmp_path, clock=clock, pack="never", metadata_ttl_s=NEVER_S) as m:
        paths = list(dict.fromkeys([path, "d"]))
        give_commit(store, clock.now_ns, *(Mkdir(each, 0o755, 0, 0, 0) for each in reversed(paths)))
        await m.poll()
        assert await m.tree() == dict.fromkeys(paths)
        await m.write(f"{path}/f", b"here")
        await m.unlink(f"{path}/f")
        await m.sync()
        clock.advance(5)
        await m.write(f"{path}/f", b"here")  # a commit has to name these bytes, because they were removed before
        removal = Remove(f"{path}/f", hides=store.give(f"{path}/f", b"there").etag)
        directories = [Remove(each, directory=True) for each in paths]
        give_commit(store, clock.now_ns + 1, removal, *directories, stored=[f"{path}/g"])
        clock.advance(1)
        await m.sync()
        await m.poll()
        assert await m.names(path) == [] and await m.lookup(path) is None
        assert await m.names() == []


async def test_directory_that_another_node_renamed_is_gone_once_what_was_stored_in_it_has_the_new_name(
    tmp_path: Path,
) -> None:
    """Its writer had not heard of the rename, and lists the directory above before it commits where the object is."""
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never", metadata_ttl_s=NEVER_S) as (writer, mover):
        await writer.mkdir("d")
        await writer.write("d/file", b"first")
        await writer.sync()
        await mover.poll()
        assert await mover.tree() == {"d": None, "d/file": b"first"}
        await mover.rename("d", "e")
        await mover.sync()
        with held_fresh(writer):
            await writer.write("d/file", b"second")
        heads = count()
        store.hook = pause = Pause(lambda each: (each.what, each.key) == ("head", "d/file") and next(heads) == 1)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(writer.poll)
            await trio.to_thread.run_sync(pause.reached.wait)
            await writer.parts.namespace.list_directory(ROOT_INODE)
            assert await writer.names() == ["d", "e"]
            pause.resume()
        with trio.fail_after(10):
            await writer.parts.renamed.wait_adopted()
        assert await writer.names() == ["e"] and await writer.read("e/file") == b"second"


@asynccontextmanager
async def three_nodes(store: MemoryStore, tmp_path: Path, *paths: str) -> AsyncIterator[tuple[Lake, Lake, Lake]]:
    """One that stores files, one that renames directories, and one that only reads. They list these directories, and
    nothing again unless it is announced; the commits of the second are dated a second later than they are sent."""
    clock = Clock()
    ahead = Clock(clock.now_ns + SECOND_NS)
    async with (
        lake(store, tmp_path / "mover", clock=ahead, metadata_ttl_s=NEVER_S) as mover,
        lake(store, tmp_path / "writer", clock=clock, pack="never", metadata_ttl_s=NEVER_S) as writer,
        lake(store, tmp_path / "reader", clock=clock, metadata_ttl_s=NEVER_S) as reader,
    ):
        for path in paths:
            await writer.mkdir(path)
        await writer.sync()
        for m in (mover, reader):
            await m.poll()
            for path in ("", *paths):
                await m.names(path)
        yield writer, mover, reader


@pytest.mark.parametrize("paths", [["d/file"], ["d/sub/file"], ["d/file", "d/sub/file"]])
async def test_objects_stored_in_a_directory_that_is_away_are_seen_when_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, paths: Sequence[str]
) -> None:
    """They were announced while no directory was at that path, also to the node that renames: its user, or the kernel,
    had found the path free before. More directories than one are outdated in steps."""
    monkeypatch.setattr(namespace, "OUTDATED_AT_ONCE", 1)
    store = MemoryStore()
    async with three_nodes(store, tmp_path, "d", "d/sub") as (writer, mover, reader):
        await mover.rename("d", "e")
        await reader.poll()
        for path in paths:
            await writer.write(path, b"bytes")
        await announce(writer, mover, reader)
        with held_fresh(mover):
            await mover.rename("e", "d")
        await reader.poll()
        await trio.testing.wait_all_tasks_blocked()
        for m in (mover, reader):
            assert await m.tree() == {"d": None, "d/sub": None, **dict.fromkeys(paths, b"bytes")}


async def test_object_stored_in_a_directory_that_is_exchanged_meanwhile_is_seen(tmp_path: Path) -> None:
    """Its name was announced in the directory that is elsewhere by then, and not in the one that has come there."""
    store = MemoryStore()
    async with three_nodes(store, tmp_path, "d", "e") as (writer, mover, reader):
        await mover.rename("d", "e", RENAME_EXCHANGE)
        await writer.write("d/file", b"bytes")
        await announce(writer, mover, reader)
        for m in (mover, reader):
            assert await m.tree() == {"d": None, "e": None, "d/file": b"bytes"}


@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE])
async def test_object_announced_in_a_directory_while_it_is_renamed_here_is_seen(tmp_path: Path, flags: int) -> None:
    """The rename has listed the directory before, and so does not know of it."""
    store = MemoryStore()
    async with three_nodes(store, tmp_path, "d", *["e"][: bool(flags)]) as (writer, mover, _):
        store.hook = pause = Pause(lambda each: each.what == "list" and each.key == "d/", when="after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mover.rename, "d", "e", flags)
            await trio.to_thread.run_sync(pause.reached.wait)
            await writer.write("d/file", b"bytes")
            await announce(writer, mover)
            pause.resume()
        assert await mover.tree() == {"d": None, "e": None, "d/file": b"bytes"}


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("how", ["its directory moves", "it moves", "it is removed"])
@pytest.mark.parametrize("is_listed", [True, False])
async def test_object_announced_under_the_name_of_a_file_written_here_is_seen_once_that_is_gone(
    tmp_path: Path, how: str, is_new: bool, is_listed: bool
) -> None:
    """The listing of the directory shows the object, but its name there is that of the file."""
    store = MemoryStore()
    async with three_nodes(store, tmp_path, "d") as (writer, mover, _):
        if not is_new:
            await writer.write("d/file", b"first")
            await announce(writer, mover)
        handle = await mover.create("d/file")
        await mover.fs.write(handle, 0, b"written")
        await writer.write("d/file", b"bytes")
        await announce(writer, mover)
        if is_listed:
            assert await mover.names("d") == ["file"]
        if how == "it is removed":
            await mover.unlink("d/file")
            elsewhere: dict[str, object] = {}
        elif how == "it moves":
            await mover.rename("d/file", "e")
            elsewhere = {"e": b"written"}
        else:
            await mover.rename("d", "e")
            elsewhere = {"e": None, "e/file": b"written"}
        await mover.close(handle)
        assert await mover.tree() == {"d": None, "d/file": b"bytes"} | elsewhere


@pytest.mark.parametrize("is_listed", [True, False])
@pytest.mark.parametrize("is_here", [True, False])
async def test_object_announced_under_the_name_of_a_directory_is_seen_once_that_is_gone(
    tmp_path: Path, is_here: bool, is_listed: bool
) -> None:
    """Its writer had not heard of the directory. The object is at its key, also for a node that has asked for it."""
    async with three_nodes(MemoryStore(), tmp_path, "d") as (writer, mover, other):
        await mover.mkdir("d/name")
        with held_fresh(writer):
            await writer.write("d/name", b"bytes")
        await mover.sync()
        await announce(writer, mover, other)
        if is_listed:
            assert [await each.names("d") for each in (mover, other)] == [["name"], ["name"]]
        await mover.rename("d/name", "e")
        await mover.sync()
        await other.poll()
        await writer.poll()
        assert await (mover if is_here else other).tree() == {"d": None, "d/name": b"bytes", "e": None}
        assert await writer.tree() == {"d": None, "d/name": b"bytes", "e": None}


async def test_object_announced_in_a_directory_while_it_is_made_again_here_is_seen(tmp_path: Path) -> None:
    """The node that stores it has not heard that the directory was removed. The LIST that finds the name free began
    before, so a directory that was just made is not known to be empty."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", foreign_s=3600.0) as (one, two):
        await one.mkdir("d")
        await one.sync()
        await two.poll()
        assert await two.names() == ["d"]
        await two.rmdir("d")
        await two.sync()
        clock.advance(3601)
        store.hook = pause = Pause(lambda each: each.what == "list" and each.key == "", when="after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.mkdir, "d")
            await trio.to_thread.run_sync(pause.reached.wait)
            with held_fresh(one):
                await one.write("d/file", b"bytes")
            await announce(one, two)
            pause.resume()
        assert await two.tree() == {"d": None, "d/file": b"bytes"}


async def test_directory_in_which_an_object_is_announced_while_it_is_removed_here_stays(tmp_path: Path) -> None:
    """The request that finds it empty began before. `ESTALE` has the kernel look the name up again, as in a rename."""
    store = MemoryStore()
    async with three_nodes(store, tmp_path, "d") as (writer, mover, _):
        await writer.write("d/gone", b"bytes")
        await announce(writer)
        await writer.unlink("d/gone")
        await writer.sync()
        await mover.poll()
        store.hook = pause = Pause(lambda each: each.what == "list" and each.key == "d/gone", when="after")

        async def remove() -> None:
            with pytest.raises(FileError) as caught:
                await mover.rmdir("d")
            assert caught.value.errno == errno.ESTALE

        async with trio.open_nursery() as nursery:
            nursery.start_soon(remove)
            await trio.to_thread.run_sync(pause.reached.wait)
            await writer.write("d/file", b"bytes")
            await announce(writer, mover)
            pause.resume()
        with pytest.raises(FileError) as caught:
            await mover.rmdir("d")
        assert caught.value.errno == errno.ENOTEMPTY
        assert await mover.tree() == {"d": None, "d/file": b"bytes"}


@pytest.mark.parametrize("above", ["d", "d/e"])
async def test_directory_whose_last_names_two_nodes_move_away_goes_on_both(tmp_path: Path, above: str) -> None:
    """No commit makes it, as neither knows that its own was the last name; a listing had shown it."""
    store, clock = MemoryStore(), Clock()
    store.give(f"{above}/a", b"a")
    store.give(f"{above}/b", b"b")
    async with two_lakes(store, tmp_path, clock=clock, metadata_ttl_s=NEVER_S) as (one, two):
        for each in (one, two):
            assert await each.names() == ["d"]
            assert await each.names(above) == ["a", "b"]
        await one.rename(f"{above}/a", "a")
        await two.rename(f"{above}/b", "b")
        await one.poll()
        await two.poll()
        assert await one.tree() == await two.tree() == {"a": b"a", "b": b"b"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"a": b"a", "b": b"b"}


@pytest.mark.parametrize("pack", ["always", "never"])
async def test_directory_has_another_mtime_when_another_node_adds_or_removes_a_name(tmp_path: Path, pack: str) -> None:
    """As programs that watch a directory expect, such as Python's finders of modules. What is written in place is no
    such change, and an mtime that was set stays until the next one."""
    store, clock = MemoryStore(), Clock()
    store.clock = clock
    async with two_lakes(store, tmp_path, clock=clock, pack=pack) as (one, two):
        for path in "de":
            await one.mkdir(path)
        await one.write("d/a", b"a")
        await one.sync()
        await two.poll()

        async def moved(change: Callable[[], Awaitable[object]]) -> str:
            """The directories whose mtime on the other node, which lists them, is that of the change or later."""
            for path in "de":
                await two.names(path)
            clock.advance(10)
            now_ns = store.date_ns
            await change()
            await one.sync()
            await two.poll()
            clock.advance(TTL_S + 1)
            for path in "de":
                await two.names(path)
            return "".join([path for path in "de" if (await two.found(path)).mtime_ns >= now_ns])

        async def write_and_set() -> None:
            await one.write("d/c", b"c")
            await one.setattr("d", mtime_ns=SET_NS)

        assert await moved(lambda: one.write("d/b", b"b")) == "d"
        assert await moved(lambda: rewrite(one, "d/b", b"c")) == ""
        assert await moved(lambda: one.rename("d/b", "e/b")) == "de"
        assert await moved(lambda: one.unlink("e/b")) == "e"
        assert await moved(write_and_set) == ""
        assert (await two.found("d")).mtime_ns == SET_NS
        assert await moved(lambda: one.mkdir("d/f")) == "d"
        known = [(await two.found(path)).mtime_ns for path in "de"]
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert [(await fresh.found(path)).mtime_ns for path in "de"] == known


async def refreshed(m: Lake, path: str) -> list[bytes]:
    """Names of a directory, sorted, of which the kernel was notified when a refresh of it returns."""
    directory, before = (await m.found(path)).inode, len(m.changes)
    await m.fs.refresh(path)
    return sorted(name for parent, name in m.changes[before:] if parent == directory)


@pytest.mark.parametrize(("names_max", "announced"), [(1, [b"a"]), (0, [b"a", b"b", b"first"])])
async def test_first_listing_announces_names_that_were_absent_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names_max: int, announced: list[bytes]
) -> None:
    """And no others; unless too many were asked for to remember each: then all that came since."""
    monkeypatch.setattr(absent_names, "NAMES_MAX", names_max)
    store = MemoryStore()
    store.give("d/first")
    async with lake(store, tmp_path) as m:
        assert await m.lookup("d/a") is None
        for name in ("a", "b"):
            store.give(f"d/{name}")
        assert await refreshed(m, "d") == announced
        store.give("d/c")
        assert await refreshed(m, "d") == [b"c"]


async def test_listing_after_one_that_was_dropped_announces_names_that_came_since(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("d/first")
    async with lake(store, tmp_path) as m:
        assert await m.names("d") == ["first"]
        assert await m.lookup("d/a") is None
        tree, batch = m.fs.namespace.tree, Batch()
        tree.forget_listing(batch, (await m.found("d")).inode)
        tree.database.commit(batch)
        store.give("d/a")
        assert await refreshed(m, "d") == [b"a"]


async def test_name_that_was_absent_is_announced_when_a_refresh_asks_for_it(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("d/first")
    async with lake(store, tmp_path) as m:
        assert await m.lookup("d/a") is None
        store.give("d/a")
        d, before = await m.found("d"), len(m.changes)
        await m.fs.refresh("d/a")
        assert m.changes[before:] == [(d.inode, b"a")]


async def test_first_listing_announces_nothing_that_was_made_here(tmp_path: Path) -> None:
    """Else the kernel would drop what it has just been told."""
    store = MemoryStore()
    store.give("d/first")
    async with lake(store, tmp_path) as m:
        assert await m.lookup("d/a") is None
        await m.mkdir("d/a")
        assert await refreshed(m, "d") == []


async def test_first_listing_without_earlier_questions_announces_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    for name in ("a", "b", "c"):
        store.give(f"d/{name}")
    async with lake(store, tmp_path) as m:
        assert await refreshed(m, "d") == []


async def test_object_whose_earlier_version_is_removed_during_a_listing_is_seen_before_the_next_one(
    tmp_path: Path,
) -> None:
    """Another node has set attributes of that version, so that it counted as the newer one until it was listed again,
    and removed it; nobody announces the object to its own writer."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.write("f", b"first")
        assert await two.names() == await one.names() == ["f"]
        await two.setattr("f", mode=0o600)
        await one.write("f", b"second")
        await two.sync()
        await one.poll()
        await two.unlink("f")
        store.hook = pause = Pause(lambda each: each.what == "list" and each.key == "", when="after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.names)
            await trio.to_thread.run_sync(pause.reached.wait)
            store.hook = lambda _request, _when: None
            await two.sync()
            await one.poll()
            pause.resume()
        assert await one.names() == ["f"] and await one.read("f") == b"second"


@pytest.mark.parametrize("path", ["d", "d/sub"])
async def test_directory_is_gone_in_which_a_file_was_stored_late_that_is_elsewhere_by_now(
    tmp_path: Path, path: str
) -> None:
    """A node lists the object before its writer hears that the directory was renamed, and looks into the directory only
    when the commit of the writer has said that the object belongs to the new name."""
    store = MemoryStore()
    async with three_nodes(store, tmp_path, *dict.fromkeys(["d", path])) as (writer, mover, reader):
        await writer.write(f"{path}/f", b"first")
        await announce(writer, mover, reader)
        assert await mover.names(path) == await reader.names(path) == ["f"]
        await mover.rename("d", "e")
        await reader.poll()
        await writer.write(f"{path}/f", b"second")
        assert await reader.lookup(path) is not None
        await announce(writer, mover, reader)
        await writer.poll()
        await writer.parts.renamed.wait_adopted()
        await writer.sync()
        await mover.poll()
        await reader.poll()
        if path != "d":
            assert await reader.names("d") == ["sub"]
        assert await reader.names(path) == []
        assert await reader.lookup(path) is None
        assert await reader.tree() == await mover.tree() == await writer.tree()
        assert await reader.names() == ["e"] and await reader.read(f"e{path[1:]}/f") == b"second"


@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("is_listed", [True, False])
async def test_object_that_replaced_bytes_stored_again_is_seen_before_the_next_listing(
    tmp_path: Path, is_told: bool, is_listed: bool
) -> None:
    """The commit that tells of these bytes comes after the object that has replaced them, of which it knows nothing."""
    store, clock = MemoryStore(), Clock()
    store.clock, store.equal_bytes_have_equal_etags = clock, True
    async with (
        two_lakes(store, tmp_path, clock=clock, pack="never", metadata_ttl_s=NEVER_S) as (one, two),
        lake(store, tmp_path / "reader", clock=clock, metadata_ttl_s=NEVER_S) as reader,
    ):
        await one.write("g" if is_told else "f", b"renamed")
        if is_told:
            await one.rename("g", "f")
        for data in (b"first", b"second"):
            await rewrite(one, "f", data)
            await one.sync()
            await announce(one, two, reader)
            assert await two.names() == await reader.names() == ["f"]
        await rewrite(one, "f", b"second")
        clock.advance(0.4)
        await rewrite(two, "f", b"the third")
        await two.sync()
        await announce(two, reader)
        if is_listed:
            assert await reader.read("f") == b"the third"
        clock.advance(1)
        await one.sync()
        for m in (one, two, reader):
            await m.poll()
            assert (await m.found("f")).size == len(b"the third")
            assert await m.read("f") == b"the third"


async def test_object_that_replaced_bytes_stored_again_is_seen_by_its_writer_whose_clock_is_wrong(
    tmp_path: Path,
) -> None:
    """It has not listed its object, and so knows only when it wrote that by its own clock."""
    store, clock = MemoryStore(), Clock()
    behind = Clock(clock.now_ns - 30 * SECOND_NS)
    store.clock, store.equal_bytes_have_equal_etags = clock, True
    async with (
        lake(store, tmp_path / "one", clock=clock, pack="never", metadata_ttl_s=NEVER_S) as one,
        lake(store, tmp_path / "two", clock=behind, pack="never", metadata_ttl_s=NEVER_S) as two,
    ):
        await one.write("f", b"first")
        await announce(one, two)
        assert await two.names() == ["f"]
        await rewrite(one, "f", b"first")
        clock.advance(0.4)
        behind.advance(0.4)
        await rewrite(two, "f", b"second")
        await one.sync()
        await two.poll()
        assert (await two.found("f")).size == len(b"second")
        assert await two.read("f") == b"second"


@pytest.mark.parametrize("how", ["renamed", "removed", "replaced"])
@pytest.mark.parametrize("is_seen", [True, False])
async def test_object_whose_commit_comes_after_the_removal_of_the_one_that_replaced_it_is_gone(
    tmp_path: Path, how: str, is_seen: bool
) -> None:
    """It has bytes that the name had before, so the node that replaced it could not tell it from those. With
    ``is_seen`` another node asks for the name between the two commits."""
    store, clock = MemoryStore(), Clock()
    store.clock, store.equal_bytes_have_equal_etags = clock, True
    async with (
        two_lakes(store, tmp_path, clock=clock, pack="never", metadata_ttl_s=NEVER_S) as (one, two),
        lake(store, tmp_path / "reader", clock=clock, metadata_ttl_s=NEVER_S) as reader,
    ):
        await one.mkdir("d")
        await one.write("d/f", b"first")
        await one.symlink("link", "target")
        await one.sync()
        await announce(one, two, reader)
        for m in (one, two, reader):
            assert await m.names("d") == ["f"]
        clock.advance(60)
        await rewrite(one, "d/f", b"first")
        await rewrite(two, "d/f", b"second")
        clock.advance(0.4)
        if how == "removed":
            await two.unlink("d/f")
        else:
            await two.rename(*(("d/f", "e") if how == "renamed" else ("link", "d/f")))
        await two.sync()
        if is_seen:
            await reader.poll()
            assert await reader.names("d") == ["f"] * (how == "replaced")
        clock.advance(0.6)
        await one.sync()
        for m in (one, two, reader):
            await m.poll()
        shown = [await m.names("d") for m in (one, two, reader)]
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert [await fresh.names("d")] * 3 == shown
    assert how == "replaced" or not any(shown)


async def test_file_that_its_remover_makes_again_costs_no_request(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.clock = clock
    async with two_lakes(store, tmp_path, clock=clock, pack="never", metadata_ttl_s=NEVER_S) as (one, two):
        await one.mkdir("d")
        await one.write("d/f", b"first")
        await announce(one, two)
        assert await two.names("d") == ["f"]
        await one.unlink("d/f")
        await one.sync()
        await two.poll()
        assert await two.names("d") == []
        clock.advance(1)
        await one.write("d/f", b"second")
        await one.sync()
        await announce(one, two)
        before = len(store.requests)
        assert (await two.found("d/f")).size == len(b"second")
        assert asked_since(store, before) == []
