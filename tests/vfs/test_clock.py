"""A node whose clock was wrong for one daemon: what the next one shows, and what others see of both."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakefs_fuse.store.protocol import ObjectStore
from tests.fakes import local_store
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Clock, lake

YEARS_S = 12 * 365 * 86400.0


@pytest.mark.parametrize("kind", ["memory", "local"])
async def test_mount_after_a_daemon_in_the_future_shows_and_tells_what_it_did(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    (tmp_path / "store").mkdir()
    store: ObjectStore = MemoryStore() if kind == "memory" else local_store(str(tmp_path / "store"), clock)
    one, two = tmp_path / "one", tmp_path / "two"
    async with lake(store, two, clock=clock) as b:
        await b.write("old", b"old")
        await b.write("both", b"0")
        await b.sync()
    clock.advance(YEARS_S)
    async with lake(store, one, clock=clock, pack="always") as a:
        await a.write("new", b"new")
        await a.unlink("old")
        await a.rename("both", "moved")
        await a.sync()
    clock.advance(10 - YEARS_S)
    async with lake(store, one, clock=clock) as a:
        assert await a.names() == ["moved", "new"]
        assert await a.read("new") == b"new"
        clock.advance(1)
        async with lake(store, two, clock=clock) as b:
            assert await b.names() == ["moved", "new"]
            assert await b.read("moved") == b"0"
            clock.advance(1)
            await b.write("new", b"newer")
            await b.rename("moved", "again")
            await b.sync()
        await a.poll()
        assert await a.names() == ["again", "new"]
        assert await a.read("new") == b"newer"
        await a.write("last", b"last")
        await a.mkdir("d")
        await a.sync()
    clock.advance(1)
    async with lake(store, tmp_path / "fresh", clock=clock) as c:
        assert await c.names() == ["again", "d", "last", "new"]
        assert await c.read("new") == b"newer"
    caplog.clear()
