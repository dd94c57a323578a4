"""Keeps a mount alive: `python -m lakefs_fuse.daemon.supervisor`, started by `lakefs-fuse mount` in the daemon's place.

It takes the same configuration on standard input and the same ``--ready-fd`` as the daemon, which is its child. It
forwards the answer of the first daemon, and ends if that one does not serve. A daemon that is killed or fails while its
mount exists is started again. The dead mount stays until the next daemon has opened the lake, so that programs get
ENOTCONN until then and do not mistake the underlying directory for the lake; then that daemon detaches it and mounts.
`RestartDelays` delays restarts after lives that end soon or never begin.

It ends when the daemon ends regularly, when a user detaches the mount, and after SIGTERM or SIGINT, which it forwards.
The daemon runs in a new session, so Ctrl-C in a terminal reaches it once, through the supervisor. SIGKILL of the
supervisor leaves the daemon serving, unsupervised. One thread: signals arrive through a wakeup descriptor, the end of
the daemon through a pidfd. Only one condition is polled: a daemon that was killed while it invalidated an entry, in a
directory that is locked by a rename that waits for this daemon, cannot end. Aborting its mount ends both. The
supervisor holds little memory and imports none of the layers that do.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from lakefs_fuse.config import MountConfig
from lakefs_fuse.control.mounts import abort, detach, mount_at
from lakefs_fuse.control.supervision import ANSWER_BYTES_MAX, Answer, Claim, memory_file, read_config
from lakefs_fuse.daemon import sd_notify as notify
from lakefs_fuse.daemon.logs import open_supervisor_log
from lakefs_fuse.environment import failpoints
from lakefs_fuse.errors import EXIT_FAILURE, MALFORMED, LakeError

SHORT_LIFE_S = 60.0
"""A shorter life counts as a consecutive failure; a longer one resets the count."""
PROMPT_RESTARTS = 5
"""Consecutive restarts without a delay."""
DELAY_S_MAX = 30.0
"""Maximum delay; later restarts wait 1, 2, 4, … seconds."""
STARTUP_S_MAX = 600.0
"""Time for a restarted daemon to serve, in addition to --retry-timeout."""
STOP_S_MAX = 5.0
"""Time for a daemon that does not serve yet to end after SIGTERM; then it is killed, which loses nothing."""
TOUCH_INTERVAL_S = 3600.0
"""Between two touches of the lock file. Distributions delete what is older than 10 days."""
DEATH_CHECK_S = 5.0
"""Interval of checks for a dying daemon. One that is still dying at the next check is held by the kernel."""

DAEMON: tuple[str, ...] = (sys.executable, "-P", "-m", "lakefs_fuse.daemon.mount_daemon")
"""-P: the working directory of the user is no place to import modules from."""

log = logging.getLogger("lakefs_fuse.daemon.supervisor")


@dataclass(frozen=True, slots=True)
class Life:
    """The life of one daemon. ``code`` is its exit code, or minus the signal that killed it."""

    served: bool
    code: int
    lasted_s: float
    answer: Answer | None = None
    device: str = ""
    """Of its mount, if it served."""

    def __str__(self) -> str:
        how = f"killed by {_signal_name(-self.code)}" if self.code < 0 else f"exit code {self.code}"
        error = f": {self.answer.error}" if self.answer is not None and self.answer.error else ""
        return f"{how}, {'served for' if self.served else 'did not serve within'} {self.lasted_s:.1f} s{error}"

    @property
    def may_not_have_detached(self) -> bool:
        """If the mount is gone, another process detached it: this daemon served, or reported that it did not."""
        return self.served or (self.answer is not None and not self.answer.detached)

    @property
    def is_over(self) -> bool:
        """It ended on purpose: unmounted and drained, whether or not everything could be stored."""
        return self.code == 0 or (self.served and self.code == EXIT_FAILURE)


class RestartDelays:
    """Delays between restarts, so that restarts never spin."""

    def __init__(self) -> None:
        self._short = 0

    def delay_s(self, life: Life) -> float:
        """Count ``life``, and return the delay before the next one."""
        self._short = 0 if life.served and life.lasted_s >= SHORT_LIFE_S else self._short + 1
        # A prompt attempt does not help a daemon that did not start: the store is away, or the disk full.
        late = self._short - (PROMPT_RESTARTS if life.served else 0)
        return 0.0 if late <= 0 else min(DELAY_S_MAX, 2.0 ** min(late - 1, 30))


class Signals:
    """SIGTERM, SIGINT and SIGHUP as a descriptor to wait on; an ignored SIGHUP stays ignored."""

    def __init__(self) -> None:
        self.receiving, self._sending = socket.socketpair()
        self._sending.setblocking(False)
        signal.set_wakeup_fd(self._sending.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, frame: None)

    def read(self) -> list[str]:
        """The names of received signals; call when `receiving` is readable."""
        return [_signal_name(number) for number in self.receiving.recv(64)]


class Supervisor:
    """Runs the daemon of one mount, and restarts it when it dies."""

    def __init__(
        self,
        config: MountConfig,
        ready_fd: int | None,
        *,
        command: Sequence[str] = DAEMON,
        signals: Signals,
        claim: Claim,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._ready_fd = ready_fd
        self._command = command
        self._signals = signals
        self._claim = claim
        self._clock = clock
        self._touched_s = clock()
        self._environment = _environment()
        self._document = memory_file(msgspec.json.encode(config))
        self._stopping = False

    def run(self) -> int:
        """Run daemons until one ends on purpose; its exit code, or EXIT_FAILURE if it was killed."""
        delays, restarts, device = RestartDelays(), 0, ""
        while True:
            life = self._live(restarts, device)
            device = life.device or device
            gone = bool(device) and not self._is_mounted(device)  # read once, because it may change at any moment
            if self._is_last(life, restarts, device, gone=gone):
                break
            if gone:
                # The daemon that failed or died had detached it, and not made the new one.
                device = ""
            delay_s = delays.delay_s(life)
            log.error("the daemon died (%s); starting it again in %g s", life, delay_s)
            notify.notify(f"STATUS=The daemon died ({life}); starting it again")
            if self._pause(delay_s):
                self._clear(device)
                break
            if device and not self._is_mounted(device):
                log.warning("%s was unmounted; the daemon is not started again", self._config.mountpoint)
                break
            restarts += 1
            # A failpoint, for tests, applies to the first life.
            self._environment.pop(failpoints.VARIABLE, None)
        return life.code if life.code >= 0 else EXIT_FAILURE

    def _is_last(self, life: Life, restarts: int, device: str, *, gone: bool) -> bool:
        if life.is_over or (restarts == 0 and not life.served):
            if life.code:
                log.error("the daemon ended (%s)", life)
                self._clear(device)
            return True
        if self._stopping:
            log.error("the daemon died while it was stopping (%s): mount again to store the remaining files", life)
            self._clear(device)
            return True
        if gone and life.may_not_have_detached:
            log.error(
                "the daemon died after its mount had ended (%s); bytes not in the store stay in %s: mount again",
                life,
                self._config.cache_dir,
            )
            return True
        return False

    def _live(self, restarts: int, device: str) -> Life:
        """Run one daemon to its end. ``device`` is that of the dead mount that it replaces, or empty."""
        began_s = self._clock()
        reading, writing = os.pipe()
        os.set_inheritable(writing, True)
        os.lseek(self._document, 0, os.SEEK_SET)
        arguments = [
            "--ready-fd",
            str(writing),
            "--restarts",
            str(restarts),
            *(["--replace", device] if device else []),
        ]
        try:
            pid = os.posix_spawn(
                self._command[0],
                [*self._command, *arguments],
                self._environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, self._document, 0)],
                setsid=True,
            )
        except OSError as error:
            os.close(reading)
            return Life(False, EXIT_FAILURE, 0.0, Answer(f"cannot be started: {error.strerror}"))
        finally:
            os.close(writing)
        pidfd = os.pidfd_open(pid)
        try:
            return self._follow(pid, pidfd, reading, began_s, is_first=restarts == 0)
        finally:
            os.close(pidfd)
            os.close(reading)

    def _follow(self, pid: int, pidfd: int, reading: int, began_s: float, *, is_first: bool) -> Life:
        """Wait for the end of a daemon; forward signals to it, and the answer of the first one to the command."""
        answer: Answer | None = None
        waiting_for: list[int | socket.socket] = [pidfd, self._signals.receiving, reading]
        # The command that waits for the first daemon keeps its time.
        deadline_s = float("inf") if is_first else began_s + STARTUP_S_MAX + self._config.store.retry_timeout_s
        device = ""
        was_dying = False
        while True:
            served = answer is not None and not answer.error
            left_s = DEATH_CHECK_S if served else min(DEATH_CHECK_S, max(0.0, deadline_s - self._clock()))
            ready, _, _ = select.select(waiting_for, [], [], left_s)
            if reading in ready:
                waiting_for.remove(reading)
                answer = self._read_answer(reading, pass_on=is_first)
                if answer is not None and not answer.error:
                    mounted = mount_at(self._config.mountpoint)
                    device = mounted.device if mounted is not None else "gone"
                    self._report_ready(pid, is_first=is_first)
                    continue
            if self._signals.receiving in ready:
                self._stop(pidfd)
                deadline_s = min(deadline_s, self._clock() + STOP_S_MAX)
            if pidfd in ready:
                break
            if not ready:
                self._touch_claim()
                dying = _is_dying(pid)
                if dying and was_dying:
                    self._cut_off(pid)
                was_dying = dying
            if not ready and not served and self._clock() >= deadline_s:
                log.error("the daemon (pid %d) does not get ready; killing it", pid)
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                deadline_s = float("inf")
        _, status = os.waitpid(pid, 0)
        code = os.waitstatus_to_exitcode(status)
        return Life(bool(device), code, self._clock() - began_s, answer, device)

    def _touch_claim(self) -> None:
        if self._clock() - self._touched_s >= TOUCH_INTERVAL_S:
            self._claim.touch()
            self._touched_s = self._clock()

    def _read_answer(self, reading: int, *, pass_on: bool) -> Answer | None:
        """The answer of a daemon; None where it closed the pipe without one, as a dying daemon does."""
        # One write of less than PIPE_BUF, or the first piece of a long message, which is good enough for the log.
        line = os.read(reading, ANSWER_BYTES_MAX)
        if pass_on and self._ready_fd is not None:
            try:
                os.write(self._ready_fd, line)
            except BrokenPipeError:
                pass  # The command that waited has given up.
            os.close(self._ready_fd)
            self._ready_fd = None
        if not line:
            return None
        try:
            return msgspec.json.decode(line.partition(b"\n")[0], type=Answer)
        except MALFORMED:
            return Answer("its answer makes no sense")

    def _report_ready(self, pid: int, *, is_first: bool) -> None:
        if not is_first:
            log.warning("the daemon serves again (pid %d)", pid)
        notify.notify(notify.READY, f"STATUS=Serving {self._config.store.source} (daemon pid {pid})")

    def _stop(self, pidfd: int) -> None:
        """Forward received signals: the daemon unmounts and drains; a second signal ends draining."""
        for name in self._signals.read():
            log.info("signal %s, passed on", name)
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            except ProcessLookupError:
                pass
        if not self._stopping:
            notify.notify(notify.STOPPING, "STATUS=Storing what is left")
        self._stopping = True

    def _pause(self, delay_s: float) -> bool:
        """Wait; returns whether a signal arrived."""
        if not select.select([self._signals.receiving], [], [], delay_s)[0]:
            return False
        log.info("signal %s while no daemon runs: ending", ", ".join(self._signals.read()))
        return True

    def _cut_off(self, pid: int) -> None:
        """Abort the connection of a killed daemon that the kernel holds in a request to the daemon itself."""
        mounted = mount_at(self._config.mountpoint)
        if mounted is None or not mounted.is_fuse:
            return
        log.error("the daemon (pid %d) was killed and cannot end: aborting the requests that wait for it", pid)
        try:
            abort(mounted)
        except (LakeError, subprocess.TimeoutExpired) as error:
            log.error("%s", error)

    def _is_mounted(self, device: str) -> bool:
        """Whether the mount with this device is the topmost one at the mountpoint."""
        mounted = mount_at(self._config.mountpoint)
        return mounted is not None and mounted.is_fuse and mounted.device == device

    def _clear(self, device: str) -> None:
        """Detach the dead mount, if it exists."""
        if not self._is_mounted(device):
            return
        try:
            detach(self._config.mountpoint, lazy=True)
        except LakeError as error:
            log.error("%s", error)


def _is_dying(pid: int) -> bool:
    """Whether a process was killed, or its first thread ended, and it still exists: proc_pid_status(5)."""
    try:
        with open(f"/proc/{pid}/status") as status:
            fields = dict(line.partition(":")[::2] for line in status)
    except OSError:
        return False
    pending = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
    return fields["State"].strip().startswith("Z") or bool(pending & 1 << (signal.SIGKILL - 1))


def _environment() -> dict[str, str]:
    """The environment of daemons: that of this process, without anything that depends on its directory."""
    environment = {**os.environ}
    # This process is the service; the daemon is a part of it.
    environment.pop(notify.VARIABLE, None)
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return environment


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a realtime signal
        return f"signal {number}"


def run(argv: Sequence[str], command: Sequence[str] = DAEMON) -> int:
    """Run the supervisor, and return the exit code. A failure before the first daemon is answered and printed."""
    parser = argparse.ArgumentParser(prog="lakefs_fuse.daemon.supervisor")
    parser.add_argument("--ready-fd", type=int)
    ready_fd: int | None = parser.parse_args(argv).ready_fd
    if ready_fd is not None:
        os.set_inheritable(ready_fd, False)
    signals = Signals()
    try:
        config = read_config(sys.stdin.buffer)
        claim = Claim(config.mountpoint)
        try:
            open_supervisor_log(config)
            supervisor = Supervisor(config, ready_fd, command=command, signals=signals, claim=claim)
            os.chdir("/")
            return supervisor.run()
        finally:
            claim.release()
    except LakeError as error:
        print(f"lakefs-fuse: {error}", file=sys.stderr)
        if ready_fd is not None:
            Answer(str(error), error.exit_code).send(ready_fd)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
