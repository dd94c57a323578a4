"""Rounds of benchmarks: peers take turns, a failure is recorded and stops no other peer, jobs end at their limit."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from scripts.bench import method, results, worker
from scripts.bench.access import Access, Paths
from scripts.bench.jobs import Epoch, Listing, Remove
from scripts.bench.method import Session
from scripts.bench.peers.peer import Peer, PeerFailed
from scripts.bench.results import Results, Store
from scripts.bench.sizes import QUICK
from scripts.bench.stage import Stage
from scripts.bench.worker import Outcome
from tests.bench.runs import COLD, WARM, run

BOTH = [COLD.name, WARM.name]


class Quiet:
    """A tally of nothing."""

    def begin(self) -> None: ...

    def take(self) -> Store:
        return Store({}, 0, 0, 0.0)


class Fake(Peer):
    """Needs no store."""

    kind = "disk"

    def __init__(self, stage: Stage, name: str) -> None:
        super().__init__(stage)
        self.name, self.detached = name, 0

    def version(self) -> str:
        return "1"

    def options(self) -> str:
        return ""

    def attach(self, prefix: str) -> Access:
        return Paths("/")

    def detach(self) -> None:
        self.detached += 1


@dataclass(frozen=True)
class Counts:
    """A job that does so many things, or does not come back."""

    operations: int
    limit_s: float = 1.0
    hangs: bool = False
    raises: str = ""
    preparing_s: float = 0.0

    def run(self) -> Outcome:
        if self.raises:
            raise OSError(self.raises)
        if self.hangs:
            time.sleep(60)
        return Outcome(0.5, self.operations)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    made = SimpleNamespace(sizes=QUICK, tally=Quiet(), directory=tmp_path, clear_areas=lambda: None)
    made.scrub = lambda text: text.replace("DIR", "…")
    return cast(Stage, made)


def rounds(stage: Stage, found: Results, peers: list[Fake], group: Any, repeats: int = 1) -> Path:
    out = stage.directory / "results.json"
    groups = {"epochs": (group, BOTH)}
    method.rounds(
        list[Peer](peers), stage, found, groups, repeats=repeats, out=out, say=lambda text: None
    )  # fmt: skip
    return out


def test_peers_take_turns(stage: Stage) -> None:
    order: list[str] = []
    peers = [Fake(stage, name) for name in ("a", "b", "c")]
    rounds(stage, run({}), peers, lambda session: order.append(f"{session.peer.name}{session.round}"), repeats=3)
    assert order == ["a1", "b1", "c1", "b2", "c2", "a2", "c3", "a3", "b3"]
    assert [peer.detached for peer in peers] == [3, 3, 3]


def test_rounds_end_with_the_time(stage: Stage) -> None:
    stage.sizes = msgspec.structs.replace(QUICK, budget_s=2.5)
    turns: list[int] = []

    def group(session: Session) -> None:
        turns.append(session.round)
        time.sleep(1.0)

    rounds(stage, run({}), [Fake(stage, "a")], group, repeats=9)
    assert turns == [1, 2], "a third would end after 3 s"


def test_a_failure_is_one_peers_alone_and_is_saved(stage: Stage) -> None:
    def group(session: Session) -> None:
        if session.peer.name == "bad":
            raise PeerFailed("does not mount at DIR/mnt")
        session.measure(COLD.name, Counts(7))

    peers = [Fake(stage, "bad"), Fake(stage, "good")]
    out = rounds(stage, run({}), peers, group)
    found = results.load(out)
    assert [failure.what for failure in found.of(COLD.name, "bad").failures] == ["does not mount at …/mnt"]
    assert [failure.what for failure in found.of(WARM.name, "bad").failures] == ["does not mount at …/mnt"]
    assert [sample.operations for sample in found.of(COLD.name, "good").samples] == [7]
    assert peers[0].detached == 1


def test_whatever_a_peer_raises_is_its_failure(stage: Stage) -> None:
    class Hung(Fake):
        def detach(self) -> None:
            raise subprocess.TimeoutExpired("weed", 10)

    found = run({})
    rounds(stage, found, [Hung(stage, "a"), Fake(stage, "b")], lambda session: session.measure(COLD.name, Counts(5)))
    assert [sample.operations for sample in found.of(COLD.name, "a").samples] == [5]
    assert "TimeoutExpired" in found.of(WARM.name, "a").failures[0].what
    assert [sample.operations for sample in found.of(COLD.name, "b").samples] == [5]


def test_a_job_that_raises_fails_alone(stage: Stage) -> None:
    def group(session: Session) -> None:
        assert session.measure(COLD.name, Counts(0, raises="Input/output error")) is None
        session.measure(WARM.name, Counts(3))

    found = results.load(rounds(stage, run({}), [Fake(stage, "a")], group))
    (failure,) = found.of(COLD.name, "a").failures
    assert "Input/output error" in failure.what
    assert [sample.operations for sample in found.of(WARM.name, "a").samples] == [3]


def test_a_job_that_hangs_is_killed_and_not_asked_again(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "GRACE_S", 0.3)
    asked: list[bool] = []

    def group(session: Session) -> None:
        asked.append(not session.hopeless(COLD.name))
        if asked[-1]:
            session.measure(COLD.name, Counts(9, limit_s=0.2, hangs=True))

    found = run({})
    rounds(stage, found, [Fake(stage, "a")], group, repeats=2)
    (sample,) = found.of(COLD.name, "a").samples
    assert (sample.operations, sample.stopped_after_s) == (0, 0.2)
    assert asked == [True, False]


def test_readers_share_the_files_and_stop_in_time(tmp_path: Path) -> None:
    names = [f"f{index}" for index in range(10)]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 100)
    whole = worker.run(Epoch(Paths(str(tmp_path)), names, 3, 60.0))
    assert (whole.operations, whole.bytes, whole.each, whole.stopped) == (10, 2000, [4, 3, 3], False)
    assert whole.latency is not None
    stopped = worker.run(Epoch(Paths(str(tmp_path)), names, 2, 0.0))
    assert (stopped.operations, stopped.each, stopped.stopped) == (2, [1, 1], True)
    with pytest.raises(worker.JobFailed, match="FileNotFoundError"):
        worker.run(Epoch(Paths(str(tmp_path)), ["missing"], 1, 60.0))


def test_a_listing_that_misses_names_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "a").touch()
    assert worker.run(Listing(Paths(str(tmp_path)), "d", 1, 60.0)).operations == 1
    with pytest.raises(worker.JobFailed, match="1 names instead of 2"):
        worker.run(Listing(Paths(str(tmp_path)), "d", 2, 60.0))
    assert worker.run(Remove(Paths(str(tmp_path)), "d", 1, 60.0)).operations == 1
    assert not (tmp_path / "d").exists()
