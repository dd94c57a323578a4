"""Lock files of equal bytes, made by link(2) and O_EXCL on several nodes: one node has the name at a time."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

import pytest
import trio

from lakefs_fuse.errors import FileError, LakeError, Unavailable
from lakefs_fuse.store.protocol import Capabilities, ObjectStore
from lakefs_fuse.vfs.ops import link as linking
from tests import virtual_time
from tests.memory_store import MemoryStore, Request, When
from tests.servers import Server
from tests.store.lakes import open_lake
from tests.tiers import sized
from tests.vfs.lakes import Clock, Lake, lake, two_lakes

ABLE = Capabilities(name="memory", put_if_match=True, complete_if_match=True, delete_if_match=True)
WITHOUT_MATCH = Capabilities(name="memory")
ROUNDS = sized(20, 200)
SEEDS = sized(1, 20)
WHO = "abc"
How = Literal["link", "exclusive"]
HOWS: list[tuple[tuple[How, ...], str]] = [
    (("link",), "close"),
    (("link",), "writeback"),
    (("exclusive",), "close"),
    (("link", "exclusive"), "close"),
]


class MachineClock(Clock):
    """The time of this machine, which stores outside this process have, too."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def boot_ns(self) -> int:
        return time.monotonic_ns()

    def advance(self, seconds: float) -> None:
        """The store's time passes by itself."""


class Lock:
    """A lock file, and who has it."""

    def __init__(self, clock: Clock, rng: random.Random, hows: Sequence[How]) -> None:
        self.clock, self.rng, self.hows, self.holder = clock, rng, hows, ""
        self.won, self.refused = Counter[str](), Counter[int]()

    async def take(self, node: Lake, who: str) -> bool:
        how = self.rng.choice(self.hows)
        try:
            if how == "link":
                await node.fs.link((await node.found(f"source-{who}")).inode, *await node.parent("lock"))
            else:
                handle = await node.create("lock", os.O_RDWR | os.O_EXCL)
                await node.fs.write(handle, 0, b"locked")
                await node.close(handle)
        except FileError as error:
            assert error.errno in (errno.EEXIST, errno.EBUSY), error
            self.refused[error.errno] += 1
            return False
        except LakeError:
            return False
        assert not self.holder, f"{who} got the lock by {how}, and {self.holder} has it"
        self.holder = who
        self.won[how] += 1
        return True

    async def contend(self, node: Lake, who: str, rounds: int) -> None:
        for _ in range(rounds):
            if await self.take(node, who):
                await trio.sleep(self.rng.choice((0, 0.001, 0.005)))
                self.clock.advance(self.rng.choice((0, 0.01, 0.3)))
                self.holder = ""  # the next may have it before unlink returns
                await node.unlink("lock")
                if self.rng.random() < 0.7:
                    await node.fs.sync_names()
                continue
            await trio.sleep(self.rng.choice((0, 0.002)))
            if self.rng.random() < 0.5:
                await node.poll()


def delays(rng: random.Random, lost: float) -> Callable[[Request, When], None]:
    """Requests take a while; of some PUTs the answer is lost."""
    mutex = threading.Lock()

    def hook(request: Request, when: When) -> None:
        with mutex:
            pause_s = rng.choice((0.0, 0.0, 0.0, 0.001, 0.003)) if rng.random() < 0.98 else 0.03
            is_lost = when == "after" and request.what == "put" and rng.random() < lost
        virtual_time.sleep(pause_s)
        if is_lost:
            raise Unavailable("lost")

    return hook


async def race(
    stores: Sequence[ObjectStore], capabilities: Capabilities, directory: Path, lock: Lock, rounds: int,
    durability: str = "close",
) -> None:  # fmt: skip
    """Have one node over each of ``stores``, which are one, contend for the lock; then all show the same."""
    async with AsyncExitStack() as stack:
        nodes: dict[str, Lake] = {}
        for who, store in zip(WHO, stores, strict=False):
            mount = lake(
                store, directory / who, clock=lock.clock, capabilities=capabilities, pack="never",
                delete_after_s=300.0, retry_timeout_s=5.0, durability=durability,
            )  # fmt: skip
            nodes[who] = await stack.enter_async_context(mount)
            await nodes[who].write(f"source-{who}", b"locked")
        async with trio.open_nursery() as nursery:
            for who, node in nodes.items():
                nursery.start_soon(lock.contend, node, who, rounds)
        for _ in range(2):
            for node in nodes.values():
                await node.fs.make_durable()
                await node.poll()
        assert len({tuple(await node.names()) for node in nodes.values()}) == 1
    assert set(lock.won) == set(lock.hows)


@pytest.mark.parametrize(("hows", "durability"), HOWS)
@pytest.mark.parametrize("lost", [0.0, 0.05])
@pytest.mark.parametrize("seed", range(SEEDS))
async def test_lock_file_of_equal_bytes_has_one_holder(
    tmp_path: Path, seed: int, lost: float, hows: tuple[How, ...], durability: str
) -> None:
    store, rng = MemoryStore(ABLE), random.Random(seed)
    store.equal_bytes_have_equal_etags = True
    store.hook = delays(rng, lost)
    await race([store] * 3, ABLE, tmp_path, Lock(Clock(), rng, hows), ROUNDS, durability)


@pytest.mark.parametrize("capabilities", [ABLE, WITHOUT_MATCH])
async def test_lock_file_that_the_store_copies_or_that_it_replaces_without_condition_has_one_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capabilities: Capabilities
) -> None:
    monkeypatch.setattr(linking, "SENT_BYTES_MAX", 0)
    store, rng = MemoryStore(capabilities), random.Random(1)
    store.equal_bytes_have_equal_etags = True
    store.hook = delays(rng, 0.0)
    await race([store] * 3, capabilities, tmp_path, Lock(Clock(), rng, ("link", "exclusive")), ROUNDS)


@pytest.mark.parametrize("name", ["local", "seaweedfs", pytest.param("moto", marks=pytest.mark.long)])
async def test_lock_file_in_a_real_store_has_one_holder(
    tmp_path: Path, request: pytest.FixtureRequest, new_bucket: Callable[[Server], str], name: str
) -> None:
    """`rclone serve s3` has no condition for two nodes: `link` is EPERM there."""
    opened = open_lake(name, request, tmp_path, new_bucket)
    try:
        lock = Lock(MachineClock(), random.Random(name), ("link", "exclusive"))
        await race([opened.store] * 2, opened.capabilities, tmp_path, lock, ROUNDS)
    finally:
        opened.store.close()


async def test_of_two_nodes_that_create_a_removed_name_with_the_same_bytes_one_wins(tmp_path: Path) -> None:
    store = MemoryStore(ABLE)
    store.equal_bytes_have_equal_etags = True
    async with two_lakes(store, tmp_path, pack="never", delete_after_s=300.0) as (one, two):
        await one.write("lock", b"locked")
        await one.unlink("lock")
        await one.fs.sync_names()
        await two.poll()
        handles = [(node, await node.create("lock", os.O_RDWR | os.O_EXCL)) for node in (one, two)]
        answers: list[int] = []
        for node, handle in handles:
            await node.fs.write(handle, 0, b"locked")
            try:
                await node.close(handle)
                answers.append(0)
            except FileError as error:
                answers.append(error.errno)
        assert answers == [0, errno.EEXIST]
        await one.fs.make_durable()
        await two.poll()
        assert await one.read("lock") == await two.read("lock") == b"locked"
