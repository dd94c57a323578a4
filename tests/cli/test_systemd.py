"""The unit that `mount --print-systemd-unit` prints, as systemd reads it; a real service manager is not needed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from lakefs_fuse.cli import run, spawn, systemd
from lakefs_fuse.cli.mount import build_config, config_of, mount
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.control.worker_protocol import Place
from lakefs_fuse.daemon import sd_notify as notify

PROGRAM = ("/opt/lakefs/bin/lakefs-fuse",)
Unit = dict[str, list[str]]


def parse(text: str) -> Unit:
    """Keys and their values, sections put together; no value here is continued on another line."""
    found: Unit = {}
    for line in text.splitlines():
        if line and line[0] not in "#[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def words(command: str) -> list[str]:
    """A command line taken apart as systemd.service(5) says: quotes, C escapes, then %% and $$."""
    found: list[str] = []
    current, quoted, rest = "", False, iter(command)
    for letter in rest:
        if letter == "\\":
            current += next(rest)
        elif letter == '"':
            quoted = not quoted
        elif letter == " " and not quoted:
            found.append(current)
            current = ""
        else:
            current += letter
    assert not quoted
    return [word.replace("%%", "%").replace("$$", "$") for word in [*found, current]]


def unit_of(arguments: list[str], *, uid: int = 0) -> str:
    context = mount.make_context("mount", list(arguments))
    params = dict(context.params)
    config = build_config(params.pop("source"), params.pop("mountpoint"), params)
    return systemd.unit(config, context, uid=uid, program=PROGRAM)


ARGUMENTS = [
    "s3://bucket/some/prefix", "/mnt/my lake", "-o", "ro,cache_size=5G,file_mode=640,metadata_ttl=1.5m,_netdev",
    "--cache-dir", "/nvme/100% \"cache\" $HOME\\x", "--upload-limit", "2GiB/s", "--uid", "7", "--no-supervise",
    "--log-level", "debug", "--pack", "never", "--endpoint-url", "http://localhost:8333/",
]  # fmt: skip


def test_the_service_mounts_what_the_command_line_would() -> None:
    unit = parse(unit_of(ARGUMENTS))
    (start,) = unit["ExecStart"]
    program, command, *arguments = words(start)
    assert (program, command, arguments[-1]) == (*PROGRAM, "mount", "--foreground")
    assert config_of(arguments) == config_of([*ARGUMENTS, "--foreground"])
    assert unit["TimeoutStartSec"] == ["65min"]
    assert spawn.STATE_S < 65 * 60, "an immutable mount may list for so long"
    (stop,) = unit["ExecStop"]
    assert words(stop) == ["-" + PROGRAM[0], "umount", "/mnt/my lake"]
    assert unit["Type"] == ["notify"]
    assert unit["KillMode"] == ["mixed"], "the supervisor passes SIGTERM on; a second one gives up storing"
    assert unit["Restart"] == ["on-failure"]
    assert unit["RequiresMountsFor"] == ["/nvme /mnt"]


def test_automatic_interval_is_printed_as_it_is_typed() -> None:
    assert "--foreign=auto" in unit_of(["s3://bucket", "/mnt/lake", "--foreign", "auto"])
    assert "--foreign=90" in unit_of(["s3://bucket", "/mnt/lake", "--foreign", "1.5m"])


def test_each_mountpoint_has_a_unit_of_its_own() -> None:
    points = ["/mnt/a/b", "/mnt/a-b", "/mnt/a b", "/mnt/数据", "/mnt/данные", "/", "/x" * 80, "/y" + "/x" * 79]
    assert len({systemd.unit_name(point) for point in points}) == len(points)
    assert systemd.unit_name("/mnt/lake") == "lakefs-mnt-lake"


def test_directories_are_quoted_and_what_no_unit_can_have_is_refused() -> None:
    given = ["s3://bucket", '/mnt/a"b\\c/lake', "--cache-dir", "/nvme/it's/cache"]
    unit = parse(unit_of(given))
    assert words(unit["RequiresMountsFor"][0]) == ["/nvme/it's", '/mnt/a"b\\c']
    with pytest.raises(click.UsageError, match="no unit file can have"):
        unit_of(["s3://bucket", "/mnt/a\nb"])


def test_relative_paths_and_files_of_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.toml").write_text('[[rule]]\npath = "ckpt/**"\ndurability = "writeback"\n')
    given = ["file:///data", "mnt", "--rules", "rules.toml", "--cache-dir", "cache", "--staging-timeout", "90s"]
    unit = parse(unit_of(given))
    wanted = config_of([*given, "--foreground"])
    monkeypatch.chdir("/")
    assert config_of(words(unit["ExecStart"][0])[2:]) == wanted
    assert "/data" in unit["RequiresMountsFor"][0].split()


def test_directory_in_a_mount_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(store=StoreConfig(source=Source.parse("s3://bucket/lake")), path="ckpt")
    monkeypatch.setattr("lakefs_fuse.cli.mount.find_place", lambda path, options: place)
    monkeypatch.chdir(tmp_path)
    unit = parse(unit_of(["--immutable", "mnt/ckpt", "frozen"]))
    assert words(unit["ExecStart"][0])[2:4] == [f"{tmp_path}/mnt/ckpt", f"{tmp_path}/frozen"]


def test_credentials_come_from_a_file_and_users_have_units_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "never-to-be-seen")
    system, user = unit_of(ARGUMENTS), unit_of(ARGUMENTS, uid=1000)
    assert parse(system)["EnvironmentFile"] == ["-/etc/lakefs-fuse/lakefs-mnt-my-lake-4cbe1f06.env"]
    assert parse(user)["EnvironmentFile"] == ["-%h/.config/lakefs-fuse/lakefs-mnt-my-lake-4cbe1f06.env"]
    assert parse(user)["WantedBy"] == ["default.target"]
    assert parse(user)["ExecStart"] == parse(system)["ExecStart"]
    assert "never-to-be-seen" not in system + user


def test_systemd_understands_it(tmp_path: Path) -> None:
    """Where systemd is installed; elsewhere the tests above have read it as its manual says."""
    program = tmp_path / "lakefs-fuse"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = unit_of(ARGUMENTS).replace(PROGRAM[0], str(program))
    (tmp_path / "lakefs-mnt-my-lake.service").write_text(text)
    analyze = shutil.which("systemd-analyze")
    if analyze is not None:
        done = subprocess.run(
            [analyze, "verify", str(tmp_path / "lakefs-mnt-my-lake.service")],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (0, "")
    assert text.count("\n[") == 3


def test_it_is_printed_and_nothing_is_mounted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "start", lambda config: pytest.fail("mounted"))
    assert run(["mount", f"file://{tmp_path}/none", "/mnt/lake", "--print-systemd-unit"]) == 0
    unit = parse(capsys.readouterr().out)
    program = words(unit["ExecStart"][0])[0]
    assert os.access(program, os.X_OK)
    assert run(["mount", "nothing", "/mnt/lake", "--print-systemd-unit"]) == 2
    assert run(["mount", "file:///data", "/mnt/lake", "--foreground", "--print-systemd-unit", "--uploads", "0"]) == 2


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def at(address: str) -> None:
        monkeypatch.setenv(notify.VARIABLE, address)

    return at


def test_nobody_listens_to_notifications(told: Callable[[str], None], tmp_path: Path) -> None:
    for address in ("", str(tmp_path / "gone"), "@lakefs-nobody", "vsock:2:1"):
        told(address)
        notify.notify(notify.READY)
