"""Commits this node's changes of names: journals them, gathers them, and stores each batch with one PUT.

What always holds:

* *one at a time*: one commit is sent at a time. It includes every change journaled before it, in order, except held
  ones. A change is held until the files that write-back acknowledged before it are in the store; changes journaled
  behind it are held too, unless they belong to one of those files (`Change.ahead`);
* *bounded*: journaled changes of more than OPERATIONS_AT_ONCE operations are sent in several commits, in order. A
  change that a caller commits (`commit`) goes into the last of these, with what was journaled meanwhile;
* *in effect*: a journaled change (`enqueue`) takes effect here at once and survives a crash of the daemon. Unless it is
  held, it is sent after at most ``delay_s``, or by `flush`. A committed change (`commit`) is in effect here and visible
  to all nodes when the call returns, or nowhere. If the disk gets full after a change was journaled, its rows stay in
  memory (`Database.commit_volatile`), and so do those of a change that was committed. If that is not possible (memory
  is used up, the disk fails in another way), the change takes effect before another is planned; a journaled one also
  before it is sent;
* *newer versions stay*: no journaled change removes or replaces a version that another node stored after it was
  journaled, and of which this node has heard: see `withdrawal`;
* *with the pack*: while files wait for a pack, changes that only make directories or set their attributes wait for it
  as well, `WITH_PACK_S_MAX` at most (not if hints are used): see ADR 0166;
* *never twice*: if the answer to a PUT is lost, the store is asked for that commit before any change is sent again;
* *overtaken*: a newer commit of another node wins here too, whether it is polled before this node's PUT is answered or
  after;
* *names first*: a commit removes names before the deletion queue deletes their objects;
* *announced soon*: a plain object that no operation names (`announce_stored`) is in the next commit, or after
  ``delay_s`` in one that has the changes of names that wait, or, if there are none, only announces. If that commit
  fails, or the daemon ends before it, a later one announces them (`Unannounced`). A commit that only announces does not
  wait for its turn among the others.

Trio thread only. A crash before the PUT leaves the journal, which the next mount sends. A crash after the PUT leaves
the commit, the journal, and a row, written before the PUT, that says which changes the commit contains: the next mount
applies the rest.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence, Set
from contextlib import asynccontextmanager, suppress
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
from lakefs_fuse.commits.file_rules import Step
from lakefs_fuse.commits.future_commits import Redated, Redater, linked, still_newest
from lakefs_fuse.commits.hybrid_clock import LATE_NS, WINDOW_NS
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.record import (
    STORED_MAX,
    Mkdir,
    ObjectRef,
    Operation,
    Put,
    Record,
    Remove,
    SetAttr,
    refuse_unreadable,
)
from lakefs_fuse.commits.withdrawal import CatchUp, Withdrawal
from lakefs_fuse.environment.failpoints import reached
from lakefs_fuse.errors import CacheError, DamagedCommit, LakeError, NotFound
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import PENDING, Entry
from lakefs_fuse.meta.rows import Deletion, UnannouncedRows
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.sync.wakeup import Wakeup

NS = 1_000_000_000
ASK_S_MAX = 5.0
"""After a PUT fails, the HEAD that looks for the commit may take this long; then the error is raised."""
UNANNOUNCED_MAX = 1 << 16
"""Maximum of stored objects that wait for their announcement, some 10 MB. Other nodes find further ones when they list
the directory."""
PAUSE_S_FIRST, PAUSE_S_MAX = 0.5, 15.0
PROMPT_S = 0.02
"""First pause before sending, in place of ``delay_s``, if hints make other nodes poll at once. Files that close
together still share an announcement, and a mount that stores one file after the other gets to ``delay_s``."""
WITH_PACK_S_MAX = 30.0
"""Maximum time for which changes of directories wait for a pack: as long as the files of a burst do by default."""
WITH_PACK_OPERATIONS_MAX = OPERATIONS_AT_ONCE // 4
"""More operations than this do not wait for a pack, or the pack would be applied in steps."""
logger = logging.getLogger(__name__)


class AcknowledgedOrder(Protocol):
    """Order of the versions that write-back acknowledged, by sequence number; changes of names wait for them."""

    @property
    def progressed(self) -> Wakeup:
        """Woken when held changes may be sent. The committer wakes it, too, for changes that it journals."""
        ...

    @property
    def has_files_for_pack(self) -> bool:
        """True while small files wait for a pack, which is committed before long."""
        ...

    def is_durable_up_to(self, sequence: int) -> bool:
        """Return whether every version up to this number is in the store, or never will be."""
        ...


class NothingAcknowledged:
    """The order of a node without write-back, on which no change is ever held."""

    def __init__(self) -> None:
        self.progressed = Wakeup()
        self.has_files_for_pack = False

    def is_durable_up_to(self, sequence: int) -> bool:
        return True


class Gathering:
    """Pauses before something is sent, so that more is sent with it.

    A pause takes ``first_s``; it doubles, up to ``most_s``, if it begins within two pauses of the end of the last one.
    """

    def __init__(self, most_s: float, first_s: float) -> None:
        self._most_s, self._first_s = most_s, min(first_s, most_s)
        self._pause_s, self._sent_s = self._first_s, -math.inf

    async def pause(self) -> float:
        """Sleep for the next pause; return its length in seconds."""
        is_busy = trio.current_time() - self._sent_s < 2 * self._pause_s
        self._pause_s = min(self._most_s, 2 * self._pause_s) if is_busy else self._first_s
        await trio.sleep(self._pause_s)
        self._sent_s = trio.current_time()
        return self._pause_s


class Unannounced:
    """Plain objects that this node stored and has to announce: others would find them by a LIST, perhaps much later.

    A path stays here until a commit that announces it is in the store in time. A crash of the daemon leaves its row
    (`UnannouncedRows`), and the next daemon announces the object, some of them a second time."""

    def __init__(self, database: Database) -> None:
        self._rows = UnannouncedRows(database)
        self._waiting: dict[str, None] = {}
        """The oldest first."""
        self._sent = Counter[str]()
        """Paths in commits that are on their way."""
        self._added = trio.Event()
        self.announced_s = -math.inf
        """When a commit began that announces all objects that were stored before."""

    def __len__(self) -> int:
        return len(self._waiting)

    def load(self) -> None:
        """Take over what the last daemon did not announce."""
        self._waiting |= dict.fromkeys(islice(self._rows.paths(), UNANNOUNCED_MAX))

    def add(self, path: str) -> None:
        if len(self._waiting) < UNANNOUNCED_MAX:
            self._waiting[path] = None
            self._added.set()

    async def wait(self) -> None:
        """Return when there is something to announce."""
        while not self._waiting:
            self._added = trio.Event()
            await self._added.wait()

    def oldest(self) -> list[str]:
        """Return the paths that one commit announces."""
        return list(islice(self._waiting, STORED_MAX))

    def begin(self, paths: Sequence[str]) -> None:
        """Remove paths that are about to be sent; one that is stored again from now on is announced again."""
        for path in paths:
            self._waiting.pop(path, None)
        self._sent.update(paths)
        if not self._waiting:
            self.announced_s = trio.current_time()

    def end(self, paths: Sequence[str], *, is_announced: bool) -> None:
        """Count paths as announced, or put back those of which other nodes may not have heard."""
        self._sent -= Counter(paths)
        if not is_announced:
            self._waiting = dict.fromkeys(paths) | self._waiting
            self.announced_s = -math.inf
        elif done := [path for path in paths if path not in self._waiting and not self._sent[path]]:
            with suppress(CacheError):  # the next daemon announces them again
                self._rows.delete(done)


class Committer:
    """Sends the changes of this node as commits: see the module's head. Trio thread only."""

    def __init__(
        self,
        log: CommitLog,
        applier: Applier,
        deletions: DeletionQueue,
        journal: ChangeJournal,
        metrics: CommitMetrics,
        *,
        catch_up: CatchUp,
        delay_s: float = 1.0,
        acknowledged: AcknowledgedOrder | None = None,
    ) -> None:
        """``catch_up`` is as `Poller.catch_up`; it is called with the lock held."""
        self._db, self._log, self._applier, self.journal = journal.database, log, applier, journal
        self._deletions, self._metrics, self._delay_s = deletions, metrics, delay_s
        self._withdrawal = Withdrawal(log, applier, journal, catch_up, metrics)
        self._clock, self.writer, self._threads = log.clock, log.writer, log.threads
        self._lock = trio.Lock()
        self._acknowledged = NothingAcknowledged() if acknowledged is None else acknowledged
        self._writer_before = ""
        """The writer that committed from this cache directory before; empty if none did."""
        self.unsure: Unsure | None = None
        """A commit that may be in the store without being in effect here: its PUT failed or was cancelled, or the disk
        failed after it. See `reconcile`."""
        self._unapplied_why = CacheError("")
        """The error with which the newest change failed to take effect (`ChangeJournal.unapplied`)."""
        self._late: tuple[Record, ObjectRef] | None = None
        """A commit that was stored so late that polls may be past its time. Another one repeats it before any change is
        sent; its `Sending` row stays until then."""
        self._sent_as_of: set[int] = set()
        """Times of commits that `commit_as_of` sent, including failed ones that may be stored later, so that no two
        bodies get the same key. Times older than LATE_NS are forgotten."""
        self._unannounced = Unannounced(self._db)
        self.error: LakeError | None = None
        """The error of the last attempt to send changes; None if it succeeded."""

    def load(self, *, announces: bool) -> None:
        """Load the journal of the last daemon, and apply changes in it that may not be in effect. Call it once.

        ``announces``: what that daemon stored and did not announce is announced now."""
        if announces:
            self._unannounced.load()
        self._writer_before = tables.writer_of(self._db)
        self.journal.load()
        if tables.reapply_wanted(self._db):
            for sequence in list(self.journal.changes):
                self._withdrawal.withdraw_unapplied(sequence)
                self._applier.apply_pending(self.journal.changes[sequence], PENDING | sequence)
            tables.reapplied(self._db)
        elif self.journal.unapplied in self.journal.changes:
            change = self.journal.changes[self.journal.unapplied]
            self._applier.apply_pending(change, PENDING | self.journal.unapplied)
        self.journal.end_applying()
        if self.journal.changes:
            self._acknowledged.progressed.wake_all()

    async def reconcile_journal(self) -> None:
        """Ask the store whether it has the commit that the last daemon was sending when it ended.

        If so, the changes in that commit leave the journal, their rows get its time in place of their pending stamps,
        which are newer than any commit, and the rest of it is applied. Call this after `load` and before the first
        poll, which would otherwise take that commit for older than these rows, or apply it over later changes. Raises
        LakeError."""
        async with self._lock:
            await self._reconcile_sending()

    async def redate_before(self) -> bool:
        """Commit again what the last daemon of this cache directory dated too far ahead. Returns whether there was
        such a commit. Raises LakeError."""
        done = Redated()
        if self._metrics.future and self._writer_before:
            async with self._lock:
                done = await self._redate({self._writer_before})
        tables.set_writer(self._db, self.writer)
        return bool(done.originals)

    async def redate(self) -> None:
        """If the clock went back, commit again what this daemon dated too far ahead. Raises LakeError."""
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
                "%s dated in the future: the changes were committed again, but for %d of %d that others made again "
                "since; `lakefs-fuse fsck --repair` removes what is left",
                counted(len(done.originals), "commit of this node was", "commits of this node were"),
                done.superseded, done.superseded + done.operations,
            )  # fmt: skip
        return done

    @property
    def bundles_written(self) -> int:
        """As `CommitLog.bundles_written`."""
        return self._log.bundles_written

    @property
    def digests_written(self) -> int:
        """Number of digests of listings that this mount stored."""
        return self._log.digests.written

    @property
    def pack_bytes_max(self) -> int:
        """Maximum size of the next pack in bytes: see `PackBudget`."""
        return self._log.budget.bytes_max

    @property
    def held_until(self) -> int:
        """Sequence number of the newest acknowledged version that a held change waits for; 0 if none is held."""
        newest = self.journal.newest_after
        return newest if newest and not self._acknowledged.is_durable_up_to(newest) else 0

    def _is_held(self, change: Change) -> bool:
        return bool(change.after) and not self._acknowledged.is_durable_up_to(change.after)

    def _sendable(self) -> dict[int, Change]:
        return dict(self._each_sendable())

    def _each_sendable(self) -> Iterator[tuple[int, Change]]:
        """Yield the journaled changes that are not held, oldest first. Do not keep the iterator over an await."""
        held = False
        for sequence, change in self.journal.changes.items():
            held = held or self._is_held(change)
            if not held or (change.ahead and not self._is_held(change)):
                yield sequence, change

    def _first_sendable(self) -> dict[int, Change]:
        """Return the oldest sendable changes, as many as one commit takes."""
        first: dict[int, Change] = {}
        size = 0
        for sequence, change in self._each_sendable():
            size += _size(change)
            if first and size > OPERATIONS_AT_ONCE:
                break
            first[sequence] = change
        return first

    def _is_more_than_one_commit(self, newest: int) -> bool:
        """Return whether the sendable changes up to the number ``newest`` need more than one commit."""
        sizes = (_size(change) for sequence, change in self._each_sendable() if sequence <= newest)
        return any(size > OPERATIONS_AT_ONCE for size in accumulate(sizes))

    @property
    def _has_sendable(self) -> bool:
        return next(self._each_sendable(), None) is not None

    def may_have(self, path: str) -> bool:
        """Return whether a commit that names the path may be in the store without being in effect here."""
        return self.unsure is not None and any(each.path == path for each in self.unsure.record.operations)

    def mentions(self, key: str) -> bool:
        """Return whether a journaled change that is not held mentions the object at ``key``: see `Change.mentioned`."""
        return any(key in self.journal.mentioned[sequence] for sequence, _ in self._each_sendable())

    def removes(self, path: str) -> bool:
        """Return whether the last operation on a path, in journaled changes that are not held, removes it."""
        named = [each for change in self._sendable().values() for each in change.operations if each.path == path]
        return bool(named) and isinstance(named[-1], Remove)

    def names_before(self, path: str) -> Iterator[str]:
        """Yield the paths from which journaled renames moved a file, newest first: other nodes may have it there."""
        for change in reversed(self.journal.changes.values()):
            for source, target in change.moves:
                if path == target or path.startswith(target + "/"):
                    path = source + path[len(target) :]
                    yield path
                    break

    # -- journaled changes

    def enqueue(self, change: Change, batch: Batch | None = None, *, volatile: bool = False) -> None:
        """Journal a change in one write with ``batch``, apply it here at once, and have `run` send it. ``volatile``:
        while the disk is full it is journaled in memory, because without it a listing shows almost the same.

        If the disk fails after the change was journaled, it may take effect later: see *in effect*. The next call then
        raises the same error, because its change may have been planned before this one took effect. Raises CacheError,
        and FileError(EINVAL) for a change that no node could read; then nothing happened."""
        refuse_unreadable(change.operations, change.objects)
        if self.journal.unapplied:
            self._apply_unapplied()
            raise self._unapplied_why
        batch = Batch() if batch is None else batch
        change = replace(change, made=self._clock.reached())
        if change.ahead:
            sendable = self._sendable()
            passed = [each for each in self.journal.changes if each not in sendable]
            self._supersede(batch, paths_of(change.operations), passed)
        sequence = self.journal.append(change, batch, volatile=volatile)
        try:
            self._applier.apply_pending(change, PENDING | sequence)
            self.journal.end_applying()
        except CacheError as error:
            self._unapplied_why = error
            logger.warning("%s not in effect yet: %s", _changes_are(len(change.operations)), error)
        self._acknowledged.progressed.wake_all()

    def _apply_unapplied(self) -> None:
        """Apply the newest change if the disk failed before it took effect. The kernel is notified, because it may have
        looked its names up since. Raises CacheError."""
        if self.journal.unapplied:
            change = self.journal.changes[self.journal.unapplied]
            self._applier.apply_pending(change, PENDING | self.journal.unapplied, quiet=False)
            self.journal.end_applying()

    def retire(self, doomed: Deletion) -> None:
        """Queue an object's deletion once all changes journaled now are in the store; other nodes need it until then.
        Raises CacheError."""
        if self.journal.changes:
            self.enqueue(Change(doomed=[doomed]))
        else:
            self._deletions.schedule(doomed)

    def announce_stored(self, path: str) -> None:
        """Announce to other nodes a plain object that this node stored at a path and that no commit names."""
        self._unannounced.add(path)

    def _supersede(self, batch: Batch, paths: set[str], passed: Iterable[int], time: int = 0) -> None:
        """Remove operations on files at ``paths`` from held changes (``passed``), because newer ones are sent first.

        Otherwise the held changes would bring back stale locations. With ``time``, what the removed operations said
        gets that stamp in place of its pending one, which would count over the changes of the next daemon."""
        left_out: list[tuple[Operation, int]] = []
        for sequence in passed:
            change = self.journal.changes.get(sequence)
            if change is None:
                continue
            gone = [each for each in change.operations if each.path in paths and not is_of_directory(each)]
            if not gone:
                continue
            left_out += ((each, PENDING | sequence) for each in gone)
            kept = [each for each in change.operations if each not in gone]
            moves = [pair for pair in change.moves if not paths.intersection(pair)]
            self.journal.replace(batch, sequence, replace(change, operations=kept, moves=moves))
        if left_out:
            self._applier.leave_out(left_out, batch, time)

    def read_again(self, since: int) -> None:
        """Have the next poll apply commits from this time on again. Raises CacheError."""
        self._applier.commits.forget_after(since - 1)

    def withhold(self, path: str, since: int, until: int, newest: int) -> None:
        """Remove a file's older bytes from held changes that waited for versions which are superseded.

        The versions acknowledged from ``since`` on are superseded. Changes up to the number ``newest`` that came after
        them do not show the file's older bytes in their place; the rest of these changes waits for everything
        acknowledged up to ``until``. Raises CacheError."""
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
        """Remove from held changes what a commit sent ahead of them replaces, and follow its relocations of bytes."""
        if sending.passed:
            batch = Batch()
            self._supersede(batch, set(sending.paths), sending.passed, sending.time - 1)
            self._db.commit_volatile(batch)
            batch = Batch()
            places = relocations(_own_part(record, sending))
            for sequence in sending.passed if places else ():
                change = self.journal.changes.get(sequence)
                if change is not None and not places.keys().isdisjoint(change.objects):
                    objects = [places.get(ref, ref) for ref in change.objects]
                    self.journal.replace(batch, sequence, replace(change, objects=objects))
            self._db.commit_volatile(batch)

    @asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Hold off commits while the block runs, because one on its way was planned from names as they were before."""
        async with self._lock:
            yield

    async def run(self) -> None:
        """Send journaled changes, once in ``delay_s`` or with a pack, for as long as the mount lives."""
        backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        gathering = Gathering(self._delay_s, PROMPT_S if self._log.has_hints else self._delay_s)
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
                logger.warning("%s not in the store yet: %s", _changes_are(self.journal.operations), error)
                await trio.sleep(backoff.next_s())
            except Exception as error:
                self.error = LakeError(f"committing failed: {error!r}")
                logger.exception("committing")
                await trio.sleep(PAUSE_S_MAX)

    def _is_for_pack(self) -> bool:
        """Return whether all sendable changes only make or change directories, and files wait for a pack.

        False if there are hints, because other nodes must hear of these changes at once, too."""
        if self._log.has_hints or not self._acknowledged.has_files_for_pack:
            return False
        every = (each for _, change in self._each_sendable() for each in change.operations)
        operations = list(islice(every, WITH_PACK_OPERATIONS_MAX + 1))
        return 0 < len(operations) <= WITH_PACK_OPERATIONS_MAX and all(isinstance(each, Mkdir) for each in operations)

    async def run_announcements(self) -> None:
        """Announce stored objects that no commit has announced, once in ``delay_s``, for as long as the mount lives.
        A failure is not worth a warning: other nodes see these objects all the same, only later."""
        backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        gathering = Gathering(self._delay_s, PROMPT_S if self._log.has_hints else self._delay_s)
        while True:
            await self._unannounced.wait()
            pause_s = await gathering.pause()
            await self._wait_unannounced(pause_s)
            try:
                if self._has_sendable and not self._lock.locked() and not self._is_for_pack():
                    await self.flush()
                await self.flush_announcements()
                backoff.reset()
            except LakeError as error:
                logger.debug("%d stored objects are not announced yet: %s", len(self._unannounced), error)
                await trio.sleep(backoff.next_s())
            except Exception:
                logger.exception("announcing")
                await trio.sleep(PAUSE_S_MAX)

    async def _wait_unannounced(self, pause_s: float) -> None:
        """Return when ``pause_s`` have passed since a commit of changes of names announced what was stored before."""
        due_s = -math.inf
        while due_s < self._unannounced.announced_s + pause_s:
            due_s = self._unannounced.announced_s + pause_s
            await trio.sleep_until(due_s)

    async def flush(self) -> None:
        """Store every change that was journaled before the call and is not held. Raises LakeError."""
        await self.reconcile()
        wanted = self.journal.newest
        while next(self._each_sendable(), (wanted + 1, None))[0] <= wanted:
            await self.commit(None)

    async def flush_announcements(self) -> None:
        """Announce every plain object that was stored before the call. Raises LakeError."""
        for _ in range(0, len(self._unannounced), STORED_MAX):
            if stored := self._unannounced.oldest():  # else a commit came first
                await self._announce(stored)

    async def _announce(self, stored: list[str]) -> None:
        record = Record(writer=self.writer, time=self._clock.now(), stored=stored)
        self._unannounced.begin(stored)
        is_announced = False
        try:
            this = await self._log.put_record(record)
            is_announced = self._clock.wall_ns() - record.time <= LATE_NS
        except BaseException:
            self._metrics.failures += 1
            raise
        finally:
            self._unannounced.end(stored, is_announced=is_announced)
        self._metrics.count_commit(0)
        self._applier.apply(record, this, whole=True, own=True)

    # -- commits

    async def commit(
        self,
        change: Change | Callable[[], Change] | Callable[[], Awaitable[Change]] | None,
        members: Sequence[Member] = (),
        *,
        before_put: BeforeSending | None = None,
        in_steps: bool = False,
    ) -> Committed:
        """Commit a change, with the bytes of ``members`` in the same object. None: the oldest changes of the journal.

        If ``change`` is a function, it is called when its turn has come, and what it raises is raised. ``before_put``
        gets the commit's key before anything is sent. With ``in_steps`` that function raises the barrier before the
        names of its change, and the caller lowers it after the call. Raises LakeError; then nothing of the change is in
        effect, or (if the store did not answer) all of it may appear later.
        """
        async with self._lock:
            try:
                await self._redate_if_behind()
                await self._reconcile()
                newest = self.journal.newest
                while change is not None and self._is_more_than_one_commit(newest):
                    await self._withdraw()
                    await self._send(None, (), None, in_steps=False)
                    await self._reconcile()
                await self._withdraw()
                made = change() if callable(change) else change
                if isinstance(made, Awaitable):
                    made = await made
                committed = await self._send(made, members, before_put, in_steps=in_steps)
                self.error = None
            except LakeError as error:
                self.error = error
                raise
            if self._late is not None and not in_steps:  # else `run` does it, once the caller has lowered the barrier
                try:
                    await self._reconcile()
                except LakeError as error:  # the caller's commit is in the store all the same: `run` tries again
                    logger.warning("commit %s is not repeated yet: %s", committed.ref.key, error)
            return committed

    async def _withdraw(self) -> None:
        """Withdraw what other nodes have overtaken in the changes of the next commit. The caller sends it, or plans it,
        before other tasks run. Raises LakeError."""
        asked = set[int]()
        while checked := [each for each, change in self._first_sendable().items() if change.may_be_overtaken()]:
            late = [each for each in self._withdrawal.late(checked) if each not in asked]
            if not late:
                self._apply_unapplied()
                self._withdrawal.withdraw_overtaken(checked)
                break
            await self._withdrawal.ask(late)
            asked.update(late)

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
        stored = self._unannounced.oldest()

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
        self._unannounced.begin(stored)
        is_announced = False
        try:
            meta = await self._put(key, body, Unsure(records[0], doomed))
            is_announced = self._clock.wall_ns() - time <= LATE_NS
        except BaseException:
            if self.unsure is not None and self.journal.sending is None:
                with suppress(CacheError):
                    self.journal.begin_sending(sending)  # the next daemon asks for it, if this one does not
            raise
        finally:
            self._unannounced.end(stored, is_announced=is_announced)
        reached("commit.sent")
        self._metrics.count_commit(len(records[0].operations))
        this = ObjectRef(key, meta.etag, len(body))
        if not is_announced:
            self._set_late(records[0], this)
        with trio.CancelScope(shield=True):  # or the caller would not learn of a commit that is in the store
            await self._record_commit(sending, journaled, doomed, records[0], this, in_steps=in_steps)
        return Committed(this, body, places)

    async def _put(self, key: str, body: bytes, unsure: Unsure) -> ObjectMeta:
        """Store a commit; if the PUT fails, ask the store whether it took effect all the same. Raises LakeError.

        If the store does not say, or the caller is cancelled, `reconcile` asks it."""
        try:
            return await self._log.put(key, body)
        except BaseException as error:
            self._metrics.failures += 1
            self.unsure = unsure
            if isinstance(error, LakeError):
                with trio.move_on_after(ASK_S_MAX), suppress(LakeError):
                    meta = await self._log.find(key)
                    self.unsure = None
                    if meta is not None:
                        return meta
            raise

    async def reconcile(self) -> None:
        """Apply what the disk did not record, find out whether failed commits are in the store, and repeat late ones.

        On return journaled changes are in effect, no commit of this node is in the store without being in effect here,
        and none was stored so late that other nodes miss it. Raises LakeError."""
        if self.unsure is not None or self._late is not None or self.journal.unapplied:
            async with self._lock:
                await self._reconcile()

    async def _reconcile(self) -> None:
        """As `reconcile`, for a caller that holds the lock and builds on the outcome."""
        self._apply_unapplied()
        await self._reconcile_sending()
        await self._reconcile_unsure()
        if self._late is not None:
            while self._late is not None:
                self._late = await self._repeat_commit(*self._late)
            self.journal.end_sending()

    async def _reconcile_unsure(self) -> None:
        """Ask the store whether it has the commit in `unsure`; if so, apply it and queue its deletions."""
        if self.unsure is None:
            return
        record = self.unsure.record
        meta = await self._log.find(self._log.key(record.time))
        if meta is None:
            self.unsure = None
            self.journal.pass_over_sending()
            return
        this = self._found(record, meta)
        if not self._applier.commits.is_applied(record.time, self.writer):
            await self._apply(record, this)
        for doomed in self.unsure.doomed:
            self._deletions.schedule(doomed)
        self._end_sending(Sending(record.time, this.key))
        self.unsure = None

    def _found(self, record: Record, meta: ObjectMeta) -> ObjectRef:
        """Return the reference of a commit that the store has, although its answer was lost. If the store dates it
        late, it will be repeated."""
        this = ObjectRef(meta.key, meta.etag, meta.size)
        if meta.mtime_ns - record.time > LATE_NS:
            self._set_late(record, this)
        return this

    def _set_late(self, record: Record, this: ObjectRef) -> None:
        self._late = record, this
        self._acknowledged.progressed.wake_all()

    def _end_sending(self, sent: Sending) -> None:
        """Delete the row of a commit that is in the store and in effect here. While a late commit waits for its
        repetition, a row stays, or is written. Raises CacheError."""
        if self._late is None:
            self.journal.end_sending()
        elif self.journal.sending is None:
            self.journal.begin_sending(sent)

    async def _repeat_commit(self, record: Record, this: ObjectRef) -> tuple[Record, ObjectRef] | None:
        """Repeat a commit under a new time, because its PUT took so long that polls may be past its own.

        Operations on names that later commits change are left out, whether the writers of those saw this one or not; so
        are removals, renames and symbolic links at names where another client has stored a plain object since. Here the
        repetition is applied without its moves: what was renamed has moved already, and the source of a rename may be
        something else by now. Returns the repetition if it was stored late, too. Raises LakeError."""
        logger.warning("commit %s took long to store: another commit repeats its changes", this.key)
        said = Change(operations=await still_newest(self._log, record), objects=record.objects, made=record.time)
        said = said.without(said.about(await self._withdrawal.find_overtaken(said)))
        change = linked(this, record, said.operations)
        if not change.operations:
            return None
        again = replace(
            record, writer=self.writer, time=self._clock.now(),
            objects=change.objects, operations=change.operations, stored=[],
        )  # fmt: skip
        this = await self._log.put_record(again)
        await self._apply(replace(again, moves=[]), this, own=True)
        return (again, this) if self._clock.wall_ns() - again.time > LATE_NS else None

    def find_without(self, path: str, row: Entry, versions: Set[tuple[str, int, str]]) -> Step | None:
        """As `Applier.find_without`."""
        return self._applier.find_without(path, row, versions)

    def gave_file(self, path: str, time: int) -> bool:
        """As `Applier.gave_file`."""
        return self._applier.gave_file(path, time)

    async def commit_as_of(self, make: Callable[[], tuple[Change, int]]) -> None:
        """Commit an addition to another node's commit, dated right after that one.

        So later commits win over it, whether this node has heard of them or not. ``make`` is called under the lock, so
        that what it repeats of a name is what this node has said last; it returns the change and the time of that
        commit. If polls may be past that time, or if it is a pending stamp, the addition is dated now. Raises
        LakeError."""
        async with self._lock:
            await self._reconcile()
            change, time = make()
            if not change.operations:
                return
            if time < PENDING and self._clock.wall_ns() - time <= LATE_NS:
                await self._send_as_of(change, time)
                return
        await self.commit(lambda: make()[0])

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
        self.unsure = Unsure(record, [])  # if the disk fails now
        self._applier.apply(record, this, whole=True)
        self._end_sending(Sending(time, this.key))
        self.unsure = None

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
        """Record here that a commit is in the store. If the disk fails, `reconcile` records the rest."""
        try:
            self._drop(journaled, record.time)
            self._record_passed(sending, record)
            part = _own_part(record, sending)
            if in_steps:
                await self._applier.apply_behind_barrier(part, this, whole=False, own=True)
            else:
                self._applier.apply(part, this, whole=False, own=True)
            self._end_sending(sending)
            if doomed:
                batch = Batch()
                for each in doomed:
                    self._deletions.add(batch, each)
                self._db.commit_volatile(batch)
        except CacheError as error:
            self.unsure = Unsure(record, doomed)
            logger.error("commit %s is in the store, but that could not be noted here: %s", this.key, error)

    def _drop(self, journaled: dict[int, Change], time: int) -> None:
        """Drop journaled changes that are in the store, and give their names the commit time ``time``.

        Attributes that were set again since, and are in no commit yet, stay as they are here. Later commits of other
        nodes that were polled meanwhile did not count beside pending stamps, which are newer than any commit: they are
        applied again."""
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
        self.journal.record_sent(batch, journaled, time)
        for sequence, change in journaled.items():
            for doomed in self.journal.changes.get(sequence, change).doomed:  # some were waived since, perhaps
                self._deletions.add(batch, doomed)
        self._db.commit_volatile(batch)
        self.journal.forget(journaled)

    async def _reconcile_sending(self) -> None:
        """Find out what became of the last commit of which a row tells. If its answer is not known, the store is asked,
        and a commit that it has is recorded. One without journaled changes is left to `_reconcile_unsure`, if this
        daemon has sent it."""
        sending = self.journal.sending
        if sending is None or not (self.unsure is None or sending.sequences or sending.passed):
            return
        try:
            meta = await self._log.head(sending.key)
            record = await self._log.fetch(meta)
        except NotFound:
            self.journal.pass_over_sending()
            return
        except DamagedCommit as error:  # no node applies it: the journaled changes are sent again
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
            await self._apply(_own_part(record, sending), this, whole=not sending.operations)
        self._end_sending(sending)

    async def _apply(self, record: Record, this: ObjectRef, *, whole: bool = True, own: bool = False) -> None:
        """Apply a commit that the store has, in steps if it is large: no caller has raised the barrier."""
        if len(record.operations) > OPERATIONS_AT_ONCE:
            await self._applier.apply_in_steps(record, this, whole=whole, own=own)
        else:
            self._applier.apply(record, this, whole=whole, own=own)


def _changes_are(count: int) -> str:
    return counted(count, "change of a name is", "changes of names are")


def _size(change: Change) -> int:
    """Return the size of a change in operations: at least 1, because a change without any takes time, too."""
    return max(1, len(change.operations))


def _own_part(record: Record, sending: Sending) -> Record:
    """Return a record without the journaled changes in it, which are in effect here, or were changed again since."""
    return replace(record, operations=record.operations[sending.operations :], moves=record.moves[sending.moves :])
