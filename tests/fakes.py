"""Clocks, threads and randomness that a test owns."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import trio

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.disk import LocalDisk
from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.random_streams import RandomStreams
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.meta.database import Database

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

    def set_wall(self, wall_ns: int) -> None:
        self._wall_ns = wall_ns


@dataclass
class SteeredClock:
    """Clocks that are functions of a test, in nanoseconds."""

    wall_ns: Callable[[], int]
    boot_ns: Callable[[], int]

    def mono_s(self) -> float:
        return self.boot_ns() / NS


def clock_of(wall_ns: Callable[[], int], boot_ns: Callable[[], int] | None = None) -> Clock:
    """A clock that reads these; the wall clock also as the time since boot where only that is given."""
    return SteeredClock(wall_ns, boot_ns or wall_ns)


class FakeDisk(LocalDisk):
    """The disk of the machine with as much ``room``, and as many descriptors, as the test says."""

    def __init__(self, *, room: int | None = None, descriptors_max: int = 4096) -> None:
        super().__init__(RandomStreams("disk").stream("temporary-names"), WorkerThreads())
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
    return Database(directory, identity, node.clock, node.disk)


class InlineThreads:
    """`Threads` without threads: every call runs where it is made, after one checkpoint."""

    async def run(
        self,
        call: Callable[..., T],
        *arguments: object,
        limiter: trio.CapacityLimiter | None = None,
        abandon: bool = False,
    ) -> T:
        await trio.lowlevel.checkpoint()
        if limiter is None:
            return call(*arguments)
        async with limiter:
            return call(*arguments)

    def start(self, call: Callable[[], None], name: str) -> None:
        call()
