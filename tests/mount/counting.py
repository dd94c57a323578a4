"""Counts of the FUSE requests that system calls cost, as the daemon counts them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.mount.lakes import Lake


def upcalls(lake: Lake) -> dict[str, int]:
    """Counts of this moment, by request."""
    counts = lake.stats()["upcalls"]
    assert isinstance(counts, dict)
    return counts


@contextmanager
def costs(lake: Lake, **expected: int) -> Iterator[None]:
    """What the body sends to the daemon is this and nothing else; FORGET comes when the kernel likes."""
    before = upcalls(lake)
    yield
    after = upcalls(lake)
    spent = {name: count - before[name] for name, count in after.items() if count != before[name]}
    spent.pop("forget", None)
    assert spent == expected, f"{spent}, not {expected}"


PASSES = 5
DROPPED = {"read", "readdir", "getattr"}
"""What the kernel asks for when it has dropped pages, of files or of listings: some machines have it drop all that was
not used for a minute."""


def costs_nothing(lake: Lake, body: Callable[[], object]) -> None:
    """The body sends nothing to the daemon."""
    costs_at_last(lake, body)


def costs_at_last(lake: Lake, body: Callable[[], object], **expected: int) -> None:
    """The body sends this to the daemon and nothing else; where the kernel itself had dropped pages, and reads them
    again, it is done once more."""
    spent: list[dict[str, int]] = []
    for _ in range(PASSES):
        before = upcalls(lake)
        body()
        after = upcalls(lake)
        spent.append({name: count - before[name] for name, count in after.items() if count != before[name]})
        spent[-1].pop("forget", None)
        more = spent[-1].keys() - expected.keys()
        if not more or not more <= DROPPED:
            break
    assert spent[-1] == expected, spent
