"""Results as tables on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from scripts.bench import figures
from scripts.bench.results import Results, WorkloadNote


def show(found: Results, console: Console) -> None:
    """A table for each workload."""
    for note in found.workloads:
        console.print(_table(found, note))


def _table(found: Results, note: WorkloadNote) -> Table:
    table = Table(title=note.name, title_justify="left")
    for column in ("", note.unit, "least", "most", "p99 ms", "durable s", "requests", "CPU s", "MiB", "remark"):
        table.add_column(column, justify="left" if column in ("", "remark") else "right")
    for peer in found.peers:
        series = found.of(note.name, peer.name)
        if not series.samples and not series.failures:
            continue
        spread = figures.rates(series, note.unit)
        rates = [f"{value:,.0f}" for value in (spread.median, spread.least, spread.most)] if spread else ["–"] * 3
        table.add_row(peer.name, *rates, *figures.details(series), figures.remark(series))
    return table
