"""A daemon that dies between the store's copy of a renamed object and the commit that tells of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from lakefs_fuse.errors import LakeError
from lakefs_fuse.vfs.writeback import queue as writeback
from tests.fakes import delete_all_due
from tests.memory_store import MemoryStore, Pause, Request, When
from tests.upload.drafting import reached
from tests.vfs.lakes import Clock, Lake, lake
from tests.vfs.writing_back import LARGE, NEVER_S, Outage, die, rewrite, told, until, writing_back

AFTER_S = 10.0


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writeback, "PAUSE_S_FIRST", 0.01)


async def relocate(m: Lake, clock: Clock) -> int:
    clock.advance(20 * AFTER_S)
    return await m.parts.relocator.relocate_due()


async def died_having_copied(store: MemoryStore, root: Path, clock: Clock) -> Path:
    """`name` has its bytes at `old`; a copy of them is at `name`, and no commit says so."""
    dead = root / "dead"

    def copied(request: Request, when: When) -> None:
        if request.what == "copy" and when == "after":
            die(root / "cache", dead)
            raise LakeError("the daemon died")

    async with lake(store, root / "cache", clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await m.write("old", b"bytes")
        await m.rename("old", "name")
        clock.advance(20 * AFTER_S)
        await m.tree()  # so that the copy is not found by a listing
        store.hook = copied
        with pytest.raises(LakeError):
            await m.parts.relocator.relocate_due()
    store.hook = lambda _request, _when: None
    assert store.data("name") == b"bytes"
    return dead


async def test_the_next_daemon_takes_the_copy_for_what_it_is(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    dead = await died_having_copied(store, tmp_path, clock)
    copies = store.count("copy")
    async with lake(store, dead, clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        assert await relocate(m, clock) == 1
        assert store.count("copy") == copies
        assert m.fs.xattr((await m.found("name")).inode, "user.lakefs.location").endswith(b"/name")
        clock.advance(1000)
        await until(lambda: "old" not in store.objects)
        assert await m.tree() == {"name": b"bytes"}


async def test_the_copy_is_no_version_of_somebody_else(tmp_path: Path) -> None:
    """Another file is renamed over the name before the next daemon has looked, and that daemon dies, too."""
    store, clock = MemoryStore(), Clock()
    dead = await died_having_copied(store, tmp_path, clock)
    outage = Outage(store, away=False)
    async with writing_back(store, dead, clock=clock, delay_s=NEVER_S, relocate_after_s=AFTER_S) as m:
        await m.write("new", b"new bytes")
        await m.rename("new", "name")
        die(dead, tmp_path / "again")
        outage.away = True
    outage.away = False
    async with writing_back(store, tmp_path / "again", clock=clock, relocate_after_s=AFTER_S) as m:
        await m.fs.make_durable()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"name": b"new bytes"}


@pytest.mark.parametrize("again", [False, True])
async def test_what_a_renamed_object_replaced_is_no_version_of_somebody_else(tmp_path: Path, again: bool) -> None:
    """It stays under the name until the renamed one is copied over it."""
    store, clock = MemoryStore(), Clock()
    outage = Outage(store, away=False)
    cache, dead = tmp_path / "cache", tmp_path / "dead"
    async with writing_back(store, cache, clock=clock, delay_s=NEVER_S, relocate_after_s=AFTER_S) as m:
        await m.write("name", b"first")
        await m.write("old", b"second")
        await m.fs.make_durable()
        await m.rename("old", "name")
        await m.fs.make_durable()
        assert store.data("name") == b"first"
        clock.advance(AFTER_S - 1)
        outage.away = True
        if again:
            await m.write("other", b"third")
            await m.rename("other", "name")
        await m.write("new", b"newest")
        await m.rename("new", "name")
        die(cache, dead)
    outage.away = False
    async with writing_back(store, dead, clock=clock, relocate_after_s=AFTER_S) as m:
        await m.fs.make_durable()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"name": b"newest"}


async def test_the_copy_is_known_for_ours_whatever_becomes_of_the_name(tmp_path: Path) -> None:
    """It gets a version in a pack, the renamed object goes, and another file is renamed over it: only then a daemon
    asks."""
    store, clock = MemoryStore(), Clock()
    dead = await died_having_copied(store, tmp_path, clock)
    clock.advance(10)
    outage = Outage(store, away=False)
    async with writing_back(store, dead, clock=clock, pack="always") as m:
        await rewrite(m, "name", b"in a pack")
        await m.fs.make_durable()
        await m.sync()
        store.take("old")
        outage.away = True
        await m.write("new", b"new bytes")
        await m.rename("new", "name")
        die(dead, tmp_path / "again")
    outage.away = False
    async with writing_back(store, tmp_path / "again", clock=clock, pack="always") as m:
        await m.fs.make_durable()
        await m.sync()
        assert told(m)["conflicts"] == 0
        assert await m.tree() == {"name": b"new bytes"}
        await relocate(m, clock)
        await relocate(m, clock)
        await m.sync()
        assert "name" not in store.objects


async def test_a_copy_stays_while_somebody_waits_to_be_stored_over_it(tmp_path: Path) -> None:
    """What the cache disk has may be lost; until it is in the store, nothing goes from there."""
    store, clock = MemoryStore(), Clock()
    dead = await died_having_copied(store, tmp_path, clock)
    outage = Outage(store, away=False)
    async with writing_back(store, dead, clock=clock, relocate_after_s=AFTER_S) as m:
        outage.away = True
        await rewrite(m, "name", b"waits")
        assert await relocate(m, clock) == 0
        outage.away = False
        assert store.data("name") == b"bytes"
        await m.fs.make_durable()
        await relocate(m, clock)
        await m.sync()
        assert store.data("name") == b"waits"
        assert await m.tree() == {"name": b"waits"}
    async with lake(store, tmp_path / "other", clock=clock) as other:
        assert await other.tree() == {"name": b"waits"}


async def test_a_key_whose_object_somebody_removed_can_be_freed(tmp_path: Path) -> None:
    """Or nothing could be stored there; and what was not copied is not known for ours."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path / "cache", clock=clock, pack="never", relocate_after_s=AFTER_S) as m:
        await m.write("old", b"bytes")
        await m.rename("old", "name")
        store.take("old")
        relocator = m.parts.relocator
        await relocator.free("old")
        assert relocator.copies.paths() == []


async def renamed_away(m: Lake) -> None:
    """`name` has its bytes at `old`."""
    await m.write("old", b"bytes")
    await m.fs.make_durable()
    await m.rename("old", "name")
    await m.fs.make_durable()
    await m.sync()
    assert m.fs.xattr((await m.found("name")).inode, "user.lakefs.location").endswith(b"/old")


async def test_the_old_key_stays_taken_while_what_replaces_its_new_name_is_written(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", pack="never") as m:
        await renamed_away(m)
        handle = await m.create("tmp")
        await m.fs.write(handle, 0, b"new bytes")
        await m.rename("tmp", "name")
        await m.write("old", b"others")
        async with lake(store, tmp_path / "other") as other:
            assert await other.tree() == {"name": b"bytes", "old": b"others"}
        await m.close(handle)
        await m.sync()
        assert await m.tree() == {"name": b"new bytes", "old": b"others"}
        await until(lambda: b"bytes" not in [data for data, _ in store.objects.values()])
    async with lake(store, tmp_path / "last") as other:
        assert await other.tree() == {"name": b"new bytes", "old": b"others"}


async def test_the_old_key_stays_taken_until_what_replaced_its_new_name_is_stored(tmp_path: Path) -> None:
    """What was begun before that was accepted may be stored before it."""
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "put" and request.key == "name")
    async with writing_back(store, tmp_path / "cache") as m:
        await renamed_away(m)
        handle = await m.create("tmp 2")
        store.hook = pause
        await m.write("tmp", b"new bytes")
        await m.rename("tmp", "name")
        await m.rename("tmp 2", "old")
        await m.fs.write(handle, 0, b"others")
        await m.close(handle)
        await reached(pause.reached)
        await until(lambda: b"others" in [data for data, _ in store.objects.values()])
        async with lake(store, tmp_path / "other") as other:
            assert (await other.tree())["name"] == b"bytes"
        pause.resume()
        await m.fs.make_durable()
        await m.sync()
        assert await m.tree() == {"name": b"new bytes", "old": b"others"}
    async with lake(store, tmp_path / "last") as other:
        assert await other.tree() == {"name": b"new bytes", "old": b"others"}


async def test_what_a_file_replaced_at_another_key_goes_when_it_is_stored_after_a_death(tmp_path: Path) -> None:
    store = MemoryStore()
    cache, dead = tmp_path / "cache", tmp_path / "dead"
    outage = Outage(store, away=False)
    async with writing_back(store, cache, delay_s=NEVER_S) as m:
        await renamed_away(m)
        await m.write("tmp", b"new bytes")
        await m.rename("tmp", "name")
        die(cache, dead)
        outage.away = True
    outage.away = False
    async with writing_back(store, dead) as m:
        await m.fs.make_durable()
        await m.sync()
        await until(lambda: "old" not in store.objects)
        assert await m.tree() == {"name": b"new bytes"}


@pytest.mark.parametrize("how", ["rewritten", "removed"])
async def test_the_old_object_stays_while_others_do_not_know_that_nobody_needs_it(tmp_path: Path, how: str) -> None:
    """The file was renamed with its directory, which is held until a large file is stored, and then changed."""
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "upload_part")
    async with writing_back(store, tmp_path / "cache") as m:
        await m.mkdir("d")
        await m.write("d/old", b"bytes")
        await m.fs.make_durable()
        await m.rename("d/old", "d/name")
        await m.fs.make_durable()
        await m.sync()
        store.hook = pause
        others = await m.create("tmp")  # begun before, these need not wait for the large one
        if how == "rewritten":
            handle = await m.open("d/name", os.O_RDWR | os.O_TRUNC)
        await m.write("large", bytes(LARGE))
        await m.rename("d", "e")
        if how == "rewritten":
            await m.fs.write(handle, 0, b"new bytes")
            await m.close(handle)
            await until(lambda: "e/name" in store.objects)
        else:
            await m.unlink("e/name")
        await m.mkdir("d")
        await m.rename("tmp", "d/old")
        await m.fs.write(others, 0, b"others")
        await m.close(others)
        await until(lambda: b"others" in [data for data, _ in store.objects.values()])
        await delete_all_due(m.parts.deletions)
        assert store.data("d/old") == b"bytes"
        async with lake(store, tmp_path / "other") as other:
            assert (await other.tree())["d/name"] == b"bytes"
        pause.resume()
        await m.fs.make_durable()
        await m.sync()
        await until(lambda: b"bytes" not in [data for data, _ in store.objects.values()])
        now = {"large": bytes(LARGE), "d": None, "d/old": b"others", "e": None}
        now |= {"e/name": b"new bytes"} if how == "rewritten" else {}
        assert await m.tree() == now
    async with lake(store, tmp_path / "last") as other:
        assert await other.tree() == now
