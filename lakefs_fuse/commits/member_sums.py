"""The sums of the files of a pack that a fetched range of it holds whole.

The CRC-32 of a file stands in the header in front of its bytes (see `archive`), so any range of a pack brings the sums
of what lies in it whole. Where a header is, nobody says: what has exactly the form that `ArchiveBuilder` gives one is
taken for it. A file that is itself a pack therefore has its own files compared too.

What always holds: only the bytes of a header's file are doubted, and bytes that follow a header whose sum is right are
not searched for others, so the work is that of one pass over the range, and `WRONG_MAX` files at most. Pure functions,
called from any thread.
"""

from __future__ import annotations

import re
import struct
import zlib

from lakefs_fuse.commits.archive import FLAG_UTF8, LOCAL, LOCAL_MAGIC, MAX32
from lakefs_fuse.store.protocol import Buffer

WRONG_MAX = 16
"""Nothing is looked for behind so many files that are wrong, each of which cost a pass over its bytes."""

_MAGIC = re.compile(re.escape(LOCAL_MAGIC))
_OWNERS = struct.pack("<HHBB", 0x7875, 11, 1, 4)
_OWNERS_BYTES, _TIMES_BYTES, _ZIP64_BYTES = 15, 9, 20
_EXTRA_BYTES = frozenset(_OWNERS_BYTES + times + wide for times in (0, _TIMES_BYTES) for wide in (0, _ZIP64_BYTES))


def wrong_members(data: Buffer) -> list[tuple[int, int]]:
    """Begin and end in ``data``, a range of a pack, of files that are in it whole and do not have their CRC-32."""
    view = memoryview(data)
    wrong: list[tuple[int, int]] = []
    at = 0
    while len(wrong) < WRONG_MAX and (match := _MAGIC.search(view, at)) is not None:
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
    """Begin, size and CRC-32 of the file behind a header; None unless it is one of ours, and whole."""
    if at + LOCAL.size > len(view):
        return None
    _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes = LOCAL.unpack_from(view, at)
    begin = at + LOCAL.size + name_bytes + extra_bytes
    owners = begin - _OWNERS_BYTES
    if (flags, method, packed) != (FLAG_UTF8, 0, size) or size == MAX32 or extra_bytes not in _EXTRA_BYTES:
        return None
    if begin > len(view) or view[owners : owners + len(_OWNERS)] != _OWNERS:
        return None
    return begin, size, crc
