"""`pack`, `unpack` and `relocate`: move small plain objects into packs, files of packs into plain objects, and renamed
objects to the keys of their names.

What always holds (*same files*): names, inodes, attributes and open handles stay as they are, and mounts continue to
read.

Pack: objects are read at one ETag, stored in packs with a commit each (`relocation`), and deleted after a grace period
in which mounts apply the commits (`superseded_objects`), if they were unreferenced for all of it. What mounts
superseded is left to them, and to `gc`. An object in place of bytes that a commit names is left until a commit names
it: mounts that have not listed it would not apply its relocation, and it would be lost. Killed before a commit: nothing
happened. Between a commit and the deletions: objects that every mount hides, which a second run or `gc` deletes. A
second run completes the work.

Unpack and relocate: each file is put, or its object copied by the store, as a plain object at its own key, if there is
none; then one commit relocates many of them. Killed in between: these objects are copies that do not count (`is_copy`),
which a second run names; those that `relocate` has the store copy in one request count as new objects of another
program, with the same bytes and attributes. The relocation of a file that was changed meanwhile has no effect, but that
its object is hidden. That stays until `gc` (*listed objects stay*): a mount may have listed it, and given it another
name. So do renamed objects at their old keys, and a file at whose own key a hidden object is stays where it is.

A file whose plain object a named snapshot needs is neither packed nor relocated: `pack`, or `gc` after `relocate`,
would delete the object.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Container, Sequence
from contextlib import aclosing, nullcontext
from dataclasses import dataclass, field, replace

import trio

from lakefs_fuse.admin.extent_reader import CHUNK_BYTES, Bytes, ExtentReader, Moving
from lakefs_fuse.admin.lake_view import LakeView
from lakefs_fuse.admin.relocation import Moved, RelocationBuilder, Relocator
from lakefs_fuse.admin.snapshot_rows import SnapshotNames, open_snapshot_names
from lakefs_fuse.admin.superseded_objects import Swept, delete, hidden_since, sweep
from lakefs_fuse.admin.work import Report
from lakefs_fuse.commits.index import snapshots
from lakefs_fuse.commits.record import OWN
from lakefs_fuse.config import DELETE_AFTER_S, MIB
from lakefs_fuse.errors import KeyRefused, NotFound, PreconditionFailed, Unsupported
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.quantity import counted
from lakefs_fuse.store.client import copy_metadata, is_copy_of, token_of
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.store.server_copy import copy_object
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.vfs.namespace.attributes import describe

THRESHOLD_BYTES = 1 * MIB
GRACE_S = DELETE_AFTER_S
"""As mounts keep the objects that they supersede: within this time, one that has not seen the commit may name them."""
CLOCK_S = 0.1
"""Maximum difference of two clocks over one grace period."""
PUTS_AT_ONCE = 8
HEADS_AT_ONCE = 16
BATCH_FILES = 1000
ELSEWHERE_MAX = 100_000
"""Objects of renamed files that one run deletes; `gc` finds the others."""

Note = Callable[[str], None]
NOTES_MAX = 20


@dataclass(slots=True)
class Packed:
    """Result of `pack`, or of a dry run. ``kept`` counts files that named snapshots, of which ``snapshot`` is one, have
    as plain objects."""

    moved: Moved = field(default_factory=Moved)
    swept: Swept = field(default_factory=Swept)
    kept: int = 0
    snapshot: str = ""

    def summary(self) -> dict[str, object]:
        """The result for scripts; names are final."""
        return {
            "files": self.moved.files,
            "bytes": self.moved.bytes,
            "packs": self.moved.packs,
            "left": self.moved.left,
            "kept": self.kept,
            "objects_deleted": self.swept.objects,
            "bytes_deleted": self.swept.bytes,
            "objects_not_deleted": self.swept.failed,
        }

    def describe(self, *, dry_run: bool) -> str:
        """The result as text for users."""
        if dry_run:
            return (
                f"{counted(self.moved.files, 'file')} of {counted(self.moved.bytes, 'byte')} would be packed; "
                f"{counted(self.swept.objects, 'superseded object')} would be deleted{self._describe_kept()}"
            )
        files = counted(self.moved.files, "file")
        verb = "is" if self.moved.files == 1 else "are"
        text = f"{files} of {counted(self.moved.bytes, 'byte')} {verb} in {counted(self.moved.packs, 'pack')} now; "
        text += f"{counted(self.swept.objects, 'plain object')} of packed files deleted"
        if self.moved.left:
            left = counted(self.moved.left, "file that changed meanwhile was", "files that changed meanwhile were")
            text += f"; {left} left"
        text += self._describe_kept()
        return text + (f"; {counted(self.swept.failed, 'object')} could not be deleted" if self.swept.failed else "")

    def _describe_kept(self) -> str:
        if not self.kept:
            return ""
        stay = counted(self.kept, "stays a plain object", "stay plain objects")
        return f"; {stay}, as snapshot {self.snapshot} needs them: delete the snapshot, or keep a dataset in its place"


async def pack(
    lake: LakeView,
    path: str,
    *,
    threshold_bytes: int = THRESHOLD_BYTES,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    report: Report,
    sleep: Callable[[float], Awaitable[None]] = trio.sleep,
) -> Packed:
    """Raises LakeError; what was committed by then stays."""
    packed = Packed()
    elsewhere: list[ObjectMeta] = []
    count = size = left = 0
    relocator = Relocator(lake, report=lambda moved: report("packing", moved.files, moved.bytes))
    async with open_snapshot_names(lake, report) as named, aclosing(lake.listed_files(path)) as files:
        async for name, entry in files:
            if not _is_small_plain(lake, entry, threshold_bytes):
                continue
            if lake.is_uncommitted(entry):
                left += 1
                continue
            if snapshot := _keeper(lake, named, entry):
                packed.kept, packed.snapshot = packed.kept + 1, snapshot
                continue
            if dry_run:
                count, size = count + 1, size + entry.size
                continue
            extent = await relocator.add(name, entry)
            if extent is not None and entry.place and len(elsewhere) < ELSEWHERE_MAX:
                elsewhere.append(ObjectMeta(extent.version.key, extent.version.size, extent.version.etag, 0))
    prefix, only = (path + "/" if path else ""), ""
    if lake.find(path) is not None and path:
        prefix = only = path
    if dry_run:
        packed.moved = Moved(count, size)
        await sweep(
            lake, prefix, packed.swept, grace_s=grace_s, removed=False, only_packed=True, dry_run=True, only=only
        )
        return packed
    moved = await relocator.finish()
    packed.moved = replace(moved, left=moved.left + left)
    elsewhere = await _find_unreferenced(lake, elsewhere)  # of others the last name may end during the grace period
    if packed.moved.packs and grace_s:
        report("waiting for the grace period", packed.moved.files, packed.moved.bytes)
        await sleep(grace_s)
    await sweep(lake, prefix, packed.swept, grace_s=grace_s, removed=False, only_packed=True, only=only)
    if packed.swept.young:
        await sleep(packed.swept.wait_s + CLOCK_S)
        await sweep(lake, prefix, packed.swept, grace_s=grace_s, removed=False, only_packed=True, only=only)
    await _delete_elsewhere(lake, elsewhere, packed.swept)
    return packed


def _is_small_plain(lake: LakeView, entry: Entry, threshold_bytes: int) -> bool:
    is_small = not entry.flags & (Flag.SYMLINK | Flag.LOCAL) and entry.size <= threshold_bytes
    return is_small and not lake.is_in_pack(entry)


def _keeper(lake: LakeView, named: SnapshotNames, entry: Entry) -> str:
    """The snapshot that has the file's bytes as a plain object; empty for none."""
    extent = lake.extent(entry)
    return "" if extent is None else named.find(extent.version.key, extent.version.etag)


async def _find_unreferenced(lake: LakeView, objects: Sequence[ObjectMeta]) -> list[ObjectMeta]:
    """Those of the old objects of packed files that nothing refers to, each once; none while a commit cannot be
    read."""
    await lake.refresh()
    kept: Container[str] = await snapshots.kept_objects(lake.client) if objects else ()

    def is_unreferenced(meta: ObjectMeta) -> bool:
        if lake.refused or meta.key in kept or lake.references(meta.key, meta.etag):
            return False
        entry = lake.entry_at(meta.key)
        return entry is None or not entry.is_plain or entry.etag != meta.etag

    return [meta for meta in {(meta.key, meta.etag): meta for meta in objects}.values() if is_unreferenced(meta)]


async def _delete_elsewhere(lake: LakeView, objects: Sequence[ObjectMeta], swept: Swept) -> None:
    """Delete old objects of packed files, which were unreferenced when the grace period began, if they are now."""
    there: list[ObjectMeta] = []

    async def check(meta: ObjectMeta) -> None:
        found = await lake.client.find(meta.key)
        if found is not None and found.etag == meta.etag:
            there.append(meta)

    await for_each(objects, check, HEADS_AT_ONCE)
    await delete(lake, await _find_unreferenced(lake, there), swept, dry_run=False)


# -- back


@dataclass(slots=True)
class Unpacked:
    """Result of `unpack` or `relocate`, or of a dry run. ``left`` counts files that stay where they are; notes say
    why. ``old_keys``: files were copied away from the keys of earlier names."""

    files: int = 0
    bytes: int = 0
    left: int = 0
    old_keys: bool = False

    def summary(self) -> dict[str, object]:
        """The result for scripts; names are final."""
        return {"files": self.files, "bytes": self.bytes, "left": self.left}

    def describe(self, *, dry_run: bool) -> str:
        """The result as text for users."""
        verb = "would be" if dry_run else "is" if self.files == 1 else "are"
        what = "a plain object at its own key" if self.files == 1 else "plain objects at their own keys"
        text = f"{counted(self.files, 'file')} of {counted(self.bytes, 'byte')} {verb} {what}"
        left = counted(self.left, "stays where it is", "stay where they are")
        text += ("" if dry_run else " now") + (f"; {left}" if self.left else "")
        return text + ("; `lakefs-fuse gc` deletes the objects at the old keys" if self.old_keys else "")


async def unpack(
    lake: LakeView, path: str, *, packed: bool = True, dry_run: bool = False, report: Report, note: Note
) -> Unpacked:
    """Move files to plain objects at their own keys: those of packs, or (not ``packed``) those whose objects are at the
    keys of earlier names. Raises LakeError; what was committed by then stays."""
    work = _Unpack(lake, report, note, is_relocation=not packed)
    batch: list[Moving] = []
    size = 0
    opening = nullcontext(SnapshotNames([])) if packed else open_snapshot_names(lake, report)
    async with opening as named, aclosing(lake.listed_files(path)) as files:
        async for name, entry in files:
            is_meant = bool(entry.place) and lake.is_in_pack(entry) == packed
            extent = lake.extent(entry) if is_meant else None
            if extent is None or (not packed and not extent.is_whole):
                continue
            if not packed and (snapshot := named.find(extent.version.key, extent.version.etag)):
                work.leave(name, f"snapshot {snapshot} needs the object at its old key")
                continue
            if dry_run:
                work.done.files += 1
                work.done.bytes += entry.size
                continue
            if batch and ((packed and size + entry.size > CHUNK_BYTES) or len(batch) >= BATCH_FILES):
                await work.put(batch)
                batch, size = [], 0
            batch.append(Moving(name, entry, extent))
            size += entry.size
    if batch:
        await work.put(batch)
    return work.done


class _Unpack:
    """Writes plain objects, and commits the relocations."""

    def __init__(self, lake: LakeView, report: Report, note: Note, *, is_relocation: bool) -> None:
        self._lake, self._report, self._note, self._is_relocation = lake, report, note, is_relocation
        self._reader = ExtentReader(lake.client)
        self.done = Unpacked()

    async def put(self, files: Sequence[Moving]) -> None:
        """Raises LakeError."""
        data = [None] * len(files) if self._is_relocation else await self._reader.read(files)
        put: list[tuple[Moving, ObjectMeta]] = []

        async def put_one(read: tuple[Moving, Bytes | None]) -> None:
            file, found = read
            if found is None and not self._is_relocation:
                self.leave(file.path, "its bytes are damaged or gone: run fsck")
            elif not self._is_current(file):
                self.leave(file.path, "it was changed meanwhile")
            elif meta := await self._put(file, None if found is None else found.data):
                put.append((file, meta))

        await self._lake.refresh()
        await for_each(zip(files, data, strict=True), put_one, PUTS_AT_ONCE)
        await self._commit(put)
        self._report("relocating" if self._is_relocation else "unpacking", self.done.files, self.done.bytes)

    def _is_current(self, file: Moving) -> bool:
        now = self._lake.find(file.path)
        return now is not None and (now.place, now.offset, now.size) == (
            file.entry.place, file.entry.offset, file.entry.size,
        )  # fmt: skip

    async def _put(self, file: Moving, raw: bytes | None) -> ObjectMeta | None:
        """Put the bytes, or have the store copy the object where there are none."""
        lake, key = self._lake, file.path
        if lake.tree.objects.used(key) is not None:
            self.leave(key, "another name has its bytes in the object at this key")
            return None
        try:
            if not await self._is_free(file):
                return None
            if raw is not None:
                metadata = describe(file.entry) | copy_metadata(key)
                return await lake.client.put(key, raw, metadata=metadata, if_absent=True)
            version = file.source.version
            return await copy_object(lake.client, version.key, version.etag, version.size, key, if_absent=True)
        except NotFound:
            self.leave(key, "its bytes are gone: run fsck")
        except PreconditionFailed:
            return await self._adopted(file, raw)
        except (KeyRefused, Unsupported) as error:
            self.leave(key, str(error))
        return None

    async def _is_free(self, file: Moving) -> bool:
        """Nothing is at the file's own key when this returns, but perhaps what another client puts there. What commits
        hide there is left to mounts and `gc`, which know since when it is unreferenced: a node that has not heard of
        the end of its last name may rename that."""
        there = await self._lake.client.find(file.path)
        if there is None:
            return True
        if hidden_since(self._lake, there, removed=True) is None:
            raise PreconditionFailed(file.path)
        self.leave(file.path, "an older version is at its key: run this again when mounts, or gc, have deleted that")
        return False

    async def _adopted(self, file: Moving, raw: bytes | None) -> ObjectMeta | None:
        """The object at the key, if its bytes are those of the file: a late request, or one of an earlier run."""
        try:
            if raw is None:
                version = file.source.version
                there = await self._lake.client.head(file.path)
                source = await self._lake.client.head(version.key)
                is_same = there.etag == source.etag or (token_of(there) and token_of(there) == token_of(source))
                if (is_same or is_copy_of(there, version.key, version.etag)) and there.size == source.size:
                    return there
            else:
                fetched = await self._lake.client.get(file.path, 0, max(1, len(raw) + 1))
                if fetched.meta.size == len(raw) and bytes(fetched.data) == raw:
                    return fetched.meta
        except NotFound:
            pass
        self.leave(file.path, "another object was put at its key")
        return None

    async def _commit(self, put: Sequence[tuple[Moving, ObjectMeta]]) -> None:
        await self._lake.refresh()
        builder = RelocationBuilder()
        for file, meta in put:
            builder.add(file.path, file.entry, file.source, OWN, 0, meta.etag)  # which hides the copy of a changed one
            if self._is_current(file):
                self.done.old_keys = self._is_relocation
                self.done.files += 1
                self.done.bytes += file.entry.size
            else:
                self.leave(file.path, "it was changed meanwhile")
        await builder.commit(self._lake)

    def leave(self, path: str, why: str) -> None:
        """Count a file that stays where it is, and say why."""
        self.done.left += 1
        if self.done.left <= NOTES_MAX:
            self._note(f"left where it is: {path}: {why}")
