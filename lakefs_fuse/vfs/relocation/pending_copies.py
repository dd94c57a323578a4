"""Copies of renamed objects to the keys of their names, from before the store is asked for them until it is known here.

What always holds: an object that this node's store may have copied to a key, and that no commit tells of, is noted here
with what it looks like, through any number of deaths. So nobody takes it for a version that somebody else stored, even
where the object that it is a copy of is gone. And while a name is changed here, or stored, no copy to its key is under
way (`kept_off`): one that came later would lie over what was stored, or be taken for newer than the change. Trio thread
only.
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


class BegunCopy(msgspec.Struct, frozen=True, array_like=True):
    """ETag of the object that is copied, and its draft's token: a copy in parts has another ETag, and the token. Both
    may be empty."""

    etag: str
    token: str

    def is_it(self, meta: ObjectMeta, token: str) -> bool:
        return meta.etag == self.etag or bool(token and token == self.token)


class BegunCopies:
    """By the path that is copied to."""

    def __init__(self, database: Database) -> None:
        self._db = database
        self._rows = PathRows(database, schema.COPY, BegunCopy)
        self._held = dict(self._rows.items())
        self._under_way: dict[str, trio.Event] = {}
        self._kept_off: Counter[str] = Counter()

    def paths(self) -> list[str]:
        return list(self._held)

    @property
    def are_begun(self) -> bool:
        """Or nothing is to be waited for by who changes a name without waiting for anything else."""
        return bool(self._held)

    def get(self, path: str) -> BegunCopy | None:
        return self._held.get(path)

    def begin(self, path: str, copy: BegunCopy) -> None:
        """Raises CacheError."""
        batch = Batch()
        self._rows.put(batch, path, copy)
        self._db.commit(batch)
        self._held[path] = copy

    def end(self, path: str) -> None:
        """The copy is told of, or gone, or never came. Raises CacheError."""
        if path in self._held:
            batch = Batch()
            self._rows.delete(batch, path)
            self._db.commit(batch)
            del self._held[path]

    # -- one at a time

    @asynccontextmanager
    async def copying(self, path: str) -> AsyncIterator[None]:
        """Inside the store may be asked for a copy to this path, and the path's row tells what is to be copied; nobody
        else does, until it is known here what became of it."""
        while path in self._under_way:
            await self._under_way[path].wait()
        done = self._under_way[path] = trio.Event()
        try:
            yield
        finally:
            del self._under_way[path]
            done.set()

    def is_kept_off(self, path: str) -> bool:
        """No copy to this path shall begin."""
        if not self._kept_off:
            return False
        parts = path.split("/")
        return any("/".join(parts[:count]) in self._kept_off for count in range(1, len(parts) + 1))

    @asynccontextmanager
    async def kept_off(self, *paths: str, patience_s: float = math.inf) -> AsyncIterator[None]:
        """Inside no copy to these paths, or to one below, begins; none is under way, unless ``patience_s`` was too
        short for it."""
        self._kept_off.update(paths)
        try:
            with trio.move_on_after(patience_s) as patience:
                while under_way := _at_or_below(self._under_way, paths):
                    await self._under_way[under_way[0]].wait()
            if patience.cancelled_caught:
                log.warning("the store still copies %s, whose name changes", under_way[0])
            yield
        finally:
            self._kept_off.subtract(paths)
            self._kept_off += Counter()  # nothing is kept of what is 0

    def ended_at_or_below(self, paths: tuple[str, ...]) -> list[str]:
        """Copies that were begun, and of which it is not known what became of them."""
        return [path for path in _at_or_below(self._held, paths) if path not in self._under_way]


def _at_or_below(which: Iterable[str], paths: tuple[str, ...]) -> list[str]:
    return [each for each in which if any(each == path or each.startswith(path + "/") for path in paths)]
