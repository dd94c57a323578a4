"""Tasks of one operation: their first error is raised as itself, not as a group. And one that outlives its caller."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import TypeVar

import trio

from lakefs_fuse.errors import LakeError

T = TypeVar("T")
log = logging.getLogger(__name__)


@asynccontextmanager
async def collecting() -> AsyncIterator[trio.Nursery]:
    """As `trio.open_nursery`. Raises the first LakeError where all errors are such; where the caller is cancelled, that
    alone; else what the nursery raises."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        errors, others = group.split(LakeError)
        if others is not None and others.split(trio.Cancelled)[1] is None:
            raise others from None
        if others is not None or errors is None:
            raise
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[object]], at_once: int) -> None:
    """Call ``work`` with each item, in ``at_once`` tasks, the caller's own where that is one. Raises the first
    LakeError; the other tasks are cancelled then."""
    if at_once == 1:
        for item in items:
            await work(item)
        return
    left = iter(items)

    async def worker() -> None:
        for item in left:  # one iterator for all, and no await between its steps
            await work(item)

    async with collecting() as nursery:
        for _ in range(at_once):
            nursery.start_soon(worker)


async def run_detached(nursery: trio.Nursery, work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` as a task of ``nursery``, and wait for it: a caller that is cancelled leaves, and the work goes on.
    Raises what it raises, and LakeError where the nursery is cancelled first."""
    ended, is_waited_for = trio.Event(), True
    errors: list[Exception] = [LakeError("the mount is ending")]

    async def run() -> None:
        try:
            await work()
            errors.clear()
        except Exception as raised:
            errors[0] = raised
            if not is_waited_for and not isinstance(raised, LakeError):
                log.exception("a task without a caller")
        finally:
            ended.set()

    nursery.start_soon(run)
    try:
        await ended.wait()
    finally:
        is_waited_for = False
    if errors:
        raise errors[0]
