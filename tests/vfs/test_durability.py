"""Calls that make files durable, and whose callers leave before they end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from lakefs_fuse.errors import Unavailable
from lakefs_fuse.vfs import durability
from tests.memory_store import MemoryStore, Pause, When
from tests.upload.drafting import noise, reached
from tests.vfs import lakes
from tests.vfs.lakes import KIB, Lake, lake
from tests.vfs.writing_back import PART, REACH_S_MAX, Outage, until

MIB = KIB * KIB
LAST = "put", "complete_multipart"


def staged_bytes(m: Lake) -> object:
    section = m.fs.statistics()["staging"]
    assert isinstance(section, dict)
    return section["bytes"]


@asynccontextmanager
async def abandoned_call(m: Lake, store: MemoryStore, path: str, when: When) -> AsyncIterator[Pause]:
    """The caller of `make_durable` has left while the request that stores the file waits."""
    pause = store.hook = Pause(lambda request: request.what in LAST and request.key == path, when)
    scope = trio.CancelScope()

    async def make_durable() -> None:
        with scope:
            await m.fs.make_durable(path)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(make_durable)
        await reached(pause.reached)
        scope.cancel()
    try:
        yield pause
    finally:
        pause.resume()


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("size", [1000, 3 * MIB, 40 * MIB])
async def test_make_durable_whose_caller_leaves_stores_the_file(
    tmp_path: Path, size: int, when: When, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lakes, "SPANS", ((16 * MIB, 50), (64 * MIB, 9950)))
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        handle = await m.create("f")
        await m.fs.write(handle, 0, noise(1, size))
        async with abandoned_call(m, store, "f", when):
            pass
        with trio.fail_after(REACH_S_MAX):
            await m.fs.write(handle, size, b"more")
            await m.close(handle)
            assert store.data("f") == noise(1, size) + b"more"
            await m.fs.make_durable()
        await until(lambda: staged_bytes(m) == 0)
        assert m.fs.unfinished() == []


async def test_make_durable_beside_as_many_calls_as_may_run_waits_for_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durability, "CALLS_MAX", 1)
    store = MemoryStore()
    async with lake(store, tmp_path) as m, trio.open_nursery() as nursery:
        handle = await m.create("f")
        await m.fs.write(handle, 0, b"bytes")
        async with abandoned_call(m, store, "f", "after"):
            with trio.move_on_after(0.1) as patience:
                await m.fs.make_durable("g")
            assert patience.cancelled_caught
            nursery.start_soon(m.fs.make_durable, "g")
        with trio.fail_after(REACH_S_MAX):
            await m.fs.make_durable()
        await m.close(handle)


@pytest.mark.parametrize("pack", ["never", "auto"])
async def test_close_of_a_file_that_was_truncated_while_its_parts_wait_for_the_store_fails_in_time(
    tmp_path: Path, pack: str
) -> None:
    store = MemoryStore()
    outage = Outage(store)
    async with lake(store, tmp_path, pack=pack, pack_threshold_bytes=16 * KIB, retry_timeout_s=0.0) as m:
        handle = await m.create("f")
        await m.fs.write(handle, 0, bytes(2 * PART + 1))
        await until(lambda: outage.refused)
        await m.setattr("f", size=10 * KIB)
        with trio.fail_after(10), pytest.raises(Unavailable):
            await m.fs.flush(handle)
        outage.away = False
        await m.close(handle)
        assert await m.read("f") == bytes(10 * KIB)


@pytest.mark.parametrize("size", [1000, 5 * PART])
async def test_file_whose_close_is_cancelled_by_the_end_of_a_session_is_recorded_when_the_mount_drains(
    tmp_path: Path, size: int
) -> None:
    """The request that stores it ends all the same."""
    store, data = MemoryStore(), noise(size, size)
    async with lake(store, tmp_path / "cache", pack="never") as m:
        handle = await m.create("f")
        await m.fs.write(handle, 0, data)
        pause = store.hook = Pause(lambda request: request.what in LAST and request.key == "f")
        async with trio.open_nursery() as session:
            session.start_soon(m.fs.flush, handle)
            await reached(pause.reached)
            session.cancel_scope.cancel()
            pause.resume()
        since = len(store.requests)
        await m.fs.make_durable()
        assert not [request for request in store.requests[since:] if request.what in LAST and request.key == "f"]
        assert await m.read("f") == store.data("f") == data
        assert not m.fs.unfinished()
