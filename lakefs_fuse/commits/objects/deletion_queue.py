"""Plain objects to be deleted from the store because a commit removed their names.

What always holds:

* *versions only*: a key is queued in the batch that records the commit, and deleted after it, as the version that was
  removed: one that was put there since stays, and so does what another name refers to;
* *no deletion under a write*: a key that gets new bytes from this node leaves the queue first (`keeping`).

Trio thread only. After a crash the next mount goes on with the queue; until then a tombstone hides an object that is
still there.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from lakefs_fuse.commits.change_journal import ChangeJournal
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.meta.rows import Deletion, DeletionRows
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.store.client import DELETE_KEYS_MAX, StoreClient
from lakefs_fuse.sync.backoff import Backoff

PAUSE_S_FIRST, PAUSE_S_MAX = 0.5, 30.0
GATHER_S = 1.0
"""Deletions wait so long to be made in one pass with others, unless it is full; their names are hidden meanwhile."""
log = logging.getLogger(__name__)


class DeletionQueue:
    """See the module's head. Trio thread only."""

    def __init__(
        self,
        database: Database,
        client: StoreClient,
        tree: Tree,
        journal: ChangeJournal,
        metrics: CommitMetrics,
        *,
        clock_ns: Callable[[], int],
    ) -> None:
        self._db, self._client, self._tree, self._journal, self._metrics = database, client, tree, journal, metrics
        self._clock_ns = clock_ns
        self._kick, self._full, self._passed = trio.Event(), trio.Event(), trio.Event()
        self._under_way: dict[str, trio.Event] = {}
        self._kept: Counter[str] = Counter()
        self._rows = DeletionRows(database)
        self.waiting = len(self._rows.keys())

    def add(self, batch: Batch, doomed: Deletion) -> None:
        self.waiting += self._rows.put(batch, doomed)
        self._kick.set()
        if self.waiting >= DELETE_KEYS_MAX:
            self._full.set()

    def schedule(self, doomed: Deletion) -> None:
        """Queue one deletion, in a batch of its own. Raises CacheError."""
        batch = Batch()
        self.add(batch, doomed)
        self._db.commit(batch)

    async def wait_deleted(self, key: str) -> None:
        """Until no deletion of the key is under way."""
        while key in self._under_way:
            await self._under_way[key].wait()

    @asynccontextmanager
    async def keeping(self, key: str) -> AsyncIterator[None]:
        """Inside, the key gets new bytes, which no deletion queued before hits; no deletion of it is sent meanwhile. An
        exception of the block queues the deletions again. Raises CacheError."""
        self._kept[key] += 1
        try:
            await self.wait_deleted(key)
            taken = self._journal.waive_deletions(key)
            noted = self._rows.get(key) if self.waiting else None
            if noted is not None:
                taken.append(noted)
                self._forget([key])
            try:
                yield
            except BaseException:
                for doomed in taken:
                    self.schedule(doomed)
                raise
        finally:
            self._kept[key] -= 1
            if not self._kept[key]:
                del self._kept[key]
            self._kick.set()

    def _forget(self, keys: list[str]) -> None:
        batch = Batch()
        for key in keys:
            self.waiting -= self._rows.delete(batch, key)
        self._db.commit(batch)

    async def run(self) -> None:
        """Until cancelled."""
        backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        while True:
            self._kick, self._full = trio.Event(), trio.Event()
            try:
                while await self.delete_due() == DELETE_KEYS_MAX:
                    self._end_pass()
                backoff.reset()
            except LakeError as error:
                log.warning("objects whose names are gone could not be deleted yet: %s", error)
                self._end_pass()
                with trio.move_on_after(backoff.next_s()):
                    await self._full.wait()
                continue
            except Exception:
                log.exception("deleting objects whose names are gone")
                await trio.sleep(PAUSE_S_MAX)
            self._end_pass()
            if not self.waiting:
                await self._kick.wait()
            with trio.move_on_after(GATHER_S):
                await self._full.wait()

    def _end_pass(self) -> None:
        self._passed.set()
        self._passed = trio.Event()

    async def hasten(self, silence_s_max: float) -> None:
        """Have `run` delete what is due. Returns when nothing is, when that fails, or after ``silence_s_max`` in which
        no request was answered; a request that is under way then goes on, and what is left stays due."""
        fruitless = 0  # The attempt under way may have begun before something became due: one is not enough.
        while fruitless < 2 and next(self._rows.due(self._clock_ns()), None) is not None:
            waiting = self.waiting
            self._full.set()
            with trio.move_on_after(silence_s_max) as silence:
                await self._passed.wait()
            if silence.cancelled_caught:
                return
            fruitless += self.waiting == waiting

    async def delete_due(self) -> int:
        """Delete up to a thousand objects whose time has come; answers how many were dealt with. Raises LakeError."""
        now = self._clock_ns()
        due: list[Deletion] = []
        for doomed in self._rows.due(now):
            if doomed.key not in self._under_way and doomed.key not in self._kept:
                due.append(doomed)
                if len(due) == DELETE_KEYS_MAX:
                    break
        if not due:
            return 0
        done = trio.Event()
        self._under_way.update((doomed.key, done) for doomed in due)
        try:
            unwanted = [(doomed.key, doomed.etag) for doomed in due if not self._is_wanted(doomed)]
            failed = await self._client.delete_many_if_match(unwanted)
            self._metrics.objects_deleted += len(unwanted) - len(failed)
            self._forget([doomed.key for doomed in due if doomed.key not in failed])
        finally:
            for doomed in due:
                self._under_way.pop(doomed.key, None)
            done.set()
        if failed:
            key, why = next(iter(failed.items()))
            raise LakeError(f"{len(failed)} objects, {key} among them: {why}")
        return len(due)

    def _is_wanted(self, doomed: Deletion) -> bool:
        """A name means the object: another one, or its own again. One that was renamed from this key means whatever
        lies there: what was written in its place goes along."""
        if self._tree.objects.used(doomed.key) is not None:
            return True
        above, _, name = doomed.key.encode("utf-8", "surrogatepass").rpartition(b"/")
        directory = self._tree.resolve(above.split(b"/")) if above else None
        if above and (directory is None or not directory.is_dir):
            return False
        entry = self._tree.named(directory.inode if directory is not None else ROOT_INODE, name)
        return entry is not None and entry.is_plain and entry.etag == doomed.etag
