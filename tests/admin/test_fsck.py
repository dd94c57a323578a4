"""`fsck`: what is damaged is found, whose names are hurt is said, and repairing never takes a last copy away."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.admin import fsck_repair
from lakefs_fuse.admin.commands import run_fsck, run_gc
from lakefs_fuse.admin.fsck import PATHS_SHOWN_MAX, Checked, Checker, Kind, Problem
from lakefs_fuse.commits.archive import build, commit_key
from lakefs_fuse.commits.record import OWN, THIS, Mkdir, ObjectRef, Put, Relocate, Remove, encode
from lakefs_fuse.control.worker_protocol import FsckArgs, GcArgs
from lakefs_fuse.errors import StoreError
from lakefs_fuse.meta.entry import Entry
from tests.admin.lakes import (
    WRITER,
    commits,
    dataset,
    fold_all,
    give_commit,
    give_pack,
    headless,
    record,
    silent,
    work_of,
)
from tests.admin.test_repack import pack
from tests.memory_store import Failures, MemoryStore
from tests.vfs.lakes import Clock, lake

FILES = dataset(20)


@pytest.fixture
def store(clock: Clock) -> MemoryStore:
    """Two packs, and a file that was renamed out of the first."""
    made = MemoryStore()
    made.clock = clock
    paths = list(FILES)
    for at in (0, 10):
        give_pack(made, clock, {path: FILES[path] for path in paths[at : at + 10]})
        clock.advance(1)
    return made


async def rename(store: MemoryStore, clock: Clock, old: str, new: str) -> None:
    async with headless(store, clock) as view:
        entry = view.find(old)
        assert isinstance(entry, Entry)
        row = view.tree.objects.get(entry.place)
        assert row is not None
    clock.advance(1)
    put = Put(new, 1, entry.offset, entry.size, 0o600, 0, 0, 0)
    give_commit(store, clock, put, Remove(old), objects=(ObjectRef(row.key, row.etag, row.size),), writer="0badcaff")
    clock.advance(1)


async def check(
    store: MemoryStore, clock: Clock, *, quick: bool = False, repair: bool = False, cache_dir: Path | None = None
) -> Checked:
    async def sleep(seconds: float) -> None:
        clock.advance(seconds)

    async with headless(store, clock, cache_dir=None if cache_dir is None else str(cache_dir)) as view:
        checker = Checker(view, quick=quick, report=silent)
        done = await checker.run()
        if repair:
            await fsck_repair.repair(view, checker, report=silent, sleep=sleep)
        return done


def hurt(done: Checked, kind: Kind) -> list[str]:
    return sorted(path for problem in done.problems if problem.kind is kind for path in problem.paths)


def kinds(done: Checked) -> set[Kind]:
    return {problem.kind for problem in done.problems}


def flip(store: MemoryStore, key: str, at: int) -> None:
    data = bytearray(store.data(key))
    data[at] ^= 0x40
    store.give(key, bytes(data))


@pytest.mark.parametrize("quick", [False, True])
async def test_a_sound_lake_is_clean(store: MemoryStore, clock: Clock, quick: bool) -> None:
    await rename(store, clock, "data/0003", "renamed")
    store.give("plain", b"plain")
    done = await check(store, clock, quick=quick)
    assert (done.problems, done.commits, done.files, done.gone) == ([], 3, 20, 0)
    assert bool(done.bytes_read) == (not quick)
    assert "clean" in done.describe()


def test_result_with_objects_that_could_not_be_checked_is_not_clean() -> None:
    text = Checked(unsettled=2).describe()
    assert "clean" not in text
    assert "2 objects were written too fast to be checked: run fsck again" in text


async def test_fsck_of_a_lake_that_could_not_be_checked_fails(
    store: MemoryStore, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run(checker: Checker) -> Checked:
        return Checked(unsettled=unsettled)

    monkeypatch.setattr(Checker, "run", run)
    for unsettled in (0, 1):
        assert (await run_fsck(work_of(store, clock, tmp_path), FsckArgs())).exit_code == unsettled


def test_text_of_a_result_has_first_names_of_each_problem_and_summary_all() -> None:
    paths = dict.fromkeys(f"data/{number:06d}" for number in range(PATHS_SHOWN_MAX + 2000))
    done = Checked(problems=[Problem("key", Kind.MISSING, "it is gone", paths), Problem("other", Kind.LATE, "late")])
    text = done.describe()
    assert (text.count("    data/"), "    … and 2,000 more, which --json names" in text) == (PATHS_SHOWN_MAX, True)
    assert "2 problems, 3,000 files hurt" in text
    summary = msgspec.to_builtins(done.summary())
    assert [len(problem["paths"]) for problem in summary["problems"]] == [3000, 0]


async def test_a_flipped_byte_hurts_the_names_that_have_it_now(store: MemoryStore, clock: Clock) -> None:
    first = commits(store)[0]
    at = {path: store.data(first).index(FILES[path]) for path in ("data/0003", "data/0005", "data/0007")}
    for place in at.values():
        flip(store, first, place + 100)
    await rename(store, clock, "data/0003", "renamed")
    give_commit(store, clock, Remove("data/0005"), writer="0badcafd")
    clock.advance(1)
    done = await check(store, clock)
    assert (kinds(done), hurt(done, Kind.DAMAGED)) == ({Kind.DAMAGED}, ["data/0007", "renamed"])
    assert done.problems[0].key == first
    assert (await check(store, clock, quick=True)).problems == []


@pytest.mark.parametrize("quick", [False, True])
async def test_a_pack_cut_short(store: MemoryStore, clock: Clock, quick: bool) -> None:
    second = commits(store)[1]
    store.give(second, store.data(second)[: 4 * 2100])
    done = await check(store, clock, quick=quick)
    assert kinds(done) == {Kind.UNREADABLE}
    told = [f"data/{number:04d}" for number in range(10, 15)]
    assert hurt(done, Kind.UNREADABLE) == ([] if quick else told)
    assert second in done.describe()


async def test_a_node_that_was_there_knows_all_names(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    async with lake(store, tmp_path / "node", clock=clock):
        pass
    first, second = commits(store)
    store.give(second, store.data(second)[: 4 * 2100])
    store.take(first)
    done = await check(store, clock, cache_dir=tmp_path / "node")
    assert hurt(done, Kind.CHANGED) == [f"data/{number:04d}" for number in range(10, 20)]
    assert hurt(done, Kind.MISSING) == [f"data/{number:04d}" for number in range(10)]


async def test_a_missing_pack_that_another_commit_speaks_of(store: MemoryStore, clock: Clock) -> None:
    await rename(store, clock, "data/0003", "renamed")
    store.take(commits(store)[0])
    for quick in (False, True):
        done = await check(store, clock, quick=quick)
        assert (kinds(done), hurt(done, Kind.MISSING)) == ({Kind.MISSING}, ["renamed"])


async def test_commits_that_point_outside(store: MemoryStore, clock: Clock) -> None:
    put = Put("beyond", THIS, 10, 1 << 20, 0o600, 0, 0, 0)
    raw = build((), lambda _: encode(record(clock, [put, Put("beside", OWN, 0, 1, 0, 0, 0, 0)])))
    own = store.give(commit_key(clock(), WRITER), raw).key
    clock.advance(1)
    first = store.objects[commits(store)[0]][1]
    ref = ObjectRef(first.key, first.etag, 10 * first.size)  # it lies about the size
    put = Put("elsewhere", 1, first.size, 100, 0o600, 0, 0, 0)
    give_commit(store, clock, put, objects=(ref,), writer="0badcaff")
    clock.advance(1)
    done = await check(store, clock)
    assert hurt(done, Kind.UNREADABLE) == ["beside", "beyond"]
    assert "beyond" in hurt(done, Kind.OUTSIDE)
    assert {problem.key for problem in done.problems if "elsewhere" in problem.paths} == {first.key}
    assert own in {problem.key for problem in done.problems}


async def test_a_renamed_plain_object_that_is_gone(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    store.give("old", b"old")
    clock.advance(5)
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        await mounted.rename("old", "new")
        await mounted.sync()
        key = next(key for key, (data, _) in store.objects.items() if data == b"old")
    clock.advance(5)
    assert (await check(store, clock)).problems == []
    store.take(key)
    assert hurt(await check(store, clock), Kind.MISSING) == ["new"]


async def test_what_others_deleted_is_no_damage(store: MemoryStore, clock: Clock) -> None:
    meta = store.give("plain", b"plain")
    clock.advance(5)
    give_commit(store, clock, Put("plain", OWN, 0, 5, 0o600, 0, 0, 0, hides=meta.etag), writer="0badcaff")
    clock.advance(5)
    assert (await check(store, clock)).gone == 0
    store.take("plain")
    done = await check(store, clock)
    assert (done.problems, done.gone) == ([], 1)


async def test_a_commit_of_the_future(store: MemoryStore, clock: Clock) -> None:
    ahead = Clock(clock() + 7200 * 10**9)
    key = give_pack(store, ahead, {"later": b"later"})
    done = await check(store, clock)
    assert [(problem.key, problem.kind) for problem in done.problems] == [(key, Kind.FUTURE)]


async def test_damaged_indexes(store: MemoryStore, clock: Clock) -> None:
    async with headless(store, clock) as view:
        await fold_all(view, 0)
    assert (await check(store, clock)).problems == []
    manifest, rows = (next(key for key in store.objects if key.endswith(end)) for end in ("/manifest", ".sst"))
    flip(store, rows, 100)
    assert (await check(store, clock, quick=True)).problems == []
    assert [(each.kind, rows in each.text) for each in (await check(store, clock)).problems] == [(Kind.INDEX, True)]
    flip(store, manifest, 0)
    assert kinds(await check(store, clock, quick=True, repair=True)) == {Kind.INDEX}


async def test_a_commit_that_came_too_late(store: MemoryStore, clock: Clock) -> None:
    """A fresh mount takes the index, and asks for commits of the last two minutes before it."""
    late = Clock(clock())
    clock.advance(1000)
    give_pack(store, clock, {"newest": b"newest"}, writer="0badcaff")
    async with headless(store, clock) as view:
        await fold_all(view, 0)
    key = give_pack(store, late, {"late": b"late", "newest": b"older"}, writer="0badcaf0")
    for quick in (False, True):
        (problem,) = (await check(store, clock, quick=quick)).problems
        assert (problem.key, problem.kind, list(problem.paths)) == (key, Kind.LATE, ["late"])


# -- repairing


async def test_a_commit_that_cannot_be_read_is_moved_aside(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    second = commits(store)[1]
    damaged = store.data(second)[:-30]
    store.give(second, damaged)
    done = await check(store, clock, repair=True)
    aside = ".lakefs/damaged/" + second.rpartition("/")[2]
    assert aside in done.problems[0].repair
    assert store.data(aside) == damaged
    assert second not in store.objects
    assert (await check(store, clock)).problems == []
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        assert await mounted.names("data") == [f"{number:04d}" for number in range(10)]


async def test_what_a_commit_that_came_too_late_says_is_committed_again(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    """But for what has a newer version: of a commit, of a removal, of another client."""
    clock.advance(10)
    late = Clock(clock())
    clock.advance(10)
    give_pack(store, clock, {"newest": b"newest", "removed": b"r"}, writer="0badcaff")
    clock.advance(10)
    give_commit(store, clock, Remove("removed"))
    store.give("theirs", b"by others")
    clock.advance(1000)
    give_pack(store, clock, {"last": b"last"}, writer="0badcaff")
    async with headless(store, clock) as view:
        await fold_all(view, 0)
    files = {"late": b"late", "data/0000": b"changed", "newest": b"older", "removed": b"older", "theirs": b"older"}
    key = give_pack(store, late, files, writer="0badcaf0")
    nothing = give_pack(store, Clock(late() + 1), {"newest": b"older"}, writer="0badcaf1")
    done = await check(store, clock, repair=True)
    assert {(problem.key, problem.repair) for problem in done.problems} == {
        (key, "2 changes of names were committed again"),
        (nothing, "left as it is: all that it says has newer versions"),
    }
    clock.advance(1)
    expected = {"late": b"late", "data/0000": b"changed", "newest": b"newest", "theirs": b"by others"}
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        assert {path: await mounted.read(path) for path in expected} == expected
        assert "removed" not in await mounted.names()
    again = await check(store, clock, repair=True)
    assert [problem.key for problem in again.problems] == [nothing]


async def test_rename_and_removal_that_came_too_late_are_found_and_committed_again(
    store: MemoryStore, clock: Clock, tmp_path: Path
) -> None:
    """Such commits have no files; `gc` leaves them, and says that fsck knows more."""
    clock.advance(10)
    late = Clock(clock())
    clock.advance(1000)
    give_pack(store, clock, {"last": b"last"}, writer="0badcaff")
    async with headless(store, clock) as view:
        entry = view.find("data/0000")
        assert entry is not None
        row = view.tree.objects.get(entry.place)
        assert row is not None
        await fold_all(view, 0)
    put = Put("renamed", 1, entry.offset, entry.size, 0o640, 1, 2, 5)
    ref = ObjectRef(row.key, row.etag, row.size)
    key = give_commit(store, late, put, Remove("data/0000"), Mkdir("made", 0o755, 1, 2, 5), objects=(ref,))
    assert (await run_gc(work_of(store, clock, tmp_path), GcArgs(grace_s=0))).summary["commits_late"] == 1
    (problem,) = (await check(store, clock, repair=True)).problems
    assert (problem.key, problem.kind, problem.repair) == (key, Kind.LATE, "3 changes of names were committed again")
    assert list(problem.paths) == ["renamed", "data/0000", "made"]
    clock.advance(1)
    assert (await check(store, clock)).problems == []
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        assert {"renamed", "made"} <= set(await mounted.names())
        assert "0000" not in await mounted.names("data")
    assert (await run_gc(work_of(store, clock, tmp_path), GcArgs(grace_s=0))).summary["commits_late"] == 0


async def test_killed_while_it_moves_one_aside(store: MemoryStore, clock: Clock) -> None:
    second = commits(store)[1]
    damaged = store.data(second)[:-30]
    for what, when in (("copy", "before"), ("copy", "after"), ("delete", "before"), ("delete", "after")):
        store.give(second, damaged)
        store.hook = Failures(lambda request, what=what: request.what == what, StoreError("no"), when=when)  # type: ignore[misc, arg-type]
        await check(store, clock, repair=True)
        store.hook = lambda _request, _when: None
        copies = [data for key, (data, _) in store.objects.items() if key.endswith(second.rpartition("/")[2])]
        assert damaged in copies
        await check(store, clock, repair=True)
        assert second not in store.objects
        assert store.data(".lakefs/damaged/" + second.rpartition("/")[2]) == damaged


async def test_one_that_names_read_from_stays(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """Its record went bad, in a store that does not notice; a node still reads files from it."""
    async with lake(store, tmp_path / "node", clock=clock):
        pass
    second = commits(store)[1]
    data, meta = store.objects[second]
    store.objects[second] = (data[:-30] + bytes(30), meta)
    done = await check(store, clock, repair=True, cache_dir=tmp_path / "node")
    assert "left where it is: 10 names" in next(each.repair for each in done.problems if each.kind is Kind.UNREADABLE)
    assert second in store.objects


async def test_names_are_pointed_at_an_intact_copy(store: MemoryStore, clock: Clock, tmp_path: Path) -> None:
    """The object that was packed is there still; where it is an older version, it is no copy."""
    original = {f"small/{number}": b"x" * 100 + bytes([number]) for number in range(4)}
    for key, data in original.items():
        store.give(key, data)
    clock.advance(10)
    await pack(store, clock, "small", grace_s=0)
    for key, data in original.items():  # as if they had not been deleted yet
        store.objects[key] = (data, _plain_meta(store, clock, key, data))
    clock.advance(10)
    key = commits(store)[-1]
    async with headless(store, clock) as view:
        for name in original:
            entry = view.find(name)
            assert entry is not None
            body, meta = store.objects[name]
            store.objects[name] = (body, type(meta)(name, len(body), entry.etag, meta.mtime_ns, meta.metadata))
    store.objects["small/3"] = (b"y" * 101, store.objects["small/3"][1])
    for name in ("small/1", "small/3"):
        flip(store, key, store.data(key).index(original[name]) + 100)
    done = await check(store, clock, repair=True)
    assert hurt(done, Kind.DAMAGED) == ["small/1", "small/3"]
    assert done.problems[0].repair == (
        "1 name was pointed at an intact copy; 1 name left as it is: no intact copy is known"
    )
    clock.advance(5)
    again = await check(store, clock)
    assert hurt(again, Kind.DAMAGED) == ["small/3"]
    async with lake(store, tmp_path / "node", clock=clock) as mounted:
        assert await mounted.read("small/1") == original["small/1"]


def _plain_meta(store: MemoryStore, clock: Clock, key: str, data: bytes):  # type: ignore[no-untyped-def]
    meta = store.give(key, data)
    return type(meta)(key, len(data), meta.etag, clock() - 20 * 10**9, {})


async def test_relocations_into_a_pack_that_is_gone(store: MemoryStore, clock: Clock) -> None:
    """The old pack is intact, but names are in the new one: they are hurt, and said."""
    async with headless(store, clock) as view:
        entry = view.find("data/0001")
        assert entry is not None
        row = view.tree.objects.get(entry.place)
        assert row is not None
    before, gone = ObjectRef(row.key, row.etag, row.size), ObjectRef(commit_key(clock(), "0a0b0c0d"), "e", 5000)
    clock.advance(1)
    move = Relocate("data/0001", 1, entry.offset, "", 2, 100, entry.size, 0o600, 0, 0, 0)
    give_commit(store, clock, move, objects=(before, gone), writer="0badcaff")
    clock.advance(1)
    done = await check(store, clock, repair=True)
    assert hurt(done, Kind.MISSING) == ["data/0001"]
    assert done.problems[0].repair == "1 name left as it is: no intact copy is known"
