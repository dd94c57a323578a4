"""Which name, how long: what a writer's next change is about. Answers only, and draws from the writer's randomness.

Names come from a small pool, so that they are used again soon after they were deleted or renamed away.
"""

from __future__ import annotations

from scripts.crash.content import KIB, MIB, SEGMENT_BYTES_MIN
from scripts.crash.tree import Kind
from scripts.crash.writer import Writer

NAMES = 24
RESERVED = ("turns", "ckpt-", ".")


def is_reserved(path: str) -> bool:
    return any(part.startswith(RESERVED) for part in path.split("/"))


def files(w: Writer) -> list[str]:
    """Files that were closed once and are not open now."""
    held = {file.path for file in w.open}
    return [
        path
        for path, node in w.tree.items()
        if node.kind is Kind.FILE and node.content is not None and path not in held and not is_reserved(path)
    ]


def directories(w: Writer) -> list[str]:
    return [path for path, node in w.tree.items() if node.kind is Kind.DIRECTORY and not is_reserved(path)]


def new_name(w: Writer, prefix: str) -> str:
    """A path that nothing has; in the writer's own directories or, for files, in the shared one."""
    while True:
        number = w.random.randrange(NAMES * 2)
        if prefix != "d" and w.random.random() < 0.15:
            path = f"shared/{w.top}-{prefix}{number}"
        else:
            path = f"{w.random.choice(directories(w))}/{prefix}{number}"
        if path not in w.tree:
            return path


def pick(w: Writer, paths: list[str]) -> str:
    return w.random.choice(paths) if paths else ""


def length(w: Writer) -> int:
    kind = w.random.random()
    if kind < 0.5:
        return w.random.randint(SEGMENT_BYTES_MIN, 8 * KIB)
    if kind < 0.97:
        return w.random.randint(8 * KIB, 300 * KIB)
    return w.random.randint(300 * KIB, 3 * MIB)


def big_files(w: Writer) -> int:
    return sum(sum(w.lengths[each] for each in node.content or ()) > 16 * MIB for node in w.tree.values())
