"""Runs many seeds on all cores, and sums up what they did.

What always holds: a seed runs in a process with fixed hashes, and one in `TWICE_EVERY` runs twice, with nodes on the
modelled storage engine and on RocksDB, with equal histories.
A seed that raises is a failure like any other.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from tests.simulation.generator import make_plan
from tests.simulation.simulation import Outcome, simulate

TWICE_EVERY = 50


@dataclass(frozen=True)
class Seed:
    """One simulation to run."""

    profile: str
    number: int
    nodes: int

    def __str__(self) -> str:
        return f"make simulate-one PROFILE={self.profile} SEED={self.number} NODES={self.nodes}"


@dataclass
class Result:
    """What one seed was."""

    seed: Seed
    failure: str
    cpu_s: float
    virtual_s: float = 0.0
    steps: int = 0
    counts: dict[str, Counter[str]] = field(default_factory=dict)


def run_seed(seed: Seed) -> Result:
    """Never raises for what a simulation does."""
    began_s = time.process_time()
    try:
        plan = make_plan(seed.profile, seed.number, nodes=seed.nodes)
        is_twice = seed.number % TWICE_EVERY == 0
        outcome = simulate(plan, is_tracing=is_twice)
        failure = outcome.failure
        if is_twice and simulate(plan, is_tracing=True, is_on_rocksdb=True).history != outcome.history:
            failure = "two runs of the seed differ, the second of them on RocksDB"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a worker of `run_all` that it ends would be waited for in vain
        return Result(seed, f"raised {_last(error)!r}", time.process_time() - began_s)
    return Result(seed, failure, time.process_time() - began_s, outcome.virtual_s, plan.steps, _counts(outcome))


def _counts(outcome: Outcome) -> dict[str, Counter[str]]:
    return {
        "faults": outcome.fired,
        "operations": outcome.operations,
        "met another node's change, or a rule of the oracle": outcome.met,
        "known defects": outcome.known,
        "requests": outcome.requests,
    }


def _last(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def run_all(seeds: list[Seed], seconds: float | None) -> Iterator[Result]:
    """Results as they come, on all cores; no new ones after ``seconds``."""
    until_s = None if seconds is None else time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    with context.Pool(os.cpu_count(), maxtasksperchild=50) as pool:
        for result in pool.imap(run_seed, seeds):
            yield result
            if until_s is not None and time.monotonic() > until_s:
                pool.terminate()
                return
