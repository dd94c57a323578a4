"""The daemon's end of the control socket, over real unix sockets."""

from __future__ import annotations

import os
import socket
import stat
import tracemalloc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
from trio.testing import MockClock

from lakefs_fuse.control import protocol
from lakefs_fuse.control import server as server_module
from lakefs_fuse.control.server import ControlServer, ServedLake, listen, serve_control
from lakefs_fuse.errors import ConfigError, LakeError, MountError
from tests.control.fakes import FakeFile, FakeFilesystem, make_server


@pytest.fixture
def socket_path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


@asynccontextmanager
async def talking_to(server: ControlServer, path: Path) -> AsyncIterator[trio.SocketStream]:
    async with serve_control(server, path), await trio.open_unix_socket(str(path)) as stream:
        yield stream


async def read_line(stream: trio.SocketStream) -> bytes:
    line = b""
    with trio.fail_after(60):
        while not line.endswith(b"\n"):
            seen = await stream.socket.recv(1 << 16, socket.MSG_PEEK)
            if not seen:
                break
            line += await stream.socket.recv(seen.find(b"\n") + 1 or len(seen))
    return line


async def ask(stream: trio.SocketStream, request: protocol.Request) -> protocol.Reply:
    await stream.send_all(protocol.encode(request))
    return protocol.decode_reply(await read_line(stream))


async def follow(stream: trio.SocketStream, request: protocol.Request) -> list[protocol.Reply]:
    await stream.send_all(protocol.encode(request))
    replies = [protocol.decode_reply(await read_line(stream))]
    while isinstance(replies[-1], protocol.Progress):
        replies.append(protocol.decode_reply(await read_line(stream)))
    return replies


async def test_refreshing_says_what_came_of_it(socket_path: Path) -> None:
    fs = FakeFilesystem()
    async with talking_to(make_server(fs), socket_path) as stream:
        *waiting, done = await follow(stream, protocol.Refresh())
        assert all(isinstance(each, protocol.Progress) for each in waiting)
        assert done == protocol.Statistics({"changed": 1})
        fs.refresh_error = ConfigError("it does not change")
        *_, failed = await follow(stream, protocol.Refresh())
        assert failed == protocol.Failed(message="it does not change", exit_code=2)


async def test_refresh_of_a_lake_that_was_replaced_fails(socket_path: Path) -> None:
    async def check_identity() -> None:
        raise LakeError("another lake is there")

    fs = FakeFilesystem()
    lake = ServedLake("0123abcd", {}, check_identity=check_identity)
    async with talking_to(make_server(fs, lake=lake), socket_path) as stream:
        *_, failed = await follow(stream, protocol.Refresh())
    assert (failed, fs.refreshed) == (protocol.Failed(message="another lake is there"), 0)


async def test_stats_are_the_filesystems_and_what_only_the_process_knows(socket_path: Path) -> None:
    fs = FakeFilesystem([FakeFile("1", "a/b", bytes=10, bytes_done=4, state="failed", error="no room")])
    async with talking_to(make_server(fs), socket_path) as stream:
        reply = await ask(stream, protocol.Stats())
    assert isinstance(reply, protocol.Statistics)
    values = msgspec.json.decode(msgspec.json.encode(reply.values))
    assert values["upcalls"]["lookup"] == 3
    assert values["store"]["requests"] == {"get": 4, "put": 0}
    assert values["store"]["bytes"] == {"read": 4096, "written": 0}
    assert values["cache"] == {"hits": 3, "misses": 1, "bytes": 2048}
    assert values["dirty"] == {"files": 1, "bytes": 10}
    assert values["memory"]["buffers"] == 7
    assert 1 << 20 < values["memory"]["rss"] < 1 << 40
    assert values["daemon"]["pid"] == os.getpid()
    assert values["mount"]["source"] == "s3://bucket/prefix/"
    assert values["capabilities"]["notes"] == ["ranges answered with 200"]
    assert values["unfinished"][0]["path"] == "a/b"
    assert values["unfinished"][0]["error"] == "no room"


async def test_one_connection_carries_many_requests(socket_path: Path) -> None:
    fs = FakeFilesystem([FakeFile("7", "x", state="orphan"), FakeFile("8", "y", state="orphan")])
    async with talking_to(make_server(fs), socket_path) as stream:
        hello = await ask(stream, protocol.Ping())
        assert isinstance(hello, protocol.Hello)
        assert hello.pid == os.getpid()
        for request in (protocol.FinishOrphan("7"), protocol.AbortOrphan("8")):
            *_, reply = await follow(stream, request)
            assert reply == protocol.Done()
        assert await ask(stream, protocol.ListUnfinished()) == protocol.UnfinishedFiles((), 0)
    assert (fs.finished, fs.aborted) == (["7"], ["8"])


async def test_an_unfinished_list_is_cut_but_counted(socket_path: Path) -> None:
    fs = FakeFilesystem([FakeFile(str(n), f"d/{n}") for n in range(protocol.FILES_MAX + 5)])
    async with talking_to(make_server(fs), socket_path) as stream:
        reply = await ask(stream, protocol.ListUnfinished())
    assert isinstance(reply, protocol.UnfinishedFiles)
    assert (len(reply.files), reply.count) == (protocol.FILES_MAX, protocol.FILES_MAX + 5)


async def test_names_that_are_not_utf8_can_be_listed(socket_path: Path) -> None:
    fs = FakeFilesystem([FakeFile("1", os.fsdecode(b"caf\xe9"))])
    async with talking_to(make_server(fs), socket_path) as stream:
        reply = await ask(stream, protocol.ListUnfinished())
    assert isinstance(reply, protocol.UnfinishedFiles)
    assert reply.files[0].path == "caf\N{REPLACEMENT CHARACTER}"


async def test_make_durable_reports_progress_up_to_done(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "PROGRESS_INTERVAL_S", 0.01)
    fs = FakeFilesystem([FakeFile("1", "d/a"), FakeFile("2", "d/b", bytes=3000), FakeFile("3", "old", state="orphan")])
    async with talking_to(make_server(fs), socket_path) as stream:
        *progress, last = await follow(stream, protocol.MakeDurable("/d/"))
    assert last == protocol.Done()
    assert fs.durable_asked == ["d"]
    assert progress[0] == protocol.Progress(bytes_done=0, bytes_total=4000, files_left=2)
    done = [reply.bytes_done for reply in progress if isinstance(reply, protocol.Progress)]
    assert done == sorted(done)
    assert done[-1] > 1000
    assert all(isinstance(reply, protocol.Progress) and reply.bytes_total == 4000 for reply in progress)


async def test_meter_holds_nothing_of_files_that_left() -> None:
    fs = FakeFilesystem()
    measure = make_server(fs)._meter("")  # noqa: SLF001
    tracemalloc.start()
    try:
        for turn in range(20):
            fs.files = [FakeFile(f"{turn}-{number}", "d/f", bytes=10) for number in range(1000)]
            await measure()
        fs.files = []
        assert await measure() == protocol.Progress(bytes_done=200_000, bytes_total=200_000, files_left=0)
        assert tracemalloc.get_traced_memory()[0] < 300_000
    finally:
        tracemalloc.stop()


async def test_make_durable_that_fails_names_the_files_and_not_the_orphans(socket_path: Path) -> None:
    fs = FakeFilesystem([FakeFile("1", "a"), FakeFile("2", "b", state="orphan")], refuse="access denied")
    async with talking_to(make_server(fs), socket_path) as stream:
        *_, last = await follow(stream, protocol.MakeDurable())
        assert isinstance(await ask(stream, protocol.Ping()), protocol.Hello)
    assert isinstance(last, protocol.Failed)
    assert last.message == "access denied"
    assert [(file.path, file.state, file.error) for file in last.files] == [("a", "failed", "access denied")]


async def test_a_client_that_leaves_in_mid_progress_harms_nobody(socket_path: Path) -> None:
    fs = FakeFilesystem([FakeFile("1", "a", bytes=10**9)], step=1)
    server = make_server(fs)
    async with talking_to(server, socket_path) as stream:
        leaver = await trio.open_unix_socket(str(socket_path))
        await leaver.send_all(protocol.encode(protocol.MakeDurable()))
        assert await read_line(leaver)
        await leaver.aclose()
        assert isinstance(await ask(stream, protocol.Ping()), protocol.Hello)
        fs.files.clear()


@pytest.mark.parametrize(
    "line", [b"nonsense\n", b'{"type": "drop_everything"}\n', b'{"type": "finish_orphan"}\n', b"\xff\n"]
)
async def test_what_is_no_request_is_refused_and_the_next_client_served(socket_path: Path, line: bytes) -> None:
    async with talking_to(make_server(FakeFilesystem()), socket_path) as stream:
        await stream.send_all(line)
        refusal = protocol.decode_reply(await read_line(stream))
        assert isinstance(refusal, protocol.Failed)
        assert "not a control request" in refusal.message
        assert await read_line(stream) == b""
        async with await trio.open_unix_socket(str(socket_path)) as other:
            assert isinstance(await ask(other, protocol.Ping()), protocol.Hello)


async def test_a_line_without_end_is_cut_off(socket_path: Path) -> None:
    async with talking_to(make_server(FakeFilesystem()), socket_path) as stream:
        with trio.fail_after(10), pytest.raises(trio.BrokenResourceError):
            while True:
                await stream.send_all(b"x" * 65536)


async def test_a_bug_in_the_filesystem_is_an_answer_not_an_end(
    socket_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with talking_to(make_server(FakeFilesystem(explode=True)), socket_path) as stream:
        reply = await ask(stream, protocol.Stats())
        assert isinstance(reply, protocol.Failed)
        assert "RuntimeError" in reply.message
        assert isinstance(await ask(stream, protocol.Ping()), protocol.Hello)
    assert "control request Stats failed" in caplog.text


async def test_an_unknown_orphan_is_an_error_with_its_message(socket_path: Path) -> None:
    async with talking_to(make_server(FakeFilesystem()), socket_path) as stream:
        *_, reply = await follow(stream, protocol.AbortOrphan("9"))
    assert reply == protocol.Failed(message="no orphan 9")


@pytest.mark.parametrize("request_type", [protocol.FinishOrphan, protocol.AbortOrphan])
async def test_orphan_that_takes_long_sends_progress_up_to_the_end(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch, request_type: type[protocol.FinishOrphan]
) -> None:
    """An upload may take longer than a client waits for a line."""
    monkeypatch.setattr(server_module, "PROGRESS_INTERVAL_S", 0.01)
    fs = FakeFilesystem([FakeFile("7", "x", state="orphan")], store_is_away=trio.Event())
    async with talking_to(make_server(fs), socket_path) as stream:
        await stream.send_all(protocol.encode(request_type("7")))
        for _ in range(3):
            assert protocol.decode_reply(await read_line(stream)) == protocol.NOTHING
        assert fs.store_is_away is not None
        fs.store_is_away.set()
        while (reply := protocol.decode_reply(await read_line(stream))) == protocol.NOTHING:
            pass
    assert reply == protocol.Done()
    assert fs.finished + fs.aborted == ["7"]


async def test_more_clients_than_there_are_places_are_refused(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "CLIENTS_MAX", 2)
    async with talking_to(make_server(FakeFilesystem()), socket_path) as first:
        async with await trio.open_unix_socket(str(socket_path)) as second:
            for stream in (first, second):
                assert isinstance(await ask(stream, protocol.Ping()), protocol.Hello)
            async with await trio.open_unix_socket(str(socket_path)) as third:
                refusal = protocol.decode_reply(await read_line(third))
                assert isinstance(refusal, protocol.Failed)
                assert "2 control connections" in refusal.message
        await trio.testing.wait_all_tasks_blocked(0.01)
        async with await trio.open_unix_socket(str(socket_path)) as fourth:
            assert isinstance(await ask(fourth, protocol.Ping()), protocol.Hello)


async def test_client_waits_a_moment_for_a_place(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "CLIENTS_MAX", 1)
    monkeypatch.setattr(server_module, "PLACE_S_MAX", 20.0)
    async with talking_to(make_server(FakeFilesystem()), socket_path) as first:
        assert isinstance(await ask(first, protocol.Ping()), protocol.Hello)
        async with await trio.open_unix_socket(str(socket_path)) as second, trio.open_nursery() as nursery:
            answers: list[protocol.Reply] = []

            async def ping() -> None:
                answers.append(await ask(second, protocol.Ping()))

            nursery.start_soon(ping)
            await trio.sleep(0.1)
            assert answers == []
            await first.aclose()
        assert isinstance(answers[0], protocol.Hello)


async def test_a_silent_client_loses_its_place(socket_path: Path, autojump_clock: MockClock) -> None:
    async with talking_to(make_server(FakeFilesystem()), socket_path) as stream:
        began = trio.current_time()
        assert await stream.receive_some(1) == b""
        assert trio.current_time() - began == pytest.approx(server_module.IDLE_S_MAX, abs=1)


async def test_other_users_are_refused(socket_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stranger = frozenset((os.geteuid() + 1,))
    async with talking_to(make_server(FakeFilesystem(), allowed_uids=stranger), socket_path) as stream:
        refusal = protocol.decode_reply(await read_line(stream))
    assert isinstance(refusal, protocol.Failed)
    assert "another user" in refusal.message
    assert f"uid {os.geteuid()} refused" in caplog.text


async def test_the_socket_is_the_owners_alone_and_goes_with_the_server(socket_path: Path) -> None:
    async with serve_control(make_server(FakeFilesystem()), socket_path):
        assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
    assert not socket_path.exists()


async def test_a_stale_socket_is_replaced_and_a_live_one_is_not(socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(socket_path))
    async with talking_to(make_server(FakeFilesystem()), socket_path) as stream:
        with pytest.raises(MountError, match="another daemon answers"):
            listen(socket_path)
        assert isinstance(await ask(stream, protocol.Ping()), protocol.Hello)


async def test_unmount_is_passed_on(socket_path: Path) -> None:
    asked = trio.Event()
    async with talking_to(make_server(FakeFilesystem(), request_unmount=asked.set), socket_path) as stream:
        assert await ask(stream, protocol.Unmount()) == protocol.Done()
    assert asked.is_set()


@pytest.mark.parametrize("error", ["", "1 file is not in the store"])
async def test_those_who_wait_for_the_end_are_told_how_it_went(socket_path: Path, error: str) -> None:
    fs = FakeFilesystem([FakeFile("1", "a", state="failed")] if error else [])
    server = make_server(fs)
    replies: list[protocol.Reply] = []
    async with talking_to(server, socket_path) as stream, trio.open_nursery() as nursery:

        async def wait() -> None:
            replies.extend(await follow(stream, protocol.WaitEnd()))

        nursery.start_soon(wait)
        while not server.waiting:
            await trio.sleep(0.01)
        await server.end(error)
    if error:
        assert isinstance(replies[-1], protocol.Failed)
        assert replies[-1].message == error
        assert [file.path for file in replies[-1].files] == ["a"]
    else:
        assert replies[-1] == protocol.Done()


async def test_wait_for_path_is_answered_when_it_is_there(socket_path: Path) -> None:
    fs = FakeFilesystem()
    async with talking_to(make_server(fs), socket_path) as stream:
        fs.there |= {"d/f", "d/f@v2"}
        for request in (protocol.WaitPath("/d/f/"), protocol.WaitPath("d/f", "v2")):
            assert (await follow(stream, request))[-1] == protocol.Done()
        *_, late = await follow(stream, protocol.WaitPath("d/f", "v3", 0.05))
    assert late == protocol.Failed(message="after 0.05 s it does not exist")


async def test_waits_for_paths_take_no_place_of_other_clients(
    socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "CLIENTS_MAX", 1)
    monkeypatch.setattr(server_module, "WAITS_MAX", 3)
    fs = FakeFilesystem()
    async with serve_control(make_server(fs), socket_path), AsyncExitStack() as stack:

        async def begin() -> tuple[trio.SocketStream, protocol.Reply]:
            stream = await stack.enter_async_context(await trio.open_unix_socket(str(socket_path)))
            return stream, await ask(stream, protocol.WaitPath("f"))

        waits = [await begin() for _ in range(3)]
        assert [reply for _, reply in waits] == [protocol.NOTHING] * 3
        refused, reply = await begin()
        assert reply == protocol.Failed(message="3 waits are under way: try again later")
        await refused.aclose()
        fs.there.add("f")
        for stream, _ in waits:
            while (reply := protocol.decode_reply(await read_line(stream))) == protocol.NOTHING:
                pass
            assert reply == protocol.Done()


async def test_wait_of_client_that_leaves_is_cancelled(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "WAIT_INTERVAL_S", 0.01)
    fs = FakeFilesystem()
    async with talking_to(make_server(fs), socket_path) as stream:
        await stream.send_all(protocol.encode(protocol.WaitPath("f")))
        assert await read_line(stream)
        assert fs.waited == ["f"]
        await stream.aclose()
        with trio.fail_after(10):
            while fs.waited:
                await trio.sleep(0.01)


async def test_wait_ends_with_the_mount(socket_path: Path) -> None:
    server = make_server(FakeFilesystem())
    async with talking_to(server, socket_path) as stream:
        await stream.send_all(protocol.encode(protocol.WaitPath("f")))
        assert await read_line(stream)
        server.begin_draining()
        with trio.fail_after(10):
            while (reply := protocol.decode_reply(await read_line(stream))) == protocol.NOTHING:
                pass
        assert reply == protocol.Failed(message="the mount has ended")
        assert (await follow(stream, protocol.WaitPath("f")))[-1] == reply


async def test_warm_shows_progress_and_a_client_that_leaves_ends_it(socket_path: Path) -> None:
    fs = FakeFilesystem()
    async with talking_to(make_server(fs), socket_path) as stream:
        assert await ask(stream, protocol.SelectPaths((("a", ""), ("b", "*")))) == protocol.Done()
        await stream.send_all(protocol.encode(protocol.WarmCache(bytes_s_max=5)))
        seen = protocol.decode_reply(await read_line(stream))
        while not isinstance(seen, protocol.Progress) or seen.stage != "fetching":
            seen = protocol.decode_reply(await read_line(stream))
        assert (seen.files_left, seen.files_total, seen.bytes_total) == (2, 2, 5)
        await stream.aclose()
        with trio.fail_after(10):
            while not fs.residency.was_cancelled:
                await trio.sleep(0.01)


async def test_warm_that_fails_says_why(socket_path: Path) -> None:
    fs = FakeFilesystem()
    fs.residency.error = ConfigError("no such glob")
    fs.residency.finish.set()
    async with talking_to(make_server(fs), socket_path) as stream:
        *_, failed = await follow(stream, protocol.WarmCache())
        assert failed == protocol.Failed(message="no such glob", exit_code=2)


async def test_selection_is_bounded(socket_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "SELECTED_MAX", 3)
    async with talking_to(make_server(FakeFilesystem()), socket_path) as stream:
        assert await ask(stream, protocol.SelectPaths((("a", ""),) * 3)) == protocol.Done()
        refused = await ask(stream, protocol.SelectPaths((("b", ""),)))
        assert refused == protocol.Failed(message="more than 3 paths: name their directories")


async def test_clone_answers_when_the_copy_is_there_or_why_it_is_not(socket_path: Path) -> None:
    fs = FakeFilesystem()
    async with talking_to(make_server(fs), socket_path) as stream:
        *waiting, done = await follow(stream, protocol.Clone("/d/", "copy", force=True))
        assert all(isinstance(each, protocol.Progress) for each in waiting)
        assert done == protocol.Done()
        *_, failed = await follow(stream, protocol.Clone("missing", "copy"))
        assert isinstance(failed, protocol.Failed)
    assert fs.cloned == [("d", "copy", True)]
