"""A local disk that knows what was synced, and the cache directory that a power cut or the death of a node leaves.

What always holds (*synced bytes*): a file has after a power cut the bytes it had at its last sync, but for pages that
were written since, any of which may have arrived. Names and sizes likewise: a file that was never synced may be
missing, one that was removed may be back. Files lie in a real directory, best on a memory filesystem; one thread.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tests.fakes import FakeDisk, InlineThreads

PAGE_BYTES = 4096
FORGETFUL = ("staging", "blocks")
"""Directories of a cache directory whose files lose what was not synced. Databases have their own models."""
REMOVED_MAX = 64
"""Removed files that may be back; by then the filesystem has committed the removal of older ones."""
COPIES_MAX = 100
"""Attempts to copy a directory that changes meanwhile."""
SHARES = (0.0, 0.5, 1.0)
"""Of what was not synced, how much may arrive: nothing and everything are the states of most interest."""


NO_INODE, REMOVED_INODE = -1, 0
"""Of a path without a file, and of a file that was removed from the directory of which this one is a copy."""


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as the disk has it."""

    data: bytes
    mode: int
    mtime_ns: int
    xattrs: tuple[tuple[str, bytes], ...]
    inode: int

    @classmethod
    def of(cls, path: str | Path) -> FileState:
        """Raises OSError."""
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            return cls(file.read(), found.st_mode & 0o7777, found.st_mtime_ns, _xattrs(file.fileno()), found.st_ino)

    def write(self, path: Path) -> None:
        """A new file of this state."""
        path.write_bytes(self.data)
        for name, value in self.xattrs:
            os.setxattr(path, name, value)
        os.chmod(path, self.mode)
        os.utime(path, ns=(self.mtime_ns, self.mtime_ns))


def _xattrs(fd: int) -> tuple[tuple[str, bytes], ...]:
    try:
        return tuple((name, os.getxattr(fd, name)) for name in os.listxattr(fd) if name.startswith("user."))
    except OSError:  # a filesystem without attributes
        return ()


class ForgetfulDisk(FakeDisk):
    """The disk of one node through all its lives: a copy of the cache directory is a life's beginning."""

    def __init__(self, names: random.Random, *, room: int | None = None, descriptors_max: int = 4096) -> None:
        super().__init__(room=room, descriptors_max=descriptors_max, names=names, threads=InlineThreads())
        self._synced: dict[str, FileState] = {}
        """By path, the file synced last at the end."""
        self._prune_at = REMOVED_MAX

    def sync_data(self, fd: int) -> None:
        """Remember the file as it is; the machine's own disk needs no sync."""
        path = os.readlink(f"/proc/self/fd/{fd}")
        with suppress(FileNotFoundError):  # it has no name any more, so it goes with the node
            if os.fstat(fd).st_ino == os.stat(path).st_ino:
                self._synced.pop(path, None)
                self._synced[path] = FileState.of(path)
        if len(self._synced) > self._prune_at:
            removed = [path for path in self._synced if not os.path.exists(path)]
            for path in removed[:-REMOVED_MAX]:
                del self._synced[path]
            self._prune_at = 2 * len(self._synced) + REMOVED_MAX

    def begin_writeout(self, fd: int, offset: int, length: int) -> None:
        """A hint, so nothing is synced."""

    def copy_after_kill(self, source: Path, target: Path) -> None:
        """Copy a cache directory as the death of the process leaves it; what was not synced still is not."""
        copy_after_kill(source, target)
        for path, state in list(self._synced.items()):
            if Path(path).is_relative_to(source):
                copied = str(target / Path(path).relative_to(source))
                is_there = _inode(path) == state.inode
                self._synced[copied] = replace(state, inode=_inode(copied) if is_there else REMOVED_INODE)

    def copy_after_power_cut(self, source: Path, target: Path, rng: random.Random) -> None:
        """Copy a cache directory as a power cut leaves it. All that is in the copy is durable."""
        shutil.copytree(source, target, ignore=lambda path, _: FORGETFUL if path == str(source) else ())
        for name in FORGETFUL:
            if (source / name).exists():
                self._copy_forgetting(source / name, target / name, rng)
            for path in _files(target / name):
                self._synced[str(path)] = FileState.of(path)

    def _copy_forgetting(self, source: Path, target: Path, rng: random.Random) -> None:
        shutil.copytree(source, target, ignore=_files_among)
        survivors: dict[Path, FileState] = {}
        share = rng.choice(SHARES)
        for path, state in sorted(self._synced.items()):
            if Path(path).is_relative_to(source) and _inode(path) != state.inode and rng.random() < share:
                survivors[Path(path)] = state
        for file in _files(source):
            now, synced = FileState.of(file), self._synced.get(str(file))
            if synced is not None and synced.inode != now.inode:
                synced = None
            survivor = survive(now, synced, rng)
            if survivor is not None:
                survivors[file] = survivor
        for file, state in survivors.items():
            copied = target / file.relative_to(source)
            copied.parent.mkdir(parents=True, exist_ok=True)
            state.write(copied)


def survive(now: FileState, synced: FileState | None, rng: random.Random) -> FileState | None:
    """What a power cut leaves of a file; None where it is missing."""
    if synced is None and rng.random() < 1 / 4:
        return None
    was = b"" if synced is None else synced.data
    described = now if synced is None else rng.choice((now, synced))
    if was == now.data:
        return described
    smaller, larger = sorted((len(was), len(now.data)))
    size = rng.choice((len(was), len(now.data), rng.randint(smaller, larger)))
    share = rng.choice(SHARES)
    left = bytearray(was[:size].ljust(size, b"\0"))
    for start in range(0, size, PAGE_BYTES):
        end = min(start + PAGE_BYTES, size)
        page = now.data[start:end].ljust(end - start, b"\0")
        if page != left[start:end] and rng.random() < share:
            left[start:end] = page
    return replace(described, data=bytes(left))


def copy_after_kill(source: Path, target: Path) -> None:
    """Copy a directory exactly while the node, dead or alive, still has it open.

    The files of a RocksDB database belong together: the copy is made again until none changed meanwhile. ``LOCK`` is
    left out: to close a descriptor of it would release the lock of this process.
    """
    for _ in range(COPIES_MAX):
        before = _signature(source)
        with suppress(shutil.Error, FileNotFoundError):  # files were removed meanwhile
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("LOCK"))
            if before == _signature(source):
                return
        shutil.rmtree(target, ignore_errors=True)
    raise TimeoutError(f"{source} changed during each of {COPIES_MAX} copies")


def _signature(directory: Path) -> list[tuple[str, int, int, int]]:
    found = []
    for path in _files(directory):
        with suppress(FileNotFoundError):
            stat = path.stat()
            if not path.name.startswith("LOG"):  # RocksDB's report, which any of its threads writes
                found.append((str(path), stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return found


def _inode(path: str) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return NO_INODE


def _files_among(directory: str, names: Sequence[str]) -> list[str]:
    return [name for name in names if not os.path.isdir(os.path.join(directory, name))]


def _files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
