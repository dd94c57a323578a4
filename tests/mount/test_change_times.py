"""ctime: an operation on an inode moves it once, and the commit of that operation does not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker

Times = dict[str, tuple[int, int]]


def times(top: Path) -> Times:
    """mtime and ctime in ns of all below a directory, from stats that the kernel may not answer from its cache."""
    found = ["find", ".", "-exec", "stat", "--cached=never", "--format=%.9Y %.9Z %n", "{}", "+"]
    lines = subprocess.run(found, cwd=top, capture_output=True, text=True, check=True).stdout.splitlines()
    words = [line.split(" ", 2) for line in lines]
    return {name: (int(mtime.replace(".", "")), int(ctime.replace(".", ""))) for mtime, ctime, name in words}


def make_tree(top: Path) -> None:
    for name in ("a", "a/b", "c"):
        (top / name).mkdir()
    for name in ("f", "a/f", "a/b/f"):
        (top / name).write_bytes(b"bytes")
    (top / "a" / "link").symlink_to("f")
    (top / "c").chmod(0o700)
    (top / "a" / "b").rename(top / "c" / "d")
    (top / "f").chmod(0o600)
    os.utime(top / "a", ns=(10**18, 10**18))


@pytest.mark.parametrize("durability", ["close", "writeback"])
def test_a_commit_leaves_the_times_of_what_it_stores(make_lake: LakeMaker, durability: str) -> None:
    lake = make_lake("file", "--durability", durability).mount()
    top = lake.path / "top"
    top.mkdir()
    make_tree(top)
    before = times(top)
    lake.settle()
    assert times(top) == before
    lake.remount()
    after = times(lake.path / "top")
    for name, (mtime, ctime) in before.items():
        assert after[name][0] == mtime, name
        if name not in ("./f",):  # its attributes were changed by themselves: then the time of the commit counts
            assert after[name][1] == ctime, name
