"""Packs small files that are closed at the same time into one object.

A file that is closed alone becomes a plain object, which every S3 tool can read. A file that is closed while others are
closed or written waits `GATHER_S_MAX` at most for them, and all are committed with one PUT. While one pack is being
sent, the next gathers; it waits for as many files as were seen to close at the same time. Trio thread only.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import msgspec
import trio

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Extent, Version
from lakefs_fuse.commits.archive import Member
from lakefs_fuse.commits.change import OPERATIONS_AT_ONCE, Change
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.record import THIS, Operation, Put
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, FileError, LakeError, Unavailable
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.rows import Deletion, Journal
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.staging.draft_record import DraftState, encode
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder, RowSnapshot
from lakefs_fuse.vfs.writeback.publish_plan import superseded_at

if TYPE_CHECKING:
    from lakefs_fuse.vfs.files.open_file import OpenFile

GATHER_S_MAX = 0.05
"""The longest that a close waits for others to join."""
PACK_FILES_MAX = OPERATIONS_AT_ONCE
FILES_BETWEEN_PAUSES = 32
CACHED_BYTES_MAX = 64 << 20
"""Packs are not written to the cache while this many bytes wait for its disk; reads then fetch them from the store."""
ERRNOS_OF_NODE = errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.ENXIO
"""Errors of the node, not of one file: no descriptors, no room on the cache disk, no bucket."""
log = logging.getLogger(__name__)


class UnreadableDrafts(LakeError):
    """The bytes of some acknowledged files of a pack cannot be read, so nothing was committed. ``errors`` has an error
    for each of their drafts, by its id."""

    def __init__(self, errors: dict[str, LakeError]) -> None:
        super().__init__(f"{len(errors)} files of a pack cannot be read")
        self.errors = errors


@dataclass(slots=True)
class Waiting:
    """A file that waits for a pack. ``packed``: it is in one; ``error``: why it could not be stored."""

    file: OpenFile
    draft: Draft
    data: bytes
    alone_is_plain: bool
    path: str = ""
    """The file's path in the commit; empty before the commit is made."""
    packed: bool = False
    error: BaseException | None = None
    done: trio.Event = field(default_factory=trio.Event)

    @property
    def entry(self) -> Entry:
        """The row of the version that waits: a newer one may have begun since."""
        return (self.file.owner_of(self.draft) or self.file).entry


def refuse_path(file: OpenFile, draft: Draft) -> NoReturn:
    """Fail the draft of a file whose path is too long for a key, as after another node's rename of its directory: no
    node could read a commit with that path. Raises FileError(ENAMETOOLONG), CacheError."""
    error = FileError(errno.ENAMETOOLONG, f"the path of {file.key} is too long: other nodes could not read it")
    draft.fail_publish(error, "publishing")
    draft.save(sync=not draft.sequence)
    raise error


class Packer:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        committer: Committer,
        namespace: Namespace,
        cache: BlockCache,
        metrics: CommitMetrics,
        nursery: trio.Nursery,
        threads: Threads,
        being_written: Callable[[int], int],
    ) -> None:
        """``being_written(bytes_max)`` counts files up to that size that are being written, and not being sent yet."""
        self._db, self._journal = database, Journal(database)
        self._committer, self._ns, self._cache, self._metrics = committer, namespace, cache, metrics
        self._nursery, self._threads = nursery, threads
        self._being_written = being_written
        self._waiting: list[Waiting] = []
        self._arrived = trio.Event()
        self._working = False
        self._in_flight = 0
        self._bytes_to_cache = 0
        self._at_once = 0
        self._idle = 0

    @property
    def _bytes_max(self) -> int:
        return self._committer.pack_bytes_max

    def are_others_closing(self, threshold_bytes: int, plain_in_progress: int) -> bool:
        """Return whether other small files are being closed or written, so that one that closes can share a commit.
        Files that were closed together ask one after the other: none of them is waiting or sent when the first does.

        ``plain_in_progress`` is the number of files that are being stored as plain objects."""
        if self._waiting or self._in_flight or plain_in_progress:
            return True
        return self._others_write(threshold_bytes, asking=1)

    async def submit(
        self, file: OpenFile, draft: Draft, threshold_bytes: int, plain_in_progress: int, *, alone_is_plain: bool
    ) -> bool:
        """Commit a small file together with others.

        Returns False if no other joined and the file must be a plain object. ``plain_in_progress`` is the number of
        other files that are being stored as plain objects. The caller holds ``draft.gate``. Raises LakeError.
        """
        others = len(self._waiting) + self._in_flight + plain_in_progress
        await draft.fill(0, draft.size)
        waiting = Waiting(file, draft, await draft.file.read(0, draft.size), alone_is_plain)
        self._waiting.append(waiting)
        self._at_once = max(self._at_once, others + 1)
        self._arrived.set()
        if not self._working:
            self._working = True
            self._nursery.start_soon(self._work, threshold_bytes)
        try:
            await waiting.done.wait()
        except trio.Cancelled:  # the file may be removed before its turn comes
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            raise
        if waiting.error is not None:
            raise waiting.error
        return waiting.packed

    async def commit_pack(self, files: list[tuple[OpenFile, Draft]], passed: list[Draft]) -> None:
        """Store acknowledged files in one commit, which also supersedes the versions in ``passed``.

        Raises LakeError; UnreadableDrafts if some files cannot be read, without which the others can be committed. Then
        nothing was committed."""
        batch, unreadable = list[Waiting](), dict[str, LakeError]()
        for number, (file, draft) in enumerate(files, 1):
            waiting = Waiting(file, draft, b"", False)
            try:
                self._ns.keys.check_paths([file.key])
                if draft.base is not None:
                    await draft.fill(0, draft.size)
                waiting.data = await draft.file.read(0, draft.size)
            except LakeError as error:
                if isinstance(error, Unavailable) or error.errno in ERRNOS_OF_NODE:
                    raise
                self._failed(waiting, error)
                unreadable[draft.id] = FileError(error.errno, str(error))
            batch.append(waiting)
            if not number % FILES_BETWEEN_PAUSES:
                await trio.lowlevel.checkpoint()
        if unreadable:
            raise UnreadableDrafts(unreadable)
        await self._commit(batch, passed)
        for waiting in batch:
            if waiting.error is not None:
                raise waiting.error

    async def _work(self, threshold: int) -> None:
        batch: list[Waiting] = []
        try:
            while self._waiting:
                await self._gather(threshold)
                batch = self._take()
                if len(batch) == 1 and batch[0].alone_is_plain:
                    batch[0].done.set()
                    continue
                self._in_flight = len(batch)
                await self._commit(batch)
                self._in_flight = 0
        finally:
            self._working, self._in_flight = False, 0
            for waiting in (*batch, *self._waiting):
                if not waiting.done.is_set():
                    waiting.error = waiting.error or LakeError("the mount is ending")
                    waiting.done.set()
            self._waiting.clear()

    async def _gather(self, threshold: int) -> None:
        with trio.move_on_after(GATHER_S_MAX) as patience:
            while len(self._waiting) < PACK_FILES_MAX and sum(len(w.data) for w in self._waiting) < self._bytes_max:
                enough = len(self._waiting) >= self._at_once
                if enough and (self._at_once > 1 or not self._others_write(threshold)):
                    return
                self._arrived = trio.Event()
                await self._arrived.wait()
        if patience.cancelled_caught:
            self._at_once = len(self._waiting)
            if self._at_once == 1:
                self._idle = self._others_written(threshold)

    def _others_written(self, threshold: int, asking: int = 0) -> int:
        """Return how many small files are being written that are not here, without those that are ``asking``."""
        return max(0, self._being_written(threshold) - len(self._waiting) - asking)

    def _others_write(self, threshold: int, asking: int = 0) -> bool:
        """Return whether another writer may soon close a small file. Files that stay open, as logs do, count once."""
        writing = self._others_written(threshold, asking)
        self._idle = min(self._idle, writing)
        return writing > self._idle

    def _take(self) -> list[Waiting]:
        taken, size = 0, 0
        for waiting in self._waiting[:PACK_FILES_MAX]:
            size += len(waiting.data)
            if taken and size > self._bytes_max:
                break
            taken += 1
        batch, self._waiting = self._waiting[:taken], self._waiting[taken:]
        return batch

    async def _commit(self, batch: list[Waiting], passed: list[Draft] | None = None) -> None:
        try:
            for waiting in batch:
                waiting.draft.begin_publish()
            members = [self._member(waiting) for waiting in batch]
            drafts = [*(each.draft for each in batch), *(passed or ())]
            made = await self._committer.commit(
                partial(self._change, batch), members, before_put=partial(self._note, drafts)
            )
            if not made.ref.key:
                raise FileError(errno.ENOENT, "every file of a pack was removed before it was sent")
        except BaseException as error:
            for waiting in batch:
                self._failed(waiting, error)
            if not isinstance(error, Exception):
                raise
            if not isinstance(error, LakeError):
                log.exception("committing %d files", len(batch))
            return
        self._metrics.packs += 1
        self._metrics.files_packed += len(batch)
        self._metrics.bytes_packed += sum(len(waiting.data) for waiting in batch)
        self._metrics.batch_files_max = max(self._metrics.batch_files_max, len(batch))
        version = Version(made.ref.key, made.ref.etag, made.ref.size)
        for waiting, offset in zip(batch, made.offsets, strict=True):
            waiting.draft.fill_pack(Extent(version, offset, len(waiting.data)))
            waiting.packed = True
        try:
            self._move_along(batch)
        except CacheError as error:  # the store has the bytes all the same
            log.error("files of %s may be seen under earlier names, too: remove these (%s)", version.key, error)
        for waiting in batch:
            waiting.done.set()
        if self._bytes_to_cache < CACHED_BYTES_MAX:
            self._bytes_to_cache += version.size
            self._nursery.start_soon(self._cache_pack, version, made.body)

    async def _cache_pack(self, version: Version, body: bytes) -> None:
        view = memoryview(body)
        blocks = [view[at : at + BLOCK_BYTES] for at in range(0, len(view), BLOCK_BYTES)]
        try:
            await self._threads.run(self._cache.write_runs, [(version, 0, blocks)])
        except Exception:  # reads fetch the blocks again; an error would end the nursery, which others share
            log.exception("writing %s to the cache", version.key)
        finally:
            self._bytes_to_cache -= version.size

    async def _note(self, drafts: list[Draft], key: str) -> None:
        """Journal the key of the commit that will contain these drafts: the next daemon finds them by it in the store.

        The records of acknowledged drafts are synced, so that they survive a power cut. Raises CacheError."""
        for at in range(0, len(drafts), FILES_BETWEEN_PAUSES):
            batch = Batch()
            for draft in drafts[at : at + FILES_BETWEEN_PAUSES]:
                draft.name_commit(key)
                self._journal.put(batch, draft.id, encode(draft.prepare_record()))
            self._db.commit(batch)
            await trio.lowlevel.checkpoint()
        if any(draft.sequence for draft in drafts):
            await self._threads.run(self._db.sync)

    @staticmethod
    def _failed(waiting: Waiting, error: BaseException) -> None:
        draft = waiting.draft
        if draft.state is DraftState.DISCARDED:  # its close was cancelled and the file removed
            waiting.error = FileError(errno.ENOENT, f"{waiting.file.key} was removed")
            waiting.done.set()
            return
        waiting.error = draft.fail_publish(error, "committing")
        try:
            draft.save(sync=not draft.sequence)
        except LakeError as unsaved:
            log.error("what is staged of %s could not be noted: %s", waiting.file.key, unsaved)
        waiting.done.set()

    @staticmethod
    def _member(waiting: Waiting) -> Member:
        entry = waiting.entry
        return Member(
            waiting.file.key, waiting.data, len(waiting.data), entry.mode, entry.mtime_ns, entry.uid, entry.gid
        )

    def _change(self, batch: list[Waiting]) -> Change:
        """Return the change that names the files. Called when the commit's turn has come, because names may move until
        then. Raises FileError(ENAMETOOLONG)."""
        operations: list[Operation] = []
        doomed: list[Deletion] = []
        for index, waiting in enumerate(batch):
            file, entry = waiting.file, waiting.entry
            if file.unlinked:
                continue
            self._ns.keys.check_paths([file.key])
            waiting.path = file.key
            hides = self._ns.own_etag(file.key, entry.parent)
            xattrs = self._ns.tree.xattrs(entry.inode)
            operations.append(
                Put(
                    file.key, THIS, index, len(waiting.data), entry.mode, entry.uid, entry.gid, entry.mtime_ns,
                    hides=hides, xattrs=xattrs,
                )
            )  # fmt: skip
            doomed += superseded_at(file.key, hides, is_reserved=file.key in self._committer.journal.reserved)
        return Change(operations=operations, doomed=doomed)

    def _move_along(self, batch: list[Waiting]) -> None:
        """Enqueue a change for files that another node's rename moved while the commit was being sent.

        The commit names them by their earlier paths; the change gives these bytes the new names. If another file had
        come to an earlier path, which the commit replaced, it is back there, unless a file of this pack gets that path:
        an exchange moves both. Raises CacheError."""
        builder, doomed, moved = ChangeBuilder(self._ns.tree), list[Deletion](), dict[str, tuple[Entry, Extent]]()
        for waiting in batch:
            path = waiting.file.key
            row = self._ns.at(waiting.path) if waiting.path not in ("", path) and not waiting.file.unlinked else None
            packed = waiting.draft.packed
            if row is None or packed is None or self._ns.extent(row) != packed:
                continue
            try:
                self._ns.keys.check_paths([path])
            except FileError as error:
                log.error("other nodes see %s under its earlier name %s: %s", path, waiting.path, error)
                continue
            hides = self._ns.own_etag(path)
            builder.put(path, row, hides=hides)
            moved[waiting.path] = row, packed
            doomed += superseded_at(path, hides, is_reserved=path in self._committer.journal.reserved)
        arrived = {operation.path for operation in builder.operations}
        for path, (row, packed) in moved.items():
            if path not in arrived and not self._put_back(path, row, packed):
                builder.remove(path, row)
        if builder.operations:
            self._committer.enqueue(msgspec.structs.replace(builder.change(), doomed=doomed, ahead=True))

    def _put_back(self, path: str, row: Entry, packed: Extent) -> bool:
        """Enqueue the file that would be at a path without a member of a pack; return whether there is one.

        ``row`` is the member's. Raises CacheError."""
        version = packed.version.key, packed.offset, packed.version.etag
        said = self._committer.find_without(path, row, {version})
        if said is None or said.current is None:
            return False
        before, objects = said.current, self._ns.tree.objects
        place = objects.get(before.place) if before.place else None
        rows = RowSnapshot(
            {} if place is None else {before.place: place},
            {before.inode: said.target},
            {before.inode: said.xattrs or {}},
        )
        builder = ChangeBuilder(rows)
        if before.is_plain:
            builder.put_again(path, before, 0, before.stamp)
        else:
            builder.put(path, before, hides=before.etag)
        self._committer.enqueue(msgspec.structs.replace(builder.change(), ahead=True))
        return True
