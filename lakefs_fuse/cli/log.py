"""`lakefs-fuse log`: who changed what in a lake, and when, from its commits.

A child process (`worker.run_offline`) reads them; here its answers become lines, each as soon as it comes. Names are
those that any client of the lake chose, so in text every character that a terminal might obey is escaped.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

import click
import msgspec

from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.parameters import DURATION, Quantity, format_bytes
from lakefs_fuse.cli.store_options import PATH_HELP, lake_option, store_options
from lakefs_fuse.cli.terminal import escaped
from lakefs_fuse.cli.worker import find_place, run_offline
from lakefs_fuse.control.worker_protocol import LogArgs, LogEntry, LogStart, Row
from lakefs_fuse.errors import ConfigError

ALL = -1
REFRESH_S_MIN = 0.1
_COUNT_DIGITS_MAX = 9


def parse_count(text: str) -> int:
    """A number of lines, or ALL for ``all``. Raises ConfigError."""
    if text == "all":
        return ALL
    if not text.isdecimal() or not text.isascii():
        raise ConfigError(f"{text!r} is not a number of lines: expected for example 50, or all")
    if len(text) > _COUNT_DIGITS_MAX:
        raise ConfigError(f"more than {_COUNT_DIGITS_MAX} digits: expected for example 50, or all")
    return int(text)


@click.command("log", cls=GroupedCommand, context_settings=SETTINGS)
@argument("path", PATH_HELP + "  [default: the working directory]", default=".")
@option("-n", "--lines", "count", type=Quantity("count", parse_count), default="50",
        help="Show the last COUNT changes, or all.")  # fmt: skip
@option("-f", "--follow", is_flag=True, help="Continue with new changes until interrupted.")
@option("--refresh", type=DURATION, default="5s",
        help="Interval at which --follow polls for new commits, with one LIST each time.")  # fmt: skip
@option("--json", "as_json", is_flag=True, help="Print one JSON object a line, with stable names.")
@lake_option
@store_options
def log(path: str, count: int, follow: bool, refresh: float, as_json: bool, lake: str | None, **options: Any) -> int:
    """Show who changed what in a lake, and when, the newest change last.

    Each line has the local time, the writer (a mount or a command, by the id that `stats` shows as `commits.writer`),
    the operation, the size, and the name; for a rename from or to PATH, or of a directory above it, both names.

    The log is read from the commits in the bucket. Its first line shows the time from which it is complete: gc deletes
    earlier commits once an index contains their changes, except packs in use. A plain object that was put without a
    commit, by a mount or by another S3 client, is not in the log. Example:

    \b
      lakefs-fuse log /mnt/lake/datasets --follow
    """
    args = LogArgs(count=None if count == ALL else count, follow=follow, refresh_s=max(REFRESH_S_MIN, refresh))
    show_answer, is_without_entries = _show_json if as_json else _show_text, False

    def show(answer: Row) -> None:
        nonlocal is_without_entries
        is_without_entries = isinstance(answer, LogStart) and answer.since_ns > 0
        show_answer(answer)

    code = run_offline("log", find_place(path, options, lake), args, show=show)
    if is_without_entries and not as_json:
        click.echo(f"-- no change of {escaped(path)}")
    return code


def _show_text(answer: Row) -> None:
    if isinstance(answer, LogEntry):
        size = "" if answer.size is None else format_bytes(answer.size)
        click.echo(f"{local_time(answer.time_ns)}  {answer.writer}  {answer.operation:7}  {size:>9}  {_names(answer)}")
        return
    assert isinstance(answer, LogStart), "the others are answers of other commands"
    if not answer.since_ns:
        click.echo("-- no commits")
    elif answer.is_whole:
        click.echo(f"-- since {local_time(answer.since_ns)}, the first commit")
    else:
        click.echo(f"-- since {local_time(answer.since_ns)}; earlier commits were deleted, except packs in use")


def _names(entry: LogEntry) -> str:
    if entry.target:
        return f"{escaped(entry.path)} -> {escaped(entry.target)}"
    return f"{escaped(entry.source)} -> {escaped(entry.path)}" if entry.source else escaped(entry.path)


def _show_json(answer: Row) -> None:
    if isinstance(answer, LogEntry):
        found = {
            "time": local_time(answer.time_ns),
            "writer": answer.writer,
            "operation": answer.operation,
            "path": answer.path,
            "size": answer.size,
            "source": answer.source or None,
            "target": answer.target or None,
        }
    else:
        assert isinstance(answer, LogStart), "the others are answers of other commands"
        since = local_time(answer.since_ns) if answer.since_ns else None
        found = {"since": since, "whole": answer.is_whole}
    click.echo(msgspec.json.encode(found))


def local_time(time_ns: int) -> str:
    """A time in ns since 1970 as ISO 8601 has it, in the local time zone."""
    return datetime.fromtimestamp(time_ns // 1_000_000 / 1000).astimezone().isoformat(timespec="milliseconds")
