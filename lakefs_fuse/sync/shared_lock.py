"""A lock with shared and exclusive holders: many writers of one file, or its publisher, never both.

What always holds (*no starvation*): a task that waits for the exclusive lock keeps new shared holders out, so a stream
of writers cannot keep a `close()` waiting. Not reentrant. A free lock is acquired without a checkpoint. Trio tasks
only. Its context managers are classes: a generator costs several times as much, and every write passes here.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from lakefs_fuse.sync.wakeup import Wakeup


class SharedLock(AbstractAsyncContextManager[None]):
    """A readers-writer lock that prefers exclusive holders. ``async with lock`` holds it alone, and
    ``async with lock.shared()`` with others."""

    def __init__(self) -> None:
        self._shared = 0
        self._exclusive = False
        self._exclusive_waiting = 0
        self._changed = Wakeup()

    def shared(self) -> AbstractAsyncContextManager[None]:
        """Hold the lock with others for the block."""
        return _Shared(self)

    async def acquire_shared(self) -> None:
        """As `shared`; `release_shared` ends it."""
        while self._exclusive or self._exclusive_waiting:
            await self._changed.wait()
        self._shared += 1

    def release_shared(self) -> None:
        self._shared -= 1
        if self._changed.event is not None:  # every write and close passes here, and few wait
            self._changed.wake_all()

    async def __aenter__(self) -> None:
        self._exclusive_waiting += 1
        try:
            while self._exclusive or self._shared:
                await self._changed.wait()
            self._exclusive = True
        finally:
            self._exclusive_waiting -= 1
            if not self._exclusive:
                self._changed.wake_all()  # shared holders that this task kept out

    async def __aexit__(self, *_: object) -> None:
        self.release_exclusive()

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


class _Shared(AbstractAsyncContextManager[None]):
    """One holder of a lock that it shares."""

    __slots__ = ("_lock",)

    def __init__(self, lock: SharedLock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        await self._lock.acquire_shared()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release_shared()
