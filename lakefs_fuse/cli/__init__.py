"""The command line. `main` is the entry point; every command is a module here.

Commands talk to daemons over the control socket only, and work on a lake beside its mounts in a child (`offline`). An
error is one line on standard error that says what to do, and the exit code of its kind (errors.py): 2 for what was
asked, 1 for what failed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import click

from lakefs_fuse import __version__
from lakefs_fuse.cli.checkpoint import checkpoint
from lakefs_fuse.cli.durability import flush, orphans
from lakefs_fuse.cli.fsck import fsck
from lakefs_fuse.cli.gc import gc
from lakefs_fuse.cli.ingest import ingest
from lakefs_fuse.cli.mount import mount
from lakefs_fuse.cli.pack import pack, unpack
from lakefs_fuse.cli.refresh import refresh
from lakefs_fuse.cli.snapshot import snapshot
from lakefs_fuse.cli.stats import stats
from lakefs_fuse.cli.umount import umount
from lakefs_fuse.errors import EXIT_FAILURE, EXIT_USAGE, LakeError

EXIT_INTERRUPTED = 130


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="lakefs-fuse")
def commands() -> None:
    """Mount a data lake in an S3-compatible object store as a directory."""


for _command in (mount, umount, stats, flush, refresh, orphans, checkpoint, ingest, pack, unpack, snapshot, gc, fsck):
    commands.add_command(_command)


def run(args: Sequence[str] | None = None) -> int:
    """Run one command and answer its exit code; errors are printed."""
    given = None if args is None else list(args)
    return answer_errors(lambda: commands.main(args=given, prog_name="lakefs-fuse", standalone_mode=False))


def answer_errors(call: Callable[[], object]) -> int:
    """The exit code of ``call``: what it answers if that is a number, or that of its error, which is printed."""
    try:
        code = call()
    except LakeError as error:
        return _fail(str(error), error.exit_code)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "lakefs-fuse"
        return _fail(f"{error.format_message()} (see `{path} --help`)", EXIT_USAGE)
    except click.ClickException as error:
        return _fail(error.format_message(), error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        return _fail("interrupted", EXIT_INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output has seen enough, as in `stats | head`.
        sys.stderr.close()
        return EXIT_FAILURE
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int) -> int:
    click.echo(f"lakefs-fuse: {message}", err=True)
    return code


def main() -> None:
    """The `lakefs-fuse` program."""
    sys.exit(run())
