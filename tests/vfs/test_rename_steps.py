"""Renames of large directories: planned and put in effect in steps, and to every observer at once."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.record import Mkdir, ObjectRef, Operation, Put, Symlink
from lakefs_fuse.environment import failpoints
from lakefs_fuse.errors import AccessDenied, FileError, LakeError
from lakefs_fuse.meta.barrier import About
from lakefs_fuse.vfs.ops import rename
from lakefs_fuse.vfs.ops.rename import NAMES_PER_STEP
from tests.memory_store import MemoryStore, Request, When, pause_of_commits
from tests.upload.drafting import reached
from tests.vfs.lakes import RENAME_EXCHANGE, Lake, lake, two_lakes
from tests.vfs.writing_back import die

NAMES = 3_000
STEP_CPU_S_MAX = 0.05


class Turns(trio.abc.Instrument):
    """The CPU time of each turn of the loop."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._began = time.thread_time()

    def before_task_step(self, task: object) -> None:
        self._began = time.thread_time()

    def after_task_step(self, task: object) -> None:
        self.seconds.append(time.thread_time() - self._began)


@asynccontextmanager
async def turns() -> AsyncIterator[Turns]:
    counted = Turns()
    trio.lowlevel.add_instrument(counted)
    try:
        await trio.lowlevel.checkpoint()
        counted.seconds.clear()  # the turn that had begun
        yield counted
    finally:
        trio.lowlevel.remove_instrument(counted)


async def fill(lake: Lake, names: int = NAMES) -> None:
    """A directory ``d`` of many files and directories, and a plain object beside them."""
    await lake.write("blob", b"bytes")
    etag = (await lake.found("blob")).etag
    below: list[Operation] = [Mkdir("d", 0o755, 0, 0, 1), Mkdir("d/sub", 0o700, 0, 0, 1)]
    below += [Put(f"d/{number}", 1, 0, 5, 0o644, 0, 0, 1) for number in range(names)]
    below += [Put(f"d/sub/{number}", 1, 0, 5, 0o600, 0, 0, 1, xattrs={"user.n": b"1"}) for number in range(9)]
    below += [Symlink("d/sub/link", "../0", 0, 0, 1)]
    await lake.parts.committer.commit(Change(operations=below, objects=[ObjectRef(), ObjectRef("blob", etag, 5)]))
    await lake.write("d/plain", b"itself")
    await lake.names("d/sub")
    await lake.names("d")


async def inodes(lake: Lake, path: str) -> dict[str, int]:
    top = (await lake.found(path)).inode
    return {below: entry.inode for below, entry in lake.fs.namespace.tree.below(top, "")}


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rename, "NAMES_AT_ONCE", 4)
    monkeypatch.setattr(rename, "NAMES_PER_STEP", 3)


async def test_rename_takes_many_short_turns(tmp_path: Path) -> None:
    """Also with others between two of them."""
    async with lake(MemoryStore(), tmp_path) as one:
        await fill(one)
        before = await inodes(one, "d")
        longest = []
        for old, new in (("d", "e"), ("e", "d"), ("d", "e")):
            async with turns() as counted:
                await one.rename(old, new)
            longest.append(max(counted.seconds))
            assert len(counted.seconds) > 3 * NAMES / NAMES_PER_STEP
        assert min(longest) < STEP_CPU_S_MAX
        assert await inodes(one, "e") == before
        assert await one.lookup("d") is None


async def test_rename_in_steps_is_what_one_at_once_is(tmp_path: Path, small_steps: None) -> None:
    """On this node, on one that follows, and on one that begins. The one that follows learns an exact mtime of the file
    that it had listed, and gives it a new inode."""
    store = MemoryStore()
    async with two_lakes(store, tmp_path) as (one, other):
        await fill(one, 40)
        await other.poll()
        expected = {path.replace("d/", "e/", 1): seen for path, seen in (await one.tree("d")).items()}
        await other.names("d")
        followed = await inodes(other, "d")
        await one.rename("d", "e")
        await other.poll()
        assert await one.tree("e") == expected == await other.tree("e")
        renamed = await inodes(other, "e")
        assert [path for path, inode in renamed.items() if inode != followed[path]] == ["plain"]
        assert await one.lookup("d") is None is await other.lookup("d")
        async with lake(store, tmp_path / "third") as third:
            assert await third.tree("e") == expected
            assert await third.lookup("d") is None


async def test_rename_in_steps_exchanges_directories(tmp_path: Path, small_steps: None) -> None:
    async with lake(MemoryStore(), tmp_path) as one:
        await fill(one, 40)
        await one.mkdir("few")
        await one.write("few/f", b"few")
        many = {path.replace("d/", "few/", 1): seen for path, seen in (await one.tree("d")).items()}
        await one.rename("d", "few", RENAME_EXCHANGE)
        assert await one.tree("few") == many
        assert await one.tree("d") == {"d/f": b"few"}


async def test_rename_in_steps_plans_again_what_changed_meanwhile(tmp_path: Path, small_steps: None) -> None:
    """What others of this node make and remove below the directory, past the barrier, moves and stays gone."""
    store = MemoryStore()
    async with lake(store, tmp_path) as one:
        await fill(one, 40)
        made = 0

        async def change() -> None:
            nonlocal made
            barrier = one.fs.namespace.tree.barrier
            while not barrier.is_up:
                await trio.lowlevel.checkpoint()
            for number in range(6):
                await one.fs.unlink((await one.found("d")).inode, f"{number}".encode())
                await one.symlink(f"d/late{number}", "late")
                made += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(change)
            nursery.start_soon(one.rename, "d", "e")
        names = set(await one.names("e"))
        assert made == 6
        assert names >= {f"late{number}" for number in range(6)} | {f"{number}" for number in range(6, 40)}
        assert not names & {f"{number}" for number in range(6)}
        assert await one.lookup("d") is None
        await one.sync()
        async with lake(store, tmp_path / "other") as other:
            assert set(await other.names("e")) == names


async def test_rename_in_steps_holds_back_requests_and_polls(tmp_path: Path, small_steps: None) -> None:
    store = MemoryStore()
    pause = pause_of_commits()
    async with two_lakes(store, tmp_path) as (one, other):
        await fill(one, 40)
        barrier, polled = one.fs.namespace.tree.barrier, trio.Event()
        below, top = (await one.found("d/7")).inode, (await one.found("d")).inode

        async def poll() -> None:
            await one.poll()
            polled.set()

        async def waits(about: About, inode: int, name: bytes = b"") -> bool:
            with trio.move_on_after(0.01) as scope:
                await barrier.wait_for(about, inode, name)
            return scope.cancelled_caught

        store.hook = pause
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.rename, "d", "e")
            await reached(pause.reached)
            store.hook = lambda _request, _when: None
            await other.mkdir("others")
            await other.sync()
            nursery.start_soon(poll)
            assert await waits(About.NAME, top, b"new")
            assert await waits(About.INODE, below)
            assert await waits(About.DIRECTORY, top)
            assert await waits(About.NAME, 1, b"d")
            assert await waits(About.NAME, 1, b"e")
            assert not await waits(About.NAME, 1, b"blob")
            assert not polled.is_set()
            pause.resume()
        assert polled.is_set()
        assert not barrier.is_up
        assert await one.lookup("others") is not None


@pytest.mark.parametrize("seen", [False, True])
async def test_rename_in_steps_that_is_refused_changes_nothing(tmp_path: Path, small_steps: None, seen: bool) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path) as one:
        await fill(one, 40)
        expected = await one.tree()

        def refuse(request: Request, when: When) -> None:
            if when == "before" and request.what == "put" and request.key.startswith(".lakefs/commits/"):
                raise AccessDenied("no")

        if seen:  # what is refused is known only when the plan is made
            await one.write("e", b"in the way")
            expected = await one.tree()
        else:
            store.hook = refuse
        with pytest.raises(FileError if seen else LakeError):
            await one.rename("d", "e")
        store.hook = lambda _request, _when: None
        assert not one.fs.namespace.tree.barrier.is_up
        assert await one.tree() == expected


async def test_rename_in_steps_is_whole_after_a_crash_between_two(
    tmp_path: Path, small_steps: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, steps = MemoryStore(), 0
    reach = failpoints.reached

    def count(name: str) -> None:
        nonlocal steps
        reach(name)
        steps += name == "apply.step"
        if name == "apply.step" and steps == 3:
            die(tmp_path / "cache", tmp_path / "dead")

    monkeypatch.setattr(failpoints, "reached", count)
    async with lake(store, tmp_path / "cache") as one:
        await fill(one, 200)
        expected = {path.replace("d/", "e/", 1): seen for path, seen in (await one.tree("d")).items()}
        await one.rename("d", "e")
    assert steps > 3
    async with lake(store, tmp_path / "dead") as again:
        await again.poll()
        assert await again.tree("e") == expected
        assert await again.lookup("d") is None
