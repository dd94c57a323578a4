"""What befalls nodes of a simulation, and commands beside them: that each happens as its plan says."""

from __future__ import annotations

import pytest

from tests.simulation import plan as plans
from tests.simulation.plan import NodePlan, Plan, Round, Step
from tests.simulation.simulation import Outcome, simulate


def write(path: str, content: int = 1) -> plans.Write:
    return plans.Write(path=path, content=content, size=100)


def outcome(*steps: Step, **how: object) -> Outcome:
    config = {"pack": "always", "refresh_s": 2.0, "metadata_ttl_s": 2.0, **how}
    rounds = (Round((Step(0.0, 0, 0, write("f0")),), 12.0), Round(steps, 12.0))
    return simulate(
        Plan(profile="fleet", seed="faults", nodes=(NodePlan(),) * 2, rounds=rounds, config=config, levels=True),
        is_tracing=True,
    )


@pytest.mark.parametrize("again", ["replay.restored", "commit.sent"])
def test_node_that_dies_again_while_it_replays_keeps_what_it_acknowledged(again: str) -> None:
    found = outcome(
        Step(0.0, 1, 0, plans.Kill(failpoint="accept.recorded", again=again)), Step(1.0, 1, 0, write("f1", 2)),
        durability="writeback",
    )  # fmt: skip
    assert found.failure == ""
    assert found.fired[f"killed at {again}"] == 1
    assert sum("n1#3: " in line for line in found.history) > 0


def test_node_that_joins_has_no_mount_before() -> None:
    found = outcome(
        Step(0.0, 1, -1, plans.Join(seconds=20.0)), Step(10.0, 1, 0, write("f1", 2)), Step(30.0, 1, 1, write("f2", 3)),
        Step(5.0, 0, 0, write("f3", 4)),
    )  # fmt: skip
    assert (found.failure, found.fired["joined"]) == ("", 1)
    assert (found.operations["Write down"], found.operations["Write ok"]) == (1, 3)


def test_ingest_beside_mounts_puts_files_that_the_oracle_expects() -> None:
    found = outcome(
        Step(0.0, 0, 0, plans.Mkdir(path="d0")), Step(3.0, 1, 0, write("d0/f1", 2)),
        Step(10.0, 0, 0, plans.Ingest(path="d0", files=(("f1", 3, 100), ("d1/f2", 4, 3000)))),
        Step(20.0, 1, 0, plans.Unlink(path="d0/d1/f2")),
    )  # fmt: skip
    assert found.failure == ""
    assert found.operations["Ingest ok"] == 1
    assert found.operations["Unlink ok"] == 1


def test_maintenance_folds_the_commits_into_levels_of_the_index() -> None:
    steps = [Step(2.0 * number, 1, 0, write(f"f{number % 3}", number)) for number in range(2, 30)]
    found = outcome(
        *steps, Step(40.0, 0, 0, plans.Admin(what="maintenance", grace_s=700.0)),
        Step(70.0, 0, 0, plans.Admin(what="maintenance", grace_s=700.0)),
    )  # fmt: skip
    assert found.failure == ""
    assert sum(line.endswith("/manifest") and ": put .lakefs/index/" in line for line in found.history) == 2
