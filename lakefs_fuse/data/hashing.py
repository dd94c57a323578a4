"""Hashes of the cache blocks of a staged file, computed while its bytes are still in the page cache."""

from __future__ import annotations

import os

from lakefs_fuse.data.cache_file import block_hash
from lakefs_fuse.data.version import BLOCK_BYTES


def hash_blocks(fd: int, start: int, end: int, size: int) -> dict[int, int]:
    """Hash of every cache block that [start, end) of a file of ``size`` bytes holds whole, if it begins with one."""
    hashes: dict[int, int] = {}
    if start % BLOCK_BYTES:
        return hashes
    for at in range(start, end, BLOCK_BYTES):
        length = min(BLOCK_BYTES, end - at)
        if length < BLOCK_BYTES and end < size:
            break
        data = os.pread(fd, length, at)
        hashes[at // BLOCK_BYTES] = block_hash(data + bytes(length - len(data)))
    return hashes
