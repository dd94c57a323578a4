"""Opens a lake from the bottom up: store, what it can do, its async client, the filesystem over it.

Used by the daemon only. Leaving the context closes in the opposite order; a crash leaves what each layer's head says.
"""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import trio
from msgspec import structs

from lakefs_fuse import file_limit
from lakefs_fuse.config import MountConfig
from lakefs_fuse.fs import Filesystem, open_filesystem
from lakefs_fuse.fs.immutable import ImmutableFilesystem, open_immutable
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.opening import open_store
from lakefs_fuse.store.pace import Pacable, Pace
from lakefs_fuse.store.places import find_lake
from lakefs_fuse.store.remembering import Findings, find_out, remember

log = logging.getLogger(__name__)


@asynccontextmanager
async def open_lake(
    config: MountConfig,
) -> AsyncIterator[tuple[Filesystem | ImmutableFilesystem, dict[str, object]]]:
    """The filesystem, and what the probe found about its store. Raises StoreError, CacheError, MountError."""
    rng = random.Random()
    path = ""
    if config.immutable:  # what is packed there is known to the lake that the place is in
        found, path = await trio.to_thread.run_sync(find_lake, config.store, abandon_on_cancel=True)
        config = structs.replace(config, store=found)
    store = await trio.to_thread.run_sync(open_store, config.store, abandon_on_cancel=True)
    try:
        findings = await trio.to_thread.run_sync(find_out, store, config, rng, abandon_on_cancel=True)
        capabilities = findings.capabilities
        _log_findings(config, findings)
        metrics = Metrics()
        if config.upload_bytes_s_max and isinstance(store, Pacable):
            store.keep_to(Pace(config.upload_bytes_s_max, metrics.upload))
        client = StoreClient(
            store,
            capabilities,
            metrics.store,
            retry_timeout_s=config.store.retry_timeout_s,
            requests_max=file_limit.requests_max(config.store.requests_max),
            uploads_max=file_limit.requests_max(config.uploads_max),
            rng=rng,
        )
        if config.immutable:
            async with open_immutable(config, client, metrics, path=path) as immutable:
                remember(config, findings)
                yield immutable, dataclasses.asdict(capabilities)
        else:
            async with open_filesystem(config, client, metrics) as fs:
                remember(config, findings)
                yield fs, dataclasses.asdict(capabilities)
    finally:
        store.close()


def _log_findings(config: MountConfig, findings: Findings) -> None:
    at = datetime.fromtimestamp(findings.at_ns // 1_000_000_000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    log.info("store of %s: %s, as found out at %s", config.store.source, findings.capabilities.name, at)
    for note in findings.capabilities.notes:
        log.info("adapted to the store: %s", note)
