"""Immutable mounts: one state of a lake, which the kernel may cache without limit."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from lakefs_fuse.blockcache.object_version import BLOCK_BYTES
from tests.mount.conftest import LakeMaker
from tests.mount.counting import costs, costs_nothing, upcalls
from tests.mount.lakes import Directory, Lake, eventually, file_lake, is_running, noise
from tests.mount.test_hot_restart import back, die

FILES = 50
FILE_BYTES = 50_000


def fill(lake: Lake, files: int = FILES) -> list[str]:
    names = [f"train/class-{index % 5}/image-{index:04d}" for index in range(files)]
    for index, name in enumerate(names):
        lake.outside.replace(name, noise(FILE_BYTES, index))
    return names


def use(lake: Lake, names: list[str]) -> None:
    """What a loader does with files: open, read, close."""
    for index, name in enumerate(names):
        fd = os.open(lake.path / name, os.O_RDONLY)
        try:
            assert os.read(fd, FILE_BYTES) == noise(FILE_BYTES, index)
        finally:
            os.close(fd)


def find(lake: Lake) -> set[str]:
    done = subprocess.run(["find", ".", "-type", "f", "-printf", "%P\n"],
                          cwd=lake.path, capture_output=True, text=True, check=True)  # fmt: skip
    return set(done.stdout.split())


@pytest.fixture
def immutable(make_lake: LakeMaker) -> Lake:
    return make_lake("file", "--immutable")


@pytest.mark.usefixtures("with_hooks")
def test_what_was_seen_once_costs_no_upcall(immutable: Lake) -> None:
    names = fill(immutable)
    immutable.mount()
    assert find(immutable) == set(names)
    use(immutable, names)
    costs_nothing(immutable, lambda: use(immutable, names))
    with costs(immutable):
        assert find(immutable) == set(names)
    with costs(immutable):
        for name in names:
            assert (immutable.path / name).stat().st_size == FILE_BYTES
    before = upcalls(immutable)
    assert (before["open"], before["opendir"], before["flush"]) == (1, 1, 1), "asked for once, and never again"
    assert before["release"] == before["releasedir"] == 0


def test_nothing_changes_by_itself(immutable: Lake) -> None:
    immutable.outside.replace("d/kept", b"as it was")
    immutable.outside.replace("d/removed", b"it was here")
    immutable.mount()
    immutable.outside.replace("d/new", b"new")
    immutable.outside.delete("d/removed")
    assert sorted(os.listdir(immutable.path / "d")) == ["kept", "removed"]
    assert not (immutable.path / "d" / "new").exists()
    assert (immutable.path / "d" / "kept").read_bytes() == b"as it was"
    lists = immutable.number("store.requests.list")
    assert sorted(os.listdir(immutable.path / "d")) == ["kept", "removed"]
    assert immutable.number("store.requests.list") == lists


def test_attributes_that_only_objects_tell(make_lake: LakeMaker) -> None:
    """Asked for when the state is made, and never again."""
    lake = make_lake("seaweedfs", "--immutable", "--attributes", "objects")
    lake.outside.replace("run", b"#!/bin/sh", {"mode": "33261", "uid": "7", "gid": "8", "mtime": "1500000000"})
    lake.mount()
    heads = lake.number("store.requests.head")
    found = (lake.path / "run").stat()
    assert (found.st_mode, found.st_uid, found.st_gid, found.st_mtime) == (0o100755, 7, 8, 1_500_000_000)
    assert lake.number("store.requests.head") == heads
    assert f"on {lake.path} (immutable, as of 20" in lake.cli("stats", str(lake.path)).stdout.replace("\n", " ")


def test_what_is_gone_is_an_error_and_never_other_bytes(immutable: Lake) -> None:
    immutable.outside.replace("a", b"first")
    immutable.outside.replace("b", b"there")
    immutable.mount()
    immutable.outside.replace("a", b"other")
    with pytest.raises(OSError, match="Stale file handle"):
        (immutable.path / "a").read_bytes()
    assert f"a is gone from the store (gc, or another client replaced it): `lakefs-fuse refresh {immutable.path}`" in (
        immutable.log()
    )
    assert (immutable.path / "b").read_bytes() == b"there"
    assert immutable.number("immutable.reads_gone") > 0


def test_refresh_moves_it_on(immutable: Lake) -> None:
    for name in ("d/kept", "d/replaced", "d/removed", "gone/f"):
        immutable.outside.replace(name, name.encode())
    immutable.outside.replace("empty/f", b"")
    immutable.outside.delete("empty/f")
    immutable.mount()
    seen = {str(path.relative_to(immutable.path)) for path in immutable.path.rglob("*")}
    assert (immutable.path / "d" / "replaced").read_bytes() == b"d/replaced"
    assert not (immutable.path / "d" / "new").exists()
    assert not (immutable.path / "new").exists()
    inode = (immutable.path / "d" / "kept").stat().st_ino
    with open(immutable.path / "d" / "replaced", "rb") as held:
        immutable.outside.replace("d/replaced", b"other bytes")
        immutable.outside.replace("d/new", b"new")
        immutable.outside.replace("new/deep/er", b"deep")
        immutable.outside.replace("empty/f", b"not any more")
        immutable.outside.delete("d/removed")
        immutable.outside.delete("gone/f")
        assert {str(path.relative_to(immutable.path)) for path in immutable.path.rglob("*")} == seen
        done = immutable.cli("refresh", str(immutable.path))
        assert done.returncode == 0, done.stderr
        assert held.read() == b"d/replaced"
    files = {str(path.relative_to(immutable.path)) for path in immutable.path.rglob("*") if path.is_file()}
    assert files == {"d/kept", "d/replaced", "d/new", "new/deep/er", "empty/f"}
    assert (immutable.path / "d" / "replaced").read_bytes() == b"other bytes"
    assert (immutable.path / "new" / "deep" / "er").read_bytes() == b"deep"
    assert (immutable.path / "empty" / "f").read_bytes() == b"not any more"
    assert not (immutable.path / "d" / "removed").exists()
    assert (immutable.path / "d" / "kept").stat().st_ino == inode
    assert immutable.number("immutable.refreshes") == 1


def test_statfs_is_the_size_of_the_state(immutable: Lake) -> None:
    """All of it is used, and nothing is free."""
    names = fill(immutable)
    immutable.mount()

    def shown() -> tuple[int, int, int, int]:
        told = os.statvfs(immutable.path)
        return told.f_blocks, told.f_bavail, told.f_files, told.f_ffree

    block_bytes, directories = os.statvfs(immutable.path).f_frsize, 6
    blocks = -(-len(names) * FILE_BYTES // block_bytes)
    assert shown() == (blocks, 0, len(names) + directories, 0)
    immutable.outside.replace("d/more", bytes(10 * block_bytes))
    assert immutable.cli("refresh", str(immutable.path)).returncode == 0
    assert shown() == (blocks + 10, 0, len(names) + directories + 2, 0)


def test_a_refresh_that_fails_leaves_it_as_it_was(immutable: Lake) -> None:
    immutable.outside.replace("d/f", b"first")
    immutable.mount("--retry-timeout", "1")
    assert (immutable.path / "d" / "f").read_bytes() == b"first"
    assert isinstance(immutable.outside, Directory)
    immutable.outside.replace("d/g", b"second")
    immutable.outside.root.rename(immutable.outside.root.with_name("away"))
    done = immutable.cli("refresh", str(immutable.path))
    assert done.returncode == 1
    assert os.listdir(immutable.path / "d") == ["f"]
    immutable.outside.root.with_name("away").rename(immutable.outside.root)
    assert immutable.cli("refresh", str(immutable.path)).returncode == 0
    assert sorted(os.listdir(immutable.path / "d")) == ["f", "g"]
    assert len(os.listdir(immutable.cache_dir / "states")) == 1


def test_nothing_can_be_written(immutable: Lake) -> None:
    immutable.outside.replace("f", b"as it is")
    immutable.mount()
    writes: list[Callable[[Path], object]] = [
        lambda top: (top / "f").write_bytes(b"x"), lambda top: (top / "g").touch(), lambda top: (top / "f").unlink(),
        lambda top: (top / "d").mkdir(), lambda top: (top / "f").rename(top / "g"), lambda top: (top / "f").chmod(0),
    ]  # fmt: skip
    for write in writes:
        with pytest.raises(OSError, match="Read-only file system"):
            write(immutable.path)
    assert (immutable.path / "f").read_bytes() == b"as it is"


def test_a_daemon_that_takes_anothers_place_shows_what_that_showed(immutable: Lake) -> None:
    immutable.outside.replace("d/f", b"first")
    immutable.mount("--supervise")
    assert os.listdir(immutable.path / "d") == ["f"]
    immutable.outside.replace("d/g", b"second")
    die(immutable)
    back(immutable)
    assert os.listdir(immutable.path / "d") == ["f"]
    assert immutable.cli("refresh", str(immutable.path)).returncode == 0
    assert sorted(os.listdir(immutable.path / "d")) == ["f", "g"]


def test_a_mount_begins_with_what_is_there_then(immutable: Lake) -> None:
    immutable.outside.replace("f", b"first")
    immutable.mount()
    immutable.outside.replace("g", b"second")
    immutable.remount()
    assert sorted(os.listdir(immutable.path)) == ["f", "g"]


@pytest.mark.parametrize("option", [
    ("--durability", "writeback"), ("--durability", "close"), ("--refresh", "1"), ("--metadata-ttl", "1h"),
    ("--orphans", "finish"), ("--pack", "always"), ("--staging-size", "1G"),
])  # fmt: skip
def test_options_that_mean_nothing_are_refused(immutable: Lake, option: tuple[str, str]) -> None:
    refused = immutable.try_mount(*option)
    assert refused.returncode == 2
    assert f"{option[0]}: an --immutable mount" in refused.stderr
    assert refused.stderr.count("\n") == 1


@pytest.mark.needs_root("an ordinary user mounts in a mount only where that one has --allow-other")
def test_a_directory_of_a_mount_is_covered_by_its_state_of_now(make_lake: LakeMaker) -> None:
    """One command, and what is around it goes on as before."""
    lake = make_lake("file", "--pack", "always", "--metadata-ttl", "0", "--refresh", "0.2").mount()
    data = lake.path / "datasets" / "images"
    data.mkdir(parents=True)
    (data / "packed").write_bytes(b"packed")
    lake.outside.replace("datasets/images/plain", b"plain")
    lake.settle()
    here = ("--log-file", str(lake.log_file.with_name("log2")), "--free-space", "64M", "--no-supervise")
    done = lake.cli("mount", "--immutable", str(data), *here)
    assert done.returncode == 0, done.stderr
    try:
        assert sorted(os.listdir(data)) == ["packed", "plain"]
        assert (data / "packed").read_bytes() + (data / "plain").read_bytes() == b"packedplain"
        with pytest.raises(OSError, match="Read-only"):
            (data / "new").touch()
        for index in range(5):  # the mount around it learns of changes next to the directory, and in it
            lake.outside.replace(f"datasets/new-{index}", b"x")
            lake.outside.replace(f"datasets/images/new-{index}", b"x")
            (lake.path / "datasets" / f"own-{index}").write_bytes(b"x")
            eventually((lake.path / "datasets" / f"new-{index}").exists, "it is seen")
        assert sorted(os.listdir(data)) == ["packed", "plain"]
    finally:
        gone = lake.cli("umount", str(data))
    assert gone.returncode == 0, gone.stderr
    assert "new-0" in os.listdir(data)


def test_refresh_shows_what_commits_changed(make_lake: LakeMaker, tmp_path: Path) -> None:
    """Modes, links, directories that moved with all that is in them, files that became directories."""
    lake = make_lake("file", "--pack", "always").mount()
    for path in ("old/deep/f", "mode", "swap", "link", "file"):
        (lake.path / path).parent.mkdir(parents=True, exist_ok=True)
        (lake.path / path).write_bytes(path.encode())
    (lake.path / "l").symlink_to("mode")
    (lake.path / "empty").mkdir()
    lake.settle()
    with file_lake(tmp_path / "other") as still:
        still.source, still.options = lake.source, ("--immutable",)
        still.mount()
        before = {path: path.read_bytes() for path in still.path.rglob("*") if path.is_file()}
        inode = (still.path / "old" / "deep" / "f").stat().st_ino
        assert os.readlink(still.path / "l") == "mode"
        (lake.path / "old").rename(lake.path / "new")
        (lake.path / "mode").chmod(0o600)
        (lake.path / "l").unlink()
        (lake.path / "l").symlink_to("file")
        (lake.path / "swap").unlink()
        (lake.path / "swap").mkdir()
        (lake.path / "swap" / "inside").write_bytes(b"inside")
        (lake.path / "empty" / "first").write_bytes(b"first")
        lake.settle()
        assert {path: path.read_bytes() for path in still.path.rglob("*") if path.is_file()} == before
        assert still.cli("refresh", str(still.path)).returncode == 0
        for top in (lake.path, still.path):
            found = {str(path.relative_to(top)) for path in top.rglob("*")}
            assert found == {
                "new", "new/deep", "new/deep/f", "mode", "swap", "swap/inside", "link", "file", "l", "empty",
                "empty/first",
            }  # fmt: skip
            assert (top / "mode").stat().st_mode & 0o777 == 0o600
            assert os.readlink(top / "l") == "file"
            assert (top / "swap" / "inside").read_bytes() == b"inside"
            assert (top / "new" / "deep" / "f").read_bytes() == b"old/deep/f"
        assert (still.path / "new" / "deep" / "f").stat().st_ino == inode
        assert not (still.path / "old").exists()


@pytest.mark.long
@pytest.mark.needs_root("an ordinary user mounts in a mount only where that one has --allow-other")
def test_it_goes_with_the_mount_that_it_lies_in(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--supervise")
    lake.outside.replace("data/f", b"bytes")
    lake.mount()
    here = ("--log-file", str(lake.log_file.with_name("log2")), "--free-space", "64M")
    done = lake.cli("mount", "--immutable", str(lake.path / "data"), *here)
    assert done.returncode == 0, done.stderr
    inner = json.loads(lake.cli("stats", "--json", str(lake.path / "data")).stdout)["daemon"]["pid"]
    busy = lake.cli("umount", str(lake.path))
    assert busy.returncode == 1
    assert "in use" in busy.stderr
    die(lake)
    back(lake)
    eventually(lambda: not is_running(inner), "the inner mount's daemon ends")
    lake.outside.replace("data/g", b"later")
    assert lake.cli("refresh", str(lake.path / "data")).returncode == 0
    assert sorted(os.listdir(lake.path / "data")) == ["f", "g"], "the outer mount is seen"


def test_files_that_came_with_another_cost_no_read(make_lake: LakeMaker) -> None:
    """A pack's block of 1 MiB brings the files beside the one that was asked for; the kernel is given their bytes."""
    writer = make_lake("file", "--pack", "always", "--durability", "writeback", "--writeback-delay", "1h").mount()
    (writer.path / "images").mkdir()
    files = 100
    for index in range(files):
        (writer.path / "images" / f"{index:03}").write_bytes(noise(FILE_BYTES, index))
    writer.umount()
    writer.options = ("--immutable",)
    writer.mount()
    with os.scandir(writer.path / "images") as entries:
        names = [entry.name for entry in entries if entry.stat().st_size == FILE_BYTES]
    assert len(names) == files
    # Those that lie in two blocks are pushed with neither.
    blocks = -(-files * FILE_BYTES // BLOCK_BYTES)
    beside = files - 2 * blocks
    for name in sorted(names)[10::20]:
        assert (writer.path / "images" / name).read_bytes() == noise(FILE_BYTES, int(name))
        eventually(lambda: writer.number("pushing.under_way") == 0, "what came with it is in the page cache")
    assert writer.number("pushing.files") >= beside
    before = upcalls(writer)["read"]
    for name in names:
        assert (writer.path / "images" / name).read_bytes() == noise(FILE_BYTES, int(name))
    assert upcalls(writer)["read"] - before <= files - beside


@pytest.mark.usefixtures("with_hooks")
def test_packed_files_of_the_lake_above(make_lake: LakeMaker, tmp_path: Path) -> None:
    """A directory of a lake, whose small files are in packs that only the lake's root tells of."""
    writer = make_lake("file", "--pack", "always").mount()
    (writer.path / "data" / "images").mkdir(parents=True)
    for index in range(5):
        (writer.path / "data" / "images" / f"{index}").write_bytes(noise(1000, index))
    writer.settle()
    assert isinstance(writer.outside, Directory)
    with file_lake(tmp_path / "part") as part:
        part.source, part.options = f"{writer.source}/data/images", ("--immutable",)
        part.mount()
        assert sorted(os.listdir(part.path)) == ["0", "1", "2", "3", "4"]
        assert [(part.path / f"{index}").read_bytes() for index in range(5)] == [noise(1000, i) for i in range(5)]
        (writer.path / "data" / "images" / "5").write_bytes(b"later")
        writer.settle()
        assert not (part.path / "5").exists()
        assert part.cli("refresh", str(part.path)).returncode == 0
        assert (part.path / "5").read_bytes() == b"later"
        made = part.cli("snapshot", str(part.path), "--name", "v1")  # of the lake, which the mount shows a part of
        assert made.returncode == 0, made.stderr
        assert "v1" in writer.cli("snapshot", writer.source, "--list").stdout
        names = os.listdir(part.path)
        with costs(part):
            assert os.listdir(part.path) == names


def test_refresh_shows_the_directory_that_took_the_place_of_the_one_at_the_top(
    make_lake: LakeMaker, tmp_path: Path
) -> None:
    """As a data set is replaced: written beside the one in use, and renamed. The kernel knows the top as inode 1."""
    writer = make_lake("file", "--pack", "always").mount()
    data, new = writer.path / "sets" / "data", writer.path / "sets" / "new"
    for directory in (data, new):
        directory.mkdir(parents=True)
        for name in ("both", f"only-{directory.name}"):
            (directory / name).write_bytes(directory.name.encode())
    writer.settle()
    with file_lake(tmp_path / "part") as part:
        part.source, part.options = f"{writer.source}/sets/data", ("--immutable",)
        part.mount()
        assert {path.name: path.read_bytes() for path in part.path.iterdir()} == {"both": b"data", "only-data": b"data"}
        assert not (part.path / "only-new").exists()
        data.chmod(0o700)
        writer.settle()
        assert part.cli("refresh", str(part.path)).returncode == 0
        assert part.path.stat().st_mode & 0o777 == 0o700
        data.rename(data.with_name("old"))
        new.rename(data)
        writer.settle()
        assert part.cli("refresh", str(part.path)).returncode == 0
        assert not (part.path / "only-data").exists()
        assert {path.name: path.read_bytes() for path in part.path.iterdir()} == {"both": b"new", "only-new": b"new"}
        assert part.path.stat().st_mode & 0o777 == 0o755
