"""What is said of the kernel, and raising the read-ahead of a mount."""

from __future__ import annotations

import os
from pathlib import Path

from lakefs_fuse.kernel.features import READ_AHEAD_KIB, raise_read_ahead


def device(bdi: Path, mounted: Path) -> Path:
    number = os.stat(mounted).st_dev
    directory = bdi / f"{os.major(number)}:{os.minor(number)}"
    directory.mkdir(parents=True)
    return directory / "read_ahead_kb"


def test_read_ahead_is_raised_and_never_lowered(tmp_path: Path) -> None:
    path = device(tmp_path / "bdi", tmp_path)
    path.write_text("128\n")
    assert raise_read_ahead(str(tmp_path), tmp_path / "bdi") == (READ_AHEAD_KIB, "")
    assert path.read_text() == str(READ_AHEAD_KIB)
    path.write_text("8192\n")
    assert raise_read_ahead(str(tmp_path), tmp_path / "bdi") == (8192, "")
    assert path.read_text() == "8192\n"


def test_who_may_not_raise_it_is_told(tmp_path: Path) -> None:
    path = device(tmp_path / "bdi", tmp_path)
    path.symlink_to("/sys/class/net/lo/ifindex")  # a number that not even root can write to
    now, note = raise_read_ahead(str(tmp_path), tmp_path / "bdi")
    assert now == 1
    assert note.startswith(f"read-ahead stays at 1 KiB: raising it takes root ({path}: ")
    assert raise_read_ahead(str(tmp_path), tmp_path / "nowhere") == (
        0, f"read-ahead is as it was: {tmp_path}/nowhere/{path.parent.name}/read_ahead_kb is not there"
    )  # fmt: skip
