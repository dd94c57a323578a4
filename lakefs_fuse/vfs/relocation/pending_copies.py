"""Copies of renamed objects to the keys of their names, from before the store is asked until their commit is journaled.

What always holds:

* *journal first*: a copy that the store may have made, and that no commit names, has a row here with its ETag and
  token, through any number of crashes; so it is never taken for a version of another writer, even where its original is
  gone;
* *no copy during a change*: while a name is changed, or stored, no copy to its key is under way (`hold`): a late one
  would replace what was stored, or look newer than the change.

Trio thread only.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

import msgspec
import trio

from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.rows import PathRows
from lakefs_fuse.store.protocol import ObjectMeta

PATIENCE_S = 10.0
"""So long the change of a name waits for a copy to its key; a later one is hidden by a change of its own."""
log = logging.getLogger(__name__)


class PendingCopy(msgspec.Struct, frozen=True, array_like=True):
    """ETag and draft token of the original, which may be empty. A copy in parts has another ETag, and the token."""

    etag: str
    token: str

    def matches(self, meta: ObjectMeta, token: str) -> bool:
        return meta.etag == self.etag or bool(token and token == self.token)


class PendingCopies:
    """By the path that is copied to."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._rows = PathRows(database, schema.COPY, PendingCopy)
        self._pending = dict(self._rows.items())
        self._under_way: dict[str, trio.Event] = {}
        self._held: Counter[str] = Counter()
        """Paths to which no copy may begin, with the number of those who hold them."""

    def paths(self) -> list[str]:
        return list(self._pending)

    @property
    def any_pending(self) -> bool:
        """Where none is, a change of a name need not call `hold`."""
        return bool(self._pending)

    def get(self, path: str) -> PendingCopy | None:
        return self._pending.get(path)

    def begin(self, path: str, copy: PendingCopy) -> None:
        """Raises CacheError."""
        batch = Batch()
        self._rows.put(batch, path, copy)
        self._db.commit(batch)
        self._pending[path] = copy

    def end(self, path: str) -> None:
        """The copy has a commit, or is gone, or was never made. Raises CacheError."""
        if path in self._pending:
            batch = Batch()
            self._rows.delete(batch, path)
            self._db.commit(batch)
            del self._pending[path]

    # -- one at a time

    @asynccontextmanager
    async def copying(self, path: str) -> AsyncIterator[None]:
        """Inside, the caller alone may ask the store for a copy to this path, and changes the path's row."""
        while path in self._under_way:
            await self._under_way[path].wait()
        done = self._under_way[path] = trio.Event()
        try:
            yield
        finally:
            del self._under_way[path]
            done.set()

    def is_held(self, path: str) -> bool:
        """No copy to this path may begin."""
        if not self._held:
            return False
        parts = path.split("/")
        return any("/".join(parts[:count]) in self._held for count in range(1, len(parts) + 1))

    @asynccontextmanager
    async def hold(self, *paths: str, patience_s: float = math.inf) -> AsyncIterator[None]:
        """Inside, no copy to these paths, or to one below, begins; none is under way, unless ``patience_s`` was too
        short for it."""
        self._held.update(paths)
        try:
            with trio.move_on_after(patience_s) as patience:
                while under_way := _at_or_below(self._under_way, paths):
                    await self._under_way[under_way[0]].wait()
            if patience.cancelled_caught:
                log.warning("the store still copies %s, whose name changes", under_way[0])
            yield
        finally:
            self._held.subtract(paths)
            self._held += Counter()  # drops paths that nobody holds

    def ended_at_or_below(self, paths: tuple[str, ...]) -> list[str]:
        """Copies that are no longer under way, and whose outcome is unknown."""
        return [path for path in _at_or_below(self._pending, paths) if path not in self._under_way]


def _at_or_below(which: Iterable[str], paths: tuple[str, ...]) -> list[str]:
    return [each for each in which if any(each == path or each.startswith(path + "/") for path in paths)]
