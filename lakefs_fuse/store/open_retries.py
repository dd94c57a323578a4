"""Trying a blocking call again while the store is unavailable: for opening and probing, before the client runs.

Called from one thread, before serving; everything after that retries in `client.StoreClient`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lakefs_fuse.errors import Unavailable

TRIES_MAX = 4
PAUSE_S = 0.1
"""Before the second try; doubled for each further one."""

T = TypeVar("T")


def patiently(call: Callable[[], T], sleep: Callable[[float], None]) -> T:
    """The call's answer, or its last error after `TRIES_MAX` tries."""
    pause_s = PAUSE_S
    for _ in range(TRIES_MAX - 1):
        try:
            return call()
        except Unavailable:
            sleep(pause_s)
            pause_s *= 2
    return call()
