"""Each directed workload makes valid plans, which the program passes."""

from __future__ import annotations

import msgspec
import pytest

from tests.simulation import plan as plans
from tests.simulation.directed import (
    CLOSE,
    POWER,
    SETTINGS,
    WRITEBACK,
    Scenario,
    make_directed,
    plan_of,
)
from tests.simulation.generator import make_plan
from tests.simulation.plan import Plan
from tests.simulation.simulation import simulate

ALL = (*CLOSE, *(scenario for scenario in (*WRITEBACK, *POWER) if scenario not in CLOSE))


@pytest.mark.parametrize("scenario", ALL, ids=lambda scenario: scenario.__name__)
def test_program_passes_a_plan_of_each_scenario(scenario: Scenario) -> None:
    plan = plan_of(scenario, 1)
    assert msgspec.json.decode(plans.dump(plan), type=Plan) == plan
    assert all(0 <= step.node < len(plan.nodes) for part in plan.rounds for step in part.steps)
    assert simulate(plan).failure == ""


def test_every_scenario_is_in_a_few_seeds() -> None:
    chosen = {name for seed in range(40) for name in make_directed(seed, 3).note.split(", ")}
    assert chosen == {scenario.__name__ for scenario in ALL}


def test_same_seed_makes_the_same_plan() -> None:
    for seed in range(len(SETTINGS)):
        assert make_directed(seed, 3) == make_plan("directed", seed)
