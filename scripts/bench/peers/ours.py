"""This filesystem: read-write, write-back, immutable, and read-write on a data set that `ingest` has packed."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from lakefs_fuse import __version__
from lakefs_fuse.control.client import connect
from lakefs_fuse.errors import LakeError
from scripts.bench import machine
from scripts.bench.access import Access, Paths
from scripts.bench.peers.peer import Mount, PeerFailed, unmount_lazily
from scripts.bench.stage import BUCKET

LAKEFS = [sys.executable, "-P", "-m", "lakefs_fuse"]
MOUNT_S_MAX = 60.0
UMOUNT_S_MAX = 20.0
INGEST_S_MAX = 300.0


def lakefs(*arguments: str, limit_s: float) -> str:
    """One command of the program; what it printed. Raises PeerFailed with its own words."""
    try:
        done = subprocess.run([*LAKEFS, *arguments], capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"`{arguments[0]}` took more than {limit_s:.0f} s") from error
    if done.returncode:
        raise PeerFailed(f"`{arguments[0]}`: {done.stderr.strip()}")
    return done.stdout


def statistics_of(mountpoint: Path) -> dict[str, Any]:
    """What `stats --json` prints, without starting a program for it."""
    client = connect(os.path.realpath(mountpoint))
    if client is None:
        raise PeerFailed("its daemon does not answer")
    with client:
        return client.statistics()


class Lakefs(Mount):
    """Read-write, all by default: ``close()`` waits for the store."""

    name, kind = "lakefs", "ours"
    remark = "read-write, every option at its default"
    more: tuple[str, ...] = ()

    def version(self) -> str:
        return __version__

    def command(self, prefix: str) -> list[str]:
        shared = ["--endpoint-url", self.stage.store.url, "--cache-dir", str(self.cache), "--log-file", str(self.log)]
        bucket, inside = self.stage.place(prefix)
        return ["lakefs-fuse", "mount", f"s3://{bucket}/{inside}", str(self.mountpoint), *shared, *self.more]

    def _start(self, prefix: str) -> Access:
        self.mountpoint.mkdir(parents=True, exist_ok=True)
        self._prefix = prefix
        lakefs(*self.command(prefix)[1:], limit_s=MOUNT_S_MAX)
        return Paths(str(self.mountpoint))

    def _daemon(self) -> int:
        return int(statistics_of(self.mountpoint)["daemon"]["pid"])

    def processes(self) -> list[int]:
        """The supervisor, which is the daemon's parent, and all below."""
        if not os.path.ismount(self.mountpoint):
            return []
        daemon = self._daemon()
        parent = int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])
        return machine.tree([parent if parent != 1 else daemon])

    def upcalls(self) -> dict[str, int] | None:
        counts: dict[str, int] = statistics_of(self.mountpoint)["upcalls"]
        return counts

    def warming(self, prefix: str) -> list[str] | None:
        return [*LAKEFS, "cache", "warm", str(self.mountpoint)]

    def drained(self, limit_s: float) -> bool:
        try:
            lakefs("flush", str(self.mountpoint), "--timeout", f"{limit_s:.0f}s", limit_s=limit_s + UMOUNT_S_MAX)
        except PeerFailed:
            return False
        return True

    def _stop(self) -> None:
        if not os.path.ismount(self.mountpoint):
            return
        processes: list[int] = []
        with contextlib.suppress(PeerFailed, LakeError, OSError):
            processes = self.processes()
        try:
            lakefs("umount", str(self.mountpoint), "--timeout", f"{UMOUNT_S_MAX:.0f}s", limit_s=2 * UMOUNT_S_MAX)
        except PeerFailed:
            unmount_lazily(self.mountpoint)
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for pid in processes:
            machine.wait_gone(pid, UMOUNT_S_MAX)


class LakefsWriteback(Lakefs):
    """``close()`` waits for the local disk."""

    name = "lakefs writeback"
    remark = "read-write, `close()` waits for the local disk"
    more = ("--durability", "writeback")
    lists_groups = ("checkpoint", "small files")


class LakefsImmutable(Lakefs):
    """A data set that stays as it is."""

    name = "lakefs immutable"
    remark = "the kernel remembers everything; mounting lists it all, which is not timed"
    more = ("--immutable",)
    writes = False
    lists_groups = ("names", "epochs", "large files", "warm")


class LakefsPacked(Lakefs):
    """Read-write, on a copy of the data that was packed beforehand."""

    name = "lakefs packed"
    remark = "read-write; the data were loaded with `ingest` and folded with `snapshot`, not timed"
    lists_groups = ("names", "epochs", "warm", "ingest")

    def provide(self, prefix: str, what: str) -> None:
        packed = f"packed-{prefix}"
        if packed not in self.stage.provided:
            target, endpoint = f"s3://{BUCKET}/{packed}", ["--endpoint-url", self.stage.direct.url]
            lakefs("ingest", str(self.stage.source(what)), target, *endpoint, limit_s=INGEST_S_MAX)
            lakefs("snapshot", target, *endpoint, limit_s=INGEST_S_MAX)
            self.stage.provided.add(packed)

    def loading(self, source: Path, prefix: str) -> tuple[list[str], dict[str, str]] | None:
        bucket, inside = self.stage.place(prefix)
        target = f"s3://{bucket}/{inside}"
        return [*LAKEFS, "ingest", str(source), target, "--endpoint-url", self.stage.store.url], {}

    def command(self, prefix: str) -> list[str]:
        return super().command(f"packed-{prefix}")
