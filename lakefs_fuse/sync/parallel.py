"""Many items, a few at a time: as many tasks as may work at once, not one for each item."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from lakefs_fuse.sync.nursery import collecting

T = TypeVar("T")


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], at_once: int) -> None:
    """Raises the first LakeError of any; the others are cancelled then."""
    left = iter(items)

    async def worker() -> None:
        for item in left:  # one iterator for all, and no await between its steps
            await work(item)

    async with collecting() as nursery:
        for _ in range(at_once):
            nursery.start_soon(worker)
