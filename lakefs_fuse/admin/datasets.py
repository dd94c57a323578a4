"""The actions of `dataset`: versions of a directory are made, listed, described, compared, checked and removed.

What always holds (*one at a time*): an action that changes the lake holds the maintenance lease, so no two make the
same version, and nothing is collected meanwhile. The others only read. Tasks of one trio loop; what a crash leaves is
said by `dataset_builder`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

import msgspec
import trio

from lakefs_fuse.admin import dataset_builder, dataset_check
from lakefs_fuse.admin.dataset_diff import Comparison
from lakefs_fuse.admin.lake_view import open_lake_view
from lakefs_fuse.admin.snapshot_rows import snapshot_rows
from lakefs_fuse.admin.work import NS, Work
from lakefs_fuse.commits.index import datasets, node_records, snapshots
from lakefs_fuse.commits.index.index import Manifest
from lakefs_fuse.config import DatasetName
from lakefs_fuse.control import worker_protocol as protocol
from lakefs_fuse.errors import ConfigError
from lakefs_fuse.meta.entry import ROOT_INODE, Entry
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import RESERVED_NAME
from lakefs_fuse.quantity import counted

NAMES_PER_STEP = 512
NODES_NAMED_MAX = 10


async def run_dataset(work: Work, args: protocol.DatasetArgs) -> protocol.Finished:
    """Raises LakeError: ConfigError for a dataset, or a directory, that is not there; LeaseHeld where another command
    changes the lake."""
    return await ACTIONS[args.action](work, args)


async def _create(work: Work, args: protocol.DatasetArgs) -> protocol.Finished:
    wanted, path = DatasetName.parse(args.dataset), _directory(work.path, args.path)
    async with work.lease("dataset create").held() as client:
        there = await datasets.versions(client, wanted.name)
        name = wanted if wanted.version else DatasetName(wanted.name, await datasets.next_version(client, wanted.name))
        if any(each.name == name for each in there):
            raise ConfigError(
                f"there is a dataset {name} already, and a version never changes: leave the version out, and the next "
                f"number is taken ({await datasets.next_version(client, name.name)})"
            )
        await snapshots.check_free(client, name.snapshot)
        known = [(each.name, each.manifest) for each in there if each.manifest is not None]
        async with open_lake_view(client, work.store, node=work.node, scratch=work.scratch) as lake:
            built = await dataset_builder.build(lake, name, path, known[::-1], work.progress, work.note)
    counts = built.counts
    copies = f"{counted(counts.copies, 'object')}, {counted(counts.bytes_copied, 'byte')}"
    copied = f"{copies}, {'was' if counts.copies == 1 else 'were'} copied in the store"
    reused = f"; copies that {built.base} has already: {counts.reused:,}" if counts.reused else ""
    return work.finished(
        {
            **_describe(name, built.manifest),
            "objects_copied": counts.copies,
            "bytes_copied": counts.bytes_copied,
            "copies_reused": counts.reused,
        },
        f"dataset {name}: {counted(counts.files, 'file')}, {counted(counts.bytes, 'byte')}, of "
        f"{path or 'the whole lake'}; "
        f"{copied if counts.copies else 'no object had to be copied'}{reused}",
    )


def _directory(place: str, path: str) -> str:
    """A directory of the lake, below that of the place. Raises ConfigError for what cannot be one."""
    parts = [part for part in f"{place}/{path}".split("/") if part]
    if any(part in (".", "..") for part in parts):
        raise ConfigError(f"{path!r} has a component . or ..: write the directory that is meant")
    if parts and parts[0] == RESERVED_NAME:
        raise ConfigError(f"{RESERVED_NAME} is no directory of files: name another one")
    return "/".join(parts)


def _describe(name: DatasetName, manifest: Manifest) -> dict[str, object]:
    """A version, for scripts; names are final."""
    told = manifest.dataset
    assert told is not None, "only a version of a dataset is described"
    return {
        "dataset": str(name),
        "name": name.name,
        "version": name.version,
        "path": told.path,
        "at": datetime.fromtimestamp(manifest.time / NS, UTC).isoformat(timespec="seconds"),
        "files": told.files,
        "bytes": told.bytes,
        "names": manifest.names,
        "directories": manifest.directories,
        "newest_commit": f"{manifest.newest:016x}",
        "snapshot": name.snapshot,
    }


async def _list(work: Work, args: protocol.DatasetArgs) -> protocol.Finished:
    wanted = DatasetName.parse(args.dataset).name if args.dataset else ""
    there = await datasets.versions(work.client, wanted)
    readable = [(each.name, each.manifest) for each in there if each.manifest is not None]
    found = [_describe(name, manifest) for name, manifest in readable]
    for each in there:
        if each.manifest is None:
            work.note(f"{each.name} cannot be read: {each.why}")
    lines = [_line_of(name, manifest) for name, manifest in readable]
    nothing = f"there is no dataset {wanted}: `lakefs-fuse dataset ls` without it lists all" if wanted else ""
    text = "\n".join(lines) or nothing or "there are no datasets"
    return work.finished({"datasets": found}, text, failed=len(found) < len(there))


def _line_of(name: DatasetName, manifest: Manifest) -> str:
    """A version, for people."""
    described = _describe(name, manifest)
    told = manifest.dataset
    assert told is not None, "only a version of a dataset is described"
    size = f"{counted(told.files, 'file')}  {counted(told.bytes, 'byte')}"
    return f"{name}  {described['at']}  {size}  {told.path or '/'}"


async def _show(work: Work, args: protocol.DatasetArgs) -> protocol.Finished:
    name, manifest = await datasets.find(work.client, DatasetName.parse(args.dataset))
    if args.files:
        async with _rows(work, name, manifest) as tree:
            await _show_files(tree, work.show)
    found = _describe(name, manifest)
    text = "\n".join(f"{key.replace('_', ' ')}: {value}" for key, value in found.items())
    return work.finished(found, text)


async def _diff(work: Work, args: protocol.DatasetArgs) -> protocol.Finished:
    before = await datasets.find(work.client, DatasetName.parse(args.dataset))
    after = await datasets.find(work.client, DatasetName.parse(args.other))
    async with _rows(work, *before) as one, _rows(work, *after) as two:
        totals = await Comparison(work.client, one, two, work.show, reads=args.read).run()
    work.show(totals)
    return work.finished(msgspec.to_builtins(totals), "")


async def _verify(work: Work, args: protocol.DatasetArgs) -> protocol.Finished:
    name, manifest = await datasets.find(work.client, DatasetName.parse(args.dataset))
    told = manifest.dataset
    assert told is not None, "only a version of a dataset is found"
    async with _rows(work, name, manifest) as tree:
        done = await dataset_check.verify(work, str(name), told, tree, reads=args.read)
    return work.finished(done.summary(), done.describe(), failed=bool(done.files_hurt))


@asynccontextmanager
async def _rows(work: Work, name: DatasetName, manifest: Manifest) -> AsyncIterator[Tree]:
    async with snapshot_rows(work.client, work.node, name.snapshot, manifest, work.scratch) as database:
        yield Tree(database)


async def _show_files(tree: Tree, show: Callable[[protocol.Row], None]) -> None:
    for number, (path, entry) in enumerate(tree.below(ROOT_INODE, ""), 1):
        if not entry.is_dir:
            show(_file_entry(tree, path, entry))
        if number % NAMES_PER_STEP == 0:
            await trio.lowlevel.checkpoint()


def _file_entry(tree: Tree, path: str, entry: Entry) -> protocol.FileEntry:
    path = path.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
    if entry.is_symlink:
        target = tree.target(entry.inode).decode("utf-8", "replace")
        return protocol.FileEntry(path=path, size=len(target), mtime_ns=entry.mtime_ns, target=target)
    row = tree.objects.get(entry.place)
    key, etag = ("", "") if row is None else (row.key, row.etag)
    return protocol.FileEntry(
        path=path, size=entry.size, mtime_ns=entry.mtime_ns, key=key, etag=etag, offset=entry.offset
    )  # fmt: skip


async def _remove(work: Work, args: protocol.DatasetArgs) -> protocol.Finished:
    wanted = DatasetName.parse_version(args.dataset)
    async with work.lease("dataset rm").held() as client:
        there = await datasets.versions(client, wanted.name)
        if all(each.name != wanted for each in there):
            raise ConfigError(datasets.describe_absence(wanted, there or await datasets.versions(client)))
        nodes = [record for record, _ in await _records(work, wanted) if record.mounted]
        await snapshots.delete(client, wanted.snapshot)
        await node_records.remove_records(client, wanted.snapshot)
    if nodes:
        work.note(f"warning: mounts of {wanted} fail to read what gc deletes: unmount them on "
                  f"{', '.join(dict.fromkeys(record.node for record in nodes[:NODES_NAMED_MAX]))}")  # fmt: skip
    return work.finished(
        {"removed": str(wanted)}, f"dataset {wanted} is removed; gc gives back what only it had bytes in"
    )


async def _status(work: Work, args: protocol.DatasetArgs) -> protocol.Finished:
    name, manifest = await datasets.find(work.client, DatasetName.parse(args.dataset))
    found = await _records(work, name)
    now_ns = work.node.clock.wall_ns()
    nodes = [
        {
            "node": record.node,
            "mountpoint": record.mountpoint,
            "mounted": record.mounted,
            "local_bytes": record.local_bytes,
            "bytes": record.bytes,
            "share": record.local_bytes / record.bytes if record.bytes else 1.0,
            "at": datetime.fromtimestamp(at_ns // NS, UTC).isoformat(),
            "age_s": max(0, (now_ns - at_ns) // NS),
        }
        for record, at_ns in sorted(found, key=lambda each: -each[0].local_bytes)
    ]
    lines = [
        f"{each['node']}  {each['share']:.1%}  {each['local_bytes']:,} of {each['bytes']:,} bytes  "
        f"{each['mountpoint'] if each['mounted'] else 'not mounted'}  {each['age_s']:,} s ago"
        for each in nodes
    ]
    text = "\n".join(lines) or f"no node mounts {name}, or did in the last {node_records.EXPIRES_S / 3600:g} hours"
    told = _describe(name, manifest)
    return work.finished({key: told[key] for key in ("dataset", "files", "bytes")} | {"nodes": nodes}, text)


async def _records(work: Work, name: DatasetName) -> list[tuple[node_records.NodeRecord, int]]:
    return await node_records.read_records(work.client, name.snapshot, work.node.clock.wall_ns())


ACTIONS: dict[str, Callable[[Work, protocol.DatasetArgs], Awaitable[protocol.Finished]]] = {
    "create": _create,
    "ls": _list,
    "show": _show,
    "diff": _diff,
    "verify": _verify,
    "status": _status,
    "rm": _remove,
}
