"""`lakefs-fuse flush` and `lakefs-fuse orphans`: what is not in the store yet, and what becomes of it."""

from __future__ import annotations

import sys
import time

import click

from lakefs_fuse.cli.daemons import describe_files, follow, locate, open_daemon
from lakefs_fuse.cli.parameters import DURATION, format_bytes, format_duration
from lakefs_fuse.control import protocol
from lakefs_fuse.control.client import ControlClient
from lakefs_fuse.errors import LakeError

ID_CHARACTERS = 32
PIPE_WIDTH = 200


@click.command("flush")
@click.argument("path", type=click.Path())
@click.option("--timeout", type=DURATION, default="1h", show_default=True, help="How long to wait.")
def flush(path: str, timeout: float) -> None:
    """Wait until PATH, a file or directory inside a mount, is in the store; failed uploads are tried again."""
    mountpoint, relative = locate(path)
    with open_daemon(mountpoint) as client:
        reply = follow(
            client.follow(protocol.MakeDurable(relative)),
            what=f"storing {path}",
            deadline_s=time.monotonic() + timeout,
        )
    if isinstance(reply, protocol.Failed):
        raise LakeError("\n".join([reply.message, *describe_files(reply.files)]))


@click.command("orphans")
@click.argument("mountpoint", type=click.Path())
@click.option("--finish", "finish_ids", metavar="ID", multiple=True, help="Put this one in the store as it is.")
@click.option("--abort", "abort_ids", metavar="ID", multiple=True, help="Drop this one, its bytes and its upload.")
@click.option("--incomplete", is_flag=True, help="Finish those as well of which writes had failed, without what is "
              "missing.")  # fmt: skip
@click.option("--all", "all_of_them", type=click.Choice(["finish", "abort"]), help="The same for every one.")
def orphans(
    mountpoint: str, finish_ids: tuple[str, ...], abort_ids: tuple[str, ...], all_of_them: str | None, incomplete: bool
) -> None:
    """List files of MOUNTPOINT that a dead daemon left unfinished or whose writes failed, or finish or abort them."""
    both = set(finish_ids) & set(abort_ids)
    if both or (all_of_them and (finish_ids or abort_ids)):
        raise click.UsageError("each orphan can be finished or aborted, not both; --all stands alone")
    with open_daemon(mountpoint) as client:
        if all_of_them:
            ids = tuple(file.id for file in _orphans(client))
            finish_ids, abort_ids = (ids, ()) if all_of_them == "finish" else ((), ids)
        elif not finish_ids and not abort_ids:
            _print_orphans(_orphans(client))
            return
        requests: list[protocol.Request] = [protocol.FinishOrphan(id, incomplete) for id in finish_ids]
        requests += [protocol.AbortOrphan(id) for id in abort_ids]
        failures = _resolve(client, requests)
    if failures:
        raise LakeError("\n".join(failures))


def _orphans(client: ControlClient) -> list[protocol.UnfinishedFile]:
    return [file for file in client.unfinished().files if file.state == "orphan"]


def _resolve(client: ControlClient, requests: list[protocol.Request]) -> list[str]:
    """Ask for each, whatever became of the one before; the failures, one line each."""
    failures = []
    for request in requests:
        try:
            client.call(request)
        except LakeError as error:
            failures.append(str(error))
    return failures


def _print_orphans(files: list[protocol.UnfinishedFile]) -> None:
    if not files:
        click.echo("no orphans")
        return
    from rich.console import Console
    from rich.table import Column, Table

    # An id is there to be copied, so it is never cut; a narrow terminal folds the rest.
    table = Table(Column("id", no_wrap=True, min_width=ID_CHARACTERS), Column("path", overflow="fold"), box=None)
    for name in ("bytes", "in the store", "age", "error"):
        table.add_column(name, overflow="fold")
    for file in files:
        table.add_row(
            file.id,
            file.path,
            format_bytes(file.bytes),
            format_bytes(file.bytes_done),
            format_duration(file.age_s),
            file.error,
        )
    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(table)
