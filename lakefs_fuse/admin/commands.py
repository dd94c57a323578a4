"""The commands `pack`, `unpack`, `relocate`, `gc`, `snapshot` and `fsck`, and `maintenance`, which mounts start: each
runs its engine on a view of the lake.

What always holds (*one at a time*): a command that deletes or moves objects takes the maintenance lease before it reads
anything, and its engine writes through the client of that lease. A dry run takes none.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path

from lakefs_fuse.admin import fsck, fsck_repair, gc, rebind, repack
from lakefs_fuse.admin.fold_database import FoldDatabase, open_fold_view
from lakefs_fuse.admin.lake_view import LakeView, open_lake_view
from lakefs_fuse.admin.maintenance import GRACE_DAYS, INTERVALS_PER_DAY, UNREADABLE, UPLOAD_DAYS, Inspector
from lakefs_fuse.admin.snapshot import accept_loss, fold
from lakefs_fuse.admin.work import NS, Work
from lakefs_fuse.commits.index import datasets, snapshots
from lakefs_fuse.config import DatasetName
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.errors import EXIT_FAILURE, ConfigError, DamagedCommit, LakeError, NotFound, Unsupported
from lakefs_fuse.quantity import counted
from lakefs_fuse.store import lake_record
from lakefs_fuse.store.client import StoreClient


@asynccontextmanager
async def open_view(
    work: Work,
    cache_dir: str | None = None,
    *,
    command: str,
    changes: bool = True,
    lists: bool = True,
    folds: bool = False,
    may_lack_names: bool = False,
) -> AsyncIterator[LakeView]:
    """A view of the lake of ``work``, for a ``command`` that ``changes`` the lake, under its lease; ``cache_dir``,
    ``lists``, ``folds`` and ``may_lack_names`` as `open_lake_view` has them. Raises LakeError: LeaseHeld where another
    command changes the lake."""
    leased = work.lease(command).held() if changes else nullcontext(work.client)
    async with (
        leased as client,
        open_lake_view(
            client,
            work.store,
            node=work.node,
            scratch=work.scratch,
            cache_dir=cache_dir,
            lists=lists,
            folds=folds,
            lake_id=work.lake_id,
            may_lack_names=may_lack_names,
        ) as lake,
    ):
        yield lake


async def run_pack(work: Work, args: protocol.PackArgs) -> protocol.Finished:
    async with open_view(work, command="unpack" if args.back else "pack", changes=not args.dry_run) as lake:
        if args.back:
            back = await repack.unpack(lake, work.path, dry_run=args.dry_run, report=work.report, note=work.note)
            return work.finished({**back.summary(), "dry_run": args.dry_run}, back.describe(dry_run=args.dry_run))
        done = await repack.pack(
            lake,
            work.path,
            threshold_bytes=args.threshold_bytes,
            grace_s=args.grace_s,
            dry_run=args.dry_run,
            report=work.report,
        )
        return work.finished(
            {**done.summary(), "dry_run": args.dry_run},
            done.describe(dry_run=args.dry_run),
            failed=bool(done.swept.failed),
        )


async def run_relocate(work: Work, args: protocol.RelocateArgs) -> protocol.Finished:
    async with open_view(work, command="relocate", changes=not args.dry_run) as lake:
        done = await repack.unpack(
            lake, work.path, packed=False, dry_run=args.dry_run, report=work.report, note=work.note
        )
        return work.finished({**done.summary(), "dry_run": args.dry_run}, done.describe(dry_run=args.dry_run))


async def run_gc(work: Work, args: protocol.GcArgs) -> protocol.Finished:
    async with open_view(work, command="gc", changes=not args.dry_run, lists=False, folds=work.levels) as lake:
        done = await _collect(work, lake, args)
        return work.finished(
            {**done.summary(), "dry_run": args.dry_run},
            done.describe(dry_run=args.dry_run),
            failed=bool(done.unreadable),
        )


async def _collect(work: Work, lake: LakeView, args: protocol.GcArgs, *, always_folds: bool = False) -> gc.Collected:
    async def fold_known(horizon: int) -> None:
        await fold(lake, horizon=horizon, list_all=False, report=work.report)

    return await gc.Collector(lake, args, fold=fold_known, always_folds=always_folds, report=work.report).run()


async def run_maintenance(work: Work, args: protocol.MaintenanceArgs) -> protocol.Finished:
    """What the lake is due for when this has the lease: another process may have done it just before."""
    async with work.lease("maintenance").held() as client:
        clock, ahead_ns = work.node.clock, 0
        with suppress(Unsupported):
            ahead_ns = await client.time_ns() - clock.wall_ns()
        database = FoldDatabase(Path(args.fold_database)) if args.fold_database else None
        inspector = Inspector(
            client,
            clock,
            interval_s=args.interval_s,
            commits_max=args.commits_max,
            ahead_ns=lambda: ahead_ns,
            database=database,
            has_levels=work.levels,
        )
        due = await inspector.inspect()
        collects = due.collection and args.may_delete
        if not due.fold and not collects:
            return work.finished({"folded": False, "collected": False}, "the lake is due for nothing")
        if inspector.is_refused:
            return work.finished({"folded": False, "collected": False}, f"maintenance was refused lately: {UNREADABLE}")
        began_s = clock.mono_s()
        async with open_fold_view(client, work, database) as lake:
            try:
                if not collects:
                    await fold(lake, list_all=False, is_new=True, known=inspector.index, report=work.report)
                    return work.finished({"folded": True, "collected": False}, "an index was written")
                day_s = args.interval_s * INTERVALS_PER_DAY
                options = protocol.GcArgs(grace_s=day_s * GRACE_DAYS, uploads_older_s=day_s * UPLOAD_DAYS)
                done = await _collect(work, lake, options, always_folds=due.fold)
            except LakeError:
                if lake.refused:
                    await inspector.record_refusal(int(clock.mono_s() - began_s))
                raise
            if done.unreadable:
                await inspector.record_refusal(int(clock.mono_s() - began_s))
        return work.finished(
            {**done.summary(), "collected": not done.unreadable},
            done.describe(dry_run=False),
            failed=bool(done.unreadable),
        )


async def run_snapshot(work: Work, args: protocol.SnapshotArgs) -> protocol.Finished:
    if args.delete:
        async with work.lease("snapshot --delete").held() as client:
            await _check_no_dataset(client, args.delete)
            await snapshots.delete(client, args.delete)
        return protocol.Finished(
            summary={"deleted": args.delete},
            text=f"snapshot {args.delete} is deleted; gc gives back what only it had bytes in",
        )
    if args.list:
        return await _list_snapshots(work)
    folds = work.levels and args.cache_dir is None  # what a node changed in a directory of its own is not known
    opening = open_view(work, args.cache_dir, command="snapshot", folds=folds, may_lack_names=args.accept_loss)
    async with opening as lake:
        if args.accept_loss:
            await accept_loss(lake, work.note)
        done = await fold(lake, name=args.name, report=work.report)
    return work.finished(
        {
            "name": args.name or None,
            "time": f"{done.time:016x}",
            "names": done.names,
            "directories": done.directories,
            "files": len(done.all_files()),
            "bytes": done.bytes,
            "newest_commit": f"{done.newest:016x}",
            "requests": sum(work.client.metrics.requests.values()),
        },
        f"{counted(done.names, 'name')} in {counted(done.directories + 1, 'directory', 'directories')}: "
        f"{counted(done.bytes, 'byte')} in {counted(len(done.all_files()), 'file')}, "
        f"{f'snapshot {args.name}' if args.name else f'index {done.time:016x}'}",
    )


async def _list_snapshots(work: Work) -> protocol.Finished:
    """Each name, with the time of its state and its size."""
    found: list[dict[str, object]] = []
    lines: list[str] = []
    unreadable = 0
    for name in await snapshots.names(work.client):
        try:
            manifest = await snapshots.fetch_manifest(work.client, name)
        except NotFound:
            continue  # it is being written, or was never finished
        except DamagedCommit as error:
            work.note(f"{name} cannot be read: {error}")
            unreadable += 1
            continue
        dataset = DatasetName.of_snapshot(name)
        if dataset is not None and datasets.is_version(manifest, dataset):
            continue  # `dataset ls` has it
        at = datetime.fromtimestamp(manifest.time / NS, UTC).isoformat(timespec="seconds")
        found.append({"name": name, "at": at, "names": manifest.names, "bytes": manifest.bytes})
        lines.append(f"{name}  {at}  {counted(manifest.names, 'name')}")
    return protocol.Finished(
        summary={"snapshots": found},
        text="\n".join(lines) or "there are no snapshots",
        exit_code=EXIT_FAILURE if unreadable else 0,
    )


async def _check_no_dataset(client: StoreClient, name: str) -> None:
    """Raises ConfigError for a version of a dataset, which `dataset rm` removes with what nodes say of it."""
    dataset = DatasetName.of_snapshot(name)
    if dataset is None:
        return
    try:
        manifest = await snapshots.fetch_manifest(client, name)
    except (NotFound, DamagedCommit):
        return
    if datasets.is_version(manifest, dataset):
        raise ConfigError(f"{name} is the dataset {dataset}: `lakefs-fuse dataset rm SOURCE {dataset}` removes it")


async def run_fsck(work: Work, args: protocol.FsckArgs) -> protocol.Finished:
    if args.rebind:
        return await _rebind(work, args)
    async with open_view(
        work, args.cache_dir, command="fsck --repair", changes=args.repair, may_lack_names=True
    ) as lake:
        checker = fsck.Checker(lake, quick=args.quick, report=work.report)
        done = await checker.run()
        if args.repair and done.problems and not done.names_missing:
            await fsck_repair.repair(lake, checker, report=work.report)
        return work.finished({**done.summary(), "dry_run": False}, done.describe(), failed=not done.is_clean)


async def _rebind(work: Work, args: protocol.FsckArgs) -> protocol.Finished:
    async with open_view(work, command="fsck --rebind", changes=not args.dry_run) as lake:
        rebinder = rebind.Rebinder(lake, quick=args.quick, dry_run=args.dry_run, report=work.report, note=work.note)
        done = await rebinder.run()
        if (done.objects or done.snapshots) and not args.dry_run and await work.client.find(lake_record.KEY):
            # Whether ETags are MD5s, for one, is another answer for another bucket of the same endpoint.
            await work.node.threads.run(work.change_record, lake_record.without_findings)
    return work.finished(
        {**done.summary(), "dry_run": args.dry_run}, done.describe(dry_run=args.dry_run), failed=bool(done.left)
    )
