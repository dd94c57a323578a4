"""What each mechanism of the kernel's side gains: a workload with the mechanism on and off, in turns, on real mounts.

    PYTHONPATH=. python scripts/measure_mechanisms.py --quick
    PYTHONPATH=. python scripts/measure_mechanisms.py --only create-offload open-leases

Two daemons serve lakes on local directories. One is as it is; in the other one function is replaced when it starts,
so that the mechanism is never used. They have their turns in pairs, and who begins alternates. Printed are the
medians over the pairs of time, and of CPU time of the daemon, without the mechanism by that with it, each with an
interval that holds the median of such ratios with a probability of 96 % (the second smallest to the second largest of
nine); and for one run the requests of the kernel, the READs among them, the requests that entered Python, and those
to the store. On a busy machine time says little, CPU time more, and counts all.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.mount.lakes import Lake, eventually, file_lake

PAIRS = 9
CPU_TICK_S = 0.01
"""What the kernel counts CPU time in."""
SITE = """
import sys
if "lakefs_fuse.daemon.mount_daemon" in sys.orig_argv:
    from lakefs_fuse.kernel import create_offload, leases, page_cache_push, readdir
    from lakefs_fuse.kernel.native import hooks
    {}
"""
"""`sitecustomize` of a daemon that lacks a mechanism."""
KEPT = ("--metadata-ttl", "1h", "--refresh", "1h")
WRITE_BACK = ("--durability", "writeback", *KEPT)
NO_NAME_LEASES = "leases.Leases.count_created = lambda self, file: None"
NO_OFFLOAD = "create_offload.CreateOffload._reserve_inodes = lambda self, library: None"
FILE_BYTES = 4096
WRITERS = 16


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one run."""

    requests: int
    reads: int
    in_python: int
    to_store: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.requests - other.requests, self.reads - other.reads,
            self.in_python - other.in_python, self.to_store - other.to_store,
        )  # fmt: skip


def counts_of(lake: Lake) -> Counts:
    """Since the lake was mounted, but for FORGET, which comes when the kernel likes."""
    stats = lake.stats()
    upcalls, kernel, store = (dict(stats[name]) for name in ("upcalls", "kernel", "store"))  # type: ignore[call-overload]
    answered = {name: count for name, count in kernel["answered"].items() if name != "forget"}
    requests = sum(count for name, count in upcalls.items() if name != "forget")
    return Counts(requests, upcalls.get("read", 0), requests - sum(answered.values()), sum(store["requests"].values()))


@dataclass(frozen=True, slots=True)
class Mechanism:
    """``off`` is Python that a daemon without it runs first; ``both`` what both run. ``prepare`` is called once for a
    lake that is not mounted, and mounts it; ``run`` once for each of its turns."""

    name: str
    workload: str
    off: str
    prepare: Callable[[Lake, int], object]
    run: Callable[[Lake, int, int], object]
    files: int
    """Of the workload; a fifth of that with ``--quick``."""
    both: str = ""
    begin: Callable[[Lake], object] = lambda lake: None
    """Before each turn, not timed and not counted."""


def mount_for_writing(lake: Lake, files: int) -> None:
    lake.mount(*WRITE_BACK)


def create(lake: Lake, turn: int, files: int) -> None:
    """A single writer would wait for a sync of the disk with each file. Two files come before names are leased."""
    directory = lake.path / f"new-{turn}"
    directory.mkdir()
    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(lambda number: (directory / f"{number}").write_bytes(bytes(FILE_BYTES)), range(files)))


def probe_absent(lake: Lake, turn: int, files: int) -> None:
    """Programs that look for a name before they create it."""
    directory = lake.path / f"new-{turn}"
    directory.mkdir()

    def probe_and_create(number: int) -> None:
        if not (directory / f"{number}").exists():
            (directory / f"{number}").write_bytes(bytes(FILE_BYTES))

    with ThreadPoolExecutor(WRITERS) as pool:
        list(pool.map(probe_and_create, range(files)))


def mount_with_files(lake: Lake, files: int) -> None:
    lake.mount(*WRITE_BACK)
    (lake.path / "set").mkdir()
    for number in range(files):
        (lake.path / "set" / f"{number}").write_bytes(bytes(FILE_BYTES))
    lake.settle()
    read_all(lake, 0, files)


def read_all(lake: Lake, turn: int, files: int) -> None:
    for number in range(files):
        (lake.path / "set" / f"{number}").read_bytes()


def create_and_stat(lake: Lake, turn: int, files: int) -> None:
    """Each name makes the kernel drop its directory's attributes, which the next path needs."""
    directory = lake.path / f"new-{turn}" / "below"
    directory.mkdir(parents=True)
    for number in range(files):
        (directory / f"{number}").touch()
        os.stat(directory)


def mount_listed(lake: Lake, files: int) -> None:
    """Put there by another client."""
    root = lake.outside.root / "set"  # type: ignore[attr-defined]
    root.mkdir(parents=True)
    for number in range(files):
        (root / f"{number}").write_bytes(b"")
    lake.mount(*KEPT)
    os.listdir(lake.path / "set")


def drop_listing(lake: Lake) -> None:
    """A change makes the kernel drop the listing that it keeps."""
    (lake.path / "set" / "changed").touch()
    (lake.path / "set" / "changed").unlink()


def list_all(lake: Lake, turn: int, files: int) -> None:
    found = len(os.listdir(lake.path / "set"))
    assert found == files, found


def mount_packed(lake: Lake, files: int) -> None:
    """The blocks of the packs are in the cache on the disk."""
    lake.mount("--pack", "always", *WRITE_BACK)
    (lake.path / "set").mkdir()
    for number in range(files):
        (lake.path / "set" / f"{number:06}").write_bytes(os.urandom(FILE_BYTES))
    lake.settle()
    lake.umount()
    lake.mount("--immutable")


def mount_anew(lake: Lake) -> None:
    """Pages that the kernel has of the files go with the mount. A listing lets it know their inodes."""
    lake.umount()
    lake.mount("--immutable")
    for entry in os.scandir(lake.path / "set"):
        entry.stat()


def read_in_order(lake: Lake, turn: int, files: int) -> None:
    for number in range(files):
        (lake.path / "set" / f"{number:06}").read_bytes()


MECHANISMS = (
    Mechanism("create-offload", "create, write and close, 16 writers", NO_OFFLOAD, mount_for_writing, create, 2000),
    Mechanism(
        "name-leases", "look for a name, create it, 16 writers", NO_NAME_LEASES, mount_for_writing, probe_absent,
        2000, both=NO_OFFLOAD,
    ),
    Mechanism(
        "open-leases", "open, read and close, from the page cache", "hooks.lease_open = lambda *_: None",
        mount_with_files, read_all, 5000,
    ),
    Mechanism(
        "attribute-cache", "create, and stat of the directory", "hooks.cache_attributes = lambda *_, **__: None",
        mount_for_writing, create_and_stat, 2000,
    ),
    Mechanism(
        "readdirplus-in-c", "list a directory", "readdir.is_reached = lambda: False",
        mount_listed, list_all, 50_000, begin=drop_listing,
    ),
    Mechanism(
        "page-cache-push", "read packed files in order, blocks on the disk",
        "push = page_cache_push.PageCachePush; push.is_due = lambda *_: False; push.count_read = lambda *_: None",
        mount_packed, read_in_order, 2000, begin=mount_anew,
    ),
)  # fmt: skip


@contextmanager
def mounted(directory: Path, mechanism: Mechanism, files: int, *, on: bool) -> Iterator[Lake]:
    site = directory / "site"
    site.mkdir(parents=True)
    lines = [mechanism.both or "pass", *([] if on else [mechanism.off])]
    (site / "sitecustomize.py").write_text(SITE.format("\n    ".join(lines)))
    with file_lake(directory / "lake") as lake:
        lake.env["PYTHONPATH"] = os.pathsep.join([str(site), str(Path(__file__).parents[1])])
        lake.env.pop("LAKEFS_FUSE_HOOKS", None)
        mechanism.prepare(lake, files)
        yield lake
        lake.umount()


def cpu_s(lake: Lake) -> float:
    used = psutil.Process(lake.pid).cpu_times()
    return float(used.user + used.system)


@dataclass(frozen=True, slots=True)
class Run:
    """``daemon_s``: CPU time."""

    lasted_s: float
    daemon_s: float
    counts: Counts


def run_once(mechanism: Mechanism, lake: Lake, turn: int, files: int) -> Run:
    """What is written back later counts as CPU time and in counts, but takes no time."""
    mechanism.begin(lake)
    before, used_s, began_s = counts_of(lake), cpu_s(lake), time.perf_counter()
    mechanism.run(lake, turn, files)
    lasted_s = time.perf_counter() - began_s
    eventually(lambda: lake.number("dirty.files") == 0, "what was written is stored")
    return Run(lasted_s, max(cpu_s(lake) - used_s, CPU_TICK_S), counts_of(lake) - before)


def show_ratios(what: str, ratios: list[float]) -> None:
    ordered = sorted(ratios)
    print(f"  {what} off / on: {statistics.median(ordered):.2f} ({ordered[1]:.2f} to {ordered[-2]:.2f})", flush=True)


def measure(mechanism: Mechanism, directory: Path, files: int) -> None:
    with ExitStack() as stack:
        lakes = {
            on: stack.enter_context(mounted(directory / ("on" if on else "off"), mechanism, files, on=on))
            for on in (True, False)
        }
        pairs = []
        for turn in range(PAIRS):
            order = (True, False) if turn % 2 else (False, True)
            pairs.append({on: run_once(mechanism, lakes[on], turn, files) for on in order})
        print(f"{mechanism.name}: {mechanism.workload}, {files} files", flush=True)
        show_ratios("time", [pair[False].lasted_s / pair[True].lasted_s for pair in pairs])
        show_ratios("CPU of the daemon", [pair[False].daemon_s / pair[True].daemon_s for pair in pairs])
        for on, run in sorted(pairs[-1].items(), reverse=True):
            counts = run.counts
            print(
                f"  {'on ' if on else 'off'}: {counts.requests} requests, {counts.reads} READ, "
                f"{counts.in_python} in Python, {counts.to_store} to the store", flush=True,
            )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="What each mechanism of the kernel's side gains.")
    parser.add_argument("--quick", action="store_true", help="a fifth of the files")
    names = [mechanism.name for mechanism in MECHANISMS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="which")
    options = parser.parse_args()
    for mechanism in MECHANISMS:
        if mechanism.name in options.only:
            with tempfile.TemporaryDirectory(prefix="lakefs-mechanisms-") as directory:
                measure(mechanism, Path(directory), mechanism.files // (5 if options.quick else 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
