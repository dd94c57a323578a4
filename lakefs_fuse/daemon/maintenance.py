"""Maintenance by a mount: checks about once an hour, and when enough commits for a fold were seen, which maintenance of
its lake is due, and has a worker do it.

What always holds:

* *spread evenly*: the times between two checks are drawn from an exponential distribution, so the checks of many mounts
  are spread evenly however the mounts were started, also those of mounts that live for minutes. No time is shorter than
  a sixtieth of the mean. Of the mounts that have seen enough commits for a fold, one in LOOKING_SHARE checks each
  minute;
* *one at a time*: the worker holds the maintenance lease, and checks again what is due after it acquired the lease;
* *the mount never waits*: work of more than a few requests happens in another process, at the lowest priority;
* *no failure is repeated every hour*: after each failure the delay doubles, up to a day, and only the first of
  consecutive failures is logged. If commits cannot be read, other mounts also wait before they try;
* *bounded disk*: what the worker keeps for the next fold (`admin.fold_database`), about the size of the index, goes
  where the disk has no room for it, and where another mount has folded for a week.

Tasks of the trio thread. A crash leaves the state that the engines document, and a lease that expires.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec
import trio

from lakefs_fuse.admin.fold_database import FoldDatabase
from lakefs_fuse.admin.maintenance import DAYS_MAX, INTERVALS_PER_DAY, UNREADABLE, Due, Inspector
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import EXIT_BUSY, EXIT_INTERRUPTED, CacheError, LakeError

NS = 1_000_000_000
INTERVAL_SHARE_MIN = 1 / 60
"""Of the mean interval, the shortest."""
LOOKING_SHARE = 20
ROOM_BYTES_MIN = 64 << 20
"""For the database of a small lake."""
INDEX_COPIES = 3
"""Copies of the newest index on the disk: the fetched files, the database, and the written files."""
COMPACTED_COPIES = 1
"""Where the database has the newest index: RocksDB may write it again."""

log = logging.getLogger(__name__)


class Worker(Protocol):
    """See `background_worker.BackgroundWorker`."""

    @property
    def step(self) -> str: ...
    async def run(
        self, command: str, args: msgspec.Struct, *, room_bytes: int
    ) -> protocol.Finished | protocol.Failed: ...
    async def clear(self) -> None: ...


class Maintenance:
    """See the module's head."""

    def __init__(
        self,
        inspector: Inspector,
        worker: Worker,
        rng: random.Random,
        database: FoldDatabase,
        commits_seen: Callable[[], int],
        threads: Threads,
        *,
        sleep: Callable[[float], Awaitable[None]] = trio.sleep,
    ) -> None:
        self._inspector, self._worker, self._rng, self._sleep = inspector, worker, rng, sleep
        """``commits_seen`` counts the commits of all nodes that were applied here."""
        self._database, self._commits_seen, self._threads = database, commits_seen, threads
        self._inspected_ns: int | None = None
        self._due, self._due_since_ns, self._warned_ns = Due(), 0, 0
        self._runs = self._failures = 0
        self._not_before_ns = self._refused_until_ns = 0
        self._holder = self._error = ""

    async def run(self) -> None:
        """Check, and run the maintenance that is due, while the mount lives."""
        await self._worker.clear()
        while True:
            await self.wait()
            try:
                await self.look()
            except Exception:
                log.exception("maintenance")

    async def wait(self) -> None:
        """Until the next look."""
        seen, mean_s = self._commits_seen(), self._inspector.interval_s
        shortest_s = mean_s * INTERVAL_SHARE_MIN
        more_s = self._rng.expovariate(1 / (mean_s - shortest_s))
        await self._sleep(shortest_s)
        while more_s > 0:
            is_due = self._commits_seen() - seen > self._inspector.commits_until_due
            if is_due and (self._database.exists() or not self._rng.randrange(LOOKING_SHARE)):
                return
            await self._sleep(min(shortest_s, more_s))
            more_s -= shortest_s

    async def look(self) -> None:
        """Check what is due, and have it done. Raises no error of the store, the disk or the worker."""
        try:
            await self._inspect()
            await self._drop_outdated()
            if not self._due:
                self._error, self._failures = "", 0
            elif self._inspector.now_ns() >= self._not_before_ns and not self._inspector.is_refused:
                await self._do_due()
        except LakeError as error:
            self._record_error(str(error))
        self._warn_of_delay()

    async def _inspect(self) -> None:
        self._due = await self._inspector.inspect()
        self._inspected_ns = now_ns = self._inspector.now_ns()
        self._due_since_ns = (self._due_since_ns or now_ns) if self._due else 0
        self._holder = self._holder if self._due else ""

    async def _drop_outdated(self) -> None:
        """Remove the database where another mount has folded for a week, also one that never had an index."""
        index, newest = self._inspector.index, self._database.newest
        if index is None or index.time - newest <= DAYS_MAX * self._inspector.day_ns:
            return
        if self._database.exists():
            await self._threads.run(self._database.remove)

    async def _do_due(self) -> None:
        may_delete = self._due.collection and await self._may_delete()
        if not self._due.fold and not may_delete:
            return
        inspector = self._inspector
        self._holder = await inspector.find_holder()
        if self._holder:
            return
        index = inspector.index
        is_current = index is not None and index.time == self._database.newest
        copies = COMPACTED_COPIES if is_current else INDEX_COPIES
        room_bytes = ROOM_BYTES_MIN + copies * (0 if index is None else index.bytes)
        args = protocol.MaintenanceArgs(
            interval_s=inspector.interval_s,
            commits_max=inspector.commits_max,
            may_delete=may_delete,
            fold_database=self._database.path,
        )
        try:
            answer = await self._worker.run("maintenance", args, room_bytes=room_bytes)
        except CacheError:
            await self._threads.run(self._database.remove)  # the disk has too little room
            self._put_off()
            raise
        except LakeError:
            self._put_off()
            raise
        if isinstance(answer, protocol.Finished) and not answer.exit_code:
            self._runs, self._failures, self._error = self._runs + 1, 0, ""
            log.info("maintenance: %s", answer.text)
            await self._inspect()
        elif answer.exit_code == EXIT_BUSY:
            log.info("maintenance: %s", _text_of(answer))
        elif answer.exit_code != EXIT_INTERRUPTED:
            self._put_off()
            self._record_error(_text_of(answer))

    async def _may_delete(self) -> bool:
        """Asked once a day where the answer was no."""
        now_ns = self._inspector.now_ns()
        if now_ns >= self._refused_until_ns and not await self._inspector.may_delete():
            self._refused_until_ns = now_ns + self._inspector.day_ns
            log.info("maintenance: these credentials may not delete commits, so another mount must collect garbage")
        return now_ns >= self._refused_until_ns

    def _put_off(self) -> None:
        delay_ns = min(self._inspector.day_ns, int(self._inspector.interval_s * NS) << self._failures)
        self._failures = min(self._failures + 1, INTERVALS_PER_DAY)
        self._not_before_ns = self._inspector.now_ns() + delay_ns

    def _record_error(self, error: str) -> None:
        log.log(logging.DEBUG if self._error else logging.WARNING, "maintenance: %s", error)
        self._error = error

    @property
    def _due_s(self) -> float:
        return (self._inspector.now_ns() - self._due_since_ns) / NS if self._due else 0.0

    def _warn_of_delay(self) -> None:
        """Once a day, where the lake has been due for a day."""
        now_ns = self._inspector.now_ns()
        if self.is_overdue and now_ns - self._warned_ns > self._inspector.day_ns:
            self._warned_ns = now_ns
            log.warning("maintenance: the lake has been due for %s for %.0f hours%s", self._wanted, self._due_s / 3600,
                        f" ({self._why})" if self._why else "")  # fmt: skip

    @property
    def is_overdue(self) -> bool:
        """The lake has been due for something for a day, as far as this mount knows."""
        return self._due_s * NS > self._inspector.day_ns

    @property
    def _wanted(self) -> str:
        parts = ("a fold" if self._due.fold else "", "a collection" if self._due.collection else "")
        return " and ".join(part for part in parts if part)

    @property
    def _why(self) -> str:
        if self._error:
            return self._error
        if self._holder:
            return f"held by {self._holder}"
        if self._inspector.is_refused:
            return UNREADABLE
        return "these credentials may not delete" if self._refused_until_ns > self._inspector.now_ns() else ""

    def statistics(self) -> dict[str, object]:
        """For `stats`; times in s since 1970, None while unknown. Names are final once released."""
        inspector, index, collection = self._inspector, self._inspector.index, self._inspector.collection
        is_known = self._inspected_ns is not None
        return {
            "mode": "auto",
            "inspected_s": self._inspected_ns / NS if self._inspected_ns is not None else None,
            "last_fold_s": index.time / NS if index is not None else None,
            "last_collection_s": collection.time / NS if collection and collection.time else None,
            "backlog": inspector.backlog if is_known else None,
            "due": self._wanted,
            "due_for_s": round(self._due_s, 3),
            "overdue": self.is_overdue,
            "overdue_because": self._why if self.is_overdue else "",
            "holder": self._holder,
            "running": self._worker.step,
            "runs": self._runs,
            "last_error": self._error,
        }


def _text_of(answer: protocol.Finished | protocol.Failed) -> str:
    return answer.text if isinstance(answer, protocol.Finished) else answer.message
