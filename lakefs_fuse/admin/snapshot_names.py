"""Which plain objects named snapshots name, for commands that move the bytes of files elsewhere and delete those.

A version of a dataset names no plain object, so its rows are not read. The rows of the other snapshots are, once, into
temporary databases: about as many bytes as the index of the lake, each. Tasks of one trio loop; nothing is written to
the store.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from lakefs_fuse.admin.lake_view import LakeView, scratch_directory
from lakefs_fuse.admin.snapshot_rows import snapshot_rows
from lakefs_fuse.admin.work import Report
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.errors import NotFound
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import RESERVED_PREFIX


class SnapshotNames:
    """Trees of the named snapshots of a lake."""

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
    """Raises DamagedCommit where a snapshot cannot be read, CacheError, StoreError kinds."""
    trees: list[tuple[str, Tree]] = []
    async with AsyncExitStack() as stack:
        for name in await snapshots.names(lake.client):
            try:
                manifest = await snapshots.fetch_manifest(lake.client, name)
                if manifest.dataset is not None:
                    continue
                report(f"reading snapshot {name}", manifest.names, manifest.bytes)
                scratch = Path(stack.enter_context(scratch_directory(lake.node, lake.scratch)))
                rows = snapshot_rows(lake.client, lake.node, name, manifest, scratch)
                trees.append((name, Tree(await stack.enter_async_context(rows))))
            except NotFound:
                continue  # it was never finished, or is being deleted
        yield SnapshotNames(trees)
