"""The list and the totals of files that are not in the store: their order, and what they cost where there are many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lakefs_fuse.metrics import Unfinished
from lakefs_fuse.vfs import status
from tests.memory_store import MemoryStore
from tests.vfs.lakes import Clock, Lake, lake

FILES = 50


async def write_files(m: Lake, clock: Clock) -> None:
    for number in range(FILES):
        await m.write(f"{number}", b"x")
        clock.advance(1)


async def test_first_rows_of_many_files_are_the_only_ones_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    async with lake(
        MemoryStore(), tmp_path, clock=clock, durability="writeback", writeback_delay_s=1e6, pack="always"
    ) as m:
        await write_files(m, clock)
        everything = m.fs.unfinished()
        built: list[str] = []

        def build(**values: Any) -> Unfinished:
            built.append(values["path"])
            return Unfinished(**values)

        monkeypatch.setattr(status, "Unfinished", build)
        first = await m.fs.list_unfinished(5)
        assert [file.path for file in first] == [file.path for file in everything[:5]] == ["0", "1", "2", "3", "4"]
        assert built == ["0", "1", "2", "3", "4"]


async def test_list_of_many_files_is_built_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(status, "ROWS_A_STEP", 10)
    monkeypatch.setattr(status, "FILES_A_STEP", 10)
    async with lake(
        MemoryStore(), tmp_path, clock=clock, durability="writeback", writeback_delay_s=1e6, pack="always"
    ) as m:
        await write_files(m, clock)
        steps = m.fs._status.list_unfinished(None)  # noqa: SLF001
        assert sum(1 for _ in steps) >= 2 * FILES // 10
        assert len(await m.fs.list_unfinished()) == len(m.fs.unfinished()) >= FILES


async def test_totals_of_many_files_are_added_in_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(status, "FILES_A_STEP", 10)
    async with lake(
        MemoryStore(), tmp_path, clock=clock, durability="writeback", writeback_delay_s=1e6, pack="always"
    ) as m:
        await write_files(m, clock)
        assert sum(1 for _ in m.fs._status.statistics()) >= 2 * FILES // 10  # noqa: SLF001
        values = await m.fs.read_statistics()
        assert values["dirty"] == {"files": FILES, "bytes": FILES, "failed": 0, "orphans": 0}
        of_queue = values["writeback"]
        assert isinstance(of_queue, dict)
        assert (of_queue["files"], of_queue["bytes"], of_queue["oldest_s"]) == (FILES, FILES, pytest.approx(FILES))
