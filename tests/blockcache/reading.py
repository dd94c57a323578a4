"""What the tests of the read side share: an object store in memory that counts, and versions of it."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio

from lakefs_fuse.blockcache.async_cache import AsyncBlockCache
from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Version
from lakefs_fuse.environment.clock import Clock, SystemClock
from lakefs_fuse.environment.disk import Disk
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.errors import LakeError, NotFound, PreconditionFailed
from lakefs_fuse.metrics import CacheMetrics
from lakefs_fuse.store.protocol import Buffer, Fetched, ObjectMeta
from tests.fakes import FakeDisk

MIB = 1 << 20
CACHES_MADE: list[BlockCache] = []
"""Closed when the test is over: each may hold hundreds of descriptors."""


def content(seed: object, size: int) -> bytes:
    """Bytes that differ from block to block and from seed to seed."""
    return hashlib.shake_128(repr(seed).encode()).digest(size)


def block_of(data: bytes, index: int) -> bytes:
    return data[index * BLOCK_BYTES : (index + 1) * BLOCK_BYTES]


def read_block(cache: BlockCache, version: Version, index: int) -> bytes | None:
    return cache.read_blocks(version, index, index + 1)[0]


def write_blocks(cache: BlockCache, version: Version, first: int, blocks: Sequence[Buffer]) -> None:
    cache.write_runs([(version, first, blocks)])


def write_block(cache: BlockCache, version: Version, index: int, data: Buffer) -> None:
    write_blocks(cache, version, index, [data])


@dataclass
class MemoryStore:
    """The `get` of a store client. ``gate``, where set, is waited for by every GET before it answers."""

    objects: dict[str, bytes] = field(default_factory=dict)
    gets: list[tuple[str, int, int]] = field(default_factory=list)
    fail_with: LakeError | Exception | None = None
    gate: trio.Event | None = None
    started: trio.Event = field(default_factory=trio.Event)
    ignores_etag: bool = False
    metadata: Mapping[str, str] | None = None
    bytes_in_answer_max: int = 0

    def put(self, key: str, data: bytes) -> Version:
        self.objects[key] = data
        return self.version(key)

    def version(self, key: str) -> Version:
        data = self.objects[key]
        return Version(key, hashlib.md5(data).hexdigest(), len(data))

    async def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        self.gets.append((key, start, end))
        self.started.set()
        if self.gate is not None:
            await self.gate.wait()
        else:
            await trio.lowlevel.checkpoint()
        if self.fail_with is not None:
            raise self.fail_with
        if key not in self.objects:
            raise NotFound(f"no object {key}")
        version = self.version(key)
        if etag is not None and etag != version.etag and not self.ignores_etag:
            raise PreconditionFailed(f"{key} is another version")
        data = self.objects[key][start:end]
        self.bytes_in_answer_max = max(self.bytes_in_answer_max, len(data))
        return Fetched(data, ObjectMeta(key, version.size, version.etag, 0, self.metadata))


def make_cache(
    directory: Path,
    metrics: CacheMetrics | None = None,
    bytes_max: int = 1 << 30,
    scanned: bool = True,
    *,
    free_bytes_min: int = 0,
    clock: Clock | None = None,
    seed: int = 0,
    disk: Disk | None = None,
) -> BlockCache:
    cache = BlockCache(
        directory, bytes_max=bytes_max, free_bytes_min=free_bytes_min, metrics=metrics or CacheMetrics(),
        clock=clock or SystemClock(), rng=random.Random(seed), disk=disk or FakeDisk(),
    )  # fmt: skip
    CACHES_MADE.append(cache)
    if scanned:
        cache.scan()
    return cache


def for_tasks(cache: BlockCache, nursery: trio.Nursery) -> AsyncBlockCache:
    return AsyncBlockCache(cache, nursery, WorkerThreads(), SystemClock())


def cache_files(directory: Path) -> list[Path]:
    """Files of cached versions; what is deleted meanwhile may be among them or not."""
    return sorted(Path(top, name) for top, _, names in os.walk(directory) if len(Path(top).name) == 3 for name in names)


def reads_now(directory: Path) -> None:
    """Skips the test where the filesystem cannot tell whether it would have to wait."""
    path = directory / "now"
    path.write_bytes(b"x")
    try:
        with path.open("rb") as file:
            os.preadv(file.fileno(), [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError as error:
        pytest.skip(f"{directory} is on a filesystem that does not read without waiting: {error.strerror}")
    finally:
        path.unlink()
