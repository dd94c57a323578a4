"""A LIST of one directory in progress: its waiters, the changes made during it, and its progress.

The first listing of a directory can be read while it goes on: names come in cookie order, and those that a page brings
get cookies beyond all before. Names that were known before it began are read only once it has shown that they are
still there (`DirectoryMerge.is_readable`), because they come first in that order. Trio thread only.
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
    """``touched`` are names changed here since it began, at ``began_ns`` (wall clock). Unless it
    ``is_wanted``, it ends with its first page; a directory of more pages is then not listed."""

    began_ns: int = 0
    is_wanted: bool = True
    since_ns: int = 0
    """A LIST for several directories that began before says too little."""
    done: trio.Event = field(default_factory=trio.Event)
    touched: set[bytes] = field(default_factory=set)
    announced: set[bytes] = field(default_factory=set)
    """Names that other nodes have stored since, in the directory or somewhere below: this LIST may not know of that."""
    is_stale: bool = False
    """The directory must be listed again, because this LIST is not reliable for names that were changed here."""
    is_dated_back: bool = False
    """A LIST that began earlier brings the names."""
    is_interrupted: bool = False
    """The task that began it ended before the LIST did: a waiting task begins another."""
    error: LakeError | None = None
    merge: DirectoryMerge | None = None
    progress: ListProgress = field(default_factory=ListProgress)
    _arrived: trio.Event = field(default_factory=trio.Event)

    def date_back(self, began_ns: int) -> None:
        """A LIST that began earlier brings the names."""
        self.began_ns, self.is_dated_back = began_ns, True

    def told(self) -> None:
        """More names are there, or it has ended."""
        self._arrived.set()
        self._arrived = trio.Event()

    async def more(self) -> None:
        """Wait for more names, or the end."""
        if not self.done.is_set():
            await self._arrived.wait()

    @property
    def is_readable(self) -> bool:
        """Whatever is known of the directory now is what a complete listing begins with."""
        return self.merge is not None and self.merge.is_readable

    def brought(self, cookie: int) -> bool:
        """A name of this cookie was found by this LIST (or made here since it began)."""
        return self.merge is not None and cookie >= self.merge.first_cookie

    def end(self) -> None:
        self.done.set()
        self.told()


def described(flights: Mapping[int, Flight], path: Callable[[int], str | None], now_ns: int) -> list[dict[str, object]]:
    """Listings under way for `stats`: the longest first."""
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
