"""A simulated year of a lake that is written each day, in slices, with a ledger of its days.

    python -m scripts.scale year --days 60 --commits 1000 --ledger FILE

Three mounts, of which one packs all that it writes, and an hour of work a day: in it the mounts write so many files,
one after the other, each of which is a commit, and one of them removes the files that are 30 days old. The mounts stay
for the other 23 hours, become idle, and fold and collect the lake. Then a mount with an empty cache starts.

A slice begins with what the one before left in the store, and with new mounts that have empty caches, as after all
machines were replaced. Beside the ledger, a line of JSON for each day, is `FILE.lake` with the objects of the store.
"""

from __future__ import annotations

import pickle
import resource
import tempfile
import time
from pathlib import Path

import msgspec
import trio

from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.protocol import ObjectMeta
from scripts.scale.cluster import Cluster, Counts, opened, place_of
from scripts.scale.prices import GB, MONTH_S, STORAGE_GB_MONTH, usd
from tests.simulation import scheduler

DAY_S, HOUR_S = 86400.0, 3600.0
NODES = 3
LIFE_DAYS = 30
FILE_BYTES = 200
SLICE_DAYS = 30
"""All mounts are replaced after each slice of this many days."""


class Day(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the ledger: what the store has at the end of a day, and what was asked for on it."""

    day: int
    files: int
    objects: dict[str, int]
    """Below `.lakefs/`, by place."""
    own_bytes: int
    gets: int
    lists: int
    puts: int
    deletes: int
    received: int
    sent: int
    fresh_requests: int
    """Of a mount with an empty cache."""
    fresh_bytes: int
    usd_month: float
    """Of 30 such days, and of what lies below `.lakefs/`."""
    cpu_s: float
    rss_mb: int


def read(ledger: Path) -> list[Day]:
    """The days so far."""
    lines = ledger.read_bytes().splitlines() if ledger.exists() else []
    return [msgspec.json.decode(line, type=Day) for line in lines]


def run(ledger: Path, *, days: int, commits: int) -> list[Day]:
    """Go on until the ledger has so many days."""
    while (done := len(read(ledger))) < days:
        count = min(SLICE_DAYS - done % SLICE_DAYS, days - done)
        scheduler.run(lambda: _slice(ledger, done, count, commits), f"year/{commits}/{done}")  # noqa: B023
    return read(ledger)


async def _slice(ledger: Path, first: int, count: int, commits: int) -> None:
    lake = ledger.with_name(ledger.name + ".lake")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        async with opened(Path(scratch), f"year/{first}", collect_each_s=DAY_S, began_s=first * DAY_S) as cluster:
            if first:
                for key, data, etag, mtime_ns in pickle.loads(lake.read_bytes()):
                    cluster.store.restore(data, ObjectMeta(key, len(data), etag, mtime_ns, {}))
            for number in range(NODES):
                await cluster.add(pack="always" if number == NODES - 1 else "auto")
            with ledger.open("ab") as out:
                for day in range(first, first + count):
                    out.write(msgspec.json.encode(await _day(cluster, day, commits)) + b"\n")
                    out.flush()
            kept = [(key, data, meta.etag, meta.mtime_ns) for key, (data, meta) in cluster.store.objects.items()]
            lake.write_bytes(pickle.dumps(kept))


async def _day(cluster: Cluster, day: int, commits: int) -> Day:
    began_s, began_cpu_s, before = trio.current_time(), time.process_time(), _asked(cluster)
    await _work(cluster, day, commits)
    await trio.sleep(began_s + DAY_S - trio.current_time())
    asked = _asked(cluster).since(before)
    fresh = await cluster.fresh_mount()
    places = dict.fromkeys(("commits", "index", "other"), 0)
    files = 0
    for key in cluster.store.objects:
        if key.startswith(RESERVED_PREFIX):
            places[place_of(key)] += 1
        else:
            files += 1
    own_bytes = cluster.store.own()[1]
    gets, lists, puts = asked.of("get"), asked.of("list"), asked.of("put")
    month = MONTH_S / DAY_S * usd(gets=gets, lists=lists, puts=puts) + own_bytes / GB * STORAGE_GB_MONTH
    return Day(
        day=day + 1, files=files, objects=places, own_bytes=own_bytes, gets=gets, lists=lists, puts=puts,
        deletes=asked.of("delete"), received=asked.received, sent=asked.sent,
        fresh_requests=fresh.requests.total(), fresh_bytes=fresh.received, usd_month=round(month, 3),
        cpu_s=round(time.process_time() - began_cpu_s, 2),
        rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
    )  # fmt: skip


def _asked(cluster: Cluster) -> Counts:
    """Requests of mounts and of their maintenance."""
    return cluster.store.total("n")


async def _work(cluster: Cluster, day: int, commits: int) -> None:
    first = cluster.nodes[day % NODES]
    await first.mkdir(f"day-{day:03}")
    for number in range(commits):
        await trio.sleep(HOUR_S / (commits + 1))
        await cluster.nodes[number % NODES].write(f"day-{day:03}/{number:05}", b"%d" % number * (FILE_BYTES // 5))
    if day >= LIFE_DAYS:
        await first.remove_tree(f"day-{day - LIFE_DAYS:03}")
