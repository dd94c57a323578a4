"""Sizes, durations and modes as people type them."""

from __future__ import annotations

import os

import click
import pytest

from lakefs_fuse.cli import run
from lakefs_fuse.cli.parameters import (
    DURATION,
    OCTAL_MODE,
    SIZE,
    LocalPath,
    default_text,
    format_bytes,
    format_duration,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10GiB", 10 << 30),
        ("10G", 10 << 30),
        ("500M", 500 << 20),
        ("500MB", 500_000_000),
        ("1.5 kib", 1536),
        ("2t", 2 << 40),
        ("7b", 7),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert SIZE.convert(text, None, None) == expected


@pytest.mark.parametrize(
    "text", ["", "-1", "10 apples", "1e9", "ten", "10GiBs", "9999999999T", "\N{ARABIC-INDIC DIGIT THREE}"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        SIZE.convert(text, None, None)


@pytest.mark.parametrize(
    ("text", "expected"), [("60", 60.0), ("5m", 300.0), ("1.5s", 1.5), ("250ms", 0.25), ("2h", 7200.0), ("1d", 86400.0)]
)
def test_durations(text: str, expected: float) -> None:
    assert DURATION.convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["", "-5", "soon", "5 minutes", "inf", "nan", "99999d"])
def test_what_is_no_duration(text: str) -> None:
    with pytest.raises(click.BadParameter):
        DURATION.convert(text, None, None)


@pytest.mark.parametrize(("text", "expected"), [("644", 0o644), ("0755", 0o755), ("0o600", 0o600), ("0", 0)])
def test_modes(text: str, expected: int) -> None:
    assert OCTAL_MODE.convert(text, None, None) == expected


@pytest.mark.parametrize("text", ["", "888", "rwx", "4755", "77777", "-1"])
def test_what_is_no_mode(text: str) -> None:
    with pytest.raises(click.BadParameter):
        OCTAL_MODE.convert(text, None, None)


def test_path_of_which_nothing_is_to_be_true_is_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a mountpoint whose daemon hangs."""

    stated: list[object] = []

    def stat(path: object) -> os.stat_result:
        stated.append(path)
        raise FileNotFoundError

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", stat)
        assert LocalPath(readable=False).convert("/mnt/lake", None, None) == "/mnt/lake"
        assert "/mnt/lake" not in stated
        LocalPath(readable=False, dir_okay=False).convert("/mnt/lake", None, None)
        assert "/mnt/lake" in stated
    with pytest.raises(click.BadParameter):
        LocalPath(readable=False).convert("", None, None)


def test_what_people_read() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 30, 5 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 GiB",
        "5.0 TiB",
    ]
    assert [format_duration(s) for s in (0.0015, 12, 600, 9000)] == ["1.5 ms", "12 s", "10 min", "2.5 h"]


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("upload_bytes_s_max", 0, "0"),
        ("pack_threshold_bytes", 1000, "1000"),
        ("pack_threshold_bytes", 1536, "1536"),
        ("pack_threshold_bytes", 1 << 20, "1MiB"),
        ("cache_bytes_max", 1536 << 20, "1536MiB"),
        ("cache_bytes_max", 10 << 40, "10TiB"),
        ("file_mode", 0o644, "644"),
        ("refresh_s", 5.0, "5s"),
        ("delete_after_s", 300.0, "5m"),
        ("retry_timeout_s", 90.0, "90s"),
        ("staging_timeout_s", 3600.0, "1h"),
        ("delete_after_s", 0.0, "0s"),
        ("uploads_max", 8, "8"),
        ("pack", "auto", "auto"),
        ("hints", "", "none"),
    ],
)
def test_defaults_in_the_help_text(name: str, value: object, expected: str) -> None:
    assert default_text(name, value) == f"[default: {expected}]"


@pytest.mark.parametrize("text", ["nan", "-1", "101"])
def test_percent_outside_its_range_is_a_usage_error(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gc", "file:///nowhere", "--live-below", text]) == 2
    assert "--live-below" in capsys.readouterr().err
