"""The mounts of this namespace, and how to detach one.

Read from /proc/self/mountinfo (proc_pid_mountinfo(5)), because stat(2) would send a request to the filesystem; only
`is_dead` sends one. `detach` blocks for a bounded time. Callable from any thread.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lakefs_fuse.errors import LakeError

MOUNTINFO = Path("/proc/self/mountinfo")
CONNECTIONS = Path("/sys/fs/fuse/connections")
"""One directory for each FUSE mount, named by the minor number of its device; see fuse(4) and fusectl."""
DETACH_S_MAX = 30.0
"""Maximum time for umount(8) or fusermount3."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted filesystem. ``owner`` is the user who made a FUSE mount, 0 for others; ``device`` is major:minor;
    ``allow_other`` is FUSE's option of this name."""

    mountpoint: str
    fstype: str
    source: str
    owner: int
    device: str
    allow_other: bool = False

    @property
    def is_fuse(self) -> bool:
        return self.fstype == "fuse" or self.fstype.startswith("fuse.")


def _unescape(field: str) -> str:
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes((int(match[1], 8),)), os.fsencode(field))
    return os.fsdecode(raw)


def read_mounts(path: Path = MOUNTINFO) -> list[Mount]:
    """All mounts of this namespace, in the order they were made."""
    mounts = []
    # The kernel escapes only the newline, no other line separator: a mountpoint may contain a CR.
    for line in path.read_bytes().removesuffix(b"\n").split(b"\n"):
        fields = os.fsdecode(line).split(" ")
        separator = fields.index("-", 6)
        fstype, source = fields[separator + 1 : separator + 3]
        options = dict(option.partition("=")[::2] for option in fields[separator + 3].split(","))
        owner = int(options.get("user_id") or 0)
        mounts.append(
            Mount(_unescape(fields[4]), fstype, _unescape(source), owner, fields[2], "allow_other" in options)
        )
    return mounts


def mount_at(mountpoint: str, path: Path = MOUNTINFO) -> Mount | None:
    """The topmost mount exactly at a real path; None if there is none."""
    return next((mount for mount in reversed(read_mounts(path)) if mount.mountpoint == mountpoint), None)


def mount_of(file: str, path: Path = MOUNTINFO) -> Mount | None:
    """The mount that contains a real path."""
    inside = [
        mount
        for mount in read_mounts(path)
        if file == mount.mountpoint or file.startswith(mount.mountpoint.rstrip("/") + "/")
    ]
    # Of equally long ones the last hides the others.
    return max(reversed(inside), key=lambda mount: len(mount.mountpoint), default=None)


def is_dead(mountpoint: str) -> bool:
    """Whether the daemon of a FUSE mount is dead. Sends a request, so a daemon that hangs makes this hang.

    Uses statvfs(3), because the kernel answers stat(2) of a dead mount from its cache for a while.
    """
    try:
        os.statvfs(mountpoint)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False


def abort(mount: Mount) -> None:
    """Fail all requests to the daemon of a FUSE mount, present and future. Raises LakeError."""
    try:
        (CONNECTIONS / mount.device.partition(":")[2] / "abort").write_text("1")
    except OSError as error:
        if os.geteuid() or not shutil.which("umount"):
            raise LakeError(f"the connection of {mount.mountpoint} cannot be aborted: {error}") from error
        # Without fusectl: forced unmounting aborts first, and may then find the mount in use.
        subprocess.run(["umount", "-f", mount.mountpoint], capture_output=True, timeout=DETACH_S_MAX, check=False)


def detach(point: str, *, lazy: bool) -> None:
    """Unmount ``point``. Raises LakeError, for one where the mount is in use."""
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
    except OSError as error:
        raise LakeError(f"{command[0]} cannot be started: {error.strerror}") from error
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


def device_at(mountpoint: str) -> str:
    """The device (major:minor) of the topmost mount at a real path; empty if there is none."""
    mounted = mount_at(mountpoint)
    return "" if mounted is None else mounted.device


def unmount(point: str, device: str) -> None:
    """End the mount of ``device``. One that is in use is detached: it accepts no new opens, and ends when the last file
    is closed. One that is detached already is left to do so. Raises LakeError."""
    if device and all(mount.device != device for mount in read_mounts()):
        log.info("%s is detached already: its mount ends when the last file is closed", point)
        return
    try:
        detach(point, lazy=False)
    except LakeError as error:
        log.warning("%s; detaching it", error)
        detach(point, lazy=True)
