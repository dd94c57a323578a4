"""What may stand in the SOURCE of a mount: any character that a key or a directory may have."""

from __future__ import annotations

import pytest

from lakefs_fuse.control.mounts import mount_at
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Directory


@pytest.mark.parametrize("store", ["file", "seaweedfs"])
def test_source_with_any_character_is_mounted_and_shown(make_lake: LakeMaker, store: str) -> None:
    lake, name = make_lake(store), "lä, 木"
    if isinstance(lake.outside, Directory):
        (lake.outside.root / name).mkdir()
    lake.source = f"{lake.source.rstrip('/')}/{name}"
    lake.mount()
    (lake.path / "größe").write_bytes(b"x")
    mounted = mount_at(str(lake.path))
    assert mounted is not None
    assert mounted.source.rstrip("/") == lake.source
    lake.umount()
    assert any(key.endswith(f"{name}/größe") for key in lake.outside.objects())
