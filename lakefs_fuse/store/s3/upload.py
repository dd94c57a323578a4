"""Uploads through boto3: bodies are streamed, never held whole, and checksums guard them on the way.

Over https TLS does. Over http a body says its CRC-32 (``x-amz-checksum-crc32``) and the store refuses what does not
match, before anyone sees it: 0.3 ms per MiB. A server is trusted to only where the probe saw it refuse a wrong one, for
an object and for a part (`Capabilities.checks_crc32`). With other servers the MD5 of a part, taken while it is
sent, is compared with the ETag that comes back (S3 defines it to be that, and every server tried keeps to it): 2 ms per
MiB, and a damaged part is sent again before anyone sees it. A whole object becomes visible immediately, so its MD5 is
sent first, in a Content-MD5 header, and the store refuses bytes that do not match. So is that of parts if ETags are not
MD5 sums (the probe finds out). The signature's own hash is no help: of the servers tried none compares it. Objects of
up to 1 MiB, which obstore sends, and all objects on a store that ignores Content-MD5, are compared with their ETags
only afterwards, and put again. The length is checked by HTTP itself.

sendfile(2) was tried for bodies, and costs more than reading and sending: 0.6 against 0.4 ms per MiB.

Called from any worker thread.
"""

from __future__ import annotations

import base64
import hashlib
import os
import zlib
from collections.abc import Mapping
from typing import Any, Protocol

from lakefs_fuse.errors import Unavailable
from lakefs_fuse.store.protocol import Body, Capabilities, length_of, md5_of, pieces_of, read_etag
from lakefs_fuse.store.rate_limit import RateLimiter
from lakefs_fuse.store.s3.errors import SumRefused

PIECE_BYTES = 1 << 20
"""Sent at a time: urllib3 asks for 16 KiB, which would be 64 turns for the GIL where one does."""


class BodyReader:
    """A rewindable reader of a body, with as much of a file object's interface as botocore and urllib3 use."""

    def __init__(self, body: Body, *, digest: bool, limiter: RateLimiter | None) -> None:
        self._body = body
        self._length = length_of(body)
        self._at = 0
        self._limiter = limiter
        self._piece_bytes = PIECE_BYTES if limiter is None else limiter.piece_bytes
        self._want_digest = digest
        self._md5 = hashlib.md5(usedforsecurity=False)

    def __len__(self) -> int:
        return self._length

    def read(self, size: int | None = -1) -> bytes:
        """The next piece, when it may be sent: PIECE_BYTES, or what the rate limiter says, whatever was asked for."""
        if size == 0:
            return b""
        want = min(self._piece_bytes, self._length - self._at)
        if want <= 0:
            return b""
        if self._limiter is not None:
            self._limiter.wait(want)
        at, body = self._at, self._body
        piece = body[at : at + want] if isinstance(body, bytes) else body.read(body.offset + at, want)
        self._at += want
        if self._want_digest:
            self._md5.update(piece)
        return piece

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As io.IOBase.seek; going back to the start resets the digest."""
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


def outgoing(body: Body, *, digest: bool, limiter: RateLimiter | None = None) -> Outgoing:
    """The body as botocore takes it."""
    if isinstance(body, bytes) and (limiter is None or not limiter.bytes_s_max or not body):
        return body
    return BodyReader(body, digest=digest, limiter=limiter)


def md5_of_sent(body: Outgoing) -> str:
    """MD5 in hex of a body that was sent once, whole."""
    return body.hexdigest() if isinstance(body, BodyReader) else hashlib.md5(body, usedforsecurity=False).hexdigest()


def crc32_of(body: Body) -> int:
    """CRC-32 of a body that is yet to be sent: one pass over the bytes, outside the GIL."""
    crc = 0
    for piece in pieces_of(body):
        crc = zlib.crc32(piece, crc)
    return crc


Answer = Mapping[str, Any]


def etag_of(answer: Answer) -> str:
    """The ETag of an answer, as `read_etag` returns it."""
    return read_etag(answer.get("ETag"))


def hides_md5(answer: Answer) -> bool:
    """Encrypted with a key of the customer's or of KMS, an object's ETag is no MD5 on any store."""
    return bool(answer.get("SSEKMSKeyId") or answer.get("SSECustomerAlgorithm"))


class Call(Protocol):
    """One boto3 operation on a key; raises StoreError."""

    def __call__(self, operation: str, what: str, key: str | None, **parameters: object) -> Answer: ...


class S3Sender:
    """Uploads to one bucket."""

    def __init__(self, call: Call, limiter: RateLimiter | None, *, encrypted: bool) -> None:
        self._call = call
        self._limiter = limiter
        self.encrypted = encrypted
        self._sends_sums = False
        self._md5_etags = False

    def adapt(self, capabilities: Capabilities) -> None:
        """Use the results of the probe; call it before any other thread sends."""
        self._md5_etags, self._sends_sums = capabilities.md5_etags, capabilities.checks_crc32

    @property
    def sends_sums(self) -> bool:
        """Uploads carry their CRC-32."""
        return self._sends_sums

    def use_sums(self, enabled: bool) -> None:
        """See `Sender.use_sums`."""
        self._sends_sums = enabled

    @property
    def compares_md5(self) -> bool:
        """Whether ETags are compared with the MD5 sums of what was sent."""
        return self._md5_etags and not self.encrypted

    def allows_fast_path(self, size: int) -> bool:
        """Whether the fast path may send a body of ``size`` bytes: it need not be cut for the rate limiter, and its
        ETag proves as much as a checksum."""
        limiter = self._limiter
        return (limiter is None or not limiter.bytes_s_max or size <= limiter.piece_bytes) and (
            self.compares_md5 or not self._sends_sums
        )

    def upload_parameters(self) -> dict[str, object]:
        """What an upload is begun with so that its parts may say their sums."""
        return {"ChecksumAlgorithm": "CRC32", "ChecksumType": "FULL_OBJECT"} if self._sends_sums else {}

    def send(
        self,
        operation: str,
        what: str,
        key: str,
        body: Body,
        parameters: Mapping[str, object],
        *,
        visible: bool,
        sums: bool | None = None,
    ) -> Answer:
        """A guarded request. ``visible``: the object is, as soon as it is stored; ``sums`` overrules `sends_sums`."""
        if self._sends_sums if sums is None else sums:
            return self._send_summed(operation, what, key, body, parameters, crc32_of(body))
        compares = self.compares_md5
        sent_md5: bytes | None = None
        if not self.encrypted and (visible or not compares):
            sent_md5 = md5_of(body)
            parameters = {**parameters, "ContentMD5": base64.b64encode(sent_md5).decode()}
        sent = outgoing(body, digest=compares and sent_md5 is None, limiter=self._limiter)
        answer = self._call(operation, what, key, Body=sent, **parameters)
        if compares and not hides_md5(answer):
            due = sent_md5.hex() if sent_md5 is not None else md5_of_sent(sent)
            if due != etag_of(answer):
                raise Unavailable(f"{what}: the received bytes are not those that were sent")
        return answer

    def accepts(self, key: str, body: bytes, crc32: int, upload_id: str = "") -> bool:
        """Whether the store takes an object, or part 1 of an upload, whose CRC-32 is said to be ``crc32``."""
        parameters: dict[str, object] = {"UploadId": upload_id, "PartNumber": 1} if upload_id else {}
        operation = "upload_part" if upload_id else "put_object"
        try:
            self._send_summed(operation, f"try sums on {key!r}", key, body, parameters, crc32)
        except SumRefused:
            return False
        return True

    def _send_summed(
        self, operation: str, what: str, key: str, body: Body, parameters: Mapping[str, object], crc32: int
    ) -> Answer:
        said = base64.b64encode(crc32.to_bytes(4, "big")).decode()
        sent = outgoing(body, digest=False, limiter=self._limiter)
        return self._call(operation, what, key, Body=sent, ChecksumCRC32=said, **parameters)
