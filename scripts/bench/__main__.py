"""`python -m scripts.bench`: measures, and makes the report of what was measured.

    python -m scripts.bench --quick                                   everything, small, in minutes: does it work?
    python -m scripts.bench --report docs/benchmarks.md               everything, under an hour
    python -m scripts.bench --only epochs --peers lakefs rclone       a part
    python -m scripts.bench --from results.json --report FILE         the report again, of results that are there

Needs root for the kernel's caches and what `scripts/setup bench` installs. Ends with 1 if a peer of ours failed.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.console import Console

from scripts.bench import groups, machine, method, results, stage, tables, tally, worker, workloads
from scripts.bench.peers import NAMES, Peer, everybody
from scripts.bench.peers.peer import PeerFailed
from scripts.bench.results import PeerNote, Results
from scripts.bench.sizes import FULL, QUICK, Sizes

console = Console(highlight=False)
BEGAN = time.monotonic()


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts.bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=list(groups.ALL), default=[], metavar="GROUP",
                        help=f"groups of workloads: {', '.join(groups.ALL)}")  # fmt: skip
    parser.add_argument("--peers", nargs="+", choices=NAMES, default=list(NAMES), metavar="PEER",
                        help=f"who takes part: {', '.join(NAMES)}")  # fmt: skip
    parser.add_argument("--repeats", type=int, help=f"rounds (default {FULL.repeats}, quick {QUICK.repeats})")
    parser.add_argument("--minutes", type=float, help="begin nothing later, nor what would go on for longer "
                        f"(default {FULL.budget_s / 60:.0f}, quick {QUICK.budget_s / 60:.0f})")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes, one round")
    parser.add_argument("--out", type=Path, default=Path("build/bench/results.json"), help="where results go")
    parser.add_argument("--from", dest="source", type=Path, help="measure nothing; take these results")
    parser.add_argument("--report", type=Path, help="write the report there, its plots into a directory beside it")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 1:
        parser.error("--repeats must be 1 or more")
    if options.minutes is not None and options.minutes <= 0:
        parser.error("--minutes must be more than 0")
    return options


def note_of(peer: Peer) -> PeerNote:
    try:
        version, options = peer.version(), peer.options()
    except PeerFailed as error:
        version, options = f"{error}", ""
    return PeerNote(peer.name, peer.kind, peer.stage.scrub(version), peer.stage.scrub(options), peer.remark)


def measure(options: argparse.Namespace, sizes: Sizes) -> Results:
    list_name, prices = tally.price_list()
    worker.preload()
    repeats = options.repeats or sizes.repeats
    with stage.opened(sizes, prices) as made:
        peers = everybody(made, tuple(options.peers))
        described = machine.describe(made.directory)
        machine.warm(made.directory, sizes.warm_bytes)
        described["caches between cold runs"] = "dropped" if machine.drop_caches() else "not dropped: not root"
        described["latency added to each request"] = f"{sizes.delay_ms} ms"
        described["rounds"] = f"{repeats}, fewer where the time was over (column *rounds*)"
        found = Results(
            began=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"), took_s=0.0, quick=options.quick, machine=described,
            sizes=sizes_of(sizes), prices=prices, price_list=list_name, peers=[note_of(peer) for peer in peers],
            workloads=[note for note in workloads.notes(sizes) if not options.only or note.group in options.only],
        )  # fmt: skip
        wanted = groups.table(sizes, options.only)
        try:
            method.rounds(peers, made, found, wanted, repeats=repeats, out=options.out, say=say)
        finally:
            for peer in peers:
                with contextlib.suppress(Exception):  # The others end all the same.
                    peer.close()
    return found


def sizes_of(sizes: Sizes) -> dict[str, float]:
    """The numbers among them."""
    values = {name: getattr(sizes, name) for name in sizes.__struct_fields__}
    return {name: float(value) for name, value in values.items() if isinstance(value, int | float)}


def say(text: str) -> None:
    text = f"{time.monotonic() - BEGAN:7.1f} {text}"
    console.print(text, soft_wrap=True, markup=False)


def main(arguments: list[str] | None = None) -> int:
    options = options_of(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if options.source is not None:
        found = results.load(options.source)
    else:
        sizes = QUICK if options.quick else FULL
        if options.minutes is not None:
            sizes = msgspec.structs.replace(sizes, budget_s=60 * options.minutes)
        found = measure(options, sizes)
        say(f"{found.took_s:.0f} s; results are in {options.out}")
    tables.show(found, console)
    if options.report is not None:
        from scripts.bench import report

        report.write(found, options.report)
        say(f"the report is in {options.report}")
    ours = {peer.name for peer in found.peers if peer.kind == "ours"}
    return int(any(series.failures for series in found.series if series.peer in ours))


if __name__ == "__main__":
    sys.exit(main())
