"""The way between a node and the store: latency, lost requests, lost answers, refusals, cut links.

What always holds: a request that was sent takes effect once or never, whether its caller waits for it or not; a caller
that was told "unavailable" knows nothing. A dead node sends nothing: what was under way when it died has arrived at
that moment, or never does, by chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, cast

import trio

from lakefs_fuse.errors import NotCarriedOut, Unavailable
from lakefs_fuse.metrics import REQUEST_KINDS
from tests.simulation.chance import Chance
from tests.simulation.object_store import NextRequest

T = TypeVar("T")
LATE_S = (20.0, 200.0)
"""How long a request or its answer that is very late takes."""
TIMEOUT_S = 30.0
"""A client gives up on a request without an answer after so long; the request may arrive later."""
SENDING = ("put", "part", "other")
"""Kinds that may be slow and make progress: their client does not give up."""


@dataclass
class Weather:
    """What the network does to requests of ``kinds`` (of all kinds if none is named); probabilities are for each of
    them. Others only have a latency."""

    latency_s: tuple[float, float] = (0.001, 0.03)
    lost_request: float = 0.0
    lost_answer: float = 0.0
    slow_down: float = 0.0
    late: float = 0.0
    slow_s: float = 0.0
    slow_answer_s: float = 0.0
    kinds: tuple[str, ...] = ()

    def of(self, kind: str) -> Weather:
        """What it is for requests of one kind."""
        return self if not self.kinds or kind in self.kinds else Weather(self.latency_s)


CALM = Weather()


class Killed(BaseException):
    """A dead node tried to reach the store, its disk or a thread."""


@dataclass(eq=False)
class _Request:
    """One attempt, from the node to the store and back."""

    call: Callable[[], object]
    done: trio.Event = field(default_factory=trio.Event)
    answer: object = None
    error: BaseException | None = None
    is_carried: bool = False

    def carry(self) -> None:
        """The store receives it."""
        self.is_carried = True
        try:
            self.answer = self.call()
        except Exception as error:
            self.error = error


class Link:
    """A `Transport` between one incarnation of a node and the store."""

    def __init__(
        self, nursery: trio.Nursery, chance: Chance, fired: Counter[str], announce: Callable[[], None]
    ) -> None:
        """Requests live in ``nursery``, which outlives the node. ``fired`` counts faults; ``announce`` is called before
        a request takes effect."""
        self._announce = announce
        self.weather = CALM
        self.cut_until_s = 0.0
        self._nursery, self._chance, self._fired = nursery, chance, fired
        self._under_way: list[_Request] = []
        self._is_dead = False

    def kill(self) -> None:
        """The node is dead from now on."""
        self._is_dead = True
        for request in self._under_way:
            if not request.is_carried and self._chance.happens("arrives after death", 0.5):
                self._announce()
                self._fired["request of a dead node arrives"] += 1
                request.carry()
                while isinstance(request.error, NextRequest):
                    request.call = request.error.call
                    request.carry()
            request.is_carried = True

    async def run(self, kind: str, call: Callable[[], T], *, abandon: bool) -> T:
        assert kind in REQUEST_KINDS
        while True:
            if self._is_dead:
                raise Killed
            request = _Request(call)
            self._under_way.append(request)
            self._nursery.start_soon(self._carry, kind, request)
            patience_s = math.inf if kind in SENDING else TIMEOUT_S
            with trio.CancelScope(shield=not abandon, deadline=trio.current_time() + patience_s):
                await request.done.wait()
            if self._is_dead:
                raise Killed
            if not request.done.is_set():
                self._fired[f"no answer to {kind} in time"] += 1
                raise Unavailable("no answer in time")
            if isinstance(request.error, NextRequest):
                call = cast("Callable[[], T]", request.error.call)
                continue
            if request.error is not None:
                try:
                    raise request.error
                finally:
                    request.error = None
            return cast("T", request.answer)

    async def _carry(self, kind: str, request: _Request) -> None:
        weather, chance = self.weather.of(kind), self._chance
        low, high = weather.latency_s
        there_s, back_s = (low + (high - low) * chance.number(f"{kind} {way}") ** 3 for way in ("there", "back"))
        there_s, back_s = there_s + weather.slow_s, back_s + weather.slow_answer_s
        is_lost = chance.happens(f"lost {kind}", weather.lost_request)
        if chance.happens(f"late {kind}", weather.late):
            self._fired["late request"] += 1
            there_s += LATE_S[0] + (LATE_S[1] - LATE_S[0]) * chance.number("late by")
        try:
            await trio.sleep(there_s)
            if self._is_dead:
                return
            if is_lost or trio.current_time() < self.cut_until_s:
                self._fired["lost request" if is_lost else "request over a cut link"] += 1
                await trio.sleep(TIMEOUT_S * chance.number("timeout"))
                request.error = Unavailable("no answer (the request was lost)")
                return
            if chance.happens(f"slow down {kind}", weather.slow_down):
                self._fired["503"] += 1
                request.error = NotCarriedOut("503 SlowDown", throttled=True)
            elif not request.is_carried:
                self._announce()
                request.carry()
            if chance.happens(f"lost answer of {kind}", weather.lost_answer) or self._is_cut_after(back_s):
                self._fired[f"lost answer of {kind}"] += 1
                await trio.sleep(TIMEOUT_S * chance.number("timeout"))
                request.error = Unavailable("no answer (the answer was lost)")
                return
            await trio.sleep(back_s)
        finally:
            self._under_way.remove(request)
            request.done.set()

    def _is_cut_after(self, seconds: float) -> bool:
        return trio.current_time() + seconds < self.cut_until_s
