"""Many small files written under write-back, against `rclone mount --vfs-cache-mode writes` and s3fs.

    PYTHONPATH=. python scripts/measure_writeback.py --files 20000 --kib 50 --threads 16 --repeats 3

Starts SeaweedFS (behind HAProxy with latency where --delay-ms says so). In each round, in turn, with empty caches: the
files are written through each mount, and the time up to the last close is taken. Ours is then made durable by an fsync
of the directory (`sync DIR`), its PUTs are counted, and every file is read back through a fresh mount. s3fs is slow at
this: it gets --s3fs-files of them. Ends with 1 if a byte differs, or there are more than --puts-max PUTs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from scripts.measure_small_files import BUCKET, check_all, mounted, parser_of, write_all
from scripts.measuring import PeakMemory, seconds, statistics_of, store_with_bucket
from tests.servers import ACCESS_KEY, SECRET_KEY

MOUNT_S_MAX = 20.0


@contextlib.contextmanager
def peer(command: list[str], mountpoint: Path, environment: dict[str, str]) -> Iterator[None]:
    """A peer in the foreground, until its mount is taken away."""
    with subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.DEVNULL) as process:
        try:
            deadline_s = time.monotonic() + MOUNT_S_MAX
            while not os.path.ismount(mountpoint):
                if time.monotonic() > deadline_s or process.poll() is not None:
                    raise SystemExit(f"{command[0]} does not mount")
                time.sleep(0.05)
            yield
        finally:
            subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], check=False)
            process.terminate()


def through_rclone(endpoint: str, prefix: str, directory: Path, seed: bytes, options: argparse.Namespace) -> float:
    mountpoint, cache = directory / f"rclone-{prefix}", directory / f"rclone-cache-{prefix}"
    mountpoint.mkdir()
    command = ["rclone", "mount", f"s3:{BUCKET}/{prefix}", str(mountpoint), "--vfs-cache-mode", "writes"]
    environment = {
        "RCLONE_CONFIG": os.devnull,
        "RCLONE_CONFIG_S3_TYPE": "s3",
        "RCLONE_CONFIG_S3_PROVIDER": "Other",
        "RCLONE_CONFIG_S3_ENDPOINT": endpoint,
        "RCLONE_CONFIG_S3_ENV_AUTH": "true",
    }
    with peer([*command, "--cache-dir", str(cache)], mountpoint, environment):
        took = seconds(lambda: write_all(mountpoint / "data", seed, options))
    shutil.rmtree(cache, ignore_errors=True)
    return float(options.files / took)


def through_s3fs(endpoint: str, prefix: str, directory: Path, seed: bytes, options: argparse.Namespace) -> float:
    mountpoint, cache = directory / f"s3fs-{prefix}", directory / f"s3fs-cache-{prefix}"
    mountpoint.mkdir()
    shared = f"url={endpoint},use_path_request_style,use_cache={cache}"
    with peer(["s3fs", BUCKET, str(mountpoint), "-f", "-o", shared], mountpoint, {}):
        few = argparse.Namespace(**{**vars(options), "files": options.s3fs_files})
        took = seconds(lambda: write_all(mountpoint / f"data-{prefix}", seed, few))
    return float(options.s3fs_files / took)


def through_us(
    endpoint: str, prefix: str, directory: Path, seed: bytes, options: argparse.Namespace
) -> tuple[float, int]:
    """Files a second, and PUTs."""
    more = ("--durability", "writeback", "--refresh", "3600")
    with mounted(endpoint, prefix, directory, *more) as mountpoint:
        before = statistics_of(mountpoint)
        peak = PeakMemory(before["daemon"]["pid"])
        took = seconds(lambda: write_all(mountpoint / "data", seed, options))
        waited = seconds(lambda: subprocess.run(["sync", str(mountpoint / "data")], check=True))
        puts = statistics_of(mountpoint)["store"]["requests"]["put"] - before["store"]["requests"]["put"]
        print(f"  ours: {options.files / took:.0f} files/s, sync {waited:.1f} s, {puts} PUTs, {peak.stop():.0f} MiB")
    with mounted(endpoint, prefix, directory) as reader:
        check_all(reader / "data", seed, options)
    return options.files / took, puts


def measure(options: argparse.Namespace, directory: Path, endpoint: str) -> int:
    os.environ.update(AWSACCESSKEYID=ACCESS_KEY, AWSSECRETACCESSKEY=SECRET_KEY)
    seed = hashlib.shake_128(b"small files").digest(16 << 20)
    write_all(directory / "warm", seed, options)
    ratios, most = [], 0
    for turn in range(options.repeats):
        print(f"round {turn + 1}", flush=True)
        rates = []
        if shutil.which("s3fs"):
            rates.append(through_s3fs(endpoint, f"s{turn}", directory, seed, options))
            print(f"  s3fs: {rates[-1]:.0f} files/s", flush=True)
        rates.append(through_rclone(endpoint, f"r{turn}", directory, seed, options))
        print(f"  rclone: {rates[-1]:.0f} files/s", flush=True)
        ours, puts = through_us(endpoint, f"o{turn}", directory, seed, options)
        ratios.append(ours / max(rates))
        most = max(most, puts)
    print(f"ours / better peer: {statistics.median(ratios):.2f}   {[round(ratio, 2) for ratio in ratios]}")
    return int(most > options.puts_max)


def main() -> int:
    parser = parser_of("Many small files under write-back, against other mounts.", repeats=3, delay_ms=0)
    parser.add_argument("--s3fs-files", type=int, default=1000)
    parser.add_argument("--puts-max", type=int, default=40)
    options = parser.parse_args()
    with store_with_bucket(BUCKET, options.delay_ms) as (directory, endpoint):
        return measure(options, directory, endpoint)


if __name__ == "__main__":
    sys.exit(main())
