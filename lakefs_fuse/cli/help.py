"""Help texts: options in named groups, and arguments with a description, for click 8.0 and later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., object])

SETTINGS = {"show_default": True, "max_content_width": 100}
"""Context settings of every command: one width, defaults shown."""
OTHERS = "Options"
"""Heading of the options that have no group, ``--help`` among them."""


class Option(click.Option):
    """An option under a heading of its command's help."""

    def __init__(self, *args: Any, group: str = OTHERS, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group


class Argument(click.Argument):
    """An argument that the help of its command describes."""

    group = "Arguments"

    def __init__(self, param_decls: Sequence[str], *, help: str, **attributes: Any) -> None:
        super().__init__(param_decls, **attributes)
        self.help = help

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        return self.human_readable_name, self.help or ""


class GroupedCommand(click.Command):
    """A command whose help lists its parameters by group, in the order in which the groups are first used."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                groups.setdefault(getattr(param, "group", OTHERS), []).append(record)
        for heading, records in groups.items():
            with formatter.section(heading):
                formatter.write_dl(records)

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Nothing: click 8.5 lists arguments here, and `format_options` has listed them."""


def option(*names: str, group: str = OTHERS, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """As `click.option`, with the heading that it is listed under."""
    return click.option(*names, cls=Option, group=group, **attributes)


def argument(name: str, help: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """As `click.argument`, with a description. May decorate several commands, which click 8.0 does not allow."""

    def decorate(command: Decorated) -> Decorated:
        return click.argument(name, cls=Argument, help=help, **attributes)(command)

    return decorate
