"""Reads that failed a moment ago because the store was away, so that the kernel's second request fails without a wait.

The kernel reads ahead: after a READ of many pages failed, it asks once more for the first of them, alone. OPEN asks for
the first byte of a file, and READ for more. Each of these would wait for `--retry-timeout` again, in which the program
cannot be killed.

What always holds: a failure answers one request that it covers, within `AGAIN_S_MAX`, so that a program that reads
again asks the store; at most `FAILURES_MAX` are kept. Trio thread only; nothing needs to survive a crash.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import trio

from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.errors import FileError, Unavailable

AGAIN_S_MAX = 1.0
"""The kernel asks again immediately; a busy machine may take a while to schedule it."""
WAITED_S_MIN = 0.25
"""A read that failed sooner costs little to repeat."""
FAILURES_MAX = 1024
"""More than the requests that a kernel has in flight."""


@dataclass(frozen=True, slots=True)
class _Failure:
    version: Version
    start: int
    end: int
    errno: int
    why: str
    at_s: float


class FailedReads:
    """See the module's head."""

    def __init__(self) -> None:
        self._failures: deque[_Failure] = deque(maxlen=FAILURES_MAX)

    def __bool__(self) -> bool:
        return bool(self._failures)

    def add(self, version: Version, start: int, end: int, error: FileError, waited_s: float) -> None:
        """Record that a read of bytes [start, end) failed after this time. It is kept if it waited for a store that is
        away."""
        if waited_s >= WAITED_S_MIN and isinstance(error.__cause__, Unavailable):
            self._keep(version, start, end, error.errno, str(error))

    def raise_again(self, version: Version, start: int, end: int) -> None:
        """Raise FileError if a read that covers the first byte failed a moment ago. If that read was shorter (by OPEN),
        the kernel will repeat this one, too."""
        now_s = trio.current_time()
        while self._failures and now_s - self._failures[0].at_s > AGAIN_S_MAX:
            self._failures.popleft()
        for failure in self._failures:
            if failure.version == version and failure.start <= start < failure.end:
                self._failures.remove(failure)
                if end > failure.end:
                    self._keep(version, start, end, failure.errno, failure.why)
                raise FileError(failure.errno, failure.why) from Unavailable(failure.why)

    def _keep(self, version: Version, start: int, end: int, errno: int, why: str) -> None:
        self._failures.append(_Failure(version, start, end, errno, why, trio.current_time()))
