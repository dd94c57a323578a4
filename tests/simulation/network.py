"""The way between a node and the store: latency, lost requests, lost answers, refusals, cut links.

What always holds: a request that was sent takes effect once or never, whether its caller waits for it or not; a caller
that was told "unavailable" knows nothing. A dead node sends nothing: what was under way when it died has arrived at
that moment, or never does, by chance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar, cast

from lakefs_fuse.errors import NotCarriedOut, Unavailable
from lakefs_fuse.metrics import REQUEST_KINDS
from tests.simulation import scheduler
from tests.simulation.chance import Chance
from tests.simulation.object_store import NextRequest
from tests.simulation.scheduler import Waiter

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


class _Request(Waiter):
    """One attempt, from the node to the store and back; its caller waits."""

    def __init__(self, kind: str, call: Callable[[], object], give_up_s: float) -> None:
        super().__init__()
        self.kind, self.call, self.give_up_s = kind, call, give_up_s
        self.answer: object = None
        self.error: BaseException | None = None
        self.is_carried = self.is_done = False
        self.is_lost = False
        self.back_s = 0.0
        """How long the answer takes."""

    def carry(self) -> None:
        """The store receives it."""
        self.is_carried = True
        try:
            self.answer = self.call()
        except Exception as error:
            self.error = error


class Link:
    """A `Transport` between one incarnation of a node and the store. A request is a chain of timers: it outlives the
    node."""

    def __init__(self, chance: Chance, fired: Counter[str], before_effect: Callable[[], None]) -> None:
        """``fired`` counts faults; ``before_effect`` is called before a request takes effect."""
        self._before_effect = before_effect
        self.weather = CALM
        self.cut_until_s = 0.0
        self.unanswered: Callable[[], None] = lambda: None
        """Called when a request has no answer."""
        self._chance, self._fired = chance, fired
        self._clock = scheduler.current_clock()
        self._under_way: list[_Request] = []
        self._is_dead = False

    def kill(self) -> None:
        """The node is dead from now on."""
        self._is_dead = True
        for request in self._under_way:
            if not request.is_carried and self._chance.happens("arrives after death", 0.5):
                self._before_effect()
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
            request = _Request(kind, call, math.inf if kind in SENDING else self._clock.now_s + TIMEOUT_S)
            self._send(request)
            await request.wait(is_shielded=not abandon)
            if self._is_dead:
                raise Killed
            if not request.is_done:
                self._fired[f"no answer to {kind} in time"] += 1
                self.unanswered()
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

    def _after(self, seconds: float, request: _Request, step: Callable[[_Request], None]) -> None:
        """Go on with a request later; its caller gives up first, perhaps."""
        at_s = self._clock.now_s + seconds
        if self._clock.now_s < request.give_up_s < at_s:
            self._clock.call_at(request.give_up_s, request.wake)
        self._clock.call_at(at_s, partial(step, request))

    def _send(self, request: _Request) -> None:
        kind, chance = request.kind, self._chance
        weather = self.weather.of(kind)
        low, high = weather.latency_s
        there_s, back_s = (low + (high - low) * chance.number(f"{kind} {way}") ** 3 for way in ("there", "back"))
        there_s, request.back_s = there_s + weather.slow_s, back_s + weather.slow_answer_s
        request.is_lost = chance.happens(f"lost {kind}", weather.lost_request)
        if chance.happens(f"late {kind}", weather.late):
            self._fired["late request"] += 1
            there_s += LATE_S[0] + (LATE_S[1] - LATE_S[0]) * chance.number("late by")
        self._under_way.append(request)
        self._after(there_s, request, partial(self._arrive, weather))

    def _arrive(self, weather: Weather, request: _Request) -> None:
        """A request is at the store, unless it is lost on the way."""
        kind, chance = request.kind, self._chance
        if self._is_dead:
            self._end(request)
            return
        if request.is_lost or self._clock.now_s < self.cut_until_s:
            self._fired["lost request" if request.is_lost else "request over a cut link"] += 1
            self._after(TIMEOUT_S * chance.number("timeout"), request, partial(self._fail, "request"))
            return
        if chance.happens(f"slow down {kind}", weather.slow_down):
            self._fired["503"] += 1
            request.error = NotCarriedOut("503 SlowDown", throttled=True)
        elif not request.is_carried:
            self._before_effect()
            request.carry()
        is_cut = self._clock.now_s + request.back_s < self.cut_until_s
        if chance.happens(f"lost answer of {kind}", weather.lost_answer) or is_cut:
            self._fired[f"lost answer of {kind}"] += 1
            self._after(TIMEOUT_S * chance.number("timeout"), request, partial(self._fail, "answer"))
            return
        self._after(request.back_s, request, self._end)

    def _fail(self, lost: str, request: _Request) -> None:
        request.error = Unavailable(f"no answer (the {lost} was lost)")
        self.unanswered()
        self._end(request)

    def _end(self, request: _Request) -> None:
        self._under_way.remove(request)
        request.is_done = True
        request.wake()
