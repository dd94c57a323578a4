"""Makes what this node holds durable in the store: files, changes of names, orphans.

What always holds: a call that returns has published what was there when it began; one that raises has tried all of it,
names included, unless the store is away. The work is a task of the mount, so a caller that is cancelled leaves it to go
on. Trio thread only; a crash leaves what the journal holds.
"""

from __future__ import annotations

import errno
from functools import partial

import trio

from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.config import MountConfig
from lakefs_fuse.errors import FileError, LakeError, Unavailable
from lakefs_fuse.staging.refused_ranges import KILLED
from lakefs_fuse.sync.nursery import run_detached
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.ops.io import FileIO
from lakefs_fuse.vfs.ops.name_changes import NameChanges
from lakefs_fuse.vfs.writeback.orphans import Orphans
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue
from lakefs_fuse.vfs.writeback.reconciliation import path_of

DELETION_S_MAX = 5.0
"""Maximum wait, when a lake is made durable, for one request that deletes unreferenced objects."""
CALLS_MAX = 16
"""Calls that make files durable at a time, those included whose callers have left; others wait."""


class Durability:
    """Publishes files, and commits changes of names."""

    def __init__(
        self,
        config: MountConfig,
        files: FileTable,
        io: FileIO,
        names: NameChanges,
        writeback: WriteBackQueue,
        orphans: Orphans,
        deletions: DeletionQueue,
        nursery: trio.Nursery,
    ) -> None:
        self._config, self._files, self._io, self._names = config, files, io, names
        self._writeback, self._orphans, self._deletions = writeback, orphans, deletions
        self.poll, self._nursery, self._calls = io.poll, nursery, trio.Semaphore(CALLS_MAX)

    async def sync_directory(self, path: str | None) -> None:
        """Publish the files at or below a directory that no program has open for writing, those whose `close()` failed
        included, and commit all names; ``path`` is None for one that was removed. Raises LakeError for the first that
        cannot be."""
        failed: LakeError | None = None
        if path is not None:
            self.request_names()
            failed = await self._publish_below(path, only_closed=True)
        if not isinstance(failed, Unavailable):
            try:
                await self.sync_names()
            except LakeError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    async def sync_names(self) -> None:
        """Commit every change of a name that was made before. Raises LakeError."""
        if not self._config.read_only:
            await self._names.flush()

    def request_names(self) -> None:
        """Take over files that the C library received."""
        for listener in self._files.events.names_requested:
            listener()

    async def make_durable(self, path: str = "", *, only_closed: bool = False) -> None:
        """Publish every file at or below ``path`` (relative to the root) that is not durable, and commit every change
        of a name; ``only_closed``: of a file that is open for writing only what write-back acknowledged. Raises
        LakeError for the first that cannot be stored; the others are still published and committed, except while the
        store is away, because then every request would wait. For the whole lake, stored objects are also announced to
        other nodes, and objects of removed names are deleted, if that does not take long: they are hidden, and the next
        mount deletes the rest. All of this goes on where the caller is cancelled."""
        self.request_names()
        await self._calls.acquire()
        await run_detached(self._nursery, partial(self._make_durable, path.strip("/"), only_closed))

    async def _make_durable(self, below: str, only_closed: bool) -> None:
        try:
            await self._publish_and_commit(below, only_closed)
        finally:
            self._calls.release()

    async def _publish_and_commit(self, below: str, only_closed: bool) -> None:
        failed = await self._publish_below(below, only_closed=only_closed)
        for record in self._orphans.incomplete_below(below):
            if record.refused_errno == KILLED:
                continue
            message = f"{path_of(record)} is an orphan of which writes failed: see `lakefs-fuse orphans`"
            failed = failed or FileError(record.refused_errno, message)
        if not isinstance(failed, Unavailable):
            try:
                await self.sync_names()
            except LakeError as error:
                failed = failed or error
            else:
                if not below and not self._config.read_only:
                    await self._names.announce()
                    await self._deletions.hasten(DELETION_S_MAX)
        if failed is not None:
            raise failed

    async def _publish_below(self, below: str, *, only_closed: bool = False) -> LakeError | None:
        """As `make_durable`, of files only; answers the first error."""
        failed: LakeError | None = None
        try:
            await self._writeback.drain(self._writeback.below(below))
        except LakeError as error:
            failed = error
        for file in self._files.dirty():
            ours = not below or file.key == below or file.key.startswith(below + "/")
            if only_closed and file.writers:
                continue
            if ours and not (failed is not None and file.draft is not None and file.draft.sequence):
                if file.is_orphaned:
                    await self._io.set_aside(file)
                try:
                    await self._io.publish(file)
                except LakeError as error:
                    failed = failed or error
                    if file.is_orphaned:
                        await self._io.set_aside(file)
        return failed

    async def finish_orphan(self, orphan_id: str, *, incomplete: bool = False) -> None:
        self._refuse_read_only()
        await self._orphans.finish(orphan_id, incomplete=incomplete)

    async def abort_orphan(self, orphan_id: str) -> None:
        self._refuse_read_only()
        await self._orphans.abort(orphan_id)

    def _refuse_read_only(self) -> None:
        if self._config.read_only:
            raise FileError(errno.EROFS, f"{self._config.mountpoint} is mounted read-only")
