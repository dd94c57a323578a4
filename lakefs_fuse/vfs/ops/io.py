"""Reading and writing of open files, and what their last close leaves.

A file reads from its draft where it has one, else from the version that it is pinned to. Under write-back `close()`
waits for the local disk only; a write after that begins another draft. Trio thread only.

`check_version` tells OPEN whether that version is still the one at its key. A plain object can be replaced by another
node, or by any S3 client, and this node knows of it when it lists the directory again, or is told that the ETag does
not match. The kernel cannot be given another version under an inode that it has opened: with its write-back cache it
keeps the size that it knows. It does look the name up again where OPEN answers ESTALE. So the GET that the first READ
would need is made by OPEN, where it is sure to be needed.

What always holds: an inode is one version; a directory in which nothing was replaced costs no request more, but where
a small file is opened and not read. A crash leaves what staging and the journal hold.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio

from lakefs_fuse.blockcache.object_version import Version
from lakefs_fuse.blockcache.readahead import WHOLE_BYTES_MAX, Readahead
from lakefs_fuse.blockcache.reader import BlockReader
from lakefs_fuse.errors import FileError, LakeError
from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.metrics import ReadMetrics
from lakefs_fuse.staging.draft_record import DraftState
from lakefs_fuse.store.protocol import Buffer
from lakefs_fuse.upload.draft import Draft, DraftEnded
from lakefs_fuse.vfs.files.drafts import Drafts
from lakefs_fuse.vfs.files.late_objects import LateObjects, Wait
from lakefs_fuse.vfs.files.open_file import OpenFile
from lakefs_fuse.vfs.namespace.namespace import Namespace
from lakefs_fuse.vfs.namespace.renamed_objects import RenamedObjects
from lakefs_fuse.vfs.ops.incomplete_files import IncompleteFiles
from lakefs_fuse.vfs.writeback.publisher import Publisher

REPLACED_MAX = 3
"""A name is followed over this many versions that come while it is opened."""
WAIT_S_MAX = 5.0
"""OPEN waits no longer for the GET, which goes on, and which READ then waits for: the store may be away."""
COPIED_BYTES_MIN = 1 << 20
"""A smaller file costs less to read and to write, with others in a pack, than three requests for a copy of its own."""
COPIED_BYTES_MAX = 1 << 30
"""Of one request; the answer has 32 bits."""
DIRECTORIES_MAX = 1024
KEYS_GONE_MAX = 1024
"""Objects of which the log says that they are gone."""
log = logging.getLogger(__name__)


class FileIO:
    """See the module's head."""

    def __init__(
        self,
        namespace: Namespace,
        drafts: Drafts,
        reader: BlockReader,
        publisher: Publisher,
        incomplete: IncompleteFiles,
        renamed: RenamedObjects,
        late: LateObjects,
        poll: Callable[[], Awaitable[object]],
    ) -> None:
        """``poll`` applies what others committed."""
        self._late, self._keys_gone = late, dict[str, None]()
        self._ns, self._files, self._drafts = namespace, drafts.files, drafts
        self._reader, self._publisher, self._renamed, self.poll = reader, publisher, renamed, poll
        self.close, self.publish, self.set_aside = publisher.close, publisher.publish, incomplete.set_aside
        self._replaced_in: dict[int, None] = {}
        """Directories in which others replaced a file lately."""

    # -- reading

    async def read(self, file: OpenFile, offset: int, length: int, readahead: Readahead, reads: ReadMetrics) -> Buffer:
        """``reads`` counts the request; a file that is being written is read from the local disk there."""
        request, began_s = ReadMetrics(), trio.current_time()
        try:
            return await self._read(file, offset, length, readahead, request)
        finally:
            reads.count_read(request, trio.current_time() - began_s)

    async def _read(self, file: OpenFile, offset: int, length: int, readahead: Readahead, reads: ReadMetrics) -> Buffer:
        while file.draft is not None:
            began_s = trio.current_time()
            try:
                data = await file.draft.read(offset, length)
            except DraftEnded:
                async with file.publishing:
                    continue
            reads.waited_disk_s += trio.current_time() - began_s
            reads.bytes_of_disk += len(data)
            return data
        wait: Wait | None = None
        while True:
            extent = file.extent
            if extent is None or offset >= extent.size:
                return b""
            length = min(length, extent.size - offset)
            begin = extent.offset + offset
            try:
                if extent.is_whole:
                    return await self._reader.read(extent.version, begin, length, readahead, reads=reads)
                within = (extent.offset, extent.offset + extent.size)
                return await self._reader.read(extent.version, begin, length, within=within, reads=reads)
            except FileError as error:
                if error.errno != errno.ESTALE:
                    raise
                if file.extent == extent:
                    await self.poll()
                if file.extent == extent:
                    if self._late.is_expected(file.entry, error) and self._ns.tree.entry(file.entry.inode) is not None:
                        wait = wait or self._late.wait()
                        if await wait.pause():
                            continue
                    await self.renew(file.entry)  # for who opens it next
                    if file.entry.place and file.extent == extent:
                        self._log_gone(file, extent.version.key)
                    raise

    def _log_gone(self, file: OpenFile, key: str) -> None:
        """Bytes that a commit names are not where it says: once for each object."""
        if key in self._keys_gone or len(self._keys_gone) >= KEYS_GONE_MAX:
            return
        self._keys_gone[key] = None
        log.error(
            "%s cannot be read: the store does not have the version of %s that commits name. If other tools copied or "
            "encrypted the lake, unmount it and run `lakefs-fuse fsck --rebind`; else run `lakefs-fuse fsck`",
            file.key, key,
        )  # fmt: skip

    # -- writing

    async def write(self, file: OpenFile, offset: int, data: Buffer) -> None:
        """Where it fails, the file is incomplete until the range was written again."""
        while True:
            try:
                draft = await self._draft_to_change(file)
            except Exception as error:
                end, draft_now = offset + len(data), file.draft
                if draft_now is None or draft_now.sequence:
                    file.refused.add(offset, end, error)
                else:
                    draft_now.refuse(offset, end, error)
                raise
            try:
                await draft.write(offset, data)
                return
            except DraftEnded:
                await self._wait_published(file)

    async def copy_range(self, source: OpenFile, offset: int, file: OpenFile, at: int, length: int) -> int:
        """The bytes of a version in the store become bytes of a file at the same offset, which has as many so far, all
        of them of that version; returns how many, 0 where that is not so. The store copies them when it is closed."""
        extent, client = source.extent, self._drafts.services.client
        is_acknowledged = file.draft is not None and file.draft.sequence > 0
        if offset != at or at != file.current.size or is_acknowledged or file.unlinked:
            return 0
        if source.draft is not None or extent is None or not client.capabilities.part_copy:
            return 0
        end = min(offset + length, offset + COPIED_BYTES_MAX, extent.size)
        if extent.size < COPIED_BYTES_MIN or end <= offset:
            return 0
        if not offset and not await self._is_in_place(extent.version):  # else it is known already
            return 0
        if file.draft is None and (file.refused.ranges or (at and (file.behind or file.extent != extent))):
            return 0
        try:
            async with self._changing(file, end) as draft:
                is_copied = await draft.copy_from(extent, offset, end)
        except DraftEnded:
            return 0
        if not is_copied:
            return 0
        self._files.add_copy(file)
        return end - offset

    async def _is_in_place(self, version: Version) -> bool:
        """The store says that it has the version; False where it does not answer."""
        try:
            there = await self._drafts.services.client.find(version.key)
        except LakeError as error:
            log.info("%s is copied by reading and writing it: %s", version.key, error)
            return False
        return there is not None and there.etag == version.etag

    async def _draft_to_change(self, file: OpenFile) -> Draft:
        if file.draft is not None and file.draft.sequence:
            await self._publisher.begin_next(file, file.draft)
        return self._drafts.draft(file)

    async def truncate(self, file: OpenFile, size: int) -> None:
        """Raises LakeError; then the file is as it was."""
        while True:
            if size and file.draft is not None and file.draft.sequence:
                self._check_size(size)
                await self._publisher.begin_next(file, file.draft)
            try:
                async with self._changing(file, size, is_emptied=size == 0) as draft:
                    await draft.truncate(size)
                    if not file.is_written_directly and any(end > size for _, end in draft.refused.ranges):
                        await draft.truncate(size)  # the first was taken for the kernel's, which it cannot be
                file.count_truncated(size)
                return
            except DraftEnded:
                await self._wait_published(file)

    def _check_size(self, size: int) -> None:
        """Raises FileError(EFBIG) where the next version of a file could not be so large."""
        size_max = self._drafts.services.layout.file_bytes_max
        if size > size_max:
            raise FileError(errno.EFBIG, f"a file holds at most {size_max} bytes on this mount")

    @asynccontextmanager
    async def _changing(self, file: OpenFile, size: int, *, is_emptied: bool = False) -> AsyncIterator[Draft]:
        """The draft to change, which is to have ``size`` bytes. One that begins here ends where the block fails: a
        release would publish it, over what other nodes have stored meanwhile."""
        begins = file.draft is None
        if begins:
            self._check_size(size)
        draft, entry = self._drafts.draft(file, is_emptied=is_emptied), file.entry
        try:
            yield draft
        except LakeError:
            if begins:
                await self._end_unchanged(file, draft, entry)
            raise

    async def _end_unchanged(self, file: OpenFile, draft: Draft, entry: Entry) -> None:
        """Discard the draft unless another call has changed the file since its entry was this."""
        async with file.publishing, draft.gate:
            is_changed = file.entry is not entry or draft.sequence or draft.pages.pages or draft.refused.ranges
            if file.draft is not draft or is_changed or draft.upload_intent_ns:
                return
            await self._discard(file)

    async def _discard(self, file: OpenFile) -> None:
        """Raises nothing but Cancelled: nobody waits for this, or for another error."""
        try:
            await self._drafts.discard(file)
        except LakeError as error:  # the journal: the next mount throws it away
            log.warning("what is staged of %s could not be thrown away: %s", file.key, error)

    @staticmethod
    async def _wait_published(file: OpenFile) -> None:
        """The draft has ended: it was acknowledged, or the task that ended it is about to detach it."""
        if file.draft is not None and file.draft.sequence:
            return
        async with file.publishing:
            pass

    # -- closing

    async def release(self, file: OpenFile, *, writer: bool) -> None:
        """One handle less. The last one takes the file out of the table, unless it still has bytes to publish."""
        file.handles -= 1
        file.writers -= writer
        if not file.handles and file.draft is not None and file.unlinked and not file.is_being_unlinked:
            await self._discard(file)
        if file.is_orphaned:
            await self.set_aside(file)
        else:
            self.unpin(file)

    def unpin(self, file: OpenFile) -> None:
        """A file may have lost its last handle: finish what its writers left, or take it out of the table."""
        if file.is_orphaned:
            self._drafts.services.nursery.start_soon(self.set_aside, file)
        elif not file.handles and file.draft is not None and file.draft.state is DraftState.WRITING:
            self._drafts.services.nursery.start_soon(self._close_late, file)
        else:
            self._files.forget_if_idle(file)

    async def _close_late(self, file: OpenFile) -> None:
        """No close() waits for these bytes any more (a mapping outlived its file, a close was not the opener's)."""
        try:
            await self.close(file)
        except LakeError as error:
            log.error("%s is not durable: %s", file.key, error)
        except Exception:
            log.exception("%s is not durable", file.key)
        if file.is_orphaned:
            await self.set_aside(file)
        self._files.forget_if_idle(file)

    # -- the version that an OPEN is pinned to

    async def check_version(self, entry: Entry | None, reads: ReadMetrics) -> None:
        """Begin to read a file of which nothing is cached. Raises FileError(ESTALE) where its object was replaced; then
        the name has another inode, of the version that is there now, of which the first bytes are cached."""
        first: Entry | None = entry
        for _ in range(REPLACED_MAX):
            if entry is None or await self._is_current(entry, reads):
                break
            if await self._is_elsewhere(entry):
                return
            entry = await self.renew(entry)
        if entry is not first:
            raise FileError(errno.ESTALE)

    async def _is_elsewhere(self, entry: Entry) -> bool:
        """A commit that was not seen before says where the bytes of the inode are now; its handles follow them."""
        try:
            await self.poll()
        except LakeError as error:
            log.info("polling for commits that say where %s is failed: %s", os.fsdecode(entry.name), error)
        now = self._ns.tree.entry(entry.inode)
        return now is not None and (now.place, now.offset, now.etag) != (entry.place, entry.offset, entry.etag)

    async def _is_current(self, entry: Entry, reads: ReadMetrics) -> bool:
        """False only where the store said so."""
        if await self._is_worth_a_get(entry):
            opening = ReadMetrics()
            try:
                with trio.move_on_after(WAIT_S_MAX):
                    await self._reader.read(self._version(entry), 0, 1, Readahead(), reads=opening)
            except FileError as error:
                # READ waits for an object that is late, and answers any other error.
                return error.errno != errno.ESTALE or self._late.is_expected(entry, error)
            finally:
                reads.add_waits(opening)
        return True

    async def renew(self, entry: Entry) -> Entry | None:
        """What the store has now under the name of a version that is gone; None where that is no other file, or the
        store does not tell."""
        if self._ns.tree.entry(entry.inode) is None:
            return None
        try:
            if entry.place:
                await self._renamed.adopt(self._ns.key(entry))
                return None
            if not entry.is_plain:
                return None
            now, _ = await self._ns.lookup(entry.parent, entry.name, ask=True)
        except LakeError as error:
            log.info("%s was replaced, and by what cannot be told: %s", os.fsdecode(entry.name), error)
            return None
        if now is None or now.is_dir or now.inode == entry.inode:
            return None
        self._replaced_in.pop(entry.parent, None)
        self._replaced_in[entry.parent] = None
        if len(self._replaced_in) > DIRECTORIES_MAX:
            del self._replaced_in[next(iter(self._replaced_in))]
        return now

    async def _is_worth_a_get(self, entry: Entry) -> bool:
        """Any first read of the file takes the same GET, or that is likely and a replaced version is, too."""
        if not entry.is_plain or not entry.size:
            return False
        if entry.size > WHOLE_BYTES_MAX and entry.parent not in self._replaced_in:
            return False
        return not await self._reader.has_first_block(self._version(entry))

    def _version(self, entry: Entry) -> Version:
        extent = self._ns.extent(entry)
        assert extent is not None, "a plain file is in the store"
        return extent.version
