"""The supervisor as a program, with daemons that live and die as the test says, and no mount."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.config import MountConfig
from lakefs_fuse.control import runtime, supervision
from lakefs_fuse.control.supervision import Answer, Claim, supervisor_of
from lakefs_fuse.daemon.supervisor import DELAY_S_MAX, PROMPT_RESTARTS, SHORT_LIFE_S, Life, RestartDelays
from lakefs_fuse.errors import EXIT_CRASHED, EXIT_FAILURE, MountError
from tests.control.fakes import mount_config
from tests.mount.lakes import eventually

ROOT = Path(__file__).parents[2]

SUPERVISOR = """
import sys
from pathlib import Path
from lakefs_fuse.daemon import supervisor
from lakefs_fuse.control import runtime, supervision
from lakefs_fuse.control.mounts import Mount

directory = Path(sys.argv[1])
runtime.candidate_directories = lambda uid: [directory / "runtime"]
looks = []

def mount_at(point):
    looks.append((directory / "mounted").exists())
    if (directory / f"unmount-after-{len(looks)}").exists():
        (directory / "mounted").unlink()
    return Mount("/mnt/lake", "fuse.lakefs", "lake", 0, "0:99") if looks[-1] else None

supervisor.mount_at = mount_at
supervisor.detach = lambda point, lazy: (directory / "mounted").unlink()
hangs = "hangs" in (directory / "plan").read_text()
supervisor.STOP_S_MAX, supervisor.STARTUP_S_MAX = (0.5, 2.0) if hangs else (20.0, 20.0)
if (directory / "touches").exists():
    supervisor.DEATH_CHECK_S, supervisor.TOUCH_INTERVAL_S = 0.05, 0.1
sys.exit(supervisor.run(sys.argv[2:], [sys.executable, str(directory / "daemon.py")]))
"""

DAEMON = """
import argparse, os, signal, sys, time
from pathlib import Path

directory = Path(__file__).parent
parser = argparse.ArgumentParser()
parser.add_argument("--ready-fd", type=int)
parser.add_argument("--restarts", type=int)
parser.add_argument("--replace", default="")
given = parser.parse_args()
(directory / f"config-{given.restarts}").write_text(sys.stdin.read())
with (directory / "lives").open("a") as lives:
    print(time.monotonic(), given.replace or "-", os.environ.get("LAKEFS_FAILPOINT", "-"), file=lives)

def say(text):
    os.write(given.ready_fd, text.encode() + b"\\n")

def serve():
    (directory / "mounted").touch()
    say("{}")

plan = (directory / "plan").read_text().split()
match plan[min(given.restarts, len(plan) - 1)]:
    case "killed":
        serve()
        os.kill(os.getpid(), signal.SIGKILL)
    case "crashed":
        serve()
        sys.exit(70)
    case "unmounted":
        serve()
        (directory / "mounted").unlink()
        sys.exit(0)
    case "undrained":
        serve()
        (directory / "mounted").unlink()
        sys.exit(1)
    case "killed-while-draining":
        serve()
        time.sleep(0.3)
        (directory / "mounted").unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    case "refused":
        say('{"error": "the store is away", "exit_code": 2}')
        sys.exit(2)
    case "cannot-mount":
        (directory / "mounted").unlink()
        say('{"error": "no mount", "exit_code": 1, "detached": true}')
        sys.exit(1)
    case "mute":
        os._exit(7)
    case "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (directory / "hanging").touch()
        time.sleep(60)
    case "serves":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        serve()
        signal.sigwait({signal.SIGTERM})
        (directory / "mounted").unlink()
        sys.exit(0)
"""


class Supervised:
    """One supervisor at work."""

    def __init__(self, directory: Path, plan: str) -> None:
        self.directory = directory
        (directory / "plan").write_text(plan)
        (directory / "daemon.py").write_text(DAEMON)
        config = msgspec.structs.replace(mount_config("/mnt/lake"), log_file=str(directory / "log"))
        config = msgspec.structs.replace(config, store=msgspec.structs.replace(config.store, retry_timeout_s=0))
        self._answer, end = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(directory), "--ready-fd", str(end)],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=[end],
            cwd=directory,
            env={**os.environ, "PYTHONPATH": os.path.relpath(ROOT, directory), "LAKEFS_FAILPOINT": "publish.sent:99"},
        )
        os.close(end)
        self.config = config
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(config))
        self.process.stdin.close()

    def answer(self) -> bytes:
        """What whoever mounts is told."""
        return os.read(self._answer, 65536)

    def wait(self) -> int:
        return self.process.wait(30)

    def lives(self) -> list[tuple[float, str, str]]:
        """When each daemon began, what it was to replace, and its point of failure."""
        lines = (self.directory / "lives").read_text().splitlines()
        fields = [line.split() for line in lines]
        return [(float(began), replace, failpoint) for began, replace, failpoint in fields]

    def wait_for(self, text: str) -> None:
        eventually(lambda: text in self.log(), text)

    def log(self) -> str:
        return path.read_text() if (path := self.directory / "log").exists() else ""

    def is_mounted(self) -> bool:
        return (self.directory / "mounted").exists()

    def close(self) -> None:
        os.close(self._answer)
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(10)
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            assert b"Traceback" not in stream.read()


@pytest.fixture
def supervise(tmp_path: Path) -> Iterator[Callable[[str], Supervised]]:
    made: list[Supervised] = []

    def start(plan: str) -> Supervised:
        made.append(Supervised(tmp_path, plan))
        return made[-1]

    yield start
    for one in made:
        one.close()


def test_each_life_replaces_the_mount_of_the_last_with_the_same_configuration(
    supervise: Callable[[str], Supervised],
) -> None:
    supervised = supervise("killed crashed unmounted")
    assert supervised.answer() == b"{}\n"
    assert supervised.wait() == 0
    # The point at which to die is for the first one, or it would be a loop.
    assert [life[1:] for life in supervised.lives()] == [("-", "publish.sent:99"), ("0:99", "-"), ("0:99", "-")]
    for number in range(3):
        given = (supervised.directory / f"config-{number}").read_bytes()
        assert msgspec.json.decode(given, type=MountConfig) == supervised.config
    assert "the daemon died (killed by SIGKILL, served for" in supervised.log()
    assert f"the daemon died (exit code {EXIT_CRASHED}, served for" in supervised.log()


def test_a_crash_loop_gets_slower(supervise: Callable[[str], Supervised]) -> None:
    supervised = supervise("killed " * 7 + "unmounted")
    assert supervised.wait() == 0
    began = [life[0] for life in supervised.lives()]
    gaps = [later - sooner for sooner, later in itertools.pairwise(began)]
    assert len(gaps) == PROMPT_RESTARTS + 2
    assert gaps[PROMPT_RESTARTS] >= 1.0
    assert gaps[PROMPT_RESTARTS + 1] >= 2.0
    assert "starting it again in 2 s" in supervised.log()


def test_when_to_start_again() -> None:
    pace = RestartDelays()
    short, failed = Life(True, -9, 1.0), Life(False, 1, 1.0, Answer("the store is away"))
    delays = [pace.delay_s(short) for _ in range(PROMPT_RESTARTS + 8)]
    assert delays == [0.0] * PROMPT_RESTARTS + [1.0, 2.0, 4.0, 8.0, 16.0, DELAY_S_MAX, DELAY_S_MAX, DELAY_S_MAX]
    assert pace.delay_s(Life(True, -9, SHORT_LIFE_S)) == 0.0
    assert [pace.delay_s(failed) for _ in range(7)] == [1.0, 2.0, 4.0, 8.0, 16.0, DELAY_S_MAX, DELAY_S_MAX]
    assert [pace.delay_s(failed) for _ in range(2000)] == [DELAY_S_MAX] * 2000


@pytest.mark.parametrize(
    ("plan", "code", "answer"),
    [
        ("refused", 2, b'{"error": "the store is away", "exit_code": 2}\n'),
        ("mute", 7, b""),
        ("undrained", 1, b"{}\n"),
        ("killed-while-draining", EXIT_FAILURE, b"{}\n"),
    ],
)
def test_one_life_where_another_would_be_wrong(
    supervise: Callable[[str], Supervised], plan: str, code: int, answer: bytes
) -> None:
    supervised = supervise(plan)
    assert supervised.answer() == answer
    assert supervised.wait() == code
    assert len(supervised.lives()) == 1
    assert "starting it again" not in supervised.log()


def test_failing_to_start_again_is_tried_again_with_and_without_a_mount_to_replace(
    supervise: Callable[[str], Supervised],
) -> None:
    supervised = supervise("killed refused cannot-mount unmounted")
    assert supervised.wait() == 0
    assert [life[1] for life in supervised.lives()] == ["-", "0:99", "0:99", "-"]
    assert "did not serve within" in supervised.log()
    assert "the store is away" in supervised.log()


def test_a_life_that_never_serves_is_killed_and_followed(supervise: Callable[[str], Supervised]) -> None:
    supervised = supervise("killed hangs unmounted")
    assert supervised.wait() == 0
    assert len(supervised.lives()) == 3
    assert "does not get ready; killing it" in supervised.log()


def test_told_to_stop_between_two_lives(supervise: Callable[[str], Supervised]) -> None:
    supervised = supervise("killed refused refused refused refused refused")
    supervised.wait_for("starting it again in 4 s")
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == 2
    assert not supervised.is_mounted()
    assert len(supervised.lives()) == 3


def test_told_to_stop_while_a_daemon_starts(supervise: Callable[[str], Supervised]) -> None:
    supervised = supervise("hangs")
    eventually((supervised.directory / "hanging").exists, "it has begun")
    supervised.process.send_signal(signal.SIGINT)
    assert supervised.wait() == EXIT_FAILURE
    assert "signal SIGINT, passed on" in supervised.log()


def test_unmounted_between_two_lives(supervise: Callable[[str], Supervised]) -> None:
    supervised = supervise("killed refused refused refused")
    supervised.wait_for("starting it again in 4 s")
    (supervised.directory / "mounted").unlink()
    assert supervised.wait() == 2
    assert "was unmounted; the daemon is not started again" in supervised.log()


@pytest.mark.parametrize("looks", range(1, 6))
def test_unmounted_right_after_any_look_at_the_mount(
    supervise: Callable[[str], Supervised], tmp_path: Path, looks: int
) -> None:
    """It does not mount again what someone has unmounted."""
    (tmp_path / f"unmount-after-{looks}").touch()
    supervised = supervise("killed refused refused unmounted")
    assert supervised.wait() == (EXIT_FAILURE if looks <= 2 else 2)
    assert {life[1] for life in supervised.lives()[1:]} <= {"0:99"}
    assert "was unmounted" in supervised.log() or "after its mount had ended" in supervised.log()


def test_the_log_is_private_and_follows_rotation(supervise: Callable[[str], Supervised]) -> None:
    supervised = supervise("killed refused refused unmounted")
    supervised.wait_for("starting it again in 2 s")
    log = supervised.directory / "log"
    log.rename(supervised.directory / "log.1")
    assert supervised.wait() == 0
    assert "starting it again in 4 s" in log.read_text()
    assert log.stat().st_mode & 0o777 == 0o600


def test_supervisor_goes_on_without_its_log(supervise: Callable[[str], Supervised]) -> None:
    """The directory is gone, and a file is in its place, when there is something to say."""
    supervised = supervise("killed refused refused unmounted")
    supervised.wait_for("starting it again in 2 s")
    directory = supervised.directory
    (directory / "log").unlink()
    (directory / "log").mkdir()  # cannot be opened
    assert supervised.wait() == 0
    assert len(supervised.lives()) == 4


def test_one_supervisor_for_a_mountpoint(
    supervise: Callable[[str], Supervised], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "candidate_directories", lambda uid: [tmp_path / "runtime"])
    uid = os.geteuid()
    assert supervisor_of("/mnt/lake", uid) is None
    supervised = supervise("serves")
    assert supervised.answer() == b"{}\n"
    found = supervisor_of("/mnt/lake", uid)
    assert found is not None
    assert found.pid == supervised.process.pid
    with found:
        assert not found.wait(0)
        with pytest.raises(MountError, match=rf"has a supervisor \(pid {found.pid}\)"):
            Claim("/mnt/lake")
        Claim("/mnt/elsewhere").release()
        second = supervise("serves")
        assert b"has a supervisor" in second.answer()
        assert second.wait() == EXIT_FAILURE
        found.stop()
        assert found.wait(10)
        assert supervised.wait() == 0
        assert supervisor_of("/mnt/lake", uid) is None
        found.stop()
    # A lock file that a killed one left behind means nothing.
    pid = os.fork()
    if not pid:
        Claim("/mnt/lake")
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert supervisor_of("/mnt/lake", uid) is None
    Claim("/mnt/lake").release()


def test_supervisor_touches_its_lock_file(supervise: Callable[[str], Supervised], tmp_path: Path) -> None:
    """It stays where files of a certain age are deleted."""
    (tmp_path / "touches").touch()
    supervised = supervise("serves")
    assert supervised.answer() == b"{}\n"
    (lock,) = (tmp_path / "runtime").glob("*.lock")
    os.utime(lock, (0, 0))
    eventually(lambda: lock.stat().st_mtime > 0 and lock.stat().st_atime > 0, "touched")


def test_claim_that_is_held_in_another_pid_namespace_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel names no pid for it."""
    monkeypatch.setattr(runtime, "candidate_directories", lambda uid: [tmp_path / "runtime"])
    monkeypatch.setattr(supervision, "CLAIM_S_MAX", 0.0)

    def held(*_: object) -> None:
        raise BlockingIOError

    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(fcntl, "lockf", held)
        elsewhere.setattr(fcntl, "fcntl", lambda *_: struct.pack("hhqqi", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        with pytest.raises(MountError, match="in another PID namespace"):
            Claim("/mnt/lake")
    Claim("/mnt/lake").release()
