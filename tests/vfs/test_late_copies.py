"""The store copies a renamed object to the key of its new name while that name changes."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from lakefs_fuse.errors import LakeError, Unavailable
from lakefs_fuse.vfs.relocation import relocator as relocating
from tests.memory_store import MemoryStore, Pause, Request, When
from tests.upload.drafting import reached
from tests.vfs.lakes import Clock, Lake, lake
from tests.vfs.writing_back import LARGE, die, rewrite, writing_back

AFTER_S = 10.0
NEVER_S = 1e6
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


def new_store(*, copies_keep_etags: bool = False) -> tuple[MemoryStore, Clock, Kept]:
    store, clock = MemoryStore(), Clock()
    store.copies_keep_etags, store.clock = copies_keep_etags, clock
    return store, clock, Kept(store)


async def renamed_away(m: Lake, clock: Clock) -> None:
    """`d/name` has its bytes at `old`, and they are to be copied."""
    await m.mkdir("d")
    await m.write("old", b"bytes")
    await m.write("new", b"new bytes")
    await m.rename("old", "d/name")
    clock.advance(20 * AFTER_S)
    await m.tree()


async def relocate(m: Lake) -> int:
    return await m.parts.relocator.relocate_due()


async def died_copying(store: MemoryStore, root: Path, clock: Clock, kept: Kept, when: When) -> Path:
    """`d/name` was to be copied when the daemon died: before the store had begun with it, or after it had ended.
    Answers its cache directory."""
    cache, dead = root / "cache", root / "dead"

    def asked(request: Request, reached: When) -> None:
        if request.what == "copy" and reached == when:
            die(cache, dead)
            raise LakeError("the daemon died")

    async with lake(store, cache, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        kept.then = asked
        with pytest.raises(LakeError):
            await relocate(m)
    kept.then = lambda _request, _when: None
    return dead


async def seen_by_another(store: MemoryStore, root: Path, clock: Clock) -> dict[str, object]:
    """The lake, as a node sees it that knows nothing else."""
    async with lake(store, root / "another", clock=clock) as another:
        return await another.tree()


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
    store, clock, kept = new_store()
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
        assert await seen_by_another(store, tmp_path, clock) == now
        kept.then = store.hook = lambda _request, _when: None
        clock.advance(20 * AFTER_S)
        await m.sync()
        assert await m.tree() == now
    assert not store.uploads


@pytest.mark.parametrize("how", [how for how in CHANGES if how != "stored in place"])
async def test_a_copy_that_comes_too_late_is_nobodys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """The store takes so long for it that the change goes on without."""
    monkeypatch.setattr(relocating, "PATIENCE_S", 0.01)
    change, now = CHANGES[how]
    store, clock, kept = new_store()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        async with copying(m, kept, "copy") as pause:
            await change(m)
            clock.advance(LATER_S)
            pause.resume()
        assert store.data("d/name") == b"bytes"
        assert await seen_by_another(store, tmp_path, clock) == now
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
    store, clock, kept = new_store(copies_keep_etags=True)
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
    assert await seen_by_another(store, tmp_path, clock) == now


@pytest.mark.parametrize("how", [how for how in CHANGES if how != "stored in place"])
async def test_a_change_of_another_node_hides_a_copy_of_which_nobody_tells(tmp_path: Path, how: str) -> None:
    """The node that asked for it is gone when it comes."""
    change, now = CHANGES[how]
    store, clock, kept = new_store(copies_keep_etags=True)
    await died_copying(store, tmp_path, clock, kept, "before")
    async with lake(store, tmp_path / "other", clock=clock, pack="never", relocate_after_s=NEVER_S) as other:
        await change(other)
        store.copy("old", "d/name")
        clock.advance(1000)
        assert await other.tree() == now
    assert await seen_by_another(store, tmp_path, clock) == now


async def test_parts_are_not_completed_for_a_name_that_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changes wait for the last request only, not for the parts."""
    monkeypatch.setattr(relocating, "COPY_PART_BYTES", PART)
    store, clock, kept = new_store()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        async with copying(m, kept, "upload_part_copy"):
            await replace(m)
        with trio.fail_after(60):
            while store.uploads:
                await trio.sleep(0.01)
        assert store.count("complete_multipart") == 0
        assert await m.tree() == CHANGES["replaced"][1]
        assert "d/name" not in store.objects


@pytest.mark.parametrize("how", CHANGES)
async def test_a_change_asks_first_what_a_daemon_that_died_has_copied(tmp_path: Path, how: str) -> None:
    """The copy is not a second older than the change."""
    change, now = CHANGES[how]
    store, clock, kept = new_store()
    dead = await died_copying(store, tmp_path, clock, kept, "after")
    assert store.data("d/name") == b"bytes"
    async with lake(store, dead, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await change(m)
        assert await m.tree() == now
        assert await seen_by_another(store, tmp_path, clock) == now


@pytest.mark.parametrize("how", [how for how in CHANGES if how != "stored in place"])
async def test_a_copy_may_come_after_the_next_daemon_has_looked_for_it(tmp_path: Path, how: str) -> None:
    """The store had the request before the daemon died, and took its time."""
    change, now = CHANGES[how]
    store, clock, kept = new_store(copies_keep_etags=True)
    dead = await died_copying(store, tmp_path, clock, kept, "before")
    async with lake(store, dead, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await change(m)
        await relocate(m)
        store.copy("old", "d/name")
        clock.advance(100)
        assert await m.tree() == now
        assert await seen_by_another(store, tmp_path, clock) == now
        store.hook = lambda _request, _when: None
        await relocate(m)
        clock.advance(1000)
        await m.sync()
        assert store.objects.get("d/name", (b"", None))[0] != b"bytes"
        assert await m.tree() == now


async def test_a_listing_shows_no_copy_of_which_nothing_is_said_yet(tmp_path: Path) -> None:
    """Not even where it has another ETag than what it is a copy of."""
    store, clock, kept = new_store()
    dead = await died_copying(store, tmp_path, clock, kept, "after")
    async with lake(store, dead, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        inode = (await m.found("d/name")).inode
        clock.advance(1000)
        await m.names("d")
        assert (await m.found("d/name")).inode == inode
        assert m.commits()["operations_waiting"] == 0
        await relocate(m)
        assert (await m.found("d/name")).inode == inode
        assert m.commits()["relocated"] == 1


async def test_a_listing_under_way_shows_no_copy_that_was_begun_meanwhile(tmp_path: Path) -> None:
    store, clock, kept = new_store()
    listing = Pause(lambda request: request.what == "list" and request.key == "d/")
    made = Pause(lambda request: request.what == "copy", when="after")

    def both(request: Request, when: When) -> None:
        listing(request, when)
        made(request, when)

    async with lake(store, tmp_path / "cache", clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        inode = (await m.found("d/name")).inode
        clock.advance(1000)
        kept.then = both
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.names, "d")
            await reached(listing.reached)
            nursery.start_soon(relocate, m)
            await reached(made.reached)
            listing.resume()
            await trio.sleep(A_WHILE_S)
            assert m.parts.namespace.tree.entry(inode) is not None
            made.resume()
        assert (await m.found("d/name")).inode == inode


async def test_no_copy_begins_while_the_name_changes(tmp_path: Path) -> None:
    store, clock, kept = new_store()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        kept.then = pause = Pause(lambda request: request.what == "put" and request.key.startswith(".lakefs"))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(replace, m)
            await reached(pause.reached)
            assert await relocate(m) == 0
            pause.resume()
        assert store.count("copy") == 0
        assert await m.tree() == CHANGES["replaced"][1]


async def test_a_version_in_a_pack_hides_what_a_daemon_that_died_has_copied(tmp_path: Path) -> None:
    store, clock, kept = new_store(copies_keep_etags=True)
    dead = await died_copying(store, tmp_path, clock, kept, "after")
    async with lake(store, dead, clock=clock, pack="always", relocate_after_s=AFTER_S) as m:
        await store_in_place(m)
        assert store.data("d/name") == b"bytes"
        assert (await seen_by_another(store, tmp_path, clock))["d/name"] == b"new bytes"


async def test_accepted_files_wait_for_a_copy_to_their_names(tmp_path: Path) -> None:
    """They are stored together, in a pack."""
    store, clock, kept = new_store()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
    async with writing_back(store, tmp_path / "cache", clock=clock, pack="always", relocate_after_s=AFTER_S) as m:
        async with copying(m, kept, "copy") as pause:
            await store_in_place(m)
            await m.write("more", b"more")
            await trio.sleep(A_WHILE_S)
            assert m.commits()["packs"] == 0
            clock.advance(LATER_S)
            pause.resume()
        store.hook = lambda _request, _when: None
        await m.fs.make_durable()
        assert (await seen_by_another(store, tmp_path, clock))["d/name"] == b"new bytes"


async def test_finishing_what_a_daemon_left_waits_for_a_copy_to_its_name(tmp_path: Path) -> None:
    store, clock, kept = new_store()
    cache, dead = tmp_path / "cache", tmp_path / "dead"
    new = bytes(LARGE)
    async with lake(store, cache, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await renamed_away(m, clock)
        handle = await m.open("d/name", os.O_RDWR | os.O_TRUNC)
        await m.fs.write(handle, 0, new)
        die(cache, dead)
        await m.close(handle)
        store.objects.pop("d/name")  # this daemon went on in the test only
    async with lake(store, dead, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        (orphan,) = (each for each in m.fs.unfinished() if each.id != "names")
        done = trio.Event()

        async def finish() -> None:
            await m.fs.finish_orphan(orphan.id)
            done.set()

        async with trio.open_nursery() as nursery:
            async with copying(m, kept, "copy") as pause:
                nursery.start_soon(finish)
                await trio.sleep(A_WHILE_S)
                assert not done.is_set()
                pause.resume()
        assert store.data("d/name") == new
