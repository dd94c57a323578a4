"""GETs whose bytes are compared with the checksums of the store and its packs before they are used. Over plain http
nothing else detects a bit that changed in transit (TCP's 16-bit checksum misses one damaged segment in 65,536, and
proxies and network cards rewrite it). Compared are: in a pack, the files that are completely in the fetched range; of a
plain object that was uploaded by one PUT and is fetched by one GET, its ETag, if this store uses MD5 sums. What always
holds: the comparison needs no request and no additional byte, unless a checksum was wrong; then the range is requested
again, `ANSWERS_MAX` times in total. Checksums are computed in the thread of the GET, outside the GIL. The probe finds
out whether ETags are MD5 sums, or else the first ETag that is one; until then an ETag that does not match the same
bytes twice shows that they are not. Tasks of one trio thread.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from typing import Protocol

from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.errors import LakeError
from lakefs_fuse.metrics import CacheMetrics
from lakefs_fuse.store.protocol import Buffer, Fetched
from lakefs_fuse.sync.byte_rate import ByteRate

ANSWERS_MAX = 3
"""One damaged response is chance; three in a row mean a broken path, or bytes that are damaged in the store."""

Spans = Sequence[tuple[int, int]]
"""Begin and end of ranges of an object."""

_MD5 = re.compile(r"[0-9a-f]{32}")
_log = logging.getLogger(__name__)


class Getter(Protocol):
    """The part of the store client that reading needs; it retries and keeps off the loop."""

    async def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        """As `store.protocol.ObjectStore.get`."""


class ExaminingGetter(Protocol):
    """A getter of a store whose responses are not protected in transit."""

    async def get(
        self, key: str, start: int, end: int, *, etag: str | None = None,
        examine: Callable[[Fetched], None] | None = None,
    ) -> Fetched:  # fmt: skip
        """``examine`` is called with the response in the thread that received it."""

    async def has_md5_etag(self, key: str) -> bool:
        """False if the object's encryption means that its ETag is not an MD5 sum. One request."""


class BlockGetter(Protocol):
    """Where a block reader gets its bytes."""

    async def get(self, version: Version, start: int, end: int) -> tuple[Fetched, Spans]:
        """The answer, and the ranges of it that were wrong in every attempt. Raises as the client's `get`."""


class PacedGetter:
    """The GETs of ``client``, together at most ``bytes_s_max`` a second (``--download-limit``). Each waits for its turn
    before it is sent, and is not split: up to 8 MiB arrive together. Other requests are not delayed, because all names
    depend on listings, commits and the index."""

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


class UnverifiedGet:
    """GETs of a client whose answers need no comparison."""

    def __init__(self, client: Getter) -> None:
        self._client = client

    async def get(self, version: Version, start: int, end: int) -> tuple[Fetched, Spans]:
        """See `BlockGetter`. Nothing is wrong."""
        return await self._client.get(version.key, start, end, etag=version.etag), ()


class _Examination:
    """The result of examining one response. ``digest`` is the MD5 of a whole object whose ETag could be one."""

    def __init__(self, start: int, wrong_members: Callable[[Buffer], Spans] | None) -> None:
        self.digest = ""
        self.wrong: Spans = ()
        self._start, self._wrong_members = start, wrong_members

    def __call__(self, fetched: Fetched) -> None:
        if self._wrong_members is not None:
            self.wrong = [(self._start + at, self._start + end) for at, end in self._wrong_members(fetched.data)]
        elif len(fetched.data) == fetched.meta.size and _MD5.fullmatch(fetched.meta.etag):
            self.digest = hashlib.md5(fetched.data, usedforsecurity=False).hexdigest()
            if self.digest != fetched.meta.etag:
                self.wrong = [(0, fetched.meta.size)]


class VerifiedGet:
    """See the module's head. ``wrong_members`` finds the damaged files in a range of a pack, ``is_pack`` recognises
    keys of packs; ``md5_etags``: whether the probe found that ETags are MD5 sums (False: they are not, or it could not
    test that)."""

    def __init__(
        self,
        client: ExaminingGetter,
        metrics: CacheMetrics,
        *,
        is_pack: Callable[[str], bool],
        wrong_members: Callable[[Buffer], Spans],
        md5_etags: bool | None,
    ) -> None:
        self._client, self._metrics = client, metrics
        self._is_pack, self._wrong_members = is_pack, wrong_members
        self._md5_etags = md5_etags

    async def get(self, version: Version, start: int, end: int) -> tuple[Fetched, Spans]:
        """See `BlockGetter`."""
        key, etag = version.key, version.etag
        members = self._wrong_members if self._is_pack(key) else None
        if members is None and self._md5_etags is False:
            return await self._client.get(key, start, end, etag=etag), ()
        earlier = ""
        for answer in range(1, ANSWERS_MAX + 1):
            examination = _Examination(start, members)
            fetched = await self._client.get(key, start, end, etag=etag, examine=examination)
            if not examination.wrong:
                if examination.digest:
                    self._md5_etags = True
                return fetched, ()
            if examination.digest and examination.digest == earlier and not await self._is_md5(key):
                return fetched, ()
            earlier = examination.digest
            self._metrics.wrong_sums += 1
            _log.warning(
                "%s: answer %d of %d for bytes %d to %d does not match its checksum: damaged in transit, or in the "
                "store",
                key, answer, ANSWERS_MAX, *examination.wrong[0],
            )  # fmt: skip
        _log.error("%s: bytes that do not match their checksum are not served or kept", key)
        return fetched, examination.wrong

    async def _is_md5(self, key: str) -> bool:
        """Whether the ETag of an object is an MD5 sum although the same bytes arrived twice and do not match it."""
        if self._md5_etags is None:
            _log.info("ETags of this store are no MD5 sums: plain objects are not compared with them")
            self._md5_etags = False
            return False
        try:
            return await self._client.has_md5_etag(key)
        except LakeError as error:
            _log.warning("%s: cannot find out whether its ETag is an MD5 sum: %s", key, error)
            return True
