"""Moments in which what a journal says of a file could be older than what is in the store, and what it replaced."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import trio
import trio.testing

from lakefs_fuse.blockcache.disk_latency import Promptness
from lakefs_fuse.commits import committer
from lakefs_fuse.errors import Unavailable
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.staging.part_layout import PAGE_BYTES
from lakefs_fuse.staging.segments import PREFIX, Group
from lakefs_fuse.staging.staging_area import StagedFile
from lakefs_fuse.store.protocol import Buffer
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.ops.unlink import Unlinker
from lakefs_fuse.vfs.writeback import group_commit as accepting
from lakefs_fuse.vfs.writeback import publisher
from lakefs_fuse.vfs.writeback import queue as writeback
from tests.memory_store import Failures, MemoryStore, Pause, Request, When, pause_of_commits
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import TTL_S, Clock, lake
from tests.vfs.writing_back import KIB, LARGE, NEVER_S, PART, Outage, die, rewrite, stored, told, until, writing_back


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "PAUSE_S_FIRST", 0.01)


def dies_when_sent(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """The next commit is in the store, and not noted, when the daemon whose cache is ``cache`` dies: what it leaves is
    ``dead``."""

    def reached(name: str) -> None:
        if name == "commit.sent":
            monkeypatch.setattr(committer, "reached", lambda _name: None)
            die(directory / "cache", directory / "dead")

    monkeypatch.setattr(committer, "reached", reached)


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_a_version_that_is_stored_while_the_next_is_being_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str
) -> None:
    """What the next one replaces is known when its record is there, whatever was encoded before."""
    store = MemoryStore()
    outage, written = Outage(store), Group.write

    async with writing_back(store, tmp_path / "cache", pack=pack) as m:

        async def until_stored() -> None:
            outage.away = False
            await until(lambda: not told(m)["files"])

        def write(group: Group) -> None:
            written(group)
            trio.from_thread.run(until_stored)

        def recorded(name: str) -> None:
            if name == "accept.recorded":
                die(tmp_path / "cache", tmp_path / "dead")
                outage.away = True

        await m.write("file", b"one")
        monkeypatch.setattr(Group, "write", write)
        monkeypatch.setattr(Promptness, "is_prompt", False)  # in a thread
        monkeypatch.setattr(accepting, "reached", recorded)
        await rewrite(m, "file", b"two")
        monkeypatch.setattr(Group, "write", written)
        monkeypatch.setattr(accepting, "reached", lambda _name: None)
        await m.unlink("file")
    outage.away = False
    async with writing_back(store, tmp_path / "dead", pack=pack) as m:
        await m.fs.make_durable()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"file": b"two"}


async def test_another_version_of_the_same_size_and_time_is_not_taken_for_the_one_in_the_pack(tmp_path: Path) -> None:
    store, chosen_ns = MemoryStore(), 1_600_000_000_123_456_789
    outage = Outage(store, away=False)
    async with writing_back(store, tmp_path / "cache", pack="always") as m:
        await m.write("file", noise(1, 100))
        await m.setattr("file", mtime_ns=chosen_ns)
        await m.fs.make_durable()
        await m.sync()
        outage.away = True
        await rewrite(m, "file", noise(2, 100))
        await m.setattr("file", mtime_ns=chosen_ns)
        dead = die(tmp_path / "cache", tmp_path / "dead")
    outage.away = False
    async with writing_back(store, dead, pack="always") as m:
        await m.fs.make_durable()
        assert await m.tree() == {"file": noise(2, 100)}
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"file": noise(2, 100)}


async def test_an_earlier_version_found_in_the_store_is_known_to_the_next_after_another_death(tmp_path: Path) -> None:
    """The first death leaves one version stored and not noted; the second comes when that was found out."""
    store = MemoryStore()
    outage = Outage(store, away=False)
    pause = Pause(lambda request: request.what == "put" and request.key == "file", "after")
    async with writing_back(store, tmp_path / "cache") as m:
        store.hook = pause
        await m.write("file", b"one")
        await reached(pause.reached)
        await rewrite(m, "file", b"two")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        store.hook, outage.away = outage, True
        pause.resume()
    async with writing_back(store, dead) as m:
        await until(lambda: told(m)["files"] == 1)
        again = die(dead, tmp_path / "again")
    outage.away = False
    async with writing_back(store, again) as m:
        await m.fs.make_durable()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"file": b"two"}


async def test_a_name_that_passed_a_held_rename_stays_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pack with a newer version of a file is sent while the rename that made its name is held; the daemon dies before
    it notes that. The rename does not bring the older version back."""
    store, clock = MemoryStore(), Clock()
    outage = Outage(store, away=False)
    async with writing_back(store, tmp_path / "cache", pack="always", clock=clock) as m:
        await m.write("old", b"older")
        await m.fs.make_durable()
        await m.sync()
        outage.away = True
        await rewrite(m, "old", b"newer")
        await m.rename("old", "new")
        dies_when_sent(monkeypatch, tmp_path)
        outage.away = False
        await m.fs.make_durable()
    async with writing_back(store, tmp_path / "dead", pack="always", clock=clock) as m:
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"new": b"newer"}
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"new": b"newer"}


@pytest.mark.parametrize("how", ["renamed over", "removed, made again", "stored along"])
async def test_what_replaced_a_journaled_change_stays_when_its_commit_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """The daemon dies when a commit of such changes is in the store; a file that has come over them since is not, or
    in the same commit."""
    store, clock = MemoryStore(), Clock()
    async with writing_back(store, tmp_path / "cache", pack="always", clock=clock, delay_s=NEVER_S) as m:
        await m.write("first", b"one")
        await m.fs.make_durable()
        await m.sync()
        await m.rename("first", "target")
        if how == "removed, made again":
            await m.unlink("target")
            await m.write("target", b"two")
        else:
            await m.write("second", b"two")
            await m.rename("second", "target")
        dies_when_sent(monkeypatch, tmp_path)
        await (m.fs.make_durable() if how == "stored along" else m.parts.committer.flush())
    async with writing_back(store, tmp_path / "dead", pack="always", clock=clock) as m:
        await m.fs.make_durable()
        await m.sync()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"target": b"two"}
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"target": b"two"}


async def test_a_name_that_is_to_go_when_its_pack_has_come_is_in_the_pack(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon dies when the pack is in the store, and the name not gone: nothing of it is lost."""
    store = MemoryStore()
    async with writing_back(store, tmp_path / "cache", pack="always") as m:
        async with trio.open_nursery() as nursery:
            async with m.parts.committer.quiet():
                await m.write("file", b"bytes")
                (file,) = m.parts.files.in_use()
                await until(file.publishing.locked)
                nursery.start_soon(m.unlink, "file")
                await trio.testing.wait_all_tasks_blocked(0.01)
                dies_when_sent(monkeypatch, tmp_path)
        assert await m.tree() == {}
    async with writing_back(store, tmp_path / "dead", pack="always") as m:
        await m.fs.make_durable()
        assert await m.tree() == {"file": b"bytes"}
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"file": b"bytes"}


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_a_version_keeps_its_attributes_when_the_next_begins_while_it_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str
) -> None:
    """The daemon dies before the next version is closed."""
    store, chosen_ns = MemoryStore(), 1_600_000_000_123_456_789
    pause = Pause(lambda request: request.what == "put" and request.key == "file")
    async with writing_back(store, tmp_path / "cache", pack=pack) as m:
        store.hook = pause
        async with m.parts.committer.quiet():
            await m.write("file", b"bytes")
            await m.setattr("file", mtime_ns=chosen_ns)
            (file,) = m.parts.files.in_use()
            await until(file.publishing.locked)
            handle = await m.open("file", os.O_WRONLY | os.O_TRUNC)
        pause.resume()
        await until(lambda: not told(m)["files"])
        await m.fs.sync_names()
        dead = die(tmp_path / "cache", tmp_path / "dead")
        await m.close(handle)
    async with writing_back(store, dead, pack=pack) as m:
        entry = await m.found("file")
        assert (entry.size, entry.mtime_ns) == (5, chosen_ns)


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_a_version_that_is_stored_while_the_next_but_one_begins_as_a_copy_is_what_that_replaces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str
) -> None:
    store, read = MemoryStore(), Draft.read
    pause = Pause(lambda request: request.what == "put" and (request.key == "file" or pack == "always"), "after")
    async with writing_back(store, tmp_path / "cache", pack=pack) as m:

        async def read_while_the_first_is_stored(draft: Draft, offset: int, size: int) -> Buffer:
            monkeypatch.setattr(Draft, "read", read)
            Outage(store)
            pause.resume()
            await until(lambda: told(m)["files"] == 1)
            return await read(draft, offset, size)

        store.hook = pause
        await m.write("file", b"one")
        await reached(pause.reached)
        await rewrite(m, "file", b"two")
        monkeypatch.setattr(Draft, "read", read_while_the_first_is_stored)
        handle = await m.open("file", os.O_RDWR)
        await m.fs.write(handle, 3, b" three")
        await m.close(handle)
        die(tmp_path / "cache", tmp_path / "dead")
    store.hook = lambda request, when: None
    async with writing_back(store, tmp_path / "dead", pack=pack) as m:
        await m.fs.make_durable()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"file": b"two three"}


async def test_what_the_store_had_after_all_does_not_come_back_under_a_name_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is renamed once that is known, and the daemon dies while it clears away what was staged."""
    store, clock = MemoryStore(), Clock()
    store.hook = pause = Pause(lambda request: request.what == "put" and request.key == "old", "after")

    async def discard(_draft: Draft) -> None:
        await trio.sleep_forever()

    async with writing_back(store, tmp_path / "cache", clock=clock) as m:
        await m.write("old", b"bytes")
        await reached(pause.reached)
        die(tmp_path / "cache", tmp_path / "dead")
        pause.resume()
    async with writing_back(store, tmp_path / "dead", clock=clock) as m:
        monkeypatch.setattr(Draft, "discard", discard)
        await m.rename("old", "new")
        die(tmp_path / "dead", tmp_path / "again")
    monkeypatch.undo()
    async with writing_back(store, tmp_path / "again", clock=clock) as m:
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"new": b"bytes"}


async def test_extended_attributes_that_a_commit_did_not_know_survive_two_deaths(tmp_path: Path) -> None:
    """The second daemon has applied the commit, and did not come to tell them."""
    store, clock = MemoryStore(), Clock()
    store.hook = pause = Pause(lambda request: request.what == "put" and request.key.endswith(".zip"), "after")
    async with writing_back(store, tmp_path / "cache", clock=clock, pack="always") as m:
        await m.mkdir("journaled")
        await m.write("file", b"bytes")
        await reached(pause.reached)
        await m.set_xattr("file", "user.a", b"1")
        die(tmp_path / "cache", tmp_path / "dead")
        pause.resume()
    async with writing_back(store, tmp_path / "dead", clock=clock, pack="always"):
        die(tmp_path / "dead", tmp_path / "again")
    for cache in ("again", "other"):
        async with writing_back(store, tmp_path / cache, clock=clock, pack="always") as m:
            await m.fs.make_durable()
            await m.sync()
            assert await m.xattrs("file") == {"user.a": b"1"}


@pytest.mark.parametrize("writing", [False, True])
async def test_attributes_set_before_it_is_known_what_the_store_has_are_told_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writing: bool
) -> None:
    """Whoever is writing another version by then may never come to accept it."""
    store, clock, chosen_ns = MemoryStore(), Clock(), 1_600_000_000_123_456_789
    async with writing_back(store, tmp_path / "cache", clock=clock, pack="always") as m:
        dies_when_sent(monkeypatch, tmp_path)
        await m.write("file", b"bytes")
        await m.fs.make_durable()
    pause = Pause(lambda request: request.what == "head" and request.key.endswith(".zip"))
    store.hook = pause
    async with writing_back(store, tmp_path / "dead", clock=clock, pack="always") as m:
        await reached(pause.reached)
        await m.set_xattr("file", "user.a", b"1")
        await m.setattr("file", mtime_ns=chosen_ns, mode=0o600)
        await m.set_xattr("file", "user.b", b"2")
        assert await m.xattrs("file") == {"user.a": b"1", "user.b": b"2"}
        handle = await m.open("file", os.O_WRONLY | os.O_TRUNC) if writing else None
        pause.resume()
        await until(lambda: not told(m)["files"])
        await m.fs.sync_names()
        die(tmp_path / "dead", tmp_path / "again")
        if handle is not None:
            await m.close(handle)
    clock.advance(2 * TTL_S)
    for cache in ("again", "other"):
        async with writing_back(store, tmp_path / cache, clock=clock) as m:
            entry = await m.found("file")
            assert (entry.size, entry.mode, entry.mtime_ns) == (5, 0o600, chosen_ns)
            assert await m.xattrs("file") == {"user.a": b"1", "user.b": b"2"}
            assert await m.tree() == {"file": b"bytes"}


async def test_a_version_whose_upload_began_before_its_stored_file_was_renamed(tmp_path: Path) -> None:
    """The daemon dies when the upload is complete, at the key that the file had, and not noted."""
    store, clock, large = MemoryStore(), Clock(), noise(1, 300 << 10)
    pause = Pause(lambda request: request.what == "complete_multipart", "after")
    async with writing_back(store, tmp_path / "cache", clock=clock, delay_s=NEVER_S) as m:
        await m.write("old", b"first")
        await m.fs.make_durable()
        await m.sync()
        not_yet = Failures(lambda request: request.what == "complete_multipart", Unavailable("not yet"), count=10**6)
        store.hook = not_yet
        await rewrite(m, "old", large)
        await until(lambda: store.count("complete_multipart"))
        await m.rename("old", "new")
        store.hook = pause
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.make_durable)
            await reached(pause.reached)
            dead = die(tmp_path / "cache", tmp_path / "dead")
            pause.resume()
    async with writing_back(store, dead, clock=clock) as m:
        await m.fs.make_durable()
        await m.sync()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"new": large}
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"new": large}


@pytest.mark.parametrize("stored", [True, False])
async def test_a_death_in_a_rename_over_a_file_that_waits_leaves_all_of_it_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """Both have versions that were accepted and are not in the store; what is replaced has the newer one."""
    store, clock = MemoryStore(), Clock()
    drop = Unlinker._drop_acknowledged  # noqa: SLF001  # no failpoint lies before it
    dead = tmp_path / "dead"

    async def dying(files: Unlinker, file: OpenFile, newest: int) -> None:
        die(tmp_path / "cache", dead)
        await drop(files, file, newest)

    async with writing_back(store, tmp_path / "cache", clock=clock, delay_s=NEVER_S) as m:
        if stored:
            await m.write("source", b"older source")
            await m.write("target", b"older target")
            await m.fs.make_durable()
            await m.sync()
            await rewrite(m, "source", b"source")
            await rewrite(m, "target", b"target")
        else:
            await m.write("source", b"source")
            await m.write("target", b"target")
        monkeypatch.setattr(Unlinker, "_drop_acknowledged", dying)
        await m.rename("source", "target")
        monkeypatch.setattr(Unlinker, "_drop_acknowledged", drop)
        Outage(store)
    store.hook = lambda request, when: None
    async with writing_back(store, dead, clock=clock, delay_s=NEVER_S) as m:
        assert await m.tree() == {"target": b"source"}
        await m.fs.make_durable()
        await m.sync()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"target": b"source"}
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"target": b"source"}


async def test_a_version_in_a_pack_that_was_not_noted_is_replaced_before_another_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second daemon had not asked for it yet."""
    store, clock = MemoryStore(), Clock()

    async with writing_back(store, tmp_path / "cache", pack="always", clock=clock) as m:
        await m.write("file", b"one")
        await m.fs.make_durable()
        dies_when_sent(monkeypatch, tmp_path)
        await rewrite(m, "file", b"second")
        await m.fs.make_durable()
    async with writing_back(store, tmp_path / "dead", pack="always", clock=clock, delay_s=NEVER_S) as m:
        await rewrite(m, "file", b"the third")
        again = die(tmp_path / "dead", tmp_path / "again")
    async with writing_back(store, again, pack="always", clock=clock) as m:
        await m.fs.make_durable()
        await m.sync()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"file": b"the third"}


@pytest.mark.parametrize("how", ["rename", "unlink"])
async def test_a_name_goes_while_the_store_is_asked_what_became_of_its_file(tmp_path: Path, how: str) -> None:
    """It was stored, and not noted, when the daemon died: nothing of it comes back under the name."""
    store, clock = MemoryStore(), Clock()
    stored = Pause(lambda request: request.what == "put" and request.key == "file", "after")
    async with writing_back(store, tmp_path / "cache", clock=clock) as m:
        store.hook = stored
        handle, _ = await m.fs.create(ROOT_INODE, b"file", 0o600, os.O_RDWR | os.O_CREAT, 0, 0)
        await m.fs.write(handle, 0, b"bytes")
        await m.close(handle)
        await reached(stored.reached)
        dead = die(tmp_path / "cache", tmp_path / "dead")
        stored.resume()
    store.hook = asked = Pause(lambda request: request.what == "head" and request.key == "file")
    expected: dict[str, object] = {"new": b"bytes"} if how == "rename" else {}
    async with writing_back(store, dead, clock=clock) as m:
        await reached(asked.reached)
        async with trio.open_nursery() as nursery:
            if how == "rename":
                nursery.start_soon(m.rename, "file", "new")
            else:
                nursery.start_soon(m.unlink, "file")
            await trio.testing.wait_all_tasks_blocked(0.02)
            asked.resume()
        await m.fs.make_durable()
        if how == "unlink":
            await until(lambda: "file" not in store.objects)
        await m.sync()
        assert await m.tree() == expected
    clock.advance(TTL_S + 1)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == expected


@pytest.mark.parametrize("dies", [False, True])
async def test_a_file_whose_rename_is_held_is_found_when_its_key_is_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """Its bytes are copied away for a file that was acknowledged before the rename; others have it at its old name."""
    store, clock = MemoryStore(), Clock()
    is_of_waits = lambda request: request.key == "waits" and request.what != "list"  # noqa: E731
    refused = Failures(is_of_waits, Unavailable("away"), count=10**6)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        async with writing_back(store, tmp_path / "cache", clock=clock, delay_s=NEVER_S) as m:
            await m.write("key", b"bytes")
            await m.fs.make_durable()
            await m.rename("key", "old")
            await m.sync()
            store.hook = refused
            await m.write("waits", b"first")
            await m.rename("old", "new")
            if dies:
                dies_when_sent(monkeypatch, tmp_path)
            await m.parts.renamed.free("key")
            store.take("key")
            assert await m.tree() == {"new": b"bytes", "waits": b"first"}
            await other.poll()
            assert await other.tree() == {"old": b"bytes"}
        refused.left = 0
        async with writing_back(store, tmp_path / ("dead" if dies else "cache"), clock=clock) as m:
            await m.fs.make_durable()
            await m.sync()
            clock.advance(2 * TTL_S)
            await other.poll()
            assert await m.tree() == await other.tree() == {"new": b"bytes", "waits": b"first"}


async def test_what_is_journaled_of_an_object_is_committed_before_it_is_replaced(tmp_path: Path) -> None:
    """No commit names bytes that are gone when it becomes visible."""
    store = MemoryStore()
    commits = pause_of_commits()
    async with writing_back(store, tmp_path / "cache", pack="never") as m:
        handle, _ = await m.fs.create(ROOT_INODE, b"file", 0o600, os.O_RDWR | os.O_CREAT, 0, 0)
        await m.fs.write(handle, 0, b"one")
        await m.close(handle)
        await until(lambda: not told(m)["files"])
        store.hook = commits
        before = store.head("file").etag
        await rewrite(m, "file", b"two")
        await reached(commits.reached)
        await trio.sleep(0.1)
        assert store.head("file").etag == before
        commits.resume()
        await m.fs.make_durable()
    assert store.head("file").etag != before


@pytest.mark.parametrize("how", ["packed", "superseded"])
async def test_bytes_that_are_durable_are_no_orphan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The daemon dies when the record of a file has gone, and its staging file has not."""
    store, clock, large, closed = MemoryStore(), Clock(), 300 << 10, StagedFile.close
    dead = tmp_path / "dead"

    def close(file: StagedFile, *, unlink: bool, leave: bool = False) -> None:
        if not dead.exists() and not leave:
            die(tmp_path / "cache", dead)
        closed(file, unlink=unlink, leave=leave)

    delay_s = NEVER_S if how == "superseded" else 0.0
    async with writing_back(store, tmp_path / "cache", clock=clock, pack="always", delay_s=delay_s) as m:
        await m.write("file", noise("one", large))
        monkeypatch.setattr(StagedFile, "close", close)
        if how == "superseded":
            await rewrite(m, "file", noise("two", large))
        else:
            await m.fs.make_durable()
        await until(dead.exists)
        monkeypatch.setattr(StagedFile, "close", closed)
        expected = await m.read("file")
    clock.advance(2 * TTL_S)
    async with writing_back(store, dead, clock=clock) as m:
        await m.fs.make_durable()
        assert m.fs.unfinished() == []
        assert await m.read("file") == expected
    assert os.listdir(dead / "staging") == []


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_object_of_a_superseded_version_that_came_late_does_not_outlive_a_crash(
    tmp_path: Path, pack: str
) -> None:
    """Its PUT was not answered, a newer version was acknowledged meanwhile, and the next daemon packs that."""
    store, clock = MemoryStore(), Clock()
    lost = Unavailable("the answer is lost")

    def hook(request: Request, when: When) -> None:
        if (request.what, when) in {("put", "after"), ("head", "before")}:
            raise lost

    async with writing_back(store, tmp_path / "cache", clock=clock, pack="never") as m:
        assert await m.names() == []
        store.hook = hook
        await m.write("file", b"one")
        await until(lambda: "file" in store.objects)
        await rewrite(m, "file", b"second")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    store.hook = lambda _request, _when: None
    assert store.data("file") == b"one"
    async with writing_back(store, dead, clock=clock, pack=pack) as m:
        await m.fs.make_durable()
        await m.sync()
        assert (await m.names(), await m.read("file")) == (["file"], b"second")
        assert "file" not in store.objects or store.data("file") == b"second"
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert (await other.names(), await other.read("file")) == (["file"], b"second")


@pytest.mark.parametrize("pack", ["never", "always"])
@pytest.mark.parametrize(("is_rewritten", "later_s"), [(False, 10), (True, 10), (True, 0)])
async def test_object_stored_after_a_removal_that_waits_is_found_after_a_crash(
    tmp_path: Path, pack: str, is_rewritten: bool, later_s: int
) -> None:
    """The journaled removal is newer than any commit until it has a time; what it removes is older than the object."""
    store, clock = MemoryStore(), Clock()
    async with writing_back(store, tmp_path / "cache", clock=clock, pack="always") as m:
        await m.write("file", b"before")
        await m.fs.make_durable()
        await m.sync()
    pause = Pause(lambda request: (request.what, request.key) == ("put", "file"), "after")

    def hook(request: Request, when: When) -> None:
        if request.what == "put" and request.key != "file":
            raise Unavailable("no commit gets through")
        pause(request, when)

    store.hook = hook
    clock.advance(10)
    async with writing_back(store, tmp_path / "cache", clock=clock) as m:
        await m.unlink("file")
        clock.advance(10)
        await m.write("file", b"one")
        await reached(pause.reached)
        if is_rewritten:
            await rewrite(m, "file", b"second")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        pause.resume()
    store.hook = lambda _request, _when: None
    expected = b"second" if is_rewritten else b"one"
    clock.advance(later_s)
    async with writing_back(store, dead, clock=clock, pack=pack) as m:
        assert await m.read("file") == expected
        await m.fs.make_durable()
        await m.sync()
        assert await m.read("file") == expected
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert (await other.names(), await other.read("file")) == (["file"], expected)


async def test_acknowledged_file_keeps_its_name_while_the_store_is_asked_before_it_is_removed(tmp_path: Path) -> None:
    """A listing that ended meanwhile took the name away, with its attributes, and the removal may yet fail."""
    store, clock = MemoryStore(), Clock()
    async with writing_back(store, tmp_path / "cache", clock=clock, delay_s=NEVER_S) as m:
        Outage(store)
        await m.mkdir("d")
        await m.write("d/file", b"acknowledged")
        await m.set_xattr("d/file", "user.a", b"1")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    pause = Pause(lambda request: (request.what, request.key) == ("head", "d/file"))
    store.hook = pause
    async with writing_back(store, dead, clock=clock, delay_s=NEVER_S) as m:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.unlink, "d/file")
            await reached(pause.reached)
            clock.advance(2 * TTL_S)
            try:
                assert await m.names("d") == ["file"]
                assert await m.xattrs("d/file") == {"user.a": b"1"}
            finally:
                pause.resume()
        assert await m.names("d") == []


@pytest.mark.parametrize(("size", "offset"), [(30 * KIB, 0), (LARGE, 0), (LARGE, LARGE - 100)])
async def test_death_while_a_change_is_completed_from_its_base_leaves_no_zeros(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, offset: int
) -> None:
    """What was fetched of the version before is not where the record says: the power was cut, or it names a segment."""
    monkeypatch.setattr(publisher, "COPY_BYTES_MAX", 0)  # `close()` does not fetch it
    store, before = MemoryStore(), noise("before", size)
    after = before[:offset] + b"new" + before[offset + 3 :]
    store.give("f", before)

    def is_first(request: Request) -> bool:
        return request.what == "put" or (request.what, request.number) == ("upload_part", 1)

    async with writing_back(store, tmp_path / "cache") as m:
        store.hook = pause = Pause(is_first)
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, offset, b"new")
        await m.close(handle)
        await reached(pause.reached)
        await until(lambda: store.count("upload_part") >= size // PART)
        await trio.sleep(0.05)
        dead = die(tmp_path / "cache", tmp_path / "dead")
        objects, uploads = copy.deepcopy(store.objects), copy.deepcopy(store.uploads)
        pause.resume()
        await stored(m)
        assert store.data("f") == after
    store.objects, store.uploads = objects, uploads
    for path in (dead / "staging").iterdir():
        if not path.name.startswith(PREFIX):
            begin = offset // PAGE_BYTES * PAGE_BYTES
            path.write_bytes(bytes(begin) + after[begin : begin + PAGE_BYTES])
    async with writing_back(store, dead) as m:
        assert await m.read("f") == after
        await stored(m)
        assert store.data("f") == after


@pytest.mark.parametrize("is_stored", [False, True])
async def test_acknowledged_version_survives_a_rename_of_the_file_that_is_being_changed(
    tmp_path: Path, is_stored: bool
) -> None:
    """The store is away, and the change is not closed when the daemon dies: nobody was told that it is safe."""
    store = MemoryStore()
    outage = Outage(store, away=False)
    async with writing_back(store, tmp_path / "cache") as m:
        if is_stored:
            await m.write("f", b"stored")
            await stored(m)
        outage.away = True
        await rewrite(m, "f", b"acknowledged") if is_stored else await m.write("f", b"acknowledged")
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, 0, b"change")
        await m.rename("f", "renamed")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        objects = copy.deepcopy(store.objects)
        await m.close(handle)
        assert await m.tree() == {"renamed": b"changeledged"}
        outage.away = False
        await stored(m)
        assert await m.tree() == {"renamed": b"changeledged"}
        await m.sync()
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"renamed": b"changeledged"}
    store.objects = objects
    async with writing_back(store, dead) as m:
        await stored(m)
        await m.sync()
        assert await m.tree() == {"renamed": b"acknowledged"}
    async with lake(store, tmp_path / "last") as other:
        assert await other.tree() == {"renamed": b"acknowledged"}
