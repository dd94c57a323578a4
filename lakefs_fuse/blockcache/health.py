"""Health of the cache disk, whose failures slow reads down but never fail one.

    state     from → to                                     what the cache does in it
    OK        a write finds no room → FULL; an error → FAILED    everything
    FULL      a write works → OK; an error → FAILED              reads; writes are tried again every second
    FAILED    any operation works → OK; no room → FULL           nothing; one operation is tried every 30 seconds

Called from any worker thread. There is no lock: a lost race costs one attempt more on a bad disk. Lost in a crash.
"""

from __future__ import annotations

import enum
import errno
import logging

from lakefs_fuse.environment.clock import Clock

_log = logging.getLogger(__name__)

FULL_RETRY_S = 1.0
FAILED_RETRY_S = 30.0
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CacheState(enum.Enum):
    """As shown in the statistics."""

    OK = "ok"
    FULL = "full"
    FAILED = "failed"


class CacheHealth:
    """See the module's head."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._retry_at_s = 0.0
        self.state = CacheState.OK
        self.last_error: str | None = None

    def may_read(self) -> bool:
        """Whether to try now."""
        return self.state is not CacheState.FAILED or self._retry_due()

    def may_write(self) -> bool:
        """Whether to try now."""
        return self.state is CacheState.OK or self._retry_due()

    def read_worked(self) -> None:
        """A read was answered (with bytes or with their absence)."""
        if self.state is CacheState.FAILED:
            self._become(CacheState.OK, None)

    def write_worked(self) -> None:
        """A write was done."""
        if self.state is not CacheState.OK:
            self._become(CacheState.OK, None)

    def no_room(self) -> None:
        """A write found no room, and nothing more can be evicted."""
        self._become(CacheState.FULL, "nothing more to evict")

    def failed(self, error: OSError) -> None:
        """An operation on the cache disk failed."""
        state = CacheState.FULL if error.errno in _NO_ROOM else CacheState.FAILED
        self._become(state, error.strerror or str(error))

    def _retry_due(self) -> bool:
        return self._clock.mono_s() >= self._retry_at_s

    def _become(self, state: CacheState, why: str | None) -> None:
        if state is CacheState.FULL:
            self._retry_at_s = self._clock.mono_s() + FULL_RETRY_S
        elif state is CacheState.FAILED:
            self._retry_at_s = self._clock.mono_s() + FAILED_RETRY_S
        if why is not None:
            self.last_error = why
        if state is self.state:
            return
        self.state = state
        if state is CacheState.FAILED:
            _log.warning("block cache failed (%s): reading from the store without it", why)
        else:
            _log.info("block cache is %s%s", state.value, f" ({why})" if why else "")
