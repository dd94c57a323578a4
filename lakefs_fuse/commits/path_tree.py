"""The tree by paths, as commits name it: directories made where they are missing, removed where they are empty, moved.

What always holds (*implied directories*): a directory that no commit, marker or listing names exists only while
something is below it. Every change of a name is announced to the `Watcher` in the step in which it is made. Trio
thread only. Inodes of paths are remembered within one `editing` block; a crash leaves the tree's rows.
"""

from __future__ import annotations

from collections.abc import Container, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

import msgspec

from lakefs_fuse.commits.record import THIS, Mkdir, Put, Record, Remove, Symlink
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import NO_OBJECT, ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.tombstones import Tombstone, bury
from lakefs_fuse.meta.tree import Tree

MOVED_MAX = 512
"""Operations of a record that moves rows; where one has more, names that have no history get none by it."""
ROWS_MAX = 512
"""Names that are read, or written, at once."""
READ_PER_NAME = 32
"""So many operations are sorted by their paths in the time in which one name is looked at."""


class Relocated(NamedTuple):
    """A file's bytes, which were those of a version of an object from ``offset`` on, are where its row says now."""

    key: str
    etag: str
    offset: int
    entry: Entry


class Watcher:
    """A listener for what commits change; the filesystem overrides what it needs."""

    in_use: Container[int] = ()
    """Inodes of the files that are open or not durable: others are not worth a call of `keeps`, `ctime_ns`, `updated`
    and `relocated`."""

    def keeps(self, entry: Entry) -> bool:
        """The file is being written here: its inode stays."""
        return False

    def is_new(self, entry: Entry) -> bool:
        """The file was created here, and is not in the store: it began as no version of what has its name elsewhere."""
        return False

    def redated(self, entry: Entry) -> bool:
        """The mtime of a file changes, which the kernel ignores for an inode that it holds. Answers whether the file is
        open here: then it keeps its inode until the last close."""
        return False

    def ctime_ns(self, entry: Entry) -> int:
        """When an inode was changed here last: what this node's own commits say of it does not move that."""
        return entry.ctime_ns

    def changing(self, parent: int, name: bytes) -> None:
        """A listing under way must not undo this."""

    def changed(self, parent: int, name: bytes) -> None:
        """The kernel may remember the name wrongly."""

    def updated(self, entries: Sequence[Entry]) -> None:
        """The rows of files have other attributes, another place or another name."""

    def relocated(self, files: Sequence[Relocated]) -> None:
        """The same bytes are in another place."""

    def moved(self) -> None:
        """Directories moved: paths of files in use may be others."""

    def root_changed(self) -> None:
        """Names come or go in the root, which has no row."""


class PathTree:
    """See the module's head."""

    def __init__(self, database: Database, tree: Tree, watcher: Watcher, commits: CommitRows) -> None:
        self.database, self.tree, self.watcher, self.commits = database, tree, watcher, commits
        self._directories: dict[str, int] = {}
        """Inodes by path; while something is edited, 0 for a directory that is not there."""
        self._is_editing = self._is_quiet = False

    @contextmanager
    def editing(self, *, quiet: bool = False) -> Iterator[None]:
        """Paths are looked up again inside, and after it. ``quiet``: the kernel of this node made the change itself."""
        self._is_editing, self._is_quiet = True, quiet
        self._directories.clear()
        try:
            yield
        finally:
            self._is_editing = self._is_quiet = False
            self._directories.clear()

    def forget_paths(self) -> None:
        """Paths lead elsewhere now, or other tasks ran."""
        self._directories.clear()

    def find_many(self, paths: Sequence[bytes]) -> list[Entry | None]:
        """The directory of each path that ends in a slash, the file of each other."""
        names = []
        for path in paths:
            above, _, name = path.removesuffix(b"/").rpartition(b"/")
            names.append((self.directory(above.decode()) or 0, name + b"/" if path.endswith(b"/") else name))
        return self.tree.named_many(names)

    def child(self, path: str) -> Entry | None:
        """The directory of a path, else the file."""
        above, _, name = path.rpartition("/")
        parent = self.directory(above)
        return None if parent is None else self.tree.child(parent, name.encode())

    def keeps(self, entry: Entry) -> bool:
        """See `Watcher.keeps`."""
        return entry.inode in self.watcher.in_use and self.watcher.keeps(entry)

    def directory(self, path: str) -> int | None:
        """Inode of a directory by its path ("" is the root); None where there is none."""
        if not path:
            return ROOT_INODE
        known = self._directories.get(path)
        if known is None:
            above, _, name = path.rpartition("/")
            parent = self.directory(above)
            entry = None if parent is None else self.tree.named(parent, name.encode() + b"/")
            if entry is None and not self._is_editing:
                return None
            known = self._directories[path] = 0 if entry is None else entry.inode
        return known or None

    def ensure_directory(self, path: str, time: int) -> int:
        """As `directory`, made where it is missing: it is there because something below it is."""
        found = self.directory(path)
        if found is not None:
            return found
        above, _, name = path.rpartition("/")
        parent = self.ensure_directory(above, time)
        batch, raw = Batch(), name.encode()
        entry = self.insert_directory(
            batch, parent, path, Flag.DIRECTORY, self.tree.named(parent, raw), mtime_ns=time, ctime_ns=time
        )
        self.database.commit(batch)
        self.notify(parent, raw)
        return entry.inode

    def insert_directory(
        self, batch: Batch, parent: int, path: str, flags: int, file: Entry | None, **attributes: int
    ) -> Entry:
        """A directory that is not there; ``file`` has its name. `notify` is the caller's."""
        if file is not None and (file.stamp or self.keeps(file)):
            self.tree.update(batch, msgspec.structs.replace(file, flags=file.flags | Flag.SHADOWED))
        elif file is not None:
            self.tree.remove(batch, file)
            self.tree.forget_listing(batch, parent)
        entry = self.tree.insert(batch, parent, path.rpartition("/")[2].encode(), flags, **attributes)
        self._directories[path] = entry.inode
        return entry

    def show_file(self, batch: Batch, directory: Entry) -> None:
        """A directory goes: a file of the same name comes into sight."""
        is_dir = directory.flags & Flag.DIRECTORY
        file = self.tree.named(directory.parent, directory.name) if is_dir else None
        if file is not None and file.flags & Flag.SHADOWED:
            self.tree.update(batch, msgspec.structs.replace(file, flags=file.flags & ~Flag.SHADOWED))

    def prune(self, inode: int) -> None:
        """Directories that were there only because of what was below them go when nothing is."""
        while inode != ROOT_INODE:
            entry = self.tree.entry(inode)
            if entry is None or not _is_implied(entry) or self.tree.has_children(inode):
                return
            batch = Batch()
            self.tree.remove(batch, entry)
            self.show_file(batch, entry)
            self.database.commit(batch)
            self._directories.clear()
            self.notify(entry.parent, entry.name)
            inode = entry.parent

    def implied_above(self, path: str) -> list[str]:
        """Directories that may go with the last name in the one at ``path``: it, and those above it."""
        found: list[str] = []
        while path and (inode := self.directory(path)) is not None:
            entry = self.tree.entry(inode)
            if entry is None or not _is_implied(entry):
                break
            found.append(path)
            path = path.rpartition("/")[0]
        return found

    def touch(self, batch: Batch, directories: Iterable[int], time: int) -> None:
        """Names came or went at this ``time``: the times of the directories move, unless the same commit, or a
        later one, has set them."""
        for inode in directories:
            if inode == ROOT_INODE:
                self.watcher.root_changed()
                continue
            entry = self.tree.entry(inode)
            is_earlier = entry is not None and max(entry.mtime_ns, entry.stamp) < time
            if entry is not None and is_earlier and not self.tree.is_in_batch(batch, entry):
                self.tree.update(batch, msgspec.structs.replace(entry, mtime_ns=time, ctime_ns=time))

    def notify(self, parent: int, name: bytes) -> None:
        """A name is something else now."""
        self.watcher.changing(parent, name)
        if not self._is_quiet:
            self.watcher.changed(parent, name)


# -- moves: renames keep identity. The rows of what a commit moved move too, before its operations are applied to them.
#
# Only a hint, and followed only where nothing is lost by it: everything known below the source is named by an operation
# of the record (or not in the store yet), nothing newer is known of either name, and no directory with something in it
# is in the way. Otherwise the operations alone make the same names, with other inodes.

Made: TypeAlias = dict[bytes, Put | Symlink | Mkdir]
"""What a record says of a path, which ends in a slash for a directory."""


class Carried(NamedTuple):
    """What `carry_over` did: the directories that rows left, none where nothing moved; and the files that had the names
    which rows left or came to, unless the record has more than MOVED_MAX operations."""

    directories: Sequence[int] = ()
    before: Mapping[str, Entry] = MappingProxyType({})


def lies_elsewhere(entry: Entry) -> bool:
    """A file whose bytes are not at its own key."""
    return bool(entry.place or entry.flags & Flag.SYMLINK) and not entry.flags & Flag.LOCAL


def is_hiding(entry: Entry, etag: str) -> bool:
    """A commit put a file elsewhere in place of the plain object with this ETag."""
    return lies_elsewhere(entry) and entry.stamp > 0 and entry.etag == etag


def other_name(sort_name: bytes) -> bytes:
    """The sort name that a file has for a directory of the same name, or a directory for a file."""
    return sort_name[:-1] if sort_name.endswith(b"/") else sort_name + b"/"


def when_replaced(known: Entry | None, tombstone: Tombstone | None) -> int:
    """When the newest file elsewhere that is known came to a name, and ended those before it: the one that is there, or
    that a listed object counts over. 0: none is known."""
    if known is None or known.flags & Flag.LOCAL:
        return 0
    if known.place or known.flags & Flag.SYMLINK:
        return known.stamp
    return tombstone.floor if _is_over_another(known) and tombstone is not None else 0


def carry_over(
    paths: PathTree, record: Record, stamp: int, names_max: int, *, own: bool = False
) -> Generator[None, None, Carried]:
    """Move the rows of a record's ``moves``. It yields when so many names were looked at; others may change the tree
    then, and what they changed is looked at again in the step in which the rows move. ``own``: this node made the
    change."""
    return (yield from _CarryOver(paths, record, stamp, min(ROWS_MAX, names_max), own).steps())


class _CarryOver:
    """See `carry_over`."""

    def __init__(self, paths: PathTree, record: Record, stamp: int, names_max: int, own: bool) -> None:
        self._paths, self._tree, self._record, self._stamp = paths, paths.tree, record, stamp
        self._names_max, self._own = names_max, own
        self._sources = {source for source, _ in record.moves}
        self._made: Made = {}
        self._gone: dict[bytes, Remove] = {}
        self._before: dict[str, Entry] = {}
        self._keeps_files = len(record.operations) <= MOVED_MAX
        self._walked: dict[int, tuple[str, tuple[str, str]]] = {}
        """Directories that were read, by inode: their path, and the move that they belong to."""

    def steps(self) -> Generator[None, None, Carried]:
        for number, operation in enumerate(self._record.operations, 1):
            if isinstance(operation, Put | Symlink | Mkdir):
                self._made[operation.path.encode() + (b"/" if isinstance(operation, Mkdir) else b"")] = operation
            elif isinstance(operation, Remove):
                self._gone[operation.path.encode() + b"/" * operation.directory] = operation
            if not number % (READ_PER_NAME * self._names_max):
                yield
        if self._names_max > len(self._record.operations):  # its caller takes all steps at once
            tops = [self._movable(move) for move in self._record.moves] if self._is_each_another() else [None]
            if not all(tops):
                return Carried()
            below = []
            for move, names in self._all_below(tops):
                if not self._is_covered(names, move):
                    return Carried()
                below.append((move, names))
            # What one move frees may lie below another, which reads its row again.
            for move, names in below if len(self._record.moves) == 1 else self._all_below():
                self._free_from_keys(names, move)
            return self._switch()
        with self._paths.database.recording() as changed:
            if not (self._is_each_another() and all(map(self._movable, self._record.moves))):
                return Carried()
            for move, names in self._all_below():
                if not self._is_covered(names, move):
                    return Carried()
                yield
            others = set[bytes]()
            for move, names in self._all_below():
                others |= changed.take()
                self._free_from_keys(names, move)
                for _, entry in names:
                    self._paths.watcher.changing(entry.parent, entry.name)
                changed.take()  # what that wrote
                yield
            late = self._tree.changed_entries(others | changed.take())
        is_movable = self._is_each_another() and all(map(self._movable, self._record.moves))
        return self._switch() if is_movable and self._is_late_covered(late) else Carried()

    def _all_below(
        self, tops: Sequence[Entry | None] = ()
    ) -> Iterator[tuple[tuple[str, str], list[tuple[str, Entry]]]]:
        """See `_below`, of each move; ``tops`` are the sources, where they were read in this step."""
        moves = zip_longest(self._record.moves, tops)
        return ((move, names) for move, top in moves for names in self._below(move, top))

    def _is_each_another(self) -> bool:
        """Not several renames in one commit: of one name again, once another had it."""
        moves = self._record.moves
        sources = map(self._paths.child, self._sources) if len(moves) > 1 else ()
        return len({None if entry is None else entry.inode for entry in sources}) in (0, len(moves))

    def _below(self, move: tuple[str, str], top: Entry | None) -> Iterator[list[tuple[str, Entry]]]:
        """The source (``top``, where it is known), and all that is below it, with its path; some at a time, as they are
        when they are answered."""
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
        """As `_is_covered`, of the sources and of what was changed since it was looked at, which then is free from its
        key as well."""
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
        """The source, where it is what the record renamed, and nothing is in the way."""
        paths, (source, target) = self._paths, move
        entry, operation = paths.child(source), self._made.get(target.encode())
        if entry is None:
            return None
        if not self._own and entry.inode in paths.watcher.in_use and paths.watcher.is_new(entry):
            return None  # another node renamed its own file of that name
        if not self._own and not _is_renamed_version(paths, entry, operation, self._record):
            return None
        is_free = target in self._sources or _is_free(paths, entry, target, operation, self._stamp, self._own)
        return entry if is_free else None

    def _is_covered(self, names: Sequence[tuple[str, Entry]], move: tuple[str, str]) -> bool:
        """The record says of everything in sight where it is now, and what has its earlier name, and is the newest to
        speak of it."""
        source, target = move
        sources = [path.encode() + (b"/" if found.flags & Flag.DIRECTORY else b"") for path, found in names]
        keys = [target.encode() + raw[len(source.encode()) :] for raw in sources]
        tombstones = self._tree.tombstones.get_many(keys)
        for (before, found), raw, key, tombstone in zip(names, sources, keys, tombstones, strict=True):
            if found.stamp > self._stamp:
                return False
            if found.flags & (Flag.LOCAL | Flag.SHADOWED):
                continue
            operation, removal = self._made.get(key), self._gone.get(raw)
            if (
                operation is None
                or (removal is None and raw not in self._made)
                or not _is_meant(found, before, operation, self._record)
                or (removal is not None and not is_removing(self._tree, removal, found))
                or (removal is not None and not removal.by_date and _is_over_another(found))
                or (tombstone is not None and max(tombstone.newest, tombstone.unlisted[1]) > self._stamp)
            ):
                return False
            if self._keeps_files and not found.flags & Flag.DIRECTORY:
                self._before[before] = found
        return True

    def _free_from_keys(self, names: Sequence[tuple[str, Entry]], move: tuple[str, str]) -> None:
        """Plain objects stay at their keys when their names move: from now on the rows say so. Nothing hides at its new
        path what it hid before; that stays gone under the old one, also where the record does not name it. What is not
        in the store yet replaces nothing there, whatever it replaced before; but a file goes along with another node's
        rename of what it replaces."""
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
            (path.encode(), found)
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
        self._paths.database.commit(batch)
        if relocated:
            watcher.relocated(relocated)

    def _switch(self) -> Carried:
        """Each source is at its target from now on."""
        paths, moves = self._paths, self._record.moves
        moving = [(found, target) for source, target in moves if (found := paths.child(source)) is not None]
        batch = Batch()
        for found, _ in moving:
            paths.tree.detach(batch, found)
            paths.show_file(batch, found)
        paths.database.commit(batch)
        for found, _ in moving:
            paths.notify(found.parent, found.name)
        paths.forget_paths()
        for found, target in moving:
            if self._own and found.flags & (Flag.DIRECTORY | Flag.SYMLINK):  # the kernel keeps that of a file
                found = msgspec.structs.replace(found, ctime_ns=self._record.time)
            file = _attach(paths, found, target, self._record.time, self._stamp)
            if file is not None:
                self._before[target] = file
        return Carried([found.parent for found, _ in moving], self._before)


def _is_free(
    paths: PathTree, entry: Entry, target: str, operation: Put | Symlink | Mkdir | None, stamp: int, own: bool
) -> bool:
    """What is at the target, if anything, is what the record replaces: not what is being written here meanwhile, nor a
    plain object of which its writer did not know, and that is perhaps newer."""
    raw = target.encode()
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
    """A file elsewhere is what another node renamed, in this or another version, and no other file that came to the
    name."""
    if not isinstance(operation, Put) or operation.object <= THIS or not entry.place or entry.is_local:
        return True
    row = paths.tree.objects.get(entry.place)
    return row is None or (row.key, entry.offset) == (record.objects[operation.object].key, operation.offset)


def is_removing(tree: Tree, removal: Remove, found: Entry) -> bool:
    """Whether a removal of a file is of one elsewhere: not where its writer had seen the plain object which that has
    replaced. The row of a file that is on its way to another path (`_free_from_keys`) is that object."""
    is_elsewhere = bool(found.place or found.flags & Flag.SYMLINK)
    if not is_elsewhere or removal.by_date or not removal.hides:
        return True
    if found.flags & Flag.RELOCATED and found.etag == removal.hides:
        return True
    row = tree.objects.get(found.place) if found.place else None
    return row is not None and (row.key, row.etag) == (removal.path, removal.hides)


def is_only_listed(entry: Entry, etag: str) -> bool:
    """It is the plain object with this ETag, of which no commit told, and for which no file elsewhere was forgotten."""
    return entry.is_plain and not entry.stamp and entry.etag == etag and not entry.flags & Flag.OVERRIDING


def _is_over_another(known: Entry) -> bool:
    """A plain object that was only listed counts by its date over a file elsewhere, which may come into sight again
    where another node removes the object (`FileRules._uncover`)."""
    return bool(known.flags & Flag.OVERRIDING) and not known.stamp


def _is_implied(directory: Entry) -> bool:
    """It is there only because of what is below it."""
    return not directory.stamp and not directory.flags & (Flag.MARKER | Flag.LISTED)


def _is_meant(found: Entry, path: str, operation: Put | Symlink | Mkdir, record: Record) -> bool:
    """A plain object carries no commit's time: the one under the name may be newer than what was renamed."""
    if found.place or found.flags & NO_OBJECT:
        return True
    if not isinstance(operation, Put) or operation.object <= THIS:
        return False
    ref = record.objects[operation.object]
    return ref.key == path and ref.etag == found.etag


def _attach(paths: PathTree, entry: Entry, target: str, time: int, stamp: int) -> Entry | None:
    """Returns the file that was there."""
    file: Entry | None = None
    above, _, last = target.rpartition("/")
    parent, name = paths.ensure_directory(above, time), last.encode()
    row = paths.tree.objects.get(entry.place) if entry.place else None
    is_back = row is not None and row.key == target  # what lies there is the file, whatever its ETag
    batch = Batch()
    for there in paths.tree.named_many([(parent, name), (parent, name + b"/")]):
        if there is not None:
            paths.tree.remove(batch, there)
            file = file if there.is_dir else there
            if there.is_dir:  # of what others have announced there the listing from elsewhere does not know
                paths.tree.forget_listing(batch, entry.inode)
            if there.stamp and there.etag and not (there.is_local or is_back):
                raw = target.encode()
                tombstone = bury(paths.tree.tombstones.get(raw), etag=there.etag, at=stamp)
                paths.tree.tombstones.write(batch, {raw: tombstone})
    moved = paths.tree.attach(batch, entry, parent, name)
    paths.database.commit(batch)
    paths.forget_paths()
    if moved.inode in paths.watcher.in_use:
        paths.watcher.updated([moved])
    paths.notify(parent, name)
    return file
