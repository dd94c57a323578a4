"""The store as trio tasks use it: each call is tried until it succeeds or time is up, and counted.

What always holds:

* every attempt that began is counted once in `StoreMetrics`, on the trio thread, whether it was answered or abandoned;
* only `Unavailable` is tried again: with exponential backoff and full jitter, until ``retry_timeout_s`` after the call
  began (after its first failure, if it is an upload: one may take longer than that when all goes well); then the last
  error is raised;
* a `Transport` makes the attempts, and bounds how many run at once;
* a cancelled read returns at once and its request ends by itself; a cancelled write returns when the attempt under way
  has ended, so that bodies and descriptors may be freed then: soon where a rate limit holds it up (see `rate_limit`),
  else when the store has answered. After `abandon_requests` writes without a body, such as deletions and copies, are
  cancelled as reads are.

A write that is tried again may have succeeded the first time. `put` and `delete` do not mind; `put` or `complete` with
``if_absent`` may then say PreconditionFailed, and `complete_multipart` NotFound, about the caller's own success: the
caller asks `find` and compares. Latencies are seconds of an attempt, time in the queue not included.

Called from tasks of one trio loop.
"""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Protocol, TypeVar

import trio

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import AccessDenied, Conflict, NotFound, PreconditionFailed, Unavailable
from lakefs_fuse.metrics import StoreMetrics
from lakefs_fuse.store.protocol import (
    Body,
    Capabilities,
    Fetched,
    ListPage,
    NetworkStore,
    ObjectMeta,
    ObjectStore,
    PartRef,
    UploadRef,
)
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.sync.nursery import for_each

BACKOFF_S_FIRST, BACKOFF_S_MAX = 0.1, 8.0
BACKOFF_SCALE_THROTTLED = 5.0
"""A store that asks for fewer requests is left alone for so many times longer."""
AWAY_S_MIN = 5.0
"""A store whose every answer was a failure for so long is away …"""
SILENT_S_MIN = 10.0
"""… and so is one that leaves a question without any answer for so long."""
DELETE_KEYS_MAX = 1000
DELETES_AT_ONCE = 16
"""Requests that delete one object each; half of those that a mount may have in flight by default."""

UPLOADS = frozenset({"put", "part"})
"""Kinds of requests that carry a body."""

T = TypeVar("T")


class Transport(Protocol):
    """The way of one request to the store and of its answer back: the seam at which a simulation puts a network.

    What always holds (*one attempt*): `run` calls ``call`` once at most and never tries again. An implementation may
    answer late, raise `Unavailable` before ``call`` (a request that was lost) or after it (a lost answer: the store has
    carried the request out), and may wrap another one.
    """

    async def run(self, kind: str, call: Callable[[], T], *, abandon: bool) -> T:
        """What ``call`` answers or raises. ``kind`` is one of `metrics.REQUEST_KINDS`. With ``abandon`` a cancelled
        caller leaves at once and the request ends by itself, else the caller waits for its end."""


class ThreadTransport:
    """Makes each request in a worker thread.

    At most ``requests_max`` requests, ``uploads_max`` parts and ``uploads_max`` whole objects run at once: uploads do
    not wait behind reads, nor reads behind uploads, nor a commit behind parts that a rate limit makes slow. A request
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

    @property
    def commit_format(self) -> int:
        """The format in which commits are written: the newest that the lake record or a commit that was read has."""
        return self._commit_format

    def raise_commit_format(self, read: int) -> None:
        """A commit of format ``read`` was read: all mounts that write here know it."""
        self._commit_format = max(self._commit_format, read)

    @property
    def is_away(self) -> bool:
        """The store does not answer (see AWAY_S_MIN). Until its next answer, which only another request brings."""
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

    @property
    def is_guarded(self) -> bool:
        """TLS, or this machine, vouches for the bytes that `get` answers."""
        return not isinstance(self._store, NetworkStore) or self._store.is_guarded

    async def has_md5_etag(self, key: str) -> bool:
        """See `NetworkStore.has_md5_etag`."""
        assert isinstance(self._store, NetworkStore)
        return await self._call("head", partial(self._store.has_md5_etag, key), abandon=True)

    async def head(self, key: str) -> ObjectMeta:
        """See `ObjectStore.head`."""
        return await self._call("head", partial(self._store.head, key), abandon=True)

    async def find(self, key: str) -> ObjectMeta | None:
        """As `head`; None where there is no object. What the caller of a write whose answer was lost compares."""
        try:
            return await self.head(key)
        except NotFound:
            return None

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

    async def list_all(
        self, prefix: str, *, delimiter: str = "", start_after: str = ""
    ) -> AsyncGenerator[ListPage, None]:
        """Every page; one that is left early is closed with `aclose` (contextlib.aclosing)."""
        token: str | None = None
        while True:
            page = await self.list_page(prefix, delimiter=delimiter, start_after=start_after, token=token)
            yield page
            token = page.next_token
            if token is None:
                return

    # -- writing -------------------------------------------------------------------------------------------------

    async def put(
        self, key: str, body: Body, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False
    ) -> ObjectMeta:
        """See `ObjectStore.put`."""
        call = partial(self._store.put, key, body, metadata=metadata, if_absent=if_absent)
        meta = await self._call("put", call)
        self.metrics.bytes_written += meta.size
        return meta

    async def delete(self, key: str, *, etag: str | None = None) -> None:
        """See `ObjectStore.delete`."""
        await self._call("delete", partial(self._store.delete, key, etag=etag))

    async def delete_many_if_match(self, versions: Sequence[tuple[str, str]]) -> dict[str, str]:
        """Delete each key as the version (ETag) beside it, or any where that is empty, DELETES_AT_ONCE at a time. A key
        that has another version now is done with. Each is tried once: where the answer is lost, the caller finds out
        what is there. The answer maps keys that may not be deleted to why. Raises other StoreErrors."""
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
        """Any number of keys, 1000 a request; the answer maps keys that failed to why."""
        failed: dict[str, str] = {}
        for at in range(0, len(keys), DELETE_KEYS_MAX):
            batch = keys[at : at + DELETE_KEYS_MAX]
            failed.update(await self._call("delete", partial(self._store.delete_many, batch)))
        return failed

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
        poll: Callable[[], Awaitable[ObjectMeta | None]] | None = None,
    ) -> ObjectMeta:  # fmt: skip
        """See `ObjectStore.complete_multipart`, and the module's head on NotFound after a retry. ``poll`` is asked
        after each conflict whether the object is there by now; what it answers is the answer."""
        call = partial(self._store.complete_multipart, key, upload_id, parts, if_absent=if_absent)
        return await self._call("other", call, poll=poll)

    async def abort_multipart(self, key: str, upload_id: str) -> None:
        """See `ObjectStore.abort_multipart`."""
        await self._call("other", partial(self._store.abort_multipart, key, upload_id))

    async def list_multipart(self, prefix: str) -> Sequence[UploadRef]:
        """See `ObjectStore.list_multipart`."""
        return await self._call("other", partial(self._store.list_multipart, prefix), abandon=True)

    def abandon_requests(self) -> None:
        """From now on cancelling ends the wait for writes without a body too; the store may still carry them out. For
        the end of a process, which must not wait for a store that does not answer."""
        self._abandoning = True
        for scope in self._shields:
            scope.shield = False

    def close(self) -> None:
        """Close the store."""
        self._store.close()

    # -- one call ------------------------------------------------------------------------------------------------

    async def _call(
        self, kind: str, call: Callable[[], T], *, abandon: bool = False,
        poll: Callable[[], Awaitable[T | None]] | None = None,
    ) -> T:  # fmt: skip
        began_s, backoff = self._clock.mono_s(), None
        while True:
            try:
                return await self._attempt(kind, call, abandon)
            except Unavailable as error:
                if backoff is None:
                    backoff = Backoff(BACKOFF_S_FIRST, BACKOFF_S_MAX, self._rng)
                    if kind in UPLOADS:
                        began_s = self._clock.mono_s()
                remaining_s = began_s + self._retry_timeout_s - self._clock.mono_s()
                if remaining_s <= 0:
                    raise
                pause_s = backoff.next_s(BACKOFF_SCALE_THROTTLED if error.throttled else 1.0)
                conflicts = isinstance(error, Conflict)
            await trio.sleep(min(pause_s, remaining_s))
            if conflicts and poll is not None and (found := await poll()) is not None:
                return found
            self.metrics.retries += 1

    async def _attempt(self, kind: str, call: Callable[[], T], abandon: bool) -> T:
        """One attempt. ``errors`` counts answers that are faults, not those that are information."""
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

    async def _run_shielded(self, kind: str, work: Callable[[], T]) -> T:
        """Run a write without a body; a cancellation counts when it has ended, or after `abandon_requests`."""
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.CancelScope(shield=not self._abandoning) as scope:
            self._shields.add(scope)
            try:
                return await self._transport.run(kind, work, abandon=True)
            finally:
                self._shields.discard(scope)
        raise AssertionError("nobody cancels this scope itself")


def _examined(call: Callable[[], Fetched], examine: Callable[[Fetched], None]) -> Fetched:
    fetched = call()
    examine(fetched)
    return fetched
