"""Open files over a store that fails, answers late, or is changed by others: what is promised, and what is kept."""

from __future__ import annotations

import errno
import os
import random
import stat
from pathlib import Path
from typing import NoReturn

import pytest
import trio

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.record import Remove
from lakefs_fuse.config import Rule
from lakefs_fuse.errors import AccessDenied, CacheError, FileError, LakeError, Unavailable
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.store import client
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.vfs.namespace import attributes
from lakefs_fuse.vfs.ops import handles
from lakefs_fuse.vfs.ops import unlink as unlinking
from lakefs_fuse.vfs.ops.attributes import AttributeChange, file_type_and_mode
from tests.memory_store import Failures, MemoryStore, Pause, Request
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import NEVER_S, NS, RENAME_EXCHANGE, TTL_S, Clock, Lake, entries_of, lake, two_lakes
from tests.vfs.writing_back import writing_back

KIB = 1024
LARGE = 300 * KIB
UNREAD = 5 << 20
"""Of a file so large OPEN fetches nothing."""
S3FS = {"mode": "33152", "uid": "7", "gid": "8", "mtime": "1600000000.25"}


def is_put(request: Request) -> bool:
    return request.what in ("put", "complete_multipart")


async def durable(m: Lake) -> None:
    """Until nothing is on its way to the store, and nothing is kept for it."""
    with trio.fail_after(10):
        while m.fs.unfinished() or len(m.parts.files):
            await trio.sleep(0.002)


async def test_close_is_durable(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        for name, size in (("empty", 0), ("small", 100), ("large", LARGE)):
            await m.write(name, noise(name, size))
            assert store.data(name) == noise(name, size)
            assert await m.read(name) == noise(name, size)
        assert store.count("get") == 0  # what was just written is read back locally
        assert m.fs.unfinished() == []
    async with lake(store, tmp_path / "other") as m:
        assert await m.read("large") == noise("large", LARGE)


async def test_nothing_is_visible_before(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        handle = await m.create("new")
        await m.fs.write(handle, 0, noise(1, LARGE))
        await trio.sleep(0.05)
        assert store.objects == {}
        assert await m.read("new") == noise(1, LARGE)  # here it is
        (unfinished,) = m.fs.unfinished()
        assert (unfinished.path, unfinished.bytes, unfinished.state) == ("new", LARGE, "writing")
        await m.fs.fsync(handle)
        assert store.data("new") == noise(1, LARGE)
        await m.close(handle)
        assert store.count("complete_multipart") == 1


@pytest.mark.parametrize("size", [100, LARGE])
async def test_a_failed_close_keeps_the_bytes(tmp_path: Path, size: int) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise(2, size))
        store.hook = Failures(is_put, AccessDenied("no"), count=2)
        with pytest.raises(AccessDenied):
            await m.close(handle)
        (unfinished,) = m.fs.unfinished()
        assert (unfinished.path, unfinished.state, unfinished.error) == ("file", "failed", "no")
        clock.advance(TTL_S + 1)
        assert await m.names() == ["file"]
        assert await m.read("file") == noise(2, size)
        with pytest.raises(AccessDenied):
            await m.fs.make_durable("file")
        sent = len(store.parts_sent())
        await m.fs.make_durable()
        assert store.data("file") == noise(2, size)
        assert len(store.parts_sent()) == sent
        assert m.fs.unfinished() == []
        assert len(m.parts.files) == 0


async def test_a_failed_file_may_be_written_on(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, b"one")
        store.hook = Failures(is_put, AccessDenied("no"))
        with pytest.raises(AccessDenied):
            await m.close(handle)
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 3, b"two")
        await m.close(handle)
        assert store.data("file") == b"onetwo"


async def test_make_durable_tells_the_first_error_and_tries_all(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        for name in ("a", "b", "c"):
            await m.fs.write(await m.create(name), 0, name.encode())
        store.hook = Failures(lambda request: request.key == "b", AccessDenied("no"))
        with pytest.raises(AccessDenied):
            await m.fs.make_durable()
        assert entries_of(store) == ["a", "c"]
        await m.fs.make_durable("b")
        assert entries_of(store) == ["a", "b", "c"]


# -- exclusive creation and other writers


@pytest.mark.parametrize("size", [3, LARGE])
async def test_exclusive_creation_is_exclusive_across_nodes(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "1") as one, lake(store, tmp_path / "2") as two:
        first = await one.create("lock", os.O_RDWR | os.O_EXCL)
        second = await two.create("lock", os.O_RDWR | os.O_EXCL)
        await one.fs.write(first, 0, noise(1, size))
        await two.fs.write(second, 0, noise(2, size))
        await one.close(first)
        with pytest.raises(FileError) as caught:
            await two.close(second)
        assert caught.value.errno == errno.EEXIST
        assert store.data("lock") == noise(1, size)
        for each in (one, two):
            assert await each.read("lock") == store.data("lock") == noise(1, size)


@pytest.mark.parametrize("size", [3, LARGE])
async def test_open_file_whose_name_was_taken_cannot_be_renamed_and_leaves_the_name_to_the_other(
    tmp_path: Path, size: int
) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        handle = await m.create("lock", os.O_RDWR | os.O_EXCL)
        await m.fs.write(handle, 0, noise(1, size))
        store.give("lock", b"theirs")
        with pytest.raises(FileError) as caught:
            await m.fs.flush(handle)
        assert caught.value.errno == errno.EEXIST
        with pytest.raises(FileError) as caught:
            await m.rename("lock", "mine")
        assert caught.value.errno == errno.EEXIST
        await m.fs.release(handle)
        await m.fs.make_durable()
        assert store.data("lock") == b"theirs"
        clock.advance(TTL_S + 1)
        assert await m.tree() == {"lock": b"theirs"}
        assert [(each.path, each.state) for each in m.fs.unfinished()] == [("lock", "orphan")]


async def test_file_created_exclusively_replaces_what_another_node_put_under_its_next_name(tmp_path: Path) -> None:
    """A rename replaces what is there; O_EXCL was for the name before."""
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        handle = await one.create("lock", os.O_RDWR | os.O_EXCL)
        await one.fs.write(handle, 0, b"mine")
        assert await one.names() == ["lock"]
        await two.write("next", b"theirs")
        await one.rename("lock", "next")
        await one.close(handle)
        await one.sync()
    async with lake(store, tmp_path / "fresh") as fresh:
        assert await fresh.tree() == {"next": b"mine"}


async def test_renamed_file_whose_base_was_replaced_leaves_the_key_to_the_other(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("old", noise(1, LARGE))
    async with lake(store, tmp_path, clock=clock) as m:
        handle = await m.open("old", os.O_RDWR)
        await m.fs.write(handle, 0, noise(2, LARGE // 2))
        store.give("old", b"theirs")
        with pytest.raises(LakeError) as caught:
            await m.close(handle)
        assert caught.value.errno == errno.ESTALE
        await m.rename("old", "mine")
        await m.names()  # perhaps of a LIST that began before the rename
        clock.advance(TTL_S + 1)
        assert await m.names() == ["mine", "old"]
        assert await m.read("old") == b"theirs"
        assert not store.uploads
        await m.unlink("mine")


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize("size", [3, LARGE])
async def test_exclusive_creation_takes_the_name_of_an_object_that_counts_as_removed(
    tmp_path: Path, size: int, durability: str
) -> None:
    """Another program put it there before the removal of a renamed file, which names no object but is the later one."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never", durability=durability) as m:
        await m.write("a", b"before")
        await m.fs.make_durable()  # else it is stored under its new name
        await m.rename("a", "lock")
        await m.fs.make_durable()
        clock.advance(5)
        store.give("lock", b"theirs")
        clock.advance(5)
        await m.unlink("lock")
        await m.fs.make_durable()
        handle = await m.create("lock", os.O_RDWR | os.O_EXCL)
        await m.fs.write(handle, 0, noise(1, size))
        await m.close(handle)
        await m.fs.make_durable()
        assert store.data("lock") == noise(1, size)
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"lock": noise(1, size)}


async def test_exclusive_creation_asks_the_store(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        assert await m.names() == []
        store.give("lock", b"theirs")
        with pytest.raises(FileError) as caught:
            await m.create("lock", os.O_RDWR | os.O_EXCL)
        assert caught.value.errno == errno.EEXIST
        assert await m.read("lock") == b"theirs"


EXCLUSIVE = os.O_RDWR | os.O_EXCL


async def exclusive_creation_costs(m: Lake, store: MemoryStore, count: int = 20) -> tuple[int, int]:
    """HEADs and LISTs of creating and closing files in directories that are known."""
    await m.mkdir("d")
    assert await m.names() == ["d"]
    heads, lists = store.count("head"), store.count("list")
    for number in range(count):
        await m.close(await m.create(f"d/{number}", EXCLUSIVE))
    return store.count("head") - heads, store.count("list") - lists


async def test_exclusive_creation_costs_one_head(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        assert await exclusive_creation_costs(m, store) == (20, 0)


async def test_exclusive_creation_under_writeback_asks_nobody(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, delay_s=NEVER_S) as m:
        assert await exclusive_creation_costs(m, store) == (0, 0)
        with pytest.raises(FileError) as caught:
            await m.create("d/7", EXCLUSIVE)
        assert caught.value.errno == errno.EEXIST


@pytest.mark.parametrize(("durability", "heads"), [("close", 0), ("writeback", 20)])
async def test_rule_says_who_is_asked_for_exclusive_creation(tmp_path: Path, durability: str, heads: int) -> None:
    store = MemoryStore()
    who = "store" if heads else "cache"
    rules = (Rule(path="**", durability=durability, exclusive_create=who),)
    async with lake(store, tmp_path, rules=rules) as m:
        assert await exclusive_creation_costs(m, store) == (heads, 0)


async def test_exclusive_creation_in_an_unknown_directory_asks_once(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("d/other", b"")
    async with lake(store, tmp_path) as m:
        assert await m.names() == ["d"]
        heads, lists = store.count("head"), store.count("list")
        await m.close(await m.create("d/lock", EXCLUSIVE))
        assert (store.count("head") - heads, store.count("list") - lists) == (0, 1)


async def test_exclusive_creation_where_the_object_of_a_removed_file_still_lies(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, delete_after_s=300.0) as m:
        await m.write("lock", b"first")
        await m.unlink("lock")
        assert store.data("lock") == b"first"
        assert await m.names() == []
        lists = store.count("list")
        handle = await m.create("lock", EXCLUSIVE)
        assert store.count("list") == lists
        await m.fs.write(handle, 0, b"second")
        await m.close(handle)
        assert await m.read("lock") == b"second"


async def test_exclusive_creation_while_the_store_is_away_relies_on_what_is_known(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, rules=(Rule(path="**", durability="writeback", exclusive_create="store"),)) as m:
        assert await m.names() == []
        store.hook = Failures(lambda request: request.what in ("head", "list"), Unavailable("away"), count=10_000)
        await m.close(await m.create("lock", EXCLUSIVE))
        with pytest.raises(FileError) as caught:
            await m.create("lock", EXCLUSIVE)
        assert caught.value.errno == errno.EEXIST
        store.hook = lambda _request, _when: None
        await m.fs.make_durable()
        assert store.data("lock") == b""


async def test_appending_and_closing_costs_one_put_each(tmp_path: Path) -> None:
    """Also in a directory that was never listed."""
    store = MemoryStore()
    store.give("d/other", b"")
    async with lake(store, tmp_path) as m:
        await m.write("d/log", b"")
        before = len(store.requests)
        for number in range(10):
            assert await m.lookup("d/log") is not None
            handle = await m.open("d/log", os.O_RDWR | os.O_APPEND)
            await m.fs.write(handle, number, b"x")
            await m.close(handle)
        assert [request.what for request in store.requests[before:]] == ["put"] * 10
        assert store.data("d/log") == b"x" * 10


async def test_file_that_is_synced_often_is_named_once_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handles, "FSYNCS_OF_A_DATABASE", 5)
    async with lake(MemoryStore(), tmp_path) as m:
        handle = await m.create("db.sqlite")
        for number in range(12):
            await m.fs.write(handle, number, b"x")
            await m.fs.fsync(handle)
        await m.close(handle)
    said = [record.message for record in caplog.records if "live database" in record.message]
    assert len(said) == 1
    assert said[0].startswith("db.sqlite was synced 5 times")


async def test_the_last_writer_wins(tmp_path: Path) -> None:
    """Theirs came while ours was open: ours replaces it, and this node shows what it wrote."""
    store, clock = MemoryStore(), Clock()
    store.give("file", b"old")
    async with lake(store, tmp_path, clock=clock) as m:
        handle = await m.open("file", os.O_RDWR | os.O_TRUNC)
        store.give("file", b"theirs")
        clock.advance(TTL_S + 1)
        await m.names()
        await m.fs.write(handle, 0, b"ours")
        await m.close(handle)
        assert store.data("file") == b"ours"
        assert await m.read("file") == b"ours"


async def test_a_handle_whose_inode_is_not_the_names_any_more(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("file", b"old")
    async with lake(store, tmp_path, clock=clock) as m:
        handle = await m.open("file", os.O_RDWR)
        store.give("file", b"theirs")
        clock.advance(TTL_S + 1)
        assert await m.read("file") == b"theirs"
        await m.fs.setattr(m.fs.handle(handle).file.entry.inode, AttributeChange(size=0), handle)
        await m.fs.write(handle, 0, b"ours")
        await m.close(handle)
        assert store.data("file") == b"ours"
        assert await m.read("file") == b"ours"


async def test_two_handles_are_one_file(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        one = await m.create("file")
        await m.fs.write(one, 0, b"one")
        two = await m.open("file", os.O_RDWR)
        await m.fs.write(two, 3, b"two")
        assert await m.read_handle(one) == b"onetwo"
        await m.close(one)
        assert store.data("file") == b"onetwo"
        await m.fs.write(two, 6, b"three")
        assert store.data("file") == b"onetwo"
        await m.close(two)
        assert store.data("file") == b"onetwothree"


async def test_written_while_it_is_published(tmp_path: Path) -> None:
    """A write that comes during a PUT waits for it, and is published by its own close."""
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        one = await m.create("file")
        two = await m.open("file", os.O_RDWR)
        await m.fs.write(one, 0, b"first")
        store.hook = pause = Pause(is_put)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.close, one)
            await reached(pause.reached)
            nursery.start_soon(m.fs.write, two, 0, b"again")
            await trio.sleep(0.01)
            pause.resume()
        assert store.data("file") == b"first"
        await m.close(two)
        assert store.data("file") == b"again"
        assert m.fs.unfinished() == []


async def test_closed_by_nobody_a_file_is_published_all_the_same(tmp_path: Path) -> None:
    """A release without a flush, as of a mapping that outlives its file."""
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, b"mapped")
        await m.fs.release(handle)
        await durable(m)
        assert store.data("file") == b"mapped"


# -- deletion


@pytest.mark.parametrize("size", [100, LARGE, UNREAD])
async def test_deleted_while_open(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    store.give("file", noise(3, size))
    async with lake(store, tmp_path) as m:
        reader, writer = await m.open("file"), await m.open("file", os.O_RDWR)
        await m.unlink("file")
        assert await m.names() == []
        await m.sync()
        assert entries_of(store) == []
        assert await m.read_handle(reader) == noise(3, size)
        await m.fs.write(writer, 50, b"changed")
        expected = noise(3, size)[:50] + b"changed" + noise(3, size)[57:]
        assert await m.read_handle(reader) == expected
        await m.write("file", b"another")
        await m.close(writer)
        assert await m.read_handle(reader) == expected
        await m.close(reader)
        await m.sync()
        assert store.data("file") == b"another"
        assert store.uploads == {}
        assert m.fs.unfinished() == []
    assert list((tmp_path / "staging").iterdir()) == []


@pytest.mark.parametrize("why", ["larger than is kept", "the store is away"])
async def test_deleted_while_open_without_its_bytes_here_fails_to_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, why: str
) -> None:
    """The deletion goes on; the log tells of bytes that should have been kept."""
    store = MemoryStore()
    store.give("file", noise(3, UNREAD))
    async with lake(store, tmp_path, retry_timeout_s=0) as m:
        reader = await m.open("file")
        if why == "the store is away":
            store.hook = Failures(lambda request: request.what == "get", Unavailable("away"), count=1000)
        else:
            monkeypatch.setattr(unlinking, "KEPT_BYTES_MAX", UNREAD - 1)
        await m.unlink("file")
        store.hook = lambda _request, _when: None
        await m.sync()
        assert entries_of(store) == []
        with pytest.raises(FileError) as caught:
            await m.read_handle(reader)
        assert caught.value.errno == errno.ESTALE
        await m.close(reader)
    warned = [record for record in caplog.records if "is deleted while open, and could not be kept" in record.message]
    assert len(warned) == (why == "the store is away")


def test_unlinked_inodes_beyond_their_bound_forget_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlinking, "INODES_MAX", 2)
    inodes = unlinking.UnlinkedInodes()
    for inode in (5, 6, 5, 7):
        inodes.put(Entry(ROOT_INODE, inode, b"name", inode))
    assert list(inodes) == [5, 7]


async def test_deleted_while_it_is_written(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise(4, LARGE))
        await m.unlink("file")
        await m.fs.write(handle, LARGE, noise(5, LARGE))
        assert await m.read_handle(handle) == noise(4, LARGE) + noise(5, LARGE)
        await m.close(handle)
        assert store.objects == {}
        assert store.uploads == {}
        assert await m.lookup("file") is None


async def test_deleted_while_it_is_published(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, b"x")
        store.hook = pause = Pause(is_put)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.flush, handle)
            await reached(pause.reached)
            nursery.start_soon(m.unlink, "file")
            await trio.sleep(0.01)
            pause.resume()
        assert await m.names() == []
        await m.close(handle)
        await m.sync()
        assert entries_of(store) == []


async def test_a_deletion_that_the_journal_refused_changed_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is written after it is still published."""
    store = MemoryStore()
    store.give("file", b"old")
    async with lake(store, tmp_path) as m:
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 0, b"new")

        def full(change: object, batch: object = None) -> None:
            raise CacheError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(m.parts.committer, "enqueue", full)
            with pytest.raises(CacheError):
                await m.unlink("file")
        assert await m.names() == ["file"]
        await m.close(handle)
        assert store.data("file") == b"new"
        await m.unlink("file")
        await m.sync()
        assert entries_of(store) == []


async def test_a_deletion_that_the_store_does_not_take_yet_is_not_forgotten(tmp_path: Path) -> None:
    """Here the name is gone at once; the commit, and then the object's deletion, are tried until they work."""
    store = MemoryStore()
    store.give("file", b"old")
    async with lake(store, tmp_path, retry_timeout_s=0) as m:
        await m.names()
        store.hook = Failures(is_put, Unavailable("away"), count=2)
        await m.unlink("file")
        assert await m.names() == []
        for _ in range(2):
            with pytest.raises(Unavailable):
                await m.fs.sync_names()
        assert (m.commits()["operations_waiting"], m.commits()["failures"]) == (1, 2)
        assert await m.names() == []
        store.hook = Failures(lambda request: request.what == "delete", Unavailable("away"))
        await m.sync()
        assert entries_of(store) == []
        assert m.commits()["operations_waiting"] == 0


async def test_deleting_what_failed_to_publish_and_did(tmp_path: Path) -> None:
    """The answer was lost: the object is there, although this node never knew it."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, retry_timeout_s=0) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, b"x")
        store.hook = Failures(is_put, Unavailable("lost"), when="after")
        with pytest.raises(Unavailable):
            await m.close(handle)
        assert "file" in store.objects
        await m.unlink("file")
        await m.sync()
        assert entries_of(store) == []
        clock.advance(TTL_S + 1)
        assert await m.names() == []


@pytest.mark.parametrize("has_version", [False, True])
@pytest.mark.parametrize("change", ["unlink", "replace", "rename", "exchange"])
async def test_object_of_an_attempt_without_answer_is_not_shown_once_its_name_changed(
    tmp_path: Path, change: str, has_version: bool
) -> None:
    """Another node would show it, at least until it is deleted."""
    store, clock = MemoryStore(), Clock()
    store.clock = clock
    async with lake(store, tmp_path / "cache", clock=clock, retry_timeout_s=0, delete_after_s=1e6, pack="never") as m:
        await m.write("other", b"other")
        if has_version:
            await m.write("file", b"before")
        await m.sync()
        clock.advance(30)
        handle = await (m.open("file", os.O_WRONLY | os.O_TRUNC) if has_version else m.create("file"))
        await m.fs.write(handle, 0, b"now")
        store.hook = Failures(is_put, Unavailable("lost"), when="after")
        with pytest.raises(Unavailable):
            await m.close(handle)
        assert store.data("file") == b"now"
        await {
            "unlink": lambda: m.unlink("file"),
            "replace": lambda: m.rename("other", "file"),
            "rename": lambda: m.rename("file", "moved"),
            "exchange": lambda: m.rename("file", "other", RENAME_EXCHANGE),
        }[change]()
        await m.fs.sync_names()
        expected = {
            "unlink": {"other": b"other"},
            "replace": {"file": b"other"},
            "rename": {"other": b"other", "moved": b"now"},
            "exchange": {"file": b"other", "other": b"now"},
        }
        async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
            assert {name: await fresh.read(name) for name in await fresh.names()} == expected[change]


async def test_object_of_an_attempt_without_answer_goes_where_its_file_was_renamed_while_the_store_was_away(
    tmp_path: Path,
) -> None:
    store, clock = MemoryStore(), Clock()
    store.clock = clock
    async with lake(store, tmp_path / "cache", clock=clock, retry_timeout_s=0, delete_after_s=1e6, pack="never") as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, b"now")
        store.hook = Failures(is_put, Unavailable("lost"), when="after")
        with pytest.raises(Unavailable):
            await m.fs.fsync(handle)
        store.hook = Failures(lambda request: request.what == "head", Unavailable("away"), count=1000)
        await m.rename("file", "moved")
        store.hook = lambda _request, _when: None
        await m.close(handle)
        await m.fs.sync_names()
        async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
            assert {name: await fresh.read(name) for name in await fresh.names()} == {"moved": b"now"}


@pytest.mark.parametrize("size", [100, LARGE])
async def test_close_whose_answer_was_lost_leaves_the_version_that_replaced_it(tmp_path: Path, size: int) -> None:
    """Another node read what was stored, and replaced it: both nodes have its version, and no commit says otherwise."""
    store = MemoryStore(Capabilities(name="memory", put_if_match=True, complete_if_match=True))
    replaced, mine, theirs = trio.Event(), noise(1, size), noise(2, size)
    async with two_lakes(store, tmp_path, retry_timeout_s=20.0) as (one, two), trio.open_nursery() as nursery:
        await one.write("file", b"before")
        await one.setattr("file", mode=stat.S_IFREG | 0o600)  # commits name the file from here on
        await one.sync()
        await two.poll()

        def lose(request: Request, when: str) -> None:
            if is_put(request) and request.key == "file" and when == "after":
                store.hook = lambda _request, _when: None
                trio.from_thread.run_sync(nursery.start_soon, replace)
                trio.from_thread.run(replaced.wait)
                raise Unavailable("lost")

        async def replace() -> None:
            assert await two.read("file") == mine
            handle = await two.open("file", os.O_WRONLY | os.O_TRUNC)
            await two.fs.write(handle, 0, theirs)
            await two.close(handle)
            await two.sync()
            replaced.set()

        handle = await one.open("file", os.O_WRONLY | os.O_TRUNC)
        await one.fs.write(handle, 0, mine)
        store.hook = lose
        await one.close(handle)
        assert store.data("file") == theirs
        await one.sync()
        for m in (one, two):
            await m.poll()
            assert await m.read("file") == theirs
        assert one.fs.unfinished() == []
    async with lake(store, tmp_path / "three") as three:
        assert await three.read("file") == theirs


async def test_close_whose_answer_was_lost_leaves_a_name_removed_whose_newer_version_was(tmp_path: Path) -> None:
    """Another node replaced what was stored, and one that knew of neither removed the name: the object is there."""
    store = MemoryStore(Capabilities(name="memory", put_if_match=True, complete_if_match=True))
    removed = trio.Event()
    lakes = two_lakes(store, tmp_path, retry_timeout_s=20.0, delete_after_s=1e6, metadata_ttl_s=0.0, pack="never")
    async with lakes as (one, two), trio.open_nursery() as nursery:
        await one.write("file", b"before")
        await one.setattr("file", mode=stat.S_IFREG | 0o600)  # commits name the file from here on
        await one.sync()
        await two.poll()

        def lose(request: Request, when: str) -> None:
            if is_put(request) and request.key == "file" and when == "after":
                store.hook = lambda _request, _when: None
                trio.from_thread.run_sync(nursery.start_soon, replace_and_remove)
                trio.from_thread.run(removed.wait)
                raise Unavailable("lost")

        async def replace_and_remove() -> None:
            handle = await two.open("file", os.O_WRONLY | os.O_TRUNC)
            await two.fs.write(handle, 0, b"theirs")
            await two.close(handle)
            await two.sync()
            await two.parts.committer.commit(Change(operations=[Remove("file", by_date=True)]))
            await one.poll()
            removed.set()

        handle = await one.open("file", os.O_WRONLY | os.O_TRUNC)
        await one.fs.write(handle, 0, b"mine")
        store.hook = lose
        await one.close(handle)
        assert store.data("file") == b"theirs"
        for m in (one, two):
            await m.poll()
            assert await m.names() == []
    async with lake(store, tmp_path / "three") as three:
        assert await three.names() == []


async def test_an_upload_that_could_not_be_aborted_is_aborted_by_the_next_mount(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, retry_timeout_s=0) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise(6, LARGE))
        with trio.fail_after(10):
            while not store.parts_sent():
                await trio.sleep(0.002)
        await m.unlink("file")
        store.hook = Failures(lambda request: request.what == "abort_multipart", Unavailable("away"))
        await m.close(handle)
        assert len(store.uploads) == 1
    async with lake(store, tmp_path) as m:
        assert store.uploads == {}
        assert m.fs.unfinished() == []


# -- attributes


async def test_attributes_of_others_survive_a_write(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("small", b"x", S3FS)
    store.give("large", noise(7, LARGE), S3FS)
    async with lake(store, tmp_path) as m:
        for name in ("small", "large"):
            handle = await m.open(name, os.O_RDWR)
            await m.fs.write(handle, 0, b"y")
            await m.close(handle)
            kept = store.metadata(name)
            assert (kept["mode"], kept["uid"], kept["gid"]) == ("33152", "7", "8")
        entry = await m.fs.getattr((await m.found("large")).inode)
        assert (file_type_and_mode(entry, m.fs.config), entry.uid, entry.gid) == (33152, 7, 8)


@pytest.mark.parametrize("size", [1, LARGE])
async def test_setting_one_attribute_keeps_the_others_and_the_bytes(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    store.give("file", noise(8, size), S3FS)
    async with lake(store, tmp_path) as m:
        await m.fs.setattr((await m.found("file")).inode, AttributeChange(mode=0o100644))
        await m.sync()
        assert store.data("file") == noise(8, size)
        assert store.count("put", "file") == 0
        assert store.count("upload_part_copy") == 0
        entry = await m.getattr("file")
        assert entry.mtime_ns == 1_600_000_000_250_000_000
    async with lake(store, tmp_path / "other") as m:
        entry = await m.getattr("file")
        assert (entry.mode, entry.uid, entry.gid) == (0o644, 7, 8)
        assert entry.mtime_ns == 1_600_000_000_250_000_000
        assert await m.read("file") == noise(8, size)


async def test_attributes_of_a_directory(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("d/", b"", {"mode": "16832", "uid": "7", "gid": "8"})
    store.give("d/x")
    async with lake(store, tmp_path / "one") as m:
        await m.fs.setattr((await m.found("d")).inode, AttributeChange(mode=0o644))
        assert (await m.found("d")).mode == 0o644
        await m.sync()
        async with lake(store, tmp_path / "other") as other:
            entry = await other.getattr("d")
            assert (entry.is_dir, entry.mode, entry.uid, entry.gid) == (True, 0o644, 7, 8)
        for change, code in ((AttributeChange(size=1), errno.EISDIR),):
            with pytest.raises(FileError) as caught:
                await m.fs.setattr((await m.found("d")).inode, change)
            assert caught.value.errno == code
        with pytest.raises(FileError) as caught:
            await m.fs.setattr(ROOT_INODE, AttributeChange(mode=0o700))
        assert caught.value.errno == errno.EPERM


@pytest.mark.parametrize("writer", [False, True])
@pytest.mark.parametrize("size", [3, LARGE])
async def test_attributes_set_while_the_file_is_published(tmp_path: Path, size: int, writer: bool) -> None:
    """The request under way tells the old ones; the new ones are not lost."""
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        handle = await m.create("file")
        other = await m.open("file", os.O_RDWR) if writer else None
        await m.fs.write(handle, 0, noise(9, size))
        inode = (await m.found("file")).inode
        store.hook = pause = Pause(is_put)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.close, handle)
            await reached(pause.reached)
            nursery.start_soon(m.fs.setattr, inode, AttributeChange(mode=0o600))
            await trio.sleep(0.02)
            pause.resume()
        if other is not None:
            await m.close(other)
        await durable(m)
        await m.sync()
        assert (await m.getattr("file")).mode == 0o600
    async with lake(store, tmp_path / "other") as m:
        assert (await m.getattr("file")).mode == 0o600
        assert await m.read("file") == noise(9, size)


async def test_chosen_times_travel_with_the_object(tmp_path: Path) -> None:
    store = MemoryStore()
    chosen = 1_500_000_000_123_456_789
    async with lake(store, tmp_path) as m:
        for name, size in (("small", 3), ("large", LARGE)):
            handle = await m.create(name)
            await m.fs.write(handle, 0, noise(10, size))
            inode = (await m.found(name)).inode
            await m.fs.setattr(inode, AttributeChange(mtime_ns=chosen, atime_ns=chosen), handle)
            await m.close(handle)
            assert store.metadata(name)["mtime"] == "1500000000.123456789"
            assert store.data(name) == noise(10, size)
    async with lake(store, tmp_path / "other") as m:
        for name in ("small", "large"):
            assert (await m.fs.getattr((await m.found(name)).inode)).mtime_ns == chosen


async def test_attributes_are_asked_for_once_for_each_version(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("file", b"x", S3FS)
    async with lake(store, tmp_path, clock=clock) as m:
        for _ in range(3):
            entry = await m.fs.getattr((await m.found("file")).inode)
            assert (entry.mode, entry.uid) == (0o600, 7)
        assert store.count("head") == 1
        clock.advance(TTL_S + 1)
        store.give("file", b"y")
        entry = await m.fs.getattr((await m.found("file")).inode)
        assert entry.mode != 0o600
        assert store.count("head") == 2
    async with lake(store, tmp_path, clock=clock) as m:
        await m.fs.getattr((await m.found("file")).inode)
        assert store.count("head") == 2


async def test_a_get_of_another_version_teaches_nothing(tmp_path: Path) -> None:
    """A reader pinned to an old version and one of the new are open under one key."""
    store, clock = MemoryStore(), Clock()
    store.give("file", b"x" * 10)
    async with lake(store, tmp_path, clock=clock) as m:
        old = await m.open("file")
        inode = m.fs.handle(old).file.entry.inode
        store.give("file", b"y" * 20, S3FS)
        clock.advance(TTL_S + 1)
        assert await m.read("file") == b"y" * 20
        assert m.fs.entry(inode).size == 10
        assert m.fs.entry(inode).mode != 0o600
        await m.close(old)


async def test_metadata_that_comes_with_the_bytes_keeps_the_time_that_the_row_has_by_then(tmp_path: Path) -> None:
    """The commit that has the file was sent while it was open: the file is not newer than all later ones."""
    store = MemoryStore()
    store.give("file", b"x" * UNREAD, S3FS)
    async with lake(store, tmp_path) as m:
        handle = await m.open("file")
        tree, batch = m.fs.namespace.tree, Batch()
        tree.restamp(batch, [await m.found("file")], 5)
        tree.database.commit(batch)
        assert await m.fs.read(handle, 0, 10) == b"x" * 10
        await m.close(handle)
        row = await m.found("file")
        assert (row.mode, row.stamp) == (0o600, 5)


# -- refusals


async def test_a_read_only_mount_changes_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("d/file", b"x")
    async with lake(store, tmp_path, read_only=True) as m:
        inode = (await m.found("d/file")).inode
        changes = (
            lambda: m.create("d/new"),
            lambda: m.mkdir("d/new"),
            lambda: m.unlink("d/file"),
            lambda: m.rmdir("d"),
            lambda: m.open("d/file", os.O_WRONLY),
            lambda: m.open("d/file", os.O_RDONLY | os.O_TRUNC),
            lambda: m.fs.setattr(inode, AttributeChange(size=0)),
            lambda: m.fs.setattr(inode, AttributeChange(mode=0o600)),
            lambda: m.rename("d/file", "d/new"),
            lambda: m.symlink("d/link", "file"),
            lambda: m.set_xattr("d/file", "user.a", b"1"),
        )
        for change in changes:
            with pytest.raises(FileError) as caught:
                await change()
            assert caught.value.errno == errno.EROFS
        assert await m.read("d/file") == b"x"
    assert {request.what for request in store.requests} <= {"list", "head", "get", "time_ns"}


async def test_handles_and_inodes_that_are_not(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("d/x")
    async with lake(store, tmp_path) as m:
        for call in (m.fs.read(99, 0, 1), m.fs.write(99, 0, b"x"), m.fs.flush(99)):
            with pytest.raises(FileError) as caught:
                await call
            assert caught.value.errno == errno.EBADF
        await m.fs.release(99)
        with pytest.raises(FileError) as caught:
            await m.open("d")
        assert caught.value.errno == errno.EISDIR
        with pytest.raises(FileError) as caught:
            await m.fs.open(12345, os.O_RDONLY)
        assert caught.value.errno == errno.ESTALE
        file = (await m.found("d/x")).inode
        for refused in (
            m.fs.lookup(file, b"y"),
            m.fs.create(file, b"y", 0o644, os.O_RDWR, 0, 0),
            m.fs.mkdir(file, b"y", 0o755, 0, 0),
            m.fs.unlink(file, b"y"),
            m.fs.rmdir(file, b"y"),
            m.fs.opendir(file),
        ):
            with pytest.raises(FileError) as caught:
                await refused
            assert caught.value.errno == errno.ENOTDIR


async def test_open_of_a_replaced_file_moves_the_name_to_the_new_version(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("file", b"old")
    async with lake(store, tmp_path) as m:
        with trio.fail_after(60):
            while not m.parts.cache.counted:
                await trio.sleep(0.002)
        inode = (await m.found("file")).inode
        store.give("file", b"the new version")
        stale = 0

        async def open_stale() -> None:
            nonlocal stale
            with pytest.raises(FileError) as caught:
                await m.fs.open(inode, os.O_RDONLY)
            stale += caught.value.errno == errno.ESTALE

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(open_stale)
        assert stale == 3
        assert len(m.parts.files) == 0
        now = await m.found("file")
        assert (now.inode != inode, now.size) == (True, 15)
        gets = store.count("get")
        assert await m.read("file") == b"the new version"
        assert store.count("get") == gets, "its bytes came when the name moved"


async def test_open_of_an_unchanged_file_and_its_first_read_make_one_get(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("file", noise(1, LARGE))
    async with lake(store, tmp_path) as m:
        await m.found("file")
        before = len(store.requests)
        assert await m.read("file") == noise(1, LARGE)
        assert [request.what for request in store.requests[before:]] == ["get"]
        handle = await m.open("file", os.O_RDWR)
        await m.close(handle)
        assert store.count("get") == 1


async def test_opening_what_was_removed_is_stale(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("file", b"x")
    async with lake(store, tmp_path, clock=clock) as m:
        inode = (await m.found("file")).inode
        store.take("file")
        clock.advance(TTL_S + 1)
        with pytest.raises(FileError) as caught:
            await m.fs.open(inode, os.O_RDONLY)
        assert caught.value.errno == errno.ESTALE


async def test_what_is_known_counts_on_while_the_store_is_away(tmp_path: Path) -> None:
    """In directories that were listed once; of others, and of bytes that are not here, nothing can be said."""
    store, clock = MemoryStore(), Clock()
    store.give("file", b"x")
    store.give("unknown/file", b"x")
    async with lake(store, tmp_path, clock=clock) as m:
        await m.names()
        unknown = await m.found("unknown")
        clock.advance(TTL_S + 1)
        store.hook = Failures(lambda request: True, Unavailable("away"), count=1_000_000)
        store.give("new", b"x")
        assert await m.names() == ["file", "unknown"]
        assert (await m.found("file")).size == 1
        assert await m.fs.lookup(1, b"new") == (None, 0.0)
        await m.mkdir("d")
        assert await m.names() == ["d", "file", "unknown"]
        for call in (m.fs.opendir(unknown.inode), m.fs.lookup(unknown.inode, b"file"), m.read("file")):
            with pytest.raises(LakeError) as caught:
                await call
            assert caught.value.errno == errno.EIO
        store.hook = lambda request, when: None
        assert await m.names() == ["d", "file", "new", "unknown"]


async def test_lookup_of_a_known_name_in_an_unlisted_directory_is_answered_while_the_store_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that opens files by path may list no directory above them, and reads bytes that are cached."""
    store, clock = MemoryStore(), Clock()
    store.give("data/train/file", b"x")
    async with lake(store, tmp_path, clock=clock) as m:
        assert await m.read("data/train/file") == b"x"
        clock.advance(TTL_S + 1)
        store.hook = Failures(lambda request: True, Unavailable("away"), count=1_000_000)
        assert await m.read("data/train/file") == b"x"
        monkeypatch.setattr(client, "AWAY_S_MIN", 0.0)
        asked = len(store.requests)
        assert await m.read("data/train/file") == b"x"
        assert store.requests[asked:] == []
        for name in (b"other", b"data/other", b"data/train/other"):
            with pytest.raises(LakeError) as caught:
                await m.lookup(name.decode())
            assert caught.value.errno == errno.EIO
        store.take("data/train/file")
        store.hook = lambda request, when: None
        await m.poll()  # a response: the store is back
        assert await m.lookup("data/train/file") is None


@pytest.mark.parametrize(
    ("metadata", "known"), [({"mode": str(stat.S_IFREG | 0o600)}, 0o600), ({"mode": "0100664"}, 0o664), ({}, 0o755)]
)
async def test_file_mode_with_allow_other_is_the_owners_until_known(
    tmp_path: Path, metadata: dict[str, str], known: int
) -> None:
    store = MemoryStore()
    store.give("f", b"x", metadata)
    async with lake(store, tmp_path, file_mode=0o755, dir_mode=0o755, allow_other=True) as m:
        entry = await m.found("f")
        assert file_type_and_mode(entry, m.fs.config) == stat.S_IFREG | 0o700
        assert file_type_and_mode(await m.fs.stat(entry.inode), m.fs.config) == stat.S_IFREG | known
        assert file_type_and_mode(m.fs.entry(1), m.fs.config) == stat.S_IFDIR | 0o755
        asked = len(store.requests)
        assert file_type_and_mode(await m.fs.stat(entry.inode), m.fs.config) == stat.S_IFREG | known
        assert len(store.requests) == asked
        handle = await m.create("new")
        assert file_type_and_mode(await m.fs.getattr((await m.found("new")).inode), m.fs.config) & 0o044
        await m.close(handle)


async def test_stat_of_a_replaced_object_with_allow_other_finds_the_new_version(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("f", b"old")
    async with lake(store, tmp_path, allow_other=True) as m:
        entry = await m.found("f")
        store.give("f", b"newer", {"mode": "0100640"})
        with pytest.raises(FileError) as caught:
            await m.fs.stat(entry.inode)
        assert caught.value.errno == errno.ESTALE
        now = await m.found("f")
        assert now.inode != entry.inode
        assert file_type_and_mode(await m.fs.stat(now.inode), m.fs.config) == stat.S_IFREG | 0o640


async def test_metadata_that_says_nothing_shows_the_mounts_defaults(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("d/x")
    async with lake(store, tmp_path, file_mode=0o640, dir_mode=0o750) as m:
        entry = await m.fs.getattr((await m.found("d/x")).inode)
        assert file_type_and_mode(entry, m.fs.config) == 0o100640
        assert file_type_and_mode(await m.found("d"), m.fs.config) == 0o040750
        before = len(store.requests)
        await m.fs.setattr(entry.inode, AttributeChange(mode=0o100640, uid=os.getuid(), gid=os.getgid()))
        assert len(store.requests) == before  # that is how it is shown already
        assert attributes.describe(entry).keys() == {attributes.MTIME}


async def test_a_pack_that_is_read_in_random_order_is_fetched_whole(tmp_path: Path) -> None:
    """Files of one pack, elsewhere: after a few blocks of it the rest comes in few requests."""
    store = MemoryStore()
    names = [f"f{number:03d}" for number in range(120)]
    async with writing_back(store, tmp_path / "here", pack="always", delay_s=NEVER_S) as m:
        for number, name in enumerate(names):
            await m.write(name, noise(number, 80_000))
        await m.fs.make_durable()
    async with lake(store, tmp_path / "other") as m:
        random.Random(1).shuffle(names)
        for name in names[:60]:
            assert await m.read(name) == noise(int(name[1:]), 80_000)
        with trio.fail_after(10):
            while not m.metrics.cache.fetched_whole:
                await trio.sleep(0.002)
        gets = store.count("get")
        for name in names:
            assert await m.read(name) == noise(int(name[1:]), 80_000)
        assert store.count("get") == gets
        assert m.metrics.cache.misses < 10


async def test_created_file_loses_privileges_when_it_is_written(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path) as m:
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY
        handle, entry = await m.fs.create(ROOT_INODE, b"file", 0o6755, flags, 0, 0)
        assert entry.mode == 0o6755
        await m.fs.write(handle, 0, b"bytes", kills_privileges=True)
        await m.close(handle)
        assert (await m.getattr("file")).mode == 0o755


@pytest.mark.parametrize("flags", [os.O_RDWR, os.O_WRONLY | os.O_TRUNC])
async def test_file_that_another_node_has_made_is_not_given_to_who_creates_it(tmp_path: Path, flags: int) -> None:
    """The kernel, which knew no such file, has checked nothing: it asks again where the answer is ESTALE."""
    async with two_lakes(MemoryStore(), tmp_path) as (one, two):
        handle, _ = await one.fs.create(ROOT_INODE, b"secret", 0o600, os.O_WRONLY | os.O_CREAT, 1001, 1001)
        await one.fs.write(handle, 0, b"of another user")
        await one.close(handle)
        await one.sync()
        await two.poll()
        with pytest.raises(FileError) as raised:
            await two.fs.create(ROOT_INODE, b"secret", 0o644, flags | os.O_CREAT, 1002, 1002)
        assert raised.value.errno == errno.ESTALE
        assert await two.read("secret") == b"of another user"


@pytest.mark.parametrize("writes", [False, True])
async def test_open_file_with_mtime_set_elsewhere_keeps_inode_if_written_here(tmp_path: Path, writes: bool) -> None:
    async with two_lakes(MemoryStore(), tmp_path, pack="never") as (one, two):
        await one.write("f", b"data")
        inode = (await two.found("f")).inode
        handle = await two.open("f", os.O_RDWR)
        await one.setattr("f", mtime_ns=5 * NS, atime_ns=5 * NS)
        await one.sync()
        await two.poll()
        assert ((await two.found("f")).inode, (await two.found("f")).mtime_ns) == (inode, 5 * NS)
        if writes:
            await two.fs.write(handle, 0, b"more")
        await two.close(handle)
        assert ((await two.found("f")).inode == inode) == writes
        assert await two.read("f") == (b"more" if writes else b"data")


async def test_attributes_that_a_get_answers_are_learned_without_a_look_at_the_other_files_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tens of thousands wait for the store under write-back, and each GET looked at all of them."""
    store = MemoryStore()
    for name in ("other", "open", "ahead"):
        store.give(name, noise(name, 100), S3FS)
    async with lake(store, tmp_path) as m:
        assert await m.names() == ["ahead", "open", "other"]
        other, handle = await m.open("other", os.O_RDONLY), await m.open("open", os.O_RDONLY)
        opened, ahead = m.fs.handle(handle).file.entry.inode, (await m.found("ahead")).inode

        class Unread:
            def __getattr__(self, name: str) -> NoReturn:
                raise AssertionError("another file in use is looked at")

        with monkeypatch.context() as patch:
            patch.setattr(m.fs.handle(other).file, "extent", Unread())
            for name in ("open", "ahead"):
                m.fs.events.notify_metadata_read(store.objects[name][1])
        heads = store.count("head")
        for inode in (opened, ahead):
            assert (await m.fs.getattr(inode)).mode == 0o600
        assert store.count("head") == heads
        await m.close(handle)
        await m.close(other)


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_file_that_is_almost_only_a_hole_is_one_put_in_a_local_directory(tmp_path: Path, durability: str) -> None:
    """5 TiB were 10,000 parts, each of which was synced and journaled with those before it."""
    store = MemoryStore(Capabilities(name="local", put_if_match=True))
    async with lake(store, tmp_path, pack="never", durability=durability) as m:
        await m.write("f", b"begin")
        await m.fs.make_durable()
        puts = store.count("put", "f")
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, LARGE // 2, b"middle")
        await m.setattr("f", size=LARGE)
        await m.close(handle)
        await m.fs.make_durable()
        expected = bytearray(LARGE)
        expected[:5], expected[LARGE // 2 : LARGE // 2 + 6] = b"begin", b"middle"
        assert store.data("f") == await m.read("f") == expected
        assert store.count("create_multipart") == 0
        assert store.count("put", "f") - puts == 1
    async with lake(store, tmp_path, pack="never") as m:
        assert await m.read("f") == expected
