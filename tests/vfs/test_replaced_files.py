"""Plain files that other clients replace within the TTL of the listing that named them."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.errors import FileError, LakeError, StoreError, Unavailable
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.upload import missing_parts
from tests.memory_store import Failures, MemoryStore, Pause, Request, When
from tests.upload.drafting import noise, reached
from tests.vfs import lakes
from tests.vfs.lakes import KIB, Clock, held_fresh, lake
from tests.vfs.writing_back import LARGE, PART, stored, told, until, writing_back

MIB = KIB * KIB
NS = 1_000_000_000
SIZE = 80 * MIB
FAR = 40 * MIB


async def test_open_of_a_replaced_file_whose_bytes_were_evicted_reads_the_new_version(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("d/f", b"old" * 1000)
    async with lake(store, tmp_path, clock=clock) as m:
        assert await m.names("d") == ["f"]
        assert await m.read("d/f") == b"old" * 1000
        with trio.fail_after(10):
            while not m.parts.cache.files.bytes_used:  # what was read is written to the cache behind the reader
                await trio.sleep(0.01)
    async with lake(store, tmp_path, clock=clock) as m:  # which has nothing in memory
        assert m.parts.cache.evict(1 << 40) > 0
        store.give("d/f", b"new" * 2000)
        with held_fresh(m):
            assert await m.read("d/f") == b"new" * 2000


def is_completion(request: Request) -> bool:
    return request.what == "complete_multipart"


async def test_read_while_a_changed_file_is_completed_waits_for_the_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lakes, "SPANS", ((16 * MIB, 50), (64 * MIB, 9950)))
    store, before = MemoryStore(Capabilities(name="memory", part_copy=True)), noise(1, SIZE)
    store.give("f", before)
    async with lake(store, tmp_path) as m:
        reader, writer = await m.open("f"), await m.open("f", os.O_RDWR)
        assert bytes(await m.fs.read(reader, 0, 10)) == before[:10]
        await m.fs.write(writer, SIZE - 5, b"XXXXX")
        pause = store.hook = Pause(is_completion, when="after")
        answers: list[bytes] = []

        async def read() -> None:
            answers.append(bytes(await m.fs.read(reader, FAR, 4096)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.flush, writer)
            await reached(pause.reached)
            asked = len(store.requests)
            nursery.start_soon(read)
            await until(lambda: any(request.what == "get" for request in store.requests[asked:]))
            await trio.sleep(0.05)
            assert answers == []
            pause.resume()
        assert answers == [before[FAR : FAR + 4096]]
        assert store.data("f") == before[:-5] + b"XXXXX"
        await m.fs.release(writer)
        await m.fs.release(reader)


async def test_read_of_a_replaced_file_whose_change_was_refused_is_estale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lakes, "SPANS", ((16 * MIB, 50), (64 * MIB, 9950)))
    store = MemoryStore(Capabilities(name="memory", part_copy=True))
    store.give("f", noise(1, SIZE))
    async with lake(store, tmp_path) as m:
        writer = await m.open("f", os.O_RDWR)
        await m.fs.write(writer, SIZE - 5, b"XXXXX")
        store.hook = Failures(is_completion, StoreError("refused"))
        with pytest.raises(LakeError):
            await m.fs.flush(writer)
        store.give("f", noise(2, SIZE))
        with trio.fail_after(10), pytest.raises(FileError) as caught:
            await m.fs.read(writer, FAR, 4096)
        assert caught.value.errno == errno.ESTALE
        await m.fs.release(writer)


async def test_write_to_an_acknowledged_change_that_is_being_completed_keeps_all_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(missing_parts, "PART_BYTES_MIN", 4 * KIB)
    store, before = MemoryStore(), noise(1, LARGE)
    store.give("f", before)
    pause, is_base_away = Pause(is_completion, when="after"), True

    def hook(request: Request, when: When) -> None:
        if request.what == "get" and is_base_away:
            raise Unavailable("away")
        pause(request, when)

    store.hook = hook
    async with writing_back(store, tmp_path) as m:
        handle = await m.open("f", os.O_RDWR)
        await m.fs.write(handle, 0, b"A" * PART)
        await m.fs.flush(handle)  # acknowledged, and the rest of it is in the store alone
        assert told(m)["files"] == 1
        is_base_away = False
        await reached(pause.reached)
        asked = len(store.requests)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.write, handle, PART, b"B" * KIB)
            await until(lambda: any(request.what == "get" for request in store.requests[asked:]))
            pause.resume()
        await m.close(handle)
        await stored(m)
        assert store.data("f") == b"A" * PART + b"B" * KIB + before[PART + KIB :]


async def test_file_made_where_an_object_of_parts_was_removed_is_stored_although_its_first_request_is_lost(
    tmp_path: Path,
) -> None:
    """The object of the removed file is at the key until it is deleted. S3 dates it by the beginning of its upload, so
    its date does not say that it is no later version of another client."""
    store = MemoryStore(Capabilities(name="memory", put_if_absent=True, put_if_match=True))
    parts = store.give("f", b"of a multipart upload")
    store.objects["f"] = store.data("f"), msgspec.structs.replace(parts, etag=f"{parts.etag}-2")
    async with lake(store, tmp_path / "1", pack="never") as one, lake(store, tmp_path / "2", pack="never") as two:
        assert await two.names() == await one.names() == ["f"]
        await one.unlink("f")
        await one.fs.sync_names()
        await two.poll()
        store.hook = Failures(lambda request: (request.what, request.key) == ("put", "f"), Unavailable("lost"))
        await two.write("f", b"new")
        assert await two.read("f") == store.data("f") == b"new"
        await two.fs.sync_names()
        await one.poll()
        assert await one.read("f") == b"new"


@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_file_renamed_over_an_object_of_parts_is_changed_although_the_first_request_is_lost(
    tmp_path: Path, durability: str
) -> None:
    """The bytes of the file are at its earlier key, and it hides the object that another node had put under its name:
    that is no later version of another client, whenever it is dated."""
    store = MemoryStore(Capabilities(name="memory", put_if_absent=True, put_if_match=True))
    parts = store.give("f", b"of a multipart upload")
    store.objects["f"] = store.data("f"), msgspec.structs.replace(parts, etag=f"{parts.etag}-2")
    store.give("g", b"first")
    async with (
        lake(store, tmp_path / "1", pack="never") as one,
        lake(store, tmp_path / "2", pack="never", durability=durability) as two,
    ):
        assert await two.names() == await one.names() == ["f", "g"]
        await one.rename("g", "f")
        await two.poll()
        store.hook = Failures(lambda request: (request.what, request.key) == ("put", "f"), Unavailable("lost"))
        await two.write("f", b"second")
        await two.fs.make_durable()
        assert await two.names() == ["f"] and await two.read("f") == store.data("f") == b"second"
        await two.fs.sync_names()
        await one.poll()
        assert await one.read("f") == b"second"


@pytest.mark.parametrize("is_shown", [False, True])
@pytest.mark.parametrize("durability", ["close", "writeback"])
async def test_packed_file_over_an_unknown_object_of_parts_is_changed_although_the_first_request_is_lost(
    tmp_path: Path, durability: str, is_shown: bool
) -> None:
    """No commit names the object that the packed file hides by its date, and this node has not listed it. ``is_shown``:
    its upload began before the pack, and has ended since, as a commit says of which this node has not heard yet."""
    store = MemoryStore(Capabilities(name="memory", put_if_absent=True, put_if_match=True))
    async with (
        lake(store, tmp_path / "1", pack="always") as one,
        lake(store, tmp_path / "2", pack="never", durability=durability) as two,
        lake(store, tmp_path / "3", pack="never") as three,
    ):
        assert await two.names() == []
        await one.write("f", b"first")
        await one.fs.make_durable()
        await two.poll()
        if is_shown:
            await three.poll()
            await three.write("f", b"of a multipart upload")
            await three.fs.sync_names()
        else:
            store.give("f", b"of a multipart upload")
        data, parts = store.objects["f"]
        parts = msgspec.structs.replace(parts, etag=f"{parts.etag}-2", mtime_ns=parts.mtime_ns - 60 * NS)
        store.objects["f"] = data, parts
        store.hook = Failures(lambda request: (request.what, request.key) == ("put", "f"), Unavailable("lost"))
        with held_fresh(two):
            await two.write("f", b"second")
            await two.fs.make_durable()
        if is_shown:  # the other version is the newer one
            assert store.data("f") == data
            assert len(await two.names()) == (2 if durability == "writeback" else 1)
        else:
            assert await two.names() == ["f"] and await two.read("f") == store.data("f") == b"second"
            await two.fs.sync_names()
            await one.poll()
            assert await one.read("f") == b"second"


@pytest.mark.parametrize("change", ["removed", "replaced"])
async def test_open_for_writing_of_a_file_that_is_removed_meanwhile_does_not_bring_it_back(
    tmp_path: Path, change: str
) -> None:
    """OPEN waits for the mode that another client gave the file."""
    store = MemoryStore()
    store.give("f", b"old" * 100)
    async with lake(store, tmp_path) as m:
        inode = (await m.found("f")).inode
        if change == "replaced":
            await m.write("new", b"new")
        store.hook = pause = Pause(lambda request: (request.what, request.key) == ("head", "f"))

        async def append() -> None:
            with pytest.raises(FileError) as caught:
                handle = await m.fs.open(inode, os.O_WRONLY)
                await m.fs.write(handle, 300, b"more")
                await m.close(handle)
            assert caught.value.errno == errno.ESTALE, "the kernel looks the name up again"

        async with trio.open_nursery() as nursery:
            nursery.start_soon(append)
            await reached(pause.reached)
            if change == "removed":
                await m.unlink("f")
            else:
                await m.rename("new", "f")
            pause.resume()
        await m.fs.make_durable()
        assert await m.tree() == ({} if change == "removed" else {"f": b"new"})
