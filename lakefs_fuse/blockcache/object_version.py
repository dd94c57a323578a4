"""One immutable version of one object: what a handle is pinned to and what the block cache is keyed by."""

from __future__ import annotations

import msgspec

BLOCK_BYTES = 1 << 20
"""Unit of the block cache. The last block of an object is as short as the object's end makes it."""


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
