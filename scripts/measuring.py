"""What the measuring scripts share: a store that is as far away as it is told to be, clocks and counters.

The store and everything that a script writes lie in one temporary directory, which goes when the script ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, latency, make_bucket, seaweedfs

LAKEFS = [sys.executable, "-m", "lakefs_fuse"]


@contextlib.contextmanager
def store_with_bucket(bucket: str, delay_ms: int) -> Iterator[tuple[Path, str]]:
    """A directory to work in and the URL of SeaweedFS, behind HAProxy where ``delay_ms`` of latency a request are asked
    for. Its credentials are in the environment, for boto3 and for mounts."""
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_DEFAULT_REGION=REGION)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lakefs-measure-")))
        server = stack.enter_context(seaweedfs(directory / "server"))
        make_bucket(server, bucket)
        if delay_ms:
            server = stack.enter_context(latency(server, directory / "proxy", delay_ms))
        yield directory, server.url


def seconds(job: Callable[[], object]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def statistics_of(mountpoint: Path) -> dict[str, Any]:
    done = subprocess.run([*LAKEFS, "stats", str(mountpoint), "--json"], capture_output=True, check=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


class PeakMemory:
    """Largest resident memory of a process while it is watched, in MiB."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._stopped = threading.Event()
        self.mib = 0.0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stopped.wait(0.05):
            with contextlib.suppress(OSError):
                for line in self._status.read_text().splitlines():
                    if line.startswith("VmRSS:"):
                        self.mib = max(self.mib, int(line.split()[1]) / 1024)

    def stop(self) -> float:
        self._stopped.set()
        self._thread.join()
        return self.mib
