"""The record of garbage collection in the store: what earlier runs found dead, and which commits may be deleted.

It is the object `.lakefs/gc/<time>-<horizon>`. The *horizon*, a time in ns since 1970, is in the key, so that all
readers of the lake learn it from one LIST.

What always holds (*horizon before deletion*): an index that has all commits before the horizon is stored first, then
the record, and then commits before the horizon are deleted; the horizon never decreases. So a reader that has neither
an index nor names up to the horizon lacks changes that are in no commit any more.

For tasks of one trio loop. A crash while a record is written leaves two: the newest counts for grace periods, and the
highest horizon of any counts.
"""

from __future__ import annotations

import re

import msgspec

from lakefs_fuse.commits.record import TIME_NS_MAX
from lakefs_fuse.errors import MALFORMED, LakeError, NotFound, PreconditionFailed
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta

RECORDS = f"{RESERVED_PREFIX}gc/"
FORMAT = 1
RECORD_BYTES_MAX = 384 << 20
DEAD_MAX = 2_000_000
"""Maximum of commits in a record, 112 MB; the grace periods of others begin in a later run."""
UNREFERENCED_MAX = 200_000
"""As DEAD_MAX, for other objects: 215 MB with the longest keys."""

_KEY = re.compile(re.escape(RECORDS) + r"[0-9a-f]{16}-([0-9a-f]{16})")


class GcRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a run of gc leaves for the next one, which has to know when grace periods began.

    ``dead``: key → time (ns since 1970) of the first run that saw the commit dead. ``horizon``: commits older than this
    had been folded into an index when the record was written. ``unreferenced``: key → ETag of a superseded object, and
    the time of the first run that saw it without a name."""

    format: int = FORMAT
    horizon: int = 0
    dead: dict[str, int] = {}
    unreferenced: dict[str, tuple[str, int]] = {}


async def read_horizon(client: StoreClient) -> int:
    """Return the time before which commits may be deleted; 0 if none may be. One LIST. Raises StoreError kinds."""
    return _horizon_of(await _list_records(client))


class GcRecordReader:
    """Reads the record repeatedly, and fetches it only if it is another one than before. For one task."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._key, self._etag, self._record = "", "", GcRecord()

    async def read(self) -> GcRecord:
        """Return the newest readable record, with the highest horizon of all; an empty one if there is none. Raises
        LakeError."""
        metas = await _list_records(self._client)
        horizon = _horizon_of(metas)
        for meta in reversed(metas):
            is_known = (meta.key, meta.etag) == (self._key, self._etag)
            record = self._record if is_known else await _fetch_record(self._client, meta)
            if record is not None:
                self._key, self._etag, self._record = meta.key, meta.etag, record
                return msgspec.structs.replace(record, horizon=max(record.horizon, horizon))
        return GcRecord(horizon=horizon)


async def _fetch_record(client: StoreClient, meta: ObjectMeta) -> GcRecord | None:
    if not 0 < meta.size <= RECORD_BYTES_MAX:
        return None
    try:
        raw = bytes((await client.get(meta.key, 0, meta.size, etag=meta.etag)).data)
        record = msgspec.msgpack.decode(raw, type=GcRecord)
    except (NotFound, PreconditionFailed, *MALFORMED):
        return None
    return record if record.format == FORMAT else None


async def write_gc_record(client: StoreClient, record: GcRecord, time_ns: int) -> None:
    """Write a record in place of all others. Raises LakeError, also if some of them cannot be deleted."""
    old = await _list_records(client)
    record = msgspec.structs.replace(record, horizon=max(record.horizon, _horizon_of(old)))
    key = f"{RECORDS}{time_ns:016x}-{record.horizon:016x}"
    if record.dead or record.horizon or record.unreferenced:
        await client.put(key, msgspec.msgpack.encode(record))
    # Also one that is dated later, by a clock that was wrong: readers would take it for the newest until then.
    refused = await client.delete_many([meta.key for meta in old if meta.key != key])
    if refused:
        first, why = next(iter(refused.items()))
        raise deletion_refused(len(refused), f"{first}: {why}")


def deletion_refused(count: int, why: str) -> LakeError:
    """Return the error of a collection that may not delete ``count`` objects."""
    return LakeError(
        f"deleting is refused for {counted(count, 'object')} ({why}): collect garbage with "
        "credentials that may delete everything in the lake (deploy/iam/maintainer.json)"
    )


def _horizon_of(metas: list[ObjectMeta]) -> int:
    times = [int(match[1], 16) for meta in metas if (match := _KEY.fullmatch(meta.key))]
    return max((time for time in times if time <= TIME_NS_MAX), default=0)


async def _list_records(client: StoreClient) -> list[ObjectMeta]:
    """Return the records in the store, oldest first."""
    found: list[ObjectMeta] = []
    async for page in client.list_all(RECORDS):
        found += page.objects
    return sorted(found, key=lambda meta: meta.key)
