"""A LIST of one directory in progress: its waiters, the changes made during it, and its progress.

The first listing of a directory can be read while it is under way: readers get names in cookie order, and the names of
each page get cookies beyond all earlier ones. Names that were known before the LIST come first in that order, so
nothing is read until the LIST has shown that they still exist (`DirectoryMerge.is_readable`). Trio thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import trio

from lakefs_fuse.errors import LakeError
from lakefs_fuse.store.parallel_list import ListProgress
from lakefs_fuse.vfs.namespace.listing_merge import DirectoryMerge

FLIGHTS_SHOWN_MAX = 16


@dataclass(slots=True)
class Flight:
    """A LIST that began at ``began_ns`` (wall clock). ``touched`` are the names that this node has changed since.

    Unless it ``is_wanted``, it ends with its first page; then a directory of several pages stays unlisted."""

    began_ns: int = 0
    is_wanted: bool = True
    since_ns: int = 0
    """A flat listing that began before this time does not suffice."""
    done: trio.Event = field(default_factory=trio.Event)
    touched: set[bytes] = field(default_factory=set)
    announced: set[bytes] = field(default_factory=set)
    """Names that other nodes have announced since, or below which they have: this LIST may lack the objects."""
    is_stale: bool = False
    """Set if the directory must be listed again, because this LIST is not reliable for names that this node changed."""
    is_dated_back: bool = False
    """Set if the names come from a LIST that began earlier."""
    is_interrupted: bool = False
    """Set if the task that began it was cancelled: a waiting task begins another LIST."""
    error: LakeError | None = None
    merge: DirectoryMerge | None = None
    progress: ListProgress = field(default_factory=ListProgress)
    _arrived: trio.Event = field(default_factory=trio.Event)

    def date_back(self, began_ns: int) -> None:
        """Record that the names come from a LIST that began earlier."""
        self.began_ns, self.is_dated_back = began_ns, True

    def told(self) -> None:
        """Wake the tasks that wait for more names, or for the end."""
        self._arrived.set()
        self._arrived = trio.Event()

    async def more(self) -> None:
        """Wait for more names, or the end."""
        if not self.done.is_set():
            await self._arrived.wait()

    @property
    def is_readable(self) -> bool:
        """Return whether the names known now are the first ones of the complete listing, so that they can be read."""
        return self.merge is not None and self.merge.is_readable

    def brought(self, cookie: int) -> bool:
        """Return whether this LIST found the name with this cookie, or this node made it since."""
        return self.merge is not None and cookie >= self.merge.first_cookie

    def end(self) -> None:
        self.done.set()
        self.told()


def described(flights: Mapping[int, Flight], path: Callable[[int], str | None], now_ns: int) -> list[dict[str, object]]:
    """Return listings under way for `stats`, the oldest first."""
    oldest = sorted(flights.items(), key=lambda item: item[1].began_ns)[:FLIGHTS_SHOWN_MAX]
    return [
        {
            "path": path(directory),
            "names": 0 if flight.merge is None else flight.merge.names,
            "pages": flight.progress.pages - flight.progress.idle,
            "requests_under_way": flight.progress.under_way,
            "age_s": max(0, now_ns - flight.began_ns) / 1_000_000_000,
        }
        for directory, flight in oldest
    ]
