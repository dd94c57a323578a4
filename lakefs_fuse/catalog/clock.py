"""The hybrid logical clock that names commits: the wall clock corrected by the store's, never behind what was seen.

Always true: `now` grows with every call and is later than every time that `seen` accepted, so what a daemon commits
after it saw a commit sorts after it, whatever the two machines' clocks say. Times too far in the future are not
followed: one machine with a wrong clock must not drag all others along.

Called from one thread. Nothing is kept: a new daemon learns from the commits it reads before it writes any.
"""

from __future__ import annotations

import random
from collections.abc import Callable

FUTURE_NS_MAX = 3600 * 1_000_000_000
"""How far ahead of the corrected wall clock a commit's time is believed."""
DIFFERENCE_NS_MAX = 2 * 1_000_000_000
"""A difference from the store's clock that is left alone, as the store tells it to the second."""
STEP_NS_MAX = 1 << 20
"""How far `now` steps ahead of what it saw where the wall clock is behind."""


class HybridClock:
    """``clock_ns`` is this machine's clock; ``offset_ns`` is added to it. All times in ns since 1970. With ``rng`` two
    machines whose clocks are behind the same commit do not both take the nanosecond after it."""

    def __init__(self, clock_ns: Callable[[], int], offset_ns: int = 0, *, rng: random.Random | None = None) -> None:
        self.offset_ns = offset_ns
        self._rng = rng
        self._clock_ns = clock_ns
        self._last = 0

    def now(self) -> int:
        """A time that is later than all before."""
        step_ns = 1 if self._rng is None else self._rng.randint(1, STEP_NS_MAX)
        self._last = max(self._last + step_ns, self.wall_ns())
        return self._last

    def seen(self, time: int) -> bool:
        """Somebody else's commit has this time: `now` will be later. False where it is too far in the future to be
        followed."""
        if time > self.wall_ns() + FUTURE_NS_MAX:
            return False
        self._last = max(self._last, time)
        return True

    def correct(self, store_time_ns: int, round_trip_ns: int = 0) -> bool:
        """The store just said what time it is, in an answer to a question ``round_trip_ns`` ago. The offset is set
        where the two clocks certainly differ by more than DIFFERENCE_NS_MAX; answers whether it was."""
        local_ns = self._clock_ns() - round_trip_ns // 2
        difference = store_time_ns - local_ns
        if abs(difference - self.offset_ns) <= DIFFERENCE_NS_MAX + round_trip_ns // 2:
            return False
        self.offset_ns = difference if abs(difference) > DIFFERENCE_NS_MAX else 0
        return True

    def wall_ns(self) -> int:
        """The corrected wall clock."""
        return max(0, self._clock_ns() + self.offset_ns)
