"""Records which rows of names a database has written since the index that it began with, or last wrote. A database that
folds a lake keeps the rows of its newest index, and applies commits to them. The next index needs only the changes
since, so each batch that writes rows of names also gets a note for each of them.

What always holds (*the index and its changes*): while `Folded.index` is set, every row of names whose key is not among
`keys_since` of that index is the same here as in that index. Rows and their notes are in one batch, so a crash leaves
both or neither. If all names are dropped, so is the mark, and nothing is noted until an index is ingested or written.
For one thread at a time. A crash leaves the state described above.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from struct import Struct

import msgspec

from lakefs_fuse.environment.storage_engine import Rows, Step
from lakefs_fuse.meta import schema
from lakefs_fuse.meta.entry import HEAD, Flag

KINDS = b"".join(schema.NAME_KINDS)
"""First bytes of the keys of rows of names, in order."""
ABSENT, FILE, DIRECTORY = b"-", b"f", b"d"
"""The entry as it was in the index. For other rows nothing is kept."""

_ENTRY = schema.ENTRY[0]
_MARK_BYTES = len(schema.CHANGED) + schema.NUMBER.size
_FOLDED = Struct(">QQ")


class Folded(msgspec.Struct, frozen=True):
    """``index`` is the time of the index whose names the database has, 0 for none; ``since`` that of an earlier index,
    or the same, since which all changes are known."""

    index: int = 0
    since: int = 0

    def pack(self) -> bytes:
        return _FOLDED.pack(self.index, self.since)


def is_directory(row: bytes | None) -> bool:
    """For the row of an entry, including damaged ones."""
    return row is not None and len(row) >= HEAD.size and bool(HEAD.unpack_from(row)[1] & Flag.DIRECTORY)


class ChangedRows:
    """See the module's head. Rows are read by the given functions."""

    def __init__(
        self,
        get: Callable[[bytes], bytes | None],
        get_many: Callable[[Sequence[bytes]], list[bytes | None]],
        scan: Callable[[bytes, bytes], Iterator[tuple[bytes, bytes]]],
    ) -> None:
        self._get, self._get_many, self._scan = get, get_many, scan
        self.folded = Folded()
        self.writes = 0
        """How many batches had rows of names, since the database was opened."""
        self.load()

    def load(self) -> None:
        """Read the mark, after it was written or may have come with rows that were ingested."""
        raw = self._get(schema.SINGLE_FOLDED)
        self.folded = Folded(*_FOLDED.unpack(raw)) if raw is not None and len(raw) == _FOLDED.size else Folded()

    def record(self, ranges: Iterable[Step], rows: Rows) -> None:
        """Add the notes of a batch to ``rows``, its last step; ``ranges`` are its earlier steps. Called for each batch
        while there is a mark."""
        if rows.get(schema.SINGLE_FOLDED, b"") is None:
            return
        changed: dict[bytes, None] = {}
        for written, begin, end in ranges:
            changed |= dict.fromkeys(key for key in written if key[0] in KINDS)
            for kind in KINDS:
                first, last = max(begin, bytes([kind])), min(end, bytes([kind + 1]))
                if first < last:
                    changed |= dict.fromkeys(key for key, _ in self._scan(first, last))
        changed |= dict.fromkeys(key for key in rows if key[0] in KINDS)
        if not changed:
            return
        self.writes += 1
        prefix = schema.CHANGED + schema.NUMBER.pack(self.folded.index)
        known = self._get_many([prefix + key for key in changed])
        new = [key for key, note in zip(changed, known, strict=True) if note is None]
        entries = [key for key in new if key[0] == _ENTRY]
        were = dict(zip(entries, self._get_many(entries), strict=True))
        for key in new:
            rows[prefix + key] = _kind_of(were[key]) if key[0] == _ENTRY else b""

    def keys_since(self, mark: int) -> Iterator[bytes]:
        """Keys of rows that were written since the index of this time, sorted. They may have been deleted, or be
        unchanged."""
        runs = [self._run(each) for each in self._marks(mark)]
        return (key for key, _ in groupby(heapq.merge(*runs)))

    def count(self, mark: int) -> int:
        """Number of keys in the notes since the index of this time; some may occur twice."""
        return sum(1 for _ in self._scan(_begin(mark), schema.end_of(schema.CHANGED)))

    def has_any(self, mark: int) -> bool:
        """Whether there are notes since the index of this time."""
        return next(self._scan(_begin(mark), schema.end_of(schema.CHANGED)), None) is not None

    def count_names(self) -> tuple[int, int]:
        """The change of the numbers of names and of directories since the index."""
        names = directories = 0
        prefix = schema.CHANGED + schema.NUMBER.pack(self.folded.index)
        for key, was in self._scan(prefix + schema.ENTRY, prefix + schema.end_of(schema.ENTRY)):
            row = self._get(key[_MARK_BYTES:])
            names += (row is not None) - (was != ABSENT)
            directories += is_directory(row) - (was == DIRECTORY)
        return names, directories

    def _marks(self, mark: int) -> Iterator[int]:
        """Those that notes have, from this one on."""
        while (note := next(self._scan(_begin(mark), schema.end_of(schema.CHANGED)), None)) is not None:
            mark = schema.NUMBER.unpack_from(note[0], len(schema.CHANGED))[0]
            yield mark
            mark += 1

    def _run(self, mark: int) -> Iterator[bytes]:
        return (key[_MARK_BYTES:] for key, _ in self._scan(_begin(mark), _begin(mark + 1)))


def _begin(mark: int) -> bytes:
    return schema.CHANGED + schema.NUMBER.pack(mark)


def _kind_of(row: bytes | None) -> bytes:
    return ABSENT if row is None else DIRECTORY if is_directory(row) else FILE
