"""Medians, spreads, percentiles and rankings."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.bench import figures, results, verdict
from scripts.bench.figures import Spread
from scripts.bench.results import Series
from tests.bench.runs import COLD, WARM, failed, run, sample


def test_percentiles_are_values_that_were_there() -> None:
    values = [float(value) for value in range(1, 101)]
    assert [figures.percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert figures.percentile([7.0], 0.99) == 7.0
    assert figures.percentile([1.0, 2.0], 0.5) == 1.0
    with pytest.raises(ValueError, match="no values"):
        figures.percentile([], 0.5)


def test_latencies_are_sorted_first() -> None:
    found = figures.latency([0.003, 0.001, 0.002])
    assert found is not None
    assert (found.p50_ms, found.p99_ms) == (2.0, 3.0)
    assert figures.latency([]) is None


def test_spread() -> None:
    assert figures.spread([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)
    assert figures.spread([]) is None


@pytest.mark.parametrize(
    ("ratio", "told"),
    [(20.68, "20.7×"), (4.276, "4.28×"), (0.98, "0.98×"), (0.0712, "0.071×"), (0.00449, "0.0045×"), (0.0, "0.00×")],
)
def test_ratios_for_people(ratio: float, told: str) -> None:
    assert figures.times(ratio) == told


def test_rates_are_of_what_was_done_until_it_was_stopped() -> None:
    series = Series("w", "p", [sample(10, seconds=2.0), sample(30, seconds=2.0, stopped=2.0), sample(40, seconds=8.0)])
    assert figures.rates(series, "files/s") == Spread(5.0, 5.0, 15.0)
    assert figures.rates(series, "MiB/s") == Spread(5.0, 5.0, 15.0)
    nothing = Series("w", "p", [sample(0, stopped=2.0)])
    assert figures.rates(nothing, "files/s") is None
    assert "stopped after 2 s" in figures.remark(nothing)


def test_ours_against_the_best_of_a_kind() -> None:
    found = run({"lakefs": [10, 12, 11], "lakefs immutable": [30], "rclone": [20], "s3fs": [2], "obstore": [100]})
    mounts = verdict.against(found, COLD, "mount")
    assert [(each.ours, each.other, each.ratio) for each in mounts] == [
        ("lakefs immutable", "rclone", 1.5),
        ("lakefs", "rclone", 0.55),
    ]
    assert verdict.title(found, COLD) == (
        "first epoch, 4 readers: lakefs immutable is 1.50× rclone, the best other mount"
    )


def test_behind_is_behind_a_mount_or_under_enough_of_the_yardstick() -> None:
    cold = {"lakefs": [90], "rclone": [91], "obstore": [100], "local disk": [9000]}
    warm = {"lakefs": [79], "lakefs immutable": [80], "rclone": [10], "obstore": [9000], "local disk": [100]}
    found = run(cold, warm)
    told = [(each.workload, each.ours, each.other) for each in verdict.behind(found)]
    assert told == [(WARM.name, "lakefs", "local disk"), (COLD.name, "lakefs", "rclone")], "the worst first"


def test_who_failed_is_no_peer_to_be_better_than() -> None:
    found = run({"lakefs": [90]})
    failed(found, COLD, "rclone", "does not mount")
    assert verdict.against(found, COLD, "mount") == []
    assert verdict.title(found, COLD) == COLD.name


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = run({"lakefs": [1, 2]}, {"rclone": [3]})
    failed(found, COLD, "s3fs", "Transport endpoint is not connected")
    results.save(found, tmp_path / "deep" / "r.json")
    assert results.load(tmp_path / "deep" / "r.json") == found
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(SystemExit, match="no results"):
        results.load(tmp_path / "bad.json")
