"""Keeps what reads fetch from the store within a rate (``--download-limit``).

What always holds: a GET waits for its turn before it is sent, and is not cut: up to 8 MiB come at once. Listings,
commits and the index are not held up, because every name waits for them. Tasks of one trio loop.
"""

from __future__ import annotations

from collections.abc import Callable

from lakefs_fuse.blockcache.verified_get import ExaminingGetter
from lakefs_fuse.metrics import CacheMetrics
from lakefs_fuse.store.protocol import Fetched
from lakefs_fuse.sync.byte_rate import ByteRate


class PacedGetter:
    """The GETs of ``client``, ``bytes_s_max`` a second together."""

    def __init__(self, client: ExaminingGetter, bytes_s_max: int, metrics: CacheMetrics) -> None:
        self._client, self._rate, self._metrics = client, ByteRate(bytes_s_max), metrics

    async def get(
        self, key: str, start: int, end: int, *, etag: str | None = None,
        examine: Callable[[Fetched], None] | None = None,
    ) -> Fetched:  # fmt: skip
        """See `Getter`, and `ExaminingGetter`."""
        self._metrics.throttled_s += await self._rate.wait(end - start)
        return await self._client.get(key, start, end, etag=etag, examine=examine)

    async def has_md5_etag(self, key: str) -> bool:
        """See `ExaminingGetter`."""
        return await self._client.has_md5_etag(key)
