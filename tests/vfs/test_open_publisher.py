"""Files that are stored while they are being written: what of them, and when."""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trio

from lakefs_fuse.config import Rule
from lakefs_fuse.errors import Unavailable
from lakefs_fuse.vfs.ops.attributes import AttributeChange
from tests.commits.committing import until
from tests.memory_store import Failures, MemoryStore
from tests.upload.drafting import noise
from tests.vfs.lakes import Lake, lake

EVERY_S = 0.05
LARGE = 300 << 10


def publishing(store: MemoryStore, cache_dir: Path, **config: object) -> AbstractAsyncContextManager[Lake]:
    """Logs are published, other files are not."""
    settings = {"rules": (Rule(path="**/*.log", publish_s=EVERY_S),), "retry_timeout_s": 0.0}
    return lake(store, cache_dir, **(settings | config))  # type: ignore[arg-type]


def stored(store: MemoryStore, name: str) -> bytes | None:
    return store.data(name) if name in store.objects else None


async def begin_log(m: Lake, store: MemoryStore) -> int:
    """A handle of a log that is published already."""
    handle = await m.create("a.log")
    await m.fs.write(handle, 0, b"text")
    await until(lambda: stored(store, "a.log") == b"text")
    return handle


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_file_grows_in_the_store_while_it_is_open(tmp_path: Path, durability: str) -> None:
    store = MemoryStore()
    async with publishing(store, tmp_path, durability=durability, pack="never") as m:
        handle = await m.create("a.log")
        assert m.fs.handle(handle).is_published_while_open
        text = b""
        for line in (b"one\n", b"two\n", noise(1, LARGE)):
            await m.fs.write(handle, len(text), line)
            text += line
            await until(lambda: stored(store, "a.log") == text)  # noqa: B023  # asked before the next turn
        assert await m.read("a.log") == text
        puts = store.count("put")
        await trio.sleep(3 * EVERY_S)
        assert store.count("put") == puts, "nothing was written"
        await m.fs.write(handle, len(text), b"end")
        await m.close(handle)
        await m.fs.make_durable()
        assert store.data("a.log") == text + b"end"


async def test_file_that_no_rule_names_is_stored_when_it_is_closed(tmp_path: Path) -> None:
    store = MemoryStore()
    async with publishing(store, tmp_path) as m:
        handle = await m.create("a.txt")
        assert not m.fs.handle(handle).is_published_while_open
        await m.fs.write(handle, 0, b"text")
        await trio.sleep(3 * EVERY_S)
        assert stored(store, "a.txt") is None
        await m.close(handle)


async def test_option_holds_where_no_rule_says_otherwise(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, publish_s=EVERY_S, rules=(Rule(path="*.txt", publish_s=0.0),)) as m:
        handles = [await m.create(name) for name in ("a.log", "a.txt")]
        for handle in handles:
            await m.fs.write(handle, 0, b"text")
        await until(lambda: stored(store, "a.log") == b"text")
        await trio.sleep(2 * EVERY_S)
        assert stored(store, "a.txt") is None
        for handle in handles:
            await m.close(handle)


@pytest.mark.parametrize("how", ["write", "truncate"])
async def test_file_with_a_hole_waits_for_its_close(tmp_path: Path, how: str) -> None:
    store = MemoryStore()
    async with publishing(store, tmp_path) as m:
        handle = await m.create("a.log")
        await m.fs.write(handle, 0, b"begin")
        await until(lambda: stored(store, "a.log") == b"begin")
        if how == "write":
            await m.fs.write(handle, 100, b"end")
        else:
            await m.fs.setattr(m.fs.handle(handle).file.entry.inode, AttributeChange(size=103), handle)
        await trio.sleep(3 * EVERY_S)
        assert store.data("a.log") == b"begin"
        await m.close(handle)
        assert len(store.data("a.log")) == 103


@pytest.mark.parametrize("how", ["write", "truncate"])
async def test_file_that_was_emptied_and_has_a_hole_waits_for_its_close(tmp_path: Path, how: str) -> None:
    """As of a log that is copied and truncated, whose writer goes on at its old offset."""
    store = MemoryStore()
    async with publishing(store, tmp_path) as m:
        handle = await m.create("a.log")
        await m.fs.write(handle, 0, b"x" * 100)
        await until(lambda: stored(store, "a.log") == b"x" * 100)
        inode = m.fs.handle(handle).file.entry.inode
        await m.fs.setattr(inode, AttributeChange(size=0), handle)
        if how == "write":
            await m.fs.write(handle, 50, b"y" * 10)
        else:
            await m.fs.setattr(inode, AttributeChange(size=60), handle)
        await trio.sleep(3 * EVERY_S)
        assert store.data("a.log") in (b"x" * 100, b""), "the hole is not published"
        await m.fs.write(handle, 0, b"z" * 60)
        await until(lambda: stored(store, "a.log") == b"z" * 60)
        await m.close(handle)


async def test_appending_to_an_older_file_publishes_it_with_what_it_had(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("a.log", b"old\n")
    async with publishing(store, tmp_path) as m:
        handle = await m.open("a.log", os.O_RDWR | os.O_APPEND)
        await m.fs.write(handle, 4, b"new\n")
        await until(lambda: stored(store, "a.log") == b"old\nnew\n")
        await m.close(handle)


async def test_outage_is_told_once_and_what_was_written_is_published_after_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    async with publishing(store, tmp_path) as m:
        handle = await m.create("a.log")
        store.hook = Failures(lambda request: request.what == "put", Unavailable("away"), count=1000)
        await m.fs.write(handle, 0, b"text")
        await until(lambda: any("a.log is not stored while" in record.message for record in caplog.records))
        await trio.sleep(4 * EVERY_S)
        assert sum("a.log is not stored while" in record.message for record in caplog.records) == 1
        store.hook = lambda _request, _when: None
        await until(lambda: stored(store, "a.log") == b"text")
        await m.close(handle)


async def test_file_that_is_removed_is_not_published_any_more(tmp_path: Path) -> None:
    store = MemoryStore()
    async with publishing(store, tmp_path) as m:
        handle = await begin_log(m, store)
        await m.unlink("a.log")
        await m.fs.write(handle, 4, b"more")
        await trio.sleep(3 * EVERY_S)
        assert stored(store, "a.log") in (None, b"text")
        await m.close(handle)
        assert await m.names() == []


async def test_file_that_is_renamed_is_published_under_its_new_name(tmp_path: Path) -> None:
    store = MemoryStore()
    async with publishing(store, tmp_path) as m:
        handle = await begin_log(m, store)
        await m.rename("a.log", "b.log")
        await m.fs.write(handle, 4, b"more")
        await until(lambda: stored(store, "b.log") == b"textmore")
        await m.close(handle)
        assert await m.tree() == {"b.log": b"textmore"}
