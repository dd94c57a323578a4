"""Digests of listings: they tell a mount whether another one's LIST of the last minutes showed commits that it lacks.

A poll that lists the whole visibility window costs one page for each thousand commits in it. So most polls list only
the end of it. Now and then one mount lists all of it and publishes a digest: for each *bucket*, 0.27 s of commit times,
the number of commits and the sum of the hashes of their keys. A mount whose own LISTs showed the same need not list the
window; if a bucket differs, it lists that bucket.

What always holds (*only a comparison*): a commit counts because a LIST of this mount showed it, never because a digest
has it. A digest that is missing, damaged or deleted costs requests; one that was forged to equal what this mount knows
hides a late commit until this mount lists the window itself.

Trio thread only. Memory: a pair of numbers for each bucket of the last BUCKETS_MAX. A crash loses them; the next daemon
begins with a LIST of the whole window.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from typing import NamedTuple

import msgspec
import xxhash

from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.errors import MALFORMED, AccessDenied, LakeError
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.refusal import Refusal

BUCKET_BITS = 28
"""Nanoseconds of a bucket, as a power of two: 0.27 s, so that 500 commits a second are 134 in a bucket."""
BUCKETS_MAX = 4096
"""Maximum of buckets, 18 minutes: many times what a digest covers. A digest that covers more is not read."""
DIGEST_BYTES_MAX = 32 * BUCKETS_MAX
SUFFIX = ".digest"
"""Suffix of the key of a digest."""
_NAME = re.compile(
    re.escape(COMMITS) + r"([0-9a-f]{16})-([0-9a-f]{8})-([0-9a-f]{16})-([0-9a-f]{16})" + re.escape(SUFFIX)
)
_SUM_MASK = (1 << 64) - 1
log = logging.getLogger(__name__)


class DigestName(NamedTuple):
    """A digest as its key describes it. ``time`` is when it was stored; ``newest`` the newest commit that was known
    when its LIST began; ``first`` the time from which on it covers commits."""

    time: int
    writer: str
    newest: int
    first: int
    meta: ObjectMeta


class Digest(msgspec.Struct, frozen=True, array_like=True):
    """The contents of a digest: numbers of commits, and sums of hashes, of consecutive buckets. ``took_ns`` is how long
    before its PUT the LIST began."""

    took_ns: int
    counts: list[int]
    sums: list[int]


_DIGEST: msgspec.msgpack.Decoder[Digest] = msgspec.msgpack.Decoder(Digest)


def parse_digest(meta: ObjectMeta) -> DigestName | None:
    """Return the digest that an object is by its key; None for other objects, and if it is too large."""
    match = _NAME.fullmatch(meta.key)
    if match is None or not 0 < meta.size <= DIGEST_BYTES_MAX:
        return None
    return DigestName(int(match[1], 16), match[2], int(match[3], 16), int(match[4], 16), meta)


def digest_key(time: int, writer: str, newest: int, first: int) -> str:
    """Return the key of a digest."""
    return f"{COMMITS}{time:016x}-{writer}-{newest:016x}-{first:016x}{SUFFIX}"


def bucket_start(time: int) -> int:
    """Return the time at which the bucket of a time begins."""
    return time >> BUCKET_BITS << BUCKET_BITS


class BucketSums:
    """How many commits LIST showed in each bucket, and the sums of the hashes of their keys."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[int, int]] = {}

    def replace(self, since: int, until: int | None, commits: Iterable[tuple[int, str]]) -> None:
        """Replace the sums between two times (None: the end) by those of the commits that a LIST showed."""
        first, end = since >> BUCKET_BITS, None if until is None else until >> BUCKET_BITS
        for bucket in [each for each in self._of if each >= first and (end is None or each < end)]:
            del self._of[bucket]
        for time, key in commits:
            bucket = time >> BUCKET_BITS
            count, total = self._of.get(bucket, (0, 0))
            self._of[bucket] = count + 1, (total + xxhash.xxh3_64_intdigest(key.encode())) & _SUM_MASK
        if len(self._of) > BUCKETS_MAX:
            for bucket in sorted(self._of)[:-BUCKETS_MAX]:
                del self._of[bucket]

    def start_of_last(self, keys: int, newest: int, span_ns: int) -> int:
        """Return where the last buckets up to ``newest`` begin that have at most ``keys`` commits within ``span_ns``.
        There is at least one bucket."""
        last = bucket = newest >> BUCKET_BITS
        first = max(0, newest - span_ns) >> BUCKET_BITS
        count = self._of.get(bucket, (0, 0))[0]
        while bucket > first and (count := count + self._of.get(bucket - 1, (0, 0))[0]) <= keys:
            bucket -= 1
        return min(bucket, last) << BUCKET_BITS

    def digest(self, first: int, end: int) -> Digest:
        """Return the digest of the buckets from one time up to another; the caller sets ``took_ns``."""
        pairs = [self._of.get(bucket, (0, 0)) for bucket in range(first >> BUCKET_BITS, end >> BUCKET_BITS)]
        return Digest(0, [count for count, _ in pairs], [total for _, total in pairs])

    def differences(self, digest: Digest, first: int, since: int) -> list[tuple[int, int]]:
        """Return the ranges of time from ``since`` on in which a digest that begins at ``first`` differs from this."""
        found: list[tuple[int, int]] = []
        for bucket, pair in enumerate(zip(digest.counts, digest.sums, strict=True), first >> BUCKET_BITS):
            if bucket < since >> BUCKET_BITS or pair == self._of.get(bucket, (0, 0)):
                continue
            start, end = bucket << BUCKET_BITS, bucket + 1 << BUCKET_BITS
            if found and found[-1][1] == start:
                found[-1] = found[-1][0], end
            else:
                found.append((start, end))
        return found


class DigestStore:
    """Reads digests of other mounts, and writes those of this one."""

    def __init__(self, client: StoreClient, writer: str, *, is_read_only: bool) -> None:
        self._client, self._writer, self._is_read_only, self._refusal = client, writer, is_read_only, Refusal()
        self.written = 0
        """Number of digests that were stored."""

    @property
    def is_writable(self) -> bool:
        """True if this mount stores digests."""
        return not (self._is_read_only or self._refusal.is_in_effect)

    async def read(self, name: DigestName) -> Digest | None:
        """Read a digest; None if it is gone or damaged, or has too many buckets."""
        meta = name.meta
        try:
            digest = _DIGEST.decode((await self._client.get(meta.key, 0, meta.size, etag=meta.etag)).data)
        except (LakeError, *MALFORMED) as error:
            log.info("digest %s is not read: %s", meta.key, error)
            return None
        return digest if len(digest.counts) == len(digest.sums) <= BUCKETS_MAX and digest.took_ns >= 0 else None

    async def write(self, time: int, newest: int, first: int, digest: Digest) -> None:
        """Store a digest. Raises nothing: without it, other mounts list the window themselves."""
        if not self.is_writable or not 0 < len(digest.counts) <= BUCKETS_MAX:
            return
        try:
            await self._client.put(digest_key(time, self._writer, newest, first), msgspec.msgpack.encode(digest))
            self.written += 1
        except AccessDenied as error:
            log.info("no digests are written for an hour: %s", error)
            self._refusal.note()
        except LakeError as error:
            log.info("a digest is not written: %s", error)

    def newest_of_others(self, metas: Iterable[ObjectMeta]) -> DigestName | None:
        """Return the newest digest of another mount among objects that LIST showed."""
        names = (name for meta in metas if (name := parse_digest(meta)) is not None and name.writer != self._writer)
        return max(names, key=lambda name: name[:2], default=None)
