"""Holes: ranges that were never written read as zeros, which are sent and stored once at most."""

from __future__ import annotations

import os
from pathlib import Path

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, PART_BYTES, Lake

SIZE = 4 * PART_BYTES
PIECE = b"written"


def allocated(path: str | os.PathLike[str]) -> int:
    return os.stat(path).st_blocks * 512


def blocks_told(path: Path) -> int:
    """Bytes that `stat` says are allocated, also right after its directory was listed."""
    with os.scandir(path.parent) as entries:
        assert path.name in [entry.name for entry in entries]
    return allocated(path)


def counts(lake: Lake) -> tuple[int, int]:
    """Bytes sent, and parts and whole objects among the requests."""
    return lake.number("store.bytes.written"), lake.number("store.requests.part")


def is_as_written(lake: Lake, size: int, pieces: dict[int, bytes]) -> bool:
    """The file in the store is zeros but for the pieces, by their offsets."""
    expected = bytearray(size)
    for at, piece in pieces.items():
        expected[at : at + len(piece)] = piece
    return lake.outside.read("f") == expected


def test_truncate_on_s3_sends_zeros_once(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs").mount()
    path = lake.path / "f"
    path.touch()
    lake.sync()
    sent, parts = counts(lake)
    os.truncate(path, SIZE)
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    assert lake.number("dirty.files") == 0
    now = counts(lake)
    assert now[0] - sent < PART_BYTES + MIB
    assert now[1] == parts
    assert is_as_written(lake, SIZE, {})
    assert blocks_told(path) == 0
    with path.open("r+b") as file:
        file.seek(2 * PART_BYTES + 5)
        file.write(PIECE)
    sent, parts = now
    now = counts(lake)
    assert now[0] - sent < PART_BYTES + MIB
    assert now[1] == parts + 1
    assert is_as_written(lake, SIZE, {2 * PART_BYTES + 5: PIECE})
    assert 0 < blocks_told(path) <= PART_BYTES
    sent, parts = now
    other = lake.path / "g"
    other.touch()
    os.truncate(other, 2 * PART_BYTES + 100)
    with other.open("r+b") as file:
        os.fsync(file.fileno())
    now = counts(lake)
    assert now[0] - sent < MIB, "the lake has zeros already"
    assert now[1] == parts
    assert lake.outside.read("g") == bytes(2 * PART_BYTES + 100)
    assert other.read_bytes() == bytes(2 * PART_BYTES + 100)


def test_truncate_on_local_store_keeps_holes(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount()
    path = lake.path / "f"
    with path.open("wb") as file:
        file.write(PIECE)
        file.truncate(SIZE)
    stored_path = lake.source.removeprefix("file://") + "/f"
    assert is_as_written(lake, SIZE, {0: PIECE})
    assert allocated(stored_path) <= MIB
    with path.open("r+b") as file:
        file.seek(2 * PART_BYTES + 5)
        file.write(PIECE)
    assert is_as_written(lake, SIZE, {0: PIECE, 2 * PART_BYTES + 5: PIECE})
    assert allocated(stored_path) <= 2 * PART_BYTES
