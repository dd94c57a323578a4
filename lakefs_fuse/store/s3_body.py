"""Bodies of uploads: streamed from a file, never held whole, and what guards them on the way.

What guards the bytes: over https TLS does. Over http the MD5 of a part, taken while it is sent, is compared with the
ETag that the store answers (S3 defines it to be that, and every server tried keeps to it): 2 ms per MiB outside the
GIL, no second pass, and a damaged part is sent again before anyone sees it. A whole object is visible at once, so its
MD5 goes ahead in a Content-MD5 header, for the store to refuse what does not match; so do parts where ETags are not MD5
sums (the probe finds out). The signature's own hash is no help: of the servers tried none compares it. Objects of up to
1 MiB are compared only afterwards, and put again. The length is checked by HTTP itself.

Used by one thread at a time.
"""

from __future__ import annotations

import hashlib
import os

from lakefs_fuse.store.protocol import Body

PIECE_BYTES = 1 << 20


class SliceReader:
    """A rewindable reader of a slice, with as much of a file object's interface as botocore and urllib3 use."""

    def __init__(self, fd: int, offset: int, length: int, *, digest: bool) -> None:
        self._fd = fd
        self._offset = offset
        self._length = length
        self._at = 0
        self._want_digest = digest
        self._md5 = hashlib.md5(usedforsecurity=False)

    def __len__(self) -> int:
        return self._length

    def read(self, size: int | None = -1) -> bytes:
        """The next piece: at most 1 MiB, and at least that where fewer bytes were asked for.

        urllib3 sends whatever it is given but asks for 16 KiB at a time, which would be a thousand turns for the GIL
        where sixteen do.
        """
        if size == 0:
            return b""
        want = min(PIECE_BYTES, self._length - self._at)
        if want <= 0:
            return b""
        piece = os.pread(self._fd, want, self._offset + self._at)
        if len(piece) < want:
            piece += bytes(want - len(piece))
        self._at += want
        if self._want_digest:
            self._md5.update(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As io.IOBase.seek; going back to the start begins the digest anew."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        if self._at == 0:
            self._md5 = hashlib.md5(usedforsecurity=False)
        return self._at

    def tell(self) -> int:
        """Position in the slice."""
        return self._at

    def hexdigest(self) -> str:
        """MD5 of what was read since the start."""
        return self._md5.hexdigest()


Outgoing = bytes | SliceReader


def outgoing(body: Body, *, digest: bool) -> Outgoing:
    """What botocore is given."""
    if isinstance(body, bytes):
        return body
    return SliceReader(body.fd, body.offset, body.length, digest=digest)


def md5_of_sent(body: Outgoing) -> str:
    """MD5 in hex of a body that was sent once, whole."""
    return body.hexdigest() if isinstance(body, SliceReader) else hashlib.md5(body, usedforsecurity=False).hexdigest()


def md5_of(body: Body) -> bytes:
    """Of a body that is yet to be sent: one pass over the bytes."""
    md5 = hashlib.md5(usedforsecurity=False)
    for piece in (body,) if isinstance(body, bytes) else body.pieces(PIECE_BYTES):
        md5.update(piece)
    return md5.digest()


def length_of(body: Body) -> int:
    """In bytes."""
    return len(body) if isinstance(body, bytes) else body.length
