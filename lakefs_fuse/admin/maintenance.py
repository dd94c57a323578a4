"""What maintenance a lake is due for: found out with one LIST where it is due for none.

A lake is due for a fold when many commits are newer than its newest index, or one of them is a day old; and for a
collection when a day has passed since the last one and there is a newer commit, or a week in any case. A collection
leaves the time of its end in the object `.lakefs/last-collection` (`docs/format.md`), for all who ask. So does a run
that is refused because commits cannot be read: the lake stays due, and no process tries again before `is_refused` ends.

What always holds (*cost follows the change*): an inspection lists the commits that are newer than the index that it
knows, BACKLOG_MAX of them and a page at most. Index and last collection are read again only where those that are known
make the lake due for something, because another process may have done it.

Tasks of one trio loop. `gc` writes the object at the end of a run; nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from lakefs_fuse.admin.fold_database import FoldDatabase
from lakefs_fuse.commits.archive import commit_time
from lakefs_fuse.commits.hybrid_clock import AHEAD_NS_MAX
from lakefs_fuse.commits.index.index import Manifest, manifests
from lakefs_fuse.commits.maintenance_lease import find_holder
from lakefs_fuse.commits.record import COMMITS, TIME_NS_MAX
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import MALFORMED, AccessDenied, NotFound, PreconditionFailed
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient

INTERVAL_S = 3600.0
"""Mean time between two inspections of a mount. Tests lower it, and with it the day."""
COMMITS_MAX = 2000
"""Newer than the newest index: a fresh mount fetches them, with a GET each at worst, within seconds."""
LEVELS_COMMITS_MAX = 300
"""The same in a lake with levels of the index, where a fold costs what changed: a fresh mount fetches these commits in
bundles, and sends 100 requests at most in all."""
NAMES_PER_COMMIT = 1000
"""A fold reads and writes all names, unless the lake has levels of the index, so a lake of many names is folded after
more commits: some 100 KB for each commit."""
BACKLOG_MAX = 20_000
"""However many names there are."""
INTERVALS_PER_DAY = 24
DAYS_MAX = 7
"""Between collections where no commit says that anything changed. They delete what waits for its grace period, and what
dead nodes left."""
GRACE_DAYS = DAYS_MAX
"""As long as a node may be cut off, without missing a commit (`poller.ABSENCE_S_MAX`)."""
UPLOAD_DAYS = 30
"""An unfinished upload, or a spilled part, that is older counts as one of a dead node. A file that is open for writing
for longer, and larger than the staging area, cannot be stored any more."""
PATIENCE = 2
"""A mount that does not have the names of the newest index (`fold_database`) waits for this many times as many commits,
and as long, so that the one that has them folds again, and reads and writes only what changed."""
TAKES_MAX = 10
"""A collection that takes long is due after ten times as long, so that it takes a tenth of the time at most."""
PAUSE_DAYS_MAX = 30
"""And no longer: a collection on a machine that was suspended took days."""
UNREADABLE = "commits cannot be read, or lie in the future: run fsck"
"""Why maintenance was refused."""
NS = 1_000_000_000

KEY = f"{RESERVED_PREFIX}last-collection"
FORMAT = 1
RECORD_BYTES_MAX = 4 << 10
ABSENT = f"{COMMITS}absent"
"""The key of no object: whether it may be deleted tells whether commits may be."""


class CollectionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Contents of the object. ``time`` of the end of the last collection, by the store's clock, and ``newest``, of the
    newest commit that it knew, in ns since 1970, both 0 for none; ``took_s`` is how long it ran. ``refused`` is the
    time of the last run since that was refused; ``took_s`` is of that where it is more."""

    format: int = FORMAT
    time: int
    newest: int
    took_s: int = 0
    refused: int = 0


async def read_collection(client: StoreClient) -> CollectionRecord | None:
    """None where there was no collection, or its record cannot be read. Raises StoreError kinds."""
    try:
        fetched = await client.get(KEY, 0, RECORD_BYTES_MAX)
        record = msgspec.msgpack.decode(fetched.data, type=CollectionRecord)
    except (NotFound, *MALFORMED):
        return None
    is_possible = 0 <= record.time <= TIME_NS_MAX and 0 <= record.newest <= TIME_NS_MAX and record.took_s >= 0
    return record if record.format == FORMAT and is_possible else None


async def write_collection(client: StoreClient, record: CollectionRecord) -> None:
    """Raises StoreError kinds."""
    await client.put(KEY, msgspec.msgpack.encode(record))


@dataclass(frozen=True, slots=True)
class Due:
    """What a lake is due for."""

    fold: bool = False
    collection: bool = False

    def __bool__(self) -> bool:
        return self.fold or self.collection


class Inspector:
    """Finds out what a lake is due for. ``ahead_ns`` is by how much the store's clock is ahead; ``interval_s`` is
    INTERVAL_S and ``commits_max`` LEVELS_COMMITS_MAX or COMMITS_MAX, but in tests; ``database`` is what the mount folds
    with."""

    def __init__(
        self,
        client: StoreClient,
        clock: Clock,
        *,
        interval_s: float,
        commits_max: int,
        ahead_ns: Callable[[], int] = lambda: 0,
        database: FoldDatabase | None = None,
        has_levels: bool = False,
    ) -> None:
        self._client, self._clock, self._ahead_ns, self._database = client, clock, ahead_ns, database
        self._has_levels = has_levels
        self.interval_s, self.commits_max = interval_s, commits_max
        self.day_ns = int(interval_s * INTERVALS_PER_DAY * NS)
        self.index: Manifest | None = None
        """The newest, as far as is known."""
        self.collection: CollectionRecord | None = None
        """The last, as far as is known."""
        self.backlog = 0
        """Commits that are newer than the index; where they are many, not all are counted."""
        self._oldest, self._newest = TIME_NS_MAX, 0
        """Times of the first and of the last of these that was counted."""
        self._is_known = False

    async def inspect(self) -> Due:
        """Raises StoreError kinds."""
        is_new = not self._is_known
        if is_new:
            await self.read()
        await self._count()
        due = self.due()
        if due and not is_new:
            await self.read()
            await self._count()
            due = self.due()
        return due

    async def read(self) -> None:
        """Read which index and which collection is the newest. Raises StoreError kinds."""
        until_ns = self.now_ns() + AHEAD_NS_MAX  # a later one is of a node whose clock was wrong
        self.index = next(iter(await manifests(self._client, count_max=1, until_ns=until_ns)), None)
        self.collection = await read_collection(self._client)
        self._is_known = True

    async def _count(self) -> None:
        since, commits_max = self._folded, self._backlog_max
        self.backlog, self._oldest, self._newest = 0, TIME_NS_MAX, since
        async for page in self._client.list_all(COMMITS, start_after=f"{COMMITS}{since:016x}"):
            times = [time for meta in page.objects if (time := commit_time(meta.key)) > since]
            self.backlog += len(times)
            self._oldest, self._newest = min([self._oldest, *times]), max([self._newest, *times])
            if self.backlog > commits_max:
                break

    @property
    def commits_until_due(self) -> int:
        """After this many more commits the lake is due for a fold, as far as is known; where it is due already, and not
        folded, after as many as make it due."""
        most = self._backlog_max
        return most - self.backlog if self.backlog <= most else most

    @property
    def _folded(self) -> int:
        return 0 if self.index is None else self.index.newest

    @property
    def _backlog_max(self) -> int:
        names = 0 if self.index is None or self._has_levels else self.index.names
        return self._patience * max(self.commits_max, min(names // NAMES_PER_COMMIT, BACKLOG_MAX))

    @property
    def _patience(self) -> int:
        return PATIENCE if self._database is not None and self._database.is_needed(self.index) else 1

    def due(self) -> Due:
        """By what is known, without a request."""
        day_ns, now_ns, last = self._patience * self.day_ns, self.now_ns(), self.collection
        is_old = bool(self.backlog) and now_ns - self._oldest > day_ns
        fold = is_old or self.backlog > self._backlog_max
        if self.index is None and not self.backlog:
            collection = False  # nothing was ever committed
        elif last is None or last.time > now_ns + day_ns:  # of a clock that was wrong
            collection = is_old or self.index is not None
        else:
            passed_ns = now_ns - last.time
            has_changed = self._newest > last.newest
            pause_ns = min(last.took_s * TAKES_MAX * NS, PAUSE_DAYS_MAX * day_ns)
            is_late = passed_ns > max(day_ns, pause_ns)
            collection = is_late and (has_changed or passed_ns > DAYS_MAX * day_ns)
        return Due(fold, collection)

    @property
    def is_refused(self) -> bool:
        """A run was refused so lately that none is to begin: ten times as long ago as it took, an hour at least and a
        day at most."""
        last = self.collection
        if last is None:
            return False
        pause_ns = min(max(int(self.interval_s * NS), last.took_s * TAKES_MAX * NS), self.day_ns)
        return 0 <= self.now_ns() - last.refused < pause_ns

    async def record_refusal(self, took_s: int) -> None:
        """A run of this process was refused after so long. Raises StoreError kinds."""
        last = self.collection or CollectionRecord(time=0, newest=0)
        self.collection = replace(last, took_s=max(last.took_s, took_s), refused=self.now_ns())
        await write_collection(self._client, self.collection)

    def now_ns(self) -> int:
        """The store's time, in ns since 1970."""
        return self._clock.wall_ns() + self._ahead_ns()

    async def find_holder(self) -> str:
        """Who has the maintenance lease, empty for nobody. Raises StoreError kinds."""
        return await find_holder(self._client, self._clock)

    async def may_delete(self) -> bool:
        """Whether the store lets these credentials delete commits. Raises StoreError kinds."""
        etag = "0" * 32 if self._client.capabilities.delete_if_match else None
        try:
            await self._client.delete(ABSENT, etag=etag)  # with a condition, a bucket that keeps versions gets none
        except AccessDenied:
            return False
        except (NotFound, PreconditionFailed):
            pass
        return True
