"""Waits for names that another node, or another S3 client, writes; the kernel is not there."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from lakefs_fuse.errors import FileError, Unavailable
from lakefs_fuse.product import XATTR_VERSION
from lakefs_fuse.vfs.path_waits import LOOK_S_MIN
from tests.memory_store import Failures, MemoryStore
from tests.vfs.lakes import TTL_S, Clock, Lake, lake, two_lakes

REFRESH_S = 0.05
SEEN_S = 3 * LOOK_S_MIN
"""In this time a wait sees that an answer has expired, and that there is another."""
WAIT_S_MAX = 10.0


@asynccontextmanager
async def waiting(node: Lake, path: str, version: str = "", *, count: int = 1) -> AsyncIterator[list[str]]:
    """Waits that begin before the block, and have ended after it; those that have, in the list."""
    ended: list[str] = []

    async def wait() -> None:
        await node.fs.wait_path(path, version, None)
        ended.append(path)

    with trio.fail_after(WAIT_S_MAX):
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(wait)
            await trio.sleep(2 * REFRESH_S)
            yield ended


def lists(store: MemoryStore) -> int:
    """LIST requests about names, which are not those of polls."""
    return sum(request.what == "list" and not request.key.startswith(".lakefs/") for request in list(store.requests))


async def version_of(node: Lake, path: str) -> str:
    return node.fs.xattr((await node.found(path)).inode, XATTR_VERSION).decode()


async def test_wait_for_file_that_another_node_commits_ends_with_the_poll(tmp_path: Path) -> None:
    async with two_lakes(MemoryStore(), tmp_path, pack="always") as (one, two):
        async with waiting(two, "d/e/f") as ended:
            await one.mkdir("d")
            await one.sync()
            await two.poll()
            await one.mkdir("d/e")
            await one.write("d/e/f", b"bytes")
            await one.sync()
            await trio.sleep(REFRESH_S)
            assert not ended
            await two.poll()
        assert await two.read("d/e/f") == b"bytes"


async def test_wait_for_what_is_there_ends_at_once(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("d/f", b"bytes")
    async with lake(store, tmp_path) as node:
        with trio.fail_after(WAIT_S_MAX):
            for path in ("", "d", "d/f"):
                await node.fs.wait_path(path, "", None)


async def test_wait_for_name_that_was_listed_long_ago_asks_whether_it_is_there(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("d/f", b"bytes")
    async with lake(store, tmp_path, clock=clock, refresh_s=REFRESH_S) as node:
        assert await node.names("d") == ["f"]
        store.take("d/f")
        clock.advance(TTL_S)
        with pytest.raises(FileError, match="it does not exist"):
            await node.fs.wait_path("d/f", "", 10 * REFRESH_S)


async def test_wait_for_object_of_another_client_asks_once_in_each_ttl(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("d/other", b"")
    async with lake(store, tmp_path, clock=clock, refresh_s=REFRESH_S) as node, waiting(node, "d/f") as ended:
        for turn in range(1, 4):
            await trio.sleep(SEEN_S)
            asked = lists(store)
            await trio.sleep(SEEN_S)
            assert lists(store) == asked <= 2 * turn, "d, and f in it"
            clock.advance(TTL_S)
        await trio.sleep(SEEN_S)
        store.give("d/f", b"bytes")
        await trio.sleep(SEEN_S)
        assert not ended, "seen as absent within the TTL"
        clock.advance(TTL_S)


@pytest.mark.parametrize("names", [pytest.param(1, marks=pytest.mark.long), 40])
async def test_many_waits_ask_as_often_as_one(names: int, tmp_path: Path) -> None:
    """Those of other names in the directory are answered by its listing."""
    asked = []
    for count in (1, 100):
        store, clock = MemoryStore(), Clock()
        store.give("d/other", b"")
        async with lake(store, tmp_path / str(count), clock=clock, refresh_s=REFRESH_S) as node:
            async with trio.open_nursery() as nursery:
                for number in range(count):
                    nursery.start_soon(node.fs.wait_path, f"d/f{number % names}", "", None)
                for _ in range(3):
                    await trio.sleep(SEEN_S)
                    clock.advance(TTL_S)
                await trio.sleep(SEEN_S)
                nursery.cancel_scope.cancel()
        asked.append(lists(store))
    assert asked[1] <= asked[0] + (8 if names > 1 else 0)


async def test_wait_for_version_ends_with_that_version(tmp_path: Path) -> None:
    async with two_lakes(MemoryStore(), tmp_path, pack="always") as (one, two):
        await one.write("f", b"first")
        await one.sync()
        await two.poll()
        async with waiting(two, "f", await version_of(one, "f")):
            pass
        await one.write("f", b"second")
        async with waiting(two, "f", await version_of(one, "f")) as ended:
            assert not ended
            await two.poll()
        assert await two.read("f") == b"second"
        assert await version_of(one, "f") == await version_of(two, "f")


async def test_version_of_plain_object_is_its_etag_under_every_name(tmp_path: Path) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never") as (one, two):
        await one.write("f", b"bytes")
        etag = store.objects["f"][1].etag
        assert await version_of(one, "f") == etag
        async with waiting(two, "g", etag):
            await one.rename("f", "g")
            await two.poll()
        assert await version_of(two, "g") == etag


async def test_wait_for_version_of_file_being_written_here_ends_when_it_is_stored(tmp_path: Path) -> None:
    store = MemoryStore()
    store.equal_bytes_have_equal_etags = True
    etag = store.give("elsewhere", b"bytes").etag
    async with lake(store, tmp_path, pack="never") as node, waiting(node, "f", etag) as ended:
        handle = await node.create("f")
        await node.fs.write(handle, 0, b"bytes")
        await trio.sleep(4 * REFRESH_S)
        assert not ended
        with pytest.raises(FileError) as failed:
            await version_of(node, "f")
        assert failed.value.errno == errno.ENODATA
        await node.close(handle)


async def test_wait_for_name_made_here_ends_with_it(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path) as node:
        for path, make in (("d", node.mkdir("d")), ("d/f", node.write("d/f", b"")), ("e/f", node.rename("d", "e"))):
            async with waiting(node, path) as ended:
                assert not ended
                await make


async def test_wait_ends_at_symbolic_link_on_the_way(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path) as node, waiting(node, "latest/f"):
        await node.symlink("latest", "elsewhere")


async def test_wait_keeps_the_mount_from_idling(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions: list[float] = []
    async with lake(MemoryStore(), tmp_path, refresh_s=REFRESH_S) as node:
        monkeypatch.setattr(node.fs.namespace.idleness, "note_question", lambda: questions.append(trio.current_time()))
        async with waiting(node, "d"):
            await trio.sleep(SEEN_S)
            await node.mkdir("d")
    assert len(questions) > 1


async def test_wait_that_takes_too_long_says_what_is_missing(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, pack="always") as node:
        await node.write("f", b"")
        found = await version_of(node, "f")
        for path, version, why in (("g/h", "", "it does not exist"), ("f", "v", f"its version is {found}")):
            with pytest.raises(FileError, match=why) as failed:
                await node.fs.wait_path(path, version, 0.2)
            assert failed.value.errno == errno.ETIMEDOUT


async def test_wait_without_time_tells_what_is_known(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("f", b"bytes")
    async with lake(store, tmp_path) as node:
        with pytest.raises(FileError, match="after 0 s it does not exist"):
            await node.fs.wait_path("f", "", 0.0)
        assert await node.names() == ["f"]
        await node.fs.wait_path("f", "", 0.0)
        with pytest.raises(FileError, match="after 0 s it does not exist"):
            await node.fs.wait_path("g", "", 0.0)
        node.fs.events.kernel_told.append(trio.sleep_forever)
        with pytest.raises(FileError, match="the kernel is not notified yet"):
            await node.fs.wait_path("f", "", 0.1)


@pytest.mark.parametrize(
    ("path", "version", "code"),
    [
        (".lakefs/x", "", errno.EPERM),
        ("n" * 256, "", errno.ENAMETOOLONG),
        ("", "v", errno.EISDIR),
        ("d", "v", errno.EISDIR),
    ],
)
async def test_wait_for_what_can_never_be_fails(path: str, version: str, code: int, tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path) as node:
        await node.mkdir("d")
        with pytest.raises(FileError) as failed, trio.fail_after(WAIT_S_MAX):
            await node.fs.wait_path(path, version, None)
        assert failed.value.errno == code


async def test_wait_while_the_store_is_away_goes_on_and_says_so(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, refresh_s=REFRESH_S) as node:
        away = Failures(lambda request: request.what == "list", Unavailable("no route"), count=1 << 30)
        store.hook = away
        with pytest.raises(FileError, match="the store does not answer"):
            await node.fs.wait_path("f", "", 1.0)
        async with waiting(node, "f"):
            away.left = 0
            store.give("f", b"bytes")
        assert await node.read("f") == b"bytes"


async def test_cancelled_wait_leaves_no_listener(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path) as node:
        events = node.fs.events
        before = [len(events.name_changed), len(events.directory_updated), len(events.version_stored)]
        with trio.move_on_after(0.1):
            await node.fs.wait_path("f", "", None)
        assert [len(events.name_changed), len(events.directory_updated), len(events.version_stored)] == before


async def test_wait_ends_after_the_kernel_was_told(tmp_path: Path) -> None:
    told = trio.Event()
    async with two_lakes(MemoryStore(), tmp_path, pack="always") as (one, two):
        two.fs.events.kernel_told.append(told.wait)
        async with waiting(two, "d/f") as ended:
            await one.mkdir("d")
            await one.write("d/f", b"")
            await one.sync()
            await two.poll()
            await trio.sleep(4 * REFRESH_S)
            assert not ended
            told.set()
        assert [name for _, name in two.changes].count(b"d") == 2, "once more, after thousands of others"
