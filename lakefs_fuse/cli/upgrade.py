"""`lakefs-fuse upgrade`: switches the newest format on for a lake."""

from __future__ import annotations

from typing import Unpack

import click

from lakefs_fuse.cli.store_options import StoreOptions, store_options
from lakefs_fuse.cli.worker import find_place, run_offline
from lakefs_fuse.control.worker_protocol import UpgradeArgs


@click.command("upgrade", context_settings={"show_default": True})
@click.argument("source")
@store_options
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, for scripts.")
def upgrade(source: str, as_json: bool, **options: Unpack[StoreOptions]) -> int:
    """Switch the newest format on for the lake SOURCE: s3://bucket/prefix, file:///dir, or a mountpoint.

    Older programs cannot use the lake from then on, and there is no way back. Refused while a program that is too old
    has written to the lake in the last hour: unmount those first. Mounts of this program go on meanwhile.
    """
    return run_offline("upgrade", find_place(source, options), UpgradeArgs(), as_json=as_json)
