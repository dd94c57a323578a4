"""`--memory` with hundreds of readers at once, and `--download-limit`."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import CLI, number

MIB = 1 << 20
READ_BYTES = 128 << 10


def peak_bytes(pid: int) -> int:
    """Most resident memory of a process since it began."""
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) << 10


@pytest.mark.long
@pytest.mark.parametrize("memory_mib", [192, 256])
def test_500_readers_at_once_stay_below_it(make_lake: LakeMaker, memory_mib: int) -> None:
    readers, size = 500, 4 * MIB
    lake = make_lake("seaweedfs", "--memory", f"{memory_mib}MiB", "--pack", "never")
    lake.command = list(CLI)  # a daemon that was forked from a server has bounds of the allocator too late
    lake.mount()
    data = os.urandom(size)
    for index in range(readers):
        (lake.path / f"{index}").write_bytes(data)
    lake.umount()
    shutil.rmtree(lake.cache_dir)
    lake.mount()
    ready = Barrier(readers)

    def read(index: int) -> bool:
        fd = os.open(lake.path / f"{index}", os.O_RDONLY)
        try:
            ready.wait(60)
            return b"".join(iter(lambda: os.read(fd, READ_BYTES), b"")) == data
        finally:
            os.close(fd)

    with ThreadPoolExecutor(readers) as pool:
        assert all(pool.map(read, range(readers)))
    assert number(lake.stats(), "store.bytes.read") >= readers * size
    assert peak_bytes(lake.pid) < memory_mib * MIB


def test_reads_keep_to_the_download_limit_and_names_do_not_wait(make_lake: LakeMaker) -> None:
    limit, size, files = 4 * MIB, 2 * MIB, 4
    lake = make_lake("file", "--download-limit", f"{limit}", "--pack", "never").mount()
    data = os.urandom(size)
    for index in range(files):
        lake.outside.replace(f"d/{index}", data)
    began = time.monotonic()
    with ThreadPoolExecutor(files) as pool:
        reading = [pool.submit((lake.path / f"d/{index}").read_bytes) for index in range(files)]
        assert len(os.listdir(lake.path / "d")) == files
        listed_s = time.monotonic() - began
        assert all(each.result() == data for each in reading)
    took_s = time.monotonic() - began
    assert took_s > (files - 1) * size / limit * 0.95 > listed_s
    assert number(lake.stats(), "store.bytes.read") >= files * size
    cache = lake.stats()["cache"]
    assert isinstance(cache, dict)
    assert cache["throttled_s"] > 0.5
