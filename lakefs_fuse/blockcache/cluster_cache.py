"""Blocks from a cache that the nodes of a cluster share, so that each byte leaves the store once for all of them.

What always holds:

* *no trust*: a byte of a proxy is served only if a checksum of the store verifies it (`proofs`), or the mount trusts
  the proxies. All others come from the store, of the same version;
* *no error*: bytes that a proxy does not return, or returns wrong, are fetched from the store as if there were no
  proxy. Only the store's errors are raised;
* *same requests*: proxies are asked for single blocks, cut at the object's end, with the ETag as precondition. So the
  requests of two nodes for one block differ only in their signatures.

For tasks on the trio thread. Memory is that of the answer. Nothing needs to survive a crash.
"""

from __future__ import annotations

import logging

import trio

from lakefs_fuse.blockcache.cluster_proxies import ClusterProxies
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version
from lakefs_fuse.blockcache.proofs import Proof, Proofs
from lakefs_fuse.blockcache.verified_get import BlockGetter, Spans
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import LakeError
from lakefs_fuse.metrics import ClusterCacheMetrics
from lakefs_fuse.store.protocol import Fetched, ObjectMeta

_log = logging.getLogger(__name__)


class ClusterCache:
    """See the module's head. ``store`` gets from the store."""

    def __init__(
        self,
        store: BlockGetter,
        proxies: ClusterProxies,
        proofs: Proofs,
        metrics: ClusterCacheMetrics,
        threads: Threads,
    ) -> None:
        self._store, self._proxies, self._proofs = store, proxies, proofs
        self._metrics, self._threads = metrics, threads

    async def get(self, version: Version, start: int, end: int) -> tuple[Fetched, Spans]:
        """See `BlockGetter`. A range that ends inside a block fetches the whole block, because other nodes request it,
        too."""
        first, stop = start // BLOCK_BYTES * BLOCK_BYTES, min(-(-end // BLOCK_BYTES) * BLOCK_BYTES, version.size)
        if (first, stop) != (start, end):
            fetched, wrong = await self._get_blocks(version, first, stop)
            return Fetched(memoryview(fetched.data)[start - first : end - first], fetched.meta), wrong
        return await self._get_blocks(version, start, end)

    async def _get_blocks(self, version: Version, start: int, end: int) -> tuple[Fetched, Spans]:
        proof = await self._proof(version, start, end)
        if proof is None:
            return await self._from_store(version, start, end)
        answer = _Answer(version, start, end)
        async with trio.open_nursery() as nursery:
            for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
                nursery.start_soon(self._add_block, answer, block)
            for at, stop in proof.unproven:
                nursery.start_soon(self._add_unproven, answer, at, stop)
        if answer.error is not None:
            raise answer.error
        if answer.is_whole:
            answer.put_unproven()
            if await self._threads.run(proof.holds, answer.data):
                self._proofs.record_result(proof, holds=True)
                return Fetched(answer.data, answer.meta(trusted=self._proofs.trusts_proxies)), ()
            self._count_damaged(version, start, end)
        self._metrics.fallbacks += 1
        fetched, wrong = await self._from_store(version, start, end)
        if answer.is_whole and fetched.data == answer.data:
            self._proofs.record_result(proof, holds=False)
        return fetched, wrong

    async def _proof(self, version: Version, start: int, end: int) -> Proof | None:
        return await self._proofs.proof(version, start, end) if self._proxies.any_serves else None

    async def _from_store(self, version: Version, start: int, end: int) -> tuple[Fetched, Spans]:
        fetched, wrong = await self._store.get(version, start, end)
        self._metrics.bytes_of_store += len(fetched.data)
        return fetched, wrong

    async def _add_block(self, answer: _Answer, block: int) -> None:
        answer.add(await self._proxies.get(answer.version, block), block * BLOCK_BYTES)

    async def _add_unproven(self, answer: _Answer, at: int, stop: int) -> None:
        try:
            fetched, wrong = await self._from_store(answer.version, at, stop)
        except LakeError as error:  # raised when all parts have ended, and not in a group
            answer.error = error
        else:
            is_right = not wrong and fetched.meta.etag == answer.version.etag and len(fetched.data) == stop - at
            answer.add_unproven(fetched if is_right else None, at)

    def _count_damaged(self, version: Version, start: int, end: int) -> None:
        level = logging.DEBUG if self._metrics.damaged else logging.WARNING
        self._metrics.damaged += 1
        _log.log(
            level, "cluster cache: bytes %d to %d of %s do not match their checksum and come from the "
                "store", start, end,
            version.key,
        )  # fmt: skip


class _Answer:
    """Bytes [start, end) of a version as they come; ``is_whole`` unless a part was None."""

    def __init__(self, version: Version, start: int, end: int) -> None:
        self.version, self._start = version, start
        self.data = bytearray(end - start)
        self.is_whole = True
        self.error: LakeError | None = None
        """An error of the store, after all retries."""
        self._unproven: list[tuple[int, Fetched]] = []
        self._claimed: ObjectMeta | None = None

    def add(self, fetched: Fetched | None, at: int) -> None:
        """Add what a proxy brought."""
        if fetched is None:
            self.is_whole = False
            return
        self._claimed = fetched.meta
        self._put(fetched, at)

    def add_unproven(self, fetched: Fetched | None, at: int) -> None:
        """Add what the store brought; `put_unproven` uses it."""
        if fetched is None:
            self.is_whole = False
        else:
            self._unproven.append((at, fetched))

    def put_unproven(self) -> None:
        """Replace unproven bytes of the proxies by those of the store, when all of these have arrived."""
        for at, fetched in self._unproven:
            self._put(fetched, at)

    def meta(self, *, trusted: bool) -> ObjectMeta:
        """Metadata of the object: from a trusted proxy, else only what is known without one."""
        if trusted and self._claimed is not None:
            return self._claimed
        return ObjectMeta(self.version.key, self.version.size, self.version.etag, 0)

    def _put(self, fetched: Fetched, at: int) -> None:
        begin = at - self._start
        self.data[begin : begin + len(fetched.data)] = fetched.data
