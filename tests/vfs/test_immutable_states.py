"""Making a state of a lake: what the log says while it takes long."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import trio

from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.environment.node import Node
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.vfs.immutable import states
from lakefs_fuse.vfs.immutable.filesystem import open_immutable
from tests.fakes import store_client
from tests.memory_store import MemoryStore, Pause
from tests.vfs.writing_back import until


async def test_the_log_says_how_far_the_listing_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
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
