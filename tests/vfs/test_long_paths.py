"""Files whose paths become longer than a key may be. A commit with such a path is one that no node can read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import trio

from lakefs_fuse.errors import FileError
from lakefs_fuse.vfs.ops.attributes import AttributeChange
from tests.memory_store import MemoryStore, Pause
from tests.upload.drafting import reached
from tests.vfs.lakes import Lake, lake, two_lakes
from tests.vfs.writing_back import Outage, die, until, writing_back

DEEP = "/".join(["p" * 200] * 4)
SHORT, LONG = "d", "D" * 200
NAME = "f" * 200


async def make_deep(m: Lake) -> None:
    path = SHORT
    await m.mkdir(path)
    for component in DEEP.split("/"):
        path += f"/{component}"
        await m.mkdir(path)
    await m.sync()


async def check_readable(store: MemoryStore, root: Path, expected: dict[str, bytes]) -> None:
    """Another node reads every commit, and sees these files."""
    async with lake(store, root / "fresh") as m:
        assert m.commits()["damaged"] == 0
        assert {path: found for path, found in (await m.tree()).items() if found is not None} == expected


@pytest.mark.parametrize("pack", ["always", "never"])
async def test_close_of_file_whose_directory_got_too_long_a_path_is_refused(tmp_path: Path, pack: str) -> None:
    """Its bytes were stored in a commit that no node could read, nor anything else in it."""
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack=pack) as (one, two):
        await make_deep(one)
        await two.poll()
        handle = await one.create(f"{SHORT}/{DEEP}/{NAME}")
        await one.fs.write(handle, 0, b"bytes")
        await two.rename(SHORT, LONG)
        await one.poll()
        with pytest.raises(FileError) as refused:
            await one.fs.flush(handle)
        assert refused.value.errno == errno.ENAMETOOLONG
        assert [(each.state, each.path) for each in one.fs.unfinished()] == [("failed", f"{LONG}/{DEEP}/{NAME}")]
        await one.write("other", b"other")
        await one.sync()
        await check_readable(store, tmp_path, {"other": b"other"})
        await one.rename(LONG, SHORT)
        await one.close(handle)
        await one.sync()
        await check_readable(store, tmp_path / "again", {"other": b"other", f"{SHORT}/{DEEP}/{NAME}": b"bytes"})


@pytest.mark.parametrize("pack", ["always", "never"])
async def test_acknowledged_file_whose_path_got_too_long_is_refused_and_others_are_stored(
    tmp_path: Path, pack: str
) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path / "one", pack=pack) as one, lake(store, tmp_path / "two") as two:
        await make_deep(one)
        await two.poll()
        handle = await one.create(f"{SHORT}/{DEEP}/{NAME}")
        await one.fs.write(handle, 0, b"bytes")
        await two.rename(SHORT, LONG)
        await one.poll()
        await one.close(handle)
        await one.write("other", b"other")
        await until(lambda: [each.state for each in one.fs.unfinished()] == ["failed"])
        await one.sync()
        await check_readable(store, tmp_path, {"other": b"other"})
        await two.rename(LONG, SHORT)
        await one.poll()
        await one.fs.make_durable()
        await one.sync()
        await check_readable(store, tmp_path / "again", {"other": b"other", f"{SHORT}/{DEEP}/{NAME}": b"bytes"})


@pytest.mark.parametrize("pack", ["always", "never"])
async def test_file_whose_path_gets_too_long_while_it_is_sent_makes_no_unreadable_commit(
    tmp_path: Path, pack: str
) -> None:
    store = MemoryStore()
    pause = Pause(lambda request: request.what == "put" and not pause.reached.is_set())
    async with two_lakes(store, tmp_path, pack=pack) as (one, two):
        await make_deep(one)
        await two.poll()
        handle = await one.create(f"{SHORT}/{DEEP}/{NAME}")
        await one.fs.write(handle, 0, b"bytes")
        async with trio.open_nursery() as nursery:
            errors: list[int] = []

            async def close() -> None:
                try:
                    await one.fs.flush(handle)
                except FileError as error:
                    errors.append(error.errno)

            store.hook = pause
            nursery.start_soon(close)
            await reached(pause.reached)
            await two.rename(SHORT, LONG)
            await one.poll()
            pause.resume()
        await one.write("other", b"other")
        await one.sync()
        assert errors == ([] if pack == "always" else [errno.ENAMETOOLONG])
        await check_readable(store, tmp_path, {"other": b"other", f"{SHORT}/{DEEP}/{NAME}": b"bytes"})
        if pack == "always":
            return  # others see it under its earlier name
        await one.rename(LONG, "again")
        await one.close(handle)
        await one.sync()
        await check_readable(store, tmp_path / "again", {"other": b"other", f"again/{DEEP}/{NAME}": b"bytes"})


async def test_file_with_too_long_a_key_can_be_read_and_not_written(tmp_path: Path) -> None:
    """A store that allows such keys has one of another program."""
    store, path = MemoryStore(), f"{LONG}/{DEEP}/{NAME}"
    store.put(path, b"bytes")
    async with lake(store, tmp_path / "cache") as m:
        await m.names(f"{LONG}/{DEEP}")
        parent = await m.found(f"{LONG}/{DEEP}")
        (entry,) = await m.read_directory(parent.inode)
        handle = await m.fs.open(entry.inode, os.O_RDONLY)
        assert await m.read_handle(handle) == b"bytes"
        await m.close(handle)
        for flags in (os.O_RDWR, os.O_WRONLY | os.O_TRUNC):
            with pytest.raises(FileError) as refused:
                await m.fs.open(entry.inode, flags)
            assert refused.value.errno == errno.ENAMETOOLONG
        with pytest.raises(FileError) as refused:
            await m.fs.setattr(entry.inode, AttributeChange(size=1))
        assert refused.value.errno == errno.ENAMETOOLONG
        assert not m.fs.unfinished()
    assert store.objects[path][0] == b"bytes"


@pytest.mark.parametrize("pack", ["always", "never"])
async def test_name_of_conflict_is_shortened_to_what_a_key_holds(tmp_path: Path, pack: str) -> None:
    """Its path was too long for a key, so that the acknowledged version could not be stored, or not be read."""
    store = MemoryStore()
    outage = Outage(store, away=False)
    path = f"{SHORT}/{DEEP}/{'f' * 215}"
    async with writing_back(store, tmp_path / "cache", pack=pack) as m:
        await make_deep(m)
        outage.away = True
        await m.write(path, b"ours")
        dead = die(tmp_path / "cache", tmp_path / "dead")
    store.hook = lambda _request, _when: None
    async with lake(store, tmp_path / "theirs", pack=pack) as theirs:
        await theirs.write(path, b"theirs")
    async with writing_back(store, dead, pack=pack) as m:
        await m.fs.make_durable()
        await m.sync()
        (beside,) = [name for name in await m.names(f"{SHORT}/{DEEP}") if ".conflict-" in name]
    await check_readable(store, tmp_path, {path: b"theirs", f"{SHORT}/{DEEP}/{beside}": b"ours"})


async def test_directory_has_a_path_that_leaves_room_for_its_marker(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path / "cache") as m:
        await make_deep(m)
        room = 1006 - len(f"{SHORT}/{DEEP}/")
        await m.mkdir(f"{SHORT}/{DEEP}/{'m' * room}")
        with pytest.raises(FileError) as refused:
            await m.mkdir(f"{SHORT}/{DEEP}/{'m' * (room + 1)}")
        assert refused.value.errno == errno.ENAMETOOLONG
