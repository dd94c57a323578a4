"""Writes the state of a lake, from commits and listings, as an index that fresh mounts load.

What always holds (*complete index*): every commit that could be found was applied, none was refused, none was collected
unseen, and nothing in the index is known to this node alone. Its horizon is never behind that of an older index. All
tombstones are kept, also those whose plain object is gone: one could be left out only if a later listing lacked its
key, and a merged listing does not record which keys it lacked.

Plain objects that no commit names are in it as of the last listing of their directory: of this run, with ``list_all``,
or of the run that wrote the index before. Each directory has the time of that, so a mount lists it when it would again.

A view that folds (`LakeView.folds`) writes levels (`commits.index.levels`): mostly what changed since the index that it
began with. Others, and named snapshots, write all rows.

Bounds: memory holds one listing of everything (`tree_walk`) and the file that is being stored; the disk holds a few
files of rows.

Tasks of one trio loop. A crash leaves files without a manifest in the store, which a later run removes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from lakefs_fuse.admin.lake_view import LakeView
from lakefs_fuse.admin.work import NS, Report
from lakefs_fuse.commits.archive import commit_key
from lakefs_fuse.commits.gc_record import read_horizon
from lakefs_fuse.commits.hybrid_clock import WINDOW_NS
from lakefs_fuse.commits.index import levels, snapshots
from lakefs_fuse.commits.index.index import (
    Manifest,
    fetch_manifest,
    list_objects,
    remove_old,
    require_all_names,
    times_of,
    write_index,
)
from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.errors import DamagedCommit, LakeError, NotFound
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.sorted_tables import DumpedFile
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs.namespace.tree_walk import list_everything

log = logging.getLogger(__name__)


async def fold(
    lake: LakeView,
    *,
    horizon: int = 0,
    name: str = "",
    list_all: bool = True,
    is_new: bool = False,
    known: Manifest | None = None,
    report: Report,
    file_bytes_max: int = tables.FILE_BYTES_MAX,
) -> Manifest:
    """Write an index of all that the lake holds now, or with a ``name`` a snapshot of that. ``horizon`` is the time
    before which commits are about to be deleted. Without ``list_all`` no directory is listed. A view that ``is_new``
    was opened a moment ago, and has the commits that were there; ``known`` is the newest index as of then. Raises
    LakeError where the view lacks something, or the store fails; then the indexes are as they were."""
    fs, client, threads, clock = lake.fs, lake.client, lake.node.threads, lake.clock
    database = fs.database
    if name:
        await snapshots.check_free(client, name)
        await snapshots.clear(client, name)
    _check_nothing_local(database)
    if not is_new:
        await fs.look_again()
    if list_all:
        await list_everything(fs.namespace, lambda names: report("listing", names, 0))
        await fs.look_again()
    await check_complete(lake)
    found, before = await _list_indexes(lake, known)
    if before is None or before.time != max(found):  # else no other has a higher one
        horizon = max(horizon, await read_horizon(client))
    horizon = max(horizon, before.horizon if before is not None else 0)
    newest = tables.marks_of(database).newest
    if horizon > newest + 1:
        raise LakeError("commits were collected that this view lacks: run it again")
    if list_all:  # it took a while
        await lake.log.read_time()
    for seen in (newest, *found):  # each for itself: a time too far ahead, of a stray file, is not followed
        clock.follow(seen)
    directory = tables.empty_directory(Path(fs.config.cache_dir).absolute() / "index")
    applied_since = newest - 2 * WINDOW_NS
    wrote = _reporter(report)
    if lake.folds and not name:
        writer = levels.LevelWriter(database, directory, before, found, applied_since, file_bytes_max)
        manifest = await writer.write(client, threads, time=clock.now(), horizon=horizon, wrote=wrote)
    else:
        dump = tables.Dump(
            database, directory, applied_since=applied_since, file_bytes_max=file_bytes_max, with_histories=not name
        )
        try:
            if name:
                return await snapshots.write(
                    client, threads, name, dump, fs.namespace.tree.objects,
                    time=clock.now(), horizon=horizon, wrote=wrote,
                )  # fmt: skip
            manifest = await write_index(client, threads, dump, time=clock.now(), horizon=horizon, wrote=wrote)
        finally:
            dump.close()
    await _remove_old(lake, found, [manifest] if before is None else [manifest, before])
    return manifest


async def accept_loss(lake: LakeView, note: Callable[[str], None]) -> None:
    """Have the names of the view, which may lack some that no commit tells any more, count as all names of the lake;
    ``note`` says what that means. Nothing is stored before `fold`. Raises StoreError kinds."""
    database = lake.fs.database
    missing = tables.missing_before(database)
    if not missing:
        note("no names are missing: the index is written as usual")
        return
    tables.accept_missing(database)
    await lake.refresh()
    unnamed = size = 0
    async for page in lake.client.list_all(OBJECTS):
        for meta in page.objects:
            if not lake.is_needed(meta.key):
                unnamed, size = unnamed + 1, size + meta.size
    at = datetime.fromtimestamp(missing / NS, UTC).isoformat(timespec="seconds")
    note(
        f"renames, links, removals, clones and attributes from before {at} that only the lost index had are lost: "
        "files have the names that commits and plain objects still say"
    )
    if unnamed:
        note(
            f"{counted(unnamed, 'object')} below {OBJECTS} ({counted(size, 'byte')}) may be of lost names: gc deletes "
            "those that no name and no snapshot refers to, so copy what you need before its grace period ends"
        )


def _reporter(report: Report) -> Callable[[DumpedFile], None]:
    """Reports the rows and bytes of all files so far."""
    done: list[DumpedFile] = []

    def wrote(made: DumpedFile) -> None:
        done.append(made)
        report("writing the index", sum(each.entries for each in done), sum(each.size for each in done))

    return wrote


async def _remove_old(lake: LakeView, found: dict[int, list[ObjectMeta]], known: list[Manifest]) -> int:
    try:
        return await remove_old(lake.client, lake.clock.wall_ns(), found, known)
    except LakeError as error:
        log.warning("old or unfinished indexes could not be removed: %s", error)
        return 0


async def _list_indexes(lake: LakeView, known: Manifest | None) -> tuple[dict[int, list[ObjectMeta]], Manifest | None]:
    """The objects of indexes, and the newest index. What earlier folds left unfinished a day ago is removed first: it
    would be there for as long as folds fail."""
    found = await list_objects(lake.client)
    before = await _newest_of(lake.client, found, known)
    is_newest = before is not None and before.time == max(found)
    if not is_newest and await _remove_old(lake, found, [] if before is None else [before]):
        found = await list_objects(lake.client)
    return found, before


async def _newest_of(
    client: StoreClient, found: dict[int, list[ObjectMeta]], known: Manifest | None
) -> Manifest | None:
    """The newest index whose manifest can be read. Its horizon is never behind that of an older one."""
    for time in times_of(found):
        if known is not None and known.time == time:
            return known
        with suppress(NotFound, DamagedCommit):
            return await fetch_manifest(client, time)
    return None


def _check_nothing_local(database: Database) -> None:
    if database.has_local_changes():
        raise LakeError(
            "the cache directory has changes that are in no store yet: mount the lake with it and let them go up, or "
            "give another --cache-dir"
        )


async def check_complete(lake: LakeView) -> None:
    """Everything that was committed is among the names of a view. Raises LakeError."""
    database, client = lake.fs.database, lake.client
    require_all_names(database)
    commits = CommitRows(database)
    for time, writer in commits.refused():
        key = commit_key(time, writer)
        try:
            await client.head(key)
        except NotFound:  # it was moved aside
            commits.forget_refused(time, writer)
            continue
        raise LakeError(f"commit {key} cannot be read, or lies in the future: look into it with fsck first")
