"""Chooses whether a fold writes a base or an increment of the index, and writes it.

What always holds (*what a reader gets*): the base and the increments of an index, ingested one after the other, are the
rows of the database that wrote it, except records of commits that are too old for polls. An increment continues the
index whose names the database had (`changed_rows.Folded`). It is written only if that index is still the newest and all
its files are in the store; otherwise a new base is written.

Bounds: there are at most INCREMENTS_MAX increments, which together have at most BASE_SHARE of the size of the base.
Merging rewrites each changed row about once; a new base rewrites about 1 / BASE_SHARE rows for each that changed.

This needs no GET: rows that are merged or written again come from the database. A crash before the manifest is stored
leaves files, which `remove_old` removes; a crash after it leaves a database that still has the mark of the index before
(`sorted_tables`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from msgspec.structs import replace

from lakefs_fuse.commits.index.index import (
    FORMAT_LEVELS,
    Increment,
    IndexFile,
    Manifest,
    prefix_of,
    put_manifest,
    store_files,
)
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.sorted_tables import DumpedFile
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta

BASE_SHARE = 0.2
"""Maximum size of all increments, as a share of that of the base. With what only the older of the two kept indexes has,
the objects of an index take less than 1.3 times its live size on average; between a new base and the next fold, both
bases are there."""
INCREMENTS_MAX = 12
"""A fresh mount fetches two objects for each, beside a base of 24 MiB files, within 100 requests for ten million
names."""


def choose_since(before: Manifest | None, database: Database, found: Mapping[int, Collection[ObjectMeta]]) -> int:
    """Return the time of the index since which an increment has to have all changes; 0 for a base."""
    folded = tables.folded_of(database)
    if before is None or folded.index != before.time or not _is_whole(before, found):
        return 0
    rows = sum(file.entries for file in before.files)
    size = database.changed.count(folded.index) * before.bytes_base / rows if rows else 0.0
    if size + sum(each.bytes for each in before.increments) > BASE_SHARE * before.bytes_base:
        return 0
    since, left = folded.index, list(before.increments)
    if len(left) < INCREMENTS_MAX:
        return since
    while left and left[-1].since >= folded.since:
        last = left.pop()
        since, size = last.since, size + last.bytes
        if left and size <= left[-1].bytes:
            break
    return since if len(left) < INCREMENTS_MAX else 0


def _is_whole(manifest: Manifest, found: Mapping[int, Collection[ObjectMeta]]) -> bool:
    sizes = {meta.key: meta.size for metas in found.values() for meta in metas}
    return all(sizes.get(manifest.key_of(file)) == file.size for file in manifest.all_files())


class LevelWriter:
    """Writes the next index: a base, or an increment of the newest index, ``before``. ``found`` are the objects below
    `.lakefs/index/`; the other arguments are as for `sorted_tables.Dump`."""

    def __init__(
        self,
        database: Database,
        directory: Path,
        before: Manifest | None,
        found: Mapping[int, Collection[ObjectMeta]],
        applied_since: int,
        file_bytes_max: int = tables.FILE_BYTES_MAX,
    ) -> None:
        self._db, self._before, self._since = database, before, choose_since(before, database, found)
        self._dump: tables.Dump | tables.DumpOfChanges
        if before is not None and self._since:
            self._dump = tables.DumpOfChanges(
                database, directory, since=self._since, names=before.names, directories=before.directories,
                file_bytes_max=file_bytes_max,
            )  # fmt: skip
        else:
            self._dump = tables.Dump(
                database, directory, applied_since=applied_since, file_bytes_max=file_bytes_max, with_histories=True
            )  # fmt: skip

    async def write(
        self,
        client: StoreClient,
        threads: Threads,
        *,
        time: int,
        horizon: int,
        wrote: Callable[[DumpedFile], None],
    ) -> Manifest:
        """Store the index of this time, and mark the names of the database as those of it. Raises StoreError kinds, and
        then there is no index; CacheError, and then there is none, or only the mark is missing."""
        dump, prefix = self._dump, prefix_of(time)
        try:
            files, histories = await store_files(client, threads, dump, prefix, wrote)
        finally:
            dump.close()
        base, increments = files, list[Increment]()
        if self._before is not None and self._since:
            base, increments = self._continued(self._before, files)
        manifest = Manifest(
            format=FORMAT_LEVELS, time=time, newest=dump.marks.newest, horizon=horizon, inode=dump.marks.inode,
            object=dump.marks.object, names=dump.names, directories=dump.directories, files=base,
            increments=increments, histories=histories,
        )  # fmt: skip
        await put_manifest(client, manifest, prefix)
        since = tables.folded_of(self._db).since if self._since else time
        tables.mark_folded(self._db, time, since=since)
        CommitRows(self._db).record_complete(horizon - 1)
        return manifest

    def _continued(self, before: Manifest, files: list[IndexFile]) -> tuple[list[IndexFile], list[Increment]]:
        made = Increment(
            since=self._since,
            files=[file for file in files if file.name.endswith(tables.ROWS_SUFFIX)],
            removed=[file for file in files if file.name.endswith(tables.REMOVED_SUFFIX)],
        )
        kept = [_moved(each, before.time) for each in before.increments if each.since < self._since]
        return _named_from(before.files, before.time), [*kept, made]


def _moved(increment: Increment, time: int) -> Increment:
    return Increment(
        since=increment.since,
        files=_named_from(increment.files, time),
        removed=_named_from(increment.removed, time),
    )


def _named_from(files: list[IndexFile], time: int) -> list[IndexFile]:
    """Return files of the index of this time as another index names them."""
    return [file if "/" in file.name else replace(file, name=f"{time:016x}/{file.name}") for file in files]
