"""Tasks of one operation: what the operation raises."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from lakefs_fuse.errors import NotFound, Unavailable
from lakefs_fuse.sync.nursery import collecting, for_each


async def fail(error: Exception) -> None:
    raise error


async def test_collecting_tasks_that_fail_raises_the_first_error_as_itself() -> None:
    with pytest.raises(Unavailable, match="away"):
        async with collecting() as nursery:
            nursery.start_soon(fail, Unavailable("the store is away"))


async def test_collecting_other_errors_raises_the_group() -> None:
    with pytest.raises(ExceptionGroup) as raised:
        async with collecting() as nursery:
            nursery.start_soon(fail, NotFound("gone"))
            nursery.start_soon(fail, ValueError("a bug"))
    assert raised.group_contains(ValueError)


async def test_collecting_cancelled_with_an_error_is_only_cancelled() -> None:
    """An error of a task that ends while its caller is cancelled is not mixed with the cancellation."""

    async def fail_when_cancelled() -> None:
        try:
            await trio.sleep_forever()
        finally:
            raise Unavailable("the store is away")

    with trio.CancelScope() as scope:
        async with collecting() as nursery:
            nursery.start_soon(trio.sleep_forever)
            nursery.start_soon(fail_when_cancelled)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
    assert scope.cancelled_caught


async def test_for_each_of_one_task_works_in_the_callers() -> None:
    tasks = []

    async def work(_: int) -> None:
        tasks.append(trio.lowlevel.current_task())
        await trio.lowlevel.checkpoint()

    await for_each(range(3), work, 1)
    assert tasks == [trio.lowlevel.current_task()] * 3
    with pytest.raises(NotFound):
        await for_each([NotFound("gone")], fail, 1)
