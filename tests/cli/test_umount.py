"""`umount`, `flush`, `orphans` and `stats` on real FUSE mounts (rclone's) with a real control server beside them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from lakefs_fuse.cli import daemons, run, umount
from lakefs_fuse.cli.daemons import connect_to_owner, follow
from lakefs_fuse.control import protocol, runtime
from lakefs_fuse.control.client import ControlClient
from lakefs_fuse.control.mounts import Mount, mount_at
from lakefs_fuse.errors import LakeError
from lakefs_fuse.product import FUSE_TYPE

SERVER = """
import json, sys
from pathlib import Path
import trio
from lakefs_fuse.control.server import serve_control
from tests.control.fakes import FakeFile, FakeFilesystem, make_server

socket, mountpoint, rclone, arguments = sys.argv[1:5]
arguments = json.loads(arguments)
late = arguments.pop("late", "")
fs = FakeFilesystem([FakeFile(**file) for file in arguments.pop("files", [])], **arguments)

async def main():
    server = make_server(fs, mountpoint)
    async with serve_control(server, Path(socket)):
        print("serving", flush=True)
        while rclone in Path("/proc/self/mountinfo").read_text():
            await trio.sleep(0.02)
        if late:
            fs.files.append(FakeFile("9", "late", state="failed", error=late))
        await server.end(late)

trio.run(main)
"""


@dataclass
class Mounted:
    """A FUSE mount, its own daemon, and the process that answers on its control socket."""

    point: Path
    rclone: subprocess.Popen[bytes]
    control: subprocess.Popen[bytes] | None = None


@pytest.fixture
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "runtime"
    monkeypatch.setattr(runtime, "candidate_directories", lambda uid: [directory])
    return directory


def is_mounted(point: Path) -> bool:
    return mount_at(str(point)) is not None


@pytest.fixture
def fuse(tmp_path: Path, runtime_dir: Path) -> Iterator[Mounted]:
    """A directory mounted through FUSE by a program that is not ours."""
    for name in ("data", "mnt"):
        (tmp_path / name).mkdir()
    (tmp_path / "data" / "file").write_text("hello")
    program = shutil.which("rclone") or str(Path(sys.executable).parent / "rclone")
    rclone = subprocess.Popen(
        [program, "mount", "--config", "", "--cache-dir", tmp_path / "cache", tmp_path / "data", tmp_path / "mnt"]
    )
    mounted = Mounted(tmp_path / "mnt", rclone)
    deadline_s = time.monotonic() + 20
    while not is_mounted(mounted.point) and rclone.poll() is None and time.monotonic() < deadline_s:
        time.sleep(0.02)
    try:
        assert (mounted.point / "file").read_text() == "hello"
        yield mounted
    finally:
        if is_mounted(mounted.point):
            subprocess.run(["fusermount3", "-u", "-z", mounted.point], check=True)
        for process in filter(None, (mounted.control, rclone)):
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def daemon(fuse: Mounted) -> Callable[..., Mounted]:
    """Puts a control server beside the mount: a process that ends when the mount is gone, as ours does."""

    def start(**arguments: object) -> Mounted:
        path = runtime.server_socket_path(str(fuse.point))
        fuse.control = subprocess.Popen(
            [sys.executable, "-c", SERVER, path, fuse.point, fuse.point, msgspec.json.encode(arguments).decode()],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert fuse.control.stdout is not None
        assert fuse.control.stdout.readline() == b"serving\n"
        return fuse

    return start


DIRTY = {"id": "1", "path": "ckpt/model.pt", "bytes": 5000}
ORPHAN = {"id": "77", "path": "old.bin", "state": "orphan"}


def test_umount_makes_durable_and_waits_for_the_daemon(
    daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]
) -> None:
    mounted = daemon(files=[DIRTY, ORPHAN])
    assert run(["umount", str(mounted.point)]) == 0
    assert not is_mounted(mounted.point)
    assert mounted.control is not None
    assert mounted.control.wait(0) == 0
    assert capsys.readouterr() == ("", "")


def test_umount_that_cannot_store_says_which_and_why_and_stays(
    daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]
) -> None:
    mounted = daemon(files=[DIRTY], refuse="access denied")
    assert run(["umount", str(mounted.point)]) == 1
    assert is_mounted(mounted.point)
    error = capsys.readouterr().err
    assert "ckpt/model.pt: failed, 0 B of 4.9 KiB stored, 1 s old: access denied" in error
    assert "stays mounted" in error

    assert run(["umount", "--lazy", str(mounted.point)]) == 0
    assert not is_mounted(mounted.point)
    assert "the bytes stay in staging" in capsys.readouterr().err


def test_umount_gives_up_at_its_timeout(daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]) -> None:
    mounted = daemon(files=[DIRTY], step=0)
    assert run(["umount", "--timeout", "300ms", str(mounted.point)]) == 1
    assert is_mounted(mounted.point)
    assert "takes longer than --timeout allows: 1 file is left; raise it or retry" in capsys.readouterr().err


def test_timeout_without_files_left_names_no_count(tmp_path: Path) -> None:
    """Names may be what is left, or nothing that is counted yet."""
    replies = iter([protocol.Progress(bytes_done=0, bytes_total=0, files_left=0)])
    with pytest.raises(LakeError, match=r"^storing x takes longer than --timeout allows; raise it or retry$"):
        follow(replies, what="storing x", deadline_s=0.0, mountpoint=str(tmp_path))


def test_umount_says_why_it_gives_up(daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]) -> None:
    mounted = daemon(files=[{**DIRTY, "error": "put 'model.pt': the store is away"}], step=0)
    assert run(["umount", "--timeout", "300ms", str(mounted.point)]) == 1
    error = capsys.readouterr().err
    assert "1 file is left, because put 'model.pt': the store is away; raise it or retry" in error
    assert f"{mounted.point} stays mounted" in error


def test_lazy_does_not_wait_an_hour_for_a_store_that_is_away(
    daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert umount.LAZY_TIMEOUT_S <= 10
    monkeypatch.setattr(umount, "LAZY_TIMEOUT_S", 0.3)
    mounted = daemon(files=[DIRTY], step=0)
    began_s = time.monotonic()
    run(["umount", "--lazy", str(mounted.point)])
    assert time.monotonic() - began_s < 60
    assert not is_mounted(mounted.point)
    assert "the bytes stay in staging" in capsys.readouterr().err


def test_lazy_umount_of_a_mount_whose_daemon_hangs_detaches_it(
    daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted = daemon(files=[DIRTY])
    assert mounted.control is not None

    def impatient(point: str, mount: Mount | None, **_: object) -> ControlClient | None:
        return connect_to_owner(point, mount, silence_s_max=0.3)

    for module in (daemons, umount):
        monkeypatch.setattr(module, "connect_to_owner", impatient)
    hung = (mounted.rclone, mounted.control)
    for process in hung:
        process.send_signal(signal.SIGSTOP)

    def revive() -> None:
        for process in hung:
            process.send_signal(signal.SIGCONT)

    revived = threading.Timer(30, revive)  # else a request to the mount would never end
    revived.start()
    time.sleep(1.5)  # then the kernel does not know the attributes of the mountpoint any more
    began_s = time.monotonic()
    try:
        for command in (["orphans"], ["stats"], ["flush"]):
            assert run([*command, str(mounted.point)]) == 1
            assert "has not answered for" in capsys.readouterr().err
        assert run(["umount", "--lazy", str(mounted.point)]) == 0
        assert time.monotonic() - began_s < 20
    finally:
        revived.cancel()
    assert not is_mounted(mounted.point)
    assert "is detached; its daemon" in capsys.readouterr().err


def test_umount_of_a_mount_in_use(daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]) -> None:
    mounted = daemon()
    with open(mounted.point / "file", "rb") as held:
        assert run(["umount", str(mounted.point)]) == 1
        assert (
            f"is in use: close its files and leave its directories (`fuser -vm {mounted.point}`"
            in capsys.readouterr().err
        )
        assert held.read() == b"hello"
        assert is_mounted(mounted.point)


def test_what_the_daemon_could_not_store_in_the_end_is_an_error(
    daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]
) -> None:
    mounted = daemon(late="the store is away")
    assert run(["umount", str(mounted.point)]) == 1
    assert not is_mounted(mounted.point)
    error = capsys.readouterr().err
    assert "the store is away; the bytes stay in staging:" in error
    assert "late: failed" in error


def test_a_dead_mount_is_cleared_away(fuse: Mounted, capsys: pytest.CaptureFixture[str]) -> None:
    fuse.rclone.send_signal(signal.SIGKILL)
    fuse.rclone.wait()
    for command in (["stats", str(fuse.point)], ["orphans", str(fuse.point)]):
        assert run(command) == 1
        assert f"is dead: run `lakefs-fuse umount {fuse.point}`" in capsys.readouterr().err
    assert run(["mount", f"file://{fuse.point.parent}/data", str(fuse.point)]) == 1
    assert f"run `lakefs-fuse umount {fuse.point}`, then mount again" in capsys.readouterr().err
    assert run(["umount", str(fuse.point)]) == 1, "bytes may be in the cache directory only"
    assert not is_mounted(fuse.point)
    assert "had died" in capsys.readouterr().err


def test_a_mount_of_something_else_is_left_alone(fuse: Mounted, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("umount", "stats"):
        assert run([command, str(fuse.point)]) == 1
        assert "is a mount of another program" in capsys.readouterr().err
    assert is_mounted(fuse.point)


def test_where_nothing_is_mounted(tmp_path: Path, runtime_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("umount", "stats", "orphans"):
        assert run([command, str(tmp_path)]) == 1
        told = f"nothing is mounted at {tmp_path}: name the directory of a mount"
        assert capsys.readouterr().err == f"lakefs-fuse: {told}\n"
    assert run(["flush", str(tmp_path / "file")]) == 1
    assert "is not inside a mount" in capsys.readouterr().err


def test_directory_inside_a_mount_is_answered_with_the_mount(
    tmp_path: Path, runtime_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    around = Mount(str(tmp_path), FUSE_TYPE, "s3://bucket/lake", os.geteuid(), "0:7")
    monkeypatch.setattr(daemons, "mount_of", lambda _: around)
    for command in ("umount", "stats"):
        assert run([command, str(tmp_path / "d")]) == 1
        assert capsys.readouterr().err == f"lakefs-fuse: {tmp_path}/d is inside the mount {tmp_path}: name that\n"


def test_flush_finds_the_mount_of_a_path(daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]) -> None:
    mounted = daemon(files=[DIRTY], refuse="no room")
    assert run(["flush", str(mounted.point / "ckpt" / "model.pt")]) == 1
    error = capsys.readouterr().err
    assert error.startswith("lakefs-fuse: no room\n  ckpt/model.pt: failed")
    mounted = daemon_restarted(mounted, daemon, files=[DIRTY])
    assert run(["flush", str(mounted.point)]) == 0
    assert run(["stats", "--json", str(mounted.point)]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["dirty"] == {"files": 0, "bytes": 0}


def test_flush_of_a_path_that_does_not_exist_is_told_in_json(
    daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]
) -> None:
    path = daemon().point / "missing"
    assert run(["flush", "--json", str(path)]) == 1
    output, error = capsys.readouterr()
    assert msgspec.json.decode(output) == {"path": str(path), "stored": False, "files": []}
    assert "does not exist" in error


@pytest.mark.parametrize(("is_ended", "said"), [(True, "ended just now"), (False, "in another PID namespace")])
def test_umount_of_a_daemon_that_cannot_be_waited_for_is_an_error(is_ended: bool, said: str) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    ours, theirs = socket.socketpair()
    with theirs, ControlClient(ours, "/mnt/lake") as client:
        client.pid = ended.pid if is_ended else 0  # the kernel names no process of another namespace
        with pytest.raises(LakeError, match=said):
            umount.unmount_served(client, "/mnt/lake", None, lazy=True, deadline_s=0.0)


def daemon_restarted(mounted: Mounted, daemon: Callable[..., Mounted], **arguments: object) -> Mounted:
    assert mounted.control is not None
    mounted.control.kill()
    mounted.control.wait()
    assert mounted.control.stdout is not None
    mounted.control.stdout.close()
    return daemon(**arguments)


def test_orphans_are_listed_finished_and_aborted(
    daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]
) -> None:
    orphans = [{"id": str(number), "path": f"part-{number}", "state": "orphan"} for number in range(4)]
    hostile = {"id": "4", "path": "[/a][bold]x\x1b]0;title\x07", "state": "orphan", "error": "[b]no\x1b[2Jroom"}
    point = str(daemon(files=[DIRTY, *orphans, hostile]).point)
    assert run(["orphans", point]) == 0
    listed = capsys.readouterr().out
    assert all(f"part-{number}" in listed for number in range(4))
    assert "[/a][bold]x\\x1b]0;title\\x07" in listed
    assert "[b]no\\x1b[2Jroom" in listed
    assert "model.pt" not in listed
    assert run(["orphans", point, "--finish", "0", "--abort", "1", "--abort", "2"]) == 0
    assert run(["orphans", point, "--finish", "0", "--finish", "3"]) == 1
    assert capsys.readouterr().err == "lakefs-fuse: no orphan 0\n"
    assert run(["orphans", point, "--all", "abort"]) == 0
    assert run(["orphans", point]) == 0
    assert capsys.readouterr().out == "no orphans\n"


def test_all_orphans_are_finished_from_the_newest_on(
    daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]
) -> None:
    """The daemon lists the oldest first; of several of one name the first one that is finished counts."""
    orphans = [{"id": str(number), "path": "part", "state": "orphan"} for number in range(3)]
    point = str(daemon(files=orphans).point)
    assert run(["orphans", point, "--all", "finish", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["finished"] == ["2", "1", "0"]


@pytest.mark.parametrize("arguments", [["--finish", "1", "--abort", "1"], ["--all", "finish", "--abort", "1"]])
def test_orphans_can_have_one_fate(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert run(["orphans", "/mnt/lake", *arguments]) == 2
    assert "not both" in capsys.readouterr().err


def test_stats_for_people_and_for_scripts(daemon: Callable[..., Mounted], capsys: pytest.CaptureFixture[str]) -> None:
    mounted = daemon(files=[DIRTY, {**ORPHAN, "error": "left [by] pid 7"}])
    assert run(["stats", str(mounted.point)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for expected in (
        f"s3://bucket/prefix/ on {mounted.point}",
        "get 4 5.0 ms 10.0 ms",
        "4.0 KiB read",
        "75.0 % hits (3 hits, 1 miss), 2.0 KiB on disk",
        "not in the store yet: 1 file, 4.9 KiB",
        "lookup 3",
        "ranges answered with 200",
        "old.bin",
        "model.pt",
    ):
        assert expected in text
    assert run(["stats", "--json", str(mounted.point)]) == 0
    values = msgspec.json.decode(capsys.readouterr().out)
    assert mounted.control is not None
    assert values["daemon"]["pid"] == mounted.control.pid
    assert values["memory"]["rss"] > 1 << 20
    assert run(["stats", "--json", "--watch", str(mounted.point)]) == 2


WATCH = """
import sys
from pathlib import Path
from lakefs_fuse.control import runtime
directory = Path(sys.argv.pop(1))
runtime.candidate_directories = lambda uid: [directory]
from lakefs_fuse.cli import main
main()
"""


def test_watching_refreshes_and_ends_with_the_daemon(daemon: Callable[..., Mounted]) -> None:
    mounted = daemon()
    terminal, program_end = os.openpty()
    directory = str(runtime.server_socket_path(str(mounted.point)).parent)
    watching = subprocess.Popen(
        [sys.executable, "-c", WATCH, directory, "stats", "--watch", "--interval", "100ms", str(mounted.point)],
        stdout=program_end,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(program_end)
    shown = b""
    while shown.count(b"lookup") < 3:
        shown += os.read(terminal, 65536)
    assert mounted.control is not None
    mounted.control.kill()
    _, error = watching.communicate(timeout=20)
    os.close(terminal)
    assert watching.returncode == 1
    assert "ended in mid-answer" in error


def test_watching_without_a_terminal_prints_each_time_and_ends_with_its_reader(daemon: Callable[..., Mounted]) -> None:
    mounted = daemon()
    directory = str(runtime.server_socket_path(str(mounted.point)).parent)
    command = [sys.executable, "-c", WATCH, directory, "stats", "--watch", "--interval", "100ms", str(mounted.point)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as watching:
        assert watching.stdout is not None
        for _ in range(2):
            while "lookup" not in watching.stdout.readline():
                pass
        watching.stdout.close()
        assert watching.wait(20) == 1


def test_output_for_which_there_is_no_room_is_one_line(daemon: Callable[..., Mounted]) -> None:
    mounted = daemon()
    directory = str(runtime.server_socket_path(str(mounted.point)).parent)
    command = [sys.executable, "-c", WATCH, directory, "stats", "--json", str(mounted.point)]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    expected = "lakefs-fuse: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.parametrize("command", ["umount", "stats", "flush", "refresh", "wait", "orphans"])
def test_mount_that_cannot_be_read_is_no_usage_error(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dead mount whose attributes the kernel still has in its cache: access(2) fails, stat(2) does not."""
    monkeypatch.setattr(os, "access", lambda *_arguments, **_options: False)
    assert run([command, str(tmp_path)]) not in (0, 2)
    assert "is not readable" not in capsys.readouterr().err
