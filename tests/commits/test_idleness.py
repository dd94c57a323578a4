"""When a mount counts as idle, how often it then polls, and what the first question after that waits for."""

from __future__ import annotations

from collections.abc import Callable

import trio
from trio.testing import MockClock

from lakefs_fuse.commits.idleness import IDLE_AFTER_S, IDLE_REFRESH_S, POLL_WAIT_S_MAX, Idleness

REFRESH_S = 5.0
TTL_S = 60.0


class Mount:
    """A poller that notes when it polls, and how many questions there were."""

    def __init__(self, ttl_s: float = TTL_S) -> None:
        self.idleness, self.polls, self.questions, self.poll_s = Idleness(ttl_s), list[float](), 0, 0.0
        self.idleness.watch(lambda: self.questions)

    async def run(self) -> None:
        while True:
            await self.idleness.pause(REFRESH_S)
            await trio.sleep(self.poll_s)
            self.polls.append(trio.current_time())
            self.idleness.polled()

    async def ask(self) -> float:
        """As a request does; answers how long it waited."""
        began_s = trio.current_time()
        self.questions += 1
        if self.idleness.is_idle:
            await self.idleness.wake()
        return trio.current_time() - began_s


def run(test: Callable[[Mount], object], mount: Callable[[], Mount] = Mount) -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            made = mount()
            nursery.start_soon(made.run)
            await test(made)  # type: ignore[misc]
            nursery.cancel_scope.cancel()

    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_idle_mount_polls_once_a_minute() -> None:
    async def test(mount: Mount) -> None:
        await trio.sleep(IDLE_AFTER_S)
        assert len(mount.polls) >= IDLE_AFTER_S / REFRESH_S - 2
        before = len(mount.polls)
        await trio.sleep(3600)
        assert 3600 / IDLE_REFRESH_S - 1 <= len(mount.polls) - before <= 3600 / IDLE_REFRESH_S + 3

    run(test)


def test_mount_that_is_asked_now_and_then_polls_as_ever() -> None:
    async def test(mount: Mount) -> None:
        for _ in range(20):
            await trio.sleep(IDLE_AFTER_S - 2 * REFRESH_S)
            assert await mount.ask() == 0
        assert len(mount.polls) > 0.9 * trio.current_time() / REFRESH_S

    run(test)


def test_first_question_after_a_pause_waits_for_a_poll_and_the_next_do_not() -> None:
    async def test(mount: Mount) -> None:
        mount.poll_s = 0.5
        await trio.sleep(2 * IDLE_AFTER_S + IDLE_REFRESH_S / 2)
        assert mount.idleness.is_idle
        before = len(mount.polls)
        waited = list[float]()

        async def ask() -> None:
            waited.append(await mount.ask())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.sleep(0.2)
            nursery.start_soon(ask)
        assert len(mount.polls) == before + 1
        assert sorted(round(each, 3) for each in waited) == [0.3, 0.5]
        assert await mount.ask() == 0
        await trio.sleep(60)
        assert len(mount.polls) > before + 8

    run(test)


def test_question_does_not_wait_for_a_store_that_is_away() -> None:
    async def test(mount: Mount) -> None:
        await trio.sleep(2 * IDLE_AFTER_S + IDLE_REFRESH_S / 2)
        mount.poll_s = 300
        assert await mount.ask() == POLL_WAIT_S_MAX
        assert await mount.ask() == 0

    run(test)


def test_answers_that_count_longer_keep_a_mount_busy_longer() -> None:
    async def test(mount: Mount) -> None:
        await trio.sleep(3500)
        assert not mount.idleness.is_idle
        await trio.sleep(200)
        assert mount.idleness.is_idle

    run(test, lambda: Mount(ttl_s=3600))


def test_unwatched_mount_is_never_idle() -> None:
    async def main() -> None:
        idleness = Idleness(TTL_S)
        await trio.sleep(10 * IDLE_AFTER_S)
        await idleness.pause(REFRESH_S)
        assert trio.current_time() % IDLE_AFTER_S == REFRESH_S
        assert not idleness.is_idle

    trio.run(main, clock=MockClock(autojump_threshold=0))
