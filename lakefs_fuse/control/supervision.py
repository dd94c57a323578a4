"""The supervisor of a mount, the holder of a cache directory, and the answer of a daemon to its starter.

A supervisor holds a POSIX record lock on a file beside the control socket. The kernel reports its pid (F_GETLK), so the
answer is *never stale*, and there is no protocol: SIGTERM ends it. A crash leaves the file, which has no meaning
without the lock. POSIX locks are per process: a process has one `Claim` of a mountpoint. If the file is in /tmp, where
systemd deletes old files (but not sockets in use), the supervisor touches it.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from lakefs_fuse.config import MountConfig
from lakefs_fuse.control.runtime import client_socket_paths, server_socket_path
from lakefs_fuse.errors import EXIT_FAILURE, MALFORMED, ConfigError, MountError
from lakefs_fuse.product import PROGRAM

ANSWER_BYTES_MAX = 64 * 1024
CONFIG_BYTES_MAX = 1 << 20

CLAIM_S_MAX = 2.0
"""Time to wait for a supervisor that is about to end."""
CLAIM_CHECK_S = 0.05
LOCKS = Path("/proc/locks")

_FLOCK = "hhqqi"
"""l_type, l_whence, l_start, l_len and l_pid of struct flock, with a 64-bit off_t."""
_WHOLE_FILE = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The one answer of a daemon to its starter, a JSON line; an empty ``error`` means that it is ready."""

    error: str = ""
    exit_code: int = EXIT_FAILURE
    detached: bool = False
    """With an error: the dead mount to be replaced is detached, and there is no new one."""

    def send(self, descriptor: int) -> None:
        """Write it to a pipe, and close that; no error if the starter has given up."""
        try:
            os.write(descriptor, msgspec.json.encode(self) + b"\n")
        except BrokenPipeError:
            pass
        os.close(descriptor)


def read_config(source: BinaryIO) -> MountConfig:
    """The configuration that a starter wrote, in JSON. Raises ConfigError."""
    try:
        return msgspec.json.decode(source.read(CONFIG_BYTES_MAX), type=MountConfig)
    except MALFORMED as error:
        raise ConfigError(f"no usable configuration ({error}): use `lakefs-fuse mount`") from error


def encode_document(value: msgspec.Struct) -> bytes:
    """``value`` as JSON, for a child to read. Raises ConfigError where a text of it is not UTF-8."""
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        raise ConfigError(f"{error.object!r} is not UTF-8: choose another name") from error


def memory_file(document: bytes) -> int:
    """A descriptor from which a child reads ``document``; children do not inherit it by default."""
    descriptor = os.memfd_create(PROGRAM)
    os.write(descriptor, document)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


class Claim:
    """The right to supervise a mountpoint, held until `release` or the end of the process."""

    def __init__(self, mountpoint: str) -> None:
        """Raises MountError where another process has it."""
        self._path = _lock_path(server_socket_path(mountpoint))
        deadline_s = time.monotonic() + CLAIM_S_MAX
        try:
            while (holder := self._lock()) is not None:
                if time.monotonic() > deadline_s:
                    who = f"(pid {holder})" if holder > 0 else "in another PID namespace, as of another container,"
                    raise MountError(
                        f"mountpoint {mountpoint} has a supervisor {who} that is about to mount there again: "
                        f"`lakefs-fuse umount {mountpoint}` {'ends it' if holder > 0 else 'there ends it'}"
                    )
                time.sleep(CLAIM_CHECK_S)
        except OSError as error:
            raise MountError(f"lock file {self._path}: {error.strerror}") from error

    def _lock(self) -> int | None:
        """Lock the file; None on success, else the pid of the holder, or 0 if that is in another PID namespace, or the
        file was removed in the meantime."""
        self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.stat(self._path).st_ino == os.fstat(self._descriptor).st_ino:
                return None
        except (BlockingIOError, PermissionError):
            pid = _holder(self._descriptor)
            os.close(self._descriptor)
            return pid
        except FileNotFoundError:
            pass
        os.close(self._descriptor)
        return 0

    def touch(self) -> None:
        """Touch the lock file, so that programs that delete old files in /tmp keep it; without it the holder cannot be
        found."""
        with suppress(OSError):
            os.utime(self._descriptor)

    def release(self) -> None:
        """Give the claim up."""
        self._path.unlink(missing_ok=True)
        os.close(self._descriptor)


class Process:
    """A process known by a pidfd, which never refers to another one. Close it after use."""

    def __init__(self, pid: int) -> None:
        """Raises ProcessLookupError where it has ended."""
        self.pid, self._pidfd = pid, os.pidfd_open(pid)

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *raised: object) -> None:
        os.close(self._pidfd)

    def stop(self) -> None:
        """Send SIGTERM; no error if it has ended."""
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        except ProcessLookupError:
            pass

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; whether it ended within ``timeout_s``."""
        return bool(select.select([self._pidfd], [], [], max(0.0, timeout_s))[0])


def supervisor_of(mountpoint: str, owner: int) -> Process | None:
    """The process of ``owner`` that supervises a real mountpoint, if one does: SIGTERM ends its daemon and itself."""
    for socket in client_socket_paths(mountpoint, owner):
        try:
            descriptor = os.open(_lock_path(socket), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            pid = _holder(descriptor)
            if pid <= 0:  # no holder, or one in another PID namespace
                continue
            with ExitStack() as stack:
                process = stack.enter_context(Process(pid))
                # The same holder before and after, so the pidfd is of the holder.
                if _holder(descriptor) == pid:
                    stack.pop_all()
                    return process
        except ProcessLookupError:
            continue
        finally:
            os.close(descriptor)
    return None


def cache_lock_holder(directory: Path) -> tuple[int, str] | None:
    """The pid of the daemon that holds a cache directory, and its mountpoint, empty if unknown.

    Reads /proc/locks, because trying the lock would hold it for a moment; that leaves out other PID namespaces.
    """
    path = directory / "lock"
    try:
        found = path.stat()
        lines = LOCKS.read_text().splitlines()
        text = os.fsdecode(path.read_bytes()[:4096])
    except OSError:
        return None
    device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}:{found.st_ino}"
    for line in lines:
        fields = line.split()
        if fields[1:2] == ["FLOCK"] and device in fields[5:6]:
            return int(fields[4]), text.removesuffix("\n")
    return None


def _lock_path(socket: Path) -> Path:
    return socket.with_suffix(".lock")


def _holder(descriptor: int) -> int:
    answer = struct.unpack(_FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, _WHOLE_FILE))
    return 0 if answer[0] == fcntl.F_UNLCK else int(answer[4])
