"""Applies commits to the tree: for each path the operation with the newest commit time wins.

What always holds:

* a record is applied between two awaits, so other tasks see all of it or nothing. One of many operations is applied in
  steps (`Applier.apply_in_steps`), and requests about its names wait at the tree's `Barrier` until all of it is
  applied. The row that says so is written last: after a crash half-way the record is applied again before any request
  is served, which changes nothing that was done already;
* the order in which commits arrive does not matter: one that comes late is put in its place among what is known of
  its names (`name_history`) or, if that is not known, compared with the times in their rows and tombstones;
* a plain object that the writer of a commit did not know wins if its LastModified is not before the commit's second,
  because another client has put it there since. If what is known here leaves a doubt, the store is asked for the
  object before the commit is applied (`Applier.doubts`): it may be older, or have been replaced or removed since;
* the same bytes keep their inode; other bytes under the name get another inode, unless the file is being written here;
  a file whose mtime another node changed gets another inode, unless it is open here.

A change made here is applied at once under a `PENDING` stamp, which is newer than any commit, and gets the time of its
commit (`restamp`) once there is one. Trio thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import reduce

import msgspec
import trio

from lakefs_fuse.commits.apply_record import TOGETHER_MAX, Application
from lakefs_fuse.commits.change import Change, merged
from lakefs_fuse.commits.doubt import Doubt
from lakefs_fuse.commits.file_rules import NOTHING, Step
from lakefs_fuse.commits.future_commits import Original
from lakefs_fuse.commits.hybrid_clock import LATE_NS
from lakefs_fuse.commits.name_history import Histories, History, OrderedRules, doubts, mark_of
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
from lakefs_fuse.meta.entry import PENDING, Entry, Flag
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.store.client import is_successor
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.steps import Pace

STEP_OPERATIONS = 64
"""Operations in one step, if a record is applied in steps: 5 ms."""
BARRIER_PER_OPERATION = 8
"""Names that are looked up in the time in which one operation is applied."""


class Applier:
    """Applies commits, and changes made here, to one tree; see the module."""

    def __init__(
        self, database: Database, tree: Tree, metrics: CommitMetrics, watcher: Watcher, *, clock_ns: Callable[[], int]
    ) -> None:
        self._db, self._tree, self._metrics, self._clock_ns = database, tree, metrics, clock_ns
        self.commits = CommitRows(database)
        self._histories = Histories(tree)
        self.paths = PathTree(database, tree, watcher, self.commits)
        self.heard_ns = 0
        """When the last deep poll began, or the LIST of a digest that agreed, by the store's time: every commit that
        was visible then is in effect. 0 before the first of this daemon: the last one may have been cut off."""
        self.away_until_ns = 0
        """When this daemon last heard of others after it had not for LATE_NS; its first poll counts."""

    def note_heard(self, began_ns: int) -> None:
        """Note a poll that began at this time, and whose commits are in effect now."""
        if began_ns - self.heard_ns > LATE_NS:
            self.away_until_ns = self._clock_ns()
        self.heard_ns = began_ns

    def forget_histories(self, before: int) -> Iterator[None]:
        """Delete histories whose newest fact is older than ``before``, in steps of some ms."""
        return self._histories.forget_before(before)

    def find_without(self, path: str, row: Entry, versions: Set[tuple[str, int, str]]) -> Step | None:
        """Return the result of `OrderedRules.find_without` for a file in the tree."""
        order = OrderedRules(self.paths, Record(writer="", time=0), ObjectRef(), 0, own=True, outdated=NOTHING)
        return order.find_without(path, row, self._tree.tombstones.get(path.encode(*schema.PATH)), versions)

    def gave_file(self, path: str, time: int) -> bool:
        """Return whether a commit of this time, not long ago, put a file elsewhere at a path."""
        (history,) = self._histories.get_many([path])
        return history is not None and history.gave_file(time)

    # -- applying

    def is_of_renamed(self, meta: ObjectMeta) -> bool:
        """Return the result of the function of this name for the tree."""
        return is_of_renamed(self._tree, meta)

    def doubts(self, record: Record) -> Iterator[list[Doubt]]:
        """Yield, for some operations at a time, what to ask the store for before the record is applied.

        These are mostly plain objects that the record's writer did not know, and that may be newer. A caller that
        awaits in between calls `PathTree.forget_paths`."""
        self.paths.forget_paths()
        return doubts(self.paths, record)

    def apply(
        self,
        record: Record,
        this: ObjectRef,
        *,
        whole: bool,
        own: bool = False,
        outdated: Mapping[str, str] = NOTHING,
    ) -> None:
        """Apply a commit to the tree.

        ``this`` is the archive as the store has it. ``own``: this node's kernel knows of the change already.
        ``outdated``: the answer to `doubts`, as paths and the ETags that are no longer there. ``whole``: the record is
        all that its commit says."""
        self._run(record, this, record.time, own, outdated, whole=whole, quiet=True)
        self._end(record)

    def _end(self, record: Record) -> None:
        self.commits.record_applied(record.time, record.writer)
        self._metrics.applied += 1
        self._metrics.operations_applied += len(record.operations)

    async def wait_whole(self) -> None:
        """Wait until no record is being applied in steps, because the next may build on all of it."""
        await self._tree.barrier.wait_lowered()

    async def apply_in_steps(
        self,
        record: Record,
        this: ObjectRef,
        *,
        whole: bool = True,
        own: bool = False,
        outdated: Mapping[str, str] = NOTHING,
    ) -> None:
        """Apply a record in steps of `STEP_OPERATIONS`, with the result of `apply`.

        Other tasks run between steps, and requests about the record's names wait for the end."""
        await self._tree.barrier.wait_lowered()
        try:
            await self._raise_barrier(record)
            await self.apply_behind_barrier(record, this, whole=whole, own=own, outdated=outdated)
        finally:
            self._tree.barrier.lower()

    async def apply_behind_barrier(
        self,
        record: Record,
        this: ObjectRef,
        *,
        whole: bool,
        own: bool = False,
        outdated: Mapping[str, str] = NOTHING,
    ) -> None:
        """Apply a record as `apply` does, but in steps; the caller has added all its names to the barrier."""
        application = Application(self.paths, record, this, record.time, whole=whole, own=own, outdated=outdated)
        steps, pace = application.steps(STEP_OPERATIONS), Pace()
        while True:
            with self.paths.editing(quiet=own, own=own):
                if next(steps, self) is self:
                    break
            failpoints.reached("apply.step")
            await pace.rest()
        self._end(record)

    async def _raise_barrier(self, record: Record) -> None:
        """Add every name that the record changes to the barrier, or the name of a missing directory above it."""
        self.paths.forget_paths()
        found: tuple[str, int | None] | None = None
        for number, operation in enumerate(record.operations, 1):
            above, _, name = operation.path.rpartition("/")
            if found is None or found[0] != above:
                found = above, self._add_missing(above)
            if found[1] is not None:
                self._tree.barrier.add(found[1], name.encode())
            if not number % (BARRIER_PER_OPERATION * STEP_OPERATIONS):
                await trio.lowlevel.checkpoint()
                self.paths.forget_paths()
                found = None

    def _add_missing(self, path: str) -> int | None:
        """Return the inode of a directory. If it is missing, add the missing name above it to the barrier."""
        directory, name = self.paths.directory(path), ""
        if directory is not None:
            return directory
        while (directory := self.paths.directory(path)) is None:
            path, _, name = path.rpartition("/")
        self._tree.barrier.add(directory, name.encode())
        return None

    def apply_pending(self, change: Change, stamp: int, *, quiet: bool = True) -> None:
        """Apply a journaled change that is in no commit yet; its time is now.

        While the disk is full its rows stay in memory (`PathTree.editing`). ``quiet``: this node's kernel knows of it
        already. Raises CacheError."""
        self._run(merged([change], "", self._clock_ns()), ObjectRef(), stamp, own=True, whole=False, quiet=quiet)

    def _run(
        self,
        record: Record,
        this: ObjectRef,
        stamp: int,
        own: bool,
        outdated: Mapping[str, str] = NOTHING,
        *,
        whole: bool,
        quiet: bool,
    ) -> None:
        application = Application(self.paths, record, this, stamp, whole=whole, own=own, outdated=outdated)
        with self.paths.editing(quiet=own and quiet, own=own):
            application.run()

    def restamp(self, pending: Sequence[tuple[Change, int]], time: int) -> None:
        """Give what `apply_pending` applied the time of the commit that contains it, attributes too.

        ``pending`` are the changes with their stamps. What has got another stamp since keeps that, and files that are
        gone or have other attributes since are as they are."""
        names = [(_row_path(operation), stamp) for change, stamp in pending for operation in change.operations]
        self._restamp(names, time)
        if said := [each for change, _ in pending for each in change.operations if isinstance(each, SetAttr)]:
            self._date_attributes(said, time)

    def _date_attributes(self, said: Sequence[SetAttr], time: int) -> None:
        batch, dated = Batch(), []
        for operation, row in zip(said, self.paths.find_many([_row_path(each) for each in said]), strict=True):
            if row is not None and _has_attributes(row, operation):
                dated.append(msgspec.structs.replace(row, ctime_ns=time))
                self._tree.update(batch, dated[-1])
        self._db.commit_volatile(batch)
        self.paths.watcher.updated(dated)

    def leave_out(self, operations: Sequence[tuple[Operation, int]], batch: Batch, time: int = 0) -> None:
        """Take operations on files that no commit will contain out of the histories of their names.

        They are in effect here under the given stamps, and a newer change supersedes them: no other node will ever hear
        of them. The rows stay until that change is applied. With ``time``, the names get that stamp in place of the
        given ones, at once; otherwise ``batch`` holds what changes."""
        stamps: dict[str, set[int]] = {}
        for operation, stamp in operations:
            stamps.setdefault(operation.path, set()).add(stamp)
        self.paths.forget_paths()
        raw = [path.encode(*schema.PATH) for path in stamps]
        rows, tombstones = self.paths.find_many(raw), self._tree.tombstones.get_many(raw)
        changed: dict[str, History] = {}
        histories = self._histories.get_many(stamps)
        for path, row, tombstone, history in zip(stamps, rows, tombstones, histories, strict=True):
            if history is None and row is not None and row.stamp in stamps[path] and tombstone is None:
                history = self._histories.begun_with(path, row)
            if history is not None:
                facts = [fact for fact in history.facts if fact.stamp not in stamps[path]]
                changed[path] = msgspec.structs.replace(history, facts=facts)
        if not time:
            self._histories.write(batch, changed)
            return
        at_once = Batch()
        self._histories.write(at_once, changed)
        self._db.commit_volatile(at_once)
        self._restamp([(_row_path(operation), stamp) for operation, stamp in operations], time)

    def replaced_since(self, change: Change, own: Collection[int]) -> set[str]:
        """Return the paths of which other nodes have committed newer versions since the journaled change was made, and
        which it would replace or remove. ``own`` are times of commits of this node."""
        replacing, removing, telling = change.replacing(), change.removing(), change.telling()
        named = {**removing, **replacing}
        replaced = {
            path
            for (path, hides), history in zip(named.items(), self._histories.get_many(named), strict=True)
            if history is not None
            and history.has_version_since(change.made, hides, own, is_named=path not in replacing)
        }
        told = zip(telling.items(), self._histories.get_many(telling), strict=True)
        return replaced | {
            path for (path, etag), history in told if history is not None and history.ends(etag, change.made, own)
        }

    def rows_since(self, change: Change, own: Collection[int]) -> set[str]:
        """As `replaced_since`, for a change that is not in effect, by what the tree holds."""
        replacing, removing = change.replacing(), change.removing()
        named = {**removing, **replacing}
        self.paths.forget_paths()
        rows = self.paths.find_many([path.encode(*schema.PATH) for path in named])
        found = set[str]()
        for (path, hides), row in zip(named.items(), rows, strict=True):
            if row is None or not change.made < row.stamp < PENDING or row.stamp in own:
                continue
            is_same = row.is_plain and row.etag == hides
            if (not is_same and path in replacing) or (is_same and row.flags & Flag.PUT_AGAIN):
                found.add(path)
        return found

    def have_histories(self, paths: Set[str]) -> bool:
        """Return whether it is known of all names what they are without pending changes."""
        return None not in self._histories.get_many(paths)

    def is_gone(self, path: str, etag: str) -> bool:
        """Return whether a commit named the plain object with this ETag at a path when it removed or replaced it."""
        tombstone = self._tree.tombstones.get(path.encode(*schema.PATH))
        return tombstone is not None and tombstone.when_named(etag) > 0

    def withdraw(self, change: Change, gone: Sequence[Operation], stamp: int) -> None:
        """Take back operations of a journaled change, which are on files and are in effect under ``stamp``.

        Their names become what commits say of them without these operations. A row that stays, because its file is
        being written or because nothing else is known of its name, gets the time at which the change was made."""
        record = Record(writer="", time=change.made, objects=change.objects, operations=gone)
        application = Application(self.paths, record, ObjectRef(), stamp, whole=False, own=True, withdraws=True)
        with self.paths.editing(own=True):
            application.run()
        rows = self.paths.find_many([_row_path(each) for each in gone])
        batch = Batch()
        self._tree.restamp(batch, [row for row in rows if row is not None and row.stamp == stamp], change.made)
        self._db.commit_volatile(batch)
        self.paths.watcher.restored([row for row in rows if row is not None and row.stamp != stamp])

    def redate(self, original: Original, kept: Sequence[Operation], time: int) -> None:
        """Give what a commit changed the time of the commit that repeats it.

        What that left out gets the time at which the original was made."""
        numbers = {id(each) for each in kept}
        left = [each for each in original.record.operations if id(each) not in numbers]
        self._restamp([(_row_path(each), original.record.time) for each in kept], time)
        self._restamp([(_row_path(each), original.record.time) for each in left], original.made_ns)
        attributed = [_row_path(operation) for operation in kept if isinstance(operation, SetAttr)]
        batch = Batch()
        for entry in self.paths.find_many(attributed):
            if entry is not None and entry.ctime_ns > time:  # otherwise no node's later attributes would count here
                self._tree.update(batch, msgspec.structs.replace(entry, ctime_ns=time))
        self._db.commit(batch)

    def _restamp(self, names: Sequence[tuple[bytes, int]], time: int) -> None:
        """Give each name that was set or removed under its given stamp the stamp ``time``."""
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
            histories = self._histories.get_many([path.decode(*schema.PATH) for path in paths])
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
            self._db.commit_volatile(batch)


def is_of_renamed(tree: Tree, meta: ObjectMeta) -> bool:
    """Return whether the object is a later version of a file that has another name by now.

    Its writer had not seen the rename, and the object is not the file of the name whose key it has."""
    row = tree.objects.used(meta.key)
    return row is not None and row.etag != meta.etag and is_successor(meta, row.etag)


def _row_path(operation: Operation) -> bytes:
    """Return the path of a name's tombstone; that of a directory ends in a slash."""
    is_directory = isinstance(operation, Mkdir) or (isinstance(operation, Remove) and operation.directory)
    return operation.path.encode() + (b"/" if is_directory else b"")


def _has_attributes(row: Entry, said: SetAttr) -> bool:
    """Return whether the row of a file has the attributes that a commit gives to it."""
    now = (row.mode, row.uid, row.gid, row.mtime_ns, row.size)
    return bool(row.flags & Flag.ATTRIBUTED) and now == (said.mode, said.uid, said.gid, said.mtime_ns, said.size)
