"""Mounting right after an unmount, and unmounting while the store does not answer."""

from __future__ import annotations

import subprocess
import time

import pytest

from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import LARGE_BYTES, MIB, Lake, eventually, noise
from tests.servers import Server

FOR_EVER = 1_000_000


def detach(lake: Lake) -> None:
    """Take the mount away as umount(8) does: the daemon goes on and stores what is left."""
    subprocess.run(["fusermount3", "-u", str(lake.path)], check=True, capture_output=True)


def draining(make_lake: LakeMaker, store: tuple[Server, Faults]) -> Lake:
    """A lake that was unmounted with a large file under write-back, which takes its daemon some seconds to store."""
    lake = make_lake("seaweedfs", "--durability", "writeback", through=store[0]).mount()
    store[1].bytes_s_max = 10 * MIB
    (lake.path / "large").write_bytes(noise(LARGE_BYTES))
    detach(lake)
    return lake


def test_mount_after_umount_waits_for_the_uploads(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    lake = draining(make_lake, faults)
    before = lake.pid
    done = lake.try_mount()
    assert done.returncode == 0, done.stderr
    assert f"waiting for the daemon that served {lake.path} before (pid {before})" in done.stderr
    lake.pid = lake.number("daemon.pid")
    assert lake.pid != before
    assert lake.outside.read("large") == noise(LARGE_BYTES)
    assert lake.unfinished() == []


def test_mount_on_a_cache_directory_in_use_names_its_mount(make_lake: LakeMaker) -> None:
    lake, other = make_lake("file").mount(), make_lake("file")
    refused = other.try_mount("--cache-dir", str(lake.cache_dir))
    assert refused.returncode == 1
    assert (
        f"the cache directory {lake.cache_dir} is in use by the mount at {lake.path} (pid {lake.pid})" in refused.stderr
    )
    assert f"`lakefs-fuse umount {lake.path}`" in refused.stderr


def test_mount_after_a_lazy_detach_in_use_is_refused(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount()
    (lake.path / "f").write_bytes(b"open")
    with (lake.path / "f").open("rb"):
        subprocess.run(["fusermount3", "-u", "-z", str(lake.path)], check=True, capture_output=True)
        refused = lake.try_mount()
    assert refused.returncode == 1
    assert "detached while its files were open" in refused.stderr


@pytest.mark.long  # daemon/test_mount_daemon.py shows it
def test_umount_does_not_wait_for_a_store_that_hangs(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    """Nothing is to be uploaded; what waits to be deleted is deleted by the next mount."""
    lake = make_lake("seaweedfs", "--pack", "never", "--refresh", "0.3", through=faults[0]).mount()
    (lake.path / "a").write_bytes(b"bytes")
    lake.sync()
    for method in ("DELETE", "POST"):
        faults[1].hang(FOR_EVER, method=method)
    (lake.path / "a").unlink()
    eventually(lambda: faults[1].injected["hang"] > 0, "the object is being deleted")
    began_s = time.monotonic()
    lake.umount()
    assert time.monotonic() - began_s < 15  # A request is given up after 20 s, and tried again for 60 s.
    faults[1].clear()
    lake.mount()
    lake.settle()
    assert lake.plain() == {}
