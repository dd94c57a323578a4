"""Rows of packs that `gc` deleted: a mount does not keep them for ever."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits import pack_rows
from lakefs_fuse.commits.gc_record import GcRecord, write_gc_record
from lakefs_fuse.commits.record import COMMITS
from tests.fakes import store_client
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Clock, Lake, lake


def packs(m: Lake) -> list[str]:
    return [row.key for row in m.parts.namespace.tree.objects.rows() if row.is_pack]


async def write_pack(m: Lake, clock: Clock, path: str) -> str:
    """The key of the pack that a file is in; the next one is later."""
    await m.write(path, b"bytes")
    await m.sync()
    clock.advance(1)
    return packs(m)[-1]


async def test_rows_of_packs_that_gc_has_deleted_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_rows, "ROWS_MAX", 2)
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="always") as m:
        paths = [f"file-{number}" for number in range(6)]
        keys = [await write_pack(m, clock, path) for path in paths]
        for path in paths[1:]:
            await m.unlink(path)
        await m.sync()
        for key in keys[2:]:
            del store.objects[key]
        record = GcRecord(horizon=int(keys[5].removeprefix(COMMITS)[:16], 16))
        await write_gc_record(store_client(store, store.capabilities), record, clock.now_ns)
        before = m.commits()["packs_known"]
        await m.parts.pack_rows.drop_deleted()
        # In the first is a file, the second is there yet, and the last is not older than the horizon.
        assert packs(m) == [keys[0], keys[1], keys[5]]
        assert before - m.commits()["packs_known"] == 3
        assert await m.read(paths[0]) == b"bytes"


async def test_mount_without_unused_packs_asks_the_store_nothing_about_them(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="always") as m:
        await write_pack(m, clock, "file")
        store.requests.clear()
        await m.parts.pack_rows.drop_deleted()
        assert not store.requests


async def test_mount_drops_them_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pack_rows, "INTERVAL_S", 0.005)
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="always") as m:
        deleted = await write_pack(m, clock, "file")
        await m.unlink("file")
        last = await write_pack(m, clock, "later")
        del store.objects[deleted]
        record = GcRecord(horizon=int(last.removeprefix(COMMITS)[:16], 16))
        await write_gc_record(store_client(store, store.capabilities), record, clock.now_ns)
        with trio.fail_after(20):
            while packs(m) != [last]:
                await trio.sleep(0.005)
