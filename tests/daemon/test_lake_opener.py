"""What opening the lake of a mount leaves in its cache directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakefs_fuse.admin.fold_database import FoldDatabase
from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.daemon.lake_opener import open_lake


@pytest.mark.parametrize(
    ("maintenance", "read_only", "keeps"), [("auto", False, True), ("off", False, False), ("auto", True, False)]
)
async def test_fold_database_of_a_mount_that_never_folds_is_removed(
    tmp_path: Path, maintenance: str, read_only: bool, keeps: bool
) -> None:
    (tmp_path / "store").mkdir()
    database = FoldDatabase(tmp_path / "cache" / "folded")
    (tmp_path / "cache" / "folded" / "meta").mkdir(parents=True)
    (tmp_path / "cache").chmod(0o700)
    config = MountConfig(
        store=StoreConfig(source=Source.parse(f"file://{tmp_path}/store")),
        mountpoint=str(tmp_path / "mnt"),
        cache_dir=str(tmp_path / "cache"),
        free_bytes_min=0,
        maintenance=maintenance,
        read_only=read_only,
    )
    async with open_lake(config):
        assert database.exists() == keeps
