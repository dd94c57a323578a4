"""`--upload-limit`, and the share that slow or stalled uploads leave to reads."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

import pytest

from lakefs_fuse.control.client import connect
from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, PART_BYTES, Lake, Stats, eventually, noise, number
from tests.servers import Server

LIMIT = 4 * MIB
UPLOADS = 4


def throttled_s(stats: Stats) -> float:
    uploads = stats["upload"]
    assert isinstance(uploads, dict)
    return float(uploads["throttled_s"])


def test_all_uploads_together_keep_to_it(make_lake: LakeMaker) -> None:
    """Parts of one file and files of one PUT at the same time; the program says what it waited for."""
    lake = make_lake("seaweedfs", "--upload-limit", f"{LIMIT}", "--uploads", str(UPLOADS), "--pack", "never").mount()
    before = lake.stats()
    sizes = {"large": PART_BYTES + 5 * MIB, "a": 3 * MIB, "b": 3 * MIB, "c": MIB // 2}
    data = {name: noise(size, seed) for seed, (name, size) in enumerate(sizes.items())}
    began = time.monotonic()
    with ThreadPoolExecutor(len(sizes)) as pool:
        list(pool.map(lambda name: (lake.path / name).write_bytes(data[name]), sizes))
    took = time.monotonic() - began
    stats = lake.stats()
    sent = number(stats, "store.bytes.written") - number(before, "store.bytes.written")
    assert sent >= sum(sizes.values())
    assert 0.8 * LIMIT < sent / took < 1.15 * LIMIT
    assert number(stats, "upload.bytes_s_max") == LIMIT
    assert throttled_s(stats) - throttled_s(before) > took / 2
    assert number(stats, "store.retries") == 0
    for name in sizes:
        assert lake.outside.read(name) == data[name]


@pytest.mark.long  # store/test_rate_limit.py shows it
def test_a_small_file_does_not_wait_for_large_ones(make_lake: LakeMaker) -> None:
    """It shares the limit with one that goes up, instead of waiting for its end. (A free slot it needs.)"""
    lake = make_lake("seaweedfs", "--upload-limit", f"{2 * MIB}", "--uploads", "2", "--pack", "never").mount()
    with ThreadPoolExecutor(1) as pool:
        large = pool.submit((lake.path / "large").write_bytes, noise(12 * MIB))
        eventually(lambda: lake.number("upload.bytes_s_max") > 0 and throttled_s(lake.stats()) > 0, "it goes up")
        began = time.monotonic()
        (lake.path / "small").write_bytes(b"small")
        os.mkdir(lake.path / "directory")
        lake.sync()
        took = time.monotonic() - began
        assert not large.done()
        assert took < 2
        large.result()


@pytest.mark.long
def test_packs_over_a_slow_way_are_stored_in_time_and_sent_once(
    make_lake: LakeMaker, faults: tuple[Server, Faults]
) -> None:
    """40 MiB of small files at 256 KiB/s, over connections that last no longer than 30 s, as some proxies have it."""
    through, controls = faults
    options = ("--durability", "writeback", "--upload-limit", "256KiB/s")
    lake = make_lake("seaweedfs", *options, through=through).mount()
    data = {f"f{index}": noise(MIB // 16, index) for index in range(640)}
    controls.clear()
    controls.request_s_max = 30.0
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: (lake.path / name).write_bytes(data[name]), data))
    eventually(lambda: lake.number("commits.packs") >= 1, "the first pack is stored", 60.0)
    eventually(lambda: lake.number("writeback.files") == 0, "all is stored", 400.0)
    assert controls.bytes_forwarded <= 1.1 * sum(map(len, data.values()))
    assert lake.number("store.retries") == 0
    assert "took long" not in lake.log()
    lake.remount(empty_cache=True)
    assert {name: (lake.path / name).read_bytes() for name in os.listdir(lake.path)} == data


def test_reads_are_not_limited(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", "--upload-limit", f"{MIB}").mount()
    data = noise(8 * MIB)
    lake.outside.replace("data", data)
    began = time.monotonic()
    assert (lake.path / "data").read_bytes() == data
    assert time.monotonic() - began < 4
    assert lake.outside.objects() == {"data": len(data)}


@contextmanager
def hanging_uploads(lake: Lake, controls: Faults) -> Iterator[None]:
    """Every slot is taken by an upload that gets no answer, and as many files wait for one."""
    controls.hang(1000, method="PUT")
    with ThreadPoolExecutor(2 * UPLOADS) as pool:
        writers = [
            pool.submit((lake.path / f"w{index}").write_bytes, noise(2 * MIB, index)) for index in range(2 * UPLOADS)
        ]
        try:
            eventually(lambda: controls.injected["hang"] >= UPLOADS, "uploads hang")
            yield
            assert not any(writer.done() for writer in writers)
        finally:
            controls.clear()
            wait(writers)
        for writer in writers:
            writer.result()


def read_some(lake: Lake, names: list[str], data: bytes) -> tuple[int, float]:
    """GETs for cold files one after another, and the median of their seconds."""
    gets, took = gets_of(lake), []
    for name in names:
        began = time.monotonic()
        assert (lake.path / name).read_bytes() == data
        took.append(time.monotonic() - began)
    return gets_of(lake) - gets, statistics.median(took)


def gets_of(lake: Lake) -> int:
    """Asked from here: a child process closes what it inherits, and waits for the upload as whoever closes does."""
    daemon = connect(str(lake.path))
    assert daemon is not None
    with daemon:
        return number(daemon.statistics(), "store.requests.get")


def test_reads_go_on_while_every_upload_hangs(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    through, controls = faults
    lake = make_lake("seaweedfs", "--uploads", str(UPLOADS), "--pack", "never", through=through)
    data = noise(3 * MIB)
    names = [f"r{index}" for index in range(14)]
    for name in names:
        lake.outside.replace(name, data)
    lake.mount()
    assert set(os.listdir(lake.path)) == set(names)
    read_some(lake, names[:2], data)
    alone = read_some(lake, names[2:8], data)
    with hanging_uploads(lake, controls):
        beside = read_some(lake, names[8:], data)
        # What is being written can be read as well: it is here.
        assert (lake.path / "w0").read_bytes() == noise(2 * MIB, 0)
    assert beside[0] == alone[0], "as many requests"
    assert beside[1] < 3 * alone[1] + 0.1, "about as fast"
    for index in range(2 * UPLOADS):
        assert lake.outside.read(f"w{index}") == noise(2 * MIB, index)


def test_the_local_store_is_limited_too(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--upload-limit", f"{2 * MIB}").mount()
    began = time.monotonic()
    (lake.path / "f").write_bytes(noise(4 * MIB))
    assert 0.8 * 2 * MIB < 4 * MIB / (time.monotonic() - began) < 1.15 * 2 * MIB
