"""Mounts that share a cluster cache: what they fetch from the store, and that a proxy's faults do not reach readers."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.faults import faulty
from tests.forward_proxy import forward_proxy
from tests.mount.lakes import MIB, Lake, eventually, noise, s3_lake
from tests.nginx import TOKEN, CountedStore, Nginx, counted, nginx
from tests.servers import Server, make_bucket
from tests.tiers import sized

PACKED = {f"packed/{number:03}": noise(30_000 + 500 * number, number) for number in range(120)}
PLAIN = {f"plain/{number}": noise(700_000 + 300_000 * number, 1000 + number) for number in range(sized(5, 9))}
LARGE = {"large": noise(9 * MIB + 11, 2000)}
FILES = PACKED | PLAIN | LARGE
PACK = ".zip"
NODES, MODES = sized(2, 4), sized(3, 4)
Maker = Callable[..., Lake]


@pytest.fixture
def store(seaweed: Server, tmp_path: Path) -> Iterator[CountedStore]:
    with counted(seaweed, tmp_path / "counted") as store:
        yield store


@pytest.fixture
def proxy(store: CountedStore, tmp_path: Path) -> Iterator[Nginx]:
    with nginx(store.server, tmp_path / "nginx") as proxy:
        yield proxy


@pytest.fixture(scope="module")
def writer(dev_fuse: Path, seaweed: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lake]:
    """The lake with the dataset, which no test changes; not mounted."""
    bucket = f"cluster-{random.SystemRandom().getrandbits(48):012x}"
    make_bucket(seaweed, bucket)
    options = "--pack", "always", "--durability", "writeback", "--writeback-delay", "1m"
    with s3_lake(seaweed, bucket, tmp_path_factory.mktemp("writer"), *options) as lake:
        lake.mount()
        (lake.path / "packed").mkdir()
        for name, data in PACKED.items():
            (lake.path / name).write_bytes(data)
        lake.sync()
        for name, data in (PLAIN | LARGE).items():
            lake.outside.replace(name, data)
        lake.umount()
        assert any(size > 4 * MIB for key, size in lake.outside.objects().items() if key.endswith(PACK)), "in pieces"
        yield lake


@pytest.fixture
def node(writer: Lake, store: CountedStore, tmp_path: Path) -> Iterator[Maker]:
    """Mount the dataset on another node: ``node(*options)``."""
    with ExitStack() as stack:

        def mount(*options: str, token: str = TOKEN) -> Lake:
            directory = tmp_path / f"node-{time.monotonic_ns()}"
            url = "--endpoint-url", store.server.url, "--region", "us-east-1"
            polls = () if "--immutable" in options else ("--refresh", "1h")
            lake = Lake(writer.outside, writer.source, directory, *url, *polls, *options)
            lake.env["LAKEFS_CLUSTER_CACHE_TOKEN"] = token
            stack.callback(lake.close)
            return lake.mount()

        yield mount


def read(lake: Lake, *, seed: int = 0, files: dict[str, bytes] = FILES) -> None:
    """All files in an order of its own, compared."""
    names = sorted(files)
    random.Random(seed).shuffle(names)
    for name in names:
        assert (lake.path / name).read_bytes() == files[name], name


def read_at_once(lakes: list[Lake]) -> None:
    """An epoch on each, in another order."""
    failed: list[BaseException] = []

    def epoch(number: int) -> None:
        try:
            read(lakes[number], seed=number)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=epoch, args=(number,)) for number in range(len(lakes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def counters(lake: Lake) -> dict[str, int]:
    found = lake.stats()["cluster_cache"]
    assert isinstance(found, dict)
    return found


def factors(store: CountedStore, lakes: list[Lake]) -> dict[str, float]:
    """Bytes that the store sends for an epoch on each, of the bytes of the dataset, by the kind of object."""
    kinds = {"all": ("", FILES), "packed": (PACK, PACKED), "plain": ("/plain/", PLAIN), "large": ("/large", LARGE)}
    before = {kind: store.bytes_sent(containing=part) for kind, (part, _) in kinds.items()}
    read_at_once(lakes)
    return {
        kind: (store.bytes_sent(containing=part) - before[kind]) / sum(map(len, files.values()))
        for kind, (part, files) in kinds.items()
    }


def test_mounts_that_trust_the_cache_fetch_the_dataset_once(node: Maker, store: CountedStore, proxy: Nginx) -> None:
    modes: list[tuple[str, ...]] = [(), ("--immutable",), ("--read-only",), ()][:MODES]
    lakes = [node("--cluster-cache", proxy.url, "--trust-cluster-cache", *mode) for mode in modes]
    found = factors(store, lakes)
    assert found["all"] <= 1.1, found
    assert sum(counters(lake)["hits"] for lake in lakes) > 0
    assert "cluster cache: " in lakes[0].cli("stats", str(lakes[0].path)).stdout
    assert all(counters(lake)["fallbacks"] == counters(lake)["bytes_of_store"] == 0 for lake in lakes)


def test_mounts_that_trust_nothing_fetch_what_no_sum_proves_each(
    node: Maker, store: CountedStore, proxy: Nginx
) -> None:
    """Of packs in pieces, files that are cut: here one in 8 MiB at either end. Of plain objects, those over 4 MiB."""
    lakes = [node("--cluster-cache", proxy.url) for _ in range(NODES)]
    found = factors(store, lakes)
    assert found["packed"] <= 1 + 0.4 * (NODES - 1) / 3, found
    assert found["plain"] <= 1.1, found
    assert NODES - 0.1 <= found["large"] <= NODES + 0.1, found


@pytest.mark.long  # test_metadata.py counts GETs without it
def test_mounts_without_a_cache_fetch_the_dataset_each(node: Maker, store: CountedStore) -> None:
    lakes = [node() for _ in range(NODES)]
    assert NODES - 0.1 <= factors(store, lakes)["all"] <= NODES + 0.1
    assert all(not any(counters(lake).values()) for lake in lakes)
    assert "cluster cache: " not in lakes[0].cli("stats", str(lakes[0].path)).stdout


SLOWER_S_MAX = 2.0
NOISE_S_MAX = 3.0
"""Of a machine that does other things, too."""


@pytest.mark.parametrize(
    "number",
    [pytest.param(signal.SIGKILL, id="killed", marks=pytest.mark.long), pytest.param(signal.SIGSTOP, id="hanging")],
)
def test_mount_whose_proxy_fails_reads_on(node: Maker, proxy: Nginx, number: signal.Signals) -> None:
    lake, without = node("--cluster-cache", proxy.url, "--trust-cluster-cache"), node()
    read(lake, files=PACKED)
    before = counters(lake)
    assert before["requests"] > before["failures"] == 0
    proxy.signal(number)
    usual_s, took_s = (seconds(partial(read, each, files=PLAIN | LARGE)) for each in (without, lake))
    assert took_s <= usual_s + SLOWER_S_MAX + NOISE_S_MAX
    after = counters(lake)
    assert after["bytes_of_store"] == sum(map(len, (PLAIN | LARGE).values()))
    assert 1 <= after["fallbacks"] <= after["failures"]
    assert lake.log().count("is not used until it answers again") == 1
    if number == signal.SIGSTOP:
        proxy.signal(signal.SIGCONT)
        eventually(lambda: "answers again" in lake.log().splitlines()[-1], "the proxy is used again")


@pytest.mark.long  # blockcache/test_cluster_cache.py shows it
def test_mounts_whose_proxy_is_killed_while_they_read_show_no_error(node: Maker, proxy: Nginx) -> None:
    lakes = [node("--cluster-cache", proxy.url) for _ in range(2)]

    def kill() -> None:
        eventually(lambda: proxy.bytes_kept() > 0, "the proxy is used")
        proxy.signal(signal.SIGKILL)

    killing = threading.Thread(target=kill)
    killing.start()
    read_at_once(lakes)
    killing.join()
    assert any(counters(lake)["failures"] for lake in lakes)


@pytest.mark.long  # blockcache/test_cluster_cache.py shows it
def test_mount_whose_proxy_changes_bytes_shows_none_of_them(node: Maker, store: CountedStore) -> None:
    with forward_proxy(store.server) as proxy:
        lake = node("--cluster-cache", proxy.url)
        proxy.faults.flip(1 << 20, method="GET")
        read(lake)
        found = counters(lake)
        assert found["damaged"] == found["fallbacks"] > 1
        assert found["failures"] == lake.number("cache.wrong_sums") == 0
        assert lake.log().count("do not match their checksum and come from the store") == 1


def test_mount_with_a_wrong_password_of_the_proxy_reads_from_the_store(node: Maker, proxy: Nginx) -> None:
    lake = node("--cluster-cache", proxy.url, token="wrong-password")
    read(lake)
    found = counters(lake)
    assert found["bytes_read"] == proxy.bytes_kept() == 0
    assert lake.log().count("the proxy refuses its password (407)") == 1
    assert "wrong-password" not in lake.log()


@pytest.mark.long  # blockcache/test_cluster_cache.py shows it
def test_mount_with_two_proxies_keeps_about_half_at_each(
    node: Maker, store: CountedStore, proxy: Nginx, tmp_path: Path
) -> None:
    with nginx(store.server, tmp_path / "second") as second:
        urls = [proxy.url, second.url]
        for order in (urls, urls[::-1]):
            read(node("--cluster-cache", ",".join(order), "--trust-cluster-cache"))
        kept = [each.bytes_kept() for each in (proxy, second)]
    total = sum(map(len, FILES.values()))
    assert total <= sum(kept) <= 1.1 * total, "no block is at both"
    assert min(kept) >= total / 4


@pytest.mark.long  # blockcache/test_cluster_cache.py shows it
def test_mount_whom_the_store_refuses_at_the_proxy_asks_the_store_itself(
    node: Maker, store: CountedStore, tmp_path: Path
) -> None:
    with faulty(store.server) as (refusing, faults), nginx(refusing, tmp_path / "refused") as proxy:
        faults.forbid(1 << 20, method="GET")
        lake = node("--cluster-cache", proxy.url)
        read(lake, files=PLAIN)
        assert counters(lake)["fallbacks"] == len(PLAIN)
        assert proxy.bytes_kept() == 0, "a refusal is not kept"
        faults.clear()
        assert "is left out" not in lake.log()
        read(node("--cluster-cache", proxy.url), files=PLAIN)
        assert proxy.bytes_kept() >= sum(map(len, PLAIN.values()))
    assert TOKEN not in lake.log()


def seconds(body: Callable[[], None]) -> float:
    began_s = time.monotonic()
    body()
    return time.monotonic() - began_s
