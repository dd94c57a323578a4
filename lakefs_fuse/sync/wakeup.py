"""A repeatable wakeup of all tasks that wait, without cost while none does. Trio thread only."""

from __future__ import annotations

import trio


class Wakeup:
    """A condition without a lock: `wait` returns at the next `wake_all`, never at an earlier one."""

    __slots__ = ("_event",)

    def __init__(self) -> None:
        self._event: trio.Event | None = None

    async def wait(self) -> None:
        if self._event is None:
            self._event = trio.Event()
        await self._event.wait()

    def wake_all(self) -> None:
        if self._event is not None:
            self._event.set()
            self._event = None
