"""The `mount.lakefs` program: what mount(8) runs for ``mount -t lakefs SOURCE MOUNTPOINT`` and for /etc/fstab.

mount(8) looks for it in /sbin only: `ln -s "$(command -v mount.lakefs)" /sbin/mount.lakefs` installs it. It calls
``mount.lakefs SOURCE MOUNTPOINT [-sfnv] [-N namespace] [-t type] [-o options]`` and expects exit codes like its own.
"""

from __future__ import annotations

import getopt
import sys
from collections.abc import Sequence

import click

from lakefs_fuse.cli import answer_errors, open_standard_streams, run
from lakefs_fuse.cli.mount import config_of, mount
from lakefs_fuse.cli.mount_options import known_only
from lakefs_fuse.errors import EXIT_USAGE

USAGE = "usage: mount.lakefs SOURCE MOUNTPOINT [-sfnv] [-o options]   (lakefs-fuse mount --help lists them)"

EXIT_MOUNT_USAGE, EXIT_MOUNT_INTERRUPTED, EXIT_MOUNT_FAILED = 1, 8, 32
"""Of mount(8)."""
_CODES = {0: 0, EXIT_USAGE: EXIT_MOUNT_USAGE}
_SIGNAL_CODE_MIN = 128
"""Codes from here on stand for signals, as in a shell."""


def helper(args: Sequence[str]) -> int:
    """Mount as mount(8) requests, and return an exit code of mount(8)."""
    try:
        # As mount(8) does, options may follow the two operands.
        given, operands = getopt.gnu_getopt(list(args), "sfnvhN:t:o:")
    except getopt.GetoptError as error:
        return _usage(f"mount.lakefs: {error}")
    options = dict(given)
    if "-h" in options:
        click.echo(USAGE)
        return 0
    if len(operands) != 2:
        return _usage(USAGE)
    if "-N" in options:
        return _usage("mount.lakefs: mounting in another namespace is not supported: use nsenter(1)")
    text = ",".join(value for name, value in given if name == "-o")
    if "-s" in options:
        text = known_only(text, mount.flags())
    source, mountpoint = operands
    arguments = [*(["-o", text] if text else []), "--", source, mountpoint]
    if "-v" in options:
        click.echo(f"mount.lakefs: {source} on {mountpoint}" + (f" ({text})" if text else ""))
    code = answer_errors(lambda: config_of(arguments)) if "-f" in options else run(["mount", *arguments])
    return _CODES.get(code, EXIT_MOUNT_INTERRUPTED if code >= _SIGNAL_CODE_MIN else EXIT_MOUNT_FAILED)


def _usage(message: str) -> int:
    click.echo(message, err=True)
    return EXIT_MOUNT_USAGE


def main() -> None:
    """The `mount.lakefs` program."""
    open_standard_streams()
    sys.exit(helper(sys.argv[1:]))
