"""How fast `cache warm` fills the cache, beside obstore writing the same packs to files, and what an epoch asks then.

    PYTHONPATH=. python scripts/measure_warm.py --files 20000

The files lie in packs in SeaweedFS behind HAProxy, which keeps each request for 15 ms. Both write to one disk, in
turns; obstore takes whole packs with so many threads, and compares no sums.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import obstore

from lakefs_fuse.kernel.native import hooks as hooks  # isort: skip  (loaded before pyfuse3, which it wraps)
from tests.mount.lakes import Lake, number, s3_lake
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, Server, latency, make_bucket, seaweedfs

FILE_BYTES, FILES_IN_DIRECTORY = 50_000, 1000
BUCKET = "lake"


def fill(lake: Lake, source: Path, files: int) -> None:
    """Load the files into packs, past the mount."""
    for index in range(files):
        path = source / f"{index // FILES_IN_DIRECTORY:03d}" / f"{index:06d}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(FILE_BYTES))
    lake.mount()
    done = lake.cli("ingest", str(source), str(lake.path / "set"), timeout_s=1800)
    assert done.returncode == 0, done.stderr
    shutil.rmtree(source)
    lake.umount()
    shutil.rmtree(lake.cache_dir)


def fetch_packs(server: Server, prefix: str, directory: Path, threads: int) -> tuple[float, int]:
    """Seconds and bytes of obstore writing all packs to files."""
    store = obstore.store.S3Store(
        BUCKET, endpoint=server.url, access_key_id=ACCESS_KEY, secret_access_key=SECRET_KEY, region=REGION,
        client_options={"allow_http": True}, virtual_hosted_style_request=False,
    )  # fmt: skip
    pages = obstore.list(store, prefix=f"{prefix}.lakefs/commits/")
    keys = [item["path"] for page in pages for item in page if item["size"] > FILE_BYTES]
    directory.mkdir()

    def fetch(key: str) -> int:
        size = 0
        with (directory / key.rpartition("/")[2]).open("wb") as file:
            for chunk in obstore.get(store, key).stream(min_chunk_size=8 << 20):
                size += file.write(chunk)
        return size

    began_s = time.monotonic()
    with ThreadPoolExecutor(threads) as pool:
        size = sum(pool.map(fetch, keys))
    took_s = time.monotonic() - began_s
    shutil.rmtree(directory)
    return took_s, size


def warm(lake: Lake) -> tuple[float, int, int]:
    """Seconds, bytes and GETs of `cache warm` with an empty cache."""
    assert lake.cli("cache", "evict", str(lake.path / "set")).returncode == 0
    before = lake.stats()
    began_s = time.monotonic()
    done = lake.cli("cache", "warm", str(lake.path / "set"), timeout_s=1800)
    took_s = time.monotonic() - began_s
    assert done.returncode == 0, done.stderr
    after = lake.stats()
    read, gets = (number(after, name) - number(before, name) for name in ("store.bytes.read", "store.requests.get"))
    return took_s, read, gets


def read_all(lake: Lake) -> tuple[float, int]:
    """Seconds and GETs of one epoch."""
    before, began_s = lake.number("store.requests.get"), time.monotonic()
    for top, _, names in os.walk(lake.path / "set"):
        for name in names:
            assert len(Path(top, name).read_bytes()) == FILE_BYTES
    return time.monotonic() - began_s, lake.number("store.requests.get") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=6, help="of obstore")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="measure-warm-") as name:
        directory = Path(name)
        with seaweedfs(directory / "store") as server, latency(server, directory) as behind:
            make_bucket(server, BUCKET)
            kept = ("--metadata-ttl", "1h", "--refresh", "1h")
            with s3_lake(server, BUCKET, directory / "lake", *kept, through=behind) as lake:
                fill(lake, directory / "source", options.files)
                lake.mount()
                ratios, _prefix = [], lake.outside.source_prefix
                for _ in range(options.rounds):
                    theirs_s, size = fetch_packs(
                        behind, lake.outside.source_prefix, directory / "packs", options.threads
                    )
                    ours_s, read, gets = warm(lake)
                    ratios.append(theirs_s / ours_s)
                    print(
                        f"obstore {theirs_s:.1f} s ({size / theirs_s / 1e6:.0f} MB/s), cache warm {ours_s:.1f} s "
                        f"({read / ours_s / 1e6:.0f} MB/s, {gets} GETs, {read / size:.3f} of the bytes): "
                        f"{ratios[-1]:.2f}", flush=True,
                    )  # fmt: skip
                epoch_s, gets = read_all(lake)
                print(f"epoch: {epoch_s:.1f} s, {gets} GETs; median of the ratios {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
