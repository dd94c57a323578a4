"""The limit on uploads: how much in any second, how evenly, and how soon a cancelled one gives up."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio

from lakefs_fuse.config import KIB, MIB, Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.store.open import open_store
from lakefs_fuse.store.probe import probe
from lakefs_fuse.store.protocol import Capabilities, FileSlice, NetworkStore, ObjectStore
from lakefs_fuse.store.rate_limit import PIECES_S, RateLimiter
from tests.fakes import FakeClock, store_client
from tests.servers import Server
from tests.store.lakes import s3_config


def sent_by(limit: int, seconds: float, pause: Callable[[], float]) -> list[tuple[float, int]]:
    """When and how much one upload sends that needs ``pause()`` seconds itself for each piece."""
    clock = FakeClock()
    pace = RateLimiter(limit, UploadMetrics(), clock, check=lambda: None)
    sent = []
    while clock.mono_s() < seconds:
        pace.wait(pace.piece_bytes)
        sent.append((clock.mono_s(), pace.piece_bytes))
        clock.advance(pause())
    return sent


@pytest.mark.parametrize("limit", [1 * KIB, 10 * KIB, 256 * KIB, 8 * MIB, 5 * 1024 * MIB])
def test_no_second_holds_more_than_the_limit(limit: int) -> None:
    """Whatever else an upload waits for in between."""
    rng = random.Random(limit)
    sent = sent_by(limit, 5.0, lambda: rng.choice([0.0, 0.0, 0.0, 0.01, 0.3]))
    for first, (began, _) in enumerate(sent):
        within = sum(count for at, count in sent[first:] if at < began + 1)
        assert within <= limit * (1.1 if limit >= 20 * KIB else 1.1 + KIB / limit)


@pytest.mark.parametrize("limit", [64 * KIB, 1 * MIB, 64 * MIB])
def test_the_limit_is_used_and_evenly(limit: int) -> None:
    sent = sent_by(limit, 5.0, lambda: 0.001)
    total = sum(count for _, count in sent)
    assert 0.98 * 5 * limit < total < 1.1 * 5 * limit
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(sent)]
    assert max(gaps) < 1.5 / PIECES_S


def test_uploads_share_it() -> None:
    """Eight threads in real time: together they keep to it, and none starves."""
    metrics = UploadMetrics()
    pace = RateLimiter(4 * MIB, metrics, SystemClock())
    sent = [0] * 8
    until = time.monotonic() + 1.5

    def upload(number: int) -> None:
        while time.monotonic() < until:
            pace.wait(pace.piece_bytes)
            sent[number] += pace.piece_bytes

    threads = [threading.Thread(target=upload, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # At the end each of them waits for one more piece.
    assert 0.8 * 1.5 * 4 * MIB < sum(sent) < 1.15 * 1.5 * 4 * MIB + 8 * pace.piece_bytes
    assert max(sent) - min(sent) <= 3 * pace.piece_bytes
    assert metrics.throttled_s > 6
    assert metrics.bytes_s_max == 4 * MIB
    assert pace.sent_bytes == sum(sent)


def test_pieces_are_counted_without_a_limit_and_never_wait() -> None:
    clock = FakeClock()
    pace = RateLimiter(0, UploadMetrics(), clock, check=lambda: None)
    began_s = clock.mono_s()
    for _ in range(100):
        pace.wait(pace.piece_bytes)
    assert (pace.sent_bytes, clock.mono_s()) == (100 * MIB, began_s)


@pytest.fixture(params=["local", "seaweedfs"])
def config(request: pytest.FixtureRequest, tmp_path: Path, new_bucket: Callable[[Server], str]) -> StoreConfig:
    if request.param == "local":
        return StoreConfig(source=Source.parse(f"file://{tmp_path}"))
    seaweed: Server = request.getfixturevalue("seaweed")
    # The read timeout is shorter than the uploads here.
    return s3_config(seaweed, new_bucket(seaweed), read_timeout_s=1.0)


@contextmanager
def opened(config: StoreConfig, limit: int, metrics: UploadMetrics) -> Iterator[ObjectStore]:
    """A store with this limit, probed without one."""
    node = Node.of_this_machine()
    with contextlib.closing(open_store(config, node)) as unlimited:
        capabilities = probe(unlimited, random.Random(3), SystemClock())
    with contextlib.closing(open_store(config, node, RateLimiter(limit, metrics, SystemClock()))) as store:
        if isinstance(store, NetworkStore):
            store.adapt(capabilities)
        yield store


def test_a_body_goes_up_at_the_pace_and_whole(config: StoreConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Slices and bytes, objects and parts; for longer than a connection may be silent."""
    limit, size = 256 * KIB, 600 * KIB
    with opened(config, limit, UploadMetrics()) as store:
        rate = rate_of_uploads(store, size, tmp_path_factory)
    assert 0.8 * limit < rate < 1.15 * limit


def rate_of_uploads(store: ObjectStore, size: int, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Bytes a second, of uploads that arrive whole."""
    path = tmp_path_factory.mktemp("body") / "body"
    data = os.urandom(size)
    path.write_bytes(data)
    upload_id = store.create_multipart("part")
    with path.open("rb") as file:
        body = FileSlice(file.fileno(), 0, size)
        began = time.monotonic()
        store.put("slice", body)
        store.put("bytes", data)
        part = store.upload_part("part", upload_id, 1, body)
        for number in range(4):
            store.put(f"small{number}", data[: 10 * KIB])
        rate = (3 * size + 40 * KIB) / (time.monotonic() - began)
    store.complete_multipart("part", upload_id, [part])
    for key in ("slice", "bytes", "part"):
        assert bytes(store.get(key, 0, size).data) == data
    assert bytes(store.get("small3", 0, size).data) == data[: 10 * KIB]
    return rate


async def test_a_cancelled_upload_gives_up_soon(config: StoreConfig) -> None:
    metrics = UploadMetrics()
    with opened(config, 4 * KIB, metrics) as store:
        client = store_client(store, Capabilities(name="not asked"))
        began = trio.current_time()
        with trio.move_on_after(1) as scope:
            await client.put("a", bytes(1 * MIB))
        assert scope.cancelled_caught
        assert trio.current_time() - began < 3
        assert 0.2 < metrics.throttled_s < 3
        assert [meta.key for meta in store.list_page("").objects] == []
