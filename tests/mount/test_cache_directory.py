"""Permissions of the cache directory: it belongs to the user who mounts, and is closed to others."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tests.mount.conftest import LakeMaker

OTHER_UID = 1234


def test_a_cache_directory_open_to_others_is_narrowed(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    lake.cache_dir.mkdir()
    lake.cache_dir.chmod(0o755)
    done = lake.try_mount()
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        f"lakefs-fuse: the cache directory {lake.cache_dir} is open to others (mode 0755): it gets mode 0700\n"
    )
    assert stat.S_IMODE(lake.cache_dir.stat().st_mode) == 0o700
    assert "was open to others (mode 0755): it has mode 0700 now" in lake.log()
    lake.pid = lake.number("daemon.pid")
    lake.umount()
    assert lake.try_mount().stderr == "", "it is said once"
    lake.pid = lake.number("daemon.pid")


def test_a_cache_directory_of_another_user_is_refused(make_lake: LakeMaker, tmp_path: Path) -> None:
    lake = make_lake("file")
    if os.geteuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir(mode=0o777)
        os.chown(theirs, OTHER_UID, OTHER_UID)
    else:
        theirs = Path("/var/tmp")
    for directory in (theirs, tmp_path / "link"):
        if directory != theirs:
            directory.symlink_to(theirs)
        lake.cache_dir = directory
        refused = lake.try_mount()
        assert refused.returncode == 1
        assert f"{directory}" in refused.stderr
        assert f"belongs to user {theirs.stat().st_uid}" in refused.stderr
        assert refused.stderr.endswith("give --cache-dir a directory of your own\n")
    assert os.geteuid() != 0 or (list(theirs.iterdir()) == [] and stat.S_IMODE(theirs.stat().st_mode) & 0o055)
