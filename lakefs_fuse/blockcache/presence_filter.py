"""A filter in memory of the versions that have a file in the block cache, so that a miss costs no disk access.

What always holds (*no false negatives*): a version with a file is never reported absent. One without may be reported
present, more often the more files were made since the directory was last scanned: 1 in 16 after a million. So is one
whose file was evicted: only the disk has the exact answer. The filter has a fixed size. Names of files are hashes
already, so their own bits are used. `add` is called under a lock, `may_have` from any thread.
"""

from __future__ import annotations

import os

import xxhash

BITS = 1 << 24
_BYTES = BITS // 8


class PresenceFilter:
    """A set of files that may be there; empty to begin with."""

    def __init__(self) -> None:
        self._bits = bytearray(_BYTES)

    def add(self, digest: bytes) -> None:
        """Add the file of this name, which exists or is about to be created."""
        place = _place(digest)
        self._bits[place >> 3] |= 1 << (place & 7)

    def may_have(self, digest: bytes) -> bool:
        """False: no file of this name is there."""
        place = _place(digest)
        return self._bits[place >> 3] >> (place & 7) & 1 == 1

    def save(self, path: str) -> int:
        """Write the filter to a file; returns a checksum for `load`. Raises OSError."""
        with open(path, "wb") as file:
            file.write(self._bits)
        return xxhash.xxh3_64_intdigest(self._bits)

    def load(self, path: str, saved: int) -> bool:
        """Read what `save` wrote, with checksum ``saved``; False, without a change, where it is missing or differs.
        The file is deleted, because it will soon be out of date. Raises OSError."""
        try:
            with open(path, "rb") as file:
                bits = file.read()
            os.unlink(path)
        except FileNotFoundError:
            return False
        if len(bits) != _BYTES or xxhash.xxh3_64_intdigest(bits) != saved:
            return False
        self._bits[:] = bits
        return True


def _place(digest: bytes) -> int:
    return int.from_bytes(digest[:8], "little") % BITS
