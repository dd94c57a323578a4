"""Two clients create one name with O_EXCL: who has it, and what becomes of the bytes of the other."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.errors import FileError, LakeError
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.metrics import Unfinished
from lakefs_fuse.store.protocol import Capabilities
from tests.memory_store import MemoryStore, Pause
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import RENAME_EXCHANGE, TTL_S, Clock, Lake, held_fresh, lake, two_lakes
from tests.vfs.writing_back import LARGE, NEVER_S, Outage, die, rewrite, stored, told, until, writing_back

EXCLUSIVE = os.O_RDWR | os.O_EXCL
SIZES = [15, LARGE]
OTHER_MODE = 0o755
"""Other than what a listing shows, so that a commit tells of the file."""


async def create(m: Lake, path: str, data: bytes, mode: int = OTHER_MODE) -> int:
    """A file created with O_EXCL and not closed."""
    flags = EXCLUSIVE | os.O_CREAT
    handle, _ = await m.fs.create(*await m.parent(path), mode, flags, os.getuid(), os.getgid())
    await m.fs.write(handle, 0, data)
    return handle


async def tell(m: Lake, *others: Lake) -> None:
    """Others hear of what a node has stored, and changed."""
    await m.fs.sync_names()
    await m.parts.committer.flush_announcements()
    for other in others:
        await other.poll()


async def fails_with_eexist(m: Lake, handle: int, *, closes: bool = True) -> None:
    with pytest.raises(FileError) as caught:
        await (m.close(handle) if closes else m.fs.fsync(handle))
    assert caught.value.errno == errno.EEXIST


async def orphan(m: Lake) -> Unfinished:
    await until(lambda: [each.state for each in m.fs.unfinished()] == ["orphan"])
    (found,) = m.fs.unfinished()
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", [OTHER_MODE, 0o644])
@pytest.mark.parametrize("is_told_before", [True, False])
async def test_file_whose_close_got_eexist_never_replaces_the_other(
    tmp_path: Path, size: int, mode: int, is_told_before: bool
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        ours, theirs = await create(one, "f", noise(1, size), mode), await create(two, "f", noise(2, size), mode)
        await two.close(theirs)
        if is_told_before:
            await tell(two, one)
        await fails_with_eexist(one, ours)
        found = await orphan(one)
        assert (found.path, found.bytes) == ("f", size)
        await tell(two, one)
        await one.write("other", b"x")
        await one.fs.make_durable("other")
        await one.fs.make_durable()
        clock.advance(2 * TTL_S)
        for each in (one, two):
            assert await each.read("f") == store.data("f") == noise(2, size)
        with pytest.raises(FileError) as caught:
            await one.fs.finish_orphan(found.id)
        assert caught.value.errno == errno.EEXIST
        await one.fs.abort_orphan(found.id)
        assert one.fs.unfinished() == []
        assert not store.uploads


@pytest.mark.parametrize("size", SIZES)
async def test_name_is_the_others_after_fsync_got_eexist_and_more_was_written(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        ours, theirs = await create(one, "f", noise(1, size)), await create(two, "f", b"theirs")
        await two.close(theirs)
        for _ in range(2):
            await fails_with_eexist(one, ours, closes=False)
            await tell(two, one)
            await one.fs.write(ours, size, b"more")
        with pytest.raises(FileError):
            await one.fs.make_durable()
        await fails_with_eexist(one, ours)
        await orphan(one)
        await one.fs.make_durable()
        assert await one.read("f") == store.data("f") == b"theirs"


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize("removed_by", ["mount", "another program"])
async def test_file_that_got_eexist_gets_it_again_when_the_other_is_removed(
    tmp_path: Path, removed_by: str, durability: str
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "1", durability=durability) as one, lake(store, tmp_path / "2") as two:
        ours, theirs = await create(one, "f", b"ours"), await create(two, "f", b"theirs")
        await two.close(theirs)
        await fails_with_eexist(one, ours, closes=False)
        if removed_by == "mount":
            await tell(two, one)
            await two.unlink("f")
            await tell(two, one)
        else:
            store.delete("f")
        await fails_with_eexist(one, ours, closes=False)
        with pytest.raises(FileError):
            await one.fs.make_durable()
        await fails_with_eexist(one, ours)
        found = await orphan(one)
        await one.fs.make_durable()
        assert await one.lookup("f") is None
        await one.fs.finish_orphan(found.id)
        assert await one.read("f") == b"ours"


@pytest.mark.parametrize("is_synced", [True, False])
async def test_name_is_the_others_after_a_crash_before_the_last_close(tmp_path: Path, is_synced: bool) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        ours, theirs = await create(one, "f", b"ours"), await create(two, "f", b"theirs")
        await two.close(theirs)
        await tell(two, one)
        if is_synced:
            await fails_with_eexist(one, ours, closes=False)
        died = die(tmp_path / "one", tmp_path / "died")
        await one.fs.release(ours)
    async with lake(store, died) as again:
        found = await orphan(again)
        await again.fs.make_durable()
        with pytest.raises(FileError):
            await again.fs.finish_orphan(found.id)
        assert await again.read("f") == store.data("f") == b"theirs"


async def test_file_whose_close_failed_for_the_store_leaves_the_name_that_was_taken_meanwhile(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        ours = await create(one, "f", b"ours")
        outage = Outage(store)
        with pytest.raises(LakeError):
            await one.close(ours)
        outage.away = False
        await two.close(await create(two, "f", b"theirs"))
        await tell(two, one)
        with pytest.raises(FileError) as caught:
            await one.fs.make_durable()
        assert caught.value.errno == errno.EEXIST
        await orphan(one)
        await one.fs.make_durable()
        assert await one.read("f") == store.data("f") == b"theirs"


@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_told", [True, False])
async def test_open_file_whose_name_was_taken_cannot_be_renamed(
    tmp_path: Path, is_told: bool, size: int, flags: int
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.write("other", b"other")
        ours = await create(one, "f", noise(1, size))
        await two.close(await create(two, "f", b"theirs"))
        if is_told:
            await tell(two, one)
        await fails_with_eexist(one, ours, closes=False)
        for old, new in (("f", "other"), ("other", "f")) if flags else (("f", "other"), ("f", "g")):
            with pytest.raises(FileError) as caught:
                await one.rename(old, new, flags)
            assert caught.value.errno == errno.EEXIST
        await fails_with_eexist(one, ours)
        assert (await orphan(one)).path == "f"
        await tell(one, two)
        await tell(two, one)
        clock.advance(2 * TTL_S)
        for each in (one, two):
            assert await each.tree() == {"f": b"theirs", "other": b"other"}


async def test_file_whose_name_was_taken_has_none_after_its_directory_is_renamed(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.mkdir("d")
        await tell(one, two)
        ours = await create(one, "d/f", b"ours")
        await two.close(await create(two, "d/f", b"theirs"))
        await tell(two, one)
        await fails_with_eexist(one, ours, closes=False)
        await one.rename("d", "e")
        await fails_with_eexist(one, ours)
        assert (await orphan(one)).path == "e/f"
        await tell(one, two)
        clock.advance(2 * TTL_S)
        for each in (one, two):
            assert await each.tree() == {"e": None, "e/f": b"theirs"}


@pytest.mark.parametrize("is_told", [True, False])
async def test_removing_an_open_file_whose_name_was_taken_leaves_the_other(tmp_path: Path, is_told: bool) -> None:
    """As programs do that could not link their temporary file, and have it open."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        ours, theirs = await create(one, "f", b"ours"), await create(two, "f", b"theirs")
        await two.close(theirs)
        if is_told:
            await tell(two, one)
        await fails_with_eexist(one, ours, closes=False)
        await one.unlink("f")
        assert await one.read("f") == b"theirs"
        assert await one.read_handle(ours) == b"ours"
        await one.close(ours)
        await one.sync()
        await tell(two, one)
        clock.advance(2 * TTL_S)
        for each in (one, two):
            assert await each.read("f") == store.data("f") == b"theirs"
        assert one.fs.unfinished() == []


async def test_removing_an_open_file_whose_name_was_taken_while_its_directory_is_listed_shows_the_other(
    tmp_path: Path,
) -> None:
    """The LIST under way is told to leave the name as it is, so that the directory is listed again."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        ours = await create(one, "f", b"ours")
        await two.close(await create(two, "f", b"theirs"))
        await fails_with_eexist(one, ours, closes=False)
        assert await one.names() == ["f"]
        clock.advance(TTL_S + 1)
        pause = store.hook = Pause(lambda request: request.what == "list" and request.key == "", "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.fs.opendir, ROOT_INODE)
            await reached(pause.reached)
            with held_fresh(one):
                await one.unlink("f")
            pause.resume()
        assert await one.names() == ["f"]
        assert await one.read("f") == b"theirs"
        await one.close(ours)


async def test_empty_file_whose_name_was_taken_leaves_nothing(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        ours = await create(one, "lock", b"")
        await two.close(await create(two, "lock", b"theirs"))
        await fails_with_eexist(one, ours)
        await until(lambda: not one.fs.unfinished())
        assert await one.read("lock") == b"theirs"


@pytest.mark.parametrize("size", SIZES)
async def test_lock_file_for_which_nodes_race_again_and_again_leaves_one_orphan(tmp_path: Path, size: int) -> None:
    store, ids = MemoryStore(), set[str]()
    async with two_lakes(store, tmp_path) as (one, two):
        await one.close(await create(one, "locks", b"another name"))
        for _ in range(3):
            ours = await create(one, "lock", noise(1, size))
            await two.close(await create(two, "lock", b"theirs"))
            await fails_with_eexist(one, ours)
            await until(lambda: {each.id for each in one.fs.unfinished()} - ids)
            found = await orphan(one)
            assert (found.path, found.bytes) == ("lock", size)
            ids.add(found.id)
            await two.unlink("lock")
            await tell(two, one)
        assert len(ids) == 3
        await one.write("locks", b"begins as the name does")
        assert (await orphan(one)).id == found.id
        await one.write("lock", b"once more")
        await until(lambda: not one.fs.unfinished())
        assert not store.uploads


@pytest.mark.parametrize("size", SIZES)
async def test_name_is_the_others_where_its_file_is_packed(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "1") as one, lake(store, tmp_path / "2", pack="always") as two:
        ours = await create(one, "f", noise(1, size))
        await two.write("f", b"theirs")
        await one.poll()
        await fails_with_eexist(one, ours)
        await orphan(one)
        await one.fs.make_durable()
        assert await one.read("f") == await two.read("f") == b"theirs"


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_deleted", [True, False])
async def test_one_of_two_takes_a_name_that_was_removed_before(tmp_path: Path, size: int, is_deleted: bool) -> None:
    """As programs do with a lock file."""
    store, clock = MemoryStore(Capabilities(name="memory", put_if_match=True, complete_if_match=True)), Clock()
    async with two_lakes(store, tmp_path, clock=clock, delete_after_s=0.0 if is_deleted else 300.0) as (one, two):
        await one.close(await create(one, "lock", b"before"))
        await tell(one, two)
        await one.unlink("lock")
        await (one.sync() if is_deleted else one.fs.sync_names())
        await two.poll()
        clock.advance(3)
        ours, theirs = await create(one, "lock", noise(1, size)), await create(two, "lock", noise(2, size))
        await two.close(theirs)
        await fails_with_eexist(one, ours)
        await orphan(one)
        await tell(two, one)
        clock.advance(2 * TTL_S)
        for each in (one, two):
            assert await each.read("lock") == noise(2, size)


@pytest.mark.parametrize("size", SIZES)
async def test_key_of_a_file_that_another_node_renames_during_the_close_is_not_taken(tmp_path: Path, size: int) -> None:
    """While its removed version is claimed, by a node that has not heard of the removal."""
    store = MemoryStore(Capabilities(name="memory", put_if_match=True, complete_if_match=True))
    async with (
        two_lakes(store, tmp_path, pack="never", delete_after_s=300.0) as (one, two),
        lake(store, tmp_path / "three", delete_after_s=300.0) as three,
    ):
        await one.write("lock", b"renamed")
        assert await one.names() == ["lock"]  # a listing in the background would hear of the removal, if it came late
        await three.unlink("lock")
        await three.fs.sync_names()
        await two.poll()
        handle = await create(two, "lock", noise(1, size))
        store.hook = pause = Pause(lambda each: each.what == "put" and each.key.startswith(OBJECTS), "before")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.close, handle)
            await trio.to_thread.run_sync(pause.reached.wait)
            store.hook = lambda _request, _when: None
            await one.rename("lock", "h")
            await one.fs.sync_names()
            await two.poll()
            pause.resume()
        await tell(two, one, three)
        assert await three.tree() == {"h": b"renamed", "lock": noise(1, size)}


@pytest.mark.parametrize("pack", ["always", "never"])
async def test_name_that_another_client_stored_after_the_listing_in_progress_began_is_taken(
    tmp_path: Path, pack: str
) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("d/other", b"x")
    async with lake(store, tmp_path / "cache", clock=clock, pack=pack) as m:
        assert await m.names("d") == ["other"]
        directory = (await m.found("d")).inode
        clock.advance(TTL_S + 1)
        assert await m.names() == ["d"]
        store.hook = paused = Pause(lambda request: request.what == "list" and "commits" not in request.key, "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.read_directory, directory)
            await reached(paused.reached)
            store.give("d/lock", b"theirs")
            nursery.start_soon(_resume_soon, paused)
            with pytest.raises(FileError) as caught:
                await create(m, "d/lock", b"ours")
        assert caught.value.errno == errno.EEXIST
        assert (await m.names("d"), await m.read("d/lock")) == (["lock", "other"], b"theirs")


async def _resume_soon(paused: Pause) -> None:
    await trio.sleep(0.05)
    paused.resume()


# -- packs of write-back


@pytest.mark.parametrize("told_by", ["commit", "announcement", "store"])
async def test_pack_leaves_out_a_file_whose_name_another_node_has(tmp_path: Path, told_by: str) -> None:
    store, clock = MemoryStore(page_keys_max=2), Clock()
    async with (
        writing_back(store, tmp_path / "one", clock=clock, pack="auto", delay_s=NEVER_S) as one,
        lake(store, tmp_path / "two", clock=clock) as two,
    ):
        assert await one.names() == []
        for number in range(3):
            await two.mkdir(f"commit{number}")
            await two.fs.sync_names()
            await two.rmdir(f"commit{number}")
            await two.fs.sync_names()
        await one.write("a", b"before")
        await one.close(await create(one, "f", b"ours"))
        await one.close(await create(one, "g", b"ours alone"))
        await two.close(await create(two, "f", b"theirs", OTHER_MODE if told_by == "commit" else 0o644))
        if told_by != "store":
            await tell(two, one)
        await one.fs.make_durable()
        await tell(one, two)
        clock.advance(2 * TTL_S)
        for each in (one, two):
            beside = [name for name in await each.names() if name.startswith("f.conflict-")]
            expected = {"a": b"before", "f": b"theirs", beside[0]: b"ours", "g": b"ours alone"}
            assert await each.tree() == expected
        assert store.data("f") == b"theirs"
        assert (told(one)["conflicts"], told(one)["failed"]) == (1, 0)


async def test_pack_leaves_out_a_file_whose_name_another_node_has_packed(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with (
        writing_back(store, tmp_path / "one", clock=clock, pack="always", delay_s=NEVER_S) as one,
        lake(store, tmp_path / "two", clock=clock, pack="always") as two,
    ):
        assert await one.names() == []
        await one.close(await create(one, "f", b"ours"))
        await two.write("f", b"theirs")
        await one.poll()
        await one.write("g", b"other")
        await one.fs.make_durable()
        await two.poll()
        for each in (one, two):
            beside = [name for name in await each.names() if name.startswith("f.conflict-")]
            assert await each.tree() == {"f": b"theirs", beside[0]: b"ours", "g": b"other"}


@pytest.mark.parametrize("between", ["d/f-a", "d/other"])
async def test_pack_leaves_out_files_whose_names_are_behind_many_keys(tmp_path: Path, between: str) -> None:
    store, clock = MemoryStore(page_keys_max=5), Clock()
    for number in range(12):
        store.give(f"{between}{number:02}", b"")
    async with (
        writing_back(store, tmp_path / "one", clock=clock, pack="always", delay_s=NEVER_S) as one,
        lake(store, tmp_path / "two", clock=clock, pack="never") as two,
    ):
        await one.names("d")
        names = ["d/f-z", "d/q"]
        for name in names:
            await one.close(await create(one, name, b"ours"))
            await two.close(await create(two, name, b"theirs"))
        await one.fs.make_durable()
        assert told(one)["conflicts"] == 2
        assert [await one.read(name) for name in names] == [store.data(name) for name in names] == [b"theirs"] * 2


async def test_pack_of_files_created_with_o_excl_costs_one_list(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("d/other", b"x")
    async with writing_back(store, tmp_path, pack="auto", delay_s=NEVER_S) as m:
        assert await m.names("d") == ["other"]
        for number in range(50):
            await m.close(await m.create(f"d/{number}", EXCLUSIVE))
        before = len(store.requests)
        await m.fs.make_durable()
        assert [request.what for request in store.requests[before:]] == ["list", "put"]


@pytest.mark.parametrize(("size", "is_rewritten"), [(LARGE, False), (15, False), (15, True)])
async def test_acknowledged_file_leaves_the_name_that_was_taken_after_a_restart(
    tmp_path: Path, size: int, is_rewritten: bool
) -> None:
    """The other client's file comes after the restarted mount has looked what lies there."""
    store, clock = MemoryStore(), Clock()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "one", clock=clock, delay_s=NEVER_S) as one:
        assert await one.names() == []
        await one.close(await create(one, "f", noise(1, size)))
        if is_rewritten:
            await rewrite(one, "f", noise(1, size))
        died = die(tmp_path / "one", tmp_path / "died")
    outage.away = False
    pause = outage.then = Pause(lambda request: request.key == "f" and request.what in ("put", "complete_multipart"))
    async with writing_back(store, died, clock=clock) as again, lake(store, tmp_path / "two", clock=clock) as two:
        await reached(pause.reached)
        clock.advance(5)
        outage.then = lambda _request, _when: None
        await two.write("f", b"theirs")
        pause.resume()
        await stored(again)
        await tell(again, two)
        clock.advance(2 * TTL_S)
        for each in (again, two):
            beside = [name for name in await each.names() if name.startswith("f.conflict-")]
            assert await each.tree() == {"f": b"theirs", beside[0]: noise(1, size)}


@pytest.mark.parametrize("is_renamed", [True, False])
@pytest.mark.parametrize("delay_s", [0.0, NEVER_S])
async def test_rename_of_an_acknowledged_file_takes_along_what_another_node_put_at_its_name(
    tmp_path: Path, delay_s: float, is_renamed: bool
) -> None:
    """Without a delay an attempt to store the file has begun at its earlier name."""
    store, clock = MemoryStore(), Clock()
    async with (
        writing_back(store, tmp_path / "one", clock=clock, delay_s=delay_s) as one,
        lake(store, tmp_path / "two", clock=clock, pack="never") as two,
    ):
        assert await one.names() == []
        ours = await create(one, "f", b"ours")
        if is_renamed:
            await two.write("before", b"theirs")
            await two.rename("before", "f")
        else:
            await two.close(await create(two, "f", b"theirs"))
        await tell(two, one)
        await one.close(ours)
        await one.rename("f", "g")
        await (one.fs.make_durable() if delay_s else stored(one))
        await tell(one, two)
        clock.advance(2 * TTL_S)
        (beside,) = [name for name in await one.names() if ".conflict-" in name]
        for each in (one, two):
            assert await each.tree() == {"g": b"theirs", beside: b"ours"}
