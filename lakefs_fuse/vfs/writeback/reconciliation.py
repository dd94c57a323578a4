"""Finds out which version the store has under the name of a journal record: the record's own, or another writer's.

What always holds (*reads only*): nothing is changed, neither here nor in the store. A question costs one HEAD. Used at
mount, and later for files that were restored at mount. Trio thread only.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from lakefs_fuse.meta.entry import PENDING, Entry, Flag
from lakefs_fuse.meta.tombstones import NS
from lakefs_fuse.staging.draft_record import DraftRecord
from lakefs_fuse.store.client import StoreClient, token_of
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs.namespace.listing_merge import is_object_removed
from lakefs_fuse.vfs.namespace.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Visible:
    """ETag and draft token of the object that a name refers to now; empty if there is none."""

    etag: str = ""
    token: str = ""

    @property
    def draft_id(self) -> str:
        return self.token.partition(".")[0]


class Reconciliation:
    """Answers which versions are in the store. See the module's head."""

    def __init__(self, namespace: Namespace, client: StoreClient) -> None:
        self._ns, self._client = namespace, client
        self._commits: dict[str, bool] = {}
        """Whether the store has a commit, by key. Commits of daemons that have ended: the answer cannot change."""

    async def published(self, record: DraftRecord) -> ObjectMeta | None:
        """Return the plain object that was made of the record's present bytes; None if there is none. Raises
        LakeError."""
        meta = await self._client.find(record.key)
        return meta if meta is not None and record.token and token_of(meta) == record.token else None

    async def is_at(self, key: str, draft_id: str) -> bool:
        """Return whether the plain object at a key was made of this draft, unchanged since its first attempt. Raises
        LakeError."""
        meta = await self._client.find(key)
        return meta is not None and token_of(meta) == draft_id

    async def is_in_pack(self, record: DraftRecord) -> bool:
        """Return whether the store has the commit in which the bytes were to be sent. Raises LakeError."""
        if not record.commit:
            return False
        if record.commit not in self._commits:
            self._commits[record.commit] = await self._client.find(record.commit) is not None
        return self._commits[record.commit]

    async def is_relocated(self, there: Visible, record: DraftRecord) -> bool:
        """Return whether the name refers to a copy of the bytes that the record replaces, made by a daemon that died
        before it recorded that. Raises LakeError."""
        known = bool(record.copied_from and there.etag)
        return known and await is_copy(self._client, there.etag, there.token, record.copied_from)

    async def visible(self, record: DraftRecord, ours: Container[str] = ()) -> Visible:
        """Return the object that the record's name refers to now. Raises LakeError.

        ``ours`` are ids of other drafts of this node. What a draft has stored under its name came after each removal
        of that name that was made here and is in no commit yet: a later one would have ended the draft."""
        path = path_of(record)
        entry = self._ns.at(path)
        if entry is not None and (entry.is_dir or entry.is_symlink):
            return Visible(str(entry.file_type))
        extent = self._ns.extent(entry) if entry is not None else None
        if entry is not None and extent is not None and extent.version.key not in (path, record.key):
            return Visible("" if self._ns.is_row_removed(entry) else extent.version.etag)
        key = path if extent is None else extent.version.key  # an earlier name's, if it was renamed during its upload
        meta = await self._client.find(key)
        if meta is None:
            return Visible()
        there, raw = Visible(meta.etag, token_of(meta)), path.encode("utf-8", "surrogatepass")
        is_own = there.draft_id == record.id or there.draft_id in ours
        if key == path and is_object_removed(self._ns.tree, raw, meta, entry, is_newer_than_pending=is_own):
            return Visible()
        if entry is not None and key == path and _is_hidden(entry, meta):
            return Visible()
        return there


def _is_hidden(entry: Entry, meta: ObjectMeta) -> bool:
    """Return whether the file that an unstored one replaces is elsewhere, and hides the object by ETag or date."""
    is_over = entry.is_local and entry.flags & Flag.OVERRIDING and 0 < entry.stamp < PENDING
    return bool(is_over) and (meta.etag == entry.etag or meta.mtime_ns + NS <= entry.stamp)


def path_of(record: DraftRecord) -> str:
    """Return the path of the record's file in the lake."""
    return record.path or record.key


async def is_copy(client: StoreClient, etag: str, token: str, source: str) -> bool:
    """Return whether an object has the bytes of the one at ``source``, if that still exists. Raises LakeError."""
    meta = await client.find(source)
    return meta is not None and (meta.etag == etag or (bool(token) and token_of(meta) == token))
