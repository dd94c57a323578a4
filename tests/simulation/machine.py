"""The machine of a simulated node: its clock, its threads, and a fence around all of it when the node dies."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from tests.simulation import scheduler
from tests.simulation.chance import Chance
from tests.simulation.network import Killed

T = TypeVar("T")
NS = 1_000_000_000
START_NS = 1_700_000_000 * NS
THREAD_S = (0.000_05, 0.002)
"""How long work in a thread takes."""
SLOW_THREAD = 0.01
SLOW_THREAD_S = 0.5
CALLS_MAX = 40
"""Trio's own limit for threads."""


class MachineClock:
    """The clocks of one machine: wall time may be set, and runs apart from true time."""

    def __init__(self, offset_s: float = 0.0, drift: float = 0.0) -> None:
        self.offset_s, self._rate = offset_s, 1 + drift
        self._true = scheduler.current_clock()

    def wall_ns(self) -> int:
        return START_NS + int((self._true.now_s * self._rate + self.offset_s) * NS)

    def mono_s(self) -> float:
        return self._true.now_s * self._rate

    def boot_ns(self) -> int:
        return int(self.mono_s() * NS)

    def sleep(self, seconds: float) -> None:
        """Blocks nobody: work in threads is inline."""


class MachineThreads:
    """`Threads` in the one thread there is: work runs after a virtual while, all of it at one moment."""

    def __init__(self, chance: Chance) -> None:
        self._chance = chance
        self._limiter = trio.CapacityLimiter(CALLS_MAX)
        self.is_dead = False

    async def run(
        self,
        call: Callable[..., T],
        *arguments: object,
        limiter: trio.CapacityLimiter | None = None,
        abandon_on_cancel: bool = False,
    ) -> T:
        await trio.lowlevel.checkpoint_if_cancelled()
        limiter, token = limiter or self._limiter, object()
        try:
            limiter.acquire_on_behalf_of_nowait(token)
        except trio.WouldBlock:
            await limiter.acquire_on_behalf_of(token)
        try:
            await scheduler.sleep(self._cost_s(), is_shielded=not abandon_on_cancel)
            if self.is_dead:
                raise Killed
            return call(*arguments)
        finally:
            limiter.release_on_behalf_of(token)

    def _cost_s(self) -> float:
        low, high = THREAD_S
        slow_s = (
            SLOW_THREAD_S * self._chance.number("slow thread by") if self._chance.happens("slow", SLOW_THREAD) else 0
        )
        return low + (high - low) * self._chance.number("thread") + slow_s

    def start(self, call: Callable[[], None], name: str) -> None:
        if not self.is_dead:
            call()
