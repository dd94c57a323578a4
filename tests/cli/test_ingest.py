"""`lakefs-fuse ingest` as it is typed, on a lake in a directory and on a mounted one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lakefs_fuse.control.mounts import mount_at
from tests.mount.fork_server import ForkServer
from tests.tiers import IS_LONG

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def lakefs(*arguments: str | Path, stdin: bytes | None = None) -> subprocess.CompletedProcess[bytes]:
    """Forked in `make test`, but for what reads its standard input."""
    if stdin is None and not IS_LONG:
        done = ForkServer.of_this_process().run([*map(str, arguments)], os.environ, 90, os.getcwd())
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.encode(), done.stderr.encode())
    return subprocess.run(
        [sys.executable, "-P", "-m", "lakefs_fuse", *map(str, arguments)],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        timeout=90,
        check=False,
        env=ENVIRONMENT,
    )


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    (tmp_path / "lake").mkdir()
    return tmp_path / "lake"


@pytest.fixture
def src(tmp_path: Path) -> Path:
    root = tmp_path / "src"
    (root / "sub").mkdir(parents=True)
    (root / "a").write_text("a")
    (root / "sub" / "b").write_text("b")
    return root


def members(lake: Path) -> list[str]:
    """Names of all files in all packs."""
    found: list[str] = []
    for pack in sorted((lake / ".lakefs" / "commits").iterdir()):
        with zipfile.ZipFile(pack) as archive:
            found += [name for name in archive.namelist() if name != ".lakefs/record"]
    return found


def test_a_directory_and_then_more_below_it(lake: Path, src: Path) -> None:
    first = lakefs("ingest", src, f"file://{lake}", "--json")
    assert first.returncode == 0
    assert first.stderr.decode().startswith(f"lakefs-fuse: file://{lake} becomes a lake of its own, as no lake was")
    assert b"or give --lake with the SOURCE that you mount" in first.stderr
    summary = json.loads(first.stdout)
    assert summary.pop("seconds") >= 0
    assert summary == {
        "files": 2,
        "bytes": 2,
        "directories": 1,
        "symlinks": 0,
        "packs": 1,
        "objects": 0,
        "refused": 0,
        "skipped": 0,
    }
    second = lakefs("ingest", src, f"file://{lake}/more/of it")
    assert second.returncode == 0
    assert second.stderr.decode() == f"lakefs-fuse: more/of it is in the lake file://{lake}\n"
    assert second.stdout.startswith(b"2 files of 2 bytes in 1 pack")
    assert members(lake) == ["a", "sub/b", "more/of it/a", "more/of it/sub/b"]


def test_a_stream_into_a_lake_that_is_named(lake: Path, src: Path) -> None:
    stream = subprocess.run(["tar", "-c", "-C", src, "."], capture_output=True, check=True).stdout
    done = lakefs("ingest", "-", f"file://{lake}/in", "--lake", f"file://{lake}", stdin=stream)
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(members(lake)) == ["in/a", "in/sub/b"]


def test_url_of_a_file_is_refused(lake: Path, src: Path) -> None:
    assert lakefs("ingest", src, f"file://{lake}/in", "--lake", f"file://{lake}").returncode == 0
    (lake / "file").write_text("text")
    done = lakefs("ingest", src, f"file://{lake}/file", "--lake", f"file://{lake}")
    assert done.returncode == 2
    assert b"file is a file in the lake: name a directory" in done.stderr
    assert sorted(members(lake)) == ["in/a", "in/sub/b"]


def test_what_is_left_out_is_named_and_makes_the_exit_code_1(lake: Path, src: Path) -> None:
    (src / ".lakefs").mkdir()
    done = lakefs("ingest", src, f"file://{lake}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[1:] == [b"lakefs-fuse: left out: .lakefs: .lakefs is reserved"]
    assert b"1 left out, see above" in done.stdout
    assert members(lake) == ["a", "sub/b"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["missing", "file://LAKE"], 1, "missing does not exist"),
        (["SRC", "file://LAKE/missing"], 1, "does not exist"),
        (["SRC", "LAKE"], 1, "not inside a mount"),
        (["SRC/a", "file://LAKE"], 1, "not a tar archive"),
        (["SRC", "s3://bucket", "--endpoint-url", "http://k:topsecret@x"], 2, "--endpoint-url"),
        (["SRC", "file://LAKE", "--uploads", "0"], 2, "--uploads"),
        (["SRC"], 2, "PATH"),
    ],
)
def test_errors_are_one_line(lake: Path, src: Path, arguments: list[str], code: int, said: str) -> None:
    done = lakefs("ingest", *(each.replace("SRC", str(src)).replace("LAKE", str(lake)) for each in arguments))
    *notes, error = done.stderr.decode().splitlines()
    assert (done.returncode, [note for note in notes if "becomes a lake" not in note]) == (code, [])
    assert said in error
    assert "topsecret" not in error
    assert done.stdout == b""


@pytest.fixture
def point(lake: Path, tmp_path: Path) -> Iterator[Path]:
    """The lake, mounted."""
    point = tmp_path / "mnt"
    point.mkdir()
    options: list[str | Path] = [
        "--cache-dir",
        tmp_path / "cache",
        "--log-file",
        tmp_path / "log",
        "--free-space",
        "64M",
    ]
    mounting = lakefs("mount", f"file://{lake}", point, *options)
    assert mounting.returncode == 0, mounting.stderr
    yield point
    if mount_at(str(point)) is not None:
        subprocess.run(["fusermount3", "-u", "-z", point], check=True)


def test_a_path_in_a_mount_needs_no_options(lake: Path, src: Path, point: Path) -> None:
    assert list(point.iterdir()) == []
    done = lakefs("ingest", src, point / "new" / "place")
    assert (done.returncode, done.stderr) == (0, b"")
    assert sorted(each.name for each in (point / "new/place").iterdir()) == ["a", "sub"]
    assert members(lake) == ["new/place/a", "new/place/sub/b"]
    for taken in ("new/place/a", "new/place/a/below/it"):
        onto_file = lakefs("ingest", src, point / taken)
        assert onto_file.returncode == 2
        assert onto_file.stderr.decode().startswith(f"lakefs-fuse: {point}/new/place/a is not a directory")
    assert (point / "new/place/a").read_text() == "a"
    itself = lakefs("ingest", point.parent, point / "x")
    assert itself.returncode == 2
    assert b"contains the mount" in itself.stderr
    assert lakefs("umount", point).returncode == 0
