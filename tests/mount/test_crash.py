"""`kill -9` of the daemon during writes: no partial file is visible, no byte is lost, no upload remains."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import LARGE_BYTES, MIB, PART_BYTES, Lake, eventually, noise

WRITER = """
import os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
with open(sys.argv[2], "rb") as source:
    while piece := source.read(1 << 20):
        os.write(fd, piece)
print("written", flush=True)
sys.stdin.read()
"""


@contextmanager
def writer(target: Path, data: bytes, scratch: Path) -> Iterator[None]:
    """Another process that has written ``data`` and keeps the file open."""
    source = scratch / "source"
    source.write_bytes(data)
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(target), str(source)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"written\n"
            yield
        finally:
            process.kill()


def written_back(lake: Lake, name: str, size: int) -> None:
    """Wait until the daemon has taken ``size`` bytes of a file; syncfs starts that, but does not wait."""
    deadline = time.monotonic() + 60
    while [(file["path"], file["bytes"]) for file in lake.unfinished()] != [(name, size)]:
        assert time.monotonic() < deadline, f"{lake.unfinished()}\n{lake.log()}"
        subprocess.run(["sync", "-f", str(lake.path)], check=True)
        time.sleep(0.1)


def crash_while_writing(lake: Lake, name: str, data: bytes, scratch: Path) -> None:
    """The daemon is killed when it has all the bytes and has sent the complete parts, but the file is open."""
    with writer(lake.path / name, data, scratch):
        written_back(lake, name, len(data))
        eventually(lambda: lake.number("upload.parts") >= len(data) // PART_BYTES, "parts uploaded")
        lake.kill()


def orphan_of(lake: Lake, name: str) -> dict[str, Any]:
    """The only unfinished file there is, which must be an orphan of that name."""
    (orphan,) = lake.unfinished()
    assert (orphan["path"], orphan["state"]) == (name, "orphan")
    assert lake.number("dirty.orphans") == 1
    return orphan


def test_abort(either: Lake, tmp_path: Path) -> None:
    (either.path / "dir").mkdir()
    crash_while_writing(either, "dir/model", noise(LARGE_BYTES), tmp_path)
    assert "dir/model" not in either.outside.objects()
    assert either.outside.uploads() == ["dir/model"]
    either.mount()
    assert list((either.path / "dir").iterdir()) == []
    orphan = orphan_of(either, "dir/model")
    listed = either.cli("orphans", str(either.path))
    assert str(orphan["id"]) in listed.stdout
    assert "dir/model" in listed.stdout
    (row,) = json.loads(either.cli("orphans", str(either.path), "--json").stdout)["orphans"]
    assert (row["id"], row["path"]) == (orphan["id"], "dir/model")
    aborted = either.cli("orphans", str(either.path), "--abort", str(orphan["id"]), "--finish", "0" * 32, "--json")
    assert aborted.returncode == 1, "there is no such orphan"
    answer = json.loads(aborted.stdout)
    assert (answer["aborted"], answer["finished"], list(answer["failed"])) == ([orphan["id"]], [], ["0" * 32])
    assert either.outside.uploads() == []
    assert either.staged_files() == []
    assert either.unfinished() == []
    assert "dir/model" not in either.outside.objects()
    assert either.cli("orphans", str(either.path)).stdout == "no orphans\n"
    (either.path / "dir" / "model").write_bytes(b"written again")
    assert either.outside.read("dir/model") == b"written again"


def test_finish(either: Lake, tmp_path: Path) -> None:
    data = noise(LARGE_BYTES + 4321)
    crash_while_writing(either, "model", data, tmp_path)
    either.mount()
    orphan = orphan_of(either, "model")
    assert orphan["bytes_done"] >= LARGE_BYTES // PART_BYTES * PART_BYTES - PART_BYTES
    finished = either.cli("orphans", str(either.path), "--finish", str(orphan["id"]))
    assert finished.returncode == 0, finished.stderr
    assert either.outside.read("model") == data
    assert either.outside.uploads() == []
    assert either.unfinished() == []
    assert either.staged_files() == []
    assert (either.path / "model").read_bytes() == data, "this node sees it at once"


@pytest.mark.parametrize("how", ["finish", pytest.param("abort", marks=pytest.mark.long)])
def test_told_at_the_mount(s3: Lake, tmp_path: Path, how: str) -> None:
    data = noise(LARGE_BYTES)
    crash_while_writing(s3, "model", data, tmp_path)
    s3.mount("--orphans", how)
    assert s3.unfinished() == []
    assert s3.staged_files() == []
    assert s3.outside.uploads() == []
    plain = {key: size for key, size in s3.outside.objects().items() if not key.startswith(".lakefs/")}
    assert plain == ({"model": len(data)} if how == "finish" else {})
    assert [entry.name for entry in s3.path.iterdir()] == (["model"] if how == "finish" else [])
    if how == "finish":
        assert s3.outside.read("model") == data


def test_orphans_are_kept_until_somebody_decides(lake: Lake, tmp_path: Path) -> None:
    data = noise(2 * MIB)
    crash_while_writing(lake, "small", data, tmp_path)
    for _ in range(2):
        lake.mount()
        orphan_of(lake, "small")
        lake.umount()
    assert lake.outside.objects() == {}
    lake.mount("--orphans", "finish")
    assert lake.outside.read("small") == data


def test_a_new_version_of_a_file_shows_the_old_one_until_it_is_finished(s3: Lake, tmp_path: Path) -> None:
    old, new = noise(3 * MIB, 1), noise(LARGE_BYTES, 2)
    (s3.path / "model").write_bytes(old)
    crash_while_writing(s3, "model", new, tmp_path)
    assert s3.outside.read("model") == old
    s3.mount()
    assert (s3.path / "model").read_bytes() == old
    orphan = orphan_of(s3, "model")
    done = s3.cli("orphans", str(s3.path), "--finish", str(orphan["id"]))
    assert done.returncode == 0, done.stderr
    finished = s3.outside.read("model")
    assert len(finished) == orphan["bytes"] >= 2 * PART_BYTES, "what was recorded when the last part went up"
    assert finished == new[: len(finished)]
    assert s3.outside.uploads() == []


def test_finishing_does_not_overwrite_what_somebody_else_wrote_since(s3: Lake, tmp_path: Path) -> None:
    data = noise(LARGE_BYTES)
    crash_while_writing(s3, "model", data, tmp_path)
    s3.outside.replace("model", b"theirs")
    s3.mount()
    orphan = orphan_of(s3, "model")
    refused = s3.cli("orphans", str(s3.path), "--finish", str(orphan["id"]))
    assert refused.returncode == 1
    assert "changed by another client" in refused.stderr
    assert s3.outside.read("model") == b"theirs"
    orphan_of(s3, "model")
    assert s3.cli("orphans", str(s3.path), "--all", "abort").returncode == 0
    assert s3.outside.uploads() == []
    assert s3.outside.read("model") == b"theirs"


def test_closed_files_are_safe_whatever_happens_to_the_node(s3: Lake) -> None:
    """Killed right after close(), and the cache directory lost: the promise was about the store."""
    files = {f"f{number}": noise(1000 * (number + 1), number) for number in range(20)}
    for name, data in files.items():
        (s3.path / name).write_bytes(data)
    s3.kill()
    shutil.rmtree(s3.cache_dir)
    assert {name: s3.outside.read(name) for name in s3.outside.objects()} == files
    s3.mount()
    assert {path.name: path.read_bytes() for path in s3.path.iterdir()} == files


def test_an_orphan_whose_metadata_cache_is_lost_is_still_told(lake: Lake, tmp_path: Path) -> None:
    data = noise(2 * MIB, 3)
    crash_while_writing(lake, "dir-less", data, tmp_path)
    shutil.rmtree(lake.cache_dir / "meta")
    lake.mount()
    orphan = orphan_of(lake, "dir-less")
    (staged,) = lake.staged_files()
    assert staged == orphan["id"]
    assert (lake.cache_dir / "staging" / staged).read_bytes() == data
    assert lake.cli("orphans", str(lake.path), "--abort", staged).returncode == 0
    assert lake.staged_files() == []


def test_a_crash_with_the_cache_dir_of_many_files(make_lake: LakeMaker) -> None:
    """Blocks and names that were cached before the crash serve after it."""
    lake = make_lake("file").mount()
    for number in range(10):
        lake.outside.replace(f"d/{number}", noise(200_000, number))
    assert [len(path.read_bytes()) for path in sorted((lake.path / "d").iterdir())] == [200_000] * 10
    lake.kill()
    lake.mount()
    for number in range(10):
        assert (lake.path / "d" / str(number)).read_bytes() == noise(200_000, number)
    assert lake.number("cache.damaged") == 0
