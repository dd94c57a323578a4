"""Leases of names, with a library that only records them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import cast

import pytest

from lakefs_fuse.kernel import leases
from lakefs_fuse.kernel.leases import CREATED_BEFORE, Leases
from lakefs_fuse.vfs.ops import create
from tests.memory_store import MemoryStore
from tests.vfs.writing_back import writing_back


class _Library:
    """A library with room for any lease."""

    def __init__(self) -> None:
        self.leased: list[int] = []

    def lakefs_lease_names(self, directory: int, *_: int) -> int:
        self.leased.append(directory)
        return 1

    def lakefs_add_names(self, directory: int, names: bytes, length: int) -> int:
        return 1

    def lakefs_revoke_names(self, directory: int) -> None:
        self.leased.remove(directory)


async def test_large_directory_is_not_read_again_with_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (create, leases):
        monkeypatch.setattr(module, "NAMES_MAX", 10)
    store = MemoryStore()
    for number in range(20):
        store.give(f"large/{number:02}", b"x")
    async with writing_back(store, tmp_path / "cache") as m:
        await m.names("large")
        library, granted, new_files = _Library(), Leases(m.fs), m.fs.new_files
        granted.lease_names_from(cast("ctypes.PyDLL", library))
        reads, names = list[int](), new_files.names

        def counted(directory: int) -> list[bytes] | None:
            reads.append(directory)
            return names(directory)

        monkeypatch.setattr(new_files, "names", counted)
        handle = await m.create("large/new")
        file = m.fs.handle(handle).file
        for _ in range(2 * (10 + CREATED_BEFORE)):
            granted.count_created(file)
        assert (len(reads), library.leased) == (2, [])
        monkeypatch.setattr(create, "NAMES_MAX", 100)
        for _ in range(10 + CREATED_BEFORE):
            granted.count_created(file)
        assert set(library.leased) == {file.entry.parent}
        await m.close(handle)
