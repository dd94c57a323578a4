"""Saving and loading a checkpoint, measured against what the machine and the store can do at best.

    PYTHONPATH=. python scripts/measure_checkpoint.py --mib 2048 --repeats 3

Starts SeaweedFS behind HAProxy with 15 ms of latency a request, and in each round, one after the other: `torch.save`
onto the cache disk, a bare parallel multipart upload of the same bytes (boto3, as many at once as the mount has), and
`torch.save` through a mount. Prints medians, the ratio of the mount to the longer of the other two (the median of the
rounds, because machines drift), and what the mount cost in requests, upcalls, memory and CPU. Memory is warmed by a
round that does not count. Ends with 1 if bytes differ, a load needs the store, or (with ``--ratio-max``) the ratio is
larger than that.

With ``--durability writeback`` each save onto the disk ends with fsync, as the mount's ends with synced staging when
close() returns. There is no bare upload then; the two take turns in who is first, and before each of them nothing waits
to be written to the disk or to be uploaded.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import mmap
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import torch
from boto3.s3.transfer import TransferConfig

from scripts.measuring import LAKEFS, PeakMemory, seconds, statistics_of, store_with_bucket

BUCKET = "checkpoints"
UPLOADS = 8
PART_BYTES = 16 << 20


@contextlib.contextmanager
def mounted(endpoint: str, directory: Path, *more: str) -> Iterator[Path]:
    mountpoint = directory / "lake"
    mountpoint.mkdir()
    options = ["--endpoint-url", endpoint, "--cache-dir", str(directory / "cache"), "--uploads", str(UPLOADS), *more]
    subprocess.run([*LAKEFS, "mount", f"s3://{BUCKET}", str(mountpoint), *options], check=True)
    try:
        yield mountpoint
    finally:
        if subprocess.run([*LAKEFS, "umount", str(mountpoint)], check=False).returncode:
            subprocess.run(["fusermount3", "-u", "-z", str(mountpoint)], check=False)


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, in user and kernel mode, since it began."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def save_synced(state: object, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())


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


class Saves:
    """What a round is made of: seconds of each save, and what the daemon spent on the one through the mount."""

    def __init__(self, options: argparse.Namespace, directory: Path, lake: Path, client: Any) -> None:
        self.state = {f"layer{i}": torch.empty(options.mib * 2**20 // 4 // 16).normal_() for i in range(16)}
        self.gib = options.mib / 1024
        self.cpu_s_gib: list[float] = []
        self._writeback = options.durability == "writeback"
        self._disk = directory / "disk.pt"
        self._lake = lake
        self._client = client
        self._daemon = int(statistics_of(lake)["daemon"]["pid"])

    def path(self, round_number: int) -> Path:
        return self._lake / f"step{round_number}.pt"

    def round(self, number: int) -> dict[str, float]:
        jobs: dict[str, Callable[[], None]] = {"disk": self._to_disk, "bare": self._bare}
        jobs["mount"] = lambda: self._to_mount(self.path(number))
        if self._writeback:
            del jobs["bare"]
            if number % 2:
                jobs = dict(reversed(jobs.items()))
        took = {}
        for name, job in jobs.items():
            os.sync()
            before = cpu_seconds(self._daemon)
            took[name] = seconds(job)
            if name == "mount":
                subprocess.run([*LAKEFS, "flush", str(self.path(number))], check=True, stdout=subprocess.DEVNULL)
                self.cpu_s_gib.append((cpu_seconds(self._daemon) - before) / self.gib)
        return took

    def _to_disk(self) -> None:
        if self._writeback:
            save_synced(self.state, self._disk)
        else:
            torch.save(self.state, self._disk)

    def _bare(self) -> None:
        transfer = TransferConfig(
            multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=UPLOADS, use_threads=True
        )
        self._client.upload_file(str(self._disk), BUCKET, "bare.pt", Config=transfer)

    def _to_mount(self, path: Path) -> None:
        torch.save(self.state, path)


def measure(options: argparse.Namespace, directory: Path, endpoint: str) -> int:
    client = boto3.client("s3", endpoint_url=endpoint)
    times: dict[str, list[float]] = {}
    with mounted(endpoint, directory, "--durability", options.durability) as lake:
        saves = Saves(options, directory, lake, client)
        peak = PeakMemory(int(statistics_of(lake)["daemon"]["pid"]))
        for round_number in range(options.repeats + 1):
            took = saves.round(round_number)
            told = ", ".join(f"{name} {took[name]:.2f} s" for name in sorted(took))
            print(f"round {round_number}: {told}, daemon {saves.cpu_s_gib[-1]:.2f} CPU s/GiB", flush=True)
            if round_number:
                for name, value in took.items():
                    times.setdefault(name, []).append(value)
        path = saves.path(options.repeats)
        saved = statistics_of(lake)
        dropped = absent_pages(path)
        loading = seconds(lambda: torch.load(path))
        loaded = statistics_of(lake)
        mapped = seconds(lambda: float(torch.load(path, mmap=True)["layer3"].sum()))
        peak_mib = peak.stop()
        same = sha256_of_object(client, path.name) == sha256_of_file(path)
    medians = {name: statistics.median(values) for name, values in times.items()}
    mount = times.pop("mount")
    ratios = [mine / max(others) for mine, *others in zip(mount, *times.values(), strict=True)]
    ratio = statistics.median(ratios)
    gets = loaded["store"]["requests"]["get"] - saved["store"]["requests"]["get"]
    reads = loaded["upcalls"]["read"] - saved["upcalls"]["read"]
    parts, writes = saved["store"]["requests"]["part"], saved["upcalls"]["write"]
    print("medians: " + ", ".join(f"{name} {s:.2f} s" for name, s in sorted(medians.items()))
          + f", daemon {statistics.median(saves.cpu_s_gib[1:]):.2f} CPU s/GiB")  # fmt: skip
    print(f"mount / longest of the others, round by round: {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
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
    parser.add_argument("--durability", choices=["close", "writeback"], default="close")
    parser.add_argument("--delay-ms", type=int, default=15)
    parser.add_argument("--ratio-max", type=float)
    options = parser.parse_args()
    with store_with_bucket(BUCKET, options.delay_ms) as (directory, endpoint):
        return measure(options, directory, endpoint)


if __name__ == "__main__":
    sys.exit(main())
