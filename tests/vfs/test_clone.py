"""Copies inside the lake: one commit, no byte through the node, and each name keeps its bytes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.errors import FileError, Unavailable
from lakefs_fuse.meta.barrier import About
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.vfs.ops import clone as cloning
from lakefs_fuse.vfs.ops import rename
from tests.fakes import delete_all_due
from tests.memory_store import Failures, MemoryStore, Pause, Request, When, pause_of_commits
from tests.upload.drafting import reached
from tests.vfs.lakes import TTL_S, Clock, Lake, lake, two_lakes
from tests.vfs.writing_back import rewrite

LARGE = b"large" * 40_000
"""More than one part."""


def bytes_moved(store: MemoryStore, since: int = 0) -> list[str]:
    """Requests that move bytes of files, from that request on."""
    moving = ("get", "put", "upload_part")
    some = [each for each in store.requests[since:] if each.what in moving]
    return [each.key for each in some if not each.key.startswith(".lakefs/commits/")]


async def filled(m: Lake) -> None:
    """A directory with a plain file, a large one, two packed ones, a link, and an empty directory."""
    await m.mkdir("d")
    await m.mkdir("d/empty")
    await m.write("d/plain", b"plain")
    await m.write("d/large", LARGE)
    await m.symlink("d/link", "plain")
    await m.setattr("d/plain", mode=0o600)
    await m.set_xattr("d/large", "user.about", b"large")
    await m.sync()


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_clone_of_directory_moves_no_byte_and_another_node_sees_all_of_it(tmp_path: Path, pack: str) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack=pack) as (one, two):
        await filled(one)
        before, said = await one.tree("d"), len(store.requests)
        await one.fs.clone("d", "copy")
        assert not bytes_moved(store, said)
        commits = [each for each in store.requests[said:] if each.what == "put"]
        assert len(commits) == 1
        wanted = {path.replace("d", "copy", 1): shown for path, shown in before.items()}
        assert await one.tree("copy") == wanted
        await two.poll()
        assert await two.tree("copy") == wanted
        assert (await two.getattr("copy/plain")).mode == 0o600
        assert await two.xattrs("copy/large") == {"user.about": b"large"}


@pytest.mark.parametrize("pack", ["never", "always"])
@pytest.mark.parametrize("victim", ["d", "copy"])
async def test_either_name_keeps_its_bytes_when_the_other_is_replaced_or_removed(
    tmp_path: Path, pack: str, victim: str
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack=pack) as (one, two):
        await filled(one)
        await one.fs.clone("d", "copy")
        await two.poll()
        kept = await one.tree("d" if victim == "copy" else "copy")
        await rewrite(two, f"{victim}/plain", b"other")
        await two.unlink(f"{victim}/large")
        await two.sync()
        await one.poll()
        clock.advance(1000)
        await one.sync()
        for node in (one, two):
            assert await node.tree("d" if victim == "copy" else "copy") == kept
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.tree("d" if victim == "copy" else "copy") == kept


async def test_shared_hidden_object_goes_with_its_last_name(tmp_path: Path) -> None:
    """A copy of a copy names the same hidden object."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never") as m:
        await m.write("f", LARGE)
        await m.fs.clone("f", "g")
        said = len(store.requests)
        await m.fs.clone("g", "h")
        assert not [each for each in store.requests[said:] if each.what == "copy"]
        await m.unlink("g")
        await m.sync()
        await delete_all_due(m.parts.deletions)
        assert await m.read("h") == LARGE
        await m.unlink("h")
        await m.sync()
        await delete_all_due(m.parts.deletions)
        assert not [key for key in store.objects if key.startswith(".lakefs/objects/")]
        assert await m.read("f") == LARGE


async def test_object_that_another_program_replaces_later_stays_in_the_copy(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never") as m:
        await m.write("f", b"first")
        await m.fs.clone("f", "g")
        clock.advance(100)
        store.give("f", b"second")
        clock.advance(100)
        assert await m.read("f") == b"second"
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.read("g") == b"first"


@pytest.mark.parametrize("source", ["d", "d/f"])
async def test_object_that_changes_while_it_is_copied_is_copied_again(tmp_path: Path, source: str) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await one.mkdir("d")
        await one.write("d/f", b"first")
        await one.sync()
        await two.poll()
        await two.names("d")
        store.hook = pause = Pause(lambda request: request.what == "copy")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.fs.clone, source, "copy")
            await trio.to_thread.run_sync(pause.reached.wait)
            await rewrite(two, "d/f", b"second")
            pause.resume()
        assert await one.read("copy" + "d/f".removeprefix(source)) == b"second"


async def test_clone_of_a_renamed_file_replaced_at_its_earlier_name_has_the_new_bytes(tmp_path: Path) -> None:
    """Its writer had not heard of the rename, so that this is the next version of the renamed file."""
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=300.0) as (one, two):
        await one.mkdir("d")
        await one.write("f", b"first")
        await one.fs.sync_names()
        await two.poll()
        handle = await two.open("f", os.O_RDWR | os.O_TRUNC)
        await one.rename("f", "d/g")
        await two.fs.write(handle, 0, b"second")
        await two.close(handle)
        await one.fs.clone("d", "copy")
        assert await one.read("d/g") == await one.read("copy/g") == b"second"


async def test_clone_in_a_read_only_mount_names_the_mount(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, read_only=True) as m:
        with pytest.raises(FileError, match=r"^/nowhere is mounted read-only$"):
            await m.fs.clone("d", "e")


async def test_clone_onto_a_name_is_refused_unless_forced(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, pack="never") as m:
        await filled(m)
        await m.write("f", b"other")
        for source, target, force, code in (
            ("d/plain", "f", False, errno.EEXIST),
            ("d", "f", True, errno.ENOTDIR),
            ("f", "d", True, errno.EISDIR),
            ("d/empty", "d", True, errno.ENOTEMPTY),
            ("d", "d/below", False, errno.EINVAL),
            ("f", "f", True, errno.EINVAL),
            ("none", "g", False, errno.ENOENT),
            ("f", "none/g", False, errno.ENOENT),
            ("", "g", False, errno.EINVAL),
        ):
            with pytest.raises(FileError) as raised:
                await m.fs.clone(source, target, force=force)
            assert raised.value.errno == code, (source, target)
        with pytest.raises(
            FileError,
            match=r"^/nowhere/d cannot be copied to /nowhere/d/below: its target would be in the copy itself$",
        ):
            await m.fs.clone("d", "d/below")
        with pytest.raises(FileError, match=r"^/nowhere/d cannot be copied to /nowhere: the root of the lake exists"):
            await m.fs.clone("d", "")
        await m.fs.clone("d/plain", "f", force=True)
        assert await m.read("f") == b"plain"
        await m.fs.clone("d", "d2")
        await m.fs.clone("d/empty", "d2/empty", force=True)


@pytest.mark.parametrize("has_names", [True, False])
@pytest.mark.parametrize("moment", ["while objects are copied", "before the commit"])
async def test_forced_clone_over_a_directory_that_another_client_makes_meanwhile_needs_an_empty_one(
    tmp_path: Path, has_names: bool, moment: str
) -> None:
    store, clock = MemoryStore(), Clock()

    def is_time(request: Request) -> bool:
        if moment == "while objects are copied":
            return request.what == "copy"
        return request.what == "list" and request.key.startswith(COMMITS) and bool(store.count("copy"))

    pause = Pause(is_time)

    def take_time_to_copy(request: Request, when: When) -> None:
        pause(request, when)
        if request.what == "copy" and when == "after":
            clock.advance(TTL_S)

    async with lake(store, tmp_path, clock=clock, pack="never") as m:
        await filled(m)
        errors = list[FileError]()

        async def clone_or_fail() -> None:
            try:
                await m.fs.clone("d", "copy", force=True)
            except FileError as error:
                errors.append(error)

        expected = await m.tree()
        store.hook = take_time_to_copy
        async with trio.open_nursery() as nursery:
            nursery.start_soon(clone_or_fail)
            await reached(pause.reached)
            store.give("copy/x" if has_names else "copy/", b"")
            clock.advance(2 * TTL_S)
            assert await m.names() == ["copy", "d"]
            pause.resume()
        assert [error.errno for error in errors] == ([errno.ENOTEMPTY] if has_names else [])
        if has_names:
            expected |= {"copy": None, "copy/x": b""}
        else:
            expected |= {path.replace("d", "copy", 1): shown for path, shown in expected.items()}
        assert await m.tree() == expected


async def test_forced_clone_over_a_directory_in_which_something_is_stored_meanwhile_is_refused(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never") as m:
        await filled(m)
        await m.mkdir("copy")
        await m.sync()
        expected = await m.tree()

        def store_another(request: Request, when: When) -> None:
            if request.what == "copy" and when == "after" and "copy/x" not in store.objects:
                store.give("copy/x")
                clock.advance(2 * TTL_S)

        store.hook = store_another
        with pytest.raises(FileError) as raised:
            await m.fs.clone("d", "copy", force=True)
        assert raised.value.errno == errno.ENOTEMPTY
        assert await m.tree() == expected | {"copy/x": b""}


async def test_forced_clone_over_an_open_file_leaves_its_reader_the_old_bytes(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never") as m:
        await m.write("f", b"first")
        await m.write("g", b"second")
        handle = await m.open("g")
        await m.fs.clone("f", "g", force=True)
        assert await m.read_handle(handle) == b"second"
        await m.close(handle)
        await m.sync()
        assert await m.read("g") == b"first"
        assert "g" not in store.objects


async def test_file_that_is_being_written_is_stored_first(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, durability="writeback") as m:
        await m.write("closed", b"closed")
        handle = await m.create("open")
        await m.fs.write(handle, 0, b"so far")
        await m.fs.clone("closed", "a")
        await m.fs.clone("open", "b")
        await m.fs.write(handle, 6, b" and on")
        await m.close(handle)
        assert [await m.read(name) for name in ("a", "b", "open")] == [b"closed", b"so far", b"so far and on"]


async def test_clone_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never", retry_timeout_s=0.0) as m:
        await filled(m)
        store.hook = Failures(lambda request: request.what == "put", Unavailable("away"), count=1000)
        with pytest.raises(Unavailable):
            await m.fs.clone("d", "copy")
        store.hook = lambda _request, _when: None
        await m.sync()
        assert "copy" not in await m.names()
        await delete_all_due(m.parts.deletions)
        assert not [key for key in store.objects if key.startswith(".lakefs/objects/")]


async def test_copies_of_a_clone_that_fails_are_discarded_in_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloning, "NAMES_PER_STEP", 8)
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never", retry_timeout_s=0.0) as m:
        await m.mkdir("d")
        for number in range(20):
            await m.write(f"d/{number}", b"%d" % number)
        await m.sync()
        schedule, batches = m.parts.deletions.schedule, list[int]()

        def count(*some: Deletion) -> None:
            batches.append(len(some))
            schedule(*some)

        monkeypatch.setattr(m.parts.deletions, "schedule", count)
        store.hook = Failures(lambda request: request.what == "put", Unavailable("away"), count=1000)
        with pytest.raises(Unavailable):
            await m.fs.clone("d", "copy")
        store.hook = lambda _request, _when: None
        assert batches == [8, 8, 4]
        await m.sync()
        assert not [key for key in store.objects if key.startswith(".lakefs/objects/")]


@pytest.mark.parametrize("delete_after_s", [0.0, 300.0])
async def test_clone_whose_answer_is_lost_is_there_with_its_bytes(tmp_path: Path, delete_after_s: float) -> None:
    store, clock, lost = MemoryStore(), Clock(), list[str]()
    async with lake(
        store, tmp_path, clock=clock, pack="never", retry_timeout_s=0.0, delete_after_s=delete_after_s
    ) as m:
        await m.write("f", b"first")

        def fails(request: Request) -> bool:
            if request.what == "put" and request.key.startswith(".lakefs/commits/"):
                lost.append(request.key)
            return bool(lost)

        store.hook = Failures(fails, Unavailable("lost"), count=1000, when="after")
        with pytest.raises(Unavailable):
            await m.fs.clone("f", "g")
        store.hook = lambda _request, _when: None
        clock.advance(1000)
        await m.sync()
        assert await m.tree() == {"f": b"first", "g": b"first"}
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.read("g") == b"first"


async def test_large_directory_is_copied_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rename, "NAMES_AT_ONCE", 8)
    monkeypatch.setattr(rename, "NAMES_PER_STEP", 3)
    store, turns_before_commit = MemoryStore(), 0
    async with two_lakes(store, tmp_path, pack="always") as (one, two):
        await one.mkdir("d")
        for number in range(20):
            await one.write(f"d/{number}", b"%d" % number)
        await one.sync()
        puts = store.count("put")

        async def count_turns() -> None:
            nonlocal turns_before_commit
            while store.count("put") == puts:
                turns_before_commit += one.fs.namespace.tree.barrier.is_up
                await trio.lowlevel.checkpoint()

        with trio.fail_after(20):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(count_turns)
                await one.fs.clone("d", "copy")
        assert turns_before_commit >= 20 // 3, "others have their turns while it is planned"
        await two.poll()
        for node in (one, two):
            assert await node.tree("copy") == {f"copy/{number}": b"%d" % number for number in range(20)}


@pytest.mark.parametrize("is_read_anew", [False, True])
async def test_clone_of_large_directory_holds_back_changes_of_its_source_and_no_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read_anew: bool
) -> None:
    """Unless a reader changes rows of the source, which would have the copy planned again and again."""
    monkeypatch.setattr(rename, "NAMES_AT_ONCE", 8)
    monkeypatch.setattr(rename, "NAMES_PER_STEP", 3)
    store, pause = MemoryStore(), pause_of_commits()
    async with lake(store, tmp_path, pack="always") as m:
        await m.mkdir("d")
        await m.mkdir("d/sub")
        for number in range(20):
            await m.write(f"d/sub/{number}", b"%d" % number)
        await m.sync()
        tree = m.fs.namespace.tree
        sub, file = (await m.found("d/sub")).inode, await m.found("d/sub/19")

        async def waits(about: About, inode: int, name: bytes = b"", *, reads: bool = True) -> bool:
            with trio.move_on_after(0.01) as scope:
                await tree.barrier.wait_for(about, inode, name, reads=reads)
            return scope.cancelled_caught

        async def change_row() -> None:
            while not tree.barrier.is_up:
                await trio.lowlevel.checkpoint()
            batch = Batch()
            tree.update(batch, file)
            m.fs.namespace.database.commit(batch)

        store.hook = pause
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.clone, "d", "copy")
            if is_read_anew:
                nursery.start_soon(change_row)
            await reached(pause.reached)
            reading = [
                await waits(About.NAME, ROOT_INODE, b"d"),
                await waits(About.NAME, sub, b"1"),
                await waits(About.DIRECTORY, sub),
                await waits(About.INODE, file.inode),
            ]
            assert reading == 4 * [is_read_anew]
            assert await waits(About.NAME, ROOT_INODE, b"d", reads=False)
            assert await waits(About.NAME, sub, b"new", reads=False)
            assert await waits(About.INODE, file.inode, reads=False)
            assert await waits(About.NAME, ROOT_INODE, b"copy")
            assert await waits(About.DIRECTORY, ROOT_INODE)
            pause.resume()
        assert not tree.barrier.is_up
        files = {f"copy/sub/{number}": b"%d" % number for number in range(20)}
        assert await m.tree("copy") == {"copy/sub": None, **files}


async def test_nothing_is_below_a_file(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        await m.write("f", b"1")
        for name in "abc":
            with pytest.raises(FileError) as caught:
                await m.fs.clone(f"f/{name}", "t")
            assert caught.value.errno == errno.ENOTDIR
        assert not [request for request in store.requests if request.key.startswith("f/")]
