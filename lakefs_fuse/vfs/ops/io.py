"""Reads and writes open files, truncates them, and finishes them after their last close.

A file is read from its draft if it has one, else from the version to which it is pinned. Under write-back `close()`
waits for the local disk only; a write after that begins another draft. Trio thread only.

`check_version` checks for OPEN that this version is still at its key. Another node, or any S3 client, can replace a
plain object. This node learns of that when it lists the directory again, or when the store answers that the ETag does
not match. The kernel cannot get another version under an inode that it has opened: with its write-back cache it keeps
the size that it knows. But it looks the name up again if OPEN answers ESTALE. So OPEN sends the GET that the first READ
would send, for files that are likely to need it (`_is_worth_a_get`).

What always holds: an inode is one version; if nothing was replaced in a directory, OPEN costs no additional request,
except for a small file that is opened and not read. A crash leaves what staging and the journal hold.
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
from lakefs_fuse.errors import FileError, LakeError, StagingFull
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
"""Versions of a name that one OPEN checks, if others replace it meanwhile."""
WAIT_S_MAX = 5.0
"""Maximum wait of OPEN for the GET: the store may be away. The GET continues, and READ waits for it."""
COPIED_BYTES_MIN = 1 << 20
"""A smaller file costs less to read, and to write in a pack, than the three requests of a copy."""
COPIED_BYTES_MAX = 1 << 30
"""Maximum for one request: the answer has 32 bits."""
DIRECTORIES_MAX = 1024
KEYS_GONE_MAX = 1024
"""Maximum of missing objects that are logged."""
log = logging.getLogger(__name__)


class FileIO:
    """Reads, writes and closes files; see the module's head."""

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
        """``poll`` applies commits of other nodes."""
        self._late, self._keys_gone = late, dict[str, None]()
        self._ns, self._files, self._drafts = namespace, drafts.files, drafts
        self._reader, self._publisher, self._renamed, self.poll = reader, publisher, renamed, poll
        self.close, self.publish, self.set_aside = publisher.close, publisher.publish, incomplete.set_aside
        self._replaced_in: dict[int, None] = {}
        """Directories in which other clients replaced a file recently, the oldest first."""

    # -- reading

    async def read(self, file: OpenFile, offset: int, length: int, readahead: Readahead, reads: ReadMetrics) -> Buffer:
        """Read bytes of a file. ``reads`` counts the request; bytes of a draft count as read from the local disk."""
        request, began_s = ReadMetrics(), trio.current_time()
        try:
            return await self._read(file, offset, length, readahead, request)
        finally:
            reads.count_read(request, trio.current_time() - began_s)

    async def _read(self, file: OpenFile, offset: int, length: int, readahead: Readahead, reads: ReadMetrics) -> Buffer:
        while (draft := file.draft) is not None:
            began_s = trio.current_time()
            try:
                data = await draft.read(offset, length)
            except DraftEnded:
                async with file.publishing:
                    pass
                await self._record_published(file)
                continue
            except StagingFull:
                await self._store_acknowledged(file, draft)
                if file.draft is draft:
                    raise
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
                ahead, within = readahead if extent.is_whole else None, extent.within
                return await self._reader.read(extent.version, begin, length, ahead, within=within, reads=reads)
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
                    await self.renew(file.entry)  # for the next OPEN
                    if file.entry.place and file.extent == extent:
                        self._log_gone(file, extent.version.key)
                    raise

    async def _store_acknowledged(self, file: OpenFile, draft: Draft) -> None:
        """Store an acknowledged version that is larger than staging: what was dropped there can be read only then.
        Raises LakeError."""
        if draft.sequence and not file.unlinked:
            await self.publish(file)

    def _log_gone(self, file: OpenFile, key: str) -> None:
        """Log that the store lacks bytes that a commit names, once for each object."""
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
        """Write to the file. If that fails, the file is incomplete until the range is written again or truncated."""
        while True:
            try:
                draft = await self._draft_to_change(file)
            except Exception as error:
                end, draft_now = offset + len(data), file.draft
                if draft_now is None or draft_now.sequence or draft_now.state is DraftState.PUBLISHED:
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
        """Append bytes of a version in the store to a file, from the same offset; return how many. 0 if that is not
        possible: the file must end at this offset, and consist of bytes of that version. The store copies them when
        the file is closed."""
        extent, client = source.extent, self._drafts.services.client
        is_acknowledged = file.draft is not None and file.draft.sequence > 0
        if offset != at or at != file.current.size or is_acknowledged or file.unlinked:
            return 0
        if source.draft is not None or extent is None or not client.capabilities.part_copy:
            return 0
        end = min(offset + length, offset + COPIED_BYTES_MAX, extent.size)
        if extent.size < COPIED_BYTES_MIN or end <= offset:
            return 0
        if not offset and not await self._is_in_place(extent.version):  # later ranges follow one that was checked
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
        """Return whether the store says that it has the version at its key; False if it does not answer."""
        try:
            there = await self._drafts.services.client.find(version.key)
        except LakeError as error:
            log.info("%s is copied by reading and writing it: %s", version.key, error)
            return False
        return there is not None and there.etag == version.etag

    async def _draft_to_change(self, file: OpenFile) -> Draft:
        if file.draft is not None and file.draft.sequence:
            await self._publisher.begin_next(file, file.draft)
        await self._record_published(file)
        return self._drafts.draft(file)

    async def _record_published(self, file: OpenFile) -> None:
        """Record a version that the store has, where that has failed, so that the next can begin. Raises LakeError."""
        draft = file.draft
        if draft is None or draft.state is not DraftState.PUBLISHED or file.publishing.locked():
            return
        await self._publisher.record(file)
        if file.draft is draft and not file.publishing.locked():  # its name is removed
            raise FileError(errno.ESTALE, f"{file.key} was stored, and removed before that could be recorded")

    async def truncate(self, file: OpenFile, size: int) -> None:
        """Truncate or extend the file to ``size`` bytes. Raises LakeError; then the file is unchanged."""
        while True:
            if size and file.draft is not None and file.draft.sequence:
                self._check_size(size)
                await self._publisher.begin_next(file, file.draft)
            await self._record_published(file)
            try:
                async with self._changing(file, size, is_emptied=size == 0) as draft:
                    await draft.truncate(size)
                    if not file.bypasses_page_cache and any(end > size for _, end in draft.refused.ranges):
                        await draft.truncate(size)  # the first counted as the kernel's, but it is a program's
                file.count_truncated(size)
                return
            except DraftEnded:
                await self._wait_published(file)

    def _check_size(self, size: int) -> None:
        """Raise FileError(EFBIG) if a version of a file cannot have so many bytes on this mount."""
        size_max = self._drafts.services.layout.file_bytes_max
        if size > size_max:
            raise FileError(errno.EFBIG, f"a file holds at most {size_max} bytes on this mount")

    @asynccontextmanager
    async def _changing(self, file: OpenFile, size: int, *, is_emptied: bool = False) -> AsyncIterator[Draft]:
        """Yield the draft to change, which is to have ``size`` bytes. If the block fails, a draft that began here is
        discarded: a release would publish it over what other nodes have stored meanwhile."""
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
        """Discard the draft unless another call has changed the file since it had this entry."""
        async with file.publishing, draft.gate:
            is_changed = file.entry is not entry or draft.sequence or draft.pages.pages or draft.refused.ranges
            if file.draft is not draft or is_changed or draft.upload.intent_ns:
                return
            await self._discard(file)

    async def _discard(self, file: OpenFile) -> None:
        """Discard the file's draft. Raises nothing but Cancelled: callers do not wait, or raise another error."""
        try:
            await self._drafts.discard(file)
        except LakeError as error:  # of the journal: the next mount discards the draft
            log.warning("what is staged of %s could not be thrown away: %s", file.key, error)

    @staticmethod
    async def _wait_published(file: OpenFile) -> None:
        """Wait until an ended draft is detached from its file, unless it ended by being acknowledged."""
        if file.draft is not None and file.draft.sequence:
            return
        async with file.publishing:
            pass

    # -- closing

    async def release(self, file: OpenFile, *, writer: bool) -> None:
        """Release a handle. The last one removes the file from the table, unless the file has bytes to publish."""
        self._files.drop_handle(file, writer=writer)
        if not file.handles and file.draft is not None and file.unlinked and not file.is_being_unlinked:
            await self._discard(file)
        if file.is_orphaned:
            await self.set_aside(file)
        else:
            self.unpin(file)

    def unpin(self, file: OpenFile) -> None:
        """If the file has no handle, finish what its writers left, or remove it from the table."""
        if file.is_orphaned:
            self._drafts.services.nursery.start_soon(self.set_aside, file)
        elif not file.handles and file.draft is not None and file.draft.state is DraftState.WRITING:
            self._drafts.services.nursery.start_soon(self._close_late, file)
        else:
            self._files.forget_if_idle(file)

    async def _close_late(self, file: OpenFile) -> None:
        """Close a file for whose bytes no `close()` waits. A mapping outlived its descriptor, or the close was not the
        opener's."""
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

    async def check_version(self, file: OpenFile, reads: ReadMetrics) -> None:
        """Begin to read a file if `_is_worth_a_get`. Raises FileError(ESTALE) if its object was replaced; then the name
        has the inode of the present version, if the store tells it, and that version is read."""
        first, extent = file.entry, file.extent
        entry: Entry | None = first
        for _ in range(REPLACED_MAX):
            if entry is None or extent is None or await self._is_current(entry, extent.version, reads):
                break
            if await self._is_elsewhere(entry):
                return
            entry = await self.renew(entry)
            extent = None if entry is None else self._ns.extent(entry)
        if entry is not first:
            raise FileError(errno.ESTALE)

    async def _is_elsewhere(self, entry: Entry) -> bool:
        """Poll for commits; return whether one has moved the bytes of the inode. Its handles then follow them."""
        try:
            await self.poll()
        except LakeError as error:
            log.info("polling for commits that say where %s is failed: %s", os.fsdecode(entry.name), error)
        now = self._ns.tree.entry(entry.inode)
        return now is not None and (now.place, now.offset, now.etag) != (entry.place, entry.offset, entry.etag)

    async def _is_current(self, entry: Entry, version: Version, reads: ReadMetrics) -> bool:
        """Return whether the version is at its key; False only if the store says that it is not."""
        if await self._is_worth_a_get(entry, version):
            opening = ReadMetrics()
            try:
                with trio.move_on_after(WAIT_S_MAX):
                    await self._reader.read(version, 0, 1, Readahead(), reads=opening)
            except FileError as error:
                # READ waits for an object that is late, and answers any other error.
                return error.errno != errno.ESTALE or self._late.is_expected(entry, error)
            finally:
                reads.add_waits(opening)
        return True

    async def renew(self, entry: Entry) -> Entry | None:
        """Look up the name of a version that is gone; return the entry of the other file there. None if there is none,
        or the store does not answer. If the bytes were elsewhere, adopt the version that is there now
        (`RenamedObjects.adopt`), and return None."""
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

    async def _is_worth_a_get(self, entry: Entry, version: Version) -> bool:
        """Return whether OPEN sends the GET of the first READ. It does if the first block is not cached, and either any
        first READ of so small a file sends that GET, or files of its directory were replaced recently."""
        if not entry.is_plain or not entry.size:
            return False
        if entry.size > WHOLE_BYTES_MAX and entry.parent not in self._replaced_in:
            return False
        return not await self._reader.has_first_block(version)
