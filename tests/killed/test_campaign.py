"""`scripts/crash_test.py` with several mounts and with power cuts; and it finds a loss that is made on purpose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.crash import ledger
from scripts.crash.contest import Change, Contest
from scripts.crash.disk import Disk, DiskError
from scripts.crash.tree import Kind, Node
from scripts.crash.writer import Writer

REPOSITORY = Path(__file__).parents[2]
SECONDS_MAX = 300


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory in which disks can be made: needs root, loop devices and ext4."""
    if os.geteuid():
        pytest.skip("only root can mount a disk")
    try:
        Disk(tmp_path / "try").unmount()
    except (DiskError, OSError) as error:
        pytest.skip(f"no disk can be mounted: {error}")
    return tmp_path


def crash_test(directory: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/crash_test.py", "--directory", str(directory / "work"), *options]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )


@pytest.mark.long
def test_crash_test_two_mounts_lose_nothing(tmp_path: Path) -> None:
    table = tmp_path / "ledger.md"
    options = ["--mounts", "2", "--no-common-names", "--writers", "2", "--kills", "2", "--ledger", str(table)]
    done = crash_test(tmp_path, *options)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert "2 kills" in done.stdout
    assert "`--mounts 2 --no-common-names --writers 2`" in table.read_text()


@pytest.mark.long
def test_crash_test_power_cuts_lose_nothing(disk: Path) -> None:
    done = crash_test(disk, "--power-cuts", "--no-watch", "--writers", "2", "--kills", "2", "--failpoints", "")
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.long
def test_crash_test_unsynced_journal_is_noticed(disk: Path) -> None:
    options = ["--power-cuts", "--no-watch", "--harm", "unsynced", "--writers", "2", "--kills", "20"]
    done = crash_test(disk, *options, "--failpoints", "")
    assert done.returncode == 1, done.stdout[-4000:] + done.stderr[-2000:]
    assert "FAILED: seed" in done.stdout


def test_disk_cut_keeps_only_what_was_synced(disk: Path) -> None:
    made = Disk(disk / "disk")
    try:
        for name in ("synced", "unsynced"):
            with (made.root / name).open("wb") as file:
                file.write(b"x")
                file.flush()
                if name == "synced":
                    os.fsync(file.fileno())
        made.cut()
        with pytest.raises(OSError, match=r"."):
            (made.root / "later").write_bytes(b"x")
        made.unmount()
        made.mount()
        assert sorted(path.name for path in made.root.iterdir()) == ["lost+found", "synced"]
    finally:
        made.unmount()


def test_writer_after_power_cut_goes_back_to_a_state_since_the_last_sync(tmp_path: Path) -> None:
    writer = Writer(0, "seed", tmp_path, durability="writeback", power_cuts=True)
    (tmp_path / "shared").mkdir()
    for name in ("a", "b", "c"):
        with writer.step(f"mkdir {name}", {**writer.tree, f"w0/{name}": Node(Kind.DIRECTORY)}, syncs=name == "a"):
            pass
    (tmp_path / "w0/a").mkdir(parents=True)
    (tmp_path / "w0/b").mkdir()
    writer.tree = {"w0": Node(Kind.DIRECTORY), **writer.tree}
    writer.unsynced = [({"w0": Node(Kind.DIRECTORY), **tree}, steps) for tree, steps in writer.unsynced]
    assert writer.check() == [], "c is lost"
    assert sorted(writer.tree) == ["w0", "w0/a", "w0/b"]
    (tmp_path / "w0/a").rmdir()
    assert writer.check(), "what was synced may not be lost"


def test_contest_takes_the_last_change_of_any_node() -> None:
    def node(identity: int) -> Node:
        return Node(Kind.FILE, (identity,))

    contest = Contest(
        [
            Change(0, "shared/hot-0", (1,), is_certain=True),
            Change(0, "shared/hot-0", (2,), is_certain=True),
            Change(1, "shared/hot-0", (3,), is_certain=True),
            Change(1, "shared/hot-0", (4,)),
            Change(1, "shared/hot-1", (5,), is_certain=True),
            Change(1, "shared/hot-1", None, is_certain=True),
            Change(0, "shared/moved-0", None, "shared/hot-0", is_certain=True),
        ]
    )
    fine = [each for each in range(1, 7) if not contest.wrong_at_end("shared/hot-0", node(each))]
    assert fine == [2, 3, 4], "not what the same node has replaced"
    assert contest.wrong_at_end("shared/hot-0", None), "nobody removed it"
    assert not contest.wrong_at_end("shared/hot-1", None)
    assert contest.wrong_at_end("shared/hot-1", node(5))
    assert not contest.wrong_at_end("shared/moved-0", node(1)), "whatever the other name was"
    assert contest.wrong("shared/hot-0", Node(Kind.FILE, damage="cut"))
    assert contest.wrong("shared/hot-0", node(9))


def test_ledger_append_keeps_what_is_above_the_table(tmp_path: Path) -> None:
    table = tmp_path / "ledger.md"
    table.write_text("# Runs\n")
    for result in ("one", "two"):
        ledger.append(table, commit="abc", options="--mounts 3", seed="s", kills=20, result=result)
    lines = table.read_text().splitlines()
    assert lines[0] == "# Runs"
    assert [line.rpartition("| ")[2] for line in lines[-2:]] == ["one |", "two |"]
    assert len(lines) == 6
