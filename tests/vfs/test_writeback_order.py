"""What becomes visible after what, where newer versions come before older ones were published."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs_fuse.commits import committer
from lakefs_fuse.commits.archive import locate, parse_commit_key, read_record
from lakefs_fuse.commits.record import Put
from lakefs_fuse.config import Rule
from lakefs_fuse.errors import StoreError
from lakefs_fuse.vfs.writeback import publisher as newest
from lakefs_fuse.vfs.writeback import queue as writeback
from tests.memory_store import MemoryStore, Pause, Request, When, pause_of_commits
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import Lake, lake
from tests.vfs.writing_back import (
    LARGE,
    NEVER_S,
    REACH_S_MAX,
    Outage,
    die,
    made_visible,
    rewrite,
    stored,
    told,
    until,
    writing_back,
)

pytestmark = pytest.mark.usefixtures("noted_one_by_one")


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_a_version_that_others_wait_for_is_not_skipped(tmp_path: Path, pack: str) -> None:
    """`b` was written when `a` had its first version, and `a` again after that: nobody sees `b` without an `a`."""
    store, stored = MemoryStore(), list[str]()

    def see(request: Request, when: When) -> None:
        if request.what == "put" and when == "after":
            stored.append(request.key)

    outage = Outage(store)
    outage.then = see
    async with writing_back(store, tmp_path / "cache", pack=pack, delay_s=0.02) as m:
        await m.write("a", b"first")
        await m.write("b", b"after it")
        await until(lambda: told(m)["failures"])
        await rewrite(m, "a", b"second")
        outage.away = False
        await until(lambda: not told(m)["files"])
    if pack == "never":
        assert stored == ["a", "b", "a"]
    else:
        assert files_in_the_pack(store) == 2
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"a": b"second", "b": b"after it"}


def files_in_the_pack(store: MemoryStore) -> int:
    """There is one, and no other object."""
    (key,) = store.objects
    return store.objects[key][0].count(b"PK\x03\x04") - 1


async def test_what_comes_later_waits_for_the_version_that_took_an_older_ones_place(tmp_path: Path) -> None:
    """`b` was begun when `a` had its first version, and closed when the second had superseded it."""
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("a", b"first")
        await until(lambda: told(m)["failures"])
        handle = await m.create("b")
        await rewrite(m, "a", b"second")
        assert told(m)["superseded"] == 1
        await m.fs.write(handle, 0, b"after the first")
        await m.close(handle)
        dead = die(tmp_path / "cache", tmp_path / "dead")
        await b_comes_after_a(store, m)
    again = MemoryStore()
    async with writing_back(again, dead) as m:
        await b_comes_after_a(again, m)


async def b_comes_after_a(store: MemoryStore, m: Lake) -> None:
    pause = Pause(lambda request: request.what == "put" and request.key == "a")
    store.hook = pause
    with trio.move_on_after(0.3):
        await until(lambda: "b" in store.objects)
    assert "b" not in store.objects
    pause.resume()
    await until(lambda: not told(m)["files"])
    assert made_visible(store)[-2:] == ["a", "b"]


@pytest.mark.parametrize("point", ["commit.sent", "discard.begun"])
async def test_an_older_version_that_a_pack_passed_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    """The daemon dies when the pack is in the store, and nothing of that is noted, or all of it."""
    store = MemoryStore()
    outage = Outage(store)

    def sent(name: str) -> None:
        if name == point:
            die(tmp_path / "cache", tmp_path / "dead")

    for module in (committer, newest, writeback):
        monkeypatch.setattr(module, "reached", sent)
    async with writing_back(store, tmp_path / "cache", pack="always", delay_s=0.02) as m:
        await m.write("a", b"first")
        await m.write("b", b"after it")
        await until(lambda: told(m)["failures"])
        await rewrite(m, "a", b"second")
        outage.away = False
        await until(lambda: not told(m)["files"])
        await until((tmp_path / "dead").exists)
    for module in (committer, newest, writeback):
        monkeypatch.setattr(module, "reached", lambda _name: None)
    async with writing_back(store, tmp_path / "dead", pack="always") as m:
        assert await m.read("a") == b"second"
        await m.fs.make_durable()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"a": b"second", "b": b"after it"}
        await until(lambda: m.parts.staging.bytes_used == 0)


@pytest.mark.parametrize("away", [False, True])
async def test_a_renamed_file_is_never_seen_with_older_bytes(tmp_path: Path, away: bool) -> None:
    """It had an earlier version, which something waits for, under the name before."""
    store, seen = MemoryStore(), list[tuple[str, bytes]]()

    def see(request: Request, when: When) -> None:
        if request.what == "put" and when == "after" and not request.key.startswith(".lakefs/"):
            seen.append((request.key, store.objects[request.key][0]))

    outage = Outage(store)
    outage.then = see
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("tmp", b"first")
        await m.write("other", b"after it")
        await until(lambda: told(m)["failures"])
        await rewrite(m, "tmp", b"second")
        outage.away = away
        await m.rename("tmp", "final")
        outage.away = False
        await m.fs.make_durable()
        assert await m.tree() == {"final": b"second", "other": b"after it"}
    assert ("final", b"first") not in seen
    if not away:
        assert seen[:2] == [("tmp", b"first"), ("other", b"after it")]
    async with lake(store, tmp_path / "somebody") as other:
        assert await other.tree() == {"final": b"second", "other": b"after it"}


def said(store: MemoryStore) -> list[tuple[str, int]]:
    """Paths that commits gave bytes to, and how many, in the order of the commits."""
    found: list[tuple[str, int]] = []
    for key in sorted(key for key in store.objects if key.startswith(".lakefs/commits/")):
        body, named = store.objects[key][0], parse_commit_key(key)
        assert named is not None
        where = locate(body, len(body))
        record = read_record(body[where.offset : where.offset + where.length], where, *named)
        found += [(each.path, each.size) for each in record.operations if isinstance(each, Put)]
    return found


@pytest.mark.parametrize("pack", ["never", "always"])
@pytest.mark.parametrize("how", ["removed", "replaced"])
async def test_a_renamed_file_that_goes_again_is_never_seen_with_older_bytes(
    tmp_path: Path, how: str, pack: str
) -> None:
    """It is in the store, was written again, renamed, and removed or replaced before its newest bytes were stored."""
    store = MemoryStore()
    outage = Outage(store, away=False)
    async with writing_back(store, tmp_path / "cache", pack=pack) as m:
        await m.write("old", b"first")
        await m.fs.make_durable()
        await m.sync()
        outage.away = True
        await rewrite(m, "old", b"second one")
        await m.rename("old", "new")
        expected: dict[str, object] = {}
        if how == "removed":
            await m.unlink("new")
        else:
            await m.write("tmp", b"third of all")
            await m.rename("tmp", "new")
            expected = {"new": b"third of all"}
        outage.away = False
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == expected
    assert ("new", len(b"first")) not in said(store)
    async with lake(store, tmp_path / "somebody") as other:
        assert await other.tree() == expected


async def test_an_older_version_that_is_on_its_way_is_not_passed_by_the_newer(tmp_path: Path) -> None:
    """After a death a rename waits for the newer one only: of the older it is known that the store has nothing."""
    store = MemoryStore()
    cache, dead = tmp_path / "cache", tmp_path / "dead"
    outage = Outage(store)
    older, newer = noise(1, LARGE), b"newer"
    async with writing_back(store, cache, delay_s=NEVER_S) as m:
        await m.write("a", older)
        await m.write("b", b"after it")  # so that the older one becomes visible
        await rewrite(m, "a", newer)
        die(cache, dead)
        outage.away = False
    store.objects.clear()
    pause = Pause(lambda request: request.what == "upload_part" and request.key == "a")
    store.hook = pause
    async with writing_back(store, dead) as m:
        await reached(pause.reached)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.rename, "a", "c")
            await trio.testing.wait_all_tasks_blocked(0.2)
            assert "a" not in store.objects
            pause.resume()
        await m.fs.make_durable()
        await m.sync()
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"b": b"after it", "c": newer}


async def test_an_older_version_that_failed_does_not_come_over_the_newer(tmp_path: Path) -> None:
    store = MemoryStore()
    outage = Outage(store)
    newer = b"newer"

    def refuse(request: Request, when: When) -> None:
        if request.what == "upload_part" and when == "before":
            raise StoreError("not this one")

    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("a", noise(1, LARGE))
        await m.write("b", b"after it")  # so that the older one becomes visible
        await rewrite(m, "a", newer)
        outage.away, outage.then = False, refuse
        await until(lambda: "a" in store.objects)
        outage.then = lambda _request, _when: None
        await m.fs.make_durable()
        assert store.data("a") == newer
        await until(lambda: not told(m)["files"] and not m.fs.unfinished())
    async with writing_back(store, tmp_path / "cache") as m:
        await m.fs.make_durable()
        assert await m.tree() == {"a": newer, "b": b"after it"}


async def test_rename_of_a_changed_file_twice_shows_no_older_bytes_between(tmp_path: Path) -> None:
    """`a` is changed and renamed to `b` and then, after `x` was written, to `c`. While `x` is on its way, nobody sees
    `b` with what `a` was before."""
    store = MemoryStore()
    outage = Outage(store, away=False)
    pause = Pause(lambda request: request.what == "put" and request.key == "x")
    async with writing_back(store, tmp_path / "cache") as m:
        await m.write("a", b"before")
        await until(lambda: not told(m)["files"])
        outage.away, outage.then = True, pause
        await rewrite(m, "a", b"after")
        await m.rename("a", "b")
        await m.write("x", b"")
        await m.rename("b", "c")
        outage.away = False
        await reached(pause.reached)
        await m.parts.committer.flush()
        async with lake(store, tmp_path / "other") as other:
            assert "b" not in await other.names()
        pause.resume()
        await m.fs.make_durable()
        await m.fs.sync_names()
    async with lake(store, tmp_path / "another") as other:
        assert await other.tree() == {"c": b"after", "x": b""}


@pytest.mark.parametrize("how", ["fsync", "close"])
async def test_removal_that_waits_for_a_large_file_holds_up_no_other_directory(tmp_path: Path, how: str) -> None:
    """A program removes the checkpoint before last while the newest is being sent, and goes on with its log."""
    store = MemoryStore()
    store.give("ckpt/1", b"an old one")
    pause = store.hook = Pause(lambda request: request.what == "put" and request.key == "ckpt/2")
    rules = (Rule(path="logs/**", durability="close"),) if how == "close" else ()
    async with writing_back(store, tmp_path, rules=rules) as m:
        await m.mkdir("logs")
        await m.write("ckpt/2", b"a large one")
        await m.unlink("ckpt/1")
        try:
            assert m.parts.committer.held_until, "the removal waits for ckpt/2"
            with trio.fail_after(REACH_S_MAX):
                handle = await m.create("logs/log")
                await m.fs.write(handle, 0, b"a line")
                if how == "fsync":
                    await m.fs.fsync(handle)
                await m.close(handle)
            assert store.data("logs/log") == b"a line"
            assert m.parts.committer.held_until
        finally:
            pause.resume()
        await m.sync()
        await stored(m)
        assert await m.names("ckpt") == ["2"]
    async with lake(store, tmp_path / "another") as m:
        assert await m.names("ckpt") == ["2"]
        assert await m.read("logs/log") == b"a line"


async def test_fsync_while_the_file_is_closed_and_changed_again_keeps_its_versions_in_order(tmp_path: Path) -> None:
    """The fsync waits for `before`. Meanwhile a program closes the file, and another one begins to append to it."""
    store = MemoryStore()
    async with writing_back(store, tmp_path / "cache", pack="always", delay_s=NEVER_S) as m:
        await m.write("before", b"x")
        first = await m.create("log")
        await m.fs.write(first, 0, b"1")
        store.hook = pause = pause_of_commits()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.fsync, first)
            await reached(pause.reached)
            await m.close(first)
            second = await m.open("log", os.O_RDWR)
            await m.fs.write(second, 1, b"2")
            pause.resume()
        async with lake(store, tmp_path / "other") as other:
            assert await other.read("log") in (b"1", b"12"), "what was written before the fsync"
        await m.close(second)
        third = await m.open("log", os.O_RDWR)
        await m.fs.write(third, 2, b"3")
        await m.close(third)
        assert await m.read("log") == b"123"
        await m.fs.make_durable()
        assert await m.read("log") == b"123"
    async with lake(store, tmp_path / "last") as other:
        assert await other.tree() == {"before": b"x", "log": b"123"}
