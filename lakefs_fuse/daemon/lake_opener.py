"""Opens the lake of a mount: its store and client, and the filesystem over them.

Used by the daemon only. Leaving the context closes in the opposite order; the layers document what a crash leaves.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import trio
from msgspec import structs

from lakefs_fuse.config import MountConfig
from lakefs_fuse.daemon.lake_connection import connect_lake
from lakefs_fuse.environment import descriptor_limit
from lakefs_fuse.environment.node import Node
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.client import ThreadTransport
from lakefs_fuse.store.lake_record import KEY, OpenedLake
from lakefs_fuse.store.open import find_lake
from lakefs_fuse.store.rate_limit import RateLimiter
from lakefs_fuse.vfs import Filesystem, open_filesystem
from lakefs_fuse.vfs.immutable.filesystem import ImmutableFilesystem, open_immutable

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_lake(
    config: MountConfig,
) -> AsyncIterator[tuple[Filesystem | ImmutableFilesystem, dict[str, object]]]:
    """The filesystem, and what the probe found about its store. Raises StoreError, CacheError, MountError."""
    node = Node.of_this_machine()
    path = ""
    if config.immutable:  # the packs of a place belong to the lake that it is in
        found, path = await trio.to_thread.run_sync(find_lake, config.store, node, abandon_on_cancel=True)
        config = structs.replace(config, store=found)
    metrics = Metrics()
    limit = config.upload_bytes_s_max
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
        limiter=RateLimiter(limit, metrics.upload, node.clock) if limit else None,
        abandon=True,
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
        if config.immutable:
            async with open_immutable(config, client, metrics, path=path, node=node) as immutable:
                yield immutable, dataclasses.asdict(capabilities)
        else:
            async with open_filesystem(config, client, metrics, node=node) as fs:
                yield fs, dataclasses.asdict(capabilities)


def _log_opened(config: MountConfig, opened: OpenedLake) -> None:
    at = datetime.fromtimestamp(opened.finding.found_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    lake = f"lake {opened.record.id}" if opened.record is not None else f"no {KEY}"
    log.info("store of %s (%s): %s, as found out at %s", config.store.source, lake, opened.capabilities.name, at)
    for note in opened.capabilities.notes:
        log.info("adapted to the store: %s", note)
