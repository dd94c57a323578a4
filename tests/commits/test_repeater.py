"""The repeater: one follower of many writers fetches their commits for all others."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, quantiles
from typing import TypeVar

import pytest
import trio
from trio.testing import MockClock

from lakefs_fuse.commits import commit_log
from lakefs_fuse.commits.applier import Applier
from lakefs_fuse.commits.archive import commit_key
from lakefs_fuse.commits.bundles import SUFFIX
from lakefs_fuse.commits.poller import Poller
from lakefs_fuse.commits.record import Record
from lakefs_fuse.errors import AccessDenied
from tests.commits.archives import commit_of
from tests.commits.committing import Clock, Daemon, Site
from tests.commits.nodes import at
from tests.fakes import InlineThreads
from tests.memory_store import Failures
from tests.tiers import sized

T = TypeVar("T")

REFRESH_S = 5.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commits say nothing, so that applying them costs little."""

    def apply(applier: Applier, record: Record, *_: object, **__: object) -> None:
        applier.commits.record_applied(record.time, record.writer)

    monkeypatch.setattr(Applier, "apply", apply)


class VirtualClock(Clock):
    """The wall clock of all nodes is trio's."""

    def __call__(self) -> int:
        return at(trio.current_time())


class SlowThreads(InlineThreads):
    """Each call, requests of the store as well, takes 5 to 30 ms of virtual time."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def run(
        self,
        call: Callable[..., T],
        *arguments: object,
        limiter: trio.CapacityLimiter | None = None,
        abandon_on_cancel: bool = False,
    ) -> T:
        await trio.sleep(self._rng.uniform(0.005, 0.03))
        return await super().run(call, *arguments, limiter=limiter, abandon_on_cancel=abandon_on_cancel)


@dataclass
class Follower:
    """A mount that follows others, and may write as well."""

    daemon: Daemon
    poller: Poller
    applied_s: dict[str, float] = field(default_factory=dict)

    def counts(self) -> tuple[int, int]:
        """Polls, and GETs."""
        return self.daemon.metrics.polls, self.daemon.client.metrics.requests["get"]


class Lake:
    """Writers and followers of one store."""

    def __init__(self, root: Path, followers: int) -> None:
        self.rng = random.Random(1)
        self.site = Site(root, VirtualClock(), SlowThreads(random.Random(2)))
        self.stack, self.made_s = ExitStack(), dict[str, float]()
        self.followers = [self._follower(number) for number in range(followers)]

    def _follower(self, number: int) -> Follower:
        daemon = self.stack.enter_context(self.site.daemon(f"follower{number}"))
        made: list[Follower] = []

        def applied(record: Record) -> None:
            made[0].applied_s[commit_key(record.time, record.writer)] = trio.current_time()

        made.append(
            Follower(
                daemon,
                Poller(
                    daemon.log, daemon.applier, daemon.metrics,
                    refresh_s=REFRESH_S, rng=random.Random(number), applied=applied,
                ),
            )
        )  # fmt: skip
        return made[0]

    async def write(self, log: commit_log.CommitLog, a_second: float) -> None:
        """A mount commits so often; one that is counted from 1."""
        await trio.sleep(self.rng.random() / a_second)
        while True:
            time = log.clock.now()
            key, body = log.key(time), commit_of({}, record=Record(time=time, writer=log.writer))
            await log.put(key, body)
            self.made_s[key] = trio.current_time()
            await trio.sleep(1 / a_second)

    async def write_as_many(self, count: int) -> None:
        """Other writers commit once a second each."""
        clock = self.followers[0].daemon.clock
        number = 0
        while True:
            number, time = number + 1, clock.now()
            writer = f"{0xA0000000 + number % count:08x}"
            self.site.store.give(commit_key(time, writer), commit_of({}, record=Record(time=time, writer=writer)))
            self.made_s[commit_key(time, writer)] = trio.current_time()
            await trio.sleep(1 / count)

    async def run(self, follower: Follower) -> None:
        await trio.sleep(self.rng.random() * REFRESH_S)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(follower.daemon.log.run)
            nursery.start_soon(follower.poller.run)

    def bundles(self) -> int:
        return sum(key.endswith(SUFFIX) for key in self.site.store.objects)


@dataclass
class Costs:
    """What following cost: GETs a poll of each mount that never was the repeater, and seconds."""

    gets: list[float]
    delays_s: list[float]
    bundles_a_second: float

    def __str__(self) -> str:
        p95_s = quantiles(self.delays_s, n=20)[-1]
        return (
            f"GETs a poll {mean(self.gets):.2f} (most {max(self.gets):.2f}), delay p95 {p95_s:.1f} s, "
            f"max {max(self.delays_s):.1f} s, bundles a second {self.bundles_a_second:.2f}"
        )


async def follow(lake: Lake, writers: int, seconds: float, a_second: float = 1.0) -> Costs:
    """Followers follow so many writers, of which mounts commit so often each, for so long after a while."""
    async with trio.open_nursery() as nursery:
        mounts = [follower.daemon.log for follower in lake.followers[1:]][:writers]
        for log in mounts:
            nursery.start_soon(lake.write, log, a_second)
        if writers > len(mounts):
            nursery.start_soon(lake.write_as_many, writers - len(mounts))
        for follower in lake.followers:
            nursery.start_soon(lake.run, follower)
        await trio.sleep(5 * REFRESH_S)
        before = [follower.counts() for follower in lake.followers]
        began_s, bundles = trio.current_time(), lake.bundles()
        await trio.sleep(seconds)
        after, bundles = [follower.counts() for follower in lake.followers], lake.bundles() - bundles
        ended_s = trio.current_time()
        await trio.sleep(3 * REFRESH_S)
        nursery.cancel_scope.cancel()
    gets, delays_s = list[float](), list[float]()
    for follower, (polls, fetched), (polls_then, fetched_then) in zip(lake.followers, before, after, strict=True):
        own = f"-{follower.daemon.log.writer}."
        made = [key for key, made_s in lake.made_s.items() if began_s <= made_s < ended_s and own not in key]
        delays_s += [follower.applied_s[key] - lake.made_s[key] for key in made]
        if not follower.daemon.log.repeated.written:
            gets.append((fetched_then - fetched) / (polls_then - polls))
    return Costs(gets, delays_s, bundles / seconds)


@pytest.mark.parametrize(
    ("writers", "a_second"),
    [(1, 20.0), pytest.param(1, 1.0, marks=pytest.mark.long), pytest.param(50, 1.0, marks=pytest.mark.long)],
)
async def test_follower_sends_four_gets_a_poll(
    tmp_path: Path, autojump_clock: MockClock, writers: int, a_second: float
) -> None:
    lake = Lake(tmp_path, followers=6)
    with lake.stack:
        costs = await follow(lake, writers, sized(8, 20), a_second)
    assert costs.gets
    assert mean(costs.gets) <= 4, costs
    assert max(costs.delays_s) <= 7, costs
    assert costs.bundles_a_second <= 2, costs
    repeaters = [follower for follower in lake.followers if follower.daemon.log.repeated.written]
    if writers > 1:
        logs = [follower.daemon.log for follower in lake.followers]
        own = sum(log.bundles_written - log.repeated.written for log in logs)
        assert own <= 2 * len(lake.followers), "before there was a repeater"
    assert bool(repeaters) == (writers > 1)


async def until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    with trio.fail_after(seconds):
        while not done():
            await trio.sleep(0.02)


async def test_repeaters_that_write_themselves_give_up_until_one_is_left(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    """What they commit between a LIST and their bundle is newer than what the LIST showed."""
    lake = Lake(tmp_path, followers=6)

    def repeaters() -> list[Follower]:
        return [follower for follower in lake.followers if follower.poller.election.is_repeater]

    with lake.stack:
        async with trio.open_nursery() as nursery:
            for follower in lake.followers:
                nursery.start_soon(lake.write, follower.daemon.log, 6.0)
                nursery.start_soon(lake.run, follower)
            for follower in lake.followers:
                follower.poller.election.is_repeater = True
            await until(lambda: all(follower.daemon.log.repeated.written for follower in lake.followers))
            await until(lambda: len(repeaters()) == 1, 20.0)
            nursery.cancel_scope.cancel()


async def test_repeater_that_dies_is_replaced_and_one_with_little_to_do_gives_up(
    tmp_path: Path, autojump_clock: MockClock
) -> None:
    lake = Lake(tmp_path, followers=3)

    def repeaters() -> list[Follower]:
        return [follower for follower in lake.followers if follower.poller.election.is_repeater]

    with lake.stack:
        async with trio.open_nursery() as nursery:
            writers = trio.CancelScope()
            mounts = [trio.CancelScope() for _ in lake.followers]

            async def write() -> None:
                with writers:
                    await lake.write_as_many(30)

            async def run(follower: Follower, scope: trio.CancelScope) -> None:
                with scope:
                    await lake.run(follower)

            nursery.start_soon(write)
            for follower, scope in zip(lake.followers, mounts, strict=True):
                nursery.start_soon(run, follower, scope)
            await until(lambda: len(repeaters()) == 1 and bool(lake.bundles()))
            (first,) = repeaters()
            mounts[lake.followers.index(first)].cancel()
            first.poller.election.is_repeater = False
            lake.followers.remove(first)
            await until(lambda: len(repeaters()) == 1 and repeaters()[0].daemon.log.repeated.written > 2)
            made = list(lake.made_s)
            await until(lambda: all(key in follower.applied_s for key in made for follower in lake.followers))
            writers.cancel()
            await until(lambda: not repeaters())
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("how", [pytest.param("read-only", marks=pytest.mark.long), "refused"])
async def test_mount_that_may_not_repeat_fetches_for_itself(
    tmp_path: Path, autojump_clock: MockClock, how: str
) -> None:
    lake = Lake(tmp_path, followers=2)
    refused = Failures(lambda request: request.key.endswith(SUFFIX), AccessDenied("denied"), count=1000)
    with lake.stack:
        for follower in lake.followers:
            if how == "read-only":
                follower.daemon.log.fetched = None
        if how == "refused":
            lake.site.store.hook = refused
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lake.write_as_many, 20)
            for follower in lake.followers:
                nursery.start_soon(lake.run, follower)
            await trio.sleep(5 * REFRESH_S)
            made = list(lake.made_s)
            await until(lambda: all(key in follower.applied_s for key in made for follower in lake.followers))
            assert lake.bundles() == 0
            assert not any(follower.poller.election.is_repeater for follower in lake.followers)
            nursery.cancel_scope.cancel()
    assert 1000 - refused.left <= 6, "asked once or twice"
