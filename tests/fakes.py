"""Clocks, threads and randomness that a test owns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import trio

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.environment.disk import LocalDisk
from lakefs_fuse.environment.node import Node
from lakefs_fuse.environment.random_streams import RandomStreams
from lakefs_fuse.environment.threads import WorkerThreads

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


def node_of(clock: Clock, seed: str = "0") -> Node:
    """A node with this clock, real threads and disk, and its own randomness."""
    streams, threads = RandomStreams(seed), WorkerThreads()
    return Node(clock, streams, threads, LocalDisk(streams.stream("temporary-names"), threads))


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
