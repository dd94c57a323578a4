"""Work in steps, with other tasks in between: what would keep the loop for long.

What always holds (*bounded turn*): a caller that paces its work gives up the loop after each step, and after WORK_S of
them it sleeps, and gives it up for as many turns as a request takes. So a request waits for WORK_S and a step, not for
that in each of its turns. What a step does is its generator's; nothing here survives a crash. Trio thread only.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

import trio

WORK_S, PAUSE_S = 0.004, 0.001
"""After so much work comes a pause, in which worker threads get the interpreter's lock from the busy loop."""
TURNS = 12
"""Turns of the loop after a pause, in which other tasks run. One in which none does takes 10 to 30 µs."""
T = TypeVar("T")


class Pace:
    """Gives up the loop between two steps."""

    __slots__ = ("_began_s",)

    def __init__(self) -> None:
        self._began_s = trio.current_time()

    async def rest(self) -> None:
        """To be awaited after each step."""
        if trio.current_time() - self._began_s < WORK_S:
            await trio.lowlevel.checkpoint()
            return
        await trio.sleep(PAUSE_S)
        for _ in range(TURNS):
            await trio.lowlevel.checkpoint()
        self._began_s = trio.current_time()


def finish(steps: Generator[None, None, T]) -> T:
    """Take all steps at once, where no other task has to run."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


async def finish_paced(steps: Generator[None, None, T]) -> T:
    """Take all steps, with other tasks between two of them; returns what the generator returns."""
    pace = Pace()
    try:
        while True:
            try:
                next(steps)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]
            await pace.rest()
    finally:
        steps.close()
