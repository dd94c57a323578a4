"""What one lake serves, as `docs/guide/scale.md` has it.

    python -m scripts.scale                              print the tables, from the model and from what is recorded
    python -m scripts.scale --write                      put them into the page
    python -m scripts.scale run --nodes 24 --writers 2 --commits 0.5 --seconds 60
                                                         measure in virtual time, and record
    python -m scripts.scale run --nodes 100 --writers 4 --commits 1 --gets 55 --puts 35
                                                         the same at the limits of a store
    python -m scripts.scale year --days 60 --commits 1000
                                                         go on with the simulated year

A record is a line in `docs/benchmarks/scale-runs.jsonl` or `scale-year.jsonl`. To measure the year again, give another
`--ledger`; it goes on where its ledger ends.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from scripts.scale import page, year
from scripts.scale.load import Load, measure
from tests.simulation.scheduler import require_fixed_hashes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    commands = parser.add_subparsers(dest="command")
    run = commands.add_parser("run")
    run.add_argument("--nodes", type=int, default=24)
    run.add_argument("--writers", type=int, default=2)
    run.add_argument("--commits", type=float, default=0.5, help="a second, of all writers")
    run.add_argument("--idle", type=int, default=0)
    run.add_argument("--refresh", type=float, default=5.0, help="seconds")
    run.add_argument("--seconds", type=float, default=60.0)
    run.add_argument("--gets", type=float, default=0.0, help="GET and LIST that the store takes a second; 0: all")
    run.add_argument("--puts", type=float, default=0.0, help="PUT that the store takes a second")
    days = commands.add_parser("year")
    days.add_argument("--days", type=int, default=60)
    days.add_argument("--commits", type=int, default=1000, help="a day")
    days.add_argument("--ledger", type=Path, default=page.YEAR)
    options = parser.parse_args()
    if options.command == "run":
        _run(options)
    elif options.command == "year":
        year.run(options.ledger, days=options.days, commits=options.commits)
    elif options.write:
        page.PAGE.write_text(page.written())
    else:
        print(page.generated())


def _run(options: argparse.Namespace) -> None:
    load = Load(nodes=options.nodes, writers=options.writers, commits_s=options.commits, idle=options.idle,
                refresh_s=options.refresh, seconds=options.seconds)  # fmt: skip
    began_s = time.process_time()
    measured = measure(load, gets_s=options.gets, puts_s=options.puts)
    page.record(page.Run(load=load, gets_s=options.gets, puts_s=options.puts, measured=measured,
                         cpu_s=round(time.process_time() - began_s, 1)))  # fmt: skip
    print(measured)


if __name__ == "__main__":
    require_fixed_hashes("scripts.scale")
    main()
