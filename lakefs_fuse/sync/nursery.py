"""A nursery for equal tasks of one operation: the first error of ours is raised as itself, not as a group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from lakefs_fuse.errors import LakeError


@asynccontextmanager
async def collecting() -> AsyncIterator[trio.Nursery]:
    """As `trio.open_nursery`. Raises the first LakeError where all errors are such, else what the nursery raises."""
    try:
        async with trio.open_nursery() as nursery:
            yield nursery
    except BaseExceptionGroup as group:
        errors, others = group.split(LakeError)
        if others is not None or errors is None:
            raise
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise first from None
