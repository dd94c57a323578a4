"""The parts of a draft's multipart upload: which of them the store has, and whether their bytes are still staged.

What always holds (*part states*): DIRTY → UPLOADING → CLEAN → DROPPED. A write takes a CLEAN part back to DIRTY, and an
UPLOADING part that was written to ends DIRTY. A DROPPED part is in the store only, and is never written to. Trio thread
only. After a crash the journal record has the CLEAN and DROPPED parts (`records`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from lakefs_fuse.staging.draft_record import UploadedPart
from lakefs_fuse.staging.part_layout import PartLayout
from lakefs_fuse.store.protocol import PartRef


class PartState(Enum):
    """See the module's head."""

    DIRTY = "dirty"
    UPLOADING = "uploading"
    CLEAN = "clean"
    DROPPED = "dropped"


STORED = (PartState.CLEAN, PartState.DROPPED)


@dataclass(slots=True)
class Part:
    """``generation`` grows with every write: an upload compares it to know whether the bytes it sent still count."""

    state: PartState = PartState.DIRTY
    generation: int = 0
    etag: str = ""
    length: int = 0
    announced: bool = False
    """It waits for an upload slot, or has one."""
    written_out: bool = False
    """Its writeout to the local disk has begun."""


class Parts:
    """Parts by index from 0. Callers read a `Part`; only this class changes one."""

    def __init__(self, layout: PartLayout) -> None:
        self._layout = layout
        self._parts: dict[int, Part] = {}

    def __getitem__(self, index: int) -> Part:
        return self._parts.setdefault(index, Part())

    def get(self, index: int) -> Part | None:
        """None where nobody wrote to the part."""
        return self._parts.get(index)

    def add_missing(self, count: int) -> None:
        """The first ``count`` parts are all to be uploaded."""
        for index in range(count):
            self._parts.setdefault(index, Part())

    def items(self) -> Iterable[tuple[int, Part]]:
        return self._parts.items()

    def touch(self, start: int, end: int) -> range:
        """Bytes [start, end) were written; answers the parts that hold them."""
        indexes = range(self._layout.index(start), self._layout.index(end - 1) + 1)
        for index in indexes:
            part = self[index]
            part.generation += 1
            if part.state is PartState.CLEAN:
                part.state = PartState.DIRTY
        return indexes

    def cut(self, size: int) -> None:
        """The file was truncated to ``size`` bytes."""
        for index, part in self._parts.items():
            if index >= self._layout.index(size):
                part.generation += 1
                if part.state is not PartState.UPLOADING:
                    part.state = PartState.DIRTY

    # -- uploads

    def announce(self, index: int) -> None:
        self[index].announced = True

    def withdraw(self, index: int) -> None:
        """No upload of the part is under way."""
        self[index].announced = False

    def begin_writeout(self, index: int) -> None:
        self[index].written_out = True

    def begin_upload(self, index: int) -> None:
        self[index].state = PartState.UPLOADING

    def fail_upload(self, index: int) -> None:
        self[index].state = PartState.DIRTY

    def end_upload(self, index: int, generation: int, ref: PartRef, length: int) -> None:
        """The store has the bytes of ``generation``; the part is dirty where it was written to since."""
        part = self[index]
        part.etag, part.length = ref.etag, length
        part.state = PartState.CLEAN if part.generation == generation else PartState.DIRTY

    def drop(self, indexes: Iterable[int]) -> None:
        """The staged bytes of these clean parts are about to be deleted."""
        for index in indexes:
            self[index].state = PartState.DROPPED

    def keep(self, index: int) -> None:
        """The staged bytes of a part that was dropped could not be deleted."""
        if self[index].state is PartState.DROPPED:
            self[index].state = PartState.CLEAN

    def forget_upload(self) -> None:
        """The upload is gone from the store: clean parts can be sent again, dropped ones are lost."""
        for part in self._parts.values():
            part.etag = ""
            if part.state is PartState.CLEAN:
                part.state = PartState.DIRTY

    # -- questions

    def is_dropped(self, index: int) -> bool:
        part = self._parts.get(index)
        return part is not None and part.state is PartState.DROPPED

    @property
    def has_dropped(self) -> bool:
        return any(part.state is PartState.DROPPED for part in self._parts.values())

    @property
    def bytes_dropped(self) -> int:
        """Bytes that are in the store only."""
        return sum(part.length for part in self._parts.values() if part.state is PartState.DROPPED)

    def is_stored(self, index: int, length: int) -> bool:
        """The store has the part with so many bytes, and they still count."""
        part = self[index]
        return part.state in STORED and part.length == length

    def has_stale(self, count: int) -> bool:
        """The store has bytes that do not count any more, of one of the first ``count`` parts or beyond them."""
        return any(part.etag and (part.state is PartState.DIRTY or i >= count) for i, part in self._parts.items())

    def clean(self) -> list[int]:
        """Parts that are in the store and staged, in order, without the first, whose header is written late."""
        return sorted(index for index, part in self._parts.items() if part.state is PartState.CLEAN and index > 0)

    def refs(self, count: int) -> list[PartRef]:
        """What completes an upload of so many parts."""
        return [PartRef(i + 1, self._parts[i].etag, self._parts[i].length) for i in range(count)]

    # -- the journal

    def records(self) -> list[UploadedPart]:
        return [
            UploadedPart(index, part.etag, part.length, part.state is PartState.CLEAN)
            for index, part in sorted(self._parts.items())
            if part.state in STORED
        ]

    def load(self, records: Iterable[UploadedPart]) -> None:
        """Replace everything with what `records` answered."""
        self._parts = {
            each.index: Part(PartState.CLEAN if each.staged else PartState.DROPPED, etag=each.etag, length=each.length)
            for each in records
        }
