"""The application of one record to the tree: what each operation changes in the rows.

`Applier` makes one for each record; `OrderedRules` decides about files. An operation sees what those before it did.
Names are read and written in one batch until a name occurs again, or its directory is missing or may go. Trio thread
only. A crash leaves whole batches; the record is applied again.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Set

import msgspec

from lakefs_fuse.commits.file_rules import KNOWN, NOTHING, RELOCATED, Effect, Place, Step
from lakefs_fuse.commits.name_history import OrderedRules
from lakefs_fuse.commits.path_tree import Carried, PathTree, Relocated, carry_over, lies_elsewhere, other_name
from lakefs_fuse.commits.record import (
    Mkdir,
    ObjectRef,
    Operation,
    Record,
    Remove,
    count_repeated,
    says_again,
    says_what,
)
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import NO_OBJECT, UNSET, Entry, Flag
from lakefs_fuse.meta.tombstones import Tombstone

TOGETHER_MAX = 512
"""Operations that are read together and written in one batch."""
COUNTED_PER_OPERATION = 50
"""Operations that are counted in the time in which one is applied."""
CARRIED_PER_OPERATION = 2
"""Names that are carried over in the time in which one operation is applied."""
CARRIED_OVER_MAX = 1_000_000
"""Operations. Beyond these, another node's rename changes inodes: keeping them takes 300 bytes of memory a name."""


class _Changes(msgspec.Struct):
    """The changes of some operations: rows for one batch, and what the watcher is notified of afterwards."""

    batch: Batch = msgspec.field(default_factory=Batch)
    files: list[tuple[Entry, Entry]] = []
    """Rows of files that change, as they were and as they will be."""
    tombstones: dict[bytes, Tombstone | None] = {}
    updated: list[Entry] = []
    relocated: list[Relocated] = []
    names: list[tuple[int, bytes]] = []
    """Parent and name of each name that the kernel may remember wrongly."""
    outdated: list[tuple[int, bytes]] = []
    """Parent and name of each name for which the store has to be asked."""
    directories: dict[int, None] = {}
    """Directories in which names come or go."""
    uncovered: set[int] = set()
    """Times of commits to apply again: a plain object that counted in place of their files, by its date, is gone."""


class Application:
    """One record that is being applied to the tree."""

    def __init__(
        self,
        paths: PathTree,
        record: Record,
        this: ObjectRef,
        stamp: int,
        *,
        whole: bool,
        own: bool = False,
        outdated: Mapping[str, str] = NOTHING,
        withdraws: bool = False,
    ) -> None:
        """``own``: this node made the change, and knew what it changed. ``outdated`` maps paths to ETags of plain
        objects that were known and are no longer there, as the store answered to `doubts`; `NOTHING` if it was not
        asked. ``whole``: the record is all that its commit says. ``withdraws``: the operations, which are on
        files, were applied under this stamp, and are taken back."""
        self._own, self._whole = own, whole
        self._paths, self._tree, self._watcher = paths, paths.tree, paths.watcher
        self._record, self._stamp, self._time = record, stamp, record.time
        self._order = OrderedRules(paths, record, this, stamp, own=own, outdated=outdated, withdraws=withdraws)
        self._rules = self._order.rules
        self._changes = _Changes()
        self._carried = Carried()
        self._parent: tuple[str, int | None] | None = None
        """The directory that was looked up last, until something is written."""

    def run(self) -> None:
        for _ in self.steps(len(self._record.operations) + 1):
            pass

    def steps(self, operations_max: int) -> Generator[None, None, None]:
        """Apply ``operations_max`` operations at a time, and yield after each step.

        At a yield everything so far is in the tree, and other tasks may change the tree before the next step."""
        if self._record.moves and (self._own or len(self._record.operations) <= CARRIED_OVER_MAX):
            names_max = CARRIED_PER_OPERATION * operations_max
            self._carried = yield from carry_over(self._paths, self._record, self._stamp, names_max, own=self._own)
            self._order.move(self._carried)
            if self._carried.directories:
                self._watcher.moved(self._record.moves)
        for above in () if self._own else {path.rpartition("/")[0] for pair in self._record.moves for path in pair}:
            if (directory := self._directory(above)) is not None:
                self._changes.directories[directory] = None
        said: dict[str, int] = {}
        yield from count_repeated(self._record.operations, said, COUNTED_PER_OPERATION * operations_max)
        to_come = said.copy()
        some: dict[str, Step] = {}
        leaving = set[str]()  # directories that may go with removals in `some`
        looked_at = set[str]()  # directories of those removals
        is_mark = False
        for number, operation in enumerate(self._record.operations, 1):
            path, is_again, is_mark = operation.path, is_mark, False
            is_last, is_only = True, self._whole and says_what(operation)
            if path in said and says_what(operation):
                to_come[path] -= 1
                is_last, is_only = not to_come[path], self._whole and said[path] == 1
                is_mark = not is_last and says_again(operation, self._record.operations[number])
            if is_mark:
                if not number % operations_max:
                    self._apply_all(some)
                    yield
                continue
            is_removal = isinstance(operation, Remove)
            removes_directory = isinstance(operation, Remove) and operation.directory
            is_apart = removes_directory and (path in some or self._paths.directory(path) is not None)
            slash = b"/" if removes_directory or isinstance(operation, Mkdir) else b""
            above, _, last = path.rpartition("/")
            if some and (is_apart or self._builds_on(operation, some, leaving)):
                self._apply_all(some)
            if not some:
                leaving.clear()
                looked_at.clear()
            if is_removal and above not in looked_at:
                looked_at.add(above)
                leaving.update(self._paths.implied_above(above))
            some[path] = step = Step(
                operation, self._directory(above), last.encode() + slash, path.encode() + slash,
                is_last, is_only, is_again,
            )  # fmt: skip
            is_full = len(some) >= TOGETHER_MAX or not number % operations_max
            if is_full or is_apart or (step.parent is None and not is_removal):
                self._apply_all(some)
            if not number % operations_max:
                yield
        self._apply_all(some)
        for directory in self._carried.directories:
            self._paths.prune(directory)

    def _builds_on(self, operation: Operation, some: Mapping[str, Step], leaving: Set[str]) -> bool:
        """Return whether the operations in ``some`` must be written before this one is read.

        That is so where one of them is on the same name, or where this one sets a name in one of the directories
        ``leaving``, which may go with them, or in a directory that has to be made."""
        path, above = operation.path, operation.path.rpartition("/")[0]
        if path in some:
            return True
        if isinstance(operation, Remove):
            return False
        return above in leaving or path in leaving or self._directory(above) is None

    def _directory(self, path: str) -> int | None:
        if self._parent is None or self._parent[0] != path:
            self._parent = path, self._paths.directory(path)
        return self._parent[1]

    def _apply_all(self, some: dict[str, Step]) -> None:
        """Apply operations on different names, and empty ``some``."""
        if some:
            self._read(list(some.values()))
            for step in some.values():
                self._apply(step)
            self._write()
        some.clear()

    def _read(self, steps: list[Step]) -> None:
        """Read what is known of the names, and number the objects."""
        tombstones = self._tree.tombstones.get_many([step.raw for step in steps])
        for step, tombstone in zip(steps, tombstones, strict=True):
            step.buried = step.tombstone = tombstone
        below = [(step.parent, step) for step in steps if step.parent is not None]
        if below:
            entries = self._tree.named_many([(parent, step.name) for parent, step in below])
            for (_, step), entry in zip(below, entries, strict=True):
                step.row = entry
                step.before = step.current = None if _is_file_elsewhere_removed(entry, step.buried) else entry
        new = [at for at in below if at[1].current is None and not isinstance(at[1].operation, Remove)]
        if new:
            others = self._tree.named_many([(parent, other_name(step.name)) for parent, step in new])
            for (_, step), entry in zip(new, others, strict=True):
                step.other = entry
        self._order.read(steps)

    def _apply(self, step: Step) -> None:
        operation = step.operation
        if isinstance(operation, Mkdir):
            self._mkdir(step, operation)
        elif isinstance(operation, Remove) and operation.directory:
            self._remove_directory(step)
        else:
            self._order.apply(step)
            self._change_file(step)
        if step.tombstone != step.buried:
            self._changes.tombstones[step.raw] = step.tombstone

    def _write(self) -> None:
        changes, self._changes = self._changes, _Changes()
        self._parent = None
        if changes.files:
            self._tree.update_files(changes.batch, changes.files)
        if changes.tombstones:
            self._tree.tombstones.write(changes.batch, changes.tombstones)
        self._order.write(changes.batch)
        if not self._own:
            self._paths.touch(changes.batch, changes.directories, self._time)
        for time in changes.uncovered:  # in one batch with what covered their files: a crash or error loses neither
            self._paths.commits.forget_with(changes.batch, time)
        self._paths.commit(changes.batch)
        in_use = self._watcher.in_use
        if updated := [entry for entry in changes.updated if entry.inode in in_use]:
            self._watcher.updated(updated)
        if relocated := [file for file in changes.relocated if file.entry.inode in in_use]:
            self._watcher.relocated(relocated)
        for file in changes.relocated:
            self._watcher.changing(file.entry.parent, file.entry.name)
        for parent, name in changes.names:
            self._paths.notify(parent, name)
        for parent, name in changes.outdated:
            self._watcher.outdated(parent, name)
        for directory in changes.directories:
            self._paths.prune(directory)

    # -- files

    def _change_file(self, step: Step) -> None:
        """Add what the rules made of a file to the changes."""
        changes, row, entry = self._changes, step.row, step.current
        changes.uncovered |= step.uncovered
        if step.relists and step.parent is not None:
            self._tree.forget_listing(changes.batch, step.parent)
        if step.is_outdated and step.parent is not None:
            changes.outdated.append((step.parent, step.name))
        if entry is None:
            step.current = None if row is None else self._drop(row)
        elif row is None or step.effect == Effect.SET:
            self._set(step, row, entry)
        elif step.effect == Effect.NOTED:
            self._tree.update(changes.batch, entry)
        elif step.effect in (Effect.UPDATED, Effect.RELOCATED):
            step.current = entry = self._update(row, entry)
            if step.relocated is not None:
                changes.relocated.append(Relocated(*step.relocated, entry))
            else:
                self._finish(step, row, entry)

    def _drop(self, row: Entry) -> Entry | None:
        """Remove the row of a file unless the file is being written here; return what stays."""
        left: Entry | None = row
        if not self._paths.keeps(row):
            self._tree.remove(self._changes.batch, row)
            left = None
        elif row.stamp == self._stamp and not self._own:  # put by the record itself: what stays is older than that
            left = msgspec.structs.replace(row, stamp=self._stamp - 1)
            self._tree.update(self._changes.batch, left)
        self._changes.names.append((row.parent, row.name))
        self._changes.directories[row.parent] = None
        return left

    def _set(self, step: Step, row: Entry | None, entry: Entry) -> None:
        parent = step.parent
        if parent is None:
            parent = self._paths.ensure_directory(step.operation.path.rpartition("/")[0], self._time)
        if row is not None and row.flags & Flag.XATTRS and self._paths.keeps(row):
            step.xattrs = self._tree.xattrs(row.inode)  # perhaps set here since; they go with what is written
        flags = entry.flags & ~Flag.XATTRS | (Flag.XATTRS if step.xattrs else 0)
        if row is None:
            flags |= Flag.SHADOWED if step.other else 0
            self._changes.directories[parent] = None
            entry = self._tree.insert_entry(
                self._changes.batch, msgspec.structs.replace(entry, parent=parent, flags=flags)
            )
        else:
            flags |= row.flags & Flag.SHADOWED
            entry = msgspec.structs.replace(entry, parent=parent, cookie=row.cookie, inode=row.inode, flags=flags)
            entry = self._replace(row, entry, step.operation.path, step.target)
        if step.target:
            self._tree.set_target(self._changes.batch, entry.inode, step.target)
        step.current = entry
        self._finish(step, row, entry)

    def _finish(self, step: Step, row: Entry | None, entry: Entry) -> None:
        xattrs = step.xattrs or {}
        if entry.flags & Flag.XATTRS or (row is not None and row.flags & Flag.XATTRS and step.xattrs is not None):
            self._tree.set_xattrs(self._changes.batch, entry.inode, xattrs)
        self._changes.updated.append(entry)
        if row is None or row.inode != entry.inode or _shown(row) != _shown(entry):
            self._changes.names.append((entry.parent, entry.name))

    def _replace(self, current: Entry, entry: Entry, path: str, target: bytes) -> Entry:
        if target:
            same = bool(current.flags & Flag.SYMLINK) and self._tree.target(current.inode) == target
        else:
            place = Place(entry.place, entry.offset, entry.etag)
            same = current.size == entry.size and self._rules.is_at(current, place, path)
        if not (same and not self._is_redated(current, entry)) and not self._paths.keeps(current):
            return self._tree.renew_inode(self._changes.batch, entry)
        if self._own and not entry.flags & Flag.ATTRIBUTED:
            in_use = current.inode in self._watcher.in_use
            entry = msgspec.structs.replace(
                entry, ctime_ns=self._watcher.ctime_ns(current) if in_use else current.ctime_ns
            )
        self._changes.files.append((current, entry))
        return entry

    def _is_redated(self, current: Entry, entry: Entry) -> bool:
        """Return whether a file needs another inode because of its mtime, which the kernel never updates.

        The kernel may hold that of the row or, for an object that was only listed, LastModified. A file that is open or
        being written here keeps its inode."""
        if self._own or entry.flags & Flag.SYMLINK:
            return False
        is_listed = not (current.stamp or current.place or current.flags & (NO_OBJECT | Flag.ATTRIBUTED))
        is_known = current.mtime_ns == entry.mtime_ns and (not is_listed or current.ctime_ns == entry.mtime_ns)
        return not is_known and not self._paths.keeps(current) and not self._watcher.redated(current)

    def _update(self, current: Entry, entry: Entry) -> Entry:
        """Give the same bytes other attributes or another place, and return the new row."""
        if self._is_redated(current, entry):
            return self._tree.renew_inode(self._changes.batch, entry)
        self._changes.files.append((current, entry))
        return entry

    # -- directories

    def _remove_directory(self, step: Step) -> None:
        current, batch = step.current, self._changes.batch
        if self._rules.is_older(step, ""):
            return
        step.tombstone = Tombstone(self._stamp, self._stamp)
        if current is None:
            return
        if self._tree.has_children(current.inode):  # it stays for as long as they do
            bare = msgspec.structs.replace(
                current, stamp=0, flags=Flag.DIRECTORY, mode=UNSET, uid=UNSET, gid=UNSET, ctime_ns=self._time
            )
            self._tree.update(batch, bare)
            self._tree.set_xattrs(batch, current.inode, {})
            return
        self._tree.remove(batch, current)
        self._tree.show_file(batch, current)
        self._paths.forget_paths()
        self._changes.names.append((current.parent, current.name))
        self._changes.directories[current.parent] = None

    def _mkdir(self, step: Step, operation: Mkdir) -> None:
        current, parent, batch = step.current, step.parent, self._changes.batch
        if self._rules.is_older(step, ""):
            return
        if parent is None:
            parent = self._paths.ensure_directory(operation.path.rpartition("/")[0], self._time)
        flags = Flag.DIRECTORY | KNOWN | (Flag.XATTRS if operation.xattrs else 0)
        attributes = {
            "mode": operation.mode, "uid": operation.uid, "gid": operation.gid, "mtime_ns": operation.mtime_ns,
            "ctime_ns": self._time, "stamp": self._stamp,
        }  # fmt: skip
        step.tombstone = None
        if current is None:
            self._changes.directories[parent] = None
            entry = self._paths.insert_directory(batch, parent, operation.path, flags, step.other, **attributes)
        else:
            flags |= current.flags & (Flag.MARKER | Flag.LISTED)
            if self._own:
                attributes["ctime_ns"] = current.ctime_ns
            entry = msgspec.structs.replace(current, flags=flags, **attributes)
            self._tree.update(batch, entry)
        if current is None or _shown(current) != _shown(entry):
            self._changes.names.append((parent, entry.name))
        if operation.xattrs or (current is not None and current.flags & Flag.XATTRS):
            self._tree.set_xattrs(batch, entry.inode, operation.xattrs)


def _is_file_elsewhere_removed(row: Entry | None, tombstone: Tombstone | None) -> bool:
    """Return whether a row is of a file elsewhere that was removed; it stays while the file is being written here."""
    if row is None or tombstone is None:
        return False
    return lies_elsewhere(row) and RELOCATED < row.stamp < tombstone.stamp


def _shown(entry: Entry) -> tuple[int, ...]:
    """Return what the kernel remembers of an inode."""
    return entry.mode, entry.uid, entry.gid, entry.size, entry.mtime_ns, entry.flags & (Flag.SYMLINK | Flag.SHADOWED)
