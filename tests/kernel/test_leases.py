"""Leases of names, with a library that only records them."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path
from typing import cast

import pytest

from lakefs_fuse.kernel import leases
from lakefs_fuse.kernel.leases import CREATED_BEFORE, NAMES_FOR_EACH, Leases
from lakefs_fuse.kernel.native import hooks
from lakefs_fuse.vfs.ops import create
from tests.memory_store import MemoryStore
from tests.vfs.writing_back import writing_back


class _Library:
    """A library with room for any lease."""

    def __init__(self) -> None:
        self.leased: list[int] = []
        self.removed: list[bytes] = []

    def lakefs_lease_names(self, directory: int, *_: int) -> int:
        self.leased.append(directory)
        return 1

    def lakefs_add_names(self, directory: int, names: bytes, length: int) -> int:
        return 1

    def lakefs_remove_name(self, directory: int, name: bytes) -> None:
        self.removed.append(name)

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


async def test_names_are_removed_from_a_lease_unless_another_entry_has_them(tmp_path: Path) -> None:
    async with writing_back(MemoryStore(), tmp_path / "cache") as m:
        library, granted = _Library(), Leases(m.fs)
        granted.lease_names_from(cast("ctypes.PyDLL", library))
        directory = await m.mkdir("d")
        granted.lease_new_directory(directory)
        assert library.leased == [directory.inode]
        for name in ("kept", "new", "gone"):
            await m.write(f"d/{name}", b"x")
        await m.unlink("d/gone")
        await m.rename("d/new", "d/kept")
        await m.rename("d/kept", "elsewhere")
        await m.mkdir("d/kept")
        assert library.removed == [b"gone", b"new", b"kept"]


class _Names:
    """Names of directories, as the C library knows them."""

    def __init__(self, library: ctypes.PyDLL, directories: range) -> None:
        self._library, self._lacking = library, library.lakefs_name_lease_lacking
        self._lacking.restype, self._lacking.argtypes = ctypes.c_void_p, (ctypes.c_uint64, ctypes.c_char_p)
        for directory in directories:
            assert library.lakefs_lease_names(directory, 10**12, 10**9, 255, 1)

    def add(self, directory: int, name: bytes) -> None:
        assert self._library.lakefs_add_names(directory, name + b"\0", len(name) + 1)

    def remove(self, directory: int, name: bytes) -> None:
        self._library.lakefs_remove_name(directory, name)

    def __contains__(self, place: tuple[int, bytes]) -> bool:
        return not self._lacking(*place)


def test_removed_names_leave_all_others_in_the_table() -> None:
    """A third of the table is in use, so that many names are not in their first slot."""
    library = hooks.library()
    if library is None:
        pytest.skip("the C library is not loaded")
    directories, rng = range(1 << 40, (1 << 40) + 4), random.Random(1)
    library.lakefs_revoke_all_names()
    try:
        names, there = _Names(library, directories), set[tuple[int, bytes]]()
        for number in range(100_000):
            place = (rng.choice(directories), b"name-%d" % (number % 50_000))
            names.add(*place)
            there.add(place)
        for place in rng.sample(sorted(there), len(there) * 3 // 4):
            names.remove(*place)
            there.remove(place)
        for directory in directories:
            found = {number for number in range(50_000) if (directory, b"name-%d" % number) in names}
            assert found == {int(name[5:]) for parent, name in there if parent == directory}
    finally:
        library.lakefs_revoke_all_names()


@pytest.mark.parametrize("name", [b".lakefs", b".lakefs-directory", b".", b"..", b"a\\b", b"a\nb", b""])
def test_reserved_and_unusual_names_are_left_to_python(name: bytes) -> None:
    library = hooks.library()
    if library is None:
        pytest.skip("the C library is not loaded")
    library.lakefs_revoke_all_names()
    try:
        names = _Names(library, range(1 << 40, (1 << 40) + 1))
        assert (1 << 40, b".hidden") not in names
        assert (1 << 40, name) in names, "which means that it is not certainly absent"
    finally:
        library.lakefs_revoke_all_names()
