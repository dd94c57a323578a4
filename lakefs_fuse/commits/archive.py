"""The commit object: a ZIP archive of files whose last member is the change record. `docs/format.md` has every byte.

What always holds for archives written here: members are stored uncompressed, one after the other without gaps, with
sizes and CRC-32 in front of their bytes. The archive's comment says where the record is, so that a reader needs only
the tail. ``unzip`` and Python's zipfile can read it. ZIP64 fields appear only if a number needs them.

Building and reading are blocking code, for any one thread at a time. Building keeps about 200 bytes for each member in
memory, besides what its sink keeps. `CommitLog` stores archives and fetches them.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import time as clock
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from lakefs_fuse.commits.record import (
    COMMITS,
    THIS,
    TIME_NS_MAX,
    UNSET,
    WRITER,
    Put,
    Record,
    Relocate,
    SetAttr,
    decode,
)
from lakefs_fuse.errors import DamagedCommit
from lakefs_fuse.product import RESERVED_PREFIX
from lakefs_fuse.store.protocol import Buffer, FileSlice

RECORD_NAME = f"{RESERVED_PREFIX}record"
RECORD_BYTES_MAX = 1 << 30
SLICE_BYTES_MAX = 8 << 20
"""A longer slice of a file is not held in memory, but read twice: for its CRC, and to be written."""

MODE_DEFAULT = 0o644

Sink = Callable[[Buffer], object]
"""A function that takes all bytes in order: ``write`` of a buffered binary file, ``append`` of a list, `fd_sink`."""

LOCAL = struct.Struct("<4s5HIIIHH")
CENTRAL = struct.Struct("<4s6HIIIHHHHHII")
END = struct.Struct("<4sHHHHIIH")
END64 = struct.Struct("<4sQHHIIQQQQ")
LOCATOR64 = struct.Struct("<4sIQI")
_ATTRIBUTES = struct.Struct("<HHBiHHBBIBI")
_OWNERS = struct.Struct("<HHBBIBI")

LOCAL_MAGIC, CENTRAL_MAGIC, END_MAGIC = b"PK\x03\x04", b"PK\x01\x02", b"PK\x05\x06"
END64_MAGIC, LOCATOR64_MAGIC = b"PK\x06\x06", b"PK\x06\x07"
FLAG_UTF8 = 1 << 11
MAX16, MAX32 = 0xFFFF, 0xFFFF_FFFF
_NEEDS, _NEEDS_ZIP64 = 20, 45
_MADE_BY_UNIX = 3 << 8 | _NEEDS_ZIP64
_DOS_TIME_MIN, _DOS_TIME_MAX = 0x21 << 16, 0xFF9F_BF7D
_DOS_S_MIN, _DOS_S_END = 315_532_800, 4_354_819_200
"""1980-01-01 to 2108-01-01, in seconds since 1970."""

_KEY = re.compile(re.escape(COMMITS) + r"([0-9a-f]{16})-([0-9a-f]{8})\.zip")
_COMMENT = re.compile(rb"lakefs1 (0|[1-9][0-9]{0,18}) ([1-9][0-9]{0,18}) ([0-9a-f]{8})")
COMMENT_BYTES_MAX = 56


@dataclass(frozen=True, slots=True)
class Member:
    """A file for an archive: ``size`` bytes of ``data``.

    ``mode`` has the permission bits, and may have a file type (S_IFLNK: the bytes are the link's target). UNSET
    attributes are written as 0644 and 0. A slice must not change while it is added.
    """

    path: str
    data: Buffer | FileSlice
    size: int
    mode: int = UNSET
    mtime_ns: int = 0
    uid: int = UNSET
    gid: int = UNSET


def commit_key(time: int, writer: str) -> str:
    """Return the key of a commit; ``time`` in nanoseconds since 1970, ``writer`` 8 hex digits. Raises ValueError."""
    if not 0 <= time <= TIME_NS_MAX or not WRITER.fullmatch(writer):
        raise ValueError(f"no commit of time {time} by {writer!r}")
    return f"{COMMITS}{time:016x}-{writer}.zip"


def parse_commit_key(key: str) -> tuple[int, str] | None:
    """Return the time and the writer in a commit's key, or None for a key that `commit_key` does not make."""
    match = _KEY.fullmatch(key)
    if match is None or (time := int(match[1], 16)) > TIME_NS_MAX:
        return None
    return time, match[2]


def commit_time(key: str) -> int:
    """Return the time in a commit's key; 0 for another key."""
    named = parse_commit_key(key)
    return 0 if named is None else named[0]


def fd_sink(fd: int) -> Sink:
    """Return a sink that writes to a file descriptor, at its position."""

    def write(data: Buffer) -> None:
        written = os.write(fd, data)
        if written < len(data):
            rest = memoryview(data)[written:]
            while rest:
                rest = rest[os.write(fd, rest) :]

    return write


class ArchiveBuilder:
    """Writes one archive to a sink. After an exception the archive is of no use. ``size`` is the number of bytes
    written so far, ``members`` that of members."""

    def __init__(self, sink: Sink) -> None:
        self.size = 0
        self.members = 0
        self._sink = sink
        self._directory = bytearray()
        self._finished = False

    def add(self, member: Member) -> int:
        """Write one member; returns the offset of its data. Raises ValueError if ``size`` is not the data's, OSError of
        the slice or the sink."""
        if self._finished:
            raise ValueError("the archive is finished")
        data = member.data
        if isinstance(data, FileSlice):
            length = data.length
            if length <= SLICE_BYTES_MAX:
                data = b"".join(data.pieces(SLICE_BYTES_MAX))
        else:
            length = len(data)
        if length != member.size:
            raise ValueError(f"{member.path!r}: {length} bytes, not {member.size}")
        mode = MODE_DEFAULT if member.mode == UNSET else member.mode
        uid = 0 if member.uid == UNSET else member.uid
        gid = 0 if member.gid == UNSET else member.gid
        attributes = _attributes(member.mtime_ns // 1_000_000_000, uid, gid)
        crc = _crc(data) if isinstance(data, FileSlice) else zlib.crc32(data)
        offset = self._begin(member.path.encode(), length, crc, mode, _dos_time(member.mtime_ns), attributes)
        if isinstance(data, FileSlice):
            for piece in data.pieces():
                self._sink(piece)
        elif length:
            self._sink(data)
        self.size += length
        return offset

    def finish(self, record: bytes) -> int:
        """Write the record, the directory and the end; returns the size of the archive in bytes. Raises ValueError for
        a record that no reader would accept."""
        if self._finished or not 0 < len(record) <= RECORD_BYTES_MAX:
            raise ValueError(f"a record of {len(record)} bytes")
        crc = zlib.crc32(record)
        offset = self._begin(RECORD_NAME.encode(), len(record), crc, MODE_DEFAULT, _DOS_TIME_MIN, b"")
        self._sink(record)
        self.size += len(record)
        self._finished = True
        end = _end(self.members, len(self._directory), self.size, b"lakefs1 %d %d %08x" % (offset, len(record), crc))
        self._sink(bytes(self._directory))  # joining what can change would keep every other thread waiting
        self._sink(end)
        self.size += len(self._directory) + len(end)
        return self.size

    def _begin(self, name: bytes, length: int, crc: int, mode: int, dos_time: int, attributes: bytes) -> int:
        """Write a local header to the sink, and add its entry to the directory; returns where the data begins."""
        header_at = self.size
        needs, short_length, short_at = _NEEDS, length, header_at
        local_extra = central_extra = attributes
        if length >= MAX32 or header_at >= MAX32:
            numbers: list[int] = []
            if length >= MAX32:
                needs, short_length, numbers = _NEEDS_ZIP64, MAX32, [length, length]
                local_extra = _zip64_extra(numbers) + attributes
            if header_at >= MAX32:
                needs, short_at, numbers = _NEEDS_ZIP64, MAX32, [*numbers, header_at]
            central_extra = _zip64_extra(numbers) + attributes
        name_length = len(name)
        common = needs, FLAG_UTF8, 0, dos_time & MAX16, dos_time >> 16, crc, short_length, short_length, name_length
        header = LOCAL.pack(LOCAL_MAGIC, *common, len(local_extra)) + name + local_extra
        kind = (stat.S_IFMT(mode) or stat.S_IFREG) | stat.S_IMODE(mode)
        self._directory += CENTRAL.pack(
            CENTRAL_MAGIC, _MADE_BY_UNIX, *common, len(central_extra), 0, 0, 0, kind << 16, short_at
        )
        self._directory += name + central_extra
        self._sink(header)
        self.members += 1
        self.size += len(header)
        return self.size


def build(members: Iterable[Member], make_record: Callable[[list[int]], bytes]) -> bytes:
    """Build a small archive in memory. ``make_record`` gets the offsets of the members' data, in order."""
    pieces: list[Buffer] = []
    builder = ArchiveBuilder(pieces.append)
    builder.finish(make_record([builder.add(member) for member in members]))
    return b"".join(pieces)


def _attributes(mtime_s: int, uid: int, gid: int) -> bytes:
    """Return the extra fields 0x5455 (if 32 bits hold the time) and 0x7875."""
    if -(1 << 31) <= mtime_s < 1 << 31:
        return _ATTRIBUTES.pack(0x5455, 5, 1, mtime_s, 0x7875, 11, 1, 4, uid, 4, gid)
    return _OWNERS.pack(0x7875, 11, 1, 4, uid, 4, gid)


def _zip64_extra(numbers: list[int]) -> bytes:
    return struct.pack(f"<HH{len(numbers)}Q", 1, 8 * len(numbers), *numbers)


def _dos_time(time_ns: int) -> int:
    """Return date and time in UTC, to two seconds; the extra field has the second, and the record the nanosecond."""
    time_s = time_ns // 1_000_000_000
    if not _DOS_S_MIN <= time_s < _DOS_S_END:
        return _DOS_TIME_MIN if time_s < _DOS_S_MIN else _DOS_TIME_MAX
    year, month, day, hour, minute, second = clock.gmtime(time_s)[:6]
    return (year - 1980) << 25 | month << 21 | day << 16 | hour << 11 | minute << 5 | second >> 1


def _crc(data: FileSlice) -> int:
    crc = 0
    for piece in data.pieces():
        crc = zlib.crc32(piece, crc)
    return crc


def _end(members: int, directory_length: int, directory_at: int, comment: bytes) -> bytes:
    """Return what follows the central directory."""
    zip64 = b""
    if members >= MAX16 or directory_length >= MAX32 or directory_at >= MAX32:
        at = directory_at + directory_length
        zip64 = END64.pack(
            END64_MAGIC, 44, _MADE_BY_UNIX, _NEEDS_ZIP64, 0, 0, members, members, directory_length, directory_at
        ) + LOCATOR64.pack(LOCATOR64_MAGIC, 0, at, 1)
    count = min(members, MAX16)
    length, at = min(directory_length, MAX32), min(directory_at, MAX32)
    return zip64 + END.pack(END_MAGIC, 0, 0, count, count, length, at, len(comment)) + comment


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Where the record of an archive is, in bytes, and its CRC-32; ``end_at`` is where the end record begins."""

    offset: int
    length: int
    crc: int
    end_at: int


def locate(tail: Buffer, size: int) -> Whereabouts:
    """Find the record by the comment at the end of an archive of ``size`` bytes. Raises DamagedCommit."""
    last = bytes(tail[-(END.size + COMMENT_BYTES_MAX) :])
    at = last.rfind(END_MAGIC)
    match = _COMMENT.fullmatch(last, at + END.size) if 0 <= at <= len(last) - END.size else None
    if match is None:
        raise DamagedCommit("cut short, or no commit: its end is not that of one")
    if END.unpack_from(last, at)[-1] != len(match[0]):
        raise DamagedCommit("the length of its comment is wrong")
    offset, length, crc = int(match[1]), int(match[2]), int(match[3], 16)
    end_at = size - len(last) + at
    if offset < LOCAL.size + len(RECORD_NAME) or offset + length > end_at or length > RECORD_BYTES_MAX:
        raise DamagedCommit(f"a record of {length} bytes at {offset} of {size}")
    return Whereabouts(offset, length, crc, end_at)


def read_record(raw: Buffer, where: Whereabouts, time: int, writer: str) -> Record:
    """Check the record at ``where`` in the commit of this time and writer, except for `outside`, and return it. Raises
    DamagedCommit."""
    if len(raw) != where.length or zlib.crc32(raw) != where.crc:
        raise DamagedCommit("the CRC of its change record is wrong")
    record = decode(raw)
    if (record.time, record.writer) != (time, writer):
        raise DamagedCommit(f"its change record is that of {record.time:016x}-{record.writer}")
    return record


def read_bounded_record(raw: Buffer, where: Whereabouts, time: int, writer: str) -> Record:
    """As `read_record`, and check that the bytes of all operations are within the members. Raises DamagedCommit."""
    record = read_record(raw, where, time, writer)
    for path in outside(record, where):
        raise DamagedCommit(f"{path!r} is outside of its files")
    return record


def outside(record: Record, where: Whereabouts) -> Iterator[str]:
    """Yield the paths whose bytes the record places in this archive where no file of it can be."""
    for operation in record.operations:
        if not isinstance(operation, Put | Relocate | SetAttr) or operation.object != THIS:
            continue
        if operation.offset + operation.size > where.offset:
            yield operation.path


# -- members of a range

WRONG_MAX = 16
"""The search ends after this many wrong files, each of which costs a pass over its bytes."""

_LOCAL_MAGIC = re.compile(re.escape(LOCAL_MAGIC))
_OWNERS_HEAD = struct.pack("<HHBB", 0x7875, 11, 1, 4)
_OWNERS_BYTES, _TIMES_BYTES, _ZIP64_BYTES = 15, 9, 20
_EXTRA_BYTES = frozenset(_OWNERS_BYTES + times + wide for times in (0, _TIMES_BYTES) for wide in (0, _ZIP64_BYTES))


def wrong_members(data: Buffer) -> list[tuple[int, int]]:
    """Return begin and end in ``data``, a range of a pack, of whole files whose bytes do not have their CRC-32.

    A range of a pack contains the headers of its files, but not their places. Bytes of exactly the form that
    `ArchiveBuilder` gives a header count as one, so the files in a file that is itself a pack are checked, too. Bytes
    behind a header whose CRC-32 is right are not searched for others: the work is one pass over the range, and
    WRONG_MAX files at most.
    """
    view = memoryview(data)
    wrong: list[tuple[int, int]] = []
    at = 0
    while len(wrong) < WRONG_MAX and (match := _LOCAL_MAGIC.search(view, at)) is not None:
        at = match.end()
        header = _read_header(view, match.start())
        if header is None:
            continue
        begin, size, crc = header
        if begin + size > len(view):
            continue
        if zlib.crc32(view[begin : begin + size]) == crc:
            at = begin + size
        else:
            wrong.append((begin, begin + size))
    return wrong


def _read_header(view: memoryview, at: int) -> tuple[int, int, int] | None:
    """Return begin, size and CRC-32 of the file behind a header. None unless the header is whole and one of ours."""
    if at + LOCAL.size > len(view):
        return None
    _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = LOCAL.unpack_from(view, at)
    begin = at + LOCAL.size + name_bytes + extra_bytes
    owners = begin - _OWNERS_BYTES
    if (flags, method, packed) != (FLAG_UTF8, 0, size) or size == MAX32 or extra_bytes not in _EXTRA_BYTES:
        return None
    if begin > len(view) or view[owners : owners + len(_OWNERS_HEAD)] != _OWNERS_HEAD:
        return None
    return begin, size, crc
