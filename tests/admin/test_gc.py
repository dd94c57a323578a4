"""`gc`: dead bytes are given back, and nothing that is alive is ever lost, whatever happens in between."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.admin import gc
from lakefs_fuse.admin.commands import run_fsck, run_gc, run_snapshot
from lakefs_fuse.admin.gc import Collected, Collector
from lakefs_fuse.admin.maintenance import KEY as LAST_COLLECTION
from lakefs_fuse.commits.archive import commit_key
from lakefs_fuse.commits.bundles import MIXED, SUFFIX, Copy, bundle_key
from lakefs_fuse.commits.gc_record import (
    DEAD_MAX,
    RECORD_BYTES_MAX,
    RECORDS,
    UNREFERENCED_MAX,
    GcRecord,
    GcRecordReader,
    read_horizon,
    write_gc_record,
)
from lakefs_fuse.commits.listing_digest import SUFFIX as DIGEST_SUFFIX
from lakefs_fuse.commits.listing_digest import digest_key
from lakefs_fuse.commits.record import COMMITS, OBJECTS, OWN, Mkdir, ObjectRef, Put, Remove
from lakefs_fuse.control.worker_protocol import FsckArgs, GcArgs, SnapshotArgs
from lakefs_fuse.errors import AccessDenied, LakeError, StoreError
from tests.admin.lakes import commits, dataset, fold_all, give_commit, give_pack, headless, plain, silent, work_of
from tests.memory_store import Failures, MemoryStore, Request, When
from tests.tiers import sized
from tests.vfs.lakes import NS, Clock, Lake, lake, two_lakes

NOW = GcArgs(grace_s=0)
FILES = dataset(60)
GONE = [path for number, path in enumerate(FILES) if number % 2]
LEFT = {path: data for path, data in FILES.items() if path not in GONE}


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    """Three packs of which half is dead, a day ago."""
    made = MemoryStore()
    made.clock = clock
    paths = list(FILES)
    for at in range(0, len(paths), 20):
        give_pack(made, clock, {path: FILES[path] for path in paths[at : at + 20]})
        clock.advance(1)
    give_commit(made, clock, *(Remove(path) for path in GONE))
    clock.advance(86400)
    return made


async def collect(store: MemoryStore, clock: Clock, options: GcArgs = NOW) -> Collected:
    async def sleep(seconds: float) -> None:
        clock.advance(seconds)

    async with headless(store, clock) as view:
        return await Collector(view, options, fold=partial(fold_all, view), report=silent, sleep=sleep).run()


@asynccontextmanager
async def mounted(store: MemoryStore, clock: Clock, directory: Path) -> AsyncIterator[Lake]:
    async with lake(store, directory, clock=clock) as node:
        yield node


async def contents(node: Lake) -> dict[str, object]:
    return {path: data for path, data in (await node.tree()).items() if data is not None}


async def fresh(store: MemoryStore, clock: Clock, tmp_path: Path) -> dict[str, object]:
    async with mounted(store, clock, tmp_path / f"fresh-{len(store.requests)}") as node:
        return await contents(node)


def size_of(store: MemoryStore) -> int:
    return sum(len(data) for key, (data, _) in store.objects.items() if not key.startswith(".lakefs/index/"))


async def test_dead_bytes_are_given_back_while_a_mount_reads(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    async with mounted(store, clock, tmp_path / "node") as node:
        handle = await node.open("data/0000")
        assert await node.names("data") == [path.removeprefix("data/") for path in LEFT]
        before = size_of(store)
        done = await collect(store, clock)
        assert (done.packs_rewritten, done.moved.files, done.commits_deleted) == (3, 30, 4)
        dead = sum(len(FILES[path]) for path in GONE)
        assert before - size_of(store) >= 0.9 * dead
        assert len(commits(store)) == 1
        assert await node.read_handle(handle) == FILES["data/0000"]
        assert await contents(node) == LEFT
    assert await fresh(store, clock, tmp_path) == LEFT


async def test_a_second_run_finds_nothing(store: MemoryStore, clock: Clock) -> None:
    await collect(store, clock)
    objects = {key: meta.etag for key, (_, meta) in store.objects.items() if not key.startswith(RECORDS)}
    done = await collect(store, clock)
    assert (done.packs_rewritten, done.commits_deleted, done.folded) == (0, 0, False)
    assert len([key for key in store.objects if key.startswith(RECORDS)]) == 1, "without what was dead"
    del objects[LAST_COLLECTION]
    assert {key: meta.etag for key, (_, meta) in store.objects.items() if key in objects} == objects


@pytest.mark.parametrize("directory", ["", "some/long/directory/name/"])
@pytest.mark.parametrize(
    "count", [1, pytest.param(2, marks=pytest.mark.long), 3, 20, pytest.param(100, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("packs", [pytest.param(1, marks=pytest.mark.long), 5])
async def test_packs_of_tiny_files_are_not_rewritten_for_ever(
    clock: Clock, tmp_path: Path, directory: str, count: int, packs: int
) -> None:
    """Several are put together at most once."""
    store, files = MemoryStore(), dict[str, bytes]()
    store.clock = clock
    for pack in range(packs):
        made = {f"{directory}{pack}-{number}": b"" if number % 2 else b"tiny" for number in range(count)}
        give_pack(store, clock, made)
        files |= made
        clock.advance(100)
    rewritten = [(await collect(store, clock)).packs_rewritten for _ in range(3)]
    assert rewritten[0] == 0 or packs > 1
    assert rewritten[1:] == [0, 0]
    assert await fresh(store, clock, tmp_path) == files


async def test_the_dead_wait_for_the_grace_period(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    hour = GcArgs(grace_s=3600)
    first = await collect(store, clock, hour)
    assert (first.commits_deleted, first.commits_later, first.folded) == (0, 4, True)
    clock.advance(1800)
    assert (await collect(store, clock, hour)).commits_deleted == 0
    clock.advance(1801)
    assert (await collect(store, clock, hour)).commits_deleted == 4
    assert len(commits(store)) == 1
    assert len([key for key in store.objects if key.startswith(RECORDS)]) <= 1
    assert await fresh(store, clock, tmp_path) == LEFT


async def test_waiting_does_it_in_one_run(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    done = await collect(store, clock, GcArgs(grace_s=3600, wait=True))
    assert (done.commits_deleted, done.commits_later) == (4, 0)
    assert await fresh(store, clock, tmp_path) == LEFT


async def test_what_comes_to_life_while_it_waits_stays(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """A node that had not seen the new pack renames a file: its commit says that the bytes are in the old one."""
    key = commits(store)[0]
    async with headless(store, clock) as view:
        entry = view.find("data/0000")
        assert entry is not None
        row = view.tree.objects.get(entry.place)
        assert row is not None
    ref = ObjectRef(row.key, row.etag, row.size)
    operation = Put("renamed", 1, entry.offset, entry.size, 0o600, 0, 0, 0)

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)
        give_commit(store, clock, operation, Remove("data/0000"), objects=(ref,), writer="0badcaff")

    async with headless(store, clock) as view:
        options = GcArgs(grace_s=600, wait=True)
        done = await Collector(view, options, fold=partial(fold_all, view), report=silent, sleep=sleep).run()
    assert done.commits_deleted == 3
    assert key in commits(store)
    clock.advance(10)
    expected = {path: data for path, data in LEFT.items() if path != "data/0000"} | {"renamed": FILES["data/0000"]}
    assert await fresh(store, clock, tmp_path) == expected


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("where", ["pack", "own key", "hidden"])
async def test_object_that_was_named_again_since_it_was_found_dead_waits_for_another_grace_period(
    clock: Clock, where: str, waits: bool
) -> None:
    """A node that had not heard of the removal has renamed the file, and another one has removed that name."""
    store, options = MemoryStore(), GcArgs(grace_s=3600, uploads_older_s=0, wait=waits)
    store.clock = clock
    if where == "pack":
        key = give_pack(store, clock, {"name": b"bytes"})
        offset = store.data(key).index(b"bytes")
    else:
        key, offset = "first" if where == "own key" else f"{OBJECTS}{1:032x}", 0
        store.give(key, b"bytes")
    ref = ObjectRef(key, store.objects[key][1].etag, len(store.data(key)))

    def give(path: str) -> None:
        clock.advance(60)
        hides = ref.etag if where == "own key" else ""
        put = Put(path, 1, offset, 5, 0o600, 0, 0, 0)
        give_commit(store, clock, put, Remove("first", hides=hides), objects=(ref,), writer="0badcafd")
        clock.advance(60)
        give_commit(store, clock, Remove(path))

    async def sleep(seconds: float) -> None:
        clock.advance(seconds - 600)
        give("late")
        clock.advance(480)

    give("name")
    clock.advance(60)
    async with headless(store, clock) as view:
        await Collector(view, options, fold=partial(fold_all, view), report=silent, sleep=sleep).run()
    if not waits:
        await sleep(3601)
        await collect(store, clock, GcArgs(grace_s=3600, uploads_older_s=0))
    assert key in store.objects
    clock.advance(60)
    await collect(store, clock, GcArgs(grace_s=3600, uploads_older_s=0))
    assert key in store.objects
    clock.advance(3600)
    await collect(store, clock, GcArgs(grace_s=3600, uploads_older_s=0))
    assert key not in store.objects


async def test_a_dry_run_changes_nothing(store: MemoryStore, clock: Clock) -> None:
    store.give("data/left", b"over")
    etag = store.objects["data/left"][1].etag
    clock.advance(5)
    give_commit(store, clock, Remove("data/left", hides=etag), writer="0badcaff")
    clock.advance(5)
    before = dict(store.objects)
    done = await collect(store, clock, GcArgs(grace_s=0, dry_run=True))
    assert (done.packs_rewritten, done.plain.objects) == (3, 1)
    assert done.bytes_later > 3 * 20 * 2000
    assert store.objects == before


async def test_leftovers_go_and_what_others_put_stays(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    given = {
        name: store.give(name, name.encode()) for name in ("removed", "packed", "replaced", "again", "own", "used")
    }
    clock.advance(10)
    etags = {name: meta.etag for name, meta in given.items()}
    give_commit(
        store, clock,
        Remove("removed", hides=etags["removed"]),
        Remove("replaced", hides=etags["replaced"]),
        Remove("used", hides=etags["used"]),
        Put("elsewhere", 1, 0, 4, 0o600, 0, 0, 0),
        Put("own", OWN, 0, 3, 0o600, 0, 0, 0, hides=etags["own"]),
        Put("packed", 2, 0, 4, 0o600, 0, 0, 0, hides=etags["packed"]),
        objects=(ObjectRef("used", etags["used"], 4), ObjectRef("again", etags["again"], 5)),
        writer="0badcaff",
    )  # fmt: skip
    clock.advance(10)
    store.give("replaced", b"by others")
    clock.advance(50)
    await collect(store, clock, GcArgs(grace_s=3600))
    assert plain(store) == sorted(given)
    clock.advance(3600)
    done = await collect(store, clock, GcArgs(grace_s=3600))
    assert done.plain.objects == 2
    assert plain(store) == ["again", "own", "replaced", "used"]
    expected = LEFT | {
        "again": b"again", "own": b"own", "replaced": b"by others", "elsewhere": b"used", "packed": b"agai",
    }  # fmt: skip
    assert await fresh(store, clock, tmp_path) == expected


async def test_objects_that_nothing_refers_to_and_uploads_go_when_they_are_days_old(
    store: MemoryStore, clock: Clock
) -> None:
    store.give(".lakefs/objects/lost", b"lost")
    used = store.give(".lakefs/objects/used", b"used")
    give_commit(
        store, clock, Put("file", 1, 0, 4, 0o600, 0, 0, 0), objects=(ObjectRef(used.key, used.etag, 4),),
        writer="0a0a0a0a",
    )  # fmt: skip
    store.create_multipart("upload")
    clock.advance(6 * 86400)
    assert (await collect(store, clock)).uploads_aborted == 0
    store.create_multipart("young")
    clock.advance(86401)
    done = await collect(store, clock)
    assert (done.uploads_aborted, done.unreferenced.objects) == (1, 1)
    assert [upload.key for upload in store.uploads.values()] == ["young"]
    assert [key for key in store.objects if key.startswith(".lakefs/objects/")] == [".lakefs/objects/used"]


async def test_objects_with_other_etags_than_names_have_stay_until_the_lake_is_rebound(
    clock: Clock, tmp_path: Path
) -> None:
    """Another tool has copied or encrypted the lake."""
    store = MemoryStore()
    async with lake(store, tmp_path / "node", clock=clock, pack="never") as node:
        await node.write("first", b"bytes")
        await node.fs.clone("first", "copy")
        await node.fs.sync_names()
    give_pack(store, clock, {"packed": b"packed"})
    clock.advance(600)
    await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs())
    for key in [key for key in store.objects if key.startswith((OBJECTS, COMMITS))]:
        store.give(key, store.data(key))
    for _ in range(3):
        clock.advance(8 * 86400)
        await run_gc(work_of(store, clock, tmp_path), GcArgs())
    assert [key for key in store.objects if key.startswith(OBJECTS)]
    await run_fsck(work_of(store, clock, tmp_path), FsckArgs(rebind=True, quick=True))
    clock.advance(10)
    assert await fresh(store, clock, tmp_path) == {"first": b"bytes", "copy": b"bytes", "packed": b"packed"}


@pytest.mark.parametrize("how", ["clone", "rename"])
async def test_object_whose_last_name_has_just_ended_stays_for_nodes_that_rename_it(
    clock: Clock, tmp_path: Path, how: str
) -> None:
    """Object and key are old; one node removes the name, and another, which has not heard of that, renames it."""
    store, data = MemoryStore(), b"bytes"
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=300.0) as (one, two):
        await one.write("first", data)
        await (one.fs.clone("first", "name") if how == "clone" else one.rename("first", "name"))
        await one.fs.sync_names()
        clock.advance(8 * 86400)
        await one.poll()
        await two.poll()
        await one.unlink("name")
        await one.fs.sync_names()
        clock.advance(5)
        done = await collect(store, clock, GcArgs(grace_s=3600))
        assert (done.plain.objects, done.unreferenced.objects, done.later.objects) == (0, 0, 1)
        await two.rename("name", "other")
        await two.fs.sync_names()
    expected = {"other": data} | ({"first": data} if how == "clone" else {})
    assert await fresh(store, clock, tmp_path) == expected
    async with mounted(store, clock, tmp_path / "last") as node:
        clock.advance(3600)
        assert not (await collect(store, clock, GcArgs(grace_s=3600))).later.objects
        await give_removal(node, "other")
    done = await collect(store, clock, GcArgs(grace_s=3600, wait=True))
    assert done.plain.objects + done.unreferenced.objects == 1


async def give_removal(node: Lake, path: str) -> None:
    """The name goes, and the node leaves the object to `gc`."""
    node.parts.deletions.add = lambda *_: None  # type: ignore[method-assign]
    await node.unlink(path)
    await node.fs.sync_names()


async def test_spilled_parts_of_dead_nodes_go_when_they_are_days_old(store: MemoryStore, clock: Clock) -> None:
    store.give(".lakefs/staging/0123/4-0", b"of a dead node")
    clock.advance(6 * 86400)
    assert (await collect(store, clock)).unreferenced.objects == 0
    store.give(".lakefs/staging/4567/0-0", b"of one that lives")
    clock.advance(86401)
    assert (await collect(store, clock)).unreferenced.objects == 1
    assert [key for key in store.objects if key.startswith(".lakefs/staging/")] == [".lakefs/staging/4567/0-0"]


async def test_a_commit_that_cannot_be_read_keeps_all(store: MemoryStore, clock: Clock) -> None:
    damaged = commits(store)[1]
    data = store.data(damaged)
    store.give(damaged, data[:-40])
    done = await collect(store, clock)
    assert (done.commits_deleted, done.unreadable) == (0, 1)
    assert set(commits(store)) >= {damaged}
    store.give(damaged, data)
    assert (await collect(store, clock)).commits_deleted == 4


async def test_grace_periods_go_on_while_a_commit_cannot_be_read(store: MemoryStore, clock: Clock) -> None:
    etag = store.give("removed", b"removed").etag
    clock.advance(10)
    give_commit(store, clock, Remove("removed", hides=etag), writer="0badcaff")
    clock.advance(10)
    hour = GcArgs(grace_s=3600)
    first = await collect(store, clock, hour)
    assert (first.commits_later, first.later.objects) == (5, 1)
    clock.advance(1800)
    unreadable = store.give(commit_key(clock(), "0badcafd"), b"unreadable").key
    assert (await collect(store, clock, hour)).unreadable == 1
    assert len(commits(store)) == 7 and "removed" in store.objects
    store.take(unreadable)
    clock.advance(1801)
    done = await collect(store, clock, hour)
    assert (done.commits_deleted, done.plain.objects) == (5, 1)


async def test_commits_that_came_too_late_stay(store: MemoryStore, clock: Clock) -> None:
    """Whoever folded the index did not see them, so nobody knows whether they count."""
    async with headless(store, clock) as view:
        await fold_all(view, 0)
    late = Clock(clock() - 90_000 * 10**9)
    keys = {
        give_pack(store, late, {"late": b"late"}, writer="0badcafd"),
        give_commit(store, late, Remove("other"), writer="0badcaff"),
    }
    done = await collect(store, clock)
    assert (done.commits_deleted, done.late) == (4, 2)
    assert keys < set(commits(store))


async def test_removal_of_bytes_that_were_put_again_and_deleted_by_another_client_is_collected(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    store.equal_bytes_have_equal_etags = True
    etag = store.give("again", b"bytes").etag
    clock.advance(10)
    removal = give_commit(store, clock, Remove("again", hides=etag), writer="0badcaff")
    clock.advance(10)
    store.give("again", b"bytes")
    put = Put("again", OWN, 0, 5, 0o600, 0, 0, 0, hides=etag, dated_s=clock() // NS)
    clock.advance(1)
    give_commit(store, clock, put, writer="0badcafd")
    clock.advance(60)
    await run_snapshot(work_of(store, clock, tmp_path, seed=1), SnapshotArgs())
    store.take("again")
    clock.advance(60)
    await run_snapshot(work_of(store, clock, tmp_path, seed=2), SnapshotArgs())
    assert (await collect(store, clock)).late == 0
    assert removal not in store.objects
    assert await fresh(store, clock, tmp_path) == LEFT


async def test_mount_that_ended_before_a_late_commit_was_visible_has_it_after_its_collection(
    clock: Clock, tmp_path: Path
) -> None:
    """It was visible five seconds after its time, the newest commit of the lake before that."""
    store = MemoryStore()
    give_pack(store, clock, dataset(3))
    clock.advance(200)
    late_ns = clock()
    clock.advance(4)
    give_commit(store, clock, Mkdir("seen", 0o750, 1, 2, 0), writer="00000001")
    async with lake(store, tmp_path / "node", clock=clock) as node:
        assert "seen" in await node.tree()
    give_commit(store, Clock(late_ns), Mkdir("late", 0o750, 1, 2, 0))
    clock.advance(200)
    for _ in range(2):
        await run_gc(work_of(store, clock, tmp_path), NOW)
        clock.advance(1)
    assert len(commits(store)) == 1
    async with lake(store, tmp_path / "node", clock=clock) as node:
        assert {"late", "seen"} <= (await node.tree()).keys()


async def test_mount_that_slept_through_a_collection_has_the_right_names_at_its_next_mount(
    clock: Clock, tmp_path: Path
) -> None:
    """Removals that it has never seen were collected an hour after they were found dead. It polls for a while since."""
    store = MemoryStore()
    give_pack(store, clock, dataset(3))
    async with lake(store, tmp_path / "node", clock=clock) as node:
        before = (await node.tree()).keys()
        clock.advance(200)
        give_commit(store, clock, Mkdir("new", 0o750, 1, 2, 0), *map(Remove, dataset(3)))
        for _ in range(2):
            clock.advance(3700)
            await run_gc(work_of(store, clock, tmp_path), GcArgs(grace_s=3600))
        assert not commits(store)
        give_commit(store, clock, Mkdir("newer", 0o750, 1, 2, 0))
        for _ in range(2):
            await node.poll()
            clock.advance(200)
        assert (await node.tree()).keys() == {"newer"} | before
    async with lake(store, tmp_path / "node", clock=clock) as node:
        assert (await node.tree()).keys() == {"new", "newer"}


async def test_a_damaged_file_stays_where_it_is(store: MemoryStore, clock: Clock) -> None:
    """Its bytes are not blessed with a new CRC."""
    pack = commits(store)[0]
    data = store.data(pack)
    at = data.index(FILES["data/0002"])
    store.give(pack, data[:at] + b"\0\0\0" + data[at + 3 :])
    done = await collect(store, clock)
    assert (done.moved.files, done.moved.damaged) == (29, 1)
    assert pack in commits(store)


def _from(number: int) -> Callable[[Request], bool]:
    seen = [0]

    def matches(_request: Request) -> bool:
        seen[0] += 1
        return seen[0] > number

    return matches


@pytest.mark.parametrize("when", ["before", "after"])
async def test_killed_at_any_request_and_run_again(store: MemoryStore, clock: Clock, tmp_path: Path, when: str) -> None:
    """A mount that was there all the time, and one that comes after, find every file."""
    every = sized(19, 1)
    leftover = store.give("left", b"over")
    clock.advance(5)
    give_commit(store, clock, Remove("left", hides=leftover.etag), writer="0badcaff")
    clock.advance(5)
    original, at, ended = dict(store.objects), 0, False
    while not ended:
        store.objects = dict(original)
        async with mounted(store, clock, tmp_path / f"node-{at}") as node:
            store.hook = Failures(_from(at), StoreError("killed"), count=10**9, when=when)  # type: ignore[arg-type]
            try:
                await collect(store, clock)
                ended = True
            except StoreError:
                pass
            store.hook = lambda _request, _when: None
            clock.advance(5)
            await node.poll()
            assert await contents(node) == LEFT, f"request {at}"
        assert await fresh(store, clock, tmp_path) == LEFT, f"request {at}"
        await collect(store, clock)
        assert (len(commits(store)), plain(store)) == (1, [])
        assert await fresh(store, clock, tmp_path) == LEFT, f"request {at}, second run"
        at += every
    assert at > 15


async def test_the_note_of_the_last_run_is_read(store: MemoryStore, clock: Clock) -> None:
    await collect(store, clock, GcArgs(grace_s=3600))
    async with headless(store, clock) as view:
        note = await GcRecordReader(view.client).read()
        assert len(note.dead) == 4
        assert note.horizon > max(int(key.split("/")[-1][:16], 16) for key in note.dead)
        key = next(key for key in store.objects if key.startswith(RECORDS))
        store.give(key, b"\xff damaged")
        assert await GcRecordReader(view.client).read() == GcRecord(horizon=note.horizon)


def test_note_with_as_much_as_it_may_have_can_be_read() -> None:
    def size_of_each(make: Callable[[int], GcRecord]) -> float:
        return (len(msgspec.msgpack.encode(make(1001))) - len(msgspec.msgpack.encode(make(1)))) / 1000

    dead = size_of_each(lambda count: GcRecord(dead={commit_key(2**60 + n, "0badcafe"): 2**60 for n in range(count)}))
    unreferenced = size_of_each(
        lambda count: GcRecord(unreferenced={f"{n:01024}": ("0" * 36, 2**60) for n in range(count)})
    )
    assert DEAD_MAX * dead + UNREFERENCED_MAX * unreferenced < RECORD_BYTES_MAX - 1000


async def test_more_dead_commits_than_a_note_has_room_for_are_deleted_by_later_runs(
    store: MemoryStore, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that have waited for a part of their grace period go on waiting, also where older ones die."""
    hour, oldest = GcArgs(grace_s=3600, live_below=0), commits(store)[0]
    monkeypatch.setattr(gc, "DEAD_MAX", 2)
    give_commit(store, clock, *(Remove(path) for path in list(FILES)[20:]))
    clock.advance(600)
    assert (await collect(store, clock, hour)).commits_deleted == 0
    async with headless(store, clock) as view:
        first = (await GcRecordReader(view.client).read()).dead
    assert len(first) == 2
    assert oldest not in first
    give_commit(store, clock, *(Remove(path) for path in list(FILES)[:20]), writer="0badcaff")
    for expected in (0, 2, 0, 2, 0, 2):
        assert (await collect(store, clock, hour)).commits_deleted == expected
        clock.advance(3601)
    assert not set(first) & set(store.objects)
    assert commits(store) == []
    assert await fresh(store, clock, tmp_path) == {}


async def test_note_is_fetched_once_for_all_batches(
    store: MemoryStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gc, "DELETE_KEYS_MAX", 1)
    await collect(store, clock, GcArgs(grace_s=3600))
    clock.advance(3601)
    store.requests.clear()
    assert (await collect(store, clock, GcArgs(grace_s=3600))).commits_deleted == 4
    fetched = [request.key for request in store.requests if request.what == "get" and request.key.startswith(RECORDS)]
    assert len(fetched) == len(set(fetched)) <= 2


async def test_index_after_packs_were_deleted_has_no_rows_of_them(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await collect(store, clock)
    for _ in range(2):
        clock.advance(60)
        give_commit(store, clock, Remove("nothing"))
        assert (await collect(store, clock)).folded
    (left,) = commits(store)
    async with headless(store, clock, lists=False) as view:
        assert [row.key for row in view.tree.objects.rows()] == [left]
        assert view.tree.objects.packs == 1
    assert await fresh(store, clock, tmp_path) == LEFT


async def test_note_whose_older_one_may_not_be_deleted_names_the_permission(store: MemoryStore, clock: Clock) -> None:
    async with headless(store, clock) as view:
        await write_gc_record(view.client, GcRecord(horizon=1), 1)
        store.hook = Failures(lambda request: request.what == "delete", AccessDenied("may not delete"))
        with pytest.raises(LakeError, match=r"refused for 1 object .*may not delete.*maintainer\.json"):
            await write_gc_record(view.client, GcRecord(horizon=2), 2)
        assert (await GcRecordReader(view.client).read()).horizon == 2
        store.hook = lambda _request, _when: None
        await write_gc_record(view.client, GcRecord(horizon=1), 3)
        assert await read_horizon(view.client) == 2, "it never decreases"


def reviving(store: MemoryStore, clock: Clock, pack: str, *, when: Callable[[Request], bool]) -> list[str]:
    """Have a node that knows of no removal rename a file of a pack right before a request; answers its name."""
    name: list[str] = []
    path = GONE[0]
    raw = store.data(pack)
    ref = ObjectRef(pack, store.objects[pack][1].etag, len(raw))
    offset = raw.index(FILES[path])

    def hook(request: Request, moment: When) -> None:
        if moment == "before" and not name and when(request):
            name.append("renamed")
            clock.advance(7200)
            put = Put("renamed", 1, offset, len(FILES[path]), 0o600, 0, 0, 0)
            give_commit(store, clock, put, objects=(ref,), writer="0badcaff")

    store.hook = hook
    return name


async def test_gc_stopped_before_deleting_looks_again(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """A commit of meanwhile refers to a pack that was dead when it was looked at for the first time."""
    pack = commits(store)[0]
    notes: list[Request] = []

    def second_look(request: Request) -> bool:
        notes.extend([request] if request.what == "list" and request.key == RECORDS else [])
        return len(notes) == 3  # at the beginning, when it is written, and before the batch

    named = reviving(store, clock, pack, when=second_look)
    done = await collect(store, clock)
    assert named == ["renamed"]
    assert done.commits_deleted == 3
    assert pack in commits(store)
    clock.advance(10)
    assert await fresh(store, clock, tmp_path) == LEFT | {"renamed": FILES[GONE[0]]}


async def test_gc_without_its_note_deletes_nothing(store: MemoryStore, clock: Clock) -> None:
    """Another run has seen since that what was dead is not."""

    def forget(request: Request, when: When) -> None:
        if when == "after" and request.what == "put" and request.key.startswith(RECORDS):
            store.give(f"{RECORDS}{2**62:016x}", msgspec.msgpack.encode(GcRecord(horizon=1)))

    store.hook = forget
    before = commits(store)
    assert (await collect(store, clock)).commits_deleted == 0
    assert set(before) <= set(commits(store))


async def test_gc_without_an_index_deletes_nothing(store: MemoryStore, clock: Clock) -> None:
    """A mount that is behind could not learn what the deleted commits said."""

    def remove(request: Request, when: When) -> None:
        if when == "after" and request.what == "put" and request.key.startswith(RECORDS):
            for key in [key for key in store.objects if key.startswith(".lakefs/index/")]:
                store.take(key)

    store.hook = remove
    before = commits(store)
    assert (await collect(store, clock)).commits_deleted == 0
    assert set(before) <= set(commits(store))


class StoppingClock(Clock):
    """100 s pass before each time that is read, as long as ``is_stopping``: the process is stopped again and again."""

    def __init__(self, is_stopping: Callable[[], bool]) -> None:
        super().__init__()
        self._is_stopping, self._stopped_s = is_stopping, 0.0

    def mono_s(self) -> float:
        self._stopped_s += 100.0 if self._is_stopping() else 0.0
        return self._stopped_s


async def test_gc_stopped_while_looking_looks_once_more(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """It was stopped between a look and the request that deletes."""
    looks: list[Request] = []
    stopping = StoppingClock(lambda: len(looks) < 12)
    stopping.now_ns = clock.now_ns

    def look(request: Request, when: When) -> None:
        looks.extend([request] if (request.what, request.key, when) == ("list", COMMITS, "before") else [])

    store.hook = look
    async with headless(store, stopping) as view:
        done = await Collector(view, NOW, fold=partial(fold_all, view), report=silent).run()
    assert len(looks) >= 12
    assert done.commits_deleted == 4
    assert await fresh(store, stopping, tmp_path) == LEFT


async def test_gc_whose_looks_all_take_too_long_ends_and_deletes_nothing(store: MemoryStore, clock: Clock) -> None:
    stopping, before = StoppingClock(lambda: True), commits(store)
    stopping.now_ns = clock.now_ns
    async with headless(store, stopping) as view:
        with pytest.raises(LakeError, match=r"takes 100 s, and 60 s at most are allowed"):
            await Collector(view, NOW, fold=partial(fold_all, view), report=silent).run()
    assert set(before) <= set(commits(store))


async def test_bundles_and_digests_of_commits_that_an_index_has_are_deleted(store: MemoryStore, clock: Clock) -> None:
    def give_bundle(*keys: str) -> str:
        return store.give(bundle_key([Copy(key, "", b"") for key in keys], MIXED), b"copies").key

    def give_digest(commit: str) -> str:
        time = int(commit.removeprefix(COMMITS)[:16], 16)
        return store.give(digest_key(time, MIXED, time, 0), b"digest").key

    old = [*(give_bundle(*commits(store)[at : at + 2]) for at in (0, 1)), give_digest(commits(store)[0])]
    await collect(store, clock, GcArgs(grace_s=0, dry_run=True))
    await collect(store, clock, GcArgs(grace_s=0, live_below=0.0))
    assert set(old) <= set(store.objects), "no index has these commits"
    give_pack(store, clock, {"later": b"later"})
    async with headless(store, clock) as view:
        await fold_all(view, 0)
    clock.advance(3600)
    pack = give_pack(store, clock, {"new": b"new"})
    new = {give_bundle(pack), give_digest(pack)}
    await collect(store, clock, GcArgs(grace_s=0, live_below=0.0))
    assert {key for key in store.objects if key.endswith((SUFFIX, DIGEST_SUFFIX))} == new


async def test_gc_folds_what_changed_without_listing_directories(clock: Clock, tmp_path: Path) -> None:
    """And reads no commit that an index has, whose listings stay as old as they are."""
    store = MemoryStore()
    for number in range(1500):
        store.give(f"plain/{number % 30:02d}/{number:04d}", b"plain")
    store.clock = clock
    give_pack(store, clock, {f"data/{number}": b"data" for number in range(100)})
    await run_snapshot(work_of(store, clock, tmp_path, seed=1), SnapshotArgs())
    async with headless(store, clock, lists=False) as view:
        before = list(view.tree.listings())
    assert len(before) == 33
    clock.advance(86400)
    new = give_commit(store, clock, Remove("data/7"))
    store.requests.clear()
    done = await run_gc(work_of(store, clock, tmp_path, seed=2), GcArgs())
    assert done.summary["folded"]
    asked = [request for request in store.requests if request.what == "list" and not request.key.startswith(".lakefs/")]
    assert len(asked) == 2, "pages of one listing of everything"
    assert {request.key for request in store.requests if request.what == "get" and COMMITS in request.key} == {new}
    async with headless(store, clock, lists=False) as view:
        assert list(view.tree.listings()) == before
        assert view.find("plain/07/0007") is not None
        assert view.find("data/7") is None
