"""Plain files that another node replaces: who opens one afresh reads the new version, within the TTL of the listing."""

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


@pytest.fixture
def writer(make_lake: LakeMaker) -> Lake:
    """A node that writes plain files into the directory ``d``."""
    lake = make_lake("seaweedfs", "--pack", "never").mount()
    (lake.path / "d").mkdir()
    return lake


def written(number: int, version: int) -> bytes:
    return noise(SIZES[(number + version) % len(SIZES)], number + 1000 * version)


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
