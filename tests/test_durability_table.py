"""docs/internals/durability.md names real tests and failpoints."""

from __future__ import annotations

import re
from pathlib import Path

from lakefs_fuse.environment.failpoints import NAMES

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "internals" / "durability.md").read_text()
FUNCTION = re.compile(r"^ *(?:async )?def (\w+)", re.MULTILINE)
"""The first line of a function."""


def functions(path: Path) -> set[str]:
    return set(FUNCTION.findall(path.read_text()))


def test_durability_table_names_tests_that_exist() -> None:
    named = re.findall(r"`([a-z_]+/test_[a-z_0-9]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 50
    known = {path: functions(TESTS / path) for path in {path for path, _ in named}}
    assert [f"{path}::{name}" for path, name in named if name not in known[path]] == []


def test_durability_table_has_every_failpoint() -> None:
    assert [name for name in NAMES if f"`{name}`" not in PAGE] == []
