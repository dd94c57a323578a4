"""`lakefs-fuse refresh`: moves an immutable mount to the lake as it is now."""

from __future__ import annotations

from datetime import UTC, datetime

import click

from lakefs_fuse.cli.daemons import open_daemon
from lakefs_fuse.control import protocol
from lakefs_fuse.errors import EXIT_USAGE, ConfigError, LakeError


@click.command("refresh")
@click.argument("mountpoint", type=click.Path())
def refresh(mountpoint: str) -> None:
    """Move the immutable mount at MOUNTPOINT to the lake as it is now.

    All of it or, where that fails, nothing: then the mount shows what it showed. When this returns every new look at
    the mount sees the new state. Files that are open are read on as they were.
    """
    with open_daemon(mountpoint) as client:
        *_, reply = client.follow(protocol.Refresh())
    if isinstance(reply, protocol.Failed):
        raise (ConfigError if reply.exit_code == EXIT_USAGE else LakeError)(reply.message)
    if isinstance(reply, protocol.Statistics):
        at_s = reply.values.get("at_s")
        at = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds") if isinstance(at_s, float) else "now"
        click.echo(f"{mountpoint} shows the lake of {at}: {reply.values.get('changed', 0)} names are others now")
