"""Maintenance by mounts: a lake is folded and collected without a command, whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.faults import Faults
from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Directory, Lake, eventually, hasten_maintenance, is_running, number, s3_lake
from tests.servers import Server
from tests.tiers import sized

COMMITS_MAX = sized(40, 100)
COMMITS = sized(60, 500)
FILES = sized(50, 200)
BEGINS_S_MAX = 60.0
LISTED_S = 0.5
"""Between two listings of a bucket: they cost more than what is waited for."""


@pytest.fixture
def patched(tmp_path: Path) -> Callable[..., Lake]:
    """The program in this lake's environment looks every ``interval_s`` on average."""

    def patch(lake: Lake, interval_s: float = 0.3, commits_max: int = COMMITS_MAX) -> Lake:
        return hasten_maintenance(lake, tmp_path, interval_s=interval_s, commits_max=commits_max)

    return patch


def section(lake: Lake) -> dict[str, object]:
    found = lake.stats()["maintenance"]
    assert isinstance(found, dict)
    return found


def make_commits(lake: Lake, count: int = COMMITS) -> None:
    """One for each rename."""
    (lake.path / "file-0").write_bytes(b"bytes")
    for step in range(count):
        os.rename(lake.path / f"file-{step}", lake.path / f"file-{step + 1}")
    lake.sync()


def reserved(lake: Lake, kind: str) -> list[str]:
    if isinstance(lake.outside, Directory):
        return sorted(str(path) for path in (lake.outside.root / ".lakefs" / kind).rglob("*") if path.is_file())
    return sorted(key for key in lake.outside.objects() if key.startswith(f".lakefs/{kind}/"))


def commits(lake: Lake) -> list[str]:
    return [key for key in reserved(lake, "commits") if key.endswith(".zip")]


def workers(lake: Lake) -> list[int]:
    """Processes that do maintenance of this lake's mount."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            command = (entry / "cmdline").read_bytes()
            environment = (entry / "environ").read_bytes()
        except OSError:
            continue
        if b"lakefs_fuse.daemon.admin_worker" in command and os.fsencode(lake.env["HOME"]) in environment:
            found.append(int(entry.name))
    return [pid for pid in found if is_running(pid)]


def has_ended(pid: int) -> bool:
    return not is_running(pid)


def await_worker(lake: Lake) -> int:
    eventually(lambda: bool(workers(lake)), "a worker begins", BEGINS_S_MAX)
    return workers(lake)[0]


@pytest.mark.parametrize("store", ["file", pytest.param("seaweedfs", marks=pytest.mark.long)])
def test_lake_is_folded_and_collected_by_itself(make_lake: LakeMaker, patched: Callable[..., Lake], store: str) -> None:
    lake = patched(make_lake(store), interval_s=0.03).mount()
    make_commits(lake)
    assert len(commits(lake)) >= COMMITS - 10 or section(lake)["runs"]
    eventually(lambda: len(commits(lake)) <= 10, "old commits are folded and deleted", BEGINS_S_MAX + 60, LISTED_S)
    eventually(lambda: number(lake.stats(), "maintenance.runs") >= 2, "the collection comes to its end")
    found = section(lake)
    assert found["last_error"] == ""
    assert isinstance(found["last_fold_s"], float)
    assert isinstance(found["last_collection_s"], float)
    assert abs(found["last_fold_s"] - time.time()) < 300
    shown = lake.cli("stats", str(lake.path)).stdout
    assert "maintenance: last fold 20" in " ".join(shown.split())
    assert os.listdir(lake.path) == [f"file-{COMMITS}"]
    eventually(lambda: not (lake.cache_dir / "maintenance").exists(), "temporary files are removed")
    lake.remount(empty_cache=True)
    assert os.listdir(lake.path) == [f"file-{COMMITS}"]
    assert (lake.path / f"file-{COMMITS}").read_bytes() == b"bytes"
    assert lake.number("commits.applied") <= 20, "the others come from the index"


@pytest.mark.long  # daemon/test_admin_worker.py and admin/test_fold_database.py show it
def test_upgraded_lake_is_folded_with_a_database_that_is_kept(
    make_lake: LakeMaker, patched: Callable[..., Lake]
) -> None:
    lake = patched(make_lake("file"), interval_s=0.2).mount()
    for number_of in range(FILES):
        (lake.path / f"stays-{number_of}").write_bytes(b"bytes")
    lake.umount()
    assert lake.cli("upgrade", lake.source).returncode == 0
    lake.mount()
    kept = lake.cache_dir / "folded"
    for run in (1, 2):
        make_commits(lake)
        os.rename(lake.path / f"file-{COMMITS}", lake.path / f"result-{run}")
        lake.sync()
        eventually(lambda run=run: number(lake.stats(), "maintenance.runs") >= run, "it is folded", BEGINS_S_MAX + 60)  # type: ignore[misc]
    assert section(lake)["last_error"] == ""
    eventually(lambda: sorted(path.name for path in kept.iterdir()) == ["lock", "meta", "newest"], "the worker ends")
    names = sorted(os.listdir(lake.path))
    assert len(names) == FILES + 2
    lake.umount()
    assert lake.cli("fsck", lake.source).returncode == 0
    lake.mount("--maintenance", "off")
    assert not kept.exists()
    lake.remount("--maintenance", "off", empty_cache=True)
    assert sorted(os.listdir(lake.path)) == names


def test_mount_without_maintenance_looks_at_nothing(make_lake: LakeMaker, patched: Callable[..., Lake]) -> None:
    lake = patched(make_lake("file", "--maintenance", "off"), interval_s=0.05).mount()
    make_commits(lake, 20)
    time.sleep(1)
    assert section(lake) == {"mode": "off"}
    lake.remount("--read-only", "--maintenance", "auto")
    assert section(lake) == {"mode": "off"}


def test_worker_ends_with_its_mount(make_lake: LakeMaker, patched: Callable[..., Lake]) -> None:
    """After unmounting, and after SIGKILL of the daemon, or of both; the next mount goes on."""
    lake = patched(make_lake("file"), interval_s=0.3, commits_max=1)
    assert isinstance(lake.outside, Directory)

    def kill_both() -> None:
        os.kill(worker, signal.SIGKILL)
        lake.kill()

    for end in (lake.umount, lake.kill, kill_both):
        lake.mount()
        make_commits(lake, 10)
        worker = await_worker(lake)
        end()
        eventually(partial(has_ended, worker), "the worker ends")
        (path,) = lake.outside.root.glob("file-*")
        assert path.read_bytes() == b"bytes"


def test_killed_worker_harms_nothing_and_is_followed_by_another(
    make_lake: LakeMaker, patched: Callable[..., Lake]
) -> None:
    """One that is stopped for good is killed with the mount."""
    lake = patched(make_lake("file"), interval_s=0.3, commits_max=1).mount()
    make_commits(lake, 10)
    os.kill(await_worker(lake), signal.SIGKILL)
    eventually(lambda: "ended without an answer" in str(section(lake)["last_error"]), "the error is shown")
    assert os.listdir(lake.path) == ["file-10"]
    stopped = 0
    while not stopped:  # it may have ended before it is stopped
        pid = await_worker(lake)
        os.kill(pid, signal.SIGSTOP)
        stopped = pid if is_running(pid) else 0
    os.rename(lake.path / "file-10", lake.path / "last")
    assert os.listdir(lake.path) == ["last"]
    lake.umount()
    assert not is_running(stopped)
    assert not (lake.cache_dir / "maintenance").exists()


@pytest.mark.long  # daemon/test_maintenance.py shows it
def test_store_that_fails_during_a_fold_harms_nothing_and_is_logged_once(
    faults: tuple[Server, Faults], seaweed: Server, new_bucket: Callable[[Server], str], patched: Callable[..., Lake],
    tmp_path: Path, dev_fuse: Path,
) -> None:  # fmt: skip
    server, control = faults
    options = ("--retry-timeout", "1", "--refresh", "1h")
    with s3_lake(seaweed, new_bucket(seaweed), tmp_path / "lake", *options, through=server) as lake:
        patched(lake, interval_s=0.2, commits_max=1).mount()
        make_commits(lake, 10)
        control.error_500(10**6, method="PUT", containing=".lakefs/index/")
        eventually(lambda: "500" in str(section(lake)["last_error"]), "the fold fails", BEGINS_S_MAX)
        os.rename(lake.path / "file-10", lake.path / "later")
        assert (lake.path / "later").read_bytes() == b"bytes"
        time.sleep(3)
        control.clear()
        eventually(lambda: bool(section(lake)["last_fold_s"]), "a later one succeeds", BEGINS_S_MAX)
        assert section(lake)["last_error"] == ""
        said = [line for line in lake.log().splitlines() if "maintenance: put" in line]
        assert len(said) == 1, said
        assert os.listdir(lake.path) == ["later"]
