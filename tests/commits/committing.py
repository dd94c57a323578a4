"""A node that commits into a store in memory, and may die at any moment."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from lakefs_fuse.commits.change import Change
from lakefs_fuse.commits.change_journal import ChangeJournal
from lakefs_fuse.commits.commit_log import CommitLog
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.hybrid_clock import HybridClock
from lakefs_fuse.commits.objects.deletion_queue import DeletionQueue
from lakefs_fuse.commits.poller import Poller
from lakefs_fuse.commits.record import COMMITS, Operation
from lakefs_fuse.environment.threads import Threads, WorkerThreads
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.store.client import ThreadTransport
from lakefs_fuse.sync.wakeup import Wakeup
from tests.commits.nodes import Node, at
from tests.fakes import clock_of, store_client
from tests.memory_store import MemoryStore


async def until(done: Callable[[], bool]) -> None:
    """Wait for a task to get somewhere."""
    with trio.fail_after(20):
        while not done():
            await trio.sleep(0.002)


class Clock:
    """Wall time that tests set."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> int:
        return at(self.seconds)


class Acknowledged:
    """What write-back has in the store, as a test says."""

    def __init__(self) -> None:
        self.progressed = Wakeup()
        self.durable_up_to = 0
        self.has_files_for_pack = False

    def is_durable_up_to(self, sequence: int) -> bool:
        return sequence <= self.durable_up_to


class Daemon(Node):
    """A node with everything that sends and reads commits."""

    def __init__(
        self,
        directory: Path,
        store: MemoryStore,
        clock: Clock,
        *,
        writer: str,
        delay_s: float,
        retry_timeout_s: float = 0.0,
        steady: Clock | None = None,
        threads: Threads | None = None,
    ) -> None:
        super().__init__(directory, writer=writer, clock_ns=clock)
        store.clock, threads = clock, threads or WorkerThreads()
        self.directory, self.store, self.clock = directory, store, HybridClock(clock_of(clock, steady))
        transport = ThreadTransport(threads, requests_max=32, uploads_max=4)
        self.client = store_client(store, store.capabilities, retry_timeout_s=retry_timeout_s, transport=transport)
        self.log = CommitLog(self.client, self.clock, threads, writer=writer, repeats=True)
        journal = ChangeJournal(self.database)
        self.deletions = DeletionQueue(
            self.database, self.client, self.tree, journal, self.metrics, clock_ns=clock, delay_s=0.0
        )
        self.acknowledged = Acknowledged()
        self.committer = Committer(
            self.log,
            self.applier,
            self.deletions,
            journal,
            self.metrics,
            catch_up=self._catch_up,
            delay_s=delay_s,
            acknowledged=self.acknowledged,
        )
        self.poller = Poller(
            self.log, self.applier, self.metrics,
            refresh_s=0.01, rng=random.Random(writer), redate=self.committer.redate,
        )  # fmt: skip
        self.committer.load(announces=True)

    async def _catch_up(self, within_s: float) -> None:
        await self.poller.catch_up(within_s)

    def enqueue(self, *operations: Operation, doomed: tuple[Deletion, ...] = ()) -> None:
        self.committer.enqueue(Change(operations=list(operations), doomed=list(doomed)))

    def doomed(self) -> list[str]:
        """Keys noted, which are the same in both orders that they are kept in."""
        keys = [key[1:].decode() for key, _ in self.database.scan(b"G", b"H")]
        assert sorted(key[9:].decode() for key, _ in self.database.scan(b"H", b"I")) == keys
        return keys


class Site:
    """One store, and daemons that come and go."""

    def __init__(self, root: Path, clock: Clock | None = None, threads: Threads | None = None) -> None:
        self.root, self.store, self.clock = root, MemoryStore(), clock or Clock()
        self._serial, self._threads = 0, threads

    @contextmanager
    def daemon(
        self, name: str, *, delay_s: float = 1.0, retry_timeout_s: float = 0.0, steady: Clock | None = None
    ) -> Iterator[Daemon]:
        """The daemon of a cache directory; each start is another writer."""
        self._serial += 1
        daemon = Daemon(
            self.root / name, self.store, self.clock,
            writer=f"{self._serial:08x}", delay_s=delay_s, retry_timeout_s=retry_timeout_s,
            steady=steady, threads=self._threads,
        )  # fmt: skip
        try:
            yield daemon
        finally:
            daemon.close()

    def kill(self, daemon: Daemon, name: str) -> None:
        """What a daemon that died now leaves, as another's cache directory."""
        shutil.copytree(daemon.directory, self.root / name)

    def commits(self) -> list[str]:
        return sorted(key for key in self.store.objects if key.startswith(COMMITS))
