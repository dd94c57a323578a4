"""The clocks of a node, given to constructors so that tests and simulations own the time.

What always holds (*injected time*): no module below `daemon` reads a clock but through a `Clock`
(`tests/test_seams.py`). All methods may be called from any thread.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Time of day, time for timeouts, and time since boot, which cannot be set."""

    def wall_ns(self) -> int:
        """Time of day in nanoseconds since 1970; an administrator or NTP may set it at any moment."""

    def mono_s(self) -> float:
        """Seconds since an arbitrary moment; never goes back, stands still while the machine is suspended."""

    def boot_ns(self) -> int:
        """Nanoseconds since the machine was started, suspension included (CLOCK_BOOTTIME); never set."""

    def sleep(self, seconds: float) -> None:
        """Block this worker thread; tasks use `trio.sleep`."""


class SystemClock:
    """The clocks of the machine."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def mono_s(self) -> float:
        return time.monotonic()

    def boot_ns(self) -> int:
        return time.clock_gettime_ns(time.CLOCK_BOOTTIME)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)
