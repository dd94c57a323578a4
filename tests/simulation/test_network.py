"""What a dead node's tasks raise, and what of that is left where they are waited for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import trio

from lakefs_fuse.errors import Unavailable
from tests.simulation import runs
from tests.simulation.network import Killed
from tests.simulation.node import without_killed
from tests.simulation.runs import Seed, run_seed
from tests.simulation.simulation import ungrouped


async def raise_beside_a_cancelled_task(scope: trio.CancelScope, *errors: BaseException) -> None:
    """Tasks raise ``errors`` in the moment in which what is above them is cancelled, as when a node dies."""

    async def fail(error: BaseException) -> None:
        with trio.CancelScope(shield=True):
            await trio.lowlevel.checkpoint()
        scope.cancel()
        raise error

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)
        for error in errors:
            nursery.start_soon(fail, error)


@pytest.mark.parametrize("dropping", [without_killed, ungrouped])
@pytest.mark.parametrize("errors", [(Killed(),), (Killed(), Killed())])
async def test_death_beside_a_cancelled_task_is_a_cancellation(
    dropping: Callable[[], AbstractContextManager[None]], errors: tuple[Killed, ...]
) -> None:
    with trio.CancelScope() as scope, dropping():
        await raise_beside_a_cancelled_task(scope, *errors)
    assert scope.cancelled_caught


async def test_death_beside_an_error_of_the_store_is_a_death() -> None:
    with pytest.raises(Killed), trio.CancelScope() as scope, ungrouped():
        with trio.CancelScope(shield=True):
            await raise_beside_a_cancelled_task(scope, Killed(), Unavailable("no answer"))


@pytest.mark.parametrize("dropping", [without_killed, ungrouped])
async def test_error_beside_a_death_is_raised(dropping: Callable[[], AbstractContextManager[None]]) -> None:
    with pytest.raises(BaseExceptionGroup) as raised, trio.CancelScope() as scope, dropping():
        await raise_beside_a_cancelled_task(scope, Killed(), ZeroDivisionError())
    assert raised.group_contains(ZeroDivisionError)
    assert not raised.group_contains(Killed)


def test_run_of_a_seed_answers_with_a_failure_whatever_comes_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def simulate(*_: object, **__: object) -> None:
        raise BaseExceptionGroup("tasks", [Killed()])

    monkeypatch.setattr(runs, "simulate", simulate)
    assert run_seed(Seed("crash", 1, 3)).failure == "raised Killed()"
