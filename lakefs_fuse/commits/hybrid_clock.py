"""The hybrid logical clock that dates commits: the store's time, continued by a clock that cannot be set.

What always holds:

* monotonic: `now` grows with every call, and is later than every time that `follow` accepted. So what a daemon commits
  after it saw a commit sorts after it. The one exception: if the store's clock is found to be far behind, `now` goes
  back to it (`went_back`);
* bounded: `now` is never more than COMMIT_AHEAD_MAX_S ahead of the store's time as it is known here;
* a jump of this machine's wall clock does not move `now`: between two answers of the store the time since boot counts.
  A different time of the store counts once the store has told it twice, CONFIRM_S apart: the clock of a local directory
  is the wall clock, and jumps with it.

Called from one thread. Nothing is stored: a new daemon follows the commits that it reads before it writes any.
"""

from __future__ import annotations

import logging
import random

from lakefs_fuse.environment.clock import Clock

NS = 1_000_000_000
COMMIT_AHEAD_MAX_S = 60
"""How far ahead of the store's time a commit is accepted, and written. Half of the window in which polls look for
commits (WINDOW_NS): a clock that followed one from farther ahead would hide others' commits from every poll."""
AHEAD_NS_MAX = COMMIT_AHEAD_MAX_S * NS
WINDOW_NS = 120_000_000_000
"""Polls look for commits whose time is no more than this behind the newest one seen. Half of it is for clocks that
differ after correction; if a PUT takes the other half, its writer repeats the commit under a new time."""
LATE_NS = WINDOW_NS // 2
"""A commit that was stored this long after its time is repeated by another one, because polls may be past it."""
DIFFERENCE_NS_MAX = 2 * NS
"""A difference from the store's clock up to this is ignored, because stores tell the time to the second. A wall clock
that moves by more against the time since boot has jumped."""
CONFIRM_S = 60
"""A different time of the store counts if a second answer, this much later, agrees."""
STEP_NS_MAX = 1 << 20
"""Maximum step of `now` beyond the latest time that it gave or saw, if the store's time is behind."""
log = logging.getLogger(__name__)


class HybridClock:
    """Gives times to commits: see the module's head. All times are in ns since 1970.

    ``clock`` has the wall clock and the time since boot of this machine. With ``rng`` two machines whose clocks are
    behind the same commit do not both choose the nanosecond after it."""

    def __init__(self, clock: Clock, *, rng: random.Random | None = None) -> None:
        self._clock, self._rng = clock, rng
        self._base_ns = clock.wall_ns() - clock.boot_ns()
        self._last = 0
        self._has_store_time = False
        self._unconfirmed: tuple[int, int] | None = None
        """A difference from the store's clock that a second answer has to confirm, and when it was measured."""
        self.offset_ns = 0
        """The store's time less this machine's wall clock; 0 where they agree."""
        self.jumps = 0
        """How often the wall clock was found to have jumped."""
        self.went_back = False
        """True if earlier times are farther ahead than that of any commit may be, until `confirm_redated`."""

    def now(self) -> int:
        """Return a time that is later than all before, but for the exception in the module's head."""
        self._notice_jump()
        step_ns = 1 if self._rng is None else self._rng.randint(1, STEP_NS_MAX)
        wall_ns = self.wall_ns()
        self._go_back_to(wall_ns)
        self._last = max(self._last + step_ns, wall_ns)
        return self._last

    def reached(self) -> int:
        """Return a time that no commit exceeds which this node has made or followed, unless the clock went back."""
        return max(self._last, self.wall_ns())

    def follow(self, time: int) -> bool:
        """Make `now` later than another node's commit of this time; returns False if that is too far ahead."""
        if time > self.ahead_ns():
            return False
        self._last = max(self._last, time)
        return True

    @property
    def is_confirmed(self) -> bool:
        """True if no difference from the store's clock waits for confirmation."""
        return self._unconfirmed is None

    def correct(self, store_time_ns: int, round_trip_ns: int = 0) -> bool:
        """Correct the clock by the time that the store just told, in answer to a request ``round_trip_ns`` ago.

        The clock follows if the two certainly differ by more than DIFFERENCE_NS_MAX, and did so CONFIRM_S ago as well
        (the first answer counts at once). Returns whether the clock was changed."""
        self._notice_jump()
        steady_ns = self._clock.boot_ns()
        difference = store_time_ns - (steady_ns + self._base_ns - round_trip_ns // 2)
        tolerated = DIFFERENCE_NS_MAX + round_trip_ns // 2
        is_first, self._has_store_time = not self._has_store_time, True
        if abs(difference - self.offset_ns) <= tolerated:
            self._unconfirmed = None
            return False
        if not is_first:
            if self._unconfirmed is None or abs(difference - self._unconfirmed[0]) > tolerated:
                self._unconfirmed = difference, steady_ns
                return False
            if steady_ns - self._unconfirmed[1] < CONFIRM_S * NS:
                return False
        self._unconfirmed = None
        before_ns = self.offset_ns
        self.offset_ns = difference if abs(difference) > DIFFERENCE_NS_MAX else 0
        log.warning(
            "commits are dated by the store's clock, %+.0f s from this machine's (%+.0f s before)",
            self.offset_ns / NS, before_ns / NS,
        )  # fmt: skip
        self._go_back_to(self.wall_ns())
        return True

    def confirm_redated(self) -> None:
        """Record that what was dated too far ahead has other dates now."""
        self.went_back = False

    def wall_ns(self) -> int:
        """Return the store's time, as far as it is known here."""
        return max(0, self._clock.boot_ns() + self._base_ns + self.offset_ns)

    def machine_ns(self) -> int:
        """Return this machine's wall clock, jumps included."""
        return self._clock.wall_ns()

    def ahead_ns(self) -> int:
        """Return the latest time that a commit may have now."""
        return self.wall_ns() + AHEAD_NS_MAX

    def _go_back_to(self, wall_ns: int) -> None:
        if self._last > wall_ns + AHEAD_NS_MAX:
            self._last, self.went_back = wall_ns, True

    def _notice_jump(self) -> None:
        """If the wall clock has jumped, change the offset with it, so that the store's time stays."""
        jump_ns = self._clock.wall_ns() - self._clock.boot_ns() - self._base_ns
        if abs(jump_ns) <= DIFFERENCE_NS_MAX:
            return
        self.jumps += 1
        self._base_ns += jump_ns
        self.offset_ns -= jump_ns
        if self._unconfirmed is not None:
            self._unconfirmed = self._unconfirmed[0] - jump_ns, self._unconfirmed[1]
        if abs(self.offset_ns) <= DIFFERENCE_NS_MAX:
            self._base_ns, self.offset_ns = self._base_ns + self.offset_ns, 0
        log.warning("this machine's clock jumped by %+.0f s: commits go on being dated without it", jump_ns / NS)
