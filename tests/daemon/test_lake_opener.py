"""The lake of a mount: what opening it leaves in the cache directory, and whether the store still has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lakefs_fuse.admin.fold_database import FoldDatabase
from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.daemon.lake_opener import open_lake
from lakefs_fuse.errors import LakeError
from lakefs_fuse.store.lake_record import KEY


def config_of(tmp_path: Path, **options: Any) -> MountConfig:
    (tmp_path / "store").mkdir()
    return MountConfig(
        store=StoreConfig(source=Source.parse(f"file://{tmp_path}/store")),
        mountpoint=str(tmp_path / "mnt"),
        cache_dir=str(tmp_path / "cache"),
        free_bytes_min=0,
        **options,
    )


@pytest.mark.parametrize(
    ("maintenance", "read_only", "keeps"), [("auto", False, True), ("off", False, False), ("auto", True, False)]
)
async def test_fold_database_of_a_mount_that_never_folds_is_removed(
    tmp_path: Path, maintenance: str, read_only: bool, keeps: bool
) -> None:
    database = FoldDatabase(tmp_path / "cache" / "folded")
    (tmp_path / "cache" / "folded" / "meta").mkdir(parents=True)
    (tmp_path / "cache").chmod(0o700)
    async with open_lake(config_of(tmp_path, maintenance=maintenance, read_only=read_only)):
        assert database.exists() == keeps


@pytest.mark.parametrize(
    ("record", "message"), [(None, "is missing"), (b'{"format": 1, "id": "other"}', "is that of another lake")]
)
async def test_lake_that_was_replaced_since_the_mount_began_is_detected(
    tmp_path: Path, record: bytes | None, message: str
) -> None:
    async with open_lake(config_of(tmp_path, maintenance="off")) as (_, lake, _):
        await lake.check_identity()
        path = tmp_path / "store" / KEY
        path.unlink()
        if record is not None:
            path.write_bytes(record)
        with pytest.raises(LakeError, match=f"is not the lake that was mounted any more: its {KEY} {message}"):
            await lake.check_identity()
