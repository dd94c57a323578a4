"""The database of one cache directory, on RocksDB unless a node has other engines. `schema` has its keys.

What always holds (*atomic batches*): a `Batch` becomes visible, and survives a crash, whole or not at all; state in
memory about its rows changes with them (`Batch.committed`). All calls are short and made on the trio thread, except
`sync`, `frozen` iterators, `copy_to`, and reads of a database that is not being written; so code between two awaits is
atomic for every other task. Only batches committed with ``sync`` survive a crash of the machine: the tail of the log
may be missing then, and the next listing restores names. Batches of `commit_volatile` while the disk is full are such a
tail for a crash of the process, too.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Never, cast

import msgspec
from rocksdict import (
    BlockBasedIndexType,
    BlockBasedOptions,
    Cache,
    Checkpoint,
    DBCompressionType,
    DBRecoveryMode,
    IngestExternalFileOptions,
    Options,
    Rdict,
    RdictIter,
    ReadOptions,
    WriteBatch,
    WriteOptions,
)

from lakefs_fuse.environment import descriptor_limit
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.disk import Disk
from lakefs_fuse.environment.local_disk import is_out_of_room
from lakefs_fuse.environment.storage_engine import Engine, Engines, Rows, Step
from lakefs_fuse.errors import CacheDamaged, CacheError, CacheFull, SchemaMismatch
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.changed_rows import ChangedRows
from lakefs_fuse.meta.volatile_rows import VolatileRows

MEMORY_BYTES = 64 << 20
"""Half of it for the block cache, and half for write buffers."""
WRITE_BUFFERS = 2
OPEN_FILES_MAX = 256
LOG_FILES = 3
"""Files of RocksDB's own log, the one that it writes included."""
LOG_BYTES_MAX = 2 << 20
"""RocksDB writes to its log while the database is open, 6 KB of statistics every ten minutes in a mount that does
nothing, and without a limit in one file for as long as that is."""
MANIFEST_BYTES_MAX = 4 << 20
"""RocksDB adds to its list of files while the database is open, and replaces it at 1 GiB unless told."""
REOPEN_PAUSE_S = 1.0
PROBE_BYTES = 64 << 10
"""Reopening the database writes less."""
DAMAGED_MAX = 10_000
"""Keys of damaged rows in memory, so that each is counted once; no more are counted."""
DELETED_ALONE_MAX = 1000
"""The rows of a range are deleted one by one if there are no more than these. Whenever RocksDB reads a row, it looks
through all ranges that were deleted since it last wrote a table, which would take ever longer."""
INODES_RESERVED = 1 << 20
"""Inode numbers reserved in one write, so that issuing one is not a write."""

log = logging.getLogger(__name__)


class Batch(msgspec.Struct):
    """Changes that become visible, and survive a crash, together or not at all.

    Callers in `meta` write ``rows`` themselves: a listing writes three for each name, and a call for each costs more.
    """

    rows: Rows = {}
    """Values by key; None deletes a row."""
    shares: list[tuple[int, int, int]] = []
    """Numbers of objects, and by how much their entries and live bytes change (see `object_table`)."""
    ranges: list[Step] = []
    """Keys in [begin, end) are deleted, each time after the rows that were in the batch by then."""
    committed: list[Callable[[], None]] = []
    """Called when the batch was written, and never if it was not, so that counts in memory change with their rows."""

    def delete_range(self, begin: bytes, end: bytes) -> None:
        self.ranges.append((self.rows.copy(), begin, end))
        self.rows.clear()

    def changes(self, key: bytes) -> bool:
        """Whether the batch writes or deletes the row of a key."""
        deletes = (key in rows or begin <= key < end for rows, begin, end in self.ranges)
        return key in self.rows or any(deletes)

    def __bool__(self) -> bool:
        return bool(self.rows or self.ranges)


class Recording:
    """Keys of the rows that were changed while rows were read in steps (`Database.recording`)."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()

    def add(self, batch: Batch) -> None:
        """A deleted range counts as its first key."""
        self._keys.update(batch.rows)
        for rows, begin, _ in batch.ranges:
            self._keys.update(rows)
            self._keys.add(begin)

    def take(self) -> set[bytes]:
        """Those since the last call."""
        keys, self._keys = self._keys, set()
        return keys


def options(memory_bytes: int = MEMORY_BYTES) -> Options:
    """Options of a database and of the files that it ingests. Memory is bounded, whatever the number of names."""
    made = Options(raw_mode=True)
    made.create_if_missing(True)
    made.set_write_buffer_size(memory_bytes // 2 // WRITE_BUFFERS)
    made.set_max_write_buffer_number(WRITE_BUFFERS)
    made.set_max_open_files(min(OPEN_FILES_MAX, descriptor_limit.share()))
    made.set_keep_log_file_num(LOG_FILES)
    made.set_max_log_file_size(LOG_BYTES_MAX)
    made.set_max_manifest_file_size(MANIFEST_BYTES_MAX)
    made.set_max_total_wal_size(64 << 20)
    made.set_compression_type(DBCompressionType.lz4())
    made.set_wal_recovery_mode(DBRecoveryMode.point_in_time())
    made.set_max_background_jobs(2)
    table = BlockBasedOptions()
    table.set_block_cache(Cache(memory_bytes // 2))
    table.set_cache_index_and_filter_blocks(True)
    table.set_bloom_filter(10, False)
    # In parts, so that what one lookup needs of a filter or index always fits into the cache: a whole filter of some
    # million names is larger than a shard of it, and was read from the file for every lookup (3.6 MiB, 670 µs; now 4).
    table.set_index_type(BlockBasedIndexType.two_level_index_search())
    table.set_partition_filters(True)
    table.set_metadata_block_size(4 << 10)
    table.set_pin_top_level_index_and_filter(True)
    table.set_block_size(16 << 10)
    made.set_block_based_table_factory(table)
    return made


class RocksEngine:
    """An open RocksDB database."""

    def __init__(self, directory: Path, memory_bytes: int) -> None:
        self._raw = Rdict(str(directory), options(memory_bytes))
        self.get: Callable[[bytes], bytes | None] = self._raw.get
        self.get_many = cast("Callable[[list[bytes]], list[bytes | None]]", self._raw.get)
        self._synced, self._plain = WriteOptions(), WriteOptions()
        self._synced.sync = True

    def items(self, begin: bytes, end: bytes = b"", /) -> Iterator[tuple[bytes, bytes]]:
        bounded = ReadOptions()
        if end:
            bounded.set_iterate_upper_bound(end)
        rows = self._raw.iter(bounded)
        rows.seek(begin)
        return _read(rows, end)

    def write(self, steps: Sequence[Step], *, sync: bool) -> None:
        raw = WriteBatch(raw_mode=True)
        put, delete = raw.put, raw.delete
        before: list[Rows] = []
        for rows, begin, end in steps:
            for key, value in rows.items():
                if value is None:
                    delete(key)
                else:
                    put(key, value)
            before.append(rows)
            if not end:
                continue
            few = self._few_keys(begin, end, before)
            if few is None:
                raw.delete_range(begin, end)
            else:
                for key in few:
                    delete(key)
        self._raw.write(raw, self._synced if sync else self._plain)

    def _few_keys(self, begin: bytes, end: bytes, before: Sequence[Rows]) -> set[bytes] | None:
        """Return the keys in [begin, end), those of rows that are written ``before`` among them; None if there may be
        more than DELETED_ALONE_MAX."""
        if sum(map(len, before)) > DELETED_ALONE_MAX:
            return None
        keys = {key for key, _ in islice(self.items(begin, end), DELETED_ALONE_MAX + 1)}
        keys.update(key for rows in before for key in rows if begin <= key < end)
        return keys if len(keys) <= DELETED_ALONE_MAX else None

    def sync(self) -> None:
        self._raw.flush_wal(True)

    def ingest(self, paths: Sequence[Path]) -> None:
        moving = IngestExternalFileOptions()
        moving.set_move_files(True)
        self._raw.ingest_external_file([str(path) for path in paths], moving)

    def checkpoint(self, directory: Path) -> None:
        """Files are shared, so it takes little space and time, whatever the number of rows."""
        Checkpoint(self._raw).create_checkpoint(str(directory))

    def integer_property(self, name: str) -> int:
        return self._raw.property_int_value(f"rocksdb.{name}") or 0

    def close(self) -> None:
        self._raw.close()


def _read(rows: RdictIter, _end: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Raises if a row cannot be read, where `Rdict.items` would end as if there were no more. Keeps a reference to its
    end key, because rocksdict 0.3 keeps a pointer into it: without the reference an iterator ends early, or continues
    beyond the end."""
    while rows.valid():
        yield cast("bytes", rows.key()), cast("bytes", rows.value())
        rows.next()
    rows.status()


def _is_damage(error: Exception) -> bool:
    """Whether files of RocksDB are damaged or missing, which only its error texts show. A system call that failed for
    another reason (descriptors, memory, space, the disk) is no damage, although some are reported as "Corruption: Can't
    access …: IO error: …"."""
    text = str(error)
    return os.strerror(errno.ENOENT) in text or ("Corruption" in text and "IO error" not in text)


class RocksEngines:
    """Opens RocksDB databases, each with so much memory."""

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._memory_bytes = memory_bytes

    def open(self, directory: Path) -> RocksEngine:
        try:
            return RocksEngine(directory, self._memory_bytes)
        except Exception as error:
            text = str(error)
            if f"{directory / 'LOCK'}: " in text and "open a file" not in text:
                raise CacheError(
                    f"{directory} is in use by another process: unmount the mount that has this cache directory, or "
                    f"give --cache-dir another one ({error})"
                ) from error
            raise

    def repair(self, directory: Path) -> None:
        Rdict.repair(str(directory), options())


class _ClosedEngine:
    """The engine of a database that was closed and could not be opened again. Each read tries to open it first."""

    def __init__(self, open_again: Callable[[], Engine]) -> None:
        """``open_again`` raises CacheError."""
        self._open_again = open_again

    def get(self, key: bytes, /) -> bytes | None:
        return self._open_again().get(key)

    def get_many(self, keys: list[bytes], /) -> list[bytes | None]:
        return self._open_again().get_many(keys)

    def items(self, begin: bytes, end: bytes = b"", /) -> Iterator[tuple[bytes, bytes]]:
        return self._open_again().items(begin, end)

    def write(self, _steps: Sequence[Step], *, sync: bool) -> None:
        self._refuse()

    def sync(self) -> None:
        """Does not open the database, because a worker thread calls it."""
        self._refuse()

    def ingest(self, _paths: Sequence[Path]) -> None:
        self._refuse()

    def checkpoint(self, _directory: Path) -> None:
        self._refuse()

    def integer_property(self, _name: str) -> int:
        return 0

    def close(self) -> None:
        pass

    def _refuse(self) -> Never:
        raise RuntimeError("it was closed after a failed write, and could not be opened again")


class _Cursor:
    """The engine's iterator of a scan; None before the first row, and after the engine was closed."""

    __slots__ = ("rows",)

    def __init__(self) -> None:
        self.rows: Iterator[tuple[bytes, bytes]] | None = None


class Database:
    """An open database. One process at a time; the cache directory's lock is the caller's."""

    def __init__(
        self,
        directory: Path,
        identity: str,
        clock: Clock,
        disk: Disk,
        engines: Engines | None = None,
        *,
        repairs: bool = True,
    ) -> None:
        """``identity`` names the lake. A damaged database that does not open is repaired, which may lose rows and
        restore old ones, so that its names are outdated; or it is replaced by an empty one. Without ``repairs`` it is
        an error: CacheDamaged. Raises SchemaMismatch, and CacheError if the database has another lake's names, or is
        not damaged but cannot be opened now (CacheFull: for lack of space); then nothing in it was changed."""
        self._directory, self.clock, self._disk, self._repairs = directory, clock, disk, repairs
        self._engines = engines or RocksEngines()
        self.writes = 0
        """Counts writes and possible losses of rows; while it is unchanged, so are the rows."""
        self._failed_at: float | None = None
        self._failed: Sequence[Step] = ()
        """The batch whose write failed last, until the database is opened again: it may be there then."""
        self._volatile: VolatileRows | None = None
        """The engine in use while it has rows for the one below when that is opened again: the last write failed."""
        self._found_full = self._is_closed = False  # closed until it was opened again after a failed write
        self._cursors: set[_Cursor] = set()
        """Of the scans in progress. RocksDB does not open a database again while an iterator of it lives."""
        self._recordings, self._damaged = list[Recording](), set[bytes]()
        self._engine, is_repaired = self._open_or_repair()
        if not self._is_whole():
            self.close()
            if not repairs:
                raise CacheDamaged(f"the metadata cache {directory} is damaged")
            self._engine, is_repaired = self._begin_anew(), False
        self._write_shares: Callable[[Batch], None] = lambda _: None
        self.moved: list[Callable[[], None]] = []
        """Called with each commit that may change the path of a directory, and when rows come from elsewhere."""
        self.reopened: list[Callable[[], None]] = []
        """Called when the database was opened again after a failed write, which, if it is too large to be undone, may
        have taken effect completely: state in memory about rows is read again."""
        self.ingested: list[Callable[[], None]] = []
        """Called when rows have come from elsewhere."""
        self.found_full: list[Callable[[], None]] = []
        """Called for each write for which the disk has no space."""
        self.changed = ChangedRows(self.get, self.get_many, self.scan)
        self.lost_rows = self._note_losses(identity, is_repaired=is_repaired)
        """Whether the database is new, or was damaged, so that missing rows may have existed. Until `end_loss`, also
        after a restart."""
        self._load_inodes()

    def _note_losses(self, identity: str, *, is_repaired: bool) -> bool:
        """Check that the database is that of the lake ``identity``, or make it so if it is new. Returns whether rows
        may be missing."""
        stored = self.get(schema.SINGLE_IDENTITY)
        rows: Rows = {}
        if stored is None:
            rows = {schema.SINGLE_IDENTITY: identity.encode(), schema.SINGLE_VERSION: schema.VERSION}
        elif (refusal := self._refusal(identity, stored.decode(errors="replace"))) is not None:
            self.close()
            raise refusal
        is_noted = self.get(schema.SINGLE_LOST) is not None
        may_miss_rows = is_repaired or stored is None or is_noted
        if may_miss_rows and not is_noted:
            rows[schema.SINGLE_LOST] = b""
        if is_repaired:
            rows[schema.SINGLE_OUTDATED] = b""
        if rows:
            self.commit(Batch(rows), sync=True)
        return may_miss_rows

    def _refusal(self, identity: str, stored: str) -> CacheError | None:
        """Why this database, of the lake ``stored``, is not for the lake ``identity`` and this program."""
        directory, version = self._directory.parent, self.get(schema.SINGLE_VERSION) or b"none"
        if stored == identity and version == schema.VERSION:
            return None
        todo = "give --cache-dir another directory"
        if stored != identity:
            return CacheError(f"the cache directory {directory} belongs to {stored}: {todo}")
        if self.has_local_changes():
            todo = (
                "it has files or changes that are not in the store yet; mount with that version, and unmount when "
                "`stats` shows nothing unfinished"
            )
        return SchemaMismatch(
            f"the cache directory {directory} was written by another version of lakefs-fuse (schema "
            f"{version.decode(errors='replace')}, this one has {schema.VERSION.decode()}): {todo}"
        )

    def has_local_changes(self) -> bool:
        """Whether files or changes of this node are not in the store yet, including orphans. Raises CacheError."""
        return any(next(self.scan(kind, schema.end_of(kind)), None) is not None for kind in schema.LOCAL_KINDS)

    def end_loss(self) -> None:
        """Record that the information of lost rows was searched for elsewhere. Raises CacheError."""
        if self.lost_rows:
            self.commit(Batch({schema.SINGLE_LOST: None}), sync=True)
            self.lost_rows = False

    def _load_inodes(self) -> None:
        reserved = self.get(schema.SINGLE_INODE)
        self._inode_next = int.from_bytes(reserved or b"", "big") or 2
        self._inode_reserved = self._inode_next

    def _is_whole(self) -> bool:
        """After damage, names may remain whose inode numbers could be issued again. The journal is read to its end,
        because rows of a damaged block would be missing from the replay."""
        try:
            for kind in schema.LOCAL_KINDS:
                for _ in self.scan(kind, schema.end_of(kind)):
                    pass
            return not self.has_names() or (
                self.get(schema.SINGLE_IDENTITY) is not None and self.get(schema.SINGLE_INODE) is not None
            )
        except CacheError as error:
            if _is_damage(error):
                return False
            self.close()
            raise

    def has_names(self) -> bool:
        return next(self.scan(schema.ENTRY, schema.end_of(schema.ENTRY)), None) is not None

    def get(self, key: bytes) -> bytes | None:
        """Raises CacheError."""
        try:
            return self._engine.get(key)
        except Exception as error:
            raise self._broken(error) from error

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """As `get`, for each key. Raises CacheError."""
        try:
            return self._engine.get_many(list(keys)) if keys else []
        except Exception as error:
            raise self._broken(error) from error

    def linked(self, links: Sequence[tuple[bytes, bytes]], length: int) -> tuple[bytes, bytes] | None:
        """The row that the first of some links leads to, with its key; None if no link leads to a row. A link is the
        key of a row of ``length`` bytes, and the prefix that these bytes get to form the target key. Raises
        CacheError."""
        get = self._engine.get
        try:
            for key, prefix in links:
                rest = get(key)
                if rest is None:
                    continue
                if len(rest) == length:
                    at = prefix + rest
                    row = get(at)
                    if row is not None:
                        return at, row
                else:
                    self._note_length(key, rest)
            return None
        except Exception as error:
            raise self._broken(error) from error

    def linked_many(self, links: Sequence[tuple[bytes, bytes]], length: int) -> list[tuple[bytes, bytes] | None]:
        """As `linked`, for each link. Raises CacheError."""
        rests = self.get_many([key for key, _ in links])
        keys = [
            b"" if rest is None else prefix + rest if len(rest) == length else self._note_length(key, rest)
            for (key, prefix), rest in zip(links, rests, strict=True)
        ]
        there = [key for key in keys if key]
        rows = dict(zip(there, self.get_many(there), strict=True))
        return [None if (row := rows.get(key)) is None else (key, row) for key in keys]

    def _note_length(self, key: bytes, row: bytes) -> bytes:
        """Count a row that has not the length of its kind as damaged; it leads to no key."""
        self.note_damaged(key, ValueError(f"{len(row)} bytes"))
        return b""

    def write_shares_by(self, write: Callable[[Batch], None]) -> None:
        """``write`` turns the shares of a batch into rows of it, before it is committed."""
        self._write_shares = write

    def note_damaged(self, key: bytes, error: Exception) -> None:
        """Count a row of an index that cannot be decoded, and that the reader skips."""
        if not self._damaged:
            log.error("the row %r of the metadata cache is damaged and skipped: %s (logged once; `stats` counts such "
                      "rows, fsck lists them)", key[:80], error)  # fmt: skip
        if len(self._damaged) < DAMAGED_MAX:
            self._damaged.add(key)

    def commit(self, batch: Batch, *, sync: bool = False) -> None:
        """Commit the batch. Raises CacheError, or CacheFull if the disk is full; then no part of it takes effect.
        If it is in the log all the same, it is undone when the database is opened again (`volatile_rows`), unless it
        changes more than VOLATILE_BYTES_MAX. If the process ends before, the next one may find it."""
        if not batch:
            return
        if self._failed_at is not None:
            self._reopen()
        self._write(self._prepared(batch), sync=sync)
        self._end_commit(batch)

    def commit_volatile(self, batch: Batch) -> None:
        """Commit a batch that is kept in memory while the disk is full (`volatile_rows`). Raises CacheError, CacheFull
        if it is too large for that.

        For rows that can be had again after a crash: from the store, or from a change that the journal has."""
        if not batch:
            return
        if self._failed_at is not None:
            with suppress(CacheFull):
                self._reopen()
        steps = self._prepared(batch)
        if not self.is_full:
            with suppress(CacheFull):
                self._write(steps, sync=False)
        if self.is_full:
            self._keep(steps)
        self._end_commit(batch)

    def _prepared(self, batch: Batch) -> list[Step]:
        """What a batch changes, with the rows that count and note it. Called once for each batch."""
        if batch.shares:
            self._write_shares(batch)
        if self.changed.folded.index:
            self.changed.record(batch.ranges, batch.rows)
        self.writes += 1
        return [*batch.ranges, (batch.rows, b"", b"")]

    def _write(self, steps: Sequence[Step], *, sync: bool) -> None:
        try:
            self._engine.write(steps, sync=sync)
        except Exception as error:
            self._failed_at = self.clock.mono_s()
            self._failed = [(rows.copy(), begin, end) for rows, begin, end in steps]
            raise self._unwritten(error) from error

    def _keep(self, steps: Sequence[Step]) -> None:
        """Raises CacheFull."""
        try:
            if self._volatile is None:
                self._engine = self._volatile = VolatileRows(self._engine, self._failed)
                log.warning("the disk of %s is full: names are listed into memory until it has room", self._directory)
            self._volatile.add(steps)
        except Exception as error:
            raise self._translate(error) from error

    def _end_commit(self, batch: Batch) -> None:
        for recording in self._recordings:
            recording.add(batch)
        if schema.SINGLE_FOLDED in batch.rows:
            self.changed.load()
        if batch.ranges:
            self.note_move()
        committed, batch.committed = batch.committed, []
        for listener in committed:
            listener()

    @contextmanager
    def recording(self) -> Iterator[Recording]:
        """Record the rows that any task changes until the block ends, for readers that read in steps."""
        recording = Recording()
        self._recordings.append(recording)
        try:
            yield recording
        finally:
            self._recordings.remove(recording)

    @property
    def is_failing(self) -> bool:
        """Whether the last write failed, so that the database is reopened before the next."""
        return self._failed_at is not None

    @property
    def is_full(self) -> bool:
        """Whether it failed because the disk is full."""
        return self.is_failing and self._found_full

    def sync(self) -> None:
        """Make everything committed before survive a crash of the machine. For a worker thread, beside readers and
        writers. Raises CacheError."""
        try:
            self._engine.sync()
        except Exception as error:
            raise self._translate(error) from error

    def _translate(self, error: Exception) -> CacheError:
        return self._no_room() if is_out_of_room(error) else self._broken(error)

    def _broken(self, error: Exception) -> CacheError:
        if isinstance(error, CacheError):  # of a closed engine
            return type(error)(str(error))
        if _is_damage(error):
            return CacheError(
                f"the metadata cache in {self._directory} is damaged: unmount, and when nothing is unfinished, delete "
                f"it; names are read again from the store ({error})"
            )
        return CacheError(f"the metadata cache in {self._directory} cannot be used now: {error}")

    def _unwritten(self, error: Exception) -> CacheError:
        """The error of a failed write, for this change and the next ones."""
        self._found_full = is_out_of_room(error)
        if not self._found_full:
            return self._broken(error)
        for listener in self.found_full:
            listener()
        return self._no_room()

    def _no_room(self) -> CacheFull:
        return CacheFull(f"the disk of the metadata cache in {self._directory} is full: free some space there")

    def _reopen(self) -> None:
        """After a failed write (a full disk) RocksDB accepts none until it is reopened; tried once a second."""
        failed_at = self._failed_at or 0.0
        if self.clock.mono_s() - failed_at < REOPEN_PAUSE_S:
            if self._found_full:
                raise self._no_room()
            raise CacheError(f"the metadata cache in {self._directory} could not be written a moment ago")
        self._failed_at = self.clock.mono_s()
        try:
            if not self._is_closed:
                self._check_disk()
                self._close_to_reopen()
            self._open_again()
        except Exception as error:
            raise self._unwritten(error) from error
        self._failed_at = None

    def _close_to_reopen(self) -> None:
        """Close the engine, with its iterators. If it cannot be opened again, each read tries that."""
        self._keep_refused()
        for cursor in list(self._cursors):
            cursor.rows = None
        self.close()
        closed = _ClosedEngine(self._reopened_engine)
        if self._volatile is None:
            self._engine = closed
        else:
            self._volatile.replace_below(closed)
        self._is_closed = True

    def _keep_refused(self) -> None:
        """Keep the rows that the refused batch changes as they are now: it may be there later."""
        if self._volatile is not None or not self._failed:
            return
        try:
            self._engine = self._volatile = VolatileRows(self._engine, self._failed)
        except Exception as error:  # the text alone is passed on: the traceback has an iterator
            log.warning("%s: the last refused change may take effect: %s", self._directory, str(error))

    def _reopened_engine(self) -> Engine:
        """The engine in use, for a read that met a closed one. Raises CacheError."""
        if self._is_closed:
            self._reopen()
        return self._engine

    def _open_again(self) -> None:
        opened, self._failed = self._engines.open(self._directory), ()
        self._is_closed = False
        self.writes += 1  # the last ones may be lost
        if self._volatile is not None:
            self._volatile.move_to(opened)
        self._engine, self._volatile = opened, None
        self.changed.load()
        self.note_move()
        for listener in self.reopened:
            listener()

    def note_move(self) -> None:
        """Have readers forget the paths of directories (`moved`)."""
        for listener in self.moved:
            listener()

    def _check_disk(self) -> None:
        """Raise OSError if the disk accepts no bytes: a database that was closed, and cannot be opened again there,
        could not even be read."""
        with self._disk.temporary_file(self._directory) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
            self._disk.sync_data(probe.fileno())

    def scan(self, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys in [begin, end) in order, as of the first step: changes made while it is read are not seen. If the
        database is opened again in between (after a failed write), the rest is as of the next step. Recently deleted
        rows beyond the end cost nothing, although RocksDB would read over them one by one to find the next row."""
        cursor, key = _Cursor(), b""
        self._cursors.add(cursor)
        try:
            while True:
                if cursor.rows is None:
                    cursor.rows = self._engine.items(key + b"\0" if key else begin, end)
                key, value = next(cursor.rows)
                yield key, value
        except StopIteration:
            return
        except Exception as error:
            raise self._broken(error) from error
        finally:
            self._cursors.discard(cursor)
            cursor.rows = None  # this frame may live longer, in a traceback

    def frozen(self, begin: bytes, end: bytes = b"") -> Iterator[tuple[bytes, bytes]]:
        """All present rows in [begin, end), or from a key on, for one worker thread at a time. Delete the iterator
        before the database is closed, which a commit after a failed write does, too. It shows one moment, unlike those
        of rocksdict's `Snapshot` (0.3), which see later writes."""
        return self._engine.items(begin, end)

    def ingest(self, paths: Sequence[Path]) -> None:
        """Ingest files of sorted rows (`tables`), all or none of them, durably; the files are moved. Their rows replace
        present ones. Raises CacheError."""
        self.writes += 1
        try:
            self._engine.ingest(paths)
        except Exception as error:
            raise self._broken(error) from error
        self._load_inodes()
        self.changed.load()
        self.note_move()
        for listener in self.ingested:
            listener()

    def copy_to(self, directory: Path) -> None:
        """Copy all present rows to a directory that does not exist yet: files are shared, so it takes little space and
        time, whatever the number of names. Raises CacheError."""
        if self._failed_at is not None:
            self._reopen()
        try:
            self._engine.checkpoint(directory)
        except Exception as error:
            raise self._broken(error) from error

    def new_inode(self) -> int:
        """A number that no name in this cache directory ever had. Numbers reserved while the disk is full are
        volatile, as are the names that have them: if the daemon dies, both are lost. Raises CacheError."""
        if self._inode_next >= self._inode_reserved:
            reserved = self._inode_next + INODES_RESERVED
            self.commit_volatile(Batch({schema.SINGLE_INODE: schema.NUMBER.pack(reserved)}))
            self._inode_reserved = reserved
        self._inode_next += 1
        return self._inode_next - 1

    def new_inodes(self, count: int) -> int:
        """Reserve this many consecutive numbers that were never used; returns the first."""
        first = self.new_inode()
        for _ in range(count - 1):
            self.new_inode()
        return first

    @property
    def inode_next(self) -> int:
        """Numbers below this were issued, or never will be."""
        return self._inode_next

    def statistics(self) -> dict[str, int]:
        """Approximate, in bytes and keys."""
        names = ("estimate-num-keys", "estimate-live-data-size", "cur-size-all-mem-tables", "block-cache-usage")
        try:
            told = {name.replace("-", "_"): self._engine.integer_property(name) for name in names}
        except Exception as error:
            raise self._broken(error) from error
        return {**told, "damaged_rows": len(self._damaged)}

    def close(self) -> None:
        try:
            self._engine.close()
        except Exception as error:  # writers already got the errors of failed writes
            log.warning("closing %s: %s", self._directory, error)

    def _open_or_repair(self) -> tuple[Engine, bool]:
        """The engine, and whether it was repaired. A damaged one is repaired once, if that is requested; if it is still
        damaged it is moved aside, never deleted."""
        try:
            return self._opened(), False
        except CacheDamaged as error:
            if not self._repairs:
                raise
            log.warning("%s: it is repaired", error)
        try:
            with self._translated():
                self._engines.repair(self._directory)
            return self._opened(), True
        except CacheDamaged:
            return self._begin_anew(), False

    def _opened(self) -> Engine:
        with self._translated():
            return self._engines.open(self._directory)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        """Raises CacheDamaged for damage, CacheFull or CacheError for an error that may be over at the next mount."""
        try:
            yield
        except CacheError:
            raise
        except Exception as error:
            if _is_damage(error):
                raise CacheDamaged(f"the metadata cache {self._directory} does not open: {error}") from error
            if is_out_of_room(error):
                raise self._no_room() from error
            raise CacheError(
                f"the metadata cache {self._directory} cannot be opened now, and stays as it is: {error}"
            ) from error

    def _begin_anew(self) -> Engine:
        """Move the database aside, and open an empty one. Raises CacheError; then it was not moved."""
        aside = self._directory.with_name(f"{self._directory.name}.damaged-{self.clock.wall_ns()}")
        self._directory.rename(aside)
        try:
            engine = self._opened()
        except CacheError:
            shutil.rmtree(self._directory, ignore_errors=True)
            aside.rename(self._directory)
            raise
        log.warning("the metadata cache is damaged; it is kept as %s, and created again", aside)
        return engine
