"""Checks of the bytes of a file: sums over all of them, computed in one pass, in order.

Blocking code without requests, for one thread at a time. A check holds little memory: of a ZIP its directory, of a
safetensors file its header. A check that cannot prove anything finds `Verdict.UNKNOWN`.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
import zipfile
import zlib
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeAlias, TypeVar

from lakefs_fuse.config import GIB, MIB
from lakefs_fuse.staging.part_layout import SPANS, STAGING_PARTS_MIN, PartLayout
from lakefs_fuse.store.server_copy import COPY_PART_BYTES

T = TypeVar("T")
SAFETENSORS_HEADER_BYTES_MAX = 100 * MIB
"""As the library itself has it."""
FOREIGN_PART_BYTES = tuple(size * MIB for size in (5, 8, 10, 15, 16, 25, 32, 50, 64, 100, 128, 256, 512))
"""Part sizes that other programs use; the AWS CLI and boto3 8 MiB, rclone 5, s3fs 10."""
PIECE_BYTES = 16 * MIB
LAYOUTS_MAX = 3
"""Each costs an MD5 of the whole file."""
ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_BYTES = 30
_ETAG = re.compile(r"([0-9a-f]{32})(?:-([1-9][0-9]{0,4}))?")


class Verdict(Enum):
    """The result of a check."""

    RIGHT = "right"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """``problem`` says what is wrong; ``name`` of the check is in the summary, and final."""

    name: str
    verdict: Verdict
    problem: str = ""


Reading = Generator[int, memoryview, T]
"""Yields the most bytes that it takes next; is sent that many or fewer, and none at the end of the file."""


class Reader(Generic[T]):
    """A reading of a file that is fed from the first byte to the last, in pieces of any size."""

    def __init__(self, reading: Reading[T]) -> None:
        self._reading = reading
        self._bytes_max = 0
        self._result: T | None = None
        self._send(None)

    def feed(self, data: memoryview) -> None:
        while data and self._result is None:
            piece = data[: self._bytes_max]
            data = data[len(piece) :]
            self._send(piece)

    def finish(self) -> T:
        while self._result is None:
            self._send(memoryview(b""))
        return self._result

    def _send(self, piece: memoryview | None) -> None:
        try:
            self._bytes_max = next(self._reading) if piece is None else self._reading.send(piece)
        except StopIteration as end:
            self._result = end.value


Check: TypeAlias = Reader[Finding]


def _read(count: int) -> Reading[bytes]:
    """The next ``count`` bytes, fewer at the end of the file."""
    found = bytearray()
    while len(found) < count and (piece := (yield count - len(found))):
        found += piece
    return bytes(found)


def _skip(count: int) -> Reading[bool]:
    """Whether the file has ``count`` more bytes."""
    while count and (piece := (yield count)):
        count -= len(piece)
    return not count


def _of(right: bool) -> Verdict:
    return Verdict.RIGHT if right else Verdict.WRONG


def broken(name: str, problem: str) -> Check:
    """A check of a file that is known to be damaged."""

    def reading() -> Reading[Finding]:
        yield 1
        return Finding(name, Verdict.WRONG, problem)

    return Reader(reading())


def sha256_check(expected: str) -> Check:
    """Compares with a line of a SHA256SUMS file."""

    def reading() -> Reading[Finding]:
        found = hashlib.sha256()
        while piece := (yield PIECE_BYTES):
            found.update(piece)
        right = found.hexdigest() == expected
        return Finding("sha256", _of(right), "" if right else "its SHA-256 is not the one in SHA256SUMS")

    return Reader(reading())


# -- ETags


def etag_check(etag: str, size: int, *, ours: bool) -> Check | None:
    """Compares with an ETag that is an MD5, or an MD5 of the MD5s of parts; None for any other.

    ``ours``: this program stored the object, so only its own sizes of parts count."""
    layouts = part_layouts(etag, size, ours=ours)
    return Reader(_etag(etag, layouts)) if layouts else None


def _etag(etag: str, layouts: Sequence[Sequence[int]]) -> Reading[Finding]:
    readers = [Reader(_digests(sizes)) for sizes in layouts]
    while piece := (yield PIECE_BYTES):
        for reader in readers:
            reader.feed(piece)
    right = any(_etag_of(reader.finish(), plain="-" not in etag) == etag for reader in readers)
    return Finding("etag", _of(right), "" if right else "its MD5 is not the one that the store keeps (ETag)")


def _digests(sizes: Sequence[int]) -> Reading[list[bytes]]:
    """The MD5s of parts of these sizes."""
    digests: list[bytes] = []
    for left in sizes:
        part = hashlib.md5(usedforsecurity=False)
        while left and (piece := (yield left)):
            part.update(piece)
            left -= len(piece)
        digests.append(part.digest())
    return digests


def _etag_of(digests: Sequence[bytes], *, plain: bool) -> str:
    if plain:
        return digests[0].hex()
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def part_layouts(etag: str, size: int, *, ours: bool) -> list[tuple[int, ...]]:
    """The sizes of parts that an object with this ETag may have, one layout each; none if the ETag tells nothing."""
    match = _ETAG.fullmatch(etag)
    if match is None:
        return []
    if match[2] is None:
        return [(size,)]
    count = int(match[2])
    found = _own_layouts(size, count)
    if not ours:
        found += [_uniform(size, part) for part in FOREIGN_PART_BYTES if -(-size // part) == count]
    return list(dict.fromkeys(tuple(sizes) for sizes in found))[:LAYOUTS_MAX]


def _uniform(size: int, part: int) -> list[int]:
    return [min(part, size - at) for at in range(0, size, part)]


def _own_layouts(size: int, count: int) -> list[list[int]]:
    """The layouts of this program: of files, with smaller parts at the end from a node with little staging; of copies
    that the store made."""
    found: list[list[int]] = []
    for staging in (None, *(largest * STAGING_PARTS_MIN for largest, _ in SPANS[:-1])):
        layout = PartLayout(staging_bytes_max=staging)
        if size <= min(layout.file_bytes_max, 6 * 1024 * GIB) and layout.count(size) == count:
            found.append([min(end, size) - start for start, end in map(layout.range, range(count))])
    if -(-size // COPY_PART_BYTES) == count:
        found.append(_uniform(size, COPY_PART_BYTES))
    return found


# -- ZIP


def zip_check(members: Sequence[zipfile.ZipInfo]) -> Check:
    """Computes the CRC-32 of every member, as torch.save writes them; ``members`` come from `read_directory`.

    torch has an option not to compute them; then none is right, which is no damage but unknown."""
    return Reader(_zip(sorted(members, key=lambda member: member.header_offset)))


def _zip(members: Sequence[zipfile.ZipInfo]) -> Reading[Finding]:
    wrong: list[str] = []
    right = at = 0
    for member in members:
        if member.header_offset < at:
            return Finding("zip", Verdict.WRONG, f"{member.filename} overlaps another member of the ZIP")
        cut = Finding("zip", Verdict.WRONG, f"the ZIP ends in the midst of {member.filename}")
        if not (yield from _skip(member.header_offset - at)):
            return cut
        header = yield from _read(_LOCAL_BYTES)
        if len(header) < _LOCAL_BYTES:
            return cut
        if not header.startswith(ZIP_MAGIC):
            where = f"is not at byte {member.header_offset} of the ZIP, where it should be"
            return Finding("zip", Verdict.WRONG, f"{member.filename} {where}")
        rest = sum(struct.unpack_from("<HH", header, 26))  # name and extra field
        crc = (yield from _member_crc(member)) if (yield from _skip(rest)) else None
        if crc is None:
            return cut
        at = member.header_offset + _LOCAL_BYTES + rest + member.compress_size
        if member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            wrong += [member.filename] if crc != member.CRC else []
            right += crc == member.CRC and member.file_size > 0
    if wrong and (right or len(wrong) == 1):
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return Finding("zip", Verdict.WRONG, f"the CRC-32 of {wrong[0]}{more} in the ZIP is wrong")
    return Finding("zip", Verdict.RIGHT if right else Verdict.UNKNOWN)


def _member_crc(member: zipfile.ZipInfo) -> Reading[int | None]:
    """The CRC-32 of the data of a member, None if the file ends in it; a wrong one where the data is damaged."""
    crc, left = 0, member.compress_size
    inflate = zlib.decompressobj(-15) if member.compress_type == zipfile.ZIP_DEFLATED else None
    while left:
        piece: bytes | memoryview = yield left
        if not piece:
            return None
        left -= len(piece)
        if member.compress_type == zipfile.ZIP_STORED:
            crc = zlib.crc32(piece, crc)
        elif inflate is not None:
            try:
                while piece:
                    crc = zlib.crc32(inflate.decompress(piece, MIB), crc)
                    piece = inflate.unconsumed_tail
            except zlib.error:
                crc, inflate = member.CRC ^ 1, None
    return crc if inflate is None else zlib.crc32(inflate.flush(), crc)


class TailTooShort(Exception):
    """The directory of a ZIP begins at ``start``, before the tail."""

    def __init__(self, start: int) -> None:
        super().__init__(start)
        self.start = start


class _Tail(io.BytesIO):
    """A file of which only the end is known."""

    def __init__(self, tail: bytes, size: int) -> None:
        super().__init__(tail)
        self._size, self._begin = size, size - len(tail)

    def tell(self) -> int:
        return self._begin + super().tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.tell(), io.SEEK_END: self._size}[whence]
        if at < 0:
            raise OSError("before the beginning")
        if at < self._begin:
            raise TailTooShort(at)
        super().seek(at - self._begin)
        return at


def read_directory(tail: bytes, size: int) -> list[zipfile.ZipInfo]:
    """The members of a ZIP of ``size`` bytes that ends in ``tail``.

    Raises TailTooShort, and zipfile.BadZipFile for a file that is no ZIP, or is cut short."""
    try:
        with zipfile.ZipFile(_Tail(tail, size)) as archive:
            return archive.infolist()
    except (struct.error, UnicodeDecodeError, ValueError, NotImplementedError) as error:
        raise zipfile.BadZipFile(str(error)) from error


# -- safetensors


def safetensors_check(size: int) -> Check:
    """Checks that the header of a safetensors file of ``size`` bytes describes all of it, to its last byte."""

    def reading() -> Reading[Finding]:
        problem = yield from _safetensors(size)
        return Finding("safetensors", _of(not problem), problem)

    return Reader(reading())


def _safetensors(size: int) -> Reading[str]:
    """What is wrong, or an empty text."""
    head = yield from _read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or not 0 < length <= min(SAFETENSORS_HEADER_BYTES_MAX, size - 8):
        return "the length of its safetensors header is wrong"
    raw = yield from _read(length)
    if len(raw) < length:
        return "the length of its safetensors header is wrong"
    try:
        ends = [entry["data_offsets"] for name, entry in json.loads(raw).items() if name != "__metadata__"]
        spans = sorted((int(start), int(end)) for start, end in ends)
    except (ValueError, KeyError, TypeError, AttributeError, ArithmeticError, RecursionError):
        return "its safetensors header cannot be read"
    at = 0
    for start, end in spans:
        if start != at or end < start:
            return "tensors of its safetensors header overlap or leave a gap"
        at = end
    if 8 + length + at != size:
        return f"its safetensors header tells of {8 + length + at:,} bytes, the file has {size:,}"
    return ""


def parse_sha256sums(raw: bytes) -> dict[str, str]:
    """Names with their sums, as sha256sum(1) writes them; other lines are left out."""
    found = {}
    for line in raw.decode("utf-8", "surrogateescape").splitlines():
        match = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)", line)
        if match is not None:
            found[match[2]] = match[1].lower()
    return found
