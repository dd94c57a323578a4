"""Files that are removed while the store is away, those whose close failed for that included."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from lakefs_fuse.errors import LakeError, Unavailable
from lakefs_fuse.vfs.ops import unlink
from lakefs_fuse.vfs.writeback import queue
from tests.memory_store import Failures, MemoryStore, Request, When
from tests.upload.drafting import noise
from tests.vfs.lakes import Lake, lake
from tests.vfs.writing_back import LARGE, NEVER_S, REACH_S_MAX, die, writing_back

LAST = "put", "complete_multipart"
MIB = 1 << 20
BASE_BYTES = 12 * MIB + 5
RETRY_S, UNLINK_S_MAX = 20.0, 7.0


class LostRequest:
    """A store's hook: the request that stores a version fails, perhaps once it was carried out, and then all others."""

    def __init__(self, store: MemoryStore, *, is_carried_out: bool) -> None:
        self.is_away, self._when = False, "after" if is_carried_out else "before"
        store.hook = self

    def __call__(self, request: Request, when: When) -> None:
        if request.what in LAST and when == self._when:
            self.is_away = True
        elif not (self.is_away and when == "before"):
            return
        raise Unavailable("the store is away")


async def close_in_vain(m: Lake, path: str, data: bytes) -> int:
    """A new file, closed and not released."""
    handle = await m.create(path)
    await m.fs.write(handle, 0, data)
    with pytest.raises(LakeError):
        await m.fs.flush(handle)
    return handle


async def wait_gone(m: Lake, store: MemoryStore, path: str) -> None:
    with trio.fail_after(REACH_S_MAX):
        while path in store.objects or store.uploads:
            await m.sync()
            await trio.sleep(0.01)


@pytest.mark.parametrize(("size", "is_open"), [(10, False), (10, True), (LARGE, False), (LARGE, True)])
@pytest.mark.parametrize("is_carried_out", [True, False])
async def test_file_that_was_never_stored_is_removed_for_good(
    tmp_path: Path, size: int, is_open: bool, is_carried_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "DISCARD_S_FIRST", 0.01)
    store = MemoryStore()
    async with lake(store, tmp_path / "cache") as m:
        assert await m.names() == []
        lost = LostRequest(store, is_carried_out=is_carried_out)
        handle = await close_in_vain(m, "f", noise(1, size))
        assert lost.is_away
        if not is_open:
            await m.fs.release(handle)
        await m.unlink("f")
        if is_open:
            await m.fs.release(handle)
        assert await m.names() == []
        died = die(tmp_path / "cache", tmp_path / "died")
        copy = MemoryStore()
        copy.objects, copy.uploads = dict(store.objects), dict(store.uploads)
        store.hook = lambda _request, _when: None
        await wait_gone(m, store, "f")
        assert (await m.names(), m.fs.unfinished()) == ([], [])
    for objects, cache in ((store, tmp_path / "cache"), (copy, died)):
        async with lake(objects, cache) as again:
            await again.fs.make_durable()
            await wait_gone(again, objects, "f")
            assert (await again.names(), again.fs.unfinished()) == ([], [])


@pytest.mark.parametrize("durability", [pytest.param("close", marks=pytest.mark.long), "writeback"])
async def test_changed_file_that_is_open_is_removed_within_seconds(tmp_path: Path, durability: str) -> None:
    store = MemoryStore()
    store.give("f", noise(1, BASE_BYTES))
    async with lake(store, tmp_path, retry_timeout_s=RETRY_S, durability=durability, pack="never") as m:
        reader, writer = await m.open("f"), await m.open("f", os.O_RDWR)
        await m.fs.write(writer, BASE_BYTES, b"more")
        store.hook = away = Failures(lambda _request: True, Unavailable("the store is away"), count=1 << 30)
        await m.fs.flush(writer) if durability == "writeback" else None
        with trio.fail_after(UNLINK_S_MAX):
            await m.unlink("f")
        away.left = 0
        assert bytes(await m.fs.read(writer, BASE_BYTES, 10)) == b"more"
        await m.fs.release(writer)
        await m.fs.release(reader)


async def test_open_file_is_fetched_before_it_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unlink, "KEPT_STEP_BYTES", 4 * MIB)
    store = MemoryStore()
    store.give("f", noise(1, BASE_BYTES))
    async with lake(store, tmp_path) as m:
        reader = await m.open("f")
        await m.unlink("f")
        del store.objects["f"]
        assert await m.read_handle(reader) == noise(1, BASE_BYTES)
        await m.fs.release(reader)


@pytest.mark.parametrize("change", ["removed", "renamed"])
async def test_file_acknowledged_after_a_sync_without_answer_leaves_nothing_under_its_name(
    tmp_path: Path, change: str
) -> None:
    """The store has what the `fsync` sent, although that failed; `close()` then waits for the local disk only."""
    store, data = MemoryStore(), noise(1, 1000)
    async with writing_back(store, tmp_path / "cache", pack="auto", delay_s=NEVER_S) as m:
        assert await m.names() == []
        lost = LostRequest(store, is_carried_out=True)
        handle = await m.create("f")
        await m.fs.write(handle, 0, data)
        with pytest.raises(Unavailable):
            await m.fs.fsync(handle)
        await m.close(handle)
        assert lost.is_away
        assert "f" in store.objects
        store.hook = lambda _request, _when: None
        if change == "removed":
            await m.unlink("f")
        else:
            await m.rename("f", "new")
        await m.fs.make_durable()
        await m.sync()
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == ({} if change == "removed" else {"new": data})
