"""What the parts of a daemon may hold in memory, as shares of one bound (``--memory``).

What always holds: the program itself, its code, the tables of files in use and what is being sent, takes
`PROGRAM_BYTES` of the bound; the shares divide the rest, and together are no more than that. Pure.
"""

from __future__ import annotations

from typing import NamedTuple

PROGRAM_BYTES = 128 << 20
"""An idle mount takes 90 MiB, of which 21 are pages of the program's files."""
PARTS = 16


class MemoryShares(NamedTuple):
    """Bytes each."""

    recent: int
    """Blocks that were read last."""
    inflight: int
    """Blocks on their way from the store, readahead included, until they are on the cache disk."""
    database: int
    """RocksDB's cache and write buffers."""
    pack: int
    """A pack that is being made. Its bytes are there twice until it is sent, the second time in what is left."""


def shares_of(memory_bytes: int) -> MemoryShares:
    """The shares of a bound, which is at least `config.MEMORY_BYTES_MIN`. One part is left, and blocks on their way
    seldom use theirs while packs are made, for replies, for answers of the store, which the HTTP client holds a second
    time until they are whole, and for what the allocator keeps."""
    part = (memory_bytes - PROGRAM_BYTES) // PARTS
    return MemoryShares(recent=3 * part, inflight=4 * part, database=4 * part, pack=4 * part)
