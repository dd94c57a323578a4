"""Commits merged into the tree: for each path the operation with the newest commit time wins.

What always holds:

* a record is applied between two awaits, so other tasks see all of it or nothing; one of many operations is applied in
  steps (`Applier.apply_in_steps`), and requests about its names wait at the tree's `Barrier` until it is whole;
  the note that it was applied is written last, so after a crash half-way it is applied again, before anybody is
  served, which changes nothing that was done already;
* the order in which commits arrive does not matter: one that comes late is put in its place among what is known of
  its names (`name_history`), or where that is not known, compared with the times in their rows and tombstones;
* a plain object that the writer of a commit did not know of wins where its LastModified is not before the commit's
  second, because somebody outside put it there since; where what is known here leaves a doubt, the store is asked for
  the object before the commit is applied (`Applier.doubts`), as it may be older, or replaced or removed since;
* the same bytes keep their inode; other bytes under the name get another, unless the file is being written here; a
  file whose mtime another node changed gets another, unless it is open here.

A change made here is applied at once under a `PENDING` stamp, which is newer than any commit, and gets the commit's
time (`restamp`) when it has one. Trio thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import reduce

import msgspec
import trio

from lakefs_fuse.commits.apply_record import TOGETHER_MAX, Application
from lakefs_fuse.commits.change import Change, merged
from lakefs_fuse.commits.doubt import Doubt
from lakefs_fuse.commits.file_rules import NOTHING, Step
from lakefs_fuse.commits.future_commits import Original
from lakefs_fuse.commits.name_history import Histories, History, OrderedRules, mark_of
from lakefs_fuse.commits.path_tree import PathTree, Watcher
from lakefs_fuse.commits.record import (
    Mkdir,
    ObjectRef,
    Operation,
    Record,
    Remove,
    SetAttr,
)
from lakefs_fuse.environment import failpoints
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.store.client import is_successor
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.steps import Pace

NS = 1_000_000_000
STEP_OPERATIONS = 32
"""Applied in one go where a record is applied in steps: 5 ms. A request takes some ten turns of the loop."""
BARRIER_PER_OPERATION = 8
"""This many names are looked up in the time in which one operation is applied."""


class Applier:
    """See the module's head."""

    def __init__(
        self, database: Database, tree: Tree, metrics: CommitMetrics, watcher: Watcher, *, clock_ns: Callable[[], int]
    ) -> None:
        self._db, self._tree, self._metrics, self._clock_ns = database, tree, metrics, clock_ns
        self.commits = CommitRows(database)
        self._histories = Histories(tree)
        self.paths = PathTree(database, tree, watcher, self.commits)

    def forget_histories(self, before: int) -> Iterator[None]:
        """Forget what commits said of names, where the last of them is older than that. In steps of some ms."""
        return self._histories.forget_before(before)

    def find_without(self, path: str, row: Entry, etags: Set[str]) -> Step | None:
        """As `OrderedRules.find_without`, of a file in the tree."""
        order = OrderedRules(self.paths, Record(writer="", time=0), ObjectRef(), 0, own=True, outdated=NOTHING)
        return order.find_without(path, row, self._tree.tombstones.get(path.encode(*schema.PATH)), etags)

    def gave_file(self, path: str, time: int) -> bool:
        """A commit of this time, not long ago, has put a file elsewhere at a path."""
        (history,) = self._histories.get_many([path])
        return history is not None and history.gave_file(time)

    # -- applying

    def is_of_renamed(self, meta: ObjectMeta) -> bool:
        """As the function of this name, by the tree."""
        return is_of_renamed(self._tree, meta)

    def doubts(self, record: Record) -> Iterator[Doubt | None]:
        """Plain objects that the record's writer did not know of, and that may be newer: one answer for each operation.
        A caller that awaits in between calls `forget_paths`."""
        self.paths.forget_paths()
        return Application(self.paths, record, ObjectRef(), record.time, outdated={}).doubts()

    def apply(
        self,
        record: Record,
        this: ObjectRef,
        *,
        own: bool = False,
        outdated: Mapping[str, str] = NOTHING,
        whole: bool = True,
    ) -> None:
        """Merge a commit into the tree. ``this`` is the archive as the store has it. ``own``: this node's kernel knows
        of the change already. ``outdated``: the answer to `doubts`, paths and the ETags that are not there any more.
        ``whole``: the record is all that its commit says."""
        self._run(record, this, record.time, own, outdated, whole=whole)
        self._end(record)

    def _end(self, record: Record) -> None:
        self.commits.record_applied(record.time, record.writer)
        self._metrics.applied += 1
        self._metrics.operations_applied += len(record.operations)

    async def wait_whole(self) -> None:
        """Until no record is being applied in steps: the next may build on all of it."""
        await self._tree.barrier.wait_lowered()

    async def apply_in_steps(self, record: Record, this: ObjectRef, *, outdated: Mapping[str, str] = NOTHING) -> None:
        """As `apply`, of another node's whole record: other tasks run after every STEP_OPERATIONS, and requests about
        its names wait for the end."""
        await self._tree.barrier.wait_lowered()
        try:
            await self._raise_barrier(record)
            await self.apply_behind_barrier(record, this, outdated=outdated)
        finally:
            self._tree.barrier.lower()

    async def apply_behind_barrier(
        self,
        record: Record,
        this: ObjectRef,
        *,
        own: bool = False,
        outdated: Mapping[str, str] = NOTHING,
        whole: bool = True,
    ) -> None:
        """As `apply`, in steps; the caller has raised the barrier before all names of the record."""
        application = Application(self.paths, record, this, record.time, own=own, outdated=outdated, whole=whole)
        steps, pace = application.steps(STEP_OPERATIONS), Pace()
        while True:
            with self.paths.editing(quiet=own):
                if next(steps, self) is self:
                    break
            failpoints.reached("apply.step")
            await pace.rest()
        self._end(record)

    async def _raise_barrier(self, record: Record) -> None:
        """Add every name that the record changes, or the directory's where that is missing, to the barrier."""
        self.paths.forget_paths()
        for number, operation in enumerate(record.operations, 1):
            above, _, name = operation.path.rpartition("/")
            while (directory := self.paths.directory(above)) is None:
                above, _, name = above.rpartition("/")
            self._tree.barrier.add(directory, name.encode())
            if not number % (BARRIER_PER_OPERATION * STEP_OPERATIONS):
                await trio.lowlevel.checkpoint()
                self.paths.forget_paths()

    def apply_pending(self, change: Change, stamp: int, *, quiet: bool = True) -> None:
        """Merge a change made here that is in no commit yet: its time is now. ``quiet``: this node's kernel knows of it
        already."""
        self._run(merged([change], "", self._clock_ns()), ObjectRef(), stamp, own=True, quiet=quiet)

    def _run(
        self,
        record: Record,
        this: ObjectRef,
        stamp: int,
        own: bool,
        outdated: Mapping[str, str] = NOTHING,
        *,
        whole: bool = False,
        quiet: bool = True,
    ) -> None:
        application = Application(self.paths, record, this, stamp, own=own, outdated=outdated, whole=whole)
        with self.paths.editing(quiet=own and quiet):
            application.run()

    def restamp(self, pending: Sequence[tuple[Change, int]], time: int) -> None:
        """Give what `apply_pending` merged, each change under its stamp, and is unchanged, the time of the commit that
        has it."""
        names: list[tuple[bytes, int]] = []
        for change, stamp in pending:
            attributes = [operation for operation in change.operations if isinstance(operation, SetAttr)]
            names += ((_row_path(operation), stamp) for operation in change.operations)
            if attributes:
                self._restamp(names, time)  # or attributes would not count beside what is newer than any commit
                names = []
                said = msgspec.structs.replace(change, operations=attributes, moves=[])
                self._run(merged([said], "", time), ObjectRef(), time, own=True)
        self._restamp(names, time)

    def redate(self, original: Original, kept: Sequence[Operation], time: int) -> None:
        """Give what a commit changed the time of the commit that repeats it; what that left out is as old as the
        commit."""
        numbers = {id(each) for each in kept}
        left = [each for each in original.record.operations if id(each) not in numbers]
        self._restamp([(_row_path(each), original.record.time) for each in kept], time)
        self._restamp([(_row_path(each), original.record.time) for each in left], original.made_ns)
        attributed = [operation.path.encode() for operation in kept if isinstance(operation, SetAttr)]
        batch = Batch()
        for entry in self.paths.find_many(attributed):
            if entry is not None and entry.ctime_ns > time:  # else nobody's later attributes would count here
                self._tree.update(batch, msgspec.structs.replace(entry, ctime_ns=time))
        self._db.commit(batch)

    def _restamp(self, names: Sequence[tuple[bytes, int]], time: int) -> None:
        """Replace a stamp of each name, which was set or removed under it, by another."""
        for first in range(0, len(names), TOGETHER_MAX):
            stamps: dict[bytes, list[int]] = {}
            for path, stamp in names[first : first + TOGETHER_MAX]:
                stamps.setdefault(path, []).append(stamp)
            paths, batch = list(stamps), Batch()
            found = list(zip(paths, self.paths.find_many(paths), strict=True))
            self._tree.restamp(batch, [entry for path, entry in found if entry and entry.stamp in stamps[path]], time)
            tombstones = dict(zip(paths, self._tree.tombstones.get_many(paths), strict=True))
            restamped = {}
            for path, tombstone in tombstones.items():
                if tombstone is not None:
                    new = reduce(lambda each, stamp: each.restamped(stamp, time), stamps[path], tombstone)
                    if new != tombstone:
                        restamped[path] = new
            self._tree.tombstones.write(batch, restamped)
            changed: dict[str, History] = {}
            histories = self._histories.get_many(path.decode(*schema.PATH) for path in paths)
            for (path, entry), history in zip(found, histories, strict=True):
                if history is None:
                    continue
                is_right = history.mark == mark_of(entry, tombstones[path])
                history = reduce(lambda each, stamp: each.restamped(stamp, time), stamps[path], history)
                if entry is not None and entry.stamp in stamps[path]:
                    entry = msgspec.structs.replace(entry, stamp=time)
                mark = mark_of(entry, restamped.get(path, tombstones[path])) if is_right else 0
                changed[path.decode(*schema.PATH)] = msgspec.structs.replace(history, mark=mark)
            self._histories.write(batch, changed)
            self._db.commit(batch)


def is_of_renamed(tree: Tree, meta: ObjectMeta) -> bool:
    """The object is a later version of a file that is at another name by now: its writer had not heard of that, and it
    is not the file of the name at whose key it lies."""
    row = tree.objects.used(meta.key)
    return row is not None and row.etag != meta.etag and is_successor(meta, row.etag)


def _row_path(operation: Operation) -> bytes:
    """The path of a name's tombstone: that of a directory ends in a slash."""
    is_directory = isinstance(operation, Mkdir) or (isinstance(operation, Remove) and operation.directory)
    return operation.path.encode() + (b"/" if is_directory else b"")
