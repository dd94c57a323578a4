"""Drops a mount's rows of packs that `gc` has deleted from the store.

The row of a pack outlives its last entry (`meta.object_table`). A mount that lives for months would otherwise keep a
row for every pack that the lake ever had.

What always holds (*deleted packs only*): a row goes only if no entry has bytes in the pack, the pack is older than the
horizon of `gc`, and a LIST that began after that was read does not show it. If a commit names the pack later, it gets
another row.

A task of the trio thread. A crash leaves rows, which a later run drops.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Generator, Sequence

import trio

from lakefs_fuse.commits.archive import commit_time
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.object_table import ObjectRow, Objects
from lakefs_fuse.sync.steps import Pace, finish_paced

INTERVAL_S = 86400.0
"""Mean time between two runs: `gc` deletes packs once a day. Times are drawn from an exponential distribution, so that
mounts that are replaced every few hours have their runs, too, and not all at the same time."""
ROWS_MAX = 10_000
"""Unused rows that are read together, and checked with one LIST: 2 MB."""
ROWS_AT_ONCE = 256
"""Rows that are read, or dropped, in one step: 1 ms."""

log = logging.getLogger(__name__)


class PackRows:
    """See the module's head."""

    def __init__(self, objects: Objects, commits: CommitLog, rng: random.Random) -> None:
        self._objects, self._commits, self._rng = objects, commits, rng

    async def run(self) -> None:
        """Drop rows about once a day while the mount lives."""
        while True:
            await trio.sleep(self._rng.expovariate(1 / INTERVAL_S))
            try:
                await self.drop_deleted()
            except LakeError as error:
                log.info("rows of packs that gc has deleted are dropped later: %s", error)

    async def drop_deleted(self) -> None:
        """Drop the rows of all packs that are gone; sends no request if each pack has entries. Raises LakeError."""
        unused = await finish_paced(self._unused(0))
        horizon = await self._commits.read_horizon() if unused else 0
        while unused:
            old = [row for row in unused if 0 < commit_time(row.key) < horizon]
            if old:
                await self._drop(old, await self._listed(old))
            unused = await finish_paced(self._unused(unused[-1].number + 1))

    def _unused(self, first: int) -> Generator[None, None, list[ObjectRow]]:
        """Return the packs without entries, from a number on, ROWS_MAX at most; in steps."""
        found: list[ObjectRow] = []
        for count, row in enumerate(self._objects.rows(first), 1):
            if row.is_pack and row.entries <= 0:
                found.append(row)
            if len(found) == ROWS_MAX:
                break
            if not count % ROWS_AT_ONCE:
                yield
        return found

    async def _listed(self, rows: Sequence[ObjectRow]) -> set[str]:
        """Return the keys of these packs that the store still has."""
        keys = {row.key for row in rows}
        last, listed = max(keys), set[str]()
        async for page in self._commits.list_since(min(commit_time(row.key) for row in rows)):
            listed.update(meta.key for meta in page.objects if meta.key in keys)
            if page.objects and page.objects[-1].key >= last:
                break
        return listed

    async def _drop(self, rows: Sequence[ObjectRow], listed: set[str]) -> None:
        gone, pace = [row.number for row in rows if row.key not in listed], Pace()
        for at in range(0, len(gone), ROWS_AT_ONCE):
            now = self._objects.get_many(gone[at : at + ROWS_AT_ONCE])
            self._objects.forget_packs([row for row in now if row is not None and row.entries <= 0])
            await pace.rest()
