"""Files that are known to have holes, and how many bytes of them are data: what `st_blocks` tells.

What always holds: an answer is about the version that was asked for; one not known has no holes. At most `KNOWN_MAX`
files are known, those stored last. Nothing is kept on disk: a new daemon knows none. Trio thread only.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from lakefs_fuse.meta.entry import Entry
from lakefs_fuse.staging.page_map import PAGE_BYTES
from lakefs_fuse.upload.draft import Draft
from lakefs_fuse.upload.part_state import PartState

KNOWN_MAX = 1000
"""A listing looks at all of them."""


@dataclass(frozen=True, slots=True)
class _Sparse:
    etag: str
    size: int
    data_bytes: int
    parent: int


class Holes:
    """See the module's head."""

    def __init__(self) -> None:
        self._known: OrderedDict[int, _Sparse] = OrderedDict()

    def data_bytes(self, entry: Entry, draft: Draft | None = None) -> int:
        """Bytes that are not known to be holes, of the version that is stored or that ``draft`` is writing."""
        if draft is None:
            return self._stored(entry.inode, entry.etag, entry.size)
        base = 0
        if draft.base is not None:
            base = min(draft.base_limit, self._stored(entry.inode, draft.base.version.etag, draft.base.size))
        dropped = sum(part.length for part in draft.parts.values() if part.state is PartState.DROPPED)
        pages = draft.pages.pages + draft.spills.pages.pages
        return min(draft.size, base + pages * PAGE_BYTES + dropped)

    def note_stored(self, entry: Entry, draft: Draft) -> None:
        """The draft is the version that the row ``entry`` tells."""
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
