"""Nodes that know a lake only by the commits applied to them: what the tests of merging share."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from lakefs_fuse.commits.applier import Applier
from lakefs_fuse.commits.archive import commit_key
from lakefs_fuse.commits.change import Change, merged
from lakefs_fuse.commits.path_tree import Relocated, Watcher
from lakefs_fuse.commits.record import THIS, ObjectRef, Operation, Put, Record, Remove
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import PENDING, ROOT_INODE, UNSET, Entry, Flag
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import CommitMetrics, NamespaceMetrics
from lakefs_fuse.store.protocol import ListPage, ObjectMeta
from lakefs_fuse.vfs.namespace.listing_merge import DirectoryMerge, PageNames, read_page
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder
from tests.fakes import open_database

NS = 1_000_000_000
START_S = 1_700_000_000
ARCHIVE_BYTES = 1 << 20


def at(seconds: float) -> int:
    """A time so many seconds after the tests' beginning, in ns."""
    return START_S * NS + int(seconds * NS)


def plain(key: str, etag: str, seconds: float, size: int = 1) -> ObjectMeta:
    """A plain object as LIST shows it: dated to the second."""
    return ObjectMeta(key, size, etag, at(seconds) // NS * NS)


def archive(time: int, writer: str) -> ObjectRef:
    return ObjectRef(commit_key(time, writer), f"{writer}{time}", ARCHIVE_BYTES)


def put(
    path: str,
    size: int = 1,
    *,
    offset: int = 100,
    mode: int = 0o644,
    hides: str = "",
    xattrs: dict[str, bytes] | None = None,
) -> Put:
    """A file in the commit's own archive."""
    return Put(path, THIS, offset, size, mode, 0, 0, 0, hides=hides, xattrs=xattrs or {})


class AnyInode:
    def __contains__(self, inode: object) -> bool:
        return True


class Recorder(Watcher):
    """Notes what it is told; ``kept`` are inodes that are being written here, ``used`` those that are open."""

    def __init__(self) -> None:
        self.in_use = AnyInode()
        self.kept: set[int] = set()
        self.used: set[int] = set()
        self.told: list[bytes] = []
        self.places: list[Entry] = []

    def keeps(self, entry: Entry, *, own: bool) -> bool:
        return entry.inode in self.kept

    def redated(self, entry: Entry) -> bool:
        return entry.inode in self.used

    def changed(self, parent: int, name: bytes) -> None:
        self.told.append(name)

    def relocated(self, files: Sequence[Relocated]) -> None:
        self.places += [file.entry for file in files]


class Node:
    """A tree, and what is applied to it."""

    def __init__(self, directory: Path, *, writer: str = "00000001", clock_ns: Callable[[], int] | None = None) -> None:
        self.database = open_database(directory, "file:///lake")
        self.tree = Tree(self.database)
        self.watcher, self.metrics = Recorder(), CommitMetrics()
        self.writer = writer
        self.clock_ns = clock_ns or (lambda: at(0))
        self.applier = Applier(self.database, self.tree, self.metrics, self.watcher, clock_ns=self.clock_ns)

    def apply(self, record: Record) -> None:
        self.applier.apply(record, archive(record.time, record.writer), whole=True)

    def commit(self, seconds: float, *operations: Operation, change: Change | None = None, writer: str = "") -> Record:
        """Apply a commit of this time; answers its record."""
        change = change or Change(operations=list(operations))
        record = merged([change], writer or self.writer, at(seconds), range(1 << 20))
        self.apply(record)
        return record

    def apply_pending(self, number: int, change: Change) -> None:
        """Apply a change made here that is in no commit yet."""
        self.applier.apply_pending(change, PENDING | number)

    def list(
        self, *metas: ObjectMeta, directory: str = "", prefixes: tuple[str, ...] = (), seconds: float = 0
    ) -> list[bytes]:
        """A LIST of a directory shows these objects and prefixes; answers its ghosts."""
        inode = self.inode(directory)
        prefix = f"{directory}/" if directory else ""
        merge = DirectoryMerge(self.tree, NamespaceMetrics(), inode, prefix=prefix, now_ns=at(seconds))
        page: PageNames = read_page(ListPage(list(metas), list(prefixes), None), inode, prefix)
        merge.apply(page)
        merge.apply_overriding(merge.overriding)
        for _ in merge.remove_missing():
            pass
        merge.complete()
        return merge.ghosts

    def list_one(self, name: str, *metas: ObjectMeta) -> None:
        """The store is asked for one name of the root, and shows this object, or none."""
        merge = DirectoryMerge(self.tree, NamespaceMetrics(), ROOT_INODE, prefix="", now_ns=at(0))
        found = read_page(ListPage(list(metas), [], None), ROOT_INODE, "").found
        for _ in merge.apply_one(name.encode(), found):
            pass
        merge.apply_overriding(merge.overriding)

    def inode(self, path: str) -> int:
        return self.found(path).inode if path else ROOT_INODE

    def find(self, path: str) -> Entry | None:
        return self.tree.resolve([name.encode() for name in path.split("/")])

    def found(self, path: str) -> Entry:
        entry = self.find(path)
        assert entry is not None, f"{path} is not there"
        return entry

    # -- what a user of this node may do

    def change(self) -> ChangeBuilder:
        return ChangeBuilder(self.tree)

    def chmod(self, path: str, mode: int) -> Change:
        builder = self.change()
        builder.set_attributes(path, msgspec.structs.replace(self.found(path), mode=mode))
        return builder.change()

    def rename(self, old: str, new: str) -> Change:
        builder = self.change()
        entry = self.found(old)
        moving = [(old, entry), *(self.tree.below(entry.inode, old) if entry.is_dir else ())]
        for path, below in moving:
            target = new + path[len(old) :]
            if below.is_dir:
                builder.mkdir(target, below)
            else:
                builder.put(target, below, key=path)
        for path, below in reversed(moving):
            builder.operations.append(Remove(path, directory=below.is_dir, hides=below.etag))
        builder.moves.append((old, new))
        return builder.change()

    # -- what an observer sees

    def shown(self) -> dict[str, tuple[object, ...]]:
        """Everything an observer can tell of every name; no inodes, no cookies."""
        seen: dict[str, tuple[object, ...]] = {}
        for path, entry in self.tree.below(ROOT_INODE, ""):
            xattrs = self.tree.xattrs(entry.inode) if entry.flags & Flag.XATTRS else {}
            attributes: tuple[object, ...] = entry.mode, entry.uid, entry.gid, sorted(xattrs.items())
            if entry.is_dir:
                seen[path + "/"] = attributes
                continue
            row = self.tree.objects.get(entry.place) if entry.place else None
            place = (row.key, row.etag, entry.offset) if row else ("", entry.etag, 0)
            attributes = *attributes, bool(entry.flags & Flag.SHADOWED)
            seen[path] = *attributes, entry.size, entry.mtime_ns, place, self.tree.target(entry.inode)
        return seen

    def counts(self) -> dict[str, tuple[int, int]]:
        """Entries and live bytes of every object, as counted along the way."""
        return {row.key: (row.entries, row.bytes_live) for row in self.tree.objects.rows() if row.entries}

    def counted_anew(self) -> dict[str, tuple[int, int]]:
        counts: dict[str, tuple[int, int]] = {}
        for _, entry in self.tree.below(ROOT_INODE, ""):
            row = self.tree.objects.get(entry.place) if entry.place else None
            if row is not None:
                entries, size = counts.get(row.key, (0, 0))
                counts[row.key] = entries + 1, size + entry.size
        return counts

    def dirty(self, path: str) -> Entry:
        """A file that is created here and not stored yet."""
        above, _, name = path.rpartition("/")
        batch = Batch()
        flags = Flag.LOCAL | Flag.ATTRIBUTES_KNOWN
        entry = self.tree.insert(batch, self.inode(above), name.encode(), flags, mode=UNSET)
        self.database.commit(batch)
        self.watcher.kept.add(entry.inode)
        return entry

    def close(self) -> None:
        self.database.close()


@contextmanager
def node(directory: Path, **options: object) -> Iterator[Node]:
    made = Node(directory, **options)  # type: ignore[arg-type]
    try:
        yield made
    finally:
        made.close()
