"""What may stand in the SOURCE of a mount: any character that a key or a directory may have."""

from __future__ import annotations

import pytest

from lakefs_fuse.control.mounts import mount_at
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Directory


@pytest.mark.parametrize("store", [pytest.param("file", marks=pytest.mark.long), "seaweedfs"])
def test_source_with_any_character_is_mounted_and_shown(make_lake: LakeMaker, store: str) -> None:
    lake, name = make_lake(store), "lä, 木"
    if isinstance(lake.outside, Directory):
        (lake.outside.root / name).mkdir()
    else:
        lake.outside.source_prefix += f"{name}/"  # where the lake has its record
    lake.source = f"{lake.source.rstrip('/')}/{name}"
    lake.mount()
    (lake.path / "größe").write_bytes(b"x")
    mounted = mount_at(str(lake.path))
    assert mounted is not None
    assert mounted.source.rstrip("/") == lake.source
    lake.umount()
    assert any(key.endswith("größe") for key in lake.outside.objects())


def test_directory_of_a_lake_is_refused_and_left_alone(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs").mount("--pack", "always")
    (lake.path / "d").mkdir()
    (lake.path / "d" / "f").write_bytes(b"x")
    lake.remount()
    lake.umount()
    root, before = lake.source, lake.outside.objects().keys()
    lake.source = f"{root.rstrip('/')}/d"
    for options in ((), ("--read-only",)):
        refused = lake.try_mount(*options)
        assert refused.returncode == 1
        assert "is the directory d of the lake" in refused.stderr
    assert lake.outside.objects().keys() == before
    lake.mount("--immutable")
    assert (lake.path / "f").read_bytes() == b"x"
