"""Typed stores of the rows beside the tree: journal, changes, commits seen, deletions, pins.

What always holds (*typed rows*): callers pass and get values, never keys or bytes of rows; methods that change several
rows use the caller's `Batch`, so that they change together. Trio thread only. After a crash the rows are those of the
committed batches; a caller that acknowledges data that is only here syncs it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import msgspec

from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database

T = TypeVar("T")


class Journal:
    """Records of files whose newest bytes are not in the store yet, by draft id (ASCII).

    A record is written before its name can be seen, and deleted in the batch that records the published version.
    `staging.draft_record` owns the meaning of the bytes.
    """

    def __init__(self, database: Database) -> None:
        self._db = database

    def put(self, batch: Batch, draft_id: str, record: bytes) -> None:
        batch.rows[schema.DRAFT + draft_id.encode("ascii")] = record

    def save(self, draft_id: str, record: bytes, sync: bool) -> None:
        """Write a record in its own batch; with ``sync`` it survives a power cut. Raises CacheError."""
        self._db.commit(Batch({schema.DRAFT + draft_id.encode("ascii"): record}), sync=sync)

    def put_bytes(self, batch: Batch, draft_id: str, data: bytes | None) -> None:
        """Put the file's bytes beside its record: they are safe with the log, whether or not the segment is synced.
        None deletes them."""
        batch.rows[schema.BYTES + draft_id.encode("ascii")] = data

    def delete(self, batch: Batch, draft_id: str, *, unannounced: str = "") -> None:
        """The record, and the bytes beside it. ``unannounced`` is the path of a plain object that has the bytes, and
        has to be announced (`UnannouncedRows`)."""
        batch.rows[schema.DRAFT + draft_id.encode("ascii")] = None
        batch.rows[schema.BYTES + draft_id.encode("ascii")] = None
        if unannounced:
            batch.rows[schema.UNANNOUNCED + unannounced.encode(*schema.PATH)] = b""

    def delete_bytes(self, draft_ids: Iterable[str]) -> None:
        """Delete the bytes of these records, whose segments are synced now. Raises CacheError."""
        batch = Batch()
        for draft_id in draft_ids:
            self.put_bytes(batch, draft_id, None)
        self._db.commit(batch, sync=True)

    def remove(self, draft_id: str, *, sync: bool = False) -> None:
        """Delete a record in its own batch. Raises CacheError."""
        batch = Batch()
        self.delete(batch, draft_id)
        self._db.commit(batch, sync=sync)

    def records(self) -> Iterator[tuple[str, bytes]]:
        for key, record in self._db.scan(schema.DRAFT, schema.end_of(schema.DRAFT)):
            yield key[1:].decode("ascii"), record

    def bytes_beside(self) -> Iterator[tuple[str, bytes]]:
        """What `put_bytes` wrote, by draft id."""
        for key, data in self._db.scan(schema.BYTES, schema.end_of(schema.BYTES)):
            yield key[1:].decode("ascii"), data


class SequenceRows(Generic[T]):
    """Structs of one type by number, in ascending order."""

    def __init__(self, database: Database, kind: bytes, row_type: type[T]) -> None:
        self._db, self._kind, self._type = database, kind, row_type

    def put(self, batch: Batch, number: int, row: T) -> None:
        batch.rows[self._kind + schema.NUMBER.pack(number)] = msgspec.msgpack.encode(row)

    def delete(self, batch: Batch, *numbers: int) -> None:
        for number in numbers:
            batch.rows[self._kind + schema.NUMBER.pack(number)] = None

    def items(self) -> Iterator[tuple[int, T]]:
        for key, raw in self._db.scan(self._kind, schema.end_of(self._kind)):
            yield int.from_bytes(key[1:], "big"), msgspec.msgpack.decode(raw, type=self._type)


class PathRows(Generic[T]):
    """Structs of one type by path."""

    def __init__(self, database: Database, kind: bytes, row_type: type[T]) -> None:
        self._db, self._kind, self._type = database, kind, row_type

    def get(self, path: str, batch: Batch | None = None) -> T | None:
        """The row as it will be when ``batch`` is committed."""
        key = self._kind + path.encode(*schema.PATH)
        raw = batch.rows[key] if batch is not None and key in batch.rows else self._db.get(key)
        return None if raw is None else msgspec.msgpack.decode(raw, type=self._type)

    def get_many(self, paths: Iterable[str]) -> list[T | None]:
        """As `get`, for each path; a row that cannot be decoded is skipped."""
        keys = [self._kind + path.encode(*schema.PATH) for path in paths]
        found = zip(keys, self._db.get_many(keys), strict=True)
        return [None if raw is None else self._read(key, raw) for key, raw in found]

    def _read(self, key: bytes, raw: bytes) -> T | None:
        try:
            return msgspec.msgpack.decode(raw, type=self._type)
        except msgspec.MsgspecError as error:
            self._db.note_damaged(key, error)
            return None

    def put(self, batch: Batch, path: str, row: T) -> None:
        batch.rows[self._kind + path.encode(*schema.PATH)] = msgspec.msgpack.encode(row)

    def write(self, batch: Batch, rows: Mapping[str, T | None]) -> None:
        """Put rows at paths, and delete those of paths with None."""
        for path, row in rows.items():
            key = self._kind + path.encode(*schema.PATH)
            batch.rows[key] = None if row is None else msgspec.msgpack.encode(row)

    def delete(self, batch: Batch, path: str) -> None:
        batch.rows[self._kind + path.encode(*schema.PATH)] = None

    def items(self, after: str = "") -> Iterator[tuple[str, T]]:
        """All rows that can be decoded, or those of paths that sort after one."""
        begin = self._kind + (after.encode(*schema.PATH) + b"\0" if after else b"")
        for key, raw in self._db.scan(begin, schema.end_of(self._kind)):
            row = self._read(key, raw)
            if row is not None:
                yield key[1:].decode(*schema.PATH), row


class SingleRow(Generic[T]):
    """A struct of which there is one."""

    def __init__(self, database: Database, key: bytes, row_type: type[T]) -> None:
        self._db, self._key, self._type = database, key, row_type

    def get(self) -> T | None:
        raw = self._db.get(self._key)
        return None if raw is None else msgspec.msgpack.decode(raw, type=self._type)

    def set(self, row: T | None, *, sync: bool = False) -> None:
        """None removes it. Raises CacheError."""
        self._db.commit(Batch({self._key: None if row is None else msgspec.msgpack.encode(row)}), sync=sync)


class Deletion(msgspec.Struct, frozen=True, array_like=True):
    """A plain object to be deleted, as the version that was removed. ``etag`` is empty for a directory marker, which is
    identified by its date alone. ``due_ns``: not before this time (wall clock; 0 until it is queued). ``removed_ns``:
    the time of the removal (0: by an earlier program, which did not record it). ``checked`` is for earlier programs
    that read the row: they compare versions only if it is true.
    """

    key: str
    etag: str
    checked: bool = True
    due_ns: int = 0
    removed_ns: int = 0


class DeletionRows:
    """Deletions by key, one for each, with an index by time."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._rows = PathRows(database, schema.DELETION, Deletion)
        self._first = schema.DELETION_DUE
        """No key of the index is before this one, so that scans pass over no rows that were deleted before."""
        database.reopened.append(self._forget_first)

    def get(self, key: str) -> Deletion | None:
        return self._rows.get(key)

    def put(self, batch: Batch, deletion: Deletion) -> bool:
        """Returns whether the key had none before."""
        had = self.delete(batch, deletion.key)
        self._rows.put(batch, deletion.key, deletion)
        key = _due_key(deletion)
        batch.rows[key] = b""
        batch.committed.append(partial(self._note_added, key))
        return not had

    def delete(self, batch: Batch, key: str) -> bool:
        """Returns whether there was one."""
        known = self._rows.get(key, batch)
        if known is None:
            return False
        batch.rows[_due_key(known)] = None
        self._rows.delete(batch, key)
        return True

    def due(self, now_ns: int) -> Iterator[Deletion]:
        """Those that are due, the oldest first; the others cost nothing."""
        for key in self._keys_until(schema.DELETION_DUE + schema.NUMBER.pack(now_ns + 1)):
            deletion = self.get(key[9:].decode(*schema.PATH))
            if deletion is not None:
                yield deletion

    def first_due_ns(self) -> int | None:
        """When the first is due; None if there is none."""
        first = next(self._keys_until(schema.end_of(schema.DELETION_DUE)), None)
        return None if first is None else int.from_bytes(first[1:9], "big")

    def _keys_until(self, end: bytes) -> Iterator[bytes]:
        is_first = True
        for key, _ in self._db.scan(self._first, end) if self._first < end else ():
            if is_first:
                self._first, is_first = key, False
            yield key

    def _note_added(self, key: bytes) -> None:
        self._first = min(key, self._first)

    def _forget_first(self) -> None:
        self._first = schema.DELETION_DUE

    def keys(self) -> list[str]:
        return [key for key, _ in self._rows.items()]


def _due_key(deletion: Deletion) -> bytes:
    return schema.DELETION_DUE + schema.NUMBER.pack(deletion.due_ns) + deletion.key.encode(*schema.PATH)


NEVER_NS = (1 << 63) - 1
"""Later than every commit."""
_APPLIED_END = schema.end_of(schema.APPLIED)
AGAIN_NS_MAX = 86400 * 1_000_000_000
"""Maximum time before the newest commit that polls go back to apply commits again: they fetch all since then."""


class UnannouncedRows:
    """Paths of plain objects that the next daemon would have to announce; `Journal.delete` adds them."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def paths(self) -> Iterator[str]:
        for key, _ in self._db.scan(schema.UNANNOUNCED, schema.end_of(schema.UNANNOUNCED)):
            yield key[1:].decode(*schema.PATH)

    def delete(self, paths: Iterable[str]) -> None:
        """Raises CacheError."""
        self._db.commit_volatile(Batch({schema.UNANNOUNCED + path.encode(*schema.PATH): None for path in paths}))


class CommitRows:
    """Records which commits of others are in effect here, and which were skipped, by time and writer."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self.forgotten = 0
        """Counts how often commits within reach of polls may have become unknown here."""
        self._first_forgotten = self._polled_max = NEVER_NS
        self._kept_since = 0
        """No row of an older commit is left."""

    def is_applied(self, time: int, writer: str) -> bool:
        return self._db.get(_commit_key(schema.APPLIED, time, writer)) is not None

    def are_applied(self, commits: Sequence[tuple[int, str, *tuple[object, ...]]]) -> list[bool]:
        """As `is_applied`, for each time and writer; further elements are ignored."""
        keys = [_commit_key(schema.APPLIED, time, writer) for time, writer, *_ in commits]
        return [row is not None for row in self._db.get_many(keys)]

    def newest(self) -> int:
        """Time of the newest commit applied; 0 where there is none."""
        return int.from_bytes(self._db.get(schema.SINGLE_NEWEST) or b"", "big")

    def polled(self) -> int:
        """The newest commit time that polls have passed, within the window. This node's own commits do not move it,
        because earlier ones of others may not have been polled yet."""
        return self.progress()[1]

    def progress(self) -> tuple[int, int]:
        """As `newest` and `polled`, in one read."""
        newest_row, polled_row = self._db.get_many([schema.SINGLE_NEWEST, schema.SINGLE_POLLED])
        newest = int.from_bytes(newest_row or b"", "big")
        return newest, newest if polled_row is None else int.from_bytes(polled_row, "big")

    def record_polled(self, time: int, before: int = 0) -> int:
        """Record that a poll completed which found all commits up to this time, and began when polls had passed
        ``before``. If they went back since, this changes nothing. Returns the time that they have passed now."""
        row = self._db.get(schema.SINGLE_POLLED)
        polled = self.newest() if row is None else int.from_bytes(row, "big")
        if polled >= before and (row is None or time > polled):
            self._db.commit(Batch({schema.SINGLE_POLLED: schema.NUMBER.pack(time)}))
            polled = time
        self._polled_max = polled
        return polled

    def complete(self) -> int:
        """Every commit up to this time is known, whenever it became visible; 0 if that was not recorded."""
        return int.from_bytes(self._db.get(schema.SINGLE_COMPLETE) or b"", "big")

    def record_complete(self, time: int) -> None:
        """Raise the time of `complete` to this one."""
        if time > self.complete():
            self._db.commit(Batch({schema.SINGLE_COMPLETE: schema.NUMBER.pack(time)}))

    def first_forgotten(self) -> int:
        """The earliest time of commits that became unknown here since the last call; NEVER_NS if there were none."""
        first, self._first_forgotten = self._first_forgotten, NEVER_NS
        return first

    def _forget(self, since: int) -> None:
        self.forgotten += 1
        self._first_forgotten = min(since, self._first_forgotten)

    def record_applied(self, time: int, writer: str) -> None:
        batch = Batch({_commit_key(schema.APPLIED, time, writer): b"", _commit_key(schema.REFUSED, time, writer): None})
        if time > self.newest():
            batch.rows[schema.SINGLE_NEWEST] = schema.NUMBER.pack(time)
        self._db.commit_volatile(batch)
        self._kept_since = min(time, self._kept_since)

    def record_refused(self, time: int, writer: str) -> None:
        """Record that a commit is skipped: the names here must not be folded into an index that claims to contain
        it."""
        self._db.commit(Batch({_commit_key(schema.REFUSED, time, writer): b""}))

    def forget_before(self, time: int) -> None:
        """Forget commits older than this, because no poll asks for them."""
        if time > self._kept_since:
            batch = Batch()
            batch.delete_range(*(_commit_key(schema.APPLIED, each, "") for each in (self._kept_since, time)))
            self._db.commit(batch)
            self._kept_since = time

    def forget_with(self, batch: Batch, time: int) -> None:
        """Once ``batch`` is committed, the next poll applies commits of this time again, if it asks for them."""
        batch.delete_range(_commit_key(schema.APPLIED, time, ""), _commit_key(schema.APPLIED, time + 1, ""))
        batch.committed.append(partial(self._forget, time))

    def forget_after(self, time: int) -> None:
        """Polls apply commits again that are newer than this, those of the last AGAIN_NS_MAX at least."""
        self._forget(time)
        newer, batch = _commit_key(schema.APPLIED, time + 1, ""), Batch()
        if next(self._db.scan(newer, _APPLIED_END), None) is not None:
            batch.delete_range(newer, _APPLIED_END)
        if time < self._polled_max:  # for times this new no row needs to be read
            since = max(time, self.newest() - AGAIN_NS_MAX)
            if since < self.polled():
                batch.rows[schema.SINGLE_POLLED] = schema.NUMBER.pack(since)
        if batch:
            self._db.commit_volatile(batch)

    def forget_all(self) -> None:
        """Have the next poll apply every commit again, which does not change newer names."""
        self._forget(0)
        batch = Batch()
        batch.delete_range(schema.APPLIED, schema.end_of(schema.APPLIED))
        batch.rows[schema.SINGLE_NEWEST] = None
        batch.rows[schema.SINGLE_POLLED] = schema.NUMBER.pack(0)
        self._db.commit(batch)

    def forget_since(self, time: int) -> None:
        """Have the next poll ask for commits from this time on, and the next mount read all names again, because names
        here may have been set with times later than the store's clock."""
        self._forget(time)
        batch = Batch()
        batch.delete_range(_commit_key(schema.APPLIED, time, ""), schema.end_of(schema.APPLIED))
        batch.rows[schema.SINGLE_NEWEST] = batch.rows[schema.SINGLE_POLLED] = schema.NUMBER.pack(time)
        batch.rows[schema.SINGLE_OUTDATED] = b""
        self._db.commit(batch)

    def mark_outdated(self) -> None:
        """Have the next mount read all names again."""
        self._db.commit(Batch({schema.SINGLE_OUTDATED: b""}))

    def refused(self) -> list[tuple[int, str]]:
        """Commits that were skipped since the names here began, and not applied since."""
        rows = self._db.scan(schema.REFUSED, schema.end_of(schema.REFUSED))
        return [(int.from_bytes(key[1:9], "big"), key[9:].decode()) for key, _ in rows]

    def forget_refused(self, time: int, writer: str) -> None:
        """Record that the commit is no longer in the store."""
        self._db.commit(Batch({_commit_key(schema.REFUSED, time, writer): None}))


def _commit_key(kind: bytes, time: int, writer: str) -> bytes:
    return kind + schema.NUMBER.pack(time) + writer.encode("ascii")
