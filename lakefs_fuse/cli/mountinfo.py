"""What is mounted where, from /proc/self/mountinfo: unlike stat(2) it never asks the filesystem itself.

See proc_pid_mountinfo(5) for the fields.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")


@dataclass(frozen=True, slots=True)
class Mount:
    """One mounted filesystem. ``owner`` is the user who made a FUSE mount, 0 for others."""

    mountpoint: str
    fstype: str
    source: str
    owner: int

    @property
    def is_fuse(self) -> bool:
        return self.fstype == "fuse" or self.fstype.startswith("fuse.")


def _unescape(field: str) -> str:
    raw = re.sub(rb"\\([0-7]{3})", lambda match: bytes((int(match[1], 8),)), os.fsencode(field))
    return os.fsdecode(raw)


def read_mounts(path: Path = MOUNTINFO) -> list[Mount]:
    """All mounts of this namespace, in the order they were made."""
    mounts = []
    for line in path.read_bytes().splitlines():
        fields = os.fsdecode(line).split(" ")
        separator = fields.index("-", 6)
        fstype, source = fields[separator + 1 : separator + 3]
        options = dict(option.partition("=")[::2] for option in fields[separator + 3].split(","))
        mounts.append(Mount(_unescape(fields[4]), fstype, _unescape(source), int(options.get("user_id") or 0)))
    return mounts


def mount_at(mountpoint: str, path: Path = MOUNTINFO) -> Mount | None:
    """What is mounted exactly at a real path; the topmost, if several are."""
    return next((mount for mount in reversed(read_mounts(path)) if mount.mountpoint == mountpoint), None)


def mount_of(file: str, path: Path = MOUNTINFO) -> Mount | None:
    """The mount that a real path lies in."""
    inside = [
        mount
        for mount in read_mounts(path)
        if file == mount.mountpoint or file.startswith(mount.mountpoint.rstrip("/") + "/")
    ]
    # Of equally long ones the last hides the others.
    return max(reversed(inside), key=lambda mount: len(mount.mountpoint), default=None)


def is_dead(mountpoint: str) -> bool:
    """Whether a FUSE mount's daemon is gone. Asks the mount, so a daemon that hangs makes this hang.

    With statvfs(3), because the kernel answers stat(2) of a dead mount from its cache for a while.
    """
    try:
        os.statvfs(mountpoint)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
    return False
