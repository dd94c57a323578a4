"""Open files stay at their version; a later open reads the new one once the listing has expired."""

from __future__ import annotations

import errno
import mmap
import os
import time
from pathlib import Path

import pytest

from tests.mount.conftest import STORES, LakeMaker
from tests.mount.lakes import MIB, Lake
from tests.tiers import sized

SIZE = 12 * MIB
STEP = 64 << 10
STRIDE = sized(4, 1) * STEP
"""Between pieces of a version that was replaced: several of each MiB, which is a block of the cache."""
OLD, NEW = b"\x01" * SIZE, b"\x02" * SIZE


@pytest.fixture(params=STORES)
def brief(request: pytest.FixtureRequest, make_lake: LakeMaker) -> Lake:
    """A lake that looks again after a second, and holds the old version."""
    lake = make_lake(request.param, "--metadata-ttl", "1")
    lake.outside.replace("f", OLD)
    return lake.mount()


def read_step(fd: int, at: int) -> bytes:
    """A piece of the file from the daemon, not from the page cache; empty for ESTALE."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    try:
        return os.pread(fd, STEP, at)
    except OSError as error:
        assert error.errno == errno.ESTALE
        return b""


def new_version_appears(path: Path, new: bytes = NEW) -> None:
    deadline = time.monotonic() + 15
    while True:
        try:
            if path.read_bytes() == new:
                return
        except OSError as error:
            assert error.errno == errno.ESTALE
        assert time.monotonic() < deadline, "the new version is not seen after the TTL"
        time.sleep(0.1)


def test_a_reader_of_a_replaced_object_gets_the_old_bytes_or_estale(brief: Lake) -> None:
    fd = os.open(brief.path / "f", os.O_RDONLY)
    try:
        assert read_step(fd, 0) == OLD[:STEP]
        brief.outside.replace("f", NEW)
        time.sleep(1.2)
        seen = [read_step(fd, at) for at in range(0, SIZE, STRIDE)]
        assert set(seen) <= {OLD[:STEP], b""}
        assert b"" in seen, "what nobody had read of it is gone"
        new_version_appears(brief.path / "f")
        assert {read_step(fd, at) for at in range(0, SIZE, STRIDE)} <= {OLD[:STEP], b""}
    finally:
        os.close(fd)
    assert (brief.path / "f").read_bytes() == NEW


def test_what_was_cached_stays_readable(brief: Lake) -> None:
    """Read once from front to back: every block is in the cache, and the version stays pinned while it is open."""
    fd = os.open(brief.path / "f", os.O_RDONLY)
    try:
        assert os.pread(fd, SIZE, 0) == OLD
        brief.outside.replace("f", NEW)
        time.sleep(1.2)
        new_version_appears(brief.path / "f")
        assert b"".join(read_step(fd, at) for at in range(0, SIZE, STEP)) == OLD
    finally:
        os.close(fd)


def test_a_mapping_of_a_replaced_object(brief: Lake) -> None:
    with (brief.path / "f").open("rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as view:
        assert view[:] == OLD
        brief.outside.replace("f", NEW)
        time.sleep(1.2)
        new_version_appears(brief.path / "f")
        assert view[:] == OLD


def test_readers_of_both_versions_at_once(brief: Lake) -> None:
    old = os.open(brief.path / "f", os.O_RDONLY)
    assert os.pread(old, SIZE, 0) == OLD
    brief.outside.replace("f", NEW)
    new_version_appears(brief.path / "f")
    new = os.open(brief.path / "f", os.O_RDONLY)
    try:
        for at in range(0, SIZE, 8 * STEP):
            assert read_step(new, at) == NEW[:STEP]
            assert read_step(old, at) == OLD[:STEP]
        assert os.fstat(old).st_ino != os.fstat(new).st_ino
    finally:
        os.close(old)
        os.close(new)


def test_a_shorter_version_and_none_at_all(brief: Lake) -> None:
    fd = os.open(brief.path / "f", os.O_RDONLY)
    try:
        brief.outside.replace("f", NEW[: MIB + 1])
        time.sleep(1.2)
        assert {read_step(fd, at) for at in range(0, SIZE, 16 * STEP)} <= {OLD[:STEP], b""}
        assert (brief.path / "f").stat().st_size == MIB + 1
        assert (brief.path / "f").read_bytes() == NEW[: MIB + 1]
        brief.outside.delete("f")
        time.sleep(1.2)
        assert not (brief.path / "f").exists()
        assert {read_step(fd, at) for at in range(0, SIZE, 16 * STEP)} <= {OLD[:STEP], b""}
    finally:
        os.close(fd)


@pytest.mark.long
def test_replaced_while_it_is_read_again_and_again(brief: Lake) -> None:
    """Every whole read is of one version or fails, whenever the replacement came; of what is cached it is whole."""
    for round_ in range(6):
        data, is_cached, at = bytes([2 * round_ + 1]) * SIZE, round_ % 2 == 1, 0
        brief.outside.replace("f", data)
        if is_cached:
            new_version_appears(brief.path / "f", data)
        seen = set[bytes]()
        try:
            with (brief.path / "f").open("rb", buffering=0) as stream:
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                while piece := stream.read(STEP if at else 1):
                    if not at:
                        brief.outside.replace("f", bytes([2 * round_ + 2]) * SIZE)
                    at += len(piece)
                    seen.add(piece[:1])
                    assert piece.count(piece[:1]) == len(piece)
            assert at == SIZE
        except OSError as error:
            assert error.errno == errno.ESTALE
            assert not is_cached, "all bytes of that version are here"
        assert len(seen) <= 1
        assert not is_cached or seen == {data[:1]}
