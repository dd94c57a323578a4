"""A cluster cache: what four mounts fetch from the store, what a hit costs a mount, and how long a dead proxy holds it.

    PYTHONPATH=. python scripts/measure_cluster_cache.py --megabytes 100

Starts SeaweedFS, HAProxy in front of it, which counts bytes, and nginx with `deploy/nginx`. The dataset is half small
files in packs and a third objects of 2 MiB; the rest is one large object. Prints one JSON object for each way to mount:
bytes and GETs of the store for one epoch of each of four mounts at the same time, in four orders, by the dataset's
bytes; then seconds, and CPU seconds of the daemon, of one more mount; then seconds of a read at a proxy that is killed,
and at one that hangs, beyond those without a proxy.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.mount.lakes import MIB, Lake, noise, s3_lake
from tests.nginx import TOKEN, CountedStore, counted, nginx
from tests.servers import REGION, Server, make_bucket, seaweedfs

SMALL_BYTES, OBJECT_BYTES = 60_000, 2 * MIB
MOUNTS = 4


def make_files(megabytes: int) -> dict[str, int]:
    """Paths and sizes."""
    small = {f"packed/{number:05}": SMALL_BYTES + number for number in range(megabytes * MIB // 2 // SMALL_BYTES)}
    plain = {f"plain/{number:03}": OBJECT_BYTES + number for number in range(megabytes * MIB // 3 // OBJECT_BYTES)}
    return small | plain | {"large": megabytes * MIB // 6}


def content(files: dict[str, int], name: str) -> bytes:
    return noise(files[name], hash(name) & 0xFFFF)


class Node:
    """A mount with a cache of its own."""

    def __init__(self, writer: Lake, store: Server, directory: Path, *options: str) -> None:
        where = "--endpoint-url", store.url, "--region", REGION, "--refresh", "1h"
        self.lake = Lake(writer.outside, writer.source, directory / f"node-{time.monotonic_ns()}", *where, *options)
        self.lake.env["LAKEFS_CLUSTER_CACHE_TOKEN"] = TOKEN
        self.lake.mount()

    def read(self, files: dict[str, int], seed: int) -> float:
        """Seconds of an epoch in an order of its own."""
        names = sorted(files)
        random.Random(seed).shuffle(names)
        began_s = time.monotonic()
        for name in names:
            assert len((self.lake.path / name).read_bytes()) == files[name]
        return time.monotonic() - began_s

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.lake.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    megabytes = parser.parse_args().megabytes
    files = make_files(megabytes)
    total = sum(files.values())
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="cluster-cache-")))
        seaweed = stack.enter_context(seaweedfs(directory / "seaweedfs"))
        make_bucket(seaweed, "measured")
        store = stack.enter_context(counted(seaweed, directory / "counted"))
        options = "--pack", "always", "--durability", "writeback", "--writeback-delay", "1m"
        writer = stack.enter_context(s3_lake(seaweed, "measured", directory / "writer", *options)).mount()
        (writer.path / "packed").mkdir()
        for name in files:
            if name.startswith("packed/"):
                (writer.path / name).write_bytes(content(files, name))
            else:
                writer.outside.replace(name, content(files, name))
        writer.umount()
        print(json.dumps({"bytes": total, "files": len(files)}))
        for way in ("none", "compared", "trusted"):
            measure(way, files, writer, store, directory)
        for number in (signal.SIGKILL, signal.SIGSTOP):
            hold(number, files, writer, store, directory)


def options_of(way: str, url: str) -> list[str]:
    return [] if way == "none" else ["--cluster-cache", url, *(["--trust-cluster-cache"] if way == "trusted" else [])]


def measure(way: str, files: dict[str, int], writer: Lake, store: CountedStore, directory: Path) -> None:
    total = sum(files.values())
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(nginx(store.server, directory / f"nginx-{way}"))

        def node() -> Node:
            made = Node(writer, store.server, directory, *options_of(way, proxy.url))
            stack.callback(made.lake.close)
            return made

        nodes = [node() for _ in range(MOUNTS)]
        before, gets = store.bytes_sent(), store.gets()
        threads = [threading.Thread(target=each.read, args=(files, seed)) for seed, each in enumerate(nodes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sent, gets = (store.bytes_sent() - before) / total, store.gets() - gets
        fallbacks = sum(each.lake.number("cluster_cache.fallbacks") for each in nodes)
        for each in nodes:
            each.lake.umount()
        one = node()
        before_cpu_s = one.cpu_s()
        took_s = one.read(files, MOUNTS)
        cpu_s = one.cpu_s() - before_cpu_s
        found = one.lake.stats()["cluster_cache"]
        line = {
            "way": way,
            "of_dataset": round(sent, 3),
            "gets": gets,
            "fallbacks": fallbacks,
            "one_s": round(took_s, 2),
        }
        print(json.dumps(line | {"one_cpu_s": round(cpu_s, 2), "one_counted": found}))
        sys.stdout.flush()


def hold(number: signal.Signals, files: dict[str, int], writer: Lake, store: CountedStore, directory: Path) -> None:
    """Seconds of one epoch of plain objects with a proxy that just died, less those without."""
    plain = {name: size for name, size in files.items() if name.startswith("plain/")}
    with contextlib.ExitStack() as stack:
        proxy = stack.enter_context(nginx(store.server, directory / f"nginx-{number.name}"))
        took_s = []
        for way in ("none", "compared"):
            node = Node(writer, store.server, directory, *options_of(way, proxy.url))
            stack.callback(node.lake.close)
            list((node.lake.path / "plain").iterdir())
            if way == "compared":
                (node.lake.path / "packed/00000").read_bytes()
                proxy.signal(number)
            took_s.append(node.read(plain, 0))
        print(json.dumps({"signal": number.name, "longer_s": round(took_s[1] - took_s[0], 2)}))


if __name__ == "__main__":
    main()
