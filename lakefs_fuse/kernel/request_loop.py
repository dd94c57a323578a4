"""Chooses the task that reads /dev/fuse, as pyfuse3 does, at a fraction of its cost.

pyfuse3 gives every request to another task, and waits for the descriptor before each read. Here one task continues to
read while there are requests, for `BURST_S` at most. Most handlers never wait, and then the same task reads the next
request. A handler that waits may do so for minutes: when it first waits, `operations.upcall`, in which every handler
runs that may wait, has another task woken, which reads from then on. The most recently busy tasks go first, and new
ones last, because each keeps a buffer as large as the largest request that it has read. Needs request_loop.c; without
it, or with a pyfuse3 that reads in another way, pyfuse3's own loop runs. Trio thread only.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Awaitable, Callable

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, which it wraps)
import pyfuse3
import trio
from outcome import Value

BURST_S = 0.0003
"""Time for which one task reads before the others of the loop have their turn. With a longer time, files that close
together do not meet in time to share a pack; with none, a request costs a quarter more."""


class RequestTurns:
    """Tasks that wait for a request: one for the descriptor, the others for their turn."""

    def __init__(self) -> None:
        library = hooks.library()
        assert library is not None
        self._drained, self._exited = library.lakefs_is_drained, library.lakefs_session_exited
        self._fd = int(library.lakefs_session_fd())
        self._idle: list[trio.lowlevel.Task] = []
        """The one to go first is the last."""
        self._known: set[trio.lowlevel.Task] = set()
        """Tasks that have waited here. pyfuse3 starts one with each request that is read, up to its maximum."""
        self._watched = False
        self._coming = 0
        """Number of tasks that were woken and have not run since."""
        self._begun_s = 0.0

    async def wait(self) -> bool:
        """Wait until the caller may read a request; return False if the session has ended."""
        task = trio.lowlevel.current_task()
        if task not in self._known:
            self._known.add(task)
            if not self._exited() and (self._idle or self._watched or self._coming):
                self.wake_successor()
                await self._park(0)
        while not self._exited():
            if not self._drained() and time.perf_counter() - self._begun_s < BURST_S:
                return True
            if self._watched:
                await self._park(len(self._idle))
                continue
            self._watched = True
            try:
                await trio.lowlevel.wait_readable(self._fd)
            except trio.ClosedResourceError:
                return False
            finally:
                self._watched = False
            self._begun_s = time.perf_counter()
            return True
        return False

    def ending_together(self, loop: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        """Return the loop of each task. One that ends, because the session has ended, wakes the others."""

        @functools.wraps(loop)
        async def read_requests(*arguments: object) -> None:
            await loop(*arguments)
            self._wake(len(self._idle))

        return read_requests

    async def _park(self, place: int) -> None:
        task = trio.lowlevel.current_task()
        self._idle.insert(place, task)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._idle.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._coming -= 1

    def wake_successor(self) -> None:
        """Let another task read the next request while the caller waits for something else."""
        if not self._watched and not self._coming:
            self._wake(1)

    def _wake(self, count: int) -> None:
        for _ in range(min(count, len(self._idle))):
            trio.lowlevel.reschedule(self._idle.pop(), Value(None))
            self._coming += 1


def is_possible() -> bool:
    """Return whether the library is loaded, and pyfuse3 reads requests in the way that `begin` replaces."""
    replaced = "_wait_fuse_readable", "_session_loop"
    return hooks.library() is not None and all(hasattr(pyfuse3, name) for name in replaced)


def begin(waiting: list[Callable[[], None]]) -> bool:
    """Replace pyfuse3's way of reading, between its `init` and `main`; return False if that is not possible.
    ``waiting`` gets what is to be called when a handler first waits."""
    library = hooks.library()
    if library is None or not is_possible() or not library.lakefs_begin_reading():
        return False
    turns, of_pyfuse3 = RequestTurns(), vars(pyfuse3)
    waiting.append(turns.wake_successor)
    of_pyfuse3["_wait_fuse_readable"] = turns.wait
    of_pyfuse3["_session_loop"] = turns.ending_together(of_pyfuse3["_session_loop"])
    return True
