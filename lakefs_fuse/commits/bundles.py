"""Bundles: objects that repeat many small commits, so that a mount that lacks these fetches them with one GET.

A bundle is stored beside the commits and contains whole commit objects, of `COMMIT_BYTES_MAX` at most, with their
ETags. Its name has the times of the first and the last of them, and their number. Any mount may write one: a mount
repeats its own commits when it has made several and again when it has made many, and those that it fetched with many
GETs. If many writers commit, one mount is the *repeater* (`poller`): it repeats the commits of all, each second.

What always holds (*only a copy*): a commit counts because LIST shows it, never because a bundle has it; one that no
bundle has, or only with another ETag, is fetched by itself. So a bundle that is missing, damaged or deleted costs
requests and nothing else, and a program that does not know of bundles misses nothing.

Trio thread only. Memory is bounded: `LOADED_BYTES_MAX` for what was read, and `BUNDLE_BYTES_MAX` for each bundle that
is being gathered. A crash loses bundles that were to be written, and nothing else.
"""

from __future__ import annotations

import logging
import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import NamedTuple, TypeAlias

import msgspec

from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.errors import MALFORMED, AccessDenied, LakeError
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer, ObjectMeta
from lakefs_fuse.sync.refusal import Refusal

COMMIT_BYTES_MAX = 16 << 10
"""Larger commits are packs, or change hundreds of names. They are not repeated: there are few, and a GET each pays off.
"""
BUNDLE_BYTES_MAX = 4 << 20
BUNDLE_COMMITS_MAX = 8192
LOADED_BYTES_MAX = 16 << 20
"""Maximum of commits in memory that bundles brought and that are not applied yet. Others are fetched by themselves."""
TRIES_MAX = 2
"""Maximum of bundles that are loaded for one commit."""
OWN_COMMITS_MIN = 4
"""A mount repeats its own commits in a bundle once it has made this many in OWN_SPAN_S, or twice as many in any time. A
mount that polls every 5 s fetches fewer without a bundle."""
OWN_SPAN_S = 10.0
REPEATED_SPAN_NS, REPEATED_BYTES_MAX = 6_000_000_000, 512 << 10
"""Maximum age and size of what a bundle repeats beside new commits, so that a mount that polls every 5 s fetches one
bundle of five. Hundreds of writers make more than that size in a second; then it fetches three."""
OWN_AGAIN = 512
"""A mount repeats its own commits a second time, this many in one bundle, so that later mounts fetch fewer bundles."""
OWN_DELAY_S = 1.5
"""Delay of a bundle of own commits once there are enough for one: commits made meanwhile go into it, too."""
KEYS_MAX = 64
"""A mount remembers the keys of this many of its last bundles, so that it takes none of them for another's. A repeater
stores fewer before they are too old to count (`repeater_election.REPEATER_AGE_NS`)."""
SUFFIX = ".bundle"
"""Suffix of the key of a bundle."""
MIXED = "0" * 8
"""In the key of a bundle, in place of a writer: the bundle has commits of several writers."""
_NAME = re.compile(
    re.escape(COMMITS) + r"([0-9a-f]{16})-([0-9a-f]{8})-([0-9a-f]{16})-([0-9a-f]{8})" + re.escape(SUFFIX)
)
log = logging.getLogger(__name__)


class Bundle(NamedTuple):
    """A bundle as its key describes it. ``last`` and ``first`` are the times of the newest and the oldest commit in it,
    ``writer`` is that of all (or MIXED), ``commits`` their number."""

    last: int
    writer: str
    first: int
    commits: int
    meta: ObjectMeta


class Copy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A commit object in a bundle."""

    key: str
    etag: str
    body: bytes


Found: TypeAlias = tuple[int, str, ObjectMeta]
"""A commit that LIST showed: its time, its writer, the object."""
_COPIES: msgspec.msgpack.Decoder[list[Copy]] = msgspec.msgpack.Decoder(list[Copy])


def parse_bundle(meta: ObjectMeta) -> Bundle | None:
    """Return the bundle that an object is by its key; None for other objects, and if it is too large."""
    match = _NAME.fullmatch(meta.key)
    if match is None or not 0 < meta.size <= 2 * BUNDLE_BYTES_MAX:
        return None
    return Bundle(int(match[1], 16), match[2], int(match[3], 16), int(match[4], 16), meta)


def commit_time(key: str) -> int:
    """Return the time in the key of a commit, or of the newest commit in the key of a bundle."""
    return int(key[len(COMMITS) : len(COMMITS) + 16], 16)


def bundle_key(copies: Sequence[Copy], writer: str) -> str:
    """Return the key of a bundle of these commits, which are in the order of their times."""
    first, last = (each.key[len(COMMITS) : len(COMMITS) + 16] for each in (copies[0], copies[-1]))
    return f"{COMMITS}{last}-{writer}-{first}-{len(copies):08x}{SUFFIX}"


class _Sweep:
    """The bundles of one writer, or the mixed ones, that may have wanted commits; asked in the order of times."""

    def __init__(self, times: Sequence[int]) -> None:
        """``times`` are those of the wanted commits, ascending."""
        self._times = times
        self._later: list[Bundle] = []
        """Bundles whose first commit is later than the last time asked for, the latest first."""
        self._current: list[tuple[int, int, str, Bundle]] = []
        """A heap of the other bundles: those with the most wanted commits first, of equal ones the smaller."""

    def add(self, bundles: Iterable[Bundle]) -> None:
        """Set the bundles, before the first question; those with fewer than two wanted commits are left out."""
        useful = (bundle for bundle in bundles if self._wanted_in(bundle, bundle.first) > 1)
        self._later = sorted(useful, key=lambda bundle: bundle.first, reverse=True)

    def _wanted_in(self, bundle: Bundle, since: int) -> int:
        return bisect_right(self._times, bundle.last) - bisect_left(self._times, since)

    def best(self, time: int) -> tuple[int, int, str, Bundle] | None:
        """Return the rank of the best bundle for a commit of this time (less is better), with the bundle as last item.
        None if a GET of the commit does as well."""
        later, current = self._later, self._current
        while later and later[-1].first <= time:
            bundle = later.pop()
            heappush(current, (-self._wanted_in(bundle, bundle.first), bundle.meta.size, bundle.meta.key, bundle))
        while current and self._wanted_in(current[0][3], time) < 2:
            heappop(current)
        return current[0] if current else None

    def remove_best(self) -> None:
        """Remove the bundle that `best` returned."""
        heappop(self._current)


class _Plan:
    """Chooses bundles for commits; callers ask in the order of the commits' times."""

    def __init__(self, bundles: Iterable[Bundle], commits: Sequence[Found]) -> None:
        times: dict[str, list[int]] = {MIXED: [time for time, _, _ in commits]}
        for time, writer, _ in commits:
            times.setdefault(writer, []).append(time)
        self._sweeps = {writer: _Sweep(of_writer) for writer, of_writer in times.items()}
        by_writer: dict[str, list[Bundle]] = {}
        for bundle in bundles:
            by_writer.setdefault(bundle.writer, []).append(bundle)
        for writer, of_writer in by_writer.items():
            if sweep := self._sweeps.get(writer):
                sweep.add(of_writer)

    def take(self, time: int, writer: str) -> Bundle | None:
        """Remove and return the best bundle that may have this commit. None if a GET of the commit does as well."""
        sweeps = [sweep for name in (writer, MIXED) if (sweep := self._sweeps.get(name))]
        found = [(best, sweep) for sweep in sweeps if (best := sweep.best(time))]
        if not found:
            return None
        best, sweep = min(found, key=lambda item: item[0])
        sweep.remove_best()
        return best[3]


class BundleReader:
    """The bundles that a LIST of commits has shown, loaded as commits in them are needed."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._bundles: Sequence[Bundle] = ()
        self._commits: Sequence[Found] = ()
        self._plan = _Plan((), ())
        self._wanted: dict[str, ObjectMeta] = {}
        self._copies: dict[str, bytes] = {}
        self._bytes = 0

    def begin(self, objects: Iterable[ObjectMeta], commits: Sequence[Found]) -> None:
        """Begin with the bundles that a LIST has shown, for these commits, which are in the order of their times."""
        self.end()
        if len(commits) > 1:
            self._bundles = [bundle for meta in objects if (bundle := parse_bundle(meta)) is not None]
            self._commits = commits
            self._plan = _Plan(self._bundles, commits)
            self._wanted = {meta.key: meta for _, _, meta in commits}

    def end(self) -> None:
        """Forget what `begin` was given."""
        self._bundles = self._commits = ()
        self._plan = _Plan((), ())
        self._wanted, self._copies, self._bytes = {}, {}, 0

    def newest(self, writer: str) -> int:
        """Return the time up to which bundles have commits of a writer; 0 if there are none."""
        return max((bundle.last for bundle in self._bundles if bundle.writer in (writer, MIXED)), default=0)

    def gets(self, up_to: int) -> int:
        """Return how many GETs the commits take, as far as keys of bundles tell; counting ends beyond ``up_to``."""
        plan, gets = _Plan(self._bundles, self._commits), 0
        covered: dict[str, int] = {}
        """The time up to which chosen bundles have commits, by writer."""
        for time, writer, _ in self._commits:
            if time > covered.get(writer, -1) and time > covered.get(MIXED, -1):
                if bundle := plan.take(time, writer):
                    covered[bundle.writer] = max(bundle.last, covered.get(bundle.writer, -1))
                gets += 1
                if gets > up_to:
                    break
        return gets

    async def load_for(self, commits: Iterable[Found]) -> int:
        """Load bundles for these commits, which follow those of the last call. Returns how many GETs the commits take
        in all, including those that are in no bundle. Raises nothing: such commits are fetched by themselves."""
        gets = 0
        for time, writer, meta in commits:
            for _ in range(TRIES_MAX):
                if self.has(meta) or (bundle := self._plan.take(time, writer)) is None:
                    break
                gets += 1
                await self._load(bundle)
            gets += not self.has(meta)
        return gets

    async def _load(self, bundle: Bundle) -> None:
        meta = bundle.meta
        try:
            raw = (await self._client.get(meta.key, 0, meta.size, etag=meta.etag)).data
            copies = _COPIES.decode(raw)
        except (LakeError, *MALFORMED) as error:
            log.info("bundle %s is not read, its commits are: %s", meta.key, error)
            return
        for copy in copies:
            if self._bytes + len(copy.body) > LOADED_BYTES_MAX:
                break
            wanted = self._wanted.pop(copy.key, None)
            if wanted is None:
                continue
            if _is_of(copy, wanted):
                self._copies[copy.key] = copy.body
                self._bytes += len(copy.body)
            else:
                self._wanted[copy.key] = wanted

    def has(self, meta: ObjectMeta) -> bool:
        """Return whether a loaded bundle has the commit object that LIST showed as ``meta``."""
        return meta.key in self._copies

    def pop(self, meta: ObjectMeta) -> bytes | None:
        """Remove and return the commit object that LIST showed as ``meta``; None if no loaded bundle has it."""
        body = self._copies.pop(meta.key, None)
        self._bytes -= len(body or b"")
        return body


def _is_of(copy: Copy, meta: ObjectMeta) -> bool:
    return (copy.etag, len(copy.body)) == (meta.etag, meta.size)


class BundleWriter:
    """Gathers commits, and repeats them in bundles."""

    def __init__(self, client: StoreClient, writer: str) -> None:
        self._client, self._writer = client, writer
        self._copies: dict[str, Copy] = {}
        self._bytes, self._has_new = 0, False
        self._refusal = Refusal()
        self.written = 0
        """Number of bundles that were stored."""
        self.keys: deque[str] = deque(maxlen=KEYS_MAX)
        """Keys of the last bundles, also of those that the store may not have."""

    @property
    def commits(self) -> int:
        """Number of commits that were gathered."""
        return len(self._copies)

    @property
    def is_refused(self) -> bool:
        """True if this mount may not write bundles, as far as it knows."""
        return self._refusal.is_in_effect

    @property
    def is_full(self) -> bool:
        """True if the bundle takes no further commit."""
        return self._bytes >= BUNDLE_BYTES_MAX - COMMIT_BYTES_MAX or len(self._copies) >= BUNDLE_COMMITS_MAX

    def add(self, meta: ObjectMeta | Copy, body: Buffer) -> None:
        """Gather a commit object, unless it is large, or there is no room for it, or bundles are refused."""
        if len(body) <= COMMIT_BYTES_MAX and not (self.is_full or self.is_refused):
            self._copies[meta.key] = Copy(meta.key, meta.etag, bytes(body))
            self._bytes += len(body)
            self._has_new = True

    def _keep(self, copies: Sequence[Copy]) -> None:
        since = commit_time(copies[-1].key) - REPEATED_SPAN_NS
        for copy in reversed(copies):
            if commit_time(copy.key) < since or self._bytes + len(copy.body) > REPEATED_BYTES_MAX:
                break
            self._copies[copy.key] = copy
            self._bytes += len(copy.body)

    def move_to(self, other: BundleWriter) -> None:
        """Have another writer gather what was gathered here."""
        for copy in self._copies.values():
            other.add(copy, copy.body)
        self.clear()

    def clear(self) -> None:
        """Forget what was gathered."""
        self._copies, self._bytes = {}, 0

    async def write(self, *, keep: bool = False) -> str:
        """Store a bundle of what was gathered; returns its key, empty if none was stored.

        With ``keep`` the next bundle has the newest of these commits as well, as far as REPEATED_SPAN_NS and
        REPEATED_BYTES_MAX allow. Raises nothing: a bundle is only a copy."""
        copies = sorted(self._copies.values(), key=lambda copy: copy.key)
        has_new, self._has_new = self._has_new, False
        self.clear()
        if keep and copies:
            self._keep(copies)
        if len(copies) < 2 or not has_new or self.is_refused:
            return ""
        key = bundle_key(copies, self._writer)
        try:
            self.keys.append(key)
            await self._client.put(key, msgspec.msgpack.encode(copies))
            self.written += 1
            return key
        except AccessDenied as error:
            log.info("no bundles are written for an hour: %s", error)
            self._refusal.note()
        except LakeError as error:
            log.info("a bundle of %d commits is not written: %s", len(copies), error)
        return ""
