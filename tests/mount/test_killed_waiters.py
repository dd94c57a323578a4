"""Programs that wait for a store that does not answer: they can be killed, and what they asked for ends as a whole."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from tests.faults import Faults, faulty
from tests.mount.lakes import Lake, eventually, s3_lake
from tests.mount.writeback_lakes import FOR_EVER
from tests.servers import Server, StoppableStore, make_bucket

RETRY_S = "60"
OPTIONS = ("--durability", "close", "--retry-timeout", RETRY_S)
END_S_MAX = 20.0
"""For all programs of a test to end, on a busy machine. Without the signal each waits for longer than RETRY_S."""
CALLS: dict[str, str] = {
    "stat": "os.stat('absent')",
    "ls": "os.listdir('sub')",
    "open": "open('a', 'rb')",
    "read": "open('a', 'rb').read()",
    "write": "open('a', 'r+b')",
    "mkdir": "os.mkdir('new')",
    "rmdir": "os.rmdir('sub')",
    "rename": "os.rename('a', 'b')",
    "unlink": "os.unlink('b')",
    "touch": "os.close(os.open('new', os.O_WRONLY | os.O_CREAT | os.O_EXCL))",
    "chmod": "os.chmod('a', 0o600)",
    "symlink": "os.symlink('a', 'new')",
    "setxattr": "os.setxattr('a', 'user.x', b'1')",
    "fsync": "os.fsync(held)",
    "close": "os.close(held)",
}
"""What programs do, each in a directory of its own, in which `held` is a file with one unwritten byte."""
NEED_NAMES = ("stat", "ls", "open", "read", "unlink")
"""Calls that do not wait if the names are known."""
PROGRAM = """
import os, signal, sys
os.chdir(sys.argv[1])
held = os.open('held', os.O_RDWR | os.O_CREAT)
os.write(held, b'1')
print('ready', flush=True)
sys.stdin.readline()
exec(sys.argv[2])
print('returned', flush=True)
"""


class Programs:
    """Programs that make one call each when they are told to."""

    def __init__(self, lake: Lake, stack: ExitStack) -> None:
        self._lake, self._stack = lake, stack
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, call: str) -> subprocess.Popen[str]:
        """Start a program in the directory of this name."""
        command = [sys.executable, "-c", PROGRAM, str(self._lake.path / name), call]
        pipe = subprocess.PIPE
        program = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        self._stack.callback(self._end, program)
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        self.running[name] = program
        return program

    @staticmethod
    def _end(program: subprocess.Popen[str]) -> None:
        program.kill()
        program.communicate()

    def call(self) -> None:
        """Have all of them make their call; returns when each waits for the daemon."""
        for program in self.running.values():
            assert program.stdin is not None
            program.stdin.write("\n")
            program.stdin.flush()
        eventually(lambda: all(map(waits, self.running.values())), "all programs wait")

    def left(self) -> list[str]:
        return [name for name, program in self.running.items() if program.poll() is None]

    def wait_ended(self) -> None:
        try:
            eventually(lambda: not self.left(), "all end", END_S_MAX)
        except AssertionError as error:
            raise AssertionError(f"{self.left()} are left") from error


def waits(program: subprocess.Popen[str]) -> bool:
    """Whether a program waits for the reply to a request."""
    return program.poll() is None and "request_wait_answer" in Path(f"/proc/{program.pid}/wchan").read_text()


def has(path: Path, content: bytes | None) -> bool:
    """Whether a file has this content; None: there is no file."""
    return not path.exists() if content is None else path.is_file() and path.read_bytes() == content


@pytest.fixture
def lake(dev_fuse: Path, stoppable: StoppableStore, tmp_path: Path, with_hooks: None) -> Iterator[Lake]:
    """A mounted lake with a directory for each call, of which nothing is known here."""
    make_bucket(stoppable.server, "waits")
    with s3_lake(stoppable.server, "waits", tmp_path / "lake", *OPTIONS) as lake:
        lake.mount()
        for name in CALLS:
            (lake.path / name / "sub").mkdir(parents=True)
            for file in ("a", "b"):
                (lake.path / name / file).write_bytes(b"content")
        lake.sync()
        yield lake.remount(empty_cache=True)


@pytest.fixture
def programs(lake: Lake) -> Iterator[Programs]:
    with ExitStack() as stack:
        yield Programs(lake, stack)


@pytest.mark.parametrize(("number", "known"), [(signal.SIGKILL, False), (signal.SIGINT, False), (signal.SIGKILL, True)])
def test_program_that_waits_for_a_silent_store_can_be_killed(
    lake: Lake, programs: Programs, stoppable: StoppableStore, number: signal.Signals, known: bool
) -> None:
    """It waits for the names in its directory or, if they are known, for what it wants to do with them."""
    for name, call in CALLS.items():
        if not known or name not in NEED_NAMES:
            programs.start(name, call)
            for file in ("a", "b", "sub") if known else ():
                assert (lake.path / name / file).exists()
    with stoppable.silent():
        programs.call()
        for program in programs.running.values():
            program.send_signal(number)
        programs.wait_ended()
        assert {program.returncode for program in programs.running.values()} == {-number}
    assert lake.number("kernel.interrupted") >= len(programs.running)
    eventually(lambda: lake.number("files.in_use") == 0, "no handle is left", 60)
    for name in programs.running:
        listed = {path.name for path in (lake.path / name).iterdir()}
        assert {file for file in ("held", "new", "a", "b", "sub") if (lake.path / name / file).exists()} == listed
        assert listed >= ({"held"} if name in ("rename", "unlink", "rmdir") else {"held", "a", "b", "sub"})
    (lake.path / "after").write_bytes(b"the mount works")
    lake.sync()
    lake.umount()
    assert lake.outside.read("after") == b"the mount works"


@pytest.fixture
def held_back(dev_fuse: Path, seaweed: Server, tmp_path: Path, with_hooks: None) -> Iterator[tuple[Lake, Faults]]:
    """A mounted lake on a store that can hold back what is sent to it."""
    bucket = f"waits-{random.SystemRandom().getrandbits(48):012x}"
    make_bucket(seaweed, bucket)
    with faulty(seaweed) as (proxied, faults):
        with s3_lake(seaweed, bucket, tmp_path / "lake", *OPTIONS, through=proxied) as lake:
            try:
                yield lake.mount(), faults
            finally:
                faults.clear()


CHANGES: dict[str, tuple[str, dict[str, bytes | None]]] = {
    "file": ("os.rename('a', 'b')", {"a": None, "b": b"a"}),
    "directory": ("os.rename('sub', 'new')", {"sub": None, "new/below": b"below"}),
    "link": ("os.link('a', 'new')", {"a": b"a", "new": b"a"}),
    "mknod": ("os.mknod('new')", {"new": b""}),
    "fsync": ("os.fsync(held)", {"held": b"1"}),
    "close": ("os.close(held)", {"held": b"1"}),
}
"""What programs do, and files afterwards."""


def test_change_of_a_killed_program_takes_effect_as_a_whole(held_back: tuple[Lake, Faults]) -> None:
    """Its names are up to date then, whatever the kernel knew of them, and what follows in its directory waits."""
    lake, faults = held_back
    for name in CHANGES:
        (lake.path / name / "sub").mkdir(parents=True)
        for file in ("a", "b", "sub/below"):
            (lake.path / name / file).write_bytes(file.rpartition("/")[2].encode())
    lake.sync()
    with ExitStack() as stack:
        programs = Programs(lake, stack)
        for name, (call, _) in CHANGES.items():
            programs.start(name, call)
            for file in ("a", "b", "new", "sub", "sub/below", "."):
                (lake.path / name / file).exists()
            list((lake.path / name).iterdir())
        faults.hang(FOR_EVER, method="PUT")
        programs.call()
        for program in programs.running.values():
            program.kill()
        programs.wait_ended()
        assert (lake.path / "file" / "a").read_bytes() == b"a"
        assert not (lake.path / "link" / "new").exists()
        follows = subprocess.Popen(["mkdir", str(lake.path / "file" / "new")])
        stack.callback(follows.wait)
        elsewhere = subprocess.run(["mkdir", str(lake.path / "elsewhere")], timeout=END_S_MAX, check=True)
        assert elsewhere.returncode == 0
        assert follows.poll() is None
        faults.clear()
        assert follows.wait(60) == 0
    for name, (_, files) in CHANGES.items():
        for file, content in files.items():
            eventually(partial(has, lake.path / name / file, content), f"{name}: {file}")
    assert (lake.path / "file" / "new").is_dir()
    eventually(lambda: lake.number("files.in_use") == 0, "no handle is left")
    lake.umount()


WRITER = """
import os, sys, time
for number in range(int(sys.argv[2])):
    os.write(os.open(os.path.join(sys.argv[1], str(number)), os.O_WRONLY | os.O_CREAT), b"1")
print("ready", flush=True)
time.sleep(600)
"""


def test_killed_program_does_not_wait_for_each_of_its_open_files(held_back: tuple[Lake, Faults]) -> None:
    lake, faults = held_back
    count = 40
    command = [sys.executable, "-c", WRITER, str(lake.path), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer:
        try:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
            faults.hang(FOR_EVER, method="PUT")
        finally:
            writer.kill()
        assert writer.wait(END_S_MAX) == -signal.SIGKILL
    assert lake.number("kernel.interrupted") == count
    faults.clear()
    eventually(lambda: lake.number("files.in_use") == 0, "all files are stored")
    lake.sync()
    assert {path.name for path in lake.path.iterdir()} == {str(number) for number in range(count)}


HANDLER = """
import os, signal, subprocess, sys
handled = []
for number in (signal.SIGALRM, signal.SIGCHLD, signal.SIGURG, signal.SIGTERM):
    signal.signal(number, lambda number, _: handled.append(number))
path = sys.argv[1]
held = os.open(path, os.O_WRONLY | os.O_CREAT)
os.write(held, b"1")
child = subprocess.Popen(["sleep", "1"])
print("ready", flush=True)
sys.stdin.readline()
signal.setitimer(signal.ITIMER_REAL, 0.5, 0.01)
os.fsync(held)
os.close(held)
signal.setitimer(signal.ITIMER_REAL, 0)
print(*sorted(set(handled)), flush=True)
"""


def test_signals_that_a_program_handles_do_not_disturb_it(held_back: tuple[Lake, Faults]) -> None:
    """Timers, child processes, the preemption of Go, and a job that ends in its own way."""
    lake, faults = held_back
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", HANDLER, str(lake.path / "file")], stdin=pipe, stdout=pipe, text=True
    ) as program:
        assert program.stdin is not None
        assert program.stdout is not None
        try:
            assert program.stdout.readline() == "ready\n"
            faults.hang(FOR_EVER, method="PUT")
            program.stdin.write("\n")
            program.stdin.flush()
            eventually(lambda: waits(program), "the program waits")
            for _ in range(4):
                program.send_signal(signal.SIGURG)
                program.send_signal(signal.SIGTERM)
                time.sleep(1)
            assert program.poll() is None
            assert lake.number("kernel.interrupted") == 0
            faults.clear()
            sent = {signal.SIGALRM, signal.SIGCHLD, signal.SIGURG, signal.SIGTERM}
            assert {int(number) for number in program.stdout.readline().split()} == sent
            assert program.wait(60) == 0
        finally:
            program.kill()


CTRL_C = """
import os, sys
print("ready", flush=True)
try:
    os.stat(sys.argv[1])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_python_program_gets_keyboard_interrupt(lake: Lake, stoppable: StoppableStore) -> None:
    path = lake.path / "stat" / "absent"
    with stoppable.silent():
        with subprocess.Popen([sys.executable, "-c", CTRL_C, str(path)], stdout=subprocess.PIPE, text=True) as program:
            eventually(lambda: waits(program), "the program waits")
            program.send_signal(signal.SIGINT)
            assert program.communicate(timeout=END_S_MAX)[0].split() == ["ready", "interrupted"]
