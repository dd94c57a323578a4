"""What a writer knows of its names: the model that a mount is compared with.

A `Tree` maps paths (relative to the lake) to `Node`s and is never changed in place, so that the tree before an
operation and the one after it are both at hand when the daemon dies in between.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path

from scripts.crash.content import Damaged, Ids, parse


class Kind(Enum):
    FILE = "file"
    DIRECTORY = "directory"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Node:
    """``content`` of a file is None where no version of it was ever closed: a crash takes its name away. ``mode`` and
    ``mtime_ns`` are None where nothing is promised of them."""

    kind: Kind
    content: Ids | None = None
    target: str = ""
    mode: int | None = None
    mtime_ns: int | None = None
    damage: str = ""

    def fits(self, seen: Node) -> bool:
        """What was seen may be this."""
        return (
            self.kind is seen.kind
            and not seen.damage
            and (self.kind is not Kind.FILE or self.content == seen.content)
            and self.target == seen.target
            and self.mode in (None, seen.mode)
            and self.mtime_ns in (None, seen.mtime_ns)
        )

    def __str__(self) -> str:
        said = [self.kind.value, *([self.target] if self.target else []), self.damage]
        if self.kind is Kind.FILE:
            said.append(str(list(self.content)) if self.content is not None else "never closed")
        said += [f"mode {self.mode:o}"] if self.mode is not None else []
        said += [f"mtime {self.mtime_ns}"] if self.mtime_ns is not None else []
        return " ".join(word for word in said if word)


Tree = Mapping[str, Node]


def put(tree: Tree, path: str, node: Node) -> Tree:
    return {**tree, path: node}


def remove(tree: Tree, path: str) -> Tree:
    return {at: node for at, node in tree.items() if at != path}


def move(tree: Tree, old: str, new: str) -> Tree:
    """A rename of a file or of a directory with all that is below."""
    moved = {}
    for path, node in tree.items():
        if path == old or path.startswith(old + "/"):
            moved[new + path[len(old) :]] = node
        elif path != new:
            moved.setdefault(path, node)
    return moved


def below(tree: Tree, directory: str) -> list[str]:
    """Paths in a directory and in those below it."""
    return [path for path in tree if path.startswith(directory + "/")]


def survivors(tree: Tree) -> Tree:
    """What a crash leaves."""
    return {path: node for path, node in tree.items() if node.kind is not Kind.FILE or node.content is not None}


def settled(tree: Tree, path: str, content: Ids) -> Tree:
    """The file was closed or synced with this content."""
    return put(tree, path, replace(tree[path], content=content, mtime_ns=None))


def differences(expected: Tree, seen: Tree) -> list[tuple[str, str]]:
    """Paths that are not as expected, each with what is wrong."""
    wrong = []
    for path in sorted(set(expected) | set(seen)):
        if path not in seen:
            wrong.append((path, f"is gone; expected {expected[path]}"))
        elif path not in expected:
            wrong.append((path, f"is there: {seen[path]}; expected nothing"))
        elif not expected[path].fits(seen[path]):
            wrong.append((path, f"is {seen[path]}; expected {expected[path]}"))
    return wrong


def look(root: Path, path: str, *, at_rest: bool = True) -> Node:
    """One name as the mount shows it; the whole file is read. Not ``at_rest``, it may become another file meanwhile.
    Raises OSError."""
    at = root / path
    found = at.lstat()
    if stat.S_ISLNK(found.st_mode):
        return Node(Kind.LINK, target=os.readlink(at))
    mode = stat.S_IMODE(found.st_mode)
    if stat.S_ISDIR(found.st_mode):
        return Node(Kind.DIRECTORY, mode=mode)
    data = at.read_bytes()
    if at_rest and len(data) != found.st_size:
        return Node(Kind.FILE, damage=f"has {len(data)} bytes where stat says {found.st_size}")
    try:
        return Node(Kind.FILE, parse(data), mode=mode, mtime_ns=found.st_mtime_ns)
    except Damaged as error:
        return Node(Kind.FILE, damage=str(error))


def walk(root: Path, tops: Iterable[str]) -> Tree:
    """Everything at these paths (where they exist) and below, as the mount shows it. A name that is listed and cannot
    be read is a damaged one."""
    found: dict[str, Node] = {}
    pending = [top for top in tops if os.path.lexists(root / top)]
    while pending:
        path = pending.pop()
        try:
            node = look(root, path)
            if node.kind is Kind.DIRECTORY:
                pending += [f"{path}/{name}" for name in os.listdir(root / path)]
        except OSError as error:
            node = Node(Kind.FILE, damage=f"cannot be read: {error}")
        found[path] = node
    return found
