"""The fold database: a cache directory in which the worker of a mount keeps the names of the newest index.

With it a fold reads the commits since that index, and writes what they changed (`commits.index.levels`); without it, it
loads the index first. It is beside the other directories of the mount's cache directory, and can be deleted whenever no
worker runs: the next one loads the index again.

What always holds (*never trusted for more than speed*): its database says itself which index it continues. The file
`newest` repeats that, for the mount to know whether it is the one that folds. A directory that does not open, is
damaged, or is not wanted any more, is removed, and never repaired.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from lakefs_fuse.admin.lake_view import LakeView, open_lake_view
from lakefs_fuse.admin.work import Work
from lakefs_fuse.commits.index.index import FORMAT_LEVELS, Manifest
from lakefs_fuse.errors import CacheError
from lakefs_fuse.meta.sorted_tables import folded_of
from lakefs_fuse.store.client import StoreClient

NEWEST = "newest"
"""File with the time of the index, 16 hexadecimal digits."""
TRANSIENT = ("blocks", "staging", "index")
"""What a view leaves in its cache directory, and no later one needs."""


class FoldDatabase:
    """The directory; blocking."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    @property
    def path(self) -> str:
        return str(self._directory)

    def exists(self) -> bool:
        return self._directory.exists()

    @property
    def newest(self) -> int:
        """The time of the index whose names it has, 0 for none."""
        try:
            return int((self._directory / NEWEST).read_text(), 16)
        except (OSError, ValueError):
            return 0

    def record(self, time: int) -> None:
        """It has the names of the index of this time, or with 0 of none. Raises CacheError."""
        path = self._directory / NEWEST
        try:
            path.write_text(f"{time:016x}\n")
        except OSError as error:
            raise CacheError(f"{path}: {error.strerror}") from error

    def is_needed(self, index: Manifest | None) -> bool:
        """A lake with this newest index is folded with it, and it is not there, or of another index."""
        return index is not None and index.format == FORMAT_LEVELS and self.newest != index.time

    def is_in_use(self) -> bool:
        try:
            descriptor = os.open(self._directory / "lock", os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def clean(self) -> None:
        """Remove what only a view that is open needs."""
        for name in TRANSIENT:
            shutil.rmtree(self._directory / name, ignore_errors=True)

    def remove(self) -> None:
        shutil.rmtree(self._directory, ignore_errors=True)


@asynccontextmanager
async def open_fold_view(client: StoreClient, work: Work, database: FoldDatabase | None) -> AsyncIterator[LakeView]:
    """A view that lists nothing, of the names in the ``database``, or in a temporary one. Raises LakeError; where that
    is of the database, it is removed, and the next run begins with the index in the store."""
    if database is None or not work.levels:
        async with open_lake_view(
            client, work.store, node=work.node, scratch=work.scratch, lists=False, folds=work.levels
        ) as lake:
            yield lake
        return
    try:
        async with _opened(client, work, database) as lake:
            yield lake
    except CacheError:
        if not database.is_in_use():
            database.remove()
        raise


@asynccontextmanager
async def _opened(client: StoreClient, work: Work, database: FoldDatabase) -> AsyncIterator[LakeView]:
    database.clean()
    try:
        async with open_lake_view(
            client, work.store, node=work.node, scratch=work.scratch, cache_dir=database.path, lists=False, folds=True,
            lake_id=work.lake_id,
        ) as lake:  # fmt: skip
            database.record(folded_of(lake.fs.database).index)  # a run that is killed leaves it as well
            yield lake
            newest = folded_of(lake.fs.database).index
        database.record(newest)
    finally:
        database.clean()
