"""Polls for commits of other nodes: one LIST finds them, and they are applied in the order of their times.

A *deep* poll lists commits from `WINDOW_NS` before the newest commit time that the last deep one knew, and applies what
is new. So a commit is found if its time is no more than that window behind the newest one when it becomes visible,
however long this node was cut off, and whatever it has committed itself before it polled again. Times come from clocks
that are corrected by the store's, and a request takes a minute at most; two nodes' clocks may differ by the rest.

If a deep poll takes more than one page, most polls in the background are *shallow*: they list the last OVERLAP_S_MAX
before the newest commit that the last poll was shown, or less if many commits are there. A commit that becomes visible
later than that is found by comparing with the digest of another mount's deep poll (`listing_digest`), or by this
mount's own deep poll, whichever comes first, DEEP_S_MIN to DEEP_S_MAX after the last. A caller that waits for a poll
(`poll`, `catch_up`) gets a deep one.

What always holds:

* *whole or left out*: a commit that cannot be read is left out, logged and counted, never applied in part. It is tried
  again by the next daemon, and by this one every REFUSED_AGAIN_S. A commit dated farther ahead of the store's time than
  COMMIT_AHEAD_MAX_S is left out until its time has come;
* *shallow polls promise nothing*: only a deep poll, or one that agreed with a digest, moves the time from which the
  next deep one begins (`CommitRows.polled`), and counts as having heard of other nodes.

A collection deletes a commit once it has been known for a grace period that no name needs it: ABSENCE_S_MAX if a mount
started it, by default GRACE_S_MIN if a user did. A node that polls again after a longer time, in which a collection has
ended, may have missed commits for good: its next mount reads all names again. After ABSENCE_S_MAX it also logs that.

A commit may name a path with a plain object of the same second that its writer did not know. It waits up to
`DOUBT_S_MAX`, and so do the commits behind it: a node that knew the object may have replaced or removed it in an older
commit, which is about to be found. Applied in the other order, the newer of the two would be left out for good.

Trio thread only. A crash leaves commits that are not recorded as applied; the next mount applies them again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import random
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import trio
from msgspec.structs import replace

from lakefs_fuse.commits.applier import Applier
from lakefs_fuse.commits.archive import RECORD_BYTES_MAX, commit_key, parse_commit_key
from lakefs_fuse.commits.bundles import OWN_DELAY_S, SUFFIX, Found
from lakefs_fuse.commits.change import OPERATIONS_AT_ONCE
from lakefs_fuse.commits.commit_log import CommitLog, LargeRecord
from lakefs_fuse.commits.doubt import Doubt
from lakefs_fuse.commits.hints import Hints
from lakefs_fuse.commits.hybrid_clock import COMMIT_AHEAD_MAX_S, CONFIRM_S, WINDOW_NS
from lakefs_fuse.commits.idleness import Idleness
from lakefs_fuse.commits.listing_digest import BUCKET_BITS, BucketSums, Digest, DigestName, bucket_start
from lakefs_fuse.commits.name_history import DOUBTS_AT_ONCE
from lakefs_fuse.commits.record import ObjectRef, Record
from lakefs_fuse.commits.repeater_election import REPEAT_S, RepeaterElection
from lakefs_fuse.errors import DamagedCommit, LakeError, NotFound
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.client import is_copy
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.sync.nursery import for_each

NS = 1_000_000_000
FETCHES_AT_ONCE = 16
FETCHED_MAX = 16
"""Maximum of records in memory at a time."""
FETCHED_BYTES_MAX = 4 << 20
"""Maximum size of each of these records; a larger one is fetched alone, when its turn has come."""
KNOWN_MAX = 1 << 14
"""Maximum of known keys in memory, some 2 MB, plus one page. At 100 commits a second the window has more."""
CLOCK_CHECK_S = 600.0
OVERLAP_S_MAX = 10
"""A shallow poll begins at most this long before the newest commit that the last poll was shown: a PUT rarely takes
longer."""
OVERLAP_KEYS_MIN, SHALLOW_KEYS = 250, 900
"""Known keys that a shallow poll lists again: SHALLOW_KEYS, fewer than a page has, less as many as were new in the last
one, and OVERLAP_KEYS_MIN in any case."""
DEEP_S_MIN, DEEP_S_MAX = 20.0, 40.0
DEEP_SKEW = 8
"""Time between a deep poll, or an equal digest, and the next deep poll. Each mount draws it, with a density that grows
as a power: of 50 mounts one or two list before the others see their digest, and of 500 about ten."""
DIGEST_SPAN_NS = WINDOW_NS + 60 * NS
"""How far before the newest commit a digest begins. It covers more than the window, because other mounts last heard of
everything at another time than its writer."""
DIGEST_AGE_S = OVERLAP_S_MAX
"""How far before the newest commit a digest ends: mounts see later commits at different times."""
DIFFERENCES_MAX = 8
"""If more ranges of time differ from a digest, this mount lists the whole window when that is due."""
LISTING_S_MAX = 30.0
"""If a LIST takes longer, polls are not past the newest commit that it found: it may have passed the place of another
commit before that one was made."""
ABSENCE_S_MAX = 7 * 86400.0
"""How long a node may be suspended, or cut off from the store; what dead nodes leave behind is kept as long."""
GRACE_S_MIN = 3600.0
"""The default of ``gc --grace``: after a shorter absence no commit is missing, unless a user chose a shorter grace."""
DOUBT_S_MAX = 1.0
"""How long after its own time a commit in doubt waits for an older one, whose PUT may be slower."""
GETS_MAX = 4
"""A poll in the background that would send more GETs leaves commits that were not shown before to a repeater. If there
is none, it waits until the writers of all these commits have repeated them in bundles."""
BUNDLE_WAIT_S = OWN_DELAY_S + 0.3
ELECTION_S = 1.5
"""Maximum of a random addition to that wait. A mount that still finds no bundle then becomes the repeater, unless all
these commits are of one writer, which repeats them itself as long as it hears of no repeater."""
REPEAT_WAIT_S = REPEAT_S + 0.5
WAITING_REFRESH_S = 5.0
"""A mount that polls at longer intervals polls again after REPEAT_WAIT_S for what it left to the repeater."""
GETS_FOR_A_BUNDLE = 16
"""Commits that one poll fetched with this many GETs are repeated in a bundle, for mounts that poll or begin later."""
DOUBT_PAUSE_S_FIRST = 0.25
"""First pause of a poll that waits because of a doubt; each further pause is twice as long."""
HISTORIES_S = 60.0
"""Interval at which histories of names are forgotten that are older than any commit that may come late."""
REFUSED_AGAIN_S, REFUSED_MAX = 600.0, 1000
"""Interval at which commits that were left out are asked for again, and the maximum of them."""
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Listed:
    """What a LIST showed. ``found`` are commits that are not applied, ``commits`` times and keys of all commits, and
    ``others`` objects that are no commits."""

    found: list[Found] = field(default_factory=list)
    commits: list[tuple[int, str]] = field(default_factory=list)
    others: list[ObjectMeta] = field(default_factory=list)
    pages: int = 0

    @property
    def newest(self) -> int:
        return self.commits[-1][0] if self.commits else 0

    def newer(self, time: int) -> int:
        """Return how many commits are newer than a time."""
        return len(self.commits) - bisect_right(self.commits, (time + 1,))


@dataclass(slots=True)
class _Look:
    """The commits to apply that one look at the store found, oldest first.

    After a deep look every commit that was visible at ``began_s`` is among ``found`` or applied. Polls were past the
    time ``polled`` when it began; once ``found`` is in effect, they are past the time ``past`` (None: not known).
    ``digest`` has the time from which on a digest for other mounts covers what was listed, and that digest."""

    found: list[Found]
    is_deep: bool
    began_s: float
    began_ns: int
    polled: int
    took_s: float
    past: int | None
    digest: tuple[int, Digest] | None = None

    @property
    def has_several_writers(self) -> bool:
        return len({writer for _, writer, _ in self.found}) > 1


class Poller:
    """Finds and applies commits of other nodes: see the module's head. Trio thread only."""

    def __init__(
        self,
        log: CommitLog,
        applier: Applier,
        metrics: CommitMetrics,
        *,
        refresh_s: float,
        rng: random.Random,
        redate: Callable[[], Awaitable[None]] = trio.lowlevel.checkpoint,
        applied: Callable[[Record], object] = lambda _: None,
        hints: Hints | None = None,
    ) -> None:
        """``redate`` commits again what this node dated too far ahead. ``applied`` is called with each record that was
        applied. ``rng`` draws when this mount lists the window. ``hints`` say when to poll, and whether the mount is
        idle."""
        self._idleness = Idleness(0.0) if hints is None else hints.idleness
        self._hints = hints if hints is not None and hints.is_used else None
        self._log, self._applier, self._metrics = log, applier, metrics
        self._clock = log.clock
        self._refresh_s, self._redate, self._applied = refresh_s, redate, applied
        self._rng = rng
        self._caught_up_s = -math.inf
        """As `heard_ns`, by a clock that is never set, and stands still while the machine is suspended."""
        self._is_long = False
        """The last deep listing had several pages."""
        self._is_whole = False
        """The last poll came to its end; otherwise the next one is deep."""
        self._deep_due_s = -math.inf
        """When to list the window, unless a digest agrees before."""
        self._is_failing = False
        """The last poll in the background failed: it answered hints whose commits it may not have found."""
        self.election = RepeaterElection(log, rng)
        """Of the repeater, which may be this mount. For readers."""
        self._sums = BucketSums()
        """What LISTs have shown of the window."""
        self._shown, self._shown_new, self._listing_ns = 0, 0, 0
        """Of the last LIST: the time of the newest commit that it showed, how many it showed that were newer than the
        newest of the LIST before, and how long it took."""
        self._refused, self._refused_due_s = set[str](), -math.inf
        """Keys of commits that cannot be read, and when to try again those and what earlier daemons left out."""
        self._ahead, self._found_ahead = set[str](), False
        """Keys of commits that were left out because of their time, from the first page of them; and whether there were
        any since the clock was last compared with the store's."""
        self._ahead_ns = 0
        """The latest time that a commit might have when the last poll began."""
        self._present_ns = 0
        """The same of the last complete poll, however deep: this node has been absent since. This clock counts the time
        for which a machine is suspended."""
        self._known: dict[str, int] = {}
        """By key, times of commits that the last poll checked. They count until a row of a commit is forgotten."""
        self._forgotten, self._histories_due_s = 0, -math.inf
        self._lock = trio.Lock()

    async def run(self) -> None:
        """Poll for as long as the mount lives, rarely while it is idle. A failure of the store is logged once, and
        polls continue."""
        checked_at, jumps = trio.current_time(), self._clock.jumps
        while True:
            await self._pause()
            try:
                is_doubtful = self._clock.jumps > jumps or self._found_ahead or not self._clock.is_confirmed
                if trio.current_time() - checked_at > (CONFIRM_S if is_doubtful else CLOCK_CHECK_S):
                    jumps, self._found_ahead = self._clock.jumps, False
                    checked_at = trio.current_time()
                    await self.correct_clock()
                if self._clock.went_back:
                    await self._redate()
                if self._idleness.is_idle:  # the first request after this is answered from what it finds
                    await self.poll()
                else:
                    await self.poll_in_background()
                self._is_failing = False
            except LakeError as error:
                if not self._is_failing:
                    logger.warning("looking for commits of other nodes failed: %s", error)
                self._is_failing = True
            except Exception:
                logger.exception("looking for commits of other nodes")
                self._is_failing = True
            finally:
                self._idleness.polled()

    async def _pause(self) -> None:
        """Wait until the next poll in the background is due."""
        if self.election.is_repeater:
            await self._idleness.pause(min(REPEAT_S, self._refresh_s))
        elif self._hints is not None:
            await self._idleness.pause(self._interval_s(), self._hints.wait_due)
            self._hints.polling()
        else:
            await self._idleness.pause(self._refresh_s)

    def _interval_s(self) -> float:
        """Return after how many seconds this mount polls without a hint."""
        return self._refresh_s if self._hints is None or self._is_failing else self._hints.refresh_s()

    async def correct_clock(self) -> None:
        """Correct the clock: see `CommitLog.read_time`."""
        await self._log.read_time()
        self._metrics.clock_jumps = self._clock.jumps
        self._metrics.clock_offset_s = self._clock.offset_ns / NS

    async def poll(self) -> int:
        """Apply all new commits, found by a deep poll; returns how many there were. Raises LakeError."""
        began_s = trio.current_time()
        async with self._lock:
            return await self._apply_found(began_s, await self._look(is_deep=True), math.inf)

    async def poll_in_background(self) -> None:
        """Apply new commits, as far as a shallow poll shows them, and wait for bundles if that saves GETs.

        If there is a repeater, commits that the poll before did not show wait for its next bundle. If all are of one
        writer, those that it has not repeated in a bundle yet wait for that."""
        began_s = trio.current_time()
        async with self._lock:
            look = await self._look_in_background()
            if self._hints is not None:
                self._hints.polled(item[2].key for item in look.found)
            if self.election.is_repeater or self._is_cheap(look):
                await self._apply_found(began_s, look, math.inf)
                return
            shown: float = look.found[-1][0]
            until = self.election.repeated_until(look.found[-1][0])
            has_repeater, wait_s = until is not None, REPEAT_WAIT_S
            if until is None and not look.has_several_writers:
                until, wait_s = self._log.bundles.newest(look.found[0][1]), BUNDLE_WAIT_S
            if until is not None:
                began_whole_s = began_s if until >= shown else -math.inf
                await self._apply_found(began_whole_s, look, until, repeats=has_repeater)
                if until >= shown or (has_repeater and self._interval_s() <= WAITING_REFRESH_S):
                    return
            else:
                wait_s = BUNDLE_WAIT_S + self._rng.random() * ELECTION_S
                self._lower_shown(look.found[0])
        await trio.sleep(wait_s)
        async with self._lock:
            again = await self._look(is_deep=look.is_deep, for_others=look.digest is not None)
            is_due = until is None and again.has_several_writers
            if is_due and not self._is_cheap(again) and self.election.repeated_until(again.found[-1][0]) is None:
                shown = math.inf if self.election.begin() else shown
            repeats = has_repeater or again.has_several_writers
            await self._apply_found(began_s, again, shown, repeats=repeats)

    def _is_cheap(self, look: _Look) -> bool:
        """Return whether fetching what was found takes GETS_MAX at most."""
        return len(look.found) <= GETS_MAX or self._log.bundles.gets(GETS_MAX) <= GETS_MAX

    async def _apply_found(self, began_s: float, look: _Look, until: float, *, repeats: bool = True) -> int:
        """Apply what was just listed, up to the time ``until``; returns how many commits that were. Without ``repeats``
        no bundle is made of them. The caller holds the lock."""
        self._metrics.polls += 1
        count, backoff = 0, None
        give_up_at = trio.current_time() + DOUBT_S_MAX
        commits, first_look = self._applier.commits, look
        while True:
            found = [item for item in look.found if item[0] <= until]
            done = await self._apply_all(found, wait=trio.current_time() < give_up_at, repeats=repeats)
            count += done
            if done == len(found):
                break
            backoff = backoff or Backoff(DOUBT_PAUSE_S_FIRST, DOUBT_S_MAX)
            await trio.sleep(backoff.next_s())
            self._lower_shown(found[done])
            look = await self._look(is_deep=look.is_deep)
        self._is_whole = True
        if len(found) < len(look.found):
            self._lower_shown(look.found[len(found)])
        await self._note_absence(look.polled)
        if look.past is not None:
            newest = look.past
            if look.is_deep and found and look.took_s < LISTING_S_MAX:
                newest = max(newest, found[-1][0])
            if len(found) < len(look.found):  # what is left may be older than what this mount has committed itself
                newest = min(newest, look.found[len(found)][0])
            polled = commits.record_polled(newest, look.polled)
            is_all = polled >= look.polled and len(found) == len(look.found)
            if is_all and look.began_ns - WINDOW_NS >= polled > 0:
                commits.record_complete(polled)
            if done or polled > look.polled:
                commits.forget_before(max(0, polled - 2 * WINDOW_NS))
            self._caught_up_s = max(self._caught_up_s, min(began_s, look.began_s))
            if not math.isinf(began_s):
                self._applier.note_heard(look.began_ns)
            late_s = DEEP_S_MIN + (DEEP_S_MAX - DEEP_S_MIN) * self._rng.random() ** (1 / DEEP_SKEW)
            self._deep_due_s = trio.current_time() + late_s
        await self._publish_digest(first_look)
        await self._forget_histories()
        return count

    async def _forget_histories(self) -> None:
        """Forget histories of names for which no commit can come late any more, if that is due."""
        if trio.current_time() >= self._histories_due_s:
            self._histories_due_s = trio.current_time() + HISTORIES_S
            for _ in self._applier.forget_histories(self._clock.wall_ns() - 2 * WINDOW_NS):
                await trio.lowlevel.checkpoint()

    def _lower_shown(self, first: Found) -> None:
        """Count a commit that is not applied yet, and all later ones, as not shown: the next poll lists them."""
        self._shown = min(self._shown, first[0] - 1)

    async def _note_absence(self, polled: int) -> None:
        """After a long absence, have the next mount read all names again if a commit may have been collected that is
        newer than what was known before: polls were past the time ``polled``. Raises LakeError."""
        absent_ns = self._ahead_ns - self._present_ns if self._present_ns else 0
        if absent_ns > GRACE_S_MIN * NS:
            commits = self._applier.commits
            known = max(commits.complete(), polled - WINDOW_NS)
            if known + 1 < await self._log.read_horizon():
                commits.mark_outdated()
                logger.log(
                    logging.ERROR if absent_ns > ABSENCE_S_MAX * NS else logging.INFO,
                    "this node has not heard of others for %.1f hours, and commits of that time may have been "
                    "collected: mount the lake again, for names may be outdated until then", absent_ns / NS / 3600,
                )  # fmt: skip
        self._present_ns = self._ahead_ns

    @property
    def heard_ns(self) -> int:
        """As `Applier.heard_ns`."""
        return self._applier.heard_ns

    async def catch_up(self, within_s: float) -> None:
        """Poll unless every commit that was visible ``within_s`` seconds ago is in effect here already. Time for which
        the machine was suspended counts. Raises LakeError."""
        is_old = trio.current_time() - self._caught_up_s > within_s
        if is_old or self._clock.wall_ns() - self.heard_ns > within_s * NS:
            await self.poll()

    async def _look_in_background(self) -> _Look:
        """Look for commits: deeply if that takes one page or is due, or if the last poll did not come to its end."""
        if not (self._is_long and self._is_whole):
            return await self._look(is_deep=True)
        look = await self._look(is_deep=False)
        if look.past is None and trio.current_time() >= self._deep_due_s:
            look = await self._look(is_deep=True, for_others=self._log.digests.is_writable)
        return look

    async def _look(self, *, is_deep: bool, for_others: bool = False) -> _Look:
        """Find the commits that are not applied, oldest first; ``for_others`` makes a digest of what was listed."""
        self._is_whole = False
        if trio.current_time() >= self._refused_due_s:
            await self._read_refused()
        began_s, commits = trio.current_time(), self._applier.commits
        newest, polled = commits.progress()
        ahead_ns = self._ahead_ns = self._clock.ahead_ns()
        window = max(0, min(polled, ahead_ns) - WINDOW_NS)
        if is_deep:
            since = min(window, max(0, newest - DIGEST_SPAN_NS)) if for_others else window
        else:
            keys = max(OVERLAP_KEYS_MIN, SHALLOW_KEYS - self._shown_new)
            overlap = self._sums.start_of_last(keys, self._shown, OVERLAP_S_MAX * NS) - self._listing_ns
            since = max(window, min(overlap, commits.first_forgotten()))
        since = bucket_start(since)
        wall_ns = ahead_ns - COMMIT_AHEAD_MAX_S * NS
        known = self._known if self._forgotten == commits.forgotten else dict[str, int]()
        self._forgotten, self._known = commits.forgotten, {}
        listed = await self._list(since, None, ahead_ns, known)
        took_s = trio.current_time() - began_s
        self._listing_ns, self._shown_new = int(took_s * NS), listed.newer(self._shown)
        self._shown = max(min(self._shown, wall_ns), min(listed.newest, wall_ns))
        look = _Look(listed.found, is_deep, began_s, wall_ns, polled, took_s, newest if is_deep else None)
        if is_deep:
            self._metrics.deep_polls += 1
            self._is_long = listed.pages > 1
            if for_others and self._is_long:
                look.digest = since, self._sums.digest(since, bucket_start(max(0, newest - DIGEST_AGE_S * NS)))
        elif (name := self._log.digests.newest_of_others(listed.others)) and name.first <= window:
            await self._compare(look, name, window, known)
        if look.found:
            look.found.sort(key=lambda item: item[:2])
            bundles = [meta for meta in listed.others if meta.key.endswith(SUFFIX)]
            self._log.bundles.begin(bundles, look.found)
            if len(look.found) > GETS_MAX:
                self.election.record_bundles(bundles)
        return look

    async def _list(self, since: int, until: int | None, ahead_ns: int, known: Mapping[str, int]) -> _Listed:
        """List the commits of times from ``since`` up to ``until``, the start of a bucket (None: up to the end)."""
        listed = _Listed()
        commits = self._applier.commits
        async for page in self._log.list_since(since):
            listed.pages += 1
            named: list[Found] = []
            shown: list[tuple[int, str]] = []
            for meta in page.objects:
                if (time := known.get(meta.key)) is None:
                    if (name := parse_commit_key(meta.key)) is None:
                        listed.others.append(meta)
                        continue
                    time = name[0]
                    if until is None or time < until:
                        named.append((*name, meta))
                if until is None or time < until:
                    shown.append((time, meta.key))
            listed.commits += shown
            applied = commits.are_applied(named) if named else []
            new = [
                item
                for item, is_applied in zip(named, applied, strict=True)
                if not is_applied and item[2].key not in self._refused
            ]
            if len(self._known) < KNOWN_MAX:
                self._known.update((key, time) for time, key in shown)
                for item in new:
                    self._known.pop(item[2].key, None)
            listed.found += (item for item in new if item[0] <= ahead_ns)
            ahead = [item for item in new if item[0] > ahead_ns]
            self._leave_out([item for item in ahead if item[2].key not in self._ahead])
            if ahead or (until is not None and page.objects and page.objects[-1].key >= self._log.start(until)):
                break  # all that follow are later still
        if self._is_long or listed.pages > 1:
            self._sums.replace(since, until, listed.commits)
        return listed

    async def _publish_digest(self, look: _Look) -> None:
        """Store a digest of what a deep look showed, for other mounts to compare. The time since its LIST began counts
        as part of that LIST."""
        if look.digest is not None and look.past is not None:
            first, digest = look.digest
            took_ns = int((trio.current_time() - look.began_s) * NS)
            await self._log.digests.write(self._clock.now(), look.past, first, replace(digest, took_ns=took_ns))

    async def _compare(self, look: _Look, name: DigestName, window: int, known: Mapping[str, int]) -> None:
        """List what differs from a digest, which makes a shallow look as good as the deep one of that digest."""
        newest = min(name.newest, self._applier.commits.newest())
        if newest <= self._applier.commits.polled() or (digest := await self._log.digests.read(name)) is None:
            return
        end = name.first + (len(digest.counts) << BUCKET_BITS)
        if end < bucket_start(newest - DIGEST_AGE_S * NS):
            return
        differences = self._sums.differences(digest, name.first, window)
        if len(differences) > DIFFERENCES_MAX:
            return
        for start, until in differences:
            there = {item[2].key for item in look.found}
            listed = await self._list(start, until, self._ahead_ns, known)
            look.found += (item for item in listed.found if item[2].key not in there)
        listed_ns = min(end, name.meta.mtime_ns - digest.took_ns) - 2 * NS  # stores date to the second
        look.past = newest
        look.began_s -= max(0.0, (self._clock.wall_ns() - listed_ns) / NS)
        look.began_ns = min(look.began_ns, listed_ns)

    def _leave_out(self, ahead: Sequence[Found]) -> None:
        """Leave out commits that are dated too far ahead, until their time has come."""
        for time, writer, meta in ahead:
            self._ahead.add(meta.key)
            self._applier.commits.record_refused(time, writer)
        self._metrics.future += len(ahead)
        if ahead:
            self._found_ahead = True
            logger.error(
                "%s left out, dated %.0f s and more ahead of the store's clock, until that time has come; the first is "
                "%s: correct that node's clock, then run `lakefs-fuse fsck --repair`",
                counted(len(ahead), "commit is", "commits are"), (ahead[0][0] - self._clock.wall_ns()) / NS,
                ahead[0][2].key,
            )  # fmt: skip

    async def _apply_all(self, found: Sequence[Found], *, wait: bool, repeats: bool) -> int:
        """Apply commits in order. Returns how many were dealt with: all, or (only with ``wait``) those before one that
        is in doubt."""
        if not found:
            if self.election.is_repeater:
                await self.election.repeat(0)
            return 0
        gets, fetched = 0, self._log.fetched if repeats else None
        try:
            for at in range(0, len(found), FETCHED_MAX):
                some = found[at : at + FETCHED_MAX]
                gets += await self._log.bundles.load_for(some)
                done = await self._apply([meta for _, _, meta in some], wait)
                if done < len(some):
                    return at + done
                is_due = gets >= GETS_FOR_A_BUNDLE and not self.election.is_repeater
                if fetched and is_due and (fetched.is_full or some[-1] is found[-1]):
                    gets = 0
                    await fetched.write()
            if self.election.is_repeater:
                await self.election.repeat(len(found))
            return len(found)
        finally:
            self._log.forget_fetched()

    async def _apply(self, metas: Sequence[ObjectMeta], wait: bool) -> int:
        records: dict[str, Record | None] = {}

        async def fetch(meta: ObjectMeta) -> None:
            with contextlib.suppress(LargeRecord):
                records[meta.key] = await self._fetch(meta, FETCHED_BYTES_MAX)

        await for_each(metas, fetch, min(FETCHES_AT_ONCE, len(metas)))
        for number, meta in enumerate(metas):
            record = records.pop(meta.key) if meta.key in records else await self._fetch(meta, RECORD_BYTES_MAX)
            if record is None or self._applier.commits.is_applied(record.time, record.writer):
                continue
            self._clock.follow(record.time)
            self._ahead.discard(meta.key)
            self._refused.discard(meta.key)
            self._metrics.lag_s = max(0.0, (self._clock.wall_ns() - record.time) / NS)
            outdated, is_sure = await self._outdated(record)
            if wait and not is_sure and self._clock.wall_ns() - record.time < DOUBT_S_MAX * NS:
                return number
            await self._applier.wait_whole()
            if self._applier.commits.is_applied(record.time, record.writer):
                continue
            this = ObjectRef(meta.key, meta.etag, meta.size)
            if len(record.operations) > OPERATIONS_AT_ONCE:
                await self._applier.apply_in_steps(record, this, outdated=outdated)
            else:
                self._applier.apply(record, this, whole=True, outdated=outdated)
            self._applied(record)
        return len(metas)

    async def _fetch(self, meta: ObjectMeta, bytes_max: int) -> Record | None:
        """Fetch a record; None if the commit is not there any more, or cannot be read. Raises LargeRecord,
        LakeError."""
        try:
            return await self._log.fetch(meta, bytes_max=bytes_max)
        except NotFound:
            return None  # collected meanwhile
        except DamagedCommit as error:
            self._refuse(meta.key, str(error))
            return None

    async def _outdated(self, record: Record) -> tuple[dict[str, str], bool]:
        """Ask the store about the doubts of a record, and return the plain objects that do not count beside it.

        These are, by path with their ETags, objects that are gone, were replaced by one that the record's writer knew,
        or are older than the record by the store's date. Also returns whether that is certain: no other object is dated
        in the record's own second. Raises LakeError."""
        outdated: dict[str, str] = {}
        doubts: list[Doubt] = []
        is_sure = True

        async def ask(doubt: Doubt) -> None:
            nonlocal is_sure
            try:
                there = await self._log.head(doubt.path)
            except NotFound:
                if not doubt.sets_attributes:
                    outdated[doubt.path] = doubt.etag
                return
            if is_copy(there):  # a copy counts only if a commit names it
                outdated[doubt.path] = doubt.etag
            elif doubt.removed_ns or doubt.sets_attributes:
                if not doubt.is_there(there.etag, there.mtime_ns):
                    outdated[doubt.path] = doubt.etag
            elif there.etag == doubt.hides or there.mtime_ns + NS <= record.time or self._applier.is_of_renamed(there):
                outdated[doubt.path] = doubt.etag
            elif there.mtime_ns <= record.time:
                is_sure = False

        for some in self._applier.doubts(record):
            doubts += some
            if len(record.operations) > DOUBTS_AT_ONCE:
                await trio.lowlevel.checkpoint()
                self._applier.paths.forget_paths()
        if doubts:
            await for_each(doubts, ask, min(FETCHES_AT_ONCE, len(doubts)))
        return outdated, is_sure

    async def _read_refused(self) -> None:
        """Apply commits that were left out and can be read now. If one was collected meanwhile, the next mount reads
        all names again, and finds its changes there. The caller holds the lock. Raises LakeError."""
        self._refused_due_s = trio.current_time() + REFUSED_AGAIN_S
        commits, there = self._applier.commits, list[Found]()

        async def find(named: tuple[int, str]) -> None:
            key = commit_key(*named)
            try:
                there.append((*named, await self._log.head(key)))
            except NotFound:
                commits.mark_outdated()
                commits.forget_refused(*named)
                logger.warning("commit %s, which was left out, is gone: the next mount reads all names again", key)

        refused = [named for named in commits.refused() if named[0] <= self._clock.ahead_ns()][:REFUSED_MAX]
        if refused:
            await for_each(refused, find, min(FETCHES_AT_ONCE, len(refused)))
        if there:
            await self._apply_all(sorted(there, key=lambda item: item[:2]), wait=False, repeats=False)

    def _refuse(self, key: str, why: str) -> None:
        named = parse_commit_key(key)
        if named is not None:
            self._applier.commits.record_refused(*named)
        if key in self._refused:
            return
        self._refused.add(key)
        self._metrics.damaged += 1
        logger.error("commit %s is left out: %s", key, why)
