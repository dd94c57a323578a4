"""Changes of names that write-back holds while another node stores newer versions under the names."""

from __future__ import annotations

from pathlib import Path

import pytest

from lakefs_fuse.errors import Unavailable
from tests.memory_store import MemoryStore, Request, When
from tests.vfs.lakes import Clock, Lake, lake
from tests.vfs.writing_back import die, rewrite, told, until, writing_back

pytestmark = pytest.mark.usefixtures("noted_one_by_one")

BEFORE = ("d/removed", "d/replaced", "d/linked", "e/moved", "source")
THEIRS = ("d/removed", "d/replaced", "d/linked", "e/moved", "d/new")
EXPECTED = dict.fromkeys(THEIRS, b"theirs") | {"d": None, "e": None, "E": None, "E/moved": b"before", "held": b""}


async def change_names(m: Lake) -> None:
    await m.unlink("d/removed")
    await m.rename("source", "d/replaced")
    await m.unlink("d/linked")
    await m.symlink("d/linked", "ours")
    await m.symlink("d/new", "ours")
    await m.rename("e", "E")


@pytest.mark.parametrize("dies", [False, True])
async def test_held_changes_leave_what_another_node_packed_meanwhile(tmp_path: Path, dies: bool) -> None:
    store, clock = MemoryStore(), Clock()
    is_held = True

    def hold(request: Request, when: When) -> None:
        if is_held and request.what == "put" and request.key == "held":
            raise Unavailable("away")

    store.hook = hold
    async with lake(store, tmp_path / "two", clock=clock, pack="always") as two:
        for directory in ("d", "e"):
            await two.mkdir(directory)
        for path in BEFORE:
            await two.write(path, b"before")
        await two.sync()
        clock.advance(10)
        async with writing_back(store, tmp_path / "one", clock=clock) as one:
            await one.tree()
            await one.write("held", b"")
            await change_names(one)
            clock.advance(600)
            for path in THEIRS:
                await (rewrite(two, path, b"theirs") if path in BEFORE else two.write(path, b"theirs"))
            await two.sync()
            clock.advance(10)
            died = die(tmp_path / "one", tmp_path / "died") if dies else None
            is_held = False
            if not dies:
                await committed(one)
                assert await one.tree() == EXPECTED
        async with writing_back(store, died or tmp_path / "one", clock=clock) as again:
            await committed(again)
            assert await again.tree() == EXPECTED
        await two.poll()
        assert await two.tree() == EXPECTED
    async with lake(store, tmp_path / "three", clock=clock) as three:
        assert await three.tree() == EXPECTED


async def committed(m: Lake) -> None:
    """Everything acknowledged is in the store, and so are the changes of names behind it."""
    await until(lambda: not told(m)["files"])
    await m.sync()
