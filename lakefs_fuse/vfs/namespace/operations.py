"""Entries as operations of a commit: what is said of a name so that any other node makes the same entry of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.record import ANY, OWN, Mkdir, ObjectRef, Operation, Put, Remove, SetAttr, Symlink
from lakefs_fuse.meta.entry import NO_OBJECT, PENDING, Entry, Flag
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.meta.tombstones import is_put_since
from lakefs_fuse.meta.tree import Tree

NS = 1_000_000_000


class ObjectRows(Protocol):
    """Objects by their number."""

    def get(self, number: int, /) -> ObjectRow | None: ...


class Rows(Protocol):
    """What operations are made from beside entries: a `Tree`, or a snapshot of one."""

    @property
    def objects(self) -> ObjectRows: ...

    def target(self, inode: int) -> bytes: ...

    def xattrs(self, inode: int) -> dict[str, bytes]: ...


class RowSnapshot(msgspec.Struct, frozen=True):
    """The rows that operations are made from, as they were at one moment."""

    objects: dict[int, ObjectRow] = {}
    target_by_inode: dict[int, bytes] = {}
    xattrs_by_inode: dict[int, dict[str, bytes]] = {}

    def target(self, inode: int) -> bytes:
        return self.target_by_inode.get(inode, b"")

    def xattrs(self, inode: int) -> dict[str, bytes]:
        return self.xattrs_by_inode.get(inode, {})


class ChangeBuilder:
    """Gathers operations and the objects they point into."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._objects = [ObjectRef()]
        self._numbers: dict[ObjectRef, int] = {}
        self.operations: list[Operation] = []
        self.moves: list[tuple[str, str]] = []

    def add_moves(self, names: Iterable[tuple[str, str, Entry, str]]) -> None:
        """Files and directories are at their next path now: that before it, that path, the entry, and ``hides`` as in
        `put`."""
        for before, after, entry, hides in names:
            if entry.flags & Flag.DIRECTORY:
                self.mkdir(after, entry)
            else:
                self.put(after, entry, key=before, hides=hides)

    def add_removals(self, names: Iterable[tuple[str, Entry]]) -> None:
        """As `remove`, of each."""
        for path, entry in names:
            self.remove(path, entry)

    def change(self) -> Change:
        return Change(operations=self.operations, objects=self._objects, moves=self.moves)

    def _index(self, ref: ObjectRef) -> int:
        index = self._numbers.get(ref)
        if index is None:
            index = self._numbers[ref] = len(self._objects)
            self._objects.append(ref)
        return index

    def _place(self, entry: Entry) -> int:
        row = self._rows.objects.get(entry.place) if entry.place else None
        return OWN if row is None else self._index(ObjectRef(row.key, row.etag, row.size))

    def put(
        self, path: str, entry: Entry, *, key: str = "", hides: str = "", replaces: ObjectRef | None = None
    ) -> None:
        """A file, or symbolic link, is at ``path``; a plain object at ``key`` is its bytes (empty: at ``path``).
        ``hides`` is the ETag of the plain object at ``path`` where that is another. ``replaces``: only if the file is
        this object."""
        xattrs = self._rows.xattrs(entry.inode)
        if entry.flags & Flag.SYMLINK:
            target = self._rows.target(entry.inode).decode()
            self.operations.append(
                Symlink(path, target, entry.uid, entry.gid, entry.mtime_ns, hides=hides, xattrs=xattrs)
            )
            return
        if entry.place:
            index = self._place(entry)
        elif key and key != path:
            index = self._index(ObjectRef(key, entry.etag, entry.size))
        else:
            index, hides = OWN, entry.etag
        self.operations.append(
            Put(
                path, index, entry.offset, entry.size, entry.mode, entry.uid, entry.gid, entry.mtime_ns,
                hides=hides, xattrs=xattrs, replaces=ANY if replaces is None else self._index(replaces),
            )
        )  # fmt: skip

    def put_again(self, path: str, entry: Entry, dated_s: int, named: int) -> None:
        """The plain object at ``path`` has bytes that were removed there, or replaced, and are there again. ``dated_s``
        is its LastModified, 0 where unknown, and ``named`` of `when_named`. The preceding removal also ends versions
        that others have stored since, so it is omitted if the date is sufficient."""
        if not is_put_since(dated_s, named):
            self.operations.append(Remove(path))
        self.put(path, entry)
        self.operations[-1] = msgspec.structs.replace(self.operations[-1], dated_s=dated_s)

    def repeat(self, operation: Put, ref: ObjectRef) -> None:
        """A file is where another record said, or in ``ref``."""
        self.operations.append(msgspec.structs.replace(operation, object=self._index(ref)))

    def mkdir(self, path: str, entry: Entry, xattrs: dict[str, bytes] | None = None) -> None:
        kept = self._rows.xattrs(entry.inode) if xattrs is None else xattrs
        self.operations.append(Mkdir(path, entry.mode, entry.uid, entry.gid, entry.mtime_ns, xattrs=kept))

    def remove(self, path: str, entry: Entry, hides: str = "") -> None:
        """The entry's name goes; what lies at its own key is hidden. ``hides`` is the ETag of something else there."""
        is_dir = bool(entry.flags & Flag.DIRECTORY)
        is_overriding = bool(entry.flags & Flag.OVERRIDING)
        by_date = bool(entry.place or entry.flags & Flag.SYMLINK or (is_overriding and entry.is_local))
        if is_overriding and not by_date:
            self.put(path, entry)  # which ends what it had replaced, and no object that another node stores there
        is_listed = not entry.stamp and hides in ("", entry.etag) and not entry.flags & (NO_OBJECT | Flag.ATTRIBUTED)
        is_dated = is_listed and not entry.place and not entry.ctime_ns % NS  # as the store dates an object
        dated_s = entry.ctime_ns // NS if is_dated else 0
        self.operations.append(Remove(path, is_dir, hides or entry.etag, by_date, dated_s))

    def set_attributes(self, path: str, entry: Entry, xattrs: dict[str, bytes] | None = None) -> None:
        """Attributes of an entry of any kind."""
        kept = self._rows.xattrs(entry.inode) if xattrs is None else xattrs
        if entry.flags & Flag.DIRECTORY:
            self.mkdir(path, entry, kept)
        elif entry.flags & Flag.SYMLINK:
            target = self._rows.target(entry.inode).decode()
            self.operations.append(
                Symlink(path, target, entry.uid, entry.gid, entry.mtime_ns, hides=entry.etag, xattrs=kept)
            )
        else:
            self.operations.append(
                SetAttr(
                    path, self._place(entry), entry.offset, entry.size, entry.etag, entry.mode, entry.uid, entry.gid,
                    entry.mtime_ns, xattrs=kept,
                )
            )  # fmt: skip


def when_named(tree: Tree, path: str, etag: str) -> int:
    """Stamp of the newest change that tells of the plain object with this ETag at a path, hides, or removed it; 0 where
    none is known."""
    raw = path.encode("utf-8", "surrogatepass")
    above, _, name = raw.rpartition(b"/")
    parent, removed = tree.directory(above), tree.tombstones.get(raw)
    there = None if parent is None else tree.named(parent, name)
    known = 0 if there is None or there.is_local or there.etag != etag else there.stamp
    if removed is None:
        return known
    return max(known, removed.when_gone(etag), removed.unlisted[1] if removed.unlisted[0] == etag else 0)


def hide_object(builder: ChangeBuilder, tree: Tree, key: str, etag: str) -> None:
    """The plain object at ``key`` with this ETag is not the file of that name, and is not shown there. A removal of a
    file elsewhere that no commit tells of yet is told with it: this is sent ahead, in place of that."""
    raw = key.encode("utf-8", "surrogatepass")
    above, _, name = raw.rpartition(b"/")
    parent = tree.directory(above)
    there = None if parent is None else tree.named(parent, name)
    if there is None or there.is_local or (there.is_plain and there.etag == etag):
        removed = tree.tombstones.get(raw)
        is_untold = removed is not None and removed.floor >= PENDING
        builder.operations.append(Remove(key, hides=etag, by_date=is_untold))
    elif (there.place or there.is_symlink) and there.etag != etag:
        builder.put(key, msgspec.structs.replace(there, etag=etag), hides=etag)
