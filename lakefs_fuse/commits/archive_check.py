"""Checks every byte of a commit object, so that fsck can say which files are damaged.

What always holds: whatever the bytes are, `verify` returns an audit, and raises only what ``fetch`` raises. In memory
are one window of the object, its directory and its record. The files are read once, in order. A file is sound if its
bytes have the CRC-32 of the header in front of them, or of the directory, so one damaged spot condemns only the files
in it. If the directory cannot be used, the headers lead from file to file, as far as they can.

Called from a task of the trio loop, which it holds for some milliseconds at a time.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

from lakefs_fuse.commits.archive import (
    CENTRAL,
    CENTRAL_MAGIC,
    COMMENT_BYTES_MAX,
    END,
    END64,
    END64_MAGIC,
    END_MAGIC,
    LOCAL,
    LOCAL_MAGIC,
    LOCATOR64,
    MAX16,
    MAX32,
    RECORD_NAME,
    Whereabouts,
    locate,
    outside,
    parse_commit_key,
    read_record,
)
from lakefs_fuse.commits.record import THIS, Put, Record, Relocate
from lakefs_fuse.errors import DamagedCommit
from lakefs_fuse.store.protocol import Buffer

WINDOW_BYTES = 8 << 20
DIRECTORY_BYTES_MAX = 1 << 30
_TAIL_BYTES = END.size + COMMENT_BYTES_MAX + END64.size + LOCATOR64.size
_HEADER_BYTES_MAX = LOCAL.size + 2 * MAX16
_ZIP64 = 1

Fetch = Callable[[int, int], Awaitable[Buffer]]
"""Fetches bytes [start, end) of the object, start < end <= size."""


class Fault(Enum):
    """Kinds of damage; each needs another repair."""

    END = "the end of the object is missing or damaged: no mount can read the commit"
    RECORD = "the change record is damaged: no mount can read the commit"
    DIRECTORY = "headers or directory are damaged, the files' bytes are not: unzip may refuse the object"
    FILE = "bytes of a file are damaged or missing"
    OUTSIDE = "the change record points at bytes that are not a file of this object"


@dataclass(frozen=True, slots=True)
class Problem:
    """Damage that was found. ``paths`` are the damaged files as this commit names them; other names may have been
    linked to the same bytes since."""

    fault: Fault
    text: str
    paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Found:
    """A file in the archive: ``size`` bytes from ``offset`` on, under the name it was packed with. ``crc`` is the
    CRC-32 that its bytes should have."""

    path: str
    offset: int
    size: int
    crc: int
    sound: bool


@dataclass(slots=True)
class Audit:
    """The outcome of a check. ``record`` is None if it cannot be read; ``members`` are in the order of their bytes,
    without the record."""

    record: Record | None = None
    members: list[Found] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Header:
    """The fields of a header in front of a file, or of its entry in the directory."""

    name: bytes
    at: int
    size: int
    crc: int
    length: int
    """Length of the header itself, in bytes."""


class _Window:
    """Reads an object in order, a window at a time."""

    def __init__(self, size: int, fetch: Fetch) -> None:
        self.size = size
        self._fetch = fetch
        self._at = 0
        self._data = memoryview(b"")

    async def read(self, start: int, end: int) -> memoryview:
        """Return bytes [start, end), cut at the object's end. Callers ask for a window of them at most, or for the
        directory."""
        end = min(end, self.size)
        if start >= end:
            return memoryview(b"")
        if not self._at <= start <= end <= self._at + len(self._data):
            data = await self._fetch(start, max(end, min(self.size, start + WINDOW_BYTES)))
            self._at, self._data = start, memoryview(data)
        return self._data[start - self._at : end - self._at]

    async def crc(self, start: int, end: int) -> int | None:
        """Return the CRC-32 of bytes [start, end); None if the object ends before."""
        crc = 0
        while start < end:
            piece = await self.read(start, min(end, start + WINDOW_BYTES))
            if not piece:
                return None
            crc = zlib.crc32(piece, crc)
            start += len(piece)
        return crc


async def verify(key: str, size: int, fetch: Fetch) -> Audit:
    """Check the commit object ``key`` of ``size`` bytes."""
    audit = Audit()
    window = _Window(size, fetch)
    tail = await window.read(max(0, size - _TAIL_BYTES), size)
    where: Whereabouts | None = None
    directory: list[_Header] | None = None
    try:
        where = locate(tail, size)
        directory_at, directory_end, count = _extent(tail, where.end_at - (size - len(tail)), where.end_at)
        directory = _entries(await window.read(directory_at, directory_end), directory_at, count)
    except DamagedCommit as error:
        end = Problem(Fault.DIRECTORY if where is not None else Fault.END, str(error))
    if directory is not None:
        await _by_directory(window, audit, directory)
    else:
        audit.problems.append(end)
        await _by_headers(window, audit, where.offset + where.length if where is not None else None)
    last = audit.members[-1] if audit.members else None
    if last is not None and (last.path == RECORD_NAME or (where is not None and last.offset == where.offset)):
        audit.members.pop()
        true = Whereabouts(last.offset, last.size, last.crc, where.end_at if where is not None else size)
        if last.sound and last.path == RECORD_NAME and where != true:
            if where is not None:
                audit.problems.append(Problem(Fault.END, "the comment does not lead to the change record"))
            where = true
    if where is not None:
        await _check_record(key, window, audit, where)
    return _with_paths(audit)


@dataclass(frozen=True, slots=True)
class Directory:
    """The undecoded directory of a commit object: ``count`` entries from byte ``at`` on."""

    raw: memoryview
    at: int
    count: int

    def checksums(self) -> dict[tuple[int, int], int]:
        """Return the CRC-32 of every member, by offset and size of its bytes. Takes 10 µs each; for any thread. Raises
        DamagedCommit."""
        entries = _entries(self.raw, self.at, self.count)
        return {(entry.at + entry.length, entry.size): entry.crc for entry in entries}


async def fetch_directory(size: int, fetch: Fetch) -> Directory:
    """Fetch the directory of a commit object of ``size`` bytes. Raises DamagedCommit."""
    window = _Window(size, fetch)
    tail = await window.read(max(0, size - _TAIL_BYTES), size)
    where = locate(tail, size)
    at, end, count = _extent(tail, where.end_at - (size - len(tail)), where.end_at)
    return Directory(await window.read(at, end), at, count)


# -- the directory


def _extent(tail: memoryview, end_at: int, absolute: int) -> tuple[int, int, int]:
    """Return where the directory begins and ends, and how many entries it has. The end record is at ``end_at`` in
    ``tail``, and at ``absolute`` in the object. Raises DamagedCommit."""
    _, _, _, _, count, length, at, _ = END.unpack_from(tail, end_at)
    zip64 = count == MAX16 or length == MAX32 or at == MAX32
    end = absolute
    if zip64:
        end -= END64.size + LOCATOR64.size
        before = end_at - END64.size - LOCATOR64.size
        if before < 0 or tail[before : before + 4] != END64_MAGIC:
            raise DamagedCommit("the end of the directory is damaged")
        count, length, at = END64.unpack_from(tail, before)[-3:]
    if at + length != end or length > DIRECTORY_BYTES_MAX or count * CENTRAL.size > length:
        raise DamagedCommit(f"a directory of {count} entries and {length} bytes at {at} of {end}")
    return at, end, count


def _entries(raw: memoryview, directory_at: int, count: int) -> list[_Header]:
    """Decode the entries of a directory. Raises DamagedCommit unless they cover the object from its first byte to the
    directory, in order and without gaps. So of the numbers in them only a CRC can be wrong unnoticed."""
    entries: list[_Header] = []
    at = header_at = 0
    try:
        for _ in range(count):
            fields = CENTRAL.unpack_from(raw, at)
            crc, packed, size, name_length, extra_length, comment_length = fields[7:13]
            names = at + CENTRAL.size
            extra = raw[names + name_length : names + name_length + extra_length]
            at = names + name_length + extra_length + comment_length
            size, packed, found_at = _with_zip64(extra, size, packed, fields[-1])
            if fields[0] != CENTRAL_MAGIC or fields[4] or packed != size or found_at != header_at or at > len(raw):
                raise DamagedCommit(f"entry {len(entries)} of the directory is damaged")
            # The local header has the same fields, except for ZIP64, which it has only if the size needs it.
            wide = [MAX32 in fields[8:10], fields[-1] == MAX32]
            other = extra_length - (4 + 16 * wide[0] + 8 * wide[1] if any(wide) else 0)
            length = LOCAL.size + name_length + other + 20 * wide[0]
            entries.append(_Header(bytes(raw[names : names + name_length]), header_at, size, crc, length))
            header_at += length + size
    except struct.error as error:
        raise DamagedCommit(f"entry {len(entries)} of the directory is damaged") from error
    if at != len(raw) or header_at != directory_at or not entries:
        raise DamagedCommit("the directory does not fit the object")
    return entries


def _with_zip64(extra: memoryview, size: int, packed: int, at: int) -> tuple[int, int, int]:
    """Return the three numbers, with those that did not fit in 32 bits from the extra field. They are in this order
    there. Raises struct.error."""
    if MAX32 not in (size, packed, at):
        return size, packed, at
    place = 0
    while place < len(extra):
        kind, length = struct.unpack_from("<HH", extra, place)
        if kind == _ZIP64:
            wide = list(struct.unpack_from(f"<{length // 8}Q", extra, place + 4))
            numbers = [wide.pop(0) if number == MAX32 and wide else number for number in (size, packed, at)]
            return numbers[0], numbers[1], numbers[2]
        place += 4 + length
    return size, packed, at


# -- the files


async def _by_directory(window: _Window, audit: Audit, directory: list[_Header]) -> None:
    for entry in directory:
        local = await _header(window, entry.at)
        start = entry.at + entry.length
        crc = await window.crc(start, start + entry.size)
        path = entry.name.decode("utf-8", "replace")
        sound = crc is not None and (crc == entry.crc or (local is not None and crc == local.crc))
        audit.members.append(Found(path, start, entry.size, crc if crc is not None and sound else entry.crc, sound))
        if sound and local != entry:
            audit.problems.append(Problem(Fault.DIRECTORY, f"the headers of {path!r} are damaged", (path,)))


async def _by_headers(window: _Window, audit: Audit, end: int | None) -> None:
    """Check the files to which the headers lead. ``end`` is where the record ends, if that is known."""
    at = 0
    while True:
        header = await _header(window, at)
        if header is None:
            magic = bytes(await window.read(at, at + 4))
            if at != end and magic not in (CENTRAL_MAGIC, END64_MAGIC, END_MAGIC):
                audit.problems.append(Problem(Fault.END, f"what lies behind byte {at} cannot be told"))
            return
        start = header.at + header.length
        at = start + header.size
        crc = await window.crc(start, at)
        path = header.name.decode("utf-8", "replace")
        audit.members.append(Found(path, start, header.size, header.crc, crc == header.crc))
        if crc is None:
            return


async def _header(window: _Window, at: int) -> _Header | None:
    """Read the header in front of a file; None if there is none that can be used."""
    raw = await window.read(at, at + LOCAL.size)
    if len(raw) < LOCAL.size:
        return None
    magic, _, flags, method, _, _, crc, packed, size, name_length, extra_length = LOCAL.unpack(raw)
    length = LOCAL.size + name_length + extra_length
    rest = await window.read(at + LOCAL.size, at + min(length, _HEADER_BYTES_MAX))
    if magic != LOCAL_MAGIC or method or flags & 8 or len(rest) < length - LOCAL.size:
        return None
    try:
        size, packed, _ = _with_zip64(rest[name_length:], size, packed, 0)
    except struct.error:
        return None
    return _Header(bytes(rest[:name_length]), at, size, crc, length) if packed == size else None


# -- the record


async def _check_record(key: str, window: _Window, audit: Audit, where: Whereabouts) -> None:
    named = parse_commit_key(key)
    if named is None:
        audit.problems.append(Problem(Fault.RECORD, f"{key}: not the name of a commit"))
        return
    pieces = bytearray()
    while len(pieces) < where.length:
        start = where.offset + len(pieces)
        pieces += await window.read(start, min(where.offset + where.length, start + WINDOW_BYTES))
    try:
        audit.record = read_record(bytes(pieces), where, *named)
    except DamagedCommit as error:
        audit.problems.append(Problem(Fault.RECORD, str(error)))
        return
    extents = {(member.offset, member.size) for member in audit.members}
    astray = dict.fromkeys(outside(audit.record, where))
    for operation in audit.record.operations:
        if not isinstance(operation, Put | Relocate) or operation.object != THIS:
            continue
        if operation.size and (operation.offset, operation.size) not in extents:
            astray[operation.path] = None
    if astray:
        audit.problems.append(Problem(Fault.OUTSIDE, Fault.OUTSIDE.value, tuple(astray)))


def _with_paths(audit: Audit) -> Audit:
    """Add a problem for each damaged file, and name all files in problems of the end and the record. Names are those in
    the record, if there is one."""
    users: dict[tuple[int, int], list[str]] = {}
    for operation in audit.record.operations if audit.record is not None else ():
        if isinstance(operation, Put | Relocate) and operation.object == THIS:
            users.setdefault((operation.offset, operation.size), []).append(operation.path)
    everything = dict.fromkeys(
        [operation.path for operation in audit.record.operations]
        if audit.record is not None
        else [member.path for member in audit.members]
    )
    audit.problems = [
        Problem(problem.fault, problem.text, tuple(everything))
        if problem.fault in (Fault.END, Fault.RECORD)
        else problem
        for problem in audit.problems
    ]
    for member in audit.members:
        if not member.sound:
            paths = users.get((member.offset, member.size), [] if audit.record is not None else [member.path])
            text = f"{member.path!r}: bytes {member.offset} to {member.offset + member.size} are damaged or missing"
            audit.problems.append(Problem(Fault.FILE, text, tuple(paths)))
    return audit
