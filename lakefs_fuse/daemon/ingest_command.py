"""The command `ingest`, as the worker runs it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from lakefs_fuse.admin.work import Work
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.errors import ConfigError
from lakefs_fuse.ingest.ingest import Ingest, IsReserved, open_source
from lakefs_fuse.ingest.pack_filler import PackFiller, Totals


async def run_ingest(work: Work, args: protocol.IngestArgs) -> protocol.Finished:
    """Raises LakeError."""
    await _check_target(work)

    def report(done: Totals, total: Totals | None) -> None:
        work.progress(
            protocol.Progress(
                what="ingesting",
                files_done=done.files,
                bytes_done=done.bytes,
                files_total=None if total is None else total.files or None,
                bytes_total=None if total is None else total.bytes,
            )
        )

    packer = PackFiller(
        open_source(args.source, work.node.clock, work.node.threads),
        work.node.disk,
        path=work.path,
        prefix_bytes=len(work.store.source.prefix.encode()),
        directory=work.scratch,
    )
    ingest = Ingest(
        work.client,
        packer,
        work.node,
        open_names=partial(_open_names, work),
        uploads_max=work.uploads_max,
        report=report,
        note=work.note,
    )
    done = await ingest.run(count=args.count)
    return work.finished(done.summary(), done.describe(), failed=bool(done.refused))


async def _check_target(work: Work) -> None:
    """Raises ConfigError where the directory is a plain object, which it would hide. A file in a pack is not seen."""
    if work.path and await work.client.find(work.path):
        page = await work.client.list_page(f"{work.path}/", keys_max=1)
        if not page.objects:
            raise ConfigError(f"{work.path} is a file in the lake: name a directory, or a name that is not taken")


@asynccontextmanager
async def _open_names(work: Work) -> AsyncIterator[IsReserved]:
    """Opens a view of the lake, as mounts see it. Raises LakeError."""
    from lakefs_fuse.admin.commands import open_view  # and the filesystem, which few runs need

    async with open_view(work, command="ingest", changes=False, lists=False) as lake:

        async def is_reserved(key: str) -> bool:
            await lake.refresh()
            return lake.tree.objects.is_reserved(key)

        yield is_reserved
