"""The block cache: verified blocks of object versions on the node's own disk, within a bound.

What always holds:

* a block, or a piece of one, is returned only if its hash matches, so no damage of the files can put wrong bytes into a
  read;
* an error of the cache disk never leaves this module: reads answer "not here", writes do nothing, `statistics` tells;
* the bounds of `cache_directory`: disk space, free space, descriptors, memory; pinned versions are not evicted.

Calls block and are for worker threads, many concurrently; `pin`, `unpin`, the properties, `statistics` and the reads
named "now" are for the trio thread. This class has no lock of its own (see `cache_directory` for the locks).

A crash leaves the files as they are; torn blocks are found by their hashes and fetched again.
"""

from __future__ import annotations

import errno
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from lakefs_fuse.blockcache.cache_directory import CacheDirectory
from lakefs_fuse.blockcache.cache_file import ALIGN_BYTES, CacheFile, Layout, block_hash
from lakefs_fuse.blockcache.health import CacheHealth, CacheState
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, BlockSet, Version
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.disk import Disk
from lakefs_fuse.errors import CacheError
from lakefs_fuse.metrics import CacheMetrics
from lakefs_fuse.store.protocol import Buffer

__all__ = ["BLOCK_BYTES", "BlockCache", "CacheState", "CacheStatistics", "Version", "block_hash"]


T = TypeVar("T")

INDEX_BYTES = 4 * ALIGN_BYTES
"""Space that a write reserves for the header and hashes of a large file."""
WRITES_AT_ONCE = 2
"""Maximum of concurrent writes, each with its reservation, that may reach the bound together."""


def _room(version: Version, blocks: Sequence[Buffer]) -> int:
    """Maximum disk space of adjacent blocks."""
    data = sum(-(-len(block) // ALIGN_BYTES) * ALIGN_BYTES for block in blocks)
    return data + (ALIGN_BYTES if version.blocks == 1 else INDEX_BYTES)


@dataclass(frozen=True, slots=True)
class CacheStatistics:
    """Gauges. ``counted`` is false until `scan` has ended; ``bytes_used`` is then what was counted so far."""

    state: CacheState
    last_error: str | None
    bytes_used: int
    bytes_max: int
    counted: bool
    files_open: int
    versions_pinned: int


class BlockCache:
    """See the module's head."""

    def __init__(
        self,
        directory: str | Path,
        *,
        bytes_max: int,
        free_bytes_min: int,
        metrics: CacheMetrics,
        clock: Clock,
        rng: random.Random,
        disk: Disk,
    ) -> None:
        """Raises CacheError where the directory cannot be made or written."""
        self._health = CacheHealth(clock)
        try:
            self.files = CacheDirectory(
                os.path.abspath(directory),
                bytes_max=bytes_max,
                free_bytes_min=free_bytes_min,
                metrics=metrics,
                clock=clock,
                rng=rng,
                disk=disk,
            )
        except OSError as error:
            raise CacheError(f"cannot use the cache directory {directory}: {error.strerror}") from error
        self.pin, self.unpin = self.files.pin, self.files.unpin

    # -- for the trio thread

    @property
    def state(self) -> CacheState:
        """Health of the cache disk."""
        return self._health.state

    @property
    def counted(self) -> bool:
        """Whether `scan` has ended or is not needed."""
        return self.files.counted

    @property
    def readable(self) -> bool:
        """Whether a read is worth a thread."""
        return self._health.may_read() and not self.files.closed

    def may_have(self, version: Version) -> bool:
        """Whether looking for blocks of a version is worth a thread. False: none is here."""
        return self.readable and self.files.may_have(version)

    @property
    def writable(self) -> bool:
        """Whether a write is worth a thread."""
        return self._health.may_write() and not self.files.closed

    def statistics(self) -> CacheStatistics:
        """Gauges of this moment."""
        files = self.files
        return CacheStatistics(
            state=self._health.state,
            last_error=self._health.last_error,
            bytes_used=files.bytes_used,
            bytes_max=files.bytes_max,
            counted=files.counted,
            files_open=files.files_open,
            versions_pinned=files.versions_pinned,
        )

    # -- blocks

    def read_part(self, version: Version, start: int, end: int) -> memoryview | None:
        """Bytes [start, end), which must exist in the version, verified; None if they are not cached, or can be read
        only by whole blocks."""
        return self._read(partial(self.files.reading, version), lambda file: file.read_part(start, end))

    def read_part_now(self, version: Version, start: int, end: int, *, prompt: bool) -> memoryview | None:
        """As `read_part`, for the trio thread. Raises BlockingIOError if it would have to wait, for another thread or
        for a disk that is not ``prompt``."""
        opened = partial(self.files.reading_now, version, prompt=prompt)
        return self._read(opened, lambda file: file.read_part(start, end, wait=prompt))

    def read_all_now(self, version: Version) -> bytes | None:
        """All bytes of a version of one block, for the trio thread and a prompt disk; None if it is not cached. Raises
        BlockingIOError if it would have to wait for another thread."""

        def read(file: CacheFile) -> bytes | None:
            expected = file.hashes(0, 1)[0]
            return self._read_block(file, 0, expected) if expected else None

        return self._read(partial(self.files.reading_now, version, prompt=True), read)

    def _read(
        self,
        opened: Callable[[], AbstractContextManager[CacheFile | None]],
        read: Callable[[CacheFile], T | None],
    ) -> T | None:
        if not self.readable:
            return None
        try:
            with opened() as file:
                data = None if file is None else read(file)
            self._health.read_worked()
        except BlockingIOError:
            raise
        except OSError as error:
            self._health.failed(error)
            return None
        return data

    def read_blocks(
        self, version: Version, first: int, stop: int, *, parts_to_come: bool = False
    ) -> list[bytes | None]:
        """Blocks [first, stop), which must exist in the version, each verified or None. ``parts_to_come`` prepares the
        blocks for `read_part`."""
        answer: list[bytes | None] = [None] * (stop - first)
        if not self.readable:
            return answer
        try:
            with self.files.reading(version) as file:
                if file is not None:
                    for place, expected in enumerate(file.hashes(first, stop)):
                        if expected:
                            data = answer[place] = self._read_block(file, first + place, expected)
                            if parts_to_come and data is not None:
                                file.write_piece_hashes(first + place, data)
            self._health.read_worked()
        except OSError as error:
            self._health.failed(error)
        return answer

    def _read_block(self, file: CacheFile, index: int, expected: int) -> bytes | None:
        try:
            data, damaged = file.read_block(index, expected)
        except OSError:
            file.forget(index, index + 1)  # writing it again mends a bad sector
            raise
        if damaged:
            self.files.count_damaged()
        return data

    def has_blocks(self, version: Version, first: int, stop: int) -> list[bool]:
        """Whether each of blocks [first, stop) is cached, by the index of the file; nothing is verified."""
        return self._has_blocks(partial(self.files.reading, version), first, stop)

    def has_blocks_now(self, version: Version, first: int, stop: int) -> list[bool]:
        """As `has_blocks`, for the trio thread and a prompt disk. Raises BlockingIOError where it would have to wait
        for another thread."""
        return self._has_blocks(partial(self.files.reading_now, version, prompt=True), first, stop)

    def _has_blocks(
        self, opened: Callable[[], AbstractContextManager[CacheFile | None]], first: int, stop: int
    ) -> list[bool]:
        found = self._read(opened, lambda file: [expected != 0 for expected in file.hashes(first, stop)])
        return [False] * (stop - first) if found is None else found

    def inspect(self, versions: Sequence[Version], *, is_use: bool) -> list[tuple[BlockSet, int]]:
        """As `CacheDirectory.inspect`, of each version; nothing where the disk fails."""
        answer = list[tuple[BlockSet, int]]()
        if self.readable:
            with self._recording_failure():
                for version in versions:
                    answer.append(self.files.inspect(version, is_use=is_use))
        return answer + [(0, 0)] * (len(versions) - len(answer))

    def write_runs(self, runs: Sequence[tuple[Version, int, Sequence[Buffer]]], *, spared_s: float = 0) -> bool:
        """Keep runs of adjacent blocks, each from its first block on, if there is room; an error of the disk ends it.
        With ``spared_s`` no file used in this time is evicted, and none at all if it is infinite: False if only that
        could free space. Raises ValueError if a length is not the block's."""
        if not self.writable:
            return True
        reserved = [_room(version, blocks) for version, _, blocks in runs]
        wanted, left = sum(reserved), sum(reserved)
        try:
            if not self.files.reserve(wanted, spared_s=spared_s):
                if spared_s:
                    return False
                self._health.no_room()
                return True
            try:
                for (version, first, blocks), room in zip(runs, reserved, strict=True):
                    with self.files.writing(version, reserved=room) as file:
                        left -= room
                        for place, data in enumerate(blocks):
                            file.write_block(first + place, data)
            finally:
                self.files.unreserve(left)
            self._health.write_worked()
        except OSError as error:
            self._health.failed(error)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):  # not EFBIG, which more space does not help
                if spared_s == math.inf:
                    return False
                self.evict(wanted)  # a quota, which free space does not show: make room for the next attempt
        return True

    def adopt(self, path: str | Path, version: Version, hashes: Sequence[int]) -> bool:
        """Make a file with the version's bytes (or holes, where ``hashes`` has 0) the version's cache file. ``path`` no
        longer exists when this returns: it was renamed into the cache, or removed if that failed (False). It must be on
        the cache's filesystem, and have no writer. Raises ValueError unless there is one hash a block.
        """
        if len(hashes) != version.blocks:
            raise ValueError(f"{len(hashes)} hashes for {version.blocks} blocks")
        with self._recording_failure():
            if any(hashes) and self.writable:
                self.files.adopt(os.fspath(path), version, hashes)
                return True
        with self._recording_failure(), suppress(FileNotFoundError):
            os.unlink(path)
        return False

    def transfer(self, old: Version, new: Version) -> bool:
        """Make the cached blocks of ``old`` those of ``new``, which has the same bytes; readers of ``old`` continue.
        False if there are none, or the disk fails. Raises ValueError if the sizes differ.
        """
        if old.size != new.size:
            raise ValueError(f"{old.size} and {new.size} bytes are not the same")
        try:
            return self.writable and self.files.transfer(old, new)
        except OSError as error:
            self._health.failed(error)
            return False

    # -- space

    @property
    def capacity_bytes(self) -> int:
        """As `CacheDirectory.capacity_bytes`; 0 where the disk fails."""
        try:
            return self.files.capacity_bytes
        except OSError as error:
            self._health.failed(error)
            return 0

    def has_room(self, versions: Sequence[Version]) -> bool:
        """Whether all blocks of these versions fit without eviction; False until all files are counted."""
        largest = sum(Layout.for_size(version.size).disk_bytes_max for version in versions)
        return self.files.has_room(largest + WRITES_AT_ONCE * INDEX_BYTES)

    def evict(self, wanted: int = 0) -> int:
        """Free as much as the bounds require, and at least ``wanted`` bytes if possible; returns the bytes freed."""
        try:
            return self.files.evict(wanted)
        except OSError as error:
            self._health.failed(error)
            return 0

    def drop(self, versions: Sequence[tuple[Version, BlockSet]]) -> list[int | None]:
        """As `CacheDirectory.drop`, of each version; 0 where the disk fails."""
        answer = list[int | None]()
        with self._recording_failure():
            for version, blocks in versions:
                answer.append(self.files.drop(version, blocks) if self.files.may_have(version) else 0)
        return answer + [0] * (len(versions) - len(answer))

    def scan(self) -> None:
        """Count the space in use, unless the last `close` saved the count. Reads and writes may continue."""
        with self._recording_failure():
            self.files.scan()

    def close(self) -> None:
        """Close files and save the count for the next start. No other call may be running or follow."""
        with self._recording_failure():
            self.files.close()

    @contextmanager
    def _recording_failure(self) -> Iterator[None]:
        """Turn an error of the disk in the block into the cache's health."""
        try:
            yield
        except OSError as error:
            self._health.failed(error)
