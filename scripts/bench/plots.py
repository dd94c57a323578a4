"""Plots of a run as SVG: for each workload bars with the median of every peer, and lines from its least to its most.

The same results give the same bytes. Text stays text, so that it can be searched and scales with the page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.bench import figures, verdict
from scripts.bench.figures import Spread
from scripts.bench.results import Results, WorkloadNote

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"ours": "#1f6f8b", "mount": "#c97b2b", "client": "#8a8a8a", "disk": "#b9b9b9"}
LOGARITHMIC_FROM = 40.0
"""Where the fastest is so many times the slowest, bars of equal units would show one of them only."""
STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lakefs",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def file_name(workload: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", workload.lower()).strip("-") + ".svg"


def draw(found: Results, directory: Path) -> None:
    """All of them, in place of those that were there."""
    directory.mkdir(parents=True, exist_ok=True)
    for old in directory.glob("*.svg"):
        old.unlink()
    for note in found.workloads:
        _draw_one(found, note, directory / file_name(note.name))


def _bars(found: Results, note: WorkloadNote) -> list[tuple[str, str, Spread | None, str]]:
    """Name, kind, rate, and what is written where there is no bar; the last is drawn on top."""
    bars = []
    for peer in found.peers:
        series = found.of(note.name, peer.name)
        if series.samples or series.failures:
            spread = figures.rates(series, note.unit)
            missing = "failed" if series.failures else "nothing before its time was over"
            bars.append((peer.name, peer.kind, spread, missing))
    return bars[::-1]


def _write(axes: Axes, x: float, row: int, what: str, color: str = "black") -> None:
    """To the right of a point, far enough from it that the end of a spread is not written over."""
    axes.annotate(what, (x, row), xytext=(7, 0), textcoords="offset points", va="center", color=color)


def _draw_one(found: Results, note: WorkloadNote, path: Path) -> None:
    # Loaded here: it takes a second, and most of who imports this module draws nothing.
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt  # after the backend is chosen

    bars = _bars(found, note)
    medians = [spread.median for _, _, spread, _ in bars if spread is not None]
    logarithmic = bool(medians) and max(medians) > LOGARITHMIC_FROM * min(medians)
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8.6, 1.3 + 0.34 * max(len(bars), 1)), layout="constrained")
        if logarithmic:
            axes.set_xscale("log")
            axes.set_xlim(min(medians) / 3, max(medians) * 4)
        elif medians:
            axes.set_xlim(0, max(spread.most for _, _, spread, _ in bars if spread is not None) * 1.2)
        for row, (_, kind, spread, missing) in enumerate(bars):
            if spread is None:
                _write(axes, axes.get_xlim()[0], row, missing, color="#a02020")
                continue
            axes.barh(row, spread.median, color=COLOURS[kind], height=0.68)
            axes.plot([spread.least, spread.most], [row, row], color="black", linewidth=1.4, marker="|", markersize=7)
            _write(axes, spread.most, row, figures.short(spread.median))
        axes.set_yticks(range(len(bars)), [name for name, *_ in bars])
        axes.set_xlabel(note.unit + (", logarithmic" if logarithmic else "") + "; more is better")
        axes.set_title(verdict.title(found, note), loc="left", fontsize=11)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
        plt.close(figure)
