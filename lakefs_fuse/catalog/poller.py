"""Commits of other nodes: found with one LIST a poll, applied in the order of their times.

A poll asks for names after the newest commit time seen less `WINDOW_NS`, and applies what was not applied yet. So a
commit is found as long as its time is no more than that window behind the newest one when it becomes visible. Times
come from clocks that are corrected by the store's, and a request takes at most a minute; two nodes' clocks may differ
by the rest. What cannot be read is told, counted, and left out; it is never half applied.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import trio

from lakefs_fuse.catalog.application import Doubt
from lakefs_fuse.catalog.apply import Applier
from lakefs_fuse.catalog.archive import fetch_record, parse_commit_key
from lakefs_fuse.catalog.clock import HybridClock
from lakefs_fuse.catalog.record import COMMITS, ObjectRef, Record
from lakefs_fuse.catalog.window import WINDOW_NS
from lakefs_fuse.errors import DamagedCommit, LakeError, NotFound, Unsupported
from lakefs_fuse.metrics import CommitMetrics
from lakefs_fuse.nurseries import collecting
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta

NS = 1_000_000_000
FETCHES_AT_ONCE = 16
FETCHED_MAX = 16
"""Records in memory at a time."""
CLOCK_CHECK_S = 600.0
log = logging.getLogger(__name__)


class Poller:
    """See the module's head. Trio thread only."""

    def __init__(
        self, client: StoreClient, applier: Applier, clock: HybridClock, metrics: CommitMetrics, *, refresh_s: float
    ) -> None:
        self._client, self._applier, self._clock, self._metrics = client, applier, clock, metrics
        self._refresh_s = refresh_s
        self._refused: set[str] = set()
        self._lock = trio.Lock()

    async def run(self) -> None:
        """Poll for as long as the mount lives; trouble with the store is told once and tried again."""
        checked_at, failing = trio.current_time(), False
        while True:
            await trio.sleep(self._refresh_s)
            try:
                if trio.current_time() - checked_at > CLOCK_CHECK_S:
                    checked_at = trio.current_time()
                    await self.correct_clock()
                await self.poll()
                failing = False
            except LakeError as error:
                if not failing:
                    log.warning("looking for commits of other nodes failed: %s", error)
                failing = True
            except Exception:
                log.exception("looking for commits of other nodes")

    async def correct_clock(self) -> None:
        """Raises LakeError."""
        asked = self._clock.wall_ns()
        try:
            store_ns = await self._client.time_ns()
        except Unsupported:
            return  # then this machine's clock is what there is
        self._clock.correct(store_ns, self._clock.wall_ns() - asked)

    async def poll(self) -> int:
        """Apply what is new; answers how many commits that were. Raises LakeError."""
        async with self._lock:
            self._metrics.polls += 1
            since = max(0, self._applier.newest() - WINDOW_NS)
            found: list[tuple[int, str, ObjectMeta]] = []
            token: str | None = None
            start = f"{COMMITS}{since:016x}" if since else ""
            while True:
                page = await self._client.list_page(COMMITS, start_after=start, token=token)
                for meta in page.objects:
                    named = parse_commit_key(meta.key)
                    if named is not None and meta.key not in self._refused and not self._applier.is_applied(*named):
                        found.append((*named, meta))
                token = page.next_token
                if token is None:
                    break
            found.sort(key=lambda item: item[:2])
            for at in range(0, len(found), FETCHED_MAX):
                await self._apply([meta for _, _, meta in found[at : at + FETCHED_MAX]])
            if found:
                self._applier.forget_applied_before(max(0, self._applier.newest() - 2 * WINDOW_NS))
            return len(found)

    async def _apply(self, metas: Sequence[ObjectMeta]) -> None:
        records: dict[str, Record] = {}
        few = trio.CapacityLimiter(FETCHES_AT_ONCE)

        async def fetch(meta: ObjectMeta) -> None:
            async with few:
                try:
                    records[meta.key] = await fetch_record(self._client, meta)
                except NotFound:
                    pass  # collected meanwhile
                except DamagedCommit as error:
                    self._refuse(meta.key, str(error))

        async with collecting() as nursery:
            for meta in metas:
                nursery.start_soon(fetch, meta)
        for meta in metas:
            record = records.pop(meta.key, None)
            if record is None or self._applier.is_applied(record.time, record.writer):
                continue
            if not self._clock.seen(record.time):
                self._metrics.future += 1
                self._refuse(meta.key, "its time lies in the future: correct that node's clock, then run gc or fsck")
                continue
            self._metrics.lag_s = max(0.0, (self._clock.wall_ns() - record.time) / NS)
            outdated = await self._outdated(record)
            if not self._applier.is_applied(record.time, record.writer):
                self._applier.apply(record, ObjectRef(meta.key, meta.etag, meta.size), outdated=outdated)

    async def _outdated(self, record: Record) -> dict[str, str]:
        """Which of the plain objects that were listed in the record's second it stands above: paths and ETags of those
        that are gone, or are what its writer knew. Raises LakeError."""
        outdated: dict[str, str] = {}
        few = trio.CapacityLimiter(FETCHES_AT_ONCE)

        async def ask(doubt: Doubt) -> None:
            async with few:
                try:
                    there = (await self._client.head(doubt.path)).etag
                except NotFound:
                    there = doubt.hides
                if there == doubt.hides:
                    outdated[doubt.path] = doubt.etag

        async with collecting() as nursery:
            for doubt in self._applier.doubts(record):
                nursery.start_soon(ask, doubt)
        return outdated

    def _refuse(self, key: str, why: str) -> None:
        self._refused.add(key)
        named = parse_commit_key(key)
        if named is not None:
            self._applier.note_refused(*named)
        self._metrics.damaged += 1
        log.error("commit %s is left out: %s", key, why)
