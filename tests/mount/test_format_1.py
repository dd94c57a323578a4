"""Lakes and cache directories of format 1: read, written, replayed and upgraded; see `format_1_files`."""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import trio

from lakefs_fuse.admin.upgrade import WRITERS_S, run_upgrade
from lakefs_fuse.admin.work import ChangeRecord, Work
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.client import StoreClient, ThreadTransport
from lakefs_fuse.store.lake_record import FEATURES, change_record, open_record
from lakefs_fuse.store.open import open_store
from tests import servers
from tests.mount import format_1_files
from tests.mount.lakes import Lake
from tests.servers import Server


@pytest.fixture
def kept_lake(dev_fuse: Path, seaweed: Server, tmp_path: Path) -> Iterator[Lake]:
    """The lake of the fixture on SeaweedFS, not mounted yet."""
    format_1_files.restore_objects(seaweed, tmp_path / "objects")
    lake = format_1_files.kept_lake(seaweed, tmp_path / "node", *format_1_files.OPTIONS)
    try:
        yield lake
    finally:
        format_1_files.end(lake)


def test_lake_of_format_1_is_shown_as_it_was(kept_lake: Lake) -> None:
    kept_lake.mount()
    assert format_1_files.read_names(kept_lake.path) == format_1_files.expected("shown.json")


@pytest.mark.long
def test_lake_of_format_1_is_written(kept_lake: Lake) -> None:
    kept_lake.mount()
    root = kept_lake.path
    (root / "moved").rename(root / "packed")
    (root / "packed" / "08.txt").write_bytes(b"replaced\n")
    os.utime(root / "packed" / "08.txt", (1_600_000_000, 1_600_000_000))
    (root / "packed" / "09.txt").unlink()
    (root / "plain" / "0.bin").rename(root / "packed" / "0.bin")
    kept_lake.settle()
    written = format_1_files.read_names(root)
    kept_lake.remount(empty_cache=True)
    assert format_1_files.read_names(kept_lake.path) == written
    unchanged = {path: about for path, about in format_1_files.expected("shown.json").items() if "moved" not in path}
    del unchanged["plain/0.bin"]
    assert unchanged.items() <= written.items()
    assert written["packed/10.txt"] == format_1_files.expected("shown.json")["moved/10.txt"]
    checked = kept_lake.cli("fsck", kept_lake.source)
    assert checked.returncode == 0, checked.stdout


def test_cache_directory_of_format_1_is_replayed(kept_lake: Lake) -> None:
    format_1_files.unpack_tree("cache.tar.xz", kept_lake.cache_dir)
    kept_lake.mount("--durability", "writeback", "--orphans", "finish")
    assert kept_lake.cli("flush", str(kept_lake.path)).returncode == 0
    assert format_1_files.read_names(kept_lake.path) == format_1_files.expected("replayed.json")
    kept_lake.remount(empty_cache=True)
    assert format_1_files.read_names(kept_lake.path) == format_1_files.expected("replayed.json")


class LaterClient(StoreClient):
    """The fixture's commits may be younger than an hour: two hours from now they are not."""

    async def time_ns(self) -> int:
        return time.time_ns() + 2 * WRITERS_S * 1_000_000_000


async def _upgrade(client: LaterClient, config: StoreConfig, change: ChangeRecord) -> protocol.Finished:
    work = Work(
        client=client,
        store=config,
        path="",
        progress=lambda progress: None,
        note=lambda text: None,
        node=Node.of_this_machine(),
        scratch=tempfile.gettempdir(),
        change_record=change,
        host="here",
        process=1,
    )
    return await run_upgrade(work, protocol.UpgradeArgs())


def upgrade_later(server: Server, lake: Lake) -> protocol.Finished:
    """As `lakefs-fuse upgrade` does it."""
    config = StoreConfig(source=Source.parse(lake.source), endpoint_url=server.url, region=servers.REGION)
    store, rng = open_store(config, Node.of_this_machine()), random.Random(1)
    try:
        opened = open_record(store, config, rng, SystemClock(), may_write=True)
        transport = ThreadTransport(WorkerThreads())
        client = LaterClient(
            store, opened.capabilities, Metrics().store, transport=transport, clock=SystemClock(), rng=rng
        )
        return trio.run(_upgrade, client, config, partial(change_record, store, SystemClock()))
    finally:
        store.close()


@pytest.mark.long  # admin/test_upgrade.py shows it
def test_lake_of_format_1_is_upgraded(kept_lake: Lake, seaweed: Server, tmp_path: Path) -> None:
    format_1_files.unpack_tree("cache.tar.xz", kept_lake.cache_dir)
    assert upgrade_later(seaweed, kept_lake).summary["switched_on"] == sorted(FEATURES)
    kept_lake.mount("--durability", "writeback", "--orphans", "finish")
    assert kept_lake.cli("flush", str(kept_lake.path)).returncode == 0
    assert format_1_files.read_names(kept_lake.path) == format_1_files.expected("replayed.json")
    kept_lake.remount(empty_cache=True)
    assert format_1_files.read_names(kept_lake.path) == format_1_files.expected("replayed.json")
    old = format_1_files.kept_lake(seaweed, tmp_path / "old", *format_1_files.OPTIONS)
    try:
        format_1_files.use_program(old, format_1_files.unpack_program(tmp_path / "program")).mount("--read-only")
        assert "this program reads format 1" in old.log()
        assert (old.path / "moved" / "10.txt").read_bytes() == (kept_lake.path / "moved" / "10.txt").read_bytes()
        assert not (old.path / "accepted" / "zero").exists()
    finally:
        format_1_files.end(old)
