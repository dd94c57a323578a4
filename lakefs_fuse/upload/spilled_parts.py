"""Pages of incomplete parts that left staging: hidden objects, one for each part, joined when the draft is published.

What always holds: an object is in the store and the synced journal record names it before the staged bytes are dropped;
a staged page takes precedence over the one in the object; a part that is spilled again gets a new object, which
includes the bytes of the old one. The objects of a draft have its id in their keys, and are deleted when it is
published or discarded; objects of a dead daemon are deleted with its orphan, or by `gc` after some days. The caller
holds the draft alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.staging.draft_record import SpilledPart
from lakefs_fuse.staging.part_layout import PageMap, PartLayout
from lakefs_fuse.store.client import StoreClient
from lakefs_fuse.store.protocol import Buffer

SPILLED = f"{RESERVED_PREFIX}staging/"


class Spills:
    """The spilled parts of a draft: the objects by part, and which of their pages are used."""

    def __init__(self, layout: PartLayout) -> None:
        self._layout = layout
        self.pages = PageMap(layout)
        self.objects: dict[int, SpilledPart] = {}
        self.used = False
        """Whether objects may exist, named here or not."""
        self._serial = 0

    def begin(self) -> bool:
        """Record that objects may exist from now on; returns whether that is new."""
        was_used, self.used = self.used, True
        return not was_used

    def next_key(self, draft_id: str, index: int) -> str:
        """The key of the next object of a part."""
        self._serial += 1
        return f"{SPILLED}{draft_id}/{index}-{self._serial - 1}"

    def add(self, part: SpilledPart, staged: Iterable[tuple[int, int]]) -> SpilledPart | None:
        """Record that the object has these ranges that were staged; returns the object that it replaces."""
        before = self.objects.get(part.index)
        self.objects[part.index] = part
        for start, end in staged:
            self.pages.mark(start, end)
        return before

    def load(self, parts: list[SpilledPart], used: bool) -> None:
        self.objects, self.used = {part.index: part for part in parts}, used
        self._serial = 1 + max((int(part.key.rpartition("-")[2]) for part in parts), default=-1)
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
