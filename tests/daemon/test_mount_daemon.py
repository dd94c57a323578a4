"""The daemon's life, from configuration to drained, around a filesystem and a mount that tests control."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
import trio.testing
from trio.testing import MockClock

from lakefs_fuse.config import MountConfig, Source, StoreConfig
from lakefs_fuse.control import protocol, runtime
from lakefs_fuse.control.mounts import Mount
from lakefs_fuse.control.server import ServedLake
from lakefs_fuse.control.supervision import Answer
from lakefs_fuse.daemon import mount_daemon as daemon_module
from lakefs_fuse.daemon.mount_daemon import Daemon, Parts, Readiness, Succession, Task
from lakefs_fuse.errors import EXIT_CRASHED, CacheError, LakeError, first_error
from tests.control.fakes import FakeFile, FakeFilesystem, mount_config


class FakeMount:
    """Mounts at once and stays until asked to go."""

    def __init__(self, *, goes_at_once: bool = False) -> None:
        self.gone = trio.Event()
        self.served = False
        if goes_at_once:
            self.gone.set()

    async def serve(self, fs: FakeFilesystem, config: MountConfig, *, ready: Callable[[], None]) -> None:
        self.served = True
        ready()
        await self.gone.wait()


class Lake:
    """Counts opens and closes; opening may fail or never end."""

    def __init__(
        self,
        fs: FakeFilesystem,
        *,
        error: LakeError | None = None,
        hangs: bool = False,
        sent_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.fs, self.error, self.hangs, self.sent_bytes = fs, error, hangs, sent_bytes
        self.closed = self.is_maintained = False

    async def maintain(self) -> None:
        self.is_maintained = True
        try:
            await trio.sleep_forever()
        finally:
            self.is_maintained = False

    @asynccontextmanager
    async def open(self, config: MountConfig) -> AsyncIterator[tuple[FakeFilesystem, ServedLake, Task]]:
        if self.error is not None:
            raise self.error
        if self.hangs:
            await trio.sleep_forever()
        try:
            yield self.fs, ServedLake("", {"name": "fake"}, self.sent_bytes), self.maintain
        finally:
            self.closed = True


class Answers:
    """The reading end of a readiness pipe."""

    def __init__(self) -> None:
        self._read, self.write = os.pipe()
        self.readiness = Readiness(self.write)

    def read(self) -> Answer:
        line = os.read(self._read, 65536)
        os.close(self._read)
        return msgspec.json.decode(line, type=Answer)


@pytest.fixture(autouse=True)
def private_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime, "candidate_directories", lambda uid: [tmp_path / "runtime"])


def make(lake: Lake, mount: FakeMount, readiness: Readiness) -> Daemon[FakeFilesystem]:
    return Daemon(
        mount_config("/mnt/lake", "/var/cache/lake"), Parts(lake.open, mount.serve, mount.gone.set), readiness
    )


async def test_it_says_ready_drains_after_unmount_and_ends_with_0() -> None:
    fs = FakeFilesystem([FakeFile("1", "a"), FakeFile("2", "left by another", state="orphan")])
    lake, mount, answers = Lake(fs), FakeMount(), Answers()
    daemon = make(lake, mount, answers.readiness)
    codes: list[int] = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            codes.append(await daemon.run())

        nursery.start_soon(run)
        path = runtime.server_socket_path("/mnt/lake")
        while not path.exists():
            await trio.sleep(0.01)
        mount.gone.set()
    assert answers.read() == Answer()
    assert codes == [0]
    assert [file.id for file in fs.files] == ["2"]
    assert lake.closed
    assert not path.exists()


async def test_maintenance_runs_while_it_is_mounted_and_ends_before_it_drains() -> None:
    seen: list[bool] = []

    class Draining(FakeFilesystem):
        async def make_durable(self, path: str = "", *, only_closed: bool = False) -> None:
            await trio.testing.wait_all_tasks_blocked()
            seen.append(lake.is_maintained)

    mount = FakeMount()
    lake = Lake(Draining([]))
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(make(lake, mount, Readiness(None)).run)
            while not lake.is_maintained:
                await trio.sleep(0.01)
            mount.gone.set()
    assert seen == [False]


async def test_what_cannot_be_stored_is_named_and_makes_it_fail(caplog: pytest.LogCaptureFixture) -> None:
    fs = FakeFilesystem([FakeFile("1", "ckpt/model.pt")], refuse="access denied")
    lake = Lake(fs)
    assert await make(lake, FakeMount(goes_at_once=True), Readiness(None)).run() == 1
    assert "1 file is not in the store (access denied); the bytes stay in /var/cache/lake" in caplog.text
    assert "not in the store: ckpt/model.pt (1000 bytes, failed) access denied" in caplog.text
    assert lake.closed


async def test_draining_without_progress_ends(autojump_clock: MockClock, caplog: pytest.LogCaptureFixture) -> None:
    fs = FakeFilesystem([FakeFile("1", "a")], step=0, tick_s=1.0)
    began = trio.current_time()
    assert await make(Lake(fs), FakeMount(goes_at_once=True), Readiness(None)).run() == 1
    assert trio.current_time() - began == pytest.approx(daemon_module.DRAIN_STALL_S_MAX, abs=5)
    assert "not in the store: a" in caplog.text


async def test_draining_with_progress_may_take_longer_than_a_stall(autojump_clock: MockClock) -> None:
    fs = FakeFilesystem([FakeFile("1", "a", bytes=100)], step=1, tick_s=10.0)
    assert await make(Lake(fs), FakeMount(goes_at_once=True), Readiness(None)).run() == 0
    assert trio.current_time() > daemon_module.DRAIN_STALL_S_MAX


async def test_draining_that_sends_parts_of_which_none_is_complete_goes_on(autojump_clock: MockClock) -> None:
    """As several parts that share a slow way do, which are complete at the same time."""
    fs = FakeFilesystem([FakeFile("1", "a")], step=1000, tick_s=2 * daemon_module.DRAIN_STALL_S_MAX)
    lake = Lake(fs, sent_bytes=lambda: int(trio.current_time()))
    assert await make(lake, FakeMount(goes_at_once=True), Readiness(None)).run() == 0
    assert trio.current_time() > daemon_module.DRAIN_STALL_S_MAX


async def code_when_signalled_twice(daemon: Daemon[FakeFilesystem], fs: FakeFilesystem, mount: FakeMount) -> int:
    """The second SIGTERM comes when it is unmounted, and has begun to store what is left."""
    codes: list[int] = []
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            codes.append(await daemon.run())

        nursery.start_soon(run)
        while not runtime.server_socket_path("/mnt/lake").exists():
            await trio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        with trio.fail_after(5):
            await mount.gone.wait()
            while not fs.durable_asked:
                await trio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
    (code,) = codes
    return code


async def test_sigterm_unmounts_and_a_second_one_stops_draining(caplog: pytest.LogCaptureFixture) -> None:
    fs, mount = FakeFilesystem([FakeFile("1", "a")], step=0), FakeMount()
    parts = Parts(Lake(fs).open, mount.serve, mount.gone.set)
    daemon = Daemon(msgspec.structs.replace(mount_config("/mnt/lake"), supervise=False), parts, Readiness(None))
    assert await code_when_signalled_twice(daemon, fs, mount) == 1
    assert "a second signal ended draining" in caplog.text


class StuckMount(FakeMount):
    """Cannot be unmounted."""

    async def serve(self, fs: FakeFilesystem, config: MountConfig, *, ready: Callable[[], None]) -> None:
        await super().serve(fs, config, ready=ready)
        raise LakeError("umount is missing")


async def code_when_signalled(daemon: Daemon[FakeFilesystem]) -> int:
    codes: list[int] = []
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                codes.append(await daemon.run())

            nursery.start_soon(run)
            while not runtime.server_socket_path("/mnt/lake").exists():
                await trio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
    (code,) = codes
    return code


async def test_sigterm_where_unmounting_fails_drains(caplog: pytest.LogCaptureFixture) -> None:
    lake = Lake(FakeFilesystem([FakeFile("1", "acknowledged")]))
    assert await code_when_signalled(make(lake, StuckMount(), Readiness(None))) == 0
    assert lake.fs.files == []
    assert lake.closed
    assert "umount is missing" in caplog.text


async def test_sigterm_where_unmounting_fails_keeps_what_programs_still_write(caplog: pytest.LogCaptureFixture) -> None:
    lake = Lake(FakeFilesystem([FakeFile("1", "acknowledged"), FakeFile("2", "half", state="open")]))
    assert await code_when_signalled(make(lake, StuckMount(), Readiness(None))) == 1
    assert [file.path for file in lake.fs.files] == ["half"]
    assert "1 file is not in the store (programs had them open for writing)" in caplog.text
    assert "not in the store: half (1000 bytes, open)" in caplog.text


@pytest.mark.parametrize("signals", [1, 2])
async def test_sigterm_of_a_mount_in_use_stores_closed_files_at_once_and_others_later(signals: int) -> None:
    """A second one, sent because the daemon waits, had the files that were closed last left unstored."""
    fs = FakeFilesystem([FakeFile("1", "acknowledged"), FakeFile("2", "half", state="open")])
    mount, codes = FakeMount(), list[int]()
    config = msgspec.structs.replace(mount_config("/mnt/lake"), supervise=False)
    daemon = Daemon(config, Parts(Lake(fs).open, mount.serve, lambda: None), Readiness(None))
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:

            async def run() -> None:
                codes.append(await daemon.run())

            nursery.start_soon(run)
            while not runtime.server_socket_path("/mnt/lake").exists():
                await trio.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
            while len(fs.files) > 1:
                await trio.sleep(0.01)
                fs.unfinished()
            assert [file.path for file in fs.files] == ["half"]
            if signals > 1:
                os.kill(os.getpid(), signal.SIGTERM)
                await trio.sleep(0.05)
            mount.gone.set()
    assert codes == [0]
    assert fs.files == []


async def test_an_error_of_serving_that_no_end_was_requested_of_is_a_failure() -> None:
    mount = StuckMount(goes_at_once=True)
    with pytest.raises(BaseExceptionGroup) as raised:
        await make(Lake(FakeFilesystem()), mount, Readiness(None)).run()
    assert str(first_error(raised.value)) == "umount is missing"


async def test_a_signal_before_the_mount_is_ready_ends_it() -> None:
    daemon = make(Lake(FakeFilesystem(), hangs=True), FakeMount(), Readiness(None))
    with trio.fail_after(5):
        async with trio.open_nursery() as nursery:
            codes: list[int] = []

            async def run() -> None:
                codes.append(await daemon.run())

            nursery.start_soon(run)
            await trio.testing.wait_all_tasks_blocked(0.05)
            os.kill(os.getpid(), signal.SIGTERM)
    assert codes == [1]


async def test_a_supervised_daemon_that_is_signalled_twice_at_once_was_told_to_stop_once() -> None:
    """By a service manager, which signals all its processes, and by its supervisor."""
    fs, mount = FakeFilesystem([FakeFile("1", "a", bytes=100)], step=20, tick_s=0.1), FakeMount()
    assert await code_when_signalled_twice(make(Lake(fs), mount, Readiness(None)), fs, mount) == 0


class DeadMount:
    """A mountpoint where a dead mount was left, or what became of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, device: str = "0:99", *, dead: bool = True) -> None:
        self.mount: Mount | None = Mount("/mnt/lake", "fuse.lakefs", "lake", 0, device)
        monkeypatch.setattr(daemon_module, "mount_at", lambda point: self.mount)
        monkeypatch.setattr(daemon_module, "is_dead", lambda point: dead)
        monkeypatch.setattr(daemon_module, "detach", self.detach)

    def detach(self, point: str, *, lazy: bool) -> None:
        assert (point, lazy) == ("/mnt/lake", True)
        self.mount = None

    def is_there(self) -> bool:
        return self.mount is not None


def successor(lake: Lake, mount: FakeMount, readiness: Readiness) -> Daemon[FakeFilesystem]:
    parts = Parts(lake.open, mount.serve, mount.gone.set)
    return Daemon(mount_config("/mnt/lake", "/var/cache/lake"), parts, readiness, Succession(3, "0:99"))


async def test_a_dead_mount_is_replaced_when_the_lake_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    dead, answers = DeadMount(monkeypatch), Answers()
    with pytest.raises(BaseExceptionGroup):
        await successor(Lake(FakeFilesystem(), error=CacheError("not now")), FakeMount(), answers.readiness).run()
    assert dead.is_there()
    lake, mount = Lake(FakeFilesystem()), FakeMount(goes_at_once=True)
    assert await successor(lake, mount, answers.readiness).run() == 0
    assert not dead.is_there()
    assert mount.served
    assert answers.read() == Answer()


@pytest.mark.parametrize("now", ["gone", "another", "alive"])
async def test_a_dead_mount_that_someone_took_away_is_not_replaced(monkeypatch: pytest.MonkeyPatch, now: str) -> None:
    found = DeadMount(monkeypatch, "0:98" if now == "another" else "0:99", dead=now != "alive")
    if now == "gone":
        found.mount = None
    expected = found.mount
    fs, mount = FakeFilesystem([FakeFile("1", "accepted by the last one")]), FakeMount()
    assert await successor(Lake(fs), mount, Readiness(None)).run() == 0
    assert not mount.served
    assert fs.files == [], "what was accepted is stored all the same"
    assert found.mount == expected


def run_with(monkeypatch: pytest.MonkeyPatch, serve: Callable[[Readiness], int]) -> tuple[int, Answer]:
    """The exit code of the whole program around ``serve``, and its answer."""
    for name in ("open_logs", "bound_malloc", "raise_file_limit"):
        monkeypatch.setattr(daemon_module, name, lambda *given, **options: None)
    monkeypatch.setattr(daemon_module, "read_config", lambda source: mount_config("/mnt/lake"))
    answers = Answers()
    given: list[Succession] = []

    def serve_it(config: MountConfig, readiness: Readiness, succession: Succession) -> int:
        given.append(succession)
        return serve(readiness)

    arguments = ["--ready-fd", str(answers.write), "--restarts", "2", "--replace", "0:99"]
    code = daemon_module.run(arguments, serve_it)
    assert given == [Succession(2, "0:99")]
    return code, answers.read()


def test_a_crash_is_an_end_that_nobody_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(readiness: Readiness) -> int:
        readiness.report_ready()
        raise RuntimeError("a bug")

    def crash_while_draining(readiness: Readiness) -> int:
        readiness.report_ready()
        readiness.end_serving()
        raise RuntimeError("a bug")

    def refuse(readiness: Readiness) -> int:
        readiness.record_detached()
        raise CacheError("in use")

    assert run_with(monkeypatch, crash) == (EXIT_CRASHED, Answer())
    assert run_with(monkeypatch, crash_while_draining) == (1, Answer())
    assert run_with(monkeypatch, refuse) == (1, Answer("in use", 1, detached=True))


async def test_an_error_of_opening_comes_out_of_every_nursery() -> None:
    daemon = make(Lake(FakeFilesystem(), error=CacheError("locked by pid 7")), FakeMount(), Readiness(None))
    with pytest.raises(BaseExceptionGroup) as raised:
        await daemon.run()
    assert str(first_error(raised.value)) == "locked by pid 7"


async def test_those_who_wait_for_the_end_hear_of_the_drain() -> None:
    fs = FakeFilesystem()
    mount = FakeMount()
    daemon = make(Lake(fs), mount, Readiness(None))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(daemon.run)
        path = runtime.server_socket_path("/mnt/lake")
        while not path.exists():
            await trio.sleep(0.01)
        async with await trio.open_unix_socket(str(path)) as stream:
            await stream.send_all(protocol.encode(protocol.WaitEnd()))
            await stream.receive_some(65536)
            fs.files.append(FakeFile("1", "written late"))
            fs.refuse = "the store is away"
            mount.gone.set()
            received = b""
            with trio.fail_after(5):
                while piece := await stream.receive_some(65536):
                    received += piece
    last = protocol.decode_reply(received.splitlines()[-1])
    assert isinstance(last, protocol.Failed)
    assert last.message == "1 file is not in the store: the store is away"
    assert [file.path for file in last.files] == ["written late"]


def run_program(config: bytes, tmp_path: Path, environment: dict[str, str] | None = None) -> tuple[int, Answer, str]:
    """The real program with ``config`` on standard input: exit code, what it said when ready, standard error."""
    answers = Answers()
    result = subprocess.run(
        [sys.executable, "-m", "lakefs_fuse.daemon.mount_daemon", "--ready-fd", str(answers.write)],
        input=config,
        pass_fds=[answers.write],
        capture_output=True,
        env={**os.environ, **(environment or {})},
        timeout=60,
        check=False,
    )
    os.close(answers.write)
    return result.returncode, answers.read(), result.stderr.decode()


def test_a_configuration_that_makes_no_sense_is_a_usage_error(tmp_path: Path) -> None:
    code, answer, _ = run_program(b'{"mountpoint": 7}', tmp_path)
    assert code == 2
    assert answer.exit_code == 2
    assert "no usable configuration" in answer.error


def test_a_lake_that_is_not_there_is_one_line_and_a_private_log(tmp_path: Path) -> None:
    log_file = tmp_path / "log" / "lake.log"
    config = MountConfig(
        store=StoreConfig(source=Source.parse(f"file://{tmp_path}/nowhere")),
        mountpoint=str(tmp_path / "mnt"),
        cache_dir=str(tmp_path / "cache"),
        log_file=str(log_file),
    )
    (tmp_path / "mnt").mkdir()
    code, answer, _ = run_program(msgspec.json.encode(config), tmp_path)
    assert code == 1
    assert "nowhere" in answer.error
    assert "\n" not in answer.error
    assert stat.S_IMODE(log_file.stat().st_mode) == 0o600
    assert answer.error in log_file.read_text()


def test_what_is_made_before_it_serves_is_not_searched_for_garbage(tmp_path: Path) -> None:
    """What is made later is. In a process of its own, for it holds for all that is there."""
    program = """
import gc, sys
import msgspec
from lakefs_fuse.daemon import mount_daemon as daemon
from lakefs_fuse.daemon import lake_opener as lake
from lakefs_fuse.config import MountConfig
from lakefs_fuse.kernel.session import Session
open_lake = lake.open_lake
def opening(config):
    print(gc.isenabled())
    return open_lake(config)
async def serve(self, fs, config, *, ready):
    print(gc.isenabled(), gc.get_freeze_count() > 0)
    ready()
lake.open_lake, Session.serve = opening, serve
config = msgspec.json.decode(sys.argv[1], type=MountConfig)
sys.exit(daemon.serve_real_lake(config, daemon.Readiness(None), daemon.Succession(0)))
"""
    (tmp_path / "store").mkdir()
    config = msgspec.structs.replace(
        mount_config(str(tmp_path / "mnt")),
        store=StoreConfig(source=Source.parse(f"file://{tmp_path}/store")),
        cache_dir=str(tmp_path / "cache"),
        free_bytes_min=0,
    )
    done = subprocess.run(
        [sys.executable, "-c", program, msgspec.json.encode(config).decode()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "False\nTrue True\n"), done.stderr
