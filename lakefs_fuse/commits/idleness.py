"""Detects whether a mount is idle: one that gets no requests polls for commits once a minute.

What always holds (*nothing stale is left*): a mount becomes idle only when it has had no request for longer than any
answer counts in the kernel or in the C library (the TTL), so that the next request has to reach it. That request waits
until the mount has polled, `POLL_WAIT_S_MAX` at most in case the store is away.

Trio thread only. A crash loses nothing: a daemon begins busy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

IDLE_AFTER_S = 600.0
IDLE_REFRESH_S = 60.0
"""Interval of polls of an idle mount: 1,440 requests a day. It hears of a removal long before the object is deleted,
300 s after the commit (`config.DELETE_AFTER_S`) by default."""
POLL_WAIT_S_MAX = 5.0


class Idleness:
    """The idleness of a mount: see the module's head. Before `watch` is called it is never idle."""

    def __init__(self, answers_count_s: float) -> None:
        """``answers_count_s`` is the longest time for which an answer counts."""
        self._after_s = max(IDLE_AFTER_S, answers_count_s)
        self._count: Callable[[], int] | None = None
        self._counted, self._asked_s = 0, 0.0
        self._question, self._polled = trio.Event(), trio.Event()
        self.is_idle = False
        """True if the next request has to `wake` the mount."""

    def watch(self, count: Callable[[], int]) -> None:
        """Begin to watch for requests; ``count`` returns how many there have been."""
        self._count, self._counted, self._asked_s = count, count(), trio.current_time()

    def note_question(self) -> None:
        """Record a request that is not counted, and need not wait for a poll."""
        self._asked_s = trio.current_time()
        self._question.set()

    async def pause(self, refresh_s: float, hint: Callable[[], Awaitable[None]] = trio.sleep_forever) -> None:
        """Wait until the next poll is due, or ``hint`` returns; for the poller, which calls `polled` after each poll.
        An idle mount ignores hints."""
        if self._is_asked():
            with trio.move_on_after(refresh_s):
                await hint()
            return
        self.is_idle, self._question = True, trio.Event()
        with trio.move_on_after(max(IDLE_REFRESH_S, refresh_s)):
            await self._question.wait()

    def _is_asked(self) -> bool:
        if self._count is None:
            return True
        count, now_s = self._count(), trio.current_time()
        if count != self._counted:
            self._counted, self._asked_s = count, now_s
        return now_s - self._asked_s < self._after_s

    def polled(self) -> None:
        """Record that the poller has polled, or tried to."""
        if self._question.is_set():
            self._end()

    async def wake(self) -> None:
        """Have an idle mount poll because of a request, and wait for that, POLL_WAIT_S_MAX at most."""
        self.note_question()
        with trio.move_on_after(POLL_WAIT_S_MAX) as scope:
            await self._polled.wait()
        if scope.cancelled_caught:
            self._end()

    def _end(self) -> None:
        self.is_idle = False
        self._polled.set()
        self._polled = trio.Event()
