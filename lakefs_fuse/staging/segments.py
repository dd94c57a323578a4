"""Many small acknowledged files in one local file: a group of them costs one write and one sync.

What always holds: an entry is its head (`HEAD`), the file's bytes and then its journal record, so that a segment can
be read even where the journal is lost; before a write is acknowledged its bytes are synced, here or beside the journal
record, from which `rewrite` restores them after a power cut, but not a lost record in the segment; `restore` refuses a
place without a head, so that no hole of a segment is read as a file's bytes; a segment is deleted with its last
reference, after the journal is synced. The journal has the references: after a crash, segments that no record names are
deleted; if the journal was lost, only those that could be read to their end. One group is written at a time. The
segment that is being written and the most recently read ones are open, at most `OPEN_MAX`. Trio thread only, except
`Group.write`.
"""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import TypeVar

from lakefs_fuse.environment.disk import Disk
from lakefs_fuse.environment.local_disk import pread_all, pwrite_all
from lakefs_fuse.errors import CacheError

PREFIX = "segment-"
MAGIC = b"LFS1"
HEAD = Struct("<4sIQ")
"""Magic, bytes of the record, bytes of the file."""
SEGMENT_BYTES = 64 << 20
"""A segment of this size gets no more entries."""
SEARCH_BYTES = 64 << 10
"""Size of each read in the search for the next head: the most that is skipped if the disk cannot read it."""
OPEN_MAX = 16
log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Spot:
    """The place of an acknowledged file's bytes."""

    segment: str
    offset: int
    length: int


class Segments:
    """All segments of a staging directory."""

    def __init__(self, directory: Path, disk: Disk, sync_journal: Callable[[], None] = lambda: None) -> None:
        """``sync_journal`` makes what was journaled survive a power cut; it raises CacheError."""
        self.directory, self.disk, self._sync_journal = directory, disk, sync_journal
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._references: Counter[str] = Counter()
        self._rewritten: set[str] = set()
        self._current = ""
        self._size = 0

    def group(self, *, is_synced: bool = True) -> Group:
        """Begin a group, which takes effect at `Group.keep`; until then no other may begin. Without ``is_synced`` the
        caller syncs the bytes elsewhere. Raises OSError."""
        if not self._current or self._size >= SEGMENT_BYTES:
            self._begin()
        return Group(self, self._descriptors[self._current], self._current, self._size, is_synced=is_synced)

    def _begin(self) -> None:
        full, self._current = self._current, ""
        if full and not self._references[full]:
            self._delete(full)
        name = self.disk.temporary_name(PREFIX)
        path = self.directory / name
        self._descriptors[name] = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._current, self._size = name, 0
        self._close_idle()

    def _descriptor(self, name: str, flags: int = 0) -> int:
        """Descriptor of a referenced segment, which is opened if it was closed. Raises OSError."""
        if name not in self._descriptors:
            self._descriptors[name] = os.open(self.directory / name, os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
        self._descriptors.move_to_end(name)
        self._close_idle()
        return self._descriptors[name]

    def _close_idle(self) -> None:
        """Only the writer of the current one keeps a descriptor from one call to the next."""
        while len(self._descriptors) > OPEN_MAX:
            oldest = next(name for name in self._descriptors if name != self._current)
            os.close(self._descriptors.pop(oldest))

    def sync(self, descriptor: int) -> None:
        """In a worker thread. Raises OSError."""
        self.disk.sync_data(descriptor)

    def keep(self, segment: str, size: int, count: int) -> None:
        """A group was written: this many entries are referenced, until `release` of each."""
        self._size = size
        self._references[segment] += count

    def rewrite(self, spot: Spot, data: bytes) -> None:
        """Write bytes again that a power cut may have lost, and create the segment if it is missing; they are safe once
        `sync_rewritten` returns. Raises OSError."""
        descriptor = self._descriptor(spot.segment, os.O_CREAT)
        if not _has_head(descriptor, spot):
            pwrite_all(descriptor, HEAD.pack(MAGIC, 0, spot.length), spot.offset - HEAD.size)
        pwrite_all(descriptor, data, spot.offset)
        self._rewritten.add(spot.segment)

    def sync_rewritten(self) -> None:
        """Raises OSError."""
        for name in sorted(self._rewritten):
            self.sync(self._descriptor(name))
        self._rewritten.clear()

    def restore(self, spot: Spot) -> None:
        """Record that the journal references this place. Raises OSError; FileNotFoundError if there is no whole entry:
        the segment is missing or cut off, or was missing until `rewrite` created it for other files."""
        descriptor = self._descriptor(spot.segment)
        if not _has_head(descriptor, spot) or os.fstat(descriptor).st_size < spot.offset + spot.length:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{spot.segment} at {spot.offset}")
        self.add_reference(spot)

    def add_reference(self, spot: Spot) -> None:
        """As `restore`, without reading the segment, which may fail: an unreadable segment is kept until `release`."""
        self._references[spot.segment] += 1

    def keep_all(self) -> None:
        """Keep all existing segments, because any may be referenced: this daemon deletes none of them."""
        self._references.update(path.name for path in self.paths())

    def read(self, spot: Spot, offset: int, length: int) -> bytes:
        """Bytes [offset, offset + length) of the file, cut at its end. Raises OSError, also if the segment ends before
        that."""
        length = min(length, spot.length - offset)
        if length <= 0:
            return b""
        data = pread_all(self._descriptor(spot.segment), length, spot.offset + offset)
        if len(data) < length:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.directory / spot.segment))
        return data

    def release(self, spot: Spot) -> None:
        """Record that the journal no longer references this place."""
        self._references[spot.segment] -= 1
        if not self._references[spot.segment] and spot.segment != self._current:
            self._delete(spot.segment)

    def _delete(self, segment: str) -> None:
        """Delete a segment without references. If the journal cannot be synced, the next mount deletes it."""
        del self._references[segment]
        try:
            self._sync_journal()
        except CacheError as error:
            log.error("%s is left to the next mount: %s", segment, error)
            return
        with suppress(OSError):
            self._descriptor(segment)  # opened, so that `close_removed` below frees its blocks
        (self.directory / segment).unlink(missing_ok=True)
        descriptor = self._descriptors.pop(segment, None)
        if descriptor is not None:
            self.disk.close_removed(descriptor)

    def close(self) -> None:
        """Delete unreferenced segments; the others are for the next mount."""
        unreferenced, self._current = [name for name in self._known() if not self._references[name]], ""
        for segment in unreferenced:
            self._delete(segment)
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _known(self) -> set[str]:
        return {*self._references, *([self._current] if self._current else [])}

    def paths(self) -> list[Path]:
        """All that are in the directory."""
        with os.scandir(self.directory) as entries:
            return [Path(entry.path) for entry in entries if entry.name.startswith(PREFIX)]

    def unreferenced(self) -> list[Path]:
        """Segments that nothing references."""
        known = self._known()
        return [path for path in self.paths() if path.name not in known]


class Group:
    """Entries that are written together, and with ``is_synced`` synced together."""

    def __init__(self, segments: Segments, descriptor: int, segment: str, offset: int, *, is_synced: bool) -> None:
        self._segments, self._descriptor, self._segment = segments, descriptor, segment
        self._is_synced = is_synced
        self._at = self._end = offset
        self._pieces: list[bytes] = []
        self._count = 0

    def spot(self, length: int) -> Spot:
        """The place of the next entry's bytes."""
        return Spot(self._segment, self._end + HEAD.size, length)

    def add(self, data: bytes, record: bytes) -> None:
        """The entry whose place was just asked for."""
        self._pieces += (HEAD.pack(MAGIC, len(record), len(data)), data, record)
        self._end += HEAD.size + len(data) + len(record)
        self._count += 1

    def write(self) -> None:
        """In a worker thread. Raises OSError; then nothing counts as written."""
        if self._pieces:
            pwrite_all(self._descriptor, b"".join(self._pieces), self._at)
            if self._is_synced:
                self._segments.sync(self._descriptor)

    def keep(self) -> None:
        """Count the references of the written group, and give its place to no other. Call it before the journal records
        are committed: if that fails, RocksDB may have logged them all the same. Then the segment is kept for the next
        mount."""
        self._segments.keep(self._segment, self._end, self._count)


def _has_head(descriptor: int, spot: Spot) -> bool:
    """Whether an entry of this length is at a place. Raises OSError."""
    head = pread_all(descriptor, HEAD.size, spot.offset - HEAD.size)
    return head.startswith(MAGIC) and len(head) == HEAD.size and HEAD.unpack(head)[2] == spot.length


def entries(path: Path, decode: Callable[[bytes], T]) -> Iterator[tuple[T, bytes] | None]:
    """Records, as ``decode`` (which raises ValueError) has them, and bytes of a segment; None for each place without an
    entry, after which others may follow. Raises OSError if it cannot be opened."""
    with open(path, "rb") as source:
        descriptor, at = source.fileno(), 0
        size = os.fstat(descriptor).st_size
        while at < size:
            entry = _entry_at(descriptor, at, size, decode)
            if entry is None:
                yield None
                at = _find_head(descriptor, at + 1, size)
            else:
                record, data, at = entry
                yield record, data


def _entry_at(descriptor: int, at: int, size: int, decode: Callable[[bytes], T]) -> tuple[T, bytes, int] | None:
    """Record, bytes and end of the entry at ``at`` of a segment of ``size`` bytes; None if none can be read."""
    with suppress(OSError, ValueError):
        head = pread_all(descriptor, HEAD.size, at)
        if len(head) == HEAD.size and head.startswith(MAGIC):
            _, record_bytes, data_bytes = HEAD.unpack(head)
            begin = at + HEAD.size
            end = begin + data_bytes + record_bytes
            if end <= size:
                record = decode(pread_all(descriptor, record_bytes, begin + data_bytes))
                return record, pread_all(descriptor, data_bytes, begin), end
    return None


def _find_head(descriptor: int, at: int, size: int) -> int:
    """The next possible offset of a head, from ``at`` on; ``size`` if there is none."""
    for start in range(at, size, SEARCH_BYTES):
        with suppress(OSError):
            found = pread_all(descriptor, SEARCH_BYTES + len(MAGIC) - 1, start).find(MAGIC)
            if found >= 0:
                return start + found
    return size
