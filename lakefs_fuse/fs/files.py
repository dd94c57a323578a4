"""Files that are open or not yet durable: the only state of files that is kept in memory.

An `OpenFile` belongs to one inode. It reads from its draft where it has one, else from the version it is pinned to; it
stays in the table while a handle is open or its newest bytes are not in the store. Publishing is what `close()` and
`fsync()` wait for; it ends with the new version in the tree, the journal record gone, both in one batch, and the staged
bytes handed to the block cache. Trio thread only; code between two awaits is atomic.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import trio

from lakefs_fuse.data.blocks import BlockCache
from lakefs_fuse.data.draft import Draft
from lakefs_fuse.data.draft_services import DraftEnded, DraftServices, DraftTarget
from lakefs_fuse.data.publishing import Published, publish, visible_token
from lakefs_fuse.data.reader import BlockReader
from lakefs_fuse.data.record import DraftRecord, DraftState, encode
from lakefs_fuse.data.version import Version
from lakefs_fuse.errors import CacheError, LakeError
from lakefs_fuse.fs import attributes
from lakefs_fuse.fs.namespace import Namespace
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.journal import Journal
from lakefs_fuse.store.protocol import Buffer, ObjectMeta

KEPT_BYTES_MAX = 256 << 20
"""An open file that is deleted here is fetched whole first, if no larger than this, so that its readers can go on."""
log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenFile:
    """One inode in use. ``entry`` is what is known of the file now; its size is the draft's while there is one."""

    entry: Entry
    key: str
    version: Version | None
    draft: Draft | None = None
    handles: int = 0
    writers: int = 0
    unlinked: bool = False
    if_absent: bool = False
    publishing: trio.Lock = field(default_factory=trio.Lock)

    @property
    def current(self) -> Entry:
        return msgspec.structs.replace(self.entry, size=self.draft.size) if self.draft else self.entry

    @property
    def is_untouched(self) -> bool:
        """Created or emptied, and not written to since."""
        return self.draft is not None and self.draft.size == 0 and self.draft.base is None

    def describe(self, multipart: bool) -> Mapping[str, str]:
        """Metadata of the object. A multipart upload's is fixed when it begins, before the last write has a time."""
        return attributes.describe(self.entry, with_mtime=not multipart or bool(self.entry.flags & Flag.MTIME_KEPT))

    def written(self, now_ns: int) -> None:
        """The bytes changed just now."""
        flags = self.entry.flags & ~Flag.MTIME_KEPT
        self.entry = msgspec.structs.replace(self.entry, flags=flags, mtime_ns=now_ns, ctime_ns=now_ns)


class FileTable:
    """See the module's head."""

    def __init__(
        self,
        database: Database,
        namespace: Namespace,
        cache: BlockCache,
        reader: BlockReader,
        services: Callable[[Callable[[DraftRecord, bool], None]], DraftServices],
        *,
        new_id: Callable[[], str],
    ) -> None:
        self._db, self._ns, self._cache, self._reader = database, namespace, cache, reader
        self._journal = Journal(database)
        self._new_id = new_id
        self.services = services(self._save)
        self._files: dict[int, OpenFile] = {}

    def _save(self, record: DraftRecord, sync: bool) -> None:
        batch = Batch()
        self._journal.put(batch, record.id, encode(record))
        self._db.commit(batch, sync=sync)

    # -- the table

    def get(self, inode: int) -> OpenFile | None:
        return self._files.get(inode)

    def is_dirty(self, entry: Entry) -> bool:
        """The entry is, or a directory holds, a file whose newest bytes are not in the store."""
        if not entry.is_dir:
            file = self._files.get(entry.inode)
            return file is not None and file.draft is not None and not file.unlinked
        return any(
            file.draft is not None and not file.unlinked and self._is_below(file.entry, entry.inode)
            for file in self._files.values()
        )

    def _is_below(self, entry: Entry, directory: int) -> bool:
        parent = entry.parent
        while parent != directory:
            above = self._ns.tree.entry(parent)
            if above is None:
                return False
            parent = above.parent
        return True

    def dirty(self) -> list[OpenFile]:
        return [file for file in self._files.values() if file.draft is not None]

    def __len__(self) -> int:
        return len(self._files)

    def acquire(self, entry: Entry, *, writer: bool) -> OpenFile:
        """One more handle on a file."""
        file = self._files.get(entry.inode)
        if file is None:
            key = self._ns.key(entry)
            version = None if entry.is_local else Version(key, entry.etag, entry.size)
            file = self._files[entry.inode] = OpenFile(entry, key, version)
            if version is not None:
                self._cache.pin(version)
        file.handles += 1
        file.writers += writer
        return file

    def adopt_new(self, entry: Entry, key: str, *, if_absent: bool) -> OpenFile:
        """A file that was just created, with its first handle. Its journal record is written before its name is."""
        file = OpenFile(entry, key, None, if_absent=if_absent)
        self.draft(file)
        file.handles = file.writers = 1
        self._files[entry.inode] = file
        return file

    async def release(self, file: OpenFile, *, writer: bool) -> None:
        """One handle less. The last one takes the file out of the table, unless it still has bytes to publish."""
        file.handles -= 1
        file.writers -= writer
        if file.handles:
            return
        if file.draft is not None and file.unlinked:
            await self._discard(file)
        elif file.draft is not None and file.draft.state is DraftState.WRITING:
            self.services.nursery.start_soon(self._publish_late, file)
            return
        self._forget_if_idle(file)

    def _forget_if_idle(self, file: OpenFile) -> None:
        if file.handles or file.draft is not None or self._files.get(file.entry.inode) is not file:
            return
        del self._files[file.entry.inode]
        if file.version is not None:
            self._cache.unpin(file.version)

    async def _publish_late(self, file: OpenFile) -> None:
        """Nobody waits for these bytes any more (a mapping outlived its file, a close was not the opener's)."""
        try:
            await self.publish(file)
        except LakeError as error:
            log.error("%s is not durable: %s", file.key, error)
        except Exception:
            log.exception("%s is not durable", file.key)
        self._forget_if_idle(file)

    # -- reading and writing

    async def read(self, file: OpenFile, offset: int, length: int, readahead: object) -> Buffer:
        while file.draft is not None:
            try:
                return await file.draft.read(offset, length)
            except DraftEnded:
                await self._wait_published(file)
        if file.version is None:
            return b""
        return await self._reader.read(file.version, offset, length, readahead)  # type: ignore[arg-type]

    async def write(self, file: OpenFile, offset: int, data: Buffer) -> None:
        while True:
            try:
                await self.draft(file).write(offset, data)
                return
            except DraftEnded:
                await self._wait_published(file)

    async def truncate(self, file: OpenFile, size: int) -> None:
        while True:
            try:
                await self.draft(file, anew=size == 0).truncate(size)
                return
            except DraftEnded:
                await self._wait_published(file)

    @staticmethod
    async def _wait_published(file: OpenFile) -> None:
        """The draft has ended; whoever ended it is about to take it away."""
        async with file.publishing:
            pass

    def draft(self, file: OpenFile, *, anew: bool = False) -> Draft:
        """The file's draft, begun now where it has none; ``anew`` where nothing of the old version counts."""
        if file.draft is None:
            target = DraftTarget(
                file.key, file.describe, replaces=file.version.etag if file.version else "", if_absent=file.if_absent
            )
            base = None if anew else file.version
            file.draft = Draft(self.services, self._new_id(), target, base=base)
            file.draft.save()
        return file.draft

    # -- publishing

    async def publish(self, file: OpenFile) -> None:
        """Return when the file's bytes, as they were when called, are in the store. Raises LakeError."""
        async with file.publishing:
            draft = file.draft
            if draft is None or file.unlinked:
                return
            async with draft.exclusive():
                published = await publish(draft)
                version = self._accept(file, draft, published)
            await trio.to_thread.run_sync(self._to_cache, draft, version, published)
            draft.close(unlink=False)
        self._forget_if_idle(file)

    def _accept(self, file: OpenFile, draft: Draft, published: Published) -> Version:
        meta = published.meta
        version = Version(file.key, meta.etag, meta.size)
        entry = msgspec.structs.replace(
            file.entry,
            flags=(file.entry.flags & ~Flag.LOCAL) | Flag.ATTRIBUTES_KNOWN,
            etag=meta.etag,
            size=meta.size,
        )
        self._cache.pin(version)
        if file.version is not None:
            self._cache.unpin(file.version)
        file.entry, file.version, file.draft, file.if_absent = entry, version, None, False
        if dict(file.describe(True)) != published.described:
            self._describe_again(file)
        try:
            self._record(entry, draft)
        except CacheError as error:  # it is durable all the same; the next listing, or the next mount, finds out
            log.error("%s is in the store, but that could not be noted: %s", file.key, error)
        return version

    def _describe_again(self, file: OpenFile) -> None:
        """Attributes were set after the store was told of them: whoever set them waits to publish them."""
        try:
            self.draft(file)
        except LakeError as error:
            log.error("attributes of %s are not durable: %s", file.key, error)

    def _record(self, entry: Entry, draft: Draft) -> None:
        batch = Batch()
        self._ns.changing(entry.parent, entry.name)
        if self._ns.tree.entry(entry.inode) is not None:
            self._ns.tree.update(batch, entry)
        else:  # somebody else's version has the name on this node, and ours replaced it: look again
            self._ns.tree.forget_listing(batch, entry.parent)
        self._journal.delete(batch, draft.id)
        self._db.commit(batch)

    def _to_cache(self, draft: Draft, version: Version, published: Published) -> None:
        """What was just written is read back from local disk. A cache that cannot take it loses nothing."""
        self._cache.adopt(self.services.staging.path(draft.id), version, published.hashes)

    async def unlink(self, file: OpenFile, delete: Callable[[Entry], Awaitable[None]]) -> None:
        """``delete`` takes the object away; handles stay. No publishing runs meanwhile, so none can bring the name
        back. Where ``delete`` fails, the file is as it was."""
        file.unlinked = True
        try:
            async with file.publishing:
                await self._keep_for_handles(file)
                if not file.entry.is_local or await self._may_be_visible(file):
                    await delete(file.entry)
        except BaseException:
            file.unlinked = False
            raise
        if file.draft is not None:
            file.draft.unlinked = True
            if file.handles:
                file.draft.save(sync=True)
            else:
                await self._discard(file)
        self._forget_if_idle(file)

    async def _keep_for_handles(self, file: OpenFile) -> None:
        """Who has the file open goes on reading what is about to go from the store."""
        version = file.draft.base if file.draft is not None else file.version
        wanted = min(version.size, file.draft.base_limit if file.draft is not None else version.size) if version else 0
        if not file.handles or version is None or not 0 < wanted <= KEPT_BYTES_MAX:
            return
        try:
            kept = await self._reader.ensure(version, 0, wanted)
            why = "the cache has no room"
        except LakeError as error:
            kept, why = False, str(error)
        if not kept:
            log.warning("%s is deleted while open, and could not be kept: %s", file.key, why)

    @staticmethod
    async def _may_be_visible(file: OpenFile) -> bool:
        """An attempt to publish a new file failed without an answer, and the object may be there all the same."""
        draft = file.draft
        if draft is None or not (draft.recheck or draft.state is DraftState.FAILED):
            return False
        return (await visible_token(draft))[1] is not None

    async def _discard(self, file: OpenFile) -> None:
        draft, file.draft = file.draft, None
        if draft is not None:
            await draft.discard()
            if draft.error is None:
                self.forget_record(draft.id)
            else:  # its upload is left: the next mount tries again
                log.warning("the upload of %s could not be ended: %s", file.key, draft.error)
                draft.save(sync=True)

    def forget_record(self, draft_id: str) -> None:
        batch = Batch()
        self._journal.delete(batch, draft_id)
        self._db.commit(batch)

    def close(self) -> None:
        """The mount ends: what is staged is noted as it is, for the next one."""
        for file in self.dirty():
            if file.draft is not None:
                try:
                    file.draft.save(sync=True)
                except CacheError as error:
                    log.error("what is staged of %s could not be noted: %s", file.key, error)
                file.draft.close(unlink=False)

    def learned(self, meta: ObjectMeta) -> None:
        """A GET told the metadata of an object: keep it where it belongs to a file in use."""
        if meta.metadata is None:
            return
        for file in self._files.values():
            known = file.entry.flags & Flag.ATTRIBUTES_KNOWN or file.entry.etag != meta.etag
            if file.key == meta.key and not known and file.draft is None:
                self.learn(file.entry, meta)

    def learn(self, entry: Entry, meta: ObjectMeta) -> Entry:
        """Write an object's own attributes to its entry."""
        learnt = attributes.learn(entry, meta.metadata or {})
        batch = Batch()
        if self._ns.tree.entry(entry.inode) is not None:
            self._ns.tree.update(batch, learnt)
            self._db.commit(batch)
        file = self._files.get(entry.inode)
        if file is not None:
            file.entry = learnt
        return learnt
