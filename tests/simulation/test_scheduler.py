"""Virtual time: timers, sleeps, and waits that may be cancelled or not."""

from __future__ import annotations

from functools import partial

import trio

from tests.simulation import scheduler
from tests.simulation.scheduler import Waiter, current_clock


def test_timers_are_called_in_the_order_of_their_times() -> None:
    async def main() -> list[tuple[float, str]]:
        clock, called = current_clock(), list[tuple[float, str]]()

        def note(name: str) -> None:
            called.append((clock.now_s, name))

        for at_s, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (0.0, "at once")):
            clock.call_at(at_s, partial(note, name))
        clock.call_at(1.0, partial(clock.call_at, 1.0, partial(note, "made by a timer")))
        await trio.sleep(3)
        return called

    assert scheduler.run(main, "") == [(0.0, "at once"), (1.0, "a"), (1.0, "b"), (1.0, "made by a timer"), (2.0, "c")]


def test_sleep_beside_deadlines_ends_in_time() -> None:
    async def main() -> list[float]:
        ended = list[float]()
        with trio.move_on_after(5) as scope:
            await trio.sleep(2)
            ended.append(trio.current_time())
            await trio.sleep_until(1)
            await trio.sleep_forever()
        assert scope.cancelled_caught
        with trio.move_on_after(1):
            await trio.sleep(20)
        return [*ended, trio.current_time()]

    assert scheduler.run(main, "") == [2.0, 6.0]


def test_shielded_wait_ends_with_its_timer_and_is_cancelled_after() -> None:
    async def main() -> float:
        with trio.move_on_after(1) as scope:
            await scheduler.sleep(3, is_shielded=True)
            assert trio.current_time() == 3
            await trio.lowlevel.checkpoint()
            raise AssertionError("the cancellation is lost")
        assert scope.cancelled_caught
        return trio.current_time()

    assert scheduler.run(main, "") == 3


def test_wake_of_a_cancelled_wait_does_nothing() -> None:
    async def main() -> None:
        waiter = Waiter()
        current_clock().call_at(2, waiter.wake)
        with trio.move_on_after(1):
            await waiter.wait()
        await trio.sleep(5)

    scheduler.run(main, "")


def test_thread_that_enters_the_loop_is_heard() -> None:
    async def main() -> list[str]:
        heard = list[str]()
        trio.lowlevel.current_trio_token().run_sync_soon(heard.append, "entered")
        await trio.sleep(1)
        return heard

    assert scheduler.run(main, "") == ["entered"]


def test_run_puts_back_what_it_replaces() -> None:
    before = trio.sleep, trio.sleep_until
    scheduler.run(trio.lowlevel.checkpoint, "")
    assert (trio.sleep, trio.sleep_until) == before
