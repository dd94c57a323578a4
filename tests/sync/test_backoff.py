"""`Backoff`: bounds, growth and jitter of its pauses."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lakefs_fuse.sync.backoff import Backoff

firsts = st.floats(0.001, 10)
scales = st.lists(st.floats(1, 10), max_size=40)


@given(firsts, st.floats(10, 100), scales)
def test_backoff_without_jitter_doubles_up_to_the_bound(
    first_s: float, max_s: float, given_scales: list[float]
) -> None:
    backoff = Backoff(first_s, max_s)
    for tries, scale in enumerate(given_scales):
        assert backoff.next_s(scale) == min(max_s, scale * min(max_s, first_s * 2.0**tries))


@given(firsts, st.floats(10, 100), scales, st.integers())
def test_backoff_with_jitter_stays_within_the_pauses_without(
    first_s: float, max_s: float, given_scales: list[float], seed: int
) -> None:
    bounds, drawn = Backoff(first_s, max_s), Backoff(first_s, max_s, random.Random(seed))
    again = Backoff(first_s, max_s, random.Random(seed))
    for scale in given_scales:
        pause_s = drawn.next_s(scale)
        assert 0 <= pause_s <= bounds.next_s(scale)
        assert pause_s == again.next_s(scale)


def test_backoff_reset_begins_anew() -> None:
    backoff = Backoff(0.5, 30.0)
    assert [backoff.next_s() for _ in range(8)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    backoff.reset()
    assert [backoff.next_s() for _ in range(2)] == [0.5, 1]
