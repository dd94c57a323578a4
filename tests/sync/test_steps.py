"""Paced steps leave the loop to others in between: a request waits for one of them, however many turns it takes."""

from __future__ import annotations

from collections.abc import Generator

import trio
import trio.testing

from lakefs_fuse.sync.steps import PAUSE_S, WORK_S, finish, finish_paced

TURNS_OF_A_REQUEST = 10


async def test_finish_paced_lets_a_request_end_before_the_next_long_step(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """It comes during a step, as what a kernel asks for while the loop is busy."""
    taken, waited, asked = 0, list[int](), trio.Event()

    def steps() -> Generator[None, None, str]:
        nonlocal taken, asked
        for _ in range(8):
            taken += 1
            autojump_clock.jump(2 * WORK_S)
            asked.set()
            asked = trio.Event()
            yield
        return "all"

    async def ask() -> None:
        while True:
            await asked.wait()
            before = taken
            for _ in range(TURNS_OF_A_REQUEST):
                await trio.lowlevel.checkpoint()
                autojump_clock.jump(PAUSE_S)  # as long as a turn takes beside busy threads
            waited.append(taken - before)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.testing.wait_all_tasks_blocked()
        assert await finish_paced(steps()) == "all"
        nursery.cancel_scope.cancel()
    assert waited == [0] * 8


def test_finish_takes_all_steps_at_once() -> None:
    taken = list[int]()

    def steps() -> Generator[None, None, list[int]]:
        for number in range(3):
            taken.append(number)
            yield
        return taken

    assert finish(steps()) == [0, 1, 2]
