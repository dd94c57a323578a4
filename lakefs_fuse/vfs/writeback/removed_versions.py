"""What this node knows of plain objects that lost their names: which were removed, replaced or hidden, and when.

A writer asks before it stores an object where another was, and before it says that its own object is there: equal bytes
have equal ETags in many stores, so the ETag of a new object may be that of a removed one.

What always holds (*reads only*): nothing is changed. All but `find_date` answer from the tree, in one step. Trio thread
only.
"""

from __future__ import annotations

from typing import NamedTuple

from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.path_tree import is_hiding
from lakefs_fuse.commits.record import Remove
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.entry import PENDING, Entry
from lakefs_fuse.meta.tombstones import NS, Tombstone, bury
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.vfs.namespace.namespace import Namespace


class KnownAt(NamedTuple):
    """The tombstone and the row of a path at one moment."""

    tombstone: Tombstone | None
    row: Entry | None

    def when_gone(self, etag: str) -> int:
        """Return when the plain object with this ETag was removed or replaced, perhaps by the file of the row; 0 if it
        was not."""
        gone, row = self.tombstone, self.row
        if row is not None and row.etag and is_hiding(row, row.etag):
            gone = bury(gone, etag=row.etag, at=row.stamp)
        return 0 if gone is None else gone.when_gone(etag)


class RemovedVersions:
    """See the module's head."""

    def __init__(self, namespace: Namespace, deletions: DeletionQueue) -> None:
        self._ns, self._deletions = namespace, deletions

    def tombstone(self, path: str) -> Tombstone:
        """Return the tombstone of a path; an empty one if nothing was removed there."""
        return self._ns.tree.tombstones.get(path.encode()) or Tombstone(0)

    def etags(self, key: str) -> tuple[str, ...]:
        """Return the ETags of plain objects that were at a key and lost their names, and of the one in use elsewhere,
        each once."""
        used, removed = self._ns.tree.objects.used(key), self.tombstone(key)
        doomed, before = self._deletions.superseded_etag(key), "" if used is None else used.etag
        known = dict.fromkeys([before, doomed, removed.etag, *(etag for etag, _ in removed.all_gone)])
        return tuple(etag for etag in known if etag)

    def is_hidden(self, path: str, etag: str) -> bool:
        """Return whether a commit says that the name does not refer to the plain object with this ETag. If a listing no
        longer showed that object, an unknown commit may say so."""
        there, tombstone = self._ns.at(path), self.tombstone(path)
        is_covered = there is not None and bool(there.place) and there.etag == etag
        return is_covered or bool(tombstone.when_gone(etag)) or tombstone.unlisted[0] == etag

    def was_seen_and_removed(self, path: str, meta: ObjectMeta, dated_s: int, before: KnownAt | None) -> bool:
        """Return whether another node removed or replaced the object before its writer, which had lost the answer to
        its PUT, knew that it was stored. ``dated_s`` is the store's date of it, 0 if unknown. ``before`` is what was
        known of the path before the PUT: removals of equal bytes that it has came first, whatever their dates, which
        are of other clocks."""
        now = KnownAt(self._ns.tree.tombstones.get(path.encode()), self._ns.at(path))
        gone = now.when_gone(meta.etag) if meta.key == path else 0
        known = 0 if before is None else before.when_gone(meta.etag)
        return dated_s > 0 and (dated_s + 1) * NS < gone < PENDING and known != gone and known < PENDING

    async def find_date(self, client: StoreClient, meta: ObjectMeta, *, may_be_hidden: bool = False) -> int:
        """Return the store's date, in seconds, of bytes that were removed or replaced before and are there again: the
        answer to a PUT may have this machine's. Returns 0 if no commit known here hides or names the bytes, unless one
        ``may_be_hidden``; and if the store does not answer."""
        was_there = self.is_hidden(meta.key, meta.etag) or self.tombstone(meta.key).when_told(meta.etag) > 0
        if not (may_be_hidden or was_there):
            return 0
        try:
            there = await client.find(meta.key)
        except LakeError:
            return 0
        return there.mtime_ns // NS if there is not None and there.etag == meta.etag else 0

    def date_again(self, meta: ObjectMeta, dated_s: int) -> int:
        """Return the date for the commit: later than that of any removed version with these bytes known here."""
        return max(dated_s, self.tombstone(meta.key).when_dated(meta.etag) + 1) if dated_s else 0

    def removal(self, path: str, etag: str, there: ObjectMeta | None) -> Remove | None:
        """Return the removal of a replaced object of which no commit has told; None without an ETag. If a commit had
        hidden the same bytes before, it has the date of the object that a HEAD found ``there``."""
        is_again = there is not None and there.etag == etag and self.is_hidden(path, etag)
        dated_s = there.mtime_ns // NS if there is not None and is_again else 0
        return Remove(path, hides=etag, dated_s=dated_s) if etag else None
