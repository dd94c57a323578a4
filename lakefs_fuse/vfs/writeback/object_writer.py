"""Stores versions, in packs or as plain objects, and has other nodes learn of them.

A plain object is stored at the file's own path if that key is free. The key is not free if a name that was renamed away
still has its bytes there. If it is not, or if the upload began before the file was renamed, a commit says which object
the name refers to. A name of which commits have told is committed again, as is one whose attributes a LIST would not
show. Any other plain object is announced with the next commit.

What always holds: `publish_plan` decides, from facts of one moment; the methods here gather the facts, and carry out
what was decided. Nothing here changes which version a file has: `Publisher`, which calls this while it holds the file,
records what was stored. A draft that the store has, and that could not be recorded, is described anew, not sent again.
Trio thread only.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.objects.key_claims import KeyClaims
from lakefs_fuse.commits.path_tree import is_hiding
from lakefs_fuse.commits.record import OBJECTS, Remove
from lakefs_fuse.config import MountConfig
from lakefs_fuse.errors import CacheError, FileError, KeyConflict, LakeError, Overtaken, StoreError
from lakefs_fuse.meta.barrier import About
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import PENDING, Entry, Flag
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.meta.tombstones import NS, Tombstone
from lakefs_fuse.path_rules import PackPolicy, Rules
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_target import DraftTarget
from lakefs_fuse.upload.publish import (
    Published,
    abandon_upload,
    fail_name_taken,
    find_late_object,
    is_own_object,
    publish,
    wait_upload_begun,
)
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace import attributes
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder, hide_object, when_named
from lakefs_fuse.vfs.namespace.renamed_objects import RenamedObjects
from lakefs_fuse.vfs.writeback.packer import Packer, refuse_path
from lakefs_fuse.vfs.writeback.publish_plan import (
    Form,
    PublishPlan,
    StoredFacts,
    Telling,
    VersionFacts,
    is_renamed_since,
    needs_commit,
    plan_publish,
    plan_telling,
    superseded_at,
)
from lakefs_fuse.vfs.writeback.removed_versions import KnownAt, RemovedVersions
from lakefs_fuse.vfs.writeback.stored_version import PlainObject, StoredVersion, Unrecorded

OF_VERSION_BEFORE = Flag.LOCAL | Flag.ATTRIBUTED | Flag.PUT_AGAIN | Flag.OVERRIDING
"""Flags of a row that its file loses when it is stored."""
OVERTAKEN_MAX = 10
"""Attempts to store a plain object; before each further one another client has stored the name."""
REFUSALS_MIN = 2
"""Refusals of an empty key after which it is given up: SeaweedFS refuses a key if objects are, or were, below it."""
log = logging.getLogger(__name__)


class LateAttributes(msgspec.Struct, frozen=True):
    """Attributes that were set while a version was being stored; ``xattrs`` is None if no extended ones were."""

    path: str
    entry: Entry
    xattrs: dict[str, bytes] | None

    @classmethod
    def of(cls, path: str, row: Entry, now: Entry, xattrs: dict[str, bytes] | None) -> LateAttributes:
        """Return the attributes of ``now`` for the version of ``row``."""
        attributes_now = {"mode": now.mode, "uid": now.uid, "gid": now.gid, "mtime_ns": now.mtime_ns}
        return cls(path, msgspec.structs.replace(row, **attributes_now), xattrs)


class NameFacts(NamedTuple):
    """What is known of the name of a file that is stored as a plain object. ``row`` is that of its inode.

    ``has_tombstone``: commits have removed or hidden a plain object at ``path``. ``replaced`` is the ETag of the object
    replaced there if no commit has told of it here, ``dated_s`` the store's date of the new one if that matters; empty
    and 0 otherwise."""

    path: str
    row: Entry | None
    has_tombstone: bool
    replaced: str
    dated_s: int


class ObjectWriter:
    """Stores versions, in packs or as plain objects, and commits what a LIST would not show of them."""

    def __init__(
        self,
        namespace: Namespace,
        committer: Committer,
        claims: KeyClaims,
        renamed: RenamedObjects,
        packer: Packer,
        files: FileTable,
        config: MountConfig,
        poll: Callable[[], Awaitable[object]],
    ) -> None:
        """``poll`` applies what other nodes have committed."""
        self._ns, self._committer, self._deletions = namespace, committer, claims.deletions
        self._renamed, self._packer, self._files = renamed, packer, files
        self.keeping, self.claims = claims.deletions.keeping, claims
        self.removed = RemovedVersions(namespace, claims.deletions)
        self._rules, self._shown, self._poll = Rules.of(config), attributes.shown(config), poll
        self._storing_plain = 0
        """Number of files that are being stored as plain objects: a file that closes meanwhile is not alone."""
        self._untold: dict[str, int] = {}
        """Numbers of journaled changes without which other nodes do not find a stored version, by path."""
        self._unrecorded = WeakKeyDictionary[Draft, Unrecorded]()
        """Drafts that the store has. If one could not be recorded, the next attempt continues from here."""

    async def store(
        self, file: OpenFile, draft: Draft, *, alone: bool = False, is_synced: bool = False
    ) -> StoredVersion:
        """Store the draft's bytes as the newest version of the file. The caller holds ``draft.gate``. ``alone``: it
        does not wait for other files. ``is_synced``: an fsync waits for it. Raises LakeError; then nothing is lost, and
        it can be tried again."""
        is_exclusive = draft.target.if_absent
        try:
            return await self._store(file, draft, alone=alone, is_synced=is_synced)
        except BaseException as error:
            if is_exclusive and not draft.target.replaces:  # whatever this attempt has concluded
                draft.target.require_absent()
                if isinstance(error, FileError) and error.errno == errno.EEXIST:
                    file.lose_name()
            raise

    async def _store(self, file: OpenFile, draft: Draft, *, alone: bool, is_synced: bool) -> StoredVersion:
        await self._committer.reconcile()  # a rename that seemed to fail may have moved the file at this name
        if self._committer.error is not None:
            for path in list(self._untold):  # their commits come before this version
                await self.commit_location(path)
        if draft in self._unrecorded:
            return await self._resume(file, draft)
        if len(file.key.encode("utf-8", "surrogatepass")) > self._ns.keys.path_bytes_max:
            refuse_path(file, draft)
        before = self._ns.tree.objects.get(file.entry.place) if file.entry.place else None
        policy, is_exclusive = self._rules.pack_for(file.key), draft.target.if_absent
        if is_exclusive and self._is_packed_by_another(file, draft):
            raise await fail_name_taken(draft)
        alone = alone or draft.copies or (is_exclusive and self._is_of_another_node(file))
        plan, known = await self._plan(file, draft, policy, alone=alone, is_synced=is_synced)
        if plan.form is not Form.PLAIN:
            alone_is_plain, others = plan.form is Form.PACK_WITH_OTHERS, self._storing_plain
            if await self._packer.submit(file, draft, policy.threshold_bytes, others, alone_is_plain=alone_is_plain):
                self._end_pack(draft, before)
                return await self._resume(file, draft)
            plan, known = await self._plan(file, draft, policy, alone=True)
        refusals, there = 0, None  # refusals of a key at which a HEAD found nothing
        for _ in range(OVERTAKEN_MAX):
            try:
                sent = await self._send_plain(draft, plan, known, there, is_exclusive=is_exclusive)
                self._unrecorded[draft] = Unrecorded(before, sent)
                return self._retire(before, await self._tell(file, draft, sent))
            except Overtaken as error:
                log.info("%s; it is stored when that is known", error)
                refusals += not plan.expected
            except KeyConflict as error:
                if plan.key.startswith(OBJECTS):
                    raise
                log.info("%s; it is stored below %s", error, OBJECTS)
                refusals += REFUSALS_MIN
            except FileError as error:
                if error.errno != errno.EEXIST or not await self._is_free(draft, plan):
                    raise
                refusals += 1
            there = await draft.uploader.client.find(plan.key)
            if there is not None:
                refusals = 0
                if is_exclusive and self.claims.is_removed_since_put(there):
                    draft.target.allow_replacing()
            elif refusals >= REFUSALS_MIN:
                self._files.refuse_key(plan.key)
            await self._poll()  # after the HEAD, so that a rename of the object found there is in effect
            if is_exclusive and plan.key == file.key and self._is_name_taken(draft, there):
                raise await fail_name_taken(draft)
            etag = "" if there is None else there.etag
            target, row = draft.target, self._ns.tree.entry(file.entry.inode)
            is_shown_now = target.unsure is not None and target.hidden_ns > 0 and not _hidden_ns(row)
            plan, known = await self._plan(file, draft, policy, alone=True, there=None if is_shown_now else etag)
        raise StoreError(f"{file.key}: other clients store it so often that there is no turn for this one")

    async def _resume(self, file: OpenFile, draft: Draft) -> StoredVersion:
        """Describe a draft that the store has. Raises LakeError; then it can be tried again."""
        unrecorded = self._unrecorded[draft]
        if unrecorded.plain is None:
            await self._committer.reconcile()  # so that the commit is in effect here
            return self._retire(unrecorded.before, self._packed(file, draft))
        plain, meta = unrecorded.plain, unrecorded.plain.published.meta
        found = await draft.uploader.client.find(meta.key)
        if found is None or found.etag != meta.etag:
            meta = msgspec.structs.replace(meta, etag=draft.token)
            published = msgspec.structs.replace(plain.published, meta=meta, is_superseded=True)
            plain = msgspec.structs.replace(plain, published=published)
        return self._retire(unrecorded.before, await self._tell(file, draft, plain))

    def _end_pack(self, draft: Draft, before: ObjectRow | None) -> None:
        """Record in memory that the store has the draft in a pack."""
        draft.end_publish()
        self._unrecorded[draft] = Unrecorded(before, None)

    async def _is_free(self, draft: Draft, plan: PublishPlan) -> bool:
        """Return whether the name of a file that was created with O_EXCL is free: its key has no object, or one that
        counts as removed by its date. Raises LakeError."""
        if not plan.if_absent:
            return False
        there = await draft.uploader.client.find(plan.key)
        return there is None or self.claims.is_removed_since_put(there)

    def _is_name_taken(self, draft: Draft, there: ObjectMeta | None) -> bool:
        """Return whether the object that a HEAD found at the key of the file belongs to another client."""
        return there is not None and not is_own_object(draft, there) and not self.claims.is_removed_since_put(there)

    def _is_of_another_node(self, file: OpenFile) -> bool:
        """Return whether another node has the name of a file that was created with O_EXCL: a commit named it there, and
        none has removed it since."""
        row = self._ns.tree.entry(file.entry.inode)
        return row is not None and not row.is_local and not self._ns.is_row_removed(row)

    def _is_packed_by_another(self, file: OpenFile, draft: Draft) -> bool:
        """As `_is_of_another_node`, but only if no precondition shows it: the other node's bytes are elsewhere."""
        row = self._ns.tree.entry(file.entry.inode)
        if row is None or row.is_plain or not self._is_of_another_node(file) or draft.target.unsure is not None:
            return False
        extent = self._ns.extent(row)
        return extent is None or extent.version.key != draft.commit  # else the answer to the PUT of a pack was lost

    async def _plan(
        self,
        file: OpenFile,
        draft: Draft,
        policy: PackPolicy,
        *,
        alone: bool,
        is_synced: bool = False,
        there: str | None = None,
    ) -> tuple[PublishPlan, KnownAt]:
        """Plan the version with the facts of one moment, and give its draft the key. ``there`` is the ETag that a HEAD
        has just found at the key, empty for none. Returns also what was known of the path. Raises LakeError."""
        if draft.uploading and draft.size <= policy.threshold_bytes and not alone:
            await wait_upload_begun(draft)
        if self._deletions.waiting:
            await self._deletions.wait_deleted(draft.target.key)
        target, path, has_upload = draft.target, file.key, bool(draft.upload.intent_ns)
        if there is None and draft.parts.bytes_dropped and target.key != path and not target.key.startswith(OBJECTS):
            there = await self._etag_of_others(draft)
        removed, row = self._ns.tree.tombstones.get(path.encode()), self._ns.tree.entry(file.entry.inode)
        used = self._ns.tree.objects.used(target.key) if has_upload else None
        own_etag = self._own_etag(file, target, removed, row)
        plan = plan_publish(
            VersionFacts(
                path,
                draft.id,
                draft.size,
                policy,
                upload_key=target.key if has_upload else "",
                is_key_taken=not has_upload and self._files.is_key_taken(path),
                is_alone=alone,
                are_others_closing=not alone and self._are_others_closing(policy),
                if_absent=target.if_absent,
                own_etag=own_etag,
                etag_in_place="" if file.entry.place else target.replaces,
                superseded_etag="" if removed is None else self._deletions.superseded_etag(path),
                etag_there=there,
                place=file.entry.place if row is None else row.place,
                place_at_key=0 if used is None else used.number,
                is_key_journaled=self._committer.mentions(target.key),
                is_synced=is_synced,
                is_removal_journaled=is_synced and self._committer.removes(path),
                is_key_refused=has_upload and self._files.is_key_refused(target.key),
                is_key_of_another=has_upload and self._is_of_another(file, target.key),
                gone_at_key=self.removed.etags(target.key) if has_upload else (),
            )
        )
        if plan.leaves_key:
            log.info("%s cannot have the key where its upload began, and is sent again to another", path)
            await abandon_upload(draft, path)
            self._files.aim(file.key, draft.id, target)
            return await self._plan(file, draft, policy, alone=alone)
        if plan.key != target.key:
            await self._leave_late_object(draft)
        target.follow(
            plan.key, plan.path, if_absent=plan.if_absent, expected=plan.expected, removed=there or own_etag,
            hidden_ns=0 if plan.path else _hidden_ns(row),
        )  # fmt: skip
        return plan, KnownAt(removed, row)

    def _are_others_closing(self, policy: PackPolicy) -> bool:
        """Return whether other small files are being stored, with which this one may share a pack."""
        if policy.mode != "auto":
            return False
        return self._packer.are_others_closing(policy.threshold_bytes, self._storing_plain)

    async def _etag_of_others(self, draft: Draft) -> str | None:
        """Return the ETag of the object at the draft's key, because no precondition guards the completion of its
        upload; empty if there is none, None if an attempt whose answer was lost made it. Raises LakeError."""
        found = await draft.uploader.client.find(draft.target.key)
        if found is None:
            return ""
        return None if is_own_object(draft, found) else found.etag

    async def _leave_late_object(self, draft: Draft) -> None:
        """Hide and delete the object that an attempt without answer stored of the draft at its earlier key: the file
        has another name by now. Raises LakeError."""
        meta = await find_late_object(draft)
        if meta is not None:
            builder = ChangeBuilder(self._ns.tree)
            hide_object(builder, self._ns.tree, meta.key, meta.etag)
            doomed = [Deletion(meta.key, meta.etag)]
            self._committer.enqueue(msgspec.structs.replace(builder.change(), doomed=doomed, ahead=True))

    async def commit_location(self, path: str) -> None:
        """Store the commit without which other nodes do not find the newest version at a path. Raises LakeError; then
        the change stays journaled."""
        if self._untold.get(path) in self._committer.journal.changes:
            await self._committer.flush()
        self._untold.pop(path, None)

    async def find_taken(self, versions: Sequence[tuple[OpenFile, Draft]]) -> set[str]:
        """Return the paths of files to be packed that were created with O_EXCL and that another client has, as commits
        or the store show. A pack would replace any of them. Raises LakeError."""
        exclusive = {file.key: (file, draft) for file, draft in versions if draft.target.if_absent}
        if not exclusive:
            return set()
        taken = {path for path, (file, _) in exclusive.items() if self._is_of_another_node(file)}
        _, draft = next(iter(exclusive.values()))
        found = await draft.uploader.client.find_each(exclusive.keys())
        return taken.union(meta.key for meta in found if not self.claims.is_removed_since_put(meta))

    async def store_pack(
        self, files: list[tuple[OpenFile, Draft]], passed: list[Draft]
    ) -> Callable[[OpenFile, Draft], StoredVersion]:
        """Store small files in one pack, but for those that the store has. Returns a function that describes each.
        ``passed`` are earlier versions of some, which stay out of the pack. Raises LakeError."""
        await self._committer.reconcile()
        objects = self._ns.tree.objects
        unsent = [(file, draft) for file, draft in files if draft not in self._unrecorded]
        before = [objects.get(file.entry.place) if file.entry.place else None for file, _ in unsent]
        if unsent:
            await self._packer.commit_pack(unsent, passed)
        for (_, draft), replaced in zip(unsent, before, strict=True):
            self._end_pack(draft, replaced)
        await self._committer.reconcile()  # so that the commit is in effect here

        def stored(file: OpenFile, draft: Draft) -> StoredVersion:
            return self._retire(self._unrecorded[draft].before, self._packed(file, draft))

        return stored

    # -- in a pack

    def _packed(self, file: OpenFile, draft: Draft) -> StoredVersion:
        assert draft.packed is not None, "its commit is in the store"
        row = entry = self._ns.tree.entry(file.entry.inode)
        extent = self._ns.extent(entry) if entry is not None else None
        is_removed = entry is not None and self._ns.is_row_removed(entry)
        if entry is None or extent is None or extent.version != draft.packed.version:
            if extent is not None and entry is not None and not is_removed:  # another node's version is newer
                self.leave_to_others(entry)
                row = None
            entry = msgspec.structs.replace(file.entry, size=draft.packed.size, flags=file.entry.flags & ~Flag.LOCAL)
            extent = draft.packed
            is_removed = is_removed or (row is not None and self._ns.is_row_removed(entry))
        return StoredVersion(entry, row, is_removed, extent, attributes.describe(entry), None)

    # -- as a plain object

    async def _send_plain(
        self, draft: Draft, plan: PublishPlan, known: KnownAt, there: ObjectMeta | None, *,
        is_exclusive: bool,
    ) -> PlainObject:  # fmt: skip
        """Send the version. ``known`` is what was known of the path when it was planned, ``there`` what a HEAD had
        found at the key before. Raises LakeError."""
        key, before = plan.key, None if draft.target.unsure else known
        self._storing_plain += 1
        try:
            async with self._deletions.keeping(key):
                if plan.frees_key:
                    await self._renamed.free(key)
                if plan.commits_first:
                    await self._committer.flush()
                claim, wins = None, is_exclusive and not draft.sequence  # no program has been told that it won
                if wins and plan.expected and not plan.path:
                    claim = partial(self._claim_expected, key, plan.expected, draft.id, there)
                describe = self.claims.describe if wins else dict
                return PlainObject(await publish(draft, claim, describe), plan, before, there)
        finally:
            self._storing_plain -= 1

    async def _claim_expected(self, key: str, etag: str, draft_id: str, there: ObjectMeta | None) -> None:
        """Claim a removed version as `KeyClaims.claim_expected` does. Raises Overtaken also if a commit has said
        meanwhile that the bytes at the key have another name. Raises LakeError."""
        await self.claims.claim_expected(key, etag, draft_id, there)
        if self._ns.tree.objects.used(key) is not None:
            raise Overtaken(f"{key!r} has the bytes of a renamed file")

    async def _tell(self, file: OpenFile, draft: Draft, plain: PlainObject) -> StoredVersion:
        """Have other nodes learn of a plain object as `plan_telling` says; return what is to be recorded of it here.
        Raises LakeError; it can be tried again."""
        published, meta = plain.published, plain.published.meta
        path, row, has_tombstone, replaced, dated_s = await self._find_name(file, draft, plain)
        while await self._wait_moved(row):
            path, row, has_tombstone, replaced, dated_s = await self._find_name(file, draft, plain)
        if not published.is_superseded:
            self._note_stored(path, meta.key, meta.etag)
        now = (file.owner_of(draft) or file).entry  # not ``file`` if another version has begun in the meantime
        facts = StoredFacts(
            path, meta.key, meta.etag, now, self._shown, row, has_tombstone,
            replaced=replaced if meta.key == path else "",
            is_back=published.is_back, is_superseded=published.is_superseded, is_unlinked=file.unlinked,
            was_seen_and_removed=dated_s > 0 and self.removed.was_seen_and_removed(path, meta, dated_s, plain.before),
        )  # fmt: skip
        telling, unannounced = plan_telling(facts), ""
        flags = now.flags & ~(OF_VERSION_BEFORE | Flag.SHADOWED) | Flag.ATTRIBUTES_KNOWN
        flags |= 0 if row is None else row.flags & Flag.SHADOWED  # a directory may have come, or gone, since
        entry = msgspec.structs.replace(
            now, flags=flags, etag=meta.etag, size=meta.size, place=0, offset=0,
            stamp=0 if row is None else row.stamp,  # a change pending when the file was opened may be in a commit
        )  # fmt: skip
        if telling is Telling.COMMITTED:
            self._commit_plain(facts, entry, meta, dated_s, plain.there)
            row = self._ns.tree.entry(entry.inode)
            entry = row or entry
        elif telling is Telling.ANNOUNCED:
            self._committer.announce_stored(path)
            unannounced = path
        elif telling is Telling.REMOVED and row is not None and is_hiding(row, meta.etag):
            self.leave_to_others(row)
            row = None
        of_name = row if published.is_superseded else entry  # the version that the name has, as far as is known
        may_be_removed = row is not None and (has_tombstone or telling is Telling.COMMITTED)
        return StoredVersion(
            entry, row, may_be_removed and self._ns.is_row_removed(of_name or entry),
            Extent(Version(meta.key, meta.etag, meta.size), 0, meta.size), published.described, published,
            needs_sync=telling is Telling.COMMITTED and facts.is_named, unannounced=unannounced,
        )  # fmt: skip

    async def _find_name(self, file: OpenFile, draft: Draft, plain: PlainObject) -> NameFacts:
        """Return what is known of the name of a file that is stored as a plain object. Raises LakeError."""
        if len(file.key.encode("utf-8", "surrogatepass")) > self._ns.keys.path_bytes_max:  # its directory was renamed
            self._ns.keys.check_paths([file.key])
        published, meta = plain.published, plain.published.meta
        await self._hide_earlier_name(file, published)
        replaced = self._replaced_untold(file.key, draft, plain.plan, meta)
        may_be_hidden = published.is_back or bool(replaced)  # the writer of that may have replaced the same bytes
        row, has_tombstone, dated_s = self._ns.tree.entry(file.entry.inode), self._has_tombstone(file.key), 0
        if has_tombstone or may_be_hidden or file.entry.place or (row is not None and row.place):
            dated_s = await self.removed.find_date(draft.uploader.client, meta, may_be_hidden=may_be_hidden)
            row, has_tombstone = self._ns.tree.entry(file.entry.inode), self._has_tombstone(file.key)
        return NameFacts(file.key, row, has_tombstone, replaced, dated_s)

    async def _wait_moved(self, row: Entry | None) -> bool:
        """Wait for the rename of a directory above a file; return whether there was one. Its commit does not name the
        object that the store has since: what is recorded before it is applied would be of the old name."""
        barrier = self._ns.tree.barrier
        if row is None or not barrier.is_behind(About.NAME, row.parent, row.name):
            return False
        await barrier.wait_for(About.NAME, row.parent, row.name)
        return True

    async def _hide_earlier_name(self, file: OpenFile, published: Published) -> None:
        """Hide an object at the key of another name: a rename that began before the draft may have moved the file since
        the plan."""
        key = published.meta.key
        is_at_another_name = key != file.key and not key.startswith(OBJECTS)
        if is_at_another_name and not published.is_superseded and not file.unlinked:
            with suppress(LakeError):  # otherwise the commit of the location does that
                await self._renamed.hide(key, [published.meta.etag])

    def _commit_plain(
        self, facts: StoredFacts, entry: Entry, meta: ObjectMeta, dated_s: int, there: ObjectMeta | None
    ) -> None:
        """Journal the change without which other nodes do not find the object, so that it is sent even if this fails.
        ``there`` is what a HEAD had found at the key before. Raises CacheError."""
        path = facts.path
        dated_s, before = self.removed.date_again(meta, dated_s), self.removed.removal(path, facts.replaced, there)
        self._enqueue_location(path, entry, facts.key, is_again=facts.is_again, dated_s=dated_s, replaced=before)
        if facts.key != path or facts.replaced:  # or the next writer does not hear of what this has replaced
            self._untold[path] = self._committer.journal.newest

    def _replaced_untold(self, path: str, draft: Draft, plan: PublishPlan, meta: ObjectMeta) -> str:
        """Return the ETag of the object replaced at a path if no commit has told of it here; empty otherwise."""
        replaced = plan.expected or ""
        is_own = meta.key != path or replaced in (meta.etag, draft.target.replaces)
        return "" if is_own or self.removed.tombstone(path).when_gone(replaced) > 0 else replaced

    def _note_stored(self, path: str, key: str, etag: str) -> None:
        self._deletions.note_stored(key, etag, is_adopted=key != path)
        if self._ns.tree.objects.plain:
            self._renamed.stored(path, key, etag)

    def _is_of_another(self, file: OpenFile, key: str) -> bool:
        """Return whether another file than this one is the plain object at a key."""
        there = self._ns.at(key)
        is_plain = there is not None and there.is_plain and bool(there.etag)
        return there is not None and is_plain and there.inode != file.entry.inode and not self._ns.is_row_removed(there)

    def _own_etag(self, file: OpenFile, target: DraftTarget, removed: Tombstone | None, row: Entry | None) -> str:
        """Return `VersionFacts.own_etag`: without O_EXCL the ETag that the file replaces or hides, or that was removed
        last. With O_EXCL the object there counts if it was removed, and not if it is another node's file."""
        if target.if_absent:
            return "" if self._is_of_another_node(file) else self._ns.own_etag(file.key, file.entry.parent)
        known = row.etag if row is not None and row.place else target.replaces
        return known or ("" if removed is None else removed.etag)

    def _has_tombstone(self, path: str) -> bool:
        """Return whether a commit removed or hid a plain object at a path."""
        return self._ns.tree.tombstones.get(path.encode()) is not None

    def _enqueue_location(
        self, path: str, entry: Entry, key: str, *, is_again: bool = False, dated_s: int = 0,
        replaced: Remove | None = None, volatile: bool = False,
    ) -> None:  # fmt: skip
        """Journal that a name refers to the plain object at ``key``, and no other name does. ``is_again``: it has the
        bytes that it replaced, which another node may be removing. ``dated_s`` is the store's date of it, 0 if unknown.
        ``replaced`` removes an object there of which no commit has told. Raises CacheError."""
        builder = ChangeBuilder(self._ns.tree)
        if replaced is not None:
            builder.operations.append(replaced)
        hides = self._ns.own_etag(path)
        if key == path and (is_again or dated_s or self.removed.is_hidden(path, entry.etag)):
            builder.put_again(path, entry, dated_s, when_named(self._ns.tree, path, entry.etag))
        else:
            builder.put(path, entry, key=key, hides=hides)
        is_at_another_name = key != path and not key.startswith(OBJECTS)
        if is_at_another_name:
            hide_object(builder, self._ns.tree, key, entry.etag)
        doomed = superseded_at(path, hides, is_reserved=path in self._committer.journal.reserved) if key != path else []
        change = msgspec.structs.replace(builder.change(), doomed=doomed, ahead=True)
        self._committer.enqueue(change, volatile=volatile)
        if is_at_another_name:
            self._ns.outdate_emptied(key)

    async def finish(self, draft: Draft, path: str, check_replaceable: Callable[[], Awaitable[None]]) -> None:
        """Store an orphan's bytes as the newest version of its file. The caller holds ``draft.gate``.
        ``check_replaceable`` is called when the bytes are sent, and raises if the name has a version that must stay.

        Raises LakeError; then it can be tried again. Raises Overtaken if such a version came after the check.
        """
        client = draft.uploader.client

        async def is_replaced_at_earlier_name() -> bool:
            """Return whether the upload began under an earlier name that others have stored since."""
            if not is_renamed_since(draft.target.key if draft.upload.intent_ns else "", path):
                return False
            target = draft.target
            found = await client.find(target.key)
            is_known = found is None or is_own_object(draft, found) or found.etag in self.removed.etags(target.key)
            return not is_known

        async def confirm() -> None:
            found = await client.find(key)  # before the check, so that a later version makes the store refuse this
            await self._poll()
            await check_replaceable()
            if await is_replaced_at_earlier_name():
                raise FileError(errno.EEXIST, f"another client has stored {key} meanwhile; try again")
            if not draft.parts.bytes_dropped:
                draft.target.expect("" if found is None else found.etag)

        if await is_replaced_at_earlier_name():
            await abandon_upload(draft, path)
        if not draft.upload.intent_ns:  # perhaps given up at an earlier name, before a crash
            self._files.aim(path, draft.id, draft.target)
        key = draft.target.key
        draft.target.allow_replacing()  # a removed object may still be there
        there = self._ns.at(path)
        async with self._deletions.keeping(key):
            used = self._ns.tree.objects.used(key) if draft.upload.intent_ns else None
            if used is not None and (there is None or there.place != used.number):
                await self._renamed.free(key)
            published = await publish(draft, confirm)
        if published.is_superseded:
            return
        self._note_stored(path, key, published.meta.etag)
        described = msgspec.structs.replace(published.meta, metadata=draft.target.describe()[0])
        self.announce_object(path, described, await self.removed.find_date(client, described))
        await self._committer.flush()

    def announce_object(self, path: str, meta: ObjectMeta, dated_s: int, before: Entry | None = None) -> str:
        """Make this object the version of the name, with the attributes in its metadata. ``dated_s`` is the store's
        date of it, 0 if unknown; ``before`` is the row before it got the object's ETag, by default the present one.
        Returns the path if it is to be announced, empty if a commit names it. Raises CacheError."""
        there, tombstone = self._ns.at(path), self.removed.tombstone(path)
        if meta.key == path and tombstone.when_gone(meta.etag) and 0 < dated_s <= tombstone.when_removed(meta.etag):
            return ""  # another node saw it, and removed it
        inode = there.inode if there is not None else 0  # it keeps the extended attributes of this inode
        entry = Entry(0, 0, b"", inode, size=meta.size, mtime_ns=meta.mtime_ns, etag=meta.etag)
        entry = attributes.learn(entry, meta.metadata or {})
        told = before or there
        if told is not None and _is_told(told, meta, dated_s):
            if attributes.describe(told) != attributes.describe(entry):
                self.set_attributes([LateAttributes.of(path, there or told, entry, None)])
            return ""
        is_named = self._has_tombstone(path) or bool(there is not None and there.stamp)
        flags = entry.flags & ~(Flag.XATTRS | Flag.MTIME_KEPT)
        bare = msgspec.structs.replace(entry, flags=flags)
        commits = needs_commit(bare, self._shown, key=meta.key, path=path, is_named_by_commit=is_named)
        if not commits and entry.mtime_ns == meta.mtime_ns:  # every LIST shows that
            self._committer.announce_stored(path)
            return path
        is_again = there is not None and there.stamp > 0 and there.is_plain and there.etag == meta.etag
        self._enqueue_location(path, entry, meta.key, is_again=is_again, dated_s=dated_s)
        return ""

    async def record_link(self, path: str, source: Entry, meta: ObjectMeta, client: StoreClient) -> None:
        """Record a link: a copy of the bytes of ``source`` that this node has stored as the plain object at ``path``,
        where nothing was. It has the attributes of ``source``. While the disk is full, that is recorded in memory,
        because the name is taken for all nodes. Raises CacheError."""
        dated_s = await self.removed.find_date(client, meta) if self._has_tombstone(path) else 0
        self._note_stored(path, path, meta.etag)
        flags = (source.flags & (Flag.XATTRS | Flag.MTIME_KEPT)) | Flag.ATTRIBUTES_KNOWN
        entry = msgspec.structs.replace(source, flags=flags, etag=meta.etag, size=meta.size, stamp=0, place=0, offset=0)
        self._enqueue_location(path, entry, path, dated_s=self.removed.date_again(meta, dated_s), volatile=True)

    # -- what is left behind

    def read_again(self, since: int) -> None:
        """As `Committer.read_again`."""
        self._committer.read_again(since)

    def leave_to_others(self, row: Entry) -> None:
        """Give a name to another client's version, with a new inode. Raises CacheError. Its extended attributes may be
        those that were set here for this node's version, so commits with other ones are applied again."""
        since = row.stamp or (row.ctime_ns if row.flags & Flag.ATTRIBUTED else 0)
        if row.flags & Flag.XATTRS and 0 < since < PENDING:
            self.read_again(since)
        self._ns.renew_inode(msgspec.structs.replace(row, flags=row.flags & ~Flag.XATTRS))

    def _retire(self, before: ObjectRow | None, stored: StoredVersion) -> StoredVersion:
        """Retire the object of the version before, unless it was replaced in place. Returns ``stored``."""
        if stored.published is not None and stored.published.is_superseded:
            return stored  # the other writer says to what the name refers
        if before is not None and not before.is_pack and before.number != stored.entry.place:
            try:
                self._committer.retire(Deletion(before.key, before.etag))
            except CacheError as error:
                log.warning("%s is superseded, and left to `gc`: %s", before.key, error)
        return stored

    def set_attributes(self, late_attributes: Iterable[LateAttributes], batch: Batch | None = None) -> None:
        """Journal attributes that were set after the store got those of the files, in one write with ``batch``. Raises
        CacheError."""
        builder = ChangeBuilder(self._ns.tree)
        for late in late_attributes:
            builder.set_attributes(late.path, late.entry, late.xattrs)
        self._committer.enqueue(builder.change(), batch)


def _hidden_ns(row: Entry | None) -> int:
    """Return when a commit put this file, which is elsewhere, under its name: it hides older objects at the key. 0 if
    none did, or if the name has changed here since."""
    return row.stamp if row is not None and row.place and row.stamp < PENDING else 0


def _is_told(there: Entry, meta: ObjectMeta, dated_s: int) -> bool:
    """Return whether a change has named this object, and not an earlier one with equal bytes."""
    is_told = there.is_plain and there.stamp > 0 and there.etag == meta.etag
    return is_told and (there.stamp >= PENDING or 0 < (dated_s + 1) * NS <= there.stamp)
