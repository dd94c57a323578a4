"""States of files that the C library hands over: those of Python, how they go with those of C, and refused files."""

from __future__ import annotations

import errno
import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from lakefs_fuse.errors import LakeError
from lakefs_fuse.kernel.create_offload import (
    SUCCESSORS,
    CreateOffload,
    Parts,
    ReceivedFile,
    ReceivedState,
)
from lakefs_fuse.kernel.leases import Leases
from lakefs_fuse.kernel.reply import FILE_BLKSIZE
from lakefs_fuse.kernel.waiting_requests import WaitingRequests
from lakefs_fuse.meta import database
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.vfs.files import handle_bits
from lakefs_fuse.vfs.ops.create import Received
from tests.fakes import node_of
from tests.memory_store import MemoryStore
from tests.meta.full_disk import FullDisk
from tests.vfs.lakes import Clock, lake

NATIVE = Path(__file__).parents[2] / "lakefs_fuse" / "kernel" / "native"
NO_REQUESTS = WaitingRequests(lambda *_: None, lambda *_: 0)
CONTENT = Received(7, 1, b"name", 0o644, 0, 0, 1, 0, 0, b"data")


@pytest.mark.parametrize("before, after", list(product(ReceivedState, ReceivedState)))
def test_received_file_transition_outside_the_table_is_refused(before: ReceivedState, after: ReceivedState) -> None:
    file = ReceivedFile(CONTENT, before)
    if after in SUCCESSORS.get(before, ()):
        file.transition(after)
        assert file.state is after
    else:
        with pytest.raises(AssertionError, match=f"{before.name} to {after.name}"):
            file.transition(after)
        assert file.state is before


def test_numbers_shared_with_c_are_the_same() -> None:
    source = (NATIVE / "create_offload.c").read_text() + (NATIVE / "native.h").read_text()
    parts = re.search(r"enum parts \{(.*?)\}", source, re.DOTALL)
    assert parts
    found = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", parts[1])}
    assert found == {str(part.name): part.value for part in Parts}
    bits = {name: int(bit) for name, bit in re.findall(r"#define HANDLE_(\w+) \(1ULL << (\d+)\)", source)}
    assert bits == {name: bit.bit_length() - 1 for name, bit in vars(handle_bits).items() if name.isupper()}
    assert f"#define FILE_BLOCK_BYTES ({FILE_BLKSIZE >> 10}U << 10)" in source


@pytest.mark.parametrize("state", [ReceivedState.OPEN, ReceivedState.CLOSING])
async def test_requests_of_a_refused_file_get_its_error_until_it_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: ReceivedState
) -> None:
    """EBADF of a write from the page cache reaches the program as EIO."""
    monkeypatch.setattr(database, "REOPEN_PAUSE_S", 0.0)
    disk, clock = FullDisk(), Clock()
    node = replace(node_of(clock, "full"), engines=disk)
    async with lake(MemoryStore(), tmp_path, node=node, clock=clock, durability="writeback") as m:
        await m.names()
        offload, inode = CreateOffload(m.fs, Leases(m.fs), NO_REQUESTS), m.fs.database.new_inode()
        content = Received(inode, ROOT_INODE, b"name", 0o644, 0, 0, 1, clock.wall_ns(), clock.wall_ns(), b"data")
        disk.is_full = True
        offload._store([ReceivedFile(content, state)])  # noqa: SLF001  # as the library hands it over
        disk.is_full = False
        handle = handle_bits.CREATED | inode

        async def errors() -> list[int]:
            requests: list[Callable[[], Awaitable[object]]] = [
                lambda: m.fs.write(handle, 4, b"more"),
                lambda: m.fs.read(handle, 0, 4),
                lambda: m.fs.fsync(handle),
                lambda: m.fs.flush(handle),
            ]
            found = []
            for request in requests:
                with pytest.raises(LakeError) as refused:
                    await request()
                found.append(refused.value.errno)
            return found

        assert await errors() == [errno.ENOSPC] * 4
        await m.fs.release(handle)
        assert await errors() == [errno.EBADF] * 4
        assert await m.names() == []
        await m.write("name", b"again")
        assert await m.read("name") == b"again"
