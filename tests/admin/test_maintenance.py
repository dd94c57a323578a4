"""Maintenance: a lake is folded and collected when it is due, and knowing that it is not costs one request."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.admin.commands import run_gc, run_maintenance, run_snapshot
from lakefs_fuse.admin.maintenance import (
    ABSENT,
    BACKLOG_MAX,
    DAYS_MAX,
    GRACE_DAYS,
    KEY,
    NAMES_PER_COMMIT,
    PAUSE_DAYS_MAX,
    TAKES_MAX,
    UPLOAD_DAYS,
    CollectionRecord,
    Due,
    Inspector,
    read_collection,
    write_collection,
)
from lakefs_fuse.commits.index.index import INDEX, KEPT, Manifest
from lakefs_fuse.commits.poller import ABSENCE_S_MAX
from lakefs_fuse.commits.record import COMMITS, TIME_NS_MAX, Remove
from lakefs_fuse.control.worker_protocol import GcArgs, MaintenanceArgs, SnapshotArgs
from lakefs_fuse.errors import AccessDenied, LakeError, LeaseHeld, Unavailable
from lakefs_fuse.store.protocol import Capabilities
from tests.admin.lakes import commits, dataset, give_commit, give_pack, work_of
from tests.fakes import store_client
from tests.memory_store import Failures, MemoryStore
from tests.tiers import sized
from tests.vfs.lakes import NS, Clock, lake

HOUR_S, DAY_S = 3600.0, 86400.0
COMMITS_MAX = 20
ARGS = MaintenanceArgs(interval_s=HOUR_S, commits_max=COMMITS_MAX)
NOTHING, FOLD, COLLECTION, BOTH = Due(), Due(fold=True), Due(collection=True), Due(fold=True, collection=True)


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    made = MemoryStore(Capabilities(name="memory", put_if_match=True, delete_if_match=True))
    made.clock = clock
    return made


def inspector_of(store: MemoryStore, clock: Clock, *, commits_max: int = COMMITS_MAX) -> Inspector:
    client = store_client(store, store.capabilities, retry_timeout_s=0)
    return Inspector(client, clock, interval_s=HOUR_S, commits_max=commits_max)


def give_commits(store: MemoryStore, clock: Clock, count: int) -> None:
    for _ in range(count):
        clock.advance(0.001)
        give_commit(store, clock, Remove("nothing"))


async def maintain(
    store: MemoryStore, clock: Clock, directory: Path, args: MaintenanceArgs = ARGS
) -> dict[str, object]:
    return (await run_maintenance(work_of(store, clock, directory), args)).summary


def manifest_of(names: int) -> Manifest:
    return Manifest(time=1, newest=1, horizon=0, inode=2, object=0, names=names, directories=0, files=[])


# -- what a lake is due for


async def test_inspection_of_an_idle_lake_costs_one_request(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    give_commits(store, clock, 5)
    clock.advance(DAY_S + 1)
    assert (await maintain(store, clock, tmp_path))["folded"]
    inspector = inspector_of(store, clock)
    assert await inspector.inspect() == NOTHING
    for _ in range(20):
        clock.advance(HOUR_S)
        store.requests.clear()
        assert await inspector.inspect() == NOTHING
        assert [(request.what, request.key) for request in store.requests] == [("list", COMMITS)]


async def test_lake_without_commits_is_due_for_nothing(store: MemoryStore, clock: Clock) -> None:
    store.give("plain", b"plain")
    clock.advance(100 * DAY_S)
    assert await inspector_of(store, clock).inspect() == NOTHING


async def test_fold_is_due_when_commits_are_many(store: MemoryStore, clock: Clock) -> None:
    inspector = inspector_of(store, clock)
    give_commits(store, clock, COMMITS_MAX)
    assert (await inspector.inspect(), inspector.backlog) == (NOTHING, COMMITS_MAX)
    give_commits(store, clock, 1)
    assert (await inspector.inspect(), inspector.backlog) == (FOLD, COMMITS_MAX + 1)


async def test_commits_that_make_a_fold_due_grow_with_the_names_unless_there_are_levels(
    store: MemoryStore, clock: Clock
) -> None:
    client = store_client(store, store.capabilities, retry_timeout_s=0)
    for has_levels, most in ((False, 1000), (True, COMMITS_MAX)):
        inspector = Inspector(client, clock, interval_s=HOUR_S, commits_max=COMMITS_MAX, has_levels=has_levels)
        inspector.index = manifest_of(1_000_000)
        assert inspector.commits_until_due == most


async def test_fold_and_first_collection_are_due_when_a_commit_is_a_day_old(store: MemoryStore, clock: Clock) -> None:
    inspector = inspector_of(store, clock)
    give_commits(store, clock, 1)
    clock.advance(DAY_S - 1)
    assert await inspector.inspect() == NOTHING
    clock.advance(2)
    assert await inspector.inspect() == BOTH


async def test_backlog_is_counted_no_farther_than_to_its_bound(store: MemoryStore, clock: Clock) -> None:
    store.page_keys_max = 10
    inspector = inspector_of(store, clock)
    give_commits(store, clock, 100)
    await inspector.inspect()
    assert (inspector.backlog, store.count("list", COMMITS)) == (COMMITS_MAX + 10, 3)


@pytest.mark.parametrize(
    ("names", "commits_max"), [(0, 2000), (2000 * NAMES_PER_COMMIT, 2000), (7_000_000, 7000), (10**9, BACKLOG_MAX)]
)
async def test_fold_of_many_names_waits_for_more_commits(
    store: MemoryStore, clock: Clock, names: int, commits_max: int
) -> None:
    inspector = inspector_of(store, clock, commits_max=2000)
    inspector.index = manifest_of(names)
    inspector.collection = CollectionRecord(time=clock(), newest=TIME_NS_MAX)
    inspector.backlog = commits_max
    assert inspector.due() == NOTHING
    inspector.backlog += 1
    assert inspector.due() == FOLD


async def test_what_another_process_folded_is_noticed(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    inspector = inspector_of(store, clock)
    give_commits(store, clock, 3)
    assert await inspector.inspect() == NOTHING
    give_commits(store, clock, COMMITS_MAX)
    await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs())
    assert (await inspector.inspect(), inspector.backlog) == (COLLECTION, 0)
    await run_gc(work_of(store, clock, tmp_path), GcArgs())
    assert await inspector.inspect() == NOTHING


@pytest.mark.parametrize(
    ("record", "passed_s", "due"),
    [
        (CollectionRecord(time=0, newest=10), DAY_S + 1, NOTHING),
        (CollectionRecord(time=0, newest=10), DAYS_MAX * DAY_S + 1, COLLECTION),
        (CollectionRecord(time=0, newest=9), DAY_S - 1, NOTHING),
        (CollectionRecord(time=0, newest=9), DAY_S + 1, COLLECTION),
        (CollectionRecord(time=0, newest=9, took_s=int(DAY_S)), TAKES_MAX * DAY_S - 1, NOTHING),
        (CollectionRecord(time=0, newest=9, took_s=int(DAY_S)), TAKES_MAX * DAY_S + 1, COLLECTION),
        (CollectionRecord(time=0, newest=9, took_s=int(7 * DAY_S)), PAUSE_DAYS_MAX * DAY_S - 1, NOTHING),
        (CollectionRecord(time=0, newest=9, took_s=int(7 * DAY_S)), PAUSE_DAYS_MAX * DAY_S + 1, COLLECTION),
        (CollectionRecord(time=int(100 * DAY_S * NS), newest=9), 2 * DAY_S, COLLECTION),
    ],
)
async def test_collection_is_due_after_a_day_with_a_change(
    store: MemoryStore, record: CollectionRecord, passed_s: float, due: Due
) -> None:
    """After a week without one, and after ten times as long as the last one took."""
    inspector = inspector_of(store, Clock(int(passed_s * NS)))
    await write_collection(store_client(store, store.capabilities), record)
    store.give(f"{COMMITS}{10:016x}-00000001.zip", b"")
    await inspector.inspect()
    assert inspector.due().collection == due.collection


@pytest.mark.parametrize(
    "raw",
    [
        {"format": 2, "time": 1, "newest": 1},
        {"time": -1, "newest": 1},
        {"time": 2**64 - 1, "newest": 1},
        {"time": 1},
        [1, 2],
        b"\xc1",
    ],
)
async def test_record_that_cannot_be_read_counts_as_none(store: MemoryStore, raw: object) -> None:
    store.give(KEY, raw if isinstance(raw, bytes) else msgspec.msgpack.encode(raw))
    assert await read_collection(store_client(store, store.capabilities)) is None


async def test_record_with_unknown_keys_is_read(store: MemoryStore) -> None:
    store.give(KEY, msgspec.msgpack.encode({"format": 1, "time": 7, "newest": 5, "later": "more"}))
    assert await read_collection(store_client(store, store.capabilities)) == CollectionRecord(time=7, newest=5)


async def test_credentials_that_may_not_delete_are_known_by_one_request(store: MemoryStore, clock: Clock) -> None:
    inspector = inspector_of(store, clock)
    assert await inspector.may_delete()
    store.hook = Failures(lambda request: request.what == "delete", AccessDenied("no"), count=9)
    store.requests.clear()
    assert not await inspector.may_delete()
    assert [(request.what, request.key) for request in store.requests] == [("delete", ABSENT)]
    store.hook = Failures(lambda request: request.what == "delete", Unavailable("away"), count=9)
    with pytest.raises(Unavailable):
        await inspector.may_delete()


# -- what is done


async def test_maintenance_folds_and_collects_and_a_second_run_does_nothing(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    files = dataset(40)
    give_pack(store, clock, files)
    clock.advance(1)
    give_commit(store, clock, *(Remove(path) for path in list(files)[10:]))
    clock.advance(DAY_S)
    first = await maintain(store, clock, tmp_path)
    assert (first["folded"], first["collected"], first["packs_rewritten"], first["commits_later"]) == (True, True, 1, 2)
    clock.advance(HOUR_S)
    store.requests.clear()
    assert await maintain(store, clock, tmp_path) | {"seconds": 0} == {
        "folded": False,
        "collected": False,
        "seconds": 0,
    }
    assert len(store.requests) <= 8
    clock.advance(GRACE_DAYS * DAY_S)
    assert (await maintain(store, clock, tmp_path))["commits_deleted"] == 2
    assert len(commits(store)) == 1
    clock.advance(2 * DAY_S)
    assert not (await maintain(store, clock, tmp_path))["collected"], "nothing is left, and nothing has changed"
    async with lake(store, tmp_path / "fresh", clock=clock) as node:
        assert {path for path, data in (await node.tree()).items() if data is not None} == set(list(files)[:10])


async def test_commits_of_packs_in_use_are_folded_too(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """None of them is dead, and a fresh mount would read them all."""
    for number in range(COMMITS_MAX + 1):
        clock.advance(1)
        give_pack(store, clock, {f"data/{number}": b"data"})
    assert (await maintain(store, clock, tmp_path))["folded"]
    clock.advance(1000)
    store.requests.clear()
    async with lake(store, tmp_path / "fresh", clock=clock) as node:
        assert [request for request in store.requests if request.what == "get" and COMMITS in request.key] == []
        assert len(await node.names("data")) == COMMITS_MAX + 1


async def test_fold_costs_what_changed_since_the_last(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """In requests: the number of earlier commits, and that of directories, make no difference."""

    async def requests_of_a_fold() -> int:
        for number in range(COMMITS_MAX + 1):
            clock.advance(1)
            give_pack(store, clock, {f"new/{clock()}/{number}": b"data"})
        clock.advance(1000)
        await write_collection(store_client(store, store.capabilities), CollectionRecord(time=clock(), newest=0))
        store.requests.clear()
        assert (await maintain(store, clock, tmp_path))["folded"]
        return len(store.requests)

    for _ in range(2):
        small = await requests_of_a_fold()
    for number in range(100):
        clock.advance(1)
        give_pack(store, clock, {f"old/{number}/file": b"data"})
        store.give(f"plain/{number}/file", b"plain")
    await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs())
    await run_gc(work_of(store, clock, tmp_path), GcArgs())
    assert abs(await requests_of_a_fold() - small) <= 5


def test_grace_of_maintenance_is_as_long_as_a_node_may_be_away() -> None:
    assert GRACE_DAYS * DAY_S >= ABSENCE_S_MAX


async def test_mount_that_may_not_delete_folds_only(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    def is_forbidden(key: str) -> bool:
        return key.startswith((COMMITS, INDEX))

    files = dataset(40)
    give_pack(store, clock, files)
    give_commits(store, clock, COMMITS_MAX)
    before = commits(store)
    for _ in range(3):
        clock.advance(DAY_S + 1)
        store.hook = Failures(lambda r: r.what == "delete" and is_forbidden(r.key), AccessDenied("no"), count=99)
        done = await maintain(store, clock, tmp_path, msgspec.structs.replace(ARGS, may_delete=False))
        assert not done["collected"]
    assert commits(store) == before
    assert [key for key in store.objects if key.startswith(INDEX)]
    assert KEY not in store.objects
    store.hook = lambda _request, _when: None
    assert (await maintain(store, clock, tmp_path))["collected"], "by one that may"


async def test_uploads_and_spilled_parts_stay_for_a_month(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Of files that are open for writing all the time."""
    upload = store.create_multipart("log")
    spilled = store.give(".lakefs/staging/0123/4-0", b"spilled").key
    for days, is_there in ((UPLOAD_DAYS - 1, True), (2, False)):
        clock.advance(days * DAY_S)
        give_commits(store, clock, COMMITS_MAX + 1)
        await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs())
        assert (await maintain(store, clock, tmp_path))["collected"]
        assert (upload in store.uploads, spilled in store.objects) == (is_there, is_there)


@pytest.mark.parametrize("days", [0, 2])
async def test_lake_with_an_unreadable_commit_is_tried_once_an_hour_by_all_mounts(
    store: MemoryStore, clock: Clock, tmp_path: Path, days: int
) -> None:
    """Be it due for a fold alone or for a collection, too; it stays due."""
    give_commits(store, clock, COMMITS_MAX + 1)
    damaged = commits(store)[3]
    whole = store.data(damaged)
    store.give(damaged, whole[:-30])
    clock.advance(days * DAY_S)
    other = inspector_of(store, clock)
    for _ in range(2):
        with pytest.raises(LakeError, match="cannot be read"):
            await maintain(store, clock, tmp_path)
        assert (await other.inspect()).fold
        assert other.is_refused
        store.requests.clear()
        assert not (await maintain(store, clock, tmp_path))["folded"]
        assert COMMITS not in {request.key[: len(COMMITS)] for request in store.requests if request.what == "get"}
        clock.advance(HOUR_S)
        assert (await other.inspect()).fold
        assert not other.is_refused
    store.give(damaged, whole)
    assert (await maintain(store, clock, tmp_path))["folded"]
    await other.read()
    assert not other.is_refused


async def test_refused_collection_is_no_collection(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    give_commits(store, clock, COMMITS_MAX + 1)
    assert (await maintain(store, clock, tmp_path))["folded"]
    clock.advance(HOUR_S)
    give_commits(store, clock, 1)
    damaged = commits(store)[-1]
    store.give(damaged, store.data(damaged)[:-30])
    done = await maintain(store, clock, tmp_path)
    assert (done["commits_unreadable"], done["collected"]) == (1, False)
    other = inspector_of(store, clock)
    assert await other.inspect() == COLLECTION
    assert other.is_refused
    assert other.collection is not None
    assert other.collection.time == 0
    assert other.collection.refused == pytest.approx(clock(), abs=NS)


@pytest.mark.parametrize(("took_s", "pause_s"), [(0, HOUR_S), (int(HOUR_S), TAKES_MAX * HOUR_S), (int(DAY_S), DAY_S)])
async def test_refused_run_is_repeated_after_ten_times_as_long(
    store: MemoryStore, clock: Clock, took_s: int, pause_s: float
) -> None:
    inspector, found = inspector_of(store, clock), list[bool]()
    await inspector.record_refusal(took_s)
    for seconds in (pause_s - 1, 1, -pause_s - 1):
        clock.advance(seconds)
        found.append(inspector.is_refused)
    assert found == [True, False, False], "the last one by a clock that was wrong before"


async def test_maintenance_leaves_the_lake_to_who_has_the_lease(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    give_commits(store, clock, COMMITS_MAX + 1)
    async with work_of(store, clock, tmp_path, seed=8).lease("pack").held():
        with pytest.raises(LeaseHeld):
            await maintain(store, clock, tmp_path)
    assert (await maintain(store, clock, tmp_path))["folded"]


async def test_lake_whose_index_is_dated_too_far_ahead_is_folded_again(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    """Else no commit would be newer than that index, and the lake due for nothing until then."""
    ahead = Clock()
    ahead.now_ns = clock.now_ns + int(30 * DAY_S) * NS
    give_commits(store, clock, 5)
    assert (await run_snapshot(work_of(store, ahead, tmp_path), SnapshotArgs())).exit_code == 0
    store.clock = clock
    give_commits(store, clock, COMMITS_MAX + 1)
    clock.advance(1)
    assert (await inspector_of(store, clock).inspect()).fold
    assert (await maintain(store, clock, tmp_path))["folded"]
    assert not (await inspector_of(store, clock).inspect()).fold


async def test_objects_of_a_lake_stay_as_many_over_months(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Each day some files are added and as many removed; a mount looks once an hour."""
    inspector, runs, counts, names = inspector_of(store, clock), 0, list[int](), list[str]()
    days = sized(22, 365)
    for day in range(days):
        for hour in range(24):
            clock.advance(HOUR_S)
            if hour < 4:
                files = {f"day/{day}-{hour}-{number}": b"data" for number in range(3)}
                give_pack(store, clock, files)
                names += files
            elif hour < 8 and len(names) > 30:
                give_commit(store, clock, *(Remove(names.pop(0)) for _ in range(3)))
            if await inspector.inspect():
                await maintain(store, clock, tmp_path)
                await inspector.read()
                runs += 1
        counts.append(len(store.objects))
    assert 0.9 * days <= runs <= days
    histories = KEPT  # of names that changed just before a fold; an index without such names has none
    assert max(counts[days // 2 :]) <= max(counts[: days // 2]) + histories
    async with lake(store, tmp_path / "fresh", clock=clock) as node:
        assert {path for path, data in (await node.tree()).items() if data is not None} == set(names)
