"""File contents that say what they are, so that any mixture, prefix or stale piece is recognised.

A file is a sequence of segments. A segment has an id (unique in one run), says how long it is, and every byte of it
follows from the id: noise that begins at a place of its own, stamped every 64 KiB with the id and the number of the
stamp. `parse` answers the ids of a whole file, or says where it stops being one.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

KIB = 1 << 10
MIB = 1 << 20
_HEADER = struct.Struct("<8sQQQ")
_STAMP = struct.Struct("<4sQI")
_MAGIC = b"SEGMENT1"
SEGMENT_BYTES_MIN = _HEADER.size
_NOISE_BYTES = 2 * MIB
_STRIDE_BYTES = 64 * KIB

Ids = tuple[int, ...]
"""The segments of one version of a file, in order."""


class Damaged(Exception):
    """These bytes are not a sequence of whole segments; the message says where and how."""


@lru_cache(1)
def _noise() -> bytes:
    once = hashlib.shake_128(b"crash test").digest(_NOISE_BYTES)
    return once + once


@lru_cache(64)
def _small(identity: int, length: int) -> bytes:
    return _make(identity, length)


def segment(identity: int, length: int) -> bytes:
    """The bytes of a segment, ``length`` in all (at least SEGMENT_BYTES_MIN)."""
    return _small(identity, length) if length <= 512 * KIB else _make(identity, length)


def _make(identity: int, length: int) -> bytes:
    start = identity * 7919 * 61 % _NOISE_BYTES
    once = memoryview(_noise())[start : start + _NOISE_BYTES]
    made = bytearray(once) * (length // _NOISE_BYTES + 1) if length > _NOISE_BYTES else bytearray(once[:length])
    del made[length:]
    for number, at in enumerate(range(_STRIDE_BYTES, length - _STAMP.size, _STRIDE_BYTES)):
        _STAMP.pack_into(made, at, b"STMP", identity, number)
    _HEADER.pack_into(made, 0, _MAGIC, identity, length, identity ^ length)
    return bytes(made)


def parse(data: bytes | memoryview) -> Ids:
    """The ids of the segments that these bytes are. Raises Damaged."""
    view = memoryview(data)
    found: list[int] = []
    at = 0
    while at < len(view):
        if len(view) - at < SEGMENT_BYTES_MIN:
            raise Damaged(f"{len(view) - at} bytes after {found or 'nothing'} are no segment")
        magic, identity, length, check = _HEADER.unpack_from(view, at)
        if magic != _MAGIC or check != identity ^ length or length < SEGMENT_BYTES_MIN:
            raise Damaged(f"no segment begins at {at} of {len(view)}, after {found or 'nothing'}")
        piece = view[at : at + length]
        if len(piece) < length:
            raise Damaged(f"segment {identity} at {at}: {len(piece)} of {length} bytes, after {found or 'nothing'}")
        if piece != segment(identity, length):
            raise Damaged(f"segment {identity} at {at} of {len(view)}, {_difference(piece, identity, length)}")
        found.append(identity)
        at += length
    return tuple(found)


def _difference(piece: memoryview, identity: int, length: int) -> str:
    wanted = segment(identity, length)
    wrong = [at for at in range(0, length, 512) if piece[at : at + 512] != wanted[at : at + 512]]
    zero = sum(not any(piece[at : at + 512]) for at in wrong)
    first, last = wrong[0], wrong[-1]
    return f"{length} bytes: {len(wrong)} blocks of 512 differ, from {first} to {last}; {zero} of them zero"
