"""What programs do in a cluster whose requests the model is compared with: some mounts write, all of them look."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

import trio

from lakefs_fuse.commits.idleness import IDLE_AFTER_S
from scripts.scale.cluster import Cluster, Counts, MountedNode, opened
from tests.simulation import scheduler

ASKS_EACH_S = 60.0
"""A mount that is asked so often does not become idle."""
WARM_UP_S = 60.0
COLLECT_EACH_S = 300.0
"""Of virtual time: cyclic garbage is collected then."""
FILE = b"x" * 200


@dataclass(frozen=True, kw_only=True)
class Load:
    """Mounts, of which ``writers`` make ``commits_s`` a second in all, in files that are packed, each by itself; for so
    many seconds, after WARM_UP_S. ``idle`` more mounts are asked nothing, and had time to become idle."""

    nodes: int
    writers: int
    commits_s: float
    idle: int = 0
    refresh_s: float = 5.0
    seconds: float = 300.0


@dataclass(frozen=True)
class Measured:
    """``rate`` has GETs, LISTs, PUTs, and bytes received and sent, a second."""

    rate: tuple[float, float, float, float, float]
    commits_s: float
    """That were made."""
    refused: int
    lag_s: float
    """Most of the mounts, from the date of a commit to when it was applied, at the end."""


def measure(load: Load, *, seed: str = "load", **limits: float) -> Measured:
    """Run it in virtual time."""
    return scheduler.run(lambda: _measured(load, seed, limits), seed)


async def _measured(load: Load, seed: str, limits: dict[str, float]) -> Measured:
    with tempfile.TemporaryDirectory() as scratch:
        async with opened(
            Path(scratch), seed, collect_each_s=COLLECT_EACH_S, refresh_s=load.refresh_s, pack="always", **limits
        ) as cluster:
            await cluster.add(load.nodes + load.idle)
            busy = cluster.nodes[: load.nodes]
            for number in range(load.writers):
                await busy[number].mkdir(f"w{number}")
            for number, node in enumerate(busy):
                cluster.world.nursery.start_soon(_look, node, number * ASKS_EACH_S / len(busy))
            for number in range(load.writers):
                cluster.world.nursery.start_soon(_write, cluster, number, load.writers / load.commits_s)
            await trio.sleep(WARM_UP_S + (IDLE_AFTER_S + WARM_UP_S) * (load.idle > 0))
            before, made = cluster.store.total().copy(), _commits(cluster)
            await trio.sleep(load.seconds)
            return _measured_since(cluster, before, made, load.seconds)


def _commits(cluster: Cluster) -> int:
    return sum(key.endswith(".zip") for key in cluster.store.objects)


def _measured_since(cluster: Cluster, before: Counts, made: int, seconds: float) -> Measured:
    asked = cluster.store.total().since(before)
    gets, lists, puts = (asked.of(kind) / seconds for kind in ("get", "list", "put"))
    return Measured(
        (gets, lists, puts, asked.received / seconds, asked.sent / seconds),
        (_commits(cluster) - made) / seconds,
        asked.refused.total(),
        max(node.lake.metrics.commits.lag_s for node in cluster.nodes),
    )


async def _look(node: MountedNode, first_s: float) -> None:
    await trio.sleep(first_s)
    while True:
        await node.ask()
        await trio.sleep(ASKS_EACH_S)


async def _write(cluster: Cluster, number: int, interval_s: float) -> None:
    node, rng = cluster.nodes[number], cluster.nodes[number].chance.generator("writes")
    await trio.sleep(rng.random() * interval_s)
    at_s, written = trio.current_time(), 0
    while True:
        await node.write(f"w{number}/{written}", FILE)
        written, at_s = written + 1, at_s + interval_s * 2 * rng.random()
        await trio.sleep(max(0.0, at_s - trio.current_time()))
