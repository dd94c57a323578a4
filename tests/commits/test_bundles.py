"""Bundles: what following many commits costs with them, and that nothing depends on them."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.commits import commit_log, poller
from lakefs_fuse.commits.bundles import (
    COMMIT_BYTES_MAX,
    MIXED,
    OWN_COMMITS_MIN,
    SUFFIX,
    BundleReader,
    BundleWriter,
    Copy,
    bundle_key,
    parse_bundle,
)
from lakefs_fuse.commits.poller import GETS_FOR_A_BUNDLE
from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.errors import AccessDenied
from tests.fakes import store_client
from tests.memory_store import Failures, MemoryStore
from tests.vfs.lakes import Clock, Lake, lake, two_lakes

OWN_DELAY_S = 0.01


@pytest.fixture(autouse=True)
def _prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "OWN_DELAY_S", OWN_DELAY_S)


def bundles_of(store: MemoryStore) -> list[str]:
    return sorted(key for key in store.objects if key.startswith(COMMITS) and key.endswith(SUFFIX))


def commits_of(store: MemoryStore) -> list[str]:
    return sorted(key for key in store.objects if key.startswith(COMMITS) and key.endswith(".zip"))


def gets_of(store: MemoryStore, since: int) -> list[str]:
    return [request.key for request in store.requests[since:] if request.what == "get"]


async def rename_often(m: Lake, count: int) -> None:
    """So many commits of one name each."""
    await m.symlink("0", "target")
    for number in range(count):
        await m.rename(str(number), str(number + 1))


async def all_repeated(store: MemoryStore) -> None:
    """All commits but a few are in bundles."""
    with trio.fail_after(20):
        while sum(len(copies_in(store, key)) for key in bundles_of(store)) <= len(commits_of(store)) - OWN_COMMITS_MIN:
            await trio.sleep(0.01)


def copies_in(store: MemoryStore, key: str) -> list[Copy]:
    return msgspec.msgpack.decode(store.data(key), type=list[Copy])


async def test_follower_of_many_renames_fetches_a_few_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "OWN_DELAY_S", 0.5)
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        await rename_often(one, 200)
        await all_repeated(store)
        before = len(store.requests)
        assert await two.poll() == len(commits_of(store))
        gets = gets_of(store, before)
        assert len(gets) <= len(bundles_of(store)) + OWN_COMMITS_MIN < 40
        assert await two.names() == ["200"]
        assert await two.readlink("200") == "target"


async def test_poll_in_the_background_waits_for_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "BUNDLE_WAIT_S", 0.6)
    monkeypatch.setattr(poller, "GETS_MAX", 4)
    monkeypatch.setattr(commit_log, "OWN_DELAY_S", 0.3)
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        await rename_often(one, 2 * OWN_COMMITS_MIN)
        newest, before = commits_of(store)[-1], len(store.requests)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(two.parts.poller.poll_in_background)
            await trio.sleep(0.2)
            await one.rename(str(2 * OWN_COMMITS_MIN), "later")
        gets = gets_of(store, before)
        assert len(gets) <= 4
        assert any(key.endswith(SUFFIX) for key in gets)
        assert newest not in gets
        assert await two.names() == [str(2 * OWN_COMMITS_MIN)], "as of when it asked first"
        await two.parts.poller.poll_in_background()
        assert await two.names() == ["later"]


async def test_who_waits_for_others_waits_for_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(poller, "BUNDLE_WAIT_S", 60.0)
    monkeypatch.setattr(commit_log, "OWN_DELAY_S", 60.0)
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        await rename_often(one, 20)
        with trio.fail_after(20):
            await two.poll()
        assert await two.names() == ["20"]


@pytest.mark.parametrize("how", ["gone", "cut", "other bytes", "other ETags", "no record", "empty"])
async def test_bundle_that_is_wrong_costs_requests_only(tmp_path: Path, how: str) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        await rename_often(one, 40)
        await all_repeated(store)
        for key in bundles_of(store):
            copies = copies_in(store, key)
            wrong = {
                "cut": store.data(key)[:-7],
                "other bytes": random.Random(0).randbytes(500),
                "other ETags": msgspec.msgpack.encode([msgspec.structs.replace(each, etag="x") for each in copies]),
                "no record": msgspec.msgpack.encode(
                    [msgspec.structs.replace(each, body=bytes(len(each.body))) for each in copies]
                ),
                "empty": msgspec.msgpack.encode([]),
            }
            if how == "gone":
                store.hook = Failures(
                    lambda request: request.key.endswith(SUFFIX), AccessDenied("no bundles"), count=1000
                )
            else:
                store.give(key, wrong[how])
        assert await two.poll() == len(commits_of(store))
        assert await two.names() == ["40"]
        assert two.metrics.commits.damaged == 0


async def test_commit_that_no_list_shows_is_not_applied(tmp_path: Path) -> None:
    """Garbage collection deleted it, or somebody made it up."""
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        await rename_often(one, 20)
        await all_repeated(store)
        for key in commits_of(store)[5:]:
            store.take(key)
        assert await two.poll() == 5
        assert await two.names() == ["5"]


async def test_mount_that_fetched_much_spares_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "OWN_COMMITS_MIN", 10_000)
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "writer", clock=clock) as one:
        await rename_often(one, 2 * GETS_FOR_A_BUNDLE)
        costs = []
        for number in range(3):
            before = len(store.requests)
            async with lake(store, tmp_path / str(number), clock=clock) as fresh:
                assert await fresh.names() == [str(2 * GETS_FOR_A_BUNDLE)]
            costs.append(len(gets_of(store, before)))
        (bundle,) = bundles_of(store)
        assert MIXED in bundle
        assert costs[0] >= 2 * GETS_FOR_A_BUNDLE
        assert costs[1] == costs[2] <= 3, costs


async def test_read_only_mount_writes_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_log, "OWN_COMMITS_MIN", 10_000)
    store = MemoryStore()
    async with lake(store, tmp_path / "writer") as one:
        await rename_often(one, 2 * GETS_FOR_A_BUNDLE)
    puts = store.count("put")
    async with lake(store, tmp_path / "reader", read_only=True) as reader:
        assert await reader.names() == [str(2 * GETS_FOR_A_BUNDLE)]
    assert store.count("put") == puts


async def test_writer_that_may_not_put_bundles_goes_on_without() -> None:
    store = MemoryStore()
    writer = BundleWriter(store_client(store, store.capabilities), MIXED)
    metas = [store.give(f"{COMMITS}{number:016x}-00000001.zip", b"commit") for number in range(6)]
    store.hook = Failures(lambda request: request.what == "put", AccessDenied("denied"))
    for at in (0, 3):
        for meta in metas[at : at + 3]:
            writer.add(meta, b"commit")
        await writer.write()
    assert bundles_of(store) == []
    assert store.count("put") == 1


async def test_large_commits_are_in_no_bundle() -> None:
    store = MemoryStore()
    writer, reader = (
        BundleWriter(store_client(store, store.capabilities), "00000002"),
        BundleReader(store_client(store, store.capabilities)),
    )
    sizes = [10, COMMIT_BYTES_MAX, COMMIT_BYTES_MAX + 1, 20]
    found = []
    for number, size in enumerate(sizes):
        meta = store.give(f"{COMMITS}{number:016x}-00000002.zip", bytes(size))
        writer.add(meta, bytes(size))
        found.append((number, "00000002", meta))
    await writer.write()
    (key,) = bundles_of(store)
    reader.begin([store.objects[key][1]])
    assert reader.gets_for(found) == 1, "as far as its name tells"
    assert await reader.load_for(found) == 2
    assert [reader.has(meta) for _, _, meta in found] == [True, True, False, True]


def test_name_of_a_bundle_tells_what_is_in_it() -> None:
    store = MemoryStore()
    copies = [Copy(f"{COMMITS}{time:016x}-0000000a.zip", "etag", b"") for time in (5, 7, 300)]
    bundle = parse_bundle(store.give(bundle_key(copies, "0000000a"), b"x"))
    assert bundle is not None
    assert (bundle.first, bundle.last, bundle.commits) == (5, 300, 3)
    assert bundle.may_have(7, "0000000a")
    assert not bundle.may_have(7, "0000000b")
    assert not bundle.may_have(301, "0000000a")
    for key in (copies[0].key, f"{COMMITS}x{SUFFIX}", bundle_key(copies, "0000000a") + "x"):
        assert parse_bundle(store.give(key, b"x")) is None
