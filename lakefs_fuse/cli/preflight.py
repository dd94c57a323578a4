"""Checks of this machine, and of the requirements of options, before a daemon is started; each error says what to do.
They ask no store, and change nothing except that they make the cache directory. `Host` is their view of the machine,
which tests replace.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from lakefs_fuse.cli.parameters import format_bytes
from lakefs_fuse.config import MIB, MountConfig
from lakefs_fuse.control.mounts import MOUNTINFO, is_dead, mount_at, mount_of
from lakefs_fuse.errors import CacheError, ConfigError, MountError
from lakefs_fuse.product import FUSE_TYPE, PROGRAM

ROOM_BYTES_MIN = 64 * MIB
"""Disk space that a mount needs in addition to --free-space: one part of an upload, and the database."""
_OF_CACHES = frozenset({"blocks", "lock", "meta", "staging"})
"""A cache directory has some of these names."""


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
    """Run all checks, and return notes for the user. The paths of ``config`` are absolute.

    Raises MountError or CacheError."""
    check_overlap(config)
    check_mountpoint(config.mountpoint, host)
    check_fuse(config, host)
    check_cache_disk(config, host)
    check_cache_dir(config)
    return [*notes_on_mountpoint(config.mountpoint), *notes_on_cache_dir(Path(config.cache_dir))]


def check_mountpoint(mountpoint: str, host: Host) -> None:
    """Check that the mountpoint is a directory with nothing mounted on it; it need not be empty."""
    mounted = mount_at(mountpoint, host.mountinfo)
    if is_dead(mountpoint):
        raise MountError(
            f"mountpoint {mountpoint}: a mount whose daemon died is still there (Transport endpoint is not "
            f"connected): run `lakefs-fuse umount {mountpoint}`, then mount again"
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
        raise MountError(f"mountpoint {mountpoint} cannot be used ({error.strerror}): choose another") from error
    if not stat.S_ISDIR(found.st_mode):
        raise MountError(f"mountpoint {mountpoint} is not a directory: choose one that is")
    if host.uid != 0 and not os.access(mountpoint, os.W_OK):
        raise MountError(
            f"mountpoint {mountpoint} is not writable for you, which fusermount3 requires: choose one of yours"
        )


def check_fuse(config: MountConfig, host: Host) -> None:
    """Check /dev/fuse, fusermount3 (for ordinary users) and the permission for --allow-other."""
    check_device(host)
    check_fusermount(host)
    if host.uid == 0:
        return
    outer = mount_of(config.mountpoint, host.mountinfo)
    if outer is not None and outer.is_fuse and not outer.allow_other:
        raise MountError(
            f"mountpoint {config.mountpoint} lies in the FUSE mount {outer.mountpoint}, which fusermount3 may not "
            "enter: mount that one with --allow-other, or choose another mountpoint"
        )
    if config.allow_other and not allows_other(host.fuse_conf):
        raise MountError(
            f"--allow-other: as root, add the line `user_allow_other` to {host.fuse_conf}, or leave it out"
        )


def check_device(host: Host) -> None:
    """Check that /dev/fuse is there and open to this user. Raises MountError."""
    if not host.dev_fuse.exists():
        raise MountError(
            f"no {host.dev_fuse}: run `modprobe fuse` as root; in a container, start it with "
            "`--device /dev/fuse --cap-add SYS_ADMIN`"
        )
    if not os.access(host.dev_fuse, os.R_OK | os.W_OK):
        raise MountError(f"{host.dev_fuse} is not open to you: as root, run `chmod 666 {host.dev_fuse}`")


def check_fusermount(host: Host) -> None:
    """Check that ordinary users have fusermount3. Raises MountError."""
    if host.uid != 0 and host.which("fusermount3") is None:
        raise MountError("fusermount3 is missing, which ordinary users need: install the package fuse3")


def allows_other(fuse_conf: Path) -> bool:
    """Whether ordinary users may mount with --allow-other."""
    try:
        return any(line.strip() == "user_allow_other" for line in fuse_conf.read_text(errors="replace").splitlines())
    except OSError:
        return False


def check_overlap(config: MountConfig) -> None:
    """Check that mountpoint, cache directory and source do not contain one another, which would deadlock."""
    places = [("the mountpoint", config.mountpoint), ("the cache directory", config.cache_dir)]
    if config.store.source.scheme == "file":
        places.append(("the source", config.store.source.bucket))
    real = [(name, os.path.realpath(place)) for name, place in places]
    for inner_name, inner in real:
        for outer_name, outer in real:
            if inner_name != outer_name and (inner == outer or inner.startswith(outer.rstrip("/") + "/")):
                raise MountError(f"{inner_name} {inner} lies inside {outer_name} {outer}: keep them apart")


def check_cache_disk(config: MountConfig, host: Host) -> None:
    """Check that the cache directory is in no mount of this program, which would store the cache in a lake. Raises
    MountError."""
    outer = mount_of(os.path.realpath(config.cache_dir), host.mountinfo)
    if outer is not None and outer.fstype == FUSE_TYPE:
        raise MountError(
            f"the cache directory {config.cache_dir} is in the lake that is mounted at {outer.mountpoint}: choose a "
            "--cache-dir on a local disk"
        )


def check_cache_dir(config: MountConfig) -> None:
    """Make the cache directory, and check that it can be written to and has room beyond --free-space."""
    directory = Path(config.cache_dir)
    require_own_cache(directory)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror
        raise _unwritable(directory, why) from error
    check_room(config)


def _unwritable(directory: Path, why: str | None) -> CacheError:
    return CacheError(f"cache directory {directory} cannot be written to ({why}): choose one with --cache-dir")


def require_own_cache(directory: Path) -> None:
    """Raises CacheError for a file, and for a directory of other files: the cache would be mixed with them, and closed
    to others."""
    try:
        names = set(os.listdir(directory)) - {"lost+found"}
    except NotADirectoryError as error:
        raise _unwritable(directory, error.strerror) from error
    except OSError:
        return  # it will be made, or that fails with an error later
    if names and names.isdisjoint(_OF_CACHES):
        raise CacheError(
            f"{directory} has files that do not belong to a cache: give --cache-dir a separate directory, such as "
            f"{directory / PROGRAM}"
        )


def require_cache_of_node(directory: Path) -> None:
    """Raises CacheError for a directory that no mount has used as its cache directory."""
    require_own_cache(directory)
    if not (directory / "meta").is_dir():
        raise CacheError(
            f"{directory} is not the cache directory of a node: give --cache-dir one that a mount has used"
        )


def nearest_directory(path: str) -> Path:
    """The directory, or the nearest one above it that exists: the one whose disk it is on, or will be."""
    directory = Path(path)
    while not os.path.exists(directory) and directory != directory.parent:
        directory = directory.parent
    return directory


def check_room(config: MountConfig) -> None:
    """Check that the disk of the cache directory, which need not exist, has room beyond --free-space. Raises
    MountError."""
    directory = nearest_directory(config.cache_dir)
    free = shutil.disk_usage(directory).free
    if free < config.free_bytes_min + ROOM_BYTES_MIN:
        raise MountError(
            f"not enough disk: {format_bytes(free)} free at {directory}, and {format_bytes(config.free_bytes_min)} "
            f"must stay free besides {format_bytes(ROOM_BYTES_MIN)} to work with: make room, choose another "
            "--cache-dir, or lower --free-space"
        )


def notes_on_mountpoint(mountpoint: str) -> list[str]:
    """A note if the mount hides files."""
    try:
        with os.scandir(mountpoint) as names:
            is_empty = next(names, None) is None
    except OSError:  # fusermount3 may enter where this user cannot read
        return []
    return [] if is_empty else [f"mountpoint {mountpoint} is not empty: the mount hides its contents until it ends"]


def notes_on_cache_dir(directory: Path) -> list[str]:
    """A note if the daemon is going to close the cache directory to other users."""
    found = os.stat(directory)
    if found.st_uid != os.geteuid() or not found.st_mode & 0o077:
        return []
    mode = stat.S_IMODE(found.st_mode)
    return [f"the cache directory {directory} is open to others (mode {mode:04o}): it gets mode 0700"]


def check_hints(url: str) -> None:
    """Check the URL of --hints. Raises ConfigError for what is not redis://[USER@]HOST[:PORT][/DB] or rediss://…, and
    where redis-py is missing."""
    expected = "expected redis://HOST[:PORT][/DB], or rediss:// for TLS"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"--hints: {expected}") from error
    if parts.password is not None:
        raise ConfigError(
            "--hints: every user of this machine can read a password in the URL: set LAKEFS_HINTS_PASSWORD, or "
            "LAKEFS_HINTS_PASSWORD_FILE to the name of a file that has it"
        )
    database = parts.path.strip("/")
    if parts.scheme not in ("redis", "rediss") or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ConfigError(f"--hints {url}: {expected}")
    if database and not (database.isascii() and database.isdigit()):
        raise ConfigError(f"--hints {url}: the database is a number: {expected}")
    if importlib.util.find_spec("redis") is None:
        raise ConfigError(f"--hints needs redis-py, which is not installed: pip install '{PROGRAM}[hints]'")
