"""Virtual time: it jumps to the next timer, and passes as outside while a thread works."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.threads import WorkerThreads
from tests import virtual_time
from tests.virtual_time import run_in_virtual_time

HOUR_S = 3600.0
THREAD_S = 0.05
NS = 1_000_000_000


def test_virtual_time_without_work_jumps_for_tasks_and_all_clocks_of_the_machine() -> None:
    async def passed() -> list[float]:
        clock = SystemClock()
        before = trio.current_time(), clock.mono_s(), clock.wall_ns() / NS, clock.boot_ns() / NS
        await trio.sleep(HOUR_S)
        after = trio.current_time(), clock.mono_s(), clock.wall_ns() / NS, clock.boot_ns() / NS
        return [end - begin for begin, end in zip(before, after, strict=True)]

    started = time.monotonic()
    assert run_in_virtual_time(passed) == pytest.approx([HOUR_S] * 4, abs=10)
    assert time.monotonic() - started < HOUR_S / 2


@pytest.mark.parametrize("is_of_the_program", [True, False])
def test_virtual_time_while_a_thread_works_passes_as_outside(is_of_the_program: bool) -> None:
    async def main() -> None:
        run: Callable[..., Awaitable[object]] = WorkerThreads().run if is_of_the_program else trio.to_thread.run_sync
        with trio.fail_after(HOUR_S):  # a jump would go to this deadline
            await run(time.sleep, THREAD_S)
        released = threading.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, released.wait)
            await trio.testing.wait_all_tasks_blocked()
            started = time.monotonic()
            await trio.sleep(THREAD_S)
            released.set()
            assert time.monotonic() - started >= THREAD_S * 0.9

    outside = WorkerThreads.run, trio.to_thread.run_sync
    run_in_virtual_time(main)
    assert (WorkerThreads.run, trio.to_thread.run_sync) == outside


def test_virtual_time_jumps_over_a_thread_that_sleeps_but_not_over_its_work() -> None:
    async def main() -> None:
        def work() -> None:
            SystemClock().sleep(HOUR_S)
            began_s = virtual_time.mono_s()
            time.sleep(THREAD_S)
            passed_s.append(virtual_time.mono_s() - began_s)

        passed_s: list[float] = []
        began_s = virtual_time.mono_s()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep, HOUR_S + 10)
            await trio.to_thread.run_sync(work)
            assert HOUR_S <= virtual_time.mono_s() - began_s < HOUR_S + 10
            assert passed_s[0] == pytest.approx(THREAD_S, abs=5)
            nursery.cancel_scope.cancel()

    run_in_virtual_time(main)


def test_abandoned_thread_that_sleeps_holds_no_time_up() -> None:
    async def main() -> None:
        with trio.move_on_after(HOUR_S / 2):
            await trio.to_thread.run_sync(virtual_time.sleep, HOUR_S, abandon_on_cancel=True)
        started = time.monotonic()
        await trio.sleep(HOUR_S)
        assert time.monotonic() - started < HOUR_S / 2

    run_in_virtual_time(main)


def test_sleep_in_the_thread_of_tasks_jumps() -> None:
    async def main() -> float:
        began_s = trio.current_time()
        SystemClock().sleep(HOUR_S)
        return trio.current_time() - began_s

    assert run_in_virtual_time(main) == pytest.approx(HOUR_S, abs=10)


def test_run_with_a_clock_of_the_test_has_that_clock() -> None:
    async def now() -> float:
        return trio.current_time()

    clock = MockClock()
    clock.jump(HOUR_S)
    assert run_in_virtual_time(now, clock=clock) == HOUR_S
