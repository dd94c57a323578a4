"""What the commands of `lakefs-fuse dataset` cost where a version has a million names.

    PYTHONPATH=. python scripts/measure_datasets.py --names 1000000

Small files are loaded into packs of SeaweedFS from a tar stream, through HAProxy, which counts requests and delays
none. Of the directory a version is made, then some files are added and a second version is made, and a third one from
an index. Printed for each command are seconds, seconds of CPU and the most resident memory of any of its processes
(this one's, where that is more), and its requests; of the mount the daemon's resident memory, before and after `find`
over all of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from lakefs_fuse.kernel.native import hooks as hooks  # isort: skip  (loaded before pyfuse3, which it wraps)
from scripts.bench.tally import Tally
from tests.mount.lakes import Lake, s3_lake
from tests.servers import EACH_REQUEST, REGION, Server, Way, free_port, haproxy, make_bucket, s3_answers, seaweedfs

BUCKET = "lake"
FILES_IN_DIRECTORY = 1000
FILE_BYTES = 64
ADDED = 1000
SHOWN_BYTES = 4096
"""Of what a command prints."""
COMMAND = [sys.executable, "-P", "-m", "lakefs_fuse"]


def write_tar(file: IO[bytes], first: int, stop: int) -> None:
    """Files with these numbers, as a tar stream; closes the file."""
    with file:
        for number in range(first, stop):
            info = tarfile.TarInfo(f"{number // FILES_IN_DIRECTORY:04d}/image-{number:08d}.jpg")
            info.size = FILE_BYTES
            file.write(
                info.tobuf(tarfile.GNU_FORMAT) + (b"%0*d" % (FILE_BYTES, number)).ljust(tarfile.BLOCKSIZE, b"\0")
            )
        file.write(bytes(2 * tarfile.BLOCKSIZE))


class Bench:
    """A lake, and the requests that reach its store."""

    def __init__(self, lake: Lake, tally: Tally, url: str) -> None:
        self.lake, self._tally = lake, tally
        self._store = ["--endpoint-url", url, "--region", REGION]

    def run(self, what: str, *args: str, files: range | None = None) -> None:
        """A command, and what it cost; ``files`` are its standard input, as a tar stream."""
        self._tally.begin()
        began_s = time.perf_counter()
        with tempfile.TemporaryFile() as output:
            process = subprocess.Popen(
                [*COMMAND, *args, *self._store], env=self.lake.env, cwd="/", stdout=output, stderr=output,
                stdin=subprocess.DEVNULL if files is None else subprocess.PIPE,
            )  # fmt: skip
            if files is not None:
                assert process.stdin is not None
                threading.Thread(target=write_tar, args=(process.stdin, files.start, files.stop)).start()
            _, status, usage = os.wait4(process.pid, 0)
            took_s = time.perf_counter() - began_s
            process.returncode = os.waitstatus_to_exitcode(status)
            output.seek(max(0, output.seek(0, os.SEEK_END) - SHOWN_BYTES))
            text = output.read().decode("utf-8", "replace")
        assert not process.returncode, text
        cpu_s = usage.ru_utime + usage.ru_stime
        requests = self._tally.take().requests
        print(
            f"{what}: {took_s:.1f} s, CPU {cpu_s:.1f} s, {usage.ru_maxrss >> 10} MiB, "
            + (", ".join(f"{count} {kind}" for kind, count in sorted(requests.items())) or "no requests"), flush=True,
        )  # fmt: skip
        print(f"    {' | '.join(text.strip().splitlines()[-2:])[:200]}", flush=True)

    def find(self) -> None:
        """Mount the second version, and look at every name."""
        lake = self.lake
        self._tally.begin()
        began_s = time.perf_counter()
        lake.mount("--dataset", "set@2")
        print(f"mount: {time.perf_counter() - began_s:.1f} s, {lake.number('memory.rss') >> 20} MiB", flush=True)
        began_s = time.perf_counter()
        found = subprocess.run(
            ["find", ".", "-type", "f", "-printf", "x"], cwd=lake.path, capture_output=True, check=True
        )
        print(f"find: {len(found.stdout):,} names, {time.perf_counter() - began_s:.1f} s, "
              f"{lake.number('memory.rss') >> 20} MiB, {self._tally.take().requests}", flush=True)  # fmt: skip


@contextmanager
def counted(server: Server, directory: Path) -> Iterator[tuple[Server, Tally]]:
    """HAProxy in front of a store, which logs each request."""
    port = free_port()
    proxied = server.at(f"http://127.0.0.1:{port}")
    way = Way(port, urlsplit(server.url).netloc)
    with haproxy([way], directory, 0, lambda: s3_answers(proxied), log=EACH_REQUEST):
        yield proxied, Tally(directory / "haproxy.log", {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", type=int, default=1_000_000)
    names = parser.parse_args().names
    with tempfile.TemporaryDirectory(prefix="measure-datasets-") as name:
        directory = Path(name)
        with seaweedfs(directory / "store") as server, counted(server, directory / "proxy") as (behind, tally):
            make_bucket(server, BUCKET)
            with s3_lake(server, BUCKET, directory / "lake", through=behind) as lake:
                bench, source = Bench(lake, tally, behind.url), lake.source
                bench.run("ingest", "ingest", "-", f"{source}/data", "--lake", source, files=range(names))
                bench.run("create", "dataset", "create", source, "set", "data")
                more = range(names, names + ADDED)
                bench.run("ingest again", "ingest", "-", f"{source}/data", "--lake", source, files=more)
                bench.run("create again", "dataset", "create", source, "set", "data")
                bench.run("snapshot", "snapshot", source)
                bench.run("create with an index", "dataset", "create", source, "set", "data")
                bench.run("ls", "dataset", "ls", source)
                bench.run("diff", "dataset", "diff", source, "set@1", "set@2")
                bench.run("verify", "dataset", "verify", source, "set@2")
                bench.run("verify --read", "dataset", "verify", source, "set@2", "--read")
                bench.run("show --files", "dataset", "show", source, "set@2", "--files")
                bench.find()
                bench.run("status", "dataset", "status", source, "set@2")


if __name__ == "__main__":
    main()
