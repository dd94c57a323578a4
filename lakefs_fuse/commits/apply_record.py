"""The application of one record to the tree: what each operation changes in the rows. `Applier` makes one for each.

What always holds (*one judge*): `_is_older` alone decides which of two versions is newer. An operation reads what those
before it did: each is a batch of its own, but for files one after the other, which share one until a name comes twice.
Trio thread only. A crash leaves the operations of whole batches; the record is applied again then.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

import msgspec

from lakefs_fuse.commits.path_tree import PathTree
from lakefs_fuse.commits.record import (
    OWN,
    THIS,
    UNSET,
    Mkdir,
    ObjectRef,
    Operation,
    Put,
    Record,
    Relocate,
    Remove,
    SetAttr,
    Symlink,
)
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import PENDING, Entry, Flag
from lakefs_fuse.meta.tree import Tombstone

NS = 1_000_000_000
TOGETHER_MAX = 512
"""Files written in one batch."""
COUNTED_PER_OPERATION = 100
"""So many operations are counted in the time in which one is applied."""
CARRIED_OVER_MAX = 1_000_000
"""A rename of more names by another node gives them other inodes: to keep them takes 300 bytes of memory a name."""
RELOCATED = 1
"""Stamp of a plain object that was relocated: older than any commit, as nobody gave the name other bytes by it."""
NOTHING: Mapping[str, str] = MappingProxyType({})
KNOWN = Flag.ATTRIBUTES_KNOWN | Flag.MTIME_KEPT


class Place(msgspec.Struct, frozen=True, gc=False):
    """Where a file's bytes are, as `Entry` has it."""

    number: int
    offset: int
    etag: str


class Doubt(msgspec.Struct, frozen=True):
    """A record says that ``path`` is something else than the plain object ``etag`` that is known there, and knew of
    ``hides``; which of the two is newer only the store can tell."""

    path: str
    etag: str
    hides: str


class Application:
    """One record on its way into the tree."""

    def __init__(
        self,
        paths: PathTree,
        record: Record,
        this: ObjectRef,
        stamp: int,
        now_ns: int,
        *,
        own: bool = False,
        outdated: Mapping[str, str] = NOTHING,
        whole: bool = False,
    ) -> None:
        """``now_ns`` dates a change that is in no commit yet. ``own``: this node made the change, and knew what it
        changed. ``outdated`` are ETags of plain objects that were listed, and are not at these paths any more.
        ``whole``: the record is all that its commit says."""
        self._own, self._outdated, self._whole = own, outdated, whole
        self._paths, self._tree, self._db, self._watcher = paths, paths.tree, paths.database, paths.watcher
        self._record, self._this, self._stamp = record, this, stamp
        self._time = record.time if stamp < PENDING else now_ns
        self._numbers: dict[int, int] = {}
        self._batch, self._together = Batch(), dict[str, tuple[Entry, bool]]()
        """What is not written yet: paths, with their entries, and whether the kernel may remember them wrongly."""

    def run(self) -> None:
        for _ in self.steps(len(self._record.operations) + 1):
            pass

    def steps(self, operations_max: int) -> Iterator[None]:
        """Apply so many operations at a time. Where it yields, everything so far is in the tree, and others may change
        the tree before the next step."""
        left: list[int] = []
        if self._record.moves and (self._own or len(self._record.operations) <= CARRIED_OVER_MAX):
            left = _carry_over(self._paths, self._record, self._stamp)
            if left:
                self._watcher.moved()
        said: Counter[str] = Counter()
        yield from self._count(said, operations_max)
        to_come = said.copy()
        for number, operation in enumerate(self._record.operations, 1):
            self._is_last, self._is_only = True, self._whole and _says_what(operation)
            if operation.path in said and _says_what(operation):
                to_come[operation.path] -= 1
                self._is_last, self._is_only = not to_come[operation.path], self._whole and said[operation.path] == 1
            is_apart = not isinstance(operation, Put)
            if is_apart or not self._may_join(operation.path):
                self._write()
            self._apply(operation)
            if is_apart or len(self._together) >= TOGETHER_MAX:
                self._write()
            if not number % operations_max:
                self._write()
                yield
        self._write()
        for directory in left:
            self._paths.prune(directory)

    def _count(self, said: Counter[str], operations_max: int) -> Iterator[None]:
        """Count operations by path in ``said``, for paths that occur more than once. A bitmap of eight bits for each
        operation finds the candidates in the first pass; a few others pass it, too."""
        operations = self._record.operations
        bits, again = bytearray(len(operations)), set[int]()
        for number, operation in enumerate(operations, 1):
            if _says_what(operation):
                at = _bit(operation.path, len(bits))
                if bits[at >> 3] & 1 << (at & 7):
                    again.add(at)
                bits[at >> 3] |= 1 << (at & 7)
            if not number % (COUNTED_PER_OPERATION * operations_max):
                yield
        for number, operation in enumerate(operations if again else (), 1):
            if _says_what(operation) and _bit(operation.path, len(bits)) in again:
                said[operation.path] += 1
            if not number % (COUNTED_PER_OPERATION * operations_max):
                yield

    def _apply(self, operation: Operation) -> None:
        match operation:
            case Put():
                self._put(operation)
            case Mkdir():
                self._mkdir(operation)
            case Symlink():
                self._symlink(operation)
            case Remove():
                self._remove(operation)
            case SetAttr():
                self._set_attributes(operation)
            case Relocate():
                self._relocate(operation)

    def _may_join(self, path: str) -> bool:
        """Nothing is to be written between the question where the bytes of a file are, and the file."""
        return path not in self._together and self._paths.directory(path.rpartition("/")[0]) is not None

    def _write(self) -> None:
        if not self._together:
            return
        batch, together = self._batch, self._together
        self._batch, self._together = Batch(), {}
        self._db.commit(batch)
        for entry, is_announced in together.values():
            self._watcher.updated(entry)
            if is_announced:
                self._paths.notify(entry.parent, entry.name)

    # -- where bytes are

    def _ref(self, index: int) -> ObjectRef:
        return self._this if index == THIS else self._record.objects[index]

    def _place(self, path: str, index: int, offset: int, size: int, hides: str) -> Place:
        if index == OWN:
            return Place(0, 0, hides)
        ref = self._ref(index)
        if ref.key == path and not offset and size == ref.size:
            return Place(0, 0, ref.etag)  # it came back to its own key
        number = self._numbers.get(index)
        if number is None or self._tree.objects.get(number) is None:
            number = self._numbers[index] = self._tree.objects.number(ref.key, ref.etag, ref.size)
        return Place(number, offset, hides)

    def _is_at(self, entry: Entry, place: Place, path: str) -> bool:
        if entry.flags & (Flag.LOCAL | Flag.SYMLINK | Flag.DIRECTORY):
            return False
        if place.number:
            return entry.place == place.number and entry.offset == place.offset
        if not entry.place:
            return entry.etag == place.etag
        row = self._tree.objects.get(entry.place)  # renamed back to its own key
        return row is not None and (row.key, row.etag, row.size) == (path, place.etag, entry.size) and not entry.offset

    # -- files

    def _is_older(self, current: Entry | None, path: str, hides: str, *, directory: bool = False) -> bool:
        """Something newer than this record is known of the name."""
        tombstone = self._tree.tombstones.get(path.encode() + (b"/" if directory else b""))
        if tombstone is not None and tombstone.stamp > self._stamp:
            return True
        if current is None:
            return False
        return current.stamp > self._stamp or self._is_unknown(current, path, hides)

    def _is_covered(self, current: Entry) -> bool:
        """A file that is not in the store yet came over this, or over what the record says of the name further on."""
        return current.is_local and (not self._is_last or (self._is_only and current.stamp == self._stamp))

    def _is_unknown(self, current: Entry, path: str, hides: str) -> bool:
        """A plain object that the record's writer did not know of, and that is not older."""
        unknown = current.is_plain and not current.stamp and current.etag != hides
        second = 0 if current.flags & Flag.ATTRIBUTED else NS  # LastModified says no more
        newer = unknown and self._stamp < PENDING and current.ctime_ns + second > self._time
        return newer and self._outdated.get(path) != current.etag

    def doubts(self) -> Iterator[Doubt | None]:
        """What to ask the store for, before the record is applied: an answer for each operation."""
        for operation in self._record.operations:
            yield self._doubt(operation)

    def _doubt(self, operation: Operation) -> Doubt | None:
        if not isinstance(operation, Put | Symlink | Remove) or (isinstance(operation, Remove) and operation.directory):
            return None
        above, _, last = operation.path.rpartition("/")
        parent = self._paths.directory(above)
        current = None if parent is None else self._tree.named(parent, last.encode())
        if current is None or (_is_dated_by_store(current) and current.ctime_ns > self._time + NS):
            return None
        if self._is_unknown(current, operation.path, operation.hides):
            return Doubt(operation.path, current.etag, operation.hides)
        return None

    def _put(self, operation: Put) -> None:
        place = self._place(operation.path, operation.object, operation.offset, operation.size, operation.hides)
        said = any(value != UNSET for value in (operation.mode, operation.uid, operation.gid))
        self._set_file(
            operation.path, place, operation.hides, KNOWN if said else 0,
            size=operation.size, mode=operation.mode, uid=operation.uid, gid=operation.gid,
            mtime_ns=operation.mtime_ns, xattrs=operation.xattrs,
        )  # fmt: skip

    def _symlink(self, operation: Symlink) -> None:
        target = operation.target.encode()
        self._set_file(
            operation.path, Place(0, 0, operation.hides), operation.hides, KNOWN | Flag.SYMLINK,
            size=len(target), mode=0o777, uid=operation.uid, gid=operation.gid,
            mtime_ns=operation.mtime_ns, xattrs=operation.xattrs, target=target,
        )  # fmt: skip

    def _set_file(
        self,
        path: str,
        place: Place,
        hides: str,
        flags: int,
        *,
        size: int,
        mode: int,
        uid: int,
        gid: int,
        mtime_ns: int,
        xattrs: dict[str, bytes],
        target: bytes = b"",
        stamp: int | None = None,
    ) -> None:
        """``stamp`` is the record's where not given."""
        above, _, last = path.rpartition("/")
        name, raw = last.encode(), path.encode()
        parent = self._paths.directory(above)
        current = None if parent is None else self._tree.named(parent, name)
        if self._is_older(current, path, hides) or (current is not None and self._is_covered(current)):
            return
        if parent is None:
            parent = self._paths.ensure_directory(above, self._time)
        if current is not None and current.flags & Flag.XATTRS and self._watcher.keeps(current):
            xattrs = self._tree.xattrs(current.inode)  # set here since, perhaps; they are told with what is written
        if xattrs:
            flags |= Flag.XATTRS
        batch = self._batch
        if stamp is None:  # else it still hides what was removed: only this version may come into sight
            self._tree.tombstones.write(batch, {raw: None})
        entry = Entry(
            parent, current.cookie if current else 0, name, current.inode if current else 0, flags, mode, uid, gid,
            size, mtime_ns, self._time, place.etag, self._stamp if stamp is None else stamp, place.number, place.offset,
        )  # fmt: skip
        if current is None:
            if self._tree.named(parent, name + b"/") is not None:
                entry = msgspec.structs.replace(entry, flags=entry.flags | Flag.SHADOWED)
            entry = self._insert(batch, entry)
        else:
            entry = self._replace(batch, current, entry, place, path, target)
        if target:
            self._tree.set_target(batch, entry.inode, target)
        if xattrs or (current is not None and current.flags & Flag.XATTRS):
            self._tree.set_xattrs(batch, entry.inode, xattrs)
        is_announced = current is None or current.inode != entry.inode or _shown(current) != _shown(entry)
        self._together[path] = entry, is_announced

    def _insert(self, batch: Batch, entry: Entry) -> Entry:
        return self._tree.insert(
            batch, entry.parent, entry.name, entry.flags, mode=entry.mode, uid=entry.uid, gid=entry.gid,
            size=entry.size, mtime_ns=entry.mtime_ns, ctime_ns=entry.ctime_ns, etag=entry.etag, stamp=entry.stamp,
            place=entry.place, offset=entry.offset,
        )  # fmt: skip

    def _replace(self, batch: Batch, current: Entry, entry: Entry, place: Place, path: str, target: bytes) -> Entry:
        entry = msgspec.structs.replace(entry, flags=entry.flags | current.flags & Flag.SHADOWED)
        if target:
            same = current.is_symlink and self._tree.target(current.inode) == target
        else:
            same = current.size == entry.size and self._is_at(current, place, path)
        if (same and not self._is_redated(current, entry)) or self._watcher.keeps(current):
            if self._own and not entry.flags & Flag.ATTRIBUTED:
                entry = msgspec.structs.replace(entry, ctime_ns=self._watcher.ctime_ns(current))
            self._tree.update(batch, entry)
            return entry
        return self._tree.renew_inode(batch, entry)

    def _is_redated(self, current: Entry, entry: Entry) -> bool:
        """The kernel may hold an older mtime of this inode, which it never updates: that of the row, or for an object
        that was only listed LastModified."""
        is_listed = current.is_plain and not current.stamp and not current.flags & Flag.ATTRIBUTED
        is_known = current.mtime_ns == entry.mtime_ns and (not is_listed or current.ctime_ns == entry.mtime_ns)
        if self._own or is_known or entry.is_symlink or self._watcher.keeps(current):
            return False
        return not self._watcher.redated(current)

    def _update(self, batch: Batch, current: Entry, entry: Entry) -> Entry:
        """The same bytes, with other attributes or in another place."""
        if self._is_redated(current, entry):
            return self._tree.renew_inode(batch, entry)
        self._tree.update(batch, entry)
        return entry

    def _remove(self, operation: Remove) -> None:
        above, _, last = operation.path.rpartition("/")
        raw = operation.path.encode() + (b"/" if operation.directory else b"")
        parent = self._paths.directory(above)
        name = last.encode()
        current = None
        if parent is not None:
            current = self._tree.named(parent, name + (b"/" if operation.directory else b""))
        if self._is_older(current, operation.path, operation.hides, directory=operation.directory):
            return
        batch = Batch()
        self._tree.tombstones.write(batch, {raw: Tombstone(self._stamp, operation.hides)})
        if current is None or parent is None:
            self._db.commit(batch)
            return
        if operation.directory:
            self._remove_directory(batch, current)
            return
        if not self._watcher.keeps(current):
            self._tree.remove(batch, current)
        self._db.commit(batch)
        self._paths.notify(parent, name)
        self._paths.prune(parent)

    def _remove_directory(self, batch: Batch, current: Entry) -> None:
        if self._tree.has_children(current.inode):  # it stays for as long as they do
            bare = msgspec.structs.replace(
                current, stamp=0, flags=Flag.DIRECTORY, mode=UNSET, uid=UNSET, gid=UNSET, ctime_ns=self._time
            )
            self._tree.update(batch, bare)
            self._tree.set_xattrs(batch, current.inode, {})
            self._db.commit(batch)
            return
        self._paths.remove_directory(current, batch)
        self._paths.prune(current.parent)

    # -- directories

    def _mkdir(self, operation: Mkdir) -> None:
        above, _, last = operation.path.rpartition("/")
        name, raw = last.encode(), operation.path.encode() + b"/"
        parent = self._paths.directory(above)
        current = None if parent is None else self._tree.named(parent, name + b"/")
        if self._is_older(current, operation.path, "", directory=True):
            return
        if parent is None:
            parent = self._paths.ensure_directory(above, self._time)
        flags = Flag.DIRECTORY | KNOWN | (Flag.XATTRS if operation.xattrs else 0)
        attributes = {
            "mode": operation.mode, "uid": operation.uid, "gid": operation.gid, "mtime_ns": operation.mtime_ns,
            "ctime_ns": self._time, "stamp": self._stamp,
        }  # fmt: skip
        batch = Batch()
        self._tree.tombstones.write(batch, {raw: None})
        if current is None:
            entry = self._paths.insert_directory(parent, operation.path, name, flags, self._time, **attributes)
        else:
            flags |= current.flags & (Flag.MARKER | Flag.LISTED)
            if self._own:
                attributes["ctime_ns"] = current.ctime_ns
            entry = msgspec.structs.replace(current, flags=flags, **attributes)
            self._tree.update(batch, entry)
            if _shown(current) != _shown(entry):
                self._paths.notify(parent, name)
        if operation.xattrs or (current is not None and current.flags & Flag.XATTRS):
            self._tree.set_xattrs(batch, entry.inode, operation.xattrs)
        self._db.commit(batch)

    # -- what applies to one version only

    def _current_at(self, path: str, place: Place) -> tuple[int | None, Entry | None, bool]:
        """Parent inode, entry, and whether the entry is still the version at ``place``; where no name is known, the
        last tells whether the version may come into sight with a listing (a plain object at its own key)."""
        above, _, last = path.rpartition("/")
        parent = self._paths.directory(above)
        current = None if parent is None else self._tree.named(parent, last.encode())
        if current is not None:
            return parent, current, self._is_at(current, place, path) or self._may_follow(current, place)
        tombstone = self._tree.tombstones.get(path.encode())
        unknown = not place.number and (tombstone is None or tombstone.stamp < self._stamp)
        hidden = tombstone is not None and tombstone.etag == place.etag
        return parent, None, unknown and not hidden

    def _may_follow(self, current: Entry, place: Place) -> bool:
        """The plain object that the operation names is perhaps newer than the one listed here: the next question for
        the name, which is made to come, tells."""
        known = self._own or current.stamp or current.ctime_ns >= self._time + NS
        if known or place.number or not current.is_plain:
            return False
        batch = Batch()
        self._tree.forget_listing(batch, current.parent)
        self._db.commit(batch)
        return True

    def _set_attributes(self, operation: SetAttr) -> None:
        """The version's own stamp stays: whoever replaces it without knowing of this wins everywhere."""
        place = self._place(operation.path, operation.object, operation.offset, operation.size, operation.hides)
        _, current, applies = self._current_at(operation.path, place)
        if not applies:
            return
        if current is None or not self._is_at(current, place, operation.path):
            self._set_file(
                operation.path, place, current.etag if current else operation.hides, KNOWN | Flag.ATTRIBUTED,
                size=operation.size, mode=operation.mode, uid=operation.uid, gid=operation.gid,
                mtime_ns=operation.mtime_ns, xattrs=operation.xattrs, stamp=0,
            )  # fmt: skip
            return
        if current.size != operation.size or (self._stamp < PENDING and self._is_attributed_later(current)):
            return
        flags = (current.flags & ~Flag.XATTRS) | KNOWN | Flag.ATTRIBUTED | (Flag.XATTRS if operation.xattrs else 0)
        entry = msgspec.structs.replace(
            current, flags=flags, mode=operation.mode, uid=operation.uid, gid=operation.gid,
            mtime_ns=operation.mtime_ns, ctime_ns=self._time,
        )  # fmt: skip
        batch = Batch()
        entry = self._update(batch, current, entry)
        if flags & Flag.XATTRS or current.flags & Flag.XATTRS:
            self._tree.set_xattrs(batch, entry.inode, operation.xattrs)
        self._db.commit(batch)
        self._watcher.updated(entry)
        if _shown(current) != _shown(entry):
            self._paths.notify(entry.parent, entry.name)

    def _is_attributed_later(self, current: Entry) -> bool:
        return current.stamp >= PENDING or bool(current.flags & Flag.ATTRIBUTED and current.ctime_ns > self._time)

    def _relocate(self, operation: Relocate) -> None:
        before = self._place(
            operation.path, operation.from_object, operation.from_offset, operation.size, operation.from_etag
        )
        after = self._place(operation.path, operation.object, operation.offset, operation.size, operation.hides)
        _, current, applies = self._current_at(operation.path, before)
        if not applies:
            return
        if current is None or not self._is_at(current, before, operation.path):
            self._set_file(
                operation.path, after, current.etag if current else operation.hides, KNOWN,
                size=operation.size, mode=operation.mode, uid=operation.uid, gid=operation.gid,
                mtime_ns=operation.mtime_ns, xattrs={}, stamp=RELOCATED,
            )  # fmt: skip
            return
        if current.size != operation.size:
            return
        batch = Batch()
        relocated = msgspec.structs.replace(
            current, place=after.number, offset=after.offset, etag=after.etag, stamp=current.stamp or RELOCATED
        )
        if not current.flags & Flag.ATTRIBUTES_KNOWN:
            relocated = msgspec.structs.replace(
                relocated, flags=current.flags | KNOWN, mode=operation.mode, uid=operation.uid, gid=operation.gid,
                mtime_ns=operation.mtime_ns,
            )  # fmt: skip
        updated = self._update(batch, current, relocated)
        self._db.commit(batch)
        self._watcher.changing(current.parent, current.name)
        self._watcher.relocated(updated)


def _bit(path: str, length: int) -> int:
    """Which bit of so many bytes a path has."""
    return zlib.crc32(path.encode()) % (8 * length)


def _says_what(operation: Operation) -> bool:
    """Of a file's name: which bytes it has, or that it is gone."""
    return isinstance(operation, Put | Symlink) or (isinstance(operation, Remove) and not operation.directory)


def _is_dated_by_store(entry: Entry) -> bool:
    """``ctime_ns`` is the LastModified of a plain object, not when it was written here or got other attributes."""
    return not entry.flags & Flag.ATTRIBUTED and entry.ctime_ns % NS == 0


def _shown(entry: Entry) -> tuple[int, ...]:
    """What the kernel remembers of an inode."""
    return entry.mode, entry.uid, entry.gid, entry.size, entry.mtime_ns, entry.flags & (Flag.SYMLINK | Flag.SHADOWED)


# -- moves: renames keep identity. The rows of what a commit moved move too, before its operations are applied to them.
#
# Only a hint, and followed only where nothing is lost by it: everything known below the source is named by an operation
# of the record (or not in the store yet), nothing newer is known of either name, and no directory with something in it
# is in the way. Otherwise the operations alone make the same names, with other inodes.

Made: TypeAlias = dict[tuple[str, bool], Put | Symlink | Mkdir]
"""What a record says of a path, as a file (or symbolic link) and as a directory."""


def _carry_over(paths: PathTree, record: Record, stamp: int) -> list[int]:
    """Move the rows of a record's ``moves``; answers the directories that they left, none where nothing moved."""
    made: Made = {
        (operation.path, isinstance(operation, Mkdir)): operation
        for operation in record.operations
        if isinstance(operation, Put | Symlink | Mkdir)
    }
    chosen: list[tuple[str, str, Entry]] = []
    sources = {source for source, _ in record.moves}
    for source, target in record.moves:
        entry = _find(paths, source)
        if entry is None or not _is_covered(paths, entry, source, target, record, made, stamp):
            return []
        if target not in sources and not _is_free(paths, entry, target, stamp):
            return []
        chosen.append((source, target, entry))
    if len({entry.inode for _, _, entry in chosen}) < len(chosen):
        return []  # several renames in one commit: of one name again, once another had it
    for source, _, entry in chosen:
        _free_from_key(paths, entry, source)
        _uncover(paths, entry)
    moving = [(source, target, _find(paths, source)) for source, target, _ in chosen]
    for _, _, found in moving:
        if found is not None:
            batch = Batch()
            paths.tree.detach(batch, found)
            paths.show_file(batch, found)
            paths.database.commit(batch)
            paths.notify(found.parent, found.name)
    paths.forget_paths()
    for _, target, found in moving:
        if found is not None:
            _attach(paths, found, target, record.time)
    return [found.parent for _, _, found in moving if found is not None]


def _is_free(paths: PathTree, entry: Entry, target: str, stamp: int) -> bool:
    """What is at the target, if anything, is what the record replaces."""
    above, _, name = target.rpartition("/")
    parent = paths.directory(above)
    if parent is None:
        return True
    file, directory = (paths.tree.named(parent, name.encode() + end) for end in (b"", b"/"))
    there, other = (directory, file) if entry.is_dir else (file, directory)
    if other is not None:
        return False
    return there is None or (there.stamp <= stamp and not paths.tree.has_children(there.inode))


def _find(paths: PathTree, path: str) -> Entry | None:
    above, _, name = path.rpartition("/")
    parent = paths.directory(above)
    return None if parent is None else paths.tree.child(parent, name.encode())


def _is_covered(
    paths: PathTree, entry: Entry, source: str, target: str, record: Record, made: Made, stamp: int
) -> bool:
    """The record says of everything in sight where it is now, and is the newest to speak of it."""
    every = [(target, entry), *(paths.tree.below(entry.inode, target) if entry.is_dir else ())]
    for path, found in every:
        if found.flags & (Flag.LOCAL | Flag.SHADOWED):
            if found.stamp > stamp:
                return False
            continue
        tombstone = paths.tree.tombstones.get(path.encode() + (b"/" if found.is_dir else b""))
        operation = made.get((path, found.is_dir))
        if (
            operation is None
            or not _is_meant(found, source + path[len(target) :], operation, record)
            or found.stamp > stamp
            or (tombstone is not None and tombstone.stamp > stamp)
        ):
            return False
    return True


def _is_meant(found: Entry, path: str, operation: Put | Symlink | Mkdir, record: Record) -> bool:
    """A plain object carries no commit's time: the one under the name may be newer than what was renamed."""
    if not found.is_plain:
        return True
    if not isinstance(operation, Put) or operation.object <= THIS:
        return False
    ref = record.objects[operation.object]
    return ref.key == path and ref.etag == found.etag


def _free_from_key(paths: PathTree, entry: Entry, source: str) -> None:
    """Plain objects stay at their keys when their names move: from now on the rows say so."""
    every = [(source, entry)]
    if entry.is_dir:
        every += paths.tree.below(entry.inode, source)
    for path, found in every:
        if found.is_plain:
            number = paths.tree.objects.number(path, found.etag, found.size)
            batch = Batch()
            freed = msgspec.structs.replace(found, place=number, etag="")
            paths.tree.update(batch, freed)
            paths.database.commit(batch)
            paths.watcher.relocated(freed)


def _uncover(paths: PathTree, entry: Entry) -> None:
    """What is not in the store yet replaces nothing at its new path, whatever it replaced before."""
    batch = Batch()
    for _, found in paths.tree.below(entry.inode, "") if entry.is_dir else ():
        if found.is_local and (found.etag or found.stamp):
            paths.tree.update(batch, msgspec.structs.replace(found, etag="", stamp=0, place=0, offset=0))
    paths.database.commit(batch)


def _attach(paths: PathTree, entry: Entry, target: str, time: int) -> None:
    above, _, name = target.rpartition("/")
    parent = paths.ensure_directory(above, time)
    batch = Batch()
    for sort_name in (name.encode(), name.encode() + b"/"):
        there = paths.tree.named(parent, sort_name)
        if there is not None:
            paths.tree.remove(batch, there)
    paths.database.commit(batch)
    batch = Batch()
    moved = paths.tree.attach(batch, entry, parent, name.encode())
    paths.database.commit(batch)
    paths.forget_paths()
    paths.watcher.updated(moved)
    paths.notify(parent, name.encode())
