"""Makes the bytes of a file its newest version: acknowledges them here, stores them, and records what was stored.

`close()` waits for `close`, and `fsync()` for `publish`; the scheduler publishes acknowledged versions by
`publish_version` and `publish_pack`.

What always holds (*one at a time*): one version of a file is published at a time (``OpenFile.publishing``), and not
while its name is renamed or removed; writers continue during this if the version was acknowledged. The new version in
the tree and the end of its journal record are one batch. A crash before that leaves the record, which the next mount
compares with the store. If the disk refuses that batch, the draft stays PUBLISHED, and the next attempt continues
there without sending it again. Trio thread only.

A plain object is stored at the file's own path if that key is free. The key is not free if a name that was renamed away
still has its bytes there. If it is not, or if the upload began before the file was renamed, a commit says which object
the name refers to. A name of which commits have told is committed again, as is one whose attributes a LIST would not
show. Any other plain object is announced with the next commit.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from weakref import WeakKeyDictionary

import msgspec
import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.objects.key_claims import KeyClaims
from lakefs_fuse.commits.path_tree import is_hiding
from lakefs_fuse.commits.record import OBJECTS, Remove
from lakefs_fuse.config import MountConfig
from lakefs_fuse.environment.failpoints import reached
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, FileError, KeyConflict, LakeError, Overtaken, StagingFull, StoreError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import PENDING, Entry, Flag
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.meta.rows import Deletion, Journal
from lakefs_fuse.meta.tombstones import NS, Tombstone
from lakefs_fuse.path_rules import PackPolicy, Rules
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_target import DraftTarget
from lakefs_fuse.upload.publish import (
    Published,
    find_late_object,
    give_up_upload,
    is_own_object,
    publish,
    refuse_name,
    wait_upload_begun,
)
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import OpenFile, OpenState
from lakefs_fuse.vfs.namespace import attributes
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder, hide_object, when_named
from lakefs_fuse.vfs.namespace.renamed_objects import RenamedObjects
from lakefs_fuse.vfs.writeback.group_commit import GroupCommit
from lakefs_fuse.vfs.writeback.packer import Packer, refuse_path
from lakefs_fuse.vfs.writeback.publish_plan import (
    Form,
    PublishPlan,
    VersionFacts,
    is_renamed_since,
    needs_commit,
    plan_publish,
    superseded_at,
)
from lakefs_fuse.vfs.writeback.queue import AcknowledgedVersion, VersionState, WriteBack
from lakefs_fuse.vfs.writeback.removed_versions import KnownAt, RemovedVersions
from lakefs_fuse.vfs.writeback.stored_version import PlainObject, Publication, StoredVersion, Unrecorded

COPY_BYTES_MAX = 64 << 20
"""An acknowledged file up to this size is copied if it is changed before it is stored; a larger one waits."""
WAIT_DURABLE_S = 1.0
RECORDED_AT_ONCE = 32
"""Files of a pack that are recorded before other tasks have a turn."""
STAGE_WHOLE_S_MAX = 2.0
"""Maximum time that `close()` waits to fetch the unchanged bytes of a small file from the version that it changes."""
OF_VERSION_BEFORE = Flag.LOCAL | Flag.ATTRIBUTED | Flag.PUT_AGAIN | Flag.OVERRIDING
"""Flags of a row that its file loses when it is stored."""
OVERTAKEN_MAX = 10
"""Attempts to store a plain object; before each further one another client has stored the name."""
REFUSALS_MIN = 2
"""Refusals of an empty key after which it is given up: SeaweedFS refuses a key if objects are, or were, below it."""
UNRECORDED = "what was stored just now is in the store, but that could not be recorded: %s"
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

    @property
    def are_names_held(self) -> bool:
        """Return whether changes of names wait for versions that were acknowledged before them."""
        return bool(self._committer.held_until)

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
                draft.target.if_absent = True
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
            raise await refuse_name(draft)
        alone = alone or draft.copies or (is_exclusive and self._is_of_another_node(file))
        plan, known = await self._plan(file, draft, policy, alone=alone, is_synced=is_synced)
        if plan.form is not Form.PLAIN:
            plain, others = plan.form is Form.PACK_WITH_OTHERS, self._storing_plain
            if await self._packer.submit(file, draft, policy.threshold_bytes, others, alone_is_plain=plain):
                self._end_pack(draft, before)
                return await self._resume(file, draft)
            plan, known = await self._plan(file, draft, policy, alone=True)
        refusals, there = 0, None  # refusals of a key at which a HEAD found nothing
        for _ in range(OVERTAKEN_MAX):
            try:
                sent = await self._send_plain(draft, plan, known, there, is_exclusive=is_exclusive)
                self._unrecorded[draft] = Unrecorded(before, sent)
                return self._retire(before, await self._describe_plain(file, draft, sent))
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
                if is_exclusive and self.claims.is_removed(there):
                    draft.target.if_absent = False
            elif refusals >= REFUSALS_MIN:
                self._files.refuse_key(plan.key)
            await self._poll()  # after the HEAD, so that a rename of the object found there is in effect
            if is_exclusive and plan.key == file.key and self._is_name_taken(draft, there):
                raise await refuse_name(draft)
            etag = "" if there is None else there.etag
            plan, known = await self._plan(file, draft, policy, alone=True, there=etag)
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
        return self._retire(unrecorded.before, await self._describe_plain(file, draft, plain))

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
        return there is None or self.claims.is_removed(there)

    def _is_name_taken(self, draft: Draft, there: ObjectMeta | None) -> bool:
        """Return whether the object that a HEAD found at the key of the file belongs to another client."""
        return there is not None and not is_own_object(draft, there) and not self.claims.is_removed(there)

    def _is_of_another_node(self, file: OpenFile) -> bool:
        """Return whether another node has the name of a file that was created with O_EXCL: a commit named it there, and
        none has removed it since."""
        row = self._ns.tree.entry(file.entry.inode)
        return row is not None and not row.is_local and not self._ns.is_removed(row)

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
            found = await draft.uploader.client.find(target.key)  # because no precondition guards its completion
            if found is None or not is_own_object(draft, found):  # an attempt whose answer was lost
                there = "" if found is None else found.etag
        removed, row = self._ns.tree.tombstones.get(path.encode()), self._ns.tree.entry(file.entry.inode)
        used = self._ns.tree.objects.used(target.key) if has_upload else None
        own_etag = target.removed = self._own_etag(file, target, removed, row)
        plan = plan_publish(
            VersionFacts(
                path,
                draft.id,
                draft.size,
                policy,
                upload_key=target.key if has_upload else "",
                is_key_taken=not has_upload and self._files.is_key_taken(path),
                is_alone=alone,
                are_others_closing=not alone
                and policy.mode == "auto"
                and self._packer.are_others_closing(policy.threshold_bytes, self._storing_plain),
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
            await give_up_upload(draft, path)
            self._files.aim(file.key, draft.id, target)
            return await self._plan(file, draft, policy, alone=alone)
        if plan.key != target.key:
            await self._leave_late_object(draft)
        target.key, target.path, target.if_absent, target.expected = plan.key, plan.path, plan.if_absent, plan.expected
        return plan, KnownAt(removed, row)

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
        return taken.union(meta.key for meta in found if not self.claims.is_removed(meta))

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
        is_removed = entry is not None and self._ns.is_removed(entry)
        if entry is None or extent is None or extent.version != draft.packed.version:
            if extent is not None and entry is not None and not is_removed:  # another node's version is newer
                self.leave_to_others(entry)
                row = None
            entry = msgspec.structs.replace(file.entry, size=draft.packed.size, flags=file.entry.flags & ~Flag.LOCAL)
            extent = draft.packed
            is_removed = is_removed or (row is not None and self._ns.is_removed(entry))
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

    async def _describe_plain(self, file: OpenFile, draft: Draft, plain: PlainObject) -> StoredVersion:
        """Journal the change without which others do not find the object. Raises LakeError; it can be tried again."""
        if len(file.key.encode("utf-8", "surrogatepass")) > self._ns.keys.path_bytes_max:  # its directory was renamed
            self._ns.keys.check_paths([file.key])
        published = plain.published
        key = published.meta.key  # a rename that began before the draft may have moved it since the plan
        is_at_another_name = key != file.key and not key.startswith(OBJECTS)
        if is_at_another_name and not published.is_superseded and not file.unlinked:
            with suppress(LakeError):  # otherwise the commit of the location does that
                await self._renamed.hide(key, [published.meta.etag])
        replaced = self._replaced_untold(file.key, draft, plain.plan, published.meta)
        has_tombstone = self._has_tombstone(file.key)
        may_be_hidden = published.is_back or bool(replaced)  # the writer of that may have replaced the same bytes
        row, dated_s = self._ns.tree.entry(file.entry.inode), 0
        if has_tombstone or may_be_hidden or file.entry.place or (row is not None and row.place):
            dated_s = await self.removed.find_date(draft.uploader.client, published.meta, may_be_hidden=may_be_hidden)
            row = self._ns.tree.entry(file.entry.inode)
        path, meta = file.key, published.meta
        if not published.is_superseded:
            self._note_stored(path, key, meta.etag)
        now = (_owner(file, draft) or file).entry  # not ``file`` if another version has begun in the meantime
        entry = msgspec.structs.replace(
            now, flags=(now.flags & ~OF_VERSION_BEFORE) | Flag.ATTRIBUTES_KNOWN, etag=meta.etag, size=meta.size,
            place=0, offset=0,
            stamp=0 if row is None else row.stamp,  # a change pending when the file was opened may be in a commit
        )  # fmt: skip
        is_named = has_tombstone or bool(row is not None and (row.stamp or row.flags & Flag.OVERRIDING))
        is_again = row is not None and row.etag == meta.etag and row.is_plain
        replaced = replaced if key == path else ""
        commits = needs_commit(now, self._shown, key=key, path=path, is_named_by_commit=is_named)
        commits = commits or is_again or published.is_back or bool(replaced)
        commits, unannounced = commits and not file.unlinked and not published.is_superseded, ""
        if commits and self.removed.was_seen_and_removed(path, meta, dated_s, plain.before):
            commits = False
            if row is not None and is_hiding(row, meta.etag):
                self.leave_to_others(row)
                row = None
        elif commits:  # journaled, so that it is sent even if this fails
            dated_s, before = self.removed.date_again(meta, dated_s), self.removed.removal(path, replaced, plain.there)
            self._enqueue_location(path, entry, key, is_again=is_again, dated_s=dated_s, replaced=before)
            if key != path or replaced:  # or the next writer does not hear of what this has replaced
                self._untold[path] = self._committer.journal.newest
            row = self._ns.tree.entry(entry.inode)
            entry = row or entry
        elif key == path and not published.is_superseded:
            self._committer.announce_stored(path)
            unannounced = path
        of_name = row if published.is_superseded else entry  # the version that the name has, as far as is known
        is_removed = row is not None and (has_tombstone or commits) and self._ns.is_removed(of_name or entry)
        extent = Extent(Version(key, meta.etag, meta.size), 0, meta.size)
        needs_sync = commits and is_named
        return StoredVersion(entry, row, is_removed, extent, published.described, published, needs_sync, unannounced)

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
        return there is not None and is_plain and there.inode != file.entry.inode and not self._ns.is_removed(there)

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
        if key != path and not key.startswith(OBJECTS):
            hide_object(builder, self._ns.tree, key, entry.etag)
        doomed = superseded_at(path, hides, is_reserved=path in self._committer.journal.reserved) if key != path else []
        change = msgspec.structs.replace(builder.change(), doomed=doomed, ahead=True)
        self._committer.enqueue(change, volatile=volatile)

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
                draft.target.expected = "" if found is None else found.etag

        if await is_replaced_at_earlier_name():
            await give_up_upload(draft, path)
            self._files.aim(path, draft.id, draft.target)
        key = draft.target.key
        draft.target.if_absent = False  # a removed object may still be there
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


def _is_told(there: Entry, meta: ObjectMeta, dated_s: int) -> bool:
    """Return whether a change has named this object, and not an earlier one with equal bytes."""
    is_told = there.is_plain and there.stamp > 0 and there.etag == meta.etag
    return is_told and (there.stamp >= PENDING or 0 < (dated_s + 1) * NS <= there.stamp)


class Publisher:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        cache: BlockCache,
        drafts: Drafts,
        writer: ObjectWriter,
        queue: WriteBack,
        group_commit: GroupCommit,
        threads: Threads,
    ) -> None:
        self._db, self._ns, self._cache = database, namespace, cache
        self._files, self._drafts, self._services = drafts.files, drafts, drafts.services
        self._writer, self._queue, self._threads = writer, queue, threads
        self._group_commit = group_commit
        self._journal = Journal(database)

    async def close(self, file: OpenFile) -> None:
        """Store a file that is being closed, or acknowledge it under write-back. Raises LakeError."""
        if file.is_being_unlinked:
            async with file.publishing:  # the name stays if its removal fails
                pass
        draft = file.draft
        if file.state is not OpenState.UNLINKED:
            file.check_publishable()
        if draft is None or file.state is not OpenState.WRITING:
            return
        is_published = draft.state is DraftState.PUBLISHED
        # Acknowledged bytes do not depend on another file's.
        if not self._queue.is_for(file.key) or draft.copies or is_published:
            await self._publish_newest(file, is_synced=False)
            return
        async with draft.gate:
            if file.draft is draft and draft.state in (DraftState.WRITING, DraftState.FAILED):
                await self._stage_whole(draft)
                file.check_publishable()
                await self._group_commit.acknowledge(file, draft)

    @staticmethod
    async def _stage_whole(draft: Draft) -> None:
        """Stage the unchanged bytes of a small file as well, if the store answers in time: the version that it changes
        may no longer exist when it is published. Raises FileError(ESTALE) if that version no longer exists, so that the
        file could never be published."""
        if draft.base is None or draft.size > COPY_BYTES_MAX:
            return
        with trio.move_on_after(STAGE_WHOLE_S_MAX):
            try:
                await draft.fill(0, draft.size)
            except LakeError as error:
                if error.errno == errno.ESTALE:
                    draft.fail_publish(error, "staging")
                    draft.save(sync=True)
                    raise
                log.info("%s is acknowledged as a change of the version in the store: %s", draft.target.key, error)

    async def publish(self, file: OpenFile) -> None:
        """Store the present bytes of the file, and versions acknowledged before in its directory. Raises LakeError."""
        if not file.unlinked:
            file.check_publishable()
        await self._publish_newest(file, is_synced=True)

    async def record(self, file: OpenFile) -> None:
        """Record a version that the store has, which could not be recorded before. Raises LakeError."""
        await self._publish_newest(file, is_synced=False)

    async def _publish_newest(self, file: OpenFile, *, is_synced: bool) -> None:
        if self._queue.versions:
            await self._drain_before(file)
        if file.draft is not None:
            await self._publish(file, file.draft, is_synced=is_synced)
        else:
            await self._writer.commit_location(file.key)

    async def publish_version(self, item: AcknowledgedVersion) -> None:
        """Publish an acknowledged version alone. Raises LakeError."""
        await self._publish(item.file, item.draft, item)

    async def _publish(
        self, file: OpenFile, draft: Draft, item: AcknowledgedVersion | None = None, *, is_synced: bool = False
    ) -> None:
        async with file.publishing:
            owner = _owner(file, draft)
            if owner is None or file.state is OpenState.UNLINKED:
                if draft.sequence:
                    self._queue.end(draft)
                return
            if item is not None:
                if item.state is VersionState.SUPERSEDED:
                    return
                item.begin_publishing()
            if file.behind and (later := file.stored_after(draft)) is not None:  # which ends this one
                draft, owner = later, file.owner_of(later) or owner
            async with draft.gate:
                if draft.refused.ranges:
                    draft.refused.check(owner.key)
                reached("publish.begun")
                stored = await self._writer.store(owner, draft, alone=item is not None, is_synced=is_synced)
                reached("publish.sent")
                published = [Publication(file, draft, stored)]
                older, untold = self._record(published)
            reached("publish.noted")
            try:
                await self._writer.commit_location(owner.key)
            except LakeError as error:
                log.warning("%s is stored, and a later commit says so: %s", owner.key, error)
                untold = error
            await self._finish(published, older)
        if not file.handles:
            self._files.forget_if_idle(file)
        if untold is not None and item is None:
            raise untold

    async def publish_pack(self, items: list[AcknowledgedVersion]) -> bool:
        """Publish acknowledged versions in one pack, up to the first whose name is contested or locked. Returns False
        if none could be. Raises LakeError; UnreadableDrafts if the others could be published. Then none is."""
        await self._find_contested(items)
        taken: dict[int, tuple[AcknowledgedVersion, OpenFile]] = {}  # the last of several versions of a file
        passed: list[Draft] = []
        with ExitStack() as held:
            for item in items:
                owner, file = item.file.owner_of(item.draft), id(item.file)
                is_locked = item.file.publishing.locked() and file not in taken
                if item.file.behind and not is_locked and item.file.stored_after(item.draft) is not None:
                    item.is_contested = True
                if owner is not None and (is_locked or item.is_contested):
                    break  # the versions after it wait for the next pack
                if owner is None or item.file.unlinked:
                    self._queue.end(item.draft)
                    continue
                if item.state is VersionState.SUPERSEDED:
                    continue
                if file in taken:
                    passed.append(taken[file][0].draft)
                else:
                    item.file.publishing.acquire_nowait()
                    held.callback(item.file.publishing.release)
                item.begin_publishing()
                taken[file] = item, owner
            if not taken:
                return False
            await self._publish_taken(list(taken.values()), passed)
        for number, (item, _) in enumerate(taken.values(), 1):
            self._files.forget_if_idle(item.file)
            if not number % RECORDED_AT_ONCE:
                await trio.lowlevel.checkpoint()
        return True

    async def _find_contested(self, items: list[AcknowledgedVersion]) -> None:
        owners = [(owner, item.draft) for item in items if (owner := item.file.owner_of(item.draft)) is not None]
        taken = await self._writer.find_taken(owners)
        for item in items if taken else ():
            item.is_contested = item.draft.target.if_absent and item.file.key in taken

    async def _publish_taken(self, taken: list[tuple[AcknowledgedVersion, OpenFile]], passed: list[Draft]) -> None:
        """Publish versions in one pack, which supersedes ``passed``. A few at a time are recorded: readers wait."""
        stored = await self._writer.store_pack([(owner, item.draft) for item, owner in taken], passed)
        published: list[Publication] = []
        older: list[Draft] = []
        for at in range(0, len(taken), RECORDED_AT_ONCE):
            now = [
                Publication(item.file, item.draft, stored(owner, item.draft))
                for item, owner in taken[at : at + RECORDED_AT_ONCE]
            ]
            published += now
            older += self._record(now)[0]
            await trio.lowlevel.checkpoint()
        await self._finish(published, older)

    # -- what is recorded

    def _record(self, published: Sequence[Publication]) -> tuple[list[Draft], LakeError | None]:
        """Record versions that the store has in one batch: rows, the ends of journal records, and attributes set since.
        While the disk is full, memory keeps it. Returns the drafts that they supersede, and the error of what could not
        be written: the bytes are durable all the same, and the next lookup or mount finds them."""
        batch, older, late = Batch(), list[Draft](), list[LateAttributes]()
        for each in published:
            if each.file.behind:
                older += self._end_older(batch, each.file, each.draft)
            if (attributes_set := self._install(each)) is not None:
                late.append(attributes_set)
            if each.file.draft is not None or each.file.behind:
                self._files.journal_drafts(batch, each.file)
            self._record_row(batch, each.stored)
            self._files.holes.note_stored(each.stored.entry, each.draft)
            each.draft.file.mark_ended()
            self._journal.delete(batch, each.draft.id, unannounced=each.stored.unannounced)
        return older, self._commit_record(batch, late)

    def _commit_record(self, batch: Batch, late: list[LateAttributes]) -> LakeError | None:
        """Commit the batch of `_record` together with ``late``, which a crash between would lose. If these cannot be
        journaled, the versions are recorded without them. Returns the error."""
        failed: LakeError | None = None
        if late:
            without = Batch(batch.rows.copy(), batch.shares.copy(), batch.ranges.copy(), batch.committed.copy())
            try:
                self._writer.set_attributes(late, batch)
                return None
            except CacheError as error:
                log.error("attributes that were set while a file was stored are lost: %s", error)
                batch, failed = without, error
        try:
            self._db.commit_volatile(batch)
        except CacheError as error:
            log.error(UNRECORDED, error)
            failed = error
        return failed

    def _end_older(self, batch: Batch, file: OpenFile, draft: Draft) -> list[Draft]:
        """End older versions that were refused, or that a pack passed, so that neither a later attempt nor the next
        mount takes one of them for the newest. Returns their drafts."""
        passed = [each.draft for each in file.behind if each.draft is not None and each.draft.sequence < draft.sequence]
        file.behind = [each for each in file.behind if each.draft not in passed]
        for each in passed:
            self._queue.journal_superseded(batch, each)
        return passed

    def _install(self, each: Publication) -> LateAttributes | None:
        file, stored = each.file, each.stored
        self._cache.pin(stored.extent.version)
        if file.extent is not None:
            self._cache.unpin(file.extent.version)
        late = file.install(each.draft, stored.entry, stored.extent, stored.described)
        return None if late is None else LateAttributes.of(file.key, stored.entry, *late)

    def _record_row(self, batch: Batch, stored: StoredVersion) -> None:
        entry, published = stored.entry, stored.published
        is_shown = stored.row is not None and not stored.is_removed
        is_stored = is_shown and published is not None and not published.is_superseded
        self._ns.changing(entry.parent, entry.name)
        if is_stored:
            batch.committed.append(partial(self._ns.changing, entry.parent, entry.name, is_stored=True))
        if stored.row is None or (published is not None and published.is_superseded):
            self._ns.tree.forget_listing(batch, entry.parent)  # it is to show which version the name has
        if stored.row is not None and stored.is_removed:
            self._ns.tree.remove(batch, stored.row)
            self._ns.announce_name(entry.parent, entry.name)
        elif stored.row is not None and published is not None:  # the commit of a pack changed the rows itself
            assert (entry.parent, entry.cookie) == (stored.row.parent, stored.row.cookie), "a file follows its row"
            self._ns.tree.update_files(batch, [(stored.row, entry)])  # read in this step

    async def _finish(self, published: Sequence[Publication], older: list[Draft]) -> None:
        """Release the staged bytes of recorded versions, and discard the ``older`` ones that they supersede."""
        if any(each.draft.sequence or each.stored.needs_sync for each in published):
            await self._threads.run(self._sync)
        for draft in older:
            self._queue.discard_superseded(draft)
        for number, each in enumerate(published, 1):
            file, draft, stored = each.file, each.draft, each.stored
            if stored.published is not None:
                await self._threads.run(self._to_cache, draft, stored.extent.version, stored.published)
            draft.close(unlink=stored.published is None)
            if draft.sequence:
                self._queue.end(draft)
            if file.state is not OpenState.UNLINKED:
                for listener in self._ns.events.version_stored:
                    listener(file.key, stored.extent)
            if not number % RECORDED_AT_ONCE:
                await trio.lowlevel.checkpoint()

    def _sync(self) -> None:
        """Sync the deletion of records before the bytes that they refer to are deleted, and the changes journaled for
        the names, without which an earlier journaled change would be the last. In a worker thread."""
        try:
            self._db.sync()
        except CacheError as error:
            log.error(UNRECORDED, error)

    def _to_cache(self, draft: Draft, version: Version, published: Published) -> None:
        """Rename the staging file into the block cache for later reads. If that fails, they ask the store."""
        self._cache.adopt(self._services.staging.path(draft.id), version, published.hashes)

    # -- changing what was acknowledged

    async def begin_next(self, file: OpenFile, acknowledged: Draft) -> None:
        """Begin the version after an acknowledged one that is not in the store yet, as a copy of it. If it is large, or
        the store has it before it is copied, wait until it is published; then the caller begins the next version. The
        first of several concurrent writers does this. Raises LakeError."""
        file.beginning = file.beginning or trio.Lock()
        async with file.beginning:
            if file.draft is acknowledged:
                await self._copy_acknowledged(file, acknowledged)

    async def _copy_acknowledged(self, file: OpenFile, acknowledged: Draft) -> None:
        if acknowledged.size > COPY_BYTES_MAX and not file.unlinked:
            with trio.move_on_after(self._services.staging.wait_s_max):
                await self._wait_durable(file, acknowledged)
            if file.draft is acknowledged and not file.unlinked:
                raise StagingFull(f"{file.key} waits for the store, and cannot be changed before it is there")
            return
        await self._drafts.begin_copy(file, acknowledged)

    async def _wait_durable(self, file: OpenFile, acknowledged: Draft) -> None:
        while file.draft is acknowledged and not file.unlinked:
            try:
                await self._drain_before(file)
            except LakeError as error:
                log.info("a change of %s waits for the store: %s", file.key, error)
            if file.draft is acknowledged:
                await trio.sleep(WAIT_DURABLE_S)

    async def _drain_before(self, file: OpenFile) -> None:
        """Wait until acknowledged versions of the file, and those before it, are durable. Raises LakeError."""
        held = self._writer.are_names_held
        await self._queue.drain(self._queue.before(file.key, are_names_held=held))


def _owner(file: OpenFile, draft: Draft) -> OpenFile | None:
    """Return the file, or the version behind it, to which the draft belongs; None if it has ended."""
    return file if file.draft is draft else file.owner_of(draft)
