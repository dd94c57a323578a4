"""`lakefs-fuse ingest`, `pack`, `unpack`, `relocate`, `snapshot`, `gc`, `fsck`, `upgrade`: commands beside the mounts.

Each turns its arguments into a request and runs it in a child process (`worker.run_offline`), which has the libraries
that reach a store. Nothing here keeps state; the engine of each command, in `admin`, documents what a crash leaves.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from lakefs_fuse.cli.daemons import require_stored, show_changes
from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.parameters import DURATION, SIZE, LocalPath, Number, Percent
from lakefs_fuse.cli.preflight import require_cache_of_node, require_own_cache
from lakefs_fuse.cli.store_options import (
    PATH_HELP,
    SOURCE_HELP,
    absolute,
    dry_run_option,
    json_option,
    lake_option,
    store_options,
)
from lakefs_fuse.cli.terminal import is_watched
from lakefs_fuse.cli.worker import find_place, run_offline
from lakefs_fuse.control.worker_protocol import (
    FsckArgs,
    GcArgs,
    IngestArgs,
    PackArgs,
    Place,
    RelocateArgs,
    SnapshotArgs,
    UpgradeArgs,
)
from lakefs_fuse.errors import ConfigError, LakeError
from lakefs_fuse.product import PROGRAM


@click.command("ingest", cls=GroupedCommand, context_settings=SETTINGS)
@argument("src", "A directory, a tar archive, or - for a tar stream on standard input.")
@argument("path", "The directory to load into: a path in a mount, or a URL such as s3://bucket/prefix/dir.")
@option("--uploads", type=Number(1, 64), metavar="N", default=3, help="Maximum number of concurrent uploads, "
        "each of 64 MiB in TMPDIR. Raise it for a fast network.")  # fmt: skip
@json_option
@lake_option
@store_options
def ingest(src: str, path: str, lake: str | None, uploads: int, as_json: bool, **options: Any) -> int:
    """Load a local tree or a tar archive into a lake.

    Files of up to 64 MiB are stored in packs, larger ones as plain objects. Modes, owners, times, symbolic links and
    empty directories are kept. Each pack becomes visible within --refresh of a mount, all of them before the command
    ends in the mount that PATH is in. After an interruption the packs that were stored stay; a second run loads
    everything again.
    """
    place = find_place(path, options, lake)
    _check_source(src, place)
    if place.mountpoint:
        _check_target(path)
    exit_code = run_offline(
        "ingest",
        place,
        IngestArgs(source=src if src == "-" else os.path.abspath(src), count=is_watched()),
        as_json=as_json,
        uploads_max=uploads,
        reads_stdin=src == "-",
    )
    if place.mountpoint:
        show_changes(path)
    return exit_code


def _check_source(src: str, place: Place) -> None:
    """Detect failures before anything is written. Raises LakeError."""
    if src == "-":
        if sys.stdin.isatty():
            raise ConfigError("SRC is -, but standard input is a terminal: pipe a tar stream into it")
        return
    if not os.path.exists(src):
        raise LakeError(f"{src} does not exist: name a directory, a tar archive, or -")
    if not os.access(src, os.R_OK | (os.X_OK if os.path.isdir(src) else 0)):
        raise LakeError(f"{src} cannot be read: permission denied; run this as a user with read permission")
    if place.mountpoint:
        inside = os.path.realpath(src).rstrip("/") + "/"
        if (place.mountpoint.rstrip("/") + "/").startswith(inside):
            raise ConfigError(f"{src} contains the mount {place.mountpoint}: ingest the directories beside it")
        if os.statvfs(place.mountpoint).f_flag & os.ST_RDONLY:
            raise LakeError(f"{place.mountpoint} is mounted read-only: name the lake by its URL instead")


def _check_target(path: str) -> None:
    """Raises ConfigError where ``path``, in a mount, is a file or below one, which a directory of its name would
    hide."""
    real = os.path.realpath(path)
    while not os.path.lexists(real):
        real = os.path.dirname(real)
    if not os.path.isdir(real):
        raise ConfigError(f"{real} is not a directory: name a directory, or a name that is not taken")


def _find_whole_lake(source: str, options: dict[str, Any]) -> Place:
    """The lake that contains SOURCE; prints a line if SOURCE is a directory or file of it. Raises LakeError."""
    place = find_place(source, options, is_lake=True)
    if place.path:
        click.echo(f"{PROGRAM}: {source} is in the lake {place.store.source}: the whole lake is meant", err=True)
    return place


@click.command("pack", cls=GroupedCommand, context_settings=SETTINGS)
@argument("path", PATH_HELP)
@option("--threshold", type=SIZE, default="1MiB", help="Maximum size of a file to pack; larger ones are left.")
@option("--grace", type=DURATION, default="5m", help="Time between a commit and the deletion of the packed objects: as "
        "the --delete-after of mounts, or 0 if the lake is not mounted.")  # fmt: skip
@dry_run_option
@json_option
@lake_option
@store_options
def pack(
    path: str,
    lake: str | None,
    threshold: int,
    grace: float,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Move small plain objects into packs.

    Names, attributes and open files stay as they are; mounts may read and write at the same time. The objects are
    deleted after packs hold their bytes. Objects of a named snapshot are not packed. After an interruption, a second
    run completes the work. Exit code 75 while another command changes the lake.
    """
    args = PackArgs(threshold_bytes=threshold, grace_s=grace, dry_run=dry_run)
    return run_offline("pack", find_place(path, options, lake), args, as_json=as_json)


@click.command("unpack", cls=GroupedCommand, context_settings=SETTINGS)
@argument("path", PATH_HELP)
@dry_run_option
@json_option
@lake_option
@store_options
def unpack(path: str, lake: str | None, dry_run: bool, as_json: bool, **options: Any) -> int:
    """Move files out of packs into plain objects, which every S3 tool can read.

    Names, attributes and open files stay as they are. Do not write to the files while it runs. `lakefs-fuse gc`
    reclaims the space in the packs. Exit code 75 while another command changes the lake.
    """
    args = PackArgs(back=True, dry_run=dry_run)
    return run_offline("pack", find_place(path, options, lake), args, as_json=as_json)


@click.command("relocate", cls=GroupedCommand, context_settings=SETTINGS)
@argument("path", PATH_HELP)
@dry_run_option
@json_option
@lake_option
@store_options
def relocate(path: str, lake: str | None, dry_run: bool, as_json: bool, **options: Any) -> int:
    """Copy the objects of renamed files to the keys of their names, where other S3 tools find them.

    A rename moves no bytes: the object of a large file stays at the key of the name under which it was written. The
    store makes the copies itself. Names, attributes and open files stay as they are. Do not rename the files while it
    runs. `lakefs-fuse gc` deletes the objects at the old keys. Exit code 75 while another command changes the lake.
    """
    return run_offline("relocate", find_place(path, options, lake), RelocateArgs(dry_run=dry_run), as_json=as_json)


@click.command("snapshot", cls=GroupedCommand, context_settings=SETTINGS)
@argument("source", SOURCE_HELP)
@option("--name", metavar="NAME", help="Keep the state under this name for `mount --immutable --snapshot`, "
        "until it is deleted, and write no index.")  # fmt: skip
@option("--list", "list_all", is_flag=True, help="List the named snapshots, and do nothing else.")
@option("--delete", metavar="NAME", help="Delete a named snapshot, and do nothing else.")
@option("--cache-dir", type=LocalPath(file_okay=False), metavar="DIR", help="Directory with metadata that is kept for "
        "the next run. Set it to list less; it must not be in use by a mount.  [default: a temporary one]")  # fmt: skip
@option("--accept-loss", is_flag=True, help="If names are missing because the index that had them is lost, write one "
        "of the remaining names. Restore the lost objects instead, if you can: fsck names them.")  # fmt: skip
@json_option
@store_options
def snapshot(
    source: str,
    cache_dir: str | None,
    name: str | None,
    list_all: bool,
    delete: str | None,
    accept_loss: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Write an index of all names, from which new mounts start.

    A mount with an empty cache then reads a few objects, instead of listing the bucket and reading all commits. Mounts
    write indexes from commits automatically. Run it after other S3 clients put many objects: it lists every directory
    once. Mounts may read and write at the same time. The two newest indexes are kept.

    With --name, gc keeps the packs of the snapshot until it is deleted. A plain object that is removed or replaced
    later is missing from it. If SOURCE is in a mount, everything written in that mount is stored first, as by
    `lakefs-fuse flush`. Exit code 75 while another command changes the lake.
    """
    if "" in (name, delete):
        raise ConfigError("the name of the snapshot is empty")
    if sum(map(bool, (name, list_all, delete))) > 1:
        raise ConfigError("--name, --list and --delete exclude each other: give one of them")
    if accept_loss and (name or list_all or delete):
        raise ConfigError("--accept-loss writes an index: leave out --name, --list and --delete")
    cache_dir = absolute(cache_dir)
    if cache_dir is not None:
        require_own_cache(Path(cache_dir))
    args = SnapshotArgs(
        cache_dir=cache_dir, name=name or "", delete=delete or "", list=list_all, accept_loss=accept_loss
    )
    place = _find_whole_lake(source, options)
    if place.mountpoint and name:
        require_stored(place.mountpoint, "no snapshot was made")
    return run_offline("snapshot", place, args, as_json=as_json)


@click.command("gc", cls=GroupedCommand, context_settings=SETTINGS)
@argument("source", SOURCE_HELP)
@option("--live-below", type=Percent(), default=75, metavar="PERCENT", help="Rewrite a pack when less "
        "than this percentage of its bytes is referenced. Raise it to reclaim more, at more traffic.")  # fmt: skip
@option("--grace", type=DURATION, default="1h", help="Minimum time between finding an object unreferenced and deleting "
        "it; 0 if the lake is not mounted.")  # fmt: skip
@option("--wait", is_flag=True, help="Wait for the grace period and delete in this run, instead of in a later one.")
@option("--uploads-older-than", type=DURATION, default="7d", help="Abort unfinished multipart uploads of this age. "
        "Set it above the longest time that a file stays open for writing.")  # fmt: skip
@dry_run_option
@json_option
@store_options
def gc(
    source: str,
    live_below: float,
    grace: float,
    wait: bool,
    uploads_older_than: float,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Reclaim space of removed and replaced files.

    Rewrites packs with many unreferenced bytes, deletes unreferenced packs and commits, and objects of removed files,
    after a grace period, and aborts abandoned uploads. Mounts do this automatically about once a day, unless they are
    mounted with --maintenance off: run it to free space sooner. A later run deletes the objects that this one found.
    Mounts may read and write at the same time, and an interruption loses nothing.

    Exit code 1 if a commit cannot be read: run fsck first; 75 while another command changes the lake.
    """
    args = GcArgs(
        live_below=live_below / 100,
        grace_s=grace,
        uploads_older_s=uploads_older_than,
        wait=wait,
        dry_run=dry_run,
    )
    return run_offline("gc", _find_whole_lake(source, options), args, as_json=as_json)


@click.command("fsck", cls=GroupedCommand, context_settings=SETTINGS)
@argument("source", SOURCE_HELP)
@option("--quick", is_flag=True, help="Check change records and references, and do not read the bytes of files.")
@option("--repair", is_flag=True, help="Move unusable commits aside, point names with damaged bytes at intact "
        "copies, and commit again what was dated in the future or came too late. The last copy of a file is never "
        "deleted.")  # fmt: skip
@option("--rebind", is_flag=True, help="Instead of checking, commit the present ETags of objects. Use it right after "
        "other tools copied or re-encrypted the lake, before any mount. --quick compares sizes.")  # fmt: skip
@dry_run_option
@option("--cache-dir", type=LocalPath(exists=True, file_okay=False), metavar="DIR", help="Cache directory of a node "
        "that is not mounted. Set it to name the files of packs that are missing.")  # fmt: skip
@json_option
@store_options
def fsck(
    source: str,
    quick: bool,
    repair: bool,
    rebind: bool,
    dry_run: bool,
    cache_dir: str | None,
    as_json: bool,
    **options: Any,
) -> int:
    """Check every commit, reference and checksum of a lake.

    Prints each damaged object with the first 1,000 files that it affects; --json has all. Exit code 0 if all could
    be checked and nothing is damaged, else 1. With --repair or --rebind, 75 while another command changes the lake.
    """
    if rebind and (repair or cache_dir is not None):
        raise click.UsageError("--rebind cannot be combined with --repair or --cache-dir")
    if dry_run and not rebind:
        raise click.UsageError("--dry-run is for --rebind: without --repair, fsck changes nothing")
    cache_dir = absolute(cache_dir)
    if cache_dir is not None:
        require_cache_of_node(Path(cache_dir))
    args = FsckArgs(quick=quick, repair=repair, rebind=rebind, dry_run=dry_run, cache_dir=cache_dir)
    return run_offline("fsck", _find_whole_lake(source, options), args, as_json=as_json)


@click.command("upgrade", cls=GroupedCommand, context_settings=SETTINGS)
@argument("source", SOURCE_HELP)
@json_option
@store_options
def upgrade(source: str, as_json: bool, **options: Any) -> int:
    """Enable the newest format features for a lake.

    Older programs cannot use the lake afterwards, and there is no way back. Refused if a program that is too old has
    committed in the last hour: unmount its mounts first. Mounts of this version continue. Exit code 75 while another
    command changes the lake.
    """
    return run_offline("upgrade", _find_whole_lake(source, options), UpgradeArgs(), as_json=as_json)
