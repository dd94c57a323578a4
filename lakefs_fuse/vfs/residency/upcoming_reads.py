"""Files that a job says it will read next, read before it asks.

A sampler knows which files come next, and no access pattern does: random order has none. The names come over the
control socket (`lakefs_fuse.torch`), in the order in which they will be read; a few at a time are read here as the job
would, so that its own reads find them in memory, on the cache disk, or on their way. One task looks at the names, one
after the other: most of them are local in later epochs, and requests of the job must not wait for that.

What always holds: a name that is wrong, late, or never read costs what reading the file costs and is no error. At most
`WAITING_MAX` names wait; beyond that the oldest are dropped, because the job has already read them; `FILES_AT_ONCE` are
read at a time. Trio thread only; nothing survives a crash, or has to.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable

import msgspec
import trio

from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Extent
from lakefs_fuse.blockcache.readahead import WHOLE_BYTES_MAX, Readahead
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.errors import LakeError
from lakefs_fuse.metrics import UpcomingMetrics
from lakefs_fuse.vfs.residency.selection import Names, find

FILES_AT_ONCE = 16
WAITING_MAX = 4096
log = logging.getLogger(__name__)


class UpcomingReads:
    """See the module's head. ``names`` need not be newer than the last listings."""

    def __init__(self, names: Names, reader: BlockReader, nursery: trio.Nursery, metrics: UpcomingMetrics) -> None:
        self._names, self._reader, self._nursery, self._metrics = names, reader, nursery, metrics
        self._waiting: deque[str] = deque()
        self._is_running, self._places = False, trio.Semaphore(FILES_AT_ONCE)

    @property
    def is_busy(self) -> bool:
        """Whether files wait, or are being read."""
        return self._is_running or self._places.value < FILES_AT_ONCE

    def statistics(self) -> dict[str, int]:
        """Nested plain values; names are final once released."""
        return {**msgspec.to_builtins(self._metrics), "waiting": len(self._waiting)}

    def add(self, paths: Iterable[str]) -> None:
        """The job will read these next, in this order, after those that were added before."""
        self._waiting += paths
        while len(self._waiting) > WAITING_MAX:
            self._waiting.popleft()
            self._metrics.dropped += 1
        if self._waiting and not self._is_running:
            self._is_running = True
            self._nursery.start_soon(self._run)

    async def _run(self) -> None:
        try:
            while self._waiting:
                await self._look_at(self._waiting.popleft())
                await trio.lowlevel.checkpoint()
        except Exception:
            log.exception("reading files ahead")
        finally:
            self._is_running = False

    async def _look_at(self, path: str) -> None:
        """Begin to read a file that is not local."""
        try:
            entry = await find(self._names, path)
            extent = None if entry is None or entry.is_dir or entry.is_symlink else self._names.extent(entry)
            if extent is None:
                return
            extent = _beginning(extent)
            if await self._reader.is_local(extent):
                self._metrics.local += 1
                return
        except LakeError as error:
            self._count_failed(path, error)
            return
        await self._places.acquire()
        self._nursery.start_soon(self._read, path, extent)

    async def _read(self, path: str, extent: Extent) -> None:
        try:
            whole = None if extent.is_whole or not extent.offset else (extent.offset, extent.offset + extent.size)
            readahead = Readahead() if whole is None else None
            await self._reader.read(extent.version, extent.offset, extent.size, readahead, within=whole)
            self._metrics.files += 1
            self._metrics.bytes += extent.size
        except LakeError as error:
            self._count_failed(path, error)
        except Exception:
            log.exception("reading %s ahead", path)
        finally:
            self._places.release()

    def _count_failed(self, path: str, error: LakeError) -> None:
        self._metrics.failed += 1
        log.debug("reading %s ahead: %s", path, error)


def _beginning(extent: Extent) -> Extent:
    """All of a small file, the first block of a large one."""
    most = WHOLE_BYTES_MAX if extent.is_whole else BLOCK_BYTES
    return extent if extent.size <= most else Extent(extent.version, extent.offset, BLOCK_BYTES)
