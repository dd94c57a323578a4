"""A lake that stays as it is: the filesystem of an immutable mount.

What always holds: everything that is answered is of one complete state (`states`), which nothing changes; `refresh`
makes the next one beside it and then moves to it between two requests. So every answer may be remembered for ever, and
files need no handles: the inode number says which version is read. An inode is one version, in every state that has it.

Bytes are asked for with the ETag of the state: an object that gc collected, or another program replaced, is ESTALE and
a line in the log, never other bytes. A file that was being read when its name moved on is read on for as long as it is
among the last READINGS_MAX. The virtual extended attributes mean what they do on other mounts (`vfs.ops.xattr`). Trio
thread only. A crash loses nothing: the next daemon of the mount finds the state complete.
"""

from __future__ import annotations

import dataclasses
import errno
import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import trio

from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Extent
from lakefs_fuse.blockcache.readahead import Readahead
from lakefs_fuse.commits.idleness import Idleness
from lakefs_fuse.config import MountConfig
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import ConfigError, FileError, LakeError
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.sorted_tables import missing_before
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import Metrics, ReadMetrics, Unfinished
from lakefs_fuse.path_rules import Rules
from lakefs_fuse.product import XATTR_LOCATION, XATTR_STATE, XATTR_VERSION
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer
from lakefs_fuse.vfs.changed_names import ChangedNames
from lakefs_fuse.vfs.files.block_reader import open_reader
from lakefs_fuse.vfs.files.late_objects import LateObjects, Wait
from lakefs_fuse.vfs.files.open_file import FileState
from lakefs_fuse.vfs.immutable.residency_report import Host, ResidencyReport
from lakefs_fuse.vfs.immutable.states import Lake, State, StateNames, States
from lakefs_fuse.vfs.lake_size import LakeSize, NameCount
from lakefs_fuse.vfs.namespace.attributes import learn
from lakefs_fuse.vfs.namespace.key_mapping import NAME_BYTES_MAX, extent_of, is_reserved, location_of, version_of
from lakefs_fuse.vfs.namespace.metadata_fetch import is_unasked
from lakefs_fuse.vfs.open import begin_counting, identity, opened_cache
from lakefs_fuse.vfs.residency.pins import PinFile, Pins
from lakefs_fuse.vfs.residency.residency import Residency
from lakefs_fuse.vfs.residency.upcoming_reads import UpcomingReads
from lakefs_fuse.vfs.status import cache_section

NS = 1_000_000_000
READINGS_MAX = 1024
"""Maximum of files whose place and read position are kept in memory."""
BESIDE_BYTES_MAX = 256 << 10
BESIDE_NAMES = 64
"""Files that are looked for in the block of another are at most so large, and so many names away from it."""
GONE_LINES_MAX = 100
"""Maximum of log lines about missing versions; beyond that they are only counted."""
log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class Reading:
    """A file that was read lately."""

    entry: Entry
    extent: Extent | None
    readahead: Readahead
    reads: ReadMetrics


class ImmutableFilesystem:
    """See the module's head. Made by `open_immutable`."""

    def __init__(self, lake: Lake, states: States, state: State, nursery: trio.Nursery) -> None:
        self.config, self.metrics = lake.config, lake.metrics
        self._lake, self._states, self._state = lake, states, state
        self._reader = open_reader(lake.config, lake.client, lake.metrics, lake.cache, nursery, lake.node)
        names = StateNames(lambda: self._state, lake.config.mountpoint)
        pins = Pins(names, lake.cache, PinFile(Path(lake.config.cache_dir).absolute() / "pins", lake.node.disk), 0)
        upcoming = UpcomingReads(names, self._reader, nursery, lake.metrics.upcoming)
        self.residency = Residency(
            names, self._reader, nursery, lake.node.clock.wall_ns, lake.metrics.warm, pins, upcoming
        )
        self._late = LateObjects(lake.node.clock.wall_ns, lake.config.store.retry_timeout_s, read_only=True)
        self._rules = Rules.of(lake.config)
        self._count = NameCount(lambda: self._state.tree.usage(self.top), nursery, is_constant=True)
        self._readings: OrderedDict[int, Reading] = OrderedDict()
        self._gone = self._refreshes = 0
        self.idleness = Idleness(0.0)  # not watched, so never idle: nothing polls
        self._refreshing = trio.Lock()
        self.refreshed: list[Callable[[ChangedNames], Awaitable[object]]] = []
        """Listeners, awaited with the names that changed with a refresh."""
        self.statistics_requested: list[Callable[[], dict[str, object]]] = []
        """Listeners, which answer what they add to the counters."""

    # -- names and attributes

    @property
    def top(self) -> int:
        """What the kernel calls 1 is this."""
        return self._state.note.top

    def _inode(self, inode: int) -> int:
        """The kernel calls the top directory inode 1, whichever directory of the lake it is."""
        return self._state.note.top if inode == ROOT_INODE else inode

    def entry(self, inode: int) -> Entry:
        """Raises FileError(ESTALE) where the state has no such inode."""
        number = self._inode(inode)
        if number == ROOT_INODE:
            return self._state.root
        entry = self._state.tree.entry(number)
        if entry is None:
            raise FileError(errno.ESTALE)
        return msgspec.structs.replace(entry, inode=ROOT_INODE) if number == self._state.note.top else entry

    async def getattr(self, inode: int) -> Entry:
        """As `entry`. With ``allow_other`` an object that was not asked for its mode is, once: the kernel refuses other
        users until it is known, and asks before it does."""
        entry = self.entry(inode)
        if not self.config.allow_other or entry.is_dir or not is_unasked(entry):
            return entry
        state = self._state
        extent = extent_of(state.tree, entry)
        if extent is None:
            return entry
        try:
            meta = await self._lake.client.head(extent.version.key)
        except LakeError as error:
            log.info("the mode of inode %d is not known: %s", inode, error)
        else:
            if state is self._state and extent.version.etag == meta.etag:
                batch = Batch()
                state.tree.update(batch, learn(entry, meta.metadata or {}))
                state.database.commit_volatile(batch)
        return self.entry(inode)

    def directory(self, inode: int) -> Entry:
        """As `entry`. Raises FileError(ENOTDIR), too."""
        entry = self.entry(inode)
        if not entry.is_dir:
            raise FileError(errno.ENOTDIR)
        return entry

    def parent(self, inode: int) -> int:
        """Of a directory; the top's is itself."""
        entry = self.directory(inode)
        return ROOT_INODE if entry.inode == ROOT_INODE or entry.parent == self._state.note.top else entry.parent

    def lookup(self, parent: int, name: bytes) -> Entry | None:
        self.directory(parent)
        directory = self._inode(parent)
        try:
            component = name.decode()
        except UnicodeDecodeError:
            return None
        if len(name) > NAME_BYTES_MAX:
            raise FileError(errno.ENAMETOOLONG)
        if is_reserved(directory, component):
            return None
        return self._state.tree.child(directory, name)

    def listed(self, inode: int) -> tuple[Tree, int]:
        """Where the rows of a directory are, and its inode there. Raises FileError as `directory` does."""
        self.directory(inode)
        return self._state.tree, self._inode(inode)

    def readdir(self, inode: int, after: int) -> Iterator[Entry]:
        """Entries with cookies beyond ``after``, in cookie order."""
        self.directory(inode)
        for entry in self._state.tree.children(self._inode(inode), after):
            if not entry.flags & Flag.SHADOWED:
                yield entry

    def readlink(self, inode: int) -> bytes:
        entry = self.entry(inode)
        if not entry.is_symlink:
            raise FileError(errno.EINVAL)
        return self._state.tree.target(entry.inode)

    def xattr_names(self, inode: int) -> list[str]:
        return list(self._state.tree.xattrs(self._inode(inode)))

    def xattr(self, inode: int, name: str) -> bytes:
        """Raises FileError(ENODATA)."""
        entry = self.entry(inode)
        if name == XATTR_STATE and not entry.is_symlink:
            return str(FileState.DURABLE).encode()
        if not entry.is_dir and not entry.is_symlink:
            extent = extent_of(self._state.tree, entry) if name in (XATTR_LOCATION, XATTR_VERSION) else None
            if extent is not None and name == XATTR_VERSION:
                return version_of(extent).encode()
            if extent is not None:
                return location_of(self.config.store.source, extent).encode()
        value = self._state.tree.xattrs(self._inode(inode)).get(name)
        if value is None:
            raise FileError(errno.ENODATA)
        return value

    def is_unlinked(self, inode: int) -> bool:
        return False

    async def size(self) -> LakeSize:
        """What df(1) shows: nothing is free."""
        usage = await self._count.usage()
        return LakeSize(usage.names, usage.bytes)

    # -- bytes

    async def read(self, inode: int, offset: int, length: int, *, around: bool = False) -> Buffer:
        """With ``around`` all of the block that it begins in is fetched. Raises FileError: ESTALE if the version no
        longer exists, else the errno of the store's error."""
        reading, request, began_s = self._reading(inode), ReadMetrics(), trio.current_time()
        try:
            return await self._read(reading, offset, length, around, request)
        finally:
            reading.reads.count_read(request, trio.current_time() - began_s)

    async def _read(self, reading: Reading, offset: int, length: int, around: bool, reads: ReadMetrics) -> Buffer:
        extent = reading.extent
        if extent is None or offset >= extent.size:
            return b""
        length = min(length, extent.size - offset)
        ahead = reading.readahead if extent.is_whole else None
        begin, within = extent.offset + offset, extent.within
        wait: Wait | None = None
        while True:
            try:
                return await self._reader.read(
                    extent.version, begin, length, ahead, within=within, around=around, reads=reads
                )
            except FileError as error:
                if error.errno == errno.ESTALE and self._late.is_expected(reading.entry, error):
                    wait = wait or self._late.wait()
                    if await wait.pause():
                        continue
                if error.errno == errno.ESTALE:
                    self._log_gone(extent)
                    if self.config.dataset:  # no newer state of it has other bytes
                        raise FileError(errno.EIO, str(error)) from error
                raise

    def _reading(self, inode: int) -> Reading:
        reading = self._readings.get(inode)
        if reading is None:
            entry = self.entry(inode)
            if entry.is_dir:
                raise FileError(errno.EISDIR)
            path = os.fsdecode(b"/".join(self._state.tree.path(entry.inode) or ()))
            path = path.removeprefix(f"{self._lake.path}/" if self._lake.path else "")
            reads = self.metrics.reads_of(self._rules.glob_of(path))
            extent = extent_of(self._state.tree, entry)
            reading = self._readings[inode] = Reading(entry, extent, Readahead(), reads)
            if len(self._readings) > READINGS_MAX:
                self._readings.popitem(last=False)
        self._readings.move_to_end(inode)
        return reading

    def block_of(self, inode: int) -> tuple[int, int] | None:
        """Which block of which pack a small file begins in; None where it is not packed. Raises FileError."""
        reading = self._reading(inode)
        if reading.extent is None or reading.extent.is_whole or reading.entry.size > BESIDE_BYTES_MAX:
            return None
        return reading.entry.place, reading.extent.offset // BLOCK_BYTES

    async def beside(self, inode: int) -> list[tuple[int, Buffer]]:
        """Inode and bytes of the other small files in the block that a file begins in, of those that are near it in its
        directory: files get their places in packs in the order in which they get their names. Raises FileError."""
        block, reading = self.block_of(inode), self._readings.get(inode)
        if block is None or reading is None or reading.extent is None:
            return []
        entry, (place, index) = reading.entry, block
        start, stop = index * BLOCK_BYTES, (index + 1) * BLOCK_BYTES
        near = self._state.tree.children(entry.parent, entry.cookie - BESIDE_NAMES, entry.cookie + BESIDE_NAMES)
        found = [
            each
            for each in near
            if each.place == place
            and each.inode != inode
            and start <= each.offset
            and each.offset + each.size <= stop
            and 0 < each.size <= BESIDE_BYTES_MAX
        ]
        if not found or not await self._reader.is_fetched_by_block(reading.extent.version, index):
            return []
        view = memoryview(await self._reader.read(reading.extent.version, start, BLOCK_BYTES))
        return [(each.inode, view[each.offset - start : each.offset - start + each.size]) for each in found]

    def _log_gone(self, extent: Extent) -> None:
        self._gone += 1
        if self._gone > GONE_LINES_MAX:
            return
        if self.config.dataset:
            log.error(
                "%s, which the dataset %s has bytes in, is gone from the store, or another program replaced it: "
                "`lakefs-fuse dataset verify %s %s` lists the files that are lost. If other tools copied or encrypted "
                "the lake, unmount it and run `lakefs-fuse fsck --rebind`",
                extent.version.key, self.config.dataset, self.config.store.source, self.config.dataset,
            )  # fmt: skip
        else:
            log.error(
                "%s is gone from the store (gc, or another client replaced it): `lakefs-fuse refresh %s` moves the "
                "mount to what is there now. If other tools copied or encrypted the lake, unmount it and run "
                "`lakefs-fuse fsck --rebind`", extent.version.key, self.config.mountpoint,
            )  # fmt: skip

    # -- what the control socket asks

    async def refresh(self, path: str = "", *, recursive: bool = False) -> dict[str, object]:
        """Show the lake as it is now, to the kernel's caches too, and return what `stats` says of the state: all of it,
        whatever the path. Raises LakeError; then the mount shows what it showed."""
        if self.config.dataset:
            raise ConfigError(
                f"{self.config.mountpoint} shows the dataset {self.config.dataset}, which never changes: mount another "
                "version beside it"
            )
        if self.config.snapshot:
            raise ConfigError(
                f"{self.config.mountpoint} shows the snapshot {self.config.snapshot}, which does not change: mount "
                "without --snapshot to follow the lake"
            )
        async with self._refreshing:
            changed = ChangedNames(partial(self._lake.node.disk.temporary_file, Path(self.config.cache_dir)))
            try:
                before = self._state
                state = await self._states.make(before, changed)
                self._move_to(state)
                log.info("moved to state %d: %d names changed", state.number, changed.count)
                with trio.CancelScope(shield=True):
                    for listener in self.refreshed:
                        await listener(changed)
                return {**self._describe(), "changed": changed.count}
            finally:
                changed.close()

    async def clone(self, source: str, target: str, *, force: bool = False) -> None:
        """Raises FileError(EROFS)."""
        raise FileError(errno.EROFS, f"{self.config.mountpoint} is mounted read-only")

    async def wait_path(self, path: str, version: str, timeout_s: float | None) -> None:
        """Raises ConfigError: only `refresh` shows what others write."""
        raise ConfigError(
            f"{self.config.mountpoint} is an immutable mount, which changes only by command: wait in another mount of "
            f"the lake, then run `lakefs-fuse refresh {self.config.mountpoint}`"
        )

    def _move_to(self, state: State) -> None:
        """Between two requests: a READ under way does not read the state again."""
        before, self._state = self._state, state
        self._count.forget()
        before.database.close()
        self._states.keep_only(state.number)
        kept = [(inode, reading) for inode, reading in self._readings.items() if state.tree.entry(inode) is None]
        self._readings = OrderedDict(kept)
        self._refreshes += 1
        self.residency.pins.mark_stale()

    def _describe(self) -> dict[str, object]:
        note = self._state.note
        return {
            "at_s": note.at_ns / NS,
            "snapshot": note.snapshot or None,
            "dataset": self.config.dataset or None,
            "newest_commit": f"{note.newest:016x}",
            "path": self._lake.path,
            "refreshes": self._refreshes,
            "reads_gone": self._gone,
        }

    def statistics(self) -> dict[str, object]:
        """Nested plain values, as those of a mount that may be written to; what cannot be there is left out."""
        self.metrics.commits.names_missing = int(missing_before(self._state.database) > 0)
        counters: dict[str, object] = {
            **self.metrics.as_dict(),
            "store": {**self.metrics.store.as_dict(), "away": self._lake.client.is_away},
            "cache": cache_section(self.metrics, self._lake.cache),
            "reader": msgspec.to_builtins(self._reader.statistics()),
            "warm": self.residency.statistics(),
            "pins": self.residency.pins.statistics(),
            "upcoming": self.residency.upcoming.statistics(),
            "namespace": {
                **msgspec.to_builtins(self.metrics.namespace),
                "rocksdb": self._state.database.statistics(),
            },
            "dirty": {"files": 0, "bytes": 0, "failed": 0, "orphans": 0},
            "immutable": self._describe(),
        }
        for listener in self.statistics_requested:
            counters.update(listener())
        return counters

    async def read_statistics(self) -> dict[str, object]:
        return self.statistics()

    async def list_unfinished(self, rows_max: int | None = None) -> list[Unfinished]:
        return []

    async def make_durable(self, path: str = "", *, only_closed: bool = False) -> None:
        """Everything is."""

    async def finish_orphan(self, orphan_id: str, *, incomplete: bool = False) -> None:
        raise ConfigError("an immutable mount has no orphans")

    async def abort_orphan(self, orphan_id: str) -> None:
        raise ConfigError("an immutable mount has no orphans")

    def close(self) -> None:
        self._state.database.close()


@asynccontextmanager
async def open_immutable(
    config: MountConfig,
    client: StoreClient,
    metrics: Metrics,
    *,
    path: str = "",
    host: Host | None = None,
    node: Node,
    lake_id: str = "",
) -> AsyncIterator[ImmutableFilesystem]:
    """The directory ``path`` of the lake as it is now, or as the daemon before showed it (``config.mounting``);
    ``host`` names this machine in the record of what is local (``config.records_residency``). ``lake_id`` is that of
    the lake record, if there is one: names of another lake that was at this place before are dropped.

    Raises CacheError (locked, another lake's, unusable), MountError (no such directory, not enough disk), and what the
    store answers.
    """
    named = f"{identity(config)}, {path or 'whole'}, immutable {config.snapshot}".rstrip()
    async with opened_cache(config, metrics, node) as cache:
        with ExitStack() as closing_last:
            lake = Lake(config, path, named, client, metrics, cache, node, lake_id)
            states = States(lake)
            state = await _first_state(states)
            async with trio.open_nursery() as nursery:
                filesystem = ImmutableFilesystem(lake, states, state, nursery)
                closing_last.callback(filesystem.close)
                begin_counting(cache, nursery, node.threads)
                nursery.start_soon(filesystem.residency.run)
                if config.records_residency:
                    report = ResidencyReport(
                        config, host or Host(), client, filesystem.residency, cache, state.note.bytes
                    )
                    nursery.start_soon(report.run)
                try:
                    yield filesystem
                finally:
                    nursery.cancel_scope.cancel()


async def _first_state(states: States) -> State:
    found, shown = states.resume(), None
    try:
        shown = found if found is not None and await states.is_current(found) else await states.make(found)
    finally:
        if found is not None and found is not shown:
            found.database.close()
    states.keep_only(shown.number)
    return shown
