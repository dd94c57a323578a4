"""The store as trio tasks use it: each call is tried until it succeeds or time is up, and counted.

What always holds:

* every attempt that began is counted once in `StoreMetrics`, on the trio thread, whether answered or abandoned;
* only `Unavailable` is tried again: with exponential backoff and full jitter, until ``retry_timeout_s`` after the call
  began (after its first failure, if it is an upload: one may take longer than that when all goes well); then the last
  error is raised;
* a `Transport` makes the attempts, and bounds how many run at once;
* a cancelled read returns immediately and its request ends on its own; a cancelled write returns when its present
  attempt has ended, so that bodies and descriptors may be freed then: soon if it waits for a rate limit (see
  `rate_limit`), else when the store has answered. After `abandon_requests` writes without a body, such as deletions and
  copies, are cancelled like reads.

A write that is tried again may have succeeded the first time. If others write to the key (`VersionTarget`), what always
holds is *no blind retry*: after an attempt that may have taken effect, the next one begins with a HEAD, also in a later
call. If the HEAD shows the version, it arrived. If it shows the object that its writer knew, as present or removed, or
none, the version did not arrive, and is sent with that as precondition, if the store has such preconditions. Any other
version is that of another writer:

* dated before the first attempt, and stored by one PUT: ours did not arrive, or it would have replaced that one. It is
  sent again, with the other version as precondition;
* of a multipart upload, which S3 dates by its beginning, and dated before ``hidden_ns``: `Overtaken`. A commit that the
  writer knew hides the object, unless its upload ended only now, and a later commit says so;
* dated later, or of another multipart upload: `Superseded`. Ours was stored and then replaced, by a writer who may
  have built on it; or it did not arrive, and both were written at the same time. Either way the other is the newer one:
  another attempt would put ours over a version that was acknowledged after ours had begun.

The first attempt has the version that its writer expects as precondition, if one is given and the store can check it:
`Overtaken` if the key has another. Dates are the store's, to the second, and so is the time of the first attempt: the
store's clock less the time that has passed here. A version dated up to `DATE_NS_MAX` earlier counts as later. A write
without errors costs no additional request. `put` and `delete` of other keys do without these checks. Latencies are
seconds of an attempt, time in the queue not included.

Called from tasks of one trio loop.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import trio
import xxhash

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import (
    AccessDenied,
    NotCarriedOut,
    NotFound,
    Overtaken,
    PreconditionFailed,
    StoreError,
    Superseded,
    Unavailable,
    UnclearConflict,
    Unsupported,
)
from lakefs_fuse.metrics import LATENCY_BOUNDS_S, StoreMetrics
from lakefs_fuse.product import METADATA_PREFIX, RESERVED_PREFIX
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.protocol import (
    Body,
    CacheableStore,
    CachedGetter,
    Capabilities,
    DirectoryStore,
    Fetched,
    FileSlice,
    ListPage,
    NetworkStore,
    ObjectMeta,
    ObjectStore,
    PartRef,
    UploadRef,
    length_of,
    md5_of,
)
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.sync.nursery import for_each

BACKOFF_S_FIRST, BACKOFF_S_MAX = 0.1, 8.0
BACKOFF_SCALE_THROTTLED = 5.0
"""Factor by which pauses are longer for a store that asks for fewer requests."""
AWAY_S_MIN = 5.0
"""A store is away if every response in this time was a failure …"""
SILENT_S_MIN = 10.0
"""… or a request has no response for this time."""
AFTER_RESERVED = RESERVED_PREFIX.removesuffix("/") + chr(ord("/") + 1)
"""In a LIST that begins here there is no key of this program's own."""
HEADS_AT_ONCE = 16
DELETE_KEYS_MAX = 1000
DELETES_AT_ONCE = 16
"""Requests that delete one object each; half of those that a mount may have in flight by default."""

NS = 1_000_000_000
DATE_NS_MAX = NS + NS // 2
"""Dates of objects are cut to the second, and `time_ns` is the middle of one."""
TOKEN_METADATA = f"{METADATA_PREFIX}draft"
"""User metadata key of a version's token."""
REPLACES_METADATA = f"{METADATA_PREFIX}replaces"
"""User metadata key of the ETags of versions that an object replaces, newest first, with a comma between two and, if
that is all since the file was created at this key, at the end. A file that was created has none."""
COPY_METADATA = f"{METADATA_PREFIX}copy"
COPIED_METADATA = f"{METADATA_PREFIX}copied"
"""User metadata key of what an object with COPY_METADATA is a copy of, if the store made it in parts: its ETag is
another one than that of its source."""
SINCE_METADATA = f"{METADATA_PREFIX}since"
"""User metadata key of a time, in ns since 1970, in an object that was put exclusively. It is later than each removal
of an earlier version that its writer knew."""
UPLOADS = frozenset({"put", "part"})
"""Kinds of requests that carry a body."""

T = TypeVar("T")


class VersionTarget(Protocol):
    """The version that a new version replaces, and the attempts to store it. Its owner keeps it as long as it may send
    the version again."""

    replaces: str
    """ETag of the object that the writer knew at the key; empty for none."""
    expected: str | None
    """ETag of the object to replace, if the store can check it: empty for none, None for any."""
    removed: str
    """ETag of the version that the writer knows as removed, and that may still be at the key; empty for none."""
    hidden_ns: int
    """Objects at the key that are dated before this are hidden, as far as the writer knows; 0 if none are."""
    if_absent: bool
    """Another version at the key is refused, not replaced."""
    unsure: tuple[str, str, float] | None
    """Key and token of a version that may have been stored, and when the first attempt began."""


@dataclass(slots=True)
class NewKey:
    """A `VersionTarget` at a key that nothing was stored under before. With ``if_absent`` every store checks that, if
    need be with a HEAD before the PUT."""

    if_absent: bool = False
    replaces: str = ""
    expected: str | None = ""
    removed: str = ""
    hidden_ns: int = 0
    unsure: tuple[str, str, float] | None = None


class Transport(Protocol):
    """The transport of one request to the store and of its response: the seam at which a simulation inserts a network.

    What always holds (*one attempt*): `run` calls ``call`` once at most and never tries again. An implementation may
    answer late, raise `Unavailable` before ``call`` (a request that was lost) or after it (a lost answer: the store has
    carried the request out), and may wrap another one.
    """

    async def run(self, kind: str, call: Callable[[], T], *, abandon: bool) -> T:
        """Run ``call``, and return or raise its result. ``kind`` is one of `metrics.REQUEST_KINDS`. With ``abandon`` a
        cancelled caller returns immediately and the request ends on its own, else the caller waits for its end."""


class ThreadTransport:
    """Makes each request in a worker thread.

    At most ``requests_max`` requests, ``uploads_max`` parts and ``uploads_max`` whole objects run concurrently: uploads
    and reads do not wait for each other, and a commit does not wait for parts that a rate limit slows down. A request
    that was abandoned keeps its place until it ends.
    """

    def __init__(self, threads: Threads, *, requests_max: int = 32, uploads_max: int = 4) -> None:
        self._threads = threads
        self._requests = trio.CapacityLimiter(requests_max)
        self._uploads = {kind: trio.CapacityLimiter(uploads_max) for kind in UPLOADS}

    async def run(self, kind: str, call: Callable[[], T], *, abandon: bool) -> T:
        return await self._threads.run(call, limiter=self._uploads.get(kind, self._requests), abandon_on_cancel=abandon)


class StoreClient:
    """An `ObjectStore` with async methods that retry. Its owner calls `close` after all calls ended."""

    def __init__(
        self,
        store: ObjectStore,
        capabilities: Capabilities,
        metrics: StoreMetrics,
        *,
        transport: Transport,
        clock: Clock,
        rng: random.Random,
        retry_timeout_s: float = 60.0,
        commit_format: int = 1,
    ) -> None:
        """``rng`` spreads retries; ``commit_format`` is the lake record's."""
        self._store = store
        self.capabilities = capabilities
        self.metrics = metrics
        self._transport = transport
        self._clock = clock
        self._rng = rng
        self._retry_timeout_s = retry_timeout_s
        self._commit_format = commit_format
        self._failing_since_s: float | None = None
        self._answered_s = clock.mono_s()
        self._asked_s: dict[object, float] = {}
        self._shields: set[trio.CancelScope] = set()
        self._abandoning = False

    def through(self, wrap: Callable[[Transport], Transport]) -> StoreClient:
        """A client of the same store, with the same counters, whose requests go through a transport around this
        one's."""
        return StoreClient(
            self._store,
            self.capabilities,
            self.metrics,
            transport=wrap(self._transport),
            clock=self._clock,
            rng=self._rng,
            retry_timeout_s=self._retry_timeout_s,
            commit_format=self._commit_format,
        )

    @property
    def commit_format(self) -> int:
        """The format in which commits are written: the newest that the lake record or a commit that was read has."""
        return self._commit_format

    def raise_commit_format(self, read: int) -> None:
        """Record that a commit of format ``read`` was read, so that all mounts that write here know it."""
        self._commit_format = max(self._commit_format, read)

    @property
    def is_away(self) -> bool:
        """Whether the store does not answer (see AWAY_S_MIN), until the next response to any request."""
        now = self._clock.mono_s()
        if self._failing_since_s is not None and now - self._failing_since_s >= AWAY_S_MIN:
            return True
        oldest_s = min(self._asked_s.values(), default=now)
        return now - max(oldest_s, self._answered_s) >= SILENT_S_MIN

    def _answered(self) -> None:
        self._failing_since_s, self._answered_s = None, self._clock.mono_s()

    # -- reading -------------------------------------------------------------------------------------------------

    async def get(
        self, key: str, start: int, end: int, *, etag: str | None = None,
        examine: Callable[[Fetched], None] | None = None,
    ) -> Fetched:  # fmt: skip
        """See `ObjectStore.get`. ``examine`` is given the answer in the thread that brought it."""
        call = partial(self._store.get, key, start, end, etag=etag)
        fetched = await self._call("get", call if examine is None else partial(_examined, call, examine), abandon=True)
        self.metrics.bytes_read += len(fetched.data)
        return fetched

    def through_cache(self, url: str) -> CachedGetter | None:
        """See `CacheableStore`. Its requests are not retried or counted here."""
        return self._store.through_cache(url) if isinstance(self._store, CacheableStore) else None

    @property
    def is_guarded(self) -> bool:
        """Whether TLS, or this machine, protects the bytes that `get` returns."""
        return not isinstance(self._store, NetworkStore) or self._store.is_guarded

    async def free_bytes(self) -> int | None:
        """See `DirectoryStore`; None for a store without a bound. It is not a request, so it is not counted or
        retried."""
        if not isinstance(self._store, DirectoryStore):
            return None
        return await self._transport.run("other", self._store.free_bytes, abandon=True)

    async def has_md5_etag(self, key: str) -> bool:
        """See `NetworkStore.has_md5_etag`."""
        assert isinstance(self._store, NetworkStore)
        return await self._call("head", partial(self._store.has_md5_etag, key), abandon=True)

    async def head(self, key: str) -> ObjectMeta:
        """See `ObjectStore.head`."""
        return await self._call("head", partial(self._store.head, key), abandon=True)

    async def find(self, key: str) -> ObjectMeta | None:
        """As `head`; None where there is no object."""
        try:
            return await self.head(key)
        except NotFound:
            return None

    async def find_each(self, keys: Collection[str]) -> list[ObjectMeta]:
        """The objects at these keys, of which there is at least one; of each the store is asked after the call began.
        One page of a LIST answers for keys that are near each other, and a HEAD for each that it does not reach."""
        first = min(keys)
        begin = AFTER_RESERVED if first[:-1] < AFTER_RESERVED < first else first[:-1]
        page = await self.list_page("", start_after=begin)
        found = [meta for meta in page.objects if meta.key in keys]
        reached = page.objects[-1].key if page.objects and self.capabilities.sorted_listing else ""
        beyond = [key for key in keys if key > reached] if page.next_token is not None else []

        async def ask(key: str) -> None:
            if (meta := await self.find(key)) is not None:
                found.append(meta)

        if beyond:
            await for_each(beyond, ask, min(HEADS_AT_ONCE, len(beyond)))
        return found

    async def find_listed(self, prefix: str, keys: Collection[str]) -> list[ObjectMeta]:
        """Those of the objects at these keys that a LIST of their directory shows. A store that lists in order is asked
        from the first of the keys to the last."""
        is_sorted = self.capabilities.sorted_listing
        start, last = (min(keys)[:-1], max(keys).encode()) if is_sorted else ("", b"")
        found: list[ObjectMeta] = []
        async for page in self.list_all(prefix, delimiter="/", start_after=start):
            found += [meta for meta in page.objects if meta.key in keys]
            is_past = is_sorted and page.objects and page.objects[-1].key.encode() > last
            if is_past or len(found) == len(keys):
                break
        return found

    async def time_ns(self) -> int:
        """See `ObjectStore.time_ns`."""
        return await self._call("head", self._store.time_ns, abandon=True)

    async def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        start_after: str = "",
        token: str | None = None,
        keys_max: int = 1000,
    ) -> ListPage:
        """See `ObjectStore.list_page`."""
        call = partial(
            self._store.list_page,
            prefix,
            delimiter=delimiter,
            start_after=start_after,
            token=token,
            keys_max=keys_max,
        )
        return await self._call("list", call, abandon=True)

    def list_all(self, prefix: str, *, delimiter: str = "", start_after: str = "") -> Pages:
        """Every page, as `list_page` returns them."""
        return Pages(partial(self.list_page, prefix, delimiter=delimiter, start_after=start_after))

    # -- writing -------------------------------------------------------------------------------------------------

    async def put(
        self, key: str, body: Body, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False,
        etag: str | None = None, version: VersionTarget | None = None,
    ) -> ObjectMeta:  # fmt: skip
        """See `ObjectStore.put`. With ``version``, whose token is in the metadata, see the module's head; without, a
        precondition may fail because of the call's own success."""
        call = partial(self._store.put, key, body, metadata=metadata)
        if version is None:
            meta = await self._call("put", partial(call, if_absent=if_absent, etag=etag))
        else:
            token = (metadata or {}).get(TOKEN_METADATA, "")
            write = _VersionWrite(self, "put", key, token, body, version, call)
            meta = await self._retry("put", write.attempt)
        self.metrics.bytes_written += meta.size
        return meta

    async def delete(self, key: str, *, etag: str | None = None) -> None:
        """See `ObjectStore.delete`."""
        await self._call("delete", partial(self._store.delete, key, etag=etag))

    async def delete_many_if_match(self, versions: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Delete each key as the version (ETag) beside it, or any where that is empty, DELETES_AT_ONCE at a time. A key
        that has another version now needs no deletion. Each is tried once: if the response is lost, the caller checks
        the key. The result maps keys that may not be deleted to the reasons. Raises other StoreErrors."""
        refused: dict[str, str] = {}

        async def delete(version: tuple[str, str]) -> None:
            key, etag = version
            try:
                await self._attempt("delete", partial(self._store.delete, key, etag=etag or None), abandon=False)
            except PreconditionFailed:
                pass
            except AccessDenied as error:
                refused[key] = str(error)

        await for_each(versions, delete, min(DELETES_AT_ONCE, len(versions)))
        return refused

    async def delete_many(self, keys: Sequence[str]) -> Mapping[str, str]:
        """Delete any number of keys, 1000 a request; the result maps failed keys to the reasons."""
        failed: dict[str, str] = {}
        for at in range(0, len(keys), DELETE_KEYS_MAX):
            batch = keys[at : at + DELETE_KEYS_MAX]
            failed.update(await self._call("delete", partial(self._store.delete_many, batch)))
        return failed

    async def delete_all(self, keys: Sequence[str]) -> None:
        """Delete any number of keys, 1000 a request. Raises StoreError if the store refuses some of them; the others
        are deleted."""
        failed = await self.delete_many(keys)
        for key, why in failed.items():
            others = f" and {counted(len(failed) - 1, 'other object')}" if len(failed) > 1 else ""
            raise StoreError(f"{key}{others} cannot be removed: {why}")

    async def copy(self, source: str, target: str, *, etag: str | None = None) -> ObjectMeta:
        """See `ObjectStore.copy`."""
        return await self._call("copy", partial(self._store.copy, source, target, etag=etag))

    # -- multipart -----------------------------------------------------------------------------------------------

    async def create_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """See `ObjectStore.create_multipart`. A retried one may leave an upload that only `list_multipart` shows."""
        return await self._call("other", partial(self._store.create_multipart, key, metadata=metadata))

    async def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartRef:
        """See `ObjectStore.upload_part`."""
        call = partial(self._store.upload_part, key, upload_id, number, body)
        part = await self._call("part", call)
        self.metrics.bytes_written += part.size
        return part

    async def upload_part_copy(
        self, key: str, upload_id: str, number: int, source: str, start: int, end: int, *, etag: str | None = None
    ) -> PartRef:
        """See `ObjectStore.upload_part_copy`."""
        call = partial(self._store.upload_part_copy, key, upload_id, number, source, start, end, etag=etag)
        return await self._call("copy", call)

    async def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartRef], *, if_absent: bool = False,
        version: VersionTarget | None = None, token: str = "",
    ) -> ObjectMeta:  # fmt: skip
        """See `ObjectStore.complete_multipart`. With ``version`` and its ``token``, see the module's head; without, it
        raises NotFound about its own success, too."""
        call = partial(self._store.complete_multipart, key, upload_id, parts)
        if version is None:
            return await self._call("other", partial(call, if_absent=if_absent))
        return await self._retry("other", _VersionWrite(self, "other", key, token, parts, version, call).attempt)

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        """See `ObjectStore.abort_multipart`. A cancelled call returns immediately; the store may still carry it out."""
        await self._call("other", partial(self._store.abort_multipart, key, upload_id), abandon=True)

    async def list_multipart(self, prefix: str) -> Sequence[UploadRef]:
        """See `ObjectStore.list_multipart`."""
        return await self._call("other", partial(self._store.list_multipart, prefix), abandon=True)

    def abandon_requests(self) -> None:
        """Let cancelling also end the wait for writes without a body; the store may still carry them out. For the end
        of a process, which must not wait for a store that does not answer."""
        self._abandoning = True
        for scope in self._shields:
            scope.shield = False

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    # -- one call ------------------------------------------------------------------------------------------------

    async def _call(self, kind: str, call: Callable[[], T], *, abandon: bool = False) -> T:
        return await self._retry(kind, lambda: self._attempt(kind, call, abandon))

    async def _retry(self, kind: str, attempt: Callable[[], Awaitable[T]]) -> T:
        began_s, backoff = self._clock.mono_s(), None
        while True:
            try:
                return await attempt()
            except Unavailable as error:
                if backoff is None:
                    backoff = Backoff(BACKOFF_S_FIRST, BACKOFF_S_MAX, self._rng)
                    if kind in UPLOADS:
                        began_s = self._clock.mono_s()
                remaining_s = began_s + self._retry_timeout_s - self._clock.mono_s()
                if remaining_s <= 0:
                    raise
                pause_s = backoff.next_s(BACKOFF_SCALE_THROTTLED if error.throttled else 1.0)
            await trio.sleep(min(pause_s, remaining_s))
            self.metrics.retries += 1

    async def _attempt(self, kind: str, call: Callable[[], T], abandon: bool) -> T:
        """One attempt. ``errors`` counts failures, not responses that are information."""
        clock, metrics = self._clock, self.metrics
        started_s: list[float] = []
        question = object()
        if kind in ("list", "head"):
            self._asked_s[question] = clock.mono_s()

        def work() -> T:
            started_s.append(clock.mono_s())
            return call()

        try:
            if abandon or kind in UPLOADS:
                answer = await self._transport.run(kind, work, abandon=abandon)
            else:
                answer = await self._run_shielded(kind, work)
            self._answered()
            return answer
        except Unavailable as error:
            metrics.errors += 1
            metrics.throttled += error.throttled
            if self._failing_since_s is None:
                self._failing_since_s = clock.mono_s()
            raise
        except (NotFound, PreconditionFailed):
            self._answered()
            raise
        except Exception:
            self._answered()
            metrics.errors += 1
            raise
        finally:
            self._asked_s.pop(question, None)
            if started_s:
                took_s = clock.mono_s() - started_s[0]
                metrics.requests[kind] += 1
                metrics.latency_s_sum[kind] += took_s
                metrics.latency_s_max[kind] = max(metrics.latency_s_max[kind], took_s)
                metrics.latency_counts[kind][bisect_left(LATENCY_BOUNDS_S, took_s)] += 1

    async def _run_shielded(self, kind: str, work: Callable[[], T]) -> T:
        """Run a write without a body; a cancellation counts when it has ended, or after `abandon_requests`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=not self._abandoning) as scope:
            self._shields.add(scope)
            try:
                return await self._transport.run(kind, work, abandon=True)
            finally:
                self._shields.discard(scope)
        raise AssertionError("this scope itself is never cancelled")


class Pages(AsyncIterator[ListPage]):
    """The pages of a LIST, one request each. A loop over them may end early: there is nothing to close."""

    def __init__(self, fetch: Callable[..., Awaitable[ListPage]]) -> None:
        self._fetch = fetch
        self._token: str | None = None
        self._is_over = False

    async def __anext__(self) -> ListPage:
        if self._is_over:
            raise StopAsyncIteration
        page = await self._fetch(token=self._token)
        self._token, self._is_over = page.next_token, page.next_token is None
        return page


class _VersionWrite:
    """One call that sends a version to its key. See the module's head."""

    def __init__(
        self, client: StoreClient, kind: str, key: str, token: str, sent: Body | Sequence[PartRef],
        target: VersionTarget, send: Callable[..., ObjectMeta],
    ) -> None:  # fmt: skip
        """``send`` takes ``if_absent`` and ``etag``. ``sent`` is the body of a PUT, or the parts of an upload."""
        self._client, self._kind, self._key, self._token = client, kind, key, token
        self._sent, self._target, self._call = sent, target, send

    async def attempt(self) -> ObjectMeta:
        """Find out about earlier attempts, and send the version where it is not there. Raises Superseded;
        PreconditionFailed if the key had to be free; Overtaken if the key has another version than the expected one,
        or a hidden one that its writer did not expect; Unavailable, also if another version was stored in between."""
        target, etag, if_absent = self._target, None, self._target.if_absent
        is_first = self._unsure_since_s is None
        if self._unsure_since_s is not None:
            there, is_stored = await self._find()
            if there is not None and is_stored:
                return there
            etag, if_absent = await self._condition(there, self._unsure_since_s)
        elif not if_absent and target.expected is not None:
            able = self._client.capabilities
            has_none_match = able.put_if_absent if self._kind == "put" else able.complete_if_absent
            etag, if_absent = target.expected or None, not target.expected and has_none_match
        try:
            return await self._send(etag, if_absent)
        except (PreconditionFailed, NotFound) as error:
            there, is_stored = await self._find()
            if there is not None and is_stored:
                return there
            if isinstance(error, UnclearConflict) and (there.etag if there is not None else None) == etag:
                raise Unavailable(str(error)) from error  # the condition is met
            is_met = etag is None or (there is not None and there.etag == etag)
            is_upload_gone = isinstance(error, NotFound) and self._kind != "put" and is_met
            if is_upload_gone or (etag, if_absent) == (None, target.if_absent):
                raise
            if is_first:
                raise Overtaken(f"{self._key!r} has another version than its writer knew of") from error
            raise Unavailable(f"another version came between two attempts: {error}") from error

    async def _send(self, etag: str | None, if_absent: bool) -> ObjectMeta:
        target, client, unsure = self._target, self._client, self._target.unsure
        if self._unsure_since_s is None:
            target.unsure = self._key, self._token, client._clock.mono_s()
        able = client.capabilities
        has_match = able.put_if_match if self._kind == "put" else able.complete_if_match
        call = partial(self._call, if_absent=if_absent, etag=etag if has_match else None)
        try:
            stored = await client._attempt(self._kind, call, abandon=False)
            draft = token_of(stored).partition(".")[0]
            if draft and draft != self._token.partition(".")[0]:  # it was looked up, as the answer had no ETag
                raise Unavailable(f"{self._key!r} is another version than the one that was sent")
            return stored
        except StoreError as error:
            if isinstance(error, NotCarriedOut) or not isinstance(error, Unavailable):
                target.unsure = unsure
            raise

    @property
    def _unsure_since_s(self) -> float | None:
        unsure = self._target.unsure
        return unsure[2] if unsure is not None and unsure[:2] == (self._key, self._token) else None

    async def _find(self) -> tuple[ObjectMeta | None, bool]:
        """Return the object at the key, and whether it is the version that was sent."""
        try:
            return await self._client._attempt("head", self._head, abandon=True)
        except NotFound:
            return None, False

    def _head(self) -> tuple[ObjectMeta, bool]:
        there = self._client._store.head(self._key)
        return there, self._is_ours(there) and self._is_whole(there)

    def _is_ours(self, there: ObjectMeta) -> bool:
        return token_of(there) == self._token and there.size == _bytes_of(self._sent)

    def _is_whole(self, there: ObjectMeta) -> bool:
        """Return whether the object has the bytes that were sent. Those of a PUT over http may have been damaged on
        their way, which the ETag shows (see `s3.upload`). Called from a worker thread, because it reads them again."""
        sent, client = self._sent, self._client
        if not isinstance(sent, bytes | FileSlice) or client.is_guarded or not client.capabilities.md5_etags:
            return True
        return md5_of(sent).hex() == there.etag

    async def _condition(self, there: ObjectMeta | None, since_s: float) -> tuple[str | None, bool]:
        """The version that the next attempt is to replace, or that it is to replace none."""
        if there is None:
            return None, True
        is_damaged = self._is_ours(there)
        if self._target.if_absent and not is_damaged:
            raise PreconditionFailed(f"{self._key!r} exists")
        if not is_damaged and await self._is_later(there, since_s):
            raise Superseded(f"{self._key!r} was replaced by another client in the meantime")
        return there.etag, False

    async def _is_later(self, there: ObjectMeta, since_s: float) -> bool:
        """Return whether another client has stored the object since the first attempt. A version that the writer knew
        at the key is later if its date says so beyond doubt: another client has put the same bytes there again. An
        unknown one is, unless its date says beyond doubt that it is not. The date of a multipart upload says less than
        is needed: some stores date it by its beginning. Raises Overtaken for a hidden one that the writer did not
        know."""
        able = self._client.capabilities
        is_known = there.etag in (self._target.replaces, self._target.expected, self._target.removed)
        if is_known and not (able.put_if_match if self._kind == "put" else able.complete_if_match):
            return False  # without preconditions an earlier version of this file may have arrived late
        if "-" in there.etag:
            if not is_known and there.mtime_ns + NS <= self._target.hidden_ns:
                raise Overtaken(f"{self._key!r} has a hidden version of which its writer did not know")
            return not is_known
        try:
            now_ns = await self._client._attempt("head", self._client._store.time_ns, abandon=True)
        except Unsupported:
            return not is_known
        began_ns = now_ns - int((self._client._clock.mono_s() - since_s) * NS)
        return there.mtime_ns > began_ns + (DATE_NS_MAX if is_known else -DATE_NS_MAX)


def _bytes_of(sent: Body | Sequence[PartRef]) -> int:
    return length_of(sent) if isinstance(sent, bytes | FileSlice) else sum(part.size for part in sent)


def token_of(meta: ObjectMeta) -> str:
    """The token that distinguishes a version stored by this program from others with the same bytes; empty if another
    program stored it."""
    return (meta.metadata or {}).get(TOKEN_METADATA, "")


def is_successor(meta: ObjectMeta, etag: str) -> bool:
    """The object is, or may be, a later version of the file that had this ETag, at the key of an earlier name of that.
    Else it is a file that was created there when that one had been removed."""
    history = (meta.metadata or {}).get(REPLACES_METADATA, "").split(",")
    return etag in history or history[-1] != ""


def replaced_since(meta: ObjectMeta, etag: str) -> list[str]:
    """ETags of the versions between the one with this ETag and the object, oldest first, as its metadata tell them."""
    history = (meta.metadata or {}).get(REPLACES_METADATA, "").split(",")
    newest = history[: history.index(etag)] if etag in history else history
    return [each for each in reversed(newest) if each]


def copy_metadata(key: str) -> dict[str, str]:
    """Metadata of a copy, at ``key``, of the bytes of a file elsewhere: it is not a file until a commit names it."""
    return {COPY_METADATA: xxhash.xxh3_128_hexdigest(key.encode("utf-8", "surrogatepass"))}


def copied_metadata(source: str, etag: str) -> dict[str, str]:
    """Metadata of a copy of the version ``etag`` of the object ``source``."""
    return {COPIED_METADATA: xxhash.xxh3_128_hexdigest(f"{source}\0{etag}".encode("utf-8", "surrogatepass"))}


def is_copy_of(meta: ObjectMeta, source: str, etag: str) -> bool:
    """Whether the object was put with `copy_metadata` at this key, and `copied_metadata` of this version."""
    return (
        is_copy(meta) and (meta.metadata or {}).get(COPIED_METADATA) == copied_metadata(source, etag)[COPIED_METADATA]
    )


def is_copy(meta: ObjectMeta) -> bool:
    """Whether the object was put with `copy_metadata`, at this key."""
    return (meta.metadata or {}).get(COPY_METADATA) == copy_metadata(meta.key)[COPY_METADATA]


def _examined(call: Callable[[], Fetched], examine: Callable[[Fetched], None]) -> Fetched:
    fetched = call()
    examine(fetched)
    return fetched
