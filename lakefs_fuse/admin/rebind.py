"""`fsck --rebind`: names the ETags that objects have now, after other tools have copied or re-encrypted the lake.

Commits, indexes and snapshots name versions by ETag, which a copy of a multipart object, or another encryption,
changes. The commands that write here are `Relocate` (the same place, another ETag), `Remove` and `Symlink` (another
object is hidden). An object is taken for the version that a name means if it has the size, if nothing else explains
what lies at its key, and if its checksum does not say otherwise: the CRC-32 of every file of a pack; of other objects
the old ETag, where that is an MD5. With ``quick`` only sizes are compared.

What always holds:

* *no version guessed*: where names mean several versions of one key, only a checksum decides, else nothing is changed;
* *nothing newer than the commits*: dates of a copy say nothing, so an object at the key of a name that commits removed,
  or whose bytes they placed elsewhere, counts as older. It is hidden and reported, not deleted. If the ETags of objects
  stored in one piece are the same as before, one that a removal does not name stays visible, as before;
* *bounded memory*: `OBJECTS_MAX` changed objects at a time.

Snapshots come first, because the names of the lake tell which version of a plain object lay at its key. Killed at any
time: what was written is in effect, and a second run continues. Tasks of one trio loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import trio

from lakefs_fuse.admin.checkpoint_sums import Verdict, etag_check
from lakefs_fuse.admin.lake_view import LakeView, scratch_directory
from lakefs_fuse.admin.relocation import RelocationBuilder
from lakefs_fuse.admin.snapshot import fold
from lakefs_fuse.admin.snapshot_rows import snapshot_rows
from lakefs_fuse.admin.work import NS, Report
from lakefs_fuse.commits.archive_check import Fault, verify
from lakefs_fuse.commits.hybrid_clock import WINDOW_NS
from lakefs_fuse.commits.index import index, snapshots
from lakefs_fuse.commits.record import OWN, THIS, ObjectRef, Record, Relocate, Remove, SetAttr, Symlink
from lakefs_fuse.config import MIB
from lakefs_fuse.errors import LakeError, NotFound, PreconditionFailed
from lakefs_fuse.meta import sorted_tables as tables
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.object_table import ObjectRow, is_pack_key
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.protocol import Buffer, ObjectMeta
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.vfs.namespace.attributes import learn
from lakefs_fuse.vfs.namespace.key_mapping import path_of_key

OBJECTS_MAX = 100_000
"""Changed objects in memory, some 300 bytes each; for each group of this many all names are read once."""
NAMES_AT_ONCE = 1000
OPERATIONS_MAX = 10_000
"""In one commit."""
VERIFIED_AT_ONCE = 4
"""Each holds `READ_BYTES`."""
READ_BYTES = 8 * MIB
HEADS_AT_ONCE = 16
MARKER_S = 2.0
"""Markers of directories count by their dates, which stores round to the second."""

Note = Callable[[str], None]


@dataclass(slots=True)
class Rebound:
    """Result of a run, or of a dry run. Names of the fields are final: scripts read them.

    ``objects`` have another ETag than names say; ``files`` and ``snapshots`` were pointed at them. ``unverified``
    objects were taken by their size; ``left`` were not taken, and ``hidden`` are plain objects that would show: the
    notes name both."""

    objects: int = 0
    files: int = 0
    unverified: int = 0
    left: int = 0
    hidden: int = 0
    snapshots: int = 0
    bytes_read: int = 0
    index: str = ""

    def summary(self) -> dict[str, object]:
        """The result for scripts."""
        values: dict[str, object] = msgspec.to_builtins(self)
        return values

    def describe(self, *, dry_run: bool) -> str:
        """The result as text for users."""

        def with_verb(count: int, noun: str) -> str:
            verb = "would be" if dry_run else "was" if count == 1 else "were"
            return f"{counted(count, noun)} {verb}"

        if not (self.objects or self.snapshots or self.hidden or self.left):
            return "every object has the ETag that the lake names: nothing to rebind"
        has = counted(self.objects, "object has another ETag", "objects have other ETags")
        lines = [f"{has}: {with_verb(self.files, 'file')} pointed there"]
        if self.snapshots:
            lines.append(f"{with_verb(self.snapshots, 'snapshot')} rewritten")
        if self.unverified:
            unverified = counted(self.unverified, "of the objects was", "of the objects were")
            lines.append(f"{unverified} compared by size only, without a checksum")
        if self.hidden:
            lines.append(
                f"{with_verb(self.hidden, 'object')} hidden, of files that were removed or replaced; "
                "to keep one, copy it to another key before gc deletes it"
            )
        if self.left:
            left = counted(self.left, "object was left as it is", "objects were left as they are")
            lines.append(f"{left}: copy what is left again, and run this again")
        if self.index:
            lines.append(f"index {self.index} written")
        return "\n".join(lines)


class Rebinder:
    """One run on a lake that is mounted nowhere."""

    def __init__(
        self,
        lake: LakeView,
        *,
        quick: bool,
        dry_run: bool,
        report: Report,
        note: Note,
        sleep: Callable[[float], Awaitable[None]] = trio.sleep,
    ) -> None:
        self._lake, self._quick, self._dry_run = lake, quick, dry_run
        self._report, self._note, self._sleep = report, note, sleep
        self.done = Rebound()
        self._verdicts = OrderedDict[tuple[str, str], bool]()
        """Whether an object is the version with this key and old ETag; the newest `OBJECTS_MAX`."""
        self._whole_same = self._whole_changed = 0
        """Objects stored in one piece whose ETags are as named, and those whose are not."""
        self._builder = RelocationBuilder()
        self._has_hidden = False

    async def run(self) -> Rebound:
        """Raises LakeError; what was committed by then stays, and another run continues."""
        lake = self._lake
        if lake.refused:
            raise LakeError("some commits cannot be read, so nobody knows which versions are meant: run fsck first")
        for name in await snapshots.names(lake.client):
            await self._rebind_snapshot(name)
        while await self._repeat_conditional():
            pass  # a relocation that applies now may be the source of another
        await self._rebind_elsewhere()
        await self._rebind_own()
        await self._commit()
        if self.done.files or self._has_hidden:
            await self._write_index()
        return self.done

    async def _write_index(self) -> None:
        if self._dry_run or not await index.find(self._lake.client):
            return
        self.done.index = f"{(await fold(self._lake, report=self._report)).time:016x}"

    # -- changes of files in packs

    async def _repeat_conditional(self) -> int:
        """Commit again the newest changes of attributes, and relocations, of files in packs that name a pack by its old
        ETag, and so do not apply to what the pack itself says; how many. Raises LakeError."""
        lake, count = self._lake, 0
        said: set[str] = set()
        for meta in sorted(await lake.list_commits(), key=lambda meta: meta.key, reverse=True):
            record, this = await lake.log.fetch(meta), ObjectRef(meta.key, meta.etag, meta.size)
            for operation in reversed(record.operations):
                if not isinstance(operation, SetAttr | Relocate) or operation.path in said:
                    continue
                again = self._repetition(operation, record, this)
                if again is not None:
                    count += 1
                    said.add(operation.path)
                    self._builder.operations.append(again)
            if len(said) >= OPERATIONS_MAX:
                await self._commit()
                said.clear()
        self.done.files += count
        await self._commit()
        return 0 if self._dry_run else count

    def _repetition(self, operation: SetAttr | Relocate, record: Record, this: ObjectRef) -> SetAttr | Relocate | None:
        """The operation with the present ETag of the pack, if the file is still in it and nothing later was said."""
        index, offset = operation.object, operation.offset
        if isinstance(operation, Relocate):
            index, offset = operation.from_object, operation.from_offset
        objects = [this, *record.objects[1:]]
        ref = objects[index] if index > THIS else ObjectRef()
        entry = self._lake.find(operation.path) if is_pack_key(ref.key) else None
        row = self._lake.tree.objects.get(entry.place) if entry is not None and entry.place else None
        if entry is None or row is None or (row.key, entry.offset, entry.size) != (ref.key, offset, operation.size):
            return None
        if row.etag == ref.etag or row.size != ref.size or record.time < entry.stamp:
            return None
        here = self._builder.index(ObjectRef(row.key, row.etag, row.size))
        if isinstance(operation, Relocate):
            target = None if operation.object == OWN else objects[operation.object]
            if target is not None and target.key == row.key:
                return None  # of an earlier run
            number = OWN if target is None else self._builder.index(target)
            return msgspec.structs.replace(operation, from_object=here, object=number)
        if entry.flags & Flag.ATTRIBUTED and entry.ctime_ns >= record.time:
            return None
        return msgspec.structs.replace(operation, object=here)

    # -- bytes elsewhere: packs, and objects at the keys of earlier names

    async def _rebind_elsewhere(self) -> None:
        targets: dict[int, ObjectRef] = {}

        async def check(meta: ObjectMeta) -> None:
            for row in await self._rebindable(self._lake.tree, meta):
                targets[row.number] = ObjectRef(meta.key, meta.etag, meta.size)
                self.done.objects += 1

        async for page in self._lake.client.list_all(""):
            self._count_whole(page.objects)
            await for_each(page.objects, check, VERIFIED_AT_ONCE)
            if len(targets) >= OBJECTS_MAX:
                await self._point_at(targets)
        await self._point_at(targets)

    def _count_whole(self, metas: Iterable[ObjectMeta]) -> None:
        """Count named plain objects in one piece by whether their ETags are as before."""
        for meta in metas:
            if meta.key.startswith(RESERVED_PREFIX) or "-" in meta.etag:
                continue
            entry = self._lake.entry_at(meta.key)
            named = [row.etag for row in self._lake.tree.objects.versions(meta.key) if row.entries > 0]
            if entry is not None and entry.is_plain and _is_told(entry):
                named.append(entry.etag)
            if meta.etag in named:
                self._whole_same += 1
            elif any(etag and "-" not in etag for etag in named):
                self._whole_changed += 1

    async def _rebindable(self, tree: Tree, meta: ObjectMeta) -> list[ObjectRow]:
        """The versions of this key with names that the object is, although it has another ETag."""
        named = [row for row in tree.objects.versions(meta.key) if row.entries > 0 and row.size == meta.size]
        changed = [row for row in named if row.etag != meta.etag]
        if not changed:
            return []
        own = None if meta.key.startswith(RESERVED_PREFIX) else self._lake.entry_at(meta.key)
        is_own = own is not None and own.is_plain and _is_told(own) and own.size == meta.size
        is_sole = meta.key.startswith(RESERVED_PREFIX) or (len(named) == 1 and not is_own)
        return [row for row in changed if await self._is_version(meta, row.etag, is_sole=is_sole)]

    async def _point_at(self, targets: dict[int, ObjectRef]) -> None:
        """Commit that files whose bytes are in these objects, by number, are in the other versions; empties it."""
        found: list[tuple[str, Entry, ObjectRef]] = []
        for path, entry in self._lake.files() if targets else ():
            target = targets.get(entry.place) if entry.place else None
            if target is not None:
                found.append((path, entry, target))
            if len(found) >= NAMES_AT_ONCE:
                await self._relocate(found)
                found = []
        await self._relocate(found)
        await self._commit()
        targets.clear()

    async def _relocate(self, found: list[tuple[str, Entry, ObjectRef]]) -> None:
        """Relocate files to other versions of the objects that they are in."""
        learned = list(found)

        async def learn_one(at: int) -> None:
            path, entry, target = found[at]
            learned[at] = path, await self._learn(entry, target), target

        await for_each(range(len(found)), learn_one, HEADS_AT_ONCE)
        for path, entry, target in learned:
            self.done.files += 1
            if self._dry_run:
                continue
            source = self._lake.namespace.extent(entry)
            if source is None:
                continue
            if entry.place:
                self._builder.add(path, entry, source, self._builder.index(target), entry.offset, entry.etag)
            else:
                self._builder.add(path, entry, source, OWN, 0, target.etag)
        self._report("rebinding", self.done.files, self.done.bytes_read)
        await self._commit_if_full()

    async def _learn(self, entry: Entry, target: ObjectRef) -> Entry:
        """The entry with the attributes in the metadata of its plain object, where no commit has any."""
        if entry.flags & Flag.ATTRIBUTES_KNOWN or is_pack_key(target.key) or self._dry_run:
            return entry
        try:
            meta = await self._lake.client.head(target.key)
        except NotFound:
            return entry
        return learn(entry, meta.metadata or {})

    async def _commit_if_full(self) -> None:
        if len(self._builder.operations) >= OPERATIONS_MAX:
            await self._commit()

    async def _commit(self) -> None:
        builder, self._builder = self._builder, RelocationBuilder()
        if not self._dry_run:
            await builder.commit(self._lake)

    # -- plain objects at the keys of names

    async def _rebind_own(self) -> None:
        async for page in self._lake.client.list_all(""):
            changed: list[tuple[str, Entry, ObjectRef]] = []
            for meta in page.objects:
                if meta.key.startswith(RESERVED_PREFIX):
                    continue
                entry = self._lake.entry_at(meta.key)
                if entry is None:
                    await self._hide_removed(meta)
                elif not entry.is_plain:
                    await self._hide_below(meta, entry)
                elif await self._is_own_changed(meta, entry):
                    changed.append((meta.key, entry, ObjectRef(meta.key, meta.etag, meta.size)))
            self.done.objects += len(changed)
            await self._relocate(changed)

    async def _is_own_changed(self, meta: ObjectMeta, entry: Entry) -> bool:
        """A commit says something of the plain object at the key of a name, which has another ETag now."""
        if not _is_told(entry) or entry.etag == meta.etag or entry.size != meta.size:
            return False
        is_sole = self._lake.tree.objects.used(meta.key) is None
        return await self._is_version(meta, entry.etag, is_sole=is_sole)

    async def _hide_below(self, meta: ObjectMeta, entry: Entry) -> None:
        """Hide the plain object at the key of a file whose bytes are elsewhere, or of a link, by its present ETag."""
        if entry.etag == meta.etag or meta.mtime_ns + NS <= entry.stamp:
            return
        self._report_hidden(meta)
        if self._dry_run:
            return
        tree = self._lake.tree
        if entry.flags & Flag.SYMLINK:
            target = tree.target(entry.inode).decode("utf-8", "surrogateescape")
            xattrs = tree.xattrs(entry.inode) if entry.flags & Flag.XATTRS else {}
            self._builder.operations.append(
                Symlink(meta.key, target, entry.uid, entry.gid, entry.mtime_ns, hides=meta.etag, xattrs=xattrs)
            )
        elif (source := self._lake.namespace.extent(entry)) is not None:
            version = source.version
            here = self._builder.index(ObjectRef(version.key, version.etag, version.size))
            self._builder.add(meta.key, entry, source, here, entry.offset, meta.etag)
        await self._commit_if_full()

    async def _hide_removed(self, meta: ObjectMeta) -> None:
        """Remove a name again whose object, or marker, would show."""
        path = path_of_key(meta.key)
        is_marker = path.endswith("/")
        tombstone = self._lake.tree.tombstones.get(path.encode("utf-8", "surrogatepass"))
        path = path.removesuffix("/")
        if tombstone is None or (is_marker and self._lake.find(path, b"/") is not None):
            return
        if is_marker:
            if meta.mtime_ns + NS <= tombstone.stamp:
                return
            left_s = MARKER_S - (self._lake.clock.wall_ns() - meta.mtime_ns) / NS
            if left_s > 0 and not self._dry_run:
                await self._sleep(left_s)
        else:
            is_same = bool(tombstone.when_gone(meta.etag))
            if tombstone.hides(meta.etag, meta.mtime_ns) or (not is_same and self._is_another(tombstone.etag)):
                return
        self._report_hidden(meta)
        if not self._dry_run:
            self._builder.operations.append(Remove(path, is_marker, "" if is_marker else meta.etag))
            await self._commit_if_full()

    def _is_another(self, removed: str) -> bool:
        """An object with another ETag than the removed one is another version, as ETags in one piece are as before."""
        is_whole = bool(removed) and "-" not in removed
        return is_whole and self._whole_same > 0 and not self._whole_changed

    def _report_hidden(self, meta: ObjectMeta) -> None:
        self._has_hidden = True
        if self._lake.tree.objects.used(meta.key) is not None:
            return  # it is the file of another name
        self.done.hidden += 1
        self._note(f"hidden: {meta.key}: commits removed or replaced this name")

    # -- which version an object is

    async def _is_version(self, meta: ObjectMeta, etag: str, *, is_sole: bool) -> bool:
        """Whether the object is the version that had this ETag. ``is_sole``: names mean no other version of the key,
        so the size suffices where no checksum covers it. Raises LakeError."""
        known = self._verdicts.get((meta.key, etag))
        if known is not None:
            return known
        verdict = Verdict.UNKNOWN
        if not self._quick:
            is_pack = is_pack_key(meta.key)
            verdict = await (self._check_pack(meta) if is_pack else self._check_etag(meta, etag))
        is_version = verdict is Verdict.RIGHT or (verdict is Verdict.UNKNOWN and is_sole)
        self.done.unverified += is_version and verdict is Verdict.UNKNOWN
        if not is_version:
            self.done.left += 1
            self._note(f"left as it is: {meta.key}: {_why_left(meta, etag, verdict)}")
        self._verdicts[meta.key, etag] = is_version
        if len(self._verdicts) > OBJECTS_MAX:
            self._verdicts.popitem(last=False)
        return is_version

    async def _fetch(self, meta: ObjectMeta, start: int, end: int) -> Buffer:
        data = (await self._lake.client.get(meta.key, start, end, etag=meta.etag)).data
        self.done.bytes_read += len(data)
        return data

    async def _check_pack(self, meta: ObjectMeta) -> Verdict:
        async def fetch(start: int, end: int) -> Buffer:
            return await self._fetch(meta, start, end)

        try:
            audit = await verify(meta.key, meta.size, fetch)
        except (NotFound, PreconditionFailed):
            return Verdict.WRONG
        is_damaged = any(problem.fault is not Fault.DIRECTORY for problem in audit.problems)
        return Verdict.WRONG if is_damaged else Verdict.RIGHT

    async def _check_etag(self, meta: ObjectMeta, etag: str) -> Verdict:
        """Compare with the old ETag where it is an MD5; how another program has cut parts is guessed, so that a
        mismatch of those proves nothing."""
        check = etag_check(etag, meta.size, ours=False)
        if check is None:
            return Verdict.UNKNOWN
        try:
            for at in range(0, meta.size, READ_BYTES):
                check.feed(memoryview(await self._fetch(meta, at, min(meta.size, at + READ_BYTES))))
        except (NotFound, PreconditionFailed):
            return Verdict.WRONG
        verdict = check.finish().verdict
        return Verdict.UNKNOWN if verdict is Verdict.WRONG and "-" in etag else verdict

    # -- named snapshots

    async def _rebind_snapshot(self, name: str) -> None:
        """Write the rows of a snapshot with the present ETags, if some differ. Raises LakeError."""
        lake = self._lake
        try:
            manifest = await snapshots.fetch_manifest(lake.client, name)
        except NotFound:
            return  # it was never finished
        with scratch_directory(lake.node, lake.scratch) as scratch:
            rows = snapshot_rows(lake.client, lake.node, name, manifest, scratch)
            async with rows as database:
                if not await self._rebind_rows(database):
                    return
                self.done.snapshots += 1
                if self._dry_run:
                    return
                dump = tables.Dump(
                    database,
                    tables.empty_directory(Path(scratch) / "written"),
                    applied_since=manifest.newest - 2 * WINDOW_NS,
                    files_before=1 + max((int(file.name[:-4]) for file in manifest.files), default=-1),
                )
                try:
                    await snapshots.replace(lake.client, lake.node.threads, name, manifest, dump)
                finally:
                    dump.close()

    async def _rebind_rows(self, database: Database) -> int:
        """Give the rows of a snapshot the present ETags; how many were changed."""
        tree, count = Tree(database), 0
        async for page in self._lake.client.list_all(""):
            for meta in page.objects:
                batch = Batch()
                for row in await self._rebindable(tree, meta):
                    if self._is_meant(row.key, row.etag) and tree.objects.find(meta.key, meta.etag) is None:
                        tree.objects.rename(batch, row, meta.etag)
                        count += 1
                entry = tree.resolve([name.encode("utf-8", "surrogatepass") for name in meta.key.split("/")])
                if entry is not None and await self._is_row_changed(meta, entry):
                    tree.update_files(batch, [(entry, _with_etag(entry, meta.etag))])
                    count += 1
                database.commit(batch)
        return count

    async def _is_row_changed(self, meta: ObjectMeta, entry: Entry) -> bool:
        if not entry.is_plain or entry.etag == meta.etag or entry.size != meta.size:
            return False
        return self._is_meant(meta.key, entry.etag) and await self._is_version(meta, entry.etag, is_sole=True)

    def _is_meant(self, key: str, etag: str) -> bool:
        """A key of ours has one version only; of another, the names of the lake tell which version was there last."""
        if key.startswith(RESERVED_PREFIX) or self._lake.references(key, etag):
            return True
        entry = self._lake.entry_at(key)
        return entry is not None and entry.is_plain and entry.etag == etag


def _is_told(entry: Entry) -> bool:
    """A commit says something of this plain object; a listing tells all there is to others."""
    return bool(entry.stamp or entry.flags & Flag.ATTRIBUTED)


def _with_etag(entry: Entry, etag: str) -> Entry:
    return msgspec.structs.replace(entry, etag=etag)


def _why_left(meta: ObjectMeta, etag: str, verdict: Verdict) -> str:
    if verdict is Verdict.UNKNOWN:
        return "names mean several versions of it, and no checksum tells which this is"
    if is_pack_key(meta.key):
        return "files in it do not have their CRC-32 (if the source is damaged as well, use --quick)"
    return f"its MD5 is not the ETag {etag} that names have (if the source is encrypted with KMS, use --quick)"
