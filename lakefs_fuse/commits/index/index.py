"""The index: the names of a whole lake, folded into files of sorted rows that a fresh mount ingests.

Under `.lakefs/index/<time>/` lie the files (`meta.sorted_tables`) and, written last, the manifest that names them: an
index without a manifest does not exist. The two newest are kept. `docs/format.md` has every byte.

What always holds:

* *state of its writer*: a mount whose names come from an index is in the state of the writer at that moment, and polls
  for newer commits as it would after a restart;
* *all or nothing*: where the manifest or a file does not fit, the whole index is left out, with a log line. Rows that
  fit are believed, as those of commits are.

Commits older than an index's ``horizon`` may be gone from the store. Names that are older than that, because the mount
was away for long, are dropped and come from the index. Where that cannot be read, the names may lack what those
commits changed; `sorted_tables.missing_before` says so until an index is ingested.

`load_newest_index` runs before anything reads the database; any node may write an index at any time. A crash while one
is ingested leaves a directory of files, which the next mount removes; a crash while one is written leaves files without
a manifest, which `remove_old` removes after `UNFINISHED_NS`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import trio
import xxhash

from lakefs_fuse.commits.commit_log import fetch_undamaged
from lakefs_fuse.commits.record import SIZE_MAX, TIME_NS_MAX
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, DamagedCommit, LakeError, NotFound
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.sorted_tables import DumpedFile, Marks
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer, FileSlice, ObjectMeta
from lakefs_fuse.sync.nursery import collecting

INDEX = f"{RESERVED_PREFIX}index/"
"""Where indexes lie."""
FORMAT = 1
MANIFEST = "manifest"
MANIFEST_BYTES_MAX = 64 << 20
FILES_MAX = 100_000
FILE_BYTES_MAX = 1 << 30
KEY_BYTES_MAX = 8 << 10
"""Of a row; the longest is a path with an ETag."""
KEPT = 2
"""Indexes that stay when a new one was written: the newest is being read by mounts that begin, or may be damaged."""
CANDIDATES_MAX = 4
UNFINISHED_NS = 24 * 3600 * 1_000_000_000
GET_BYTES = 16 << 20
FILES_AT_ONCE = 3
"""Files that are fetched, or stored, at once; each has GET_BYTES in memory at most."""

_KEY = re.compile(re.escape(INDEX) + r"([0-9a-f]{16})/(.*)", re.DOTALL)
_NAME = re.compile(r"[0-9]{4,9}\.sst")
_DIGEST = re.compile(r"[0-9a-f]{32}")
log = logging.getLogger(__name__)


class IndexFile(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """``size`` in bytes, ``digest`` XXH3-128 in hex; ``entries`` rows from key ``first`` to key ``last``."""

    name: str
    size: int
    digest: str
    entries: int
    first: bytes
    last: bytes


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """``rows`` is the layout of the rows (`tables.ROWS`); ``inode``, ``object`` and ``newest`` as in `Marks`; commits
    older than ``horizon`` may be gone from the store. Times in ns since 1970."""

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

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def prefix(self) -> str:
        return prefix_of(self.time)


class _Versions(msgspec.Struct):
    """What every manifest has."""

    format: int
    rows: int = 0


def prefix_of(time: int) -> str:
    return f"{INDEX}{time:016x}/"


def decode(raw: bytes | Buffer, time: int) -> Manifest:
    """The manifest of the index of this time. Raises DamagedCommit for anything that cannot be used as it stands."""
    try:
        versions = msgspec.msgpack.decode(raw, type=_Versions)
        if (versions.format, versions.rows) != (FORMAT, tables.ROWS):
            raise DamagedCommit(
                f"format {versions.format} with rows {versions.rows}: this program reads {FORMAT} with {tables.ROWS}"
            )
        manifest = msgspec.msgpack.decode(raw, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DamagedCommit(f"not a manifest: {str(error)[:200]}") from error
    _check(manifest, time)
    return manifest


def _check(manifest: Manifest, time: int) -> None:
    numbers = manifest.inode, manifest.object, manifest.names, manifest.directories
    if manifest.time != time or not 0 <= manifest.newest <= TIME_NS_MAX or not 0 <= manifest.horizon <= TIME_NS_MAX:
        raise DamagedCommit(f"times {manifest.time:x}, {manifest.newest:x} and {manifest.horizon:x}")
    if manifest.inode < 2 or any(not 0 <= number <= SIZE_MAX for number in numbers):
        raise DamagedCommit(f"numbers {numbers}")
    if len(manifest.files) > FILES_MAX or len({file.name for file in manifest.files}) < len(manifest.files):
        raise DamagedCommit(f"{len(manifest.files)} files, some of the same name")
    before = b""
    for file in manifest.files:
        if not _NAME.fullmatch(file.name) or not _DIGEST.fullmatch(file.digest):
            raise DamagedCommit(f"a file {file.name[:40]!r}")
        if not 0 < file.size <= FILE_BYTES_MAX or not 0 < file.entries <= SIZE_MAX:
            raise DamagedCommit(f"{file.name} of {file.size} bytes")
        if not before < file.first <= file.last or max(len(file.first), len(file.last)) > KEY_BYTES_MAX:
            raise DamagedCommit(f"the rows of {file.name} are not behind those of the file before")
        if file.first[0] not in tables.KINDS or file.last[0] not in tables.KINDS:
            raise DamagedCommit(f"{file.name} has rows that are not of names")
        before = file.last


# -- reading


async def find(client: StoreClient) -> list[int]:
    """Times of what may be indexes, newest first: one LIST. Raises StoreError kinds."""
    times: list[int] = []
    async for page in client.list_all(INDEX, delimiter="/"):
        times += [int(match[1], 16) for prefix in page.prefixes if (match := _KEY.fullmatch(prefix)) and not match[2]]
    return sorted((time for time in times if time <= TIME_NS_MAX), reverse=True)


async def fetch_manifest(client: StoreClient, time: int) -> Manifest:
    """Raises NotFound where the index does not exist, DamagedCommit where it cannot be used."""
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


async def manifests(client: StoreClient, *, count_max: int | None = None) -> list[Manifest]:
    """Of all indexes that can be used as far as their manifests tell, or of the ``count_max`` newest, newest first."""
    found: list[Manifest] = []
    for time in await find(client):
        if len(found) == count_max:
            break
        try:
            found.append(await fetch_manifest(client, time))
        except (NotFound, DamagedCommit):
            continue
    return found


async def fetch_files(
    client: StoreClient, threads: Threads, manifest: Manifest, directory: Path, *, prefix: str = ""
) -> list[Path]:
    """All files of an index, compared with the manifest and tried; ``prefix`` is where they are, if not at the index's
    own. Raises DamagedCommit, NotFound, CacheError."""
    few = trio.CapacityLimiter(FILES_AT_ONCE)

    async def fetch(file: IndexFile) -> None:
        async with few:
            key, path = (prefix or manifest.prefix) + file.name, directory / file.name
            await fetch_undamaged(partial(_fetch_file, client, threads, key, file, path))

    async with collecting() as nursery:
        for file in manifest.files:
            nursery.start_soon(fetch, file)
    return [directory / file.name for file in manifest.files]


async def _fetch_file(client: StoreClient, threads: Threads, key: str, file: IndexFile, path: Path) -> None:
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
        await threads.run(tables.check_file, path, file.first, file.last)
    except DamagedCommit as error:
        raise DamagedCommit(f"{key}: {error}") from error


async def load_newest_index(
    database: Database, client: StoreClient, threads: Threads, directory: Path
) -> Manifest | None:
    """Take the newest index into a database without names, or with names that are too old to be brought up to date by
    polling; answers which, None where there was no need or none. ``directory`` is for files on their way.

    One LIST and one GET where there is nothing to do. Raises CacheError, and StoreError kinds where the store does not
    answer.
    """
    for last in (False, True):  # an index may be removed while it is read; then there are two newer ones
        search = _IndexSearch(database, client, threads, directory)
        for time in (await find(client))[:CANDIDATES_MAX]:
            if await search.try_index(time):
                return search.taken
        if last or not search.vanished:
            break
    search.give_up()
    return None


class _IndexSearch:
    """One search of a lake's indexes for the newest that can be used."""

    def __init__(self, database: Database, client: StoreClient, threads: Threads, directory: Path) -> None:
        self._db, self._client, self._threads, self._directory = database, client, threads, directory
        self._known = CommitRows(database).polled()
        self._fresh = not self._known and not tables.has_names(database)
        self._missing = tables.missing_before(database)
        self._needed = self._missing
        self.vanished = False
        self.taken: Manifest | None = None

    def _lacks(self, newest: int) -> bool:
        """Names whose newest commit is of this time lack some that were collected: all of them are older than the
        horizon, and the newest of them may be the newest of all."""
        return newest + 1 < self._needed

    async def try_index(self, time: int) -> bool:
        """Try one index, newest first; True ends the search."""
        try:
            manifest = await fetch_manifest(self._client, time)
        except NotFound:  # it is being written, or never was to its end
            return False
        except DamagedCommit as error:
            log.warning("the index %016x is not used: %s", time, error)
            return False
        self._needed = max(self._needed, manifest.horizon)
        if not self._fresh and not self._missing and not self._lacks(self._known):
            return True
        if not self._fresh and self._lacks(manifest.newest):
            return False
        try:
            await self._take(manifest)
        except NotFound as error:
            self.vanished = True
            log.warning("the index %016x is not used, a file of it is missing: %s", time, error)
            return False
        except DamagedCommit as error:
            log.warning("the index %016x is not used: %s", time, error)
            return False
        self.taken = manifest
        return True

    async def _take(self, manifest: Manifest) -> None:
        directory = tables.empty_directory(self._directory)
        try:
            paths = await fetch_files(self._client, self._threads, manifest, directory)
            if not self._fresh:
                log.warning("this node was away for so long that commits it never saw were collected: its names are "
                            "taken from the index")  # fmt: skip
                tables.drop_names(self._db)
            if self._lacks(manifest.newest):
                self._note_missing()
            marks = Marks(inode=manifest.inode, object=manifest.object, newest=manifest.newest)
            tables.ingest(self._db, paths, marks, directory)
            if self._missing and not self._lacks(manifest.newest):
                tables.set_missing_before(self._db, 0)
        finally:
            tables.remove_directory(directory)
        log.info("index %016x: %d names in %d files", manifest.time, manifest.names, len(manifest.files))

    def _note_missing(self) -> None:
        tables.set_missing_before(self._db, self._needed)
        log.error(
            "commits from before %016x were collected, and no index that has them can be used: names may be missing, "
            "and names that were removed may be seen again; fsck tells what is damaged", self._needed,
        )  # fmt: skip

    def give_up(self) -> None:
        """No index could be used."""
        if self._missing or self._lacks(self._known):
            self._note_missing()


# -- writing


async def write_index(
    client: StoreClient,
    threads: Threads,
    dump: tables.Dump,
    *,
    time: int,
    horizon: int,
    wrote: Callable[[DumpedFile], None],
    prefix: str = "",
) -> Manifest:
    """Store what is dumped as the index of this time, at its own prefix or that which is given. Raises CacheError,
    StoreError kinds; then there is no index."""
    files: list[IndexFile] = []
    prefix = prefix or prefix_of(time)
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
    manifest = Manifest(
        time=time, newest=dump.marks.newest, horizon=horizon, inode=dump.marks.inode, object=dump.marks.object,
        names=dump.names, directories=dump.directories, files=files,
    )  # fmt: skip
    _check(manifest, time)
    await client.put(prefix + MANIFEST, msgspec.msgpack.encode(manifest))
    return manifest


async def remove_old(client: StoreClient, now_ns: int) -> int:
    """Take away all indexes but the newest two, manifests first, and what was never finished; answers how many objects
    that were. ``now_ns`` is the store's time. Raises StoreError kinds, LakeError where some object cannot be removed.
    """
    found: dict[int, list[ObjectMeta]] = {}
    async for page in client.list_all(INDEX):
        for meta in page.objects:
            if match := _KEY.fullmatch(meta.key):
                found.setdefault(int(match[1], 16), []).append(meta)
    whole = sorted((time for time in found if any(_is_manifest(meta) for meta in found[time])), reverse=True)
    removed = 0
    for time, metas in found.items():
        if time in whole[:KEPT]:
            continue
        if time in whole:
            await client.delete(prefix_of(time) + MANIFEST)
        elif max(meta.mtime_ns for meta in metas) > now_ns - UNFINISHED_NS:
            continue  # somebody may be writing it
        failed = await client.delete_many([meta.key for meta in metas if not _is_manifest(meta)])
        if failed:
            key, why = next(iter(failed.items()))
            raise LakeError(f"{len(failed)} objects of old indexes cannot be removed, {key} among them: {why}")
        removed += len(metas)
    return removed


def _is_manifest(meta: ObjectMeta) -> bool:
    return meta.key.endswith("/" + MANIFEST)
