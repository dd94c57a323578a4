"""Calls that fail change nothing: neither the file, here and in the store, nor what is kept of an earlier failure."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import trio.testing

from lakefs_fuse.blockcache.disk_latency import Promptness
from lakefs_fuse.errors import AccessDenied, CacheError, CacheFull, FileError, LakeError, StagingFull
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.staging import segments
from lakefs_fuse.staging.staging_area import StagedFile
from lakefs_fuse.vfs.ops import io
from tests.memory_store import Failures, MemoryStore, Pause
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import RENAME_EXCHANGE, Clock, Lake, lake, two_lakes
from tests.vfs.writing_back import NEVER_S, Outage, die, stored, told, until, writing_back

OLD, NEWER = noise("old", 800), noise("newer", 900)


@contextmanager
def failing_commit(*, after: int = 0, volatile: bool = False) -> Iterator[None]:
    """A write to the metadata cache in the block, ``after`` so many others, fails for want of room; ``volatile`` ones
    count, too, and no memory is left for them either."""
    count = 0

    def failing_once(commit: Callable[..., None]) -> Callable[..., None]:
        def fail_once(database: Database, *arguments: object, **named: object) -> None:
            nonlocal count
            count += 1
            if count == after + 1:
                raise CacheFull("the disk is full")
            commit(database, *arguments, **named)

        return fail_once

    with pytest.MonkeyPatch.context() as patch:
        for name in ("commit", "commit_volatile") if volatile else ("commit",):
            patch.setattr(Database, name, failing_once(getattr(Database, name)))
        yield
        assert count > after, "the call wrote too little"


async def open_emptied(m: Lake, path: str) -> None:
    await m.open(path, os.O_WRONLY | os.O_TRUNC)


async def cut(m: Lake, path: str) -> None:
    await m.setattr(path, size=10)


async def empty(m: Lake, path: str) -> None:
    await m.setattr(path, size=0)


async def create_over(m: Lake, path: str) -> None:
    await m.create(path, os.O_RDWR | os.O_TRUNC)


CHANGES = [open_emptied, create_over, empty, cut]
Change = Callable[[Lake, str], Awaitable[None]]


async def change_in_vain(m: Lake, change: Change) -> None:
    with failing_commit():
        with pytest.raises(LakeError) as raised:
            await change(m, "f")
        assert raised.value.errno == errno.ENOSPC
    await trio.testing.wait_all_tasks_blocked()
    assert not m.fs.unfinished()


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize("change", CHANGES)
async def test_change_that_cannot_be_journaled_leaves_the_stored_file(
    tmp_path: Path, change: Change, durability: str
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never", durability=durability) as m:
        await m.write("f", OLD)
        await m.fs.make_durable()
        before = await m.getattr("f")
        etag = store.objects["f"][1].etag
        await change_in_vain(m, change)
        assert await m.getattr("f") == before
        assert m.fs.statistics()["files"] == {"in_use": 0}
        await m.fs.make_durable()
        assert store.objects["f"][1].etag == etag
        assert await m.read("f") == store.data("f") == OLD
        await m.write("g", b"other")
        await change(m, "f")


@pytest.mark.parametrize("change", CHANGES)
async def test_change_that_cannot_be_journaled_leaves_the_acknowledged_file(tmp_path: Path, change: Change) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, delay_s=NEVER_S) as m:
        await m.write("f", OLD)
        with failing_commit(), pytest.raises(LakeError):
            await change(m, "f")
        await trio.testing.wait_all_tasks_blocked()
        assert await m.read("f") == OLD
        assert told(m)["accepted"] == 1
        await m.fs.make_durable()
        assert await m.read("f") == store.data("f") == OLD


@pytest.mark.parametrize("change", [open_emptied, empty])
async def test_orphan_is_dropped_only_by_an_emptying_that_succeeds(tmp_path: Path, change: Change) -> None:
    """It has the bytes of a program whose writes failed."""
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never") as m:
        await m.write("f", OLD)
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, 0, noise("new", 100))
        draft = m.fs.handle(handle).file.draft
        assert draft is not None
        draft.refuse(200, 300, CacheFull("the disk is full"))
        await m.fs.release(handle)
        await until(lambda: [each.state for each in m.fs.unfinished()] == ["orphan"])
        emptied: list[str] = []
        m.fs.events.file_emptied.append(emptied.append)
        await m.getattr("f")  # its inode is new
        with failing_commit(), pytest.raises(LakeError):
            await change(m, "f")
        assert emptied == []
        await change(m, "f")
        assert emptied == ["f"]
        await until(lambda: "orphan" not in [each.state for each in m.fs.unfinished()])


async def store_in_turn(one: Lake, two: Lake) -> None:
    """The first node does not know of the version of the second."""
    for m, data in ((one, OLD), (two, NEWER)):
        await m.write("f", data)
        await m.fs.make_durable()


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_truncate_beyond_the_largest_size_leaves_what_another_node_stored(
    tmp_path: Path, durability: str
) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never", durability=durability) as (one, two):
        await store_in_turn(one, two)
        with pytest.raises(LakeError) as raised:
            await one.setattr("f", size=1 << 50)
        assert raised.value.errno == errno.EFBIG
        await trio.testing.wait_all_tasks_blocked()
        assert one.fs.statistics()["files"] == {"in_use": 0}
        await one.fs.make_durable()
        assert store.data("f") == NEWER


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_truncate_that_staging_refuses_leaves_what_another_node_stored(tmp_path: Path, durability: str) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never", durability=durability) as (one, two):
        await store_in_turn(one, two)

        async def fails(file: StagedFile, size: int) -> None:
            raise CacheError("the staging disk fails")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StagedFile, "cut", fails)
            handle = await one.open("f", os.O_WRONLY)
            with pytest.raises(LakeError, match="the staging disk fails"):
                await one.setattr("f", size=10)
            await one.close(handle)
        assert one.fs.statistics()["files"] == {"in_use": 0}
        assert not one.fs.unfinished()
        await one.fs.make_durable()
        assert store.data("f") == NEWER
        await one.setattr("f", size=10)
        await one.fs.make_durable()
        assert store.data("f") == OLD[:10]


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_truncate_to_the_size_that_a_file_has_stores_nothing(tmp_path: Path, durability: str) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, pack="never", durability=durability, clock=clock) as m:
        await m.write("f", OLD)
        await m.fs.make_durable()
        before, since = await m.getattr("f"), len(store.requests)
        clock.advance(50)
        assert await m.setattr("f", size=len(OLD)) == before
        await m.fs.make_durable()
        assert not [request for request in store.requests[since:] if request.what != "list"]
        assert await m.getattr("f") == before


async def test_truncate_to_the_size_that_an_acknowledged_file_has_begins_no_version(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path) as m:
        outage = Outage(store)
        await m.write("f", OLD)
        await m.setattr("f", size=len(OLD))
        assert told(m)["accepted"] == 1
        outage.away = False
        await stored(m)
        assert store.data("f") == OLD


async def test_copy_that_is_refused_begins_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "COPIED_BYTES_MIN", 1)
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never") as m:
        await m.write("source", OLD + NEWER)
        await m.write("f", NEWER)
        await m.fs.make_durable()
        source, target = [(await m.found(path)).inode for path in ("source", "f")]
        handle, size = await m.open("f", os.O_RDWR), len(NEWER)
        since = len(store.requests)
        with pytest.raises(FileError) as raised:
            await m.fs.copy_range(source, size, target, size, 10)
        assert raised.value.errno == errno.EOPNOTSUPP
        await m.close(handle)
        assert not store.requests[since:]
        assert store.data("f") == NEWER


async def test_copy_that_cannot_be_journaled_leaves_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "COPIED_BYTES_MIN", 1)
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never") as m:
        await m.write("source", OLD)
        await m.write("f", b"")
        await m.fs.make_durable()
        source, target = [(await m.found(path)).inode for path in ("source", "f")]
        handle = await m.open("f", os.O_RDWR)
        with failing_commit(after=1), pytest.raises(LakeError):
            await m.fs.copy_range(source, 0, target, 0, len(OLD))
        await m.close(handle)
        assert await m.read("f") == store.data("f") == b""


async def test_copy_of_an_acknowledged_version_that_fails_leaves_no_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, delay_s=NEVER_S) as m:
        await m.write("f", OLD)
        records = [key for key, _ in Journal(m.fs.database).records()]
        handle = await m.open("f", os.O_RDWR)

        async def fails(count: int) -> None:
            raise StagingFull("staging is full")

        with monkeypatch.context() as patch:
            patch.setattr(m.parts.staging, "reserve", fails)
            with pytest.raises(StagingFull):
                await m.fs.write(handle, 0, b"new")
        assert [key for key, _ in Journal(m.fs.database).records()] == records
        assert await m.read("f") == OLD
        await m.fs.write(handle, 0, b"new")
        await m.close(handle)
        await m.fs.make_durable()
        assert store.data("f") == b"new" + OLD[3:]


async def test_release_of_an_unlinked_file_that_cannot_be_journaled_gives_its_room_back(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never") as m:
        store.hook = Failures(lambda request: request.what == "put" and request.key == "f", AccessDenied("no"), count=1)
        handle = await m.create("f")
        await m.fs.write(handle, 0, OLD)
        with pytest.raises(AccessDenied):
            await m.fs.flush(handle)
        await m.unlink("f")
        with failing_commit():
            await m.fs.release(handle)
        assert m.fs.statistics()["files"] == {"in_use": 0}
        await until(lambda: not m.parts.staging.bytes_used)
        await until(lambda: not [*Journal(m.fs.database).records()])
        assert "f" not in store.objects


@pytest.mark.parametrize("change", ["unlink", "rename"])
async def test_change_of_a_name_that_is_journaled_when_the_disk_fails_is_made_on_every_node(
    tmp_path: Path, change: str
) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never", durability="writeback") as (one, two):
        await one.write("f", OLD)
        await one.fs.make_durable()
        assert await two.read("f") == OLD
        await one.found("f")
        assert await one.lookup("g") is None  # or the rename would list the directory, and that fail
        with failing_commit(after=1, volatile=True):
            if change == "unlink":
                await one.unlink("f")
            else:
                await one.rename("f", "g")
        await one.fs.make_durable()
        await two.poll()
        for m in (one, two):
            assert await m.lookup("f") is None
            assert (await m.lookup("g") is not None) == (change == "rename")


async def _names_of(m: Lake) -> set[str]:
    found = set(await m.names())
    return found.union(*[{f"{above}/{name}" for name in await m.names(above)} for above in found])


CHANGES_OF_NAMES: dict[str, tuple[Callable[[Lake], Awaitable[object]], set[str]]] = {
    "mkdir": (lambda m: m.mkdir("d/new"), {"d", "e", "d/f", "d/g", "d/new"}),
    "rmdir": (lambda m: m.rmdir("e"), {"d", "d/f", "d/g"}),
    "symlink": (lambda m: m.symlink("d/new", "f"), {"d", "e", "d/f", "d/g", "d/new"}),
    "unlink": (lambda m: m.unlink("d/f"), {"d", "e", "d/g"}),
    "rename": (lambda m: m.rename("d/f", "d/h"), {"d", "e", "d/h", "d/g"}),
    "rename over a file": (lambda m: m.rename("d/f", "d/g"), {"d", "e", "d/g"}),
    "rename of a directory": (lambda m: m.rename("d", "e"), {"e", "e/f", "e/g"}),
}


@pytest.mark.parametrize(
    ("change", "durability"), [*((each, "close") for each in CHANGES_OF_NAMES), ("unlink", "writeback")]
)
async def test_change_of_names_that_is_in_effect_succeeds(tmp_path: Path, change: str, durability: str) -> None:
    """Whichever of its writes fails: what a call that raises was asked for is not done."""
    make, after = CHANGES_OF_NAMES[change]
    for writes in count():
        async with lake(MemoryStore(), tmp_path / f"{writes}", pack="never", durability=durability) as m:
            for directory in "de":
                await m.mkdir(directory)
            for name in "fg":
                await m.write(f"d/{name}", OLD)
            await m.fs.make_durable()
            if durability == "writeback":
                await m.write("d/f", NEWER)
            handles = [await m.open(f"d/{name}", os.O_RDWR) for name in "fg"]
            before, is_raised = await _names_of(m), False
            try:
                with failing_commit(after=writes):
                    try:
                        await make(m)
                    except LakeError:
                        is_raised = True
            except AssertionError:  # it makes fewer writes
                return
            if not is_raised:
                await m.fs.sync_names()  # what was journaled when the disk failed is in effect afterwards
            assert await _names_of(m) == (before if is_raised else after), f"write {writes + 1} failed"
            for handle in handles:
                await m.close(handle)


async def _read_all(m: Lake) -> dict[str, bytes]:
    return {name: await m.read(name) for name in await m.names()}


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize("names", ["f", "f to g", "f over e to g"])
async def test_rename_of_a_file_that_is_not_stored_is_in_effect_or_changes_nothing(
    tmp_path: Path, names: str, durability: str
) -> None:
    """Whichever of its writes fails: the file, and the one whose name it is to get, keep their names and bytes."""
    for writes in count():
        store, before = MemoryStore(), {"e": b"e", "g": OLD} if "g" in names else {}
        async with lake(store, tmp_path / f"{writes}", pack="never", durability=durability) as m:
            for path, data in before.items():
                await m.write(path, data)
            await m.fs.make_durable()
            handle, name = await m.create("f", os.O_RDWR | os.O_EXCL), "f"
            await m.fs.write(handle, 0, NEWER)
            if durability == "writeback":
                await m.fs.flush(handle)
            if "e" in names:
                await m.rename(name, "e")
                name = "e"
            is_raised = False
            try:
                with failing_commit(after=writes):
                    try:
                        await m.rename(name, "g")
                    except LakeError:
                        is_raised = True
            except AssertionError:  # it makes fewer writes
                return
            if is_raised:
                await m.fs.sync_names()
                assert before.keys() <= {key for key in store.objects if "/" not in key}
            await m.close(handle)
            await m.fs.make_durable()
            after = {path: data for path, data in before.items() if path != name or is_raised}
            after[name if is_raised else "g"] = NEWER
            assert await _read_all(m) == after, f"write {writes + 1} failed"
            async with lake(store, tmp_path / f"{writes}-other") as other:
                assert await _read_all(other) == after, f"write {writes + 1} failed"


async def test_conflict_whose_name_cannot_be_written_at_first_is_counted_when_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("f", OLD)
        dead = die(tmp_path / "cache", tmp_path / "dead")
        outage.away = False
        store.give("f", NEWER)
    commit, failed = Database.commit, list[Batch]()

    def fail_synced_once(database: Database, batch: Batch, *, sync: bool = False) -> None:
        if sync and not failed:
            failed.append(batch)
            raise CacheFull("the disk is full")
        commit(database, batch, sync=sync)

    async with writing_back(store, dead, delay_s=NEVER_S) as m:
        monkeypatch.setattr(Database, "commit", fail_synced_once)
        await m.fs.make_durable()
        assert told(m)["conflicts"] == len(failed) == 1
        assert sorted((await _read_all(m)).values()) == sorted([OLD, NEWER])


@pytest.mark.parametrize("data", [OLD, NEWER])
@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_file_that_is_created_again_is_stored_although_its_deletion_cannot_be_dropped(
    tmp_path: Path, durability: str, data: bytes
) -> None:
    """Whichever write of its close fails, the next attempt stores it, and what was removed before does not take it."""
    for writes in count():
        store, clock = MemoryStore(), Clock()
        store.equal_bytes_have_equal_etags = True
        async with lake(store, tmp_path / f"{writes}", pack="never", durability=durability, clock=clock) as m:
            await m.write("f", OLD)
            await m.fs.make_durable()
            clock.advance(5)
            await m.unlink("f")
            clock.advance(5)
            handle = await m.create("f")
            await m.fs.write(handle, 0, data)
            try:
                with failing_commit(after=writes), suppress(LakeError):
                    await m.fs.fsync(handle)
            except AssertionError:  # it makes fewer writes
                return
            await m.close(handle)
            await m.fs.make_durable()
            clock.advance(2 * m.fs.config.delete_after_s)
            await m.fs.make_durable()
            assert await m.read("f") == store.data("f") == data, f"write {writes + 1} failed"


async def test_extended_attribute_that_cannot_be_journaled_while_its_file_is_stored_is_not_set_later(
    tmp_path: Path,
) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never") as (one, two):
        pause = store.hook = Pause(lambda request: request.what == "put" and request.key == "f")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.write, "f", OLD)
            await reached(pause.reached)
            with failing_commit(), pytest.raises(CacheFull):
                await one.set_xattr("f", "user.a", b"1")
            pause.resume()
        await one.fs.make_durable()
        await two.poll()
        for m in (one, two):
            assert "user.a" not in await m.xattrs("f")


@pytest.mark.parametrize("after", range(7))
async def test_exchange_that_the_disk_refuses_half_way_loses_neither_file(tmp_path: Path, after: int) -> None:
    """Both names were gone in between two writes of it, and the file that was being written took the other's name."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "1", clock=clock, pack="never") as m:
        await m.mkdir("d")
        await m.write("a", b"stored")
        await m.write("d/b", b"old")
        await m.sync()
        handle = await m.open("d/b", os.O_RDWR | os.O_TRUNC)
        await m.fs.write(handle, 0, b"being written")
        with failing_commit(after=after, volatile=True), suppress(LakeError):
            await m.rename("a", "d/b", RENAME_EXCHANGE)
        await m.close(handle)
        await m.sync()
        kept = (
            {"a": b"stored", "d": None, "d/b": b"being written"},
            {"a": b"being written", "d": None, "d/b": b"stored"},
        )
        clock.advance(3)
        async with lake(store, tmp_path / "2", clock=clock) as other:
            assert await other.tree() == await m.tree()
        assert await m.tree() in kept


async def test_removal_that_fails_while_the_file_is_acknowledged_leaves_a_file_that_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal begins when the bytes are being synced, so `close()` is answered before it fails."""
    store, writing, going_on, write = MemoryStore(), threading.Event(), threading.Event(), segments.Group.write

    def slow(group: segments.Group) -> None:
        writing.set()
        going_on.wait()
        write(group)

    async with writing_back(store, tmp_path / "cache") as m:
        handle = await m.create("f")
        await m.fs.write(handle, 0, OLD)
        monkeypatch.setattr(Promptness, "is_prompt", False)
        monkeypatch.setattr(segments.Group, "write", slow)

        async def remove() -> None:
            with pytest.raises(CacheFull):
                await m.unlink("f")

        with failing_commit(after=1):  # that of the acknowledgement
            async with trio.open_nursery() as nursery:
                nursery.start_soon(m.close, handle)
                await reached(writing)
                nursery.start_soon(remove)
                await trio.testing.wait_all_tasks_blocked(0.05)
                going_on.set()
        await stored(m)
        assert store.data("f") == OLD
        assert await m.read("f") == OLD
