"""Plain objects at the key of an earlier name after a rename, and what happens if that key is written.

A rename is a commit and moves no bytes, so the bytes of a name may be at the key of a name that no longer exists. Nodes
that know this store new bytes elsewhere. A node that has not seen the rename replaces the object there, as if it still
were the file of that name. Its write counts as earlier than the rename, and the renamed file then is that version. The
node commits this when it sees the rename (`commit_applied`). If it was lost before that, a node that reads the renamed
file finds out (`adopt`). If the renamed file has a newer version by then, no name has that version, and the commit only
hides it under the earlier name. A node that has removed the file and created another one there did not replace it, as
its object's metadata show: then both are files, and the bytes of the renamed one are lost.

The name at whose key the object lies may have got another file in the same commit, as in an exchange. What was written
there counts in place of that file, because a later commit names it. The name's history tells what the name is without
the object, and an addition to the commit that gave the name that file repeats it (`hide`). But if the metadata of what
was written say that it replaced that very file, its writer knew of it, and it is the file of that name.

What always holds: a name gets another version only after a HEAD showed that version at the key, only while the name
still means the version that is gone, and not if its own key has a newer one; objects are deleted by the deletion queue
alone. What this node stored is remembered in memory alone: after a crash, `adopt` does the same on nodes that read the
file. Trio thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence, Set
from functools import partial
from itertools import islice

import msgspec
import trio

from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.path_tree import lies_elsewhere
from lakefs_fuse.commits.record import THIS, ObjectRef, Put, Record, Relocate, key_of_copy
from lakefs_fuse.errors import LakeError, NotFound, PreconditionFailed
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.entry import PENDING, ROOT_INODE, Entry
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.meta.tombstones import Tombstone
from lakefs_fuse.store.client import StoreClient, is_successor, replaced_since, token_of
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.store.server_copy import copy_object
from lakefs_fuse.sync.wakeup import Wakeup
from lakefs_fuse.vfs.namespace.attributes import learn
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder, Rows, RowSnapshot, hide_object

NS = 1_000_000_000
ADOPT_S_MAX = 10.0
"""A HEAD and a commit take less, unless the store is unavailable."""
NAMES_PER_STEP = 512
"""Names that are checked in one step: 5 ms."""
log = logging.getLogger(__name__)


def _has_bytes_of(entry: Entry, rows: Rows, etags: Collection[str]) -> bool:
    """Return whether a file elsewhere has the bytes of one of these versions."""
    row = rows.objects.get(entry.place)
    return row is not None and row.etag in etags


class RenamedObjects:
    """Gives renamed files what was stored at the keys of their earlier names; see the module."""

    def __init__(
        self,
        namespace: Namespace,
        client: StoreClient,
        committer: Committer,
        deletions: DeletionQueue,
        nursery: trio.Nursery,
        new_id: Callable[[], str],
        moved: Callable[[Version, Version], Awaitable[None]],
        *,
        read_only: bool,
    ) -> None:
        """``new_id`` makes ids for hidden objects; ``moved`` is called with the old and new version of copied bytes."""
        self._ns, self._client, self._committer, self._nursery = namespace, client, committer, nursery
        self._deletions, self._new_id, self._moved, self._is_read_only = deletions, new_id, moved, read_only
        self.adopting, self._adopted = 0, Wakeup()
        """How many adoptions are under way, and the wakeup at the end of each."""

    def commit_applied(self, record: Record) -> None:
        """Start adoptions after another node's commit has taken effect here.

        Names that it gives to objects that this node has replaced soon get the version that is there now."""
        if self._deletions.has_stored_any:
            self._start_adopting("a file", partial(self._adopt_replaced, record))

    def rename_applied(self, change: Change, keys: Set[str]) -> None:
        """As `commit_applied`, for a rename of this node and the objects that it stored at ``keys`` meanwhile."""
        self._start_adopting("a file", partial(self._adopt_replaced, change, keys))

    def names_restored(self, entries: Iterable[Entry]) -> None:
        """As `commit_applied`, for names that changes of this node covered until these were withdrawn."""
        for entry in entries:
            row = self._ns.tree.objects.get(entry.place) if entry.place else None
            if row is not None and self._deletions.has_replaced(row.key, row.etag):
                path = self._ns.key(entry)
                self._start_adopting(path, partial(self._adopt_renamed, path, row.key, row.etag))

    async def _find_replaced(self, record: Record | Change, keys: Set[str] | None) -> dict[str, ObjectRef]:
        """Return, by path, the objects that this node has replaced and to which a record gives names.

        With ``keys`` only objects there count. Other tasks run during the search."""
        replaced, named = set[int](), dict[str, ObjectRef]()
        for number, ref in enumerate(islice(record.objects, THIS + 1, None), THIS + 1):
            if (keys is None or ref.key in keys) and self._deletions.has_replaced(ref.key, ref.etag):
                replaced.add(number)
            if not number % NAMES_PER_STEP:
                await trio.lowlevel.checkpoint()
        for number, each in enumerate(record.operations if replaced else (), 1):
            if isinstance(each, Put) and each.object in replaced:
                named[each.path] = record.objects[each.object]
            if not number % NAMES_PER_STEP:
                await trio.lowlevel.checkpoint()
        return named

    async def _adopt_replaced(self, record: Record | Change, keys: Set[str] | None = None) -> None:
        """Start adoptions for names that a record gives to objects that this node has replaced.

        The name at such a key may have got another file, which is not visible until it hides the version that is there
        now. Raises LakeError."""
        time = record.time if isinstance(record, Record) else 0
        named = await self._find_replaced(record, keys)
        try:
            for ref in named.values():
                there = self._ns.at(ref.key)
                if there is not None and there.is_plain and there.etag == self._deletions.stored_etag(ref.key):
                    await self._committer.flush()  # then what this node has said of its objects is in a commit
                    meta = await self._client.find(ref.key)
                    if meta is not None and is_successor(meta, ref.etag):
                        await self._hide_versions(ref.etag, meta, time)
        finally:
            for path, ref in named.items():
                self._start_adopting(path, partial(self._adopt_renamed, path, ref.key, ref.etag))

    def stored(self, path: str, key: str, etag: str) -> None:
        """Start adoptions after this node has stored an object at ``key`` for the file at ``path``.

        Names that other nodes have given meanwhile to the object that was there soon get the new one, too."""
        row = self._ns.tree.objects.used(key)
        if row is not None and row.etag != etag:
            self._start_adopting(path, partial(self._adopt_others, path, row))

    async def _adopt_others(self, path: str, row: ObjectRow) -> None:
        """Start adoptions for all files with bytes in an object that was replaced at its key, except ``path``."""
        for named, _ in self._named(row, await self._find_named(row)):
            if named != path:
                self._start_adopting(named, partial(self._adopt_renamed, named, row.key, row.etag))

    def _start_adopting(self, path: str, adopt: Callable[[], Awaitable[object]]) -> None:
        self.adopting += 1
        self._nursery.start_soon(self._adopt_soon, path, adopt)

    async def _adopt_soon(self, path: str, adopt: Callable[[], Awaitable[object]]) -> None:
        try:
            await adopt()
        except LakeError as error:
            log.warning("%s was renamed while this node replaced it, and cannot be read yet: %s", path, error)
        except Exception:
            log.exception("%s was renamed while this node replaced it, and cannot be read yet", path)
        finally:
            self.adopting -= 1
            self._adopted.wake_all()

    async def _adopt_renamed(self, path: str, key: str, etag: str) -> None:
        """Call `adopt`, for other names too if this node has renamed the file once more meanwhile.

        Raises LakeError."""
        await self.adopt(path)
        row = self._ns.tree.objects.used(key)
        if row is None:
            await self._hide_left(path, key, etag)
        elif row.etag == etag and self._renamed(path)[1] != row:
            for named, _ in self._named(row, await self._find_named(row)):
                await self.adopt(named)

    async def _hide_left(self, path: str, key: str, etag: str) -> None:
        """Hide what this node has stored at ``key`` in place of the version ``etag`` that was renamed to ``path``, if
        that name has a newer version elsewhere, so that no name refers to the object. Raises LakeError."""
        stored = self._deletions.stored_etag(key)
        meta = await self._client.find(key) if stored not in ("", etag) else None
        if meta is None or meta.etag != stored:
            return
        async with self._committer.quiet():
            there, tombstone = self._ns.at(path), self._tombstone(key)
            is_newer = there is not None and not self._ns.is_row_removed(there)
            if not is_newer or self._ns.tree.objects.used(key) is not None or tombstone.when_gone(stored):
                return
            builder = ChangeBuilder(self._ns.tree)
            self._hide_successor(builder, meta, etag, tombstone.when_gone(etag))
            if not builder.operations:
                return
            doomed = [Deletion(key, stored)]
            self._committer.enqueue(msgspec.structs.replace(builder.change(), doomed=doomed))
        self._ns.outdate_emptied(key)
        await self._committer.flush()

    async def _hide_versions(self, etag: str, meta: ObjectMeta, time: int) -> None:
        """Call `hide` for the object and its versions since the one with this ETag."""
        self._deletions.note_adopted(meta.key, meta.etag)
        await self.hide(meta.key, [*replaced_since(meta, etag), meta.etag], time)

    async def hide(self, key: str, etags: Sequence[str], time: int = 0) -> None:
        """Commit that the file elsewhere, which a commit put at the name ``key``, hides these objects.

        They were stored there for another name, and are given oldest first; what others have put there since stands. If
        one of them has come in place of that file, this is done only if the file's commit is of this ``time``, at which
        it gave away what they replaced: a file that their writer itself had put there before stays replaced. Raises
        LakeError."""
        if self._file_elsewhere(key, etags, time) is not None:
            await self._committer.commit_as_of(lambda: self._hiding(key, etags, time))

    def _hiding(self, key: str, etags: Sequence[str], time: int) -> tuple[Change, int]:
        """Return, at the commit's turn, the change and the time of the commit to which it belongs."""
        found = self._file_elsewhere(key, etags, time)
        if found is None:
            return Change(), 0
        entry, builder = found[0], ChangeBuilder(found[1])
        for etag in etags:
            builder.put(key, msgspec.structs.replace(entry, etag=etag), hides=etag)
        return builder.change(), entry.stamp

    def _file_elsewhere(self, key: str, etags: Sequence[str], time: int) -> tuple[Entry, Rows] | None:
        """Return the file elsewhere that the name ``key`` is, or would be without these objects; see `hide`.

        Return None if there is none to be repeated, if it hides the newest of these objects already, or if they have
        replaced it, as the metadata of the newest show."""
        entry = self._ns.at(key)
        rows: Rows = self._ns.tree
        if entry is not None and entry.is_plain and entry.etag in etags:
            said = self._committer.find_without(key, entry, {(key, 0, etag) for etag in etags})
            entry = None if said is None else said.current
            if said is None or entry is None or entry.stamp != time:
                return None
            row = self._ns.tree.objects.get(entry.place)
            objects = {} if row is None else {entry.place: row}
            rows = RowSnapshot(objects, {0: said.target}, {0: said.xattrs or {}})
        if entry is None or not lies_elsewhere(entry) or entry.etag == etags[-1] or _has_bytes_of(entry, rows, etags):
            return None
        return (entry, rows) if 0 < entry.stamp < PENDING else None

    async def wait_adopted(self) -> None:
        """Wait until names that others gave to objects which this node has replaced mean what it stored.

        It waits for `ADOPT_S_MAX` at most; callers are about to give one of these objects another name."""
        with trio.move_on_after(ADOPT_S_MAX):
            while self.adopting:
                await self._adopted.wait()

    async def adopt(self, path: str) -> bool:
        """Give a renamed file the version that is at the key of its earlier name now; return whether it did.

        A node of this lake must have stored that version, or another program before the rename. A read-only mount does
        nothing. Raises LakeError."""
        entry, row = self._renamed(path)
        if entry is None or row is None or self._is_read_only:
            return False
        try:
            meta = await self._client.head(row.key)
        except NotFound:
            log.error("%s: its bytes were at %s, which another client removed", path, row.key)
            return False
        if meta.etag == row.etag:
            return False
        if not token_of(meta) and not self._precedes_rename(row, meta):
            log.error("%s: its bytes were at %s, which another program replaced", path, row.key)
            return False
        there = await self._client.find(path)
        is_replaced = there is not None and self._is_put_since(path, there, entry)
        if is_replaced:
            log.info(
                "%s: its bytes were at %s, and were replaced at its own key since, of which a commit tells",
                path,
                row.key,
            )
            if self._tombstone(row.key).when_gone(meta.etag):
                return False
        if is_successor(meta, row.etag):
            await self._hide_versions(row.etag, meta, entry.stamp)
        async with self._committer.quiet():  # not ahead of the rename, which may be held
            self._committer.enqueue(self._adoption(path, row, meta, is_replaced=is_replaced))
        self._ns.outdate_emptied(row.key)
        await self._committer.flush()
        return not is_replaced

    def _is_put_since(self, path: str, there: ObjectMeta, entry: Entry) -> bool:
        """Return whether the object at a renamed file's own key may be newer than the rename.

        Its date is the second of the rename or later, and no commit that is known has removed or replaced it."""
        is_gone = self._tombstone(path).hides(there.etag, there.mtime_ns, by_date=False)
        return there.etag != entry.etag and not is_gone and there.mtime_ns + NS > entry.stamp

    def _adoption(self, path: str, row: ObjectRow, meta: ObjectMeta, *, is_replaced: bool) -> Change:
        """Return the change that gives a renamed file the new bytes; called while no commit is on its way.

        If the file ``is_replaced`` at its own key since, the old name only hides these bytes."""
        builder = ChangeBuilder(self._ns.tree)
        entry, now = self._renamed(path)
        if entry is not None and now is not None and now.number == row.number:  # its other names may have been removed
            found = learn(msgspec.structs.replace(entry, place=0, etag=meta.etag, size=meta.size), meta.metadata or {})
            before = ObjectRef(row.key, row.etag, row.size)
            if not is_replaced:
                builder.put(path, found, key=row.key, hides=entry.etag, replaces=before)
            self._hide_successor(builder, meta, row.etag, entry.stamp)
        doomed = [Deletion(meta.key, meta.etag)] if is_replaced and builder.operations else []
        return msgspec.structs.replace(builder.change(), doomed=doomed)

    def _hide_successor(self, builder: ChangeBuilder, meta: ObjectMeta, etag: str, time: int) -> None:
        """Add that the name of an object hides it, which replaced the version ``etag`` that was renamed at ``time``.

        The new bytes count as earlier than the rename; those of another program only if the store dates them before it.
        A new file that its writer created there, unaware of the renamed one, stays the file of the name."""
        there = self._ns.at(meta.key)
        is_of_name = there is not None and _has_bytes_of(there, self._ns.tree, replaced_since(meta, etag))
        is_later = not is_of_name and not self._is_given(meta.key, meta.etag, time)
        if (is_later and is_successor(meta, etag)) or not token_of(meta):
            hide_object(builder, self._ns.tree, meta.key, meta.etag)

    def _is_given(self, key: str, etag: str, time: int) -> bool:
        """Return whether the name ``key`` got another file at ``time``, and now is this object or nothing.

        A renamed object lay at this key. This one has come in place of that file, or was stored when that had been
        removed."""
        there = self._ns.at(key)
        is_free = there is None or (there.is_plain and there.etag == etag)
        return is_free and self._committer.gave_file(key, time)

    def _precedes_rename(self, row: ObjectRow, meta: ObjectMeta) -> bool:
        """Return whether the rename that took an object's name is later than what another program put there."""
        return meta.mtime_ns + NS <= self._tombstone(row.key).when_gone(row.etag)

    def _tombstone(self, path: str) -> Tombstone:
        return self._ns.tree.tombstones.get(path.encode(*schema.PATH)) or Tombstone(0)

    def _renamed(self, path: str) -> tuple[Entry, ObjectRow] | tuple[None, None]:
        """Return the file at a path, and the plain object at another key with its bytes; else None twice."""
        entry = self._ns.tree.named_at(path.encode(*schema.PATH))
        row = self._ns.tree.objects.get(entry.place) if entry is not None and entry.place else None
        if entry is None or entry.is_local or row is None or row.is_pack:
            return None, None
        return entry, row

    async def free(self, key: str) -> None:
        """Move the bytes of other names away from a key whose object is about to be replaced.

        The store copies them, and a commit tells where they are. Raises LakeError."""
        row = self._ns.tree.objects.used(key)
        if row is None:
            return
        target = key_of_copy(self._new_id(), ObjectRef(row.key, row.etag, row.size))
        try:
            copied = await copy_object(self._client, row.key, row.etag, row.size, target)
        except PreconditionFailed:  # already replaced, perhaps by this node, which died before it committed that
            for path, _ in self._named(row, await self._find_named(row)):
                await self.adopt(path)
            if self._ns.tree.objects.used(key) == row:
                raise
            await self.free(key)
            return
        found = await self._find_named(row)
        await self._committer.commit(lambda: self._move(row, copied, found))
        await self._moved(Version(row.key, row.etag, row.size), Version(copied.key, copied.etag, row.size))

    def _move(self, row: ObjectRow, copied: ObjectMeta, found: Iterable[int]) -> Change:
        """Return, at the commit's turn, the change that relocates the files of an object to its copy.

        For other nodes, a file whose rename is held still has its earlier names."""
        objects = [ObjectRef(), ObjectRef(row.key, row.etag, row.size), ObjectRef(copied.key, copied.etag, row.size)]
        moved = [
            Relocate(
                path, 1, entry.offset, "", 2, entry.offset, entry.size, entry.mode, entry.uid, entry.gid,
                entry.mtime_ns, hides=entry.etag if path == named else self._ns.own_etag(path),
            )
            for named, entry in self._named(row, found)
            for path in (named, *self._committer.names_before(named))
        ]  # fmt: skip
        return Change(operations=list(moved), objects=objects)

    async def _find_named(self, row: ObjectRow) -> list[int]:
        """Return the inodes of files with bytes in an object; other tasks run during the search."""
        found, names = dict[int, None](), self._ns.tree.below(ROOT_INODE, "")
        while len(found) < row.entries and (some := list(islice(names, NAMES_PER_STEP))):
            found |= dict.fromkeys(entry.inode for _, entry in some if entry.place == row.number)
            await trio.lowlevel.checkpoint()
        return list(found)

    def _named(self, row: ObjectRow, found: Iterable[int]) -> list[tuple[str, Entry]]:
        """Return the files that have their bytes in an object now, with their paths.

        ``found`` is what `_find_named` returned just before. If the object's count of entries shows that others have
        come since, all names are searched again in one step."""
        tree = self._ns.tree
        entries = [entry for inode in found if (entry := tree.entry(inode)) is not None and entry.place == row.number]
        now = tree.objects.get(row.number)
        if now is not None and len(entries) < now.entries:
            entries = [entry for _, entry in tree.below(ROOT_INODE, "") if entry.place == row.number]
        return [(self._ns.key(entry), entry) for entry in entries if not entry.is_local]
