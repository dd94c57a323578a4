"""Key claims: of all nodes that exclusively put a new file at the key of a removed one, only one does.

The object of a removed file stays at its key for a while, and a store recognizes it by its ETag, which the same bytes
have again: a request with `If-Match` cannot distinguish the removed version from one that another node has just put
there. So a node first claims the removed version: it puts an empty object below ``.lakefs/objects/``, whose key is a
digest of that version, with `If-None-Match`.

What always holds:

* (*one successor*) of all calls that claim one version, only those with the token of the first succeed, for CLAIM_S_MIN
  at least. A version is its key, ETag, date and the id of its draft, so none comes back;
* (*removed since*) an object that was put exclusively has a time in its metadata, which is later than each removal that
  made room for it: only a later removal concerns it.

Trio thread only. After a crash the version stays claimed until the claim is deleted: by the deletion queue of its node,
or by `gc` as an unreferenced object.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Awaitable, Callable

import xxhash

from lakefs_fuse.commits.hybrid_clock import HybridClock
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.errors import CacheError, FileError, Overtaken, PreconditionFailed
from lakefs_fuse.meta.entry import PENDING
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.meta.tombstones import SAME_VERSION_NS, Tombstones
from lakefs_fuse.store.client import SINCE_METADATA, TOKEN_METADATA, NewKey, StoreClient, token_of
from lakefs_fuse.store.protocol import ObjectMeta

NS = 1_000_000_000
CLAIM_S_MIN = 300.0
"""How long a claim stays: longer than any request that began before the version was replaced."""
DUE_NS = 5 * NS
"""How long before its deletion a version of another node's file may be gone: clocks differ."""
log = logging.getLogger(__name__)


class KeyClaims:
    """Decides who replaces the object of a removed file: see the module's head."""

    def __init__(
        self,
        client: StoreClient,
        tombstones: Tombstones,
        deletions: DeletionQueue,
        clock: HybridClock,
        flush: Callable[[], Awaitable[None]],
        *,
        delete_after_s: float,
    ) -> None:
        """``flush`` commits the journaled changes of this node."""
        self._client, self._tombstones, self.deletions = client, tombstones, deletions
        self._clock, self._flush = clock, flush
        self._delete_after_ns = int(delete_after_s * NS)

    def describe(self) -> dict[str, str]:
        """Return metadata for an object that is put exclusively, immediately before its request."""
        return {SINCE_METADATA: f"{self._clock.now()}"}

    def is_removed_since_put(self, there: ObjectMeta) -> bool:
        """Return whether the object at a key was removed after it was put, by all that is known here. Without its
        metadata only its date says whether an earlier removal of the same bytes concerns it."""
        removed = self._tombstones.get(there.key.encode())
        if removed is None or not removed.hides(there.etag, there.mtime_ns):
            return False
        return max(removed.when_gone(there.etag), removed.floor) > _since_of(there)

    def may_be_again(self, there: ObjectMeta) -> bool:
        """Return whether an object that counts as removed may have been put after the removal of a version with the
        same bytes: another version was removed since, and neither its metadata nor its date tells."""
        removed = self._tombstones.get(there.key.encode())
        if removed is None or _since_of(there):
            return False
        gone = removed.when_gone(there.etag)
        return gone > 0 and there.etag != removed.etag and there.mtime_ns + SAME_VERSION_NS > gone

    def may_be_deleted(self, there: ObjectMeta) -> bool:
        """Return whether another node may delete the removed object now, after which its key is free."""
        removed = self._tombstones.get(there.key.encode())
        if removed is None or self.deletions.superseded_etag(there.key) == there.etag:
            return False  # this node deletes it, and not while it writes there
        return removed.newest + self._delete_after_ns - DUE_NS < self._clock.wall_ns()

    async def claim_expected(self, key: str, etag: str, draft_id: str, there: ObjectMeta | None) -> None:
        """Claim the removed version with this ETag for a draft. ``there`` is what a HEAD has just found, if one was
        sent. Raises Overtaken if the key has another version, FileError(EEXIST) if another writer has the claim,
        LakeError."""
        there = there or await self._client.find(key)
        if there is not None and token_of(there).partition(".")[0] == draft_id:
            return  # an attempt whose answer was lost
        if there is None or there.etag != etag or not self.is_removed_since_put(there):
            raise Overtaken(f"{key!r} has another version than the one that was removed")
        if not await self.claim(there, draft_id):
            raise FileError(errno.EEXIST, f"another client is creating {key}")

    async def claim(self, there: ObjectMeta, token: str) -> bool:
        """Claim a removed version for the writer with this token; returns whether it has the claim. Its removal is
        committed first, so that all nodes know what the new version replaces. Raises LakeError."""
        if self._is_removal_pending(there.key):
            await self._flush()
            if self._is_removal_pending(there.key):
                return False  # it is held, and its commit would be later than the time of the new version
        version = f"{there.key}\0{there.etag}\0{there.mtime_ns}\0{token_of(there)}"
        key = OBJECTS + xxhash.xxh3_128_hexdigest(version.encode("utf-8", "surrogatepass"))
        try:
            claim = await self._client.put(key, b"", metadata={TOKEN_METADATA: token}, version=NewKey(if_absent=True))
        except PreconditionFailed:
            return False
        now_ns = self._clock.wall_ns()
        due_ns = now_ns + max(self._delete_after_ns, int(CLAIM_S_MIN * NS))
        try:
            self.deletions.schedule(Deletion(key, claim.etag, due_ns=due_ns, removed_ns=now_ns))
        except CacheError as error:
            log.warning("the claim of %s is left to `gc`: %s", there.key, error)
        return True

    def _is_removal_pending(self, key: str) -> bool:
        removed = self._tombstones.get(key.encode())
        return removed is not None and removed.newest >= PENDING


def _since_of(there: ObjectMeta) -> int:
    """Return the time after which a removal concerns the object; 0 if its metadata has none."""
    since = (there.metadata or {}).get(SINCE_METADATA, "")
    return int(since) if since.isdecimal() and len(since) <= 20 else 0
