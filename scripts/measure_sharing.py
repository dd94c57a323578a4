"""What sharing a lake between nodes and writing into it cost, on real mounts, an older program beside this one.

    python -m scripts.measure_sharing ROW… --old ../old/.venv/bin/python --repeats 3 --record
    python -m scripts.measure_sharing --write              make docs/benchmarks/sharing.md of what is recorded

SeaweedFS behind HAProxy, which delays each request by 15 ms; every mount is a process of its own with an empty cache.
In each round all programs have their turn on a lake of their own. Prints figures as they come. Counts are the largest
of all rounds, times the shortest: other programs of the machine only make them longer. `--record` adds the figures to
docs/benchmarks/sharing.jsonl, in place of those of another commit of the program. Programs that the rows run (lmdb,
TensorBoard, requests) are installed below `--tools` with pip.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lakefs_fuse.commits.archive import Member, build, commit_key
from lakefs_fuse.commits.record import Mkdir, Operation, Put, Record, Remove, encode
from tests.mount.lakes import Bucket, Lake, Stats, eventually
from tests.servers import (
    EACH_REQUEST,
    REGION,
    Server,
    Way,
    free_port,
    haproxy,
    latency,
    make_bucket,
    redis_server,
    s3_answers,
    s3_client,
    seaweedfs,
)

DOCS = Path(__file__).parents[1] / "docs" / "benchmarks"
LEDGER, PAGE = DOCS / "sharing.jsonl", DOCS / "sharing.md"
BUCKET = "sharing"
DELAY_MS = 15
REFRESH_S, PUBLISH_S = 5, 10
SEEN_S_MAX = 120.0
WRITER = "0000000a"
"""Of commits that are put into the bucket."""
PREPARED_S = 8.0
"""After which followers have polled, and nothing is left to be announced or repeated."""
IDLE_PATCH = "from lakefs_fuse.commits import idleness\nidleness.IDLE_AFTER_S = 20.0\n"
"""Nobody waits for ten minutes."""

Figures = dict[str, float]


@dataclass(frozen=True)
class Program:
    name: str
    python: str

    def commit(self) -> str:
        """The last one that changed the program, in the checkout that it is installed from."""
        code = "import lakefs_fuse; print(lakefs_fuse.__path__[0])"
        place = run(self.python, "-P", "-c", code, cwd="/").strip()
        return run("git", "-C", place, "log", "-1", "--format=%h, %cs", "--", ".").strip()


@dataclass
class Bench:
    """The store, and what is the same for all programs and rounds."""

    server: Server
    slow: Server
    directory: Path
    tools: Path

    def source(self, name: str, fill: Callable[[Path], None]) -> Path:
        """A directory on the local disk, made once."""
        path = self.directory / "sources" / name
        if not path.exists():
            path.mkdir(parents=True)
            fill(path)
        return path


@dataclass
class Site:
    """One lake, and the mounts of one program on it."""

    bench: Bench
    program: Program
    directory: Path
    lakes: list[Lake] = field(default_factory=list)

    @property
    def outside(self) -> Bucket:
        return Bucket(self.bench.server, BUCKET, self.directory.name + "/")

    @property
    def is_old(self) -> bool:
        return self.program.name == "old"

    def mount(self, *options: str, through: Server | None = None, environment: Mapping[str, str] | None = None) -> Lake:
        outside, url = self.outside, (through or self.bench.slow).url
        directory = self.directory / f"node-{len(self.lakes)}"
        lake = Lake(outside, outside.source, directory, "--endpoint-url", url, "--region", REGION, *options)
        lake.command = [self.program.python, "-P", "-m", "lakefs_fuse"]
        lake.env.pop("PYTHONPATH", None)
        lake.env.update(environment or {})
        self.lakes.append(lake)
        return lake.mount("--refresh", f"{REFRESH_S}s")

    def close(self) -> None:
        for lake in self.lakes:
            try:
                lake.close()
            except AssertionError as error:  # an older program may log what this one does not
                print(f"{self.program.name}: {str(error)[:300]}", flush=True)


class Spending:
    """Store requests, FUSE requests and polls of a mount since this was made."""

    def __init__(self, lake: Lake) -> None:
        self._lake, self._before = lake, _counts(lake.stats())

    def so_far(self) -> Counter[str]:
        return Counter(_counts(self._lake.stats())) - self._before


def _counts(stats: Stats) -> Counter[str]:
    store, upcalls, commits = stats["store"], stats["upcalls"], stats["commits"]
    assert isinstance(store, dict) and isinstance(upcalls, dict) and isinstance(commits, dict)
    counts = Counter({f"upcall {name}": count for name, count in upcalls.items()})
    counts.update({name.upper(): count for name, count in store["requests"].items()})
    counts.update({name: commits.get(name, 0) for name in ("polls", "announcements", "bundles_written")})
    return counts


def run(*command: str | Path, cwd: str | Path | None = None, **environment: str) -> str:
    done = subprocess.run(
        [str(each) for each in command], cwd=cwd, env=os.environ | environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{command}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
    return done.stdout


def cli(lake: Lake, *arguments: str) -> None:
    done = lake.cli(*arguments, timeout_s=600.0)
    if done.returncode:
        raise RuntimeError(f"{arguments}: {done.stderr}\n{lake.log()[-2000:]}")


def cpu_s(lake: Lake) -> float:
    """Processor time of the daemon."""
    fields = Path(f"/proc/{lake.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def timed(body: Callable[[], object]) -> float:
    began_s = time.monotonic()
    body()
    return time.monotonic() - began_s


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def has_files(folder: Path, count: int) -> bool:
    return folder.is_dir() and len(os.listdir(folder)) == count


def has_all(lake: Lake, paths: list[str]) -> bool:
    return all((lake.path / path).exists() for path in paths)


def requests_of(counts: Counter[str]) -> int:
    """Of any kind."""
    return sum(count for name, count in counts.items() if name.isupper())


# -- nodes that share a lake


def follow(site: Site, writers: int) -> Figures:
    """Renames by ``writers``, and what another mount asks for (of three the one in the middle, as one of the mounts may
    be the repeater); then two mounts that know nothing."""
    count = 1200
    nodes = [site.mount("--pack", "always") for _ in range(writers)]
    followers = [site.mount() for _ in range(1 if writers == 1 else 3)]
    with ThreadPoolExecutor(16) as pool:
        for at, node in enumerate(nodes):
            (node.path / f"d{at}").mkdir()
            paths = [node.path / f"d{at}" / f"{file:05}" for file in range(count // writers)]
            list(pool.map(lambda path: path.write_bytes(b"x" * 100), paths))
    for at in range(writers):
        for lake in followers:
            eventually(partial(has_files, lake.path / f"d{at}", count // writers), "follows", SEEN_S_MAX)
    time.sleep(PREPARED_S)
    spending = [Spending(lake) for lake in followers]

    def rename_all(at: int) -> None:
        for file in range(count // writers):
            folder = nodes[at].path / f"d{at}"
            os.rename(folder / f"{file:05}", folder / f"r{file:05}")

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(rename_all, range(writers)))
    last = [f"d{at}/r{count // writers - 1:05}" for at in range(writers)]
    for lake in followers:
        eventually(partial(has_all, lake, last), "the last rename is seen", SEEN_S_MAX)
    spent = sorted((each.so_far() for each in spending), key=lambda each: each["GET"])
    middle = spent[len(spent) // 2]
    figures = {
        "gets": float(middle["GET"]),
        "gets_most": float(spent[-1]["GET"]),
        "lists": float(middle["LIST"]),
        "polls": float(middle["polls"]),
        "gets_per_poll": middle["GET"] / max(1, middle["polls"]),
    }
    time.sleep(PREPARED_S)
    for _ in range(2):
        fresh = site.mount()
        assert has_all(fresh, last)
        figures["fresh_requests"] = max(figures.get("fresh_requests", 0.0), requests_of(_counts(fresh.stats())))
    return figures


def stat_at_random(site: Site) -> Figures:
    """30 s over 200 packed directories, TTL 2 s, below a directory and in the root of the lake."""
    writer = site.mount("--pack", "always", "--durability", "writeback")
    figures = {}
    for above, figure in (("data", "lists"), ("", "root_lists")):
        root = writer.path / above
        root.mkdir(exist_ok=True)
        for folder in range(200):
            (root / f"p{folder:03}").mkdir()
            for file in range(5):
                (root / f"p{folder:03}/f{file}").write_bytes(b"y")
        cli(writer, "flush", str(writer.path))
        reader = site.mount("--metadata-ttl", "2")
        time.sleep(PREPARED_S)
        root = reader.path / above
        for folder in range(200):
            assert len(os.listdir(root / f"p{folder:03}")) == 5
        rng, spending, end_s = random.Random(0), Spending(reader), time.monotonic() + 30.0
        while time.monotonic() < end_s:
            os.stat(root / f"p{rng.randrange(200):03}/f{rng.randrange(5)}")
        figures[figure] = float(spending.so_far()["LIST"])
    return figures


@contextlib.contextmanager
def logged_proxy(site: Site) -> Iterator[tuple[Server, Path]]:
    """Another way to the store with the same delay, and a log of the requests."""
    port = free_port()
    logged = site.bench.slow.at(f"http://127.0.0.1:{port}")
    log = site.directory / "proxy" / "haproxy.log"
    way = Way(port, site.bench.server.url.removeprefix("http://"))
    with haproxy([way], log.parent, DELAY_MS, lambda: s3_answers(logged), log=EACH_REQUEST):
        yield logged, log


def idle(site: Site) -> Figures:
    """Requests a minute of a mount that was asked a minute before for the last time, over four minutes; `stats` would
    be a question."""
    (site.directory / "patch").mkdir(parents=True)
    (site.directory / "patch" / "sitecustomize.py").write_text("" if site.is_old else IDLE_PATCH)
    with logged_proxy(site) as (way, log):
        environment = {"PYTHONPATH": str(site.directory / "patch")}
        options = () if site.is_old else ("--maintenance", "off")  # looks once an hour, with three requests
        lake = site.mount("--metadata-ttl", "10", *options, through=way, environment=environment)
        (lake.path / "file").write_bytes(b"x")
        assert os.listdir(lake.path) == ["file"]
        time.sleep(60.0)
        begin = log.stat().st_size
        time.sleep(240.0)
        sent = [line for line in log.read_text()[begin:].splitlines() if "<BADREQ>" not in line]
        print("\n".join(sent), flush=True)
        return {"requests_per_minute": len(sent) / 4}


def names(first: int, count: int) -> list[str]:
    return [f"data/part-{each // 1000:05d}/sample-{each:09d}.jpg" for each in range(first, first + count)]


def put_commit(site: Site, operations: Callable[[int], list[Operation]]) -> None:
    """A commit of another node with one blob; ``operations`` is given where that lies."""
    now = time.time_ns()
    data = build(
        [Member("blob", b"x" * 100, 100)],
        lambda offsets: encode(Record(writer=WRITER, time=now, operations=operations(offsets[0]))),
    )
    site.outside.replace(commit_key(now, WRITER), data)


def fold(site: Site) -> Figures:
    """Changes folded into an index of 100,000 names. The old program has a command; this one's mounts fold, which is
    counted in process, by `measure_folds`."""
    total, changes, folds = 100_000, 1000, 3 if site.is_old else 50
    if not site.is_old:
        command = (sys.executable, "-m", "scripts.measure_folds")
        output = run(*command, "--names", str(total), "--folds", str(folds), "--changes", str(changes))
        print(output, flush=True)
        pattern = r" folds: ([\d.]+) requests.*?\}, ([\d,]+) bytes, index ([\d.]+) \(now [\d.]+, at most ([\d.]+)\)"
        found = re.search(f"{folds}{pattern}" + r".*a fresh mount: (\d+) requests", output, re.DOTALL)
        assert found is not None
        requests, sent, index, index_most, fresh = (float(each.replace(",", "")) for each in found.groups())
        return {"requests": requests, "mb": sent / 1e6, "index_ratio": index, "index_ratio_most": index_most,
                "fresh_requests": fresh}  # fmt: skip
    put_commit(site, lambda at: [Put(path, 0, at, 100, 0o644, 0, 0, 1) for path in names(0, total)])
    figures: Figures = {}
    with logged_proxy(site) as (way, log):
        lake = site.mount(through=way)
        eventually((lake.path / names(0, total)[-1]).exists, "all are there", SEEN_S_MAX)
        time.sleep(PREPARED_S)
        lake.umount()
        for turn in range(folds + 1):
            put_commit(
                site,
                lambda at: [
                    *(Put(path, 0, at, 100, 0o644, 0, 0, 2) for path in names(total * turn, changes * 9 // 10)),  # noqa: B023
                    *(Remove(path) for path in names(turn * changes, changes // 10)),  # noqa: B023
                ],
            )
            begin = log.stat().st_size
            cli(lake, "snapshot", lake.source, *lake.options)
            lines = [line.split(" ") for line in log.read_text()[begin:].splitlines() if line.count(" ") >= 5]
            if turn:
                sizes = [int(sent if method == "PUT" else got) for method, _, sent, got, *_ in lines]
                figures["requests"] = max(figures.get("requests", 0.0), len(lines))
                figures["mb"] = max(figures.get("mb", 0.0), sum(sizes) / 1e6)
    figures["fresh_requests"] = float(requests_of(_counts(site.mount().stats())))
    return figures


PROBER = """
import contextlib, os, sys, time
longest_s = 0.0
while not os.path.exists(sys.argv[2]):
    began_s = time.monotonic()
    with contextlib.suppress(OSError):
        os.getxattr(sys.argv[1], "user.none")
    longest_s = max(longest_s, time.monotonic() - began_s)
    time.sleep(0.001)
print(longest_s)
"""


@contextlib.contextmanager
def probed(lake: Lake, into: list[float]) -> Iterator[None]:
    """How long another process waits for an answer, at most, while the body runs, in ms."""
    flag = lake.path.parent / f"stop-{time.monotonic_ns()}"
    command = [sys.executable, "-c", PROBER, str(lake.path), str(flag)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        time.sleep(0.3)
        try:
            yield
        finally:
            flag.touch()
        into.append(1000 * float(process.communicate()[0]))


def rename(site: Site, count: int, *, hooks: bool) -> Figures:
    """A directory of ``count`` packed names three times, here and on a node that follows."""
    environment = {} if hooks else {"LAKEFS_FUSE_HOOKS": "off"}
    files = [f"d/f{each:06d}" for each in range(count)]
    put_commit(
        site, lambda at: [Mkdir("d", 0o755, 0, 0, 1), *(Put(each, 0, at, 100, 0o644, 0, 0, 1) for each in files)]
    )
    here = site.mount("--metadata-ttl", "1h", environment=environment)
    there = site.mount("--metadata-ttl", "1h", environment=environment)
    for lake in (here, there):
        eventually(partial(has_files, lake.path / "d", count), "all are there", SEEN_S_MAX)
    time.sleep(PREPARED_S)
    here_ms, there_ms = list[float](), list[float]()
    for old, new in (("d", "e"), ("e", "d"), ("d", "e")):
        with probed(there, there_ms):
            with probed(here, here_ms):
                os.rename(here.path / old, here.path / new)
                time.sleep(0.2)
            eventually((there.path / new).exists, "it is seen", SEEN_S_MAX)
            time.sleep(0.2)
        assert len(os.listdir(there.path / new)) == count
    return {"here_ms": min(here_ms), "there_ms": min(there_ms)}


def publish(site: Site) -> Figures:
    """By how much what another node reads of an event file is behind, while it stays open."""
    writer = site.mount(*(() if site.is_old else ("--publish", f"{PUBLISH_S}s")))
    reader = site.mount()
    assert os.listdir(reader.path) == []
    began_s, lines, oldest_s = time.monotonic(), 0, 0.0
    with (writer.path / "events").open("ab", buffering=0) as file:
        while time.monotonic() - began_s < 60.0:
            file.write(b"%019d\n" % time.monotonic_ns())
            lines += 1
            time.sleep(0.5)
            with contextlib.suppress(FileNotFoundError):
                data = (reader.path / "events").read_bytes()
                oldest_s = max(oldest_s, time.monotonic() - int(data[-20:]) / 1e9)
        if not (reader.path / "events").exists():
            oldest_s = 60.0
    return {"oldest_s": oldest_s}


def seen(site: Site, *, hints: bool) -> Figures:
    """From the end of `close` on one node until another that had asked for the name reads the bytes."""
    with contextlib.ExitStack() as stack:
        options: tuple[str, ...] = ()
        if hints:
            port = free_port()
            stack.enter_context(redis_server(site.directory / "redis", port))
            options = ("--hints", f"redis://127.0.0.1:{port}")
        lake, other = (site.mount(*options) for _ in range(2))
        time.sleep(2.0)
        seen_s = []
        for file in range(100 if hints else 3 if site.is_old else 10):
            assert not (lake.path / f"{file}").exists()
            (other.path / f"{file}").write_bytes(b"weights")
            began_s = time.monotonic()
            while not (lake.path / f"{file}").exists() and time.monotonic() - began_s < SEEN_S_MAX:
                time.sleep(0.002)
            assert (lake.path / f"{file}").read_bytes() == b"weights"
            seen_s.append(time.monotonic() - began_s)
            time.sleep(random.uniform(0.2, 2.0))
        figures = {"p50_ms": 1000 * percentile(seen_s, 0.5), "p99_ms": 1000 * percentile(seen_s, 0.99)}
        return figures | {"most_s": max(seen_s)}


# -- writing


def spend(lake: Lake, body: Callable[[], object]) -> tuple[Figures, Counter[str]]:
    """Seconds until the body is done and until all is in the store, and requests until then."""
    spending, before_s = Spending(lake), cpu_s(lake)
    seconds = timed(body)
    flush_s = timed(lambda: cli(lake, "flush", str(lake.path)))
    spent = spending.so_far()
    kinds = ("PUT", "LIST", "HEAD", "GET")
    figures = {
        "seconds": seconds,
        "flush_s": flush_s,
        "cpu_s": cpu_s(lake) - before_s,
        **{kind.lower() + "s": float(spent[kind]) for kind in kinds},
    }
    figures |= {"other_requests": float(requests_of(spent) - sum(spent[kind] for kind in kinds))}
    fsyncs = spent["upcall fsync"] + spent["upcall fsyncdir"]
    figures |= {"fsyncs": float(fsyncs), "polls": float(spent["polls"])}
    figures["lists_but_polls"] = float(max(0, spent["LIST"] - spent["polls"]))
    each_second = min(int(seconds + flush_s) + 1, spent["PUT"])
    """Commits of names, announcements among them, come at most so often."""
    figures["puts_per_fsync"] = (spent["PUT"] - spent["bundles_written"] - each_second) / max(1, fsyncs)
    return figures, spent


def durable(site: Site, mode: str, *options: str) -> Lake:
    return site.mount("--durability", mode, *options)


def append(site: Site, mode: str) -> Figures:
    """A line to one file, 1,000 times, each with an open and a close; in turns with as many bare PUTs of these bytes,
    so that other work of the machine makes both longer."""
    count, in_turn, appended_s, bare_s = 1000, 20, 0.0, 0.0
    lake, client, body = durable(site, mode), s3_client(site.bench.slow), b""

    def append_lines(first: int) -> None:
        for line in range(first, first + in_turn):
            with (lake.path / "log.txt").open("a") as file:
                file.write(f"line {line}\n")

    def put_lines(first: int) -> None:
        nonlocal body
        for line in range(first, first + in_turn):
            body += b"line %d\n" % line
            client.put_object(Bucket=BUCKET, Key=f"bare/{site.directory.name}", Body=body)

    def take_turns() -> None:
        nonlocal appended_s, bare_s
        for first in range(0, count, in_turn):
            appended_s += timed(partial(append_lines, first))
            bare_s += timed(partial(put_lines, first)) if mode == "close" else 0.0

    figures, _ = spend(lake, take_turns)
    figures["seconds"] = appended_s
    if mode == "close":
        figures |= {"bare_s": bare_s, "of_bare": appended_s / bare_s}
    figures["puts_per_close"] = figures["puts"] / count
    return figures


def tar(site: Site, mode: str, count: int) -> Figures:
    def fill(path: Path) -> None:
        rng = random.Random(1)
        for file in range(count):
            folder = path / f"d{file % 40:02}" / f"s{file % 5}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"f{file:05}").write_bytes(rng.randbytes(100) + b"x" * 1900)

    source = site.bench.source(f"tar-{count}", fill)
    archive = source.with_suffix(".archive")
    if not archive.exists():
        run("tar", "-cf", archive, "-C", source, *sorted(os.listdir(source)))
    lake = durable(site, mode)
    figures, _ = spend(lake, lambda: run("tar", "-xf", archive, "-C", lake.path))
    return figures | {"puts_per_file": figures["puts"] / count, "heads_per_file": figures["heads"] / count}


def rsync(site: Site) -> Figures:
    def fill(path: Path) -> None:
        for file in range(1500):
            (path / f"d{file % 30}").mkdir(exist_ok=True)
            (path / f"d{file % 30}" / f"f{file}").write_bytes(os.urandom(3000))

    source = site.bench.source("rsync", fill)
    lake = durable(site, "writeback")
    return spend(lake, lambda: run("rsync", "-a", f"{source}/", f"{lake.path}/rs/"))[0]


def against_disk(site: Site, body: Callable[[Path], object], *options: str, mode: str = "writeback") -> Figures:
    """The body in a mount and on the local disk, and the ratio of their times, without a round trip for each fsync."""
    disk = site.directory / "disk"
    disk.mkdir(parents=True)
    disk_s = timed(lambda: body(disk))
    lake = durable(site, mode, *options)
    figures, _ = spend(lake, lambda: body(lake.path))
    trips_s = figures["fsyncs"] * DELAY_MS / 1000
    return figures | {"disk_s": disk_s, "of_disk": (figures["seconds"] - trips_s) / disk_s}


def venv(site: Site) -> Figures:
    wheels = site.bench.tools / "wheels"

    def install(path: Path) -> None:
        run(sys.executable, "-m", "venv", path / "venv")
        pip = (path / "venv/bin/python", "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-index")
        run(*pip, "--find-links", wheels, "requests")

    return against_disk(site, install)


def git(site: Site) -> Figures:
    def fill(path: Path) -> None:
        run("git", "clone", "-q", "--bare", "--depth", "50", f"file://{DOCS.parents[1]}", path / "small.git")

    source = site.bench.source("git", fill) / "small.git"

    def clone(path: Path) -> None:
        run("git", "clone", "-q", f"file://{source}", path / "clone")
        run("git", "-C", path / "clone", "gc", "-q")

    return against_disk(site, clone)


SCALARS = """
import sys
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter(sys.argv[1], flush_secs=1)
for step in range(1000):
    writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag="loss", simple_value=step)])))
    writer.flush()
writer.close()
"""


def scalars(site: Site) -> Figures:
    """TensorBoard's own writer, with a flush after each scalar: it opens, appends and closes."""

    def write(path: Path) -> None:
        run(sys.executable, "-c", SCALARS, path / "run", PYTHONPATH=str(site.bench.tools / "site"))

    return against_disk(site, write)


def lmdb(site: Site) -> Figures:
    """The test of cursors of lmdb's own, with its databases in the lake."""
    tests = next((site.bench.tools / "lmdb").glob("lmdb-*/tests"))
    path = f"{site.bench.tools / 'site'}:{tests}"

    def test(directory: Path) -> None:
        command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "cursor_test.py", "-k", "CursorTest")
        run(*command, cwd=tests, PYTHONPATH=path, TMPDIR=str(directory), PYTHONDONTWRITEBYTECODE="1")

    return against_disk(site, test)


SQLITE = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1])
database.execute("create table runs(a, b)")
for number in range(100):
    database.execute("insert into runs values(?, ?)", (number, "x" * 100))
    database.commit()
"""


def sqlite(site: Site) -> Figures:
    """A table and 100 rows, each in a transaction of its own, as mlflow writes metrics."""
    return against_disk(site, lambda path: run(sys.executable, "-c", SQLITE, path / "db"), mode="close")


# -- rows


@dataclass(frozen=True)
class Aim:
    """What a figure is to be at most; ``is_time``, or a ratio of times, of which the shortest round counts."""

    figure: str
    text: str
    most: float
    is_time: bool = False


@dataclass(frozen=True)
class Row:
    what: str
    measure: Callable[[Site], Figures]
    aims: tuple[Aim, ...]
    test: str
    """Which asserts it from counters."""
    has_old: bool = True


SYNCED = (Aim("puts_per_fsync", "PUT for each fsync, beside one a second for names", 1),)
FOLLOWING = (
    Aim("gets_per_poll", "GET of a follower for each poll", 4),
    Aim("fresh_requests", "requests of a fresh mount", 100),
)
ROWS = {
    "follow": Row(
        "another node renames 1,200 files, one after the other",
        lambda site: follow(site, 1),
        FOLLOWING,
        "`tests/commits/test_repeater.py`: `test_follower_sends_four_gets_a_poll` (1 and 50 writers)",
    ),
    "follow-2": Row(
        "two other nodes rename 600 files each",
        lambda site: follow(site, 2),
        FOLLOWING,
        "the same",
    ),
    "stat": Row(
        "`stat` at random over 200 packed directories, TTL 2 s, 30 s",
        stat_at_random,
        (
            Aim("lists", "LIST, commit polls included, below a directory", 60),
            Aim("root_lists", "the same in the root of the lake", math.inf),
        ),
        "`tests/vfs/test_subtree_listing.py`: `test_stat_at_random_over_packed_directories_costs_a_list_each_ttl`",
    ),
    "idle": Row(
        "an idle mount",
        idle,
        (Aim("requests_per_minute", "requests a minute", 1),),
        "`tests/commits/test_idleness.py`: `test_idle_mount_polls_once_a_minute`",
    ),
    "fold": Row(
        "folding 1,000 changes into an index of 100,000 names",
        fold,
        (
            Aim("requests", "requests of a fold", 10),
            Aim("mb", "MB of a fold", 4),
            Aim("index_ratio", "index, of what is live, mean", 1.3),
            Aim("fresh_requests", "requests of a fresh mount", 100),
        ),
        "`tests/commits/test_index_levels.py`: `test_fold_costs_what_changed`",
    ),
    **{
        f"rename-{count}{suffix}": Row(
            f"renaming a directory of {count:,} names{how}",
            lambda site, count=count, hooks=hooks: rename(site, count, hooks=hooks),  # type: ignore[misc]
            (
                Aim("here_ms", "ms that another process waits at most, on this node", 100, is_time=True),
                Aim("there_ms", "the same on a node that follows", 100, is_time=True),
            ),
            "`tests/vfs/test_rename_steps.py`: "
            "`test_rename_takes_many_short_turns`; `tests/commits/test_apply_steps.py`",
        )
        for count in (20_000, 100_000)
        for suffix, how, hooks in (("", "", True), ("-python", ", without the C library", False))
    },
    "publish": Row(
        f"an event file that stays open, `--publish {PUBLISH_S}s`, on another node",
        publish,
        (Aim("oldest_s", "s that what is read is behind, at most (60: not seen)", PUBLISH_S + REFRESH_S + 2, True),),
        "`tests/mount/test_publish.py`: `test_log_that_a_program_keeps_open_is_read_on_another_node`",
    ),
    "seen": Row(
        "a file closed on one node, opened by another that asked before",
        lambda site: seen(site, hints=False),
        (Aim("most_s", "s until it is seen, at most", REFRESH_S + 2, is_time=True),),
        "`tests/mount/test_announcements.py`: "
        "`test_plain_file_of_another_mount_is_seen_within_refresh_and_two_seconds`",
    ),
    "hints": Row(
        "the same with `--hints`",
        lambda site: seen(site, hints=True),
        (Aim("p99_ms", "ms until it is seen, 99th percentile", 300, is_time=True),),
        "`tests/mount/test_hints.py`: `test_file_is_seen_within_a_second_whatever_the_refresh`",
        has_old=False,
    ),
    "append": Row(
        "a line appended, the file closed, 1,000 times",
        lambda site: append(site, "close"),
        (Aim("of_bare", "time, of that of bare PUTs", 1.2, True), Aim("puts_per_close", "PUT for each close", 1.05)),
        "`tests/vfs/test_file_table.py`: `test_appending_and_closing_costs_one_put_each`",
    ),
    "append-writeback": Row(
        "the same under write-back",
        lambda site: append(site, "writeback"),
        (Aim("seconds", "s", 2, is_time=True),),
        "`tests/vfs/test_program_costs.py`: `test_line_appended_again_and_again_under_writeback_is_stored_once`",
    ),
    "tar-writeback": Row(
        "`tar -x` of 8,000 small files, write-back",
        lambda site: tar(site, "writeback", 8000),
        (Aim("puts", "PUT", 40), Aim("lists", "LIST", 50)),
        "`tests/mount/test_writeback.py`: `test_programs_that_make_small_files_cost_a_pack_each`",
    ),
    "tar": Row(
        "`tar -x` of 8,000 small files",
        lambda site: tar(site, "close", 8000),
        (
            Aim("puts_per_file", "PUT for each file", 1.05),
            Aim("heads_per_file", "HEAD for each file", 1.0),
            Aim("lists_but_polls", "LIST beside polls", 5),
        ),
        "`tests/vfs/test_program_costs.py`: `test_unpacking_costs_one_put_and_one_head_a_file`",
    ),
    "venv": Row(
        "`python -m venv`, `pip install requests`, write-back",
        venv,
        (Aim("seconds", "s", 15, is_time=True),),
        "`tests/vfs/test_program_costs.py`: `test_operation_reads_no_names_of_other_files_that_wait_for_the_store`",
    ),
    "git": Row(
        "`git clone`, `git gc` of a small repository, write-back",
        git,
        (Aim("of_disk", "time less a round trip for each fsync, of that on the disk", 3, is_time=True),),
        "`tests/mount/test_create_offload.py`: `test_files_of_tar_need_no_python`",
    ),
    "rsync": Row("`rsync -a` of 1,500 small files, write-back", rsync, (Aim("puts", "PUT", 20),),
        "as for `tar-writeback`"),
    "scalars": Row("1,000 scalars of TensorBoard's writer, write-back", scalars, (Aim("puts", "PUT", 20),),
        "as for `append-writeback`"),
    "lmdb": Row("lmdb's test of cursors, write-back", lmdb, SYNCED,
        "`tests/vfs/test_program_costs.py`: `test_transaction_of_a_database_costs_one_put_for_each_fsync`"),
    "sqlite": Row("SQLite, 100 transactions", sqlite, SYNCED,
        "`tests/mount/test_tools.py`: `test_sqlite_costs_one_put_for_each_fsync`"),
}  # fmt: skip


WHY = {
    "stat": "SeaweedFS lists in another order than that of bytes, so that one LIST cannot leave the reserved keys "
    "out: in the root of a lake each directory costs one. Stores that list in the order of bytes, as "
    "Amazon S3 does, are asked twice for all of them.",
    "hints": "while other programs used both cores; while none did 162 to 232 ms ([ADR 0142](../adr/0142-hints.md)).",
    "append": "a close is one PUT. Beside it an append takes seven FUSE requests and 5 to 6 ms of CPU of the daemon.",
    "append-writeback": "each close waits for a sync of the local disk, and takes seven FUSE requests, 1 to 2 ms of "
    "CPU in all.",
    "git": "each close waits for a sync, which the same program on the disk does not wait for, and takes five or six "
    "FUSE requests: half of the time is CPU of the daemon. A disk that was slower (0.8 s) made it 3.1 to 4.3. bindfs "
    "1.14, which is written in C and hands each request on to the disk, without a store and a sync, takes 3.5 to 5.1 "
    "times as long as the disk here (four alternating runs): FUSE alone costs more than 3.",
    "tar": "8,000 PUT for files, 80 for directories and 321 for announcements, one a second, in 340 s; the older "
    "program took 399 s. 7 LIST beside polls in that time, 8,008 before: one each TTL looks for what other programs "
    "put.",
}
"""Why rows miss aims."""
BUDGETS = """
| operation | test |
|---|---|
| `stat` of a name listed within the TTL | `tests/mount/test_metadata.py`: `test_stat_within_the_ttl_costs_nothing` |
| listing an unchanged directory again | `tests/mount/test_kernel_caches.py`: `test_what_it_spares` |
| listing packed files in a fresh mount with an index | `tests/mount/test_listing.py`: \
`test_many_packed_names_cost_few_upcalls`; \
`tests/mount/test_index.py`: `test_the_first_listing_of_a_fresh_node` |
| open, read and close of a small file in the page cache | `tests/mount/test_metadata.py`: \
`test_opening_and_reading_what_is_in_the_page_cache` |
| the same, immutable mount | `tests/mount/test_immutable.py`: `test_what_was_seen_once_costs_no_upcall` |
| `torch.load` of the checkpoint just saved | `tests/mount/test_torch.py`: \
`test_a_checkpoint_just_saved_is_loaded_from_memory` |
| saving a checkpoint | `tests/bench/test_counts.py`: `test_a_checkpoint`; `tests/mount/test_uploads.py`: \
`test_parts_go_up_before_close` |
| small files of concurrent writers | `tests/mount/test_uploads.py`: `test_many_small_files_closed_together`; \
`tests/mount/test_writeback.py`: `test_many_small_files_share_packs` |
| rename of a file or of a directory | \
`tests/mount/test_names.py`: `test_mv_is_one_put`; `tests/mount/test_commits.py`: \
`test_rename_is_one_put` |
| first and second epoch over packed files | `tests/bench/test_counts.py`: `test_first_epoch_of_packed_files`, \
`test_second_epoch` |
| fresh mount of a lake for which nobody has run a command | `tests/mount/test_maintenance.py`: \
`test_lake_is_folded_and_collected_by_itself`; `tests/commits/test_bundles.py`: \
`test_mount_that_fetched_much_spares_the_next_one` |
| an idle mount | `tests/commits/test_idleness.py`: `test_idle_mount_polls_once_a_minute` |
| `stat` at random over packed directories | `tests/vfs/test_subtree_listing.py`: \
`test_stat_at_random_over_packed_directories_costs_a_list_each_ttl` |
| following what others rename | `tests/commits/test_repeater.py`: `test_follower_sends_four_gets_a_poll`; \
`tests/commits/test_shallow_polls.py`: `test_pages_of_a_poll_do_not_grow_with_the_writers` |
| folding | `tests/commits/test_index_levels.py`: `test_fold_costs_what_changed` |
| renaming or removing a large directory | `tests/vfs/test_rename_steps.py`: `test_rename_takes_many_short_turns`; \
`tests/commits/test_apply_steps.py`: `test_apply_in_steps_changes_few_names_at_a_time` |
| reading a data set larger than the cache at random | \
`test_random_epochs_over_packs_larger_than_the_cache_fetch_what_it_cannot_hold` |
| a file written by another node | `tests/mount/test_announcements.py`: \
`test_plain_file_of_another_mount_is_seen_within_refresh_and_two_seconds` |
| probing what the store can do | `tests/store/test_lake_record.py`: `test_open_record_fresh_record_costs_one_get` |
| `cp -r` inside the lake | none |
"""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the ledger."""

    row: str
    program: str
    commit: str
    rounds: list[Figures]


def read_ledger() -> list[Measured]:
    lines = LEDGER.read_bytes().splitlines() if LEDGER.exists() else []
    return [msgspec.json.decode(line, type=Measured) for line in lines]


def record(measured: Measured) -> None:
    """More rounds of the same row and program, or in place of those of another commit."""
    ledger = {(each.row, each.program): each for each in read_ledger()}
    key = measured.row, measured.program
    if key in ledger and ledger[key].commit == measured.commit:
        measured = replace(measured, rounds=[*ledger[key].rounds, *measured.rounds])
    ledger[key] = measured
    order = list(ROWS)
    lines = sorted(ledger.values(), key=lambda each: (order.index(each.row), each.program))
    LEDGER.write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in lines))


def value(measured: Measured | None, aim: Aim) -> float | None:
    """Of the rounds; None where the program cannot do that."""
    found = [each[aim.figure] for each in measured.rounds if aim.figure in each] if measured else []
    return (min(found) if aim.is_time else max(found)) if found else None


def shown(figure: float | None) -> str:
    if figure is None or figure == math.inf:
        return "–"
    return f"{figure:,.0f}" if figure >= 100 or figure == int(figure) else f"{figure:.3g}"


def table(ledger: list[Measured]) -> str:
    """Markdown."""
    by_name = {(each.row, each.program): each for each in ledger}
    lines = [
        "| what | figure | before | now | aim | | time, of before | test |",
        "|---|---|---:|---:|---:|---|---:|---|",
    ]
    for name, row in ROWS.items():
        old, new = by_name.get((name, "old")), by_name.get((name, "new"))
        if new is None:
            continue
        seconds = Aim("seconds", "", 0, is_time=True)
        was_s, is_s = value(old, seconds), value(new, seconds)
        ratio = f"{is_s / was_s:.2f} ×" if was_s and is_s else ""
        for at, aim in enumerate(row.aims):
            now = value(new, aim)
            met = "" if now is None or aim.most == math.inf else "met" if now <= aim.most else "**missed**"
            what, test = ("", "") if at else (f"{row.what} (`{name}`)", row.test or "–")
            cells = (
                what,
                aim.text,
                shown(value(old, aim)),
                shown(now),
                shown(aim.most),
                met,
                "" if at else ratio,
                test,
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def is_missed(ledger: list[Measured], name: str) -> bool:
    """An aim of the row."""
    new = next((each for each in ledger if (each.row, each.program) == (name, "new")), None)
    return any((value(new, aim) or 0.0) > aim.most for aim in ROWS[name].aims)


def commits_of(ledger: list[Measured], program: str) -> str:
    """The commit that most rows measure, and those of the other rows."""
    rows: dict[str, list[str]] = {}
    for each in ledger:
        if each.program == program:
            rows.setdefault(each.commit, []).append(f"`{each.row}`")
    most, *others = sorted(rows, key=lambda commit: -len(rows[commit])) or ["nothing"]
    return "; ".join([most, *(f"for {', '.join(rows[commit])} it is {commit}" for commit in others)])


def page(ledger: list[Measured]) -> str:
    misses = [f"* `{name}`: {why}" for name, why in WHY.items() if name == "stat" or is_missed(ledger, name)]
    return "\n".join([
        "# What sharing and writing cost",
        "",
        "<!-- Generated by `python -m scripts.measure_sharing --write` from sharing.jsonl; do not edit. -->",
        "",
        "Measured by `python -m scripts.measure_sharing` on real mounts with SeaweedFS, each request delayed by",
        f"{DELAY_MS} ms, on two cores that other programs used, too. *Before* is {commits_of(ledger, 'old')};",
        f"*now* is {commits_of(ledger, 'new')}. Counts are the largest of all rounds, times the shortest.",
        "Rounds are of several runs, most rows have one or two, and the machine was busier in some of them; compare",
        "times of one run only. The older program's count of `idle` is that of the mount's own counters.",
        "Folding is counted with the store in memory (`scripts/measure_folds.py`), before by `snapshot` on SeaweedFS;",
        "[ADR 0140](../adr/0140-index-levels.md) has a million names.",
        "",
        table(ledger),
        "",
        *(["## What misses its aim, and why", "", *misses, ""] if misses else []),
        "## Tests of the budgets",
        "",
        "What each operation may cost is asserted from counters by these tests:",
        BUDGETS,
    ])  # fmt: skip


def prepare(tools: Path) -> None:
    """Programs that rows run."""
    pip = (sys.executable, "-m", "pip", "-q", "--disable-pip-version-check")
    if not (tools / "site").exists():
        run(*pip, "install", "--target", tools / "site", "lmdb", "tensorboard")
    if not (tools / "wheels").exists():
        run(*pip, "download", "-d", tools / "wheels", "requests")
    if not (tools / "lmdb").exists():
        run(*pip, "download", "--no-deps", "--no-binary", "lmdb", "-d", tools / "lmdb", "lmdb")
        run("tar", "-xzf", next((tools / "lmdb").glob("*.tar.gz")), "-C", tools / "lmdb")


def measure(options: argparse.Namespace) -> None:
    programs = [Program("new", sys.executable)]
    if options.old:
        programs.insert(0, Program("old", options.old))
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sharing-")))
        server = stack.enter_context(seaweedfs(directory / "seaweed"))
        make_bucket(server, BUCKET)
        slow = stack.enter_context(latency(server, directory / "haproxy", DELAY_MS))
        bench = Bench(server, slow, directory, options.tools or directory / "tools")
        prepare(bench.tools)
        for name in options.rows or ROWS:
            row = ROWS[name]
            rounds: dict[str, list[Figures]] = {}
            for turn in range(options.repeats):
                for program in programs[:: -1 if turn % 2 else 1]:
                    if program.name == "old" and not row.has_old:
                        continue
                    site = Site(bench, program, directory / f"{name}-{program.name}-{turn}")
                    try:
                        figures = {key: round(each, 4) for key, each in row.measure(site).items()}
                    finally:
                        site.close()
                    rounds.setdefault(program.name, []).append(figures)
                    print(f"{name} {program.name}: {figures}", flush=True)
            for program in programs if options.record else ():
                if program.name in rounds:
                    record(
                        Measured(row=name, program=program.name, commit=program.commit(), rounds=rounds[program.name])
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=" ".join(ROWS))
    parser.add_argument("--old", metavar="PYTHON", help="interpreter of an environment with an older program")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--tools", type=Path, metavar="DIR", help="where pip has put, or puts, what the rows run")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page(read_ledger()))
    else:
        measure(options)
        print(table(read_ledger()))


if __name__ == "__main__":
    main()
