"""Directories with many names, and levels of many directories: what one turn of the loop reads and writes, and how many
tasks run. Bounds are counted in rows and tasks, not in time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE, Flag
from lakefs_fuse.meta.tree import CHILDREN_AT_ONCE
from lakefs_fuse.vfs.namespace import renamed_objects
from lakefs_fuse.vfs.namespace.tree_walk import list_everything
from lakefs_fuse.vfs.ops.rename_preparation import LISTINGS_AT_ONCE
from tests.memory_store import MemoryStore, Pause
from tests.upload.drafting import reached
from tests.vfs.lakes import TTL_S, Clock, Lake, lake, two_lakes
from tests.vfs.writing_back import REACH_S_MAX, location, rewrite

NAMES = 10 * CHILDREN_AT_ONCE
TURN_ROWS_MAX = 3 * CHILDREN_AT_ONCE
NAME_ROWS = 3
"""That many rows are changed for one name."""


class Turns(trio.abc.Instrument):
    """The most rows that one turn of the loop read or changed, and the most tasks there were at a time."""

    def __init__(self) -> None:
        self.rows = self.rows_most = self.tasks_most = 0
        self._tasks = 0

    def before_task_step(self, task: object) -> None:
        self.rows = 0

    def after_task_step(self, task: object) -> None:
        self.rows_most = max(self.rows_most, self.rows)

    def task_spawned(self, task: object) -> None:
        self._tasks += 1
        self.tasks_most = max(self.tasks_most, self._tasks)

    def task_exited(self, task: object) -> None:
        self._tasks -= 1


@asynccontextmanager
async def turns(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Turns]:
    counted, scan, commit = Turns(), Database.scan, Database.commit

    def scan_and_count(database: Database, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for row in scan(database, begin, end):
            counted.rows += 1
            yield row

    def commit_and_count(database: Database, batch: Batch, *, sync: bool = False) -> None:
        counted.rows += len(batch.rows) // NAME_ROWS
        commit(database, batch, sync=sync)

    with monkeypatch.context() as patch:
        patch.setattr(Database, "scan", scan_and_count)
        patch.setattr(Database, "commit", commit_and_count)
        trio.lowlevel.add_instrument(counted)
        try:
            await trio.lowlevel.checkpoint()
            yield counted
            await trio.lowlevel.checkpoint()
        finally:
            trio.lowlevel.remove_instrument(counted)


async def listed_once(m: Lake, store: MemoryStore, path: str) -> None:
    """Have a directory of which a LIST showed one object, and then many names that are not in the store any more."""
    store.give(f"{path}/marker", b"")
    await m.fs.refresh("", recursive=True)
    tree, batch = m.fs.namespace.tree, Batch()
    directory = await m.found(path)
    tree.insert_plain(batch, directory.inode, [(b"%05d" % number, 1, 1, "e" * 32) for number in range(NAMES)])
    tree.database.commit(batch)


async def test_walk_of_a_large_directory_reads_few_rows_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    for number in range(NAMES):
        store.give(f"d/{number}", b"")
    async with lake(store, tmp_path) as m:
        assert len(await m.names("d")) == NAMES
        found = list[int]()
        async with turns(monkeypatch) as counted:
            await list_everything(m.fs.namespace, found.append)
        assert found[-1] == NAMES + 1
        assert 0 < counted.rows_most <= TURN_ROWS_MAX


async def test_opendir_where_all_attributes_are_known_reads_few_rows_in_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, attributes="objects") as m:
        await listed_once(m, store, "d")
        tree, batch, d = m.fs.namespace.tree, Batch(), await m.found("d")
        for entry in tree.children(d.inode):
            tree.update(batch, msgspec.structs.replace(entry, flags=entry.flags | Flag.ATTRIBUTES_KNOWN))
        tree.database.commit(batch)
        async with turns(monkeypatch) as counted:
            await m.fs.opendir(d.inode)
        assert 0 < counted.rows_most <= TURN_ROWS_MAX


async def test_rename_of_many_directories_runs_few_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are to be listed or were lately."""
    directories = 5 * LISTINGS_AT_ONCE
    store = MemoryStore()
    for number in range(directories):
        store.give(f"d/{number}/f", b"")
    async with lake(store, tmp_path) as m:
        for old, new in (("d", "e"), ("e", "f")):
            async with turns(monkeypatch) as counted:
                await m.rename(old, new)
            assert len(await m.names(new)) == directories
            assert counted.tasks_most < 2 * LISTINGS_AT_ONCE


@pytest.mark.parametrize("below", ["", "/sub"])
@pytest.mark.parametrize("how", ["listed", "asked"])
async def test_directory_that_another_program_removed_goes_in_short_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, below: str, how: str
) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await listed_once(m, store, f"d{below}")
        d = await m.found("d")
        del store.objects[f"d{below}/marker"]
        clock.advance(TTL_S + 1)
        async with turns(monkeypatch) as counted:
            if how == "listed":
                await m.fs.refresh()
            else:
                await m.fs.refresh("d/name")
        assert await m.lookup("d") is None
        assert list(m.fs.namespace.tree.children(d.inode)) == []
        assert 0 < counted.rows_most <= TURN_ROWS_MAX
        assert {(ROOT_INODE, b"d")} <= set(m.changes)


async def test_names_that_another_program_removed_go_in_short_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await listed_once(m, store, "d")
        m.changes.clear()
        async with turns(monkeypatch) as counted:
            await m.fs.refresh("d")
        assert await m.names("d") == ["marker"]
        assert 0 < counted.rows_most <= TURN_ROWS_MAX
        assert len({name for _, name in m.changes}) == NAMES, "the kernel forgets all"


async def test_directory_in_which_a_name_is_made_while_it_goes_stays(tmp_path: Path) -> None:
    """Who made it was told that it is there. What was removed by then was not in the store."""
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock) as m:
        await listed_once(m, store, "d")
        d, namespace = await m.found("d"), m.fs.namespace
        del store.objects["d/marker"]

        def make(parent: int, _name: bytes) -> None:
            if parent == d.inode:
                m.fs.events.name_changed.remove(make)
                namespace.changing(parent, b"new")
                batch = Batch()
                namespace.tree.insert(batch, parent, b"new", Flag.DIRECTORY)
                namespace.database.commit(batch)

        m.fs.events.name_changed.append(make)
        clock.advance(TTL_S + 1)
        await m.fs.refresh()
        names = [entry.name for entry in namespace.tree.children(d.inode)]
        assert b"new" in names
        assert NAMES // 2 < len(names) <= NAMES
        assert namespace.tree.named(ROOT_INODE, b"d/") is not None


async def test_packed_file_keeps_a_directory_whose_other_names_go(tmp_path: Path) -> None:
    store, clock = MemoryStore(), Clock()
    async with lake(store, tmp_path, clock=clock, pack="always") as m:
        await listed_once(m, store, "d/sub")
        await m.write("d/sub/packed", b"bytes")
        await m.fs.sync_names()
        del store.objects["d/sub/marker"]
        clock.advance(TTL_S + 1)
        await m.fs.refresh()
        d = await m.found("d")
        assert not d.flags & Flag.LISTED
        assert [entry.name for entry in m.fs.namespace.tree.children((await m.found("d/sub")).inode)] == [b"packed"]


async def test_key_of_a_renamed_file_beside_many_names_is_freed_in_short_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never") as m:
        await listed_once(m, store, "a")
        await m.write("old", b"bytes")
        await m.rename("old", "z")
        async with turns(monkeypatch) as counted:
            await m.parts.renamed.free("old")
        assert 0 < counted.rows_most <= TURN_ROWS_MAX
        assert await m.read("z") == b"bytes"
        store.take("old")
        assert "/.lakefs/objects/" in await location(m, "z")


async def test_file_that_is_renamed_while_its_key_is_freed_has_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is behind the names that were looked through, or before them."""
    monkeypatch.setattr(renamed_objects, "NAMES_PER_STEP", 1)
    store = MemoryStore()
    async with lake(store, tmp_path, pack="never") as m:
        for before, after in (("a", "z"), ("z2", "a2")):
            key = f"old-{before}"
            await m.write(key, b"bytes")
            await m.rename(key, before)
            await listed_once(m, store, f"d-{before}")
            store.hook = pause = Pause(lambda request: request.what == "copy")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(m.parts.renamed.free, key)
                await reached(pause.reached)
                pause.resume()
                await m.rename(before, after)
            store.take(key)
            assert await m.read(after) == b"bytes"
            assert "/.lakefs/objects/" in await location(m, after)


async def test_file_replaced_while_its_rename_is_heard_of_beside_many_names_is_stored_in_short_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = MemoryStore(), Clock()
    async with two_lakes(store, tmp_path, clock=clock, pack="never") as (one, two):
        await listed_once(two, store, "d")
        await one.write("f", b"first")
        await one.sync()
        clock.advance(TTL_S + 1)
        await two.poll()
        assert await two.names() == ["d", "f"]
        await one.rename("f", "g")
        await one.sync()
        async with turns(monkeypatch) as counted:
            store.hook = pause = Pause(lambda request: request.what == "put" and request.key == "f")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(rewrite, two, "f", b"second")
                await reached(pause.reached)
                await two.poll()
                pause.resume()
            with trio.fail_after(REACH_S_MAX):
                while await two.read("g") != b"second":
                    await trio.sleep(0.01)
        assert 0 < counted.rows_most <= TURN_ROWS_MAX
