"""Commits of very many operations: the mount keeps serving, and shows all of one or nothing."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from lakefs_fuse.commits.archive import build, commit_key
from lakefs_fuse.commits.record import Mkdir, Operation, Record, encode
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake, eventually

DIRECTORIES = 4000
WRITER = "0badcafe"


def give_commit(lake: Lake, count: int = DIRECTORIES) -> None:
    """Another node makes so many directories in ``big`` at once."""
    now = time.time_ns()
    operations: list[Operation] = [Mkdir(f"big/{number:06d}", 0o755, 0, 0, 0) for number in range(count)]
    raw = build((), lambda _: encode(Record(writer=WRITER, time=now, operations=operations)))
    lake.outside.replace(commit_key(now, WRITER), raw)


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path))


def test_large_commit_is_seen_whole_by_every_listing(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--refresh", "0.3").mount()
    (lake.path / "big").mkdir()
    (lake.path / "other").write_text("here")
    give_commit(lake)
    seen: set[int] = set()

    def is_there() -> bool:
        seen.add(len(names(lake.path / "big")))
        return DIRECTORIES in seen

    eventually(is_there, "the commit is applied", timeout_s=60)
    assert seen <= {0, DIRECTORIES}
    assert (lake.path / "other").read_text() == "here"


@pytest.mark.long  # commits/test_apply_steps.py shows it
def test_large_commit_killed_between_two_steps_is_whole_after_the_next_mount(make_lake: LakeMaker) -> None:
    lake = make_lake("file", "--refresh", "0.3")
    lake.env["LAKEFS_FAILPOINT"] = "apply.step:9"
    lake.mount()
    (lake.path / "big").mkdir()
    lake.cli("flush", str(lake.path))
    give_commit(lake)
    eventually(lambda: not lake.serving(), "the daemon dies", timeout_s=60)
    lake.pid = 0
    lake.env.pop("LAKEFS_FAILPOINT")
    assert lake.cli("umount", "--lazy", str(lake.path)).returncode == 0
    lake.mount()
    assert len(names(lake.path / "big")) == DIRECTORIES
