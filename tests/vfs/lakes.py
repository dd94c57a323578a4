"""What the tests of the filesystem share: a lake over a store in memory (or any other), asked as the kernel asks."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import FileError, LakeError, Unavailable
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.protocol import Capabilities, ObjectStore
from lakefs_fuse.vfs.filesystem import Filesystem
from lakefs_fuse.vfs.open import assembled
from lakefs_fuse.vfs.ops.attributes import AttributeChange
from lakefs_fuse.vfs.ops.rename import RENAME_EXCHANGE, RENAME_NOREPLACE
from lakefs_fuse.vfs.wiring import Assembly
from tests import virtual_time
from tests.fakes import delete_all_due, node_of, store_client
from tests.memory_store import START_NS, Failures, MemoryStore

KIB = 1024
SPANS = ((64 * KIB, 50), (256 * KIB, 9950))
TTL_S = 60.0
NS = 1_000_000_000
SETTLE_S_MAX = 20.0
NEVER_S = 1e9
__all__ = ["RENAME_EXCHANGE", "RENAME_NOREPLACE", "Clock", "Lake", "Missing", "lake", "two_lakes", "unheard_commits"]


@dataclass
class Clock:
    """Wall time that tests set, in ns since 1970.

    It passes by ``tick_ns`` whenever a mount reads it, so that what began earlier is earlier."""

    now_ns: int = START_NS + 10 * NS  # after what stores were given before
    tick_ns: int = 1

    def __call__(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        self.now_ns += self.tick_ns
        return self.now_ns

    def mono_s(self) -> float:
        return virtual_time.mono_s()

    def boot_ns(self) -> int:
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        virtual_time.sleep(seconds)

    def advance(self, seconds: float) -> None:
        self.now_ns += int(seconds * NS)


class Missing(AssertionError):
    """A name that has to be there is not."""


@dataclass
class Lake:
    """A mounted filesystem, with paths instead of inodes."""

    parts: Assembly
    metrics: Metrics
    changes: list[tuple[int, bytes]] = field(default_factory=list)

    @property
    def fs(self) -> Filesystem:
        return self.parts.filesystem

    async def lookup(self, path: str) -> Entry | None:
        """Each component asked for, as the kernel does when it knows nothing."""
        parent = ROOT_INODE
        entry = None
        for component in path.split("/"):
            entry, _ = await self.fs.lookup(parent, component.encode())
            if entry is None:
                return None
            parent = entry.inode
        return entry

    async def found(self, path: str) -> Entry:
        """Raises Missing."""
        entry = await self.lookup(path)
        if entry is None:
            raise Missing(f"{path} is not there")
        return entry

    async def parent(self, path: str) -> tuple[int, bytes]:
        above, _, name = path.rpartition("/")
        return ((await self.found(above)).inode if above else ROOT_INODE), name.encode()

    async def names(self, path: str = "") -> list[str]:
        inode = (await self.found(path)).inode if path else ROOT_INODE
        names = sorted(entry.name.decode(errors="surrogateescape") for entry in await self.read_directory(inode))
        assert len(set(names)) == len(names), f"{path} lists a name twice: {names}"
        return names

    async def read_directory(self, inode: int) -> list[Entry]:
        """As the kernel does: open it, and read on until nothing comes."""
        await self.fs.opendir(inode)
        entries: list[Entry] = []
        while True:
            after = entries[-1].cookie if entries else 0
            await self.fs.more_names(inode, after)
            more = list(self.fs.readdir(inode, after))
            if not more:
                return entries
            entries += more

    async def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        """As the kernel does: where the version was replaced, the name is looked up once more."""
        try:
            return await self.fs.open((await self.found(path)).inode, flags)
        except FileError as error:
            if error.errno != errno.ESTALE:
                raise
        return await self.fs.open((await self.found(path)).inode, flags)

    async def create(self, path: str, flags: int = os.O_RDWR) -> int:
        """As the kernel does: CREATE for a name that is free, OPEN for a file that is there."""
        parent, name = await self.parent(path)
        known = None if flags & os.O_EXCL else (await self.fs.lookup(parent, name))[0]
        if known is not None:
            return await self.fs.open(known.inode, flags)
        return (await self.fs.create(parent, name, 0o644, flags | os.O_CREAT, os.getuid(), os.getgid()))[0]

    async def close(self, handle: int) -> None:
        try:
            await self.fs.flush(handle)
        finally:
            await self.fs.release(handle)

    async def write(self, path: str, data: bytes) -> None:
        """A new file, closed."""
        handle = await self.create(path)
        await self.fs.write(handle, 0, data)
        await self.close(handle)

    async def read(self, path: str) -> bytes:
        handle = await self.open(path)
        try:
            return await self.read_handle(handle)
        finally:
            await self.close(handle)

    async def read_handle(self, handle: int) -> bytes:
        pieces, at = [], 0
        while piece := bytes(await self.fs.read(handle, at, 128 * KIB)):
            pieces.append(piece)
            at += len(piece)
        return b"".join(pieces)

    async def unlink(self, path: str) -> None:
        await self.fs.unlink(*await self.parent(path))

    async def mkdir(self, path: str) -> Entry:
        parent, name = await self.parent(path)
        return await self.fs.mkdir(parent, name, 0o755, os.getuid(), os.getgid())

    async def rmdir(self, path: str) -> None:
        await self.fs.rmdir(*await self.parent(path))

    async def rename(self, old: str, new: str, flags: int = 0) -> None:
        await self.fs.rename(*await self.parent(old), *await self.parent(new), flags)

    async def symlink(self, path: str, target: str) -> Entry:
        parent, name = await self.parent(path)
        return await self.fs.symlink(parent, name, target.encode(), os.getuid(), os.getgid())

    async def readlink(self, path: str) -> str:
        return self.fs.readlink((await self.found(path)).inode).decode()

    async def setattr(self, path: str, **change: Any) -> Entry:
        return await self.fs.setattr((await self.found(path)).inode, AttributeChange(**change))

    async def getattr(self, path: str) -> Entry:
        return await self.fs.getattr((await self.found(path)).inode)

    async def set_xattr(self, path: str, name: str, value: bytes | None) -> None:
        await self.fs.set_xattr((await self.found(path)).inode, name, value)

    async def xattrs(self, path: str) -> dict[str, bytes]:
        inode = (await self.found(path)).inode
        return {name: self.fs.xattr(inode, name) for name in self.fs.xattr_names(inode)}

    async def tree(self, path: str = "") -> dict[str, object]:
        """Every name below ``path``, with what an observer can tell of it: a file's bytes, a link's target."""
        seen: dict[str, object] = {}
        for name in await self.names(path):
            below = f"{path}/{name}" if path else name
            entry = await self.getattr(below)
            if entry.is_dir:
                seen[below] = None
                seen.update(await self.tree(below))
            else:
                seen[below] = await self.readlink(below) if entry.is_symlink else await self.read(below)
        return seen

    # -- commits

    async def poll(self) -> int:
        """Apply what others committed; answers how many commits that were."""
        return await self.parts.poller.poll()

    async def sync(self) -> None:
        """Changes of names are in the store, and the objects that they left behind are gone from it."""
        await self.fs.sync_names()
        with trio.fail_after(SETTLE_S_MAX):
            while self.commits()["deletions_waiting"]:
                with suppress(LakeError):  # tried again
                    await delete_all_due(self.parts.deletions)
                await trio.sleep(0.002)

    def commits(self) -> dict[str, int]:
        told = self.fs.statistics()["commits"]
        assert isinstance(told, dict)
        return told

    def hidden(self) -> dict[str, int]:
        namespace = self.fs.statistics()["namespace"]
        assert isinstance(namespace, dict)
        hidden = namespace["hidden_keys"]
        assert isinstance(hidden, dict)
        return {reason: count for reason, count in hidden.items() if count}


@asynccontextmanager
async def lake(
    store: ObjectStore,
    cache_dir: Path,
    *,
    clock: Clock | None = None,
    capabilities: Capabilities | None = None,
    retry_timeout_s: float = 0.2,
    seed: object = None,
    node: Node | None = None,
    lake_id: str = "",
    **config: object,
) -> AsyncIterator[Lake]:
    """A mount of ``store`` with parts of 64 KiB and no bound on the disk, which polls when it is told to. A store in
    memory goes by the lake's clock, and a lake without one by that of the last lake of the store."""
    if isinstance(store, MemoryStore):
        clock = store.clock = clock or (store.clock if isinstance(store.clock, Clock) else Clock())
    clock = clock or Clock()
    metrics = Metrics()
    if capabilities is None:
        capabilities = store.capabilities if isinstance(store, MemoryStore) else Capabilities(name="local")
    client = store_client(store, capabilities, metrics.store, retry_timeout_s=retry_timeout_s, clock=clock)
    settings = MountConfig(
        store=StoreConfig(source=Source("file", "/nowhere", "")),
        mountpoint="/nowhere",
        cache_dir=str(cache_dir),
        free_bytes_min=0,
        **{"refresh_s": NEVER_S, "delete_after_s": 0.0, "metadata_ttl_s": TTL_S} | config,  # type: ignore[arg-type]
    )
    node = node or node_of(clock, repr(secrets.randbits(64) if seed is None else seed))
    async with assembled(settings, client, metrics, node=node, spans=SPANS, lake_id=lake_id) as parts:
        mounted = Lake(parts, metrics)
        parts.filesystem.events.name_changed.append(lambda parent, name: mounted.changes.append((parent, name)))
        yield mounted


@asynccontextmanager
async def two_lakes(
    store: ObjectStore, root: Path, *, clock: Clock | None = None, **config: object
) -> AsyncIterator[tuple[Lake, Lake]]:
    """Two nodes over one store."""
    clock = clock or Clock()
    async with (
        lake(store, root / "one", clock=clock, **config) as one,  # type: ignore[arg-type]
        lake(store, root / "two", clock=clock, **config) as two,  # type: ignore[arg-type]
    ):
        yield one, two


@contextmanager
def held_fresh(m: Lake) -> Iterator[None]:
    """What is known counts, whatever its age: the kernel's own cache answers its lookups meanwhile."""
    m.parts.namespace.name_fresh_s = lambda directory, name, **_: TTL_S  # type: ignore[method-assign]
    try:
        yield
    finally:
        del m.parts.namespace.name_fresh_s


@contextmanager
def unheard_commits(store: MemoryStore) -> Iterator[None]:
    """Nobody hears of commits that were made since the last poll, also not where a new object is listed."""
    store.hook = Failures(
        lambda request: request.what == "list" and request.key.startswith(COMMITS), Unavailable("away"), count=1000
    )
    try:
        yield
    finally:
        store.hook = lambda _request, _when: None


def entries_of(store: MemoryStore) -> list[str]:
    """Keys in the store that are not this program's own."""
    return sorted(key for key in store.objects if not key.startswith(".lakefs/"))


def permissions(entry: Entry) -> int:
    return stat.S_IMODE(entry.mode)
