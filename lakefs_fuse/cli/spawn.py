"""Starts the daemon of a mount, or its supervisor, and waits until it serves or reports an error.

Both read the configuration from standard input and write one `Answer`, a JSON line, to an inherited pipe. Credentials
are only in the environment. The child runs in a new session, so closing the terminal does not end it. *No stray
daemon*: when `start` raises, the child has ended; so it has when SIGTERM or SIGHUP ends the command. After SIGKILL it
goes on, and mounts.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click
import msgspec

from lakefs_fuse.config import MountConfig
from lakefs_fuse.control.supervision import ANSWER_BYTES_MAX, Answer, encode_document, memory_file
from lakefs_fuse.errors import MountError, ReportedError

STARTUP_S = 60.0
"""Time to open and check the cache directory, in addition to --retry-timeout."""
STATE_S = 3600.0
"""The same for an immutable mount, which lists everything before it answers."""
QUIET_S = 5.0
"""Time after which the command names the log file."""
TERMINATE_S_MAX = 10.0
"""Time for a child to end after SIGTERM; a supervisor needs less to kill a daemon that does not serve yet."""

DAEMON: tuple[str, ...] = (sys.executable, "-P", "-m", "lakefs_fuse.daemon.mount_daemon")
"""-P: the working directory of the user is no place to import modules from."""
SUPERVISOR: tuple[str, ...] = (sys.executable, "-P", "-m", "lakefs_fuse.daemon.supervisor")


def program(config: MountConfig) -> tuple[str, ...]:
    """The command line of the daemon, or of the supervisor that runs it."""
    return SUPERVISOR if config.supervise else DAEMON


def open_log(log_file: str) -> int:
    """A descriptor of the log file, for the standard error of the daemon. Raises MountError."""
    try:
        Path(log_file).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise MountError(
            f"log file {log_file} cannot be written to ({error.strerror}): choose one with --log-file"
        ) from error


def exec_in_foreground(config: MountConfig, command: Sequence[str] | None = None) -> None:
    """Replace this process by the daemon or its supervisor, which logs to standard error. Does not return."""
    command = command or program(config)
    os.dup2(memory_file(encode_document(config)), 0)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(command[0], list(command))


def start(config: MountConfig, command: Sequence[str] | None = None, *, startup_s: float | None = None) -> None:
    """Start the daemon and return when the mount answers, after ``startup_s`` (STARTUP_S, or STATE_S) at most.

    Raises ReportedError, MountError or ConfigError, and then no daemon is left."""
    command = command or program(config)
    startup_s = startup_s if startup_s is not None else STATE_S if config.immutable else STARTUP_S
    log_file = config.log_file or os.devnull
    document, log_descriptor = memory_file(encode_document(config)), open_log(log_file)
    answer_end, daemon_end = os.pipe()
    signals = _EndSignals()
    try:
        try:
            daemon = subprocess.Popen(
                [*command, "--ready-fd", str(daemon_end)],
                stdin=document,
                stdout=subprocess.DEVNULL,
                stderr=log_descriptor,
                pass_fds=[daemon_end],
                start_new_session=True,
            )
        finally:
            os.close(daemon_end)
            os.close(log_descriptor)
            os.close(document)
        try:
            signals.arm()
            deadline_s = time.monotonic() + startup_s + config.store.retry_timeout_s
            if startup_s > QUIET_S and not select.select([answer_end], [], [], QUIET_S)[0]:
                click.echo(f"waiting for the daemon; its log is {log_file}", err=True)
            answer = _wait_answer(answer_end, deadline_s)
            if answer is not None and answer.error:
                raise ReportedError(answer.error, answer.exit_code)
        except BaseException:
            _end(daemon)
            raise
        if answer is None:
            code = _end(daemon)
            raise MountError(f"the daemon ended without an answer (status {code}): see {log_file}")
        # The daemon outlives this process; without this, Popen warns that it still runs.
        daemon.returncode = 0
    finally:
        os.close(answer_end)
        signals.restore()


class _EndSignals:
    """SIGTERM and SIGHUP while a daemon starts, as from timeout(1) or systemd: the first one raises ReportedError, from
    `arm` on, so that the daemon is ended. Ignored ones stay so."""

    def __init__(self) -> None:
        self._received, self._is_armed = 0, False
        self._replaced = [each for each in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(each) is signal.SIG_DFL]
        for each in self._replaced:
            signal.signal(each, self._receive)

    def arm(self) -> None:
        """From now on there is a daemon to be ended. Raises ReportedError where a signal came before."""
        self._is_armed = True
        if self._received:
            self._raise()

    def restore(self) -> None:
        """Let the signals end this process again."""
        for each in self._replaced:
            signal.signal(each, signal.SIG_DFL)

    def _receive(self, number: int, _: object) -> None:
        self._received = self._received or number
        if self._is_armed:
            self._raise()

    def _raise(self) -> None:
        self._is_armed = False
        name = signal.Signals(self._received).name
        raise ReportedError(f"{name}: the daemon was stopped, and nothing is mounted", 128 + self._received)


def _wait_answer(descriptor: int, deadline_s: float) -> Answer | None:
    """The answer of the daemon, or None if it closed the pipe without one. Raises MountError at the deadline."""
    received = b""
    while b"\n" not in received and len(received) < ANSWER_BYTES_MAX:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not select.select([descriptor], [], [], left_s)[0]:
            raise MountError(
                "the daemon did not get ready in time and was stopped: see its log, and check that the store answers"
            )
        piece = os.read(descriptor, ANSWER_BYTES_MAX)
        if not piece:
            return None
        received += piece
    return msgspec.json.decode(received.partition(b"\n")[0], type=Answer)


def _end(daemon: subprocess.Popen[bytes]) -> int:
    """End the child, with SIGTERM and then SIGKILL; its exit status."""
    try:
        # A child that has answered with an error ends without a signal.
        return daemon.wait(1.0)
    except subprocess.TimeoutExpired:
        daemon.terminate()
    try:
        return daemon.wait(TERMINATE_S_MAX)
    except subprocess.TimeoutExpired:
        daemon.kill()
        return daemon.wait()
