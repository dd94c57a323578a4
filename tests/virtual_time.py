"""Virtual time for tests of parts that wait: where only timers are left to wait for, time jumps to the next one.

What always holds (*no jump beside threads*): time jumps only while no call runs in a worker thread. Meanwhile it passes
as outside, so that a test can see what happens while a request is under way.

Time jumps for trio and `SystemClock`. `time.sleep` takes as long as it says, and so does everything outside this
process: modules that wait for sockets or processes have the time of the machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import PurePath
from typing import Any, TypeVar

import pytest
import trio
from trio.abc import Clock, Instrument
from trio.testing import MockClock

from lakefs_fuse.environment.clock import SystemClock
from lakefs_fuse.environment.threads import WorkerThreads

T = TypeVar("T")
NS = 1_000_000_000
DIRECTORIES = frozenset({"admin", "blockcache", "commits", "upload", "vfs"})
"""Directories of tests whose time is virtual. In others, little time is spent waiting for timers."""

_run_sync = trio.to_thread.run_sync


def is_virtual(path: PurePath) -> bool:
    """Whether the tests of a module have virtual time. ``path`` is relative to `tests`."""
    return not DIRECTORIES.isdisjoint(path.parts[:1])


class VirtualTime:
    """The time of one run of trio."""

    def __init__(self) -> None:
        self.clock = MockClock(rate=1.0, autojump_threshold=0.0)
        self._offset_s = time.monotonic() - self.clock.current_time()
        self._calls = 0

    async def run_sync(self, call: Callable[..., T], *arguments: object, **options: Any) -> T:
        """`trio.to_thread.run_sync`, during which time does not jump."""
        self._calls += 1
        self.clock.autojump_threshold = math.inf
        try:
            return await _run_sync(call, *arguments, **options)
        finally:
            self._calls -= 1
            if not self._calls:
                self.clock.autojump_threshold = 0.0

    def mono_s(self) -> float:
        return self.clock.current_time() + self._offset_s

    def wall_ns(self) -> int:
        return time.time_ns() + self._jumped_ns()

    def boot_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME) + self._jumped_ns()

    def _jumped_ns(self) -> int:
        """Nanoseconds by which this time is ahead of that of the machine."""
        return int((self.mono_s() - time.monotonic()) * NS)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        """Until ``patch`` is undone, threads hold this time up, and the clocks of the machine follow it."""
        patch.setattr(trio.to_thread, "run_sync", self.run_sync)
        patch.setattr(WorkerThreads, "run", staticmethod(self.run_sync))
        for clock in (self.mono_s, self.wall_ns, self.boot_ns):
            patch.setattr(SystemClock, clock.__name__, staticmethod(clock))


_runs: list[VirtualTime] = []
"""Times of the runs in progress; there is one at most."""


def run_in_virtual_time(
    main: Callable[..., Awaitable[T]],
    *arguments: object,
    clock: Clock | None = None,
    instruments: Sequence[Instrument] = (),
) -> T:
    """`trio.run` in virtual time, unless the test brings a clock of its own."""
    if clock is not None:
        return trio.run(main, *arguments, clock=clock, instruments=instruments)
    virtual = VirtualTime()
    _runs.append(virtual)
    try:
        with pytest.MonkeyPatch.context() as patch:
            virtual.install(patch)
            return trio.run(main, *arguments, clock=virtual.clock, instruments=instruments)
    finally:
        _runs.pop()


def mono_s() -> float:
    """As `SystemClock.mono_s`: seconds of virtual time in a run that has such a time, else those of the machine."""
    return _runs[-1].mono_s() if _runs else time.monotonic()
