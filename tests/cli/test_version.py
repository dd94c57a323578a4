"""`--version`: what it says of a machine where everything works, where a part is missing, and where libfuse is."""

from __future__ import annotations

import json
import sys

import pytest

from lakefs_fuse import __version__
from lakefs_fuse.cli import run, version
from lakefs_fuse.cli.version import Installation, inspect_installation


def child(program: str) -> tuple[str, ...]:
    """A child process that runs this instead of looking."""
    return (sys.executable, "-c", program)


def test_version_of_this_machine_names_program_python_libfuse_kernel_and_fast_paths(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LAKEFS_FUSE_HOOKS", raising=False)
    assert run(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"lakefs-fuse {__version__}"
    told = {line[:12].strip(): line[12:] for line in lines[1:]}
    assert set(told) == {"Python", "libfuse", "fast paths", "kernel"}
    assert told["libfuse"].startswith("3.")
    assert "(libfuse3.so." in told["libfuse"]
    assert told["fast paths"] == "requests, request loop, directory entries, suid and sgid"
    assert told["kernel"].startswith("Linux ")


def test_version_without_the_library_says_why(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAKEFS_FUSE_HOOKS", "off")
    assert run(["--version"]) == 0
    out = capsys.readouterr().out
    assert "fast paths  none\n" in out
    assert "the hooks library is turned off by LAKEFS_FUSE_HOOKS\n" in out


def test_installation_with_one_path_missing_names_it_and_why() -> None:
    paths = {"requests": "", "request loop": "too new", "directory entries": "", "suid and sgid": "too new"}
    lines = Installation("3.17.2", "libfuse3.so.3.17.2", "4.0", paths).lines()
    assert lines == [
        ("libfuse", "3.17.2 (libfuse3.so.3.17.2), pyfuse3 4.0"),
        ("fast paths", "requests, directory entries"),
        ("missing", "request loop, suid and sgid: too new"),
    ]


def test_installation_without_libfuse_is_a_line_of_the_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = "libfuse3.so.3: cannot open shared object file"
    monkeypatch.setattr(version, "INSTALLATION", child(f"raise ImportError({missing!r})"))
    assert run(["--version"]) == 0
    said = f"libfuse     cannot be used: ImportError: {missing} (is the package fuse3 installed?)\n"
    assert said in capsys.readouterr().out


def test_installation_that_dies_or_cannot_start_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "INSTALLATION", child("import os; os._exit(9)"))
    assert inspect_installation().error.startswith("exit code 9")
    monkeypatch.setattr(version, "INSTALLATION", ("/nowhere/python",))
    assert "/nowhere/python" in inspect_installation().error
    found = {"libfuse": "3", "file": "f", "pyfuse3": "p", "fast_paths": {}}
    monkeypatch.setattr(version, "INSTALLATION", child(f"print({json.dumps(found)!r})"))
    assert inspect_installation() == Installation("3", "f", "p")
