"""What the calls of everyday programs cost: requests to the store, whatever the time between them."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from lakefs_fuse.commits.record import COMMITS
from lakefs_fuse.config import MEMORY_BYTES_MIN, MIB
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.staging.segments import PREFIX
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue
from tests.memory_store import MemoryStore
from tests.mount.lakes import noise
from tests.vfs.lakes import Lake, lake, two_lakes
from tests.vfs.writing_back import NEVER_S, Outage, writing_back

EXCLUSIVE = os.O_RDWR | os.O_EXCL
FILES = 200
DIRECTORIES = 8


def kinds(store: MemoryStore, begin: int) -> Counter[str]:
    return Counter(request.what for request in store.requests[begin:])


async def unpack(m: Lake) -> None:
    """As tar does: a name that must be new, bytes, times, and the modes of directories at the end."""
    for number in range(FILES):
        if number < DIRECTORIES:
            await m.mkdir(f"d{number}")
        path = f"d{number % DIRECTORIES}/f{number}"
        handle = await m.create(path, EXCLUSIVE)
        await m.fs.write(handle, 0, noise(300, number))
        await m.setattr(path, mtime_ns=10**18 + number)
        await m.close(handle)
    for number in range(DIRECTORIES):
        await m.setattr(f"d{number}", mode=0o700, mtime_ns=10**18)


async def receive(m: Lake) -> None:
    """As rsync does: a temporary name, which is renamed."""
    for number in range(FILES):
        folder = f"d{number % DIRECTORIES}"
        if number < DIRECTORIES:
            await m.mkdir(folder)
        path, temporary = f"{folder}/f{number}", f"{folder}/.f{number}.Ab12Cd"
        assert await m.lookup(path) is None
        handle = await m.create(temporary, EXCLUSIVE)
        await m.fs.write(handle, 0, noise(300, number))
        await m.setattr(temporary, mode=0o600)
        await m.close(handle)
        await m.setattr(temporary, mode=0o644, mtime_ns=10**18 + number)
        await m.rename(temporary, path)


@pytest.mark.parametrize("program", [unpack, receive])
async def test_small_files_of_a_program_under_writeback_share_packs(
    tmp_path: Path, program: Callable[[Lake], Awaitable[None]]
) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="auto", delay_s=NEVER_S) as m:
        assert await m.names() == []
        before = len(store.requests)
        await program(m)
        await m.fs.make_durable()
        spent = kinds(store, before)
        assert spent["put"] <= 3, spent
        assert spent["list"] <= spent["put"], "a page for each pack of files created with O_EXCL"
        assert set(spent) <= {"put", "get", "list"}, spent
        expected = {f"d{number}" for number in range(DIRECTORIES)}
        assert set(await m.names()) == expected
    async with lake(store, tmp_path / "other") as other:
        assert len(await other.names("d0")) == FILES // DIRECTORIES
        assert await other.read("d3/f3") == noise(300, 3)


async def test_open_for_reading_follows_the_directories_above_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading small files in random order is an open for each."""
    followed: list[int] = []
    path_of = Tree.path

    def counted(tree: Tree, inode: int) -> list[bytes] | None:
        followed.append(inode)
        return path_of(tree, inode)

    async with lake(MemoryStore(), tmp_path, pack="never") as m:
        await m.mkdir("a")
        await m.mkdir("a/b")
        await m.write("a/b/c", b"x")
        inode = (await m.found("a/b/c")).inode
        monkeypatch.setattr(Tree, "path", counted)
        handle = await m.fs.open(inode, os.O_RDONLY)
        assert await m.fs.read(handle, 0, 10) == b"x"
        await m.fs.release(handle)
        assert len(followed) == 1


async def test_pack_of_a_mount_with_little_memory_is_smaller(tmp_path: Path) -> None:
    """It is made in memory: with 64 MiB a daemon took 235 MiB of the 192 that it was given."""
    for memory, pack in ((MEMORY_BYTES_MIN, 16 * MIB), (384 * MIB, 64 * MIB)):
        async with writing_back(MemoryStore(), tmp_path / str(memory), memory_bytes_max=memory) as m:
            assert m.parts.committer.pack_bytes_max == pack


async def test_rename_asks_no_more_of_the_queue_where_more_renames_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the store is away. Else N renames cost N * N."""
    asked = Counter[int]()
    is_durable = WriteBackQueue.is_durable_up_to
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="auto") as m:
        for number in range(FILES // 4):
            await m.write(f"f{number}", b"x")
        await m.fs.make_durable()
        outage = Outage(store)
        await m.write("waiting", b"x")

        def counted(queue: WriteBackQueue, sequence: int) -> bool:
            asked[len(m.parts.committer.journal.changes)] += 1
            return is_durable(queue, sequence)

        monkeypatch.setattr(WriteBackQueue, "is_durable_up_to", counted)
        for number in range(FILES // 4):
            await m.rename(f"f{number}", f"g{number}")
        assert len(m.parts.committer.journal.changes) == FILES // 4, "they wait for the file"
        assert max(asked.values()) < FILES // 8, asked
        monkeypatch.undo()
        outage.away = False


async def rename_file(m: Lake, number: int) -> None:
    await m.rename("temporary", f"file{number}")


async def look_up_directory(m: Lake, number: int) -> None:
    assert (await m.found("directory")).is_dir


@pytest.mark.parametrize("operation", [rename_file, look_up_directory])
async def test_operation_reads_no_names_of_other_files_that_wait_for_the_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: Callable[[Lake, int], Awaitable[None]]
) -> None:
    """Else doing it for each of N files costs N * N."""
    read = Counter[str]()
    entry_of = Tree.entry

    def counted(tree: Tree, inode: int) -> Entry | None:
        read["entries"] += 1
        return entry_of(tree, inode)

    async with writing_back(MemoryStore(), tmp_path, pack="auto", delay_s=NEVER_S, metadata_ttl_s=3600.0) as m:
        assert await m.names() == []
        await m.mkdir("directory")
        costs = []
        for count in (0, 30):
            for number in range(count):
                await m.mkdir(f"d{number}")
                await m.write(f"d{number}/f", b"x")
            await m.write("temporary", b"x")
            monkeypatch.setattr(Tree, "entry", counted)
            read.clear()
            await operation(m, count)
            costs.append(read["entries"])
            monkeypatch.setattr(Tree, "entry", entry_of)
        assert costs[0] == costs[1]
        await m.fs.make_durable()


async def test_unpacking_costs_one_put_and_one_head_a_file(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as m:
        assert await m.names() == []
        before = len(store.requests)
        await unpack(m)
        spent = kinds(store, before)
        assert spent["head"] == FILES, spent
        assert spent["put"] <= 1.05 * FILES, spent
        assert spent["list"] + spent["list_page"] == 0, spent


async def test_line_appended_again_and_again_under_writeback_is_stored_once(tmp_path: Path) -> None:
    store = MemoryStore()
    async with writing_back(store, tmp_path, pack="auto", delay_s=NEVER_S) as m:
        assert await m.names() == []
        await m.write("log", b"")
        before = len(store.requests)
        for number in range(100):
            handle = await m.open("log", os.O_RDWR | os.O_APPEND)
            await m.fs.write(handle, number, b"x")
            staged = {path.name for path in (tmp_path / "staging").iterdir()}
            assert all(name.startswith(PREFIX) for name in staged), "the next version has no staging file of its own"
            await m.close(handle)
        await m.fs.make_durable()
        assert [request.key for request in store.requests[before:] if not request.key.startswith(COMMITS)] == ["log"]
    async with lake(store, tmp_path / "other") as other:
        assert await other.read("log") == b"x" * 100


@pytest.mark.parametrize("journal", ["truncated", "removed"])
async def test_transaction_of_a_database_costs_one_put_for_each_fsync(tmp_path: Path, journal: str) -> None:
    """As SQLite does, with the rollback journal beside the database. The commit that has the removal of the last one
    has the bytes of the next."""
    store, transactions, fsyncs = MemoryStore(), 10, 0
    async with lake(store, tmp_path, delete_after_s=300.0) as m:
        assert await m.names() == []
        database = await m.create("db")
        before = len(store.requests)
        beside = await m.create("db-journal") if journal == "truncated" else 0
        for number in range(transactions):
            if journal == "removed":
                beside = await m.create("db-journal")
            for data in (b"pages", b"header and pages"):
                await m.fs.write(beside, 0, data)
                await m.fs.fsync(beside)
            await m.fs.sync_names()
            await m.fs.write(database, 0, b"%06d" % number)
            await m.fs.fsync(database)
            fsyncs += 4
            if journal == "removed":
                await m.close(beside)
                await m.unlink("db-journal")
            else:
                await m.setattr("db-journal", size=0)
        spent = kinds(store, before)
        assert spent["put"] <= fsyncs, spent
        await m.close(database)


async def test_renaming_files_with_attributes_lists_their_directory_on_no_node(tmp_path: Path) -> None:
    """As rsync does: a temporary file, closed, its times and mode, and its rename over the earlier one."""
    store = MemoryStore()
    async with two_lakes(store, tmp_path, pack="never") as (one, two):
        await one.mkdir("d")
        for number in range(5):
            for name in (f"d/{number}", f"d/.{number}.tmp"):
                await one.write(name, name.encode())
                await one.setattr(name, mtime_ns=10**18 + number, mode=0o640)
        await one.sync()
        await two.poll()
        assert len(await two.names("d")) == 10
        begin = len(store.requests)
        for number in range(5):
            await one.rename(f"d/.{number}.tmp", f"d/{number}")
            assert await two.poll()
            assert (await one.found(f"d/{number}")).mode == 0o640
            assert (await two.found(f"d/{number}")).mode == 0o640
        for m in one, two:
            assert await m.names("d") == ["0", "1", "2", "3", "4"]
        listed = [each.key for each in store.requests[begin:] if each.what == "list"]
        assert not [key for key in listed if not key.startswith(RESERVED_PREFIX)], "what a poll asks for left out"
        assert await two.read("d/3") == b"d/.3.tmp"
