"""`lakefs-fuse ingest`: a local tree or a tar stream straight into packs, past any mount."""

from __future__ import annotations

import os
import sys
from typing import Unpack

import click

from lakefs_fuse.cli.progress import is_watched
from lakefs_fuse.cli.store_options import StoreOptions, store_options
from lakefs_fuse.cli.worker import Place, find_place, run_offline
from lakefs_fuse.control.worker_protocol import IngestArgs
from lakefs_fuse.errors import ConfigError, LakeError


@click.command("ingest", context_settings={"show_default": True})
@click.argument("src")
@click.argument("path")
@store_options
@click.option("--lake", metavar="SOURCE", help="The lake's SOURCE as it is mounted, where PATH is a URL of a place in "
              "it.  [default: the nearest place at or above PATH with commits, else PATH itself]")  # fmt: skip
@click.option("--uploads", type=click.IntRange(1, 64), default=3, help="Packs uploaded at once, 64 MiB each in TMPDIR.")
@click.option("--json", "as_json", is_flag=True, help="The summary as JSON, for scripts.")
def ingest(src: str, path: str, lake: str | None, uploads: int, as_json: bool, **options: Unpack[StoreOptions]) -> int:
    """Load what is in SRC, a directory or a tar archive (- is standard input), into the directory PATH of a lake.

    PATH is in a mount, or a URL: s3://bucket/prefix/dir or file:///lake/dir. Files up to 64 MiB go into packs, larger
    ones become plain objects; modes, owners, times, symbolic links and empty directories are kept. Each pack is seen
    by mounts as soon as it is stored. After an interruption what was stored stays; running it again does all again.
    """
    place = find_place(path, options, lake)
    _check_source(src, place)
    return run_offline(
        "ingest",
        place,
        IngestArgs(source=src if src == "-" else os.path.abspath(src), count=is_watched()),
        as_json=as_json,
        uploads_max=uploads,
        reads_stdin=src == "-",
    )


def _check_source(src: str, place: Place) -> None:
    """Raises LakeError for what can be seen to fail before anything is begun."""
    if src == "-":
        if sys.stdin.isatty():
            raise ConfigError("SRC is -, but standard input is a terminal: pipe a tar stream into it")
        return
    if not os.path.exists(src):
        raise LakeError(f"{src} does not exist")
    if not os.access(src, os.R_OK | (os.X_OK if os.path.isdir(src) else 0)):
        raise LakeError(f"{src} cannot be read: permission denied")
    if place.mountpoint:
        inside = os.path.realpath(src).rstrip("/") + "/"
        if (place.mountpoint.rstrip("/") + "/").startswith(inside):
            raise ConfigError(f"{src} holds the mount {place.mountpoint} itself: ingest what is beside it")
        if os.statvfs(place.mountpoint).f_flag & os.ST_RDONLY:
            raise LakeError(f"{place.mountpoint} is mounted read-only: name the lake by its URL instead")
