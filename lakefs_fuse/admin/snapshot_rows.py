"""The rows of named snapshots, in databases of their own: for commands that compare, check or copy them, or that leave
alone what they name.

Nothing is kept, and nothing is written to the store. Tasks of one trio loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

from lakefs_fuse.admin.lake_view import LakeView, scratch_directory
from lakefs_fuse.admin.work import Report
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.index.index import Manifest
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import NotFound
from lakefs_fuse.meta.database import Database
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient


@contextmanager
def new_rows(node: Node, name: str, directory: Path) -> Iterator[Database]:
    """A database without rows, below ``directory``. Raises CacheError."""
    database = Database(directory / "meta", name, node.clock, node.disk, node.engines)
    try:
        yield database
    finally:
        database.close()


@asynccontextmanager
async def snapshot_rows(
    client: StoreClient, node: Node, name: str, manifest: Manifest, scratch: str
) -> AsyncIterator[Database]:
    """The rows of a snapshot, in a directory of ``scratch`` that is removed in the end. Raises DamagedCommit, NotFound
    where a file of it is gone, CacheError, StoreError kinds."""
    with scratch_directory(node, scratch) as directory, new_rows(node, name, Path(directory)) as database:
        await snapshots.take_in(client, node.threads, name, manifest, database, Path(directory) / "received")
        yield database


class SnapshotNames:
    """Which plain objects the named snapshots of a lake need. A version of a dataset needs none."""

    def __init__(self, trees: Sequence[tuple[str, Tree]]) -> None:
        self._trees = trees

    def find(self, key: str, etag: str) -> str:
        """The name of a snapshot that has bytes in this version of a plain object; empty for none, and for an object
        below `.lakefs/`, which `gc` and `pack` keep."""
        if key.startswith(RESERVED_PREFIX):
            return ""
        for name, tree in self._trees:
            entry = tree.resolve([part.encode("utf-8", "surrogatepass") for part in key.split("/")])
            row = tree.objects.find(key, etag)
            if (entry is not None and entry.is_plain and entry.etag == etag) or (row is not None and row.entries > 0):
                return name
        return ""


@asynccontextmanager
async def open_snapshot_names(lake: LakeView, report: Report) -> AsyncIterator[SnapshotNames]:
    """The rows of all snapshots but datasets are read into temporary databases, each about as large as an index of the
    lake. Raises DamagedCommit where a snapshot cannot be read, CacheError, StoreError kinds."""
    trees: list[tuple[str, Tree]] = []
    async with AsyncExitStack() as stack:
        for name in await snapshots.names(lake.client):
            try:
                manifest = await snapshots.fetch_manifest(lake.client, name)
                if manifest.dataset is not None:
                    continue
                report(f"reading snapshot {name}", manifest.names, manifest.bytes)
                rows = snapshot_rows(lake.client, lake.node, name, manifest, lake.scratch)
                trees.append((name, Tree(await stack.enter_async_context(rows))))
            except NotFound:
                continue  # it was never finished, or is being deleted
        yield SnapshotNames(trees)
