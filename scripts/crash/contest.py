"""Names that the writers of several nodes change at the same time, and what may be left of them.

Who was last is known of the changes of one node only. So a name must be whole and have what some node was the last
of its own to make of it: never a mixture, never what the same node has replaced, never an entry that cannot be read.
``shared/hot-*`` are written, replaced and removed; a rename takes them to ``shared/moved-*``, with whatever they are at
that moment. One writer of each node takes part.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.crash.content import Ids
from scripts.crash.tree import Kind, Node, look

HOT, MOVED = "shared/hot-", "shared/moved-"
CONFLICT = ".conflict-"
UNREADABLE = frozenset({errno.ENOENT, errno.ESTALE, errno.EIO})
"""What reading a name answers whose bytes another node has replaced in place."""


@dataclass(slots=True)
class Change:
    """What one node made of a name. ``content`` is None where it took the name away; ``source`` is the name whose
    content, whatever it was, came here. Uncertain while nobody knows whether it happened."""

    node: int
    name: str
    content: Ids | None
    source: str = ""
    is_certain: bool = False


def is_contested(path: str) -> bool:
    return path.startswith((HOT, MOVED))


@dataclass(frozen=True, slots=True)
class Contest:
    """All changes of contested names so far, of each node in their order."""

    changes: Sequence[Change]

    def wrong(self, path: str, node: Node) -> str:
        """Why an entry can be none that anybody made, or empty."""
        if node.damage or node.kind is not Kind.FILE:
            return f"is {node}"
        name = path.partition(CONFLICT)[0]
        names = {name, name.replace(MOVED, HOT)}
        if not any(each.name in names and each.content == node.content for each in self.changes):
            return f"is {node}, which nobody made"
        return ""

    def wrong_at_end(self, name: str, node: Node | None) -> str:
        """Why what a name is (None: it is not there) cannot be the last that some node made of it, or empty."""
        last = [change for node in {each.node for each in self.changes} for change in self._last(name, node)]
        if node is None:
            gone = any(each.content is None and not each.source for each in last)
            fine = gone or not any(each.is_certain for each in last) or self._may_be_deleted(name)
        else:
            fine = any(each.content == node.content for each in last if each.content is not None)
            fine = fine or any(each.source and not self.wrong(each.source, node) for each in last)
        if fine:
            return ""
        said = "\n".join(f"      {each}" for each in self.changes if each.name == name)
        return f"is {node or 'not there'}; the last changes of each node are {last} of\n{said}"

    def _last(self, name: str, node: int) -> Iterator[Change]:
        """The last that is certain, and those after it that may have happened."""
        for change in reversed([each for each in self.changes if (each.name, each.node) == (name, node)]):
            yield change
            if change.is_certain:
                return

    def _may_be_deleted(self, name: str) -> bool:
        """A rename gave it an object that another node deletes, or replaces, not knowing of that."""
        nodes = {each.node for each in self.changes if each.name in (name, name.replace(MOVED, HOT))}
        return name.startswith(MOVED) and len(nodes) > 1

    def compare(self, root: Path, *, strict: bool, allow_unreadable: bool) -> tuple[list[str], int]:
        """What is wrong with the names as a mount shows them, and how many cannot be read, where that is allowed."""
        wrong, unreadable = [], 0
        names = [f"shared/{name}" for name in os.listdir(root / "shared") if is_contested(f"shared/{name}")]
        seen: dict[str, Node | None] = dict.fromkeys(self._names())
        for name in names:
            try:
                seen[name] = look(root, name)
            except OSError as error:
                if allow_unreadable and error.errno in UNREADABLE:
                    unreadable += 1
                    seen.pop(name, None)
                else:
                    wrong.append(f"{name} is listed, and cannot be read: {error}")
        for name, node in seen.items():
            what = self.wrong(name, node) if node is not None else ""
            if not what and strict and CONFLICT not in name:
                what = self.wrong_at_end(name, node)
            if what:
                wrong.append(f"{name} {what}")
        return wrong, unreadable

    def _names(self) -> list[str]:
        return sorted({each.name for each in self.changes})


def wait_right(contest: Contest, root: Path, seconds_max: float, *, strict: bool, allow_unreadable: bool
               ) -> tuple[list[str], int]:  # fmt: skip
    """As `compare`, when it is right or the time is over: other nodes are still storing what was acknowledged."""
    deadline = time.monotonic() + seconds_max
    while True:
        wrong, unreadable = contest.compare(root, strict=strict, allow_unreadable=allow_unreadable)
        if not (wrong or unreadable) or time.monotonic() > deadline:
            return wrong, unreadable
        time.sleep(0.2)
