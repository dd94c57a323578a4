"""The first listing of a directory of many plain objects: side by side, and page by page.

    PYTHONPATH=. python scripts/measure_listing.py --objects 200000 --repeats 3

Starts SeaweedFS behind HAProxy with latency, and puts the objects there once. In each round, in turn and each with
nothing cached, the directory is listed by the filesystem without a kernel in both ways. Prints seconds, requests, and
the median of the ratios. Ends with 1 if a name is missing or comes twice. What a mount makes of it, beside other
mounts, is in the benchmarks (`python -m scripts.bench --only names`).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import trio

from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.daemon.lake_opener import open_lake
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.store import parallel_list
from lakefs_fuse.vfs.filesystem import Filesystem
from scripts.bench import stage, tally
from scripts.bench.sizes import FULL
from scripts.bench.stage import BUCKET
from tests.servers import REGION


async def list_once(url: str, prefix: str, directory: Path, count: int, chains_max: int) -> tuple[float, int]:
    """Seconds, and LISTs, until every name was read from a filesystem that never saw it."""
    source = Source.parse(f"s3://{BUCKET}/{prefix}")
    config = MountConfig(
        store=StoreConfig(source=source, endpoint_url=url, region=REGION),
        mountpoint="/nowhere",
        cache_dir=tempfile.mkdtemp(dir=directory),
        free_bytes_min=0,
        refresh_s=3600.0,
    )
    usual, parallel_list.CHAINS_MAX = parallel_list.CHAINS_MAX, chains_max
    try:
        async with open_lake(config) as (fs, _, _):
            assert isinstance(fs, Filesystem)
            entry, _ = await fs.lookup(ROOT_INODE, b"d")
            assert entry is not None
            before, began = fs.metrics.store.requests["list"], time.perf_counter()
            await fs.opendir(entry.inode)
            names: set[bytes] = set()
            after = 0
            while True:
                await fs.more_names(entry.inode, after)
                found = 0
                for each in fs.readdir(entry.inode, after):
                    names.add(each.name)
                    after, found = each.cookie, found + 1
                if not found:
                    break
            assert len(names) == count, f"{len(names)} names"
            return time.perf_counter() - began, fs.metrics.store.requests["list"] - before
    finally:
        parallel_list.CHAINS_MAX = usual


def measure(options: argparse.Namespace, made: stage.Stage) -> None:
    ratios: list[float] = []
    for turn in range(options.repeats):
        print(f"round {turn + 1}", flush=True)
        took: dict[str, float] = {}
        for chains_max, name in ((16, "side by side"), (1, "page by page")):
            url, count = made.store.url, options.objects
            took[name], lists = trio.run(list_once, url, "names", made.directory, count, chains_max)
            print(f"  {name}: {took[name]:.2f} s, {lists} LISTs", flush=True)
        ratios.append(took["page by page"] / took["side by side"])
    print(f"page by page / side by side: {statistics.median(ratios):.2f}   {[round(each, 2) for each in ratios]}")


def main() -> int:
    parser = argparse.ArgumentParser(description="The first listing of many plain objects.")
    parser.add_argument("--objects", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with stage.opened(msgspec.structs.replace(FULL, names=options.objects), tally.price_list()[1]) as made:
        began = time.perf_counter()
        made.provide("names", "names")
        print(f"{options.objects} objects in {time.perf_counter() - began:.0f} s", flush=True)
        measure(options, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
