"""Pins by path: what they keep, what they follow, what they refuse, and what is left of them after a restart."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from lakefs_fuse.errors import AccessDenied, CacheError, ConfigError, FileError, Unavailable
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.metrics import Warming
from lakefs_fuse.vfs.residency import pins as pins_module
from lakefs_fuse.vfs.residency import residency, selection
from lakefs_fuse.vfs.residency.pins import PinFile, Pins
from lakefs_fuse.vfs.residency.residency import WarmOptions
from lakefs_fuse.vfs.residency.selection import Names
from tests.fakes import FakeDisk
from tests.memory_store import Failures, MemoryStore
from tests.vfs.lakes import Lake, lake, two_lakes

MIB = 1 << 20
CACHE_BYTES = 48 * MIB


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "DEBOUNCE_S", 0.01)
    monkeypatch.setattr(residency, "PAUSE_SHARE", 0)


def gets(store: MemoryStore) -> int:
    return sum(request.what == "get" and not request.key.startswith(".lakefs/") for request in list(store.requests))


def data(seed: int, size: int = 4 * MIB) -> bytes:
    return bytes([seed]) * size


async def pin(node: Lake, *paths: str) -> None:
    selected = [(path, "") for path in paths]
    await node.fs.residency.pin_paths(selected, Warming(), bytes_s_max=0, background=False)


async def local(node: Lake, path: str) -> tuple[int, str]:
    (row,) = await node.fs.residency.inspect([(path, "")])
    return row.local_bytes, row.pinned


def reading(node: Lake) -> dict[str, int]:
    """What the statistics say of reads."""
    of_reader = node.fs.statistics()["reader"]
    assert isinstance(of_reader, dict)
    return of_reader


async def until(condition: Callable[[], bool]) -> None:
    with trio.fail_after(10):
        while not condition():
            await trio.sleep(0.01)


async def evict_all(node: Lake) -> int:
    """What was used lately is spared while a warm runs."""
    await until(lambda: not node.fs.residency.statistics()["running"])
    return node.parts.cache.evict(1 << 40)


async def test_pinned_files_stay_when_all_others_go(tmp_path: Path) -> None:
    store = MemoryStore()
    for number in range(3):
        store.give(f"d/{number}", data(number))
    async with lake(store, tmp_path) as node:
        await pin(node, "d/1")
        await node.fs.residency.warm([("d", "")], WarmOptions())
        assert await evict_all(node) >= 8 * MIB
        assert [await local(node, f"d/{number}") for number in range(3)] == [(0, "no"), (4 * MIB, "yes"), (0, "no")]
        assert (await local(node, "d"))[1] == "partly"
        assert (await node.fs.residency.unpin_paths([("d/1", "")]))["unpinned"] == 1
        assert await evict_all(node) >= 4 * MIB
        assert await local(node, "d/1") == (0, "no")


async def pack(store: MemoryStore, directory: Path, count: int) -> None:
    """Files of 4 MiB in one pack."""
    async with lake(store, directory, durability="writeback", pack="always", pack_threshold_bytes=8 * MIB) as writer:
        await writer.mkdir("d")
        for number in range(count):
            await writer.write(f"d/{number}", data(number))
        await writer.fs.make_durable()
        assert len({entry.place for entry in await writer.read_directory((await writer.found("d")).inode)}) == 1


async def test_pin_of_a_packed_file_keeps_its_blocks_and_no_others(tmp_path: Path) -> None:
    store = MemoryStore()
    await pack(store, tmp_path / "writer", 4)
    async with lake(store, tmp_path / "node", cache_bytes_max=CACHE_BYTES) as node:
        await pin(node, "d/1")
        await node.fs.residency.warm([("d", "")], WarmOptions())
        assert await evict_all(node) >= 10 * MIB
        assert await local(node, "d/1") == (4 * MIB, "yes")
        assert (await local(node, "d"))[0] <= 6 * MIB


async def test_pin_of_a_directory_covers_what_comes_later(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        await one.mkdir("d")
        await one.write("d/first", data(1))
        await one.sync()
        await two.poll()
        await pin(two, "d")
        await one.write("d/second", data(2))
        await one.sync()
        await two.fs.refresh("d")
        statistics = two.fs.residency.pins.statistics
        await until(lambda: statistics()["files"] == 2)
        with trio.fail_after(10):
            while await local(two, "d") != (8 * MIB, "yes"):
                await trio.sleep(0.01)
        await two.write("d/third", data(3))
        await until(lambda: statistics()["files"] == 3)
        await evict_all(two)
        assert await local(two, "d") == (12 * MIB, "yes")


async def test_pin_follows_its_path_to_the_version_that_replaces_a_file(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, two):
        await one.write("f", data(1))
        await one.sync()
        await two.poll()
        await pin(two, "f")
        used = two.parts.cache.files.bytes_used
        handle = await one.open("f", 2)
        await one.fs.write(handle, 0, data(2))
        await one.close(handle)
        await one.sync()
        await two.fs.refresh("")
        assert await two.read("f") == data(2)
        with trio.fail_after(10):
            while await local(two, "f") != (4 * MIB, "yes") or two.parts.cache.files.bytes_used > used + MIB:
                await trio.sleep(0.02)
                await evict_all(two)
        assert two.fs.residency.pins.statistics()["bytes"] == 4 * MIB


async def test_pins_outlive_a_restart_and_a_damaged_line_loses_only_itself(tmp_path: Path) -> None:
    store = MemoryStore()
    for number in range(3):
        store.give(f"{number}", data(number))
    async with lake(store, tmp_path) as node:
        await pin(node, "0", "1", "2")
    file = tmp_path / "pins"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(lines[0] + lines[1].replace(b'"1"', b'"7"') + lines[2])
    async with lake(store, tmp_path) as node:
        assert node.fs.residency.pins.paths == ["0", "2"]
        await until(lambda: node.fs.residency.statistics()["finished"] == 1)
        assert node.fs.residency.pins.statistics()["files"] == 2
        asked = gets(store)
        await evict_all(node)
        assert await local(node, "0") == await local(node, "2") == (4 * MIB, "yes")
        assert await local(node, "1") == (0, "no")
        assert gets(store) == asked


async def test_pinned_bytes_that_are_lost_are_fetched_again(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("f", data(1))
    async with lake(store, tmp_path) as node:
        await pin(node, "f")
    for path in tmp_path.glob("blocks/*/*"):
        path.write_bytes(b"damaged")
    async with lake(store, tmp_path) as node:
        with trio.fail_after(10):
            while (await local(node, "f"))[0] < 4 * MIB:
                await trio.sleep(0.02)


async def test_pin_that_leaves_less_than_a_quarter_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    for number in range(12):
        store.give(f"d/{number:02}", data(number))
    async with lake(store, tmp_path, cache_bytes_max=CACHE_BYTES) as node:
        await pin(node, "d/00", "d/01")
        refused = r"\d+ MiB do not fit: pins may take up 36 MiB.*others have 8 MiB of that.*Nothing was pinned"
        with pytest.raises(CacheError, match=refused):
            await pin(node, "d")
        assert node.fs.residency.pins.paths == ["d/00", "d/01"]
        assert gets(store) == 2
        with pytest.raises(FileError, match=r"^/nowhere/absent does not exist"):
            await pin(node, "absent")
        await pin(node, *(f"d/{number:02}" for number in range(8)))
        await node.fs.residency.warm([("d/08", ""), ("d/09", "")], WarmOptions())
        with pytest.raises(CacheError, match="do not fit"):
            await node.fs.residency.warm([("d", "")], WarmOptions())
        assert await local(node, "d") == (40 * MIB, "partly")


async def test_names_that_the_store_refuses_keep_no_other_from_being_pinned_or_evicted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore(page_keys_max=1)  # so that no LIST answers for several directories
    for path in ("d/file", "d/secret/file", "e", "other", "secret/file"):
        store.give(path, data(len(path)))
    PinFile(tmp_path / "pins", FakeDisk()).save(["secret/file", "d", "e"])
    store.hook = Failures(
        lambda each: each.what == "list" and "secret/" in each.key, AccessDenied("no s3:ListBucket"), count=1000
    )
    async with lake(store, tmp_path) as node:
        statistics = node.fs.residency.statistics
        await until(lambda: statistics()["finished"] == 1)
        assert node.fs.residency.pins.statistics()["files"] == 2
        await node.read("other")
        with trio.fail_after(10):
            while not await evict_all(node):
                await trio.sleep(0.01)
        assert await local(node, "d/file") == await local(node, "e") == (4 * MIB, "yes")
        assert caplog.text.count("kept as far as their names are known: no s3:ListBucket; no s3:ListBucket") == 1
        with pytest.raises(AccessDenied):
            await pin(node, "secret")
        assert node.fs.residency.pins.paths == ["secret/file", "d", "e"]
        store.hook = lambda _request, _when: None
        node.fs.residency.pins.mark_stale()
        await until(lambda: node.fs.residency.pins.statistics()["files"] == 4)


async def test_directory_that_outgrows_the_limit_is_kept_in_part(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("d/0", data(0))
    async with lake(store, tmp_path, cache_bytes_max=CACHE_BYTES) as node:
        await pin(node, "d")
        for number in range(1, 10):
            await node.write(f"d/{number}", data(number))
        statistics = node.fs.residency.pins.statistics
        await until(lambda: statistics()["refused_bytes"] == 8 * MIB)
        assert statistics()["files"] == 8
        assert statistics()["disk_bytes"] <= statistics()["limit_bytes"] == 36 * MIB


async def test_objects_and_paths_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pins_module, "OBJECTS_MAX", 2)
    monkeypatch.setattr(pins_module, "PATHS_MAX", 3)
    store = MemoryStore()
    for number in range(4):
        store.give(f"d/{number}", b"x")
    async with lake(store, tmp_path) as node:
        with pytest.raises(CacheError, match="2 objects at most"):
            await pin(node, "d")
        with pytest.raises(CacheError, match="3 pins at most"):
            await pin(node, *(f"d/{number}" for number in range(4)))


async def test_glob_that_matches_more_than_can_be_pinned_ends_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory holds no more paths than that, whatever the size of the lake."""
    monkeypatch.setattr(pins_module, "PATHS_MAX", 3)
    store = MemoryStore()
    for number in range(2 * selection.PAGE_NAMES):
        store.give(f"d/{number}", b"x")
    async with lake(store, tmp_path) as node:
        seen = list[str]()
        pages = selection.pages

        def count_pages(*arguments: Any) -> Iterator[list[Entry]]:
            for page in pages(*arguments):
                seen.extend(entry.name.decode() for entry in page)
                yield page

        monkeypatch.setattr(selection, "pages", count_pages)
        with pytest.raises(CacheError, match="3 pins at most"):
            await node.fs.residency.pin_paths([("d", "*")], Warming(), bytes_s_max=0, background=False)
        assert len(seen) == selection.PAGE_NAMES


async def test_unpin_of_many_among_many_takes_no_time(tmp_path: Path) -> None:
    names = [f"sets/{number}/pinned" for number in range(pins_module.PATHS_MAX)]
    file = PinFile(tmp_path / "pins", FakeDisk())
    file.save([*names[1:], "sets/12/pinned-too", "sets/12.5/f"])
    async with lake(MemoryStore(), tmp_path) as node:
        pins = node.fs.residency.pins
        assert pins.below("sets/12") == ["sets/12/pinned", "sets/12/pinned-too"]
        assert pins.below("sets/12/pinned") == ["sets/12/pinned"]
        assert pins.below("") == [*names[1:], "sets/12/pinned-too", "sets/12.5/f"]
        began_s = time.process_time()
        pins.update_kept = trio.lowlevel.checkpoint  # type: ignore[method-assign, assignment]
        assert await pins.remove([(name, "") for name in names[1:2001]]) == 2000
        assert time.process_time() - began_s < 2
        assert pins.below("sets/12") == ["sets/12/pinned-too"]


async def test_other_tasks_run_between_two_pins(tmp_path: Path) -> None:
    PinFile(tmp_path / "pins", FakeDisk()).save([f"d/{number}" for number in range(1000)])
    store = MemoryStore()
    for number in range(1000):
        store.give(f"d/{number}", b"x")
    async with lake(store, tmp_path) as node:
        await node.names("d")
        turns = 0

        async def take_turns() -> None:
            nonlocal turns
            while True:
                await trio.lowlevel.checkpoint()
                turns += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_turns)
            await node.fs.residency.pins.update_kept()
            nursery.cancel_scope.cancel()
        assert turns >= 500


async def test_changes_in_many_directories_beside_many_pins_take_no_time(tmp_path: Path) -> None:
    PinFile(tmp_path / "pins", FakeDisk()).save([f"sets/{number}/pinned" for number in range(pins_module.PATHS_MAX)])
    store = MemoryStore()
    for number in range(100):
        store.give(f"other/{number}/f", b"x")
    store.give("sets/7/f", b"x")
    async with lake(store, tmp_path) as node:
        directories = [(await node.found(f"other/{number}")).inode for number in range(100)]
        near, pins = (await node.found("sets/7")).inode, node.fs.residency.pins
        began_s = time.process_time()
        for _ in range(10):
            for directory in directories:
                node.parts.namespace.invalidate_name(directory, b"f")
        assert time.process_time() - began_s < 0.5
        pins.clear_stale()
        node.parts.namespace.invalidate_name(near, b"f")
        with trio.fail_after(5):
            await pins.wait_stale()


async def test_unpin_of_what_is_not_a_pin_says_what_to_do(tmp_path: Path) -> None:
    store = MemoryStore()
    for path in ("d/a", "d/b", "e/a"):
        store.give(path, b"x")
    async with lake(store, tmp_path) as node:
        await pin(node, "d", "e/a")
        unpin = node.fs.residency.unpin_paths
        with pytest.raises(ConfigError, match=r"^/nowhere/d/a is pinned with /nowhere/d: unpin that"):
            await unpin([("d/a", "")])
        with pytest.raises(ConfigError, match=r"^/nowhere/x is not pinned"):
            await unpin([("x", "")])
        await node.unlink("d/a")
        await node.unlink("d/b")
        assert (await unpin([("", "*")]))["unpinned"] == 1
        assert (await unpin([("", "")]))["unpinned"] == 1
        assert (tmp_path / "pins").read_bytes() == b""


async def test_unpin_beside_a_pin_that_still_lists_names_is_not_undone_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    for path in ("old", "new"):
        store.give(path, b"x")
    async with lake(store, tmp_path) as node:
        pins = node.fs.residency.pins
        await pin(node, "old")
        lists, may_go_on = trio.Event(), trio.Event()
        find = selection.find

        async def find_late(names: Names, path: str) -> Entry | None:
            if path == "new" and not lists.is_set():
                lists.set()
                await may_go_on.wait()
            return await find(names, path)

        monkeypatch.setattr(pins_module, "find", find_late)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pins.add, ["new"])
            await lists.wait()
            nursery.start_soon(pins.remove, [("old", "")])
            await until(lambda: pins.paths == [])
            may_go_on.set()
        assert pins.paths == ["new"]
        assert PinFile(tmp_path / "pins", FakeDisk()).load() == ["new"]
        assert pins.statistics()["files"] == 1


async def test_update_after_an_unpin_leaves_changes_to_the_task_that_waits_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with lake(MemoryStore(), tmp_path) as node:
        file = PinFile(tmp_path / "other", FakeDisk())
        file.save(["gone", "left"])
        pins = Pins(node.fs.residency.pins.names, node.parts.cache, file, 0)
        pins.clear_stale()

        async def fail(*_: object) -> None:
            raise FileError(errno.EIO, "no names")

        monkeypatch.setattr(pins_module, "find", fail)
        assert await pins.remove([("gone", "")]) == 1, "what is saved is no error"
        assert file.load() == pins.paths == ["left"]
        monkeypatch.undo()
        await pins.update_kept()
        with trio.fail_after(5):
            await pins.wait_stale()


async def test_blocks_are_evicted_when_the_pins_that_could_not_be_looked_up_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until it is known what is pinned, nothing is evicted."""
    monkeypatch.setattr(residency, "RETRY_S", 0.01)
    store = MemoryStore()
    store.give("other", data(1))
    PinFile(tmp_path / "pins", FakeDisk()).save(["file"])

    async def fail(*_: object) -> None:
        raise Unavailable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(pins_module, "find", fail)
        async with lake(store, tmp_path) as node:
            await node.read("other")
            await until(lambda: "keeping what is pinned: the store is away" in caplog.text)
            assert node.parts.cache.evict(1 << 40) == 0, "it may be pinned"
            await node.fs.residency.unpin_paths([("file", "")])
            with trio.fail_after(10):
                while not node.parts.cache.evict(1 << 40):
                    await trio.sleep(0.01)


async def test_file_that_two_pins_cover_is_counted_once(tmp_path: Path) -> None:
    store = MemoryStore()
    for path in ("d/a", "d/b", "other"):
        store.give(path, data(1))
    async with lake(store, tmp_path) as node:
        for path in ("d/a", "d", "other"):
            await pin(node, path)
        found = node.fs.residency.pins.statistics()
        assert (found["paths"], found["files"], found["bytes"]) == (3, 3, 12 * MIB)


async def test_evict_spares_what_is_pinned_open_or_dirty(tmp_path: Path) -> None:
    store = MemoryStore()
    for name in ("pinned", "open", "other"):
        store.give(f"d/{name}", data(len(name)))
    async with lake(store, tmp_path) as node:
        await pin(node, "d/pinned")
        handle = await node.open("d/open")
        dirty = await node.create("d/dirty")
        await node.fs.write(dirty, 0, b"not in the store")
        await node.fs.residency.warm([("d", "")], WarmOptions())
        used = node.parts.cache.files.bytes_used
        counts = await node.fs.residency.evict_paths([("d", "")])
        freed = counts.pop("freed_bytes")
        assert counts == {"files": 1, "pinned_files": 1, "open_files": 1, "dirty_files": 1}
        assert isinstance(freed, int)
        assert used - node.parts.cache.files.bytes_used == freed >= 4 * MIB
        assert [(await local(node, f"d/{name}"))[0] for name in ("pinned", "open", "other", "dirty")] == [
            4 * MIB, 4 * MIB, 0, 16,
        ]  # fmt: skip
        await node.close(handle)
        await node.close(dirty)
        assert await node.read("d/dirty") == b"not in the store"


async def test_evict_of_one_packed_file_leaves_the_others(tmp_path: Path) -> None:
    store = MemoryStore()
    await pack(store, tmp_path / "writer", 3)
    async with lake(store, tmp_path / "node") as node:
        await node.fs.residency.warm([("d", "")], WarmOptions())
        before = node.parts.cache.files.bytes_used
        counts = await node.fs.residency.evict_paths([("d/1", "")])
        freed = counts["freed_bytes"]
        assert isinstance(freed, int)
        assert 4 * MIB <= freed <= 5 * MIB
        assert node.parts.cache.files.bytes_used == before - freed
        assert (await local(node, "d/1"))[0] == 0
        assert (await local(node, "d"))[0] >= 6 * MIB
        again = await node.fs.residency.evict_paths([("d/1", "")])
        assert (counts["files"], again["files"], again["freed_bytes"]) == (1, 0, 0)
        await pin(node, "d/0")
        beside = await node.fs.residency.evict_paths([("d", "")])
        assert (beside["files"], beside["pinned_files"], beside["open_files"]) == (1, 1, 1), "they share a block"
        await node.fs.residency.unpin_paths([("d/0", "")])
        for number in range(3):
            assert await node.read(f"d/{number}") == data(number)
        await until(lambda: not reading(node)["bytes_inflight"])  # readers do not wait for the cache disk
        await node.fs.residency.evict_paths([("d", "")])
        assert (await local(node, "d"))[0] == 0
        assert not list((tmp_path / "node" / "blocks").glob("*/*"))


def test_pin_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    file = PinFile(tmp_path / "pins", FakeDisk())
    assert file.load() == []
    file.save(["a b", "é/ü", "x\ny"])
    assert PinFile(tmp_path / "pins", FakeDisk()).load() == ["a b", "é/ü", "x\ny"]
    (tmp_path / "pins.new").mkdir()
    with pytest.raises(CacheError, match="cannot be saved"):
        file.save([])
    assert file.load() == ["a b", "é/ü", "x\ny"]
