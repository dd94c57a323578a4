"""Builds the operations of a commit from entries, so that other nodes make the same entries of them.

No I/O, no clock and no state beyond a builder. Trio thread only, because rows of the tree are read.
"""

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
    """The rows that operations are made from besides entries: a `Tree`, or a snapshot of one."""

    @property
    def objects(self) -> ObjectRows: ...

    def target(self, inode: int) -> bytes: ...

    def xattrs(self, inode: int) -> dict[str, bytes]: ...

    def when_put(self, path: str, etag: str) -> int: ...


class RowSnapshot(msgspec.Struct, frozen=True):
    """The rows that operations are made from, as they were at one moment."""

    objects: dict[int, ObjectRow] = {}
    target_by_inode: dict[int, bytes] = {}
    xattrs_by_inode: dict[int, dict[str, bytes]] = {}
    dates: dict[tuple[str, str], int] = {}
    """Those of `Tree.when_put`, by path and ETag."""

    def target(self, inode: int) -> bytes:
        return self.target_by_inode.get(inode, b"")

    def xattrs(self, inode: int) -> dict[str, bytes]:
        return self.xattrs_by_inode.get(inode, {})

    def when_put(self, path: str, etag: str) -> int:
        return self.dates.get((path, etag), 0)


class ObjectRefs:
    """The objects that a record will refer to, each once; their indexes are those of `Record.objects`."""

    def __init__(self) -> None:
        self.objects = [ObjectRef()]
        self._numbers: dict[ObjectRef, int] = {}

    def index(self, ref: ObjectRef) -> int:
        """Return the index of an object, which is added if it is new."""
        index = self._numbers.get(ref)
        if index is None:
            index = self._numbers[ref] = len(self.objects)
            self.objects.append(ref)
        return index


class ChangeBuilder(ObjectRefs):
    """Gathers operations and the objects that they refer to."""

    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self._rows = rows
        self.operations: list[Operation] = []
        self.moves: list[tuple[str, str]] = []

    def add_moves(self, names: Iterable[tuple[str, str, Entry, str]]) -> None:
        """Add the new paths of files and directories. Each of ``names`` is the path before, the path now, the entry,
        and ``hides`` as in `put`."""
        for before, after, entry, hides in names:
            if entry.flags & Flag.DIRECTORY:
                self.mkdir(after, entry)
            else:
                self.put(after, entry, key=before, hides=hides)

    def add_removals(self, names: Iterable[tuple[str, Entry]]) -> None:
        """Call `remove` for each path and entry."""
        for path, entry in names:
            self.remove(path, entry)

    def change(self) -> Change:
        return Change(operations=self.operations, objects=self.objects, moves=self.moves)

    def _place(self, entry: Entry) -> int:
        row = self._rows.objects.get(entry.place) if entry.place else None
        return OWN if row is None else self.index(ObjectRef(row.key, row.etag, row.size))

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
            index = self.index(ObjectRef(key, entry.etag, entry.size))
        else:
            index, hides = OWN, entry.etag
        self.operations.append(
            Put(
                path, index, entry.offset, entry.size, entry.mode, entry.uid, entry.gid, entry.mtime_ns,
                hides=hides, xattrs=xattrs, replaces=ANY if replaces is None else self.index(replaces),
            )
        )  # fmt: skip

    def put_again(self, path: str, entry: Entry, dated_s: int, named: int) -> None:
        """Add that the plain object at ``path`` has bytes that were removed or replaced there, and are there again.

        ``dated_s`` is its LastModified, 0 if unknown; ``named`` is what `when_named` returns. The mark in front lets
        the object count over files elsewhere that this node does not know, so it is left out if the date suffices."""
        if not is_put_since(dated_s, named):
            self.operations.append(Remove(path))
        self.put(path, entry)
        self.operations[-1] = msgspec.structs.replace(self.operations[-1], dated_s=dated_s)

    def mkdir(self, path: str, entry: Entry, xattrs: dict[str, bytes] | None = None) -> None:
        kept = self._rows.xattrs(entry.inode) if xattrs is None else xattrs
        self.operations.append(Mkdir(path, entry.mode, entry.uid, entry.gid, entry.mtime_ns, xattrs=kept))

    def remove(self, path: str, entry: Entry, hides: str = "") -> None:
        """Add the removal of a name, which hides the object at its own key. ``hides`` is the ETag of another object
        there."""
        is_dir = bool(entry.flags & Flag.DIRECTORY)
        is_overriding = bool(entry.flags & Flag.OVERRIDING)
        by_date = bool(entry.place or entry.flags & Flag.SYMLINK or (is_overriding and entry.is_local))
        if is_overriding and not by_date:
            self.put(path, entry)  # it ends what the object had replaced, but no object that another node stores
        is_listed = not (entry.stamp or entry.place or entry.flags & NO_OBJECT) and hides in ("", entry.etag)
        is_dated = is_listed and not entry.ctime_ns % NS  # as the store dates an object
        dated_s = entry.ctime_ns // NS if is_dated else 0
        if is_listed and entry.flags & Flag.ATTRIBUTED:  # the row has the time of the attributes
            dated_s = self._rows.when_put(path, entry.etag)
        self.operations.append(Remove(path, is_dir, hides or entry.etag, by_date, dated_s))

    def set_attributes(self, path: str, entry: Entry, xattrs: dict[str, bytes] | None = None) -> None:
        """Add the attributes of an entry of any kind."""
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
    """Return the stamp of the newest change that named, hid or removed the plain object with this ETag at a path; 0 if
    none is known."""
    raw = path.encode("utf-8", "surrogatepass")
    there, removed = tree.named_at(raw), tree.tombstones.get(raw)
    known = 0 if there is None or there.is_local or there.etag != etag else there.stamp
    if removed is None:
        return known
    return max(known, removed.when_gone(etag), removed.unlisted[1] if removed.unlisted[0] == etag else 0)


def hide_object(builder: ChangeBuilder, tree: Tree, key: str, etag: str) -> None:
    """Add that the plain object at ``key`` with this ETag is not the file of that name, and is not shown there.

    If the removal of a file elsewhere is in no commit yet, this includes it, because this is sent ahead in its place.
    If a file elsewhere hides the object already, the removal leaves that file, and hides the object after it, too:
    another object may have replaced the file by a commit that is not known here."""
    raw = key.encode("utf-8", "surrogatepass")
    there = tree.named_at(raw)
    if there is None or there.is_local or (there.is_plain and there.etag == etag):
        removed = tree.tombstones.get(raw)
        is_untold = removed is not None and removed.floor >= PENDING
        builder.operations.append(Remove(key, hides=etag, by_date=is_untold))
    elif (there.place or there.is_symlink) and there.etag != etag:
        builder.put(key, msgspec.structs.replace(there, etag=etag), hides=etag)
    elif there.etag == etag and not there.flags & Flag.RELOCATED:
        builder.operations.append(Remove(key, hides=etag))
