"""The rows that the next READDIR will want, read while the kernel takes in the last answer.

A large directory is read front to back, and reading rows takes two thirds of what an answer takes. One set of rows is
kept at most, and thrown away unless it is asked for before anything at all changes in the database. Trio thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import trio

from lakefs_fuse.meta.tree import Tree

ROWS_MIN, ROWS_MAX = 500, 8192
"""Less is not worth a task; more than a request of 1 MiB can want."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Ahead:
    tree: Tree
    inode: int
    after: int
    changes: int
    prefix: bytes
    rows: list[tuple[bytes, bytes]]


class RowsAhead:
    """See the module's head."""

    def __init__(self) -> None:
        self._ahead: _Ahead | None = None
        self.used = 0
        """Times that rows were there when they were wanted."""

    def take(self, tree: Tree, inode: int, after: int) -> tuple[bytes, Iterator[tuple[bytes, bytes]]]:
        """As `Tree.rows`; perhaps not all of them."""
        ahead, self._ahead = self._ahead, None
        if ahead is None or (ahead.inode, ahead.after) != (inode, after) or ahead.tree is not tree:
            return tree.rows(inode, after)
        if ahead.changes != tree.changes:
            return tree.rows(inode, after)
        self.used += 1
        return ahead.prefix, iter(ahead.rows)

    def begin(self, tree: Tree, inode: int, after: int, count: int) -> None:
        """An answer of ``count`` entries ends with the cookie ``after``: read on as soon as it is sent."""
        if count >= ROWS_MIN:
            trio.lowlevel.spawn_system_task(self._read, tree, inode, after, min(count + count // 8, ROWS_MAX))

    async def _read(self, tree: Tree, inode: int, after: int, count: int) -> None:
        try:
            changes = tree.changes
            prefix, rows = tree.rows(inode, after)
            self._ahead = _Ahead(tree, inode, after, changes, prefix, list(islice(rows, count)))
        except Exception as error:  # the READDIR itself will say so
            log.info("rows of inode %d were not read ahead: %s", inode, error)
