"""The main job on a machine of your own: a lake is mounted, a training job reads and writes it, all is cleaned up.

    python scripts/demo.py --store file     objects lie in a local directory
    python scripts/demo.py --store s3       objects lie in a real S3 server (SeaweedFS), started for the occasion

Everything happens in one temporary directory, which is gone afterwards, whatever happens.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FILES, DIRECTORIES = 2000, 10
FILE_BYTES_MIN, FILE_BYTES_MAX = 10_000, 100_000
CHECKPOINT_MIB = 300
WORKERS = 8
DISK_BYTES_NEEDED = 4 << 30
BUCKET = "demo"

LAKEFS = [sys.executable, "-P", "-m", "lakefs_fuse"]


@dataclass(frozen=True)
class Store:
    """Where the demo's objects lie, and how to look at them without a mount."""

    source: str
    mount_options: list[str]
    list_objects: Callable[[], dict[str, int]]
    sha256: Callable[[str], str]


def say(text: str = "") -> None:
    print(text, flush=True)


def headline(text: str) -> None:
    say(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}")


@contextlib.contextmanager
def timed(what: str) -> Iterator[Callable[[str], None]]:
    """Prints what was done and how long it took; the body may add a remark."""
    remarks: list[str] = []
    began = time.perf_counter()
    yield remarks.append
    say(f"   {what}: {time.perf_counter() - began:.2f} s{''.join(', ' + remark for remark in remarks)}")


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


# ------------------------------------------------------------------------------------------------------------ stores


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def local_store(root: Path) -> Store:
    """A directory; objects are its files."""
    directory = root / "store"
    directory.mkdir()

    def list_objects() -> dict[str, int]:
        files = (path for path in directory.rglob("*") if path.is_file())
        return {str(path.relative_to(directory)): path.stat().st_size for path in files}

    return Store(f"file://{directory}", [], list_objects, lambda key: sha256_of(directory / key))


def s3_store(root: Path, cleanup: contextlib.ExitStack) -> Store:
    """A SeaweedFS of our own on loopback."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from tests import servers

    for variable in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        os.environ.pop(variable, None)
    os.environ.update(
        AWS_ACCESS_KEY_ID=servers.ACCESS_KEY,
        AWS_SECRET_ACCESS_KEY=servers.SECRET_KEY,
        AWS_DEFAULT_REGION=servers.REGION,
    )
    server = cleanup.enter_context(servers.seaweedfs(root / "seaweedfs"))
    servers.make_bucket(server, BUCKET)
    client = servers.s3_client(server)

    def list_objects() -> dict[str, int]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return {found["Key"]: found["Size"] for page in pages for found in page.get("Contents", [])}

    def sha256(key: str) -> str:
        digest = hashlib.sha256()
        for chunk in client.get_object(Bucket=BUCKET, Key=key)["Body"].iter_chunks(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()

    options = ["--endpoint-url", server.url, "--addressing-style", "path"]
    return Store(f"s3://{BUCKET}/lake", options, list_objects, lambda key: sha256(f"lake/{key}"))


# ------------------------------------------------------------------------------------------------------------- mount


def lakefs(*arguments: str | Path) -> None:
    """One command of the program; its output is ours."""
    result = subprocess.run([*LAKEFS, *arguments], check=False)
    if result.returncode != 0:
        raise SystemExit(f"demo: `lakefs-fuse {arguments[0]}` failed")


def counters(mountpoint: Path) -> dict[str, int]:
    """Store requests so far, by kind."""
    output = subprocess.run([*LAKEFS, "stats", "--json", mountpoint], check=True, capture_output=True).stdout
    requests: dict[str, int] = json.loads(output)["store"]["requests"]
    return requests


def spent(before: dict[str, int], after: dict[str, int]) -> str:
    """Which requests were made in between."""
    made = [f"{after[kind] - before[kind]:,} {kind}" for kind in after if after[kind] > before[kind]]
    return f"store requests: {' '.join(made) or 'none'}"


def mounted(root: Path, store: Store, cleanup: contextlib.ExitStack) -> Path:
    mountpoint = root / "lake"
    mountpoint.mkdir()
    options: list[str | Path] = ["--cache-dir", root / "cache", "--log-file", root / "lake.log", "--free-space", "256M"]

    def detach() -> None:
        if os.path.ismount(mountpoint):
            subprocess.run([*LAKEFS, "umount", "--lazy", "--timeout", "10", mountpoint], check=False)

    cleanup.callback(detach)
    lakefs("mount", store.source, mountpoint, *options, *store.mount_options)
    return mountpoint


# --------------------------------------------------------------------------------------------------------------- job


def write_dataset(directory: Path, rng: random.Random) -> dict[Path, int]:
    """Files of random bytes and random sizes; their CRC-32."""
    paths = [directory / f"class{number % DIRECTORIES}" / f"{number:05}.jpg" for number in range(FILES)]
    for parent in sorted({path.parent for path in paths}):
        parent.mkdir(parents=True)
    contents = {path: rng.randbytes(rng.randint(FILE_BYTES_MIN, FILE_BYTES_MAX)) for path in paths}
    with timed("written") as remark, ThreadPoolExecutor(WORKERS) as pool:
        written = sum(pool.map(lambda item: item[0].write_bytes(item[1]), contents.items()))
        remark(f"{len(paths):,} files, {megabytes(written)}, durable when each was closed")
    return {path: zlib.crc32(data) for path, data in contents.items()}


def list_dataset(directory: Path, times: int = 2) -> None:
    for turn in range(1, times + 1):
        with timed(f"listing {turn}") as remark:
            remark(f"{sum(len(files) for _, _, files in os.walk(directory)):,} files")


def read_epoch(name: str, checksums: dict[Path, int], rng: random.Random) -> None:
    """All files in random order, as a data loader with some workers reads them."""
    order = list(checksums)
    rng.shuffle(order)
    with timed(name) as remark, ThreadPoolExecutor(WORKERS) as pool:
        read = 0
        for path, data in zip(order, pool.map(Path.read_bytes, order), strict=True):
            if zlib.crc32(data) != checksums[path]:
                raise SystemExit(f"demo: {path} is not what was written")
            read += len(data)
        remark(f"{len(order):,} files, {megabytes(read)}, all checksums right")


def checkpoint_with_torch(path: Path) -> None:
    import torch

    state = {f"layer{number}.weight": torch.randn(1024, CHECKPOINT_MIB * 256 // 12) for number in range(12)}
    with timed("torch.save") as remark:
        torch.save(state, path)
        remark(megabytes(path.stat().st_size))
    with timed("torch.load"):
        loaded = torch.load(path)
    if not all(torch.equal(tensor, loaded[name]) for name, tensor in state.items()):
        raise SystemExit("demo: the checkpoint that was loaded is not the one that was saved")


def checkpoint_without_torch(path: Path) -> None:
    rng = random.Random(7)
    block = rng.randbytes(1 << 20)
    digest = hashlib.sha256()
    with timed("saved") as remark:
        with path.open("wb") as file:
            for number in range(CHECKPOINT_MIB):
                piece = number.to_bytes(8, "big") + block[8:]
                digest.update(piece)
                file.write(piece)
        remark(megabytes(path.stat().st_size))
    with timed("loaded"):
        loaded = sha256_of(path)
    if loaded != digest.hexdigest():
        raise SystemExit("demo: the checkpoint that was loaded is not the one that was saved")


def show_store(store: Store, checkpoint_sha256: str) -> None:
    objects = store.list_objects()
    say(f"   {len(objects):,} objects, {megabytes(sum(objects.values()))}; some of them:")
    for key in [*sorted(objects)[:3], *sorted(objects)[-3:]]:
        say(f"     {objects[key]:>12,}  {key}")
    if store.sha256("checkpoints/model.pt") != checkpoint_sha256:
        raise SystemExit("demo: the checkpoint in the store is not the one that was saved")
    say("   the checkpoint, read straight from the store, has the same SHA-256")


def job(mountpoint: Path) -> str:
    """The training job; the SHA-256 of its checkpoint."""
    rng = random.Random(42)
    before = counters(mountpoint)

    def report_requests() -> None:
        nonlocal before
        before, earlier = counters(mountpoint), before
        say(f"   {spent(earlier, before)}")

    headline(f"A dataset: {FILES:,} files in {DIRECTORIES} directories")
    checksums = write_dataset(mountpoint / "dataset", rng)
    report_requests()
    list_dataset(mountpoint / "dataset")
    report_requests()
    headline("Two epochs, shuffled")
    for epoch in (1, 2):
        read_epoch(f"epoch {epoch}", checksums, rng)
        report_requests()
    with_torch = importlib.util.find_spec("torch") is not None
    headline("A checkpoint" if with_torch else "A checkpoint (torch is not installed: a plain file)")
    path = mountpoint / "checkpoints" / "model.pt"
    path.parent.mkdir()
    (checkpoint_with_torch if with_torch else checkpoint_without_torch)(path)
    report_requests()
    return sha256_of(path)


def roomy_directory() -> str:
    """Where temporary files have room; /tmp is in memory on some machines."""
    for candidate in (tempfile.gettempdir(), "/var/tmp", str(Path.home())):
        if shutil.disk_usage(candidate).free >= DISK_BYTES_NEEDED:
            return candidate
    raise SystemExit(f"demo: {DISK_BYTES_NEEDED >> 30} GiB of free disk are needed: set TMPDIR to where there are")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=["file", "s3"], default="file")
    kind = parser.parse_args().store
    with contextlib.ExitStack() as cleanup:
        root = Path(tempfile.mkdtemp(prefix="lakefs-demo-", dir=roomy_directory()))
        cleanup.callback(shutil.rmtree, root, ignore_errors=True)
        headline("A lake in a local directory" if kind == "file" else "A lake in a bucket of a SeaweedFS of its own")
        store = local_store(root) if kind == "file" else s3_store(root, cleanup)
        with timed("mounted"):
            mountpoint = mounted(root, store, cleanup)
        say(f"   {store.source} at {mountpoint}")
        checkpoint_sha256 = job(mountpoint)
        headline("lakefs-fuse stats")
        lakefs("stats", mountpoint)
        headline("Unmounted; this is what lies in the store")
        with timed("unmounted"):
            lakefs("umount", mountpoint)
        show_store(store, checkpoint_sha256)
    headline("Done; everything is cleaned up")


if __name__ == "__main__":
    main()
