"""`lakefs-fuse log` on lakes that two mounts and another S3 client change."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.conftest import LakeMaker
from tests.mount.lakes import Lake, eventually
from tests.mount.test_commits import another

OPTIONS = ("--refresh", "1", "--metadata-ttl", "1", "--pack", "always")
HOSTILE = "evil\u202e"
Entry = dict[str, object]


@pytest.fixture(params=["file", pytest.param("seaweedfs", marks=pytest.mark.long)])
def nodes(request: pytest.FixtureRequest, make_lake: LakeMaker, tmp_path: Path) -> Iterator[tuple[Lake, Lake]]:
    lake = make_lake(request.param, *OPTIONS).mount()
    with another(lake, tmp_path) as other:
        yield lake, other


def log_of(lake: Lake, place: str, *options: str) -> tuple[Entry, list[Entry]]:
    """Since when the log of a path or URL reaches, and its entries."""
    done = lake.cli("log", place, "--json", *options)
    assert done.returncode == 0, done.stderr
    start, *entries = map(json.loads, done.stdout.splitlines())
    return start, entries


def short(entries: list[Entry]) -> list[tuple[object, ...]]:
    return [tuple(each[name] for name in ("writer", "operation", "source", "path") if each[name]) for each in entries]


def writer_of(lake: Lake) -> str:
    commits = lake.stats()["commits"]
    assert isinstance(commits, dict)
    writer: str = commits["writer"]
    return writer


def change(lake: Lake, other: Lake) -> list[tuple[object, ...]]:
    """What two nodes do one after another, with the entries that tell of it."""
    (lake.path / "d").mkdir()
    for name in ("a", "b", HOSTILE):
        (lake.path / "d" / name).write_bytes(b"bytes of " + name.encode())
    lake.sync()
    eventually((other.path / "d" / HOSTILE).exists, "the other node hears of it")
    (other.path / "d").rename(other.path / "e")
    (other.path / "e" / "a").unlink()
    (other.path / "latest").symlink_to("e")
    other.sync()
    here, there = writer_of(lake), writer_of(other)
    return [
        (here, "mkdir", "d"),
        *((here, "put", f"d/{name}") for name in ("a", "b", HOSTILE)),
        (there, "rename", "d", "e"), (there, "remove", "e/a"), (there, "symlink", "latest"),
    ]  # fmt: skip


def test_log_tells_what_two_mounts_changed(nodes: tuple[Lake, Lake]) -> None:
    lake, other = nodes
    expected = change(lake, other)
    start, entries = log_of(lake, str(lake.path))
    assert short(entries) == expected
    assert start == {"since": entries[0]["time"], "whole": True}
    assert [entry["time"] for entry in entries] == sorted(str(entry["time"]) for entry in entries)
    assert [entry["size"] for entry in entries[1:3]] == [len(b"bytes of a")] * 2
    assert log_of(lake, str(lake.path), "-n", "2")[1] == entries[-2:]
    assert short(log_of(lake, str(other.path / "e" / "b"))[1]) == [expected[4]]
    assert short(log_of(lake, str(lake.path / "d" / "b"))[1]) == [expected[2], expected[4]]
    url = [lake.source, *lake.options[: lake.options.index("--refresh")]]
    assert log_of(lake, *url) == (start, entries)
    assert short(log_of(lake, f"{url[0]}/d/b", *url[1:])[1]) == [expected[2], expected[4]]


@pytest.mark.parametrize("nodes", ["file", pytest.param("seaweedfs", marks=pytest.mark.long)], indirect=True)
def test_log_escapes_names_for_the_terminal(nodes: tuple[Lake, Lake]) -> None:
    lake, other = nodes
    expected = change(lake, other)
    done = lake.cli("log", str(lake.path))
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1 + len(expected)
    assert r"d/evil\u202e" in done.stdout
    assert "\u202e" not in done.stdout


def test_log_tells_of_object_that_another_client_puts_over_a_packed_file(make_lake: LakeMaker) -> None:
    lake = make_lake("seaweedfs", *OPTIONS).mount()
    (lake.path / "f").write_bytes(b"packed")
    lake.sync()
    lake.outside.replace("f", b"of another client")
    lake.outside.replace("g", b"in no commit")
    eventually(lambda: (lake.path / "f").read_bytes() == b"of another client", "it is listed")
    eventually(lambda: len(log_of(lake, str(lake.path))[1]) == 2, "the mount commits it")
    _, (before, after) = log_of(lake, str(lake.path))
    assert [(each["operation"], each["path"], each["size"]) for each in (before, after)] == [
        ("put", "f", 6), ("put", "f", 17),
    ]  # fmt: skip


@pytest.mark.parametrize("nodes", ["file", pytest.param("seaweedfs", marks=pytest.mark.long)], indirect=True)
def test_log_follows_what_is_committed(nodes: tuple[Lake, Lake]) -> None:
    lake, other = nodes
    (lake.path / "before").mkdir()
    lake.sync()
    lines: list[str] = []
    with subprocess.Popen(
        [*lake.command, "log", str(lake.path), "-n", "0", "-f", "--refresh", "0.2s", "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=lake.env,
    ) as program:  # fmt: skip
        assert program.stdout is not None
        assert program.stderr is not None
        reader = threading.Thread(target=lines.extend, args=(program.stdout,))
        reader.start()
        try:
            eventually(lambda: bool(lines), "the log has begun")
            expected = change(lake, other)
            eventually(lambda: len(lines) > len(expected), "what was committed is shown")
            program.send_signal(signal.SIGINT)
            reader.join(20)
            assert program.wait(20) == 130
        finally:
            program.kill()
        assert program.stderr.read() == "lakefs-fuse: interrupted\n"
    assert short([json.loads(line) for line in lines[1:]]) == expected


def test_log_whose_reader_ends_ends(lake: Lake) -> None:
    for number in range(20):
        (lake.path / f"d{number}").mkdir()
    lake.sync()
    done = subprocess.run(
        f"{' '.join(lake.command)} log {lake.path} | head -1",
        shell=True, capture_output=True, text=True, timeout=60, check=True, env=lake.env, cwd="/",
    )  # fmt: skip
    assert done.stdout.startswith("-- since ")
    assert "Traceback" not in done.stderr


def test_log_of_working_directory_needs_no_path(lake: Lake) -> None:
    (lake.path / "d").mkdir()
    (lake.path / "other").mkdir()
    lake.sync()
    done = subprocess.run(
        [*lake.command, "log", "--json"], capture_output=True, text=True, timeout=60, check=True, env=lake.env,
        cwd=lake.path / "d",
    )  # fmt: skip
    assert [json.loads(line)["path"] for line in done.stdout.splitlines()[1:]] == ["d"]


def test_log_of_lake_without_commits_says_so(make_lake: LakeMaker) -> None:
    lake = make_lake("file").mount()
    (lake.path / "plain").write_bytes(b"")
    done = lake.cli("log", lake.source)
    assert (done.returncode, done.stdout) == (0, "-- no commits\n")
    assert os.listdir(lake.path) == ["plain"]
