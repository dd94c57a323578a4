"""Bodies of uploads: streamed, never held whole, at the pace that was asked for; and their sums.

Used by one thread at a time.
"""

from __future__ import annotations

import hashlib
import os
import zlib

from lakefs_fuse.store.protocol import Body
from lakefs_fuse.store.rate_limit import Pace

PIECE_BYTES = 1 << 20


class BodyReader:
    """A rewindable reader of a body, with as much of a file object's interface as botocore and urllib3 use."""

    def __init__(self, body: Body, *, digest: bool, pace: Pace | None) -> None:
        self._body = body
        self._length = length_of(body)
        self._at = 0
        self._pace = pace
        self._piece_bytes = PIECE_BYTES if pace is None else pace.piece_bytes
        self._want_digest = digest
        self._md5 = hashlib.md5(usedforsecurity=False)

    def __len__(self) -> int:
        return self._length

    def read(self, size: int | None = -1) -> bytes:
        """The next piece when it may be sent: 1 MiB, or what the pace says, whatever was asked for.

        urllib3 sends whatever it is given but asks for 16 KiB at a time, which would be a thousand turns for the GIL
        where sixteen do.
        """
        if size == 0:
            return b""
        want = min(self._piece_bytes, self._length - self._at)
        if want <= 0:
            return b""
        if self._pace is not None:
            self._pace.wait(want)
        piece = self._read(want)
        self._at += want
        if self._want_digest:
            self._md5.update(piece)
        return piece

    def _read(self, want: int) -> bytes:
        body = self._body
        if isinstance(body, bytes):
            return body[self._at : self._at + want]
        piece = os.pread(body.fd, want, body.offset + self._at)
        return piece if len(piece) == want else piece + bytes(want - len(piece))

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As io.IOBase.seek; going back to the start begins the digest anew."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        if self._at == 0:
            self._md5 = hashlib.md5(usedforsecurity=False)
        return self._at

    def tell(self) -> int:
        """Position in the body."""
        return self._at

    def hexdigest(self) -> str:
        """MD5 of what was read since the start."""
        return self._md5.hexdigest()


Outgoing = bytes | BodyReader


def outgoing(body: Body, *, digest: bool, pace: Pace | None = None) -> Outgoing:
    """What botocore is given."""
    if isinstance(body, bytes) and (pace is None or not body):
        return body
    return BodyReader(body, digest=digest, pace=pace)


def md5_of_sent(body: Outgoing) -> str:
    """MD5 in hex of a body that was sent once, whole."""
    return body.hexdigest() if isinstance(body, BodyReader) else hashlib.md5(body, usedforsecurity=False).hexdigest()


def md5_of(body: Body) -> bytes:
    """Of a body that is yet to be sent: one pass over the bytes."""
    md5 = hashlib.md5(usedforsecurity=False)
    for piece in (body,) if isinstance(body, bytes) else body.pieces(PIECE_BYTES):
        md5.update(piece)
    return md5.digest()


def crc32_of(body: Body) -> int:
    """Of a body that is yet to be sent: one pass over the bytes, outside the GIL."""
    crc = 0
    for piece in (body,) if isinstance(body, bytes) else body.pieces(PIECE_BYTES):
        crc = zlib.crc32(piece, crc)
    return crc


def length_of(body: Body) -> int:
    """In bytes."""
    return len(body) if isinstance(body, bytes) else body.length
