"""A limit on what all uploads together send in a second.

Always true: in any second at most the limit is sent, and little more than a twentieth of it on top; nobody is let go
far ahead, so the line is used evenly and not by turns; who asks first sends first, so uploads share the limit, and each
sends something every second or so, which keeps its connection alive. An upload that waits here looks now and then
whether it was cancelled. What is sent again counts again.

One for each daemon, used by its upload threads. Reads never come here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import trio

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.store.protocol import Body

PIECES_S = 20
"""Into so many pieces the bytes of a second are cut."""
PIECE_BYTES_MIN, PIECE_BYTES_MAX = 1 << 10, 1 << 20
CREDIT_S = 0.03
"""So much of what was not sent may be sent later: threads do not wake up on time."""
CHECK_S = 0.2
"""How long a cancelled upload may go on waiting."""


def raise_if_cancelled() -> None:
    """Raises trio.Cancelled in a worker thread whose task was cancelled; elsewhere nothing."""
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        return  # Not one of trio's threads.


class Pace:
    """See the module's head. Any thread."""

    def __init__(
        self,
        bytes_s_max: int,
        metrics: UploadMetrics,
        clock: Clock,
        check: Callable[[], None] = raise_if_cancelled,
    ) -> None:
        """``bytes_s_max`` is at least 1; ``check`` raises what ends a wait early."""
        self.bytes_s_max = metrics.bytes_s_max = bytes_s_max
        self.piece_bytes = max(PIECE_BYTES_MIN, min(PIECE_BYTES_MAX, bytes_s_max // PIECES_S))
        self._metrics = metrics
        self._clock = clock
        self._check = check
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    def wait(self, count: int) -> None:
        """Until ``count`` more bytes may be sent, at most `piece_bytes`."""
        self._check()
        began = self._clock.mono_s()
        with self._lock:
            due = max(self._free_at, began - CREDIT_S)
            self._free_at = due + count / self.bytes_s_max
        now = began
        try:
            while now < due:
                self._clock.sleep(min(due - now, CHECK_S))
                self._check()
                now = self._clock.mono_s()
        finally:
            if now > began:
                with self._lock:
                    self._metrics.throttled_s += now - began

    def pieces(self, body: Body) -> Iterator[bytes]:
        """The body's bytes in order, each piece when it may be sent."""
        size = self.piece_bytes
        if isinstance(body, bytes):
            whole: Iterator[bytes] = (body[at : at + size] for at in range(0, len(body), size))
        else:
            whole = body.pieces(size)
        for piece in whole:
            self.wait(len(piece))
            yield piece
