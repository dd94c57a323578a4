"""The newest checkpoints of a rule stay in the cache: by count, across remounts and renames, and no more than meant."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import trio

from lakefs_fuse.blockcache.object_version import BlockSet, Version, block_range
from lakefs_fuse.config import KIB, MIB, Rule
from lakefs_fuse.meta import tree
from lakefs_fuse.vfs.pinning import pinner
from lakefs_fuse.vfs.pinning.pinner import Pinner, Unit, Units
from tests.memory_store import MemoryStore
from tests.upload.drafting import noise
from tests.vfs.lakes import RENAME_EXCHANGE, Clock, Lake, lake, two_lakes

SIZE = 100 * KIB


def keep(glob: str, count: int = 1) -> tuple[Rule, ...]:
    return (Rule(path=glob, keep_newest=count, pack="never"),)


def keeper(mounted: Lake) -> Pinner:
    return mounted.parts.pinner


async def kept(mounted: Lake) -> dict[str, int]:
    """What `stats` says, once what happened was looked at."""
    await keeper(mounted).update_pins()
    told = mounted.fs.statistics()["kept"]
    assert isinstance(told, dict)
    return told


async def save(mounted: Lake, path: str, seed: int = 0, size: int = SIZE) -> bytes:
    data = noise(seed, size)
    await mounted.write(path, data)
    return data


async def gets_of(mounted: Lake, path: str) -> int:
    before = mounted.metrics.store.requests["get"]
    await mounted.read(path)
    return mounted.metrics.store.requests["get"] - before


def empty_cache(mounted: Lake) -> None:
    """All goes that may."""
    while mounted.parts.cache.evict(64 * MIB):
        pass


async def survivors(mounted: Lake, *paths: str) -> list[str]:
    """Those of the files that are in the cache after it lost all that it may lose."""
    await keeper(mounted).update_pins()
    empty_cache(mounted)
    found = []
    for path in paths:
        extent = mounted.fs.namespace.extent(await mounted.found(path))
        assert extent is not None
        if all(mounted.parts.cache.has_blocks(extent.version, 0, extent.version.blocks)):
            found.append(path)
    return found


@pytest.mark.parametrize(
    ("glob", "path", "unit", "group"),
    [
        ("ckpt/**", "ckpt/a.pt", "ckpt/a.pt", "ckpt"),
        ("ckpt/**", "ckpt/step1/rank0/x", "ckpt/step1", "ckpt"),
        ("ckpt/**", "ckpt/step1", "ckpt/step1", "ckpt"),
        ("ckpt/**", "ckpt", None, None),
        ("ckpt/**", "other/ckpt/x", None, None),
        ("runs/*/ckpt/**", "runs/a/ckpt/s1/x", "runs/a/ckpt/s1", "runs/a/ckpt"),
        ("runs/*/ckpt/**", "runs/a/b/ckpt/s1", None, None),
        ("**/ckpt/**", "a/b/ckpt/s1/x", "a/b/ckpt/s1", "a/b/ckpt"),
        ("**", "a/b", "a", ""),
        ("ckpt/*.pt", "ckpt/a.pt", "ckpt/a.pt", "ckpt"),
        ("ckpt/*.pt", "ckpt/a.txt", None, None),
        ("**/*.pt", "x/y/a.pt", "x/y/a.pt", "x/y"),
    ],
)
def test_what_a_checkpoint_is(glob: str, path: str, unit: str | None, group: str | None) -> None:
    expected = None if unit is None else Unit(f"{glob}\n{group}", unit, 2)
    assert Units([Rule(path=glob, keep_newest=2)]).of(path) == expected


def test_the_last_rule_wins_and_0_keeps_nothing() -> None:
    units = Units([
        Rule(path="**", keep_newest=3),
        Rule(path="tmp/**", keep_newest=0),
        Rule(path="ckpt/**", pack="never"),
    ])  # fmt: skip
    assert units.any
    assert units.of("tmp/a") is None
    found = units.of("ckpt/a")
    assert found is not None
    assert found.keep == 3
    assert not Units([Rule(path="**", keep_newest=0), Rule(path="a/**")]).any


async def test_the_newest_files_stay_and_older_ones_may_go(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/*.pt", 2)) as mounted:
        await mounted.mkdir("ckpt")
        names = [f"ckpt/{step}.pt" for step in range(4)]
        for step, name in enumerate(names):
            await save(mounted, name, step)
        await save(mounted, "ckpt/notes", 9)
        assert await kept(mounted) == {
            "checkpoints": 2, "files": 2, "bytes": 2 * SIZE, "missing_bytes": 0, "refused_bytes": 0,
        }  # fmt: skip
        assert await survivors(mounted, *names, "ckpt/notes") == names[2:]


async def test_without_a_rule_nothing_is_kept(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, pack="never") as mounted:
        await save(mounted, "a.pt")
        assert await survivors(mounted, "a.pt") == []
        assert mounted.fs.statistics()["kept"] == dict.fromkeys(
            ("checkpoints", "files", "bytes", "missing_bytes", "refused_bytes"), 0
        )


async def test_it_is_kept_across_remounts(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, rules=keep("ckpt/**")) as mounted:
        await mounted.mkdir("ckpt")
        await save(mounted, "ckpt/1.pt", 1)
        await save(mounted, "ckpt/2.pt", 2)
    for _ in range(2):
        async with lake(store, tmp_path, rules=keep("ckpt/**")) as mounted:
            empty_cache(mounted)  # before anything had to be asked for
            assert await gets_of(mounted, "ckpt/2.pt") == 0
            assert await gets_of(mounted, "ckpt/1.pt") > 0
            assert mounted.parts.cache.statistics().versions_pinned == 1
    async with lake(store, tmp_path, pack="never") as mounted:  # the rule is gone, and its rows with it
        assert await survivors(mounted, "ckpt/2.pt") == []
    async with lake(store, tmp_path, rules=keep("ckpt/**")) as mounted:
        assert (await kept(mounted))["checkpoints"] == 0


async def test_each_run_has_its_own_newest(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, rules=keep("runs/*/ckpt/**")) as mounted:
        for directory in ("runs", "runs/a", "runs/a/ckpt", "runs/b", "runs/b/ckpt"):
            await mounted.mkdir(directory)
        paths = [f"runs/{run}/ckpt/{step}.pt" for step in range(2) for run in "ab"]
        for seed, path in enumerate(paths):
            await save(mounted, path, seed)
        assert await survivors(mounted, *paths) == paths[2:]


async def test_a_walk_waits_for_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two at the same time the first would let go what became durable since it began, and the next one keeps."""
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**")) as mounted:
        await mounted.mkdir("ckpt")
        await save(mounted, "ckpt/1.pt")
        began, go_on, ended = trio.Event(), threading.Event(), []

        def slow(versions: Sequence[Version], *, is_use: bool) -> list[tuple[BlockSet, int]]:
            trio.from_thread.run_sync(began.set)
            assert go_on.wait(10)
            return [(block_range(0, version.blocks), 0) for version in versions]

        async def walk(name: str, *, measure: bool) -> None:
            await keeper(mounted).update_pins(measure=measure)
            ended.append(name)

        monkeypatch.setattr(mounted.parts.cache, "inspect", slow)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(walk, "first", measure=True))
            await began.wait()
            nursery.start_soon(partial(walk, "second", measure=False))
            await trio.sleep(0.05)
            go_on.set()
        assert ended == ["first", "second"]


async def test_a_replaced_file_lets_the_old_version_go(tmp_path: Path) -> None:
    """What torch.save and os.replace do: a temporary name, then the name of the last one."""
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**")) as mounted:
        await mounted.mkdir("ckpt")
        for turn in range(3):
            await save(mounted, "ckpt/last.pt.tmp", turn)
            assert (await kept(mounted))["checkpoints"] == (2 if turn else 1)
            await mounted.rename("ckpt/last.pt.tmp", "ckpt/last.pt")
            assert (await kept(mounted))["checkpoints"] == 1
            assert mounted.parts.cache.statistics().versions_pinned == 1
        assert await survivors(mounted, "ckpt/last.pt") == ["ckpt/last.pt"]
        assert await mounted.read("ckpt/last.pt") == noise(2, SIZE)


async def test_a_directory_counts_when_it_is_renamed_into_place(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**")) as mounted:
        await mounted.mkdir("ckpt")
        await mounted.mkdir("elsewhere")
        await mounted.mkdir("elsewhere/one")
        await save(mounted, "elsewhere/one/a", 1)
        await save(mounted, "elsewhere/one/b", 2)
        assert (await kept(mounted))["checkpoints"] == 0
        await mounted.rename("elsewhere/one", "ckpt/step1")
        assert (await kept(mounted))["files"] == 2
        await mounted.mkdir("ckpt/tmp-step2")
        for rank in range(3):
            await save(mounted, f"ckpt/tmp-step2/{rank}", rank)
        # Not finished: the last finished one stays beside it.
        assert await survivors(mounted, "ckpt/step1/a", "ckpt/step1/b", "ckpt/tmp-step2/0") == [
            "ckpt/step1/a", "ckpt/step1/b", "ckpt/tmp-step2/0",
        ]  # fmt: skip
        await mounted.rename("ckpt/tmp-step2", "ckpt/step2")
        assert await survivors(mounted, "ckpt/step1/a", "ckpt/step2/1", "ckpt/step2/2") == [
            "ckpt/step2/1", "ckpt/step2/2",
        ]  # fmt: skip


async def test_a_directory_counts_with_its_marker(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**")) as mounted:
        await mounted.mkdir("ckpt")
        for step in (1, 2):
            await mounted.mkdir(f"ckpt/step{step}")
            await save(mounted, f"ckpt/step{step}/a", step)
            if step == 2:
                assert (await kept(mounted))["checkpoints"] == 2
            await save(mounted, f"ckpt/step{step}/_SUCCESS", 0, 10)
        assert (await kept(mounted))["checkpoints"] == 1
        assert await survivors(mounted, "ckpt/step1/a", "ckpt/step2/a") == ["ckpt/step2/a"]


async def test_without_markers_a_directory_counts_when_the_next_one_begins(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**")) as mounted:
        await mounted.mkdir("ckpt")
        for step in range(3):
            await mounted.mkdir(f"ckpt/{step}")
            await save(mounted, f"ckpt/{step}/a", step)
        assert await survivors(mounted, *(f"ckpt/{step}/a" for step in range(3))) == ["ckpt/1/a", "ckpt/2/a"]


async def test_what_is_open_and_dirty_does_not_count(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**")) as mounted:
        await mounted.mkdir("ckpt")
        await save(mounted, "ckpt/1.pt", 1)
        await save(mounted, "ckpt/2.pt", 2)
        handle = await mounted.open("ckpt/2.pt", 2)
        await mounted.fs.write(handle, 0, b"changed")
        assert (await kept(mounted))["checkpoints"] == 2
        await mounted.close(handle)
        assert (await kept(mounted))["checkpoints"] == 1


async def test_removing_the_newest_brings_the_one_before_back(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**")) as mounted:
        await mounted.mkdir("ckpt")
        await save(mounted, "ckpt/1.pt", 1)
        await save(mounted, "ckpt/2.pt", 2)
        await mounted.unlink("ckpt/2.pt")
        assert await survivors(mounted, "ckpt/1.pt") == ["ckpt/1.pt"]


async def test_at_most_the_bound_and_the_newest_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with lake(MemoryStore(), tmp_path, cache_bytes_max=5 * SIZE, rules=keep("ckpt/**", 3)) as mounted:
        await mounted.mkdir("ckpt")
        for step in range(3):
            await save(mounted, f"ckpt/{step}.pt", step)
        told = await kept(mounted)
        assert (told["checkpoints"], told["bytes"], told["refused_bytes"]) == (2, 2 * SIZE, SIZE)
        assert f"{SIZE} bytes of the newest checkpoints are not kept" in caplog.text
        paths = [f"ckpt/{step}.pt" for step in range(3)]
        assert await survivors(mounted, *paths) == paths[1:]


async def test_files_beyond_the_bound_count_as_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinner, "FILES_MAX", 2)
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**")) as mounted:
        await mounted.mkdir("ckpt")
        await mounted.mkdir("ckpt/s1")
        for rank in range(3):
            await save(mounted, f"ckpt/s1/{rank}", rank)
        told = await kept(mounted)
        assert (told["files"], told["refused_bytes"]) == (2, SIZE)


async def test_walk_of_a_checkpoint_lets_other_tasks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "CHILDREN_AT_ONCE", 2)
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**")) as mounted:
        await mounted.mkdir("ckpt")
        await mounted.mkdir("ckpt/s1")
        for rank in range(12):
            await save(mounted, f"ckpt/s1/{rank}", rank, 10)
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            await keeper(mounted).update_pins(measure=False)
            nursery.cancel_scope.cancel()
        assert turns >= 3


async def test_bytes_that_are_not_in_the_cache_are_said(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, rules=keep("ckpt/**")) as (one, two):
        await one.mkdir("ckpt")
        await one.mkdir("ckpt/s1")
        await one.sync()
        await two.poll()
        await save(one, "ckpt/s1/rank0", 1)
        await save(two, "ckpt/s1/rank1", 2)
        one.fs.namespace.tree.forget_listings()
        assert await one.names("ckpt/s1") == ["rank0", "rank1"]
        told = await kept(one)
        assert (told["files"], told["bytes"], told["missing_bytes"]) == (2, 2 * SIZE, SIZE)
        await one.read("ckpt/s1/rank1")
        with trio.fail_after(10):
            while (await kept(one))["missing_bytes"]:  # what was read is written to the cache behind the reader
                await trio.sleep(0.01)


async def test_packed_files_are_kept_with_their_pack(tmp_path: Path) -> None:
    rules = (Rule(path="ckpt/**", keep_newest=1, pack="always"),)
    async with lake(MemoryStore(), tmp_path, rules=rules) as mounted:
        await mounted.mkdir("ckpt")
        await save(mounted, "ckpt/1.pt", 1)
        await save(mounted, "ckpt/2.pt", 2)
        assert (await kept(mounted))["bytes"] == SIZE
        assert await survivors(mounted, "ckpt/1.pt", "ckpt/2.pt") == ["ckpt/2.pt"]


@pytest.mark.parametrize("rule", [True, False])
async def test_what_the_cache_has_follows_the_object_to_another_key(tmp_path: Path, rule: bool) -> None:
    """The store copies a renamed object away from a key that is written; reading it there is no request, now and after
    a remount."""
    clock, store = Clock(), MemoryStore()
    rules = keep("ckpt/**") if rule else ()
    async with lake(store, tmp_path, clock=clock, rules=rules, pack="never") as mounted:
        await mounted.mkdir("ckpt")
        await save(mounted, "model.tmp", 1)
        await mounted.rename("model.tmp", "ckpt/model.pt")
        await mounted.parts.renamed.free("model.tmp")
        store.take("model.tmp")
        assert await gets_of(mounted, "ckpt/model.pt") == 0
        if rule:
            assert await survivors(mounted, "ckpt/model.pt") == ["ckpt/model.pt"]
            assert (await kept(mounted))["missing_bytes"] == 0
    async with lake(store, tmp_path, clock=clock, rules=rules, pack="never") as mounted:
        assert await gets_of(mounted, "ckpt/model.pt") == 0
        assert await mounted.read("ckpt/model.pt") == noise(1, SIZE)


async def test_renaming_what_is_above_takes_the_order_along(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, rules=keep("runs/*/**")) as mounted:
        await mounted.mkdir("runs")
        await mounted.mkdir("runs/a")
        await save(mounted, "runs/a/2.pt", 2)
        await save(mounted, "runs/a/1.pt", 1)  # written last, so it is the newest
        await mounted.rename("runs/a", "runs/b")
        assert await survivors(mounted, "runs/b/1.pt", "runs/b/2.pt") == ["runs/b/1.pt"]


async def test_many_checkpoints_are_ordered_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """4,000 of them held the loop for 0.2 s."""
    monkeypatch.setattr(pinner, "ROWS_PER_STEP", 4)
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**", 3)) as m:
        await m.mkdir("ckpt")
        for number in range(20):
            await m.write(f"ckpt/{number}.pt", b"x")
        assert sum(1 for _ in keeper(m)._in_order()) >= 2 * (12 // 4)  # noqa: SLF001
        assert (await kept(m))["checkpoints"] == 3


async def test_checkpoint_of_a_run_stays_kept_though_many_other_runs_were_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinner, "ROWS_MAX", 6)
    async with lake(MemoryStore(), tmp_path, rules=keep("runs/*/**")) as m:
        await m.mkdir("runs")
        await m.mkdir("runs/first")
        await save(m, "runs/first/step")
        for number in range(8):
            await m.mkdir(f"runs/{number}")
            await save(m, f"runs/{number}/step", size=1)
            await m.unlink(f"runs/{number}/step")
            await m.rmdir(f"runs/{number}")
            await keeper(m).update_pins()
        assert await survivors(m, "runs/first/step") == ["runs/first/step"]


@pytest.mark.parametrize("ends", [("ckpt/a.pt", "new.pt"), ("new.pt", "ckpt/a.pt")])
async def test_checkpoint_that_an_exchange_replaces_is_kept(tmp_path: Path, ends: tuple[str, str]) -> None:
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/*.pt")) as m:
        await m.mkdir("ckpt")
        await save(m, "ckpt/a.pt", 1)
        await save(m, "ckpt/b.pt", 2)
        await save(m, "new.pt", 3)
        await m.rename(*ends, RENAME_EXCHANGE)
        assert await survivors(m, "ckpt/a.pt", "ckpt/b.pt", "new.pt") == ["ckpt/a.pt"]


async def test_checkpoints_that_were_exchanged_are_kept(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, rules=keep("ckpt/**", 2)) as m:
        await m.mkdir("ckpt")
        for number, name in enumerate(("ckpt/old", "ckpt/step1", "ckpt/step2")):
            await m.mkdir(name)
            await save(m, f"{name}/x.pt", number)
            await m.write(f"{name}/_SUCCESS", b"")
        await m.rename("ckpt/step1", "ckpt/step2", RENAME_EXCHANGE)
        assert await survivors(m, *(f"ckpt/{name}/x.pt" for name in ("old", "step1", "step2"))) == [
            "ckpt/step1/x.pt", "ckpt/step2/x.pt",
        ]  # fmt: skip
