"""Elects the repeater: the mount that fetches the commits of many writers, and repeats them in bundles for all others.

No mount asks another. A mount to which LISTs show no bundle of a repeater becomes one (`begin`). What always holds
(*one is left*): of several repeaters all give up but the one whose first bundle is the oldest; if they do not see which
that is, they give up by chance, until one is left.

Called by `Poller` with its lock held, trio thread only. A crash leaves bundles, which are complete. The other
mounts find no new ones for REPEATER_S, and one of them becomes the repeater.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable

import trio

from lakefs_fuse.commits.bundles import MIXED, parse_bundle
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.store.protocol import ObjectMeta

NS = 1_000_000_000
REPEAT_S = 1.0
"""Interval of a repeater's polls, and of its bundles."""
REPEATER_S = 4.0
"""A repeater counts as present for this long after a LIST showed a new bundle of one."""
RIVAL_POLLS, RESIGNATION = 3, 1 / 4
"""Once RIVAL_POLLS polls in a row have shown new bundles of others, a repeater gives up with the probability
RESIGNATION. One poll is not enough: a mount that catches up with the commits of others stores such a bundle, too."""
REPEATER_AGE_NS = 30 * NS
"""A bundle whose newest commit is older than this is no sign of a repeater."""
FEW_SPAN_S, FEW_COMMITS = 10.0, 10
"""A repeater that applies no more than FEW_COMMITS commits in FEW_SPAN_S gives up."""


class RepeaterElection:
    """Decides whether this mount is the repeater: see the module's head."""

    def __init__(self, log: CommitLog, rng: random.Random) -> None:
        """``rng`` draws whether this mount gives up where several repeat."""
        self._log, self._rng = log, rng
        self.is_repeater = False
        """This mount repeats in bundles what all mounts commit."""
        self._other_seen_s, self._repeated_ns = -math.inf, 0
        """When a LIST last showed a new bundle of another repeater, and the time of the newest commit in it."""
        self._first_repeated_ns = 0
        """As the repeater: time of the newest commit in its first bundle."""
        self._counts = list[tuple[float, int]]()
        """As the repeater: time and number of commits of each recent poll."""
        self._rival_polls = 0
        """Number of polls in a row that have shown new bundles of others."""
        self._left_ns = 0
        """Time of the newest commit that the last poll with a repeater found, applied or left to the repeater."""

    def begin(self) -> bool:
        """Become the repeater, if the store takes bundles of this mount; return whether it is."""
        self.is_repeater = self._log.fetched is not None and not self._log.repeated.is_refused
        self._first_repeated_ns, self._rival_polls, self._counts = 0, 0, []
        return self.is_repeater

    def _give_up(self) -> None:
        self.is_repeater = False
        self._log.repeated.clear()

    def repeated_until(self, newest: int) -> int | None:
        """Return the time up to which to apply commits if there is another repeater, else None. Bundles have the
        commits up to that time, or the last poll was shown them. ``newest`` is the time of the newest commit found."""
        if trio.current_time() - self._other_seen_s >= REPEATER_S:
            return None
        before, self._left_ns = self._left_ns, newest
        return max(self._repeated_ns, before)

    def record_bundles(self, metas: Iterable[ObjectMeta]) -> None:
        """Record the bundles of repeaters that LIST showed, and give up if another mount is to be the only repeater."""
        mixed = [bundle for meta in metas if (bundle := parse_bundle(meta)) is not None and bundle.writer == MIXED]
        own = {*self._log.repeated.keys, *(self._log.fetched.keys if self._log.fetched else ())}
        since = max(self._repeated_ns, self._log.clock.wall_ns() - REPEATER_AGE_NS)
        new = [bundle.last for bundle in mixed if bundle.last > since and bundle.meta.key not in own]
        self._rival_polls = self._rival_polls + 1 if new else 0
        if not new:
            return
        self._repeated_ns, self._other_seen_s = max(new), trio.current_time()
        self._log.record_repeater(self._repeated_ns)
        resigns = self._rival_polls >= RIVAL_POLLS and self._rng.random() < RESIGNATION
        if self.is_repeater and (resigns or min(new) < self._first_repeated_ns):
            self._give_up()

    async def repeat(self, count: int) -> None:
        """As the repeater, store a bundle after a poll that applied ``count`` commits; give up if there are few."""
        newest = await self._log.repeat()
        self._first_repeated_ns = self._first_repeated_ns or newest
        now_s = trio.current_time()
        self._counts = [each for each in self._counts if now_s - each[0] < FEW_SPAN_S] + [(now_s, count)]
        is_long = now_s - self._counts[0][0] > FEW_SPAN_S - 2 * REPEAT_S
        if self._log.repeated.is_refused or (is_long and sum(each for _, each in self._counts) <= FEW_COMMITS):
            self._give_up()
