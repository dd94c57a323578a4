"""Virtual time for tests of parts that wait: where only timers are left to wait for, time jumps to the next one.

What always holds (*no jump beside threads*): time jumps only while no call runs in a worker thread. Meanwhile it passes
as outside, so that a test can see what happens while a request is under way.

Time jumps for trio and `SystemClock`, and over a thread that sleeps by `sleep` here. `time.sleep` takes as long as it
says, and so does everything outside this process: modules that wait for sockets or processes have the time of the
machine.
"""

from __future__ import annotations

import math
import threading
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
SLEEP_S_MAX = 60.0
"""Real time in which a sleep of a worker thread ends, however long it is."""
DIRECTORIES = frozenset({"admin", "blockcache", "commits", "upload", "vfs"})
"""Directories of tests whose time is virtual. In others, little time is spent waiting for timers."""

_run_sync = trio.to_thread.run_sync


def is_virtual(path: PurePath) -> bool:
    """Whether the tests of a module have virtual time. ``path`` is relative to `tests`."""
    return not DIRECTORIES.isdisjoint(path.parts[:1])


class _Turn:
    """A limiter of threads that says when a call gets its thread: time may jump while it waits for others."""

    def __init__(self, limiter: trio.CapacityLimiter, begin: Callable[[], None]) -> None:
        self._limiter, self._begin = limiter, begin

    async def acquire_on_behalf_of(self, borrower: object) -> None:
        await self._limiter.acquire_on_behalf_of(borrower)
        self._begin()

    def release_on_behalf_of(self, borrower: object) -> None:
        self._limiter.release_on_behalf_of(borrower)


class VirtualTime:
    """The time of one run of trio."""

    def __init__(self) -> None:
        self.clock = MockClock(rate=1.0, autojump_threshold=0.0)
        self._offset_s = time.monotonic() - self.clock.current_time()
        self._calls = set[object]()
        """Those that tasks wait for, and that do not sleep in their threads."""
        self._sleeping = set[object]()
        self._thread = threading.local()

    async def run_sync(self, call: Callable[..., T], *arguments: object, **options: Any) -> T:
        """`trio.to_thread.run_sync`, during which time does not jump."""
        identity, token = object(), trio.lowlevel.current_trio_token()

        def work() -> T:
            self._thread.call = identity, token
            return call(*arguments)

        limiter = options.get("limiter") or trio.to_thread.current_default_thread_limiter()
        options["limiter"] = _Turn(limiter, lambda: self._begin(identity))
        try:
            return await _run_sync(work, **options)
        finally:
            self._end(identity)

    def _begin(self, call: object) -> None:
        self._sleeping.discard(call)
        self._calls.add(call)
        self.clock.autojump_threshold = math.inf

    def _end(self, call: object) -> None:
        self._sleeping.discard(call)
        self._calls.discard(call)
        if not self._calls:
            self.clock.autojump_threshold = 0.0

    def sleep(self, seconds: float) -> None:
        """Block this worker thread, over which time may jump. In trio's thread it does: no task runs meanwhile."""
        if threading.current_thread() is threading.main_thread():
            self.clock.jump(seconds)
            return
        call, token = self._thread.call
        is_over = threading.Event()

        async def wait() -> None:
            if call in self._calls:
                self._end(call)
                self._sleeping.add(call)
            try:
                await trio.sleep(seconds)
            finally:
                if call in self._sleeping:
                    self._begin(call)
                is_over.set()

        def begin() -> None:
            try:
                trio.lowlevel.spawn_system_task(wait)
            except RuntimeError:  # the run is ending, and takes no more tasks
                is_over.set()

        try:
            token.run_sync_soon(begin)
        except trio.RunFinishedError:
            return
        assert is_over.wait(SLEEP_S_MAX), "time stands still"

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
        for clock in (self.mono_s, self.wall_ns, self.boot_ns, sleep):
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


def sleep(seconds: float) -> None:
    """As `SystemClock.sleep`: block this worker thread for so many seconds of the run's time."""
    if _runs and seconds > 0:
        _runs[-1].sleep(seconds)
    else:
        time.sleep(seconds)


def mono_s() -> float:
    """As `SystemClock.mono_s`: seconds of virtual time in a run that has such a time, else those of the machine."""
    return _runs[-1].mono_s() if _runs else time.monotonic()
