"""GETs whose bytes are compared with the sums that the store and its packs have of them, before they are used.

Over plain http nothing else tells that a bit changed on the way (TCP's 16-bit sum lets one damaged segment in 65,536
through, and proxies and network cards rewrite it). What is compared: of a pack, the files that the fetched range holds
whole; of a plain object that was uploaded in one piece and is fetched in one, its ETag where this store makes MD5 sums.

What always holds: no request is made for it, and no byte fetched, unless a sum was wrong; then the range is asked for
again, `ANSWERS_MAX` times in all. Sums are taken in the thread of the GET, outside the GIL. Whether ETags are MD5 sums
is known from what this program itself has put there (the probe), else from the first ETag that is one; until then an
ETag that does not fit the same bytes twice says that they are not. Tasks of one trio thread.
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
"""A damaged answer is chance; three in a row are a broken path, or bytes that are damaged where they lie."""

Spans = Sequence[tuple[int, int]]
"""Begin and end of ranges of an object."""

_MD5 = re.compile(r"[0-9a-f]{32}")
_log = logging.getLogger(__name__)


class Getter(Protocol):
    """The part of the store client that reading needs; it retries and keeps off the loop."""

    async def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        """As `store.protocol.ObjectStore.get`."""


class ExaminingGetter(Protocol):
    """A getter of a store whose answers are not protected on their way."""

    async def get(
        self, key: str, start: int, end: int, *, etag: str | None = None,
        examine: Callable[[Fetched], None] | None = None,
    ) -> Fetched:  # fmt: skip
        """``examine`` is given the answer in the thread that brought it."""

    async def has_md5_etag(self, key: str) -> bool:
        """False where the object is encrypted in a way that makes its ETag anything but an MD5 sum. One request."""


class BlockGetter(Protocol):
    """Where a block reader gets its bytes."""

    async def get(self, version: Version, start: int, end: int) -> tuple[Fetched, Spans]:
        """The answer, and the ranges of it that were wrong in every attempt. Raises as the client's `get`."""


class PacedGetter:
    """The GETs of ``client``, ``bytes_s_max`` a second together (``--download-limit``). Each waits for its turn before
    it is sent, and is not cut: up to 8 MiB come at once. Nothing else is held up: every name waits for listings,
    commits and the index."""

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
    """What one answer is found to be. ``digest`` is the MD5 of a whole object whose ETag could be one."""

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
    """See the module's head. ``wrong_members`` finds the damaged files in a range of a pack, ``is_pack`` says which
    keys are packs; ``md5_etags`` whether the probe found that ETags are MD5 sums (False: they are not, or it could not
    try)."""

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
                "%s: answer %d of %d for bytes %d to %d does not have its sum: damaged on the way, or in the store",
                key, answer, ANSWERS_MAX, *examination.wrong[0],
            )  # fmt: skip
        _log.error("%s: bytes that do not have their sum are neither served nor kept", key)
        return fetched, examination.wrong

    async def _is_md5(self, key: str) -> bool:
        """Whether the ETag of an object whose bytes came the same twice, and do not fit it, is a sum all the same."""
        if self._md5_etags is None:
            _log.info("ETags of this store are no MD5 sums: plain objects are not compared with them")
            self._md5_etags = False
            return False
        try:
            return await self._client.has_md5_etag(key)
        except LakeError as error:
            _log.warning("%s: cannot tell whether its ETag is a sum: %s", key, error)
            return True
