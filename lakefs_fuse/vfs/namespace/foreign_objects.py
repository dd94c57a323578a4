"""Commits plain objects of other programs that replaced bytes named by a commit.

Without the commit the name would get its older bytes back when that object is deleted. If the object was deleted
before, the commit removes the name, because this node has forgotten those bytes. For an object that a node of this lake
wrote, only its writer makes the commit, once it sees the one that names the bytes, because it knows its own later
versions. If its object was removed by then, the writer commits the object's date, by which readers know which bytes it
had replaced. It does the same if the removal is dated before those bytes because the remover's clock was behind. If
another object was put in the object's place and has the same bytes again, the writer commits that.

What always holds (*only what is seen*): a commit is made only for an object of another program (without a draft token
in its metadata), for one of this node, or for one that no longer exists. A HEAD and then a poll of commits must show
that the name still refers to the object, or to nothing here because a listing no longer showed it. A commit that fails
is tried again, in the end once a minute. A crash loses the objects that wait; their names refer to them all the same
until they are deleted. Trio thread only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from itertools import chain, pairwise

import trio

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.path_tree import lies_elsewhere
from lakefs_fuse.commits.record import OWN, Put, Record, Remove, Symlink
from lakefs_fuse.errors import LakeError
from lakefs_fuse.meta.entry import PENDING, Entry
from lakefs_fuse.meta.tombstones import NS, Tombstone, is_replaced
from lakefs_fuse.store.client import StoreClient, token_of
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.vfs.namespace import attributes
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder, when_named

OBJECTS_MAX = 512
"""Maximum of objects in one commit, and of concurrent HEADs."""
WAITING_MAX = 1 << 16
PAUSE_S_FIRST = 1.0
PAUSE_S_MAX = 60.0
"""Pauses between attempts."""
log = logging.getLogger(__name__)


class ForeignObjects:
    """See the module's head. ``poll`` applies the commits of other nodes."""

    def __init__(
        self,
        namespace: Namespace,
        client: StoreClient,
        committer: Committer,
        deletions: DeletionQueue,
        nursery: trio.Nursery,
        poll: Callable[[], Awaitable[object]],
    ) -> None:
        self._ns, self._client, self._committer, self._nursery, self._poll = namespace, client, committer, nursery, poll
        self._deletions = deletions
        self._waiting: dict[int, tuple[str, Entry]] = {}
        """Paths and rows of the objects that wait, by inode."""
        self._is_running = self._is_full = False

    def add(self, entry: Entry) -> None:
        """Add an object that counts in place of bytes elsewhere. It is committed later if it is foreign or this
        node's."""
        if len(self._waiting) >= WAITING_MAX:
            if not self._is_full:
                log.warning(
                    "%s and others were replaced by another program, which is not committed", os.fsdecode(entry.name)
                )
            self._is_full = True
            return
        self._waiting[entry.inode] = self._ns.key(entry), entry
        if not self._is_running:
            self._is_running = True
            self._nursery.start_soon(self._run)

    def commit_applied(self, record: Record) -> None:
        """Follow another node's commit, which is in effect except for names with newer objects of this node."""
        if self._deletions.has_stored_any:
            self._nursery.start_soon(self._try_add_own, record)

    async def _try_add_own(self, record: Record) -> None:
        """Call `_add_own`, and log its errors: a database that cannot be read does not end the mount."""
        try:
            await self._add_own(record)
        except LakeError as error:
            log.error("what a commit said of objects of this node could not be completed: %s", error)
        except Exception:
            log.exception("what a commit said of objects of this node")

    async def _add_own(self, record: Record) -> None:
        for number, (each, after) in enumerate(pairwise(chain(record.operations, (None,))), 1):
            if isinstance(each, Put | Symlink) and (etag := self._deletions.stored_etag(each.path)):
                entry = self._ns.at(each.path)
                if entry is not None and self._current(entry.inode, etag) is not None:
                    self.add(entry)
                elif entry is not None and not entry.is_plain and entry.stamp == record.time and each.hides != etag:
                    await self._date_removal(each.path, etag, record.time)
            elif isinstance(each, Remove) and each.hides and self._deletions.stored_etag(each.path) == each.hides:
                if isinstance(after, Put) and after.object == OWN and after.path == each.path:
                    await self._put_again(each.path, each.hides, after.hides)  # the successor replaced it
                else:
                    await self._end_replaced(each.path, each.hides)
            if not number % OBJECTS_MAX:
                await trio.lowlevel.checkpoint()

    async def _date_removal(self, path: str, etag: str, time: int) -> None:
        """Commit the date of an object of this node that was removed without one, by a node that had not seen another
        node's file of this ``time``. The date says whether the object had replaced that file; an object that belongs to
        another name has replaced none."""
        if self._deletions.is_adopted(path, etag):
            return
        tombstone = self._ns.tree.tombstones.get(path.encode())
        gone = 0 if tombstone is None else tombstone.when_gone(etag)
        if tombstone is None or gone <= time or tombstone.when_dated(etag):
            return
        try:
            meta = await self._client.find(path)
            if meta is not None and meta.etag == etag and meta.mtime_ns <= gone:
                removal = Remove(path, hides=etag, dated_s=meta.mtime_ns // NS)
                await self._committer.commit_as_of(lambda: (Change(operations=[removal]), gone))
        except LakeError as error:
            log.warning("the date of a removed object could not be committed: %s", error)

    async def _end_replaced(self, path: str, etag: str) -> None:
        """Commit the end of a file that a removed object of this node had replaced. It ended although the removal is
        older, which other nodes cannot know."""
        tombstone, entry = self._ns.tree.tombstones.get(path.encode()) or Tombstone(0), self._ns.at(path)
        dated_s, ended, is_untold = tombstone.when_dated(etag), tombstone.stamp, tombstone.floor < tombstone.stamp
        if entry is not None and lies_elsewhere(entry) and entry.etag != etag:  # it is in sight again
            ended, is_untold = entry.stamp, True
        is_untold = is_untold and 0 < tombstone.when_gone(etag) < ended < PENDING
        if is_untold and is_replaced(ended, dated_s):
            try:
                removal = Remove(path, hides=etag, dated_s=dated_s)
                await self._committer.commit_as_of(lambda: (Change(operations=[removal]), ended))
            except LakeError as error:
                log.warning("the end of a file that was replaced and removed could not be committed: %s", error)

    async def _put_again(self, path: str, etag: str, successor: str) -> None:
        """Commit that bytes are there again which another node had replaced by ``successor``, if the store has them.

        A writer that had not seen the commit of the successor has stored them again."""
        try:
            meta = await self._client.find(path)
            if meta is not None and meta.etag == etag != successor:
                await self._poll()
                await self._committer.commit(lambda: self._change_again(meta, successor))
        except LakeError as error:
            log.warning("%s has bytes that were put there again, which could not be committed: %s", path, error)

    def _change_again(self, meta: ObjectMeta, successor: str) -> Change:
        """Return the change of `_put_again` when the commit's turn has come; empty if it was committed meanwhile, or
        the successor was replaced."""
        builder, path = ChangeBuilder(self._ns.tree), meta.key
        tombstone, entry = self._ns.tree.tombstones.get(path.encode()) or Tombstone(0), self._ns.at(path)
        is_successor = entry is None or (entry.is_plain and entry.etag == successor)
        if is_successor and tombstone.when_gone(meta.etag) and not tombstone.when_gone(successor):
            inode = 0 if entry is None else entry.inode
            found = Entry(0, 0, b"", inode, size=meta.size, mtime_ns=meta.mtime_ns, etag=meta.etag)
            told = attributes.learn(found, meta.metadata or {})
            dated_s = max(meta.mtime_ns // NS, tombstone.when_dated(meta.etag) + 1)
            builder.put_again(path, told, dated_s, when_named(self._ns.tree, path, meta.etag))
        return builder.change()

    async def _run(self) -> None:
        backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        try:
            while self._waiting:
                batch = dict(list(self._waiting.items())[:OBJECTS_MAX])
                for inode in batch:
                    del self._waiting[inode]
                failed = await self._commit(batch)
                for inode in failed:
                    self._waiting.setdefault(inode, batch[inode])
                if failed:
                    await trio.sleep(backoff.next_s())
                else:
                    backoff.reset()
        except Exception:
            log.exception("objects of other programs are not committed")
        finally:
            self._is_running = self._is_full = False

    async def _commit(self, batch: dict[int, tuple[str, Entry]]) -> list[int]:
        """Commit the objects of a batch that have to be committed. Returns the inodes of those that could not be."""
        found: dict[int, ObjectMeta | None] = {}
        failed: list[int] = []

        async def ask(inode: int, path: str, etag: str) -> None:
            try:
                entry = self._current(inode, etag)
                if entry is None and not self._is_forgotten(path, etag):
                    return
                key = path if entry is None else self._ns.key(entry)
                meta = await self._client.find(key)
            except LakeError as error:
                if not failed:
                    log.warning("replaced objects are committed later: %s was asked for in vain: %s", path, error)
                failed.append(inode)
                return
            is_own = self._deletions.stored_etag(key) == etag
            if meta is None or (meta.etag == etag and (is_own or not token_of(meta))):
                found[inode] = meta

        async with trio.open_nursery() as nursery:
            for inode, (path, row) in batch.items():
                nursery.start_soon(ask, inode, path, row.etag)
        try:
            if found:
                await self._poll()
                await self._committer.commit(lambda: self._change(batch, found))
        except LakeError as error:
            log.warning("%d replaced objects are committed later: %s", len(found), error)
            failed += found
        else:
            seen = [(inode, *batch[inode]) for inode, meta in found.items() if meta is not None]
            failed += [inode for inode, path, row in seen if self._is_forgotten(path, row.etag)]  # deleted since
        return failed

    def _change(self, batch: dict[int, tuple[str, Entry]], found: dict[int, ObjectMeta | None]) -> Change:
        """Return the change for objects that a HEAD has found, or not, when the commit's turn has come."""
        builder = ChangeBuilder(self._ns.tree)
        for inode, meta in found.items():
            path, row = batch[inode]
            entry = self._current(inode, row.etag)
            if entry is not None and meta is not None:
                key, told = self._ns.key(entry), attributes.learn(entry, meta.metadata or {})
                removed = self._ns.tree.tombstones.get(key.encode("utf-8", "surrogatepass"))
                if removed is not None and (removed.when_gone(row.etag) or removed.when_dated(row.etag)):
                    named = when_named(self._ns.tree, key, row.etag)
                    builder.put_again(key, told, meta.mtime_ns // NS, named)
                else:
                    builder.put(key, told)
            elif entry is not None:
                builder.remove(self._ns.key(entry), entry)
            elif meta is None and self._is_forgotten(path, row.etag):
                builder.put(path, row)  # it ends what the object had replaced, but no object that another node stores
                builder.operations.append(Remove(path, hides=row.etag))
        return builder.change()

    def _is_forgotten(self, path: str, etag: str) -> bool:
        """Return whether a listing no longer showed the object, and nothing else is known of the name: this node has
        forgotten the bytes that it had replaced."""
        tombstone = self._ns.tree.tombstones.get(path.encode("utf-8", "surrogatepass"))
        return self._ns.at(path) is None and (tombstone is None or not tombstone.when_gone(etag))

    def _current(self, inode: int, etag: str) -> Entry | None:
        """Return the row if it is still that object and no commit has named it."""
        entry = self._ns.tree.entry(inode)
        if entry is None or not entry.is_plain or entry.stamp or entry.etag != etag:
            return None
        return entry
