"""Leases of names, with a library that only records them."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import cast

import pytest

from lakefs_fuse.kernel import leases
from lakefs_fuse.kernel.leases import CREATED_BEFORE, NAMES_FOR_EACH, Leases
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

    def lakefs_revoke_all_names(self) -> None:
        """Leases end; what was leased stays recorded."""


def given_names(store: MemoryStore, directory: str, count: int) -> None:
    for number in range(count):
        store.give(f"{directory}/{number:03}", b"x")


@pytest.mark.parametrize("is_too_large", [True, False])
async def test_directory_whose_lease_ends_soon_is_not_read_with_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_too_large: bool
) -> None:
    """Because it has more names than are leased, or because many others are leased."""
    for module in (create, leases):
        monkeypatch.setattr(module, "NAMES_MAX", 100 if is_too_large else 1000)
    store = MemoryStore()
    given_names(store, "large", 200)
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
        for _ in range(100):
            granted.count_created(file)
            granted.revoke_all_names()
        names_read = len(reads) * (100 if is_too_large else 200)
        assert 100 < names_read <= (100 + CREATED_BEFORE) * NAMES_FOR_EACH
        assert bool(library.leased) is not is_too_large
        await m.close(handle)


async def test_lease_is_renewed_with_each_file(tmp_path: Path) -> None:
    store = MemoryStore()
    given_names(store, "d", 200)
    async with writing_back(store, tmp_path / "cache") as m:
        await m.names("d")
        library, granted = _Library(), Leases(m.fs)
        granted.lease_names_from(cast("ctypes.PyDLL", library))
        handle = await m.create("d/new")
        file = m.fs.handle(handle).file
        for _ in range(10):
            granted.count_created(file)
        assert library.leased == [file.entry.parent] * (10 - CREATED_BEFORE + 1)
        await m.close(handle)
