"""suid and sgid bits of a file that is written: dropped as Linux does, without a request before each write."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.counting import upcalls
from tests.mount.lakes import Lake

NOBODY = 65_534
WRITES = 2048
FILES = 16
"""More than are made in a directory before the hooks make the next ones."""
KEEP = ("--metadata-ttl", "1h", "--refresh", "1h")
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")

BECOME_NOBODY = f"""
import os, sys
os.setgroups([])
os.setresgid({NOBODY}, {NOBODY}, {NOBODY})
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
"""
MAKE = """
for path in sys.argv[1:]:
    fd = os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o6755)
    if path.endswith("written"):
        os.write(fd, b"bytes")
    os.close(fd)
"""
CHANGE = """
how, path = sys.argv[1:]
if how == "write":
    fd = os.open(path, os.O_WRONLY)
    os.write(fd, b"new")
    os.close(fd)
elif how == "open":
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC))
elif how == "truncate":
    os.truncate(path, 3)
elif how == "chown":
    os.chown(path, -1, os.getgid())
elif how == "chown to the same":
    os.chown(path, -1, -1)
"""
HOWS = ("write", "open", "truncate", "chown", "chown to the same")
MODES = {0o4755: 0o755, 0o6775: 0o775, 0o2666: 0o2666, 0o6666: 0o2666, 0o1755: 0o1755}
"""Modes before and after."""


def as_nobody(script: str, directory: Path, *args: str) -> None:
    """The directory is entered, and Python started, by root: neither need be open to others."""
    command = [sys.executable, "-c", BECOME_NOBODY + script, *args]
    subprocess.run(command, check=True, timeout=60, cwd=directory)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def handled(lake: Lake) -> bool:
    kernel = lake.stats()["kernel"]
    assert isinstance(kernel, dict)
    return bool(kernel["handle_killpriv"])


@pytest.mark.parametrize("is_new", [True, False])
@pytest.mark.usefixtures("with_hooks")
def test_writing_asks_once_what_there_is_to_drop(make_lake: LakeMaker, is_new: bool) -> None:
    lake = make_lake("file", "--durability", "writeback", *KEEP).mount()
    if not handled(lake):
        pytest.skip("not known to this kernel")
    path = lake.path / "file"
    if not is_new:
        path.write_bytes(b"before")
    before = upcalls(lake)["getxattr"]
    with open(path, "wb", buffering=0) as stream:
        for _ in range(WRITES):
            stream.write(bytes(4096))
    assert upcalls(lake)["getxattr"] - before <= 1


@ROOT
@pytest.mark.usefixtures("with_hooks")
def test_who_may_not_keep_privileges_drops_them(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--allow-other", *KEEP).mount()
    changed: dict[Path, int] = {}
    kept: dict[Path, int] = {}
    top = lake.path / "top"
    top.mkdir()
    os.chown(top, NOBODY, NOBODY)
    for how in HOWS:
        for mode, after in MODES.items():
            path = top / f"{how} {mode:o}"
            path.write_bytes(b"bytes of before")
            os.chown(path, NOBODY, NOBODY)
            path.chmod(mode)
            changed[path] = after
    for path in changed:
        as_nobody(CHANGE, top, path.name.rsplit(" ", 1)[0], path.name)
    for path in (top / "root writes", top / "root truncates"):
        path.write_bytes(b"bytes of before")
        path.chmod(0o6755)
        kept[path] = 0o6755
    with open(top / "root writes", "r+b") as stream:
        stream.write(b"new")
    os.truncate(top / "root truncates", 3)
    expected = {path.name: f"{mode:o}" for path, mode in (changed | kept).items()}
    for _ in range(2):
        assert {name: f"{mode_of(top / name):o}" for name in expected} == expected
        lake.remount(empty_cache=True)


@ROOT
@pytest.mark.parametrize("durability", ["close", pytest.param("writeback", marks=pytest.mark.long)])
@pytest.mark.usefixtures("with_hooks")
def test_new_files_lose_privileges_with_the_first_write(make_lake: LakeMaker, durability: str) -> None:
    lake = make_lake("file", "--allow-other", "--durability", durability, *KEEP).mount()
    top = lake.path / "top"
    top.mkdir()
    os.chown(top, NOBODY, NOBODY)
    for number in range(FILES):
        (top / f"before-{number}").write_bytes(b"bytes")
    empty = [top / f"{number}-empty" for number in range(4)]
    written = [top / f"{number}-written" for number in range(4)]
    as_nobody(MAKE, top, *(path.name for path in empty + written))
    for _ in range(2):
        assert {mode_of(path) for path in empty} == {0o6755}
        assert {mode_of(path) for path in written} == {0o755}
        lake.remount(empty_cache=True)


@ROOT
@pytest.mark.usefixtures("with_hooks")
def test_a_chown_that_keeps_the_owner_is_for_the_owner(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--allow-other", *KEEP).mount()
    path = lake.path / "file"
    path.write_bytes(b"bytes")
    path.chmod(0o4755)
    with pytest.raises(subprocess.CalledProcessError):
        as_nobody(CHANGE, lake.path, "chown to the same", "file")
    assert mode_of(path) == 0o4755
    os.chown(path, -1, -1)
    assert mode_of(path) == 0o755
