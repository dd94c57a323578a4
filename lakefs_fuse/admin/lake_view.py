"""A view of a lake, as a fresh mount sees it: the engines of this layer read names and commit through it.

What always holds (*still view*): names change only in `LakeView.refresh`, never between two calls of an engine. The
view consists of index, commits and plain objects, in a cache directory of its own; it writes nothing by itself. Tasks
of one trio loop. A crash leaves a directory of temporary files.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field

from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.commits.archive import parse_commit_key
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.hybrid_clock import HybridClock
from lakefs_fuse.commits.index.index import require_all_names
from lakefs_fuse.commits.record import COMMITS, OWN, Mkdir, Operation, Put, Remove, is_of_version
from lakefs_fuse.config import MIB, MountConfig, StoreConfig
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import FileError, LakeError, sole_error
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.product import PROGRAM
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs import Filesystem, assembled
from lakefs_fuse.vfs.namespace.key_mapping import why_hidden
from lakefs_fuse.vfs.namespace.namespace import Namespace

NEVER_S = 10 * 365 * 86400.0
NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class LakeView:
    """An open lake: its names, its commits, and the store behind them."""

    client: StoreClient
    fs: Filesystem
    metrics: Metrics
    log: CommitLog
    node: Node
    scratch: str
    """Directory for temporary files."""
    folds: bool = False
    """The database keeps what changes since the newest index, which its next one then consists of (`index.levels`)."""
    _overriding: set[int] = field(default_factory=set)
    """Inodes of plain objects that a listing showed in place of bytes elsewhere."""

    def __post_init__(self) -> None:
        self.namespace.events.object_overridden.append(lambda entry: self._overriding.add(entry.inode))

    @property
    def namespace(self) -> Namespace:
        return self.fs.namespace

    @property
    def clock(self) -> HybridClock:
        return self.log.clock

    @property
    def tree(self) -> Tree:
        return self.fs.namespace.tree

    @property
    def refused(self) -> int:
        """Number of commits with unknown changes: unreadable, or in the future."""
        noted = len(CommitRows(self.fs.database).refused())
        return max(noted, self.metrics.commits.damaged + self.metrics.commits.future)

    async def refresh(self) -> None:
        """Apply new commits. Raises LakeError."""
        await self.fs.look_again()

    async def list_commits(self) -> list[ObjectMeta]:
        """The commit objects in the store. Raises LakeError."""
        found: list[ObjectMeta] = []
        async for page in self.client.list_all(COMMITS):
            found += [meta for meta in page.objects if parse_commit_key(meta.key) is not None]
        return found

    def references(self, key: str, etag: str) -> int:
        """The number of names with bytes in this version of an object."""
        row = self.tree.objects.find(key, etag)
        return 0 if row is None else max(0, row.entries)

    def is_needed(self, key: str) -> bool:
        """Whether a name has bytes in an object below ``.lakefs/``, by its key alone. Such a key has one version; after
        other tools copied or encrypted the lake its ETag is another one than names have, until `fsck --rebind`."""
        return any(row.entries > 0 for row in self.tree.objects.versions(key))

    def is_uncommitted(self, entry: Entry) -> bool:
        """A plain object was put in place of bytes that a commit names, and no commit says so yet. A mount that has not
        listed the name still has those."""
        return not entry.stamp and entry.inode in self._overriding

    def extent(self, entry: Entry) -> Extent | None:
        """Where the bytes of a file are; None for one that has none in the store, or that went since it was read.
        Raises FileError(EIO)."""
        try:
            return self.namespace.extent(entry)
        except FileError:
            if self.tree.entry(entry.inode) == entry:
                raise
            return None

    def is_in_pack(self, entry: Entry) -> bool:
        """Whether the bytes of a file lie in a pack."""
        row = self.tree.objects.get(entry.place) if entry.place else None
        return row is not None and row.is_pack

    def find(self, path: str, slash: bytes = b"") -> Entry | None:
        """The file that a path names; with a ``slash`` the directory."""
        return self.tree.named_at(path.encode("utf-8", "surrogatepass"), slash)

    def is_known(self, operation: Operation, time_ns: int) -> bool:
        """Whether a name, or its tombstone, is as new as this operation on it.

        Operations on a version, or on an object that others may delete, leave no trace, and count as known."""
        if is_of_version(operation) or (isinstance(operation, Put) and operation.object == OWN):
            return True
        slash = b"/" if isinstance(operation, Mkdir) or (isinstance(operation, Remove) and operation.directory) else b""
        tombstone = self.tree.tombstones.get(operation.path.encode() + slash)
        if tombstone is not None and max(tombstone.newest, tombstone.unlisted[1]) >= time_ns:
            return True
        entry = self.find(operation.path, slash)
        if entry is None:
            return False
        replaced = entry.is_plain and not entry.stamp and entry.ctime_ns + NS > time_ns
        return entry.stamp >= time_ns or replaced

    def files(self) -> Iterator[tuple[str, Entry]]:
        """Every known file and symbolic link with its path, shadowed ones too.

        The tree may change meanwhile: an entry is as it was when its directory was begun."""
        pending = [(ROOT_INODE, "")]
        while pending:
            yield from self._files_in(*pending.pop(), pending)

    async def listed_files(self, path: str = "") -> AsyncGenerator[tuple[str, Entry], None]:
        """Every visible file at or below a path, after its directory was listed; files of a directory one after
        another, in the order of the listing. A directory that was removed, or renamed to elsewhere, between two of them
        is left out. Raises LakeError."""
        directory = await self._look_up(path)
        if isinstance(directory, Entry):
            yield path, directory
            return
        above = path + "/" if path else ""
        pending = [(directory, above)]
        while pending:
            inode, _ = pending.pop()
            if self.tree.path(inode) is None or not (prefix := self.tree.prefix(inode)).startswith(above):
                continue
            await self.namespace.ensure_listed(inode)
            for file, entry in self._files_in(inode, prefix, pending):
                if not entry.flags & Flag.SHADOWED:
                    yield file, entry

    def _files_in(self, directory: int, prefix: str, pending: list[tuple[int, str]]) -> Iterator[tuple[str, Entry]]:
        """The files of a directory; at the end its directories are added to ``pending``, the first one last."""
        below: list[tuple[int, str]] = []
        for entry in self.tree.children(directory):
            path = prefix + entry.name.decode("utf-8", "surrogatepass")
            if entry.is_dir:
                below.append((entry.inode, path + "/"))
            else:
                yield path, entry
        pending += reversed(below)

    async def _look_up(self, path: str) -> int | Entry:
        """The inode of a directory, or a file's entry. Raises LakeError."""
        inode = ROOT_INODE
        names = path.split("/") if path else []
        for index, name in enumerate(names):
            entry, _ = await self.namespace.lookup(inode, name.encode())
            if entry is not None and entry.is_dir:
                inode = entry.inode
            elif entry is not None and index == len(names) - 1:
                return entry
            else:
                raise LakeError(f"{path} does not exist in the lake")
        return inode

    def entry_at(self, key: str) -> Entry | None:
        """The entry whose own key this is; None also for keys that no path can be."""
        if any(why_hidden(component) for component in key.split("/")):
            return None
        return self.find(key)


@asynccontextmanager
async def open_lake_view(
    client: StoreClient,
    store: StoreConfig,
    *,
    node: Node,
    scratch: str,
    cache_dir: str | None = None,
    lists: bool = True,
    folds: bool = False,
    lake_id: str = "",
    may_lack_names: bool = False,
) -> AsyncIterator[LakeView]:
    """Open a view of the lake in ``store``; errors of the block leave it as themselves, not as a group.

    ``scratch`` is a directory for temporary files, ``cache_dir`` the cache directory of a node, which is kept. Without
    ``lists``, directories keep their listings, of whatever age, and are not listed again. A view that ``folds`` writes
    levels of the index, in a lake that has the feature; a cache directory with which it did so is for such views alone.
    Names in ``cache_dir`` that are not of the lake with the id ``lake_id`` are dropped by a view that ``folds``.
    Raises LakeError: CacheError where the cache directory is in use, or its names are of another lake; and, unless the
    view ``may_lack_names``, where names may be missing (`require_all_names`).
    """
    metrics = Metrics()
    temporary = nullcontext(cache_dir) if cache_dir is not None else scratch_directory(node, scratch)
    with temporary as directory, _ungrouped():
        config = MountConfig(
            store=store,
            mountpoint="",
            cache_dir=directory,
            cache_bytes_max=64 * MIB,
            free_bytes_min=0,
            metadata_ttl_s=NEVER_S,
            read_only=True,
            refresh_s=NEVER_S,
            folds=folds,
        )
        async with assembled(config, client, metrics, node=node, lake_id=lake_id, keeps_other_lake=not folds) as parts:
            fs = parts.filesystem
            if not may_lack_names:
                require_all_names(fs.database)
            if lists:
                fs.namespace.tree.forget_listings()  # those of an index, or a node, count for as long as NEVER_S says
            writer = f"{node.random.stream('writer').getrandbits(32):08x}"
            log = CommitLog(client, parts.clock, node.threads, writer=writer)
            yield LakeView(client, fs, metrics, log, node, scratch, folds)


@contextmanager
def _ungrouped() -> Iterator[None]:
    """Unwrap the group that the nursery of the filesystem makes of an error."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise sole_error(group) from None


@contextmanager
def scratch_directory(node: Node, scratch: str) -> Iterator[str]:
    """A new directory in ``scratch``, removed at the end. Raises LakeError where it cannot be made."""
    path = os.path.join(scratch, node.disk.temporary_name(f"{PROGRAM}-"))
    try:
        os.mkdir(path, mode=0o700)
    except OSError as error:
        raise LakeError(f"{scratch} cannot hold temporary files ({error.strerror}): set TMPDIR") from error
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # nothing that the command did depends on it
