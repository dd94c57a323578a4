"""Work beside a mount as the command line runs it: children that answer well and badly, and what is shown."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lakefs_fuse.cli import terminal
from lakefs_fuse.cli.store_options import FLAGS, Options
from lakefs_fuse.cli.worker import END_S_MAX, find_place, run_offline
from lakefs_fuse.config import Source, StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.control.worker_protocol import Place
from lakefs_fuse.errors import ConfigError, LakeError, ReportedError

ROOT = Path(__file__).parents[2]
PLACE = Place(store=StoreConfig(source=Source.parse("s3://bucket/lake")), path="a/b")
NONE: Options = dict.fromkeys(FLAGS)

PREAMBLE = """
import os, sys, time, json, signal
request = json.load(open(int(sys.argv[sys.argv.index("--request-fd") + 1]), "rb"))
def say(**answer): print(json.dumps(answer), flush=True)
"""


def program(tmp_path: Path, body: str) -> list[str]:
    script = tmp_path / "worker.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    return [sys.executable, str(script)]


def run(tmp_path: Path, body: str, *, as_json: bool = False) -> int:
    args = protocol.IngestArgs(source="/src")
    return run_offline("ingest", PLACE, args, as_json=as_json, program=program(tmp_path, body))


def test_the_request_arrives_and_the_end_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    body = """
        say(type="progress", what="working", files_done=1, bytes_done=2)
        say(type="note", text="look [here]")
        say(type="finished", summary=request, text="all is well", exit_code=0)
    """
    assert run(tmp_path, body) == 0
    shown = capfd.readouterr()
    assert (shown.out, shown.err) == ("all is well\n", "lakefs-fuse: look [here]\n")
    assert run(tmp_path, body, as_json=True) == 0
    request = json.loads(capfd.readouterr().out)
    assert request["command"] == "ingest"
    assert request["args"] == {"source": "/src", "count": False}
    assert request["store"]["source"] == {"scheme": "s3", "bucket": "bucket", "prefix": "lake/"}
    assert (request["path"], request["find_root"], request["uploads_max"]) == ("a/b", False, 4)


def test_an_end_with_something_left_out_is_no_success(tmp_path: Path) -> None:
    assert run(tmp_path, 'say(type="finished", summary={}, text="two left out", exit_code=1)') == 1


def test_a_failure_is_the_childs_own(tmp_path: Path) -> None:
    with pytest.raises(ReportedError, match="no such bucket") as raised:
        run(tmp_path, 'say(type="failed", message="no such bucket", exit_code=2); sys.exit(2)')
    assert raised.value.exit_code == 2


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("os._exit(7)", r"ended without an answer \(status 7\)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", r"ended without an answer \(status -9\)"),
        ("print('not JSON')", "makes no sense"),
    ],
)
def test_a_child_that_misbehaves_is_an_error(tmp_path: Path, body: str, said: str) -> None:
    with pytest.raises(LakeError, match=said):
        run(tmp_path, body)


def test_ctrl_c_is_passed_on_once_and_the_childs_end_is_waited_for(tmp_path: Path) -> None:
    script = program(
        tmp_path,
        f"""
        def clean_up(*_):
            time.sleep(0.3)
            open({str(tmp_path / "cleaned")!r}, "w").close()
            say(type="failed", message="interrupted", exit_code=130)
            sys.exit(130)
        signal.signal(signal.SIGINT, clean_up)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {{signal.SIGINT}})
        say(type="note", text="ready")
        time.sleep(60)
        """,
    )
    caller = (
        "import signal, sys; from tests.cli.test_worker import *\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # in the background it may be ignored
        "try: run_offline('ingest', PLACE, protocol.IngestArgs(source=''), program=sys.argv[1:])\n"
        "except ReportedError as error: sys.exit(error.exit_code)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", caller, *script], stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == b"lakefs-fuse: ready\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 130
    finally:
        process.kill()
        process.communicate()
    assert (tmp_path / "cleaned").exists()


CALLER = """
import os, signal, subprocess, sys
from lakefs_fuse.cli import run

class Interrupted(subprocess.Popen):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        os.kill(os.getpid(), signal.SIGINT)

subprocess.Popen = Interrupted
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(run(sys.argv[1:]))
"""
"""Gets Ctrl-C right after it has started its child, which has loaded nothing yet."""


@pytest.mark.parametrize("command", ["log --follow", "doctor"])
def test_ctrl_c_before_the_child_is_ready_interrupts_it(tmp_path: Path, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLER, *command.split(), f"file://{tmp_path}"], check=False, timeout=60,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert done.stderr == "lakefs-fuse: interrupted\n"


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "lake").mkdir()
    for number in range(3):
        (tmp_path / "src" / str(number)).write_bytes(bytes(100_000))
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "lakefs_fuse", "ingest", tmp_path / "src", f"file://{tmp_path}/lake"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 1 << 16)
        except OSError:
            break
    os.close(ours)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert output.startswith(b"3 files of 300,000 bytes")
    assert b"ingesting" in shown
    assert re.search(rb"3( of 3)? files", shown)


# -- what PATH means ---------------------------------------------------------------------------------------------------


def test_a_url_is_a_place_whose_lake_is_to_be_found() -> None:
    options = {**NONE, "region": "eu-1"}
    place = find_place("s3://bucket/lake/sub", options)
    assert place.find_root
    assert place.store == StoreConfig(source=Source.parse("s3://bucket/lake/sub"), region="eu-1")


@pytest.mark.parametrize(
    ("path", "lake", "inside"),
    [
        ("s3://bucket/lake/a/b", "s3://bucket/lake", "a/b"),
        ("s3://bucket/lake/", "s3://bucket/lake", ""),
        ("s3://bucket/a", "s3://bucket", "a"),
        ("file:///lake/a", "file:///lake", "a"),
    ],
)
def test_a_lake_that_is_given_is_not_looked_for(path: str, lake: str, inside: str) -> None:
    place = find_place(path, NONE, lake)
    assert (place.path, place.find_root, place.store.source) == (inside, False, Source.parse(lake))


@pytest.mark.parametrize("path", ["s3://bucket/lakes/a", "s3://other/lake/a", "file:///lake/a", "s3://bucket"])
def test_a_place_outside_of_the_lake_is_refused(path: str) -> None:
    with pytest.raises(ConfigError, match="is not in --lake s3://bucket/lake"):
        find_place(path, NONE, "s3://bucket/lake")


def test_what_is_neither_a_url_nor_in_a_mount(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match="not inside a mount of this program, and not a source URL"):
        find_place(str(tmp_path), NONE)
    with pytest.raises(ConfigError, match="--lake goes with a source URL"):
        find_place(str(tmp_path), NONE, "s3://bucket")
    with pytest.raises(ConfigError, match="--requests goes with a source URL"):
        find_place(str(tmp_path), {**NONE, "requests_max": 3})


ENTRIES = """
    say(type="log_start", since_ns=1, is_whole=True)
    for number in range({count}):
        say(type="log_entry", time_ns=2, writer="0000beef", operation="mkdir", path=f"d{{number}}")
    say(type="note", text="one is left out")
    say(type="finished", summary={{}}, text="", exit_code=1)
"""


def test_entries_are_shown_while_they_come_and_nothing_after_them(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shown: list[protocol.Row] = []
    args, child = protocol.LogArgs(), program(tmp_path, ENTRIES.format(count=2))
    assert run_offline("log", PLACE, args, show=shown.append, program=child) == 1
    assert shown == [
        protocol.LogStart(since_ns=1, is_whole=True),
        *(protocol.LogEntry(time_ns=2, writer="0000beef", operation="mkdir", path=f"d{each}") for each in range(2)),
    ]
    assert tuple(capfd.readouterr()) == ("", "lakefs-fuse: one is left out\n")


def test_child_whose_entries_nobody_reads_is_ended(tmp_path: Path) -> None:
    def show(answer: object) -> None:
        raise BrokenPipeError

    body = """
        say(type="log_start", since_ns=1, is_whole=True)
        time.sleep(600)
    """
    began_s = time.monotonic()
    with pytest.raises(BrokenPipeError):
        run_offline("log", PLACE, protocol.LogArgs(follow=True), show=show, program=program(tmp_path, body))
    assert time.monotonic() - began_s < END_S_MAX / 2


def test_text_of_a_result_is_shown_without_what_a_terminal_obeys(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    body = r"""
        say(type="finished", summary={}, text="first \x1b[2J\nsecond")
    """
    assert run_offline("gc", PLACE, protocol.GcArgs(), program=program(tmp_path, body)) == 0
    assert capfd.readouterr().out == "first \\x1b[2J\nsecond\n"


def test_answer_of_any_length_is_read(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As that of `fsck` of a lake in which many names are hurt."""
    assert run(tmp_path, 'say(type="finished", summary={}, text="x" * (17 << 20))') == 0
    assert len(capfd.readouterr().out) == (17 << 20) + 1


@pytest.mark.parametrize("is_watched", [False, True])
def test_note_is_one_line_without_what_a_terminal_obeys(
    is_watched: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "is_watched", lambda: is_watched)
    body = r"""
        say(type="note", text="left: a\x1b]0;title\x07\nsecond")
        say(type="finished", summary={}, text="")
    """
    assert run(tmp_path, body) == 0
    assert "lakefs-fuse: left: a\\x1b]0;title\\x07\\nsecond\n" in capfd.readouterr().err


def test_bar_shows_paths_as_they_are(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(terminal, "is_watched", lambda: True)
    with terminal.progress_bar() as bar:
        bar.update("d/[/b]", 1, 2, "[/red] files")
