"""What a run writes down, and how it is read again. The report is made of this alone.

A `Sample` is one peer in one workload in one round. Times are in seconds, latencies in milliseconds, sizes in bytes,
money in US dollars. None means that it is not known for that peer, never that it is zero.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

FORMAT = 1


class Latency(msgspec.Struct, frozen=True):
    """Of single operations, over one sample."""

    p50_ms: float
    p95_ms: float
    p99_ms: float


class Store(msgspec.Struct, frozen=True):
    """What the store was asked, as HAProxy saw it; bytes include the heads of requests and answers."""

    requests: dict[str, int]
    read_bytes: int
    written_bytes: int
    usd: float | None
    """None where a request has no price: `weed mount` does not speak S3."""


class Daemon(msgspec.Struct, frozen=True):
    """What the mount's own processes spent, children and supervisors included."""

    cpu_s: float
    rss_peak_bytes: int
    upcalls: dict[str, int] | None
    """Requests of the kernel. Only this filesystem counts them; the kernel does not."""


class Sample(msgspec.Struct, frozen=True):
    """One peer in one workload, once."""

    round: int
    seconds: float
    operations: int
    bytes: int
    latency: Latency | None = None
    stopped_after_s: float | None = None
    """The time limit, where it was reached: rates are over what was done until then."""
    durable_s: float | None = None
    """From the beginning until everything written was in the store; None where nothing is written."""
    undurable: bool = False
    """It was not all there when the time for that was over."""
    store: Store | None = None
    daemon: Daemon | None = None


class Failure(msgspec.Struct, frozen=True):
    """A peer that could not do it."""

    round: int
    what: str


class Series(msgspec.Struct):
    """All that one peer did in one workload."""

    workload: str
    peer: str
    samples: list[Sample] = msgspec.field(default_factory=list)
    failures: list[Failure] = msgspec.field(default_factory=list)


class PeerNote(msgspec.Struct, frozen=True):
    """Who it was; ``kind`` is ours, mount, client or disk."""

    name: str
    kind: str
    version: str
    options: str
    remark: str


class WorkloadNote(msgspec.Struct, frozen=True):
    """What it was. ``unit`` is its rate's; ``yardstick`` the kind of peer that it is held against: client or disk."""

    name: str
    group: str
    unit: str
    yardstick: str
    means: str
    how: str


class Results(msgspec.Struct):
    """A run."""

    began: str
    took_s: float
    quick: bool
    machine: dict[str, str]
    sizes: dict[str, float]
    prices: dict[str, float]
    price_list: str
    peers: list[PeerNote]
    workloads: list[WorkloadNote]
    series: list[Series] = msgspec.field(default_factory=list)
    format: int = FORMAT

    def of(self, workload: str, peer: str) -> Series:
        """Made where there is none."""
        for each in self.series:
            if each.workload == workload and each.peer == peer:
                return each
        self.series.append(Series(workload, peer))
        return self.series[-1]

    def peer(self, name: str) -> PeerNote:
        return next(note for note in self.peers if note.name == name)


def save(results: Results, path: Path) -> None:
    """Replaces the file at once: a run that dies leaves what the last save had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")
    os.replace(new, path)


def load(path: Path) -> Results:
    """Raises SystemExit where it is not a file of results."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Results)
    except (OSError, msgspec.DecodeError) as error:
        raise SystemExit(f"bench: {path}: no results: {error}") from error
    if found.format != FORMAT:
        raise SystemExit(f"bench: {path} has format {found.format}, this program reads {FORMAT}: run it again")
    return found
