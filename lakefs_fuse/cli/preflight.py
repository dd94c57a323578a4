"""What can be known to be wrong before a daemon is started, each with what to do about it.

The checks look at this machine only and change nothing but to make the cache directory. `Host` is what they look at, so
that tests own it.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lakefs_fuse.cli.parameters import format_bytes
from lakefs_fuse.config import MIB, MountConfig
from lakefs_fuse.control.mounts import MOUNTINFO, is_dead, mount_at, mount_of
from lakefs_fuse.errors import CacheError, MountError

ROOM_BYTES_MIN = 64 * MIB
"""What a mount needs beyond the space it leaves free: one part of an upload and the metadata cache."""


@dataclass(frozen=True, slots=True)
class Host:
    """The parts of a machine that a mount depends on."""

    dev_fuse: Path = Path("/dev/fuse")
    fuse_conf: Path = Path("/etc/fuse.conf")
    mountinfo: Path = MOUNTINFO
    uid: int = 0
    which: Callable[[str], str | None] = shutil.which

    @classmethod
    def this(cls) -> Host:
        """The machine and user of this process."""
        return cls(uid=os.geteuid())


def check(config: MountConfig, host: Host) -> list[str]:
    """What the user should know. Raises MountError or CacheError. ``config.mountpoint`` and ``config.cache_dir`` are
    absolute."""
    check_overlap(config)
    check_mountpoint(config.mountpoint, host)
    check_fuse(config, host)
    check_cache_dir(config)
    return notes_on_cache_dir(Path(config.cache_dir))


def check_mountpoint(mountpoint: str, host: Host) -> None:
    """It must be a directory where nothing is mounted; it need not be empty."""
    mounted = mount_at(mountpoint, host.mountinfo)
    if is_dead(mountpoint):
        raise MountError(
            f"mountpoint {mountpoint}: a mount whose daemon died is still there (Transport endpoint is not "
            f"connected): run `fusermount3 -u -z {mountpoint}`, then mount again"
        )
    if mounted is not None:
        raise MountError(
            f"mountpoint {mountpoint} is in use ({mounted.source}, {mounted.fstype}): "
            f"`lakefs-fuse umount {mountpoint}` first, or choose another"
        )
    try:
        found = os.stat(mountpoint)
    except FileNotFoundError as error:
        raise MountError(f"mountpoint {mountpoint} does not exist: run `mkdir -p {mountpoint}`") from error
    except OSError as error:
        raise MountError(f"mountpoint {mountpoint}: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode):
        raise MountError(f"mountpoint {mountpoint} is not a directory")
    if host.uid != 0 and not os.access(mountpoint, os.W_OK):
        raise MountError(
            f"mountpoint {mountpoint} is not writable for you, as fusermount3 demands: choose one of yours"
        )


def check_fuse(config: MountConfig, host: Host) -> None:
    """The kernel's device, the helper that ordinary users need, and permission for ``allow_other``."""
    if not host.dev_fuse.exists():
        raise MountError(
            f"no {host.dev_fuse}: run `modprobe fuse` as root; in a container, start it with "
            "`--device /dev/fuse --cap-add SYS_ADMIN`"
        )
    if not os.access(host.dev_fuse, os.R_OK | os.W_OK):
        raise MountError(f"{host.dev_fuse} is not open to you: as root, run `chmod 666 {host.dev_fuse}`")
    if host.uid == 0:
        return
    if host.which("fusermount3") is None:
        raise MountError("fusermount3 is missing, which ordinary users need: install the package fuse3")
    outer = mount_of(config.mountpoint, host.mountinfo)
    if outer is not None and outer.is_fuse and not outer.allow_other:
        raise MountError(
            f"mountpoint {config.mountpoint} lies in the FUSE mount {outer.mountpoint}, which fusermount3 may not "
            "enter: mount that one with --allow-other, or choose another mountpoint"
        )
    if config.allow_other and not _user_allow_other(host.fuse_conf):
        raise MountError(
            f"--allow-other: as root, add the line `user_allow_other` to {host.fuse_conf}, or leave it out"
        )


def _user_allow_other(fuse_conf: Path) -> bool:
    try:
        return any(line.strip() == "user_allow_other" for line in fuse_conf.read_text(errors="replace").splitlines())
    except OSError:
        return False


def check_overlap(config: MountConfig) -> None:
    """A mount must not lie in what it is made from, nor the other way round: both wait for each other for ever."""
    places = [("the mountpoint", config.mountpoint), ("the cache directory", config.cache_dir)]
    if config.store.source.scheme == "file":
        places.append(("the source", config.store.source.bucket))
    real = [(name, os.path.realpath(place)) for name, place in places]
    for inner_name, inner in real:
        for outer_name, outer in real:
            if inner_name != outer_name and (inner == outer or inner.startswith(outer.rstrip("/") + "/")):
                raise MountError(f"{inner_name} {inner} lies inside {outer_name} {outer}: keep them apart")


def check_cache_dir(config: MountConfig) -> None:
    """It can be made and written to, and its disk has room beyond what must stay free."""
    directory = Path(config.cache_dir)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CacheError(
            f"cache directory {directory} cannot be written to ({error.strerror}): choose one with --cache-dir"
        ) from error
    free = shutil.disk_usage(directory).free
    if free < config.free_bytes_min + ROOM_BYTES_MIN:
        raise MountError(
            f"not enough disk: {format_bytes(free)} free at {directory}, and {format_bytes(config.free_bytes_min)} "
            f"must stay free besides {format_bytes(ROOM_BYTES_MIN)} to work with: make room, choose another "
            "--cache-dir, or lower --free-space"
        )


def notes_on_cache_dir(directory: Path) -> list[str]:
    """What the daemon is about to do to a cache directory that others may look into."""
    found = os.stat(directory)
    if found.st_uid != os.geteuid() or not found.st_mode & 0o077:
        return []
    mode = stat.S_IMODE(found.st_mode)
    return [f"the cache directory {directory} is open to others (mode {mode:04o}): it gets mode 0700"]
