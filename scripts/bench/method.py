"""Rounds: every peer in turn, each with nothing cached, in another order each time; what fails is written down.

A `Session` is one peer in one round of one group of workloads. It times jobs and reads the meters around them. What a
peer could not do within its hard limit in the first round it is not asked again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from scripts.bench import machine, results, worker
from scripts.bench.access import Access
from scripts.bench.peers import Peer
from scripts.bench.peers.peer import PeerFailed
from scripts.bench.results import Daemon, Failure, Results, Sample
from scripts.bench.stage import Stage
from scripts.bench.worker import Job, JobFailed, Outcome


class Session:
    """One peer in one round of a group."""

    def __init__(self, peer: Peer, stage: Stage, found: Results, number: int, say: Callable[[str], None]) -> None:
        self.peer, self.stage, self.round = peer, stage, number
        self._results, self._say = found, say
        self.finished: set[str] = set()
        self.undurable = False
        """Something that was written here was not in the store in time."""

    def measure(self, workload: str, job: Job, *, drain: bool = False) -> Outcome | None:
        """Runs it and writes down a sample, or how it failed; then the answer is None. Raises PeerFailed."""
        try:
            return self._measure(workload, job, drain)
        except JobFailed as error:
            self.failed([workload], f"{error}")
            return None

    def _measure(self, workload: str, job: Job, drain: bool) -> Outcome:
        pids = self.peer.processes()
        upcalls = self.peer.upcalls() if pids else None
        machine.forget_peak(pids)
        before_cpu = machine.cpu_seconds(pids)
        self.stage.tally.begin()
        outcome = worker.run(job)
        durable_s, drained = None, True
        if drain:
            began = time.monotonic()
            drained = self.peer.drained(self.stage.sizes.drain_limit_s)
            durable_s = outcome.seconds + time.monotonic() - began
            self.undurable |= not drained
        store = self.stage.tally.take()
        daemon = None
        if pids:
            spent = machine.cpu_seconds(self.peer.processes()) - before_cpu
            after = self.peer.upcalls()
            counts = None
            if upcalls is not None and after is not None:
                counts = {kind: more for kind in after if (more := after[kind] - upcalls.get(kind, 0))}
            daemon = Daemon(round(spent, 3), machine.peak_bytes(pids), counts)
        sample = Sample(
            round=self.round, seconds=outcome.seconds, operations=outcome.operations, bytes=outcome.bytes,
            latency=outcome.latency, stopped_after_s=job.limit_s if outcome.stopped else None, durable_s=durable_s,
            undurable=not drained, store=store, daemon=daemon,
        )  # fmt: skip
        self._results.of(workload, self.peer.name).samples.append(sample)
        self.finished.add(workload)
        stopped = " (stopped)" if outcome.stopped else ""
        self._say(
            f"  {workload}: {outcome.operations:,} in {outcome.seconds:.2f} s, {outcome.bytes / 1e6:,.0f} MB{stopped}"
        )
        return outcome

    def hopeless(self, workload: str) -> bool:
        """It was stopped in an earlier round before anything was done: once is enough."""
        earlier = self._results.of(workload, self.peer.name).samples
        return any(sample.stopped_after_s is not None and sample.operations == 0 for sample in earlier)

    def failed(self, workloads: list[str], what: str) -> None:
        """All of these that have no sample of this round."""
        for workload in workloads:
            if workload not in self.finished:
                failures = self._results.of(workload, self.peer.name).failures
                failures.append(Failure(self.round, self.stage.scrub(what)[:300]))
                self.finished.add(workload)
        self._say(f"  FAILED: {self.stage.scrub(what)[:200]}")


@contextmanager
def attached(session: Session, prefix: str) -> Iterator[Access]:
    """The peer on that prefix, with nothing cached anywhere; detached whatever happens."""
    try:
        machine.drop_caches()
        yield session.peer.attach(prefix)
    finally:
        session.peer.detach()


Group = Callable[[Session], None]


def rounds(
    peers: list[Peer], stage: Stage, found: Results, groups: dict[str, tuple[Group, list[str]]], *,
    repeats: int, out: Path, say: Callable[[str], None],
) -> None:  # fmt: skip
    """The first round of every group, then the second of each, and so on for as long as the budget lasts. Saves what
    there is after each, so that a run that ends early leaves that."""
    began = time.monotonic()
    took: dict[str, float] = {}
    for number in range(1, repeats + 1):
        for name, (group, workloads) in groups.items():
            before = time.monotonic() - began
            if before + took.get(name, 0.0) > stage.sizes.budget_s:
                say(f"{name}, round {number}: left out, it would take too long")
                continue
            for peer in turned(peers, name, number):
                say(f"{name}, round {number}: {peer.name}")
                session = Session(peer, stage, found, number, say)
                turn(session, group, workloads)
            found.took_s = round(time.monotonic() - began, 1)
            took[name] = found.took_s - before
            say(f"{name}, round {number}: {took[name]:.0f} s")
            results.save(found, out)


def turn(session: Session, group: Group, workloads: list[str]) -> None:
    """One peer's: whatever it fails with is its own failure, and the next one begins with nothing of it left."""
    try:
        try:
            group(session)
        finally:
            session.peer.detach()
            session.stage.clear_areas()
    except (PeerFailed, JobFailed) as error:
        session.failed(workloads, f"{error}")
    except Exception as error:
        session.failed(workloads, f"{type(error).__name__}: {error}")


def turned(peers: list[Peer], group: str, number: int) -> list[Peer]:
    """Those that take part in a group; each round begins with another."""
    taking = [peer for peer in peers if peer.lists_groups is None or group in peer.lists_groups]
    first = (number - 1) % max(1, len(taking))
    return taking[first:] + taking[:first]
