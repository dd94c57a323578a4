"""A node of a simulation: a machine that may run apart, die and start again, with a mount of the lake on it.

What always holds (*fence*): when a node dies, its cache directory is copied at that moment, its link and its threads
are dead, and its tasks are dropped after that; the next daemon works on the copy. So nothing that a ``finally`` of a
dead task does reaches the store or what the next daemon reads.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import trio

from lakefs_fuse.config import MountConfig, Rule, Source, StoreConfig
from lakefs_fuse.environment import failpoints
from lakefs_fuse.environment.disk import LocalDisk
from lakefs_fuse.environment.node import Node, RandomStreams
from lakefs_fuse.errors import FileError
from lakefs_fuse.meta.entry import PENDING, ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.vfs.open import assembled
from tests.simulation.chance import Chance
from tests.simulation.forgetful_disk import ForgetfulDisk
from tests.simulation.machine import MachineClock, MachineThreads
from tests.simulation.memory_engine import MemoryEngines
from tests.simulation.network import CALM, Killed, Link, Weather
from tests.simulation.object_store import SimulatedStore
from tests.vfs.lakes import Lake

KIB = 1024
SPANS = ((64 * KIB, 50), (256 * KIB, 9950))
"""Small parts, so that small files have several."""
STORE = StoreConfig(source=Source("file", "/simulated", ""))
RETRY_TIMEOUT_S = 60.0
START_S_MAX = 3600.0
"""Longest that a daemon may take to start, faults of the network included."""


class SimulatedDisk(LocalDisk):
    """The disk of the machine, with as much room as the simulation says, and no thread."""

    def __init__(self, names: random.Random, threads: MachineThreads) -> None:
        super().__init__(names, threads)
        self.room: int | None = None

    def sync_data(self, fd: int) -> None:
        """Costs nothing: a memory filesystem has nothing to wait for."""

    def free_bytes(self, path: str | os.PathLike[str]) -> int:
        return super().free_bytes(path) if self.room is None else self.room

    @property
    def descriptors_max(self) -> int:
        return 4096


class Users(Lake):
    """The mount as programs use it: by paths, with errors."""

    async def found(self, path: str) -> Entry:
        entry = await self.lookup(path)
        if entry is None:
            raise FileError(errno.ENOENT, path)
        return entry

    async def lookup(self, path: str) -> Entry | None:
        parent, entry = ROOT_INODE, None
        for component in path.split("/"):
            if entry is not None and not entry.is_dir:
                raise FileError(errno.ENOTDIR, path)
            entry, _ = await self.fs.lookup(parent, component.encode())
            if entry is None:
                return None
            parent = entry.inode
        return entry


@dataclass
class World:
    """What all nodes share."""

    store: SimulatedStore
    nursery: trio.Nursery
    """What is left of dead nodes lives here."""
    seed: str
    scratch: Path
    config: Mapping[str, object]
    fired: Counter[str] = field(default_factory=Counter)
    """How often each fault happened."""
    engines: MemoryEngines | None = None
    """Of all nodes; RocksDB if there is none."""
    forgets: bool = False
    """Disks are models, too, that know what was synced, so that power may be cut."""

    def announced(self, who: str) -> Callable[[], None]:
        """What a link calls before a request of a node takes effect."""
        return lambda: setattr(self.store, "sender", who)


@dataclass(eq=False)
class Daemon:
    """One life of a mount, from start to death. It has a ``lake`` once it serves."""

    link: Link
    threads: MachineThreads
    disk: SimulatedDisk | ForgetfulDisk
    client: StoreClient
    directory: Path
    scope: trio.CancelScope
    lake: Users = field(init=False)
    ended: trio.Event = field(default_factory=trio.Event)
    locks: dict[int, trio.Lock] = field(default_factory=dict)
    """Of directories, and of files being written, as the kernel has them."""
    renaming: trio.Lock = field(default_factory=trio.Lock)


class SimulatedNode:
    """See the module's head."""

    def __init__(self, world: World, name: str, clock: MachineClock, **config: object) -> None:
        self.world, self.name, self.clock = world, name, clock
        self.chance = Chance(f"{world.seed}/{name}")
        self.weather: Weather = CALM
        self.cut_until_s = 0.0
        self.flips_blocks = False
        """Some bytes of cached blocks are damaged when the node dies."""
        self.daemon: Daemon | None = None
        self._starting: Daemon | None = None
        self.writers: Counter[int] = Counter()
        """How many users have begun to write to each file, by its inode."""
        self.lives = 0
        self.died: list[Callable[[], None]] = []
        """Called at the moment of death."""
        self.unanswered: Callable[[], None] = lambda: None
        """Called when a request has no answer."""
        self.names_changed: list[Callable[[int, bytes], None]] = []
        self.failpoint: tuple[str, int] | None = None
        """The daemon dies when it comes to this fail point for the n-th time from now."""
        self.loses_power = False
        """The death at the fail point is a power cut."""
        self._forgetful_disk = ForgetfulDisk(random.Random(f"{world.seed}/{name}/disk")) if world.forgets else None
        self._config = config
        self._directory = world.scratch / f"{name}-0"

    # -- life and death

    async def start(self) -> None:
        """Mount; returns when the mount serves. Raises LakeError where that fails, NodeDown where the daemon dies."""
        assert self.daemon is None
        with trio.fail_after(START_S_MAX):
            await self.world.nursery.start(self._live)

    async def _live(self, task_status: trio.TaskStatus[None]) -> None:
        self.lives += 1
        world, life = self.world, f"{self.name}#{self.lives}"
        threads = MachineThreads(Chance(f"{world.seed}/{life}/threads"))
        link = Link(Chance(f"{world.seed}/{life}/network"), world.fired, world.announced(life))
        link.weather, link.cut_until_s, link.unanswered = self.weather, self.cut_until_s, self.unanswered
        streams = RandomStreams(world.seed, life)
        disk = self._forgetful_disk or SimulatedDisk(streams.stream("temporary-names"), threads)
        metrics = Metrics()
        client = StoreClient(
            world.store, world.store.capabilities, metrics.store,
            transport=link, clock=self.clock, rng=streams.stream("retries"), retry_timeout_s=RETRY_TIMEOUT_S,
        )  # fmt: skip
        directory = self._directory
        options: dict[str, object] = {"free_bytes_min": 0, **world.config, **self._config}
        options["rules"] = msgspec.convert(options.get("rules", ()), tuple[Rule, ...])
        settings = MountConfig(store=STORE, mountpoint="/simulated", cache_dir=str(directory), **options)  # type: ignore[arg-type]
        node = Node(self.clock, streams, threads, disk, world.engines)
        failpoints.HOOK.set(self._reached)
        daemon = self._starting = Daemon(link, threads, disk, client, directory, trio.CancelScope())
        try:
            with daemon.scope, without_killed():
                async with AsyncExitStack() as stack:
                    parts = await stack.enter_async_context(
                        assembled(settings, client, metrics, node=node, spans=SPANS)
                    )
                    parts.filesystem.events.name_changed.append(self._name_changed)
                    daemon.lake = Users(parts, metrics)
                    self.daemon, self._starting = daemon, None
                    task_status.started()
                    await trio.sleep_forever()
        finally:
            daemon.ended.set()
            self._starting = None if self._starting is daemon else self._starting
            self.daemon = None if self.daemon is daemon else self.daemon
        if not hasattr(daemon, "lake"):
            raise NodeDown

    def _name_changed(self, parent: int, name: bytes) -> None:
        for listener in self.names_changed:
            listener(parent, name)

    def _reached(self, name: str) -> None:
        if self.failpoint is None or self.failpoint[0] != name:
            return
        times = self.failpoint[1] - 1
        self.failpoint = (name, times)
        if times == 0 and (self.daemon or self._starting) is not None:
            self.world.fired[f"killed at {name}"] += 1
            self.kill(power=self.loses_power)
            raise Killed

    def kill(self, *, loses_cache: bool = False, power: bool = False) -> None:
        """The daemon dies between two instructions; with ``power`` its machine does, too."""
        daemon = self.daemon or self._starting
        assert daemon is not None
        self.daemon, self._starting, self.failpoint = None, None, None
        daemon.link.kill()
        daemon.threads.is_dead = True
        self._directory = self.world.scratch / f"{self.name}-{self.lives}"
        if not loses_cache:
            self._copy_cache(daemon.directory, self._directory, power=power)
            if self.flips_blocks:
                self._flip_blocks()
        daemon.client.abandon_requests()
        daemon.scope.cancel()
        for listener in self.died:
            listener()

    def _copy_cache(self, source: Path, target: Path, *, power: bool) -> None:
        """The cache directory as the next daemon finds it."""
        disk, engines = self._forgetful_disk, self.world.engines
        rng = self.chance.generator("power cut") if power and disk is not None else None
        if disk is None:
            copy_cache(source, target)
        elif rng is not None:
            disk.copy_after_power_cut(source, target, rng)
        else:
            disk.copy_after_kill(source, target)
        if engines is not None:
            engines.copy(source, target, rng)

    def _flip_blocks(self) -> None:
        for path in sorted((self._directory / "blocks").rglob("*")):
            if path.is_file() and self.chance.happens("flip", 0.2):
                data = bytearray(path.read_bytes())
                if data:
                    data[int(self.chance.number("flip at") * len(data))] ^= 1 << int(self.chance.number("bit") * 8)
                    path.write_bytes(data)
                    self.world.fired["flipped bit in the cache"] += 1

    def set_weather(self, weather: Weather, cut_until_s: float | None = None) -> None:
        """Of this life and those after it."""
        self.weather = weather
        self.cut_until_s = self.cut_until_s if cut_until_s is None else cut_until_s
        if self.daemon is not None:
            self.daemon.link.weather, self.daemon.link.cut_until_s = self.weather, self.cut_until_s

    @property
    def lake(self) -> Users:
        """Raises NodeDown."""
        if self.daemon is None:
            raise NodeDown
        return self.daemon.lake

    # -- what a node knows, without asking anybody

    def entry(self, path: str) -> Entry | None:
        """The row of a name, as far as the tree has it."""
        tree = self.lake.fs.namespace.tree
        inode, entry = ROOT_INODE, None
        for component in path.split("/"):
            entry = tree.child(inode, component.encode())
            if entry is None or entry.flags & Flag.SHADOWED:
                return None
            inode = entry.inode
        return entry

    def path_of(self, inode: int) -> str | None:
        """The path of an inode; empty for the root, None for one without a name."""
        if inode == ROOT_INODE:
            return ""
        components = self.lake.fs.namespace.tree.path(inode)
        return None if components is None else b"/".join(components).decode()

    def path_in(self, directory: int, name: bytes) -> str | None:
        """The path of a name in a directory; None where that has no name any more."""
        path = self.path_of(directory)
        return None if path is None else f"{path}/{name.decode()}" if path else name.decode()

    def below(self, path: str, *, directories: bool = False) -> list[str]:
        """Paths of the files that the tree has below a directory, or of the directories."""
        entry = self.entry(path)
        if entry is None or not entry.is_dir:
            return []
        tree = self.lake.fs.namespace.tree
        return [f"{path}/{below}" for below, each in _files_below(tree, entry.inode, "") if each.is_dir is directories]

    def unpublished(self) -> set[str]:
        """Paths of files that have a version which is not in the store, and directories above them."""
        paths = {file.key for file in self.lake.parts.files.dirty()}
        return paths | {path[:at] for path in paths for at, mark in enumerate(path) if mark == "/"}

    def is_unsaid(self, path: str) -> bool:
        """No commit has told of what the node shows at a path: it is not in the store, or waits for a commit."""
        entry = self.entry(path)
        return entry is not None and (entry.stamp >= PENDING or self.lake.parts.files.is_dirty(entry))

    def stored_bytes(self, entry: Entry) -> bytes | None:
        """The bytes that a file has, from all that were ever stored; None of one whose newest are not in the store."""
        return None if self.lake.parts.files.is_dirty(entry) else self.row_bytes(entry)

    def row_bytes(self, entry: Entry) -> bytes | None:
        """The bytes that a row names, whatever was written since; None where it names none."""
        if entry.flags & Flag.LOCAL:
            return None
        if entry.is_symlink:
            return b"-> " + self.lake.fs.namespace.tree.target(entry.inode)
        extent = self.lake.fs.namespace.extent(entry)
        if extent is None:
            return None
        data = self.world.store.versions.get((extent.version.key, extent.version.etag))
        return None if data is None else data[extent.offset : extent.offset + entry.size]

    # -- calls, serialised as the kernel does

    def _lock(self, inode: int) -> trio.Lock:
        if self.daemon is None:
            raise NodeDown
        return self.daemon.locks.setdefault(inode, trio.Lock())

    @asynccontextmanager
    async def directory(self, path: str) -> AsyncIterator[tuple[int, bytes]]:
        """The directory of a path, locked for a change of names, and the last component."""
        parent, name = await self.lake.parent(path)
        async with self._lock(parent):
            yield parent, name

    @asynccontextmanager
    async def two_directories(self, old: str, new: str) -> AsyncIterator[tuple[int, bytes, int, bytes]]:
        """Both directories of a rename, locked."""
        daemon = self.daemon
        if daemon is None:
            raise NodeDown
        async with daemon.renaming:
            (parent, name), (target, renamed) = await self.lake.parent(old), await self.lake.parent(new)
            async with AsyncExitStack() as stack:
                for inode in sorted({parent, target}):
                    await stack.enter_async_context(self._lock(inode))
                yield parent, name, target, renamed

    @asynccontextmanager
    async def writing(self, inode: int) -> AsyncIterator[None]:
        """One user at a time writes to a file."""
        async with self._lock(-inode):
            self.writers[inode] += 1
            yield

    async def close(self, handle: int) -> None:
        """As close(2). Raises LakeError."""
        daemon, fs = self.daemon, self.lake.fs
        try:
            await fs.flush(handle)
        finally:
            if self.daemon is daemon:  # a dead one's handles went with it
                await fs.release(handle)

    async def open(self, path: str, flags: int) -> tuple[int, int]:
        """Handle and inode; the name is looked up again where its version was replaced. Raises LakeError."""
        entry = await self.lake.found(path)
        if entry.is_symlink:
            raise FileError(errno.ELOOP, path)  # which the kernel follows, so that it opens no symbolic link
        try:
            return await self.lake.fs.open(entry.inode, flags), entry.inode
        except FileError as error:
            if error.errno != errno.ESTALE:
                raise
        entry = await self.lake.found(path)
        return await self.lake.fs.open(entry.inode, flags), entry.inode


class NodeDown(Exception):
    """The node has no mount now."""


def copy_cache(source: Path, target: Path) -> None:
    """The cache directory as a daemon that was killed leaves it: all that was written, at this moment."""
    shutil.copytree(source, target)


def _files_below(tree: Tree, inode: int, prefix: str) -> list[tuple[str, Entry]]:
    found: list[tuple[str, Entry]] = []
    for entry in tree.children(inode):
        if entry.flags & Flag.SHADOWED:
            continue
        path = prefix + entry.name.decode()
        found.append((path, entry))
        if entry.is_dir:
            found += _files_below(tree, entry.inode, path + "/")
    return found


@contextmanager
def without_killed() -> Iterator[None]:
    """Drops the errors of a dead node's tasks, and no others: some may have been cancelled when one met its death."""
    try:
        yield
    except Killed:
        pass
    except BaseExceptionGroup as group:
        if (others := group.split(Killed)[1]) is not None:
            raise others from None
