"""Hashes taken while a store reads a slice are those of a pass of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lakefs_fuse.blockcache.cache_file import BlockHasher, hash_blocks, hash_zeros
from lakefs_fuse.config import MIB
from lakefs_fuse.store.protocol import FileSlice

SIZE = 5 * MIB + 77


@pytest.fixture
def fd(tmp_path: Path) -> int:
    path = tmp_path / "staged"
    path.write_bytes(os.urandom(SIZE - 50))  # the rest are zeros
    return os.open(path, os.O_RDONLY)


@pytest.mark.parametrize(("start", "end"), [(0, SIZE), (MIB, 3 * MIB), (4 * MIB, SIZE), (5 * MIB, SIZE), (0, MIB + 5)])
def test_all_pieces_make_the_same_hashes(fd: int, start: int, end: int) -> None:
    hasher = BlockHasher(start, end, SIZE)
    for _ in FileSlice(fd, start, end - start, hasher.saw).pieces():
        pass
    assert hasher.seen() == hash_blocks(fd, start, end, SIZE)
    os.close(fd)


@pytest.mark.parametrize(("start", "pieces", "size"), [(0, 0, MIB), (0, 3, MIB), (0, 99, MIB // 2), (5, 99, MIB)])
def test_too_little_was_seen(fd: int, start: int, pieces: int, size: int) -> None:
    hasher = BlockHasher(start, SIZE, SIZE)
    for _ in zip(range(pieces), FileSlice(fd, start, SIZE - start, hasher.saw).pieces(size), strict=False):
        pass
    assert hasher.seen() is None
    os.close(fd)


def test_what_is_seen_again_counts(tmp_path: Path) -> None:
    path = tmp_path / "staged"
    path.write_bytes(b"a" * MIB)
    hasher = BlockHasher(0, MIB, MIB)
    hasher.saw(0, b"b" * MIB)
    with path.open("rb") as file:
        list(FileSlice(file.fileno(), 0, MIB, hasher.saw).pieces())
        assert hasher.seen() == hash_blocks(file.fileno(), 0, MIB, MIB)


@pytest.mark.parametrize(
    ("start", "end"), [(0, SIZE), (2 * MIB, 4 * MIB), (5 * MIB, SIZE), (0, MIB + 5), (5, MIB), (0, 0)]
)
def test_hash_zeros_is_hash_of_a_hole(tmp_path: Path, start: int, end: int) -> None:
    path = tmp_path / "staged"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    assert hash_zeros(start, end, SIZE) == hash_blocks(fd, start, end, SIZE)
    os.close(fd)
