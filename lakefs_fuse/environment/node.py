"""What one node is given from outside, together: made at the top, handed on part by part."""

from __future__ import annotations

from dataclasses import dataclass

from lakefs_fuse.environment.clock import Clock, SystemClock
from lakefs_fuse.environment.disk import Disk, LocalDisk
from lakefs_fuse.environment.random_streams import RandomStreams
from lakefs_fuse.environment.threads import Threads, WorkerThreads


@dataclass(frozen=True, slots=True)
class Node:
    """Functions that put a filesystem together take it whole; constructors of parts take what they use of it."""

    clock: Clock
    random: RandomStreams
    threads: Threads
    disk: Disk

    @classmethod
    def of_this_machine(cls) -> Node:
        streams, threads = RandomStreams.from_system(), WorkerThreads()
        return cls(SystemClock(), streams, threads, LocalDisk(streams.stream("temporary-names"), threads))
