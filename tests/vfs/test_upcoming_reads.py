"""Files that a job names before it reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from lakefs_fuse.vfs.residency import upcoming_reads
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Lake, lake

FILES = 40


def gets(store: MemoryStore) -> int:
    return sum(request.what == "get" for request in list(store.requests))


async def idle(node: Lake) -> None:
    """Until all that was named is read."""
    with trio.fail_after(20):
        while node.fs.residency.upcoming.is_busy:
            await trio.sleep(0.002)


async def test_named_files_are_there_when_they_are_read(tmp_path: Path) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path / "writer", pack="always") as writer:
        await writer.mkdir("d")
        for number in range(FILES):
            await writer.write(f"d/{number}", b"%d" % number * 1000)
        await writer.sync()
    store.give("d/plain", b"plain" * 1000, {"mode": "33188"})
    async with lake(store, tmp_path / "node") as node:
        await node.names("d")
        names = [f"d/{number}" for number in range(FILES)]
        node.fs.residency.read_ahead(["d/plain", *names, "d/absent", "d", "", "d/0/x"])
        await idle(node)
        counters = node.metrics.upcoming
        assert (counters.files + counters.local, counters.failed, counters.dropped) == (FILES + 1, 0, 0)
        asked = gets(store)
        for number in range(FILES):
            assert await node.read(f"d/{number}") == b"%d" % number * 1000
        assert await node.read("d/plain") == b"plain" * 1000
        await node.getattr("d/plain")
        assert not any(request.what == "head" and request.key == "d/plain" for request in list(store.requests))
        assert gets(store) == asked
        local = counters.local
        node.fs.residency.read_ahead(names)
        await idle(node)
        assert counters.local - local == FILES


async def test_names_that_the_job_has_passed_are_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upcoming_reads, "WAITING_MAX", 10)
    store = MemoryStore()
    for number in range(FILES):
        store.give(f"{number}", b"x" * 1000)
    async with lake(store, tmp_path) as node:
        node.fs.residency.read_ahead([f"{number}" for number in range(FILES)])
        await idle(node)
        counters = node.metrics.upcoming
        assert (counters.files + counters.local, counters.dropped) == (10, FILES - 10)
        asked = gets(store)
        assert await node.read(f"{FILES - 1}") == b"x" * 1000
        assert gets(store) == asked


async def test_file_that_cannot_be_read_ahead_is_an_error_of_nobody(tmp_path: Path) -> None:
    store = MemoryStore()
    store.give("a", b"a" * 1000)
    store.give("b", b"b" * 1000)
    async with lake(store, tmp_path) as node:
        await node.names("")
        del store.objects["a"]
        node.fs.residency.read_ahead(["a"])
        await idle(node)
        assert node.metrics.upcoming.failed == 1
        node.fs.residency.read_ahead(["b"])
        await idle(node)
        assert node.metrics.upcoming.files == 1
