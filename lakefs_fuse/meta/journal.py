"""The journal: one record for every file whose newest bytes are not in the store yet.

A record is written before the name it belongs to can be seen, and deleted in the batch that records the published
version, so after a crash every staged file that matters has its record. Values are opaque here; the layer above owns
their meaning.
"""

from __future__ import annotations

from collections.abc import Iterator

from lakefs_fuse.meta.database import Batch, Database


class Journal:
    """Records by draft id (ASCII)."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def put(self, batch: Batch, draft_id: str, record: bytes) -> None:
        batch.put(b"J" + draft_id.encode("ascii"), record)

    def delete(self, batch: Batch, draft_id: str) -> None:
        batch.delete(b"J" + draft_id.encode("ascii"))

    def records(self) -> Iterator[tuple[str, bytes]]:
        for key, record in self._db.scan(b"J", b"K"):
            yield key[1:].decode("ascii"), record
