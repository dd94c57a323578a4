"""Names and inodes of a lake as this node knows them.

What always holds:

* *unique inodes*: an inode number is never given to a second file, and a cookie stays with its name;
* *directory first*: at most one file and one directory have the same name, and `child` answers the directory;
* *no orphaned rows*: a directory that is not in the tree has no rows below it (`remove` deletes them).

A row that cannot be decoded (indexes come from the store) is skipped and counted (`Database.note_damaged`). Memory
holds the sums of hidden keys, and paths of directories until one moves. Trio thread only; a crash leaves the rows of
whole batches.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from stat import S_ISGID

import msgspec

from lakefs_fuse.errors import FileError
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.barrier import Barrier
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import (
    FLAGS_LOW,
    HEAD,
    MTIME_NS_MAX,
    MTIME_NS_MIN,
    NAME_BYTES_MAX,
    NOWHERE,
    PLACE,
    ROOT_INODE,
    UNSET,
    Entry,
    Flag,
    kept_ns,
)
from lakefs_fuse.meta.object_table import NUMBER_BYTES, Objects, unpack_object
from lakefs_fuse.meta.schema import NUMBER
from lakefs_fuse.meta.tombstones import Tombstones, unpack_tombstone
from lakefs_fuse.meta.tree_events import TreeEvents

_PAIR = struct.Struct(">QQ")
_SIZES = struct.Struct("<QH12xQ")
"""Inode, flags and size in a row (`HEAD`)."""
_LISTING = struct.Struct("<qQIIII")
COOKIE_BYTES = 8
_DOTS = b".", b".."
ROWS_AT_ONCE = 1024
"""Rows read, and mostly passed over, without interruption: about 1 ms."""
CHILDREN_AT_ONCE = 512
"""Entries of a step of a walk: about 5 ms."""
ROWS_COUNTED = 1000
"""Rows of a step of a count: about 1 ms."""
ROWS_TOGETHER = 512
"""Rows whose keys are computed first, and which are then read together."""
_KINDS = Flag.DIRECTORY | Flag.LOCAL
COOKIE_MAX = (1 << 64) - 1
FIRST_MAX = 4096
"""Directories of which the first entry is in memory."""
PATHS_MAX = 1024
"""Directories whose paths are in memory. Each operation on a name needs the path of its directory two or three times,
and each component is two rows."""
DEPTH_MAX = 1024
"""Longest chain of parents that is followed; S3 keys of 1024 bytes cannot be deeper."""


class Usage(msgspec.Struct, frozen=True):
    """Names of files and directories, and the bytes of the files."""

    names: int = 0
    bytes: int = 0


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
        """Return whether there are keys without rows. A file that a directory hides has one, and may be gone by now."""
        return bool(self.hidden_component or self.hidden_nul or self.hidden_long)


def unpack_listing(row: bytes) -> Listing:
    """Raises struct.error for a row that is none."""
    return Listing(*_LISTING.unpack(row))


def unpack_xattrs(row: bytes) -> dict[str, bytes]:
    """Raises ValueError for a row that is none."""
    return msgspec.msgpack.decode(row, type=dict[str, bytes])


def pack_entry(entry: Entry) -> bytes:
    """The row of an entry, whose times are the nearest that a lake keeps."""
    etag = entry.etag.encode()
    mtime_ns, ctime_ns = entry.mtime_ns, entry.ctime_ns
    if not (MTIME_NS_MIN <= mtime_ns <= MTIME_NS_MAX and MTIME_NS_MIN <= ctime_ns <= MTIME_NS_MAX):
        mtime_ns, ctime_ns = kept_ns(mtime_ns), kept_ns(ctime_ns)
    return (
        HEAD.pack(
            entry.inode, entry.flags, entry.mode, entry.uid, entry.gid, entry.size, mtime_ns, ctime_ns,
            entry.stamp, entry.place, entry.offset, len(etag),
        )
        + etag
        + entry.name
    )  # fmt: skip


def unpack_entry(parent: int, cookie: int, row: bytes) -> Entry:
    """The entry of a row; `parent` and `cookie` are its key. Raises struct.error for a row that was cut, ValueError for
    one that has no name that the kernel would take: one such name ends the listing of its whole directory."""
    (inode, flags, mode, uid, gid, size, mtime_ns, ctime_ns, stamp, place, offset, etag_length) = HEAD.unpack_from(row)
    at = HEAD.size + etag_length
    name = row[at:]
    if not 0 < len(name) <= NAME_BYTES_MAX or b"/" in name or b"\0" in name or name in _DOTS:
        raise ValueError(f"a name {name[:40]!r}")
    return Entry(
        parent, cookie, name, inode, flags, mode, uid, gid, size, mtime_ns, ctime_ns,
        row[HEAD.size : at].decode(), stamp, place, offset,
    )  # fmt: skip


class Tree:
    """See the module's head."""

    def __init__(self, database: Database, events: TreeEvents | None = None) -> None:
        self.database, self._events = database, events or TreeEvents()
        self.objects = Objects(database)
        self.tombstones = Tombstones(database)
        self.hidden = [0, 0, 0, 0]
        """Sums of all listings' ``hidden_*``, in their order."""
        self._paths: dict[int, list[bytes]] = {}
        """Names from directories that were asked for up to the root."""
        database.moved.append(self._paths.clear)
        self.mirrored: set[int] = set()
        """Directories of which another component holds all names; it listens to the events that keep its copy
        correct."""
        self.barrier = Barrier(self.entry, self.drop_mirror)
        self._first: dict[int, int] = {}
        """By directory: a cookie below which it has no entry; COOKIE_MAX if it is empty. Without it each look for the
        first entry of a directory from which many were removed would have RocksDB read over all of their deleted rows.
        """
        database.reopened.append(self._first.clear)
        database.ingested.append(self._first.clear)
        self._sum_up()
        database.reopened.append(self._sum_up)

    def _sum_up(self) -> None:
        self.hidden = [0, 0, 0, 0]
        for listing in self.listings():
            self._count_hidden(listing, 1)

    def _count_hidden(self, listing: Listing, sign: int) -> None:
        counts = listing.hidden_component, listing.hidden_nul, listing.hidden_long, listing.hidden_conflict
        self.hidden = [total + sign * count for total, count in zip(self.hidden, counts, strict=True)]

    # -- reading

    def entry(self, inode: int) -> Entry | None:
        """The entry of an inode; None for the root and for inodes without a name."""
        found = self.database.linked([(schema.INODE + NUMBER.pack(inode), schema.ENTRY)], _PAIR.size)
        return found and self._read(*found)

    def at(self, parent: int, cookie: int) -> Entry | None:
        """The entry of a cookie, if it still exists."""
        return self.entry_of_row(schema.ENTRY + _PAIR.pack(parent, cookie))

    def entry_of_row(self, key: bytes) -> Entry | None:
        """As `at`, for the key of the row."""
        return self._read(key, self.database.get(key))

    def _read(self, key: bytes, row: bytes | None) -> Entry | None:
        if row is None:
            return None
        try:
            parent, cookie = _PAIR.unpack_from(key, 1)
            return unpack_entry(parent, cookie, row)
        except (struct.error, ValueError) as error:
            self.database.note_damaged(key, error)
            return None

    def path_of_row(self, key: bytes) -> list[bytes] | None:
        """The path of a row, perhaps a damaged one; None if it is unknown."""
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
        for name, cookie in self.database.scan(schema.NAME + NUMBER.pack(inode), schema.NAME + NUMBER.pack(inode + 1)):
            if cookie == rest[8:]:
                return [*above, name[9:].rstrip(b"/")]
        return above

    def child(self, parent: int, name: bytes) -> Entry | None:
        """The directory of that name, else the file."""
        directory = NUMBER.pack(parent)
        key, prefix = schema.NAME + directory + name, schema.ENTRY + directory
        found = self.database.linked([(key + b"/", prefix), (key, prefix)], COOKIE_BYTES)
        if found is None:
            return None
        entry = self._read(*found)
        return self.named(parent, name) if entry is None else entry  # the file, where the directory's row is damaged

    def named(self, parent: int, sort_name: bytes) -> Entry | None:
        """The directory or the file of that sort name."""
        directory = NUMBER.pack(parent)
        found = self.database.linked([(schema.NAME + directory + sort_name, schema.ENTRY + directory)], COOKIE_BYTES)
        return found and self._read(*found)

    def named_many(self, names: Iterable[tuple[int, bytes]]) -> list[Entry | None]:
        """As `named`, for each pair of a parent (0: a missing directory) and a sort name."""
        links = list[tuple[bytes, bytes]]()
        is_present = list[bool]()
        before, name_prefix, entry_prefix = 0, b"", b""
        for parent, sort_name in names:
            if parent != before:
                directory = NUMBER.pack(parent)
                before, name_prefix, entry_prefix = parent, schema.NAME + directory, schema.ENTRY + directory
            is_present.append(parent > 0)
            if parent:
                links.append((name_prefix + sort_name, entry_prefix))
        found = iter(self.database.linked_many(links, COOKIE_BYTES))
        rows = (next(found) if present else None for present in is_present)
        return [row and self._read(*row) for row in rows]

    def child_many(self, names: Sequence[tuple[int, bytes]]) -> list[Entry | None]:
        """As `child`, for each pair of a parent (0: a missing directory) and a name."""
        found = self.named_many([*((parent, name + b"/") for parent, name in names), *names])
        return [directory or file for directory, file in zip(found, found[len(names) :], strict=False)]

    def children_at(self, paths: Iterable[bytes]) -> list[Entry | None]:
        """The directory of each path, else the file; a slash at the end does not count."""
        return self.child_many(self._split([path.removesuffix(b"/") for path in paths]))

    def _split(self, paths: Iterable[bytes]) -> list[tuple[int, bytes]]:
        """The directory (0 where it is not known) and the last component of each path."""
        directories: dict[bytes, int] = {}
        names = []
        for path in paths:
            above, _, name = path.rpartition(b"/")
            if above not in directories:
                directories[above] = self.directory(above) or 0
            names.append((directories[above], name))
        return names

    def children(self, parent: int, after: int = 0, until: int = COOKIE_MAX) -> Iterator[Entry]:
        """Entries of a directory with a cookie greater than ``after`` and less than ``until``, in cookie order."""
        is_first = after <= 0
        begin = self._first.get(parent, 0) if is_first else after + 1
        for key, row in self.database.scan(
            schema.ENTRY + _PAIR.pack(parent, begin), schema.ENTRY + _PAIR.pack(parent, until)
        ):
            entry = self._read(key, row)
            if entry is None:
                continue
            if is_first:
                self._note_first(parent, entry.cookie)
                is_first = False
            yield entry
        if is_first and until == COOKIE_MAX:
            self._note_first(parent, COOKIE_MAX)

    def _note_first(self, directory: int, cookie: int) -> None:
        if len(self._first) >= FIRST_MAX:
            self._first.clear()
        self._first[directory] = cookie

    def _note_added(self, directory: int, cookie: int) -> None:
        """A committed batch added an entry."""
        if cookie < self._first.get(directory, 0):
            self._first[directory] = cookie

    def children_in_steps(self, parent: int, after: int = 0) -> Iterator[list[Entry]]:
        """As `children`, CHILDREN_AT_ONCE at a time, including names that are added between two steps. Between two
        steps no iterator of the database is open."""
        while some := list(islice(self.children(parent, after), CHILDREN_AT_ONCE)):
            yield some
            if len(some) < CHILDREN_AT_ONCE:
                return
            after = some[-1].cookie

    def children_by_name(self, parent: int) -> Iterator[Entry]:
        """Entries of a directory in the order of their sort names."""
        names = self.database.scan(schema.NAME + NUMBER.pack(parent), schema.NAME + NUMBER.pack(parent + 1))
        while some := list(islice(names, ROWS_TOGETHER)):
            keys = [schema.ENTRY + name[1:9] + cookie for name, cookie in some if len(cookie) == COOKIE_BYTES]
            for key, row in zip(keys, self.database.get_many(keys), strict=True):
                entry = self._read(key, row)
                if entry is not None:
                    yield entry

    def below(self, directory: int, path: str) -> Iterator[tuple[str, Entry]]:
        """Every entry below the directory at a path ("" is the root) with its path, directories before their
        entries."""
        levels = [(path, self.children(directory))]
        while levels:
            above, children = levels[-1]
            entry = next(children, None)
            if entry is None:
                levels.pop()
                continue
            name = entry.name.decode(*schema.PATH)
            below = f"{above}/{name}" if above else name
            yield below, entry
            if entry.flags & Flag.DIRECTORY:
                levels.append((below, self.children(entry.inode)))

    def rows(self, parent: int, after: int = 0) -> tuple[bytes, Iterator[tuple[bytes, bytes]]]:
        """As `children`, not unpacked: the prefix of the directory's keys, and its rows from the first requested one
        on. Delete the iterator before the database is closed."""
        is_first = after <= 0
        begin = self._first.get(parent, 0) if is_first else after + 1
        keys, end = schema.ENTRY + NUMBER.pack(parent), _entries_of(parent)[1]
        rows = self.database.frozen(keys + NUMBER.pack(begin), end)
        if not is_first:
            return keys, rows
        first = next(rows, None)
        self._note_first(parent, COOKIE_MAX if first is None else int.from_bytes(first[0][9:], "big"))
        return keys, rows if first is None else chain((first,), rows)

    def needing_object(self, parent: int, before: int) -> Iterator[list[int]]:
        """Cookies below ``before`` of all that a LIST might show (plain objects, files not stored yet, directories),
        some at a time: few of a million packed names are."""
        prefix, some = schema.ENTRY + NUMBER.pack(parent), list[int]()
        for passed, (key, row) in enumerate(self.database.scan(prefix, prefix + NUMBER.pack(before)), 1):
            if len(row) >= HEAD.size and (row[PLACE] == NOWHERE or row[FLAGS_LOW] & _KINDS):
                some.append(int.from_bytes(key[9:], "big"))
            if passed % ROWS_AT_ONCE == 0:
                yield some
                some = []
        yield some

    def changed_entries(self, keys: Iterable[bytes]) -> set[tuple[int, int]]:
        """Parents and cookies of the entries that have one of these rows; the cookie is 0 where all entries of a
        directory were deleted."""
        found: set[tuple[int, int]] = set()
        for key in keys:
            if key[:1] == schema.ENTRY:
                found.add(_PAIR.unpack_from(key.ljust(1 + _PAIR.size, b"\0"), 1))
            elif key[:1] in (schema.SYMLINK, schema.XATTRS):
                place = self.database.get(schema.INODE + key[1:9])
                if place is not None and len(place) == _PAIR.size:
                    found.add(_PAIR.unpack(place))
        return found

    def changed_paths(self, keys: Iterable[bytes]) -> set[bytes]:
        """Paths with one of these rows of what lies, or lay, at their own keys: slashes behind those of directories."""
        at_key = (key for key in keys if key[:1] in (schema.TOMBSTONE, schema.OBJECT_NUMBER))
        return {key[1:].partition(b"\0")[0] for key in at_key}

    def has_children(self, directory: int) -> bool:
        for listener in self._events.names_requested:
            listener()
        return next(self.children(directory), None) is not None

    def own_etags(self, paths: Sequence[str], parent: int | None = None) -> list[str]:
        """For each path the ETag of the plain object that is known to be at its own key, visible or hidden, or that may
        be stored there; empty for none. ``parent`` is the inode of the directory of all, where that is known."""
        raw_paths = [path.encode(*schema.PATH) for path in paths]
        names = self._split(raw_paths) if parent is None else [(parent, raw.rpartition(b"/")[2]) for raw in raw_paths]
        entries, tombstones = self.named_many(names), self.tombstones.get_many(raw_paths)
        etags = []
        for path, entry, tombstone in zip(paths, entries, tombstones, strict=True):
            etag = "" if entry is None else entry.etag
            if not etag and tombstone is not None:
                etag = tombstone.etag
            if not etag and self.objects.plain and (used := self.objects.used(path)) is not None:
                etag = used.etag
            etags.append(etag)
        return etags

    def when_put(self, path: str, etag: str) -> int:
        """Return the date, in seconds, of the plain object with this ETag at a path, if that was removed there before
        and is there again; 0 if it is not known."""
        tombstone = self.tombstones.get(path.encode(*schema.PATH))
        return 0 if tombstone is None else tombstone.when_put(etag)

    def path(self, inode: int) -> list[bytes] | None:
        """Names from the root down to an inode ([] for the root); None where the chain is broken."""
        names, lowest = list[bytes](), (0, 0)
        if len(self._paths) >= PATHS_MAX:
            self._paths.clear()
        while inode != ROOT_INODE:
            known = self._paths.get(inode)
            if known is not None:
                names += known
                break
            entry = self.entry(inode)
            if entry is None or len(names) > DEPTH_MAX:
                return None
            if entry.flags & Flag.DIRECTORY and not lowest[0]:
                lowest = inode, len(names)
            names.append(entry.name)
            inode = entry.parent
        if lowest[0]:
            self._paths[lowest[0]] = names[lowest[1] :]
        return names[::-1]

    def _move_directory(self, batch: Batch) -> None:
        """Paths change, or end, when the batch is committed."""
        batch.committed.append(self.database.note_move)

    def prefix(self, directory: int) -> str:
        """Keys of a directory's children begin with this; empty for the root. Raises FileError(ESTALE)."""
        path = self.path(directory)
        if path is None:
            raise FileError(errno.ESTALE)
        return b"".join(name + b"/" for name in path).decode(*schema.PATH)

    def key(self, entry: Entry) -> str:
        """The key of a file, or of a directory's marker. Raises FileError(ESTALE)."""
        return self.path_of(entry) + ("/" if entry.flags & Flag.DIRECTORY else "")

    def path_of(self, entry: Entry) -> str:
        """The path of an entry, without a slash at its end. Raises FileError(ESTALE)."""
        return self.prefix(entry.parent) + entry.name.decode(*schema.PATH)

    def usage(self, top: int = ROOT_INODE) -> Iterator[Usage]:
        """Count the entries below a directory; each step reads about ROWS_COUNTED rows, and yields the counts so far.
        Between two steps no iterator of the database is open. Raises CacheError."""
        is_whole, names, size, rows_left = top == ROOT_INODE, 0, 0, ROWS_COUNTED
        ranges = [(schema.ENTRY, schema.end_of(schema.ENTRY)) if is_whole else _entries_of(top)]
        while ranges:
            begin, end = ranges.pop()
            rows = list(islice(self.database.scan(begin, end), rows_left))
            if len(rows) == rows_left:
                ranges.append((rows[-1][0] + b"\0", end))
            for _, row in rows:
                inode, flags, bytes_of_file = _SIZES.unpack_from(row.ljust(_SIZES.size, b"\0"))
                if flags & Flag.SHADOWED:
                    continue
                names += 1
                if not flags & Flag.DIRECTORY:
                    size += bytes_of_file
                elif not is_whole:
                    ranges.append(_entries_of(inode))
            rows_left -= len(rows) + 1  # a directory without names costs a lookup, too
            if rows_left <= 0:
                rows_left = ROWS_COUNTED
                yield Usage(names, size)
        yield Usage(names, size)

    # -- changing

    def insert(
        self, batch: Batch, parent: int, name: bytes, flags: int, *, cookie: int = 0, inode: int = 0,
        **attributes: int | str,
    ) -> Entry:  # fmt: skip
        """Add a name; the caller knows that there is none of that sort name. ``cookie`` is that of a name removed in
        the same batch, ``inode`` a number reserved for it."""
        return self.insert_entry(batch, Entry(parent, cookie, name, inode, flags, **attributes))  # type: ignore[arg-type]

    def insert_entry(self, batch: Batch, entry: Entry) -> Entry:
        """As `insert`: the entry gets an inode and a cookie if it has none."""
        inode = entry.inode or self.database.new_inode()
        entry = msgspec.structs.replace(entry, inode=inode, cookie=entry.cookie or inode)
        self._attach(batch, entry)
        if entry.place:
            batch.shares.append((entry.place, 1, entry.size))
        return entry

    def insert_plain(self, batch: Batch, parent: int, files: Iterable[tuple[bytes, int, int, str]]) -> int:
        """As `insert`, for files of a LIST of which only name, size, mtime and ETag are known; existing ones are
        skipped. Returns how many were added. The fastest way for many."""
        get, rows, new_inode = self.database.get, batch.rows, self.database.new_inode
        pack, pack_number = HEAD.pack, NUMBER.pack
        self.drop_mirror(parent)
        number = NUMBER.pack(parent)
        names, entries = schema.NAME + number, schema.ENTRY + number
        added = 0
        batch.committed.append(partial(self._note_added, parent, self.database.inode_next))
        for name, size, mtime_ns, etag in files:
            key = names + name
            if get(key) is not None:
                continue
            inode = new_inode()
            if not MTIME_NS_MIN <= mtime_ns <= MTIME_NS_MAX:
                mtime_ns = kept_ns(mtime_ns)
            cookie, tag = pack_number(inode), etag.encode()
            rows[key] = cookie
            rows[schema.INODE + cookie] = number + cookie
            head = pack(inode, 0, UNSET, UNSET, UNSET, size, mtime_ns, mtime_ns, 0, 0, 0, len(tag))
            rows[entries + cookie] = head + tag + name
            added += 1
        return added

    def _attach(self, batch: Batch, entry: Entry) -> None:
        place = _PAIR.pack(entry.parent, entry.cookie)
        batch.rows[_name_key(entry)] = place[8:]
        batch.rows[schema.INODE + NUMBER.pack(entry.inode)] = place
        batch.rows[schema.ENTRY + place] = pack_entry(entry)
        batch.committed.append(partial(self._note_added, entry.parent, entry.cookie))
        if entry.parent in self.mirrored:
            for listener in self._events.mirrored_name_added:
                listener(entry.parent, entry.name)

    def drop_mirror(self, directory: int) -> None:
        """The names of a directory are uncertain, or its mirror is full."""
        if directory in self.mirrored:
            self.mirrored.discard(directory)
            for listener in self._events.mirror_dropped:
                listener(directory)

    def drop_mirrors(self) -> None:
        """The names of all directories are uncertain, or names of other lengths may be added to some."""
        for directory in list(self.mirrored):
            self.drop_mirror(directory)

    def _drop_inode(self, inode: int) -> None:
        for listener in self._events.inode_dropped:
            listener(inode)

    def detach(self, batch: Batch, entry: Entry) -> None:
        """Remove an entry from its directory, to `attach` it elsewhere; entries below it stay below it."""
        if entry.flags & Flag.DIRECTORY:
            self._move_directory(batch)
        batch.rows[_name_key(entry)] = None
        batch.rows[schema.ENTRY + _PAIR.pack(entry.parent, entry.cookie)] = None
        batch.rows[schema.INODE + NUMBER.pack(entry.inode)] = None
        if entry.parent in self.mirrored:
            batch.committed.append(partial(self._end_mirrored_name, entry.parent, entry.name))

    def _end_mirrored_name(self, directory: int, name: bytes) -> None:
        """A committed batch removed a name, and may have given it to another entry."""
        key = schema.NAME + NUMBER.pack(directory) + name
        if directory in self.mirrored and self.database.get_many([key, key + b"/"]) == [None, None]:
            for listener in self._events.mirrored_name_removed:
                listener(directory, name)

    def update(self, batch: Batch, entry: Entry) -> None:
        """Write an entry's attributes; name, parent, cookie and inode must be unchanged."""
        key = schema.ENTRY + _PAIR.pack(entry.parent, entry.cookie)
        if entry.flags & Flag.DIRECTORY:
            for listener in self._events.directory_updated:
                listener(entry)
            if entry.mode != UNSET and entry.mode & S_ISGID:
                self.drop_mirror(entry.inode)  # new files in it inherit its group
        else:
            self._share(batch, self.entry_of_row(key), entry)
        batch.rows[key] = pack_entry(entry)

    def is_in_batch(self, batch: Batch, entry: Entry) -> bool:
        """Whether a batch writes or removes this entry."""
        row = schema.ENTRY + _PAIR.pack(entry.parent, entry.cookie)
        return batch.changes(row) or batch.changes(schema.INODE + NUMBER.pack(entry.inode))

    def update_files(self, batch: Batch, changes: Iterable[tuple[Entry, Entry]]) -> None:
        """As `update`, for files: each as it was read, and as it is now."""
        for before, after in changes:
            self._share(batch, before, after)
            batch.rows[schema.ENTRY + _PAIR.pack(after.parent, after.cookie)] = pack_entry(after)

    def restamp(self, batch: Batch, entries: Iterable[Entry], stamp: int) -> None:
        """As `update`, for entries of which only the stamp changes, which the kernel does not see."""
        for entry in entries:
            stamped = msgspec.structs.replace(entry, stamp=stamp)
            batch.rows[schema.ENTRY + _PAIR.pack(entry.parent, entry.cookie)] = pack_entry(stamped)

    @staticmethod
    def _share(batch: Batch, before: Entry | None, after: Entry | None) -> None:
        if before is not None and after is not None and (before.place, before.size) == (after.place, after.size):
            return
        if before is not None and before.place:
            batch.shares.append((before.place, -1, -before.size))
        if after is not None and after.place:
            batch.shares.append((after.place, 1, after.size))

    def renew_inode(self, batch: Batch, entry: Entry, inode: int = 0) -> Entry:
        """Give the name to another version, which gets a new inode, while handles keep the old one. ``inode`` is a
        number reserved for it."""
        self._drop_inode(entry.inode)
        if entry.flags & Flag.DIRECTORY:
            self._move_directory(batch)
        renewed = msgspec.structs.replace(entry, inode=inode or self.database.new_inode())
        batch.rows[schema.INODE + NUMBER.pack(entry.inode)] = None
        self._forget_rows(batch, entry)
        batch.rows[schema.INODE + NUMBER.pack(renewed.inode)] = _PAIR.pack(entry.parent, entry.cookie)
        self.update(batch, renewed)
        return renewed

    def attach(
        self, batch: Batch, entry: Entry, parent: int, name: bytes, *, cookie: int = 0, before: Entry | None = None
    ) -> Entry:
        """Put a detached entry into a directory that has no such name; it keeps its inode. ``cookie`` is that of the
        name if the same batch takes it from another entry: readers of the directory may have seen the name.
        ``before`` is the detached entry, if its bytes are in another object."""
        moved = msgspec.structs.replace(entry, parent=parent, name=name, cookie=cookie or self.database.new_inode())
        self._attach(batch, moved)
        if entry.flags & Flag.DIRECTORY:
            self.drop_mirrors()  # below it names may have other lengths
        if before is not None:
            self._share(batch, before, moved)
        return moved

    def _forget_rows(self, batch: Batch, entry: Entry) -> None:
        for kind in (schema.SYMLINK, schema.XATTRS):
            batch.rows[kind + NUMBER.pack(entry.inode)] = None

    def show_file(self, batch: Batch, directory: Entry) -> None:
        """Show the file of the same name that a directory hid, because the directory goes."""
        is_dir = directory.flags & Flag.DIRECTORY
        file = self.named(directory.parent, directory.name) if is_dir else None
        if file is not None and file.flags & Flag.SHADOWED:
            self.update(batch, msgspec.structs.replace(file, flags=file.flags & ~Flag.SHADOWED))

    def remove(self, batch: Batch, entry: Entry) -> None:
        """Remove a name, and everything below it."""
        self._drop_inode(entry.inode)
        self.detach(batch, entry)
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
                batch.rows[schema.INODE + NUMBER.pack(child.inode)] = None
                self._share(batch, child, None)
                if child.flags & (Flag.SYMLINK | Flag.XATTRS):
                    self._forget_rows(batch, child)
                if child.is_dir:
                    below.append(child.inode)
            for kind in (schema.NAME, schema.ENTRY):
                batch.delete_range(kind + NUMBER.pack(directory), kind + NUMBER.pack(directory + 1))
            self.forget_listing(batch, directory)

    # -- what some entries have beside their row

    def target(self, inode: int) -> bytes:
        """Of a symbolic link; empty where there is none."""
        return self.database.get(schema.SYMLINK + NUMBER.pack(inode)) or b""

    def set_target(self, batch: Batch, inode: int, target: bytes) -> None:
        batch.rows[schema.SYMLINK + NUMBER.pack(inode)] = target

    def xattrs(self, inode: int) -> dict[str, bytes]:
        key = schema.XATTRS + NUMBER.pack(inode)
        raw = self.database.get(key)
        try:
            return {} if raw is None else unpack_xattrs(raw)
        except ValueError as error:
            self.database.note_damaged(key, error)
            return {}

    def set_xattrs(self, batch: Batch, inode: int, xattrs: dict[str, bytes]) -> None:
        """The entry's flag is the caller's."""
        batch.rows[schema.XATTRS + NUMBER.pack(inode)] = msgspec.msgpack.encode(xattrs) if xattrs else None

    # -- listings

    def listing(self, directory: int) -> Listing | None:
        key = schema.LISTING + NUMBER.pack(directory)
        row = self.database.get(key)
        return None if row is None else self._read_listing(key, row)

    def _read_listing(self, key: bytes, row: bytes) -> Listing | None:
        try:
            return unpack_listing(row)
        except struct.error as error:
            self.database.note_damaged(key, error)
            return None

    def set_listing(self, batch: Batch, directory: int, listing: Listing | None) -> None:
        """``None`` deletes the row."""
        key = schema.LISTING + NUMBER.pack(directory)
        row = batch.rows[key] if key in batch.rows else self.database.get(key)
        before = None if row is None else self._read_listing(key, row)
        batch.rows[key] = None if listing is None else _LISTING.pack(*msgspec.structs.astuple(listing))
        for each, sign in ((before, -1), (listing, 1)):
            if each is not None and (each.hides_keys or each.hidden_conflict):
                batch.committed.append(partial(self._count_hidden, each, sign))

    def date_listing(self, batch: Batch, directory: int, at_ns: int) -> None:
        """The listing of a directory counts from another time on, if there is one."""
        listing = self.listing(directory)
        if listing is not None:
            self.set_listing(batch, directory, msgspec.structs.replace(listing, at_ns=at_ns))

    def forget_listing(self, batch: Batch, directory: int) -> None:
        self.drop_mirror(directory)
        for listener in self._events.listing_dropped:
            listener(directory)
        self.set_listing(batch, directory, None)

    def forget_listings(self) -> None:
        """Require a new listing of every directory before its names are used."""
        self.drop_mirrors()
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

    def directory(self, path: bytes) -> int | None:
        """Inode of a directory by its path; None where it is not known."""
        if not path:
            return ROOT_INODE
        entry = self.resolve(path.split(b"/"))
        return entry.inode if entry is not None and entry.flags & Flag.DIRECTORY else None

    def named_at(self, path: bytes, slash: bytes = b"") -> Entry | None:
        """The file of a path; with a ``slash`` the directory."""
        above, _, name = path.rpartition(b"/")
        parent = self.directory(above)
        return None if parent is None else self.named(parent, name + slash)


def _entries_of(directory: int) -> tuple[bytes, bytes]:
    """First key and end key of the rows of a directory's entries."""
    return schema.ENTRY + NUMBER.pack(directory), schema.ENTRY + NUMBER.pack(directory + 1)


def _name_key(entry: Entry) -> bytes:
    slash = b"/" if entry.flags & Flag.DIRECTORY else b""
    return schema.NAME + NUMBER.pack(entry.parent) + entry.name + slash


def damaged_rows(database: Database) -> Iterator[tuple[bytes, str]]:
    """Keys of the rows of names that cannot be decoded, and why; all other methods skip such rows."""
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
    schema.ENTRY: lambda row: unpack_entry(0, 0, row),
    schema.INODE: _of_bytes(_PAIR.size),
    schema.LISTING: unpack_listing,
    schema.NAME: _of_bytes(COOKIE_BYTES),
    schema.OBJECT: lambda row: unpack_object(0, row),
    schema.OBJECT_NUMBER: _of_bytes(NUMBER_BYTES),
    schema.TOMBSTONE: unpack_tombstone,
    schema.XATTRS: unpack_xattrs,
}
