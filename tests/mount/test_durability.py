"""`close()` and `fsync()`: the bytes are in the store when they return 0; else they return an error."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults import Faults
from tests.mount.conftest import LakeMaker, Place
from tests.mount.failing import RETRY_S, Failing
from tests.mount.lakes import MIB, PART_BYTES, Lake, eventually, noise, sha256
from tests.servers import Server

SAMPLES = [0, 1, 300_000, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES + 12_345]


def close_error(fd: int) -> str:
    with pytest.raises(OSError) as raised:
        os.close(fd)
    return errno.errorcode[raised.value.errno or 0]


def write_new(path: Path, data: bytes) -> int:
    """A descriptor of a new file that holds ``data``."""
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o644)
    at = 0
    while at < len(data):
        at += os.write(fd, data[at : at + MIB])
    return fd


def fail_writes(faults: Faults) -> None:
    """Every PUT and POST from now on."""
    faults.error_500(100_000, method="PUT")
    faults.slow_down(100_000, method="POST")


def test_closed_means_stored(here: Place) -> None:
    for number, size in enumerate(SAMPLES):
        data = noise(size, number)
        os.close(write_new(here.path / f"f{number}", data))
        assert sha256(here.stored(f"f{number}")) == sha256(data)
    assert here.count("dirty.files") == 0
    assert here.outside.uploads() == []
    assert here.lake.staged_files() == []


def test_fsync_means_stored(here: Place) -> None:
    published = here.count("upload.publishes")
    fd = write_new(here.path / "f", noise(100_000, 1))
    os.fsync(fd)
    assert here.stored("f") == noise(100_000, 1)
    os.write(fd, noise(50, 2))
    assert here.stored("f") == noise(100_000, 1)
    os.fdatasync(fd)
    assert here.stored("f") == noise(100_000, 1) + noise(50, 2)
    os.close(fd)
    assert here.count("upload.publishes") == published + 2, "a close with nothing new costs nothing"


def test_fsync_in_the_middle_of_a_large_file(here: Place) -> None:
    data = noise(PART_BYTES * 2 + 1000, 3)
    fd = write_new(here.path / "f", data[: PART_BYTES + 500])
    os.fsync(fd)
    assert here.stored("f") == data[: PART_BYTES + 500]
    os.write(fd, data[PART_BYTES + 500 :])
    os.close(fd)
    assert here.stored("f") == data
    assert here.outside.uploads() == []


@pytest.mark.parametrize(
    "size",
    [pytest.param(100_000, id="one-put"), pytest.param(2 * PART_BYTES + 5, id="parts", marks=pytest.mark.long)],
)
def test_a_store_that_fails_for_longer_makes_close_fail(failing: Failing, size: int) -> None:
    lake, path = failing.lake, failing.path / "f"
    path.write_bytes(b"the version before")
    throttled = lake.number("store.throttled")
    data = noise(size, 4)
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    failing.faults.slow_down(10_000, method="PUT")
    failing.faults.slow_down(10_000, method="POST")
    os.write(fd, data)
    began = time.monotonic()
    assert close_error(fd) == "EIO"
    assert time.monotonic() - began < 20
    assert failing.here.stored("f") == b"the version before"
    (unfinished,) = lake.unfinished()
    assert (unfinished["path"], unfinished["state"], unfinished["bytes"]) == (failing.url("f"), "failed", size)
    assert unfinished["error"]
    assert lake.number("dirty.failed") == 1
    assert lake.number("store.throttled") > throttled
    assert path.read_bytes() == data, "this node goes on seeing what was written"
    still_fails = lake.cli("flush", str(path))
    assert still_fails.returncode == 1
    assert "f: failed" in still_fails.stderr
    in_json = lake.cli("flush", str(path), "--json")
    answer = json.loads(in_json.stdout)
    assert (in_json.returncode, answer["stored"], answer["files"][0]["state"]) == (1, False, "failed")
    assert in_json.stderr.count("\n") == 1
    refused = lake.cli("umount", str(lake.path))
    assert refused.returncode == 1, "it would not leave bytes behind unasked"
    assert os.path.ismount(lake.path)
    failing.faults.clear()
    flushed = lake.cli("flush", str(path), "--json")
    assert flushed.returncode == 0, flushed.stderr
    assert json.loads(flushed.stdout) == {"path": str(path), "stored": True, "files": []}
    assert failing.here.stored("f") == data
    assert lake.unfinished() == []
    assert failing.here.outside.uploads() == []


def test_a_failed_close_can_be_repeated_by_opening_again(failing: Failing) -> None:
    fd = write_new(failing.path / "f", b"first try")
    fail_writes(failing.faults)
    assert close_error(fd) == "EIO"
    assert failing.here.names() == set()
    failing.faults.clear()
    with (failing.path / "f").open("ab") as stream:
        stream.write(b", second try")
    assert failing.here.stored("f") == b"first try, second try"
    assert failing.lake.unfinished() == []


def test_a_file_whose_close_failed_can_be_deleted(failing: Failing) -> None:
    fd = write_new(failing.path / "f", noise(2 * PART_BYTES + 5))
    fail_writes(failing.faults)
    assert close_error(fd) == "EIO"
    failing.faults.clear()
    (failing.path / "f").unlink()
    assert failing.lake.unfinished() == []
    eventually(lambda: failing.lake.staged_files() == [], "what was staged is dropped")
    assert failing.here.names() == set()
    eventually(lambda: failing.here.outside.uploads() == [], "the upload is aborted")


def test_fsync_fails_and_the_next_one_succeeds(failing: Failing) -> None:
    fd = write_new(failing.path / "f", b"bytes")
    failing.faults.reset(10_000, method="PUT")
    with pytest.raises(OSError) as raised:
        os.fsync(fd)
    assert raised.value.errno == errno.EIO
    failing.faults.clear()
    os.fsync(fd)
    assert failing.here.stored("f") == b"bytes"
    os.close(fd)


@pytest.mark.long  # vfs/test_orphans.py shows it
def test_what_failed_survives_a_restart(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    """Unmounted by force while the store is away: the next mount lists the file, and stores it when told."""
    proxied, controls = faults
    lake = make_lake("seaweedfs", "--retry-timeout", RETRY_S, through=proxied).mount()
    data = noise(PART_BYTES + 77, 9)
    fd = write_new(lake.path / "f", data)
    fail_writes(controls)
    assert close_error(fd) == "EIO"
    done = lake.cli("umount", "--lazy", str(lake.path))
    assert done.returncode == 0, done.stderr
    assert "the bytes stay in staging" in done.stderr
    eventually(lambda: not os.path.ismount(lake.path), "unmounted")
    eventually(lambda: not lake.serving(), "the daemon gives up and ends", 60)
    assert lake.staged_files() != []
    controls.clear()
    lake.mount()
    assert [(file["path"], file["state"]) for file in lake.unfinished()] == [("f", "orphan")]
    assert lake.outside.objects() == {}
    assert lake.cli("orphans", str(lake.path), "--all", "finish").returncode == 0
    assert lake.outside.read("f") == data
    assert lake.outside.uploads() == []


def test_umount_stores_what_is_still_written(lake: Lake) -> None:
    """A writer that was killed: its descriptor is closed by the kernel, and nobody waits for that but the unmount."""
    script = "import os,sys; f=open(sys.argv[1],'wb',0); f.write(b'x'*200000); print(flush=True); os.read(0,1)"
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(lake.path / "f")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert writer.stdout is not None and writer.stdin is not None
    with writer:
        writer.stdout.readline()
        writer.kill()
    lake.umount()
    assert lake.outside.read("f") == b"x" * 200_000
