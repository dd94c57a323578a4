"""Accepted files after a death: they are there again, as they were, and go on into the store.

A death is a copy of the cache directory, made while nothing of the daemon's own loop can run; from then on nothing that
the dead daemon asks for reaches the store.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Awaitable
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest
import trio

from lakefs_fuse.blockcache.disk_latency import Promptness
from lakefs_fuse.commits import committer
from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.environment.failpoints import NAMES
from lakefs_fuse.errors import FileError, LakeError, Unavailable
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.staging.draft_record import DraftRecord
from lakefs_fuse.store.protocol import ObjectStore
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_target import Describe
from lakefs_fuse.upload.restore import restore_draft
from lakefs_fuse.upload.uploader import Uploader
from lakefs_fuse.vfs.ops import rename as renaming
from lakefs_fuse.vfs.writeback import group_commit as accepting
from lakefs_fuse.vfs.writeback import publisher as newest
from lakefs_fuse.vfs.writeback import queue as writeback
from lakefs_fuse.vfs.writeback import replay
from lakefs_fuse.vfs.writeback.group_commit import LOGGED_BYTES_MAX
from tests.fakes import open_database
from tests.memory_store import Failures, MemoryStore, Pause, Request, When
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import TTL_S, Clock, Lake, entries_of, lake, permissions
from tests.vfs.writeback_model import Line
from tests.vfs.writing_back import LARGE, NEVER_S, PART, Outage, die, rewrite, state, stored, told, until, writing_back

pytestmark = pytest.mark.usefixtures("short_pauses", "noted_one_by_one")

NS = 1_000_000_000
Row = dict[str, bytes]
"""Files and their bytes."""


async def others_see(store: MemoryStore, root: Path) -> dict[str, object]:
    async with lake(store, root / "somebody") as other:
        return await other.tree()


async def nothing_is_left(store: MemoryStore, m: Lake) -> None:
    await m.fs.make_durable()
    await m.sync()
    await until(lambda: not any(upload.parts for upload in store.uploads.values()))  # ids may be lost of those without
    await until(lambda: m.parts.staging.bytes_used == 0)
    assert m.fs.unfinished() == []


# -- at every boundary


@dataclass
class Death:
    """Comes when a point is reached for the ``count``-th time."""

    point: str
    count: int
    cache: Path
    target: Path
    store: Line
    now: Row = field(default_factory=dict)
    following: Row = field(default_factory=dict)
    seen: tuple[Row, Row] | None = None
    times: int = 0

    def reached(self, name: str) -> None:
        if name != self.point or self.seen is not None:
            return
        self.times += 1
        if self.times < self.count:
            return
        if threading.current_thread() is threading.main_thread():
            self._come()
        else:
            trio.from_thread.run_sync(self._come)

    def _come(self) -> None:
        self.store.cut = True
        self.seen = dict(self.now), dict(self.following)
        die(self.cache, self.target)


def mounted(store: MemoryStore, line: Line, cache: Path, pack: str, clock: Clock) -> AbstractAsyncContextManager[Lake]:
    store.clock = clock
    return lake(
        cast(ObjectStore, line), cache, clock=clock, capabilities=store.capabilities, durability="writeback",
        writeback_delay_s=0.02, retry_timeout_s=0.0, pack=pack, orphans="abort",
    )  # fmt: skip


def without(tree: Row, path: str) -> Row:
    return {other: data for other, data in tree.items() if other != path}


async def work(m: Lake, death: Death) -> None:
    """What programs do. Whatever was answered is in ``death.now``."""

    async def step(call: Awaitable[object], following: Row) -> None:
        death.following = following
        await call
        death.now = following

    async def save(path: str, data: bytes) -> None:
        call = rewrite(m, path, data) if path in death.now else m.write(path, data)
        await step(call, death.now | {path: data})

    async def move(old: str, new: str) -> None:
        await step(m.rename(old, new), without(death.now, old) | {new: death.now[old]})

    async def rename_open(old: str, new: str) -> None:
        handle = await m.create(old)
        await m.fs.write(handle, 0, noise(new, 500))
        await m.rename(old, new)
        await step(m.close(handle), death.now | {new: noise(new, 500)})

    death.store.away = death.point == "discard.begun"  # so that something waits long enough to be replaced
    await m.mkdir("d")
    await save("one", noise("one", 100))
    await rename_open("open", "renamed")
    await rename_open("d/open", "d/renamed")
    await save("large", noise("large", LARGE))
    await save("d/tmp", noise("final", 300))
    await move("d/tmp", "d/final")
    await save("one", noise("one again", 200))
    await save("big", noise("big", 17 * PART))
    await save("gone", noise("gone", LARGE))
    await step(m.unlink("gone"), without(death.now, "gone"))
    death.store.away = False
    await m.fs.make_durable()
    await save("large", noise("large again", 17 * PART))
    await save("d/final", noise("final again", 400))
    await move("d/final", "final")
    await move("large", "d/large")
    await save("d/large", noise("small now", 10))
    await m.fs.make_durable()


async def check(m: Lake, death: Death) -> None:
    """Everything is as it was answered last, or as the call under way would have made it."""
    assert death.seen is not None
    before, after = death.seen
    tree = {path: data for path, data in (await m.tree()).items() if data is not None}
    for path in {*before, *after, *tree}:
        assert tree.get(path) in (before.get(path), after.get(path)), path


POINTS = [
    (point, count, pack)
    for point in NAMES
    if point not in ("replay.restored", "apply.step")
    for pack in ("never", "always")
    for count in ((1, 2, 4) if point.startswith(("accept.", "publish.")) else (1, 2))
    if count == 1 or not (point == "discard.begun" or (point.startswith("publish.") and pack == "always"))
]


@pytest.mark.parametrize(
    ("point", "count", "pack"),
    [pytest.param(*each, marks=pytest.mark.long) if each[1] > 1 and each[2] == "always" else each for each in POINTS],
)
async def test_nothing_accepted_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str, count: int, pack: str
) -> None:
    store, clock = MemoryStore(), Clock()
    line = Line(store)
    death = Death(point, count, tmp_path / "cache", tmp_path / "dead", line)
    for module in (accepting, newest, writeback, committer, renaming):
        monkeypatch.setattr(module, "reached", death.reached)
    try:
        async with mounted(store, line, death.cache, pack, clock) as m:
            await work(m, death)
    except* LakeError:
        pass  # what a dead daemon is told
    assert death.seen is not None, f"{point} was reached {death.times} times"
    again = Death("replay.restored", 1, tmp_path / "dead", tmp_path / "dead again", Line(store), *death.seen)
    monkeypatch.setattr(replay, "reached", again.reached)
    try:
        async with mounted(store, again.store, again.cache, pack, clock):
            pass
    except* LakeError:
        pass
    assert again.seen is not None
    async with mounted(store, Line(store), again.target, pack, clock) as m:
        await check(m, death)
        await nothing_is_left(store, m)
        await check(m, death)
        tree = await m.tree()
    assert await others_see(store, tmp_path) == tree
    async with mounted(store, Line(store), again.target, pack, clock) as m:
        assert told(m)["replayed"] == 0
        assert await m.tree() == tree


# -- what comes back


@pytest.mark.parametrize("size", [0, 100, LARGE])
@pytest.mark.parametrize("pack", ["never", "always"])
async def test_names_attributes_and_bytes(tmp_path: Path, size: int, pack: str) -> None:
    store, clock = MemoryStore(), Clock()
    Outage(store)
    async with writing_back(store, tmp_path / "cache", pack=pack, clock=clock) as m:
        await m.mkdir("d")
        await m.write("d/file", noise(1, size))
        await m.setattr("d/file", mode=0o640, uid=7, gid=8)
        await m.setattr("d/file", mtime_ns=1_600_000_000 * NS + 5, atime_ns=0)
        await m.set_xattr("d/file", "user.note", b"kept")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    clock.advance(100)
    for _ in range(2):  # it may die again
        async with writing_back(store, dead, pack=pack, clock=clock) as m:
            entry = await m.getattr("d/file")
            assert (permissions(entry), entry.uid, entry.gid, entry.size) == (0o640, 7, 8, size)
            assert entry.mtime_ns == 1_600_000_000 * NS + 5
            assert await m.xattrs("d/file") == {"user.note": b"kept"}
            assert await m.read("d/file") == noise(1, size)
            assert await m.names("d") == ["file"]
            assert (told(m)["replayed"], told(m)["files"]) == (1, 1)
            assert await state(m, "d/file") in ("dirty", "uploading")
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead, pack=pack, clock=clock) as m:
        await nothing_is_left(store, m)
        assert store.count("get") == 0
    async with lake(store, tmp_path / "other", clock=clock) as other:
        entry = await other.getattr("d/file")
        assert (permissions(entry), entry.uid, entry.gid) == (0o640, 7, 8)
        assert entry.mtime_ns == 1_600_000_000 * NS + 5
        assert await other.xattrs("d/file") == {"user.note": b"kept"}
        assert await other.read("d/file") == noise(1, size)


async def test_the_mtime_of_a_file_that_nobody_touched_since(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    Outage(store)
    async with writing_back(store, tmp_path / "cache", clock=clock) as m:
        await m.write("file", b"data")
        wanted = (await m.found("file")).mtime_ns
        dead = die(tmp_path / "cache", tmp_path / "dead")
    clock.advance(1000)
    async with writing_back(store, dead, clock=clock) as m:
        assert (await m.getattr("file")).mtime_ns == wanted


@pytest.mark.parametrize("late_s", [3, 30, 90])
@pytest.mark.parametrize("size", [10, LARGE])
async def test_replay_of_a_file_that_the_store_has_keeps_the_time_of_the_write(
    tmp_path: Path, size: int, late_s: int
) -> None:
    """The answer was lost: what the daemon that died stored is dated later than it was written."""
    store, clock = MemoryStore(), Clock()
    outage = Outage(store)
    dead = tmp_path / "dead"

    def then(request: Request, when: When) -> None:
        if when == "after" and request.what in ("put", "complete_multipart") and not dead.exists():
            die(tmp_path / "cache", dead)

    async with writing_back(store, tmp_path / "cache", clock=clock) as m:
        await m.write("file", noise(1, size))
        wanted = (await m.found("file")).mtime_ns
        clock.advance(late_s)
        outage.away, outage.then = False, then
        await m.fs.make_durable()
    clock.advance(late_s)
    async with writing_back(store, dead, clock=clock) as m:
        await nothing_is_left(store, m)
        clock.advance(1000)
        await m.names()
        assert (await m.getattr("file")).mtime_ns == wanted
    async with lake(store, tmp_path / "somebody", clock=clock) as other:
        [entry] = await other.read_directory(1)
        assert entry.mtime_ns == wanted


@pytest.mark.parametrize("late_s", [3, 30, 90])
async def test_finish_of_an_orphan_keeps_the_time_of_the_write(tmp_path: Path, late_s: int) -> None:
    """A file that nobody had closed is stored by the next mount."""
    store, clock = MemoryStore(), Clock()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache", clock=clock) as m:
        handle = await m.create("file")
        wanted = (await m.getattr("file")).mtime_ns
        await m.fs.write(handle, 0, noise(1, LARGE))
        dead = die(tmp_path / "cache", tmp_path / "dead")
        await m.close(handle)
    clock.advance(late_s)
    outage.away = False
    async with writing_back(store, dead, clock=clock, orphans="finish") as m:
        clock.advance(1000)
        await m.names()
        assert (await m.getattr("file")).mtime_ns == wanted
    async with lake(store, tmp_path / "somebody", clock=clock) as other:
        [entry] = await other.read_directory(1)
        assert entry.mtime_ns == wanted


async def test_a_mount_that_ended_in_peace_goes_on_too(tmp_path: Path) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path) as m:
        await m.write("file", noise(1, LARGE))
    store.hook = lambda _request, _when: None
    async with writing_back(store, tmp_path) as m:
        assert await m.read("file") == noise(1, LARGE)
        await stored(m)
        assert store.data("file") == noise(1, LARGE)


async def test_what_is_replayed_counts_as_staged(tmp_path: Path) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("file", noise(1, LARGE))
        used = m.parts.staging.bytes_used
        dead = die(tmp_path / "cache", tmp_path / "dead")
    async with writing_back(store, dead) as m:
        assert m.parts.staging.bytes_used == used >= LARGE


async def test_order_holds_across_a_death(tmp_path: Path) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("shard", noise(1, LARGE))
        dead = die(tmp_path / "cache", tmp_path / "dead")
    pause = Pause(lambda request: request.what == "complete_multipart" and request.key == "shard")
    store.hook = pause
    async with writing_back(store, dead) as m:
        await m.write("marker", b"done")
        await m.symlink("latest", "shard")
        await reached(pause.reached)
        await trio.sleep(1.2)
        assert store.objects == {}
        pause.resume()
        await m.fs.make_durable()
    assert set(await others_see(store, tmp_path)) == {"shard", "marker", "latest"}


# -- what the store has already


async def test_parts_that_are_up_are_not_sent_again(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "upload_part" and request.number == 5)
    store.hook = pause
    async with writing_back(store, tmp_path / "cache", uploads_max=2) as m:
        await m.write("file", noise(1, LARGE))
        await reached(pause.reached)
        await until(lambda: m.fs.unfinished()[0].parts_done >= 4)
        dead = die(tmp_path / "cache", tmp_path / "dead")
        done = m.fs.unfinished()[0].parts_done
        store.hook = Outage(store)
        pause.resume()
    sent = len(store.parts_sent())
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        await stored(m)
        assert store.data("file") == noise(1, LARGE)
        assert len(store.parts_sent()) - sent == 6 - done
        assert store.count("create_multipart") == 1


@pytest.mark.parametrize(("size", "pack"), [(100, "never"), (LARGE, "never"), (100, "always")])
async def test_what_was_stored_and_not_noted_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, pack: str
) -> None:
    store = MemoryStore()
    line = Line(store)
    point = "commit.sent" if pack == "always" else "publish.sent"
    death = Death(point, 1, tmp_path / "cache", tmp_path / "dead", line)
    for module in (newest, committer):
        monkeypatch.setattr(module, "reached", death.reached)
    async with mounted(store, line, death.cache, pack, Clock()) as m:
        await m.write("file", noise(1, size))
        await until(lambda: death.seen is not None)
    sent = [request.what for request in store.requests if request.what in ("put", "upload_part")]
    async with mounted(store, Line(store), death.target, pack, Clock()) as m:
        await stored(m)
        assert await m.read("file") == noise(1, size)
        await nothing_is_left(store, m)
        sent += ["put"] * m.commits()["written"]
    assert [request.what for request in store.requests if request.what in ("put", "upload_part")] == sent
    assert await others_see(store, tmp_path) == {"file": noise(1, size)}


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_a_version_that_was_stored_and_not_noted_and_one_after_it(tmp_path: Path, pack: str) -> None:
    """The first is recognised, and the second replaces it; extended attributes stay."""
    store, clock = MemoryStore(), Clock()
    line = Line(store)
    async with mounted(store, line, tmp_path / "cache", pack, clock) as m:
        await m.write("file", b"zero")
        await m.fs.make_durable()
        await m.set_xattr("file", "user.note", b"kept")
        await m.fs.sync_names()
        pause = Pause(lambda request: request.what == "put", "after")
        store.hook = pause
        clock.advance(1)
        await rewrite(m, "file", b"one, longer")
        await reached(pause.reached)
        clock.advance(1)
        await rewrite(m, "file", b"two, longer still")
        line.cut = True
        dead = die(tmp_path / "cache", tmp_path / "dead")
        pause.resume()
    store.hook = lambda _request, _when: None
    async with mounted(store, Line(store), dead, pack, clock) as m:
        await nothing_is_left(store, m)
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"file": b"two, longer still"}
        assert await m.xattrs("file") == {"user.note": b"kept"}
    assert await others_see(store, tmp_path) == {"file": b"two, longer still"}
    async with lake(store, tmp_path / "another", clock=clock) as other:
        assert await other.xattrs("file") == {"user.note": b"kept"}


async def test_a_file_renamed_while_its_upload_ended_and_not_noted(tmp_path: Path) -> None:
    """Its object is at the key of the old name; no commit says so yet."""
    store = MemoryStore()
    line = Line(store)
    parts = Pause(lambda request: request.what == "upload_part" and request.number == 2)
    complete = Pause(lambda request: request.what == "complete_multipart", "after")

    def hook(request: Request, when: When) -> None:
        parts(request, when)
        complete(request, when)

    store.hook = hook
    async with mounted(store, line, tmp_path / "cache", "never", Clock()) as m:
        await m.write("tmp", noise(1, LARGE))
        await reached(parts.reached)
        await m.rename("tmp", "final")
        parts.resume()
        await reached(complete.reached)
        dead = die(tmp_path / "cache", tmp_path / "dead")
        line.cut = True
        complete.resume()
    store.hook = lambda _request, _when: None
    async with mounted(store, Line(store), dead, "never", Clock()) as m:
        assert await m.read("final") == noise(1, LARGE)
        await nothing_is_left(store, m)
        assert await m.tree() == {"final": noise(1, LARGE)}
    assert await others_see(store, tmp_path) == {"final": noise(1, LARGE)}


async def test_an_upload_whose_id_was_never_learnt(tmp_path: Path) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "create_multipart", "after")
    store.hook = pause
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("file", noise(1, LARGE))
        await reached(pause.reached)
        dead = die(tmp_path / "cache", tmp_path / "dead")
        Outage(store)
        pause.resume()
    assert len(store.uploads) == 1
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        await nothing_is_left(store, m)
        assert store.data("file") == noise(1, LARGE)


async def dead_while_sending(store: MemoryStore, root: Path) -> Path:
    """``file`` was accepted (seed 1); a part of it is on its way when the daemon dies."""
    pause = Pause(lambda request: request.what == "upload_part" and request.number == 5)
    store.hook = pause
    async with writing_back(store, root / "cache", uploads_max=2) as m:
        await m.write("file", noise(1, LARGE))
        await reached(pause.reached)
        dead = die(root / "cache", root / "dead")
        Outage(store)
        pause.resume()
    store.hook = lambda _request, _when: None
    return dead


async def test_an_upload_that_the_store_ended_meanwhile(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await dead_while_sending(store, tmp_path)
    store.uploads.clear()
    async with writing_back(store, dead) as m:
        await nothing_is_left(store, m)
        assert store.data("file") == noise(1, LARGE)


# -- somebody else was there


async def waiting_then_dead(
    store: MemoryStore, root: Path, size: int = 100, *, before: bytes = b"", **config: object
) -> Path:
    """``file`` was accepted (seed 1), over ``before``; the store never saw it."""
    outage = Outage(store, away=False)
    async with writing_back(store, root / "cache", **config) as m:  # type: ignore[arg-type]
        if before:
            await m.write("file", before)
            await m.fs.make_durable()
        outage.away = True
        await (rewrite(m, "file", noise(1, size)) if before else m.write("file", noise(1, size)))
        dead = die(root / "cache", root / "dead")
    store.hook = lambda _request, _when: None
    return dead


@pytest.mark.parametrize("pack", ["never", "always"])
@pytest.mark.parametrize("before", [b"", b"before"])
@pytest.mark.parametrize("size", [100, LARGE])
async def test_a_newer_version_of_somebody_else_is_kept_and_so_is_ours(
    tmp_path: Path, size: int, before: bytes, pack: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    dead = await waiting_then_dead(store, tmp_path, size, before=before, pack=pack)
    async with lake(store, tmp_path / "theirs", pack=pack) as theirs:
        await (rewrite(theirs, "file", b"theirs") if before else theirs.write("file", b"theirs"))
    async with writing_back(store, dead, pack=pack) as m:
        await m.fs.make_durable()
        assert told(m)["conflicts"] == 1
        tree = await m.tree()
        (beside,) = [name for name in tree if name != "file"]
        assert beside.startswith("file.conflict-")
        assert tree == {"file": b"theirs", beside: noise(1, size)}
        await nothing_is_left(store, m)
    assert await others_see(store, tmp_path) == tree
    assert "both versions are kept" in caplog.text
    async with writing_back(store, dead, pack=pack) as m:
        assert (told(m)["replayed"], await m.tree()) == (0, tree)


@pytest.mark.parametrize(("pack", "away_s"), [("never", 0), ("always", 0), ("always", 3600)])
@pytest.mark.parametrize("before", [b"", b"before"])
async def test_extended_attributes_stay_with_the_version_that_they_were_set_on(
    tmp_path: Path, before: bytes, pack: str, away_s: int
) -> None:
    """Both versions of a name are kept: each has its own, on all nodes, however long ago others set them."""
    store, clock = MemoryStore(), Clock()
    outage = Outage(store, away=False)

    async def shown(m: Lake, name: str) -> dict[str, bytes]:
        inode = (await m.found(name)).inode
        return {each: m.fs.xattr(inode, each) for each in m.fs.xattr_names(inode)}

    async with lake(store, tmp_path / "theirs", pack=pack, clock=clock) as theirs:
        async with writing_back(store, tmp_path / "cache", pack=pack, clock=clock) as m:
            if before:
                await m.write("file", before)
                await m.fs.make_durable()
            outage.away = True
            await (rewrite(m, "file", b"ours!!") if before else m.write("file", b"ours!!"))
            await m.fs.set_xattr((await m.found("file")).inode, "user.ours", b"1")
            dead = die(tmp_path / "cache", tmp_path / "dead")
        outage.away = False
        store.hook = lambda _request, _when: None
        await theirs.poll()
        await (rewrite(theirs, "file", b"theirs") if before else theirs.write("file", b"theirs"))
        await theirs.fs.set_xattr((await theirs.found("file")).inode, "user.theirs", b"2")
        await theirs.sync()
        clock.advance(away_s)
        await theirs.write("later", b"later")
        await theirs.sync()
        async with (
            writing_back(store, dead, pack=pack, clock=clock) as m,
            lake(store, tmp_path / "fresh", pack=pack, clock=clock) as fresh,
        ):
            await m.fs.make_durable()
            for each in (m, theirs, fresh):
                await each.poll()
                (beside,) = [name for name in await each.names() if name not in ("file", "later")]
                assert await each.tree() == {"file": b"theirs", "later": b"later", beside: b"ours!!"}
                assert await shown(each, "file") == {"user.theirs": b"2"}
                assert await shown(each, beside) == {"user.ours": b"1"}


async def test_a_name_that_somebody_else_replaced_and_then_removed_is_free_for_ours(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    outage = Outage(store, away=False)
    async with lake(store, tmp_path / "theirs", pack="always", clock=clock) as theirs:
        async with writing_back(store, tmp_path / "cache", pack="always", clock=clock) as m:
            await m.write("file", b"before")
            await m.fs.make_durable()
            await theirs.write("theirs", b"theirs")
            await theirs.poll()
            await theirs.rename("theirs", "file")
            await theirs.sync()
            outage.away = True
            await rewrite(m, "file", b"acknowledged")
            await m.poll()
            dead = die(tmp_path / "cache", tmp_path / "dead")
        outage.away = False
        await theirs.unlink("file")
        await theirs.sync()
    async with writing_back(store, dead, pack="always", clock=clock) as m:
        await m.fs.make_durable()
        assert (told(m)["conflicts"], await m.tree()) == (0, {"file": b"acknowledged"})
    assert await others_see(store, tmp_path) == {"file": b"acknowledged"}


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_replay_of_a_stored_file_that_another_node_replaced_gives_the_name_another_inode(
    tmp_path: Path, pack: str
) -> None:
    """The kernel keeps the size that it knows of an inode."""
    store, dead = MemoryStore(), tmp_path / "dead"

    def die_when_stored(request: Request, when: When) -> None:
        if when == "after" and request.what == "put" and not dead.exists():
            die(tmp_path / "cache", dead)

    async with writing_back(store, tmp_path / "cache", pack=pack) as m:
        await m.mkdir("d")
        await m.fs.sync_names()
        store.hook = die_when_stored
        await m.write("d/file", noise(1, 100))
        await stored(m)
    async with lake(store, tmp_path / "theirs", pack="always") as theirs:
        await rewrite(theirs, "d/file", b"theirs")
        await theirs.sync()
    is_blind = True

    def nothing_is_known(request: Request, when: When) -> None:
        if is_blind and when == "before" and request.what == "head":
            raise Unavailable("the store is away")

    store.hook = nothing_is_known
    async with writing_back(store, dead, pack=pack) as m:
        ours = await m.found("d/file")
        assert m.fs.unfinished()
        is_blind = False
        await stored(m)
        assert await m.read("d/file") == b"theirs"
        assert (await m.found("d/file")).inode != ours.inode


@pytest.mark.parametrize(("is_replaced", "is_removed"), [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("pack", ["never", "always"])
async def test_replay_of_stored_bytes_that_another_node_saw_and_replaced_leaves_what_that_says(
    tmp_path: Path, pack: str, is_replaced: bool, is_removed: bool
) -> None:
    """The bytes are still there, and hidden: the row of their writer does not name them again."""
    store, dead = MemoryStore(), tmp_path / "dead"

    def die_when_stored(request: Request, when: When) -> None:
        if when == "after" and request.what == "put" and not dead.exists():
            die(tmp_path / "cache", dead)

    async with writing_back(store, tmp_path / "cache", pack=pack) as m:
        store.hook = die_when_stored
        await m.write("file", noise(1, 100))
        await stored(m)
    async with lake(store, tmp_path / "theirs", pack="always", delete_after_s=3600.0) as theirs:
        assert await theirs.names() == ["file"]
        if is_replaced:
            await rewrite(theirs, "file", b"theirs")
        if is_removed:
            await theirs.unlink("file")
        await theirs.fs.sync_names()
    expected = {} if is_removed else {"file": b"theirs"}
    async with writing_back(store, dead, pack=pack) as m:
        await stored(m)
        await m.fs.make_durable()
        assert await m.tree() == expected
        assert ("file" in store.objects) == (pack == "never")
    assert await others_see(store, tmp_path) == expected


async def test_replay_of_an_object_that_a_commit_told_of_and_another_node_removed_leaves_the_name_away(
    tmp_path: Path,
) -> None:
    """It is below `.lakefs/`, because the bytes of a renamed file are at the name's own key."""
    store, dead = MemoryStore(), tmp_path / "dead"

    def die_when_told(request: Request, when: When) -> None:
        if when == "after" and request.what == "put" and request.key.startswith(COMMITS) and not dead.exists():
            die(tmp_path / "cache", dead)

    async with writing_back(store, tmp_path / "cache", pack="never") as m:
        await m.write("file", b"first")
        await stored(m)
        await m.rename("file", "other")
        await m.fs.make_durable()
        store.hook = die_when_told
        await m.write("file", noise(1, 100))
        await stored(m)
    async with lake(store, tmp_path / "theirs", delete_after_s=3600.0) as theirs:
        assert await theirs.names() == ["file", "other"]
        await theirs.unlink("file")
        await theirs.fs.sync_names()
    async with writing_back(store, dead, pack="never") as m:
        await stored(m)
        await m.fs.make_durable()
        assert await m.tree() == {"other": b"first"}
    assert await others_see(store, tmp_path) == {"other": b"first"}


async def test_a_question_that_fails_is_asked_again_before_anything_is_replaced(tmp_path: Path) -> None:
    """The upload of ours cannot be ended at first: theirs is not overwritten for that."""
    store = MemoryStore()
    dead = await dead_while_sending(store, tmp_path)
    store.give("file", b"theirs")
    failed: list[Request] = []

    def hook(request: Request, when: When) -> None:
        if request.what == "abort_multipart" and when == "before" and len(failed) < 3:
            failed.append(request)
            raise Unavailable("not now")

    store.hook = hook
    async with writing_back(store, dead) as m:
        await stored(m)
        assert len(failed) == 3
        assert store.data("file") == b"theirs"
        (beside,) = [key for key in entries_of(store) if key != "file"]
        assert store.data(beside) == noise(1, LARGE)
        await nothing_is_left(store, m)


async def test_our_own_earlier_version_is_not_somebody_elses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It became visible, nobody noted that, and a later one was accepted before the death."""
    store = MemoryStore()
    line = Line(store)
    pause = Pause(lambda request: request.what == "put" and request.key == "file", "after")
    store.hook = pause
    async with mounted(store, line, tmp_path / "cache", "never", Clock()) as m:
        await m.write("file", b"one")
        await reached(pause.reached)
        await rewrite(m, "file", b"two")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        line.cut = True
        pause.resume()
    store.hook = lambda _request, _when: None
    async with mounted(store, Line(store), dead, "never", Clock()) as m:
        assert await m.read("file") == b"two"
        await nothing_is_left(store, m)
        assert told(m)["conflicts"] == 0
    assert await others_see(store, tmp_path) == {"file": b"two"}


async def test_a_directory_has_taken_the_name(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await waiting_then_dead(store, tmp_path, pack="always")
    async with lake(store, tmp_path / "theirs") as theirs:
        await theirs.mkdir("file")
        await theirs.write("file/below", b"theirs")
        await theirs.sync()
    async with writing_back(store, dead, pack="always") as m:
        await nothing_is_left(store, m)
        tree = await m.tree()
        assert tree.pop("file/below") == b"theirs"
        del tree["file"]
        assert list(tree.values()) == [noise(1, 100)]


# -- names, just before


async def test_a_rename_just_before(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store, away=False)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("model", b"old")
        await m.fs.make_durable()
        outage.away = True
        await m.write("tmp", noise(1, LARGE))
        await m.rename("tmp", "model")
        await m.write("late", b"late")
        await m.rename("late", "later")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    outage.away = False
    async with writing_back(store, dead) as m:
        assert await m.tree() == {"model": noise(1, LARGE), "later": b"late"}
        await nothing_is_left(store, m)
    assert await others_see(store, tmp_path) == {"model": noise(1, LARGE), "later": b"late"}


@pytest.mark.parametrize("size", [100, LARGE])
async def test_a_rename_of_a_file_whose_stored_object_was_not_recorded_over_one_that_another_node_removes(
    tmp_path: Path, size: int
) -> None:
    """The object is under the old name, and there is none under the new one."""
    store, clock = MemoryStore(), Clock()
    async with writing_back(store, tmp_path / "cache", clock=clock) as m:
        await m.write("new", b"replaced")
        await m.fs.make_durable()
        await m.sync()
        is_away = False

        def lose_answer(request: Request, when: When) -> None:
            nonlocal is_away
            is_away |= when == "after" and request.key == "old" and request.what in ("put", "complete_multipart")
            if is_away:
                raise Unavailable("no answer")

        store.hook = lose_answer
        await m.write("old", noise(1, size))
        await until(lambda: is_away)
        await m.rename("old", "new")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    store.hook = lambda _request, _when: None
    async with lake(store, tmp_path / "other", clock=clock) as other:
        await other.unlink("new")
        await other.sync()
    if "new" in store.objects:  # deleted since
        store.take("new")
    async with writing_back(store, dead, clock=clock) as m:
        assert await m.tree() == {"new": noise(1, size)}
        await nothing_is_left(store, m)
        assert (told(m)["conflicts"], await m.tree()) == (0, {"new": noise(1, size)})
    clock.advance(2 * TTL_S)
    assert await others_see(store, tmp_path) == {"new": noise(1, size)}


async def test_a_directory_renamed_just_before_with_a_file_changed_twice_leaves_no_old_name(tmp_path: Path) -> None:
    """Its attributes were set, which is in no commit yet, and its bytes were replaced."""
    store = MemoryStore()
    outage = Outage(store, away=False)
    with suppress(ExceptionGroup):  # of the dead one, whose changes the store refuses
        async with writing_back(store, tmp_path / "cache") as m:
            await m.mkdir("old")
            await m.write("old/file", b"first")
            await m.fs.make_durable()
            await m.sync()
            await m.setattr("old/file", mtime_ns=NS)
            await rewrite(m, "old/file", b"second")
            await m.rename("old", "new")
            outage.away = True
            dead = die(tmp_path / "cache", tmp_path / "dead")
    outage.away = False
    async with writing_back(store, dead) as m:
        assert await m.tree() == {"new": None, "new/file": b"second"}
        await nothing_is_left(store, m)
        assert await m.tree() == {"new": None, "new/file": b"second"}
    assert await others_see(store, tmp_path) == {"new": None, "new/file": b"second"}


async def test_replay_of_a_file_renamed_over_a_packed_one_leaves_out_the_older_object_that_this_hides(
    tmp_path: Path,
) -> None:
    """Its writer had not seen the object, which is hidden by its date alone."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "other", clock=clock, pack="always", metadata_ttl_s=NEVER_S) as other:
        assert await other.names() == []
        store.give("file", b"hidden")
        clock.advance(10)
        await other.write("file", b"packed")
        await other.sync()
    async with writing_back(store, tmp_path / "cache", clock=clock) as m:
        assert await m.read("file") == b"packed"
        outage = Outage(store)
        await m.write("new", b"acknowledged")
        await m.rename("new", "file")
        died = die(tmp_path / "cache", tmp_path / "died")
    outage.away = False
    async with writing_back(store, died, clock=clock) as m:
        await nothing_is_left(store, m)
        assert (told(m)["conflicts"], await m.tree()) == (0, {"file": b"acknowledged"})
    assert await others_see(store, tmp_path) == {"file": b"acknowledged"}


@pytest.mark.parametrize("size", [100, LARGE])
async def test_an_unlink_just_before(tmp_path: Path, size: int) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what in ("put", "upload_part"))
    store.hook = pause
    delay_s, pack = (NEVER_S, "always") if size < PART else (0.0, "never")
    async with writing_back(store, tmp_path / "cache", delay_s=delay_s, pack=pack) as m:
        await m.write("gone", noise(1, size))
        if size > PART:
            await reached(pause.reached)
        handle = await m.open("gone", os.O_RDONLY)
        await m.unlink("gone")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        Outage(store)
        pause.resume()
        await m.fs.release(handle)
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        assert await m.names() == []
        assert told(m)["replayed"] == 0
        await nothing_is_left(store, m)
    assert store.uploads == {}
    assert await others_see(store, tmp_path) == {}


async def test_a_name_that_was_removed_and_made_again(tmp_path: Path) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("file", noise(1, LARGE))
        handle = await m.open("file", os.O_RDONLY)
        await m.unlink("file")
        await m.write("file", b"again")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        await m.fs.release(handle)
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        assert await m.tree() == {"file": b"again"}
        await nothing_is_left(store, m)
    assert await others_see(store, tmp_path) == {"file": b"again"}


# -- versions


@pytest.mark.parametrize("size", [100, LARGE])
async def test_a_later_version_that_was_not_accepted(tmp_path: Path, size: int) -> None:
    """It is an orphan; the name has the bytes that were accepted."""
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("file", noise(1, size))
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 0, b"never closed")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        assert await m.read("file") == noise(1, size)
        await m.fs.make_durable()
        assert store.data("file") == noise(1, size)
        for item in m.fs.unfinished():
            assert (item.state, item.path) == ("orphan", "file")
            await m.fs.abort_orphan(item.id)
        await nothing_is_left(store, m)
        assert await m.read("file") == noise(1, size)


async def test_a_later_version_is_not_finished_before_the_one_that_was_accepted(tmp_path: Path) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("file", noise(1, LARGE))
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 0, b"never closed")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead, orphans="finish") as m:
        (orphan,) = [item for item in m.fs.unfinished() if item.state == "orphan"]
        await m.fs.make_durable()
        assert store.data("file") == noise(1, LARGE)
        await m.fs.finish_orphan(orphan.id)
        assert store.data("file")[:12] == b"never closed"
        assert told(m)["conflicts"] == 0


async def test_two_accepted_versions(tmp_path: Path) -> None:
    """The older was on its way when the newer was accepted."""
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "put")
    store.hook = pause
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("file", b"one")
        await reached(pause.reached)
        await rewrite(m, "file", b"two")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        Outage(store)
        pause.resume()
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        assert await m.read("file") == b"two"
        await nothing_is_left(store, m)
        assert store.data("file") == b"two"
        assert await m.read("file") == b"two"


async def test_a_replaced_version_leaves_no_upload(tmp_path: Path) -> None:
    """Its upload was under way, the next was accepted, and the daemon died before it could end the upload."""
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "upload_part" and request.number == 4)
    store.hook = pause
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("file", noise(1, LARGE))
        await reached(pause.reached)
        await rewrite(m, "file", b"small")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        Outage(store)
        pause.resume()
    assert len(store.uploads) == 1
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        assert await m.read("file") == b"small"
        await nothing_is_left(store, m)
    assert store.data("file") == b"small"


async def test_a_replaced_version_does_not_come_back_when_the_name_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of it went up while its successor was being accepted, and the journal was told of the part last."""
    store = MemoryStore()
    parts = Pause(lambda request: request.what == "upload_part" and request.number == 4)
    aborts = Pause(lambda request: request.what == "abort_multipart")

    def hook(request: Request, when: When) -> None:
        parts(request, when)
        aborts(request, when)

    store.hook = hook
    going_on = threading.Event()
    sync = Database.sync

    def slow(self: Database) -> None:
        going_on.wait(10)
        sync(self)

    async with writing_back(store, tmp_path / "cache", uploads_max=1) as m:
        await m.write("file", noise(1, LARGE))
        await reached(parts.reached)
        done = m.fs.unfinished()[0].parts_done
        monkeypatch.setattr(Database, "sync", slow)
        monkeypatch.setattr(Promptness, "is_prompt", False)  # then it is a thread that waits
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rewrite, m, "file", b"small")
            await trio.sleep(0.1)
            parts.resume()
            await until(lambda: max(item.parts_done for item in m.fs.unfinished()) > done)
            going_on.set()
        await m.unlink("file")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        Outage(store)
        aborts.resume()
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        assert await m.names() == []
        await nothing_is_left(store, m)
    assert await others_see(store, tmp_path) == {}


async def test_a_change_in_place_of_what_the_store_has(tmp_path: Path) -> None:
    store = MemoryStore()
    data = bytearray(noise(0, LARGE))
    store.give("file", bytes(data))
    outage = Outage(store, away=False)
    async with writing_back(store, tmp_path / "cache") as m:
        handle = await m.open("file", os.O_RDWR)
        outage.away = True
        await m.fs.write(handle, 70_000, b"patched")
        data[70_000:70_007] = b"patched"
        await m.close(handle)
        dead = die(tmp_path / "cache", tmp_path / "dead")
    outage.away = False
    async with writing_back(store, dead) as m:
        assert await m.read("file") == data
        await nothing_is_left(store, m)
        assert store.data("file") == data


# -- what is missing


async def test_the_name_is_missing(tmp_path: Path) -> None:
    """The journal alone brings it back, and its directory."""
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache", pack="always") as m:
        await m.mkdir("d")
        await m.write("d/file", noise(1, 100))
        await m.setattr("d/file", mode=0o600)
        dead = die(tmp_path / "cache", tmp_path / "dead")
    database = open_database(dead / "meta", "file:///nowhere")
    tree = Tree(database)
    directory = tree.resolve([b"d"])
    assert directory is not None
    batch = Batch()
    tree.remove(batch, directory)
    database.commit(batch)
    database.close()
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead, pack="always") as m:
        assert await m.read("d/file") == noise(1, 100)
        assert permissions(await m.getattr("d/file")) == 0o600
        await nothing_is_left(store, m)
    assert (await others_see(store, tmp_path))["d/file"] == noise(1, 100)


@pytest.mark.parametrize("size", [1, 256 * 1024])
async def test_small_file_that_was_not_closed_leaves_nothing(tmp_path: Path, size: int) -> None:
    """Its bytes were in memory only, which no program was promised to keep."""
    store = MemoryStore()
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("before", b"before")
        await m.fs.make_durable()
        for path in ("new", "before"):
            handle = await (m.create("new") if path == "new" else m.open(path, os.O_RDWR | os.O_TRUNC))
            await m.fs.write(handle, 0, noise(1, size))
        dead = die(tmp_path / "cache", tmp_path / "dead")
    async with writing_back(store, dead) as m:
        assert m.fs.unfinished() == []
        assert await m.tree() == {"before": b"before"}
        assert not [path for path in (dead / "staging").iterdir() if path.stat().st_size]


@pytest.mark.parametrize("more", [100, LARGE])
async def test_change_of_an_acknowledged_file_that_was_not_closed_leaves_the_version_before(
    tmp_path: Path, more: int
) -> None:
    """The copy that is changed is in memory, until it outgrows that."""
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache", delay_s=NEVER_S) as m:
        await m.write("file", noise(1, 1000))
        handle = await m.open("file", os.O_RDWR | os.O_APPEND)
        await m.fs.write(handle, 1000, noise(2, more))
        dead = die(tmp_path / "cache", tmp_path / "dead")
    outage.away = False
    async with writing_back(store, dead) as m:
        await until(lambda: not told(m)["files"])
        assert await m.tree() == {"file": noise(1, 1000)}
        left = [each for each in m.fs.unfinished() if each.id != "names"]
        assert len(left) == (more == LARGE), "bytes in a staging file are kept as an orphan"


@pytest.mark.parametrize("is_store_away", [False, True])
@pytest.mark.parametrize("size", [100, LARGE])
@pytest.mark.parametrize("is_attempted", [False, True])
async def test_the_metadata_is_lost(tmp_path: Path, size: int, is_store_away: bool, is_attempted: bool) -> None:
    """Nothing of what was staged is deleted unasked, also by a second mount, where the first could not begin."""
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("file", noise(1, size))
        if is_attempted:  # which leaves a copy of a small file beside the segment that it is in
            await until(lambda: outage.refused and told(m)["files"])
        dead = die(tmp_path / "cache", tmp_path / "dead")
    shutil.rmtree(dead / "meta")
    if is_store_away:
        answers, store.hook = store.hook, Failures(lambda _: True, Unavailable("away"), count=1000)
        with pytest.RaisesGroup(LakeError, allow_unwrapped=True, flatten_subgroups=True):
            async with writing_back(store, dead):
                pass
        store.hook = answers
    async with writing_back(store, dead) as m:
        assert any(noise(1, size) in path.read_bytes() for path in (dead / "staging").iterdir())
        assert [item.state for item in m.fs.unfinished()] == ["orphan"]


@pytest.mark.parametrize("is_read_only_first", [False, True])
async def test_read_only_mount_leaves_a_dead_daemons_records_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_read_only_first: bool
) -> None:
    """A file was removed whose PUT had worked without an answer: its object goes with the next mount that may write."""
    store, clock = MemoryStore(), Clock()
    store.clock = clock
    line, stored_at = Line(store), threading.Event()

    def hook(request: Request, when: When) -> None:
        if request.what == "put" and request.key == "file" and when == "after":
            stored_at.set()
        if stored_at.is_set():
            raise Unavailable("away")

    store.hook = hook
    death = Death("discard.begun", 1, tmp_path / "cache", tmp_path / "dead", line)
    monkeypatch.setattr(writeback, "reached", death.reached)
    try:
        async with mounted(store, line, tmp_path / "cache", "never", clock) as m:
            await m.write("file", noise(7, 1000))
            await until(stored_at.is_set)
            await m.unlink("file")
            await until(lambda: death.seen is not None)
    except* LakeError:
        pass
    store.hook = lambda _request, _when: None
    monkeypatch.setattr(writeback, "reached", lambda _name: None)
    assert "file" in store.objects
    line = Line(store)
    if is_read_only_first:
        async with lake(
            cast(ObjectStore, line), tmp_path / "dead", clock=clock, capabilities=store.capabilities, read_only=True
        ) as m:
            assert [each.state for each in m.fs.unfinished()] == ["orphan"]
    async with mounted(store, line, tmp_path / "dead", "never", clock) as m:
        await m.sync()
        await until(lambda: "file" not in store.objects)
        assert await m.tree() == {}
    assert await others_see(store, tmp_path) == {}


async def test_staged_bytes_that_are_gone_are_told_and_the_rest_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("lost", noise(1, LARGE))
        await m.write("kept", b"kept")
        lost = m.fs.unfinished()
        dead = die(tmp_path / "cache", tmp_path / "dead")
    (draft_id,) = [item.id for item in lost if item.path == "lost"]
    (dead / "staging" / draft_id).unlink()
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        assert await m.read("kept") == b"kept"
        assert "lost was acknowledged, and cannot be brought back" in caplog.text
        assert draft_id not in caplog.text, "there is nothing to abort"
        assert [item for item in m.fs.unfinished() if item.path == "lost"] == []
        await m.fs.make_durable()
        assert store.data("kept") == b"kept"
        assert "lost" not in store.objects


@pytest.mark.parametrize("size", [LARGE, LOGGED_BYTES_MAX + 1])
@pytest.mark.parametrize("left", [0, 1, 2])
async def test_acknowledged_file_whose_staged_bytes_were_cut_off_is_an_orphan_and_never_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int, left: int
) -> None:
    """Its missing bytes would be read, and stored, as zeros. ``left``: quarters of its bytes."""
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("kept", b"kept")
        await m.write("lost", noise(1, size))
        lost = [item.id for item in m.fs.unfinished() if item.path == "lost"]
        dead = die(tmp_path / "cache", tmp_path / "dead")
    (file,) = (dead / "staging").glob(lost[0] if size == LARGE else "segment-*")
    os.truncate(file, file.stat().st_size - size + left * size // 4)
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        assert "lost was acknowledged, and cannot be brought back" in caplog.text
        assert [item.state for item in m.fs.unfinished() if item.path == "lost"] == ["orphan"]
        with pytest.raises(LakeError, match=r"damaged|missing"):
            await m.fs.finish_orphan(lost[0])
        await m.fs.make_durable("kept")
        assert await m.tree() == {"kept": b"kept"}
        await m.fs.abort_orphan(lost[0])
        assert m.fs.unfinished() == []
    assert store.data("kept") == b"kept"
    assert "lost" not in store.objects


async def test_acknowledged_file_that_was_extended_without_a_write_comes_back(tmp_path: Path) -> None:
    """Its staging file ends before its size."""
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, noise(1, PART + 10))
        await m.setattr("file", size=2 * PART)
        await m.close(handle)
        dead = die(tmp_path / "cache", tmp_path / "dead")
    store.hook = lambda _request, _when: None
    async with writing_back(store, dead) as m:
        assert await m.read("file") == noise(1, PART + 10) + bytes(PART - 10)
        await nothing_is_left(store, m)
    assert store.data("file") == noise(1, PART + 10) + bytes(PART - 10)


async def test_record_with_values_that_make_no_draft_costs_its_own_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        for path in ("damaged", "whole"):
            await m.write(path, path.encode())
        dead = die(tmp_path / "cache", tmp_path / "dead")
    store.hook = lambda _request, _when: None

    def restore_or_fail(uploader: Uploader, record: DraftRecord, describe: Describe) -> Draft:
        if record.key == "damaged":
            raise KeyError(record.id)
        return restore_draft(uploader, record, describe)

    monkeypatch.setattr(replay, "restore_draft", restore_or_fail)
    async with writing_back(store, dead) as m:
        await m.fs.make_durable("whole")
        assert store.data("whole") == b"whole"
        assert len(m.fs.unfinished()) == 1


async def test_a_mount_that_only_reads_leaves_what_was_accepted_alone(tmp_path: Path) -> None:
    store = MemoryStore()
    dead = await waiting_then_dead(store, tmp_path, LARGE)
    async with lake(store, dead, read_only=True) as m:
        with pytest.raises(FileError):
            await m.write("other", b"no")
    async with writing_back(store, dead) as m:
        assert await m.read("file") == noise(1, LARGE)
        await nothing_is_left(store, m)
        assert store.data("file") == noise(1, LARGE)


@pytest.mark.parametrize("is_rewritten", [False, True])
async def test_extended_attributes_of_acknowledged_files_outlive_mounts_that_only_read(
    tmp_path: Path, is_rewritten: bool
) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.mkdir("d")
        handle = await m.create("d/f")
        await m.fs.write(handle, 0, b"new")
        await m.set_xattr("d/f", "user.a", b"1")
        await m.close(handle)
        if is_rewritten:
            await rewrite(m, "d/f", b"new")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    for _ in range(2):
        async with lake(store, dead, read_only=True) as m:
            assert await m.lookup("d/f") is None
    async with writing_back(store, dead) as m:
        assert await m.xattrs("d/f") == {"user.a": b"1"}
        dead = die(dead, tmp_path / "dead again")
    outage.away = False
    async with writing_back(store, dead) as m:
        await nothing_is_left(store, m)
        assert await m.xattrs("d/f") == {"user.a": b"1"}
    async with lake(store, tmp_path / "other") as other:
        assert await other.xattrs("d/f") == {"user.a": b"1"}
        assert await other.read("d/f") == b"new"


async def test_pack_that_comes_after_another_nodes_newer_version_gives_the_name_another_inode(tmp_path: Path) -> None:
    """That was applied here while the pack was on its way; the kernel keeps the size that it knows of an inode."""
    store, clock = MemoryStore(), Clock()
    async with (
        writing_back(store, tmp_path / "cache", clock=clock, pack="always", delay_s=NEVER_S) as m,
        lake(store, tmp_path / "theirs", clock=clock, pack="always") as theirs,
    ):
        await m.write("file", noise(1, 100))
        ours = await m.found("file")

        async def replace() -> None:
            clock.advance(2)
            await theirs.write("file", b"theirs")
            await theirs.sync()
            await m.poll()

        def hook(request: Request, when: When) -> None:
            if when == "before" and request.what == "put":
                store.hook = lambda _request, _when: None
                trio.from_thread.run(replace)

        store.hook = hook
        handle = await m.open("file")
        await m.fs.make_durable()
        assert await m.read("file") == b"theirs"
        assert (await m.found("file")).inode != ours.inode
        assert await m.read_handle(handle) in (noise(1, 100), b"")
        await m.close(handle)


async def test_removal_tells_others_of_an_object_that_a_dead_daemon_stored(tmp_path: Path) -> None:
    """It died after its PUT and before the commit; the file is removed before the next daemon sends it again."""
    store = MemoryStore()
    store.hook = lost = Failures(
        lambda request: request.what in ("put", "head") and request.key == "f", Unavailable("no answer"), count=1000,
        when="after",
    )  # fmt: skip
    async with writing_back(store, tmp_path / "node") as m:
        await m.write("f", b"bytes")
        await until(lambda: "f" in store.objects)
    lost.left = 0
    async with writing_back(store, tmp_path / "node", delay_s=3600.0) as m:
        assert await m.names("") == ["f"]
        await m.unlink("f")
        await m.fs.make_durable()
    async with lake(store, tmp_path / "other") as other:
        assert await other.names("") == []
