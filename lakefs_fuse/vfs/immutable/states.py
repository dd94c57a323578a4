"""States of a lake on this node: what an immutable mount shows, one database each.

What always holds: a state that is there is complete. All that was committed was applied and every directory was listed
between its beginning and its end, or it was taken from a named snapshot; then its note is written, synced, and nothing
in it changes any more; one whose database is damaged, or of another version of this program, is removed. A state that
is made from an earlier one keeps inode numbers of what did not change, and never gives one of them to anything else, so
what the kernel remembers of an inode is right in both.

`states/<number>` in the cache directory is one. Trio thread only. A crash while one is made leaves a directory without
a note, which the next daemon removes.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio
from msgspec import structs

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.commits.index import datasets, snapshots
from lakefs_fuse.commits.index.index import Manifest, collected_before, load_newest_index
from lakefs_fuse.config import DatasetName, MountConfig
from lakefs_fuse.environment.memory_shares import shares_of
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import CacheDamaged, CacheError, FileError, LakeError, MountError, SchemaMismatch
from lakefs_fuse.meta import schema
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Database, RocksEngines
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.rows import SingleRow
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.staging.part_layout import SPANS
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.sync.nursery import collecting
from lakefs_fuse.vfs.changed_names import ChangedNames
from lakefs_fuse.vfs.namespace.key_mapping import NAME_BYTES_MAX, extent_of, is_reserved
from lakefs_fuse.vfs.namespace.metadata_fetch import ask_all
from lakefs_fuse.vfs.namespace.tree_walk import list_everything
from lakefs_fuse.vfs.open import drop_wrong_names
from lakefs_fuse.vfs.residency.selection import Refused
from lakefs_fuse.vfs.wiring import Assembly, Ground

NEVER_S = 10 * 365 * 86400.0
PROGRESS_S = 5.0
"""Period of the log's lines about the progress of listing: a mount that does not answer yet has no other."""
log = logging.getLogger(__name__)


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Row of a complete state: inode of its top directory, when it was begun (ns since 1970), and time of its newest
    commit (0: none). Of a named ``snapshot`` it is when that was taken. ``mounting`` is the `mount` command that made
    it (`MountConfig`)."""

    top: int
    at_ns: int
    newest: int
    snapshot: str = ""
    mounting: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class State:
    """A complete state, open."""

    number: int
    database: Database
    tree: Tree
    note: Note

    @property
    def root(self) -> Entry:
        """The root of the lake, which has no row."""
        at_ns, flags = self.note.at_ns, Flag.DIRECTORY | Flag.ATTRIBUTES_KNOWN
        return Entry(ROOT_INODE, 0, b"", ROOT_INODE, flags, mtime_ns=at_ns, ctime_ns=at_ns)


class StateNames:
    """The names of an immutable mount, for a selection of files (see `selection.Names`). A walk that a refresh
    overtakes goes on in the next state, in which inodes are the same."""

    def __init__(self, state: Callable[[], State], mountpoint: str) -> None:
        """``state`` answers what the mount shows now."""
        self._state, self.mountpoint = state, mountpoint

    @property
    def tree(self) -> Tree:
        return self._state().tree

    @property
    def root(self) -> Entry:
        state = self._state()
        top = state.root if state.note.top == state.root.inode else state.tree.entry(state.note.top)
        if top is None:
            raise FileError(errno.ESTALE)
        return top

    async def lookup(self, directory: Entry, name: bytes) -> Entry | None:
        if len(name) > NAME_BYTES_MAX or is_reserved(directory.inode, name.decode("utf-8", "surrogateescape")):
            return None
        return self.tree.child(directory.inode, name)

    def is_ready(self, directory: Entry) -> bool:
        return True

    async def prepare(self, directory: Entry, refused: Refused | None = None) -> None:
        """A state has all names."""

    def size(self, entry: Entry) -> int:
        return entry.size

    def extent(self, entry: Entry) -> Extent | None:
        return extent_of(self.tree, entry)


@dataclass(frozen=True, slots=True)
class Lake:
    """What states are made from. ``path`` is the directory of the lake that is its top, empty for the root; ``id`` is
    that of the lake record, if there is one."""

    config: MountConfig
    path: str
    identity: str
    client: StoreClient
    metrics: Metrics
    cache: BlockCache
    node: Node
    id: str


class States:
    """Makes, opens and removes states in the cache directory."""

    def __init__(self, lake: Lake) -> None:
        self._lake = lake
        self._directory = Path(lake.config.cache_dir).absolute()

    def _path(self, number: int) -> Path:
        return self._directory / "states" / f"{number:08d}"

    def _numbers(self) -> list[int]:
        return sorted(int(path.name) for path in (self._directory / "states").glob("[0-9]" * 8))

    def _open_database(self, path: Path) -> Database:
        node = self._lake.node
        engines = node.engines or RocksEngines(shares_of(self._lake.config.memory_bytes_max).database // 2)
        return Database(path, self._lake.identity, node.clock, node.disk, engines, repairs=False)

    def resume(self) -> State | None:
        """Open the newest complete state that an earlier daemon left, and remove the others, among them damaged ones
        and those of another version of this program. Raises CacheError."""
        for number in reversed(self._numbers()):
            try:
                database = self._open_database(self._path(number))
            except (CacheDamaged, SchemaMismatch) as error:
                why = error if isinstance(error, CacheDamaged) else "another version of lakefs-fuse made it"
                log.warning("state %d is removed: %s", number, why)
                self._remove(number)
                continue
            note = _note_row(database).get()
            if note is not None:
                self.keep_only(number)
                return State(number, database, Tree(database), note)
            database.close()
            self._remove(number)
        return None

    def keep_only(self, number: int) -> None:
        """Remove everything but this state, now or, where the disk fails, at the next refresh or mount."""
        kept = self._path(number)
        try:
            others = [path for path in kept.parent.iterdir() if path != kept]
        except OSError as error:
            log.warning("states in %s are not removed yet: %s", kept.parent, error.strerror)
            return
        for other in others:
            shutil.rmtree(other, ignore_errors=True)

    def _remove(self, number: int) -> None:
        shutil.rmtree(self._path(number), ignore_errors=True)

    async def make(self, before: State | None, changed: ChangedNames | None = None) -> State:
        """The lake as it is now. ``changed`` gets names that the kernel may remember from the state ``before``,
        which stays as it is: all of the top directory where another one took its place. Raises LakeError; then there is
        no new state."""
        number = 1 + max(self._numbers(), default=0)
        path = self._path(number)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise CacheError(f"{path.parent}: {error.strerror}") from error
        snapshot = self._lake.config.snapshot
        if before is not None and not snapshot:
            before.database.copy_to(path)
        database = self._open_database(path)
        try:
            note = await (self._take_snapshot(database) if snapshot else self._bring_up_to_date(database, changed))
            if before is not None and changed is not None and before.note.top != note.top:
                for tree, top in (before.tree, before.note.top), (Tree(database), note.top):
                    await _add_names(tree, top, changed, shown_in=note.top)
            _note_row(database).set(note, sync=True)
        except BaseException:
            database.close()
            self._remove(number)
            raise
        return State(number, database, Tree(database), note)

    async def is_current(self, state: State) -> bool:
        """Whether a daemon before this one showed the state, or it is that of the named snapshot in the store."""
        name, mounting = self._lake.config.snapshot, self._lake.config.mounting
        if mounting and state.note.mounting == mounting:
            return True
        if not name or state.note.snapshot != name:
            return False
        return (await self._fetch_manifest()).time == state.note.at_ns

    async def _fetch_manifest(self) -> Manifest:
        """Of the snapshot that is shown. Raises ConfigError where there is none, DamagedCommit."""
        config, client = self._lake.config, self._lake.client
        if config.dataset:
            return (await datasets.find(client, DatasetName.parse_version(config.dataset)))[1]
        return await snapshots.manifest_of(client, config.snapshot)

    async def _take_snapshot(self, database: Database) -> Note:
        lake = self._lake
        name = lake.config.snapshot
        manifest = await self._fetch_manifest()
        await snapshots.take_in(lake.client, lake.node.threads, name, manifest, database, self._directory / "index")
        if lake.config.dataset and lake.path:
            raise MountError(
                f"{lake.config.dataset} is a dataset of the lake {lake.config.store.source} and is shown as a whole: "
                "name that lake as SOURCE"
            )
        path = [part.encode() for part in lake.path.split("/") if part]
        entry = Tree(database).resolve(path)
        if path and (entry is None or not entry.is_dir):
            raise MountError(f"{lake.path} is not a directory of {lake.config.store.source} in the snapshot {name}")
        top = ROOT_INODE if entry is None else entry.inode
        return Note(
            top=top, at_ns=manifest.time, newest=manifest.newest, snapshot=name, mounting=lake.config.mounting,
            bytes=0 if manifest.dataset is None else manifest.dataset.bytes,
        )  # fmt: skip

    async def _bring_up_to_date(self, database: Database, changed: ChangedNames | None) -> Note:
        lake = self._lake
        _note_row(database).set(None)
        at_ns = lake.node.clock.wall_ns()
        if changed is None:
            await drop_wrong_names(database, lake.client, lake.node.clock, lake.id)
            await load_newest_index(
                database, lake.client, lake.node.threads, self._directory / "index", clock=lake.node.clock
            )
        else:
            await self._check_nothing_collected(database)
        config = structs.replace(
            lake.config, read_only=True, metadata_ttl_s=NEVER_S, refresh_s=NEVER_S, rules=(), orphans="keep"
        )
        async with collecting() as nursery:
            parts = Assembly(Ground(config, lake.client, lake.metrics, database, lake.cache, nursery, lake.node, SPANS))
            try:
                if changed is not None:
                    parts.filesystem.events.name_changed.append(changed.add)
                await parts.begin()
                top = await self._survey(parts, changed)
                await parts.filesystem.look_again()
                await parts.pack_rows.drop_deleted()  # each state begins as a copy of the one before
            finally:
                parts.close()
            nursery.cancel_scope.cancel()
        newest = tables.marks_of(database).newest
        return Note(top=top, at_ns=at_ns, newest=newest, mounting=lake.config.mounting)

    async def _check_nothing_collected(self, database: Database) -> None:
        """Inode numbers must stay, so an index cannot replace deleted commits."""
        if await collected_before(self._lake.client) > tables.marks_of(database).newest + 1:
            raise LakeError("commits made since were collected (gc): unmount, and mount again, which takes the index")

    async def _survey(self, parts: Assembly, changed: ChangedNames | None) -> int:
        fs = parts.filesystem
        tree = fs.namespace.tree
        top = ROOT_INODE
        for name in filter(None, self._lake.path.split("/")):
            entry, _ = await fs.namespace.lookup(top, name.encode(), ask=True)
            if entry is None or not entry.is_dir:
                raise MountError(f"{self._lake.path} is not a directory of {self._lake.config.store.source}")
            top = entry.inode

        async def listed(inode: int, is_new: bool) -> None:
            if self._lake.config.attributes == "objects":
                await ask_all(tree.children_in_steps(inode), fs.getattr)
            if is_new and changed is not None:  # merging it invalidated none of its names
                await _add_names(tree, inode, changed, shown_in=inode)

        names = 0

        def report(so_far: int) -> None:
            nonlocal names
            names = so_far

        async def report_progress() -> None:
            while True:
                await trio.sleep(PROGRESS_S)
                log.info("listing: %d names so far", names + fs.namespace.names_arriving)

        async with collecting() as nursery:
            nursery.start_soon(report_progress)
            await list_everything(fs.namespace, report, top=top, listed=listed)
            nursery.cancel_scope.cancel()
        return top


async def _add_names(tree: Tree, directory: int, changed: ChangedNames, *, shown_in: int) -> None:
    """Add all names of a directory as those of the directory ``shown_in``: for the kernel, the one that is the top now
    has the number of the one that was. Raises CacheError."""
    for children in tree.children_in_steps(directory):
        for child in children:
            changed.add(shown_in, child.name)
        await trio.lowlevel.checkpoint()


def _note_row(database: Database) -> SingleRow[Note]:
    return SingleRow(database, schema.SINGLE_STATE, Note)
