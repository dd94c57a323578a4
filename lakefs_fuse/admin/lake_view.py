"""A lake as a mount sees it, without a mount: what every engine of this layer looks at and writes commits through.

Always true: the view is that of a fresh mount (index, commits, plain objects), in a private cache directory that goes
with it; it polls only when asked to (`Headless.refresh`), so between two calls nothing changes under an engine; it
writes nothing by itself. Tasks of one trio loop. A crash leaves a directory of temporary files.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.hybrid_clock import HybridClock
from lakefs_fuse.config import MIB, MountConfig, StoreConfig
from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.rows import CommitRows
from lakefs_fuse.meta.sorted_tables import missing_before
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.vfs import Filesystem, open_filesystem
from lakefs_fuse.vfs.namespace.key_mapping import why_hidden
from lakefs_fuse.vfs.namespace.namespace import Namespace

NEVER_S = 10 * 365 * 86400.0
NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Headless:
    """See the module's head."""

    client: StoreClient
    fs: Filesystem
    metrics: Metrics
    log: CommitLog
    threads: Threads

    @property
    def namespace(self) -> Namespace:
        return self.fs.namespace

    @property
    def clock(self) -> HybridClock:
        return self.log.clock

    @property
    def writer(self) -> str:
        return self.log.writer

    @property
    def tree(self) -> Tree:
        return self.fs.namespace.tree

    @property
    def refused(self) -> int:
        """Commits that cannot be read, lie in the future, or are known to be missing: nobody knows what they say."""
        noted = len(CommitRows(self.fs.database).refused()) + bool(missing_before(self.fs.database))
        return max(noted, self.metrics.commits.damaged + self.metrics.commits.future)

    async def refresh(self) -> None:
        """Apply what was committed since. Raises LakeError."""
        await self.fs.look_again()

    async def take_time(self) -> int:
        """The time of a commit that is about to be written: later than all that are there. Raises LakeError."""
        return await self.log.latest_time()

    def key_of(self, time_ns: int) -> str:
        return self.log.key(time_ns)

    def path(self, entry: Entry) -> str:
        return self.namespace.key(entry)

    def find(self, path: str, slash: bytes = b"") -> Entry | None:
        """The file that a path names; with a ``slash`` the directory."""
        above, _, name = path.rpartition("/")
        parent = self.namespace.directory(above)
        return None if parent is None else self.tree.named(parent, name.encode("utf-8", "surrogatepass") + slash)

    def files(self) -> Iterator[tuple[str, Entry]]:
        """Every file and symbolic link that is known, shadowed ones too, with its path. The tree may change meanwhile:
        an entry is as it was when its directory was begun."""
        waiting = [(ROOT_INODE, "")]
        while waiting:
            directory, prefix = waiting.pop()
            below: list[tuple[int, str]] = []
            for entry in self.tree.children(directory):
                path = prefix + entry.name.decode("utf-8", "surrogatepass")
                if entry.is_dir:
                    below.append((entry.inode, path + "/"))
                else:
                    yield path, entry
            waiting += reversed(below)

    async def listed_files(self, path: str = "") -> AsyncGenerator[tuple[str, Entry], None]:
        """Every file in sight at or below a path, after its directory was listed; a directory's files together, in the
        order of the listing. Raises LakeError."""
        directory = await self._look_up(path)
        if isinstance(directory, Entry):
            yield path, directory
            return
        waiting = [(directory, path + "/" if path else "")]
        while waiting:
            inode, prefix = waiting.pop()
            await self.namespace.ensure_listed(inode)
            below: list[tuple[int, str]] = []
            for entry in self.tree.children(inode):
                name = entry.name.decode("utf-8", "surrogatepass")
                if entry.is_dir:
                    below.append((entry.inode, f"{prefix}{name}/"))
                elif not entry.flags & Flag.SHADOWED:
                    yield prefix + name, entry
            waiting += reversed(below)

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
async def open_headless(
    client: StoreClient,
    store: StoreConfig,
    *,
    node: Node,
    cache_dir: str | None = None,
) -> AsyncIterator[Headless]:
    """``cache_dir`` is that of a node, which keeps what it knows. Raises LakeError: CacheError where it is in use.
    Errors of the block come out of it as themselves, not as a group."""
    metrics = Metrics()
    with _directory(cache_dir) as directory, _ungrouped():
        config = MountConfig(
            store=store,
            mountpoint="",
            cache_dir=directory,
            cache_bytes_max=64 * MIB,
            free_bytes_min=0,
            metadata_ttl_s=NEVER_S,
            read_only=True,
            refresh_s=NEVER_S,
        )
        async with open_filesystem(config, client, metrics, node=node) as fs:
            fs.namespace.tree.forget_listings()  # those of an index, or of a node, count for as long as NEVER_S says
            clock = HybridClock(node.clock, rng=node.random.stream("commit-times"))
            writer = f"{node.random.stream('writer').getrandbits(32):08x}"
            log = CommitLog(client, clock, node.threads, writer=writer)
            await log.read_time()
            yield Headless(client, fs, metrics, log, node.threads)


@contextmanager
def _ungrouped() -> Iterator[None]:
    """The filesystem lives in a nursery, which wraps what goes wrong under it."""
    try:
        yield
    except BaseExceptionGroup as group:
        alone: BaseException = group
        while isinstance(alone, BaseExceptionGroup) and len(alone.exceptions) == 1:
            alone = alone.exceptions[0]
        raise alone from None


@contextmanager
def _directory(given: str | None) -> Iterator[str]:
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="lakefs-fuse-") as directory:
        yield directory
