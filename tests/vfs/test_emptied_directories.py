"""Directories that a LIST shows although mounts have removed or renamed all of their names: what asking costs."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from lakefs_fuse.errors import FileError
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.protocol import ListPage
from lakefs_fuse.vfs.namespace import emptied_directories, subtree_listing
from lakefs_fuse.vfs.namespace.emptied_directories import EmptiedDirectories
from lakefs_fuse.vfs.namespace.look_intervals import INTERVAL_S_MAX, LookIntervals
from tests.memory_store import MemoryStore
from tests.vfs.lakes import TTL_S, Clock, Lake, lake, two_lakes

EMPTIED = 6


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lakes of more than four plain objects are large."""
    monkeypatch.setattr(subtree_listing, "KEYS_MAX", 4)


def store_with_directories() -> MemoryStore:
    store = MemoryStore()
    for number in range(EMPTIED):
        store.give(f"run/tmp-{number}/model", b"x")
    return store


async def rename_all(m: Lake) -> None:
    """As training programs do that save into a directory and then rename it."""
    for number in range(EMPTIED):
        await m.rename(f"run/tmp-{number}", f"run/saved-{number}")


async def lists_of(m: Lake, store: MemoryStore, path: str = "run") -> list[str]:
    before = len(store.requests)
    shown = [name for name in await m.names(path) if name != "x"]
    assert shown == [f"saved-{number}" for number in range(EMPTIED)]
    requests = [each for each in store.requests[before:] if not each.key.startswith(RESERVED_PREFIX)]
    return [each.key for each in requests if each.what in ("list", "list_page")]


async def test_one_list_answers_for_all_in_a_small_lake(tmp_path: Path) -> None:
    store, clock = store_with_directories(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await rename_all(m)
        for _ in range(3):
            clock.advance(TTL_S + 1)
            assert len(await lists_of(m, store)) <= 3
        store.give("run/tmp-1/new", b"x")
        clock.advance(TTL_S + 1)
        assert "tmp-1" in await m.names("run")
        assert await m.names("run/tmp-1") == ["new"]


async def announce(one: Lake, two: Lake, clock: Clock, *paths: str) -> None:
    """Have the directories of some files listed again that one node writes and another one hears of."""
    clock.advance(TTL_S + 1)
    for path in paths:
        await one.write(path, b"%d" % clock.now_ns)
    await one.parts.committer.flush_announcements()
    await two.poll()


async def outdate(m: Lake, *names: bytes) -> None:
    """As a commit that concerns these names; if they are several, the directory is listed again."""
    run = (await m.found("run")).inode
    for name in names:
        m.fs.namespace.outdate(run, name)


@contextlib.asynccontextmanager
async def nodes_that_remember(store: MemoryStore, directory: Path, clock: Clock) -> AsyncIterator[tuple[Lake, Lake]]:
    """Two nodes; the second one has asked several times what is below the emptied directories."""
    async with two_lakes(store, directory, clock=clock, pack="never") as (one, two):
        await rename_all(one)
        await two.poll()
        for _ in range(9):
            await announce(one, two, clock, "run/x")
            await lists_of(two, store)
        await announce(one, two, clock, "run/x")
        assert not [each for each in await lists_of(two, store) if each.startswith("run/tmp-")]
        yield one, two


@pytest.mark.usefixtures("large")
async def test_each_is_asked_about_ever_more_rarely_in_a_large_lake(tmp_path: Path) -> None:
    store, clock = store_with_directories(), Clock()
    async with nodes_that_remember(store, tmp_path, clock) as (one, two):
        asked = 0
        for _ in range(int(2 * INTERVAL_S_MAX / TTL_S)):
            await announce(one, two, clock, "run/x")
            asked += sum(each.startswith("run/tmp-") for each in await lists_of(two, store))
        assert 0 < asked <= 6 * EMPTIED
        store.give("run/tmp-1/new", b"x")
        clock.advance(INTERVAL_S_MAX)
        await announce(one, two, clock, "run/x")
        assert "tmp-1" in await two.names("run")
        assert await two.names("run/tmp-1") == ["new"]


@pytest.mark.usefixtures("large")
async def test_listing_made_for_all_names_asks_about_each(tmp_path: Path) -> None:
    """As `refresh` makes it."""
    store, clock = store_with_directories(), Clock()
    async with nodes_that_remember(store, tmp_path, clock) as (one, two):
        store.give("run/tmp-1/new", b"x")
        await announce(one, two, clock, "run/x")
        await lists_of(two, store)
        await two.fs.namespace.list_directory((await two.found("run")).inode)
        assert "tmp-1" in await two.names("run")


@pytest.mark.usefixtures("large")
async def test_directory_is_not_removed_by_an_old_answer(tmp_path: Path) -> None:
    store, clock = store_with_directories(), Clock()
    async with nodes_that_remember(store, tmp_path, clock) as (one, two):
        store.give("run/tmp-1/new", b"x")
        for number in range(EMPTIED):
            await one.rename(f"run/saved-{number}", f"saved-{number}")
        await one.unlink("run/x")
        await one.sync()
        await two.poll()
        await outdate(two, b"absent", b"x")
        assert await two.names("run") == [], "by answers from before"
        with pytest.raises(FileError) as error:
            await two.rmdir("run")
        assert error.value.errno == errno.ENOTEMPTY
        assert await two.names("run/tmp-1") == ["new"]


@pytest.mark.usefixtures("large")
async def test_name_that_a_commit_outdates_is_asked_about(tmp_path: Path) -> None:
    store, clock = store_with_directories(), Clock()
    async with nodes_that_remember(store, tmp_path, clock) as (_, two):
        store.give("run/tmp-1/new", b"x")
        await outdate(two, b"tmp-1", b"x")
        assert "tmp-1" in await two.names("run")


class LargeLake:
    """A store in which nothing is below any name, and a lake that no single LIST answers for."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[], object] = lambda: None

    async def list_page(self, prefix: str, *, token: str | None = None) -> ListPage:
        self.meanwhile()
        return ListPage((), (), None)

    async def flat_listing_above(self, prefix: str, since_ns: int) -> None:
        return None

    def is_in_large(self, prefix: str) -> bool:
        return True


def emptied_directories_of(large: Any, clock: Clock) -> EmptiedDirectories:
    return EmptiedDirectories(large, large, LookIntervals(TTL_S, None), clock.wall_ns, lambda _: True)


async def test_answer_that_a_commit_has_overtaken_is_not_kept() -> None:
    large = LargeLake()
    emptied = emptied_directories_of(large, Clock())
    large.meanwhile = lambda: emptied.forget(1, b"a")
    assert not await emptied.has_visible_name(1, "", b"a", None)
    assert await emptied.begin(1, "", [b"a"], None, 0) == (None, set())


async def test_answers_about_a_bounded_number_of_names_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptied_directories, "NAMES_MAX", 4)
    clock = Clock()
    emptied = emptied_directories_of(LargeLake(), clock)
    names = [b"a", b"b", b"c"]
    for directory in (1, 2):
        for name in names:
            await emptied.has_visible_name(directory, "", name, None)
    assert await emptied.begin(1, "", names, None, 0) == (None, set())
    assert await emptied.begin(2, "", names, None, 0) == (None, set(names))
    assert [emptied.relies(directory) for directory in (1, 2)] == [False, True]
    clock.advance(TTL_S + 1)
    assert await emptied.begin(2, "", names, None, 0) == (None, set())
    assert not emptied.relies(2)
