"""The worker that a daemon starts: what it is asked, how it is ended, and what it leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.daemon import background_worker
from lakefs_fuse.daemon.background_worker import BackgroundWorker
from lakefs_fuse.environment import failpoints
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.errors import CacheError, LakeError
from tests.mount.lakes import eventually, is_running

ARGS = protocol.MaintenanceArgs(interval_s=3600, commits_max=2000)
ROOT = Path(__file__).parents[2]
PRELUDE = """
import json, os, signal, sys, time
request = json.loads(os.fdopen(int(sys.argv[2]), "rb").read())
def say(**line): print(json.dumps(line), flush=True)
scratch = request["scratch"]
open(scratch + "/pid", "w").write(str(os.getpid()))
"""
SLEEP = """
say(type="progress", what="working")
time.sleep(600)
"""
DEAF = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" + SLEEP


def worker_of(tmp_path: Path, program: str, make_room: Callable[[int], bool] = lambda wanted: True) -> BackgroundWorker:
    store = StoreConfig(source=Source.parse(f"file://{tmp_path}/store"))
    command = (sys.executable, "-c", PRELUDE + program)
    threads = WorkerThreads()
    return BackgroundWorker(store, tmp_path / "maintenance", make_room, threads, upload_bytes_s_max=9, program=command)


async def run(worker: BackgroundWorker) -> protocol.Finished | protocol.Failed:
    return await worker.run("maintenance", ARGS, room_bytes=7)


async def pid_of(tmp_path: Path) -> int:
    path = tmp_path / "maintenance" / "pid"
    with trio.fail_after(20):
        while not path.exists() or not path.read_text():
            await trio.sleep(0.01)
    return int(path.read_text())


async def test_answer_and_request_are_those_of_the_command(tmp_path: Path) -> None:
    worker = worker_of(
        tmp_path,
        """
say(type="progress", what="folding")
say(type="note", text="a note")
say(type="finished", summary=dict(request, session=os.getsid(0) == os.getpid()), text="done")
""",
    )
    answer = await run(worker)
    assert isinstance(answer, protocol.Finished)
    asked = answer.summary
    assert (asked["command"], asked["background"], asked["session"]) == ("maintenance", True, True)
    assert asked["upload_bytes_s_max"] == 9
    assert asked["args"] == msgspec.to_builtins(ARGS)
    assert not Path(str(asked["scratch"])).exists(), "temporary files are removed"
    assert worker.step == ""


async def test_failure_and_what_it_printed_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    failed = 'print("why", file=sys.stderr); say(type="failed", message="no", exit_code=75); sys.exit(75)'
    assert await run(worker_of(tmp_path, failed)) == protocol.Failed(message="no", exit_code=75)
    assert "says: why" in caplog.text
    killed = await run(worker_of(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))
    assert isinstance(killed, protocol.Failed)
    assert "without an answer (status -9)" in killed.message
    with pytest.raises(LakeError, match="an invalid answer"):
        await run(worker_of(tmp_path, 'print("nonsense", flush=True)' + SLEEP))
    store = StoreConfig(source=Source.parse("file:///nowhere"))
    missing = BackgroundWorker(store, tmp_path / "maintenance", lambda _: True, WorkerThreads(), program=["/nowhere"])
    with pytest.raises(LakeError, match="cannot be started"):
        await run(missing)


@pytest.mark.parametrize("program", [SLEEP, DEAF, SLEEP + "# stopped"], ids=["obedient", "deaf", "stopped"])
async def test_cancelled_worker_ends(tmp_path: Path, program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_worker, "END_S_MAX", 0.5)
    worker = worker_of(tmp_path, program)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(run, worker)
        pid = await pid_of(tmp_path)
        with trio.fail_after(20):
            while worker.step != "working":
                await trio.sleep(0.01)
        if "stopped" in program:
            os.kill(pid, signal.SIGSTOP)
        nursery.cancel_scope.cancel()
    assert not is_running(pid)
    assert not (tmp_path / "maintenance").exists()


async def test_worker_is_not_started_without_room(tmp_path: Path) -> None:
    asked: list[int] = []

    def make_room(wanted: int) -> bool:
        asked.append(wanted)
        return False

    with pytest.raises(CacheError, match="not enough disk"):
        await run(worker_of(tmp_path, SLEEP, make_room))
    assert asked == [7]
    assert not (tmp_path / "maintenance").exists()


async def test_worker_that_fills_the_disk_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_worker, "ROOM_CHECK_S", 0.05)
    filled = tmp_path / "maintenance" / "filled"
    worker = worker_of(tmp_path, 'open(scratch + "/filled", "w").close()' + SLEEP, lambda wanted: not filled.exists())
    with pytest.raises(CacheError, match="not enough disk"):
        await run(worker)
    assert not (tmp_path / "maintenance").exists()


async def test_worker_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_worker, "RUN_S_MAX", 1.0)
    with pytest.raises(LakeError, match=r"took longer than 1 s"):
        await run(worker_of(tmp_path, SLEEP))


async def test_failpoint_of_the_daemon_is_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.VARIABLE, "commit.sent")
    answer = await run(worker_of(tmp_path, 'say(type="finished", summary=dict(os.environ), text="")'))
    assert isinstance(answer, protocol.Finished)
    assert failpoints.VARIABLE not in answer.summary
    assert "PATH" in answer.summary


def test_real_worker_ends_when_its_starter_is_killed(tmp_path: Path) -> None:
    """Though it sends nothing, and reads nothing but the store."""
    (tmp_path / "store").mkdir()
    starter = f"""
import sys, trio
from pathlib import Path
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.control.worker_protocol import LogArgs
from lakefs_fuse.daemon.background_worker import BackgroundWorker
from lakefs_fuse.environment.threads import WorkerThreads
worker = BackgroundWorker(
    StoreConfig(source=Source.parse("file://{tmp_path}/store")), Path("{tmp_path}/maintenance"), lambda _: True,
    WorkerThreads())
trio.run(lambda: worker.run("log", LogArgs(follow=True, refresh_s=0.1), room_bytes=0))
"""
    process = subprocess.Popen([sys.executable, "-c", starter], env={**os.environ, "PYTHONPATH": str(ROOT)})
    try:
        pids: list[int] = []

        def has_child() -> bool:
            path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
            found = [path.read_text() for path in path.parent.parent.glob("*/children")]
            pids[:] = [int(pid) for pid in " ".join(found).split()]
            return any(os.getpriority(os.PRIO_PROCESS, pid) == 19 for pid in pids)

        eventually(has_child, "the worker runs at the lowest priority", 60)
        time.sleep(2)  # it has sent what it has to say, so that no closed pipe ends it
        assert not process.poll()
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not any(is_running(pid) for pid in pids), "the worker ends")
