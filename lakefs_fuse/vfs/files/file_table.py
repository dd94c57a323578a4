"""The table of files in use: open, or not yet durable. The only state of files that is kept in memory.

An `OpenFile` belongs to one inode. It stays in the table while it is pinned: a handle is open, or its newest bytes are
not in the store. Here handles are counted and rows followed; `ops.io` reads and writes, `drafts` begins versions.

What always holds: a file that is renamed keeps its inode, handles and draft; one whose bytes are moved (into a pack, to
its new key) is read on from where they are now; the cache keeps the blocks of the version that a file in use has. Trio
thread only; code between two awaits is atomic. A crash leaves the journal's records of drafts.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import msgspec

from lakefs_fuse.blockcache.cache import BlockCache
from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.commits.path_tree import Relocated
from lakefs_fuse.errors import CacheError, LakeError
from lakefs_fuse.meta.database import Batch, Database
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.rows import Journal
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.staging.draft_record import DraftState, encode
from lakefs_fuse.staging.part_layout import PAGE_BYTES
from lakefs_fuse.store.protocol import ObjectMeta
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.draft_target import DraftTarget
from lakefs_fuse.upload.publish import may_be_stored
from lakefs_fuse.vfs.change_events import ChangeEvents
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace import attributes
from lakefs_fuse.vfs.namespace.key_mapping import extent_of
from lakefs_fuse.vfs.writeback.publish_plan import choose_key

STORING = DraftState.PUBLISHING, DraftState.PUBLISHED
KNOWN_MAX = 1000
"""A listing looks at all of them."""
REFUSED_MAX = 1000
"""Keys that are remembered; a file at an older one is refused again, and stored elsewhere again."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Sparse:
    etag: str
    size: int
    data_bytes: int
    parent: int


class Holes:
    """Files that are known to have holes, and the size of their data, for `st_blocks`.

    What always holds: an answer is about the version that was asked for; one not known has no holes. At most
    `KNOWN_MAX` files are known, those stored last. Nothing is kept on disk: a new daemon knows none.
    """

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Sparse] = OrderedDict()

    def data_bytes(self, entry: Entry, draft: Draft | None = None) -> int:
        """Bytes that are not known to be holes, of the version that is stored or that ``draft`` is writing."""
        if draft is None:
            return self._stored(entry.inode, entry.etag, entry.size)
        base = 0
        if draft.base is not None:
            base = min(draft.base_limit, self._stored(entry.inode, draft.base.version.etag, draft.base.size))
        staged = base + (draft.pages.pages + draft.spills.pages.pages) * PAGE_BYTES
        return draft.size if staged >= draft.size else min(draft.size, staged + draft.parts.bytes_dropped)

    def note_stored(self, entry: Entry, draft: Draft) -> None:
        """Record that the draft is the version of the row ``entry``."""
        data_bytes = self.data_bytes(entry, draft)
        self._known.pop(entry.inode, None)
        if data_bytes < entry.size:
            self._known[entry.inode] = _Sparse(entry.etag, entry.size, data_bytes, entry.parent)
            if len(self._known) > KNOWN_MAX:
                self._known.popitem(last=False)

    def any_in(self, directory: int) -> bool:
        """Some known file was stored in this directory."""
        return any(sparse.parent == directory for sparse in self._known.values())

    def _stored(self, inode: int, etag: str, size: int) -> int:
        known = self._known.get(inode)
        return size if known is None or (known.etag, known.size) != (etag, size) else known.data_bytes


def renew_inode(tree: Tree, batch: Batch, row: Entry) -> Entry:
    """Give a name another inode without changing its version: the extended attributes of that stay."""
    xattrs = tree.xattrs(row.inode) if row.flags & Flag.XATTRS else {}
    renewed = tree.renew_inode(batch, row)
    if xattrs:
        tree.set_xattrs(batch, renewed.inode, xattrs)
    return renewed


class FileTable:
    """See the module's head."""

    def __init__(self, database: Database, tree: Tree, cache: BlockCache, events: ChangeEvents) -> None:
        self._db, self._tree, self._cache, self.events = database, tree, cache, events
        self._journal = Journal(database)
        self.holes = Holes()
        self.by_inode = self._files = dict[int, OpenFile]()  # the first name is for readers
        self.get, self.forget_record = self._files.get, self._journal.remove
        self._with_writers: set[OpenFile] = set()
        """The files that a handle may write to: a few, also where many wait for the store."""
        self._renamed: set[int] = set()
        self._refused: dict[str, None] = {}
        """Keys that the store refused, the newest last."""
        self._copies: set[int] = set()
        events.inode_dropped.append(self.hold)
        events.metadata_read.append(self.learn_from)
        events.keys_unlisted.append(self.strays)

    # -- the table

    def hold(self, inode: int) -> OpenFile | None:
        """The file in use. Leases on it end: handles that were opened under them are counted from here on."""
        handles = sum(listener(inode) for listener in self.events.leases_revoked)
        entry = self._tree.entry(inode) if handles else None
        if entry is not None:
            for _ in range(handles):
                self.acquire(entry, writer=False)
        return self._files.get(inode)

    def is_dirty(self, entry: Entry) -> bool:
        """The entry is, or a directory holds, a file whose newest bytes are not in the store."""
        return self._has(entry, attrgetter("is_dirty"))

    def keeps_name(self, entry: Entry) -> bool:
        """As `is_dirty`; files whose names are being removed are included."""
        return self._has(entry, attrgetter("keeps_name"))

    def _has(self, entry: Entry, holds: Callable[[OpenFile], bool]) -> bool:
        if not entry.is_dir:
            file = self._files.get(entry.inode)
            return file is not None and holds(file)
        passed = set[int]()  # directories that are not at or below the entry
        return any(
            self._is_at_or_below(file.entry.parent, entry.inode, passed)
            for file in self._files.values()
            if file.entry.parent not in passed and holds(file)
        )

    def _is_at_or_below(self, inode: int, directory: int, passed: set[int]) -> bool:
        """``passed`` are inodes of which that is false; those found on the way up are added."""
        while inode != directory:
            above = None if inode in passed else self._tree.entry(inode)
            if above is None:
                return False
            passed.add(inode)
            inode = above.parent
        return True

    def in_use(self) -> Iterable[OpenFile]:
        return self._files.values()

    def dirty(self) -> list[OpenFile]:
        return [file for file in self._files.values() if file.draft is not None]

    def being_written(self, bytes_max: int) -> int:
        """Files no larger than this that a program writes, or closes and that are not being sent yet."""
        return sum(count() for count in self.events.files_counted) + sum(
            file.draft is not None and file.draft.state is DraftState.WRITING and file.draft.size <= bytes_max
            for file in self._with_writers
        )

    def __len__(self) -> int:
        return len(self._files)

    def acquire(self, entry: Entry, *, writer: bool) -> OpenFile:
        """One more handle on a file."""
        file = self._files.get(entry.inode)
        if file is None:
            key = self._tree.key(entry)
            extent = extent_of(self._tree, entry, key)
            file = self._files[entry.inode] = OpenFile(entry, key, extent)
            if extent is not None:
                self._cache.pin(extent.version)
        file.handles += 1
        if writer:
            file.writers += 1
            self._with_writers.add(file)
        return file

    def add(self, file: OpenFile) -> None:
        """A file that was just created, with its first handle."""
        file.handles = file.writers = 1
        self._with_writers.add(file)
        self._files[file.entry.inode] = file

    def drop_handle(self, file: OpenFile, *, writer: bool) -> None:
        """One handle less; the caller calls `forget_if_idle`, unless the file has a draft."""
        file.handles -= 1
        file.writers -= writer
        if not file.writers:
            self._with_writers.discard(file)

    def restore(self, file: OpenFile) -> None:
        """A file that write-back acknowledged is back, without a handle."""
        if file.entry.inode not in self._files and file.extent is not None:
            self._cache.pin(file.extent.version)
        self._files[file.entry.inode] = file
        if file.draft is not None and file.draft.target.path:
            self._renamed.add(file.entry.inode)

    def renew_inode(self, batch: Batch, file: OpenFile, row: Entry) -> None:
        """Give a file without a handle another inode when the batch is committed, so that the kernel forgets the pages
        that it has of it. Its extended attributes stay."""
        batch.committed.append(partial(self._change_inode, file, row.inode, renew_inode(self._tree, batch, row).inode))

    def _change_inode(self, file: OpenFile, before: int, after: int) -> None:
        if self._files.get(before) is file:
            del self._files[before]
            self._files[after] = file
        if before in self._renamed:
            self._renamed.add(after)
        for each in file.versions:
            each.entry = msgspec.structs.replace(each.entry, inode=after)

    def is_nameless(self, file: OpenFile) -> bool:
        """Whether the file has no name; while the name is being removed the row still exists."""
        return file.unlinked and self._tree.entry(file.entry.inode) is None

    def xattrs(self, file: OpenFile) -> dict[str, bytes]:
        """Return the extended attributes of a file."""
        if file.late_xattrs is not None:
            return dict(file.late_xattrs)
        return self._tree.xattrs(file.entry.inode) if file.entry.flags & Flag.XATTRS else {}

    def detach(self, file: OpenFile) -> None:
        """Separate the file from the version that it was to replace."""
        if file.extent is not None:
            self._cache.unpin(file.extent.version)
        file.extent, file.if_absent = None, False

    def forget_if_idle(self, file: OpenFile) -> None:
        if file.handles or file.draft is not None or self._files.get(file.entry.inode) is not file:
            return
        del self._files[file.entry.inode]
        if file.extent is not None:
            self._cache.unpin(file.extent.version)
        row = self._tree.entry(file.entry.inode) if file.is_redated else None
        if row is not None:
            for listener in self.events.redated_file_closed:
                listener(row)

    def aim(self, path: str, draft_id: str, target: DraftTarget) -> None:
        """Choose the key of a draft whose upload has not begun: that of the file's path, unless other bytes are, or
        will be, there that belong to another name."""
        target.aim(*choose_key(path, draft_id, is_taken=self.is_key_taken(path)))

    def is_key_taken(self, key: str) -> bool:
        """Bytes that belong to another name are, or will be, at the key, or other nodes still look for them there, or
        the store refuses it."""
        return (
            self._tree.objects.is_reserved(key)
            or any(is_reserved(key) for is_reserved in self.events.key_reservations)
            or key in self.strays()
            or self._is_copied_from(key)
            or self.is_key_refused(key)
        )

    def is_key_refused(self, key: str) -> bool:
        """The store cannot hold an object at the key: it keeps those below it, or one above it, as files."""
        return key in self._refused

    def refuse_key(self, key: str) -> None:
        """The store has refused an object at the key, where none is: the file's bytes go elsewhere from now on."""
        self._refused[key] = None
        if len(self._refused) > REFUSED_MAX:
            del self._refused[next(iter(self._refused))]

    def add_copy(self, file: OpenFile) -> None:
        """The draft of a file consists of another file's bytes, which stay at their key until it is published."""
        self._copies.add(file.entry.inode)

    def _is_copied_from(self, key: str) -> bool:
        drafts = {inode: file.draft for inode in self._copies if (file := self._files.get(inode)) is not None}
        copies = {inode: draft for inode, draft in drafts.items() if draft is not None and draft.copies}
        self._copies = set(copies)
        return any(draft.base is not None and draft.base.version.key == key for draft in copies.values())

    def strays(self) -> set[str]:
        """Keys where files are, or will be, stored that were renamed after their upload began."""
        self._renamed = {inode for inode in self._renamed if inode in self._files}
        renamed = [each for inode in self._renamed for each in self._files[inode].versions if not each.unlinked]
        return {
            draft.target.key
            for each in renamed
            if (draft := each.draft) is not None
            and draft.target.key != each.key
            and (draft.upload.intent_ns or draft.state in STORING)
        }

    # -- what commits change

    def updated(self, entry: Entry) -> None:
        """The row of a file has other attributes, or another name."""
        file = self._files.get(entry.inode)
        if file is None or self.is_nameless(file):
            return
        if file.draft is None and not file.behind:
            file.entry = entry
            self._pin(file, extent_of(self._tree, entry))
            return
        for each in file.versions:
            flags = int((each.entry.flags & ~Flag.XATTRS) | (entry.flags & Flag.XATTRS))
            each.entry = msgspec.structs.replace(
                each.entry, parent=entry.parent, cookie=entry.cookie, name=entry.name, flags=flags
            )

    def relocated(self, moved: Relocated) -> None:
        """The same bytes are elsewhere now. A file that is being written may be based on an older version, which is
        never mixed with them."""
        entry = moved.entry
        file = self._files.get(entry.inode)
        if file is None:
            return
        extent, before = extent_of(self._tree, entry), file.extent
        if before is not None and (before.version.key, before.version.etag, before.offset) != moved[:3]:
            return
        for draft in (each.draft for each in file.versions):
            if draft is None or before is None or extent is None or extent == before:
                continue  # where a rename under way has noted its new name, that stays
            draft.move_base(before, extent)
        self._pin(file, extent)
        place = {"place": entry.place, "offset": entry.offset, "etag": entry.etag, "stamp": entry.stamp}
        file.entry = msgspec.structs.replace(file.entry, **place)

    def _pin(self, file: OpenFile, extent: Extent | None) -> None:
        if extent == file.extent:
            return
        if extent is not None:
            self._cache.pin(extent.version)
        if file.extent is not None:
            self._cache.unpin(file.extent.version)
        file.extent = extent

    def moved(self, inodes: Iterable[int] | None = None) -> None:
        """Directories, or files, have other names: what is being written goes there too. ``inodes`` are the files of
        which that may be true; None: all. Raises CacheError where the journal does not say so of each; all of them are
        moved then, too, and the next records of their drafts say so."""
        found = self._files.values() if inodes is None else map(self._files.get, inodes)
        directories: dict[int, list[bytes] | None] = {}
        failed: CacheError | None = None
        for file in [each for each in found if each is not None]:
            parent = file.entry.parent
            if parent not in directories:
                directories[parent] = self._tree.path(parent)
            above = None if self.is_nameless(file) else directories[parent]
            if above is None:
                continue
            key = b"/".join([*above, file.entry.name]).decode("utf-8", "surrogatepass")
            if key == file.key:
                continue
            batch = Batch()
            try:
                self.move(batch, file, key)
                self._db.commit(batch, sync=file.is_acknowledged)
            except LakeError as error:  # also of the staging disk, to which bytes move with the record
                failed = failed or (error if isinstance(error, CacheError) else CacheError(str(error)))
        if failed is not None:
            raise failed

    def move(self, batch: Batch, file: OpenFile, key: str, *, is_answered: bool = False) -> bool:
        """Give a file, all its versions, another name, which the batch journals. A draft stays at the key where an
        upload, or an attempt without answer, began, unless that ``is_answered`` since. Returns whether one does: then
        the batch must survive a crash of the machine, before which the store may have those bytes. Raises StagingFull
        and CacheError; then memory has the other name all the same."""
        drafts, stays = [], False
        for each in file.versions:
            each.key, draft = key, each.draft
            if draft is None:
                continue
            is_late = not is_answered and may_be_stored(draft)
            if draft.upload.intent_ns or draft.state is DraftState.PUBLISHING or is_late:
                draft.target.rename(key)
                stays = True
                self._renamed.add(each.entry.inode)
            else:
                self.aim(each.key, draft.id, draft.target)
            drafts.append(draft)
        for draft in drafts:
            self._journal.put(batch, draft.id, encode(draft.prepare_record()))
        return stays

    def journal_drafts(self, batch: Batch, file: OpenFile) -> None:
        """Write to the batch, which records a version in the store, what the drafts of later versions replace now."""
        for draft in [each.draft for each in file.versions if each.draft is not None]:
            try:
                self._journal.put(batch, draft.id, encode(draft.prepare_record()))
            except LakeError as error:  # its bytes cannot be kept: the journal has it as it was
                log.error("what %s replaces could not be journaled: %s", file.key, error)

    def replaces(self, entry: Entry, copied_from: str) -> None:
        """A file not stored yet will replace the plain object with its row's ETag (empty: none), which may be a copy of
        that at another key, and the bytes elsewhere that its row names; and what another node has put there: O_EXCL was
        for the name under which it was created."""
        file = self._files.get(entry.inode)
        for each in file.versions if file is not None else ():
            each.entry = msgspec.structs.replace(each.entry, place=entry.place, offset=entry.offset)
            each.if_absent = False
            if each.draft is not None:
                each.draft.target.replace(entry.etag, copied_from)

    def learn_from(self, meta: ObjectMeta) -> None:
        """Keep the metadata that a GET answered, if the object is the plain file at its key: in use, or fetched ahead
        of use."""
        if meta.metadata is None or meta.key.startswith(RESERVED_PREFIX):
            return
        entry = self._tree.resolve([name.encode("utf-8", "surrogatepass") for name in meta.key.split("/")])
        if entry is None or not entry.is_plain or entry.etag != meta.etag:
            return
        if entry.flags & (Flag.ATTRIBUTES_KNOWN | Flag.LOCAL) or self.is_dirty(entry):
            return
        try:
            self.learn(entry, meta)
        except CacheError as error:
            log.info("the attributes of %s will be asked for: %s", meta.key, error)

    def learn(self, entry: Entry, meta: ObjectMeta) -> Entry:
        """Write an object's own attributes to its entry. Its row may have got another stamp since that was read."""
        row = self._tree.entry(entry.inode)
        if row is not None and (row.etag, row.place) != (entry.etag, entry.place):
            row = None
        learnt = attributes.learn(row or entry, meta.metadata or {})
        if row is not None:
            batch = Batch()
            self._tree.update(batch, learnt)
            self._db.commit_volatile(batch)
        file = self._files.get(entry.inode)
        if file is not None:
            file.entry = learnt
        return learnt
