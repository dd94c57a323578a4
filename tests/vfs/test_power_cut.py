"""A power cut under write-back: what was not synced of the metadata database's log is gone, and nothing else is."""

from __future__ import annotations

import io
import shutil
import zipfile
from pathlib import Path

import pytest

from lakefs_fuse.commits.archive import RECORD_NAME
from lakefs_fuse.commits.record import COMMITS, decode
from lakefs_fuse.meta.database import Batch, Database
from tests.memory_store import MemoryStore, Request, When
from tests.upload.drafting import noise
from tests.vfs.writing_back import LARGE, NEVER_S, Outage, rewrite, stored, told, writing_back

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
