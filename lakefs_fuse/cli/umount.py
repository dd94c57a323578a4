"""`lakefs-fuse umount`: everything durable first, then the mount goes, then the daemon ends.

The order is what keeps a failed upload from costing anything: while the mount is there the user can still look, free
space, fix credentials and try again. What cannot be made durable stays in the cache directory's staging whatever
happens here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import click
from rich.console import Console

from lakefs_fuse.cli.daemons import connect_to_owner, describe_files, follow, wait_exit
from lakefs_fuse.cli.mountinfo import Mount, is_dead, mount_at
from lakefs_fuse.cli.parameters import DURATION
from lakefs_fuse.control import protocol
from lakefs_fuse.control.client import ControlClient
from lakefs_fuse.control.runtime import client_socket_paths, real_mountpoint
from lakefs_fuse.errors import LakeError

DETACH_S_MAX = 30.0
"""How long umount(8) or fusermount3 may take."""
LAZY_WAIT_S_MAX = 2.0
"""A lazily detached mount ends when its last file is closed, which may be never: not waited for any longer."""

EXIT_S_MIN = 5.0
"""A daemon that has drained may take this long to close its database, whatever --timeout says."""


@click.command("umount")
@click.argument("mountpoint", type=click.Path())
@click.option("--lazy", is_flag=True, help="Detach even if the mount is in use or bytes cannot be stored now; such "
              "bytes stay in the cache directory and are listed at the next mount.")  # fmt: skip
@click.option("--timeout", type=DURATION, default="1h", show_default=True, help="How long uploads may take in all.")
def umount(mountpoint: str, lazy: bool, timeout: float) -> None:
    """Unmount MOUNTPOINT after everything written to it is in the store.

    Clears away a mount whose daemon died, too.
    """
    point = real_mountpoint(mountpoint)
    mounted = mount_at(point)
    deadline_s = time.monotonic() + timeout
    client = connect_to_owner(point, mounted)
    if client is None:
        clear_dead_mount(point, mounted, lazy=lazy)
        return
    console = Console(stderr=True)
    pidfd = os.pidfd_open(client.pid)
    try:
        with client:
            problem = make_durable(client, point, console, deadline_s)
            if problem and not lazy:
                raise LakeError(f"{problem}; {point} stays mounted (--lazy detaches it and keeps the bytes in staging)")
            if problem:
                click.echo(f"lakefs-fuse: {problem}; the bytes stay in staging", err=True)
            if lazy:
                detach(point, lazy=True)
                report_lazy_end(client.pid, pidfd, point)
                return
            # Asked for before the mount goes, so that the daemon cannot end without our hearing how.
            ending = client.follow(protocol.WaitEnd())
            if mounted is not None:
                detach(point, lazy=False)
            wait_end(ending, console, deadline_s)
            if not wait_exit(pidfd, max(EXIT_S_MIN, deadline_s - time.monotonic())):
                raise LakeError(f"{point} is unmounted, but its daemon (pid {client.pid}) does not end: see its log")
    finally:
        os.close(pidfd)


def make_durable(client: ControlClient, point: str, console: Console, deadline_s: float) -> str:
    """What went wrong, or nothing; the files that are not durable are printed."""
    try:
        reply = follow(client.follow(protocol.MakeDurable()), console, what=f"storing {point}", deadline_s=deadline_s)
    except LakeError as error:
        return str(error)
    if not isinstance(reply, protocol.Failed):
        return ""
    click.echo("\n".join(["lakefs-fuse: not in the store yet:", *describe_files(reply.files)]), err=True)
    return reply.message


def wait_end(ending: Iterator[protocol.Reply], console: Console, deadline_s: float) -> None:
    """Until the daemon has drained. Raises LakeError where it could not store something."""
    reply = follow(ending, console, what="finishing", deadline_s=deadline_s)
    if isinstance(reply, protocol.Failed):
        raise LakeError("\n".join([f"{reply.message}; the bytes stay in staging:", *describe_files(reply.files)]))


def report_lazy_end(pid: int, pidfd: int, point: str) -> None:
    """Say so where the daemon of a lazily detached mount goes on."""
    if not wait_exit(pidfd, LAZY_WAIT_S_MAX):
        click.echo(f"lakefs-fuse: {point} is detached; its daemon (pid {pid}) ends when it is idle", err=True)


def clear_dead_mount(point: str, mounted: Mount | None, *, lazy: bool) -> None:
    """Remove what a dead daemon left mounted. Raises LakeError for a mount that is not one of those."""
    if mounted is None:
        raise LakeError(f"nothing is mounted at {point}")
    if not mounted.is_fuse or not is_dead(point):
        raise LakeError(f"{point} is a mount of something else ({mounted.source}, {mounted.fstype}): use umount(8)")
    # Nothing can be lost any more by detaching: nobody serves the files that are still open.
    detach(point, lazy=True)
    for socket in client_socket_paths(point, mounted.owner):
        socket.unlink(missing_ok=True)
    click.echo(
        f"lakefs-fuse: the daemon of {point} had died; the mount is cleared away. "
        "Bytes that were not in the store yet are in the cache directory: the next mount lists them",
        err=True,
    )


def detach(point: str, *, lazy: bool) -> None:
    """Take the mount out of the tree. Raises LakeError, in particular where it is in use."""
    if os.geteuid() == 0 and shutil.which("umount"):
        command = ["umount", *(["-l"] if lazy else []), point]
    else:
        command = ["fusermount3", "-u", *(["-z"] if lazy else []), point]
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=DETACH_S_MAX,
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
    except FileNotFoundError as error:
        raise LakeError(f"{command[0]} is missing: install the package fuse3") from error
    except subprocess.TimeoutExpired as error:
        raise LakeError(f"`{' '.join(command)}` hangs: see the daemon's log; --lazy detaches the mount") from error
    if result.returncode == 0:
        return
    said = " ".join(result.stderr.split())
    if "busy" in said.lower():
        raise LakeError(
            f"{point} is in use: close its files and leave its directories (`fuser -vm {point}` shows who), or --lazy"
        )
    raise LakeError(f"`{' '.join(command)}` failed: {said}")
