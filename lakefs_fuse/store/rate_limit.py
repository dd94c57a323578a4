"""The rate limit of uploads: the bytes that all of them together may send in a second. It counts bytes, limited or not.

What always holds (*upload rate*): in any second at most the limit is sent, and a twentieth of it on top. Uploads are
served in the order in which they ask, so they share the limit evenly, and each sends something every second or so,
which keeps its connection alive. An upload that waits checks every `CHECK_S` seconds whether it was cancelled. Bytes
that are sent again count again. One limiter for each daemon, called from its upload threads. Reads are not limited.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import trio

from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.metrics import UploadMetrics
from lakefs_fuse.store.protocol import Body

PIECES_S = 20
"""Pieces that the bytes of a second are cut into."""
PIECE_BYTES_MIN, PIECE_BYTES_MAX = 1 << 10, 1 << 20
CREDIT_S = 0.03
"""How much unused time counts for later pieces: threads do not wake up on time."""
CHECK_S = 0.2
"""A cancelled upload waits no longer than this."""


def raise_if_cancelled() -> None:
    """Raise trio.Cancelled in a worker thread whose task was cancelled; elsewhere do nothing."""
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        return  # Not one of trio's threads.


class RateLimiter:
    """Delays uploads so that together they keep a rate, if there is one. Called from any thread."""

    def __init__(
        self,
        bytes_s_max: int,
        metrics: UploadMetrics,
        clock: Clock,
        check: Callable[[], None] = raise_if_cancelled,
    ) -> None:
        """``bytes_s_max`` 0 is no limit; ``check`` raises what ends a wait early."""
        self.bytes_s_max = metrics.bytes_s_max = bytes_s_max
        limited_bytes = max(PIECE_BYTES_MIN, min(PIECE_BYTES_MAX, bytes_s_max // PIECES_S))
        self.piece_bytes = limited_bytes if bytes_s_max else PIECE_BYTES_MAX
        self.sent_bytes = 0
        """Of the pieces that were let through. Without a limit, bodies in memory are not cut into pieces, and not
        counted."""
        self._metrics = metrics
        self._clock = clock
        self._check = check
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    def wait(self, count: int) -> None:
        """Block until ``count`` more bytes, `piece_bytes` at most, may be sent. Raises what ``check`` raises."""
        if not self.bytes_s_max:
            with self._lock:
                self.sent_bytes += count
            return
        self._check()
        began = self._clock.mono_s()
        with self._lock:
            due = max(self._free_at, began - CREDIT_S)
            self._free_at = due + count / self.bytes_s_max
            self.sent_bytes += count
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
