"""What a daemon that died left behind: files that were being written, listed as orphans until somebody decides.

At mount, names that only the dead daemon knew go (nothing is visible under them anywhere), a draft that had reached the
store after all is recognised by its id in the object's metadata, and the rest is kept as it is: staged bytes, uploaded
parts, record. `finish` makes an orphan the newest version of its key, unless somebody else replaced that key meanwhile;
`abort` takes away its upload, its bytes and its record. Both may be repeated after a crash.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path

from lakefs_fuse.data.disk import allocated_bytes
from lakefs_fuse.data.draft import DRAFT_METADATA, DraftServices
from lakefs_fuse.data.publishing import publish
from lakefs_fuse.data.record import DraftRecord, DraftState, decode
from lakefs_fuse.data.restoring import restored
from lakefs_fuse.data.staging import KEY_XATTR
from lakefs_fuse.errors import ConfigError, FileError, LakeError, NotFound
from lakefs_fuse.fs.namespace import Namespace
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.meta.journal import Journal

INTENT_SLACK_NS = 2_000_000_000
"""Stores date uploads to the second, by their own clock."""
UNKNOWN_PREFIX = "unrecorded "
log = logging.getLogger(__name__)


class Recovery:
    """Orphans by draft id. Trio thread only."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        services: DraftServices,
        *,
        changed: Callable[[int, bytes], None],
    ) -> None:
        self._db, self._ns, self._services = database, namespace, services
        self._journal = Journal(database)
        self._changed = changed
        self.orphans: dict[str, DraftRecord] = {}
        self._busy: set[str] = set()

    async def load(self) -> None:
        """Read the journal and the staging directory; called once, before the mount answers."""
        for draft_id, raw in list(self._journal.records()):
            try:
                record = decode(raw)
            except ValueError as error:
                log.error("journal record %s cannot be read (%s): its bytes stay in staging", draft_id, error)
                self._forget(draft_id)
                continue
            self._drop_local_name(record)
            if await self._is_published(record):
                self._drop(record)
            elif self._path(draft_id).exists() or record.upload_intent_ns:
                self.orphans[draft_id] = record
            else:
                self._forget(draft_id)
        self._find_unrecorded()
        self._services.staging.bytes_used += sum(self._staged(draft_id) for draft_id in self.orphans)

    def _path(self, draft_id: str) -> Path:
        return self._services.staging.path(draft_id)

    def _staged(self, draft_id: str) -> int:
        try:
            return allocated_bytes(self._path(draft_id))
        except FileNotFoundError:
            return 0

    def _find_unrecorded(self) -> None:
        """Staged bytes whose record is lost, because the metadata cache was: told, never deleted unasked."""
        for entry in os.scandir(self._services.staging.directory):
            if entry.name in self.orphans or not entry.is_file():
                continue
            try:
                key = os.getxattr(entry.path, KEY_XATTR).decode(errors="replace")
            except OSError:
                key = ""
            self.orphans[entry.name] = DraftRecord(
                id=entry.name,
                key=key,
                state=DraftState.FAILED,
                created_ns=entry.stat().st_ctime_ns,
                size=entry.stat().st_size,
                error=f"{UNKNOWN_PREFIX}bytes in {entry.path}: copy what you need of them, then abort",
            )

    def _drop_local_name(self, record: DraftRecord) -> None:
        entry = self._ns.tree.resolve([name.encode("utf-8", "surrogatepass") for name in record.key.split("/")])
        if entry is not None and entry.is_local:
            batch = Batch()
            self._ns.tree.remove(batch, entry)
            self._db.commit(batch)

    async def _is_published(self, record: DraftRecord) -> bool:
        if record.state is DraftState.WRITING:
            return False
        try:
            meta = await self._services.client.head(record.key)
        except NotFound:
            return False
        except LakeError as error:
            log.warning("whether %s was stored cannot be told now: %s", record.key, error)
            return False
        return (meta.metadata or {}).get(DRAFT_METADATA) == record.id

    def _forget(self, draft_id: str) -> None:
        batch = Batch()
        self._journal.delete(batch, draft_id)
        self._db.commit(batch, sync=True)

    def _drop(self, record: DraftRecord) -> None:
        """Its bytes are in the store, or wanted by nobody."""
        if record.id in self.orphans:
            self._services.staging.release(self._staged(record.id))
            del self.orphans[record.id]
        self._services.staging.path(record.id).unlink(missing_ok=True)
        self._forget(record.id)
        self._refresh_parent(record)

    def _refresh_parent(self, record: DraftRecord) -> None:
        *above, name = [part.encode("utf-8", "surrogatepass") for part in record.key.split("/")]
        parent = self._ns.tree.resolve(above)
        inode = ROOT_INODE if not above else parent.inode if parent is not None else None
        if inode is not None:
            batch = Batch()
            self._ns.tree.forget_listing(batch, inode)
            self._db.commit(batch)
            self._ns.changing(inode, name)
            self._changed(inode, name)

    def _orphan(self, orphan_id: str) -> DraftRecord:
        record = self.orphans.get(orphan_id)
        if record is None:
            raise ConfigError(f"there is no orphan {orphan_id}: `lakefs-fuse orphans` lists them")
        if orphan_id in self._busy:
            raise FileError(errno.EBUSY, f"orphan {orphan_id} is being finished or aborted already")
        return record

    async def resolve_all(self, how: str) -> None:
        """``finish`` or ``abort`` every orphan; one that cannot be is logged and stays."""
        for orphan_id in list(self.orphans):
            try:
                await (self.finish(orphan_id) if how == "finish" else self.abort(orphan_id))
            except LakeError as error:
                log.error("orphan %s (%s) stays: %s", orphan_id, self.orphans[orphan_id].key, error)

    async def finish(self, orphan_id: str) -> None:
        """Publish an orphan. Raises FileError(EEXIST) where its key has another version now; both are kept then."""
        record = self._orphan(orphan_id)
        if record.error.startswith(UNKNOWN_PREFIX):
            raise FileError(errno.EINVAL, record.error)
        self._busy.add(orphan_id)
        try:
            await self._finish(record)
        finally:
            self._busy.discard(orphan_id)

    async def _finish(self, record: DraftRecord) -> None:
        try:
            etag = (await self._services.client.head(record.key)).etag
        except NotFound:
            etag = ""
        if etag != record.replaces:
            raise FileError(
                errno.EEXIST,
                f"{record.key} was changed by somebody else since; the unfinished bytes are kept in "
                f"{self._path(record.id)}: copy what you need of them, then abort",
            )
        await self._abort_unknown_upload(record)
        draft = restored(self._services, record, lambda multipart: _metadata(record, multipart))
        try:
            async with draft.exclusive():
                await publish(draft)
        finally:
            draft.close(unlink=False)
        self._drop(record)

    async def abort(self, orphan_id: str) -> None:
        """Take an orphan's upload, bytes and record away."""
        record = self._orphan(orphan_id)
        self._busy.add(orphan_id)
        try:
            if record.upload_id:
                await self._services.client.abort_multipart(record.key, record.upload_id)
            await self._abort_unknown_upload(record)
            self._drop(record)
        finally:
            self._busy.discard(orphan_id)

    async def _abort_unknown_upload(self, record: DraftRecord) -> None:
        """An upload was asked for and the daemon died before it learnt the id."""
        if record.upload_id or not record.upload_intent_ns:
            return
        for upload in await self._services.client.list_multipart(record.key):
            if upload.key == record.key and upload.started_ns >= record.upload_intent_ns - INTENT_SLACK_NS:
                await self._services.client.abort_multipart(upload.key, upload.upload_id)


def _metadata(record: DraftRecord, multipart: bool) -> dict[str, str]:
    return {name: value for name, value in record.metadata.items() if name != "mtime" or not multipart}
