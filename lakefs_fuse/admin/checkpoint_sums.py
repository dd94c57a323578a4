"""What proves that the bytes of a file are right: sums over all of them, taken while they pass by once, in order.

Every check is an object that is fed the file from its first byte to its last and then says what is wrong, or nothing.
Plain blocking code without requests, for one thread at a time; memory is what one check holds: of a ZIP its directory,
of a safetensors file its header. What a check cannot prove it does not claim: `Verdict.UNKNOWN`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from lakefs_fuse.config import GIB, MIB
from lakefs_fuse.staging.part_layout import SPANS, PartLayout

SAFETENSORS_HEADER_BYTES_MAX = 100 * MIB
"""As the library itself has it."""
FOREIGN_PART_BYTES = tuple(size * MIB for size in (5, 8, 10, 15, 16, 25, 32, 50, 64, 100, 128, 256, 512))
"""Part sizes that other programs use; the AWS CLI and boto3 8 MiB, rclone 5, s3fs 10."""
LAYOUTS_MAX = 3
"""Each costs an MD5 of the whole file."""
ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_BYTES = 30
_ETAG = re.compile(r"([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?")


class Verdict(Enum):
    """What became of a check."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """``problem`` says what is wrong; ``name`` of the check is in the summary, and final."""

    name: str
    verdict: Verdict
    problem: str = ""


class Check(Protocol):
    """See the module's head."""

    def feed(self, data: memoryview) -> None: ...
    def finish(self) -> Finding: ...


class Sha256:
    """Against a line of a SHA256SUMS file."""

    def __init__(self, expected: str) -> None:
        self._expected, self._hash = expected, hashlib.sha256()

    def feed(self, data: memoryview) -> None:
        self._hash.update(data)

    def finish(self) -> Finding:
        right = self._hash.hexdigest() == self._expected
        return Finding("sha256", _of(right), "" if right else "its SHA-256 is not the one in SHA256SUMS")


def _of(right: bool) -> Verdict:
    return Verdict.RIGHT if right else Verdict.WRONG


# -- ETags


class Etag:
    """An ETag that is an MD5, or an MD5 of the MD5s of parts, whose sizes are guessed from their number."""

    def __init__(self, etag: str, layouts: Sequence[Sequence[int]]) -> None:
        """``layouts``: sizes of the parts, of each that may be meant; one of one part for a plain MD5."""
        self.etag, self.layouts = etag, layouts
        self._sums = [_PartSums(sizes) for sizes in layouts]

    def feed(self, data: memoryview) -> None:
        for sums in self._sums:
            sums.feed(data)

    def finish(self) -> Finding:
        plain = "-" not in self.etag
        right = any((sums.single() if plain else sums.combined()) == self.etag for sums in self._sums)
        return Finding("etag", _of(right), "" if right else "its MD5 is not the one that the store keeps (ETag)")


class _PartSums:
    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes, self._next, self._left = sizes, 0, 0
        self._digests: list[bytes] = []
        self._hash = hashlib.md5(usedforsecurity=False)
        self._begin()

    def _begin(self) -> None:
        self._left = self._sizes[self._next] if self._next < len(self._sizes) else 0
        self._hash = hashlib.md5(usedforsecurity=False)
        self._next += 1

    def feed(self, data: memoryview) -> None:
        while data and self._left:
            piece = data[: self._left]
            self._hash.update(piece)
            self._left -= len(piece)
            data = data[len(piece) :]
            if not self._left:
                self._digests.append(self._hash.digest())
                self._begin()

    def single(self) -> str:
        return self._digests[0].hex() if self._digests else self._hash.hexdigest()

    def combined(self) -> str:
        return f"{hashlib.md5(b''.join(self._digests), usedforsecurity=False).hexdigest()}-{len(self._digests)}"


def etag_check(etag: str, size: int, *, ours: bool) -> Etag | None:
    """None where nothing is known of what the ETag is. ``ours``: this program stored the object, so its own parts are
    the only ones that count."""
    match = _ETAG.fullmatch(etag)
    if match is None:
        return None
    if match[2] is None:
        return Etag(etag, [[size]])
    count = int(match[2])
    found = _own_layouts(size, count)
    if not ours:
        found += [_uniform(size, part) for part in FOREIGN_PART_BYTES if -(-size // part) == count]
    unique = list(dict.fromkeys(tuple(sizes) for sizes in found))
    return Etag(etag, unique[:LAYOUTS_MAX]) if unique else None


def _uniform(size: int, part: int) -> list[int]:
    return [min(part, size - at) for at in range(0, size, part)]


def _own_layouts(size: int, count: int) -> list[list[int]]:
    """The cut of this program; a node with little staging has smaller parts at the end."""
    found = []
    for staging in (None, *(largest * 8 for largest, _ in SPANS[:-1])):
        layout = PartLayout(staging_bytes_max=staging)
        if size <= min(layout.file_bytes_max, 6 * 1024 * GIB) and layout.count(size) == count:
            found.append([min(end, size) - start for start, end in map(layout.range, range(count))])
    return found


# -- what is inside


class Zip:
    """The CRC-32 of every member, which torch.save writes. ``members`` is what `read_directory` found.

    torch can be told not to compute them; then none fits, which is no damage: unknown.
    """

    def __init__(self, members: Sequence[zipfile.ZipInfo]) -> None:
        self._members = sorted(members, key=lambda member: member.header_offset)
        self._at = 0
        self._next = 0
        self._header = bytearray()
        self._left = -1
        self._crc = 0
        self._inflate: zlib._Decompress | None = None
        self._wrong: list[str] = []
        self._right = 0
        self._lost = ""

    def feed(self, data: memoryview) -> None:
        while data and not self._lost and self._next < len(self._members):
            used = self._in_data(data) if self._left >= 0 else self._in_header(data)
            self._at += used
            data = data[used:]
        self._at += len(data)

    def _in_header(self, data: memoryview) -> int:
        """Up to where the member's data begins; answers how many bytes were used."""
        member = self._members[self._next]
        gap = member.header_offset - self._at
        if not self._header and gap:
            if gap < 0:
                self._lost = f"{member.filename} overlaps another member of the ZIP"
            return min(max(gap, 0), len(data))
        piece = data[: self._header_bytes() - len(self._header)]
        self._header += piece
        if len(self._header) >= _LOCAL_BYTES and self._header[:4] != ZIP_MAGIC:
            self._lost = f"{member.filename} is not at byte {member.header_offset} of the ZIP, where it should be"
        elif len(self._header) == self._header_bytes():
            self._begin(member)
        return len(piece)

    def _header_bytes(self) -> int:
        """How many a local header has, as far as it is known yet."""
        if len(self._header) < _LOCAL_BYTES:
            return _LOCAL_BYTES
        name, extra = struct.unpack_from("<HH", self._header, 26)
        return int(_LOCAL_BYTES + name + extra)

    def _begin(self, member: zipfile.ZipInfo) -> None:
        self._header.clear()
        self._left, self._crc = member.compress_size, 0
        self._inflate = zlib.decompressobj(-15) if member.compress_type == zipfile.ZIP_DEFLATED else None
        if not self._left:
            self._end()

    def _in_data(self, data: memoryview) -> int:
        member = self._members[self._next]
        piece = data[: self._left]
        if member.compress_type == zipfile.ZIP_STORED:
            self._crc = zlib.crc32(piece, self._crc)
        elif self._inflate is not None:
            try:
                rest: bytes | memoryview = piece
                while rest:
                    self._crc = zlib.crc32(self._inflate.decompress(rest, MIB), self._crc)
                    rest = self._inflate.unconsumed_tail
            except zlib.error:
                self._crc, self._inflate = member.CRC ^ 1, None
        self._left -= len(piece)
        if not self._left:
            if self._inflate is not None:
                self._crc = zlib.crc32(self._inflate.flush(), self._crc)
            self._end()
        return len(piece)

    def _end(self) -> None:
        member = self._members[self._next]
        if member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            if self._crc != member.CRC:
                self._wrong.append(member.filename)
            elif member.file_size:
                self._right += 1
        self._next, self._left = self._next + 1, -1

    def finish(self) -> Finding:
        if not self._lost and self._next < len(self._members):
            self._lost = f"the ZIP ends in the midst of {self._members[self._next].filename}"
        if self._lost:
            return Finding("zip", Verdict.WRONG, self._lost)
        if self._wrong and not self._right and len(self._wrong) > 1:
            return Finding("zip", Verdict.UNKNOWN)
        if self._wrong:
            more = f" and {len(self._wrong) - 1} more" if len(self._wrong) > 1 else ""
            return Finding("zip", Verdict.WRONG, f"the CRC-32 of {self._wrong[0]}{more} in the ZIP is wrong")
        return Finding("zip", Verdict.RIGHT if self._right else Verdict.UNKNOWN)


class TailTooShort(Exception):
    """A ZIP's directory begins before what was given; ``start`` is where to begin."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


class _Tail(io.RawIOBase):
    """A file of which only the end is there."""

    def __init__(self, tail: bytes, size: int) -> None:
        self._tail, self._size, self._begin, self._at = tail, size, size - len(tail), 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._at = base + offset
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        if self._at < self._begin:
            raise TailTooShort(self._at)
        start = self._at - self._begin
        end = len(self._tail) if size is None or size < 0 else start + size
        data = self._tail[start:end]
        self._at += len(data)
        return data


def read_directory(tail: bytes, size: int) -> list[zipfile.ZipInfo]:
    """Members of a ZIP of ``size`` bytes that ends in ``tail``. Raises TailTooShort, and zipfile.BadZipFile for what is
    none, or is cut short."""
    try:
        with zipfile.ZipFile(_Tail(tail, size)) as archive:
            return archive.infolist()
    except (struct.error, UnicodeDecodeError, ValueError, NotImplementedError) as error:
        raise zipfile.BadZipFile(str(error)) from error


class Broken:
    """Found to be wrong before its bytes were seen."""

    def __init__(self, name: str, problem: str) -> None:
        self._finding = Finding(name, Verdict.WRONG, problem)

    def feed(self, data: memoryview) -> None:
        pass

    def finish(self) -> Finding:
        return self._finding


class Safetensors:
    """The header tells where each tensor is; together they are the file, to its last byte."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._head = bytearray()
        self._wanted = 8

    def feed(self, data: memoryview) -> None:
        while data and len(self._head) < self._wanted:
            piece = data[: self._wanted - len(self._head)]
            self._head += piece
            data = data[len(piece) :]
            if len(self._head) == 8 == self._wanted:
                length = int.from_bytes(self._head, "little")
                if length <= min(SAFETENSORS_HEADER_BYTES_MAX, self._size - 8):
                    self._wanted = 8 + length

    def finish(self) -> Finding:
        problem = self._problem()
        return Finding("safetensors", _of(not problem), problem)

    def _problem(self) -> str:
        if len(self._head) < self._wanted or self._wanted == 8:
            return "the length of its safetensors header is wrong"
        try:
            header = json.loads(bytes(self._head[8:]))
            ends = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
            spans = sorted((int(start), int(end)) for start, end in ends)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return "its safetensors header cannot be read"
        at = 0
        for start, end in spans:
            if start != at or end < start:
                return "tensors of its safetensors header overlap or leave a gap"
            at = end
        if self._wanted + at != self._size:
            return f"its safetensors header tells of {self._wanted + at:,} bytes, the file has {self._size:,}"
        return ""


def parse_sha256sums(raw: bytes) -> dict[str, str]:
    """Names with their sums, as sha256sum(1) writes them; other lines are left out."""
    found = {}
    for line in raw.decode("utf-8", "surrogateescape").splitlines():
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)", line)
        if match is not None:
            found[match[2]] = match[1].lower()
    return found
