"""Files larger than staging that are written at random: hidden objects that nobody sees, and that do not stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio.testing

from lakefs_fuse.errors import LakeError
from lakefs_fuse.upload import draft as drafts
from lakefs_fuse.upload.spilled_parts import SPILLED
from tests.memory_store import WAIT_S_MAX, MemoryStore, Pause, Request, When
from tests.upload.drafting import noise, reached
from tests.vfs.lakes import Lake, lake
from tests.vfs.writing_back import Outage, die, until

PART = 64 * 1024
COUNT = 40


@pytest.fixture(autouse=True)
def small_spills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "SPILL_BYTES_MIN", PART // 4)


def hidden(store: MemoryStore) -> list[str]:
    return [key for key in store.objects if key.startswith(SPILLED)]


async def write_halves(m: Lake, path: str) -> tuple[int, bytes]:
    """The first half of each of many parts, twice what staging holds; the handle, and what the file has now."""
    handle, expected = await m.create(path), bytearray()
    for index in range(COUNT):
        piece = noise(index, PART // 2 + 10 * index)
        await m.fs.write(handle, index * PART, piece)
        expected[index * PART :] = bytes(index * PART - len(expected)) + piece
    await m.fs.write(handle, 39 * PART + 100, b"changed")
    expected[39 * PART + 100 : 39 * PART + 107] = b"changed"
    await m.fs.write(handle, 3 * PART + 100, b"changed")  # of a page that was spilled
    expected[3 * PART + 100 : 3 * PART + 107] = b"changed"
    return handle, bytes(expected)


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_spilled_file_is_read_stored_and_leaves_no_hidden_objects(tmp_path: Path, durability: str) -> None:
    store = MemoryStore()
    config = {"staging_bytes_max": 10 * PART, "durability": durability}
    async with lake(store, tmp_path / "cache", **config) as m:  # type: ignore[arg-type]
        handle, expected = await write_halves(m, "f")
        assert hidden(store)
        assert await m.names() == ["f"]
        assert await m.read_handle(handle) == expected
        await m.close(handle)
        await m.fs.make_durable()
        assert store.data("f") == await m.read("f") == expected
        assert hidden(store) == []
        handle, _ = await write_halves(m, "g")
        await m.unlink("g")
        await m.close(handle)
        assert hidden(store) == []
    assert store.uploads == {}


async def test_file_is_read_while_its_hidden_objects_are_deleted(tmp_path: Path) -> None:
    """The new version is visible then, and not recorded here yet."""
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", staging_bytes_max=10 * PART) as m:
        handle, expected = await write_halves(m, "f")
        last = max(hidden(store))
        pause = store.hook = Pause(lambda request: request.what == "delete" and request.key == last, "after")
        found: list[bytes] = []

        async def read() -> None:
            found.append(await m.read_handle(handle))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.flush, handle)
            await trio.to_thread.run_sync(pause.reached.wait, WAIT_S_MAX)
            assert len(hidden(store)) < COUNT
            nursery.start_soon(read)
            await trio.sleep(0.2)
            pause.resume()
        assert found == [expected]
        await m.close(handle)


@pytest.mark.parametrize("what", ["create_multipart", "put"])
async def test_file_that_is_removed_and_closed_during_its_spill_leaves_its_room_to_the_writer_that_waits(
    tmp_path: Path, what: str
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", staging_bytes_max=10 * PART, pack="never") as m:
        store.give("old", noise("old", 30 * PART))
        await m.poll()
        old, new, written = await m.open("old", os.O_RDWR), await m.create("new"), noise("new", PART + PART // 2)
        for index in range(18):
            await m.fs.write(old, index * PART, noise(index, PART // 2))
        draft = m.fs.handle(old).file.draft
        assert draft is not None
        kept = Pause(lambda request: request.what == "get" and request.key == "old")
        spill = Pause(lambda request: request.what == what)

        def hook(request: Request, when: When) -> None:
            for pause in (kept, spill):
                pause(request, when)

        store.hook = hook
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.unlink, "old")
            await reached(kept.reached)
            nursery.start_soon(m.fs.write, new, 0, written)
            await reached(spill.reached)
            kept.resume()
            await until(lambda: draft.unlinked)
            nursery.start_soon(m.close, old)
            await trio.testing.wait_all_tasks_blocked(0.1)
            spill.resume()
        await m.close(new)
        assert store.data("new") == written
        assert hidden(store) == []
        assert store.uploads == {}


@pytest.mark.parametrize("how", ["finish", "abort"])
async def test_spilled_file_of_a_dead_daemon_is_finished_or_leaves_nothing(tmp_path: Path, how: str) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", staging_bytes_max=10 * PART) as m:
        _, expected = await write_halves(m, "f")
        dead = die(tmp_path / "cache", tmp_path / "dead")
        left = dict(store.objects)
    store.objects.update(left)
    async with lake(store, dead, staging_bytes_max=10 * PART, orphans=how) as m:
        assert m.fs.unfinished() == []
        assert hidden(store) == []
        assert await m.names() == (["f"] if how == "finish" else [])
        if how == "finish":
            assert store.data("f") == await m.read("f") == expected
    assert store.uploads == {}


async def test_close_that_is_cancelled_while_hidden_objects_are_deleted_has_stored_the_file(tmp_path: Path) -> None:
    """The kernel interrupts the close of a program that is killed. Each further one failed with an internal error."""
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", staging_bytes_max=10 * PART) as m:
        handle, expected = await write_halves(m, "f")
        pause = store.hook = Pause(lambda request: request.what == "list" and request.key.startswith(SPILLED))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.flush, handle)
            await reached(pause.reached)
            nursery.cancel_scope.cancel()
            pause.resume()
        sent = store.count("complete_multipart")
        await m.close(handle)
        assert store.count("complete_multipart") == sent == 1
        assert await m.read("f") == store.data("f") == expected
        assert hidden(store) == []


async def test_file_that_is_removed_after_its_close_failed_leaves_its_room_while_the_store_is_asked_about_it(
    tmp_path: Path,
) -> None:
    """The next writer failed at once with ENOSPC, although no program could use the bytes any more."""
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", staging_bytes_max=10 * PART, pack="never", retry_timeout_s=0.0) as m:
        outage = Outage(store)
        with pytest.raises(LakeError):
            await m.write("f", noise("f", 8 * PART))
        asks = Pause(lambda request: (request.what, request.key) == ("head", "f") and store.count("head") > heads + 1)
        heads, store.hook = store.count("head"), asks
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.unlink, "f")
            await reached(asks.reached)
            outage.away = False
            await m.write("g", noise("g", 5 * PART))
            asks.resume()
        assert store.data("g") == noise("g", 5 * PART)
