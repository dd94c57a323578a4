"""What a daemon that died leaves behind, and what the next one makes of it.

A death is a copy of the cache directory as it lies on disk while the daemon runs.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.errors import AccessDenied, CacheError, ConfigError, FileError, LakeError, Unavailable
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.metrics import Unfinished
from lakefs_fuse.staging.draft_record import DraftRecord, DraftState, decode
from lakefs_fuse.staging.part_layout import PartLayout
from lakefs_fuse.staging.segments import HEAD, MAGIC, PREFIX
from lakefs_fuse.staging.staging_area import KEY_XATTR
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_target import Describe
from lakefs_fuse.upload.restore import restore_draft
from lakefs_fuse.upload.uploader import Uploader
from lakefs_fuse.vfs.writeback import replay
from tests.fakes import open_database
from tests.memory_store import Failures, MemoryStore, Pause, Request, When
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import NS, SPANS, TTL_S, Clock, Lake, lake, two_lakes
from tests.vfs.writing_back import NEVER_S, Outage, writing_back

KIB = 1024
PART = 64 * KIB
LARGE = 5 * PART + 100


def is_put(request: Request) -> bool:
    return request.what in ("put", "complete_multipart")


def die(cache: Path, target: Path) -> Path:
    """The cache directory as a daemon killed now would leave it."""
    subprocess.run(["cp", "-a", "--sparse=always", str(cache), str(target)], check=True)
    return target


async def uploaded(store: MemoryStore, m: Lake, parts: int) -> None:
    with trio.fail_after(10):
        while sum(unfinished.parts_done for unfinished in m.fs.unfinished()) < parts:
            await trio.sleep(0.002)


def orphan(m: Lake) -> Unfinished:
    (found,) = (each for each in m.fs.unfinished() if each.id != "names")
    assert found.state == "orphan"
    return found


async def fails_with_eexist(m: Lake, orphan_id: str) -> None:
    with pytest.raises(FileError) as caught:
        await m.fs.finish_orphan(orphan_id)
    assert caught.value.errno == errno.EEXIST


def staged(cache: Path) -> list[str]:
    return [path.name for path in (cache / "staging").iterdir()]


def staging_bytes(m: Lake) -> object:
    told = m.fs.statistics()["staging"]
    assert isinstance(told, dict)
    return told["bytes"]


async def died_writing(store: MemoryStore, root: Path, size: int, path: str = "file") -> Path:
    """A new file of ``size`` bytes (seed "new"), never closed, its complete parts uploaded."""
    async with lake(store, root / "cache") as m:
        await m.names()
        handle = await m.create(path)
        await m.fs.write(handle, 0, noise("new", size))
        await uploaded(store, m, PartLayout(SPANS).index(size) if size > PART else 0)
        return die(root / "cache", root / "dead")


@pytest.mark.parametrize("size", [0, 100, LARGE])
async def test_orphans_are_kept_and_nothing_is_visible(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, size)
    requests = store.count("abort_multipart") + store.count("complete_multipart")
    for _ in range(2):
        async with lake(store, dead) as m:
            found = orphan(m)
            assert (found.path, found.bytes, found.error) == ("file", size, "")
            assert await m.lookup("file") is None
            assert await m.names() == []
            assert m.fs.statistics()["dirty"] == {"files": 0, "bytes": 0, "failed": 0, "orphans": 1}
    assert store.count("abort_multipart") + store.count("complete_multipart") == requests
    assert store.objects == {}
    assert len(staged(dead)) == 1


@pytest.mark.parametrize("at_mount", [False, True])
@pytest.mark.parametrize("size", [0, 100, PART, LARGE, 60 * PART + 5])
async def test_finish(tmp_path: Path, size: int, at_mount: bool) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, size)
    async with lake(store, dead, orphans="finish" if at_mount else "keep") as m:
        if not at_mount:
            await m.fs.finish_orphan(orphan(m).id)
        assert store.data("file") == noise("new", size)
        assert store.metadata("file")["mode"] == "33188"
        assert m.fs.unfinished() == []
        assert staging_bytes(m) == 0
        assert await m.read("file") == noise("new", size)
    assert store.uploads == {}
    assert staged(dead) == []
    async with lake(store, dead) as m:
        assert m.fs.unfinished() == []


@pytest.mark.parametrize("at_mount", [False, True])
@pytest.mark.parametrize("size", [0, 100, LARGE])
async def test_abort(tmp_path: Path, size: int, at_mount: bool) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, size)
    async with lake(store, dead, orphans="abort" if at_mount else "keep") as m:
        if not at_mount:
            await m.fs.abort_orphan(orphan(m).id)
        assert m.fs.unfinished() == []
        assert staging_bytes(m) == 0
        with pytest.raises(ConfigError):
            await m.fs.abort_orphan("gone")
    assert (store.objects, store.uploads, staged(dead)) == ({}, {}, [])


async def test_a_new_file_counts_as_it_is_staged(tmp_path: Path) -> None:
    """Written to after the record was last saved, parts that were uploaded before included."""
    store = MemoryStore()
    data = bytearray(noise("new", LARGE))
    async with lake(store, tmp_path / "cache") as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, bytes(data))
        await uploaded(store, m, 5)
        store.hook = Failures(lambda request: request.what == "upload_part", AccessDenied("no"), count=100)
        await m.fs.write(handle, 5, b"later")
        await m.fs.write(handle, LARGE, b"longer")
        await trio.sleep(0.02)
        dead = die(tmp_path / "cache", tmp_path / "dead")
    data[5:10] = b"later"
    data += b"longer"
    store.hook = lambda request, when: None
    async with lake(store, dead, orphans="finish"):
        assert store.data("file") == data


async def test_over_a_base_what_was_saved_counts(tmp_path: Path) -> None:
    """And what was not staged comes from the base."""
    store = MemoryStore()
    old = bytearray(noise("old", LARGE))
    store.give("file", bytes(old))
    async with lake(store, tmp_path / "cache", retry_timeout_s=0) as m:
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 70 * KIB, b"patched")
        store.hook = Failures(is_put, Unavailable("away"))
        with pytest.raises(Unavailable):
            await m.fs.fsync(handle)
        sent = len(store.parts_sent())
        dead = die(tmp_path / "cache", tmp_path / "dead")
    old[70 * KIB : 70 * KIB + 7] = b"patched"
    async with lake(store, dead) as m:
        assert await m.read("file") == noise("old", LARGE)
        assert orphan(m).error == "away"
        await m.fs.finish_orphan(orphan(m).id)
        assert store.data("file") == old
        assert await m.read("file") == old
    assert len(store.parts_sent()) == sent  # parts of an attempt to publish cannot have changed
    assert store.uploads == {}


async def test_changed_after_a_failed_close(tmp_path: Path) -> None:
    """The parts of the failed attempt are not trusted any more."""
    store = MemoryStore()
    data = bytearray(noise("new", LARGE))
    async with lake(store, tmp_path / "cache") as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, bytes(data))
        store.hook = Failures(is_put, AccessDenied("no"))
        with pytest.raises(AccessDenied):
            await m.fs.flush(handle)
        await m.fs.write(handle, 100, b"changed")
        data[100:107] = b"changed"
        dead = die(tmp_path / "cache", tmp_path / "dead")
    async with lake(store, dead, orphans="finish"):
        assert store.data("file") == data
        assert store.uploads == {}


async def die_after_lost_answer(store: MemoryStore, root: Path, size: int, clock: Clock) -> Path:
    """The cache directory of a writer that died after its PUT or completion, whose answer was lost."""
    async with lake(store, root / "cache", clock=clock, retry_timeout_s=0) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise("new", size))
        store.hook = Failures(is_put, Unavailable("lost"), when="after")
        with pytest.raises(Unavailable):
            await m.fs.flush(handle)
        return die(root / "cache", root / "dead")


@pytest.mark.parametrize("size", [100, LARGE])
async def test_an_answer_that_was_lost_and_then_the_daemon(tmp_path: Path, size: int) -> None:
    """The object is there: nothing is an orphan, and nothing is sent again."""
    store = MemoryStore()
    dead = await die_after_lost_answer(store, tmp_path, size, Clock())
    sent = store.count("put", "file") + len(store.parts_sent())
    async with lake(store, dead) as m:
        await m.fs.sync_names()
        assert m.fs.unfinished() == []
        assert await m.read("file") == noise("new", size)
        assert staging_bytes(m) == 0
    assert store.count("put", "file") + len(store.parts_sent()) == sent
    assert staged(dead) == []


@pytest.mark.parametrize("size", [100, LARGE])
async def test_stored_version_that_another_node_replaced_before_its_writer_is_back_stays_away(
    tmp_path: Path, size: int
) -> None:
    store, clock = MemoryStore(), Clock()
    dead = await die_after_lost_answer(store, tmp_path, size, clock)
    store.hook = lambda _request, _when: None
    clock.now_ns += 4 * NS
    async with lake(store, tmp_path / "other", clock=clock, delete_after_s=1e6) as other:
        await other.write("other", b"other")
        for old, new in (("other", "file"), ("file", "moved")):
            await other.rename(old, new)
            await other.fs.sync_names()
        assert "file" in store.objects
    async with lake(store, dead, clock=clock) as m:
        assert m.fs.unfinished() == []
        await m.fs.sync_names()
        assert await m.names() == ["moved"]
    async with lake(store, tmp_path / "fresh", clock=clock) as fresh:
        assert await fresh.names() == ["moved"]


@pytest.mark.parametrize("size", [100, LARGE])
async def test_a_lost_answer_and_then_a_change_and_then_the_daemon(tmp_path: Path, size: int) -> None:
    """The object is there with older bytes, and is ours to replace."""
    store = MemoryStore()
    data = bytearray(noise("new", size))
    async with lake(store, tmp_path / "cache", retry_timeout_s=0) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, bytes(data))
        store.hook = Failures(is_put, Unavailable("lost"), when="after")
        with pytest.raises(Unavailable):
            await m.fs.flush(handle)
        await m.fs.write(handle, 5, b"newer")
        data[5:10] = b"newer"
        dead = die(tmp_path / "cache", tmp_path / "dead")
    async with lake(store, dead) as m:
        assert orphan(m).path == "file"
        await m.fs.finish_orphan(orphan(m).id)
        assert store.data("file") == data
    assert store.uploads == {}


async def test_somebody_else_replaced_the_key(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, LARGE)
    store.give("file", b"theirs")
    clock = Clock()
    clock.advance(TTL_S + 1)
    for _ in range(2):
        async with lake(store, dead, orphans="finish", clock=clock) as m:
            with pytest.raises(FileError) as caught:
                await m.fs.finish_orphan(orphan(m).id)
            assert caught.value.errno == errno.EEXIST
            assert store.data("file") == b"theirs"
            assert (dead / "staging" / orphan(m).id).read_bytes() == noise("new", LARGE)
            assert await m.read("file") == b"theirs"
    async with lake(store, dead) as m:
        await m.fs.abort_orphan(orphan(m).id)
    assert store.data("file") == b"theirs"
    assert (store.uploads, staged(dead)) == ({}, [])


@pytest.mark.parametrize("is_of_this_node", [False, True])
@pytest.mark.parametrize(
    ("request_held", "pack"), [("upload_part", "never"), ("upload_part", "always"), ("complete_multipart", "never")]
)
async def test_finish_keeps_what_was_stored_while_the_orphan_was_uploaded(
    tmp_path: Path, request_held: str, is_of_this_node: bool, pack: str
) -> None:
    store, clock = MemoryStore(), Clock()
    dead = await died_writing(store, tmp_path, LARGE)
    store.uploads.clear()
    async with (
        lake(store, dead, clock=clock, pack=pack) as m,
        lake(store, tmp_path / "two", clock=clock, pack=pack) as two,
    ):
        found = orphan(m)
        pause = store.hook = Pause(lambda request: request.what == request_held)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_with_eexist, m, found.id)
            await reached(pause.reached)
            clock.advance(5)
            await (m if is_of_this_node else two).write("file", b"theirs")
            pause.resume()
        assert (dead / "staging" / orphan(m).id).read_bytes() == noise("new", LARGE)
        await m.poll()
        await two.poll()
        clock.advance(2 * TTL_S)
        assert await m.read("file") == await two.read("file") == b"theirs"
        await two.unlink("file")
        await two.sync()
        await m.poll()
        await m.fs.finish_orphan(found.id)
        assert await m.read("file") == noise("new", LARGE)


@pytest.mark.parametrize(
    ("able", "request_held"),
    [(False, "upload_part"), (False, "upload_part_copy"), (True, "complete_multipart")],
    ids=["without conditions", "without conditions, while parts are copied", "with conditions"],
)
async def test_finish_of_a_changed_file_keeps_what_was_stored_while_it_was_uploaded(
    tmp_path: Path, able: bool, request_held: str
) -> None:
    capabilities = Capabilities(
        name="memory", put_if_match=able, complete_if_match=able, complete_if_absent=able, put_if_absent=able
    )
    store, clock = MemoryStore(capabilities), Clock()
    store.give("file", noise("old", LARGE))
    async with lake(store, tmp_path / "cache", retry_timeout_s=0) as m:
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 70 * KIB, b"patched")
        store.hook = Failures(is_put, Unavailable("away"))
        with pytest.raises(Unavailable):
            await m.fs.fsync(handle)
        dead = die(tmp_path / "cache", tmp_path / "dead")
    store.uploads.clear()
    async with lake(store, dead, clock=clock) as m:
        pause = store.hook = Pause(lambda request: request.what == request_held)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_with_eexist, m, orphan(m).id)
            await reached(pause.reached)
            store.give("file", b"theirs")
            pause.resume()
        assert store.data("file") == b"theirs"
        assert orphan(m).path == "file"


async def test_the_upload_is_gone(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, LARGE)
    store.uploads.clear()
    async with lake(store, dead, orphans="finish"):
        assert store.data("file") == noise("new", LARGE)
    assert store.uploads == {}


async def test_an_upload_whose_id_was_never_learnt(tmp_path: Path) -> None:
    """The daemon died between asking for the upload and its answer."""
    store = MemoryStore()
    for index, how in enumerate(("finish", "abort")):
        root = tmp_path / how
        root.mkdir()
        store.hook = Failures(lambda request: request.what == "create_multipart", Unavailable("lost"), when="after")
        async with lake(store, root / "cache", retry_timeout_s=0) as m:
            handle = await m.create(f"file{index}")
            await m.fs.write(handle, 0, noise("new", LARGE))
            with trio.fail_after(10):
                while not store.uploads:
                    await trio.sleep(0.002)
            await trio.sleep(0.02)
            dead = die(root / "cache", root / "dead")
        theirs = store.create_multipart(f"file{index}")
        async with lake(store, dead, orphans=how) as m:
            assert m.fs.unfinished() == []
        assert theirs in store.uploads
        assert not any(upload.parts for upload in store.uploads.values())
        store.uploads.clear()
    assert store.data("file0") == noise("new", LARGE)
    assert "file1" not in store.objects


async def test_finishing_may_fail_and_be_repeated(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, LARGE)
    store.uploads.clear()
    async with lake(store, dead) as m:
        found = orphan(m)
        used = staging_bytes(m)
        store.hook = Failures(is_put, AccessDenied("no"))
        with pytest.raises(AccessDenied):
            await m.fs.finish_orphan(found.id)
        assert orphan(m).error == "no"
        assert staging_bytes(m) == used
        sent = len(store.parts_sent())
        await m.fs.finish_orphan(found.id)
        assert len(store.parts_sent()) == sent
        assert store.data("file") == noise("new", LARGE)
    assert store.uploads == {}


async def test_finishing_whose_answer_was_lost(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, LARGE)
    async with lake(store, dead, retry_timeout_s=0) as m:
        found = orphan(m)
        store.hook = Failures(is_put, Unavailable("lost"), when="after")
        with pytest.raises(Unavailable):
            await m.fs.finish_orphan(found.id)
        etag = store.objects["file"][1].etag
        await m.fs.finish_orphan(found.id)
        assert store.objects["file"][1].etag == etag
        assert m.fs.unfinished() == []


async def test_an_orphan_is_dealt_with_once_at_a_time(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, 100)
    async with lake(store, dead) as m:
        found = orphan(m)
        refused = []

        async def finish() -> None:
            try:
                await m.fs.finish_orphan(found.id)
            except LakeError as error:
                refused.append(error.errno)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(finish)
            nursery.start_soon(finish)
        assert refused == [errno.EBUSY]
        assert store.data("file") == noise("new", 100)


async def test_larger_than_staging(tmp_path: Path) -> None:
    """Parts that were let go are in their upload only, and are trusted; holes are never published."""
    store, size = MemoryStore(), 40 * PART
    async with lake(store, tmp_path / "cache", staging_bytes_max=16 * PART) as m:
        handle = await m.create("file")
        for at in range(0, size, PART):
            await m.fs.write(handle, at, noise("new", size)[at : at + PART])
        dead = die(tmp_path / "cache", tmp_path / "dead")
    before = len(store.parts_sent())
    again = die(dead, tmp_path / "again")
    async with lake(store, dead, orphans="finish", staging_bytes_max=16 * PART) as m:
        assert store.data("file") == noise("new", size)
        assert staging_bytes(m) == 0
    assert len(store.parts_sent()) - before < 40 - 10
    store.take("file")
    async with lake(store, again, orphans="finish", staging_bytes_max=16 * PART) as m:
        assert "file" not in store.objects  # its upload is gone, and with it what was let go
        await m.fs.abort_orphan(orphan(m).id)


async def test_staged_bytes_that_are_gone(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, LARGE)
    (name,) = staged(dead)
    (dead / "staging" / name).unlink()
    async with lake(store, dead, orphans="finish") as m:
        with pytest.raises(CacheError):
            await m.fs.finish_orphan(orphan(m).id)
        assert store.objects == {}
        await m.fs.abort_orphan(orphan(m).id)
    assert store.uploads == {}


async def test_what_is_written_after_the_name_is_gone_is_no_orphan(tmp_path: Path) -> None:
    """The kernel sends what it holds back when it likes, also of a file that was deleted while it was open."""
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        await m.write("file", b"old")
        handle = await m.open("file", os.O_RDWR)
        await m.unlink("file")
        await m.fs.write(handle, 0, b"late")
        assert await m.fs.read(handle, 0, 10) == b"late"
        dead = die(tmp_path / "cache", tmp_path / "dead")
        await m.close(handle)
    async with lake(store, dead) as m:
        assert [each.path for each in m.fs.unfinished() if each.id != "names"] == []
        assert await m.names() == []
    assert staged(dead) == []


async def test_deleted_while_open_is_never_brought_back(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise("new", LARGE))
        await uploaded(store, m, 5)
        await m.unlink("file")
        await m.fs.write(handle, 0, b"more")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    async with lake(store, dead, orphans="finish") as m:
        assert m.fs.unfinished() == []
        assert await m.names() == []
    assert (store.objects, store.uploads, staged(dead)) == ({}, {}, [])


@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_file_whose_name_goes_while_it_is_open_is_unlinked_in_the_same_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    store, commit, died = MemoryStore(), Database.commit, list[Path]()
    async with lake(store, tmp_path / "cache") as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise("new", 100))
        inode = (await m.found("file")).inode
        if how == "replaced":
            await m.create("other")

        def commit_and_die(database: Database, batch: Batch, *, sync: bool = False) -> None:
            commit(database, batch, sync=sync)
            if not died and m.parts.namespace.tree.entry(inode) is None:
                died.append(die(tmp_path / "cache", tmp_path / "dead"))

        monkeypatch.setattr(Database, "commit", commit_and_die)
        if how == "removed":
            await m.unlink("file")
        else:
            await m.rename("other", "file")
    async with lake(store, *died) as m:
        assert len(m.fs.unfinished()) == (how == "replaced"), "of the other file, which is also being written"


async def test_many_orphans(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        await m.mkdir("d")
        for number in range(10):
            await m.fs.write(await m.create(f"d/file{number}"), 0, noise(number, 10_000 * number))
        dead = die(tmp_path / "cache", tmp_path / "dead")
    store.give("d/file3", b"theirs")
    async with lake(store, dead, orphans="finish") as m:
        assert orphan(m).path == "d/file3"
        assert len(await m.names("d")) == 10
    for number in set(range(10)) - {3}:
        assert store.data(f"d/file{number}") == noise(number, 10_000 * number)


async def test_a_name_may_be_used_again_before_its_orphan_is_dealt_with(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, 100)
    async with lake(store, dead) as m:
        await m.write("file", b"fresh")
        with pytest.raises(FileError) as caught:
            await m.fs.finish_orphan(orphan(m).id)
        assert caught.value.errno == errno.EEXIST
        assert await m.read("file") == b"fresh"
        await m.fs.abort_orphan(orphan(m).id)
        assert store.data("file") == b"fresh"


@pytest.mark.parametrize("seed", range(4))
async def test_finish_of_all_orphans_gives_a_name_its_newest_bytes(tmp_path: Path, seed: int) -> None:
    """Two daemons died writing the file. Ids are random, and say nothing of their order."""
    store, clock = MemoryStore(), Clock()
    dead = await died_writing(store, tmp_path, 100)
    clock.advance(60)
    async with lake(store, dead, clock=clock, seed=seed) as m:
        await m.fs.write(await m.create("file"), 0, noise("newer", 120))
        both = die(dead, tmp_path / "both")
    async with lake(store, both, clock=clock, orphans="finish") as m:
        assert await m.read("file") == noise("newer", 120)
        assert orphan(m).bytes == 100
        await fails_with_eexist(m, orphan(m).id)


# -- an orderly end with bytes that are not durable


async def test_an_end_that_was_not_a_death(tmp_path: Path) -> None:
    """What is staged is noted as it is, pages over a base included."""
    store = MemoryStore()
    old = bytearray(noise("old", LARGE))
    store.give("base", bytes(old))
    async with lake(store, tmp_path) as m:
        await m.fs.write(await m.create("new"), 0, b"new")
        handle = await m.open("base", os.O_RDWR)
        await m.fs.write(handle, 5, b"patched")
        old[5:12] = b"patched"
    async with lake(store, tmp_path, orphans="finish") as m:
        assert m.fs.unfinished() == []
        assert store.data("new") == b"new"
        assert store.data("base") == old


# -- small acknowledged files, which share a segment


def bytes_of(path: str) -> bytes:
    return b"precious bytes of " + path.encode()


async def died_acknowledging(store: MemoryStore, root: Path, *paths: str) -> tuple[Path, Outage]:
    """Small files in one segment of which none is in the store, which is away."""
    outage = Outage(store)
    async with writing_back(store, root / "cache", delay_s=NEVER_S, pack="auto") as m:
        for path in paths:
            await m.write(path, bytes_of(path))
        return die(root / "cache", root / "dead"), outage


def fail_restore(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    """The next mounts cannot bring this file back."""

    def failing(uploader: Uploader, record: DraftRecord, describe: Describe) -> Draft:
        if record.key == path:
            raise CacheError("the staging disk fails")
        return restore_draft(uploader, record, describe)

    monkeypatch.setattr(replay, "restore_draft", failing)


async def test_orphan_in_a_segment_can_be_finished_after_its_neighbours_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    dead, outage = await died_acknowledging(store, tmp_path, "a", "b", "c")
    fail_restore(monkeypatch, "b")
    outage.away = False
    async with writing_back(store, dead) as m:
        await m.fs.make_durable()
        assert await m.names() == ["a", "c"]
        await m.fs.finish_orphan(orphan(m).id)
        assert store.data("b") == bytes_of("b")
        assert m.fs.unfinished() == []
    assert staged(dead) == []


async def test_orphan_in_a_segment_can_be_finished_after_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    dead, outage = await died_acknowledging(store, tmp_path, "b")
    fail_restore(monkeypatch, "b")
    for orphans in ("keep", "finish"):
        async with writing_back(store, dead, orphans=orphans) as m:
            for _ in range(2):
                with pytest.raises(Unavailable):
                    await m.fs.finish_orphan(orphan(m).id)
    outage.away = False
    async with writing_back(store, dead, orphans="finish") as m:
        assert store.data("b") == bytes_of("b")
        assert m.fs.unfinished() == []
    assert staged(dead) == []


async def test_orphan_in_a_segment_that_is_aborted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    dead, outage = await died_acknowledging(store, tmp_path, "b", "c")
    fail_restore(monkeypatch, "b")
    outage.away = False
    async with writing_back(store, dead) as m:
        await m.fs.make_durable()
        await m.fs.abort_orphan(orphan(m).id)
        assert await m.names() == ["c"]
    assert staged(dead) == []


# -- a journal that is damaged


def rewrite_journal(cache: Path, change: Callable[[Journal, Batch, str], None]) -> None:
    database = open_database(cache / "meta", "file:///nowhere")
    journal, batch = Journal(database), Batch()
    for draft_id, _ in journal.records():
        change(journal, batch, draft_id)
    database.commit(batch, sync=True)
    database.close()


async def expect_unrecorded(store: MemoryStore, cache: Path, data: bytes) -> None:
    """Listed and kept; refused to be finished; `abort` takes bytes and upload away."""
    for how in ("keep", "finish"):
        async with lake(store, cache, orphans=how) as m:
            found = orphan(m)
            assert found.path == "file"
            assert found.error.startswith("unrecorded")
            assert (cache / "staging" / found.id).read_bytes() == data
            assert await m.names() == []
            assert await m.lookup("file") is None
            with pytest.raises(FileError) as caught:
                await m.fs.finish_orphan(found.id)
            assert caught.value.errno == errno.EINVAL
    assert store.objects == {}
    async with lake(store, cache, orphans="abort") as m:
        assert m.fs.unfinished() == []
        assert staging_bytes(m) == 0
    assert (store.uploads, staged(cache)) == ({}, [])


async def test_a_record_that_cannot_be_read(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, LARGE)
    rewrite_journal(dead, lambda journal, batch, draft_id: journal.put(batch, draft_id, b"\xc1garbage"))
    await expect_unrecorded(store, dead, noise("new", LARGE))


def change_records(cache: Path, change: Callable[[dict[str, object]], bytes], *keys: str) -> None:
    """Records of these files become what ``change`` makes of them."""
    database = open_database(cache / "meta", "file:///nowhere")
    journal, batch = Journal(database), Batch()
    for draft_id, raw in journal.records():
        record = msgspec.msgpack.decode(raw)
        if record["key"] in keys:
            journal.put(batch, draft_id, change(record))
    database.commit(batch, sync=True)
    database.close()


def of_later_version(record: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode(record | {"state": "sealed"})


def of_this_version(record: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode(record | {"state": "accepted"})


def damaged(_record: dict[str, object]) -> bytes:
    return b"\xc1garbage"


@pytest.mark.parametrize("is_segment_lost", [False, True])
@pytest.mark.parametrize("how", [of_later_version, damaged])
async def test_record_of_a_small_file_that_cannot_be_read_keeps_its_bytes(
    tmp_path: Path, how: Callable[[dict[str, object]], bytes], is_segment_lost: bool
) -> None:
    """*nothing unread is deleted*: also where they are only beside the record yet, and its neighbours are stored."""
    store, clock = MemoryStore(), Clock()
    dead, outage = await died_acknowledging(store, tmp_path, "a", "b", "c")
    change_records(dead, how, "b")
    if is_segment_lost:  # it was not synced before the power cut
        (segment,) = (dead / "staging").glob(f"{PREFIX}*")
        segment.write_bytes(bytes(segment.stat().st_size))
    outage.away = False
    for orphans in ("keep", "finish"):
        async with writing_back(store, dead, orphans=orphans, clock=clock) as m:
            await m.fs.make_durable()
            found = orphan(m)
            assert found.error.startswith("unrecorded")
            assert "mount with the version" in found.error
            is_name_known = how is of_later_version or not is_segment_lost
            assert found.path == ("b" if is_name_known else "")
            assert (dead / "staging" / found.id).read_bytes() == bytes_of("b")
            clock.advance(TTL_S + 1)  # until a LIST, the row of a name that no record has is there
            assert await m.names() == ["a", "c"]
    async with writing_back(store, dead, orphans="abort") as m:
        assert m.fs.unfinished() == []
        assert staging_bytes(m) == 0
    async with writing_back(store, dead):
        assert staged(dead) == []
    assert not {"b"} & store.objects.keys()


@pytest.mark.parametrize("size", [100, 300 * KIB])
async def test_record_of_a_later_version_is_restored_by_that(tmp_path: Path, size: int) -> None:
    """What is acknowledged meanwhile comes after it."""
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache", delay_s=NEVER_S) as m:
        for path in ("a", "b"):
            await m.write(path, noise(path, size))
        dead = die(tmp_path / "cache", tmp_path / "dead")
    change_records(dead, of_later_version, "a", "b")
    async with writing_back(store, dead, delay_s=NEVER_S) as m:
        assert await m.names() == []
        await m.write("b", noise("newer", size))
    change_records(dead, of_this_version, "a", "b")
    outage.away = False
    async with writing_back(store, dead) as m:
        assert await m.tree() == {"a": noise("a", size), "b": noise("newer", size)}
        await m.fs.make_durable()
        assert m.fs.unfinished() == []
        assert store.data("b") == noise("newer", size)
    assert staged(dead) == []


async def test_a_record_that_is_lost(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, LARGE)
    rewrite_journal(dead, lambda journal, batch, draft_id: journal.delete(batch, draft_id))
    await expect_unrecorded(store, dead, noise("new", LARGE))


@pytest.mark.parametrize("end", [16, 40, 3000])
async def test_segment_with_a_torn_page_without_a_database_loses_what_is_in_it_alone(tmp_path: Path, end: int) -> None:
    """Its head, its record too, or the files behind it: what is left is copied, and the segment kept until asked."""
    store = MemoryStore()
    paths = [f"{number}" for number in range(20)]
    dead, outage = await died_acknowledging(store, tmp_path, *paths)
    shutil.rmtree(dead / "meta")
    (segment,) = (dead / "staging").glob(f"{PREFIX}*")
    raw = segment.read_bytes()
    segment.write_bytes(bytes(end) + raw[end:])
    left = [path for path in paths if raw.rindex(MAGIC, 0, raw.index(bytes_of(path))) >= end]
    assert left
    assert left != paths
    outage.away = False
    await expect_damaged(store, dead, segment.name, left)


@pytest.mark.parametrize("length", [1 << 62, 1 << 20, 18, 20])
async def test_segment_with_a_wrong_length_without_a_database_keeps_its_other_files(
    tmp_path: Path, length: int
) -> None:
    store = MemoryStore()
    dead, outage = await died_acknowledging(store, tmp_path, "a", "b", "c")
    shutil.rmtree(dead / "meta")
    (segment,) = (dead / "staging").glob(f"{PREFIX}*")
    raw = bytearray(segment.read_bytes())
    HEAD.pack_into(raw, 0, *HEAD.unpack_from(raw)[:2], length)
    segment.write_bytes(raw)
    outage.away = False
    await expect_damaged(store, dead, segment.name, ["b", "c"])


async def expect_damaged(store: MemoryStore, cache: Path, name: str, paths: list[str]) -> None:
    """What is left of a segment is listed, as are those files of it, by each mount until they are aborted."""
    for _ in range(2):
        async with writing_back(store, cache) as m:
            found = {item.path: item for item in m.fs.unfinished()}
            assert found.keys() == {"", *paths}
            assert found[""].id == f"damaged-{name}"
            assert found[""].error.startswith("unrecorded")
            for path in paths:
                assert (cache / "staging" / found[path].id).read_bytes() == bytes_of(path)
            assert int(str(staging_bytes(m))) >= found[""].bytes
            assert sorted(staged(cache)) == sorted(item.id for item in found.values())
            await m.write("fresh", b"fresh")
            await m.fs.make_durable()
    async with writing_back(store, cache, orphans="abort") as m:
        assert m.fs.unfinished() == []
        assert staging_bytes(m) == 0
    assert staged(cache) == []


async def test_record_that_a_repaired_database_lost_keeps_bytes_beside_those_of_others(tmp_path: Path) -> None:
    """The segment has files whose records are there."""
    store = MemoryStore()
    dead, outage = await died_acknowledging(store, tmp_path, "a", "b", "c")
    database = open_database(dead / "meta", "file:///nowhere")
    journal = Journal(database)
    (lost,) = (each for each, raw in journal.records() if decode(raw).key == "b")
    journal.remove(lost)
    database.commit(Batch({schema.SINGLE_LOST: b""}), sync=True)
    database.close()
    outage.away = False
    for _ in range(2):
        async with writing_back(store, dead) as m:
            await m.fs.make_durable()
            found = orphan(m)
            assert (found.id, found.path) == (lost, "b")
            assert (dead / "staging" / lost).read_bytes() == bytes_of("b")
    assert staged(dead) == [lost]


async def test_a_database_that_is_lost(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, LARGE)
    shutil.rmtree(dead / "meta")
    await expect_unrecorded(store, dead, noise("new", LARGE))


@pytest.mark.parametrize("pattern", ["*.log", "MANIFEST*", "CURRENT", "OPTIONS*", "*.sst", "*"])
@pytest.mark.parametrize("flush", [False, True])
async def test_a_database_that_is_damaged(tmp_path: Path, pattern: str, flush: bool) -> None:
    """The mount works, the bytes are listed (with their record or without it), and names come back with a listing."""
    store = MemoryStore()
    store.give("d/other", b"x")
    dead = await died_writing(store, tmp_path, LARGE)
    if flush:  # brings everything from the log into tables
        async with lake(store, dead) as m:
            await m.names()
    for path in (dead / "meta").glob(pattern):
        raw = bytearray(path.read_bytes())
        for at in range(len(raw) // 3, min(len(raw), len(raw) // 3 + 2000), 7):
            raw[at] ^= 0xFF
        path.write_bytes(bytes(raw))
    async with lake(store, dead) as m:
        found = orphan(m)
        assert found.path == "file"
        assert (dead / "staging" / found.id).read_bytes() == noise("new", LARGE)
        assert await m.names() == ["d"]
        assert await m.read("d/other") == b"x"
        await m.write("fresh", b"y")
        await m.fs.abort_orphan(found.id)
    assert store.uploads == {}
    assert store.data("fresh") == b"y"


async def test_database_that_lost_a_file_of_rows_shows_every_name(tmp_path: Path) -> None:
    """What says which commits were applied is in another file."""
    store, cache, clock = MemoryStore(), tmp_path / "cache", Clock()

    def files() -> set[Path]:
        return set((cache / "meta").glob("*.sst"))

    async def rename_new(name: str) -> set[Path]:
        """The files in which the rows of this are."""
        before = files()
        async with lake(store, cache, clock=clock) as m:
            await m.write(f"{name}.tmp", name.encode())
            await m.rename(f"{name}.tmp", name)
            await m.fs.look_again()
        clock.advance(86400)  # later polls do not ask for its commit any more
        return files() - before

    async with lake(store, cache, clock=clock) as m:
        assert await m.names() == []
    lost = await rename_new("first")
    assert await rename_new("second")
    assert lost
    assert lost <= files()
    for path in lost:
        path.unlink()
    for _ in range(2):
        async with lake(store, cache, clock=clock) as m:
            assert await m.names() == ["first", "second"]
            assert await m.read("first") == b"first"
    assert list(tmp_path.rglob("meta.damaged-*")) == []


async def test_another_lakes_cache_is_refused(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path):
        pass
    database = open_database(tmp_path / "meta", "file:///nowhere")
    batch = Batch()
    batch.rows[b"Midentity"] = b"s3://another"
    database.commit(batch, sync=True)
    database.close()
    with pytest.raises(CacheError, match="s3://another"):
        async with lake(MemoryStore(), tmp_path):
            raise AssertionError("it was taken")


@pytest.mark.parametrize("what", ["file", "change", "orphan"])
async def test_cache_with_unsent_changes_of_a_lake_of_the_same_name_is_refused(tmp_path: Path, what: str) -> None:
    """Two clusters have a bucket of one name, and the endpoint is not among the options."""
    first, second = MemoryStore(), MemoryStore()
    first_id, second_id = "a" * 32, "b" * 32
    outage = Outage(first)
    async with (lake if what == "orphan" else writing_back)(first, tmp_path / "cache", lake_id=first_id) as m:
        if what == "file":
            await m.write("file", b"of the first")
        elif what == "change":
            await m.mkdir("file")
        else:
            await m.fs.write(await m.create("file"), 0, b"of the first")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        outage.away = False
    for read_only in (False, True):
        with pytest.raises(CacheError, match=f"the lake {first_id}.* the lake {second_id}: mount that one"):
            async with lake(second, dead, lake_id=second_id, read_only=read_only):
                raise AssertionError("it was taken")
    assert second.objects == {}
    async with writing_back(first, dead, lake_id=first_id, orphans="finish") as m:
        await m.fs.make_durable()
        await m.sync()
        assert await m.names() == ["file"]
        assert m.fs.unfinished() == []
    async with lake(second, dead, lake_id=second_id) as m:
        assert await m.names() == []


async def test_cache_of_another_lake_deletes_nothing_that_it_was_to_delete_there(tmp_path: Path) -> None:
    """The second lake was copied from the first before the file was removed."""
    first, second, clock = MemoryStore(), MemoryStore(), Clock()
    first.equal_bytes_have_equal_etags = second.equal_bytes_have_equal_etags = True
    first.give("d/file", b"same")
    second.give("d/file", b"same")
    first_id, second_id = "a" * 32, "b" * 32
    async with lake(first, tmp_path, clock=clock, lake_id=first_id, delete_after_s=300.0) as m:
        await m.unlink("d/file")
        await m.fs.sync_names()
        assert first.data("d/file") == b"same"
    clock.advance(3600)
    async with lake(second, tmp_path, clock=clock, lake_id=second_id) as m:
        await m.write("other", b"other")
        await m.unlink("other")
        await m.sync()
        assert "other" not in second.objects
        assert await m.read("d/file") == b"same"


@pytest.mark.parametrize("size", [100, LARGE])
async def test_name_of_an_unfinished_file_goes_although_its_directory_was_renamed_meanwhile(
    tmp_path: Path, size: int
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        await m.mkdir("d")
        await m.write("d/kept", b"kept")
        await m.sync()
        handle = await m.create("d/f")
        await m.fs.write(handle, 0, noise("new", size))
        dead = die(tmp_path / "cache", tmp_path / "dead")
        await m.fs.release(handle)
        await m.unlink("d/f")
        await m.sync()
    async with lake(store, tmp_path / "other") as other:
        await other.rename("d", "e")
        await other.sync()
    async with lake(store, dead) as m:
        assert await m.tree() == {"e": None, "e/kept": b"kept"}
        assert orphan(m).path == "d/f"


async def test_one_daemon_at_a_time(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path):
        with pytest.raises(CacheError, match="in use"):
            async with lake(MemoryStore(), tmp_path):
                raise AssertionError("it was taken")


async def test_names_of_files_in_staging_are_told(tmp_path: Path) -> None:
    """Also where the filesystem keeps no extended attributes: then without the key."""
    store = MemoryStore()
    dead = await died_writing(store, tmp_path, 100)
    shutil.rmtree(dead / "meta")
    (name,) = staged(dead)
    os.removexattr(dead / "staging" / name, KEY_XATTR)
    async with lake(store, dead) as m:
        assert (orphan(m).path, orphan(m).bytes) == ("", 100)
        await m.fs.abort_orphan(name)
    assert staged(dead) == []


async def test_states_are_told(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise("new", LARGE))
        await uploaded(store, m, 5)
        (found,) = m.fs.unfinished()
        assert (found.state, found.parts_done, found.bytes_done) == (DraftState.WRITING, 5, 5 * PART)
        assert found.age_s < 1
        await m.close(handle)


# -- commits


def is_commit(request: Request) -> bool:
    return request.what == "put" and request.key.startswith(".lakefs/commits/")


@pytest.mark.parametrize("orphans", ["keep", "finish"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_died_while_its_pack_was_stored(tmp_path: Path, orphans: str, when: When) -> None:
    """Stored: the file is there, once, and nothing is an orphan. Not stored: its bytes are kept."""
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", pack="always") as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, b"packed")
        store.hook = pause = Pause(is_commit, when)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.flush, handle)
            await reached(pause.reached)
            dead = die(tmp_path / "cache", tmp_path / "dead")
            stored = dict(store.objects)
            nursery.cancel_scope.cancel()
            pause.resume()
    store.hook = lambda request, when: None
    store.objects = stored
    async with lake(store, dead, orphans=orphans) as m:
        if when == "after" or orphans == "finish":
            assert await m.read("file") == b"packed"
            assert m.fs.unfinished() == []
        else:
            assert await m.lookup("file") is None
            assert orphan(m).path == "file"


async def test_died_writing_a_file_that_was_renamed(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        await m.mkdir("tmp")
        handle = await m.create("tmp/file")
        await m.fs.write(handle, 0, noise("new", LARGE))
        await uploaded(store, m, 5)
        await m.rename("tmp", "final")
        await m.rename("final/file", "final/renamed")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    async with lake(store, dead, orphans="finish") as m:
        assert await m.names() == ["final"]
        assert await m.names("final") == ["renamed"]
        assert await m.read("final/renamed") == noise("new", LARGE)
        await m.sync()
    assert store.uploads == {}
    async with lake(store, tmp_path / "fresh") as m:
        assert await m.tree() == {"final": None, "final/renamed": noise("new", LARGE)}


async def died_writing_a_renamed_file(store: MemoryStore, root: Path) -> Path:
    """As `died_writing`, of "renamed", whose upload had begun when its name was "file"."""
    async with lake(store, root / "cache") as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise("new", LARGE))
        await uploaded(store, m, 5)
        await m.rename("file", "renamed")
        await m.sync()
        return die(root / "cache", root / "dead")


@pytest.mark.parametrize("at_mount", [False, True], ids=["finished later", "finished at the mount"])
@pytest.mark.parametrize("how", ["program", "mount", "mount, packed"])
async def test_finish_of_a_renamed_file_keeps_what_others_stored_under_its_earlier_name(
    tmp_path: Path, how: str, at_mount: bool
) -> None:
    store, clock = MemoryStore(), Clock()
    dead = await died_writing_a_renamed_file(store, tmp_path)
    async with lake(store, tmp_path / "two", clock=clock, pack="always" if "packed" in how else "never") as two:
        if how == "program":
            store.give("file", b"theirs")
        else:
            await two.write("file", b"theirs")
            await two.sync()
        async with lake(store, dead, clock=clock, orphans="finish" if at_mount else "keep") as m:
            if not at_mount:
                await m.fs.finish_orphan(orphan(m).id)
            await m.sync()
            await two.poll()
            clock.advance(2 * TTL_S)
            for node in (m, two):
                assert await node.read("file") == b"theirs"
                assert await node.read("renamed") == noise("new", LARGE)


@pytest.mark.parametrize("request_held", ["upload_part", "complete_multipart"])
async def test_finish_of_a_renamed_file_keeps_what_is_stored_under_its_earlier_name_meanwhile(
    tmp_path: Path, request_held: str
) -> None:
    store = MemoryStore()
    dead = await died_writing_a_renamed_file(store, tmp_path)
    async with lake(store, dead) as m:
        found = orphan(m)
        pause = store.hook = Pause(lambda request: request.what == request_held)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fails_with_eexist, m, found.id)
            await reached(pause.reached)
            store.give("file", b"theirs")
            pause.resume()
        await m.fs.finish_orphan(found.id)
        assert store.data("file") == b"theirs"
        assert await m.read("renamed") == noise("new", LARGE)
        await m.sync()
    assert store.uploads == {}


async def test_an_orphan_of_a_file_that_others_committed_since(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    dead = await died_writing(store, tmp_path, 100)
    clock.advance(10)
    async with lake(store, tmp_path / "other", pack="always", clock=clock) as other:
        await other.write("file", b"theirs")
    async with lake(store, dead, clock=clock) as m:
        with pytest.raises(FileError) as caught:
            await m.fs.finish_orphan(orphan(m).id)
        assert caught.value.errno == errno.EEXIST
        assert await m.read("file") == b"theirs"


@pytest.mark.parametrize("pack", ["always", "never"])
async def test_name_that_another_node_removed_while_a_daemon_that_died_wrote_the_file_is_gone(
    tmp_path: Path, pack: str
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack=pack) as (one, two):
        await one.mkdir("d")
        await one.write("d/f", b"stored")
        await one.sync()
        await two.poll()
        handle = await one.open("d/f", os.O_RDWR)
        await one.fs.write(handle, 0, b"not stored")
        clock.advance(TTL_S)
        await two.unlink("d/f")
        await two.sync()
        await one.poll()
        assert await one.names("d") == ["f"]  # being written here
    async with lake(store, tmp_path / "one", clock=clock, pack=pack) as m:
        assert await m.names("d") == []
        assert [item.path for item in m.fs.unfinished()] == ["d/f"]


async def test_died_after_a_new_file_was_renamed_over_a_committed_one(tmp_path: Path) -> None:
    """The file that was to be replaced is there again: nobody else ever saw it go."""
    store = MemoryStore()
    async with lake(store, tmp_path, pack="always") as m:
        await m.write("kept", b"committed")
        handle = await m.create("new")
        await m.fs.write(handle, 0, b"not stored")
        await m.rename("new", "kept")
        assert await m.names() == ["kept"]
        await m.sync()
    async with lake(store, tmp_path, pack="always") as m:
        assert await m.names() == ["kept"]
        assert await m.read("kept") == b"committed"
        assert [item.path for item in m.fs.unfinished()] == ["kept"]


@pytest.mark.parametrize("written", [b"", b"bytes"])
async def test_a_staging_file_that_nobody_had_named_yet(tmp_path: Path, written: bytes) -> None:
    """The daemon died when it had made the file. Where nothing is in it, nothing is kept."""
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        await m.write("other", b"other")
    (tmp_path / "staging" / ("0" * 32)).write_bytes(written)
    async with lake(store, tmp_path) as m:
        assert len(m.fs.unfinished()) == bool(written)
    assert len(staged(tmp_path)) == bool(written)
