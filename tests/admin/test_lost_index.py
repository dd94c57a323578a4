"""A lake whose commits were collected, and whose index is lost: every reader notices it, nothing is deleted or folded,
what was lost can be restored, and going on without it takes an option."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.admin.commands import run_fsck, run_gc, run_maintenance, run_pack, run_snapshot
from lakefs_fuse.admin.datasets import run_dataset
from lakefs_fuse.admin.maintenance import KEY as LAST_COLLECTION
from lakefs_fuse.admin.work import Work
from lakefs_fuse.commits.gc_record import RECORDS
from lakefs_fuse.commits.index.index import INDEX, collected_before
from lakefs_fuse.commits.record import Mkdir, Remove
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.errors import LakeError, StoreError
from lakefs_fuse.meta.sorted_tables import missing_before
from tests.admin.lakes import commits, dataset, give_commit, give_pack, headless, work_of
from tests.fakes import store_client
from tests.memory_store import Failures, MemoryStore
from tests.vfs.lakes import Clock, lake

FILES = dataset(20)
LEFT = {path: data for path, data in FILES.items() if path != "data/0003"}
NOW = protocol.GcArgs(grace_s=0, live_below=0)


@pytest.fixture
async def store(clock: Clock, tmp_path: Path) -> MemoryStore:
    """Two indexes, the older of which lacks a directory, and the commits before the newer are collected, but for the
    pack. Without an index, a removed file is seen again, and two directories are not."""
    made = MemoryStore()
    give_pack(made, clock, FILES)
    for operations in ((Remove("data/0003"), Mkdir("old", 0o750, 1, 2, 0)), (Mkdir("new", 0o750, 1, 2, 0),)):
        clock.advance(200)
        give_commit(made, clock, *operations)
        clock.advance(200)
        for _ in range(2):
            await run_gc(work_of(made, clock, tmp_path), NOW)
            clock.advance(1)
    assert len(commits(made)) == 1
    assert len([key for key in made.objects if key.endswith("/manifest")]) == 2
    return made


def lose_rows(store: MemoryStore) -> None:
    for key in of_index(store, ".sst"):
        store.take(key)


def lose_manifests(store: MemoryStore) -> None:
    for key in of_index(store, "/manifest"):
        store.take(key)


def garble_manifests(store: MemoryStore) -> None:
    for key in of_index(store, "/manifest"):
        store.give(key, b"garbage")


def lose_newest(store: MemoryStore) -> None:
    newest = of_index(store, "/manifest")[-1].removesuffix("manifest")
    for key in of_index(store):
        if key.startswith(newest):
            store.take(key)


def lose_all(store: MemoryStore) -> None:
    for key in of_index(store):
        store.take(key)


def of_index(store: MemoryStore, end: str = "") -> list[str]:
    return sorted(key for key in store.objects if key.startswith(INDEX) and key.endswith(end))


LOSSES = [lose_rows, lose_manifests, garble_manifests, lose_newest, lose_all]
LONG = [pytest.param(lose, marks=pytest.mark.long) for lose in (lose_manifests, lose_newest)]
losses = pytest.mark.parametrize("lose", [lose_rows, garble_manifests, lose_all, *LONG])


def contents(store: MemoryStore) -> dict[str, bytes]:
    return {key: store.data(key) for key in store.objects}


async def names(store: MemoryStore, clock: Clock, cache_dir: Path) -> dict[str, object]:
    async with lake(store, cache_dir, clock=clock) as node:
        tree = await node.tree()
        assert {"old", "new"} <= tree.keys()
        return {path: data for path, data in tree.items() if data is not None}


COMMANDS: dict[str, Callable[[Work], Awaitable[protocol.Finished]]] = {
    "gc": lambda work: run_gc(work, NOW),
    "gc, dry": lambda work: run_gc(work, msgspec.structs.replace(NOW, dry_run=True)),
    "snapshot": lambda work: run_snapshot(work, protocol.SnapshotArgs()),
    "snapshot --name": lambda work: run_snapshot(work, protocol.SnapshotArgs(name="v1")),
    "maintenance": lambda work: run_maintenance(
        work, protocol.MaintenanceArgs(interval_s=1.0, commits_max=0, may_delete=True)
    ),
    "dataset create": lambda work: run_dataset(work, protocol.DatasetArgs(action="create", dataset="d", path="data")),
    "pack": lambda work: run_pack(work, protocol.PackArgs(grace_s=0.0)),
    "unpack": lambda work: run_pack(work, protocol.PackArgs(back=True)),
    "fsck --rebind": lambda work: run_fsck(work, protocol.FsckArgs(rebind=True)),
}


@losses
async def test_every_command_refuses_and_changes_nothing(
    store: MemoryStore, clock: Clock, tmp_path: Path, lose: Callable[[MemoryStore], None]
) -> None:
    lose(store)
    before = contents(store)
    for seed, (name, run) in enumerate(COMMANDS.items()):
        clock.advance(200)
        with pytest.raises(LakeError, match=r"names may be missing.*`lakefs-fuse fsck SOURCE` names the objects"):
            await run(work_of(store, clock, tmp_path, seed=seed))
        assert contents(store) == before, name


@losses
async def test_mount_refuses_to_write_and_a_read_only_one_says_so(
    store: MemoryStore, clock: Clock, tmp_path: Path, lose: Callable[[MemoryStore], None]
) -> None:
    assert await names(store, clock, tmp_path / "old") == LEFT
    kept = dict(store.objects)
    lose(store)
    with pytest.RaisesGroup(pytest.RaisesExc(LakeError, match="names may be missing")):
        async with lake(store, tmp_path / "node", clock=clock):
            pass
    async with lake(store, tmp_path / "node", clock=clock, read_only=True) as node:
        assert node.fs.statistics()["commits"]["names_missing"] == 1  # type: ignore[index]
        assert missing_before(node.fs.database) == await collected_before(store_client(store, store.capabilities))
    assert await names(store, clock, tmp_path / "old") == LEFT, "a node that has all names goes on"
    store.objects = kept
    assert await names(store, clock, tmp_path / "node") == LEFT, "restored"
    assert (await fsck(store, clock, tmp_path)).exit_code == 0


async def fsck(store: MemoryStore, clock: Clock, tmp_path: Path, *, quick: bool = False) -> protocol.Finished:
    return await run_fsck(work_of(store, clock, tmp_path), protocol.FsckArgs(quick=quick, repair=True))


@pytest.mark.parametrize(("lose", "quick"), [*((each, False) for each in LOSSES), (lose_rows, True)])
async def test_fsck_names_what_to_restore(
    store: MemoryStore, clock: Clock, tmp_path: Path, lose: Callable[[MemoryStore], None], quick: bool
) -> None:
    before = contents(store)
    lose(store)
    lost = {key for key in before if key not in store.objects or store.data(key) != before[key]}
    left = contents(store)
    done = await fsck(store, clock, tmp_path, quick=quick)
    assert (done.exit_code, done.summary["names_missing"]) == (1, True)
    assert "--accept-loss" in done.text
    assert "write a new one" not in done.text
    assert "run snapshot twice" not in done.text
    assert contents(store) == left
    if lose not in (lose_all, lose_newest):
        named = {str(problem["object"]) for problem in done.summary["problems"]}  # type: ignore[attr-defined]
        assert all(any(key.startswith(each) and each != INDEX for each in named) for key in lost), named


@losses
async def test_accepted_loss_lets_the_lake_go_on(
    store: MemoryStore, clock: Clock, tmp_path: Path, lose: Callable[[MemoryStore], None]
) -> None:
    async with lake(store, tmp_path / "node", clock=clock):
        pass
    lose(store)
    horizon = await collected_before(store_client(store, store.capabilities))
    clock.advance(200)
    done = await run_snapshot(work_of(store, clock, tmp_path), protocol.SnapshotArgs(accept_loss=True))
    assert int(str(done.summary["newest_commit"]), 16) >= horizon - 1
    async with lake(store, tmp_path / "fresh", clock=clock) as node:
        assert node.fs.statistics()["commits"]["names_missing"] == 0  # type: ignore[index]
        found = await node.tree()
        assert {path: found[path] for path in LEFT} == LEFT
        assert "new" not in found
        await node.write("more", b"more")
    for _ in range(2):
        clock.advance(200)
        await run_gc(work_of(store, clock, tmp_path), NOW)
        await run_snapshot(work_of(store, clock, tmp_path), protocol.SnapshotArgs())
    assert (await fsck(store, clock, tmp_path)).exit_code == 0
    assert await collected_before(store_client(store, store.capabilities)) >= horizon


@pytest.mark.parametrize("lose", [lose_rows, lose_newest, lose_all])
async def test_index_is_written_from_the_names_of_a_node(
    store: MemoryStore, clock: Clock, tmp_path: Path, lose: Callable[[MemoryStore], None]
) -> None:
    assert await names(store, clock, tmp_path / "old") == LEFT
    lose(store)
    clock.advance(200)
    args = protocol.SnapshotArgs(cache_dir=str(tmp_path / "old"))
    await run_snapshot(work_of(store, clock, tmp_path), args)
    assert await names(store, clock, tmp_path / "fresh") == LEFT


async def test_accept_loss_of_a_whole_lake_says_that_nothing_is_missing(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    notes: list[str] = []
    work = replace(work_of(store, clock, tmp_path), note=notes.append)
    await run_snapshot(work, protocol.SnapshotArgs(accept_loss=True))
    assert notes == ["no names are missing: the index is written as usual"]
    assert await names(store, clock, tmp_path / "fresh") == LEFT


async def test_record_of_gc_that_was_deleted_is_written_again(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Its horizon is in the manifests, too."""
    client = store_client(store, store.capabilities)
    horizon = await collected_before(client)
    for key in [key for key in store.objects if key.startswith((RECORDS, LAST_COLLECTION))]:
        store.take(key)
    assert await collected_before(client) == horizon
    await run_gc(work_of(store, clock, tmp_path), NOW)
    lose_all(store)
    assert await collected_before(client) == horizon
    with pytest.raises(LakeError, match="names may be missing"):
        async with headless(store, clock):
            pass


async def test_folds_that_were_killed_hide_no_index_and_what_they_left_is_removed_although_folds_fail(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    before = of_index(store)
    for _ in range(6):
        clock.advance(3600)
        store.give(f"{INDEX}{clock():016x}/0000.sst", b"of a fold that was killed")
    assert await names(store, clock, tmp_path / "node") == LEFT
    clock.advance(21.5 * 3600)
    store.hook = Failures(lambda request: request.what == "put" and request.key.endswith("/manifest"), StoreError("no"))
    with pytest.raises(StoreError, match="no"):
        await run_snapshot(work_of(store, clock, tmp_path), protocol.SnapshotArgs())
    store.hook = lambda _request, _when: None
    left = [key for key in of_index(store) if key not in before]
    assert len([key for key in left if store.data(key) == b"of a fold that was killed"]) == 3
    await run_snapshot(work_of(store, clock, tmp_path), protocol.SnapshotArgs())
    assert await names(store, clock, tmp_path / "fresh") == LEFT
