"""`lakefs-fuse umount`: everything durable first, then the mount goes, then the daemon ends.

The order is what keeps a failed upload from costing anything: while the mount is there the user can still look, free
space, fix credentials and try again. What cannot be made durable stays in the cache directory's staging whatever
happens here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack

import click

from lakefs_fuse.cli.daemons import connect_to_owner, describe_files, follow, owner_of, wait_exit
from lakefs_fuse.cli.parameters import DURATION
from lakefs_fuse.control import protocol
from lakefs_fuse.control.client import ControlClient
from lakefs_fuse.control.mounts import Mount, detach, is_dead, mount_at
from lakefs_fuse.control.runtime import client_socket_paths, real_mountpoint
from lakefs_fuse.control.supervision import Supervisor, supervisor_of
from lakefs_fuse.errors import LakeError

LAZY_WAIT_S_MAX = 2.0
"""A lazily detached mount ends when its last file is closed, which may be never: not waited for any longer."""

EXIT_S_MIN = 5.0
"""A daemon that has drained may take this long to close its database, whatever --timeout says."""

NEXT_LIFE_S_MAX = 15.0
"""How long a daemon that died is waited for: only a daemon can store what it had accepted."""
NEXT_LIFE_CHECK_S = 0.1
SUPERVISOR_S_MAX = 20.0
"""A supervisor gives a daemon that does not serve yet less than this to end."""


@click.command("umount")
@click.argument("mountpoint", type=click.Path())
@click.option("--lazy", is_flag=True, help="Detach even if the mount is in use or bytes cannot be stored now; such "
              "bytes stay in the cache directory and are listed at the next mount.")  # fmt: skip
@click.option("--timeout", type=DURATION, default="1h", show_default=True, help="How long uploads may take in all.")
def umount(mountpoint: str, lazy: bool, timeout: float) -> None:
    """Unmount MOUNTPOINT after everything written to it is in the store.

    Clears away a mount whose daemon died, too. One that is being started again is waited for; if it does not come, the
    mount goes without it, with exit code 1.
    """
    point = real_mountpoint(mountpoint)
    mounted = mount_at(point)
    deadline_s = time.monotonic() + timeout
    client = connect_to_owner(point, mounted) if lazy else connect_serving(point, mounted)
    with ExitStack() as stack:
        supervisor = supervisor_of(point, owner_of(mounted))
        if supervisor is not None:
            stack.callback(supervisor.close)
        if client is None and supervisor is not None:
            client = None if lazy else wait_next_life(point, mounted, supervisor, deadline_s)
            mounted = mount_at(point)
            if client is None:
                end_between_lives(point, supervisor, lazy=lazy)
                return
        if client is None:
            clear_dead_mount(point, mounted)
            return
        stack.enter_context(client)
        if unmount_served(client, point, mounted, lazy=lazy, deadline_s=deadline_s) and supervisor is not None:
            supervisor.wait(EXIT_S_MIN)


def unmount_served(client: ControlClient, point: str, mounted: Mount | None, *, lazy: bool, deadline_s: float) -> bool:
    """Whether the daemon has ended; it may go on for a while with --lazy."""
    pidfd = os.pidfd_open(client.pid)
    try:
        problem = make_durable(client, point, deadline_s)
        if problem and not lazy:
            raise LakeError(f"{problem}; {point} stays mounted (--lazy detaches it and keeps the bytes in staging)")
        if problem:
            click.echo(f"lakefs-fuse: {problem}; the bytes stay in staging", err=True)
        if lazy:
            detach(point, lazy=True)
            return report_lazy_end(client.pid, pidfd, point)
        # Asked for before the mount goes, so that the daemon cannot end without our hearing how.
        ending = client.follow(protocol.WaitEnd())
        if mounted is not None:
            detach(point, lazy=False)
        wait_end(ending, deadline_s)
        if not wait_exit(pidfd, max(EXIT_S_MIN, deadline_s - time.monotonic())):
            raise LakeError(f"{point} is unmounted, but its daemon (pid {client.pid}) does not end: see its log")
        return True
    finally:
        os.close(pidfd)


def wait_next_life(
    point: str, mounted: Mount | None, supervisor: Supervisor, deadline_s: float
) -> ControlClient | None:
    """A connection to the daemon that is being started again, if that works soon."""
    until_s = min(deadline_s, time.monotonic() + NEXT_LIFE_S_MAX)
    while time.monotonic() < until_s and not supervisor.wait(NEXT_LIFE_CHECK_S):
        client = connect_serving(point, mounted)
        if client is not None:
            return client
    return None


def connect_serving(point: str, mounted: Mount | None) -> ControlClient | None:
    """As `connect_to_owner`, but not to a daemon that has not mounted yet: there is nothing of its own to unmount."""
    client = connect_to_owner(point, mounted)
    if client is None:
        return None
    with client:
        try:
            if client.hello().starting:
                return None
        except LakeError:
            pass  # It died just now, or hangs: what is asked of it next will tell.
    return connect_to_owner(point, mounted)


def end_between_lives(point: str, supervisor: Supervisor, *, lazy: bool) -> None:
    """Unmount where no daemon runs, and none is to come. Raises LakeError: nobody knows what is stored."""
    supervisor.stop()
    if not supervisor.wait(SUPERVISOR_S_MAX):
        raise LakeError(f"the supervisor of {point} (pid {supervisor.pid}) does not end: see its log")
    mounted = mount_at(point)
    if mounted is not None and mounted.is_fuse and is_dead(point):
        detach(point, lazy=True)
    message = (
        f"{point} is unmounted, but its daemon had died and could not be started again: bytes that were not in the "
        "store yet are in the cache directory, for the next mount"
    )
    if not lazy:
        raise LakeError(message)
    click.echo(f"lakefs-fuse: {message}", err=True)


def make_durable(client: ControlClient, point: str, deadline_s: float) -> str:
    """What went wrong, or nothing; the files that are not durable are printed."""
    try:
        reply = follow(client.follow(protocol.MakeDurable()), what=f"storing {point}", deadline_s=deadline_s)
    except LakeError as error:
        return str(error)
    if not isinstance(reply, protocol.Failed):
        return ""
    click.echo("\n".join(["lakefs-fuse: not in the store yet:", *describe_files(reply.files)]), err=True)
    return reply.message


def wait_end(ending: Iterator[protocol.Reply], deadline_s: float) -> None:
    """Until the daemon has drained. Raises LakeError where it could not store something."""
    reply = follow(ending, what="finishing", deadline_s=deadline_s)
    if isinstance(reply, protocol.Failed):
        raise LakeError("\n".join([f"{reply.message}; the bytes stay in staging:", *describe_files(reply.files)]))


def report_lazy_end(pid: int, pidfd: int, point: str) -> bool:
    """Whether the daemon of a lazily detached mount has ended; if it goes on, that is said."""
    if wait_exit(pidfd, LAZY_WAIT_S_MAX):
        return True
    click.echo(f"lakefs-fuse: {point} is detached; its daemon (pid {pid}) ends when it is idle", err=True)
    return False


def clear_dead_mount(point: str, mounted: Mount | None) -> None:
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
