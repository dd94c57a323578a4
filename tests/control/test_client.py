"""The blocking end of the control socket, and where sockets lie."""

from __future__ import annotations

import os
import pwd
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from lakefs_fuse.control import client as client_module
from lakefs_fuse.control import protocol, runtime
from lakefs_fuse.control.client import ControlClient, connect
from lakefs_fuse.errors import LakeError, MountError
from tests.control.fakes import FakeFile, FakeFilesystem, mount_config, serving_in_thread


@pytest.fixture
def runtime_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place for sockets in this test."""
    directory = tmp_path / "runtime"
    monkeypatch.setattr(runtime, "candidate_directories", lambda uid: [directory])
    return directory


def test_no_socket_is_no_daemon(runtime_dir: Path) -> None:
    assert connect("/mnt/lake") is None


def test_a_socket_nobody_answers_on_is_no_daemon(runtime_dir: Path) -> None:
    path = runtime.server_socket_path("/mnt/lake")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    assert connect("/mnt/lake") is None


def test_connect_waits_for_room_in_a_full_queue(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """connect(2) does not: it fails at once."""
    accepted: list[socket.socket] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, ExitStack() as stack:
        listener.bind(str(runtime.server_socket_path("/mnt/lake")))
        listener.listen(0)
        accepting = threading.Timer(0.2, lambda: accepted.extend(listener.accept()[0] for _ in range(3)))
        accepting.start()
        for _ in range(3):
            client = connect("/mnt/lake")
            assert client is not None
            stack.enter_context(client)
        accepting.join()
        for each in accepted:
            each.close()
        monkeypatch.setattr(client_module, "CONNECT_S_MAX", 0.1)
        with pytest.raises(LakeError, match="accepts no control connection: `lakefs-fuse umount --lazy /mnt/lake`"):
            for _ in range(3):
                client = connect("/mnt/lake")
                assert client is not None
                stack.enter_context(client)


def test_calls_and_progress(runtime_dir: Path) -> None:
    fs = FakeFilesystem([FakeFile("1", "a"), FakeFile("2", "b", state="orphan")])
    with serving_in_thread(fs, runtime.server_socket_path("/mnt/lake")):
        client = connect("/mnt/lake")
        assert client is not None
        with client:
            assert (client.pid, client.uid) == (os.getpid(), os.geteuid())
            assert client.hello().mountpoint == "/mnt/lake"
            assert client.store() == protocol.StoreOf(mount_config("/mnt/lake").store, lake_id="0123abcd")
            assert [file.id for file in client.unfinished().files] == ["1", "2"]
            *progress, last = client.follow(protocol.MakeDurable())
            assert progress
            assert last == protocol.Done()
            *_, failed = client.follow(protocol.FinishOrphan("5"))
            assert failed == protocol.Failed(message="no orphan 5")
            *_, last = client.follow(protocol.FinishOrphan("2"))
            assert last == protocol.Done()
            assert client.unfinished().count == 0
            assert client.statistics()["dirty"] == {"files": 0, "bytes": 0}


def test_a_daemon_that_hangs_is_named_after_a_bound() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ControlClient(ours, "/mnt/lake", silence_s_max=0.05) as client:
        with pytest.raises(LakeError, match=r"/mnt/lake .* has not answered for 0.05 s.*umount --lazy"):
            client.hello()


def test_orphans_behind_many_dirty_files_are_all_listed(runtime_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "FILES_MAX", 2)
    orphans = [FakeFile(f"o{number}", "b", state="orphan") for number in range(5)]
    fs = FakeFilesystem([*(FakeFile(f"d{number}", "a") for number in range(3)), *orphans])
    with serving_in_thread(fs, runtime.server_socket_path("/mnt/lake")):
        client = connect("/mnt/lake")
        assert client is not None
        with client:
            assert [file.id for file in client.orphans()] == ["o0", "o1", "o2", "o3", "o4"]
            fs.files.clear()
            assert client.orphans() == []


def test_call_after_a_silence_gets_no_late_answer() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ControlClient(ours, "/mnt/lake", silence_s_max=0.05) as client:
        with pytest.raises(LakeError, match="has not answered"):
            client.call(protocol.Unmount())
        with suppress(BrokenPipeError):
            theirs.sendall(protocol.encode(protocol.Done()))
        with pytest.raises(LakeError, match="/mnt/lake"):
            client.call(protocol.StopWarming())


def test_a_daemon_that_dies_in_mid_answer_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with ControlClient(ours, "/mnt/lake") as client:
        theirs.sendall(b'{"type": "hel')
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(LakeError, match="ended in mid-answer"):
            client.hello()
        theirs.close()


def test_an_answer_of_another_version_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ControlClient(ours, "/mnt/lake") as client:
        theirs.sendall(b'{"type": "poem"}\n{"type": "done"}\n')
        with pytest.raises(LakeError, match="is invalid"):
            client.hello()
        with pytest.raises(LakeError, match="answered Done where Statistics was asked"):
            client.statistics()


def test_a_path_longer_than_any_is_refused_here() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ControlClient(ours, "/mnt/lake") as client, pytest.raises(LakeError, match="too long"):
        client.follow(protocol.MakeDurable("x" * protocol.REQUEST_BYTES_MAX))


def test_a_directory_open_to_others_holds_no_socket(runtime_dir: Path) -> None:
    runtime_dir.mkdir(mode=0o755)
    with pytest.raises(MountError, match="no private directory"):
        runtime.server_socket_path("/mnt/lake")
    assert runtime.client_socket_paths("/mnt/lake", os.geteuid()) == []


def test_a_symlink_is_no_private_directory(tmp_path: Path, runtime_dir: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    runtime_dir.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(MountError, match="no private directory"):
        runtime.server_socket_path("/mnt/lake")


def test_a_directory_of_someone_else_is_not_private(tmp_path: Path) -> None:
    directory = tmp_path / "theirs"
    directory.mkdir(mode=0o700)
    assert runtime.is_private(directory, os.geteuid())
    assert not runtime.is_private(directory, os.geteuid() + 1)


def test_a_path_too_long_for_a_socket_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long, short = tmp_path / ("x" * 100), Path(f"/tmp/lakefs-fuse-test-{os.getpid()}")
    monkeypatch.setattr(runtime, "candidate_directories", lambda uid: [long, short])
    try:
        assert runtime.server_socket_path("/mnt/lake").parent == short
    finally:
        short.rmdir()


def test_a_mountpoint_has_one_name_however_it_is_reached(tmp_path: Path) -> None:
    (tmp_path / "real" / "lake").mkdir(parents=True)
    (tmp_path / "alias").symlink_to("real")
    (tmp_path / "shortcut").symlink_to("real/lake")
    expected = str(tmp_path / "real" / "lake")
    for spelling in ("real/lake", "real/lake/", "alias/lake", "shortcut", "shortcut/", "real/../alias//lake"):
        assert runtime.real_mountpoint(f"{tmp_path}/{spelling}") == expected
    assert runtime.real_mountpoint("/") == "/"


def test_mountpoint_is_named_without_a_request_to_its_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: object) -> bool:
        raise AssertionError(path)

    with monkeypatch.context() as patched:
        patched.setattr(os.path, "islink", refuse)
        assert runtime.real_mountpoint("/proc/") == "/proc"


def test_candidates_prefer_what_does_not_depend_on_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    uid = os.getuid()
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/xdg")
    monkeypatch.setattr(os, "getuid", lambda: 1234)
    assert [str(path) for path in runtime.candidate_directories(1234)][:3] == [
        "/run/user/1234/lakefs-fuse",
        "/xdg/lakefs-fuse",
        "/tmp/lakefs-fuse-1234",
    ]
    assert runtime.candidate_directories(0)[0] == Path("/run/lakefs-fuse")
    assert Path("/xdg/lakefs-fuse") not in runtime.candidate_directories(uid if uid != 1234 else 4321)


@pytest.mark.parametrize("lingers", [True, False])
def test_socket_is_in_the_directory_of_sessions_only_where_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lingers: bool
) -> None:
    of_session, other = tmp_path / "run" / "0" / "lakefs-fuse", tmp_path / "other"
    of_session.parent.mkdir(parents=True)
    (tmp_path / "linger").mkdir()
    if lingers:
        (tmp_path / "linger" / pwd.getpwuid(os.geteuid()).pw_name).touch()
    monkeypatch.setattr(runtime, "candidate_directories", lambda uid: [of_session, other])
    monkeypatch.setattr(runtime, "SESSIONS_DIRECTORY", tmp_path / "run")
    monkeypatch.setattr(runtime, "LINGER_DIRECTORY", tmp_path / "linger")
    monkeypatch.setattr(runtime, "SOCKET_PATH_BYTES_MAX", 1000)
    assert runtime.server_socket_path("/mnt/lake").parent == (of_session if lingers else other)


def test_selection_of_many_paths_is_sent_in_bounded_lines(runtime_dir: Path) -> None:
    fs = FakeFilesystem()
    fs.residency.finish.set()
    paths = [(f"{'d' * 200}/{number}", "") for number in range(2000)]
    with serving_in_thread(fs, runtime.server_socket_path("/mnt/lake")):
        client = connect("/mnt/lake")
        assert client is not None
        with client:
            client.select(paths)
            *_, reply = client.follow(protocol.WarmCache(partial=True))
            assert reply == protocol.Statistics({"files": 2000, "partial": True, "background": False})
            assert fs.residency.warmed == paths
            client.select([("a", "*.bin")])
            *_, reply = client.follow(protocol.ListCache())
            assert reply == protocol.Statistics({"paths": [{"path": "a"}], "pinned": False})
            requests: list[tuple[protocol.CacheRequest, str]] = [
                (protocol.WarmCache(pin=True), "pinned"), (protocol.UnpinCache(), "unpinned"),
                (protocol.EvictCache(), "evicted"),
            ]  # fmt: skip
            for request, name in requests:
                client.select([("a", ""), ("b", "")])
                *_, reply = client.follow(request)
                assert reply == protocol.Statistics({name: 2})
            assert client.call(protocol.StopWarming()) == protocol.Statistics({"stopped": 3})


def test_a_daemon_that_does_not_know_the_request_is_of_an_earlier_version() -> None:
    ours, theirs = socket.socketpair()
    with theirs, ControlClient(ours, "/mnt/lake") as client:
        unknown = protocol.Failed(message="not a control request: Invalid value 'select_paths' - at `$.type`")
        theirs.sendall(protocol.encode(unknown))
        with pytest.raises(LakeError, match=r"/mnt/lake is of an earlier version.*mount it again"):
            client.select([("a", "")])
