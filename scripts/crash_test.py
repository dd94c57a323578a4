"""Kill the daemon again and again, and see that nothing acknowledged is lost and nothing half is seen.

    PYTHONPATH=. python scripts/crash_test.py --kills 500

Starts SeaweedFS, mounts lakes on it, lets several processes write, append, truncate, rename (files and directories),
delete, link, chmod and sync, and kills the daemon with SIGKILL: at random moments, at each named boundary of
`lakefs_fuse/environment/failpoints.py`, while it starts and replays, and after a flush together with its cache
directory. After each kill, what lies in the store is read with boto3 and the reader of docs/format.md, the lake is
mounted again, and all names, bytes, modes and times are compared with what the system calls had answered. After every
40 kills the lake is
flushed, unmounted and collected, and a node with an empty cache must see the same. Ends with 1, the history of the
names concerned, and the directories kept, if anything differs. ``--harm`` breaks something on purpose.

``--mounts 3`` has three daemons, each with a cache directory and writers of its own, on each lake. One of them dies, or
several do. They also change a few names that are common to all, of which only the last version must be right; with
``--no-common-names`` they do not.

``--power-cuts`` (root only) has the cache directory on an ext4 of its own, of which each death takes what was not
synced: SIGKILL alone loses nothing that is in the page cache.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

from lakefs_fuse.environment.failpoints import NAMES
from scripts.crash import ledger
from scripts.crash.campaign import Plan, Tally, run
from scripts.crash.harm import HARMS, UNSYNCED
from scripts.crash.member import Crew
from tests.servers import make_bucket, seaweedfs

BUCKET = "crash-test"


def say(text: str) -> None:
    print(text, flush=True)


def report(tally: Tally, seconds: float) -> None:
    each = seconds / max(1, tally.kills)
    say(f"{tally.kills} kills in {seconds:.0f} s ({each:.2f} s each), {tally.lakes} lakes ended")
    say(f"{tally.steps} system calls, {tally.bytes_written / 1e6:.0f} MB written")
    say(f"{tally.files_seen} files were looked at in the store, {tally.sightings} directories on another node")
    say(f"{tally.early} times that node saw a marker a moment before all that it stands for")
    if tally.dangling:
        say(f"{tally.dangling} times a name in the store could not be read, because its bytes had been replaced")
    if tally.cut_off:
        say(f"{tally.cut_off} times the kernel held a dead daemon, and its mount was cut off")
    for name, count in sorted(tally.happened.items()):
        missed = tally.missed[name]
        say(f"  {name}: {count}" + (f", {count - missed} of them reached it" if name in NAMES else ""))


def _told(arguments: list[str]) -> str:
    """Options that decide what is done."""
    told, left = [], iter(arguments)
    for argument in left:
        name, equals, _ = argument.partition("=")
        if name not in ("--directory", "--ledger", "--seed", "--kills"):
            told.append(argument)
        elif not equals:
            next(left, None)
    return " ".join(told)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill the daemon again and again and compare.")
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--kills-per-lake", type=int, default=40)
    parser.add_argument("--writers", type=int, default=4)
    parser.add_argument("--durability", choices=["close", "writeback"], default="writeback")
    parser.add_argument("--seed", default="", help="of a run before; else a new one, which is printed")
    parser.add_argument("--failpoints", default=",".join(NAMES), help="boundaries to die at, by commas; may be empty")
    parser.add_argument("--no-watch", action="store_true", help="no second mount that is looked at all the time")
    parser.add_argument("--allow-dangling", action="store_true", help="count names whose bytes were replaced in place")
    parser.add_argument("--mounts", type=int, default=1, help="daemons on each lake")
    parser.add_argument("--no-common-names", action="store_true", help="each mount changes names of its own only")
    parser.add_argument("--power-cuts", action="store_true", help="what was not synced is lost with the daemon")
    parser.add_argument("--ledger", type=Path, metavar="FILE", help="append a row about this run to its table")
    parser.add_argument(
        "--harm", choices=sorted([*HARMS, UNSYNCED]), default="", help="break something: the run must then fail"
    )
    parser.add_argument("--harm-after", type=int, default=6, metavar="KILLS")
    parser.add_argument("--directory", type=Path, help="where to work; kept after a failure")
    options = parser.parse_args()
    if options.power_cuts and (options.mounts > 1 or options.durability != "writeback"):
        parser.error("--power-cuts goes with one mount and write-back: only that promises to survive them")
    seed = options.seed or f"{random.SystemRandom().getrandbits(32):x}"
    for name in [name for name in os.environ if name.startswith(("AWS_", "XDG_"))]:
        del os.environ[name]
    plan = Plan(
        seed,
        options.kills,
        options.kills_per_lake,
        options.durability,
        tuple(name for name in options.failpoints.split(",") if name),
        options.harm,
        options.harm_after,
        watch=not options.no_watch,
        allow_dangling=options.allow_dangling,
        mounts=options.mounts,
        common_names=not options.no_common_names,
        power_cuts=options.power_cuts,
    )
    directory = Path(options.directory or tempfile.mkdtemp(prefix="lakefs-crash-"))
    say(f"seed {seed}, {options.durability}, in {directory}")
    commit = ledger.commit_hash()
    started = time.monotonic()
    with Crew(max(options.writers, options.mounts)) as crew, seaweedfs(directory / "store") as server:
        make_bucket(server, BUCKET)
        tally, failures = run(plan, server, BUCKET, directory, crew, say)
    report(tally, time.monotonic() - started)
    if options.ledger:
        result = "failed" if failures else f"nothing lost, {tally.dangling} dangling"
        ledger.append(options.ledger, commit=commit, options=_told(sys.argv[1:]), seed=seed, kills=tally.kills,
                      result=result)  # fmt: skip
    if failures:
        say("something was lost, or seen that must not be: see above")
        return 1
    shutil.rmtree(directory)
    say("nothing acknowledged was lost, nothing half was seen")
    return 0


if __name__ == "__main__":
    sys.exit(main())
