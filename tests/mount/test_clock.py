"""Jumps of the machine's clock while a lake is mounted: what another mount shows afterwards.

Needs libfaketime (`scripts/setup test` installs it), which moves the daemon's wall clock and nothing else.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake, eventually

LIBRARIES = sorted(Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1"))

pytestmark = pytest.mark.skipif(not LIBRARIES, reason="libfaketime is not installed")


def follow_file(lake: Lake, times: Path) -> None:
    """The wall clock of what is started from now on is as far from the right time as the file says."""
    times.write_text("+0")
    lake.env |= {
        "LD_PRELOAD": str(LIBRARIES[0]),
        "FAKETIME_TIMESTAMP_FILE": str(times),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


@pytest.mark.long  # commits/test_future_commits.py shows it
@pytest.mark.parametrize("jump", ["+12y", "-30d"])
def test_mount_whose_clock_jumps_and_comes_back_dates_its_commits_rightly(
    make_lake: LakeMaker, tmp_path: Path, jump: str
) -> None:
    lake = make_lake("file", "--pack", "always")
    times = tmp_path / "time"
    plain_env = dict(lake.env)
    follow_file(lake, times)
    lake.mount()
    lake.env = plain_env

    def is_settled() -> bool:
        return lake.number("commits.operations_waiting") == 0

    (lake.path / "before").write_text("before")
    (lake.path / "kept").write_text("1")
    eventually(is_settled, "the first commits", 60)
    times.write_text(jump)
    (lake.path / "during").mkdir()
    (lake.path / "before").unlink()
    eventually(lambda: lake.number("commits.clock_jumps") == 1, "a commit that notices the jump", 60)
    eventually(is_settled, "commits while the clock is wrong", 60)
    (lake.path / "kept").write_text("22")
    times.write_text("+0")
    (lake.path / "after").write_text("after")
    (lake.path / "kept").write_text("333")
    eventually(is_settled, "commits after the clock came back", 60)
    assert lake.number("commits.clock_jumps") == 2
    assert "clock jumped by" in lake.log()
    lake.umount()
    lake.cache_dir = tmp_path / "another cache"
    lake.mount()
    assert sorted(path.name for path in lake.path.iterdir()) == ["after", "during", "kept"]
    assert (lake.path / "kept").read_text() == "333"
    assert lake.number("commits.future") == 0
