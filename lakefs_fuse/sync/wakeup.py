"""A repeatable wakeup of all tasks that wait, without cost while none does. Trio thread only."""

from __future__ import annotations

import trio


class Wakeup:
    """A condition without a lock: `wait` returns at the next `wake_all`, never at an earlier one."""

    __slots__ = ("event",)

    def __init__(self) -> None:
        self.event: trio.Event | None = None
        """None while no task waits."""

    async def wait(self) -> None:
        if self.event is None:
            self.event = trio.Event()
        await self.event.wait()

    def wake_all(self) -> None:
        if self.event is not None:
            self.event.set()
            self.event = None
