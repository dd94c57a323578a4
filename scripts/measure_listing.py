"""The first listing of a directory of many plain objects, against the same page by page and against other mounts.

    PYTHONPATH=. python scripts/measure_listing.py --objects 200000 --repeats 3

Starts SeaweedFS behind HAProxy with 15 ms of latency a request, and puts the objects there once. In each round, in
turn, each with nothing cached: the directory is listed by the filesystem without a kernel, side by side and page by
page; and `os.scandir` through a mount, through `rclone mount` (unless ``--no-peers``), and with ``--s3fs`` through
s3fs, which asks for each object by itself and takes minutes. Prints seconds, requests, when the first name was there,
and the ratios' medians. Ends with 1 if a name is missing or comes twice.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import obstore
import trio
from obstore.store import S3Store

from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.fs.filesystem import Filesystem
from lakefs_fuse.lake import open_lake
from lakefs_fuse.meta.entry import ROOT_INODE
from lakefs_fuse.store import split_listing
from scripts.measure_small_files import BUCKET, mounted
from scripts.measure_writeback import peer
from scripts.measuring import statistics_of
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, latency, make_bucket, seaweedfs

PUTS_AT_ONCE = 64
NAME = "image-{:08d}.jpg"


async def fill(url: str, prefix: str, count: int) -> None:
    store = S3Store(
        BUCKET, endpoint=url, region=REGION, access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY,
        client_options={"allow_http": True}, virtual_hosted_style_request=False,
    )  # fmt: skip

    async def share(first: int) -> None:
        for index in range(first, count, PUTS_AT_ONCE):
            await obstore.put_async(store, f"{prefix}/d/{NAME.format(index)}", b"x" * 100)

    await asyncio.gather(*(share(first) for first in range(PUTS_AT_ONCE)))


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
    usual, split_listing.CHAINS_MAX = split_listing.CHAINS_MAX, chains_max
    try:
        async with open_lake(config) as (fs, _):
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
        split_listing.CHAINS_MAX = usual


def scan(path: Path, count: int) -> tuple[float, float]:
    """Seconds until the first name and until the last."""
    began = time.perf_counter()
    with os.scandir(path) as entries:
        names = {next(entries).name}
        first_s = time.perf_counter() - began
        seen = 1
        for entry in entries:
            names.add(entry.name)
            seen += 1
    assert len(names) == seen == count, f"{seen} names, {len(names)} of them different"
    return first_s, time.perf_counter() - began


def through_mount(url: str, prefix: str, directory: Path, count: int) -> float:
    with mounted(url, prefix, directory, "--refresh", "3600") as mountpoint:
        before = statistics_of(mountpoint)
        first_s, took_s = scan(mountpoint / "d", count)
        after = statistics_of(mountpoint)
        lists = after["store"]["requests"]["list"] - before["store"]["requests"]["list"]
        upcalls = after["upcalls"]["readdir"] - before["upcalls"]["readdir"]
        rss = after["memory"]["rss"] >> 20
        print(f"  mount: {took_s:.2f} s, first name {first_s:.3f} s, {lists} LISTs, {upcalls} READDIR, {rss} MiB")
    return took_s


def through_rclone(url: str, prefix: str, directory: Path, count: int) -> float:
    mountpoint = Path(tempfile.mkdtemp(prefix="rclone-", dir=directory))
    environment = {
        "RCLONE_CONFIG": os.devnull,
        "RCLONE_CONFIG_S3_TYPE": "s3",
        "RCLONE_CONFIG_S3_PROVIDER": "Other",
        "RCLONE_CONFIG_S3_ENDPOINT": url,
        "RCLONE_CONFIG_S3_ENV_AUTH": "true",
    }
    with peer(["rclone", "mount", f"s3:{BUCKET}/{prefix}", str(mountpoint)], mountpoint, environment):
        return scan(mountpoint / "d", count)[1]


def through_s3fs(url: str, prefix: str, directory: Path, count: int) -> float:
    mountpoint = Path(tempfile.mkdtemp(prefix="s3fs-", dir=directory))
    shared = f"url={url},use_path_request_style"
    with peer(["s3fs", BUCKET, str(mountpoint), "-f", "-o", shared], mountpoint, {}):
        return scan(mountpoint / prefix / "d", count)[1]


def told(ratios: dict[str, list[float]]) -> None:
    for name, found in ratios.items():
        print(f"{name}: {statistics.median(found):.2f}   {[round(ratio, 2) for ratio in found]}")


def measure(options: argparse.Namespace, directory: Path, url: str) -> None:
    peers: dict[str, Callable[[str, str, Path, int], float]] = {}
    if options.peers and shutil.which("rclone"):
        peers["rclone"] = through_rclone
    if options.s3fs:
        peers["s3fs"] = through_s3fs
    ratios: dict[str, list[float]] = {}
    for turn in range(options.repeats):
        print(f"round {turn + 1}", flush=True)
        took: dict[str, float] = {}
        for chains_max, name in ((16, "side by side"), (1, "page by page")):
            took[name], lists = trio.run(list_once, url, "lake", directory, options.objects, chains_max)
            print(f"  {name}: {took[name]:.2f} s, {lists} LISTs", flush=True)
        ratios.setdefault("page by page / side by side", []).append(took["page by page"] / took["side by side"])
        ours_s = through_mount(url, "lake", directory, options.objects)
        for name, run in peers.items():
            took_s = run(url, "lake", directory, options.objects)
            print(f"  {name}: {took_s:.2f} s", flush=True)
            ratios.setdefault(f"{name} / ours", []).append(took_s / ours_s)
    told(ratios)


def main() -> int:
    parser = argparse.ArgumentParser(description="The first listing of many plain objects.")
    parser.add_argument("--objects", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--delay-ms", type=int, default=15)
    parser.add_argument("--no-peers", dest="peers", action="store_false")
    parser.add_argument("--s3fs", action="store_true")
    options = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_DEFAULT_REGION=REGION)
    os.environ.update(AWSACCESSKEYID=ACCESS_KEY, AWSSECRETACCESSKEY=SECRET_KEY)
    with tempfile.TemporaryDirectory(prefix="lakefs-measure-") as made:
        directory = Path(made)
        for name in ("server", "proxy"):
            (directory / name).mkdir()
        with seaweedfs(directory / "server") as server:
            make_bucket(server, BUCKET)
            began = time.perf_counter()
            asyncio.run(fill(server.url, "lake", options.objects))
            print(f"{options.objects} objects in {time.perf_counter() - began:.0f} s", flush=True)
            with latency(server, directory / "proxy", options.delay_ms) as slow:
                measure(options, directory, slow.url)
    return 0


if __name__ == "__main__":
    sys.exit(main())
