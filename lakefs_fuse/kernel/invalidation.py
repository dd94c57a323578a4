"""What the kernel remembers and has to forget: names that changed behind its back, and listings of directories.

With stateless OPENDIR the kernel keeps a whole listing as pages and asks no more. It drops one by itself when a name in
the directory is changed through this mount; everything else it has to be told: a change that came from elsewhere, and
that the time has come to ask the store again (the TTL). So it is noted which directories it may hold, and until when;
of DIRECTORIES_MAX of them, beyond which the oldest has to go.

A reply that is on its way when something is invalidated may bring the old names back. Each listing is therefore
invalidated once more AGAIN_S later.

`name` and `listed` are for the trio thread, and never wait. `run` tells the kernel from a worker thread, because it may
be made to wait there for a request that is being served. Nothing is left behind.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Awaitable, Callable, Iterable

from lakefs_fuse.kernel.native import hooks  # isort: skip  # noqa: F401  (loaded before pyfuse3, which it wraps)
import pyfuse3
import trio

NAMES_MAX = 4096
"""Of names that wait to be told. More are dropped: what the kernel knows of names ends with the TTL in any case."""
DIRECTORIES_MAX = 65_536
AGAIN_S = 1.0
log = logging.getLogger(__name__)


def tell_kernel(directories: Iterable[int], names: Iterable[tuple[int, bytes]]) -> int:
    """Blocking; answers how much of it the kernel knew."""
    told = 0
    for directory in directories:
        told += _is_told(pyfuse3.invalidate_inode, pyfuse3.InodeT(directory))
    for parent, name in names:
        told += _is_told(pyfuse3.invalidate_entry, pyfuse3.InodeT(parent), pyfuse3.FileNameT(name))
    return told


def _is_told(invalidate: Callable[..., None], *what: object) -> bool:
    try:
        invalidate(*what)
    except OSError:
        return False  # the kernel does not know it
    return True


async def tell_from_thread(directories: Iterable[int], names: Iterable[tuple[int, bytes]]) -> int:
    """As `tell_kernel`."""
    return await trio.to_thread.run_sync(tell_kernel, directories, names, abandon_on_cancel=True)


class Invalidations:
    """See the module's head."""

    def __init__(
        self,
        told: Callable[[int], None],
        *,
        tell: Callable[[Iterable[int], Iterable[tuple[int, bytes]]], Awaitable[int]] = tell_from_thread,
    ) -> None:
        """``told`` is called with how many things the kernel was told."""
        self._told, self._tell = told, tell
        self._names: dict[tuple[int, bytes], None] = {}
        self._stale: dict[int, None] = {}
        self._until: dict[int, float] = {}
        self._again: dict[int, float] = {}
        self._due: list[tuple[float, int]] = []
        self._wanted = trio.Event()

    def __len__(self) -> int:
        """Directories of which the kernel may hold the listing."""
        return len(self._until)

    def name(self, parent: int, name: bytes) -> None:
        """The name is another than the kernel may remember, and so is the listing that it is in."""
        if len(self._names) < NAMES_MAX:
            self._names[parent, name] = None
        if parent in self._until:
            self._stale[parent] = None
            if parent not in self._again:
                self._again[parent] = trio.current_time() + AGAIN_S
                heapq.heappush(self._due, (self._again[parent], parent))
        self._wanted.set()

    def listed(self, directory: int, fresh_s: float) -> None:
        """The kernel is about to be told what is in a directory, which counts for so many seconds."""
        until = trio.current_time() + fresh_s
        if self._until.get(directory, 0.0) >= until:
            return
        if directory not in self._until and len(self._until) >= DIRECTORIES_MAX:
            oldest = next(iter(self._until))
            del self._until[oldest]
            self._stale[oldest] = None
            self._wanted.set()
        self._until[directory] = until
        heapq.heappush(self._due, (until, directory))
        if self._due[0] == (until, directory):
            self._wanted.set()

    async def run(self) -> None:
        """For as long as the session lives."""
        while True:
            with trio.move_on_at(self._due[0][0] if self._due else float("inf")):
                await self._wanted.wait()
            self._wanted = trio.Event()
            self._expire(trio.current_time())
            if self._stale or self._names:
                stale, names = self._stale, self._names
                self._stale, self._names = {}, {}
                self._told(await self._tell(stale, names))

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
