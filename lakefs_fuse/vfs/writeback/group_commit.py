"""Group commit of closed files to the local disk: their bytes, then their journal records, with one sync of each.

What always holds (*acknowledged is durable here*): a file is acknowledged (its `close()` answers 0) only after its
staged bytes and then its journal record survive a crash of the machine. Syncing a new file makes its name in the
staging directory durable too on ext4, XFS and Btrfs. A group of no more than `INLINE_BYTES_MAX` is synced on the trio
thread while the disk is prompt, which takes less than waking a thread for it; while another is being synced in a thread
the next gathers. A crash before the record is there leaves an orphan, after it an acknowledged file, whether or not its
writer was answered. Trio thread only, but for such syncing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import trio

from lakefs_fuse.blockcache.disk_latency import Promptness
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.failpoints import reached
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.staging.draft_record import encode
from lakefs_fuse.staging.segments import Group, Spot
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.writeback.queue import WriteBack

INLINE_BYTES_MAX = 4 << 20
PROMPT_S = 0.004
"""A sync on the average; a thread makes a group wait longer than this where there is much to do."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class Closing:
    """A file whose `close()` waits; ``done`` is called when it waits no more."""

    file: OpenFile
    draft: Draft
    done: Callable[[], None]
    sequence: int = 0
    spot: Spot | None = None
    raw: bytes = b""
    saves: int = 0
    error: LakeError | None = None
    has_ended: bool = False

    def end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            try:
                self.done()
            except Exception:
                log.exception("%s was closed", self.file.key)


class GroupCommit:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        nursery: trio.Nursery,
        threads: Threads,
        clock: Clock,
        queue: WriteBack,
        committer: Committer,
    ) -> None:
        self._db, self._nursery, self._threads = database, nursery, threads
        self._journal = Journal(database)
        self.queue, self._committer = queue, committer
        self._closing: list[Closing] = []
        self._working = False
        self._disk = Promptness(clock, PROMPT_S)

    async def acknowledge(self, file: OpenFile, draft: Draft) -> None:
        """The draft's bytes are durable here when this returns. The caller holds it alone. Raises LakeError; then the
        draft is as it was."""
        if not draft.file.is_in_memory:
            await draft.file.sync()
        done = trio.Event()
        closing = Closing(file, draft, done.set)
        self._add(closing)
        await done.wait()
        if closing.error is None:
            return
        if not draft.accepted:
            draft.supersede(0)
            self.queue.restore_superseded(file)
        raise closing.error

    def submit(self, file: OpenFile, draft: Draft, done: Callable[[LakeError | None], None]) -> None:
        """As `acknowledge`, of a draft in memory that supersedes none; ``done`` is called with the error, if any."""
        closing = Closing(file, draft, lambda: done(closing.error))
        self._add(closing)

    def _add(self, closing: Closing) -> None:
        self._closing.append(closing)
        if not self._working:  # others come before it runs
            self._working = True
            self._nursery.start_soon(self._work)

    async def _work(self) -> None:
        try:
            while self._closing:
                group, self._closing = self._closing, []
                await self._commit_group(group)
        finally:
            self._working = False
            for closing in self._closing:
                closing.error = LakeError("the mount is ending")
                closing.end()
            self._closing.clear()

    async def _commit_group(self, group: list[Closing]) -> None:
        linked = [closing for closing in group if not closing.file.unlinked]
        failure: LakeError | None = LakeError("the mount is ending")
        try:
            if linked:
                await self._commit_linked(linked)
            failure = None
        except OSError as error:
            failure = linked[0].draft.uploader.staging.translate(error)
        except CacheError as error:
            failure = error
        finally:
            for closing in linked:
                closing.error = closing.error or failure
            for closing in group:
                closing.end()

    async def _commit_linked(self, group: list[Closing]) -> None:
        segment, batch = self._reserve_all(group), Batch()
        await self._write(group, segment.write)
        self._journal_all(group, batch)
        self._db.commit(batch)
        segment.keep()  # whether or not the records are safe, they name it
        await self._write(group, self._db.sync)
        self._end_all(group)

    async def _write(self, group: list[Closing], write: Callable[[], None]) -> None:
        """Writing something of the group to the disk, in a thread where that may take long."""
        if not self._is_quick([closing.draft for closing in group]):
            await self._threads.run(write)
            return
        with self._disk.timed():
            write()

    def _is_quick(self, drafts: Iterable[Draft]) -> bool:
        return self._disk.is_prompt and sum(draft.size for draft in drafts) <= INLINE_BYTES_MAX

    # -- new files, without waiting

    def may_acknowledge_now(self, drafts: Sequence[Draft]) -> bool:
        """`acknowledge_now` is worth it, of drafts that are all in memory, and whose gates nobody holds."""
        return bool(drafts) and not self._working and self._is_quick(drafts)

    def acknowledge_now(self, files: Sequence[tuple[OpenFile, Draft]], batch: Batch) -> LakeError | None:
        """As `acknowledge`, of files whose rows are in ``batch``, and that the journal has no records of. Answers the
        error, if any: then the files are there, and their drafts as they were. Raises CacheError: nothing is there."""
        group = [Closing(file, draft, lambda: None) for file, draft in files]
        try:
            segment = self._reserve_all(group)
            with self._disk.timed():
                segment.write()
        except OSError as error:
            for _, draft in files:
                self._journal.put(batch, draft.id, encode(draft.prepare_record()))
            self._db.commit(batch)
            return group[0].draft.uploader.staging.translate(error)
        self._journal_all(group, batch)
        self._db.commit(batch)
        segment.keep()
        try:
            with self._disk.timed():
                self._db.sync()
        except CacheError as error:
            return error
        self._end_all(group)
        return None

    # -- what is done to all of a group

    def _reserve_all(self, group: list[Closing]) -> Group:
        segment = group[0].draft.uploader.staging.segments.group()
        for closing in group:
            self._reserve(closing, segment)
        return segment

    def _journal_all(self, group: list[Closing], batch: Batch) -> None:
        reached("accept.synced")
        for index, closing in enumerate(group):
            self._journal_one(closing, group[:index], batch)

    def _end_all(self, group: list[Closing]) -> None:
        reached("accept.recorded")
        for closing in group:
            self._end(closing)

    @staticmethod
    def _encode(closing: Closing) -> None:
        draft = closing.draft
        closing.raw = encode(draft.record(accepted=closing.sequence, spot=closing.spot))
        closing.saves = draft.saves

    def _reserve(self, closing: Closing, segment: Group) -> None:
        """Choose where the bytes will be; the record beside them is for the day when the journal is lost."""
        draft, closing.sequence = closing.draft, self.queue.next_sequence()
        data = draft.file.memory()
        if data is not None:
            closing.spot = segment.spot(len(data))
        self._encode(closing)
        if data is not None:
            segment.add(data, closing.raw)

    def _journal_one(self, closing: Closing, before: list[Closing], batch: Batch) -> None:
        """The record as things are now: while the bytes were written, a version before may have been stored, or the
        file renamed. ``before`` are of the same group, with lower numbers."""
        superseded: list[Draft] = []
        if closing.file.behind:
            held = bool(self._committer.held_until)
            others = [other.draft for other in before]
            superseded = self.queue.supersede_older(closing.file, others, are_names_held=held)
        if superseded or closing.draft.saves != closing.saves:
            self._encode(closing)
        self._journal.put(batch, closing.draft.id, closing.raw)
        for older in superseded:
            if older.is_unknown_to_store:
                older.file.mark_ended()
                self._journal.delete(batch, older.id)
            else:  # what the store has of it has to go, or is recognised as ours, even if this daemon dies
                gone = msgspec.structs.replace(older.record(), unlinked=True)
                self._journal.put(batch, older.id, encode(gone))

    def _end(self, closing: Closing) -> None:
        draft = closing.draft
        if closing.spot is not None:
            draft.file.keep_in(closing.spot)
        draft.acknowledge(closing.sequence)
        if draft.saves != closing.saves:  # it was renamed meanwhile, or its attributes changed
            try:
                draft.save(sync=True)
            except CacheError as error:  # on its way all the same, but not safe from a crash
                closing.error = error
        if not closing.file.unlinked:
            self.queue.add(closing.file, draft)
