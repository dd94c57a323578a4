"""Saving and loading a checkpoint, measured against what the machine and the store can do at best.

    PYTHONPATH=. python scripts/measure_checkpoint.py --mib 2048 --repeats 3

Starts SeaweedFS behind HAProxy with 15 ms of latency a request, and in each round, one after the other: `torch.save`
onto the cache disk, a bare parallel multipart upload of the same bytes (boto3, as many at once as the mount has), and
`torch.save` through a mount. Prints medians, the ratio of the mount to the longer of the other two (the median of the
rounds, because machines drift), and what the mount cost in requests, upcalls and memory. Memory is warmed by a round
that does not count. Ends with 1 if bytes differ, a load needs the store, or (with ``--ratio-max``) the ratio is larger
than that.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import mmap
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import torch
from boto3.s3.transfer import TransferConfig

from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, latency, make_bucket, seaweedfs

BUCKET = "checkpoints"
UPLOADS = 8
PART_BYTES = 16 << 20
LAKEFS = [sys.executable, "-m", "lakefs_fuse"]


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


@contextlib.contextmanager
def mounted(endpoint: str, directory: Path) -> Iterator[Path]:
    mountpoint = directory / "lake"
    mountpoint.mkdir()
    options = ["--endpoint-url", endpoint, "--cache-dir", str(directory / "cache"), "--uploads", str(UPLOADS)]
    subprocess.run([*LAKEFS, "mount", f"s3://{BUCKET}", str(mountpoint), *options], check=True)
    try:
        yield mountpoint
    finally:
        if subprocess.run([*LAKEFS, "umount", str(mountpoint)], check=False).returncode:
            subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], check=False)


def absent_pages(path: Path) -> int:
    """Pages of a file that the kernel dropped by itself since they were written."""
    import ctypes

    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | 2) as view:
        pages = -(-len(view) // mmap.PAGESIZE)
        resident = (ctypes.c_ubyte * pages)()
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(len(view)), resident)
        return sum(1 for page in resident if not page & 1)


def sha256_of_object(client: Any, key: str) -> str:
    digest = hashlib.sha256()
    for piece in client.get_object(Bucket=BUCKET, Key=key)["Body"].iter_chunks(1 << 20):
        digest.update(piece)
    return digest.hexdigest()


def sha256_of_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def measure(options: argparse.Namespace, directory: Path, endpoint: str) -> int:
    client = boto3.client("s3", endpoint_url=endpoint)
    transfer = TransferConfig(
        multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=UPLOADS, use_threads=True
    )
    state = {f"layer{i}": torch.empty(options.mib * 2**20 // 4 // 16).normal_() for i in range(16)}
    disk = directory / "disk.pt"
    times: dict[str, list[float]] = {"disk": [], "bare": [], "mount": []}
    with mounted(endpoint, directory) as lake:
        daemon = int(statistics_of(lake)["daemon"]["pid"])
        peak = PeakMemory(daemon)
        for round_number in range(options.repeats + 1):
            path = lake / f"step{round_number}.pt"
            took = {
                "disk": seconds(lambda: torch.save(state, disk)),
                "bare": seconds(lambda: client.upload_file(str(disk), BUCKET, "bare.pt", Config=transfer)),
                "mount": seconds(lambda path=path: torch.save(state, path)),  # type: ignore[misc]
            }
            print(f"round {round_number}: " + ", ".join(f"{name} {s:.2f} s" for name, s in took.items()), flush=True)
            if round_number:
                for name, value in took.items():
                    times[name].append(value)
        saved = statistics_of(lake)
        dropped = absent_pages(path)
        loading = seconds(lambda: torch.load(path))
        loaded = statistics_of(lake)
        mapped = seconds(lambda: float(torch.load(path, mmap=True)["layer3"].sum()))
        peak_mib = peak.stop()
        same = sha256_of_object(client, path.name) == sha256_of_file(path)
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = [m / max(d, b) for d, b, m in zip(times["disk"], times["bare"], times["mount"], strict=True)]
    ratio = statistics.median(ratios)
    gets = loaded["store"]["requests"]["get"] - saved["store"]["requests"]["get"]
    reads = loaded["upcalls"]["read"] - saved["upcalls"]["read"]
    parts, writes = saved["store"]["requests"]["part"], saved["upcalls"]["write"]
    print("medians: " + ", ".join(f"{name} {s:.2f} s" for name, s in medians.items()))
    print(f"mount / longer of the others, round by round: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    print(f"of {options.repeats + 1} saves: {parts} parts, {writes} WRITE upcalls, uploader idle with work "
          f"{saved['upload']['idle_with_work_s']:.3f} s, peak resident memory {peak_mib:.0f} MiB")  # fmt: skip
    print(f"torch.load {loading:.2f} s, mmap {mapped:.2f} s: {gets} GETs, {reads} READ upcalls, "
          f"{dropped} pages dropped by the kernel before")  # fmt: skip
    print(f"SHA-256 seen by boto3 and by the mount: {'equal' if same else 'DIFFERENT'}")
    good = same and gets == 0 and (reads == 0 or dropped > 0)
    return 0 if good and (options.ratio_max is None or ratio <= options.ratio_max) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=2048, help="size of the checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--delay-ms", type=int, default=15)
    parser.add_argument("--ratio-max", type=float)
    options = parser.parse_args()
    os.environ.update(AWS_ACCESS_KEY_ID=ACCESS_KEY, AWS_SECRET_ACCESS_KEY=SECRET_KEY, AWS_DEFAULT_REGION=REGION)
    with tempfile.TemporaryDirectory(prefix="lakefs-measure-") as temporary:
        directory = Path(temporary)
        with (
            seaweedfs(directory / "seaweed") as server,
            latency(server, directory / "haproxy", options.delay_ms) as far,
        ):
            make_bucket(server, BUCKET)
            return measure(options, directory, far.url)


if __name__ == "__main__":
    sys.exit(main())
