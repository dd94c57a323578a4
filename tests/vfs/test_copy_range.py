"""copy_file_range(2): a file that is copied whole, in order, is copied by the store when it is closed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from lakefs_fuse.errors import FileError, Unavailable
from lakefs_fuse.store.protocol import Capabilities
from lakefs_fuse.vfs.ops import io
from tests.memory_store import Failures, MemoryStore
from tests.vfs.lakes import Clock, Lake, lake, two_lakes
from tests.vfs.writing_back import rewrite

pytestmark = pytest.mark.usefixtures("small_parts_may_be_copied")
KIB = 1024
SOURCE = bytes(number % 251 for number in range(300 * KIB))


@pytest.fixture(autouse=True)
def every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(io, "COPIED_BYTES_MIN", 1)


async def copy(m: Lake, source: str, target: str, offset: int, length: int, *, at: int | None = None) -> int:
    """Bytes copied; 0 where the kernel is to do it."""
    inodes = [(await m.found(path)).inode for path in (source, target)]
    try:
        return await m.fs.copy_range(inodes[0], offset, inodes[1], offset if at is None else at, length)
    except FileError as error:
        assert error.errno == errno.EOPNOTSUPP
        return 0


def moved(store: MemoryStore, since: int) -> list[str]:
    """Requests that move bytes of files."""
    moving = [each for each in store.requests[since:] if each.what in ("get", "put", "upload_part")]
    return [f"{each.what} {each.key}" for each in moving if not each.key.startswith(".lakefs/commits/")]


@pytest.mark.parametrize("durability", ["close", "writeback"])
@pytest.mark.parametrize("pack", ["never", "always"])
@pytest.mark.parametrize("size", [100, 60 * KIB, 300 * KIB])
async def test_file_copied_in_order_moves_no_byte_and_can_be_read_before_it_is_closed(
    tmp_path: Path, pack: str, durability: str, size: int
) -> None:
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack=pack, durability=durability) as (one, two):
        await one.write("f", SOURCE[:size])
        await one.fs.make_durable()
        said = len(store.requests)
        handle = await one.create("g")
        step = size // 2
        assert await copy(one, "f", "g", 0, step) == step
        assert await copy(one, "f", "g", step, size) == size - step
        assert (await one.found("g")).inode == one.fs.handle(handle).file.entry.inode
        assert one.fs.entry((await one.found("g")).inode).size == size
        await one.close(handle)
        assert not moved(store, said)
        assert [each.what for each in store.requests[said:]].count("upload_part_copy") == -(-size // (64 * KIB))
        assert await one.read("g") == SOURCE[:size]
        await one.unlink("f")
        await one.sync()
        await one.fs.make_durable()
        await two.poll()
        assert await two.tree() == {"g": SOURCE[:size]}


async def test_copy_that_is_changed_before_it_is_closed_has_the_change(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never") as m:
        await m.write("f", SOURCE)
        handle = await m.create("g")
        assert await copy(m, "f", "g", 0, len(SOURCE)) == len(SOURCE)
        assert await m.read_handle(handle) == SOURCE
        await m.fs.write(handle, 10, b"changed")
        await m.fs.write(handle, len(SOURCE), b"more")
        await m.close(handle)
        assert await m.read("g") == SOURCE[:10] + b"changed" + SOURCE[17:] + b"more"
        assert await m.read("f") == SOURCE


async def test_what_is_no_copy_in_order_is_left_to_the_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with lake(MemoryStore(), tmp_path, pack="never") as m:
        await m.write("f", SOURCE)
        await m.write("other", SOURCE)
        await m.write("closed", b"bytes")
        writing = await m.create("writing")
        await m.fs.write(writing, 0, b"dirty")
        target = await m.create("g")
        assert not await copy(m, "f", "g", 10, 10), "not from the beginning"
        assert not await copy(m, "f", "g", 0, 10, at=10), "at another offset"
        assert not await copy(m, "writing", "g", 0, 10), "what is not in the store yet"
        assert not await copy(m, "f", "closed", 0, 10), "a file that is not open for writing"
        assert not await copy(m, "g", "g", 0, 10)
        await m.fs.write(target, 0, b"bytes")
        assert not await copy(m, "f", "g", 5, 10), "behind other bytes"
        await m.close(target)
        again = await m.open("closed", os.O_WRONLY | os.O_TRUNC)
        assert await copy(m, "f", "closed", 0, 10) == 10
        assert not await copy(m, "other", "closed", 10, 10), "of another file"
        await m.close(again)
        assert await m.read("closed") == SOURCE[:10]
        monkeypatch.setattr(io, "COPIED_BYTES_MIN", 1 << 20)
        small = await m.create("small")
        assert not await copy(m, "f", "small", 0, 10), "a small file"
        await m.close(small)
        await m.close(writing)


async def test_source_that_another_node_replaced_is_left_to_the_kernel(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never") as m:
        await m.write("f", SOURCE)
        source, handle = (await m.found("f")).inode, await m.create("g")
        store.give("f", b"replaced")
        with pytest.raises(FileError) as raised:
            await m.fs.copy_range(source, 0, (await m.found("g")).inode, 0, 10)
        assert raised.value.errno == errno.EOPNOTSUPP
        await m.close(handle)


@pytest.mark.parametrize("how", ["rewrite", "truncate", "unlink", "create"])
async def test_source_that_changes_here_before_the_copy_is_closed_stays_in_the_copy(tmp_path: Path, how: str) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="never", delete_after_s=300.0) as m:
        await m.write("f", SOURCE)
        handle = await m.create("g")
        assert await copy(m, "f", "g", 0, len(SOURCE)) == len(SOURCE)
        if how == "rewrite":
            await rewrite(m, "f", b"new")
        elif how == "truncate":
            await m.close(await m.open("f", os.O_WRONLY | os.O_TRUNC))
        else:
            await m.unlink("f")
        if how == "create":
            await m.write("f", b"new")
        await m.close(handle)
        await m.fs.make_durable()
        clock.advance(1000)
        await m.sync()
        left = {"rewrite": {"f": b"new"}, "truncate": {"f": b""}, "create": {"f": b"new"}}.get(how, {})
        assert await m.tree() == {"g": SOURCE, **left}
        await rewrite(m, "f", b"again") if left else await m.write("f", b"again")
        assert store.data("f") == b"again", "its key is free again"


async def test_store_that_cannot_copy_parts_leaves_it_to_the_kernel(tmp_path: Path) -> None:
    async with lake(MemoryStore(Capabilities(name="memory", part_copy=False)), tmp_path, pack="never") as m:
        await m.write("f", SOURCE)
        handle = await m.create("g")
        assert not await copy(m, "f", "g", 0, 10)
        await m.close(handle)


async def test_file_is_copied_by_the_kernel_while_the_store_is_away(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, retry_timeout_s=0) as m:
        await m.write("f", SOURCE)
        handle = await m.create("g")
        store.hook = Failures(lambda request: request.what == "head", Unavailable("the store is away"), count=100)
        assert await copy(m, "f", "g", 0, len(SOURCE)) == 0
        store.hook = lambda request, when: None
        await m.close(handle)
