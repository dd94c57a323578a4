"""The daemon of a mount, as commands find it, wait for it and show its progress."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator

import click

from lakefs_fuse.cli.parameters import format_bytes, format_duration
from lakefs_fuse.cli.stats_values import section
from lakefs_fuse.cli.terminal import escaped, printable, progress_bar
from lakefs_fuse.control import protocol
from lakefs_fuse.control.client import SILENCE_S_MAX, ControlClient, connect
from lakefs_fuse.control.mounts import Mount, is_dead, mount_at, mount_of
from lakefs_fuse.control.runtime import real_mountpoint
from lakefs_fuse.control.supervision import supervisor_of
from lakefs_fuse.errors import EXIT_USAGE, ConfigError, LakeError
from lakefs_fuse.metrics import Unfinished
from lakefs_fuse.product import FUSE_TYPE, PROGRAM
from lakefs_fuse.quantity import counted

FILES_SHOWN_MAX = 20
"""Files that a message lists by name."""
STORE_S_MAX = 24 * 3600.0
"""A backlog of write-back may take hours; Ctrl-C ends the wait, and the uploads continue."""
LATE_S = 5.0
"""After this time a waiting user is told if the store does not answer."""
REASON_S_MAX = 5.0
"""Maximum time to wait for a daemon's explanation of a delay."""


def open_daemon(mountpoint: str, *, silence_s_max: float = SILENCE_S_MAX) -> ControlClient:
    """A connection to the daemon that serves ``mountpoint``. Raises LakeError if there is none."""
    point = real_mountpoint(mountpoint)
    mounted = mount_at(point)
    client = connect_to_owner(point, mounted, silence_s_max=silence_s_max)
    if client is not None:
        return client
    supervisor = supervisor_of(point, owner_of(mounted))
    if supervisor is not None:
        with supervisor:
            raise LakeError(
                f"the daemon of {point} died and is being started again (by pid {supervisor.pid}): see its log, or "
                "retry"
            )
    if mounted is None:
        raise not_mounted(point)
    if mounted.is_fuse and is_dead(point):
        raise LakeError(f"the daemon of {point} is dead: run `lakefs-fuse umount {point}`, then mount again")
    raise unreachable(mounted, "name a lake's mount")


def not_mounted(point: str) -> LakeError:
    """The error about a directory at which nothing is mounted."""
    around = mount_of(point)
    if around is not None and around.fstype == FUSE_TYPE:
        return LakeError(f"{point} is inside the mount {around.mountpoint}: name that")
    return LakeError(f"nothing is mounted at {point}: name the directory of a mount")


def unreachable(mounted: Mount, advice: str) -> LakeError:
    """The error about a live mount whose daemon cannot be asked; ``advice`` is for one of another program."""
    point = mounted.mountpoint
    if mounted.fstype == FUSE_TYPE:
        return LakeError(
            f"the daemon of {point} cannot be asked, because its control socket is missing, or in another container: "
            "umount(8), or `fusermount3 -u`, ends the mount, and its daemon stores the remaining files"
        )
    return LakeError(f"{point} is a mount of another program ({mounted.source}, {mounted.fstype}): {advice}")


def connect_to_owner(
    point: str, mounted: Mount | None, *, silence_s_max: float = SILENCE_S_MAX
) -> ControlClient | None:
    """A connection to the daemon of a mount, None if no daemon answers. Raises LakeError for another user's mount."""
    uid, owner = os.geteuid(), owner_of(mounted)
    if uid not in (0, owner):
        raise LakeError(f"the mount {point} belongs to uid {owner}: run this as that user or as root")
    return connect(point, owner=owner, silence_s_max=silence_s_max)


def owner_of(mounted: Mount | None) -> int:
    """The user who made a FUSE mount, or else this user."""
    return mounted.owner if mounted is not None and mounted.is_fuse else os.geteuid()


def locate(path: str) -> tuple[str, str]:
    """The mountpoint that contains ``path``, and the path relative to it. Raises LakeError for a path in no mount."""
    absolute = os.path.abspath(path)
    # A mountpoint is found without a request to its daemon, which may hang.
    real = absolute if mount_at(absolute) is not None else os.path.realpath(path)
    mounted = mount_of(real)
    if mounted is None or not mounted.is_fuse:
        raise LakeError(f"{path} is not inside a mount of this program: name a file or directory in one")
    return mounted.mountpoint, real[len(mounted.mountpoint.rstrip("/")) :].strip("/")


def is_in_mount(path: str) -> bool:
    """Whether ``path`` is inside a mount of this program."""
    mounted = mount_of(os.path.realpath(path))
    return mounted is not None and mounted.is_fuse


def is_missing(path: str) -> bool:
    """Whether a path that was located in a mount does not exist there, as far as this node knows. False if that is
    unknown, for example while the store is away."""
    try:
        os.lstat(os.path.realpath(path))
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def checked_text(path: str) -> str:
    """A path in a lake, whose names are UTF-8. Raises ConfigError for another one."""
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"{path!r} is not UTF-8, as names in a lake are: rename it, or name its directory") from error
    return path


def with_reason(replies: Iterator[protocol.Reply], mountpoint: str) -> Iterator[protocol.Reply]:
    """The replies of the daemon of ``mountpoint``; if the last one is late because the store does not answer, one line
    on stderr reports it."""
    ask_s = time.monotonic() + LATE_S
    for reply in replies:
        if isinstance(reply, protocol.Progress) and time.monotonic() >= ask_s:
            is_away = _is_store_away(mountpoint)
            if is_away:
                click.echo(f"{PROGRAM}: the store does not answer, and is asked again; Ctrl-C ends the wait", err=True)
            ask_s = math.inf if is_away else time.monotonic() + LATE_S
        yield reply


def _is_store_away(mountpoint: str) -> bool:
    try:
        with open_daemon(mountpoint, silence_s_max=REASON_S_MAX) as client:
            return bool(section(client.statistics(), "store").get("away"))
    except LakeError:
        return False


def follow(replies: Iterator[protocol.Reply], *, what: str, deadline_s: float, mountpoint: str) -> protocol.Reply:
    """Show progress until the last reply of the daemon of ``mountpoint``, `Done` or `Failed`, and return that.

    Raises LakeError at ``deadline_s`` of time.monotonic, with the reason of the delay where the daemon knows one; the
    daemon continues the work.
    """
    reply: protocol.Reply = protocol.Done()
    with progress_bar() as bar:
        for reply in with_reason(replies, mountpoint):
            if isinstance(reply, protocol.Progress) and time.monotonic() > deadline_s:
                left = f": {counted(reply.files_left, 'file is', 'files are')} left" if reply.files_left else ""
                raise LakeError(
                    f"{what} takes longer than --timeout allows{left}{_reason_of_delay(mountpoint)}; raise it or retry"
                )
            if isinstance(reply, protocol.Progress) and reply.files_left:
                bar.update(what, reply.bytes_done, reply.bytes_total, f"{counted(reply.files_left, 'file')} left")
    return reply


def _reason_of_delay(mountpoint: str) -> str:
    """Why files of a mount are not in the store yet, as the end of a sentence; empty if its daemon knows no error, or
    does not answer."""
    try:
        with open_daemon(mountpoint, silence_s_max=REASON_S_MAX) as client:
            files = client.unfinished().files
    except LakeError:
        return ""
    why = next((file.error for file in files if file.error and file.state != "orphan"), "")
    return f", because {why}" if why else ""


def store_changes(path: str, timeout_s: float) -> protocol.Reply:
    """Have the daemon of the mount that contains ``path`` store every change at ``path`` and below; its last reply,
    `Done` or `Failed`. Shows progress. Raises LakeError, also where that takes longer than ``timeout_s``."""
    mountpoint, relative = locate(path)
    with open_daemon(mountpoint) as client:
        return follow(
            client.follow(protocol.MakeDurable(checked_text(relative))),
            what=f"storing {path}",
            deadline_s=time.monotonic() + timeout_s,
            mountpoint=mountpoint,
        )


def require_stored(path: str, otherwise: str) -> None:
    """As `store_changes`, for as long as that takes. Raises LakeError, which begins with ``otherwise``, where some file
    cannot be stored."""
    reply = store_changes(path, STORE_S_MAX)
    if isinstance(reply, protocol.Failed):
        raise LakeError("\n".join([f"{otherwise}: {reply.message}", *describe_files(reply.files)]))


def require_done(reply: protocol.Reply, about: str = "") -> None:
    """Raises the error that a daemon reported, which begins with ``about``: ConfigError if the request was wrong, else
    LakeError."""
    if isinstance(reply, protocol.Failed):
        raise (ConfigError if reply.exit_code == EXIT_USAGE else LakeError)(about + reply.message)


def describe_files(files: tuple[Unfinished, ...]) -> list[str]:
    """One line for each file that is not durable, with the reason; FILES_SHOWN_MAX files at most."""
    lines = [
        f"  {escaped(file.path)}: {file.state}, {format_bytes(file.bytes_done)} of {format_bytes(file.bytes)} stored, "
        f"{format_duration(file.age_s)} old" + (f": {escaped(file.error)}" if file.error else "")
        for file in files[:FILES_SHOWN_MAX]
    ]
    if len(files) > FILES_SHOWN_MAX:
        lines.append(f"  … and {len(files) - FILES_SHOWN_MAX} more")
    return lines


def show_changes(path: str) -> None:
    """Have the mount that contains ``path`` show the commits of others; if that fails, report it on stderr."""
    try:
        mountpoint, relative = locate(path)
        with open_daemon(mountpoint) as client:
            *_, reply = with_reason(client.follow(protocol.Refresh(checked_text(relative))), mountpoint)
        why = reply.message if isinstance(reply, protocol.Failed) else ""
    except LakeError as error:
        why = str(error)
    if why:
        click.echo(f"{PROGRAM}: {path} is shown within the mount's --refresh, not yet: {printable(why)}", err=True)
