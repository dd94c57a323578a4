"""Names of which the store has a file and keys below it, and files whose key it refuses for that reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.errors import FileError, KeyConflict
from tests.memory_store import Failures, MemoryStore
from tests.upload.drafting import noise
from tests.vfs.lakes import TTL_S, Clock, lake, two_lakes

PART = 64 * 1024


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize(
    ("request_refused", "size"), [("put", 100), ("create_multipart", 10 * PART), ("complete_multipart", 10 * PART)]
)
async def test_file_whose_key_is_refused_is_stored_elsewhere(
    tmp_path: Path, request_refused: str, size: int, durability: str
) -> None:
    store, data = MemoryStore(), noise(1, size)
    store.hook = Failures(
        lambda request: request.what == request_refused and request.key == "f", KeyConflict("f"), count=1000
    )
    async with lake(store, tmp_path / "cache", durability=durability, pack="never") as m:
        handle = await m.create("f")
        for at in range(0, size, PART):
            await m.fs.write(handle, at, data[at : at + PART])
        await m.close(handle)
        await m.fs.make_durable()
        assert await m.read("f") == data
        assert store.uploads == {}
        begun = store.count("create_multipart", "f")
        await m.write("f", noise(2, size))
        await m.fs.make_durable()
        assert store.count("create_multipart", "f") == begun, "the refusal is remembered"
    assert "f" not in store.objects
    assert any(key.startswith(OBJECTS) for key in store.objects)
    async with lake(store, tmp_path / "fresh") as m:
        assert await m.read("f") == noise(2, size)


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize("page_keys_max", [1, 1000])
async def test_file_that_a_listed_directory_hid_is_there_when_another_node_renames_that(
    tmp_path: Path, page_keys_max: int, is_restarted: bool
) -> None:
    store, clock = MemoryStore(page_keys_max=page_keys_max), Clock()
    for key in ("name", "name!", "name/below"):
        store.give(key)
    async with lake(store, tmp_path / "other", clock=clock) as other:
        async with lake(store, tmp_path / "cache", clock=clock) as m:
            assert await m.names() == ["name", "name!"] and await m.names("name") == ["below"]
            assert m.hidden() == {"conflict": 1}
            if not is_restarted:
                await other.rename("name", "moved")
                await other.sync()
                await m.poll()
                assert await m.names() == ["moved", "name", "name!"] and not (await m.found("name")).is_dir
        if is_restarted:
            await other.rename("name", "moved")
            await other.sync()
            async with lake(store, tmp_path / "cache", clock=clock) as m:
                await m.poll()
                assert await m.names() == ["moved", "name", "name!"] and not (await m.found("name")).is_dir


@pytest.mark.parametrize("how", ["listed", "asked for"])
async def test_file_that_another_program_replaces_behind_a_directory_stays_hidden(tmp_path: Path, how: str) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await m.mkdir("name")
        await m.sync()
        for data in (b"first", b"second", b"third"):
            store.give("name", data)
            clock.advance(2 * TTL_S)
            assert (await m.found("name")).is_dir
            assert how == "asked for" or await m.names() == ["name"]
        await m.rmdir("name")
        assert await m.names() == ["name"] and await m.read("name") == b"third"


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_file_is_hidden_that_is_stored_after_another_node_renamed_a_directory_to_its_name(
    tmp_path: Path, durability: str
) -> None:
    async with two_lakes(MemoryStore(), tmp_path, pack="never", durability=durability) as (m, other):
        await other.mkdir("directory")
        await other.sync()
        await m.poll()
        handle = await m.create("name")
        await m.fs.write(handle, 0, b"bytes")
        await other.rename("directory", "name")
        await other.sync()
        await m.poll()
        await m.close(handle)
        await m.fs.make_durable()
        assert await m.names() == ["name"] and (await m.found("name")).is_dir
        await m.rename("name", "directory")
        assert await m.names() == ["directory", "name"] and await m.read("name") == b"bytes"


async def test_file_that_a_directory_of_another_program_hid_is_there_when_that_is_gone(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="always") as m:
        await m.write("name", b"packed")
        await m.sync()
        assert await m.names() == ["name"]
        store.give("name/below")
        clock.advance(2 * TTL_S)
        assert await m.names() == ["name"] and (await m.found("name")).is_dir
        store.delete("name/below")
        clock.advance(2 * TTL_S)
        assert await m.names() == ["name"] and await m.read("name") == b"packed"


@pytest.mark.parametrize("replaced", [False, True])
async def test_directory_is_empty_once_a_file_that_another_directory_hid_is_removed(
    tmp_path: Path, replaced: bool
) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        store.give("d/name")
        store.give("d/name/below")
        assert await m.names("d") == ["name"]
        with pytest.raises(FileError, match="not empty"):
            await m.rmdir("d")
        await m.unlink("d/name/below")
        await m.rmdir("d/name")
        with pytest.raises(FileError, match="not empty"):
            await m.rmdir("d")
        await m.unlink("d/name")
        if replaced:
            await m.mkdir("new")
            await m.rename("new", "d")
        await m.rmdir("d")
        await m.sync()
        clock.advance(2 * TTL_S)
        assert await m.names() == []
