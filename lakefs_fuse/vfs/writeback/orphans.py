"""Orphans: files that a daemon that died was writing, kept until they are finished or aborted.

At mount, names that were there only because the dead daemon wrote the file go (nobody else ever saw them, or another
node removed them meanwhile), a draft that had reached the store after all is recognised by its id in the object's
metadata, and the rest is kept as it is: staged bytes, uploaded parts, record. `finish` makes an orphan the newest
version of its key, unless that key was replaced since; `abort` deletes its upload, its bytes and its record. Both may
be repeated after a crash.

What always holds (*nothing unread is deleted*): a journal record that cannot be read, as one of a later version, stays
until its orphan is aborted, and so do its bytes: its staging file, the bytes beside it, and every segment that the
mount found, as it may name any.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec

from lakefs_fuse.environment.local_disk import allocated_bytes
from lakefs_fuse.errors import ConfigError, FileError, LakeError, Overtaken, PreconditionFailed
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.meta.tombstones import NS
from lakefs_fuse.staging.draft_record import DraftRecord, DraftState, decode, decode_outline, encode
from lakefs_fuse.staging.refused_ranges import UNKNOWN, RefusedRanges
from lakefs_fuse.staging.segments import PREFIX, entries
from lakefs_fuse.staging.staging_area import ENDED_XATTR, KEY_XATTR, UPLOAD_XATTR, Staging
from lakefs_fuse.upload.restore import restore_draft
from lakefs_fuse.upload.uploader import Uploader
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.writeback.publish_plan import choose_key
from lakefs_fuse.vfs.writeback.publisher import ObjectWriter
from lakefs_fuse.vfs.writeback.queue import WriteBack
from lakefs_fuse.vfs.writeback.reconciliation import path_of
from lakefs_fuse.vfs.writeback.replay import Replay

UNKNOWN_PREFIX = "unrecorded "
DAMAGED_PREFIX = "damaged-"
"""Of the second name of a segment that could not be read to its end."""
log = logging.getLogger(__name__)


class Recovery:
    """Orphans by draft id. Trio thread only."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        services: Uploader,
        writer: ObjectWriter,
        queue: WriteBack,
        replay: Replay,
        *,
        read_only: bool,
        in_use: Callable[[int], bool],
    ) -> None:
        """The records that ``replay`` restored belong to write-back; names of files ``in_use`` are not dropped."""
        self._stored_versions, self._replayed, self._in_use = replay.stored_versions, replay.records, in_use
        self._db, self._ns, self._services = database, namespace, services
        self._writer, self._queue, self._read_only = writer, queue, read_only
        self._journal = Journal(database)
        self.orphans: dict[str, DraftRecord] = {}
        self._room: dict[str, int] = {}
        self._busy: set[str] = set()
        self._recorded: set[str] = set()
        """Drafts with a journal record at the mount."""
        self._unreadable: dict[str, str] = {}
        """Those whose record cannot be read, with their paths, empty where even these cannot."""
        self.uncovered = False
        """Whether a removed name had been renamed over a name of a commit, so that commits must be read again."""

    def drop_names(self) -> None:
        """Names that were there only because a dead daemon wrote the file go, before another node's rename of their
        directory takes them along. Called once, before commits are applied."""
        if self._read_only:
            self._keep_xattrs()
        for draft_id, raw in list(self._journal.records()):
            if draft_id in self._replayed:
                continue
            with suppress(ValueError):  # `load` reports it
                self._drop_kept_name(path_of(decode(raw)))

    def _keep_xattrs(self) -> None:
        """Acknowledged files, whose names go until a mount that writes brings them back, have them in their records."""
        for draft_id, raw in list(self._journal.records()):
            batch = Batch()
            with suppress(ValueError):
                record = decode(raw)
                entry = self._ns.at(path_of(record)) if record.sequence else None
                xattrs = self._ns.tree.xattrs(entry.inode) if entry is not None and entry.is_local else record.xattrs
                if xattrs != record.xattrs:
                    self._journal.put(batch, draft_id, encode(msgspec.structs.replace(record, xattrs=xattrs)))
            self._db.commit(batch)

    async def load(self) -> None:
        """Read the journal and the staging directory; called once, before the mount answers. A read-only mount lists
        what it finds, and leaves all of it to the next that may write."""
        for draft_id, raw in list(self._journal.records()):
            self._recorded.add(draft_id)
            if draft_id in self._replayed:
                continue
            try:
                record = decode(raw)
            except ValueError as error:
                log.error("journal record %s cannot be read (%s): it stays, and so do its bytes", draft_id, error)
                self._unreadable[draft_id] = _path_in(raw)
                continue
            record = self._with_upload(self._with_mark(record))
            self._drop_kept_name(path_of(record))
            if self._path(draft_id).exists() or record.upload_id or record.spilled or record.segment:
                self.orphans[draft_id] = record
                if record.spot is not None:
                    self._services.staging.segments.add_reference(record.spot)
            elif not self._read_only:
                self._forget(draft_id)
        if self._unreadable:
            self._services.staging.segments.keep_all()
        for record in () if self._read_only else list(self.orphans.values()):
            try:
                if record.unlinked:
                    await self._forsake(record)
                    await self.abort(record.id)
                elif await self._is_published(record):
                    await self.abort(record.id)
            except LakeError as error:
                log.warning("what became of %s cannot be told now: %s", record.key, error)
        await self._find_unrecorded()
        if not self._read_only:
            self._db.end_loss()
        for draft_id in self.orphans:
            self._room[draft_id] = self._staged(draft_id)
        self._services.staging.bytes_used += sum(self._room.values())

    def _with_mark(self, record: DraftRecord) -> DraftRecord:
        """Writes were refused when there was no room for a record that says which."""
        if record.refused or not self._services.staging.is_incomplete(record.id):
            return record
        size = max(record.size, self._path(record.id).stat().st_size, 1)
        return msgspec.structs.replace(record, refused=[(0, size)], refused_errno=errno.ENOSPC, refused_why=UNKNOWN)

    def _with_upload(self, record: DraftRecord) -> DraftRecord:
        """The record may be older than the staging file's own mark, where the database was repaired."""
        if record.upload_id or not record.upload_intent_ns:
            return record
        return msgspec.structs.replace(record, upload_id=_attribute(str(self._path(record.id)), UPLOAD_XATTR))

    def adopt(self, record: DraftRecord) -> None:
        """A file of this daemon without open handles that cannot be published as it is."""
        self.orphans[record.id] = record
        self._room[record.id] = self._staged(record.id)
        self._services.staging.bytes_used += self._room[record.id]

    def incomplete_below(self, path: str) -> list[DraftRecord]:
        """Orphans with refused writes at or below ``path`` (empty: everywhere)."""
        return [
            record
            for record in self.orphans.values()
            if record.refused and (not path or path_of(record) == path or path_of(record).startswith(path + "/"))
        ]

    async def _forsake(self, record: DraftRecord) -> None:
        """The bytes are superseded, and an attempt to store them may have worked. Where a newer version is on its way,
        that replaces them."""
        entry = self._ns.at(path_of(record))
        if entry is not None and self._in_use(entry.inode):
            return
        meta = await self._stored_versions.published(record) if record.state is not DraftState.WRITING else None
        if meta is not None:
            self._queue.delete_object(meta)

    def _path(self, draft_id: str) -> Path:
        return self._services.staging.path(draft_id)

    def _staged(self, draft_id: str) -> int:
        try:
            return allocated_bytes(self._path(draft_id))
        except FileNotFoundError:
            return 0

    async def _find_unrecorded(self) -> None:
        """Staged bytes whose record is lost, because the metadata cache was, or cannot be read: told, never deleted
        unasked. Those of files that were published and recorded just before the daemon died are in the store."""
        if not self._read_only:
            self._unpack_logged()
            self._unpack_segments()
        with os.scandir(self._services.staging.directory) as found:
            entries = list(found)
        for entry in entries:
            ours = entry.name in self.orphans or entry.name in self._replayed or entry.name.startswith(PREFIX)
            if ours or not entry.is_file():
                continue
            key, upload_id = _attribute(entry.path, KEY_XATTR), _attribute(entry.path, UPLOAD_XATTR)
            if await self._is_unneeded(entry, key, upload_id):
                self._path(entry.name).unlink(missing_ok=True)
                continue
            found_ns, size = entry.stat().st_ctime_ns, entry.stat().st_size
            self._list_unrecorded(entry.name, key, upload_id, found_ns, size, f"bytes in {entry.path}: ")
        for draft_id in [each for each in self._unreadable if each not in self.orphans]:
            self._list_unrecorded(draft_id, "", "", self._services.clock.wall_ns(), 0, "bytes: ")

    def _list_unrecorded(self, draft_id: str, key: str, upload_id: str, since_ns: int, size: int, what: str) -> None:
        path = self._unreadable.get(draft_id)
        remedy = "copy what you need of them, then abort"
        if path is not None:
            remedy = f"mount with the version that wrote them, or {remedy}"
        key = key or path or ""
        if key:
            self._drop_kept_name(key)
        self.orphans[draft_id] = DraftRecord(
            id=draft_id,
            key=key,
            upload_id=upload_id,
            state=DraftState.FAILED,
            created_ns=since_ns,
            size=size,
            error=f"{UNKNOWN_PREFIX}{what}{remedy}",
        )

    async def _is_unneeded(self, entry: os.DirEntry[str], key: str, upload_id: str) -> bool:
        """Whether a staging file without a record can be deleted: its bytes are in the store, or there are none."""
        if self._read_only or entry.name in self._unreadable:
            return False
        size = entry.stat().st_size
        is_ended = bool(_attribute(entry.path, ENDED_XATTR))
        is_untouched = not size and not key and not upload_id
        return is_ended or is_untouched or await self._is_left_over(entry.name, key, size)

    async def _is_left_over(self, draft_id: str, key: str, size: int) -> bool:
        if not key:
            return False
        if not size and not self._db.lost_rows:
            return True
        try:
            return await self._stored_versions.is_at(key, draft_id)
        except LakeError as error:
            log.warning("what became of %s cannot be told now: %s", key, error)
            return False

    def _unpack_logged(self) -> None:
        """Bytes beside records that cannot be read."""
        for draft_id, data in self._journal.bytes_beside() if self._unreadable else ():
            if draft_id in self._unreadable:
                _unpack(self._services.staging, draft_id, self._unreadable[draft_id], data)

    def _unpack_segments(self) -> None:
        """Segments that no record names hold what is in the store, unless records were lost or cannot be read. One that
        may hold more than could be read of it is an orphan itself. Raises CacheError, StagingFull."""
        staging, lost = self._services.staging, self._db.lost_rows
        unreferenced = staging.segments.unreferenced()
        for path in staging.segments.paths() if lost or self._unreadable else unreferenced:
            with staging.translating():
                is_whole = not (lost or self._unreadable) or self._unpack_segment(path)
                if lost and not is_whole:
                    log.error("%s is damaged: what can be read of it is copied, and it is kept", path)
                    kept = path.with_name(f"{DAMAGED_PREFIX}{path.name}")
                    if path in unreferenced:
                        path.rename(kept)
                    else:
                        with suppress(OSError):  # it exists, or the disk has no links
                            kept.hardlink_to(path)
                elif path in unreferenced:
                    path.unlink(missing_ok=True)

    def _unpack_segment(self, path: Path) -> bool:
        """Copy its files without a readable record to staging files; returns whether all of it could be read."""
        is_whole = True
        for entry in entries(path, decode_outline):
            if entry is None:
                is_whole = False
                continue
            outline, data = entry
            if outline.id in self._unreadable or (self._db.lost_rows and outline.id not in self._recorded):
                _unpack(self._services.staging, outline.id, outline.path or outline.key, data)
        return is_whole

    def _drop_kept_name(self, key: str) -> None:
        entry = self._ns.at(key)
        if entry is None or entry.is_dir or self._in_use(entry.inode):
            return
        if entry.is_local or self._ns.is_removed(entry):
            self.uncovered = self.uncovered or (entry.is_local and bool(entry.stamp or entry.etag))
            batch = Batch()
            self._ns.tree.remove(batch, entry)
            self._ns.tree.forget_listing(batch, entry.parent)
            self._db.commit(batch)

    async def _is_published(self, record: DraftRecord) -> bool:
        if record.state is DraftState.WRITING:
            return False
        if await self._stored_versions.is_in_pack(record):
            return True
        meta = await self._stored_versions.published(record)
        if meta is None:
            return False
        path, dated_s = path_of(record), meta.mtime_ns // NS
        is_newest = (await self._stored_versions.visible(record)).etag in (record.replaces, meta.etag)
        if is_newest and not self._writer.was_seen_and_removed(path, meta, dated_s, None):
            self._writer.announce_object(path, meta, dated_s)
        return True

    def _forget(self, draft_id: str) -> None:
        self._journal.remove(draft_id, sync=True)

    def _drop(self, record: DraftRecord) -> None:
        """Its bytes are in the store, or superseded."""
        self.orphans.pop(record.id, None)
        self._services.staging.release(self._room.pop(record.id, 0))
        self._services.staging.path(record.id).unlink(missing_ok=True)
        self._forget(record.id)
        if record.spot is not None:
            self._services.staging.segments.release(record.spot)
        self._refresh_parent(record)

    def _refresh_parent(self, record: DraftRecord) -> None:
        *above, name = [part.encode("utf-8", "surrogatepass") for part in path_of(record).split("/")]
        parent = self._ns.tree.resolve(above)
        inode = ROOT_INODE if not above else parent.inode if parent is not None else None
        if inode is not None:
            batch = Batch()
            self._ns.tree.forget_listing(batch, inode)
            self._db.commit(batch)
            self._ns.changing(inode, name)
            self._ns.events.announce_name(inode, name)

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

    async def finish(self, orphan_id: str, *, incomplete: bool = False) -> None:
        """Publish an orphan; one with refused writes only if ``incomplete``. Raises FileError(EEXIST) where its key has
        another version now; both are kept then."""
        record = self._orphan(orphan_id)
        if record.refused and not incomplete:
            why = RefusedRanges(record.refused, why=record.refused_why).describe()
            raise FileError(
                errno.EINVAL,
                f"{path_of(record)}: {why}: give --incomplete to store it without them, or abort orphan {orphan_id}",
            )
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
        await self._check_replaceable(record)
        whole = msgspec.structs.replace(record, refused=[])
        draft = restore_draft(self._services, whole, lambda: (record.metadata, record.metadata_multipart))
        try:
            async with draft.gate:
                path = path_of(record)
                if not record.upload_intent_ns:  # perhaps given up at an earlier name
                    is_taken = self._ns.tree.objects.used(path) is not None
                    draft.target.key, draft.target.path = choose_key(path, record.id, is_taken=is_taken)
                await self._writer.finish(draft, path, partial(self._check_replaceable, record))
        except BaseException as error:
            self.orphans[record.id] = msgspec.structs.replace(draft.record(), refused=record.refused)
            if isinstance(error, Overtaken | PreconditionFailed):  # also of the version whose parts are copied
                raise self._replaced(record) from error
            raise
        finally:
            draft.close(unlink=False)
        self._drop(record)

    async def _check_replaceable(self, record: DraftRecord) -> None:
        """Raises FileError where the name has another version than the record replaces: EBUSY for one that is not in
        the store yet, else EEXIST; LakeError."""
        entry = self._ns.at(path_of(record))
        if entry is not None and entry.is_local and self._in_use(entry.inode):
            raise FileError(
                errno.EBUSY, f"another version of {path_of(record)} is not in the store yet: try again later"
            )
        there = await self._stored_versions.visible(record)
        ours = there.draft_id == record.id or there.draft_id in self._replayed
        expected = there.etag == record.replaces or ours
        if not expected and not await self._stored_versions.is_relocated(there, record):
            raise self._replaced(record)

    def _replaced(self, record: DraftRecord) -> FileError:
        return FileError(
            errno.EEXIST,
            f"{path_of(record)} was changed by another client since; the unfinished bytes are kept in "
            f"{self._path(record.id)}: copy what you need of them, then abort",
        )

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
        if record.spilled:
            await self._services.delete_spills(record.id)


def _unpack(staging: Staging, draft_id: str, path: str, data: bytes) -> None:
    """Give a small acknowledged file a separate staging file, durably, which replaces a copy that an attempt to store
    it, or an earlier crash, has left. Raises CacheError, StagingFull."""
    staging.path(draft_id).unlink(missing_ok=True)
    with os.fdopen(staging.create(draft_id, path), "wb") as target, staging.translating():
        target.write(data)
        target.flush()
        staging.disk.sync_data(target.fileno())


def _path_in(raw: bytes) -> str:
    """The path of a record that cannot be read, empty where that cannot be either."""
    with suppress(ValueError):
        outline = decode_outline(raw)
        return outline.path or outline.key
    return ""


def _attribute(path: str, name: str) -> str:
    """An extended attribute of a staging file, empty where there is none."""
    try:
        return os.getxattr(path, name).decode(errors="replace")
    except OSError:
        return ""
