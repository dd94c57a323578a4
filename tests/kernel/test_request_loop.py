"""Requests are read whatever those before them wait for."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import trio

from lakefs_fuse.kernel import request_loop as receiving
from lakefs_fuse.kernel.native import hooks
from lakefs_fuse.kernel.request_loop import RequestTurns

TASKS = 6


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[RequestTurns]:
    """Of a session that always has one more request, in a burst that does not end."""
    read_end, write_end = os.pipe()
    os.write(write_end, b"a request")
    session = SimpleNamespace(
        lakefs_is_drained=lambda: False,
        lakefs_session_exited=lambda: False,
        lakefs_session_fd=lambda: read_end,
    )
    monkeypatch.setattr(hooks, "library", lambda: session)
    monkeypatch.setattr(receiving, "BURST_S", 60.0)
    yield RequestTurns()
    os.close(read_end)
    os.close(write_end)


async def test_every_request_may_take_for_ever(turns: RequestTurns) -> None:
    taken = 0

    async def take_one_and_be_busy() -> None:
        nonlocal taken
        assert await turns.wait()
        taken += 1
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(TASKS):
            nursery.start_soon(take_one_and_be_busy)
        with trio.move_on_after(5):
            while taken < TASKS:
                await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    assert taken == TASKS
