"""More files open for writing than the daemon may have descriptors."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import CLI, Lake, noise

PIECE_BYTES = 3000
CLOSERS = 16


@pytest.fixture(autouse=True)
def many_files_here() -> Iterator[None]:
    """This process holds the other end of every file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def limited(lake: Lake, descriptors: int) -> Lake:
    """Mounted; other commands have no limit."""
    lake.command = ["prlimit", f"--nofile={descriptors}:{descriptors}", *CLI]
    done = lake.try_mount("--delete-after", "0")
    assert done.returncode == 0, done.stderr
    lake.command = CLI
    lake.pid = lake.number("daemon.pid")
    return lake


def held_by(lake: Lake) -> int:
    return len(os.listdir(f"/proc/{lake.pid}/fd"))


def content(index: int) -> bytes:
    return noise(2 * PIECE_BYTES, index)


@pytest.mark.long  # staging/test_descriptor_pool.py shows it
@pytest.mark.parametrize(
    ("store", "limit", "files"),
    [("file", 256, 400), ("seaweedfs", 256, 150)],
)
def test_daemon_more_open_files_than_descriptors_stores_all(
    make_lake: LakeMaker, store: str, limit: int, files: int
) -> None:
    lake = limited(make_lake(store), limit)
    names = [lake.path / f"f{index:04}" for index in range(files)]
    opened = [os.open(name, os.O_WRONLY | os.O_CREAT) for name in names]
    try:
        for begin in (0, PIECE_BYTES):
            for index, fd in enumerate(opened):
                os.pwrite(fd, content(index)[begin : begin + PIECE_BYTES], begin)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the kernel sends what it has
        assert lake.number("dirty.files") == files, "the control socket answers"
        assert held_by(lake) <= limit * 3 // 4
        assert lake.number("staging.files_open") <= lake.number("staging.files_open_max") == limit // 4
        with ThreadPoolExecutor(CLOSERS) as pool:
            closing = [pool.submit(os.close, opened.pop()) for _ in range(files)]
            assert lake.number("daemon.pid") == lake.pid
            for each in closing:
                each.result()
    finally:
        for fd in opened:
            os.close(fd)
    assert lake.number("dirty.files") == 0
    assert held_by(lake) <= limit * 3 // 4
    lake.umount()
    shutil.rmtree(lake.cache_dir)
    limited(lake, limit)
    for index, name in enumerate(names):
        assert name.read_bytes() == content(index)
    assert held_by(lake) <= limit * 3 // 4


def test_mount_few_descriptors_is_refused(make_lake: LakeMaker) -> None:
    lake = make_lake("file")
    lake.command = ["prlimit", "--nofile=128:128", *CLI]
    refused = lake.try_mount()
    assert refused.returncode == 1
    assert "a process may open 128 files here, and a mount needs 256" in refused.stderr
