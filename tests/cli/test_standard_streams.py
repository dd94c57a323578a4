"""Commands whose caller closed standard input, output or error, as daemons and schedulers do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.test_lake import ENVIRONMENT, LAKEFS


def run_with_closed(stream: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {stream}', "sh", *LAKEFS, *arguments],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
        env=ENVIRONMENT,
    )


@pytest.mark.parametrize("stream", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_command_without_a_standard_stream_does_its_work(tmp_path: Path, stream: str) -> None:
    source, lake = tmp_path / "source", tmp_path / "lake"
    source.mkdir()
    lake.mkdir()
    (source / "file").write_text("data")
    done = run_with_closed(stream, "ingest", str(source), f"file://{lake}")
    assert done.returncode == 0
    assert done.stderr.count("\n") == ("2>&-" not in stream), "one note"
    assert list((lake / ".lakefs" / "commits").iterdir())
    assert bool(done.stdout) == (">&-" not in stream.replace("2>&-", ""))


def test_error_without_a_standard_input_is_one_line(tmp_path: Path) -> None:
    done = run_with_closed("<&-", "gc", f"file://{tmp_path}/missing")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("lakefs-fuse: ")
