"""The clock that names commits."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.catalog.clock import DIFFERENCE_NS_MAX, FUTURE_NS_MAX, STEP_NS_MAX, HybridClock

S = 1_000_000_000
START = 1_700_000_000 * S


class Wall:
    """A clock that tests set."""

    def __init__(self) -> None:
        self.ns = START

    def __call__(self) -> int:
        return self.ns


def test_it_is_the_wall_clock_where_that_goes_on() -> None:
    wall = Wall()
    clock = HybridClock(wall)
    assert clock.now() == START
    wall.ns += 5
    assert clock.now() == START + 5


def test_it_grows_where_the_wall_clock_stands_or_goes_back() -> None:
    wall = Wall()
    clock = HybridClock(wall)
    assert [clock.now() for _ in range(3)] == [START, START + 1, START + 2]
    wall.ns -= 10 * S
    assert clock.now() == START + 3


def test_what_was_seen_is_before() -> None:
    wall = Wall()
    clock = HybridClock(wall)
    assert clock.seen(START + 7 * S)
    assert clock.now() == START + 7 * S + 1
    assert clock.seen(START)
    assert clock.now() == START + 7 * S + 2


def test_the_far_future_is_not_followed() -> None:
    wall = Wall()
    clock = HybridClock(wall)
    assert not clock.seen(START + FUTURE_NS_MAX + 1)
    assert clock.now() == START
    assert clock.seen(START + FUTURE_NS_MAX)
    assert clock.now() == START + FUTURE_NS_MAX + 1


def test_the_future_is_counted_from_the_corrected_clock() -> None:
    clock = HybridClock(Wall(), offset_ns=FUTURE_NS_MAX)
    assert clock.wall_ns() == START + FUTURE_NS_MAX
    assert clock.seen(START + 2 * FUTURE_NS_MAX)
    assert not clock.seen(START + 2 * FUTURE_NS_MAX + 1)


def test_small_differences_from_the_store_are_left_alone() -> None:
    clock = HybridClock(Wall())
    for difference in (0, DIFFERENCE_NS_MAX, -DIFFERENCE_NS_MAX):
        assert not clock.correct(START + difference)
        assert clock.offset_ns == 0


def test_large_differences_are_corrected_and_uncorrected() -> None:
    wall = Wall()
    clock = HybridClock(wall)
    assert clock.correct(START - 60 * S)
    assert clock.now() == START - 60 * S
    assert not clock.correct(START - 60 * S + DIFFERENCE_NS_MAX)
    wall.ns -= 60 * S  # somebody set this machine's clock
    assert clock.correct(START - 60 * S)
    assert clock.offset_ns == 0
    assert clock.correct(START + 3600 * S)
    assert clock.now() == START + 3600 * S


def test_a_slow_answer_is_no_difference() -> None:
    wall = Wall()
    clock = HybridClock(wall)
    wall.ns += 20 * S
    assert not clock.correct(START + S, round_trip_ns=20 * S)
    assert clock.correct(START - 60 * S, round_trip_ns=20 * S)
    assert clock.offset_ns == -70 * S


def test_two_that_are_behind_do_not_take_the_same_time() -> None:
    """Both saw one commit that their own clocks have not reached."""
    for seed in range(20):
        one, other = (HybridClock(Wall(), rng=random.Random(f"{seed} {name}")) for name in ("one", "other"))
        assert one.seen(START + S)
        assert other.seen(START + S)
        taken = one.now(), other.now()
        assert taken[0] != taken[1]
        assert all(START + S < time <= START + S + STEP_NS_MAX for time in taken)


events = st.lists(
    st.tuples(st.sampled_from(["now", "seen", "wall", "correct"]), st.integers(-2 * FUTURE_NS_MAX, 2 * FUTURE_NS_MAX)),
    max_size=60,
)


@given(events, st.booleans())
def test_whatever_happens_it_grows_and_is_after_what_it_accepted(happened: list[tuple[str, int]], jumps: bool) -> None:
    wall = Wall()
    clock = HybridClock(wall, rng=random.Random(1) if jumps else None)
    last = 0
    for what, amount in happened:
        if what == "wall":
            wall.ns += amount
        elif what == "correct":
            clock.correct(START + amount)
        elif what == "seen":
            accepted = clock.seen(START + amount)
            assert accepted == (START + amount <= clock.wall_ns() + FUTURE_NS_MAX)
            last = max(last, START + amount) if accepted else last
        else:
            now = clock.now()
            assert now > last
            last = now
