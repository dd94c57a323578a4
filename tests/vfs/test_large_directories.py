"""Directories with many names, and levels of many directories: what one turn of the loop reads, and how many tasks run.

Bounds are counted in rows and tasks, not in time: `TURN_ROWS_MAX` rows are 10 ms on a slow core.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Flag
from lakefs_fuse.meta.tree import CHILDREN_AT_ONCE
from lakefs_fuse.vfs.namespace.tree_walk import list_everything
from lakefs_fuse.vfs.ops.rename_preparation import LISTINGS_AT_ONCE
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Lake, lake

NAMES = 10 * CHILDREN_AT_ONCE
TURN_ROWS_MAX = 2 * CHILDREN_AT_ONCE


class Turns(trio.abc.Instrument):
    """The most rows that one turn of the loop read, and the most tasks there were at a time."""

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
    counted, scan = Turns(), Database.scan

    def scan_and_count(database: Database, begin: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        for row in scan(database, begin, end):
            counted.rows += 1
            yield row

    with monkeypatch.context() as patch:
        patch.setattr(Database, "scan", scan_and_count)
        trio.lowlevel.add_instrument(counted)
        try:
            await trio.lowlevel.checkpoint()
            yield counted
            await trio.lowlevel.checkpoint()
        finally:
            trio.lowlevel.remove_instrument(counted)


async def fill(m: Lake, path: str, names: int = NAMES) -> None:
    """Make a directory that is known to hold many plain objects, of which the store knows nothing."""
    inode, tree, batch = (await m.mkdir(path)).inode, m.fs.namespace.tree, Batch()
    tree.insert_plain(batch, inode, [(b"%05d" % number, 1, 1, "e" * 32) for number in range(names)])
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
    async with lake(MemoryStore(), tmp_path, attributes="objects") as m:
        await fill(m, "d")
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
