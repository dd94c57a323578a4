"""What commands print: JSON and tables on standard output, a progress bar on standard error where that is a terminal.

rich is loaded only where it is needed, because loading it takes as long as the rest of most commands.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click
import msgspec

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.progress import Progress
    from rich.text import Text

PIPE_WIDTH = 200
"""Characters of a line where standard output is no terminal: a pipe gets whole lines."""


def print_json(value: object) -> None:
    """Print ``value`` as indented JSON."""
    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def print_tables(tables: RenderableType) -> None:
    """Print what rich renders, without cutting lines for a pipe."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(tables)


def escaped(text: str) -> str:
    """``text`` with every character that a terminal might obey, or not show, and the backslash as an escape."""
    return "".join(
        each if each.isprintable() and each != "\\" else each.encode("unicode_escape").decode("ascii") for each in text
    )


def printable(message: str) -> str:
    """As `escaped`, for lines that contain `escaped` parts: line ends and backslashes stay."""
    return "".join(each if each in "\n\\" else escaped(each) for each in message)


def print_text(text: str) -> None:
    """Print lines, `escaped`."""
    click.echo("\n".join(map(escaped, text.split("\n"))))


def print_path(path: str) -> None:
    """Print a path as it is, for scripts; on a terminal `escaped`."""
    click.echo(escaped(path) if sys.stdout.isatty() else path)


def table_text(text: str) -> Text:
    """A cell with a text that others chose, such as a name in a lake: it is shown `escaped`, and has no markup."""
    from rich.text import Text

    return Text(escaped(text))


def is_watched() -> bool:
    """Whether standard error is a terminal."""
    return sys.stderr.isatty()


class Bar:
    """A progress bar without a terminal: it shows nothing, and prints notes, each as one line, `escaped`."""

    def update(self, what: str, done_bytes: int, total_bytes: int | None, files: str) -> None:
        pass

    def note(self, text: str) -> None:
        click.echo(escaped(text), err=True)


class _ShownBar(Bar):
    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("", total=None, visible=False, files="")

    def update(self, what: str, done_bytes: int, total_bytes: int | None, files: str) -> None:
        self._progress.update(
            self._task, description=what, completed=done_bytes, total=total_bytes, files=files, visible=True
        )

    def note(self, text: str) -> None:
        self._progress.console.print(escaped(text), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def progress_bar(*, remaining: bool = False) -> Iterator[Bar]:
    """A bar that appears with its first update and disappears at the end, with the time since then, or that is left."""
    if not is_watched():
        yield Bar()
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn("{task.fields[files]}", markup=False),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn() if remaining else TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        yield _ShownBar(progress)
