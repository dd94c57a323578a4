"""Upload slots: how many at once, in which order, and the proof that none stood idle."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.upload.uploader import UploadSlots


async def test_at_most_so_many_in_the_order_of_announcement(autojump_clock: trio.testing.MockClock) -> None:
    slots, metrics = 2, UploadMetrics()
    uploads = UploadSlots(slots, metrics)
    running, order = 0, []

    async def upload(number: int) -> None:
        nonlocal running
        async with uploads.slot(is_ready=True):
            running += 1
            assert running <= slots
            order.append(number)
            await trio.sleep(1 + number / 100)
            running -= 1

    async with trio.open_nursery() as nursery:
        for number in range(6):
            uploads.ready()
            nursery.start_soon(upload, number)
            await trio.testing.wait_all_tasks_blocked()
    assert order == list(range(6))
    assert metrics.idle_with_work_s == 0


async def test_idle_time_is_told(autojump_clock: trio.testing.MockClock) -> None:
    metrics = UploadMetrics()
    uploads = UploadSlots(1, metrics)
    uploads.ready()
    await trio.sleep(3)
    async with uploads.slot(is_ready=True):
        await trio.sleep(5)
    assert metrics.idle_with_work_s == pytest.approx(3)


async def test_what_is_cancelled_is_withdrawn(autojump_clock: trio.testing.MockClock) -> None:
    metrics = UploadMetrics()
    uploads = UploadSlots(1, metrics)
    uploads.ready()
    async with uploads.slot(is_ready=True):
        uploads.ready()
        with trio.move_on_after(1):
            async with uploads.slot(is_ready=True):
                raise AssertionError("there was no slot")
    await trio.sleep(1)
    async with uploads.slot():
        pass
    assert metrics.idle_with_work_s == 0
