"""Small files that are in the page cache, opened, read and closed one after the other: ours, a disk, other mounts.

    PYTHONPATH=. python scripts/measure_reads.py --files 20000 --kib 50 --repeats 5

Starts SeaweedFS, puts the files into a bucket as plain objects and onto the disk, and mounts the bucket in every way:
read-write and `--immutable` with this program, with `weed mount`, `rclone mount --vfs-cache-mode full` and s3fs. Each
reads all files once (s3fs and rclone --peer-files of them: the first time is slow), which does not count. Then in each
round each reads them again, in turns, and files a second are taken. Prints medians, what the immutable mount is against
the disk, and what both of ours are against the fastest peer, as medians of the rounds. Ends with 1 if a ratio is below
--immutable-disk-min, --immutable-peer-min or --peer-min, or a byte differs.
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
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from scripts.measure_small_files import content
from scripts.measure_writeback import peer
from scripts.measuring import LAKEFS, statistics_of
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, make_bucket, program, s3_client, seaweedfs

BUCKET = "reads"
OURS, IMMUTABLE, DISK = "lakefs read-write", "lakefs immutable", "disk"


def read_all(paths: list[str], size: int) -> float:
    """Files a second."""
    started = time.perf_counter()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        if len(os.read(descriptor, size + 1)) != size:
            raise SystemExit(f"{path} is not whole")
        os.close(descriptor)
    return len(paths) / (time.perf_counter() - started)


class Field:
    """All mounts of one bucket, and the disk; by name, the directory with the files."""

    def __init__(self, directory: Path, stack: contextlib.ExitStack, url: str, filer: str) -> None:
        self._directory, self._stack, self._url, self._filer = directory, stack, url, filer
        self.roots: dict[str, Path] = {}

    def _mountpoint(self, name: str) -> Path:
        mountpoint = Path(tempfile.mkdtemp(prefix="mnt-", dir=self._directory))
        self.roots[name] = mountpoint / "data"
        return mountpoint

    def ours(self, name: str, *options: str) -> None:
        mountpoint, cache = self._mountpoint(name), tempfile.mkdtemp(prefix="cache-", dir=self._directory)
        command = [*LAKEFS, "mount", f"s3://{BUCKET}", str(mountpoint), "--endpoint-url", self._url]
        subprocess.run([*command, "--cache-dir", cache, *options], check=True)
        self._stack.callback(subprocess.run, [*LAKEFS, "umount", str(mountpoint)], check=True)

    def peers(self) -> None:
        mountpoint = self._mountpoint("weed mount")
        cache = self._directory / "weed-cache"
        command = [program("weed"), "mount", f"-filer={self._filer}", f"-filer.path=/buckets/{BUCKET}"]
        self._stack.enter_context(peer([*command, f"-dir={mountpoint}", f"-cacheDir={cache}"], mountpoint, {}))
        mountpoint, cache = self._mountpoint("rclone"), self._directory / "rclone-cache"
        command = ["rclone", "mount", f"s3:{BUCKET}", str(mountpoint), "--vfs-cache-mode", "full"]
        environment = {
            "RCLONE_CONFIG": os.devnull,
            "RCLONE_CONFIG_S3_TYPE": "s3",
            "RCLONE_CONFIG_S3_PROVIDER": "Other",
            "RCLONE_CONFIG_S3_ENDPOINT": self._url,
            "RCLONE_CONFIG_S3_ENV_AUTH": "true",
        }
        self._stack.enter_context(peer([*command, "--cache-dir", str(cache)], mountpoint, environment))
        if shutil.which("s3fs"):
            mountpoint, cache = self._mountpoint("s3fs"), self._directory / "s3fs-cache"
            shared = f"url={self._url},use_path_request_style,use_cache={cache}"
            self._stack.enter_context(peer(["s3fs", BUCKET, str(mountpoint), "-f", "-o", shared], mountpoint, {}))


def fill(directory: Path, server_client: object, options: argparse.Namespace) -> None:
    seed = hashlib.shake_128(b"small files").digest(16 << 20)
    (directory / "data").mkdir()

    def put(index: int) -> None:
        data, name = content(seed, index, options.kib << 10), f"data/f{index:07d}"
        (directory / name).write_bytes(data)
        server_client.put_object(Bucket=BUCKET, Key=name, Body=data)  # type: ignore[attr-defined]

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(put, range(options.files)))


def run(field: Field, options: argparse.Namespace) -> dict[str, list[float]]:
    size, paths = options.kib << 10, {}
    for name, root in field.roots.items():
        count = options.files if name in (OURS, IMMUTABLE, DISK, "weed mount") else options.peer_files
        paths[name] = [str(root / f"f{index:07d}") for index in range(count)]
        read_all(paths[name], size)
        print(f"  {name}: {count} files are warm", flush=True)
    rates: dict[str, list[float]] = {name: [] for name in field.roots}
    for turn in range(options.repeats):
        for name in field.roots:
            rates[name].append(read_all(paths[name], size))
        print(
            f"round {turn + 1}: " + ", ".join(f"{name} {each[-1]:,.0f}/s" for name, each in rates.items()), flush=True
        )
    return rates


def judge(rates: dict[str, list[float]], options: argparse.Namespace) -> int:
    peers = [name for name in rates if name not in (OURS, IMMUTABLE, DISK)]
    best = max(peers, key=lambda name: statistics.median(rates[name]))
    wanted = (
        (IMMUTABLE, DISK, options.immutable_disk_min),
        (IMMUTABLE, best, options.immutable_peer_min),
        (OURS, best, options.peer_min),
    )
    worst = 0
    for ours, other, least in wanted:
        ratio = statistics.median(a / b for a, b in zip(rates[ours], rates[other], strict=True))
        print(f"{ours} / {other}: {ratio:.2f} (at least {least:g})")
        worst = max(worst, int(ratio < least))
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description="Open, read and close small files that are in the page cache.")
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--peer-files", type=int, default=2_000)
    parser.add_argument("--kib", type=int, default=50)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--immutable-disk-min", type=float, default=0.0)
    parser.add_argument("--immutable-peer-min", type=float, default=0.0)
    parser.add_argument("--peer-min", type=float, default=0.0)
    options = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_DEFAULT_REGION=REGION)
    os.environ.update(AWSACCESSKEYID=ACCESS_KEY, AWSSECRETACCESSKEY=SECRET_KEY)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="lakefs-measure-")))
        server = stack.enter_context(seaweedfs(directory / "server"))
        make_bucket(server, BUCKET)
        fill(directory, s3_client(server), options)
        field = Field(directory, stack, server.url, server.filer)
        field.roots[DISK] = directory / "data"
        field.ours(OURS)
        field.ours(IMMUTABLE, "--immutable")
        field.peers()
        rates = run(field, options)
        before = statistics_of(field.roots[IMMUTABLE].parent)["upcalls"]
        read_all([str(field.roots[IMMUTABLE] / f"f{index:07d}") for index in range(options.files)], options.kib << 10)
        after = statistics_of(field.roots[IMMUTABLE].parent)["upcalls"]
        print(f"upcalls of the immutable mount in one more round: {sum(after.values()) - sum(before.values())}")
        return judge(rates, options)


if __name__ == "__main__":
    sys.exit(main())
