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

from lakefs_fuse.catalog.record import OBJECTS
from lakefs_fuse.data.disk import allocated_bytes
from lakefs_fuse.data.draft import DRAFT_METADATA
from lakefs_fuse.data.draft_services import DraftServices
from lakefs_fuse.data.record import DraftRecord, DraftState, decode
from lakefs_fuse.data.restoring import restored
from lakefs_fuse.data.staging import KEY_XATTR, UPLOAD_XATTR
from lakefs_fuse.data.strays import abort_strays
from lakefs_fuse.errors import ConfigError, FileError, LakeError, NotFound
from lakefs_fuse.fs import attributes
from lakefs_fuse.fs.namespace import Namespace
from lakefs_fuse.fs.storing import Storing
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.meta.journal import Journal

UNKNOWN_PREFIX = "unrecorded "
log = logging.getLogger(__name__)


class Recovery:
    """Orphans by draft id. Trio thread only."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        services: DraftServices,
        storing: Storing,
        *,
        read_only: bool,
        changed: Callable[[int, bytes], None],
    ) -> None:
        self._db, self._ns, self._services = database, namespace, services
        self._storing, self._read_only = storing, read_only
        self._journal = Journal(database)
        self._changed = changed
        self.orphans: dict[str, DraftRecord] = {}
        self._room: dict[str, int] = {}
        self._busy: set[str] = set()
        self.uncovered = False
        """A name that went had been renamed over one that commits tell of: they have to be read again."""

    async def load(self) -> None:
        """Read the journal and the staging directory; called once, before the mount answers."""
        for draft_id, raw in list(self._journal.records()):
            try:
                record = decode(raw)
            except ValueError as error:
                log.error("journal record %s cannot be read (%s): its bytes stay in staging", draft_id, error)
                self._forget(draft_id)
                continue
            self._drop_local_name(_path(record))
            if self._path(draft_id).exists() or record.upload_intent_ns:
                self.orphans[draft_id] = record
            else:
                self._forget(draft_id)
        for record in list(self.orphans.values()):
            try:
                if record.unlinked or await self._is_published(record):
                    await self.abort(record.id)
            except LakeError as error:
                log.warning("what became of %s cannot be told now: %s", record.key, error)
        self._find_unrecorded()
        for draft_id in self.orphans:
            self._room[draft_id] = self._staged(draft_id)
        self._services.staging.bytes_used += sum(self._room.values())

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
            key, upload_id = _attribute(entry.path, KEY_XATTR), _attribute(entry.path, UPLOAD_XATTR)
            if key:
                self._drop_local_name(key)
            self.orphans[entry.name] = DraftRecord(
                id=entry.name,
                key=key,
                upload_id=upload_id,
                state=DraftState.FAILED,
                created_ns=entry.stat().st_ctime_ns,
                size=entry.stat().st_size,
                error=f"{UNKNOWN_PREFIX}bytes in {entry.path}: copy what you need of them, then abort",
            )

    def _drop_local_name(self, key: str) -> None:
        entry = self._ns.at(key)
        if entry is not None and entry.is_local:
            self.uncovered = self.uncovered or bool(entry.stamp or entry.etag)
            batch = Batch()
            self._ns.tree.remove(batch, entry)
            self._ns.tree.forget_listing(batch, entry.parent)
            self._db.commit(batch)

    async def _is_published(self, record: DraftRecord) -> bool:
        if record.state is DraftState.WRITING:
            return False
        if self._is_in_pack(record):
            return True
        try:
            meta = await self._services.client.head(record.key)
        except NotFound:
            return False
        if not record.token or (meta.metadata or {}).get(DRAFT_METADATA) != record.token:
            return False
        if not self._read_only and (await self._visible(record))[0] in (record.replaces, meta.etag):
            self._storing.say(_path(record), meta)
        return True

    def _is_in_pack(self, record: DraftRecord) -> bool:
        """A commit has a file of this size and of this very nanosecond under the name."""
        entry = self._ns.at(_path(record))
        if entry is None or not entry.place or entry.size != record.size:
            return False
        return attributes.describe(entry, with_mtime=True).get("mtime") == record.metadata.get("mtime")

    def _forget(self, draft_id: str) -> None:
        batch = Batch()
        self._journal.delete(batch, draft_id)
        self._db.commit(batch, sync=True)

    def _drop(self, record: DraftRecord) -> None:
        """Its bytes are in the store, or wanted by nobody."""
        self.orphans.pop(record.id, None)
        self._services.staging.release(self._room.pop(record.id, 0))
        self._services.staging.path(record.id).unlink(missing_ok=True)
        self._forget(record.id)
        self._refresh_parent(record)

    def _refresh_parent(self, record: DraftRecord) -> None:
        *above, name = [part.encode("utf-8", "surrogatepass") for part in _path(record).split("/")]
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
                log.error("orphan %s stays: %s", orphan_id, error)
            except Exception:
                log.exception("orphan %s stays", orphan_id)

    async def finish(self, orphan_id: str) -> None:
        """Publish an orphan. Raises FileError(EEXIST) where its key has another version now; both are kept then."""
        record = self._orphan(orphan_id)
        if record.error.startswith(UNKNOWN_PREFIX):
            raise FileError(errno.EINVAL, record.error)
        if record.unlinked:
            raise FileError(errno.EINVAL, f"{record.key} was deleted while it was open: abort orphan {orphan_id}")
        self._busy.add(orphan_id)
        try:
            await self._finish(record)
        finally:
            self._busy.discard(orphan_id)

    async def _finish(self, record: DraftRecord) -> None:
        if await self._is_published(record):
            await self._abort_uploads(record)
            self._drop(record)
            return
        etag, token = await self._visible(record)
        if etag != record.replaces and token.partition(".")[0] != record.id:
            raise FileError(
                errno.EEXIST,
                f"{_path(record)} was changed by somebody else since; the unfinished bytes are kept in "
                f"{self._path(record.id)}: copy what you need of them, then abort",
            )
        draft = restored(
            self._services, record, lambda multipart: record.metadata_multipart if multipart else record.metadata
        )
        try:
            async with draft.exclusive():
                if not record.upload_intent_ns and self._ns.tree.objects.used(draft.target.key) is not None:
                    draft.target.key, draft.target.path = OBJECTS + record.id, _path(record)
                await self._storing.finish(draft, _path(record))
        except BaseException:
            self.orphans[record.id] = draft.record()
            raise
        finally:
            draft.close(unlink=False)
        self._drop(record)

    async def _visible(self, record: DraftRecord) -> tuple[str, str]:
        """ETag and draft token of the object that the name means now; empty where there is none."""
        path = _path(record)
        entry = self._ns.at(path)
        if entry is not None and (entry.is_dir or entry.is_symlink):
            return str(entry.file_type), ""
        extent = self._ns.extent(entry) if entry is not None else None
        if extent is not None and extent.version.key not in (path, record.key):
            return extent.version.etag, ""
        try:
            meta = await self._services.client.head(path)
        except NotFound:
            return "", ""
        tombstone = self._ns.tree.tombstones.get(path.encode("utf-8", "surrogatepass"))
        if tombstone is not None and tombstone.hides(meta.etag, meta.mtime_ns):
            return "", ""
        return meta.etag, (meta.metadata or {}).get(DRAFT_METADATA, "")

    async def abort(self, orphan_id: str) -> None:
        """Take an orphan's upload, bytes and record away."""
        record = self._orphan(orphan_id)
        self._busy.add(orphan_id)
        try:
            await self._abort_uploads(record)
            self._drop(record)
        finally:
            self._busy.discard(orphan_id)

    async def _abort_uploads(self, record: DraftRecord) -> None:
        if record.upload_id:
            await self._services.client.abort_multipart(record.key, record.upload_id)
        await self._abort_unknown_upload(record)

    async def _abort_unknown_upload(self, record: DraftRecord) -> None:
        """An upload was asked for and the daemon died before it learnt the id."""
        if record.upload_intent_ns and not record.upload_id:
            await abort_strays(self._services.client, record.key, record.upload_intent_ns)


def _path(record: DraftRecord) -> str:
    """Where the file is in the lake."""
    return record.path or record.key


def _attribute(path: str, name: str) -> str:
    """An extended attribute of a staging file, empty where there is none."""
    try:
        return os.getxattr(path, name).decode(errors="replace")
    except OSError:
        return ""
