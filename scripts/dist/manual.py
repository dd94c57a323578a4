"""Manual pages for man(1), one for each command, made from its help."""

from __future__ import annotations

import inspect
from pathlib import Path

import click

from lakefs_fuse.cli import MODULES, commands
from lakefs_fuse.cli.help import Argument

HELPER_PAGE = ".so man1/lakefs-fuse-mount.1\n"
"""mount.lakefs takes the options of `lakefs-fuse mount`."""


def write_manual(directory: Path, version: str) -> None:
    """Write the pages of this working tree into ``man1`` and ``man8`` of a directory. Once in a process: commands keep
    what is added to their help."""
    from click_man.core import write_man_pages  # of the extra `dist`, which tests of the rest do without

    for section in ("man1", "man8"):
        (directory / section).mkdir(parents=True)
    # click-man finds no command that is loaded when it is used.
    loaded = {name: commands.get_command(click.Context(commands), name) for name in MODULES}
    for command in loaded.values():
        add_arguments(command)
    program = click.Group(
        "lakefs-fuse", {name: command for name, command in loaded.items() if command is not None},
        help=commands.help, params=commands.params,
    )  # fmt: skip
    write_man_pages("lakefs-fuse", program, version=version, target_dir=str(directory / "man1"))
    (directory / "man8" / "mount.lakefs.8").write_text(HELPER_PAGE)


def add_arguments(command: click.Command | None) -> None:
    """Put what arguments mean behind the description of a command, as click-man leaves that out."""
    if isinstance(command, click.Group):
        for each in command.commands.values():
            add_arguments(each)
    elif command is not None:
        told = [f"{param.human_readable_name}: {param.help}" for param in command.params if isinstance(param, Argument)]
        command.help = "\n\n".join([inspect.cleandoc(command.help or ""), *told])
