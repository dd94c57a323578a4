"""What the program of format 1 left in a store and on a node is read, written and replayed; see `kept`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount import kept
from tests.mount.lakes import Lake
from tests.servers import Server


@pytest.fixture
def kept_lake(dev_fuse: Path, seaweed: Server, tmp_path: Path) -> Iterator[Lake]:
    """The lake of the fixture on SeaweedFS, not mounted yet."""
    kept.restore_objects(seaweed, tmp_path / "objects")
    lake = kept.kept_lake(seaweed, tmp_path / "node", *kept.OPTIONS)
    try:
        yield lake
    finally:
        kept.end(lake)


def test_lake_of_format_1_is_shown_as_it_was(kept_lake: Lake) -> None:
    kept_lake.mount()
    assert kept.read_names(kept_lake.path) == kept.expected("shown.json")


def test_lake_of_format_1_is_written(kept_lake: Lake) -> None:
    kept_lake.mount()
    root = kept_lake.path
    (root / "moved").rename(root / "packed")
    (root / "packed" / "08.txt").write_bytes(b"replaced\n")
    os.utime(root / "packed" / "08.txt", (1_600_000_000, 1_600_000_000))
    (root / "packed" / "09.txt").unlink()
    (root / "plain" / "0.bin").rename(root / "packed" / "0.bin")
    kept_lake.settle()
    written = kept.read_names(root)
    kept_lake.remount(empty_cache=True)
    assert kept.read_names(kept_lake.path) == written
    unchanged = {path: about for path, about in kept.expected("shown.json").items() if "moved" not in path}
    del unchanged["plain/0.bin"]
    assert unchanged.items() <= written.items()
    assert written["packed/10.txt"] == kept.expected("shown.json")["moved/10.txt"]
    checked = kept_lake.cli("fsck", kept_lake.source)
    assert checked.returncode == 0, checked.stdout


def test_cache_directory_of_format_1_is_replayed(kept_lake: Lake) -> None:
    kept.unpack_tree("cache.tar.xz", kept_lake.cache_dir)
    kept_lake.mount("--durability", "writeback", "--orphans", "finish")
    assert kept_lake.cli("flush", str(kept_lake.path)).returncode == 0
    assert kept.read_names(kept_lake.path) == kept.expected("replayed.json")
    kept_lake.remount(empty_cache=True)
    assert kept.read_names(kept_lake.path) == kept.expected("replayed.json")
