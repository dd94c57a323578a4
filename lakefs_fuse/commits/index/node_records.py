"""Records of nodes about a version of a dataset: how much of it is on their disks.

`.lakefs/residency/<snapshot>/<node>` is the record of one mount, which no other mount writes; the last PUT counts. Only
schedulers need it: if one is lost, a node is unknown for a while. A record that was not written for EXPIRES_S is that
of a node that is gone, or of a mount that ended that long ago; readers skip it, and `gc` deletes it. Any client of the
bucket can write there, so readers also skip what no mount would write (`_is_plausible`).

Raises StoreError kinds throughout. For tasks of one trio loop.
"""

from __future__ import annotations

import re
from contextlib import suppress

import msgspec

from lakefs_fuse.errors import MALFORMED, NotFound
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.nursery import for_each

RESIDENCY = f"{RESERVED_PREFIX}residency/"
FORMAT = 1
RENEW_S = 6 * 3600.0
"""A record that has not changed is written again after this time, so that it does not expire."""
EXPIRES_S = 24 * 3600.0
RECORD_BYTES_MAX = 64 << 10
GETS_AT_ONCE = 16
NS = 1_000_000_000
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters and line ends."""


class NodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How much of a version one mount has: ``local_bytes`` of the ``bytes`` of all files.

    They are on the disk of the machine ``node``, in the cache of the mount at ``mountpoint``, which is there, or was
    until lately (not ``mounted``)."""

    format: int = FORMAT
    node: str
    mountpoint: str
    mounted: bool
    local_bytes: int
    bytes: int


def key_of(snapshot: str, node_id: str) -> str:
    """Return the key of a record; ``node_id`` is of one mount, in letters, digits, '.', '_' and '-'."""
    return f"{RESIDENCY}{snapshot}/{node_id}"


async def put_record(client: StoreClient, key: str, record: NodeRecord) -> None:
    await client.put(key, msgspec.msgpack.encode(record))


async def read_records(client: StoreClient, snapshot: str, now_ns: int) -> list[tuple[NodeRecord, int]]:
    """Return the records that have not expired, by node and mountpoint, each with the time of its last PUT (ns since
    1970). Records that cannot be read, or that no mount would write, are left out."""
    found: list[tuple[NodeRecord, int]] = []

    async def read(meta: ObjectMeta) -> None:
        if meta.size > RECORD_BYTES_MAX:
            return
        with suppress(NotFound, *MALFORMED):
            fetched = await client.get(meta.key, 0, RECORD_BYTES_MAX)
            record = msgspec.msgpack.decode(fetched.data, type=NodeRecord)
            if record.format == FORMAT and _is_plausible(record):
                found.append((record, meta.mtime_ns))

    async for page in client.list_all(f"{RESIDENCY}{snapshot}/"):
        fresh = [meta for meta in page.objects if not _is_expired(meta, now_ns)]
        await for_each(fresh, read, GETS_AT_ONCE)
    return sorted(found, key=lambda each: (each[0].node, each[0].mountpoint))


def _is_plausible(record: NodeRecord) -> bool:
    """Return whether names are on one line, without control characters, and no more bytes are local than there are."""
    is_text = not any(map(_UNFIT.search, (record.node, record.mountpoint)))
    return is_text and 0 <= record.local_bytes <= record.bytes


def _is_expired(meta: ObjectMeta, now_ns: int) -> bool:
    return (now_ns - meta.mtime_ns) / NS >= EXPIRES_S


async def remove_records(client: StoreClient, snapshot: str = "", *, expired_ns: int | None = None) -> int:
    """Delete the records of a version, or of all; with ``expired_ns``, only those that have expired by then. Returns
    how many there were. Raises LakeError if some object cannot be deleted."""
    count = 0
    async for page in client.list_all(f"{RESIDENCY}{snapshot}/" if snapshot else RESIDENCY):
        doomed = [meta.key for meta in page.objects if expired_ns is None or _is_expired(meta, expired_ns)]
        await client.delete_all(doomed)
        count += len(doomed)
    return count
