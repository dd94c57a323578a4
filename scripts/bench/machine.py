"""The machine's side of a measurement: memory that is warm, caches that are cold, what processes spend.

Dropping the kernel's caches takes root; without it `drop_caches` answers False and the results say so.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

DROP = Path("/proc/sys/vm/drop_caches")
MIB = 1 << 20


def drop_caches() -> bool:
    """Pages, names and inodes that the kernel could read again are forgotten; what is dirty is written first."""
    os.sync()
    try:
        DROP.write_text("3\n")
    except OSError:
        return False
    return True


def warm(directory: Path, size: int) -> None:
    """Touches so much memory, anonymous and of a file: where machines are virtual the first touch is slow."""
    with mmap.mmap(-1, size) as view:
        for at in range(0, size, mmap.PAGESIZE):
            view[at] = 1
    path = directory / "warm"
    block = os.urandom(MIB)
    with path.open("wb") as file:
        for _ in range(size // MIB):
            file.write(block)
    path.unlink()


def roomy_directory(need_bytes: int) -> Path:
    """Where temporary files have room; what is in memory on some machines is no disk to compare with."""
    for candidate in (tempfile.gettempdir(), "/var/tmp", str(Path.home())):
        if filesystem_of(Path(candidate)) != "tmpfs" and shutil.disk_usage(candidate).free >= need_bytes:
            return Path(candidate)
    raise SystemExit(f"bench: {need_bytes >> 30} GiB of free disk are needed: set TMPDIR to where there are")


def filesystem_of(path: Path) -> str:
    """Its kind, as mount(8) says it."""
    best, kind = "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, where, found, *_ = line.split()
        if str(path).startswith(where.rstrip("/") + "/") and len(where) > len(best):
            best, kind = where, found
    return kind


def describe(directory: Path) -> dict[str, str]:
    """What a reader of the numbers has to know of this machine."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    memory = int(Path("/proc/meminfo").read_text().split()[1]) // 1024
    return {
        "processor": f"{len(os.sched_getaffinity(0))} × {model.partition(': ')[2] or platform.machine()}",
        "memory": f"{memory:,} MiB",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "disk": filesystem_of(directory),
        "load when it began": f"{os.getloadavg()[0]:.2f}",
    }


def tree(roots: Iterable[int]) -> list[int]:
    """These processes and all below them that run now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found = [root for root in roots if root in parents]
    for pid in found:
        found += [child for child, parent in parents.items() if parent == pid and child not in found]
    return found


def cpu_seconds(pids: Iterable[int]) -> float:
    """Of all their threads and of children that ended, in user and kernel mode, since they began."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            total += sum(int(field) for field in fields[11:15])
    return total / os.sysconf("SC_CLK_TCK")


def forget_peak(pids: Iterable[int]) -> None:
    """From now on the peak of resident memory is counted anew."""
    for pid in pids:
        with contextlib.suppress(OSError):
            Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_bytes(pids: Iterable[int]) -> int:
    """Sum of each one's largest resident memory since `forget_peak`."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    total += int(line.split()[1]) * 1024
    return total


def runs(pid: int) -> bool:
    """Not ended; what nobody has reaped yet has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_gone(pid: int, limit_s: float) -> bool:
    """Whether a process that is not our child ended in time."""
    deadline = time.monotonic() + limit_s
    while runs(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
