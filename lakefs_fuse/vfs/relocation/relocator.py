"""Plain objects follow their names: after a rename the store copies them to their new keys, for other S3 tools to find.

A rename is a commit and moves no bytes. Its objects are journaled as tasks; ``relocate_after_s`` later the store copies
each to the key of its new name, a commit says that the bytes are there, and the old object is deleted once every node
had time to see that. A name that changed again, is being written, or whose key another writer took, stays as it is: it
is readable through the commit that renamed it. A while after a rename the old key is checked once, whether or not the
object is copied: another node may have written there in place before it saw the rename.

What always holds (*one after the other*): changes of a name and copies to its key wait for each other
(`pending_copies`); a copy that is late all the same is hidden by a commit of its own, and deleted. After a crash the
next mount continues the tasks, and commits or deletes a copy without a commit. Trio thread only.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import islice

import msgspec
import trio

from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.record import OWN, THIS, ObjectRef, Put, Relocate
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import LakeError, NotFound, PreconditionFailed, Unsupported
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.meta.object_table import PACKS, ObjectRow
from lakefs_fuse.meta.rows import Deletion, TimedRows
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta, PartRef
from lakefs_fuse.sync.nursery import collecting
from lakefs_fuse.upload.publish import token_of
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.namespace.attributes import learn
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder, hide_object
from lakefs_fuse.vfs.pinning.pinner import Pinner
from lakefs_fuse.vfs.relocation.pending_copies import PATIENCE_S, PendingCopies, PendingCopy
from lakefs_fuse.vfs.writeback.reconciliation import is_copy

NS = 1_000_000_000
COPY_BYTES_MAX = 5 << 30
"""What S3 copies in one request."""
COPY_PART_BYTES = 1 << 30
"""More is copied in parts, where the store can: a change of the name waits for the last request only."""
ABORT_S_MAX = 5.0
"""Giving up a copy in parts waits so long for the store; what stays there is an unfinished upload, which `gc` ends."""
AT_ONCE = 4
KEPT_NS = 120 * NS
"""The old object stays for so long: nodes that read it learn meanwhile where the bytes are now."""
PAUSE_S = 0.5
LATER_NS = 60 * NS
TASKS_MAX = 256
"""Objects dealt with at a time."""
Moved = tuple[Version, Version]
"""An object, and the copy that has its place."""
REPLACED_SLACK_NS = 30 * NS
log = logging.getLogger(__name__)


class Task(msgspec.Struct, frozen=True, array_like=True):
    """A check of a renamed object's old key, or its copy. ``copy_ns``: when it is to be copied after the check (0:
    never). ``token`` is the object's, once it was checked."""

    path: str
    is_check: bool
    copy_ns: int = 0
    token: str = ""


class RelocationTasks:
    """A journaled queue of tasks, in the order of the times at which they are due."""

    def __init__(
        self, database: Database, metrics: CommitMetrics, clock: Clock, *, after_s: float, check_s: float
    ) -> None:
        """Objects are copied ``after_s`` after a rename (0: never); ``check_s`` after it every node has seen it."""
        self._db, self._metrics, self._clock = database, metrics, clock
        self._after_ns, self._check_ns = int(after_s * NS), max(1, int(check_s * NS))
        self._rows = TimedRows(database, schema.RELOCATION, Task)
        self._quiet_until_ns = 0
        self.waiting = self._rows.count()
        """Renamed objects still to be checked or copied."""

    def load(self, paths: Iterable[str]) -> None:
        """Schedule the copies that an earlier daemon began, for now. Raises CacheError."""
        batch = Batch()
        self._add(batch, self._clock.wall_ns(), [Task(path, False) for path in paths])
        self._db.commit(batch)

    def schedule(self, paths: Iterable[str]) -> None:
        """Schedule checks, and copies, of objects whose names a rename changed. Raises CacheError."""
        now = self._clock.wall_ns()
        copy_ns = now + self._after_ns if self._after_ns else 0
        batch = Batch()
        self._add(batch, now + self._check_ns, [Task(path, True, copy_ns) for path in paths])
        self._db.commit(batch)

    def _add(self, batch: Batch, due_ns: int, tasks: Iterable[Task]) -> None:
        self.waiting += self._rows.put(batch, due_ns, {task.path: task for task in tasks})

    def finish(self, due_ns: int, task: Task, following: Task | None) -> None:
        """The task is done; ``following`` is due at its ``copy_ns``, or in LATER_NS if that is 0. Raises CacheError."""
        batch = Batch()
        if following is not None:
            self._add(batch, task.copy_ns or self._clock.wall_ns() + LATER_NS, [following])
        self._rows.delete(batch, due_ns, task.path)
        self._db.commit(batch)
        self.waiting -= 1

    def take_due(self, *, is_rename_held: bool) -> Iterator[list[tuple[int, Task]]]:
        """Batches of tasks with the times at which they were due, until none is left. None is due for ``check_s`` after
        a rename ``is_rename_held`` back, because other nodes have not heard of it."""
        now_ns = self._clock.wall_ns()
        if is_rename_held:
            self._quiet_until_ns = now_ns + self._check_ns
        if now_ns < self._quiet_until_ns:
            return
        while due := list(islice(self._rows.due(now_ns), TASKS_MAX)):
            yield [(due_ns, task) for due_ns, _, task in due]

    def replaced_due_ns(self) -> int:
        """When an object that a rename replaces may go: after the renamed one was copied over it (wall clock)."""
        return self._clock.wall_ns() + self._after_ns + REPLACED_SLACK_NS if self._after_ns else 0

    def original_due_ns(self) -> int:
        """When the object that was copied just now may go (wall clock)."""
        return self._clock.wall_ns() + KEPT_NS

    @property
    def relocated(self) -> int:
        """Objects copied since the daemon began."""
        return self._metrics.relocated

    def count_relocated(self) -> None:
        self._metrics.relocated += 1


class Relocator:
    """Carries out the tasks: checks old keys, has the store copy objects, and commits where the bytes are."""

    def __init__(
        self,
        tasks: RelocationTasks,
        copies: PendingCopies,
        namespace: Namespace,
        files: FileTable,
        committer: Committer,
        deletions: DeletionQueue,
        client: StoreClient,
        pinner: Pinner,
    ) -> None:
        self.tasks, self.copies, self.pinner = tasks, copies, pinner
        self._ns, self._files, self._client = namespace, files, client
        self._committer, self._deletions = committer, deletions
        self._has_committed = False
        self._not_found: set[str] = set()
        """Pending copies that a HEAD did not find."""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await trio.sleep(PAUSE_S)
            try:
                await self.relocate_due()
            except LakeError as error:
                log.warning("renamed objects stay at their old keys for now: %s", error)
            except Exception:
                log.exception("copying renamed objects to their new keys")

    async def relocate_due(self) -> int:
        """Perform all tasks that are due; answers how many objects were copied. Raises LakeError."""
        before, self._has_committed = self.tasks.relocated, False
        for due in self.tasks.take_due(is_rename_held=bool(self._committer.held_until)):
            few = trio.CapacityLimiter(AT_ONCE)
            async with collecting() as nursery:
                for due_ns, task in due:
                    nursery.start_soon(self._perform, due_ns, task, few)
        if self._has_committed:
            await self._committer.flush()
        return self.tasks.relocated - before

    async def _perform(self, due_ns: int, task: Task, few: trio.CapacityLimiter) -> None:
        async with few:
            following = None
            if task.is_check:
                token = await self._check(task.path)
                if task.copy_ns:
                    following = Task(task.path, False, 0, token)
            elif not await self._relocate(task.path, task.token):
                following = task
            self.tasks.finish(due_ns, task, following)

    async def _check(self, path: str) -> str:
        """Answer the token of the object at a renamed file's old key, which another node may have changed before it
        saw the rename. New bytes there came before the rename: the name means those, and the old name hides them; those
        of another program only where the rename hides them anyway, as else they are a new file of the old name. A
        removal came before it, too: the name goes."""
        entry, row = self._renamed(path)
        if entry is None or row is None:
            return ""
        try:
            meta = await self._client.head(row.key)
        except NotFound:
            log.warning("%s: its bytes were at %s, which somebody else removed: the name goes, too", path, row.key)
            builder = ChangeBuilder(self._ns.tree)
            builder.remove(path, entry)
            self._committer.enqueue(builder.change())
            return ""
        if meta.etag == row.etag or self._renamed(path)[1] != row:
            return token_of(meta)
        if not token_of(meta) and not self._precedes_rename(row, meta):
            log.error("%s: its bytes were at %s, which another program replaced", path, row.key)
            return ""
        found = learn(msgspec.structs.replace(entry, place=0, etag=meta.etag, size=meta.size), meta.metadata or {})
        builder = ChangeBuilder(self._ns.tree)
        builder.put(path, found, key=row.key, hides=entry.etag)
        hide_object(builder, self._ns.tree, row.key, meta.etag)
        self._committer.enqueue(builder.change())
        return token_of(meta)

    def _precedes_rename(self, row: ObjectRow, meta: ObjectMeta) -> bool:
        """The rename that took an object's name away hides what another program put there: it came before."""
        tombstone = self._ns.tree.tombstones.get(row.key.encode(*schema.PATH))
        return tombstone is not None and tombstone.etag == row.etag and tombstone.hides(meta.etag, meta.mtime_ns)

    async def free(self, key: str) -> None:
        """Copy the objects of other names away from a key that is about to be replaced. Raises LakeError."""
        row = self._ns.tree.objects.used(key)
        if row is None:
            return
        for path, entry in self._ns.tree.below(ROOT_INODE, ""):
            if entry.place == row.number and not entry.is_local:
                with suppress(_NotCopied):
                    await self._copy(path, row, await self._token_at(key), must=True)
        await self._committer.flush()

    async def _token_at(self, key: str) -> str:
        there = await self._head(key)
        return "" if there is None else token_of(there)  # that it is gone the copy finds out, and tells

    async def _relocate(self, path: str, token: str) -> bool:
        """False where that has to be tried again later."""
        row, begun = self._object_elsewhere(path), self.copies.get(path)
        if begun is not None and (row is None or row.etag != begun.etag):
            await self._reconcile_copy(path, again=path in self._not_found)
            row = (
                self._object_elsewhere(path) if self.copies.get(path) is None else None
            )  # a copy of another may still come
        if row is not None:
            with suppress(_NotCopied):  # what waits there to be deleted still is, then
                async with self._deletions.keeping(path):
                    await self._copy(path, row, token)
        self._not_found = {each for each in (*self._not_found, path) if self.copies.get(each) is not None}
        return path not in self._not_found and not self.copies.is_held(path)

    async def _reconcile_copy(self, path: str, *, again: bool = False) -> None:
        """Ask the store for the outcome of a copy that is not under way, and commit it. The row stays while a file
        waits to be stored over the copy; and where there is none, until it is asked for ``again``: a daemon that
        crashed may have sent the request a moment ago. Raises LakeError."""
        moved = None
        async with self.copies.copying(path):
            begun = self.copies.get(path)
            copied = None if begun is None or self._files.is_aimed_at(path) else await self._head(path)
            if begun is None or self._files.is_aimed_at(path) or (copied is None and not again):
                return
            if copied is not None and begun.matches(copied, token_of(copied)):
                moved = self._commit_copy(path, copied, begun.etag)
            self.copies.end(path)
        await self._move_pins(moved)

    @asynccontextmanager
    async def hold_copies(self, *paths: str) -> AsyncIterator[None]:
        """As `PendingCopies.hold`, for a change of these names: the outcome of pending copies is known first, if the
        store answers in time."""
        async with self.copies.hold(*paths, patience_s=PATIENCE_S):
            with trio.move_on_after(PATIENCE_S):
                for path in self.copies.ended_at_or_below(paths):
                    try:
                        await self._reconcile_copy(path)
                    except LakeError as error:
                        log.warning("%s, whose name changes, may have been copied there: %s", path, error)
            yield

    def _renamed(self, path: str) -> tuple[Entry, ObjectRow] | tuple[None, None]:
        """The file at a path, if its bytes are a plain object elsewhere."""
        above, _, name = path.rpartition("/")
        directory = self._ns.directory(above)
        entry = None if directory is None else self._ns.tree.named(directory, name.encode())
        row = self._ns.tree.objects.get(entry.place) if entry is not None and entry.place else None
        if entry is None or entry.is_local or row is None or row.is_pack or entry.offset or entry.size != row.size:
            return None, None
        return entry, row

    def _object_elsewhere(self, path: str) -> ObjectRow | None:
        """The object at another key that has the bytes of a path's file; None where its own key is not free."""
        if self._files.is_aimed_at(path) or self._ns.tree.objects.used(path) is not None:
            return None
        return self._renamed(path)[1]

    async def _copy(self, path: str, row: ObjectRow, token: str, *, must: bool = False) -> None:
        """``must``: even while the name is changed. Raises LakeError, and _NotCopied where the bytes stay where they
        are."""
        try:
            async with self._prepared(path, row) as finish, self.copies.copying(path):
                if self.copies.is_held(path) and not must:
                    raise _NotCopied
                moved = await self._finish(path, row, token, finish)
        except (NotFound, PreconditionFailed) as error:
            log.error(
                "%s: its bytes were at %s, which was replaced or removed by somebody else: %s", path, row.key, error
            )
            raise _NotCopied from error
        except Unsupported as error:
            log.info("%s stays at %s: this store does not copy objects of %d bytes", path, row.key, row.size)
            raise _NotCopied from error
        await self._move_pins(moved)

    async def _finish(
        self, path: str, row: ObjectRow, token: str, finish: Callable[[], Awaitable[ObjectMeta]]
    ) -> Moved | None:
        """Make the copy visible, and commit it."""
        there = await self._head(path)
        entry, now = self._renamed(path)
        if entry is None or now is None or now.number != row.number:
            raise _NotCopied
        if there is None or there.etag == entry.etag:
            self._ns.changing(entry.parent, entry.name)
            self.copies.begin(path, PendingCopy(row.etag, token))
            try:
                copied = await finish()
            except (NotFound, PreconditionFailed, Unsupported):
                self.copies.end(path)
                raise
        elif await is_copy(self._client, there.etag, token_of(there), row.key):
            copied = there  # by a daemon that died, and did not come to say so
        else:
            self.copies.end(path)
            raise _NotCopied  # somebody else's; the next listing shows it
        moved = self._commit_copy(path, copied, row.etag)
        self.copies.end(path)
        return moved

    @asynccontextmanager
    async def _prepared(self, path: str, row: ObjectRow) -> AsyncIterator[Callable[[], Awaitable[ObjectMeta]]]:
        """Copy the parts of a large object; yields the one request that makes the copy visible. Without it the upload
        is aborted."""
        in_parts = self._client.capabilities.part_copy and row.size > COPY_PART_BYTES
        if not in_parts and row.size > COPY_BYTES_MAX:
            raise Unsupported("parts cannot be copied")
        if not in_parts:
            yield partial(self._client.copy, row.key, path, etag=row.etag)
            return
        metadata = (await self._client.head(row.key)).metadata
        upload_id = await self._client.create_multipart(path, metadata=metadata)
        completed = False

        async def complete() -> ObjectMeta:
            nonlocal completed
            meta = await self._client.complete_multipart(path, upload_id, refs)
            completed = True
            return meta

        try:
            refs: list[PartRef] = []
            for number, start in enumerate(range(0, row.size, COPY_PART_BYTES), 1):
                end = min(start + COPY_PART_BYTES, row.size)
                refs.append(
                    await self._client.upload_part_copy(path, upload_id, number, row.key, start, end, etag=row.etag)
                )
            yield complete
        finally:
            if not completed:
                with trio.move_on_after(ABORT_S_MAX, shield=True):
                    await self._client.abort_multipart(path, upload_id)

    def _commit_copy(self, path: str, copied: ObjectMeta, etag: str) -> Moved | None:
        """Journal that a copy of the object with this ETag is at the path's own key: the name is that now, or, if it
        changed meanwhile, the copy is hidden and deleted. Raises CacheError."""
        self._has_committed = True
        entry, row = self._renamed(path)
        if entry is None or row is None or row.etag != etag:
            builder = ChangeBuilder(self._ns.tree)
            hide_object(builder, self._ns.tree, path, copied.etag)
            nobodys = Deletion(path, copied.etag)
            self._committer.enqueue(msgspec.structs.replace(builder.change(), doomed=[nobodys]))
            return None
        moved = Relocate(
            path, 1, 0, "", OWN, 0, entry.size, entry.mode, entry.uid, entry.gid, entry.mtime_ns, hides=copied.etag
        )
        old = Deletion(row.key, row.etag, due_ns=self.tasks.original_due_ns())
        objects = [ObjectRef(), ObjectRef(row.key, row.etag, row.size)]
        self._committer.enqueue(Change(operations=[moved], objects=objects, doomed=[old]))
        self.tasks.count_relocated()
        return Version(row.key, row.etag, row.size), Version(path, copied.etag, row.size)

    async def _move_pins(self, moved: Moved | None) -> None:
        if moved is not None:
            await self.pinner.moved(*moved)

    async def _head(self, key: str) -> ObjectMeta | None:
        try:
            return await self._client.head(key)
        except NotFound:
            return None


class _NotCopied(Exception):
    """The bytes of a name stay where they are."""


def renamed_objects(change: Change) -> list[str]:
    """Paths that a rename gave to plain objects at other keys."""
    return [
        operation.path
        for operation in change.operations
        if isinstance(operation, Put)
        and operation.object > THIS
        and not change.objects[operation.object].key.startswith(PACKS)
        and change.objects[operation.object].key != operation.path
    ]
