"""Where a mount's control socket lies, and that nobody but its owner can put one there.

The name is derived from the real path of the mountpoint, so every command finds it without a registry. Root's are in
/run/lakefs-fuse. A user's are in the first of /run/user/UID, $XDG_RUNTIME_DIR and /tmp that will do; what does not
depend on the environment comes first, because a shell and a cron job of one user need not agree on it. Clients try all.

A directory that is a symlink, belongs to someone else or is open to others is never used. A crash leaves the socket
file behind; the next server sees that nobody answers on it and removes it.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from pathlib import Path

from lakefs_fuse.errors import MountError
from lakefs_fuse.product import PROGRAM

SOCKET_PATH_BYTES_MAX = 107
"""sun_path of struct sockaddr_un, less its NUL."""

ROOT_DIRECTORY = Path("/run") / PROGRAM


def real_mountpoint(mountpoint: str) -> str:
    """The mountpoint's path with symlinks resolved; never asks the mount itself, which may be dead or hang."""
    absolute = os.path.abspath(mountpoint)
    if os.path.islink(absolute):
        return os.path.realpath(absolute)
    parent, name = os.path.split(absolute)
    return os.path.join(os.path.realpath(parent), name)


def socket_name(mountpoint: str) -> str:
    """``mountpoint`` must be real already."""
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
    """A real directory of ``uid`` that nobody else can enter."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == uid and stat.S_IMODE(found.st_mode) & 0o077 == 0


def server_socket_path(mountpoint: str) -> Path:
    """Where this process may listen for a mount; makes the directory. Raises MountError if there is no safe place."""
    uid = os.geteuid()
    name = socket_name(mountpoint)
    for directory in candidate_directories(uid):
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


def client_socket_paths(mountpoint: str, owner: int) -> list[Path]:
    """Where the daemon of ``owner`` may listen for a mount; only directories that ``owner`` alone controls."""
    name = socket_name(mountpoint)
    return [directory / name for directory in candidate_directories(owner) if is_private(directory, owner)]
