"""Mounts that start from an index: `lakefs-fuse snapshot`, and the cost of a fresh node's first listing.

LAKEFS_TEST_INDEXED_FILES (default 4000; 2000 in `make test`) raises the size.
"""

from __future__ import annotations

import json
import os
import shutil
import time

import pytest

from lakefs_fuse.commits.archive import Member, build, commit_key
from lakefs_fuse.commits.record import THIS, Operation, Put, Record, Remove, encode
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake, noise, scale

FILES = scale("INDEXED_FILES", 4000, short=2000)
DIRECTORIES = max(10, FILES // 1000)
PACKS = max(8, FILES // 12_500)
WRITER = "0badcafe"
INDEX = ".lakefs/index/"
FIRST_LS_REQUESTS_MAX = 20
RSS_BYTES_MAX = 300 << 20


def path_of(number: int) -> str:
    return f"data/d{number % DIRECTORIES:04d}/f{number:07d}"


def content(number: int) -> bytes:
    return b"%d" % number


def give(lake: Lake, numbers: range, time_ns: int, *more: Operation) -> None:
    """One commit of these files, as another program would write it."""

    def make_record(offsets: list[int]) -> bytes:
        puts = [
            Put(path_of(number), THIS, offset, len(content(number)), 0o664, 5, 6, 1_600_000_000_000_000_000 + number)
            for number, offset in zip(numbers, offsets, strict=True)
        ]
        return encode(Record(writer=WRITER, time=time_ns, operations=[*puts, *more]))

    members = [Member(path_of(number), content(number), len(content(number))) for number in numbers]
    lake.outside.replace(commit_key(time_ns, WRITER), build(members, make_record))


def fill(lake: Lake) -> None:
    begin = time.time_ns() - 600_000_000_000
    for pack in range(PACKS):
        give(lake, range(pack * FILES // PACKS, (pack + 1) * FILES // PACKS), begin + pack)
    for number in range(30):
        lake.outside.replace(f"plain/{number:02d}", noise(100, number))


def snapshot(lake: Lake, *options: str) -> dict[str, int]:
    done = lake.cli("snapshot", lake.source, "--json", *lake.options, *options, timeout_s=1200)
    assert done.returncode == 0, done.stderr
    summary: dict[str, int] = json.loads(done.stdout)
    return summary


def requests(lake: Lake) -> int:
    store = lake.stats()["store"]
    assert isinstance(store, dict)
    return sum(store["requests"].values())


def memory(lake: Lake) -> int:
    return lake.number("memory.rss")


def walk(lake: Lake) -> int:
    return sum(len(files) for _, _, files in os.walk(lake.path))


@pytest.fixture(params=["file", pytest.param("seaweedfs", marks=pytest.mark.long)])
def lake(request: pytest.FixtureRequest, make_lake: LakeMaker) -> Lake:
    made = make_lake(request.param)
    fill(made)
    return made


def test_the_first_listing_of_a_fresh_node(lake: Lake) -> None:
    """A handful of requests, however many commits there are; then every name, attribute and byte is right."""
    summary = snapshot(lake)
    assert summary["names"] == FILES + 30 + DIRECTORIES + 2
    lake.mount()
    assert sorted(os.listdir(lake.path)) == ["data", "plain"]
    assert requests(lake) <= FIRST_LS_REQUESTS_MAX
    assert memory(lake) < RSS_BYTES_MAX
    before = requests(lake)
    assert walk(lake) == FILES + 30
    assert requests(lake) - before <= DIRECTORIES + 5
    assert memory(lake) < RSS_BYTES_MAX
    for number in (0, FILES // 2, FILES - 1):
        path = lake.path / path_of(number)
        assert path.read_bytes() == content(number)
        found = path.stat()
        assert (found.st_mode & 0o7777, found.st_mtime_ns) == (0o664, 1_600_000_000_000_000_000 + number)
    assert (lake.path / "plain" / "07").read_bytes() == noise(100, 7)
    (lake.path / "data" / "d0000" / "new").write_bytes(b"new")
    (lake.path / path_of(1)).unlink()
    lake.remount()
    assert walk(lake) == FILES + 30
    assert (lake.path / "data" / "d0000" / "new").read_bytes() == b"new"


def test_the_next_index_has_what_changed(lake: Lake) -> None:
    """And the mount that was there all along goes on."""
    snapshot(lake)
    lake.mount("--refresh", "0.3")
    shutil.rmtree(lake.path / "data" / "d0001")
    (lake.path / "data" / "d0000").rename(lake.path / "moved")
    (lake.path / "made").mkdir()
    os.symlink("moved", lake.path / "link")
    expected = sorted(os.listdir(lake.path / "moved"))
    lake.umount()
    summary = snapshot(lake)
    shutil.rmtree(lake.cache_dir)
    lake.mount()
    assert sorted(os.listdir(lake.path)) == ["data", "link", "made", "moved", "plain"]
    assert requests(lake) <= FIRST_LS_REQUESTS_MAX
    assert sorted(os.listdir(lake.path / "link")) == expected
    assert (lake.path / "moved" / expected[0]).read_bytes() == content(int(expected[0][1:]))
    assert not (lake.path / "data" / "d0001").exists()
    assert summary["names"] == sum(len(names) + len(files) for _, names, files in os.walk(lake.path))
    kept = {key.removeprefix(INDEX)[:16] for key in index_objects(lake)}
    assert len(kept) == 2


def index_objects(lake: Lake) -> list[str]:
    if lake.source.startswith("file://"):
        root = lake.source.removeprefix("file://")
        return [
            f"{INDEX}{time}/{name}"
            for time in os.listdir(f"{root}/{INDEX}")
            for name in os.listdir(f"{root}/{INDEX}{time}")
        ]
    return [key for key in lake.outside.objects() if key.startswith(INDEX)]


def test_a_damaged_index_costs_time_and_nothing_else(lake: Lake) -> None:
    """It is told in the log, and the names come from the commits."""
    snapshot(lake)
    key = next(key for key in index_objects(lake) if key.endswith("0000.sst"))
    data = bytearray(lake.outside.read(key))
    data[len(data) // 2] ^= 1
    lake.outside.replace(key, bytes(data))
    lake.mount()
    assert "is not used" in lake.log()
    assert walk(lake) == FILES + 30


def test_a_node_finds_what_was_committed_since(lake: Lake) -> None:
    snapshot(lake, "--cache-dir", str(lake.cache_dir.parent / "kept"))
    now = time.time_ns() - 10**9
    give(lake, range(FILES, FILES + 5), now, Remove(path_of(2)))
    lake.mount()
    assert not (lake.path / path_of(2)).exists()
    assert (lake.path / path_of(FILES)).read_bytes() == content(FILES)
    assert walk(lake) == FILES + 5 - 1 + 30
    again = snapshot(lake, "--cache-dir", str(lake.cache_dir.parent / "kept"))
    assert again["names"] == FILES + 5 - 1 + 30 + DIRECTORIES + 2
    refused = lake.cli("snapshot", lake.source, "--cache-dir", str(lake.cache_dir), *lake.options)
    assert refused.returncode == 1
    assert "in use" in refused.stderr
