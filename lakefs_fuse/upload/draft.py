"""A file being written: staged pages over the version it was opened on, uploaded in parts while it grows.

What always holds:

* (*one visible step*) nothing of a draft is visible in the store until `publish` completes it in one request;
* (*page origin*) a page comes from staging if it is local, else from its spilled object, else from the base version
  below ``base_limit``, else it is zeros; before a write of a part of a page the rest of it is staged, which is decided
  in the gate, because pages leave staging and bases change while a task waits for it;
* (*one upload a part*) a part is uploaded once every page of it is local, again if it is written to after that, and at
  `publish` if it was not yet; two uploads of one part number never run at the same time;
* (*journal before cut*) no record names staged bytes beyond the end of the staging file, which would be read as zeros;
* (*dropped parts*) a part whose staged bytes were dropped to free space can be completed, but not read or changed;
* (*refused writes unpublished*) a refused write is kept in ``refused``, and nothing is published until its bytes were
  written again or truncated;
* (*acknowledged drafts*) an acknowledged draft does not change; its bytes and its record survive a crash of the
  machine;
* (*draft states*) only `transition` changes ``state``, by the table of `draft_record.TRANSITIONS`.

Writers share the gate; `publish` and `truncate` hold it alone. All methods run on trio tasks; file calls that may
block long go to worker threads. While the store is away, parts are retried without limit (`_upload_patiently`). After a
crash the journal record names the staged bytes (`record`): bytes written since it was last saved are in the staging
file, and count for a new file, which has no base to mix them with.
"""

from __future__ import annotations

import errno
import logging
from functools import partial

import msgspec
import trio

from lakefs_fuse.blockcache.cache_file import hash_blocks
from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Extent, Version
from lakefs_fuse.environment.local_disk import data_runs
from lakefs_fuse.errors import FileError, KeyConflict, LakeError, NotFound, Overtaken, StagingFull, Unavailable
from lakefs_fuse.staging.draft_record import TRANSITIONS, BaseExtent, DraftRecord, DraftState, SpilledPart, encode
from lakefs_fuse.staging.part_layout import PAGE_BYTES, PageMap, PartLayout
from lakefs_fuse.staging.refused_ranges import RefusedRanges
from lakefs_fuse.staging.segments import Spot
from lakefs_fuse.staging.staging_area import StagedFile
from lakefs_fuse.store.client import token_of
from lakefs_fuse.store.protocol import Buffer, FileSlice, ObjectMeta, PartRef
from lakefs_fuse.sync.backoff import Backoff
from lakefs_fuse.sync.shared_lock import SharedLock
from lakefs_fuse.sync.wakeup import Wakeup
from lakefs_fuse.upload.draft_target import DRAFT_METADATA, DraftTarget
from lakefs_fuse.upload.multipart_upload import MultipartUpload
from lakefs_fuse.upload.parts import Part, Parts, PartState, PartUses
from lakefs_fuse.upload.spilled_parts import Spills
from lakefs_fuse.upload.uploader import Outage, Uploader

FILL_BYTES_MAX = 4 << 20
SPILL_BYTES_MIN = 1 << 20
"""A part with fewer staged bytes is not worth a request."""
RETRY_S_FIRST, RETRY_S_MAX = 1.0, 30.0
"""Pauses between attempts to send a part while the store is away."""
RECENT_PARTS_KEPT = 2
"""The first part and this many complete ones behind the writer stay staged: headers and trailers are written late."""
log = logging.getLogger(__name__)


class DraftEnded(Exception):
    """The draft was published or discarded while the caller waited for it: the file has another version now."""


class Draft:
    """See the module's head. `vfs` makes drafts, and owns the names."""

    def __init__(
        self,
        uploader: Uploader,
        draft_id: str,
        target: DraftTarget,
        *,
        base: Extent | None = None,
        file: StagedFile | None = None,
        deferred: bool = False,
        layout: PartLayout | None = None,
    ) -> None:
        """Without ``file`` a staging file is created, and without ``layout`` the file gets the mount's layout of new
        files. Raises StagingFull, CacheError and FileError(EMFILE)."""
        self.uploader, self.layout = uploader, layout or uploader.layout
        self.id = draft_id
        self.target = target
        self.base = base
        self.base_limit = base.size if base else 0
        self.size, self.copies = self.base_limit, False
        """``copies``: the base is another file's version, for the store to copy. After a crash it is read instead."""
        self.state = DraftState.WRITING
        self.error: LakeError | None = None
        self.refused = RefusedRanges()
        self._undo_expected = False
        """The last write was refused beyond the end. If it was a direct one, the kernel now truncates the file to its
        present size. No program requested that, so it does not clear the refusal."""
        self.created_ns = uploader.clock.wall_ns()
        self.pages, self.spills, self.parts = PageMap(self.layout), Spills(self.layout), Parts(self.layout)
        self.hashes: dict[int, int] = {}
        """Of cache blocks in parts that were sent, by number, while their bytes are unchanged."""
        self.changes, self.token, self.recheck = 0, draft_id, False
        """How often it was changed since an attempt to publish it, and the token of its present bytes. ``recheck``: an
        attempt may have stored earlier bytes, which `reconcile` looks for first."""
        self.commit, self.packed = "", None  # type: str, Extent | None
        """The newest commit that was sent with these bytes, and their place in the one with which they were
        published."""
        self.unlinked = False
        self.sequence = self.began = self.stands_for = 0
        """The order of acknowledgement, as in `DraftRecord`."""
        self.saves = 0
        """How often its record was saved."""
        self.deferred = deferred
        """Whether parts are sent only when the draft is acknowledged or staging is half full."""
        self.outage = Outage(self.hurry)
        self._hurry = Wakeup()
        self.uploading = 0
        self.gate = SharedLock()
        """`publish` holds it alone, and keeps writers and truncation out."""
        self._idle = Wakeup()
        self._staged_bytes = self._journaled_end = 0  # the newest record names no staged bytes beyond the second
        self._synced_pages: dict[int, bytes] | None = None  # see `acknowledge`
        self.uses = PartUses(self.layout)
        self._parts_written_out: set[int] = set()
        """Parts whose writeout to the local disk has begun."""
        self._closing = False
        if file is None:
            file = StagedFile.create(uploader.staging, draft_id, target.key)
        self.file, self.upload = file, MultipartUpload(uploader, file, self.parts)
        uploader.staging.register(self)

    # -- room in staging

    @property
    def making_room(self) -> bool:
        waits = self.sequence > 0 and self.state in (DraftState.ACKNOWLEDGED, DraftState.FAILED)
        return self.uploading > 0 or self.state.is_ending or waits

    def drop_uploaded(self, *, keep_recent: bool = True) -> int:
        """See `Stager`. The journal records it before the bytes are dropped, or the next daemon would read the holes as
        bytes. If the journal cannot be written, no bytes are dropped, and a later call tries again."""
        is_over = self.unlinked or self.state in (DraftState.PUBLISHED, DraftState.DISCARDED)
        if is_over or not self.uploader.client.capabilities.parts_replaceable:  # all of it may have to be sent again
            return 0
        clean = sorted(index for index, part in self.parts.items() if part.state is PartState.CLEAN and index > 0)
        leaving = [i for i in (clean[:-RECENT_PARTS_KEPT] if keep_recent else clean) if self._can_drop(i)]
        if not leaving:
            return 0
        for index in leaving:
            self.parts.transition(index, PartState.DROPPED)
        try:
            self.save(sync=True)
        except LakeError as error:  # only of this file, because the caller frees space for another one
            for index in leaving:
                self.parts.transition(index, PartState.CLEAN)
            log.warning("uploaded parts of %s stay staged: the journal cannot be written: %s", self.target.key, error)
            return 0
        freed = sum(map(self._punch, leaving))
        self._unstage(freed)
        return freed

    async def spill(self) -> int:
        """Move the staged pages of the part with the most of them to the store; returns the bytes freed, 0 if that
        fails."""
        try:
            if not self._may_spill():
                return 0
            async with self.gate:
                index = self._fullest_part() if self._may_spill() else None
                if index is None:
                    return 0
                self.uploading += 1  # so that `discard` waits, and deletes what is stored here
                try:
                    return await self._spill_part(index)
                finally:
                    self._end_sending()
        except (LakeError, OSError) as error:  # of this file alone
            log.warning("staging is full, and parts of %s cannot leave it: %s", self.target.key, error)
            return 0

    def _may_spill(self) -> bool:
        if self.sequence or self.unlinked or self.state is not DraftState.WRITING:
            return False
        return self.uploader.client.capabilities.spills and self.size > self.layout.single_bytes_max

    def _fullest_part(self) -> int | None:
        """The dirty part with the most staged pages, if these are worth a request."""
        dirty = [i for i, part in self.parts.items() if part.state is PartState.DIRTY and i not in self.uses]
        pages = {index: self.pages.count(*self.layout.range(index)) for index in dirty}
        fullest = max(pages, key=pages.__getitem__, default=None)
        return fullest if fullest is not None and pages[fullest] * PAGE_BYTES >= SPILL_BYTES_MIN else None

    async def _spill_part(self, index: int) -> int:
        start, part_end = self.layout.range(index)
        end = min(part_end, self.size)
        await self.begin_upload()  # from here on it counts as a large file everywhere
        if self.spills.begin():
            self.save(sync=True)
        await self.fill_spilled(start, end)
        key = self.spills.next_key(self.id, index)
        async with self.uploader.slots.slot():
            with self.file.held():
                meta = await self.uploader.client.put(key, FileSlice(self.file.fd, start, end - start))
        staged = [(begin, upto) for begin, upto, local in self.pages.runs(start, end) if local]
        before = self.spills.add(SpilledPart(index, key, meta.etag, end - start), staged)
        pages, punched = self.pages.forget(index), False  # so that the record does not take the hole for them
        try:
            self.save(sync=True)
            await self.uses.wait_unused(index)  # they found the pages staged, or in the older object
            if not self._closing:
                punched = self.file.punch(start, part_end)  # whole pages, or the last would stay
        finally:
            if not punched:
                for begin, upto in staged:
                    self.pages.mark(begin, upto)
        freed = pages * PAGE_BYTES if punched else 0
        self._unstage(freed)
        self.uploader.metrics.parts_spilled += 1
        if before is not None:
            try:
                await self.uploader.client.delete(before.key)
            except LakeError as error:
                log.warning("%s is superseded, and could not be deleted: %s", before.key, error)
        return freed

    def _unstage(self, count: int) -> None:
        """Release ``count`` bytes of staging space."""
        self._staged_bytes -= count
        self.uploader.staging.release(count)

    def _can_drop(self, index: int) -> bool:
        start, end = self.layout.range(index)
        is_whole = self.parts[index].length == end - start
        return is_whole and self.pages.count(start, end) > 0 and index not in self.uses

    def _punch(self, index: int) -> int:
        """Delete the staged bytes of a part that the journal has as dropped; returns how many."""
        start, end = self.layout.range(index)
        if not self.file.punch(start, end):
            self.parts.transition(index, PartState.CLEAN)
            return 0
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            self.hashes.pop(block, None)
        return self.pages.forget(index) * PAGE_BYTES

    # -- reading and writing

    async def read(self, offset: int, length: int) -> Buffer:
        """Bytes [offset, offset + length), cut at the draft's size. Raises DraftEnded once it is closed, or published
        without these bytes staged, which a read may learn from the store before `publish` does; else StagingFull for
        dropped parts, and LakeError."""
        end = min(offset + length, self.size)
        if self.file.is_closed:
            raise DraftEnded
        try:
            with self.file.held(), self.uses.using(offset, end):
                return await self._read(offset, end)
        except (NotFound, StagingFull, FileError) as error:
            # With ``recheck`` a dead daemon may have published it, without a task of this one.
            is_being_published = self.state is DraftState.PUBLISHING and not self.recheck
            if self.state is DraftState.PUBLISHED or (is_being_published and error.errno == errno.ESTALE):
                raise DraftEnded from None
            raise

    async def _read(self, offset: int, end: int) -> Buffer:
        if offset >= end:
            return b""
        pieces: list[Buffer] = []
        for start, stop, local in list(self.pages.runs(offset, end)):
            if local:
                pieces.append(await self.file.read(start, stop - start))
                continue
            self._refuse_dropped(start, stop)
            for begin, upto, spilled in list(self.spills.pages.runs(start, stop)):
                pieces += await self._read_below(begin, upto, spilled)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    async def _read_below(self, start: int, stop: int, spilled: bool) -> list[Buffer]:
        """Bytes [start, stop), none of them staged: spilled, or the base's and zeros."""
        if spilled:
            return [await self.spills.read(self.uploader.client, start, stop)]
        pieces: list[Buffer] = []
        known = min(stop, self.base_limit)
        if start < known and self.base is not None:
            pieces.append(await self._read_base(self.base, start, known - start))
            start = known
        if start < stop:
            pieces.append(bytes(stop - start))
        return pieces

    async def _read_base(self, base: Extent, offset: int, length: int) -> Buffer:
        """Bytes of the version that this draft was opened on. Raises FileError, and Unavailable while the store is
        away, which may return them later."""
        try:
            return await self.uploader.reader.read(base.version, base.offset + offset, length)
        except FileError as error:
            if isinstance(error.__cause__, Unavailable):
                raise Unavailable(str(error)) from error
            raise

    async def write(self, offset: int, data: Buffer) -> None:
        """Stage ``data``. Raises StagingFull, CacheError, FileError(EFBIG), and the errors of reading the base; then
        the range is refused. Raises DraftEnded if the write belongs to another version."""
        end = offset + len(data)
        if offset == end:
            return
        try:
            await self._write(offset, end, data)
        except DraftEnded:
            raise
        except Exception as error:
            async with self.gate.shared():  # while it is published, another version has the refusal
                self._check_alive()
                self.refuse(offset, end, error)
            raise
        except BaseException as error:  # cancelled: the mount ends
            self.refused.add(offset, end, error)
            raise
        if self.refused.ranges:
            self.refused.remove(offset, end)
            self._record_completeness()

    def refuse(self, start: int, end: int, error: Exception) -> None:
        """Journal, synced, that a write of [start, end) failed."""
        is_first = not self.refused.ranges
        self._undo_expected = end > self.size
        self.refused.add(start, end, error)
        try:
            self._begin_change()
            self.save(sync=True)
        except LakeError as unsaved:
            self.uploader.staging.mark_incomplete(self.id, True)
            if is_first:
                log.error("refused bytes of %s could not be journaled: %s", self.target.key, unsaved)

    def _record_completeness(self) -> None:
        """Journal that the last refused range was written again or truncated. If that fails, the next daemon sees more
        refusals than there are."""
        if self.refused.ranges:
            return
        try:
            self.save(sync=True)
        except LakeError as unsaved:
            log.warning("that %s is complete again could not be journaled: %s", self.target.key, unsaved)
        else:
            self.uploader.staging.mark_incomplete(self.id, False)

    async def _write(self, offset: int, end: int, data: Buffer) -> None:
        self._check_size(end)
        reserved = 0
        try:
            while True:
                if not (reserved or self.pages.covers(offset, end)):
                    count = -(-end // PAGE_BYTES) * PAGE_BYTES - offset // PAGE_BYTES * PAGE_BYTES
                    await self.uploader.staging.reserve(count)
                    reserved = count
                await self._fill_edges(offset, end)
                async with self.gate.shared():
                    self._begin_change()
                    # While this task waited, a spill may have moved these pages, or a copy may have set a base.
                    if self._edges_to_fill(offset, end) or not (reserved or self.pages.covers(offset, end)):
                        continue
                    reserved -= await self._write_in_gate(offset, end, data)
                    return
        finally:
            self.uploader.staging.release(reserved)

    async def _write_in_gate(self, offset: int, end: int, data: Buffer) -> int:
        """Stage ``data``; the caller shares the gate, and the edges are filled. Returns the bytes of staging space of
        pages that became local."""
        self._refuse_dropped(offset, end)
        with self.uses.using(offset, end):
            await self._write_staged(offset, data)
        added = self.pages.mark(offset, end) * PAGE_BYTES
        self._staged_bytes += added
        if end > self.size:
            self.hashes.pop(self.size // BLOCK_BYTES, None)  # the last block gets longer
            self.size = end
        self._touch(offset, end)
        return added

    async def copy_from(self, source: Extent, start: int, end: int) -> bool:
        """Take bytes [start, end) from another file's version, after bytes from the same version; the store copies them
        when the draft is published. False if the draft has other bytes. Raises FileError(EFBIG), DraftEnded, CacheError
        and StagingFull."""
        self._check_size(end)
        async with self.gate:
            self._check_alive()
            is_next = start == self.size == self.base_limit and (not start or self.base == source)
            if not is_next or self.upload.intent_ns or self.spills.used or self.refused.ranges:
                return False
            self._begin_change()
            self.base, self.base_limit, self.size, self.copies = source, end, end, True
            self.save()
        return True

    @property
    def is_copy(self) -> bool:
        """Whether all of its bytes are another file's, so that publishing sends none."""
        return self.copies and self.base_limit == self.size and not self.pages.count(0, self.size)

    def begin_with(self, data: bytes) -> None:
        """Stage the first bytes of a new small file, even if there is no space. Raises as `write`."""
        if data:
            self.file.begin_with(data)
            staged_bytes = self.pages.mark(0, len(data)) * PAGE_BYTES
            self.uploader.staging.reserve_now(staged_bytes)
            self._staged_bytes = staged_bytes
            self.size = len(data)
            self._touch(0, self.size)

    async def _write_staged(self, offset: int, data: Buffer) -> None:
        try:
            await self.file.write(offset, data)
        except LakeError:  # a write that failed half-way leaves no bytes in pages that count as zeros
            end = offset + len(data)
            for begin, upto, local in list(self.pages.runs(offset - offset % PAGE_BYTES, end + -end % PAGE_BYTES)):
                if not local:  # another write may be staging the rest of such a page
                    self.file.punch(max(begin, offset), min(upto, end))
            raise

    async def _fill_edges(self, offset: int, end: int) -> None:
        """Stage the first and the last page of a write completely, if the rest of them is in the base or spilled."""
        for at in self._edges_to_fill(offset, end):
            async with self.gate:
                self._check_alive()
                await self.fill(at, at + PAGE_BYTES)

    def _edges_to_fill(self, offset: int, end: int) -> list[int]:
        """The offsets of pages that a write of [offset, end) covers in part, and whose other bytes are not staged."""
        pages = []
        for at in {offset - offset % PAGE_BYTES, end - end % PAGE_BYTES}:
            limit = self.size if self.spills.pages.covers(at, at + 1) else self.base_limit
            whole = offset <= at and min(at + PAGE_BYTES, limit) <= end
            if at < limit and at < end and not whole and not self.pages.covers(at, at + 1):
                pages.append(at)
        return pages

    def _check_size(self, size: int) -> None:
        if size > self.layout.file_bytes_max:
            raise FileError(errno.EFBIG, f"a file holds at most {self.layout.file_bytes_max} bytes on this mount")

    def _check_alive(self) -> None:
        if self.sequence or self.state in (DraftState.PUBLISHED, DraftState.DISCARDED):
            raise DraftEnded

    def _begin_change(self) -> None:
        """Journal a new token before bytes change, if a failed attempt to publish may have made the older ones visible.
        Raises DraftEnded, CacheError and StagingFull."""
        self._check_alive()
        if self.state is DraftState.FAILED:
            self.transition(DraftState.WRITING)
            self.changes += 1
            self.recheck, self.token, self.commit = True, f"{self.id}.{self.changes}", ""
            self.save(sync=True)

    async def fill(self, start: int, end: int) -> None:
        """Stage the bytes of [start, end) that the base or spilled objects have. The caller holds the gate alone.
        Raises LakeError."""
        await self.fill_spilled(start, end)
        stop = min(end, self.base_limit)
        for begin, upto, local in list(self.pages.runs(start, stop)) if start < stop else ():
            if local or self.base is None:
                continue
            self._refuse_dropped(begin, upto)
            while begin < upto:
                step = min(upto, begin + FILL_BYTES_MAX)
                await self._stage_filled(begin, await self._read_base(self.base, begin, step - begin))
                begin = step

    async def fill_spilled(self, start: int, end: int) -> None:
        """Stage the spilled bytes of [start, end) that are not staged since. The caller holds the gate alone."""
        if not self.spills.objects:
            return
        for begin, upto, local in list(self.pages.runs(start, min(end, self.size))):
            for at, stop, spilled in list(self.spills.pages.runs(begin, upto)) if not local else ():
                while spilled and at < stop:
                    step = min(stop, at + FILL_BYTES_MAX)
                    await self._stage_filled(at, await self.spills.read(self.uploader.client, at, step))
                    at = step

    async def _stage_filled(self, start: int, data: Buffer) -> None:
        await self._write_staged(start, data)
        added = self.pages.mark(start, start + len(data)) * PAGE_BYTES
        self._staged_bytes += added
        self.uploader.staging.reserve_now(added)

    def _refuse_dropped(self, start: int, end: int) -> None:
        layout = self.layout
        for index in range(layout.index(start), layout.index(max(start, end - 1)) + 1):
            if self.parts.is_dropped(index):
                raise StagingFull(
                    f"bytes {start} to {end} of a file larger than staging were uploaded and dropped before it was "
                    "closed: raise --staging-size to change or read them"
                )

    def _touch(self, start: int, end: int) -> None:
        """Mark [start, end) as written: parts become dirty, and complete ones are uploaded or written out."""
        layout = self.layout
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            self.hashes.pop(block, None)
        touched = self.parts.touch(start, end)
        if self.deferred and self.uploader.staging.is_half_full:
            self.deferred = False
        if self.deferred:
            self._write_out_complete(touched)
        if self.size > layout.single_bytes_max and not self.deferred:
            for index in touched if self.upload.intent_ns else range(touched.stop):
                self.start_if_complete(index)

    def start_if_complete(self, index: int) -> None:
        """Begin to upload a dirty part if every page of it is local."""
        part = self.parts.get(index)
        if part is None or part.state is not PartState.DIRTY or self.error is not None or self.unlinked:
            return
        if part.etag and not self.uploader.client.capabilities.parts_replaceable:
            return
        start, end = self.layout.range(index)
        if self.sequence:
            end = min(end, self.size)
        if end <= self.size and self.pages.covers(start, end):
            self.parts.transition(index, PartState.QUEUED)
            self.uploading += 1
            self.uploader.slots.ready()
            self.uploader.start(self._upload_in_background, index)

    def _write_out_complete(self, indexes: range) -> None:
        """Start the writeout of complete parts to the local disk, so that acknowledging the file need not wait."""
        for index in indexes:
            start, end = self.layout.range(index)
            if index not in self._parts_written_out and end <= self.size and self.pages.covers(start, end):
                self._parts_written_out.add(index)
                self.uploader.start(self.file.write_out, start, end)

    async def truncate(self, size: int) -> None:
        """Truncate or extend (with zeros) to ``size`` bytes. Raises StagingFull if the new end is inside a dropped
        part, FileError(EFBIG), DraftEnded and LakeError."""
        self._check_size(size)
        async with self.gate:
            self._begin_change()
            if size < self.size:
                await self._cut(size)
            unchanged = min(size, self.size) // BLOCK_BYTES
            self.hashes = {block: found for block, found in self.hashes.items() if block < unchanged}
            undone, self._undo_expected = self._undo_expected and size == self.size, False
            self.size = size
            if self.refused.ranges and not undone:
                self.refused.cut(size)
                self._record_completeness()

    async def _cut(self, size: int) -> None:
        layout = self.layout
        if size and layout.range(layout.index(size - 1))[1] > size:
            self._refuse_dropped(size - 1, size)
        if size % PAGE_BYTES:
            await self.fill_spilled(size - size % PAGE_BYTES, size)
        if size < self._journaled_end:
            self._journal_cut(size)
        await self.file.cut(size)
        self.spills.pages.truncate(size)
        gone = self.pages.truncate(size) * PAGE_BYTES
        self._unstage(gone)
        self.base_limit = min(self.base_limit, size)
        bytes_dropped = self.parts.bytes_dropped
        self.parts.cut(size)
        if self.parts.bytes_dropped < bytes_dropped:
            self._journal_cut_parts(size)

    def _journal_cut(self, size: int) -> None:
        """Journal that the draft ends at ``size`` before its staging file is truncated: otherwise the next daemon would
        read staged pages beyond the end as written zeros. That daemon may find the file still at its old length; for
        this case dropped parts stay in the record. Raises CacheError."""
        record = self.prepare_record()
        pages, spills = PageMap(self.layout), Spills(self.layout)
        pages.load(record.pages)
        pages.truncate(size)
        spills.load(record.spills, record.spilled)
        spills.pages.truncate(size)
        cut = msgspec.structs.replace(
            record,
            size=size,
            base_limit=min(record.base_limit, size),
            pages=pages.dump(),
            spills=spills.dump(),
        )
        self.uploader.save(self.id, encode(cut), True)
        self._journaled_end = size

    def _journal_cut_parts(self, size: int) -> None:
        """Journal that the staging file was truncated inside dropped parts: if it grows again, they are zeros."""
        try:
            cut = msgspec.structs.replace(self.prepare_record(), size=size)
            self.uploader.save(self.id, encode(cut), True)
        except LakeError as error:  # the next record tells
            log.warning("dropped parts of %s were truncated, which could not be journaled: %s", self.target.key, error)

    # -- uploading

    def start_uploads(self) -> None:
        """Begin to send the parts of an acknowledged file that is larger than one."""
        self.deferred = False
        layout = self.layout
        if self.size > layout.single_bytes_max:
            for index in range(layout.count(self.size)):
                self.parts.setdefault(index, Part())
                self.start_if_complete(index)

    async def _upload_in_background(self, index: int) -> None:
        """Send a QUEUED part, counted in ``uploading``. Raises nothing but Cancelled."""
        try:
            await self._upload_patiently(index)
        except KeyConflict as error:
            self.outage.error = error  # `publish` sends it to another key
            return
        except (LakeError, OSError) as error:
            self.error = error if isinstance(error, LakeError) else self.uploader.staging.translate(error)
            self.uploader.metrics.failures += 1
        except Exception as error:
            log.exception("uploading part %d of %s", index, self.target.key)
            self.error = LakeError(f"uploading failed: {error!r}")
        finally:
            self.parts.withdraw(index)
            self._end_sending()
            self.uploader.staging.notify()
        if self.state.sends_early:
            self.start_if_complete(index)

    async def _upload_patiently(self, index: int) -> None:
        """Send the part with its present bytes, and retry while the store is away. `publish` does not wait for that,
        but sends the remaining parts itself."""
        backoff = Backoff(RETRY_S_FIRST, RETRY_S_MAX)
        while True:
            try:
                await self.upload_part(index, in_background=True)
                return
            except Unavailable:
                if self.parts[index].state is PartState.DIRTY:
                    self.parts.transition(index, PartState.QUEUED)
            with trio.move_on_after(backoff.next_s()):
                await self._hurry.wait()
            if not self.state.sends_early:
                return
            self.uploader.slots.ready()

    def hurry(self) -> None:
        """End the pauses of parts that wait for their next attempt."""
        self._hurry.wake_all()

    # -- write-back

    def acknowledge(self, sequence: int) -> None:
        """Enter ACKNOWLEDGED, as number ``sequence``. The caller holds the draft alone, has synced it, and saves the
        record. Pages that are fetched later are not synced, and in no segment, so records name those of now."""
        self.recheck = self.recheck or self.state is DraftState.FAILED  # an attempt may have had no answer
        self.transition(DraftState.ACKNOWLEDGED)
        self.sequence = sequence
        if self.base is not None or self.spills.used:
            self._synced_pages = self.pages.dump()

    @property
    def is_unknown_to_store(self) -> bool:
        """Whether the draft is acknowledged, and no byte of it was ever sent."""
        return self.state is DraftState.ACKNOWLEDGED and not (self.upload.intent_ns or self.uploading or self.recheck)

    def count_staged(self) -> None:
        """Reserve space for the staged bytes of a restored draft. Called once."""
        self._staged_bytes = self.pages.pages * PAGE_BYTES
        self.uploader.staging.count_staged(self._staged_bytes)

    async def pause(self) -> None:
        """Stop uploads, until the next change. There is no writer."""
        if self.state is DraftState.WRITING:
            self.transition(DraftState.FAILED)
        self.hurry()
        await self.wait_idle()

    async def stop_uploads(self) -> None:
        """Begin to publish: uploads end, and `publish` sends the parts that failed or wait for another attempt."""
        self.begin_publish()
        if self.uploading:
            self.hurry()
            await self.wait_idle()
        self.error = None

    def _end_sending(self) -> None:
        self.uploading -= 1
        if not self.uploading:
            self._idle.wake_all()

    async def wait_idle(self) -> None:
        """Wait until no part is being uploaded in the background, or spilled."""
        while self.uploading:
            await self._idle.wait()

    async def upload_part(self, index: int, *, in_background: bool = False) -> None:
        """Send one part as it is now; it counts as ready (`UploadSlots.ready`). The part becomes CLEAN, or DIRTY if
        it was written to during the request. Raises LakeError; then the part is DIRTY.

        A part that is sent ``in_background`` fails while another asks a store that is away, and is left to `publish`
        once that waits for all of these: each would need a slot for a whole retry timeout."""
        async with self.uploader.slots.slot(is_ready=True):
            if self.state is DraftState.DISCARDED:
                return
            if in_background and self.outage.error is not None and not self.state.sends_early:
                return
            part = self.parts[index]
            start, end = self.layout.range(index)
            length, repeated = min(end, self.size) - start, bool(part.etag)
            if length <= 0:
                return
            with self.outage.asking(in_background=in_background), self.upload.sending(index):
                upload_id = await self.begin_upload()
                with self.file.held():
                    ref = await self.upload.send(index, start, length)
                    hashes = await self.uploader.staging.threads.run(
                        hash_blocks, self.file.fd, start, start + length, self.size
                    )
        self.uploader.metrics.parts += 1
        self.uploader.metrics.parts_repeated += repeated
        if upload_id != self.upload.id:  # which was replaced by one at another key in the meantime
            self.parts.transition(index, PartState.DIRTY)
            return
        self.parts.end_upload(index, ref, length)
        if part.state is PartState.CLEAN:
            if self.size > start + length and (start + length) % BLOCK_BYTES:
                hashes.pop((start + length) // BLOCK_BYTES, None)  # the file ended in this block, and has grown since
            self.hashes.update(hashes)
        self.save()

    def copied_part(self, index: int, ref: PartRef, length: int) -> None:
        """Record that the store has copied the part, of ``length`` bytes, from another object."""
        self.uploader.metrics.parts_copied += 1
        self.parts.end_upload(index, ref, length)
        self.save()

    async def begin_upload(self) -> str:
        """The id of the multipart upload, which is begun if it is not open. Raises LakeError."""
        return await self.upload.begin(self._describe_upload, partial(self.save, sync=True))

    def _describe_upload(self) -> tuple[str, dict[str, str]]:
        history = self.uploader.histories.describe(self.target.key, self.target.replaces)
        return self.target.key, {**self.target.describe()[1], DRAFT_METADATA: self.token, **history}

    def forget_upload(self, *, is_base: bool = False) -> None:
        """Journal that the upload no longer exists in the store: see `MultipartUpload.forget`. Raises CacheError."""
        self.upload.forget(is_base=is_base)
        self.save(sync=True)

    # -- states and places

    def transition(self, to: DraftState) -> None:
        """Enter a state; `TRANSITIONS` lists the allowed ones."""
        assert to in TRANSITIONS[self.state], f"{self.target.key}: from {self.state} to {to}"
        self.state = to

    def begin(self, began: int, *, deferred: bool, unlinked: bool) -> None:
        """Make the draft its file's newest version. ``began`` is the newest number of an acknowledged version."""
        self.began, self.deferred, self.unlinked = began, deferred, unlinked

    def retarget(self, target: DraftTarget) -> None:
        """Publish to another target; no upload has begun, or it has the same key."""
        self.target = target

    def move_base(self, before: Extent, after: Extent) -> None:
        """The base's bytes moved from ``before`` to ``after``. Raises CacheError."""
        if self.base == before:
            self.base = after
        if self.target.replaces == before.version.etag:
            self.target.update_replaced(after.version.etag)
        self.save()

    def supersede(self, place: int) -> None:
        """Record that the draft supersedes acknowledged versions, the oldest with number ``place``; 0: none."""
        self.stands_for = place

    def unlink(self, *, unlinked: bool = True) -> None:
        """The last name of these bytes was removed, or (not ``unlinked``) restored. The caller saves the record."""
        self.unlinked = unlinked

    def begin_publish(self) -> None:
        self.transition(DraftState.PUBLISHING)
        self.error = None

    def name_commit(self, key: str) -> None:
        """Record that a commit with these bytes is about to be sent to ``key``."""
        self.commit = key

    def fill_pack(self, extent: Extent) -> None:
        """Record that the store has the bytes in a pack."""
        self.packed = extent

    def end_publish(self) -> None:
        """Enter PUBLISHED: the bytes are in the store, and visible."""
        self.transition(DraftState.PUBLISHED)

    def fail_publish(self, error: BaseException, what: str) -> LakeError:
        """Enter FAILED; every byte is staged or in the upload, so the next attempt may succeed. The caller saves the
        record. Returns the draft's error."""
        self.transition(DraftState.FAILED)
        self.error = error if isinstance(error, LakeError) else LakeError(f"{what} was interrupted: {error!r}")
        self.uploader.metrics.failures += not isinstance(error, Overtaken | KeyConflict)
        return self.error

    async def adopt_attempt(self, older: ObjectMeta | None) -> None:
        """Take over the result of a failed attempt before changed bytes are published. ``older`` is the object that the
        attempt made: the draft replaces it, and it has the bytes of dropped parts. Without it, or if the upload with
        dropped parts did not become this object, the upload continues, under the token with which it began. Raises
        LakeError.
        """
        dropped_end = self.parts.dropped_end
        began_with = self.upload.metadata.get(DRAFT_METADATA, self.token)
        if older is not None:
            self.target.replace(older.etag)
            goes_on = dropped_end > 0 and not (token_of(older) == began_with and dropped_end <= older.size)
            if not goes_on:
                await self.upload.abort()
            is_base = dropped_end > 0 and not goes_on
            if self.base is not None or is_base:
                self.base = Extent.whole(Version(self.target.key, older.etag, older.size))
                limit = min(self.base_limit, older.size)
                self.base_limit = max(limit, dropped_end) if is_base else limit
            if not goes_on and (self.upload.id or is_base):
                self.forget_upload(is_base=is_base)
        if self.upload.id:
            self.token = began_with
        self.recheck = False

    # -- the journal

    def record(self, *, sequence: int = 0, spot: Spot | None = None) -> DraftRecord:
        """The journal record of the present draft. With ``sequence``: as it will be once acknowledged under that
        number, with its bytes at ``spot`` in a segment, if that is given."""
        target, spot = self.target, spot or self.file.spot
        metadata, metadata_multipart = target.describe()
        base = None
        if self.base is not None:
            version = self.base.version
            base = BaseExtent(version.key, version.etag, version.size, self.base.offset, self.base.size)
        return DraftRecord(
            id=self.id,
            key=target.key,
            state=DraftState.ACKNOWLEDGED if sequence else self.state,
            created_ns=self.created_ns,
            size=self.size,
            base=base,
            base_limit=self.base_limit,
            replaces=target.replaces,
            copied_from=target.copied_from,
            if_absent=target.if_absent,
            path=target.path,
            upload_id=self.upload.id,
            upload_intent_ns=self.upload.intent_ns,
            upload_metadata=self.upload.metadata,
            changes=self.changes,
            token=self.token,
            unlinked=self.unlinked,
            metadata=metadata,
            metadata_multipart=metadata_multipart,
            sequence=sequence or self.sequence,
            began=self.began,
            stands_for=self.stands_for,
            commit=self.commit,
            segment=spot.segment if spot else "",
            segment_offset=spot.offset if spot else 0,
            segment_bytes=spot.length if spot else 0,
            part_bytes_max=self.layout.part_bytes_max,
            # No part is in the store before an upload began.
            parts=self.parts.records() if self.upload.intent_ns or self.parts.bytes_dropped else [],
            pages=self.pages.dump() if self._synced_pages is None else self._synced_pages,
            error=str(self.error) if self.error else "",
            spilled=self.spills.used,
            spills=self.spills.dump() if self.spills.used else [],
            refused=list(self.refused.ranges),
            refused_errno=self.refused.errno,
            refused_why=self.refused.why,
        )

    def save(self, *, sync: bool = False) -> DraftRecord:
        """Journal the draft; returns the record. Raises CacheError, and StagingFull if the draft is FAILED and its
        bytes were in memory."""
        record = self.prepare_record()
        self.uploader.save(self.id, encode(record), sync)
        return record

    def prepare_record(self) -> DraftRecord:
        """The record, which the caller saves. Raises StagingFull and CacheError."""
        if self.state is DraftState.FAILED and not self.sequence:
            self.file.keep_on_disk()
        self.saves += 1
        record = self.record()
        if self.base is None or record.pages or record.parts or record.spills:
            self._journaled_end = max(self._journaled_end, self.size)
        return record

    def load(self, record: DraftRecord, staged_bytes: int) -> None:
        """Restore the state that another daemon journaled. ``staged_bytes`` is the length of the staging file. A file
        that was still being written has the length of its staging file, if it had no base to mix with; its parts are
        sent again if their bytes are staged, because they may have been written to since the record was saved.
        """
        self.state, self.created_ns = record.state, record.created_ns
        self.size, self.base_limit = record.size, record.base_limit
        self.upload.load(record)
        self.token, self.changes, self.recheck = record.token, record.changes, True
        self.sequence, self.began, self.commit = record.sequence, record.began, record.commit
        self.stands_for = record.stands_for
        self.refused = RefusedRanges(record.refused, record.refused_errno, record.refused_why)
        self.pages.load(record.pages)
        self.spills.load(record.spills, record.spilled)
        if self.sequence and (self.base is not None or self.spills.used):
            self._synced_pages = record.pages
        writing, layout = record.state is DraftState.WRITING, self.layout
        if writing and self.base is None:
            self.size = max(self.size, staged_bytes)
        self._journaled_end, count = self.size, layout.count(self.size)
        self.parts.load(part for part in record.parts if not (part.staged and writing) and part.index < count)
        for index in filter(self.parts.is_dropped, list(self.parts)):
            self.pages.forget(index)  # a record that drops parts still names their pages, which may be holes
        if writing and self.base is None:
            for index in range(layout.count(self.size)):
                if self.parts.is_dropped(index):
                    continue
                start, end = layout.range(index)
                spilled = index in self.spills.objects
                for begin, upto in data_runs(self.file.fd, start, min(end, self.size)) if spilled else [(start, end)]:
                    self.pages.mark(begin, min(upto, self.size))

    # -- the end

    async def discard(self) -> None:
        """Abort the upload and delete the staging file. The caller deletes the journal record, unless ``error`` says
        that an upload is left."""
        self.transition(DraftState.DISCARDED)
        self.hurry()
        await self.wait_idle()
        self.error = None
        try:
            await self.upload.abort()
            await self.delete_spills()
        except LakeError as error:
            self.error = error
        self.close(unlink=True)

    async def delete_spills(self) -> None:
        """Delete the spilled parts: the draft is published or discarded. Raises LakeError."""
        if self.spills.used:
            await self.uploader.delete_spills(self.id)

    def close(self, *, unlink: bool, leave: bool = False) -> None:
        """Release the descriptor and the staging space. ``unlink`` is false if the file became a cache file; ``leave``
        leaves the bytes to the next mount."""
        if self._closing:
            return
        self._closing = True
        staged_bytes, self._staged_bytes = self._staged_bytes, 0
        self.uploader.staging.unregister(self, staged_bytes)
        self.file.close(unlink=unlink, leave=leave)
