"""A lock with shared and exclusive holders: many writers of one file, or its publisher, never both.

What always holds (*no starvation*): a task that waits for the exclusive lock keeps new shared holders out, so a stream
of writers cannot keep a `close()` waiting. Not reentrant. A free lock is acquired without a checkpoint. Trio tasks
only.
"""

from __future__ import annotations

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
        return _Shared(self)

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        return _Exclusive(self)

    async def acquire_shared(self) -> None:
        while self._exclusive or self._exclusive_waiting:
            await self._changed.wait()
        self._shared += 1

    def release_shared(self) -> None:
        self._shared -= 1
        self._changed.wake_all()

    async def acquire_exclusive(self) -> None:
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
        self._changed.wake_all()


class _Shared(AbstractAsyncContextManager[None]):
    """Classes of their own: a generator costs several times as much, and every write passes here."""

    __slots__ = ("_lock",)

    def __init__(self, lock: SharedLock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        await self._lock.acquire_shared()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release_shared()


class _Exclusive(AbstractAsyncContextManager[None]):
    __slots__ = ("_lock",)

    def __init__(self, lock: SharedLock) -> None:
        self._lock = lock

    async def __aenter__(self) -> None:
        await self._lock.acquire_exclusive()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release_exclusive()
