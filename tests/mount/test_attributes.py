"""Modes, times and trees, as a mount with an empty cache directory shows them.

Commits hold those of files written through a mount. LIST holds none for other objects, so a mount shows defaults until
it has opened them; `asked` is a stat that reaches the daemon.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import time
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import PART_BYTES, START_HEADS, Lake, given_away, noise
from tests.tiers import IS_LONG

PACKAGE = Path(__file__).parents[2] / "lakefs_fuse"
SOURCES = PACKAGE if IS_LONG else PACKAGE / "vfs"
"""The tree that is copied."""
LONG_AGO_NS = 1_000_000_000_123_456_789


def asked(path: Path) -> int:
    """Permissions, from a stat that the kernel may not answer from its cache."""
    command = ["stat", "--cached=never", "--format=%a", str(path)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout, 8)


def asked_again(lake: Lake, *paths: Path) -> list[tuple[int, int]]:
    """Permissions and mtimes that a mount with an empty cache learns when asked, and still knows after another.

    The kernel's write-back cache keeps the mtime that it was first told of a file; the second mount tells it anew.
    """
    lake.remount(empty_cache=True)
    modes = [asked(path) for path in paths]
    lake.remount()
    found = [path.stat() for path in paths]
    assert modes == [stat.S_IMODE(each.st_mode) for each in found]
    assert lake.number("store.requests.head") == START_HEADS, "asked once, it is known"
    return [(stat.S_IMODE(each.st_mode), each.st_mtime_ns) for each in found]


def test_attributes_set_before_and_after_close_survive(either: Lake) -> None:
    before, after = either.path / "tool", either.path / "file"
    with before.open("wb") as stream:
        stream.write(b"#!/bin/sh\necho hello\n")
        os.fchmod(stream.fileno(), 0o750)
        stream.flush()
        os.utime(stream.fileno(), ns=(LONG_AGO_NS, LONG_AGO_NS))
    told = either.outside.metadata("tool")
    assert told["mode"] == str(stat.S_IFREG | 0o750)
    assert told["mtime"] == "1000000000.123456789"
    after.write_bytes(noise(10_000))
    after.chmod(0o600)
    os.utime(after, ns=(LONG_AGO_NS, LONG_AGO_NS))
    owner = given_away(after, 1234, 4321)
    subprocess.run(["touch", "new", "new"], cwd=either.path, check=True)
    subprocess.run(["touch", "-d", "2001-09-09 01:46:40 UTC", "new"], cwd=either.path, check=True)
    assert (either.path / "new").stat().st_mtime == 1_000_000_000
    found = asked_again(either, before, after, either.path / "new")
    assert found == [(0o750, LONG_AGO_NS), (0o600, LONG_AGO_NS), (0o644, 10**18)]
    assert (after.stat().st_uid, after.stat().st_gid) == owner
    assert after.read_bytes() == either.outside.read("file") == noise(10_000)
    assert subprocess.run([str(before)], capture_output=True, check=True).stdout == b"hello\n"


def test_attributes_of_a_file_of_several_parts(either: Lake) -> None:
    """Its upload began, with the metadata of then, before they were set."""
    data = noise(2 * PART_BYTES + 4567)
    file = either.path / "model"
    with file.open("wb", buffering=0) as stream:
        stream.write(data)
        os.fchmod(stream.fileno(), 0o640)
        os.utime(stream.fileno(), ns=(LONG_AGO_NS, LONG_AGO_NS))
    assert either.outside.read("model") == data
    assert either.outside.uploads() == []
    assert asked_again(either, file) == [(0o640, LONG_AGO_NS)]
    file.chmod(0o600)
    either.sync()
    assert either.number("store.requests.part") == 0, "no byte is sent again for a change of mode"
    assert either.number("upload.parts_copied") == 0, "nor copied"
    assert either.outside.read("model") == data
    either.remount(empty_cache=True)
    assert asked(file) == 0o600
    assert file.read_bytes() == data


@pytest.mark.parametrize("store", ["file", pytest.param("moto", marks=pytest.mark.long), "seaweedfs"])
def test_attributes_of_a_directory_survive(make_lake: LakeMaker, store: str) -> None:
    """On any store, and shown without being asked for."""
    lake = make_lake(store).mount()
    directory = lake.path / "private"
    directory.mkdir()
    directory.chmod(0o700)
    os.utime(directory, ns=(LONG_AGO_NS, LONG_AGO_NS))
    lake.remount(empty_cache=True)
    found = directory.stat()
    assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o700, LONG_AGO_NS)


def test_write_after_truncation_in_the_same_tick_keeps_the_mtime_that_was_shown(lake: Lake) -> None:
    """The kernel sets one mtime for both, and sends it with the truncation alone."""
    files = [lake.path / f"file{number}" for number in range(20)]
    for file in files:
        file.write_bytes(b"first")
    time.sleep(0.05)
    for file in files:
        file.write_bytes(b"second")
    shown = [file.stat().st_mtime_ns for file in files]
    assert [mtime_ns for _, mtime_ns in asked_again(lake, *files)] == shown


def test_times_without_being_told(lake: Lake) -> None:
    """The time of the last write is the file's, here and for a mount that knows nothing."""
    file = lake.path / "file"
    before = time.time()
    file.write_bytes(b"x")
    shown = file.stat().st_mtime_ns
    assert before - 1 < shown / 1e9 < time.time() + 1
    time.sleep(0.05)
    assert file.stat().st_mtime_ns == shown
    assert asked_again(lake, file) == [(0o644, shown)]


def test_exact_attributes_of_objects_nobody_opened(either: Lake) -> None:
    """With ``--attributes objects`` plain stat and listings are right at once, and each object is asked about once."""
    for name in ("dir/one", "two"):
        either.outside.replace(name, b"x", {"mode": str(stat.S_IFREG | 0o600), "mtime": "1000000000.123456789"})
    either.remount("--attributes", "objects", empty_cache=True)
    names = [entry for place in (either.path, either.path / "dir") for entry in os.scandir(place) if entry.is_file()]
    for path in (either.path / "two", *names):
        found = os.stat(path)
        assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (0o600, LONG_AGO_NS)
    assert sorted(entry.name for entry in names) == ["one", "two"]
    asked_for = either.number("store.requests.head")
    assert 2 <= asked_for - START_HEADS <= 3, "each file, and the directory, once"
    either.remount("--attributes", "objects")
    assert os.stat(either.path / "dir" / "one").st_mtime_ns == LONG_AGO_NS
    assert either.number("store.requests.head") == START_HEADS


def test_attributes_of_what_was_written_here_are_never_asked_for(either: Lake) -> None:
    """Plain stat and `ls -l` of a mount that knows nothing show them at once: commits tell them."""
    (either.path / "dir").mkdir()
    for name in ("dir/one", "two"):
        file = either.path / name
        file.write_bytes(b"x")
        file.chmod(0o600)
        os.utime(file, ns=(LONG_AGO_NS, LONG_AGO_NS))
        os.setxattr(file, "user.label", name.encode())
    written = either.puts()
    (either.path / "two").chmod(0o640)
    either.sync()
    assert either.puts() <= written + 2, "no object is sent again for that"
    either.remount(empty_cache=True)
    for path, mode in ((either.path / "two", 0o640), (either.path / "dir" / "one", 0o600)):
        found = path.stat()
        assert (stat.S_IMODE(found.st_mode), found.st_mtime_ns) == (mode, LONG_AGO_NS)
        assert os.getxattr(path, "user.label") == str(path.relative_to(either.path)).encode()
    assert either.number("store.requests.head") == START_HEADS


@pytest.mark.long
def test_cp_of_a_source_tree(either: Lake, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(SOURCES, tree / "package", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    script = tree / "script.sh"
    script.write_text("#!/bin/sh\necho it works\n")
    script.chmod(0o755)
    (tree / "empty" / "directory").mkdir(parents=True)
    subprocess.run(["cp", "-r", str(tree), str(either.path / "copy")], check=True)
    subprocess.run(["cp", "-a", str(tree), str(either.path / "archive")], check=True)
    either.remount(empty_cache=True)
    for name in ("copy", "archive"):
        subprocess.run(["diff", "-r", str(tree), str(either.path / name)], check=True)
        done = subprocess.run(["./script.sh"], cwd=either.path / name, capture_output=True, check=True)
        assert done.stdout == b"it works\n"
    expected = {path.relative_to(tree): path.stat() for path in tree.rglob("*")}
    names = [name for name, told in expected.items() if stat.S_ISREG(told.st_mode)]
    found = asked_again(either, *(either.path / "archive" / name for name in names))
    wanted = [(stat.S_IMODE(expected[name].st_mode), expected[name].st_mtime_ns) for name in names]
    assert dict(zip(names, found, strict=True)) == dict(zip(names, wanted, strict=True))


def test_umask_and_mode_of_create(lake: Lake) -> None:
    fd = os.open(lake.path / "secret", os.O_CREAT | os.O_WRONLY, 0o600)
    os.close(fd)
    assert lake.outside.metadata("secret")["mode"] == str(stat.S_IFREG | 0o600)
    assert stat.S_IMODE((lake.path / "secret").stat().st_mode) == 0o600


def test_what_others_wrote_has_the_modes_of_the_mount(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--file-mode", "640", "--dir-mode", "750", "--uid", "1000", "--gid", "1001")
    lake.outside.replace("dir/theirs", b"x")
    lake.mount()
    found = (lake.path / "dir" / "theirs").stat()
    assert (stat.S_IMODE(found.st_mode), found.st_uid, found.st_gid) == (0o640, 1000, 1001)
    assert stat.S_IMODE((lake.path / "dir").stat().st_mode) == 0o750
