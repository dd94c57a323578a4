"""A table of runs: one row for each, appended to a document whose explanations stand above the table."""

from __future__ import annotations

import subprocess
from datetime import UTC, datetime
from pathlib import Path

HEAD = "| date | commit | options | seed | kills | result |\n|---|---|---|---|---|---|\n"
REPOSITORY = Path(__file__).parents[2]


def commit_hash() -> str:
    """Of this working tree, with a + where it was changed; "unknown" outside a repository."""
    said = subprocess.run(
        ["git", "describe", "--always", "--abbrev=10", "--exclude=*", "--dirty=+"],
        cwd=REPOSITORY, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return said.stdout.strip() or "unknown"


def append(path: Path, *, commit: str, options: str, seed: str, kills: int, result: str) -> None:
    text = path.read_text() if path.exists() else ""
    if HEAD not in text:
        text += ("\n" if text else "") + HEAD
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    path.write_text(f"{text}| {date} | {commit} | `{options}` | {seed} | {kills} | {result} |\n")
