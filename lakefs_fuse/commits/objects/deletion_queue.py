"""The deletion queue: plain objects that a commit superseded, by removing or replacing their names, are deleted later.

A superseded object stays for ``delete_after_s``. By then every node has heard of the commit, and this node of whatever
another did before that: the other may have renamed the file without knowing of the removal, so that a name refers to
the object.

What always holds:

* *queued with the commit*: a key is queued when the commit is recorded here, and no object is deleted without a commit;
* *versions only*: an object is deleted only if its time has come and no name refers to it, by all commits that were
  visible ``CAUGHT_UP_S`` before, and if the store still shows that version, dated before its removal: one that was put
  there since stays. DELETE names the ETag, and is sent once: if its answer is lost, all this is decided again. For the
  marker of a directory the date alone counts, and DELETE names no version;
* *snapshots kept*: an object below ``.lakefs/`` in which a named snapshot has bytes is left to `gc`;
* *no deletion under a write*: no object is deleted at a key to which this node writes. What was to be deleted there
  before is replaced by a write that succeeds, so its deletion is dropped then (`keeping`).

Trio thread only. After a crash the next mount continues with the queue. If the cache is lost, `gc` finds what is left.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import islice

import msgspec
import trio

from lakefs_fuse.commits.change_journal import ChangeJournal
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.errors import CacheError, LakeError, NotFound
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.meta.rows import Deletion, DeletionRows
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.client import DELETE_KEYS_MAX, DELETES_AT_ONCE, StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.sync.nursery import for_each

PAUSE_S_FIRST, PAUSE_S_MAX = 0.5, 30.0
"""Bounds of the pause after a failure. The maximum also bounds the wait until a deletion is due, because the time of
day may be set."""
GATHER_S = 1.0
"""How long deletions wait for others to share a pass with, unless it is full. The objects are hidden meanwhile."""
STORED_MAX = 1 << 16
"""Maximum of stored keys in memory, about 20 MB. Commits of other nodes are heard of within seconds."""
CAUGHT_UP_S = 60.0
"""Before anything is deleted, all commits that were visible this long ago are in effect here. A rename by a node that
has not heard of the removal is visible much earlier than the object may be deleted."""
NS = 1_000_000_000
REFUSED_NS = 60 * NS
"""How much later a deletion that the store refused is tried again; others continue meanwhile."""
DATED_LATE_NS = 3 * NS
"""How much later than its removal the store may date an object: dates are in whole seconds, and clocks differ."""
HEADS_MAX = 2
"""Up to this many keys of a directory take a HEAD each; more take a LIST, with a page for every thousand names."""
log = logging.getLogger(__name__)


class DeletionQueue:
    """Deletes superseded objects when their time has come: see the module's head. Trio thread only."""

    def __init__(
        self,
        database: Database,
        client: StoreClient,
        tree: Tree,
        journal: ChangeJournal,
        metrics: CommitMetrics,
        *,
        clock_ns: Callable[[], int],
        delay_s: float,
    ) -> None:
        """An object may be deleted ``delay_s`` seconds after its commit."""
        self._delay_ns = int(delay_s * NS)
        self._db, self._client, self._tree, self._journal, self._metrics = database, client, tree, journal, metrics
        self._clock_ns = clock_ns
        self._kick, self._full, self._passed = trio.Event(), trio.Event(), trio.Event()
        self._under_way: dict[str, trio.Event] = {}
        self._stored = OrderedDict[str, str]()
        self.stored_count = 0
        """Number of calls of `note_stored` so far."""
        self._adopted = set[str]()
        """Keys of ``_stored`` at which the object is the file of another name."""
        self._kept: Counter[str] = Counter()
        self._rows = DeletionRows(database)
        self._in_snapshots = snapshots.KeptObjects(client)
        self._count_waiting()
        database.reopened.append(self._count_waiting)

    def _count_waiting(self) -> None:
        self.waiting = len(self._rows.keys())

    def _change_waiting(self, difference: int) -> None:
        self.waiting += difference
        if self.waiting >= DELETE_KEYS_MAX:
            self._full.set()

    def _delete_row(self, batch: Batch, key: str) -> None:
        if self._rows.delete(batch, key):
            batch.committed.append(partial(self._change_waiting, -1))

    def add(self, batch: Batch, doomed: Deletion) -> None:
        """Queue a deletion with ``batch``; its object is superseded now, unless it has a due time from before."""
        if not doomed.due_ns:
            now = self._clock_ns()
            doomed = msgspec.structs.replace(doomed, due_ns=now + self._delay_ns, removed_ns=now)
        if self._rows.put(batch, doomed):
            batch.committed.append(partial(self._change_waiting, 1))
        self._kick.set()

    def schedule(self, *doomed: Deletion) -> None:
        """Queue deletions, in a batch of their own. Raises CacheError."""
        batch = Batch()
        for each in doomed:
            self.add(batch, each)
        self._db.commit(batch)

    def note_stored(self, key: str, etag: str, *, is_adopted: bool = False) -> None:
        """Remember in memory that this node stored a plain object at the key of a file, for STORED_MAX keys.
        ``is_adopted``: it belongs to a file of another name, and replaced nothing."""
        self.stored_count += 1
        self._stored[key] = etag
        self._stored.move_to_end(key)
        self._adopted.discard(key)
        if len(self._stored) > STORED_MAX:
            oldest, _ = self._stored.popitem(last=False)
            self._adopted.discard(oldest)
        if is_adopted:
            self.note_adopted(key, etag)

    def note_adopted(self, key: str, etag: str) -> None:
        """Record that this version, which this node stored, belongs to a file of another name: it replaced nothing."""
        if self._stored.get(key) == etag:
            self._adopted.add(key)

    def is_adopted(self, key: str, etag: str) -> bool:
        """Return whether `note_adopted` was called for this version."""
        return key in self._adopted and self._stored.get(key) == etag

    def has_replaced(self, key: str, etag: str) -> bool:
        """Return whether this node has lately stored another version than this one at the key."""
        return self._stored.get(key, etag) != etag

    def stored_since(self, count: int) -> set[str]:
        """Return the keys at which this node has stored an object since `stored_count` had this value."""
        return set(islice(reversed(self._stored), self.stored_count - count))

    @property
    def has_stored_any(self) -> bool:
        return bool(self._stored)

    def stored_etag(self, key: str) -> str:
        """Return the ETag of the object that this node has lately stored at the key; empty if there is none."""
        return self._stored.get(key, "")

    def superseded_etag(self, key: str) -> str:
        """Return the ETag of the object at a key that waits for its deletion; empty if none does."""
        return next(self._superseded_etags(key), "")

    def _superseded_etags(self, key: str) -> Iterator[str]:
        """Yield the ETags of objects at a key that wait for their deletion, those in the journal first."""
        for change in self._journal.changes.values():
            yield from (doomed.etag for doomed in change.doomed if doomed.key == key)
        queued = self._rows.get(key) if self.waiting else None
        if queued is not None:
            yield queued.etag

    async def wait_deleted(self, key: str) -> None:
        """Wait until no deletion of the key is under way."""
        while key in self._under_way:
            await self._under_way[key].wait()

    @asynccontextmanager
    async def keeping(self, key: str) -> AsyncIterator[None]:
        """Keep a key from being deleted while the block writes to it.

        Deletions from before are dropped when the block has written, so that none deletes the new bytes. If it raises,
        they stay where they are: in the queue, or in the journal with their removal. They stay, too, if the disk does
        not record that they are dropped: what the block has written is in effect all the same, and no object is
        deleted without a look at its version and its name."""
        self._kept[key] += 1
        try:
            await self.wait_deleted(key)
            replaced = set(self._superseded_etags(key))
            yield
            if replaced:
                try:
                    self._waive(key, replaced)
                except CacheError as error:
                    log.warning("what was to be deleted at %s is looked at once more: %s", key, error)
        finally:
            self._kept[key] -= 1
            if not self._kept[key]:
                del self._kept[key]
            self._kick.set()

    def _waive(self, key: str, etags: Collection[str]) -> None:
        """Drop the deletions of these versions of a key, whether their removals are in a commit or not."""
        batch = Batch()
        self._journal.waive_deletions(batch, key, etags)
        queued = self._rows.get(key)
        if queued is not None and queued.etag in etags:
            self._delete_row(batch, key)
        self._db.commit(batch)

    async def run(self, catch_up: Callable[[float], Awaitable[object]]) -> None:
        """Delete what is due, until cancelled. ``catch_up`` is as `Poller.catch_up`."""
        backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        while True:
            self._kick, self._full = trio.Event(), trio.Event()
            try:
                while await self.delete_due(catch_up) == DELETE_KEYS_MAX:
                    self._wake_hasteners()
                backoff.reset()
            except LakeError as error:
                log.warning("objects whose names are gone could not be deleted yet: %s", error)
                self._wake_hasteners()
                with trio.move_on_after(backoff.next_s()):
                    await self._full.wait()
                continue
            except Exception:
                log.exception("deleting objects whose names are gone")
                await trio.sleep(PAUSE_S_MAX)
            self._wake_hasteners()
            with trio.move_on_after(self._idle_s()):
                await self._kick.wait()
            with trio.move_on_after(GATHER_S):
                await self._full.wait()

    def _idle_s(self) -> float:
        """Return for how many seconds no pass is needed unless something is queued."""
        due_ns = self._rows.first_due_ns() if self.waiting else None
        if due_ns is None:
            return math.inf
        return min(max(0.0, (due_ns - self._clock_ns()) / NS - GATHER_S), PAUSE_S_MAX)

    def _wake_hasteners(self) -> None:
        """Have tasks that wait in `hasten` check the queue again, because a pass has ended."""
        self._passed.set()
        self._passed = trio.Event()

    async def hasten(self, silence_s_max: float) -> None:
        """Have `run` delete what is due, and wait for it.

        Returns when nothing is due, when deleting fails, or after ``silence_s_max`` in which no pass ended; a pass that
        is under way then continues, and what is left stays due."""
        fruitless = 0  # The attempt under way may have begun before something became due: one is not enough.
        while fruitless < 2 and next(self._rows.due(self._clock_ns()), None) is not None:
            waiting = self.waiting
            self._kick.set()
            self._full.set()
            with trio.move_on_after(silence_s_max) as silence:
                await self._passed.wait()
            if silence.cancelled_caught:
                return
            fruitless += self.waiting == waiting

    async def delete_due(self, catch_up: Callable[[float], Awaitable[object]]) -> int:
        """Delete up to a thousand objects whose time has come; returns how many were dealt with. Raises LakeError."""
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
            await catch_up(CAUGHT_UP_S)
            there = await self._still_there([doomed for doomed in due if not self._is_wanted(doomed)])
            kept = await self._find_kept(there)
            unwanted = [
                (doomed.key, doomed.etag) for doomed in there if not self._is_wanted(doomed) and doomed.key not in kept
            ]
            refused = await self._client.delete_many_if_match(unwanted)
            self._metrics.objects_deleted += len(unwanted) - len(refused)
            self._remove_rows(due, refused)
        finally:
            for doomed in due:
                self._under_way.pop(doomed.key, None)
            done.set()
        if refused:
            key, why = next(iter(refused.items()))
            raise LakeError(f"{counted(len(refused), 'object')}, {key} among them: {why}")
        return len(due)

    async def _find_kept(self, doomed: Sequence[Deletion]) -> Container[str]:
        """Return the keys that named snapshots keep. Those are below ``.lakefs/``: nothing is read if no key of
        ``doomed`` is. Raises LakeError."""
        is_ours = any(each.key.startswith(RESERVED_PREFIX) for each in doomed)
        if not is_ours:
            return ()
        await self._in_snapshots.refresh()
        return self._in_snapshots

    def _remove_rows(self, due: Sequence[Deletion], refused: Mapping[str, str]) -> None:
        """Remove deletions that were dealt with from the queue; those that the store ``refused`` become due later."""
        batch, later_ns = Batch(), self._clock_ns() + REFUSED_NS
        for doomed in due:
            if self._rows.get(doomed.key) != doomed:
                continue  # another version was removed meanwhile
            if doomed.key in refused:
                self._rows.put(batch, msgspec.structs.replace(doomed, due_ns=later_ns))
            else:
                self._delete_row(batch, doomed.key)
        self._db.commit(batch)

    async def _still_there(self, doomed: Sequence[Deletion]) -> list[Deletion]:
        """Return the deletions whose removed version is still in the store, and those of markers not put since. Raises
        LakeError."""
        below: dict[str, dict[str, Deletion]] = defaultdict(dict)
        for each in doomed:
            if each.etag:
                below[each.key[: each.key.rfind("/") + 1]][each.key] = each
        there = await self._old_markers([each for each in doomed if not each.etag])

        def keep(some: dict[str, Deletion], meta: ObjectMeta) -> None:
            each = some.get(meta.key)
            if each is not None and meta.etag == each.etag and not _is_put_since(each, meta):
                there.append(each)

        async def ask(prefix: str) -> None:
            some = below[prefix]
            if len(some) > HEADS_MAX:
                for meta in await self._client.find_listed(prefix, some):
                    keep(some, meta)
                return
            for key in some:
                with suppress(NotFound):
                    keep(some, await self._client.head(key))

        await for_each(list(below), ask, min(DELETES_AT_ONCE, len(below)))
        return there

    async def _old_markers(self, doomed: Sequence[Deletion]) -> list[Deletion]:
        """Return the deletions of markers that are older than their removal, or are not there. A store may show a
        prefix without a marker, until that is deleted. Raises LakeError."""
        old: list[Deletion] = []

        async def ask(each: Deletion) -> None:
            marker = await self._client.find(each.key)
            if marker is None or not _is_put_since(each, marker):
                old.append(each)

        await for_each(doomed, ask, min(DELETES_AT_ONCE, len(doomed)))
        return old

    def _is_wanted(self, doomed: Deletion) -> bool:
        """Return whether a name refers to the object: another name, or its own again. A file that was renamed from this
        key refers to whatever is there, also to bytes that were written in place of its own."""
        if self._tree.objects.used(doomed.key) is not None:
            return True
        above, _, name = doomed.key.encode(*schema.PATH).rpartition(b"/")
        directory = self._tree.resolve(above.split(b"/")) if above else None
        if above and (directory is None or not directory.is_dir):
            return False
        entry = self._tree.named(directory.inode if directory is not None else ROOT_INODE, name)
        return entry is not None and entry.is_plain and entry.etag == doomed.etag


def _is_put_since(doomed: Deletion, there: ObjectMeta) -> bool:
    """Return whether the store dates the object that is there after the removal, as far as its dates tell."""
    return bool(doomed.removed_ns) and there.mtime_ns > doomed.removed_ns + DATED_LATE_NS
