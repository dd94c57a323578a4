"""Wakes everybody who waits, again and again, and costs nothing while nobody does. Trio thread only."""

from __future__ import annotations

import trio


class Bell:
    """Who waits is woken by the next `ring`, and not by one before."""

    __slots__ = ("_rung",)

    def __init__(self) -> None:
        self._rung: trio.Event | None = None

    async def wait(self) -> None:
        if self._rung is None:
            self._rung = trio.Event()
        await self._rung.wait()

    def ring(self) -> None:
        if self._rung is not None:
            self._rung.set()
            self._rung = None
