"""The index: the names of a whole lake, folded into files of sorted rows that a fresh mount ingests.

Below `.lakefs/index/<time>/` are the files (`meta.sorted_tables`) and, written last, the manifest that names them: an
index without a manifest does not exist. The two newest are kept. An index of format 2 consists of a *base*, the files
of all rows of one moment, and of *increments*, each with the rows that were written since an earlier index, and the
keys of rows that were deleted. Most of these files are below the prefixes of earlier indexes, and stay as long as a
kept manifest names them (`levels` chooses what is written). `docs/format.md` has every byte.

What always holds:

* *state of its writer*: a mount whose names come from an index is in the state of the writer at that moment, and polls
  for newer commits as it would after a restart;
* *all or nothing*: if the manifest is damaged, or a file does not match it, the whole index is skipped, with a log
  line. Rows in files that match are trusted, as those of commits are.

Commits older than an index's ``horizon``, or than that of the record of gc (`commits.gc_record`), may be deleted. Names
that may lack one of them, because the mount was away for long, are dropped and come from the index. If that is lost or
cannot be read, the names may lack what those commits changed; `sorted_tables.missing_before` says so until an index is
ingested, and nothing is written from such names (`require_all_names`).

An index that is dated too far ahead, as by a node whose clock was wrong, hides the commits that follow it: names from
it are newer than these, and polls begin behind them. It is used only where names would be missing without it, and gives
way to the next two.

`load_newest_index` runs before anything reads the database; any node may write an index at any time. A crash while one
is ingested leaves a directory of files, which the next mount removes; a crash while one is written leaves files without
a manifest, which the next fold removes with `remove_old`, after `UNFINISHED_NS`. Readers skip it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import trio
import xxhash

from lakefs_fuse.commits.commit_log import fetch_undamaged
from lakefs_fuse.commits.gc_record import read_horizon
from lakefs_fuse.commits.hybrid_clock import AHEAD_NS_MAX, WINDOW_NS
from lakefs_fuse.commits.record import TIME_NS_MAX
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import MALFORMED, CacheError, DamagedCommit, LakeError, NotFound, Unsupported
from lakefs_fuse.meta import schema
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.changed_rows import KINDS
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.object_table import NUMBER_MAX
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.sorted_tables import DumpedFile, Marks
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer, FileSlice, ObjectMeta
from lakefs_fuse.sync.nursery import collecting, for_each

INDEX = f"{RESERVED_PREFIX}index/"
"""The prefix of all indexes."""
FORMAT = 1
FORMAT_LEVELS = 2
"""The format with increments and files of earlier indexes, for lakes with that feature (`store.lake_record`)."""
MANIFEST = "manifest"
MANIFEST_BYTES_MAX = 64 << 20
FILES_MAX = 100_000
COUNT_MAX = 1 << 60
FILE_BYTES_MAX = 1 << 30
REMOVED_BYTES_MAX = 64 << 20
"""Maximum size of a file of keys, which is read into memory."""
KEPT = 2
"""Number of indexes that stay once a new one was written: mounts that start may be reading the one before, and the new
one may be damaged."""
UNFINISHED_NS = 24 * 3600 * 1_000_000_000
GET_BYTES = 16 << 20
FILES_AT_ONCE = 3
"""Files that are fetched or stored concurrently; each has GET_BYTES in memory at most."""

_KEY = re.compile(re.escape(INDEX) + r"([0-9a-f]{16})/(.*)", re.DOTALL)
_NAME = re.compile(r"(?:([0-9a-f]{16})/)?(?:[0-9]{4,9}|histories)(\.sst|\.removed)")
_DIGEST = re.compile(r"[0-9a-f]{32}")
log = logging.getLogger(__name__)


class IndexFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A file of an index, with ``entries`` rows, or keys, from key ``first`` to key ``last``.

    ``size`` is in bytes, ``digest`` XXH3-128 in hex. ``name`` is below the index's prefix; the name of a file of an
    earlier index begins with the time of that index and a slash."""

    name: str
    size: int
    digest: str
    entries: int
    first: bytes
    last: bytes


class Increment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The changes since the index of the time ``since``. ``files`` have the rows that were written, ``removed`` the
    keys of rows that were deleted."""

    since: int
    files: list[IndexFile]
    removed: list[IndexFile]

    @property
    def bytes(self) -> int:
        return sum(file.size for file in (*self.files, *self.removed))


class Dataset(msgspec.Struct, frozen=True, kw_only=True):
    """The version of a dataset that a named snapshot is. It has ``files`` files of ``bytes`` bytes in all, which were
    at or below ``path`` of the lake."""

    name: str
    version: int
    path: str
    files: int
    bytes: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest of an index or a named snapshot. Times are in ns since 1970.

    ``rows`` is the layout of the rows (`tables.ROWS`); ``inode``, ``object`` and ``newest`` are as in `Marks`; commits
    older than ``horizon`` may be deleted. ``files`` are those of the base. ``histories`` has the histories of names
    (`commits.name_history`): a reader without them has all names, but orders a commit that comes late less exactly.
    Only named snapshots have ``dataset``."""

    format: int = FORMAT
    rows: int = tables.ROWS
    time: int
    newest: int
    horizon: int
    inode: int
    object: int
    names: int
    directories: int
    files: list[IndexFile]
    increments: list[Increment] = []
    histories: IndexFile | None = None
    dataset: Dataset | None = None

    @property
    def bytes(self) -> int:
        histories = 0 if self.histories is None else self.histories.size
        return self.bytes_base + sum(increment.bytes for increment in self.increments) + histories

    @property
    def bytes_base(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def prefix(self) -> str:
        return prefix_of(self.time)

    def all_files(self) -> list[IndexFile]:
        """Return all files in the order in which they are ingested."""
        files = self.files + [file for each in self.increments for file in (*each.files, *each.removed)]
        return files if self.histories is None else [*files, self.histories]

    def key_of(self, file: IndexFile) -> str:
        return (INDEX if "/" in file.name else self.prefix) + file.name


class _Versions(msgspec.Struct):
    """The fields that every manifest has."""

    format: int
    rows: int = 0


def prefix_of(time: int) -> str:
    return f"{INDEX}{time:016x}/"


def encode(manifest: Manifest) -> bytes:
    fields = msgspec.structs.asdict(manifest)
    if manifest.format == FORMAT:
        del fields["increments"]
    for name in ("histories", "dataset"):
        if fields[name] is None:
            del fields[name]
    return msgspec.msgpack.encode(fields)


def decode(raw: bytes | Buffer, time: int) -> Manifest:
    """Decode the manifest of the index of this time. Raises DamagedCommit for one that cannot be used as it stands."""
    try:
        versions = msgspec.msgpack.decode(raw, type=_Versions)
        if versions.format not in (FORMAT, FORMAT_LEVELS) or versions.rows != tables.ROWS:
            raise DamagedCommit(
                f"format {versions.format} with rows {versions.rows}: this program reads {FORMAT} and {FORMAT_LEVELS} "
                f"with {tables.ROWS}"
            )
        manifest = msgspec.msgpack.decode(raw, type=Manifest)
    except MALFORMED as error:
        raise DamagedCommit(f"not a manifest: {str(error)[:200]}") from error
    _check(manifest, time)
    return manifest


def _check(manifest: Manifest, time: int) -> None:
    numbers = manifest.inode, manifest.names, manifest.directories
    if manifest.time != time or not 0 <= manifest.newest <= TIME_NS_MAX or not 0 <= manifest.horizon <= TIME_NS_MAX:
        raise DamagedCommit(f"times {manifest.time:x}, {manifest.newest:x} and {manifest.horizon:x}")
    if manifest.inode < 2 or any(not 0 <= number <= COUNT_MAX for number in numbers):
        raise DamagedCommit(f"numbers {numbers}")
    if not 0 <= manifest.object <= NUMBER_MAX:
        raise DamagedCommit(f"an object of number {manifest.object}")
    told = manifest.dataset
    if told is not None and not (0 < told.version <= COUNT_MAX and 0 <= told.files <= COUNT_MAX and told.bytes >= 0):
        raise DamagedCommit(f"a dataset {told}")
    files = manifest.all_files()
    if len(files) > FILES_MAX or len({file.name for file in files}) < len(files):
        raise DamagedCommit(f"{len(files)} files, some of the same name")
    if manifest.increments and manifest.format == FORMAT:
        raise DamagedCommit(f"increments in format {FORMAT}")
    _check_files(manifest, manifest.files, tables.ROWS_SUFFIX, FILE_BYTES_MAX)
    before = 0
    for increment in manifest.increments:
        if not before < increment.since < manifest.time:
            raise DamagedCommit(f"an increment since {increment.since:x} behind one since {before:x}")
        _check_files(manifest, increment.files, tables.ROWS_SUFFIX, FILE_BYTES_MAX)
        _check_files(manifest, increment.removed, tables.REMOVED_SUFFIX, REMOVED_BYTES_MAX)
        before = increment.since
    if manifest.histories is not None:
        if manifest.histories.name != tables.HISTORIES:
            raise DamagedCommit(f"histories in {manifest.histories.name[:40]!r}")
        _check_files(manifest, [manifest.histories], tables.ROWS_SUFFIX, FILE_BYTES_MAX, schema.HISTORY)


def _check_files(manifest: Manifest, files: list[IndexFile], suffix: str, bytes_max: int, kinds: bytes = KINDS) -> None:
    """Check that these are files of one kind whose ranges of keys follow each other. Raises DamagedCommit."""
    before = b""
    for file in files:
        named = _NAME.fullmatch(file.name)
        if named is None or named[2] != suffix or not _DIGEST.fullmatch(file.digest):
            raise DamagedCommit(f"a file {file.name[:40]!r}")
        if named[1] is not None and (manifest.format == FORMAT or int(named[1], 16) >= manifest.time):
            raise DamagedCommit(f"a file {file.name} of another index")
        if not 0 < file.size <= bytes_max or not 0 < file.entries <= COUNT_MAX:
            raise DamagedCommit(f"{file.name} of {file.size} bytes")
        if not before < file.first <= file.last or max(len(file.first), len(file.last)) > tables.KEY_BYTES_MAX:
            raise DamagedCommit(f"the rows of {file.name} are not behind those of the file before")
        if file.first[0] not in kinds or file.last[0] not in kinds:
            raise DamagedCommit(f"{file.name} has rows that are not of names")
        before = file.last


# -- reading


async def find(client: StoreClient) -> list[int]:
    """Return the times of what may be indexes, newest first: one LIST. Raises StoreError kinds."""
    times: list[int] = []
    async for page in client.list_all(INDEX, delimiter="/"):
        times += [int(match[1], 16) for prefix in page.prefixes if (match := _KEY.fullmatch(prefix)) and not match[2]]
    return sorted((time for time in times if time <= TIME_NS_MAX), reverse=True)


async def fetch_manifest(client: StoreClient, time: int) -> Manifest:
    """Fetch a manifest. Raises NotFound if the index does not exist, DamagedCommit if it cannot be used."""
    return await fetch_undamaged(partial(_fetch_manifest, client, time))


async def _fetch_manifest(client: StoreClient, time: int) -> Manifest:
    key = prefix_of(time) + MANIFEST
    fetched = await client.get(key, 0, MANIFEST_BYTES_MAX)
    if fetched.meta.size > MANIFEST_BYTES_MAX:
        raise DamagedCommit(f"{key}: {fetched.meta.size} bytes")
    try:
        return decode(fetched.data, time)
    except DamagedCommit as error:
        raise DamagedCommit(f"{key}: {error}") from error


async def manifests(
    client: StoreClient, *, count_max: int | None = None, until_ns: int = TIME_NS_MAX
) -> list[Manifest]:
    """Fetch the manifests of all indexes up to a time, or of the ``count_max`` newest of these, newest first. Those
    that cannot be used are left out."""
    found: list[Manifest] = []
    for time in await find(client):
        if len(found) == count_max:
            break
        if time > until_ns:
            continue
        try:
            found.append(await fetch_manifest(client, time))
        except (NotFound, DamagedCommit):
            continue
    return found


async def collected_before(client: StoreClient) -> int:
    """Return the time before which commits may be deleted; 0 if none may be. The record of gc and the manifest of every
    index count, because either may be lost. Raises StoreError kinds."""
    return max([await read_horizon(client), *(manifest.horizon for manifest in await manifests(client))])


async def fetch_files(
    client: StoreClient, threads: Threads, manifest: Manifest, directory: Path, *, prefix: str = "", since: int = 0
) -> list[Path]:
    """Fetch the files of an index, check them against the manifest, and return their paths in the order of ingestion.

    With ``since`` the files of the base and of earlier increments are left out: the first increment is the one that
    continues the index of that time. ``prefix`` is where the files are, if not at the index's own. Raises
    DamagedCommit, NotFound, CacheError."""
    increments = [each for each in manifest.increments if each.since >= since]
    files = msgspec.structs.replace(manifest, files=[] if since else manifest.files, increments=increments).all_files()
    paths = {file.name: directory / file.name.replace("/", "-") for file in files}

    async def fetch(file: IndexFile) -> None:
        key = prefix + file.name if prefix else manifest.key_of(file)
        fetch_once = partial(_fetch_file, client, threads, key, file, paths[file.name])
        paths[file.name] = await fetch_undamaged(fetch_once)

    # The last files first: each fold may replace the last increments, and earlier files more rarely.
    await for_each(reversed(files), fetch, FILES_AT_ONCE)
    return [paths[file.name] for file in files]


async def _fetch_file(client: StoreClient, threads: Threads, key: str, file: IndexFile, path: Path) -> Path:
    """Fetch and check a file, and return the path of the file of rows, or of deletions, to ingest."""
    hasher = xxhash.xxh3_128()
    path.unlink(missing_ok=True)

    def take(data: Buffer) -> None:
        hasher.update(data)
        try:
            with path.open("ab") as target:
                target.write(data)
        except OSError as error:
            raise CacheError(f"{path}: {error.strerror}") from error

    for at in range(0, file.size, GET_BYTES):
        end = min(at + GET_BYTES, file.size)
        fetched = await client.get(key, at, end)
        if fetched.meta.size != file.size or len(fetched.data) != end - at:
            raise DamagedCommit(f"{key}: {fetched.meta.size} bytes where the manifest says {file.size}")
        await threads.run(take, fetched.data)
    if hasher.hexdigest() != file.digest:
        raise DamagedCommit(f"{key}: its bytes are not those that were written")
    try:
        if file.name.endswith(tables.REMOVED_SUFFIX):
            return await threads.run(tables.table_of_removed, path, file.first, file.last)
        kinds = schema.HISTORY if file.name == tables.HISTORIES else KINDS
        await threads.run(tables.check_file, path, file.first, file.last, kinds)
        return path
    except DamagedCommit as error:
        raise DamagedCommit(f"{key}: {error}") from error


async def is_dated_ahead(client: StoreClient, clock: Clock, time: int) -> bool:
    """Return whether a time is later than that of any commit may be, by this machine's clock and, if that says so, by
    the store's. Raises StoreError kinds."""
    if time <= clock.wall_ns() + AHEAD_NS_MAX:
        return False
    try:
        return time > await client.time_ns() + AHEAD_NS_MAX
    except Unsupported:
        return True  # this machine's clock is what there is


async def load_newest_index(
    database: Database,
    client: StoreClient,
    threads: Threads,
    directory: Path,
    *,
    clock: Clock | None = None,
    folds: bool = False,
) -> Manifest | None:
    """Ingest the newest index if the database has no names, or names that are too old for polling.

    Returns its manifest, None if no index was needed or could be used. ``directory`` is for files in transit. By the
    ``clock`` an index is dated too far ahead; without one none is. A database that ``folds`` is brought to the newest
    index in any case, and records what changes from then on. If there is nothing to do, this takes two LISTs and one
    GET. Raises CacheError, and StoreError kinds if the store does not answer.
    """
    horizon = await read_horizon(client)  # first: the index that has those commits was stored before
    return await _IndexSearch(database, client, threads, directory, clock, folds, horizon).run()


class _IndexSearch:
    """One search of a lake's indexes for the newest that can be used."""

    def __init__(
        self,
        database: Database,
        client: StoreClient,
        threads: Threads,
        directory: Path,
        clock: Clock | None,
        folds: bool,
        horizon: int,
    ) -> None:
        self._clock, self._folds = clock, folds
        self._db, self._client, self._threads, self._directory = database, client, threads, directory
        self._commits = CommitRows(database)
        polled = self._commits.polled()
        self._known = max(self._commits.complete(), polled - WINDOW_NS)
        self._fresh = not polled and not database.has_names()
        self._missing = tables.missing_before(database)
        self._needed = max(self._missing, horizon)
        """Commits before this time may be deleted, by the record of gc, every manifest that was read, and this
        database."""
        self._vanished = 0
        """Time of the newest index of which a file was missing: it was removed while it was read, or is lost."""
        self._left_ahead = False
        """An index was left because it is dated too far ahead."""
        self._taken: Manifest | None = None

    async def run(self) -> Manifest | None:
        """Return the manifest of the index that was ingested, None if none was. If an index was removed while it was
        read, there are newer ones: the search is repeated as long as newer ones are removed, too."""
        if await self._search():
            return self._taken
        if self._may_use_ahead and (self._missing or self._lacks(self._known)):
            self._clock = None
            if await self._search():
                return self._taken
        self._give_up()
        return None

    async def _search(self) -> bool:
        """Try all indexes; returns True if one of them ends the search."""
        before = -1
        while self._vanished > before:
            before = self._vanished
            for time in await find(self._client):
                if await self._try_index(time):
                    return True
        return False

    def _lacks(self, known: int) -> bool:
        """Return whether names that have every commit up to this time may lack deleted ones. Those are older than the
        horizon, and the newest of them may be older by 1 ns only."""
        return known + 1 < self._needed

    async def _try_index(self, time: int) -> bool:
        """Try one index, the newest first; returns True if that ends the search."""
        try:
            manifest = await fetch_manifest(self._client, time)
        except NotFound:  # it is being written, or was never finished
            return False
        except DamagedCommit as error:
            log.warning("the index %016x is not used: %s", time, error)
            return False
        self._needed = max(self._needed, manifest.horizon)
        is_enough = not self._fresh and not self._missing and not self._lacks(self._known)
        folded = tables.folded_of(self._db).index
        if is_enough and (not self._folds or folded == manifest.time):
            return True
        if await self._is_ahead(manifest):
            self._left_ahead = True
            log.warning("the index %016x is not used, as it is dated too far ahead", time)
            return False
        if self._lacks(manifest.newest) and (not self._fresh or self._may_use_ahead):
            return False
        try:
            if is_enough and self._can_continue(manifest, folded):
                await self._ingest(manifest, since=folded)
            else:
                await self._take(manifest)
        except NotFound as error:
            self._vanished = max(self._vanished, time)
            log.warning("the index %016x is not used, a file of it is missing: %s", time, error)
            return False
        except DamagedCommit as error:
            log.warning("the index %016x is not used: %s", time, error)
            return False
        self._taken = manifest
        return True

    @property
    def _may_use_ahead(self) -> bool:
        """True if an index that is dated too far ahead was left, and will be used if names are missing without it."""
        return self._left_ahead and self._clock is not None

    async def _is_ahead(self, manifest: Manifest) -> bool:
        latest = max(manifest.time, manifest.newest)
        return self._clock is not None and await is_dated_ahead(self._client, self._clock, latest)

    def _can_continue(self, manifest: Manifest, folded: int) -> bool:
        """Return whether the names are still those of the index ``folded``, and the manifest continues that one."""
        is_continued = any(increment.since == folded for increment in manifest.increments)
        return is_continued and not self._db.changed.has_any(folded)

    async def _take(self, manifest: Manifest) -> None:
        await self._ingest(manifest)
        if self._missing and not self._lacks(manifest.newest):
            tables.set_missing_before(self._db, 0)

    async def _ingest(self, manifest: Manifest, *, since: int = 0) -> None:
        """Ingest all files in place of the names here, or, onto the index ``since``, the files that follow it."""
        directory = tables.empty_directory(self._directory)
        try:
            paths = await fetch_files(self._client, self._threads, manifest, directory, since=since)
            if not self._fresh and not since:
                self._drop_names()
            if self._lacks(manifest.newest):
                self._note_missing()
            marks = Marks(inode=manifest.inode, object=manifest.object, newest=manifest.newest)
            tables.ingest(self._db, paths, marks, directory, folded=manifest.time if self._folds else 0)
            self._commits.record_complete(manifest.horizon - 1)
        finally:
            tables.remove_directory(directory)
        log.info("index %016x: %d names in %d files", manifest.time, manifest.names, len(manifest.all_files()))

    def _drop_names(self) -> None:
        if self._folds:
            log.info("another node has written an index meanwhile: all names are taken from it")
        else:
            log.info("commits may have been collected before they were seen here: all names are taken from the index")
        tables.drop_names(self._db)

    def _note_missing(self) -> None:
        tables.set_missing_before(self._db, self._needed)
        log.error("%s", describe_loss(self._needed))

    def _give_up(self) -> None:
        """Record that names may be missing, if no index could be used and some commits were deleted."""
        if self._missing or self._lacks(self._known):
            self._note_missing()


def describe_loss(before: int) -> str:
    """Return the error for a database whose `sorted_tables.missing_before` is this time: what is wrong, what to do."""
    at = datetime.fromtimestamp(before / 1_000_000_000, UTC).isoformat(timespec="seconds")
    return (
        f"commits from before {at} were collected, and no index that has them can be used: names may be missing, and "
        "removed ones seen again. `lakefs-fuse fsck SOURCE` names the objects to restore, and other ways out; until "
        "then only read-only mounts show what is left, and nothing may change it"
    )


def require_all_names(database: Database) -> None:
    """Raise LakeError if names may be missing. To write from such names makes the loss final: that may delete objects
    to which only the missing names refer."""
    missing = tables.missing_before(database)
    if missing:
        raise LakeError(describe_loss(missing))


# -- writing


async def write_index(
    client: StoreClient,
    threads: Threads,
    dump: tables.AnyDump,
    *,
    time: int,
    horizon: int,
    wrote: Callable[[DumpedFile], None],
    prefix: str = "",
    dataset: Dataset | None = None,
) -> Manifest:
    """Store a dump as the index of this time, at its own prefix unless one is given. Raises CacheError, StoreError
    kinds; then there is no index."""
    prefix = prefix or prefix_of(time)
    files, histories = await store_files(client, threads, dump, prefix, wrote)
    manifest = Manifest(
        time=time, newest=dump.marks.newest, horizon=horizon, inode=dump.marks.inode,
        object=dump.marks.object, names=dump.names, directories=dump.directories, files=files,
        histories=histories, dataset=dataset,
    )  # fmt: skip
    await put_manifest(client, manifest, prefix)
    return manifest


async def put_manifest(client: StoreClient, manifest: Manifest, prefix: str) -> None:
    """Store the manifest; from then on the index exists. Raises StoreError kinds."""
    _check(manifest, manifest.time)
    await client.put(prefix + MANIFEST, encode(manifest))


async def store_files(
    client: StoreClient, threads: Threads, dump: tables.AnyDump, prefix: str, wrote: Callable[[DumpedFile], None]
) -> tuple[list[IndexFile], IndexFile | None]:
    """Store a dump, file by file; returns the files of names, and that of histories (None: there are none). Raises
    CacheError, StoreError kinds."""
    files: list[IndexFile] = []
    few = trio.Semaphore(FILES_AT_ONCE)

    async def store(made: DumpedFile) -> None:
        try:
            with made.path.open("rb") as source:
                await client.put(prefix + made.path.name, FileSlice(source.fileno(), 0, made.size))
            made.path.unlink()
        finally:
            few.release()
        wrote(made)

    async with collecting() as nursery:
        while True:
            await few.acquire()  # dumped files waiting on the disk are few, too
            made = await threads.run(dump.next_file)
            if made is None:
                break
            files.append(IndexFile(made.path.name, made.size, made.digest, made.entries, made.first, made.last))
            nursery.start_soon(store, made)
    histories = next((file for file in files if file.name == tables.HISTORIES), None)
    return [file for file in files if file is not histories], histories


async def list_objects(client: StoreClient) -> dict[int, list[ObjectMeta]]:
    """Return all objects of indexes, finished or not, by the time of the index. Raises StoreError kinds."""
    found: dict[int, list[ObjectMeta]] = {}
    async for page in client.list_all(INDEX):
        for meta in page.objects:
            match = _KEY.fullmatch(meta.key)
            if match and int(match[1], 16) <= TIME_NS_MAX:
                found.setdefault(int(match[1], 16), []).append(meta)
    return found


def times_of(found: dict[int, list[ObjectMeta]]) -> list[int]:
    """Return the times of the indexes that have a manifest, newest first."""
    return sorted((time for time in found if any(_is_manifest(meta) for meta in found[time])), reverse=True)


async def remove_old(
    client: StoreClient,
    now_ns: int,
    found: dict[int, list[ObjectMeta]],
    known: Sequence[Manifest],
) -> int:
    """Remove all indexes but the newest two, manifests first, and files that no kept manifest names. An index that is
    dated too far ahead counts as older than the others.

    Unfinished indexes are removed unless a writer may be at work on them. Returns how many objects were removed.
    ``now_ns`` is the store's time, ``found`` a listing, and ``known`` are manifests that need not be read, including
    that of an index written since. Nothing is removed while a kept manifest cannot be read. Raises StoreError kinds,
    LakeError if some object cannot be removed.
    """
    manifests = {manifest.time: manifest for manifest in known}
    latest_ns = now_ns + AHEAD_NS_MAX
    whole = sorted({*times_of(found), *manifests}, key=lambda time: (time <= latest_ns, time), reverse=True)
    kept = whole[:KEPT]
    named: set[str] = set()
    has_levels = False
    for time in kept:
        try:
            manifest = manifests.get(time) or await fetch_manifest(client, time)
        except (NotFound, DamagedCommit) as error:
            log.warning("old indexes stay, because a newer one names files among them, and cannot be read: %s", error)
            return 0
        named.update(manifest.key_of(file) for file in manifest.all_files())
        has_levels = has_levels or manifest.format == FORMAT_LEVELS
    removed = 0
    for time, metas in found.items():
        if time in kept:
            continue
        doomed = [meta.key for meta in metas if not _is_manifest(meta) and meta.key not in named]
        if time in whole:
            await client.delete(prefix_of(time) + MANIFEST)
        elif has_levels and time < kept[0]:
            pass  # unfinished for good: its writer held the lease, as all of this format do, before that of a newer one
        elif max(meta.mtime_ns for meta in metas) > now_ns - UNFINISHED_NS:
            continue  # a writer may be at work
        failed = await client.delete_many(doomed) if doomed else {}
        if failed:
            key, why = next(iter(failed.items()))
            objects = counted(len(failed), "object")
            raise LakeError(f"{objects} of old indexes cannot be removed, {key} among them: {why}")
        removed += len(doomed) + (time in whole)
    return removed


def _is_manifest(meta: ObjectMeta) -> bool:
    return meta.key.endswith("/" + MANIFEST)
