"""The commands of docs/operations.md about write-back and unmounting, run as they are printed."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lakefs_fuse.environment.failpoints import NAMES
from tests.mount.fork_server import ForkServer
from tests.mount.lakes import CLI, Lake, environment, noise
from tests.servers import REGION, Server
from tests.tiers import IS_LONG

DOCS = Path(__file__).parents[2] / "docs"


def section(page: str, title: str) -> str:
    """From a heading to the next of its level."""
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE)
    assert match, title
    return match[1]


def commands(text: str) -> list[str]:
    """What is typed after a prompt, in order."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    return [line[2:] for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.startswith("$ ")]


class Terminal:
    """A shell in which /mnt/lake is a directory of this test, and so on."""

    def __init__(self, directory: Path, server: Server, bucket: str) -> None:
        self.directory, self.point = directory, directory / "mnt"
        self.shard = b"shard "
        self._names = {
            "s3://bucket/prefix": f"s3://{bucket}/prefix",
            "/mnt/lake": str(self.point),
            "/nvme/lakefs": str(directory / "cache"),
            "--staging-size 200GiB": "--staging-size 2GiB",
        }
        for made in (self.point, directory / "home", directory / "bin"):
            made.mkdir(parents=True)
        program = directory / "bin" / "lakefs-fuse"
        program.write_text(f'#!/bin/sh\nexec {" ".join(CLI)} "$@"\n')
        program.chmod(0o755)
        path = f"{program.parent}:{Path(CLI[0]).parent}:{os.environ['PATH']}"
        found = {"AWS_ENDPOINT_URL": server.url, "AWS_DEFAULT_REGION": REGION, "PATH": path}
        self._env = environment(directory / "home") | found

    def run(self, command: str) -> str:
        """Standard output; the command must succeed."""
        for printed, real in self._names.items():
            command = command.replace(printed, real)
        words, server = shlex.split(command, comments=True), ForkServer.of_this_process()
        if words[0] == "lakefs-fuse" and "|" not in words and not IS_LONG and server.suits(self._env):
            done = server.run(words[1:], self._env, 120, str(self.directory))
        else:
            done = subprocess.run(
                ["bash", "-c", command],
                env=self._env,
                cwd=self.directory,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def mount(self, command: str) -> None:
        """In place of what is mounted; and then there is something that is not in the store yet."""
        self.unmount()
        self.run(command)
        self.shard += b"again"
        (self.point / "ckpt" / "step100").mkdir(parents=True, exist_ok=True)
        for name in ("a.pt", "a.pt.conflict-1f2e3d4c"):
            (self.point / "ckpt" / name).write_bytes(noise(20_000, len(name)))
        (self.point / "ckpt" / "step100" / "shard0").write_bytes(self.shard)

    def unmount(self) -> None:
        if os.path.ismount(self.point):
            self.run("lakefs-fuse umount /mnt/lake")


@pytest.fixture
def terminal(
    dev_fuse: Path, seaweed: Server, new_bucket: Callable[[Server], str], tmp_path: Path
) -> Iterator[Terminal]:
    """Nothing is mounted yet, and nothing stays mounted."""
    terminal = Terminal(tmp_path, seaweed, new_bucket(seaweed))
    rules = re.search(r"```toml\n(.*?)```", section("operations.md", "Packs, and what differs by path"), re.DOTALL)
    assert rules
    (tmp_path / "rules.toml").write_text(rules[1])
    try:
        yield terminal
    finally:
        terminal.unmount()


def test_the_commands_about_write_back(terminal: Terminal) -> None:
    said: dict[str, str] = {}
    typed = commands(section("operations.md", "Write-back"))
    assert len(typed) > 10
    for command in typed:
        if command.startswith("lakefs-fuse mount"):
            terminal.mount(command)
        else:
            said[command.partition("#")[0].strip()] = terminal.run(command)
    state, location, oldest, waiting, conflicts = (
        next(said[command] for command in said if part in command)
        for part in ("lakefs.state", "lakefs.location", "oldest_s", "waiting_because", "find ")
    )
    assert state in ("dirty", "uploading", "durable")
    assert location.startswith(("file://", "s3://"))
    assert float(oldest) >= 0
    assert re.fullmatch(r"\n\d+\n\d+\n", waiting), "the store is not away"
    assert conflicts == f"{terminal.point}/ckpt/a.pt.conflict-1f2e3d4c\n"
    assert not (terminal.point / "ckpt" / "a.pt.conflict-1f2e3d4c").exists()
    ours = noise(20_000, len("a.pt.conflict-1f2e3d4c"))
    assert (terminal.point / "ckpt" / "a.pt").read_bytes() == ours
    terminal.unmount()
    terminal.run("lakefs-fuse mount s3://bucket/prefix /mnt/lake --cache-dir other")
    assert (terminal.point / "ckpt" / "a.pt").read_bytes() == ours


@pytest.mark.long
def test_the_commands_about_unmounting(terminal: Terminal) -> None:
    typed = commands(section("operations.md", "Unmounting"))
    assert len(typed) == 3
    for command in typed:
        terminal.mount("lakefs-fuse mount s3://bucket/prefix /mnt/lake --cache-dir /nvme/lakefs --durability writeback")
        terminal.run(command)
        assert not os.path.ismount(terminal.point)
        terminal.run("lakefs-fuse mount s3://bucket/prefix /mnt/lake --cache-dir other")
        assert (terminal.point / "ckpt" / "step100" / "shard0").read_bytes() == terminal.shard
        terminal.unmount()


@pytest.mark.long
@pytest.mark.needs_root("an ordinary user mounts in a mount only where that one has --allow-other")
def test_the_commands_about_a_dataset_that_stays(terminal: Terminal) -> None:
    images = terminal.point / "datasets" / "images"
    terminal.run("lakefs-fuse mount s3://bucket/prefix /mnt/lake --cache-dir /nvme/lakefs --pack always")
    images.mkdir(parents=True)
    (images / "a").write_bytes(noise(3000))
    terminal.run("sync /mnt/lake")
    whole, _, _ = section("operations.md", "Mounting").partition("### The cache directory")
    typed = commands(whole.partition("### A dataset that stays as it is")[2])
    assert len(typed) == 9
    said = {}
    try:
        for command in typed:
            said[command.partition("#")[0].strip()] = terminal.run(command)
            if " mount --immutable" in f" {command}":
                assert images.is_mount()
                assert (images / "a").read_bytes() == noise(3000)
    finally:
        if images.is_mount():
            terminal.run("lakefs-fuse umount /mnt/lake/datasets/images")
    assert not images.is_mount()
    state, moved, listed = (
        next(said[command] for command in said if part in command) for part in (".immutable", "refresh", "--list")
    )
    assert '"path": "datasets/images"' in state
    assert moved.endswith("0 names changed\n")
    assert listed.startswith("v1 ")


def test_stats_have_each_value_that_the_guide_explains(lake: Lake) -> None:
    table, _, _ = section("operations.md", "Watching").partition("### What df shows")
    named: list[str] = []
    for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE):
        for key in re.findall(r"`([^`]+)`", cell):
            named.append(named[-1].rpartition(".")[0] + key if key.startswith(".") else key)
    stats = lake.stats()
    assert len(named) > 100
    assert [key for key in named if key != "--json" and not has_value(stats, key)] == []


def has_value(stats: object, key: str) -> bool:
    """Whether a dotted key leads to a value; ``*`` stands for any."""
    found = stats
    for part in key.split("."):
        if part == "*":
            return isinstance(found, dict)
        if not isinstance(found, dict) or part not in found:
            return False
        found = found[part]
    return True


def test_every_point_at_which_a_crash_is_tested_is_told() -> None:
    _, _, told = (DOCS / "architecture.md").read_text().partition("### Crash points under write-back\n")
    told, _, _ = told.partition("\n## ")
    assert [name for name in NAMES if f"`{name}`" not in told] == []
