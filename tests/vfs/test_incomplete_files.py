"""Files of which a write was refused: what their closers, readers, flushers and the next daemon are told."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path

import pytest
import trio

from lakefs_fuse.errors import AccessDenied, CacheError, FileError, LakeError
from lakefs_fuse.meta.database import Database
from lakefs_fuse.metrics import Unfinished
from lakefs_fuse.staging import staging_area
from tests.memory_store import Failures, MemoryStore
from tests.upload.drafting import noise
from tests.vfs.lakes import TTL_S, Clock, Lake, lake, two_lakes
from tests.vfs.writing_back import Outage, die, state, stored, told, until, writing_back

KIB = 1024
SIZE = 500 * KIB
PIECE = 100 * KIB


@contextmanager
def full_disk() -> Iterator[None]:
    """Writes to staging files fail."""

    def fails(fd: int, data: bytes, offset: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging_area, "pwrite_all", fails)
        yield


@contextmanager
def full_database() -> Iterator[None]:
    """No batch can be written."""

    def fails(*_: object, **__: object) -> None:
        raise CacheError("no space left")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "commit", fails)
        yield


async def write_in_vain(m: Lake, handle: int, offset: int) -> None:
    with full_disk(), pytest.raises(LakeError) as raised:
        await m.fs.write(handle, offset, noise("refused", PIECE))
    assert raised.value.errno == errno.ENOSPC


async def incomplete(m: Lake, path: str, flags: int = os.O_TRUNC, *, new: bool = False) -> int:
    """A handle of a file to which SIZE bytes were written, the piece at PIECE in vain."""
    handle = await (m.create(path) if new else m.open(path, os.O_RDWR | flags))
    await m.fs.write(handle, 0, noise("new", PIECE))
    await m.fs.write(handle, 2 * PIECE, noise("new", SIZE - 2 * PIECE))
    await write_in_vain(m, handle, PIECE)
    return handle


async def release_in_vain(m: Lake, handle: int) -> Unfinished:
    """As the kernel does once its write-out has failed; with a FLUSH, which fails. Answers the orphan."""
    with pytest.raises(FileError) as raised:
        await m.fs.flush(handle)
    assert raised.value.errno == errno.ENOSPC
    await m.fs.release(handle)
    await until(lambda: orphans(m))
    (orphan,) = orphans(m)
    return orphan


def _has_unfinished(m: Lake, count: int) -> bool:
    return len(m.fs.unfinished()) == count


def orphans(m: Lake) -> list[Unfinished]:
    return [each for each in m.fs.unfinished() if each.state == "orphan"]


async def test_close_and_fsync_after_a_refused_write_fail_until_it_is_written_again(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        await m.write("f", noise("old", SIZE))
        handle = await incomplete(m, "f")
        for _ in range(2):
            for attempt in (m.fs.flush(handle), m.fs.fsync(handle), m.fs.make_durable(), m.fs.make_durable("f")):
                with pytest.raises(FileError, match=f"bytes {PIECE} to {2 * PIECE} were refused") as raised:
                    await attempt
                assert raised.value.errno == errno.ENOSPC
        assert await state(m, "f") == "failed"
        (item,) = m.fs.unfinished()
        assert (item.state, item.missing) == ("failed", PIECE)
        assert store.data("f") == noise("old", SIZE)
        await m.fs.write(handle, PIECE, noise("again", PIECE))
        await m.close(handle)
        assert store.data("f")[PIECE : 2 * PIECE] == noise("again", PIECE)
        assert len(store.data("f")) == SIZE
        await m.fs.make_durable()
        assert m.fs.unfinished() == []


@pytest.mark.parametrize("cleared", ["aborted", "finished", "rewritten"])
async def test_release_of_an_incomplete_file_leaves_the_version_before_and_an_orphan(
    tmp_path: Path, cleared: str
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        await m.write("f", noise("old", SIZE))
        inode = (await m.found("f")).inode
        orphan = await release_in_vain(m, await incomplete(m, "f"))
        assert (orphan.path, orphan.missing, orphan.bytes) == ("f", PIECE, SIZE)
        assert f"bytes {PIECE} to {2 * PIECE} were refused" in orphan.error
        now = await m.found("f")
        assert now.inode != inode  # whose pages the kernel has
        assert (now.parent, b"f") in m.changes
        assert await m.read("f") == store.data("f") == noise("old", SIZE)
        assert await state(m, "f") == "durable"
        assert m.fs.statistics()["files"] == {"in_use": 0}
        for path in ("", "f"):
            with pytest.raises(LakeError, match="orphan") as raised:
                await m.fs.make_durable(path)
            assert raised.value.errno == errno.ENOSPC
        await m.fs.make_durable("elsewhere")
        with pytest.raises(FileError, match="--incomplete"):
            await m.fs.finish_orphan(orphan.id)
        assert store.data("f") == noise("old", SIZE)
        match cleared:
            case "aborted":
                await m.fs.abort_orphan(orphan.id)
                expected = noise("old", SIZE)
            case "finished":
                await m.fs.finish_orphan(orphan.id, incomplete=True)
                expected = noise("new", PIECE) + bytes(PIECE) + noise("new", SIZE - 2 * PIECE)
            case _:
                handle = await m.open("f", os.O_RDWR | os.O_TRUNC)
                await m.fs.write(handle, 0, noise("third", SIZE))
                await m.close(handle)
                expected = noise("third", SIZE)
                await until(lambda: not orphans(m))
        assert store.data("f") == await m.read("f") == expected
        await m.fs.make_durable()
        assert m.fs.unfinished() == []
        staging = m.fs.statistics()["staging"]
        assert isinstance(staging, dict)
        assert staging["bytes"] == 0
    assert list((tmp_path / "cache" / "staging").iterdir()) == []
    assert store.uploads == {}


@pytest.mark.parametrize(("is_new", "durability"), [(True, "close"), (False, "close"), (False, "writeback")])
async def test_file_of_which_every_write_was_refused_leaves_no_orphan(
    tmp_path: Path, is_new: bool, durability: str
) -> None:
    """As lines that are appended to a log on a full disk: there is nothing to save, and `umount` succeeds."""
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", durability=durability) as m:
        if not is_new:
            await m.write("f", noise("old", SIZE))
            await m.sync()
        handle = await (m.create("f") if is_new else m.open("f", os.O_RDWR | os.O_APPEND))
        await write_in_vain(m, handle, 0 if is_new else SIZE)
        with pytest.raises(FileError) as raised:
            await m.fs.flush(handle)
        assert raised.value.errno == errno.ENOSPC
        await m.fs.release(handle)
        await until(lambda: not m.fs.unfinished())
        await m.fs.make_durable()
        assert await m.tree() == ({} if is_new else {"f": noise("old", SIZE)})


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize("pack", ["always", "never"])
async def test_release_of_an_incomplete_file_keeps_the_extended_attributes_of_the_version_before(
    tmp_path: Path, pack: str, durability: str
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", pack=pack, durability=durability, writeback_delay_s=0.0) as m:
        await m.write("f", b"before")
        await m.set_xattr("f", "user.note", b"kept")
        await m.fs.make_durable()
        await release_in_vain(m, await incomplete(m, "f", 0))
        assert await m.xattrs("f") == {"user.note": b"kept"}
        await m.setattr("f", mode=0o600)  # whose commit has the extended attributes, too
        await m.sync()
    async with lake(store, tmp_path / "other") as other:
        assert (await other.read("f"), await other.xattrs("f")) == (b"before", {"user.note": b"kept"})


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_release_of_an_incomplete_file_that_cannot_be_journaled_leaves_it_in_use_under_its_name(
    tmp_path: Path, durability: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Under write-back the version before waits for the store, too."""
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", durability=durability, retry_timeout_s=0.0) as m:
        outage = Outage(store, away=durability == "writeback")
        await m.write("f", noise("old", SIZE))
        handle = await incomplete(m, "f")
        inode, file = (await m.found("f")).inode, m.fs.handle(handle).file
        with pytest.raises(FileError):
            await m.fs.flush(handle)
        with full_database():
            await m.fs.release(handle)
        assert "f cannot be stored, and stays in use" in caplog.text
        assert (await m.found("f")).inode == inode
        reader = await m.open("f")
        assert m.fs.handle(reader).file is file
        assert not orphans(m)
        assert await state(m, "f") == "failed"
        with full_database():
            await m.fs.release(reader)
        with pytest.raises(LakeError):
            await m.fs.make_durable()
        assert len(orphans(m)) == 1
        assert (await m.found("f")).inode != inode  # whose pages the kernel has
        assert await m.read("f") == noise("old", SIZE)
        outage.away = False
        with pytest.raises(LakeError, match="orphan"):
            await m.fs.make_durable()
        assert store.data("f") == noise("old", SIZE)
        assert m.fs.statistics()["files"] == {"in_use": 0}


async def test_make_durable_beside_an_orphan_stores_changes_of_names(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        await m.write("f", noise("old", SIZE))
        await release_in_vain(m, await incomplete(m, "f"))
        for path in ("", "f"):
            await m.mkdir(f"made{path}")
            with pytest.raises(LakeError, match="orphan"):
                await m.fs.make_durable(path)
            assert m.commits()["operations_waiting"] == 0
    async with lake(store, tmp_path / "other") as other:
        assert await other.names() == ["f", "made", "madef"]


async def test_release_without_flush_of_a_new_incomplete_file_takes_its_name_away(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        await m.mkdir("d")
        handle = await incomplete(m, "d/f", new=True)
        await m.fs.release(handle)
        await until(lambda: orphans(m))
        assert await m.names("d") == []
        assert "d/f" not in store.objects
        await m.write("d/f", b"again")
        await until(lambda: not orphans(m))
        assert store.data("d/f") == b"again"


@pytest.mark.parametrize("pack", ["always", "never"])
async def test_release_of_an_incomplete_file_that_another_node_removed_takes_its_name_away(
    tmp_path: Path, pack: str
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack=pack) as (one, two):
        await one.write("f", b"stored")
        await one.sync()
        await two.poll()
        handle = await incomplete(one, "f")
        clock.advance(TTL_S)
        await two.unlink("f")
        await two.sync()
        await one.poll()
        await release_in_vain(one, handle)
        assert await one.names() == []


async def test_incomplete_file_renamed_over_another_leaves_both_versions_before(tmp_path: Path) -> None:
    """The other comes from a pack, of which only commits tell."""
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", pack="always") as m:
        await m.write("there", b"packed")
        handle = await incomplete(m, "f.tmp", new=True)
        await m.rename("f.tmp", "there")
        await m.fs.release(handle)
        await until(lambda: orphans(m))
        with trio.fail_after(20):
            while await m.names() != ["there"]:
                await trio.sleep(0.002)
        assert await m.read("there") == b"packed"


async def test_incomplete_file_opened_again_in_time_can_be_completed(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        await m.write("f", noise("old", SIZE))
        handle, reader = await incomplete(m, "f"), await m.open("f")
        with pytest.raises(FileError):
            await m.close(handle)
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, PIECE, noise("again", PIECE))
        await m.close(handle)
        await m.close(reader)
        assert store.data("f")[PIECE : 2 * PIECE] == noise("again", PIECE)
        assert orphans(m) == []


async def test_incomplete_file_deleted_is_not_kept(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        handle = await incomplete(m, "f", new=True)
        await m.unlink("f")
        await m.close(handle)
        await until(lambda: m.fs.statistics()["files"] == {"in_use": 0})
        assert m.fs.unfinished() == []
        await m.fs.make_durable()
        assert store.objects == {}


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize("journaled", [True, False])
async def test_next_daemon_after_a_refused_write_publishes_nothing(
    tmp_path: Path, durability: str, journaled: bool
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", durability=durability) as m:
        await m.write("f", noise("old", SIZE))
        await m.fs.make_durable()
        handle = await m.open("f", os.O_RDWR | os.O_TRUNC)
        await m.fs.write(handle, 0, noise("new", SIZE))
        with nullcontext() if journaled else full_database():
            await write_in_vain(m, handle, PIECE)
        dead = die(tmp_path / "cache", tmp_path / "dead")
    for how in ("keep", "finish"):
        async with lake(store, dead, durability=durability, orphans=how) as m:
            (orphan,) = orphans(m)
            assert orphan.missing == (PIECE if journaled else SIZE)
            assert await m.read("f") == store.data("f") == noise("old", SIZE)
            with pytest.raises(LakeError, match="orphan"):
                await m.fs.make_durable()
            assert told(m)["files"] == 0
    async with lake(store, dead, durability=durability) as m:
        await m.fs.finish_orphan(orphans(m)[0].id, incomplete=True)
        assert store.data("f")[2 * PIECE :] == noise("new", SIZE)[2 * PIECE :]


async def test_incomplete_orphan_that_cannot_be_finished_is_incomplete_for_the_next_daemon(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        await m.write("f", noise("old", SIZE))
        orphan = await release_in_vain(m, await incomplete(m, "f"))
        store.hook = Failures(lambda request: request.what == "complete_multipart", AccessDenied("no"), count=9)
        with pytest.raises(AccessDenied):
            await m.fs.finish_orphan(orphan.id, incomplete=True)
        assert orphans(m)[0].missing == orphan.missing
        dead = die(tmp_path / "cache", tmp_path / "dead")
        store.hook = lambda _request, _when: None
    async with lake(store, dead, orphans="finish") as m:
        (left,) = orphans(m)
        assert left.missing == orphan.missing
        assert store.data("f") == noise("old", SIZE)
        await m.fs.finish_orphan(left.id, incomplete=True)
        assert len(store.data("f")) == SIZE
        assert orphans(m) == []


async def test_writeback_does_not_accept_an_incomplete_file(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path / "cache") as m:
        orphan = await release_in_vain(m, await incomplete(m, "f", new=True))
        assert told(m)["accepted"] == 0
        assert store.objects == {}
        assert await m.names() == []
        await m.write("f", noise("again", SIZE))
        await stored(m)
        assert store.data("f") == noise("again", SIZE)
        assert orphan.id not in [each.id for each in m.fs.unfinished()]


@pytest.mark.parametrize("flags", [0, os.O_DIRECT])
async def test_ftruncate_to_the_size_before_takes_a_refused_write_back_unless_the_kernel_may_have_sent_it(
    tmp_path: Path, flags: int
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", pack="never") as m:
        handle = await m.create("f", os.O_RDWR | flags)
        await m.fs.write(handle, 0, noise("new", SIZE))
        await write_in_vain(m, handle, SIZE + PIECE)
        await m.setattr("f", size=SIZE)
        if flags:
            with pytest.raises(FileError, match="were refused"):
                await m.fs.flush(handle)
            await m.setattr("f", size=SIZE)
        await m.close(handle)
        assert store.data("f") == noise("new", SIZE)


async def test_close_again_after_a_failed_sync_of_staging_acknowledges_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux reports a write-out that failed once: a second sync of the same pages succeeds without them."""
    store = MemoryStore()
    async with writing_back(store, tmp_path / "cache") as m:
        outage = Outage(store)
        handle = await m.create("f")
        await m.fs.write(handle, 0, noise("new", SIZE))
        disk = m.parts.staging.disk
        sync_data, failures = disk.sync_data, [OSError(errno.EIO, "lost page")]

        def fail_once(descriptor: int) -> None:
            if failures:
                raise failures.pop()
            sync_data(descriptor)

        monkeypatch.setattr(disk, "sync_data", fail_once)
        with pytest.raises(CacheError, match="the staging disk fails"):
            await m.fs.flush(handle)
        for _ in range(2):
            with pytest.raises(FileError, match=f"bytes 0 to {SIZE} were refused"):
                await m.fs.flush(handle)
        assert told(m)["accepted"] == 0
        (item,) = m.fs.unfinished()
        assert (item.state, item.missing) == ("failed", SIZE)
        await m.fs.write(handle, 0, noise("again", SIZE))
        await m.close(handle)
        assert told(m)["accepted"] == 1
        outage.away = False
        await stored(m)
        assert store.data("f") == noise("again", SIZE)


async def test_writeback_keeps_the_accepted_version_before_an_incomplete_one(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("f", noise("accepted", SIZE))
        inode = (await m.found("f")).inode
        await release_in_vain(m, await incomplete(m, "f"))
        assert (await m.found("f")).inode != inode
        assert await m.read("f") == noise("accepted", SIZE)
        outage.away = False
        with pytest.raises(LakeError, match="orphan"):
            await m.fs.make_durable()
        assert store.data("f") == await m.read("f") == noise("accepted", SIZE)
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, 0, b"more")
        await m.close(handle)
        await until(lambda: told(m)["files"] == 0)
        assert store.data("f") == b"more" + noise("accepted", SIZE)[4:]
        assert len(orphans(m)) == 1  # that version took the rest from the one before


async def test_writeback_change_refused_before_its_copy_began_is_told_at_close(tmp_path: Path) -> None:
    """The accepted version is stored as it was; what is written later does not hide what was refused."""
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("f", noise("accepted", SIZE))
        handle = await m.open("f", os.O_RDWR)
        await write_in_vain(m, handle, PIECE)
        with pytest.raises(FileError):
            await m.fs.flush(handle)
        await m.fs.write(handle, 0, b"later")
        with pytest.raises(FileError):
            await m.fs.flush(handle)
        await m.fs.write(handle, PIECE, noise("again", PIECE))
        await m.close(handle)
        outage.away = False
        await stored(m)
        expected = bytearray(noise("accepted", SIZE))
        expected[:5], expected[PIECE : 2 * PIECE] = b"later", noise("again", PIECE)
        assert store.data("f") == expected
        handle = await m.open("f", os.O_RDWR)
        outage.away = True
        await m.fs.write(handle, 0, b"LATER")
        await m.close(handle)
        inode = (await m.found("f")).inode
        handle = await m.open("f", os.O_RDWR)
        await write_in_vain(m, handle, PIECE)
        with pytest.raises(FileError):
            await m.close(handle)
        with trio.fail_after(20):
            while (await m.found("f")).inode == inode:
                await trio.sleep(0.002)
        outage.away = False
        await stored(m)
        assert store.data("f") == b"LATER" + expected[5:]
        await m.fs.make_durable()


async def write_until_killed(m: Lake, path: str, data: bytes, *, flags: int = os.O_TRUNC) -> None:
    """As a program that a signal ends while it writes: the kernel closes its descriptor."""
    new = path not in await m.names()
    handle = await (m.create(path) if new else m.open(path, os.O_RDWR | flags))
    await m.fs.write(handle, 0, data)
    with suppress(FileError):
        await m.fs.flush(handle, None, lambda others: 0 if others else signal.SIGKILL)
    await m.fs.release(handle)


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize("name", ["last.pt", "last.safetensors.tmp"])
async def test_checkpoint_whose_writer_is_killed_is_not_stored(tmp_path: Path, durability: str, name: str) -> None:
    store, old = MemoryStore(), noise("old", SIZE)
    async with lake(store, tmp_path / "cache", durability=durability) as m:
        await write_until_killed(m, name, noise("torn", SIZE // 2))
        await until(lambda: orphans(m))
        assert await m.names() == []
        await m.write(name, old)
        await until(lambda: not orphans(m))
        for torn in (b"", noise("torn", SIZE // 2)):
            await write_until_killed(m, name, torn)
            kept = 1 if torn else 0  # nothing can be saved of nothing
            await until(partial(_has_unfinished, m, kept))
            assert await m.read(name) == old
        await m.fs.make_durable()
        assert await m.read(name) == old
    async with lake(store, tmp_path / "fresh") as m:
        assert await m.tree() == {name: old}
    async with lake(store, tmp_path / "cache", durability=durability) as m:
        (orphan,) = orphans(m)
        assert "killed by signal 9" in orphan.error
        assert await m.tree() == {name: old}


async def test_what_a_killed_program_wrote_of_a_log_is_stored(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path / "cache") as m:
        await write_until_killed(m, "run.log", b"first line\n")
        assert await m.read("run.log") == b"first line\n"


async def test_checkpoint_that_another_program_writes_is_stored_though_one_is_killed(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path / "cache") as m:
        handle = await m.create("last.pt")
        await m.fs.write(handle, 0, noise("whole", SIZE))
        await write_until_killed(m, "last.pt", b"changed", flags=0)
        await m.close(handle)
        assert await m.read("last.pt") == b"changed" + noise("whole", SIZE)[7:]
        handle = await m.open("last.pt", os.O_RDWR)
        await m.fs.flush(handle, None, lambda others: 0 if others else signal.SIGKILL)
        await m.fs.release(handle)
        assert not orphans(m), "it had written nothing"


async def test_checkpoint_that_was_synced_stays_though_its_writer_is_killed(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path / "cache") as m:
        handle = await m.create("last.pt")
        await m.fs.write(handle, 0, noise("synced", SIZE))
        await m.fs.fsync(handle)
        await m.fs.flush(handle, None, lambda _: signal.SIGTERM)
        await m.fs.release(handle)
        assert not orphans(m)
        assert await m.read("last.pt") == noise("synced", SIZE)
