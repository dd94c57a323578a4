"""Daemons that are killed at random: nothing that was acknowledged is lost.

What `scripts/crash_test.py` does to a mount and a real S3 server, done to the filesystem alone: a round trip takes
milliseconds here, so moments in which two things meet are common. `LAKEFS_TEST_LIVES` is the number of lakes.
"""

from __future__ import annotations

import os
import random
from multiprocessing import get_context
from pathlib import Path

import msgspec
import pytest

from tests.killed import lives
from tests.killed.lives import Life
from tests.tiers import sized

LAKES = int(os.environ.get("LAKEFS_TEST_LIVES", sized(3, 100)))
SEED = int(os.environ.get("LAKEFS_TEST_SEED", "0")) or random.SystemRandom().getrandbits(32)
DEATHS = 3
READY_S_MAX = 60.0

context = get_context("forkserver")
context.set_forkserver_preload(["tests.killed.lives"])


def lake_of(root: Path, seed: int) -> Life:
    """Its first life."""
    rng = random.Random(seed)
    (root / lives.LAKE).mkdir(parents=True)
    return Life(
        root=str(root), seed=seed, number=0, models=[({}, None)] * rng.choice([1, 2, 3]), nodes=rng.choice([1, 2, 2]),
        delay_s=rng.choice([0.0, 0.005, 0.03]), slow_s=rng.choice([0.001, 0.005, 0.02]),
        lost=rng.choice([0.0, 0.02, 0.1, 0.3]), pack=rng.choice(["never", "always", "auto"]),
        delete_after_s=rng.choice([0.0, 0.05]), last=False,
    )  # fmt: skip


def lived(life: Life, until_s: float | None) -> list[str]:
    """A life, until it is killed or (without a time) ends by itself; answers what is wrong."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=lives.live, args=(life, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(READY_S_MAX):
            return ["it did not begin in time"]
        said = ours.recv()
        if said != "ready" or until_s is None:
            return list(said)
        if ours.poll(until_s):
            return ["it ended by itself", *ours.recv()]
        return []
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("number", range(LAKES))
def test_nothing_acknowledged_is_lost(tmp_path: Path, number: int) -> None:
    seed = SEED + number
    life, rng = lake_of(tmp_path, seed), random.Random(f"deaths of {seed}")
    said: list[str] = []
    for _ in range(DEATHS):
        wrong = lived(life, rng.random() * rng.choice([0.05, 0.2, 0.5]))
        assert not wrong, report(seed, life, said, wrong)
        said += lives.history(life)
        life = msgspec.structs.replace(life, number=life.number + 1, models=lives.after(life))
    wrong = lived(msgspec.structs.replace(life, last=True), None)
    assert not wrong, report(seed, life, said, wrong)


def report(seed: int, life: Life, said: list[str], wrong: list[str]) -> str:
    options = f"{life.nodes=} {life.pack=} {life.delay_s=} {life.slow_s=} {life.lost=} {life.delete_after_s=}"
    return "\n".join([f"LAKEFS_TEST_SEED={seed} LAKEFS_TEST_LIVES=1, {options}", *wrong, *said[-60:]])
