"""What is not the same in two versions: names, bytes and attributes, from their rows.

Two files with one path have the same bytes if they name the same bytes of one object; if they are copies of objects
with one ETag and size; or if the same commit gave both names their bytes, which moved from pack to pack since. Where
none of this tells, because a plain object was packed between the two versions, size and mtime decide, or the bytes do.

Rows are read in the order of names, a directory after the other, so memory holds some of them and the numbers of
directories. Tasks of one trio loop; nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import trio
from msgspec import structs

from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.config import MIB
from lakefs_fuse.control.worker_protocol import ChangeTotals, FileChange
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.vfs.namespace.key_mapping import extent_of

NAMES_PER_STEP = 512
WINDOW_BYTES = 8 * MIB
"""Bytes of each of two files that are compared in one go."""
COMMITTED_MIN = 2
"""Times of commits are at least this; 0 is no commit, 1 a relocated plain object."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A name in both versions, or in one."""

    path: str
    before: Entry | None
    after: Entry | None


class Comparison:
    """Compares two versions; ``reads`` bytes where rows do not tell."""

    def __init__(
        self, client: StoreClient, before: Tree, after: Tree, show: Callable[[FileChange], None], *, reads: bool
    ) -> None:
        self._client, self._before, self._after, self._show, self._reads = client, before, after, show, reads
        self.totals = ChangeTotals()

    async def run(self) -> ChangeTotals:
        """Show each difference, and return their numbers. Raises LakeError where bytes are read, and the store lacks
        them or does not answer."""
        for number, pair in enumerate(self._pairs(), 1):
            change = await self._find_change(pair)
            self._count(pair, change)
            if change:
                self._show(_describe(pair, change))
            if number % NAMES_PER_STEP == 0:
                await trio.lowlevel.checkpoint()
        return self.totals

    def _count(self, pair: Pair, change: str) -> None:
        is_new = change in ("added", "changed") and pair.after is not None and not pair.after.is_dir
        key = change or "same"
        self.totals = structs.replace(
            self.totals,
            **{key: getattr(self.totals, key) + 1},
            bytes_new=self.totals.bytes_new + (pair.after.size if is_new and pair.after is not None else 0),
        )

    def _pairs(self) -> Iterator[Pair]:
        """Names of one directory after the other; 0 stands for one that a version has not."""
        pending = [(ROOT_INODE, ROOT_INODE, "")]
        while pending:
            before, after, prefix = pending.pop()
            below = []
            for one, other in _merge(self._before, before, self._after, after):
                entry = other or one
                assert entry is not None, "a pair has an entry"
                path = prefix + entry.sort_name.decode("utf-8", "surrogatepass")
                yield Pair(path, one, other)
                if entry.is_dir:
                    below.append((one.inode if one else 0, other.inode if other else 0, path))
            pending += reversed(below)

    async def _find_change(self, pair: Pair) -> str:
        """Kind of a difference, as `FileChange` has it; empty for none."""
        before, after = pair.before, pair.after
        if before is None or after is None:
            return "added" if before is None else "removed"
        if not before.is_dir and not await self._is_same(before, after):
            return "changed"
        is_kept = _attributes(before) == _attributes(after) and self._xattrs(before, after)
        return "" if is_kept else "attributes"

    def _xattrs(self, before: Entry, after: Entry) -> bool:
        if not (before.flags | after.flags) & Flag.XATTRS:
            return True
        return self._before.xattrs(before.inode) == self._after.xattrs(after.inode)

    async def _is_same(self, before: Entry, after: Entry) -> bool:
        if before.is_symlink or after.is_symlink:
            both = before.is_symlink and after.is_symlink
            return both and self._before.target(before.inode) == self._after.target(after.inode)
        if before.size != after.size:
            return False
        one, other = extent_of(self._before, before), extent_of(self._after, after)
        if one is None or other is None or one == other or not before.size:
            return True
        if before.etag and after.etag:
            return before.etag == after.etag
        if not before.etag and not after.etag and min(before.stamp, after.stamp) >= COMMITTED_MIN:
            return before.stamp == after.stamp
        return await self._has_same_bytes(one, other) if self._reads else before.mtime_ns == after.mtime_ns

    async def _has_same_bytes(self, one: Extent, other: Extent) -> bool:
        for at in range(0, one.size, WINDOW_BYTES):
            end = min(one.size, at + WINDOW_BYTES)
            if await self._fetch(one, at, end) != await self._fetch(other, at, end):
                return False
        return True

    async def _fetch(self, extent: Extent, start: int, end: int) -> bytes:
        version = extent.version
        fetched = await self._client.get(version.key, extent.offset + start, extent.offset + end, etag=version.etag)
        return bytes(fetched.data)


def _merge(
    before: Tree, before_directory: int, after: Tree, after_directory: int
) -> Iterator[tuple[Entry | None, Entry | None]]:
    """Names of two directories side by side, in order; 0 is a directory without names."""
    ones = before.children_by_name(before_directory) if before_directory else iter(())
    others = after.children_by_name(after_directory) if after_directory else iter(())
    one, other = next(ones, None), next(others, None)
    while one is not None or other is not None:
        if other is None or (one is not None and one.sort_name < other.sort_name):
            yield one, None
            one = next(ones, None)
        elif one is None or other.sort_name < one.sort_name:
            yield None, other
            other = next(others, None)
        else:
            yield one, other
            one, other = next(ones, None), next(others, None)


def _attributes(entry: Entry) -> tuple[int, ...]:
    mtime_ns = 0 if entry.is_dir else entry.mtime_ns  # that of a directory is of what is in it
    return entry.mode, entry.uid, entry.gid, mtime_ns


def _describe(pair: Pair, change: str) -> FileChange:
    def size(entry: Entry | None) -> int | None:
        return None if entry is None or entry.is_dir else entry.size

    path = pair.path.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    return FileChange(change=change, path=path, size_before=size(pair.before), size=size(pair.after))
