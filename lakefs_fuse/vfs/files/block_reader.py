"""The block reader of a mount: where blocks come from, and which answers are compared with sums: those over plain http.

Over https TLS has done so already, for less CPU and for every byte; a local directory has no way to go. What the
proxies of a cluster cache bring is compared however it comes.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from lakefs_fuse.blockcache.async_cache import AsyncBlockCache
from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.cluster_cache import ClusterCache
from lakefs_fuse.blockcache.cluster_proxies import ClusterProxies
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version
from lakefs_fuse.blockcache.proofs import PackSums, Proofs
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.blockcache.verified_get import BlockGetter, ExaminingGetter, PacedGetter, UnverifiedGet, VerifiedGet
from lakefs_fuse.commits.archive import wrong_members
from lakefs_fuse.commits.archive_check import fetch_directory
from lakefs_fuse.config import MountConfig
from lakefs_fuse.environment.memory_shares import shares_of
from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.meta.object_table import is_pack_key
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer, CachedGetter, ObjectMeta

DIRECTORY_SHARE, DIRECTORY_BYTES_MIN, DIRECTORY_BYTES_MAX = 64, 4 << 10, 64 << 10
"""What is fetched of a pack for its directory: one byte in this many, within these bounds. Enough for files of 8 KiB; a
larger directory takes another GET."""
_log = logging.getLogger(__name__)


def open_reader(
    config: MountConfig,
    client: StoreClient,
    metrics: Metrics,
    cache: BlockCache,
    nursery: trio.Nursery,
    node: Node,
    learned: Callable[[ObjectMeta], None] | None = None,
) -> BlockReader:
    """``learned`` is told the metadata that came with a GET."""
    shares = shares_of(config.memory_bytes_max)
    return BlockReader(
        client,
        AsyncBlockCache(cache, nursery, node.threads, node.clock),
        metrics.cache,
        nursery,
        memory_blocks=max(1, shares.recent // BLOCK_BYTES),
        inflight_bytes_max=shares.inflight,
        learned=learned,
        verified=_block_getter(config, client, metrics, nursery, node.threads),
    )


def _block_getter(
    config: MountConfig, client: StoreClient, metrics: Metrics, nursery: trio.Nursery, threads: Threads
) -> BlockGetter:
    limit = config.download_bytes_s_max
    paced = PacedGetter(client, limit, metrics.cache) if limit else client
    verified = _verification(client, paced, metrics, read_only=config.read_only)
    getters: dict[str, CachedGetter] = {}
    for url in config.cluster_cache:
        getter = client.through_cache(url)
        if getter is None:
            _log.warning("--cluster-cache is not used: this store does not answer ranges with 206")
            return verified
        getters[url] = getter
    if not getters:
        return verified
    counters = metrics.cluster_cache
    proxies = ClusterProxies(getters, counters, nursery, threads)
    proofs = Proofs(
        is_pack=is_pack_key,
        wrong_members=wrong_members,
        pack_sums=None if config.trust_cluster_cache else _pack_sums(client, metrics, threads),
        md5_etags=client.capabilities.md5_etags or config.read_only,
    )
    return ClusterCache(verified, proxies, proofs, counters, threads)


def _verification(client: StoreClient, paced: ExaminingGetter, metrics: Metrics, *, read_only: bool) -> BlockGetter:
    """``read_only``: the probe could not put an object to learn of ETags."""
    if client.is_guarded:
        return UnverifiedGet(paced)
    md5_etags = True if client.capabilities.md5_etags else None if read_only else False
    return VerifiedGet(paced, metrics.cache, is_pack=is_pack_key, wrong_members=wrong_members, md5_etags=md5_etags)


def _pack_sums(client: StoreClient, metrics: Metrics, threads: Threads) -> Callable[[Version], Awaitable[PackSums]]:
    async def of_pack(version: Version) -> PackSums:
        tail_bytes = min(max(version.size // DIRECTORY_SHARE, DIRECTORY_BYTES_MIN), DIRECTORY_BYTES_MAX)
        tail_at, tail = max(0, version.size - tail_bytes), memoryview(b"")

        async def fetch(start: int, end: int) -> Buffer:
            nonlocal tail
            if start < tail_at:
                return await get(start, min(end, tail_at)) + bytes(tail[: max(0, end - tail_at)])
            tail = tail or memoryview(await get(tail_at, version.size))
            return tail[start - tail_at : end - tail_at]

        async def get(start: int, end: int) -> bytes:
            data = bytes((await client.get(version.key, start, end, etag=version.etag)).data)
            metrics.cluster_cache.bytes_of_store += len(data)
            return data

        directory = await fetch_directory(version.size, fetch)
        return await threads.run(lambda: PackSums(directory.checksums()))

    return of_pack
