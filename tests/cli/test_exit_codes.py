"""The table of exit codes in the manual: it has each code and each command, and the codes are those of the errors."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from lakefs_fuse import errors
from lakefs_fuse.cli import MODULES, answer_errors, commands, run
from lakefs_fuse.errors import ConfigError, LakeError, LeaseHeld, ReportedError, StoreError

MANUAL = Path(__file__).parents[2] / "docs" / "operations.md"
LEASED = {"dataset", "fsck", "gc", "pack", "relocate", "snapshot", "unpack", "upgrade"}
"""Commands that change a lake under its maintenance lease."""


def section() -> str:
    text = MANUAL.read_text()
    return text[text.index("### Exit codes") :].partition("\n### ")[0]


def test_manual_has_every_code() -> None:
    told = set(map(int, re.findall(r"^\| (\d+) \|", section(), re.MULTILINE)))
    assert told == {0, *(value for name, value in vars(errors).items() if name.startswith("EXIT_"))}


def test_manual_has_every_command_with_its_codes() -> None:
    rows = dict(re.findall(r"^\| `([a-z]+)` \| ([\d, ]+) \|", section(), re.MULTILINE))
    codes = {name: set(map(int, text.split(","))) for name, text in rows.items()}
    assert list(codes) == sorted(MODULES)
    expected = {name: {1} | ({75} if name in LEASED else set()) for name in MODULES}
    assert codes == {**expected, "mount": {1, 70}}


def test_every_command_that_prints_something_takes_json() -> None:
    def without_json(command: click.Command, name: str) -> list[str]:
        if isinstance(command, click.Group):
            return [each for key in command.commands for each in without_json(command.commands[key], f"{name} {key}")]
        return [] if any("--json" in param.opts for param in command.params) else [name]

    context = click.Context(commands)
    found = [
        each for name in MODULES if (made := commands.get_command(context, name)) for each in without_json(made, name)
    ]
    assert found == ["clone", "metrics", "umount", "wait"]
    told = section()[section().index("With `--json`") :]
    assert all(f"`{name}`" in told for name in found)


def test_error_is_shown_without_what_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines, and what is escaped in them already, stay."""
    assert answer_errors(raising(LakeError("a\x1b[31m\x07 is damaged:\n  b\\x1b"))) == 1
    assert capsys.readouterr().err == "lakefs-fuse: a\\x1b[31m\\x07 is damaged:\n  b\\x1b\n"


def raising(error: BaseException) -> Callable[[], object]:
    def call() -> object:
        raise error

    return call


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: None, 0),
        (lambda: 1, 1),
        (raising(LakeError("x")), 1),
        (raising(StoreError("x")), 1),
        (raising(ConfigError("x")), 2),
        (raising(click.UsageError("x")), 2),
        (raising(LeaseHeld("x")), 75),
        (raising(ReportedError("x", 75)), 75),
        (raising(KeyboardInterrupt()), 130),
        (raising(click.Abort()), 130),
    ],
)
def test_error_has_the_code_of_the_manual(call: Callable[[], object], code: int) -> None:
    assert answer_errors(call) == code


@pytest.mark.parametrize("group", [[], ["dataset"], ["cache"]])
def test_group_without_a_command_shows_its_help(group: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code = run(group)
    printed = capsys.readouterr()
    assert f"{printed.out}{printed.err}".startswith("Usage: lakefs-fuse")
    assert "(see" not in printed.err
    assert code in (0, 2), "click 8.1 takes it for --help"


def test_missing_argument_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["dataset", "create"]) == 2
    assert capsys.readouterr().err == (
        "lakefs-fuse: Missing argument 'SOURCE' (see `lakefs-fuse dataset create --help`)\n"
    )
