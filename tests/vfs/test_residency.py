"""Selection, warming and inspection by path in a filesystem over a store in memory."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import trio

from lakefs_fuse.errors import AccessDenied, CacheError, ConfigError, FileError
from lakefs_fuse.metrics import Warming
from lakefs_fuse.vfs.residency import residency
from lakefs_fuse.vfs.residency.residency import WarmOptions
from lakefs_fuse.vfs.residency.selection import PAGE_NAMES, Selected, without_repetitions
from tests.memory_store import Failures, MemoryStore, Pause
from tests.vfs.lakes import Lake, lake, two_lakes
from tests.vfs.writing_back import until

TREE = ("a/1.bin", "a/2.bin", "a/.hidden.bin", "a/b/3.bin", "a/b/c/4.txt", ".git/5.bin", "6.bin", "[x]/7.bin")


def gets(store: MemoryStore) -> int:
    return sum(request.what == "get" and not request.key.startswith(".lakefs/") for request in list(store.requests))


async def matched(node: Lake, path: str, pattern: str) -> list[str]:
    return sorted(row.path for row in await node.fs.residency.inspect([(path, pattern)]))


async def test_globs_match_as_in_a_shell(tmp_path: Path) -> None:
    store = MemoryStore()
    for key in TREE:
        store.give(key, b"x")
    async with lake(store, tmp_path) as node:
        for path, pattern, expected in [
            ("", "*.bin", ["6.bin"]),
            ("", "*", ["6.bin", "[x]", "a"]),
            ("a", "*", ["a/1.bin", "a/2.bin", "a/b"]),
            ("a", ".*", ["a/.hidden.bin"]),
            ("a", "?.bin", ["a/1.bin", "a/2.bin"]),
            ("a", "[!1].bin", ["a/2.bin"]),
            ("", "**/*.bin", ["6.bin", "[x]/7.bin", "a/1.bin", "a/2.bin", "a/b/3.bin"]),
            ("", "a/**/?.*", ["a/1.bin", "a/2.bin", "a/b/3.bin", "a/b/c/4.txt"]),
            ("a", "**", ["a/1.bin", "a/2.bin", "a/b"]),
            ("", ".g*/*", [".git/5.bin"]),
            ("[x]", "7*", ["[x]/7.bin"]),
        ]:
            assert await matched(node, path, pattern) == expected, pattern
        with pytest.raises(FileError, match="a/z\\* matches nothing") as raised:
            await matched(node, "a", "z*")
        assert raised.value.errno == errno.ENOENT
        with pytest.raises(ConfigError):
            await matched(node, "", "a[")


async def test_what_is_below_another_path_counts_once() -> None:
    paths = [("a", ""), ("a/b", ""), ("a/b", "*"), ("a", "*"), ("ab", ""), ("ab", ""), ("c", "*")]
    assert await without_repetitions(paths) == [Selected("a"), Selected("ab"), Selected("c", "*")]
    assert await without_repetitions([("", ""), ("a", "")]) == [Selected("")]


async def test_warm_of_packed_plain_and_dirty_files(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "writer", pack="always") as writer:
        await writer.mkdir("d")
        for number in range(5):
            await writer.write(f"d/{number}", bytes([number]) * 1000)
        await writer.sync()
    store.give("d/plain", b"plain" * 100)
    async with lake(store, tmp_path / "node") as node:
        handle = await node.create("d/dirty")
        await node.fs.write(handle, 0, b"not in the store")
        (before,) = await node.fs.residency.inspect([("d", "")])
        assert (before.files, before.bytes, before.local_bytes) == (7, 5516, 16)
        progress = Warming()
        summary = await node.fs.residency.warm([("d", "")], WarmOptions(), progress)
        assert (summary["files"], summary["bytes"], summary["left_out_files"]) == (6, 5500, 0)
        assert (progress.files_done, progress.files_total, progress.stage) == (6, 6, "ended")
        (after,) = await node.fs.residency.inspect([("d", "")])
        assert after.local_bytes == after.bytes
        assert after.used_s > 0
        asked = gets(store)
        for number in range(5):
            assert await node.read(f"d/{number}") == bytes([number]) * 1000
        assert await node.read("d/plain") == b"plain" * 100
        assert gets(store) == asked
        assert node.fs.statistics()["warm"]["finished"] == 1  # type: ignore[index]
        await node.close(handle)


async def test_warm_in_small_batches_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "OBJECTS_AT_ONCE", 2)
    monkeypatch.setattr(residency, "FILES_AT_ONCE", 3)
    store = MemoryStore()
    for number in range(11):
        store.give(f"d/{number}", bytes([number]) * 100)
    async with lake(store, tmp_path) as node:
        summary = await node.fs.residency.warm([("d", "")], WarmOptions())
        assert (summary["files"], summary["fetched_bytes"]) == (11, 1100)
        (row,) = await node.fs.residency.inspect([("d", "")])
        assert (row.files, row.local_bytes) == (11, 1100)
        assert gets(store) == 11


async def test_warms_take_turns_and_a_failed_one_lets_the_next_begin(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("a", b"a" * 100)
    async with lake(store, tmp_path) as node:
        warm = node.fs.residency.warm
        with pytest.raises(FileError, match=r"^/nowhere/b does not exist"):
            await warm([("a", ""), ("b", "")], WarmOptions())
        assert gets(store) == 0
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(warm, [("a", "")], WarmOptions())
        assert gets(store) == 1
        statistics = node.fs.residency.statistics()
        assert (statistics["finished"], statistics["failed"], statistics["running"]) == (3, 1, False)
        assert statistics["last_error"] == "", "its caller has been told"


async def test_error_of_a_warm_in_the_background_is_shown_until_one_finishes(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("a", b"a" * 100)

    def value(name: str) -> object:
        return node.fs.residency.statistics()[name]

    async with lake(store, tmp_path) as node:
        store.hook = Failures(lambda request: request.key == "a" and request.what == "get", AccessDenied("no key"))
        for finished, error in ((0, "no key"), (1, "")):
            await node.fs.residency.warm([("a", "")], WarmOptions(is_background=True))
            with trio.fail_after(10):
                while value("running"):
                    await trio.sleep(0.01)
            assert (value("finished"), value("last_error")) == (finished, error)


async def test_warm_that_cannot_fit_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    store.give("a", b"a" * 100)
    monkeypatch.setattr(residency, "MARGIN_BYTES", 1 << 60)
    async with lake(store, tmp_path) as node:
        with pytest.raises(CacheError, match=r"do not fit.*as-much-as-fits"):
            await node.fs.residency.warm([("a", "")], WarmOptions())
        summary = await node.fs.residency.warm([("a", "")], WarmOptions(is_partial=True))
        assert (summary["left_out_files"], summary["left_out_bytes"], gets(store)) == (1, 100, 0)


async def test_directories_are_listed_once_and_not_again_within_the_ttl(tmp_path: Path) -> None:
    store = MemoryStore()
    for number in range(20):
        store.give(f"d/{number % 5}/{number}/file", b"x")

    def lists() -> int:
        return sum(request.what == "list" and not request.key.startswith(".lakefs/") for request in store.requests)

    async with lake(store, tmp_path) as node:
        before = lists()
        assert len(await matched(node, "d", "**/file")) == 20
        assert lists() - before <= 28
        before = lists()
        await node.fs.residency.warm([("d", "")], WarmOptions())
        await node.fs.residency.inspect([("", "")])
        assert lists() - before <= 1, "the root was not listed"


async def test_directory_that_is_removed_during_the_walk_is_no_error(tmp_path: Path) -> None:
    store = MemoryStore(page_keys_max=1)  # so that no LIST answers for several directories
    for path in ("t/a/below/file", "t/b/below/file"):
        store.give(path, b"bytes")
    async with two_lakes(store, tmp_path) as (one, two):
        await one.tree()
        await two.names("t")
        store.hook = listing = Pause(lambda request: request.what == "list" and request.key == "t/a/")
        async with trio.open_nursery() as nursery:
            done = dict[str, object]()

            async def warm() -> None:
                done.update(await two.fs.residency.warm([("t", "")], WarmOptions()))

            nursery.start_soon(warm)
            await until(listing.reached.is_set)
            await one.unlink("t/b/below/file")
            await one.rmdir("t/b/below")
            await one.rmdir("t/b")
            await one.sync()
            await two.poll()
            listing.resume()
        assert done["files"] == 1


async def test_files_that_are_removed_while_those_before_are_fetched_are_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(residency, "OBJECTS_AT_ONCE", 1)
    store = MemoryStore()
    for path in ("t/d/1", "t/d/2", "t/d/3"):
        store.give(path, path.encode())
    async with two_lakes(store, tmp_path) as (one, two):
        store.hook = fetching = Pause(lambda request: request.what == "get" and request.key == "t/d/1")
        async with trio.open_nursery() as nursery:
            done = dict[str, object]()

            async def warm() -> None:
                done.update(await two.fs.residency.warm([("t", "")], WarmOptions()))

            nursery.start_soon(warm)
            await until(fetching.reached.is_set)
            for name in "123":
                await one.unlink(f"t/d/{name}")
            await one.rmdir("t/d")
            await one.sync()
            await two.poll()
            fetching.resume()
        assert (done["files"], done["gone_files"]) == (3, 1)


async def test_walk_lets_other_tasks_run_though_nothing_matches(tmp_path: Path) -> None:
    store = MemoryStore()
    for number in range(3 * PAGE_NAMES):
        store.give(f"d/{number}", b"x")
    async with lake(store, tmp_path) as node:
        await node.fs.residency.inspect([("", "")])
        turns = 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await trio.lowlevel.checkpoint()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            with pytest.raises(FileError, match="matches nothing"):
                await matched(node, "", "**/absent")
            assert turns >= 3
            nursery.cancel_scope.cancel()
