"""States of a lake: how one is made, shown and removed, also where the disk of the cache directory fails."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import pytest
import trio

from lakefs_fuse.commits.archive import parse_commit_key
from lakefs_fuse.commits.gc_record import GcRecord, write_gc_record
from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.environment.disk import LocalDisk
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import CacheFull
from lakefs_fuse.meta import database, schema
from lakefs_fuse.meta.database import RocksEngines
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.vfs import changed_names
from lakefs_fuse.vfs.changed_names import ChangedNames
from lakefs_fuse.vfs.immutable import states
from lakefs_fuse.vfs.immutable.filesystem import ImmutableFilesystem, open_immutable
from lakefs_fuse.vfs.namespace import subtree_listing
from tests.fakes import node_of, store_client
from tests.memory_store import MemoryStore, Pause
from tests.meta.full_disk import FullDisk
from tests.vfs.lakes import Clock, lake
from tests.vfs.writing_back import until


def mounted(
    store: MemoryStore,
    cache: Path,
    *,
    node: Node | None = None,
    allow_other: bool = False,
    mounting: str = "the same mount command",
    lake_id: str = "",
) -> AbstractAsyncContextManager[ImmutableFilesystem]:
    """A new daemon, which may have a state of an earlier one."""
    metrics = Metrics()
    config = MountConfig(
        store=StoreConfig(source=Source("file", "/nowhere", "")),
        mountpoint="/nowhere",
        cache_dir=str(cache),
        free_bytes_min=0,
        immutable=True,
        allow_other=allow_other,
        mounting=mounting,
    )
    client = store_client(store, store.capabilities, metrics.store)
    return open_immutable(config, client, metrics, node=node or Node.of_this_machine(), lake_id=lake_id)


async def mounted_names(store: MemoryStore, cache: Path) -> list[bytes]:
    """What a new daemon shows."""
    async with mounted(store, cache) as fs:
        return [entry.name for entry in fs.readdir(fs.top, 0)]


async def test_the_log_says_how_far_the_listing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(subtree_listing, "KEYS_MAX", 20)
    store, metrics = MemoryStore(), Metrics()
    for index in range(30):
        store.put(f"first/{index}", b"x")
        store.put(f"second/{index}", b"x")
    store.hook = second = Pause(lambda request: request.what == "list" and request.key == "second/")
    client = store_client(store, store.capabilities, metrics.store)
    config = MountConfig(
        store=StoreConfig(source=Source("file", "/nowhere", "")),
        mountpoint="/nowhere",
        cache_dir=str(tmp_path),
        free_bytes_min=0,
        immutable=True,
    )
    monkeypatch.setattr(states, "PROGRESS_S", 0.01)
    caplog.set_level(logging.INFO, logger=states.__name__)
    async with trio.open_nursery() as nursery:

        async def mount() -> None:
            async with open_immutable(config, client, metrics, node=Node.of_this_machine()) as fs:
                assert sum(1 for _ in fs.readdir(fs.top, 0)) == 2

        nursery.start_soon(mount)
        await until(lambda: "listing: 32 names so far" in caplog.messages)
        assert second.reached.is_set()
        second.resume()


async def test_state_that_was_not_finished_is_removed_by_the_next_daemon(tmp_path: Path) -> None:
    """A daemon died while it made a state, or before it removed the one that it had replaced."""
    store = MemoryStore()
    store.put("name", b"x")
    names = partial(mounted_names, store, tmp_path)
    assert await names() == [b"name"]
    store.put("later", b"x")
    states_there = tmp_path / "states"
    (first,) = states_there.iterdir()
    shutil.copytree(first, states_there / "00000005")  # complete, and newer
    (states_there / "00000007").mkdir()  # without its note
    (states_there / "00000003.damaged-1790000000000000000").mkdir()  # what is no state
    assert await names() == [b"name"]
    assert [path.name for path in states_there.iterdir()] == ["00000005"]


async def test_damaged_state_is_replaced_by_the_next_daemon(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A repaired one could have its note without the names."""
    store = MemoryStore()
    store.put("name", b"x")
    names = partial(mounted_names, store, tmp_path)
    assert await names() == [b"name"]
    (state,) = (tmp_path / "states").iterdir()
    files_of_names = list(state.glob("*.sst"))
    engine = RocksEngines().open(state)
    engine.write([({schema.SINGLE_STATE: engine.get(schema.SINGLE_STATE)}, b"", b"")], sync=True)
    engine.close()
    assert len(list(state.glob("*.sst"))) > len(files_of_names) > 0
    for path in files_of_names:
        path.unlink()
    assert await names() == [b"name"]
    assert "state 1 is removed" in caplog.text
    assert len(list((tmp_path / "states").iterdir())) == 1


async def test_state_of_another_schema_is_replaced_by_the_next_daemon(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    store.put("name", b"x")
    names = partial(mounted_names, store, tmp_path)
    assert await names() == [b"name"]
    (state,) = (tmp_path / "states").iterdir()
    engine = RocksEngines().open(state)
    engine.write([({schema.SINGLE_VERSION: b"1"}, b"", b"")], sync=True)
    engine.close()
    store.put("later", b"x")
    assert await names() == [b"later", b"name"]
    assert "state 1 is removed: another version of lakefs-fuse made it" in caplog.messages
    assert len(list((tmp_path / "states").iterdir())) == 1


async def test_attributes_are_answered_while_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    store, disk = MemoryStore(), FullDisk()
    store.put("name", b"x", metadata={"mode": "33152"})
    async with mounted(store, tmp_path, node=replace(node_of(Clock()), engines=disk), allow_other=True) as fs:
        entry = fs.lookup(ROOT_INODE, b"name")
        assert entry is not None
        disk.is_full = True
        assert (await fs.getattr(entry.inode)).mode == 0o600
        with pytest.raises(CacheFull):
            await fs.refresh()
        disk.is_full = False
        assert (await fs.getattr(entry.inode)).mode == 0o600
        store.put("later", b"x")
        await fs.refresh()
        assert fs.lookup(ROOT_INODE, b"later") is not None
        assert (await fs.getattr(entry.inode)).mode == 0o600
        assert store.count("head") == 1


async def test_names_are_announced_though_the_state_before_cannot_be_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    store.put("name", b"x")
    async with mounted(store, tmp_path) as fs:
        announced = list[bytes]()

        async def listen(changed: ChangedNames) -> None:
            announced.extend(name for _, name in changed.names())

        def fail(_: Path) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        fs.refreshed.append(listen)
        store.put("later", b"x")
        with monkeypatch.context() as patch:
            patch.setattr(Path, "iterdir", fail)
            await fs.refresh()
        assert announced == [b"later"]
        assert len(list((tmp_path / "states").iterdir())) == 2
        await fs.refresh()
        assert len(list((tmp_path / "states").iterdir())) == 1


async def test_names_of_another_lake_that_was_at_this_place_before_are_not_shown(tmp_path: Path) -> None:
    clock = Clock()
    for lake_id, name in ("first", "old"), ("second", "new"):
        store = MemoryStore()
        async with lake(store, tmp_path / lake_id, clock=clock, pack="always") as writer:
            await writer.write(name, b"x")
            await writer.sync()
        clock.advance(3600)
        opened = mounted(store, tmp_path / "cache", node=node_of(clock), mounting=lake_id, lake_id=lake_id)
        async with opened as fs:
            assert [entry.name.decode() for entry in fs.readdir(fs.top, 0)] == [name]


async def test_refresh_whose_list_of_names_has_no_room_fails_as_on_a_full_disk_and_shows_the_state_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was an internal error."""
    store = MemoryStore()
    store.put("name", b"x")
    async with mounted(store, tmp_path) as fs:
        store.put("later", b"x")

        def fail(*_: object) -> NoReturn:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(changed_names, "CHANGED_NAMES_BYTES_MAX", 0)
            patch.setattr(LocalDisk, "temporary_file", fail)
            with pytest.raises(CacheFull):
                await fs.refresh()
        assert fs.lookup(ROOT_INODE, b"later") is None
        await fs.refresh()
        assert fs.lookup(ROOT_INODE, b"later") is not None


async def test_state_made_from_one_before_lacks_rows_of_packs_that_gc_has_deleted(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()

    def packs(fs: ImmutableFilesystem) -> list[str]:
        return [row.key for row in fs._state.tree.objects.rows() if row.is_pack]  # noqa: SLF001

    async with lake(store, tmp_path / "writer", clock=clock, pack="always") as writer:
        for name in ("removed", "kept"):
            await writer.write(name, b"bytes")
            await writer.sync()
            clock.advance(1)
        async with mounted(store, tmp_path / "cache") as fs:
            deleted, kept = packs(fs)
            await writer.unlink("removed")
            await writer.sync()
            await fs.refresh()
            assert packs(fs) == [deleted, kept]
            del store.objects[deleted]
            commit = parse_commit_key(kept)
            assert commit is not None
            record = GcRecord(horizon=commit[0])
            await write_gc_record(store_client(store, store.capabilities), record, clock.now_ns)
            await fs.refresh()
            assert packs(fs) == [kept]
