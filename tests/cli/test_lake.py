"""The commands with the real daemon on a real lake in a directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from lakefs_fuse.control.mounts import mount_at
from lakefs_fuse.control.runtime import client_socket_paths
from tests.mount.fork_server import ForkServer
from tests.tiers import IS_LONG

LAKEFS = [sys.executable, "-P", "-m", "lakefs_fuse"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


class Lake:
    """A directory as the store, a mountpoint, and the program."""

    def __init__(self, root: Path) -> None:
        self.store, self.point, self.root = root / "store", root / "mnt", root
        self.store.mkdir()
        self.point.mkdir()

    def command(self, *arguments: str | Path) -> list[str]:
        return [*LAKEFS, *map(str, arguments)]

    def run(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Mounting and unmounting are started as a user does; `make test` forks what asks in between."""
        if arguments[0] not in ("mount", "umount") and not IS_LONG:
            return ForkServer.of_this_process().run([*map(str, arguments)], os.environ, 90)
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, timeout=90, check=False, env=ENVIRONMENT
        )

    def mount_arguments(self, *more: str) -> list[str]:
        options = ["--cache-dir", f"{self.root}/cache", "--log-file", f"{self.root}/log", "--free-space", "64M"]
        return ["mount", f"file://{self.store}", str(self.point), *options, *more]

    def is_mounted(self) -> bool:
        return mount_at(str(self.point)) is not None


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lake]:
    made = Lake(tmp_path)
    yield made
    if made.is_mounted():
        subprocess.run(["fusermount3", "-u", "-z", made.point], check=True)


def test_a_day_in_the_life_of_a_lake(lake: Lake) -> None:
    (lake.store / "given").write_text("by others")
    mounting = lake.run(*lake.mount_arguments())
    said = [line for line in mounting.stderr.splitlines() if not line.startswith("waiting for the daemon")]
    assert (mounting.returncode, mounting.stdout, said) == (0, "", [])
    assert (lake.point / "given").read_text() == "by others"
    (lake.point / "mine").write_text("by us")
    assert (lake.store / "mine").read_text() == "by us"
    assert lake.run("flush", lake.point / "mine").returncode == 0
    with (lake.point / "being written").open("wb") as file:
        file.write(b"some bytes")
        file.flush()
        assert lake.run("flush", lake.point / "being written").returncode == 0
    (lake.point / "being written").unlink()
    for name in ("typo", "typo/deeper", "mine/below a file", "being written"):
        told = lake.run("flush", lake.point / name)
        assert (told.returncode, told.stdout) == (1, "")
        assert told.stderr.startswith(f"lakefs-fuse: {lake.point / name} does not exist: name a file")

    part = lake.run("snapshot", lake.point / "mine", "--list")
    assert part.returncode == 0
    assert part.stderr.startswith(f"lakefs-fuse: {lake.point / 'mine'} is in the lake file://{lake.store}")
    assert lake.run("snapshot", lake.point, "--list").stderr == ""

    values = json.loads(lake.run("stats", "--json", lake.point).stdout)
    assert values["store"]["requests"]["put"] >= 1
    assert values["upcalls"]["open"] >= 1
    assert values["dirty"]["files"] == 0
    assert values["memory"]["rss"] > 1 << 20
    assert values["mount"]["source"] == f"file://{lake.store}"

    again = lake.run(*lake.mount_arguments())
    assert again.returncode == 1
    assert "is in use" in again.stderr
    elsewhere = lake.root / "elsewhere"
    elsewhere.mkdir()
    arguments = lake.mount_arguments()
    arguments[2] = str(elsewhere)
    second = lake.run(*arguments)
    assert second.returncode == 1
    assert second.stderr.count("\n") == 1
    assert "cache" in second.stderr

    unmounting = lake.run("umount", lake.point)
    assert (unmounting.returncode, unmounting.stderr) == (0, "")
    assert not lake.is_mounted()
    pid = values["daemon"]["pid"]
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


@pytest.mark.long  # each kill in mount/test_crash.py does so
def test_a_killed_daemon_leaves_a_mount_that_umount_clears(lake: Lake) -> None:
    assert lake.run(*lake.mount_arguments("--no-supervise")).returncode == 0
    pid = json.loads(lake.run("stats", "--json", lake.point).stdout)["daemon"]["pid"]
    os.kill(pid, signal.SIGKILL)
    assert "is dead: run" in lake.run("stats", lake.point).stderr
    assert "daemon died" in lake.run(*lake.mount_arguments()).stderr
    sockets = [path for path in client_socket_paths(str(lake.point), os.geteuid()) if path.exists()]
    cleared = lake.run("umount", lake.point)
    assert cleared.returncode == 1
    assert "had died" in cleared.stderr
    assert sockets
    assert not any(path.exists() for path in sockets)
    # What else the killed one left is not in the way.
    assert lake.run(*lake.mount_arguments()).returncode == 0
    assert lake.run("umount", lake.point).returncode == 0


def test_in_the_foreground_sigterm_unmounts(lake: Lake) -> None:
    daemon = subprocess.Popen(
        lake.command(*lake.mount_arguments("--foreground")), stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    assert daemon.stderr is not None
    assert any("is mounted at" in line for line in iter(daemon.stderr.readline, "")), "it ended before"
    (lake.point / "mine").write_text("by us")
    daemon.send_signal(signal.SIGTERM)
    _, log = daemon.communicate(timeout=60)
    assert daemon.returncode == 0
    assert not lake.is_mounted()
    assert "INFO lakefs_fuse.daemon.mount_daemon: unmounted" in log
    assert (lake.store / "mine").read_text() == "by us"


def test_a_store_that_is_not_there_is_one_line(lake: Lake) -> None:
    lake.store.rmdir()
    result = lake.run(*lake.mount_arguments())
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert str(lake.store) in result.stderr
    assert not lake.is_mounted()
