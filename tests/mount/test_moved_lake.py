"""A lake copied to another bucket by a tool that stores every object in one piece, and mounted there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, PART_BYTES, Bucket, Directory, Lake, noise, sha256
from tests.tiers import sized

LARGE_BYTES = PART_BYTES + MIB
ONE_PUT_BYTES = sized(2 * MIB, LARGE_BYTES)
"""An object of its own, not in a pack."""
MTIME_NS = 1_234_567_890_987_654_321


def fill(lake: Lake) -> None:
    """Packs, large multipart objects, renamed and removed ones, links and attributes."""
    (lake.path / "d" / "empty").mkdir(parents=True)
    for index in range(20):
        (lake.path / "d" / f"{index}").write_bytes(noise(3000, index))
    (lake.path / "large").write_bytes(noise(LARGE_BYTES, 100))
    (lake.path / "renamed.tmp").write_bytes(noise(LARGE_BYTES, 101))
    (lake.path / "renamed.tmp").rename(lake.path / "renamed")
    (lake.path / "renamed.tmp").write_bytes(noise(ONE_PUT_BYTES, 102))  # below .lakefs/objects/
    (lake.path / "removed").write_bytes(noise(ONE_PUT_BYTES, 103))
    (lake.path / "link").symlink_to("d/0")
    (lake.path / "d" / "1").rename(lake.path / "packed-elsewhere")
    os.chmod(lake.path / "large", 0o640)
    os.utime(lake.path / "large", ns=(MTIME_NS, MTIME_NS))
    os.setxattr(lake.path / "renamed", "user.note", b"kept")
    os.chmod(lake.path / "d" / "2", 0o600)
    lake.sync()
    (lake.path / "removed").unlink()
    (lake.path / "d" / "3").unlink()
    lake.sync()


def copy(source: Lake, target: Lake) -> None:
    """GET and PUT of each object with its metadata."""
    assert isinstance(source.outside, Bucket)
    assert isinstance(target.outside, Bucket)
    keys = [*source.outside.objects(), ".lakefs/lake"]
    for key in keys:
        if not key.endswith("/"):
            target.outside.replace(key, source.outside.read(key), source.outside.metadata(key))


def shown(root: Path) -> dict[str, tuple[object, ...]]:
    found: dict[str, tuple[object, ...]] = {}
    for directory, directories, files in os.walk(root):
        for name in directories + files:
            path = Path(directory) / name
            status = path.lstat()
            about: tuple[object, ...] = (stat.filemode(status.st_mode), status.st_uid, status.st_gid)
            if path.is_symlink():
                about += (os.readlink(path),)
            elif path.is_file():
                xattrs = {name: os.getxattr(path, name) for name in os.listxattr(path)}
                about += (sha256(path.read_bytes()), status.st_size, status.st_mtime_ns, xattrs)
            found[str(path.relative_to(root))] = about
    return found


def bytes_of(tree: dict[str, tuple[object, ...]]) -> dict[str, tuple[object, ...]]:
    """Without the mtimes and modes that no commit has."""
    return {path: about[3:5] for path, about in tree.items()}


@pytest.mark.long  # admin/test_rebind.py shows it
@pytest.mark.parametrize("with_index", [False, True])
def test_moved_lake_is_what_it_was_after_rebind(make_lake: LakeMaker, with_index: bool) -> None:
    source = make_lake("seaweedfs", "--delete-after", "1h").mount("--pack", "auto")
    fill(source)
    source.umount()
    if with_index:
        for command in (("snapshot",), ("gc", "--grace", "0"), ("gc", "--grace", "0"), ("snapshot", "--name", "v1")):
            done = source.cli(command[0], source.source, *source.options[:-2], *command[1:])
            assert done.returncode == 0, done.stderr
    source.mount("--read-only", "--attributes", "objects")
    before = shown(source.path)
    assert {"large", "renamed", "renamed.tmp", "packed-elsewhere", "link", "d/2"} <= before.keys()
    assert not {"removed", "d/3"} & before.keys()
    source.umount()

    moved = make_lake("seaweedfs")
    copy(source, moved)
    moved.mount("--read-only", "--attributes", "objects")
    with pytest.raises(OSError, match="Stale") as failed:
        (moved.path / "renamed").read_bytes()
    assert failed.value.errno == errno.ESTALE
    assert "fsck --rebind" in moved.log()
    moved.umount()

    done = moved.cli("fsck", moved.source, *moved.options, "--rebind", "--dry-run", "--json")
    counted = json.loads(done.stdout)
    done = moved.cli("fsck", moved.source, *moved.options, "--rebind", "--json")
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["objects"] == counted["objects"] >= 2
    assert ("hidden: removed: " in done.stderr) == (not with_index), "gc has deleted it"
    assert (summary["left"], summary["snapshots"], bool(summary["index"])) == (0, int(with_index), with_index)
    moved.cache_dir = moved.cache_dir.with_name("cache-after")
    moved.mount("--read-only", "--attributes", "objects")
    assert shown(moved.path) == before
    moved.umount()
    checked = moved.cli("fsck", moved.source, *moved.options)
    assert checked.returncode == 0, checked.stdout
    if with_index:
        moved.cache_dir = moved.cache_dir.with_name("cache-v1")
        moved.mount("--immutable", "--snapshot", "v1")
        assert bytes_of(shown(moved.path)) == bytes_of(before)


def test_names_of_a_lake_that_was_replaced_are_forgotten(make_lake: LakeMaker) -> None:
    """Somebody empties the place and begins again; what the cache directory knows is of the lake before."""
    lake = make_lake("file").mount()
    lake.outside.replace("d/removed", b"before")
    (lake.path / "d/removed").unlink()
    (lake.path / "d/written").write_bytes(b"before")
    lake.umount()
    assert isinstance(lake.outside, Directory)
    shutil.rmtree(lake.outside.root)
    lake.outside.root.mkdir()
    lake.outside.replace("d/removed", b"of the new lake")
    lake.mount()
    assert os.listdir(lake.path / "d") == ["removed"]
    assert (lake.path / "d/removed").read_bytes() == b"of the new lake"
    assert "are of another lake: all names are read again" in lake.log()
