"""Bytes that come at a rate."""

from __future__ import annotations

import pytest
import trio

from lakefs_fuse.sync.byte_rate import ByteRate


@pytest.mark.parametrize("bytes_s", [100, 0])
async def test_what_has_begun_is_within_the_rate_and_one_piece(
    autojump_clock: trio.testing.MockClock, bytes_s: int
) -> None:
    rate, began = ByteRate(bytes_s), list[float]()

    async def take() -> None:
        assert await rate.wait(50) == pytest.approx(trio.current_time() - began_s)
        began.append(trio.current_time() - began_s)

    await trio.sleep(1000)
    began_s = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(take)
    assert began == pytest.approx([0, 0.5, 1.0, 1.5] if bytes_s else [0] * 4)


async def test_a_cancelled_task_gives_its_turn_back(autojump_clock: trio.testing.MockClock) -> None:
    rate = ByteRate(100)
    await rate.wait(100)
    with trio.move_on_after(0.5) as scope:
        await rate.wait(10_000)
    assert scope.cancelled_caught
    assert await rate.wait(1) == pytest.approx(0.5)


async def test_tasks_behind_cancelled_ones_stay_within_the_rate(autojump_clock: trio.testing.MockClock) -> None:
    rate, began = ByteRate(100), list[float]()

    async def take() -> None:
        await rate.wait(100)
        began.append(trio.current_time())

    await take()
    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as cancelled:
            for _ in range(10):
                cancelled.start_soon(take)
            await trio.testing.wait_all_tasks_blocked()
            for _ in range(5):
                nursery.start_soon(take)
            await trio.testing.wait_all_tasks_blocked()
            cancelled.cancel_scope.cancel()
        for _ in range(10):
            nursery.start_soon(take)
    assert began == pytest.approx([began[0] + number for number in range(16)])
