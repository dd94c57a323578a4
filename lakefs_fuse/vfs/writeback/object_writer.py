"""How the newest bytes of a file get into the store: in a pack with others, or as a plain object.

A plain object lies at the file's own path wherever that key is free. It is not where a name that was renamed away still
has its bytes there, and where the upload began before the file itself was renamed; then a commit says which object the
name means. A name that commits have spoken of before is spoken of again, and so is one whose attributes a listing would
not show. Trio thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from lakefs_fuse.blockcache.object_version import Extent, Version
from lakefs_fuse.commits.committer import Committer
from lakefs_fuse.commits.objects.deletion_queue import Deletions
from lakefs_fuse.commits.record import OBJECTS, Remove
from lakefs_fuse.meta.database import Batch
from lakefs_fuse.meta.entry import UNSET, Entry, Flag
from lakefs_fuse.meta.object_table import ObjectRow
from lakefs_fuse.meta.rows import Deletion
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.publish import Published, publish, visible_token
from lakefs_fuse.vfs.namespace import attributes
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.operations import ChangeBuilder
from lakefs_fuse.vfs.relocation.pending_copies import BegunCopies

if TYPE_CHECKING:
    from lakefs_fuse.vfs.files.open_file import OpenFile
    from lakefs_fuse.vfs.writeback.packer import Packer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Late:
    """Attributes that were set while the version was being stored; ``xattrs`` None where none of those were."""

    file: OpenFile
    wanted: Entry
    xattrs: dict[str, bytes] | None


@dataclass(frozen=True, slots=True)
class Stored:
    """``entry`` is the file's row now, ``extent`` where its bytes are; ``told`` are the attributes that the store was
    given. ``published`` is None for a file in a pack."""

    entry: Entry
    extent: Extent
    told: Mapping[str, str]
    published: Published | None


class Storing:
    """See the module's head. ``packer`` is set once it exists; without one everything is a plain object."""

    def __init__(
        self,
        namespace: Namespace,
        committer: Committer,
        deletions: Deletions,
        copies: BegunCopies,
        *,
        shown: tuple[int, int, int],
    ) -> None:
        """``shown`` are the mode, uid and gid that a listing's files have here."""
        self._ns, self._committer, self._deletions, self._copies = namespace, committer, deletions, copies
        self._shown = shown
        self.packer: Packer | None = None
        self.elsewhere: Callable[[Iterable[str]], None] = lambda _: None
        """Told of names whose plain objects are not at their own keys."""
        self.free: Callable[[str], Awaitable[None]] | None = None
        """Copies away what another name has at a key."""

    async def store(self, file: OpenFile, draft: Draft, *, alone: bool = False) -> Stored:
        """Make the draft's bytes the newest version of the file. The caller holds ``draft.exclusive()``. ``alone``: no
        other file is waited for.

        Raises LakeError; then nothing is lost, and it can be tried again.
        """
        await self._committer.settle()  # or these bytes may hit what a rename that seemed to fail has taken away
        async with self._copies.kept_off(file.key, draft.target.key):
            before = self._ns.tree.objects.get(file.entry.place) if file.entry.place else None
            if not alone and self.packer is not None and await self.packer.submit(file, draft):
                stored = self._packed(file, draft)
            else:
                stored = await self._plain(file, draft)
            self._retire(before, stored.entry)
        return stored

    async def store_together(
        self, files: list[tuple[OpenFile, Draft]], passed: list[Draft]
    ) -> Callable[[OpenFile, Draft], Stored]:
        """As `store`, of small files, in one pack; what is returned answers for each what became of it. ``passed`` are
        earlier versions of some, which stay out of it."""
        assert self.packer is not None
        await self._committer.settle()
        objects = self._ns.tree.objects
        async with self._copies.kept_off(*(file.key for file, _ in files)):
            before = {draft.id: objects.get(file.entry.place) if file.entry.place else None for file, draft in files}
            await self.packer.commit_together(files, passed)

        def stored(file: OpenFile, draft: Draft) -> Stored:
            now = self._packed(file, draft)
            self._retire(before[draft.id], now.entry)
            return now

        return stored

    # -- in a pack

    def _packed(self, file: OpenFile, draft: Draft) -> Stored:
        draft.state = DraftState.PUBLISHED
        assert draft.packed is not None, "its commit is in the store"
        entry = self._ns.tree.entry(file.entry.inode)
        extent = self._ns.extent(entry) if entry is not None else None
        if entry is None or extent is None or extent.version != draft.packed.version:
            if extent is not None and entry is not None:  # another node's version is newer
                self._ns.renew_inode(entry)
            entry = msgspec.structs.replace(file.entry, size=draft.packed.size, flags=file.entry.flags & ~Flag.LOCAL)
            extent = draft.packed
        return Stored(entry, extent, attributes.describe(entry, with_mtime=True), None)

    # -- as a plain object

    async def _plain(self, file: OpenFile, draft: Draft) -> Stored:
        key = draft.target.key
        if self._ns.own_etag(file.key, file.entry.parent):
            draft.target.if_absent = False  # what may still lie there counts as removed
        if self.packer is not None:
            self.packer.alone(True)
        try:
            async with self._deletions.keeping(key):
                await self._free(draft, file.entry.place)
                if self._committer.mentions(key):  # or a commit would name bytes that are there no more
                    await self._committer.flush()
                published = await publish(draft)
        finally:
            if self.packer is not None:
                self.packer.alone(False)
        row = self._ns.tree.entry(file.entry.inode)
        owner = file.owner_of(draft) or file  # not ``file`` where another version has begun meanwhile
        entry = msgspec.structs.replace(
            owner.entry,
            flags=(owner.entry.flags & ~(Flag.LOCAL | Flag.ATTRIBUTED)) | Flag.ATTRIBUTES_KNOWN,
            etag=published.meta.etag,
            size=published.meta.size,
            stamp=0 if row is None else row.stamp,  # what was pending when the file was opened is in a commit, perhaps
            place=0,
            offset=0,
        )
        extent = Extent.whole(Version(key, published.meta.etag, published.meta.size))
        if key != file.key or self._is_spoken_of(owner):
            entry = await self._say_where(file, entry, key)
        return Stored(entry, extent, published.described, published)

    async def _free(self, draft: Draft, place: int) -> None:
        """An upload began at its key before another node renamed away what lies there. ``place`` is the file's own."""
        used = self._ns.tree.objects.used(draft.target.key) if draft.upload_intent_ns else None
        if self.free is not None and used is not None and place != used.number:
            await self.free(draft.target.key)

    def _is_spoken_of(self, file: OpenFile) -> bool:
        row = self._ns.tree.entry(file.entry.inode)
        entry = file.entry
        if entry.flags & (Flag.XATTRS | Flag.MTIME_KEPT) or (row is not None and row.stamp):
            return True
        return self._is_special(entry) or self._ns.tree.tombstones.get(file.key.encode()) is not None

    def _is_special(self, entry: Entry) -> bool:
        """It has a mode or an owner that no listing would tell."""
        held = (entry.mode, entry.uid, entry.gid)
        return any(each not in (UNSET, shown) for each, shown in zip(held, self._shown, strict=True))

    async def _say_where(self, file: OpenFile, entry: Entry, key: str) -> Entry:
        """A commit that the name is the object at ``key``; journaled, so it will be made even if this fails."""
        if file.unlinked:
            return entry
        self._name(file.key, entry, key)
        if key != file.key:
            await self._committer.flush()
        return self._ns.tree.entry(entry.inode) or entry

    def _name(self, path: str, entry: Entry, key: str) -> None:
        """Journal that a name is the plain object at ``key``, and that no other name is."""
        builder = ChangeBuilder(self._ns.tree)
        hides = self._ns.own_etag(path)
        builder.put(path, entry, key=key, hides=hides)
        if key != path and not key.startswith(OBJECTS):
            self.hide_at(builder, key, entry.etag)
        goes = hides and key != path and path not in self._committer.leaving
        doomed = [Deletion(path, hides)] if goes else []
        self._committer.enqueue(msgspec.structs.replace(builder.change(), doomed=doomed, ahead=True))
        if key != path:
            self.elsewhere([path])

    async def finish(self, draft: Draft, path: str) -> None:
        """Make what a daemon that died left of a file its newest version. The caller holds ``draft.exclusive()``.

        Raises LakeError; then it can be tried again.
        """
        key = draft.target.key
        there = self._ns.at(path)
        async with self._copies.kept_off(path, key), self._deletions.keeping(key):
            await self._free(draft, there.place if there is not None else 0)
            published = await publish(draft)
        self.say(path, msgspec.structs.replace(published.meta, metadata=draft.target.describe(False)))
        await self._committer.flush()

    def say(self, path: str, meta: ObjectMeta) -> None:
        """The name is this object, with the attributes that its metadata tells. Raises CacheError."""
        there = self._ns.at(path)
        tombstone = self._ns.tree.tombstones.get(path.encode())
        inode = there.inode if there is not None else 0  # whose extended attributes it keeps
        entry = Entry(0, 0, b"", inode, size=meta.size, mtime_ns=meta.mtime_ns, etag=meta.etag)
        entry = attributes.learn(entry, meta.metadata or {})
        shown = not self._is_special(entry) and entry.mtime_ns == meta.mtime_ns
        if shown and meta.key == path and tombstone is None and (there is None or not there.stamp):
            return  # as every listing shows
        self._name(path, entry, meta.key)

    def is_leaving(self, key: str) -> bool:
        """See `Leaving`."""
        return key in self._committer.leaving

    @property
    def newest_change(self) -> int:
        """See `Committer.newest`."""
        return self._committer.newest

    def withhold(self, path: str, since: int, until: int, newest: int) -> None:
        """See `Committer.withhold`."""
        self._committer.withhold(path, since, until, newest)

    def hide_at(self, builder: ChangeBuilder, key: str, etag: str) -> None:
        """A plain object at a key is not the file of that name, and nobody shall see it there."""
        *above, _ = key.split("/")
        directory = self._ns.directory("/".join(above))
        name = key.rsplit("/", 1)[-1].encode()
        there = None if directory is None else self._ns.tree.named(directory, name)
        if there is None or there.is_local:
            builder.operations.append(Remove(key, hides=etag))
        elif there.place or there.is_symlink:
            builder.put(key, msgspec.structs.replace(there, etag=etag), hides=etag)

    # -- what is left behind

    def _retire(self, before: ObjectRow | None, now: Entry) -> None:
        """The object of the version before is wanted by nobody, unless it was replaced in place."""
        if before is not None and not before.is_pack and before.number != now.place:
            self._committer.retire(Deletion(before.key, before.etag))

    async def forsake_late(self, draft: Draft) -> None:
        """An attempt to store a version that nobody wants any more may have worked. Raises LakeError."""
        if draft.recheck or draft.state is DraftState.FAILED:
            meta = (await visible_token(draft))[1]
            if meta is not None:
                self.forsake(meta)

    def forsake(self, meta: ObjectMeta) -> None:
        """An object that was stored for a name that is gone. Raises CacheError."""
        self._deletions.doom(Deletion(meta.key, meta.etag))

    def set_attributes(self, attributes: Iterable[Late], batch: Batch | None = None) -> None:
        """Attributes that were set after the store had been told of the files'; journaled with ``batch``. Raises
        CacheError."""
        builder = ChangeBuilder(self._ns.tree)
        for late in attributes:
            wanted = late.wanted
            entry = msgspec.structs.replace(
                late.file.entry, mode=wanted.mode, uid=wanted.uid, gid=wanted.gid, mtime_ns=wanted.mtime_ns
            )
            builder.set_attributes(late.file.key, entry, late.xattrs)
        self._committer.enqueue(builder.change(), batch)
