"""Lakes under write-back on a store that fails on command."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from tests.mount.lakes import Lake, eventually

RETRY_S = "1"
"""How long one request is tried again."""
TTL_S = 0.2
OPTIONS = ("--durability", "writeback", "--retry-timeout", RETRY_S, "--metadata-ttl", str(TTL_S))
FOR_EVER = 10**9
COMMITS = ".lakefs/commits/"


def state(path: Path) -> str:
    return os.getxattr(path, "user.lakefs.state").decode()


def location(path: Path) -> str:
    return os.getxattr(path, "user.lakefs.location").decode()


def sync_directory(path: Path) -> None:
    """As `sync DIR` does."""
    subprocess.run(["sync", str(path)], check=True)


def flush(lake: Lake, path: Path | None = None) -> None:
    """`lakefs-fuse flush`, which must succeed."""
    done = lake.cli("flush", str(path or lake.path))
    assert done.returncode == 0, f"{done.stderr}\n{lake.log()}"


def becomes(path: Path, wanted: str, timeout_s: float = 60.0) -> None:
    eventually(lambda: state(path) == wanted, f"{path.name} is {wanted}", timeout_s)


def written_back(lake: Lake, timeout_s: float = 60.0) -> None:
    """Everything accepted becomes durable by itself."""
    eventually(lambda: lake.number("writeback.files") == 0, "all is durable", timeout_s)


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process has used, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def requests(lake: Lake) -> int:
    """Attempts that left the daemon."""
    stats = lake.stats()
    store = stats["store"]
    assert isinstance(store, dict)
    return sum(store["requests"].values())


def took_s(began: float) -> float:
    return time.monotonic() - began
