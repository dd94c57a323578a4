"""Who is ahead and who is behind, from results alone.

Ratios are of medians. We are *behind* in a workload where another mount is faster than ours, or where we reach less
than `ENOUGH` of what the workload is held against: the faster bare store client where bytes have to come from the store
or go there, the local disk where they could be in memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from scripts.bench import figures
from scripts.bench.results import Results, WorkloadNote

ENOUGH = 0.8


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ours against one other in one workload; ``ratio`` is ours divided by theirs, more is better for us."""

    workload: str
    ours: str
    other: str
    ratio: float


def medians(found: Results, note: WorkloadNote, kind: str) -> dict[str, float]:
    """Of every peer of a kind that did anything, its rate."""
    rates = {
        peer.name: figures.rates(found.of(note.name, peer.name), note.unit) for peer in found.peers if peer.kind == kind
    }
    return {name: spread.median for name, spread in rates.items() if spread is not None}


def best(rates: dict[str, float]) -> str | None:
    return max(rates, key=lambda name: rates[name]) if rates else None


def against(found: Results, note: WorkloadNote, kind: str) -> list[Comparison]:
    """Each of ours against the best of a kind; those of ours that are furthest ahead first."""
    ours, others = medians(found, note, "ours"), medians(found, note, kind)
    other = best(others)
    if other is None:
        return []
    compared = [Comparison(note.name, name, other, rate / others[other]) for name, rate in ours.items()]
    return sorted(compared, key=lambda each: -each.ratio)


def behind(found: Results) -> list[Comparison]:
    """Everything in which one of ours is behind, the worst first."""
    worse: list[Comparison] = []
    for note in found.workloads:
        worse += [each for each in against(found, note, "mount") if each.ratio < 1]
        worse += [each for each in against(found, note, note.yardstick) if each.ratio < ENOUGH]
    return sorted(worse, key=lambda each: each.ratio)


def title(found: Results, note: WorkloadNote) -> str:
    """Of a plot: the workload, and our best against the best other mount."""
    compared = against(found, note, "mount")
    if not compared:
        return note.name
    first = compared[0]
    return f"{note.name}: {first.ours} is {figures.times(first.ratio)} {first.other}, the best other mount"
