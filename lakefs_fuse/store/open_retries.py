"""Retries of blocking calls while a store is opened, probed and its lake record read.

Called from one thread, before anything is served; after that `client.StoreClient` retries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import Unavailable
from lakefs_fuse.sync.backoff import Backoff

TRIES_MAX = 4
PAUSE_S_FIRST, PAUSE_S_MAX = 0.1, 1.0

T = TypeVar("T")


def retry_unavailable(call: Callable[[], T], clock: Clock, *, tries_s_max: float = math.inf) -> T:
    """The call's answer, or its last error after `TRIES_MAX` tries; after ``tries_s_max`` none is begun."""
    backoff, began_s = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX), clock.mono_s()
    for _ in range(TRIES_MAX - 1):
        try:
            return call()
        except Unavailable:
            if clock.mono_s() - began_s >= tries_s_max:
                raise
            clock.sleep(backoff.next_s())
    return call()
