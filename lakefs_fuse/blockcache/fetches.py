"""Blocks on their way into memory, and the readers that wait for them.

A load is a run of adjacent blocks of one version that one task fetches. Trio thread only; nothing survives a crash.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence

import trio

from lakefs_fuse.blockcache.admission import Evicts
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version
from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.blockcache.verified_get import Spans
from lakefs_fuse.errors import FileError, LakeError


class PendingBlock:
    """One block of a load. Has ``data`` or ``error`` once ``ready`` is set, since ``ready_s``."""

    __slots__ = ("asked", "claimed", "data", "done", "error", "is_local", "ready", "ready_s", "wrong")

    def __init__(self, done: trio.Event, asked: bool) -> None:
        # Not the load itself: a cycle would keep the bytes until the next garbage collection.
        self.done = done
        """Set when the block is also on disk, or will not be."""
        self.asked = asked
        """Whether a reader waited for it when the load began; else it is readahead."""
        self.claimed = False
        """A task other than the one that began the load waits for it, or is about to."""
        self.ready, self.ready_s = trio.Event(), 0.0
        self.is_local = False
        """The cache disk had it."""
        self.data: memoryview | None = None
        self.error: BaseException | None = None
        self.wrong: Spans = ()
        """Ranges of the version whose bytes do not match their checksum, in this block or in others."""

    def claim(self) -> PendingBlock:
        """Record that a task other than the one that began the load needs the block."""
        self.claimed = True
        return self

    def resolve(self, data: memoryview, wrong: Spans = (), *, is_local: bool = False) -> None:
        """Wake the waiters with the bytes."""
        self.data, self.wrong, self.is_local, self.ready_s = data, wrong, is_local, trio.current_time()
        self.ready.set()

    def fail(self, error: BaseException) -> None:
        """Wake the waiters with an error, unless they got an answer."""
        if not self.ready.is_set():
            self.error, self.ready_s = error, trio.current_time()
            self.ready.set()

    async def wait(self) -> memoryview:
        """The block, once it is ready. Raises FileError with the errno of what failed."""
        if not self.ready.is_set():
            await self.ready.wait()
        if self.data is not None:
            return self.data
        code = self.error.errno if isinstance(self.error, LakeError) else errno.EIO
        # A new error for each waiter: a shared one would collect the tracebacks of all of them.
        raise FileError(code, str(self.error)) from self.error


class Load:
    """Blocks [first, stop) of a version; ``done`` is set when all of it is over, writing to disk too."""

    __slots__ = (
        "blocks", "done", "evicts", "first", "for_memory", "is_refused", "missed_weight", "readahead", "scope",
        "version",
    )  # fmt: skip

    def __init__(
        self,
        version: Version,
        first: int,
        stop: int,
        asked: range,
        readahead: Readahead | None = None,
        *,
        missed_weight: int | None = None,
        for_memory: bool = True,
        evicts: Evicts | None = Evicts.ANY,
    ) -> None:
        self.version = version
        self.first = first
        self.done = trio.Event()
        self.blocks = [PendingBlock(self.done, index in asked) for index in range(first, stop)]
        self.scope = trio.CancelScope()
        """Cancelled when no task waits for the blocks."""
        self.readahead = readahead
        """The plan of this load, in which the load records whether the cache disk had its blocks."""
        self.missed_weight = missed_weight
        """See `Readahead.missed_weight`; None: no jumping reader asked for it."""
        self.for_memory = for_memory
        """Whether to keep it in memory too; else it goes to the cache disk only."""
        self.evicts = evicts
        """What it may evict from the cache disk, to which it goes; None: it does not go there."""
        self.is_refused = False
        """See `refuse`."""

    @property
    def scattered(self) -> bool:
        """A jumping reader asked for it."""
        return self.missed_weight is not None

    @property
    def stop(self) -> int:
        return self.first + len(self.blocks)

    @property
    def bytes_total(self) -> int:
        """The maximum memory of the load."""
        return min(self.stop * BLOCK_BYTES, self.version.size) - self.first * BLOCK_BYTES

    def refuse(self) -> None:
        """Record that the cache disk had no place for some of the blocks, or fails."""
        self.is_refused = True

    def fail(self, first: int, stop: int, error: BaseException) -> None:
        """Wake the waiters of blocks [first, stop) that have no answer yet, with an error."""
        for block in self.blocks[first - self.first : stop - self.first]:
            block.fail(error)


def runs(first: int, wanted: Sequence[bool], blocks_max: int) -> Iterator[tuple[int, int]]:
    """Maximal [start, stop) of adjacent wanted blocks, cut to ``blocks_max``; ``wanted[0]`` is block ``first``."""
    start: int | None = None
    for index, want in enumerate((*wanted, False), first):
        if start is not None and (not want or index - start == blocks_max):
            yield start, index
            start = None
        if want and start is None:
            start = index
