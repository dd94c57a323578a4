"""Starting a daemon: real processes that behave as daemons do, well and badly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import psutil
import pytest

from lakefs_fuse.cli import spawn
from lakefs_fuse.config import MountConfig, StoreConfig
from lakefs_fuse.errors import ConfigError, MountError, ReportedError
from tests.control.fakes import mount_config

PREAMBLE = """
import os, sys, time
ready = int(sys.argv[sys.argv.index("--ready-fd") + 1])
config = sys.stdin.read()
"""


def command(tmp_path: Path, body: str) -> list[str]:
    """A program that starts as the daemon does and goes on with ``body``; it leaves its pid."""
    script = tmp_path / "daemon.py"
    script.write_text(
        PREAMBLE + f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\n" + textwrap.dedent(body)
    )
    return [sys.executable, str(script)]


@pytest.fixture
def config(tmp_path: Path) -> MountConfig:
    base = mount_config("/mnt/lake")
    store = StoreConfig(source=base.store.source, retry_timeout_s=0)
    return msgspec.structs.replace(base, store=store, log_file=str(tmp_path / "log" / "lake.log"))


def is_running(tmp_path: Path) -> bool:
    pid = int((tmp_path / "pid").read_text())
    return bool(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)


def test_mountpoint_that_is_not_utf8_is_refused_in_one_sentence(config: MountConfig, tmp_path: Path) -> None:
    unfit = msgspec.structs.replace(config, mountpoint=os.fsdecode(b"/mnt/\xff"))
    with pytest.raises(ConfigError, match="is not UTF-8: choose another name"):
        spawn.start(unfit, command(tmp_path, ""))


def test_it_returns_when_the_mount_answers_and_leaves_a_session_of_its_own(config: MountConfig, tmp_path: Path) -> None:
    body = f"""
        open({str(tmp_path / "seen")!r}, "w").write(config)
        print("to the log", file=sys.stderr, flush=True)
        os.write(ready, b"{{}}\\n")
        os.close(ready)
        time.sleep(60)
    """
    spawn.start(config, command(tmp_path, body))
    daemon = psutil.Process(int((tmp_path / "pid").read_text()))
    try:
        assert os.getsid(daemon.pid) == daemon.pid
        assert msgspec.json.decode((tmp_path / "seen").read_bytes(), type=MountConfig) == config
        assert "s3://bucket" not in " ".join(daemon.cmdline())
        assert (tmp_path / "log" / "lake.log").read_text() == "to the log\n"
        assert not [file.path for file in daemon.open_files() if file.path.startswith("/dev/pts")]
    finally:
        daemon.kill()
        daemon.wait(10)


def test_the_daemons_error_is_ours_with_its_exit_code(config: MountConfig, tmp_path: Path) -> None:
    body = (
        """os.write(ready, b'{"error": "no such bucket: make it", "exit_code": 2}\\n'); os.close(ready); sys.exit(2)"""
    )
    with pytest.raises(ReportedError, match="no such bucket: make it") as raised:
        spawn.start(config, command(tmp_path, body))
    assert raised.value.exit_code == 2
    assert not is_running(tmp_path)


def test_a_daemon_that_dies_without_a_word(config: MountConfig, tmp_path: Path) -> None:
    with pytest.raises(MountError, match=rf"ended without an answer \(status 7\): see {config.log_file}"):
        spawn.start(config, command(tmp_path, "os._exit(7)"))


def test_a_daemon_that_never_gets_ready_is_stopped(config: MountConfig, tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(MountError, match="did not get ready in time"):
        spawn.start(config, command(tmp_path, "time.sleep(60)"), startup_s=1.0)
    assert time.monotonic() - began < 10
    assert not is_running(tmp_path)


def test_who_waits_for_long_is_told_where_to_look(
    config: MountConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = """
        time.sleep(float(config_s))
        os.write(ready, b"{}\\n")
        os.close(ready)
    """
    monkeypatch.setattr(spawn, "QUIET_S", 1.0)
    for seconds, told in [("0", ""), ("2", f"waiting for the daemon; its log is {config.log_file}\n")]:
        spawn.start(config, command(tmp_path, body.replace("config_s", repr(seconds))))
        assert capsys.readouterr().err == told


def test_a_log_that_cannot_be_written(config: MountConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    bad = msgspec.structs.replace(config, log_file=str(tmp_path / "file" / "lake.log"))
    with pytest.raises(MountError, match="choose one with --log-file"):
        spawn.start(bad, command(tmp_path, ""))


def test_in_the_foreground_the_process_becomes_the_daemon(config: MountConfig, tmp_path: Path) -> None:
    program = (
        "import sys, msgspec; from lakefs_fuse.cli import spawn; from lakefs_fuse.config import MountConfig\n"
        "config = msgspec.json.decode(sys.argv[1].encode(), type=MountConfig)\n"
        "read = 'import sys; sys.stdout.write(sys.stdin.read())'\n"
        "spawn.exec_in_foreground(config, [sys.executable, '-c', read])\n"
    )
    document = msgspec.json.encode(config).decode()
    result = subprocess.run(
        [sys.executable, "-c", program, document], capture_output=True, text=True, timeout=60, check=True
    )
    assert msgspec.json.decode(result.stdout, type=MountConfig) == config


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_start_that_a_signal_ends_leaves_no_daemon(config: MountConfig, tmp_path: Path, number: signal.Signals) -> None:
    body = f"""
        os.kill(os.getppid(), {int(number)})
        time.sleep(0.2)
        os.write(ready, b"{{}}\\n")  # it gets ready all the same
        time.sleep(60)
    """
    before = signal.signal(number, signal.SIG_DFL)  # nohup(1) ignores SIGHUP, and so would what it starts
    try:
        with pytest.raises(ReportedError, match=f"{number.name}: the daemon was stopped") as raised:
            spawn.start(config, command(tmp_path, body))
        assert raised.value.exit_code == 128 + number
        assert not is_running(tmp_path)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
