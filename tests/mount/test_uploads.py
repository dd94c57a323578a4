"""Uploads of parts: during the write, in any order, with every slot in use."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.mount.conftest import LakeMaker, Place
from tests.mount.lakes import LARGE_BYTES, MIB, PART_BYTES, Stats, eventually, noise, number, start_writeback
from tests.tiers import sized


def test_backwards_in_pieces(here: Place) -> None:
    data = noise(LARGE_BYTES)
    fd = os.open(here.path / "f", os.O_CREAT | os.O_WRONLY, 0o644)
    for at in range(len(data) - MIB, -1, -MIB):
        os.pwrite(fd, data[at : at + MIB], at)
    os.close(fd)
    assert here.stored("f") == data
    assert here.outside.uploads() == []
    assert (here.path / "f").read_bytes() == data


KINDS = ("part", "other", "put")


def idle_s(stats: Stats) -> float:
    """Time in which a complete part waited although an upload could have begun."""
    uploads = stats["upload"]
    assert isinstance(uploads, dict)
    return float(uploads["idle_with_work_s"])


def test_parts_go_up_before_close(here_with_hooks: Place) -> None:
    here = here_with_hooks
    data = noise(LARGE_BYTES)
    before = here.lake.stats()
    fd = os.open(here.path / "f", os.O_CREAT | os.O_WRONLY, 0o644)
    for at in range(0, len(data), MIB):
        os.write(fd, data[at : at + MIB])
    start_writeback(fd)
    eventually(lambda: here.count("upload.parts") > number(before, "upload.parts"), "the first part goes up")
    assert here.names() == set()
    assert here.outside.uploads() == [here.prefix + "f"]
    os.close(fd)
    stats = here.lake.stats()
    assert here.stored("f") == data
    parts = -(-len(data) // PART_BYTES)
    cost = {name: number(stats, f"store.requests.{name}") - number(before, f"store.requests.{name}") for name in KINDS}
    assert cost == {"part": parts, "other": 2, "put": 0}, "each part goes up once"
    assert idle_s(stats) - idle_s(before) < 0.5


def test_rewritten_parts_are_sent_again(here: Place) -> None:
    """A header that is written last, as many formats do."""
    data = bytearray(noise(LARGE_BYTES))
    parts = here.count("upload.parts")
    fd = os.open(here.path / "f", os.O_CREAT | os.O_RDWR)
    os.pwrite(fd, data, 0)
    start_writeback(fd)
    eventually(lambda: here.count("upload.parts") > parts, "parts go up")
    data[:8] = b"HEADER!!"
    os.pwrite(fd, b"HEADER!!", 0)
    assert os.pread(fd, 8, 0) == b"HEADER!!"
    os.close(fd)
    assert here.stored("f") == data


def test_a_change_of_a_large_object_sends_what_changed(here: Place) -> None:
    """Parts that nobody touched are copied by the store."""
    data = bytearray(noise(LARGE_BYTES))
    (here.path / "f").write_bytes(data)
    before = here.lake.stats()
    with (here.path / "f").open("r+b", buffering=0) as stream:
        stream.seek(PART_BYTES + 5)
        stream.write(b"changed")
    data[PART_BYTES + 5 : PART_BYTES + 12] = b"changed"
    assert here.stored("f") == data
    stats = here.lake.stats()
    sent = number(stats, "store.bytes.written") - number(before, "store.bytes.written")
    assert PART_BYTES <= sent < PART_BYTES + 4096, "and perhaps announcements"
    copied = number(stats, "upload.parts_copied") - number(before, "upload.parts_copied")
    assert copied == -(-len(data) // PART_BYTES) - 1


def test_appending_to_a_large_object(here: Place) -> None:
    data = noise(LARGE_BYTES + 100)
    (here.path / "f").write_bytes(data[:LARGE_BYTES])
    with (here.path / "f").open("ab") as stream:
        stream.write(data[LARGE_BYTES:])
    assert here.stored("f") == data


def test_cutting_a_large_object(here: Place) -> None:
    data = noise(LARGE_BYTES)
    (here.path / "f").write_bytes(data)
    for size in (2 * PART_BYTES + 5, 2 * PART_BYTES, PART_BYTES - 1, 10):
        os.truncate(here.path / "f", size)
        assert here.stored("f") == data[:size]
    assert here.outside.uploads() == []


def test_a_large_sparse_file(here: Place) -> None:
    fd = os.open(here.path / "f", os.O_CREAT | os.O_WRONLY, 0o644)
    os.pwrite(fd, b"end", LARGE_BYTES - 3)
    os.pwrite(fd, b"middle", PART_BYTES - 3)
    os.close(fd)
    expected = bytearray(LARGE_BYTES)
    expected[-3:] = b"end"
    expected[PART_BYTES - 3 : PART_BYTES + 3] = b"middle"
    assert here.stored("f") == expected
    assert here.outside.uploads() == []


def test_a_file_larger_than_staging(make_lake: LakeMaker) -> None:
    """The writer waits for uploads; it neither fails nor fills the disk."""
    pieces, piece, staged = sized(8, 12), PART_BYTES, sized(48, 160)
    lake = make_lake("seaweedfs", "--staging-size", f"{staged}M", "--uploads", "2").mount()
    fd = os.open(lake.path / "f", os.O_CREAT | os.O_WRONLY, 0o644)
    for index in range(pieces):
        os.write(fd, noise(1024, index) * (piece // 1024))
        assert lake.number("staging.bytes") <= staged * MIB
    os.close(fd)
    assert lake.outside.objects() == {"f": pieces * piece}
    stored = lake.outside.read("f")
    for index in range(pieces):
        assert stored[index * piece : index * piece + 1024] == noise(1024, index)
    assert lake.number("memory.rss") < 400 * MIB


def test_many_small_files_at_once(here: Place) -> None:
    """Sixteen open files, closed one after another while others are written: each alone, so each is an object."""
    put = here.lake.puts()
    fds = {f"f{index}": os.open(here.path / f"f{index}", os.O_CREAT | os.O_WRONLY, 0o644) for index in range(16)}
    for name, fd in fds.items():
        os.write(fd, name.encode() * 1000)
    for fd in fds.values():
        os.close(fd)
    assert {name: here.stored(name) for name in here.names()} == {name: name.encode() * 1000 for name in fds}
    assert here.lake.puts() == put + 16


def test_many_small_files_closed_together(here: Place) -> None:
    """Sixteen open files, closed by as many threads: durable when their closes return, with a few PUTs."""
    put, packed = here.lake.puts(), here.count("commits.files_packed")
    fds = {f"f{index}": os.open(here.path / f"f{index}", os.O_CREAT | os.O_WRONLY, 0o644) for index in range(16)}
    for name, fd in fds.items():
        os.write(fd, name.encode() * 1000)
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(os.close, fds.values()))
    assert here.count("dirty.files") == 0
    assert here.lake.puts() <= put + 8
    assert here.count("commits.files_packed") - packed + len(here.names()) == 16
    assert {name: (here.path / name).read_bytes() for name in fds} == {name: name.encode() * 1000 for name in fds}


@pytest.mark.parametrize("sleep_s", [0.0, 0.3])
def test_a_slow_writer_finds_its_parts_uploaded_at_close(here: Place, sleep_s: float) -> None:
    data = noise(2 * PART_BYTES + 10)
    parts = here.count("store.requests.part")
    fd = os.open(here.path / "f", os.O_CREAT | os.O_WRONLY, 0o644)
    os.write(fd, data)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    time.sleep(sleep_s)
    os.close(fd)
    assert here.stored("f") == data
    assert here.count("store.requests.part") == parts + 3
