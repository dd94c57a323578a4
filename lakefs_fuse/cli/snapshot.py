"""`lakefs-fuse snapshot`: folds a lake's names into an index, which fresh mounts begin with."""

from __future__ import annotations

from typing import Unpack

import click

from lakefs_fuse.cli.store_options import StoreOptions, absolute, store_options
from lakefs_fuse.cli.worker import find_place, run_offline
from lakefs_fuse.control.worker_protocol import SnapshotArgs
from lakefs_fuse.errors import ConfigError


@click.command("snapshot", context_settings={"show_default": True})
@click.argument("source")
@store_options
@click.option("--cache-dir", type=click.Path(file_okay=False), help="Kept for the next run, or that of a node that is "
              "not mounted now.  [default: a temporary one]")  # fmt: skip
@click.option("--name", metavar="NAME", default="", help="Keep it under this name, for `mount --immutable --snapshot`, "
              "in place of writing an index.")  # fmt: skip
@click.option("--list", "list_all", is_flag=True, help="Only say which named snapshots there are.")
@click.option("--delete", metavar="NAME", default="", help="Only delete a named snapshot.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, for scripts.")
def snapshot(
    source: str,
    cache_dir: str | None,
    name: str,
    list_all: bool,
    delete: str,
    as_json: bool,
    **options: Unpack[StoreOptions],
) -> int:
    """Fold the names of the lake SOURCE into an index: s3://bucket/prefix, file:///dir, or a mountpoint.

    A mount with an empty cache then starts from a few objects, instead of listing the bucket and reading all commits.
    Every directory is listed once. Mounts may read and write meanwhile. Run it now and then; the two newest indexes are
    kept.

    With --name it is kept until it is deleted, and gc leaves alone what it has in packs. Plain objects that are removed
    or replaced later are gone from it.
    """
    if sum(map(bool, (name, list_all, delete))) > 1:
        raise ConfigError("--name, --list and --delete: give one of them")
    args = SnapshotArgs(cache_dir=absolute(cache_dir), name=name, delete=delete, list=list_all)
    return run_offline("snapshot", find_place(source, options), args, as_json=as_json)
