"""A replica of a bucket that shows commits before the objects that they name."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio

from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.errors import FileError, NotFound
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.vfs.files.late_objects import YOUNG_S, LateObjects
from lakefs_fuse.vfs.immutable.filesystem import open_immutable
from tests.fakes import node_of, store_client
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Clock, lake
from tests.vfs.writing_back import until

BYTES = b"the bytes of a renamed file"


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def source(clock: Clock, tmp_path: Path) -> MemoryStore:
    store = MemoryStore()
    async with lake(store, tmp_path / "writer", clock=clock, pack="never") as node:
        await node.write("old", BYTES)
        await node.rename("old", "new")
        await node.sync()
    return store


def replica(source: MemoryStore, clock: Clock) -> MemoryStore:
    """Everything but the object that the commit names."""
    store = MemoryStore()
    store.clock = clock
    store.objects = {key: each for key, each in source.objects.items() if key != "old"}
    return store


async def test_read_of_a_late_object_waits_for_it(source: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    store = replica(source, clock)
    async with lake(store, tmp_path / "reader", clock=clock, read_only=True) as node, trio.open_nursery() as nursery:
        found: list[bytes] = []

        async def read() -> None:
            found.append(await node.read("new"))

        nursery.start_soon(read)
        await until(lambda: store.count("get", "old") >= 2)
        assert not found
        store.objects["old"] = source.objects["old"]
        await until(lambda: found == [BYTES])


async def test_read_of_a_late_object_by_an_immutable_mount_waits_for_it(
    source: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    store = replica(source, clock)
    client = store_client(store, store.capabilities, Metrics().store)
    config = MountConfig(
        store=StoreConfig(source=Source("file", "/nowhere", "")),
        mountpoint="/nowhere",
        cache_dir=str(tmp_path / "reader"),
        free_bytes_min=0,
        immutable=True,
    )
    (tmp_path / "reader").mkdir()
    async with (
        open_immutable(config, client, Metrics(), node=node_of(clock, "reader")) as fs,
        trio.open_nursery() as nursery,
    ):
        entry = next(entry for entry in fs.readdir(fs.top, 0) if entry.name == b"new")
        found: list[bytes] = []

        async def read() -> None:
            found.append(bytes(await fs.read(entry.inode, 0, 100)))

        nursery.start_soon(read)
        await until(lambda: store.count("get", "old") >= 2)
        store.objects["old"] = source.objects["old"]
        await until(lambda: found == [BYTES])


@pytest.mark.parametrize(("age_s", "read_only"), [(YOUNG_S + 1, True), (0, False)])
async def test_read_of_a_missing_object_fails_at_once_and_the_log_says_why(
    source: MemoryStore,
    clock: Clock,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    age_s: float,
    read_only: bool,
) -> None:
    store = replica(source, clock)
    clock.advance(age_s)
    async with lake(store, tmp_path / "reader", clock=clock, read_only=read_only) as node:
        for _ in range(2):
            with pytest.raises(FileError) as failed, trio.fail_after(10):
                await node.read("new")
            assert failed.value.errno == errno.ESTALE
    told = [line for line in caplog.messages if "fsck --rebind" in line]
    assert len(told) == 1, "once for each object"
    assert told[0].startswith("new cannot be read: the store does not have the version of old that commits name")


async def test_late_objects_wait_no_longer_than_the_retry_timeout(autojump_clock: trio.testing.MockClock) -> None:
    late = LateObjects(lambda: 100, 60.0, read_only=True)
    error = FileError(errno.ESTALE)
    error.__cause__ = NotFound("no object")
    assert late.is_expected(Entry(1, 2, b"name", 3, stamp=50, place=1), error)
    assert not late.is_expected(Entry(1, 2, b"name", 3, stamp=0, place=1), error), "no commit names it"
    assert not late.is_expected(Entry(1, 2, b"name", 3, stamp=50, place=1), FileError(errno.ESTALE)), "it was replaced"
    wait, began_s = late.wait(), trio.current_time()
    while await wait.pause():
        pass
    assert trio.current_time() - began_s == pytest.approx(60.0)
