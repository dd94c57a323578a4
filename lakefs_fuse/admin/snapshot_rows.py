"""The rows of a named snapshot, in a database of their own: for commands that compare, check or copy them.

Nothing is kept: the directory is the caller's. Tasks of one trio loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.index.index import Manifest
from lakefs_fuse.environment.node import Node
from lakefs_fuse.meta.database import Database
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
    client: StoreClient, node: Node, name: str, manifest: Manifest, directory: Path
) -> AsyncIterator[Database]:
    """The rows of a snapshot, below ``directory``. Raises DamagedCommit, NotFound where a file of it is gone,
    CacheError, StoreError kinds."""
    with new_rows(node, name, directory) as database:
        await snapshots.take_in(client, node.threads, name, manifest, database, directory / "received")
        yield database
