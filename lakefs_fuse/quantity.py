"""Counts as sentences for users have them: "1 file", "2 files", "1,024 directories"."""

from __future__ import annotations


def counted(count: float, singular: str, plural: str = "") -> str:
    """A whole number, with commas, and what it counts. ``plural`` is given where it is not ``singular`` and an s: also
    of a noun with its verb, as ``counted(files, "file is", "files are")``."""
    return f"{round(count):,} {singular if count == 1 else plural or f'{singular}s'}"
