"""Renames files and directories of any size, with one PUT each; the target may exist, or be exchanged.

The commit gives every name that moves its new path, and removes it from the old one; the bytes stay. The rows of this
node keep their inodes. Files that are not in the store yet move on this node only, and are stored under their new name;
files that are being written continue under it. An exchange first stores the files that are closed.

A rename is prepared (`RenamePreparation`), planned from one reading of the facts (`rename_plan`), carried out in one
commit or one batch, and finished: files in use and the pinner follow. What always holds: the facts are read and the
plan is made without an await between. A directory of many names is planned and moved in several steps, behind the
barrier, and planned again if part of it changed meanwhile. A crash leaves the whole rename or none of it. Trio thread
only.
"""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import chain, islice
from typing import NamedTuple

import msgspec

from lakefs_fuse.commits.change import OPERATIONS_AT_ONCE, Change
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.environment.failpoints import reached
from lakefs_fuse.errors import CacheError, FileError
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.meta.schema import PATH
from lakefs_fuse.sync.steps import finish_paced
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import DIRTY, OpenFile
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import RowSnapshot
from lakefs_fuse.vfs.ops.name_changes import NameChanges
from lakefs_fuse.vfs.ops.rename_plan import (
    LocalRenameFacts,
    MovedName,
    Planner,
    RenameFacts,
    Route,
    plan_in_steps,
    plan_local_rename,
    route_of,
)
from lakefs_fuse.vfs.ops.rename_preparation import RenamePreparation
from lakefs_fuse.vfs.ops.unlink import Unlinker
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
NAMES_AT_ONCE = OPERATIONS_AT_ONCE // 2
"""A rename of more names is planned and applied in steps: it has two operations for each."""
NAMES_PER_STEP = 96
"""Names that are planned between two turns of other tasks: 5 ms."""
PLANS_MAX = 3
"""Attempts to plan in steps while other tasks keep changing the facts; then the plan is made in one step."""
log = logging.getLogger(__name__)


class _Request(NamedTuple):
    """A requested rename: the source as it was looked up, and its new directory and name."""

    source: Entry
    parent: int
    name: bytes
    flags: int = 0
    is_copy: bool = False
    """The source stays: it must not change while the copy is planned and committed, and may be read."""

    @property
    def is_exchange(self) -> bool:
        return self.flags == RENAME_EXCHANGE


class _Ends(NamedTuple):
    """Both ends of a rename as they are now, with their paths. ``target`` is the entry that has the new name."""

    source: Entry
    target: Entry | None
    old: str
    new: str
    request: _Request

    @property
    def moving(self) -> list[Entry]:
        """The entries that move: one, or two in an exchange."""
        if self.target is None or not self.request.is_exchange:
            return [self.source]
        return [self.source, self.target]


def _finish(steps: Generator[None, None, Change]) -> Change:
    """Run a generator to its end without a turn of other tasks; return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]


class Renames:
    """Renames files and directories; see the module's head."""

    def __init__(
        self,
        namespace: Namespace,
        files: FileTable,
        names: NameChanges,
        committer: Committer,
        unlinker: Unlinker,
        writeback: WriteBackQueue,
        preparation: RenamePreparation,
        deletions: DeletionQueue,
    ) -> None:
        self._ns, self._files, self._names, self._committer = namespace, files, names, committer
        self._unlinker, self._writeback, self._preparation = unlinker, writeback, preparation
        self._deletions = deletions

    async def rename(self, parent_old: int, name_old: bytes, parent_new: int, name_new: bytes, flags: int) -> None:
        """Rename a file or directory of any size, atomically for every observer of the lake. Raises FileError as
        rename(2), and LakeError. Then nothing was renamed; if the store did not answer, all of it may appear later."""
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE) or flags == RENAME_NOREPLACE | RENAME_EXCHANGE:
            raise FileError(errno.EINVAL)
        self._ns.keys.checked_path(parent_new, name_new)
        if self._preparation.renamed.adopting:
            await self._preparation.renamed.wait_adopted()
        source, _ = await self._ns.lookup(parent_old, name_old)
        target, _ = await self._ns.lookup(parent_new, name_new)
        exchange = flags == RENAME_EXCHANGE
        if source is None or (exchange and target is None):
            raise FileError(errno.ENOENT)
        if target is not None:
            if target.inode == source.inode:
                return
            if flags == RENAME_NOREPLACE:
                raise FileError(errno.EEXIST)
            if not exchange:
                await self._check_replaceable(source, target)
        ends = [source, target] if exchange and target is not None else [source]
        await self._preparation.prepare(ends, None if exchange else target)
        if await self._rename(_Request(source, parent_new, name_new, flags), ends) is Route.HELD:
            await self._names.flush()
        if self._preparation.renamed.adopting:  # what was stored meanwhile
            await self._preparation.renamed.wait_adopted()
        for parent in {parent_old, parent_new}:
            self._ns.touch(parent)

    async def _check_replaceable(self, source: Entry, target: Entry) -> None:
        if target.is_dir:
            if not source.is_dir:
                raise FileError(errno.EISDIR)
            await self._ns.check_empty(target)
        elif source.is_dir:
            raise FileError(errno.ENOTDIR)

    def _read_ends(self, request: _Request) -> _Ends:
        """Read both ends as they are now. Another node may have renamed, replaced or removed the source meanwhile,
        created the new name, or moved one end below the other. Raises FileError as rename(2), and ESTALE if one of them
        must be looked up again: the kernel does that, and renames once more."""
        source, parent, name, flags, _ = request
        now, there = self._ns.tree.child_many([(source.parent, source.name), (parent, name)])
        if now is None:
            raise FileError(errno.ENOENT)
        if now.inode != source.inode:
            raise FileError(errno.ESTALE)
        if there is None:
            if flags == RENAME_EXCHANGE:
                raise FileError(errno.ENOENT)
        elif flags == RENAME_NOREPLACE:
            raise FileError(errno.EEXIST)
        elif flags != RENAME_EXCHANGE:
            if there.is_dir != now.is_dir:
                raise FileError(errno.EISDIR if there.is_dir else errno.ENOTDIR)
            if there.is_dir:
                self._ns.check_known_empty(there)
                if not self._ns.is_listed(there.inode):
                    raise FileError(errno.ESTALE)  # made, or announced to have names, since the lookup
        above = self._ns.prefix(parent)
        old = (above if now.parent == parent else self._ns.prefix(now.parent)) + now.name.decode(*PATH)
        ends = _Ends(now, there, old, above + name.decode(*PATH), request)
        if ends.new.startswith(ends.old + "/") or (there is not None and ends.old.startswith(ends.new + "/")):
            raise FileError(errno.EINVAL)  # no entry moves below itself
        return ends

    async def _rename(self, request: _Request, moving: list[Entry]) -> Route:
        """Carry out a prepared rename of the entries ``moving``; return by which route it reaches the store."""
        source, exchange = request.source, request.is_exchange
        file = self._files.get(source.inode)
        # A version that is being stored when its file is renamed is stored first, under the old name.
        async with file.publishing if file is not None and file.draft is not None else nullcontext():
            if file is not None and await self._preparation.is_stored_late(file):
                raise FileError(errno.ESTALE)  # a failed attempt has stored it: the next call publishes it first
            self._check_names(moving)
            self._forget_removed(moving)
            ends = self._read_ends(request)
            opened = None if ends.target is None or exchange else self._files.hold(ends.target.inode)
            done, route = ends, Route.LOCAL

            async def execute(*_: object) -> None:
                nonlocal done, route
                done = ends if opened is None else self._read_ends(request)  # other tasks ran
                done, route = await self._execute(done, opened)

            if opened is not None:
                await self._unlinker.unlink(opened, execute)
            else:
                await execute()
            if done.target is not None and not exchange:
                self._unlinker.forget_name(done.target)
            try:
                self._files.moved(None if exchange or source.flags & Flag.DIRECTORY else [source.inode])
            except CacheError as error:
                log.error("%s is %s now, which the journal does not say of all files: %s", ends.old, ends.new, error)
            for listener in self._ns.events.path_renamed:
                listener([(ends.old, ends.new), (ends.new, ends.old)][: len(ends.moving)])
        return route

    def _check_names(self, ends: Sequence[Entry]) -> None:
        """Raise FileError(EEXIST) if another client has the name of a file that is being written. The rename would move
        that client's file."""
        for file in [self._files.get(end.inode) for end in ends]:
            if file is not None and file.has_lost_name:
                raise FileError(errno.EEXIST, f"{file.key} was stored by another client meanwhile")

    def _forget_removed(self, ends: Sequence[Entry]) -> None:
        """Mark dirty files that another node has removed as not in the store. Their rows still name the version before,
        which must not come back under another name."""
        files, changed = self._files.by_inode, list[Entry]()
        is_of_directory = any(end.flags & Flag.DIRECTORY for end in ends)
        for inode in list(files) if is_of_directory else [end.inode for end in ends]:
            file = files.get(inode)
            if file is not None and file.state in DIRTY:
                row = self._ns.tree.entry(inode)
                if row is not None and self._ns.is_row_removed(row):
                    flags = row.flags | Flag.LOCAL
                    changed.append(msgspec.structs.replace(row, flags=flags, etag="", stamp=0, place=0, offset=0))
        if not changed:
            return
        batch = Batch()
        for row in changed:
            self._ns.tree.update(batch, row)
        self._ns.database.commit(batch)
        for row in changed:
            self._files.replaces(row, "")

    async def _execute(self, ends: _Ends, opened: OpenFile | None) -> tuple[_Ends, Route]:
        """Move a row, commit, or journal; return the ends as they were then, and the route. ``opened`` is the file that
        loses its name, if it is in use. Raises LakeError."""
        route = route_of(
            ends.moving,
            is_writeback=self._writeback.is_for(ends.old) and self._writeback.is_for(ends.new),
            is_held=bool(self._committer.held_until),
        )
        if route is Route.LOCAL:
            self._move_row(ends)
            return ends, route
        is_large = any(self._is_large(end) for end in ends.moving)
        if is_large and route is not Route.COMMITTED:  # a journaled change is applied in one step
            await self._names.flush()
            route = Route.COMMITTED
        now = ends

        def read_ends() -> _Ends:
            nonlocal now
            self._forget_removed(ends.moving)
            now = self._read_ends(ends.request)
            if now.source.flags & Flag.LOCAL and not ends.source.flags & Flag.LOCAL:
                raise FileError(errno.ESTALE)  # it was removed just now: there is nothing to commit
            return now

        if route is Route.COMMITTED:
            await self._commit(read_ends, is_paced=any(end.flags & Flag.DIRECTORY for end in ends.moving))
        else:
            async with self._committer.quiet():
                self._journal(read_ends(), route, opened)
        for end in ends.moving:
            if ends.request.is_exchange and end.is_local and (moved := self._ns.tree.entry(end.inode)) is not None:
                self._files.replaces(moved, "")
        return now, route

    # -- what is in the store

    async def _commit(self, read_ends: Callable[[], _Ends], *, is_paced: bool) -> None:
        """Commit a rename. Objects that are stored meanwhile at an old key are renamed, too. Raises LakeError, and the
        errors of ``read_ends``."""
        stored_before = self._deletions.stored_count
        change = await self._commit_now(read_ends, is_paced=is_paced)
        if self._deletions.stored_count != stored_before:
            self._preparation.renamed.rename_applied(change, self._deletions.stored_since(stored_before))

    def _journal(self, ends: _Ends, route: Route, opened: OpenFile | None) -> None:
        """Journal a rename: behind what was acknowledged before it, or (`Route.HELD`) to be sent immediately. Raises
        CacheError."""
        change = _finish(self._plan(ends))
        if route is Route.JOURNALED:
            self._withhold_older(ends.request.source, ends.old)
            self._names.enqueue(change, self._journal_versions(ends.source, ends.new, opened))
        else:
            self._committer.enqueue(change, self._journal_versions(ends.source, ends.new, opened))

    async def _commit_now(
        self, read_ends: Callable[[], _Ends], planner: Planner = plan_in_steps, *, is_paced: bool
    ) -> Change:
        """Plan and commit, behind the barrier if ``is_paced``; return the change. Errors of ``read_ends`` end the
        rename."""
        made: list[Change] = []

        def plan() -> Change:
            made.append(_finish(self._plan(read_ends(), planner=planner)))
            return made[-1]

        async def plan_paced() -> Change:
            made.append(await self._plan_paced(read_ends, planner))
            return made[-1]

        await self._preparation.catch_up()
        if is_paced:
            await self._commit_in_steps(plan_paced)
        else:
            await self._committer.commit(plan)
        return made[-1]

    async def commit_copy(self, source: Entry, parent: int, name: bytes, planner: Planner, *, replaces: bool) -> None:
        """Commit a copy of a file, or of a directory and all below it, as ``planner`` plans it. With ``replaces`` it
        may replace a file or an empty directory. Raises FileError as `rename`, and LakeError."""
        request = _Request(source, parent, name, 0 if replaces else RENAME_NOREPLACE, is_copy=True)
        there = self._ns.tree.child(parent, name)
        opened = None if there is None else self._files.hold(there.inode)

        def read_ends() -> _Ends:
            nonlocal there
            ends = self._read_ends(request)
            there = ends.target
            return ends

        async def execute(*_: object) -> None:
            await self._commit_now(read_ends, planner, is_paced=self._is_large(source))

        if opened is not None:
            await self._unlinker.unlink(opened, execute)
        else:
            await execute()
        if there is not None:
            self._unlinker.forget_name(there)
        self._ns.touch(parent)

    def _withhold_older(self, source: Entry, path: str) -> None:
        """Keep held changes from showing older bytes of the file at ``path``. If an acknowledged version waits for the
        store, it is stored under its new name only; no reader may see at ``path`` what an earlier rename put there.
        Raises CacheError."""
        file = self._files.get(source.inode)
        draft = None if file is None else file.draft
        if draft is not None and draft.sequence:
            self._committer.withhold(path, draft.sequence, self._writeback.sequence, self._committer.journal.newest)

    def _journal_versions(self, source: Entry, path: str, replaced: OpenFile | None) -> Batch:
        batch = Batch()
        self._unlinker.journal_moved(batch, self._files.get(source.inode), path)
        self._unlinker.journal_dropped(batch, replaced)
        return batch

    def _is_large(self, end: Entry) -> bool:
        """Return whether more names move than are committed in one step."""
        if not end.flags & Flag.DIRECTORY:
            return False
        below = self._ns.tree.below(end.inode, "")
        return sum(1 for _ in islice(below, NAMES_AT_ONCE)) == NAMES_AT_ONCE

    async def _commit_in_steps(self, plan: Callable[[], Awaitable[Change]]) -> None:
        """Commit in steps. ``plan`` raises the barrier, behind which nothing changes until the commit is applied."""
        barrier, is_raised = self._ns.tree.barrier, False

        async def planned() -> Change:
            nonlocal is_raised
            await barrier.wait_lowered()
            is_raised = True
            return await plan()

        try:
            await self._committer.commit(planned, in_steps=True)
        finally:
            if is_raised:
                barrier.lower()

    async def _plan_paced(self, read_ends: Callable[[], _Ends], planner: Planner) -> Change:
        """As `_plan`, behind the barrier, with turns of other tasks. If one of them changed the facts, plan again, for
        a copy without turns of those that read its source, the last time without any. Errors of ``read_ends`` end the
        rename."""
        for number in range(PLANS_MAX):
            ends = read_ends()
            if number:
                self._ns.tree.barrier.stop_readers()
            with self._ns.database.recording() as changed:
                change = await finish_paced(self._plan(ends, NAMES_PER_STEP, planner))
                ends = read_ends()
                if not self._concern_rename(changed.take(), ends):
                    return change
        return _finish(self._plan(read_ends(), planner=planner))

    def _concern_rename(self, keys: set[bytes], ends: _Ends) -> bool:
        """Return whether any of these changed rows belongs to a moving name, or to an object at its old or new path."""
        tree, inode, new_name = self._ns.tree, ends.source.inode, (ends.request.parent, ends.request.name)
        moves = [path.encode(*PATH) for path in (ends.old, ends.new)]
        if any(path == move or path.startswith(move + b"/") for path in tree.changed_paths(keys) for move in moves):
            return True
        for above, cookie in tree.changed_entries(keys):
            entry = tree.at(above, cookie)
            is_end = entry is not None and (entry.inode == inode or (above, entry.name) == new_name)
            if is_end or tree.barrier.has_all(above):
                return True
        return False

    def _plan(
        self, ends: _Ends, names_max: int = sys.maxsize, planner: Planner = plan_in_steps
    ) -> Generator[None, None, Change]:
        """Plan the commit of a rename, and yield after every ``names_max`` names. ``ends`` are as they are now."""
        facts = yield from self._read_facts(ends, names_max)
        change = yield from planner(facts, names_max)
        for at in range(0, len(change.operations), names_max):
            self._ns.keys.check_paths([each.path for each in change.operations[at : at + names_max]])
            yield
        return change

    def _read_facts(self, ends: _Ends, names_max: int) -> Generator[None, None, RenameFacts]:
        source, target, old, new, request = ends
        is_paced = names_max < sys.maxsize
        moving = self._below(old, new, source, behind=is_paced, is_frozen=request.is_copy)
        if is_paced:
            self._ns.tree.barrier.add(request.parent, request.name)
        replaced: Iterable[Deletion] = ()
        if request.is_exchange and target is not None:
            moving = chain(moving, self._below(new, old, target, behind=is_paced))
        elif target is not None and not target.is_dir:
            replaced = self._names.orphaned(new, target)
        end_inodes = (source.inode, target.inode if target is not None else 0)
        names: list[MovedName] = []
        rows = RowSnapshot({}, {}, {}, {})
        while some := list(islice(moving, min(names_max, NAMES_AT_ONCE))):
            own = [after for _, after, entry in some if not entry.flags & Flag.DIRECTORY]
            hides = dict(zip(own, self._ns.tree.own_etags(own), strict=True))
            for before, after, entry in some:
                orphans = tuple(self._names.orphaned(before, entry)) if entry.flags & Flag.LOCAL else ()
                is_end = entry.inode in end_inodes
                names.append(MovedName(before, after, entry, hides.get(after, ""), orphans, is_end))
            self._add_rows(rows, [(before, entry) for before, _, entry in some])
            yield
        leaving = target if request.is_exchange and source.is_local and target is not None else source
        above = self._names.hidden_parent(leaving)
        if above is not None:
            self._add_rows(rows, [above])
        return RenameFacts(tuple(names), rows, tuple(replaced), above)

    def _add_rows(self, rows: RowSnapshot, names: Iterable[tuple[str, Entry]]) -> None:
        """Add the rows from which operations on these paths and entries are made."""
        tree = self._ns.tree
        for path, entry in names:
            if entry.place and entry.place not in rows.objects and (row := tree.objects.get(entry.place)):
                rows.objects[entry.place] = row
            if entry.flags & Flag.SYMLINK:
                rows.target_by_inode[entry.inode] = tree.target(entry.inode)
            if entry.flags & Flag.XATTRS:
                rows.xattrs_by_inode[entry.inode] = tree.xattrs(entry.inode)
            if entry.flags & Flag.ATTRIBUTED and entry.is_plain and not entry.stamp:
                rows.dates[path, entry.etag] = tree.when_put(path, entry.etag)

    def _below(
        self, old: str, new: str, entry: Entry, *, behind: bool, is_frozen: bool = False
    ) -> Iterator[tuple[str, str, Entry]]:
        """Yield the entry and everything below it, with old and new paths. Files that are not in the store yet are
        included. With ``behind``, names are put behind the barrier before they are read, or frozen."""
        barrier = self._ns.tree.barrier
        if behind:
            barrier.add(entry.parent, entry.name, is_frozen=is_frozen)
        yield old, new, entry
        if not entry.flags & Flag.DIRECTORY:
            return
        if behind:
            barrier.add_all(entry.inode, is_frozen=is_frozen)
        for path, below in self._ns.tree.below(entry.inode, old):
            if behind and below.flags & Flag.DIRECTORY:
                barrier.add_all(below.inode, is_frozen=is_frozen)
            yield path, new + path[len(old) :], below

    # -- what is not in the store

    def _move_row(self, ends: _Ends) -> None:
        """Move the row of a file that is not in the store; it is stored under its new name. ``ends`` must be read in
        the same step of the loop: the target may have been stored since an earlier look. Raises LakeError; then
        nothing was moved."""
        tree, entry, parent, name = self._ns.tree, ends.source, ends.request.parent, ends.request.name
        self._ns.changing(entry.parent, entry.name)
        self._ns.changing(parent, name)
        plan = plan_local_rename(self._read_local_facts(ends))
        batch, file, there = Batch(), self._files.get(entry.inode), tree.child(parent, name)
        if there is not None:
            tree.remove(batch, there)
            self._unlinker.journal_dropped(batch, self._files.get(there.inode))
        tree.detach(batch, entry)
        cookie = 0 if there is None else there.cookie
        moved = tree.attach(batch, plan.row, parent, name, cookie=cookie, before=entry)
        with nullcontext() if file is None else file.restoring_names():
            self._files.replaces(moved, plan.copied_from)
            stays = file is not None and self._files.move(batch, file, ends.new)
            if plan.removal is not None:
                self._names.enqueue(plan.removal, batch)
            else:
                self._ns.database.commit(batch, sync=stays)
        self._files.updated(moved)
        reached("rename.moved")

    def _read_local_facts(self, ends: _Ends) -> LocalRenameFacts:
        entry, there, old = ends.source, ends.target, ends.old
        is_visible, orphans = self._names.is_visible(old), tuple(self._names.orphaned(old, entry))
        if there is None:
            return LocalRenameFacts(old, entry, is_visible, orphans)
        row = self._ns.tree.objects.get(there.place) if there.place else None
        etag = self._ns.own_etag(ends.new)
        return LocalRenameFacts(old, entry, is_visible, orphans, there, etag, row)
