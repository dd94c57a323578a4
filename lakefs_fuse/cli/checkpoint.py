"""`lakefs-fuse checkpoint`: which checkpoints there are, whether their bytes are right, the newest; away with the old.

In a mount `ls`, `latest` and `prune` go through the mount, so they see what this node sees, and say of what is not in
the store yet that it is incomplete. `verify` reads the object store in any case, in a child (`offline`): what lies in a
cache, or in the kernel's pages, proves nothing. With the URL of a place in a lake all but `prune` work without a mount.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import TypeVar, Unpack

import click
import msgspec
from rich.console import Console
from rich.progress import track
from rich.table import Column, Table

from lakefs_fuse.checkpoints.model import Checkpoint, Listing, Pruning, choose
from lakefs_fuse.cli.checkpoint_walk import delete, find_checkpoints, is_directory
from lakefs_fuse.cli.daemons import locate, open_daemon
from lakefs_fuse.cli.parameters import DURATION, format_bytes, format_duration
from lakefs_fuse.cli.store_options import StoreOptions, any_given, store_options
from lakefs_fuse.cli.worker import find_place, run_offline
from lakefs_fuse.control.worker_protocol import CheckpointArgs, VerifyArgs
from lakefs_fuse.errors import ConfigError, LakeError

PIPE_WIDTH = 200
Decorated = TypeVar("Decorated", bound=Callable[..., object])


def which_options(command: Decorated) -> Decorated:
    """What counts as a checkpoint, and when it is complete."""
    command = click.option(
        "--match", metavar="GLOB", help="Names that count as checkpoints.  [default: directories, and files that end "
        "as checkpoints do: .pt, .ckpt, .safetensors, …]",
    )(command)  # fmt: skip
    return click.option(
        "--marker", metavar="NAME", help="A directory is complete when it has a file of this name.  [default: where "
        "any directory has _SUCCESS, .metadata or COMPLETE, all need it]",
    )(command)  # fmt: skip


_lake_option = click.option(
    "--lake", metavar="SOURCE", help="The lake's SOURCE as it is mounted, where PATH is a URL of a place in it.  "
    "[default: the nearest place at or above PATH with commits, else PATH itself]",
)  # fmt: skip
_json_option = click.option("--json", "as_json", is_flag=True, help="As JSON, for scripts.")


@click.group("checkpoint")
def checkpoint() -> None:
    """Checkpoints: list, verify, find the newest, delete old ones.

    Each file, and each directory of shards, directly in PATH is one. PATH is in a mount, or (but for prune) a URL of a
    place in a lake: s3://bucket/prefix/ckpt or file:///lake/ckpt.
    """


@checkpoint.command("ls", context_settings={"show_default": True})
@click.argument("path")
@which_options
@store_options
@_lake_option
@_json_option
def list_checkpoints(path: str, marker: str | None, match: str | None, lake: str | None, as_json: bool,
                     **options: Unpack[StoreOptions]) -> int:  # fmt: skip
    """List the checkpoints of PATH, newest first, complete or not, and why not.

    Incomplete is what has a temporary name (.tmp, .partial, .incomplete at its end; ., tmp, _tmp at its beginning), a
    directory without the marker, what has no files, and what is not all in the store yet.
    """
    if "://" in path:
        args = CheckpointArgs(action="ls", url=path, marker=marker, match=match)
        return run_offline("checkpoint", find_place(path, options, lake), args, as_json=as_json)
    listing = _look(path, marker, match, lake, options)
    if as_json:
        _print_json(listing)
    else:
        _print_table(listing)
    return 0


@checkpoint.command("latest")
@click.argument("path")
@which_options
@store_options
@_lake_option
@_json_option
def latest(path: str, marker: str | None, match: str | None, lake: str | None, as_json: bool,
           **options: Unpack[StoreOptions]) -> int:  # fmt: skip
    """Print the path of the newest complete checkpoint of PATH; exit code 1 where there is none.

    The newest has the highest step where the names of all (but temporary ones) have a number after `step` or `iter`, or
    differ in their numbers only; else it is the one written last.
    """
    if "://" in path:
        args = CheckpointArgs(action="latest", url=path, marker=marker, match=match)
        return run_offline("checkpoint", find_place(path, options, lake), args, as_json=as_json)
    listing = _look(path, marker, match, lake, options)
    found = listing.find(listing.latest) if listing.latest is not None else None
    if found is None:
        raise LakeError(f"{path} has no complete checkpoint ({len(listing.checkpoints)} incomplete)")
    if as_json:
        _print_json(found)
    else:
        click.echo(found.path)
    return 0


@checkpoint.command("verify")
@click.argument("path")
@click.argument("names", nargs=-1, metavar="[NAME]…")
@which_options
@store_options
@_lake_option
@_json_option
def verify(path: str, names: tuple[str, ...], marker: str | None, match: str | None, lake: str | None, as_json: bool,
           **options: Unpack[StoreOptions]) -> int:  # fmt: skip
    """Read every byte of checkpoints in PATH from the object store, not from a cache, and check sizes and sums.

    Without NAMEs all complete ones. Checked are, of each file as far as it has them: the size; the ETag, where it is an
    MD5 or that of the parts; the CRC-32 in a pack; the CRC-32s in a ZIP (what torch.save writes); the header of a
    .safetensors file; a SHA256SUMS file in the same directory; shards that an index.json names. Exit code 1 where
    anything is bad.
    """
    md5_etags: bool | None = None
    seen: tuple[str, ...] = ()
    if "://" not in path:
        listing = _look(path, marker, match, lake, options)
        seen = tuple(item.name for item in listing.checkpoints if item.where != "store")
        with open_daemon(locate(path)[0]) as client:
            capabilities = client.statistics().get("capabilities")
        md5_etags = bool(capabilities.get("md5_etags")) if isinstance(capabilities, dict) else None
    args = VerifyArgs(names=names, marker=marker, match=match, url=path, md5_etags=md5_etags, not_stored=seen)
    return run_offline("checkpoint-verify", find_place(path, options, lake), args, as_json=as_json)


@checkpoint.command("prune", context_settings={"show_default": True})
@click.argument("path")
@which_options
@click.option("--keep", type=click.IntRange(1), metavar="N", help="Keep the N newest complete ones.")
@click.option("--older-than", type=DURATION, help="Delete only what is older.")
@click.option("--incomplete", is_flag=True, help="Also incomplete ones, if older than the newest complete one.")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and change nothing.")
@_json_option
def prune(path: str, marker: str | None, match: str | None, keep: int | None, older_than: float | None,
          incomplete: bool, dry_run: bool, as_json: bool) -> int:  # fmt: skip
    """Delete old checkpoints of PATH, a directory in a mount.

    The newest complete one is never deleted, nor anything that is not all in the store yet, nor what a symbolic link
    in PATH leads to. What has no number in its name (best.pt, config) is left alone, unless --match names it. With both
    --keep and --older-than only what both allow is deleted.
    """
    if keep is None and older_than is None:
        raise click.UsageError("say what may go: --keep N, --older-than DURATION, or both")
    if "://" in path:
        raise ConfigError(f"{path}: checkpoints are deleted through a mount; give a path in one")
    listing = _look(path, marker, match, None, {})
    pruning = Pruning(keep=keep, older_than_s=older_than, incomplete=incomplete, any_name=match is not None)
    chosen = choose(listing, pruning)
    failed = {} if dry_run else _delete_all(listing.path, chosen)
    gone = [item for item in chosen if item.name not in failed]
    if as_json:
        _print_json(_Pruned(
            path=listing.path, latest=listing.latest, dry_run=dry_run, deleted=gone,
            kept=[item.name for item in listing.checkpoints if item not in gone],
            bytes=sum(item.bytes for item in gone), failed=failed,
        ))  # fmt: skip
    else:
        for item in gone:
            click.echo(f"{'would delete' if dry_run else 'deleted'} {item.path} ({format_bytes(item.bytes)})")
        if not gone:
            click.echo("nothing to delete")
    for name, why in failed.items():
        click.echo(f"lakefs-fuse: {name} could not be deleted: {why}", err=True)
    return 1 if failed else 0


class _Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """As ``prune --json`` prints it; ``failed`` has why, by name."""

    path: str
    latest: str | None
    dry_run: bool
    deleted: list[Checkpoint]
    kept: list[str]
    bytes: int
    failed: dict[str, str]


def _delete_all(directory: str, chosen: list[Checkpoint]) -> dict[str, str]:
    """What could not be deleted, with why."""
    failed: dict[str, str] = {}
    console = Console(stderr=True)
    for item in track(chosen, "deleting", console=console, transient=True, disable=not console.is_terminal):
        try:
            delete(directory, item)
        except OSError as error:
            failed[item.name] = error.strerror or str(error)
    return failed


def _look(path: str, marker: str | None, match: str | None, lake: str | None, options: object) -> Listing:
    """What a mount shows. Raises LakeError where ``path`` is not a directory in one."""
    named = (lake and "--lake") or any_given(options if isinstance(options, dict) else {})
    if named:
        raise ConfigError(f"{named} goes with a source URL; {path} is a path, whose mount knows its store")
    locate(path)
    absolute = os.path.abspath(path)
    if not is_directory(absolute):
        raise LakeError(f"{path} is not a directory: give the one that holds the checkpoints")
    return find_checkpoints(absolute, marker=marker, match=match)


def _print_json(value: object) -> None:
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


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
        table.add_row(
            item.name + ("/" if item.kind == "directory" else ""),
            "" if item.step is None else str(item.step),
            f"{item.files:,}",
            format_bytes(item.bytes),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.mtime)) if item.mtime else "",
            format_duration(item.age_s) if item.mtime else "",
            ("yes, newest" if item.name == listing.latest else "yes") if item.complete else f"no: {item.reason}",
        )
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table, markup=False)
