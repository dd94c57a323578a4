"""`scripts/crash_test.py` for a minute: it finds no loss, and it finds a loss that is made on purpose.

LAKEFS_TEST_KILLS (5) says how often the daemon dies; the script itself dies hundreds of times.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.lakes import scale

pytestmark = pytest.mark.long  # `killed` kills filesystems without mounts in less time

REPOSITORY = Path(__file__).parents[2]
SECONDS_MAX = 30 + 15 * scale("KILLS", 5)


def crash_test(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/crash_test.py", "--directory", str(directory / "work"), *options]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )


@pytest.mark.parametrize("durability", ["writeback", "close"])
def test_nothing_is_lost(dev_fuse: Path, tmp_path: Path, durability: str) -> None:
    """Both kinds of `close()`; most of the time goes to the one that promises more than it has done."""
    kills = scale("KILLS", 5) if durability == "writeback" else max(3, scale("KILLS", 5) // 4)
    done = crash_test(tmp_path, "--kills", str(kills), "--durability", durability)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"{kills} kills" in done.stdout
    assert int(re.findall(r"(\d+) system calls", done.stdout)[0]) > 5 * kills, "the writers did something"
    assert not (tmp_path / "work").exists(), "it leaves nothing behind where nothing is wrong"


def test_loss_is_noticed(dev_fuse: Path, tmp_path: Path) -> None:
    """The accepted bytes of a node vanish with its cache directory: a test that passes then says nothing."""
    options = ["--kills", "8", "--harm", "cache", "--harm-after", "3", "--failpoints", "", "--no-watch"]
    done = crash_test(tmp_path, *options)
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-2000:]
    assert "FAILED: seed" in done.stdout
    assert "expected" in done.stdout
    assert (tmp_path / "work" / "lake0" / "writer-0.log").stat().st_size > 0, "what was done is kept"
