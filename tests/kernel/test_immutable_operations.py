"""The adapter of an immutable mount without a kernel: what a refresh has the kernel drop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from lakefs_fuse.kernel.immutable_operations import ImmutableOperations  # isort: skip  (before pyfuse3)
import pyfuse3

from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import CacheError
from lakefs_fuse.kernel.features import KernelFeatures
from lakefs_fuse.kernel.native.hooks import Feature
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.vfs.changed_names import ChangedNames
from lakefs_fuse.vfs.immutable.filesystem import ImmutableFilesystem, open_immutable
from tests.fakes import store_client
from tests.memory_store import MemoryStore


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bytes | None]]:
    """What the kernel is told to drop, in order: names, and with None the listings of directories."""
    told: list[tuple[int, bytes | None]] = []
    monkeypatch.setattr(pyfuse3, "invalidate_inode", lambda inode: told.append((inode, None)))
    monkeypatch.setattr(pyfuse3, "invalidate_entry", lambda parent, name: told.append((parent, name)))
    return told


@asynccontextmanager
async def shown(store: MemoryStore, cache_dir: Path) -> AsyncIterator[ImmutableFilesystem]:
    metrics = Metrics()
    client = store_client(store, store.capabilities, metrics.store)
    config = MountConfig(
        store=StoreConfig(source=Source("file", "/nowhere", "")),
        mountpoint="/nowhere",
        cache_dir=str(cache_dir),
        free_bytes_min=0,
        immutable=True,
    )
    async with open_immutable(config, client, metrics, node=Node.of_this_machine()) as fs:
        ImmutableOperations(fs, KernelFeatures(Feature(0), writeback_cache=False, background_max=0))
        yield fs


async def test_listing_is_dropped_after_the_names_in_it(
    tmp_path: Path, dropped: list[tuple[int, bytes | None]]
) -> None:
    """READDIR locks the directory, as dropping a name does: none that is under way brings the old listing back."""
    store = MemoryStore()
    for name in ("a", "d/a", "e/a"):
        store.put(name, b"x")
    async with shown(store, tmp_path) as fs:
        for name in ("b", "d/b", "d/c", "e/b"):
            store.put(name, b"x")
        await fs.refresh()
        names = {(parent, name) for parent, name in dropped if name is not None}
        directories = {parent for parent, _ in names}
    assert {(ROOT_INODE, b"b")} < names
    assert len(directories) == 3
    assert {name for parent, name in names if parent != ROOT_INODE} >= {b"b", b"c"}
    for directory in directories:
        assert [name for parent, name in dropped if parent == directory][-1] is None


async def test_refresh_whose_names_cannot_be_read_says_what_to_do(
    tmp_path: Path, dropped: list[tuple[int, bytes | None]], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    store = MemoryStore()
    store.put("a", b"x")

    def fail(_: ChangedNames) -> Iterator[tuple[int, bytes]]:
        raise CacheError("Input/output error")

    monkeypatch.setattr(ChangedNames, "names", fail)
    async with shown(store, tmp_path) as fs:
        store.put("b", b"x")
        with pytest.raises(CacheError, match="unmount, and mount again"):
            await fs.refresh()
        assert fs.lookup(ROOT_INODE, b"b") is not None
    assert "unmount, and mount again" in caplog.text
    assert dropped == []
