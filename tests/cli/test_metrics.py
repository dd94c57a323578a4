"""`lakefs-fuse metrics`: names and values, and what is in `deploy/monitoring`, checked by promtool."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from lakefs_fuse.cli import run
from lakefs_fuse.cli.metric_families import FAMILIES, INFO, UP, full_name, registry_of
from lakefs_fuse.cli.metrics import parse_address
from lakefs_fuse.errors import ConfigError
from lakefs_fuse.metrics import LATENCY_BOUNDS_S, Metrics, ReadMetrics

ROOT = Path(__file__).parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
NAMES = {UP, INFO, *map(full_name, FAMILIES)}
Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]


def values_of(metrics: Metrics) -> dict[str, object]:
    """As a daemon answers, with some of the gauges."""
    mount = {"source": "s3://bucket/lake", "mountpoint": "/mnt/lake"}
    daemon = {"version": "1", "uptime_s": 5.0, "restarts": 2}
    return {
        **metrics.as_dict(),
        "mount": mount,
        "daemon": daemon,
        "maintenance": {"last_fold_s": None, "overdue": True},
    }


def text_of(**mounts: Mapping[str, object] | None) -> str:
    return generate_latest(registry_of(tuple(mounts), mounts.__getitem__)).decode()


def samples_of(text: str) -> Samples:
    """By name and labels, without that of the mount."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = tuple(sorted(item for item in sample.labels.items() if item[0] != "mountpoint"))
            found.setdefault(sample.name, {})[labels] = sample.value
    return found


def names_in(text: str) -> set[str]:
    """Metrics that an expression or a page names, without what a histogram adds."""
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in re.findall(r"\blakefs_fuse_\w+\b", text)}


def test_metrics_values_are_those_of_stats() -> None:
    metrics = Metrics()
    metrics.upcalls["read"] = 7
    metrics.store.latency_counts["get"][:3] = [1, 0, 2]
    metrics.store.latency_s_sum["get"] = 0.012
    reads = metrics.reads_of("train/**")
    reads.count_read(ReadMetrics(bytes_of_store=4096, waited_store_s=0.2, waited_disk_s=0.05), 0.3)
    metrics.reads_of("").count_read(ReadMetrics(), 60.0)
    found = samples_of(text_of(lake=values_of(metrics)))
    assert found[UP] == {(): 1}
    assert found[INFO] == {(("source", "s3://bucket/lake"), ("version", "1")): 1}
    assert found["lakefs_fuse_fuse_requests_total"][("operation", "read"),] == 7
    latency = found["lakefs_fuse_store_request_duration_seconds_bucket"]
    counts = [latency[("kind", "get"), ("le", str(bound))] for bound in (*LATENCY_BOUNDS_S, "+Inf")]
    assert counts == [1, 1, *[3] * 12]
    assert found["lakefs_fuse_store_request_duration_seconds_sum"][("kind", "get"),] == 0.012
    waited = found["lakefs_fuse_read_waited_seconds_total"]
    assert waited[("rule", "train/**"), ("source", "store")] == 0.2
    assert waited[("rule", "train/**"), ("source", "disk")] == 0.05
    assert waited[("rule", "train/**"), ("source", "daemon")] == pytest.approx(0.05)
    assert waited[("rule", ""), ("source", "daemon")] == 60
    assert found["lakefs_fuse_read_bytes_total"][("rule", "train/**"), ("source", "store")] == 4096
    assert found["lakefs_fuse_read_duration_seconds_count"] == {(): 2}
    assert found["lakefs_fuse_read_duration_seconds_bucket"][("le", "10.0"),] == 1
    assert found["lakefs_fuse_restarts_total"] == {(): 2}
    assert found["lakefs_fuse_maintenance_overdue"] == {(): 1}


def test_metrics_of_what_a_mount_does_not_report_have_no_sample() -> None:
    found = samples_of(text_of(lake=values_of(Metrics())))
    for name in "maintenance_last_fold_timestamp_seconds", "writeback_oldest_seconds", "read_bytes_total":
        assert f"lakefs_fuse_{name}" not in found


def test_metrics_of_a_mount_that_is_down_beside_one_that_is_not() -> None:
    text = text_of(up=values_of(Metrics()), down=None)
    assert f'{UP}{{mountpoint="down"}} 0.0' in text
    assert f'{UP}{{mountpoint="up"}} 1.0' in text
    assert text.count('mountpoint="down"') == 1


def test_promtool_accepts_the_text() -> None:
    metrics = Metrics()
    metrics.reads_of('odd "glob"\\**').count_read(ReadMetrics(), 1.0)
    text = text_of(lake=values_of(metrics))
    command = ["promtool", "check", "metrics"]
    done = subprocess.run(command, check=False, input=text, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_page_lists_every_metric() -> None:
    listed = re.findall(r"^\| `(lakefs_fuse_\w+)` \| (\w+) \| (.*?) ?\|", (ROOT / "docs/metrics.md").read_text(), re.M)
    assert {name for name, _, _ in listed} == NAMES
    kinds = {full_name(family): family.kind for family in FAMILIES}
    assert {name: kind for name, kind, _ in listed if name in kinds} == kinds
    labels = {
        full_name(family): (["rule"] if family.by_rule else []) + [*filter(None, [family.label])] for family in FAMILIES
    }
    assert {name: re.findall(r"`(\w+)`", text) for name, _, text in listed if name in labels} == labels


def expressions() -> Iterator[str]:
    """Of the dashboard, as Grafana sends them."""
    for panel in json.loads((MONITORING / "dashboard.json").read_text())["panels"]:
        for target in panel["targets"]:
            yield target["expr"].replace("$mountpoint", ".*").replace("$__rate_interval", "1m")


def test_dashboard_and_alerts_name_metrics_that_exist() -> None:
    assert names_in(" ".join(expressions())) <= NAMES
    assert names_in((MONITORING / "alerts.yaml").read_text()) <= NAMES
    assert names_in((ROOT / "docs" / "metrics.md").read_text()) <= NAMES


@pytest.mark.parametrize(
    "check",
    [("check", "config", "prometheus.yaml"), ("test", "rules", str(Path(__file__).parent / "alerts.test.yaml"))],
)
def test_promtool_accepts_configuration_and_alerts(check: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *check], check=False, cwd=MONITORING, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("text", "address"),
    [("127.0.0.1:9469", ("127.0.0.1", 9469)), ("[::1]:0", ("::1", 0)), ("host:65535", ("host", 65535))],
)
def test_parse_address(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "9469", ":9469", "127.0.0.1", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:65536"])
def test_parse_address_that_is_none(text: str) -> None:
    with pytest.raises(ConfigError, match="expected ADDR:PORT"):
        parse_address(text)


def test_metrics_where_nothing_is_mounted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["metrics", str(tmp_path)]) == 1
    assert f"nothing is mounted at {tmp_path}" in capsys.readouterr().err
