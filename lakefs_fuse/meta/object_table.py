"""The object table: packs, and plain objects that are not at the key of the name they have.

Entries name an object by number, so that a row stays small. What always holds (*counted shares*): a row counts the
entries that have bytes in its object, and those bytes; `Batch.share` changes both in the batch that writes the entry.
The row of a plain object goes with its last entry. The row of a pack stays, as its dead bytes decide on its repacking.
Trio thread only; a crash leaves rows and counts of whole batches.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import msgspec

from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.product import RESERVED_PREFIX

_ROW = struct.Struct("<QqqB")
NUMBER_BYTES = 8


class ObjectRow(msgspec.Struct, frozen=True, gc=False):
    """``size`` of the whole object in bytes; ``entries`` have ``bytes_live`` of them."""

    number: int
    key: str
    etag: str
    size: int
    entries: int = 0
    bytes_live: int = 0

    @property
    def is_pack(self) -> bool:
        return is_pack_key(self.key)


def is_pack_key(key: str) -> bool:
    """The object is a commit, whose other bytes may be other files'."""
    return key.startswith(f"{RESERVED_PREFIX}commits/")


def _number_key(number: int) -> bytes:
    return schema.number_key(schema.OBJECT, number)


def _name_key(key: str, etag: str) -> bytes:
    return schema.OBJECT_NUMBER + schema.encode_path(key) + b"\0" + etag.encode()


class Objects:
    """See the module's head. Trio thread only."""

    def __init__(self, database: Database) -> None:
        self._db = database
        database.write_shares_by(self._write_shares)
        self.packs = self.bytes_packed = self.bytes_live = self._others = 0
        """Packs known, their sizes, and what entries have in them; sums over the table. Others are plain objects."""
        for row in self.rows():
            self._count(row, 1)

    def _count(self, row: ObjectRow, sign: int) -> None:
        if row.is_pack:
            self.packs += sign
            self.bytes_packed += sign * row.size
            self.bytes_live += sign * row.bytes_live
        else:
            self._others += sign

    def get(self, number: int) -> ObjectRow | None:
        raw = self._db.get(_number_key(number))
        return None if raw is None else self._read(number, raw)

    def _read(self, number: int, raw: bytes) -> ObjectRow | None:
        try:
            return unpack_object(number, raw)
        except (struct.error, ValueError) as error:
            self._db.note_damaged(_number_key(number), error)
            return None

    def _number(self, key: bytes, raw: bytes) -> int:
        """0, which no object has, for a row that is none."""
        if len(raw) == NUMBER_BYTES:
            return int.from_bytes(raw, "big")
        self._db.note_damaged(key, ValueError(f"a number of {len(raw)} bytes"))
        return 0

    def find(self, key: str, etag: str) -> ObjectRow | None:
        name = _name_key(key, etag)
        raw = self._db.get(name)
        return None if raw is None else self.get(self._number(name, raw))

    def used(self, key: str) -> ObjectRow | None:
        """The version of the object with this key that some entry has its bytes in, though it is not its own key."""
        if self._others <= 0:
            return None
        return next((row for row in self.versions(key) if row.entries > 0), None)

    def versions(self, key: str) -> Iterator[ObjectRow]:
        """Every version of the object with this key that has a number."""
        begin = _name_key(key, "")
        for name, number in self._db.scan(begin, begin[:-1] + b"\1"):
            row = self.get(self._number(name, number))
            if row is not None:
                yield row

    def number(self, key: str, etag: str, size: int) -> int:
        """The number of an object, new where it has none; written at once, and counted when an entry shares it."""
        known = self.find(key, etag)
        if known is not None:
            return known.number
        last = schema.decode_number(self._db.get(schema.SINGLE_OBJECT))
        row = ObjectRow(last + 1, key, etag, size)
        batch = Batch()
        batch.put(schema.SINGLE_OBJECT, schema.encode_number(row.number))
        self._put(batch, row)
        self._db.commit(batch)
        self._count(row, 1)
        return row.number

    def _put(self, batch: Batch, row: ObjectRow) -> None:
        batch.put(_number_key(row.number), _pack(row))
        batch.put(_name_key(row.key, row.etag), schema.encode_number(row.number))

    def forget(self, batch: Batch, row: ObjectRow) -> None:
        """The object is gone from the store."""
        batch.delete(_number_key(row.number))
        batch.delete(_name_key(row.key, row.etag))
        self._count(row, -1)

    def _write_shares(self, batch: Batch) -> None:
        for number, (entries, size) in batch.pop_shares().items():
            row = self.get(number)
            if row is None:
                continue
            changed = msgspec.structs.replace(row, entries=row.entries + entries, bytes_live=row.bytes_live + size)
            if changed.entries <= 0 and not changed.is_pack:
                self.forget(batch, row)
                continue
            self._count(row, -1)
            self._count(changed, 1)
            self._put(batch, changed)

    def rows(self) -> Iterator[ObjectRow]:
        for key, raw in self._db.scan(schema.OBJECT, schema.end_of(schema.OBJECT)):
            row = self._read(int.from_bytes(key[1:9], "big"), raw)
            if row is not None:
                yield row


def _pack(row: ObjectRow) -> bytes:
    etag = row.etag.encode()
    return _ROW.pack(row.size, row.entries, row.bytes_live, len(etag)) + etag + schema.encode_path(row.key)


def unpack_object(number: int, raw: bytes) -> ObjectRow:
    """Raises struct.error or ValueError for a row that is none."""
    size, entries, live, length = _ROW.unpack_from(raw)
    at = _ROW.size + length
    key = schema.decode_path(raw[at:])
    return ObjectRow(number, key, raw[_ROW.size : at].decode(), size, entries, live)
