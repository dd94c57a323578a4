"""The object table: packs, and plain objects that are not at the key of the name they have.

Entries name an object by number, so that a row stays small. What always holds (*counted shares*): a row counts the
entries that have bytes in its object, and those bytes; `Batch.shares` changes both in the batch that writes the entry.
The row of a plain object goes with its last entry; its key is remembered in memory (`is_reserved`). The row of a pack
stays, as its dead bytes decide on its repacking, and `fsck` sees from it that the pack was applied. Once the pack is
deleted, `gc` drops the row in the view that it folds, and mounts drop theirs (`commits.pack_rows`). Trio thread only; a
crash leaves rows and counts of whole batches.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partial

import msgspec

from lakefs_fuse.errors import CacheError
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.product import RESERVED_PREFIX

_ROW = struct.Struct("<QqqB")
NUMBER_BYTES = 8
NUMBER_MAX = (1 << 32) - 1
"""Rows of entries have four bytes for the number of their object (`entry.HEAD`); none is given out twice in a lake."""
_SHARE_MAX = (1 << 63) - 1
"""What a row holds. Only commits that name the same bytes very often come to more, as hostile ones may: counting ends
here."""
PACKS = f"{RESERVED_PREFIX}commits/"
RESERVED_NS = 300 * 1_000_000_000
"""As long as superseded objects stay by default: each node has heard of the end of a name by then, and others of what
it did before that."""
RESERVED_MAX = 1 << 16
"""About 15 MB."""


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
    return key.startswith(PACKS)


def _number_key(number: int) -> bytes:
    return schema.OBJECT + schema.NUMBER.pack(number)


def _name_key(key: str, etag: str) -> bytes:
    return schema.OBJECT_NUMBER + key.encode(*schema.PATH) + b"\0" + etag.encode()


class Objects:
    """See the module's head. Trio thread only."""

    def __init__(self, database: Database) -> None:
        self._db = database
        database.write_shares_by(self._write_shares)
        self._named = OrderedDict[str, int]()
        """When a name last began or ceased to mean what lies at a key (time since boot, ns): the latest last."""
        self.packs = self.bytes_packed = self.bytes_live = self.plain = 0
        """Packs known, their sizes, and what entries have in them; plain objects. Sums over the table as it is in the
        database: `used` relies on them. A deleted pack counts until its row is dropped."""
        self._sum_up()
        database.reopened.append(self._sum_up)

    def _sum_up(self) -> None:
        self.packs = self.bytes_packed = self.bytes_live = self.plain = 0
        for row in self.rows():
            self._count(row, 1)

    def _count(self, row: ObjectRow, sign: int) -> None:
        if is_pack_key(row.key):
            self.packs += sign
            self.bytes_packed += sign * row.size
            self.bytes_live += sign * row.bytes_live
        else:
            self.plain += sign

    @property
    def last_number(self) -> int:
        """The last number that was given out, of `NUMBER_MAX`, as far as this node knows. Raises CacheError."""
        return int.from_bytes(self._db.get(schema.SINGLE_OBJECT) or b"", "big")

    def get(self, number: int) -> ObjectRow | None:
        raw = self._db.get(_number_key(number))
        return None if raw is None else self._read(number, raw)

    def get_many(self, numbers: Collection[int]) -> list[ObjectRow | None]:
        """As `get`, of each number."""
        raws = self._db.get_many([_number_key(number) for number in numbers])
        return [None if raw is None else self._read(number, raw) for number, raw in zip(numbers, raws, strict=True)]

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
        if not self.plain:
            return None
        return next((row for row in self.versions(key) if row.entries > 0), None)

    def is_reserved(self, key: str) -> bool:
        """A name at another path means the plain object with this key, or did lately, for nodes that may give it to a
        third: in commits that this daemon has heard of, also where another was newer."""
        at = self._named.get(key)
        return self.used(key) is not None or (at is not None and self._db.clock.boot_ns() < at + RESERVED_NS)

    def _note_named(self, keys: Iterable[str]) -> None:
        now_ns = self._db.clock.boot_ns()
        for key in keys:
            self._named[key] = now_ns
            self._named.move_to_end(key)
            if len(self._named) > RESERVED_MAX:
                self._named.popitem(last=False)

    def versions(self, key: str) -> Iterator[ObjectRow]:
        """Every version of the object with this key that has a number."""
        begin = _name_key(key, "")
        for name, number in self._db.scan(begin, begin[:-1] + b"\1"):
            row = self.get(self._number(name, number))
            if row is not None:
                yield row

    def number(self, key: str, etag: str, size: int) -> int:
        """The number of an object, new where it has none; written at once, and counted when an entry shares it."""
        return self.numbers([(key, etag, size)])[0]

    def numbers(self, objects: Sequence[tuple[str, str, int]]) -> list[int]:
        """As `number`, of keys, ETags and sizes; all new rows in one batch. Raises CacheError."""
        names = [_name_key(key, etag) for key, etag, _ in objects]
        found = zip(names, self._db.get_many(names), strict=True)
        numbers = {name: self._number(name, raw) for name, raw in found if raw is not None}
        if numbers:
            rows_found = zip(list(numbers), self.get_many(numbers.values()), strict=True)
            for name in [name for name, row in rows_found if row is None]:
                del numbers[name]
        added = [(name, each) for name, each in dict(zip(names, objects, strict=True)).items() if name not in numbers]
        if added:
            last = self.last_number
            if last + len(added) > NUMBER_MAX:
                raise CacheError(
                    f"the lake has used up its {NUMBER_MAX:,} numbers of packs and moved objects: copy its files "
                    "into a new lake"
                )
            rows = [ObjectRow(number, *each) for number, (_, each) in enumerate(added, last + 1)]
            batch = Batch({schema.SINGLE_OBJECT: schema.NUMBER.pack(last + len(rows))})
            for row, (name, _) in zip(rows, added, strict=True):
                self._put(batch, row)
                numbers[name] = row.number
            self._db.commit_volatile(batch)
            for row in rows:
                self._count(row, 1)
            self._note_named(row.key for row in rows if not row.is_pack)
        return [numbers[name] for name in names]

    def _put(self, batch: Batch, row: ObjectRow) -> None:
        batch.rows[_number_key(row.number)] = _pack(row)
        batch.rows[_name_key(row.key, row.etag)] = schema.NUMBER.pack(row.number)

    def rename(self, batch: Batch, row: ObjectRow, etag: str) -> None:
        """The same object has another ETag, which no row has yet."""
        batch.rows[_name_key(row.key, row.etag)] = None
        self._put(batch, msgspec.structs.replace(row, etag=etag))

    def _changed(self, rows: Sequence[tuple[ObjectRow, ObjectRow | None]]) -> None:
        """Rows as they were, and as they are, or None for an object that is gone."""
        for before, after in rows:
            self._count(before, -1)
            if after is not None:
                self._count(after, 1)
        self._note_named(before.key for before, after in rows if after is None and not before.is_pack)

    def _write_shares(self, batch: Batch) -> None:
        changes: dict[int, tuple[int, int]] = {}
        for number, entries, size in batch.shares:
            before = changes.get(number, (0, 0))
            changes[number] = before[0] + entries, before[1] + size
        batch.shares.clear()
        rows: list[tuple[ObjectRow, ObjectRow | None]] = []
        for row, (entries, size) in zip(self.get_many(changes.keys()), changes.values(), strict=True):
            if row is None:
                continue
            changed = msgspec.structs.replace(row, entries=row.entries + entries, bytes_live=row.bytes_live + size)
            if changed.entries <= 0 and not is_pack_key(row.key):
                batch.rows[_number_key(row.number)] = batch.rows[_name_key(row.key, row.etag)] = None
                rows.append((row, None))
                continue
            self._put(batch, changed)
            rows.append((row, changed))
        batch.committed.append(partial(self._changed, rows))

    def forget_packs(self, rows: Sequence[ObjectRow]) -> None:
        """Drop the rows of packs that are gone from the store, and that no entry has bytes in. Raises CacheError."""
        batch = Batch()
        for row in rows:
            batch.rows[_number_key(row.number)] = batch.rows[_name_key(row.key, row.etag)] = None
        batch.committed.append(partial(self._changed, [(row, None) for row in rows]))
        self._db.commit(batch)

    def rows(self, first: int = 0) -> Iterator[ObjectRow]:
        """All rows in the order of their numbers, from the number ``first`` on."""
        for key, raw in self._db.scan(_number_key(first), schema.end_of(schema.OBJECT)):
            row = self._read(int.from_bytes(key[1:9], "big"), raw)
            if row is not None:
                yield row


def _pack(row: ObjectRow) -> bytes:
    etag = row.etag.encode()
    key = row.key.encode(*schema.PATH)
    entries, live = (max(-_SHARE_MAX, min(share, _SHARE_MAX)) for share in (row.entries, row.bytes_live))
    return _ROW.pack(row.size, entries, live, len(etag)) + etag + key


def unpack_object(number: int, raw: bytes) -> ObjectRow:
    """Raises struct.error or ValueError for a row that is none."""
    size, entries, live, length = _ROW.unpack_from(raw)
    at = _ROW.size + length
    key = raw[at:].decode(*schema.PATH)
    return ObjectRow(number, key, raw[_ROW.size : at].decode(), size, entries, live)
