"""`fsck --repair` of a lake with commits from the future: their names are there again, and `gc` works."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from lakefs_fuse.admin import fsck_repair
from lakefs_fuse.admin.fsck import Checker, Kind
from lakefs_fuse.admin.gc import Collector
from lakefs_fuse.admin.snapshot import fold
from lakefs_fuse.commits.archive import commit_key
from lakefs_fuse.commits.record import COMMITS, OWN, ObjectRef, Put, Remove, SetAttr
from lakefs_fuse.control.worker_protocol import GcArgs
from lakefs_fuse.errors import StoreError
from tests.admin.lakes import commits, dataset, fold_all, give_commit, give_pack, headless, silent
from tests.admin.test_fsck import check, kinds
from tests.memory_store import Failures, MemoryStore, Request
from tests.vfs.lakes import Clock, held_fresh, lake

NS = 10**9
YEARS_NS = 12 * 365 * 86400 * NS
JUMPED, OTHER = "0badcaff", "0badcafd"
FILES = dataset(6)


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    """A writer that dates what it commits 12 years ahead, and one whose clock is right."""
    made = MemoryStore()
    made.clock = clock
    paths = list(FILES)
    give_pack(made, clock, {path: FILES[path] for path in paths[:2]} | {"old": b"old", "both": b"0"})
    ahead = Clock()

    def jump() -> None:
        clock.advance(2)
        ahead.now_ns = clock.now_ns + YEARS_NS

    jump()
    key = give_pack(
        made, ahead, {path: FILES[path] for path in paths[2:4]} | {"both": b"1", "mine": b"1"}, writer=JUMPED
    )
    jump()
    give_pack(made, clock, {"both": b"22"}, writer=OTHER)
    made.give("plain", b"by another tool")
    jump()
    give_pack(made, ahead, {"mine": b"333"}, writer=JUMPED)
    size, etag = len(made.data(key)), made.objects[key][1].etag
    at = made.data(key).index(FILES[paths[2]])
    link = Put("renamed", 1, at, len(FILES[paths[2]]), 0o600, 0, 0, 0)
    jump()
    give_commit(
        made, ahead, link, Remove(paths[2]), Remove("old"), objects=(ObjectRef(key, etag, size),), writer=JUMPED
    )
    jump()
    own = made.give("own", b"large")
    give_commit(made, ahead, Put("own", OWN, 0, 5, 0o640, 0, 0, 0, hides=own.etag), writer=JUMPED)
    jump()
    chmod = SetAttr("own", OWN, 0, 5, own.etag, 0o600, 0, 0, 7)
    give_commit(made, ahead, chmod, writer=JUMPED)
    clock.advance(60)
    return made


def expected() -> dict[str, bytes]:
    paths = list(FILES)
    files = {path: FILES[path] for path in (*paths[:2], paths[3])}
    return files | {
        "renamed": FILES[paths[2]], "both": b"22", "mine": b"333", "own": b"large", "plain": b"by another tool"
    }  # fmt: skip


async def read_all(store: MemoryStore, clock: Clock, cache_dir: Path) -> dict[str, bytes]:
    async with lake(store, cache_dir, clock=clock) as node:
        names = [name for name in await node.names() if name != "data"]
        found = {name: await node.read(name) for name in names}
        below = await node.names("data") if "data" in await node.names() else []
        return found | {f"data/{name}": await node.read(f"data/{name}") for name in below}


async def test_repair_commits_from_the_future_brings_their_names_back(
    store: MemoryStore, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert "old" in await read_all(store, clock, tmp_path / "before")
    done = await check(store, clock, repair=True)
    assert kinds(done) == {Kind.FUTURE}
    assert all("deleted" in problem.repair for problem in done.problems)
    assert await read_all(store, clock, tmp_path / "after") == expected()
    async with lake(store, tmp_path / "after", clock=clock) as node:
        assert (await node.getattr("own")).mode & 0o777 == 0o600
    clock.advance(1)
    assert (await check(store, clock)).problems == []
    assert max(commits(store)) < commit_key(clock(), "ffffffff")
    caplog.clear()


async def test_gc_after_repair_of_commits_from_the_future_deletes_what_is_dead(
    store: MemoryStore, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def collect() -> int:
        async with headless(store, clock) as view:

            async def fold(_horizon: int) -> None:
                pass

            done = await Collector(view, GcArgs(grace_s=0, dry_run=True), fold=fold, report=silent).run()
            return -1 if done.unreadable else done.commits_deleted

    assert await collect() == -1
    await check(store, clock, repair=True)
    clock.advance(1)
    assert await collect() > 0
    caplog.clear()


@pytest.mark.parametrize("dies_at", [("put", 0), ("put", 1), ("delete", 0), ("delete", 3)])
async def test_repair_of_commits_from_the_future_that_failed_is_done_by_the_next(
    store: MemoryStore, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture, dies_at: tuple[str, int]
) -> None:
    what, skip = dies_at
    passed = 0

    def is_due(request: object) -> bool:
        nonlocal passed
        if getattr(request, "what", "") != what:
            return False
        passed += 1
        return passed == skip + 1

    store.hook = Failures(is_due, StoreError("no"), count=1)
    with pytest.raises(StoreError):
        await check(store, clock, repair=True)
    clock.advance(1)
    await check(store, clock, repair=True)
    assert await read_all(store, clock, tmp_path / "after") == expected()
    clock.advance(1)
    assert (await check(store, clock)).problems == []
    caplog.clear()


async def test_repair_keeps_the_bytes_that_a_mount_renames_before_it_has_heard_of_their_move(
    store: MemoryStore, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The names were committed again before, so mounts have them."""
    path = list(FILES)[3]
    puts: list[str] = []

    def is_due(request: Request) -> bool:
        puts.extend([request.key] if request.what == "put" and request.key.startswith(COMMITS) else [])
        return len(puts) == 2

    store.hook = Failures(is_due, StoreError("killed"), count=1)
    with pytest.raises(StoreError):
        await check(store, clock, repair=True)
    store.hook = lambda _request, _when: None
    async with lake(store, tmp_path / "node", clock=clock) as node:
        assert path.removeprefix("data/") in await node.names("data")

        async def sleep(seconds: float) -> None:
            clock.advance(1)
            with held_fresh(node):
                await node.rename(path, "data/other")
            await node.fs.sync_names()
            clock.advance(seconds)

        async with headless(store, clock) as view:
            checker = Checker(view, quick=False, report=silent)
            done = await checker.run()
            await fsck_repair.repair(view, checker, report=silent, sleep=sleep)
    assert sum("1 name has its own in it" in problem.repair for problem in done.problems) == 1
    wanted = expected()
    wanted["data/other"] = wanted.pop(path)
    assert await read_all(store, clock, tmp_path / "after") == wanted
    await check(store, clock, repair=True)
    assert await read_all(store, clock, tmp_path / "last") == wanted
    assert max(commits(store)) < commit_key(clock(), "ffffffff")
    caplog.clear()


async def test_index_of_a_node_whose_clock_was_wrong_hides_no_later_commit_and_is_replaced(
    store: MemoryStore, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody knows of its date what it is worth: the commits are there, so nothing is lost without it."""
    ahead = Clock()
    ahead.now_ns = clock.now_ns + YEARS_NS + 600 * NS
    async with headless(store, ahead) as view:
        wrong = await fold(view, report=silent)
    clock.advance(600)
    give_pack(store, clock, {"later": b"later", "both": b"333"}, writer=OTHER)
    wanted = {"later": b"later", "both": b"333"}
    found = await read_all(store, clock, tmp_path / "before")
    assert {path: found.get(path) for path in wanted} == wanted
    done = await check(store, clock, repair=True)
    assert kinds(done) == {Kind.FUTURE, Kind.INDEX}
    assert await read_all(store, clock, tmp_path / "after") == expected() | wanted
    clock.advance(60)
    async with headless(store, clock) as view:
        for _ in range(2):
            await fold(view, report=silent)
            clock.advance(60)
    assert not any(key.startswith(wrong.prefix) for key in store.objects)
    assert await read_all(store, clock, tmp_path / "last") == expected() | wanted
    assert (await check(store, clock)).problems == []
    caplog.clear()


async def test_gc_after_a_run_whose_clock_was_wrong_deletes_what_is_dead(
    clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The record and the index of that run are later than all that follow, and count no more."""
    store, ahead = MemoryStore(), Clock()
    store.clock = clock
    for files in ({"a": b"a"}, {"b": b"b"}, {"c": b"c"}):
        give_pack(store, clock, files)
        clock.advance(60)
    give_commit(store, clock, Remove("a"))
    clock.advance(60)
    ahead.now_ns = clock.now_ns + YEARS_NS

    async def collect(clock: Clock) -> int:
        async with headless(store, clock) as view:
            options = GcArgs(grace_s=3600)
            fold_known = partial(fold_all, view)
            return (await Collector(view, options, fold=fold_known, report=silent).run()).commits_deleted

    assert await collect(ahead) == 0
    give_commit(store, clock, Remove("b"))
    clock.advance(60)
    assert await collect(clock) == 0
    clock.advance(3600)
    assert await collect(clock) == 4
    assert len(commits(store)) == 1
    assert await read_all(store, clock, tmp_path / "after") == {"c": b"c"}
    caplog.clear()
