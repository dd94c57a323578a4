"""Maintenance by a mount, with a worker that a test owns: when it looks, what it asks for, and what it says."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.admin.fold_database import FoldDatabase
from lakefs_fuse.admin.maintenance import (
    DAYS_MAX,
    KEY,
    PATIENCE,
    UNREADABLE,
    CollectionRecord,
    Inspector,
    write_collection,
)
from lakefs_fuse.commits.index.index import IndexFile, Manifest, prefix_of
from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.daemon.maintenance import INTERVAL_SHARE_MIN, Maintenance
from lakefs_fuse.errors import EXIT_BUSY, EXIT_INTERRUPTED, AccessDenied, CacheError, LakeError, Unavailable
from lakefs_fuse.store.protocol import Capabilities
from tests.admin.lakes import give_commit, work_of
from tests.fakes import InlineThreads, store_client
from tests.memory_store import Failures, MemoryStore
from tests.vfs.lakes import NS, Clock

HOUR_S, DAY_S = 3600.0, 86400.0
COMMITS_MAX = 20
DONE = protocol.Finished(summary={}, text="done")
Answer = protocol.Finished | protocol.Failed


class FakeWorker:
    """Answers what it is told to, or raises it, and does what a test does in its place."""

    def __init__(self) -> None:
        self.step = ""
        self.asked: list[tuple[protocol.MaintenanceArgs, int]] = []
        self.answer: Answer | LakeError = DONE
        self.act: Callable[[], None] = lambda: None

    async def run(self, command: str, args: msgspec.Struct, *, room_bytes: int) -> Answer:
        assert command == "maintenance"
        assert isinstance(args, protocol.MaintenanceArgs)
        self.asked.append((args, room_bytes))
        self.act()
        if isinstance(self.answer, LakeError):
            raise self.answer
        return self.answer

    async def clear(self) -> None:
        self.step = ""


class Node:
    """A mount's maintenance of a lake in memory."""

    def __init__(
        self, store: MemoryStore, clock: Clock, seed: int = 1, directory: Path = Path("/nowhere/folded")
    ) -> None:
        client = store_client(store, store.capabilities, retry_timeout_s=0)
        self.worker = FakeWorker()
        self.slept: list[float] = []
        inspector = Inspector(
            client, clock, interval_s=HOUR_S, commits_max=COMMITS_MAX, database=FoldDatabase(directory)
        )
        self.database = FoldDatabase(directory)
        self.commits = self.commits_each_sleep = 0
        self.maintenance = Maintenance(
            inspector,
            self.worker,
            random.Random(seed),
            self.database,
            lambda: self.commits,
            InlineThreads(),
            sleep=self._sleep,
        )

    async def _sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.commits += self.commits_each_sleep
        if len(self.slept) > 2000:
            raise trio.TooSlowError

    async def wait_s(self) -> float:
        """How long it waits for its next look."""
        self.slept.clear()
        await self.maintenance.wait()
        return sum(self.slept)

    async def look(self) -> dict[str, object]:
        await self.maintenance.look()
        return self.maintenance.statistics()


@pytest.fixture
def clock() -> Clock:
    """For tests that count whole hours."""
    return Clock(tick_ns=0)


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    """A lake that is due for a fold."""
    made = MemoryStore(Capabilities(name="memory", put_if_match=True, delete_if_match=True))
    made.clock = clock
    give_many(made, clock)
    return made


@pytest.fixture
def node(store: MemoryStore, clock: Clock) -> Node:
    return Node(store, clock)


def give_many(store: MemoryStore, clock: Clock) -> None:
    for _ in range(COMMITS_MAX + 1):
        clock.advance(0.001)
        give_commit(store, clock)


def give_index(store: MemoryStore, clock: Clock, size: int = 0) -> None:
    """As a worker writes it; its one file has so many bytes."""
    time = clock()
    files = [IndexFile("0000.sst", size, "0" * 32, 1, b"D1", b"D1")] if size else []
    manifest = Manifest(
        time=time, newest=time, horizon=0, inode=2, object=0, names=0, directories=0, files=files
    )  # fmt: skip
    store.give(prefix_of(time) + "manifest", msgspec.msgpack.encode(manifest))


async def test_times_between_looks_are_an_hour_on_average_and_spread(node: Node) -> None:
    waits = [await node.wait_s() for _ in range(2000)]
    mean_s = sum(waits) / len(waits)
    assert 0.9 * HOUR_S < mean_s < 1.1 * HOUR_S
    assert min(waits) >= HOUR_S * INTERVAL_SHARE_MIN
    assert sum(each < mean_s / 2 for each in waits) > 0.3 * len(waits)


async def test_many_mounts_that_start_together_do_not_look_together(store: MemoryStore, clock: Clock) -> None:
    first = [await Node(store, clock, seed).wait_s() for seed in range(1000)]
    per_minute = [sum(60 * minute <= each < 60 * minute + 60 for each in first) for minute in range(60)]
    assert max(per_minute) < 40
    assert min(per_minute[1:45]) > 0


async def test_mount_that_folded_looks_when_enough_commits_were_seen(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "folded").mkdir()
    waits = []
    for seed in range(100):
        node = Node(store, clock, seed, tmp_path / "folded")
        node.commits_each_sleep = 1
        waits.append(await node.wait_s())
    assert max(waits) == pytest.approx((COMMITS_MAX + 1) * HOUR_S * INTERVAL_SHARE_MIN)


async def test_mount_whose_lake_cannot_be_folded_looks_once_an_hour(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "folded").mkdir()
    node = Node(store, clock, directory=tmp_path / "folded")
    node.worker.answer = protocol.Failed(message="no room")
    assert (await node.look())["due"]
    assert len(node.worker.asked) == 1
    waits = [await node.wait_s() for _ in range(200)]
    assert sum(waits) / len(waits) > HOUR_S / 2


async def test_other_mounts_look_within_minutes_of_enough_commits_but_not_together(
    store: MemoryStore, clock: Clock
) -> None:
    first = []
    for seed in range(1000):
        node = Node(store, clock, seed)
        node.commits_each_sleep = COMMITS_MAX + 1
        first.append(await node.wait_s())
    per_minute = [sum(60 * minute <= each < 60 * minute + 60 for each in first) for minute in range(60)]
    assert max(per_minute) < 120
    assert sum(first) / len(first) < 20 * 60


async def test_lake_that_is_due_is_maintained_once(node: Node, store: MemoryStore, clock: Clock) -> None:
    node.worker.act = lambda: give_index(store, clock)
    found = await node.look()
    ((args, room_bytes),) = node.worker.asked
    assert args == protocol.MaintenanceArgs(
        interval_s=HOUR_S, commits_max=COMMITS_MAX, may_delete=False, fold_database="/nowhere/folded"
    )
    assert room_bytes >= 64 << 20
    assert (found["runs"], found["backlog"], found["due"], found["last_error"]) == (1, 0, "a collection", "")
    assert found["last_fold_s"] == clock() / NS
    await write_collection(store_client(store, store.capabilities), CollectionRecord(time=clock(), newest=clock()))
    await node.look()
    assert node.maintenance.statistics()["last_collection_s"] == clock() / NS
    store.requests.clear()
    clock.advance(HOUR_S)
    found = await node.look()
    assert (len(node.worker.asked), found["due"]) == (1, "")
    assert [(request.what, request.key) for request in store.requests] == [("list", COMMITS)]


async def test_lease_of_another_is_shown_and_nothing_is_started(
    node: Node, store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    async with work_of(store, clock, tmp_path).lease("gc").held():
        found = await node.look()
        assert str(found["holder"]).startswith("gc (host here, process 7")
        assert node.worker.asked == []
    assert (await node.look())["holder"] == ""
    assert len(node.worker.asked) == 1


@pytest.mark.parametrize("code", [EXIT_BUSY, EXIT_INTERRUPTED])
async def test_worker_that_gave_way_is_started_again_at_the_next_look(node: Node, code: int) -> None:
    node.worker.answer = protocol.Failed(message="gc is changing this lake", exit_code=code)
    for count in (1, 2, 3):
        assert (await node.look())["last_error"] == ""
        assert len(node.worker.asked) == count


@pytest.mark.parametrize(
    "answer",
    [
        protocol.Failed(message="no room"),
        CacheError("no room"),
        protocol.Finished(summary={}, text="no room", exit_code=1),
    ],
)
async def test_worker_that_failed_is_put_off_longer_each_time(
    node: Node, clock: Clock, answer: Answer | LakeError, caplog: pytest.LogCaptureFixture
) -> None:
    """An hour, two, four, and so on, a day at most; the error is in the log once."""
    node.worker.answer = answer
    began_ns, at_hours = clock(), list[int]()
    for hour in range(24 * 5):
        asked = len(node.worker.asked)
        assert (await node.look())["last_error"] == "no room"
        if len(node.worker.asked) > asked:
            at_hours.append(hour)
        clock.advance(HOUR_S)
    assert at_hours[:5] == [0, 1, 3, 7, 15]
    assert [later - earlier for earlier, later in pairwise(at_hours[5:])] == [24] * 3
    assert clock() - began_ns == 5 * DAY_S * NS
    assert caplog.text.count("maintenance: no room") == 1
    node.worker.answer = DONE
    clock.advance(DAY_S)
    assert (await node.look())["last_error"] == ""


async def test_refusal_of_another_mount_is_shown_and_waited_for(node: Node, store: MemoryStore, clock: Clock) -> None:
    client = store_client(store, store.capabilities, retry_timeout_s=0)
    other = Inspector(client, clock, interval_s=HOUR_S, commits_max=COMMITS_MAX)
    for _ in range(26):
        await other.record_refusal(60)
        found = await node.look()
        clock.advance(HOUR_S - 1)
    assert (node.worker.asked, found["last_collection_s"], found["last_error"]) == ([], None, "")
    assert (found["due"], found["overdue_because"]) == ("a fold and a collection", UNREADABLE)
    clock.advance(2)
    await node.look()
    assert len(node.worker.asked) == 1


async def test_store_that_is_away_is_logged_once(
    node: Node, store: MemoryStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store.hook = Failures(lambda _: True, Unavailable("the store is away"), count=10**6)
    for _ in range(5):
        assert (await node.look())["last_error"] == "the store is away"
    assert caplog.text.count("the store is away") == 1
    assert node.worker.asked == []
    store.hook = lambda _request, _when: None
    node.worker.act = lambda: give_index(store, clock)
    await write_collection(store_client(store, store.capabilities), CollectionRecord(time=clock(), newest=clock()))
    assert (await node.look())["last_error"] == ""
    store.hook = Failures(lambda _: True, Unavailable("the store is away"))
    assert (await node.look())["last_error"] == "the store is away"
    assert (await node.look())["last_error"] == "", "nothing is due, and it answers again"


async def test_mount_that_may_not_delete_asks_once_a_day_and_folds(
    node: Node, store: MemoryStore, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    store.hook = Failures(lambda request: request.what == "delete", AccessDenied("no"), count=10**6)
    node.worker.act = lambda: give_index(store, clock)
    clock.advance(DAY_S + 1)
    for _ in range(24):
        found = await node.look()
        clock.advance(HOUR_S - 10)
    assert [args.may_delete for args, _ in node.worker.asked] == [False], "one fold"
    assert store.count("delete") == 1
    assert (found["due"], found["last_error"]) == ("a collection", "")
    clock.advance(HOUR_S)
    found = await node.look()
    assert store.count("delete") == 2
    assert (found["overdue"], found["overdue_because"]) == (True, "these credentials may not delete")
    assert "due for a collection for 2" in caplog.text
    await write_collection(store_client(store, store.capabilities), CollectionRecord(time=clock(), newest=clock()))
    found = await node.look()
    assert (found["due"], found["overdue"]) == ("", False)
    assert KEY in store.objects


async def test_delay_of_a_day_is_warned_of_once_a_day(
    node: Node, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    node.worker.answer = protocol.Failed(message="no room")
    for _ in range(24 * 3 + 2):
        await node.look()
        clock.advance(HOUR_S)
    warned = [record.getMessage() for record in caplog.records if "has been due for" in record.getMessage()]
    assert len(warned) == 2
    assert warned[0] == "maintenance: the lake has been due for a fold and a collection for 25 hours (no room)"


async def test_database_that_the_disk_has_no_room_for_is_removed(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    """Where it has the newest index, less room is asked for; of any other, the whole index may have to be loaded."""
    node = Node(store, clock, directory=tmp_path / "folded")
    give_index(store, clock, size=1 << 30)
    index_time = clock()
    give_many(store, clock)
    await node.look()
    (tmp_path / "folded").mkdir()
    for newest in (index_time - 1, index_time):
        node.database.record(newest)
        clock.advance(PATIENCE * HOUR_S)
        give_many(store, clock)
        assert (await node.look())["last_error"] == ""
    node.worker.answer = CacheError("no room")
    assert (await node.look())["last_error"] == "no room"
    rooms = [room_bytes for _, room_bytes in node.worker.asked]
    assert rooms == [copies * (1 << 30) + (64 << 20) for copies in (3, 3, 1, 1)]
    assert not (tmp_path / "folded").exists()


async def test_database_is_removed_when_another_mount_has_folded_for_a_week(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    node = Node(store, clock, directory=tmp_path / "folded")
    (tmp_path / "folded").mkdir()
    node.database.record(clock())
    node.worker.act = lambda: give_index(store, clock)
    for days, is_there in ((DAYS_MAX, True), (0.1, False)):
        clock.advance(days * DAY_S)
        give_index(store, clock)
        await node.maintenance.look()
        await node.maintenance.look()
        assert (tmp_path / "folded").exists() == is_there


async def test_database_that_never_had_an_index_is_removed_when_another_mount_folds(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    """The first run was killed while it loaded the index, or before there was one."""
    node = Node(store, clock, directory=tmp_path / "folded")
    (tmp_path / "folded" / "meta").mkdir(parents=True)
    await node.look()
    assert (tmp_path / "folded").exists(), "the next run goes on with it"
    give_index(store, clock)
    await node.look()
    assert not (tmp_path / "folded").exists()


async def test_unexpected_error_does_not_end_the_mount(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        node.slept = [0.0] * 2000  # enough
        raise ZeroDivisionError

    node.worker.act = fail
    with pytest.raises(trio.TooSlowError):
        await node.maintenance.run()
    assert "ZeroDivisionError" in caplog.text


async def test_statistics_before_the_first_look_say_that_nothing_is_known(node: Node) -> None:
    found = node.maintenance.statistics()
    assert found["mode"] == "auto"
    assert [found[name] for name in ("inspected_s", "last_fold_s", "last_collection_s", "backlog")] == [None] * 4
