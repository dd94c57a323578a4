"""The recent latency of the cache disk, which decides whether a call is worth a worker thread.

Handing a call to a thread and getting the answer back takes about a millisecond of CPU, because each of the two threads
must be woken and acquire the interpreter. So small reads are made on the trio thread while they take at most twice that
time on average, as RocksDB's reads of the same disk are; after a slow read, threads read from the disk for a while. The
same holds for small syncs, which may take somewhat longer. Trio thread only.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.sync.backoff import Backoff

PROMPT_S = 0.002
"""Mean latency of about `WEIGHT` calls up to which the disk is prompt."""
WEIGHT = 16
SLOW_S = 0.1
"""A single call of this length makes the disk slow."""
PAUSE_S_FIRST, PAUSE_S_MAX = 0.25, 5.0
"""Pause before a slow disk is tried again: doubles each time, until `WEIGHT` calls in turn were prompt."""


class Promptness:
    """See the module's head."""

    def __init__(self, clock: Clock, prompt_s: float = PROMPT_S) -> None:
        self._clock, self._prompt_s = clock, prompt_s
        self._average_s = 0.0
        self._slow_until_s = 0.0
        self._backoff = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX)
        self._in_turn = 0

    @property
    def is_prompt(self) -> bool:
        """Whether to call without a thread."""
        return self._clock.mono_s() >= self._slow_until_s

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Time the block, which is one read or sync that may wait for the disk."""
        began_s = self._clock.mono_s()
        try:
            yield
        finally:
            ended_s = self._clock.mono_s()
            self._took(ended_s - began_s, ended_s)

    def _took(self, took_s: float, ended_s: float) -> None:
        self._average_s += (took_s - self._average_s) / WEIGHT
        self._in_turn += 1
        if took_s > SLOW_S or self._average_s > self._prompt_s:
            self._slow_until_s = ended_s + self._backoff.next_s()
            self._average_s, self._in_turn = 0.0, 0
        elif self._in_turn >= WEIGHT:
            self._backoff.reset()
