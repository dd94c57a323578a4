"""The commits of a lake in its store: one writer dates, stores, lists and fetches them here.

What always holds (*whole commits*): a commit appears with one PUT, or not at all; a fetched record is checked against
its CRC-32 and its name before any caller gets it.

For tasks of the trio loop; worker threads build large archives and decode large records. Only the clock, the budget of
packs, and copies of small commits for bundles are kept in memory, so a crash leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

import trio

from lakefs_fuse.commits.archive import (
    COMMENT_BYTES_MAX,
    END,
    RECORD_BYTES_MAX,
    Member,
    Whereabouts,
    build,
    commit_key,
    locate,
    parse_commit_key,
    read_bounded_record,
)
from lakefs_fuse.commits.bundles import (
    BUNDLE_COMMITS_MAX,
    COMMIT_BYTES_MAX,
    MIXED,
    OWN_AGAIN,
    OWN_COMMITS_MIN,
    OWN_DELAY_S,
    OWN_SPAN_S,
    BundleReader,
    BundleWriter,
    commit_time,
)
from lakefs_fuse.commits.gc_record import read_horizon
from lakefs_fuse.commits.hybrid_clock import HybridClock
from lakefs_fuse.commits.listing_digest import DigestStore
from lakefs_fuse.commits.pack_budget import PACK_BYTES_MIN, PackBudget
from lakefs_fuse.commits.record import COMMITS, ObjectRef, Record, encode_checked, newest_read
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import DamagedCommit, Unavailable, Unsupported
from lakefs_fuse.store.client import NewKey, Pages, StoreClient
from lakefs_fuse.store.protocol import Body, Buffer, ObjectMeta, length_of

TAIL_BYTES = 256 << 10
"""Size of the first GET of a commit: the record and the directory of a pack of a thousand files fit in it."""
DECODE_INLINE_BYTES_MAX = 256 << 10
BUILD_INLINE_BYTES_MAX = 1 << 20
"""A thread decodes larger records, and builds archives with more bytes of members, so that no step of the loop takes
more than 50 ms."""
WINDOW_BYTES = 8 << 20
"""Size of each further GET of a record that does not fit in the first one."""
REPEATER_S_MAX = 10.0
"""A mount that has heard of no repeater for this long repeats its own commits."""
ATTEMPTS_MAX = 3
"""An object that arrives damaged this many times counts as damaged itself."""
T = TypeVar("T")


class LargeRecord(Exception):
    """Raised for a record that is larger than the caller has room for."""


class CommitLog:
    """The commit log of a lake for one writer: see the module's head. ``writer`` is the name of this process in its
    commits, 8 hex digits."""

    def __init__(
        self,
        client: StoreClient,
        clock: HybridClock,
        threads: Threads,
        *,
        writer: str,
        budget: PackBudget | None = None,
        repeats: bool = False,
        publish_hint: Callable[[str], object] | None = None,
    ) -> None:
        """With ``repeats``, `put` and `fetch` gather small commits for bundles, and digests are written.
        ``publish_hint`` is called with the key of each commit that was stored."""
        self._client, self.threads, self._publish_hint = client, threads, publish_hint
        self.head, self.find, self.find_each = client.head, client.find, client.find_each
        self.clock, self.writer = clock, writer
        self.key = partial(commit_key, writer=writer)
        """The key of this writer's commit of a time, in nanoseconds since 1970."""
        self.budget = budget or PackBudget()
        self.bundles = BundleReader(client)
        self.digests = DigestStore(client, writer, is_read_only=not repeats)
        self._own_bundles, self._own_again = BundleWriter(client, writer), BundleWriter(client, writer)
        self._own: list[tuple[ObjectMeta, bytes, float]] = []
        """Small commits of this writer that are in no bundle yet, each with the time at which it was stored."""
        self.repeated = BundleWriter(client, MIXED)
        """What this mount gathers as the repeater: commits of other mounts and its own."""
        self._repeater_s = -math.inf
        """When a repeater was last heard of, this mount included."""
        self._has_several = trio.Event()
        self.fetched = BundleWriter(client, MIXED) if repeats else None
        """Small commits of other mounts that were fetched since `forget_fetched`; None without ``repeats``."""

    # -- time

    async def read_horizon(self) -> int:
        """Return the time before which commits may have been collected. Raises LakeError."""
        return await read_horizon(self._client)

    async def read_time(self) -> None:
        """Correct the clock by the store's time, or by this machine's if the store has none. Raises LakeError."""
        asked_ns = self.clock.wall_ns()
        try:
            store_ns = await self._client.time_ns()
        except Unsupported:
            store_ns = self.clock.machine_ns()
        self.clock.correct(store_ns, self.clock.wall_ns() - asked_ns)

    @property
    def has_hints(self) -> bool:
        """True if other mounts may hear of commits before they poll, because this one publishes hints."""
        return self._publish_hint is not None

    @property
    def bundles_written(self) -> int:
        """Number of bundles in which this mount repeated commits, its own and those of others."""
        bundles = self._own_bundles, self._own_again, self.fetched, self.repeated
        return sum(writer.written for writer in bundles if writer)

    async def latest_time(self) -> int:
        """Return a time later than that of every commit in the store that is not dated too far ahead. Raises
        LakeError."""
        async for page in self.list_since(self.clock.now()):
            for meta in page.objects:
                if named := parse_commit_key(meta.key):
                    self.clock.follow(named[0])
        return self.clock.now()

    # -- writing

    def encode(self, record: Record) -> bytes:
        """Return a record in the format of this lake. Raises FileError(EINVAL) if no node could read it."""
        return encode_checked(record, self._client.commit_format)

    async def build(
        self, members: Sequence[Member], make_record: Callable[[Sequence[int]], Record], *, is_large: bool = False
    ) -> bytes:
        """Build an archive of small files. ``make_record`` gets the offsets of their data, perhaps in a worker thread.
        ``is_large``: the record has many operations, so a thread builds the archive."""

        def encoded(offsets: list[int]) -> bytes:
            return self.encode(make_record(offsets))

        if not is_large and sum(member.size for member in members) < BUILD_INLINE_BYTES_MAX:
            return build(members, encoded)
        return await self.threads.run(build, members, encoded)

    async def put(self, key: str, body: Body) -> ObjectMeta:
        """Store an archive as the commit of this key. Raises StoreError kinds.

        After an attempt without an answer the store is asked, and the commit is not sent over itself: where ETags are
        not made of the bytes, names that other nodes have read in it would have another version."""
        began_s = trio.current_time()
        try:
            meta = await self._client.put(key, body, version=NewKey())
        except Unavailable:
            self.budget.record_failure(length_of(body))
            raise
        if self._publish_hint is not None:
            self._publish_hint(meta.key)
        has_room = self.fetched is not None and len(self._own) < BUNDLE_COMMITS_MAX
        if has_room and isinstance(body, bytes) and len(body) <= COMMIT_BYTES_MAX:
            self._own.append((meta, body, trio.current_time()))
            are_quick = len(self._own) >= OWN_COMMITS_MIN and began_s - self._own[-OWN_COMMITS_MIN][2] < OWN_SPAN_S
            if are_quick or len(self._own) >= 2 * OWN_COMMITS_MIN:
                self._has_several.set()
        if meta.size >= PACK_BYTES_MIN:
            self.budget.record_put(meta.size, trio.current_time() - began_s)
        return meta

    async def run(self) -> None:
        """Repeat this writer's small commits in bundles, several at a time, for as long as the mount lives."""
        own, again = self._own_bundles, self._own_again
        while True:
            await self._has_several.wait()
            await trio.sleep(OWN_DELAY_S)
            if trio.current_time() - self._repeater_s < REPEATER_S_MAX:
                self._has_several = trio.Event()
                continue
            for meta, body, _ in self._own:
                own.add(meta, body)
                again.add(meta, body)
            self._own, self._has_several = [], trio.Event()
            await own.write(keep=True)
            if again.is_full or again.commits >= OWN_AGAIN:
                await again.write()

    def record_repeater(self, until: int) -> None:
        """Record that a repeater has repeated the commits up to a time: this mount need not repeat its own."""
        self._repeater_s = trio.current_time()
        self._own = [own for own in self._own if commit_time(own[0].key) > until]

    async def repeat(self) -> int:
        """As the repeater, store a bundle of the commits fetched, or made by this mount, since the last one. Returns
        the time of the newest commit in it, 0 if no bundle was stored."""
        self._repeater_s = trio.current_time()
        if self.fetched:
            self.fetched.move_to(self.repeated)
        for meta, body, _ in self._own:
            self.repeated.add(meta, body)
        self._own = []
        key = await self.repeated.write(keep=True)
        return commit_time(key) if key else 0

    async def put_record(self, record: Record) -> ObjectRef:
        """Store a commit without members. Raises StoreError kinds."""
        body = await self.threads.run(build, (), lambda _: self.encode(record))
        meta = await self.put(self.key(record.time), body)
        return ObjectRef(meta.key, meta.etag, len(body))

    # -- reading

    def list_since(self, time_ns: int) -> Pages:
        """List the commits from a time on, with the bundles and digests among them, page by page."""
        return self._client.list_all(COMMITS, start_after=self.start(time_ns))

    @staticmethod
    def start(time_ns: int) -> str:
        """Return where a LIST of the commits from a time on starts: only their keys are greater."""
        return f"{COMMITS}{time_ns:016x}"

    async def fetch(
        self, meta: ObjectMeta, tail_bytes: int = TAIL_BYTES, *, bytes_max: int = RECORD_BYTES_MAX
    ) -> Record:
        """Fetch and check the record of the commit that LIST showed as ``meta``.

        One GET reads its tail, and others of WINDOW_BYTES the rest of a record that does not fit in it; all are
        repeated if the record arrives damaged. Raises DamagedCommit that names the key, LargeRecord for a record of
        more than ``bytes_max``, and StoreError kinds (NotFound, PreconditionFailed).
        """
        named = parse_commit_key(meta.key)
        if named is None:
            raise DamagedCommit(f"{meta.key}: not the name of a commit")

        async def fetch() -> Record:
            where, raw = await self._fetch_raw(meta, tail_bytes, bytes_max)
            read = partial(read_bounded_record, raw, where, *named)
            return read() if len(raw) < DECODE_INLINE_BYTES_MAX else await self.threads.run(read)

        try:
            record = await fetch_undamaged(fetch)
        except DamagedCommit as error:
            raise DamagedCommit(f"{meta.key}: {error}") from error
        self._client.raise_commit_format(record.format)
        return record

    def forget_fetched(self) -> None:
        """Forget the fetched commits that were gathered, and which bundles there are."""
        self.bundles.end()
        if self.fetched:
            self.fetched.clear()

    async def _fetch_raw(self, meta: ObjectMeta, tail_bytes: int, bytes_max: int) -> tuple[Whereabouts, Buffer]:
        """Return the place and the bytes of a record, from a bundle once, else from the commit itself."""
        body = self.bundles.pop(meta)
        if body is not None:
            with contextlib.suppress(DamagedCommit):
                where = locate(body, meta.size)
                if self.fetched:
                    self.fetched.add(meta, body)
                return where, memoryview(body)[where.offset :][: where.length]
        return await _fetch_raw(self._client, meta, tail_bytes, bytes_max, self.fetched)


async def fetch_newest_read(client: StoreClient, meta: ObjectMeta) -> int:
    """Fetch the newest format of records that the writer of a commit reads. Raises DamagedCommit, StoreError kinds."""

    async def fetch() -> int:
        return newest_read((await _fetch_raw(client, meta, TAIL_BYTES, RECORD_BYTES_MAX))[1])

    return await fetch_undamaged(fetch)


async def fetch_undamaged(fetch: Callable[[], Awaitable[T]]) -> T:
    """Return what ``fetch`` returns. Call it again if it raises DamagedCommit: a bit may have changed on the way.

    Raises the last DamagedCommit after ATTEMPTS_MAX.
    """
    for _ in range(ATTEMPTS_MAX - 1):
        with contextlib.suppress(DamagedCommit):
            return await fetch()
    return await fetch()


async def _fetch_raw(
    client: StoreClient, meta: ObjectMeta, tail_bytes: int, bytes_max: int, fetched: BundleWriter | None = None
) -> tuple[Whereabouts, Buffer]:
    tail_at = max(0, meta.size - max(tail_bytes, END.size + COMMENT_BYTES_MAX))
    if not meta.size:
        raise DamagedCommit("empty")
    tail = memoryview((await client.get(meta.key, tail_at, meta.size, etag=meta.etag)).data)
    if len(tail) != meta.size - tail_at:
        raise DamagedCommit(f"{len(tail)} bytes where LIST said {meta.size - tail_at}")
    where = locate(tail, meta.size)
    if fetched is not None and not tail_at:
        fetched.add(meta, tail)
    if where.offset >= tail_at:
        return where, tail[where.offset - tail_at :][: where.length]
    if where.length > bytes_max:
        raise LargeRecord
    raw = bytearray(where.length)
    for at in range(where.offset, min(tail_at, where.offset + where.length), WINDOW_BYTES):
        end = min(at + WINDOW_BYTES, tail_at, where.offset + where.length)
        data = (await client.get(meta.key, at, end, etag=meta.etag)).data
        raw[at - where.offset : end - where.offset] = data
    known = max(0, where.offset + where.length - tail_at)
    raw[where.length - known :] = tail[:known]
    return where, raw
