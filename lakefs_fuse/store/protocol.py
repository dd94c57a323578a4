"""The interface of object stores, as blocking calls: the contract that `tests/store` runs against each of them.

What always holds:

* keys are ``str`` relative to the source's prefix, never empty; ETags are opaque, without quotes, and of no more than
  `ETAG_CHARS_MAX` printable ASCII characters (`read_etag`);
* a version is (key, ETag); ``get`` returns bytes of exactly the version asked for or raises PreconditionFailed;
* a write is visible whole or not at all, and after it returns every later call sees it;
* one call is one attempt (of LIST: one page): retrying, counting and deadlines belong to `client.StoreClient`;
* errors are the `StoreError` kinds of `lakefs_fuse.errors` only, and FileError(EIO) for a body that cannot be read.

`NetworkStore`, `CacheableStore` and `DirectoryStore` are optional. Implementations are called from worker threads,
many at once, and keep no state that a crash could lose.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import msgspec

from lakefs_fuse.environment.local_disk import pread_all
from lakefs_fuse.errors import FileError, StoreError

Buffer = bytes | bytearray | memoryview

PARTS_MAX = 10_000
PART_BYTES_MIN = 5 * 1024 * 1024
"""Smallest part but the last; S3's limits, https://docs.aws.amazon.com/AmazonS3/latest/userguide/qfacts.html."""
ETAG_CHARS_MAX = 255
"""What rows and commits of a lake have room for. S3's have up to 38."""
_ETAG = re.compile(rf"[ -~]{{0,{ETAG_CHARS_MAX}}}")


@dataclass(frozen=True, slots=True)
class FileSlice:
    """Bytes ``offset`` to ``offset + length`` of an open file, read with pread; beyond its end are zeros.

    The maker of the slice owns the descriptor, which must outlive the call that the slice is passed to.
    """

    fd: int
    offset: int
    length: int

    def data(self) -> Iterator[FileSlice]:
        """The ranges that are not holes of the file, in order; all of it where its filesystem cannot tell."""
        at, end = self.offset, self.offset + self.length
        while at < end:
            try:
                begin = os.lseek(self.fd, at, os.SEEK_DATA)
                stop = min(os.lseek(self.fd, begin, os.SEEK_HOLE), end)
            except OSError as error:
                if error.errno == errno.ENXIO:  # a hole up to the end
                    return
                begin, stop = at, end
            if begin >= end:
                return
            yield FileSlice(self.fd, begin, stop - begin)
            at = stop

    def pieces(self, piece_bytes_max: int = 1 << 20) -> Iterator[bytes]:
        """The bytes in order, in pieces that bound memory."""
        at, end = self.offset, self.offset + self.length
        while at < end:
            piece = self.read(at, min(piece_bytes_max, end - at))
            at += len(piece)
            yield piece

    def read(self, at: int, count: int) -> bytes:
        """Bytes from offset ``at`` of the file, in the slice or not; zeros beyond the end. Raises FileError(EIO): the
        disk of this node failed, and no store."""
        try:
            piece = pread_all(self.fd, count, at)
        except OSError as error:
            raise FileError(errno.EIO, f"the file on this node's disk cannot be read: {error.strerror}") from error
        return piece if len(piece) == count else piece + bytes(count - len(piece))


Body = bytes | FileSlice


def length_of(body: Body) -> int:
    """Length of a body in bytes."""
    return len(body) if isinstance(body, bytes) else body.length


def pieces_of(body: Body) -> Iterable[bytes]:
    """The bytes of a body in order; those of a slice in pieces that bound memory."""
    return (body,) if isinstance(body, bytes) else body.pieces()


def md5_of(body: Body) -> bytes:
    """MD5 of a body: one pass over the bytes."""
    md5 = hashlib.md5(usedforsecurity=False)
    for piece in pieces_of(body):
        md5.update(piece)
    return md5.digest()


def read_etag(text: str | None) -> str:
    """The ETag of an answer, without quotes; empty where there is none. Raises StoreError for one beyond the limits."""
    etag = (text or "").strip('"')
    if not _ETAG.fullmatch(etag):
        raise StoreError(
            f"the store answered the ETag {etag[:40]!r}, of {len(etag)} characters: use a store whose ETags have "
            f"{ETAG_CHARS_MAX} characters at most, of printable ASCII"
        )
    return etag


class ObjectMeta(msgspec.Struct, frozen=True, gc=False):
    """One object as LIST or HEAD shows it, with the same date in both: ``mtime_ns`` is in whole seconds, as the
    Last-Modified of a HEAD is. ``metadata`` is None where not asked for (LIST), else user metadata."""

    key: str
    size: int
    etag: str
    mtime_ns: int
    metadata: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Answer of ``get``: ``data`` is bytes [start, min(end, size)); ``meta.metadata`` may be None."""

    data: Buffer
    meta: ObjectMeta


@dataclass(frozen=True, slots=True)
class ListPage:
    """One page in the store's order. ``prefixes`` end in the delimiter. ``next_token`` is None on the last page."""

    objects: Sequence[ObjectMeta]
    prefixes: Sequence[str]
    next_token: str | None


@dataclass(frozen=True, slots=True)
class PartRef:
    """A part that was uploaded: ``number`` from 1, ``etag`` as the store answered, ``size`` in bytes."""

    number: int
    etag: str
    size: int


@dataclass(frozen=True, slots=True)
class UploadRef:
    """A multipart upload that was neither completed nor aborted."""

    key: str
    upload_id: str
    started_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Abilities of a store, as the probe found them. A mount refuses a store without ``multipart`` and adapts to the
    rest."""

    name: str
    ranges: bool = True
    """Ranged GETs are answered with exactly the range (whatever the status code says)."""
    partial_status: bool = True
    """… and with 206, which obstore insists on."""
    get_if_match: bool = True
    put_if_absent: bool = True
    complete_if_absent: bool = True
    """Completing an upload honours ``If-None-Match: *``; else the store client asks for the key before and after."""
    put_if_match: bool = False
    complete_if_match: bool = False
    delete_if_match: bool = False
    """PUT, completion and DELETE honour ``If-Match``. False by default, until the probe has verified it."""
    delete_many: bool = True
    """DeleteObjects deletes; else keys are deleted one by one."""
    dates: bool = True
    """Answers say when they were made (``Date``)."""
    multipart: bool = True
    part_copy: bool = True
    parts_replaceable: bool = True
    """A part may be uploaded again or left out, and numbers may have gaps; else only 1, 2, 3 … of final bytes, all of
    them completed (an upload that needs more is aborted and another begun)."""
    sorted_listing: bool = True
    """LIST answers keys in the order of their UTF-8 bytes, prefixes included."""
    lists_markers: bool = True
    """An object ``dir/`` is seen as prefix ``dir/`` when its parent is listed."""
    metadata: bool = True
    """User metadata comes back with HEAD."""
    copy_if_match: bool = True
    """Copies honour a condition on their source; else the store client compares before and after."""
    complete_etag: bool = True
    """Completing an upload answers the ETag that HEAD and LIST show; else the store client asks for it."""
    md5_etags: bool = True
    """The ETag of a PUT and of a part is the MD5 of its bytes."""
    checks_crc32: bool = False
    """An object or a part that comes with a wrong CRC-32 (``x-amz-checksum-crc32``) is refused. Not asked where uploads
    need no sums: over https, and for a local directory. False by default, until the probe has verified it."""
    characters_refused: str = ""
    """Characters that the store would change in a key; writing such a key raises KeyRefused."""
    notes: tuple[str, ...] = field(default=())
    """The adaptations, one line each, for the log and `stats`."""

    @property
    def spills(self) -> bool:
        """Incomplete parts can be put into separate objects and joined later. A local directory has no more space for
        that than staging."""
        return self.part_copy and self.parts_replaceable and self.name != "local"

    @property
    def keeps_holes(self) -> bool:
        """Holes of a body take no space in the store, and are not sent: only in a local directory."""
        return self.name == "local"

    @property
    def lists_anywhere(self) -> bool:
        """A LIST may begin after any key at the cost of a page. A local directory is read whole for that."""
        return self.name != "local"


@runtime_checkable
class ObjectStore(Protocol):
    """See the module's head for what always holds. Every method is blocking and one attempt."""

    def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        """Bytes [start, end) cut at the object's end; start < end, start < size or size 0 (then no bytes).

        Raises NotFound; PreconditionFailed where ``etag`` is given and the object is another version now.
        """

    def head(self, key: str) -> ObjectMeta:
        """With metadata. Raises NotFound."""

    def put(
        self, key: str, body: Body, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False,
        etag: str | None = None,
    ) -> ObjectMeta:  # fmt: skip
        """Store one object whole; ``mtime_ns`` of the answer may be this machine's clock.

        Raises PreconditionFailed with ``if_absent`` where the key exists, and with ``etag`` where another version is
        there, NotFound where none is (only if the store can tell: `Capabilities.put_if_match`).
        """

    def delete(self, key: str, *, etag: str | None = None) -> None:
        """Absent is success. Raises PreconditionFailed where ``etag`` is given and another version is there."""

    def delete_many(self, keys: Sequence[str]) -> Mapping[str, str]:
        """Delete up to 1000 keys, whatever version is there, in one request where the store can; for keys that only we
        write. Return why by key, of keys that failed."""

    def copy(self, source: str, target: str, *, etag: str | None = None) -> ObjectMeta:
        """Server-side, with metadata, up to 5 GiB. Raises NotFound, PreconditionFailed."""

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        start_after: str = "",
        token: str | None = None,
        keys_max: int = 1000,
    ) -> ListPage:
        """One page of keys with ``prefix``; keys under a common prefix up to ``delimiter`` collapse into it."""

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """The upload's id."""

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartRef:
        """``number`` from 1 to PARTS_MAX; the same number again replaces it. Raises NotFound for a gone upload."""

    def upload_part_copy(
        self, key: str, upload_id: str, number: int, source: str, start: int, end: int, *, etag: str | None = None
    ) -> PartRef:
        """Bytes [start, end) of object ``source`` become the part, server-side. Raises Unsupported, NotFound,
        PreconditionFailed."""

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartRef], *, if_absent: bool = False, etag: str | None = None
    ) -> ObjectMeta:
        """Publish. Raises NotFound where the upload is gone (perhaps because it was completed before), PartsRefused
        where some of its parts are, and as `put` (`Capabilities.complete_if_match`)."""

    def abort_multipart(self, key: str, upload_id: str) -> None:
        """Absent is success."""

    def list_multipart(self, prefix: str) -> Sequence[UploadRef]:
        """Unfinished uploads of keys with this prefix, all of them."""

    def time_ns(self) -> int:
        """The store's clock in ns since 1970: the date of the answer to one cheap request. S3 gives whole seconds, of
        which this is the middle; a local directory's clock is this machine's."""

    def close(self) -> None:
        """Close connections."""


class CachedGetter(Protocol):
    """GETs through a caching proxy. Their bytes are not trusted."""

    def get(self, key: str, start: int, end: int, etag: str) -> tuple[Fetched, bool]:
        """As `ObjectStore.get`, and whether the proxy says that it had the answer. Raises Unavailable for an answer
        that does not claim to be of this version, too."""


@runtime_checkable
class CacheableStore(Protocol):
    """A store whose requests a proxy can forward and whose responses it can cache."""

    def through_cache(self, url: str) -> CachedGetter | None:
        """GETs through the proxy at ``url``; None where this store's answers to them cannot be kept."""


class Sender(Protocol):
    """Sends the bodies of uploads."""

    @property
    def sends_sums(self) -> bool:
        """Whether uploads carry their CRC-32."""

    def use_sums(self, enabled: bool) -> None:
        """Set whether uploads carry their CRC-32 from now on."""

    def accepts(self, key: str, body: bytes, crc32: int, upload_id: str = "") -> bool:
        """Whether the store takes an object, or part 1 of an upload, whose CRC-32 is said to be ``crc32``."""


@runtime_checkable
class DirectoryStore(Protocol):
    """A store in a directory of this machine."""

    def free_bytes(self) -> int:
        """What this process may still write on the filesystem of the directory. Raises StoreError kinds."""

    def remove_own_directories(self) -> None:
        """Remove directories for temporary files and uploads that this object made and that are empty. Another process
        that needs one at this moment makes it again."""


@runtime_checkable
class NetworkStore(Protocol):
    """A store behind a server: the probe asks for its abilities, and its answers may be damaged on the way.

    What changes an object on a condition raises PreconditionFailed where the object is another version and the server
    checks.
    """

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def sender(self) -> Sender: ...
    @property
    def server(self) -> str:
        """The header ``Server`` of the last answer to GET; empty where there was none."""

    @property
    def is_guarded(self) -> bool:
        """Whether TLS protects the bytes, so that checksums are not needed."""

    def adapt(self, capabilities: Capabilities) -> None:
        """Use the results of the probe; called once, before serving."""

    def observe_get(self, key: str, start: int, end: int, *, etag: str | None = None) -> tuple[int, int]:
        """HTTP status and body length of a ranged GET."""

    def delete_if_match(self, key: str, etag: str) -> None: ...

    def has_md5_etag(self, key: str) -> bool:
        """False where the object is encrypted in a way that makes its ETag no MD5 sum, whatever the store makes of
        others. Raises NotFound."""
