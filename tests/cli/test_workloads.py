"""`mount --profile-for`: sets of options, which explicit ones overrule, and which the manual and help tell alike."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from lakefs_fuse.cli import preflight, run, spawn
from lakefs_fuse.cli.mount import config_of, mount
from lakefs_fuse.cli.mount_options import OF_WRITERS, WORKLOADS
from lakefs_fuse.config import GIB, MountConfig

MANUAL = Path(__file__).parents[2] / "docs" / "operations.md"


def config_for(*arguments: str) -> MountConfig:
    return config_of(["s3://bucket/lake", "/mnt/lake", *arguments])


@pytest.mark.parametrize("name", WORKLOADS)
def test_set_is_what_its_options_would_be_on_the_command_line(name: str) -> None:
    assert config_for("--profile-for", name) == config_for(*WORKLOADS[name])
    assert config_for("--profile-for", name) != config_for()


def test_explicit_options_win_wherever_they_stand() -> None:
    config = config_for("--metadata-ttl", "5s", "-o", "profile_for=training-read,rw", "--requests", "32")
    assert (config.metadata_ttl_s, config.read_only, config.store.requests_max) == (5.0, False, 32)
    assert config.refresh_s == 30.0, "the set's"
    assert config_for("--profile-for", "ci", "--supervise").supervise
    assert config_for("--profile-for", "checkpoints", "--staging-size", "1GiB").staging_bytes_max == GIB


def test_immutable_mount_gets_only_what_has_a_meaning_for_it() -> None:
    config = config_for("--profile-for", "training-read", "--immutable")
    assert config.store.requests_max == 64
    assert config.refresh_s == config_for().refresh_s
    assert config_for("--profile-for", "ci", "--immutable").durability == "close"


def test_directory_in_a_mount_is_reached_as_that_mount_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["mount", "--immutable", "/proc/sys", "--profile-for", "training-read"]) == 1
    assert "is not inside a mount" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--read-only", "--immutable"])
def test_set_of_writers_is_refused_where_nothing_is_written(
    given: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spawn, "start", pytest.fail)
    monkeypatch.setattr(preflight, "check", pytest.fail)
    assert set(WORKLOADS) >= OF_WRITERS
    assert run(["mount", "s3://bucket", "/mnt/lake", "--profile-for", "checkpoints", given]) == 2
    assert "is for writable mounts" in capsys.readouterr().err
    assert run(["mount", "s3://bucket", "/mnt/lake", "--profile-for", "sleeping"]) == 2
    assert "--profile-for" in capsys.readouterr().err


def test_manual_and_help_tell_the_sets() -> None:
    text = MANUAL.read_text()
    section = text[text.index("### Options for a kind of work") :].partition("\n### ")[0]
    rows = re.findall(r"^\| `([a-z-]+)` \| (.+?) \|", section, re.MULTILINE)
    told = {name: tuple(re.findall(r"`(--[^`]+)`", cell)) for name, cell in rows}
    assert told == {name: tuple(each.replace("=", " ") for each in typed) for name, typed in WORKLOADS.items()}
    shown = " ".join(mount.get_help(click.Context(mount, terminal_width=200)).split())
    for typed in WORKLOADS.values():
        assert " ".join(typed).replace("=", " ") in shown
