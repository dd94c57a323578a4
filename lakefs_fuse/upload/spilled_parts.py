"""Pages of incomplete parts that had to leave staging: hidden objects, one for each part, joined when it is published.

What always holds: an object is in the store and the synced journal record names it before the staged bytes go; a staged
page counts before the one in the object; a part that is spilled again gets a new object, with what the old one had.
The objects of a draft have its id in their keys, and are deleted when it is published or discarded; what a dead daemon
leaves is deleted with its orphan, or by `gc` once it is days old. The caller holds the draft alone.
"""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

from lakefs_fuse.errors import LakeError
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.staging.draft_record import DraftState, SpilledPart
from lakefs_fuse.staging.page_map import PAGE_BYTES, PageMap
from lakefs_fuse.staging.part_layout import PartLayout
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer, FileSlice
from lakefs_fuse.upload.part_state import PartState

if TYPE_CHECKING:
    from lakefs_fuse.upload.draft import Draft

SPILLED = f"{RESERVED_PREFIX}staging/"
SPILL_BYTES_MIN = 1 << 20
"""A part with fewer staged bytes is not worth a request."""
log = logging.getLogger(__name__)


class Spills:
    """What a draft has spilled: the objects by part, and which of their pages count."""

    def __init__(self, layout: PartLayout) -> None:
        self._layout = layout
        self.pages = PageMap(layout)
        self.objects: dict[int, SpilledPart] = {}
        self.used = False
        """Objects may be there, named here or not."""
        self.serial = 0

    def load(self, parts: list[SpilledPart], used: bool) -> None:
        self.objects, self.used = {part.index: part for part in parts}, used
        self.serial = 1 + max((int(part.key.rpartition("-")[2]) for part in parts), default=-1)
        self.pages.load({part.index: part.pages for part in parts if part.any})

    def dump(self) -> list[SpilledPart]:
        pages = self.pages.dump()
        return [
            SpilledPart(part.index, part.key, part.etag, part.length, part.index in pages, pages.get(part.index, b""))
            for part in self.objects.values()
        ]

    async def read(self, client: StoreClient, start: int, stop: int) -> Buffer:
        """Bytes [start, stop), all of them spilled. Raises LakeError."""
        pieces: list[Buffer] = []
        while start < stop:
            index = self._layout.index(start)
            part, (begin, end) = self.objects[index], self._layout.range(index)
            upto = min(stop, end)
            known = min(upto, begin + part.length)
            if start < known:
                pieces.append((await client.get(part.key, start - begin, known - begin, etag=part.etag)).data)
            if max(start, known) < upto:
                pieces.append(bytes(upto - max(start, known)))
            start = upto
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def has_whole(self, start: int, end: int) -> SpilledPart | None:
        """The object with all of a part's bytes [start, end)."""
        part = self.objects.get(self._layout.index(start))
        if part is None or end - start > part.length or not self.pages.covers(start, end):
            return None
        return part


async def spill(draft: Draft) -> int:
    """Let go of the staged pages of the part that has most of them; answers how many bytes that gave back. Raises
    LakeError."""
    if not _may_spill(draft):
        return 0
    async with draft.gate.exclusive():
        index = _fullest(draft) if _may_spill(draft) else None
        return 0 if index is None else await _spill_part(draft, index)


def _may_spill(draft: Draft) -> bool:
    if draft.accepted or draft.unlinked or draft.state is not DraftState.WRITING:
        return False
    return draft.services.client.capabilities.spills and draft.size > draft.services.layout.single_bytes_max


def _fullest(draft: Draft) -> int | None:
    best, most = None, SPILL_BYTES_MIN // PAGE_BYTES - 1
    for index, part in draft.parts.items():
        if part.state is PartState.DIRTY and not part.announced and not draft.is_busy(index):
            count = draft.pages.count(*draft.services.layout.range(index))
            if count > most:
                best, most = index, count
    return best


async def _spill_part(draft: Draft, index: int) -> int:
    services, spills = draft.services, draft.spills
    start, end = services.layout.range(index)
    end = min(end, draft.size)
    await draft.begin_upload()  # so that it is no small file any more, wherever that makes a difference
    if not spills.used:
        spills.used = True
        draft.save(sync=True)
    await draft.fill_spilled(start, end)
    key = f"{SPILLED}{draft.id}/{index}-{spills.serial}"
    spills.serial += 1
    services.slots.ready()
    async with services.slots.slot():
        with draft.file.held():
            meta = await services.client.put(key, FileSlice(draft.fd, start, end - start))
    before = spills.objects.get(index)
    spills.objects[index] = SpilledPart(index, key, meta.etag, end - start)
    staged = [(begin, upto) for begin, upto, local in draft.pages.runs(start, end) if local]
    for begin, upto in staged:
        spills.pages.mark(begin, upto)
    pages, punched = draft.pages.forget(index), False  # so that the record does not take the hole for them
    try:
        draft.save(sync=True)
        punched = draft.file.punch(start, services.layout.range(index)[1])  # whole pages, or the last would stay
    finally:
        if not punched:
            for begin, upto in staged:
                draft.pages.mark(begin, upto)
    freed = pages * PAGE_BYTES if punched else 0
    draft.unstage(freed)
    services.metrics.parts_spilled += 1
    if before is not None:
        try:
            await services.client.delete(before.key)
        except LakeError as error:
            log.warning("%s is not needed any more, and could not be deleted: %s", before.key, error)
    return freed


async def delete_spills(client: StoreClient, draft_id: str) -> None:
    """Whatever a draft has spilled. Raises LakeError."""
    async with aclosing(client.list_all(f"{SPILLED}{draft_id}/")) as pages:
        keys = [meta.key async for page in pages for meta in page.objects]
    if keys:
        await client.delete_many(keys)
