"""Chooses the task that reads /dev/fuse, as pyfuse3 does, at a fraction of its cost.

pyfuse3 gives every request to another task, and waits for the descriptor before each read. Here one task continues to
read while there are requests, for `BURST_S` at most, and another takes over when it must wait; the most recently busy
tasks go first, so that few buffers are ever touched. A task may be busy with its request for minutes, so a task begins
its request only when another one waits for the descriptor or is about to. Needs request_loop.c; without it, or with a
pyfuse3 that waits in another way, pyfuse3's own loop runs. Trio thread only.
"""

from __future__ import annotations

import logging
import time

from lakefs_fuse.kernel.native import hooks  # isort: skip  (loaded before pyfuse3, which it wraps)
import pyfuse3
import trio
from outcome import Value

BURST_S = 0.0003
"""Time for which one task reads before the others of the loop have their turn. With a longer time, files that close
together do not meet in time to share a pack; with none, a request costs a quarter more."""
log = logging.getLogger(__name__)


class RequestTurns:
    """Tasks that wait for a request: one for the descriptor, the others for their turn."""

    def __init__(self) -> None:
        library = hooks.library()
        assert library is not None
        self._drained, self._exited = library.lakefs_is_drained, library.lakefs_session_exited
        self._fd = int(library.lakefs_session_fd())
        self._idle: list[trio.lowlevel.Task] = []
        self._watched = False
        self._coming = 0
        """Number of tasks that were woken and have not run since."""
        self._begun_s = 0.0

    async def wait(self) -> bool:
        """Wait until the caller may read a request; return False if the session has ended."""
        while not self._exited():
            if not self._drained() and time.perf_counter() - self._begun_s < BURST_S:
                self._wake_successor()
                return True
            if self._watched:
                await self._park()
                continue
            self._watched = True
            try:
                await trio.lowlevel.wait_readable(self._fd)
            except trio.ClosedResourceError:
                self._wake(len(self._idle))
                return False
            finally:
                self._watched = False
            self._wake_successor()
            self._begun_s = time.perf_counter()
            return True
        self._wake(len(self._idle))
        return False

    async def _park(self) -> None:
        task = trio.lowlevel.current_task()
        self._idle.append(task)

        def abort(_: object) -> trio.lowlevel.Abort:
            self._idle.remove(task)
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)
        self._coming -= 1

    def _wake_successor(self) -> None:
        """Let another task read the next request while the caller is busy with this one."""
        if not self._watched and not self._coming:
            self._wake(1)

    def _wake(self, count: int) -> None:
        for _ in range(min(count, len(self._idle))):
            trio.lowlevel.reschedule(self._idle.pop(), Value(None))
            self._coming += 1


def is_possible() -> bool:
    """Return whether the library is loaded, and pyfuse3 waits in the way that `begin` replaces."""
    return hooks.library() is not None and hasattr(pyfuse3, "_wait_fuse_readable")


def begin() -> bool:
    """Replace pyfuse3's way of waiting, between its `init` and `main`; return False if that is not possible."""
    library = hooks.library()
    if library is None or not is_possible() or not library.lakefs_begin_reading():
        return False
    vars(pyfuse3)["_wait_fuse_readable"] = RequestTurns().wait
    return True
