"""How entries of the change log become lines; the worker that reads them is not there."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from lakefs_fuse.cli import log, run
from lakefs_fuse.cli.terminal import escaped
from lakefs_fuse.control.worker_protocol import LogArgs, LogEntry, LogStart

NS = 1_000_000_000
AT_NS = 1_700_000_000_123_456_789
AT = "2023-11-14T23:13:20.123+01:00"
Answers = Sequence[LogStart | LogEntry]


@pytest.fixture
def log_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., LogArgs]]:
    """Run the command, with these answers of the worker; the arguments that the worker gets."""
    monkeypatch.setenv("TZ", "CET-1")
    time.tzset()

    def run_log(answers: Answers, *options: str) -> LogArgs:
        asked: list[LogArgs] = []

        def run_offline(
            command: str, place: object, args: LogArgs, *, show: Callable[[LogStart | LogEntry], None]
        ) -> int:
            asked.append(args)
            for answer in answers:
                show(answer)
            return 0

        monkeypatch.setattr(log, "run_offline", run_offline)
        assert run(["log", f"file://{tmp_path}", *options]) == 0
        return asked[0]

    yield run_log
    monkeypatch.undo()
    time.tzset()


def entry(operation: str, path: str, **more: object) -> LogEntry:
    return LogEntry(time_ns=AT_NS, writer="0000beef", operation=operation, path=path, **more)  # type: ignore[arg-type]


ENTRIES: Answers = [
    LogStart(since_ns=AT_NS, is_whole=True),
    entry("put", "d/a b", size=2048),
    entry("rename", "new", source="old"),
    entry("symlink", "latest", target="step1"),
    entry("remove", "x\x1b[31m\n\u202e\\"),
]


def test_log_is_a_line_for_each_change(log_of: Callable[..., LogArgs], capsys: pytest.CaptureFixture[str]) -> None:
    args = log_of(ENTRIES)
    assert args == LogArgs(count=50, follow=False, refresh_s=5.0)
    assert capsys.readouterr().out.splitlines() == [
        f"-- since {AT}, the first commit",
        f"{AT}  0000beef  put        2.0 KiB  d/a b",
        f"{AT}  0000beef  rename              old -> new",
        f"{AT}  0000beef  symlink             latest -> step1",
        f"{AT}  0000beef  remove              x\\x1b[31m\\n\\u202e\\\\",
    ]


def test_log_without_changes_says_so(log_of: Callable[..., LogArgs], capsys: pytest.CaptureFixture[str]) -> None:
    log_of(ENTRIES[:1])
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"-- since {AT}, the first commit"
    assert second.startswith("-- no change of file://")
    log_of(ENTRIES[:1], "--json")
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_log_as_json_is_an_object_a_line(log_of: Callable[..., LogArgs], capsys: pytest.CaptureFixture[str]) -> None:
    log_of(ENTRIES, "--json")
    start, put, rename, symlink, remove = map(json.loads, capsys.readouterr().out.splitlines())
    assert start == {"since": AT, "whole": True}
    nothing = {"time": AT, "writer": "0000beef", "size": None, "source": None, "target": None}
    assert put == {**nothing, "operation": "put", "path": "d/a b", "size": 2048}
    assert rename == {**nothing, "operation": "rename", "path": "new", "source": "old"}
    assert symlink == {**nothing, "operation": "symlink", "path": "latest", "target": "step1"}
    assert remove == {**nothing, "operation": "remove", "path": "x\x1b[31m\n\u202e\\"}


@pytest.mark.parametrize(
    ("start", "said", "as_json"),
    [
        (LogStart(since_ns=0, is_whole=True), "-- no commits", {"since": None, "whole": True}),
        (
            LogStart(since_ns=AT_NS, is_whole=False),
            f"-- since {AT}; earlier commits were deleted, except packs in use",
            {"since": AT, "whole": False},
        ),
    ],
)
def test_log_begins_with_since_when_it_reaches(
    start: LogStart,
    said: str,
    as_json: dict[str, object],
    log_of: Callable[..., LogArgs],
    capsys: pytest.CaptureFixture[str],
) -> None:
    log_of([start])
    log_of([start], "--json")
    text, *_, document = capsys.readouterr().out.splitlines()
    assert (text, json.loads(document)) == (said, as_json)


def test_options_of_log_reach_the_worker(log_of: Callable[..., LogArgs]) -> None:
    assert log_of([], "-n", "all", "-f", "--refresh", "2s") == LogArgs(count=None, follow=True, refresh_s=2.0)
    assert log_of([], "--lines", "0", "--refresh", "0") == LogArgs(count=0, follow=False, refresh_s=log.REFRESH_S_MIN)


@pytest.mark.parametrize("count", ["-1", "x", "1.5", "", "\N{SUPERSCRIPT TWO}", "9" * 20, "9" * 5000])
def test_count_that_is_no_number_is_refused(count: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["log", f"file://{tmp_path}", "-n", count]) == 2
    assert "expected for example 50, or all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Grüße/データ 1", "Grüße/データ 1"),
        ("a\tb\rc\x00d\x7f", "a\\tb\\rc\\x00d\\x7f"),
        ("\x9b31m", "\\x9b31m"),
        ("a\\nb", "a\\\\nb"),
        ("\U000e0001\u2028\ufeff", "\\U000e0001\\u2028\\ufeff"),
    ],
)
def test_escaped_text_has_nothing_that_a_terminal_obeys(text: str, shown: str) -> None:
    assert escaped(text) == shown
