"""Enables all format features that this program knows for a lake.

A program that does not know a feature must not write the lake afterwards. Programs that read the lake record see the
feature; older ones do not, so the upgrade is refused if one of them has committed in the last `WRITERS_S`. An idle
mount of an old program cannot be detected: `docs/operations.md` describes what it does then.

One change of the lake record, made or not made: a crash leaves nothing. A task of a trio loop.
"""

from __future__ import annotations

from msgspec.structs import replace

from lakefs_fuse.admin.work import NS, Work
from lakefs_fuse.commits.archive import parse_commit_key
from lakefs_fuse.commits.commit_log import fetch_newest_read
from lakefs_fuse.commits.record import COMMITS, FORMATS
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.errors import LakeError, NotFound, Unsupported
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.lake_record import FEATURES, LakeRecord
from lakefs_fuse.store.protocol import ObjectMeta

WRITERS_S = 3600
"""Time for which a mount counts as running after its last commit."""


async def run_upgrade(work: Work, args: protocol.UpgradeArgs) -> protocol.Finished:
    """`upgrade`. Raises LakeError where an older program writes, or the record cannot be changed; LeaseHeld where
    another command changes the lake."""
    async with work.lease("upgrade").held():
        return await _upgrade(work)


async def _upgrade(work: Work) -> protocol.Finished:
    before: list[LakeRecord | None] = []
    await _refuse_old_writers(work)

    def change(record: LakeRecord | None) -> LakeRecord:
        before.append(record)
        if record is None:
            raise LakeError("the lake has no record and none could be written: see the permissions for .lakefs/lake")
        missing = sorted(FEATURES - set(record.features_to_read))
        return replace(record, features_to_read=(*record.features_to_read, *missing)) if missing else record

    record = await work.node.threads.run(work.change_record, change)
    had = before[-1]
    new = sorted(set(record.features_to_read) - set(had.features_to_read if had is not None else ()))
    text = f"switched on: {', '.join(new)}" if new else "nothing to do: the lake has every feature of this program"
    summary: dict[str, object] = {
        "id": record.id,
        "switched_on": new,
        "features_to_read": list(record.features_to_read),
        "features_to_write": list(record.features_to_write),
    }
    return protocol.Finished(summary=summary, text=text)


async def _refuse_old_writers(work: Work) -> None:
    now_ns = await _now_ns(work)
    for time, meta in (await _writers(work.client, now_ns - WRITERS_S * NS)).values():
        try:
            newest = await fetch_newest_read(work.client, meta)
        except NotFound:
            continue  # collected meanwhile
        if newest < FORMATS[-1]:
            minutes = counted(max(0, now_ns - time) // (60 * NS), "minute")
            raise LakeError(
                f"an older program wrote to this lake {minutes} ago ({meta.key}): unmount it wherever it "
                "runs, or mount with this version, and upgrade an hour after its last commit"
            )


async def _now_ns(work: Work) -> int:
    try:
        return await work.client.time_ns()
    except Unsupported:
        return work.node.clock.wall_ns()


async def _writers(client: StoreClient, since_ns: int) -> dict[str, tuple[int, ObjectMeta]]:
    """The time and the object of the last commit of each writer since then; a writer is one daemon of one version."""
    found: dict[str, tuple[int, ObjectMeta]] = {}
    async for page in client.list_all(COMMITS, start_after=f"{COMMITS}{since_ns:016x}"):
        for meta in page.objects:
            named = parse_commit_key(meta.key)
            if named is not None and (named[1] not in found or named[0] > found[named[1]][0]):
                found[named[1]] = named[0], meta
    return found
