"""Files that were received whole before the filesystem heard of them: as if they had been written just then."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from lakefs_fuse.blockcache.disk_latency import Promptness
from lakefs_fuse.config import Rule
from lakefs_fuse.errors import CacheError, FileError, LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.staging import segments, staging_area
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.ops.create import Received
from lakefs_fuse.vfs.ops.directory import Directories
from lakefs_fuse.vfs.writeback import queue, scheduler
from tests.memory_store import START_NS, MemoryStore
from tests.vfs.lakes import Clock, Lake, lake
from tests.vfs.writing_back import Outage, die, told, writing_back

WAIT_S_MAX = 20.0
NEVER_S = 1000.0
HANDLE = 1 << 60


async def received(m: Lake, path: str, data: bytes) -> Received:
    parent, name = await m.parent(path)
    return Received(
        m.fs.database.new_inode(), parent, name, 0o640, 12, 34, os.getpid(), START_NS + 5, START_NS + 7, data
    )


@pytest.fixture(params=[True, False], ids=["prompt", "slow"], autouse=True)
def is_prompt(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Files are accepted at once, or by a task that waits for threads."""
    is_prompt = bool(request.param)
    monkeypatch.setattr(Promptness, "is_prompt", is_prompt)
    return is_prompt


async def taken(m: Lake, *files: tuple[str, bytes]) -> list[OpenFile]:
    """And not closed."""
    found = m.fs.new_files.add_received([await received(m, path, data) for path, data in files], {})
    assert all(isinstance(file, OpenFile) for file in found), found
    return [file for file in found if isinstance(file, OpenFile)]


class Closed:
    """What is said of files that are closed."""

    def __init__(self) -> None:
        self.errors: list[LakeError | None] = []
        self._came = trio.Event()

    def __call__(self, error: LakeError | None) -> None:
        self.errors.append(error)
        self._came.set()
        self._came = trio.Event()

    async def wait(self, count: int) -> list[LakeError | None]:
        with trio.fail_after(WAIT_S_MAX):
            while len(self.errors) < count:
                await self._came.wait()
        return self.errors


def take_closed(m: Lake, wanted: list[Received], said: Closed) -> list[OpenFile | LakeError]:
    return m.fs.new_files.add_received(wanted, {each.inode: said for each in wanted})


async def closed(m: Lake, *files: tuple[str, bytes]) -> list[LakeError | None]:
    """Taken, and what was said of them then."""
    said = Closed()
    found = take_closed(m, [await received(m, path, data) for path, data in files], said)
    assert all(isinstance(file, OpenFile) for file in found), found
    return await said.wait(len(files))


async def release(m: Lake, file: OpenFile) -> None:
    """Whoever holds it closes it."""
    m.fs.hold(file, HANDLE, 0)
    await m.close(HANDLE)


async def test_it_is_there_at_once_with_all_that_was_said_of_it(tmp_path: Path) -> None:
    async with writing_back(MemoryStore(), tmp_path / "cache") as m:
        await m.mkdir("d")
        files = await taken(m, ("d/a", b"first"), ("d/b", b""), ("c", b"third"))
        assert await m.names("d") == ["a", "b"]
        entry = await m.found("d/a")
        assert (entry.inode, entry.size) == (files[0].entry.inode, 5)
        assert (entry.mode, entry.uid, entry.gid, entry.mtime_ns) == (0o640, 12, 34, START_NS + 7)
        assert (await m.found("d")).mtime_ns == START_NS + 5
        assert await m.read("d/a") == b"first"
        for file in files:
            await release(m, file)
        await m.fs.sync_directory(ROOT_INODE)
        assert told(m)["accepted"] == 3
        assert [file.handles for file in files] == [0, 0, 0]
        assert (await m.read("d/a"), await m.read("d/b"), await m.read("c")) == (b"first", b"", b"third")


async def test_what_was_closed_is_there_after_a_death(tmp_path: Path) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache", pack="always", delay_s=NEVER_S) as m:
        wanted = [await received(m, "closed", b"safe"), await received(m, "open", b"not safe")]
        said = Closed()
        safe, never_closed = m.fs.new_files.add_received(wanted, {wanted[0].inode: said})
        assert await said.wait(1) == [None]
        assert isinstance(safe, OpenFile)
        assert isinstance(never_closed, OpenFile)
        assert (safe.handles, never_closed.handles) == (0, 1)
        assert never_closed.draft is not None
    async with writing_back(MemoryStore(), tmp_path / "cache", pack="always", delay_s=NEVER_S) as m:
        assert await m.read("closed") == b"safe"


async def test_without_write_back_it_is_in_the_store(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", pack="never") as m:
        assert await closed(m, ("plain", b"bytes")) == [None]
        assert store.data("plain") == b"bytes"
        assert m.fs.statistics()["files"] == {"in_use": 0}


async def test_without_write_back_files_that_close_together_share_a_pack(tmp_path: Path) -> None:
    """Also the first of them, which asks before the others wait for a pack."""
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", pack="auto") as m:
        assert await closed(m, *((f"f{number}", b"bytes") for number in range(4))) == [None] * 4
        assert (m.commits()["packs"], m.commits()["files_packed"]) == (1, 4)
        assert await closed(m, ("alone", b"bytes")) == [None]
        assert m.commits()["packs"] == 1
        assert m.fs.statistics()["files"] == {"in_use": 0}


async def test_without_write_back_a_file_shares_a_pack_with_those_that_are_received(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", pack="auto") as m:
        m.fs.events.files_counted.append(lambda: 1)
        (first,) = await taken(m, ("first", b"bytes"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(release, m, first)
            await trio.testing.wait_all_tasks_blocked()
            assert await closed(m, ("second", b"bytes")) == [None]
        assert m.commits()["files_packed"] == 2


async def test_without_write_back_its_close_gets_the_error_of_the_store(tmp_path: Path) -> None:
    """And who still has it open may close it again."""
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", pack="never") as m:
        await m.names()
        outage = Outage(store)
        (error,) = await closed(m, ("plain", b"bytes"))
        assert error is not None
        assert error.errno == errno.EIO
        outage.away = False
        file = m.fs.new_files.again((await m.found("plain")).inode)
        await release(m, file)
        assert store.data("plain") == b"bytes"


async def test_its_directory_is_gone(tmp_path: Path) -> None:
    async with writing_back(MemoryStore(), tmp_path / "cache") as m:
        await m.mkdir("gone")
        lost, kept = await received(m, "gone/a", b"lost"), await received(m, "kept", b"kept")
        await m.rmdir("gone")
        said = Closed()
        error, file = take_closed(m, [lost, kept], said)
        assert await said.wait(1) == [None]
        assert isinstance(error, FileError)
        assert error.errno == errno.ESTALE
        assert isinstance(file, OpenFile)
        assert await m.read("kept") == b"kept"


async def test_its_directory_has_a_longer_path_by_now(tmp_path: Path) -> None:
    async with writing_back(MemoryStore(), tmp_path / "cache") as m:
        for depth in range(1, 5):
            await m.mkdir("/".join(["x" * 200] * depth))
        await m.mkdir("d")
        lost = await received(m, "d/" + "y" * 200, b"lost")
        await m.rename("d", "/".join(["x" * 200] * 4 + ["d" * 100]))
        (error,) = take_closed(m, [lost], Closed())
        assert isinstance(error, FileError)
        assert error.errno == errno.ENAMETOOLONG


async def test_somebody_else_made_a_file_of_that_name(tmp_path: Path) -> None:
    """It is replaced, as by anybody who closes later; who reads the other goes on."""
    store = MemoryStore()
    async with writing_back(store, tmp_path / "cache") as m:
        ours = await received(m, "name", b"ours")
        store.give("name", b"theirs")
        reading = await m.open("name")
        (file,) = m.fs.new_files.add_received([ours], {})
        assert isinstance(file, OpenFile)
        assert (await m.found("name")).inode == ours.inode
        assert await m.read("name") == b"ours"
        assert await m.read_handle(reading) == b"theirs"
        await m.close(reading)
        await release(m, file)
        await m.fs.sync_directory(ROOT_INODE)
        assert store.data("name") == b"ours"
        assert await m.read("name") == b"ours"


@pytest.mark.parametrize("is_closed", [True, False])
async def test_exclusive_file_of_a_name_that_another_client_made_becomes_an_orphan(
    tmp_path: Path, is_closed: bool
) -> None:
    """Whether it was closed or is needed before; no call says anything but EEXIST."""
    store, said = MemoryStore(), Closed()
    async with writing_back(store, tmp_path / "cache") as m:
        ours = replace(await received(m, "name", b"ours"), is_exclusive=True)
        store.give("name", b"theirs")
        assert await m.read("name") == b"theirs"

        def answer(error: LakeError | None) -> None:
            m.fs.hold(m.fs.new_files.again(ours.inode), HANDLE, 0)  # as whoever answers with an error
            said(error)

        (file,) = m.fs.new_files.add_received([ours], {ours.inode: answer} if is_closed else {})
        assert isinstance(file, OpenFile)
        if is_closed:
            (error,) = await said.wait(1)
            assert isinstance(error, FileError)
            assert error.errno == errno.EEXIST
        else:
            m.fs.hold(file, HANDLE, 0)
        await m.fs.write(HANDLE, 4, b" too")
        for call in (m.fs.fsync, m.close):
            with pytest.raises(FileError) as raised:
                await call(HANDLE)
            assert raised.value.errno == errno.EEXIST
        (orphan,) = m.fs.unfinished()
        assert (orphan.state, orphan.path, orphan.bytes) == ("orphan", "name", 8)
        assert "by another client" in orphan.error
        assert await m.read("name") == b"theirs"
        assert (await m.found("name")).inode != ours.inode
    async with writing_back(store, tmp_path / "cache") as m:
        assert await m.read("name") == b"theirs"
        with pytest.raises(FileError, match="name"):
            await m.fs.finish_orphan(orphan.id)
        await m.fs.abort_orphan(orphan.id)
        assert store.data("name") == b"theirs"


async def test_exclusive_file_of_a_name_that_another_client_stores_later_is_kept_beside_it(tmp_path: Path) -> None:
    store, said = MemoryStore(), Closed()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        take_closed(m, [replace(await received(m, "name", b"ours"), is_exclusive=True)], said)
        assert await said.wait(1) == [None]
        outage.away = False
        store.give("name", b"theirs")
        await m.fs.sync_directory(ROOT_INODE)
        (kept,) = [name for name in await m.names() if name.startswith("name.conflict-")]
        assert (await m.read(kept), store.data("name")) == (b"ours", b"theirs")


async def test_attributes_that_a_program_set_are_stored_with_the_file(tmp_path: Path) -> None:
    store, said = MemoryStore(), Closed()
    async with writing_back(store, tmp_path / "cache") as m:
        file = replace(await received(m, "name", b"x"), changed_ns=START_NS + 9, mtime_ns=START_NS - 10**18)
        take_closed(m, [file], said)
        assert await said.wait(1) == [None]
        entry = await m.found("name")
        assert (entry.mtime_ns, entry.ctime_ns) == (START_NS - 10**18, START_NS + 9)
        await m.fs.sync_directory(ROOT_INODE)
    async with lake(store, tmp_path / "other") as other:
        assert (await other.getattr("name")).mtime_ns == START_NS - 10**18


async def test_somebody_else_made_something_else_of_that_name(tmp_path: Path) -> None:
    async with writing_back(MemoryStore(), tmp_path / "cache") as m:
        for name in ("directory", "link", "written"):
            ours = await received(m, name, b"ours")
            if name == "directory":
                await m.mkdir(name)
            elif name == "link":
                await m.symlink(name, "anywhere")
            else:
                handle = await m.create(name)
            (error,) = take_closed(m, [ours], Closed())
            assert isinstance(error, FileError)
            assert error.errno == errno.ESTALE
        await m.close(handle)
        assert await m.names() == ["directory", "link", "written"]


async def test_the_journal_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing of them is left, and their writers can be told."""
    async with writing_back(MemoryStore(), tmp_path / "cache") as m:
        wanted = [await received(m, name, b"x" * 5000) for name in ("a", "b")]

        def fails(*_: object, **__: object) -> None:
            raise CacheError("no room")

        failing: list[tuple[object, str]] = [(m.fs.database, "commit"), (m.fs.namespace, "touch")]
        failing.append((m.parts.staging, "reserve_now"))  # which may have to note that others made room
        for where, what in failing:
            with monkeypatch.context() as patch:
                patch.setattr(where, what, fails)
                errors = take_closed(m, wanted, Closed())
                await trio.testing.wait_all_tasks_blocked()  # what throws them away fails too
            assert [type(error) for error in errors] == [CacheError, CacheError]
        await trio.testing.wait_all_tasks_blocked()
        assert await m.names() == []
        staging = m.fs.statistics()["staging"]
        assert isinstance(staging, dict)
        assert staging["bytes"] == 0
        assert m.fs.statistics()["files"] == {"in_use": 0}
        assert await closed(m, ("a", b"again")) == [None]
        assert await m.read("a") == b"again"


async def test_there_is_no_room_for_a_file_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that write-back does not accept; the others are taken all the same."""
    rules = (Rule(path="*.close", durability="close"),)
    store = MemoryStore()
    async with writing_back(store, tmp_path / "cache", rules=rules) as m:
        wanted = [await received(m, name, name.encode()) for name in ("a", "b.close", "c")]

        def fails(fd: int, data: bytes, offset: int) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patch:
            patch.setattr(staging_area, "pwrite_all", fails)
            said = Closed()
            first, error, last = take_closed(m, wanted, said)
        assert await said.wait(2) == [None, None]
        assert isinstance(first, OpenFile)
        assert isinstance(last, OpenFile)
        assert isinstance(error, LakeError)
        assert error.errno == errno.ENOSPC
        await trio.testing.wait_all_tasks_blocked()
        assert await m.names() == ["a", "c"]
        assert await closed(m, ("b.close", b"again")) == [None]
        assert store.data("b.close") == b"again"
        await m.fs.sync_directory(ROOT_INODE)
        assert list((tmp_path / "cache" / "staging").glob("[!s]*")) == []
    async with writing_back(store, tmp_path / "cache", rules=rules) as m:
        assert m.fs.unfinished() == []
        assert await m.names() == ["a", "b.close", "c"]


async def test_the_disk_is_full_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with writing_back(MemoryStore(), tmp_path / "cache") as m:
        wanted, said = await received(m, "full", b"bytes"), Closed()

        def fails(_: segments.Group) -> None:
            raise OSError(errno.ENOSPC, "no space left")

        with monkeypatch.context() as patch:
            patch.setattr(segments.Group, "write", fails)
            (file,) = take_closed(m, [wanted], said)
            (error,) = await said.wait(1)
        assert isinstance(file, OpenFile)
        assert error is not None
        assert error.errno == errno.ENOSPC
        again = m.fs.new_files.again(file.entry.inode)
        assert again is file
        assert await m.read("full") == b"bytes"
        await release(m, again)
        await m.fs.sync_directory(ROOT_INODE)
        assert await m.read("full") == b"bytes"


async def test_the_journal_cannot_be_synced_when_it_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its record is there, and may survive or not: the bytes that it names are not written over."""
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache", pack="always", delay_s=NEVER_S) as m:
        wanted, said = await received(m, "unsure", b"bytes"), Closed()

        def fails(_: Database) -> None:
            raise CacheError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(Database, "sync", fails)
            (file,) = take_closed(m, [wanted], said)
            (error,) = await said.wait(1)
        assert isinstance(file, OpenFile)
        assert isinstance(error, CacheError)
        assert await closed(m, ("other", b"OTHER")) == [None]
        dead = die(tmp_path / "cache", tmp_path / "dead")
        again = m.fs.new_files.again(file.entry.inode)
        assert await m.read("unsure") == b"bytes"
        await release(m, again)
        assert await m.read("unsure") == b"bytes"
    async with writing_back(MemoryStore(), dead) as m:
        await m.fs.sync_directory(ROOT_INODE)
        assert (await m.read("other"), await m.read("unsure")) == (b"OTHER", b"bytes")


async def test_its_directory_has_another_name_by_now(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path / "cache") as m:
        await m.mkdir("above")
        await m.mkdir("above/d")
        assert await closed(m, ("above/d/a", b"a")) == [None]
        for old, new in (("above/d", "above/e"), ("above", "over"), ("over/e", "f")):
            late, said = await received(m, f"{old}/late" if old != "above" else "above/e/late", b"late"), Closed()
            await m.rename(old, new)
            (file,) = take_closed(m, [late], said)
            assert await said.wait(1) == [None]
            assert isinstance(file, OpenFile)
            where = "over/e" if new == "over" else new
            assert file.key == f"{where}/late"
            assert await m.read(f"{where}/late") == b"late"
            await m.unlink(f"{where}/late")


async def test_it_waits_until_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FILES_MAX", 1)
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache", retry_timeout_s=0.0) as m:
        said = Closed()
        take_closed(m, [await received(m, "first", b"1")], said)
        await said.wait(1)
        take_closed(m, [await received(m, "second", b"2")], said)
        with trio.move_on_after(0.1):
            await said.wait(2)
        assert said.errors == [None]
        outage.away = False
        assert await said.wait(2) == [None, None]


async def test_it_could_not_be_removed_while_its_close_waited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is acknowledged although it is about to be removed, because that may fail."""
    going_on, written = threading.Event(), segments.Group.write

    def slow(group: segments.Group) -> None:
        going_on.wait(WAIT_S_MAX)
        written(group)

    async with writing_back(MemoryStore(), tmp_path / "cache", delay_s=NEVER_S) as m:
        said = Closed()
        monkeypatch.setattr(Promptness, "is_prompt", False)
        monkeypatch.setattr(segments.Group, "write", slow)
        take_closed(m, [await received(m, "first", b"1")], said)
        await trio.testing.wait_all_tasks_blocked(0.05)
        take_closed(m, [await received(m, "second", b"2")], said)

        def fails(*_: object) -> None:
            raise CacheError("no room")

        async def remove() -> None:
            with pytest.raises(CacheError):
                await m.unlink("second")

        monkeypatch.setattr(Directories, "_unlink", fails)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(remove)
            await trio.testing.wait_all_tasks_blocked(0.05)
            going_on.set()
        assert await said.wait(2) == [None, None]
        with trio.fail_after(WAIT_S_MAX):
            while told(m)["accepted"] != 2:
                await trio.sleep(0.01)
        assert await m.read("second") == b"2"


async def test_file_that_was_closed_while_its_removal_goes_on_survives_a_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, going_on, written, failing = MemoryStore(), threading.Event(), segments.Group.write, trio.Event()

    def slow(group: segments.Group) -> None:
        going_on.wait(WAIT_S_MAX)
        written(group)

    async def fails(*_: object) -> None:
        await failing.wait()
        raise CacheError("no room")

    async with writing_back(store, tmp_path / "cache", delay_s=NEVER_S) as m:
        said = Closed()
        monkeypatch.setattr(Promptness, "is_prompt", False)
        monkeypatch.setattr(segments.Group, "write", slow)
        take_closed(m, [await received(m, "first", b"1")], said)
        await trio.testing.wait_all_tasks_blocked(0.05)
        take_closed(m, [await received(m, "second", b"2")], said)

        async def remove() -> None:
            with pytest.raises(CacheError):
                await m.unlink("second")

        monkeypatch.setattr(Directories, "_unlink", fails)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(remove)
            await trio.testing.wait_all_tasks_blocked(0.05)
            going_on.set()
            assert await said.wait(2) == [None, None]
            dead = die(tmp_path / "cache", tmp_path / "dead")
            failing.set()
    async with writing_back(store, dead) as m:
        assert await m.tree() == {"first": b"1", "second": b"2"}


async def test_its_new_name_could_not_be_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was renamed while its record was being synced: its writer is told, and it goes to the store all the same."""
    syncing, going_on = threading.Event(), threading.Event()
    sync, save, store = Database.sync, Draft.save, MemoryStore()

    def slow(database: Database) -> None:
        syncing.set()
        going_on.wait(WAIT_S_MAX)
        sync(database)

    def fails(draft: Draft, *, sync: bool = False) -> None:
        if draft.sequence:
            raise CacheError("no room")
        save(draft, sync=sync)

    async with writing_back(store, tmp_path / "cache", delay_s=NEVER_S) as m:
        said = Closed()
        with monkeypatch.context() as patch:
            patch.setattr(Promptness, "is_prompt", False)
            patch.setattr(Database, "sync", slow)
            patch.setattr(Draft, "save", fails)
            (file,) = take_closed(m, [await received(m, "old", b"bytes")], said)
            assert isinstance(file, OpenFile)
            assert await trio.to_thread.run_sync(syncing.wait, WAIT_S_MAX)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(m.rename, "old", "new")
                await trio.testing.wait_all_tasks_blocked(0.05)
                assert file.key == "new"
                going_on.set()
            (error,) = await said.wait(1)
        assert isinstance(error, CacheError)
        assert told(m)["accepted"] == 1
        await m.fs.sync_directory(ROOT_INODE)
        assert await m.tree() == {"new": b"bytes"}


async def test_removed_before_it_was_closed(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path / "cache") as m:
        (file,) = await taken(m, ("gone", b"bytes"))
        await m.unlink("gone")
        await release(m, file)
        await m.fs.sync_directory(ROOT_INODE)
        assert await m.names() == []
        assert [key for key in store.objects if not key.startswith(".lakefs/")] == []


async def test_which_directories_may_be_lent(tmp_path: Path) -> None:
    """Those whose names are known."""
    store = MemoryStore()
    for name in ("listed/a", "listed/b", "unknown/a"):
        store.give(name, b"x")
    async with writing_back(store, tmp_path / "cache") as m:
        await m.names("listed")
        directory = (await m.found("listed")).inode
        (file,) = await taken(m, ("listed/c", b"c"))
        assert m.fs.new_files.names_lease_s(file.entry.parent) > 0
        assert m.fs.new_files.names(directory) == [b"a", b"b", b"c"]
        assert m.fs.new_files.name_bytes_max(directory) == 1024 - len("listed/")
        (file,) = await taken(m, ("unknown/c", b"c"))
        assert m.fs.new_files.names_lease_s(file.entry.parent) == 0
    async with lake(store, tmp_path / "other") as m:
        await m.names("listed")
        (file,) = await taken(m, ("listed/d", b"d"))
        assert m.fs.new_files.names_lease_s(file.entry.parent) > 0


async def test_names_that_come_later_are_told(tmp_path: Path) -> None:
    """By whatever way they come; and that not all are known any more."""
    store = MemoryStore()
    async with writing_back(store, tmp_path / "cache") as m:
        directory = (await m.mkdir("d")).inode
        await m.mkdir("from")
        await m.write("from/file", b"x")
        tree = m.fs.namespace.tree
        names: list[bytes] = []
        forgotten: list[int] = []
        m.fs.events.mirrored_name_added.append(lambda _, name: names.append(name))
        m.fs.events.mirror_dropped.append(forgotten.append)
        tree.mirrored.add(directory)
        await m.write("d/created", b"x")
        await m.mkdir("d/directory")
        await m.symlink("d/link", "x")
        await m.rename("from/file", "d/renamed")
        assert names == [b"created", b"directory", b"link", b"renamed"]
        batch = Batch()
        tree.insert_plain(batch, directory, [(b"listed", 1, 1, "etag")])
        assert (forgotten, tree.mirrored) == ([directory], set())
        tree.mirrored.update((directory, ROOT_INODE))
        tree.forget_listings()
        assert sorted(forgotten) == sorted([directory, directory, ROOT_INODE])


async def test_lease_ends_where_its_directory_gets_another_path(tmp_path: Path) -> None:
    """The lease says how long a name may be, which depends on the path."""
    async with writing_back(MemoryStore(), tmp_path / "cache") as m:
        await m.mkdir("a")
        below = (await m.mkdir("a/b")).inode
        await m.mkdir("longer")
        tree = m.fs.namespace.tree
        tree.mirrored.update((ROOT_INODE, below))
        await m.rename("a", "longer/a")
        assert below not in tree.mirrored
        tree.mirrored.add(below)
        await m.write("file", b"x")
        await m.rename("file", "longer/file")
        assert below in tree.mirrored


async def test_names_are_not_leased_while_absent_ones_are_doubted(tmp_path: Path) -> None:
    """A lease answers that a name is absent without asking: who has seen a marker would not find what it stands for."""
    clock, store = Clock(), MemoryStore()
    store.clock = clock
    for name in ("data/0", "versions/0"):
        store.give(name, b"x")
    clock.advance(100)
    async with writing_back(store, tmp_path / "cache", clock=clock) as m:
        await m.names("data")
        directory, dropped = (await m.found("data")).inode, list[int]()
        m.fs.events.mirror_dropped.append(dropped.append)
        (file,) = await taken(m, ("data/1", b"x"))
        clock.advance(1)
        assert m.fs.new_files.names_lease_s(file.entry.parent) > 0
        m.fs.namespace.tree.mirrored.add(directory)
        store.give("data/2", b"x")
        store.give("versions/1", b"data/2")
        assert await m.names("versions") == ["0", "1"]
        assert (dropped, m.fs.new_files.names_lease_s(file.entry.parent)) == ([directory], 0)
        clock.advance(5)
        assert m.fs.new_files.names_lease_s(file.entry.parent) > 0


async def test_packs_wait_while_files_are_accepted_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    """Who asks for them waits for nothing, and neither does anybody once it is over."""
    monkeypatch.setattr(queue, "BURST_FILES_MIN", 5)
    async with writing_back(MemoryStore(), tmp_path / "cache", pack="always", delay_s=0.1) as m:
        for number in range(30):
            assert await closed(m, (f"f{number}", b"x")) == [None]
            mock_clock.jump(0.02)
        assert told(m)["files"] == 30
        mock_clock.rate = 5
        with trio.fail_after(WAIT_S_MAX):
            while told(m)["files"]:
                await trio.sleep(0.05)
        mock_clock.rate = 0
        for number in range(10):
            assert await closed(m, (f"g{number}", b"x")) == [None]
        await m.fs.sync_directory(ROOT_INODE)
        assert not told(m)["files"], "although no time has passed"
        mock_clock.rate = 1


async def test_they_do_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "BURST_FILES_MIN", 2)
    monkeypatch.setattr(scheduler, "BURST_DELAYS_MAX", 3)
    async with writing_back(MemoryStore(), tmp_path / "cache", pack="always", delay_s=0.1) as m:
        with trio.fail_after(WAIT_S_MAX):
            number = 0
            while number == told(m)["files"]:
                assert await closed(m, (f"f{number}", b"x")) == [None]
                number += 1
                await trio.sleep(0.01)


def test_what_a_burst_is() -> None:
    counted = queue.Bursts()
    for number in range(queue.BURST_FILES_MIN - 1):
        counted.count(100.0 + number * 0.001)
    assert not counted.is_lasting(100.1)
    counted.count(100.1)
    assert counted.is_lasting(100.1)
    assert counted.is_lasting(100.1 + queue.BURST_WINDOW_S - 0.001)
    assert not counted.is_lasting(100.1 + queue.BURST_WINDOW_S)
    for number in range(200):
        counted.count(200.0 + number)
    assert not counted.is_lasting(399.0), "few of them, however long"
