"""`snapshot`: what a fresh mount takes in is what the lake holds, and nothing is folded of which something lacks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from lakefs_fuse.admin.commands import run_snapshot
from lakefs_fuse.admin.snapshot import fold
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.index.index import INDEX, Manifest, manifests
from lakefs_fuse.commits.record import COMMITS, Mkdir, Remove, Symlink
from lakefs_fuse.control.worker_protocol import SnapshotArgs
from lakefs_fuse.errors import CacheError, LakeError, NotFound, StoreError
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.tree import Tree
from tests.admin.lakes import commits, dataset, give_commit, give_pack, headless, silent, work_of
from tests.memory_store import Failures, MemoryStore, Request
from tests.vfs.lakes import Clock, Lake, lake, two_lakes


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    """Packs, directories, links, plain objects, some of them removed or hidden; an hour ago."""
    made = MemoryStore()
    made.clock = clock
    for key in ("plain/a", "plain/b", "plain/deep/er/c", "hidden", "removed"):
        made.give(key, key.encode())
    clock.advance(10)
    give_pack(made, clock, dataset(30, "data/one") | dataset(30, "data/two"))
    clock.advance(1)
    give_pack(made, clock, dataset(5, "data/one", size=300) | {"hidden": b"another"})
    clock.advance(1)
    give_commit(
        made, clock, Remove("data/two/0003"), Remove("removed", hides=made.objects["removed"][1].etag),
        Mkdir("empty", 0o700, 5, 6, 7), Symlink("data/link", "one/0001", 1, 2, 3, xattrs={"user.x": b"y"}),
    )  # fmt: skip
    clock.advance(3600)
    return made


async def snapshot(
    store: MemoryStore, clock: Clock, cache_dir: Path | None = None, *, horizon: int = 0, file_bytes_max: int = 1 << 20
) -> Manifest:
    async with headless(store, clock, cache_dir=None if cache_dir is None else str(cache_dir)) as view:
        return await fold(view, horizon=horizon, report=silent, file_bytes_max=file_bytes_max)


def requests(store: MemoryStore, what: str, prefix: str = "") -> list[str]:
    return [request.key for request in store.requests if request.what == what and request.key.startswith(prefix)]


async def attributes(node: Lake, paths: Iterable[str]) -> dict[str, tuple[int, ...]]:
    entries = {path: await node.getattr(path) for path in paths}
    return {
        path: (entry.mode, entry.uid, entry.gid, entry.size, entry.mtime_ns if not entry.is_dir or entry.stamp else 0)
        for path, entry in entries.items()
    }


async def test_a_fresh_mount_shows_what_the_lake_holds(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """The same as one that reads all commits, attributes and all; it reads none of them."""
    async with lake(store, tmp_path / "without", clock=clock) as node:
        expected = await node.tree()
        shown = await attributes(node, expected)
        counted = node.commits()
    assert len(expected) == 71
    manifest = await snapshot(store, clock)
    assert manifest.names == len(expected)
    assert manifest.horizon == 0
    clock.advance(100)
    store.requests.clear()
    async with lake(store, tmp_path / "with", clock=clock) as node:
        assert requests(store, "get", COMMITS) == []
        assert len(store.requests) <= 6 + len(manifest.files)
        assert node.commits()["pack_bytes_live"] == counted["pack_bytes_live"]
        assert node.commits()["packs_known"] == counted["packs_known"] == 2
        assert node.commits()["object_numbers"] == counted["object_numbers"] == manifest.object > 0
        assert await node.tree() == expected
        assert await attributes(node, expected) == shown
        assert await node.xattrs("data/link") == {"user.x": b"y"}
    async with lake(store, tmp_path / "with", clock=clock) as node:
        assert await node.tree() == expected


async def test_snapshot_from_cache_directory_of_another_lake_is_refused(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    """As where the lake was emptied, and made anew: the packs that those names are in are gone."""
    args, other = SnapshotArgs(cache_dir=str(tmp_path / "cache")), MemoryStore()
    other.clock = clock
    for _ in range(2):
        assert (await run_snapshot(work_of(store, clock, tmp_path, lake_id="1" * 32), args)).exit_code == 0
        clock.advance(100)
    give_pack(other, clock, {"new": b"new"})
    with pytest.raises(CacheError, match=r"of the lake 1{32}, and this is the lake 2{32}: give --cache-dir"):
        await run_snapshot(work_of(other, clock, tmp_path, lake_id="2" * 32), args)
    assert requests(other, "put", INDEX) == []
    names = (await run_snapshot(work_of(store, clock, tmp_path, lake_id="1" * 32), args)).summary["names"]
    assert names == 71


async def test_what_is_newer_than_the_index_is_seen(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Commits, and objects that others put, replaced or deleted; what was hidden stays hidden."""
    await snapshot(store, clock)
    clock.advance(100)
    give_pack(store, clock, {"data/one/0000": b"newer", "fresh/x": b"x"})
    give_commit(store, clock, Remove("data/one/0001"), writer="00000001")
    store.give("plain/a", b"replaced")
    store.give("plain/new", b"new")
    store.take("plain/b")
    clock.advance(1)
    async with lake(store, tmp_path / "node", clock=clock) as node:
        assert len(requests(store, "get", COMMITS)) == 3 + 2
        assert sorted(await node.names()) == ["data", "empty", "fresh", "hidden", "plain"]
        assert await node.read("data/one/0000") == b"newer"
        assert await node.lookup("data/one/0001") is None
        assert await node.read("hidden") == b"another"
        assert await node.names("plain") == ["a", "deep", "new"]
        assert await node.read("plain/a") == b"replaced"


async def test_commits_of_the_window_are_not_lost(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """One whose PUT took its time comes into sight behind a newer one that is in the index."""
    late = give_pack(store, clock, {"late": b"late"}, writer="00000007")
    data, meta = store.objects.pop(late)
    clock.advance(60)
    give_pack(store, clock, {"early": b"early"})
    await snapshot(store, clock)
    store.objects[late] = data, meta
    store.requests.clear()
    async with lake(store, tmp_path / "node", clock=clock) as node:
        assert requests(store, "get", COMMITS) == [late]
        assert await node.read("late") == b"late"
        assert await node.read("early") == b"early"


async def test_a_few_lists_answer_for_all_directories(store: MemoryStore, clock: Clock) -> None:
    store.requests.clear()
    manifest = await snapshot(store, clock)
    listed = [key for key in requests(store, "list") if not key.startswith(".lakefs/")]
    assert manifest.directories + 1 == 8
    assert listed == ["", "", ""], "the root by itself, then before and behind the reserved keys"


async def test_a_second_snapshot_begins_with_the_first(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """It reads new commits only, and inodes keep their numbers."""
    first = await snapshot(store, clock)
    clock.advance(1000)
    new, newest = give_pack(store, clock, {"data/one/0000": b"newer"}), clock()
    store.requests.clear()
    second = await snapshot(store, clock)
    assert set(requests(store, "get", COMMITS)) == {new}
    assert second.time > first.time
    assert second.newest == newest
    async with lake(store, tmp_path / "node", clock=clock) as node:
        kept = await node.found("data/one/0001")
        assert kept.inode < first.inode
        assert (await node.found("data/one/0000")).inode >= first.inode
        assert await node.read("data/one/0000") == b"newer"


async def test_a_kept_cache_directory(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Neither index nor commits are read again, and directories are listed again all the same."""
    first = await snapshot(store, clock, tmp_path / "kept")
    store.give("plain/new", b"new")
    store.requests.clear()
    second = await snapshot(store, clock, tmp_path / "kept")
    assert requests(store, "get", COMMITS) == []
    assert [key for key in requests(store, "get", INDEX) if not key.endswith("manifest")] == []
    assert second.names == first.names + 1


async def test_two_indexes_are_kept(store: MemoryStore, clock: Clock) -> None:
    async with headless(store, clock) as view:
        written = [await fold(view, report=silent) for _ in range(4)]
        assert await manifests(view.client) == written[:1:-1]
    assert len({manifest.time for manifest in written}) == 4


async def test_the_horizon_never_goes_back(store: MemoryStore, clock: Clock) -> None:
    newest = (await snapshot(store, clock)).newest
    assert (await snapshot(store, clock, horizon=newest + 1)).horizon == newest + 1
    assert (await snapshot(store, clock)).horizon == newest + 1
    with pytest.raises(LakeError, match="collected"):
        await snapshot(store, clock, horizon=newest + 2)


async def test_nothing_is_folded_while_a_commit_cannot_be_read(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    """Not even where an earlier run of a cache directory that is kept left it behind; when it is gone, all goes on."""
    bad = give_pack(store, clock, {"x": b"x"})
    data = store.data(bad)
    store.give(bad, data[:-20] + bytes(20))
    clock.advance(1)
    give_pack(store, clock, {"y": b"y"})
    for _ in range(2):
        with pytest.raises(LakeError, match=r"cannot be read.*fsck"):
            await snapshot(store, clock, tmp_path / "kept")
        clock.advance(1000)
        give_pack(store, clock, {"z": b"z"})
    with pytest.raises(LakeError, match=r"cannot be read.*fsck"):
        await snapshot(store, clock)
    assert [key for key in store.objects if key.startswith(INDEX)] == []
    store.take(bad)
    assert (await snapshot(store, clock, tmp_path / "kept")).names == (await snapshot(store, clock)).names


async def test_a_commit_from_the_future_is_waited_for(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """It is applied when its time has come, and folded then."""
    now = clock.now_ns
    clock.advance(2 * 3600)
    give_pack(store, clock, {"x": b"x"})
    clock.now_ns = now
    with pytest.raises(LakeError, match="future"):
        await snapshot(store, clock, tmp_path / "kept")
    clock.advance(2 * 3600)
    await snapshot(store, clock, tmp_path / "kept")
    async with lake(store, tmp_path / "node", clock=clock) as node:
        assert await node.read("x") == b"x"


async def test_what_is_of_one_node_alone_is_not_folded(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """A cache directory with changes that are not in the store yet."""
    store.hook = Failures(lambda request: request.what == "put", StoreError("no"), count=10**9)
    async with lake(store, tmp_path / "node", clock=clock) as node:
        await node.unlink("plain/a")
    store.hook = lambda _request, _when: None
    with pytest.raises(LakeError, match="no store yet"):
        await snapshot(store, clock, tmp_path / "node")
    async with lake(store, tmp_path / "node", clock=clock) as node:
        await node.fs.sync_names()
    await snapshot(store, clock, tmp_path / "node")
    async with lake(store, tmp_path / "fresh", clock=clock) as node:
        assert await node.lookup("plain/a") is None


async def test_a_node_that_was_away(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Commits that it never saw are gone: its names come from the index, and what it had to say is said still."""
    async with lake(store, tmp_path / "node", clock=clock) as node:
        before = await node.tree()
        highest = max([(await node.found(path)).inode for path in before])
        store.hook = Failures(lambda request: request.what == "put", StoreError("no"), count=10**9)
        await node.unlink("data/two/0009")
        await node.mkdir("made")
        await node.setattr("data/two/0010", mode=0o600)
    store.hook = lambda _request, _when: None
    clock.advance(7200)
    gone = [
        give_commit(store, clock, Remove("data/one/0011"), Remove("empty", directory=True)),
        give_pack(store, clock, {"data/one/0012": b"x"}, writer="00000001"),
        give_commit(store, clock, Remove("data/one/0012"), writer="00000002"),
    ]
    clock.advance(7200)
    newest = (await snapshot(store, clock)).newest
    await snapshot(store, clock, horizon=newest + 1)
    for key in gone:
        store.take(key)
    async with two_lakes(store, tmp_path / "others", clock=clock) as (other, _):
        elsewhere = await other.tree()
        async with lake(store, tmp_path / "node", clock=clock) as node:
            expected = {
                path: data
                for path, data in before.items()
                if path not in ("data/one/0011", "data/one/0012", "empty", "data/two/0009")
            } | {"made": None}
            assert await node.tree() == expected
            assert (await node.found("data/two/0010")).mode == 0o600
            await node.fs.sync_names()
            await node.write("new", b"new")
            assert (await node.found("new")).inode > highest
        assert set(elsewhere) == set(expected) - {"made"} | {"data/two/0009"}
        await other.poll()
        clock.advance(100)
        assert await other.tree() == expected | {"new": b"new"}
    async with lake(store, tmp_path / "node", clock=clock) as node:
        assert not tables.reapply_wanted(node.fs.database)
        assert await node.tree() == expected | {"new": b"new"}


async def test_a_loss_is_not_made_final(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """The only index that had what was collected is damaged: nothing is folded from what is left."""
    manifest = await snapshot(store, clock)
    final = await snapshot(store, clock, horizon=manifest.newest + 1)
    store.take(commits(store)[-1])
    store.give(final.prefix + "0000.sst", b"damaged")
    store.give(manifest.prefix + "0000.sst", b"damaged")
    with pytest.raises(LakeError, match="no index that has them can be used"):
        await snapshot(store, clock)
    async with lake(store, tmp_path / "node", clock=clock, read_only=True) as node:
        assert await node.read("plain/a") == b"plain/a"
        assert tables.missing_before(node.fs.database) == final.horizon


async def test_killed_at_any_request_and_run_again(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Whatever was there is used until the new one is whole."""
    await snapshot(store, clock)
    await snapshot(store, clock)
    give_pack(store, clock, {"x": b"x"})
    clock.advance(1)
    writing = ("put", "delete", "delete_many")
    for at in range(100):
        seen = 0

        def fail(request: Request, when: str, at: int = at) -> None:
            nonlocal seen
            if when == "before" and request.what in writing:
                seen += 1
                if seen > at:
                    raise StoreError("killed")

        store.hook = fail
        try:
            await snapshot(store, clock, file_bytes_max=1)
        except StoreError:
            pass
        store.hook = lambda _request, _when: None
        store.requests.clear()
        async with lake(store, tmp_path / f"node{at}", clock=clock) as node:
            assert await node.read("x") == b"x"
            assert len(requests(store, "get", COMMITS)) <= 2, "an index was there"
        if seen <= at:
            break
    assert at >= 4


async def test_named_snapshot_killed_at_any_request_is_whole_or_absent(store: MemoryStore, clock: Clock) -> None:
    original, at, ended = dict(store.objects), 0, False
    while not ended:
        store.objects, seen = dict(original), 0

        def fail(request: Request, when: str, at: int = at) -> None:
            nonlocal seen
            if when == "before" and request.what in ("put", "delete", "delete_many"):
                seen += 1
                if seen > at:
                    raise StoreError("killed")

        store.hook = fail
        async with headless(store, clock) as view:
            try:
                await fold(view, name="v1", report=silent)
                await snapshots.delete(view.client, "v1")
                ended = True
            except StoreError:
                pass
            store.hook = lambda _request, _when: None
            try:
                manifest = await snapshots.fetch_manifest(view.client, "v1")
            except NotFound:
                await fold(view, name="v1", report=silent)
                manifest = await snapshots.fetch_manifest(view.client, "v1")
            kept = {key for key in store.objects if key.startswith(".lakefs/snapshots/v1/")}
            named = {f".lakefs/snapshots/v1/{file.name}" for file in manifest.files}
            assert kept == named | {".lakefs/snapshots/v1/manifest", ".lakefs/snapshots/v1/objects"}
            assert await snapshots.kept_objects(view.client)
        at += 1
    assert at >= 5


async def test_an_empty_lake(clock: Clock, tmp_path: Path) -> None:
    store = MemoryStore()
    assert (await snapshot(store, clock)).names == 0
    async with lake(store, tmp_path / "node", clock=clock) as node:
        assert await node.tree() == {}
        await node.write("a", b"a")
    assert (await snapshot(store, clock)).names == 1


async def test_counters_and_clock_go_on_from_the_index(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """A node whose clock is behind names its commits after all that the index has."""
    give_pack(store, clock, {"x": b"x"})
    newest = (await snapshot(store, clock)).newest
    async with lake(store, tmp_path / "node", clock=clock) as node:
        clock.advance(-1.5)
        assert node.fs.namespace.tree.hidden == Tree(node.fs.database).hidden
        await node.unlink("x")
        await node.fs.sync_names()
        assert await node.lookup("x") is None
    assert int(commits(store)[-1].removeprefix(COMMITS)[:16], 16) > newest
    async with lake(store, tmp_path / "other", clock=clock) as node:
        assert await node.lookup("x") is None


async def test_files_that_others_put_while_it_runs(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """A commit between the listing and the dump is in the index, or found by polling."""
    added: list[str] = []

    def add(request: Request, when: str) -> None:
        if when == "after" and request.what in ("list", "put") and len(added) < 12 and request.key != "":
            clock.advance(1)
            added.append(f"during/{len(added)}")
            give_pack(store, clock, {added[-1]: b"x"})

    store.hook = add
    await snapshot(store, clock, file_bytes_max=1)
    store.hook = lambda _request, _when: None
    assert len(added) >= 6
    async with lake(store, tmp_path / "node", clock=clock) as node:
        assert await node.names("during") == sorted(path.removeprefix("during/") for path in added)
        assert all([await node.read(path) == b"x" for path in added])
