"""Decoders of all rows of names, by the first byte of their keys: what `fsck` finds damaged rows with.

Everything else leaves a damaged row out where it meets it (`Database.note_damaged`). Blocking; any one thread.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator

from lakefs_fuse.meta import entry, tombstones, tree
from lakefs_fuse.meta import object_table as objects
from lakefs_fuse.meta.database import Database

PAIR_BYTES = 16


def damaged_rows(database: Database) -> Iterator[tuple[bytes, str]]:
    """Keys of the rows that cannot be decoded, and why."""
    for kind, decode in _DECODERS.items():
        for key, row in database.scan(kind, bytes([kind[0] + 1])):
            try:
                decode(row)
            except (struct.error, ValueError) as error:
                yield key, str(error)[:200]


def _of_bytes(count: int) -> Callable[[bytes], object]:
    def decode(row: bytes) -> None:
        if len(row) != count:
            raise ValueError(f"{len(row)} bytes")

    return decode


_DECODERS: dict[bytes, Callable[[bytes], object]] = {
    b"D": lambda row: entry.unpack(0, 0, row),
    b"I": _of_bytes(PAIR_BYTES),
    b"L": tree.unpack_listing,
    b"N": _of_bytes(tree.COOKIE_BYTES),
    b"P": lambda row: objects.unpack(0, row),
    b"Q": _of_bytes(objects.NUMBER_BYTES),
    b"T": tombstones.unpack,
    b"X": tree.unpack_xattrs,
}
