"""The local filesystem under a cache directory, as far as a node depends on what it promises: room, names, syncs.

What always holds (*injected disk*): `staging`, `upload` and `vfs` sync, measure room, name temporary files and give up
removed ones through a `Disk` only, so that a modelled disk knows what was not synced (`tests/test_seams.py`).
Plain reads and writes of open descriptors stay with their owners. Methods block, and may be called from any thread.
"""

from __future__ import annotations

import os
import random
import tempfile
from typing import BinaryIO, Protocol, cast

from lakefs_fuse.environment import descriptor_limit
from lakefs_fuse.environment.local_disk import allocated_bytes, free_bytes, start_writeout
from lakefs_fuse.environment.threads import Threads

CLOSE_IN_THREAD_BYTES_MIN = 2 << 20
"""The kernel takes a good part of a second for each GiB of a removed file in the close of its last descriptor; what
holds less is closed at once, in under a millisecond."""
CLOSING_THREADS_MAX = 32
"""Each holds a descriptor. Beyond, files are closed by their owner."""
NAME_BITS = 64


class Disk(Protocol):
    """What a node asks of its local disk."""

    def sync_data(self, fd: int) -> None:
        """The bytes of an open file survive a power cut (fdatasync). Raises OSError."""

    def begin_writeout(self, fd: int, offset: int, length: int) -> None:
        """Writes of the range start now, so that a later sync is short. A hint, never an error."""

    def free_bytes(self, path: str | os.PathLike[str]) -> int:
        """What an ordinary user may still write on the filesystem that holds ``path``. Raises OSError."""

    def temporary_file(self, directory: str | os.PathLike[str]) -> BinaryIO:
        """A file without a name, open for reading and writing, that goes with its last descriptor. Raises OSError."""

    def temporary_name(self, prefix: str) -> str:
        """``prefix`` and a random suffix that no file has."""

    def close_removed(self, fd: int) -> None:
        """Close a file that has no name any more; a large one in a thread. Raises OSError for a bad descriptor."""

    @property
    def is_freeing(self) -> bool:
        """Room of removed files is being given back."""

    @property
    def descriptors_max(self) -> int:
        """How many files one part of the node (block cache, staging) may hold open."""


class LocalDisk:
    """The disk of the machine."""

    def __init__(self, names: random.Random, threads: Threads) -> None:
        self._names = names
        self._threads = threads
        self._closing: set[object] = set()

    def sync_data(self, fd: int) -> None:
        os.fdatasync(fd)

    def begin_writeout(self, fd: int, offset: int, length: int) -> None:
        start_writeout(fd, offset, length)

    def free_bytes(self, path: str | os.PathLike[str]) -> int:
        return free_bytes(path)

    def temporary_file(self, directory: str | os.PathLike[str]) -> BinaryIO:
        return cast("BinaryIO", tempfile.TemporaryFile(dir=directory))

    def temporary_name(self, prefix: str) -> str:
        return f"{prefix}{self._names.getrandbits(NAME_BITS):016x}"

    def close_removed(self, fd: int) -> None:
        if allocated_bytes(fd) < CLOSE_IN_THREAD_BYTES_MIN or len(self._closing) >= CLOSING_THREADS_MAX:
            os.close(fd)
            return
        token = object()  # not the number, which may be another file's right after the close
        self._closing.add(token)
        try:
            self._threads.start(lambda: self._close(fd, token), "close-removed")
        except RuntimeError:  # no more threads
            self._closing.discard(token)
            os.close(fd)

    def _close(self, fd: int, token: object) -> None:
        try:
            os.close(fd)
        finally:
            self._closing.discard(token)

    @property
    def is_freeing(self) -> bool:
        return bool(self._closing)

    @property
    def descriptors_max(self) -> int:
        return descriptor_limit.share()
