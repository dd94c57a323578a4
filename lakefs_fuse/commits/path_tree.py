"""The tree by paths, as commits name it: directories made where they are missing, removed where they are empty, moved.

What always holds (*implied directories*): a directory that no commit, marker or listing names exists only while
something is below it. Every change of a name is announced to the `Watcher` in the step in which it is made. Trio
thread only. Inodes of paths are remembered within one `editing` block; a crash leaves the tree's rows.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from types import MappingProxyType
from typing import NamedTuple, TypeAlias, TypeVar

import msgspec

from lakefs_fuse.commits.record import THIS, Mkdir, Put, Record, Remove, Symlink
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import NO_OBJECT, ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.tombstones import bury
from lakefs_fuse.meta.tree import Tree

ROWS_MAX = 512
"""Names that are read, or written, at once."""
T = TypeVar("T")


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


class PathTree:
    """See the module's head."""

    def __init__(self, database: Database, tree: Tree, watcher: Watcher) -> None:
        self.database, self.tree, self.watcher = database, tree, watcher
        self._directories: dict[str, int] = {}
        self._is_quiet = False

    @contextmanager
    def editing(self, *, quiet: bool = False) -> Iterator[None]:
        """Paths are looked up again inside, and after it. ``quiet``: the kernel of this node made the change itself."""
        self._is_quiet = quiet
        self._directories.clear()
        try:
            yield
        finally:
            self._is_quiet = False
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
            if entry is None:
                return None
            known = self._directories[path] = entry.inode
        return known

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
    """What `carry_over` did: the directories that rows left, none where nothing moved, and the stamps of the plain
    objects of which commits told, by the paths that they left."""

    directories: Sequence[int] = ()
    stamps: Mapping[str, int] = MappingProxyType({})


def carry_over(paths: PathTree, record: Record, stamp: int, *, own: bool = False) -> Carried:
    """Move the rows of a record's ``moves``. ``own``: this node made the change."""
    made: Made = {
        operation.path.encode() + (b"/" if isinstance(operation, Mkdir) else b""): operation
        for operation in record.operations
        if isinstance(operation, Put | Symlink | Mkdir)
    }
    gone = {each.path: each for each in record.operations if isinstance(each, Remove) and not each.directory}
    inodes, stamps = set[int](), dict[str, int]()
    sources = {source for source, _ in record.moves}
    for source, target in record.moves:
        entry = paths.child(source)
        if entry is None or not _is_covered(paths, entry, source, target, record, made, gone, stamp, stamps):
            return Carried()
        if not own and entry.inode in paths.watcher.in_use and paths.watcher.is_new(entry):
            return Carried()  # another node renamed its own file of that name
        if not own and not _is_renamed_version(paths, entry, made.get(target.encode()), record):
            return Carried()
        if target not in sources and not _is_free(paths, entry, target, made.get(target.encode()), stamp, own):
            return Carried()
        inodes.add(entry.inode)
    if len(inodes) < len(record.moves):
        return Carried()  # several renames in one commit: of one name again, once another had it
    for source, _ in record.moves:
        _free_from_keys(paths, source, own)
    moving = [(found, target) for source, target in record.moves if (found := paths.child(source)) is not None]
    batch = Batch()
    for found, _ in moving:
        paths.tree.detach(batch, found)
        paths.show_file(batch, found)
    paths.database.commit(batch)
    for found, _ in moving:
        paths.notify(found.parent, found.name)
    paths.forget_paths()
    for found, target in moving:
        _attach(paths, found, target, record.time, stamp)
    return Carried([found.parent for found, _ in moving], stamps)


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


def _chunks(items: Iterable[T]) -> Iterator[list[T]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, ROWS_MAX)):
        yield chunk


def _with_all_below(tree: Tree, entry: Entry, path: str) -> Iterator[list[tuple[str, Entry]]]:
    """An entry that has this path, and all that is below it."""
    below = tree.below(entry.inode, path) if entry.flags & Flag.DIRECTORY else ()
    return _chunks(chain([(path, entry)], below))


def _is_renamed_version(paths: PathTree, entry: Entry, operation: Put | Symlink | Mkdir | None, record: Record) -> bool:
    """A file elsewhere is what another node renamed, in this or another version, and no other file that came to the
    name."""
    if not isinstance(operation, Put) or operation.object <= THIS or not entry.place or entry.is_local:
        return True
    row = paths.tree.objects.get(entry.place)
    return row is None or (row.key, entry.offset) == (record.objects[operation.object].key, operation.offset)


def _is_covered(
    paths: PathTree, entry: Entry, source: str, target: str, record: Record, made: Made, gone: Mapping[str, Remove],
    stamp: int, stamps: dict[str, int],
) -> bool:  # fmt: skip
    """The record says of everything in sight where it is now, and is the newest to speak of it. Fills ``stamps``, see
    `Carried`."""
    for chunk in _with_all_below(paths.tree, entry, target):
        names = [path.encode() + (b"/" if found.flags & Flag.DIRECTORY else b"") for path, found in chunk]
        tombstones = paths.tree.tombstones.get_many(names)
        for (path, found), name, tombstone in zip(chunk, names, tombstones, strict=True):
            if found.stamp > stamp:
                return False
            if found.flags & (Flag.LOCAL | Flag.SHADOWED):
                continue
            operation, before = made.get(name), source + path[len(target) :]
            if (
                operation is None
                or not _is_meant(found, before, operation, record)
                or (before in gone and not is_removing(paths.tree, gone[before], found))
                or (tombstone is not None and tombstone.newest > stamp)
            ):
                return False
            if found.stamp and found.is_plain:
                stamps[before] = found.stamp
    return True


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


def _free_from_keys(paths: PathTree, source: str, own: bool) -> None:
    """Plain objects stay at their keys when their names move: from now on the rows say so. Nothing hides at its new
    path what it hid before; that stays gone under the old one, also where the record does not name it. What is not in
    the store yet replaces nothing there, whatever it replaced before; but a file goes along with another node's rename
    of what it replaces."""
    tree, entry = paths.tree, paths.child(source)
    for chunk in _with_all_below(tree, entry, source) if entry is not None else ():
        plain = [(path, found) for path, found in chunk if not found.place and not found.flags & NO_OBJECT]
        numbers = tree.objects.numbers([(path, found.etag, found.size) for path, found in plain]) if plain else []
        changes = [
            (found, msgspec.structs.replace(found, place=number, etag=""))
            for (_, found), number in zip(plain, numbers, strict=True)
        ]
        relocated = [
            Relocated(path, found.etag, 0, freed)
            for (path, found), (_, freed) in zip(plain, changes, strict=True)
            if freed.inode in paths.watcher.in_use
        ]
        hiding = [
            (path.encode(), found)
            for path, found in chunk
            if found.etag and (found.place or found.is_symlink) and not found.is_local
        ]
        changes += [(found, msgspec.structs.replace(found, etag="")) for _, found in hiding]
        changes += [
            (found, msgspec.structs.replace(found, etag="", stamp=0, place=0, offset=0))
            for _, found in chunk
            if found.flags & (Flag.LOCAL | Flag.DIRECTORY) == Flag.LOCAL
            and (found.etag or found.stamp)
            and (own or found is not entry)
        ]
        batch = Batch()
        tree.update_files(batch, changes)
        if hiding:
            tombstones = zip(hiding, tree.tombstones.get_many([path for path, _ in hiding]), strict=True)
            buried = {path: bury(known, etag=found.etag, at=found.stamp) for (path, found), known in tombstones}
            tree.tombstones.write(batch, buried)
        paths.database.commit(batch)
        if relocated:
            paths.watcher.relocated(relocated)


def _attach(paths: PathTree, entry: Entry, target: str, time: int, stamp: int) -> None:
    above, _, last = target.rpartition("/")
    parent, name = paths.ensure_directory(above, time), last.encode()
    batch = Batch()
    for there in paths.tree.named_many([(parent, name), (parent, name + b"/")]):
        if there is not None:
            paths.tree.remove(batch, there)
            if there.stamp and there.etag and not there.is_local:
                raw = target.encode()
                tombstone = bury(paths.tree.tombstones.get(raw), etag=there.etag, at=stamp)
                paths.tree.tombstones.write(batch, {raw: tombstone})
    moved = paths.tree.attach(batch, entry, parent, name)
    paths.database.commit(batch)
    paths.forget_paths()
    if moved.inode in paths.watcher.in_use:
        paths.watcher.updated([moved])
    paths.notify(parent, name)
