"""`StoreClient`: retries against a real store that fails on command; bounds and cancellation against one that waits.

A read timeout of a second keeps stalls short.
"""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

import msgspec
import pytest
import trio
import trio.testing

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import (
    LakeError,
    NotCarriedOut,
    NotFound,
    Overtaken,
    PreconditionFailed,
    Superseded,
    Unavailable,
)
from lakefs_fuse.store.client import AWAY_S_MIN, NS, SILENT_S_MIN, TOKEN_METADATA, StoreClient
from lakefs_fuse.store.open import open_store
from lakefs_fuse.store.probe import probe
from lakefs_fuse.store.protocol import Capabilities, Fetched, FileSlice, ObjectMeta, ObjectStore
from lakefs_fuse.store.s3.access import connect
from lakefs_fuse.store.s3.store import S3Store
from lakefs_fuse.upload.draft_target import DraftTarget
from tests.fakes import FakeClock, store_client
from tests.faults import Faults
from tests.memory_store import MemoryStore, Request, When
from tests.servers import Server
from tests.store.lakes import s3_config

T = TypeVar("T")
BODY = bytes(range(256)) * 400
RETRY_TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def found() -> dict[str, Capabilities]:
    return {}


@pytest.fixture
def store(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str], found: dict[str, Capabilities]
) -> Iterator[ObjectStore]:
    server, controls = faults
    store = open_store(s3_config(server, new_bucket(controls.server), read_timeout_s=1.0), Node.of_this_machine())
    if "seaweedfs" not in found:
        found["seaweedfs"] = probe(store, random.Random(3), SystemClock())
    store.adapt(found["seaweedfs"])  # type: ignore[attr-defined]  # an S3Store
    store.put("present", BODY, metadata={"mode": "1"})
    controls.clear()
    yield store
    store.close()


@pytest.fixture
def client(store: ObjectStore, found: dict[str, Capabilities]) -> StoreClient:
    return store_client(store, found["seaweedfs"], retry_timeout_s=RETRY_TIMEOUT_S)


async def get(client: StoreClient) -> None:
    assert bytes((await client.get("present", 100, 90_000)).data) == BODY[100:90_000]


async def head(client: StoreClient) -> None:
    assert (await client.head("present")).size == len(BODY)


async def listing(client: StoreClient) -> None:
    assert [meta.key for meta in (await client.list_page("")).objects] == ["present"]


async def put(client: StoreClient) -> None:
    meta = await client.put("new", b"x" * 5000)
    assert (await client.head("new")).etag == meta.etag


async def large_put(client: StoreClient) -> None:
    meta = await client.put("new", b"x" * (3 << 20))
    assert (await client.head("new")).etag == meta.etag


async def delete(client: StoreClient) -> None:
    await client.delete("present")
    with pytest.raises(NotFound):
        await client.head("present")


async def delete_many(client: StoreClient) -> None:
    assert await client.delete_many(["present", "absent"]) == {}


async def copy(client: StoreClient) -> None:
    assert (await client.copy("present", "copy")).size == len(BODY)


async def multipart(client: StoreClient) -> None:
    upload_id = await client.create_multipart("new")
    part = await client.upload_part("new", upload_id, 1, b"p" * 100_000)
    meta = await client.complete_multipart("new", upload_id, [part])
    assert (await client.head("new")).etag == meta.etag
    # A creation whose answer was lost leaves an upload that only a listing finds.
    for upload in await client.list_multipart(""):
        await client.abort_multipart(upload.key, upload.upload_id)


Operation = Callable[[StoreClient], Awaitable[None]]
FAULTS = ("slow_down", "error_500", "reset", "lose_answer")


OPERATIONS: list[Operation] = [get, head, listing, put, large_put, delete, delete_many, copy, multipart]


def fault_and_operation(fault: str, operation: Operation) -> object:
    """A refusal is tried again whatever the operation; a lost answer is not, so `make test` loses one of each."""
    is_long = fault in ("slow_down", "reset") and operation not in (get, put)
    return pytest.param(fault, operation, marks=[pytest.mark.long] if is_long else [])


@pytest.mark.parametrize(
    ("fault", "operation"), [fault_and_operation(fault, operation) for fault in FAULTS for operation in OPERATIONS]
)
async def test_failures_are_tried_again(
    client: StoreClient, faults: tuple[Server, Faults], fault: str, operation: Operation
) -> None:
    _, controls = faults
    getattr(controls, fault)(2)
    await operation(client)
    assert controls.injected[fault] == 2
    assert client.metrics.retries == client.metrics.errors == 2
    assert client.metrics.throttled == (2 if fault == "slow_down" else 0)
    if operation is not copy:  # which asks for the size of what it made
        assert sum(client.metrics.requests.values()) == sum(controls.counts.values())


@pytest.mark.parametrize("operation", [get, listing])
@pytest.mark.parametrize("fault", ["truncate", "stall"])
async def test_bodies_cut_short_or_stalled_are_fetched_again(
    client: StoreClient, faults: tuple[Server, Faults], operation: Operation, fault: str
) -> None:
    _, controls = faults
    getattr(controls, fault)(1, method="GET")
    began = time.monotonic()
    await operation(client)
    took_s = time.monotonic() - began
    assert controls.injected[fault] == 1
    assert client.metrics.retries == 1
    assert took_s < 5
    if fault == "stall":
        assert took_s >= 1


async def test_a_body_cut_short_is_noticed_by_boto3_too(client: StoreClient, faults: tuple[Server, Faults]) -> None:
    await client.put("control\tcharacter", BODY)
    faults[1].clear()
    faults[1].truncate(1)
    assert bytes((await client.get("control\tcharacter", 0, len(BODY))).data) == BODY
    assert client.metrics.retries == 1


async def test_retries_end_in_the_error(store: ObjectStore, client: StoreClient, faults: tuple[Server, Faults]) -> None:
    _, controls = faults
    impatient = store_client(store, client.capabilities, retry_timeout_s=1.0)
    for fault in ("error_500", "slow_down", "reset"):
        controls.clear()
        getattr(controls, fault)(100_000)
        for operation in (get, put):
            began = time.monotonic()
            with pytest.raises(Unavailable) as caught:
                await operation(impatient)
            assert 0.9 < time.monotonic() - began < 3
            assert caught.value.throttled == (fault == "slow_down")
    assert impatient.metrics.retries >= 6
    controls.clear()
    await get(client)


async def test_a_lost_answer_to_complete_is_left_to_the_caller(
    client: StoreClient, faults: tuple[Server, Faults]
) -> None:
    upload_id = await client.create_multipart("new")
    part = await client.upload_part("new", upload_id, 1, BODY)
    faults[1].lose_answer(1, method="POST")
    try:
        await client.complete_multipart("new", upload_id, [part])
    except NotFound:
        pass  # what most stores say: the upload is gone because it was completed
    assert (await client.head("new")).size == len(BODY)
    assert client.metrics.retries == 1


@pytest.mark.parametrize("size", [5000, 3 << 20])
async def test_write_replaced_after_a_lost_answer_is_superseded(
    store: ObjectStore, client: StoreClient, faults: tuple[Server, Faults], size: int
) -> None:
    """The version that replaced it stays, in place of being replaced by a retry."""
    _, controls = faults
    target = DraftTarget("file", dict, replaces=(await client.put("file", b"before")).etag)  # type: ignore[arg-type]
    put = partial(client.put, "file", b"x" * size, metadata={TOKEN_METADATA: "mine"}, version=target)
    controls.lose_answer(1, method="PUT")
    assert (await put()).size == size
    assert client.metrics.requests["put"] == 2
    store.put("file", b"theirs")
    with pytest.raises(Superseded):  # as far as it knows, the first answer is still outstanding
        await put()
    assert (await client.head("file")).size == len(b"theirs")
    assert client.metrics.requests["put"] == 2


@pytest.mark.parametrize(("later_s", "is_superseded"), [(-60, False), (0, False), (1, False), (3, True), (60, True)])
async def test_write_after_which_another_put_the_bytes_before_again_is_superseded(
    later_s: int, is_superseded: bool
) -> None:
    """The ETag at the key is the one that the writer has replaced; only the date tells that it is another version. One
    of nearly the same time may be the version before, and this one is sent."""
    clock = FakeClock()
    store = MemoryStore(Capabilities(name="memory", put_if_match=True))
    store.clock, store.equal_bytes_have_equal_etags = clock.wall_ns, True
    before = store.give("file", b"before")

    def put_again(request: Request, when: When) -> None:
        if (request.what, when) == ("put", "after") and store.count("put") == 1:
            dated_ns = clock.wall_ns() + later_s * NS
            clock.advance(90)
            again = msgspec.structs.replace(store.give("file", b"before"), mtime_ns=dated_ns)
            store.objects["file"] = b"before", again
            raise Unavailable("the answer was lost")

    store.hook = put_again
    target = DraftTarget("file", dict, replaces=before.etag, expected=before.etag)  # type: ignore[arg-type]
    put = store_client(store, store.capabilities, clock=clock).put
    with pytest.raises(Superseded) if is_superseded else nullcontext():
        await put("file", BODY, metadata={TOKEN_METADATA: "mine"}, version=target)
    assert store.data("file") == (b"before" if is_superseded else BODY)


@pytest.mark.parametrize("is_slice", [False, True])
async def test_write_damaged_on_its_way_is_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_slice: bool
) -> None:
    """The store has a version with the size and the token of what was sent, but with other bytes."""
    monkeypatch.setattr(StoreClient, "is_guarded", property(lambda _client: False))
    store = MemoryStore(Capabilities(name="memory", md5_etags=True))
    store.equal_bytes_have_equal_etags = True
    damaged = [BODY[:-1] + b"?"]

    def damage(request: Request, when: When) -> None:
        if (request.what, when) == ("put", "after") and damaged:
            store.give("file", damaged.pop(), {TOKEN_METADATA: "mine"})
            raise Unavailable("the ETag of the answer is another than that of the bytes")

    store.hook = damage
    (tmp_path / "file").write_bytes(BODY)
    with (tmp_path / "file").open("rb") as file:
        body = FileSlice(file.fileno(), 0, len(BODY)) if is_slice else BODY
        target = DraftTarget("file", dict)  # type: ignore[arg-type]
        await store_client(store, store.capabilities).put(
            "file", body, metadata={TOKEN_METADATA: "mine"}, version=target
        )
    assert (store.data("file"), store.count("put")) == (BODY, 2)


async def test_write_after_which_an_upload_that_began_before_it_was_completed_is_superseded() -> None:
    """S3 dates what a multipart upload made by the beginning of the upload."""
    clock = FakeClock()
    store = MemoryStore(Capabilities(name="memory", put_if_match=True))
    store.clock = clock.wall_ns
    began_ns = clock.wall_ns()
    clock.advance(60)

    def complete_another(request: Request, when: When) -> None:
        if (request.what, when) == ("put", "after"):
            clock.advance(5)
            meta = store.give("file", b"of a multipart upload")
            store.objects["file"] = (
                store.data("file"), msgspec.structs.replace(meta, etag=f"{meta.etag}-2", mtime_ns=began_ns)
            )  # fmt: skip
            raise Unavailable("the answer was lost")

    store.hook = complete_another
    target = DraftTarget("file", dict)  # type: ignore[arg-type]
    with pytest.raises(Superseded):
        await store_client(store, store.capabilities, clock=clock).put(
            "file", BODY, metadata={TOKEN_METADATA: "mine"}, version=target
        )
    assert (store.data("file"), store.count("put")) == (b"of a multipart upload", 1)


@pytest.mark.parametrize("size", [5000, 3 << 20])
async def test_write_over_what_its_writer_does_not_expect_is_overtaken(
    store: ObjectStore, client: StoreClient, faults: tuple[Server, Faults], size: int
) -> None:
    """Nothing is replaced. Sent once more after a lost answer, its own first attempt is no surprise."""
    _, controls = faults
    theirs = store.put("file", b"theirs")
    target = DraftTarget("file", dict, expected="")  # type: ignore[arg-type]
    put = partial(client.put, "file", b"x" * size, metadata={TOKEN_METADATA: "mine"}, version=target)
    for etag in ("", "0" * 32):
        target.expected = etag
        with pytest.raises(Overtaken):
            await put()
        assert target.unsure is None
        assert (await client.head("file")).etag == theirs.etag
    target.expected = theirs.etag
    assert (await put()).size == size
    store.delete("file")
    with pytest.raises(Overtaken):  # what it expects is gone
        target.unsure = None
        await put()
    target.expected = ""
    controls.lose_answer(1, method="PUT")
    assert (await put()).size == size


async def test_completion_of_an_upload_that_is_gone_is_not_overtaken(store: ObjectStore, client: StoreClient) -> None:
    """What it expects at the key is there: the upload begins anew."""
    target = DraftTarget("file", dict, expected=store.put("file", b"before").etag)  # type: ignore[arg-type]
    upload_id = await client.create_multipart("file")
    part = await client.upload_part("file", upload_id, 1, b"x")
    await client.abort_multipart("file", upload_id)
    with pytest.raises(NotFound):
        await client.complete_multipart("file", upload_id, [part], version=target, token="mine")


async def test_write_whose_connection_was_refused_is_sent_without_a_question() -> None:
    """Nothing can have arrived."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    config = StoreConfig(source=Source.parse("s3://b"), endpoint_url=f"http://127.0.0.1:{port}", region="us-east-1")
    store = S3Store(connect(config, SystemClock()), SystemClock())
    store.adapt(Capabilities(name="s3"))
    client = store_client(store, store.capabilities, retry_timeout_s=0)
    for size in (100, 3 << 20):
        target = DraftTarget("file", dict)  # type: ignore[arg-type]
        with pytest.raises(NotCarriedOut):
            await client.put("file", b"x" * size, version=target)
        assert target.unsure is None
    store.close()


async def test_counters_count_attempts_and_bytes(client: StoreClient, faults: tuple[Server, Faults]) -> None:
    await client.get("present", 0, 1000)
    await client.get("present", 0, 10)
    await client.put("a", b"12345")
    await client.head("a")
    await client.time_ns()
    await client.delete("a")
    pages = [page async for page in client.list_all("")]
    with pytest.raises(NotFound):
        await client.get("absent", 0, 1)
    metrics = client.metrics
    assert len(pages) == 1
    assert metrics.requests == {
        "get": 3, "put": 1, "part": 0, "list": 1, "head": 2, "copy": 0, "delete": 1, "other": 0,
    }  # fmt: skip
    assert (metrics.bytes_read, metrics.bytes_written) == (1010, 5)
    assert (metrics.errors, metrics.retries) == (0, 0)
    assert 0 < metrics.latency_s_max["get"] <= metrics.latency_s_sum["get"] < 3
    assert faults[1].counts == {"GET": 4, "PUT": 1, "HEAD": 2, "DELETE": 1}


async def test_delete_many_if_match_leaves_other_versions(client: StoreClient) -> None:
    keys = [f"versions/{number}" for number in range(40)]
    versions = [(key, (await client.put(key, b"bytes")).etag) for key in keys]
    await client.put(keys[7], b"written since")
    assert await client.delete_many_if_match([*versions, ("versions/absent", "0" * 32)]) == {}
    pages = [page async for page in client.list_all("versions/")]
    assert [meta.key for page in pages for meta in page.objects] == [keys[7]]


async def test_delete_many_goes_in_thousands(
    faults: tuple[Server, Faults], new_bucket: Callable[[Server], str], client: StoreClient
) -> None:
    """A server needs a second for a thousand keys when the machine is busy, as long as others here wait for."""
    server, controls = faults
    store = open_store(s3_config(server, new_bucket(controls.server), read_timeout_s=60.0), Node.of_this_machine())
    client = store_client(store, client.capabilities, retry_timeout_s=RETRY_TIMEOUT_S)
    controls.clear()
    assert await client.delete_many([f"absent/{number}" for number in range(2001)]) == {}
    sent, repeated = client.metrics.requests["delete"], client.metrics.retries
    assert sent == faults[1].counts["POST"]
    assert sent - repeated == 3, "a store that is busy may have had one of them twice"
    store.close()


# -- bounds and cancellation -------------------------------------------------------------------------------------


class Waiting:
    """A store whose calls wait to be let go, and that remembers how many waited at once."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.lock = threading.Lock()
        self.running = {"get": 0, "put": 0}
        self.most = {"get": 0, "put": 0}
        self.done = {"get": 0, "put": 0}

    def _wait(self, kind: str) -> ObjectMeta:
        with self.lock:
            self.running[kind] += 1
            self.most[kind] = max(self.most[kind], self.running[kind])
        assert self.go.wait(10)
        with self.lock:
            self.running[kind] -= 1
            self.done[kind] += 1
        return ObjectMeta("a", 1, "e", 0)

    def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        return Fetched(b"x", self._wait("get"))

    def put(
        self, key: str, body: bytes, *, metadata: None = None, if_absent: bool = False, etag: None = None
    ) -> ObjectMeta:
        return self._wait("put")


@pytest.fixture
def waiting() -> Iterator[tuple[Waiting, StoreClient]]:
    store = Waiting()
    client = store_client(cast(ObjectStore, store), Capabilities(name="waiting"), requests_max=3, uploads_max=2)
    yield store, client
    store.go.set()


async def test_uploads_do_not_wait_behind_reads_and_both_are_bounded(waiting: tuple[Waiting, StoreClient]) -> None:
    store, client = waiting
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            for _ in range(10):
                nursery.start_soon(client.get, "a", 0, 1)
            for _ in range(5):
                nursery.start_soon(client.put, "a", b"x")
            while store.running != {"get": 3, "put": 2}:
                await trio.sleep(0.01)
            await trio.sleep(0.05)
            store.go.set()
    assert store.most == {"get": 3, "put": 2}
    assert store.done == {"get": 10, "put": 5}
    assert (client.metrics.requests["get"], client.metrics.requests["put"]) == (10, 5)


async def test_a_cancelled_read_returns_at_once_and_keeps_its_place(waiting: tuple[Waiting, StoreClient]) -> None:
    store, client = waiting
    with trio.fail_after(10):
        for count in range(1, 4):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(client.get, "a", 0, 1)
                while store.running["get"] < count:
                    await trio.sleep(0.01)
                nursery.cancel_scope.cancel()
        with trio.move_on_after(0.05) as scope:
            await client.get("a", 0, 1)
        assert scope.cancelled_caught
        assert store.most["get"] == 3
        assert client.metrics.requests["get"] == 3, "the fourth never left"
        store.go.set()
        await client.get("a", 0, 1)


async def test_a_cancelled_write_returns_when_it_has_ended(waiting: tuple[Waiting, StoreClient]) -> None:
    store, client = waiting
    with trio.fail_after(10):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.put, "a", b"x")
            while not store.running["put"]:
                await trio.sleep(0.01)
            nursery.cancel_scope.cancel()
            timer = threading.Timer(0.2, store.go.set)
            timer.start()
    assert store.done["put"] == 1
    timer.join()


async def test_only_unavailable_is_tried_again() -> None:
    class Failing:
        calls = 0

        def head(self, key: str) -> ObjectMeta:
            self.calls += 1
            raise error

    for error in (PreconditionFailed("a"), NotFound("a"), LakeError("a")):
        store = Failing()
        client = store_client(cast(ObjectStore, store), Capabilities(name="failing"))
        with pytest.raises(type(error)):
            await client.head("a")
        assert store.calls == client.metrics.requests["head"] == 1
        assert client.metrics.errors == (type(error) is LakeError)


async def test_when_a_store_is_away() -> None:
    """Where every answer has been a failure for a while, or one does not come; any real answer ends it."""
    clock = FakeClock()
    answers = threading.Event()

    class Moody:
        error: Exception | None = None

        def head(self, key: str) -> ObjectMeta:
            if self.error is not None:
                raise self.error
            return ObjectMeta(key, 1, "e", 0)

        def time_ns(self) -> int:
            assert answers.wait(10)
            return 1

    store = Moody()
    client = store_client(cast(ObjectStore, store), Capabilities(name="moody"), retry_timeout_s=0.0, clock=clock)

    def away() -> bool:
        return client.is_away

    store.error = Unavailable("away")
    for second in range(int(AWAY_S_MIN) + 1):
        clock.advance(float(second > 0))
        with pytest.raises(Unavailable):
            await client.head("a")
        assert away() == (second >= AWAY_S_MIN)
    store.error = NotFound("a")
    with pytest.raises(NotFound):
        await client.head("a")
    assert not away()
    store.error = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(client.time_ns)
        await trio.testing.wait_all_tasks_blocked()
        clock.advance(SILENT_S_MIN - 1)
        assert not away()
        clock.advance(1)
        assert away()
        await client.head("a")
        assert not away()
        clock.advance(SILENT_S_MIN)
        assert away()
        answers.set()
    assert not away()


class Lossy:
    """A `Transport` that calls at once, and loses the answers that it is told to."""

    def __init__(self) -> None:
        self.lost: set[int] = set()
        self.carried: list[str] = []

    async def run(self, kind: str, call: Callable[[], T], *, abandon: bool) -> T:
        await trio.lowlevel.checkpoint()
        answer = call()
        self.carried.append(kind)
        if len(self.carried) - 1 in self.lost:
            raise Unavailable("the answer was lost")
        return answer


async def test_client_of_a_transport_that_loses_answers_asks_again() -> None:
    """The store has carried the request out; nothing but the transport runs requests."""
    store, transport = MemoryStore(), Lossy()
    transport.lost = {0, 2}
    client = store_client(store, store.capabilities, transport=transport)
    with trio.fail_after(10):
        await client.put("a", b"bytes")
        assert (transport.carried, [request.what for request in store.requests]) == (["put", "put"], ["put", "put"])
        with pytest.raises(PreconditionFailed):
            await client.put("b", b"bytes", if_absent=True)
    assert store.data("b") == b"bytes"
    assert (client.metrics.retries, client.metrics.errors) == (2, 2)
