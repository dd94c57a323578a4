"""The lock of a draft: many writers or one publisher."""

from __future__ import annotations

import random

import pytest
import trio
import trio.testing

from lakefs_fuse.sync.shared_lock import SharedLock


async def test_shared_holders_are_together() -> None:
    gate = SharedLock()
    async with gate.shared(), gate.shared(), gate.shared():
        await trio.testing.wait_all_tasks_blocked()


@pytest.mark.parametrize("seed", range(5))
async def test_never_both(autojump_clock: trio.testing.MockClock, seed: int) -> None:
    gate, rng = SharedLock(), random.Random(seed)
    shared = exclusive = 0
    served = [0, 0]

    async def reader(pause: float, hold: float) -> None:
        nonlocal shared
        for _ in range(5):
            await trio.sleep(pause)
            async with gate.shared():
                shared += 1
                assert not exclusive
                await trio.sleep(hold)
                assert not exclusive
                shared -= 1
            served[0] += 1

    async def writer(pause: float, hold: float) -> None:
        nonlocal exclusive
        for _ in range(5):
            await trio.sleep(pause)
            async with gate:
                exclusive += 1
                assert exclusive == 1
                assert not shared
                await trio.sleep(hold)
                assert not shared
                exclusive -= 1
            served[1] += 1

    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(reader, rng.random(), rng.random())
            nursery.start_soon(writer, rng.random(), rng.random())
    assert served == [40, 40]


async def test_a_stream_of_writers_does_not_starve_the_publisher(autojump_clock: trio.testing.MockClock) -> None:
    gate, published = SharedLock(), trio.Event()

    async def stream(offset: float) -> None:
        await trio.sleep(offset)
        while not published.is_set():
            async with gate.shared():
                await trio.sleep(1)

    async with trio.open_nursery() as nursery:
        for offset in (0.0, 0.3, 0.6):
            nursery.start_soon(stream, offset)
        await trio.sleep(5)
        with trio.fail_after(2):
            async with gate:
                published.set()


async def test_a_publisher_that_gives_up_lets_writers_in(autojump_clock: trio.testing.MockClock) -> None:
    gate, written = SharedLock(), trio.Event()

    async def late_writer() -> None:
        await trio.sleep(1)
        async with gate.shared():
            written.set()

    async def impatient() -> None:
        with trio.move_on_after(2):
            async with gate:
                raise AssertionError("nobody let it in")

    async with trio.open_nursery() as nursery, gate.shared():
        nursery.start_soon(impatient)
        nursery.start_soon(late_writer)
        with trio.fail_after(3):
            await written.wait()


async def test_errors_and_cancellation_leave_the_gate_open() -> None:
    gate = SharedLock()
    with pytest.raises(ValueError, match="shared"):
        async with gate.shared():
            raise ValueError("shared")
    with pytest.raises(ValueError, match="exclusive"):
        async with gate:
            raise ValueError("exclusive")
    with trio.CancelScope() as scope:
        async with gate:
            scope.cancel()
            await trio.sleep_forever()
    with trio.fail_after(1):
        async with gate:
            pass
        async with gate.shared():
            pass
