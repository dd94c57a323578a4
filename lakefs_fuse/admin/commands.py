"""What the command line asks of this layer: arguments in, one engine run on a headless lake, a last line out.

Called by `offline` only, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

import trio

from lakefs_fuse.admin import fsck, fsck_repair, gc, repack
from lakefs_fuse.admin.lake_view import NS, open_lake_view
from lakefs_fuse.admin.snapshot import fold
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.config import StoreConfig
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.environment.node import Node
from lakefs_fuse.errors import NotFound
from lakefs_fuse.store.client import StoreClient


@dataclass(frozen=True, slots=True)
class Work:
    """What a command is given; ``path`` is what it is about in the lake, empty for all of it."""

    client: StoreClient
    store: StoreConfig
    path: str
    progress: Callable[[protocol.Progress], None]
    note: Callable[[str], None]
    node: Node
    scratch: str
    """Directory for temporary files."""

    def report(self, what: str, files: int, size: int) -> None:
        self.progress(protocol.Progress(what=what, files_done=files, bytes_done=size))


async def run_pack(work: Work, args: protocol.PackArgs) -> protocol.Finished:
    began = trio.current_time()
    async with open_lake_view(work.client, work.store, node=work.node, scratch=work.scratch) as lake:
        if args.back:
            back = await repack.unpack(lake, work.path, dry_run=args.dry_run, report=work.report, note=work.note)
            return _finished(back.summary(), back.describe(dry_run=args.dry_run), began, args.dry_run)
        done = await repack.pack(
            lake,
            work.path,
            threshold_bytes=args.threshold_bytes,
            grace_s=args.grace_s,
            dry_run=args.dry_run,
            report=work.report,
        )
        return _finished(
            done.summary(), done.describe(dry_run=args.dry_run), began, args.dry_run, failed=bool(done.swept.failed)
        )


async def run_gc(work: Work, args: protocol.GcArgs) -> protocol.Finished:
    began = trio.current_time()
    async with open_lake_view(work.client, work.store, node=work.node, scratch=work.scratch) as lake:

        async def fold_all(horizon: int) -> None:
            await fold(lake.fs, work.client, horizon=horizon, report=work.report, node=work.node)

        options = gc.Options(
            live_below=args.live_below,
            grace_s=args.grace_s,
            uploads_older_s=args.uploads_older_s,
            wait=args.wait,
            dry_run=args.dry_run,
        )
        done = await gc.Collector(lake, options, fold=fold_all, report=work.report).run()
        return _finished(
            done.summary(), done.describe(dry_run=args.dry_run), began, args.dry_run, failed=bool(done.unreadable)
        )


async def run_snapshot(work: Work, args: protocol.SnapshotArgs) -> protocol.Finished:
    began = trio.current_time()
    if args.delete:
        await snapshots.delete(work.client, args.delete)
        return protocol.Finished(
            summary={"deleted": args.delete},
            text=f"snapshot {args.delete} is deleted; gc gives back what only it had bytes in",
        )
    if args.list:
        return await _list_snapshots(work)
    opening = open_lake_view(
        work.client, work.store, node=work.node, scratch=work.scratch, cache_dir=args.cache_dir
    )  # fmt: skip
    async with opening as lake:
        done = await fold(lake.fs, work.client, name=args.name, report=work.report, node=work.node)
    requests = sum(work.client.metrics.requests.values())
    return protocol.Finished(
        summary={
            "name": args.name or None,
            "time": f"{done.time:016x}",
            "names": done.names,
            "directories": done.directories,
            "files": len(done.files),
            "bytes": done.bytes,
            "newest_commit": f"{done.newest:016x}",
            "requests": requests,
            "seconds": round(trio.current_time() - began, 3),
        },
        text=f"{done.names:,} names in {done.directories + 1:,} directories: {done.bytes:,} bytes in "
        f"{len(done.files):,} files, {f'snapshot {args.name}' if args.name else f'index {done.time:016x}'}",
    )


async def _list_snapshots(work: Work) -> protocol.Finished:
    """Of each name: when it was taken, and how much it is of."""
    found: list[dict[str, object]] = []
    for name in await snapshots.names(work.client):
        try:
            manifest = await snapshots.fetch_manifest(work.client, name)
        except NotFound:
            continue  # it is being written, or was never finished
        at = datetime.fromtimestamp(manifest.time / NS, UTC).isoformat(timespec="seconds")
        found.append({"name": name, "at": at, "names": manifest.names, "bytes": manifest.bytes})
    lines = [f"{each['name']}  {each['at']}  {each['names']:,} names" for each in found]
    return protocol.Finished(summary={"snapshots": found}, text="\n".join(lines) or "there are no snapshots")


async def run_fsck(work: Work, args: protocol.FsckArgs) -> protocol.Finished:
    began = trio.current_time()
    opening = open_lake_view(
        work.client, work.store, node=work.node, scratch=work.scratch, cache_dir=args.cache_dir
    )  # fmt: skip
    async with opening as lake:
        checker = fsck.Checker(lake, quick=args.quick, report=work.report)
        done = await checker.run()
        if args.repair and done.problems:
            await fsck_repair.repair(lake, checker)
        return _finished(done.summary(), done.describe(), began, False, failed=bool(done.problems))


def _finished(
    summary: dict[str, object], text: str, began: float, dry_run: bool, *, failed: bool = False
) -> protocol.Finished:
    return protocol.Finished(
        summary={**summary, "dry_run": dry_run, "seconds": round(trio.current_time() - began, 3)},
        text=protocol.printable(text),
        exit_code=int(failed),
    )
