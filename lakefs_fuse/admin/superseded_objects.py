"""Superseded plain objects, which commits hide: found in listings, and deleted at the versions found.

An object is superseded if the commits on its key hide its very ETag, no name has bytes in it, and both have held for a
grace period. *Deleted by version*: each DELETE has the ETag as a precondition. Where the store ignores that, a HEAD
precedes the DELETE, and an object that another program puts between the two is deleted as well; a mount puts none,
unless it has missed the commit for the whole grace period.

A crash leaves some of the objects. Tasks of one trio loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lakefs_fuse.admin.lake_view import LakeView
from lakefs_fuse.admin.work import NS
from lakefs_fuse.commits.archive import commit_time
from lakefs_fuse.meta.entry import PENDING, Entry
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.protocol import ObjectMeta


@dataclass(slots=True)
class Swept:
    """``bytes`` is the size of the ``objects`` that were, or would be, deleted; ``young`` were left because their grace
    period ends after ``wait_s`` more seconds at most. ``failed`` could not be deleted, the first because of ``why``."""

    objects: int = 0
    bytes: int = 0
    young: int = 0
    wait_s: float = 0.0
    failed: int = 0
    why: str = ""

    def add(self, objects: int, size: int) -> None:
        """Count objects of ``size`` bytes."""
        self.objects += objects
        self.bytes += size


def hidden_since(lake: LakeView, meta: ObjectMeta, *, removed: bool) -> int | None:
    """Time since which a plain object is superseded; None if it is not. ``removed`` includes removed names."""
    key, tree = meta.key, lake.tree
    if lake.references(key, meta.etag):
        return None
    entry = lake.entry_at(key)
    if entry is not None and (not entry.stamp or entry.stamp >= PENDING or entry.is_plain):
        return None
    if entry is not None and entry.etag == meta.etag:
        return _hidden_by_entry(lake, entry, meta)
    tombstone = tree.tombstones.get(key.encode("utf-8", "surrogatepass"))
    gone = 0 if tombstone is None else tombstone.when_gone(meta.etag)
    if not (removed or entry) or tombstone is None or not 0 < gone < PENDING:
        return None
    if not tombstone.hides(meta.etag, meta.mtime_ns, by_date=False):
        return None
    return max(gone, meta.mtime_ns)


def is_packed(lake: LakeView, meta: ObjectMeta) -> bool:
    """Whether the file of a superseded object has its very bytes in a pack: `pack` moved them there."""
    entry = lake.entry_at(meta.key)
    return entry is not None and entry.etag == meta.etag and lake.is_in_pack(entry)


def _hidden_by_entry(lake: LakeView, entry: Entry, meta: ObjectMeta) -> int:
    since = max(entry.stamp, meta.mtime_ns)
    row = lake.tree.objects.get(entry.place) if entry.place else None
    # A relocated file keeps the time of an older commit; that of its pack is the time of its relocation.
    return since if row is None else max(since, commit_time(row.key))


async def sweep(
    lake: LakeView,
    prefix: str,
    swept: Swept,
    *,
    grace_s: float,
    removed: bool,
    is_due: Callable[[ObjectMeta], bool] = lambda _: True,
    dry_run: bool = False,
    only: str = "",
    only_packed: bool = False,
) -> None:
    """Delete superseded objects whose keys begin with ``prefix`` (``only``: the one with that key; ``only_packed``:
    those that `is_packed`), and count them. ``is_due`` is asked of each of them, and keeps it for a later run by
    answering False.

    Deletes none while a commit cannot be read, because it may refer to them. Raises LakeError."""
    if not await _refresh(lake):
        return
    async for page in lake.client.list_all(prefix):
        doomed: list[ObjectMeta] = []
        for meta in page.objects:
            if meta.key.startswith(RESERVED_PREFIX) or (only and meta.key != only):
                continue
            since = hidden_since(lake, meta, removed=removed)
            if since is None or (only_packed and not is_packed(lake, meta)):
                continue
            left_s, is_known = grace_s - (lake.clock.wall_ns() - since) / NS, is_due(meta)
            if grace_s and left_s > 0:
                swept.young += 1
                swept.wait_s = max(swept.wait_s, left_s)
            elif is_known:
                doomed.append(meta)
        if doomed:
            if not await _refresh(lake):  # the listing before took time
                return
            doomed = [meta for meta in doomed if hidden_since(lake, meta, removed=removed) is not None]
        await delete(lake, doomed, swept, dry_run=dry_run)


async def _refresh(lake: LakeView) -> bool:
    """Apply new commits; whether every commit could be read."""
    await lake.refresh()
    return not lake.refused


async def delete(lake: LakeView, doomed: Sequence[ObjectMeta], swept: Swept, *, dry_run: bool) -> None:
    """Delete plain objects at their versions, and objects below ``.lakefs/``, whose keys are unique, many a request.

    Raises LakeError."""
    failed: dict[str, str] = {}
    if not dry_run:
        ours = [meta.key for meta in doomed if meta.key.startswith(RESERVED_PREFIX)]
        if ours:
            failed.update(await lake.client.delete_many(ours))
        others = [(meta.key, meta.etag) for meta in doomed if not meta.key.startswith(RESERVED_PREFIX)]
        failed.update(await lake.client.delete_many_if_match(others))
    swept.failed += len(failed)
    swept.why = swept.why or next((f"{key}: {why}" for key, why in failed.items()), "")
    swept.add(len(doomed) - len(failed), sum(meta.size for meta in doomed if meta.key not in failed))
