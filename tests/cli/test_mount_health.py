"""What the counters of a daemon mean for `doctor`."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from lakefs_fuse import __version__
from lakefs_fuse.checks import Severity
from lakefs_fuse.cli.mount_health import health

NOW_S = 1_800_000_000.0
WELL: dict[str, Any] = {
    "daemon": {"pid": 7, "uptime_s": 60.0, "version": __version__, "restarts": 0},
    "mount": {"log_file": "/log"},
    "dirty": {"files": 2, "bytes": 1024, "failed": 0, "orphans": 0},
    "writeback": {"oldest_s": 1.0, "waiting_because": ""},
    "store": {"requests": {"get": 5, "put": 1}, "errors": 0, "throttled": 0},
    "commits": {"damaged": 0, "future": 0, "applied": 3, "object_numbers": 5, "object_numbers_max": 100},
    "cache": {"state": "ok"},
    "staging": {"state": "ok"},
    "maintenance": {"mode": "auto", "last_fold_s": NOW_S - 7200, "overdue": False},
    "kernel": {"hooks": True, "libfuse": "3.14.0", "missing": []},
}


def changed(dotted: str, value: object) -> dict[str, Any]:
    values = copy.deepcopy(WELL)
    name, key = dotted.split(".")
    values[name][key] = value
    return values


def test_mount_where_all_is_well_is_ok() -> None:
    found = {result.check: result for result in health(WELL, NOW_S)}
    assert {result.severity for result in found.values()} == {Severity.OK}
    assert found["mount.backlog"].text == "2 files, 1.0 KiB, are not in the store"
    assert found["mount.maintenance"].text == "last fold 2.0 h ago"


@pytest.mark.parametrize(
    ("dotted", "value", "check", "severity", "said"),
    [
        ("daemon.restarts", 2, "mount.daemon", Severity.WARNING, "2 daemons died before it: see /log"),
        ("daemon.version", "0.0.1", "mount.daemon", Severity.WARNING, "mount again"),
        ("mount.needs_newer_program", ["mirrored"], "mount.features", Severity.WARNING, "mirrored: install a newer"),
        ("dirty.failed", 1, "mount.backlog", Severity.FAILED, "stats"),
        ("dirty.orphans", 1, "mount.orphans", Severity.WARNING, "orphans"),
        ("writeback.waiting_because", "no connection", "mount.backlog", Severity.FAILED, "no connection"),
        ("writeback.oldest_s", 9000.0, "mount.backlog", Severity.WARNING, "2.5 h"),
        ("store.errors", 3, "mount.requests", Severity.WARNING, "3 errors"),
        ("store.throttled", 3, "mount.requests", Severity.WARNING, "--requests"),
        ("commits.damaged", 1, "mount.commits", Severity.FAILED, "fsck"),
        ("commits.names_missing", 1, "mount.commits", Severity.FAILED, "fsck"),
        ("commits.withdrawn", 1, "mount.commits", Severity.WARNING, "the log names them"),
        ("commits.future", 1, "mount.commits", Severity.WARNING, "future"),
        ("commits.object_numbers", 75, "mount.commits", Severity.OK, "3 commits applied"),
        ("commits.object_numbers", 76, "mount.commits", Severity.WARNING, "76 of the 100 numbers"),
        ("cache.state", "failed", "mount.cache", Severity.FAILED, "disk"),
        ("cache.state", "full", "mount.cache", Severity.WARNING, "--cache-size"),
        ("staging.state", "full", "mount.staging", Severity.WARNING, "--staging-size"),
        ("maintenance.last_error", "denied", "mount.maintenance", Severity.WARNING, "denied"),
        ("kernel.hooks", False, "mount.kernel", Severity.OK, "fast paths"),
    ],
)
def test_mount_that_is_ill_says_what_to_do(
    dotted: str, value: object, check: str, severity: Severity, said: str
) -> None:
    found = {result.check: result for result in health(changed(dotted, value), NOW_S)}
    assert found[check].severity is severity
    assert said in found[check].text


def test_full_disk_of_the_staging_says_how_much_to_free() -> None:
    values = changed("staging.state", "full")
    values["staging"] |= {"disk_free_bytes": 3 << 20, "disk_needed_bytes": 20 << 20}
    (found,) = (result for result in health(values, NOW_S) if result.check == "mount.staging")
    assert found.severity is Severity.FAILED
    assert "the disk of the staging is full" in found.text
    assert "free at least 17.0 MiB there (3.0 MiB are free)" in found.text
    assert "replace" not in found.text


def test_mount_without_fast_paths_is_a_warning() -> None:
    values = changed("kernel.hooks", False)
    values["kernel"]["missing"] = ["the hooks library is not there: install lakefs-fuse again"]
    assert [result.text for result in health(values, NOW_S) if result.severity is Severity.WARNING] == [
        "the hooks library is not there: install lakefs-fuse again"
    ]


def test_immutable_mount_has_no_backlog_and_no_staging() -> None:
    values = {name: WELL[name] for name in ("daemon", "store", "cache", "kernel")}
    found = {result.check: result for result in health(values, NOW_S)}
    assert {result.severity for result in found.values()} == {Severity.OK}
    assert "mount.staging" not in found
