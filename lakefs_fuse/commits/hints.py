"""Hints: messages between the mounts of a lake about new commits, so that other mounts poll at once.

A mount publishes the keys of its commits after their PUTs, together with those of the next PUBLISH_DELAY_S. A mount
that receives the key of another mount's commit polls soon, but not often. As long as the channel works and hints name
each commit that polls find, a mount polls without a hint only once in HINTED_REFRESH_S.

What always holds (*only a hint*): a commit counts because LIST shows it. A channel that is away, slow or emptied, or
that carries messages of other programs, costs polls and promptness, and nothing else. When it is lost, and when it is
back, the mount polls at once; while it is away, the mount polls every ``refresh_s``.

Trio thread only; the channel's calls run in worker threads. Memory is bounded by KEYS_MAX. A crash loses nothing.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable

import trio

from lakefs_fuse.commits.archive import parse_commit_key
from lakefs_fuse.commits.idleness import Idleness
from lakefs_fuse.environment.hint_channel import HintChannel
from lakefs_fuse.environment.threads import Threads
from lakefs_fuse.metrics import HintMetrics
from lakefs_fuse.sync.backoff import Backoff

PUBLISH_DELAY_S = 0.005
"""Commits that are stored within this time share a message."""
MESSAGE_KEYS_MAX = 1000
MESSAGE_BYTES_MAX = 64 << 10
"""Maximum size of a message, enough for a thousand keys. A longer one is not from a mount."""
KEYS_MAX = 4096
RECEIVE_S = 1.0
"""How long a worker thread waits for a message, and so how late it may notice that none is wanted any more."""
SILENCE_S_MAX = 5.0
"""A channel that does not even answer a ping for this long is lost."""
PAUSE_S_FIRST, PAUSE_S_MAX = 0.25, 10.0
HINTED_REFRESH_S = 60.0
"""Interval of polls while hints work."""
POLL_S_MIN = 0.1
"""Minimum time between two polls because of hints."""
POLL_S, POLLS_AT_ONCE = 0.5, 10
"""Mean time between such polls, after the first POLLS_AT_ONCE: with 50 writers, hints arrive 50 times a second."""
UNNAMED_S_MAX = 5.0
"""If no hint names a commit for this long after a poll found it, the mount that made it publishes none, or cannot."""
UNNAMED_PAUSE_S = 600.0
"""For how long this mount then polls as if there were no hints."""
logger = logging.getLogger(__name__)


class Hints:
    """Publishes and receives hints: see the module's head. Without a channel it does neither."""

    def __init__(
        self,
        channel: HintChannel | None,
        threads: Threads,
        metrics: HintMetrics,
        *,
        writer: str,
        refresh_s: float,
        rng: random.Random,
        idleness: Idleness,
    ) -> None:
        """``writer`` is as in `CommitLog`; hints about its own commits are ignored."""
        self._channel, self._threads, self._metrics, self._writer = channel, threads, metrics, writer
        self._refresh_s, self._rng, self.idleness = refresh_s, rng, idleness
        self._heard, self._pending = trio.Event(), trio.Event()
        self._keys: list[str] = []
        self._named: dict[str, None] = {}
        """Keys that hints have named, the oldest first."""
        self._unnamed: dict[str, float] = {}
        """Keys that polls found and no hint has named yet, and when they were found."""
        self._distrusted_until_s = 0.0
        self._is_catching_up = False
        """True if there has been no poll since the channel was connected."""
        self._interval_s, self._due_s, self._began_s = POLL_S, 0.0, 0.0
        self._threads_limiter = trio.CapacityLimiter(2)

    @property
    def is_used(self) -> bool:
        """True if there is a channel, whether it works or not."""
        return self._channel is not None

    # -- what the poller asks

    def refresh_s(self) -> float:
        """Return how many seconds to wait for a hint before the next poll."""
        now_s = trio.current_time()
        if any(now_s - found_s >= UNNAMED_S_MAX for found_s in self._unnamed.values()):
            self._unnamed.clear()
            self._distrusted_until_s = now_s + UNNAMED_PAUSE_S
        trusted = self._metrics.connected and now_s >= self._distrusted_until_s
        if not trusted:
            return self._refresh_s
        return max(self._refresh_s, UNNAMED_S_MAX if self._unnamed else HINTED_REFRESH_S)

    async def wait_due(self) -> None:
        """Wait until a poll is due because a hint has come, or the channel was lost or is back."""
        await self._heard.wait()
        now_s = trio.current_time()
        due_s = max(self._began_s + POLL_S_MIN, self._due_s - POLLS_AT_ONCE * self._interval_s)
        await trio.sleep(max(0.0, due_s - now_s))
        self._due_s = max(self._due_s, trio.current_time()) + self._interval_s
        self._metrics.polls += 1

    def polling(self) -> None:
        """Record that a poll begins, which answers the hints so far."""
        self._heard, self._began_s = trio.Event(), trio.current_time()

    def polled(self, found: Iterable[str]) -> None:
        """Record that a poll found commits of these keys."""
        keys = list(found)
        self._interval_s = POLL_S if keys else min(2 * self._interval_s, max(POLL_S, self._refresh_s))
        if not self._metrics.connected:
            return
        if self._is_catching_up:  # on commits whose hints were published while the channel was away
            self._is_catching_up = False
            self._named |= dict.fromkeys(keys[:KEYS_MAX])
            return
        for key in keys:
            if key not in self._named and len(self._unnamed) < KEYS_MAX:
                self._unnamed[key] = trio.current_time()

    # -- what this mount tells

    def publish(self, key: str) -> None:
        """Have `run` publish the key of a commit that this mount has stored."""
        if self._channel is not None and len(self._keys) < KEYS_MAX:
            self._keys.append(key)
            self._pending.set()

    # -- tasks

    async def run(self) -> None:
        """Publish and listen for as long as the mount lives."""
        if self._channel is None:
            return
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._publish, self._channel)
            await self._listen(self._channel)

    async def _publish(self, channel: HintChannel) -> None:
        backoff, has_failed = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX, self._rng), False
        while True:
            await self._pending.wait()
            await trio.sleep(PUBLISH_DELAY_S)
            keys, self._keys = self._keys[:MESSAGE_KEYS_MAX], self._keys[MESSAGE_KEYS_MAX:]
            if not self._keys:
                self._pending = trio.Event()
            try:
                await self._threads.run(
                    channel.publish, "\n".join(keys).encode(), limiter=self._threads_limiter, abandon_on_cancel=True
                )
                self._metrics.published += len(keys)
                has_failed = False
                backoff.reset()
            except OSError as error:
                self._metrics.errors += 1
                level = logging.DEBUG if has_failed or not self._metrics.connected else logging.WARNING
                logger.log(level, "%d hints are not published: %s", len(keys), error)
                has_failed = True
                await trio.sleep(backoff.next_s())

    async def _listen(self, channel: HintChannel) -> None:
        backoff, has_failed = Backoff(PAUSE_S_FIRST, PAUSE_S_MAX, self._rng), False

        def answered() -> None:
            nonlocal has_failed
            logger.info("hints are heard%s", " again" if has_failed else "")
            has_failed = False
            backoff.reset()

        while True:
            try:
                await self._threads.run(channel.connect, limiter=self._threads_limiter, abandon_on_cancel=True)
                self._set_connected(True)
                await self._receive(channel, answered)
            except OSError as error:
                self._metrics.errors += 1
                if not has_failed:
                    logger.warning("no hints until their channel is back, and a poll every --refresh: %s", error)
                has_failed = True
            finally:
                self._set_connected(False)
            await trio.sleep(backoff.next_s())

    def _set_connected(self, connected: bool) -> None:
        if connected != self._metrics.connected:
            self._metrics.connected = self._is_catching_up = connected
            self._unnamed.clear()
            self._heard.set()

    async def _receive(self, channel: HintChannel, answered: Callable[[], None]) -> None:
        """Receive messages until the channel is lost, which raises OSError. ``answered`` is called once it has done
        more than take the connection."""
        heard_s, has_answered = trio.current_time(), False
        while True:
            message = await self._threads.run(
                channel.receive, RECEIVE_S, limiter=self._threads_limiter, abandon_on_cancel=True
            )
            now_s = trio.current_time()
            if message is not None:
                heard_s = now_s
                if not has_answered:
                    has_answered = True
                    answered()
                self._take(message)
            elif now_s - heard_s > SILENCE_S_MAX:
                raise OSError(f"no answer for {SILENCE_S_MAX:g} s")
            else:
                await self._threads.run(channel.ping, limiter=self._threads_limiter, abandon_on_cancel=True)

    def _take(self, message: bytes) -> None:
        """Record the keys in a message, which any program may have sent."""
        if not message:
            return
        self._metrics.received += 1
        lines = message.decode("ascii", "replace").split("\n") if len(message) <= MESSAGE_BYTES_MAX else []
        names = [(line, name) for line in lines[:MESSAGE_KEYS_MAX] if (name := parse_commit_key(line)) is not None]
        if not names:
            self._metrics.foreign += 1
        for key, (_, writer) in names:
            if writer == self._writer or key in self._named:
                continue
            self._named[key] = None
            self._unnamed.pop(key, None)
            self._heard.set()
        while len(self._named) > KEYS_MAX:
            del self._named[next(iter(self._named))]
