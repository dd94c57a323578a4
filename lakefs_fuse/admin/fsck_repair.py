"""`fsck --repair`: repairs problems that `fsck` found. *Last copy*: it never deletes the only copy of anything.

* A commit that no mount can use is moved to ``.lakefs/damaged/``: the store copies it, the copy is checked, and the
  commit is deleted. It stays as long as a name has bytes in this very version, or a named snapshot in the commit.
* A name with damaged bytes is pointed at the plain object at its own key that the commit hides, if that object has the
  hidden ETag, and its bytes have the size and the CRC-32 of the intact ones, so that they are not older ones.
* Commits from the future are committed again under right dates (see `future_commits`), and files in them are moved into
  new packs. They are deleted after a grace period in which mounts apply that, unless a name or a named snapshot had or
  has bytes in them: mounts read these, and one that has not heard of a move may rename the file.
* What commits say that came too late for mounts, and no later commit or plain object does, is committed again.
* Any other problem is left and reported.

A crash between copy and deletion leaves both, and a second run continues. Tasks of one trio loop.
"""

from __future__ import annotations

import zlib
from collections.abc import Awaitable, Callable, Sequence

import trio

from lakefs_fuse.admin.fsck import Checker, Hurt, Kind, Problem
from lakefs_fuse.admin.lake_view import LakeView
from lakefs_fuse.admin.relocation import RelocationBuilder, Relocator
from lakefs_fuse.admin.work import Report
from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.commits.archive import commit_time
from lakefs_fuse.commits.future_commits import Redater
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.record import COMMITS, OWN
from lakefs_fuse.config import DELETE_AFTER_S, MIB
from lakefs_fuse.errors import NotFound, PreconditionFailed, StoreError, Unavailable
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.quantity import counted
from lakefs_fuse.sync.nursery import for_each

DAMAGED = f"{RESERVED_PREFIX}damaged/"
READ_BYTES = 8 * MIB
DELETIONS_AT_ONCE = 16
GRACE_S = DELETE_AFTER_S
"""As `pack` has it."""

Sleep = Callable[[float], Awaitable[None]]


async def repair(lake: LakeView, checker: Checker, *, report: Report, sleep: Sleep = trio.sleep) -> None:
    """Repair the problems of a check, and record in each what was done. Raises LakeError."""
    repaired = await _repoint(lake, checker.hurt)
    future = {problem.key for problem in checker.done.problems if problem.kind is Kind.FUTURE}
    redated = await _redate(lake, future, report, sleep) if future else {}
    for problem in checker.done.problems:
        if problem.kind is Kind.FUTURE:
            repair = redated[problem.key]
        elif problem.kind is Kind.LATE:
            repair = await _repeat_late(lake, checker, problem)
        elif problem.kind is Kind.UNREADABLE and problem.key in future:
            repair = "left where it is: nobody knows what it says"
        elif problem.kind is Kind.UNREADABLE:
            repair = await _move_aside(lake, checker, problem)
        else:
            repair = _outcome(problem, repaired)
        problem.repair = repair


def _outcome(problem: Problem, repaired: set[str]) -> str:
    """What was done of a problem of names, of which those at ``repaired`` were pointed at intact copies."""
    if not problem.paths:
        return "left as it is"
    again = sum(path in repaired for path in problem.paths)
    left = len(problem.paths) - again
    done = [f"{counted(again, 'name was', 'names were')} pointed at an intact copy"] if again else []
    if left:
        of_left = counted(left, "name left as it is", "names left as they are")
        done.append(f"{of_left}: no intact copy is known")
    return "; ".join(done)


async def _redate(lake: LakeView, future: set[str], report: Report, sleep: Sleep) -> dict[str, str]:
    """Commit what commits from the future say again; for each of their keys, what was done."""
    await lake.log.latest_time()
    redated = await Redater(lake.log).run()
    await lake.refresh()
    again = [key for key in redated.originals if key in future]
    numbers = {row.number for row in lake.tree.objects.rows() if row.key in future and row.entries > 0}
    if numbers:
        relocator = Relocator(lake, report=lambda moved: report("moving files", moved.files, moved.bytes))
        for path, entry in lake.files():
            if entry.place in numbers:
                await relocator.add(path, entry)
        await relocator.finish()
        await lake.refresh()
    done = dict.fromkeys(future, "left: it cannot be read")
    doomed = await _find_unreferenced(lake, again, done)
    if doomed:
        report("waiting for the grace period", 0, 0)
        await sleep(GRACE_S)
        await lake.refresh()
        doomed = await _find_unreferenced(lake, doomed, done)
    await for_each(doomed, lake.client.delete, DELETIONS_AT_ONCE)
    return done


async def _find_unreferenced(lake: LakeView, again: Sequence[str], done: dict[str, str]) -> list[str]:
    """Those of the commits that were committed again of which no name and no snapshot needs the bytes. ``done`` gets
    what is done about each."""
    kept = await snapshots.kept_objects(lake.client)
    used_by = {row.key: row.entries for row in lake.tree.objects.rows() if row.entries > 0}
    doomed: list[str] = []
    for key in again:
        if used := used_by.get(key, 0):
            names = counted(used, "name has its own", "names have theirs")
            done[key] = f"committed again; its bytes stay, as {names} in it"
        elif key in kept:
            done[key] = "committed again; its bytes stay, as a snapshot has some of them"
        else:
            done[key] = "committed again under a right date, but for what has a newer version, and deleted"
            doomed.append(key)
    return doomed


async def _repeat_late(lake: LakeView, checker: Checker, problem: Problem) -> str:
    """Commit again what a commit says that mounts have not seen; what was done."""
    meta = checker.commits.get(problem.key)
    if meta is None:
        return "left: it is gone"
    await lake.refresh()
    await lake.log.latest_time()
    done = await Redater(lake.log).repeat([meta], {meta.key: commit_time(meta.key)}, is_known=lake.is_known)
    await lake.refresh()
    if not done.originals:
        return "left: it cannot be read"
    if not done.operations:
        return "left as it is: all that it says has newer versions"
    return f"{counted(done.operations, 'change of a name was', 'changes of names were')} committed again"


async def _move_aside(lake: LakeView, checker: Checker, problem: Problem) -> str:
    meta = checker.commits.get(problem.key)
    if meta is None:
        return "left: it is gone"
    if used := lake.references(meta.key, meta.etag):
        return f"left where it is: {counted(used, 'name has its', 'names have their')} bytes in it"
    if meta.key in await snapshots.kept_objects(lake.client):
        return "left where it is: a named snapshot has bytes in it"
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


async def _repoint(lake: LakeView, hurt: list[Hurt]) -> set[str]:
    """Point names at intact copies; the paths of those names."""
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


async def _is_same(lake: LakeView, hurt: Hurt) -> bool:
    """Whether the plain object at the own key of a name has the bytes that the name should have."""
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
