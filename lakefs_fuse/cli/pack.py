"""`lakefs-fuse pack` and `unpack`: small plain objects of a lake into packs, and back, in place."""

from __future__ import annotations

from typing import Unpack

import click

from lakefs_fuse.cli.parameters import DURATION, SIZE
from lakefs_fuse.cli.store_options import StoreOptions, store_options
from lakefs_fuse.cli.worker import find_place, run_offline
from lakefs_fuse.control.worker_protocol import PackArgs

_LAKE_HELP = (
    "The lake's SOURCE as it is mounted, where PATH is a URL of a place in it.  "
    "[default: the nearest place at or above PATH with commits, else PATH itself]"
)


@click.command("pack", context_settings={"show_default": True})
@click.argument("path")
@store_options
@click.option("--lake", metavar="SOURCE", help=_LAKE_HELP)
@click.option("--threshold", type=SIZE, default="1MiB", help="Larger files stay as they are.")
@click.option("--grace", type=DURATION, default="30s", help="How long mounts have to see a pack before the objects "
              "in it are deleted: a few times their --refresh; 0 where nobody has the lake mounted.")  # fmt: skip
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, for scripts.")
def pack(
    path: str,
    lake: str | None,
    threshold: int,
    grace: float,
    dry_run: bool,
    as_json: bool,
    **options: Unpack[StoreOptions],
) -> int:
    """Put the small plain objects at and below PATH into packs, where they are.

    PATH is in a mount, or a URL: s3://bucket/prefix/dir or file:///lake/dir. Names, attributes and open files stay as
    they are, and mounts may read and write meanwhile. The objects are deleted once packs hold their bytes. After an
    interruption running it again does what is left.
    """
    args = PackArgs(threshold_bytes=threshold, grace_s=grace, dry_run=dry_run)
    return run_offline("pack", find_place(path, options, lake), args, as_json=as_json)


@click.command("unpack", context_settings={"show_default": True})
@click.argument("path")
@store_options
@click.option("--lake", metavar="SOURCE", help=_LAKE_HELP)
@click.option("--dry-run", is_flag=True, help="Say what would be done, and change nothing.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, for scripts.")
def unpack(path: str, lake: str | None, dry_run: bool, as_json: bool, **options: Unpack[StoreOptions]) -> int:
    """Make plain objects of the files at and below PATH that are in packs, so that every S3 tool can read them.

    PATH as for pack. Names, attributes and open files stay as they are; the packs' bytes are given back by gc. Files
    that are being written to should be left alone meanwhile.
    """
    return run_offline(
        "pack", find_place(path, options, lake), PackArgs(back=True, dry_run=dry_run), as_json=as_json
    )  # fmt: skip
