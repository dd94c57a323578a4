"""Acknowledged versions that cannot be published for a reason of their own: all others get into the store."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lakefs_fuse.errors import AccessDenied, FileError, StoreError, Unavailable
from lakefs_fuse.staging.part_layout import PAGE_BYTES
from tests.memory_store import Failures, MemoryStore, Request, When
from tests.upload.drafting import noise
from tests.vfs.lakes import Lake, lake
from tests.vfs.writing_back import NEVER_S, Outage, die, state, stored, told, until, writing_back

pytestmark = pytest.mark.usefixtures("short_pauses")

SIZE = 3 * PAGE_BYTES
OTHERS = {f"other{number}": noise(number, 100) for number in range(3)}


def gets_base(request: Request) -> bool:
    return request.what == "get" and request.key == "base"


async def change_first_page(m: Lake, path: str) -> int:
    """Returns the handle, which is open."""
    handle = await m.open(path, os.O_RDWR)
    await m.fs.write(handle, 0, noise(9, PAGE_BYTES))
    return handle


async def files_seen(store: MemoryStore, root: Path) -> dict[str, object]:
    async with lake(store, root / "another") as other:
        return await other.tree()


async def test_change_of_an_object_that_is_gone_since_close_lets_other_files_into_the_store(tmp_path: Path) -> None:
    store, away = MemoryStore(), True
    store.give("base", noise(1, SIZE))

    def refuse(request: Request, when: When) -> None:
        if away and when == "before" and gets_base(request):
            raise Unavailable("away")

    store.hook = refuse
    async with writing_back(store, tmp_path / "cache", pack="always") as m:
        await m.close(await change_first_page(m, "base"))
        for path, data in OTHERS.items():
            await m.write(path, data)
        assert told(m)["files"] == 1 + len(OTHERS)
        store.objects.pop("base")
        away = False
        await until(lambda: told(m)["files"] == 1)
        assert await files_seen(store, tmp_path) == OTHERS
        with pytest.raises(FileError) as caught:
            await m.fs.make_durable()
        assert caught.value.errno == errno.ESTALE
        await m.write("later", b"later")
        await until(lambda: told(m)["files"] == 1)
    assert await files_seen(store, tmp_path / "2") == OTHERS | {"later": b"later"}


async def test_close_of_a_change_of_an_object_that_is_gone_fails(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("base", noise(1, SIZE))
    async with writing_back(store, tmp_path / "cache", pack="always") as m:
        handle = await change_first_page(m, "base")
        store.objects.pop("base")
        with pytest.raises(FileError) as caught:
            await m.close(handle)
        assert caught.value.errno == errno.ESTALE
        assert told(m)["accepted"] == 0
        assert await state(m, "base") == "failed"
        for path, data in OTHERS.items():
            await m.write(path, data)
        await until(lambda: not told(m)["files"])
    assert await files_seen(store, tmp_path) == OTHERS


@pytest.mark.parametrize("pack", ["always", "never"])
async def test_change_of_an_object_that_cannot_be_read_while_the_store_is_away_is_stored_later(
    tmp_path: Path, pack: str
) -> None:
    store = MemoryStore()
    store.give("base", noise(1, SIZE))
    async with writing_back(store, tmp_path / "cache", pack=pack) as m:
        handle = await change_first_page(m, "base")
        store.hook = failures = Failures(gets_base, Unavailable("away"), count=3)
        await m.close(handle)
        await stored(m)
        assert not failures.left
    changed = noise(9, PAGE_BYTES) + noise(1, SIZE)[PAGE_BYTES:]
    assert await files_seen(store, tmp_path) == {"base": changed}


async def test_restored_file_of_which_the_store_refuses_to_tell_lets_others_into_the_store(tmp_path: Path) -> None:
    store = MemoryStore()
    Outage(store)
    async with writing_back(store, tmp_path / "cache", pack="always", delay_s=NEVER_S) as m:
        for path, data in {"bad": b"bad", **OTHERS}.items():
            await m.write(path, data)
        dead = die(tmp_path / "cache", tmp_path / "dead")

    def refuse(request: Request, when: When) -> None:
        if refuses and when == "before" and request.what == "head" and request.key == "bad":
            raise StoreError("no")

    refuses = True
    store.hook = refuse
    async with writing_back(store, dead, pack="always") as m:
        await until(lambda: told(m)["files"] == 1)
        refuses = False
        assert await files_seen(store, tmp_path) == OTHERS
        await m.fs.make_durable()
    assert await files_seen(store, tmp_path / "2") == OTHERS | {"bad": b"bad"}


async def test_sync_of_a_directory_stores_a_file_whose_close_failed_or_fails_itself(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "cache", pack="never") as m:
        await m.mkdir("d")
        directory, root = (await m.found("d")).inode, (await m.found("d")).parent
        await m.fs.make_durable()
        store.hook = Failures(lambda each: each.what == "put" and each.key == "d/f", AccessDenied("no"), count=2)
        opened = await m.create("d/open")
        await m.fs.write(opened, 0, b"not yet")
        handle = await m.create("d/f")
        await m.fs.write(handle, 0, b"hello")
        with pytest.raises(AccessDenied):
            await m.close(handle)
        await m.mkdir("d/made")
        with pytest.raises(AccessDenied):
            await m.fs.sync_directory(directory)
        assert await files_seen(store, tmp_path) == {"d": None, "d/made": None}
        await m.fs.sync_directory(root)
        assert store.data("d/f") == b"hello"
        assert "d/open" not in store.objects
        await m.close(opened)


async def test_sync_of_a_directory_fails_for_a_file_of_which_a_write_was_refused(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path, pack="never") as m:
        await m.mkdir("d")
        await m.mkdir("other")
        handle = await m.create("d/f")
        draft = m.fs.handle(handle).file.draft
        assert draft is not None
        draft.refuse(0, 10, StoreError("refused"))
        reader = await m.open("d/f")
        await m.fs.release(handle)
        with pytest.raises(FileError, match="bytes 0 to 10 were refused"):
            await m.fs.sync_directory((await m.found("d")).inode)
        await m.fs.sync_directory((await m.found("other")).inode)
        await m.fs.release(reader)
