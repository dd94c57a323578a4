"""Makes orphans of files that may not be stored, once their last handle is released.

Writes to such a file were refused, or another client has the name for which it was created with O_EXCL.

What always holds (*refused writes unpublished*): the name has the version before the failed one, or is removed if there
is none. A name that stays gets a new inode, so that the kernel shows no page and no size of the failed version. One
synced batch changes the rows and writes the journal record. A crash before it leaves the record of a file being
written, of which the next daemon makes the same orphan. If the batch cannot be written, the file stays in use, and
`make_durable` tries again. An orphan with refused writes is dropped when its name is created or emptied again, as
truncation would have cleared the refused writes. So is that of a file that lost its name, until the daemon ends: a lock
file for which nodes race every minute must not leave one each time. An orphan with which nothing could be saved is
dropped at once: that of a file that lost its name and has no bytes, and of one of which no write was accepted. Trio
thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.staging.draft_record import DraftRecord, encode
from lakefs_fuse.upload.uploader import Uploader
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.writeback.orphans import Orphans

log = logging.getLogger(__name__)


class IncompleteFiles:
    """Makes orphans of incomplete files; see the module's head."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        files: FileTable,
        services: Uploader,
        orphans: Orphans,
        read_again: Callable[[], Awaitable[None]],
    ) -> None:
        """``read_again`` applies commits again, for names that a renamed file had covered."""
        self._db, self._ns, self._files, self._orphans = database, namespace, files, orphans
        self._read_again, self._services = read_again, services
        self._journal = Journal(database)
        self._dropping: set[str] = set()
        self._lost_names: set[str] = set()
        """Ids of the orphans whose names other clients created first, of files of this daemon."""
        services.staging.register(self)
        files.events.file_emptied.append(self.supersede)

    async def set_aside(self, file: OpenFile) -> None:
        """Make an orphan of a file for which `OpenFile.is_orphaned` is true. Raises nothing but Cancelled."""
        uncovered = False
        try:
            draft, has_lost_name = file.draft, file.has_lost_name
            async with file.publishing:
                if file.draft is not None and not file.draft.sequence:
                    await file.draft.pause()
                if file.is_orphaned:
                    uncovered = self._set_aside(file)
            self._files.forget_if_idle(file)
            record = None if draft is None else self._orphans.records.get(draft.id)
            if record is not None and (_has_nothing_accepted(record) or (has_lost_name and not record.size)):
                await self._orphans.abort(record.id)
            elif record is not None and has_lost_name:
                self._lost_names &= self._orphans.records.keys()
                self._lost_names.add(record.id)
            if uncovered:
                await self._read_again()
        except LakeError as error:
            log.error("%s cannot be stored, and stays in use: %s", file.key, error)
        except Exception:
            log.exception("%s cannot be stored, and stays in use", file.key)

    def _set_aside(self, file: OpenFile) -> bool:
        """Make the orphan; return whether its file had covered a name of a commit. Raises LakeError."""
        draft = None if file.draft is None or file.draft.sequence else file.draft
        parent, name = file.entry.parent, file.entry.name
        row, batch = self._ns.tree.entry(file.entry.inode), Batch()
        record = draft.prepare_record() if draft is not None else None
        if record is not None:
            self._journal.put(batch, record.id, encode(record))
        self._ns.changing(parent, name)
        is_kept = row is not None and (row.is_local or self._ns.is_row_removed(row))  # only for what is being written
        gone = is_kept and not file.behind and draft is not None
        if row is not None and gone:
            self._ns.tree.remove(batch, row)
            self._ns.tree.forget_listing(batch, parent)
        elif row is not None:
            self._files.renew_inode(batch, file, row)
        self._db.commit(batch, sync=True)
        self._ns.invalidate_name(parent, name)
        file.refused.cut(0)
        if draft is not None and record is not None:
            why = draft.refused.describe() if draft.refused else draft.error
            level = logging.WARNING if file.has_lost_name else logging.ERROR
            log.log(level, "%s is not stored: %s; see `lakefs-fuse orphans`", file.key, why)
            file.take_up()
            draft.close(unlink=False, leave=True)
            self._orphans.adopt(record)
        return bool(row is not None and gone and row.is_local and (row.stamp or row.etag or row.place))

    def supersede(self, path: str) -> None:
        """Drop orphans with refused writes, or whose names were lost, at or below ``path``, whose file was created or
        emptied."""
        if not self._orphans.records:
            return
        for record in self._orphans.incomplete_below(path, self._lost_names):
            if record.id not in self._dropping:
                self._dropping.add(record.id)
                self._services.nursery.start_soon(self._drop, record.id, path)

    @property
    def making_room(self) -> bool:
        """See `Stager`."""
        return bool(self._dropping)

    def drop_uploaded(self, *, keep_recent: bool) -> int:
        """See `Stager`."""
        return 0

    async def spill(self) -> int:
        """See `Stager`."""
        return 0

    async def _drop(self, orphan_id: str, path: str) -> None:
        try:
            await self._orphans.abort(orphan_id)
            log.info("orphan %s is dropped: %s begins anew", orphan_id, path)
        except LakeError as error:
            log.warning("orphan %s, whose file %s begins anew, stays: %s", orphan_id, path, error)
        except Exception:
            log.exception("orphan %s stays", orphan_id)
        finally:
            self._dropping.discard(orphan_id)
            self._services.staging.notify()


def _has_nothing_accepted(record: DraftRecord) -> bool:
    """Return whether every write to a file was refused, or its writer was killed before it wrote anything."""
    return bool(record.refused) and not (record.pages or record.parts or record.spills)
