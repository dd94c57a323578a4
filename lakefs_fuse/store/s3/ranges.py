"""A range out of whatever a server answered to a ranged GET: the range with 206, with 200, or the whole object.

Pure functions, called from any worker thread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from lakefs_fuse.errors import Unavailable

PIECE_BYTES = 1 << 20

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def range_from_answer(answer: Mapping[str, Any], start: int, end: int) -> tuple[bytes, int]:
    """Bytes [start, end) cut at the object's end, and the object's size. ``answer`` is get_object's.

    Raises Unavailable where the body is not what the headers say; reads, and keeps, no more than is needed.
    """
    with answer["Body"] as stream:
        described = _CONTENT_RANGE.fullmatch(str(answer.get("ContentRange") or ""))
        length = int(answer["ContentLength"])
        if described is not None:
            first, last, size = (int(group) for group in described.groups())
            due = min(end, size) - start
            if first != start or last + 1 - first != due or length != due:
                raise Unavailable(f"bytes {first} to {last + 1} came where {start} to {min(end, size)} were due")
            data: bytes = stream.read()
        else:
            # Without Content-Range it is the whole object, and we stop reading where our range ends.
            size = length
            due = max(0, min(end, size) - start)
            _skip(stream, min(start, size))
            data = stream.read(due) if due else b""
    if len(data) != due:
        raise Unavailable(f"{len(data)} bytes came where {due} were due")
    return data, size


def _skip(stream: Any, count: int) -> None:
    while count > 0:
        piece = stream.read(min(PIECE_BYTES, count))
        if not piece:
            return
        count -= len(piece)
