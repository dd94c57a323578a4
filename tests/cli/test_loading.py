"""What a command loads: who asks in a loop waits for little else."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from lakefs_fuse.cli import MODULES, commands

HEAVY = {"rich", "boto3", "botocore", "obstore", "rocksdict", "trio", "pyfuse3"}


def loaded(program: str, *arguments: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{program}\nprint(*sys.modules)", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("name", MODULES)
def test_every_command_is_there_under_its_name(name: str) -> None:
    command = commands.get_command(click.Context(commands), name)
    assert command is not None
    assert command.name == name


def test_they_are_listed_in_order() -> None:
    assert commands.list_commands(click.Context(commands)) == sorted(MODULES)


@pytest.mark.parametrize("module", ["mount", "umount", "stats", "cache", "daemon_commands", "lake_commands"])
def test_a_command_loads_nothing_heavy(module: str) -> None:
    assert loaded(f"import lakefs_fuse.cli.{module}") & HEAVY == set()


def test_the_program_loads_no_command_that_was_not_asked_for() -> None:
    modules = loaded("from lakefs_fuse.cli import run\nrun(['--version'])")
    assert {name for name in modules if name.startswith("lakefs_fuse.cli.")} == {"lakefs_fuse.cli.version"}


def test_a_directory_as_the_store_loads_no_s3(tmp_path: Path) -> None:
    opening = """
from lakefs_fuse.daemon import mount_daemon as daemon
from lakefs_fuse.daemon import lake_opener as lake
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.environment.node import Node
from lakefs_fuse.store.open import open_store
open_store(StoreConfig(source=Source.parse('file://' + sys.argv[1])), Node.of_this_machine()).close()
"""
    modules = loaded(opening, str(tmp_path))
    assert modules & {"boto3", "botocore", "obstore"} == set()


def each_command() -> Iterator[click.Command]:
    for name in MODULES:
        command = commands.get_command(click.Context(commands), name)
        assert command is not None
        yield from command.commands.values() if isinstance(command, click.Group) else [command]


@pytest.mark.parametrize("command", list(each_command()), ids=lambda command: str(command.name))
def test_help_of_a_command_describes_each_parameter_once(command: click.Command) -> None:
    context = click.Context(command, info_name=command.name, terminal_width=200)
    text = command.get_help(context)
    for param in command.params:
        name = param.opts[0] if isinstance(param, click.Option) else param.human_readable_name
        assert getattr(param, "help", None), name
        assert len(re.findall(rf"^  {re.escape(name)}(?![\w-])", text, re.MULTILINE)) == 1, name
    assert text.count("--help") == 1
    if command.params and isinstance(command.params[0], click.Argument):
        assert "Arguments:" in text


def test_help_of_mount_is_in_groups() -> None:
    command = commands.get_command(click.Context(commands), "mount")
    assert command is not None
    headings = re.findall(r"^(\w[\w ]+):$", command.get_help(click.Context(command)), re.MULTILINE)
    kinds = ["Source", "Cache", "Durability", "Sharing", "Diagnostics"]
    assert headings == ["Arguments", "Options", *(f"{kind} options" for kind in kinds)]
