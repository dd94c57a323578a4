"""`lakefs-fuse checkpoint`: lists, verifies, prunes and consolidates checkpoints, and finds the newest.

On a path in a mount, `ls`, `latest` and `prune` work through the mount: they see what this node sees, and a checkpoint
that is not entirely in the store is incomplete. `verify` always reads the object store, in a child process (`worker`),
because the block cache and the page cache prove nothing about the store. With a URL, all except `prune` work without a
mount.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from lakefs_fuse.checkpoints.model import Checkpoint, Listing, Pruning, choose
from lakefs_fuse.cli.checkpoint_walk import delete, find_checkpoints, is_directory
from lakefs_fuse.cli.daemons import is_in_mount, locate, open_daemon
from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.parameters import DURATION, Number, format_bytes, format_duration
from lakefs_fuse.cli.store_options import (
    Options,
    any_given,
    dry_run_option,
    json_option,
    lake_option,
    store_options,
)
from lakefs_fuse.cli.terminal import escaped, print_json, print_path, print_tables, progress_bar, table_text
from lakefs_fuse.cli.worker import find_place, run_offline
from lakefs_fuse.control.worker_protocol import CheckpointArgs, VerifyArgs
from lakefs_fuse.errors import ConfigError, LakeError
from lakefs_fuse.quantity import counted

Decorated = TypeVar("Decorated", bound=Callable[..., object])


def selection_options(command: Decorated) -> Decorated:
    """Add the options that select names and define a complete checkpoint."""
    command = option(
        "--match",
        metavar="GLOB",
        help="Names that count as checkpoints. Set it for files with other suffixes.  [default: directories, and "
        "files with a suffix of checkpoints: .pt, .ckpt, .safetensors, …]",
    )(command)
    return option(
        "--marker",
        metavar="NAME",
        help="A directory is complete when it contains a file of this name.  [default: if any directory has _SUCCESS, "
        ".metadata or COMPLETE, all need it]",
    )(command)


PATH = argument(
    "path", "The directory of the checkpoints: a path in a mount, or a URL such as s3://bucket/prefix/ckpt."
)


@click.group("checkpoint")
def checkpoint() -> None:
    """List, verify, prune and consolidate checkpoints, and find the newest.

    A checkpoint is a file, or a directory of shards, directly in PATH.
    """


@checkpoint.command("ls", cls=GroupedCommand, context_settings=SETTINGS)
@PATH
@selection_options
@json_option
@lake_option
@store_options
def list_checkpoints(path: str, marker: str | None, match: str | None, lake: str | None, as_json: bool,
                     **options: Any) -> int:  # fmt: skip
    """List checkpoints, newest first, and why one is incomplete.

    A checkpoint is incomplete if its name is temporary (.tmp, .partial or .incomplete at the end; a dot, tmp or _tmp at
    the beginning), if a directory has no marker, if it has no files, if neither its name nor a file in it looks like a
    checkpoint's, or if it is not entirely in the store.
    """
    if "://" in path:
        args = CheckpointArgs(action="ls", url=path, marker=marker, match=match)
        return run_offline("checkpoint", find_place(path, options, lake), args, as_json=as_json)
    listing = _list(path, marker, match, lake, options)
    if as_json:
        print_json(listing)
    else:
        _print_table(listing)
    return 0


@checkpoint.command("latest", cls=GroupedCommand, context_settings=SETTINGS)
@PATH
@selection_options
@json_option
@lake_option
@store_options
def latest(path: str, marker: str | None, match: str | None, lake: str | None, as_json: bool,
           **options: Any) -> int:  # fmt: skip
    """Print the path of the newest complete checkpoint.

    Exit code 1 if there is none. The newest has the highest step, if all names that are not temporary have a number
    after `step` or `iter`, or differ only in their numbers; else it is the one written last.
    """
    if "://" in path:
        args = CheckpointArgs(action="latest", url=path, marker=marker, match=match)
        return run_offline("checkpoint", find_place(path, options, lake), args, as_json=as_json, print_text=print_path)
    listing = _list(path, marker, match, lake, options)
    found = listing.newest
    if found is None:
        raise LakeError(
            f"{path} has no complete checkpoint ({len(listing.checkpoints)} incomplete)"
            + (f": `lakefs-fuse checkpoint ls {path}` shows why" if listing.checkpoints else "")
        )
    if as_json:
        print_json(found)
    else:
        print_path(found.path)
    return 0


@checkpoint.command("verify", cls=GroupedCommand, context_settings=SETTINGS)
@PATH
@argument("names", "Checkpoints to verify; without any, all complete ones.", nargs=-1, metavar="[NAME]…")
@selection_options
@json_option
@lake_option
@store_options
def verify(path: str, names: tuple[str, ...], marker: str | None, match: str | None, lake: str | None, as_json: bool,
           **options: Any) -> int:  # fmt: skip
    """Check the bytes of checkpoints in the object store.

    Every byte is read from the store, bypassing all caches. It checks, if a file has them: the size; the ETag, if it is
    an MD5 or the MD5 of those of the parts; the CRC-32 in a pack; the CRC-32s in a ZIP, which torch.save writes; the
    header of a .safetensors file; a SHA256SUMS file in the same directory; the shards that an index.json names. The
    exit code is 1 if anything is damaged or missing.
    """
    md5_etags: bool | None = None
    not_stored: tuple[str, ...] = ()
    if "://" not in path:
        listing = _list(path, marker, match, lake, options)
        not_stored = tuple(item.name for item in listing.checkpoints if item.where != "store")
        with open_daemon(locate(path)[0]) as client:
            capabilities = client.statistics().get("capabilities")
        md5_etags = bool(capabilities.get("md5_etags")) if isinstance(capabilities, dict) else None
    args = VerifyArgs(names=names, marker=marker, match=match, url=path, md5_etags=md5_etags, not_stored=not_stored)
    return run_offline("checkpoint-verify", find_place(path, options, lake), args, as_json=as_json)


@checkpoint.command("prune", cls=GroupedCommand, context_settings=SETTINGS)
@argument("path", "The directory of the checkpoints, in a mount.")
@option("--keep", type=Number(1), metavar="N", help="Keep the N newest complete checkpoints.")
@option("--older-than", type=DURATION, help="Delete only checkpoints older than this.")
@option("--incomplete", is_flag=True, help="Also delete incomplete ones that are older than the newest complete one.")
@selection_options
@dry_run_option
@json_option
def prune(path: str, marker: str | None, match: str | None, keep: int | None, older_than: float | None,
          incomplete: bool, dry_run: bool, as_json: bool) -> int:  # fmt: skip
    """Delete old checkpoints.

    Give --keep, --older-than or both; with both, only checkpoints that match both are deleted. The command never
    deletes the newest complete checkpoint, one that is not entirely in the store, the target of a symbolic link in
    PATH, or a name without a number (best.pt, config) unless --match selects it.
    """
    if keep is None and older_than is None:
        raise click.UsageError("--keep or --older-than is missing: give --keep N, --older-than DURATION, or both")
    if "://" in path:
        raise ConfigError(f"{path} is a URL, and checkpoints are deleted through a mount: give a path in one")
    listing = _list(path, marker, match, None, {})
    pruning = Pruning(keep=keep, older_than_s=older_than, incomplete=incomplete, any_name=match is not None)
    chosen = choose(listing, pruning)
    failed = {} if dry_run else _delete_all(listing.path, chosen)
    deleted = [item for item in chosen if item.name not in failed]
    if as_json:
        print_json({
            "path": listing.path,
            "latest": listing.latest,
            "dry_run": dry_run,
            "deleted": deleted,
            "kept": [item.name for item in listing.checkpoints if item not in deleted],
            "bytes": sum(item.bytes for item in deleted),
            "failed": failed,
        })  # fmt: skip
    else:
        for item in deleted:
            click.echo(f"{'would delete' if dry_run else 'deleted'} {escaped(item.path)} ({format_bytes(item.bytes)})")
        if not deleted:
            click.echo("nothing to delete")
    for name, why in failed.items():
        click.echo(f"lakefs-fuse: {escaped(name)} could not be deleted: {why}", err=True)
    return 1 if failed else 0


def _delete_all(directory: str, chosen: list[Checkpoint]) -> dict[str, str]:
    """Delete checkpoints; the names that could not be deleted, with the reasons."""
    failed: dict[str, str] = {}
    console = Console(stderr=True)
    for item in track(chosen, "deleting", console=console, transient=True, disable=not console.is_terminal):
        try:
            delete(directory, item)
        except OSError as error:
            failed[item.name] = error.strerror or str(error)
    return failed


def _list(path: str, marker: str | None, match: str | None, lake: str | None, options: Options) -> Listing:
    """The checkpoints that a mount shows. Raises LakeError where ``path`` is no directory in one."""
    named = (lake and "--lake") or any_given(options)
    if named:
        raise ConfigError(f"{named} goes with a source URL, and {path} is a path: leave {named} out")
    locate(path)
    absolute = os.path.abspath(path)
    if not is_directory(absolute):
        raise LakeError(f"{path} is not a directory: give the one that holds the checkpoints")
    return find_checkpoints(absolute, marker=marker, match=match)


@checkpoint.command("consolidate", cls=GroupedCommand, context_settings=SETTINGS)
@argument("source", "The directory of a sharded checkpoint, with a file .metadata.")
@argument("target", "The file to write: for safetensors if it ends in .safetensors, else for torch.load.")
@option("--prefix", default="", metavar="TEXT", help="Only values whose name begins with TEXT, which is removed from "
        "the name, such as `model.`.")  # fmt: skip
@option("--tensors-only", is_flag=True, help="Omit values other than tensors, such as the step. Always the case for "
        "safetensors.")  # fmt: skip
@option("-f", "--force", is_flag=True, help="Replace TARGET.")
@json_option
def consolidate_shards(
    source: str, target: str, prefix: str, tensors_only: bool, force: bool, as_json: bool
) -> None:  # fmt: skip
    """Write one file from the shards of torch.distributed.checkpoint, which FSDP uses as well.

    The tensors are streamed, so memory does not depend on their size, and torch is not needed. The file is compared
    with the bytes that were read before it gets its name.
    """
    from lakefs_fuse.checkpoints.consolidate import consolidate

    for path in (source, target):
        if "://" in path:
            raise ConfigError(f"{path} is a URL: mount the lake, and name paths in the mount")
    total = done = 0
    with progress_bar(remaining=True) as bar:

        def begun(count: int) -> None:
            nonlocal total
            total = count

        def advanced(count: int) -> None:
            nonlocal done
            done += count
            bar.update("writing" if 2 * done <= total else "comparing", done, total, "")

        made = consolidate(
            Path(source), Path(target), prefix=prefix, tensors_only=tensors_only, force=force, begun=begun,
            advanced=advanced, sync=id if is_in_mount(target) else os.fsync,
        )  # fmt: skip
    if as_json:
        print_json(made)
        return
    values = f"{counted(made.tensors, 'tensor')}, {format_bytes(made.bytes)}, {counted(made.objects, 'other value')}"
    click.echo(f"{made.path}: {values}")
    if made.left_out:
        click.echo(f"omitted, because they are not tensors: {escaped(', '.join(made.left_out))}", err=True)


def _print_table(listing: Listing) -> None:
    if not listing.checkpoints:
        click.echo(f"{listing.path}: no checkpoints")
        return
    table = Table(Column("name", overflow="fold"), box=None, pad_edge=False)
    for column in ("step", "files", "size"):
        table.add_column(column, justify="right")
    table.add_column("written", no_wrap=True)
    table.add_column("age", justify="right", no_wrap=True)
    table.add_column("complete", overflow="fold")
    for item in listing.checkpoints:
        state = "yes, newest" if item.name == listing.latest else "yes"
        table.add_row(
            table_text(item.name + ("/" if item.kind == "directory" else "")),
            "" if item.step is None else str(item.step),
            f"{item.files:,}",
            format_bytes(item.bytes),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.mtime)) if item.mtime else "",
            format_duration(item.age_s) if item.mtime else "",
            table_text(state if item.complete else f"no: {item.reason}"),
        )
    print_tables(table)
