"""One file of the block cache: the blocks of one object version, and the index that says which of them are there.

    0            blocks at their own offsets, sparse
    data_end     size rounded up to 4096: header (64 bytes), then one little-endian XXH3-64 per block, 0 = absent

What always holds:

* the file is self-describing: nothing else needs to know of it, and its layout follows from its length alone;
* a block is written before its hash, or with it, so a block with a matching hash is whole. After a crash, in which the
  kernel may have kept the hash and lost the block, the hash does not match and the block counts as damaged: fetched
  again;
* the header holds a BLAKE2 digest of key and ETag, so that a file never answers for another version.

All calls block and are for worker threads. Reading and writing blocks at once from several threads is safe: two
writers of one block write the same bytes. ``users``, ``dead`` and ``accounted_bytes`` belong to
`cache_files.CacheFiles` and its lock.
"""

from __future__ import annotations

import hashlib
import os
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import xxhash

from lakefs_fuse.data import disk
from lakefs_fuse.data.version import BLOCK_BYTES, Version
from lakefs_fuse.store.protocol import Buffer

ALIGN_BYTES = 4096
HEADER_BYTES = 64
FORMAT = 1
_MAGIC = b"LAKEBLK\0"
_HEADER = struct.Struct("<8sIIQQ16s")
"""Magic, format, block bytes, object size, block count, digest of key and ETag; then XXH3-64 of these."""
_HASH_BYTES = 8


class DamagedFile(Exception):
    """Not a cache file of the version asked for: cut short, overwritten, of another format. For `cache_files`."""


def block_hash(data: Buffer) -> int:
    """Never 0, which means absent."""
    return xxhash.xxh3_64_intdigest(data) or 1


def name_digest(version: Version) -> bytes:
    """16 bytes that name the file of a version."""
    return xxhash.xxh3_128_digest(_identity(version))


def _identity(version: Version) -> bytes:
    return f"{version.key}\0{version.etag}".encode("utf-8", "surrogateescape")


def _check(version: Version) -> bytes:
    return hashlib.blake2b(_identity(version), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things are in the file of an object of ``size`` bytes."""

    size: int
    blocks: int
    data_end: int

    @classmethod
    def for_size(cls, size: int) -> Layout:
        return cls(size, -(-size // BLOCK_BYTES), -(-size // ALIGN_BYTES) * ALIGN_BYTES)

    @property
    def file_bytes(self) -> int:
        return self.data_end + HEADER_BYTES + self.blocks * _HASH_BYTES

    def hash_at(self, index: int) -> int:
        return self.data_end + HEADER_BYTES + index * _HASH_BYTES


def _header(layout: Layout, check: bytes) -> bytes:
    head = _HEADER.pack(_MAGIC, FORMAT, BLOCK_BYTES, layout.size, layout.blocks, check)
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(_HASH_BYTES, "little")


def read_layout(fd: int) -> tuple[Layout, bytes]:
    """Layout and version digest of a file of which only the descriptor is known. Raises DamagedFile, OSError."""
    length = os.fstat(fd).st_size
    # A file with n blocks is longer than (n - 1) * (BLOCK_BYTES + 8) + 64 and at most n * (BLOCK_BYTES + 8) + 64.
    blocks = -(-(length - HEADER_BYTES) // (BLOCK_BYTES + _HASH_BYTES))
    data_end = length - HEADER_BYTES - blocks * _HASH_BYTES
    if blocks < 1 or data_end < 1:
        raise DamagedFile("too short")
    head = os.pread(fd, HEADER_BYTES, data_end)
    body, tail = head[: _HEADER.size], head[_HEADER.size : _HEADER.size + _HASH_BYTES]
    if len(head) < HEADER_BYTES or xxhash.xxh3_64_intdigest(body).to_bytes(_HASH_BYTES, "little") != tail:
        raise DamagedFile("no header at the place that its length says")
    fields: tuple[bytes, int, int, int, int, bytes] = _HEADER.unpack(body)
    magic, form, block_bytes, size, _, check = fields
    layout = Layout.for_size(size)
    if magic != _MAGIC or form != FORMAT or block_bytes != BLOCK_BYTES or layout.file_bytes != length:
        raise DamagedFile("another format")
    return layout, check


def seal(fd: int, version: Version, hashes: Sequence[int]) -> None:
    """Make the file behind ``fd``, which holds the version's bytes from offset 0, a cache file. Raises OSError."""
    layout = Layout.for_size(version.size)
    os.ftruncate(fd, version.size)
    os.ftruncate(fd, layout.file_bytes)
    disk.pwrite_all(fd, struct.pack(f"<{layout.blocks}Q", *hashes), layout.hash_at(0))
    disk.pwrite_all(fd, _header(layout, _check(version)).ljust(HEADER_BYTES, b"\0"), layout.data_end)


def relabel(path: str, old: Version, new: Version) -> None:
    """Make a cache file of ``old``, with the hashes of its blocks, one of ``new``; its name is the caller's. After a
    crash between the two it answers for neither. Raises DamagedFile, OSError."""
    fd = os.open(path, os.O_RDWR)
    try:
        layout, check = read_layout(fd)
        if layout.size != old.size or check != _check(old):
            raise DamagedFile("another version")
        disk.pwrite_all(fd, _header(layout, _check(new)).ljust(HEADER_BYTES, b"\0"), layout.data_end)
    finally:
        os.close(fd)


def read_hashes(fd: int, layout: Layout, first: int, stop: int) -> tuple[int, ...]:
    """Of blocks [first, stop), which must exist; 0 = absent. Raises OSError."""
    raw = os.pread(fd, (stop - first) * _HASH_BYTES, layout.hash_at(first))
    whole = raw.ljust((stop - first) * _HASH_BYTES, b"\0")
    answer: tuple[int, ...] = struct.unpack(f"<{stop - first}Q", whole)
    return answer


def forget(fd: int, layout: Layout, first: int, stop: int) -> None:
    """Mark blocks [first, stop) absent. Raises OSError."""
    disk.pwrite_all(fd, bytes((stop - first) * _HASH_BYTES), layout.hash_at(first))


def punch(fd: int, layout: Layout, first: int, stop: int) -> bool:
    """Forget blocks [first, stop) and give their space back; False where the filesystem cannot. Raises OSError."""
    forget(fd, layout, first, stop)
    start = first * BLOCK_BYTES
    return disk.punch_hole(fd, start, min(stop * BLOCK_BYTES, layout.data_end) - start)


@contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


class CacheFile:
    """An open cache file; owns its descriptor."""

    __slots__ = ("accounted_bytes", "blank", "dead", "digest", "fd", "layout", "touched_s", "users", "version")

    def __init__(self, fd: int, layout: Layout, version: Version, digest: bytes, *, blank: bool = False) -> None:
        self.fd = fd
        self.layout = layout
        self.version = version
        self.digest = digest
        self.users = 0
        self.dead = False
        self.blank = blank
        """It is empty, header and all, and `write_all` is to come: for whoever reads it meanwhile no block is there."""
        stat = None if blank else os.fstat(fd)
        self.accounted_bytes = 0 if stat is None else disk.stat_allocated_bytes(stat)
        self.touched_s = time.time() if stat is None else stat.st_mtime

    @classmethod
    def open(cls, path: str, version: Version, digest: bytes) -> CacheFile | None:
        """None where there is no such file. Raises DamagedFile, OSError."""
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        with _closed_on_error(fd):
            layout, check = read_layout(fd)
            if layout.size != version.size or check != _check(version):
                raise DamagedFile("another version")
            return cls(fd, layout, version, digest)

    @classmethod
    def create(cls, path: str, version: Version, digest: bytes, *, blank: bool = False) -> CacheFile:
        """A new file without any block, or an empty one for `write_all`; its directory too. Raises OSError, then there
        is no file."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with _closed_on_error(fd):
            layout = Layout.for_size(version.size)
            if blank:
                return cls(fd, layout, version, digest, blank=True)
            try:
                os.ftruncate(fd, layout.file_bytes)
                disk.pwrite_all(fd, _header(layout, _check(version)).ljust(HEADER_BYTES, b"\0"), layout.data_end)
            except OSError:
                os.unlink(path)
                raise
            return cls(fd, layout, version, digest)

    def close(self) -> None:
        """The last use of the object."""
        os.close(self.fd)

    def hashes(self, first: int, stop: int) -> tuple[int, ...]:
        """Of blocks [first, stop), which must exist; 0 = absent. Raises OSError."""
        return read_hashes(self.fd, self.layout, first, stop)

    def read_block(self, index: int, expected: int) -> tuple[bytes | None, bool]:
        """The block if its hash is ``expected``; and whether it is damaged. Raises OSError."""
        start = index * BLOCK_BYTES
        data = os.pread(self.fd, min(BLOCK_BYTES, self.layout.size - start), start)
        if block_hash(data) == expected:
            return data, False
        # Evicted between reading its hash and its bytes: absent, not damaged.
        damaged = self.hashes(index, index + 1)[0] == expected
        if damaged:
            self.forget(index, index + 1)
        return None, damaged

    def write_block(self, index: int, data: Buffer) -> None:
        """Raises OSError, then the block is absent (or what it was)."""
        start = index * BLOCK_BYTES
        if len(data) != min(BLOCK_BYTES, self.layout.size - start):
            raise ValueError(f"block {index} of an object of {self.layout.size} bytes cannot have {len(data)}")
        disk.pwrite_all(self.fd, data, start)
        disk.pwrite_all(self.fd, block_hash(data).to_bytes(_HASH_BYTES, "little"), self.layout.hash_at(index))

    def write_all(self, blocks: Sequence[Buffer]) -> None:
        """All blocks of a small object, and all that belongs to them, with one call of the system where that goes well.
        Raises OSError, then the file is good for nothing."""
        layout = self.layout
        sizes = [min(BLOCK_BYTES, layout.size - start) for start in range(0, layout.size, BLOCK_BYTES)]
        if [len(data) for data in blocks] != sizes:
            raise ValueError(f"these are not all blocks of an object of {layout.size} bytes")
        hashes = struct.pack(f"<{layout.blocks}Q", *map(block_hash, blocks))
        header = _header(layout, _check(self.version)).ljust(HEADER_BYTES, b"\0")
        tail = bytes(layout.data_end - layout.size) + header + hashes
        if os.pwritev(self.fd, [*blocks, tail], 0) != layout.file_bytes:
            for index, data in enumerate(blocks):
                disk.pwrite_all(self.fd, data, index * BLOCK_BYTES)
            disk.pwrite_all(self.fd, tail, layout.size)
        self.blank = False

    def forget(self, first: int, stop: int) -> None:
        """Mark blocks [first, stop) absent. Raises OSError."""
        forget(self.fd, self.layout, first, stop)
