"""A full disk of the cache directory: everything can be read, and nothing can be made."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.change_journal import ChangeJournal
from lakefs_fuse.errors import CacheFull, LakeError
from lakefs_fuse.meta import database, volatile_rows
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.vfs.residency.residency import WarmOptions
from lakefs_fuse.vfs.writeback import group_commit, queue
from lakefs_fuse.vfs.writeback.group_commit import LOGGED_BYTES_MAX
from lakefs_fuse.vfs.writeback.object_writer import ObjectWriter
from tests.fakes import node_of
from tests.memory_store import MemoryStore, Pause, Request, When
from tests.meta.full_disk import FullDisk
from tests.upload.drafting import reached
from tests.vfs.lakes import Clock, Lake, lake
from tests.vfs.writing_back import Outage, die, rewrite, stored, told, until, writing_back


async def test_names_that_were_never_listed_are_read_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    for number in range(3):
        store.give(f"d/below/f{number}", b"bytes of %d" % number)
    node = replace(node_of(clock, "full"), engines=disk)
    async with lake(store, tmp_path, node=node, clock=clock) as m:
        assert await m.names() == ["d"]
        disk.is_full = True
        assert await m.read("d/below/f1") == b"bytes of 1"
        assert await m.names("d/below") == ["f0", "f1", "f2"]
        with pytest.raises(LakeError) as refused:
            await m.mkdir("d/made")
        assert refused.value.errno == errno.ENOSPC
        inodes = [(await m.getattr(f"d/below/f{number}")).inode for number in range(3)]
        disk.is_full = False
        await m.mkdir("d/made")
        assert [(await m.getattr(f"d/below/f{number}")).inode for number in range(3)] == inodes
    async with lake(store, tmp_path, node=node, clock=clock) as m:
        lists = store.count("list")
        assert await m.names("d/below") == ["f0", "f1", "f2"]
        assert store.count("list") == lists, "the listing was written once the disk had room"


async def test_names_that_were_never_listed_are_read_by_a_daemon_that_has_issued_no_inode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    store.give("d/below/f", b"bytes")
    node = replace(node_of(clock, "full"), engines=disk)
    async with lake(store, tmp_path, node=node, clock=clock) as m:
        assert await m.names() == ["d"]
    async with lake(store, tmp_path, node=node, clock=clock) as m:
        disk.is_full = True
        assert await m.read("d/below/f") == b"bytes"
        disk.is_full = False
        await m.mkdir("made")
        inodes = {(await m.getattr(path)).inode for path in ("d", "d/below", "d/below/f", "made")}
        assert len(inodes) == 4
    async with lake(store, tmp_path, node=node, clock=clock) as m:
        await m.mkdir("another")
        assert (await m.getattr("another")).inode not in inodes


async def test_commits_of_others_are_shown_once_the_disk_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    store.give("a", b"bytes")
    node = replace(node_of(clock, "full"), engines=disk)
    async with (
        lake(store, tmp_path / "1", clock=clock) as one,
        lake(store, tmp_path / "2", node=node, clock=clock) as m,
    ):
        assert await m.names() == ["a"]
        disk.is_full = True
        await one.rename("a", "b")
        await one.sync()
        clock.advance(1)
        with pytest.raises(LakeError) as refused:
            await m.poll()
        assert refused.value.errno == errno.ENOSPC
        assert await m.read("a") == b"bytes"
        disk.is_full = False
        await m.poll()
        assert await m.names() == ["b"]
        assert await m.read("b") == b"bytes"


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_change_that_was_refused_does_not_take_effect_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str
) -> None:
    """Although the database has it in its log."""
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    disk, clock = FullDisk(), Clock()
    node = replace(node_of(clock, "full"), engines=disk)
    async with lake(MemoryStore(), tmp_path, node=node, clock=clock, durability=durability) as m:
        await m.mkdir("w")
        await m.write("w/kept", b"kept")
        changes: list[Callable[[], Awaitable[object]]] = [
            lambda: m.unlink("w/kept"),
            lambda: m.write("w/new", b"new"),
            lambda: m.mkdir("w/made"),
        ]
        for number, change in enumerate(changes):
            disk.is_full = disk.logs_next = True
            with pytest.raises(LakeError):
                await change()
            disk.is_full = disk.logs_next = False
            await m.mkdir(f"next{number}")
            assert await m.names("w") == ["kept"]
            assert await m.read("w/kept") == b"kept"


async def test_names_removed_by_the_first_change_after_a_full_disk_leave_the_mount_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    for number in range(3):
        store.give(f"d/f{number}", b"bytes of %d" % number)
    async with lake(store, tmp_path, node=replace(node_of(clock, "full"), engines=disk), clock=clock) as m:
        assert await m.names("d") == ["f0", "f1", "f2"]
        disk.is_full = True
        with pytest.raises(LakeError):
            await m.mkdir("made")
        disk.is_full = False
        store.take("d/f1")
        clock.advance(3600)
        assert await m.names("d") == ["f0", "f2"]
        assert await m.read("d/f0") == b"bytes of 0"


async def test_block_cache_makes_room_for_names(tmp_path: Path) -> None:
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    store.give("model", bytes(1 << 20))
    async with lake(store, tmp_path, node=replace(node_of(clock, "full"), engines=disk), clock=clock) as m:
        await m.fs.residency.warm([("model", "")], WarmOptions())
        with trio.fail_after(5):
            while m.parts.cache.files.bytes_used < 1 << 20:  # files that were there at the start are still counted
                await trio.sleep(0.01)
        disk.is_full = True
        with pytest.raises(LakeError):
            await m.mkdir("made")
        with trio.fail_after(5):
            while m.parts.cache.files.bytes_used:
                await trio.sleep(0.01)


@pytest.mark.parametrize("size", [1000, LOGGED_BYTES_MAX + 1])
async def test_close_that_failed_and_is_in_the_log_does_not_share_its_place_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """After a crash both records are in the journal, each with a place in the segment."""
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    outage = Outage(store)
    node = replace(node_of(clock, "full"), engines=disk)
    async with writing_back(store, tmp_path / "cache", clock=clock, node=node) as m:
        failed, acknowledged = await m.create("failed"), await m.create("acknowledged")
        await m.fs.write(failed, 0, b"f" * size)
        await m.fs.write(acknowledged, 0, b"a" * size)
        with monkeypatch.context() as next_batch:
            next_batch.setattr(group_commit, "reached", lambda _: setattr(disk, "logs_next", True))
            with pytest.raises(LakeError):
                await m.fs.flush(failed)
        with trio.fail_after(5):
            while True:  # the database does not open again while another task reads it
                with suppress(LakeError):
                    await m.fs.flush(acknowledged)
                    break
                await trio.sleep(0.01)
        dead = die(tmp_path / "cache", tmp_path / "dead")
    outage.away = False
    async with writing_back(store, dead, clock=clock, node=node_of(clock, "next")) as m:
        assert {"failed": b"f" * size} | await m.tree() == {"failed": b"f" * size, "acknowledged": b"a" * size}


@pytest.mark.parametrize("pack", ["never", "always"])
@pytest.mark.parametrize("is_killed", [False, True])
async def test_rename_of_which_only_the_journal_has_room_is_in_effect_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str, is_killed: bool
) -> None:
    """Otherwise a program that writes to the old name next writes to the file that is about to move."""
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock, append = MemoryStore(), FullDisk(), Clock(), ChangeJournal.append

    def append_last(journal: ChangeJournal, change: Change, batch: Batch, *, volatile: bool) -> int:
        sequence = append(journal, change, batch, volatile=volatile)
        disk.is_full = True
        return sequence

    wanted: dict[str, object] = {"step-1": b"first"}
    cache, node = tmp_path / "cache", replace(node_of(clock, "full"), engines=disk)
    async with writing_back(store, cache, clock=clock, node=node, pack=pack) as m:
        await m.write("latest", b"first")
        await m.fs.make_durable()
        with monkeypatch.context() as journaling:
            journaling.setattr(ChangeJournal, "append", append_last)
            await m.rename("latest", "step-1")
        assert await m.tree() == wanted
        if is_killed:
            cache = die(cache, tmp_path / "dead")
        disk.is_full = False
        if not is_killed:
            await m.write("latest", b"second")
            wanted["latest"] = b"second"
            await m.fs.make_durable()
            assert await m.tree() == wanted
    async with writing_back(store, cache, clock=clock, node=node_of(clock, "next")) as m:
        assert await m.tree() == wanted
        await m.fs.make_durable()
        await m.sync()
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == wanted


@pytest.mark.parametrize("pack", ["never", "always"])
@pytest.mark.parametrize("is_killed", [False, True])
async def test_rename_that_is_committed_when_the_disk_gets_full_is_in_effect_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str, is_killed: bool
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()

    def fill(request: Request, when: When) -> None:
        disk.is_full = disk.is_full or (when == "after" and request.what == "put")

    wanted: dict[str, object] = {"step-1": b"first"}
    cache, node = tmp_path / "cache", replace(node_of(clock, "full"), engines=disk)
    async with lake(store, cache, clock=clock, node=node, pack=pack) as m:
        await m.write("latest", b"first")
        await m.sync()
        store.hook = fill
        await m.rename("latest", "step-1")
        store.hook = lambda _request, _when: None
        assert disk.is_full
        assert await m.tree() == wanted
        if is_killed:
            cache = die(cache, tmp_path / "dead")
        disk.is_full = False
        if not is_killed:
            await m.write("latest", b"second")
            wanted["latest"] = b"second"
            assert await m.tree() == wanted
    async with lake(store, cache, clock=clock, node=node_of(clock, "next"), pack=pack) as m:
        await m.poll()
        assert await m.tree() == wanted
        await m.sync()
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == wanted


def give_room(m: Lake, disk: FullDisk) -> None:
    """Also open the database again, while no task reads rows."""
    disk.is_full = False
    m.parts.namespace.tree.database.commit(Batch({b"absent": None}))


def is_pack(request: Request) -> bool:
    return request.what == "put" and request.key.startswith(".lakefs/commits/")


def files_packed(m: Lake) -> int:
    commits = m.fs.statistics()["commits"]
    assert isinstance(commits, dict)
    return int(commits["files_packed"])


def fills_when_stored(store: MemoryStore, disk: FullDisk) -> Callable[[Request, When], None]:
    """A hook: the disk is full once an object or pack of a file is in the store."""

    def hook(request: Request, when: When) -> None:
        if when == "after" and (is_pack(request) or (request.what, request.key) == ("put", "d/f")):
            disk.is_full = True

    return hook


@pytest.mark.parametrize("is_new", [True, False])
async def test_close_while_the_disk_fills_records_the_version_for_the_next_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_new: bool
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    for number in range(1500):  # too many to be listed again for one of them
        store.give(f"d/other{number}", b"other")
    if not is_new:
        store.give("d/f", b"old bytes")
    async with lake(store, tmp_path, node=replace(node_of(clock, "full"), engines=disk), clock=clock) as m:
        assert is_new or await m.read("d/f") == b"old bytes"
        assert len(await m.names("d")) == 1500 + (not is_new)
        store.hook = fills_when_stored(store, disk)
        await (m.write("d/f", b"new bytes") if is_new else rewrite(m, "d/f", b"new bytes"))
        assert disk.is_full
        assert await m.read("d/f") == b"new bytes"
        store.hook = lambda *_: None
        give_room(m, disk)
        handle = await m.open("d/f", os.O_RDWR)
        await m.fs.write(handle, len(b"new bytes"), b" and more")
        await m.close(handle)
        assert store.data("d/f") == await m.read("d/f") == b"new bytes and more"


async def test_file_that_was_closed_while_the_disk_filled_is_renamed_with_its_new_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    store.give("d/f", b"old bytes")
    async with lake(store, tmp_path / "c", node=replace(node_of(clock, "full"), engines=disk), clock=clock) as m:
        store.hook = fills_when_stored(store, disk)
        await rewrite(m, "d/f", b"new bytes")
        store.hook = lambda *_: None
        give_room(m, disk)
        await m.rename("d/f", "d/renamed")
        await m.sync()
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await m.tree() == await other.tree() == {"d": None, "d/renamed": b"new bytes"}


async def test_acknowledged_file_that_is_stored_while_the_disk_fills_does_not_come_back_once_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    node = replace(node_of(clock, "full"), engines=disk)
    async with writing_back(store, tmp_path, node=node, clock=clock) as m:
        await m.mkdir("d")
        await m.sync()
        store.hook = fills_when_stored(store, disk)
        await m.write("d/f", b"removed")
        await stored(m)
        assert disk.is_full
        store.hook = lambda *_: None
        give_room(m, disk)
        await m.unlink("d/f")
        await m.sync()
    async with writing_back(store, tmp_path, node=node, clock=clock) as m:
        assert told(m)["replayed"] == 0
        assert await m.names("d") == []


async def test_close_whose_attributes_cannot_be_journaled_raises_and_records_the_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()

    def refuse(*_: object) -> None:
        raise CacheFull("the disk is full")

    monkeypatch.setattr(ObjectWriter, "set_attributes", refuse)
    async with lake(store, tmp_path, pack="always") as m:
        handle = await m.create("f")
        await m.fs.write(handle, 0, b"bytes")
        pause = store.hook = Pause(is_pack, when="after")
        errors: list[int | None] = []

        async def close() -> None:
            try:
                await m.close(handle)
            except LakeError as error:
                errors.append(error.errno)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(close)
            await reached(pause.reached)
            await m.set_xattr("f", "user.step", b"7")
            pause.resume()
        assert errors == [errno.ENOSPC]
        assert await m.read("f") == b"bytes"
        assert not m.fs.unfinished()


Mount = Callable[..., AbstractAsyncContextManager[Lake]]
DATED_NS = 1_600_000_000_000_000_000


async def close_unrecorded(m: Lake, store: MemoryStore, disk: FullDisk, data: bytes = b"bytes") -> int:
    """Store a file whose time needs a commit, which cannot be journaled. Returns the handle, which is open."""
    store.hook = fills_when_stored(store, disk)
    handle = await m.create("d/f")
    await m.fs.write(handle, 0, data)
    await m.setattr("d/f", mtime_ns=DATED_NS)
    with pytest.raises(LakeError) as refused:
        await m.fs.flush(handle)
    assert refused.value.errno == errno.ENOSPC
    assert store.data("d/f") == data
    store.hook = lambda *_: None
    return handle


async def test_next_close_records_what_the_store_has_without_sending_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    node = replace(node_of(clock, "full"), engines=disk)
    async with lake(store, tmp_path / "c", node=node, clock=clock, pack="never") as m:
        await m.mkdir("d")
        handle = await close_unrecorded(m, store, disk)
        assert await m.read_handle(handle) == b"bytes"
        give_room(m, disk)
        await m.close(handle)
        assert store.count("put", "d/f") == 1
        assert (await m.getattr("d/f")).mtime_ns == DATED_NS
        await m.sync()
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await other.read("d/f") == b"bytes"
            assert (await other.getattr("d/f")).mtime_ns == DATED_NS


async def test_write_after_a_close_that_could_not_be_recorded_begins_the_next_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    async with lake(
        store, tmp_path, node=replace(node_of(clock, "full"), engines=disk), clock=clock, pack="never"
    ) as m:
        await m.mkdir("d")
        handle = await close_unrecorded(m, store, disk)
        with trio.fail_after(10), pytest.raises(LakeError) as refused:
            await m.fs.write(handle, 5, b" more")
        assert refused.value.errno == errno.ENOSPC
        give_room(m, disk)
        with trio.fail_after(10):
            await m.fs.write(handle, 5, b" more")
        await m.close(handle)
        assert store.data("d/f") == await m.read("d/f") == b"bytes more"


async def test_removed_file_that_could_not_be_recorded_is_gone_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    async with lake(
        store, tmp_path / "c", node=replace(node_of(clock, "full"), engines=disk), clock=clock, pack="never"
    ) as m:
        await m.mkdir("d")
        handle = await close_unrecorded(m, store, disk)
        await m.fs.release(handle)
        give_room(m, disk)
        await m.unlink("d/f")
        await m.sync()
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await m.tree() == await other.tree() == {"d": None}


async def test_version_of_another_client_stays_where_one_before_it_could_not_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    async with lake(
        store, tmp_path, node=replace(node_of(clock, "full"), engines=disk), clock=clock, pack="never"
    ) as m:
        await m.mkdir("d")
        handle = await close_unrecorded(m, store, disk)
        store.give("d/f", b"another's")
        give_room(m, disk)
        await m.close(handle)
        assert await m.read("d/f") == store.data("d/f") == b"another's"


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.parametrize("is_memory_full", [True, False])
@pytest.mark.parametrize("mount", [lake, partial(writing_back, delay_s=0.1)], ids=["close", "writeback"])
async def test_packed_files_that_could_not_be_recorded_are_once_the_disk_has_room(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mount: Callable[..., AbstractAsyncContextManager[Lake]],
    is_memory_full: bool,
    is_new: bool,
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    monkeypatch.setattr(queue, "PAUSE_S_FIRST", 0.01)
    if is_memory_full:
        monkeypatch.setattr(volatile_rows, "VOLATILE_BYTES_MAX", 0)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    node, names = replace(node_of(clock, "full"), engines=disk), ("x", "y")
    async with mount(store, tmp_path / "c", pack="always", node=node, clock=clock) as m:
        for name in () if is_new else names:
            await m.write(name, b"old")
        await m.fs.make_durable()
        before, handles = files_packed(m), list[int]()
        for name in names:  # a file that is made once the disk is full is none
            handles.append(await (m.create(name) if is_new else m.open(name, os.O_RDWR | os.O_TRUNC)))
            await m.fs.write(handles[-1], 0, name.encode())
        store.hook = fills_when_stored(store, disk)

        async def close(handle: int) -> None:
            with suppress(LakeError):
                await m.close(handle)

        async with trio.open_nursery() as nursery:
            for handle in handles:
                nursery.start_soon(close, handle)
        await until(lambda: disk.is_full and not any(each.state == "publishing" for each in m.fs.unfinished()))
        assert {name: await m.read(name) for name in names} == {name: name.encode() for name in names}
        store.hook = lambda *_: None
        give_room(m, disk)
        with trio.fail_after(10):
            await m.fs.make_durable()
        assert files_packed(m) == before + len(names)
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await m.tree() == await other.tree() == {name: name.encode() for name in names}
        await rewrite(m, "x", b"again")
        assert await m.read("x") == b"again"


@pytest.mark.parametrize("is_sent", [True, False])
async def test_pack_whose_only_file_is_removed_while_it_waits_lets_others_be_stored(
    tmp_path: Path, is_sent: bool
) -> None:
    """``is_sent``: the packer has begun with it, and waits for another commit."""
    store = MemoryStore()
    async with lake(store, tmp_path, pack="always") as m:
        await m.write("before", b"before")
        pause = store.hook = Pause(is_pack)
        async with trio.open_nursery() as nursery:
            if is_sent:
                await m.mkdir("d")
                nursery.start_soon(m.sync)
            else:
                nursery.start_soon(m.write, "first", b"first")
            await reached(pause.reached)
            handle = await m.create("removed")
            await m.fs.write(handle, 0, b"removed")
            with trio.move_on_after(0.2):  # the kernel interrupts the close of a program that is killed
                await m.fs.flush(handle)
            await m.fs.release(handle)
            await m.unlink("removed")
            pause.resume()
        await m.write("later", b"later")
        await m.sync()
        made = {"d": None} if is_sent else {"first": b"first"}
        assert await m.tree() == {"before": b"before", "later": b"later", **made}


async def test_version_stored_while_the_next_is_written_leaves_no_older_record_as_the_disk_fills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    monkeypatch.setattr(queue, "PAUSE_S_FIRST", 0.01)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    node = replace(node_of(clock, "full"), engines=disk)
    async with writing_back(store, tmp_path, node=node, clock=clock) as m:
        pause = store.hook = Pause(lambda request: request.what == "put" and request.key == "f", when="after")
        handle = await m.create("f")
        await m.fs.write(handle, 0, b"version 1")
        await m.fs.flush(handle)
        await reached(pause.reached)
        await m.fs.write(handle, 0, b"VERSION 2")
        disk.is_full = True
        pause.resume()
        await until(lambda: told(m)["files"] == 0)
        give_room(m, disk)
        await m.close(handle)
        await stored(m)
        assert store.data("f") == b"VERSION 2"
        assert m.parts.staging.bytes_used == 0
    async with writing_back(store, tmp_path, node=node, clock=clock) as m:
        await m.fs.make_durable()
        assert told(m)["replayed"] == told(m)["conflicts"] == 0
        assert await m.tree() == {"f": b"VERSION 2"}


async def test_older_version_does_not_come_over_the_one_that_a_pack_has_and_that_could_not_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mock_clock: MockClock
) -> None:
    monkeypatch.setattr(volatile_rows, "VOLATILE_BYTES_MAX", 0)
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    monkeypatch.setattr(queue, "PAUSE_S_FIRST", 0.01)
    store, disk, clock = MemoryStore(), FullDisk(), Clock()
    node = replace(node_of(clock, "full"), engines=disk)
    async with writing_back(store, tmp_path / "c", pack="always", delay_s=0.2, node=node, clock=clock) as m:
        store.hook = fills_when_stored(store, disk)
        await m.write("f", b"version 1")
        await m.write("marker", b"waits for version 1")
        await rewrite(m, "f", b"version 2")
        assert told(m)["files"] == 3
        mock_clock.rate = 1
        await until(lambda: disk.is_full and told(m)["failures"])
        store.hook = lambda *_: None
        give_room(m, disk)
        await stored(m)
        assert files_packed(m) == 2
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await m.tree() == await other.tree() == {"f": b"version 2", "marker": b"waits for version 1"}
