"""Objects that a young commit names and the store does not have yet: a replica of a bucket may show a commit first.

What always holds: only a read that failed because there is no object waits, for `--retry-timeout` at most, and only on
a read-only mount, as those of replicas are: in another bucket the object was deleted. Trio thread only;
nothing here survives a crash.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from lakefs_fuse.errors import NotFound
from lakefs_fuse.meta.entry import PENDING, Entry
from lakefs_fuse.sync.backoff import Backoff

NS = 1_000_000_000
YOUNG_S = 900.0
"""Amazon S3 promises 15 minutes where replication is paid for by time; an object that is later is taken for lost."""
FIRST_PAUSE_S, PAUSE_S_MAX = 0.2, 5.0


class LateObjects:
    """Decides whether an object is worth waiting for."""

    def __init__(self, clock_ns: Callable[[], int], wait_s_max: float, *, read_only: bool) -> None:
        self._clock_ns, self._wait_s_max, self._is_read_only = clock_ns, wait_s_max, read_only

    def is_expected(self, entry: Entry, error: BaseException) -> bool:
        """Whether a read of this file failed because of an object that may still arrive."""
        if not self._is_read_only or not 0 < entry.stamp < PENDING:
            return False
        if self._clock_ns() - entry.stamp > YOUNG_S * NS:
            return False
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, NotFound):
            cause = cause.__cause__
        return cause is not None

    def wait(self) -> Wait:
        """The pauses of one read."""
        return Wait(self._wait_s_max)


class Wait:
    """Pauses between the attempts of one read."""

    def __init__(self, wait_s_max: float) -> None:
        self._deadline_s = trio.current_time() + wait_s_max
        self._backoff = Backoff(FIRST_PAUSE_S, PAUSE_S_MAX)

    async def pause(self) -> bool:
        """Wait before another attempt; False if there is no time for one."""
        left_s = self._deadline_s - trio.current_time()
        if left_s <= 0:
            return False
        await trio.sleep(min(left_s, self._backoff.next_s()))
        return True
