"""A node's sources of time, randomness and threads, its disk and storage engines, made at the top and handed on.

What always holds (*injected randomness*): no module below `daemon` uses a generator that does not come from a
`RandomStreams` or a constructor (`tests/test_seams.py`). A stream depends on seed, node, purpose, key and attempt only,
so that drawing from one never shifts another. Callable from any thread; a stream belongs to one caller at a time.
"""

from __future__ import annotations

import random
import secrets
from dataclasses import dataclass

from lakefs_fuse.environment.clock import Clock, SystemClock
from lakefs_fuse.environment.disk import Disk, LocalDisk
from lakefs_fuse.environment.storage_engine import Engines
from lakefs_fuse.environment.threads import Threads, WorkerThreads

SEED_BITS = 256
"""As good as asking the kernel for each number, and a system call less."""


class RandomStreams:
    """Makes generators; all state is in the generators."""

    def __init__(self, seed: int | str, node: str = "") -> None:
        self._prefix = f"{seed}/{node}"

    @classmethod
    def from_system(cls) -> RandomStreams:
        """Unpredictable streams."""
        return cls(secrets.randbits(SEED_BITS))

    def stream(self, purpose: str, key: str = "", attempt: int = 0) -> random.Random:
        """The generator of one purpose (``draft-ids``, ``backoff`` …); the same arguments give the same numbers."""
        return random.Random(f"{self._prefix}/{purpose}/{key}/{attempt}")  # a str seeds by SHA-512, not by hash()


@dataclass(frozen=True, slots=True)
class Node:
    """Functions that put a filesystem together take it whole; constructors of parts take what they use of it."""

    clock: Clock
    random: RandomStreams
    threads: Threads
    disk: Disk
    engines: Engines | None = None
    """None: RocksDB, which only `meta` knows."""

    @classmethod
    def of_this_machine(cls) -> Node:
        streams, threads = RandomStreams.from_system(), WorkerThreads()
        return cls(SystemClock(), streams, threads, LocalDisk(streams.stream("temporary-names"), threads))
