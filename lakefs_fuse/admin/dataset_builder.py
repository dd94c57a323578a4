"""Makes a version of a dataset: the rows of one directory, whose plain objects the store copies first.

What always holds:

* *nothing to replace*: see `commits.index.datasets`. Packs and hidden objects are named as they are; of every other
  object the store makes a copy below `.lakefs/objects/`, which belongs to versions of this dataset alone. What the
  version before has a copy of at the same path is not copied again;
* *one moment*: the rows are those of one view of the lake. Where an object was replaced before it was copied, the
  directory is listed again, and what is known by then is copied no second time;
* *kept from the first copy on*: the list of objects to keep is stored before anything is copied, well within the time
  for which mounts leave an object whose name is gone (`--delete-after`); else it is checked that they all have names
  still. So copying may take hours.

Memory holds a batch of names and the numbers of directories; the rest is in databases in a scratch directory. A crash
leaves a snapshot without a manifest and copies that nothing names: the next run for the same version takes the first
away, or `gc`, which deletes the others. The caller holds the maintenance lease. Tasks of one trio loop.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import trio
from msgspec import structs

from lakefs_fuse.admin.lake_view import LakeView, scratch_directory
from lakefs_fuse.admin.number_set import NumberSet
from lakefs_fuse.admin.snapshot import check_complete
from lakefs_fuse.admin.snapshot_rows import new_rows, snapshot_rows
from lakefs_fuse.admin.work import NS
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.index.index import Dataset, Manifest
from lakefs_fuse.commits.record import OBJECTS
from lakefs_fuse.config import DatasetName
from lakefs_fuse.control.worker_protocol import Progress
from lakefs_fuse.errors import ConfigError, DamagedCommit, LakeError, NotFound, PreconditionFailed
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import ROOT_INODE, Entry, Flag
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.server_copy import copy_object
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.vfs.namespace.tree_walk import list_everything

COPIES_AT_ONCE = 16
ROUNDS_MAX = 8
"""Listings, each because objects were replaced before they were copied; then the command gives up."""
MANY, SMALL_BYTES = 10_000, 1 << 20
"""This many plain objects, of so few bytes each on average, are better packed before."""
KEPT_S_MAX = 60.0
"""Mounts delete hidden objects minutes after their names are gone. Where the list of objects to keep came later after
the look at the lake than this, it is looked at once more whether they still have names."""
NAMES_PER_STEP = 512
"""5 ms."""
CLEAR_S_MAX = 10.0
"""Giving up waits so long for the store; what stays there is an unfinished snapshot, which `gc` takes away."""
ID_BITS = 128
LEFT_OUT = Flag.LISTED | Flag.MARKER | Flag.SHADOWED | Flag.RELOCATED | Flag.OVERRIDING
"""What is known of plain objects at the keys of names, which a version has none of."""

Source = tuple[str, str, int]
"""Key, ETag and size of an object."""


@dataclass(slots=True)
class Counts:
    """Regular files of a version, and what had to be copied for it."""

    files: int = 0
    bytes: int = 0
    copies_wanted: int = 0
    bytes_wanted: int = 0
    copies: int = 0
    bytes_copied: int = 0
    reused: int = 0
    """Plain objects of which the version before has a copy."""


@dataclass(frozen=True, slots=True)
class Built:
    """``base`` is the version whose copies were used again; None: there is none."""

    manifest: Manifest
    counts: Counts
    base: DatasetName | None


async def build(
    lake: LakeView,
    name: DatasetName,
    path: str,
    known: Sequence[tuple[DatasetName, Manifest]],
    progress: Callable[[Progress], None],
    note: Callable[[str], None],
) -> Built:
    """Store a version of the directory ``path``, empty for all of the lake, which uses the copies of the first of the
    ``known`` versions that can be read. Raises ConfigError where there is no such directory, LakeError; then there is
    no such version."""
    client = lake.client
    await snapshots.clear(client, name.snapshot)
    try:
        async with AsyncExitStack() as stack:
            scratch = Path(stack.enter_context(scratch_directory(lake.node, lake.scratch)))
            base, before = await _open_base(lake, known, stack, scratch, note)
            made = await _make_rows(lake, name, path, before, stack, scratch, progress, note)
            counts = made.counts
            told = Dataset(name=name.name, version=name.version, path=path, files=counts.files, bytes=counts.bytes)
            manifest = await _store(lake, name, made.tree, told, scratch)
            return Built(manifest, counts, base)
    except BaseException:
        with trio.move_on_after(CLEAR_S_MAX, shield=True), suppress(LakeError):
            await snapshots.remove(client, name.snapshot)
        raise


async def _open_base(
    lake: LakeView,
    known: Sequence[tuple[DatasetName, Manifest]],
    stack: AsyncExitStack,
    scratch: Path,
    note: Callable[[str], None],
) -> tuple[DatasetName | None, Tree | None]:
    """The first version that can be read, and its rows, in a database that ``stack`` closes."""
    for name, manifest in known:
        rows = snapshot_rows(lake.client, lake.node, name.snapshot, manifest, str(scratch))
        try:
            return name, Tree(await stack.enter_async_context(rows))
        except DamagedCommit as error:
            note(f"copies that only {name} has are not used again: {error}")
    return None, None


async def _make_rows(
    lake: LakeView,
    name: DatasetName,
    path: str,
    base: Tree | None,
    stack: AsyncExitStack,
    scratch: Path,
    progress: Callable[[Progress], None],
    note: Callable[[str], None],
) -> _Rows:
    """The rows of a version, complete, in a database that ``stack`` closes; counts are those of all rounds."""
    ids = lake.node.random.stream("dataset-copies", str(name))
    clock = lake.node.clock
    copies = bytes_copied = 0
    why = ""
    for number in range(ROUNDS_MAX):
        top, listed_ns = await _list_directory(lake, path, progress)
        database = stack.enter_context(new_rows(lake.node, str(name), scratch / f"{number}"))
        rows = _Rows(lake, database, base, ids, progress)
        await rows.name_objects(top)
        await snapshots.put_objects(lake.client, name.snapshot, rows.tree.objects)
        if (clock.boot_ns() - listed_ns) / NS > KEPT_S_MAX:
            await lake.refresh()
            if why := rows.find_unnamed():
                base = rows.tree
                continue
        counts = rows.counts
        if not number and counts.copies_wanted >= MANY and counts.bytes_wanted < SMALL_BYTES * counts.copies_wanted:
            note(
                f"the store copies {counts.copies_wanted:,} small plain objects, with a request for each: `lakefs-fuse "
                "pack` before would save these, for later versions as well"
            )
        await rows.copy_objects()
        copies, bytes_copied = copies + counts.copies, bytes_copied + counts.bytes_copied
        if not rows.changed:
            counts.reused = max(0, counts.reused - (copies - counts.copies))
            counts.copies, counts.bytes_copied = copies, bytes_copied
            return rows
        base, why = rows.tree, f"the object of {rows.changed} was replaced, or is gone"
    raise LakeError(
        f"{path or 'the lake'} changes faster than it can be copied ({why}): end what writes there and run it again; "
        "if nothing does, `lakefs-fuse fsck` says what is lost"
    )


async def _store(lake: LakeView, name: DatasetName, tree: Tree, told: Dataset, scratch: Path) -> Manifest:
    database = tree.database
    tables.set_newest(database, tables.marks_of(lake.fs.database).newest)
    dump = tables.Dump(database, tables.empty_directory(scratch / "written"), applied_since=0)
    try:
        return await snapshots.write(
            lake.client, lake.node.threads, name.snapshot, dump, tree.objects,
            time=lake.clock.now(), horizon=0, wrote=lambda _: None, dataset=told,
        )  # fmt: skip
    finally:
        dump.close()


async def _list_directory(lake: LakeView, path: str, progress: Callable[[Progress], None]) -> tuple[int, int]:
    """The inode of a directory of which everything is known, and since when (ns since boot). Raises
    ConfigError where there is none."""
    top, namespace = ROOT_INODE, lake.namespace
    await lake.refresh()
    for component in filter(None, path.split("/")):
        entry, _ = await namespace.lookup(top, component.encode("utf-8", "surrogatepass"), ask=True)
        if entry is None or not entry.is_dir:
            raise ConfigError(f"{path} is not a directory of the lake: name one that there is, relative to SOURCE")
        top = entry.inode
    await list_everything(namespace, lambda names: progress(Progress(what="listing", files_done=names)), top=top)
    listed_ns = lake.node.clock.boot_ns()
    await lake.refresh()
    await check_complete(lake)
    await lake.log.read_time()
    if top != ROOT_INODE and lake.tree.entry(top) is None:
        raise ConfigError(f"{path} was removed while it was listed: name a directory that stays")
    return top, listed_ns


class _Rows:
    """Rows of a version, made from those of the lake and from copies that ``base`` names."""

    def __init__(
        self,
        lake: LakeView,
        database: Database,
        base: Tree | None,
        ids: Random,
        progress: Callable[[Progress], None],
    ) -> None:
        """``ids`` gives names to copies."""
        self._lake, self._base, self._progress = lake, base, progress
        self.tree = Tree(database)
        self._ids = ids
        self._copies = NumberSet()
        """Objects that the base has, and perhaps the lake not."""
        self.counts = Counts()
        self.changed = ""
        """A file whose object was replaced before it was copied."""

    # -- rows of the lake

    async def name_objects(self, top: int) -> None:
        """Write the rows of a directory, each with the object that the lake has, or a copy of that in the base."""
        base_top = 0 if self._base is None else ROOT_INODE
        # Numbers of directories: in the lake, here, and in the base, 0 where it has none.
        pending = (array("Q", [top]), array("Q", [ROOT_INODE]), array("Q", [base_top]))
        while pending[0]:
            source, target, base = (each.pop() for each in pending)
            names = self._lake.tree.path(source)
            if names is None:
                raise LakeError("the lake changed while it was read: run it again")
            prefix = "".join(each.decode("utf-8", "surrogatepass") + "/" for each in names)
            entries = self._lake.tree.children(source)
            while some := list(islice(entries, NAMES_PER_STEP)):
                for below in self._add(some, prefix, target, base):
                    for numbers, number in zip(pending, below, strict=True):
                        numbers.append(number)
                self._progress(Progress(what="naming", files_done=self.counts.files, bytes_done=self.counts.bytes))
                await trio.lowlevel.checkpoint()

    def _add(self, some: Sequence[Entry], prefix: str, target: int, base: int) -> list[tuple[int, int, int]]:
        """Write the rows of some names of a directory; numbers of its directories, the last one first."""
        seen = [entry for entry in some if not entry.flags & Flag.SHADOWED]
        files = [entry for entry in seen if not entry.is_dir and not entry.is_symlink]
        sources = self._find_sources(files, prefix)
        reused = self._find_copies(files, sources, base)
        numbers = dict(zip((entry.cookie for entry in files), self.tree.objects.numbers(reused), strict=True))
        etags = dict(zip((entry.cookie for entry in files), self._copied_etags(sources, reused), strict=True))
        for cookie, etag in etags.items():
            if etag:
                self._copies.add(numbers[cookie])
        batch, below = Batch(), list[tuple[int, int, int]]()
        for entry in seen:
            made = self.tree.insert_entry(
                batch,
                structs.replace(
                    entry, parent=target, cookie=0, inode=0, flags=entry.flags & ~LEFT_OUT,
                    place=numbers.get(entry.cookie, 0), etag=etags.get(entry.cookie, ""),
                ),
            )  # fmt: skip
            if entry.is_symlink:
                self.tree.set_target(batch, made.inode, self._lake.tree.target(entry.inode))
            if entry.flags & Flag.XATTRS:
                self.tree.set_xattrs(batch, made.inode, self._lake.tree.xattrs(entry.inode))
            if entry.is_dir:
                known = self._base.named(base, entry.sort_name) if self._base is not None and base else None
                below.append((entry.inode, made.inode, 0 if known is None else known.inode))
        self.tree.database.commit(batch)
        self.counts.files += len(files)
        self.counts.bytes += sum(entry.size for entry in files)
        return below[::-1]

    def _find_sources(self, files: Sequence[Entry], prefix: str) -> list[Source]:
        """The object of each file. Raises LakeError."""
        rows = self._lake.tree.objects.get_many([entry.place for entry in files])
        found: list[Source] = []
        for entry, row in zip(files, rows, strict=True):
            path = prefix + entry.name.decode("utf-8", "surrogatepass")
            if entry.place and row is None:
                raise LakeError(f"the object of {path} is not known: see what fsck says")
            found.append((path, entry.etag, entry.size) if row is None else (row.key, row.etag, row.size))
        return found

    def _find_copies(self, files: Sequence[Entry], sources: Sequence[Source], base: int) -> list[Source]:
        """The objects, those that have to be copied replaced by copies that the base has."""
        objects = list(sources)
        wanted = [at for at, (key, _, _) in enumerate(sources) if not key.startswith(RESERVED_PREFIX)]
        if self._base is not None and base:
            known = self._base.named_many([(base, files[at].name) for at in wanted])
            rows = self._base.objects.get_many([entry.place if entry else 0 for entry in known])
            for at, entry, row in zip(list(wanted), known, rows, strict=True):
                _, etag, size = sources[at]
                is_copy = row is not None and row.key.startswith(OBJECTS)
                if entry is not None and row is not None and is_copy and (entry.etag, entry.size) == (etag, size):
                    objects[at] = row.key, row.etag, row.size
                    wanted.remove(at)
                    self.counts.reused += 1
        self.counts.copies_wanted += len(wanted)
        self.counts.bytes_wanted += sum(sources[at][2] for at in wanted)
        return objects

    @staticmethod
    def _copied_etags(sources: Sequence[Source], objects: Sequence[Source]) -> list[str]:
        return ["" if before == after else before[1] for before, after in zip(sources, objects, strict=True)]

    def find_unnamed(self) -> str:
        """Why some hidden object may be deleted: no name of the lake means it any more. Empty where there is none."""
        for row in self.tree.objects.rows():
            is_named = row.number in self._copies or self._lake.references(row.key, row.etag)
            if row.key.startswith(OBJECTS) and not is_named:
                return f"{row.key} has no name in the lake any more"
        return ""

    # -- copies

    async def copy_objects(self) -> None:
        """Have the store copy every object that others may replace. Raises LakeError; `changed` says where it could
        not."""
        if not self.counts.copies_wanted:
            return
        files = ((path, entry) for path, entry in self.tree.below(ROOT_INODE, "") if entry.place)
        while some := list(islice(files, NAMES_PER_STEP)):
            rows = self.tree.objects.get_many([entry.place for _, entry in some])
            wanted = [
                (path, entry, row)
                for (path, entry), row in zip(some, rows, strict=True)
                if row is not None and not row.key.startswith(RESERVED_PREFIX)
            ]
            await self._copy(wanted)

    async def _copy(self, wanted: Sequence[tuple[str, Entry, ObjectRow]]) -> None:
        made: dict[int, Source] = {}

        async def copy(each: tuple[str, ObjectRow]) -> None:
            path, row = each
            try:
                key = f"{OBJECTS}{self._ids.getrandbits(ID_BITS):032x}"
                meta = await copy_object(self._lake.client, row.key, row.etag, row.size, key)
            except (NotFound, PreconditionFailed):
                self.changed = path
                return
            made[row.number] = key, meta.etag, row.size
            counts = self.counts
            counts.copies, counts.bytes_copied = counts.copies + 1, counts.bytes_copied + row.size
            self._progress(
                Progress(
                    what="copying in the store", files_done=counts.copies, bytes_done=counts.bytes_copied,
                    files_total=counts.copies_wanted, bytes_total=counts.bytes_wanted,
                )
            )  # fmt: skip

        await for_each(list({row.number: (path, row) for path, _, row in wanted}.values()), copy, COPIES_AT_ONCE)
        copied = [(entry, row) for _, entry, row in wanted if row.number in made]
        numbers = self.tree.objects.numbers([made[row.number] for _, row in copied])
        batch = Batch()
        self.tree.update_files(
            batch,
            [
                (entry, structs.replace(entry, place=number, offset=0, etag=row.etag))
                for (entry, row), number in zip(copied, numbers, strict=True)
            ],
        )
        self.tree.database.commit(batch)
