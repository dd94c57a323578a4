"""Paths of control sockets, in directories that only the owner of a mount can write to.

The name derives from the real path of the mountpoint, so every command finds it without a registry. Sockets of root are
in /run/lakefs-fuse, those of a user in the first usable of /run/user/UID, $XDG_RUNTIME_DIR and /tmp. Directories that
do not depend on the environment come first, because it may differ between a shell and a cron job; clients try all.

*Outlives the session*: a daemon continues when its user logs out, but logind then removes /run/user/UID, unless the
user lingers (loginctl(1)); for other users that directory comes last.

*Private directories*: a directory that is a symlink, belongs to another user or is open to others is never used. A
crash leaves the socket file; the next server finds that no process answers on it, and removes it.
"""

from __future__ import annotations

import hashlib
import os
import pwd
import stat
import tempfile
from pathlib import Path

from lakefs_fuse.control.mounts import mount_at
from lakefs_fuse.errors import MountError
from lakefs_fuse.product import PROGRAM

SOCKET_PATH_BYTES_MAX = 107
"""sun_path of struct sockaddr_un, less its NUL."""

ROOT_DIRECTORY = Path("/run") / PROGRAM
SESSIONS_DIRECTORY = Path("/run/user")
LINGER_DIRECTORY = Path("/var/lib/systemd/linger")
"""A file for each user who lingers."""


def real_mountpoint(mountpoint: str) -> str:
    """The path of a mountpoint with symlinks resolved, without a request to the mount, which may be dead or hang."""
    parent, name = os.path.split(os.path.abspath(mountpoint))
    point = os.path.join(os.path.realpath(parent), name)
    if mount_at(point) is None and os.path.islink(point):
        return os.path.realpath(point)
    return point


def socket_name(mountpoint: str) -> str:
    """The file name of the control socket of a real mountpoint."""
    return hashlib.sha256(os.fsencode(mountpoint)).hexdigest()[:16] + ".sock"


def candidate_directories(uid: int) -> list[Path]:
    """Directories in which a daemon of ``uid`` may keep its socket, best first."""
    shared = [Path("/tmp") / f"{PROGRAM}-{uid}", Path(tempfile.gettempdir()) / f"{PROGRAM}-{uid}"]
    if uid == 0:
        own = [ROOT_DIRECTORY]
    else:
        own = [Path(f"/run/user/{uid}") / PROGRAM]
        xdg = os.environ.get("XDG_RUNTIME_DIR", "").strip()
        if xdg.startswith("/") and uid == os.getuid():
            own.append(Path(xdg) / PROGRAM)
    return list(dict.fromkeys(own + shared))


def is_private(directory: Path, uid: int) -> bool:
    """Whether a path is a real directory of ``uid`` that no other user can enter."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and stat.S_IMODE(found.st_mode) & 0o077 == 0


def server_socket_path(mountpoint: str) -> Path:
    """The path on which this process may listen; makes its directory. Raises MountError if none is private."""
    uid = os.geteuid()
    name = socket_name(mountpoint)
    for directory in sorted(candidate_directories(uid), key=lambda each: _ends_with_session(each, uid)):
        path = directory / name
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            continue
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        if is_private(directory, uid) and os.access(directory, os.W_OK | os.X_OK):
            return path
    tried = ", ".join(str(directory) for directory in candidate_directories(uid))
    raise MountError(f"no private directory for the control socket (tried {tried}): make one with mode 0700")


def _ends_with_session(directory: Path, uid: int) -> bool:
    if SESSIONS_DIRECTORY not in directory.parents:
        return False
    try:
        return not (LINGER_DIRECTORY / pwd.getpwuid(uid).pw_name).exists()
    except (KeyError, OSError):
        return True


def client_socket_paths(mountpoint: str, owner: int) -> list[Path]:
    """Paths on which a daemon of ``owner`` may listen, in directories that ``owner`` alone controls."""
    name = socket_name(mountpoint)
    return [directory / name for directory in candidate_directories(owner) if is_private(directory, owner)]
