"""The parts of a draft's multipart upload: which of them the store has, and whether their bytes are still staged.

What always holds:

* (*part states*) a part changes its state through `Parts.transition` only, by the table of `TRANSITIONS`;
* (*dropped parts*) a DROPPED part is in the store only, and is never written to;
* (*parts in use*) no hole is made in a part that a task or thread reads or writes (`PartUses`), except by a caller that
  has directed later readers to the new place of the bytes and has waited for the earlier ones.

Trio thread only. After a crash the journal record has the CLEAN and DROPPED parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import Enum

import msgspec

from lakefs_fuse.staging.draft_record import UploadedPart
from lakefs_fuse.staging.part_layout import PartLayout
from lakefs_fuse.store.protocol import PartRef
from lakefs_fuse.sync.wakeup import Wakeup


class PartState(Enum):
    """Life of a part, with `TRANSITIONS` as its table.

    ========= ====================================================================================
    state     meaning
    ========= ====================================================================================
    dirty     the store does not have its bytes
    queued    the same, and a task waits for an upload slot or for the next attempt to send it
    uploading a request sends its bytes
    stale     a request sends bytes that were written to since it began
    clean     the store has its bytes, and they are staged, or zeros, or bytes of the base
    dropped   the store has its bytes, and they are not staged any more
    ========= ====================================================================================
    """

    DIRTY = "dirty"
    QUEUED = "queued"
    UPLOADING = "uploading"
    STALE = "stale"
    CLEAN = "clean"
    DROPPED = "dropped"


TRANSITIONS = {
    # To CLEAN: the store copied the part from another object.
    PartState.DIRTY: {PartState.QUEUED, PartState.UPLOADING, PartState.CLEAN},
    PartState.QUEUED: {PartState.UPLOADING, PartState.DIRTY},
    PartState.UPLOADING: {PartState.STALE, PartState.CLEAN, PartState.DIRTY},
    PartState.STALE: {PartState.DIRTY},
    # To UPLOADING and to itself: the file was extended with zeros, so its last part is longer.
    PartState.CLEAN: {PartState.DIRTY, PartState.UPLOADING, PartState.CLEAN, PartState.DROPPED},
    # To CLEAN: the staged bytes could not be deleted, or not journaled as dropped. To DIRTY: they were truncated, or
    # the base has them.
    PartState.DROPPED: {PartState.CLEAN, PartState.DIRTY},
}
"""The allowed transitions from each state, asserted by `Parts`."""
STORED = (PartState.CLEAN, PartState.DROPPED)


class Part(msgspec.Struct):
    """``etag`` and ``length`` (bytes) are those of the last upload that succeeded; empty and 0 before."""

    state: PartState = PartState.DIRTY
    etag: str = ""
    length: int = 0


class Parts(dict[int, Part]):
    """Parts by index from 0, created on first use. Only this class changes a part."""

    def __init__(self, layout: PartLayout) -> None:
        super().__init__()
        self._layout = layout
        self.bytes_dropped = 0
        """Bytes of DROPPED parts."""

    def load(self, records: Iterable[UploadedPart]) -> None:
        """Replace all parts by what the journal has of them."""
        self.clear()
        self.bytes_dropped = 0
        for record in records:
            self[record.index] = Part(PartState.CLEAN, record.etag, record.length)
            if not record.staged:
                self.transition(record.index, PartState.DROPPED)

    def __missing__(self, index: int) -> Part:
        part = self[index] = Part()
        return part

    def transition(self, index: int, to: PartState) -> None:
        """Move the part to a state; `TRANSITIONS` lists the allowed ones."""
        part = self[index]
        assert to in TRANSITIONS[part.state], f"part {index}: from {part.state} to {to}"
        self.bytes_dropped += part.length * ((to is PartState.DROPPED) - (part.state is PartState.DROPPED))
        part.state = to

    def touch(self, start: int, end: int) -> range:
        """Record that bytes [start, end) were written; returns the parts that contain them."""
        indexes = range(self._layout.index(start), self._layout.index(end - 1) + 1)
        for index in indexes:
            if self[index].state is PartState.CLEAN:
                self.transition(index, PartState.DIRTY)
            elif self[index].state is PartState.UPLOADING:
                self.transition(index, PartState.STALE)
        return indexes

    def cut(self, size: int) -> None:
        """Record that the file was truncated to ``size`` bytes."""
        for index, part in self.items():
            if index >= self._layout.index(size):
                if part.state is PartState.UPLOADING:
                    self.transition(index, PartState.STALE)
                elif part.state in STORED:
                    self.transition(index, PartState.DIRTY)

    def end_upload(self, index: int, ref: PartRef, length: int) -> None:
        """Record that the store has the part, of ``length`` bytes; it is dirty if it was written to during the
        request."""
        part = self[index]
        part.etag, part.length = ref.etag, length
        self.transition(index, PartState.DIRTY if part.state is PartState.STALE else PartState.CLEAN)

    def withdraw(self, index: int) -> None:
        """Record that no task waits to send the part."""
        if self[index].state is PartState.QUEUED:
            self.transition(index, PartState.DIRTY)

    def forget_upload(self, *, is_base: bool = False) -> None:
        """Record that the upload no longer exists in the store: clean parts can be sent again. Dropped ones are lost,
        unless the upload became the draft's present base (``is_base``)."""
        for index, part in self.items():
            part.etag = ""
            if part.state is PartState.CLEAN or (is_base and part.state is PartState.DROPPED):
                self.transition(index, PartState.DIRTY)

    @property
    def dropped_end(self) -> int:
        """The end of the last DROPPED part, in bytes; 0 without any. The file was not truncated below that since."""
        dropped = (index for index, part in self.items() if part.state is PartState.DROPPED)
        last = max(dropped, default=None)
        return 0 if last is None else self._layout.range(last)[1]

    def is_dropped(self, index: int) -> bool:
        part = self.get(index)
        return part is not None and part.state is PartState.DROPPED

    def records(self) -> list[UploadedPart]:
        """For the journal: the parts that the store has."""
        return [
            UploadedPart(index, part.etag, part.length, part.state is PartState.CLEAN)
            for index, part in sorted(self.items())
            if part.state in STORED
        ]


class PartUses:
    """Records which parts' staged bytes are being read or written, so that none of them is dropped under a reader."""

    def __init__(self, layout: PartLayout) -> None:
        self._layout = layout
        self._counts: Counter[int] = Counter()
        self._uses: dict[int, range] = {}
        """The parts of each use, by its number."""
        self._begun = 0
        self._ended = Wakeup()

    def __contains__(self, index: int) -> bool:
        return self._counts[index] > 0

    @contextmanager
    def using(self, start: int, end: int) -> Iterator[None]:
        """Keep bytes [start, end) staged for the block, in which a thread reads or writes them."""
        layout = self._layout
        indexes = range(layout.index(start), layout.index(max(start, end - 1)) + 1) if start < end else range(0)
        self._begun += 1
        number = self._begun
        self._uses[number] = indexes
        self._counts.update(indexes)
        try:
            yield
        finally:
            del self._uses[number]
            self._counts -= Counter(indexes)
            self._ended.wake_all()

    async def wait_unused(self, index: int) -> None:
        """Wait for the uses of the part that have begun by now; later ones are not waited for."""
        begun = self._begun
        while any(number <= begun and index in indexes for number, indexes in self._uses.items()):
            await self._ended.wait()
