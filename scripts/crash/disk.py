"""A disk that a power cut can be done to: ext4 in a file, mounted through a loop device. Needs root.

`cut` is what a power cut leaves: EXT4_IOC_SHUTDOWN without flushing the log drops all that was not synced, the page
cache included, which SIGKILL of a process does not.
"""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import time
from pathlib import Path

BYTES = 2 << 30
"""Sparse; more than the daemon's default staging takes."""
EXT4_IOC_SHUTDOWN = 0x8004587D
"""_IOR('X', 125, __u32), from fs/ext4/ext4.h."""
NO_LOG_FLUSH = 2
"""EXT4_GOING_FLAGS_NOLOGFLUSH."""
UNMOUNT_S_MAX = 10.0


class DiskError(Exception):
    """The disk cannot be made, mounted or unmounted."""


class Disk:
    """See the module's head. ``root`` is where it is mounted."""

    def __init__(self, directory: Path) -> None:
        """Makes and mounts it. Raises DiskError."""
        self._image, self.root = directory / "disk.ext4", directory / "disk"
        self.root.mkdir(parents=True)
        with self._image.open("wb") as image:
            image.truncate(BYTES)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,nodiscard", os.fspath(self._image))
        self.mount()

    def mount(self) -> None:
        _run("mount", "-o", "loop", os.fspath(self._image), os.fspath(self.root))

    def cut(self) -> None:
        """From now on nothing reaches the disk, and every write fails."""
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        finally:
            os.close(fd)

    def unmount(self) -> None:
        """Nobody may use it any more. Raises DiskError."""
        deadline = time.monotonic() + UNMOUNT_S_MAX
        while os.path.ismount(self.root):
            try:
                _run("umount", os.fspath(self.root))
            except DiskError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DiskError(f"{' '.join(command)}: {done.stderr}{done.stdout}")
