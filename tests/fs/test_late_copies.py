"""The store copies a renamed object to the key of its new name while that name changes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.errors import LakeError, Unavailable
from lakefs_fuse.fs import begun_copies, relocating
from lakefs_fuse.store.protocol import ObjectMeta
from tests.fs.lakes import Clock, Lake, lake
from tests.fs.writing_back import die, rewrite
from tests.memory_store import MemoryStore, Pause, Request, When
from tests.write.drafting import reached

AFTER_S = 10.0
A_WHILE_S = 0.05
PART = 4
LATER_S = 3.0
Change = Callable[[Lake], Awaitable[None]]


async def replace(m: Lake) -> None:
    await m.rename("new", "d/name")


async def remove(m: Lake) -> None:
    await m.unlink("d/name")
    await m.fs.sync_names()


async def rename(m: Lake) -> None:
    await m.rename("d/name", "other")


async def rename_directory(m: Lake) -> None:
    await m.rename("d", "e")


async def store_in_place(m: Lake) -> None:
    await rewrite(m, "d/name", b"new bytes")


CHANGES: dict[str, tuple[Change, dict[str, object]]] = {
    "replaced": (replace, {"d": None, "d/name": b"new bytes"}),
    "removed": (remove, {"d": None, "new": b"new bytes"}),
    "renamed": (rename, {"d": None, "new": b"new bytes", "other": b"bytes"}),
    "its directory renamed": (rename_directory, {"e": None, "e/name": b"bytes", "new": b"new bytes"}),
    "stored in place": (store_in_place, {"d": None, "d/name": b"new bytes", "new": b"new bytes"}),
}


class Kept:
    """A store's hook: nothing is deleted from it. ``then`` sees everything else."""

    def __init__(self, store: MemoryStore) -> None:
        self.then: Callable[[Request, When], None] = lambda _request, _when: None
        store.hook = self

    def __call__(self, request: Request, when: When) -> None:
        if request.what in ("delete", "delete_many"):
            raise Unavailable("nothing is deleted")
        self.then(request, when)


class SameETags(MemoryStore):
    """A copy has the ETag of what it is a copy of, as in S3 where that is a hash of the bytes."""

    def copy(self, source: str, target: str, *, etag: str | None = None) -> ObjectMeta:
        copied = msgspec.structs.replace(super().copy(source, target, etag=etag), etag=self.objects[source][1].etag)
        self.objects[target] = (self.objects[target][0], copied)
        return copied


async def renamed_away(m: Lake, clock: Clock) -> None:
    """`d/name` has its bytes at `old`, and they are to be copied."""
    await m.mkdir("d")
    await m.write("old", b"bytes")
    await m.write("new", b"new bytes")
    await m.rename("old", "d/name")
    clock.advance(20 * AFTER_S)
    await m.tree()


async def relocate(m: Lake) -> int:
    return await m.fs._status._relocator.relocate_due()


@asynccontextmanager
async def copying(m: Lake, kept: Kept, what: str) -> AsyncIterator[Pause]:
    """Inside, until `Pause.resume`, the store has been asked for a copy, and has not begun with it."""
    kept.then = pause = Pause(lambda request: request.what == what and not request.key.startswith(".lakefs"))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(relocate, m)
        await reached(pause.reached)
        try:
            yield pause
        finally:
            pause.resume()


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("what", ["copy", "complete_multipart"])
async def test_a_change_waits_for_a_copy_to_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, what: str
) -> None:
    """So a copy lies over nothing that was stored later, and nobody takes it for a newer version."""
    if what != "copy":
        monkeypatch.setattr(relocating, "COPY_PART_BYTES", PART)
    change, now = CHANGES[how]
    store, clock = MemoryStore(), Clock()
    store.clock, kept = clock, Kept(store)
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        done = trio.Event()

        async def changed() -> None:
            await change(m)
            done.set()

        async with trio.open_nursery() as nursery:
            async with copying(m, kept, what) as pause:
                nursery.start_soon(changed)
                await trio.sleep(A_WHILE_S)
                assert not done.is_set()
                clock.advance(LATER_S)
                pause.resume()
        await m.fs.sync_names()
        assert m.commits()["relocated"] == 1
        assert await m.tree() == now
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await other.tree() == now
        kept.then = store.hook = lambda _request, _when: None
        clock.advance(20 * AFTER_S)
        await m.sync()
        assert await m.tree() == now
    assert not store.uploads


@pytest.mark.parametrize("how", [how for how in CHANGES if how != "stored in place"])
async def test_a_copy_that_comes_too_late_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The store takes so long for it that the change goes on without."""
    monkeypatch.setattr(begun_copies, "PATIENCE_S", 0.01)
    change, now = CHANGES[how]
    store, clock = MemoryStore(), Clock()
    store.clock, kept = clock, Kept(store)
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        async with copying(m, kept, "copy") as pause:
            await change(m)
            clock.advance(LATER_S)
            pause.resume()
        assert store.data("d/name") == b"bytes"
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await other.tree() == now
        clock.advance(1000)
        assert await m.tree() == now
        kept.then = store.hook = lambda _request, _when: None
        await m.sync()
        assert "d/name" not in store.objects
        assert await m.tree() == now


@pytest.mark.parametrize("how", [how for how in CHANGES if how != "stored in place"])
async def test_a_change_of_another_node_hides_what_is_being_copied(tmp_path: Path, how: str) -> None:
    """It cannot know of the copy, which comes a moment later; but of what it looks like."""
    change, now = CHANGES[how]
    store, clock = SameETags(), Clock()
    store.clock, kept = clock, Kept(store)
    async with (
        lake(store, tmp_path / "a", clock=clock, pack="never", relocate_after_s=AFTER_S) as a,
        lake(store, tmp_path / "b", clock=clock, pack="never", relocate_after_s=AFTER_S) as b,
    ):
        await renamed_away(a, clock)
        await b.poll()
        await b.tree()
        async with copying(a, kept, "copy") as pause:
            await change(b)
            pause.resume()
        assert store.data("d/name") == b"bytes"
        await a.poll()
        clock.advance(1000)
        assert await b.tree() == now
        assert await a.tree() == now
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == now


async def test_parts_are_not_completed_for_a_name_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes wait for the last request only, not for the parts."""
    monkeypatch.setattr(relocating, "COPY_PART_BYTES", PART)
    store, clock = MemoryStore(), Clock()
    kept = Kept(store)
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        async with copying(m, kept, "upload_part_copy"):
            await replace(m)
        assert store.count("complete_multipart") == 0
        assert not store.uploads
        assert await m.tree() == CHANGES["replaced"][1]
        assert "d/name" not in store.objects


@pytest.mark.parametrize("how", CHANGES)
async def test_a_change_asks_first_what_a_daemon_that_died_has_copied(tmp_path: Path, how: str) -> None:
    """The copy is not a second older than the change."""
    change, now = CHANGES[how]
    store, clock = MemoryStore(), Clock()
    store.clock, kept = clock, Kept(store)
    cache, dead = tmp_path / "cache", tmp_path / "dead"

    def copied(request: Request, when: When) -> None:
        if request.what == "copy" and when == "after":
            die(cache, dead)
            raise LakeError("the daemon died")

    async with lake(store, cache, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        kept.then = copied
        with pytest.raises(LakeError):
            await relocate(m)
    kept.then = lambda _request, _when: None
    assert store.data("d/name") == b"bytes"
    async with lake(store, dead, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await change(m)
        assert await m.tree() == now
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await other.tree() == now


@pytest.mark.parametrize("how", [how for how in CHANGES if how != "stored in place"])
async def test_a_copy_may_come_after_the_next_daemon_has_looked_for_it(tmp_path: Path, how: str) -> None:
    """The store had the request before the daemon died, and took its time."""
    change, now = CHANGES[how]
    store, clock = SameETags(), Clock()
    store.clock, kept = clock, Kept(store)
    cache, dead = tmp_path / "cache", tmp_path / "dead"

    def asked(request: Request, when: When) -> None:
        if request.what == "copy" and when == "before":
            die(cache, dead)
            raise LakeError("the daemon died")

    async with lake(store, cache, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        kept.then = asked
        with pytest.raises(LakeError):
            await relocate(m)
    kept.then = lambda _request, _when: None
    async with lake(store, dead, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await change(m)
        await relocate(m)
        store.copy("old", "d/name")
        clock.advance(100)
        assert await m.tree() == now
        async with lake(store, tmp_path / "other", clock=clock) as other:
            assert await other.tree() == now
        store.hook = lambda _request, _when: None
        await relocate(m)
        clock.advance(1000)
        await m.sync()
        assert store.objects.get("d/name", (b"", None))[0] != b"bytes"
        assert await m.tree() == now
