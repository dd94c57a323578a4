"""The fold database: folds of a lake with levels cost what changed, and fresh mounts have what others have."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path
from typing import cast

import msgspec
import pytest

from lakefs_fuse.admin import maintenance
from lakefs_fuse.admin.commands import run_fsck, run_gc, run_maintenance, run_snapshot
from lakefs_fuse.admin.fold_database import FoldDatabase, open_fold_view
from lakefs_fuse.admin.maintenance import PATIENCE, CollectionRecord, Inspector, write_collection
from lakefs_fuse.commits.index.index import FORMAT, FORMAT_LEVELS, INDEX, Manifest, manifests
from lakefs_fuse.commits.record import Mkdir, Remove, Symlink
from lakefs_fuse.control.worker_protocol import FsckArgs, GcArgs, MaintenanceArgs, SnapshotArgs
from lakefs_fuse.errors import CacheError, LakeError, StoreError
from lakefs_fuse.store.protocol import Capabilities
from tests.admin.lakes import dataset, give_commit, give_pack, work_of
from tests.fakes import store_client
from tests.memory_store import Failures, MemoryStore
from tests.tiers import sized
from tests.vfs.lakes import NS, Clock, lake

HOUR_S, DAY_S = 3600.0, 86400.0


@pytest.fixture
def store(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    monkeypatch.setattr(maintenance, "NAMES_PER_COMMIT", 1 << 40)  # any commit makes the lake due
    made = MemoryStore(Capabilities(name="memory", put_if_match=True, delete_if_match=True))
    made.clock = clock
    return made


class Node:
    """The worker of a mount, run after run."""

    def __init__(
        self, store: MemoryStore, clock: Clock, directory: Path, seed: int = 7, *, levels: bool = True
    ) -> None:
        self.store, self.clock, self._seed, self._levels = store, clock, seed, levels
        self.directory, self.database = directory, FoldDatabase(directory / "folded")
        directory.mkdir()
        self.client = store_client(store, store.capabilities, retry_timeout_s=0)
        self.lake_id = "one"

    async def fold(self, commits_max: int = 0) -> dict[str, object]:
        """Without a collection, which is not due."""
        await write_collection(self.client, CollectionRecord(time=self.clock(), newest=1 << 62))
        self.store.requests.clear()
        return await self.maintain(commits_max)

    async def maintain(self, commits_max: int = 0) -> dict[str, object]:
        work = work_of(
            self.store, self.clock, self.directory, seed=self._seed, levels=self._levels, lake_id=self.lake_id
        )
        args = MaintenanceArgs(interval_s=HOUR_S, commits_max=commits_max, fold_database=self.database.path)
        return (await run_maintenance(work, args)).summary

    async def newest(self) -> Manifest:
        return (await manifests(self.client))[0]


def give_changes(store: MemoryStore, clock: Clock, rng: random.Random, count: int) -> None:
    """Files that are new or replaced, and some that are removed."""
    clock.advance(1)
    paths = [f"data/{rng.randrange(40)}/{rng.randrange(100):04d}" for _ in range(count)]
    give_pack(store, clock, {path: b"%d" % clock() for path in paths})
    clock.advance(1)
    give_commit(
        store, clock, *(Remove(path) for path in paths[: count // 4]),
        Mkdir(f"made/{rng.randrange(50)}", 0o700, 5, 6, 7),
        Symlink(f"data/link{rng.randrange(50)}", "0/0001", 1, 2, 3, xattrs={"user.x": b"y"}),
    )  # fmt: skip


async def names_and_attributes(store: MemoryStore, clock: Clock, directory: Path) -> object:
    """As a mount with an empty cache shows them."""
    async with lake(store, directory, clock=clock) as node:
        tree = await node.tree()
        entries = {path: await node.getattr(path) for path in tree}
        return tree, {
            path: (e.mode, e.uid, e.gid, e.size, 0 if e.is_dir and not e.stamp else e.mtime_ns)
            for path, e in entries.items()
        }


async def test_fresh_mount_has_what_one_has_that_read_every_commit(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    rng, node = random.Random(1), Node(store, clock, tmp_path / "node")
    store.give("plain/a", b"plain")
    give_pack(store, clock, dataset(200, "data/0"))
    for fold in range(sized(8, 40)):
        give_changes(store, clock, rng, 12)
        if fold == 3:
            shutil.rmtree(node.database.path)
        assert (await node.fold())["folded"]
    assert (await node.newest()).increments
    clock.advance(1000)
    with_index = await names_and_attributes(store, clock, tmp_path / "with")
    for key in [key for key in store.objects if key.startswith(INDEX)]:
        store.take(key)
    assert await names_and_attributes(store, clock, tmp_path / "without") == with_index


async def test_names_of_a_lake_that_was_emptied_come_into_no_index(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    node = Node(store, clock, tmp_path / "node")
    give_pack(store, clock, {"before": b"before"})
    assert (await node.fold())["folded"]
    for key in list(store.objects):
        store.take(key)
    node.lake_id = "another"
    clock.advance(1000)
    give_pack(store, clock, {"after": b"after"})
    clock.advance(1000)
    assert (await node.fold())["folded"]
    tree, _ = cast("tuple[list[str], object]", await names_and_attributes(store, clock, tmp_path / "shown"))
    assert list(tree) == ["after"]


async def costs(store: MemoryStore, clock: Clock, node: Node, names: int) -> tuple[int, int]:
    """Requests, and bytes in both directions, of a fold of one commit into a lake of so many names."""
    give_pack(store, clock, {f"many/{number}": b"" for number in range(names)})
    await node.fold()
    most: list[tuple[int, int]] = []
    for fold in range(4):
        clock.advance(1)
        give_pack(store, clock, {f"many/{each * 11 + fold}": b"new" for each in range(50)})
        clock.advance(1000)
        assert (await node.fold())["folded"]
        puts = sum(each.size for each in store.requests if each.what == "put")
        got = {each.key for each in store.requests if each.what == "get"}
        most.append((len(store.requests), puts + sum(len(store.data(key)) for key in got if key in store.objects)))
    return max(count for count, _ in most), max(size for _, size in most)


async def test_fold_costs_what_changed_and_not_what_the_lake_holds(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    """Requests and bytes are those of a lake with a third of the names."""
    small = await costs(store, clock, Node(store, clock, tmp_path / "small"), 3000)
    store.objects.clear()
    large = await costs(store, clock, Node(store, clock, tmp_path / "large"), 9000)
    assert small[0] == large[0] == 18, "2 for the lease, 5 to find out what is due, 1 commit, 10 to fold"
    assert abs(small[1] - large[1]) < 0.1 * small[1]
    store.objects.clear()
    today = await costs(store, clock, Node(store, clock, tmp_path / "without", levels=False), 9000)
    assert today[1] > 5 * large[1]


async def test_lake_without_the_feature_is_folded_as_before(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    node = Node(store, clock, tmp_path / "node", levels=False)
    for _ in range(3):
        give_changes(store, clock, random.Random(1), 8)
        await node.fold()
        manifest = await node.newest()
        assert (manifest.format, manifest.increments) == (FORMAT, [])
        assert b"increments" not in store.data(manifest.prefix + "manifest")
    assert not os.path.exists(node.database.path)


@pytest.mark.parametrize("what", ["0000.sst", "manifest", ".lakefs/maintenance-lease"])
async def test_run_that_fails_is_gone_on_with(store: MemoryStore, clock: Clock, tmp_path: Path, what: str) -> None:
    """The next one folds what both found. It needs no file of the base, unless the index is there and the database does
    not say so."""
    rng, node = random.Random(1), Node(store, clock, tmp_path / "node")
    give_pack(store, clock, dataset(300))
    await node.fold()
    base = await node.newest()
    give_changes(store, clock, rng, 12)
    for when in ("before", "after"):
        store.hook = Failures(
            lambda request: request.what == "put" and request.key.endswith(what) and request.size > 0,
            StoreError("cut off"), when=when,
        )  # fmt: skip
        with pytest.raises((LakeError, ExceptionGroup)):
            await node.fold()
        store.hook = lambda _request, _when: None
        clock.advance(200)
    give_changes(store, clock, rng, 12)
    await node.fold()
    got = {each.key for each in store.requests if each.what == "get"}
    assert bool(got & {base.key_of(file) for file in base.files}) == (what == "manifest")
    clock.advance(1000)
    with_index = await names_and_attributes(store, clock, tmp_path / "with")
    for key in [key for key in store.objects if key.startswith(INDEX)]:
        store.take(key)
    assert await names_and_attributes(store, clock, tmp_path / "without") == with_index


async def test_commands_by_hand_write_increments_and_the_next_fold_goes_on(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    """`snapshot` and `gc` with temporary databases of their own, and `fsck` finds nothing."""
    rng, node = random.Random(1), Node(store, clock, tmp_path / "node")
    give_pack(store, clock, dataset(1000))
    await node.fold()
    for by_hand in ("snapshot", "gc"):
        give_changes(store, clock, rng, 6)
        work = work_of(store, clock, tmp_path, levels=True)
        await (run_snapshot(work, SnapshotArgs()) if by_hand == "snapshot" else run_gc(work, GcArgs(grace_s=0)))
        give_changes(store, clock, rng, 6)
        await node.fold()
        assert (await run_fsck(work_of(store, clock, tmp_path), FsckArgs())).exit_code == 0
        newest = await node.newest()
        assert newest.format == FORMAT_LEVELS
        assert newest.increments
    await run_snapshot(work_of(store, clock, tmp_path, levels=True), SnapshotArgs(name="kept"))
    named = msgspec.msgpack.decode(store.data(".lakefs/snapshots/kept/manifest"))
    assert (named["format"], "increments" in named) == (FORMAT, False)
    clock.advance(1000)
    with_index = await names_and_attributes(store, clock, tmp_path / "with")
    assert len(with_index[0]) > 1000  # type: ignore[index]


async def test_mount_that_folded_last_folds_again(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Another one waits for twice as many commits, or twice as long."""
    one, other = (Node(store, clock, tmp_path / name, seed) for seed, name in enumerate(("one", "other")))
    give_pack(store, clock, dataset(30))
    await one.fold()
    clock.advance(1000)
    inspectors = [
        Inspector(node.client, clock, interval_s=HOUR_S, commits_max=10, database=node.database)
        for node in (one, other)
    ]

    async def due() -> list[bool]:
        return [(await inspector.inspect()).fold for inspector in inspectors]

    give_commit(store, clock, Remove("nothing"))
    assert await due() == [False, False]
    clock.advance(DAY_S + 1)
    assert await due() == [True, False]
    clock.advance((PATIENCE - 1) * DAY_S)
    assert await due() == [True, True]
    await one.fold()
    for count in range(1, PATIENCE * 10 + 2):
        clock.advance(0.001)
        give_commit(store, clock, Remove("nothing"))
        assert await due() == [count > 10, count > PATIENCE * 10]
    assert (await other.fold())["folded"]
    clock.advance(1)
    give_commit(store, clock, Remove("nothing"))
    clock.advance(DAY_S + 1)
    assert await due() == [False, True]


async def test_database_that_is_damaged_is_begun_anew(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    node = Node(store, clock, tmp_path / "node")
    give_pack(store, clock, dataset(30))
    await node.fold()
    for damaged in ("meta/CURRENT", "meta/*.sst"):
        for path in Path(node.database.path).glob(damaged):
            path.write_bytes(b"nonsense")
        for _ in range(2):
            give_changes(store, clock, random.Random(1), 6)
            try:
                await node.fold()
            except LakeError:
                assert not os.path.exists(node.database.path)
        assert node.database.newest == (await node.newest()).time
    assert sorted(os.listdir(node.database.path)) == ["lock", "meta", "newest"]


async def test_damaged_database_is_never_repaired(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Repair loses rows, and keeps the mark of the index: the run after one that was killed would fold the loss."""
    rng, node = random.Random(1), Node(store, clock, tmp_path / "node")
    give_pack(store, clock, dataset(300))
    await node.fold()
    for _ in range(2):  # a run writes a file of the rows of the one before
        give_changes(store, clock, rng, 12)
        await node.fold()
    _, lost, _ = sorted(Path(node.database.path).glob("meta/*.sst"))
    lost.write_bytes(b"nonsense")
    give_changes(store, clock, rng, 12)
    opened = Path(node.database.path) / "blocks"
    store.hook = Failures(lambda _: opened.exists(), StoreError("killed"))
    with pytest.raises(LakeError):
        await node.fold()
    store.hook = lambda _request, _when: None
    clock.advance(200)
    await node.fold()
    clock.advance(1000)
    with_index = await names_and_attributes(store, clock, tmp_path / "with")
    for key in [key for key in store.objects if key.startswith(INDEX)]:
        store.take(key)
    assert await names_and_attributes(store, clock, tmp_path / "without") == with_index


def test_directory_says_which_index_it_has(tmp_path: Path) -> None:
    database = FoldDatabase(tmp_path / "folded")
    assert (database.newest, database.is_in_use()) == (0, False)
    (tmp_path / "folded").mkdir()
    database.record(7)
    assert database.newest == 7
    (tmp_path / "folded" / "newest").write_text("nonsense")
    assert database.newest == 0
    assert database.exists()
    database.remove()
    assert not database.exists()
    with pytest.raises(CacheError, match="newest"):
        database.record(7)


async def test_run_that_is_killed_leaves_the_time_of_the_index_that_it_loaded(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    one, other = (Node(store, clock, tmp_path / name, seed) for seed, name in enumerate(("one", "other")))
    give_pack(store, clock, dataset(30))
    await one.fold()
    give_changes(store, clock, random.Random(1), 6)
    async with open_fold_view(
        other.client, work_of(store, clock, other.directory, seed=1, levels=True), other.database
    ):
        assert other.database.newest == (await other.newest()).time


@pytest.mark.parametrize("file", ["0000.sst", "manifest"])
async def test_stray_index_of_the_future_does_not_date_the_next_one(
    store: MemoryStore, clock: Clock, tmp_path: Path, file: str
) -> None:
    """The newest index is some seconds ahead of the store's clock, which was set back; the next one is newer still."""
    node = Node(store, clock, tmp_path / "node")
    give_pack(store, clock, dataset(300))
    clock.advance(20)
    await node.fold()
    clock.advance(-20)
    newest = await node.newest()
    store.give(f"{INDEX}{clock() + 3600 * NS:016x}/{file}", b"nobody's")
    give_changes(store, clock, random.Random(1), 6)
    await node.fold()
    assert newest.time < (await node.newest()).time < newest.time + 10 * NS
