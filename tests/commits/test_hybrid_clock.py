"""The clock that names commits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.commits.hybrid_clock import AHEAD_NS_MAX, CONFIRM_S, DIFFERENCE_NS_MAX, STEP_NS_MAX, HybridClock
from tests.fakes import clock_of

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
    clock = HybridClock(clock_of(wall))
    assert clock.now() == START
    wall.ns += 5
    assert clock.now() == START + 5


def test_it_grows_where_the_wall_clock_stands_or_goes_back() -> None:
    wall = Wall()
    clock = HybridClock(clock_of(wall))
    assert [clock.now() for _ in range(3)] == [START, START + 1, START + 2]
    wall.ns -= 10 * S
    assert clock.now() == START + 3


def test_what_was_seen_is_before() -> None:
    wall = Wall()
    clock = HybridClock(clock_of(wall))
    assert clock.follow(START + 7 * S)
    assert clock.now() == START + 7 * S + 1
    assert clock.follow(START)
    assert clock.now() == START + 7 * S + 2


def test_the_far_future_is_not_followed() -> None:
    wall = Wall()
    clock = HybridClock(clock_of(wall))
    assert not clock.follow(START + AHEAD_NS_MAX + 1)
    assert clock.now() == START
    assert clock.follow(START + AHEAD_NS_MAX - 1)
    assert clock.now() == START + AHEAD_NS_MAX


def test_now_after_a_commit_at_the_bound_stays_within_it() -> None:
    clock = HybridClock(clock_of(Wall()), rng=random.Random(1))
    assert clock.follow(START + AHEAD_NS_MAX - 1)
    for _ in range(100):
        assert clock.now() <= START + AHEAD_NS_MAX + STEP_NS_MAX


def test_the_future_is_counted_from_the_corrected_clock() -> None:
    clock = HybridClock(clock_of(Wall()))
    assert clock.correct(START + AHEAD_NS_MAX)
    assert clock.wall_ns() == START + AHEAD_NS_MAX
    assert clock.follow(START + 2 * AHEAD_NS_MAX)
    assert not clock.follow(START + 2 * AHEAD_NS_MAX + 1)


def test_small_differences_from_the_store_are_left_alone() -> None:
    clock = HybridClock(clock_of(Wall()))
    for difference in (0, DIFFERENCE_NS_MAX, -DIFFERENCE_NS_MAX):
        assert not clock.correct(START + difference)
        assert clock.offset_ns == 0


def test_correct_first_answer_counts_at_once() -> None:
    clock = HybridClock(clock_of(Wall()))
    assert clock.correct(START - 60 * S)
    assert clock.now() == START - 60 * S
    assert not clock.correct(START - 60 * S + DIFFERENCE_NS_MAX)


def test_correct_later_difference_counts_when_told_twice() -> None:
    wall = Wall()
    clock = HybridClock(clock_of(wall))
    assert not clock.correct(START)
    assert not clock.correct(START + 3600 * S)
    assert clock.is_confirmed is False
    wall.ns += (CONFIRM_S - 1) * S
    assert not clock.correct(wall.ns + 3600 * S)
    wall.ns += S
    assert clock.correct(wall.ns + 3600 * S)
    assert clock.now() == wall.ns + 3600 * S


def test_correct_answers_that_disagree_are_not_followed() -> None:
    wall = Wall()
    clock = HybridClock(clock_of(wall))
    assert not clock.correct(START)
    for difference in (3600, 7200, 3600, 0):
        assert not clock.correct(wall.ns + difference * S)
        wall.ns += 2 * CONFIRM_S * S
    assert clock.is_confirmed
    assert clock.offset_ns == 0


@pytest.mark.parametrize("jump_s", [12 * 365 * 86400, -12 * 365 * 86400, 3600, -3])
@pytest.mark.parametrize("is_local", [False, True])
def test_now_during_a_jump_of_the_wall_clock_goes_on(
    jump_s: int, is_local: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """``is_local``: the store's clock is the machine's, and jumps with it."""
    wall, steady = Wall(), Wall()
    steady.ns = 5 * S
    clock = HybridClock(clock_of(wall, steady))

    def pass_s(seconds: int) -> None:
        wall.ns += seconds * S
        steady.ns += seconds * S

    assert not clock.correct(START)
    before = clock.now()
    pass_s(10)
    wall.ns += jump_s * S
    assert before < clock.now() == START + 10 * S
    assert (clock.jumps, clock.offset_ns) == (1, -jump_s * S)
    assert not clock.correct(wall.ns if is_local else START + 10 * S)
    pass_s(10)
    assert clock.now() == START + 20 * S
    wall.ns -= jump_s * S
    pass_s(CONFIRM_S)
    assert clock.now() == START + 20 * S + CONFIRM_S * S
    assert not clock.correct(wall.ns)
    assert (clock.jumps, clock.offset_ns, clock.went_back, clock.is_confirmed) == (2, 0, False, True)
    caplog.clear()


def test_now_after_a_start_in_the_future_goes_back_to_the_stores_time(caplog: pytest.LogCaptureFixture) -> None:
    wall, steady = Wall(), Wall()
    clock = HybridClock(clock_of(wall, steady))
    wall.ns += 3600 * S
    clock = HybridClock(clock_of(wall, steady))
    assert not clock.correct(wall.ns)
    assert clock.now() == START + 3600 * S
    wall.ns -= 3600 * S
    assert not clock.correct(wall.ns)
    assert clock.now() == START + 3600 * S + 1
    wall.ns += CONFIRM_S * S
    steady.ns += CONFIRM_S * S
    assert clock.correct(wall.ns)
    assert clock.went_back
    assert clock.now() == wall.ns + 1
    caplog.clear()


def test_a_slow_answer_is_no_difference() -> None:
    wall = Wall()
    clock = HybridClock(clock_of(wall))
    wall.ns += 20 * S
    assert not clock.correct(START + S, round_trip_ns=20 * S)
    clock = HybridClock(clock_of(wall))
    assert clock.correct(START - 60 * S, round_trip_ns=20 * S)
    assert clock.offset_ns == -70 * S


def test_two_that_are_behind_do_not_take_the_same_time() -> None:
    """Both saw one commit that their own clocks have not reached."""
    for seed in range(20):
        one, other = (HybridClock(clock_of(Wall()), rng=random.Random(f"{seed} {name}")) for name in ("one", "other"))
        assert one.follow(START + S)
        assert other.follow(START + S)
        taken = one.now(), other.now()
        assert taken[0] != taken[1]
        assert all(START + S < time <= START + S + STEP_NS_MAX for time in taken)


events = st.lists(
    st.tuples(st.sampled_from(["now", "seen", "wall", "steady", "correct"]), st.integers(-2, 2), st.integers(-S, S)),
    max_size=60,
)


@given(events, st.booleans())
def test_now_whatever_happens_grows_and_stays_within_the_bound(
    happened: list[tuple[str, int, int]], jumps: bool
) -> None:
    wall, steady = Wall(), Wall()
    clock = HybridClock(clock_of(wall, steady), rng=random.Random(1) if jumps else None)
    last = 0
    for what, bounds, more in happened:
        amount = bounds * AHEAD_NS_MAX + more
        if what == "wall":
            wall.ns += amount
        elif what == "steady":
            wall.ns += abs(amount)
            steady.ns += abs(amount)
        elif what == "correct":
            clock.correct(START + amount)
            last = 0 if clock.went_back else last
        elif what == "seen":
            accepted = clock.follow(clock.wall_ns() + amount)
            assert accepted == (amount <= AHEAD_NS_MAX)
            last = max(last, clock.wall_ns() + amount) if accepted else last
        else:
            now = clock.now()
            assert now > last or clock.went_back
            assert now <= clock.wall_ns() + AHEAD_NS_MAX + STEP_NS_MAX
            last, clock.went_back = now, False
