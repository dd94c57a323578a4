"""The folder is the architecture: who may import whom, who alone may import a library, and how big a module may get."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "lakefs_fuse"

FOUNDATION = frozenset({"lakefs_fuse", "_version", "errors", "config", "checks", "metrics", "product", "quantity"})
"""What every layer may use. Among themselves: config uses errors and product."""

MAY_IMPORT: dict[str, frozenset[str]] = {
    "_version": frozenset(),
    "lakefs_fuse": frozenset({"_version"}),
    "errors": frozenset(),
    "checks": frozenset(),
    "product": frozenset(),
    "metrics": frozenset(),
    "quantity": frozenset(),
    "config": frozenset({"errors", "product"}),
    "environment": frozenset({"errors", "product"}),
    "sync": frozenset({"errors"}),
    "path_rules": frozenset({"errors", "config"}),
    "checkpoints": FOUNDATION,
    "store": FOUNDATION | {"environment", "sync"},
    "meta": FOUNDATION | {"environment"},
    "blockcache": FOUNDATION | {"environment", "sync", "store"},
    "staging": FOUNDATION | {"environment", "store"},
    "upload": FOUNDATION | {"environment", "sync", "store", "blockcache", "staging"},
    "commits": FOUNDATION | {"environment", "sync", "store", "meta"},
    "ingest": FOUNDATION | {"environment", "store", "commits"},
    "vfs": FOUNDATION
    | {
        "environment",
        "sync",
        "path_rules",
        "checkpoints",
        "store",
        "meta",
        "blockcache",
        "staging",
        "upload",
        "commits",
    },
    "kernel": FOUNDATION | {"meta", "vfs"},
    "control": FOUNDATION,
    "cli": FOUNDATION | {"path_rules", "checkpoints", "control"},
    "torch": FOUNDATION | {"control"},
    "__main__": frozenset({"cli"}),
    "admin": FOUNDATION
    | {
        "environment",
        "sync",
        "checkpoints",
        "store",
        "meta",
        "blockcache",
        "staging",
        "upload",
        "commits",
        "vfs",
        "control",
    },
    "daemon": FOUNDATION | {"environment", "store", "ingest", "vfs", "kernel", "control", "admin"},
}
"""By first component of the module. `kernel` takes entries of `meta` as `vfs` hands them out; `control` is given a view
of the filesystem; `daemon` puts the layers together."""

ONLY_IN = {
    "pyfuse3": "kernel",
    "boto3": "store",
    "botocore": "store",
    "obstore": "store",
    "urllib3": "store",
    "rocksdict": "meta",
    "redis": "environment",
    "click": "cli",
    "rich": "cli",
}

BANNED_NAMES = {"utils", "util", "helpers", "helper", "common", "base", "misc"}

MODULE_LINES_MAX = 1000
FUNCTION_LINES_MAX = 60


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def layer_of(path: Path) -> str:
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "lakefs_fuse" if first == "__init__" else first


@dataclass(frozen=True)
class Source:
    """What the tests ask of a module. Its tree is not kept: each collection of garbage would visit all its nodes."""

    docstring: str | None
    imports: tuple[str, ...]
    """Dotted names of everything imported, wherever in the module; `from a import b` counts as a.b."""
    classes: tuple[str, ...]
    function_lines: tuple[tuple[str, int], ...]
    strings: tuple[str, ...]
    """In code: expressions that are a string alone, as docstrings are, do not count."""


@cache
def source_of(path: Path) -> Source:
    tree = ast.parse(path.read_text(), str(path))
    found: list[str] = []
    classes: list[str] = []
    function_lines: list[tuple[str, int]] = []
    strings: dict[int, str] = {}
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}: relative import"
            found += (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ClassDef):
            classes.append(node.name)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            function_lines.append((node.name, node.end_lineno - node.lineno + 1))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            strings[id(node)] = node.value
    texts = tuple(text for key, text in strings.items() if key not in docstrings)
    return Source(ast.get_docstring(tree), tuple(found), tuple(classes), tuple(function_lines), texts)


def imported_layer(name: str) -> str | None:
    """The layer of ours that an imported name belongs to."""
    parts = name.split(".")
    if parts[0] != "lakefs_fuse":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "lakefs_fuse"


def test_there_is_something_to_look_at() -> None:
    layers = {layer_of(path) for path in modules()}
    assert {"cli", "control", "vfs", "blockcache", "meta", "store"} <= layers


def test_dependencies_point_down() -> None:
    wrong = {}
    for path in modules():
        layer = layer_of(path)
        assert layer in MAY_IMPORT, f"{layer} is not in the table of layers"
        used = {found for name in source_of(path).imports if (found := imported_layer(name)) is not None}
        wrong[name_of(path)] = used - {layer} - MAY_IMPORT[layer]
    assert {name: layers for name, layers in wrong.items() if layers} == {}


def test_the_table_has_no_cycle() -> None:
    order: list[str] = []
    left = dict(MAY_IMPORT)
    while left:
        ready = [layer for layer, below in left.items() if below <= set(order)]
        assert ready, f"a cycle among {sorted(left)}"
        order += ready
        for layer in ready:
            del left[layer]
    assert len(order) == len(MAY_IMPORT)


def test_parts_of_the_c_library_use_those_below_them() -> None:
    """native.h declares what each part gives to others, the lowest part first."""
    native = PACKAGE / "kernel" / "native"
    sections = re.split(r"/\* -- (\w+\.c) \*/", (native / "native.h").read_text())[1:]
    given = dict(zip(sections[::2], map(shared_names_in, sections[1::2]), strict=True))
    floors = {part: floor for floor, part in enumerate(given)}
    assert len(floors) >= 6 and all(given.values())
    upwards = [
        (path.name, name)
        for path in native.glob("*.c")
        for part, names in given.items()
        for name in shared_names_in(path.read_text()) & names
        if floors[part] > floors.get(path.name, len(floors))
    ]
    assert not upwards


def shared_names_in(text: str) -> set[str]:
    without_comments = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return set(re.findall(r"\blakefs_\w+", without_comments))


def test_libraries_stay_in_their_layer() -> None:
    for path in modules():
        for name in source_of(path).imports:
            owner = ONLY_IN.get(name.split(".")[0])
            assert owner in (None, layer_of(path)), f"{name_of(path)}: only {owner} may import {name}"


def test_modules_are_small_and_say_what_they_are_for() -> None:
    for path in modules():
        name, source = name_of(path), source_of(path)
        assert path.stem not in BANNED_NAMES, name
        lines = len(path.read_text().splitlines())
        assert lines <= MODULE_LINES_MAX, f"{name} has {lines} lines"
        assert source.docstring, f"{name}: a module opens with what it is for"
        for class_name in source.classes:
            assert not class_name.endswith("Manager"), f"{name}: {class_name}"
        for function, lines in source.function_lines:
            assert lines <= FUNCTION_LINES_MAX, f"{name}: {function} has {lines} lines"


NEVER_LOADED = {"boto3", "botocore", "obstore", "urllib3", "rocksdict", "pyfuse3", "trio"}
"""Store clients, RocksDB, libfuse, and the loop that runs them."""


@pytest.mark.parametrize("started", ["daemon.supervisor", "cli"])
def test_processes_around_the_daemon_load_no_filesystem(started: str) -> None:
    """The supervisor lives as long as the mount, and must cost no memory and not die of what kills a daemon."""
    if started == "cli":
        names = [f"lakefs_fuse.cli.{path.stem}" for path in modules() if layer_of(path) == "cli"]
    else:
        names = [f"lakefs_fuse.{started}"]
    program = f"import sys, {', '.join(name.removesuffix('.__init__') for name in names)}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert f"lakefs_fuse.{started}" in loaded
    assert loaded.isdisjoint(NEVER_LOADED)
    layers = {name.split(".")[1] for name in loaded if name.startswith("lakefs_fuse.")}
    own = {"cli"} if started == "cli" else {"daemon", "environment"}
    assert layers <= MAY_IMPORT["cli"] | own


PRODUCT_NAMES = re.compile(r"\.lakefs|user\.lakefs|LAKEFS_|(?<!.)lakefs-fuse(?!.)|(?<!.)lakefs-(?!.)")


def product_names_in(path: Path) -> list[str]:
    """Product names in code: docstrings and sentences (strings with a space) may spell them."""
    return [text for text in source_of(path).strings if not re.search(r"\s", text) and PRODUCT_NAMES.search(text)]


def test_names_of_the_product_are_spelled_in_one_module() -> None:
    spelled = {name_of(path): product_names_in(path) for path in modules() if path.stem != "product"}
    assert {name: found for name, found in spelled.items() if found} == {}


def test_the_command_line_starts_without_the_filesystem() -> None:
    """What `cli` pulls in, directly or not, is none of the layers that load RocksDB or libfuse."""
    seen: set[str] = set()
    queue = ["cli"]
    while queue:
        layer = queue.pop()
        seen.add(layer)
        paths = (path for path in modules() if layer_of(path) == layer)
        used = {imported_layer(name) for path in paths for name in source_of(path).imports}
        queue += [found for found in used if found is not None and found not in seen]
    assert seen.isdisjoint(
        {"vfs", "kernel", "blockcache", "staging", "upload", "meta", "store", "commits", "ingest", "admin", "daemon"}
    )


def named_in_documents() -> Iterator[tuple[str, str]]:
    """Documents, and the source files that they name in backticks with a folder."""
    root = PACKAGE.parent
    for document in [root / "README.md", *sorted((root / "docs").rglob("*.md"))]:
        for named in re.findall(r"`((?:[\w-]+/)+[\w-]+\.(?:py|c|h))`", document.read_text()):
            yield str(document.relative_to(root)), named


def test_documents_name_source_files_that_exist() -> None:
    named = list(named_in_documents())
    assert len(named) > 50
    roots = (PACKAGE.parent, PACKAGE)
    assert [pair for pair in named if not any((root / pair[1]).exists() for root in roots)] == []


PATCHED_PRIVATE = {
    "vfs/test_create.py": {"_unlink"},
    "vfs/test_late_attributes.py": {"_record"},
    "vfs/test_replay_exact.py": {"_drop_acknowledged"},
}
"""Private names that tests replace, for want of a public way; SLF001 sees those in code. Only ever fewer."""


def test_tests_replace_public_names_only() -> None:
    tests, found = Path(__file__).parent, {}
    for path in tests.rglob("*.py"):
        text = path.read_text()
        if "setattr" not in text or not re.search("[\"']_", text):  # such a call is written with both
            continue
        nodes = ast.walk(ast.parse(text, str(path)))
        calls = (node for node in nodes if isinstance(node, ast.Call) and len(node.args) > 1)
        names = (call.args[1] for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "setattr")
        private = {str(name.value) for name in names if isinstance(name, ast.Constant) and str(name.value)[0] == "_"}
        if private:
            found[str(path.relative_to(tests))] = private
    assert found == PATCHED_PRIVATE
