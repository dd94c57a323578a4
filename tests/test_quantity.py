"""Counts in sentences."""

from __future__ import annotations

import pytest

from lakefs_fuse.quantity import counted


@pytest.mark.parametrize(
    ("count", "words", "expected"),
    [
        (0, ("file",), "0 files"),
        (1, ("file",), "1 file"),
        (2, ("file",), "2 files"),
        (1.0, ("hit",), "1 hit"),
        (12_345, ("byte",), "12,345 bytes"),
        ((1 << 60) + 1, ("byte",), f"{(1 << 60) + 1:,} bytes"),
        (1, ("directory", "directories"), "1 directory"),
        (2, ("directory", "directories"), "2 directories"),
        (1, ("file is", "files are"), "1 file is"),
        (3, ("file is", "files are"), "3 files are"),
    ],
)
def test_number_agrees_with_its_noun(count: float, words: tuple[str, ...], expected: str) -> None:
    assert counted(count, *words) == expected
