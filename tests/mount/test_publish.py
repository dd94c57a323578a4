"""Files that are published while a program is writing them, seen from another mount and with Python's own calls."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake, eventually
from tests.mount.test_commits import another

LINES = 5
WRITER = """
import sys
with open(sys.argv[1], "w") as log:
    for line in sys.stdin:
        log.write(line)
        log.flush()
"""


@pytest.fixture
def publishing(make_lake: LakeMaker, tmp_path: Path) -> Lake:
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\npath = "runs/**"\npublish = "1s"\n')
    options = ("--rules", str(rules), "--durability", "writeback", "--refresh", "0.2", "--metadata-ttl", "0.5")
    return make_lake("seaweedfs", *options).mount()


def shows(path: Path, text: str) -> None:
    """Within a few seconds the file is there, and has this text."""
    eventually(lambda: path.exists() and path.read_text() == text, f"{path} shows {text!r}")


@pytest.mark.long  # vfs/test_open_publisher.py shows it
def test_log_that_a_program_keeps_open_is_read_on_another_node(publishing: Lake, tmp_path: Path) -> None:
    (publishing.path / "runs").mkdir()
    for number in range(8):  # so that the C library would receive the next file
        (publishing.path / "runs" / f"old{number}").write_text("")
    with another(publishing, tmp_path) as other:
        log = publishing.path / "runs" / "log.txt"
        with subprocess.Popen([sys.executable, "-c", WRITER, log], stdin=subprocess.PIPE, text=True) as writer:
            assert writer.stdin is not None
            text = ""
            for number in range(LINES):
                writer.stdin.write(f"line {number}\n")
                writer.stdin.flush()
                text += f"line {number}\n"
                shows(other.path / "runs" / "log.txt", text)
                assert log.read_text() == text
            before = publishing.number("store.requests.put")
            writer.stdin.close()
        assert publishing.number("store.requests.put") <= before + 1


def test_tail_follows_a_published_log_on_the_same_node(publishing: Lake) -> None:
    (publishing.path / "runs").mkdir()
    log = publishing.path / "runs" / "log.txt"
    with log.open("w") as writing, log.open() as reading:
        for number in range(3):
            writing.write(f"line {number}\n")
            writing.flush()
            assert reading.readline() == f"line {number}\n"


def test_mtime_of_a_published_log_is_that_of_the_last_append(publishing: Lake) -> None:
    (publishing.path / "runs").mkdir()
    log = publishing.path / "runs" / "log.txt"
    log.write_text("line 0\n")
    os.utime(log, (1000, 1000))
    with log.open("a") as writing:
        writing.write("line 1\n")
    eventually(lambda: log.stat().st_mtime > 1000, "the mtime of the append")


def test_file_that_no_rule_names_can_be_mapped_and_one_that_is_published_cannot(publishing: Lake) -> None:
    (publishing.path / "runs").mkdir()
    for name, is_mapped in (("other", True), ("runs/log", False)):
        fd = os.open(publishing.path / name, os.O_RDWR | os.O_CREAT)
        try:
            os.ftruncate(fd, 4096)
            if is_mapped:
                mmap.mmap(fd, 4096).close()
            else:
                with pytest.raises(OSError, match="No such device"):
                    mmap.mmap(fd, 4096)
                mmap.mmap(fd, 4096, flags=mmap.MAP_PRIVATE).close()
        finally:
            os.close(fd)


def test_line_behind_a_large_log_sends_that_line_alone(s3: Lake) -> None:
    log = s3.path / "log.txt"
    text = random.Random(1).randbytes(6 << 20)  # beyond the least part that is copied, and below a part
    log.write_bytes(text)
    sent, parts = s3.number("store.bytes.written"), s3.number("store.requests.part")
    with log.open("ab", buffering=0) as writing:
        for number in range(LINES):
            text += b"line %d\n" % number
            writing.write(b"line %d\n" % number)
            os.fsync(writing)
            assert s3.outside.read("log.txt") == text
    assert s3.number("store.bytes.written") <= sent + LINES * 4096
    assert s3.number("store.requests.part") == parts + LINES
    assert log.read_bytes() == text
