"""Writing and reading many small files: packed and one by one, through a mount and by `ingest`.

    PYTHONPATH=. python scripts/measure_small_files.py --files 20000 --kib 50 --threads 16 --repeats 2

Starts SeaweedFS behind HAProxy with 15 ms of latency a request. In each round, in turn: the files are written through a
mount that packs (``auto``) and through one that does not (``never``); the packed ones are read back through a fresh
mount with an empty cache and by zipfile from the bucket; and they are ingested, against a bare upload of as many bytes
(boto3, 64 MiB objects, three at a time). Prints files per second, PUTs and peak resident memory. Ends with 1 if a byte
differs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import statistics
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import boto3

from scripts.measuring import LAKEFS, PeakMemory, seconds, statistics_of, store_with_bucket

BUCKET = "files"
PACK_BYTES = 64 << 20


@contextlib.contextmanager
def mounted(endpoint: str, prefix: str, directory: Path, *options: str) -> Iterator[Path]:
    """A mount with an empty cache."""
    mountpoint = Path(tempfile.mkdtemp(prefix="mnt-", dir=directory))
    cache = tempfile.mkdtemp(prefix="cache-", dir=directory)
    command = [*LAKEFS, "mount", f"s3://{BUCKET}/{prefix}", str(mountpoint), "--endpoint-url", endpoint]
    subprocess.run([*command, "--cache-dir", cache, *options], check=True)
    try:
        yield mountpoint
    finally:
        subprocess.run([*LAKEFS, "umount", str(mountpoint)], check=True)


def content(seed: bytes, index: int, size: int) -> bytes:
    start = index * 64 % (len(seed) - size)
    return seed[start : start + size]


def write_all(directory: Path, seed: bytes, options: argparse.Namespace) -> None:
    directory.mkdir()

    def share(first: int) -> None:
        for index in range(first, options.files, options.threads):
            (directory / f"f{index:07d}").write_bytes(content(seed, index, options.kib << 10))

    with ThreadPoolExecutor(options.threads) as pool:
        list(pool.map(share, range(options.threads)))


def check_all(directory: Path, seed: bytes, options: argparse.Namespace) -> None:
    names = sorted(os.listdir(directory))
    assert names == [f"f{index:07d}" for index in range(options.files)], f"{len(names)} names"
    for index, name in enumerate(names):
        assert (directory / name).read_bytes() == content(seed, index, options.kib << 10), name


def check_archives(client: Any, prefix: str, seed: bytes, options: argparse.Namespace) -> int:
    """Every packed file, with nothing but a ZIP reader; answers how many there are."""
    found = 0
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/.lakefs/commits/")
    for item in (item for page in pages for item in page.get("Contents", ())):
        body = client.get_object(Bucket=BUCKET, Key=item["Key"])["Body"].read()
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            for name in archive.namelist():
                if name != ".lakefs/record" and "/f" in name:
                    index = int(name.rpartition("/f")[2])
                    assert archive.read(name) == content(seed, index, options.kib << 10), name
                    found += 1
    return found


def write_through(
    endpoint: str, client: Any, prefix: str, directory: Path, seed: bytes, options: argparse.Namespace, *more: str
) -> tuple[float, int]:
    """Seconds, and PUTs."""
    with mounted(endpoint, prefix, directory, "--refresh", "3600", *more) as mountpoint:
        (mountpoint / "warm").write_bytes(b"")
        before = statistics_of(mountpoint)
        peak = PeakMemory(before["daemon"]["pid"])
        took = seconds(lambda: write_all(mountpoint / "data", seed, options))
        after = statistics_of(mountpoint)
        puts = after["store"]["requests"]["put"] - before["store"]["requests"]["put"]
        print(f"  {prefix}: {options.files / took:.0f} files/s, {puts} PUTs, {peak.stop():.0f} MiB", flush=True)
    if "never" in more:  # one GET a file, one after the other: nobody wants to wait for that
        return took, puts
    with mounted(endpoint, prefix, directory) as reader:
        took_reading = seconds(lambda: check_all(reader / "data", seed, options))
        gets = statistics_of(reader)["store"]["requests"]["get"]
        print(f"    read back by a fresh mount: {options.files / took_reading:.0f} files/s, {gets} GETs", flush=True)
    print(f"    read back from archives: {check_archives(client, prefix, seed, options)} files", flush=True)
    return took, puts


def bare_upload(client: Any, prefix: str, total: int, seed: bytes) -> None:
    def put(number: int) -> None:
        size = min(PACK_BYTES, total - number * PACK_BYTES)
        body = (seed * (size // len(seed) + 1))[:size]
        client.put_object(Bucket=BUCKET, Key=f"{prefix}/{number}", Body=body)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(put, range(-(-total // PACK_BYTES))))


def ingest(endpoint: str, source: Path, prefix: str) -> dict[str, Any]:
    command = [*LAKEFS, "ingest", str(source), f"s3://{BUCKET}/{prefix}", "--endpoint-url", endpoint, "--json"]
    done = subprocess.run(command, check=True, capture_output=True)
    told: dict[str, Any] = json.loads(done.stdout)
    return told


def objects(client: Any, prefix: str) -> int:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=f"{prefix}/")
    return sum(len(page.get("Contents", ())) for page in pages)


def measure(options: argparse.Namespace, directory: Path, endpoint: str) -> None:
    client = boto3.client("s3", endpoint_url=endpoint)
    seed = hashlib.shake_128(b"small files").digest(16 << 20)
    source = directory / "source"
    write_all(source, seed, options)
    total = options.files * (options.kib << 10)
    ratios: list[float] = []
    ingest_ratios: list[float] = []
    for turn in range(options.repeats):
        print(f"round {turn + 1}", flush=True)
        packed, _ = write_through(endpoint, client, f"auto{turn}", directory, seed, options, "--pack", "auto")
        single, _ = write_through(endpoint, client, f"never{turn}", directory, seed, options, "--pack", "never")
        ratios.append(packed / single)
        bare = seconds(lambda: bare_upload(client, f"bare{turn}", total, seed))  # noqa: B023
        whole = seconds(lambda: ingest(endpoint, source, f"ingest{turn}"))  # noqa: B023
        stored = objects(client, f"ingest{turn}")
        ingest_ratios.append(whole / bare)
        print(f"  bare upload {bare:.1f} s, ingest {whole:.1f} s, {stored} objects", flush=True)
        with mounted(endpoint, f"ingest{turn}", directory) as reader:
            check_all(reader, seed, options)
    print(f"packed / one by one: {statistics.median(ratios):.2f}   {[round(ratio, 2) for ratio in ratios]}")
    print(
        f"ingest / bare upload: {statistics.median(ingest_ratios):.2f}   {[round(each, 2) for each in ingest_ratios]}"
    )


def parser_of(description: str, *, repeats: int, delay_ms: int) -> argparse.ArgumentParser:
    """How many files, how large and from how many threads; what else there is is the script's own."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--files", type=int, default=20_000)
    parser.add_argument("--kib", type=int, default=50)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--delay-ms", type=int, default=delay_ms)
    return parser


def main() -> int:
    options = parser_of("Many small files, packed and one by one.", repeats=2, delay_ms=15).parse_args()
    with store_with_bucket(BUCKET, options.delay_ms) as (directory, endpoint):
        print(f"in all {seconds(lambda: measure(options, directory, endpoint)):.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
