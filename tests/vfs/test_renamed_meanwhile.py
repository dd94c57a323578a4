"""Renames over a name whose bytes are just being stored, or have just been."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.objects.deletion_queue import CAUGHT_UP_S
from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.errors import CacheError, CacheFull, FileError, LakeError, StagingFull, Unavailable
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.staging.staging_area import Staging
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.ops import rename_preparation
from lakefs_fuse.vfs.ops.rename import RENAME_EXCHANGE
from tests.memory_store import Failures, MemoryStore, Pause, Request, When, pause_of_commits
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import NEVER_S, NS, TTL_S, Clock, Lake, entries_of, lake, two_lakes
from tests.vfs.writing_back import KIB, LARGE, PART, Outage, die, rewrite, stored, until, writing_back


async def test_a_rename_over_a_file_that_is_being_stored_knows_what_became_of_it(tmp_path: Path) -> None:
    """The name was renamed to before, and that is in the same commit: it is not pending any more when the rename gets
    its turn, and must not make the newer bytes look older than that commit."""
    store = MemoryStore()
    outage = Outage(store, away=False)
    pause = pause_of_commits()
    async with writing_back(store, tmp_path / "cache", pack="always") as m:
        await m.write("a", b"first")
        await m.fs.make_durable()
        await m.sync()
        outage.away = True
        await m.rename("a", "hot")
        await m.write("b", b"second")
        await m.rename("b", "hot")
        store.hook = pause
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.make_durable)
            await reached(pause.reached)
            await m.write("c", b"third")
            nursery.start_soon(m.rename, "c", "hot")
            await trio.sleep(0.05)
            pause.resume()
        await m.fs.make_durable()
        await m.sync()
        await until(lambda: not m.fs.unfinished())
        assert await m.tree() == {"hot": b"third"}
    async with writing_back(store, tmp_path / "cache", pack="always") as m:
        assert await m.tree() == {"hot": b"third"}
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"hot": b"third"}


async def test_a_rename_over_a_file_that_is_being_stored_by_itself_is_newer(tmp_path: Path) -> None:
    """The file was opened when its own rename was journaled, and is in a commit since: it is not pending any more when
    its bytes are stored, and must not make those that the rename brings look older than anything that is."""
    store, clock = MemoryStore(), Clock()
    pause = Pause(lambda request: request.what == "complete_multipart")
    async with writing_back(store, tmp_path / "cache", clock=clock, pack="always", pack_threshold_bytes=KIB) as m:
        await m.write("a", bytes(LARGE))
        await m.fs.make_durable()
        await m.sync()
        await m.rename("a", "f")
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, 0, b"changed")
        await m.sync()
        store.hook = pause
        await m.close(handle)
        await reached(pause.reached)
        await m.write("b", b"newest")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.rename, "b", "f")
            await trio.sleep(0.05)
            pause.resume()
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"f": b"newest"}
        dead = die(tmp_path / "cache", tmp_path / "dead")
    clock.advance(2 * TTL_S)
    async with writing_back(store, dead, clock=clock, pack="always") as m:
        assert await m.tree() == {"f": b"newest"}
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"f": b"newest"}


@pytest.mark.parametrize("pack", ["always", "never"])
@pytest.mark.parametrize("durability", ["writeback", "close"])
async def test_a_directory_is_renamed_with_a_new_file_over_a_stored_one(
    tmp_path: Path, durability: str, pack: str
) -> None:
    """The new file is not stored yet: it replaces nothing at its new path, and what it replaced at the old one is gone
    from there, too."""
    store, clock = MemoryStore(), Clock()
    async with writing_back(store, tmp_path / "cache", clock=clock, pack=pack, durability=durability) as m:
        await m.mkdir("d")
        await m.write("d/a", b"first")
        await m.fs.make_durable()
        await m.sync()
        await m.rename("d/a", "d/f")
        handle = await m.create("d/new")
        await m.fs.write(handle, 0, b"newest")
        await m.rename("d/new", "d/f")
        await m.rename("d", "e")
        await m.sync()
        await m.close(handle)
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"e": None, "e/f": b"newest"}
        clock.advance(2 * TTL_S)
        assert await m.tree() == {"e": None, "e/f": b"newest"}
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"e": None, "e/f": b"newest"}


async def test_a_new_file_stays_where_another_node_renames_what_was_there_before(tmp_path: Path) -> None:
    """It took the place of a rename that is not committed yet, which the other node could not know of."""
    store, clock = MemoryStore(), Clock()
    async with (
        writing_back(store, tmp_path / "one", clock=clock, pack="always") as one,
        lake(store, tmp_path / "two", clock=clock, pack="always") as two,
    ):
        await two.write("f", b"old")
        await one.poll()
        await one.write("a", b"first")
        await one.fs.make_durable()
        await one.sync()
        await one.rename("a", "f")
        handle = await one.create("new")
        await one.fs.write(handle, 0, b"newest")
        await one.rename("new", "f")
        await two.rename("f", "x")
        await one.poll()
        await one.sync()
        await one.close(handle)
        await one.fs.make_durable()
        clock.advance(2 * TTL_S)
        await two.poll()
        for each in (one, two):
            assert await each.tree() == {"f": b"newest", "x": b"old"}
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"f": b"newest", "x": b"old"}


@pytest.mark.parametrize("size", [10, LARGE])
@pytest.mark.parametrize("pack", ["always", "never"])
async def test_a_file_created_exclusively_stays_where_another_node_renames_its_own(
    tmp_path: Path, pack: str, size: int
) -> None:
    """Both created the name, and the other node renamed its file: that is another one, whose bytes must stay."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack=pack) as (one, two):
        assert await one.names() == []
        handle = await one.create("f", os.O_RDWR | os.O_EXCL)
        await one.fs.write(handle, 0, bytes(size))
        await two.write("f", b"other")
        await two.rename("f", "g")
        await two.sync()
        await one.poll()
        await one.close(handle)
        await one.fs.sync_names()
        clock.advance(2 * TTL_S)
        await two.poll()
        for each in (one, two):
            assert await each.tree() == {"f": bytes(size), "g": b"other"}
    async with lake(store, tmp_path / "third", clock=clock) as other:
        assert await other.tree() == {"f": bytes(size), "g": b"other"}


async def test_what_a_listing_shows_is_not_said_again_over_a_rename(tmp_path: Path) -> None:
    """A name that had been removed is a plain object again, which another node sees before it hears that the writer
    has put another file in its place since: what it says of the name must not be newer than that."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="auto") as (one, two):
        for change in (partial(two.write, "f", b"first"), partial(two.unlink, "f"), partial(two.write, "g", b"kept")):
            await change()
            await two.sync()
        await one.poll()
        clock.advance(5)
        await two.write("f", b"second")
        clock.advance(TTL_S + 1)
        assert await one.names() == ["f", "g"]
        clock.advance(1)
        await two.rename("g", "f")
        clock.advance(1)
        await one.sync()
        await two.poll()
        await two.sync()
        await one.poll()
        clock.advance(TTL_S + 1)
        assert await one.tree() == await two.tree() == {"f": b"kept"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": b"kept"}


@pytest.mark.parametrize("listed", [True, False])
async def test_what_was_stored_at_the_key_before_a_rename_is_not_seen_there_after_a_death(
    tmp_path: Path, listed: bool
) -> None:
    """Not even before the next mount has asked the store what became of it."""
    store, clock, data = MemoryStore(), Clock(), noise(1, LARGE)
    cache, dead = tmp_path / "cache", tmp_path / "dead"
    parts = Pause(lambda request: request.what == "upload_part")

    def dying(request: Request, when: When) -> None:
        if request.what == "complete_multipart" and when == "after":
            die(cache, dead)
            outage.away = True

    async with writing_back(store, cache, clock=clock) as m:
        if listed:
            await m.names()
        store.hook = parts
        await m.write("a", data)
        await reached(parts.reached)
        await m.rename("a", "b")
        outage = Outage(store, away=False)
        outage.then = dying
        parts.resume()
        await until(dead.exists)
    asked = Pause(lambda request: request.what == "head" and request.key == "a")
    store.hook = asked
    clock.advance(TTL_S + 1)
    async with writing_back(store, dead, clock=clock) as m:
        await reached(asked.reached)
        assert await m.names() == ["b"]
        asked.resume()
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"b": data}


async def test_rename_over_a_directory_that_another_node_renamed_leaves_it_usable(tmp_path: Path) -> None:
    async with two_lakes(MemoryStore(), tmp_path) as (one, two):
        for name in ("moved", "empty"):
            await one.mkdir(name)
        await one.sync()
        await two.poll()
        await two.names()
        await one.rename("empty", "elsewhere")
        await two.rename("moved", "empty")
        await two.poll()
        assert await two.names() == ["elsewhere", "empty"]
        assert await two.names("elsewhere") == []


async def refused(m: Lake, old: str, new: str) -> int:
    """The errno of a rename that is refused."""
    with pytest.raises(FileError) as raised:
        await m.rename(old, new)
    return raised.value.errno


@pytest.mark.parametrize("how", ["made by another program", "made empty by another program", "announced"])
async def test_rename_of_a_directory_over_one_that_gets_names_meanwhile_looks_into_that_first(
    tmp_path: Path, how: str
) -> None:
    """The kernel looks both names up again after ESTALE, and renames once more."""
    store, clock, codes = MemoryStore(), Clock(), list[int]()
    pause = Pause(lambda request: request.what == "list" and request.key == "src/")

    async def rename() -> None:
        codes.append(await refused(one, "src", "dst"))

    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.mkdir("src")
        await one.write("src/f", b"moves")
        if how == "announced":
            await one.mkdir("dst")
            await one.sync()
            await two.poll()
        assert "src" in await one.names()  # or a LIST of the root may be under way when it is asked for again
        store.hook = pause
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rename)
            await reached(pause.reached)
            if how == "announced":
                await two.write("dst/x", b"")
                await two.fs.make_durable()
                await one.poll()
            else:
                store.give("dst/" if how == "made empty by another program" else "dst/x")
                clock.advance(2 * TTL_S)
                assert await one.names() == ["dst", "src"]
            pause.resume()
        assert codes == [errno.ESTALE]
        if how == "made empty by another program":
            await one.rename("src", "dst")
            assert await one.tree() == {"dst": None, "dst/f": b"moves"}
        else:
            assert await refused(one, "src", "dst") == errno.ENOTEMPTY
            assert await one.tree() == {"dst": None, "dst/x": b"", "src": None, "src/f": b"moves"}


@pytest.mark.parametrize("is_clone", [False, True])
async def test_version_of_another_node_that_a_rename_or_clone_replaces_has_no_links(
    tmp_path: Path, is_clone: bool
) -> None:
    """This node hears of it after it has looked the names up; the one before lost its name to the other node."""
    store, clock, dropped = MemoryStore(), Clock(), list[int]()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.write("src", b"moves")
        await one.write("dst", b"first")
        await one.sync()
        await two.poll()
        first = (await one.found("dst")).inode
        clock.advance(1)
        await rewrite(two, "dst", b"second")
        await two.sync()
        clock.advance(CAUGHT_UP_S)
        assert (await one.found("dst")).inode == first
        one.fs.namespace.events.inode_dropped.append(dropped.append)
        if is_clone:
            await one.fs.clone("src", "dst", force=True)
        else:
            await one.rename("src", "dst")
        assert await one.read("dst") == b"moves"
        second = dropped[-1]
        assert dropped == [first, second]
        assert [one.fs.is_unlinked(inode) for inode in dropped] == [False, True]
        assert one.fs.entry(second).size == len(b"second")
        with pytest.raises(FileError) as raised:
            one.fs.entry(first)
        assert raised.value.errno == errno.ESTALE


async def test_file_that_another_node_makes_under_the_new_name_meanwhile_has_no_links_after_a_rename(
    tmp_path: Path,
) -> None:
    """The rename waits for its turn to commit; programs have the file open by then."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.write("src", b"moves")
        await one.sync()
        await two.poll()
        await one.mkdir("other")
        store.hook = pause = pause_of_commits()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.fs.sync_names)
            await reached(pause.reached)
            store.hook = lambda _request, _when: None
            nursery.start_soon(one.rename, "src", "dst")
            await trio.testing.wait_all_tasks_blocked(0.05)
            clock.advance(1)
            await two.write("dst", b"theirs")
            await two.sync()
            await one.poll()
            replaced = (await one.found("dst")).inode
            handle = await one.open("dst")
            clock.advance(1)
            pause.resume()
        assert await one.read("dst") == b"moves"
        assert one.fs.is_unlinked(replaced)
        assert await one.read_handle(handle) == b"theirs"
        await one.close(handle)
        assert one.fs.is_unlinked(replaced)
        assert one.fs.entry(replaced).size == len(b"theirs")


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_file_opened_while_another_is_being_renamed_over_it_is_not_stored(
    tmp_path: Path, durability: str
) -> None:
    """The kernel opens it: it has the inode. It holds WRITEs back until the rename is answered."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="always", durability=durability) as m:
        await m.write("src", b"moves")
        await m.write("dst", b"first")
        await m.fs.make_durable()
        await m.mkdir("other")
        store.hook = pause = pause_of_commits()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.sync_names)
            await reached(pause.reached)
            nursery.start_soon(m.rename, "src", "dst")
            await trio.testing.wait_all_tasks_blocked(0.05)
            handle = await m.open("dst", os.O_RDWR)
            pause.resume()
        await m.fs.write(handle, 0, b"F")
        assert await m.read_handle(handle) == b"First"
        await m.close(handle)
        await m.fs.make_durable()
        assert not m.fs.unfinished()
        assert m.fs.statistics()["files"] == {"in_use": 0}
        assert await m.tree() == {"dst": b"moves", "other": None}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"dst": b"moves", "other": None}


async def test_what_was_written_in_place_of_a_renamed_file_goes_along_though_it_is_written_again(
    tmp_path: Path,
) -> None:
    """The second version cannot lie at the key, which the renamed file uses by then: the first one stays there."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.write("f", b"first")
        await one.sync()
        await two.poll()
        assert await two.names() == ["f"]
        await one.rename("f", "g")
        await one.sync()
        handle = await two.open("f", os.O_RDWR)
        await two.fs.write(handle, 0, b"second")
        await two.fs.fsync(handle)
        await two.poll()
        await two.fs.write(handle, 0, b"third!")
        await two.close(handle)
        await two.parts.renamed.wait_adopted()
        await two.sync()
        await one.poll()
        assert await one.tree() == await two.tree() == {"f": b"third!", "g": b"second"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": b"third!", "g": b"second"}


async def test_adoption_of_a_file_whose_rename_is_held_comes_after_the_rename(tmp_path: Path) -> None:
    """The rename waits for a file that was acknowledged before it, and another node replaces the object meanwhile."""
    store, clock = MemoryStore(), Clock()
    async with (
        lake(store, tmp_path / "one", clock=clock, pack="never") as one,
        writing_back(store, tmp_path / "two", clock=clock) as two,
    ):
        await one.write("old", b"first")
        await one.sync()
        await two.poll()
        assert await two.read("old") == b"first"
        pause = Pause(lambda request: request.what == "put" and request.key == "acknowledged")
        store.hook = pause
        await two.write("acknowledged", b"before the rename")
        await two.rename("old", "new")
        clock.advance(1)
        await one.write("old", b"second")
        await one.sync()
        await two.poll()
        assert await two.parts.renamed.adopt("new")
        assert await two.read("new") == b"second"
        pause.resume()
        await two.fs.make_durable()
        await two.fs.sync_names()
        clock.advance(TTL_S + 1)
        await one.poll()
        wanted = {"acknowledged": b"before the rename", "new": b"second"}
        assert await one.tree() == await two.tree() == wanted
    async with lake(store, tmp_path / "three", clock=clock) as three:
        assert await three.tree() == wanted


async def test_a_commit_of_another_node_that_overtakes_ours_is_newer_here_too(tmp_path: Path) -> None:
    """It is polled while our PUT is under way: it has a later time, and meets the stamp of what is not committed."""
    store, clock = MemoryStore(), Clock()
    pause = pause_of_commits()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.write("f", b"first")
        await one.sync()
        await two.poll()
        await one.unlink("f")
        store.hook = pause
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.fs.sync_names)
            await reached(pause.reached)
            store.hook = lambda _request, _when: None
            clock.advance(0.1)
            await rewrite(two, "f", b"theirs")
            await two.sync()
            await one.poll()
            pause.resume()
        await one.poll()
        await two.poll()
        assert await one.tree() == await two.tree() == {"f": b"theirs"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"f": b"theirs"}


async def test_a_file_that_is_closed_while_a_rename_over_it_fails_keeps_its_bytes(tmp_path: Path) -> None:
    """Its name was about to go, so its close had nothing to store; then the name stayed."""
    store, is_away = MemoryStore(), False
    pause = pause_of_commits()

    def fail(request: Request, when: When) -> None:
        pause(request, when)
        if is_away and request.what in ("put", "head") and request.key.startswith(".lakefs/commits/"):
            raise Unavailable("the store is away")

    async with lake(store, tmp_path / "cache", pack="never") as m:
        await m.write("f", b"before")
        await m.write("g", b"other")
        await m.sync()
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, 0, b"closed")
        store.hook, is_away = fail, True

        async def refused() -> None:
            nonlocal is_away
            with pytest.raises(LakeError):
                await m.rename("g", "f")
            is_away = False

        async with trio.open_nursery() as nursery:
            nursery.start_soon(refused)
            await reached(pause.reached)
            nursery.start_soon(m.close, handle)
            await trio.sleep(0.05)
            pause.resume()
        await m.fs.make_durable()
        assert await m.tree() == {"f": b"closed", "g": b"other"}
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"f": b"closed", "g": b"other"}


async def test_a_file_that_is_renamed_while_it_is_changed_is_not_mixed_with_what_another_node_stored(
    tmp_path: Path,
) -> None:
    """The draft is a change of the version that was opened, and that is what is stored, though the row that is renamed
    names the other node's version by then."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.write("a", bytes(LARGE))
        await one.rename("a", "f")  # from now on commits tell of its versions
        await one.sync()
        await two.poll()
        handle = await one.open("f", os.O_RDWR)
        await one.read_handle(handle)
        await one.fs.write(handle, LARGE, b"appended")
        theirs = await two.open("f", os.O_RDWR)
        await two.fs.write(theirs, 0, b"theirs")
        await two.close(theirs)
        await two.sync()
        await one.poll()
        await one.rename("f", "g")
        await one.close(handle)
        await one.sync()
        assert await one.read("g") == bytes(LARGE) + b"appended"


async def test_file_that_an_exchange_brought_here_stays_where_another_node_renames_what_was_there_before(
    tmp_path: Path,
) -> None:
    """It is being written, and another file than the one that was renamed, whose bytes must stay."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        for name in "ab":
            await one.write(name, b"first  " + name.encode())
        await one.sync()
        await two.poll()
        assert await two.names() == ["a", "b"]
        handle = await one.open("a", os.O_RDWR)
        await one.rename("a", "b", RENAME_EXCHANGE)
        clock.advance(1)
        await two.rename("b", "c")
        await one.fs.write(handle, 0, b"SECOND")
        await one.poll()
        await one.close(handle)
        await one.sync()
        clock.advance(2 * TTL_S)
        await two.poll()
        for m in (one, two):
            assert await m.tree() == {"a": b"first  b", "b": b"SECOND a", "c": b"first  b"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"a": b"first  b", "b": b"SECOND a", "c": b"first  b"}


async def test_rename_does_not_follow_a_directory_that_another_node_renamed_meanwhile(tmp_path: Path) -> None:
    """It hears of that while it lists what is below: the name that it was given means nothing any more."""
    async with two_lakes(MemoryStore(), tmp_path) as (one, two):
        await one.mkdir("d")
        await one.sync()
        await two.poll()
        await two.names()
        await one.rename("d", "e")
        with pytest.raises(FileError) as raised:
            await two.rename("d", "f")
        assert raised.value.errno == errno.ENOENT
        await two.sync()
        await one.poll()
        assert await one.names() == await two.names() == ["e"]


@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE])
async def test_rename_into_a_directory_that_another_node_moved_below_the_renamed_one_is_refused(
    tmp_path: Path, flags: int
) -> None:
    """It hears of that while it lists what is below: nothing goes below itself."""
    async with two_lakes(MemoryStore(), tmp_path) as (one, two):
        await one.mkdir("d")
        await one.mkdir("e")
        await one.write("d/f", b"stays")
        if flags == RENAME_EXCHANGE:
            await one.mkdir("e/x")
        await one.sync()
        await two.poll()
        await two.tree()
        await one.rename("e", "d/y")
        with pytest.raises(FileError) as raised:
            await two.rename("d", "e/x", flags)
        assert raised.value.errno == errno.EINVAL
        await two.sync()
        await one.poll()
        expected = {"d": None, "d/f": b"stays", "d/y": None, **({"d/y/x": None} if flags else {})}
        assert await one.tree() == await two.tree() == expected


@pytest.mark.parametrize("how", ["create", "exclusive", "mkdir", "symlink", "link"])
async def test_name_made_while_another_node_renames_its_directory_is_in_the_renamed_one(
    tmp_path: Path, how: str
) -> None:
    """The node hears of the rename while it looks whether the name is free, and what is at the earlier path is another
    program's file."""
    store, clock = MemoryStore(), Clock()
    pause = Pause(lambda request: request.what == "list" and request.key.startswith("d/"))
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.mkdir("d")
        await one.write("source", b"linked")
        await one.sync()
        await two.poll()
        parent, source = (await two.found("d")).inode, (await two.found("source")).inode
        ids = os.getuid(), os.getgid()

        async def make() -> None:
            match how:
                case "create" | "exclusive":
                    flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if how == "exclusive" else 0)
                    handle, _ = await two.fs.create(parent, b"new", 0o644, flags, *ids)
                    await two.fs.write(handle, 0, b"made")
                    await two.close(handle)
                case "mkdir":
                    await two.fs.mkdir(parent, b"new", 0o755, *ids)
                case "symlink":
                    await two.fs.symlink(parent, b"new", b"source", *ids)
                case "link":
                    await two.fs.link(source, parent, b"new")

        store.hook = pause
        async with trio.open_nursery() as nursery:
            nursery.start_soon(make)
            await reached(pause.reached)
            store.hook = lambda _request, _when: None
            await one.rename("d", "e")
            store.put("d/new", b"another program's")
            await two.poll()
            pause.resume()
        made = {"mkdir": None, "symlink": "source", "link": b"linked"}.get(how, b"made")
        for m in (two, one):
            await m.sync()
        for m in (two, one):
            await m.poll()
        clock.advance(2 * TTL_S)
        tree = {"d": None, "d/new": b"another program's", "e": None, "e/new": made, "source": b"linked"}
        assert await one.tree() == await two.tree() == tree


async def test_rename_over_a_directory_in_which_a_file_was_closed_meanwhile_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "list" and request.key.startswith("d"))
    async with lake(store, tmp_path / "cache") as m:
        for name in ("d", "empty"):
            await m.mkdir(name)
        await m.write("d/f", b"moves")
        await m.sync()
        store.hook = pause
        async with trio.open_nursery() as nursery:

            async def refused() -> None:
                with pytest.raises(FileError) as raised:
                    await m.rename("d", "empty")
                assert raised.value.errno == errno.ENOTEMPTY

            nursery.start_soon(refused)
            await reached(pause.reached)
            store.hook = lambda _request, _when: None
            await m.write("empty/g", b"closed")
            pause.resume()
        assert await m.tree() == {"d": None, "d/f": b"moves", "empty": None, "empty/g": b"closed"}


@pytest.mark.parametrize("is_heard", [True, False])
@pytest.mark.parametrize("is_below", [True, False])
async def test_rename_of_a_file_being_written_whose_version_was_removed_shows_nothing_of_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_below: bool, is_heard: bool
) -> None:
    """Of the removal this node hears before the rename, or by the poll that comes with it."""
    monkeypatch.setattr(rename_preparation, "CAUGHT_UP_S", 0.0)
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        await one.mkdir("d")
        await one.write("d/f", b"removed")
        await one.sync()
        handle = await one.open("d/f", os.O_RDWR)
        await one.fs.write(handle, 0, b"newer")
        await two.poll()
        await two.unlink("d/f")
        await two.fs.sync_names()
        if is_heard:
            await one.poll()
        names = ("d", "e") if is_below else ("d/f", "e")
        try:
            await one.rename(*names)
        except FileError as error:  # the kernel looks the name up again
            assert error.errno == errno.ESTALE and not is_heard
            await one.rename(*names)
        path = "e/f" if is_below else "e"
        assert await one.read(path) == b"newered"
        await two.poll()
        clock.advance(2 * TTL_S)
        assert await two.tree() == ({"e": None} if is_below else {"d": None})
        await one.close(handle)
        await one.sync()
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
            assert await m.read(path) == b"newered"


async def test_rename_of_a_file_being_written_whose_removed_bytes_were_put_again_leaves_no_old_name(
    tmp_path: Path,
) -> None:
    """Another program put them there, long after the removal."""
    store, clock = MemoryStore(), Clock()
    store.equal_bytes_have_equal_etags = True
    async with writing_back(store, tmp_path / "cache", clock=clock, pack="never") as m:
        await m.write("f", b"bytes")
        await m.fs.make_durable()
        await m.unlink("f")
        await m.fs.make_durable()
        clock.advance(10)
        store.give("f", b"bytes")
        clock.advance(2 * TTL_S)
        assert await m.names() == ["f"]
        outage = Outage(store)
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, 0, b"BYTES")
        await m.close(handle)
        await m.rename("f", "g")
        outage.away = False
        await m.fs.make_durable()
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"g": b"BYTES"}


@pytest.mark.parametrize("is_deleted", [True, False])
async def test_rename_of_a_file_being_written_whose_object_is_not_there_any_more_names_no_object(
    tmp_path: Path, is_deleted: bool
) -> None:
    """Another node replaced the version in place, and removed its own: no commit names the first."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock) as (one, two):
        store.give("d/f", b"first")
        assert await one.names("d") == await two.names("d") == ["f"]
        handle = await one.open("d/f", os.O_RDWR)
        await one.fs.write(handle, 0, b"newer")
        await rewrite(two, "d/f", b"second")
        await two.unlink("d/f")
        await two.fs.sync_names()
        if is_deleted:
            store.take("d/f")
        await one.poll()
        clock.advance(2 * TTL_S)
        assert await one.names("d") == ["f"]
        await one.rename("d", "e")
        await two.poll()
        clock.advance(2 * TTL_S)
        assert await two.tree() == {"e": None}
        assert await one.read("e/f") == b"newer"


def fail_once_to_journal_a_change_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    enqueue, failures = Committer.enqueue, [CacheError("the disk is full")]

    def enqueue_or_fail(self: Committer, change: Change, batch: Batch | None = None) -> None:
        if change.ahead and failures:
            raise failures.pop()
        enqueue(self, change, batch)

    monkeypatch.setattr(Committer, "enqueue", enqueue_or_fail)


async def fsync_around(
    store: MemoryStore, clock: Clock, writer: Lake, handle: int, rename: Callable[[], Awaitable[None]]
) -> None:
    """Sync a file while another node renames: that commit is the earlier one, and the writer hears of it while its own
    is on its way."""
    renaming, packing = pause_of_commits(), pause_of_commits()
    async with trio.open_nursery() as packer:
        async with trio.open_nursery() as renamer:
            store.hook = renaming
            renamer.start_soon(rename)
            await reached(renaming.reached)
            clock.advance(0.1)
            store.hook = packing
            packer.start_soon(writer.fs.fsync, handle)
            await reached(packing.reached)
            renaming.resume()
        await writer.poll()
        packing.resume()


@pytest.mark.parametrize("is_disk_full", [False, True])
async def test_version_that_is_packed_while_another_node_renames_its_directory_goes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_disk_full: bool
) -> None:
    """The rename is the earlier commit, of which the writer hears while its own is on its way: under the old name this
    says what belongs to the new one. Where that cannot be journaled the version is stored all the same, and the earlier
    name stays until it is removed."""
    if is_disk_full:
        fail_once_to_journal_a_change_ahead(monkeypatch)
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.mkdir("d")
        await one.write("d/f", b"first")
        await one.sync()
        await two.poll()
        handle = await one.open("d/f", os.O_RDWR)
        await one.fs.write(handle, 0, b"second")
        await fsync_around(store, clock, one, handle, partial(two.rename, "d", "e"))
        assert ("under earlier names, too" in caplog.text) == is_disk_full
        await one.fs.write(handle, 0, b"third!")
        await one.close(handle)
        await one.sync()
        await two.poll()
        if is_disk_full:
            await one.unlink("d/f")
            await one.rmdir("d")
            await one.sync()
            await two.poll()
        assert await one.tree() == await two.tree() == {"e": None, "e/f": b"third!"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"e": None, "e/f": b"third!"}


@pytest.mark.parametrize("pack_of_other", ["always", "never"])
@pytest.mark.parametrize("is_exchange", [False, True])
async def test_version_that_is_packed_while_another_directory_comes_to_its_path_leaves_the_file_there(
    tmp_path: Path, is_exchange: bool, pack_of_other: str
) -> None:
    """The other node's commits are earlier, and the writer hears of them while its own is on its way: this names the
    version by the path at which another file is now, which is back when the version has gone along."""
    store, clock = MemoryStore(), Clock()
    async with (
        lake(store, tmp_path / "one", clock=clock, pack="always") as one,
        lake(store, tmp_path / "two", clock=clock, pack=pack_of_other) as two,
    ):
        for directory in ("d", "other"):
            await two.mkdir(directory)
            await two.write(f"{directory}/f", directory.encode())
        await two.sync()
        await one.poll()
        assert await one.tree() == await two.tree()
        if not is_exchange:  # the first of two renames, of which the writer does not hear yet
            await two.rename("d", "e")
        moved = "other" if is_exchange else "e"
        handle = await one.open("d/f", os.O_RDWR | os.O_TRUNC)
        await one.fs.write(handle, 0, b"second")
        rename = partial(two.rename, "other", "d", RENAME_EXCHANGE if is_exchange else 0)
        await fsync_around(store, clock, one, handle, rename)
        await one.close(handle)
        expected = {"d": None, "d/f": b"other", moved: None, f"{moved}/f": b"second"}
        for _ in range(2):
            await one.sync()
            await two.sync()
            await one.poll()
            await two.poll()
        assert await one.tree() == expected
        assert await two.tree() == expected
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


@pytest.mark.parametrize("order", ["ab", "ba"])
@pytest.mark.parametrize("gone", ["", "a", "b"])
async def test_versions_that_are_packed_while_their_names_are_exchanged_change_places(
    tmp_path: Path, order: str, gone: str
) -> None:
    """One commit names each by the path that the other has by then. A third node, which has not heard of the exchange,
    has renamed one of the files away, so nothing but the other version is at its name."""
    store, clock = MemoryStore(), Clock()
    pause, packing = pause_of_commits(), pause_of_commits()
    async with (
        two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two),
        lake(store, tmp_path / "three", clock=clock, pack="always") as three,
    ):
        for name in "ab":
            await two.write(name, name.encode())
        await two.sync()
        await one.poll()
        await three.poll()
        handles = [await one.open(name, os.O_RDWR | os.O_TRUNC) for name in order]
        for name, handle in zip(order, handles, strict=True):
            await one.fs.write(handle, 0, b"new " + name.encode())
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as renamer:
                store.hook = pause
                renamer.start_soon(two.rename, "a", "b", RENAME_EXCHANGE)
                await until(partial(is_sent, store, commits_sent(store) + 1))
                clock.advance(0.1)
                if gone:
                    renamer.start_soon(three.rename, gone, "c")
                    await until(partial(is_sent, store, commits_sent(store) + 1))
                    clock.advance(0.1)
                store.hook = packing
                for handle in handles:
                    nursery.start_soon(one.fs.fsync, handle)
                await reached(packing.reached)
                pause.resume()
            await one.poll()
            packing.resume()
        expected = {"a": b"new b", "b": b"new a"} | ({"c": gone.encode()} if gone else {})
        for name, handle in zip(order, handles, strict=True):
            assert bytes(await one.fs.read(handle, 0, 10)) == b"new " + name.encode()
            await one.close(handle)
        for _ in range(2):
            for m in (one, two, three):
                await m.sync()
                await m.poll()
        for m in (one, two, three):
            assert await m.tree() == expected
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == expected


async def test_version_that_is_packed_while_another_node_removes_the_file_does_not_bring_back_the_one_before(
    tmp_path: Path,
) -> None:
    """The removal is the later commit, of which the writer hears while its own is on its way."""
    store, clock = MemoryStore(), Clock()
    pause = pause_of_commits()
    async with two_lakes(store, tmp_path, clock=clock, pack="always") as (one, two):
        await one.write("f", b"first")
        await one.sync()
        await two.poll()
        handle = await two.open("f", os.O_RDWR)
        await two.fs.write(handle, 0, b"second")
        async with trio.open_nursery() as nursery:
            store.hook = pause
            nursery.start_soon(two.fs.fsync, handle)
            await reached(pause.reached)
            store.hook = lambda _request, _when: None
            clock.advance(0.1)
            await one.unlink("f")
            await one.sync()
            await two.poll()
            pause.resume()
        assert await two.tree() == {}
        await two.close(handle)
        await one.poll()
        assert await one.tree() == await two.tree() == {}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {}


@pytest.mark.parametrize("is_heard_of", [True, False])
async def test_file_renamed_during_its_upload_leaves_what_another_node_made_at_its_earlier_name(
    tmp_path: Path, is_heard_of: bool
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        handle = await one.create("a")
        await one.fs.write(handle, 0, noise(1, LARGE))
        await until(store.parts_sent)
        await one.rename("a", "b")
        await two.write("a", b"theirs")
        await two.sync()
        if is_heard_of:
            await one.poll()
        await one.close(handle)
        await one.sync()
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
            assert await m.tree() == {"a": b"theirs", "b": noise(1, LARGE)}
        assert not store.uploads


async def test_conflict_of_a_version_leaves_the_other_file_alone_though_the_next_one_is_uploaded_there(
    tmp_path: Path,
) -> None:
    """Both versions get the name of the conflict, and an upload of the second had begun at the key of the first."""
    store, clock = MemoryStore(), Clock()
    pause = Pause(lambda request: request.what == "put" and request.key == "f")
    async with (
        writing_back(store, tmp_path / "one", clock=clock) as one,
        lake(store, tmp_path / "two", clock=clock, pack="never") as two,
    ):
        await one.names()
        handle = await one.create("f", os.O_RDWR | os.O_EXCL)
        await two.write("f", b"theirs")
        store.hook = pause
        await one.fs.write(handle, 0, b"first")
        await one.close(handle)
        await reached(pause.reached)
        await rewrite(one, "f", noise(1, LARGE))
        await until(store.parts_sent)
        pause.resume()
        await stored(one)
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
        kept = [name for name in await two.names() if name.startswith("f.conflict-")]
        assert await two.tree() == {"f": b"theirs", kept[0]: noise(1, LARGE)}


async def test_file_renamed_while_its_earlier_name_is_found_taken_has_the_next_one(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    pause = Pause(lambda request: request.what == "put" and request.key == "f")
    async with (
        writing_back(store, tmp_path / "one", clock=clock) as one,
        lake(store, tmp_path / "two", clock=clock, pack="never") as two,
    ):
        await one.names()
        handle = await one.create("f", os.O_RDWR | os.O_EXCL)
        await two.write("f", b"theirs")
        await one.fs.write(handle, 0, b"mine")
        store.hook = pause
        await one.close(handle)
        await reached(pause.reached)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.rename, "f", "g")
            await trio.testing.wait_all_tasks_blocked(0.05)
            pause.resume()
        await stored(one)
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
        assert await one.tree() == await two.tree() == {"f": b"theirs", "g": b"mine"}


def _is_commit_of(node: Lake, request: Request) -> bool:
    return request.what == "put" and request.key.startswith(COMMITS) and str(node.commits()["writer"]) in request.key


async def test_file_renamed_while_its_upload_begins_takes_the_place_of_its_own_object(tmp_path: Path) -> None:
    """What another node had stored in place of the name, and this file was then written over: nothing stays of it. The
    other has told nobody of it: else it would have the name until the file is stored."""
    store, clock = MemoryStore(), Clock()
    back = partial(writing_back, store, clock=clock)
    async with back(tmp_path / "one") as one, back(tmp_path / "two") as two:
        await two.write("name", b"before")
        await two.fs.make_durable()
        await two.sync()
        await one.poll()
        handle = await one.create("a")
        await one.fs.write(handle, 0, b"first")
        await one.fs.fsync(handle)
        await one.rename("a", "name")
        await rewrite(two, "name", b"of another node")
        untold = Failures(partial(_is_commit_of, two), Unavailable("away"), count=1000)
        store.hook = untold
        await two.fs.make_durable("name")
        await one.sync()
        await two.poll()
        await one.poll()
        await one.fs.write(handle, 0, noise(1, LARGE))
        pause = Pause(lambda request: request.what == "create_multipart", when="after")

        def hold(request: Request, when: When) -> None:
            untold(request, when)
            pause(request, when)

        store.hook = hold
        await one.close(handle)
        await reached(pause.reached)
        await one.rename("name", "renamed")
        pause.resume()
        await one.sync()
        store.hook = lambda _request, _when: None
        await two.sync()
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
            assert await m.tree() == {"renamed": noise(1, LARGE)}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"renamed": noise(1, LARGE)}


@pytest.mark.parametrize("is_taken", [True, False])
async def test_file_larger_than_staging_that_was_renamed_replaces_its_own_object_alone(
    tmp_path: Path, is_taken: bool
) -> None:
    """Its bytes are in its upload only, which is completed without a condition: what lies there is asked for first."""
    store, clock = MemoryStore(), Clock()
    data, failed = noise(1, 30 * PART), list[Request]()

    def lose_one_answer(request: Request, when: When) -> None:
        if request.what == "complete_multipart" and when == "after" and not failed:
            failed.append(request)
            raise Unavailable("the answer is lost")

    at_once = partial(lake, store, clock=clock, pack="never", retry_timeout_s=0.0)
    async with (
        at_once(tmp_path / "one", staging_bytes_max=16 * PART) as one,
        at_once(tmp_path / "two") as two,
    ):
        handle = await one.create("a")
        for offset in range(0, len(data), PART):
            await one.fs.write(handle, offset, data[offset : offset + PART])
        await one.rename("a", "b")
        if is_taken:
            await two.write("a", b"theirs")
            with pytest.raises(FileError, match="move those objects away") as error:
                await one.fs.fsync(handle)
            assert error.value.errno == errno.EEXIST
            await two.rename("a", "c")
            await one.poll()
        else:
            store.hook = lose_one_answer
            with pytest.raises(LakeError):
                await one.fs.fsync(handle)
            assert failed
        await one.fs.fsync(handle)
        await one.close(handle)
        await one.sync()
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
            assert await m.tree() == ({"c": b"theirs"} if is_taken else {}) | {"b": data}


def commits_sent(store: MemoryStore) -> int:
    return sum(each.what == "put" and each.key.startswith(".lakefs/commits/") for each in list(store.requests))


def is_sent(store: MemoryStore, count: int) -> bool:
    return commits_sent(store) == count


@pytest.mark.parametrize("pack", ["always", "never"])
@pytest.mark.parametrize("first", [0, 1])
async def test_directories_that_two_nodes_rename_into_each_other_keep_their_files(
    tmp_path: Path, pack: str, first: int
) -> None:
    """Neither had heard of the other's rename: both happen, and no directory is below itself."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack=pack) as (one, two):
        for path in ("a", "a/below", "b", "b/below"):
            await one.mkdir(path)
            await one.write(f"{path}/f", path.encode())
        await one.fs.sync_names()
        await two.poll()
        store.hook = pause = pause_of_commits()
        sent = commits_sent(store)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.rename, "a", "b/a")
            await until(lambda: commits_sent(store) == sent + 1)
            nursery.start_soon(two.rename, "b", "a/b")
            await until(lambda: commits_sent(store) == sent + 2)
            pause.resume()
        expected: dict[str, bytes] = {}
        for path in ("a", "b"):
            other = "b" if path == "a" else "a"
            expected |= {f"{other}/{path}/f": path.encode(), f"{other}/{path}/below/f": f"{path}/below".encode()}
        for m in ((one, two), (two, one))[first]:
            await m.fs.sync_names()
        clock.advance(TTL_S + 1)
        async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
            for m in (one, two, fresh):
                await m.poll()
                assert {path: data for path, data in (await m.tree()).items() if data is not None} == expected


@pytest.mark.parametrize("pack", ["always", "never"])
@pytest.mark.parametrize("targets", [("x", "y"), ("x", "x")], ids=["different names", "the same name"])
async def test_directory_that_two_nodes_rename_has_all_files_under_each_new_name(
    tmp_path: Path, pack: str, targets: tuple[str, str]
) -> None:
    """Neither had heard of the other's rename: both succeed. Under different names the files are separate ones."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack=pack) as (one, two):
        for path in ("d", "d/below"):
            await one.mkdir(path)
            await one.write(f"{path}/f", path.encode())
        await one.write("single", b"single")
        await one.fs.sync_names()
        await two.poll()
        for source, ends in {"d": targets, "single": [f"{target}-file" for target in targets]}.items():
            store.hook = pause = pause_of_commits()
            async with trio.open_nursery() as nursery:
                for m, target in zip((one, two), ends, strict=True):
                    count = commits_sent(store) + 1
                    nursery.start_soon(m.rename, source, target)
                    await until(partial(is_sent, store, count))
                pause.resume()
        expected: dict[str, bytes | None] = {}
        for target in targets:
            expected |= {target: None, f"{target}/f": b"d", f"{target}/below": None, f"{target}/below/f": b"d/below"}
            expected[f"{target}-file"] = b"single"
        clock.advance(TTL_S + 1)
        async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
            for m in (one, two, fresh):
                await m.poll()
                assert await m.tree() == expected
            await one.write("x/f", b"changed")
            await one.write("x-file", b"changed")
            await one.fs.sync_names()
            clock.advance(TTL_S + 1)
            for m in (one, two, fresh):
                await m.poll()
                assert await m.tree() == expected | {"x/f": b"changed", "x-file": b"changed"}


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_files_being_written_follow_their_directory_though_the_journal_refuses_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never", durability=durability) as (one, two):
        await one.mkdir("d")
        await one.write("d/before", b"x")
        await one.fs.make_durable()
        await two.poll()
        assert await two.names("d") == ["before"]  # or a listing in the background might poll before the test does
        handles = [await two.create(f"d/{number}") for number in range(3)]
        for handle in handles:
            await two.fs.write(handle, 0, b"new")
        await one.rename("d", "e")
        await one.fs.make_durable()
        with monkeypatch.context() as patch:
            fail_once_in(patch, FileTable, "moved")
            with pytest.raises(CacheFull):
                await two.poll()
        await two.poll()
        for handle in handles:
            await two.close(handle)
        await two.fs.make_durable()
        assert entries_of(store) == ["d/before", "e/0", "e/1", "e/2"]
        await two.sync()
        assert await two.names() == ["e"] and await two.names("e") == ["0", "1", "2", "before"]


@pytest.mark.parametrize("who", ["another node", "this node"])
async def test_files_being_written_follow_their_directory_though_staging_has_no_room_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    """They are in memory, and an fsync of each has failed, so that their records take them to the disk."""
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never", durability="writeback") as (one, two):
        await one.mkdir("d")
        await one.write("d/before", b"x")
        await one.fs.make_durable()
        await two.poll()
        handles = [await two.create(f"d/{number}") for number in range(3)]

        def fail(staging: Staging, draft_id: str, key: str) -> int:
            raise StagingFull("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(Staging, "create", fail)
            for handle in handles:
                await two.fs.write(handle, 0, b"new")
                with pytest.raises(StagingFull):
                    await two.fs.fsync(handle)
            if who == "this node":
                await two.rename("d", "e")
            else:
                await one.rename("d", "e")
                await one.fs.make_durable()
                with pytest.raises(CacheError, match="the disk is full"):
                    await two.poll()
        await two.poll()
        for handle in handles:
            await two.close(handle)
        await two.fs.make_durable()
        assert entries_of(store) == ["d/before", "e/0", "e/1", "e/2"]
        await two.sync()
        assert await two.names() == ["e"] and await two.names("e") == ["0", "1", "2", "before"]


def fail_once_in(patch: pytest.MonkeyPatch, cls: type, name: str) -> None:
    """The first write to the database during a call of a method fails for want of room."""
    method, commit, failed = getattr(cls, name), Database.commit, list[bool]()

    def fail(*_: object, **__: object) -> None:
        failed.append(True)
        patch.setattr(Database, "commit", commit)
        raise CacheFull("the disk is full")

    def call(self: object, *arguments: object) -> None:
        if not failed:
            patch.setattr(Database, "commit", fail)
        try:
            method(self, *arguments)
        finally:
            patch.setattr(Database, "commit", commit)

    patch.setattr(cls, name, call)


async def test_version_that_was_replaced_in_place_does_not_come_back_with_an_earlier_rename(tmp_path: Path) -> None:
    """The node that renames the directory listed the new version before its writer announced that, under a later
    time."""
    store, clock = MemoryStore(), Clock()
    ahead = Clock(clock.now_ns + NS)
    async with (
        lake(store, tmp_path / "mover", clock=clock, metadata_ttl_s=NEVER_S) as mover,
        lake(store, tmp_path / "writer", clock=ahead, pack="never", metadata_ttl_s=NEVER_S) as writer,
    ):
        await writer.mkdir("d")
        for again in range(2):  # a commit puts the second, because the first was removed
            await writer.write("d/f", b"before")
            await writer.sync()
            await writer.parts.committer.flush_announcements()
            await mover.poll()
            clock.advance(20)
            ahead.advance(20)
            if not again:
                await writer.unlink("d/f")
        await rewrite(writer, "d/f", b"in place")
        await mover.rename("d", "e")
        await writer.parts.committer.flush_announcements()
        for m in (mover, writer):
            await m.poll()
            assert await m.tree() == {"e": None, "e/f": b"in place"}


async def test_renamed_file_is_what_was_written_in_its_place_where_a_rename_over_it_is_withdrawn(
    tmp_path: Path,
) -> None:
    """The node that writes it renames another file to its new name. It hears of the rename before it has sent its own,
    which is the earlier one."""
    store, clock = MemoryStore(), Clock()
    pause = Pause(lambda request: request.what == "put" and request.key == "a")
    async with (
        lake(store, tmp_path / "one", clock=clock, pack="never") as one,
        writing_back(store, tmp_path / "two", clock=clock) as two,
    ):
        for name in "ab":
            await one.write(name, b"first " + name.encode())
        await one.sync()
        await two.poll()
        assert await two.names() == ["a", "b"]
        store.hook = pause
        await rewrite(two, "a", b"second")
        await reached(pause.reached)
        await two.rename("b", "c")
        clock.advance(1)
        await one.rename("a", "c")
        await two.poll()
        pause.resume()
        await two.sync()
        await two.parts.renamed.wait_adopted()
        for m in (one, two):
            await m.poll()
            clock.advance(2 * TTL_S)
            assert await m.tree() == {"c": b"second"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree() == {"c": b"second"}
