"""Time, randomness, threads and the disk come in through constructors: no module below the top reaches for its own."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from tests.test_layers import PACKAGE, layer_of, modules, name_of

TOP = {"__main__", "cli", "control", "daemon", "environment", "kernel", "torch"}
"""What makes the clocks, generators, threads and disks, or runs in a process without a filesystem."""
BANNED_MODULES = {"secrets", "uuid", "threading", "concurrent", "tempfile"}
BANNED_CALLS = {
    "time": {"time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "sleep", "clock_gettime_ns"},
    "random": {"random", "randbytes", "getrandbits", "choice", "uniform", "Random", "SystemRandom"},
    "os": {"urandom", "fsync", "fdatasync", "statvfs"},
    "trio.to_thread": {"run_sync"},
}
BANNED_NAMES = {"hash"}
EXEMPT: dict[str, set[str]] = {
    # Only its locks: calls come from worker threads, but it starts none. In one thread they never wait.
    "blockcache/cache_directory.py": {"threading"},
    # A store directory on this machine stands for the server behind it: it is outside the node.
    "store/local/list_pages.py": {"threading"},
    "store/local/tree.py": {"os.fsync", "threading"},
    # A lock that the worker threads of a store share: below the transport, which a simulation replaces.
    "store/rate_limit.py": {"threading"},
}


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


@cache
def found_in(path: Path) -> frozenset[str]:
    found = set()
    nodes = list(ast.walk(ast.parse(path.read_text(), str(path))))
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] in BANNED_MODULES}
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in BANNED_MODULES:
                found.add(node.module)
            found |= {f"{node.module}.{a.name}" for a in node.names if a.name in BANNED_CALLS.get(node.module, ())}
        elif isinstance(node, ast.Attribute) and node.attr in BANNED_CALLS.get(dotted(node.value), ()):
            found.add(dotted(node))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BANNED_NAMES:
            found.add(node.func.id)
    annotations = {"random.Random"} if not _makes_generator(nodes) else set()
    return frozenset(found - annotations)


def _makes_generator(nodes: list[ast.AST]) -> bool:
    """`random.Random` is a type in annotations, and a call where a generator is made."""
    calls = (node.func for node in nodes if isinstance(node, ast.Call))
    return any(dotted(call) == "random.Random" for call in calls)


def test_module_reaches_for_nothing_of_its_own() -> None:
    below = [path for path in modules() if layer_of(path) not in TOP]
    reached = {name_of(path): found_in(path) - EXEMPT.get(name_of(path), set()) for path in below}
    assert {name: found for name, found in reached.items() if found} == {}


def test_exemptions_are_needed() -> None:
    for name, exempt in EXEMPT.items():
        assert exempt <= found_in(PACKAGE / name), name
