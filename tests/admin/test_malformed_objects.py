"""Objects of this program in the store, with bytes that any client may have put there: each reader leaves them out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
import pytest

from lakefs_fuse.admin import maintenance
from lakefs_fuse.commits import gc_record, listing_digest, maintenance_lease
from lakefs_fuse.commits.index import node_records, snapshots
from lakefs_fuse.commits.index.index import MANIFEST
from lakefs_fuse.commits.index.node_records import NodeRecord
from lakefs_fuse.errors import DamagedCommit
from lakefs_fuse.store.client import StoreClient
from tests.fakes import store_client
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Clock

DEEP = b"\x91" * 5000
"""Arrays in arrays, cut off: more than any reader follows."""
NO_TEXT = b"\xa1\xff"
TEXT = b"\xa1~"

Reader = Callable[[StoreClient], Awaitable[object]]
DIGEST = listing_digest.digest_key(5, "0000000a", 4, 3)


async def read_digest(client: StoreClient) -> object:
    name = listing_digest.parse_digest(await client.head(DIGEST))
    return name and await listing_digest.DigestStore(client, "0000000b", is_read_only=True).read(name)


async def read_gc_record(client: StoreClient) -> object:
    return await gc_record.GcRecordReader(client).read()


async def find_holder(client: StoreClient) -> object:
    return (await maintenance_lease.find_holder(client, Clock())).partition(" ")[0]


READERS: dict[str, tuple[str, Reader, object]] = {
    "gc": (f"{gc_record.RECORDS}{5:016x}-{0:016x}", read_gc_record, gc_record.GcRecord()),
    "maintenance": (maintenance.KEY, maintenance.read_collection, None),
    "lease": (maintenance_lease.KEY, find_holder, "a"),
    "node": (node_records.key_of("s", "n"), lambda client: node_records.read_records(client, "s", 0), []),
    "digest": (DIGEST, read_digest, None),
}


RAW = {
    "nothing": b"",
    "another type": msgspec.msgpack.encode(7),
    "deep": msgspec.msgpack.encode({"unknown": None})[:-1] + DEEP,
    "deep list": msgspec.msgpack.encode([1, [2], [3], None])[:-1] + DEEP,
    "no text": msgspec.msgpack.encode(
        {"dead": {"~": 1}, "id": "~", "command": "~", "node": "~", "mountpoint": "~"}
    ).replace(TEXT, NO_TEXT),
}


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
@pytest.mark.parametrize(("key", "read", "expected"), READERS.values(), ids=READERS)
async def test_object_that_is_malformed_is_left_out(raw: bytes, key: str, read: Reader, expected: object) -> None:
    store = MemoryStore()
    store.give(key, raw)
    assert await read(store_client(store, store.capabilities)) == expected


@pytest.mark.parametrize(
    "change",
    [{"node": "a\x1b[31m"}, {"node": "a\nb 100%"}, {"mountpoint": "/m\u2028"}, {"local_bytes": -1}, {"local_bytes": 6}],
)
async def test_record_of_a_node_that_no_mount_writes_is_left_out(change: dict[str, object]) -> None:
    store, record = MemoryStore(), NodeRecord(node="n", mountpoint="/m", mounted=True, local_bytes=5, bytes=5)
    for node, each in {"good": record, "bad": msgspec.structs.replace(record, **change)}.items():
        store.give(node_records.key_of("s", node), msgspec.msgpack.encode(each))
    found = await node_records.read_records(store_client(store, store.capabilities), "s", 0)
    assert [each for each, _ in found] == [record]


@pytest.mark.parametrize("raw", RAW.values(), ids=RAW)
async def test_snapshot_whose_manifest_is_malformed_is_damaged(raw: bytes) -> None:
    store = MemoryStore()
    store.give(f"{snapshots.SNAPSHOTS}s/{MANIFEST}", raw)
    with pytest.raises(DamagedCommit, match="restore it"):
        await snapshots.fetch_manifest(store_client(store, store.capabilities), "s")
