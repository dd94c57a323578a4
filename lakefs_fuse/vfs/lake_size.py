"""What df(1) shows of a mount: the names and bytes that it knows of, and how much may still be written.

What always holds:

* *no request*: no server is asked for it. Names that a mount has never listed are not counted;
* *bounded share*: names are counted only on request, a thousand at a time with pauses in between, and not again
  until COUNT_SHARE times the CPU time of the last count has passed: a hundredth of one core at most, whatever asks;
* *no refusal by mistake*: the free space is UNBOUNDED_BYTES as long as uploads make room for what is written. A bound
  is shown where writes would meet it: the disk of a local directory, and, while the store is away, what staging still
  takes. Nothing is free while other programs fill the disk of the cache directory, nor on a read-only mount.

Trio thread only; nothing survives a crash.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.tree import Usage
from lakefs_fuse.staging.staging_area import Staging
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue

UNBOUNDED_BYTES = 1 << 50
"""1 PiB: a bucket has no size, and no program's check of the free space is to refuse."""
UNBOUNDED_NAMES = 1 << 30
COUNT_AGE_S_MIN = 1.0
COUNT_SHARE = 100
PROMPT_S = 0.05
"""A count that takes no longer makes no pauses: one of 30,000 names."""
PAUSE_S = 0.01
"""Between a thousand names and the next."""
WAIT_S_MAX = 0.5
"""For the end of a count, and for the file system of a local directory, which may be a server's; then df(1) shows what
was known before, or was counted so far."""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LakeSize:
    """Names are those of files and directories, without the top of the mount."""

    names: int
    bytes: int
    free_names: int = 0
    free_bytes: int = 0


class NameCount:
    """The number and the bytes of names, counted in the background."""

    def __init__(
        self, count: Callable[[], Iterator[Usage]], nursery: trio.Nursery, *, is_constant: bool = False
    ) -> None:
        """``count`` begins a count, in which each step yields the result so far; ``is_constant``: the names change only
        with `forget`."""
        self._begin, self._nursery, self._is_constant = count, nursery, is_constant
        self._usage = Usage()
        self._ended_s: float | None = None
        self._took_s = 0.0
        self._done: trio.Event | None = None
        """While names are counted: rings at the end."""
        self._generation = 0

    def forget(self) -> None:
        """The names are others now; a count that runs is given up before its next step."""
        self._generation += 1
        self._ended_s, self._done = None, None

    async def usage(self) -> Usage:
        """What was counted last, not longer ago than the module's head says, unless that takes longer than
        WAIT_S_MAX."""
        if self._done is None and self._is_due():
            self._done = trio.Event()
            self._nursery.start_soon(self._count, self._done, self._generation)
        if self._done is not None:
            with trio.move_on_after(WAIT_S_MAX):
                await self._done.wait()
        return self._usage

    def _is_due(self) -> bool:
        if self._ended_s is None:
            return True
        age_s = trio.current_time() - self._ended_s
        return not self._is_constant and age_s >= max(COUNT_AGE_S_MIN, COUNT_SHARE * self._took_s)

    async def _count(self, done: trio.Event, generation: int) -> None:
        is_first, worked_s, usage = self._ended_s is None, 0.0, Usage()
        steps = self._begin()
        try:
            while generation == self._generation:
                began_s = trio.current_time()
                step = next(steps, None)
                worked_s += trio.current_time() - began_s
                if step is None:
                    self._usage, self._ended_s, self._took_s = usage, trio.current_time(), worked_s
                    break
                usage = step
                if is_first:
                    self._usage = usage
                await trio.sleep(PAUSE_S if worked_s > PROMPT_S else 0)
        except LakeError as error:
            log.info("names could not be counted: %s", error)
            self._ended_s, self._took_s = trio.current_time(), worked_s
        finally:
            done.set()
            if generation == self._generation:
                self._done = None


class LakeSizes:
    """The size of a mount that may be written to."""

    def __init__(
        self,
        count: NameCount,
        client: StoreClient,
        staging: Staging,
        writeback: WriteBackQueue,
        cache: BlockCache,
        *,
        read_only: bool,
    ) -> None:
        self._count, self._client, self._staging = count, client, staging
        self._writeback, self._cache, self._read_only = writeback, cache, read_only
        self._free_bytes = UNBOUNDED_BYTES

    async def size(self) -> LakeSize:
        """See the module's head."""
        usage = await self._count.usage()
        if self._read_only:
            return LakeSize(usage.names, usage.bytes)
        return LakeSize(usage.names, usage.bytes, UNBOUNDED_NAMES, min(await self._room_of_store(), self._room_here()))

    async def _room_of_store(self) -> int:
        with trio.move_on_after(WAIT_S_MAX):
            try:
                found = await self._client.free_bytes()
            except LakeError as error:
                log.info("the free space of the store is not known: %s", error)
            else:
                self._free_bytes = UNBOUNDED_BYTES if found is None else found
        return self._free_bytes

    def _room_here(self) -> int:
        """While nothing can be uploaded, what can be staged; else nothing on a full disk. The block cache makes room
        for what is staged."""
        evictable_bytes = self._cache.statistics().bytes_used
        try:
            if self._client.is_away or self._writeback.error is not None:
                return self._staging.room_bytes(evictable_bytes)
            return UNBOUNDED_BYTES if self._staging.can_have_room(evictable_bytes) else 0
        except LakeError:  # the disk fails, and so would a write
            return 0
