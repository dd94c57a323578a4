"""What a network and a busy store do in the middle of reads and writes is survived, and counted."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.failing import Failing, failing_lake, failing_place
from tests.mount.lakes import MIB, PART_BYTES, Lake, noise
from tests.servers import Server

KINDS = ("error_500", "slow_down", "reset", "truncate")


@pytest.fixture(scope="module")
def failing_store(
    dev_fuse: Path, seaweed: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Lake, Faults]]:
    with failing_lake(seaweed, tmp_path_factory.mktemp("failing")) as pair:
        yield pair


@pytest.fixture
def failing(failing_store: tuple[Lake, Faults]) -> Iterator[Failing]:
    with failing_place(*failing_store) as place:
        yield place


def inject(faults: Faults, kind: str, n: int, *, method: str, containing: str) -> None:
    getattr(faults, kind)(n, method=method, containing=containing)


@pytest.mark.parametrize("kind", KINDS)
def test_a_read_survives(failing: Failing, kind: str) -> None:
    data = noise(5 * MIB + 17, 5)
    path = failing.put_by_others("f", data)
    retries = failing.lake.number("store.retries")
    inject(failing.faults, kind, 2, method="GET", containing=failing.url("f"))
    assert path.read_bytes() == data
    assert failing.faults.injected[kind] == 2
    assert failing.lake.number("store.retries") >= retries + 2


@pytest.mark.parametrize("kind", [*KINDS[:3], "lose_answer"])
@pytest.mark.parametrize("size", [70_000, 2 * PART_BYTES + 9], ids=["one-put", "parts"])
def test_a_write_survives(failing: Failing, kind: str, size: int) -> None:
    """In a large file the fault hits parts, and the requests that begin and complete the upload."""
    data = noise(size, 6)
    faults, url = failing.faults, failing.url("f")
    retries = failing.lake.number("store.retries")
    inject(faults, kind, 2, method="PUT", containing=url)
    if size > PART_BYTES:
        inject(faults, kind, 1, method="POST", containing=url + "?uploads")
        inject(faults, kind, 1, method="POST", containing=url + "?uploadId")
    (failing.path / "f").write_bytes(data)
    assert failing.here.stored("f") == data
    assert faults.injected[kind] == (2 if size < PART_BYTES else 4)
    assert failing.lake.number("store.retries") >= retries + faults.injected[kind]
    assert failing.lake.number("dirty.files") == 0


@pytest.mark.parametrize("kind", KINDS[:3])
def test_names_survive(failing: Failing, kind: str) -> None:
    """Listings, mkdir, unlink and rmdir."""
    faults, directory = failing.faults, failing.path / "d"
    failing.put_by_others("d/f", b"x")
    inject(faults, kind, 2, method="GET", containing="list-type")
    assert [entry.name for entry in directory.iterdir()] == ["f"]
    inject(faults, kind, 1, method="PUT", containing="")
    (failing.path / "new").mkdir()
    inject(faults, kind, 1, method="DELETE", containing="")
    (directory / "f").unlink()
    inject(faults, kind, 1, method="DELETE", containing="")
    directory.rmdir()
    assert faults.injected[kind] >= 3
    assert {entry.name for entry in failing.path.iterdir()} == {"new"}
    assert failing.here.names() == set()


def test_a_truncated_listing_is_not_believed(failing: Failing) -> None:
    for index in range(20):
        failing.here.outside.replace(failing.url(f"d/{index}"), b"")
    failing.put_by_others("d/last", b"")
    failing.faults.truncate(2, method="GET", containing="list-type")
    assert len(list((failing.path / "d").iterdir())) == 21
    assert failing.faults.injected["truncate"] >= 1


def test_reads_that_cannot_be_saved_fail_and_the_daemon_lives(failing: Failing) -> None:
    data = noise(3 * MIB, 10)
    path = failing.put_by_others("f", data)
    fd = os.open(path, os.O_RDONLY)
    pid = failing.lake.number("daemon.pid")
    failing.faults.reset(100_000)
    with pytest.raises(OSError) as raised:
        os.pread(fd, 100, 0)
    assert raised.value.errno == errno.EIO
    with pytest.raises(OSError) as raised:
        (failing.path / "made").mkdir()
    assert raised.value.errno == errno.EIO
    failing.faults.clear()
    assert os.pread(fd, 100, 0) == data[:100]
    os.close(fd)
    assert path.read_bytes() == data
    (failing.path / "made").mkdir()
    assert failing.lake.number("daemon.pid") == pid


def test_an_object_that_vanishes_is_an_error_not_an_end(failing: Failing) -> None:
    path = failing.put_by_others("f", noise(100_000))
    fd = os.open(path, os.O_RDONLY)
    failing.here.outside.delete(failing.url("f"))
    with pytest.raises(OSError) as raised:
        os.pread(fd, 100, 0)
    assert raised.value.errno == errno.ESTALE
    os.close(fd)
    (failing.path / "g").write_bytes(b"alive")
    assert failing.here.stored("g") == b"alive"


def test_stalls_in_the_middle_of_a_read_and_a_write(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    """A stalled answer counts as lost after twenty seconds, so both are waited for at once."""
    proxied, controls = faults
    read_data, write_data = noise(3 * MIB, 7), noise(PART_BYTES + 9, 8)
    lake = make_lake("seaweedfs", through=proxied)
    lake.outside.replace("read", read_data)
    lake.mount()
    controls.stall(1, method="GET", containing="/read")
    controls.stall(1, method="POST", containing="/write?uploadId")
    seen: list[bytes] = []
    reader = threading.Thread(target=lambda: seen.append((lake.path / "read").read_bytes()))
    reader.start()
    (lake.path / "write").write_bytes(write_data)
    reader.join()
    assert controls.injected["stall"] == 2
    assert seen == [read_data]
    assert lake.outside.read("write") == write_data
    assert lake.number("store.retries") >= 2
