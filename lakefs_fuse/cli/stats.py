"""`lakefs-fuse stats`: the counters of a daemon as tables, as JSON, or refreshed until interrupted."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext

import click

from lakefs_fuse.cli.daemons import open_daemon
from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.parameters import DURATION, LocalPath
from lakefs_fuse.cli.store_options import json_option
from lakefs_fuse.cli.terminal import print_json, print_tables


@click.command("stats", cls=GroupedCommand, context_settings=SETTINGS)
@argument("mountpoint", "The directory of the mount.", type=LocalPath(readable=False))
@json_option
@option("--watch", is_flag=True, help="Refresh until interrupted.")
@option("--interval", type=DURATION, default="1s", help="Time between refreshes of --watch, at least 0.1s.")
def stats(mountpoint: str, as_json: bool, watch: bool, interval: float) -> None:
    """Show the counters of a mount's daemon, and the files that are not in the store yet.

    Counters start at 0 with the daemon. docs/operations.md explains each of them.
    """
    if as_json and watch:
        raise click.UsageError("--json and --watch exclude each other: give one of them")
    if watch:
        _watch(mountpoint, max(0.1, interval))
        return
    with open_daemon(mountpoint) as client:
        values = client.statistics()
    if as_json:
        print_json(values)
    else:
        from lakefs_fuse.cli.stats_tables import render

        print_tables(render(values))


def _watch(mountpoint: str, interval_s: float) -> None:
    """Print until Ctrl-C; where that is no terminal, the tables one after another. Raises LakeError when the daemon
    ends."""
    from rich.live import Live

    from lakefs_fuse.cli.stats_tables import render

    is_terminal = sys.stdout.isatty()
    try:
        with open_daemon(mountpoint) as client, Live(auto_refresh=False) if is_terminal else nullcontext() as live:
            before: dict[str, object] | None = None
            while True:
                values = client.statistics()
                if live is None:
                    print_tables(render(values, before, interval_s))
                    sys.stdout.flush()
                else:
                    live.update(render(values, before, interval_s), refresh=True)
                before = values
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return
