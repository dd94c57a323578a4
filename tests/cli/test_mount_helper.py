"""`mount.lakefs`, called as mount(8) calls it, and by mount(8)."""

from __future__ import annotations

import fcntl
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lakefs_fuse.cli import preflight, spawn
from lakefs_fuse.cli.mount_helper import helper
from lakefs_fuse.config import GIB, MountConfig
from lakefs_fuse.control.mounts import mount_at
from tests.mount.lakes import eventually
from tests.temporary_files import DISK

HELPER = Path("/sbin/mount.lakefs")
"""Where mount(8) looks, and nowhere else."""


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> list[MountConfig]:
    """The configurations that would have been mounted."""
    configs: list[MountConfig] = []
    monkeypatch.setattr(spawn, "start", configs.append)
    monkeypatch.setattr(preflight, "check", lambda config, host: [])
    return configs


def test_as_mount8_calls_it(mounted: list[MountConfig], capsys: pytest.CaptureFixture[str]) -> None:
    given = "s3://bucket/prefix /mnt/lake -n -v -o rw,noatime,_netdev,nofail,cache_size=5G -o allow_other -t lakefs"
    assert helper(given.split()) == 0
    (config,) = mounted
    assert (str(config.store.source), config.mountpoint) == ("s3://bucket/prefix/", "/mnt/lake")
    assert (config.cache_bytes_max, config.allow_other, config.read_only) == (5 * GIB, True, False)
    assert "s3://bucket/prefix on /mnt/lake" in capsys.readouterr().out
    assert helper(["file:///data", "/mnt/lake", "-o", "ro"]) == 0
    assert mounted[-1].read_only


def test_fake_checks_and_does_not_mount(mounted: list[MountConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert helper(["file:///data", "/mnt/lake", "-f", "-o", "ro"]) == 0
    assert helper(["file:///data", "/mnt/lake", "-f", "-o", "bogus"]) == 1
    assert helper(["file:///data", "/mnt/lake", "-f", "-o", "durability=xx"]) == 1
    assert "(see `lakefs-fuse mount --help`)" in capsys.readouterr().err
    assert helper(["nothing", "/mnt/lake", "-f"]) == 1
    assert mounted == []


def test_sloppy_leaves_out_what_is_not_known(mounted: list[MountConfig]) -> None:
    assert helper(["file:///data", "/mnt/lake", "-s", "-o", "bogus,uid=7,noexec,ro"]) == 0
    (config,) = mounted
    assert (config.uid, config.read_only) == (7, True)
    assert helper(["file:///data", "/mnt/lake", "-o", "bogus,uid=7"]) == 1


@pytest.mark.parametrize(
    "arguments", [[], ["file:///data"], ["a", "b", "c"], ["file:///data", "/mnt", "-x"], ["a", "/b", "-N", "/ns"]]
)
def test_what_cannot_be_understood(
    mounted: list[MountConfig], capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert helper(arguments) == 1
    assert "mount.lakefs" in capsys.readouterr().err
    assert mounted == []


def test_error_of_an_option_names_help_that_exists(
    mounted: list[MountConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    for fake in ([], ["-f"]):
        assert helper([*fake, "file:///data", "/mnt/lake", "-o", "durability=sometimes"]) == 1
        assert "(see `lakefs-fuse mount --help`)" in capsys.readouterr().err
    assert mounted == []


def test_failing_is_told_as_mount8_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert helper(["file:///data", str(tmp_path / "nowhere"), "-o", f"cache_dir={tmp_path}-cache"]) == 32
    assert "does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(("code", "told"), [(0, 0), (2, 1), (1, 32), (70, 32), (75, 32), (130, 8), (143, 8)])
def test_exit_codes_are_those_of_mount8(monkeypatch: pytest.MonkeyPatch, code: int, told: int) -> None:
    monkeypatch.setattr("lakefs_fuse.cli.mount_helper.run", lambda args: code)
    assert helper(["file:///data", "/mnt/lake"]) == told


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert helper(["-h"]) == 0
    assert "SOURCE MOUNTPOINT" in capsys.readouterr().out


@contextmanager
def installed(directory: Path) -> Iterator[None]:
    """The helper of this checkout in /sbin, for one test of this machine at a time."""
    program = directory / "mount.lakefs"
    command = shlex.join([sys.executable, "-P", "-c", "from lakefs_fuse.cli.mount_helper import main; main()"])
    root = Path(__file__).parents[2]
    program.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(root))} exec {command} "$@"\n')
    program.chmod(0o755)
    with (Path(DISK) / "lakefs-test-mount-helper.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        HELPER.symlink_to(program)
        try:
            yield
        finally:
            HELPER.unlink()


@pytest.mark.needs_root("mount(8) looks for helpers in /sbin only, and mounts for nobody else what fstab does not name")
def test_mount8_and_fstab(tmp_path: Path) -> None:
    for name in ("store", "mnt"):
        (tmp_path / name).mkdir()
    (tmp_path / "store" / "file").write_text("here")
    point = tmp_path / "mnt"
    options = f"cache_dir={tmp_path}/cache,log_file={tmp_path}/log,free_space=64M"
    fstab = tmp_path / "fstab"
    fstab.write_text(f"file://{tmp_path}/store {point} lakefs _netdev,nofail,{options} 0 0\n")

    def mount8(*arguments: str) -> int:
        environment = {"PATH": os.environ["PATH"]}
        return subprocess.run(["mount", *arguments], env=environment, timeout=90, check=False).returncode

    def gone() -> bool:
        return mount_at(str(point)) is None and "closed" in (tmp_path / "log").read_text().rsplit("pid ", 1)[-1]

    with installed(tmp_path):
        assert mount8("-t", "lakefs", f"file://{tmp_path}/store", str(point), "-o", options) == 0
        try:
            assert (point / "file").read_text() == "here"
            assert mount8("-a", "-T", str(fstab)) == 0, "it is seen to be mounted already"
            subprocess.run(["umount", point], check=True)
            eventually(gone, "unmounted")
            assert mount8("-f", "-T", str(fstab), str(point)) == 0
            assert mount_at(str(point)) is None
            assert mount8("-a", "-T", str(fstab)) == 0
            found = mount_at(str(point))
            assert found is not None
            assert (found.fstype, found.source) == ("fuse.lakefs", f"file://{tmp_path}/store")
            assert mount8("-t", "lakefs", f"file://{tmp_path}/store", str(point), "-o", "bogus") == 1
        finally:
            subprocess.run(["umount", point], check=True)
            eventually(gone, "unmounted")
