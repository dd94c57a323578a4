"""`pack` and `unpack`: every byte stays where a reader finds it, whatever happens in between."""

from __future__ import annotations

import errno
import threading
import zipfile
from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

import pytest
import trio

from lakefs_fuse.admin import relocation, repack
from lakefs_fuse.admin.commands import run_gc
from lakefs_fuse.admin.repack import Packed, Unpacked
from lakefs_fuse.admin.snapshot import fold
from lakefs_fuse.commits.archive import ArchiveBuilder
from lakefs_fuse.commits.hybrid_clock import LATE_NS, WINDOW_NS
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.record import COMMITS, OBJECTS, ObjectRef, Put, Remove
from lakefs_fuse.config import DELETE_AFTER_S
from lakefs_fuse.control.worker_protocol import GcArgs, PackArgs
from lakefs_fuse.errors import LakeError, StoreError
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.client import copied_metadata, copy_metadata
from tests.admin.lakes import commits, dataset, give_commit, give_pack, headless, plain, silent, work_of
from tests.memory_store import Failures, MemoryStore, Pause, Request, When
from tests.tiers import sized
from tests.upload.drafting import noise
from tests.vfs.lakes import NS, TTL_S, Clock, Lake, held_fresh, lake, two_lakes
from tests.vfs.writing_back import rewrite, until

PUTS = ("put", "copy", "complete_multipart")
FILES = dataset(30) | dataset(10, "data/deep/er") | {"top": b"at the top", "data/empty": b""}


async def pack(
    store: MemoryStore,
    clock: Clock,
    path: str = "",
    *,
    grace_s: float = 0.0,
    threshold_bytes: int = 1 << 20,
    dry_run: bool = False,
    while_waiting: Callable[[], None] = lambda: None,
) -> Packed:
    async def sleep(seconds: float) -> None:
        while_waiting()
        clock.advance(seconds)

    async with headless(store, clock) as view:
        return await repack.pack(
            view, path, grace_s=grace_s, threshold_bytes=threshold_bytes, dry_run=dry_run, report=silent, sleep=sleep
        )


async def unpack(
    store: MemoryStore, clock: Clock, path: str = "", *, packed: bool = True, dry_run: bool = False
) -> Unpacked:
    notes: list[str] = []
    async with headless(store, clock) as view:
        done = await repack.unpack(view, path, packed=packed, dry_run=dry_run, report=silent, note=notes.append)
    assert len(notes) == done.left
    return done


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    made = MemoryStore()
    made.clock = clock
    for key, data in FILES.items():
        made.give(key, data, {"mode": str(0o100600), "mtime": "1234.5", "uid": "7"})
    clock.advance(60)
    return made


async def contents(mounted: Lake) -> dict[str, object]:
    return {path: data for path, data in (await mounted.tree()).items() if data is not None}


async def fresh(store: MemoryStore, clock: Clock, tmp_path: Path) -> dict[str, object]:
    async with lake(store, tmp_path / f"fresh-{clock()}-{len(store.requests)}", clock=clock) as mounted:
        return await contents(mounted)


async def test_all_into_one_pack_and_back(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    done = await pack(store, clock)
    assert (done.moved.files, done.moved.packs, done.moved.left) == (len(FILES), 1, 0)
    assert done.swept.objects == len(FILES)
    assert plain(store) == []
    with zipfile.ZipFile(BytesIO(store.data(commits(store)[0]))) as archive:
        assert archive.testzip() is None
        names = [name for name in archive.namelist() if name != ".lakefs/record"]
    assert sorted(names) == sorted(FILES)
    assert [name for name in names if name.startswith("data/0")] == sorted(dataset(30))
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        assert await contents(mounted) == FILES
        entry = await mounted.getattr("data/0003")
        assert (entry.mode, entry.uid, entry.mtime_ns) == (0o600, 7, 1_234_500_000_000)
    clock.advance(5)
    back = await unpack(store, clock)
    assert (back.files, back.left) == (len(FILES), 0)
    assert {key: store.data(key) for key in plain(store)} == FILES
    assert store.metadata("data/0003")["mode"] == str(0o100600)
    async with lake(store, tmp_path / "other", clock=clock) as mounted:
        assert await contents(mounted) == FILES
        entry = await mounted.getattr("data/0003")
        assert (entry.mode, entry.uid, entry.mtime_ns) == (0o600, 7, 1_234_500_000_000)
        assert mounted.fs.namespace.tree.objects.bytes_live == 0


async def test_a_mount_reads_through_both(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        await mounted.names("data")
        handle = await mounted.open("data/0001")
        inode = (await mounted.found("data/0001")).inode
        await pack(store, clock, "data")
        assert await mounted.read_handle(handle) == FILES["data/0001"]
        assert (await mounted.found("data/0001")).inode == inode
        assert await mounted.read("data/0002") == FILES["data/0002"]
        clock.advance(200)
        assert await mounted.names("data") == [f"{number:04d}" for number in range(30)] + ["deep", "empty"]
        await unpack(store, clock, "data")
        await mounted.poll()
        assert await mounted.read_handle(handle) == FILES["data/0001"]
        assert (await mounted.found("data/0001")).inode == inode
        await mounted.close(handle)
        assert await contents(mounted) == FILES


async def test_only_what_is_asked_for(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    store.give("data/large", bytes(5000))
    assert (await pack(store, clock, "data/deep")).moved.files == 10
    assert (await pack(store, clock, "data/0005")).moved.files == 1
    assert (await pack(store, clock, "data", threshold_bytes=4000)).moved.files == 30
    assert plain(store) == ["data/large", "top"]
    with pytest.raises(LakeError, match="nowhere"):
        await pack(store, clock, "nowhere")
    assert (await unpack(store, clock, "data/deep/er/0001")).files == 1
    assert plain(store) == ["data/deep/er/0001", "data/large", "top"]
    assert (await fresh(store, clock, tmp_path)) == FILES | {"data/large": bytes(5000)}


async def test_a_dry_run_changes_nothing(store: MemoryStore, clock: Clock) -> None:
    before = dict(store.objects)
    done = await pack(store, clock, dry_run=True)
    assert (done.moved.files, done.swept.objects) == (len(FILES), 0)
    assert store.objects == before
    await pack(store, clock)
    before = dict(store.objects)
    assert (await unpack(store, clock, dry_run=True)).files == len(FILES)
    assert store.objects == before


async def test_objects_stay_for_the_grace_period(store: MemoryStore, clock: Clock) -> None:
    seen: list[int] = []
    done = await pack(store, clock, grace_s=30, while_waiting=lambda: seen.append(len(plain(store))))
    assert seen[0] == len(FILES)
    assert done.swept.objects == len(FILES)
    assert plain(store) == []


async def test_pack_leaves_objects_that_a_mount_superseded_to_it(clock: Clock, tmp_path: Path) -> None:
    """A mount that has not seen that yet gives one another name."""
    store = MemoryStore()
    store.clock = clock
    async with (
        lake(store, tmp_path / "one", clock=clock, delete_after_s=DELETE_AFTER_S) as one,
        lake(store, tmp_path / "two", clock=clock, delete_after_s=DELETE_AFTER_S) as two,
    ):
        await one.mkdir("d")
        await one.write("d/a", b"before" * 100)
        await one.write("d/t", b"after" * 100)
        await one.write("d/small", b"packed")
        await one.fs.sync_names()
        await two.names("d")
        clock.advance(5)
        await two.poll()
        await one.rename("d/t", "d/a")
        clock.advance(1)
        assert (await pack(store, clock, threshold_bytes=10, grace_s=30)).swept.objects == 1
        assert plain(store) == ["d/a", "d/t"]
        with held_fresh(two):
            await two.rename("d/a", "d/b")
        await two.sync()
        assert (await fresh(store, clock, tmp_path))["d/b"] == b"before" * 100


async def test_packed_objects_stay_as_long_as_those_that_mounts_supersede(store: MemoryStore, clock: Clock) -> None:
    slept_s: list[float] = []

    async def sleep(seconds: float) -> None:
        slept_s.append(seconds)
        clock.advance(seconds)

    async with headless(store, clock) as view:
        await repack.pack(view, "data/0001", grace_s=PackArgs().grace_s, report=silent, sleep=sleep)
    assert slept_s[0] == repack.GRACE_S == DELETE_AFTER_S


async def test_full_disk_while_a_pack_is_finished_names_the_remedy(
    store: MemoryStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def finish(self: ArchiveBuilder, record: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ArchiveBuilder, "finish", finish)
    with pytest.raises(LakeError, match="TMPDIR"):
        await pack(store, clock)


async def test_what_others_replace_meanwhile_is_theirs(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    def hook(request: Request, when: str) -> None:
        if when == "after" and request.what == "get" and request.key in ("data/0003", "data/0004"):
            store.give(request.key, b"theirs")
        if when == "after" and request.what == "put":
            store.give("data/0005", b"theirs, too")

    store.hook = hook
    done = await pack(store, clock)
    store.hook = lambda _request, _when: None
    assert done.moved.left == 2
    clock.advance(5)
    expected = FILES | {"data/0003": b"theirs", "data/0004": b"theirs", "data/0005": b"theirs, too"}
    assert await fresh(store, clock, tmp_path) == expected
    assert plain(store) == ["data/0003", "data/0004", "data/0005"]


async def test_an_object_in_place_of_packed_bytes_waits_for_its_commit(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    give_pack(store, clock, {"data/0001": b"older", "data/deep/new": b"packed"})
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        assert await mounted.read("data/deep/new") == b"packed"
        clock.advance(60)
        store.give("data/deep/new", b"of another program")
        clock.advance(1)
        done = await pack(store, clock, "data/deep")
        assert (done.moved.files, done.moved.left) == (10, 1)
        await mounted.poll()
        clock.advance(200)
        assert await mounted.read("data/deep/new") == b"of another program"
        await until(lambda: mounted.commits()["written"] == 1)
    assert (await fresh(store, clock, tmp_path))["data/deep/new"] == b"of another program"
    assert (await pack(store, clock, "data/deep")).moved.files == 1
    assert (await fresh(store, clock, tmp_path))["data/deep/new"] == b"of another program"
    assert "data/deep/new" not in plain(store)


class ChecksBeforeCommit:
    """A hook that calls ``act`` with each LIST of a directory that is to be packed, after its files were read."""

    def __init__(self, act: Callable[[Request], object]) -> None:
        self._act, self._is_reading = act, False

    def __call__(self, request: Request, when: str) -> None:
        is_plain = not request.key.startswith(RESERVED_PREFIX)
        self._is_reading |= request.what == "get" and is_plain
        if self._is_reading and (request.what, when) == ("list", "before") and is_plain and request.key:
            self._act(request)


@pytest.mark.parametrize("late_commits", [1, 2])
async def test_commit_that_checks_made_late_is_repeated_until_one_is_in_time(
    store: MemoryStore, clock: Clock, tmp_path: Path, late_commits: int
) -> None:
    """Another node commits meanwhile, and polls of a mount are past the times of the first ones."""
    late: list[str] = []
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        assert await contents(mounted) == FILES
        token = trio.lowlevel.current_trio_token()

        def pass_time(request: Request) -> None:
            if request.key == "data/deep/er/" and len(late) < late_commits:
                late.append(request.key)
                clock.advance((WINDOW_NS + LATE_NS) / NS)
                give_commit(store, clock, Remove("nothing"), writer="0badcaff")
                trio.from_thread.run(mounted.poll, trio_token=token)

        store.hook = ChecksBeforeCommit(pass_time)
        done = await pack(store, clock)
        store.hook = lambda _request, _when: None
        assert len(late) == late_commits
        assert (done.moved.files, done.moved.packs, plain(store)) == (len(FILES), 1, [])
        assert len(commits(store)) == late_commits + 1 + late_commits
        await mounted.poll()
        clock.advance(TTL_S + 1)
        assert await contents(mounted) == FILES
    assert await fresh(store, clock, tmp_path) == FILES


@pytest.mark.parametrize("is_begun", [False, True])
@pytest.mark.parametrize("how", ["removed", "renamed"])
async def test_directory_that_goes_while_the_lake_is_packed_does_not_end_it(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, is_begun: bool
) -> None:
    monkeypatch.setattr(relocation, "PACK_FILES_MAX", 5)
    """A directory that is yet to be listed, or the one whose files are moved."""
    store, files = MemoryStore(), dataset(4 if is_begun else 8, "a") | dataset(9, "b/c") | dataset(3, "d")
    for path, data in files.items():
        store.give(path, data)
    clock.advance(60)
    async with lake(store, tmp_path / "node", clock=clock, delete_after_s=1e6) as mounted:
        assert await contents(mounted) == files
        token, gone = trio.lowlevel.current_trio_token(), list[str]()

        async def change() -> None:
            if how == "renamed":
                await mounted.rename("b", "renamed")
            else:
                for path in dataset(9, "b/c"):
                    await mounted.unlink(path)
                await mounted.rmdir("b/c")
                await mounted.rmdir("b")
            await mounted.fs.sync_names()

        def hook(request: Request, when: str) -> None:
            if (request.what, when) == ("put", "before") and request.key.startswith(COMMITS) and not gone:
                gone.append("b")
                trio.from_thread.run(change, trio_token=token)

        store.hook = hook
        done = await pack(store, clock)
        store.hook = lambda _request, _when: None
    assert gone and done.moved.files >= 7
    renamed = {path.replace("b/", "renamed/", 1): data for path, data in files.items()}
    left = {path: data for path, data in files.items() if not path.startswith("b/")}
    assert await fresh(store, clock, tmp_path) == (renamed if how == "renamed" else left)


@pytest.mark.parametrize("late_commits", [1, 2])
async def test_commit_of_unpacked_files_that_was_stored_late_is_repeated(
    clock: Clock, tmp_path: Path, late_commits: int
) -> None:
    """The process was stopped before the PUT; a mount's polls are past its time, and `gc` deletes the pack."""
    store, files = MemoryStore(), {"a": b"bytes of a", "b": b"bytes of b"}
    store.clock = clock
    pack_key = give_pack(store, clock, files)
    clock.advance(600)
    late: list[str] = []
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        assert await mounted.names() == ["a", "b"]
        token = trio.lowlevel.current_trio_token()

        def pass_time(request: Request, when: str) -> None:
            is_commit = (request.what, when) == ("put", "before") and request.key.startswith(COMMITS)
            if is_commit and len(late) < late_commits:
                late.append(request.key)
                clock.advance((WINDOW_NS + LATE_NS) / NS)
                give_commit(store, clock, Remove("nothing"), writer="0badcaff")
                trio.from_thread.run(mounted.poll, trio_token=token)

        store.hook = pass_time
        assert (await unpack(store, clock)).files == 2
        store.hook = lambda _request, _when: None
        assert len(late) == late_commits
        await mounted.poll()
        for _ in range(2):
            clock.advance(3601)
            await run_gc(work_of(store, clock, tmp_path), GcArgs())
        assert pack_key not in store.objects
        await mounted.poll()
        assert await contents(mounted) == files
    assert await fresh(store, clock, tmp_path) == files


async def test_directories_are_listed_concurrently_before_a_commit(clock: Clock) -> None:
    store, directories = MemoryStore(), 8
    for number in range(directories):
        store.give(f"sample-{number}/meta.json", b"{}")
    clock.advance(60)
    both = threading.Barrier(2)
    store.hook = ChecksBeforeCommit(lambda _: both.wait(5))
    assert (await pack(store, clock)).moved.files == directories


async def test_killed_at_any_request_and_run_again(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Nothing is lost, and the second run does what is left."""
    every = sized(31, 3)
    original = dict(store.objects)
    for back in (False, True):
        at, ended = 0, False
        while not ended:
            store.objects = dict(original)
            for when in ("before", "after"):
                store.hook = Failures(_nth(at), StoreError("killed"), when=when)
                try:
                    await (unpack(store, clock, "data") if back else pack(store, clock, "data"))
                    ended = True
                except StoreError:
                    pass
                store.hook = lambda _request, _when: None
                clock.advance(5)
                if at % 5 == 0:
                    assert await fresh(store, clock, tmp_path) == FILES
            await (unpack(store, clock, "data") if back else pack(store, clock, "data"))
            clock.advance(5)
            assert await fresh(store, clock, tmp_path) == FILES
            assert plain(store) == (sorted(FILES) if back else ["top"])
            at += every
        assert at > 9
        original = dict(store.objects)


def _nth(number: int) -> Callable[[Request], bool]:
    seen = [0]

    def matches(_request: Request) -> bool:
        seen[0] += 1
        return seen[0] > number

    return matches


async def test_renamed_objects_are_packed_and_theirs_deleted(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        await mounted.rename("data/deep", "moved")
        await mounted.sync()
    clock.advance(5)
    expected = {path.replace("data/deep", "moved"): data for path, data in FILES.items()}
    assert await fresh(store, clock, tmp_path) == expected
    await pack(store, clock)
    assert plain(store) == []
    clock.advance(5)
    assert await fresh(store, clock, tmp_path) == expected


async def test_old_objects_of_renamed_files_are_looked_at_concurrently(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        await mounted.rename("data/deep", "moved")
        await mounted.sync()
    clock.advance(5)
    both, looked = threading.Barrier(2), list[str]()

    def hook(request: Request, when: str) -> None:
        if (request.what, when) == ("head", "before") and request.key.startswith("data/deep/") and len(looked) < 10:
            looked.append(request.key)
            both.wait(5)

    store.hook = hook
    await pack(store, clock)
    assert len(looked) == 10
    assert plain(store) == []


async def test_pack_leaves_an_object_of_ours_that_a_snapshot_keeps(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    async with lake(store, tmp_path / "node", clock=clock, pack="never", delete_after_s=1e6) as mounted:
        await mounted.rename("top", "kept")
        await mounted.write("top", b"below .lakefs/objects/")
        await mounted.fs.sync_names()
    clock.advance(60)
    async with headless(store, clock) as view:
        await fold(view, name="v1", report=silent)
    (ours,) = [key for key in store.objects if key.startswith(OBJECTS)]
    await pack(store, clock)
    assert ours in store.objects
    async with headless(store, clock) as view:
        assert ours in await snapshots.kept_objects(view.client)


async def test_pack_and_relocate_leave_plain_objects_that_a_snapshot_names(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    async with lake(store, tmp_path / "node", clock=clock, delete_after_s=1e6) as mounted:
        await mounted.rename("data/deep", "moved")
        await mounted.fs.sync_names()
    clock.advance(60)
    async with headless(store, clock) as view:
        await fold(view, name="v1", report=silent)
    named = {key: store.data(key) for key in plain(store)}
    assert len(named) == len(FILES)
    store.give("data/0003", b"replaced since")
    store.give("new", b"put since")
    clock.advance(60)
    done = await pack(store, clock)
    assert (done.moved.files, done.kept, done.swept.objects) == (2, len(FILES) - 1, 2)
    assert "snapshot v1" in done.describe(dry_run=False)
    relocated = await unpack(store, clock, packed=False)
    assert (relocated.files, relocated.left) == (0, 10)
    assert "gc" not in relocated.describe(dry_run=False)
    del named["data/0003"]
    assert {key: store.data(key) for key in plain(store)} == named
    async with headless(store, clock) as view:
        await snapshots.delete(view.client, "v1")
    clock.advance(60)
    relocated = await unpack(store, clock, "moved/er/0000", packed=False)
    assert relocated.describe(dry_run=False).endswith("`lakefs-fuse gc` deletes the objects at the old keys")
    clock.advance(60)
    done = await pack(store, clock)
    assert (done.moved.files, done.kept) == (len(FILES) - 1, 0)
    assert plain(store) == ["data/deep/er/0000"]


async def test_relocate_killed_at_any_request_and_run_again(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    async with lake(store, tmp_path / "node", clock=clock, delete_after_s=1e6) as mounted:
        await mounted.rename("data/deep", "moved")
        await mounted.fs.sync_names()
    clock.advance(600)
    expected = {path.replace("data/deep", "moved"): data for path, data in FILES.items()}
    original, at, ended = dict(store.objects), 0, False
    while not ended:
        for when in ("before", "after"):
            store.objects = dict(original)
            store.hook = Failures(_nth(at), StoreError("killed"), when=when)
            try:
                await unpack(store, clock, packed=False)
                ended = True
            except StoreError:
                pass
            store.hook = lambda _request, _when: None
            clock.advance(5)
            assert await fresh(store, clock, tmp_path) == expected
            await unpack(store, clock, packed=False)
            clock.advance(5)
            assert await fresh(store, clock, tmp_path) == expected
            assert {path for path in expected if path.startswith("moved/")} <= set(plain(store))
        at += sized(7, 1)
    assert at > 7


@pytest.mark.parametrize("fails", ["commit", "completion", "answer of the completion"])
@pytest.mark.parametrize("writer", ["mount", "another client"])
async def test_relocate_names_the_copies_of_a_run_that_failed(
    clock: Clock, tmp_path: Path, writer: str, fails: str
) -> None:
    """Their ETags are others than those of their sources, as they are made in parts."""
    store, data = MemoryStore(), noise(1, 3000)
    store.clock = clock
    async with lake(store, tmp_path / "node", clock=clock, delete_after_s=1e6, pack="never") as node:
        if writer == "mount":
            await node.write("old", data)
        else:
            store.give("old", data)
        clock.advance(600)
        await node.poll()
        await node.rename("old", "new")
        await node.fs.sync_names()
    clock.advance(600)

    def is_due(request: Request) -> bool:
        if fails == "commit":
            return request.what == "put" and request.key.startswith(COMMITS)
        return request.what == "complete_multipart"

    when: When = "after" if fails.startswith("answer") else "before"
    store.hook = Failures(is_due, StoreError("killed"), when=when, count=1)
    with pytest.raises(StoreError):
        await unpack(store, clock, packed=False)
    clock.advance(5)
    done = await unpack(store, clock, packed=False)
    assert (done.files, done.left) == (1, 0)
    async with lake(store, tmp_path / "after", clock=clock) as node:
        entry = await node.getattr("new")
        assert (entry.place, await node.read("new")) == (0, data)


async def test_copy_of_another_version_at_the_key_is_left_by_relocate(clock: Clock, tmp_path: Path) -> None:
    store = MemoryStore()
    store.clock = clock
    async with lake(store, tmp_path / "node", clock=clock, delete_after_s=1e6, pack="never") as node:
        store.give("old", b"bytes")
        clock.advance(600)
        await node.poll()
        await node.rename("old", "new")
        await node.fs.sync_names()
    store.give("new", b"other", {**copy_metadata("new"), **copied_metadata("old", "another ETag")})
    clock.advance(600)
    done = await unpack(store, clock, packed=False)
    assert (done.files, done.left) == (0, 1)
    assert await fresh(store, clock, tmp_path) == {"new": b"bytes"}


async def test_pack_leaves_old_objects_while_a_commit_cannot_be_read(clock: Clock, tmp_path: Path) -> None:
    store = MemoryStore()
    store.clock = clock
    async with lake(store, tmp_path / "node", clock=clock, pack="never", delete_after_s=1e6) as mounted:
        await mounted.write("first", b"bytes")
        await mounted.rename("first", "kept")
        await mounted.fs.sync_names()
    clock.advance(60)
    old = ObjectRef("first", store.objects["first"][1].etag, 5)
    unreadable = give_commit(store, clock, Put("link", 1, 0, 5, 0o600, 0, 0, 0), objects=(old,))
    data = store.data(unreadable)
    store.give(unreadable, data[:-40])
    clock.advance(60)
    done = await pack(store, clock)
    assert (done.moved.files, done.swept.objects) == (1, 0)
    store.give(unreadable, data)
    clock.advance(60)
    assert await fresh(store, clock, tmp_path) == {"kept": b"bytes", "link": b"bytes"}


async def test_pack_leaves_an_object_whose_last_name_ends_during_the_grace_period(clock: Clock, tmp_path: Path) -> None:
    """A node that has not heard of that renames it."""
    store = MemoryStore()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=DELETE_AFTER_S) as (one, two):
        await one.write("first", b"bytes")
        await one.fs.clone("first", "a")
        await one.fs.clone("a", "b")
        await one.fs.sync_names()

        async def sleep(seconds: float) -> None:
            clock.advance(seconds)
            await one.poll()
            await two.poll()
            await one.unlink("b")
            await one.fs.sync_names()
            clock.advance(1)

        async with headless(store, clock) as view:
            done = await repack.pack(view, "a", report=silent, sleep=sleep)
        assert (done.moved.files, done.swept.objects) == (1, 0)
        with held_fresh(two):
            await two.rename("b", "c")
        await two.fs.sync_names()
    assert await fresh(store, clock, tmp_path) == {"first": b"bytes", "a": b"bytes", "c": b"bytes"}


async def test_pack_deletes_an_object_of_several_names_once(clock: Clock, tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "node", clock=clock, pack="never") as mounted:
        await mounted.write("first", b"bytes")
        await mounted.fs.clone("first", "a")
        await mounted.fs.clone("a", "b")
        await mounted.fs.sync_names()
    clock.advance(60)
    done = await pack(store, clock)
    assert (done.moved.files, done.swept.objects, done.swept.bytes) == (3, 2, 10)
    assert not [key for key in store.objects if key.startswith(OBJECTS)]


async def test_unpack_leaves_an_object_whose_last_name_has_just_ended(clock: Clock, tmp_path: Path) -> None:
    """It is at the key of a packed file, and hidden there for long. A node that has not heard of the end of its other
    name renames that."""
    store = MemoryStore()
    async with two_lakes(store, tmp_path, clock=clock, pack="never", delete_after_s=DELETE_AFTER_S) as (one, two):
        await one.write("first", b"bytes")
        await one.rename("first", "a")
        await one.fs.sync_names()
        clock.advance(60)
        give_pack(store, clock, {"first": b"packed"})
        clock.advance(600)
        await one.poll()
        await two.poll()
        assert await two.read("a") == b"bytes"
        await one.unlink("a")
        await one.fs.sync_names()
        clock.advance(1)
        assert (await unpack(store, clock, "first")).left == 1
        with held_fresh(two):
            await two.rename("a", "b")
        await two.fs.sync_names()
    assert await fresh(store, clock, tmp_path) == {"first": b"packed", "b": b"bytes"}


async def test_a_key_that_another_name_needs_is_left_alone(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        await mounted.rename("top", "kept")
        await mounted.sync()
    clock.advance(5)
    give_pack(store, clock, {"top": b"new"})
    clock.advance(5)
    assert (await unpack(store, clock)).left == 1
    assert store.data("top") == FILES["top"]
    expected = {key: data for key, data in FILES.items() if key != "top"} | {"kept": FILES["top"], "top": b"new"}
    assert await fresh(store, clock, tmp_path) == expected


async def test_file_whose_directory_is_renamed_while_it_is_unpacked_keeps_its_bytes(tmp_path: Path) -> None:
    """The copy is hidden then. A mount that took it for an object of another program would have renamed that."""
    store, clock = MemoryStore(), Clock()
    store.clock = clock
    give_pack(store, clock, {"d/a": b"packed"})
    clock.advance(5)
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        assert await mounted.tree() == {"d": None, "d/a": b"packed"}
        clock.advance(TTL_S + 1)
        store.hook = pause = Pause(lambda request: (request.what, request.key) == ("put", "d/a"), "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(unpack, store, clock)
            await trio.to_thread.run_sync(pause.reached.wait)
            await mounted.rename("d", "e")
            pause.resume()
        assert plain(store) == ["d/a"]
        clock.advance(TTL_S + 1)
        await mounted.poll()
        assert await mounted.tree() == {"e": None, "e/a": b"packed"}
    assert await fresh(store, clock, tmp_path) == {"e/a": b"packed"}


async def test_unpacking_does_not_overwrite_what_came_meanwhile(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    give_pack(store, clock, {"a": b"old a", "b": b"old b"})
    clock.advance(5)
    given: list[str] = []

    def hook(request: Request, when: str) -> None:
        is_listed = any(each.what == "list" and not each.key.startswith(RESERVED_PREFIX) for each in store.requests)
        if when == "after" and request.what == "get" and is_listed and not given:
            given.append("b")
            store.give("b", b"theirs")
            clock.advance(1)
            give_pack(store, clock, {"a": b"new a"}, writer="0badcaff")

    store.hook = hook
    done = await unpack(store, clock)
    store.hook = lambda _request, _when: None
    assert done.left >= 1
    clock.advance(5)
    found = await fresh(store, clock, tmp_path)
    assert (found["a"], found["b"]) == (b"new a", b"theirs")


@pytest.mark.parametrize("is_packed", [True, False])
async def test_object_of_a_file_that_was_removed_while_it_was_put_stays_for_who_renamed_it(
    tmp_path: Path, is_packed: bool
) -> None:
    """A mount has listed it, and given it another name, before its relocation is committed."""
    store, clock = MemoryStore(), Clock()
    store.clock = clock
    async with lake(store, tmp_path / "cache", clock=clock, pack="always" if is_packed else "never") as mounted:
        await mounted.mkdir("d")
        await mounted.write("d/before" if not is_packed else "d/f", b"bytes")
        await mounted.sync()
        if not is_packed:
            await mounted.rename("d/before", "d/f")
            await mounted.fs.sync_names()
        clock.advance(600)
        await mounted.poll()
        pause = store.hook = Pause(lambda request: request.key == "d/f" and request.what in PUTS, "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(unpack, store, clock, packed=is_packed))
            await until(pause.reached.is_set)
            await mounted.unlink("d/f")
            await mounted.fs.sync_names()
            clock.advance(TTL_S + 1)
            assert await mounted.names("d") == ["f"]
            await mounted.rename("d/f", "renamed")
            await mounted.fs.sync_names()
            pause.resume()
        await mounted.poll()
        assert await mounted.read("renamed") == b"bytes"
        assert "d/f" in store.objects
    found = await fresh(store, clock, tmp_path)
    assert found["renamed"] == b"bytes" and "d/f" not in found


async def test_object_of_a_file_that_was_rewritten_while_it_was_put_makes_room_after_gc(
    tmp_path: Path,
) -> None:
    store, clock = MemoryStore(), Clock()
    store.clock = clock
    async with lake(store, tmp_path / "cache", clock=clock, pack="always") as mounted:
        await mounted.write("f", b"bytes")
        await mounted.sync()
        clock.advance(5)
        pause = store.hook = Pause(lambda request: (request.what, request.key) == ("put", "f"), "after")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(unpack, store, clock)
            await until(pause.reached.is_set)
            await rewrite(mounted, "f", b"later bytes")
            pause.resume()
        clock.advance(DELETE_AFTER_S + 1)
        assert store.objects["f"][0] == b"bytes" and (await unpack(store, clock)).left == 1
        for _ in range(2):
            clock.advance(DELETE_AFTER_S + 1)
            await run_gc(work_of(store, clock, tmp_path), GcArgs(grace_s=DELETE_AFTER_S))
        assert (await unpack(store, clock)).files == 1
        assert store.objects["f"][0] == b"later bytes"
    assert await fresh(store, clock, tmp_path) == {"f": b"later bytes"}


async def test_names_that_share_bytes_are_unpacked_and_packed_as_others_are(tmp_path: Path) -> None:
    """A copy of a packed file names the same range, and a copy of a copy the same hidden object."""
    store, clock = MemoryStore(), Clock()
    store.clock = clock
    give_pack(store, clock, {"packed": b"packed", "other": b"other" * 1000})
    async with lake(store, tmp_path / "cache", clock=clock) as mounted:
        await mounted.poll()
        await mounted.write("large", b"large" * 40_000)
        for source, target in (("packed", "a"), ("a", "b"), ("large", "c"), ("c", "d")):
            await mounted.fs.clone(source, target)
        wanted = await contents(mounted)
    await unpack(store, clock)
    assert await fresh(store, clock, tmp_path) == wanted
    assert (await pack(store, clock)).moved.files
    assert await fresh(store, clock, tmp_path) == wanted
