"""Calls that fail change nothing: neither the file, here and in the store, nor what is kept of an earlier failure."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio.testing

from lakefs_fuse.errors import CacheFull, LakeError
from lakefs_fuse.meta.database import Database
from tests.memory_store import MemoryStore
from tests.upload.drafting import noise
from tests.vfs.lakes import Lake, lake
from tests.vfs.writing_back import Outage, stored, until, writing_back

OLD = noise("old", 800)


@contextmanager
def failing_commit() -> Iterator[None]:
    """The first write to the metadata cache in the block fails for want of room."""
    commit, failures = Database.commit, [CacheFull("the disk is full")]

    def fail_first(database: Database, *arguments: object, **named: object) -> None:
        if failures:
            raise failures.pop()
        commit(database, *arguments, **named)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Database, "commit", fail_first)
        yield
        assert not failures, "the call wrote nothing"


async def open_emptied(m: Lake, path: str) -> None:
    await m.open(path, os.O_WRONLY | os.O_TRUNC)


async def cut(m: Lake, path: str) -> None:
    await m.setattr(path, size=10)


async def empty(m: Lake, path: str) -> None:
    await m.setattr(path, size=0)


async def create_over(m: Lake, path: str) -> None:
    await m.create(path, os.O_RDWR | os.O_TRUNC)


CHANGES = [open_emptied, create_over, empty, cut]
Change = Callable[[Lake, str], Awaitable[None]]


async def change_in_vain(m: Lake, change: Change) -> None:
    with failing_commit():
        with pytest.raises(LakeError) as raised:
            await change(m, "f")
        assert raised.value.errno == errno.ENOSPC
    await trio.testing.wait_all_tasks_blocked()
    assert not m.fs.unfinished()


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize("change", CHANGES)
async def test_change_that_cannot_be_journaled_leaves_the_stored_file(
    tmp_path: Path, change: Change, durability: str
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never", durability=durability) as m:
        await m.write("f", OLD)
        await m.fs.make_durable()
        before = await m.getattr("f")
        etag = store.objects["f"][1].etag
        await change_in_vain(m, change)
        assert await m.getattr("f") == before
        assert m.fs.statistics()["files"] == {"in_use": 0}
        await m.fs.make_durable()
        assert store.objects["f"][1].etag == etag
        assert await m.read("f") == store.data("f") == OLD
        await m.write("g", b"other")
        await change(m, "f")


@pytest.mark.parametrize("change", CHANGES)
async def test_change_that_cannot_be_journaled_leaves_the_acknowledged_file(tmp_path: Path, change: Change) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path) as m:
        outage = Outage(store)
        await m.write("f", OLD)
        with failing_commit(), pytest.raises(LakeError):
            await change(m, "f")
        await trio.testing.wait_all_tasks_blocked()
        assert await m.read("f") == OLD
        outage.away = False
        await stored(m)
        assert await m.read("f") == store.data("f") == OLD


@pytest.mark.parametrize("change", [open_emptied, empty])
async def test_orphan_is_dropped_only_by_an_emptying_that_succeeds(tmp_path: Path, change: Change) -> None:
    """It has the bytes of a program whose writes failed."""
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never") as m:
        await m.write("f", OLD)
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, 0, noise("new", 100))
        draft = m.fs.handle(handle).file.draft
        assert draft is not None
        draft.refuse(200, 300, CacheFull("the disk is full"))
        await m.fs.release(handle)
        await until(lambda: [each.state for each in m.fs.unfinished()] == ["orphan"])
        emptied: list[str] = []
        m.fs.events.file_emptied.append(emptied.append)
        await m.getattr("f")  # its inode is new
        with failing_commit(), pytest.raises(LakeError):
            await change(m, "f")
        assert emptied == []
        await change(m, "f")
        assert emptied == ["f"]
        await until(lambda: "orphan" not in [each.state for each in m.fs.unfinished()])
