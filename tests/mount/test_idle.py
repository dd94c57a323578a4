"""A mount that nobody asks anything: it polls rarely, and knows what others did when somebody asks."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import eventually, patch_program
from tests.mount.test_commits import another

PATCH = """
from lakefs_fuse.commits import idleness
idleness.IDLE_AFTER_S, idleness.IDLE_REFRESH_S = 2.0, 3600.0
"""
"""Nobody waits ten minutes for a test."""
REFRESH_S = 0.5


@pytest.mark.long  # commits/test_idleness.py shows it
def test_first_question_after_a_pause_sees_what_another_node_did(make_lake: LakeMaker, tmp_path: Path) -> None:
    lake = make_lake("file", "--refresh", str(REFRESH_S), "--metadata-ttl", "1")
    patch_program(lake, tmp_path, PATCH).mount()

    def polls() -> int:
        return lake.number("commits.polls")

    with another(lake, tmp_path) as other:
        (lake.path / "old").mkdir()
        (lake.path / "other").mkdir()
        (lake.path / "old" / "file").write_text("text")
        eventually(lambda: sorted(os.listdir(other.path)) == ["old", "other"], "seen by the other node")
        assert sorted(os.listdir(lake.path)) == ["old", "other"]
        before, began_s = polls(), time.monotonic()
        time.sleep(8)
        (other.path / "old").rename(other.path / "new")
        (other.path / "other").rmdir()
        time.sleep(3)  # the removal is in a commit
        assert (lake.path / "new" / "file").read_text() == "text"
        assert os.listdir(lake.path) == ["new"]
        assert not (lake.path / "other").exists()
        assert polls() - before < (time.monotonic() - began_s) / REFRESH_S / 2, "idle for most of that time"
        before = polls()
        time.sleep(4 * REFRESH_S)
        assert polls() > before + 1, "awake"
