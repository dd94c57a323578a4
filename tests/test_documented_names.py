"""Names of the source in documents exist, and the glossary can be searched by eye.

A name in backticks counts as one of ours if it is `Class.member`, `module.name` of a module of ours, a class in
CamelCase, or a function or attribute with an underscore. Failpoints, and names of other software, are none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lakefs_fuse.environment.failpoints import NAMES as FAILPOINTS

ROOT = Path(__file__).parent.parent
DOCUMENTS = "docs/architecture.md", "docs/internals/durability.md", "docs/format.md"
LIBRARIES = frozenset({"torch"})
"""Packages of others that have the name of a module of ours."""
FOREIGN = frozenset({"SstFileWriter"})
"""Names of RocksDB."""
FOREIGN_PREFIX = "fuse_"
"""What all functions of libfuse begin with."""
DOTTED = re.compile(r"_?[A-Za-z]\w*(\.[A-Za-z_]\w*)+")
CLASS = re.compile(r"_?[A-Z][a-z0-9]+([A-Z][a-z0-9]+)+")
CLASS_NAME = re.compile(r"_?[A-Z]\w*[a-z]")
FUNCTION = re.compile(r"_?[a-z]+(_[a-z0-9]+)+")
SUFFIXES = frozenset({"c", "h", "json", "md", "py", "toml"})


@dataclass
class Source:
    """Every name that Python files below a directory define or use."""

    modules: dict[str, set[str]] = field(default_factory=dict)
    members: dict[str, set[str]] = field(default_factory=dict)
    bases: dict[str, set[str]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def add(self, stem: str, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        defined = set(_defined(nodes))
        self.modules.setdefault(stem, set()).update(defined)
        self.names.update(defined)
        for node in nodes:
            if isinstance(node, ast.arg):
                self.names.add(node.arg)
            elif isinstance(node, ast.Attribute):
                self.names.add(node.attr)
            elif isinstance(node, ast.ClassDef):
                self.members.setdefault(node.name, set()).update(_defined(ast.walk(node)))
                self.bases.setdefault(node.name, set()).update(b.id for b in node.bases if isinstance(b, ast.Name))

    def has_member(self, owner: str, name: str) -> bool:
        return name in self.members.get(owner, ()) or any(
            self.has_member(base, name) for base in self.bases.get(owner, ())
        )

    def has(self, name: str) -> bool:
        """Return whether a name exists, or is none of ours."""
        if DOTTED.fullmatch(name):
            return self._has_dotted(*name.split("."))
        if CLASS.fullmatch(name):
            return name in self.members or name in FOREIGN
        return not FUNCTION.fullmatch(name) or name in self.names or name.startswith(FOREIGN_PREFIX)

    def _has_dotted(self, first: str, second: str, *rest: str) -> bool:
        if f"{first}.{second}" in FAILPOINTS or (rest or (second,))[-1] in SUFFIXES or first in LIBRARIES:
            return True
        if CLASS_NAME.match(first):
            return self.has_member(first, second)
        if first not in self.modules:
            return True
        return second in self.modules[first] and (not rest or self.has_member(second, rest[0]))


def _defined(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


@pytest.fixture(scope="module")
def source() -> Source:
    found = Source()
    for path in sorted((ROOT / "lakefs_fuse").rglob("*.py")):
        found.add(path.parent.name if path.stem == "__init__" else path.stem, ast.parse(path.read_text()))
    return found


@pytest.mark.parametrize("document", DOCUMENTS)
def test_document_names_what_is_in_the_source(source: Source, document: str) -> None:
    named = {name.removesuffix("()") for name in re.findall(r"`([^`\n]+)`", (ROOT / document).read_text())}
    assert len(named) > 50
    assert sorted(name for name in named if not source.has(name)) == []


@pytest.mark.parametrize(
    "name",
    ["Namespace.lookup", "Committer.commit", "committer.Committer.commit", "staging_area.Staging", "add_listing",
     "CommitLog", "publish.sent", "uploader.py", "fuse_reply_open", "torch.save", "lakefs.size", "PUT"],
)  # fmt: skip
def test_name_that_exists_or_is_not_ours_is_accepted(source: Source, name: str) -> None:
    assert source.has(name)


@pytest.mark.parametrize(
    "name",
    ["Namespace.seek", "Nemespace.lookup", "committer.Committer.seek", "committer.Comitter", "add_listings",
     "CommitLogs"],
)  # fmt: skip
def test_name_that_does_not_exist_is_refused(source: Source, name: str) -> None:
    assert not source.has(name)


def test_glossary_is_sorted() -> None:
    rows = [line for line in (ROOT / "docs" / "glossary.md").read_text().splitlines() if line.startswith("| ")]
    terms = [row.split("|")[1].strip().lower() for row in rows[1:]]
    assert terms == sorted(terms)
