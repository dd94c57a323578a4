"""Hashes of the blocks of a staged file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lakefs_fuse.blockcache.cache_file import hash_blocks, hash_zeros
from lakefs_fuse.config import MIB

SIZE = 5 * MIB + 77


@pytest.mark.parametrize(
    ("start", "end"), [(0, SIZE), (2 * MIB, 4 * MIB), (5 * MIB, SIZE), (0, MIB + 5), (5, MIB), (0, 0)]
)
def test_hash_zeros_is_hash_of_a_hole(tmp_path: Path, start: int, end: int) -> None:
    path = tmp_path / "staged"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    assert hash_zeros(start, end, SIZE) == hash_blocks(fd, start, end, SIZE)
    os.close(fd)
