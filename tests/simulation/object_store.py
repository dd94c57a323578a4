"""The object store of a simulation: in memory, strongly consistent, dated to the second, with S3's ETags.

What always holds: a request takes effect at one moment, in its call. A request that a real client makes of two (a HEAD
for a condition that the store ignores, then the change) raises `NextRequest` with the second: the network carries it
like a first one, and other nodes' requests come between. Every version ever stored is kept in `versions`, for checkers.
"""

from __future__ import annotations

import bisect
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lakefs_fuse.errors import NotFound, PreconditionFailed, StoreError
from lakefs_fuse.store.protocol import (
    Body,
    Capabilities,
    Fetched,
    ListPage,
    ObjectMeta,
    PartRef,
    UploadRef,
    pieces_of,
)
from tests.simulation.trace import describe_put

NS = 1_000_000_000
COMMITS, INDEX = ".lakefs/commits/", ".lakefs/index/"
PAGE_KEYS_MAX = 40
"""Names in a page of LIST: few, so that listings have several pages, between which others write."""


LAST = "\U0010ffff"
"""Sorts after every other character."""
LOOK_NS = 5 * NS
"""A DELETE follows the look that it is decided by within so long."""


class NextRequest(Exception):
    """The first request was answered; ``call`` is the second."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.call = call


@dataclass
class Upload:
    """A multipart upload under way."""

    key: str
    metadata: Mapping[str, str]
    started_ns: int
    parts: dict[int, tuple[PartRef, bytes]] = field(default_factory=dict)


class SimulatedStore:
    """An `ObjectStore`; see the module's head."""

    def __init__(self, capabilities: Capabilities, clock_ns: Callable[[], int]) -> None:
        self.capabilities = capabilities
        self.objects: dict[str, tuple[bytes, ObjectMeta]] = {}
        self.versions: dict[tuple[str, str], bytes] = {}
        """By key and ETag."""
        self.changes = 0
        """How often an object was stored or deleted."""
        self.uploads: dict[str, Upload] = {}
        self.requests: Counter[str] = Counter()
        self.trace: Callable[[str], None] | None = None
        self.arrived: Callable[[str, bytes], None] = lambda key, data: None
        """Called when the request that stores an object has come, whatever becomes of it."""
        self.deleted_unseen: Callable[[str, bytes], None] = lambda key, data: None
        """Called when a version was deleted that was stored after its deleter had looked at the key, just before."""
        self.sender = ""
        """Of the request that is being carried out."""
        self.senders: dict[str, str] = {}
        """Of the last version of each key."""
        self._listed: dict[str, ObjectMeta] = {}
        """Each object as LIST shows it."""
        self.copies: set[str] = set()
        """Keys whose object was made by a copy inside the store."""
        self.page_keys_max = PAGE_KEYS_MAX
        self._keys: list[str] = []
        self._clock_ns = clock_ns
        self._serial = 0
        self._stored: Counter[str] = Counter()
        """How many versions a key has had."""
        self._seen: dict[str, dict[str, dict[int, int]]] = {}
        """By sender and key: how many it had when the sender looked, with the time of the last such look."""

    def _note(self, what: str, key: str, detail: str = "") -> None:
        self.requests[what] += 1
        if self.trace is not None:
            if key.startswith(INDEX):  # RocksDB writes an id of its own into each file
                detail = ""
            self.trace(f"{self.sender}: {what} {key} {detail}".rstrip())

    def put_as(self, key: str, data: bytes, etag: str, metadata: Mapping[str, str] | None = None) -> ObjectMeta:
        """Store a version, whoever sends it."""
        now_ns = self._clock_ns() // NS * NS
        meta = ObjectMeta(key, len(data), etag, now_ns, dict(metadata or {}))
        self.changes += 1
        self.copies.discard(key)
        if key not in self.objects:
            bisect.insort(self._keys, key)
        self.objects[key] = (data, meta)
        self._listed[key] = ObjectMeta(key, len(data), etag, now_ns)
        self.versions[key, etag] = data
        self.senders[key] = self.sender
        self._stored[key] += 1
        self._seen.get(self.sender, {}).pop(key, None)
        return meta

    def _look(self, keys: Iterable[str]) -> None:
        now_ns, looks = self._clock_ns(), self._seen.setdefault(self.sender, {})
        for key in keys:
            if key not in looks:
                looks[key] = {}
            looks[key][self._stored[key]] = now_ns

    def _looks(self, key: str) -> list[int]:
        """What the sender has seen just before."""
        since_ns = self._clock_ns() - LOOK_NS
        looks = self._seen.get(self.sender, {}).get(key, {})
        return [seen for seen, at_ns in looks.items() if at_ns > since_ns]

    def remove(self, key: str) -> None:
        """Delete an object, whoever asks for it."""
        if self.objects.pop(key, None) is not None:
            self.changes += 1
            del self._listed[key], self._keys[bisect.bisect_left(self._keys, key)]

    def _found(self, key: str, etag: str | None = None) -> tuple[bytes, ObjectMeta]:
        if key not in self.objects:
            raise NotFound(f"no object {key}")
        if etag is not None and self.objects[key][1].etag != etag:
            raise PreconditionFailed(f"{key} is another version")
        return self.objects[key]

    # -- the protocol

    def get(self, key: str, start: int, end: int, *, etag: str | None = None) -> Fetched:
        self._note("get", key, f"{start}-{end} if {etag}")
        data, meta = self._found(key, etag)
        return Fetched(data[start:end], meta)

    def head(self, key: str) -> ObjectMeta:
        self._note("head", key)
        self._look([key])
        return self._found(key)[1]

    def put(
        self, key: str, body: Body, *, metadata: Mapping[str, str] | None = None, if_absent: bool = False,
        etag: str | None = None,
    ) -> ObjectMeta:  # fmt: skip
        data = b"".join(pieces_of(body))
        new = hashlib.md5(data, usedforsecurity=False).hexdigest()
        self._note("put", key, f"{new[:6]} {describe_put(key, data) if self.trace is not None else ''}")
        self.arrived(key, data)
        if etag is not None and self.capabilities.put_if_match:
            self._found(key, etag)
        if if_absent and self.capabilities.put_if_absent and key in self.objects:
            raise PreconditionFailed(f"{key} exists")
        return self.put_as(key, data, new, metadata)

    def delete(self, key: str, *, etag: str | None = None) -> None:
        if etag is not None and not self.capabilities.delete_if_match:
            self._note("head", key)
            if key in self.objects:
                self._found(key, etag)
                looked = self._stored[key]
                raise NextRequest(lambda: self._delete(key, looked=looked))
            return
        self._delete(key, etag)

    def _delete(self, key: str, etag: str | None = None, *, looked: int | None = None) -> None:
        """``looked``: how many versions the key had when the sender's client compared ETags itself, in place of the
        store; the request may be long on its way."""
        self._note("delete", key, f"if {etag}")
        if etag is not None and key in self.objects:
            self._found(key, etag)
        is_checked = etag is not None or not self.capabilities.delete_if_match
        looks = [*self._looks(key), *(() if looked is None else (looked,))]
        if key in self.objects and is_checked and any(seen < self._stored[key] for seen in looks):
            self.deleted_unseen(key, self.objects[key][0])
        self.remove(key)

    def delete_many(self, keys: Sequence[str]) -> Mapping[str, str]:
        for key in keys:
            self._delete(key)
        return {}

    def copy(self, source: str, target: str, *, etag: str | None = None) -> ObjectMeta:
        self._note("copy", target, f"from {source} if {etag}")
        data, meta = self._found(source, etag)
        etag = hashlib.md5(data, usedforsecurity=False).hexdigest()
        copied = self.put_as(target, data, etag, meta.metadata)
        self.copies.add(target)
        return copied

    def list_page(
        self,
        prefix: str,
        *,
        delimiter: str = "",
        start_after: str = "",
        token: str | None = None,
        keys_max: int = 1000,
    ) -> ListPage:
        self._note("list", prefix, f"after {token or start_after}")
        keys, begin = self._keys, token or start_after
        at = max(bisect.bisect_left(keys, prefix), bisect.bisect_right(keys, begin))
        end = bisect.bisect_left(keys, prefix + LAST, at)
        found: list[str] = []
        prefixes: list[str] = []
        last, most = "", min(keys_max, self.page_keys_max)
        if not delimiter:
            found = keys[at : min(end, at + most)]
            last, at = found[-1] if found else "", at + len(found)
        while at < end and len(found) + len(prefixes) < most:
            key = keys[at]
            cut = key.find(delimiter, len(prefix)) if delimiter else -1
            if cut >= 0:
                last = key[: cut + 1]
                if last > begin:
                    prefixes.append(last)
                at = bisect.bisect_left(keys, last + LAST, at)
            else:
                found.append(key)
                last, at = key, at + 1
        self._look(found)
        return ListPage([self._listed[key] for key in found], prefixes, last if at < end else None)

    def create_multipart(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        self._serial += 1
        upload_id = f"upload-{self._serial}"
        self._note("create_multipart", key, upload_id)
        self.uploads[upload_id] = Upload(key, dict(metadata or {}), self._clock_ns())
        return upload_id

    def _upload(self, key: str, upload_id: str) -> Upload:
        upload = self.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise NotFound(f"no upload {upload_id} of {key}")
        return upload

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> PartRef:
        return self._store_part(key, upload_id, number, b"".join(pieces_of(body)))

    def _store_part(self, key: str, upload_id: str, number: int, data: bytes) -> PartRef:
        self._note("part", key, f"{upload_id} {number}")
        upload = self._upload(key, upload_id)
        ref = PartRef(number, hashlib.md5(data, usedforsecurity=False).hexdigest(), len(data))
        upload.parts[number] = (ref, data)
        return ref

    def upload_part_copy(
        self, key: str, upload_id: str, number: int, source: str, start: int, end: int, *, etag: str | None = None
    ) -> PartRef:
        data, _ = self._found(source, etag)
        return self._store_part(key, upload_id, number, data[start:end])

    def complete_multipart(
        self, key: str, upload_id: str, parts: Sequence[PartRef], *, if_absent: bool = False, etag: str | None = None
    ) -> ObjectMeta:
        if if_absent and not self.capabilities.complete_if_absent:
            self._note("head", key)
            if key in self.objects:
                raise PreconditionFailed(f"{key} exists")
            raise NextRequest(lambda: self._complete(key, upload_id, parts))
        return self._complete(key, upload_id, parts, if_absent=if_absent, etag=etag)

    def _complete(
        self, key: str, upload_id: str, parts: Sequence[PartRef], *, if_absent: bool = False, etag: str | None = None
    ) -> ObjectMeta:
        self._note("complete", key, upload_id)
        upload = self._upload(key, upload_id)
        if not parts or [part.number for part in parts] != sorted({part.number for part in parts}):
            raise StoreError("parts out of order")
        if any(part.number not in upload.parts or upload.parts[part.number][0].etag != part.etag for part in parts):
            raise StoreError("a part is not what was uploaded")
        data = b"".join(upload.parts[part.number][1] for part in parts)
        self.arrived(key, data)
        if etag is not None and self.capabilities.complete_if_match:
            self._found(key, etag)
        if if_absent and key in self.objects:
            raise PreconditionFailed(f"{key} exists")
        sums = b"".join(bytes.fromhex(part.etag) for part in parts)
        new = f"{hashlib.md5(sums, usedforsecurity=False).hexdigest()}-{len(parts)}"
        del self.uploads[upload_id]
        return self.put_as(key, data, new, upload.metadata)

    def abort_multipart(self, key: str, upload_id: str) -> None:
        self._note("abort_multipart", key, upload_id)
        self.uploads.pop(upload_id, None)

    def list_multipart(self, prefix: str) -> Sequence[UploadRef]:
        self._note("list_multipart", prefix)
        return [
            UploadRef(upload.key, upload_id, upload.started_ns)
            for upload_id, upload in self.uploads.items()
            if upload.key.startswith(prefix)
        ]

    def time_ns(self) -> int:
        self._note("time", "")
        return self._clock_ns() // NS * NS + NS // 2

    def close(self) -> None:
        """Nothing is held."""
