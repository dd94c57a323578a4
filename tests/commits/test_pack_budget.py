"""The bound of a pack's bytes: by the upload limit, by what commits took, and by those that did not get there."""

from __future__ import annotations

from lakefs_fuse.commits.pack_budget import PACK_BYTES_MAX, PACK_BYTES_MIN, PUT_S, PackBudget
from lakefs_fuse.config import KIB, MIB


def test_budget_without_a_limit_begins_with_the_largest_pack() -> None:
    assert PackBudget().bytes_max == PACK_BYTES_MAX


def test_budget_of_a_limit_is_what_it_sends_in_time() -> None:
    assert PackBudget(256 * KIB).bytes_max == 256 * KIB * PUT_S
    assert PackBudget(KIB).bytes_max == PACK_BYTES_MIN
    assert PackBudget(1024 * MIB).bytes_max == PACK_BYTES_MAX


def test_packs_of_a_daemon_with_little_memory_are_smaller() -> None:
    budget = PackBudget(0, 16 * MIB)
    assert budget.bytes_max == 16 * MIB
    budget.record_failure(16 * MIB)
    budget.record_put(16 * MIB, 0.1)
    assert budget.bytes_max == 16 * MIB
    assert PackBudget(0, 1024 * MIB).bytes_max == PACK_BYTES_MAX


def test_budget_after_a_slow_put_is_what_its_rate_brings_in_time() -> None:
    budget = PackBudget()
    budget.record_put(64 * MIB, 256.0)
    assert budget.bytes_max == 64 * MIB * PUT_S / 256
    budget.record_put(2 * MIB, 1.0)
    assert budget.bytes_max == 2 * MIB * PUT_S


def test_budget_after_a_put_in_time_does_not_shrink() -> None:
    budget = PackBudget()
    budget.record_put(PACK_BYTES_MIN, PUT_S - 1)
    assert budget.bytes_max == PACK_BYTES_MAX


def test_budget_after_failures_of_large_packs_shrinks_to_the_smallest() -> None:
    budget = PackBudget()
    budget.record_failure(MIB)
    assert budget.bytes_max == PACK_BYTES_MAX
    for _ in range(20):
        budget.record_failure(budget.bytes_max)
    assert budget.bytes_max == PACK_BYTES_MIN
    budget.record_put(PACK_BYTES_MIN, 0.01)
    assert budget.bytes_max == PACK_BYTES_MAX


def test_budget_of_a_limit_does_not_grow_beyond_it() -> None:
    budget = PackBudget(256 * KIB)
    budget.record_put(MIB, 0.1)
    assert budget.bytes_max == 256 * KIB * PUT_S
