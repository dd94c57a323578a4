"""Runs a trio program in virtual time, so that a seed decides everything that happens.

What always holds (*same seed, same history*): tasks that can run are run in an order drawn from the seed, time passes
only while every task waits, and the garbage collector runs at no other time than between two runs. Hashes of strings
have to be the same in each process (``PYTHONHASHSEED=0``; `require_fixed_hashes`).

Time jumps to the next deadline or timer. A timer is a call without a task, made between two rounds of tasks: it wakes
tasks, and is much cheaper than a task that sleeps. `trio.sleep` is one, too, in place of a cancel scope.
"""

from __future__ import annotations

import gc
import math
import os
import random
import sys
from collections.abc import Awaitable, Callable, MutableSequence
from heapq import heappop, heappush
from typing import Any, TypeVar

import trio
from trio._core import _run as trio_run

T = TypeVar("T")


class _Order(random.Random):
    """Draws the order of tasks; most often there is one."""

    def shuffle(self, x: MutableSequence[Any]) -> None:
        if len(x) > 1:
            super().shuffle(x)


def require_fixed_hashes(module: str) -> None:
    """Run the program again as ``python -m module`` with fixed hashes, unless it has them."""
    if sys.flags.hash_randomization:
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], os.environ | {"PYTHONHASHSEED": "0"})


class VirtualClock(trio.abc.Clock):
    """The time of a run, and its timers; also what trio's loop waits with."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._serial = 0

    def call_at(self, at_s: float, call: Callable[[], object]) -> None:
        """Make a call at a time, outside of every task; at once after this round if that is past."""
        self._serial += 1
        heappush(self._timers, (at_s, self._serial, call))

    # -- what trio asks of a clock

    def start_clock(self) -> None:
        runner = trio_run.GLOBAL_RUN_CONTEXT.runner
        self._entries, self._deadlines, self._io = runner.entry_queue, runner.deadlines, runner.io_manager
        runner.io_manager = self  # type: ignore[assignment]
        runner.instruments = {}  # type: ignore[assignment]  # there are none, and trio asks several times for each task

    def current_time(self) -> float:
        return self.now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.now_s

    # -- what trio asks of its selector

    def get_events(self, timeout: float) -> list[tuple[int, int]]:
        """Let time pass if no task can run; nothing is read or written but what wakes trio itself."""
        if self._entries.queue or self._entries.idempotent_queue:
            return self._io.get_events(0)
        timers = self._timers
        if timeout > 0:
            until_s = self._deadlines.next_deadline()
            if timers and timers[0][0] < until_s:
                until_s = timers[0][0]
            if until_s == math.inf:
                raise RuntimeError("every task waits, and for nothing that may come")
            while self.now_s < until_s:
                self.now_s += until_s - self.now_s
        while timers and timers[0][0] <= self.now_s:
            heappop(timers)[2]()
        return []

    def process_events(self, events: list[tuple[int, int]]) -> None:
        if events:
            self._io.process_events(events)

    def force_wakeup(self) -> None:
        self._io.force_wakeup()

    def wait_readable(self, fd: int) -> Awaitable[None]:
        return self._io.wait_readable(fd)

    def close(self) -> None:
        self._io.close()


class Waiter:
    """One task that waits for a call."""

    def __init__(self) -> None:
        self._task: trio.lowlevel.Task | None = None

    def wake(self) -> None:
        """Let the task go on; nothing if none waits."""
        task, self._task = self._task, None
        if task is not None:
            trio.lowlevel.reschedule(task)

    async def wait(self, *, is_shielded: bool = False) -> None:
        """Until the next `wake`."""
        self._task = trio.lowlevel.current_task()
        await trio.lowlevel.wait_task_rescheduled(self._refuse if is_shielded else self._abort)

    def _abort(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED

    def _refuse(self, _: object) -> trio.lowlevel.Abort:
        return trio.lowlevel.Abort.FAILED


def current_clock() -> VirtualClock:
    """The clock of this run. Raises AttributeError outside of one."""
    clock = trio_run.GLOBAL_RUN_CONTEXT.runner.clock
    assert isinstance(clock, VirtualClock)
    return clock


async def sleep_until(deadline: float, *, is_shielded: bool = False) -> None:
    """As `trio.sleep_until`."""
    clock = current_clock()
    if deadline <= clock.now_s:
        await trio.lowlevel.checkpoint()
        return
    waiter = Waiter()
    clock.call_at(deadline, waiter.wake)
    await waiter.wait(is_shielded=is_shielded)


async def sleep(seconds: float, *, is_shielded: bool = False) -> None:
    """As `trio.sleep`."""
    await sleep_until(current_clock().now_s + seconds, is_shielded=is_shielded)


def run(main: Callable[[], Awaitable[T]], seed: str) -> T:
    """What ``main`` answers or raises; its time begins at 0."""
    loop, public = vars(trio_run), vars(trio)
    replaced = [
        (loop, "_r", _Order(f"scheduler/{seed}")), (loop, "_ALLOW_DETERMINISTIC_SCHEDULING", True),
        (public, "sleep", sleep), (public, "sleep_until", sleep_until),
    ]  # fmt: skip
    before = [(names, name, names[name]) for names, name, _ in replaced]
    for names, name, value in replaced:
        names[name] = value
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    gc.freeze()  # what is there before the run is not looked through after it
    try:
        return trio.run(main, clock=VirtualClock())
    finally:
        for names, name, value in before:
            names[name] = value
        gc.collect()
        if not was_frozen:  # else by who runs the tests, for all of them
            gc.unfreeze()
        if was_enabled:
            gc.enable()
