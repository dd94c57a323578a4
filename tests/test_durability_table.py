"""docs/internals/durability.md names real tests and failpoints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from lakefs_fuse.environment.failpoints import NAMES

TESTS = Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "internals" / "durability.md").read_text()


def functions(path: Path) -> set[str]:
    return {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_durability_table_names_tests_that_exist() -> None:
    named = re.findall(r"`([a-z_]+/test_[a-z_0-9]+\.py)::(test_\w+)`", PAGE)
    assert len(named) > 50
    known = {path: functions(TESTS / path) for path in {path for path, _ in named}}
    assert [f"{path}::{name}" for path, name in named if name not in known[path]] == []


def test_durability_table_has_every_failpoint() -> None:
    assert [name for name in NAMES if f"`{name}`" not in PAGE] == []
