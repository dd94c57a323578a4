"""Two mounts of one lake on SeaweedFS that tell each other of commits over Redis."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake, eventually
from tests.mount.test_commits import another
from tests.servers import free_port, redis_server

PASSWORD = "a-password-of-redis"
OPTIONS = ("--metadata-ttl", "1h")
SEEN_S_MAX = 1.0
SLOW_MACHINE_S = 5.0


class Redis:
    """A server that a test starts and stops."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.port, self._stack = directory, free_port(), ExitStack()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        self._stack.enter_context(redis_server(self._directory, self.port, PASSWORD))

    def stop(self) -> None:
        self._stack.close()

    def publish(self, channel: str, message: bytes) -> None:
        command = ["redis-cli", "-p", str(self.port), "-a", PASSWORD, "-x", "PUBLISH", channel]
        subprocess.run(command, input=message, check=True, capture_output=True)

    def channels(self) -> list[str]:
        command = ["redis-cli", "-p", str(self.port), "-a", PASSWORD, "PUBSUB", "CHANNELS"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path / "redis")
    server.start()
    yield server
    server.stop()


Nodes = Callable[[str], tuple[Lake, Lake]]


@pytest.fixture
def nodes(make_lake: LakeMaker, tmp_path: Path, redis: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("LAKEFS_HINTS_PASSWORD", PASSWORD)
    with ExitStack() as stack:

        def make(refresh: str) -> tuple[Lake, Lake]:
            lake = make_lake("seaweedfs", *OPTIONS, "--refresh", refresh, "--hints", redis.url)
            lake.mount()
            other = stack.enter_context(another(lake, tmp_path))
            for node in (lake, other):
                eventually(lambda node=node: node.number("hints.connected"), "it hears hints")  # type: ignore[misc]
            return lake, other

        yield make


def seen_after_s(lake: Lake, other: Lake, name: str) -> float:
    """A file that the kernel of one node knows is not there is closed on the other."""
    path = lake.path / name
    assert not path.exists()
    (other.path / name).write_bytes(b"weights")
    began_s = time.monotonic()
    eventually(path.exists, f"{name} is seen")
    seen_s = time.monotonic() - began_s
    assert path.read_bytes() == b"weights"
    return seen_s


def test_file_is_seen_within_a_second_whatever_the_refresh(nodes: Nodes, redis: Redis) -> None:
    lake, other = nodes("60s")
    seen_s = [seen_after_s(lake, other, str(number)) for number in range(5)]
    assert min(seen_s) < SEEN_S_MAX, seen_s
    assert max(seen_s) < SEEN_S_MAX + SLOW_MACHINE_S, seen_s
    (lake.path / "0").rename(lake.path / "renamed")
    eventually((other.path / "renamed").exists, "the rename is seen")
    assert other.number("hints.published") >= 5
    assert lake.number("hints.received") >= 5
    assert lake.number("hints.errors") == other.number("hints.errors") == 0
    (channel,) = redis.channels()
    for message in (b"\x00\xff garbage", b".lakefs/commits/nonsense.zip", b"x" * (1 << 20)):
        redis.publish(channel, message)
    eventually(lambda: lake.number("hints.foreign") == 3, "they are counted")
    assert seen_after_s(lake, other, "after") < SEEN_S_MAX + SLOW_MACHINE_S
    assert PASSWORD not in lake.log() + other.log()


@pytest.mark.long  # commits/test_hints.py shows it
def test_mounts_go_on_without_redis_and_with_it_again(nodes: Nodes, redis: Redis) -> None:
    lake, other = nodes("2s")
    redis.stop()
    eventually(lambda: not lake.number("hints.connected"), "that is noticed")
    assert seen_after_s(lake, other, "without") < 2.0 + 2.0 + SLOW_MACHINE_S
    redis.start()
    for node in (lake, other):
        eventually(lambda node=node: node.number("hints.connected"), "it hears hints again")  # type: ignore[misc]
    seen_s = [seen_after_s(lake, other, str(number)) for number in range(3)]
    assert min(seen_s) < SEEN_S_MAX, seen_s
    assert lake.log().count("no hints until their channel is back") == 1
