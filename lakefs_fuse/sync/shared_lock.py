"""A lock with shared and exclusive holders: many writers of one file, or its publisher, never both.

Whoever asks for it exclusively keeps newcomers out, so a stream of writers cannot keep a `close()` waiting. Not
reentrant. A free gate is passed without a checkpoint. Used from trio tasks only.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from lakefs_fuse.sync.wakeup import Bell


class Gate:
    """See the module's head."""

    def __init__(self) -> None:
        self._shared = 0
        self._exclusive = False
        self._exclusive_waiting = 0
        self._changed = Bell()

    def shared(self) -> AbstractAsyncContextManager[None]:
        return _Shared(self)

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        return _Exclusive(self)

    async def enter_shared(self) -> None:
        while self._exclusive or self._exclusive_waiting:
            await self._changed.wait()
        self._shared += 1

    def leave_shared(self) -> None:
        self._shared -= 1
        self._changed.ring()

    async def enter_exclusive(self) -> None:
        self._exclusive_waiting += 1
        try:
            while self._exclusive or self._shared:
                await self._changed.wait()
            self._exclusive = True
        finally:
            self._exclusive_waiting -= 1
            if not self._exclusive:
                self._changed.ring()  # those whom this one kept out

    def try_exclusive(self) -> bool:
        """Enter alone, if that can be had at once; `leave_exclusive` ends it."""
        if self._exclusive or self._shared:
            return False
        self._exclusive = True
        return True

    def leave_exclusive(self) -> None:
        self._exclusive = False
        self._changed.ring()


class _Shared(AbstractAsyncContextManager[None]):
    """Classes of their own: a generator costs several times as much, and every write passes here."""

    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def __aenter__(self) -> None:
        await self._gate.enter_shared()

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave_shared()


class _Exclusive(AbstractAsyncContextManager[None]):
    __slots__ = ("_gate",)

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def __aenter__(self) -> None:
        await self._gate.enter_exclusive()

    async def __aexit__(self, *_: object) -> None:
        self._gate.leave_exclusive()
