"""Slots for uploads, shared by all files being written, and the proof that they are never idle while a part waits.

A part is announced (`ready`) the moment it is complete, and takes a slot in the order of announcement. `UploadMetrics`
adds up the time in which a part was announced and not started although a slot was free.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from lakefs_fuse.metrics import UploadMetrics


class UploadSlots:
    """At most ``slots`` uploads at once, first come first served. Trio thread only."""

    def __init__(self, slots: int, metrics: UploadMetrics) -> None:
        self._limiter = trio.CapacityLimiter(slots)
        self.slots = slots
        self._metrics = metrics
        self._ready = 0
        self._busy = 0
        self._since = 0.0

    @property
    def active(self) -> int:
        """Uploads announced or running."""
        return self._ready + self._busy

    def _account(self) -> None:
        now = trio.current_time()
        if self._ready and self._busy < self.slots:
            self._metrics.idle_with_work_s += now - self._since
        self._since = now

    def ready(self) -> None:
        """Something to upload is complete. A `slot` block must follow, or `withdraw`."""
        self._account()
        self._ready += 1

    def withdraw(self) -> None:
        """What was announced is not to be uploaded any more."""
        self._account()
        self._ready -= 1

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Hold a slot; waits for one in the order of calls."""
        token = object()
        try:
            await self._limiter.acquire_on_behalf_of(token)
        except BaseException:
            self.withdraw()
            raise
        self._account()
        self._ready -= 1
        self._busy += 1
        try:
            yield
        finally:
            self._account()
            self._busy -= 1
            self._limiter.release_on_behalf_of(token)
