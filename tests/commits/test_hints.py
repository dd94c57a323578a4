"""Hints: mounts that tell each other of commits poll at once, and nothing but promptness depends on it."""

from __future__ import annotations

import queue
import random
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
import trio

from lakefs_fuse.commits import hints as hints_module
from lakefs_fuse.commits.archive import commit_key
from lakefs_fuse.commits.bundles import MIXED, Copy, bundle_key
from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.hints import HINTED_REFRESH_S, Hints
from lakefs_fuse.commits.idleness import Idleness
from lakefs_fuse.commits.poller import Poller
from lakefs_fuse.commits.record import Mkdir
from lakefs_fuse.environment.hint_channel import RedisChannel, read_password
from lakefs_fuse.environment.threads import WorkerThreads
from lakefs_fuse.errors import AccessDenied, ConfigError, Unavailable
from lakefs_fuse.metrics import HintMetrics
from tests import virtual_time
from tests.commits.committing import Site
from tests.memory_store import Failures

REFRESH_S = 5.0
OTHER, OWN = "0000000b", "0000000a"


@dataclass
class Channel:
    """A `HintChannel` within this process, which a test can cut."""

    sent: list[bytes] = field(default_factory=list)
    messages: queue.Queue[bytes] = field(default_factory=queue.Queue)
    is_away: bool = False
    is_silent: bool = False
    connections: int = 0

    def _check(self) -> None:
        if self.is_away:
            raise OSError("Redis is away")

    def connect(self) -> None:
        self._check()
        self.connections += 1

    def receive(self, timeout_s: float) -> bytes | None:
        """May be called in a worker thread: it waits by `virtual_time`."""
        self._check()
        if self.messages.empty():
            virtual_time.sleep(min(timeout_s, 0.02))
        try:
            return self.messages.get_nowait()
        except queue.Empty:
            return None

    def ping(self) -> None:
        self._check()
        if not self.is_silent:
            self.messages.put(b"")

    def publish(self, message: bytes) -> None:
        self._check()
        self.sent.append(message)

    def close(self) -> None: ...


@dataclass
class Listener:
    channel: Channel
    hints: Hints
    metrics: HintMetrics


def listener_of(channel: Channel) -> Listener:
    metrics = HintMetrics()
    hints = Hints(
        channel, WorkerThreads(), metrics,
        writer=OWN, refresh_s=REFRESH_S, rng=random.Random(0), idleness=Idleness(0.0),
    )  # fmt: skip
    return Listener(channel, hints, metrics)


@pytest.fixture
def listener(nursery: trio.Nursery) -> Listener:
    made = listener_of(Channel())
    nursery.start_soon(made.hints.run)
    return made


async def until(done: Callable[[], object]) -> None:
    with trio.fail_after(20):
        while not done():
            await trio.sleep(0.005)


async def is_due(hints: Hints, within_s: float = 1.0) -> bool:
    """A hint makes this mount poll."""
    with trio.move_on_after(within_s) as scope:
        await hints.wait_due()
    hints.polling()
    return not scope.cancelled_caught


async def connected(listener: Listener) -> None:
    await until(lambda: listener.metrics.connected)
    assert await is_due(listener.hints), "what was published before is not heard"


def key_of(time: int, writer: str = OTHER) -> str:
    return commit_key(time, writer)


async def test_hint_of_another_mount_makes_this_one_poll(listener: Listener) -> None:
    await connected(listener)
    assert listener.hints.refresh_s() == HINTED_REFRESH_S
    listener.channel.messages.put(key_of(1).encode())
    assert await is_due(listener.hints)
    assert not await is_due(listener.hints, 0.2), "once"
    listener.channel.messages.put(key_of(2, OWN).encode())
    assert not await is_due(listener.hints, 0.2), "its own"
    listener.channel.messages.put(key_of(1).encode())
    assert not await is_due(listener.hints, 0.2), "known"
    assert (listener.metrics.received, listener.metrics.foreign, listener.metrics.errors) == (3, 0, 0)


async def test_commits_of_a_moment_share_a_message(listener: Listener) -> None:
    keys = [key_of(number, OWN) for number in range(2500)]
    for key in keys:
        listener.hints.publish(key)
    await until(lambda: listener.metrics.published == 2500)
    assert len(listener.channel.sent) == 3
    assert "\n".join(keys) == "\n".join(message.decode() for message in listener.channel.sent)


HOSTILE = [
    b"PING", b"\x00" * 100, b"\xff\xfe", b"x" * (1 << 20), b"\n" * 5000, b".lakefs/commits/../../etc/passwd",
    b".lakefs/commits/" + b"f" * 16 + b"-" + b"g" * 8 + b".zip", "größer".encode(), b"{}", b"\r\n\r\n",
    b"*1\r\n$4\r\nPING",
]  # fmt: skip


async def test_messages_of_others_count_and_do_nothing(listener: Listener) -> None:
    await connected(listener)
    for message in HOSTILE:
        listener.channel.messages.put(message)
    await until(lambda: listener.metrics.received == len(HOSTILE))
    assert listener.metrics.foreign == len(HOSTILE)
    assert not await is_due(listener.hints, 0.1)
    listener.channel.messages.put(b"nonsense\n" + key_of(1).encode())
    assert await is_due(listener.hints)


async def test_many_hints_are_answered_by_few_polls(listener: Listener) -> None:
    await connected(listener)
    polls = 0
    for number in range(10_000):
        if number % 20 == 0:
            listener.channel.messages.put("\n".join(key_of(number + more) for more in range(20)).encode())
    with trio.move_on_after(2.0):
        while True:
            await listener.hints.wait_due()
            listener.hints.polling()
            polls += 1
            listener.hints.polled([])
            listener.channel.messages.put(key_of(1_000_000 + polls).encode())
    assert 5 <= polls <= 16


async def test_lost_channel_makes_the_mount_poll_by_itself_until_it_is_back(
    listener: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger=hints_module.__name__)
    await connected(listener)
    listener.channel.is_away = True
    assert await is_due(listener.hints), "at once"
    assert listener.hints.refresh_s() == REFRESH_S
    listener.hints.publish(key_of(1, OWN))
    await until(lambda: listener.metrics.errors >= 3)
    assert not listener.metrics.connected
    listener.channel.is_away = False
    await until(lambda: listener.metrics.connected)
    assert await is_due(listener.hints), "what was published meanwhile is not heard"
    assert listener.hints.refresh_s() == HINTED_REFRESH_S
    warnings = [record for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1, "told once"
    caplog.clear()


async def test_silent_channel_is_lost(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints_module, "SILENCE_S_MAX", 0.2)
    await connected(listener)
    await trio.sleep(0.5)
    assert listener.channel.connections == 1, "it answers pings"
    listener.channel.is_silent = True
    await until(lambda: listener.channel.connections > 1)
    assert listener.metrics.errors >= 1


async def test_commits_that_no_hint_names_make_the_mount_poll_by_itself(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hints_module, "UNNAMED_S_MAX", 0.2)
    monkeypatch.setattr(hints_module, "UNNAMED_PAUSE_S", 0.5)
    await connected(listener)
    listener.hints.polled([])
    listener.hints.polled([key_of(1)])
    listener.channel.messages.put(key_of(1).encode())
    assert await is_due(listener.hints)
    await trio.sleep(0.3)
    assert listener.hints.refresh_s() == HINTED_REFRESH_S, "the hint came after the poll"
    listener.hints.polled([key_of(2)])
    await trio.sleep(0.3)
    assert listener.hints.refresh_s() == REFRESH_S
    await trio.sleep(0.6)
    assert listener.hints.refresh_s() == HINTED_REFRESH_S


async def test_commits_from_before_the_channel_was_there_need_no_hint(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first poll after a connection finds what was published while nothing was heard."""
    monkeypatch.setattr(hints_module, "UNNAMED_S_MAX", 0.05)
    await connected(listener)
    listener.hints.polled([key_of(1)])
    await trio.sleep(0.1)
    assert listener.hints.refresh_s() == HINTED_REFRESH_S
    listener.hints.polled([key_of(2)])
    assert listener.hints.refresh_s() == REFRESH_S, "until it is known whether a hint names it"
    await trio.sleep(0.1)
    assert listener.hints.refresh_s() == REFRESH_S


async def test_channel_that_takes_connections_only_is_warned_of_once(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hints_module, "PAUSE_S_FIRST", 0.01)
    failing = OSError("NOPERM")

    def ping(channel: Channel) -> None:
        raise failing

    monkeypatch.setattr(Channel, "ping", ping)
    listener = listener_of(Channel())
    nursery.start_soon(listener.hints.run)
    await until(lambda: listener.channel.connections > 4)
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1


async def test_mount_without_a_channel_polls_as_ever() -> None:
    hints = Hints(
        None, WorkerThreads(), HintMetrics(),
        writer=OWN, refresh_s=REFRESH_S, rng=random.Random(0), idleness=Idleness(0.0),
    )  # fmt: skip
    await hints.run()
    hints.publish(key_of(1))
    assert not hints.is_used
    assert hints.refresh_s() == REFRESH_S


def test_password_is_read_from_the_environment_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from the file\n")
    file = {"LAKEFS_HINTS_PASSWORD_FILE": str(tmp_path / "password")}
    assert read_password({}) is None
    assert read_password({"LAKEFS_HINTS_PASSWORD": "secret"}) == "secret"
    assert read_password({"LAKEFS_HINTS_PASSWORD": "secret", **file}) == "from the file"
    with pytest.raises(ConfigError, match="LAKEFS_HINTS_PASSWORD_FILE"):
        read_password({"LAKEFS_HINTS_PASSWORD_FILE": str(tmp_path / "missing")})


@pytest.mark.parametrize("answer", [b":1\r\n", b"*1\r\n$7\r\nmessage\r\n", b"-NOPERM\r\n", b"?\r\n"], ids=repr)
def test_redis_that_answers_something_else_is_an_os_error(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            kind = b"*"
            with connection:
                while (request := connection.recv(4096)) and b"SUBSCRIBE" not in request:
                    if b"HELLO" in request:  # of clients that speak the third version of the protocol
                        kind = b">"
                        connection.sendall(b"%1\r\n$5\r\nproto\r\n:3\r\n")
                    connection.sendall(b"+OK\r\n" * (request.count(b"*") - request.count(b"HELLO")))
                if request:
                    name = b"lakefs-fuse/lake/commits"
                    head = kind + b"3\r\n$9\r\nsubscribe\r\n$%d\r\n%s\r\n:1\r\n"
                    connection.sendall(head % (len(name), name) + answer)
                    connection.recv(4096)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        channel = RedisChannel(f"redis://127.0.0.1:{server.getsockname()[1]}", "lake", None)
        channel.connect()
        with pytest.raises(OSError, match=r"\w"):
            for _ in range(3):
                channel.receive(0.5)
        channel.close()
        serving.join()


def test_redis_that_is_not_there_is_an_os_error() -> None:
    channel = RedisChannel("redis://127.0.0.1:1/0", "lake", None)
    with pytest.raises(OSError, match="Connection"):
        channel.connect()
    with pytest.raises(OSError, match="Connection"):
        channel.publish(b"x")
    channel.close()


async def test_poller_polls_when_a_hint_comes_and_rarely_else(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("one") as one, site.daemon("two") as two:
        channel, metrics = Channel(), HintMetrics()
        hints = Hints(
            channel, WorkerThreads(), metrics,
            writer=two.log.writer, refresh_s=30.0, rng=random.Random(0), idleness=Idleness(0.0),
        )  # fmt: skip
        poller = Poller(two.log, two.applier, two.metrics, refresh_s=30.0, rng=random.Random(0), hints=hints)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hints.run)
            nursery.start_soon(poller.run)
            await until(lambda: two.metrics.polls == 1)
            await one.committer.commit(Change(operations=[Mkdir("d", 0o755, 0, 0, 0)]))
            await trio.sleep(0.2)
            assert two.find("d") is None
            (key,) = site.commits()
            channel.messages.put(key.encode())
            await until(lambda: two.find("d") is not None)
            await trio.sleep(0.3)
            assert two.metrics.polls == 2
            nursery.cancel_scope.cancel()


async def test_poller_tries_again_soon_where_the_poll_for_a_hint_failed(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("one") as one, site.daemon("two") as two:
        made = listener_of(Channel())
        poller = Poller(two.log, two.applier, two.metrics, refresh_s=0.1, rng=random.Random(0), hints=made.hints)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.hints.run)
            nursery.start_soon(poller.run)
            await until(lambda: two.metrics.polls)
            await one.committer.commit(Change(operations=[Mkdir("d", 0o755, 0, 0, 0)]))
            (key,) = site.commits()
            site.store.hook = Failures(lambda request: request.what == "list", Unavailable("away"), count=1)
            made.channel.messages.put(key.encode())
            await until(lambda: two.find("d") is not None)
            nursery.cancel_scope.cancel()


async def test_log_announces_what_is_stored_and_nothing_else(tmp_path: Path) -> None:
    site = Site(tmp_path)
    with site.daemon("one") as one:
        told: list[str] = []
        log = CommitLog(one.client, one.clock, WorkerThreads(), writer=OWN, publish_hint=told.append)
        site.store.hook = Failures(lambda request: request.what == "put", AccessDenied("denied"))
        with pytest.raises(AccessDenied):
            await log.put(log.key(log.clock.now()), b"commit")
        assert told == []
        meta = await log.put(log.key(log.clock.now()), b"commit")
        assert told == [meta.key]
        assert log.has_hints
        assert not one.log.has_hints


async def test_what_is_left_to_a_repeater_waits_for_no_hint(tmp_path: Path) -> None:
    """The bundle with it comes without one."""
    site = Site(tmp_path)
    with site.daemon("one") as one, site.daemon("two") as two:
        channel = Channel()
        hints = Hints(
            channel, WorkerThreads(), HintMetrics(),
            writer=two.log.writer, refresh_s=5.0, rng=random.Random(0), idleness=Idleness(0.0),
        )  # fmt: skip
        poller = Poller(two.log, two.applier, two.metrics, refresh_s=5.0, rng=random.Random(0), hints=hints)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hints.run)
            await until(lambda: hints.refresh_s() == HINTED_REFRESH_S)
            for number in range(20):
                await one.committer.commit(Change(operations=[Mkdir(f"d{number}", 0o755, 0, 0, 0)]))
            metas = [site.store.objects[key][1] for key in site.commits()]
            copies = [Copy(meta.key, meta.etag, site.store.data(meta.key)) for meta in metas[:10]]
            site.store.give(bundle_key(copies, MIXED), msgspec.msgpack.encode(copies))
            nursery.start_soon(poller.poll_in_background)
            await until(lambda: two.find("d9") is not None)
            assert two.find("d19") is None, "the repeater is about to repeat it"
            await until(lambda: two.find("d19") is not None)
            nursery.cancel_scope.cancel()
