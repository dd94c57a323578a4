"""Group commit of closed files to the local disk: one sync for their bytes and journal records, or one for each.

What always holds (*acknowledged is durable here*): a file is acknowledged (its `close()` answers 0) only after its
staged bytes and its journal record survive a crash of the machine. Staged bytes whose sync failed are refused until
they are written again.

The bytes of a group of at most `LOGGED_BYTES_MAX` are in the same batch as the records, so one sync makes both durable,
or neither. They are written to the segment as well, from which they are read, but the segment is not synced. The bytes
of a larger group are synced in the segment before the records are written. On ext4, XFS and Btrfs, syncing a new file
also makes its name in the staging directory durable.

A group of at most `INLINE_BYTES_MAX` is synced on the trio thread while the disk is prompt, because that takes less
time than waking a thread. While one group is being synced in a thread, the next gathers. A crash before the record is
written leaves an orphan; a crash after it leaves an acknowledged file, whether or not its writer was answered. Trio
thread only, except syncs in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

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
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue

LOGGED_BYTES_MAX = 32 << 10
"""Maximum bytes of a group that are synced with the records. Writing 50 KB twice takes as long as a second sync: see
ADR 0172."""
INLINE_BYTES_MAX = 4 << 20
"""Maximum bytes of a group that is synced on the trio thread."""
PROMPT_S = 0.004
"""Mean duration of a sync up to which the disk is prompt. On a busy node a group waits longer for a thread."""
log = logging.getLogger(__name__)


class Closing(msgspec.Struct, eq=False):
    """A file whose `close()` waits. ``done`` is called once, with the error or None; until then no other task uses the
    draft."""

    file: OpenFile
    draft: Draft
    done: Callable[[LakeError | None], None]
    sequence: int = 0
    spot: Spot | None = None
    data: bytes | None = None
    """All bytes of the file if they are in memory; None once they are written."""
    raw: bytes = b""
    saves: int = 0
    is_journaled: bool = False
    error: LakeError | None = None

    def end(self) -> None:
        try:
            self.done(self.error)
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
        queue: WriteBackQueue,
        committer: Committer,
    ) -> None:
        self._db, self._nursery, self._threads = database, nursery, threads
        self._journal = Journal(database)
        self.queue, self._committer = queue, committer
        self._closing: list[Closing] = []
        self._working = False
        self._disk = Promptness(clock, PROMPT_S)

    async def acknowledge(self, file: OpenFile, draft: Draft) -> None:
        """Make a draft's bytes and record durable on the local disk. The caller has exclusive use of the draft.

        Raises LakeError; then the draft is unchanged, except that bytes which the disk may have lost are refused."""
        if not draft.file.is_in_memory:
            await self._sync_staged(draft)
        ended = trio.Event()
        closing = Closing(file, draft, lambda _: ended.set())
        self.submit([closing])
        await ended.wait()
        if closing.error is None:
            return
        if not draft.sequence:
            draft.supersede(0)
            self.queue.restore_superseded(file)
        raise closing.error

    @staticmethod
    async def _sync_staged(draft: Draft) -> None:
        """Sync a staging file. Raises LakeError; then its staged bytes are refused until they are written again.

        Linux reports a failed write-out once, and then treats the pages as written: a later sync proves nothing."""
        with draft.file.held():
            assert draft.file.fd >= 0, "opened before the sync: where that fails nothing is lost"
            try:
                await draft.file.sync()
            except LakeError as error:
                staged = [(start, end) for start, end, is_staged in draft.pages.runs(0, draft.size) if is_staged]
                for start, end in staged:
                    draft.refused.add(start, end, error)
                if staged:
                    draft.refuse(*staged[-1], error)  # journals all of them
                raise

    def submit(self, closings: Sequence[Closing], rows: Batch | None = None) -> None:
        """Acknowledge files with the next group, or, new files on a prompt disk, before this returns.

        ``rows`` are the rows of new files, all in memory, that have no journal records yet. They are committed with
        these records when this returns. Raises CacheError if they cannot be; then nothing of the files is written, and
        no ``done`` is called."""
        if rows is not None:
            if closings and not self._working and self._is_quick(closings):
                self._commit_now(closings, rows)
                return
            self._journal_drafts(closings, rows)
        self._closing += closings
        if self._closing and not self._working:  # others join before the task runs
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
        linked = [closing for closing in group if _is_named(closing.file)]
        failure: LakeError | None = LakeError("the mount is ending")
        try:
            for write in self._steps(linked, Batch()) if linked else ():
                if self._is_quick(linked):
                    with self._disk.timed():
                        write()
                else:
                    await self._threads.run(write)
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

    def _commit_now(self, group: Sequence[Closing], rows: Batch) -> None:
        failure: LakeError | None = None
        try:
            for write in self._steps(group, rows):
                with self._disk.timed():
                    write()
        except OSError as error:  # of the bytes: the files exist all the same, and their drafts are unchanged
            self._journal_drafts(group, rows)
            failure = group[0].draft.uploader.staging.translate(error)
        except CacheError as error:
            if not group[0].is_journaled:
                raise
            failure = error
        for closing in group:
            closing.error = closing.error or failure
            closing.end()

    def _is_quick(self, group: Sequence[Closing]) -> bool:
        return self._disk.is_prompt and sum(closing.draft.size for closing in group) <= INLINE_BYTES_MAX

    def _journal_drafts(self, closings: Sequence[Closing], rows: Batch) -> None:
        """Commit ``rows`` with the records of drafts that are still being written. Raises CacheError."""
        for closing in closings:
            self._journal.put(rows, closing.draft.id, encode(closing.draft.prepare_record()))
        self._db.commit(rows)

    # -- what is done to all of a group

    def _steps(self, group: Sequence[Closing], batch: Batch) -> Iterator[Callable[[], None]]:
        """Yield the writes to the disk that a group needs, in order; the caller makes each before it asks for the next.

        ``batch`` gets the records, and is committed between the two writes. The rest is done around them. Raises
        CacheError."""
        for closing in group:
            closing.data = closing.draft.file.memory()
        is_logged = sum(len(closing.data or b"") for closing in group) <= LOGGED_BYTES_MAX
        segment = group[0].draft.uploader.staging.segments.group(is_synced=not is_logged)
        for closing in group:
            self._reserve(closing, segment)
        yield segment.write
        reached("accept.synced")
        for index, closing in enumerate(group):
            self._journal_one(closing, group[:index], batch)
            if closing.data is not None:  # putting None deletes bytes that a failed sync may have left
                self._journal.put_bytes(batch, closing.draft.id, closing.data if is_logged else None)
                closing.data = None
        segment.keep()  # RocksDB may have logged a batch whose write fails, and its records name these places
        self._db.commit(batch)
        for closing in group:
            closing.is_journaled = True
        yield self._db.sync
        reached("accept.recorded")
        for closing in group:
            self._end(closing)

    @staticmethod
    def _encode(closing: Closing) -> None:
        draft = closing.draft
        closing.raw = encode(draft.record(sequence=closing.sequence, spot=closing.spot))
        closing.saves = draft.saves

    def _reserve(self, closing: Closing, segment: Group) -> None:
        """Choose the place of the bytes. The record beside them is for recovery after the journal is lost."""
        closing.sequence = self.queue.next_sequence()
        if closing.data is not None:
            closing.spot = segment.spot(len(closing.data))
        self._encode(closing)
        if closing.data is not None:
            segment.add(closing.data, closing.raw)

    def _journal_one(self, closing: Closing, before: Sequence[Closing], batch: Batch) -> None:
        """Put a file's record into the batch. ``before`` are the files of the group with lower numbers.

        While the bytes were written, an older version may have been stored or the file renamed: then the record is
        encoded again."""
        superseded: list[Draft] = []
        if closing.file.behind:
            held = bool(self._committer.held_until)
            others = [other.draft for other in before]
            superseded = self.queue.supersede_older(closing.file, others, are_names_held=held)
        if superseded or closing.draft.saves != closing.saves:
            self._encode(closing)
        self._journal.put(batch, closing.draft.id, closing.raw)
        for older in superseded:
            self.queue.journal_superseded(batch, older)

    def _end(self, closing: Closing) -> None:
        draft = closing.draft
        if closing.spot is not None:
            draft.file.keep_in(closing.spot)
        draft.acknowledge(closing.sequence)
        closing.file.follow_draft()
        if draft.saves != closing.saves:  # it was renamed in the meantime, or its attributes changed
            try:
                draft.save(sync=True)
            except CacheError as error:  # it is published all the same, but does not survive a crash
                closing.error = error
        if _is_named(closing.file):
            self.queue.add(closing.file, draft)


def _is_named(file: OpenFile) -> bool:
    """Return whether the file has a name, or may keep it: a removal in progress can fail. If it does not, it ends what
    was acknowledged meanwhile."""
    return not file.unlinked or file.is_being_unlinked
