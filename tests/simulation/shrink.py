"""Shrinks a plan that fails to the fewest rounds, steps and nodes that still fail (delta debugging, Zeller 2002).

What always holds: a plan is kept only if it fails with a failure of the same kind, so that one defect is not mistaken
for another on the way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from tests.simulation.plan import Plan, Round, Step

T = TypeVar("T")
Fails = Callable[[Plan], str]
"""The failure of a plan; empty where it passes."""
_KINDS = (
    "is gone", "again, which was", "which nobody put", "differ", "after a newer", "nobody wrote", "has not ended",
    "cannot be opened", "not durable",
)  # fmt: skip


def kind_of(failure: str) -> str:
    """What kind of failure it is, without paths and bytes."""
    for kind in _KINDS:
        if kind in failure:
            return kind
    return re.sub(r"[0-9a-f]{6,}|\d+", "N", failure)[:40]


def shrink(plan: Plan, fails: Fails, *, runs_max: int = 400) -> tuple[Plan, int]:
    """The smallest plan found, and how many runs it took."""
    kind, runs = kind_of(fails(plan)), 1

    def still(candidate: Plan) -> bool:
        nonlocal runs
        if runs >= runs_max:
            return False
        runs += 1
        failure = fails(candidate)
        return bool(failure) and kind_of(failure) == kind

    plan = _merge_rounds(plan, still)
    pairs = [(index, step) for index, part in enumerate(plan.rounds) for step in part.steps]
    kept = _ddmin(pairs, lambda some: still(_with_steps(plan, some)))
    plan = _drop_empty(_with_steps(plan, kept), still)
    return plan, runs


def _merge_rounds(plan: Plan, still: Callable[[Plan], bool]) -> Plan:
    """Rounds after the failure go, then those before it as far as they are not needed."""
    low, high = 1, len(plan.rounds)
    while low < high:
        middle = (low + high) // 2
        if still(msgspec.structs.replace(plan, rounds=plan.rounds[:middle])):
            high = middle
        else:
            low = middle + 1
    return msgspec.structs.replace(plan, rounds=plan.rounds[:high])


def _with_steps(plan: Plan, pairs: Sequence[tuple[int, Step]]) -> Plan:
    rounds = [
        Round(tuple(step for number, step in pairs if number == index), part.quiet_s)
        for index, part in enumerate(plan.rounds)
    ]
    return msgspec.structs.replace(plan, rounds=tuple(rounds))


def _drop_empty(plan: Plan, still: Callable[[Plan], bool]) -> Plan:
    for index in reversed(range(len(plan.rounds))):
        if not plan.rounds[index].steps:
            fewer = msgspec.structs.replace(plan, rounds=plan.rounds[:index] + plan.rounds[index + 1 :])
            if still(fewer):
                plan = fewer
    return plan


def _ddmin(items: list[T], still: Callable[[list[T]], bool]) -> list[T]:
    parts = 2
    while len(items) >= 2:
        size = -(-len(items) // parts)
        pieces = [items[at : at + size] for at in range(0, len(items), size)]
        for index in range(len(pieces)):
            fewer = [item for number, piece in enumerate(pieces) if number != index for item in piece]
            if fewer and still(fewer):
                items, parts = fewer, max(parts - 1, 2)
                break
        else:
            if size == 1:
                return items
            parts = min(len(items), parts * 2)
    return items
