"""Clocks, threads and randomness that a test owns."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.environment.clock import Clock, SystemClock
from lakefs_fuse.environment.disk import LocalDisk
from lakefs_fuse.environment.node import Node, RandomStreams
from lakefs_fuse.environment.threads import Threads, WorkerThreads
from lakefs_fuse.meta.database import Database
from lakefs_fuse.metrics import StoreMetrics
from lakefs_fuse.store.client import StoreClient, ThreadTransport, Transport
from lakefs_fuse.store.local.store import LocalStore
from lakefs_fuse.store.protocol import Capabilities, ObjectStore

T = TypeVar("T")
NS = 1_000_000_000


class FakeClock:
    """All three clocks run together; `advance` and `set_wall` are the only things that move them."""

    def __init__(self, wall_ns: int = 1_700_000_000 * NS) -> None:
        self._wall_ns = wall_ns
        self._passed_ns = 0

    def wall_ns(self) -> int:
        return self._wall_ns

    def mono_s(self) -> float:
        return self._passed_ns / NS

    def boot_ns(self) -> int:
        return self._passed_ns

    def advance(self, seconds: float) -> None:
        passed = int(seconds * NS)
        self._wall_ns += passed
        self._passed_ns += passed

    def sleep(self, seconds: float) -> None:
        self.advance(max(seconds, 1 / NS))  # a shorter one must end, too

    def set_wall(self, wall_ns: int) -> None:
        self._wall_ns = wall_ns


@dataclass
class SteeredClock:
    """Clocks that are functions of a test, in nanoseconds."""

    wall_ns: Callable[[], int]
    boot_ns: Callable[[], int]

    def mono_s(self) -> float:
        return self.boot_ns() / NS

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def clock_of(wall_ns: Callable[[], int], boot_ns: Callable[[], int] | None = None) -> Clock:
    """A clock that reads these; the wall clock also as the time since boot where only that is given."""
    return SteeredClock(wall_ns, boot_ns or wall_ns)


class FakeDisk(LocalDisk):
    """The disk of the machine with as much ``room``, and as many descriptors, as the test says."""

    def __init__(
        self,
        *,
        room: int | None = None,
        descriptors_max: int = 4096,
        names: random.Random | None = None,
        threads: Threads | None = None,
    ) -> None:
        super().__init__(names or RandomStreams("disk").stream("temporary-names"), threads or WorkerThreads())
        self.room = room
        self._descriptors_max = descriptors_max

    def free_bytes(self, path: str | os.PathLike[str]) -> int:
        return super().free_bytes(path) if self.room is None else self.room

    @property
    def descriptors_max(self) -> int:
        return self._descriptors_max


def node_of(clock: Clock, seed: str = "0") -> Node:
    """A node with this clock, real threads and disk, and its own randomness."""
    streams, threads = RandomStreams(seed), WorkerThreads()
    return Node(clock, streams, threads, LocalDisk(streams.stream("temporary-names"), threads))


def open_database(directory: Path, identity: str, node: Node | None = None) -> Database:
    """The database of a directory, with the clock and disk of this machine unless a node is given."""
    node = node or Node.of_this_machine()
    return Database(directory, identity, node.clock, node.disk, node.engines)


def store_client(
    store: ObjectStore,
    capabilities: Capabilities,
    metrics: StoreMetrics | None = None,
    *,
    retry_timeout_s: float = 60.0,
    requests_max: int = 32,
    uploads_max: int = 4,
    transport: Transport | None = None,
    clock: Clock | None = None,
    seed: int = 1,
) -> StoreClient:
    """A client with real threads and, unless told otherwise, the clock of the machine."""
    return StoreClient(
        store,
        capabilities,
        metrics or StoreMetrics(),
        transport=transport or ThreadTransport(WorkerThreads(), requests_max=requests_max, uploads_max=uploads_max),
        clock=clock or SystemClock(),
        rng=random.Random(seed),
        retry_timeout_s=retry_timeout_s,
    )


def local_store(root: str, clock: Clock | None = None) -> LocalStore:
    """A store directory, with names that no other one gives."""
    return LocalStore(root, RandomStreams.from_system().stream("local-store"), clock or SystemClock())


class InlineThreads:
    """`Threads` without threads: every call runs where it is made, after one checkpoint."""

    async def run(
        self,
        call: Callable[..., T],
        *arguments: object,
        limiter: trio.CapacityLimiter | None = None,
        abandon_on_cancel: bool = False,
    ) -> T:
        await trio.lowlevel.checkpoint()
        if limiter is None:
            return call(*arguments)
        async with limiter:
            return call(*arguments)

    def start(self, call: Callable[[], None], name: str) -> None:
        call()


async def delete_all_due(deletions: DeletionQueue) -> None:
    """Delete every object whose time has come. Raises LakeError."""

    async def catch_up(_: float) -> None:
        """Commits are polled by tests themselves."""

    while await deletions.delete_due(catch_up):
        pass
