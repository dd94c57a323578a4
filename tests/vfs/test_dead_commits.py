"""A daemon that died between a commit and what it notes of it: the next one has every change, in its order."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits import committer
from lakefs_fuse.commits.applier import Applier
from lakefs_fuse.meta.entry import ROOT_INODE
from tests.memory_store import MemoryStore, pause_of_commits
from tests.upload.drafting import reached
from tests.vfs.lakes import lake, permissions
from tests.vfs.writing_back import die


class Death:
    """Once armed, the cache directory is copied when the point is reached."""

    def __init__(self, point: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.armed = False
        self.left = root / "left"
        self._point, self.cache = point, root / "cache"
        monkeypatch.setattr(committer, "reached", self)

    def __call__(self, name: str) -> None:
        if self.armed and name == self._point:
            self.now()

    def now(self) -> None:
        self.armed = False
        die(self.cache, self.left)


async def test_a_rename_that_took_along_what_was_journaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old name does not come back because the journal seems newer than the commit that removed it."""
    store, death = MemoryStore(), Death("commit.sent", tmp_path, monkeypatch)
    async with lake(store, death.cache) as m:
        await m.symlink("x", "somewhere")
        death.armed = True
        await m.rename("x", "y")
    async with lake(store, death.left) as m:
        assert await m.tree() == {"y": "somewhere"}
        await m.sync()
    async with lake(store, tmp_path / "other") as other:
        assert await other.tree() == {"y": "somewhere"}


async def test_attributes_that_are_in_no_commit_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit in doubt is applied again, and does not undo what was set while it was sent."""
    store, death = MemoryStore(), Death("commit.sent", tmp_path, monkeypatch)
    pause = pause_of_commits()
    async with lake(store, death.cache, pack="never") as m:
        handle, _ = await m.fs.create(ROOT_INODE, b"x", 0o600, os.O_RDWR | os.O_CREAT, os.getuid(), os.getgid())
        await m.fs.write(handle, 0, b"bytes")
        await m.close(handle)
        store.hook, death.armed = pause, True
        async with trio.open_nursery() as nursery:
            nursery.start_soon(m.fs.sync_names)
            await reached(pause.reached)
            await m.setattr("x", mode=0o644)
            pause.resume()
        assert not death.armed
    async with lake(store, death.left) as m:
        assert permissions(await m.getattr("x")) == 0o644
        await m.sync()
    async with lake(store, tmp_path / "other") as other:
        assert permissions(await other.getattr("x")) == 0o644


async def test_a_change_that_was_journaled_and_not_in_effect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, death = MemoryStore(), Death("", tmp_path, monkeypatch)
    async with lake(store, death.cache) as m:
        await m.write("x", b"1")
        await m.sync()
        real = Applier.apply_pending

        def dying(*args: object, **kwargs: object) -> None:
            monkeypatch.setattr(Applier, "apply_pending", real)
            death.now()

        monkeypatch.setattr(Applier, "apply_pending", dying)
        await m.unlink("x")
    async with lake(store, death.left) as m:
        assert await m.names() == []
        await m.sync()
    async with lake(store, tmp_path / "other") as other:
        assert await other.names() == []
