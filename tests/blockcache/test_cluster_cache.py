"""Blocks from proxies: who is asked, what is believed, and what is asked of the store instead."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import trio

from lakefs_fuse.blockcache import cluster_proxies
from lakefs_fuse.blockcache.cluster_cache import ClusterCache
from lakefs_fuse.blockcache.cluster_proxies import REQUESTS_MAX, ClusterProxies
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version
from lakefs_fuse.blockcache.proofs import REFUTED_MAX, PackSums, Proofs
from lakefs_fuse.blockcache.verified_get import Spans, UnverifiedGet
from lakefs_fuse.commits.archive import ArchiveBuilder, Member, wrong_members
from lakefs_fuse.commits.archive_check import fetch_directory
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.errors import AccessDenied, DamagedCommit, KeyRefused, LakeError, NotFound, StoreError, Unavailable
from lakefs_fuse.metrics import ClusterCacheMetrics
from lakefs_fuse.store.protocol import Buffer, Fetched, ObjectMeta
from tests import virtual_time
from tests.blockcache.reading import MIB, MemoryStore, content

URLS = ("http://a:1", "http://b:2", "http://c:3")
PLAIN, PACK = "plain", ".lakefs/commits/pack"
DATA = content("plain", 3 * MIB + 7)


class Proxy:
    """A `CachedGetter` that gives what the store has, unless told otherwise: with one byte of each answer changed
    (``flip_at``), from an object that is not the store's (``others``), or not at all (``fail``)."""

    def __init__(self, store: MemoryStore) -> None:
        self._store, self._lock = store, threading.Lock()
        self.asked: Counter[tuple[str, int, int]] = Counter()
        self.fail: Exception | None = None
        self.pause_s, self.pauses_s = 0.0, dict[int, float]()
        self.flip_at: int | None = None
        self.others = b""
        self.metadata: dict[str, str] = {}

    def get(self, key: str, start: int, end: int, etag: str) -> tuple[Fetched, bool]:
        with self._lock:
            self.asked[key, start, end] += 1
            times = self.asked[key, start, end]
        virtual_time.sleep(self.pauses_s.get(start, self.pause_s))
        if self.fail is not None:
            raise self.fail
        held = self.others or self._store.objects[key]
        data = bytearray(held[start:end])
        if self.flip_at is not None and self.flip_at < len(data):
            data[self.flip_at] ^= 1
        return Fetched(bytes(data), ObjectMeta(key, len(held), etag, 0, self.metadata)), times > 1


class Cluster:
    """One node, its proxies and the store."""

    def __init__(self, nursery: trio.Nursery, urls: tuple[str, ...], *, trusting: bool, md5_etags: bool = True) -> None:
        self.store, self.metrics = MemoryStore(), ClusterCacheMetrics()
        self.proxy = Proxy(self.store)
        self.by_url = {url: Proxy(self.store) for url in urls} if len(urls) > 1 else {urls[0]: self.proxy}
        self.proxies = ClusterProxies(self.by_url, self.metrics, nursery, WorkerThreads())
        self.directories_read = 0
        self.directory_error: LakeError | None = None
        self.proofs = Proofs(
            is_pack=lambda key: key == PACK,
            wrong_members=wrong_members,
            pack_sums=None if trusting else self.pack_sums,
            md5_etags=md5_etags,
        )
        self.cache = ClusterCache(UnverifiedGet(self.store), self.proxies, self.proofs, self.metrics, WorkerThreads())
        self.plain = self.store.put(PLAIN, DATA)

    async def pack_sums(self, version: Version) -> PackSums:
        async def fetch(start: int, end: int) -> Buffer:
            await trio.lowlevel.checkpoint()
            return self.store.objects[PACK][start:end]

        self.directories_read += 1
        await trio.sleep(0.01)
        if self.directory_error is not None:
            raise self.directory_error
        return PackSums((await fetch_directory(version.size, fetch)).checksums())

    async def read(self, version: Version, start: int, end: int) -> bytes:
        fetched, wrong = await self.cache.get(version, start, end)
        assert not wrong
        assert fetched.meta.etag == version.etag
        return bytes(fetched.data)

    async def read_right(self, version: Version, start: int = 0, end: int = 0) -> None:
        end = end or version.size
        assert await self.read(version, start, end) == self.store.objects[version.key][start:end]

    @property
    def store_gets(self) -> list[tuple[int, int]]:
        return [(start, end) for _, start, end in self.store.gets]


@asynccontextmanager
async def cluster(*urls: str, trusting: bool = False, md5_etags: bool = True) -> AsyncIterator[Cluster]:
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            yield Cluster(nursery, urls or URLS[:1], trusting=trusting, md5_etags=md5_etags)
            nursery.cancel_scope.cancel()


def put_pack(made: Cluster, *sizes: int) -> tuple[Version, list[tuple[int, int]]]:
    """A pack of files of these sizes, and where they begin and end."""
    pieces: list[Buffer] = []
    builder = ArchiveBuilder(pieces.append)
    offsets = [builder.add(Member(f"file-{number}", content(number, size), size)) for number, size in enumerate(sizes)]
    builder.finish(b"record")
    version = made.store.put(PACK, b"".join(pieces))
    return version, [(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True)]


# -- who is asked


async def test_cluster_proxies_in_any_order_ask_the_same_owner() -> None:
    asked = []
    for urls in (URLS, URLS[::-1]):
        async with cluster(*urls) as made:
            for block in range(4):
                assert await made.proxies.get(made.plain, block)
            asked.append({url: set(made.by_url[url].asked) for url in URLS})
    assert asked[0] == asked[1]


async def test_cluster_proxies_share_blocks_and_move_only_those_of_one_that_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_proxies, "SILENT_S_MAX", 60.0)  # a thread may get its turn late
    blocks = 300
    async with cluster(*URLS) as made:
        version = Version("large", "etag", blocks * BLOCK_BYTES)
        made.store.objects["large"] = b""

        async def owners() -> dict[int, str]:
            for proxy in made.by_url.values():
                proxy.asked.clear()
                proxy.fail = proxy.fail or NotFound("asked")
            for block in range(blocks):
                await made.proxies.get(version, block)
            return {start // BLOCK_BYTES: url for url, proxy in made.by_url.items() for _, start, _ in proxy.asked}

        before = await owners()
        assert all(blocks / 5 < count < blocks / 2 for count in Counter(before.values()).values())
        made.by_url[URLS[0]].fail = Unavailable("down")
        await owners()
        after = await owners()
        assert URLS[0] not in after.values()
        assert after.keys() == before.keys()
        assert {block: url for block, url in before.items() if url != URLS[0]}.items() <= after.items()


async def test_cluster_proxies_ask_one_that_failed_again_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_proxies, "TRY_S_FIRST", 0.05)
    async with cluster() as made:
        made.proxy.fail = Unavailable("down")
        await made.read_right(made.plain)
        asked = made.proxy.asked.total()
        await made.read_right(made.plain)
        assert made.store_gets == [(0, len(DATA))] * 2
        while made.proxy.asked.total() < asked + 2:
            await trio.sleep(0.01)
        made.proxy.fail = NotFound("removed meanwhile")
        while not made.proxies.any_serves:
            await trio.sleep(0.01)
        made.proxy.fail = None
        await made.read_right(made.plain)
        assert len(made.store.gets) == 2
        assert made.metrics.fallbacks == 1


@pytest.mark.parametrize("error", [AccessDenied("403"), NotFound("404"), Unavailable("503", throttled=True)], ids=str)
async def test_cluster_proxies_that_pass_on_what_the_store_says_do_not_fail(error: StoreError) -> None:
    async with cluster() as made:
        made.proxy.fail = error
        await made.read_right(made.plain)
        assert made.proxies.any_serves
        assert made.store_gets == [(0, len(DATA))]
        assert (made.metrics.failures, made.metrics.fallbacks) == (4, 1)


async def test_cluster_proxies_do_not_make_requests_that_waited_when_their_proxy_failed() -> None:
    """One more may begin in the place of each that has failed, before it is known that the proxy fails."""
    async with cluster() as made:
        version = Version(PLAIN, made.plain.etag, 3 * REQUESTS_MAX * BLOCK_BYTES)
        made.proxy.fail, made.proxy.pause_s = Unavailable("down"), 0.2
        async with trio.open_nursery() as nursery:
            for block in range(version.blocks):
                nursery.start_soon(made.proxies.get, version, block)
        assert made.metrics.requests == made.proxy.asked.total() <= 2 * REQUESTS_MAX


async def test_cluster_proxy_that_is_silent_fails_and_one_that_answers_others_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_proxies, "SILENT_S_MAX", 1.0)  # a busy machine may pause, too
    async with cluster() as made:
        made.proxy.pauses_s[0] = 2.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.read_right, made.plain)
            for _ in range(22):
                await trio.sleep(0.1)
                assert await made.proxies.get(made.plain, 1)
        assert (made.metrics.failures, made.store_gets) == (0, [])
        began_s = trio.current_time()
        await made.read_right(made.plain)
        assert trio.current_time() - began_s < 1.9, "it answers the other blocks first"
        assert (made.metrics.failures, made.store_gets) == (1, [(0, len(DATA))])
        await made.read_right(made.plain)
        assert made.metrics.failures == 1


async def test_cluster_proxies_are_asked_beside_one_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_proxies, "SILENT_S_MAX", 2.0)  # on a busy machine the other one takes a while, too
    async with cluster(*URLS[:2]) as made:
        version = Version(PLAIN, made.plain.etag, 3 * REQUESTS_MAX * BLOCK_BYTES)
        made.store.objects[PLAIN] = bytes(version.size)
        hanging, other = (made.by_url[url] for url in URLS[:2])
        hanging.pause_s = 4.0
        async with trio.open_nursery() as nursery:
            for block in range(version.blocks):
                nursery.start_soon(made.proxies.get, version, block)
        for block in range(version.blocks):
            assert await made.proxies.get(version, block)
        assert other.asked.total() >= version.blocks
        assert made.proxies.any_serves


async def test_cluster_proxy_that_answers_another_size_fails() -> None:
    async with cluster() as made:
        await made.read_right(made.plain)
        longer = Version(PLAIN, made.plain.etag, len(DATA) + 1)
        assert await made.proxies.get(longer, 0) is None
        assert not made.proxies.any_serves


async def test_cluster_proxy_is_tried_by_one_request_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where requests that were sent before it failed are answered afterwards, again and again."""
    monkeypatch.setattr(cluster_proxies, "TRY_S_FIRST", 1.0)
    async with cluster() as made:
        made.proxy.pauses_s[0] = 0.05
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(made.proxies.get, made.plain, 0)
                await trio.sleep(0.02)
                made.proxy.fail = Unavailable("down")
                await made.proxies.get(made.plain, 1)
                made.proxy.fail = None
                await trio.sleep(0.05)
        assert (made.proxies.any_serves, made.metrics.failures) == (False, 1)
        while not made.proxies.any_serves:
            await trio.sleep(0.01)
        assert made.metrics.failures == 1


async def test_cluster_proxy_that_fails_with_one_object_is_tried_with_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_proxies, "TRY_S_FIRST", 0.02)
    async with cluster() as made:
        await made.read_right(made.plain)
        longer = Version(PLAIN, made.plain.etag, len(DATA) + 1)
        assert await made.proxies.get(longer, 0) is None
        assert not made.proxies.any_serves
        while not made.proxies.any_serves:
            await trio.sleep(0.01)


async def test_cluster_proxy_that_cannot_be_asked_for_want_of_a_thread_leaves_the_store() -> None:
    async with cluster() as made:
        made.proxy.fail = RuntimeError("can't start new thread")
        assert await made.proxies.get(made.plain, 0) is None
        assert made.metrics.failures == 1


@pytest.mark.parametrize("error", [StoreError("400 KMS.DisabledException"), KeyRefused("a//b")], ids=str)
async def test_cluster_proxies_are_not_blamed_for_one_object(error: StoreError) -> None:
    async with cluster() as made:
        made.proxy.fail = error
        assert await made.proxies.get(made.plain, 0) is None
        assert made.proxies.any_serves
        assert made.metrics.requests == made.metrics.failures == (not isinstance(error, KeyRefused))


async def test_cluster_proxy_without_a_thread_for_its_trial_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_proxies, "TRY_S_FIRST", 0.02)
    async with cluster() as made:
        made.proxy.fail = Unavailable("down")
        assert await made.proxies.get(made.plain, 0) is None
        made.proxy.fail = RuntimeError("can't start new thread")
        asked = made.proxy.asked.total()
        while made.proxy.asked.total() == asked:
            await trio.sleep(0.01)
        made.proxy.fail = None
        while not made.proxies.any_serves:
            await trio.sleep(0.01)


# -- what is believed


async def test_cluster_cache_asks_once_for_a_directory_that_cannot_be_read() -> None:
    async with cluster() as made:
        pack, _ = put_pack(made, 700_000, 0, 900_000, 100_000)
        made.directory_error = Unavailable("away")
        async with trio.open_nursery() as nursery:
            for _ in range(8):
                nursery.start_soon(made.read_right, pack)
        assert made.directories_read == 1


async def test_cluster_cache_asks_a_store_that_is_away_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has been tried again for as long as it may be."""
    async with cluster() as made:
        pack, _ = put_pack(made, *[150_000] * 40)
        asked = 0

        async def get(getter: UnverifiedGet, version: Version, start: int, end: int) -> tuple[Fetched, Spans]:
            nonlocal asked
            asked += 1
            raise Unavailable("away")

        monkeypatch.setattr(UnverifiedGet, "get", get)
        with pytest.raises(Unavailable):
            await made.cache.get(pack, MIB, 2 * MIB)
        assert asked == 2, "for the files that each end of the range cuts"


async def test_cluster_cache_compares_a_whole_object_with_its_etag() -> None:
    async with cluster() as made:
        await made.read_right(made.plain)
        assert not made.store.gets
        made.proxy.flip_at = 5
        await made.read_right(made.plain)
        assert made.store_gets == [(0, len(DATA))]
        assert (made.metrics.damaged, made.metrics.fallbacks, made.metrics.bytes_of_store) == (1, 1, len(DATA))
        assert made.metrics.hits == 4
        assert made.metrics.bytes_read == 2 * len(DATA)


async def test_cluster_cache_gets_a_part_of_an_object_from_the_store() -> None:
    async with cluster() as made:
        await made.read_right(made.plain, MIB, 2 * MIB)
        assert not made.proxy.asked
        assert made.store_gets == [(MIB, 2 * MIB)]


async def test_cluster_cache_of_a_store_whose_etags_are_no_sums_learns_it() -> None:
    async with cluster() as made:
        other = Version(PLAIN, "0123456789abcdef" * 2, len(DATA))
        made.store.ignores_etag = True
        for _ in range(REFUTED_MAX + 2):
            fetched, _ = await made.cache.get(other, 0, other.size)
            assert bytes(fetched.data) == DATA
        assert made.metrics.damaged == REFUTED_MAX
        assert made.proxy.asked[PLAIN, 0, MIB] == REFUTED_MAX


async def test_cluster_cache_gets_a_whole_pack_from_the_proxies() -> None:
    async with cluster() as made:
        pack, _ = put_pack(made, 700_000, 0, 900_000, 100_000)
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(made.read_right, pack)
        assert not made.store.gets
        assert made.directories_read == 1


async def test_cluster_cache_gets_files_that_a_range_cuts_from_the_store() -> None:
    async with cluster() as made:
        pack, files = put_pack(made, *[150_000] * 40)
        start, end = MIB, 2 * MIB
        made.proxy.flip_at = 10
        await made.read_right(pack, start, end)
        cut = [(at, stop) for at, stop in files if at < start < stop or at < end < stop]
        assert sorted(made.store_gets) == [(start, cut[0][1]), (cut[1][0], end)]
        assert made.metrics.bytes_of_store == cut[0][1] - start + end - cut[1][0]
        assert made.metrics.damaged == 0, "nothing of them is taken from the proxy"


async def test_cluster_cache_gets_a_range_of_which_half_is_cut_from_the_store() -> None:
    async with cluster() as made:
        pack, _ = put_pack(made, 1_300_000, 100_000, 1_300_000)
        await made.read_right(pack, MIB, 2 * MIB)
        assert made.store_gets == [(MIB, 2 * MIB)]
        assert not made.proxy.asked


@pytest.mark.parametrize("at", [100, 1_000_000])
async def test_cluster_cache_of_a_pack_with_a_changed_file_asks_the_store(at: int) -> None:
    async with cluster() as made:
        pack, _ = put_pack(made, 100_000, 850_000, 200_000)
        made.proxy.flip_at = at
        await made.read_right(pack)
        assert made.store_gets == [(0, pack.size)]
        assert made.metrics.damaged == 1


async def test_cluster_cache_of_a_pack_with_the_bytes_of_another_asks_the_store() -> None:
    """Whose own headers and sums are right."""
    async with cluster() as made:
        other, _ = put_pack(made, 30_001, 50_000)
        made.proxy.others = made.store.objects[PACK]
        pack, _ = put_pack(made, 30_000, 50_001)
        assert pack.size == other.size
        await made.read_right(pack)
        assert made.metrics.damaged == 1


async def test_cluster_cache_of_a_pack_whose_directory_is_damaged_asks_the_store() -> None:
    async with cluster() as made:
        pack, _ = put_pack(made, 30_000)
        for error, read in ((Unavailable("away"), 2), (DamagedCommit("damaged"), 3)):
            made.directory_error = error
            await made.read_right(pack)
            await made.read_right(pack)
            assert made.directories_read == read, "only damage is for ever"
        assert not made.proxy.asked


async def test_cluster_cache_whose_cut_files_cannot_be_read_raises_the_error_of_the_store() -> None:
    async with cluster() as made:
        pack, _ = put_pack(made, *[150_000] * 40)
        made.store.fail_with = NotFound("removed")
        with pytest.raises(NotFound):
            await made.read(pack, MIB, 3 * MIB)


# -- trusted proxies


async def test_trusted_cluster_cache_learns_of_etags_from_whole_objects_only() -> None:
    async with cluster(trusting=True) as made:
        other = Version(PLAIN, "0123456789abcdef" * 2, len(DATA))
        made.store.ignores_etag = True
        for _ in range(REFUTED_MAX + 1):
            await made.cache.get(other, 0, other.size)
            await made.cache.get(other, 0, MIB)
        assert made.metrics.damaged == REFUTED_MAX


async def test_trusted_cluster_cache_asks_the_store_for_nothing() -> None:
    async with cluster(trusting=True) as made:
        pack, _ = put_pack(made, *[150_000] * 40)
        made.proxy.metadata = {"mode": "33188"}
        await made.read_right(pack, MIB, 3 * MIB)
        await made.read_right(made.plain, MIB, 2 * MIB)
        fetched, _ = await made.cache.get(made.plain, 0, len(DATA))
        assert fetched.meta.metadata == {"mode": "33188"}
        assert not made.store.gets
        assert made.directories_read == 0


@pytest.mark.parametrize("trusting", [True, False])
async def test_cluster_cache_is_asked_for_whole_blocks_of_which_a_part_is_wanted(trusting: bool) -> None:
    async with cluster(trusting=trusting) as made:
        pack, files = put_pack(made, *[150_000] * 40)
        begin, end = files[10]
        await made.read_right(pack, begin - 100, end)
        first, stop = begin // MIB, -(-end // MIB)
        assert sorted(made.proxy.asked) == [(PACK, at * MIB, (at + 1) * MIB) for at in range(first, stop)]
        await made.read_right(pack, pack.size - 5000, pack.size - 10)


async def test_trusted_cluster_cache_whose_answer_contradicts_itself_asks_the_store() -> None:
    async with cluster(trusting=True) as made:
        pack, files = put_pack(made, *[150_000] * 40)
        made.proxy.flip_at = files[1][0]
        await made.read_right(pack, 0, 3 * MIB)
        await made.read_right(made.plain)
        assert made.store_gets == [(0, 3 * MIB), (0, len(DATA))]


async def test_cluster_cache_tells_no_metadata_that_a_proxy_claims() -> None:
    async with cluster() as made:
        made.proxy.metadata = {"mode": "33188"}
        fetched, _ = await made.cache.get(made.plain, 0, len(DATA))
        assert fetched.meta == ObjectMeta(PLAIN, len(DATA), made.plain.etag, 0)
