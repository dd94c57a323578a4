"""Results of the benchmarks' workloads at a small size, run once by their own machinery."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec
import pytest

from scripts.bench import groups, machine, stage, tally, worker, workloads
from scripts.bench.method import Session
from scripts.bench.peers import ours
from scripts.bench.peers.ours import Lakefs, LakefsImmutable, LakefsPacked
from scripts.bench.peers.peer import PeerFailed
from scripts.bench.results import Results
from scripts.bench.sizes import MIB, QUICK, Sizes
from tests.mount.fork_server import ForkServer
from tests.servers import Server
from tests.tiers import IS_LONG

TINY: Sizes = msgspec.structs.replace(
    QUICK,
    files=80,
    readers=(4,),
    loader_workers=0,
    large_bytes=20 * MIB,
    pieces=3,
    checkpoint_bytes=20 * MIB,
    ranks=2,
    shard_bytes=10 * MIB,
    written_files=120,
    writers=8,
    tree_files=40,
    delay_ms=0,
    limit_s=60.0,
    long_limit_s=60.0,
    listing_limit_s=60.0,
    drain_limit_s=30.0,
)
"""Limits that are never reached, so that the counts are those of whole workloads."""

ALONE = ("--refresh", "1h", "--metadata-ttl", "1h", "--delete-after", "0", "--no-supervise")
"""Nobody else writes: no request comes later by itself. A supervisor sends none."""

WANTED: list[tuple[type[Lakefs], tuple[str, ...]]] = [
    (Lakefs, ("epochs", "large files", "small files", *(["checkpoint"] if IS_LONG else []))),
    (LakefsPacked, ("epochs",)),
    *([(LakefsImmutable, ("epochs",))] if IS_LONG else []),
]


def run_forked(*arguments: str, limit_s: float) -> str:
    """As `ours.lakefs`, in a fork of a process that has imported the program."""
    done = ForkServer.of_this_process().run(arguments, os.environ, limit_s)
    if done.returncode:
        raise PeerFailed(f"`{arguments[0]}`: {done.stderr.strip()}")
    return done.stdout


def daemons(peer: Lakefs) -> list[int]:
    """As `Lakefs.processes`, where no supervisor is the daemon's parent."""
    if not os.path.ismount(peer.mountpoint):
        return []
    return [int(ours.statistics_of(peer.mountpoint)["daemon"]["pid"])]


@pytest.fixture(scope="session")
def found(seaweed: Server) -> Results:
    """The results; nothing of the run is left when it is handed out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("LAKEFS_FUSE_HOOKS", raising=False)  # Their share of the counts is what is looked at.
        patch.setattr(Lakefs, "processes", daemons)
        if not IS_LONG and ForkServer.of_this_process().suits(os.environ):
            patch.setattr(ours, "lakefs", run_forked)
        if not IS_LONG:  # no job of these groups takes torch, which is a fifth of the CPU time of all
            patch.setattr(worker, "PRELOAD", [name for name in worker.PRELOAD if not name.startswith("torch")])
        patch.setattr(machine, "drop_caches", lambda: True)  # The machine's other tests would pay for it.
        return measured(TINY, seaweed, lambda text: None)


def measured(sizes: Sizes, server: Server, say: Callable[[str], None]) -> Results:
    name, prices = tally.price_list()
    worker.preload()
    results = Results("", 0.0, True, {}, {}, prices, name, [], workloads.notes(sizes))
    with stage.opened(sizes, prices, server) as made:
        for kind, wanted in WANTED:
            peer = kind(made)
            options = ("--no-supervise",) if kind is LakefsImmutable else ALONE
            peer.more = (*peer.more, *options)
            try:
                for group in wanted:
                    groups.ALL[group](Session(peer, made, results, 1, say))
            finally:
                peer.close()
    return results
