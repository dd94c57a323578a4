"""The adapter without a kernel: what a request makes of the filesystem below."""

from __future__ import annotations

import ctypes
import os
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from lakefs_fuse.kernel.operations import Operations, Sleeper, upcall  # isort: skip  (before pyfuse3)
import pyfuse3
import trio
import trio.testing

from lakefs_fuse.kernel.features import KernelFeatures
from lakefs_fuse.kernel.native import hooks
from lakefs_fuse.kernel.native.hooks import CopyRequest, Feature
from lakefs_fuse.kernel.reply import size_reply
from lakefs_fuse.kernel.waiting_requests import WaitingRequests
from lakefs_fuse.meta.barrier import Barrier
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.vfs.lake_size import LakeSize
from tests.memory_store import MemoryStore
from tests.vfs.lakes import TTL_S, Clock, lake


@pytest.mark.parametrize("opened", [True, False])
async def test_a_directory_is_as_new_as_the_ttl_wants_whether_it_is_opened_or_not(tmp_path: Path, opened: bool) -> None:
    """A kernel that was told not to open directories begins with READDIR: that looks at the TTL then, once."""
    store, clock = MemoryStore(), Clock()
    store.give("a")
    async with lake(store, tmp_path, clock=clock) as m:
        operations = Operations(m.fs, KernelFeatures(Feature(0), writeback_cache=True, background_max=0))

        async def read() -> int:
            before = store.count("list")
            if opened:
                await operations.opendir(ROOT_INODE, None)
            for start in (0, 1, 1 << 40):  # to the end, where a listing is complete
                await operations.readdir(ROOT_INODE, start, pyfuse3.ReaddirToken())
            return store.count("list") - before

        assert [await read(), await read()] == [1, 0]
        clock.advance(TTL_S + 1)
        assert [await read(), await read()] == [1, 0]


async def test_requests_about_what_is_being_copied_wait_only_if_they_change_it(tmp_path: Path) -> None:
    async with lake(MemoryStore(), tmp_path) as m:
        operations = Operations(m.fs, KernelFeatures(Feature(0), writeback_cache=True, background_max=0))
        await m.mkdir("d")
        await m.write("d/file", b"bytes")
        directory, file = (await m.found("d")).inode, (await m.found("d/file")).inode
        caller = SimpleNamespace(pid=0, uid=0, gid=0)
        barrier = m.fs.namespace.tree.barrier
        barrier.add(ROOT_INODE, b"copy")
        barrier.add(ROOT_INODE, b"d", is_frozen=True)
        barrier.add_all(directory, is_frozen=True)

        async def waits(request: Awaitable[object]) -> bool:
            with trio.move_on_after(0.05) as scope:
                await request
            return scope.cancelled_caught

        async def open_file(flags: int) -> None:
            await m.fs.release((await operations.open(file, flags, caller)).fh)

        assert not await waits(operations.lookup(ROOT_INODE, b"d"))
        assert not await waits(operations.lookup(directory, b"file"))
        assert not await waits(operations.getattr(file))
        assert not await waits(operations.listxattr(file, None))
        assert not await waits(operations.opendir(directory, None))
        assert not await waits(open_file(os.O_RDONLY))
        assert await waits(open_file(os.O_WRONLY))
        assert await waits(open_file(os.O_RDONLY | os.O_TRUNC))
        assert await waits(operations.unlink(directory, b"file", caller))
        assert await waits(operations.create(directory, b"new", 0o644, os.O_WRONLY, caller))
        assert await waits(operations.setxattr(file, b"user.a", b"1", caller))
        assert await waits(operations.lookup(ROOT_INODE, b"copy"))
        barrier.lower()


async def test_statfs_counts_in_blocks_and_leaves_an_idle_mount_idle(tmp_path: Path) -> None:
    """Monitoring asks every mount for its size."""
    store = MemoryStore()
    store.give("a", bytes(5000))
    async with lake(store, tmp_path) as m:
        operations = Operations(m.fs, KernelFeatures(Feature(0), writeback_cache=True, background_max=0))
        await m.names()
        m.fs.namespace.idleness.is_idle = True
        with trio.fail_after(1):
            answer = await operations.statfs(None)
        assert m.fs.namespace.idleness.is_idle
        assert answer.f_bsize == answer.f_frsize
        assert (answer.f_blocks - answer.f_bfree) * answer.f_frsize == 8192
        assert answer.f_bavail * answer.f_frsize == 1 << 50
        assert answer.f_files - answer.f_ffree == 1
        m.fs.namespace.idleness.is_idle = False


def test_total_of_an_empty_mount_is_not_zero() -> None:
    """df(1) leaves out what has none."""
    answer = size_reply(LakeSize(0, 0))
    assert (answer.f_blocks, answer.f_bfree) == (1, 0)


async def test_linked_file_shows_the_number_of_its_source_whatever_was_linked_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those linked before were removed since, or nobody asks for their attributes any more."""
    if hooks.library() is None:
        pytest.skip("the library is not built here")
    store = MemoryStore()
    store.give("source")
    linked = range(1 << 20, (1 << 20) + 6000)
    async with lake(store, tmp_path) as m:
        operations = Operations(m.fs, KernelFeatures(Feature(0), writeback_cache=True, background_max=0))
        source = await m.found("source")

        async def lookup(_: int, name: bytes) -> tuple[Entry, float]:
            return replace(source, inode=int(name)), TTL_S

        async def shows_number(inode: int) -> bool:
            """Its attributes are not cached then."""
            return not (await operations.lookup(ROOT_INODE, b"%d" % inode)).attr_timeout

        monkeypatch.setattr(m.fs, "lookup", lookup)
        assert not await shows_number(linked[0])
        monkeypatch.setattr(m.fs, "shown_number", lambda entry: source.inode)
        assert [inode for inode in linked if not await shows_number(inode)] == []
        assert await shows_number(linked[0]), "it is shown again"
        monkeypatch.setattr(m.fs, "shown_number", lambda entry: entry.inode)
        assert [inode for inode in linked if await shows_number(inode)] == []


class Idleness:
    """Asleep until it is woken."""

    def __init__(self) -> None:
        self.is_idle, self.woken = True, trio.Event()

    async def wake(self) -> None:
        await self.woken.wait()
        self.is_idle = False


class Facts:
    """Handlers that note what the library says of their request."""

    def __init__(self, idleness: Sleeper) -> None:
        self.upcalls: dict[str, int] = Counter()
        self.waiting: list[Callable[[], None]] = []
        self.idleness = idleness
        self.barrier = Barrier(lambda _: None, lambda _: None)
        self.requests = WaitingRequests(lambda *_: None, lambda *_: 0)
        self.noted: dict[int, tuple[int, bool, int]] = {}

    @upcall("flush")
    async def note(self, number: int) -> None:
        self.noted[number] = hooks.flush_pid(), hooks.kills_privileges(), hooks.copy_request().source


async def test_request_that_wakes_the_mount_keeps_what_the_library_says_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others come meanwhile, of which the library says something else."""
    library = hooks.library()
    if library is None:
        pytest.skip("the library is not built here")

    def come(number: int) -> None:
        copied = CopyRequest(source=number)
        monkeypatch.setattr(library, "lakefs_flush_pid", lambda: number)
        monkeypatch.setattr(library, "lakefs_kills_privileges", lambda: number % 2)
        monkeypatch.setattr(library, "lakefs_copy_request", lambda: ctypes.pointer(copied))

    idleness = Idleness()
    facts = Facts(idleness)
    async with trio.open_nursery() as nursery:
        for number in (1, 2, 3):
            come(number)
            nursery.start_soon(facts.note, number)
            await trio.testing.wait_all_tasks_blocked()
        idleness.woken.set()
    assert facts.noted == {1: (1, True, 1), 2: (2, False, 2), 3: (3, True, 3)}
    come(4)
    await facts.note(4)
    assert facts.noted[4] == (4, False, 4)
