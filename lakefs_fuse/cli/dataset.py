"""`lakefs-fuse dataset`: immutable versions of directories, made, described, compared, checked and removed.

Subcommands that ask the store run in a child process (`worker.run_offline`); those about the bytes of this node ask the
daemon of a mount, by the commands of `cache`. Names are those that any client of the lake chose, so in text every
character that a terminal might obey is escaped.
"""

from __future__ import annotations

import os
from typing import Any

import click
import msgspec

from lakefs_fuse.cli.cache import background_option, fits_option, limit_option, rate_of, warm_all
from lakefs_fuse.cli.daemons import checked_text, locate, open_daemon, require_stored
from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.log import local_time
from lakefs_fuse.cli.parameters import format_bytes
from lakefs_fuse.cli.store_options import SOURCE_HELP, Options, json_option, store_options
from lakefs_fuse.cli.terminal import escaped
from lakefs_fuse.cli.worker import find_place, run_offline
from lakefs_fuse.config import DatasetName
from lakefs_fuse.control import protocol
from lakefs_fuse.control.mounts import mount_at, read_mounts
from lakefs_fuse.control.worker_protocol import ChangeTotals, DatasetArgs, FileChange, FileEntry, Row
from lakefs_fuse.errors import ConfigError, LakeError
from lakefs_fuse.product import FUSE_TYPE

VERSION_HELP = "NAME@VERSION, such as imagenet@3."
NEWEST_HELP = "NAME@VERSION, such as imagenet@3; NAME is its newest version."

source_argument = argument("source", SOURCE_HELP)


@click.group("dataset")
def dataset() -> None:
    """Keep versions of a directory that never change, and mount them.

    \b
      lakefs-fuse dataset create s3://bucket/lake imagenet data/imagenet
      lakefs-fuse mount s3://bucket/lake /mnt/imagenet --dataset imagenet@1
      lakefs-fuse dataset diff s3://bucket/lake imagenet@1 imagenet@2

    A version keeps the names, attributes and bytes of the directory until the version is removed, whatever happens to
    the files later. Versions share equal bytes.
    """


def _run(source: str, options: Options, args: DatasetArgs, *, as_json: bool) -> int:
    for name in filter(None, (args.dataset, args.other)):
        DatasetName.parse(name)
    return run_offline("dataset", find_place(source, options, is_lake=True), args, as_json=as_json)


@dataset.command("create", cls=GroupedCommand, context_settings=SETTINGS)
@source_argument
@argument("name", "NAME, to make its next version, or NAME@VERSION.")
@argument("path", "The directory, relative to SOURCE.  [default: SOURCE itself]", default="")
@json_option
@store_options
def create(source: str, name: str, path: str, as_json: bool, **options: Any) -> int:
    """Make a version of a directory as it is now.

    Files in packs are not copied. The store copies every plain object, unless the previous version has a copy of it:
    one request for each, and its bytes are stored a second time. No mount or other tool replaces these copies.
    `lakefs-fuse pack` before it saves both for small files. Mounts may read and write at the same time, and an
    interruption leaves no version. The exit code is 75 while another command changes the lake.

    If SOURCE is a path in a mount, files written there are stored first, as by `lakefs-fuse flush`. The version does
    not contain changes that other nodes have not stored yet, nor, with a URL, those of this node: first run
    `lakefs-fuse flush` if mounts have `--durability writeback`, or files are being written.
    """
    args = DatasetArgs(action="create", dataset=name, path=checked_text(path))
    DatasetName.parse(name)
    place = find_place(source, options)
    if place.mountpoint and f"{path}/".startswith(f"{place.mountpoint}/"):
        relative = os.path.relpath(path, place.mountpoint)
        raise ConfigError(
            f"PATH is relative to SOURCE: `lakefs-fuse dataset create {place.mountpoint} {name} {relative}`"
        )
    if place.mountpoint:
        require_stored(f"{source}/{path}", "no version was made")
    return run_offline("dataset", place, args, as_json=as_json)


@dataset.command("ls", cls=GroupedCommand, context_settings=SETTINGS)
@source_argument
@argument("name", "Show the versions of this dataset only.", default="")
@json_option
@store_options
def list_datasets(source: str, name: str, as_json: bool, **options: Any) -> int:
    """List the versions of all datasets, or of one."""
    return _run(source, options, DatasetArgs(action="ls", dataset=name), as_json=as_json)


@dataset.command("show", cls=GroupedCommand, context_settings=SETTINGS)
@source_argument
@argument("name", NEWEST_HELP)
@option("--files", is_flag=True, help="Print each file instead, with its size, ETag and place in the store; with "
        "--json one object a line.")  # fmt: skip
@json_option
@store_options
def show(source: str, name: str, files: bool, as_json: bool, **options: Any) -> int:
    """Describe a version: its directory, time, and number of files and bytes."""
    args = DatasetArgs(action="show", dataset=name, files=files)
    if not files:
        return _run(source, options, args, as_json=as_json)
    DatasetName.parse(name)
    return run_offline(
        "dataset", find_place(source, options, is_lake=True), args, show=_show_json if as_json else _show_text
    )


def _show_json(row: Row) -> None:
    found = msgspec.structs.asdict(row)
    click.echo(msgspec.json.encode({"totals": found} if isinstance(row, ChangeTotals) else found))


def _show_text(row: Row) -> None:
    assert isinstance(row, FileEntry), "the others are answers of other commands"
    path = f"{escaped(row.path)} -> {escaped(row.target)}" if row.target else escaped(row.path)
    place = f"{escaped(row.key)} +{row.offset}" if row.offset else escaped(row.key)
    click.echo(
        f"{format_bytes(row.size):>9}  {local_time(row.mtime_ns)}  {row.etag or '-':32}  {path}  {place}".rstrip()
    )


@dataset.command("diff", cls=GroupedCommand, context_settings=SETTINGS)
@source_argument
@argument("before", NEWEST_HELP)
@argument("after", NEWEST_HELP)
@option("--read", is_flag=True, help="Read and compare the bytes of files whose metadata does not show whether they "
        "differ, because plain objects were packed between the versions. Without it, size and mtime decide for "
        "these.")  # fmt: skip
@option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with stable names; the last one has the "
        "totals.")  # fmt: skip
@store_options
def diff(source: str, before: str, after: str, read: bool, as_json: bool, **options: Any) -> int:
    """Show the names that differ between two versions. Each line begins with + for a name that only AFTER has, - for
    one that it lacks, M for other bytes, or a for other attributes (mode, owner, mtime, extended attributes). Only the
    manifests are read.
    """
    args = DatasetArgs(action="diff", dataset=before, other=after, read=read)
    for name in (before, after):
        DatasetName.parse(name)
    return run_offline(
        "dataset", find_place(source, options, is_lake=True), args, show=_show_json if as_json else _show_change
    )


SIGNS = {"added": "+", "removed": "-", "changed": "M", "attributes": "a"}


def _show_change(row: Row) -> None:
    if isinstance(row, FileChange):
        click.echo(f"{SIGNS[row.change]} {escaped(row.path)}{_sizes(row)}")
        return
    assert isinstance(row, ChangeTotals), "the others are answers of other commands"
    click.echo(
        f"{row.added:,} added, {row.removed:,} removed, {row.changed:,} changed, {row.attributes:,} with other "
        f"attributes, {row.same:,} the same; {format_bytes(row.bytes_new)} are new"
    )


def _sizes(row: FileChange) -> str:
    sizes = [format_bytes(size) for size in (row.size_before, row.size) if size is not None]
    return f"  {' -> '.join(dict.fromkeys(sizes))}" if sizes else ""


@dataset.command("verify", cls=GroupedCommand, context_settings=SETTINGS)
@source_argument
@argument("name", NEWEST_HELP)
@option("--read", is_flag=True, help="Also read every byte, and compare it with the sums of packs (CRC-32) and with "
        "ETags that are MD5s.")  # fmt: skip
@json_option
@store_options
def verify(source: str, name: str, read: bool, as_json: bool, **options: Any) -> int:
    """Check that the store has every object of a version, with its ETag and size.

    Prints each lost file. The exit code is 0 if there is none, else 1. Without --read no byte of a file is read, and
    the check takes one LIST for 1,000 packs and hidden objects of the lake.
    """
    return _run(source, options, DatasetArgs(action="verify", dataset=name, read=read), as_json=as_json)


@dataset.command("status", cls=GroupedCommand, context_settings=SETTINGS)
@source_argument
@argument("name", NEWEST_HELP)
@json_option
@store_options
def status(source: str, name: str, as_json: bool, **options: Any) -> int:
    """Show how much of a version is on the disk of each node that mounts it, the most first.

    Mounts record this in the store within a minute of a change. A mount that ended is shown for a day, because its
    cache still exists. The name of the node is LAKEFS_NODE_NAME in the environment of `mount`, or else its host name.
    """
    return _run(source, options, DatasetArgs(action="status", dataset=name), as_json=as_json)


MOUNTED = argument("mounted", "NAME@VERSION that is mounted on this node, or the directory where it is mounted.")


@dataset.command("warm", cls=GroupedCommand, context_settings=SETTINGS)
@MOUNTED
@limit_option
@fits_option
@background_option
@json_option
def warm(mounted: str, limit: float | None, as_much_as_fits: bool, background: bool, as_json: bool) -> None:
    """Fetch all of a version into the cache of a mount of it.

    As `lakefs-fuse cache warm` does with the directory where it is mounted.
    """
    request = protocol.WarmCache(bytes_s_max=rate_of(limit), partial=as_much_as_fits, background=background)
    warm_all({_find_mount(mounted): [("", "")]}, request, as_json=as_json)
    if not as_json:
        click.echo("`lakefs-fuse dataset status` shows it within a minute")


@dataset.command("pin", cls=GroupedCommand, context_settings=SETTINGS)
@MOUNTED
@limit_option
@background_option
@json_option
def pin(mounted: str, limit: float | None, background: bool, as_json: bool) -> None:
    """Fetch all of a version into the cache of a mount of it, and never evict it.

    As `lakefs-fuse cache pin` does with the directory where it is mounted; `cache unpin` ends it.
    """
    request = protocol.WarmCache(bytes_s_max=rate_of(limit), background=background, pin=True)
    warm_all({_find_mount(mounted): [("", "")]}, request, as_json=as_json)


def _find_mount(mounted: str) -> str:
    """The mountpoint of a dataset. Raises LakeError."""
    if "/" in mounted or mounted in (".", "..") or mount_at(os.path.realpath(mounted)) is not None:
        mountpoint, inside = locate(mounted)
        if inside or not _shown_at(mountpoint):
            raise ConfigError(
                f"{mounted} is not where a dataset is mounted: `lakefs-fuse cache warm` and `pin` take any path in a "
                "mount"
            )
        return mountpoint
    name = DatasetName.parse_version(mounted)
    found = [each.mountpoint for each in read_mounts() if each.fstype == FUSE_TYPE]
    found = [mountpoint for mountpoint in dict.fromkeys(found) if _shown_at(mountpoint) == str(name)]
    if not found:
        raise LakeError(
            f"{name} is not mounted on this node: `lakefs-fuse mount SOURCE MOUNTPOINT --dataset {name}` does that"
        )
    if len(found) > 1:
        raise ConfigError(f"{name} is mounted at {' and '.join(found)}: name one of these directories")
    return found[0]


def _shown_at(mountpoint: str) -> str:
    """The dataset that a mount shows; empty for another mount, or one whose daemon cannot be asked."""
    try:
        with open_daemon(mountpoint) as client:
            state = client.statistics().get("immutable")
    except LakeError:
        return ""
    return str(state.get("dataset") or "") if isinstance(state, dict) else ""


@dataset.command("rm", cls=GroupedCommand, context_settings=SETTINGS)
@source_argument
@argument("name", VERSION_HELP)
@json_option
@store_options
def remove(source: str, name: str, as_json: bool, **options: Any) -> int:
    """Remove a version; `lakefs-fuse gc` then frees the bytes that only it used. Mounts that show it continue to read
    from their caches, and after gc get I/O errors for the rest. Exit code 75 while another command changes the lake.
    """
    return _run(source, options, DatasetArgs(action="rm", dataset=name), as_json=as_json)
