"""When a lake may be upgraded, and what that changes."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.admin.upgrade import WRITERS_S, run_upgrade
from lakefs_fuse.commits.archive import build, commit_key
from lakefs_fuse.commits.record import Mkdir, Record
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.errors import LakeError
from lakefs_fuse.store.lake_record import FEATURES, KEY, LakeRecord
from tests.admin.lakes import give_pack, work_of
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Clock

OLD = "01dc0de0"


async def upgrade(store: MemoryStore, clock: Clock) -> protocol.Finished:
    with tempfile.TemporaryDirectory() as scratch:
        return await run_upgrade(work_of(store, clock, Path(scratch)), protocol.UpgradeArgs())


def lake() -> tuple[MemoryStore, Clock]:
    store = MemoryStore()
    store.give(KEY, msgspec.json.encode(LakeRecord(id="1" * 32)))
    return store, Clock()


def give_old_commit(store: MemoryStore, clock: Clock) -> str:
    """As programs wrote it that are older than the lake record."""
    time = clock()
    record = Record(writer=OLD, time=time, operations=[Mkdir("d", 0o755, 0, 0, 0)])
    key = commit_key(time, OLD)
    store.give(key, build([], lambda _: msgspec.msgpack.encode(record)))
    return key


def features(store: MemoryStore) -> tuple[str, ...]:
    return msgspec.json.decode(store.data(KEY), type=LakeRecord).features_to_read


async def test_upgrade_old_writer_of_the_last_hour_is_refused() -> None:
    store, clock = lake()
    key = give_old_commit(store, clock)
    give_pack(store, clock, {"new": b"bytes"})
    clock.advance(WRITERS_S - 60)
    with pytest.raises(LakeError, match=f"older program wrote .* 59 minutes ago .*{key}"):
        await upgrade(store, clock)
    assert features(store) == ()
    clock.advance(120)
    done = await upgrade(store, clock)
    assert done.summary["switched_on"] == sorted(FEATURES)
    assert features(store) == tuple(sorted(FEATURES))


async def test_upgrade_of_an_upgraded_lake_changes_nothing() -> None:
    store, clock = lake()
    give_pack(store, clock, {"new": b"bytes"})
    await upgrade(store, clock)
    puts = store.count("put", KEY)
    done = await upgrade(store, clock)
    assert (done.summary["switched_on"], store.count("put", KEY)) == ([], puts)


async def test_upgrade_without_a_record_is_refused() -> None:
    store, clock = lake()
    store.take(KEY)
    with pytest.raises(LakeError, match="no record"):
        await upgrade(store, clock)


async def test_upgrade_asks_one_commit_of_each_writer() -> None:
    store, clock = lake()
    for number in range(10):
        clock.advance(1)
        give_pack(store, clock, {f"{number}": b"bytes"})
    await upgrade(store, clock)
    assert sum(request.what == "get" and request.key != KEY for request in store.requests) == 1
