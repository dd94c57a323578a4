"""A power cut under write-back: what was not synced of the metadata database's log is gone, and nothing else is."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits.archive import RECORD_NAME
from lakefs_fuse.commits.record import COMMITS, decode
from lakefs_fuse.environment.disk import LocalDisk
from lakefs_fuse.errors import CacheError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.staging import segments
from lakefs_fuse.staging.segments import PREFIX
from lakefs_fuse.vfs.writeback import group_commit, publisher
from lakefs_fuse.vfs.writeback.group_commit import LOGGED_BYTES_MAX
from tests.memory_store import MemoryStore, Request, When
from tests.upload.drafting import noise
from tests.vfs.lakes import lake
from tests.vfs.writing_back import (
    LARGE,
    NEVER_S,
    PART,
    REACH_S_MAX,
    Outage,
    die,
    rewrite,
    stored,
    told,
    until,
    writing_back,
)

pytestmark = pytest.mark.usefixtures("short_pauses")


class SyncedLogs:
    """How much of each log survives; `cut` makes the cache directory that a power cut leaves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        self._cache, self._sizes = cache, dict[str, int]()
        sync, commit = Database.sync, Database.commit

        def synced(database: Database) -> None:
            sizes = self._now()
            sync(database)
            self._sizes |= sizes

        def committed(database: Database, batch: Batch, *, sync: bool = False) -> None:
            commit(database, batch, sync=sync)
            if sync:
                self._sizes |= self._now()

        monkeypatch.setattr(Database, "sync", synced)
        monkeypatch.setattr(Database, "commit", committed)

    def _now(self) -> dict[str, int]:
        return {path.name: path.stat().st_size for path in (self._cache / "meta").glob("*.log")}

    def cut(self, to: Path) -> None:
        while True:
            try:
                shutil.copytree(self._cache, to)
                break
            except shutil.Error:  # the daemon removed a staging file meanwhile
                shutil.rmtree(to)
        for path in (to / "meta").glob("*.log"):
            with path.open("r+b") as log:
                log.truncate(self._sizes.get(path.name, 0))


class Syncs:
    """How often the log was synced, and staged bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of_log = self.of_bytes = 0
        sync, commit, sync_data = Database.sync, Database.commit, LocalDisk.sync_data

        def synced(database: Database) -> None:
            self.of_log += 1
            sync(database)

        def committed(database: Database, batch: Batch, *, sync: bool = False) -> None:
            self.of_log += sync
            commit(database, batch, sync=sync)

        def synced_data(disk: LocalDisk, fd: int) -> None:
            self.of_bytes += 1
            sync_data(disk, fd)

        monkeypatch.setattr(Database, "sync", synced)
        monkeypatch.setattr(Database, "commit", committed)
        monkeypatch.setattr(LocalDisk, "sync_data", synced_data)

    def since(self) -> tuple[int, int]:
        """Those of the log and of bytes since the last call."""
        counted, self.of_log, self.of_bytes = (self.of_log, self.of_bytes), 0, 0
        return counted


def segments_of(cache: Path) -> list[Path]:
    return sorted((cache / "staging").glob(f"{PREFIX}*"))


def lose_segments(cache: Path, how: str) -> None:
    """What a power cut may leave of segments that were never synced."""
    for path in segments_of(cache):
        if how == "missing":
            path.unlink()
        elif how == "empty":
            path.write_bytes(b"")
        elif how == "zeros":
            path.write_bytes(bytes(path.stat().st_size))


def cut_after_commit(store: MemoryStore, logs: SyncedLogs, to: Path) -> Outage:
    """The power is cut when the first commit is in the store; nothing comes there from this daemon afterwards."""
    outage = Outage(store, away=False)

    def then(request: Request, when: When) -> None:
        if when == "after" and request.what == "put" and request.key.startswith(".lakefs/commits/"):
            outage.away = True
            logs.cut(to)

    outage.then = then
    return outage


async def test_power_cut_after_a_pack_is_sent_keeps_one_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, after = MemoryStore(), tmp_path / "after"
    logs = SyncedLogs(monkeypatch, tmp_path / "cache")
    outage = cut_after_commit(store, logs, after)
    async with writing_back(store, tmp_path / "cache", pack="always", delay_s=NEVER_S) as m:
        for number in range(3):
            await m.write(f"{number}", noise(number, 500))
        await m.fs.make_durable()
    outage.away, outage.then = False, lambda _request, _when: None
    async with writing_back(store, after, pack="always") as m:
        await stored(m)
        assert await m.names() == ["0", "1", "2"], "no version of them is taken for somebody else's"
        assert told(m)["conflicts"] == 0
        assert [await m.read(f"{number}") for number in range(3)] == [noise(number, 500) for number in range(3)]


async def test_rename_of_an_acknowledged_file_is_synced_before_the_store_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, after = MemoryStore(), tmp_path / "after"
    logs, syncs = SyncedLogs(monkeypatch, tmp_path / "cache"), Syncs(monkeypatch)

    def cut(request: Request, when: When) -> None:
        if (when, request.what, request.key) == ("after", "put", "new"):
            store.hook = lambda _request, _when: None
            logs.cut(after)

    async with writing_back(store, tmp_path / "cache", delay_s=NEVER_S, pack="auto") as m:
        await m.write("old", b"bytes")
        before = syncs.of_log
        store.hook = cut
        await m.rename("old", "new")
        assert syncs.of_log == before, "a change of names alone is not synced"
        await m.fs.make_durable()
    async with writing_back(store, after, pack="never") as m:
        await stored(m)
        assert await m.names() == ["new"]
        assert await m.read("new") == b"bytes"


async def test_power_cut_after_a_commit_of_names_sends_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, after = MemoryStore(), tmp_path / "after"
    logs = SyncedLogs(monkeypatch, tmp_path / "cache")
    outage = cut_after_commit(store, logs, after)
    async with writing_back(store, tmp_path / "cache", delay_s=NEVER_S) as m:
        await m.mkdir("made")
        await m.write("file", b"x")  # which syncs what is journaled before
        await m.fs.sync_names()
    assert said(store) == ["made"]
    outage.away, outage.then = False, lambda _request, _when: None
    async with writing_back(store, after) as m:
        await stored(m)
        await m.fs.sync_names()
        assert await m.names() == ["file", "made"]
    assert said(store) in (["made"], ["made", "file"])  # the time of the write is another than that of the object


def said(store: MemoryStore) -> list[str]:
    """Paths of which commits speak, in their order."""
    found = []
    for key in sorted(key for key in store.objects if key.startswith(COMMITS)):
        with zipfile.ZipFile(io.BytesIO(store.objects[key][0])) as archive:
            found += [each.path for each in decode(archive.read(RECORD_NAME)).operations]
    return found


@pytest.mark.parametrize("pack", ["never", "always"])
async def test_power_cut_after_a_file_is_stored_leaves_no_record_without_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pack: str
) -> None:
    store, after = MemoryStore(), tmp_path / "after"
    logs = SyncedLogs(monkeypatch, tmp_path / "cache")
    async with writing_back(store, tmp_path / "cache", pack=pack) as m:
        await m.write("large", noise(1, LARGE))
        await m.write("small", noise(2, 100))
        await stored(m)
        await rewrite(m, "large", noise(3, LARGE))
        await m.unlink("small")
        await stored(m)
        logs.cut(after)
    async with writing_back(store, after, pack=pack) as m:
        assert not m.fs.unfinished()
        await stored(m)
        assert await m.read("large") == noise(3, LARGE)


async def test_closing_a_small_file_under_writeback_syncs_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bytes are synced with the log; those of a large group by themselves, before."""
    async with writing_back(MemoryStore(), tmp_path, pack="auto", delay_s=NEVER_S) as m:
        assert await m.names() == []
        await m.write("first", b"x")
        syncs = Syncs(monkeypatch)
        await m.write("small", noise(1, LOGGED_BYTES_MAX))
        assert syncs.since() == (1, 0)
        await m.write("large", noise(2, LOGGED_BYTES_MAX + 1))
        assert syncs.since() == (1, 1)


async def test_changes_of_acknowledged_small_files_are_synced_with_the_next_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removed, replaced by a rename, and with other attributes: as rsync, git and shutil.copytree leave files."""
    store, logs = MemoryStore(), SyncedLogs(monkeypatch, tmp_path / "cache")
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache", pack="auto", delay_s=NEVER_S) as m:
        for name in ("kept", "removed", "replaced", "new", "open"):
            await m.write(name, noise(len(name), LOGGED_BYTES_MAX + 1))
        handle = await m.open("open", os.O_RDWR)
        syncs, mtime_ns = Syncs(monkeypatch), (await m.getattr("kept")).mtime_ns
        await m.setattr("kept", mode=0o600, mtime_ns=10**18)
        await m.unlink("removed")
        await m.rename("new", "replaced")
        await m.unlink("open")
        assert syncs.since() == (0, 0)
        logs.cut(tmp_path / "before")
        await m.write("last", b"x")
        logs.cut(tmp_path / "after")
        await m.close(handle)
    outage.away = False
    async with writing_back(store, tmp_path / "before", pack="auto", delay_s=NEVER_S) as m:
        assert await m.names() == ["kept", "new", "open", "removed", "replaced"]
        assert (await m.getattr("kept")).mtime_ns == mtime_ns
        assert await m.read("removed") == noise(7, LOGGED_BYTES_MAX + 1)
    async with writing_back(store, tmp_path / "after", pack="auto", delay_s=NEVER_S) as m:
        kept, replaced = noise(4, LOGGED_BYTES_MAX + 1), noise(3, LOGGED_BYTES_MAX + 1)
        assert await m.tree() == {"kept": kept, "last": b"x", "replaced": replaced}
        changed = await m.getattr("kept")
        assert (changed.mtime_ns, changed.mode) == (10**18, 0o600)
        assert {item.path for item in m.fs.unfinished()} == {"kept", "last", "replaced"}


async def test_segment_of_a_removed_file_is_deleted_once_its_removal_is_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, logs = MemoryStore(), SyncedLogs(monkeypatch, tmp_path / "cache")
    outage = Outage(store)
    monkeypatch.setattr(segments, "SEGMENT_BYTES", LOGGED_BYTES_MAX)
    async with writing_back(store, tmp_path / "cache", pack="auto", delay_s=NEVER_S) as m:
        await m.write("removed", noise(1, LOGGED_BYTES_MAX + 1))
        await m.unlink("removed")
        await until(lambda: not told(m)["files"])
        full = segments_of(tmp_path / "cache")

        def cut(name: str) -> None:
            if name == "accept.synced":
                logs.cut(tmp_path / "after")

        monkeypatch.setattr(group_commit, "reached", cut)
        await m.write("next", b"x")
    assert len(full) == 1 and not (tmp_path / "after" / "staging" / full[0].name).exists()
    outage.away = False
    async with writing_back(store, tmp_path / "after", pack="auto", delay_s=NEVER_S) as m:
        assert await m.names() == []
        assert "removed" not in caplog.text


@pytest.mark.parametrize("how", ["missing", "empty", "zeros", "there"])
async def test_power_cut_before_segments_are_synced_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Records and bytes are in the log; the next mount has both, and so has the one after it."""
    store, logs = MemoryStore(), SyncedLogs(monkeypatch, tmp_path / "cache")
    outage = Outage(store, away=False)
    async with writing_back(store, tmp_path / "cache", pack="auto", delay_s=NEVER_S) as m:
        for number in range(3):
            await m.write(f"{number}", noise(number, 500))
        await rewrite(m, "1", noise(4, 9000))
        logs.cut(tmp_path / "after")
    lose_segments(tmp_path / "after", how)
    wanted = {"0": noise(0, 500), "1": noise(4, 9000), "2": noise(2, 500)}
    syncs = Syncs(monkeypatch)
    async with writing_back(store, tmp_path / "after", pack="auto", delay_s=NEVER_S) as m:
        assert syncs.of_bytes == len(segments_of(tmp_path / "after")) == 1
        assert await m.tree() == wanted
        assert list(Journal(m.fs.database).bytes_beside()) == [], "they are synced in their segment"
        die(tmp_path / "after", tmp_path / "again")
    outage.away = False
    async with writing_back(store, tmp_path / "again", pack="auto") as m:
        assert await m.tree() == wanted
        await stored(m)
        await until(lambda: not segments_of(tmp_path / "again"))
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == wanted


@pytest.mark.parametrize("how", ["missing", "zeros"])
async def test_file_whose_segment_is_lost_is_not_read_as_zeros_beside_one_whose_bytes_are_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """The mount writes the small one into the segment again, and that has a hole at the place of the large one."""
    store = MemoryStore()
    outage = Outage(store)
    async with writing_back(store, tmp_path / "cache", delay_s=NEVER_S) as m:
        await m.write("large", noise(1, LOGGED_BYTES_MAX + 1))
        await m.write("small", noise(2, 100))
        dead = die(tmp_path / "cache", tmp_path / "dead")
    lose_segments(dead, how)
    outage.away = False
    async with writing_back(store, dead) as m:
        assert "large was acknowledged, and cannot be brought back" in caplog.text
        await m.fs.make_durable("small")
        assert [item.path for item in m.fs.unfinished()] == ["large"]
        assert await m.tree() == {"small": noise(2, 100)}
    assert "large" not in store.objects


async def test_bytes_of_a_close_that_failed_do_not_replace_those_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log had the record and the bytes when its sync failed; the same draft was written to, and closed again."""
    store, sync = MemoryStore(), Database.sync
    outage = Outage(store, away=False)

    def fails(_: Database) -> None:
        raise CacheError("the disk is full")

    async with writing_back(store, tmp_path / "cache", pack="auto", delay_s=NEVER_S) as m:
        handle = await m.create("file")
        await m.fs.write(handle, 0, b"before")
        monkeypatch.setattr(Database, "sync", fails)
        with pytest.raises(CacheError):
            await m.fs.flush(handle)
        monkeypatch.setattr(Database, "sync", sync)
        await m.fs.write(handle, 0, noise(1, LOGGED_BYTES_MAX + 1))
        await m.close(handle)
        die(tmp_path / "cache", tmp_path / "dead")
    outage.away = False
    async with writing_back(store, tmp_path / "dead", pack="auto") as m:
        assert await m.read("file") == noise(1, LOGGED_BYTES_MAX + 1)


async def test_object_that_a_journaled_change_tells_of_is_told_of_once_after_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The change was synced, and the end of the record was not: another node may have removed what the first tells."""
    store, after = MemoryStore(), tmp_path / "after"
    outage = Outage(store, away=False)

    def cut(name: str) -> None:
        if name == "publish.sent" and not after.exists():
            outage.away = True
            die(tmp_path / "cache", after)

    async with writing_back(store, tmp_path / "cache", pack="never") as m:
        await m.write("file", b"before")
        await stored(m)
        await m.unlink("file")
        await m.fs.make_durable()
        before = said(store)
        monkeypatch.setattr(publisher, "reached", cut)
        await m.write("file", noise(1, 100))
        await until(after.exists)
    outage.away = False
    async with writing_back(store, after, pack="never") as m:
        assert told(m)["replayed"] == 1
        await stored(m)
        await m.fs.make_durable()
        assert await m.tree() == {"file": noise(1, 100)}
    assert said(store)[len(before) :] == ["file"]


@pytest.mark.parametrize("size", [100, LARGE])
async def test_power_cut_after_close_leaves_an_orphan_that_does_not_replace_the_stored_file(
    tmp_path: Path, size: int
) -> None:
    """Under `--durability close` neither the end of the journal record is synced, nor any staged byte."""
    store, cache, after = MemoryStore(), tmp_path / "cache", tmp_path / "after"
    async with lake(store, cache) as m:
        handle = await m.create("f")
        await m.fs.write(handle, 0, noise("f", size))
        with trio.fail_after(REACH_S_MAX):
            while sum(each.parts_done for each in m.fs.unfinished()) < size // PART:
                await trio.sleep(0.002)
        die(cache, after)
        await m.close(handle)
    for path in (after / "staging").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    async with lake(store, after, orphans="finish") as m:
        assert [each for each in m.fs.unfinished() if each.id != "names"] == []
        assert await m.read("f") == noise("f", size)
    assert store.data("f") == noise("f", size)
