"""Starts the daemon of a mount, or its supervisor, and waits until it serves or says why it cannot.

Both are started in the same way: the configuration goes over standard input and the answer comes over an inherited
pipe, one JSON line; credentials are only ever in the environment. What is started is a session of its own, so closing
the terminal does not end it.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from lakefs_fuse.config import MountConfig
from lakefs_fuse.control.supervision import ANSWER_BYTES_MAX, Answer
from lakefs_fuse.errors import LakeError, MountError

STARTUP_S = 60.0
"""On top of the time that store requests are tried again: opening and checking the cache directory."""
STATE_S = 3600.0
"""The same for an immutable mount, which lists everything below before it answers."""
QUIET_S = 5.0
"""A mount that takes longer says where one can see why."""
TERMINATE_S_MAX = 10.0
"""A supervisor kills a daemon that does not serve yet sooner than that."""

DAEMON: tuple[str, ...] = (sys.executable, "-P", "-m", "lakefs_fuse.daemon.mount_daemon")
"""-P: the directory in which a user happens to be is not where modules come from."""
SUPERVISOR: tuple[str, ...] = (sys.executable, "-P", "-m", "lakefs_fuse.daemon.supervisor")


def program(config: MountConfig) -> tuple[str, ...]:
    """What serves a mount: its daemon, or a supervisor that keeps one."""
    return SUPERVISOR if config.supervise else DAEMON


class DaemonFailed(LakeError):
    """The daemon's own error, with the exit code it chose."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def open_log(log_file: str) -> int:
    """A descriptor for what the daemon writes to standard error before and beside its log. Raises MountError."""
    try:
        Path(log_file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MountError(
            f"log file {log_file} cannot be written to ({error.strerror}): choose one with --log-file"
        ) from error


def run_in_foreground(config: MountConfig, command: Sequence[str] | None = None) -> None:
    """Become the daemon or its supervisor, which log to standard error. Does not return."""
    command = command or program(config)
    document = msgspec.json.encode(config)
    descriptor = os.memfd_create("lakefs-fuse-config")
    os.write(descriptor, document)
    os.lseek(descriptor, 0, os.SEEK_SET)
    os.dup2(descriptor, 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))


def start(config: MountConfig, command: Sequence[str] | None = None, *, startup_s: float | None = None) -> None:
    """Returns when the mount answers, after ``startup_s`` (STARTUP_S, or STATE_S) at most. Raises DaemonFailed or
    MountError, and then no daemon is left."""
    command = command or program(config)
    startup_s = startup_s if startup_s is not None else STATE_S if config.immutable else STARTUP_S
    log_file = config.log_file or os.devnull
    log_descriptor = open_log(log_file)
    answer_end, daemon_end = os.pipe()
    try:
        try:
            daemon = subprocess.Popen(
                [*command, "--ready-fd", str(daemon_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=log_descriptor,
                pass_fds=[daemon_end],
                start_new_session=True,
            )
        finally:
            os.close(daemon_end)
            os.close(log_descriptor)
        try:
            _hand_over(daemon, msgspec.json.encode(config))
            deadline_s = time.monotonic() + startup_s + config.store.retry_timeout_s
            if startup_s > QUIET_S and not select.select([answer_end], [], [], QUIET_S)[0]:
                click.echo(f"not ready yet; what the daemon is doing is in {log_file}", err=True)
            answer = _wait_answer(answer_end, deadline_s)
        except BaseException:
            _end(daemon)
            raise
        if answer is None:
            code = _end(daemon)
            raise MountError(f"the daemon ended without a word (status {code}): see {log_file}")
        if answer.error:
            _end(daemon)
            raise DaemonFailed(answer.error, answer.exit_code)
        # It is init's child from here on; without this Popen warns that it still runs.
        daemon.returncode = 0
    finally:
        os.close(answer_end)


def _hand_over(daemon: subprocess.Popen[bytes], document: bytes) -> None:
    assert daemon.stdin is not None
    try:
        with daemon.stdin as pipe:
            pipe.write(document)
    except BrokenPipeError:
        pass  # It died already: its answer, or the lack of one, says more.


def _wait_answer(descriptor: int, deadline_s: float) -> Answer | None:
    """The daemon's line, or None if it closed the pipe without one. Raises MountError at the deadline."""
    received = b""
    while b"\n" not in received and len(received) < ANSWER_BYTES_MAX:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise MountError(
                "the daemon did not get ready in time; it was stopped: see its log, and that the store answers"
            )
        piece = os.read(descriptor, ANSWER_BYTES_MAX)
        if not piece:
            return None
        received += piece
    return msgspec.json.decode(received.partition(b"\n")[0], type=Answer)


def _end(daemon: subprocess.Popen[bytes]) -> int:
    """Stop our own child, gently first; its exit status."""
    try:
        # One that has answered is on its way out by itself.
        return daemon.wait(1.0)
    except subprocess.TimeoutExpired:
        daemon.terminate()
    try:
        return daemon.wait(TERMINATE_S_MAX)
    except subprocess.TimeoutExpired:
        daemon.kill()
        return daemon.wait()
