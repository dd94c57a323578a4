"""Names that commits removed, and the version of a plain object that each of them hides.

Rows go by path, because a removed directory has no inode. A tombstone has the time of the commit that removed its name,
and the ETag of the plain object that counts as removed at that key, where it may lie for a while. Trio thread only.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database

NS = 1_000_000_000
SAME_VERSION_NS = 2 * NS
"""An object dated so much later than its removal was put again, even with the same bytes (stores date to the
second)."""


class Tombstone(msgspec.Struct, frozen=True, gc=False):
    """``stamp`` as in `Entry`; ``etag`` of what is hidden, empty for nothing in particular."""

    stamp: int
    etag: str = ""

    def hides(self, etag: str, mtime_ns: int) -> bool:
        """The plain object of this ETag and LastModified counts as removed."""
        if self.etag and etag == self.etag:
            return mtime_ns < self.stamp + SAME_VERSION_NS
        return mtime_ns + NS <= self.stamp


class Tombstones:
    """See the module's head. Paths end in a slash for directories."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def get(self, path: bytes) -> Tombstone | None:
        raw = self._db.get(schema.TOMBSTONE + path)
        return None if raw is None else self._read(schema.TOMBSTONE + path, raw)

    def _read(self, key: bytes, raw: bytes) -> Tombstone | None:
        try:
            return unpack_tombstone(raw)
        except ValueError as error:
            self._db.note_damaged(key, error)
            return None

    def put(self, batch: Batch, path: bytes, tombstone: Tombstone) -> None:
        batch.put(schema.TOMBSTONE + path, tombstone.stamp.to_bytes(8, "big") + tombstone.etag.encode())

    def delete(self, batch: Batch, path: bytes) -> None:
        batch.delete(schema.TOMBSTONE + path)

    def below(self, prefix: bytes) -> Iterator[tuple[bytes, Tombstone]]:
        """Paths that begin with ``prefix`` (empty, or ending in a slash), in order."""
        end = schema.TOMBSTONE + prefix[:-1] + b"0" if prefix else schema.end_of(schema.TOMBSTONE)
        for key, raw in self._db.scan(schema.TOMBSTONE + prefix, end):
            tombstone = self._read(key, raw)
            if tombstone is not None:
                yield key[1:], tombstone


def unpack_tombstone(raw: bytes) -> Tombstone:
    """Raises ValueError for a row that is none."""
    if len(raw) < 8:
        raise ValueError(f"a tombstone of {len(raw)} bytes")
    return Tombstone(int.from_bytes(raw[:8], "big"), raw[8:].decode())
