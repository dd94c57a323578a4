"""Tasks of one operation: what the operation raises."""

from __future__ import annotations

import pytest
import trio
import trio.testing

from lakefs_fuse.errors import LakeError, NotFound, Unavailable
from lakefs_fuse.sync.nursery import collecting, for_each, run_detached


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


async def test_detached_work_goes_on_when_its_caller_is_cancelled() -> None:
    done, may_end = trio.Event(), trio.Event()

    async def work() -> None:
        await may_end.wait()
        done.set()

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0) as patience:
            await run_detached(nursery, work)
        assert patience.cancelled_caught
        may_end.set()
        await done.wait()


async def test_detached_work_that_fails_raises_its_error_in_the_caller() -> None:
    async with trio.open_nursery() as nursery:
        with pytest.raises(Unavailable, match="away"):
            await run_detached(nursery, lambda: fail(Unavailable("the store is away")))


async def test_detached_work_whose_nursery_ends_raises_in_the_caller() -> None:
    async with trio.open_nursery() as nursery, trio.open_nursery() as mount:

        async def call() -> None:
            with pytest.raises(LakeError, match="ending"):
                await run_detached(mount, trio.sleep_forever)

        nursery.start_soon(call)
        await trio.testing.wait_all_tasks_blocked()
        mount.cancel_scope.cancel()


async def test_detached_work_that_fails_without_a_caller_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    has_left = trio.Event()

    async def work() -> None:
        await has_left.wait()
        raise ValueError("a bug")

    async with trio.open_nursery() as nursery:
        with trio.move_on_after(0):
            await run_detached(nursery, work)
        has_left.set()
    assert "a bug" in caplog.text
