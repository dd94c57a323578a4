"""Results of a benchmark run, made up."""

from __future__ import annotations

from scripts.bench.results import (
    Daemon,
    Failure,
    Latency,
    PeerNote,
    Results,
    Sample,
    Store,
    WorkloadNote,
)

COLD = WorkloadNote("first epoch, 4 readers", "epochs", "files/s", "client", "Training begins.", "Files are read.")
WARM = WorkloadNote("large file, sequential, warm", "large files", "MiB/s", "disk", "Again.", "The same.")
PEERS = [
    PeerNote("lakefs", "ours", "0.1.0", "lakefs-fuse mount", "every option at its default"),
    PeerNote("lakefs immutable", "ours", "0.1.0", "lakefs-fuse mount --immutable", ""),
    PeerNote("rclone", "mount", "rclone v1", "rclone mount", "slow | closes early"),
    PeerNote("s3fs", "mount", "V1", "s3fs", ""),
    PeerNote("obstore", "client", "0.12", "", ""),
    PeerNote("local disk", "disk", "ext4", "", ""),
]


def sample(operations: int, *, seconds: float = 2.0, number: int = 1, stopped: float | None = None) -> Sample:
    """So many operations of a MiB each."""
    return Sample(
        round=number,
        seconds=seconds,
        operations=operations,
        bytes=operations << 20,
        latency=Latency(1.5, 12.25, 77.5),
        stopped_after_s=stopped,
        store=Store({"get": operations, "list": 3}, 1 << 20, 1 << 10, 0.25),
        daemon=Daemon(1.75, 96 << 20, {"open": 41, "read": 2}),
    )


def run(cold: dict[str, list[int]], warm: dict[str, list[int]] | None = None) -> Results:
    """Operations in 2 s by peer, one number a round."""
    found = Results(
        "2026-01-01 10:00 UTC", 600.0, False, {"kernel": "6.1"}, {}, {"get": 0.0004}, "prices of a store", PEERS,
        [COLD, WARM],
    )  # fmt: skip
    for note, done in ((COLD, cold), (WARM, warm or {})):
        for peer, counts in done.items():
            series = found.of(note.name, peer)
            series.samples += [sample(count, number=at + 1) for at, count in enumerate(counts)]
    return found


def failed(found: Results, workload: WorkloadNote, peer: str, what: str) -> None:
    found.of(workload.name, peer).failures.append(Failure(1, what))
