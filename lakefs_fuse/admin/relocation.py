"""Moves the bytes of files into new packs: one commit a pack, with a `Relocate` for each file.

What always holds (*same version*): a file keeps its name, inode, attributes and commit time; the commit changes nothing
of a file that is not at the version that was read, and never names a plain object that was replaced before the commit's
time (the objects are listed again after the time was taken, so whatever replaces one later is dated later, and wins).
Callers delete what a commit supersedes, after it.

A crash before a PUT leaves nothing; after it, a commit that is in effect. Where a commit is in the store late after its
time, by LATE_NS, another, small one says the same, and so on until one is in time, because mounts look for new commits
among those of the last two minutes. Tasks of one trio loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import BinaryIO

from lakefs_fuse.admin.extent_reader import ExtentReader, Moving, chunks
from lakefs_fuse.admin.lake_view import LakeView
from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.commits.archive import ArchiveBuilder, Member, fd_sink
from lakefs_fuse.commits.change import OPERATIONS_AT_ONCE
from lakefs_fuse.commits.hybrid_clock import LATE_NS
from lakefs_fuse.commits.record import COMMITS, OWN, THIS, ObjectRef, Operation, Record, Relocate
from lakefs_fuse.config import MIB
from lakefs_fuse.errors import LakeError, NotFound
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.store.protocol import FileSlice
from lakefs_fuse.sync.nursery import for_each
from lakefs_fuse.vfs.namespace.attributes import learn
from lakefs_fuse.vfs.namespace.operations import ObjectRefs

PACK_BYTES = 64 * MIB
PACK_FILES_MAX = OPERATIONS_AT_ONCE
LISTINGS_AT_ONCE = 16
"""Of the directories of a pack's files, between the time of its commit and the PUT."""


@dataclass(slots=True)
class Moved:
    """Result of a relocation. ``left`` counts files that changed, went, are damaged, or are in no commit yet."""

    files: int = 0
    bytes: int = 0
    packs: int = 0
    bytes_written: int = 0
    left: int = 0
    damaged: int = 0


class RelocationBuilder(ObjectRefs):
    """Builds the operations of one commit, and the objects that they refer to."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def add(self, path: str, entry: Entry, source: Extent, target: int, offset: int, hides: str) -> None:
        """``target`` is an index into ``objects``."""
        version = source.version
        number, from_etag = OWN, version.etag
        if entry.place:
            ref = ObjectRef(version.key, version.etag, version.size)
            number, from_etag = self.index(ref), ""
        self.operations.append(
            Relocate(
                path, number, source.offset, from_etag, target, offset, source.size,
                entry.mode, entry.uid, entry.gid, entry.mtime_ns, hides=hides,
            )
        )  # fmt: skip

    def add_all(self, moved: Sequence[tuple[Moving, int]], target: int) -> RelocationBuilder:
        """Add files with their offsets in the object ``target``."""
        for file, offset in moved:
            self.add(file.path, file.entry, file.source, target, offset, file.entry.etag)
        return self

    async def commit(self, lake: LakeView) -> None:
        """A commit without bytes; its relocations are repeated while one is late (LATE_NS). Raises LakeError."""
        if not self.operations:
            return
        time_ns = await self._put(lake)
        self.operations = [each for each in self.operations if isinstance(each, Relocate)]
        while self.operations and lake.clock.wall_ns() - time_ns > LATE_NS:
            time_ns = await self._put(lake)
        await lake.refresh()

    async def _put(self, lake: LakeView) -> int:
        """Store the commit; returns its time. Raises LakeError."""
        time_ns = await lake.log.latest_time()
        await lake.log.put_record(self.record(lake, time_ns))
        return time_ns

    def record(self, lake: LakeView, time_ns: int) -> Record:
        return Record(writer=lake.log.writer, time=time_ns, objects=self.objects, operations=list(self.operations))


@dataclass(slots=True)
class _Pack:
    file: BinaryIO
    builder: ArchiveBuilder
    moved: list[tuple[Moving, int]] = field(default_factory=list)
    """Files, with their offsets in the new pack."""
    places: dict[Extent, int] = field(default_factory=dict)


class Relocator:
    """Gathers files, and commits a pack whenever one is full; `finish` commits the last."""

    def __init__(self, lake: LakeView, *, report: Callable[[Moved], None]) -> None:
        self._lake, self._report = lake, report
        self._reader = ExtentReader(lake.client)
        self._gathered: list[Moving] = []
        self._bytes = 0
        self.done = Moved()

    async def add(self, path: str, entry: Entry) -> Extent | None:
        """Move a file, unless it has no bytes in the store; where its bytes are. Raises LakeError."""
        source = self._lake.extent(entry)
        if source is None:
            return None
        full = self._bytes + source.size > PACK_BYTES or len(self._gathered) >= PACK_FILES_MAX
        if self._gathered and full:
            await self._flush()
        self._gathered.append(Moving(path, entry, source))
        self._bytes += source.size
        return source

    async def finish(self) -> Moved:
        """Raises LakeError."""
        if self._gathered:
            await self._flush()
        return self.done

    async def _flush(self) -> None:
        files, self._gathered, self._bytes = self._gathered, [], 0
        with _building(self._lake):
            temporary = self._lake.node.disk.temporary_file(self._lake.scratch)
        with temporary as file:
            pack = _Pack(file, ArchiveBuilder(fd_sink(file.fileno())))
            for chunk in chunks(files):
                await self._fill(pack, chunk)
            if pack.moved:
                await self._commit(pack)
        self.done.left += len(files) - len(pack.moved)
        self.done.damaged = self._reader.damaged
        self._report(self.done)

    async def _fill(self, pack: _Pack, files: Sequence[Moving]) -> None:
        fresh = {file.source: index for index, file in enumerate(files) if file.source not in pack.places}
        found = await self._reader.read([files[index] for index in fresh.values()])
        learned = list(files)
        members: list[tuple[Extent, Member]] = []
        for (source, index), read in zip(fresh.items(), found, strict=True):
            if read is None:
                continue
            learned[index] = await self._learn(files[index], read.metadata)
            entry = learned[index].entry
            about = entry.mode, entry.mtime_ns, entry.uid, entry.gid
            members.append((source, Member(files[index].path, read.data, len(read.data), *about)))

        def write() -> None:
            for source, member in members:
                pack.places[source] = pack.builder.add(member)

        with _building(self._lake):
            await self._lake.node.threads.run(write)
        pack.moved += [(file, pack.places[file.source]) for file in learned if file.source in pack.places]

    async def _learn(self, file: Moving, metadata: Mapping[str, str] | None) -> Moving:
        """The file with the attributes in the metadata of its plain object, as a mount shows them."""
        if file.entry.flags & Flag.ATTRIBUTES_KNOWN or file.source.version.key.startswith(COMMITS):
            return file
        if metadata is None or not file.source.size:
            try:
                meta = await self._lake.client.head(file.source.version.key)
            except NotFound:
                return file  # the check before the commit drops it
            metadata = meta.metadata if meta.etag == file.source.version.etag else None
        return file if metadata is None else replace(file, entry=learn(file.entry, metadata))

    async def _commit(self, pack: _Pack) -> None:
        lake = self._lake
        time_ns = await lake.log.latest_time()
        pack.moved = await self._unchanged(pack.moved)
        if not pack.moved:
            return
        record = RelocationBuilder().add_all(pack.moved, THIS).record(lake, time_ns)
        with _building(lake):
            size = await lake.node.threads.run(lambda: pack.builder.finish(lake.log.encode(record)))
        meta = await lake.log.put(lake.log.key(time_ns), FileSlice(pack.file.fileno(), 0, size))
        while lake.clock.wall_ns() - time_ns > LATE_NS:
            time_ns = await self._commit_again(pack, ObjectRef(meta.key, meta.etag, size))
        await lake.refresh()
        self.done.packs += 1
        self.done.bytes_written += size
        self.done.files += len(pack.moved)
        self.done.bytes += sum(file.source.size for file, _ in pack.moved)

    async def _commit_again(self, pack: _Pack, ref: ObjectRef) -> int:
        """Name the pack in another commit; returns the time of that."""
        builder = RelocationBuilder()
        target = builder.index(ref)
        time_ns = await self._lake.log.latest_time()
        record = builder.add_all(await self._unchanged(pack.moved), target).record(self._lake, time_ns)
        await self._lake.log.put_record(record)
        return time_ns

    async def _unchanged(self, moved: list[tuple[Moving, int]]) -> list[tuple[Moving, int]]:
        """The files whose plain object is still at the version that was read; one LIST for each directory."""
        wanted: dict[str, dict[str, str]] = {}
        for file, _ in moved:
            if not file.entry.place:
                prefix = file.path[: file.path.rfind("/") + 1]
                wanted.setdefault(prefix, {})[file.path] = file.source.version.etag
        changed: set[str] = set()

        async def check(directory: tuple[str, dict[str, str]]) -> None:
            changed.update(await self._changed(*directory))

        await for_each(wanted.items(), check, LISTINGS_AT_ONCE)
        return [each for each in moved if each[0].path not in changed]

    async def _changed(self, prefix: str, etags: dict[str, str]) -> set[str]:
        found = await self._lake.client.find_listed(prefix, etags)
        return etags.keys() - {meta.key for meta in found if etags[meta.key] == meta.etag}


@contextmanager
def _building(lake: LakeView) -> Iterator[None]:
    """Errors of the disk that packs are built on become a LakeError with the remedy."""
    try:
        yield
    except OSError as error:
        raise LakeError(
            f"packs are built in {lake.scratch}, which fails ({error.strerror}): "
            f"make room for {PACK_BYTES // MIB} MiB, or set TMPDIR"
        ) from error
