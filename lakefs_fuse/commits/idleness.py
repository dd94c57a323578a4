"""Whether a mount gets requests: one that gets none polls for commits once a minute.

What always holds (*nothing stale is left*): a mount becomes idle only when it has had no request for longer than any
answer counts in the kernel or in the C library (the TTL), so that the next question has to reach it; and that question
waits until the mount has polled, but for `POLL_WAIT_S_MAX` at most, should the store be away.

Trio thread only; nothing survives a crash, and nothing is lost by one: a daemon begins busy.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

IDLE_AFTER_S = 600.0
IDLE_REFRESH_S = 60.0
"""Interval of polls of an idle mount: an announcement of a removal is heard of within what `WINDOW_NS` allows."""
POLL_WAIT_S_MAX = 5.0


class Idleness:
    """See the module's head. A mount that nobody `watch`es is never idle."""

    def __init__(self, answers_count_s: float) -> None:
        """``answers_count_s`` is the longest time for which an answer counts."""
        self._after_s = max(IDLE_AFTER_S, answers_count_s)
        self._count: Callable[[], int] | None = None
        self._counted, self._asked_s = 0, 0.0
        self._question, self._polled = trio.Event(), trio.Event()
        self.is_idle = False
        """The next question has to `wake` the mount."""

    def watch(self, count: Callable[[], int]) -> None:
        """Take up watching; ``count`` returns how many questions there have been."""
        self._count, self._counted, self._asked_s = count, count(), trio.current_time()

    def note_question(self) -> None:
        """A request came that is not counted, and need not wait for a poll."""
        self._asked_s = trio.current_time()
        self._question.set()

    async def pause(self, refresh_s: float, hint: Callable[[], Awaitable[None]] = trio.sleep_forever) -> None:
        """Wait until the next poll is due, or a ``hint`` comes; for the poller, which calls `polled` after each. An
        idle mount leaves hints alone."""
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
        """The poller has polled, or tried to."""
        if self._question.is_set():
            self._end()

    async def wake(self) -> None:
        """Wait until an idle mount has polled, because of a request."""
        self.note_question()
        with trio.move_on_after(POLL_WAIT_S_MAX) as scope:
            await self._polled.wait()
        if scope.cancelled_caught:
            self._end()

    def _end(self) -> None:
        self.is_idle = False
        self._polled.set()
        self._polled = trio.Event()
