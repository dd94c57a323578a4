"""`lakefs-fuse gc`: gives back what no file of a lake needs any more."""

from __future__ import annotations

from typing import Unpack

import click

from lakefs_fuse.cli.parameters import DURATION
from lakefs_fuse.cli.store_options import StoreOptions, store_options
from lakefs_fuse.cli.worker import find_place, run_offline
from lakefs_fuse.control.worker_protocol import GcArgs


@click.command("gc", context_settings={"show_default": True})
@click.argument("source")
@store_options
@click.option("--live-below", type=click.FloatRange(0, 100), default=75, metavar="PERCENT",
              help="Rewrite packs of which less than so much is still some file's.")  # fmt: skip
@click.option("--grace", type=DURATION, default="1h", help="Delete what was seen to be dead, by a run of gc, at least "
              "so long ago; 0 where nobody has the lake mounted.")  # fmt: skip
@click.option("--wait", is_flag=True, help="Wait for the grace period, instead of leaving what is dead to a later run.")
@click.option("--uploads-older-than", type=DURATION, default="7d",
              help="Abort unfinished uploads that began before that.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, for scripts.")
def gc(
    source: str,
    live_below: float,
    grace: float,
    wait: bool,
    uploads_older_than: float,
    dry_run: bool,
    as_json: bool,
    **options: Unpack[StoreOptions],
) -> int:
    """Collect the garbage of the lake SOURCE: s3://bucket/prefix, file:///dir, or a mountpoint.

    Packs with many dead bytes are rewritten, dead packs and commits deleted after a grace period, leftovers of removed
    files deleted, abandoned uploads aborted. Mounts may read and write meanwhile; killed at any time, nothing is lost.
    What a run finds to be dead, a later run (or --wait) deletes: run it regularly. Exit code 1 where commits cannot be
    read, which have to be looked at with fsck first.
    """
    args = GcArgs(
        live_below=live_below / 100,
        grace_s=grace,
        uploads_older_s=uploads_older_than,
        wait=wait,
        dry_run=dry_run,
    )
    return run_offline("gc", find_place(source, options), args, as_json=as_json)
