"""Setgid directories: their entries inherit the group, as on Linux's own file systems."""

from __future__ import annotations

import os
import stat

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import given_away

GID = 1234
FILES = 8
"""More than are made in a directory before the hooks make the next ones."""


@pytest.mark.parametrize("durability", ["close", pytest.param("writeback", marks=pytest.mark.long)])
@pytest.mark.usefixtures("with_hooks")
def test_a_setgid_directory_gives_its_group_to_what_is_made_in_it(make_lake: LakeMaker, durability: str) -> None:
    lake = make_lake("file", "--durability", durability).mount()
    top = lake.path / "top"
    top.mkdir()
    uid, gid = given_away(top, os.geteuid(), GID)
    for number in range(FILES):
        (top / f"before-{number}").write_bytes(b"bytes")
    top.chmod(0o2775)
    for number in range(FILES):
        (top / f"file-{number}").write_bytes(b"bytes")
    (top / "directory").mkdir()
    (top / "directory" / "below").touch()
    (top / "link").symlink_to("file-0")
    os.mknod(top / "node", 0o640)
    made = [path for path in top.rglob("*") if not path.name.startswith("before")]
    assert len(made) == FILES + 4
    for _ in range(2):
        assert {path: path.lstat().st_gid for path in made} == dict.fromkeys(made, gid)
        assert {path.lstat().st_uid for path in made} == {uid}
        is_setgid = {path.name for path in made if path.lstat().st_mode & stat.S_ISGID}
        assert is_setgid == {"directory"}
        assert {(top / f"before-{number}").stat().st_gid for number in range(FILES)} == {os.getegid()}
        lake.remount(empty_cache=True)
