"""Opens the lake of a mount: its store and client, the filesystem over them, and the maintenance beside it.

Used by the daemon only. Leaving the context closes in the opposite order; the layers document what a crash leaves.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import msgspec
import trio
from msgspec import structs

from lakefs_fuse.admin import maintenance
from lakefs_fuse.admin.fold_database import FoldDatabase
from lakefs_fuse.config import MountConfig
from lakefs_fuse.control.server import ServedLake
from lakefs_fuse.daemon.background_worker import BackgroundWorker
from lakefs_fuse.daemon.lake_connection import connect_lake, require_same_lake
from lakefs_fuse.daemon.maintenance import Maintenance
from lakefs_fuse.environment import descriptor_limit
from lakefs_fuse.environment.hint_channel import HintChannel, open_channel
from lakefs_fuse.environment.node import Node
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.product import NODE_NAME_VARIABLE
from lakefs_fuse.store.client import StoreClient, ThreadTransport
from lakefs_fuse.store.lake_record import KEY, OpenedLake
from lakefs_fuse.store.open import find_lake
from lakefs_fuse.store.rate_limit import RateLimiter
from lakefs_fuse.vfs.filesystem import Filesystem
from lakefs_fuse.vfs.immutable.filesystem import ImmutableFilesystem, open_immutable
from lakefs_fuse.vfs.immutable.residency_report import Host
from lakefs_fuse.vfs.open import assembled

NS = 1_000_000_000
log = logging.getLogger(__name__)


@asynccontextmanager
async def open_lake(
    config: MountConfig,
) -> AsyncIterator[tuple[Filesystem | ImmutableFilesystem, ServedLake, Callable[[], Awaitable[None]]]]:
    """The filesystem, its lake, and the task of maintenance, to run while it is mounted.

    Raises StoreError, CacheError, MountError."""
    node = Node.of_this_machine()
    path = ""
    if config.immutable:  # the packs of a place belong to the lake that it is in
        found, path = await trio.to_thread.run_sync(find_lake, config.store, node, abandon_on_cancel=True)
        config = structs.replace(config, store=found)
    metrics = Metrics()
    limiter = RateLimiter(config.upload_bytes_s_max, metrics.upload, node.clock)
    connecting = connect_lake(
        config.store,
        node,
        metrics.store,
        transport=ThreadTransport(
            node.threads,
            requests_max=descriptor_limit.requests_max(config.store.requests_max),
            uploads_max=descriptor_limit.requests_max(config.uploads_max),
        ),
        may_write=not config.read_only,
        limiter=limiter,
        abandon=True,
        is_root=not config.immutable,
    )
    async with connecting as connection:
        opened, client = connection.opened, connection.client
        capabilities = opened.capabilities
        _log_opened(config, opened)
        if opened.unknown:
            note = f"read-only: the lake has {', '.join(opened.unknown)}, which needs a newer lakefs-fuse to write"
            log.warning("%s", note)
            config = structs.replace(config, read_only=True)
            capabilities = dataclasses.replace(capabilities, notes=(*capabilities.notes, note))
        lake_id = opened.record.id if opened.record is not None else ""
        check = partial(require_same_lake, client, config.store.source, lake_id)
        served = msgspec.to_builtins(capabilities)
        lake = ServedLake(lake_id, served, lambda: limiter.sent_bytes, check, opened.unknown)
        if config.immutable:
            config = structs.replace(config, records_residency=config.records_residency and not opened.unknown)
            machine = os.uname().nodename
            host = Host(os.environ.get(NODE_NAME_VARIABLE) or machine, machine)
            async with open_immutable(
                config, client, metrics, path=path, host=host, node=node, lake_id=lake_id
            ) as immutable:
                yield immutable, lake, _no_maintenance
        else:
            hints = _open_hints(config, opened)
            async with assembled(config, client, metrics, node=node, hints=hints, lake_id=lake_id) as parts:
                fs = parts.filesystem
                maintain, section = _no_maintenance, _no_section
                if config.maintenance == "auto" and not config.read_only:
                    tasks = _maintenance_of(config, client, metrics, node, parts.cache.evict, opened.has_levels)
                    maintain, section = tasks.run, tasks.statistics
                else:
                    await trio.to_thread.run_sync(_fold_database_of(config).remove)
                fs.events.statistics_requested.append(lambda: {"maintenance": section()})
                yield fs, lake, maintain


def _open_hints(config: MountConfig, opened: OpenedLake) -> HintChannel | None:
    if not config.hints:
        return None
    if opened.record is None:
        log.warning("no hints: the lake has no %s yet, whose id names their channel", KEY)
        return None
    return open_channel(config.hints, opened.record.id)


async def _no_maintenance() -> None: ...


def _no_section() -> dict[str, object]:
    return {"mode": "off"}


def _fold_database_of(config: MountConfig) -> FoldDatabase:
    return FoldDatabase(Path(config.cache_dir).absolute() / "folded")


def _maintenance_of(
    config: MountConfig,
    client: StoreClient,
    metrics: Metrics,
    node: Node,
    evict: Callable[[int], int],
    has_levels: bool,
) -> Maintenance:
    directory = Path(config.cache_dir).absolute() / "maintenance"

    def short_bytes(wanted: int) -> int:
        return config.free_bytes_min + wanted - node.disk.free_bytes(directory.parent)

    def make_room(wanted: int) -> bool:
        short = short_bytes(wanted)
        return short <= 0 or (evict(short) > 0 and short_bytes(wanted) <= 0)

    database = _fold_database_of(config)
    inspector = maintenance.Inspector(
        client,
        node.clock,
        interval_s=maintenance.INTERVAL_S,
        commits_max=maintenance.LEVELS_COMMITS_MAX if has_levels else maintenance.COMMITS_MAX,
        ahead_ns=lambda: int(metrics.commits.clock_offset_s * NS),
        database=database,
        has_levels=has_levels,
    )
    limit = config.upload_bytes_s_max
    worker = BackgroundWorker(config.store, directory, make_room, node.threads, upload_bytes_s_max=limit)
    rng = node.random.stream("maintenance")
    return Maintenance(inspector, worker, rng, database, lambda: metrics.commits.applied, node.threads)


def _log_opened(config: MountConfig, opened: OpenedLake) -> None:
    at = datetime.fromtimestamp(opened.finding.found_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lake = f"lake {opened.record.id}" if opened.record is not None else f"no {KEY}"
    log.info("store of %s (%s): %s, as found out at %s", config.store.source, lake, opened.capabilities.name, at)
    for note in opened.capabilities.notes:
        log.info("adapted to the store: %s", note)
