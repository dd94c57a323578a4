"""Commands that delete or move objects exclude one another; those that only read run beside them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.admin.commands import run_fsck, run_gc, run_maintenance, run_pack, run_relocate, run_snapshot
from lakefs_fuse.admin.datasets import run_dataset
from lakefs_fuse.admin.fsck import Checker
from lakefs_fuse.admin.gc import Collector
from lakefs_fuse.admin.upgrade import run_upgrade
from lakefs_fuse.admin.work import Work
from lakefs_fuse.commits.maintenance_lease import KEY, VALID_S
from lakefs_fuse.commits.record import Remove
from lakefs_fuse.control.worker_protocol import (
    DatasetArgs,
    FsckArgs,
    GcArgs,
    MaintenanceArgs,
    PackArgs,
    RelocateArgs,
    SnapshotArgs,
    UpgradeArgs,
)
from lakefs_fuse.errors import LakeError, LeaseHeld, StoreError
from lakefs_fuse.store import lake_record
from lakefs_fuse.store.protocol import Capabilities
from tests.admin.lakes import dataset, fold_all, give_commit, give_pack, headless, silent, work_of
from tests.memory_store import Failures, MemoryStore, Request, When
from tests.tiers import sized
from tests.vfs.lakes import Clock, Lake, lake

Run = Callable[[Work], Awaitable[object]]
CHANGES = frozenset({"put", "delete", "copy", "create_multipart", "upload_part", "complete_multipart"})
CHANGING: dict[str, Run] = {
    "gc": lambda work: run_gc(work, GcArgs(grace_s=0)),
    "pack": lambda work: run_pack(work, PackArgs(grace_s=0)),
    "unpack": lambda work: run_pack(work, PackArgs(back=True)),
    "relocate": lambda work: run_relocate(work, RelocateArgs()),
    "maintenance": lambda work: run_maintenance(work, MaintenanceArgs(interval_s=3600, commits_max=0)),
    "snapshot": lambda work: run_snapshot(work, SnapshotArgs()),
    "snapshot --name": lambda work: run_snapshot(work, SnapshotArgs(name="new")),
    "snapshot --delete": lambda work: run_snapshot(work, SnapshotArgs(delete="kept")),
    "dataset create": lambda work: run_dataset(work, DatasetArgs(action="create", dataset="new")),
    "dataset rm": lambda work: run_dataset(work, DatasetArgs(action="rm", dataset="kept@1")),
    "fsck --repair": lambda work: run_fsck(work, FsckArgs(repair=True)),
    "fsck --rebind": lambda work: run_fsck(work, FsckArgs(rebind=True)),
    "upgrade": lambda work: run_upgrade(work, UpgradeArgs()),
}
READING: dict[str, Run] = {
    "gc --dry-run": lambda work: run_gc(work, GcArgs(grace_s=0, dry_run=True)),
    "pack --dry-run": lambda work: run_pack(work, PackArgs(dry_run=True)),
    "unpack --dry-run": lambda work: run_pack(work, PackArgs(back=True, dry_run=True)),
    "relocate --dry-run": lambda work: run_relocate(work, RelocateArgs(dry_run=True)),
    "snapshot --list": lambda work: run_snapshot(work, SnapshotArgs(list=True)),
    "dataset ls": lambda work: run_dataset(work, DatasetArgs(action="ls")),
    "fsck": lambda work: run_fsck(work, FsckArgs()),
    "fsck --rebind --dry-run": lambda work: run_fsck(work, FsckArgs(rebind=True, dry_run=True)),
}
FILES = dataset(20)
LEFT = {path: data for number, (path, data) in enumerate(FILES.items()) if number % 2}
ABLE = Capabilities(name="memory", put_if_match=True, delete_if_match=True)
WEAK = Capabilities(name="memory")
"""As a local directory: a lease that has ended is not taken over by a condition."""


@pytest.fixture(
    params=[
        pytest.param(ABLE, id="all conditions"),
        pytest.param(WEAK, id="If-None-Match alone", marks=pytest.mark.long),
    ]
)
def store(clock: Clock, request: pytest.FixtureRequest) -> MemoryStore:
    """A pack of which half was removed a day ago, and a small plain object."""
    made = MemoryStore(request.param)
    made.clock = clock
    made.give(lake_record.KEY, msgspec.json.encode(lake_record.LakeRecord(id="1" * 32)))
    give_pack(made, clock, FILES)
    clock.advance(1)
    give_commit(made, clock, *(Remove(path) for path in FILES if path not in LEFT))
    made.give("plain", b"bytes")
    clock.advance(86400)
    return made


async def shown(store: MemoryStore, clock: Clock, directory: Path) -> dict[str, object]:
    """What a fresh mount reads."""
    async with lake(store, directory / f"fresh-{len(store.requests)}", clock=clock) as node:
        return await contents(node)


async def contents(node: Lake) -> dict[str, object]:
    return {path: data for path, data in (await node.tree()).items() if data is not None}


def changes(store: MemoryStore) -> set[str]:
    return {request.key for request in store.requests if request.what in CHANGES}


@pytest.mark.parametrize("command", sorted(CHANGING))
async def test_command_is_refused_while_another_changes_the_lake(
    store: MemoryStore, clock: Clock, tmp_path: Path, command: str
) -> None:
    run = CHANGING[command]
    await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs(name="kept"))
    await run_dataset(work_of(store, clock, tmp_path), DatasetArgs(action="create", dataset="kept"))
    async with work_of(store, clock, tmp_path, seed=8).lease("another").held():
        store.requests.clear()
        with pytest.raises(LeaseHeld, match=r"^another \(host here, process 8, since "):
            await run(work_of(store, clock, tmp_path))
        assert changes(store) <= {KEY}
    await run(work_of(store, clock, tmp_path))
    assert KEY not in store.objects


@pytest.mark.parametrize("command", sorted(CHANGING))
async def test_command_holds_the_lease_from_its_first_request_to_its_last(
    store: MemoryStore, clock: Clock, tmp_path: Path, command: str
) -> None:
    await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs(name="kept"))
    await run_dataset(work_of(store, clock, tmp_path), DatasetArgs(action="create", dataset="kept"))
    store.requests.clear()
    await CHANGING[command](work_of(store, clock, tmp_path))
    assert (store.requests[0].what, store.requests[0].key) == ("put", KEY)
    assert (store.requests[-1].what, store.requests[-1].key) == ("delete", KEY)
    assert store.count("put", KEY) == store.count("delete", KEY) == 1


@pytest.mark.parametrize("command", sorted(READING))
async def test_command_that_only_reads_runs_beside_another(
    store: MemoryStore, clock: Clock, tmp_path: Path, command: str
) -> None:
    async with work_of(store, clock, tmp_path, seed=8).lease("another").held():
        store.requests.clear()
        await READING[command](work_of(store, clock, tmp_path))
        assert changes(store) == set()


async def test_of_two_gc_at_once_one_runs(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    results: list[str] = []

    async def collect(seed: int) -> None:
        try:
            await CHANGING["gc"](work_of(store, clock, tmp_path, seed=seed))
        except LeaseHeld:
            results.append("refused")
        else:
            results.append("ran")

    async with trio.open_nursery() as nursery:
        for seed in (7, 8):
            nursery.start_soon(collect, seed)
    assert sorted(results) == ["ran", "refused"]
    assert await shown(store, clock, tmp_path) == LEFT | {"plain": b"bytes"}


@pytest.mark.parametrize("store", [ABLE], ids=["all conditions"], indirect=True)
async def test_gc_stopped_after_any_request_changes_nothing_once_another_has_run(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    """It goes on when its lease has ended, and another gc has rewritten the same packs and deleted the old ones. A
    commit that it would store then is dated earlier than those that a mount has applied."""
    every = sized(8, 1)
    original, at, was_stopped = dict(store.objects), 1, True
    while was_stopped:
        store.objects = dict(original)
        async with lake(store, tmp_path / f"node-{at}", clock=clock) as node:
            await node.tree()
            store.hook = stop = _Stop(at, partial(_collect_beside, store, clock, tmp_path, node))
            try:
                await CHANGING["gc"](work_of(store, clock, tmp_path))
            except LeaseHeld as error:
                assert "took over" in str(error)
            was_stopped = stop.has_happened
            store.hook = lambda _request, _when: None
            clock.advance(5)
            await node.poll()
            assert await contents(node) == LEFT | {"plain": b"bytes"}, f"request {at}"
        assert await shown(store, clock, tmp_path) == LEFT | {"plain": b"bytes"}, f"request {at}"
        at += every
    assert at > 15


async def _collect_beside(store: MemoryStore, clock: Clock, directory: Path, node: Lake) -> None:
    clock.advance(VALID_S + 1)
    await CHANGING["gc"](work_of(store, clock, directory, seed=8))
    await node.poll()
    assert await contents(node) == LEFT | {"plain": b"bytes"}


class _Stop:
    """Stops who sent a request before the answer comes, until something has happened."""

    def __init__(self, number: int, happen: Callable[[], Awaitable[None]]) -> None:
        self._left, self._happen = number, happen
        self.has_happened = False

    def __call__(self, request: Request, when: When) -> None:
        if when == "after" and not self.has_happened:
            self._left -= 1
            if self._left < 0:
                self.has_happened = True
                trio.from_thread.run(self._happen)


async def test_gc_that_failed_can_be_run_again_at_once(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    store.hook = Failures(lambda request: request.what == "list", StoreError("away"))
    with pytest.raises(StoreError):
        await CHANGING["gc"](work_of(store, clock, tmp_path))
    await CHANGING["gc"](work_of(store, clock, tmp_path, seed=8))


@pytest.mark.parametrize("store", [ABLE], ids=["all conditions"], indirect=True)
async def test_gc_killed_at_any_request_can_be_run_again_when_its_lease_has_ended(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    every = sized(9, 3)
    original, at, ended = dict(store.objects), 0, False
    while not ended:
        store.objects = dict(original)
        seen = iter(range(10**9))
        store.hook = Failures(lambda _, at=at, seen=seen: next(seen) >= at, StoreError("killed"), count=10**9)  # type: ignore[misc]
        try:
            await CHANGING["gc"](work_of(store, clock, tmp_path))
            ended = True
        except LakeError:
            pass
        store.hook = lambda _request, _when: None
        again = work_of(store, clock, tmp_path, seed=8)
        if KEY in store.objects:
            with pytest.raises(LeaseHeld):
                await CHANGING["gc"](again)
            clock.advance(VALID_S + 1)
        await CHANGING["gc"](again)
        assert await shown(store, clock, tmp_path) == LEFT | {"plain": b"bytes"}, f"request {at}"
        at += every
    assert at > 15


async def test_engine_that_knows_no_lease_leaves_it_alone(store: MemoryStore, clock: Clock) -> None:
    """As programs do that are older than the lease."""
    store.give(KEY, b"of a command that was killed")
    clock.advance(30 * 86400)
    async with headless(store, clock) as view:
        await Collector(view, GcArgs(grace_s=0), fold=partial(fold_all, view), report=silent).run()
    async with headless(store, clock) as view:
        done = await Checker(view, quick=False, report=silent).run()
    assert done.problems == []
    assert KEY in store.objects
