"""One file of the block cache: the blocks of one object version, and the index of the cached ones.

    0            blocks at their own offsets, sparse
    data_end     size rounded up to 4096: header (64 bytes), then one little-endian XXH3-64 per block, 0 = absent
                 then, in the file of an object of several blocks (format 2), one for each 32 KiB of them, 0 = unknown

What always holds:

* the file is self-describing: there is no record of it elsewhere, and its layout follows from its length alone;
* a block is written before its hash, or with it, so a block with a matching hash is whole. After a crash, in which the
  kernel may have kept the hash and lost the block, the hash does not match and the block counts as damaged: fetched
  again. The same holds for a piece of 32 KiB, which is read if only a small part of a block is requested; if its hash
  is not known or does not match, the block's hash decides;
* the header holds a BLAKE2 digest of key and ETag, so that a file never answers for another version.

All calls block and are for worker threads, except the reads that `BlockCache` names "now". Reading and writing blocks
concurrently from several threads is safe: two writers of one block write the same bytes. ``version``, ``digest``,
``users``, ``dead`` and ``accounted_bytes`` belong to `cache_directory.CacheDirectory` and its lock.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import xxhash

from lakefs_fuse.blockcache.object_version import BLOCK_BYTES, BlockSet, Version
from lakefs_fuse.environment import local_disk as disk
from lakefs_fuse.store.protocol import Buffer

ALIGN_BYTES = 4096
HEADER_BYTES = 64
PIECE_BYTES = 32 << 10
_PIECES = BLOCK_BYTES // PIECE_BYTES
BLOCKS_ONLY, WITH_PIECES = 1, 2
"""Formats of the file."""
_MAGIC = b"LAKEBLK\0"
_HEADER = struct.Struct("<8sIIQQ16s")
"""Magic, format, block bytes, object size, block count, digest of key and ETag; then XXH3-64 of these."""
_HASH_BYTES = 8
_UNKNOWN = bytes(_HASH_BYTES)


class DamagedFile(Exception):
    """The file is not a cache file of the version: truncated, overwritten, or of another format."""


def block_hash(data: Buffer) -> int:
    """XXH3-64 of a block; never 0, which means absent."""
    return xxhash.xxh3_64_intdigest(data) or 1


def piece_hashes(data: Buffer) -> bytes:
    """Hashes of adjacent pieces, in the byte order of the file; the last piece may be short."""
    view = memoryview(data)
    hashes = [block_hash(view[at : at + PIECE_BYTES]) for at in range(0, len(view), PIECE_BYTES)]
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def name_digest(version: Version) -> bytes:
    """16 bytes that name the file of a version."""
    return xxhash.xxh3_128_digest(_identity(version))


def _identity(version: Version) -> bytes:
    return f"{version.key}\0{version.etag}".encode("utf-8", "surrogateescape")


def _check(version: Version) -> bytes:
    return hashlib.blake2b(_identity(version), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Layout:
    """The layout of the file of an object of ``size`` bytes."""

    size: int
    blocks: int
    data_end: int
    form: int

    @classmethod
    def for_size(cls, size: int, form: int | None = None) -> Layout:
        """The layout in format ``form``, or in that of new files of that size."""
        blocks = -(-size // BLOCK_BYTES)
        form = form or (BLOCKS_ONLY if blocks <= 1 else WITH_PIECES)
        return cls(size, blocks, -(-size // ALIGN_BYTES) * ALIGN_BYTES, form)

    @property
    def has_pieces(self) -> bool:
        return self.form == WITH_PIECES

    @property
    def index_bytes(self) -> int:
        """All hashes together."""
        return self.blocks * _index_bytes(self.form)

    @property
    def file_bytes(self) -> int:
        return self.data_end + HEADER_BYTES + self.index_bytes

    @property
    def disk_bytes_max(self) -> int:
        """Disk space of the file with all blocks."""
        return -(-self.file_bytes // ALIGN_BYTES) * ALIGN_BYTES

    def hash_at(self, index: int) -> int:
        return self.data_end + HEADER_BYTES + index * _HASH_BYTES

    def piece_hash_at(self, piece: int) -> int:
        """Offset of the hash of a piece, counted from the beginning of the object."""
        return self.hash_at(self.blocks + piece)


def _index_bytes(form: int) -> int:
    """Bytes of the hashes of one block, its pieces included."""
    return _HASH_BYTES * (1 + _PIECES) if form == WITH_PIECES else _HASH_BYTES


def _header(layout: Layout, check: bytes) -> bytes:
    head = _HEADER.pack(_MAGIC, layout.form, BLOCK_BYTES, layout.size, layout.blocks, check)
    return head + xxhash.xxh3_64_intdigest(head).to_bytes(_HASH_BYTES, "little")


def read_layout(fd: int) -> tuple[Layout, bytes]:
    """Layout and version digest of an open file, from its length and header. Raises DamagedFile, OSError."""
    length = os.fstat(fd).st_size
    small = length <= HEADER_BYTES + BLOCK_BYTES + _HASH_BYTES
    for form in (BLOCKS_ONLY, WITH_PIECES) if small else (WITH_PIECES, BLOCKS_ONLY):
        found = _read_layout(fd, length, form)
        if found is not None:
            return found
    raise DamagedFile("no header at the offset that its length implies")


def _read_layout(fd: int, length: int, form: int) -> tuple[Layout, bytes] | None:
    """As `read_layout`; None where the file is not of that format."""
    # With n blocks, and i bytes of hashes for each, it is longer than (n - 1) * BLOCK_BYTES + n * i + 64, and at most
    # n * (BLOCK_BYTES + i) + 64.
    blocks = -(-(length - HEADER_BYTES) // (BLOCK_BYTES + _index_bytes(form)))
    data_end = length - HEADER_BYTES - blocks * _index_bytes(form)
    if blocks < 1 or data_end < 1:
        return None
    head = os.pread(fd, HEADER_BYTES, data_end)
    body, tail = head[: _HEADER.size], head[_HEADER.size : _HEADER.size + _HASH_BYTES]
    if len(head) < HEADER_BYTES or xxhash.xxh3_64_intdigest(body).to_bytes(_HASH_BYTES, "little") != tail:
        return None
    fields: tuple[bytes, int, int, int, int, bytes] = _HEADER.unpack(body)
    magic, named, block_bytes, size, _, check = fields
    layout = Layout.for_size(size, form)
    if magic != _MAGIC or named != form or block_bytes != BLOCK_BYTES or layout.file_bytes != length:
        return None
    return layout, check


def seal(fd: int, version: Version, hashes: Sequence[int]) -> None:
    """Turn an open file with the version's bytes from offset 0 into a cache file. Raises OSError."""
    layout = Layout.for_size(version.size)
    os.ftruncate(fd, version.size)
    os.ftruncate(fd, layout.file_bytes)
    disk.pwrite_all(fd, struct.pack(f"<{layout.blocks}Q", *hashes), layout.hash_at(0))
    if layout.has_pieces:  # not known yet, but counted
        os.posix_fallocate(fd, layout.piece_hash_at(0), layout.blocks * _PIECES * _HASH_BYTES)
    disk.pwrite_all(fd, _header(layout, _check(version)).ljust(HEADER_BYTES, b"\0"), layout.data_end)


def _layout_of(fd: int, version: Version) -> Layout:
    """As `read_layout`, of a file of this version. Raises DamagedFile, OSError."""
    layout, check = read_layout(fd)
    if layout.size != version.size or check != _check(version):
        raise DamagedFile("another version")
    return layout


def relabel(path: str, old: Version, new: Version) -> None:
    """Rewrite the header of a cache file of ``old`` for ``new``, the same bytes; the caller renames the file. After a
    crash between the two it is valid for neither. Raises DamagedFile, OSError."""
    fd = os.open(path, os.O_RDWR)
    try:
        layout = _layout_of(fd, old)
        disk.pwrite_all(fd, _header(layout, _check(new)).ljust(HEADER_BYTES, b"\0"), layout.data_end)
    finally:
        os.close(fd)


def read_hashes(fd: int, layout: Layout, first: int, stop: int) -> tuple[int, ...]:
    """Of blocks [first, stop), which must exist; 0 = absent. Raises OSError."""
    raw = os.pread(fd, (stop - first) * _HASH_BYTES, layout.hash_at(first))
    whole = raw.ljust((stop - first) * _HASH_BYTES, b"\0")
    answer: tuple[int, ...] = struct.unpack(f"<{stop - first}Q", whole)
    return answer


def _forget_pieces(fd: int, layout: Layout, first: int, stop: int) -> None:
    """Erase the hashes of pieces. A failure does no harm: a hash that stays does not match, or its bytes are right."""
    if layout.has_pieces:
        with suppress(OSError):
            disk.pwrite_all(fd, bytes((stop - first) * _PIECES * _HASH_BYTES), layout.piece_hash_at(first * _PIECES))


def punch(fd: int, layout: Layout, first: int, stop: int) -> bool:
    """Forget blocks [first, stop) and free their space; False if the filesystem cannot. Raises OSError."""
    disk.pwrite_all(fd, bytes((stop - first) * _HASH_BYTES), layout.hash_at(first))
    start = first * BLOCK_BYTES
    punched = disk.punch_hole(fd, start, min(stop * BLOCK_BYTES, layout.data_end) - start)
    _forget_pieces(fd, layout, first, stop)  # the last step: it may allocate space for blocks never cached
    return punched


@contextmanager
def _closed_on_error(fd: int) -> Iterator[None]:
    try:
        yield
    except BaseException:
        os.close(fd)
        raise


class CacheFile:
    """An open cache file; owns its descriptor."""

    __slots__ = ("accounted_bytes", "dead", "digest", "fd", "layout", "touched_s", "users", "version")

    def __init__(
        self,
        fd: int,
        layout: Layout,
        version: Version,
        digest: bytes,
        *,
        new_s: float | None = None,
    ) -> None:
        """``new_s`` is the time, by the wall clock in seconds, at which the file was just created."""
        self.fd = fd
        self.layout = layout
        self.version = version
        self.digest = digest
        self.users = 0
        self.dead = False
        self.accounted_bytes = disk.allocated_bytes(fd)
        self.touched_s = os.fstat(fd).st_mtime if new_s is None else new_s

    @classmethod
    def open(cls, path: str, version: Version, digest: bytes) -> CacheFile | None:
        """Open the file; None if it does not exist. Raises DamagedFile, OSError."""
        try:
            fd = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            return None
        with _closed_on_error(fd):
            return cls(fd, _layout_of(fd, version), version, digest)

    @classmethod
    def open_quietly(cls, path: str, version: Version) -> CacheFile | None:
        """As `open`; a damaged file is none. Raises OSError."""
        try:
            return cls.open(path, version, b"")
        except DamagedFile:
            return None

    @classmethod
    def create(cls, path: str, version: Version, digest: bytes, now_s: float) -> CacheFile:
        """A new file without any block, and its directory. Raises OSError; then there is no file."""
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileNotFoundError:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with _closed_on_error(fd):
            layout = Layout.for_size(version.size)
            try:
                os.ftruncate(fd, layout.file_bytes)
                disk.pwrite_all(fd, _header(layout, _check(version)).ljust(HEADER_BYTES, b"\0"), layout.data_end)
            except OSError:
                os.unlink(path)
                raise
            return cls(fd, layout, version, digest, new_s=now_s)

    # -- bookkeeping, called by `CacheDirectory` under its lock

    @property
    def is_idle(self) -> bool:
        return not self.users

    def begin_use(self) -> None:
        """Keep the descriptor open until as many calls of `end_use`."""
        self.users += 1

    def end_use(self) -> bool:
        """Undo one `begin_use`; returns whether the caller must close the descriptor of a removed file."""
        self.users -= 1
        return self.dead and not self.users

    def mark_removed(self) -> None:
        """Record that the file has no name any more, so that nothing written to it is counted."""
        self.dead = True

    def rename(self, version: Version, digest: bytes) -> None:
        """Record that the file is now that of another version, which has the same bytes."""
        self.version, self.digest = version, digest

    def set_allocated(self, allocated_bytes: int) -> int:
        """Count the file's disk space; returns its growth since the last count."""
        change, self.accounted_bytes = allocated_bytes - self.accounted_bytes, allocated_bytes
        return change

    def touch(self, now_s: float) -> None:
        """Record a use of the file now. Raises OSError."""
        self.touched_s = now_s
        os.utime(self.fd, (now_s, now_s))

    # -- blocks

    def close(self) -> None:
        """Close the descriptor. Nothing may be called after."""
        os.close(self.fd)

    def hashes(self, first: int, stop: int) -> tuple[int, ...]:
        """Of blocks [first, stop), which must exist; 0 = absent. Raises OSError."""
        return read_hashes(self.fd, self.layout, first, stop)

    def block_set(self) -> BlockSet:
        """The cached blocks. Raises OSError."""
        digits = "".join("1" if expected else "0" for expected in reversed(self.hashes(0, self.layout.blocks)))
        return int(digits, 2)

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

    def read_part(self, start: int, end: int, *, wait: bool = True) -> memoryview | None:
        """Bytes [start, end), which must exist, verified piece by piece; None if only whole blocks can be verified.
        Raises OSError; without ``wait`` BlockingIOError if the bytes are not in the page cache.
        """
        first, stop = start // PIECE_BYTES, -(-end // PIECE_BYTES)
        if not self.layout.has_pieces:
            return None
        pread = os.pread if wait else disk.pread_now
        expected = pread(self.fd, (stop - first) * _HASH_BYTES, self.layout.piece_hash_at(first))
        if any(expected[at : at + _HASH_BYTES] == _UNKNOWN for at in range(0, len(expected), _HASH_BYTES)):
            return None
        begin = first * PIECE_BYTES
        data = memoryview(pread(self.fd, min(stop * PIECE_BYTES, self.layout.size) - begin, begin))
        whole = len(expected) == (stop - first) * _HASH_BYTES and len(data) >= end - begin
        return data[start - begin : end - begin] if whole and piece_hashes(data) == expected else None

    def write_piece_hashes(self, index: int, data: Buffer) -> None:
        """Keep the hashes of a verified block's pieces, so that parts of it can be read alone."""
        if not self.layout.has_pieces:
            return
        hashes, at = piece_hashes(data), self.layout.piece_hash_at(index * _PIECES)
        with suppress(OSError):  # nothing is lost
            if os.pread(self.fd, len(hashes), at) != hashes:
                disk.pwrite_all(self.fd, hashes, at)

    def write_block(self, index: int, data: Buffer) -> None:
        """Write a block and its hashes. Raises OSError; then the block is absent, or unchanged."""
        start = index * BLOCK_BYTES
        if len(data) != min(BLOCK_BYTES, self.layout.size - start):
            raise ValueError(f"block {index} of an object of {self.layout.size} bytes cannot have {len(data)}")
        disk.pwrite_all(self.fd, data, start)
        if self.layout.has_pieces:
            disk.pwrite_all(self.fd, piece_hashes(data), self.layout.piece_hash_at(index * _PIECES))
        disk.pwrite_all(self.fd, block_hash(data).to_bytes(_HASH_BYTES, "little"), self.layout.hash_at(index))

    def forget(self, first: int, stop: int) -> None:
        """Mark blocks [first, stop) absent. Raises OSError."""
        disk.pwrite_all(self.fd, bytes((stop - first) * _HASH_BYTES), self.layout.hash_at(first))
        _forget_pieces(self.fd, self.layout, first, stop)


_ZEROS_HASH = block_hash(bytes(BLOCK_BYTES))


def hash_blocks(fd: int, start: int, end: int, size: int) -> dict[int, int]:
    """Hash of every cache block that [start, end) of a file of ``size`` bytes holds whole, if it begins with one."""
    hashes: dict[int, int] = {}
    if start % BLOCK_BYTES:
        return hashes
    for at in range(start, end, BLOCK_BYTES):
        length = min(BLOCK_BYTES, end - at)
        if length < BLOCK_BYTES and end < size:
            break
        data = disk.pread_all(fd, length, at)
        hashes[at // BLOCK_BYTES] = block_hash(data + bytes(length - len(data)))
    return hashes


def hash_zeros(start: int, end: int, size: int) -> dict[int, int]:
    """The result of `hash_blocks` if [start, end) of a file of ``size`` bytes are zeros."""
    if start % BLOCK_BYTES:
        return {}
    hashes = dict.fromkeys(range(start // BLOCK_BYTES, end // BLOCK_BYTES), _ZEROS_HASH)
    if end % BLOCK_BYTES and end >= size:
        hashes[end // BLOCK_BYTES] = block_hash(bytes(end % BLOCK_BYTES))
    return hashes
