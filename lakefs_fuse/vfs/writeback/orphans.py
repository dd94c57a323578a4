"""Orphans: files that an earlier daemon was writing when it died, kept until they are finished or aborted.

At mount, three things happen. Names that existed only because the dead daemon was writing the file are removed: no
other node ever saw them, or another node has removed them. A draft that reached the store after all is recognised by
its id in the object's metadata, and ends. Everything else is kept as it is: staged bytes, uploaded parts, records.
`finish` makes an orphan the newest version of its key, unless another version has replaced the one that it was opened
on; `abort` deletes its upload, bytes and record. Both may be repeated after a crash.

What always holds (*nothing unread is deleted*): a journal record that cannot be read, for example one of a later
version, stays until its orphan is aborted. So do its bytes: its staging file, the bytes beside it in the journal, and
every segment that the mount found, because the record may refer to any of them.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Container
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
from lakefs_fuse.vfs.writeback.object_writer import ObjectWriter
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue
from lakefs_fuse.vfs.writeback.reconciliation import path_of
from lakefs_fuse.vfs.writeback.replay import Replay

UNKNOWN_PREFIX = "unrecorded "
DAMAGED_PREFIX = "damaged-"
"""Prefix of the second name of a segment that could not be read to its end."""
log = logging.getLogger(__name__)


class Orphans:
    """Orphans by draft id. Trio thread only."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        services: Uploader,
        writer: ObjectWriter,
        queue: WriteBackQueue,
        replay: Replay,
        *,
        read_only: bool,
        in_use: Callable[[int], bool],
    ) -> None:
        """Records that ``replay`` restored are left to write-back, and names of files ``in_use`` are kept."""
        self._reconciliation, self._replayed, self._in_use = replay.reconciliation, replay.records, in_use
        self._db, self._ns, self._services = database, namespace, services
        self._writer, self._queue, self._read_only = writer, queue, read_only
        self._journal = Journal(database)
        self.records: dict[str, DraftRecord] = {}
        self._room: dict[str, int] = {}
        self._busy: set[str] = set()
        self._recorded: set[str] = set()
        """Ids of drafts that had a journal record at mount."""
        self._unreadable: dict[str, str] = {}
        """Paths of drafts whose record cannot be read, by id; empty if the path cannot be read either."""
        self.uncovered = False
        """Set if a removed name stood for one that a commit had set, so that commits must be read again."""

    def drop_names(self) -> None:
        """Remove names that exist only because a dead daemon was writing the file. Raises CacheError.

        Called once, before commits are applied: another node's rename of their directory would take them along."""
        if self._read_only:
            self._keep_xattrs()
        for draft_id, raw in list(self._journal.records()):
            if draft_id in self._replayed:
                continue
            with suppress(ValueError):  # `load` reports it
                self._drop_kept_name(path_of(decode(raw)))

    def _keep_xattrs(self) -> None:
        """Copy extended attributes of acknowledged files into their records, because their rows are removed. Raises
        CacheError.

        The next mount that may write restores the names, with these attributes."""
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
        """Find the orphans in the journal and the staging directory. Called once, before the mount answers requests.

        A read-only mount lists the orphans, and leaves them to the next mount that may write."""
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
            record = self._with_size(self._with_upload(self._with_mark(record)))
            self._drop_kept_name(path_of(record))
            has_rest = self._path(draft_id).exists() or record.upload_id or record.spilled or record.segment
            if has_rest or _may_be_superseded_object(record):
                self.records[draft_id] = record
                if record.spot is not None:
                    self._services.staging.segments.add_reference(record.spot)
            elif not self._read_only:
                self._forget(draft_id)
        if self._unreadable:
            self._services.staging.segments.keep_all()
        for record in () if self._read_only else list(self.records.values()):
            try:
                if record.unlinked and self._has_newer(record):
                    await self._abort_uploads(record)
                    self._drop(record, keeps_record=True)
                elif record.unlinked:
                    await self._forsake(record)
                    await self.abort(record.id)
                elif record.state is not DraftState.WRITING and await self._is_published(record):
                    await self.abort(record.id)
            except LakeError as error:
                log.warning("what became of %s cannot be told now: %s", record.key, error)
        await self._find_unrecorded()
        if not self._read_only:
            self._db.end_loss()
        for draft_id in self.records:
            self._room[draft_id] = self._staged(draft_id)
        self._services.staging.count_staged(sum(self._room.values()))

    def _with_mark(self, record: DraftRecord) -> DraftRecord:
        """Return the record with all bytes refused if the staging file is marked as incomplete.

        The mark is set when a write was refused and there was no room for a record that says which."""
        if record.refused or not self._services.staging.is_incomplete(record.id):
            return record
        size = max(record.size, self._path(record.id).stat().st_size, 1)
        return msgspec.structs.replace(record, refused=[(0, size)], refused_errno=errno.ENOSPC, refused_why=UNKNOWN)

    def _with_upload(self, record: DraftRecord) -> DraftRecord:
        """Return the record with the staging file's upload id: a repaired database may have an older record."""
        if record.upload_id or not record.upload_intent_ns:
            return record
        return msgspec.structs.replace(record, upload_id=_attribute(str(self._path(record.id)), UPLOAD_XATTR))

    def _with_size(self, record: DraftRecord) -> DraftRecord:
        """Return the record of a new file with the size that it has on the disk: see `Draft.load`. Its own is that of
        its last part that was uploaded, 0 before that."""
        if record.state is not DraftState.WRITING or record.base is not None or not self._path(record.id).exists():
            return record
        return msgspec.structs.replace(record, size=max(record.size, self._path(record.id).stat().st_size))

    def adopt(self, record: DraftRecord) -> None:
        """Add a file of this daemon that has no open handles and cannot be published as it is."""
        self.records[record.id] = record
        self._room[record.id] = self._staged(record.id)
        self._services.staging.count_staged(self._room[record.id])

    def incomplete_below(self, path: str, others: Container[str] = ()) -> list[DraftRecord]:
        """Return the orphans with refused writes, and those with the ids ``others``, at or below ``path``; empty means
        the whole lake."""
        return [
            record
            for record in self.records.values()
            if (record.refused or record.id in others)
            and (not path or path_of(record) == path or path_of(record).startswith(path + "/"))
        ]

    def _has_newer(self, record: DraftRecord) -> bool:
        """Return whether a newer version will replace what an attempt stored of a superseded draft. The draft's record
        stays until the mount after this one: it says that the object is ours (`Replay.reconcile`)."""
        entry = self._ns.at(path_of(record))
        return path_of(record) == record.key and entry is not None and self._in_use(entry.inode)

    async def _forsake(self, record: DraftRecord) -> None:
        """Delete the object of a superseded draft if an attempt stored it."""
        meta = await self._reconciliation.published(record) if _may_be_superseded_object(record) else None
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
        """List staged bytes whose record is lost with the metadata cache, or cannot be read, as orphans.

        Bytes are deleted only if the store has them, or if there are none. Raises LakeError."""
        if not self._read_only:
            self._unpack_logged()
            self._unpack_segments()
        with os.scandir(self._services.staging.directory) as found:
            entries = list(found)
        for entry in entries:
            ours = entry.name in self.records or entry.name in self._replayed or entry.name.startswith(PREFIX)
            if ours or not entry.is_file():
                continue
            key, upload_id = _attribute(entry.path, KEY_XATTR), _attribute(entry.path, UPLOAD_XATTR)
            if await self._is_unneeded(entry, key, upload_id):
                self._path(entry.name).unlink(missing_ok=True)
                continue
            found_ns, size = entry.stat().st_ctime_ns, entry.stat().st_size
            self._list_unrecorded(entry.name, key, upload_id, found_ns, size, f"bytes in {entry.path}: ")
        for draft_id in [each for each in self._unreadable if each not in self.records]:
            self._list_unrecorded(draft_id, "", "", self._services.clock.wall_ns(), 0, "bytes: ")

    def _list_unrecorded(self, draft_id: str, key: str, upload_id: str, since_ns: int, size: int, what: str) -> None:
        path = self._unreadable.get(draft_id)
        remedy = "copy what you need of them, then abort"
        if path is not None:
            remedy = f"mount with the version that wrote them, or {remedy}"
        key = key or path or ""
        if key:
            self._drop_kept_name(key)
        self.records[draft_id] = DraftRecord(
            id=draft_id,
            key=key,
            upload_id=upload_id,
            state=DraftState.FAILED,
            created_ns=since_ns,
            size=size,
            error=f"{UNKNOWN_PREFIX}{what}{remedy}",
        )

    async def _is_unneeded(self, entry: os.DirEntry[str], key: str, upload_id: str) -> bool:
        """Return whether a staging file without a record can be deleted: the store has its bytes, or there are none."""
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
            return await self._reconciliation.is_at(key, draft_id)
        except LakeError as error:
            log.warning("what became of %s cannot be told now: %s", key, error)
            return False

    def _unpack_logged(self) -> None:
        """Copy the bytes beside records that cannot be read to staging files. Raises CacheError, StagingFull."""
        for draft_id, data in self._journal.bytes_beside() if self._unreadable else ():
            if draft_id in self._unreadable:
                _unpack(self._services.staging, draft_id, self._unreadable[draft_id], data)

    def _unpack_segments(self) -> None:
        """Delete segments to which no record refers. Raises CacheError, StagingFull.

        The store has their files, unless records were lost or cannot be read: then files without a readable record are
        first copied to staging files, and a segment that cannot be read to its end is kept as an orphan."""
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
        """Copy the files of a segment that have no readable record to staging files. Returns whether the segment could
        be read to its end."""
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
        if entry.is_local or self._ns.is_row_removed(entry):
            self.uncovered = self.uncovered or (entry.is_local and bool(entry.stamp or entry.etag))
            batch = Batch()
            self._ns.tree.remove(batch, entry)
            self._ns.tree.forget_listing(batch, entry.parent)
            self._db.commit(batch)

    async def _is_published(self, record: DraftRecord) -> bool:
        """Return whether the store has the present bytes of a record. Raises LakeError.

        After a power cut that may be true of one that says WRITING: what its daemon journaled last was not synced, nor
        were the staged bytes."""
        if await self._reconciliation.is_in_pack(record):
            return True
        meta = await self._reconciliation.published(record)
        if meta is None:
            return False
        path, dated_s = path_of(record), meta.mtime_ns // NS
        is_newest = (await self._reconciliation.visible(record)).etag in (record.replaces, meta.etag)
        if is_newest and not self._writer.removed.was_seen_and_removed(path, meta, dated_s, None):
            self._writer.announce_object(path, meta, dated_s)
        return True

    def _forget(self, draft_id: str) -> None:
        self._journal.remove(draft_id, sync=True)

    def _drop(self, record: DraftRecord, *, keeps_record: bool = False) -> None:
        """End an orphan whose bytes are in the store, superseded or aborted. Raises CacheError."""
        self.records.pop(record.id, None)
        self._services.staging.release(self._room.pop(record.id, 0))
        self._services.staging.path(record.id).unlink(missing_ok=True)
        if not keeps_record:
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
            self._ns.events.invalidate_name(inode, name)

    def _orphan(self, orphan_id: str) -> DraftRecord:
        record = self.records.get(orphan_id)
        if record is None:
            raise ConfigError(f"there is no orphan {orphan_id}: `lakefs-fuse orphans` lists them")
        if orphan_id in self._busy:
            raise FileError(errno.EBUSY, f"orphan {orphan_id} is being finished or aborted already")
        return record

    async def resolve_all(self, how: str) -> None:
        """Call ``finish`` or ``abort`` for every orphan, of several of one name the newest first. Failures are logged,
        and these orphans stay."""
        for orphan_id in sorted(self.records, key=lambda each: self.records[each].created_ns, reverse=True):
            try:
                await (self.finish(orphan_id) if how == "finish" else self.abort(orphan_id))
            except LakeError as error:
                log.error("orphan %s stays: %s", orphan_id, error)
            except Exception:
                log.exception("orphan %s stays", orphan_id)

    async def finish(self, orphan_id: str, *, incomplete: bool = False) -> None:
        """Publish an orphan; one with refused writes only if ``incomplete``. Raises LakeError.

        Raises FileError(EEXIST) if its key has another version by now; then both are kept."""
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
        draft = restore_draft(self._services, record, lambda: (record.metadata, record.metadata_multipart))
        draft.refused.waive()
        try:
            async with draft.gate:
                path = path_of(record)
                await self._writer.finish(draft, path, partial(self._check_replaceable, record))
        except BaseException as error:
            self.records[record.id] = draft.record()
            if isinstance(error, Overtaken | PreconditionFailed):  # also of the version whose parts are copied
                raise self._replaced(record) from error
            raise
        finally:
            draft.close(unlink=False)
        self._drop(record)

    async def _check_replaceable(self, record: DraftRecord) -> None:
        """Check that the name still has the version that the record replaces. Raises LakeError.

        Raises FileError if it has another version: EBUSY if the store does not have that yet, otherwise EEXIST."""
        entry = self._ns.at(path_of(record))
        if entry is not None and entry.is_local and self._in_use(entry.inode):
            raise FileError(
                errno.EBUSY, f"another version of {path_of(record)} is not in the store yet: try again later"
            )
        there = await self._reconciliation.visible(record)
        ours = there.draft_id == record.id or there.draft_id in self._replayed
        expected = there.etag == record.replaces or ours
        if not expected and not await self._reconciliation.is_relocated(there, record):
            raise self._replaced(record)

    def _replaced(self, record: DraftRecord) -> FileError:
        return FileError(
            errno.EEXIST,
            f"{path_of(record)} was changed by another client since; the unfinished bytes are kept in "
            f"{self._path(record.id)}: copy what you need of them, then abort",
        )

    async def abort(self, orphan_id: str) -> None:
        """Delete an orphan's upload, bytes and record. Raises LakeError."""
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


def _may_be_superseded_object(record: DraftRecord) -> bool:
    """Return whether the store may have an object of a superseded draft, whose bytes may be deleted already."""
    return record.unlinked and record.state is not DraftState.WRITING


def _unpack(staging: Staging, draft_id: str, path: str, data: bytes) -> None:
    """Write a small acknowledged file durably to a staging file of its own, over any copy that an attempt to store it
    or an earlier crash left there. Raises CacheError, StagingFull."""
    staging.path(draft_id).unlink(missing_ok=True)
    with os.fdopen(staging.create(draft_id, path), "wb") as target, staging.translating():
        target.write(data)
        target.flush()
        staging.disk.sync_data(target.fileno())


def _path_in(raw: bytes) -> str:
    """Return the path of a record that cannot be read; empty if the path cannot be read either."""
    with suppress(ValueError):
        outline = decode_outline(raw)
        return outline.path or outline.key
    return ""


def _attribute(path: str, name: str) -> str:
    """Return an extended attribute of a staging file; empty if it has none."""
    try:
        return os.getxattr(path, name).decode(errors="replace")
    except OSError:
        return ""
