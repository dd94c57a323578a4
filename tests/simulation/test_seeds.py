"""A fixed set of seeds, the kept plans, and that a seed decides everything."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.simulation import generator
from tests.simulation import plan as plans
from tests.simulation.generator import PROFILES, make_plan
from tests.simulation.runs import Seed, run_seed
from tests.simulation.simulation import simulate
from tests.tiers import sized

FRESH = 25
CORPUS = sorted((Path(__file__).parent / "corpus").glob("*.json"))
SEEDS = [
    (profile, seed, sized(generator.OPERATIONS // 2, generator.OPERATIONS))
    for profile, seeds in (
        ("turns", sized(0, 8)),
        ("mixed", sized(1, 8)),
        ("foreign", sized(1, 5)),
        ("copies", sized(0, 8)),
        ("names", sized(0, 8)),
        ("fleet", sized(1, 8)),
    )
    for seed in range(seeds)
] + [
    # Bytes that are put again are replaced before a commit tells of them.
    ("copies", 72064, generator.OPERATIONS),
    # Bytes are put again over others that had replaced them, before a commit tells of either.
    ("packs", 110031, generator.OPERATIONS),
]
TWICE = [
    *[("turns", 3)][: sized(0, 1)],
    *[("mixed", seed) for seed in range(sized(1, 7))],
    *[("crash", seed) for seed in range(sized(1, 12))],
]
"""Nodes die in the last ones."""
OPERATIONS = sized(50, 100)
PROGRAM = (
    f"OPERATIONS = {OPERATIONS}"
    + """
import hashlib, sys
from tests.simulation.generator import make_plan
from tests.simulation.simulation import simulate
for seed in sys.argv[1:]:
    profile, number = seed.split(":")
    history = simulate(make_plan(profile, int(number), operations=OPERATIONS), is_tracing=True).history
    print(seed, len(history), hashlib.sha256("\\n".join(history).encode()).hexdigest())
"""
)


@pytest.mark.parametrize(("profile", "seed", "operations"), SEEDS)
def test_seed_loses_nothing(profile: str, seed: int, operations: int) -> None:
    assert simulate(make_plan(profile, seed, operations=operations)).failure == ""


@pytest.mark.parametrize(
    ("profile", "seed"),
    [("crash", 3), *(pytest.param(name, 1, marks=pytest.mark.long) for name in ("packs", "directed"))],
)
def test_seed_has_one_history_on_both_engines(profile: str, seed: int) -> None:
    plan = make_plan(profile, seed, operations=100)
    model, rocksdb = (simulate(plan, is_tracing=True, is_on_rocksdb=is_on_rocksdb) for is_on_rocksdb in (False, True))
    assert len(model.history) > 500
    assert model.history == rocksdb.history


@pytest.mark.long
@pytest.mark.parametrize("profile", PROFILES)
def test_fresh_seeds_lose_nothing(profile: str) -> None:
    """Others each day. What fails says which `make simulate-one` shows it."""
    first = datetime.now(tz=UTC).toordinal() * FRESH
    failed = [result for at in range(FRESH) if (result := run_seed(Seed(profile, first + at, 3))).failure]
    assert not failed, "\n".join(f"{result.seed}: {result.failure}" for result in failed)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_kept_plan_shows_what_it_was_kept_for(path: Path) -> None:
    plan = plans.load(path)
    outcome = simulate(plan)
    assert outcome.failure == ""
    if plan.fails:
        assert plan.fails in outcome.known, f"{plan.fails!r} is mended: clear `fails` in {path.name}"
    else:
        assert not outcome.known


def test_same_seeds_give_equal_histories_in_two_processes() -> None:
    arguments = [f"{profile}:{seed}" for profile, seed in TWICE]
    one, other = (
        subprocess.run(
            [sys.executable, "-c", PROGRAM, *arguments],
            env=os.environ | {"PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True,
        ).stdout
        for _ in range(2)
    )  # fmt: skip
    assert one == other
    assert len(one.splitlines()) == len(TWICE)
