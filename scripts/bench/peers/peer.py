"""What a peer is: something that shows data below a directory, or reaches them with a client.

A peer is attached with nothing cached and nothing mounted before, used, and detached; `detach` never fails and may come
at any time. A peer that writes says when everything is in the store (`drained`). Used from one thread.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from pathlib import Path

from scripts.bench import machine
from scripts.bench.access import Access, Paths
from scripts.bench.stage import Stage, marker

MOUNT_S_MAX = 30.0
STOP_S_MAX = 10.0


class PeerFailed(Exception):
    """It could not do what it is there for; the message is shown in its place."""


class Peer(ABC):
    """``kind``: ours, mount (somebody else's), client (bare) or disk. ``remark`` stands beside its numbers."""

    name: str
    kind: str
    remark: str = ""
    writes = True
    lists_groups: tuple[str, ...] | None = None
    """Groups of workloads that it is for; None: all."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    @abstractmethod
    def version(self) -> str:
        """As it says itself. Raises PeerFailed where it is not installed."""

    @abstractmethod
    def options(self) -> str:
        """What it is started with, for the report."""

    def provide(self, prefix: str, what: str) -> None:
        """The data are there below ``prefix`` before it is attached; once for each prefix. By default as objects."""
        self.stage.provide(prefix, what)

    def area(self, prefix: str) -> None:
        """An empty place to write into is there."""
        marker(self.stage, prefix)

    @abstractmethod
    def attach(self, prefix: str) -> Access:
        """With empty caches."""

    def restart(self) -> Access:
        """As after a restart of the machine: attached again to the same, with what it keeps on disk."""
        raise PeerFailed("has nothing to restart")

    def loading(self, source: Path, prefix: str) -> tuple[list[str], dict[str, str]] | None:
        """The command that loads a local directory without a mount, and what its environment needs, if it has one."""
        return None

    def warming(self, prefix: str) -> list[str] | None:
        """The command that fetches all that is attached with this prefix into its cache, if it has one."""
        return None

    def drained(self, limit_s: float) -> bool:
        """Everything written is in the store; whether it was in time."""
        return True

    @abstractmethod
    def detach(self) -> None:
        """Nothing of it is left: no mount, no process, no cache."""

    def close(self) -> None:
        """At the end of the run."""
        self.detach()

    def processes(self) -> list[int]:
        """Of the daemon, children included; empty where there is none."""
        return []

    def upcalls(self) -> dict[str, int] | None:
        return None


class Mount(Peer):
    """One whose process stays in the foreground, is waited for until it mounts, and ends when it is unmounted."""

    kind = "mount"

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.place = stage.directory / "peers" / self.name.replace(" ", "-")
        self.mountpoint, self.cache, self.log = self.place / "mnt", self.place / "cache", self.place / "log"
        self._process: subprocess.Popen[bytes] | None = None
        self._prefix = ""

    @abstractmethod
    def command(self, prefix: str) -> list[str]: ...

    def environment(self) -> dict[str, str]:
        return {}

    def options(self) -> str:
        words = self.stage.scrub(" ".join(self.command("PREFIX"))).split()
        return " ".join([Path(words[0]).name, *words[1:]])

    def attach(self, prefix: str) -> Access:
        self.detach()
        return self._start(prefix)

    def _start(self, prefix: str) -> Access:
        for made in (self.mountpoint, self.cache):
            made.mkdir(parents=True, exist_ok=True)
        self._prefix = prefix
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command(prefix), env={**os.environ, "HOME": str(self.place), **self.environment()},
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.place,
            )  # fmt: skip
        deadline = time.monotonic() + MOUNT_S_MAX
        while not os.path.ismount(self.mountpoint):
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise PeerFailed(f"does not mount: {self._last_words()}")
            time.sleep(0.02)
        return Paths(str(self.mountpoint))

    def _last_words(self) -> str:
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return self.stage.scrub(lines[-1])[:300] if lines else "it says nothing"

    def restart(self) -> Access:
        self._stop()
        machine.drop_caches()
        return self._start(self._prefix)

    def detach(self) -> None:
        self._stop()
        for path in (self.cache, self.log):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def _stop(self) -> None:
        command = ["fusermount3", "-u", str(self.mountpoint)]
        if os.path.ismount(self.mountpoint) and subprocess.run(command, capture_output=True, check=False).returncode:
            unmount_lazily(self.mountpoint)
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            unmount_lazily(self.mountpoint)
            end(process)

    def processes(self) -> list[int]:
        return machine.tree([self._process.pid]) if self._process is not None else []


def unmount_lazily(mountpoint: Path) -> None:
    """Whatever is still there."""
    subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], capture_output=True, check=False)


def end(process: subprocess.Popen[bytes]) -> None:
    """A process of ours, first asked and then killed."""
    process.terminate()
    try:
        process.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S_MAX)


def said(command: list[str], pick: int = 0) -> str:
    """A line of what a program says of its version. Raises PeerFailed where it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerFailed(f"is not installed: {error}") from error
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[min(pick, len(lines) - 1)].strip() if lines else "unknown"
