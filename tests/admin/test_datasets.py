"""`dataset`: a version is what its directory was, whatever mounts, other tools and gc do later."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.admin import dataset_builder, dataset_check
from lakefs_fuse.admin.commands import run_fsck, run_gc, run_pack, run_snapshot
from lakefs_fuse.admin.datasets import run_dataset
from lakefs_fuse.admin.snapshot import fold
from lakefs_fuse.commits.index import datasets, snapshots
from lakefs_fuse.commits.index.node_records import RESIDENCY
from lakefs_fuse.commits.record import OBJECTS, Mkdir, Symlink
from lakefs_fuse.config import VERSION_MAX, DatasetName, MountConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.control.worker_protocol import DatasetArgs, FsckArgs, GcArgs, PackArgs, SnapshotArgs
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import AccessDenied, ConfigError, FileError, LakeError, StoreError
from lakefs_fuse.metrics import Metrics
from lakefs_fuse.vfs.immutable import residency_report
from lakefs_fuse.vfs.immutable.filesystem import ImmutableFilesystem, open_immutable
from lakefs_fuse.vfs.immutable.residency_report import Host
from tests.admin.lakes import STORE, dataset, give_commit, give_pack, headless, silent, work_of
from tests.fakes import FakeDisk, node_of, store_client
from tests.memory_store import Failures, MemoryStore, Request
from tests.vfs.lakes import Clock, lake
from tests.vfs.writing_back import until

Tree = dict[str, bytes]


@pytest.fixture
def files() -> Tree:
    """What the directory `data` of the lake has, by path."""
    return {path.removeprefix("data/"): data for path, data in dataset(20, "data/packed").items()} | {
        "plain": b"plain",
        "deep/er/plain": b"deeper",
        "empty": b"",
        "moved": b"moved",
        "link": b"-> plain",
    }


@pytest.fixture
def store(clock: Clock, files: Tree) -> MemoryStore:
    """The directory, and another one; an hour ago."""
    made = MemoryStore()
    made.clock = clock
    for key in ("plain", "deep/er/plain", "empty"):
        made.give(f"data/{key}", files[key])
    made.give("data/before", files["moved"])
    made.give("other/plain", b"other")
    clock.advance(10)
    give_pack(made, clock, dataset(20, "data/packed"))
    clock.advance(1)
    give_commit(
        made,
        clock,
        Symlink("data/link", "plain", 1, 2, 3, xattrs={"user.x": b"y"}),
        Mkdir("data/hollow", 0o700, 5, 6, 7),
    )
    clock.advance(3600)
    return made


async def run(store: MemoryStore, clock: Clock, tmp_path: Path, action: str, **args: str | bool) -> dict[str, object]:
    work = work_of(store, clock, tmp_path)
    done = await run_dataset(work, DatasetArgs(action=action, **args))  # type: ignore[arg-type]
    return done.summary


async def create(store: MemoryStore, clock: Clock, tmp_path: Path, name: str = "im") -> dict[str, object]:
    return await run(store, clock, tmp_path, "create", dataset=name, path="data")


async def rename_one(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """The object of a file stays at the key of its earlier name."""
    async with lake(store, tmp_path / "renamer", clock=clock, delete_after_s=1e6) as node:
        await node.rename("data/before", "data/moved")
        await node.fs.sync_names()
    clock.advance(60)


def renamed_back(files: Tree) -> Tree:
    """Before `rename_one`."""
    return {"before" if path == "moved" else path: data for path, data in files.items()}


@asynccontextmanager
async def mounted(
    store: MemoryStore, clock: Clock, directory: Path, name: str, *, host: str = ""
) -> AsyncIterator[ImmutableFilesystem]:
    directory.mkdir(mode=0o700, exist_ok=True)
    config = MountConfig(
        store=STORE, mountpoint="/nowhere", cache_dir=str(directory), free_bytes_min=0, immutable=True, read_only=True,
        dataset=name, records_residency=bool(host), snapshot=DatasetName.parse_version(name).snapshot,
    )  # fmt: skip
    client = store_client(store, store.capabilities, retry_timeout_s=0)
    async with open_immutable(config, client, Metrics(), host=Host(host, host), node=node_of(clock, "reader")) as fs:
        yield fs


async def contents(fs: ImmutableFilesystem, directory: int = 1, path: str = "") -> Tree:
    found: Tree = {}
    for entry in fs.readdir(directory, 0):
        name = path + entry.name.decode()
        if entry.is_dir:
            found |= await contents(fs, entry.inode, name + "/")
        elif entry.is_symlink:
            found[name] = b"-> " + fs.readlink(entry.inode)
        else:
            found[name] = bytes(await fs.read(entry.inode, 0, 1 << 20))
    return found


async def shown(store: MemoryStore, clock: Clock, tmp_path: Path, name: str) -> Tree:
    async with mounted(store, clock, tmp_path / f"reader-{len(store.requests)}", name) as fs:
        return await contents(fs)


async def destroy(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Another mount replaces and removes everything, and garbage is collected."""
    async with lake(store, tmp_path / "writer", clock=clock, pack="never", delete_after_s=0) as node:
        for path, data in (await node.tree("data")).items():
            if data is not None and path.endswith(("plain", "0003")):
                await node.write(path, b"replaced")
            elif data is not None:
                await node.unlink(path)
        await node.fs.sync_names()
    for _ in range(3):
        clock.advance(30 * 86400)
        await run_gc(work_of(store, clock, tmp_path), GcArgs(grace_s=0, uploads_older_s=0))


async def test_version_is_what_the_directory_was_after_everything_was_replaced_and_collected(
    store: MemoryStore, clock: Clock, tmp_path: Path, files: Tree
) -> None:
    await rename_one(store, clock, tmp_path)
    made = await create(store, clock, tmp_path)
    assert (made["dataset"], made["path"], made["files"]) == ("im@1", "data", len(files) - 1)
    assert made["bytes"] == sum(len(data) for path, data in files.items() if path != "link")
    assert made["objects_copied"] == 4
    await destroy(store, clock, tmp_path)
    left = sorted(key for key in store.objects if key.startswith("data/"))
    assert left == ["data/deep/er/plain", "data/packed/0003", "data/plain"]
    store.requests.clear()
    async with mounted(store, clock, tmp_path / "node", "im@1") as fs:
        assert await contents(fs) == files
        assert fs.xattr(fs.lookup(1, b"link").inode, "user.x") == b"y"  # type: ignore[union-attr]
        assert (fs.lookup(1, b"hollow").mode) == 0o700  # type: ignore[union-attr]
        with pytest.raises(ConfigError, match="never changes"):
            await fs.refresh()
    assert {request.what for request in store.requests} <= {"get", "list", "head"}


async def test_version_that_is_removed_is_given_back(
    store: MemoryStore, clock: Clock, tmp_path: Path, files: Tree
) -> None:
    await create(store, clock, tmp_path)
    await create(store, clock, tmp_path)
    await destroy(store, clock, tmp_path)
    kept = {key for key in store.objects if key.startswith((OBJECTS, ".lakefs/commits/"))}
    await run(store, clock, tmp_path, "rm", dataset="im@1")
    await destroy(store, clock, tmp_path)
    assert await shown(store, clock, tmp_path, "im@2") == renamed_back(files)
    await run(store, clock, tmp_path, "rm", dataset="im@2")
    await destroy(store, clock, tmp_path)
    assert {key for key in store.objects if key.startswith((OBJECTS, ".lakefs/commits/"))} < kept
    assert not [key for key in store.objects if key.startswith((OBJECTS, snapshots.SNAPSHOTS))]


async def test_create_copies_only_what_the_version_before_has_no_copy_of(
    store: MemoryStore, clock: Clock, tmp_path: Path, files: Tree
) -> None:
    await create(store, clock, tmp_path)
    store.give("data/plain", b"newer")
    store.requests.clear()
    made = await create(store, clock, tmp_path)
    assert (made["dataset"], made["objects_copied"], made["copies_reused"]) == ("im@2", 1, 3)
    assert store.count("copy") == 1
    assert await shown(store, clock, tmp_path, "im@1") == renamed_back(files)
    assert await shown(store, clock, tmp_path, "im@2") == renamed_back(files) | {"plain": b"newer"}


async def test_create_with_many_small_plain_objects_says_that_packing_saves_their_copies(
    store: MemoryStore, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    work = replace(work_of(store, clock, tmp_path), note=notes.append)
    args = DatasetArgs(action="create", dataset="im", path="data")
    monkeypatch.setattr(dataset_builder, "MANY", 4)
    await run_dataset(work, args)
    await run_dataset(work, args)
    assert len(notes) == 1, "the second version copies nothing"
    assert "4 small plain objects" in notes[0]


async def test_create_of_packed_files_copies_nothing(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    await run_pack(work_of(store, clock, tmp_path), PackArgs(grace_s=0))
    store.requests.clear()
    assert (await create(store, clock, tmp_path))["objects_copied"] == 0
    assert store.count("copy") == 0
    assert len(store.requests) < 40


async def test_object_that_is_replaced_before_it_is_copied_is_listed_again(
    store: MemoryStore, clock: Clock, tmp_path: Path, files: Tree
) -> None:
    replaced: list[str] = []

    def replace_first(request: Request, when: str) -> None:
        if request.what == "copy" and when == "before" and not replaced:
            replaced.append("data/plain")
            clock.advance(1)
            for key in ("data/plain", "data/deep/er/plain"):
                store.give(key, b"meanwhile")

    store.hook = replace_first
    await create(store, clock, tmp_path)
    found = await shown(store, clock, tmp_path, "im@1")
    assert found == renamed_back(files) | {"plain": b"meanwhile", "deep/er/plain": b"meanwhile"}


async def test_hidden_object_that_lost_its_name_before_it_was_kept_is_not_relied_on(
    store: MemoryStore, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Tree
) -> None:
    """The list of objects to keep comes late, and a mount removes the file meanwhile."""
    monkeypatch.setattr(dataset_builder, "KEPT_S_MAX", -1.0)
    async with lake(store, tmp_path / "writer", clock=clock, pack="never", delete_after_s=1e6) as node:
        await node.rename("data/plain", "data/renamed")
        await node.write("data/plain", b"below .lakefs/objects/")
        await node.fs.sync_names()
        assert [key for key in store.objects if key.startswith(OBJECTS)]
        clock.advance(60)
        await create(store, clock, tmp_path)
        await node.unlink("data/plain")
        before = set(store.objects)
        await node.fs.sync_names()
        late = {key: store.objects.pop(key) for key in set(store.objects) - before}

        def remove_late(request: Request, when: str) -> None:
            """Shows the removal when the list of the first round is stored."""
            if request.what == "put" and request.key.endswith("/objects") and when == "before":
                store.objects.update(late)
                late.clear()

        clock.advance(1)
        store.hook = remove_late
        await create(store, clock, tmp_path)
    assert not late
    expected = renamed_back(files) | {"renamed": b"plain"}
    assert await shown(store, clock, tmp_path, "im@1") == expected | {"plain": b"below .lakefs/objects/"}
    assert "plain" not in await shown(store, clock, tmp_path, "im@2")


async def test_hidden_object_that_was_deleted_while_the_machine_was_suspended_is_not_relied_on(
    store: MemoryStore, clock: Clock, tmp_path: Path, files: Tree
) -> None:
    """Between the look at the lake and the list of objects to keep."""
    async with lake(store, tmp_path / "writer", clock=clock, pack="never", delete_after_s=300.0) as node:
        await node.rename("data/plain", "data/renamed")
        await node.write("data/plain", b"below .lakefs/objects/")
        await node.fs.sync_names()
        clock.advance(60)
        token, lists = trio.lowlevel.current_trio_token(), list[str]()

        async def remove() -> None:
            await node.unlink("data/plain")
            await node.fs.sync_names()
            clock.advance(301)
            await node.sync()

        def suspend(request: Request, when: str) -> None:
            if request.what == "put" and request.key.endswith("/objects") and when == "before" and not lists:
                lists.append(request.key)
                trio.from_thread.run(remove, trio_token=token)

        store.hook = suspend
        await create(store, clock, tmp_path)
    expected = {path: data for path, data in renamed_back(files).items() if path != "plain"}
    assert await shown(store, clock, tmp_path, "im@1") == expected | {"renamed": b"plain"}


async def test_create_gives_up_where_an_object_is_always_another(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    count = 0

    def replace_always(request: Request, when: str) -> None:
        nonlocal count
        if request.what == "copy" and when == "before":
            count += 1
            clock.advance(1)
            store.give("data/plain", str(count).encode())

    store.hook = replace_always
    with pytest.raises(LakeError, match="data changes faster than it can be copied"):
        await create(store, clock, tmp_path)
    store.hook = lambda _request, _when: None
    assert not [key for key in store.objects if key.startswith(snapshots.SNAPSHOTS)]
    assert (await run(store, clock, tmp_path, "ls"))["datasets"] == []


async def test_create_killed_at_any_change_leaves_no_version_and_runs_again(
    store: MemoryStore, clock: Clock, tmp_path: Path, files: Tree
) -> None:
    changes = ("put", "copy", "delete", "delete_many")
    objects, at = dict(store.objects), 0
    while True:
        seen = 0

        def fail(request: Request, when: str, at: int = at) -> None:
            nonlocal seen
            if when == "before" and request.what in changes and not request.key.endswith("-lease"):
                seen += 1
                if seen > at:
                    raise StoreError("killed")

        store.hook = fail
        try:
            await create(store, clock, tmp_path)
        except StoreError:
            pass
        else:
            break
        store.hook = lambda _request, _when: None
        assert (await run(store, clock, tmp_path, "ls"))["datasets"] == []
        clock.advance(2 * 86400)
        await run_gc(work_of(store, clock, tmp_path), GcArgs(grace_s=0))
        assert not [key for key in store.objects if key.startswith(snapshots.SNAPSHOTS)], at
        store.objects.clear()
        store.objects.update(objects)
        at += 1
    assert at >= 7
    assert await shown(store, clock, tmp_path, "im@1") == renamed_back(files)


async def test_object_that_another_tool_replaced_is_an_error_and_never_other_bytes(
    store: MemoryStore, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await create(store, clock, tmp_path)
    for key in [key for key in store.objects if key.startswith(OBJECTS)]:
        store.give(key, store.data(key)[::-1] + b"!")
    async with mounted(store, clock, tmp_path / "node", "im@1") as fs:
        entry = fs.lookup(1, b"plain")
        assert entry is not None
        with pytest.raises(FileError) as failed:
            await fs.read(entry.inode, 0, 100)
    assert failed.value.errno == 5
    assert "dataset verify" in caplog.text


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"dataset": "im@1", "path": "data"}, "there is a dataset im@1 already.*2"),
        ({"dataset": "a/b", "path": "data"}, "expected NAME or NAME@VERSION"),
        ({"dataset": "..", "path": "data"}, "expected NAME or NAME@VERSION"),
        ({"dataset": "im@0", "path": "data"}, "a number from 1"),
        ({"dataset": "new", "path": "data/absent"}, "data/absent is not a directory"),
        ({"dataset": "new", "path": "data/plain"}, "data/plain is not a directory"),
        ({"dataset": "new", "path": "data/../other"}, "component . or .."),
        ({"dataset": "new", "path": ".lakefs/commits"}, "no directory of files"),
    ],
)
async def test_create_refuses_what_cannot_be_a_version(
    store: MemoryStore, clock: Clock, tmp_path: Path, args: dict[str, str], said: str
) -> None:
    await create(store, clock, tmp_path)
    before = set(store.objects)
    with pytest.raises(ConfigError, match=said):
        await run(store, clock, tmp_path, "create", **args)
    assert set(store.objects) == before


async def test_version_is_found_by_number_or_the_newest_is(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    for name in ("im", "im@10", "im@9", "im", "im.v2"):
        await create(store, clock, tmp_path, name)
    listed = (await run(store, clock, tmp_path, "ls"))["datasets"]
    assert isinstance(listed, list)
    assert [each["dataset"] for each in listed] == ["im@1", "im@9", "im@10", "im@11", "im.v2@1"]
    assert (await run(store, clock, tmp_path, "show", dataset="im"))["version"] == 11
    assert (await run(store, clock, tmp_path, "show", dataset="im@9"))["version"] == 9
    with pytest.raises(ConfigError, match=r"there is no dataset im@2; there are: im@1, im@9, im@10, im@11, im\.v2@1"):
        await run(store, clock, tmp_path, "show", dataset="im@2")
    with pytest.raises(ConfigError, match="im has no version"):
        await run(store, clock, tmp_path, "rm", dataset="im")


async def test_create_after_the_last_number_is_refused(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    await create(store, clock, tmp_path, f"im@{VERSION_MAX}")
    before = set(store.objects)
    for name in ("im", f"im@{VERSION_MAX}"):
        with pytest.raises(ConfigError, match="im@999999999 has the last number"):
            await create(store, clock, tmp_path, name)
    assert set(store.objects) == before
    assert (await create(store, clock, tmp_path, "im@7"))["version"] == 7
    with pytest.raises(ConfigError, match="from 1 to 999999999"):
        DatasetName("im", VERSION_MAX + 1)


async def test_version_that_no_dataset_can_have_is_listed_and_deleted_as_a_snapshot(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await create(store, clock, tmp_path)
    for key, (data, _) in list(store.objects.items()):
        if key.startswith(".lakefs/snapshots/im.v1/"):
            store.give(key.replace("im.v1/", "im.v1000000000/"), data)
    listed = (await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs(list=True))).summary["snapshots"]
    assert isinstance(listed, list)
    assert [each["name"] for each in listed] == ["im.v1000000000"]
    await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs(delete="im.v1000000000"))
    assert not any("im.v1000000000" in key for key in store.objects)
    assert (await run(store, clock, tmp_path, "verify", dataset="im"))["ok"] is True


async def test_rm_of_what_is_not_there_says_what_is(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    await create(store, clock, tmp_path)
    with pytest.raises(ConfigError, match=r"there is no dataset im@7; there are: im@1$"):
        await run(store, clock, tmp_path, "rm", dataset="im@7")


async def test_snapshot_of_such_a_name_is_no_version(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    async with headless(store, clock) as view:
        await fold(view, name="im.v1", report=silent)
        assert await datasets.versions(view.client) == []
    with pytest.raises(ConfigError, match=r"there is a snapshot im\.v1 already"):
        await create(store, clock, tmp_path, "im@1")
    assert (await create(store, clock, tmp_path))["dataset"] == "im@2"


async def test_show_of_files_says_where_their_bytes_are(
    store: MemoryStore, clock: Clock, tmp_path: Path, files: Tree
) -> None:
    await create(store, clock, tmp_path)
    rows: list[protocol.Row] = []
    work = replace(work_of(store, clock, tmp_path), show=rows.append)
    await run_dataset(work, DatasetArgs(action="show", dataset="im", files=True))
    found: Tree = {}
    for row in rows:
        assert isinstance(row, protocol.FileEntry)
        data = store.data(row.key)[row.offset : row.offset + row.size] if row.key else b"-> " + row.target.encode()
        found[row.path] = data
        assert not row.key or store.objects[row.key][1].etag == row.etag
    assert found == renamed_back(files)


async def compare(
    store: MemoryStore, clock: Clock, tmp_path: Path, *, read: bool = False
) -> tuple[dict[str, str], protocol.ChangeTotals]:
    """What changed by path, and the totals."""
    rows: list[protocol.Row] = []
    work = replace(work_of(store, clock, tmp_path), show=rows.append)
    await run_dataset(work, DatasetArgs(action="diff", dataset="im@1", other="im@2", read=read))
    *changes, totals = rows
    assert isinstance(totals, protocol.ChangeTotals)
    return {row.path: row.change for row in changes if isinstance(row, protocol.FileChange)}, totals


async def test_diff_shows_names_bytes_and_attributes_in_the_order_of_names(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await create(store, clock, tmp_path)
    async with lake(store, tmp_path / "writer", clock=clock, pack="never", delete_after_s=0) as node:
        await node.write("data/packed/0003", b"other bytes")
        await node.setattr("data/packed/0004", mode=0o600)
        await node.unlink("data/packed/0005")
        await node.rename("data/deep", "data/deeper")
        await node.unlink("data/link")
        await node.symlink("data/link", "elsewhere")
        await node.fs.sync_names()
    clock.advance(60)
    store.give("data/plain", b"PLAIN")
    await create(store, clock, tmp_path)
    changes, totals = await compare(store, clock, tmp_path)
    assert changes == {
        "deep/": "removed",
        "deeper/": "added",
        "link": "changed",
        "plain": "changed",
        "deep/er/": "removed",
        "deep/er/plain": "removed",
        "deeper/er/": "added",
        "deeper/er/plain": "added",
        "packed/0003": "changed",
        "packed/0004": "attributes",
        "packed/0005": "removed",
    }
    assert list(changes)[:4] == ["deep/", "deeper/", "link", "plain"]
    assert (totals.added, totals.removed, totals.changed, totals.attributes) == (3, 4, 3, 1)
    assert totals.bytes_new == len(b"deeper") + 2000 + len(b"PLAIN") + len("elsewhere")


async def test_diff_of_versions_between_which_everything_was_packed_and_repacked_is_empty(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await create(store, clock, tmp_path)
    await run_pack(work_of(store, clock, tmp_path), PackArgs(grace_s=0))
    async with lake(store, tmp_path / "writer", clock=clock, delete_after_s=0) as node:
        for number in range(15):
            await node.rename(f"data/packed/{number:04d}", f"other/{number}")
            await node.unlink(f"other/{number}")
        await node.fs.sync_names()
    for _ in range(2):
        clock.advance(86400)
        await run_gc(work_of(store, clock, tmp_path), GcArgs(grace_s=0))
    await create(store, clock, tmp_path)
    for read in (False, True):
        changes, totals = await compare(store, clock, tmp_path, read=read)
        assert set(changes.values()) == {"removed"}
        assert (totals.removed, totals.changed, totals.bytes_new) == (15, 0, 0)


async def test_verify_names_the_files_whose_objects_are_gone_or_others(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await create(store, clock, tmp_path)
    assert (await run(store, clock, tmp_path, "verify", dataset="im"))["ok"] is True
    by_size = {len(store.data(key)): key for key in store.objects if key.startswith(OBJECTS)}
    store.take(by_size[len(b"deeper")])
    store.give(by_size[5], b"other")
    done = await run(store, clock, tmp_path, "verify", dataset="im")
    assert (done["ok"], done["objects_bad"], done["files_hurt"]) == (False, 2, 2)
    problems = done["problems"]
    assert isinstance(problems, list)
    assert {each["path"]: each["kind"] for each in problems}["deep/er/plain"] == "missing"
    assert {each["kind"] for each in problems} == {"missing", "changed"}


async def test_verify_with_read_finds_bytes_that_are_not_those_of_their_sums(
    store: MemoryStore, clock: Clock, tmp_path: Path, files: Tree
) -> None:
    await create(store, clock, tmp_path)
    done = await run(store, clock, tmp_path, "verify", dataset="im", read=True)
    assert (done["ok"], done["bytes_read"]) == (True, sum(len(data) for path, data in files.items() if path != "link"))
    (pack,) = [key for key in store.objects if key.endswith(".zip") and files["packed/0007"] in store.data(key)]
    data, meta = store.objects[pack]
    store.objects[pack] = data.replace(files["packed/0007"], files["packed/0007"][::-1]), meta
    assert (await run(store, clock, tmp_path, "verify", dataset="im"))["ok"] is True
    done = await run(store, clock, tmp_path, "verify", dataset="im", read=True)
    assert isinstance(done["problems"], list)
    assert [(each["path"], each["kind"]) for each in done["problems"]] == [("packed/0007", "damaged")]


async def test_verify_with_read_counts_damaged_files_beyond_those_that_it_names(
    store: MemoryStore, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is only known by its ETag is judged in the end, when one has matched."""
    monkeypatch.setattr(dataset_check, "PROBLEMS_MAX", 1)
    store.equal_bytes_have_equal_etags = True
    await create(store, clock, tmp_path)
    for key in [key for key in store.objects if key.startswith(OBJECTS)]:
        data, meta = store.objects[key]
        if data in (b"deeper", b"moved"):
            store.objects[key] = data[::-1], meta
    done = await run(store, clock, tmp_path, "verify", dataset="im", read=True)
    assert isinstance(done["problems"], list)
    assert (done["ok"], done["files_hurt"], len(done["problems"])) == (False, 2, 1)


async def test_verify_of_a_version_whose_manifest_lost_a_file_says_so(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await create(store, clock, tmp_path)
    store.take(".lakefs/snapshots/im.v1/0000.sst")
    with pytest.raises(LakeError, match="im@1 is lost"):
        await run(store, clock, tmp_path, "verify", dataset="im")


@pytest.mark.parametrize("file", ["manifest", "0000.sst"])
async def test_create_goes_on_where_the_newest_version_is_damaged(
    store: MemoryStore, clock: Clock, tmp_path: Path, files: Tree, file: str
) -> None:
    await create(store, clock, tmp_path)
    await create(store, clock, tmp_path)
    store.give(f".lakefs/snapshots/im.v2/{file}", b"junk")
    if file != "manifest":
        store.take(f".lakefs/snapshots/im.v2/{file}")
    made = await create(store, clock, tmp_path)
    assert (made["dataset"], made["objects_copied"], made["copies_reused"]) == ("im@3", 0, 4)
    assert await shown(store, clock, tmp_path, "im@3") == renamed_back(files)
    with pytest.raises(LakeError, match="delete what is left with `lakefs-fuse dataset rm SOURCE im@2`"):
        await run(store, clock, tmp_path, "show", dataset="im@2", files=True)
    with pytest.raises(LakeError, match="delete what is left with `lakefs-fuse dataset rm SOURCE im@2`"):
        await shown(store, clock, tmp_path, "im@2")


async def test_create_without_room_for_temporary_files_says_where_to_put_them(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    work = work_of(store, clock, tmp_path)
    work = replace(work, node=Node(work.node.clock, work.node.random, work.node.threads, FakeDisk(room=0)))
    with pytest.raises(LakeError, match=r"not enough disk: .* set TMPDIR"):
        await run_dataset(work, DatasetArgs(action="create", dataset="im", path="data"))
    assert await snapshots.names(work.client) == []


async def test_damaged_snapshot_is_told_beside_the_others(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    for name in ("one", "two"):
        await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs(name=name))
    store.give(".lakefs/snapshots/one/manifest", b"junk")
    done = await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs(list=True))
    assert (done.exit_code, done.text.split()[0]) == (1, "two")


async def test_version_of_a_dataset_is_not_deleted_as_a_snapshot(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await create(store, clock, tmp_path)
    with pytest.raises(ConfigError, match="dataset rm SOURCE im@1"):
        await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs(delete="im.v1"))
    assert (await run(store, clock, tmp_path, "verify", dataset="im"))["ok"] is True
    with pytest.raises(ConfigError, match="there is no snapshot"):
        await run_snapshot(work_of(store, clock, tmp_path), SnapshotArgs(delete="../v1"))


async def test_fsck_reports_versions_that_lack_objects_and_leaves_commits_that_they_name(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await create(store, clock, tmp_path)
    assert (await run_fsck(work_of(store, clock, tmp_path), FsckArgs())).exit_code == 0
    store.take(next(key for key in store.objects if key.startswith(OBJECTS)))
    for args in (FsckArgs(quick=True), FsckArgs(repair=True)):
        done = await run_fsck(work_of(store, clock, tmp_path), args)
        problems = done.summary["problems"]
        assert isinstance(problems, list)
        assert [(each["object"], each["kind"]) for each in problems] == [(".lakefs/snapshots/im.v1/", "snapshot")]
        assert "dataset verify SOURCE im@1" in problems[0]["text"]


async def test_gc_deletes_nothing_while_a_version_has_no_list_of_its_objects(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await create(store, clock, tmp_path)
    store.take(".lakefs/snapshots/im.v1/objects")
    with pytest.raises(LakeError, match="dataset rm SOURCE im@1"):
        await destroy(store, clock, tmp_path)
    done = await run_fsck(work_of(store, clock, tmp_path), FsckArgs(quick=True))
    assert "its list of objects is gone" in done.text
    assert (await run(store, clock, tmp_path, "verify", dataset="im"))["ok"] is True
    await run(store, clock, tmp_path, "rm", dataset="im@1")
    await destroy(store, clock, tmp_path)
    assert not any(key.startswith(OBJECTS) for key in store.objects)


Nodes = list[dict[str, object]]


async def status(store: MemoryStore, clock: Clock, tmp_path: Path) -> Nodes:
    nodes = (await run(store, clock, tmp_path, "status", dataset="im"))["nodes"]
    assert isinstance(nodes, list)
    return nodes


def records(store: MemoryStore) -> list[str]:
    return [key for key in store.objects if key.startswith(RESIDENCY)]


def puts(store: MemoryStore) -> int:
    """Of records."""
    return sum(request.what == "put" and request.key.startswith(RESIDENCY) for request in list(store.requests))


async def test_status_says_how_much_is_on_each_node(
    store: MemoryStore, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Tree
) -> None:
    monkeypatch.setattr(residency_report, "REPORT_S", 0.01)
    monkeypatch.setattr(residency_report, "PAUSE_SHARE", 0)
    made = await create(store, clock, tmp_path)
    async with (
        mounted(store, clock, tmp_path / "one", "im@1", host="node/1") as one,
        mounted(store, clock, tmp_path / "two", "im@1", host="node-2"),
    ):
        await until(lambda: len(records(store)) == 2)
        assert [each["local_bytes"] for each in await status(store, clock, tmp_path)] == [0, 0]
        written = puts(store)
        assert await contents(one) == renamed_back(files)
        await until(lambda: puts(store) > written)
        await until_local(store, clock, tmp_path, made["bytes"])
        nodes = await status(store, clock, tmp_path)
        assert [(each["node"], each["share"], each["mounted"]) for each in nodes] == [
            ("node/1", 1.0, True),
            ("node-2", 0.0, True),
        ]
        written = puts(store)
        await trio.sleep(0.1)
        assert puts(store) == written, "nothing has changed"
    nodes = await status(store, clock, tmp_path)
    assert [(each["node"], each["mounted"]) for each in nodes] == [("node/1", False), ("node-2", False)]
    clock.advance(25 * 3600)
    assert await status(store, clock, tmp_path) == []
    await run_gc(work_of(store, clock, tmp_path), GcArgs())
    assert records(store) == []


async def until_local(store: MemoryStore, clock: Clock, tmp_path: Path, size: object) -> None:
    """Blocks are written behind the reads."""
    with trio.fail_after(30):
        while (await status(store, clock, tmp_path))[0]["local_bytes"] != size:
            await trio.sleep(0.02)


async def test_node_that_may_not_write_reads_on_and_says_once_what_is_missing(
    store: MemoryStore, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture, files: Tree
) -> None:
    await create(store, clock, tmp_path)
    store.hook = Failures(lambda request: request.what == "put", AccessDenied("no"), count=10**9)
    async with mounted(store, clock, tmp_path / "one", "im@1", host="node-1") as fs:
        await until(lambda: "allow s3:PutObject below .lakefs/residency/" in caplog.text)
        assert await contents(fs) == renamed_back(files)
    assert records(store) == []


async def test_rm_names_the_nodes_that_show_the_version_and_forgets_them(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await create(store, clock, tmp_path)
    notes: list[str] = []
    async with mounted(store, clock, tmp_path / "one", "im@1", host="node-1"):
        await until(lambda: bool(records(store)))
        work = replace(work_of(store, clock, tmp_path), note=notes.append)
        await run_dataset(work, DatasetArgs(action="rm", dataset="im@1"))
    assert "node-1" in notes[0]


async def test_version_is_followed_to_the_etags_that_a_copy_of_the_lake_has(
    store: MemoryStore, clock: Clock, tmp_path: Path, files: Tree
) -> None:
    await create(store, clock, tmp_path)
    for key, (data, meta) in list(store.objects.items()):
        store.objects[key] = data, msgspec.structs.replace(meta, etag=f"{meta.etag}-moved")
    assert (await run(store, clock, tmp_path, "verify", dataset="im"))["ok"] is False
    await run_fsck(work_of(store, clock, tmp_path), FsckArgs(rebind=True, quick=True))
    assert (await run(store, clock, tmp_path, "show", dataset="im"))["dataset"] == "im@1"
    assert (await run(store, clock, tmp_path, "verify", dataset="im"))["ok"] is True
    assert await shown(store, clock, tmp_path, "im@1") == renamed_back(files)


def test_node_id_is_another_for_each_container_and_cache_directory() -> None:
    ids = [
        residency_report.node_id(host, cache)
        for host in (Host("node/1", "pod-1"), Host("node/1", "pod-2"), Host("node-1", "pod-1"))
        for cache in ("/cache/a", "/cache/b")
    ]
    assert len(set(ids)) == 6
    assert all(each.startswith("node-1-") for each in ids)


async def test_list_of_kept_objects_is_read_once_and_ends_with_its_version(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    await create(store, clock, tmp_path)
    copies = [key for key in store.objects if key.startswith(OBJECTS)]
    kept = snapshots.KeptObjects(store_client(store, store.capabilities))
    store.requests.clear()
    for _ in range(2):
        await kept.refresh()
        assert all(key in kept for key in copies)
        assert "data/plain" not in kept
    assert store.count("get") == 1
    await create(store, clock, tmp_path)
    await run(store, clock, tmp_path, "rm", dataset="im@1")
    store.requests.clear()
    await kept.refresh()
    assert all(key in kept for key in copies), "the next version has the same copies"
    assert store.count("get") == 1
    await run(store, clock, tmp_path, "rm", dataset="im@2")
    await kept.refresh()
    assert not any(key in kept for key in copies)
