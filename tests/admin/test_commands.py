"""pack, unpack, gc and fsck as they are typed, on SeaweedFS, while real mounts read."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.commits.archive import build
from lakefs_fuse.commits.maintenance_lease import KEY, LeaseRecord
from lakefs_fuse.commits.record import THIS, Put, Record, encode
from lakefs_fuse.errors import EXIT_BUSY
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Bucket, Lake, eventually, noise
from tests.tiers import sized

FILES = sized(16, 120)
FILE_BYTES = 40_000
REFRESH = ("--refresh", "0.3")
ROUND_PAUSE_S = sized(20, 5) / 100
"""A reader without a pause would take a core from what it is to run beside."""


@functools.cache
def data_of(number: int) -> bytes:
    return noise(FILE_BYTES, seed=number)


def admin(lake: Lake, command: str, *args: str, source: str | None = None) -> subprocess.CompletedProcess[str]:
    """The command on the lake's URL."""
    options = lake.options[: lake.options.index("--region") + 2] if "--region" in lake.options else ()
    return lake.cli(command, source or lake.source, *options, *args)


def summary(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    assert done.returncode in (0, 1), done.stderr
    assert done.stdout, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


@contextlib.contextmanager
def reading(path: Path, numbers: list[int]) -> Iterator[Callable[[], int]]:
    """A program that reads these files again and again, past the kernel's cache; it must never fail."""
    ended, failures, rounds = threading.Event(), [], [0]

    def read() -> None:
        while not ended.is_set():
            for number in numbers:
                try:
                    with open(path / f"{number:04d}", "rb") as file:
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                        if file.read() != data_of(number):
                            failures.append(f"{number}: other bytes")
                except OSError as error:
                    failures.append(f"{number}: {error}")
            rounds[0] += 1
            ended.wait(ROUND_PAUSE_S)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield lambda: rounds[0]
        eventually(lambda: rounds[0] > 1, "a whole round of reading", timeout_s=60)
    finally:
        ended.set()
        thread.join()
    assert failures == []


def only_problem(done: subprocess.CompletedProcess[str]) -> dict[str, object]:
    problems = summary(done)["problems"]
    assert isinstance(problems, list)
    (problem,) = problems
    assert isinstance(problem, dict)
    return problem


def objects(lake: Lake, prefix: str) -> dict[str, int]:
    return {key: size for key, size in lake.outside.objects().items() if key.startswith(prefix)}


@pytest.fixture
def s3(make_lake: LakeMaker) -> Lake:
    return make_lake("seaweedfs", *REFRESH)


def ingest(lake: Lake, tmp_path: Path, directory: str = "data") -> None:
    source = tmp_path / "source"
    source.mkdir()
    for number in range(FILES):
        (source / f"{number:04d}").write_bytes(data_of(number))
    options = lake.options[: lake.options.index("--region") + 2]
    done = lake.cli("ingest", str(source), f"{lake.source}/{directory}", "--lake", lake.source, *options)
    assert done.returncode == 0, done.stderr


def fresh(lake: Lake, numbers: list[int]) -> None:
    """Another node, with nothing in its cache, finds these files and no others."""
    lake.remount(empty_cache=True)
    assert sorted(os.listdir(lake.path / "data")) == [f"{number:04d}" for number in numbers]
    for number in numbers:
        assert (lake.path / "data" / f"{number:04d}").read_bytes() == data_of(number)


@pytest.mark.long  # test_repack.py shows it
def test_packing_and_unpacking_while_a_mount_reads(s3: Lake) -> None:
    for number in range(FILES):
        s3.outside.replace(f"data/{number:04d}", data_of(number))
    s3.mount()
    everything = list(range(FILES))
    with reading(s3.path / "data", everything), open(s3.path / "data" / "0007", "rb") as kept:
        kept.read(100)
        done = summary(s3.cli("pack", str(s3.path / "data"), "--grace", "2s", "--json"))
        assert (done["files"], done["packs"], done["objects_deleted"]) == (FILES, 1, FILES)
        assert objects(s3, "data/") == {}
        assert kept.read() == data_of(7)[100:]
    fresh(s3, everything)
    with reading(s3.path / "data", everything):
        done = summary(admin(s3, "unpack", "--lake", s3.source, "--json", source=f"{s3.source}/data"))
        assert (done["files"], done["left"]) == (FILES, 0)
        assert len(objects(s3, "data/")) == FILES
        assert s3.outside.read("data/0011") == data_of(11)
        time.sleep(1)
        collected = summary(admin(s3, "gc", "--grace", "2s", "--wait", "--json"))
        assert isinstance(collected["bytes_deleted"], int)
        assert collected["bytes_deleted"] > FILES * FILE_BYTES
    fresh(s3, everything)


def test_gc_gives_back_what_is_dead_while_a_mount_reads(s3: Lake, tmp_path: Path) -> None:
    ingest(s3, tmp_path)
    s3.mount()
    left, gone = list(range(0, FILES, 2)), list(range(1, FILES, 2))
    for number in gone:
        (s3.path / "data" / f"{number:04d}").unlink()
    assert s3.cli("flush", str(s3.path)).returncode == 0
    before = sum(objects(s3, ".lakefs/").values())
    with reading(s3.path / "data", left):
        told = summary(admin(s3, "gc", "--dry-run", "--json"))
        assert (told["packs_rewritten"], sum(objects(s3, ".lakefs/").values())) == (1, before)
        done = summary(admin(s3, "gc", "--grace", "2s", "--wait", "--json"))
        assert (done["packs_rewritten"], done["files_moved"]) == (1, len(left))
        assert before - sum(objects(s3, ".lakefs/").values()) > 0.9 * len(gone) * FILE_BYTES
    fresh(s3, left)
    assert admin(s3, "fsck").returncode == 0


@pytest.mark.long
def test_fsck_finds_damage_and_names_the_files(s3: Lake, tmp_path: Path) -> None:
    ingest(s3, tmp_path)
    bucket = s3.outside
    assert isinstance(bucket, Bucket)
    (key,) = objects(s3, ".lakefs/commits/")
    whole = bucket.read(key)
    clean = admin(s3, "fsck")
    assert (clean.returncode, clean.stdout.endswith("clean\n")) == (0, True), clean.stdout + clean.stderr

    flipped = bytearray(whole)
    flipped[whole.index(data_of(5)) + 17] ^= 1
    bucket.replace(key, bytes(flipped))
    done = admin(s3, "fsck", "--json")
    assert done.returncode == 1
    problem = only_problem(done)
    assert (problem["kind"], problem["object"], problem["paths"]) == ("damaged", key, ["data/0005"])

    bucket.replace(key, whole[: whole.index(data_of(9))])
    done = admin(s3, "fsck")
    assert done.returncode == 1
    assert "data/0008" in done.stdout

    bucket.replace(key, whole)
    record = Record(writer="0badcafe", time=1, operations=[Put("astray", THIS, 1 << 30, 10, 0o600, 0, 0, 0)])
    outside = build((), lambda _: encode(record))
    bucket.replace(".lakefs/commits/0000000000000001-0badcafe.zip", outside)
    done = admin(s3, "fsck", "--quick", "--repair")
    assert done.returncode == 1
    assert "0000000000000001-0badcafe.zip: unreadable" in done.stdout
    assert bucket.read(".lakefs/damaged/0000000000000001-0badcafe.zip") == outside
    assert admin(s3, "fsck").returncode == 0

    snapshot = admin(s3, "snapshot")
    assert snapshot.returncode == 0, snapshot.stderr
    bucket.delete(key)
    done = admin(s3, "fsck", "--json")
    assert done.returncode == 1
    problem = only_problem(done)
    assert (problem["kind"], problem["object"]) == ("missing", key)
    assert problem["paths"] == [f"data/{number:04d}" for number in range(FILES)]


def test_command_beside_one_that_changes_the_lake_ends_with_its_holder(s3: Lake) -> None:
    s3.mount()
    record = LeaseRecord(id="1" * 32, command="gc", host="other", process=7, taken_ns=1_700_000_000_000_000_000)
    s3.outside.replace(KEY, msgspec.msgpack.encode(record))
    done = admin(s3, "snapshot")
    assert (done.returncode, done.stdout) == (EXIT_BUSY, "")
    assert "gc (host other, process 7, since 2023-11-14 22:13:20 UTC) is changing this lake: wait" in done.stderr
    assert admin(s3, "gc", "--dry-run").returncode == 0
    s3.outside.delete(KEY)
    assert admin(s3, "snapshot").returncode == 0
    assert objects(s3, KEY) == {}


def test_what_cannot_be_done_is_said(s3: Lake) -> None:
    s3.mount().umount()
    done = admin(s3, "pack", "--lake", s3.source, source=f"{s3.source}/nowhere")
    assert (done.returncode, "nowhere does not exist" in done.stderr) == (1, True)
    done = admin(s3, "gc", "--live-below", "120")
    assert done.returncode == 2
    done = s3.cli("fsck", "file:///nowhere/at/all")
    assert done.returncode == 1
