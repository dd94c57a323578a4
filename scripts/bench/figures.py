"""Medians, spreads, percentiles and rates: pure arithmetic on samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal

from scripts.bench.results import Latency, Sample, Series

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the least and the most of all repeats."""

    median: float
    least: float
    most: float


def spread(values: Sequence[float]) -> Spread | None:
    """None of nothing."""
    if not values:
        return None
    return Spread(statistics.median(values), min(values), max(values))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Nearest rank, of ascending values; ``share`` is between 0 and 1."""
    if not ordered:
        raise ValueError("no values")
    rank = math.ceil(len(ordered) * share - 1e-9)
    return ordered[min(max(rank, 1), len(ordered)) - 1]


def latency(seconds: Sequence[float]) -> Latency | None:
    """Of single operations that took so long; None where none did."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    p50, p95, p99 = (round(percentile(ordered, share) * 1000, 4) for share in (0.5, 0.95, 0.99))
    return Latency(p50, p95, p99)


def rate(sample: Sample, unit: str) -> float:
    """How fast, in the workload's unit; more is better. MiB/s is of bytes, everything else of operations."""
    amount = sample.bytes / MIB if unit == "MiB/s" else sample.operations
    return amount / sample.seconds if sample.seconds > 0 else 0.0


def rates(series: Series, unit: str) -> Spread | None:
    """None where it never succeeded, or did nothing before its time was over."""
    found = spread([rate(sample, unit) for sample in series.samples])
    return found if found is not None and found.median > 0 else None


def times(value: float) -> str:
    """A ratio for people: three digits that matter, two of a small one."""
    if 0 < value < 0.1:
        return f"{Decimal(f'{value:.1e}'):f}×"
    return f"{value:.1f}×" if value >= 10 else f"{value:.2f}×"


def median_of(values: Iterable[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def told(value: float | None, digits: int = 0) -> str:
    """A number for people, or a dash where it is not known."""
    return "–" if value is None else f"{value:,.{digits}f}"


def details(series: Series) -> list[str]:
    """p99 in ms, seconds until durable, store requests, CPU seconds and peak MiB of the daemon: medians."""
    samples = series.samples
    return [
        told(median_of(each.latency.p99_ms if each.latency else None for each in samples), 1),
        told(median_of(each.durable_s for each in samples), 1),
        told(median_of(sum(each.store.requests.values()) if each.store else None for each in samples)),
        told(median_of(each.daemon.cpu_s if each.daemon else None for each in samples), 2),
        told(median_of(each.daemon.rss_peak_bytes / MIB if each.daemon else None for each in samples)),
    ]


def remark(series: Series) -> str:
    """What is to be known of these numbers: failures, limits, bytes that were not stored in time."""
    found = [f"failed in round {failure.round}: {failure.what}" for failure in series.failures]
    limits = {each.stopped_after_s for each in series.samples if each.stopped_after_s is not None}
    found += [f"stopped after {limit_s:g} s" for limit_s in sorted(limits)]
    if any(each.undurable for each in series.samples):
        found.append("not all in the store when the time for it was over")
    return "; ".join(dict.fromkeys(found))


def short(value: float) -> str:
    """Three digits that matter."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
