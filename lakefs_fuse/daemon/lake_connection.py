"""Opens the store of a lake and a client for it: the daemon of a mount and the worker of a command both need them.

Leaving the context closes the store. Nothing is kept, so a crash leaves nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import trio

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.node import Node
from lakefs_fuse.metrics import StoreMetrics
from lakefs_fuse.store.client import StoreClient, ThreadTransport
from lakefs_fuse.store.lake_record import OpenedLake, open_record
from lakefs_fuse.store.open import open_store, require_root
from lakefs_fuse.store.protocol import ObjectStore
from lakefs_fuse.store.rate_limit import RateLimiter


@dataclass(frozen=True, slots=True)
class Connection:
    """An open store, what its lake record says, and a client for the tasks of this process."""

    store: ObjectStore
    opened: OpenedLake
    client: StoreClient


@asynccontextmanager
async def connect_lake(
    config: StoreConfig,
    node: Node,
    metrics: StoreMetrics,
    *,
    transport: ThreadTransport,
    may_write: bool,
    limiter: RateLimiter | None = None,
    abandon: bool = False,
    is_root: bool = False,
) -> AsyncIterator[Connection]:
    """``may_write``: probe the store and write the lake record where needed; ``abandon``: cancelling does not wait;
    ``is_root``: the place is to be a lake of its own (`require_root`).

    Raises StoreError, ConfigError, MountError."""
    store = await trio.to_thread.run_sync(open_store, config, node, limiter, abandon_on_cancel=abandon)
    try:
        if is_root:
            await trio.to_thread.run_sync(require_root, store, config, node, abandon_on_cancel=abandon)
        open_it = partial(open_record, store, config, node.random.stream("probe"), node.clock, may_write=may_write)
        opened = await trio.to_thread.run_sync(open_it, abandon_on_cancel=abandon)
        client = StoreClient(
            store,
            opened.capabilities,
            metrics,
            transport=transport,
            clock=node.clock,
            rng=node.random.stream("backoff"),
            retry_timeout_s=config.retry_timeout_s,
            commit_format=opened.commit_format,
        )
        yield Connection(store, opened, client)
    finally:
        store.close()
