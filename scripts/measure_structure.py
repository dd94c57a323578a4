"""What the source of the product looks like from outside: size, import cycles, and who changes whose attributes.

    python scripts/measure_structure.py [--names]

* *statements*: of Python, without docstrings; *C lines*: all lines of C sources and headers.
* *import cycles*: groups of modules each of which imports all others of it, directly or not; imports inside functions
  and for type checking count.
* *attributes assigned from outside*: names of attributes that a class sets of itself, and that other code assigns of an
  object. Fields of dataclasses and of msgspec structures do not count.
* *parameters*: of the constructor that has most, without ``self``.

``--names`` lists what was found. The numbers are for comparing two states of the source.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRODUCT = "lakefs_fuse"
OURSELVES = ("self", "cls")


def modules(root: Path) -> dict[str, ast.Module]:
    """Every module of the product below ``root``, by its name."""
    found = {}
    for path in sorted((root / PRODUCT).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(path.read_text())
    return found


@cache
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a module, in the order of `ast.walk`, which takes most of the time of each measure."""
    return tuple(ast.walk(tree))


def statements(tree: ast.Module) -> int:
    return sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes_of(tree))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def c_lines(root: Path) -> int:
    paths = [path for path in (root / PRODUCT).rglob("*") if path.suffix in (".c", ".h")]
    return sum(len(path.read_text().splitlines()) for path in paths)


def cycles(trees: dict[str, ast.Module]) -> list[list[str]]:
    imports = {name: set(_imported(tree, trees)) & set(trees) for name, tree in trees.items()}
    reached = {name: _reached(name, imports) for name in trees}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in trees}
    return sorted(list(group) for group in groups if len(group) > 1)


def _imported(tree: ast.Module, trees: dict[str, ast.Module]) -> Iterator[str]:
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in trees else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _reached(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    pending = [start]
    while pending:
        new = imports.get(pending.pop(), set()) - found
        found |= new
        pending += new
    return found


def assigned_outside(trees: dict[str, ast.Module]) -> dict[str, list[str]]:
    """Places by the name of the attribute."""
    own: set[str] = set()
    fields: set[str] = set()
    for tree in trees.values():
        for node in nodes_of(tree):
            if isinstance(node, ast.ClassDef):
                (fields if _is_record(node) else own).update(_declared(node))
    found: dict[str, list[str]] = {}
    for name, tree in trees.items():
        for target in _assigned(nodes_of(tree)):
            if target.attr in own - fields and not _is_ourselves(target):
                found.setdefault(target.attr, []).append(f"{name}:{target.lineno} {ast.unparse(target)}")
    return dict(sorted(found.items()))


def _is_record(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) for each in node.decorator_list) or any(
        "Struct" in ast.unparse(each) for each in node.bases
    )


def _declared(node: ast.ClassDef) -> Iterator[str]:
    """Attributes that a class declares, or sets of itself."""
    for each in node.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield each.target.id
    yield from (target.attr for target in _assigned(ast.walk(node)) if _is_ourselves(target))


def _assigned(nodes: Iterable[ast.AST]) -> Iterator[ast.Attribute]:
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def _is_ourselves(target: ast.Attribute) -> bool:
    return isinstance(target.value, ast.Name) and target.value.id in OURSELVES


def widest_constructor(trees: dict[str, ast.Module]) -> tuple[int, str]:
    """Its number of parameters, and its class."""
    nodes = ((name, node) for name, tree in trees.items() for node in nodes_of(tree))
    classes = [(name, node) for name, node in nodes if isinstance(node, ast.ClassDef)]
    return max((_parameters(each), f"{name}.{node.name}") for name, node in classes for each in node.body)


def _parameters(node: ast.stmt) -> int:
    """Of a constructor; 0 for anything else."""
    if not isinstance(node, ast.FunctionDef) or node.name != "__init__":
        return 0
    return len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs) - 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the structure of the source.")
    parser.add_argument("--names", action="store_true", help="list what was found")
    options = parser.parse_args()
    trees = modules(ROOT)
    groups, outside = cycles(trees), assigned_outside(trees)
    count, owner = widest_constructor(trees)
    print(f"{len(trees)} modules, {sum(map(statements, trees.values()))} statements, {c_lines(ROOT)} C lines")
    print(f"{len(groups)} import cycles")
    if options.names:
        print(*(f"  {' '.join(group)}" for group in groups), sep="\n")
    print(f"{len(outside)} attributes assigned from outside, in {sum(map(len, outside.values()))} places")
    if options.names:
        print(*(f"  {name}: {', '.join(places)}" for name, places in outside.items()), sep="\n")
    print(f"{count} parameters at most, of {owner}")


if __name__ == "__main__":
    main()
