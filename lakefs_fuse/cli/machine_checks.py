"""The checks of `doctor` on this machine: the kernel, /dev/fuse, fusermount3, the cache directory. They change nothing;
tests replace `preflight.Host`.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

from lakefs_fuse.checks import CheckResult, failed, ok, warning
from lakefs_fuse.cli import preflight
from lakefs_fuse.cli.parameters import format_bytes
from lakefs_fuse.control.mounts import mount_of
from lakefs_fuse.errors import LakeError

KERNEL_MIN = 5, 16
"""The oldest kernel with FOPEN_NOFLUSH (protocol 7.35 in its include/uapi/linux/fuse.h): before, each close asks."""
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "9p", "glusterfs"})
_MEMORY = frozenset({"tmpfs", "ramfs"})


def machine(host: preflight.Host, release: str) -> Iterator[CheckResult]:
    """Kernel ``release`` (uname -r), device, fusermount3, and whether others may be let in."""
    numbers = tuple(int(each) for each in re.findall(r"\d+", release)[:2])
    if numbers < KERNEL_MIN:
        yield warning(
            "machine.kernel",
            f"Linux {release} lacks some of what makes mounts fast: use 5.16 or later",
            release=release,
        )
    else:
        yield ok("machine.kernel", f"Linux {release}", release=release)
    yield _checked("machine.dev-fuse", lambda: preflight.check_device(host), f"{host.dev_fuse} is open to you")
    found = host.which("fusermount3")
    text = f"{found}" if found else "not there, and not needed by root"
    yield _checked("machine.fusermount3", lambda: preflight.check_fusermount(host), text)
    allows = host.uid == 0 or preflight.allows_other(host.fuse_conf)
    yield ok(
        "machine.allow-other",
        "--allow-other is allowed"
        if allows
        else f"only root may use --allow-other: the line `user_allow_other` in {host.fuse_conf} lets you do so, too",
        allowed=allows,
    )


def cache_directory(cache_dir: str, needed: int, mountinfo: Path) -> Iterator[CheckResult]:
    """Kind of disk, room and permissions of a cache directory, or of the nearest directory above one to be made;
    ``needed`` are the free bytes with which a mount works."""
    directory = preflight.nearest_directory(cache_dir)
    mounted = mount_of(os.path.realpath(directory), mountinfo)
    kind = mounted.fstype if mounted is not None else "unknown"
    if kind in _REMOTE:
        yield failed(
            "cache.disk", f"{cache_dir} is on {kind}, not on a local disk: choose another --cache-dir", kind=kind
        )
    elif kind in _MEMORY:
        yield warning(
            "cache.disk",
            f"{cache_dir} is in memory ({kind}), so bytes not yet in the store do not survive a restart: "
            "choose a --cache-dir on a disk",
            kind=kind,
        )
    else:
        yield ok("cache.disk", f"{cache_dir} is on {kind}", kind=kind)
    free = shutil.disk_usage(directory).free
    if free < needed:
        yield failed(
            "cache.room",
            f"{format_bytes(free)} free, and a mount needs {format_bytes(needed)}: make room, choose another "
            "--cache-dir, or lower --free-space",
            free_bytes=free,
        )
    else:
        yield ok("cache.room", f"{format_bytes(free)} free", free_bytes=free)


def cache_permissions(cache_dir: str) -> CheckResult:
    """Whether a cache directory is its owner's alone."""
    check = "cache.permissions"
    try:
        status = os.stat(cache_dir)
    except OSError:
        return ok(check, "made by the first mount, with mode 0700")
    if status.st_uid != os.geteuid():
        return failed(check, f"{cache_dir} belongs to uid {status.st_uid}: choose one of yours")
    if status.st_mode & 0o077:
        return warning(
            check,
            f"{cache_dir} is open to others (mode {stat.S_IMODE(status.st_mode):04o}): run `chmod 700 {cache_dir}`, or "
            "let the next mount do it",
        )
    return ok(check, "only its owner may enter")


def _checked(check: str, call: Callable[[], None], text: str) -> CheckResult:
    try:
        call()
    except LakeError as error:
        return failed(check, str(error))
    return ok(check, text)
