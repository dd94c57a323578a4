"""Listings of large directories: their cost in FUSE requests and store requests, with and without the C library.

LAKEFS_TEST_LISTED_FILES (default 20000) raises the size; LAKEFS_TEST_FOUND_FILES (150000) that of the lake whose names
must not stay in memory.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from lakefs_fuse.commits.archive import Member, build, commit_key
from lakefs_fuse.commits.record import THIS, Put, Record, encode
from scripts.measure_names import make_lake as make_names
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, Lake, given_away, number, scale

FILES = scale("LISTED_FILES", 20_000)
WRITER = "0badcafe"
NAMES_FOR_A_READDIR_MIN = 1000
FOUND = scale("FOUND_FILES", 150_000)
GROWTH_BYTES_MAX = 10 * MIB
"""Beyond what the database's cache holds, which is bounded; 80 bytes a name with the default size."""
RSS_BYTES_MAX = 200 * MIB


def give(lake: Lake, names: list[str], time_ns: int) -> None:
    """One commit of so many small files, as another program would write it."""

    def make_record(offsets: list[int]) -> bytes:
        puts = [
            Put(name, THIS, offset, 1, 0o640, 5, 6, 1_600_000_000_000_000_000 + at)
            for at, (name, offset) in enumerate(zip(names, offsets, strict=True))
        ]
        return encode(Record(writer=WRITER, time=time_ns, operations=[*puts]))

    members = [Member(name, b"x", 1) for name in names]
    lake.outside.replace(commit_key(time_ns, WRITER), build(members, make_record))


def attributes(directory: Path) -> dict[str, tuple[object, ...]]:
    with os.scandir(directory) as entries:
        found = [
            (entry.name, entry.inode(), entry.is_dir(follow_symlinks=False), entry.is_symlink()) for entry in entries
        ]
    seen: dict[str, tuple[object, ...]] = {}
    for name, inode, is_dir, is_link in found:
        status = os.lstat(directory / name)
        assert name not in seen
        seen[name] = (
            inode, is_dir, is_link, status.st_ino, status.st_mode, status.st_nlink, status.st_uid, status.st_gid,
            status.st_size, status.st_blocks, status.st_blksize, status.st_mtime_ns, status.st_atime_ns,
            status.st_ctime_ns,
        )  # fmt: skip
    return seen


def test_the_library_and_python_write_the_same_entries(make_lake: LakeMaker) -> None:
    """Of every kind: with defaults and without, before 1970, links, directories, files that others put or packed."""
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "1h").mount()
    directory = lake.path / "d"
    directory.mkdir()
    for name in ("a", "ünï code", "n" * 255, "mode", "old"):
        (directory / name).write_bytes(name.encode())
    (directory / "mode").chmod(0o751)
    owner = given_away(directory / "mode", 12, 34)
    os.utime(directory / "old", ns=(-1_500_000_001, -1_500_000_001))
    (directory / "sub").mkdir(0o700)
    os.symlink("a", directory / "link")
    lake.umount()
    give(lake, [f"d/packed-{at}" for at in range(50)], time.time_ns())
    for at in range(50):
        lake.outside.replace(f"d/plain-{at}", b"x" * at * 300)
    shutil.rmtree(lake.cache_dir)
    lake.mount()
    ours = attributes(directory)
    assert len(ours) == 107
    assert lake.number("upcalls.lookup") == 1
    lake.umount()
    lake.env["LAKEFS_FUSE_HOOKS"] = "off"
    lake.mount()
    assert attributes(directory) == ours
    assert ours["mode"][4] == 0o100751
    assert ours["mode"][6:8] == owner
    assert ours["old"][11] == -1_500_000_001


def test_a_file_that_is_being_written_is_listed_as_it_is(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "1h").mount()
    (lake.path / "done").write_bytes(b"done")
    with (lake.path / "open").open("wb", buffering=0) as file:
        file.write(b"x" * 1000)
        os.fdatasync(file.fileno())
        assert {name: status[8] for name, status in attributes(lake.path).items()} == {"done": 4, "open": 1000}


def test_many_packed_names_cost_few_upcalls(make_lake: LakeMaker) -> None:
    """A thousand names and more for each READDIR, everything that `stat` wants with them, and no request for names
    that a commit told."""
    lake = make_lake("file", "--metadata-ttl", "1h", "--refresh", "1h")
    names = [f"f{at:08d}" for at in range(FILES)]
    give(lake, [f"d/{name}" for name in names], time.time_ns() - 10**10)
    lake.mount()
    os.stat(lake.path / "d")
    before = lake.stats()
    with os.scandir(lake.path / "d") as entries:
        assert sorted(entry.name for entry in entries) == names
    listed = lake.stats()
    assert number(listed, "upcalls.readdir") - number(before, "upcalls.readdir") <= FILES / NAMES_FOR_A_READDIR_MIN
    assert number(listed, "store.requests.list") - number(before, "store.requests.list") <= 1
    for name in names:
        assert os.stat(lake.path / "d" / name).st_size == 1
    looked = lake.stats()
    assert looked["store"] == listed["store"]
    for upcall in ("lookup", "getattr"):
        assert number(looked, f"upcalls.{upcall}") == number(listed, f"upcalls.{upcall}")
    for name in names[:100]:
        assert not os.path.exists(lake.path / "d" / f"{name}.absent")
    absent = lake.stats()
    assert absent["store"] == listed["store"], "names that a complete listing does not have are not asked for"
    for name in names[:100]:
        assert not os.path.exists(lake.path / "d" / f"{name}.absent")
    assert lake.number("upcalls.lookup") == number(absent, "upcalls.lookup"), "the kernel remembers what is not there"


def resident_after_find(make_lake: LakeMaker, names: int) -> tuple[int, int]:
    """Resident bytes of a fresh mount that was walked to the end; in all, and without the database's cache."""
    lake = make_lake("file", "--metadata-ttl", "1d", "--refresh", "1h")
    shutil.rmtree(lake.outside.root)  # type: ignore[attr-defined]
    make_names(lake.outside.root, names, names // 1000)  # type: ignore[attr-defined]
    lake.mount()
    before = lake.number("store.requests.list")
    assert sum(len(files) for _, _, files in os.walk(lake.path)) == names
    assert lake.number("store.requests.list") == before
    rss = lake.number("memory.rss")
    cached = sum(lake.number(f"namespace.rocksdb.{name}") for name in ("block_cache_usage", "cur_size_all_mem_tables"))
    lake.umount()
    return rss, rss - cached


@pytest.mark.long
def test_names_do_not_stay_in_memory(make_lake: LakeMaker) -> None:
    _, few = resident_after_find(make_lake, FOUND // 10)
    rss, many = resident_after_find(make_lake, FOUND)
    assert rss < RSS_BYTES_MAX
    assert many - few < GROWTH_BYTES_MAX
