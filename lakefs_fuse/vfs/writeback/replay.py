"""Restores the acknowledged files of an earlier daemon: they are named and readable, and are published again.

`restore` runs before anything is read from the store, so that commits of other nodes find these files being written
here. Each file is reconciled before it is published, because the store may have its bytes already, or another node may
have stored a newer version under its name. In the second case both are kept: the bytes acknowledged here get the name
`NAME.conflict-…`. Both steps can be repeated after a crash. Trio thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from functools import partial

import msgspec

from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.environment.failpoints import reached
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.meta.tombstones import NS
from lakefs_fuse.metrics import WriteBackMetrics
from lakefs_fuse.quantity import counted
from lakefs_fuse.staging.draft_record import DraftRecord, decode, decode_outline
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.publish import abandon_upload
from lakefs_fuse.upload.restore import restore_draft
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace import attributes
from lakefs_fuse.vfs.namespace.key_mapping import NAME_BYTES_MAX
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.writeback.object_writer import LateAttributes, ObjectWriter
from lakefs_fuse.vfs.writeback.queue import AcknowledgedVersion, WriteBackQueue
from lakefs_fuse.vfs.writeback.reconciliation import Reconciliation, path_of

CONFLICT_CHARACTERS = 8
log = logging.getLogger(__name__)


class Replay:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        drafts: Drafts,
        writeback: WriteBackQueue,
        reconciliation: Reconciliation,
        writer: ObjectWriter,
        metrics: WriteBackMetrics,
        *,
        ensure_directory: Callable[[str], int],
    ) -> None:
        """``ensure_directory(path)`` returns the inode of a directory, and creates the directory if it is missing."""
        self._db, self._ns, self._files, self._writeback = database, namespace, drafts.files, writeback
        self._services = drafts.services
        self.reconciliation, self._metrics, self._ensure_directory = reconciliation, metrics, ensure_directory
        self._writer = writer
        self._journal = Journal(database)
        self.records: set[str] = set()
        """Ids of the drafts that were restored."""
        self._ours: set[str] = set()
        """Ids of all drafts in the journal, including superseded ones."""
        self.uncovered = False
        """Set if a name was created again, so that the commits about it must be read again."""

    # -- at mount

    def restore(self) -> None:
        """Restore every acknowledged version. Raises CacheError."""
        records, unreadable = [], set()
        for draft_id, raw in self._journal.records():
            try:
                record = decode(raw)
            except ValueError:
                unreadable.add(draft_id)  # `Orphans` lists it
                with suppress(ValueError):
                    self._writeback.sequence = max(self._writeback.sequence, decode_outline(raw).sequence)
                continue
            self._ours.add(record.id)
            self._writeback.sequence = max(self._writeback.sequence, record.sequence)
            if record.sequence and not record.unlinked:
                records.append(record)
        self._rewrite_bytes({record.id: record for record in records if record.segment}, unreadable)
        for record in sorted(records, key=lambda record: record.sequence):
            try:
                self._restore(record)
            except LakeError as error:
                log.error("%s was acknowledged, and cannot be brought back: %s", path_of(record), error)
            except Exception:  # one damaged record costs one file, not the mount
                log.exception("%s was acknowledged, and cannot be brought back", path_of(record))
        if self.records:
            files = counted(
                len(self.records), "file that was acknowledged before is", "files that were acknowledged before are"
            )
            log.warning("%s on their way into the store", files)
        reached("replay.restored")

    def _rewrite_bytes(self, records: Mapping[str, DraftRecord], unreadable: Container[str]) -> None:
        """Write bytes that were synced only in the journal into their segments again. Raises CacheError.

        A power cut may have taken any page of a segment, or all of them. The bytes are deleted from the journal once
        the segments are synced, except those of ``unreadable`` records."""
        staging, rewritten = self._services.staging, list[str]()
        with staging.translating():
            for draft_id, data in self._journal.bytes_beside():
                if draft_id in unreadable:
                    continue
                rewritten.append(draft_id)
                record = records.get(draft_id)
                if record is not None and record.spot is not None:
                    staging.segments.rewrite(record.spot, data)
            staging.segments.sync_rewritten()
        if rewritten:
            self._journal.delete_bytes(rewritten)

    def _restore(self, record: DraftRecord) -> None:
        entry = self._entry(record)
        file = self._files.get(entry.inode)
        if file is None:
            file = OpenFile(entry, path_of(record), None)
            file.extent = self._ns.extent(entry)
        draft = restore_draft(self._services, record, file.describe)
        if file.draft is not None:
            file.leave_behind()
        file.entry = attributes.learn(file.entry, record.metadata)
        late = record.xattrs if not entry.is_local else {}  # the row belongs to another version
        file.late_xattrs = late or self._ns.tree.xattrs(entry.inode)  # before the store's are applied over them
        draft.count_staged()
        file.begin(draft)
        self._files.restore(file)
        self.records.add(record.id)
        self._metrics.replayed += 1
        self._writeback.add(file, draft, is_unreconciled=True)

    def _entry(self, record: DraftRecord) -> Entry:
        """Return the row of the record's file; it is created if it is missing. Raises LakeError."""
        path = path_of(record)
        there = self._ns.at(path)
        if there is not None and not there.is_dir and not there.is_symlink:
            return there
        self.uncovered = True
        above, _, name = path.rpartition("/")
        parent = self._ensure_directory(above)
        batch = Batch()
        if there is not None and there.is_symlink:
            self._ns.tree.remove(batch, there)
        flags = Flag.LOCAL | Flag.ATTRIBUTES_KNOWN | (Flag.SHADOWED if there is not None and there.is_dir else 0)
        flags |= Flag.XATTRS if record.xattrs else 0
        entry = self._ns.tree.insert(batch, parent, name.encode("utf-8", "surrogatepass"), flags)
        self._ns.tree.set_xattrs(batch, entry.inode, record.xattrs)
        self._db.commit(batch)
        return entry

    # -- before it is published

    async def reconcile(self, item: AcknowledgedVersion) -> bool:
        """Return whether the store has the bytes already; then the item has ended. Raises LakeError.

        If another client has changed the name, the item has another name when this returns."""
        key, record = item.file.key, item.draft.record()
        if await self.reconciliation.is_in_pack(record):
            etag = (await self.reconciliation.visible(record)).etag
            return await self._end(item, etag, partial(self._tell_late, item), lambda now: now.key == record.commit)
        meta = await self.reconciliation.published(record)
        there = await self.reconciliation.visible(record, self._ours)
        if meta is not None:
            # what it replaces may be gone from its new name; if its own object is hidden under its key, it is older
            is_there = there.etag in (meta.etag, record.replaces) if there.etag else path_of(record) != record.key
            is_newest = is_there and not self._is_told_and_removed(item.file, meta)
            tell = partial(self._tell_object, item, meta, is_newest)
            return await self._end(item, meta.etag, tell, lambda now: now.etag == meta.etag)
        if self._is_gone(item):
            return False
        expected = there.etag in ("", item.draft.target.replaces) or there.draft_id in self._ours
        if not expected and not await self.reconciliation.is_relocated(there, record):
            await self.rename_conflict(item, key)
        elif there.draft_id in self._ours and there.etag != item.draft.target.replaces:
            self._replace_superseded(item.file, there.etag)
        item.is_unreconciled, item.file.late_xattrs = False, None  # it is stored again, with all of them
        return False

    def _replace_superseded(self, file: OpenFile, etag: str) -> None:
        """Have the versions of a file replace the object with this ETag, which an attempt to store a superseded one
        has left at its key. Raises CacheError."""
        batch, row = Batch(), self._ns.tree.entry(file.entry.inode)
        for each in file.versions:
            if each.draft is not None:
                each.draft.target.update_replaced(etag)
        self._files.journal_drafts(batch, file)
        if row is not None and row.is_local:
            self._ns.tree.update(batch, msgspec.structs.replace(row, etag=etag))
        self._db.commit(batch)

    def _is_told_and_removed(self, file: OpenFile, meta: ObjectMeta) -> bool:
        """Return whether a commit gave the file this object elsewhere, and another node has removed the name since."""
        row = self._ns.tree.entry(file.entry.inode)
        extent = None if row is None or not row.place else self._ns.extent(row)
        is_told = extent is not None and (extent.version.key, extent.version.etag) == (meta.key, meta.etag)
        return is_told and row is not None and self._ns.is_row_removed(row)

    @staticmethod
    def _is_gone(item: AcknowledgedVersion) -> bool:
        """Return whether it was superseded, or its name removed, while the store was asked.

        The task that did that asks the store itself."""
        return item.file.unlinked or item.file.owner_of(item.draft) is None

    def _tell_object(self, item: AcknowledgedVersion, meta: ObjectMeta, is_newest: bool) -> str:
        """Record and announce the plain object that has the item's bytes. Returns what `announce_object` returns.
        Raises CacheError.

        It is announced with the attributes in the record, some of which may have been set after the upload began."""
        before = self._ns.tree.entry(item.file.entry.inode)
        self._learn(item.file, item.draft, meta.etag, meta.size, is_newest=is_newest)
        if not is_newest:
            return ""
        record = item.draft.record()
        described = msgspec.structs.replace(meta, metadata=record.metadata)
        return self._writer.announce_object(path_of(record), described, meta.mtime_ns // NS, before)

    def _tell_late(self, item: AcknowledgedVersion) -> str:
        """Commit the attributes that were set while the pack was being sent, or later. Raises CacheError.

        They are those of the record, and of the row. If another node has removed the name since, the row is removed
        instead, whichever version it is by now."""
        file, record = item.file, item.draft.record()
        late, file.late_xattrs = file.late_xattrs, None
        row = self._ns.tree.entry(file.entry.inode)
        extent = None if row is None else self._ns.extent(row)
        if row is not None and file.versions == [file] and self._ns.is_row_removed(row):
            batch = Batch()
            self._remove_row(batch, row)
            self._db.commit(batch)
            return ""
        if row is None or extent is None or extent.version.key != record.commit:
            return ""  # a newer version has its own attributes, and one being written may never be stored
        wanted = attributes.learn(row, record.metadata)
        if not late and not self._ns.tree.xattrs(row.inode):
            late = None
        told, now = (attributes.describe(each) for each in (row, wanted))
        if late is not None or told != now:
            self._writer.set_attributes([LateAttributes.of(file.key, row, wanted, late)])
        return ""

    def _learn(self, file: OpenFile, draft: Draft, etag: str, size: int, *, is_newest: bool) -> None:
        """Have the row refer to the plain object that has the draft's bytes, unless a commit replaced or removed the
        name. Raises CacheError."""
        row = self._ns.tree.entry(file.entry.inode)
        if row is None or (draft.target.key != file.key and not self._ns.is_row_removed(row)):
            return
        batch = Batch()
        if is_newest:
            flags = row.flags & ~Flag.LOCAL
            row = msgspec.structs.replace(attributes.learn(row, draft.target.describe()[0]), flags=flags)
            self._ns.tree.update(batch, msgspec.structs.replace(row, etag=etag, size=size, place=0, offset=0))
        elif file.versions == [file] and (row.is_local or self._ns.is_row_removed(row)):
            self._remove_row(batch, row)
        self._ns.tree.forget_listing(batch, row.parent)
        self._db.commit(batch)

    def _remove_row(self, batch: Batch, row: Entry) -> None:
        self._ns.tree.remove(batch, row)
        self._ns.invalidate_name(row.parent, row.name)

    async def _end(
        self, item: AcknowledgedVersion, etag: str, tell: Callable[[], str], is_ours: Callable[[Version], bool]
    ) -> bool:
        """End an item whose bytes the store has in the object with this ETag, which later versions replace.

        ``tell`` records and announces what other nodes do not know of it yet, and returns the path of a plain object
        that is to be announced; ``is_ours`` returns whether a version has these bytes. Returns False if the item is
        superseded. Raises CacheError."""
        file, draft = item.file, item.draft
        async with file.publishing:
            if self._is_gone(item):
                return False
            unannounced = tell()
            draft.file.mark_ended()
            # before the file can be renamed: it would come back under this name
            self._end_record(file, draft, etag, unannounced)
            file.end_version(draft)
            row = self._ns.tree.entry(file.entry.inode)
            if row is not None and not row.is_local:
                extent = self._ns.extent(row)
                if file.draft is not None or file.behind or (extent is not None and is_ours(extent.version)):
                    self._files.updated(row)
                else:
                    self._writer.leave_to_others(row)
        self._writeback.end(draft)
        await draft.discard()
        if draft.error is not None:
            log.warning("an upload of %s that is not needed is left to `gc`: %s", draft.target.key, draft.error)
        self._files.forget_if_idle(file)
        return True

    def _end_record(self, file: OpenFile, draft: Draft, etag: str, unannounced: str) -> None:
        """Delete the record of a draft, and journal in the same batch that later versions replace the object with this
        ETag. Raises CacheError."""
        batch = Batch()
        for later in [each.draft for each in file.versions if each.draft is not None]:
            if later is not draft:
                later.target.update_replaced(etag)
        self._files.journal_drafts(batch, file)
        self._journal.delete(batch, draft.id, unannounced=unannounced)
        self._db.commit(batch)

    async def rename_conflict(self, item: AcknowledgedVersion, key: str) -> bool:
        """Give the acknowledged bytes a name beside ``key``, which has another client's version. Raises LakeError.

        Returns whether they got it: not if the file has been renamed or removed meanwhile."""
        file, draft = item.file, item.draft
        if draft.upload.intent_ns:
            await abandon_upload(draft, file.key)
        async with file.publishing:
            if file.key != key or file.owner_of(draft) is None or file.unlinked:
                return False
            self._rename(file, draft)
            return True

    def _rename(self, file: OpenFile, draft: Draft) -> None:
        suffix = f".conflict-{draft.id[:CONFLICT_CHARACTERS]}"
        parent = file.entry.parent
        room = min(NAME_BYTES_MAX, self._ns.keys.name_bytes_max(parent)) - len(suffix)
        kept = file.entry.name[: max(0, room)].decode(errors="ignore")  # cut between characters
        old, name = file.key, (kept + suffix).encode()
        row = self._ns.tree.entry(file.entry.inode)
        xattrs = file.late_xattrs
        if xattrs is None:
            xattrs = self._ns.tree.xattrs(file.entry.inode) if file.entry.flags & Flag.XATTRS else {}
        self._ns.changing(parent, file.entry.name)
        self._ns.changing(parent, name)
        batch = Batch()
        gone = row if row is not None and (row.is_local or self._ns.is_row_removed(row)) else None
        if gone is not None:  # commits about the other version had no effect here while the row was local
            self._writer.read_again(draft.created_ns)
            self._ns.tree.detach(batch, gone)
        elif row is not None:
            self._writer.leave_to_others(row)
        self._ns.tree.forget_listing(batch, parent)
        entry = _with_xattrs(_anew(file.entry), xattrs)
        mine = self._ns.tree.attach(batch, entry, parent, name, before=gone)
        self._ns.tree.set_xattrs(batch, mine.inode, xattrs)
        path = self._ns.prefix(parent) + name.decode("utf-8", "surrogatepass")
        with file.restoring_names():
            for each in file.versions:
                anew = _with_xattrs(_anew(each.entry), xattrs)
                each.entry = msgspec.structs.replace(anew, parent=mine.parent, cookie=mine.cookie, name=mine.name)
                each.if_absent = False
                if each.draft is not None:
                    each.draft.target.replace("")
            self._files.move(batch, file, path, is_answered=True)  # what the store has is another client's
            self._db.commit(batch, sync=True)
        for each in file.behind:
            each.extent = None
        self._files.detach(file)
        self._ns.invalidate_name(parent, name)
        self._metrics.conflicts += 1
        log.error(
            "%s was changed by another client since: both versions are kept, the one acknowledged here as %s",
            old,
            file.key,
        )


def _with_xattrs(entry: Entry, xattrs: Mapping[str, bytes]) -> Entry:
    """Return the entry with the flag that says whether it has extended attributes, which are in a row of their own."""
    return msgspec.structs.replace(entry, flags=(entry.flags & ~Flag.XATTRS) | (Flag.XATTRS if xattrs else 0))


def _anew(entry: Entry) -> Entry:
    """Return the entry as that of a file that replaces nothing."""
    return msgspec.structs.replace(entry, flags=entry.flags | Flag.LOCAL, etag="", stamp=0, place=0, offset=0)
