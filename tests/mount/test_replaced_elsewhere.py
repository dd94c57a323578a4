"""Plain files that another node replaces: an open reads the new version within the TTL of the listing."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import MIB, Lake, eventually, noise
from tests.mount.test_commits import another

FILES = 30
SIZES = (1, 30_000, 5_000, 70_000)
DEADLINE_S = 60.0
NS = 1_000_000_000


@pytest.fixture
def writer(make_lake: LakeMaker) -> Lake:
    """A node that writes plain files into the directory ``d``."""
    lake = make_lake("seaweedfs", "--pack", "never").mount()
    (lake.path / "d").mkdir()
    return lake


def written(number: int, version: int) -> bytes:
    return noise(SIZES[(number + version) % len(SIZES)], number + 1000 * version)


@pytest.mark.long  # vfs/test_replaced_files.py shows it
def test_open_of_a_file_replaced_elsewhere_reads_the_new_version(writer: Lake, tmp_path: Path) -> None:
    names = [f"d/{number:03d}" for number in range(FILES)]
    large = [noise(10 * MIB + version, version) for version in range(2)]
    for number, name in enumerate(names):
        (writer.path / name).write_bytes(written(number, 0))
    (writer.path / "d" / "large").write_bytes(large[0])
    writer.sync()
    with another(writer, tmp_path, "--metadata-ttl", "3600", "--refresh", "3600") as reader:
        assert len(list((reader.path / "d").iterdir())) == FILES + 1
        gets, lists = reader.number("store.requests.get"), reader.number("store.requests.list")
        assert (reader.path / names[0]).read_bytes() == written(0, 0)
        asked = reader.number("store.requests.get") - gets, reader.number("store.requests.list") - lists
        assert asked == (1, 0), "nothing changed: no request more"
        for number, name in enumerate(names[1:], 1):
            (writer.path / name).write_bytes(written(number, 1))
            assert (reader.path / name).read_bytes() == written(number, 1)
            assert (reader.path / name).stat().st_size == len(written(number, 1))
        (writer.path / "d" / "large").write_bytes(large[1])
        assert (reader.path / "d" / "large").read_bytes() == large[1], "in a directory where that was seen before"


def test_handle_that_was_read_before_a_replacement_is_stale_and_the_next_is_not(writer: Lake, tmp_path: Path) -> None:
    versions = [noise(12 * MIB + version, version) for version in range(2)]
    path = writer.path / "d" / "large"
    path.write_bytes(versions[0])
    writer.sync()
    with another(writer, tmp_path, "--metadata-ttl", "3600", "--refresh", "3600") as reader:
        there = reader.path / "d" / "large"
        with there.open("rb", buffering=0) as file:
            assert os.pread(file.fileno(), MIB, 0) == versions[0][:MIB]
            path.write_bytes(versions[1])
            with pytest.raises(OSError) as caught:
                os.pread(file.fileno(), MIB, 10 * MIB)
        assert caught.value.errno == errno.ESTALE
        assert there.read_bytes() == versions[1]


def test_tail_of_a_log_that_another_node_appends_to_shows_every_line(writer: Lake, tmp_path: Path) -> None:
    log = writer.path / "d" / "log"
    log.write_text("line 0\n")
    writer.sync()
    with another(writer, tmp_path, "--metadata-ttl", "1", "--refresh", "1") as reader:
        command = ["tail", "-F", "-s", "0.1", "--max-unchanged-stats=1", str(reader.path / "d" / "log")]
        shown = tmp_path / "shown"
        with shown.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as tail:
            try:
                eventually(lambda: "line 0" in shown.read_text(), "line 0", DEADLINE_S)
                for number in range(1, 5):
                    with log.open("a") as file:
                        file.write(f"line {number}\n")
                    eventually(lambda: f"line {number}\n" in shown.read_text(), f"line {number}", DEADLINE_S)  # noqa: B023
            finally:
                tail.terminate()
        assert "Stale" not in shown.read_text()


@pytest.mark.parametrize("opened", [0, pytest.param(1, marks=pytest.mark.long), 2])
def test_mtime_set_elsewhere_is_seen_once_the_file_is_closed(make_lake: LakeMaker, tmp_path: Path, opened: int) -> None:
    """Handles but the first are opened without asking the daemon."""
    lake = make_lake("seaweedfs", "--refresh", "0.2").mount()
    path, data = lake.path / "f", noise(5000)
    path.write_bytes(data)
    lake.sync()
    with another(lake, tmp_path, "--metadata-ttl", "3600") as reader:
        there = reader.path / "f"
        assert there.read_bytes() == data
        inode = there.stat().st_ino
        fds = [os.open(there, os.O_RDONLY) for _ in range(opened)]
        try:
            os.utime(path, ns=(NS, NS))
            path.chmod(0o600)
            lake.sync()
            eventually(lambda: there.stat().st_mode & 0o777 == 0o600, "the change is seen")
            for fd in fds:
                assert os.pread(fd, 5000, 0) == data
            assert (there.stat().st_ino == inode) == bool(opened)
        finally:
            for fd in fds:
                os.close(fd)
        eventually(lambda: there.stat().st_mtime_ns == NS, "the mtime is seen, well before the TTL ends")
        assert there.read_bytes() == data
        kept = there.stat().st_ino
        there.chmod(0o640)
        os.utime(there, ns=(2 * NS, 2 * NS))
        reader.sync()
        assert (there.stat().st_mtime_ns, there.stat().st_ino) == (2 * NS, kept), "what is set here keeps its inode"
    eventually(lambda: path.stat().st_mtime_ns == 2 * NS, "the other way round")


def test_mtime_that_was_read_before_its_commit_is_seen(make_lake: LakeMaker, tmp_path: Path) -> None:
    """The kernel knows LastModified, and the daemon the mtime, by the time it hears of the commit."""
    lake = make_lake("seaweedfs", "--refresh", "2").mount()
    with another(lake, tmp_path, "--metadata-ttl", "3600") as reader:
        with (lake.path / "f").open("wb", buffering=0) as file:
            file.write(b"data")
            os.utime(file.fileno(), ns=(NS, NS))
        polls = reader.number("commits.polls")
        there = reader.path / "f"
        before = there.stat().st_mtime_ns
        assert there.read_bytes() == b"data"
        if reader.number("commits.polls") == polls:
            assert before != NS, "the store's listing says no mtime"
        eventually(lambda: there.stat().st_mtime_ns == NS, "the mtime is seen, well before the TTL ends")
