"""A file being written: staged pages over the version it was opened on, uploaded in parts while it grows.

Always true:

* nothing of a draft can be seen in the store until `publish` completes it in one request;
* a page is read from staging where it is local, from the base version below ``base_limit``, else it is zeros;
* a part is uploaded as soon as every page of it is local, again if it is written to after that, and at `publish` if it
  was not yet; two uploads of one part number never run at once;
* a part whose bytes were let go to make room can still be completed, but neither read nor changed;
* a write that was refused is remembered (see `refusals`), and nothing is published until its bytes were written again
  or cut off;
* an accepted draft is not changed any more; its bytes, and its record, survive a crash of the machine;
* while the store is away, parts wait and are tried again for ever (see `draft_uploads`).

Writers share the gate, `publish` and `truncate` hold it alone. All methods run on trio tasks; file calls that may
block long go to worker threads. After a crash the journal record says what is staged (see `record`): bytes written
since it was last saved are in the staging file and count for a new file, which has no base to mix them with.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, contextmanager

import trio

from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, Extent
from lakefs_fuse.errors import FileError, LakeError, StagingFull, Unavailable
from lakefs_fuse.product import METADATA_PREFIX
from lakefs_fuse.staging.block_hashes import BlockHasher, hash_blocks
from lakefs_fuse.staging.draft_record import DraftRecord, DraftState
from lakefs_fuse.staging.page_map import PAGE_BYTES, PageMap
from lakefs_fuse.staging.refused_ranges import Refusals
from lakefs_fuse.staging.staged_file import StagedFile
from lakefs_fuse.store.protocol import Buffer, FileSlice, PartRef
from lakefs_fuse.sync.shared_lock import Gate
from lakefs_fuse.sync.wakeup import Bell
from lakefs_fuse.upload.draft_services import DraftEnded, DraftServices, DraftTarget
from lakefs_fuse.upload.draft_snapshot import record_of
from lakefs_fuse.upload.orphaned_uploads import abort_strays
from lakefs_fuse.upload.part_state import Part, PartState
from lakefs_fuse.upload.part_upload import upload_in_background, write_out_complete
from lakefs_fuse.upload.spilled_parts import Spills, delete_spills, spill

DRAFT_METADATA = f"{METADATA_PREFIX}draft"
"""User metadata key of the token: the draft an object was made from, and after a dot which change of it, if any."""
FILL_BYTES_MAX = 4 << 20
RECENT_PARTS_KEPT = 2
"""The first part and so many complete ones behind the writer stay staged: headers and trailers are written late."""
log = logging.getLogger(__name__)


class Draft:
    """See the module's head. Made by `fs`, which also owns the names."""

    def __init__(
        self,
        services: DraftServices,
        draft_id: str,
        target: DraftTarget,
        *,
        base: Extent | None = None,
        file: StagedFile | None = None,
    ) -> None:
        """``file`` has its bytes where there are some. Raises StagingFull or CacheError where there can be no staging
        file."""
        self.services = services
        self.id = draft_id
        self.target = target
        self.base = base
        self.base_limit = base.size if base else 0
        self.size = self.base_limit
        self.state = DraftState.WRITING
        self.error: LakeError | None = None
        self.refused = Refusals()
        self._undo_expected = False
        """The last write was refused beyond the end. If it was a direct one, the kernel now truncates the file to the
        size that it has: nobody asked for that, and it takes no refusal back."""
        self.created_ns = services.clock_ns()
        self.pages = PageMap(services.layout)
        self.spills = Spills(services.layout)
        self.parts: dict[int, Part] = {}
        self.hashes: dict[int, int] = {}
        self.upload_id = ""
        self.upload_intent_ns = 0
        self.upload_metadata: dict[str, str] = {}
        self.upload_failed = False
        self._asking = Gate()
        self.token = draft_id
        self.commit = ""
        self.packed: Extent | None = None
        """Its bytes in the pack that it was published in."""
        self.changes = 0
        self.recheck = False
        self.unlinked = False
        self.accepted = self.began = self.stands_for = self.saves = 0
        self.deferred = False
        """Parts are sent when the draft is accepted, or staging is half full, and not before."""
        self.delayed: Unavailable | None = None
        """Why parts wait to be sent again."""
        self._hurry = Bell()
        self.uploading = 0
        self.gate = Gate()
        self._idle = Bell()
        self._staged_bytes = 0
        self._busy_parts: Counter[int] = Counter()
        self._closing = False
        if file is None:
            file = StagedFile.create(services.staging, draft_id, target.key)
        self.file = file
        services.staging.register(self)

    # -- what staging asks

    @property
    def making_room(self) -> bool:
        waits = self.accepted > 0 and self.state in (DraftState.ACCEPTED, DraftState.FAILED)
        return self.uploading > 0 or self.state is DraftState.PUBLISHING or waits

    def drop_uploaded(self, *, keep_recent: bool = True) -> int:
        """The journal is told before the bytes go, or a crash would take the holes for them."""
        if not self.services.client.capabilities.parts_replaceable:
            return 0  # all of it may have to be sent again
        if self.unlinked or self.state in (DraftState.PUBLISHED, DraftState.DISCARDED):
            return 0
        clean = sorted(i for i, part in self.parts.items() if part.state is PartState.CLEAN and i > 0)
        leaving = [i for i in (clean[:-RECENT_PARTS_KEPT] if keep_recent else clean) if self._can_drop(i)]
        if not leaving:
            return 0
        for index in leaving:
            self.parts[index].state = PartState.DROPPED
        self.save(sync=True)
        return sum(map(self.let_go, leaving))

    async def spill(self) -> int:
        """See `spills.spill`; 0 where that fails."""
        try:
            return await spill(self)
        except LakeError as error:
            log.warning("staging is full, and parts of %s cannot leave it: %s", self.target.key, error)
            return 0

    def let_go(self, index: int) -> int:
        """Staged bytes of a part go, which the journal knows; answers how many."""
        gone = self._punch(index)
        self.unstage(gone)
        return gone

    def unstage(self, count: int) -> None:
        """So many staged bytes are gone."""
        self._staged_bytes -= count
        self.services.staging.release(count)

    def is_busy(self, index: int) -> bool:
        """Somebody reads the part, or writes to it."""
        return self._busy_parts[index] > 0

    def _can_drop(self, index: int) -> bool:
        start, end = self.services.layout.range(index)
        return self.parts[index].length == end - start and not self._busy_parts[index] and self.pages.has_any(index)

    def _punch(self, index: int) -> int:
        start, end = self.services.layout.range(index)
        if not self.file.punch(start, end):
            if self.parts[index].state is PartState.DROPPED:
                self.parts[index].state = PartState.CLEAN
            return 0
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            self.hashes.pop(block, None)
        return self.pages.forget(index) * PAGE_BYTES

    @contextmanager
    def _using(self, start: int, end: int) -> Iterator[None]:
        """Bytes [start, end) are not let go while they are read or written in a thread."""
        layout = self.services.layout
        indexes = range(layout.index(start), layout.index(max(start, end - 1)) + 1) if start < end else ()
        self._busy_parts.update(indexes)
        try:
            yield
        finally:
            for index in indexes:
                if self._busy_parts[index] > 1:
                    self._busy_parts[index] -= 1
                else:
                    del self._busy_parts[index]

    # -- reading and writing

    async def read(self, offset: int, length: int) -> Buffer:
        """Bytes [offset, offset + length) cut at the draft's size."""
        end = min(offset + length, self.size)
        if self.file.is_closed:
            raise DraftEnded
        with self.file.held(), self._using(offset, end):
            return await self._read(offset, end)

    @property
    def fd(self) -> int:
        """The staging file's descriptor, -1 once the draft is closed and nobody reads. Raises what opening it does."""
        return self.file.fd

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
        """What is not staged: spilled, or the base's, or zeros."""
        if spilled:
            return [await self.spills.read(self.services.client, start, stop)]
        pieces: list[Buffer] = []
        known = min(stop, self.base_limit)
        if start < known and self.base is not None:
            pieces.append(await self._read_base(self.base, start, known - start))
            start = known
        if start < stop:
            pieces.append(bytes(stop - start))
        return pieces

    async def _read_base(self, base: Extent, offset: int, length: int) -> Buffer:
        """Bytes of the version that this draft was opened on."""
        return await self.services.reader.read(base.version, base.offset + offset, length)

    async def write(self, offset: int, data: Buffer) -> None:
        """Raises StagingFull, CacheError, FileError(EFBIG), and what reading the base raises; then the range counts as
        refused."""
        end = offset + len(data)
        if offset == end:
            return
        try:
            await self._write(offset, end, data)
        except DraftEnded:
            raise
        except Exception as error:
            async with self.gate.shared():  # not while it is published: another version has the refusal then
                self._check_alive()
                self.refuse(offset, end, error)
            raise
        except BaseException as error:  # the mount ends
            self.refused.add(offset, end, error)
            raise
        if self.refused:
            self.refused.remove(offset, end)
            self._settle_refusals()

    def refuse(self, start: int, end: int, error: Exception) -> None:
        """Remember, over a crash too, that a write of [start, end) failed."""
        is_first = not self.refused
        self._undo_expected = end > self.size
        self.refused.add(start, end, error)
        try:
            self._begin_change()
            self.save(sync=True)
        except LakeError as unsaved:
            self.services.staging.note_incomplete(self.id, True)
            if is_first:
                log.error("refused bytes of %s could not be journaled: %s", self.target.key, unsaved)

    def _settle_refusals(self) -> None:
        """Some were written again or cut off. Where that cannot be journaled, the next daemon knows of more than
        there are."""
        if self.refused:
            return
        try:
            self.save(sync=True)
        except LakeError as unsaved:
            log.warning("that %s is complete again could not be journaled: %s", self.target.key, unsaved)
        else:
            self.services.staging.note_incomplete(self.id, False)

    async def _write(self, offset: int, end: int, data: Buffer) -> None:
        if end > self.services.layout.file_bytes_max:
            raise FileError(27, f"a file holds at most {self.services.layout.file_bytes_max} bytes on this mount")
        reserved = 0
        if not self.pages.covers(offset, end):
            first, last = offset // PAGE_BYTES, -(-end // PAGE_BYTES)
            reserved = (last - first) * PAGE_BYTES
            await self.services.staging.reserve(reserved)
        try:
            await self._fill_edges(offset, end)
            async with self.gate.shared():
                self._begin_change()
                self._refuse_dropped(offset, end)
                with self._using(offset, end):
                    await self._write_staged(offset, data)
                added = self.pages.mark(offset, end) * PAGE_BYTES
                self._staged_bytes += added
                reserved -= added
                self.size = max(self.size, end)
                self._touch(offset, end)
        finally:
            self.services.staging.release(reserved)

    def begin_with(self, data: bytes) -> None:
        """A draft that was just made has these few bytes, even where there is no room. Raises as `write`."""
        if not data:
            return
        self.file.begin_with(data)
        taken = self.pages.mark(0, len(data)) * PAGE_BYTES
        self.services.staging.take(taken)
        self._staged_bytes = taken
        self.size = len(data)
        self._touch(0, self.size)

    async def _write_staged(self, offset: int, data: Buffer) -> None:
        try:
            await self.file.write(offset, data)
        except LakeError:
            self._erase_unmarked(offset, offset + len(data))
            raise

    def _erase_unmarked(self, start: int, end: int) -> None:
        """A write that failed half-way leaves no bytes in pages that count as zeros."""
        for begin, upto, local in list(self.pages.runs(start - start % PAGE_BYTES, end + -end % PAGE_BYTES)):
            if not local:
                self.file.punch(begin, upto)

    async def _fill_edges(self, offset: int, end: int) -> None:
        """A page that is written in part and whose rest is the base's, or spilled, is fetched whole first."""
        for at in {offset - offset % PAGE_BYTES, end - end % PAGE_BYTES}:
            limit = self.size if self.spills.pages.covers(at, at + 1) else self.base_limit
            whole = offset <= at and min(at + PAGE_BYTES, limit) <= end
            if at < limit and at < end and not whole and not self.pages.covers(at, at + 1):
                async with self.gate.exclusive():
                    self._check_alive()
                    await self.fill(at, at + PAGE_BYTES)

    def _check_alive(self) -> None:
        if self.accepted or self.state in (DraftState.PUBLISHED, DraftState.DISCARDED):
            raise DraftEnded

    def _begin_change(self) -> None:
        """Bytes change. What the failed attempt to publish may have made visible are not these, and the journal has
        to know before a crash can ask."""
        self._check_alive()
        if self.state is DraftState.FAILED:
            self.changes += 1
            self.state, self.recheck, self.token = DraftState.WRITING, True, f"{self.id}.{self.changes}"
            self.commit = ""
            self.save(sync=True)

    async def fill(self, start: int, end: int) -> None:
        """Stage what [start, end) has from the base and from spills. The caller holds the gate alone."""
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
        """Stage what [start, end) has spilled and not staged since. The caller holds the gate alone."""
        if not self.spills.objects:
            return
        for begin, upto, local in list(self.pages.runs(start, min(end, self.size))):
            for at, stop, spilled in list(self.spills.pages.runs(begin, upto)) if not local else ():
                while spilled and at < stop:
                    step = min(stop, at + FILL_BYTES_MAX)
                    await self._stage_filled(at, await self.spills.read(self.services.client, at, step))
                    at = step

    async def _stage_filled(self, start: int, data: Buffer) -> None:
        await self._write_staged(start, data)
        added = self.pages.mark(start, start + len(data)) * PAGE_BYTES
        self._staged_bytes += added
        self.services.staging.take(added)

    def _refuse_dropped(self, start: int, end: int) -> None:
        layout = self.services.layout
        for index in range(layout.index(start), layout.index(max(start, end - 1)) + 1):
            part = self.parts.get(index)
            if part is not None and part.state is PartState.DROPPED:
                raise StagingFull(
                    f"bytes {start} to {end} of a file larger than staging were uploaded and let go before it was "
                    "closed: raise --staging-size to change or read them"
                )

    def _touch(self, start: int, end: int) -> None:
        """Parts that were written to are dirty; those that are complete start on their way."""
        layout = self.services.layout
        for block in range(start // BLOCK_BYTES, -(-end // BLOCK_BYTES)):
            self.hashes.pop(block, None)
        for index in range(layout.index(start), layout.index(end - 1) + 1):
            part = self.parts.setdefault(index, Part())
            part.generation += 1
            if part.state is PartState.CLEAN:
                part.state = PartState.DIRTY
        if self.deferred and self.services.staging.is_half_full:
            self.deferred = False
        if self.deferred:
            write_out_complete(self, layout.index(start), layout.index(end - 1))
        if self.size > layout.single_bytes_max and not self.deferred:
            first = 0 if not self.upload_intent_ns else layout.index(start)
            for index in range(first, layout.index(end - 1) + 1):
                self.start_if_complete(index)

    def start_if_complete(self, index: int) -> None:
        part = self.parts.get(index)
        if part is None or part.state is not PartState.DIRTY or part.announced or self.error is not None:
            return
        if self.unlinked:
            return
        if part.etag and not self.services.client.capabilities.parts_replaceable:
            return
        start, end = self.services.layout.range(index)
        if self.accepted:
            end = min(end, self.size)
        if end <= self.size and self.pages.covers(start, end):
            part.announced = True
            self.uploading += 1
            self.services.slots.ready()
            self.services.nursery.start_soon(upload_in_background, self, index)

    async def truncate(self, size: int) -> None:
        """Cut or extend (with zeros). Raises StagingFull where the cut goes through a part that was let go."""
        if size > self.services.layout.file_bytes_max:
            raise FileError(27, f"a file holds at most {self.services.layout.file_bytes_max} bytes on this mount")
        async with self.gate.exclusive():
            self._begin_change()
            if size < self.size:
                await self._cut(size)
            undone, self._undo_expected = self._undo_expected and size == self.size, False
            self.size = size
            if self.refused and not undone:
                self.refused.cut(size)
                self._settle_refusals()

    async def _cut(self, size: int) -> None:
        layout = self.services.layout
        if size and layout.range(layout.index(size - 1))[1] > size:
            self._refuse_dropped(size - 1, size)
        if size % PAGE_BYTES:
            await self.fill_spilled(size - size % PAGE_BYTES, size)
        await self.file.cut(size)
        self.spills.pages.truncate(size)
        gone = self.pages.truncate(size) * PAGE_BYTES
        self._staged_bytes -= gone
        self.services.staging.release(gone)
        self.base_limit = min(self.base_limit, size)
        for block in [block for block in self.hashes if (block + 1) * BLOCK_BYTES > size]:
            del self.hashes[block]
        for index in [index for index in self.parts if index >= layout.index(size)]:
            part = self.parts[index]
            part.generation += 1
            if part.state is not PartState.UPLOADING:
                part.state = PartState.DIRTY

    # -- uploading

    def part_ended(self, index: int) -> None:
        """No upload of the part is under way any more."""
        self.parts[index].announced = False
        self.uploading -= 1
        if not self.uploading:
            self._idle.ring()
        self.services.staging.notify()

    async def wait_hurry(self, pause_s: float) -> None:
        """Sleep, unless told to `hurry`."""
        with trio.move_on_after(pause_s):
            await self._hurry.wait()

    def hurry(self) -> None:
        """Parts that wait to be sent again do not."""
        self._hurry.ring()

    # -- write-back

    def accept(self, sequence: int) -> None:
        """From here on nothing changes. The caller holds the draft alone, has synced it, and saves the record."""
        self.state, self.accepted = DraftState.ACCEPTED, sequence

    @property
    def is_unknown_to_store(self) -> bool:
        """Nothing of an accepted draft was ever sent."""
        return self.state is DraftState.ACCEPTED and not (self.upload_intent_ns or self.uploading or self.recheck)

    def count_staged(self) -> None:
        """Of a draft that was brought back: its bytes take room. Once."""
        self._staged_bytes = self.pages.pages * PAGE_BYTES
        self.services.staging.bytes_used += self._staged_bytes

    async def pause(self) -> None:
        """Its uploads stop, and can go on with the next change. Nobody writes to it."""
        if self.state is DraftState.WRITING:
            self.state = DraftState.FAILED
        self.hurry()
        await self.wait_idle()

    async def wait_idle(self) -> None:
        """Until no upload of a part is under way."""
        while self.uploading:
            await self._idle.wait()

    async def upload_part(self, index: int) -> None:
        """Send one part as it is now; announced before. Ends with the part clean, or dirty if it was written to."""
        async with self.services.slots.slot():
            if self.state is DraftState.DISCARDED:
                return
            part = self.parts.setdefault(index, Part())
            start, end = self.services.layout.range(index)
            length = min(end, self.size) - start
            if length <= 0:
                return
            generation, repeated = part.generation, bool(part.etag)
            part.state = PartState.UPLOADING
            try:
                upload_id = await self.begin_upload()
                hasher = BlockHasher(start, start + length, self.size)
                with self.file.held():
                    body = FileSlice(self.fd, start, length, hasher.saw)
                    ref = await self.services.client.upload_part(self.target.key, upload_id, index + 1, body)
                    hashes = hasher.seen()
                    if hashes is None:
                        hashes = await self.services.staging.threads.run(
                            hash_blocks, self.fd, start, start + length, self.size
                        )
            except BaseException:
                part.state = PartState.DIRTY
                self.upload_failed = True
                raise
        self.services.metrics.parts += 1
        self.services.metrics.parts_repeated += repeated
        self.settle_part(index, generation, ref, length)
        if part.state is PartState.CLEAN:
            if self.size > start + length and (start + length) % BLOCK_BYTES:
                hashes.pop((start + length) // BLOCK_BYTES, None)  # the file ended in this block, and has grown since
            self.hashes.update(hashes)
        self.save()

    def settle_part(self, index: int, generation: int, ref: PartRef, length: int) -> None:
        """Record an upload that succeeded; the part stays dirty if it was written to meanwhile."""
        part = self.parts[index]
        part.etag, part.length = ref.etag, length
        part.state = PartState.CLEAN if part.generation == generation else PartState.DIRTY

    async def begin_upload(self) -> str:
        """The multipart upload's id; the intent is in the journal before the store is asked."""
        async with self._asking.exclusive():
            if not self.upload_id:
                await self.abort_strays()
                self.upload_intent_ns = self.services.clock_ns()
                self.upload_metadata = {**self.target.describe(True), DRAFT_METADATA: self.token}
                self.save(sync=True)
                self.upload_id = await self.services.client.create_multipart(
                    self.target.key, metadata=self.upload_metadata
                )
                self.services.staging.note_upload(self.fd, self.upload_id)
                self.save(sync=True)
            return self.upload_id

    async def abort_strays(self) -> None:
        """An upload was asked for, and the answer never came."""
        if self.upload_intent_ns and not self.upload_id:
            await abort_strays(self.services.client, self.target.key, self.upload_intent_ns)
            self.upload_intent_ns = 0

    def exclusive(self) -> AbstractAsyncContextManager[None]:
        """Keep writers and truncation out, for `publishing`."""
        return self.gate.exclusive()

    # -- the journal

    def record(self) -> DraftRecord:
        return record_of(self)

    def save(self, *, sync: bool = False) -> None:
        """Note what the draft is. Raises CacheError, and StagingFull where it failed, and its bytes were in memory."""
        self.services.save(self.noted(), sync)

    def noted(self) -> DraftRecord:
        """The record, about to be saved. Raises StagingFull and CacheError."""
        if self.state is DraftState.FAILED and not self.accepted:
            self.file.keep_on_disk()
        self.saves += 1
        return self.record()

    # -- the end

    async def discard(self) -> None:
        """Nobody wants these bytes: abort the upload, delete the staging file. The journal record is the caller's, who
        keeps it where ``error`` says that an upload is left."""
        self.state = DraftState.DISCARDED
        self.hurry()
        await self.wait_idle()
        self.error = None
        try:
            if self.upload_id:
                await self.services.client.abort_multipart(self.target.key, self.upload_id)
            await self.abort_strays()
            await self.delete_spills()
        except LakeError as error:
            self.error = error
        self.close(unlink=True)

    async def delete_spills(self) -> None:
        """Hidden objects go: its bytes are in the store, or nobody wants them. Raises LakeError."""
        if self.spills.used:
            await delete_spills(self.services.client, self.id)
            self.spills = Spills(self.services.layout)

    def close(self, *, unlink: bool, leave: bool = False) -> None:
        """Give back the descriptor and the room. ``unlink`` is false where the file became cache; ``leave`` leaves its
        bytes to the next mount."""
        if self._closing:
            return
        self._closing = True
        self.services.staging.release(self._staged_bytes)
        self._staged_bytes = 0
        self.services.staging.unregister(self)
        self.file.close(unlink=unlink, leave=leave)
