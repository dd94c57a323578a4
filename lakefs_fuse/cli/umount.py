"""`lakefs-fuse umount`: makes everything durable, then detaches the mount, then waits for the end of the daemon.

*Durable first*: the mount is not detached while bytes cannot be stored, so that the user can still read the files, free
space, fix credentials and try again. Bytes that cannot be stored stay in staging whatever happens here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import click

from lakefs_fuse.cli.daemons import connect_to_owner, describe_files, follow, not_mounted, owner_of, unreachable
from lakefs_fuse.cli.help import SETTINGS, GroupedCommand, argument, option
from lakefs_fuse.cli.parameters import DURATION, LocalPath
from lakefs_fuse.cli.terminal import printable
from lakefs_fuse.control import protocol
from lakefs_fuse.control.client import ControlClient
from lakefs_fuse.control.mounts import Mount, detach, is_dead, mount_at
from lakefs_fuse.control.runtime import client_socket_paths, real_mountpoint
from lakefs_fuse.control.supervision import Process, supervisor_of
from lakefs_fuse.errors import LakeError

TIMEOUT_S, LAZY_TIMEOUT_S = 3600.0, 10.0
LAZY_WAIT_S_MAX = 2.0
"""A lazily detached mount ends when its last file is closed, which may be never, so the wait is short."""

EXIT_S_MIN = 5.0
"""Time for a drained daemon to close its database, also after --timeout."""

NEXT_LIFE_S_MAX = 15.0
"""Time to wait for the restart of a daemon that died: only a daemon can store acknowledged files."""
NEXT_LIFE_CHECK_S = 0.1
SUPERVISOR_S_MAX = 20.0
"""Time for a supervisor to end: it kills a daemon that does not serve yet sooner than this."""


@click.command("umount", cls=GroupedCommand, context_settings=SETTINGS)
@argument("mountpoint", "The directory of the mount.", type=LocalPath(readable=False))
@option("--lazy", is_flag=True, help="Detach although the mount is in use or bytes cannot be stored. The bytes stay in "
        "the cache directory, and the next mount stores or lists them.")  # fmt: skip
@option("--timeout", type=DURATION, help="Maximum time for uploads; after it the mount stays, or is detached with "
        "--lazy. Raise it for slow networks.  [default: 1h; 10s with --lazy]")  # fmt: skip
def umount(mountpoint: str, lazy: bool, timeout: float | None) -> None:
    """Store everything, then unmount.

    If some files cannot be stored, they are printed with the reasons, and the mount stays. If the daemon died, the
    command waits up to 15 s for its restart, and else detaches the mount. It then ends with exit code 1, unless --lazy
    is given: some bytes may be in the cache directory only.
    """
    point = real_mountpoint(mountpoint)
    mounted = mount_at(point)
    if timeout is None:
        timeout = LAZY_TIMEOUT_S if lazy else TIMEOUT_S
    deadline_s = time.monotonic() + timeout
    client = connect_to_owner(point, mounted) if lazy else connect_serving(point, mounted)
    with ExitStack() as stack:
        supervisor = supervisor_of(point, owner_of(mounted))
        if supervisor is not None:
            stack.enter_context(supervisor)
        if client is None and supervisor is not None:
            client = None if lazy else wait_next_life(point, mounted, supervisor, deadline_s)
            mounted = mount_at(point)
            if client is None:
                end_between_lives(point, supervisor, lazy=lazy)
                return
        if client is None:
            clear_dead_mount(point, mounted, lazy=lazy)
            return
        stack.enter_context(client)
        if unmount_served(client, point, mounted, lazy=lazy, deadline_s=deadline_s) and supervisor is not None:
            supervisor.wait(EXIT_S_MIN)


def unmount_served(client: ControlClient, point: str, mounted: Mount | None, *, lazy: bool, deadline_s: float) -> bool:
    """Unmount through the daemon; whether that has ended, which may take longer with --lazy."""
    with _process_of(client, point) as daemon:
        problem = make_durable(client, point, deadline_s)
        if problem and not lazy:
            raise LakeError(f"{problem}; {point} stays mounted (--lazy detaches it and keeps the bytes in staging)")
        if problem:
            click.echo(f"lakefs-fuse: {printable(problem)}; the bytes stay in staging", err=True)
        if lazy:
            detach(point, lazy=True)
            has_ended = daemon.wait(LAZY_WAIT_S_MAX)
            if not has_ended:
                click.echo(
                    f"lakefs-fuse: {point} is detached; its daemon (pid {client.pid}) continues to store the remaining "
                    "files, and ends when no file is open",
                    err=True,
                )
            return has_ended
        # Sent before the mount is detached, so that the result of the drain is not missed.
        ending = client.follow(protocol.WaitEnd())
        if mounted is not None:
            detach(point, lazy=False)
        wait_end(ending, point, deadline_s)
        if not daemon.wait(max(EXIT_S_MIN, deadline_s - time.monotonic())):
            raise LakeError(f"{point} is unmounted, but its daemon (pid {client.pid}) does not end: its log says why")
        return True


def _process_of(client: ControlClient, point: str) -> Process:
    """The daemon. Raises LakeError where it has ended, or is in another PID namespace."""
    try:
        return Process(client.pid)
    except ProcessLookupError as error:
        raise LakeError(f"the daemon of {point} (pid {client.pid}) ended just now: run the command again") from error
    except OSError as error:
        raise LakeError(
            f"the daemon of {point} is in another PID namespace, as of another container: run the command there"
        ) from error


def wait_next_life(point: str, mounted: Mount | None, supervisor: Process, deadline_s: float) -> ControlClient | None:
    """A connection to the restarted daemon; None if it does not serve in time."""
    until_s = min(deadline_s, time.monotonic() + NEXT_LIFE_S_MAX)
    while time.monotonic() < until_s and not supervisor.wait(NEXT_LIFE_CHECK_S):
        client = connect_serving(point, mounted)
        if client is not None:
            return client
    return None


def connect_serving(point: str, mounted: Mount | None) -> ControlClient | None:
    """A connection to the daemon that serves the mount; None for one that has not mounted yet."""
    client = connect_to_owner(point, mounted)
    if client is None:
        return None
    with client:
        try:
            if client.hello().starting:
                return None
        except LakeError:
            pass  # It died just now, or hangs: the next request shows which.
    return connect_to_owner(point, mounted)


def end_between_lives(point: str, supervisor: Process, *, lazy: bool) -> None:
    """End the supervisor and detach the dead mount. Raises LakeError, because bytes may be left in staging."""
    supervisor.stop()
    if not supervisor.wait(SUPERVISOR_S_MAX):
        raise LakeError(f"the supervisor of {point} (pid {supervisor.pid}) does not end: its log says why")
    mounted = mount_at(point)
    if mounted is not None and mounted.is_fuse and is_dead(point):
        detach(point, lazy=True)
    tell_of_dead_daemon(
        f"{point} is unmounted, but its daemon had died and could not be started again: bytes that are not in the "
        "store are in the cache directory; mount again to store them",
        lazy=lazy,
    )


def tell_of_dead_daemon(message: str, *, lazy: bool) -> None:
    """Raises LakeError unless ``lazy``, because bytes may be left in staging."""
    if not lazy:
        raise LakeError(message)
    click.echo(f"lakefs-fuse: {message}", err=True)


def make_durable(client: ControlClient, point: str, deadline_s: float) -> str:
    """Wait until everything is stored; the error, or an empty text. Files that are not durable are printed."""
    try:
        reply = follow(
            client.follow(protocol.MakeDurable()), what=f"storing {point}", deadline_s=deadline_s, mountpoint=point
        )
    except LakeError as error:
        return str(error)
    if not isinstance(reply, protocol.Failed):
        return ""
    click.echo("\n".join(["lakefs-fuse: not in the store yet:", *describe_files(reply.files)]), err=True)
    return reply.message


def wait_end(ending: Iterator[protocol.Reply], point: str, deadline_s: float) -> None:
    """Wait until the daemon has drained. Raises LakeError for files that it could not store."""
    reply = follow(ending, what="finishing", deadline_s=deadline_s, mountpoint=point)
    if isinstance(reply, protocol.Failed):
        raise LakeError("\n".join([f"{reply.message}; the bytes stay in staging:", *describe_files(reply.files)]))


def clear_dead_mount(point: str, mounted: Mount | None, *, lazy: bool) -> None:
    """Detach the mount of a dead daemon. Raises LakeError for any other mount; unless ``lazy``, then as well, because
    bytes may be left in staging."""
    if mounted is None:
        raise not_mounted(point)
    if not mounted.is_fuse or not is_dead(point):
        raise unreachable(mounted, "use umount(8)")
    # Detaching loses nothing: no process serves the open files.
    detach(point, lazy=True)
    for socket in client_socket_paths(point, mounted.owner):
        socket.unlink(missing_ok=True)
    tell_of_dead_daemon(
        f"the daemon of {point} had died, and the mount is detached. Bytes that are not in the store are in the cache "
        "directory: mount again to store or list them",
        lazy=lazy,
    )
