"""How long a job waits for its data in two epochs of files in packs, with torch's DataLoader and nothing else.

    PYTHONPATH=. python scripts/measure_training.py --files 3000 --rounds 3
    PYTHONPATH=. python scripts/measure_training.py --before DIRECTORY_OF_ANOTHER_CHECKOUT

SeaweedFS behind HAProxy, which delays each request. A DataLoader of four workers reads shuffled files of 50 KB
in batches of 32, and the job computes (sleeps) after each batch. First obstore reads as many ranges, a GET each,
without computing; ``--busy`` is the share of an epoch in which it would read then, and gives the seconds of computing,
unless ``--compute-ms`` does. In each round every mount begins with an empty cache; with ``--before`` two checkouts take
turns.
Printed for each epoch: the share of it that was waited, what of that were the first ten batches, GETs, bytes for each
that was read, and CPU of the daemon for each file, as a share of the epoch, and of its main thread alone.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lakefs_fuse.kernel.native import hooks as hooks  # isort: skip  (loaded before pyfuse3, which it wraps)
from scripts.measure_warm import BUCKET, FILE_BYTES, fill
from tests.mount.lakes import Lake, number, s3_lake
from tests.servers import ACCESS_KEY, REGION, SECRET_KEY, Server, latency, make_bucket, seaweedfs

BATCH, WORKERS, FIRST_BATCHES = 32, 4, 10
EPOCH_S_MAX = 600.0
JOB = """
import json, os, random, sys, time
from torch.utils.data import DataLoader

what, compute_s, seed = json.loads(sys.argv[1])

class Files:
    def __len__(self):
        return len(names)
    def __getitem__(self, index):
        with open(names[index], "rb") as file:
            return len(file.read())

class Ranges:
    store = None
    def __len__(self):
        return what["count"]
    def __getitem__(self, index):
        import obstore
        if self.store is None:
            self.store = obstore.store.S3Store(**what["store"])
        key, size = what["packs"][index % len(what["packs"])]
        at = random.Random(index).randrange(size - what["bytes"])
        return len(obstore.get_range(self.store, key, start=at, length=what["bytes"]))

if "top" in what:
    names = [os.path.join(top, name) for top, _, found in os.walk(what["top"]) for name in found]
    names.sort()
    data = Files()
else:
    data = Ranges()
import torch
torch.manual_seed(seed)
loader = DataLoader(data, batch_size=32, shuffle=True, num_workers=4, collate_fn=list, multiprocessing_context="fork")
began, waits, read = time.perf_counter(), [], 0
batches = iter(loader)
while True:
    asked = time.perf_counter()
    batch = next(batches, None)
    if batch is None:
        break
    waits.append(time.perf_counter() - asked)
    read += sum(batch)
    time.sleep(compute_s)
print(json.dumps({"took_s": time.perf_counter() - began, "waits_s": waits, "bytes": read}))
"""


@dataclass(frozen=True)
class Epoch:
    """``waits_s`` of each batch."""

    took_s: float
    waits_s: list[float]
    bytes: int


def run_job(what: dict[str, object], compute_s: float, seed: int) -> Epoch:
    done = subprocess.run(
        [sys.executable, "-c", JOB, json.dumps([what, compute_s, seed])],
        capture_output=True, text=True, check=False, timeout=EPOCH_S_MAX,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return Epoch(**json.loads(done.stdout))


def bare_batch_s(server: Server, prefix: str, files: int) -> float:
    """Seconds of a batch of obstore with a GET for each file."""
    import obstore

    options: dict[str, Any] = {
        "bucket": BUCKET, "endpoint": server.url, "access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY,
        "region": REGION, "client_options": {"allow_http": True}, "virtual_hosted_style_request": False,
    }  # fmt: skip
    pages = obstore.list(obstore.store.S3Store(**options), prefix=f"{prefix}.lakefs/commits/")
    packs = [(item["path"], item["size"]) for page in pages for item in page if item["size"] > 2 * FILE_BYTES]
    what = {"store": options, "packs": packs, "count": files, "bytes": FILE_BYTES}
    return run_job(what, 0.0, 0).took_s * BATCH / files


def cpu_s(pid: int, thread: int | None = None) -> float:
    """Of a process, or of one of its threads."""
    path = Path(f"/proc/{pid}/stat" if thread is None else f"/proc/{pid}/task/{thread}/stat")
    fields = path.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def epoch(lake: Lake, compute_s: float, seed: int, files: int) -> float:
    """Print what an epoch costs on an empty cache, and the next one; the share of the first that the job waited."""
    lake.mount()
    try:
        before, cpu_before = lake.stats(), (cpu_s(lake.pid), cpu_s(lake.pid, lake.pid))
        found = run_job({"top": str(lake.path / "set")}, compute_s, seed)
        cpu = cpu_s(lake.pid) - cpu_before[0], cpu_s(lake.pid, lake.pid) - cpu_before[1]
        after = lake.stats()
        again = run_job({"top": str(lake.path / "set")}, compute_s, seed + 1)
        gets_again = number(lake.stats(), "store.requests.get") - number(after, "store.requests.get")
    finally:
        lake.umount()
        subprocess.run(["rm", "-rf", str(lake.cache_dir)], check=True)
    gets, read = (number(after, name) - number(before, name) for name in ("store.requests.get", "store.bytes.read"))
    took_s, waits_s = found.took_s, found.waits_s
    assert found.bytes == files * FILE_BYTES
    waited: float = sum(waits_s) / took_s
    print(
        f"    {took_s:5.1f} s, waited {waited:6.1%} (first batches {sum(waits_s[:FIRST_BATCHES]) / took_s:.1%}), "
        f"{gets} GETs, {read / (files * FILE_BYTES):.2f} of the bytes, {cpu[0] / files * 1e3:.2f} ms CPU a file, "
        f"{cpu[0] / took_s:.0%} of the time, main thread {cpu[1] / took_s:.0%}; "
        f"the second epoch: {again.took_s:.1f} s, waited {sum(again.waits_s) / again.took_s:.1%}, {gets_again} GETs",
        flush=True,
    )  # fmt: skip
    return waited


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=3000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay-ms", type=int, default=15, help="of each request to the store")
    parser.add_argument("--busy", type=float, default=0.5, help="share of an epoch in which obstore would read")
    parser.add_argument("--compute-ms", type=float, help="of each batch")
    parser.add_argument("--before", type=Path, help="another checkout, with its native library built")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="measure-training-") as name:
        directory = Path(name)
        with seaweedfs(directory / "store") as server, latency(server, directory, options.delay_ms) as behind:
            make_bucket(server, BUCKET)
            kept = ("--metadata-ttl", "1h", "--refresh", "1h")
            with s3_lake(server, BUCKET, directory / "lake", *kept, through=behind) as lake:
                fill(lake, directory / "source", options.files)
                batch_s = bare_batch_s(behind, lake.outside.source_prefix, options.files)
                compute_s = batch_s / options.busy if options.compute_ms is None else options.compute_ms / 1e3
                print(f"obstore: {batch_s * 1e3:.0f} ms a batch; computing {compute_s * 1e3:.0f} ms", flush=True)
                shares = {"now": list[float](), **({"before": list[float]()} if options.before else {})}
                env = dict(lake.env)
                for turn in range(options.rounds):
                    for which in sorted(shares, reverse=turn % 2 == 1):
                        print(f"  {which}")
                        lake.env = {**env, "PYTHONPATH": str(options.before)} if which == "before" else env
                        shares[which].append(epoch(lake, compute_s, turn, options.files))
                for which, some in shares.items():
                    print(f"{which}: waited {statistics.median(some):.1%} ({min(some):.1%} to {max(some):.1%})")


if __name__ == "__main__":
    main()
