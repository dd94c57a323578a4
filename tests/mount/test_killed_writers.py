"""Programs that are killed while they write: a checkpoint keeps the version before, other files what was written."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, Lake, eventually

WRITE = """
import os, signal, sys, threading, time
path, size, ends_by = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
file = open(path, "wb")
for _ in range(0, size, 1 << 20):
    file.write(bytes(1 << 20))
file.flush()
again = open(path, "r+b")
again.write(b"as the threads of a downloader do")
again.flush()
os._exit(0) if ends_by == 0 else os.kill(os.getpid(), ends_by)
"""


def write(lake: Lake, name: str, size: int, ends_by: int) -> None:
    """Ends without a call of `close`: by a signal, or by itself (0)."""
    run = subprocess.run([sys.executable, "-c", WRITE, str(lake.path / name), str(size), str(ends_by)], check=False)
    assert run.returncode == -ends_by


@pytest.mark.parametrize("durability", ["close", pytest.param("writeback", marks=pytest.mark.long)])
@pytest.mark.usefixtures("with_hooks")
def test_checkpoint_of_a_killed_program_keeps_the_version_before(make_lake: LakeMaker, durability: str) -> None:
    lake = make_lake("file", "--durability", durability).mount()
    last = lake.path / "last.pt"
    last.write_bytes(b"good")
    logs, orphans = set[str](), 0
    for ends_by, size in [(signal.SIGKILL, MIB), (signal.SIGTERM, 20 * MIB), (signal.SIGSEGV, MIB)]:
        for name in ("last.pt", f"new{ends_by}.pt"):
            write(lake, name, size, ends_by)
        orphans += 1  # the earlier one of last.pt was dropped
        wait_for_orphans(lake, orphans + 1)
        logs.add(f"run{ends_by}.log")
        write(lake, f"run{ends_by}.log", size, ends_by)
    write(lake, "exits.pt", MIB, 0)
    assert lake.cli("flush", str(lake.path)).returncode == 0
    assert {path.name for path in lake.path.iterdir()} == {"last.pt", "exits.pt", *logs}
    assert last.read_bytes() == b"good"
    last.write_bytes(b"better")
    wait_for_orphans(lake, orphans)


def wait_for_orphans(lake: Lake, count: int) -> None:
    eventually(lambda: lake.number("dirty.orphans") == count, f"{count} orphans")
