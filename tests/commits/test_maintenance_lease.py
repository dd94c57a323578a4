"""The maintenance lease: one holder, whatever the store can do, and no change without it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import trio

from lakefs_fuse.commits.maintenance_lease import (
    KEY,
    RENEW_S,
    USABLE_S,
    VALID_S,
    VALID_S_MAX,
    LeaseRecord,
    MaintenanceLease,
    find_holder,
)
from lakefs_fuse.errors import EXIT_BUSY, LeaseHeld, NotCarriedOut, StoreError, Unavailable
from lakefs_fuse.store.client import StoreClient, Transport
from lakefs_fuse.store.protocol import Body, Capabilities, ObjectMeta, ObjectStore
from tests.fakes import FakeClock, local_store, store_client
from tests.memory_store import Failures, MemoryStore

T = TypeVar("T")
Sleep = Callable[[float], Awaitable[None]]
CONDITIONS = ("put_if_absent", "put_if_match", "delete_if_match")
ABLE = {
    "all conditions": CONDITIONS,
    "no condition on DELETE": CONDITIONS[:2],
    "If-None-Match alone": CONDITIONS[:1],
    "no conditions": (),
}
KINDS = [*ABLE, "local"]


class UnconditionalStore(MemoryStore):
    """Ignores the conditions on PUT that it does not have."""

    def put(
        self, key: str, body: Body, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False,
        etag: str | None = None,
    ) -> ObjectMeta:  # fmt: skip
        able = self.capabilities
        return super().put(
            key, body, metadata=metadata, if_absent=if_absent and able.put_if_absent,
            etag=etag if able.put_if_match else None,
        )  # fmt: skip


class Lake:
    """A store of some kind, and the leases that processes take on it."""

    def __init__(self, store: ObjectStore, capabilities: Capabilities, clock: FakeClock) -> None:
        self.store, self.capabilities, self.clock = store, capabilities, clock

    def client(self, *, retry_timeout_s: float = 0) -> StoreClient:
        return store_client(self.store, self.capabilities, retry_timeout_s=retry_timeout_s)

    def lease(
        self,
        command: str,
        *,
        client: StoreClient | None = None,
        sleep: Callable[[float], Awaitable[None]] | None = None,
    ) -> MaintenanceLease:
        rng = random.Random(command)
        return MaintenanceLease(
            client or self.client(), self.clock, rng, command=command, host=f"node-of-{command}", process=7,
            sleep=sleep or self.pass_time,
        )  # fmt: skip

    async def pass_time(self, seconds: float) -> None:
        if seconds == RENEW_S:  # of a heartbeat, which a test wants to see or not
            await trio.sleep_forever()
        self.clock.advance(seconds)


def lake_of(kind: str, tmp_path: Path) -> Lake:
    clock = FakeClock()
    if kind == "local":
        return Lake(local_store(str(tmp_path), clock), Capabilities(name="local"), clock)
    if_absent, put_if_match, delete_if_match = (name in ABLE[kind] for name in CONDITIONS)
    store = UnconditionalStore(
        Capabilities(name="memory", put_if_absent=if_absent, put_if_match=put_if_match, delete_if_match=delete_if_match)
    )
    store.clock = clock.wall_ns
    return Lake(store, store.capabilities, clock)


@pytest.fixture(params=KINDS)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return lake_of(request.param, tmp_path)


@pytest.fixture
def store() -> MemoryStore:
    return UnconditionalStore(Capabilities(name="memory", put_if_match=True, delete_if_match=True))


@pytest.fixture
def able(store: MemoryStore) -> Lake:
    """A lake in a store that has every condition."""
    clock = FakeClock()
    store.clock = clock.wall_ns
    return Lake(store, store.capabilities, clock)


# -- one holder


async def test_lease_that_is_held_is_refused_with_its_holder(lake: Lake) -> None:
    await lake.lease("gc").acquire()
    lake.clock.advance(3)
    with pytest.raises(LeaseHeld) as refused:
        await lake.lease("pack").acquire()
    text = str(refused.value)
    assert "gc (host node-of-gc, process 7, since 2023-11-14 22:13:20 UTC)" in text
    assert "until 2023-11-14 22:14:5" in text  # 90 s later; 5 s more where the store was asked again
    assert refused.value.exit_code == EXIT_BUSY


async def test_lease_that_was_released_is_free(lake: Lake) -> None:
    for command in ("gc", "pack", "gc"):
        lease = lake.lease(command)
        await lease.acquire()
        assert lease.is_held
        await lease.release()
        assert not lease.is_held


async def test_lease_of_a_killed_holder_ends_by_itself(lake: Lake) -> None:
    killed, other = lake.lease("gc"), lake.lease("pack")
    await killed.acquire()
    lake.clock.advance(VALID_S - 7)
    with pytest.raises(LeaseHeld):
        await other.acquire()
    lake.clock.advance(8)
    await other.acquire()
    with pytest.raises(LeaseHeld, match=r"pack .* took over"):
        await killed.renew()
    await killed.release()
    assert other.is_held
    await other.renew()


async def test_lease_that_is_renewed_does_not_end(lake: Lake) -> None:
    lease = lake.lease("gc")
    await lease.acquire()
    for _ in range(10):
        lake.clock.advance(RENEW_S)
        await lease.renew()
        assert lease.is_held
    with pytest.raises(LeaseHeld):
        await lake.lease("pack").acquire()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_left", [False, True])
async def test_of_many_that_take_it_at_once_one_has_it(kind: str, is_left: bool, tmp_path: Path) -> None:
    """Also where the lease of a killed holder is there."""
    lake = lake_of(kind, tmp_path)
    if is_left:
        await lake.lease("killed").acquire()
        lake.clock.advance(VALID_S + 1)
    got: list[str] = []

    async def sleep(_: float) -> None:
        await trio.sleep(0.3)

    async def take(command: str) -> None:
        try:
            await lake.lease(command, sleep=sleep).acquire()
        except LeaseHeld:
            return
        got.append(command)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(take, f"command-{number}")
    assert len(got) == 1 if lake.capabilities.put_if_match else len(got) <= 1


async def test_record_names_the_holder_and_each_renewal(able: Lake, store: MemoryStore) -> None:
    lease = able.lease("gc")
    await lease.acquire()
    first = msgspec.msgpack.decode(store.data(KEY), type=LeaseRecord)
    assert (first.command, first.host, first.process, first.valid_s, len(first.id)) == ("gc", "node-of-gc", 7, 90, 32)
    assert first.taken_ns == able.clock.wall_ns()
    await lease.renew()
    assert msgspec.msgpack.decode(store.data(KEY), type=LeaseRecord) == msgspec.structs.replace(first, renewal=1)


async def test_acquire_and_release_cost_one_request_each(able: Lake, store: MemoryStore) -> None:
    lease = able.lease("gc")
    await lease.acquire()
    await lease.release()
    assert [request.what for request in store.requests] == ["put", "delete"]
    assert KEY not in store.objects


async def test_lease_is_not_released_by_a_delete_without_condition(tmp_path: Path) -> None:
    lake = lake_of("no condition on DELETE", tmp_path)
    assert isinstance(lake.store, MemoryStore)
    lease = lake.lease("gc")
    await lease.acquire()
    await lease.release()
    assert lake.store.count("delete") == 0
    assert msgspec.msgpack.decode(lake.store.data(KEY), type=LeaseRecord).valid_s == 0


@pytest.mark.parametrize("valid_s", [-1, VALID_S_MAX + 1, None])
async def test_record_that_makes_no_sense_ends_as_any_other(
    able: Lake, store: MemoryStore, valid_s: int | None
) -> None:
    record = LeaseRecord(id="?", command="x", host="x", process=1, taken_ns=0, valid_s=valid_s or 0)
    store.give(KEY, b"\xc1" if valid_s is None else msgspec.msgpack.encode(record))
    with pytest.raises(LeaseHeld, match="a command"):
        await able.lease("gc").acquire()
    able.clock.advance(VALID_S + 1)
    await able.lease("gc").acquire()


async def test_lease_dated_in_the_future_does_not_outlive_a_clock_that_was_set(able: Lake, store: MemoryStore) -> None:
    await able.lease("gc").acquire()
    able.clock.set_wall(able.clock.wall_ns() - 3600 * 10**9)
    await able.lease("pack").acquire()


# -- answers that are lost


@pytest.mark.parametrize("step", ["acquire", "renew"])
async def test_request_whose_answer_was_lost_is_recognised(able: Lake, store: MemoryStore, step: str) -> None:
    lease = able.lease("gc", client=able.client(retry_timeout_s=5))
    if step == "renew":
        await lease.acquire()
    store.hook = Failures(lambda request: request.what == "put", Unavailable("lost"), when="after")
    await (lease.acquire() if step == "acquire" else lease.renew())
    assert lease.is_held
    await lease.release()
    assert KEY not in store.objects


async def test_renewal_that_was_given_up_and_arrived_is_recognised(able: Lake, store: MemoryStore) -> None:
    lease = able.lease("gc")
    await lease.acquire()
    store.hook = Failures(lambda request: request.what == "put", Unavailable("lost"), when="after")
    with pytest.raises(Unavailable):
        await lease.renew()
    await lease.renew()
    assert lease.is_held


# -- no change without the lease


async def test_stopped_holder_changes_nothing_after_another_has_taken_over(lake: Lake) -> None:
    lake.store.put("data", b"bytes")
    with pytest.raises(LeaseHeld, match=r"pack .* took over"):
        async with lake.lease("gc").held() as client:
            lake.clock.advance(VALID_S + 30)
            await lake.lease("pack").acquire()
            assert (await client.head("data")).size == 5
            await client.delete("data")
    assert lake.store.head("data").size == 5
    with pytest.raises(LeaseHeld, match=r"^pack"):  # whose lease the end of the first one has left alone
        await lake.lease("unpack").acquire()


@pytest.mark.parametrize("change", ["put", "delete", "delete_many", "copy", "create_multipart"])
async def test_every_request_that_changes_the_store_is_refused_without_the_lease(
    able: Lake, store: MemoryStore, change: str
) -> None:
    store.give("data", b"bytes")
    calls: dict[str, Callable[[StoreClient], Awaitable[object]]] = {
        "put": lambda client: client.put("data", b"other"),
        "delete": lambda client: client.delete("data"),
        "delete_many": lambda client: client.delete_many(["data"]),
        "copy": lambda client: client.copy("data", "copied"),
        "create_multipart": lambda client: client.create_multipart("data"),
    }
    with pytest.raises(LeaseHeld):
        async with able.lease("gc").held() as client:
            able.clock.advance(USABLE_S)
            store.give(KEY, b"another's")
            await calls[change](client)
    assert {request.key for request in store.requests} == {KEY}


async def test_stopped_holder_goes_on_where_nobody_has_taken_over(lake: Lake) -> None:
    lake.store.put("data", b"bytes")
    async with lake.lease("gc").held() as client:
        lake.clock.advance(10 * VALID_S)
        await client.delete("data")
        with pytest.raises(LeaseHeld):
            await lake.lease("pack").acquire()


async def test_late_renewal_without_conditions_is_confirmed(tmp_path: Path) -> None:
    """Another process that found the lease ended may put its own right after the renewal."""
    lake = lake_of("no conditions", tmp_path)
    assert isinstance(lake.store, MemoryStore)
    store, late = lake.store, False

    async def sleep(seconds: float) -> None:
        if late:
            store.give(KEY, b"another's")

    lease = lake.lease("gc", sleep=sleep)
    await lease.acquire()
    lake.clock.advance(VALID_S)
    late = True
    with pytest.raises(LeaseHeld):
        await lease.confirm()


async def test_lease_that_was_cancelled_while_it_was_confirmed_is_released() -> None:
    able = Capabilities(name="memory", put_if_absent=False, delete_if_match=True)
    store, clock = UnconditionalStore(able), FakeClock()
    store.clock = clock.wall_ns
    lake = Lake(store, able, clock)

    async def sleep(seconds: float) -> None:
        await trio.sleep_forever()

    holder = lake.lease("gc", sleep=sleep)
    with trio.move_on_after(0.05):
        async with holder.held():
            pass
    assert await find_holder(lake.client(), lake.clock) == ""


@pytest.mark.parametrize("clock", ["boot", "wall"])
async def test_time_in_which_one_clock_stood_still_counts(able: Lake, clock: str) -> None:
    """A machine that was suspended, or a virtual one that was stopped."""
    lease = able.lease("gc")
    await lease.acquire()
    wall_ns = able.clock.wall_ns()
    if clock == "boot":
        able.clock.advance(USABLE_S)
        able.clock.set_wall(wall_ns)
    else:
        able.clock.set_wall(wall_ns + USABLE_S * 10**9)
    assert not lease.is_held
    await lease.confirm()
    assert lease.is_held


class LateTransport:
    """Requests that delete wait long for a thread."""

    def __init__(self, transport: Transport, clock: FakeClock) -> None:
        self._transport, self._clock = transport, clock

    async def run(self, kind: str, call: Callable[[], T], *, abandon: bool) -> T:
        if kind == "delete":
            self._clock.advance(USABLE_S)
        return await self._transport.run(kind, call, abandon=abandon)


async def test_request_that_waited_for_long_is_not_sent(able: Lake, store: MemoryStore) -> None:
    store.give("data", b"bytes")
    client = able.client().through(lambda transport: LateTransport(transport, able.clock))
    with pytest.raises(NotCarriedOut):
        async with able.lease("gc", client=client).held() as leased:
            await leased.delete("data")
    assert "data" in store.objects


# -- while it is held, and at the end


@pytest.mark.parametrize("ending", ["end", "error", "cancelled"])
async def test_lease_is_released_however_the_command_ends(able: Lake, store: MemoryStore, ending: str) -> None:
    with trio.CancelScope() as scope:
        try:
            async with able.lease("gc").held():
                assert KEY in store.objects
                if ending == "error":
                    raise StoreError("failed")
                if ending == "cancelled":
                    scope.cancel()
                    await trio.sleep_forever()
        except StoreError as error:
            assert str(error) == "failed"  # itself, not a group
    assert KEY not in store.objects


async def test_release_that_fails_leaves_a_lease_that_ends(able: Lake, store: MemoryStore) -> None:
    async with able.lease("gc").held():
        store.hook = Failures(lambda request: request.key == KEY, StoreError("away"), count=10**9)
    store.hook = lambda _request, _when: None
    able.clock.advance(VALID_S + 1)
    await able.lease("pack").acquire()


class Heartbeat:
    """Sleeps of a holder, which a test ends. After a beat the holder has renewed its lease, and sleeps again."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self._send, self._receive = trio.open_memory_channel[None](0)

    async def sleep(self, seconds: float) -> None:
        await self._receive.receive()
        self._clock.advance(seconds)

    async def beat(self) -> None:
        with trio.fail_after(5):
            await self._send.send(None)
            while not self._send.statistics().tasks_waiting_receive:
                await trio.sleep(0.001)


async def test_lease_is_renewed_while_it_is_held(able: Lake, store: MemoryStore) -> None:
    heartbeat = Heartbeat(able.clock)
    async with able.lease("gc", sleep=heartbeat.sleep).held():
        for beats in range(1, 8):
            await heartbeat.beat()
            assert msgspec.msgpack.decode(store.data(KEY), type=LeaseRecord).renewal == beats
        store.hook = Failures(lambda request: request.what == "put", Unavailable("away"))
        await heartbeat.beat()
        await heartbeat.beat()
        assert store.count("put") == 10
        with pytest.raises(LeaseHeld):
            await able.lease("pack").acquire()


async def test_command_that_only_reads_ends_when_its_lease_is_taken_over(able: Lake, store: MemoryStore) -> None:
    heartbeat = Heartbeat(able.clock)
    with trio.fail_after(5), pytest.raises(LeaseHeld, match=r"a command .* took over"):
        async with able.lease("gc", sleep=heartbeat.sleep).held():
            store.give(KEY, b"another's")
            await heartbeat.beat()
            await trio.sleep_forever()
    assert store.data(KEY) == b"another's"
