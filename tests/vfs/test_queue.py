"""Write-back: what close() promises, in which order others see files, and what may be done to a file that waits."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from operator import methodcaller
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.commits import pack_budget
from lakefs_fuse.config import KIB, Rule
from lakefs_fuse.errors import AccessDenied, CacheError, FileError, LakeError, StagingFull, StoreError, Unavailable
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE, Flag
from lakefs_fuse.staging import staging_area as staging
from lakefs_fuse.staging.staging_area import Staging
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.files import drafts as drafts_module
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.writeback import packer, publisher, scheduler
from lakefs_fuse.vfs.writeback import queue as writeback
from lakefs_fuse.vfs.writeback.group_commit import LOGGED_BYTES_MAX
from lakefs_fuse.vfs.writeback.queue import AcknowledgedVersion
from tests.memory_store import Failures, MemoryStore, Pause, Request, When, pause_of_commits
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import TTL_S, Clock, Lake, entries_of, lake, permissions
from tests.vfs.writing_back import (
    LARGE,
    NEVER_S,
    PART,
    Outage,
    location,
    made_visible,
    rewrite,
    state,
    stored,
    told,
    until,
    writing_back,
)

pytestmark = pytest.mark.usefixtures("short_pauses")

# -- accepted


@pytest.mark.parametrize("size", [0, 100, LARGE])
async def test_close_does_not_wait_for_the_store(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path) as m:
        await m.write("file", noise(1, size))
        assert store.objects == {}
        assert await m.read("file") == noise(1, size)
        assert (await m.found("file")).size == size
        await until(lambda: outage.refused)
        assert await m.read("file") == noise(1, size)
        assert (told(m)["files"], told(m)["bytes"], told(m)["accepted"]) == (1, size, 1)
        outage.away = False
        await stored(m)
        assert store.data("file") == noise(1, size)
        assert (told(m)["files"], told(m)["bytes"]) == (0, 0)
        assert await m.read("file") == noise(1, size)
        assert store.count("get") == 0


async def test_the_bytes_and_then_the_record_are_synced_before_close_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fdatasync, sync = os.fdatasync, Database.sync

    def bytes_synced(fd: int) -> None:
        fdatasync(fd)
        steps.append("bytes")

    def record_synced(self: Database) -> None:
        sync(self)
        steps.append("record")

    monkeypatch.setattr(os, "fdatasync", bytes_synced)
    monkeypatch.setattr(Database, "sync", record_synced)
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path) as m:
        for size in (LOGGED_BYTES_MAX + 1, LARGE):  # a smaller one's bytes are synced with the record
            handle = await m.create(str(size))
            await m.fs.write(handle, 0, noise(1, size))
            steps.clear()
            await m.fs.flush(handle)
            assert "bytes" in steps and steps[-1] == "record"
            assert steps.index("bytes") < steps.index("record")
            await m.fs.release(handle)


async def test_many_are_accepted_with_few_syncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[Database] = []
    sync = Database.sync

    def counted(self: Database) -> None:
        syncs.append(self)
        time.sleep(0.01)  # others gather meanwhile, however fast the disk is
        sync(self)

    monkeypatch.setattr(Database, "sync", counted)
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path) as m:
        async with trio.open_nursery() as nursery:
            for number in range(64):
                nursery.start_soon(m.write, f"{number}", noise(number, 100))
        assert told(m)["accepted"] == 64
        assert len(syncs) < 16


async def test_a_failing_disk_is_told_and_the_file_is_acknowledged_once_it_was_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(_: int) -> None:
        raise OSError(errno.EIO, "broken")

    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path) as m:
        await m.write("file", b"old")
        handle = await m.open("file", os.O_RDWR | os.O_TRUNC)
        await m.fs.write(handle, 0, noise(1, LARGE))
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", failing)
            with pytest.raises(LakeError):
                await m.fs.flush(handle)
        assert told(m)["accepted"] == 1
        assert await m.read("file") == noise(1, LARGE)
        await m.fs.write(handle, 0, noise(1, LARGE))
        await m.close(handle)
        assert told(m)["accepted"] == 2
        store.hook = lambda _request, _when: None
        await m.fs.make_durable()
        assert store.data("file") == noise(1, LARGE)


async def test_nothing_is_uploaded_while_it_is_written(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise(1, LARGE))
        await trio.sleep(0.05)
        assert store.parts_sent() == []
        await m.close(handle)
        await stored(m)
        assert sorted(store.parts_sent()) == [1, 2, 3, 4, 5, 6]


async def test_only_where_a_rule_says_so(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store)
    rules = (Rule(path="later/**", durability="writeback"),)
    async with writing_back(store, tmp_path, durability="close", rules=rules) as m:
        await m.mkdir("later")
        await m.write("later/file", b"kept")
        with pytest.raises(Unavailable):
            await m.write("now", b"kept too")
        assert told(m)["files"] == 1
        outage.away = False
        await m.fs.make_durable()
        assert (store.data("later/file"), store.data("now")) == (b"kept", b"kept too")


# -- in which order


async def test_what_was_opened_after_another_was_closed_is_seen_after_it(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "complete_multipart")
    store.hook = pause
    async with writing_back(store, tmp_path) as m:
        await m.write("shard", noise(1, LARGE))
        await m.write("marker", b"done")
        await reached(pause.reached)
        await trio.sleep(0.05)
        assert entries_of(store) == []
        pause.resume()
        await stored(m)
        assert made_visible(store) == ["shard", "marker"]


async def test_large_files_side_by_side_go_up_side_by_side(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "upload_part" and (request.key, request.number) == ("one", 2))
    store.hook = pause
    async with writing_back(store, tmp_path) as m:
        handles = [await m.create(name) for name in ("one", "two")]
        for handle in handles:
            await m.fs.write(handle, 0, noise(1, LARGE))
        for handle in handles:
            await m.close(handle)
        await reached(pause.reached)
        await until(lambda: "two" in store.objects)
        assert "one" not in store.objects
        pause.resume()
        await stored(m)


async def test_one_that_the_store_refuses_lets_others_pass(tmp_path: Path) -> None:
    store = MemoryStore()
    store.hook = Failures(lambda request: request.what == "put" and request.key == "bad", StoreError("no"), count=2)
    async with writing_back(store, tmp_path) as m:
        await m.write("bad", b"bad")
        await m.write("good", b"good")
        await until(lambda: "good" in store.objects)
        await until(lambda: (told(m)["files"], told(m)["failed"]) == (1, 1))
        assert await state(m, "bad") == "failed"
        assert await m.read("bad") == b"bad"
        with pytest.raises(StoreError):
            await m.fs.make_durable()
        await m.fs.make_durable()
        assert store.data("bad") == b"bad"
        assert await state(m, "bad") == "durable"


async def test_flush_of_all_stores_the_others_where_the_store_refuses_one(tmp_path: Path) -> None:
    store, refused = MemoryStore(), threading.Event()

    def hook(request: Request, when: When) -> None:
        if when == "before" and request.what == "put" and request.key == "bad":
            refused.set()
            raise StoreError("no")
        if when == "before" and request.what == "put" and request.key.startswith("good"):
            refused.wait(0.3)

    async with writing_back(store, tmp_path / "cache", pack="never", delay_s=NEVER_S) as m:
        outage = Outage(store)
        await m.write("bad", b"bad")
        for number in range(30):
            await m.write(f"good{number}", b"good")
        await until(lambda: outage.refused)
        store.hook = hook
        with pytest.raises(StoreError, match="no"):
            await m.fs.make_durable()
        assert [each.path for each in m.fs.unfinished()] == ["bad"]
        assert sum(key.startswith("good") for key in store.objects) == 30
        store.hook = lambda _request, _when: None
        await m.fs.make_durable()
        assert store.data("bad") == b"bad"


def refuse_bad(request: Request, when: str) -> None:
    if request.what == "put" and request.key.startswith("bad"):
        raise StoreError("no")


async def test_many_that_the_store_refuses_let_others_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PACK_FILES_MAX", 1)
    store = MemoryStore()
    store.hook = refuse_bad
    async with writing_back(store, tmp_path) as m:
        for number in range(4):
            await m.write(f"bad{number}", b"bad")
        await until(lambda: told(m)["failed"] >= 2)
        await m.write("good", b"good")
        await until(lambda: told(m)["failed"] == 4)
        await until(lambda: "good" in store.objects)


async def test_a_store_that_comes_back_gets_everything_in_order(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path) as m:
        names = [f"{number:02}" for number in range(20)]
        for name in names:
            await m.write(name, name.encode())
        await until(lambda: outage.refused > 2)
        assert told(m)["waiting_because"]
        assert {bool(file.error) for file in m.fs.unfinished()} == {True}, "also of one that is sent just now"
        outage.away = False
        await stored(m)
        assert [key for key in made_visible(store) if key in names][-20:] == names
        assert not told(m)["waiting_because"]


async def test_parts_that_are_up_are_not_sent_again_after_an_outage(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store, away=False)
    answered: list[Request] = []

    def goes_away(request: Request, when: str) -> None:
        if when == "after":
            answered.append(request)
        if when == "before" and len(store.parts_sent()) == 4 and not (outage.away or outage.refused):
            outage.away = True
            raise Unavailable("going")

    outage.then = goes_away
    async with writing_back(store, tmp_path, uploads_max=1) as m:
        await m.write("file", noise(1, LARGE))
        await until(lambda: outage.refused)
        up = [number for upload in list(store.uploads.values()) for number in upload.parts]
        assert up
        outage.away = False
        await m.fs.make_durable()
        assert store.data("file") == noise(1, LARGE)
        sent = [request.number for request in answered if request.what == "upload_part"]
        assert all(sent.count(number) == 1 for number in up)


@pytest.mark.parametrize("size", [100, LARGE])
async def test_acknowledged_version_replaced_after_a_lost_answer_is_kept_beside_the_other(
    tmp_path: Path, size: int
) -> None:
    """It may never have arrived, and is nowhere else then."""
    store = MemoryStore()
    async with writing_back(store, tmp_path, retry_timeout_s=10.0) as m:
        await m.write("file", b"before")
        await stored(m)

        def lose(request: Request, when: str) -> None:
            if request.what in ("put", "complete_multipart") and when == "after":
                store.hook = lambda _request, _when: None
                store.give("file", b"theirs")
                raise Unavailable("lost")

        store.hook = lose
        await rewrite(m, "file", noise(1, size))
        await stored(m)
        assert store.data("file") == b"theirs"
        (kept,) = [name for name in await m.names() if name.startswith("file.conflict-")]
        assert await m.read(kept) == noise(1, size)
        assert (told(m)["conflicts"], await m.read("file")) == (1, b"theirs")
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"file": b"theirs", kept: noise(1, size)}


# -- packs


async def test_small_files_share_packs(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="auto", delay_s=NEVER_S) as m:
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(m.write, f"{number}", noise(number, 500))
        await trio.sleep(0.05)
        assert store.count("put") == 0
        await m.fs.make_durable()
        assert store.count("put") <= 2
        assert entries_of(store) == []
    async with lake(store, tmp_path / "other") as other:
        assert await other.read("77") == noise(77, 500)
        assert len(await other.names()) == 200


@pytest.mark.parametrize("durability", ["writeback", "close"])
@pytest.mark.parametrize("files", [6, 0.5])
async def test_packs_under_an_upload_limit_have_no_more_bytes_than_are_sent_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durability: str, files: float
) -> None:
    """Of half a file: each has a pack of its own."""
    monkeypatch.setattr(pack_budget, "PACK_BYTES_MIN", 1)
    store, size = MemoryStore(), 50 * KIB
    limit = int(files * (size + KIB) / pack_budget.PUT_S)
    options = {"pack": "always", "durability": durability, "upload_bytes_s_max": limit}
    async with writing_back(store, tmp_path / "cache", delay_s=0.05, **options) as m:
        async with trio.open_nursery() as nursery:
            for number in range(20):
                nursery.start_soon(m.write, f"{number}", noise(number, size))
        await m.fs.make_durable()
    sizes = [request.size for request in store.requests if request.what == "put"]
    assert sum(sizes) < 20 * (size + KIB)
    assert max(sizes) < max(1, files) * (size + KIB)
    assert len(sizes) >= 20 / max(1, files)
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {f"{number}": noise(number, size) for number in range(20)}


async def test_others_have_their_turn_while_a_pack_is_noted(tmp_path: Path) -> None:
    store = MemoryStore()
    waiting: list[int] = []

    async def look(m: Lake) -> None:
        while count := len(m.parts.writeback):
            waiting.append(count)
            await trio.lowlevel.checkpoint()

    async with writing_back(store, tmp_path, pack="auto", delay_s=NEVER_S) as m:
        async with trio.open_nursery() as nursery:
            for number in range(200):
                nursery.start_soon(m.write, f"{number}", noise(number, 500))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(look, m)
            await m.fs.make_durable()
    assert waiting[0] == 200
    assert store.count("put") <= 2
    assert max(before - after for before, after in pairwise([*waiting, 0])) <= 2 * publisher.RECORDED_AT_ONCE


async def test_packs_that_a_slow_or_failing_cache_disk_does_not_take_are_bounded_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packer, "CACHED_BYTES_MAX", 1)
    may_go_on, keys = threading.Event(), list[str]()

    def write_late(_: BlockCache, runs: Sequence[tuple[Version, int, Sequence[object]]]) -> bool:
        keys.extend(version.key for version, _, _ in runs)
        may_go_on.wait(20)
        raise RuntimeError("of any kind")

    monkeypatch.setattr(BlockCache, "write_runs", write_late)
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="always") as m:
        try:
            for number in range(3):
                await m.write(f"{number}", b"data")
                await m.fs.make_durable()
        finally:
            may_go_on.set()
        await until(lambda: "of any kind" in caplog.text)
        assert len(keys) == 1
        await m.write("last", b"data")
        await m.fs.make_durable()
        await until(lambda: len(keys) == 2)


async def test_what_came_within_the_delay_goes_together(tmp_path: Path, mock_clock: MockClock) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="auto", delay_s=0.3) as m:
        for number in range(10):
            await m.write(f"{number}", noise(number, 500))
        mock_clock.rate = 1
        await stored(m)
        assert store.count("put") == 1


async def test_a_lone_small_file_is_plain(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="auto") as m:
        await m.write("config.json", b"{}")
        await stored(m)
        assert entries_of(store) == ["config.json"]


async def test_always_and_never(tmp_path: Path) -> None:
    store = MemoryStore()
    rules = (Rule(path="packed/**", pack="always"), Rule(path="plain/**", pack="never"))
    async with writing_back(store, tmp_path, pack="auto", rules=rules, delay_s=0.05) as m:
        for directory in ("packed", "plain"):
            await m.mkdir(directory)
        await m.write("packed/one", b"one")
        await stored(m)
        for name in ("a", "b"):
            await m.write(f"plain/{name}", b"two")
        await stored(m)
        assert entries_of(store) == ["plain/a", "plain/b"]
        assert await m.read("packed/one") == b"one"


async def test_a_marker_is_not_seen_before_the_pack(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "put" and request.key.startswith(".lakefs/"))
    store.hook = pause
    rules = (Rule(path="marker", pack="never"),)
    async with writing_back(store, tmp_path, pack="auto", rules=rules, delay_s=NEVER_S) as m, trio.open_nursery() as n:
        for name in ("one", "two"):
            await m.write(name, name.encode())
        await m.write("marker", b"done")
        n.start_soon(m.fs.make_durable)
        await reached(pause.reached)
        await trio.sleep(0.05)
        assert store.objects == {}
        pause.resume()
        await stored(m)
        assert made_visible(store).index("marker") == 1


# -- asking for it


@pytest.mark.parametrize("how", ["fsync", "flush", "directory"])
async def test_whoever_asks_is_served_first(tmp_path: Path, how: str) -> None:
    """But what was accepted before in the same directory goes before it."""
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="auto", delay_s=NEVER_S) as m:
        for directory in ("a", "b"):
            await m.mkdir(directory)
        await m.write("a/other", b"0")
        await m.write("b/before", b"1")
        await m.write("b/file", b"2")
        if how == "fsync":
            handle = await m.open("b/file", os.O_RDWR)
            await m.fs.fsync(handle)
            await m.fs.release(handle)
        elif how == "flush":
            await m.fs.make_durable("b")
        else:
            await m.parts.writeback.drain(m.parts.writeback.below("b"))
        assert [await state(m, path) for path in ("b/before", "b/file")] == ["durable", "durable"]
        assert await state(m, "a/other") == "dirty"


async def test_flush_of_many_files_looks_at_two_packs_of_them_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "PACK_FILES_MAX", 4)
    async with writing_back(MemoryStore(), tmp_path, pack="always", delay_s=NEVER_S) as m:
        for number in range(40):
            await m.write(f"{number}", b"x")
        seen = [set[int]()]
        """Numbers of the versions of which the place was asked for, by rounds of the scheduler."""
        count = m.parts.writeback.count_packable

        def end_round(files: int, size_bytes: int) -> None:
            count(files, size_bytes)
            seen.append(set())

        def place(item: AcknowledgedVersion) -> int:
            seen[-1].add(item.sequence)
            return item.draft.stands_for or item.sequence

        monkeypatch.setattr(m.parts.writeback, "count_packable", end_round)
        monkeypatch.setattr(AcknowledgedVersion, "place", property(place))
        await m.fs.make_durable()
        assert told(m)["files"] == 0
    assert max(map(len, seen)) == 2 * 4


async def test_fsync_of_an_open_file_stores_what_was_written_since(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, delay_s=NEVER_S) as m:
        await m.write("file", b"old")
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 0, b"new")
        await m.fs.fsync(handle)
        assert store.data("file") == b"new"
        await m.close(handle)
        await stored(m)
        assert store.data("file") == b"new"


async def test_whoever_asks_hears_why_not(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path) as m:
        await m.write("file", b"data")
        with pytest.raises(Unavailable):
            await m.fs.make_durable("file")
        with pytest.raises(Unavailable):
            await m.fs.sync_directory(1)
        outage.away = False
        await m.fs.make_durable("file")
        assert store.data("file") == b"data"


async def test_an_attempt_that_began_before_tells_nothing(tmp_path: Path) -> None:
    """It fails after the store came back, and whoever asked since is served by the next one."""
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "put")
    failure = Failures(lambda request: request.what == "put", Unavailable("gone"))

    def hook(request: Request, when: str) -> None:
        pause(request, when)  # type: ignore[arg-type]
        failure(request, when)  # type: ignore[arg-type]

    store.hook = hook
    async with writing_back(store, tmp_path) as m:
        await m.write("file", b"data")
        await reached(pause.reached)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.make_durable)
            await trio.sleep(0.02)
            pause.resume()
        assert store.data("file") == b"data"


# -- a file that waits is written again


async def test_only_the_newest_is_stored(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="auto", delay_s=NEVER_S) as m:
        await m.write("file", b"one")
        first_s = trio.current_time()
        for text in (b"two", b"three"):
            await trio.sleep(0.05)
            await rewrite(m, "file", text)
            assert await m.read("file") == text
        assert (told(m)["files"], told(m)["superseded"]) == (1, 2)
        assert told(m)["oldest_s"] >= trio.current_time() - first_s - 0.01
        await m.fs.make_durable()
        assert store.count("put", "file") == 1
        assert store.data("file") == b"three"
    assert list((tmp_path / "staging").glob("[0-9a-f]*")) == []


async def test_file_written_again_within_each_delay_is_stored_after_the_delay(tmp_path: Path) -> None:
    """As a log of which each line is appended, and the file closed. It is no burst, of 20 files in a second."""
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="auto", delay_s=0.2) as m:
        await m.write("log", b"line")
        with trio.fail_after(5):
            while "log" not in store.objects:
                await trio.sleep(0.06)
                await rewrite(m, "log", b"line")


async def test_one_that_is_being_sent_is_followed_by_the_next(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "put")
    store.hook = pause
    async with writing_back(store, tmp_path) as m:
        await m.write("file", b"one")
        await reached(pause.reached)
        await rewrite(m, "file", b"two")
        assert await m.read("file") == b"two"
        assert told(m)["files"] == 2
        pause.resume()
        await stored(m)
        assert made_visible(store) == ["file", "file"]
        assert store.data("file") == b"two"


async def test_a_large_one_that_is_replaced_leaves_no_upload(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "upload_part" and request.number == 4)
    store.hook = pause
    async with writing_back(store, tmp_path) as m:
        await m.write("file", noise(1, LARGE))
        await reached(pause.reached)
        await rewrite(m, "file", b"small")
        pause.resume()
        await stored(m)
        await until(lambda: not store.uploads)
        assert store.data("file") == b"small"
        await until(lambda: m.parts.staging.bytes_used == 0)


async def test_large_file_overwritten_faster_than_it_is_sent_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeback, "SUPERSEDED_S_MAX", 0.3)
    store = MemoryStore()

    def delay(request: Request, when: When) -> None:
        if request.what == "upload_part" and when == "before":
            time.sleep(0.2)

    store.hook = delay
    async with writing_back(store, tmp_path) as m:
        await m.write("file", noise(0, LARGE))
        with trio.move_on_after(3):
            while "file" not in store.objects:
                await trio.sleep(0.05)
                await rewrite(m, "file", noise(1, LARGE))
                assert told(m)["files"] <= 2
        assert "file" in store.objects
        store.hook = lambda request, when: None
        await stored(m)
        await until(lambda: not store.uploads and m.parts.staging.bytes_used == 0)


async def test_an_upload_that_nobody_wants_is_ended_when_the_store_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writeback, "DISCARD_S_FIRST", 0.01)
    store = MemoryStore()
    outage = Outage(store, away=False)
    pause = Pause(lambda request: request.what == "upload_part" and request.number == 4)
    outage.then = pause
    async with writing_back(store, tmp_path) as m:
        await m.write("file", noise(1, LARGE))
        await reached(pause.reached)
        outage.away = True
        pause.resume()
        await rewrite(m, "file", b"small")
        await until(lambda: outage.refused > 3)
        assert len(store.uploads) == 1
        outage.away = False
        await stored(m)
        await until(lambda: not store.uploads)


@pytest.mark.parametrize("size", [100, LARGE])
async def test_a_change_in_place_begins_with_a_copy(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    outage = Outage(store)
    data = bytearray(noise(1, size))
    async with writing_back(store, tmp_path, pack="never") as m:
        await m.write("file", bytes(data))
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 10, b"patched")
        data[10:17] = b"patched"
        assert await m.read_handle(handle) == data
        assert told(m)["accepted"] == 1
        await m.close(handle)
        assert told(m)["accepted"] == 2
        assert await m.read("file") == data
        outage.away = False
        await m.fs.make_durable()
        assert await m.read("file") == data
        assert store.data("file") == data
        await until(lambda: not store.uploads)


async def test_a_copy_that_shrinks_below_a_part_is_packed_without_leaving_an_upload(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path, pack="always") as m:
        await m.write("file", noise(1, LARGE))
        handle = await m.open("file", os.O_RDWR)
        await m.setattr("file", size=1)
        await m.close(handle)
        outage.away = False
        await m.fs.make_durable()
        await until(lambda: not store.uploads)
        assert await m.read("file") == noise(1, LARGE)[:1]
        await until(lambda: m.parts.staging.bytes_used == 0)


async def test_writers_at_once_begin_with_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel sends many WRITEs of one file at a time, and there is not room for a copy for each."""
    store, begun = MemoryStore(), 0
    outage, size = Outage(store), 16 * PART
    data = noise("old", size)

    new_copy = Drafts.new_copy

    def counted(drafts: Drafts, file: OpenFile, size: int) -> Draft:
        nonlocal begun
        begun += 1
        return new_copy(drafts, file, size)

    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("file", data)
        monkeypatch.setattr(Drafts, "new_copy", counted)
        handle = await m.open("file", os.O_RDWR)
        async with trio.open_nursery() as nursery:
            for at in range(0, size, PART):
                nursery.start_soon(m.fs.write, handle, at, b"new")
        assert begun == 1
        await m.close(handle)
        expected = b"".join(b"new" + data[at + 3 : at + PART] for at in range(0, size, PART))
        assert await m.read("file") == expected
        outage.away = False
        await stored(m)
        assert store.data("file") == expected


async def test_few_open_files_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many are open for writing, the daemon's memory has a bound."""
    monkeypatch.setattr(staging, "FILES_IN_MEMORY_MAX", 2)
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path) as m:
        handles = {name: await m.create(name) for name in "abcd"}
        for name, handle in handles.items():
            await m.fs.write(handle, 0, noise(name, 100))
        drafts = [m.fs.handle(handle).file.draft for handle in handles.values()]
        assert [draft is not None and draft.file.is_in_memory for draft in drafts] == [True, True, False, False]
        for handle in handles.values():
            await m.close(handle)
        assert m.parts.staging.files_in_memory == 0
        assert [await m.read(name) for name in "abcd"] == [noise(name, 100) for name in "abcd"]


async def test_copy_of_an_acknowledged_version_is_sent_to_the_name_that_its_file_has_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With staging half full, parts are sent while they are written."""
    store, intents = MemoryStore(), list[int]()
    outage, begin = Outage(store), Drafts.begin
    monkeypatch.setattr(Staging, "is_half_full", property(lambda area: True))
    monkeypatch.setattr(drafts_module, "COPY_STEP_BYTES", PART)

    def noted(drafts: Drafts, file: OpenFile, draft: Draft) -> None:
        intents.append(draft.upload.intent_ns)
        begin(drafts, file, draft)

    async with writing_back(store, tmp_path) as m:
        await m.write("file", noise(1, LARGE))
        monkeypatch.setattr(Drafts, "begin", noted)
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 0, b"new")
        assert intents == [0]
        await m.rename("file", "renamed")
        await m.close(handle)
        outage.away = False
        await stored(m)
        assert await m.read("renamed") == b"new" + noise(1, LARGE)[3:]


async def test_a_change_in_place_of_a_large_file_waits_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "COPY_BYTES_MAX", PART)
    monkeypatch.setattr(publisher, "WAIT_DURABLE_S", 0.01)
    store = MemoryStore()
    outage = Outage(store)
    data = bytearray(noise(1, LARGE))
    async with writing_back(store, tmp_path) as m:
        await m.write("file", bytes(data))
        handle = await m.open("file", os.O_RDWR)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.write, handle, 10, b"patched")
            await until(lambda: outage.refused > 2)
            assert await m.read_handle(handle) == data
            outage.away = False
        assert store.data("file") == data
        data[10:17] = b"patched"
        await m.close(handle)
        await m.fs.make_durable()
        assert store.data("file") == data


async def test_a_large_file_is_not_changed_in_place_where_the_store_stays_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "COPY_BYTES_MAX", PART)
    monkeypatch.setattr(publisher, "WAIT_DURABLE_S", 0.01)
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path, staging_timeout_s=0.1) as m:
        await m.write("file", noise(1, LARGE))
        handle = await m.open("file", os.O_RDWR)
        with pytest.raises(StagingFull):
            await m.fs.write(handle, 10, b"patched")
        assert await m.read_handle(handle) == noise(1, LARGE)
        await m.unlink("file")
        await m.fs.write(handle, 10, b"patched")  # into nothing: nobody waits for that
        assert (await m.read_handle(handle))[10:17] == b"patched"
        await m.close(handle)
        await until(lambda: m.parts.staging.bytes_used == 0)


async def test_read_of_an_acknowledged_file_larger_than_staging_waits_for_the_store(tmp_path: Path) -> None:
    """Parts that were uploaded and dropped can be read once the upload is complete."""
    store, refused, data = MemoryStore(), list[str](), noise(1, 40 * PART)
    away = True

    def refuse(request: Request, when: When) -> None:
        if away and when == "before" and request.what == "complete_multipart":
            refused.append(request.key)
            raise Unavailable("the store is away")

    store.hook = refuse
    async with writing_back(store, tmp_path, staging_bytes_max=10 * PART) as m:
        handle = await m.create("file")
        for offset in range(0, len(data), PART):
            await m.fs.write(handle, offset, data[offset : offset + PART])
        await m.close(handle)
        await until(lambda: refused)
        with pytest.raises(Unavailable):
            await m.read("file")
        away = False
        assert await m.read("file") == data == store.data("file")


async def test_appending_to_a_file_that_waits(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path) as m:
        await m.write("log", b"one ")
        for text in (b"two ", b"three "):
            handle = await m.open("log", os.O_RDWR | os.O_APPEND)
            await m.fs.write(handle, (await m.found("log")).size, text)
            await m.close(handle)
        assert await m.read("log") == b"one two three "
        outage.away = False
        await m.fs.make_durable()
        assert store.data("log") == b"one two three "


@pytest.mark.parametrize("size", [0, 3, 10])
async def test_truncating_a_file_that_waits(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path, pack="auto", delay_s=NEVER_S) as m:
        await m.write("file", b"abcde")
        await m.setattr("file", size=size)
        assert await m.read("file") == b"abcde\0\0\0\0\0"[:size]
        assert told(m)["files"] == 1
        outage.away = False
        await m.fs.make_durable()
        assert store.data("file") == b"abcde\0\0\0\0\0"[:size]


async def test_a_change_of_what_the_store_has_does_not_need_it_any_more(tmp_path: Path) -> None:
    """What a small file keeps of the version it changes is staged at close."""
    store = MemoryStore()
    store.give("file", noise(1, 3 * 4096))
    async with writing_back(store, tmp_path, delay_s=NEVER_S, pack="auto") as m:
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 0, b"new")
        await m.close(handle)
        store.take("file")
        await m.fs.make_durable()
        assert store.data("file") == b"new" + noise(1, 3 * 4096)[3:]


# -- unlink, rename


@asynccontextmanager
async def changed_while(
    how: str,
    store: MemoryStore,
    root: Path,
    file: tuple[str, int],
    held: Collection[str],
    change: Callable[[Lake], Awaitable[None]],
) -> AsyncIterator[tuple[Lake, Outage]]:
    """A file (name, size) was accepted, and something is done about its name while it is ``waiting``, while the store
    is ``away``, or while it is ``sending``: a request of a ``held`` kind does not go on before that has begun."""
    outage = Outage(store, away=how == "away")
    pause = Pause(lambda request: request.what in held)
    if how == "sending":
        outage.then = pause
    name, size = file
    async with writing_back(store, root, delay_s=NEVER_S if how == "waiting" else 0.0) as m:
        await m.write(name, noise(1, size))
        if how == "sending":
            await reached(pause.reached)
        if how == "away":
            await until(lambda: outage.refused)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(change, m)
            await trio.sleep(0.02)
            pause.resume()
        yield m, outage


@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize("how", ["waiting", "away", "sending"])
async def test_a_file_that_is_removed_is_never_seen(tmp_path: Path, size: int, how: str) -> None:
    store = MemoryStore()
    held = ("put", "upload_part")
    async with changed_while(how, store, tmp_path, ("file", size), held, methodcaller("unlink", "file")) as (m, outage):
        assert await m.lookup("file") is None
        outage.away = False
        await m.fs.make_durable()
        await m.sync()
        await until(lambda: not store.uploads and not entries_of(store))
        await until(lambda: m.parts.staging.bytes_used == 0)
        assert told(m)["files"] == 0
    assert list((tmp_path / "staging").glob("[0-9a-f]*")) == []


async def test_a_removed_file_that_is_open_can_be_read_and_written(tmp_path: Path) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path) as m:
        await m.write("file", noise(1, LARGE))
        handle = await m.open("file", os.O_RDWR)
        await m.unlink("file")
        assert await m.read_handle(handle) == noise(1, LARGE)
        await m.fs.write(handle, 0, b"changed")
        assert (await m.read_handle(handle))[:7] == b"changed"
        await m.close(handle)
        await until(lambda: m.parts.staging.bytes_used == 0)
        assert len(m.parts.files) == 0


@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize("how", ["waiting", "away", "sending"])
async def test_a_file_that_is_renamed_is_seen_under_its_new_name_only(tmp_path: Path, size: int, how: str) -> None:
    store = MemoryStore()
    held = ("put", "complete_multipart")
    rename = methodcaller("rename", "tmp", "final")
    async with changed_while(how, store, tmp_path, ("tmp", size), held, rename) as (m, outage):
        assert await m.names() == ["final"]
        assert await m.read("final") == noise(1, size)
        outage.away = False
        await m.fs.make_durable()
        await m.sync()
        assert await m.read("final") == noise(1, size)
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"final": noise(1, size)}


async def test_a_rename_is_synced_where_the_file_was_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else waits for the store, and is synced by another task meanwhile."""
    synced: list[bool] = []
    commit, task = Database.commit, trio.lowlevel.current_task()

    def noted(self: Database, batch: Batch, *, sync: bool = False) -> None:
        synced.append(sync and trio.lowlevel.current_task() is task)
        commit(self, batch, sync=sync)

    async def renamed(old: str, new: str) -> bool:
        synced.clear()
        await m.rename(old, new)
        return any(synced)

    monkeypatch.setattr(Database, "commit", noted)
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path) as m:
        await m.write("accepted", b"1")
        assert await renamed("accepted", "accepted, renamed")
        writing = await m.create("new")
        await m.fs.write(writing, 0, b"2")
        assert not await renamed("new", "new, renamed")
        rewriting = await m.open("accepted, renamed", os.O_RDWR)
        await m.fs.write(rewriting, 0, b"3")
        assert await renamed("accepted, renamed", "accepted")  # what is behind it was accepted
        outage.away = False
        for handle in (writing, rewriting):
            await m.close(handle)


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_save_over_a_version_that_is_there(tmp_path: Path, pack: str) -> None:
    """Write aside and rename over, again and again, the store away meanwhile."""
    store = MemoryStore()
    outage = Outage(store, away=False)
    async with writing_back(store, tmp_path, pack=pack) as m:
        await m.write("model", b"first")
        await m.fs.make_durable()
        outage.away = True
        for text in (b"second", b"third"):
            await m.write("tmp", text)
            await m.rename("tmp", "model")
            assert await m.tree() == {"model": text}
        outage.away = False
        await m.fs.make_durable()
        await m.sync()
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"model": b"third"}


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_a_file_in_the_store_that_was_written_again_is_renamed(tmp_path: Path, pack: str) -> None:
    """The rename is held, and must not bring the older bytes back when it is sent."""
    store = MemoryStore()
    clock = Clock()
    async with writing_back(store, tmp_path, pack=pack, clock=clock) as m:
        await m.write("old", b"first")
        await m.fs.make_durable()
        outage = Outage(store)
        await rewrite(m, "old", b"second, longer")
        await m.write("other", b"other")
        await m.rename("old", "new")
        assert await m.tree() == {"new": b"second, longer", "other": b"other"}
        outage.away = False
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"new": b"second, longer", "other": b"other"}
    clock.advance(TTL_S + 1)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"new": b"second, longer", "other": b"other"}


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_a_stored_file_is_renamed_over_one_that_waits(tmp_path: Path, pack: str) -> None:
    """What was accepted under the name is wanted by nobody; what has it now is."""
    store, clock = MemoryStore(), Clock()
    async with writing_back(store, tmp_path / "here", pack=pack, clock=clock, delay_s=NEVER_S) as m:
        await m.write("stored", b"stored")
        await m.write("target", b"older")
        await m.fs.make_durable()
        await m.sync()
        await rewrite(m, "target", b"waits")
        await m.rename("stored", "target")
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"target": b"stored"}
    clock.advance(TTL_S + 1)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"target": b"stored"}


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_a_name_that_was_renamed_away_is_used_again(tmp_path: Path, pack: str) -> None:
    """Its new file may be in a pack with what the rename waits for, and must survive it."""
    store = MemoryStore()
    clock = Clock()
    async with writing_back(store, tmp_path, pack=pack, clock=clock, delay_s=NEVER_S) as m:
        await m.write("a", b"first")
        await m.fs.make_durable()
        await m.write("b", b"b")
        await m.rename("a", "q")
        await m.write("a", b"second")
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"a": b"second", "b": b"b", "q": b"first"}
    clock.advance(TTL_S + 1)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"a": b"second", "b": b"b", "q": b"first"}


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_a_removed_name_is_taken_by_a_file_that_was_opened_before(tmp_path: Path, pack: str) -> None:
    store = MemoryStore()
    clock = Clock()
    async with writing_back(store, tmp_path, pack=pack, clock=clock, delay_s=NEVER_S) as m:
        await m.write("a", b"first")
        await m.fs.make_durable()
        handle = await m.create("tmp")
        await m.write("other", b"other")
        await m.unlink("a")
        await m.rename("tmp", "a")
        await m.fs.write(handle, 0, b"second")
        await m.close(handle)
        await m.fs.make_durable()
        await m.sync()
    clock.advance(TTL_S + 1)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"a": b"second", "other": b"other"}


async def test_what_a_file_replaced_after_its_upload_began_is_not_left_behind(tmp_path: Path) -> None:
    """The bytes are at the key of the old name, and a commit says so; the object of the new name goes."""
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "complete_multipart")
    async with writing_back(store, tmp_path) as m:
        await m.write("model", b"old")
        await m.fs.make_durable()
        store.hook = Pause(lambda request: request.what == "upload_part" and request.number == 2)
        await m.write("tmp", noise(1, LARGE))
        await reached(store.hook.reached)
        await m.rename("tmp", "model")
        store.hook.resume()
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"model": noise(1, LARGE)}
        assert b"old" not in [data for data, _ in store.objects.values()]
    assert not pause.reached.is_set()


async def test_a_link_takes_the_name_of_a_file_whose_upload_began_there(tmp_path: Path) -> None:
    """The object of the renamed file comes to lie at the link's path, and is not what is shown there."""
    store = MemoryStore()
    clock = Clock()
    async with writing_back(store, tmp_path, clock=clock) as m:
        pause = Pause(lambda request: request.what == "upload_part" and request.number == 2)
        store.hook = pause
        await m.write("old", noise(1, LARGE))
        await reached(pause.reached)
        await m.rename("old", "new")
        await m.symlink("old", "elsewhere")
        pause.resume()
        await m.fs.make_durable()
        assert await m.tree() == {"new": noise(1, LARGE), "old": "elsewhere"}
    clock.advance(TTL_S + 1)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"new": noise(1, LARGE), "old": "elsewhere"}


async def test_a_file_renamed_over_a_renamed_one_leaves_no_object(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path) as m:
        await m.write("a", b"first")
        await m.fs.make_durable()
        await m.rename("a", "b")
        handle = await m.create("a")
        await m.fs.write(handle, 0, b"second")
        await m.rename("a", "b")
        await m.close(handle)
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"b": b"second"}
        assert b"first" not in [data for data, _ in store.objects.values()]


# -- changes of names that wait


async def test_removes_links_and_renames_wait_for_what_was_accepted_before(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store, away=False)
    async with writing_back(store, tmp_path) as m:
        for name in ("gone", "moved"):
            await m.write(name, name.encode())
        await m.fs.make_durable()
        await m.sync()
        pause = Pause(lambda request: request.what == "put" and request.key == "data")
        outage.then = pause
        await m.write("data", b"data")
        await m.unlink("gone")
        await m.rename("moved", "there")
        await m.symlink("latest", "data")
        await m.mkdir("directory")
        await reached(pause.reached)
        await trio.sleep(1.2)  # a commit's delay, and more
        assert store.count("put", "data") == 1 and "data" not in store.objects
        assert {"gone", "moved"} <= set(store.objects)
        async with lake(store, tmp_path / "other") as other:
            assert await other.names() == ["gone", "moved"]
        pause.resume()
        await m.fs.make_durable()
        async with lake(store, tmp_path / "another") as other:
            assert await other.names() == ["data", "directory", "latest", "there"]


async def test_a_directory_is_renamed_when_what_is_below_is_in_the_store(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "complete_multipart")
    store.hook = pause
    async with writing_back(store, tmp_path) as m:
        await m.mkdir("tmp")
        await m.write("tmp/shard", noise(1, LARGE))
        renamed = trio.Event()

        async def rename() -> None:
            await m.rename("tmp", "final")
            renamed.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(rename)
            await reached(pause.reached)
            await trio.sleep(0.05)
            assert not renamed.is_set()
            pause.resume()
        await m.fs.make_durable()
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"final": None, "final/shard": noise(1, LARGE)}


async def test_a_rename_on_a_path_that_does_not_wait_comes_after_what_does(tmp_path: Path) -> None:
    store = MemoryStore()
    clock = Clock()
    rules = (Rule(path="d/**", durability="writeback"), Rule(path="a", durability="writeback"))
    async with writing_back(store, tmp_path, durability="close", rules=rules, clock=clock, delay_s=NEVER_S) as m:
        await m.mkdir("d")
        await m.write("a", b"first")
        await m.fs.make_durable()
        await m.write("d/other", b"other")
        await m.rename("a", "d/x")
        await m.rename("d/x", "b")
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await other.tree() == {"b": b"first", "d": None, "d/other": b"other"}


# -- somebody else has the name


async def test_a_name_that_somebody_else_took_is_kept_beside_it(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, delay_s=NEVER_S, pack="auto") as m:
        handle = await m.create("file", os.O_RDWR | os.O_EXCL)
        await m.fs.write(handle, 0, b"ours")
        await m.close(handle)
        store.give("file", b"theirs")
        await m.fs.make_durable()
        assert told(m)["conflicts"] == 1
        beside = [name for name in await m.names() if name.startswith("file.conflict-")]
        assert len(beside) == 1
        assert await m.read(beside[0]) == b"ours"
        assert (store.data("file"), store.data(beside[0])) == (b"theirs", b"ours")
        assert await m.read("file") == b"theirs"


async def test_it_is_seen_though_it_was_being_listed_meanwhile(tmp_path: Path) -> None:
    """The LIST leaves alone what was changed here, so it cannot tell what the name is now."""
    store = MemoryStore()
    async with writing_back(store, tmp_path, delay_s=NEVER_S, pack="auto") as m:
        assert await m.names() == []
        handle = await m.create("file", os.O_RDWR | os.O_EXCL)
        await m.fs.write(handle, 0, b"ours")
        await m.close(handle)
        store.give("file", b"theirs")
        listed = Pause(lambda request: request.what == "list" and not request.key.startswith(".lakefs"), "after")
        store.hook = listed
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.namespace.list_directory, ROOT_INODE)
            await reached(listed.reached)
            await m.fs.make_durable()
            assert told(m)["conflicts"] == 1
            listed.resume()
        assert await m.read("file") == b"theirs"


async def test_writing_again_does_not_make_it_ours(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, delay_s=NEVER_S, pack="auto") as m:
        handle = await m.create("file", os.O_RDWR | os.O_EXCL)
        await m.fs.write(handle, 0, b"ours")
        await m.close(handle)
        store.give("file", b"theirs")
        await rewrite(m, "file", b"ours, again")
        await m.fs.make_durable()
        assert store.data("file") == b"theirs"
        assert (told(m)["conflicts"], told(m)["failed"]) == (1, 0)
        beside = [name for name in await m.names() if name.startswith("file.conflict-")]
        assert [await m.read(name) for name in beside] == [b"ours, again"]


async def test_a_later_version_goes_beside_it_too(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "put")
    async with writing_back(store, tmp_path) as m:
        handle = await m.create("file", os.O_RDWR | os.O_EXCL)
        await m.fs.write(handle, 0, b"ours")
        store.hook = pause
        await m.fs.flush(handle)
        await reached(pause.reached)
        await m.fs.write(handle, 0, b"more")
        store.give("file", b"theirs")
        pause.resume()
        await until(lambda: told(m)["conflicts"] == 1)
        await m.close(handle)
        await m.fs.make_durable()
        assert store.data("file") == b"theirs"
        (beside,) = [key for key in entries_of(store) if key != "file"]
        assert store.data(beside) == b"more"


# -- attributes meanwhile


@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize("pack", ["never", "always"])
async def test_attributes_that_are_set_meanwhile_are_stored(tmp_path: Path, size: int, pack: str) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path, pack=pack) as m:
        await m.write("file", noise(1, size))
        await m.setattr("file", mode=0o640, uid=7)
        await m.setattr("file", mtime_ns=1_600_000_000_123_456_789, atime_ns=0)
        await m.set_xattr("file", "user.note", b"kept")
        assert told(m)["files"] == 1
        outage.away = False
        await m.fs.make_durable()
    async with lake(store, tmp_path / "other") as other:
        entry = await other.getattr("file")
        assert (permissions(entry), entry.uid, entry.mtime_ns) == (0o640, 7, 1_600_000_000_123_456_789)
        assert await other.xattrs("file") == {"user.note": b"kept"}
        assert await other.read("file") == noise(1, size)


async def test_attributes_that_are_set_while_it_is_sent(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "put" and request.key == "file", "after")
    store.hook = pause
    async with writing_back(store, tmp_path) as m:
        await m.write("file", b"data")
        await reached(pause.reached)
        await m.setattr("file", mode=0o600)
        pause.resume()
        await m.fs.make_durable()
        assert permissions(await m.getattr("file")) == 0o600
    async with lake(store, tmp_path / "other") as other:
        assert permissions(await other.getattr("file")) == 0o600


@pytest.mark.parametrize("pack", ["never", "always"])
@pytest.mark.parametrize("known", [False, True])
async def test_extended_attributes_that_are_set_while_it_is_sent(tmp_path: Path, pack: str, known: bool) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack=pack) as m:
        if known:
            await m.write("file", b"before")
            await m.fs.make_durable()
        pause = Pause(lambda request: request.what == "put")
        store.hook = pause
        await (rewrite(m, "file", b"data") if known else m.write("file", b"data"))
        await reached(pause.reached)
        await m.set_xattr("file", "user.note", b"kept")
        pause.resume()
        await m.fs.make_durable()
        assert await m.xattrs("file") == {"user.note": b"kept"}
        await m.fs.sync_names()
    async with lake(store, tmp_path / "other") as other:
        assert await other.xattrs("file") == {"user.note": b"kept"}
        assert await other.read("file") == b"data"


async def test_extended_attributes_stay_where_an_earlier_version_is_stored_first(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, delay_s=NEVER_S, pack="auto") as m:
        await m.write("file", b"first")
        await m.write("other", b"data")
        await rewrite(m, "file", b"second")
        await m.set_xattr("file", "user.note", b"kept")
        await m.rename("file", "new")  # it stores the version that was acknowledged before the other file
        assert await m.xattrs("new") == {"user.note": b"kept"}
        await m.set_xattr("new", "user.more", b"also")
        await m.fs.make_durable()
    async with lake(store, tmp_path / "other") as other:
        assert await other.xattrs("new") == {"user.note": b"kept", "user.more": b"also"}


async def test_attributes_in_a_held_change_that_a_pack_passes_do_not_count_over_those_of_the_next_mount(
    tmp_path: Path,
) -> None:
    """The next daemon numbers its changes from 1 again."""
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="always", delay_s=NEVER_S) as m:
        for path in ("file", "removed"):
            await m.write(path, b"first")
        for number in range(5):
            await m.mkdir(f"directory{number}")
        await m.fs.make_durable()
        await rewrite(m, "file", b"second")
        await m.unlink("removed")  # it waits for the new version, as do the attributes behind it
        await m.set_xattr("file", "user.note", b"kept")
        await m.fs.make_durable()
    async with writing_back(store, tmp_path, pack="always", delay_s=NEVER_S) as m:
        assert await m.xattrs("file") == {"user.note": b"kept"}
        await rewrite(m, "file", b"third")
        await m.set_xattr("file", "user.note", None)
        assert await m.xattrs("file") == {}


async def test_the_mtime_is_that_of_the_last_write(tmp_path: Path) -> None:
    store = MemoryStore()
    clock = Clock()
    async with writing_back(store, tmp_path, clock=clock, delay_s=NEVER_S, pack="auto") as m:
        await m.write("file", b"data")
        wanted = (await m.found("file")).mtime_ns
        clock.advance(30)
        await m.fs.make_durable()
        assert (await m.getattr("file")).mtime_ns == wanted
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert (await other.getattr("file")).mtime_ns == wanted


# -- room


async def test_a_writer_waits_for_room_and_goes_on(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store)
    size = 1 << 20
    async with writing_back(store, tmp_path, staging_bytes_max=4 * size) as m:
        async with trio.open_nursery() as nursery:
            done: list[int] = []

            async def write_all() -> None:
                for number in range(8):
                    await m.write(f"{number}", noise(number, size))
                    done.append(number)

            nursery.start_soon(write_all)
            await until(lambda: len(done) >= 3)
            await trio.sleep(0.1)
            assert len(done) < 5
            assert await m.read("0") == noise(0, size)
            outage.away = False
        await m.fs.make_durable()
        assert m.metrics.upload.writer_waits
        assert all(store.data(f"{number}") == noise(number, size) for number in range(8))


async def test_a_writer_waits_for_a_stored_version_that_is_still_staged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "WAIT_S_MAX", 0.02)
    store = MemoryStore()
    size = 1 << 20
    async with writing_back(store, tmp_path, staging_bytes_max=2 * size) as m:
        await m.write("tmp", b"first")
        await m.fs.make_durable()
        await m.rename("tmp", "model")
        commits = pause_of_commits()  # the next version is stored elsewhere, because its key is reserved
        store.hook = lambda request, when: commits(request, when) if store.count("complete_multipart") else None
        await m.write("tmp", noise(1, size + PART))
        await reached(commits.reached)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.write, "next", noise(2, size))
            await until(lambda: m.metrics.upload.writer_waits > 2)
            commits.resume()
        assert await m.read("next") == noise(2, size)


async def test_a_writer_waits_for_a_removed_version_whose_upload_is_being_aborted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "WAIT_S_MAX", 0.02)
    store = MemoryStore()
    size = 1 << 20
    part = Pause(lambda request: request.what == "upload_part" and request.number == 5)
    abort = Pause(lambda request: request.what == "abort_multipart")

    def hook(request: Request, when: When) -> None:
        part(request, when)
        abort(request, when)

    store.hook = hook
    async with writing_back(store, tmp_path, staging_bytes_max=2 * size) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise(1, size + PART))
        await reached(part.reached)
        await m.fs.flush(handle)
        await m.fs.release(handle)
        await m.unlink("file")
        part.resume()
        await reached(abort.reached)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.write, "next", noise(2, size))
            await until(lambda: m.metrics.upload.writer_waits > 2)
            abort.resume()
        assert await m.read("next") == noise(2, size)


async def test_a_writer_that_waited_too_long_hears_enospc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "WAIT_S_MAX", 0.02)
    store = MemoryStore()
    outage = Outage(store)
    size = 1 << 20
    async with writing_back(store, tmp_path, staging_bytes_max=2 * size, staging_timeout_s=0.2) as m:
        await m.write("kept", noise(1, size))
        handle = await m.create("file")
        with pytest.raises(StagingFull) as caught:
            for at in range(0, 3 * size, PART):
                await m.fs.write(handle, at, noise(2, PART))
        assert caught.value.errno == errno.ENOSPC
        assert await m.read("kept") == noise(1, size)
        outage.away = False
        await m.fs.make_durable("kept")
        assert store.data("kept") == noise(1, size)
        with pytest.raises(FileError):
            await m.close(handle)


async def test_more_files_than_may_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "FILES_MAX", 3)
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path, staging_timeout_s=0.1) as m:
        for number in range(3):
            await m.write(f"{number}", b"data")
        with pytest.raises(StagingFull):
            await m.create("one more")
        outage.away = False
        await m.fs.make_durable()
        await m.write("one more", b"data")


async def test_more_than_may_wait_keeps_nobody_else_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "FILES_MAX", 1)
    store = MemoryStore()
    outage = Outage(store)
    rules = (Rule(path="now", durability="close"),)
    async with writing_back(store, tmp_path, staging_timeout_s=0.1, rules=rules) as m:
        await m.write("later", b"data")
        handle = await m.create("now")
        with pytest.raises(StagingFull):
            await m.create("later too")
        outage.away = False
        await m.close(handle)


# -- what it says of itself


async def test_states_and_places(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store, away=False)
    pause = Pause(lambda request: request.what == "upload_part")
    outage.then = pause
    async with writing_back(store, tmp_path) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise(1, LARGE))
        assert await state(m, "file") == "dirty"
        assert (await location(m, "file")).startswith(f"file://{tmp_path}/")
        await m.close(handle)
        await reached(pause.reached)
        assert await state(m, "file") == "uploading"
        assert [item.state for item in m.fs.unfinished()] in (["accepted"], ["publishing"])
        pause.resume()
        await stored(m)
        assert await state(m, "file") == "durable"
        assert (await location(m, "file")).endswith("/nowhere/file")
        outage.away = True
        await rewrite(m, "file", b"again")
        assert await state(m, "file") in ("dirty", "uploading")
        with pytest.raises(Unavailable):
            await m.fs.make_durable()
        assert await m.xattrs("file") == {}
        with pytest.raises(FileError) as caught:
            await m.set_xattr("file", "user.lakefs.state", b"durable")
        assert caught.value.errno == errno.EPERM


async def test_state_of_a_directory_is_that_of_the_files_below(tmp_path: Path) -> None:
    async with writing_back(MemoryStore(), tmp_path, delay_s=NEVER_S) as m:
        for directory in ("a", "a/below", "b"):
            await m.mkdir(directory)
        await m.write("a/below/file", b"0")
        assert [await state(m, path) for path in ("a", "a/below", "b")] == ["dirty", "dirty", "durable"]
        await m.fs.make_durable("a")
        assert m.fs.xattr(ROOT_INODE, "user.lakefs.state") == b"durable"


async def test_credentials_that_are_refused_make_everything_wait(tmp_path: Path) -> None:
    store = MemoryStore()
    failures = Failures(lambda request: request.what == "put", AccessDenied("who are you"), count=3)
    store.hook = failures
    async with writing_back(store, tmp_path) as m:
        await m.write("file", b"data")
        await until(lambda: told(m)["failures"] >= 1)
        await stored(m)
        assert store.data("file") == b"data"
        assert failures.left == 0
        assert told(m)["failed"] == 0


async def test_a_file_that_waits_is_listed_with_its_size(tmp_path: Path) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path) as m:
        await m.write("file", noise(1, LARGE))
        await m.fs.opendir(1)
        (entry,) = m.fs.readdir(1, 0)
        assert (entry.name, entry.size, bool(entry.flags & Flag.LOCAL)) == (b"file", LARGE, True)


async def test_a_database_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be journaled was not accepted."""
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, b"data")
        commit = Database.commit

        def failing(self: Database, batch: Batch, *, sync: bool = False) -> None:
            raise CacheError("the disk is broken")

        with monkeypatch.context() as patch:
            patch.setattr(Database, "commit", failing)
            with pytest.raises(LakeError):
                await m.fs.flush(handle)
        assert commit is Database.commit
        assert told(m)["accepted"] == 0
        await m.close(handle)
        assert told(m)["accepted"] == 1
