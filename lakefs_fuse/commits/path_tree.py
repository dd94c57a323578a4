"""The tree by paths, as commits name it: creates missing directories, removes empty ones, and moves rows.

What always holds (*implied directories*): a directory that no commit, marker or listing names exists only while
something is below it. The `Watcher` is notified of every change of a name in the step that makes it. Trio thread only.
Inodes of paths are cached in memory until the paths may lead elsewhere; a crash leaves the tree's rows.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import msgspec

from lakefs_fuse.commits.record import THIS, Mkdir, ObjectRef, Put, Record, Remove, Symlink
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import NO_OBJECT, ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.tombstones import Tombstone, bury
from lakefs_fuse.meta.tree import Tree

MOVED_MAX = 512
"""Operations of a record that moves rows. With more, moved names that have no history get none."""
ROWS_MAX = 512
"""Names that are read, or written, together."""
READ_PER_NAME = 32
"""Operations that are sorted by their paths in the time in which one name is checked."""


class Relocated(NamedTuple):
    """A file whose bytes, at ``offset`` of a version of an object before, are now where ``entry`` says."""

    key: str
    etag: str
    offset: int
    entry: Entry


class Watcher:
    """A listener for what commits change; the filesystem overrides what it needs."""

    in_use: Container[int] = ()
    """Inodes of the files that are open or not durable: `keeps`, `is_new`, `ctime_ns`, `updated` and `relocated` are
    called only for these."""

    def keeps(self, entry: Entry, *, own: bool) -> bool:
        """Return whether the file is being written here, and keeps its inode.

        If its name is being removed here, only a change of this node (``own``), which may be the removal, ends that."""
        return False

    def is_new(self, entry: Entry) -> bool:
        """Return whether the file was created here, and is not in the store.

        So it did not begin as a version of the file that other nodes have at its name."""
        return False

    def redated(self, entry: Entry) -> bool:
        """Record that a file's mtime changes, and return whether the file is open here.

        The kernel ignores the change for an inode that it holds. An open file keeps its inode until the last close."""
        return False

    def ctime_ns(self, entry: Entry) -> int:
        """Return when an inode was last changed here; this node's own commits do not change that time."""
        return entry.ctime_ns

    def changing(self, parent: int, name: bytes) -> None:
        """Protect a name that changes now from listings under way, which must not undo that."""

    def changed(self, parent: int, name: bytes) -> None:
        """Invalidate a name that the kernel may remember wrongly."""

    def outdated(self, parent: int, name: bytes) -> None:
        """Have the store asked which plain object is at the key of a name, when the name is used."""

    def updated(self, entries: Sequence[Entry]) -> None:
        """Follow rows of files that have other attributes, another place or another name."""

    def relocated(self, files: Sequence[Relocated]) -> None:
        """Follow files whose bytes are the same, but in another place."""

    def restored(self, entries: Sequence[Entry]) -> None:
        """Follow rows of names that are what other nodes' commits say again: a change made here was withdrawn."""

    def moved(self, moves: Sequence[tuple[str, str]]) -> None:
        """Follow names that moved, by their paths before and after: files in use may have other paths."""

    def root_changed(self) -> None:
        """Follow names that come or go in the root, which has no row."""


class PathTree:
    """The tree by paths; see the module."""

    def __init__(self, database: Database, tree: Tree, watcher: Watcher, commits: CommitRows) -> None:
        self.database, self.tree, self.watcher, self.commits = database, tree, watcher, commits
        self._directories: dict[str, int] = {}
        """Inodes by path; within `editing`, 0 for a directory that does not exist."""
        self._is_editing = self._is_quiet = self._is_own = False
        self.commit: Callable[[Batch], None] = database.commit
        """Commits rows of what is edited. Raises CacheError."""

    @contextmanager
    def editing(self, *, quiet: bool = False, own: bool = False) -> Iterator[None]:
        """Edit the tree; cached paths are forgotten before and after.

        ``quiet``: this node's kernel made the change itself, so nothing is invalidated. ``own``: the journal or a
        stored commit of this node contains the change, so its rows stay in memory while the disk is full. If the
        daemon dies, the next one applies it again."""
        self._is_editing, self._is_quiet, self._is_own = True, quiet, own
        self.commit = self.database.commit_volatile if own else self.database.commit
        self._directories.clear()
        try:
            yield
        finally:
            self._is_editing = self._is_quiet = self._is_own = False
            self.commit = self.database.commit
            self._directories.clear()

    def forget_paths(self) -> None:
        """Forget cached paths, because they lead elsewhere now, or other tasks ran."""
        self._directories.clear()

    def find_many(self, paths: Sequence[bytes]) -> list[Entry | None]:
        """Return, for each path, the directory if it ends in a slash, otherwise the file."""
        names = []
        directories: dict[bytes, int] = {}
        for path in paths:
            above, _, name = path.removesuffix(b"/").rpartition(b"/")
            if above not in directories:
                directories[above] = self.directory(above.decode()) or 0
            names.append((directories[above], name + b"/" if path.endswith(b"/") else name))
        return self.tree.named_many(names)

    def child(self, path: str) -> Entry | None:
        """Return the directory of a path, or else the file."""
        above, _, name = path.rpartition("/")
        parent = self.directory(above)
        return None if parent is None else self.tree.child(parent, name.encode(*schema.PATH))

    def keeps(self, entry: Entry) -> bool:
        """Return whether the file is in use, and its inode stays (`Watcher.keeps`)."""
        return entry.inode in self.watcher.in_use and self.watcher.keeps(entry, own=self._is_own)

    def directory(self, path: str) -> int | None:
        """Return the inode of a directory by its path ("" is the root); None if there is none."""
        if not path:
            return ROOT_INODE
        known = self._directories.get(path)
        if known is None:
            above, _, name = path.rpartition("/")
            parent = self.directory(above)
            entry = None if parent is None else self.tree.named(parent, name.encode(*schema.PATH) + b"/")
            if entry is None and not self._is_editing:
                return None
            known = self._directories[path] = 0 if entry is None else entry.inode
        return known or None

    def ensure_directory(self, path: str, time: int) -> int:
        """Return the inode of a directory; create it if it is missing, because something is below it."""
        found = self.directory(path)
        if found is not None:
            return found
        above, _, name = path.rpartition("/")
        parent = self.ensure_directory(above, time)
        batch, raw = Batch(), name.encode(*schema.PATH)
        entry = self.insert_directory(
            batch, parent, path, Flag.DIRECTORY, self.tree.named(parent, raw), mtime_ns=time, ctime_ns=time
        )
        self.commit(batch)
        self.notify(parent, raw)
        return entry.inode

    def insert_directory(
        self, batch: Batch, parent: int, path: str, flags: int, file: Entry | None, **attributes: int
    ) -> Entry:
        """Insert a missing directory; ``file`` is the file with its name, if any. The caller calls `notify`."""
        if file is not None:
            self.tree.update(batch, msgspec.structs.replace(file, flags=file.flags | Flag.SHADOWED))
        entry = self.tree.insert(batch, parent, path.rpartition("/")[2].encode(*schema.PATH), flags, **attributes)
        self._directories[path] = entry.inode
        return entry

    def prune(self, inode: int) -> None:
        """Remove a directory, and those above it, while they are implied and empty."""
        while inode != ROOT_INODE:
            entry = self.tree.entry(inode)
            if entry is None or not _is_implied(entry) or self.tree.has_children(inode):
                return
            batch = Batch()
            self.tree.remove(batch, entry)
            self.tree.show_file(batch, entry)
            self.commit(batch)
            self._directories.clear()
            self.notify(entry.parent, entry.name)
            inode = entry.parent

    def implied_above(self, path: str) -> list[str]:
        """Return the directories, ``path`` and those above it, that may go with the last name in ``path``."""
        found: list[str] = []
        while path and (inode := self.directory(path)) is not None:
            entry = self.tree.entry(inode)
            if entry is None or not _is_implied(entry):
                break
            found.append(path)
            path = path.rpartition("/")[0]
        return found

    def touch(self, batch: Batch, directories: Iterable[int], time: int) -> None:
        """Set the times of directories in which names came or went at ``time``.

        A directory keeps its times if the same commit, or a later one, has set them."""
        for inode in directories:
            if inode == ROOT_INODE:
                self.watcher.root_changed()
                continue
            entry = self.tree.entry(inode)
            is_earlier = entry is not None and max(entry.ctime_ns, entry.stamp) < time  # its mtime may have been set
            if entry is not None and is_earlier and not self.tree.is_in_batch(batch, entry):
                self.tree.update(batch, msgspec.structs.replace(entry, mtime_ns=time, ctime_ns=time))

    def notify(self, parent: int, name: bytes) -> None:
        """Notify the watcher that a name is something else now."""
        self.watcher.changing(parent, name)
        if not self._is_quiet:
            self.watcher.changed(parent, name)


# -- moves: renames keep identity. The rows of what a commit moved move before its operations are applied to them.
#
# A move is only a hint, and followed only if nothing is lost by it: an operation of the record names everything that is
# known below the source (unless it is not in the store yet), nothing newer is known of either name, and no directory
# with something in it is in the way. Otherwise the operations alone make the same names, with other inodes.

Made: TypeAlias = dict[str, Put | Symlink | Mkdir]
"""What a record says of each path; the path of a directory ends in a slash."""


class Replaced(NamedTuple):
    """What else was known of a file that a move replaced, and whose rows are deleted with it."""

    object: ObjectRef | None
    xattrs: dict[str, bytes]
    target: bytes


class Carried(NamedTuple):
    """The result of `carry_over`.

    ``directories`` are those that rows left, none if nothing moved. ``before`` has, by path, the files that were at the
    targets of moves, and, unless the record has more than `MOVED_MAX` operations, those at the names that rows left."""

    directories: Sequence[int] = ()
    before: Mapping[str, Entry] = MappingProxyType({})
    replaced: Mapping[int, Replaced] = MappingProxyType({})
    """By inode, of the files that were at the targets."""


def lies_elsewhere(entry: Entry) -> bool:
    """Return whether a file is elsewhere: its bytes are not at its own key."""
    return bool(entry.place or entry.flags & Flag.SYMLINK) and not entry.flags & Flag.LOCAL


def is_hiding(entry: Entry, etag: str) -> bool:
    """Return whether a commit put this file, which is elsewhere, in place of the plain object with this ETag."""
    return lies_elsewhere(entry) and entry.stamp > 0 and entry.etag == etag


def other_name(sort_name: bytes) -> bytes:
    """Return the sort name of the directory with a file's name, or of the file with a directory's name."""
    return sort_name[:-1] if sort_name.endswith(b"/") else sort_name + b"/"


def when_replaced(known: Entry | None, tombstone: Tombstone | None) -> int:
    """Return the stamp of the newest file elsewhere that is known of a name; 0 if none is known.

    It is the file that is there, or over which a listed object counts, and it ended those before it."""
    if known is None or known.flags & Flag.LOCAL:
        return 0
    if known.place or known.flags & Flag.SYMLINK:
        return known.stamp
    return tombstone.floor if _is_over_another(known) and tombstone is not None else 0


def carry_over(
    paths: PathTree, record: Record, stamp: int, names_max: int, *, own: bool = False
) -> Generator[None, None, Carried]:
    """Move the rows of a record's ``moves``, in steps of some ``names_max`` names.

    Other tasks may change the tree between steps; what they changed is checked again in the step that moves the rows.
    ``own``: this node made the change."""
    return (yield from _CarryOver(paths, record, stamp, min(ROWS_MAX, names_max), own).steps())


class _CarryOver:
    """One call of `carry_over`."""

    def __init__(self, paths: PathTree, record: Record, stamp: int, names_max: int, own: bool) -> None:
        self._paths, self._tree, self._record, self._stamp = paths, paths.tree, record, stamp
        self._names_max, self._own = names_max, own
        self._sources = {source for source, _ in record.moves}
        self._made: Made = {}
        self._gone: dict[str, Remove] = {}
        self._before: dict[str, Entry] = {}
        self._replaced: dict[int, Replaced] = {}
        self._keeps_files = len(record.operations) <= MOVED_MAX
        self._walked: dict[int, tuple[str, tuple[str, str]]] = {}
        """Directories that were read, by inode: their path, and the move to which they belong."""

    def steps(self) -> Generator[None, None, Carried]:
        for number, operation in enumerate(self._record.operations, 1):
            if isinstance(operation, Remove):
                self._gone[operation.path + "/" * operation.directory] = operation
            elif isinstance(operation, Mkdir):
                self._made[operation.path + "/"] = operation
            elif isinstance(operation, Put | Symlink):
                self._made[operation.path] = operation
            if not number % (READ_PER_NAME * self._names_max):
                yield
        if self._names_max > len(self._record.operations):  # the caller runs all steps without a pause
            tops = [self._movable(move) for move in self._record.moves] if self._is_each_another() else [None]
            if not all(tops):
                return Carried()
            below = []
            for move, names in self._all_below(tops):
                if not self._is_covered(names, move):
                    return Carried()
                below.append((move, names))
            # A row that one move frees may lie below another move, which reads it again.
            for move, names in below if len(self._record.moves) == 1 else self._all_below():
                self._free_from_keys(names, move)
            return self._switch()
        with self._paths.database.recording() as changed:
            if not (self._is_each_another() and all(map(self._movable, self._record.moves))):
                return Carried()
            has_keys = False
            for move, names in self._all_below():
                if not self._is_covered(names, move):
                    return Carried()
                has_keys = has_keys or any(_may_have_key(entry) for _, entry in names)
                for _, entry in names:
                    self._paths.watcher.changing(entry.parent, entry.name)
                yield
            others = set[bytes]()
            for move, names in self._all_below() if has_keys else ():
                others |= changed.take()
                self._free_from_keys(names, move)
                changed.take()  # the rows just written here
                yield
            late = self._tree.changed_entries(others | changed.take())
        is_movable = self._is_each_another() and all(map(self._movable, self._record.moves))
        return self._switch() if is_movable and self._is_late_covered(late) else Carried()

    def _all_below(
        self, tops: Sequence[Entry | None] = ()
    ) -> Iterator[tuple[tuple[str, str], list[tuple[str, Entry]]]]:
        """Yield each move with names of `_below`; ``tops`` are the sources, if they were read in this step."""
        moves = zip_longest(self._record.moves, tops)
        return ((move, names) for move, top in moves for names in self._below(move, top))

    def _is_each_another(self) -> bool:
        """Return whether all moves have different sources and different targets.

        A commit of several renames may rename one name again, once another file has it, or replace what it renamed."""
        moves = self._record.moves
        if len({target for _, target in moves}) < len(moves):
            return False
        sources = map(self._paths.child, self._sources) if len(moves) > 1 else ()
        return len({None if entry is None else entry.inode for entry in sources}) in (0, len(moves))

    def _below(self, move: tuple[str, str], top: Entry | None) -> Iterator[list[tuple[str, Entry]]]:
        """Yield the source and all that is below it, with paths, some names at a time.

        ``top`` is the source, if it is known. Entries are as they are when they are yielded."""
        source, _ = move
        top = top or self._paths.child(source)
        if top is None:
            return
        some = [(source, top)]
        pending = [(top.inode, source)] if top.flags & Flag.DIRECTORY else []
        while pending:
            inode, path = pending.pop()
            self._walked[inode] = path, move
            after, is_whole = 0, False
            while not is_whole:
                children = list(islice(self._tree.children(inode, after), self._names_max))
                is_whole = len(children) < self._names_max
                for entry in children:
                    after, below = entry.cookie, f"{path}/{entry.name.decode(*schema.PATH)}"
                    some.append((below, entry))
                    if entry.flags & Flag.DIRECTORY:
                        pending.append((entry.inode, below))
                yield some
                some = []
        if some:
            yield some

    def _is_late_covered(self, late: Iterable[tuple[int, int]]) -> bool:
        """Return whether the record covers the sources, and what has changed since it was checked.

        These names are then freed from their keys, too."""
        by_move: dict[tuple[str, str], list[tuple[str, Entry]]] = {}
        for move in self._record.moves:
            top = self._paths.child(move[0])
            if top is None or (top.flags & Flag.DIRECTORY and top.inode not in self._walked):
                return False
            by_move[move] = [(move[0], top)]
        for parent, cookie in late:
            entry = self._tree.at(parent, cookie) if parent in self._walked else None
            if entry is None:
                continue
            if entry.flags & Flag.DIRECTORY and entry.inode not in self._walked:
                return False
            path, move = self._walked[parent]
            by_move[move].append((f"{path}/{entry.name.decode(*schema.PATH)}", entry))
        for move, names in by_move.items():
            if not self._is_covered(names, move):
                return False
            self._free_from_keys(names, move)
        return True

    def _movable(self, move: tuple[str, str]) -> Entry | None:
        """Return the source if it is what the record renamed, and nothing is in the way; otherwise None."""
        paths, (source, target) = self._paths, move
        entry, operation = paths.child(source), self._made.get(target)
        if entry is None:
            return None
        if not self._own and entry.inode in paths.watcher.in_use and paths.watcher.is_new(entry):
            return None  # another node renamed its own file of that name
        if not self._own and not _is_renamed_version(paths, entry, operation, self._record):
            return None
        is_free = target in self._sources or _is_free(paths, entry, target, operation, self._stamp, self._own)
        return entry if is_free else None

    def _is_covered(self, names: Sequence[tuple[str, Entry]], move: tuple[str, str]) -> bool:
        """Return whether the record says where all names are now, and what now has their earlier names.

        It must be the newest that is known of them. Files that are not in the store yet need no operation. One that a
        directory hides does: if the node that renamed had not heard of it, it stays."""
        source, target = move
        sources = [path + "/" if found.flags & Flag.DIRECTORY else path for path, found in names]
        keys = [target + path[len(source) :] for path in sources]
        tombstones = self._tree.tombstones.get_many([key.encode(*schema.PATH) for key in keys])
        for (before, found), old, key, tombstone in zip(names, sources, keys, tombstones, strict=True):
            if found.stamp > self._stamp:
                return False
            if found.flags & Flag.LOCAL:
                continue
            operation, removal = self._made.get(key), self._gone.get(old)
            if (
                operation is None
                or (removal is None and old not in self._made)
                or not _is_meant(found, before, operation, self._record, self._own)
                or (removal is not None and not is_removing(self._tree, removal, found))
                or (removal is not None and not removal.by_date and _is_over_another(found))
                or (tombstone is not None and max(tombstone.newest, tombstone.unlisted[1]) > self._stamp)
            ):
                return False
            if self._keeps_files and not found.flags & Flag.DIRECTORY:
                self._before[before] = found
        return True

    def _free_from_keys(self, names: Sequence[tuple[str, Entry]], move: tuple[str, str]) -> None:
        """Change the rows to say that plain objects stay at their keys when their names move.

        A file does not hide at its new path what it hid before; that stays gone at the old one, even if the record does
        not name it. A file that is not in the store yet replaces nothing at its new path, whatever it replaced before;
        but if another node renamed the file that it replaces, it goes along with that."""
        tree, watcher = self._tree, self._paths.watcher
        plain = [(path, found) for path, found in names if not found.place and not found.flags & NO_OBJECT]
        numbers = tree.objects.numbers([(path, found.etag, found.size) for path, found in plain]) if plain else []
        changes = [
            (found, msgspec.structs.replace(found, place=number, etag=""))
            for (_, found), number in zip(plain, numbers, strict=True)
        ]
        relocated = [
            Relocated(path, found.etag, 0, freed)
            for (path, found), (_, freed) in zip(plain, changes, strict=True)
            if freed.inode in watcher.in_use
        ]
        hiding = [
            (path.encode(*schema.PATH), found)
            for path, found in names
            if found.etag and (found.place or found.flags & Flag.SYMLINK) and not found.is_local
        ]
        changes += [(found, msgspec.structs.replace(found, etag="")) for _, found in hiding]
        changes += [
            (found, msgspec.structs.replace(found, etag="", stamp=0, place=0, offset=0))
            for path, found in names
            if found.flags & (Flag.LOCAL | Flag.DIRECTORY) == Flag.LOCAL
            and (found.etag or found.stamp)
            and (self._own or path != move[0])
        ]
        if not changes:
            return
        batch = Batch()
        tree.update_files(batch, changes)
        if hiding:
            tombstones = zip(hiding, tree.tombstones.get_many([path for path, _ in hiding]), strict=True)
            buried = {path: bury(known, etag=found.etag, at=found.stamp) for (path, found), known in tombstones}
            tree.tombstones.write(batch, buried)
        self._paths.commit(batch)
        if relocated:
            watcher.relocated(relocated)

    def _switch(self) -> Carried:
        """Move each source to its target: in one batch if it is one rename or an exchange."""
        paths, moves, batch = self._paths, self._record.moves, Batch()
        moving = [(found, target) for source, target in moves if (found := paths.child(source)) is not None]
        is_one = self._is_one_change()
        for found, _ in moving:
            paths.tree.detach(batch, found)
            paths.tree.show_file(batch, found)
            paths.notify(found.parent, found.name)
        leaving = {found.inode for found, _ in moving}
        if not is_one:
            batch = self._commit(batch)
        attached = []
        for found, target in moving:
            if self._own and found.flags & (Flag.DIRECTORY | Flag.SYMLINK):  # the kernel keeps the ctime of a file
                found = msgspec.structs.replace(found, ctime_ns=self._record.time)
            moved, file = _attach(paths, batch, found, target, self._record.time, self._stamp, leaving)
            attached.append(moved)
            if file is not None:
                self._before[target] = file
                self._replaced[file.inode] = self._read_rows(file)
            if not is_one:
                batch = self._commit(batch)
        self._commit(batch)
        for moved in attached:
            if moved.inode in paths.watcher.in_use:
                paths.watcher.updated([moved])
            paths.notify(moved.parent, moved.name)
        return Carried([found.parent for found, _ in moving], self._before, self._replaced)

    def _read_rows(self, file: Entry) -> Replaced:
        """Read the other rows of a file, before the batch deletes them."""
        row = self._tree.objects.get(file.place) if file.place else None
        return Replaced(
            None if row is None else ObjectRef(row.key, row.etag, row.size),
            self._tree.xattrs(file.inode) if file.flags & Flag.XATTRS else {},
            self._tree.target(file.inode) if file.flags & Flag.SYMLINK else b"",
        )

    def _is_one_change(self) -> bool:
        """Return whether no move changes the path of another target, or of a directory above one."""
        moves = self._record.moves
        targets = {target for _, target in moves}
        above = [target.rpartition("/")[0] + "/" for target in targets]
        is_apart = not any(each.startswith(path + "/") for each in above for pair in moves[:2] for path in pair)
        return len(moves) <= len(targets) <= 2 and is_apart

    def _commit(self, batch: Batch) -> Batch:
        """Commit a batch, and return the next."""
        self._paths.commit(batch)
        self._paths.forget_paths()
        return Batch()


def _may_have_key(found: Entry) -> bool:
    """Return whether `_CarryOver._free_from_keys` may change the row: a file in a pack has nothing at its own key."""
    return not found.flags & Flag.DIRECTORY and bool(found.etag or not found.place or found.flags & Flag.LOCAL)


def _is_free(
    paths: PathTree, entry: Entry, target: str, operation: Put | Symlink | Mkdir | None, stamp: int, own: bool
) -> bool:
    """Return whether the target is free, or has only what the record replaces.

    That is neither a file that is being written here, nor a plain object that the record's writer did not know, and
    that may be newer."""
    raw = target.encode(*schema.PATH)
    file, directory = paths.find_many([raw, raw + b"/"])
    there, other = (directory, file) if entry.flags & Flag.DIRECTORY else (file, directory)
    if other is not None:
        return False
    if there is None:
        return True
    known = "" if operation is None or isinstance(operation, Mkdir) else operation.hides
    is_kept = not own and (paths.keeps(there) or (there.is_plain and not there.stamp and there.etag != known))
    return there.stamp <= stamp and not is_kept and not paths.tree.has_children(there.inode)


def _is_renamed_version(paths: PathTree, entry: Entry, operation: Put | Symlink | Mkdir | None, record: Record) -> bool:
    """Return whether a file is what another node renamed, in this or another version.

    It is not if another file elsewhere has come to the name."""
    if not isinstance(operation, Put) or operation.object <= THIS or not entry.place or entry.is_local:
        return True
    row = paths.tree.objects.get(entry.place)
    return row is None or (row.key, entry.offset) == (record.objects[operation.object].key, operation.offset)


def is_removing(tree: Tree, removal: Remove, found: Entry) -> bool:
    """Return whether a removal ends this file, if the file is elsewhere.

    It does not if its writer had seen the plain object that this file has replaced. But a file that is on its way to
    another path (`_free_from_keys`) has the bytes of that object."""
    is_elsewhere = bool(found.place or found.flags & Flag.SYMLINK)
    if not is_elsewhere or removal.by_date or not removal.hides:
        return True
    if found.flags & Flag.RELOCATED and found.etag == removal.hides:
        return True
    row = tree.objects.get(found.place) if found.place else None
    return row is not None and (row.key, row.etag) == (removal.path, removal.hides)


def is_only_listed(entry: Entry, etag: str) -> bool:
    """Return whether the entry is the plain object with this ETag, and no commit named it.

    It must not be in place of a file elsewhere, either."""
    return entry.is_plain and not entry.stamp and entry.etag == etag and not entry.flags & Flag.OVERRIDING


def _is_over_another(known: Entry) -> bool:
    """Return whether a plain object that was only listed counts by its date over a file elsewhere.

    That file may appear again if another node removes the object (`FileRules._uncover`)."""
    return bool(known.flags & Flag.OVERRIDING) and not known.stamp


def _is_implied(directory: Entry) -> bool:
    """Return whether a directory exists only because of what is below it."""
    return not directory.stamp and not directory.flags & (Flag.MARKER | Flag.LISTED)


def _is_meant(found: Entry, path: str, operation: Put | Symlink | Mkdir, record: Record, own: bool) -> bool:
    """Return whether a file is what was renamed.

    A plain object has no commit's time, so the one at the path may be newer than what was renamed. In this node's own
    rename it was stored here since that was planned, and goes along (`RenamedObjects.rename_applied`)."""
    if found.place or found.flags & NO_OBJECT:
        return True
    if not isinstance(operation, Put) or operation.object <= THIS:
        return False
    ref = record.objects[operation.object]
    return ref.key == path and (own or ref.etag == found.etag)


def _attach(
    paths: PathTree, batch: Batch, entry: Entry, target: str, time: int, stamp: int, leaving: Set[int]
) -> tuple[Entry, Entry | None]:
    """Attach an entry at its target; return it, and the file that was there, unless a directory hides it again.
    ``leaving`` are detached inodes."""
    file: Entry | None = None
    above, _, last = target.rpartition("/")
    parent, name = paths.ensure_directory(above, time), last.encode(*schema.PATH)
    row = paths.tree.objects.get(entry.place) if entry.place else None
    is_back = row is not None and row.key == target  # what lies there is the file, whatever its ETag
    hidden, directory = paths.tree.named_many([(parent, name), (parent, name + b"/")])
    if hidden is not None and directory is not None and directory.inode in leaving:
        hidden = msgspec.structs.replace(hidden, flags=hidden.flags & ~Flag.SHADOWED)  # see `show_file`
    if hidden is not None and entry.flags & Flag.DIRECTORY and hidden.inode not in leaving:
        paths.tree.update(batch, msgspec.structs.replace(hidden, flags=hidden.flags | Flag.SHADOWED))
        hidden = None  # nothing removes it
    cookie = 0
    for there in (hidden, directory):
        cookie = cookie if there is None else there.cookie
        if there is not None and there.inode not in leaving:
            paths.tree.remove(batch, there)
            file = file if there.is_dir else there
            if there.is_dir:  # the moved directory's listing lacks what others announced there
                paths.tree.forget_listing(batch, entry.inode)
            if there.stamp and there.etag and not (there.is_local or is_back):
                raw = target.encode(*schema.PATH)
                tombstone = bury(paths.tree.tombstones.get(raw), etag=there.etag, at=stamp)
                paths.tree.tombstones.write(batch, {raw: tombstone})
    return paths.tree.attach(batch, entry, parent, name, cookie=cookie), file
