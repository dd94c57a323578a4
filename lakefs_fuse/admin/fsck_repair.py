"""What `fsck --repair` does about what it found. It never deletes the last copy of anything.

* A commit that no mount can use is moved aside, to ``.lakefs/damaged/``: copied by the store, looked at, then deleted.
  It stays where it is as long as a name has bytes in this very version of it.
* A name whose bytes are damaged is pointed at the plain object at its own key that the commit hides, if that is there
  at that ETag and its bytes have the size and the CRC-32 that the damaged ones should have (so they are not older
  ones).
* Everything else is left, and said.

Killed between the copy and the deletion: both are there, and a second run goes on. Tasks of one trio loop.
"""

from __future__ import annotations

import zlib

from lakefs_fuse.admin.fsck import Checker, Hurt, Kind, Problem
from lakefs_fuse.admin.headless import Headless
from lakefs_fuse.admin.relocating import RelocationBuilder
from lakefs_fuse.catalog.record import COMMITS, OWN
from lakefs_fuse.config import MIB
from lakefs_fuse.data.version import Extent, Version
from lakefs_fuse.errors import NotFound, PreconditionFailed, StoreError, Unavailable

DAMAGED = ".lakefs/damaged/"
READ_BYTES = 8 * MIB


async def repair(lake: Headless, checker: Checker) -> None:
    """Says in each problem what was done. Raises LakeError where the store does not answer."""
    repaired = await _repoint(lake, checker.hurt)
    for problem in checker.done.problems:
        if problem.kind is Kind.UNREADABLE:
            problem.repair = await _move_aside(lake, checker, problem)
            continue
        if not problem.paths:
            problem.repair = "left as it is"
            continue
        again = sum(path in repaired for path in problem.paths)
        if again:
            problem.repair = f"{again:,} names were pointed at an intact copy"
        left = len(problem.paths) - again
        if left:
            problem.repair += f"{'; ' if again else ''}{left:,} names left as they are: no intact copy is known"


async def _move_aside(lake: Headless, checker: Checker, problem: Problem) -> str:
    meta = checker.commits.get(problem.key)
    if meta is None:
        return "left: it is gone"
    row = lake.tree.objects.find(meta.key, meta.etag)
    if row is not None and row.entries > 0:
        return f"left where it is: {row.entries:,} names have their bytes in it"
    target = DAMAGED + meta.key.removeprefix(COMMITS)
    try:
        await lake.client.copy(meta.key, target, etag=meta.etag)
        if (await lake.client.head(target)).size != meta.size or (await lake.client.head(meta.key)).etag != meta.etag:
            return "left: it could not be copied whole"
        await lake.client.delete(meta.key)
    except Unavailable:
        raise
    except StoreError as error:
        return f"left: it could not be copied: {error}"
    return f"moved aside to {target}; what is whole in it can be read with unzip"


async def _repoint(lake: Headless, hurt: list[Hurt]) -> set[str]:
    """Paths of the names that have an intact copy now."""
    await lake.refresh()
    builder = RelocationBuilder()
    repaired: set[str] = set()
    for each in hurt:
        now = lake.find(each.path)
        if now != each.entry or each.crc is None or not now.etag or not await _is_same(lake, each):
            continue
        row, entry = each.row, each.entry
        source = Extent(Version(row.key, row.etag, row.size), entry.offset, entry.size)
        builder.add(each.path, entry, source, OWN, 0, entry.etag)
        repaired.add(each.path)
    await builder.commit(lake)
    return repaired


async def _is_same(lake: Headless, hurt: Hurt) -> bool:
    """The plain object at the name's own key has the bytes that the name should have."""
    key, entry, crc, at = hurt.path, hurt.entry, 0, 0
    try:
        if (meta := await lake.client.head(key)).size != entry.size or meta.etag != entry.etag:
            return False
        while at < entry.size:
            end = min(entry.size, at + READ_BYTES)
            data = (await lake.client.get(key, at, end, etag=entry.etag)).data
            crc, at = zlib.crc32(data, crc), end
    except (NotFound, PreconditionFailed):
        return False
    return crc == hurt.crc
