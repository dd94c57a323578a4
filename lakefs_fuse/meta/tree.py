"""Names and inodes of a lake as this node knows them.

What always holds:

* *unique inodes*: an inode number is never given to a second file, and a cookie stays with its name;
* *directory first*: at most one file and one directory have the same name, and `child` answers the directory;
* *no orphaned rows*: a directory that is not in the tree has no rows below it (`remove` deletes them).

A row that cannot be decoded (indexes come from the store) is left out and counted (`Database.note_damaged`). Memory
holds the sums of hidden keys only. Trio thread only; a crash leaves the rows of whole batches.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from stat import S_ISGID

import msgspec

from lakefs_fuse.meta import schema
from lakefs_fuse.meta.barrier import Barrier
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import FLAGS_LOW, HEAD, NOWHERE, PLACE, ROOT_INODE, UNSET, Entry, Flag, unpack
from lakefs_fuse.meta.object_table import NUMBER_BYTES, Objects, unpack_object
from lakefs_fuse.meta.schema import number_key
from lakefs_fuse.meta.tombstones import Tombstones, unpack_tombstone
from lakefs_fuse.meta.tree_events import TreeEvents

_PAIR = struct.Struct(">QQ")
_LISTING = struct.Struct("<qQIIII")
COOKIE_BYTES = 8

ROWS_AT_ONCE = 20_000
"""Rows read in one go: about 10 ms."""
_KINDS = Flag.DIRECTORY | Flag.LOCAL
COOKIE_MAX = (1 << 64) - 1
DEPTH_MAX = 1024
"""Longest chain of parents that is followed; S3 keys of 1024 bytes cannot be deeper."""


class Listing(msgspec.Struct, frozen=True):
    """A directory was listed completely at ``at_ns`` (wall clock). ``hidden_*`` count keys that cannot be paths:
    an empty, dot or dot-dot component; a NUL; a component over 255 bytes; a file that a directory hides."""

    at_ns: int
    entries: int
    hidden_component: int = 0
    hidden_nul: int = 0
    hidden_long: int = 0
    hidden_conflict: int = 0

    @property
    def hides_keys(self) -> bool:
        return bool(self.hidden_component or self.hidden_nul or self.hidden_long or self.hidden_conflict)


def unpack_listing(row: bytes) -> Listing:
    """Raises struct.error for a row that is none."""
    return Listing(*_LISTING.unpack(row))


def unpack_xattrs(row: bytes) -> dict[str, bytes]:
    """Raises ValueError for a row that is none."""
    return msgspec.msgpack.decode(row, type=dict[str, bytes])


class Tree:
    """See the module's head."""

    def __init__(self, database: Database, events: TreeEvents | None = None) -> None:
        self.database, self._events = database, events or TreeEvents()
        self.objects = Objects(database)
        self.tombstones = Tombstones(database)
        self.hidden = [0, 0, 0, 0]
        """Sums of all listings' ``hidden_*``, in their order."""
        self.mirrored: set[int] = set()
        """Directories of which a part outside holds all names; it listens to the events that keep them right."""
        self.barrier = Barrier(self.entry, self.drop_mirror)
        for listing in self.listings():
            self._count_hidden(listing, 1)

    def _count_hidden(self, listing: Listing | None, sign: int) -> None:
        if listing is not None:
            counts = listing.hidden_component, listing.hidden_nul, listing.hidden_long, listing.hidden_conflict
            self.hidden = [total + sign * count for total, count in zip(self.hidden, counts, strict=True)]

    # -- reading

    def entry(self, inode: int) -> Entry | None:
        """The entry an inode is reached by; None for the root and for inodes that no name leads to any more."""
        key = number_key(schema.INODE, inode)
        place = self.database.get(key)
        if place is None:
            return None
        try:
            parent, cookie = _PAIR.unpack(place)
        except struct.error as error:
            self.database.note_damaged(key, error)
            return None
        return self._at(parent, cookie)

    def at(self, parent: int, cookie: int) -> Entry | None:
        """The entry of a cookie, if it is still there."""
        return self._at(parent, cookie)

    def _at(self, parent: int, cookie: int) -> Entry | None:
        key = schema.ENTRY + _PAIR.pack(parent, cookie)
        row = self.database.get(key)
        return None if row is None else self._read(parent, cookie, key, row)

    def _read(self, parent: int, cookie: int, key: bytes, row: bytes) -> Entry | None:
        try:
            return unpack(parent, cookie, row)
        except (struct.error, ValueError) as error:
            self.database.note_damaged(key, error)
            return None

    def entry_of_row(self, key: bytes) -> Entry | None:
        """As `at`, by the key of the row."""
        return self._at(*_PAIR.unpack(key[1:]))

    def path_of_row(self, key: bytes) -> list[bytes] | None:
        """The path that a row, perhaps a damaged one, belongs to; None where it is unknown."""
        kind, rest = key[:1], key[1:]
        if kind == schema.TOMBSTONE:
            return rest.rstrip(b"/").split(b"/")
        if kind not in (schema.ENTRY, schema.INODE, schema.LISTING, schema.NAME, schema.XATTRS):
            return None
        inode = int.from_bytes(rest[:8], "big")
        above = self.path(inode)
        if above is None or kind not in (schema.ENTRY, schema.NAME):
            return above
        if kind == schema.NAME:
            return [*above, rest[8:].rstrip(b"/")]
        for name, cookie in self.database.scan(number_key(schema.NAME, inode), number_key(schema.NAME, inode + 1)):
            if cookie == rest[8:]:
                return [*above, name[9:].rstrip(b"/")]
        return above

    def child(self, parent: int, name: bytes) -> Entry | None:
        """The directory of that name, else the file."""
        return self.named(parent, name + b"/") or self.named(parent, name)

    def named(self, parent: int, sort_name: bytes) -> Entry | None:
        key = number_key(schema.NAME, parent) + sort_name
        cookie = self.database.get(key)
        if cookie is None:
            return None
        if len(cookie) != COOKIE_BYTES:
            self.database.note_damaged(key, ValueError(f"a cookie of {len(cookie)} bytes"))
            return None
        return self._at(parent, int.from_bytes(cookie, "big"))

    def children(self, parent: int, after: int = 0, until: int = COOKIE_MAX) -> Iterator[Entry]:
        """Entries of a directory with a cookie greater than ``after`` and less than ``until``, in cookie order."""
        scan = self.database.scan(
            schema.ENTRY + _PAIR.pack(parent, max(0, after + 1)), schema.ENTRY + _PAIR.pack(parent, until)
        )
        for key, row in scan:
            entry = self._read(parent, int.from_bytes(key[9:17], "big"), key, row)
            if entry is not None:
                yield entry

    def rows(self, parent: int, after: int = 0) -> tuple[bytes, Iterator[tuple[bytes, bytes]]]:
        """As `children`, not unpacked: what the keys of the directory's rows begin with, and rows from the first on
        that is wanted, beyond the directory's end as well. To be let go before the database is closed."""
        return number_key(schema.ENTRY, parent), self.database.frozen(schema.ENTRY + _PAIR.pack(parent, after + 1))

    def needing_object(self, parent: int, before: int) -> Iterator[list[int]]:
        """Cookies below ``before`` of all that a LIST might show (plain objects, files not stored yet, directories),
        some at a time: few of a million packed names are."""
        prefix, rows = self.rows(parent)
        end = prefix + before.to_bytes(8, "big")
        some: list[int] = []
        for passed, (key, row) in enumerate(rows, 1):
            if key >= end or not key.startswith(prefix):
                break
            if len(row) >= HEAD.size and (row[PLACE] == NOWHERE or row[FLAGS_LOW] & _KINDS):
                some.append(int.from_bytes(key[9:], "big"))
            if passed % ROWS_AT_ONCE == 0:
                yield some
                some = []
        yield some

    def has_children(self, directory: int) -> bool:
        for listener in self._events.names_requested:
            listener()
        return next(self.children(directory), None) is not None

    def path(self, inode: int) -> list[bytes] | None:
        """Names from the root down to an inode ([] for the root); None where the chain is broken."""
        names: list[bytes] = []
        while inode != ROOT_INODE:
            entry = self.entry(inode)
            if entry is None or len(names) > DEPTH_MAX:
                return None
            names.append(entry.name)
            inode = entry.parent
        return names[::-1]

    # -- changing

    def insert(
        self, batch: Batch, parent: int, name: bytes, flags: int, *, cookie: int = 0, inode: int = 0,
        **attributes: int | str,
    ) -> Entry:  # fmt: skip
        """A new name; the caller knows that there is none of that sort name. ``cookie`` is that of a name which the
        same batch removed, ``inode`` one that was set aside for it."""
        inode = inode or self.database.new_inode()
        entry = Entry(parent, cookie or inode, name, inode, flags, **attributes)  # type: ignore[arg-type]
        self._attach(batch, entry)
        if entry.place:
            batch.share(entry.place, 1, entry.size)
        return entry

    def insert_plain(self, batch: Batch, parent: int, files: Iterable[tuple[bytes, int, int, str]]) -> int:
        """As `insert`, for files that a LIST shows and of which no more is known than name, size, mtime and ETag; those
        that are there already are passed over. Answers how many were not. The quickest way for many."""
        get, put, new_inode, pack = self.database.get, batch.put, self.database.new_inode, HEAD.pack
        self.drop_mirror(parent)
        number = parent.to_bytes(8, "big")
        names, rows = schema.NAME + number, schema.ENTRY + number
        added = 0
        for name, size, mtime_ns, etag in files:
            key = names + name
            if get(key) is not None:
                continue
            inode = new_inode()
            cookie, tag = inode.to_bytes(8, "big"), etag.encode()
            put(key, cookie)
            put(schema.INODE + cookie, number + cookie)
            head = pack(inode, 0, UNSET, UNSET, UNSET, size, mtime_ns, mtime_ns, 0, 0, 0, len(tag))
            put(rows + cookie, head + tag + name)
            added += 1
        return added

    def _attach(self, batch: Batch, entry: Entry) -> None:
        place = _PAIR.pack(entry.parent, entry.cookie)
        batch.put(number_key(schema.NAME, entry.parent) + entry.sort_name, entry.cookie.to_bytes(8, "big"))
        batch.put(number_key(schema.INODE, entry.inode), place)
        batch.put(schema.ENTRY + place, entry.pack())
        if entry.parent in self.mirrored:
            for listener in self._events.mirrored_name_added:
                listener(entry.parent, entry.name)

    def drop_mirror(self, directory: int) -> None:
        """The names of a directory are uncertain, or its mirror is full."""
        if directory in self.mirrored:
            self.mirrored.discard(directory)
            for listener in self._events.mirror_dropped:
                listener(directory)

    def _drop_inode(self, inode: int) -> None:
        for listener in self._events.inode_dropped:
            listener(inode)

    def _detach(self, batch: Batch, entry: Entry) -> None:
        batch.delete(number_key(schema.NAME, entry.parent) + entry.sort_name)
        batch.delete(schema.ENTRY + _PAIR.pack(entry.parent, entry.cookie))
        batch.delete(number_key(schema.INODE, entry.inode))

    def update(self, batch: Batch, entry: Entry) -> None:
        """Write an entry's attributes; name, parent, cookie and inode are those it was read with."""
        if entry.is_dir:
            for listener in self._events.directory_updated:
                listener(entry)
            if entry.mode != UNSET and entry.mode & S_ISGID:
                self.drop_mirror(entry.inode)  # whoever makes files in it gives them its group
        else:
            self._share(batch, self._at(entry.parent, entry.cookie), entry)
        batch.put(schema.ENTRY + _PAIR.pack(entry.parent, entry.cookie), entry.pack())

    @staticmethod
    def _share(batch: Batch, before: Entry | None, after: Entry | None) -> None:
        if before is not None and before.place:
            batch.share(before.place, -1, -before.size)
        if after is not None and after.place:
            batch.share(after.place, 1, after.size)

    def renew_inode(self, batch: Batch, entry: Entry, inode: int = 0) -> Entry:
        """Somebody else put another version under the name: it gets an inode of its own, and handles keep the old.
        ``inode`` is one that was set aside for it."""
        self._drop_inode(entry.inode)
        renewed = msgspec.structs.replace(entry, inode=inode or self.database.new_inode())
        batch.delete(number_key(schema.INODE, entry.inode))
        self._forget_rows(batch, entry)
        batch.put(number_key(schema.INODE, renewed.inode), _PAIR.pack(entry.parent, entry.cookie))
        self.update(batch, renewed)
        return renewed

    def detach(self, batch: Batch, entry: Entry) -> None:
        """Take an entry out of its directory, to be `attach`ed elsewhere; what is below it stays below it."""
        self._detach(batch, entry)

    def attach(self, batch: Batch, entry: Entry, parent: int, name: bytes, *, before: Entry | None = None) -> Entry:
        """Put a detached entry into a directory that has no such name; it keeps its inode. ``before`` is what was
        detached, where its bytes are not in the same object."""
        moved = msgspec.structs.replace(entry, parent=parent, name=name, cookie=self.database.new_inode())
        self._attach(batch, moved)
        if before is not None:
            self._share(batch, before, moved)
        return moved

    def _forget_rows(self, batch: Batch, entry: Entry) -> None:
        for kind in (schema.SYMLINK, schema.XATTRS):
            batch.delete(number_key(kind, entry.inode))

    def remove(self, batch: Batch, entry: Entry) -> None:
        """Take a name away, and everything below it."""
        self._drop_inode(entry.inode)
        self._detach(batch, entry)
        self._share(batch, entry, None)
        if entry.flags & (Flag.SYMLINK | Flag.XATTRS):
            self._forget_rows(batch, entry)
        if not entry.is_dir:
            return
        below = [entry.inode]
        while below:
            directory = below.pop()
            for child in self.children(directory):
                self._drop_inode(child.inode)
                batch.delete(number_key(schema.INODE, child.inode))
                self._share(batch, child, None)
                if child.flags & (Flag.SYMLINK | Flag.XATTRS):
                    self._forget_rows(batch, child)
                if child.is_dir:
                    below.append(child.inode)
            for kind in (schema.NAME, schema.ENTRY):
                batch.delete_range(number_key(kind, directory), number_key(kind, directory + 1))
            self.forget_listing(batch, directory)

    # -- what some entries have beside their row

    def target(self, inode: int) -> bytes:
        """Of a symbolic link; empty where there is none."""
        return self.database.get(number_key(schema.SYMLINK, inode)) or b""

    def set_target(self, batch: Batch, inode: int, target: bytes) -> None:
        batch.put(number_key(schema.SYMLINK, inode), target)

    def xattrs(self, inode: int) -> dict[str, bytes]:
        key = number_key(schema.XATTRS, inode)
        raw = self.database.get(key)
        try:
            return {} if raw is None else unpack_xattrs(raw)
        except ValueError as error:
            self.database.note_damaged(key, error)
            return {}

    def set_xattrs(self, batch: Batch, inode: int, xattrs: dict[str, bytes]) -> None:
        """The entry's flag is the caller's."""
        if xattrs:
            batch.put(number_key(schema.XATTRS, inode), msgspec.msgpack.encode(xattrs))
        else:
            batch.delete(number_key(schema.XATTRS, inode))

    # -- listings

    def listing(self, directory: int) -> Listing | None:
        key = number_key(schema.LISTING, directory)
        row = self.database.get(key)
        return None if row is None else self._read_listing(key, row)

    def _read_listing(self, key: bytes, row: bytes) -> Listing | None:
        try:
            return unpack_listing(row)
        except struct.error as error:
            self.database.note_damaged(key, error)
            return None

    def set_listing(self, batch: Batch, directory: int, listing: Listing) -> None:
        self._count_hidden(self.listing(directory), -1)
        self._count_hidden(listing, 1)
        batch.put(number_key(schema.LISTING, directory), _LISTING.pack(*msgspec.structs.astuple(listing)))

    def forget_listing(self, batch: Batch, directory: int) -> None:
        self.drop_mirror(directory)
        for listener in self._events.listing_dropped:
            listener(directory)
        self._count_hidden(self.listing(directory), -1)
        batch.delete(number_key(schema.LISTING, directory))

    def forget_listings(self) -> None:
        """Every directory has to be listed again by whoever wants to know what is in it."""
        for directory in list(self.mirrored):
            self.drop_mirror(directory)
        batch = Batch()
        batch.delete_range(schema.LISTING, schema.end_of(schema.LISTING))
        self.database.commit(batch)
        self.hidden = [0, 0, 0, 0]

    def listings(self) -> Iterator[Listing]:
        for key, row in self.database.scan(schema.LISTING, schema.end_of(schema.LISTING)):
            listing = self._read_listing(key, row)
            if listing is not None:
                yield listing

    def resolve(self, path: list[bytes]) -> Entry | None:
        """The entry of a path from the root; None where a name is unknown, and for the root itself."""
        entry, parent = None, ROOT_INODE
        for name in path:
            entry = self.child(parent, name)
            if entry is None:
                return None
            parent = entry.inode
        return entry


def damaged_rows(database: Database) -> Iterator[tuple[bytes, str]]:
    """Keys of the rows of names that cannot be decoded, and why; everything else leaves such rows out."""
    for kind, decode in _DECODERS.items():
        for key, row in database.scan(kind, schema.end_of(kind)):
            try:
                decode(row)
            except (struct.error, ValueError) as error:
                yield key, str(error)[:200]


def _of_bytes(count: int) -> Callable[[bytes], object]:
    def decode(row: bytes) -> None:
        if len(row) != count:
            raise ValueError(f"{len(row)} bytes")

    return decode


_DECODERS: dict[bytes, Callable[[bytes], object]] = {
    schema.ENTRY: lambda row: unpack(0, 0, row),
    schema.INODE: _of_bytes(_PAIR.size),
    schema.LISTING: unpack_listing,
    schema.NAME: _of_bytes(COOKIE_BYTES),
    schema.OBJECT: lambda row: unpack_object(0, row),
    schema.OBJECT_NUMBER: _of_bytes(NUMBER_BYTES),
    schema.TOMBSTONE: unpack_tombstone,
    schema.XATTRS: unpack_xattrs,
}
