"""The requests of a lake as a function of its size: rates in a steady state, which `cluster` confirms at small sizes.

Each rule is a sentence of `docs/operations.md` or of a decision (0134 to 0143) with its constant. What is left out:
data that programs read and write, retries, and what a mount does in its first minute.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from lakefs_fuse.admin.maintenance import INTERVAL_S, LEVELS_COMMITS_MAX
from lakefs_fuse.commits.bundles import REPEATED_BYTES_MAX, REPEATED_SPAN_NS
from lakefs_fuse.commits.hybrid_clock import WINDOW_NS
from lakefs_fuse.commits.idleness import IDLE_REFRESH_S
from lakefs_fuse.commits.listing_digest import BUCKET_BITS
from lakefs_fuse.commits.poller import (
    DEEP_S_MIN,
    DIGEST_SPAN_NS,
    GETS_MAX,
    OVERLAP_KEYS_MIN,
    OVERLAP_S_MAX,
    SHALLOW_KEYS,
)
from lakefs_fuse.commits.repeater_election import FEW_COMMITS, FEW_SPAN_S, REPEAT_S
from lakefs_fuse.daemon.maintenance import INTERVAL_SHARE_MIN
from scripts.scale.prices import MONTH_S, usd

NS = 1_000_000_000
PAGE_KEYS = 1000
REQUEST_S = 0.036
"""Mean latency of the simulated store, 15 to 100 ms."""
COMMIT_BYTES = 620
"""Of a commit that tells of one small file."""
QUICK_GETS = 2.0
"""Of a poll, where a writer repeats its commits at once."""
SLOW_GETS = 3.5
"""Of a poll, for each writer that repeats eight commits at a time: the mean of those that are in no bundle yet."""
OWN_BUNDLE_COMMITS, SLOW_BUNDLE_COMMITS = 5.0, 8.0
"""Commits in a bundle of a writer where there is no repeater: of one that makes QUICK_S of them a second, and of
others."""
QUICK_S = 0.4
REPEATER_BUNDLE_S = REPEAT_S + REPEATED_SPAN_NS / NS
"""So long are the commits of a repeater's bundle."""
INDEX_FILE_BYTES = 24 << 20
FOLD_REQUESTS = 20
"""Beside the commits: the lease, the inspection, LISTs, three PUTs."""
TAIL_GETS = 40.0
"""Of a fresh mount for commits that are newer than the index, in the mean of a day: fewer where they are in bundles."""


@dataclass(frozen=True)
class Rate:
    """Requests and bytes a second."""

    gets: float = 0.0
    lists: float = 0.0
    puts: float = 0.0
    received: float = 0.0
    sent: float = 0.0

    def __add__(self, other: Rate) -> Rate:
        return Rate(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))

    @property
    def usd_month(self) -> float:
        return MONTH_S * usd(gets=self.gets, lists=self.lists, puts=self.puts)


@dataclass(frozen=True, kw_only=True)
class Lake:
    """A lake in use: ``nodes`` that programs ask, and ``idle`` ones; ``writers`` of the nodes make ``commits_s``
    commits a second in all. On each node programs ask for names in so many ``directories`` all the time, of one page
    each, which were listed ``ttl_s`` ago; 0 where only mounts write (`--foreign`). ``mounts_day`` mounts begin with an
    empty cache."""

    nodes: int
    writers: int = 1
    commits_s: float = 0.0
    idle: int = 0
    refresh_s: float = 5.0
    ttl_s: float = 60.0
    directories: int = 0
    names: int = 0
    index_bytes: int = 0
    mounts_day: int = 0

    @property
    def poll_s(self) -> float:
        """Between two polls of one node: its interval, and the requests of the poll one after the other."""
        return self.refresh_s + REQUEST_S * (1 + min(1.0, self.commits_s * self.refresh_s))

    @property
    def has_repeater(self) -> bool:
        """One that has fewer commits gives up, and until one a second others often take its place."""
        return self.commits_s > max(GETS_MAX / self.refresh_s, 0.8 * FEW_COMMITS / FEW_SPAN_S)

    @property
    def is_long(self) -> bool:
        """The visibility window has more commits than a page: polls are shallow, and digests are put."""
        return self.commits_s * WINDOW_NS / NS > PAGE_KEYS

    @property
    def poll_pages(self) -> float:
        if not self.is_long:
            return 1.0
        new = self.commits_s * self.refresh_s
        overlap = min(self.commits_s * OVERLAP_S_MAX, max(OVERLAP_KEYS_MIN, SHALLOW_KEYS - new))
        return max(1.0, (new + overlap) / PAGE_KEYS + 0.5)

    @property
    def _is_quick(self) -> bool:
        return self.commits_s / max(1, self.writers) >= QUICK_S

    def gets_a_poll(self, interval_s: float) -> float:
        """Of a mount that polls at this interval."""
        new = self.commits_s * (1 - 1 / max(1, self.nodes)) * interval_s
        if self.has_repeater:
            return min(new, 1 + interval_s / REPEATER_BUNDLE_S)
        if self._is_quick:
            return min(new, QUICK_GETS + new / OWN_BUNDLE_COMMITS / 2)
        return min(new, SLOW_GETS * self.writers + new / SLOW_BUNDLE_COMMITS)

    def poll(self) -> tuple[float, float]:
        """LISTs and GETs of a poll in the background: where the first LIST has shown more than GETS_MAX GETs, and no
        repeater, a second one, when a mount has put a bundle for all."""
        gets = self.gets_a_poll(self.poll_s)
        if self.has_repeater or gets <= GETS_MAX:
            return self.poll_pages, gets
        return 2 * self.poll_pages, min(gets, 1 + self.poll_s / REPEATER_BUNDLE_S)

    def rates(self) -> dict[str, Rate]:
        """By traffic; all of it is about `.lakefs/commits/`, but for listings, most of mounts, and a part of
        maintenance."""
        polls_s, (lists, gets) = (self.nodes - self.has_repeater) / self.poll_s, self.poll()
        others_s = self.commits_s * (1 - 1 / max(1, self.nodes))
        idle_s = self.idle / max(IDLE_REFRESH_S, self.refresh_s)
        size = COMMIT_BYTES * self.commits_s
        fetched = self.nodes * COMMIT_BYTES * others_s * (1.6 if self.has_repeater else 1.1)
        rates = {
            "polls": Rate(lists=polls_s * lists + idle_s),
            "reading commits": Rate(gets=polls_s * gets, received=fetched)
            + Rate(gets=idle_s * self.gets_a_poll(max(IDLE_REFRESH_S, self.refresh_s)), received=self.idle * size),
            "writing commits": Rate(puts=self.commits_s, sent=size),
        }
        if self.has_repeater:
            bundle = min(size * REPEATER_BUNDLE_S, REPEATED_BYTES_MAX + size * REPEAT_S)
            bundles_s = min(1 / REPEAT_S, self.commits_s / 2)
            rates["repeater"] = Rate(others_s, 1 / REPEAT_S, bundles_s, size, bundle * bundles_s)
        else:
            in_bundle = OWN_BUNDLE_COMMITS if self._is_quick else SLOW_BUNDLE_COMMITS
            rates["own bundles"] = Rate(puts=self.commits_s / in_bundle, sent=size)
        if self.is_long:
            pages = self.commits_s * DIGEST_SPAN_NS / NS / PAGE_KEYS
            digest = 10.0 * (DIGEST_SPAN_NS >> BUCKET_BITS)
            each_s = DEEP_S_MIN * 1.25
            rates["digests"] = Rate(
                self.nodes / each_s, pages / each_s, 1 / each_s, self.nodes * digest / each_s, digest / each_s
            )
        rates["listings"] = Rate(lists=self.nodes * self.directories / self.ttl_s)
        folds_s = min(self.commits_s / LEVELS_COMMITS_MAX, INTERVAL_SHARE_MIN / INTERVAL_S)
        rates["maintenance"] = Rate(
            gets=2 * self.commits_s, lists=(self.nodes + self.idle) / INTERVAL_S + folds_s * FOLD_REQUESTS,
            puts=3 * folds_s, received=2 * size, sent=size / 4,
        )  # fmt: skip
        mounts_s = self.mounts_day / 86400
        rates["new mounts"] = Rate(
            gets=mounts_s * (2 + self.index_bytes / INDEX_FILE_BYTES + min(TAIL_GETS, self.commits_s * 3600)),
            lists=mounts_s * 4, received=mounts_s * self.index_bytes,
        )  # fmt: skip
        return {name: rate for name, rate in rates.items() if rate != Rate()}

    def total(self) -> Rate:
        return _sum(self.rates())

    def following(self) -> Rate:
        """Without maintenance, listings and mounts: what mounts ask for in each minute."""
        return _sum(self.rates(), "listings", "maintenance", "new mounts")

    def log(self) -> Rate:
        """What goes to `.lakefs/commits/`, whose keys are in the order of time: one partition has all that is new."""
        return _sum(self.rates(), "listings", "new mounts")


def _sum(rates: dict[str, Rate], *without: str) -> Rate:
    return sum((rate for name, rate in rates.items() if name not in without), Rate())
