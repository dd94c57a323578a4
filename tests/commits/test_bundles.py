"""Bundles: what following many commits costs with them, and that nothing depends on them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.commits import bundles, commit_log, poller
from lakefs_fuse.commits.archive import parse_commit_key
from lakefs_fuse.commits.bundles import (
    COMMIT_BYTES_MAX,
    MIXED,
    OWN_COMMITS_MIN,
    SUFFIX,
    BundleReader,
    BundleWriter,
    Copy,
    Found,
    bundle_key,
    parse_bundle,
)
from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.poller import GETS_FOR_A_BUNDLE
from lakefs_fuse.commits.record import COMMITS, Mkdir
from lakefs_fuse.errors import AccessDenied
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.sync.refusal import REFUSED_S
from tests.commits.committing import Site, until
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
    """All commits but a few are in bundles: so few as a writer leaves that is slow."""

    def repeated() -> int:
        return len({copy.key for key in bundles_of(store) for copy in copies_in(store, key)})

    with trio.fail_after(20):
        while repeated() <= len(commits_of(store)) - 2 * OWN_COMMITS_MIN:
            await trio.sleep(0.01)


def copies_in(store: MemoryStore, key: str) -> list[Copy]:
    return msgspec.msgpack.decode(store.data(key), type=list[Copy])


async def test_follower_of_many_renames_fetches_a_few_bundles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delay_s = 0.5
    monkeypatch.setattr(commit_log, "OWN_DELAY_S", delay_s)
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        began_s = trio.current_time()
        await rename_often(one, 200)
        await all_repeated(store)
        elapsed_s, before = trio.current_time() - began_s, len(store.requests)
        assert await two.poll() == len(commits_of(store))
        gets = gets_of(store, before)
        assert len(bundles_of(store)) <= 2 * (elapsed_s / delay_s + 1), "one of new commits, one of these again"
        assert len(gets) <= len(bundles_of(store)) + 2 * OWN_COMMITS_MIN
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


@pytest.mark.parametrize("how", ["gone", "cut", "other bytes", "other ETags", "no record", "empty", "no text", "deep"])
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
                "no text": msgspec.msgpack.encode([["~", "", b""]]).replace(b"~", b"\xff"),
                "deep": msgspec.msgpack.encode([["", "", b"", None]])[:-1] + b"\x91" * 5000,
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
        assert reader.parts.committer.bundles_written == 0
    assert store.count("put") == puts


async def test_writer_that_may_not_put_bundles_goes_on_without_for_an_hour(
    autojump_clock: trio.testing.MockClock,
) -> None:
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
    await trio.sleep(REFUSED_S)
    for meta in metas:
        writer.add(meta, b"commit")
    await writer.write()
    assert len(bundles_of(store)) == 1


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
    reader.begin([store.objects[key][1]], found)
    assert reader.gets(10) == 1, "as far as its name tells"
    assert await reader.load_for(found) == 2
    assert [reader.has(meta) for _, _, meta in found] == [True, True, False, True]


def test_name_of_a_bundle_tells_what_is_in_it() -> None:
    store = MemoryStore()
    copies = [Copy(f"{COMMITS}{time:016x}-0000000a.zip", "etag", b"") for time in (5, 7, 300)]
    bundle = parse_bundle(store.give(bundle_key(copies, "0000000a"), b"x"))
    assert bundle is not None
    assert (bundle.first, bundle.last, bundle.commits, bundle.writer) == (5, 300, 3, "0000000a")
    for key in (copies[0].key, f"{COMMITS}x{SUFFIX}", bundle_key(copies, "0000000a") + "x"):
        assert parse_bundle(store.give(key, b"x")) is None


def commit_of(number: int, writer: str, size: int = 300) -> Found:
    key = f"{COMMITS}{number:016x}-{writer}.zip"
    return number, writer, ObjectMeta(key=key, size=size, etag="etag", mtime_ns=0)


def bundle_of(commits: Sequence[Found], writer: str) -> tuple[ObjectMeta, bytes]:
    copies = [Copy(meta.key, meta.etag, bytes(meta.size)) for _, _, meta in commits]
    body = msgspec.msgpack.encode(copies)
    return ObjectMeta(key=bundle_key(copies, writer), size=len(body), etag="etag", mtime_ns=0), body


def own_bundles(commits: Sequence[Found], writers: Sequence[str], size: int) -> list[tuple[ObjectMeta, bytes]]:
    """Each writer has repeated its commits, so many at a time."""
    bundles = []
    for writer in writers:
        own = [each for each in commits if each[1] == writer]
        bundles += [bundle_of(own[at : at + size], writer) for at in range(0, len(own), size)]
    return bundles


def writers_of(count: int) -> list[str]:
    return [f"{number:08x}" for number in range(1, count + 1)]


async def load_in_slices(reader: BundleReader, commits: Sequence[Found]) -> int:
    """As a poll does it; answers how many GETs were needed."""
    gets = 0
    for at in range(0, len(commits), 16):
        gets += await reader.load_for(commits[at : at + 16])
        for _, _, meta in commits[at : at + 16]:
            reader.pop(meta)
    return gets


@pytest.mark.parametrize(("writers", "again", "gets"), [(1, 0, 63), (50, 0, 100), (1, 250, 2), (50, 1000, 1)])
async def test_bundles_of_writers_at_the_same_time_are_read_once(writers: int, again: int, gets: int) -> None:
    """500 commits, in bundles of 8 (5 where 50 writers made them), and once more in larger ones."""
    names = writers_of(writers)
    commits = [commit_of(number, names[number % writers]) for number in range(500)]
    bundles = own_bundles(commits, names, 8 if writers == 1 else 5)
    if again:
        larger = names[0] if writers == 1 else MIXED
        bundles += [bundle_of(commits[at : at + again], larger) for at in range(0, 500, again)]
    random.Random(0).shuffle(bundles)
    store = MemoryStore()
    metas = [store.give(meta.key, body) for meta, body in bundles]
    reader = BundleReader(store_client(store, store.capabilities))
    reader.begin(metas, commits)
    assert reader.gets(1000) == gets
    assert reader.gets(gets // 2) == gets // 2 + 1, "no farther than was asked"
    assert await load_in_slices(reader, commits) == gets == store.count("get")


async def test_small_bundles_are_chosen_for_few_commits() -> None:
    commits = [commit_of(number, "00000001") for number in range(500)]
    bundles = [bundle_of(commits, "00000001"), bundle_of(commits[490:], "00000001")]
    store = MemoryStore()
    metas = [store.give(meta.key, body) for meta, body in bundles]
    reader = BundleReader(store_client(store, store.capabilities))
    reader.begin(metas, commits[-5:])
    assert await load_in_slices(reader, commits[-5:]) == 1
    assert [request.key for request in store.requests if request.what == "get"] == [bundles[1][0].key]
    reader.begin(metas, commits[-1:])
    assert reader.gets(10) == 0
    assert await load_in_slices(reader, commits[-1:]) == 1, "the commit itself"


async def test_bundles_that_are_loaded_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "LOADED_BYTES_MAX", 3000)
    commits = [commit_of(number, "00000001") for number in range(16)]
    meta, body = bundle_of(commits, "00000001")
    store = MemoryStore()
    reader = BundleReader(store_client(store, store.capabilities))
    reader.begin([store.give(meta.key, body)], commits)
    assert await reader.load_for(commits) == 7, "the bundle, and 6 that there was no room for"
    assert sum(reader.has(each) for _, _, each in commits) == 10
    reader.end()
    assert not any(reader.has(each) for _, _, each in commits)


def test_choosing_bundles_costs_what_they_are() -> None:
    """Ten times the commits and bundles cost far less than a hundred times the CPU."""

    async def cost(count: int) -> float:
        names = writers_of(20)
        commits = [commit_of(number, names[number % 20], 0) for number in range(count)]
        metas = [meta for meta, _ in own_bundles(commits, names, 8)]
        best = math.inf
        for _ in range(3):
            reader = BundleReader(store_client(MemoryStore(), MemoryStore().capabilities))
            began = time.thread_time()
            reader.begin(metas, commits)
            assert reader.gets(count) == pytest.approx(count / 8, rel=0.1)
            best = min(best, time.thread_time() - began)
        return best

    assert trio.run(cost, 16_000) < 30 * trio.run(cost, 1_600)


async def test_own_commits_are_repeated_again_in_larger_bundles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_log, "OWN_AGAIN", 6 * OWN_COMMITS_MIN)
    monkeypatch.setattr(bundles, "REPEATED_SPAN_NS", -1)
    site = Site(tmp_path)
    with site.daemon("one") as one:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.log.run)
            for number in range(12 * OWN_COMMITS_MIN):
                await one.committer.commit(Change(operations=[Mkdir(f"d{number}", 0o755, 0, 0, 0)]))
                if number % OWN_COMMITS_MIN == OWN_COMMITS_MIN - 1:
                    made = number // OWN_COMMITS_MIN + 1
                    await until(lambda made=made: one.log.bundles_written == made + made // 6)  # type: ignore[misc]
            nursery.cancel_scope.cancel()
    before = len(site.store.requests)
    with site.daemon("fresh") as fresh:
        assert await fresh.poller.poll() == 12 * OWN_COMMITS_MIN
    assert len(gets_of(site.store, before)) == 2


async def test_poll_that_fails_keeps_no_commits(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("one") as one, site.daemon("two") as two:
        for number in range(40):
            await one.committer.commit(Change(operations=[Mkdir(f"d{number}", 0o755, 0, 0, 0)]))
        found = [(time, writer, site.store.objects[key][1]) for key in site.commits() for time, writer in [named(key)]]
        for commits in (found[:10], found[10:20]):
            copies = [Copy(meta.key, meta.etag, site.store.data(meta.key)) for _, _, meta in commits]
            site.store.give(bundle_key(copies, one.log.writer), msgspec.msgpack.encode(copies))
        site.store.hook = Failures(lambda request: request.key == found[25][2].key, AccessDenied("denied"), count=99)
        with pytest.raises(AccessDenied):
            await two.poller.poll()
        assert two.applier.commits.is_applied(*found[5][:2])
        assert not any(two.log.bundles.has(meta) for _, _, meta in found)
        assert two.log.fetched is not None
        assert two.log.fetched.commits == 0
        site.store.hook = lambda _request, _when: None
        assert await two.poller.poll() >= 24
        assert all(two.find(f"d{number}") for number in range(40))


def named(key: str) -> tuple[int, str]:
    name = parse_commit_key(key)
    assert name is not None
    return name
