"""Writes that the daemon refuses: `close()` returns the error, and nothing of the file is published."""

from __future__ import annotations

import errno
import functools
import mmap
import os
import random
from pathlib import Path

import pytest

from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, PART_BYTES, Lake, eventually, noise
from tests.mount.test_outage import Disk, small_disk  # noqa: F401  (a fixture)
from tests.mount.writeback_lakes import COMMITS, state
from tests.servers import Server

SMALL_STAGING = ("--staging-size", "64MiB", "--staging-timeout", "5s")


@functools.cache
def old_bytes() -> bytes:
    """What files are before. Made once, by the first test: each worker collects this module."""
    return noise(40 * MIB, 1)


def write_shuffled(path: Path, pieces: int, seed: int = 3) -> int:
    """Open with O_TRUNC, write pieces of 1 MiB in random order, close; the errno of the close, or 0."""
    order = list(range(pieces))
    random.Random(seed).shuffle(order)
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    for number in order:
        os.pwrite(fd, noise(MIB, number), number * MIB)
    return closed(fd)


def write_in_many_parts(fd: int) -> None:
    """80 MiB, of which no part is complete."""
    for number in range(20):
        os.pwrite(fd, noise(4 * MIB, number), number * PART_BYTES)


def closed(fd: int) -> int:
    try:
        os.close(fd)
    except OSError as error:
        return error.errno or -1
    return 0


def orphans(lake: Lake) -> list[dict[str, object]]:
    return [each for each in lake.unfinished() if each["state"] == "orphan"]


def check_told(lake: Lake, name: str, old: bytes) -> str:
    """The version before is there and shown, and who asks hears what is missing; answers the orphan's id."""
    eventually(lambda: bool(orphans(lake)), "the orphan is listed", 60)
    eventually(lambda: (lake.path / name).stat().st_size == len(old), "the kernel forgets", 60)
    assert (lake.path / name).read_bytes() == old
    assert state(lake.path / name) == "durable"
    assert lake.outside.read(name) == old
    (orphan,) = orphans(lake)
    assert orphan["path"] == name
    for command in ("flush", "umount"):
        done = lake.cli(command, str(lake.path))
        assert done.returncode != 0
        assert f"{name}: orphan" in done.stderr
        assert "were refused" in done.stderr
    assert os.path.ismount(lake.path)
    listed = lake.cli("orphans", str(lake.path)).stdout
    assert str(orphan["id"]) in listed
    return str(orphan["id"])


def check_refused_to_finish(lake: Lake, orphan: str) -> None:
    done = lake.cli("orphans", str(lake.path), "--finish", orphan)
    assert done.returncode != 0
    assert "--incomplete" in done.stderr


def abort(lake: Lake, orphan: str) -> None:
    assert lake.cli("orphans", str(lake.path), "--abort", orphan).returncode == 0
    assert lake.cli("flush", str(lake.path)).returncode == 0
    assert lake.unfinished() == []


@pytest.mark.long
def test_shuffled_pieces_beyond_staging_are_not_published(make_lake: LakeMaker) -> None:
    lake = make_lake("file", *SMALL_STAGING, "--durability", "writeback").mount()
    path = lake.path / "f"
    path.write_bytes(old_bytes())
    assert lake.cli("flush", str(path)).returncode == 0
    assert write_shuffled(path, 200) == errno.ENOSPC
    orphan = check_told(lake, "f", old_bytes())
    check_refused_to_finish(lake, orphan)
    lake.kill()
    lake.mount("--orphans", "finish")
    assert check_told(lake, "f", old_bytes()) == orphan
    abort(lake, orphan)
    path.write_bytes(old_bytes()[: 20 * MIB])
    lake.umount()
    assert lake.outside.objects() == {"f": 20 * MIB}
    assert lake.outside.uploads() == []


@pytest.mark.long  # upload/test_spilled_parts.py shows it
def test_shuffled_pieces_beyond_staging_are_stored_where_parts_can_be_copied(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", *SMALL_STAGING).mount()
    path = lake.path / "f"
    path.write_bytes(old_bytes()[:MIB])
    pieces = 120  # more than is staged
    assert write_shuffled(path, pieces) == 0
    assert lake.number("upload.parts_spilled") > 0
    assert lake.outside.read("f") == b"".join(noise(MIB, number) for number in range(pieces))
    lake.umount()
    assert [key for key in lake.outside.objects() if not key.startswith(".lakefs/commits/")] == ["f"]
    assert lake.outside.uploads() == []


def test_daemon_killed_after_a_refused_write_publishes_nothing(make_lake: LakeMaker) -> None:
    """The file is still open when it dies."""
    lake = make_lake("file", *SMALL_STAGING).mount()
    path = lake.path / "f"
    path.write_bytes(old_bytes()[:MIB])
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    try:
        write_in_many_parts(fd)
        with pytest.raises(OSError) as raised:
            os.fsync(fd)
        assert raised.value.errno == errno.ENOSPC
        with pytest.raises(OSError) as raised:  # asked again, it is said again
            os.fsync(fd)
        assert raised.value.errno == errno.ENOSPC
        assert state(path) == "failed"
        lake.kill()
    finally:
        closed(fd)
    lake.mount("--orphans", "finish")
    abort(lake, check_told(lake, "f", old_bytes()[:MIB]))


def test_range_written_again_is_published(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--staging-size", "64MiB", "--staging-timeout", "1s").mount()
    path = lake.path / "f"
    fd = os.open(path, os.O_CREAT | os.O_WRONLY)
    write_in_many_parts(fd)
    with pytest.raises(OSError):
        os.fsync(fd)
    os.ftruncate(fd, 20 * MIB)
    for number in range(20):
        os.pwrite(fd, noise(MIB, number), number * MIB)
    assert closed(fd) == 0
    assert lake.outside.read("f") == b"".join(noise(MIB, number) for number in range(20))
    assert lake.number("dirty.files") == 0


@pytest.mark.long
def test_uploads_forbidden_in_the_middle_are_not_published(make_lake: LakeMaker, faults: tuple[Server, Faults]) -> None:
    """Nothing of it is shown; written again whole, it is stored."""
    lake = make_lake("seaweedfs", *SMALL_STAGING, through=faults[0]).mount()
    path = lake.path / "f"
    path.write_bytes(old_bytes())
    faults[1].forbid(10**9, method="PUT")
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC)
    for number in range(150):
        os.pwrite(fd, noise(MIB, number), number * MIB)
    assert closed(fd) in (errno.ENOSPC, errno.EACCES)
    orphan = check_told(lake, "f", old_bytes())
    check_refused_to_finish(lake, orphan)
    faults[1].clear()
    path.write_bytes(old_bytes()[:MIB])
    eventually(lambda: lake.unfinished() == [], "the orphan is superseded", 60)
    lake.umount()
    files = {key: size for key, size in lake.outside.objects().items() if not key.startswith(COMMITS)}
    assert files == {"f": MIB}, "and the commit that announces it"
    assert lake.outside.read("f") == old_bytes()[:MIB]
    assert lake.outside.uploads() == []


@pytest.mark.parametrize("durability", ["close", pytest.param("writeback", marks=pytest.mark.long)])
def test_full_disk_is_not_published(make_lake: LakeMaker, small_disk: Disk, durability: str) -> None:  # noqa: F811
    """There may be no room for a journal record either."""
    lake = make_lake("file", "--staging-timeout", "1s", "--durability", durability)
    lake.cache_dir = small_disk.path / "cache"
    lake.mount(*small_disk.options)
    path = lake.path / "f"
    path.write_bytes(old_bytes()[: 8 * MIB])
    assert lake.cli("flush", str(path)).returncode == 0
    fd = os.open(path, os.O_WRONLY | os.O_TRUNC | os.O_DIRECT)
    with mmap.mmap(-1, MIB) as piece:
        piece[:] = noise(MIB, 5)
        for number in range(4):
            os.pwrite(fd, piece, number * MIB)
        hog = small_disk.fill(left=0)
        with hog.open("ab") as rest, pytest.raises(OSError):  # and what the mount leaves free
            while True:
                os.write(rest.fileno(), bytes(4096))
        with pytest.raises(OSError) as raised:
            os.pwrite(fd, piece, 4 * MIB)
    assert raised.value.errno == errno.ENOSPC
    assert closed(fd) in (errno.ENOSPC, errno.EIO)  # the kernel sends times before, which cannot be journaled
    assert lake.outside.read("f") == old_bytes()[: 8 * MIB]
    lake.kill()
    hog.unlink()
    lake.mount("--orphans", "finish", *small_disk.options)
    orphan = check_told(lake, "f", old_bytes()[: 8 * MIB])
    abort(lake, orphan)
    path.write_bytes(old_bytes()[:MIB])
    lake.umount()
    assert lake.outside.objects() == {"f": MIB}
