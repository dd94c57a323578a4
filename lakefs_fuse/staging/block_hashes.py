"""Hashes of the cache blocks of a staged file, computed while its bytes are still in the page cache."""

from __future__ import annotations

import os

from lakefs_fuse.blockcache.cache_file import block_hash
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES

_ZEROS_HASH = block_hash(bytes(BLOCK_BYTES))


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


def hash_zeros(start: int, end: int, size: int) -> dict[int, int]:
    """What `hash_blocks` answers where [start, end) of a file of ``size`` bytes are zeros."""
    if start % BLOCK_BYTES:
        return {}
    hashes = dict.fromkeys(range(start // BLOCK_BYTES, end // BLOCK_BYTES), _ZEROS_HASH)
    if end % BLOCK_BYTES and end >= size:
        hashes[end // BLOCK_BYTES] = block_hash(bytes(end % BLOCK_BYTES))
    return hashes


class BlockHasher:
    """Hashes of the blocks of a slice, from the pieces that its store reads of it; `hash_blocks` where it read none.

    `saw` is called in the store's thread, everything else after its call ended.
    """

    def __init__(self, start: int, end: int, size: int) -> None:
        """Of bytes [start, end) of a file of ``size`` bytes."""
        self._start, self._end, self._size = start, end, size
        self._seen: dict[int, int] = {}

    def saw(self, offset: int, piece: bytes) -> None:
        """Pieces that are no whole block do not count; what is seen again replaces what was."""
        is_last = offset + len(piece) == self._end >= self._size
        if offset % BLOCK_BYTES == 0 and (len(piece) == BLOCK_BYTES or is_last):
            self._seen[offset // BLOCK_BYTES] = block_hash(piece)

    def seen(self) -> dict[int, int] | None:
        """What `hash_blocks` would answer; None where blocks are missing, and that has to be asked."""
        whole = self._end if self._end >= self._size else self._end - self._end % BLOCK_BYTES
        if self._start % BLOCK_BYTES or len(self._seen) != -(-(whole - self._start) // BLOCK_BYTES):
            return None
        return self._seen
