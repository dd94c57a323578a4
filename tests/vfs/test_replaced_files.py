"""Plain files that other clients replace within the TTL of the listing that named them."""

from __future__ import annotations

from pathlib import Path

import trio

from tests.memory_store import MemoryStore
from tests.vfs.lakes import Clock, held_fresh, lake


async def test_open_of_a_replaced_file_whose_bytes_were_evicted_reads_the_new_version(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    store.give("d/f", b"old" * 1000)
    async with lake(store, tmp_path, clock=clock) as m:
        assert await m.names("d") == ["f"]
        assert await m.read("d/f") == b"old" * 1000
        with trio.fail_after(10):
            while not m.parts.cache.bytes_used:  # what was read is written to the cache behind the reader
                await trio.sleep(0.01)
    async with lake(store, tmp_path, clock=clock) as m:  # which has nothing in memory
        assert m.parts.cache.evict(1 << 40) > 0
        store.give("d/f", b"new" * 2000)
        with held_fresh(m):
            assert await m.read("d/f") == b"new" * 2000
