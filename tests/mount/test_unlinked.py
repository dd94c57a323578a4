"""Unlinked files and directories, as processes that have them open see them."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from tests.mount.conftest import Place
from tests.mount.posix_errors import error_of, opened

ROUNDS = 30
LIBC = ctypes.CDLL(None, use_errno=True)
NAME_AT = 19
"""Of d_name in a struct dirent of Linux on 64 bits."""


@contextmanager
def opening(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def error_of_syncfs(path: Path) -> str:
    """What `sync -f` of a path says: errors of the file system that nobody was told of are told to a new descriptor."""
    with opening(path) as fd:
        return "" if LIBC.syncfs(fd) == 0 else errno.errorcode[ctypes.get_errno()]


def test_syncfs_after_a_written_file_was_unlinked_returns_0(here: Place) -> None:
    found = set()
    for number in range(ROUNDS):
        file, other = here.path / f"f{number}", here.path / f"g{number}"
        file.write_bytes(b"a\n")
        file.unlink()
        found.add(error_of_syncfs(here.path))
        file.write_bytes(b"a\n")
        other.write_bytes(b"b\n")
        other.rename(file)
        found.add(error_of_syncfs(here.path))
        (here.path / "d").mkdir()
        (here.path / "d").rmdir()
        found.add(error_of_syncfs(here.path))
    assert found == {""}


def test_an_unlinked_open_file_has_no_links_and_goes_on(here: Place) -> None:
    file, other = here.path / "f", here.path / "g"
    file.write_bytes(b"bytes")
    other.write_bytes(b"other bytes")
    with opening(file, os.O_RDWR) as fd, opening(other) as replaced:
        before = os.fstat(fd)
        assert before.st_nlink == 1
        file.unlink()
        now = os.fstat(fd)
        assert (now.st_nlink, now.st_size, now.st_mtime_ns) == (0, 5, before.st_mtime_ns)
        assert now.st_ctime_ns > before.st_ctime_ns
        os.fchmod(fd, 0o640)
        os.pwrite(fd, b"more bytes", 3)
        os.fsync(fd)
        os.ftruncate(fd, 9)
        now = os.fstat(fd)
        assert (now.st_nlink, now.st_size, stat.S_IMODE(now.st_mode)) == (0, 9, 0o640)
        assert os.pread(fd, 100, 0) == b"bytmore b"
        file.write_bytes(b"new")
        file.rename(other)
        assert os.fstat(replaced).st_nlink == 0
        assert os.pread(replaced, 100, 0) == b"other bytes"
        assert other.stat().st_nlink == 1
    assert other.read_bytes() == b"new"
    here.settle()
    assert here.names() == {"f"}, "a renamed object is not copied in this lake"


def test_a_removed_open_directory_is_empty_and_takes_no_names(here: Place) -> None:
    directory, other = here.path / "d", here.path / "e"
    directory.mkdir()
    other.mkdir()
    with opening(directory) as fd, opening(other) as replaced:
        directory.rmdir()
        directory.mkdir()
        directory.rename(other)
        for each in (fd, replaced):
            inside = Path(f"/proc/self/fd/{each}")
            assert os.fstat(each).st_nlink == 0
            assert os.listdir(each) == []
            assert error_of(opened(inside / "new", os.O_CREAT | os.O_WRONLY)) == "ENOENT"
            assert error_of(lambda inside=inside: os.mkdir(inside / "new")) == "ENOENT"  # type: ignore[misc]
            assert error_of(lambda inside=inside: os.stat(inside / "none")) == "ENOENT"  # type: ignore[misc]
            os.fsync(each)
        assert os.stat(other).st_nlink == 1


class DirectoryStream:
    """What opendir(3) makes of a path."""

    def __init__(self, path: Path) -> None:
        LIBC.opendir.restype = LIBC.readdir.restype = ctypes.c_void_p
        LIBC.readdir.argtypes = LIBC.telldir.argtypes = LIBC.closedir.argtypes = [ctypes.c_void_p]
        LIBC.seekdir.argtypes = [ctypes.c_void_p, ctypes.c_long]
        LIBC.telldir.restype = ctypes.c_long
        self.stream = LIBC.opendir(os.fsencode(path))
        assert self.stream

    def read(self) -> str:
        """The next name; empty at the end."""
        found = LIBC.readdir(self.stream)
        return ctypes.string_at(found + NAME_AT).decode() if found else ""

    def tell(self) -> int:
        return int(LIBC.telldir(self.stream))

    def seek(self, offset: int) -> None:
        LIBC.seekdir(self.stream, offset)

    def close(self) -> None:
        LIBC.closedir(self.stream)


def test_a_listing_gives_each_name_an_offset_of_its_own(here: Place) -> None:
    """``.`` and ``..`` included: who seeks to an offset goes on with the name behind it."""
    for name in ("a", "b", "c"):
        (here.path / name).touch()
    with closing(DirectoryStream(here.path)) as stream:
        names, offsets = [], []
        while name := stream.read():
            names.append(name)
            offsets.append(stream.tell())
        assert (names[:2], sorted(names[2:])) == ([".", ".."], ["a", "b", "c"])
        assert len(set(offsets)) == len(names)
        for following, offset in zip([*names[1:], ""], offsets, strict=True):
            stream.seek(offset)
            assert stream.read() == following
