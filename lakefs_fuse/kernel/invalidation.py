"""Invalidation of what the kernel caches: names that changed elsewhere, and listings of directories.

With stateless OPENDIR the kernel keeps a whole listing as pages and sends no further request. It drops a listing itself
when a name in the directory is changed through this mount. The daemon notifies it of everything else: of changes from
elsewhere, and of the end of the TTL. For that it records which directories the kernel may hold, and until when:
DIRECTORIES_MAX of them, beyond which the oldest is invalidated.

The kernel is notified of every name that changed (*no name is dropped*): if more than NAMES_MAX wait, because one LIST
removed that many or the kernel keeps the thread waiting, the rest wait in a file. Tasks that change names never wait
for the kernel, which may keep a directory locked for a request that waits for the same LIST.

A reply that is in flight during an invalidation may restore the old names. Each listing is therefore invalidated once
more AGAIN_S later.

`invalidate_name` and `add_listing` are for the trio thread, and never wait; `wait_notified` waits for `run`, which
notifies the kernel from a worker thread, because it may have to wait there for a request that is being served. A crash
leaves nothing.
"""

from __future__ import annotations

import heapq
import logging
import os
import tempfile
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import BinaryIO, cast

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, which it wraps)
import pyfuse3
import trio

from lakefs_fuse.errors import CacheError
from lakefs_fuse.vfs.changed_names import ChangedNames

NAMES_MAX = 4096
"""Maximum of names that wait in memory, and of names from the overflow file in one notification."""
DIRECTORIES_MAX = 65_536
WRITE_OUTS_MAX = 16
"""Files of which the kernel writes pages at a time."""
AGAIN_S = 1.0
log = logging.getLogger(__name__)


def notify_kernel(directories: Iterable[int], names: Iterable[tuple[int, bytes]]) -> int:
    """Invalidate listings and names in the kernel; return how many of them it knew. Blocking."""
    known = 0
    for directory in directories:
        known += _is_known(pyfuse3.invalidate_inode, pyfuse3.InodeT(directory))
    for parent, name in names:
        known += _is_known(pyfuse3.invalidate_entry, pyfuse3.InodeT(parent), pyfuse3.FileNameT(name))
    return known


def _is_known(invalidate: Callable[..., None], *what: object) -> bool:
    try:
        invalidate(*what)
    except OSError:
        return False  # the kernel does not know it
    return True


async def notify_from_thread(directories: Iterable[int], names: Iterable[tuple[int, bytes]]) -> int:
    """Run `notify_kernel` in a worker thread."""
    return await trio.to_thread.run_sync(notify_kernel, directories, names, abandon_on_cancel=True)


async def invalidate_attributes(inodes: Sequence[int]) -> None:
    """Have the kernel ask for the attributes of files again, and keep their pages. Requests for them may be in
    progress."""
    for inode in inodes:
        hooks.forget_attributes(inode)

    def notify() -> None:
        for inode in inodes:
            _is_known(pyfuse3.invalidate_inode, pyfuse3.InodeT(inode), True)

    await trio.to_thread.run_sync(notify, abandon_on_cancel=True)


def _open_temporary(directory: str | os.PathLike[str]) -> BinaryIO:
    return cast("BinaryIO", tempfile.TemporaryFile(dir=directory))


class Invalidations:
    """Queue of invalidations, with the directories whose listing the kernel may hold."""

    def __init__(
        self,
        count: Callable[[int], None],
        directory: str | os.PathLike[str],
        *,
        notify: Callable[[Iterable[int], Iterable[tuple[int, bytes]]], Awaitable[int]] = notify_from_thread,
    ) -> None:
        """``count`` is called with the number of names and listings that the kernel knew. Overflow files are created in
        ``directory``."""
        self._count, self._notify = count, notify
        self._open_file = partial(_open_temporary, directory)
        self._write_outs = trio.CapacityLimiter(WRITE_OUTS_MAX)
        self._names: dict[tuple[int, bytes], None] = {}
        self._overflow: ChangedNames | None = None
        """Names beyond NAMES_MAX."""
        self._draining: tuple[ChangedNames, Iterator[tuple[int, bytes]]] | None = None
        """A closed overflow file, and its names that still wait."""
        self._stale: dict[int, None] = {}
        self._until = OrderedDict[int, float]()
        self._again: dict[int, float] = {}
        self._due: list[tuple[float, int]] = []
        self._changed = trio.Event()
        self._batches_begun = self._batches_ended = 0
        self._overflows_begun = self._overflows_ended = self._overflow_lost = 0
        self._batch_ended = trio.Event()

    def __len__(self) -> int:
        """Return the number of directories whose listing the kernel may hold."""
        return len(self._until)

    async def write_out(self, inode: int) -> None:
        """Have the kernel write the dirty pages of a file to this daemon, and drop its pages. Another request for the
        file, except WRITE, may be in progress. Threads of their own wait for that, because WRITE may need others."""
        await trio.to_thread.run_sync(notify_kernel, (inode,), (), abandon_on_cancel=True, limiter=self._write_outs)

    def invalidate_name(self, parent: int, name: bytes) -> None:
        """Invalidate a name, and the listing that it is in."""
        if len(self._names) < NAMES_MAX:
            self._names[parent, name] = None
        elif (parent, name) not in self._names:
            self._add_to_overflow(parent, name)
        if parent in self._until:
            self._stale[parent] = None
            if parent not in self._again:
                self._again[parent] = trio.current_time() + AGAIN_S
                heapq.heappush(self._due, (self._again[parent], parent))
        self._changed.set()

    def _add_to_overflow(self, parent: int, name: bytes) -> None:
        if self._overflow is None:
            self._overflow = ChangedNames(self._open_file)
        try:
            self._overflow.add(parent, name)
        except CacheError as error:  # on a full disk changes soon end, because their rows cannot be written
            if len(self._names) == NAMES_MAX:
                log.warning("names that changed are kept in memory until the kernel was notified: %s", error)
            self._names[parent, name] = None

    def add_listing(self, directory: int, fresh_s: float) -> None:
        """Record that the kernel is about to get the listing of a directory, valid for this many seconds."""
        until = trio.current_time() + fresh_s
        if self._until.get(directory, 0.0) >= until:
            return
        if directory not in self._until and len(self._until) >= DIRECTORIES_MAX:
            oldest, _ = self._until.popitem(last=False)
            self._stale[oldest] = None
            self._changed.set()
        self._until[directory] = until
        heapq.heappush(self._due, (until, directory))
        if self._due[0] == (until, directory):
            self._changed.set()

    async def wait_notified(self) -> None:
        """Return when the kernel was notified of everything that was invalidated before. Raises CacheError if the local
        disk lost some of it."""
        due = self._batches_begun + bool(self._stale or self._names)
        overflows_due, ended = self._overflows_begun + (self._overflow is not None), self._overflows_ended
        while self._batches_ended < due or self._overflows_ended < overflows_due:
            await self._batch_ended.wait()
        if self._overflow_lost > ended:
            raise CacheError("programs may see names as they were until --metadata-ttl ends: the local disk failed")

    async def run(self) -> None:
        """Notify the kernel until cancelled."""
        try:
            while True:
                if not self._is_waiting:
                    with trio.move_on_at(self._due[0][0] if self._due else float("inf")):
                        await self._changed.wait()
                self._changed = trio.Event()
                self._expire(trio.current_time())
                if self._is_waiting:
                    await self._notify_batch()
        finally:
            for names in (self._overflow, self._draining and self._draining[0]):
                if names is not None:
                    names.close()

    @property
    def _is_waiting(self) -> bool:
        return bool(self._stale or self._names or self._overflow or self._draining)

    async def _notify_batch(self) -> None:
        """Notify the kernel of the names in memory, and of the next names of the overflow. The work of one thread is
        bounded, because it may continue for a moment when the mount ends, and so that new names need not wait for a
        million others."""
        stale, names = self._stale, self._names
        self._stale, self._names = {}, {}
        self._batches_begun += 1
        if self._draining is None and self._overflow is not None:
            self._draining, self._overflow = (self._overflow, self._overflow.names()), None
            self._overflows_begun += 1
        more = self._next_of_overflow()
        self._count(await self._notify(stale, [*names, *more]))
        self._batches_ended += 1
        if self._draining is not None and len(more) < NAMES_MAX:
            self._draining[0].close()
            self._draining = None
            self._overflows_ended += 1
        self._batch_ended.set()
        self._batch_ended = trio.Event()

    def _next_of_overflow(self) -> list[tuple[int, bytes]]:
        if self._draining is None:
            return []
        try:
            return list(islice(self._draining[1], NAMES_MAX))
        except CacheError as error:
            log.warning("names that changed show as they were until --metadata-ttl ends: %s", error)
            self._overflow_lost = self._overflows_begun
            return []

    def _expire(self, now_s: float) -> None:
        while self._due and self._due[0][0] <= now_s:
            at_s, directory = heapq.heappop(self._due)
            if self._again.get(directory) == at_s:
                del self._again[directory]
                self._stale[directory] = None
            until = self._until.get(directory)
            if until is None or at_s < until:
                continue
            self._stale[directory] = None
            if at_s < until + AGAIN_S:
                heapq.heappush(self._due, (until + AGAIN_S, directory))
            else:
                del self._until[directory]
