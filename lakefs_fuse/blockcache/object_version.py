"""One immutable version of one object: handles are pinned to it, and it is the key of the block cache."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

BLOCK_BYTES = 1 << 20
"""Unit of the block cache. The last block of an object ends at the object's end."""


class Version(msgspec.Struct, frozen=True):
    """``size`` in bytes. Two versions with one key and ETag are the same bytes."""

    key: str
    etag: str
    size: int

    @property
    def blocks(self) -> int:
        """How many blocks the object has; none where it is empty."""
        return -(-self.size // BLOCK_BYTES)


class Extent(msgspec.Struct, frozen=True):
    """Bytes [offset, offset + size) of a version: all of a plain object, or a file in a pack."""

    version: Version
    offset: int
    size: int

    @classmethod
    def whole(cls, version: Version) -> Extent:
        return cls(version, 0, version.size)

    @property
    def is_whole(self) -> bool:
        return not self.offset and self.size == self.version.size

    @property
    def within(self) -> tuple[int, int] | None:
        """Where the bytes begin and end in the object; None where they are all of it."""
        return None if self.is_whole else (self.offset, self.offset + self.size)

    @property
    def block_set(self) -> BlockSet:
        """The blocks that have some of the bytes."""
        return block_range(self.offset // BLOCK_BYTES, -(-(self.offset + self.size) // BLOCK_BYTES)) if self.size else 0

    def bytes_in(self, blocks: BlockSet) -> int:
        """How many of the bytes these blocks have."""
        missing, end = self.block_set & ~blocks, self.offset + self.size
        if not missing:
            return self.size
        absent = missing.bit_count() * BLOCK_BYTES
        if missing >> (self.offset // BLOCK_BYTES) & 1:
            absent -= self.offset % BLOCK_BYTES
        if missing >> ((end - 1) // BLOCK_BYTES) & 1:
            absent -= -end % BLOCK_BYTES
        return self.size - absent


BlockSet: TypeAlias = int
"""Blocks of one version as the bits of a number: block 0 is the lowest."""


def block_range(first: int, stop: int) -> BlockSet:
    """Blocks [first, stop)."""
    return (1 << stop) - (1 << first)


def set_bytes(version: Version, blocks: BlockSet) -> int:
    """Bytes of these blocks of a version; the last block may be short."""
    last = version.blocks - 1
    short = last >= 0 and blocks >> last & 1
    return blocks.bit_count() * BLOCK_BYTES - (version.blocks * BLOCK_BYTES - version.size if short else 0)
