"""Rows of names as files of sorted rows (RocksDB's SST), out of one database and into another.

What always holds: a dump shows one moment, whatever changes during it; it has the names and their rows (`KINDS`), and
no rows of a single node (journals, deletions, identity). For an index the histories of names are added, in a separate
file, HISTORIES. `DumpOfChanges` has only the rows that were written since an index, and the keys of deleted rows, in
files of another kind; it is for a database that is not being written. Files are ingested all or none, together with
their marks (`Marks`), so a database never has the names without the numbers that must not be issued again. Dumping and
checking are blocking code for one worker thread at a time; the rest is for the trio thread. A crash leaves files in a
directory that is the caller's.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from itertools import pairwise, takewhile
from pathlib import Path
from typing import TypeAlias, cast

import msgspec
import xxhash
from rocksdict import IngestExternalFileOptions, Rdict, SstFileWriter

from lakefs_fuse.errors import MALFORMED, CacheError, DamagedCommit
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.changed_rows import KINDS, Folded, is_directory
from lakefs_fuse.meta.database import Batch, Database, options
from lakefs_fuse.meta.entry import HEAD, Flag

ROWS = int(schema.VERSION)
"""Which layout the rows have."""
FILE_BYTES_MAX = 24 << 20
"""A file ends when it has this many bytes; its index and filter are in addition."""
KEYS_BYTES_MAX = 4 << 20
"""A file of keys ends when they have this many bytes."""
KEY_BYTES_MAX = 8 << 10
"""Of a row; the longest is a path with an ETag."""
ROWS_BETWEEN_LOOKS = 1000
HASH_BYTES = 1 << 20

HISTORIES = "histories.sst"
HISTORIES_BYTES_MAX = 64 << 20
"""Of that file: 200,000 names that several commits contested within minutes. What comes after those is left out."""
ROWS_SUFFIX, REMOVED_SUFFIX = ".sst", ".removed"
"""Of files of rows, and of files of keys whose rows are deleted."""

_ENTRY = schema.ENTRY[0]
_DELETIONS = re.compile(r"# (?:range )?deletions=(\d+)")


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that belong to the rows: the first unused inode, the last used object number, and the time of the newest
    commit in them."""

    inode: int
    object: int
    newest: int


class DumpedFile(msgspec.Struct, frozen=True, kw_only=True):
    """Of rows, or of keys whose rows are deleted. ``digest`` is XXH3-128 in hex; ``first`` and ``last`` are keys."""

    path: Path
    size: int
    digest: str
    entries: int
    first: bytes
    last: bytes


def marks_of(database: Database) -> Marks:
    return Marks(
        inode=int.from_bytes(database.get(schema.SINGLE_INODE) or b"", "big") or 2,
        object=int.from_bytes(database.get(schema.SINGLE_OBJECT) or b"", "big"),
        newest=int.from_bytes(database.get(schema.SINGLE_NEWEST) or b"", "big"),
    )


class Dump:
    """The rows of one moment, file by file (`next_file`), into a directory. See the module's head for threads.

    ``applied_since``: commits older than this time need not be listed as applied. ``files_before``: numbers of files
    that must not be used again. ``with_histories``: the last file has these, if there are any.
    """

    def __init__(
        self,
        database: Database,
        directory: Path,
        *,
        applied_since: int,
        file_bytes_max: int = FILE_BYTES_MAX,
        files_before: int = 0,
        with_histories: bool = False,
    ) -> None:
        self.marks = marks_of(database)
        self.names = self.directories = 0
        """Of the files made so far; the root is no name."""
        self._directory, self._file_bytes_max = directory, file_bytes_max
        self._rows = self._rows_of_names(database.frozen(schema.NAME_KINDS[0]), applied_since)
        self._ahead = next(self._rows, None)
        self._histories = _histories(database) if with_histories else iter(())
        self._files = files_before

    def _rows_of_names(
        self, everything: Iterator[tuple[bytes, bytes]], applied_since: int
    ) -> Iterator[tuple[bytes, bytes]]:
        since = schema.APPLIED + schema.NUMBER.pack(max(0, applied_since))
        for key, value in everything:
            kind = key[0]
            if kind not in KINDS or key < since:
                continue
            if kind == _ENTRY:
                self._count(value)
            yield key, value

    def _count(self, row: bytes) -> None:
        if len(row) < HEAD.size:
            return  # damaged: it is kept unchanged, so that folding loses nothing
        _refuse_local(row)
        self.names += 1
        self.directories += is_directory(row)

    def next_file(self) -> DumpedFile | None:
        """The next rows in a file of their own, or None where there are no more. Raises CacheError."""
        if self._ahead is None:
            rows, self._histories = self._histories, iter(())
            return _write_histories(self._directory, rows)
        path = self._directory / f"{self._files:04d}{ROWS_SUFFIX}"
        self._files += 1
        made, self._ahead = _write_rows(path, self._ahead, self._rows, self._file_bytes_max)
        return made

    def close(self) -> None:
        """Before the database is closed."""
        self._rows = self._histories = iter(())


class DumpOfChanges:
    """The rows that were written since the index of the time ``since``, then the keys of those that were deleted, then
    the histories. ``names`` and ``directories`` are those of the index that the database began with. For threads see
    the module's head."""

    def __init__(
        self, database: Database, directory: Path, *, since: int, names: int, directories: int,
        file_bytes_max: int = FILE_BYTES_MAX,
    ) -> None:  # fmt: skip
        self.marks, self.names, self.directories = marks_of(database), names, directories
        self._db, self._directory, self._file_bytes_max = database, directory, file_bytes_max
        self._writes = database.changed.writes
        self._files = 0
        self._rows: Iterator[tuple[bytes, bytes]]
        self._removed: Iterator[bytes]
        self._rows = ((key, row) for key, row in self._with_rows(since) if row is not None)
        self._removed = (key for key, row in self._with_rows(since) if row is None)
        self._ahead: tuple[bytes, bytes] | None = None
        self._ahead_removed: bytes | None = None
        self._histories = _histories(database)

    def _with_rows(self, since: int) -> Iterator[tuple[bytes, bytes | None]]:
        for key in self._db.changed.keys_since(since):
            row = self._db.get(key)
            if row is not None and key[0] == _ENTRY:
                _refuse_local(row)
            yield key, row

    def next_file(self) -> DumpedFile | None:
        """The next file, or None if there are no more. Raises CacheError, also if rows were written since the dump
        began."""
        if not self._files:
            self._count()
        made = self._next_file()
        if self._db.changed.writes != self._writes:
            raise CacheError("names were changed while they were written into the index: run it again")
        return made

    def _count(self) -> None:
        names, directories = self._db.changed.count_names()
        self.names, self.directories = self.names + names, self.directories + directories
        self._ahead, self._ahead_removed = next(self._rows, None), next(self._removed, None)

    def _next_file(self) -> DumpedFile | None:
        number = f"{self._files:04d}"
        self._files += 1
        if self._ahead is not None:
            path = self._directory / f"{number}{ROWS_SUFFIX}"
            made, self._ahead = _write_rows(path, self._ahead, self._rows, self._file_bytes_max)
            return made
        if self._ahead_removed is None:
            rows, self._histories = self._histories, iter(())
            return _write_histories(self._directory, rows)
        path = self._directory / f"{number}{REMOVED_SUFFIX}"
        made, self._ahead_removed = _write_removed(path, self._ahead_removed, self._removed)
        return made

    def close(self) -> None:
        """Before the database is closed."""
        self._rows, self._removed, self._histories = iter(()), iter(()), iter(())


AnyDump: TypeAlias = Dump | DumpOfChanges
"""Its `names` and `directories` count when all files are made."""


def _histories(database: Database) -> Iterator[tuple[bytes, bytes]]:
    """Of one moment, as `Database.frozen`."""
    return takewhile(lambda row: row[0][0] == schema.HISTORY[0], database.frozen(schema.HISTORY))


def _write_histories(directory: Path, rows: Iterator[tuple[bytes, bytes]]) -> DumpedFile | None:
    """A file of these rows; None where there are none. Raises CacheError."""
    ahead = next(rows, None)
    return None if ahead is None else _write_rows(directory / HISTORIES, ahead, rows, HISTORIES_BYTES_MAX)[0]


def _refuse_local(row: bytes) -> None:
    if len(row) >= HEAD.size and HEAD.unpack_from(row)[1] & Flag.LOCAL:
        raise CacheError(
            "this cache directory has files that are not in the store yet: mount it until they are uploaded"
        )


def _write_rows(
    path: Path, ahead: tuple[bytes, bytes], rows: Iterator[tuple[bytes, bytes]], bytes_max: int
) -> tuple[DumpedFile, tuple[bytes, bytes] | None]:
    """A file that begins with the row ``ahead``, and the first one of ``rows`` that is not in it. Raises CacheError."""
    row: tuple[bytes, bytes] | None = ahead
    first = last = ahead[0]
    entries = 0
    try:
        writer = SstFileWriter(options())
        writer.open(str(path))
        while row is not None:
            last = row[0]
            writer[last] = row[1]
            entries += 1
            row = next(rows, None)
            if entries % ROWS_BETWEEN_LOOKS == 0 and writer.file_size() >= bytes_max:
                break
        writer.finish()
        made = _dumped(path, entries, first, last)
    except CacheError:
        raise
    except Exception as error:
        raise CacheError(f"{path} cannot be written: {error}") from error
    return made, row


def _write_removed(path: Path, ahead: bytes, keys: Iterator[bytes]) -> tuple[DumpedFile, bytes | None]:
    """A file of keys that begins with ``ahead``, and the first one of ``keys`` that is not in it. Raises CacheError."""
    key: bytes | None = ahead
    removed: list[bytes] = []
    size = 0
    while key is not None and size < KEYS_BYTES_MAX:
        removed.append(key)
        size += len(key)
        key = next(keys, None)
    try:
        path.write_bytes(msgspec.msgpack.encode(removed))
        return _dumped(path, len(removed), removed[0], removed[-1]), key
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror}") from error


def _dumped(path: Path, entries: int, first: bytes, last: bytes) -> DumpedFile:
    return DumpedFile(
        path=path, size=path.stat().st_size, digest=digest_of(path), entries=entries, first=first, last=last
    )


def digest_of(path: Path) -> str:
    """XXH3-128 of a file. Blocking."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(HASH_BYTES):
            hasher.update(piece)
    return str(hasher.hexdigest())


def check_file(path: Path, first: bytes, last: bytes, kinds: bytes = KINDS) -> None:
    """A file of rows opens, has rows of these ``kinds`` only, from ``first`` to ``last``, and states no deletions.
    Blocking. Raises DamagedCommit.

    It is checked in a separate database, so that its contents cannot affect the names: a row of another kind would be a
    change, or a deletion, that this node would take for its own.
    """
    scratch = path.with_name(path.name + ".scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        trial = Rdict(str(scratch), options())
        try:
            copying = IngestExternalFileOptions()
            copying.set_move_files(False)
            trial.ingest_external_file([str(path)], copying)
            told = trial.property_value("rocksdb.aggregated-table-properties") or ""
            if [int(number) for number in _DELETIONS.findall(told)] != [0, 0]:
                raise DamagedCommit("has deletions, which may be of any row")
            key = _key_from(trial, b"\0")
            if key != first or next(iter(trial.keys(backwards=True)), None) != last:
                raise DamagedCommit("does not hold the rows that its manifest names")
            while key is not None:
                if key[0] not in kinds:
                    raise DamagedCommit(f"holds a row {key[:40]!r} that is not of names")
                key = _key_from(trial, schema.end_of(key))
        finally:
            trial.close()
    except DamagedCommit:
        raise
    except Exception as error:
        raise DamagedCommit(f"does not open: {str(error)[:200]}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _key_from(database: Rdict, begin: bytes) -> bytes | None:
    return cast("bytes | None", next(iter(database.keys(from_key=begin)), None))


def table_of_removed(path: Path, first: bytes, last: bytes) -> Path:
    """Make a file of deletions, for ingestion, from a file of keys, in the same directory. Blocking. Raises
    DamagedCommit where that is not an array of keys of `KINDS`, sorted, from ``first`` to ``last``; CacheError."""
    try:
        keys = msgspec.msgpack.decode(path.read_bytes(), type=list[bytes])
    except MALFORMED as error:
        raise DamagedCommit(f"not an array of keys: {str(error)[:200]}") from error
    except OSError as error:
        raise CacheError(f"{path}: {error.strerror}") from error
    if not keys or (keys[0], keys[-1]) != (first, last):
        raise DamagedCommit("does not hold the keys that its manifest names")
    if any(key >= after for key, after in pairwise(keys)):
        raise DamagedCommit("its keys are not sorted")
    for key in keys:
        if not 1 < len(key) <= KEY_BYTES_MAX or key[0] not in KINDS:
            raise DamagedCommit(f"holds a key {key[:40]!r} that is not of names")
    table = path.with_name(path.name + ROWS_SUFFIX)
    try:
        writer = SstFileWriter(options())
        writer.open(str(table))
        for key in keys:
            del writer[key]
        writer.finish()
    except Exception as error:
        raise CacheError(f"{table} cannot be written: {error}") from error
    return table


def ingest(database: Database, paths: list[Path], marks: Marks, directory: Path, *, folded: int = 0) -> None:
    """Take in checked files, each over those before it, in a database without names, or over those of the index that
    they continue. With ``folded``, the time of the index that they are the rows of, what changes from then on is kept
    (`changed_rows`). Raises CacheError; then nothing was taken in.

    Inode numbers come with the rows. Numbers that this database gave out for other files may be among them where its
    names were dropped before; that is at the start of a mount, when the kernel knows no inode. None of either is given
    out again.
    """
    known = marks_of(database)
    numbers = {
        schema.SINGLE_INODE: max(known.inode, marks.inode),
        schema.SINGLE_NEWEST: marks.newest,
        schema.SINGLE_POLLED: marks.newest,
        schema.SINGLE_OBJECT: max(known.object, marks.object),
    }
    rows = {key: schema.NUMBER.pack(number) for key, number in numbers.items()}
    if folded:
        rows[schema.SINGLE_FOLDED] = Folded(folded, folded).pack()
    path = directory / f"marks{ROWS_SUFFIX}"
    try:
        writer = SstFileWriter(options())
        writer.open(str(path))
        for key, row in sorted(rows.items()):
            writer[key] = row
        writer.finish()
    except Exception as error:
        raise CacheError(f"{path} cannot be written: {error}") from error
    database.ingest([*paths, path])


def set_newest(database: Database, time: int) -> None:
    """Record that the names are as of the newest commit of this time."""
    database.commit(Batch({schema.SINGLE_NEWEST: schema.NUMBER.pack(time)}))


def folded_of(database: Database) -> Folded:
    """The index whose names these are, except for changes since."""
    return database.changed.folded


def mark_folded(database: Database, index: int, *, since: int) -> None:
    """Record that the names are those of the index of this time; changes are known since that of the time ``since``,
    and older notes are deleted."""
    batch = Batch()
    batch.delete_range(schema.CHANGED, schema.CHANGED + schema.NUMBER.pack(since))
    batch.rows[schema.SINGLE_FOLDED] = Folded(index, since).pack()
    database.commit(batch, sync=True)


def drop_names(database: Database, *, is_other_lake: bool = False) -> None:
    """Forget all names and their rows; journals, identity and issued numbers stay. Raises CacheError.
    ``is_other_lake``: the next names are those of another lake, in which no deletion of this one may be made.
    Uncommitted changes of names made here are also removed from the tree; `reapply_wanted` is true until they were
    applied again.
    """
    batch = Batch()
    deletions = (schema.DELETION, schema.DELETION_DUE) if is_other_lake else ()
    for kind in (*schema.NAME_KINDS, schema.HISTORY, schema.REFUSED, schema.CHANGED, *deletions):
        batch.delete_range(kind, schema.end_of(kind))
    batch.rows[schema.SINGLE_NEWEST] = batch.rows[schema.SINGLE_POLLED] = batch.rows[schema.SINGLE_COMPLETE] = None
    batch.rows[schema.SINGLE_OUTDATED] = batch.rows[schema.SINGLE_FOLDED] = None
    batch.rows[schema.SINGLE_REAPPLY] = b""
    database.commit(batch, sync=True)


def reapply_wanted(database: Database) -> bool:
    return database.get(schema.SINGLE_REAPPLY) is not None


def reapplied(database: Database) -> None:
    database.commit(Batch({schema.SINGLE_REAPPLY: None}))


def are_names_outdated(database: Database) -> bool:
    return database.get(schema.SINGLE_OUTDATED) is not None


def lake_of(database: Database) -> str:
    """Id of the lake record that the names belong to; empty if none was recorded."""
    return (database.get(schema.SINGLE_LAKE) or b"").decode()


def note_lake(database: Database, lake_id: str) -> None:
    database.commit(Batch({schema.SINGLE_LAKE: lake_id.encode()}))


def writer_of(database: Database) -> str:
    """Who committed last from this cache directory; empty before the first commit."""
    return (database.get(schema.SINGLE_WRITER) or b"").decode()


def set_writer(database: Database, writer: str) -> None:
    database.commit(Batch({schema.SINGLE_WRITER: writer.encode()}))


def missing_before(database: Database) -> int:
    """Commits before this time were collected, and the names here lack their changes; 0 if none is missing."""
    return int.from_bytes(database.get(schema.SINGLE_MISSING) or b"", "big")


def set_missing_before(database: Database, time: int) -> None:
    database.commit(Batch({schema.SINGLE_MISSING: schema.NUMBER.pack(time) if time else None}), sync=True)


def accept_missing(database: Database) -> None:
    """Accept the names here as the result of all commits before `missing_before`, too."""
    missing = missing_before(database)
    newest = max(marks_of(database).newest, missing - 1)
    database.commit(Batch({schema.SINGLE_NEWEST: schema.NUMBER.pack(newest), schema.SINGLE_MISSING: None}), sync=True)


def empty_directory(directory: Path) -> Path:
    """Create a directory for files in transit; files of an earlier daemon there are removed. Raises CacheError."""
    remove_directory(directory)
    try:
        os.makedirs(directory, mode=0o700)
    except OSError as error:
        raise CacheError(f"cannot use {directory}: {error.strerror}") from error
    return directory


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
