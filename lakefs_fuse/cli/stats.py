"""`lakefs-fuse stats`: a daemon's counters as tables, as JSON for scripts, or refreshed once a second."""

from __future__ import annotations

import sys
import time

import click
import msgspec

from lakefs_fuse.cli.daemons import open_daemon
from lakefs_fuse.cli.parameters import DURATION

PIPE_WIDTH = 200


@click.command("stats")
@click.argument("mountpoint", type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Nested objects for scripts; the names are final.")
@click.option("--watch", is_flag=True, help="Refresh until interrupted.")
@click.option("--interval", type=DURATION, default="1", show_default=True, help="How often --watch refreshes.")
def stats(mountpoint: str, as_json: bool, watch: bool, interval: float) -> None:
    """Show what the daemon of MOUNTPOINT has done since it started, and what is not in the store yet."""
    if as_json and watch:
        raise click.UsageError("--json and --watch exclude each other")
    if watch:
        _watch(mountpoint, max(0.1, interval))
        return
    with open_daemon(mountpoint) as client:
        values = client.statistics()
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(values), indent=2).decode())
    else:
        from rich.console import Console

        from lakefs_fuse.cli.stats_tables import render

        # Lines that a pipe gets are not broken where a terminal would end.
        Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(render(values))


def _watch(mountpoint: str, interval_s: float) -> None:
    """Until Ctrl-C, or until the daemon ends, which is an error like any other."""
    from rich.live import Live

    from lakefs_fuse.cli.stats_tables import render

    try:
        with open_daemon(mountpoint) as client, Live(auto_refresh=False) as live:
            before: dict[str, object] | None = None
            while True:
                values = client.statistics()
                live.update(render(values, before, interval_s), refresh=True)
                before = values
                time.sleep(interval_s)
    except KeyboardInterrupt:
        return
