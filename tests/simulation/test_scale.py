"""The model of a lake's requests agrees with mounts in virtual time."""

from __future__ import annotations

import pytest

from scripts.scale import page
from scripts.scale.load import Load, measure
from scripts.scale.model import Lake, Rate

USD, REQUESTS, BYTES = 0.15, 0.25, 0.5
"""By how much the model may be wrong, as a share of what was measured."""
LONG = pytest.mark.long


@pytest.mark.parametrize(
    "load",
    [
        Load(nodes=3, writers=1, commits_s=0.2, seconds=200),
        pytest.param(Load(nodes=3, writers=1, commits_s=0.2, idle=9, seconds=240), marks=LONG),
        pytest.param(Load(nodes=24, writers=2, commits_s=0.5, seconds=60), marks=LONG),
        pytest.param(Load(nodes=3, writers=3, commits_s=3, seconds=200), marks=LONG),
        pytest.param(Load(nodes=24, writers=2, commits_s=0.5, refresh_s=30, seconds=600), marks=LONG),
        pytest.param(Load(nodes=24, writers=20, commits_s=10, seconds=60), marks=LONG),
        pytest.param(Load(nodes=100, writers=4, commits_s=4, seconds=60), marks=LONG),
    ],
    ids=lambda load: f"{load.nodes}-{load.writers}-{load.commits_s}-{load.refresh_s}-{load.idle}",
)
def test_model_agrees_with_mounts_in_virtual_time(load: Load) -> None:
    measured = measure(load)
    lake = Lake(
        nodes=load.nodes, writers=load.writers, commits_s=measured.commits_s, idle=load.idle, refresh_s=load.refresh_s
    )
    found, expected = Rate(*measured.rate), lake.following()
    assert expected.gets == pytest.approx(found.gets, rel=REQUESTS)
    assert expected.lists == pytest.approx(found.lists, rel=REQUESTS)
    assert expected.puts == pytest.approx(found.puts, rel=REQUESTS)
    assert expected.received + expected.sent == pytest.approx(found.received + found.sent, rel=BYTES)
    assert expected.usd_month == pytest.approx(found.usd_month, rel=USD)
    assert measured.lag_s < load.refresh_s + 3


def test_model_of_more_nodes_never_costs_less() -> None:
    costs = [Lake(nodes=nodes, writers=4, commits_s=4).total().usd_month for nodes in (3, 24, 100, 1000, 10_000)]
    assert costs == sorted(costs)


def test_page_has_what_the_script_prints() -> None:
    assert page.PAGE.read_text() == page.written(), "run python -m scripts.scale --write"


def test_nodes_max_is_where_the_log_asks_for_what_a_partition_takes() -> None:
    lake = Lake(nodes=1, writers=4, commits_s=1.0)
    nodes = page.nodes_max(lake)
    log = Lake(nodes=nodes, writers=4, commits_s=1.0).log()
    assert log.gets + log.lists == pytest.approx(5500, rel=0.001)
