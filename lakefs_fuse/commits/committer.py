"""Changes of names made here, on their way into the store: journaled, gathered, one PUT for each batch.

What always holds:

* *one at a time*: one commit is written at a time, and includes every change journaled before it, in order, but for
  what is held: a change that came after files which write-back acknowledged waits until they are in the store, and so
  does what was journaled behind it, unless it belongs to one of those files (`Change.ahead`);
* *bounded*: journaled changes of more than OPERATIONS_AT_ONCE operations are sent in several commits, in order. A
  change with its own turn (`commit`) comes after those, with what was journaled meanwhile;
* *in effect*: a journaled change (`enqueue`) is in effect here at once, survives a crash of the daemon, and is in the
  store at most ``delay_s`` later, or when `flush` returns; a committed change (`commit`) is in effect here and
  everywhere when the call returns, or nowhere. Where the disk fails between the journal and the names, the change is in
  effect before it is sent, and before any other is planned;
* *with the pack*: new directories and attributes of directories alone are not sent while files wait for a pack, but
  with it, `WITH_PACK_S_MAX` later at most (not where hints are used): see ADR 0166;
* *never twice*: after a PUT whose answer was lost, the store is asked for the commit before anything is sent again;
* *overtaken*: a commit of another node that is newer wins here, too, whether it was polled before this node's PUT was
  answered or after;
* *names first*: a commit removes names before the deletion queue deletes their objects;
* *announced soon*: a plain object that no operation names (`announce_stored`) is in the next commit, or ``delay_s``
  later in one of its own, with others. Announcements are hints in memory: where that commit fails they are in a later
  one. No call waits for them: a commit that only announces has no turn among the others.

Trio thread only. A crash before the PUT leaves the journal, which the next mount sends. A crash after it leaves a
commit and the journal, with a row from before the PUT that says which changes the commit has: the next mount applies
the rest.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import accumulate, islice
from typing import Protocol

import trio
from msgspec.structs import replace

from lakefs_fuse.commits.applier import Applier
from lakefs_fuse.commits.archive import Member
from lakefs_fuse.commits.change import (
    OPERATIONS_AT_ONCE,
    BeforeSending,
    Change,
    Committed,
    Sending,
    Unsure,
    is_of_directory,
    merged,
    paths_of,
    relocations,
)
from lakefs_fuse.commits.change_journal import ChangeJournal
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.future_commits import Redated, Redater, linked, still_newest
from lakefs_fuse.commits.hybrid_clock import WINDOW_NS
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.record import STORED_MAX, Mkdir, ObjectRef, Put, Record, Remove, SetAttr
from lakefs_fuse.environment.failpoints import reached
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import CacheError, DamagedCommit, LakeError, NotFound
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import PENDING
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.sync.wakeup import Wakeup

NS = 1_000_000_000
ASK_S_MAX = 5.0
"""HEAD of a commit whose PUT failed may take so long, before the error is raised."""
LATE_NS = WINDOW_NS // 2
"""Polls may be past a commit that is in the store this long after its time; another one repeats it. See WINDOW_NS."""
ANNOUNCED_MAX = 1 << 16
"""Objects that are not announced yet, some 10 MB; others find more of them when they list the directory."""
PAUSE_S_FIRST, PAUSE_S_MAX = 0.5, 15.0
PROMPT_S = 0.02
"""In place of ``delay_s`` where others hear of a commit at once: files that close together share an announcement all
the same, and a mount that stores one after the other comes to ``delay_s``."""
WITH_PACK_S_MAX = 30.0
"""So long directories wait for a pack that is to be sent: as long as the files of a burst do by default."""
WITH_PACK_OPERATIONS_MAX = OPERATIONS_AT_ONCE // 4
"""More of them do not wait, or the pack would be applied in steps."""
logger = logging.getLogger(__name__)


class AcknowledgedOrder(Protocol):
    """What write-back acknowledged, by numbers in order; changes of names wait for it."""

    @property
    def progressed(self) -> Wakeup:
        """Rings when changes that were held may be sent; the committer rings it for those that it journals."""
        ...

    @property
    def has_files_for_pack(self) -> bool:
        """Small files wait for others, and are committed with them in a while."""
        ...

    def is_durable_up_to(self, sequence: int) -> bool:
        """Every version up to this number is in the store, or never will be."""
        ...


class NothingAcknowledged:
    """Of a node without write-back."""

    def __init__(self) -> None:
        self.progressed = Wakeup()
        self.has_files_for_pack = False

    def is_durable_up_to(self, sequence: int) -> bool:
        return True


class Gathering:
    """How long to wait for more before something is sent: ``first_s``, and twice as long each time, up to ``most_s``,
    while more comes as soon as the last was sent."""

    def __init__(self, most_s: float, first_s: float) -> None:
        self._most_s, self._first_s = most_s, min(first_s, most_s)
        self._pause_s, self._sent_s = self._first_s, -math.inf

    async def pause(self) -> None:
        """Wait, for the next time from now on."""
        is_busy = trio.current_time() - self._sent_s < 2 * self._pause_s
        self._pause_s = min(self._most_s, 2 * self._pause_s) if is_busy else self._first_s
        await trio.sleep(self._pause_s)
        self._sent_s = trio.current_time()


class Committer:
    """See the module's head. Trio thread only."""

    def __init__(
        self,
        log: CommitLog,
        applier: Applier,
        deletions: DeletionQueue,
        journal: ChangeJournal,
        metrics: CommitMetrics,
        threads: Threads,
        *,
        delay_s: float = 1.0,
        acknowledged: AcknowledgedOrder | None = None,
    ) -> None:
        self._db, self._log, self._applier, self.journal = journal.database, log, applier, journal
        self._deletions, self._metrics, self._threads, self._delay_s = deletions, metrics, threads, delay_s
        self._clock, self.writer = log.clock, log.writer
        self._lock = trio.Lock()
        self._acknowledged = NothingAcknowledged() if acknowledged is None else acknowledged
        self._writer_before = ""
        """Who committed from this cache directory before."""
        self.unsure: Unsure | None = None
        """A commit that failed, and is perhaps in the store: see `reconcile`."""
        self._unapplied_why = CacheError("")
        """How the disk failed while the newest change was put in effect (`ChangeJournal.unapplied`)."""
        self._late: tuple[Record, ObjectRef] | None = None
        """A commit that came so late that polls may be past its time. Another one repeats it before anything else is
        sent; its `Sending` row stays until then."""
        self._sent_as_of: set[int] = set()
        """Times of commits that were sent with a time of the past, also of those that failed and may be in the store
        later: none has another body under the same key. Older than LATE_NS they are forgotten."""
        self._stored: dict[str, None] = {}
        """Paths of plain objects that are not announced yet, the oldest first."""
        self._has_stored = trio.Event()
        self.error: LakeError | None = None
        """Why the last attempt to send what is journaled failed."""

    def load(self) -> None:
        """Put in effect what the last daemon left in the journal; called once."""
        self._writer_before = tables.writer_of(self._db)
        self.journal.load()
        if tables.reapply_wanted(self._db):
            for sequence, change in self.journal.changes.items():
                self._applier.apply_pending(change, PENDING | sequence)
            tables.reapplied(self._db)
        elif self.journal.unapplied in self.journal.changes:
            change = self.journal.changes[self.journal.unapplied]
            self._applier.apply_pending(change, PENDING | self.journal.unapplied)
        self.journal.end_applying()
        if self.journal.changes:
            self._acknowledged.progressed.wake_all()

    async def reconcile_journal(self) -> None:
        """Ask the store whether it has the commit that the last daemon was sending when it ended. Where it has, the
        changes in it leave the journal, and their rows get its time instead of the pending stamp that is newer than any
        commit; what else it says is applied. To be called after `load` and before the first poll: the poll would
        otherwise hold what it says for older than these rows, or apply it over what came after. Raises LakeError."""
        async with self._lock:
            await self._reconcile_sending()

    async def redate_before(self) -> bool:
        """Commit again what the last daemon of this cache directory dated too far ahead; returns whether it did.
        Raises LakeError."""
        done = Redated()
        if self._metrics.future and self._writer_before:
            async with self._lock:
                done = await self._redate({self._writer_before})
        tables.set_writer(self._db, self.writer)
        return bool(done.originals)

    async def redate(self) -> None:
        """Where the clock went back: commit again what this daemon dated too far ahead. Raises LakeError."""
        async with self._lock:
            await self._redate_if_behind()

    async def _redate_if_behind(self) -> None:
        if self._clock.went_back:
            done = await self._redate({self.writer})
            self._applier.commits.forget_since(done.oldest_ns or self._clock.wall_ns() - WINDOW_NS)
            self._clock.confirm_redated()

    async def _redate(self, writers: set[str]) -> Redated:
        done = await Redater(self._log).run(writers, repeated=self._applier.redate)
        self._metrics.redated += len(done.originals)
        if done.originals:
            logger.warning(
                "%d commits of this node were dated in the future: what they say was committed again, but for %d of "
                "%d changes that others made again since; `lakefs-fuse fsck --repair` removes them",
                len(done.originals), done.superseded, done.superseded + done.operations,
            )  # fmt: skip
        return done

    def set_attributes_again(self) -> None:
        """Commits were applied again: attributes that are in none yet were undone by that. Raises CacheError."""
        for sequence, change in self.journal.changes.items():
            said = [each for each in change.operations if isinstance(each, SetAttr)]
            if said:
                again = replace(change, operations=said, moves=[])
                self._applier.apply_pending(again, PENDING | sequence)

    @property
    def bundles_written(self) -> int:
        """As `CommitLog.bundles_written`."""
        return self._log.bundles_written

    @property
    def digests_written(self) -> int:
        """Digests of listings that this mount put."""
        return self._log.digests.written

    @property
    def pack_bytes_max(self) -> int:
        """Bytes that the next pack may have: see `PackBudget`."""
        return self._log.budget.bytes_max

    @property
    def held_until(self) -> int:
        """What write-back has to have stored before everything journaled can be sent; 0 where nothing is held."""
        return max((change.after for change in self.journal.changes.values() if self._is_held(change)), default=0)

    def _is_held(self, change: Change) -> bool:
        return bool(change.after) and not self._acknowledged.is_durable_up_to(change.after)

    def _sendable(self) -> dict[int, Change]:
        return dict(self._each_sendable())

    def _each_sendable(self) -> Iterator[tuple[int, Change]]:
        """What is journaled and not held, the oldest first. Not to be kept over an await."""
        held = False
        for sequence, change in self.journal.changes.items():
            held = held or self._is_held(change)
            if not held or (change.ahead and not self._is_held(change)):
                yield sequence, change

    def _first_sendable(self) -> dict[int, Change]:
        """As many as one commit has."""
        first: dict[int, Change] = {}
        size = 0
        for sequence, change in self._each_sendable():
            size += _size(change)
            if first and size > OPERATIONS_AT_ONCE:
                break
            first[sequence] = change
        return first

    def _is_more_than_one_commit(self, newest: int) -> bool:
        """Of what is journaled up to ``newest``, and not held."""
        sizes = (_size(change) for sequence, change in self._each_sendable() if sequence <= newest)
        return any(size > OPERATIONS_AT_ONCE for size in accumulate(sizes))

    @property
    def _has_sendable(self) -> bool:
        return next(self._each_sendable(), None) is not None

    def may_have(self, path: str) -> bool:
        """A commit that names the path may be in the store, and not in effect here."""
        return self.unsure is not None and any(each.path == path for each in self.unsure.record.operations)

    def mentions(self, key: str) -> bool:
        """What is journaled, and not held, speaks of the object at ``key``: see `Change.mentioned`."""
        return any(key in self.journal.mentioned[sequence] for sequence, _ in self._each_sendable())

    def removes(self, path: str) -> bool:
        """What is journaled, and not held, removes a file, and says nothing of its name after that."""
        named = [each for change in self._sendable().values() for each in change.operations if each.path == path]
        return bool(named) and isinstance(named[-1], Remove)

    def names_before(self, path: str) -> Iterator[str]:
        """Paths at which other nodes have a file, the newest first, because renames of it are not in the store yet."""
        for change in reversed(self.journal.changes.values()):
            for source, target in change.moves:
                if path == target or path.startswith(target + "/"):
                    path = source + path[len(target) :]
                    yield path
                    break

    # -- journaled changes

    def enqueue(self, change: Change, batch: Batch | None = None) -> None:
        """Make a change here now, and everywhere within ``delay_s``; journaled with ``batch``. One that is journaled
        when the disk fails is made all the same: see *in effect*. The next one, which may have been planned before
        that is in effect, fails as the disk did. Raises CacheError; then nothing happened."""
        if self.journal.unapplied:
            self._apply_unapplied()
            raise self._unapplied_why
        batch = Batch() if batch is None else batch
        if change.ahead:
            sendable = self._sendable()
            passed = [each for each in self.journal.changes if each not in sendable]
            self._supersede(batch, paths_of(change.operations), passed)
        sequence = self.journal.append(change, batch)
        try:
            self._applier.apply_pending(change, PENDING | sequence)
            self.journal.end_applying()
        except CacheError as error:
            self._unapplied_why = error
            logger.warning("%d changes of names are not in effect yet: %s", len(change.operations), error)
        self._acknowledged.progressed.wake_all()

    def _apply_unapplied(self) -> None:
        """Put the newest change in effect where the disk failed before it was. The kernel may have looked since. Raises
        CacheError."""
        if self.journal.unapplied:
            change = self.journal.changes[self.journal.unapplied]
            self._applier.apply_pending(change, PENDING | self.journal.unapplied, quiet=False)
            self.journal.end_applying()

    def retire(self, doomed: Deletion) -> None:
        """An object goes when what is journaled now is in the store: others need it until then. Raises CacheError."""
        if self.journal.changes:
            self.enqueue(Change(doomed=[doomed]))
        else:
            self._deletions.schedule(doomed)

    def announce_stored(self, path: str) -> None:
        """This node has stored the plain object at a path, which no commit names: other nodes learn that it is new."""
        if len(self._stored) < ANNOUNCED_MAX:
            self._stored[path] = None
            self._has_stored.set()

    def _supersede(self, batch: Batch, paths: set[str], passed: Iterable[int], time: int = 0) -> None:
        """Changes about these paths are being sent ahead of the held ones (``passed``). Remove the paths from the held
        ones, so that they do not bring back stale locations. With ``time``, rows that the held ones set become older
        than that."""
        for sequence in passed:
            change = self.journal.changes.get(sequence)
            if change is None:
                continue
            gone = [each for each in change.operations if each.path in paths and not is_of_directory(each)]
            if not gone:
                continue
            kept = [each for each in change.operations if each not in gone]
            moves = [pair for pair in change.moves if not paths.intersection(pair)]
            if time:
                said = [each for each in gone if not isinstance(each, SetAttr)]
                self._applier.restamp([(replace(change, operations=said), PENDING | sequence)], time)
            self.journal.replace(batch, sequence, replace(change, operations=kept, moves=moves))

    def read_again(self, since: int) -> None:
        """The next poll applies commits from this time on again. Raises CacheError."""
        self._applier.commits.forget_after(since - 1)

    def withhold(self, path: str, since: int, until: int, newest: int) -> None:
        """The versions of a file that were acknowledged from ``since`` on are superseded. Held changes that came after
        them, up to ``newest``, and name its older bytes do not show these in their place; the rest of them waits for
        what was acknowledged up to ``until``. Raises CacheError."""
        batch = Batch()
        for sequence, change in self.journal.changes.items():
            if sequence > newest:
                break
            gone = [each for each in change.operations if isinstance(each, Put) and each.path == path]
            if change.after < since or not gone:
                continue
            self._applier.restamp([(replace(change, operations=gone), PENDING | sequence)], self._clock.now())
            kept = [each for each in change.operations if each not in gone]
            moves = [pair for pair in change.moves if path not in pair]
            after = max(change.after, until)
            self.journal.replace(batch, sequence, replace(change, operations=kept, moves=moves, after=after))
        self._db.commit(batch)

    def _record_passed(self, sending: Sending, record: Record) -> None:
        """The commit was sent ahead of held changes: they do not name objects from which it has relocated bytes."""
        if sending.passed:
            batch = Batch()
            self._supersede(batch, set(sending.paths), sending.passed, sending.time - 1)
            places = relocations(_own_part(record, sending))
            for sequence in sending.passed if places else ():
                change = self.journal.changes.get(sequence)
                if change is not None and not places.keys().isdisjoint(change.objects):
                    objects = [places.get(ref, ref) for ref in change.objects]
                    self.journal.replace(batch, sequence, replace(change, objects=objects))
            self._db.commit(batch)

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """No commit is on its way: what it says of names was looked up before."""
        async with self._lock:
            yield

    async def run(self) -> None:
        """Send what is journaled, once in ``delay_s`` or with a pack, for as long as the mount lives."""
        backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        gathering = Gathering(self._delay_s, PROMPT_S if self._log.is_announced else self._delay_s)
        while True:
            while not (self._has_sendable or self._late or self.journal.unapplied):
                await self._acknowledged.progressed.wait()
            await gathering.pause()
            with trio.move_on_after(WITH_PACK_S_MAX):
                while self._is_for_pack():
                    await self._acknowledged.progressed.wait()
            try:
                await self.flush()
                backoff.reset()
            except LakeError as error:
                logger.warning("%d changes of names are not in the store yet: %s", self.journal.operations, error)
                await trio.sleep(backoff.next_s())
            except Exception as error:
                self.error = LakeError(f"committing failed: {error!r}")
                logger.exception("committing")
                await trio.sleep(PAUSE_S_MAX)

    def _is_for_pack(self) -> bool:
        """What is journaled, and not held, only makes or changes directories, and files wait for a pack: these are
        shown with it. Where others hear of a commit at once, they must hear of this, too."""
        if self._log.is_announced or not self._acknowledged.has_files_for_pack:
            return False
        every = (each for _, change in self._each_sendable() for each in change.operations)
        operations = list(islice(every, WITH_PACK_OPERATIONS_MAX + 1))
        return 0 < len(operations) <= WITH_PACK_OPERATIONS_MAX and all(isinstance(each, Mkdir) for each in operations)

    async def run_announcements(self) -> None:
        """Announce what was stored, once in ``delay_s``, for as long as the mount lives, unless a commit does before.
        A failure is not worth a warning: others see these objects all the same, only later."""
        backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        gathering = Gathering(self._delay_s, PROMPT_S if self._log.is_announced else self._delay_s)
        while True:
            await self._has_stored.wait()
            await gathering.pause()
            self._has_stored = trio.Event()
            try:
                await self.flush_announcements()
                backoff.reset()
            except LakeError as error:
                logger.debug("%d stored objects are not announced yet: %s", len(self._stored), error)
                self._has_stored.set()
                await trio.sleep(backoff.next_s())
            except Exception:
                logger.exception("announcing")
                self._has_stored.set()
                await trio.sleep(PAUSE_S_MAX)

    async def flush(self) -> None:
        """Everything journaled before the call, and not held, is in the store when this returns. Raises LakeError."""
        await self.reconcile()
        wanted = self.journal.newest
        while next(self._each_sendable(), (wanted + 1, None))[0] <= wanted:
            await self._commit(None, ())

    async def flush_announcements(self) -> None:
        """What was stored before the call is announced when this returns. Raises LakeError."""
        for _ in range(0, len(self._stored), STORED_MAX):
            if stored := self._oldest_stored():  # else a commit came first
                await self._announce(stored)

    async def _announce(self, stored: list[str]) -> None:
        record = Record(writer=self.writer, time=self._clock.now(), stored=stored)
        self._forget_stored(stored)
        try:
            this = await self._log.put_record(record)
        except BaseException:
            self._metrics.failures += 1
            self._announce_again(stored)
            raise
        self._metrics.count_commit(0)
        self._applier.apply(record, this, own=True)
        if self._clock.wall_ns() - record.time > LATE_NS:
            self._announce_again(stored)

    def _oldest_stored(self) -> list[str]:
        """Paths for one commit."""
        return list(islice(self._stored, STORED_MAX))

    def _forget_stored(self, stored: list[str]) -> None:
        """They are about to be sent; one that is stored again from here on is announced again."""
        for path in stored:
            self._stored.pop(path, None)

    def _announce_again(self, stored: list[str]) -> None:
        """Others have not heard of these."""
        self._stored = dict.fromkeys(stored) | self._stored

    # -- commits

    async def commit(
        self,
        change: Change | Callable[[], Change] | Callable[[], Awaitable[Change]],
        members: Sequence[Member] = (),
        *,
        before_put: BeforeSending | None = None,
        in_steps: bool = False,
    ) -> Committed:
        """Make a change everywhere, with the bytes of ``members`` in the same object. A function is called when its
        turn has come, and what it raises is raised; ``before_put`` gets the commit's key before anything is sent.
        ``in_steps``: the function raises the barrier before the names of its change, and lowers it after the call.
        Raises LakeError; then nothing of it was made, or (where the store did not answer) all of it may appear later.
        """
        return await self._commit(change, members, before_put, in_steps=in_steps)

    async def _commit(
        self,
        change: Change | Callable[[], Change] | Callable[[], Awaitable[Change]] | None,
        members: Sequence[Member],
        before_put: BeforeSending | None = None,
        *,
        in_steps: bool = False,
    ) -> Committed:
        async with self._lock:
            try:
                await self._redate_if_behind()
                await self._reconcile()
                newest = self.journal.newest
                while change is not None and self._is_more_than_one_commit(newest):
                    await self._send(None, (), None, in_steps=False)
                    await self._reconcile()
                made = change() if callable(change) else change
                if isinstance(made, Awaitable):
                    made = await made
                committed = await self._send(made, members, before_put, in_steps=in_steps)
                self.error = None
            except LakeError as error:
                self.error = error
                raise
            if self._late is not None:
                try:
                    await self._reconcile()
                except LakeError as error:  # the caller's commit is in the store all the same: `run` tries again
                    logger.warning("commit %s is not repeated yet: %s", committed.ref.key, error)
            return committed

    async def _send(
        self, change: Change | None, members: Sequence[Member], before_put: BeforeSending | None, *, in_steps: bool
    ) -> Committed:
        self._apply_unapplied()
        journaled = self._first_sendable() if change is None else self._sendable()
        changes = [*journaled.values(), *([change] if change is not None else [])]
        if not any(each.operations for each in changes):
            self._drop(journaled, self._clock.now())
            self.journal.end_sending()
            return Committed(ObjectRef(), b"")
        time = self._clock.now()
        self._metrics.clock_jumps, self._metrics.clock_offset_s = self._clock.jumps, self._clock.offset_ns / NS
        key = self._log.key(time)
        if before_put is not None:
            await before_put(key)
        records: list[Record] = []
        places: list[int] = []
        stored = self._oldest_stored()

        def make_record(offsets: Sequence[int]) -> Record:
            places.extend(offsets)
            records.append(replace(merged(changes, self.writer, time, offsets), stored=stored))
            return records[0]

        body = await self._log.build(members, make_record, is_large=in_steps)
        own, doomed = (change.operations, change.doomed) if change is not None else ([], [])
        passed = [each for each in self.journal.changes if own and each not in journaled]
        sending = Sending(
            time, key, list(journaled), passed, sorted(paths_of(own)) if passed else [],
            sum(len(each.operations) for each in journaled.values()),
            sum(len(each.moves) for each in journaled.values()),
        )  # fmt: skip
        if journaled or passed:
            self.journal.begin_sending(sending)
            await self._threads.run(self._db.sync)  # or a power cut leaves a commit that nobody knows
        reached("commit.noted")
        self._forget_stored(stored)
        try:
            meta = await self._put(key, body, Unsure(records[0], doomed))
        except BaseException:
            self._announce_again(stored)
            raise
        reached("commit.sent")
        self._metrics.count_commit(len(records[0].operations))
        this = ObjectRef(key, meta.etag, len(body))
        if self._clock.wall_ns() - time > LATE_NS:
            self._announce_again(stored)
            self._set_late(records[0], this)
        with trio.CancelScope(shield=True):  # or the caller would not learn of a commit that is in the store
            await self._record_commit(sending, journaled, doomed, records[0], this, in_steps=in_steps)
        return Committed(this, body, places)

    async def _put(self, key: str, body: bytes, unsure: Unsure) -> ObjectMeta:
        """Where the PUT fails, the store is asked whether it was made all the same. Raises LakeError."""
        try:
            return await self._log.put(key, body)
        except LakeError:
            self._metrics.failures += 1
            self.unsure = unsure
            with trio.move_on_after(ASK_S_MAX):
                try:
                    meta = await self._log.head(key)
                    self.unsure = None
                    return meta
                except NotFound:
                    self.unsure = None
                except LakeError:
                    pass
            raise
        except BaseException:
            self._metrics.failures += 1
            raise

    async def reconcile(self) -> None:
        """What is journaled is in effect, no commit that failed is in the store without being in effect here, and none
        came so late that others miss it. Raises LakeError."""
        if self.unsure is not None or self._late is not None or self.journal.unapplied:
            async with self._lock:
                await self._reconcile()

    async def _reconcile(self) -> None:
        """As `reconcile`; what comes next builds on that. The caller holds the lock."""
        self._apply_unapplied()
        await self._reconcile_sending()
        await self._reconcile_unsure()
        if self._late is not None:
            while self._late is not None:
                self._late = await self._repeat_commit(*self._late)
            self.journal.end_sending()

    async def _reconcile_unsure(self) -> None:
        """An earlier commit failed, and the store did not say whether it has it."""
        if self.unsure is None:
            return
        record = self.unsure.record
        try:
            meta = await self._log.head(self._log.key(record.time))
        except NotFound:
            self.unsure = None
            return
        this = self._found(record, meta)
        if not self._applier.commits.is_applied(record.time, self.writer):
            self._applier.apply(record, this)
        for doomed in self.unsure.doomed:
            self._deletions.schedule(doomed)
        if self._late is not None:
            self._end_sending(Sending(record.time, this.key))
        self.unsure = None

    def _found(self, record: Record, meta: ObjectMeta) -> ObjectRef:
        """The store has a commit of which no answer came; by its date it may have come late."""
        this = ObjectRef(meta.key, meta.etag, meta.size)
        if meta.mtime_ns - record.time > LATE_NS:
            self._set_late(record, this)
        return this

    def _set_late(self, record: Record, this: ObjectRef) -> None:
        self._late = record, this
        self._acknowledged.progressed.wake_all()

    def _end_sending(self, sent: Sending) -> None:
        """The commit is in the store, and in effect here. The row of a late one stays until another has repeated it.
        Raises CacheError."""
        if self._late is None:
            self.journal.end_sending()
        elif self.journal.sending is None:
            self.journal.begin_sending(sent)

    async def _repeat_commit(self, record: Record, this: ObjectRef) -> tuple[Record, ObjectRef] | None:
        """The PUT took so long that polls may be past the commit's time: another one repeats its operations, but for
        those on names of which later commits speak, of nodes that saw this one or not. What is at the source of a
        rename now is not what was renamed, which has moved here. Returns that one where it came late, too. Raises
        LakeError."""
        logger.warning("commit %s took long to store: another commit repeats its changes", this.key)
        change = linked(this, record, await still_newest(self._log, record))
        if not change.operations:
            return None
        again = replace(
            record, writer=self.writer, time=self._clock.now(),
            objects=change.objects, operations=change.operations, stored=[],
        )  # fmt: skip
        this = await self._log.put_record(again)
        self._applier.apply(replace(again, moves=[]), this, own=True)
        return (again, this) if self._clock.wall_ns() - again.time > LATE_NS else None

    async def commit_as_of(self, change: Change, time: int) -> None:
        """Commit what belongs to another node's commit of this ``time``: later commits stand above it, heard of or not.
        Where polls may be past that time, and for a pending change, it is a commit of now. Raises LakeError."""
        async with self._lock:
            await self._reconcile()
            if time < PENDING and self._clock.wall_ns() - time <= LATE_NS:
                await self._send_as_of(change, time)
                return
        await self.commit(lambda: change)

    async def _send_as_of(self, change: Change, time: int) -> None:
        oldest = self._clock.wall_ns() - LATE_NS
        self._sent_as_of = {each for each in self._sent_as_of if each > oldest}
        time += 1
        while time in self._sent_as_of or self._applier.commits.is_applied(time, self.writer):
            time += 1
        self._sent_as_of.add(time)
        record = merged([change], self.writer, time, range(1))
        body = await self._log.build((), lambda _: record)
        meta = await self._put(self._log.key(time), body, Unsure(record, []))
        this = ObjectRef(meta.key, meta.etag, len(body))
        if self._clock.wall_ns() - time > LATE_NS:
            self._set_late(record, this)
        self._applier.apply(record, this)
        self._end_sending(Sending(time, this.key))

    async def _record_commit(
        self,
        sending: Sending,
        journaled: dict[int, Change],
        doomed: list[Deletion],
        record: Record,
        this: ObjectRef,
        *,
        in_steps: bool,
    ) -> None:
        """Record that a commit is in the store. What cannot be recorded here is applied by the next poll."""
        try:
            self._drop(journaled, record.time)
            self._record_passed(sending, record)
            part = _own_part(record, sending)
            if in_steps:
                await self._applier.apply_behind_barrier(part, this, own=True, whole=False)
            else:
                self._applier.apply(part, this, own=True, whole=False)
            self._end_sending(sending)
            if doomed:
                batch = Batch()
                for each in doomed:
                    self._deletions.add(batch, each)
                self._db.commit(batch)
        except CacheError as error:
            logger.error("commit %s is in the store, but that could not be noted here: %s", this.key, error)

    def _drop(self, journaled: dict[int, Change], time: int) -> None:
        """Journaled changes are in the store under this commit time. Attributes that were set again since, and are in
        no commit yet, stay as they are here. What others committed later, and was polled meanwhile, has met pending
        stamps, which are newer than any commit: it is applied again."""
        self._applier.commits.forget_after(time)
        is_attributed = any(isinstance(each, SetAttr) for change in journaled.values() for each in change.operations)
        later = {
            each.path: sequence
            for sequence, change in (self.journal.changes.items() if is_attributed else ())
            if sequence not in journaled
            for each in change.operations
            if isinstance(each, SetAttr)
        }
        pending: list[tuple[Change, int]] = []
        for sequence, change in journaled.items():
            counts = [
                each
                for each in change.operations
                if not isinstance(each, SetAttr) or later.get(each.path, 0) < sequence
            ]
            pending.append((replace(change, operations=counts), PENDING | sequence))
        self._applier.restamp(pending, time)
        batch = Batch()
        self.journal.delete(batch, journaled)
        for sequence, change in journaled.items():
            for doomed in self.journal.changes.get(sequence, change).doomed:  # some were waived since, perhaps
                self._deletions.add(batch, doomed)
        self._db.commit(batch)
        self.journal.forget(journaled)

    async def _reconcile_sending(self) -> None:
        """An earlier commit with journaled changes was sent, and its answer is not known."""
        sending = self.journal.sending
        if sending is None:
            return
        try:
            meta = await self._log.head(sending.key)
            record = await self._log.fetch(meta)
        except NotFound:
            self.journal.pass_over_sending()
            return
        except DamagedCommit as error:  # nobody takes it: what is journaled is sent again
            logger.error("%s", error)
            self.journal.end_sending()
            return
        done = {
            sequence: self.journal.changes[sequence]
            for sequence in sending.sequences
            if sequence in self.journal.changes
        }
        self._drop(done, sending.time)
        self._record_passed(sending, record)
        this = self._found(record, meta)
        if not self._applier.commits.is_applied(record.time, record.writer):
            self._clock.follow(record.time)
            self._applier.apply(_own_part(record, sending), this, whole=False)
        self._end_sending(sending)


def _size(change: Change) -> int:
    """In operations; a change without any takes its time, too."""
    return max(1, len(change.operations))


def _own_part(record: Record, sending: Sending) -> Record:
    """What a commit says besides the journaled changes in it, which are in effect here, or were changed again since."""
    return replace(record, operations=record.operations[sending.operations :], moves=record.moves[sending.moves :])
