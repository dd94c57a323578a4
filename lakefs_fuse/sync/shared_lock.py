"""A lock with shared and exclusive holders: many writers of one file, or its publisher, never both.

What always holds (*no starvation*): a task that waits for the exclusive lock keeps new shared holders out, so a stream
of writers cannot keep a `close()` waiting. Not reentrant. A free lock is acquired without a checkpoint. Trio tasks
only.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager

from lakefs_fuse.sync.wakeup import Wakeup


class SharedLock:
    """A readers-writer lock that prefers exclusive holders."""

    def __init__(self) -> None:
        self._shared = 0
        self._exclusive = False
        self._exclusive_waiting = 0
        self._changed = Wakeup()

    def shared(self) -> AbstractAsyncContextManager[None]:
        """Hold the lock with others for the block."""
        return _Held(self._acquire_shared, self._release_shared)

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        """Hold the lock alone for the block."""
        return _Held(self._acquire_exclusive, self.release_exclusive)

    async def _acquire_shared(self) -> None:
        while self._exclusive or self._exclusive_waiting:
            await self._changed.wait()
        self._shared += 1

    def _release_shared(self) -> None:
        self._shared -= 1
        if self._changed.event is not None:  # every write and close passes here, and few wait
            self._changed.wake_all()

    async def _acquire_exclusive(self) -> None:
        self._exclusive_waiting += 1
        try:
            while self._exclusive or self._shared:
                await self._changed.wait()
            self._exclusive = True
        finally:
            self._exclusive_waiting -= 1
            if not self._exclusive:
                self._changed.wake_all()  # shared holders that this task kept out

    def acquire_exclusive_nowait(self) -> bool:
        """Acquire the exclusive lock if it is free; `release_exclusive` ends it."""
        if self._exclusive or self._shared:
            return False
        self._exclusive = True
        return True

    def release_exclusive(self) -> None:
        self._exclusive = False
        if self._changed.event is not None:
            self._changed.wake_all()


class _Held(AbstractAsyncContextManager[None]):
    """A class of its own: a generator costs several times as much, and every write passes here."""

    __slots__ = ("_acquire", "_release")

    def __init__(self, acquire: Callable[[], Awaitable[None]], release: Callable[[], None]) -> None:
        self._acquire, self._release = acquire, release

    async def __aenter__(self) -> None:
        await self._acquire()

    async def __aexit__(self, *_: object) -> None:
        self._release()
