"""The proxies of a cluster cache: the owner of each block, and the failed proxies.

What always holds:

* *one owner*: a block is requested from the proxy that wins rendezvous hashing among those that serve. Nodes with the
  same list ask the same proxy, and a failed proxy moves only its own blocks;
* *one wait*: a proxy fails when it cannot be reached, returns an unexpected response, or answers nothing at all for
  `SILENT_S_MAX`. Readers then do not ask it again until a background request, made with growing pauses, succeeds;
  requests that wait for a thread are not made. While a proxy answers other requests, readers wait for it, because the
  store may be slow, and mounts that bypass the proxy slow it further. A refusal of the store that a proxy forwards is
  not a failure of the proxy;
* *right version*: a response claims the requested version and has the requested length. Its bytes are not trusted.

Tasks of the trio thread; requests run in worker threads and have the bounds of `CachedGetter`. Nothing needs to survive
a crash.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TypeVar

import trio
import xxhash

from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.errors import KeyRefused, ProxyRefused, StoreError, Unavailable
from lakefs_fuse.metrics import ClusterCacheMetrics
from lakefs_fuse.store.protocol import CachedGetter, Fetched
from lakefs_fuse.sync.backoff import Backoff

REQUESTS_MAX = 32
"""Maximum of requests to each proxy: abandoned requests to a hanging one keep their threads for some seconds."""
SILENT_S_MAX = 1.0
TRY_S_FIRST, TRY_S_MAX = 1.0, 30.0
"""Pauses before a proxy that fails is tried again."""
T = TypeVar("T")
_log = logging.getLogger(__name__)


class ClusterProxies:
    """See the module's head. ``getters`` are by the URL of their proxy."""

    def __init__(
        self,
        getters: Mapping[str, CachedGetter],
        metrics: ClusterCacheMetrics,
        nursery: trio.Nursery,
        threads: Threads,
    ) -> None:
        self._getters, self._failing = getters, set[str]()
        self._metrics, self._nursery, self._threads = metrics, nursery, threads
        self._requests = {url: trio.CapacityLimiter(REQUESTS_MAX) for url in getters}
        self._waiting: dict[str, set[trio.CancelScope]] = {url: set() for url in getters}
        self._served: dict[str, tuple[Version, int]] = {}
        """The last block that each proxy has sent."""

    @property
    def any_serves(self) -> bool:
        """Whether any proxy is in use."""
        return len(self._failing) < len(self._getters)

    async def get(self, version: Version, block: int) -> Fetched | None:
        """One block; None if no proxy returned it."""
        url = self._owner(version, block)
        return None if url is None else await self._ask(url, version, block)

    def _owner(self, version: Version, block: int) -> str | None:
        name = f"{version.key}\0{version.etag}\0{block}".encode("utf-8", "surrogatepass")
        serving = (url for url in self._getters if url not in self._failing)
        return max(serving, key=lambda url: xxhash.xxh3_64_intdigest(url.encode() + b"\0" + name), default=None)

    async def _ask(self, url: str, version: Version, block: int, *, is_trial: bool = False) -> Fetched | None:
        start, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, version.size)

        def ask() -> tuple[Fetched, bool] | None:
            if url in self._failing and not is_trial:
                return None
            fetched, is_hit = self._getters[url].get(version.key, start, end, version.etag)
            if len(fetched.data) != end - start or fetched.meta.size != version.size:
                raise Unavailable(f"get {version.key!r}: what came is not of {version.size} bytes")
            return fetched, is_hit

        try:
            answer = await self._unless_silent(url, ask)
        except KeyRefused:  # nothing was sent
            return None
        except Exception as error:  # or a resource of this machine is missing, such as a thread: ask the store
            self._metrics.requests += 1
            self._metrics.failures += 1
            if not isinstance(error, StoreError):
                error = Unavailable(repr(error))
            self._learn_failure(url, version, block, error, is_trial=is_trial)
            return None
        if answer is None:
            return None
        fetched, is_hit = answer
        self._metrics.requests += 1
        self._metrics.hits += is_hit
        self._metrics.bytes_read += len(fetched.data)
        self._served[url] = version, block
        self._learn_answer(url, is_trial=is_trial)
        return fetched

    async def _unless_silent(self, url: str, ask: Callable[[], T]) -> T:
        """What ``ask`` returns in a thread. Raises Unavailable, too."""
        with trio.move_on_after(SILENT_S_MAX) as scope:
            self._waiting[url].add(scope)
            try:
                return await self._threads.run(ask, limiter=self._requests[url], abandon_on_cancel=True)
            finally:
                self._waiting[url].discard(scope)
        raise Unavailable(f"it has answered nothing for {SILENT_S_MAX:g} s")

    def _learn_failure(self, url: str, version: Version, block: int, error: StoreError, *, is_trial: bool) -> None:
        if not isinstance(error, Unavailable | ProxyRefused):
            self._learn_answer(url, is_trial=is_trial)
        elif url not in self._failing and not (isinstance(error, Unavailable) and error.throttled):
            self._failing.add(url)
            _log.warning("cluster cache %s fails, and is not used until it answers again: %s", url, error)
            self._nursery.start_soon(self._try_again, url, version, block)

    def _learn_answer(self, url: str, *, is_trial: bool) -> None:
        """The proxy, or the store behind it, has answered. Only a trial ends a failure: others were sent before it."""
        for scope in self._waiting[url]:
            scope.deadline = trio.current_time() + SILENT_S_MAX
        if is_trial:
            self._failing.discard(url)
            _log.info("cluster cache %s answers again", url)

    async def _try_again(self, url: str, version: Version, block: int) -> None:
        """Try with a block that the proxy has sent before, if there is one, because the failed block may be the
        cause."""
        backoff = Backoff(TRY_S_FIRST, TRY_S_MAX)
        while url in self._failing:
            await trio.sleep(backoff.next_s())
            try:
                await self._ask(url, *self._served.get(url, (version, block)), is_trial=True)
            except Exception:  # as where no thread can be had
                _log.exception("trying cluster cache %s", url)
