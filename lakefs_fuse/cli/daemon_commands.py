"""`clone`, `flush`, `orphans`, `refresh` and `wait`: requests to the daemon of a mount, over its control socket."""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime
from typing import TypeAlias

import click

from lakefs_fuse.cli.daemons import (
    checked_text,
    describe_files,
    is_missing,
    locate,
    open_daemon,
    require_done,
    store_changes,
    with_reason,
)
from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.parameters import DURATION, LocalPath, format_bytes, format_duration
from lakefs_fuse.cli.store_options import json_option
from lakefs_fuse.cli.terminal import print_json, print_tables, table_text
from lakefs_fuse.control import protocol
from lakefs_fuse.control.client import ControlClient
from lakefs_fuse.errors import ConfigError, LakeError
from lakefs_fuse.metrics import Unfinished
from lakefs_fuse.product import XATTR_VERSION
from lakefs_fuse.quantity import counted

ID_CHARACTERS = 32
Resolutions: TypeAlias = "dict[str, protocol.FinishOrphan | protocol.AbortOrphan]"
"""What to do with orphans, by id."""


@click.command("clone", cls=GroupedCommand, context_settings=SETTINGS)
@argument("source", "A file or directory in a mount.", type=LocalPath(readable=False))
@argument("target", "Path of the copy, in the same mount; its directory exists.", type=LocalPath(readable=False))
@option("-f", "--force", is_flag=True, help="Replace TARGET if it is a file, or an empty directory.")
def clone(source: str, target: str, force: bool) -> None:
    """Copy a file or a directory inside the lake without moving a byte through this machine.

    \b
      lakefs-fuse clone /mnt/lake/datasets/v1 /mnt/lake/datasets/v2

    The copy gets all names, bytes, attributes and symbolic links below SOURCE, and every mount sees all of it or
    nothing. TARGET is its name, also if a directory of that name exists (as with `cp -T`). Files of SOURCE that are
    being written are stored first. Files in packs share their bytes with the copy; the store copies plain objects. A
    later change of either does not affect the other.
    """
    mountpoint, relative = locate(source)
    above, name = os.path.split(os.path.abspath(target))
    target_mountpoint, directory = locate(above)
    if target_mountpoint != mountpoint:
        raise ConfigError(f"{source} and {target} are in different mounts: use `cp`")
    request = protocol.Clone(checked_text(relative), checked_text(f"{directory}/{name}".lstrip("/")), force)
    with open_daemon(mountpoint) as client:
        *_, reply = client.follow(request)
    require_done(reply)


@click.command("flush", cls=GroupedCommand, context_settings=SETTINGS)
@argument("path", "A file or directory in a mount.", type=LocalPath(readable=False))
@option("--timeout", type=DURATION, default="1h", help="Maximum time to wait; uploads continue after it.")
@json_option
def flush(path: str, timeout: float, as_json: bool) -> None:
    """Wait until a file, or everything below a directory, is in the store.

    Failed uploads are retried. The exit code is 1 if some files cannot be stored; they are printed with the reasons. It
    is also 1 if PATH does not exist, or was renamed or removed during the command.
    """
    reply = store_changes(path, timeout)
    failed = reply if isinstance(reply, protocol.Failed) else None
    missing = failed is None and is_missing(path)  # an orphan has no name, and is reported as such
    files = failed.files if failed is not None else ()
    if as_json:
        print_json({"path": os.path.abspath(path), "stored": failed is None and not missing, "files": files})
    if missing:
        raise LakeError(f"{path} does not exist: name a file or directory in the mount")
    if failed is not None:
        raise LakeError(failed.message if as_json else "\n".join([failed.message, *describe_files(files)]))


@click.command("refresh", cls=GroupedCommand, context_settings=SETTINGS)
@argument("path", "A file or directory in a mount; an immutable mount is always refreshed as a whole.",
          type=LocalPath(readable=False))  # fmt: skip
@option("-r", "--recursive", is_flag=True, help="Also everything below PATH. Use it after another program has changed "
        "many directories; it costs up to one LIST request each.")  # fmt: skip
@json_option
def refresh(path: str, recursive: bool, as_json: bool) -> None:
    """Show what is in the store now, without waiting for --refresh and --foreign.

    \b
      aws s3 cp data.csv s3://bucket/in/ && lakefs-fuse refresh /mnt/lake/in

    Returns when the mount shows PATH, and the names directly in it, as they were in the store when the command began.
    If PATH does not exist then, a line on stderr reports it; it may have been removed, so that is no error. A mount
    made with --immutable moves to the current state of its lake: it shows either the whole new state, or, if that
    fails, the old one. Open files keep their contents.
    """
    mountpoint, relative = locate(path)
    with open_daemon(mountpoint) as client:
        *_, reply = with_reason(client.follow(protocol.Refresh(checked_text(relative), recursive)), mountpoint)
    require_done(reply)
    values = reply.values if isinstance(reply, protocol.Statistics) else {}
    missing = is_missing(path)
    if missing:
        click.echo(f"lakefs-fuse: {path} does not exist", err=True)
    if as_json:
        print_json({"mountpoint": mountpoint, "path": relative, "exists": not missing, **values})
    elif isinstance(at_s := values.get("at_s"), float):
        at = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds")
        changed = counted(int(str(values.get("changed", 0))), "name")
        click.echo(f"{mountpoint} shows the lake of {at}: {changed} changed")


@click.command("wait", cls=GroupedCommand, context_settings=SETTINGS)
@argument(
    "path", "A path in a mount; the path and its parent directories need not exist.", type=LocalPath(readable=False)
)
@option("--exists", is_flag=True, help="Wait until PATH exists, which is the default.")
@option("--version", "version", metavar="V", help="Wait until PATH is a file of this version: an ETag, or "
        f"what the writer's mount shows as the extended attribute {XATTR_VERSION}.")  # fmt: skip
@option("--timeout", type=DURATION, help="Maximum time to wait.  [default: none]")
def wait(path: str, exists: bool, version: str | None, timeout: float | None) -> None:
    """Wait until a path exists, or is a file of a version.

    Afterwards, open() on this node reads that version or a later one. Changes in commits of other mounts are seen
    within --refresh of this mount, objects that appear in the bucket within --metadata-ttl. Exit code 1 if --timeout
    ends the wait. Example:

    \b
      lakefs-fuse wait /mnt/lake/ckpt/step100/_SUCCESS --timeout 1h && python evaluate.py
    """
    if exists and version:
        raise click.UsageError("--exists and --version exclude each other: give one of them")
    ends_at = None if timeout is None else time.monotonic() + timeout
    before = None
    while (place := locate(path)) != before:  # a symbolic link may have appeared on the way
        before = mountpoint, relative = place
        left_s = None if ends_at is None else max(0.0, round(ends_at - time.monotonic(), 1))
        with open_daemon(mountpoint) as client:
            *_, reply = client.follow(protocol.WaitPath(checked_text(relative), (version or "").strip('"'), left_s))
        require_done(reply, f"{path}: ")


@click.command("orphans", cls=GroupedCommand, context_settings=SETTINGS)
@argument("mountpoint", "The directory of the mount.", type=LocalPath(readable=False))
@option("--finish", "finish_ids", metavar="ID", multiple=True, help="Store this orphan under its name, as it is.")
@option("--abort", "abort_ids", metavar="ID", multiple=True, help="Delete this orphan, its bytes and its upload.")
@option("--all", "all_of_them", type=click.Choice(["finish", "abort"]), help="Finish or abort every orphan.")
@option("--incomplete", is_flag=True, help="Also finish orphans with failed writes, without the missing bytes.")
@json_option
def orphans(
    mountpoint: str,
    finish_ids: tuple[str, ...],
    abort_ids: tuple[str, ...],
    all_of_them: str | None,
    incomplete: bool,
    as_json: bool,
) -> None:
    """List, finish or abort orphans: files that were being written when a daemon died, whose writes failed, or whose
    name another client created first; and checkpoints whose writer was killed. Without options it lists them, with the
    ids for --finish and --abort.
    """
    both = set(finish_ids) & set(abort_ids)
    if both or (all_of_them and (finish_ids or abort_ids)):
        raise click.UsageError("finish or abort each orphan, not both; --all excludes --finish and --abort")
    with open_daemon(mountpoint) as client:
        if all_of_them:
            ids = tuple(file.id for file in client.orphans())[::-1]  # of several of one name the newest counts
            finish_ids, abort_ids = (ids, ()) if all_of_them == "finish" else ((), ids)
        elif not finish_ids and not abort_ids:
            found = client.orphans()
            if as_json:
                print_json({"orphans": found})
            else:
                _print_orphans(found)
            return
        requests: Resolutions = {id: protocol.FinishOrphan(id, incomplete) for id in finish_ids}
        requests |= {id: protocol.AbortOrphan(id) for id in abort_ids}
        failures = _resolve(client, requests)
    if as_json:
        done = {"finished": finish_ids, "aborted": abort_ids}
        print_json({key: [id for id in ids if id not in failures] for key, ids in done.items()} | {"failed": failures})
    if failures:
        raise LakeError("\n".join(dict.fromkeys(failures.values())))


def _resolve(client: ControlClient, requests: Resolutions) -> dict[str, str]:
    """Send every request, also after a failed one, while the daemon answers; the failures by id, one line each."""
    failures, broken = {}, ""
    for id, request in requests.items():
        if not broken:
            try:
                *_, reply = client.follow(request)
            except LakeError as error:
                broken = str(error)
            else:
                if isinstance(reply, protocol.Failed):
                    failures[id] = reply.message
        if broken:
            failures[id] = broken
    return failures


def _print_orphans(files: list[Unfinished]) -> None:
    if not files:
        click.echo("no orphans")
        return
    from rich.table import Column, Table

    # Users copy ids, so those are never cut; a narrow terminal folds the rest.
    table = Table(Column("id", no_wrap=True, min_width=ID_CHARACTERS), Column("path", overflow="fold"), box=None)
    for name in ("bytes", "in the store", "age", "error"):
        table.add_column(name, overflow="fold")
    for file in files:
        table.add_row(
            file.id,
            table_text(file.path),
            format_bytes(file.bytes),
            format_bytes(file.bytes_done),
            format_duration(file.age_s),
            table_text(file.error),
        )
    print_tables(table)
