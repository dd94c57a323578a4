"""Opens a filesystem over a cache directory, and closes its parts in the right order.

The cache directory is locked by one daemon at a time: ``lock``, ``meta/`` (RocksDB), ``blocks/`` (block cache) and
``staging/`` (bytes not yet durable). Deleting all of it loses nothing that was durable.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.health import FAILED_RETRY_S
from lakefs_fuse.commits.index.index import is_dated_ahead, load_newest_index, require_all_names
from lakefs_fuse.config import MIB, MountConfig
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.disk import Disk
from lakefs_fuse.environment.hint_channel import HintChannel
from lakefs_fuse.environment.memory_shares import shares_of
from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, MountError
from lakefs_fuse.meta.database import Database, RocksEngines
from lakefs_fuse.meta.sorted_tables import are_names_outdated, drop_names, lake_of, marks_of, missing_before, note_lake
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.staging.part_layout import SPANS
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.vfs.filesystem import Filesystem
from lakefs_fuse.vfs.wiring import Assembly, Ground
from lakefs_fuse.vfs.writeback.orphans import Orphans

ROOM_BYTES_MIN = 64 * MIB
"""A mount needs so much of the disk beyond what it leaves free."""
ROOM_FOR_ROWS_BYTES = 16 * MIB
"""The block cache gives up so much at a time where names cannot be written: a write buffer of the database."""
log = logging.getLogger(__name__)


@contextmanager
def locked(directory: Path, mountpoint: str) -> Iterator[None]:
    """Hold the cache directory; its lock file names the mountpoint. Raises CacheError where another daemon holds it,
    another user owns it, or it cannot be made."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        keep_private(directory)
        for name in ("blocks", "staging"):
            (directory / name).mkdir(mode=0o700, exist_ok=True)
        fd = os.open(directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise CacheError(f"cannot use the cache directory {directory}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CacheError(
                f"the cache directory {directory} is in use by another mount: give --cache-dir another directory"
            ) from error
        try:
            os.ftruncate(fd, 0)
            os.pwrite(fd, os.fsencode(mountpoint) + b"\n", 0)
        except OSError as error:  # A full disk: only the next mount's message is poorer.
            log.warning("lock of the cache directory %s: %s", directory, error.strerror)
        yield
    finally:
        os.close(fd)


def keep_private(directory: Path) -> None:
    """Close a cache directory, which shows the lake's names and bytes, to other users. Raises CacheError for one of
    another user, OSError."""
    found, real, uid = os.stat(directory), os.path.realpath(directory), os.geteuid()
    link_uid = os.lstat(directory).st_uid
    if found.st_uid != uid or link_uid not in (uid, 0):
        where = f"{directory}, which is a link to {real}," if directory.is_symlink() else f"{directory}"
        owner = found.st_uid if found.st_uid != uid else link_uid
        raise CacheError(
            f"the cache directory {where} belongs to user {owner}, who could read and change what is in it: give "
            "--cache-dir a directory of your own"
        )
    if found.st_mode & 0o077:
        os.chmod(directory, 0o700)
        log.warning(
            "the cache directory %s was open to others (mode %04o): it has mode 0700 now",
            directory, stat.S_IMODE(found.st_mode),
        )  # fmt: skip


def check_room(directory: Path, config: MountConfig, disk: Disk) -> None:
    """Check that the disk has room to begin with. Raises MountError."""
    free, needed = disk.free_bytes(directory), config.free_bytes_min + ROOM_BYTES_MIN
    if free < needed:
        raise MountError(
            f"not enough disk: {directory} has {free // MIB} MiB free, {needed // MIB} MiB are needed: make room, or "
            + (
                "choose another --cache-dir, or lower --free-space"
                if config.mountpoint
                else "set TMPDIR to another disk"
            )
        )


@asynccontextmanager
async def opened_cache(config: MountConfig, metrics: Metrics, node: Node) -> AsyncIterator[BlockCache]:
    """Lock the cache directory and open its block cache. Raises CacheError (locked, unusable), MountError (not enough
    disk)."""
    directory = Path(config.cache_dir).absolute()
    with locked(directory, config.mountpoint):
        check_room(directory, config, node.disk)
        cache = BlockCache(
            directory / "blocks",
            bytes_max=config.cache_bytes_max,
            free_bytes_min=config.free_bytes_min,
            metrics=metrics.cache,
            clock=node.clock,
            rng=node.random.stream("eviction"),
            disk=node.disk,
        )
        try:
            yield cache
        finally:
            with trio.CancelScope(shield=True):
                await node.threads.run(cache.close)


def begin_counting(cache: BlockCache, nursery: trio.Nursery, threads: Threads) -> None:
    """Count the cached files in the background, unless the previous daemon saved the numbers. If the disk fails, they
    are counted again later: until then the cache is bounded only by the disk."""
    if not cache.counted:
        nursery.start_soon(_count, cache, threads)


def begin_evicting_for_rows(database: Database, cache: BlockCache, nursery: trio.Nursery, threads: Threads) -> None:
    """Have the block cache evict in the background when the disk has no room for rows of the database."""
    send, receive = trio.open_memory_channel[None](1)

    def found_full() -> None:
        with suppress(trio.WouldBlock):  # the cache is asked already
            send.send_nowait(None)

    async def evict() -> None:
        async for _ in receive:
            await threads.run(cache.evict, ROOM_FOR_ROWS_BYTES)

    database.found_full.append(found_full)
    nursery.start_soon(evict)


async def _count(cache: BlockCache, threads: Threads) -> None:
    while True:
        await threads.run(cache.scan, abandon_on_cancel=True)
        if cache.counted:
            return
        await trio.sleep(FAILED_RETRY_S)


def identity(config: MountConfig) -> str:
    """Return the name of the lake whose metadata a cache directory holds."""
    endpoint = config.store.endpoint_url
    return f"{config.store.source}{f' at {endpoint}' if endpoint else ''}"


@asynccontextmanager
async def assembled(
    config: MountConfig,
    client: StoreClient,
    metrics: Metrics,
    *,
    node: Node,
    spans: tuple[tuple[int, int], ...] = SPANS,
    hints: HintChannel | None = None,
    lake_id: str = "",
    keeps_other_lake: bool = False,
) -> AsyncIterator[Assembly]:
    """A filesystem ready to serve, with its parts, orphans dealt with as ``config.orphans`` says. ``hints`` of commits
    go over this channel. ``lake_id`` is that of the lake record, if there is one: names of another lake are dropped, or
    with ``keeps_other_lake`` refused, as they are where changes of them are in no store yet.

    Raises CacheError (locked, another lake's, unusable) and MountError (not enough disk), and, unless it is read-only,
    LakeError where names may be missing (`require_all_names`). On leaving, what is not durable stays in staging with
    its record.
    """
    directory = Path(config.cache_dir).absolute()
    async with opened_cache(config, metrics, node) as cache:
        # Repair may lose rows, and keeps the mark of the index that they are from: the next run would fold the loss.
        repairs = not config.folds
        engines = node.engines or RocksEngines(shares_of(config.memory_bytes_max).database)
        database = Database(directory / "meta", identity(config), node.clock, node.disk, engines, repairs=repairs)
        parts: Assembly | None = None
        try:
            _check_lake(database, lake_id, keeps_other_lake=keeps_other_lake)
            async with trio.open_nursery() as nursery:
                # Before anything reads the database: what counts rows does so once.
                await drop_wrong_names(database, client, node.clock, lake_id)
                await load_newest_index(
                    database, client, node.threads, directory / "index", clock=node.clock, folds=config.folds
                )
                metrics.commits.names_missing = int(missing_before(database) > 0)
                if not config.read_only:
                    require_all_names(database)
                parts = Assembly(Ground(config, client, metrics, database, cache, nursery, node, spans, hints))
                await parts.begin()
                await _resolve_orphans(config, parts.filesystem, parts.orphans)
                parts.start()
                begin_counting(cache, nursery, node.threads)
                begin_evicting_for_rows(database, cache, nursery, node.threads)
                try:
                    yield parts
                finally:
                    client.abandon_requests()
                    nursery.cancel_scope.cancel()
        finally:
            if parts is not None:
                parts.close()
            database.close()


def _is_of_other_lake(database: Database, lake_id: str) -> bool:
    return bool(lake_id) and lake_of(database) not in ("", lake_id)


def _check_lake(database: Database, lake_id: str, *, keeps_other_lake: bool) -> None:
    """Raises CacheError where the names are those of another lake, and are kept or have changes that are in no store:
    these would go into this one."""
    if not _is_of_other_lake(database, lake_id):
        return
    lakes = f"of the lake {lake_of(database)}, and this is the lake {lake_id}"
    if keeps_other_lake:
        raise CacheError(
            f"the names in the cache directory are {lakes}: give --cache-dir the directory of a node of this one"
        )
    if database.has_local_changes():
        raise CacheError(
            f"the cache directory has files or changes that are in no store yet, {lakes}: mount that one with it until "
            "they are stored (which endpoint do the environment and the profile name?), or give another --cache-dir"
        )


async def drop_wrong_names(database: Database, client: StoreClient, clock: Clock, lake_id: str) -> None:
    """Drop all names where some are dated too far ahead, which would hide what others commit, where the daemon before
    found that they may be outdated, or where they are those of a lake that was at this place before. Raises
    LakeError."""
    is_ahead = await is_dated_ahead(client, clock, marks_of(database).newest)
    is_other = _is_of_other_lake(database, lake_id)
    if is_ahead or is_other or are_names_outdated(database):
        why = "are dated in the future" if is_ahead else "are of another lake" if is_other else "may be outdated"
        log.warning("names in the cache directory %s: all names are read again", why)
        drop_names(database, is_other_lake=is_other)
    if lake_id and lake_of(database) != lake_id:
        note_lake(database, lake_id)


async def _resolve_orphans(config: MountConfig, filesystem: Filesystem, orphans: Orphans) -> None:
    if config.orphans != "keep" and not config.read_only:
        await orphans.resolve_all(config.orphans)
    for item in filesystem.unfinished():
        if item.state != "orphan":
            continue
        log.warning("orphan %s: %d bytes of %s that a daemon left unfinished", item.id, item.bytes, item.path)
