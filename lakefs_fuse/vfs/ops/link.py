"""link(2): gives a file a second name; of all nodes that link one name, only one succeeds.

Programs publish a version of a table by linking a finished file to its name, and rely on EEXIST. So the bytes are first
stored once more, at the new name's own key, by a conditional request (`If-None-Match`); only then a commit says what
the name is. The object of a removed file is claimed first, and then replaced (`KeyClaims`, ADR 0188). This node sends
the bytes of a small file; the store copies those of a larger one. The two names are two files: a write to one does not
change the other (ADR 0147). Until one of them changes they show one inode number, because programs that link compare
the numbers.

What always holds (*one winner*): of all nodes that link one name, only one succeeds, and the sources of the others are
unchanged (``--hard-links local`` allows stores on which that holds for one node only). Every version that write-back
acknowledged before is in the store before the new name is. Link counts are kept in memory, for LINKED_MAX files of this
daemon. Trio thread only. A crash before the request leaves nothing, or an unfinished upload, which `gc` aborts; a crash
after it leaves the name, as a listing shows. If the object replaced a removed file's with the same bytes, a listing
hides it, and it is deleted when that would have been.
"""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
import trio

from lakefs_fuse.blockcache.object_version import Extent
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.errors import FileError, LakeError, Overtaken, PreconditionFailed, Superseded
from lakefs_fuse.meta.entry import Entry, Flag
from lakefs_fuse.meta.tree import Tree
from lakefs_fuse.meta.tree_events import TreeEvents
from lakefs_fuse.store.protocol import ObjectMeta, PartRef
from lakefs_fuse.store.server_copy import ABORT_S_MAX, COPY_PART_BYTES
from lakefs_fuse.upload.draft_target import DRAFT_METADATA, DraftTarget
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.file_table import FileTable
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.ops.io import FileIO
from lakefs_fuse.vfs.writeback.object_writer import ObjectWriter
from lakefs_fuse.vfs.writeback.queue import WriteBackQueue

SENT_BYTES_MAX = 8 << 20
"""Files up to this size are sent from memory; the store copies larger ones."""
ATTEMPTS_MAX = 4
"""Requests for one name. Another one follows if the object at the key is a removed file's, or changed meanwhile."""
CLAIM_PAUSES_S = 0.1, 0.2, 0.4, 0.8, 1.5
"""Pauses in which another node may delete the removed file's object, or store its own, for which it has the claim."""
LINKED_MAX = 1024


class _Same(msgspec.Struct, frozen=True):
    """A link of one file to another, ``source``, and the identity of both when it was made (`_identity`)."""

    source: int
    of_source: tuple[object, ...]
    of_linked: tuple[object, ...]


class LinkCounts:
    """Link counts of the last LINKED_MAX files that this node linked, and which of them are still the same file.

    *Alive in groups*: a group has two inodes or more, all of which have names. `of` is one lookup, because READDIR
    calls it for each name."""

    def __init__(self, tree: Tree, events: TreeEvents, files: FileTable, current: Callable[[int], Entry]) -> None:
        """``current`` returns the entry of an inode, unstored writes included; raises FileError if there is none."""
        self._tree, self._files, self._current = tree, files, current
        self._groups: dict[int, set[int]] = {}
        self._same: dict[int, _Same] = {}
        self.changed: set[int] = set()
        """Files whose link counts have changed, for the caller to clear."""
        self._parents: frozenset[int] | None = None
        """Directories of the files in groups, as of ``_writes`` of the database; None if a group has changed since."""
        self._writes = 0
        events.inode_dropped.append(self._drop)

    def add(self, source: Entry, linked: Entry) -> None:
        """Record that a file has another name, ``linked``, which has its own inode."""
        self._parents = None
        leader = self.number(self._current(source.inode))
        self._same[linked.inode] = _Same(leader, _identity(self._current(leader)), _identity(linked))
        group = self._groups.pop(source.inode, {source.inode})
        self.changed |= group
        group = group | {linked.inode}
        for inode in group:
            self._groups.pop(inode, None)
            self._groups[inode] = group
        while len(self._groups) > LINKED_MAX:
            self._drop(next(iter(self._groups)))

    def _drop(self, inode: int) -> None:
        self._same.pop(inode, None)
        group = self._groups.pop(inode, None)
        if group is not None:
            self._parents = None
            group.discard(inode)
            self.changed |= group
            for each in [each for each in group if each in self._same and self._same[each].source == inode]:
                del self._same[each]
            if len(group) == 1:
                del self._groups[group.pop()]

    def of(self, inode: int) -> int:
        """Return the number of names of a file; 1 if it was not linked here."""
        group = self._groups.get(inode)
        return 1 if group is None else len(group)

    def number(self, entry: Entry) -> int:
        """Return the inode number that a file shows: that of its link's source, until either changes. While either is
        open for writing, the file shows its own, because the kernel may hold changes."""
        same = self._same.get(entry.inode)
        if same is None or self._is_written(entry.inode) or self._is_written(same.source):
            return entry.inode
        try:
            is_same = _identity(self._current(same.source)) == same.of_source and _identity(entry) == same.of_linked
        except FileError:
            is_same = False
        if not is_same:
            del self._same[entry.inode]
        return same.source if is_same else entry.inode

    def _is_written(self, inode: int) -> bool:
        file = self._files.get(inode)
        return file is not None and file.writers > 0

    def any_in(self, directory: int) -> bool:
        """Return whether a file in the directory has another name. Reads the rows of all such files if any row was
        written since the last call, because a rename moves them."""
        writes = self._tree.database.writes
        if self._parents is None or self._writes != writes:
            entries = [self._tree.entry(inode) for inode in self._groups]
            self._parents = frozenset(entry.parent for entry in entries if entry is not None)
            self._writes = writes
        return directory in self._parents


def _identity(entry: Entry) -> tuple[object, ...]:
    """Return values that differ as soon as a file is written, or gets other attributes."""
    return entry.size, entry.mtime_ns, entry.mode, entry.uid, entry.gid, entry.etag, entry.place, entry.offset


@contextmanager
def _never_eexist() -> Iterator[None]:
    """Turn EEXIST about the source, or a file stored before it, into EBUSY: in link(2) it concerns the new name."""
    try:
        yield
    except FileError as error:
        if error.errno != errno.EEXIST:
            raise
        raise FileError(errno.EBUSY, str(error)) from error


class Links:
    """Gives files second names; see the module's head."""

    def __init__(
        self,
        mode: str,
        namespace: Namespace,
        drafts: Drafts,
        io: FileIO,
        writer: ObjectWriter,
        writeback: WriteBackQueue,
        reader: BlockReader,
        current: Callable[[int], Entry],
    ) -> None:
        """``mode`` as `MountConfig.hard_links`; ``current`` as in `LinkCounts`."""
        self._mode, self._ns, self._drafts, self._io, self._writer = mode, namespace, drafts, io, writer
        self._writeback, self._reader, self._client = writeback, reader, drafts.services.client
        self._claims = writer.claims
        self.counts = LinkCounts(namespace.tree, namespace.events, drafts.files, current)

    async def link(self, source: Entry, parent: int, name: bytes) -> Entry:
        """Give a file another name; return the entry of that name. Raises FileError: EPERM if the store has no
        condition that refuses a taken name, links are refused, or the source is no regular file; EEXIST; EBUSY if the
        key has, or had, bytes of other names, or another client has the source's name. Raises LakeError."""
        self._ns.keys.checked_path(parent, name)
        if source.flags & (Flag.DIRECTORY | Flag.SYMLINK) or self._mode == "refuse":
            raise FileError(errno.EPERM)
        if (await self._ns.lookup(parent, name))[0] is not None and await self._ns.lookup_in_store(parent, name):
            raise FileError(errno.EEXIST)
        if len(self._writeback):
            with _never_eexist():
                await self._writeback.drain(list(self._writeback.items))
        now = self._ns.tree.entry(source.inode)
        if now is None:
            raise FileError(errno.ENOENT)
        file = self._drafts.files.acquire(now, writer=False)
        try:
            if file.writers:  # the source may be linked before it is closed
                for listener in self._ns.events.pages_wanted:
                    await listener(source.inode)
            if file.draft is not None:
                with _never_eexist():
                    await self._io.publish(file)
            await self._io.poll()  # the name may be a packed file, whose key is free
            if self._ns.tree.child(parent, name) is not None:
                raise FileError(errno.EEXIST)
            path = self._ns.keys.checked_path(parent, name)  # the directory may have been renamed
            await self._take(file, path)
        except FileError as error:
            if error.errno == errno.EEXIST:  # the caller will read the file that has the name
                with suppress(LakeError):
                    await self._ns.lookup(parent, name, ask=True)
                self._ns.invalidate_name(parent, name)
            raise
        finally:
            await self._io.release(file, writer=False)
        linked = self._ns.tree.child(parent, name)
        if linked is None:
            raise FileError(errno.ENOSPC, f"{path} is linked once the disk of the cache directory has room")
        self.counts.add(source, linked)
        self._ns.touch(parent)
        return linked

    # -- taking the key

    async def _take(self, file: OpenFile, path: str) -> None:
        """Store the file's bytes once more, as the object at ``path``, and record that. Until then a removed file's
        deletion stays queued: it deletes the same bytes if this node dies. Raises FileError: EEXIST, EBUSY, EPERM.
        Raises LakeError."""
        extent, entry = file.extent, file.entry
        if extent is None:
            raise FileError(errno.EPERM, f"{file.key} is not in the store")
        metadata = {**file.describe()[0], DRAFT_METADATA: self._drafts.new_id()}
        body, able = await self._read_small(extent), self._client.capabilities
        has_condition = able.complete_if_absent if body is None else able.put_if_absent
        target = DraftTarget(path, file.describe, if_absent=has_condition)
        async with self._writer.keeping(path):
            for _ in range(ATTEMPTS_MAX):
                self._check_free(path)  # after what was awaited: the source's bytes, or the claim of a removed version
                described = {**metadata, **self._claims.describe()}
                try:
                    if body is None:
                        meta = await self._copy_in_parts(extent, target, described)
                    else:
                        meta = await self._client.put(path, body, metadata=described, version=target)
                except Superseded as error:
                    raise FileError(errno.EEXIST) from error
                except (PreconditionFailed, Overtaken):
                    await self._expect_removed(target, extent, body, metadata[DRAFT_METADATA])
                    continue
                await self._writer.record_link(path, entry, meta, self._client)
                return
            raise FileError(errno.EBUSY, f"{path} is changed all the time")

    def _check_free(self, path: str) -> None:
        """Raise FileError: EEXIST if the name exists by now, perhaps as another node renamed a file; EBUSY if the key
        has, or had, bytes of other names, perhaps by the rename that removed the version."""
        if self._ns.at(path) is not None:
            raise FileError(errno.EEXIST)
        if self._drafts.files.is_key_taken(path):
            raise FileError(errno.EBUSY, f"other names have, or had, bytes at the key {path}")

    async def _read_small(self, extent: Extent) -> bytes | None:
        """Return the bytes of a file that is sent from memory; None for one that the store copies. Raises
        FileError(EPERM) if the store has no condition that the name is free (unless ``mode`` is ``local``), or cannot
        copy the file."""
        able, is_local = self._client.capabilities, self._mode == "local"
        if extent.size <= SENT_BYTES_MAX and (able.put_if_absent or (is_local and not able.complete_if_absent)):
            if not extent.size:
                return b""
            return bytes(await self._reader.read(extent.version, extent.offset, extent.size))
        if not extent.size or not able.part_copy or not (able.complete_if_absent or is_local):
            raise FileError(errno.EPERM, "this store has no condition that keeps two nodes from linking one name")
        return None

    async def _copy_in_parts(self, extent: Extent, target: DraftTarget, metadata: dict[str, str]) -> ObjectMeta:
        client, key, version = self._client, target.key, extent.version
        upload_id = await client.create_multipart(key, metadata=metadata)
        is_complete = False
        try:
            refs: list[PartRef] = []
            for number, start in enumerate(range(0, extent.size, COPY_PART_BYTES), 1):
                begin, end = extent.offset + start, extent.offset + min(start + COPY_PART_BYTES, extent.size)
                refs.append(
                    await client.upload_part_copy(key, upload_id, number, version.key, begin, end, etag=version.etag)
                )
            token = metadata[DRAFT_METADATA]
            meta = await client.complete_multipart(key, upload_id, refs, version=target, token=token)
            is_complete = True
            return meta
        finally:
            if not is_complete:
                with trio.move_on_after(ABORT_S_MAX, shield=True):
                    await client.abort_multipart(key, upload_id)

    async def _expect_removed(self, target: DraftTarget, extent: Extent, body: bytes | None, token: str) -> None:
        """Set the condition of the next request, after one found an object at the key. If that is a removed file's, the
        next request replaces this version of it only, which is claimed for ``token``. Raises FileError: EEXIST if it is
        another file's, EBUSY if nothing distinguishes the versions, or if the node that has the claim stores nothing.
        Raises LakeError."""
        able = self._client.capabilities
        for pause_s in CLAIM_PAUSES_S:
            there = await self._client.find(target.key)
            await self._io.poll()
            if there is None:
                target.expect_absent()
                return
            if not self._claims.is_removed_since_put(there):
                raise FileError(errno.EEXIST)
            is_equal = self._has_same_etag(there, extent, body)
            has_match = able.complete_if_match if body is None else able.put_if_match
            if (is_equal and not able.metadata) or self._claims.may_be_again(there):
                raise FileError(errno.EBUSY, f"the object of the file that was removed still lies at {target.key}")
            is_conditional = has_match and not is_equal
            may_be_free = not is_conditional and self._claims.may_be_deleted(there)
            if not may_be_free and await self._claims.claim(there, token):
                target.allow_replacing()
                target.expect(there.etag)
                return
            await trio.sleep(pause_s)
        raise FileError(errno.EBUSY, f"another node is about to delete the object at {target.key}, or to store its own")

    def _has_same_etag(self, there: ObjectMeta, extent: Extent, body: bytes | None) -> bool:
        """Return whether the new object may have the same ETag: then a condition on it could hold for two nodes."""
        if there.size != extent.size:
            return False
        if body is None or not self._client.capabilities.md5_etags:
            return True
        return hashlib.md5(body, usedforsecurity=False).hexdigest() == there.etag
