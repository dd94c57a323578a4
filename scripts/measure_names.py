"""Listing packed names that a fresh mount has from an index: how fast, with how many upcalls, in how much memory.

    PYTHONPATH=. python scripts/measure_names.py --names 1000000 --directories 1 --repeats 3
    PYTHONPATH=. python scripts/measure_names.py --names 5000000 --directories 5000 --find

Makes the names in a database of its own, folds them into an index in a local directory, and mounts that with an empty
cache. Without ``--find``, in each round a fresh mount: one directory after the other is listed with `os.scandir`, each
name is looked at with `stat`, and listed again; with as many empty files on the disk beside it for comparison
(``--ext4``). With ``--find``: `find` over all of it, and the daemon's resident memory before, after and at most.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import trio

from lakefs_fuse.commits.index.index import write_index
from lakefs_fuse.environment.node import Node
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE, Flag
from lakefs_fuse.meta.sorted_tables import Dump
from lakefs_fuse.meta.tree import Listing, Tree
from lakefs_fuse.metrics import StoreMetrics
from lakefs_fuse.store.client import StoreClient, ThreadTransport
from lakefs_fuse.store.local.store import LocalStore
from lakefs_fuse.store.protocol import Capabilities
from scripts.bench import machine
from scripts.bench.peers.ours import lakefs, statistics_of

BATCH_NAMES = 10_000
PACK_FILES = 10_000
FILE_BYTES = 50_000
MOUNT_S_MAX = 600.0


def make_names(database: Database, names: int, directories: int) -> None:
    """``names`` files in packs, spread over directories that are known to hold nothing else."""
    tree, now_ns = Tree(database), time.time_ns()
    made, number = 0, 0
    for directory in range(directories):
        batch = Batch()
        entry = tree.insert(
            batch, ROOT_INODE, b"d%05d" % directory, Flag.DIRECTORY, mtime_ns=now_ns, ctime_ns=now_ns, stamp=now_ns
        )
        tree.set_listing(batch, entry.inode, Listing(now_ns, 0))
        last = names * (directory + 1) // directories
        for at in range(made, last):
            if at % PACK_FILES == 0:
                number = tree.objects.number(f".lakefs/commits/{now_ns + at:016x}-0badcafe.zip", "e" * 32, 1 << 30)
            tree.insert(
                batch, entry.inode, b"image-%08d.jpg" % at, Flag.ATTRIBUTES_KNOWN, mode=0o644, size=FILE_BYTES,
                mtime_ns=now_ns, ctime_ns=now_ns, stamp=now_ns, place=number, offset=at % PACK_FILES * FILE_BYTES,
            )  # fmt: skip
            if at % BATCH_NAMES == BATCH_NAMES - 1:
                database.commit(batch)
                batch = Batch()
        database.commit(batch)
        made = last
    batch = Batch()
    tree.set_listing(batch, ROOT_INODE, Listing(now_ns, directories))
    database.commit(batch)


def make_lake(lake: Path, names: int, directories: int) -> None:
    """An index with these names in a local directory that is a lake."""
    lake.mkdir()
    with tempfile.TemporaryDirectory(prefix="made-", dir=lake.parent) as made:
        node = Node.of_this_machine()
        database = Database(Path(made) / "meta", "made", node.clock, node.disk)
        make_names(database, names, directories)
        (Path(made) / "dump").mkdir()
        dump = Dump(database, Path(made) / "dump", applied_since=0)
        client = StoreClient(
            LocalStore(str(lake), random.Random(1), node.clock), Capabilities(name="local"), StoreMetrics(),
            transport=ThreadTransport(node.threads), clock=node.clock, rng=random.Random(1),
        )  # fmt: skip
        now_ns = time.time_ns()

        async def store() -> None:
            await write_index(client, node.threads, dump, time=now_ns, horizon=0, wrote=lambda _: None)

        trio.run(store)
        dump.close()
        client.close()
        database.close()


class Mount:
    """The lake, mounted with an empty cache."""

    def __init__(self, lake: Path, directory: Path) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="mnt-", dir=directory))
        cache = tempfile.mkdtemp(prefix="cache-", dir=directory)
        options = ["--cache-dir", cache, "--refresh", "1h", "--metadata-ttl", "1d", "--free-space", "64M"]
        lakefs("mount", f"file://{lake}", str(self.path), *options, limit_s=MOUNT_S_MAX)

    def stats(self) -> dict[str, Any]:
        return statistics_of(self.path)

    def __enter__(self) -> Mount:
        return self

    def __exit__(self, *_: object) -> None:
        lakefs("umount", str(self.path), limit_s=MOUNT_S_MAX)


def scan(directory: Path) -> tuple[list[str], float]:
    began = time.perf_counter()
    with os.scandir(directory) as entries:
        names = [entry.name for entry in entries]
    return names, time.perf_counter() - began


def look(path: Path) -> dict[str, float]:
    """Names a second of a first listing, of stat, and of listings again; of every directory."""
    totals = {"first": 0.0, "stat": 0.0, "again": 0.0}
    count = 0
    for name in sorted(os.listdir(path)):
        names, took_s = scan(path / name)
        count += len(names)
        totals["first"] += took_s
        prefix = f"{path / name}/"
        began = time.perf_counter()
        for each in names:
            os.stat(prefix + each)
        totals["stat"] += time.perf_counter() - began
        again = [scan(path / name)[1] for _ in range(2)]
        totals["again"] += again[-1]
    return {what: count / took_s for what, took_s in totals.items()}


def compare(options: argparse.Namespace, lake: Path, directory: Path) -> None:
    beside = directory / "ext4"
    if options.ext4:
        for number in range(options.directories):
            (beside / f"d{number:05d}").mkdir(parents=True)
        for at in range(options.names):
            os.close(os.open(beside / f"d{at % options.directories:05d}" / f"image-{at:08d}.jpg", os.O_CREAT))
    for turn in range(options.repeats):
        with Mount(lake, directory) as mount:
            before = mount.stats()["upcalls"]
            rates = look(mount.path)
            after = mount.stats()
            cost = {name: after["upcalls"][name] - before[name] for name in before}
            print(f"round {turn + 1}: " + ", ".join(f"{what} {rate:,.0f}/s" for what, rate in rates.items()))
            print(f"  upcalls: { {name: count for name, count in cost.items() if count} }", flush=True)
            print(f"  resident: {after['memory']['rss'] >> 20} MiB")
        if options.ext4:
            rates = look(beside)
            print("  ext4: " + ", ".join(f"{what} {rate:,.0f}/s" for what, rate in rates.items()), flush=True)


def find(options: argparse.Namespace, lake: Path, directory: Path) -> None:
    with Mount(lake, directory) as mount:
        before = mount.stats()
        daemon = [int(before["daemon"]["pid"])]
        machine.forget_peak(daemon)
        began = time.perf_counter()
        found = subprocess.run(
            ["find", ".", "-type", "f", "-printf", "x"], cwd=mount.path, capture_output=True, check=True
        )
        took_s = time.perf_counter() - began
        most = machine.peak_bytes(daemon) >> 20
        after = mount.stats()
        assert len(found.stdout) == options.names, f"{len(found.stdout)} names"
        print(
            f"find over {options.names:,} names: {took_s:.1f} s, resident {before['memory']['rss'] >> 20} MiB before, "
            f"{after['memory']['rss'] >> 20} MiB after, {most} MiB at most"
        )
        print(f"  upcalls: { {name: count for name, count in after['upcalls'].items() if count} }")
        print(f"  RocksDB: {after['namespace']['rocksdb']}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Listing many packed names.")
    parser.add_argument("--names", type=int, default=1_000_000)
    parser.add_argument("--directories", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--find", action="store_true")
    parser.add_argument("--ext4", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lakefs-measure-") as made:
        directory = Path(made)
        began = time.perf_counter()
        make_lake(directory / "lake", options.names, options.directories)
        print(f"{options.names:,} names made in {time.perf_counter() - began:.0f} s", flush=True)
        (find if options.find else compare)(options, directory / "lake", directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
