"""The command line: `main` is the entry point, and `MODULES` maps each command to its module.

Commands ask daemons over the control socket, and work on a lake beside its mounts in a child process (`worker`). An
error is one line on standard error that says what to do, and the exit code of its kind (errors.py): 2 for wrong
arguments, 1 for a failure. *Light start*: no command loads a library that only another one needs
(`tests/cli/test_loading.py`), and none loads the filesystem (`tests/test_layers.py`).
"""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import click

from lakefs_fuse.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_USAGE, LakeError
from lakefs_fuse.product import PROGRAM

MODULES = {
    "cache": "cache",
    "checkpoint": "checkpoint",
    "clone": "daemon_commands",
    "dataset": "dataset",
    "doctor": "doctor",
    "flush": "daemon_commands",
    "fsck": "lake_commands",
    "gc": "lake_commands",
    "ingest": "lake_commands",
    "log": "log",
    "metrics": "metrics",
    "mount": "mount",
    "orphans": "daemon_commands",
    "pack": "lake_commands",
    "refresh": "daemon_commands",
    "relocate": "lake_commands",
    "snapshot": "lake_commands",
    "stats": "stats",
    "umount": "umount",
    "unpack": "lake_commands",
    "upgrade": "lake_commands",
    "wait": "daemon_commands",
}
"""The module that defines each command, under the name of the command."""
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


_NO_ARGUMENTS: type[click.UsageError] | tuple[()] = getattr(click.exceptions, "NoArgsIsHelpError", ())
"""A group without a command, since click 8.2: its message is the help. Earlier versions print that themselves."""


class Commands(click.Group):
    """The group of all commands, each loaded when it is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in MODULES:
            return None
        command = getattr(importlib.import_module(f"{__name__}.{MODULES[cmd_name]}"), cmd_name)
        assert isinstance(command, click.Command)
        return command


def _print_version(context: click.Context, option: click.Parameter, given: bool) -> None:
    from lakefs_fuse.cli.version import print_version

    print_version(context, option, given)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version,
    help="Show the versions of the program and of what it runs on, and exit.",
)  # fmt: skip
def commands() -> None:
    """Mount a data lake in an S3-compatible object store as a directory."""


def run(args: Sequence[str] | None = None) -> int:
    """Run one command, print its error, and return its exit code."""
    given = None if args is None else list(args)
    return answer_errors(lambda: commands.main(args=given, prog_name=PROGRAM, standalone_mode=False))


def answer_errors(call: Callable[[], object]) -> int:
    """The exit code of ``call``: the number that it returns, or that of its error, which is printed."""
    try:
        code = call()
    except LakeError as error:
        return _fail(str(error), error.exit_code)
    except click.UsageError as error:
        if isinstance(error, _NO_ARGUMENTS):
            click.echo(error.format_message(), err=True)
            return EXIT_USAGE
        path = error.ctx.command_path if error.ctx is not None else PROGRAM
        return _fail(f"{error.format_message().removesuffix('.')} (see `{path} --help`)", EXIT_USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader closed the pipe, as in `stats | head`.
        sys.stderr.close()
        return EXIT_FAILURE
    except OSError as error:
        if error.errno not in _DISK_FULL or error.filename is not None:
            raise
        with suppress(OSError):
            sys.stdout.close()  # or writing the rest of the buffer would fail again at exit
        return _fail(f"the output cannot be written: {error.strerror}", EXIT_FAILURE)
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    from lakefs_fuse.cli.terminal import printable

    # Names in it are those that any client of the lake chose.
    click.echo(f"{PROGRAM}: {printable(message)}", err=True)
    return code


def open_standard_streams() -> None:
    """Open /dev/null where the caller closed standard input, output or error: otherwise a file that is opened later
    gets its number, and commands and their children read it, or write into it."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", closefd=False))


def main() -> None:
    """The `lakefs-fuse` program."""
    open_standard_streams()
    sys.exit(run())
