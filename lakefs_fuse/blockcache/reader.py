"""Reads any bytes of an object version: from memory, from the block cache, or from the store in few GETs.

Random reads of a large object read only the requested bytes from the cache disk, not whole blocks. They do the same
from the store if the cache is full of blocks in use (`admission`), or the object is being fetched (`prefetch`).

What always holds:

* a block is fetched once, however many readers wait for it: fetches run in the given nursery, not in a reader's task,
  so a cancelled reader does not affect others, and an error wakes all waiters;
* every GET names the version's ETag, and a response of another version is ESTALE, never mixed in;
* bytes with a wrong checksum (`verified_get`) are EIO, and their response is not kept;
* memory is bounded: recent blocks (``memory_blocks``) plus what is in flight (``inflight_bytes_max``, which covers a
  block until it is written to the cache disk). Readers wait for memory; readahead and prefetch do not, they are
  dropped. So a cache disk slower than the store slows readers down only once the memory in flight is full of bytes to
  be written;
* failures of the cache disk never fail a read.

`BlockReader` is for tasks on the trio thread; code between two awaits is atomic. It uses a worker thread only for the
disk, and for small reads only if the disk is slow (`disk_latency`). Nothing here needs to survive a crash.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from lakefs_fuse.blockcache.admission import Evicts
from lakefs_fuse.blockcache.async_cache import AsyncBlockCache
from lakefs_fuse.blockcache.cache import CacheState
from lakefs_fuse.blockcache.failed_reads import FailedReads
from lakefs_fuse.blockcache.fetches import Load, PendingBlock, runs
from lakefs_fuse.blockcache.memory_cache import RecentBlocks
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Extent, Version
from lakefs_fuse.blockcache.prefetch import FETCHES_AT_ONCE, ObjectPrefetch
from lakefs_fuse.blockcache.readahead import PIECE_BYTES, WHOLE_BYTES_MAX, Readahead
from lakefs_fuse.blockcache.verified_get import BlockGetter, Getter, Spans, UnverifiedGet
from lakefs_fuse.errors import FileError, LakeError, NotFound, PreconditionFailed, StoreError
from lakefs_fuse.metrics import CacheMetrics, ReadMetrics
from lakefs_fuse.store.protocol import Fetched, ObjectMeta
from lakefs_fuse.sync.byte_budget import ByteBudget

_log = logging.getLogger(__name__)

MEMORY_BLOCKS = 48
FETCH_BLOCKS_MAX = PIECE_BYTES // BLOCK_BYTES
INFLIGHT_BYTES_MAX = 64 << 20
ENSURE_SPAN_BYTES = 32 << 20
HEADER_BYTES = 320
"""Bytes fetched before a file of a pack that is read without caching: its header has its checksum (`verified_get`)."""


@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """``bytes_inflight`` covers fetches and bytes that they have yet to write to the cache disk."""

    memory_blocks: int
    memory_bytes: int
    bytes_inflight: int
    blocks_pending: int
    tasks_waiting: int


class BlockReader:
    """See the module's head. ``learned`` is called with the metadata of each GET; ``verified``, if given, makes the
    GETs."""

    def __init__(
        self,
        client: Getter,
        disk: AsyncBlockCache,
        metrics: CacheMetrics,
        nursery: trio.Nursery,
        *,
        memory_blocks: int = MEMORY_BLOCKS,
        inflight_bytes_max: int = INFLIGHT_BYTES_MAX,
        learned: Callable[[ObjectMeta], None] | None = None,
        verified: BlockGetter | None = None,
    ) -> None:
        self._source = verified or UnverifiedGet(client)
        self.disk = self._disk = disk
        self._cache = disk.blocks
        self._metrics, self._uncounted = metrics, ReadMetrics()
        self._nursery = nursery
        self._blind_blocks_max = max(1, memory_blocks // 4)
        self._learned = learned
        self._recent = RecentBlocks(memory_blocks * BLOCK_BYTES)
        self._budget = ByteBudget(inflight_bytes_max)
        self._pending: dict[tuple[Version, int], PendingBlock] = {}
        self._bypassing: dict[tuple[Version, int, int], PendingBlock] = {}
        """Ranges that are being read without caching."""
        self._failed = FailedReads()
        at_once = max(1, min(FETCHES_AT_ONCE, inflight_bytes_max // 2 // PIECE_BYTES))
        fill = partial(self.fill, evicts=Evicts.NONE)
        self._whole = ObjectPrefetch(self._cache, metrics, nursery, fill, FETCH_BLOCKS_MAX, at_once)

    @property
    def inflight_bytes_max(self) -> int:
        """Bound of what is in flight."""
        return self._budget.bytes_max

    def statistics(self) -> ReaderStatistics:
        """Gauges of this moment."""
        return ReaderStatistics(
            memory_blocks=len(self._recent),
            memory_bytes=self._recent.bytes_used,
            bytes_inflight=self._budget.bytes_used,
            blocks_pending=len(self._pending),
            tasks_waiting=self._budget.tasks_waiting,
        )

    async def read(
        self, version: Version, offset: int, length: int, readahead: Readahead | None = None, *, jumps: bool = False,
        around: bool = False, within: tuple[int, int] | None = None, reads: ReadMetrics | None = None,
    ) -> bytes | memoryview:  # fmt: skip
        """Bytes [offset, offset + length), cut at the version's end. Not a checkpoint if the bytes are in memory, or
        the disk returns them immediately. ``jumps``: the reads are random; so they are if the bytes belong to a file
        that is a part of the version, ``within`` its begin and end. ``around``: the rest of the block is about to be
        read. ``reads`` counts where the bytes were, and the waits for them.

        Raises FileError: ESTALE if the version no longer exists in the store, else the errno of the store's error,
        immediately if the kernel repeats a read that has just failed (`failed_reads`).
        """
        end = min(offset + length, version.size)
        if offset >= end:
            return b""
        reads = reads or self._uncounted
        first, stop = offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        if stop - first == 1:
            block = self._recent.get(version, first)
            if block is not None:
                self._metrics.hits += 1
                reads.bytes_of_memory += end - offset
                if readahead is not None:
                    self._ahead(version, readahead, offset, length)
                return block[offset - first * BLOCK_BYTES : end - first * BLOCK_BYTES]
        if self._failed:
            self._failed.raise_again(version, offset, end)
        began_s = trio.current_time()
        try:
            return await self._read(version, offset, end, readahead, jumps, around, within, reads)
        except FileError as error:
            self._failed.add(version, offset, end, error, trio.current_time() - began_s)
            raise

    async def _read(
        self, version: Version, offset: int, end: int, readahead: Readahead | None, jumps: bool, around: bool,
        within: tuple[int, int] | None, reads: ReadMetrics,
    ) -> bytes | memoryview:  # fmt: skip
        """As `read`, for bytes [offset, end) that are not completely in memory. Raises FileError."""
        first, stop = offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        jumps = jumps or within is not None or (readahead is not None and not readahead.reads_on)
        if jumps and not around and self._in_parts(version, first, stop, readahead):
            began_s = trio.current_time()
            part = await self._disk.read_part(version, offset, end)
            reads.waited_disk_s += trio.current_time() - began_s
            if part is not None:
                self._metrics.hits += stop - first
                reads.bytes_of_disk += end - offset
                if readahead is not None:
                    self._ahead(version, readahead, offset, end - offset)
                return part
        at_hand = self._is_at_hand(version, first, stop)
        is_kept = not jumps or at_hand or self._admits(version, offset)
        start, stop_at = _piece(offset, end, within)
        is_alone = within is not None and not (at_hand or around) and self._whole.take_alone(version, stop_at - start)
        if is_alone or (not is_kept and version.size > (BLOCK_BYTES if readahead is None else WHOLE_BYTES_MAX)):
            if readahead is not None:
                self._ahead(version, readahead, offset, end - offset)
            if offset or within is not None:  # else a handle begins to read sequentially
                return (await self._bypass(version, start, stop_at, end, reads))[offset - start : end - start]
        found = self._gather(version, first, stop, readahead, jumps, is_kept)
        if readahead is not None:
            self._ahead(version, readahead, offset, end - offset)
        return await self._joined(version, found, offset, end, reads)

    async def _joined(
        self, version: Version, found: Sequence[memoryview | PendingBlock], offset: int, end: int, reads: ReadMetrics
    ) -> bytes | memoryview:
        """Bytes [offset, end) of the blocks that have them, the first of which has ``offset``. Raises FileError."""
        first, stop = offset // BLOCK_BYTES, -(-end // BLOCK_BYTES)
        blocks = list[memoryview]()
        for index, item in enumerate(found, first):
            wanted = min(end, (index + 1) * BLOCK_BYTES) - max(offset, index * BLOCK_BYTES)
            if isinstance(item, PendingBlock):
                blocks.append(await _wait(item, wanted, reads))
            else:
                reads.bytes_of_memory += wanted
                blocks.append(item)
        for item in found:
            if isinstance(item, PendingBlock) and any(at < end and offset < stop_at for at, stop_at in item.wrong):
                raise FileError(errno.EIO, f"{version.key}: bytes {offset} to {end} do not have their sum")
        blocks[-1] = blocks[-1][: end - (stop - 1) * BLOCK_BYTES]
        blocks[0] = blocks[0][offset - first * BLOCK_BYTES :]
        return blocks[0] if len(blocks) == 1 else b"".join(blocks)

    async def has_first_block(self, version: Version) -> bool:
        """The first block is in memory, or on the cache disk by the index of its file."""
        return (version, 0) in self._recent or all(await self._disk.has_blocks(version, 0, 1))

    async def is_local(self, extent: Extent) -> bool:
        """Whether all its bytes are in memory or on the cache disk, or some are being fetched."""
        version, first = extent.version, extent.offset // BLOCK_BYTES
        stop = -(-(extent.offset + extent.size) // BLOCK_BYTES)
        if self._is_at_hand(version, first, stop) or self._recent.get(version, ~extent.offset) is not None:
            return True
        return all(await self._disk.has_blocks(version, first, stop))

    async def is_fetched_by_block(self, version: Version, index: int) -> bool:
        """Whether the block is available, or would be cached: reading all of it costs a random reader nothing more."""
        if self._is_at_hand(version, index, index + 1) or self._disk.admission.is_open:
            return True
        return all(await self._disk.has_blocks(version, index, index + 1))

    async def ensure(self, version: Version, start: int, end: int) -> bool:
        """Fetch bytes [start, end) into the cache on disk; False if it would not keep all of them. Raises FileError as
        `read` does.
        """
        end = min(end, version.size)
        stop_all = -(-end // BLOCK_BYTES) if start < end else 0
        step = ENSURE_SPAN_BYTES // BLOCK_BYTES
        for first in range(start // BLOCK_BYTES, stop_all, step):
            stop = min(first + step, stop_all)
            for _ in range(2):  # the second round fetches blocks that were in memory or will not be written to disk
                present = await self._disk.has_blocks(version, first, stop)
                if all(present):
                    break
                absent = [
                    not here and (version, index) not in self._pending for index, here in enumerate(present, first)
                ]
                for run in runs(first, absent, FETCH_BLOCKS_MAX):
                    self._start(Load(version, *run, range(0)), room_taken=False)
                pending = [self._pending.get((version, index)) for index in range(first, stop)]
                for block in pending:
                    if block is not None:
                        await block.claim().wait()
                        await block.done.wait()
            else:
                if not all(await self._disk.has_blocks(version, first, stop)):
                    return False
        return True

    async def fill(self, version: Version, first: int, stop: int, *, evicts: Evicts = Evicts.ANY) -> bool:
        """Fetch the missing blocks of [first, stop) to the cache disk, or wait for the loads that do. False if the disk
        had no place for some that this call fetched, or fails. A caller that is cancelled ends its loads, unless others
        wait for them. Raises LakeError."""
        present = await self._disk.has_blocks(version, first, stop)
        others = [self._pending.get((version, index)) for index in range(first, stop)]
        absent = [not here and (version, index) not in self._pending for index, here in enumerate(present, first)]
        missing = list(runs(first, absent, FETCH_BLOCKS_MAX))
        loads = [Load(version, *run, range(0), for_memory=False, evicts=evicts) for run in missing]
        for load in loads:
            self._start(load, room_taken=False)
        for other in others:
            if other is not None:
                other.claim()
        try:
            for load in loads:
                await load.done.wait()
                for block in load.blocks:
                    await block.wait()
            for other in others:
                if other is not None:
                    await other.done.wait()
        except trio.Cancelled:
            for load in loads:
                self._abandon(load)
            raise
        return not any(load.is_refused for load in loads)

    def _abandon(self, load: Load) -> None:
        """End a load that no other task waits for. The next reader of its blocks begins another."""
        if not load.done.is_set() and not any(block.claimed for block in load.blocks):
            self._forget(load)
            load.scope.cancel()

    def _forget(self, load: Load) -> None:
        for index, block in enumerate(load.blocks, load.first):
            if self._pending.get((load.version, index)) is block:
                del self._pending[load.version, index]

    # -- planning

    def _in_parts(self, version: Version, first: int, stop: int, readahead: Readahead | None) -> bool:
        """Whether to read only the requested bytes of blocks [first, stop) from the disk."""
        if not self._cache.may_have(version) or version.size <= (BLOCK_BYTES if readahead is None else WHOLE_BYTES_MAX):
            return False
        return not self._is_at_hand(version, first, stop)

    def _is_at_hand(self, version: Version, first: int, stop: int) -> bool:
        """Whether some of the blocks are in memory, or being fetched."""
        keys = [(version, index) for index in range(first, stop)]
        return any(key in self._pending or key in self._recent for key in keys)

    def _admits(self, version: Version, offset: int) -> bool:
        self._disk.admission.read(version, offset)
        return self._disk.admission.admits()

    def _gather(
        self, version: Version, first: int, stop: int, readahead: Readahead | None, scattered: bool, is_kept: bool
    ) -> list[memoryview | PendingBlock]:
        """Each block, or the pending load of it; counts hits, and starts loads of missing blocks."""
        weight = None if not scattered else 1 if readahead is None else readahead.missed_weight
        evicts = None if not is_kept else Evicts.UNUSED if scattered else Evicts.ANY
        found: list[memoryview | PendingBlock | None] = []
        missing = False
        for index in range(first, stop):
            item = self._recent.get(version, index) or self._pending.get((version, index))
            found.append(item)
            if item is None:
                missing = True
            else:
                if isinstance(item, PendingBlock):
                    item.claim()
                self._metrics.hits += 1
        if missing:
            for run in self._missing(version, *self._span(version, first, stop, readahead)):
                load = Load(version, *run, range(first, stop), missed_weight=weight, evicts=evicts)
                self._start(load, room_taken=False)
        return [item or self._pending[version, index] for index, item in enumerate(found, first)]

    def _span(self, version: Version, first: int, stop: int, readahead: Readahead | None) -> tuple[int, int]:
        """The blocks to load if some of [first, stop) are missing: more than these if that saves GETs."""
        if readahead is None:
            return first, stop
        if version.size <= WHOLE_BYTES_MAX:
            return 0, version.blocks
        if readahead.starved:
            # Readahead was dropped for lack of memory, so fetch as much as one GET may with every wait.
            ahead = min(readahead.window_bytes // BLOCK_BYTES, FETCH_BLOCKS_MAX)
            stop = min(max(stop, first + ahead), version.blocks)
            readahead.fetched(stop * BLOCK_BYTES)
        return first, stop

    def _missing(self, version: Version, first: int, stop: int) -> list[tuple[int, int]]:
        """Runs of blocks that are not in memory or pending, each at most as long as a GET."""
        keys = [(version, index) for index in range(first, stop)]
        wanted = [key not in self._pending and key not in self._recent for key in keys]
        return list(runs(first, wanted, FETCH_BLOCKS_MAX))

    def _start(self, load: Load, *, room_taken: bool) -> None:
        self._nursery.start_soon(self._run_in_scope, load, room_taken)
        for index, block in enumerate(load.blocks, load.first):
            self._pending[load.version, index] = block

    def _ahead(self, version: Version, readahead: Readahead, offset: int, length: int) -> None:
        planned = readahead.plan(offset, length, version.size)
        if planned is None:
            return
        first, stop = planned[0] // BLOCK_BYTES, -(-planned[1] // BLOCK_BYTES)
        if self._cache.state is not CacheState.OK and stop - first > self._blind_blocks_max:
            # Without a disk, memory is all that keeps blocks until they are read.
            stop = first + self._blind_blocks_max
            readahead.dropped(stop * BLOCK_BYTES)
        for run in self._missing(version, first, stop):
            load = Load(version, *run, range(0), readahead)
            if not self._budget.acquire_nowait(load.bytes_total, leave_bytes=self._budget.bytes_max // 4):
                readahead.dropped(run[0] * BLOCK_BYTES)
                return
            self._start(load, room_taken=True)

    # -- loading

    async def _run_in_scope(self, load: Load, room_taken: bool) -> None:
        with load.scope:
            await self._run(load, room_taken)

    async def _run(self, load: Load, room_taken: bool) -> None:
        """Resolve or fail all blocks of a load. Raises nothing but Cancelled."""
        error: BaseException = FileError(errno.EIO, "the mount is ending")
        try:
            if not room_taken:
                await self._budget.acquire(load.bytes_total)
                room_taken = True
            absent = await self._from_disk(load)
            rest = list(runs(load.first, absent, FETCH_BLOCKS_MAX))
            if len(rest) == 1:
                await self._from_store(load, *rest[0])
            elif rest:
                async with trio.open_nursery() as nursery:
                    for run in rest:
                        nursery.start_soon(self._from_store, load, *run)
        except Exception as unexpected:
            _log.exception("reading %s", load.version.key)
            error = unexpected
        finally:
            load.fail(load.first, load.stop, error)
            if room_taken:
                self._budget.release(load.bytes_total)
            self._forget(load)
            load.done.set()

    async def _from_disk(self, load: Load) -> list[bool]:
        """Resolve the blocks that the cache disk has; returns which it does not have."""
        if not self._cache.may_have(load.version):
            return [True] * len(load.blocks)
        blocks = await self._disk.read_blocks(load.version, load.first, load.stop, parts_to_come=load.scattered)
        for index, (data, pending) in enumerate(zip(blocks, load.blocks, strict=True), load.first):
            if data is not None:
                view = memoryview(data)
                if load.for_memory:
                    self._recent.put(load.version, index, [view])
                self._metrics.hits += pending.asked
                pending.resolve(view, is_local=True)
        absent = [data is None for data in blocks]
        if load.readahead is not None:
            load.readahead.set_local(not any(absent))
        return absent

    async def _from_store(self, load: Load, first: int, stop: int) -> None:
        """GET blocks [first, stop), then write them to the disk. Errors of the GET go to the waiting readers."""
        version = load.version
        pending = load.blocks[first - load.first : stop - load.first]
        asked = sum(block.asked for block in pending)
        self._metrics.misses += asked
        if load.missed_weight:
            self._whole.missed(version, asked * load.missed_weight)
        try:
            fetched, wrong = await self._get(version, first * BLOCK_BYTES, min(stop * BLOCK_BYTES, version.size))
        except LakeError as error:
            load.fail(first, stop, error)
            return
        except Exception as error:
            _log.exception("fetching %s", version.key)
            load.fail(first, stop, error)
            return
        data = memoryview(fetched.data).toreadonly()
        views = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
        if load.for_memory and not wrong:
            self._recent.put(version, first, views)
        self._metrics.prefetched_blocks += sum(not block.asked for block in pending)
        for block, view in zip(pending, views, strict=True):
            block.resolve(view, wrong)
        if self._learned is not None and fetched.meta.metadata is not None:
            self._learned(fetched.meta)
        if load.evicts is None or wrong:
            return
        if not (self._cache.writable and await self._disk.write(version, first, views, evicts=load.evicts)):
            load.refuse()

    # -- past the cache

    async def _bypass(self, version: Version, start: int, stop: int, end: int, reads: ReadMetrics) -> memoryview:
        """Bytes [start, stop), of which those before ``end`` are needed now: from the cache disk if it has all blocks,
        else only these bytes from the store. They are kept in memory for a while, like blocks."""
        kept = self._recent.get(version, ~start)
        if kept is not None and len(kept) >= end - start:
            self._metrics.hits += 1
            reads.bytes_of_memory += end - start
            return kept
        key = (version, start, stop)
        pending = self._bypassing.get(key)
        if pending is None:
            pending = self._bypassing[key] = PendingBlock(trio.Event(), asked=True)
            self._nursery.start_soon(self._run_bypass, key, pending)
        data = await _wait(pending, end - start, reads)
        if any(at < stop and start < stop_at for at, stop_at in pending.wrong):
            raise FileError(errno.EIO, f"{version.key}: bytes {start} to {stop} do not have their sum")
        return data

    async def _run_bypass(self, key: tuple[Version, int, int], pending: PendingBlock) -> None:
        """Resolve or fail. Raises nothing but Cancelled."""
        version, start, stop = key
        error: BaseException = FileError(errno.EIO, "the mount is ending")
        try:
            blocks = await self._from_disk_bypassing(version, start, stop)
            if blocks is not None:
                pending.resolve(blocks, is_local=True)
                self._metrics.hits += 1
                return
            self._metrics.misses += 1
            self._metrics.bypasses += not self._whole.is_coming(version)
            begin = max(0, start - HEADER_BYTES)
            await self._budget.acquire(stop - begin)
            try:
                fetched, wrong = await self._get(version, begin, stop)
                data = memoryview(fetched.data).toreadonly()[start - begin :]
                if not wrong:
                    self._recent.put(version, ~start, [data])
                pending.resolve(data, wrong)
            finally:
                self._budget.release(stop - begin)
        except LakeError as failed:
            error = failed
        except Exception as unexpected:
            _log.exception("reading %s", version.key)
            error = unexpected
        finally:
            pending.fail(error)
            pending.done.set()
            del self._bypassing[key]

    async def _from_disk_bypassing(self, version: Version, start: int, stop: int) -> memoryview | None:
        if not self._cache.may_have(version):
            return None
        first = start // BLOCK_BYTES
        blocks = await self._disk.read_blocks(version, first, -(-stop // BLOCK_BYTES), parts_to_come=True)
        if any(block is None for block in blocks):
            return None
        data = memoryview(b"".join(block for block in blocks if block is not None))
        return data[start - first * BLOCK_BYTES : stop - first * BLOCK_BYTES]

    async def _get(self, version: Version, start: int, end: int) -> tuple[Fetched, Spans]:
        try:
            fetched, wrong = await self._source.get(version, start, end)
        except (NotFound, PreconditionFailed) as error:
            raise FileError(errno.ESTALE, f"{version.key} was replaced or removed while it was open") from error
        if fetched.meta.etag != version.etag:
            raise FileError(errno.ESTALE, f"{version.key} was replaced while it was open")
        if len(fetched.data) != end - start:
            raise StoreError(f"{version.key}: the store answered {len(fetched.data)} bytes of {end - start}")
        return fetched, wrong


def _piece(offset: int, end: int, within: tuple[int, int] | None) -> tuple[int, int]:
    """The range of one read without caching: for a file that is a part of its version up to a block, because its reader
    needs the rest; else the requested range."""
    if within is None:
        return offset, end
    start = offset - (offset - within[0]) % BLOCK_BYTES
    stop = min(start + BLOCK_BYTES, within[1])
    return (start, stop) if end <= stop else (offset, end)


async def _wait(block: PendingBlock, wanted: int, reads: ReadMetrics) -> memoryview:
    """The block, of which ``wanted`` bytes are read. Raises FileError with the errno of the failure."""
    began_s = trio.current_time()
    try:
        data = await block.wait()
    finally:
        waited_s = max(0.0, (block.ready_s or trio.current_time()) - began_s)  # then this task waits for its turn
        if block.is_local:
            reads.waited_disk_s += waited_s
        else:
            reads.waited_store_s += waited_s
    if block.is_local:
        reads.bytes_of_disk += wanted
    else:
        reads.bytes_of_store += wanted
    return data
