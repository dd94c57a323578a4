"""Requests are read whatever those before them wait for."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import Any, TypeVar

from lakefs_fuse.kernel.immutable_operations import ImmutableOperations
from lakefs_fuse.kernel.native import hooks

from lakefs_fuse.kernel.operations import Operations, handled  # isort: skip  (before pyfuse3)
import pyfuse3
import pytest
import trio

from lakefs_fuse.kernel import request_loop as receiving
from lakefs_fuse.kernel.request_loop import RequestTurns
from lakefs_fuse.kernel.waiting_requests import Kind, WaitingRequests

T = TypeVar("T")
TASKS = 6


class Steps(trio.abc.Instrument):
    """Counts how often tasks have run, by name."""

    def __init__(self) -> None:
        self.steps = Counter[str]()

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.steps[task.name] += 1


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A session that always has one more request, in a burst that does not end."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"a request")
    made = SimpleNamespace(
        lakefs_is_drained=lambda: False,
        lakefs_session_exited=lambda: False,
        lakefs_session_fd=lambda: read_end,
    )
    monkeypatch.setattr(hooks, "library", lambda: made)
    monkeypatch.setattr(receiving, "BURST_S", 60.0)
    yield made
    os.close(read_end)
    os.close(write_end)


async def wait_for_ever() -> None:
    await trio.sleep_forever()


async def run(work: Coroutine[Any, Any, T], waiting: Sequence[Callable[[], None]]) -> T:
    """Run a handler as `upcall` does."""
    return await handled(work, waiting, WaitingRequests(lambda *_: None, lambda *_: 0), Kind("a request"), ())


async def test_every_request_may_take_for_ever(session: SimpleNamespace) -> None:
    turns, taken = RequestTurns(), 0

    async def take_one_and_be_busy() -> None:
        nonlocal taken
        assert await turns.wait()
        taken += 1
        await run(wait_for_ever(), [turns.wake_successor])

    async with trio.open_nursery() as nursery:
        for _ in range(TASKS):
            nursery.start_soon(take_one_and_be_busy)
        with trio.move_on_after(5):
            while taken < TASKS:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert taken == TASKS


async def test_wait_before_requests_that_never_wait_wakes_no_other_task(session: SimpleNamespace) -> None:
    session.lakefs_is_drained = lambda: True  # each time the descriptor is waited for
    turns = RequestTurns()
    counted, read = Steps(), Counter[str]()

    async def handle() -> str:
        return trio.lowlevel.current_task().name

    async def read_requests() -> None:
        while sum(read.values()) < TASKS:
            assert await turns.wait()
            read[await run(handle(), [turns.wake_successor])] += 1

    trio.lowlevel.add_instrument(counted)
    async with trio.open_nursery() as nursery:
        for name in ("a", "b"):
            nursery.start_soon(read_requests, name=name)
        with trio.move_on_after(5):
            while sum(read.values()) < TASKS:
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    trio.lowlevel.remove_instrument(counted)
    ((reader, count),) = read.items()
    assert count == TASKS
    assert counted.steps["b" if reader == "a" else "a"] <= 2, "it begins, and ends"


async def test_ending_together_the_end_of_one_task_ends_those_that_are_parked(session: SimpleNamespace) -> None:
    session.lakefs_is_drained = lambda: True
    turns, ended = RequestTurns(), 0

    async def read_until_the_end() -> None:
        nonlocal ended
        if await turns.wait():  # and nothing can be read: pyfuse3 does not wait again
            await trio.sleep(0.01)
            session.lakefs_session_exited = lambda: True
        ended += 1

    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(turns.ending_together(read_until_the_end))
    assert ended == TASKS


async def test_handled_passes_values_errors_and_cancellation_on() -> None:
    async def fail() -> None:
        await trio.lowlevel.checkpoint()
        raise KeyError("late")

    async def answer() -> int:
        with trio.move_on_after(0) as scope:
            await run(wait_for_ever(), [])
        assert scope.cancelled_caught
        return 7

    assert await run(answer(), []) == 7
    with pytest.raises(KeyError, match="late"):
        await run(fail(), [])


@pytest.mark.parametrize("operations", [Operations, ImmutableOperations])
def test_handled_every_handler_that_waits_runs_in_it(operations: type[pyfuse3.Operations]) -> None:
    """Another one that waits would keep the mount from reading requests."""
    bare = {"forget", "getxattr"}
    """The one never waits, and the other awaits one of two that are handled."""
    handlers = {name for name, each in vars(operations).items() if iscoroutinefunction(each) and name[0] != "_"}
    assert {name for name in handlers if not hasattr(vars(operations)[name], "__wrapped__")} <= bare


@pytest.mark.usefixtures("session")
async def test_new_task_reads_no_request_while_another_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyfuse3 starts a task with each request, and each keeps the buffer of its largest request."""
    requests, readers = 0, set[trio.lowlevel.Task]()
    monkeypatch.setattr(hooks.library(), "lakefs_is_drained", lambda: requests % 10 == 0)
    turns = RequestTurns()

    async def take_requests() -> None:
        nonlocal requests
        while requests < 50 * TASKS:
            assert await turns.wait()
            requests += 1
            readers.add(trio.lowlevel.current_task())
            nursery.start_soon(take_requests)
            turns.wake_successor()
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take_requests)
    assert len(readers) <= 2 * TASKS
