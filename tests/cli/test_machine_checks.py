"""What `doctor` says of a machine, and of the disk of a cache directory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import pytest

from lakefs_fuse.checks import CheckResult, Severity
from lakefs_fuse.cli import machine_checks
from lakefs_fuse.cli.preflight import Host

EXT4 = "22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine on which an ordinary user can mount."""
    (tmp_path / "dev_fuse").touch()
    (tmp_path / "fuse.conf").write_text("user_allow_other\n")
    (tmp_path / "mountinfo").write_text(EXT4)
    return Host(
        tmp_path / "dev_fuse", tmp_path / "fuse.conf", tmp_path / "mountinfo", 1000, lambda name: f"/bin/{name}"
    )


def by_check(results: Iterable[CheckResult]) -> dict[str, CheckResult]:
    return {result.check: result for result in results}


def severities(results: dict[str, CheckResult]) -> set[Severity]:
    return {result.severity for result in results.values()}


def test_machine_where_all_is_well_is_ok(host: Host) -> None:
    found = by_check(machine_checks.machine(host, "6.18.44-fc"))
    assert severities(found) == {Severity.OK}
    assert set(found) == {"machine.kernel", "machine.dev-fuse", "machine.fusermount3", "machine.allow-other"}
    assert found["machine.allow-other"].values == {"allowed": True}


def test_machine_that_lacks_something_says_what_to_do(host: Host, tmp_path: Path) -> None:
    (tmp_path / "dev_fuse").unlink()
    (tmp_path / "fuse.conf").write_text("#user_allow_other\n")
    found = by_check(machine_checks.machine(dataclasses.replace(host, which=lambda name: None), "4.19.0-generic"))
    assert found["machine.kernel"].severity is Severity.WARNING
    assert "modprobe fuse" in found["machine.dev-fuse"].text
    assert "install the package fuse3" in found["machine.fusermount3"].text
    assert found["machine.fusermount3"].severity is Severity.FAILED
    assert found["machine.allow-other"].severity is Severity.OK, "only --allow-other needs it"
    assert "user_allow_other" in found["machine.allow-other"].text


def test_root_needs_no_fusermount(host: Host) -> None:
    root = dataclasses.replace(host, uid=0, which=lambda name: None)
    assert severities(by_check(machine_checks.machine(root, "6.1.0"))) == {Severity.OK}


@pytest.mark.parametrize(
    ("kind", "severity"), [("ext4", Severity.OK), ("tmpfs", Severity.WARNING), ("nfs4", Severity.FAILED)]
)
def test_disk_of_the_cache_directory_is_to_be_local_and_no_memory(
    host: Host, tmp_path: Path, kind: str, severity: Severity
) -> None:
    host.mountinfo.write_text(EXT4.replace("ext4", kind))
    found = by_check(machine_checks.cache_directory(str(tmp_path / "to" / "be" / "made"), 0, host.mountinfo))
    assert found["cache.disk"].severity is severity
    assert machine_checks.cache_permissions(str(tmp_path / "to")).severity is Severity.OK
    assert not (tmp_path / "to").exists(), "nothing is made"


def test_cache_directory_whose_name_is_too_long_is_looked_up_without_an_error(host: Host, tmp_path: Path) -> None:
    host.mountinfo.write_text(EXT4)
    found = by_check(machine_checks.cache_directory(str(tmp_path / ("x" * 300)), 0, host.mountinfo))
    assert found["cache.room"].severity is Severity.OK


def test_cache_directory_without_room_or_open_to_others_says_what_to_do(host: Host, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    directory.mkdir(mode=0o755)
    directory.chmod(0o755)
    found = by_check(machine_checks.cache_directory(str(directory), 1 << 60, host.mountinfo))
    assert found["cache.room"].severity is Severity.FAILED
    assert "--free-space" in found["cache.room"].text
    permissions = machine_checks.cache_permissions(str(directory))
    assert permissions.severity is Severity.WARNING
    assert f"chmod 700 {directory}" in permissions.text
    directory.chmod(0o700)
    assert machine_checks.cache_permissions(str(directory)).severity is Severity.OK
    assert severities(by_check(machine_checks.cache_directory(str(directory), 0, host.mountinfo))) == {Severity.OK}
