"""Rows of all names as files of sorted rows (RocksDB's SST), out of one database and into another.

What always holds: a dump is of one moment, whatever is changed meanwhile; it has the names and what belongs to them
(`KINDS`) and nothing that is of one node alone (journals, what is to be deleted, identity). Files are taken in all or
none, together with the marks that go with them (`Marks`), so a database never has the names without the numbers that
must not be given out again. Dumping and checking are blocking code for one worker thread at a time; the rest is for the
trio thread. A crash leaves files in a directory that is the caller's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import msgspec
import xxhash
from rocksdict import IngestExternalFileOptions, Rdict, SstFileWriter

from lakefs_fuse.errors import CacheError, DamagedCommit
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database, options
from lakefs_fuse.meta.entry import HEAD, Flag

KINDS = b"".join(schema.NAME_KINDS)
"""First bytes of the keys that a dump has, in order."""
ROWS = int(schema.VERSION)
"""Which layout the rows have."""
FILE_BYTES_MAX = 24 << 20
"""A file is ended when it has so many bytes; its index and filter come on top."""
ROWS_BETWEEN_LOOKS = 1000
HASH_BYTES = 1 << 20

_ENTRY = schema.ENTRY[0]


class Marks(msgspec.Struct, frozen=True, kw_only=True):
    """Numbers that go with the rows: the first inode and the last object number that may be used, and the time of the
    newest commit that is in them."""

    inode: int
    object: int
    newest: int


class DumpedFile(msgspec.Struct, frozen=True, kw_only=True):
    """``digest`` is XXH3-128 in hex; ``first`` and ``last`` are keys."""

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


def has_names(database: Database) -> bool:
    return next(database.scan(schema.ENTRY, schema.end_of(schema.ENTRY)), None) is not None


def has_local_changes(database: Database) -> bool:
    """Something was changed or written here that is in no store yet."""
    return any(next(database.scan(kind, schema.end_of(kind)), None) is not None for kind in schema.LOCAL_KINDS)


class Dump:
    """The rows of one moment, file by file (`next_file`), into a directory. See the module's head for threads.

    ``applied_since``: commits older than this time need not be told to have been applied. ``files_before``: numbers of
    files that are not to be used again.
    """

    def __init__(
        self,
        database: Database,
        directory: Path,
        *,
        applied_since: int,
        file_bytes_max: int = FILE_BYTES_MAX,
        files_before: int = 0,
    ) -> None:
        self.marks = marks_of(database)
        self.names = self.directories = self.bytes = self.entries = 0
        """Of the files made so far; the root is no name."""
        self._directory, self._file_bytes_max = directory, file_bytes_max
        self._rows = self._rows_of_names(database.frozen(schema.NAME_KINDS[0]), applied_since)
        self._ahead = next(self._rows, None)
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
            return  # damaged: it stays as it is, so that nothing is lost by folding
        flags: int = HEAD.unpack_from(row)[1]
        if flags & Flag.LOCAL:
            raise CacheError("this cache directory has files that are in no store yet: mount it and let them go up")
        self.names += 1
        self.directories += flags & Flag.DIRECTORY

    def next_file(self) -> DumpedFile | None:
        """The next rows in a file of their own, or None where there are no more. Raises CacheError."""
        row = self._ahead
        if row is None:
            return None
        path = self._directory / f"{self._files:04d}.sst"
        self._files += 1
        first = last = row[0]
        entries = 0
        try:
            writer = SstFileWriter(options())
            writer.open(str(path))
            while row is not None:
                last = row[0]
                writer[last] = row[1]
                entries += 1
                row = next(self._rows, None)
                if entries % ROWS_BETWEEN_LOOKS == 0 and writer.file_size() >= self._file_bytes_max:
                    break
            writer.finish()
            self._ahead = row
            digest = digest_of(path)
            size = path.stat().st_size
        except CacheError:
            raise
        except Exception as error:
            raise CacheError(f"{path} cannot be written: {error}") from error
        self.bytes += size
        self.entries += entries
        return DumpedFile(path=path, size=size, digest=digest, entries=entries, first=first, last=last)

    def close(self) -> None:
        """Before the database is closed."""
        self._rows = iter(())


def digest_of(path: Path) -> str:
    """XXH3-128 of a file. Blocking."""
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(HASH_BYTES):
            hasher.update(piece)
    return str(hasher.hexdigest())


def check_file(path: Path, first: bytes, last: bytes) -> None:
    """A file of rows opens, and has rows of `KINDS` only, from ``first`` to ``last``. Blocking. Raises DamagedCommit.

    It is tried in a database of its own beside it, so that nothing it may hold gets near the names: a row of another
    kind would be a change, or a deletion, that this node then believes to be its own.
    """
    scratch = path.with_name(path.name + ".scratch")
    shutil.rmtree(scratch, ignore_errors=True)
    try:
        trial = Rdict(str(scratch), options())
        try:
            copying = IngestExternalFileOptions()
            copying.set_move_files(False)
            trial.ingest_external_file([str(path)], copying)
            key = _key_from(trial, b"\0")
            if key != first or next(iter(trial.keys(backwards=True)), None) != last:
                raise DamagedCommit("does not hold the rows that its manifest names")
            while key is not None:
                if key[0] not in KINDS:
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


def ingest(database: Database, paths: list[Path], marks: Marks, directory: Path) -> None:
    """Take in checked files, in a database without names. Raises CacheError; then there are none still.

    Inode numbers come with the rows. Numbers that this database gave out for other files may be among them where its
    names were dropped before; that is at the start of a mount, when the kernel knows no inode. None of either is given
    out again.
    """
    known = marks_of(database)
    rows = {
        schema.SINGLE_INODE: max(known.inode, marks.inode),
        schema.SINGLE_NEWEST: marks.newest,
        schema.SINGLE_POLLED: marks.newest,
        schema.SINGLE_OBJECT: max(known.object, marks.object),
    }
    path = directory / "marks.sst"
    try:
        writer = SstFileWriter(options())
        writer.open(str(path))
        for key, number in sorted(rows.items()):
            writer[key] = schema.NUMBER.pack(number)
        writer.finish()
    except Exception as error:
        raise CacheError(f"{path} cannot be written: {error}") from error
    database.ingest([*paths, path])


def drop_names(database: Database) -> None:
    """Forget all names and what belongs to them; journals, identity and numbers given out stay. Raises CacheError.

    Changes of names made here that are in no commit yet go from the tree as well; `reapply_wanted` is true until
    somebody made them again.
    """
    batch = Batch()
    for kind in (*schema.NAME_KINDS, schema.REFUSED):
        batch.delete_range(kind, schema.end_of(kind))
    batch.rows[schema.SINGLE_NEWEST] = batch.rows[schema.SINGLE_POLLED] = None
    batch.rows[schema.SINGLE_OUTDATED] = None
    batch.rows[schema.SINGLE_REAPPLY] = b""
    database.commit(batch, sync=True)


def reapply_wanted(database: Database) -> bool:
    return database.get(schema.SINGLE_REAPPLY) is not None


def reapplied(database: Database) -> None:
    database.commit(Batch({schema.SINGLE_REAPPLY: None}))


def are_names_outdated(database: Database) -> bool:
    return database.get(schema.SINGLE_OUTDATED) is not None


def writer_of(database: Database) -> str:
    """Who committed last from this cache directory; empty before the first commit."""
    return (database.get(schema.SINGLE_WRITER) or b"").decode()


def set_writer(database: Database, writer: str) -> None:
    database.commit(Batch({schema.SINGLE_WRITER: writer.encode()}))


def missing_before(database: Database) -> int:
    """Commits before this time were collected, and what they said is not among the names here; 0 where none is
    missing."""
    return int.from_bytes(database.get(schema.SINGLE_MISSING) or b"", "big")


def set_missing_before(database: Database, time: int) -> None:
    database.commit(Batch({schema.SINGLE_MISSING: schema.NUMBER.pack(time) if time else None}), sync=True)


def empty_directory(directory: Path) -> Path:
    """For files on their way; what an earlier daemon left there goes. Raises CacheError."""
    remove_directory(directory)
    try:
        os.makedirs(directory, mode=0o700)
    except OSError as error:
        raise CacheError(f"cannot use {directory}: {error.strerror}") from error
    return directory


def remove_directory(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
