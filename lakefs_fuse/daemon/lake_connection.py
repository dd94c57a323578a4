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
from lakefs_fuse.errors import ConfigError, LakeError, NotFound
from lakefs_fuse.metrics import StoreMetrics
from lakefs_fuse.store.client import StoreClient, ThreadTransport
from lakefs_fuse.store.lake_record import KEY, RECORD_BYTES_MAX, OpenedLake, decode_record, open_record, read_record
from lakefs_fuse.store.open import open_store, require_root
from lakefs_fuse.store.protocol import ObjectStore
from lakefs_fuse.store.rate_limit import RateLimiter

OTHER_LAKE = (
    "{source} as this shell reaches it is not the lake of the mount: set AWS_ENDPOINT_URL and AWS_PROFILE as for the "
    "mount, or give the URL of the lake; if the lake was created again, mount it again"
)
REPLACED = (
    f"{{source}} is not the lake that was mounted any more: its {KEY} {{why}}. Unmount it, and mount it again; or "
    "bring that object back"
)


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
    lake_id: str | None = None,
) -> AsyncIterator[Connection]:
    """``may_write``: probe the store and write the lake record where needed; ``abandon``: cancelling does not wait;
    ``is_root``: the source must be the root of a lake (`require_root`); ``lake_id``: of a mount (`require_lake_id`).

    Raises StoreError, ConfigError, MountError."""
    store = await trio.to_thread.run_sync(open_store, config, node, limiter, abandon_on_cancel=abandon)
    try:
        if is_root:
            await trio.to_thread.run_sync(require_root, store, config, node, abandon_on_cancel=abandon)
        if lake_id is not None:
            await trio.to_thread.run_sync(require_lake_id, store, config, node, lake_id, abandon_on_cancel=abandon)
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


def require_lake_id(store: ObjectStore, config: StoreConfig, node: Node, lake_id: str) -> None:
    """Raises ConfigError unless the lake record has the id ``lake_id``; an empty one stands for no record."""
    record, _ = read_record(store, node.clock)
    if (record.id if record is not None else "") != lake_id:
        raise ConfigError(OTHER_LAKE.format(source=config.source))


async def require_same_lake(client: StoreClient, source: object, lake_id: str) -> None:
    """Check that the store still has the lake of a mount; one without a lake record may get it later. Raises
    LakeError unless the record has the id ``lake_id``."""
    if not lake_id:
        return
    try:
        record = decode_record(bytes((await client.get(KEY, 0, RECORD_BYTES_MAX)).data))
    except NotFound as error:
        raise LakeError(REPLACED.format(source=source, why="is missing")) from error
    if record.id != lake_id:
        raise LakeError(REPLACED.format(source=source, why="is that of another lake"))
