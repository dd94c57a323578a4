"""`lakefs-fuse fsck`: checks every byte that the files of a lake are made of, and names those that are hurt."""

from __future__ import annotations

from typing import Unpack

import click

from lakefs_fuse.cli.store_options import StoreOptions, absolute, store_options
from lakefs_fuse.cli.worker import find_place, run_offline
from lakefs_fuse.control.worker_protocol import FsckArgs


@click.command("fsck", context_settings={"show_default": True})
@click.argument("source")
@store_options
@click.option("--quick", is_flag=True, help="Only change records and what they refer to, not the bytes of files.")
@click.option("--repair", is_flag=True, help="Move commits that no mount can use aside, and point names with damaged "
              "bytes at intact copies. The last copy of anything is never deleted.")  # fmt: skip
@click.option("--cache-dir", type=click.Path(exists=True, file_okay=False), help="Of a node that is not mounted now: "
              "its names tell what was in packs that are gone.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, for scripts.")
def fsck(
    source: str, quick: bool, repair: bool, cache_dir: str | None, as_json: bool, **options: Unpack[StoreOptions]
) -> int:
    """Check the lake SOURCE: s3://bucket/prefix, file:///dir, or a mountpoint. Every commit is read whole.

    Exit code 0 where all is well, 1 where anything is damaged; every file that is hurt is named.
    """
    args = FsckArgs(quick=quick, repair=repair, cache_dir=absolute(cache_dir))
    return run_offline("fsck", find_place(source, options), args, as_json=as_json)
