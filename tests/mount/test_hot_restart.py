"""Restarts of a supervised daemon: it is started again with a new mount, unless it was told to stop."""

from __future__ import annotations

import errno
import os
import select
import shutil
import signal
import socket
import subprocess
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from lakefs_fuse.errors import LakeError
from tests.mount import fork_server
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import CLI, Directory, Lake, eventually, file_lake, is_running, noise
from tests.mount.other_user import other_user

BACK_S_MAX = 30.0
"""A second or two, where nothing else runs on the machine."""
SUPERVISOR_BYTES_MAX = 32 << 20


def supervisor_of(lake: Lake) -> int:
    """The pid of the process that started the daemon of a lake. The parent of a daemon that has none is PID 1."""
    pid = psutil.Process(lake.pid).ppid()
    assert {"lakefs_fuse.daemon.supervisor", fork_server.__file__} & {*psutil.Process(pid).cmdline()}
    return int(pid)


@pytest.fixture
def supervised(make_lake: LakeMaker, request: pytest.FixtureRequest) -> Iterator[Lake]:
    """A mounted lake on a local directory, whose supervisor does not outlive the test; the parameter is the command."""
    lake = make_lake("file", "--supervise")
    lake.command = getattr(request, "param", lake.command)
    lake.mount()
    supervisor = psutil.Process(supervisor_of(lake))
    yield lake
    if supervisor.is_running():
        supervisor.terminate()
        supervisor.wait(20)


def die(lake: Lake, number: signal.Signals = signal.SIGKILL) -> None:
    """Kill the daemon and wait until it is gone; its supervisor hears of it at the same time."""
    pidfd = os.pidfd_open(lake.pid)
    try:
        signal.pidfd_send_signal(pidfd, number)
        assert select.select([pidfd], [], [], 10)[0]
    finally:
        os.close(pidfd)


def is_mounted(path: Path) -> bool:
    """A mount that is not dead, if perhaps another user's, which root may not look at."""
    try:
        os.statvfs(path)  # not from the kernel's cache, as the attributes of a dead mount may be
        return path.lstat().st_dev != path.parent.stat().st_dev
    except PermissionError:
        return True
    except OSError:
        return False


def serves(lake: Lake) -> bool:
    try:
        pid = lake.number("daemon.pid")
    except (LakeError, OSError):
        return False
    if not is_mounted(lake.path):  # it answers before it has taken the dead mount's place
        return False
    lake.pid = pid
    return True


def back(lake: Lake) -> None:
    """Wait until another daemon than that of ``lake.pid`` serves, which is the lake's from here on."""
    old = lake.pid
    eventually(lambda: serves(lake) and lake.pid != old, "the mount is back", BACK_S_MAX)


def answer(path: Path) -> str:
    """What listing a directory gives now: names, or the name of an error."""
    try:
        return ",".join(sorted(os.listdir(path)))
    except OSError as error:
        return errno.errorcode[error.errno or 0]


@contextmanager
def store_away(lake: Lake) -> Iterator[Callable[[], None]]:
    """The directory that is the store is not there until the end, or until what this yields is called."""
    assert isinstance(lake.outside, Directory)
    root = lake.outside.root
    elsewhere = root.with_name("elsewhere")
    root.rename(elsewhere)

    def come_back() -> None:
        if elsewhere.exists():
            elsewhere.rename(root)

    try:
        yield come_back
    finally:
        come_back()


def test_a_killed_daemon_is_back_and_nothing_but_errors_was_seen_meanwhile(supervised: Lake) -> None:
    files = {f"f{number}": noise(10_000, number) for number in range(5)}
    for name, data in files.items():
        (supervised.path / name).write_bytes(data)
    assert supervised.number("daemon.restarts") == 0
    supervisor = supervisor_of(supervised)
    old = supervised.pid
    die(supervised)
    began = time.monotonic()
    seen: list[str] = []
    while not seen or seen[-1] != ",".join(files):
        assert time.monotonic() - began < BACK_S_MAX
        if (now := answer(supervised.path)) not in seen:
            seen.append(now)
    # For some milliseconds between two system calls the empty directory beneath may be seen, see SEMANTICS.
    assert set(seen) <= {"ECONNABORTED", "ENOTCONN", "", ",".join(files)}
    assert "ENOTCONN" in seen
    back(supervised)
    assert {path.name: path.read_bytes() for path in supervised.path.iterdir()} == files
    assert supervised.number("daemon.restarts") == 1
    assert supervisor_of(supervised) == supervisor
    assert not psutil.pid_exists(old), "nobody is left a zombie"
    die(supervised, signal.SIGSEGV)
    back(supervised)
    assert supervised.number("daemon.restarts") == 2
    (supervised.path / "new").write_bytes(b"written to the third daemon")
    assert supervised.outside.read("new") == b"written to the third daemon"
    assert "the daemon died (killed by SIGKILL, served for" in supervised.log()
    assert "the daemon died (killed by SIGSEGV" in supervised.log()


def test_what_open_files_see(supervised: Lake) -> None:
    """The table of "After a crash" in docs/SEMANTICS.md."""
    data = noise(300_000)
    (supervised.path / "dir").mkdir()
    (supervised.path / "read").write_bytes(data)
    reader = os.open(supervised.path / "read", os.O_RDONLY)
    cached = os.pread(reader, 4096, 0)
    os.posix_fadvise(reader, 65536, 0, os.POSIX_FADV_DONTNEED)
    writer = os.open(supervised.path / "written", os.O_RDWR | os.O_CREAT)
    os.write(writer, b"not closed yet")
    directory = os.open(supervised.path / "dir", os.O_RDONLY)
    die(supervised)
    back(supervised)
    assert os.pread(reader, 4096, 0) == cached, "pages that are in memory"
    calls: dict[str, Callable[[], object]] = {
        "read": lambda: os.pread(reader, 4096, 200_000),
        "list": lambda: os.listdir(directory),
        "open in it": lambda: os.open("x", os.O_RDONLY | os.O_CREAT, dir_fd=directory),
        "fsync": lambda: os.fsync(writer),
        "close": lambda: os.close(writer),
    }
    for name, call in calls.items():
        with pytest.raises(OSError) as raised:
            call()
        assert raised.value.errno == errno.ENOTCONN, name
    os.close(directory)
    with pytest.raises(OSError):
        os.close(reader)
    # Opening the path again works, and what was never closed is an orphan.
    assert (supervised.path / "read").read_bytes() == data
    assert not (supervised.path / "written").exists()
    assert ("written", "orphan") in [(file["path"], file["state"]) for file in supervised.unfinished()]


@pytest.mark.long  # vfs/test_replay.py shows it
def test_what_was_accepted_is_there_in_the_next_life(make_lake: LakeMaker) -> None:
    """The first daemon dies when the third file is accepted and close() has not returned; uploads wait until umount."""
    lake = make_lake("file", "--supervise", "--durability", "writeback", "--writeback-delay", "1h")
    lake.env["LAKEFS_FAILPOINT"] = "accept.recorded:3"
    lake.mount()
    files = {f"f{number}": noise(5000, number) for number in range(3)}
    for name in ("f0", "f1"):
        (lake.path / name).write_bytes(files[name])
    with pytest.raises(OSError) as raised:
        (lake.path / "f2").write_bytes(files["f2"])
    assert raised.value.errno in (errno.ECONNABORTED, errno.ENOTCONN)
    back(lake)
    assert {path.name: path.read_bytes() for path in lake.path.iterdir()} == files
    (lake.path / "f3").write_bytes(b"the point at which to die was for the first life")
    lake.umount()
    lake.env.pop("LAKEFS_FAILPOINT")
    shutil.rmtree(lake.cache_dir)
    lake.mount()
    assert {name: (lake.path / name).read_bytes() for name in files} == files
    lake.umount()


@pytest.mark.parametrize("supervised", [[*CLI]], indirect=True, ids=["started"])
def test_umount_ends_both(supervised: Lake) -> None:
    supervisor, daemon = supervisor_of(supervised), supervised.pid
    assert psutil.Process(supervisor).memory_info().rss < SUPERVISOR_BYTES_MAX
    supervised.umount()
    assert not is_running(supervisor)
    assert not is_running(daemon)
    assert supervised.mount().number("daemon.restarts") == 0
    supervisor = supervisor_of(supervised)
    subprocess.run(["fusermount3", "-u", str(supervised.path)], check=True)
    eventually(lambda: not is_running(supervisor), "plain unmounting ends both, too")
    assert not is_running(supervised.pid)
    assert "starting it again" not in supervised.log()


def test_a_supervisor_that_is_killed_leaves_the_daemon_serving(supervised: Lake) -> None:
    supervisor = psutil.Process(supervisor_of(supervised))
    supervisor.kill()
    eventually(lambda: not is_running(supervisor.pid), "the supervisor is gone")
    (supervised.path / "file").write_text("still here")
    assert supervised.outside.read("file") == b"still here"
    daemon = supervised.pid
    supervised.umount()
    assert not is_running(daemon)
    supervised.mount()
    assert supervisor_of(supervised) != supervisor.pid


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_signals_to_the_supervisor_unmount(supervised: Lake, number: signal.Signals) -> None:
    supervisor = supervisor_of(supervised)
    os.kill(supervisor, number)
    eventually(lambda: not is_running(supervisor), "the supervisor ends")
    assert not is_running(supervised.pid)
    assert not os.path.ismount(supervised.path)
    assert supervised.log().rstrip().endswith("lakefs_fuse.daemon.mount_daemon: closed")


def test_while_the_store_is_away_it_is_tried_again(supervised: Lake) -> None:
    (supervised.path / "file").write_text("here")
    with store_away(supervised) as come_back:
        die(supervised)
        eventually(lambda: "did not serve" in supervised.log(), "it could not start")
        assert answer(supervised.path) == "ENOTCONN", "not the directory beneath"
        told = supervised.cli("stats", str(supervised.path))
        assert told.returncode == 1
        assert "is being started again" in told.stderr
        again = supervised.try_mount()
        assert again.returncode == 1
        come_back()
        back(supervised)
    assert (supervised.path / "file").read_text() == "here"
    assert supervised.number("daemon.restarts") >= 2
    supervised.umount()


OPTIONS = {"umount": ["--timeout", "2s"], "lazy": ["--lazy"], "waits": []}


@pytest.mark.parametrize(
    "how", ["umount", *(pytest.param(how, marks=pytest.mark.long) for how in ("lazy", "waits", "plainly"))]
)
def test_unmounting_between_two_lives(supervised: Lake, how: str) -> None:
    (supervised.path / "file").write_text("here")
    supervisor = supervisor_of(supervised)
    with store_away(supervised) as come_back:
        die(supervised)
        if how == "plainly":
            subprocess.run(["fusermount3", "-u", "-z", str(supervised.path)], check=True)
        else:
            eventually(lambda: "did not serve" in supervised.log(), "it could not start")
            if how == "waits":
                come_back()
            done = supervised.cli("umount", str(supervised.path), *OPTIONS[how])
            # Without a daemon nobody can say that everything is stored.
            assert (done.returncode, "mount again" in done.stderr) == {
                "umount": (1, True), "lazy": (0, True), "waits": (0, False),
            }[how]  # fmt: skip
        eventually(lambda: not is_running(supervisor), "the supervisor ends")
    assert not os.path.ismount(supervised.path)
    assert answer(supervised.path) == ""
    supervised.mount()
    assert (supervised.path / "file").read_text() == "here"
    supervised.umount()


@pytest.mark.long
def test_an_ordinary_users_mount_comes_back_too(dev_fuse: Path) -> None:
    with other_user() as user:
        directory = user.directory / "lake-supervised"
        directory.mkdir()
        with file_lake(directory, "--supervise") as lake:
            lake.command, lake.env = user.command, user.env
            user.own(directory)
            lake.mount()
            supervisor = supervisor_of(lake)
            assert psutil.Process(supervisor).uids().real == user.uid
            assert user.sh("echo hello > file", lake.path).returncode == 0
            die(lake)
            back(lake)
            assert user.sh("cat file", lake.path).stdout == "hello\n"
            lake.umount()
            assert not is_running(supervisor)
        shutil.rmtree(directory)


@pytest.mark.long  # daemon/test_supervisor.py shows it
def test_a_daemon_that_fails_by_itself_is_started_again(make_lake: LakeMaker, tmp_path: Path) -> None:
    """An error that nobody caught, in a task beside the requests, in the first daemon only."""
    lake = make_lake("file", "--supervise")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        textwrap.dedent(f"""
            import os, sys
            if "lakefs_fuse.daemon.mount_daemon" in sys.orig_argv and sys.orig_argv[-2:] == ["--restarts", "0"]:
                import trio
                from lakefs_fuse.kernel.invalidation import Invalidations
                async def fail(self):
                    while not os.path.exists({str(tmp_path / "fail")!r}):
                        await trio.sleep(0.02)
                    raise RuntimeError("a bug")
                Invalidations.run = fail
        """)
    )
    given = lake.env.get("PYTHONPATH") or os.getcwd()
    lake.env["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "site"), os.path.abspath(given)])
    lake.mount()
    supervisor = supervisor_of(lake)
    (lake.path / "file").write_text("here")
    (tmp_path / "fail").touch()
    old = lake.pid
    eventually(lambda: not is_running(old), "the daemon fails")
    back(lake)
    assert (lake.path / "file").read_text() == "here"
    assert lake.number("daemon.restarts") == 1
    assert "the daemon died (exit code 70, served for" in lake.log()
    assert "RuntimeError: a bug" in lake.log()
    lake.umount()
    assert not is_running(supervisor)
    lake.log_file.unlink()  # It holds the traceback that this was about.


class Systemd:
    """The end of a notification socket that a service manager reads."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(path))
        self.socket.settimeout(20)
        self.path = path

    def expect(self, assignment: str) -> None:
        """Read until a message holds a line that begins with this."""
        while not any(line.startswith(assignment) for line in self.socket.recv(4096).decode().splitlines()):
            pass


@pytest.mark.parametrize("mode", ["--supervise", pytest.param("--no-supervise", marks=pytest.mark.long)])
def test_in_the_foreground_a_service_manager_is_told(make_lake: LakeMaker, tmp_path: Path, mode: str) -> None:
    lake = make_lake("file")
    systemd = Systemd(tmp_path / "notify")
    arguments = ["mount", lake.source, str(lake.path), "--cache-dir", str(lake.cache_dir), "--free-space", "64M"]
    service = subprocess.Popen(
        [*lake.command, *arguments, "--foreground", mode],
        stderr=subprocess.PIPE,
        text=True,
        env={**lake.env, "NOTIFY_SOCKET": str(systemd.path)},
    )
    with systemd.socket, service:
        systemd.expect("READY=1")
        assert serves(lake)
        (lake.path / "file").write_text("here")
        if mode == "--supervise":
            assert psutil.Process(lake.pid).ppid() == service.pid
            assert "NOTIFY_SOCKET" not in psutil.Process(lake.pid).environ()
            die(lake)
            systemd.expect("STATUS=The daemon died (killed by SIGKILL")
            systemd.expect("READY=1")
            assert (lake.path / "file").read_text() == "here"
            assert serves(lake)
            # systemd signals all processes of a mount unit, not only the main one: the daemon hears it twice.
            os.kill(lake.pid, signal.SIGTERM)
        else:
            assert lake.pid == service.pid
        service.send_signal(signal.SIGTERM)
        if mode == "--supervise":
            systemd.expect("STOPPING=1")
        _, log = service.communicate(timeout=30)
    assert service.returncode == 0, log
    assert "unmounted" in log
    assert not os.path.ismount(lake.path)
    lake.pid = 0
