"""Two versions of the program on one lake, and the upgrade that excludes the older one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lakefs_fuse.store.lake_record import FEATURES
from tests.mount import format_1_files
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Directory, Lake, eventually

RECORD = ".lakefs/lake"
FILES = 30


@pytest.fixture(scope="module")
def old_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return format_1_files.unpack_program(tmp_path_factory.mktemp("old") / "program")


@pytest.fixture
def old_lake(make_lake: LakeMaker, old_program: Path) -> Lake:
    """The old program on a directory, not mounted yet."""
    lake = make_lake("file", "--refresh", "0.2", "--metadata-ttl", "0.2")
    return format_1_files.use_program(lake, old_program)


@pytest.fixture
def new_lake(old_lake: Lake, tmp_path: Path) -> Iterator[Lake]:
    """This program on the same directory, not mounted yet. The older program made the lake."""
    assert isinstance(old_lake.outside, Directory)
    commits = old_lake.outside.root / ".lakefs" / "commits"
    commits.mkdir(parents=True)
    (commits / "first").write_bytes(b"")
    lake = Lake(old_lake.outside, old_lake.source, tmp_path / "new", *old_lake.options)
    try:
        yield lake
    finally:
        lake.close()


def lake_record(lake: Lake) -> dict[str, object]:
    assert isinstance(lake.outside, Directory)
    found: dict[str, object] = json.loads((lake.outside.root / RECORD).read_text())
    return found


def set_record(lake: Lake, **fields: object) -> None:
    assert isinstance(lake.outside, Directory)
    (lake.outside.root / RECORD).write_text(json.dumps(lake_record(lake) | fields))


def work(lake: Lake, name: str) -> dict[str, bytes]:
    """Write, replace, rename and remove files of this node's own; answers what is to be there."""
    root = lake.path / name
    root.mkdir()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda index: (root / f"{index}").write_bytes(b"%d" % index), range(FILES)))
    for index in range(0, FILES, 3):
        (root / f"{index}").rename(root / f"renamed {index}")
        (root / f"{index + 1}").unlink()
        (root / f"{index + 2}").write_bytes(b"replaced")
    lake.sync()
    kept_names = {f"{name}/renamed {index}": b"%d" % index for index in range(0, FILES, 3)}
    return kept_names | {f"{name}/{index}": b"replaced" for index in range(2, FILES, 3)}


def read(lake: Lake) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for path in [path for path in lake.path.rglob("*") if path.is_file()]:
        with contextlib.suppress(FileNotFoundError):  # another node's change came in between
            found[str(path.relative_to(lake.path))] = path.read_bytes()
    return found


def test_old_program_beside_this_one_before_the_upgrade_loses_nothing(old_lake: Lake, new_lake: Lake) -> None:
    old_lake.mount()
    new_lake.mount()
    with ThreadPoolExecutor(2) as pool:
        wrote = [pool.submit(work, old_lake, "old"), pool.submit(work, new_lake, "new")]
        expected = wrote[0].result() | wrote[1].result()
    for lake in (old_lake, new_lake):
        eventually(lambda lake=lake: read(lake) == expected, "both see all", 60.0)  # type: ignore[misc]
    refused = new_lake.cli("upgrade", new_lake.source)
    assert refused.returncode == 1
    assert "an older program wrote to this lake" in refused.stderr
    assert lake_record(new_lake)["features_to_read"] == []
    for lake in (old_lake, new_lake):
        assert read(lake.remount(empty_cache=True)) == expected


def test_old_program_beside_this_one_after_the_upgrade(old_lake: Lake, new_lake: Lake) -> None:
    """What `docs/operations.md` says of a mount that nobody ended."""
    new_lake.mount("--pack", "always")
    (new_lake.path / "before").write_bytes(b"before")
    new_lake.sync()
    upgraded = new_lake.cli("upgrade", new_lake.source)
    assert (upgraded.returncode, upgraded.stdout) == (0, f"switched on: {', '.join(sorted(FEATURES))}\n")
    new_lake.remount("--pack", "always")
    old_lake.mount()
    (new_lake.path / "packed").write_bytes(b"packed")
    (new_lake.path / "before").rename(new_lake.path / "renamed")
    new_lake.sync()
    eventually(lambda: "this program reads format 1" in old_lake.log(), "the old program refuses", 60.0)
    assert read(old_lake) == {"before": b"before"}, "as it was before the upgrade"
    old_lake.path.joinpath("theirs").write_bytes(b"theirs")
    old_lake.path.joinpath("before").write_bytes(b"again")
    old_lake.sync()
    expected = {"packed": b"packed", "renamed": b"before", "theirs": b"theirs", "before": b"again"}
    eventually(lambda: read(new_lake) == expected, "what it writes is seen", 60.0)
    for command in ("gc", "snapshot"):
        assert old_lake.cli(command, old_lake.source).returncode == 1
    old_lake.umount()
    assert read(new_lake.remount(empty_cache=True)) == expected


def test_new_lake_has_every_feature(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount()
    assert lake_record(lake)["features_to_read"] == sorted(FEATURES)
    assert lake.cli("upgrade", lake.source).stdout == "nothing to do: the lake has every feature of this program\n"


def test_mount_of_a_lake_with_an_unknown_feature(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount()
    (lake.path / "f").write_bytes(b"bytes")
    lake.umount()
    set_record(lake, features_to_write=["mirrored"])
    done = lake.try_mount()
    lake.pid = lake.number("daemon.pid")
    assert (done.returncode, "the mount is read-only, as the lake has mirrored" in done.stderr) == (0, True)
    assert (lake.path / "f").read_bytes() == b"bytes"
    with pytest.raises(OSError, match="Read-only"):
        (lake.path / "g").write_bytes(b"")
    assert os.statvfs(lake.path).f_flag & os.ST_RDONLY
    stats = lake.stats()
    assert "mirrored" in json.dumps(stats["capabilities"])
    assert stats["mount"].items() >= {"read_only": True, "needs_newer_program": ["mirrored"]}.items()  # type: ignore[attr-defined]
    assert "mount.features: the mount is read-only" in lake.cli("doctor", str(lake.path), "--no-throughput").stdout
    refused = lake.cli("gc", lake.source)
    assert (refused.returncode, "mirrored" in refused.stderr) == (2, True)
    assert lake.cli("fsck", lake.source).returncode == 0
    lake.umount()
    set_record(lake, features_to_read=["rotated"])
    refused = lake.try_mount()
    assert refused.returncode != 0
    assert "this lake has rotated, which lakefs-fuse" in refused.stderr
    checked = lake.cli("doctor", lake.source, "--no-throughput")
    assert (checked.returncode, "store.lake: this lake has rotated" in checked.stdout) == (1, True)


def test_read_only_mount_writes_no_record(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    assert isinstance(lake.outside, Directory)
    (lake.outside.root / "f").write_bytes(b"bytes")
    lake.mount("--read-only")
    assert (lake.path / "f").read_bytes() == b"bytes"
    lake.umount()
    assert not (lake.outside.root / ".lakefs").exists()
